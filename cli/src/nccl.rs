//! NCCL's C interface, opened at run time: Strata's own library or any other.
//!
//! Everything unsafe of the command's measuring is here. Buffers are [`Region`]s, checked against the length that a call
//! will touch; handles live no longer than the library.

use libloading::Library as Object;
use std::ffi::{c_int, c_void, CStr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;
use strata::dtype::{DataType, ScalarBytes};
use strata::error::{Error, Result};
use strata::interface::layouts::UniqueIdBytes;
use strata::interface::pointer::{Buffer, Callback, ConstPtr, Ptr, Text};
use strata::interface::signatures::{NcclFunctions, StrataFunctions};
use strata::interface::types::{CommHandle, OpCode, Residence, Status, StreamHandle, TypeCode};
use strata::memory::{Arena, Region};

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
pub struct UniqueId(UniqueIdBytes);

impl UniqueId {
    /// Its bytes, to be sent to other processes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0 .0
    }

    /// The id with these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<UniqueId> {
        let bytes = bytes.try_into().map_err(|_| Error::Remote(format!("a unique id of {} bytes", bytes.len())))?;
        Ok(UniqueId(UniqueIdBytes(bytes)))
    }
}

/// Calls a function of the interface, or says that the library lacks it, or turns its code into an error.
macro_rules! call {
    ($library:expr, own $($call:tt)*) => { call!(@in own, $library, $($call)*) };
    (@in $list:ident, $library:expr, $function:ident($($argument:expr),*)) => {
        $library.check(stringify!($function), {
            // SAFETY: arguments as NCCL's header demands; because buffers are regions of at least the length that the
            // call touches (asserted by the caller), handles are alive, and out-pointers are locals.
            unsafe { $library.$list.$function($($argument),*) }
        })
    };
    ($library:expr, $($call:tt)*) => { call!(@in functions, $library, $($call)*) };
}

/// An opened library.
pub struct Library {
    functions: NcclFunctions,
    own: StrataFunctions,
    path: PathBuf,
    // Declared last: the functions above must not outlive it.
    _object: Object,
}

/// Where a library is looked for, in order: beside the executable, in `../lib`, in the Python package that pip has installed
/// together with the command, and by NCCL's own name.
fn candidates(executable: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let Some(folder) = executable.parent() {
        found.push(folder.join("libstrata.so"));
        if let Some(lib) = folder.parent().map(|above| above.join("lib")) {
            found.push(lib.join("libstrata.so"));
            // `lib/python3.11/site-packages`; Debian calls it `dist-packages` outside of environments.
            for python in std::fs::read_dir(lib).into_iter().flatten().flatten() {
                if python.file_name().to_string_lossy().starts_with("python") {
                    let packages = ["site-packages", "dist-packages"];
                    found.extend(packages.map(|folder| python.path().join(folder).join("strata/lib/libstrata.so")));
                }
            }
        }
    }
    found.retain(|path| path.exists());
    found.push(PathBuf::from("libnccl.so.2"));
    found
}

impl Library {
    /// Opens the library at `path`, or the first of [`candidates`].
    pub fn open(path: Option<&Path>) -> Result<Library> {
        let path = path.map(Path::to_path_buf).unwrap_or_else(|| {
            let executable = std::env::current_exe().unwrap_or_default();
            candidates(&executable).swap_remove(0)
        });
        // SAFETY: the library's constructors run; because opening it is what the user asked for.
        let object = unsafe { Object::new(&path) }
            .map_err(|error| Error::System(format!("cannot open {}: {error}", path.display())))?;
        let address = |name: &CStr| {
            // SAFETY: the symbol must be of this type; because an address is all that is asked for.
            let symbol = unsafe { object.get::<*const c_void>(name.to_bytes_with_nul()) }.ok()?;
            // SAFETY: the library must stay; because it is kept beside the addresses.
            unsafe { symbol.try_as_raw_ptr() }.map(<*mut c_void>::cast_const)
        };
        // SAFETY: the functions must be those of the interface; because NCCL's headers have declared them so in every
        // release, and Strata's own so far.
        let functions = unsafe { NcclFunctions::find(address) };
        // SAFETY: the functions must be those of the interface; because Strata alone has these names.
        let own = unsafe { StrataFunctions::find(address) };
        Ok(Library { functions, own, path, _object: object })
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, name: &str, status: Option<Status>) -> Result<()> {
        let status = match status {
            None => return Err(Error::InvalidUsage(format!("{} has no {name}", self.path.display()))),
            Some(Status::SUCCESS) => return Ok(()),
            Some(status) => status,
        };
        // SAFETY: the code must be one that NCCL can name; because it has a text for every other integer, too.
        let kind = text(unsafe { self.functions.ncclGetErrorString(status) });
        // SAFETY: the communicator may be null; because NCCL ignores it.
        let last = text(unsafe { self.functions.ncclGetLastError(CommHandle::NULL) });
        Err(Error::System(format!("{name}: {kind}{}{last}", if last.is_empty() { "" } else { ": " })))
    }

