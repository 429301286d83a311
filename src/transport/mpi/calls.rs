//! A plugin's functions as safe calls. Only the thread that owns MPI makes them.

use super::vtable::{self, fault, Collective, Completion, Hook, Vtable, World, ANY_SOURCE, SUCCESS};
use crate::error::{Error, Result};
use crate::memory::Bytes;
use std::ffi::{c_char, c_int, CStr};

/// Longer than any text of MPI that is worth showing.
const TEXT_BYTES: usize = 8192;

/// The functions of one plugin.
#[derive(Debug, Clone, Copy)]
pub struct MpiCalls {
    table: &'static Vtable,
}

fn text(write: impl FnOnce(*mut c_char, usize) -> c_int) -> (String, c_int) {
    let mut buffer = vec![0u8; TEXT_BYTES];
    let code = write(buffer.as_mut_ptr().cast(), buffer.len());
    let text = CStr::from_bytes_until_nul(&buffer).map(CStr::to_string_lossy).unwrap_or_default();
    (text.trim().replace('\n', " "), code)
}

impl MpiCalls {
    /// The functions of a table of our own version.
    pub fn new(table: &'static Vtable) -> MpiCalls {
        MpiCalls { table }
    }

    /// MPI's description of itself, and whether it is the MPI that the plugin was built for.
    pub fn describe(&self) -> (String, c_int) {
        // SAFETY: `place` must be writable for `len` bytes; because `text` passes a buffer with its length. MPI may be
        // in any state.
        text(|place, len| unsafe { (self.table.describe)(place, len) })
    }

    /// An error of MPI, with its text.
    pub fn error(&self, doing: &str, code: c_int) -> Error {
        // SAFETY: `place` must be writable for `len` bytes; because `text` passes a buffer with its length.
        let (text, kind) = text(|place, len| unsafe { (self.table.error_text)(code, place, len) });
        let text = format!("{doing}: {text} (MPI error {code})");
        if kind == fault::REMOTE {
            Error::Remote(text)
        } else {
            Error::System(text)
        }
    }

    fn check(&self, doing: &str, code: c_int) -> Result<()> {
        if code == SUCCESS {
            Ok(())
        } else {
            Err(self.error(doing, code))
        }
    }

    /// The state of MPI.
    pub fn look(&self) -> Result<World> {
        let mut world = World::default();
        // SAFETY: the place must be writable; because it is a local. MPI may be in any state.
        let code = unsafe { (self.table.look)(&mut world) };
        self.check("asking for the state of MPI", code)?;
        Ok(world)
    }

    /// Initialises MPI, which is fresh.
    pub fn init(&self) -> Result<()> {
        // SAFETY: MPI must not have been initialised; because `Worker::init`, the only caller, has looked.
        self.check("MPI_Init_thread", unsafe { (self.table.init)() })
    }

    /// Waits until all processes of the world have come here.
    pub fn barrier(&self) -> Result<()> {
        // SAFETY: this thread must have initialised MPI; because `Worker::leave`, the only caller, asks whether it has.
        self.check("MPI_Barrier", unsafe { (self.table.barrier)() })
    }

    /// Finalises MPI, which `init` initialised and on which nothing is pending.
    pub fn finalize(&self) -> Result<()> {
        // SAFETY: this thread must have initialised MPI and nothing be pending; because `Hub::leave` asks only when
        // `Worker::leave` has said so.
        self.check("MPI_Finalize", unsafe { (self.table.finalize)() })
    }

    /// Has `MPI_Finalize` call `hook` first.
    pub fn at_finalize(&self, hook: Hook) -> Result<()> {
        // SAFETY: MPI must be running and the hook stay mapped; because communicators are made only after a look, and
        // the library is linked `-z nodelete`.
        self.check("MPI_Comm_set_attr", unsafe { (self.table.at_finalize)(hook) })
    }

    /// Makes a communicator of ranks of the world, together with them all.
    pub fn comm_create(&self, ranks: &[c_int], tag: c_int) -> Result<u64> {
        let mut comm = 0;
        // SAFETY: MPI must be running and list and place be valid; because the caller has looked, and they are a slice
        // and a local.
        let code = unsafe { (self.table.comm_create)(ranks.as_ptr(), ranks.len() as c_int, tag, &mut comm) };
        self.check("MPI_Comm_create_group", code)?;
        Ok(comm)
    }

