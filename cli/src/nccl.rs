//! NCCL's C interface, opened at run time: Strata's own library or any other.
//!
//! Everything unsafe of the command's measuring is here. Buffers are [`Region`]s, checked against the length that a call
//! will touch; handles live no longer than the library.

use libloading::Library as Object;
use std::ffi::{c_char, c_int, c_void, CStr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;
use strata::dtype::{DataType, ScalarBytes};
use strata::error::{Error, Result};
use strata::memory::{Arena, Region};

/// `ncclUniqueId`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    bytes: [u8; 128],
}

impl UniqueId {
    /// Its bytes, to be sent to other processes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The id with these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<UniqueId> {
        let bytes = bytes.try_into().map_err(|_| Error::Remote(format!("a unique id of {} bytes", bytes.len())))?;
        Ok(UniqueId { bytes })
    }
}

type Handle = *mut c_void;
type Const = *const c_void;
type Mut = *mut c_void;
type Rooted = unsafe extern "C" fn(Const, Mut, usize, c_int, c_int, Handle, Handle) -> c_int;

macro_rules! interface {
    ($($field:ident = $symbol:literal: $type:ty,)*) => {
        /// The functions found; a missing one is an error only when it is called.
        struct Interface {
            $($field: Option<$type>,)*
        }

        impl Interface {
            fn load(object: &Object) -> Interface {
                Interface {
                    // SAFETY: the symbol has this type; because NCCL's headers have declared it so in every release.
                    $($field: unsafe { object.get::<$type>($symbol) }.ok().map(|symbol| *symbol),)*
                }
            }
        }

        /// The name of each function, for messages.
        mod name {
            $(#[allow(non_upper_case_globals, dead_code)] pub const $field: &[u8] = $symbol;)*
        }
    };
}

interface! {
    get_version = b"ncclGetVersion": unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id = b"ncclGetUniqueId": unsafe extern "C" fn(*mut UniqueId) -> c_int,
    comm_init_rank = b"ncclCommInitRank": unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    comm_init_all = b"ncclCommInitAll": unsafe extern "C" fn(*mut Handle, c_int, *const c_int) -> c_int,
    comm_split = b"ncclCommSplit": unsafe extern "C" fn(Handle, c_int, c_int, *mut Handle, Mut) -> c_int,
    comm_destroy = b"ncclCommDestroy": unsafe extern "C" fn(Handle) -> c_int,
    comm_abort = b"ncclCommAbort": unsafe extern "C" fn(Handle) -> c_int,
    error_string = b"ncclGetErrorString": unsafe extern "C" fn(c_int) -> *const c_char,
    last_error = b"ncclGetLastError": unsafe extern "C" fn(Handle) -> *const c_char,
    group_start = b"ncclGroupStart": unsafe extern "C" fn() -> c_int,
    group_end = b"ncclGroupEnd": unsafe extern "C" fn() -> c_int,
    mem_alloc = b"ncclMemAlloc": unsafe extern "C" fn(*mut Mut, usize) -> c_int,
    mem_free = b"ncclMemFree": unsafe extern "C" fn(Mut) -> c_int,
    op_create = b"ncclRedOpCreatePreMulSum":
        unsafe extern "C" fn(*mut c_int, Mut, c_int, c_int, Handle) -> c_int,
    op_destroy = b"ncclRedOpDestroy": unsafe extern "C" fn(c_int, Handle) -> c_int,
    all_reduce = b"ncclAllReduce": Rooted,
    reduce_scatter = b"ncclReduceScatter": Rooted,
    broadcast = b"ncclBroadcast": Rooted,
    gather = b"ncclGather": Rooted,
    scatter = b"ncclScatter": Rooted,
    reduce = b"ncclReduce": unsafe extern "C" fn(Const, Mut, usize, c_int, c_int, c_int, Handle, Handle) -> c_int,
    all_gather = b"ncclAllGather": unsafe extern "C" fn(Const, Mut, usize, c_int, Handle, Handle) -> c_int,
    all_to_all = b"ncclAlltoAll": unsafe extern "C" fn(Const, Mut, usize, c_int, Handle, Handle) -> c_int,
    send = b"ncclSend": unsafe extern "C" fn(Const, usize, c_int, c_int, Handle, Handle) -> c_int,
    recv = b"ncclRecv": unsafe extern "C" fn(Mut, usize, c_int, c_int, Handle, Handle) -> c_int,
    stream_create = b"strataStreamCreate": unsafe extern "C" fn(*mut Handle) -> c_int,
    stream_destroy = b"strataStreamDestroy": unsafe extern "C" fn(Handle) -> c_int,
    stream_synchronize = b"strataStreamSynchronize": unsafe extern "C" fn(Handle) -> c_int,
    stream_callback = b"strataStreamAddCallback":
        unsafe extern "C" fn(Handle, unsafe extern "C" fn(Mut), Mut) -> c_int,
    comm_describe = b"strataCommDescribe": unsafe extern "C" fn(Handle, Mut, usize) -> c_int,
}

/// Calls a function of the interface, or says that the library lacks it, or turns its code into an error.
macro_rules! call {
    ($library:expr, $function:ident($($argument:expr),*)) => {
        match $library.interface.$function {
            None => Err($library.lacks(name::$function)),
            // SAFETY: arguments as NCCL's header demands; because buffers are regions of at least the length that the
            // call touches (asserted by the caller), handles are alive, and out-pointers are locals.
            Some(function) => $library.check(name::$function, unsafe { function($($argument),*) }),
        }
    };
}

/// An opened library.
pub struct Library {
    interface: Interface,
    path: PathBuf,
    // Declared last: the functions above must not outlive it.
    _object: Object,
}

/// Where a library is looked for, in order: beside the executable, in `../lib`, and by NCCL's own name.
pub fn candidates() -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let Some(folder) = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_path_buf)) {
        found.push(folder.join("libstrata.so"));
        found.extend(folder.parent().map(|above| above.join("lib/libstrata.so")));
    }
    found.retain(|path| path.exists());
    found.push(PathBuf::from("libnccl.so.2"));
    found
}

