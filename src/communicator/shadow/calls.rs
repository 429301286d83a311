//! The vendor's calls that Strata makes for a program's call, with the promises they rest on.

use super::subcomms::{Prepared, VendorCall};
use super::vectored::{VectoredCall, VendorStep};
use super::{Handle, IN_PROGRESS};
use crate::communicator::Direction;
use crate::error::{Code, SUCCESS};
use crate::interface::layouts::UniqueIdBytes;
use crate::interface::pointer::{Buffer, ConstBuffer, Ptr};
use crate::interface::signatures::NcclFunctions;
use crate::interface::types::{CommHandle, OpCode, Status, StreamHandle, TypeCode};
use crate::plan::Collective;
use crate::vendor::calls::VendorAddress;
use crate::vendor::Library;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The name of a node's communicator that is made after ranks were lost.
const NODE_NAME: &CStr = c"strata-inside";
/// How often a communicator that is being made is asked whether it is ready.
const ASK_EVERY: Duration = Duration::from_millis(1);

/// One collective, on the stream of the program's call.
pub fn collective(
    call: &VendorCall,
    collective: Collective,
    comm: Handle,
    [send, recv]: [VendorAddress; 2],
    count: usize,
    library: &Library,
) -> Result<(), Code> {
    // SAFETY: the memory must stay until the stream has come so far; because the program's does, and scratch is the stream's own.
    let send = unsafe { ConstBuffer::from_address(send) };
    // SAFETY: the same memory must stay; because of the same.
    let recv = unsafe { Buffer::from_address(recv) };
    let (dtype, op) = (TypeCode(call.dtype), OpCode(call.op));
    let (comm, stream) = (CommHandle(comm), StreamHandle(call.stream));
    // `comm` is the program's own or serves one.
    library.call(|vendor| match collective {
        // SAFETY: `comm` must be alive and the buffers stay until the stream has come so far; because the caller keeps
        // its end away (`Ending::call`), and the program keeps the buffers.
        Collective::AllGather => unsafe { vendor.ncclAllGather(send, recv, count, dtype, comm, stream) },
        // SAFETY: `comm` must be alive and the buffers stay until the stream has come so far; because the caller keeps
        // its end away (`Ending::call`), and the program keeps the buffers.
        Collective::ReduceScatter => unsafe { vendor.ncclReduceScatter(send, recv, count, dtype, op, comm, stream) },
        // SAFETY: `comm` must be alive and the buffers stay until the stream has come so far; because the caller keeps
        // its end away (`Ending::call`), and the program keeps the buffers.
        _ => unsafe { vendor.ncclAllReduce(send, recv, count, dtype, op, comm, stream) },
    })
}

/// The program's call, as the program made it.
pub fn as_made(prepared: &Prepared, library: &Library) -> Result<(), Code> {
    let call = &prepared.call;
    collective(call, call.collective, prepared.attached.handle, [call.send, call.recv], call.count, library)
}

/// One of the vendor's calls that a collective of blocks of different sizes is made of.
pub fn vectored(call: &VectoredCall, step: &VendorStep, library: &Library) -> Result<(), Code> {
    let (dtype, op) = (TypeCode(call.call.dtype.code()), OpCode(call.op));
    let (comm, stream) = (CommHandle(call.handle), StreamHandle(call.stream));
    // SAFETY: the memory must stay until the stream has come so far; because the program keeps that of its call.
    let from = |address: VendorAddress| unsafe { ConstBuffer::from_address(address) };
    // SAFETY: the memory must stay until the stream has come so far; because the program keeps that of its call.
    let to = |address: VendorAddress| unsafe { Buffer::from_address(address) };
    library.call(|vendor| match *step {
        VendorStep::Broadcast { root, send, recv, count } => {
            let (send, recv, root) = (from(send), to(recv), root as i32);
            // SAFETY: `comm` must be alive and the buffers stay; because the program's call says so of both.
            unsafe { vendor.ncclBroadcast(send, recv, count, dtype, root, comm, stream) }
        }
        VendorStep::Reduce { root, send, recv, count } => {
            let (send, recv, root) = (from(send), to(recv), root as i32);
            // SAFETY: `comm` must be alive and the buffers stay; because the program's call says so of both.
            unsafe { vendor.ncclReduce(send, recv, count, dtype, op, root, comm, stream) }
        }
        VendorStep::Message { direction: Direction::Send, peer, at, count } => {
            let (at, peer) = (from(at), peer as i32);
            // SAFETY: `comm` must be alive and the buffers stay; because the program's call says so of both.
            unsafe { vendor.ncclSend(at, count, dtype, peer, comm, stream) }
        }
        VendorStep::Message { direction: Direction::Recv, peer, at, count } => {
            let (at, peer) = (to(at), peer as i32);
            // SAFETY: `comm` must be alive and the buffers stay; because the program's call says so of both.
            unsafe { vendor.ncclRecv(at, count, dtype, peer, comm, stream) }
        }
    })
}

/// This rank's number in a communicator, and how many there are.
pub fn place(library: &Library, comm: Handle) -> Result<(usize, usize), Code> {
    let (mut rank, mut nranks) = (0, 0);
    // SAFETY: the place must be there during the call; because it is a local.
    let at_rank = unsafe { Ptr::to(&mut rank) };
    // SAFETY: the place must be there during the call; because it is a local.
    let at_nranks = unsafe { Ptr::to(&mut nranks) };
    let comm = CommHandle(comm);
    // SAFETY: the communicator must be alive; because the program calls on it.
    library.call(|vendor| unsafe { vendor.ncclCommUserRank(comm, at_rank) })?;
    // SAFETY: the communicator must be alive; because the program calls on it.
    library.call(|vendor| unsafe { vendor.ncclCommCount(comm, at_nranks) })?;
    Ok((usize::try_from(rank).unwrap_or(0), usize::try_from(nranks).unwrap_or(0)))
}