    /// Frees a communicator on which nothing is pending.
    pub fn comm_free(&self, comm: u64) -> Result<()> {
        // SAFETY: the communicator must be from `comm_create` with nothing pending; because `Worker`, the only caller,
        // frees each once, when it is quiet.
        self.check("MPI_Comm_free", unsafe { (self.table.comm_free)(comm) })
    }

    /// Begins to send the region's bytes.
    ///
    /// # Safety
    /// The bytes must be there, and stay as they are, until the request has ended or MPI is called no more. A send that
    /// nobody receives any more may outlive them.
    pub unsafe fn isend(&self, comm: u64, bytes: Bytes<'_>, to: c_int, tag: c_int) -> Result<u64> {
        let mut request = 0;
        let (start, len) = (bytes.as_ptr(), bytes.len() as u64);
        // SAFETY: the bytes must stay until the request has ended; because the caller promises that.
        let code = unsafe { (self.table.isend)(comm, start, len, to, tag, &mut request) };
        self.check("MPI_Isend", code)?;
        Ok(request)
    }

    /// Begins to receive into the region.
    ///
    /// # Safety
    /// The bytes must be there, and nobody else use them, until the request has ended or MPI is called no more.
    pub unsafe fn irecv(&self, comm: u64, bytes: Bytes<'_>, from: Option<c_int>, tag: c_int) -> Result<u64> {
        let mut request = 0;
        let (start, len) = (bytes.as_ptr(), bytes.len() as u64);
        let from = from.unwrap_or(ANY_SOURCE);
        // SAFETY: nobody else may use the bytes until the request has ended; because the caller promises that.
        let code = unsafe { (self.table.irecv)(comm, start, len, from, tag, &mut request) };
        self.check("MPI_Irecv", code)?;
        Ok(request)
    }

    /// Begins a collective of all ranks of a communicator, whose request cannot be cancelled.
    ///
    /// # Safety
    /// The buffers and lists must be those that MPI asks for such a call, and nobody else use them, until the request has ended or MPI
    /// is called no more.
    pub unsafe fn collective(&self, comm: u64, call: &Collective) -> Result<u64> {
        let mut request = 0;
        // SAFETY: nobody else may use buffers and lists until the request has ended; because the caller promises that.
        let code = unsafe { (self.table.collective)(comm, call, &mut request) };
        self.check("beginning a collective of MPI's", code)?;
        Ok(request)
    }

    /// Makes progress with all requests; those that ended are in `ended` afterwards.
    pub fn test_some(&self, requests: &mut [u64], ended: &mut Vec<Completion>) -> Result<()> {
        ended.clear();
        ended.resize(requests.len(), Completion::default());
        let mut how_many = 0;
        let (list, count) = (requests.as_mut_ptr(), requests.len());
        // SAFETY: both lists must have `count` entries and the requests be pending; because `ended` was made so long,
        // and `Worker` drops what has ended.
        let code = unsafe { (self.table.test_some)(list, count, ended.as_mut_ptr(), &mut how_many) };
        ended.truncate(how_many);
        self.check("MPI_Testsome", code)
    }

    /// Asks for the end of a pending request.
    pub fn cancel(&self, request: u64) -> Result<()> {
        // SAFETY: the request must be pending; because `Worker`, the only caller, drops what has ended.
        self.check("MPI_Cancel", unsafe { (self.table.cancel)(request) })
    }

    /// Whether a table that begins with these words can be read; if not, why.
    pub fn version(version: u32, size: u32) -> std::result::Result<(), String> {
        match (version, size as usize) {
            (vtable::VERSION, size) if size == size_of::<Vtable>() => Ok(()),
            (version, size) => Err(format!(
                "it is of version {version} ({size} bytes), and this library needs version {} ({} bytes): \
                 build the plugin again with scripts/build-mpi",
                vtable::VERSION,
                size_of::<Vtable>()
            )),
        }
    }
}