    /// `ncclGetVersion` as `2.32.3`.
    pub fn version(&self) -> Result<String> {
        let mut code = 0;
        call!(self, ncclGetVersion(out(&mut code)))?;
        Ok(format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100))
    }

    /// A new unique id.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueIdBytes([0; 128]);
        call!(self, ncclGetUniqueId(out(&mut id)))?;
        Ok(UniqueId(id))
    }

    /// Communicators for `nranks` ranks of this process.
    pub fn init_all(&self, nranks: usize) -> Result<Vec<Comm<'_>>> {
        let mut handles = vec![CommHandle::NULL; nranks];
        // SAFETY: there must be room for so many handles during the call; because the vector has them.
        let places = unsafe { Ptr::to(handles.as_mut_ptr()) };
        call!(self, ncclCommInitAll(places, nranks as c_int, ConstPtr::null()))?;
        Ok(handles.into_iter().map(|handle| Comm { library: self, handle, stream: None }).collect())
    }

    /// Communicators for some consecutive ranks, from `first`, of a job of `nranks`.
    pub fn init_ranks(&self, nranks: usize, id: UniqueId, first: usize, here: usize) -> Result<Vec<Comm<'_>>> {
        let mut handles = vec![CommHandle::NULL; here];
        self.group(|| {
            for (index, handle) in handles.iter_mut().enumerate() {
                let (handle, rank) = (out(handle), (first + index) as c_int);
                call!(self, ncclCommInitRank(handle, nranks as c_int, id.0, rank))?;
            }
            Ok(())
        })?;
        Ok(handles.into_iter().map(|handle| Comm { library: self, handle, stream: None }).collect())
    }

    /// Runs calls inside `ncclGroupStart` and `ncclGroupEnd`.
    pub fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        call!(self, ncclGroupStart())?;
        let outcome = calls();
        let end = call!(self, ncclGroupEnd());
        outcome.and(end)
    }

    /// `len` bytes from `ncclMemAlloc`.
    pub fn allocate(&self, len: usize) -> Result<Allocation<'_>> {
        let mut start = Buffer::NULL;
        call!(self, ncclMemAlloc(out(&mut start), len.max(1)))?;
        Ok(Allocation { library: self, start, len })
    }
}

/// A place for a call's result.
fn out<T>(place: &mut T) -> Ptr<T> {
    // SAFETY: the place must be there during the call; because calls of this file end before their locals do. The handles of
    // a group are written by its end, which comes before theirs.
    unsafe { Ptr::to(place) }
}

/// Memory for a call.
fn buffer<T>(start: *const T) -> Buffer {
    // SAFETY: so much memory as the call touches must be there until it has ended; because `issue` looks at the length, and
    // whoever calls keeps the buffers.
    unsafe { Buffer::from_address(start as usize) }
}

/// Numbers that a call reads before it returns.
fn numbers(all: &[usize]) -> ConstPtr<usize> {
    // SAFETY: the target must be there, unchanged, for as long as the call reads it; because the slices of a call live until it has returned.
    unsafe { Ptr::to(all.as_ptr().cast_mut()) }.as_const()
}

/// A text of the library's, static or of its last error.
fn text(text: Option<Text>) -> String {
    text.filter(|text| !text.is_null()).and_then(|text| text.get("text").ok()).unwrap_or_default()
}

/// Ordinary memory for calls of the library.
pub struct HostBuffer(Arena);

impl HostBuffer {
    /// So many bytes, zeroed; `None` where there is no memory for them.
    pub fn try_new(len: usize) -> Option<HostBuffer> {
        Arena::try_new(len).map(HostBuffer)
    }

    /// All of it, valid for as long as the buffer lives.
    pub fn region(&mut self) -> Region {
        // SAFETY: the bytes must be there for every use; because the command keeps its buffers until its calls have ended,
        // or ends with an error.
        unsafe { self.0.region().unbound() }
    }
}

/// Memory from `ncclMemAlloc`.
pub struct Allocation<'a> {
    library: &'a Library,
    start: Buffer,
    len: usize,
}

impl Allocation<'_> {
    /// All of it, valid for as long as the allocation lives.
    pub fn region(&self) -> Region {
        // SAFETY: the bytes are readable and writable; because ncclMemAlloc gave at least `len`, and no reference exists.
        unsafe { Region::new(self.start.address() as *mut u8, self.len) }
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        // Nothing can be done about memory that cannot be given back.
        let _ = call!(self.library, ncclMemFree(self.start));
    }
}

/// A communicator, destroyed when dropped.
pub struct Comm<'a> {
    library: &'a Library,
    handle: CommHandle,
    // Dropped after the communicator, whose end ends what is queued.
    stream: Option<Stream<'a>>,
}