impl Library {
    /// Opens the library at `path`, or the first of [`candidates`].
    pub fn open(path: Option<&Path>) -> Result<Library> {
        let path = path.map(Path::to_path_buf).unwrap_or_else(|| candidates().swap_remove(0));
        // SAFETY: the library's constructors run; because opening it is what the user asked for.
        let object = unsafe { Object::new(&path) }
            .map_err(|error| Error::System(format!("cannot open {}: {error}", path.display())))?;
        Ok(Library { interface: Interface::load(&object), path, _object: object })
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn lacks(&self, name: &[u8]) -> Error {
        Error::InvalidUsage(format!("{} has no {}", self.path.display(), String::from_utf8_lossy(name)))
    }

    fn check(&self, name: &[u8], code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let kind = self.interface.error_string.map(|function| {
            // SAFETY: the code must be one that NCCL can name; because it has a text for every other integer, too.
            text(unsafe { function(code) })
        });
        let last = self.interface.last_error.map(|function| {
            // SAFETY: the communicator may be null; because NCCL ignores it.
            text(unsafe { function(std::ptr::null_mut()) })
        });
        let (kind, last) = (kind.unwrap_or_default(), last.unwrap_or_default());
        let name = String::from_utf8_lossy(name);
        Err(Error::System(format!("{name}: {kind}{}{last}", if last.is_empty() { "" } else { ": " })))
    }

    /// `ncclGetVersion` as `2.32.3`.
    pub fn version(&self) -> Result<String> {
        let mut code = 0;
        call!(self, get_version(&mut code))?;
        Ok(format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100))
    }

