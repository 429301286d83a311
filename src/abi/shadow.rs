//! Bodies of the entries through which Strata looks at calls that the vendor's library answers.
//!
//! Each gets the vendor's function and calls it: before, after, or instead of it comes what Strata does. What the vendor
//! returns, the program gets.

use super::entry::enter;
use super::{communicators, operations, options};
use crate::communicator::group as host_group;
use crate::communicator::shadow::{
    self, after, group, join_id, read_id, Attached, CommInit, CreatedBy, End, VendorCall,
};
use crate::communicator::{Comm, UniqueId};
use crate::error::{Code, Error, SUCCESS};
use crate::interface::layouts::{CollConfig, NcclConfig, SimInfo, UniqueIdBytes};
use crate::interface::pointer::{Buffer, Callback, ConstBuffer, ConstPtr, Ptr, Text};
use crate::interface::types::{CommHandle, OpCode, Status, StreamHandle, TypeCode, Window};
use crate::plan::Collective;
use crate::vendor::guard::inside;
use crate::vendor::{self, Library};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;

/// A window for the vendor's symmetric kernels.
const COLL_SYMMETRIC: c_int = 1;

/// The vendor's library, which is there if calls come here.
fn library() -> Option<&'static Library> {
    vendor::library()
}

/// Strata's part of the ids; none if one of them has none.
fn own_ids(ids: Vec<UniqueIdBytes>) -> Option<Vec<UniqueId>> {
    ids.iter().map(|id| read_id(&id.0)).collect()
}

/// `ncclGetUniqueId`
pub fn get_unique_id(vendor: extern "C" fn(Ptr<UniqueIdBytes>) -> Status, out: Ptr<UniqueIdBytes>) -> Status {
    // All ranks derive an id of NCCL_COMM_ID themselves, and it must be the same everywhere.
    let derived = std::env::var_os("NCCL_COMM_ID").is_some_and(|address| !address.is_empty());
    if out.is_null() || derived {
        return inside(|| vendor(out));
    }
    carrying(out, |out| inside(|| vendor(out)), || UniqueId::create().map_err(|error| error.to_string()))
}

/// Has the vendor make an id, and adds Strata's part. The vendor may write to the bytes alone that it uses, so it gets
/// zeros to write on: those it leaves are free.
fn carrying(
    out: Ptr<UniqueIdBytes>,
    vendor: impl FnOnce(Ptr<UniqueIdBytes>) -> Status,
    own: impl FnOnce() -> Result<UniqueId, String>,
) -> Status {
    let mut id = UniqueIdBytes([0; 128]);
    // SAFETY: the place must be there while the vendor's function runs; because it is a local.
    let status = vendor(unsafe { Ptr::to(&mut id) });
    if status != Status::SUCCESS {
        return status;
    }
    let id = match own() {
        Ok(own) => join_id(id.0, own),
        Err(why) => {
            crate::info!("the unique id is the vendor's alone: {why}");
            id.0
        }
    };
    match out.set("uniqueId", UniqueIdBytes(id)) {
        Ok(()) => status,
        Err(error) => Status(error.code()),
    }
}

/// What follows the making of a communicator.
fn made(origin: Option<CreatedBy>, place: Ptr<CommHandle>, config: Ptr<NcclConfig>, status: Status) -> Status {
    match (origin, library()) {
        (Some(origin), Some(library)) => {
            super::exit::register();
            let making = CommInit { origin, place: place.address(), blocking: options::waits(config.as_const()) };
            Status(after(making, status.0, library))
        }
        _ => status,
    }
}

/// Ranks of one communicator from ids; a single rank needs no companion.
fn from_ids(ids: impl FnOnce() -> Option<Vec<UniqueId>>, nranks: c_int, rank: c_int) -> Option<CreatedBy> {
    let (nranks, rank) = (usize::try_from(nranks).ok()?, usize::try_from(rank).ok()?);
    (nranks > 1 && rank < nranks).then(ids).flatten().map(|ids| CreatedBy::Ids { ids, nranks, rank })
}

/// `ncclCommInitRank`
pub fn init_rank(
    vendor: extern "C" fn(Ptr<CommHandle>, c_int, UniqueIdBytes, c_int) -> Status,
    comm: Ptr<CommHandle>,
    nranks: c_int,
    id: UniqueIdBytes,
    rank: c_int,
) -> Status {
    let status = inside(|| vendor(comm, nranks, id, rank));
    made(from_ids(|| own_ids(vec![id]), nranks, rank), comm, Ptr::null(), status)
}

