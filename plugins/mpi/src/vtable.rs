//! The contract between `libstrata.so` and an MPI plugin; both compile this very file.
//!
//! Everything here is plain C. Of a plugin of another version only the first two words may be looked at. All functions
//! but `describe` are called on one thread. Handles of MPI travel as 64 bits, whatever they are to the MPI at hand.
//! Functions that can fail return an MPI error code, [`SUCCESS`] for none.

use std::ffi::{c_char, c_int};

/// The version of everything below. It changes whenever anything here does.
pub const VERSION: u32 = 7;
/// The function that a plugin exports: `const Vtable *strata_mpi_plugin(void)`.
pub const SYMBOL: &[u8] = b"strata_mpi_plugin";
/// `MPI_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// For `irecv`: whoever sends.
pub const ANY_SOURCE: c_int = -1;
/// Tags up to here are valid with every MPI.
pub const MAX_TAG: c_int = 32_767;
/// A request that is none, or is complete.
pub const NO_REQUEST: u64 = u64::MAX;

/// What keeps a plugin from being used.
pub mod description {
    use std::ffi::c_int;

    /// The process has another MPI than the plugin was built for.
    pub const ANOTHER: c_int = 1;
    /// There is no MPI that the plugin can use; the text says why.
    pub const MISSING: c_int = 2;
}

/// The state that MPI is in.
pub mod state {
    /// Not initialised.
    pub const FRESH: i32 = 0;
    /// Initialised.
    pub const RUNNING: i32 = 1;
    /// Finalised; it cannot be initialised again.
    pub const FINALIZED: i32 = 2;
}

/// The levels of `MPI_Init_thread`.
pub mod thread_level {
    /// One thread.
    pub const SINGLE: i32 = 0;
    /// Only the thread that initialised MPI calls it.
    pub const FUNNELED: i32 = 1;
    /// One thread at a time calls MPI.
    pub const SERIALIZED: i32 = 2;
    /// All threads may call MPI.
    pub const MULTIPLE: i32 = 3;
}

/// Whose device memory MPI may take addresses of.
pub mod device_memory {
    /// CUDA's.
    pub const CUDA: i32 = 1;
    /// HIP's.
    pub const HIP: i32 = 2;
}

/// How an error came about.
pub mod fault {
    /// Something of this process or this machine.
    pub const LOCAL: i32 = 0;
    /// Something beyond it.
    pub const REMOTE: i32 = 1;
}

/// What [`Collective`] does: MPI's non-blocking collective of that name.
pub mod collective {
    /// `MPI_Iallreduce`
    pub const ALL_REDUCE: i32 = 0;
    /// `MPI_Iallgather`
    pub const ALL_GATHER: i32 = 1;
    /// `MPI_Ireduce_scatter_block`
    pub const REDUCE_SCATTER: i32 = 2;
    /// `MPI_Ibcast`
    pub const BROADCAST: i32 = 3;
    /// `MPI_Ireduce`
    pub const REDUCE: i32 = 4;
    /// `MPI_Ialltoall`
    pub const ALL_TO_ALL: i32 = 5;
    /// `MPI_Igather`
    pub const GATHER: i32 = 6;
    /// `MPI_Iscatter`
    pub const SCATTER: i32 = 7;
    /// `MPI_Ibarrier`
    pub const BARRIER: i32 = 8;
    /// `MPI_Iallgatherv`
    pub const ALL_GATHER_V: i32 = 9;
    /// `MPI_Ireduce_scatter`
    pub const REDUCE_SCATTER_V: i32 = 10;
    /// `MPI_Ialltoallv`
    pub const ALL_TO_ALL_V: i32 = 11;
    /// `MPI_Igatherv`
    pub const GATHER_V: i32 = 12;
    /// `MPI_Iscatterv`
    pub const SCATTER_V: i32 = 13;
}

/// The types of elements.
pub mod element {
    /// `MPI_INT8_T`
    pub const INT8: i32 = 0;
    /// `MPI_UINT8_T`
    pub const UINT8: i32 = 1;
    /// `MPI_INT16_T`
    pub const INT16: i32 = 2;
    /// `MPI_UINT16_T`
    pub const UINT16: i32 = 3;
    /// `MPI_INT32_T`
    pub const INT32: i32 = 4;
    /// `MPI_UINT32_T`
    pub const UINT32: i32 = 5;
    /// `MPI_INT64_T`
    pub const INT64: i32 = 6;
    /// `MPI_UINT64_T`
    pub const UINT64: i32 = 7;
    /// `MPI_FLOAT`
    pub const FLOAT: i32 = 8;
    /// `MPI_DOUBLE`
    pub const DOUBLE: i32 = 9;
}

/// What reductions do.
pub mod operation {
    /// `MPI_SUM`
    pub const SUM: i32 = 0;
    /// `MPI_PROD`
    pub const PROD: i32 = 1;
    /// `MPI_MAX`
    pub const MAX: i32 = 2;
    /// `MPI_MIN`
    pub const MIN: i32 = 3;
    /// `MPI_BAND`
    pub const BIT_AND: i32 = 4;
    /// `MPI_BOR`
    pub const BIT_OR: i32 = 5;
    /// `MPI_BXOR`
    pub const BIT_XOR: i32 = 6;
}