    /// A new unique id.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId { bytes: [0; 128] };
        call!(self, get_unique_id(&mut id))?;
        Ok(id)
    }

    /// Communicators for `nranks` ranks of this process.
    pub fn init_all(&self, nranks: usize) -> Result<Vec<Comm<'_>>> {
        let mut handles = vec![std::ptr::null_mut(); nranks];
        call!(self, comm_init_all(handles.as_mut_ptr(), nranks as c_int, std::ptr::null()))?;
        Ok(handles.into_iter().map(|handle| Comm { library: self, handle, stream: None }).collect())
    }

    /// Communicators for some consecutive ranks, from `first`, of a job of `nranks`.
    pub fn init_ranks(&self, nranks: usize, id: UniqueId, first: usize, here: usize) -> Result<Vec<Comm<'_>>> {
        let mut handles = vec![std::ptr::null_mut(); here];
        self.group(|| {
            for (index, handle) in handles.iter_mut().enumerate() {
                let handle: *mut Handle = handle;
                call!(self, comm_init_rank(handle, nranks as c_int, id, (first + index) as c_int))?;
            }
            Ok(())
        })?;
        Ok(handles.into_iter().map(|handle| Comm { library: self, handle, stream: None }).collect())
    }

    /// Runs calls inside `ncclGroupStart` and `ncclGroupEnd`.
    pub fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        call!(self, group_start())?;
        let outcome = calls();
        let end = call!(self, group_end());
        outcome.and(end)
    }

    /// `len` bytes from `ncclMemAlloc`.
    pub fn allocate(&self, len: usize) -> Result<Allocation<'_>> {
        let mut start = std::ptr::null_mut();
        call!(self, mem_alloc(&mut start, len.max(1)))?;
        Ok(Allocation { library: self, start, len })
    }
}

fn text(start: *const c_char) -> String {
    if start.is_null() {
        return String::new();
    }
    // SAFETY: the text ends with a zero byte and stays; because NCCL returns static or last-error texts.
    unsafe { CStr::from_ptr(start) }.to_string_lossy().into_owned()
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
    start: *mut c_void,
    len: usize,
}

impl Allocation<'_> {
    /// All of it, valid for as long as the allocation lives.
    pub fn region(&self) -> Region {
        // SAFETY: the bytes are readable and writable; because ncclMemAlloc gave at least `len`, and no reference exists.
        unsafe { Region::new(self.start.cast(), self.len) }
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        // Nothing can be done about memory that cannot be given back.
        let _ = call!(self.library, mem_free(self.start));
    }
}

/// A communicator, destroyed when dropped.
pub struct Comm<'a> {
    library: &'a Library,
    handle: Handle,
    // Dropped after the communicator, whose end ends what is queued.
    stream: Option<Stream<'a>>,
}

/// A stream of Strata's on the host: what is queued runs in order, on a thread of its own. Its end waits for all of it.
pub struct Stream<'a> {
    library: &'a Library,
    handle: Handle,
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
///
/// # Safety
/// `argument` came from `Arc::<Passing>::into_raw` and is used once.
unsafe extern "C" fn pass(argument: Mut) {
    // SAFETY: the pointer must come from `Arc::into_raw` and be used once; because the caller promises both.
    let passing = unsafe { Arc::from_raw(argument.cast_const().cast::<Passing>()) };
    *passing.when.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Instant::now());
    passing.passed.notify_all();
}