/// A group of the vendor's around calls. Their failure is the group's.
pub fn in_group(library: &Library, calls: impl FnOnce() -> Result<(), Code>) -> Result<(), Code> {
    // SAFETY: no requirement.
    library.call(|vendor| unsafe { vendor.ncclGroupStart() })?;
    let called = calls();
    // SAFETY: communicators and buffers of the group must still be there; because its calls were given them until the
    // stream has come so far.
    let ended = library.call(|vendor| unsafe { vendor.ncclGroupEnd() });
    called.and(ended)
}

/// The vendor's word on how a communicator fares.
pub fn async_error(library: &Library, comm: Handle) -> Code {
    let mut told = Status::SUCCESS;
    // SAFETY: the place must be there during the call; because it is a local.
    let place = unsafe { Ptr::to(&mut told) };
    // SAFETY: the communicator must be alive; because whoever ends it waits for this.
    match library.call(|vendor| unsafe { vendor.ncclCommGetAsyncError(CommHandle(comm), place) }) {
        Ok(()) => told.0,
        Err(code) => code,
    }
}

/// The number of a communicator's GPU, or -1.
pub fn device(library: &Library, comm: Handle) -> i32 {
    let mut device = -1;
    // SAFETY: the place must be there during the call; because it is a local.
    let place = unsafe { Ptr::to(&mut device) };
    // SAFETY: the communicator must be alive; because its making waits for this.
    match library.call(|vendor| unsafe { vendor.ncclCommCuDevice(CommHandle(comm), place) }) {
        Ok(()) => device,
        Err(_) => -1,
    }
}

/// Waits until a communicator of the vendor's is not in progress any more.
pub fn wait_ready(library: &Library, comm: Handle, cancel: &AtomicBool) -> Result<(), Code> {
    wait_unless(library, comm, || cancel.load(Ordering::Acquire))
}

/// The same where something else may end the wait.
fn wait_unless(library: &Library, comm: Handle, is_over: impl Fn() -> bool) -> Result<(), Code> {
    loop {
        match async_error(library, comm) {
            SUCCESS => return Ok(()),
            IN_PROGRESS if is_over() => return Err(IN_PROGRESS),
            IN_PROGRESS => std::thread::sleep(ASK_EVERY),
            code => return Err(code),
        }
    }
}

/// A unique id of the vendor's.
pub fn unique_id(library: &Library) -> Result<[u8; 128], Code> {
    let mut id = UniqueIdBytes([0; 128]);
    // SAFETY: the place must be there during the call; because it is a local.
    let place = unsafe { Ptr::to(&mut id) };
    library.call(|vendor| {
        // SAFETY: no requirement.
        unsafe { vendor.ncclGetUniqueId(place) }
    })?;
    Ok(id.0)
}

/// Makes a communicator of so many ranks of a node, of which this is the one with that number, on the thread's current device. It is given up
/// when one of them may not come any more; its calls do not wait.
pub fn init_node(
    library: &Library,
    id: [u8; 128],
    (nranks, rank): (usize, usize),
    is_over: impl Fn() -> bool,
) -> Result<Handle, Code> {
    let mut made = CommHandle::NULL;
    // SAFETY: the name must outlive the call that takes the options; because it is a constant.
    let mut options = unsafe { library.sub_config(NODE_NAME) };
    options.blocking = 0;
    // SAFETY: the place must stay until the making has ended; because one that is given up is aborted below, which waits for its end.
    let out = unsafe { Ptr::to(&mut made) };
    // SAFETY: the options must be there during the call; because they are a local.
    let options = unsafe { Ptr::to(&mut options) };
    let id = UniqueIdBytes(id);
    // SAFETY: no requirement.
    let begun =
        library.call(|vendor| unsafe { vendor.ncclCommInitRankConfig(out, nranks as i32, id, rank as i32, options) });
    let outcome = match begun {
        Err(IN_PROGRESS) => wait_unless(library, made.0, is_over),
        begun => begun,
    };
    outcome.map(|()| made.0).inspect_err(|_| {
        if made.0 != 0 {
            // What it says is of no use any more.
            let _ = abort(library, made.0);
        }
    })
}

macro_rules! to_levels {
    ($($(#[doc = $doc:literal])+ $name:ident($($argument:ident: $type:ty)?) = $call:ident;)*) => { $(
        $(#[doc = $doc])+
        pub fn $name(library: &Library, level: Handle $(, $argument: $type)?) -> Result<(), Code> {
            // SAFETY: the communicator must be alive; because it ends with the program's, on which the same is done.
            library.call(|vendor| unsafe { NcclFunctions::$call(vendor, CommHandle(level) $(, $argument)?) })
        }
    )* };
}

to_levels! {
    /// `ncclCommFinalize`
    finalize() = ncclCommFinalize;
    /// `ncclCommRevoke`
    revoke(flags: i32) = ncclCommRevoke;
    /// `ncclCommSuspend`
    suspend(flags: i32) = ncclCommSuspend;
    /// `ncclCommResume`
    resume() = ncclCommResume;
    /// `ncclCommDestroy`
    destroy() = ncclCommDestroy;
    /// `ncclCommAbort`
    abort() = ncclCommAbort;
}