/// A collective of all ranks of a communicator.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Collective {
    /// One of [`collective`].
    pub what: i32,
    /// One of [`element`].
    pub element: i32,
    /// One of [`operation`], where something is reduced.
    pub operation: i32,
    /// The root, as a rank of the communicator, where there is one.
    pub root: i32,
    /// Whether `MPI_IN_PLACE` stands for `send`, or in a scatter for `recv`.
    pub in_place: i32,
    /// What is sent. A broadcast has its buffer in `recv` alone.
    pub send: *const u8,
    /// Where the result goes.
    pub recv: *mut u8,
    /// Elements of a block; where blocks differ in size, of the one block that this rank sends, or in a scatter receives.
    pub count: u64,
    /// Where blocks differ in size: elements of each block in `send`, by rank (scatter's root, all-to-all); else null. The lists stay
    /// as they are until the request has ended.
    pub send_counts: *const c_int,
    /// Where each begins, in elements.
    pub send_places: *const c_int,
    /// The same in `recv` (all-gather, gather's root, all-to-all); of a reduce-scatter the elements that each rank receives.
    pub recv_counts: *const c_int,
    /// Where each begins, in elements.
    pub recv_places: *const c_int,
}

/// What is to be known of MPI in this process.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct World {
    /// One of [`state`].
    pub state: i32,
    /// One of [`thread_level`]; meaningful while MPI is running.
    pub thread_level: i32,
    /// The rank in `MPI_COMM_WORLD`; likewise.
    pub rank: i32,
    /// The size of `MPI_COMM_WORLD`; likewise.
    pub size: i32,
    /// Of [`device_memory`], all that MPI takes addresses of; likewise.
    pub device_memory: i32,
}

/// The end of a request.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Completion {
    /// Its place in the list that was tested.
    pub index: u32,
    /// [`SUCCESS`], or the error it ended with.
    pub error: i32,
    /// Of a receive: the sender, as a rank of the communicator.
    pub source: i32,
    /// Whether it was cancelled before anything happened.
    pub cancelled: i32,
    /// Of a receive: the bytes that came.
    pub bytes: u64,
}

/// What a plugin does.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Vtable {
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of this table.
    pub size: u32,
    /// Writes MPI's own description of itself, NUL-terminated, into `len` bytes; [`SUCCESS`] if it is the MPI that the
    /// plugin was built for, else one of [`description`].
    pub describe: unsafe extern "C" fn(text: *mut c_char, len: usize) -> c_int,
    /// Looks at the state of MPI.
    pub look: unsafe extern "C" fn(world: *mut World) -> c_int,
    /// Initialises MPI at the highest thread level. Errors are returned from then on, never fatal.
    pub init: unsafe extern "C" fn() -> c_int,
    /// Waits until all processes of `MPI_COMM_WORLD` have come here.
    pub barrier: unsafe extern "C" fn() -> c_int,
    /// Finalises MPI.
    pub finalize: unsafe extern "C" fn() -> c_int,
    /// Has `hook` called by `MPI_Finalize`, whoever calls that and on their thread, while MPI is still whole. To be asked
    /// for once.
    pub at_finalize: unsafe extern "C" fn(hook: Hook) -> c_int,
    /// Makes a communicator of these ranks of `MPI_COMM_WORLD`; they all call it, and nobody else. Errors on it are
    /// returned.
    pub comm_create: unsafe extern "C" fn(ranks: *const c_int, count: c_int, tag: c_int, comm: *mut u64) -> c_int,
    /// Frees a communicator on which nothing is pending.
    pub comm_free: unsafe extern "C" fn(comm: u64) -> c_int,
    /// Sends bytes.
    pub isend:
        unsafe extern "C" fn(comm: u64, bytes: *const u8, len: u64, to: c_int, tag: c_int, request: *mut u64) -> c_int,
    /// Receives at most `len` bytes.
    pub irecv:
        unsafe extern "C" fn(comm: u64, bytes: *mut u8, len: u64, from: c_int, tag: c_int, request: *mut u64) -> c_int,
    /// Makes progress, also without a request; writes at most `count` completions and turns the requests that ended into
    /// [`NO_REQUEST`].
    pub test_some:
        unsafe extern "C" fn(requests: *mut u64, count: usize, ended: *mut Completion, how_many: *mut usize) -> c_int,
    /// Asks for the end of a request; `test_some` still reports it.
    pub cancel: unsafe extern "C" fn(request: u64) -> c_int,
    /// Begins a collective. Its request cannot be cancelled.
    pub collective: unsafe extern "C" fn(comm: u64, call: *const Collective, request: *mut u64) -> c_int,
    /// Writes an error's text, NUL-terminated, into `len` bytes; returns one of [`fault`].
    pub error_text: unsafe extern "C" fn(error: c_int, text: *mut c_char, len: usize) -> c_int,
}

/// What `MPI_Finalize` calls before anything else.
pub type Hook = extern "C" fn();

/// The type of the exported function.
pub type Entry = unsafe extern "C" fn() -> *const Vtable;