/// `ncclCommInitRankMulti`
pub fn init_rank_multi(
    vendor: extern "C" fn(Ptr<CommHandle>, c_int, UniqueIdBytes, c_int, c_int) -> Status,
    comm: Ptr<CommHandle>,
    nranks: c_int,
    id: UniqueIdBytes,
    rank: c_int,
    virtual_id: c_int,
) -> Status {
    let status = inside(|| vendor(comm, nranks, id, rank, virtual_id));
    made(from_ids(|| own_ids(vec![id]), nranks, rank), comm, Ptr::null(), status)
}

/// `ncclCommInitRankConfig`
pub fn init_rank_config(
    vendor: extern "C" fn(Ptr<CommHandle>, c_int, UniqueIdBytes, c_int, Ptr<NcclConfig>) -> Status,
    comm: Ptr<CommHandle>,
    nranks: c_int,
    id: UniqueIdBytes,
    rank: c_int,
    config: Ptr<NcclConfig>,
) -> Status {
    let status = inside(|| vendor(comm, nranks, id, rank, config));
    made(from_ids(|| own_ids(vec![id]), nranks, rank), comm, config, status)
}

/// `ncclCommInitRankScalable`
#[allow(clippy::too_many_arguments)]
pub fn init_rank_scalable(
    vendor: extern "C" fn(Ptr<CommHandle>, c_int, c_int, c_int, Ptr<UniqueIdBytes>, Ptr<NcclConfig>) -> Status,
    comm: Ptr<CommHandle>,
    nranks: c_int,
    rank: c_int,
    nids: c_int,
    ids: Ptr<UniqueIdBytes>,
    config: Ptr<NcclConfig>,
) -> Status {
    let status = inside(|| vendor(comm, nranks, rank, nids, ids, config));
    let read = || {
        let count = usize::try_from(nids).ok()?;
        own_ids(ids.as_const().get_all(count, "commIds").ok()?)
    };
    made(from_ids(read, nranks, rank), comm, config, status)
}

/// `ncclCommSplit`
pub fn split(
    vendor: extern "C" fn(CommHandle, c_int, c_int, Ptr<CommHandle>, Ptr<NcclConfig>) -> Status,
    comm: CommHandle,
    color: c_int,
    key: c_int,
    newcomm: Ptr<CommHandle>,
    config: Ptr<NcclConfig>,
) -> Status {
    let status = inside(|| vendor(comm, color, key, newcomm, config));
    made(parent(comm).map(|parent| CreatedBy::Split { parent, color, key }), newcomm, config, status)
}

/// A parent whose children can come to run in two levels.
fn parent(comm: CommHandle) -> Option<Arc<Attached>> {
    shadow::find(comm.0).filter(|attached| attached.has_companion())
}

/// `ncclCommShrink`
#[allow(clippy::too_many_arguments)]
pub fn shrink(
    vendor: extern "C" fn(CommHandle, Ptr<c_int>, c_int, Ptr<CommHandle>, Ptr<NcclConfig>, c_int) -> Status,
    comm: CommHandle,
    list: Ptr<c_int>,
    count: c_int,
    newcomm: Ptr<CommHandle>,
    config: Ptr<NcclConfig>,
    flags: c_int,
) -> Status {
    let parent = parent(comm);
    // Before the call: the vendor sorts the list.
    let listed = parent.is_some().then(|| list.as_const().get_all(usize::try_from(count).unwrap_or(0), "list").ok());
    let status = inside(|| vendor(comm, list, count, newcomm, config, flags));
    let origin = parent.zip(listed.flatten()).map(|(parent, listed)| {
        let excluded = listed.into_iter().filter_map(|rank| usize::try_from(rank).ok()).collect();
        CreatedBy::Shrink { parent, excluded, abort: flags != 0 }
    });
    made(origin, newcomm, config, status)
}

/// `ncclCommGetUniqueId`
pub fn grow_id(
    vendor: extern "C" fn(CommHandle, Ptr<UniqueIdBytes>) -> Status,
    comm: CommHandle,
    out: Ptr<UniqueIdBytes>,
) -> Status {
    match parent(comm) {
        Some(parent) if !out.is_null() => {
            let own = || parent.grow_id().ok_or_else(|| "its companion has none".to_string());
            carrying(out, |out| inside(|| vendor(comm, out)), own)
        }
        _ => inside(|| vendor(comm, out)),
    }
}