/// A stream of Strata's on the host: what is queued runs in order, on a thread of its own. Its end waits for all of it.
pub struct Stream<'a> {
    library: &'a Library,
    handle: StreamHandle,
}

/// When a stream came to a place in its queue.
#[derive(Default)]
struct Passing {
    when: Mutex<Option<Instant>>,
    passed: Condvar,
}

/// A place in a stream's queue.
pub struct Mark(Arc<Passing>);

impl Mark {
    /// Waits until the stream comes here, after success as after failure; the library's calls have limits of their own.
    pub fn wait(&self) -> Instant {
        let mut when = self.0.when.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        loop {
            match *when {
                Some(instant) => return instant,
                None => when = self.0.passed.wait(when).unwrap_or_else(|poisoned| poisoned.into_inner()),
            }
        }
    }
}

/// What a stream calls at a mark.
extern "C" fn pass(argument: usize) {
    // SAFETY: the pointer must come from `Arc::into_raw` and be used once; because `mark` gives such a one, and a stream
    // calls once for each mark.
    let passing = unsafe { Arc::from_raw(argument as *const Passing) };
    *passing.when.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Instant::now());
    passing.passed.notify_all();
}

impl Stream<'_> {
    /// Marks the place behind all that is queued.
    pub fn mark(&self) -> Result<Mark> {
        let passing = Arc::new(Passing::default());
        let argument = Arc::into_raw(passing.clone());
        let (callback, place) = (Callback::to(pass), buffer(argument));
        let queued = call!(self.library, own strataStreamAddCallback(self.handle, callback, place));
        if queued.is_err() {
            // SAFETY: the pointer is from `into_raw` above; because what was refused will not be called.
            drop(unsafe { Arc::from_raw(argument) });
        }
        queued.map(|()| Mark(passing))
    }

    /// Waits for all that is queued; the first error since the last time.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.library, own strataStreamSynchronize(self.handle))
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // Buffers of what is queued are freed next. Errors have been told, or are not asked for any more.
        let _ = self.synchronize();
        let _ = call!(self.library, own strataStreamDestroy(self.handle));
    }
}

/// Where a collective's data is and what its elements are.
#[derive(Debug, Clone, Copy)]
pub struct Buffers {
    /// The send buffer.
    pub send: Region,
    /// The receive buffer.
    pub recv: Region,
    /// Elements, as the call counts them.
    pub count: usize,
    /// The element type.
    pub dtype: DataType,
}