impl Stream<'_> {
    /// Marks the place behind all that is queued.
    pub fn mark(&self) -> Result<Mark> {
        let passing = Arc::new(Passing::default());
        let argument = Arc::into_raw(passing.clone()).cast_mut().cast::<c_void>();
        let queued = call!(self.library, stream_callback(self.handle, pass, argument));
        if queued.is_err() {
            // SAFETY: the pointer is from `into_raw` above; because what was refused will not be called.
            drop(unsafe { Arc::from_raw(argument.cast_const().cast::<Passing>()) });
        }
        queued.map(|()| Mark(passing))
    }

    /// Waits for all that is queued; the first error since the last time.
    pub fn synchronize(&self) -> Result<()> {
        call!(self.library, stream_synchronize(self.handle))
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // Buffers of what is queued are freed next. Errors have been told, or are not asked for any more.
        let _ = self.synchronize();
        let _ = call!(self.library, stream_destroy(self.handle));
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
pub enum Call {
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
}

impl<'a> Comm<'a> {
    /// The library it belongs to.
    pub fn library(&self) -> &'a Library {
        self.library
    }

    /// The communicator of the ranks that give the same colour, in the order of their keys.
    pub fn split(&self, colour: usize, key: usize) -> Result<Comm<'a>> {
        let mut handle = std::ptr::null_mut();
        let config = std::ptr::null_mut();
        call!(self.library, comm_split(self.handle, colour as c_int, key as c_int, &mut handle, config))?;
        Ok(Comm { library: self.library, handle, stream: None })
    }

    /// Gives it a stream of its own, for all calls from now on.
    pub fn add_stream(&mut self) -> Result<()> {
        let mut handle = std::ptr::null_mut();
        call!(self.library, stream_create(&mut handle))?;
        self.stream = Some(Stream { library: self.library, handle });
        Ok(())
    }

    /// Its own stream, if it has one.
    pub fn stream(&self) -> Option<&Stream<'a>> {
        self.stream.as_ref()
    }

    /// Issues one call on its stream, or the null stream. `send_len` and `recv_len`: the bytes that it may touch, which the buffers
    /// must have.
    pub fn issue(&self, call: Call, buffers: &Buffers, send_len: usize, recv_len: usize) -> Result<()> {
        let Buffers { send, recv, count, dtype } = *buffers;
        assert!(send.len() >= send_len && recv.len() >= recv_len, "buffers too short for {call:?}");
        let (send, recv) = (send.as_ptr().cast_const().cast::<c_void>(), recv.as_ptr().cast::<c_void>());
        let (dtype, library, handle) = (dtype as c_int, self.library, self.handle);
        let stream = self.stream.as_ref().map_or(std::ptr::null_mut(), |stream| stream.handle);
        match call {
            Call::AllReduce { op } => call!(library, all_reduce(send, recv, count, dtype, op, handle, stream)),
            Call::ReduceScatter { op } => call!(library, reduce_scatter(send, recv, count, dtype, op, handle, stream)),
            Call::AllGather => call!(library, all_gather(send, recv, count, dtype, handle, stream)),
            Call::Broadcast { root } => {
                call!(library, broadcast(send, recv, count, dtype, root as c_int, handle, stream))
            }
            Call::Reduce { op, root } => {
                call!(library, reduce(send, recv, count, dtype, op, root as c_int, handle, stream))
            }
            Call::AllToAll => call!(library, all_to_all(send, recv, count, dtype, handle, stream)),
            Call::Gather { root } => call!(library, gather(send, recv, count, dtype, root as c_int, handle, stream)),
            Call::Scatter { root } => call!(library, scatter(send, recv, count, dtype, root as c_int, handle, stream)),
            Call::Send { to } => call!(library, send(send, count, dtype, to as c_int, handle, stream)),
            Call::Recv { from } => call!(library, recv(recv, count, dtype, from as c_int, handle, stream)),
        }
    }

    /// A `ncclRedOpCreatePreMulSum` operation with this scalar.
    pub fn create_op(&self, mut scalar: ScalarBytes, dtype: DataType) -> Result<c_int> {
        const HOST_IMMEDIATE: c_int = 1;
        let mut op = 0;
        let scalar: *mut ScalarBytes = &mut scalar;
        call!(self.library, op_create(&mut op, scalar.cast(), dtype as c_int, HOST_IMMEDIATE, self.handle))?;
        Ok(op)
    }

    /// Gives up an operation of [`create_op`](Comm::create_op).
    pub fn destroy_op(&self, op: c_int) -> Result<()> {
        call!(self.library, op_destroy(op, self.handle))
    }

    /// What Strata says of the machine that it is on, in at most so many bytes.
    pub fn describe(&self, most: usize) -> Result<String> {
        let mut told = vec![0u8; most];
        call!(self.library, comm_describe(self.handle, told.as_mut_ptr().cast(), most))?;
        told.truncate(told.iter().position(|&byte| byte == 0).unwrap_or(most));
        Ok(String::from_utf8_lossy(&told).into_owned())
    }

    /// Destroys the communicator.
    pub fn destroy(mut self) -> Result<()> {
        let handle = std::mem::replace(&mut self.handle, std::ptr::null_mut());
        call!(self.library, comm_destroy(handle))
    }
}

impl Drop for Comm<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // Reached after an error only: destroying would wait for the other ranks.
            let _ = call!(self.library, comm_abort(self.handle));
        }
    }
}