/// `ncclCommGrow`
#[allow(clippy::too_many_arguments)]
pub fn grow(
    vendor: extern "C" fn(
        CommHandle,
        c_int,
        ConstPtr<UniqueIdBytes>,
        c_int,
        Ptr<CommHandle>,
        Ptr<NcclConfig>,
    ) -> Status,
    comm: CommHandle,
    nranks: c_int,
    id: ConstPtr<UniqueIdBytes>,
    rank: c_int,
    newcomm: Ptr<CommHandle>,
    config: Ptr<NcclConfig>,
) -> Status {
    let status = inside(|| vendor(comm, nranks, id, rank, newcomm, config));
    let own = id.get("uniqueId").ok().and_then(|id| read_id(&id.0));
    let nranks = usize::try_from(nranks).unwrap_or(0);
    let origin = match comm.is_null() {
        false => parent(comm).map(|parent| CreatedBy::Grow { parent, nranks, id: own }),
        true => own.zip(usize::try_from(rank).ok()).map(|(id, rank)| CreatedBy::Join { id, nranks, rank }),
    };
    made(origin, newcomm, config, status)
}

/// Does to the communicators that serve one what the program does to it, and then has the vendor do it.
fn with_subcomms(
    comm: CommHandle,
    mut act: impl FnMut(&Library, usize) -> Result<(), Code>,
    vendor: impl FnOnce() -> Status,
) -> Status {
    let served = shadow::find(comm.0)
        .zip(library())
        .map_or(Ok(()), |(attached, library)| attached.each_level(|level| act(library, level)));
    let status = inside(vendor);
    match (status, served) {
        (Status::SUCCESS, Err(code)) => Status(code),
        _ => status,
    }
}

/// `ncclCommFinalize`
pub fn finalize(vendor: extern "C" fn(CommHandle) -> Status, comm: CommHandle) -> Status {
    with_subcomms(comm, shadow::finalize, || vendor(comm))
}

/// `ncclCommRevoke`
pub fn revoke(vendor: extern "C" fn(CommHandle, c_int) -> Status, comm: CommHandle, flags: c_int) -> Status {
    with_subcomms(comm, |library, level| shadow::revoke(library, level, flags), || vendor(comm, flags))
}

/// `ncclCommSuspend`
pub fn suspend(vendor: extern "C" fn(CommHandle, c_int) -> Status, comm: CommHandle, flags: c_int) -> Status {
    with_subcomms(comm, |library, level| shadow::suspend(library, level, flags), || vendor(comm, flags))
}

/// `ncclCommResume`
pub fn resume(vendor: extern "C" fn(CommHandle) -> Status, comm: CommHandle) -> Status {
    with_subcomms(comm, shadow::resume, || vendor(comm))
}

/// Has the vendor end a communicator once Strata has forgotten it.
fn end(vendor: extern "C" fn(CommHandle) -> Status, comm: CommHandle, end: End) -> Status {
    let Some(library) = library() else { return inside(|| vendor(comm)) };
    shadow::forget(comm.0, end, library);
    let status = inside(|| vendor(comm));
    shadow::end_given_up(comm.0, library);
    status
}

/// `ncclCommDestroy`
pub fn destroy(vendor: extern "C" fn(CommHandle) -> Status, comm: CommHandle) -> Status {
    end(vendor, comm, End::Destroy)
}

/// `ncclCommAbort`
pub fn abort(vendor: extern "C" fn(CommHandle) -> Status, comm: CommHandle) -> Status {
    end(vendor, comm, End::Abort)
}

/// `ncclCommGetAsyncError`
pub fn async_error(
    vendor: extern "C" fn(CommHandle, Ptr<Status>) -> Status,
    comm: CommHandle,
    out: Ptr<Status>,
) -> Status {
    // Before the vendor is asked: what is being made would then be missed if it ended in between.
    let known = shadow::find(comm.0).zip(library()).filter(|_| !out.is_null());
    let Some((attached, library)) = known else { return inside(|| vendor(comm, out)) };
    let tell = |code: Code| match out.set("asyncError", Status(code)) {
        Ok(()) => Status::SUCCESS,
        Err(error) => Status(error.code()),
    };
    if let Some(code) = attached.meanwhile(library) {
        return tell(code);
    }
    match (inside(|| vendor(comm, out)), out.as_const().get("asyncError")) {
        (Status::SUCCESS, Ok(told)) => tell(attached.async_error(library, told.0)),
        (status, _) => status,
    }
}