/// A collective of the C interface, with what only it needs. Operations are `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call<'b> {
    AllReduce { op: c_int },
    ReduceScatter { op: c_int },
    AllGather,
    Broadcast { root: usize },
    Reduce { op: c_int, root: usize },
    AllToAll,
    Gather { root: usize },
    Scatter { root: usize },
    Send { to: usize },
    Recv { from: usize },
    AllGatherV { counts: &'b [usize] },
    ReduceScatterV { counts: &'b [usize], op: c_int },
    AllToAllV { sent: &'b [usize], received: &'b [usize] },
}

impl<'a> Comm<'a> {
    /// The library it belongs to.
    pub fn library(&self) -> &'a Library {
        self.library
    }

    /// The communicator of the ranks that give the same colour, in the order of their keys.
    pub fn split(&self, colour: usize, key: usize) -> Result<Comm<'a>> {
        let mut handle = CommHandle::NULL;
        let (out, none) = (out(&mut handle), Ptr::null());
        call!(self.library, ncclCommSplit(self.handle, colour as c_int, key as c_int, out, none))?;
        Ok(Comm { library: self.library, handle, stream: None })
    }

    /// Gives it a stream of its own, for all calls from now on.
    pub fn add_stream(&mut self) -> Result<()> {
        let mut handle = StreamHandle::NULL;
        call!(self.library, own strataStreamCreate(out(&mut handle)))?;
        self.stream = Some(Stream { library: self.library, handle });
        Ok(())
    }

    /// Its own stream, if it has one.
    pub fn stream(&self) -> Option<&Stream<'a>> {
        self.stream.as_ref()
    }

    /// Issues one call on its stream, or the null stream. `send_len` and `recv_len`: the bytes that it may touch, which the buffers
    /// must have.
    pub fn issue(&self, call: Call<'_>, buffers: &Buffers, send_len: usize, recv_len: usize) -> Result<()> {
        let Buffers { send, recv, count, dtype } = *buffers;
        assert!(send.len() >= send_len && recv.len() >= recv_len, "buffers too short for {call:?}");
        let (send, recv) = (buffer(send.as_ptr()).as_const(), buffer(recv.as_ptr()));
        let (dtype, library, comm) = (TypeCode(dtype.code()), self.library, self.handle);
        let stream = self.stream.as_ref().map_or(StreamHandle::NULL, |stream| stream.handle);
        match call {
            Call::AllReduce { op } => call!(library, ncclAllReduce(send, recv, count, dtype, OpCode(op), comm, stream)),
            Call::ReduceScatter { op } => {
                call!(library, ncclReduceScatter(send, recv, count, dtype, OpCode(op), comm, stream))
            }
            Call::AllGather => call!(library, ncclAllGather(send, recv, count, dtype, comm, stream)),
            Call::Broadcast { root } => {
                call!(library, ncclBroadcast(send, recv, count, dtype, root as c_int, comm, stream))
            }
            Call::Reduce { op, root } => {
                call!(library, ncclReduce(send, recv, count, dtype, OpCode(op), root as c_int, comm, stream))
            }
            Call::AllToAll => call!(library, ncclAlltoAll(send, recv, count, dtype, comm, stream)),
            Call::Gather { root } => {
                call!(library, ncclGather(send, recv, count, dtype, root as c_int, comm, stream))
            }
            Call::Scatter { root } => {
                call!(library, ncclScatter(send, recv, count, dtype, root as c_int, comm, stream))
            }
            Call::Send { to } => call!(library, ncclSend(send, count, dtype, to as c_int, comm, stream)),
            Call::Recv { from } => call!(library, ncclRecv(recv, count, dtype, from as c_int, comm, stream)),
            Call::AllGatherV { counts } => {
                let counts = numbers(counts);
                call!(library, own strataAllGatherV(send, recv, counts, ConstPtr::null(), dtype, comm, stream))
            }
            Call::ReduceScatterV { counts, op } => {
                let (counts, packed, op) = (numbers(counts), ConstPtr::null(), OpCode(op));
                call!(library, own strataReduceScatterV(send, recv, counts, packed, dtype, op, comm, stream))
            }
            Call::AllToAllV { sent, received } => {
                let (sent, received, packed) = (numbers(sent), numbers(received), ConstPtr::null());
                call!(library, own strataAllToAllV(send, sent, packed, recv, received, packed, dtype, comm, stream))
            }
        }
    }

    /// Waits until the first bytes of a receive buffer are final in the calls that are queued.
    pub fn wait_range(&self, recv: Region, bytes: usize) -> Result<()> {
        let recv = buffer(recv.part(0, bytes).as_ptr()).as_const();
        call!(self.library, own strataStreamWaitRange(StreamHandle::NULL, recv, bytes))
    }

    /// A `ncclRedOpCreatePreMulSum` operation with this scalar.
    pub fn create_op(&self, mut scalar: ScalarBytes, dtype: DataType) -> Result<c_int> {
        const HOST_IMMEDIATE: Residence = Residence(1);
        let mut op = OpCode(0);
        let (scalar, dtype) = (buffer(&raw mut scalar), TypeCode(dtype.code()));
        call!(self.library, ncclRedOpCreatePreMulSum(out(&mut op), scalar, dtype, HOST_IMMEDIATE, self.handle))?;
        Ok(op.0)
    }

    /// Gives up an operation of [`create_op`](Comm::create_op).
    pub fn destroy_op(&self, op: c_int) -> Result<()> {
        call!(self.library, ncclRedOpDestroy(OpCode(op), self.handle))
    }

    /// What Strata says of the machine that it is on, in at most so many bytes.
    pub fn describe(&self, most: usize) -> Result<String> {
        let mut told = vec![0u8; most];
        let text = buffer(told.as_mut_ptr());
        call!(self.library, own strataCommDescribe(self.handle, text, most))?;
        told.truncate(told.iter().position(|&byte| byte == 0).unwrap_or(most));
        Ok(String::from_utf8_lossy(&told).into_owned())
    }

    /// Destroys the communicator.
    pub fn destroy(mut self) -> Result<()> {
        let handle = std::mem::replace(&mut self.handle, CommHandle::NULL);
        call!(self.library, ncclCommDestroy(handle))
    }
}

impl Drop for Comm<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // Reached after an error only: destroying would wait for the other ranks.
            let _ = call!(self.library, ncclCommAbort(self.handle));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_beside_the_command_and_where_pip_puts_both() {
        let root = std::env::temp_dir().join(format!("strata-candidates-{}", std::process::id()));
        let places = ["bin", "lib", "lib/python3.11/site-packages/strata/lib"].map(|place| root.join(place));
        let command = places[0].join("strata");
        let mut found = vec![PathBuf::from("libnccl.so.2")];
        for place in places.iter().rev() {
            std::fs::create_dir_all(place).unwrap();
            assert_eq!(candidates(&command), found, "before it is in {}", place.display());
            std::fs::write(place.join("libstrata.so"), "").unwrap();
            found.insert(0, place.join("libstrata.so"));
        }
        assert_eq!(candidates(&command), found);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