/// `strataCommDescribe`, which no vendor has.
pub fn describe(
    _vendor: extern "C" fn(CommHandle, Buffer, usize) -> Status,
    comm: CommHandle,
    text: Buffer,
    bytes: usize,
) -> Status {
    let machine = shadow::find(comm.0).and_then(|attached| attached.machine());
    told("strataCommDescribe", machine, |machine| {
        super::info::write_description(&machine, (&[machine.inter.as_str()], &BTreeMap::new()), text, bytes)
    })
}

/// `strataCommState`
pub fn state(
    _vendor: extern "C" fn(CommHandle, Buffer, usize) -> Status,
    comm: CommHandle,
    text: Buffer,
    bytes: usize,
) -> Status {
    let state = shadow::find(comm.0).and_then(|attached| attached.state());
    told("strataCommState", state, |state| super::info::write_json(&state, text, bytes))
}

/// What carries a communicator's calls between nodes.
fn carried(function: &str, comm: CommHandle, act: impl FnOnce(&Arc<Comm>) -> crate::error::Result<()>) -> Status {
    let companion = shadow::find(comm.0).and_then(|attached| attached.carrier());
    told(function, companion, |companion| companion.usable().and_then(|()| act(&companion)))
}

/// `strataCommOnChange`
pub fn on_change(
    _vendor: extern "C" fn(CommHandle, Callback, Buffer) -> Status,
    comm: CommHandle,
    callback: Callback,
    argument: Buffer,
) -> Status {
    carried("strataCommOnChange", comm, |comm| communicators::watch(comm, callback, argument))
}

/// `strataCommAdapt`
pub fn adapt(_vendor: extern "C" fn(CommHandle, Text) -> Status, comm: CommHandle, options: Text) -> Status {
    let known = shadow::find(comm.0).zip(library());
    carried("strataCommAdapt", comm, |_| {
        if group::is_open() {
            return Err(Error::InvalidUsage("a group is open, and this waits for what was called before".to_string()));
        }
        let options = communicators::adapt_options(options)?;
        known.map_or(Ok(()), |(attached, library)| attached.adapt(options, library))
    })
}

/// `strataCommProfile`
pub fn profile(_vendor: extern "C" fn(CommHandle) -> Status, comm: CommHandle) -> Status {
    carried("strataCommProfile", comm, |comm| comm.profile())
}

/// Tells what is known of a communicator that Strata serves, too.
fn told<T>(function: &str, known: Option<T>, write: impl FnOnce(T) -> crate::error::Result<()>) -> Status {
    let alone = || Error::InvalidUsage("the vendor's library alone serves this communicator".to_string());
    match known.ok_or_else(alone).and_then(write) {
        Ok(()) => Status::SUCCESS,
        Err(error) => {
            let text = error.text();
            // Some texts name the function already.
            let text = text.strip_prefix(function).map_or(text, |rest| rest.trim_start_matches([':', ' ']));
            crate::log::failed(&format!("{function}: {text}"));
            Status(error.code())
        }
    }
}

/// `ncclCommWindowRegister`
pub fn window_register(
    vendor: extern "C" fn(CommHandle, Buffer, usize, Ptr<Window>, c_int) -> Status,
    comm: CommHandle,
    buffer: Buffer,
    bytes: usize,
    window: Ptr<Window>,
    flags: c_int,
) -> Status {
    if flags & COLL_SYMMETRIC != 0 {
        // All ranks register windows together, so all of them know.
        shadow::find(comm.0).iter().for_each(|attached| attached.note_symmetric());
    }
    inside(|| vendor(comm, buffer, bytes, window, flags))
}

/// `ncclGroupStart`. A group has a part for the vendor's communicators and one for those of the host.
pub fn group_start(vendor: extern "C" fn() -> Status) -> Status {
    let code = library().map_or(SUCCESS, |_| group::start(|| inside(|| vendor().0)));
    if code == SUCCESS {
        host_group::start();
    }
    Status(code)
}

/// `ncclGroupEnd`. The vendor's part comes first on all ranks; where one part fails, the other is done.
pub fn group_end(vendor: extern "C" fn() -> Status) -> Status {
    let has_host_part = host_group::is_open() || library().is_none();
    let vendor = || inside(|| vendor().0);
    let code = library().map_or(SUCCESS, |library| group::end(library, vendor));
    let host = has_host_part.then(|| enter::<Status>("ncclGroupEnd", CommHandle::NULL, host_group::end));
    Status(first(code, host.map_or(SUCCESS, |status| status.0)))
}

/// What a group is told that has ended with a code for each of its parts.
fn first(vendor: Code, host: Code) -> Code {
    let is_error = |code: Code| code != SUCCESS && code != shadow::IN_PROGRESS;
    match is_error(vendor) || (vendor != SUCCESS && !is_error(host)) {
        true => vendor,
        false => host,
    }
}

/// `ncclGroupSimulateEnd`
pub fn group_simulate_end(vendor: extern "C" fn(Ptr<SimInfo>) -> Status, info: Ptr<SimInfo>) -> Status {
    let has_host_part = host_group::is_open() || library().is_none();
    let vendor = || inside(|| vendor(info).0);
    let code = library().map_or(SUCCESS, |library| group::simulate_end(library, vendor));
    let host = || operations::add_estimate(info, library().is_some());
    let host = has_host_part.then(|| enter::<Status>("ncclGroupSimulateEnd", CommHandle::NULL, host));
    Status(first(code, host.map_or(SUCCESS, |status| status.0)))
}

/// Runs a call in two levels, or has the vendor do it.
fn collective(comm: CommHandle, call: VendorCall, vendor: impl FnOnce() -> Status) -> Status {
    let Some((attached, library)) = shadow::find(comm.0).zip(library()) else { return inside(vendor) };
    if attached.in_progress() {
        let early = "Attempt to use communicator before the previous operation returned ncclSuccess";
        crate::log::failed(early);
        return Status(Error::InvalidArgument(String::new()).code());
    }
    match attached.prepare(call) {
        Some(call) => Status(group::submit(call, library)),
        None => match attached.own_call(&call) {
            Some(operation) => Status(group::submit_own(operation)),
            None => match attached.has_all() {
                Ok(()) => inside(vendor),
                Err(error) => {
                    crate::log::failed(error.text());
                    Status(error.code())
                }
            },
        },
    }
}

macro_rules! collectives {
    ($($(#[doc = $doc:literal])+ $plain:ident, $with_config:ident = $collective:ident($($op:ident)?);)*) => { $(
        $(#[doc = $doc])+
        #[allow(clippy::too_many_arguments)]
        pub fn $plain(
            vendor: extern "C" fn(
                ConstBuffer, Buffer, usize, TypeCode, $(collectives!(@type $op),)? CommHandle, StreamHandle
            ) -> Status,
            send: ConstBuffer, recv: Buffer, count: usize, dtype: TypeCode, $($op: OpCode,)?
            comm: CommHandle, stream: StreamHandle,
        ) -> Status {
            let call = collectives!(@call $collective, send, recv, count, dtype, stream $(, $op)?);
            collective(comm, call, || vendor(send, recv, count, dtype, $($op,)? comm, stream))
        }

        $(#[doc = $doc])+
        #[allow(clippy::too_many_arguments)]
        pub fn $with_config(
            vendor: extern "C" fn(
                ConstBuffer, Buffer, usize, TypeCode, $(collectives!(@type $op),)? CommHandle, StreamHandle,
                ConstPtr<CollConfig>
            ) -> Status,
            send: ConstBuffer, recv: Buffer, count: usize, dtype: TypeCode, $($op: OpCode,)?
            comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>,
        ) -> Status {
            let through = || vendor(send, recv, count, dtype, $($op,)? comm, stream, config);
            if !config.is_null() {
                // Options are for the vendor's algorithms.
                return inside(through);
            }
            let call = collectives!(@call $collective, send, recv, count, dtype, stream $(, $op)?);
            collective(comm, call, through)
        }
    )* };
    (@type $op:ident) => { OpCode };
    (@call $collective:ident, $send:ident, $recv:ident, $count:ident, $dtype:ident, $stream:ident $(, $op:ident)?) => {
        VendorCall {
            collective: Collective::$collective,
            send: $send.address(),
            recv: $recv.address(),
            count: $count,
            dtype: $dtype.0,
            op: 0 $(+ $op.0)?,
            stream: $stream.0,
        }
    };
}

collectives! {
    /// `ncclAllGather`
    all_gather, all_gather_config = AllGather();
    /// `ncclReduceScatter`
    reduce_scatter, reduce_scatter_config = ReduceScatter(op);
    /// `ncclAllReduce`
    all_reduce, all_reduce_config = AllReduce(op);
}
