//! Bodies of the entries that make, change and end communicators.
#![forbid(unsafe_code)]

use super::handles::{self, Handle};
use super::interrupted;
use super::options;
use super::windows;
use crate::bootstrap::store::Store;
use crate::carrier::DeviceSetting;
use crate::communicator::shadow::read_id;
use crate::communicator::{group, AdaptOptions, Comm, CommOptions, InitParams, OnHost, UniqueId};
use crate::config::Config as Settings;
use crate::device::gpu::GpuDevice;
use crate::error::{counted, Error, Result};
use crate::interface::layouts::{NcclConfig, UniqueIdBytes};
use crate::interface::pointer::{Buffer, Callback, ConstPtr, Ptr, Text};
use crate::interface::types::{null, CommHandle};
use crate::process::check_address_space;
use std::ffi::c_int;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

/// `NCCL_SPLIT_NOCOLOR`
const NO_COLOR: c_int = -1;

fn invalid<T>(text: String) -> Result<T> {
    Err(Error::InvalidArgument(text))
}

/// A handle whose communicator is being made. Whatever ends the making early, a group that is dropped included, takes
/// the name away again.
struct Unborn {
    handle: Arc<Handle>,
    settled: bool,
}

impl Unborn {
    fn new(blocking: bool) -> Unborn {
        let handle = Handle::reserve(blocking);
        handle.begin();
        Unborn { handle, settled: false }
    }

    /// Keeps the outcome: in the handle, which a program that does not wait still holds; a program that waited gets the
    /// error and a null handle.
    fn settle(mut self, made: Result<Arc<Comm>>, newcomm: Ptr<CommHandle>) -> Result<()> {
        self.settled = true;
        match made {
            Ok(comm) => {
                self.handle.made(comm);
                Ok(())
            }
            Err(error) => {
                tell(&self.handle, &error);
                self.handle.failed(error.clone());
                if self.handle.blocking {
                    self.handle.remove();
                    newcomm.set("comm", CommHandle::NULL)?;
                }
                Err(error)
            }
        }
    }
}

/// Logs an error that no call returns, before the program can see that there is one. What another failure of the group
/// has ended says nothing: its cause is the text that counts.
fn tell(handle: &Handle, error: &Error) {
    if !handle.blocking && !handle.is_cancelled() {
        let text = format!("communicator {:#x}: {error} (result {})", handle.name.0, error.code());
        crate::log::warn(&text);
    }
}

impl Drop for Unborn {
    fn drop(&mut self) {
        if !self.settled {
            self.handle.failed(Error::Internal("making the communicator ended early".to_string()));
            if self.handle.blocking {
                self.handle.remove();
            }
        }
    }
}

/// Makes a communicator whose name the program gets at once.
fn make<F>(newcomm: Ptr<CommHandle>, blocking: bool, work: F) -> Result<()>
where
    F: FnOnce(&AtomicBool) -> Result<Arc<Comm>> + Send + 'static,
{
    has_addresses(1)?;
    super::exit::register();
    let unborn = Unborn::new(blocking);
    let handle = unborn.handle.clone();
    newcomm.set("comm", handle.name)?;
    let cancel = handle.cancellable();
    let cancelled = cancel.clone();
    let work = move || unborn.settle(work(&cancelled), newcomm);
    let task = group::Task { communicator: handle.name.0, blocking, ends: false, cancel, work: Box::new(work) };
    group::manage(task)
}

/// Addresses that making a communicator takes: threads with their stacks and heaps (64 MB each with the GNU C library),
/// buffers, shared memory; and what the process must have left besides.
const ADDRESSES: u64 = 64 << 20;
const OTHER_ADDRESSES: u64 = 192 << 20;

/// An error where the process may not map what so many communicators take.
fn has_addresses(communicators: usize) -> Result<()> {
    check_address_space(OTHER_ADDRESSES + ADDRESSES * communicators as u64)
        .map_err(|error| Error::System(format!("making a communicator: {error}")))
}

/// Makes a communicator out of another one. Its name is written when it has been made, as NCCL does.
fn derive<F>(parent: Arc<Handle>, newcomm: Ptr<CommHandle>, blocking: bool, work: F) -> Result<()>
where
    F: FnOnce(&AtomicBool) -> Result<Option<Arc<Comm>>> + Send + 'static,
{
    newcomm.set("newcomm", CommHandle::NULL)?;
    has_addresses(1)?;
    let waits = parent.blocking;
    let born = move |parent: &Handle, comm: Arc<Comm>| {
        let child = Handle::reserve(blocking);
        child.begin();
        child.made(comm);
        // A program that has ended the parent meanwhile may have freed what the pointer points at.
        parent.while_named(|| newcomm.set("newcomm", child.name)).unwrap_or_else(|| {
            child.remove().iter().for_each(|comm| comm.abort());
            Ok(())
        })
    };
    run_on(parent, waits, false, move |parent, cancel| match work(cancel)? {
        Some(comm) => born(parent, comm),
        None => Ok(()),
    })
}

/// Runs a task on a communicator, which may be its last. Where nobody waits for it, the communicator is in progress
/// until it has ended.
pub(super) fn run_on<F>(handle: Arc<Handle>, blocking: bool, ends: bool, work: F) -> Result<()>
where
    F: FnOnce(&Handle, &AtomicBool) -> Result<()> + Send + 'static,
{
    // Asked here: the work is another thread's.
    handle.not_in_callback()?;
    // A failure ends this task's group, not what may be done with the communicator later.
    let (communicator, cancel) = (handle.name.0, handle.cancellable());
    let cancelled = cancel.clone();
    let busy = (!blocking).then(|| Busy::new(handle.clone()));
    let work = move || {
        let outcome = work(&handle, &cancelled);
        if let (Some(busy), Err(error)) = (busy, &outcome) {
            busy.fail(error.clone());
        }
        outcome
    };
    group::manage(group::Task { communicator, blocking, ends, cancel, work: Box::new(work) })
}

/// Keeps a handle in progress for as long as it lives.
struct Busy(Option<Arc<Handle>>);

impl Busy {
    fn new(handle: Arc<Handle>) -> Busy {
        handle.begin();
        Busy(Some(handle))
    }

    fn fail(mut self, error: Error) {
        if let Some(handle) = self.0.take() {
            tell(&handle, &error);
            handle.failed(error);
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(handle) = self.0.take() {
            handle.finish();
        }
    }
}

/// `ncclGetUniqueId`
pub fn get_unique_id(out: Ptr<UniqueIdBytes>) -> Result<()> {
    if out.is_null() {
        return Err(null("uniqueId"));
    }
    out.set("uniqueId", UniqueIdBytes(Comm::unique_id()?.0))
}

/// `strataGetWorldId`
pub fn get_world_id(out: Ptr<UniqueIdBytes>, nranks: Ptr<c_int>, rank: Ptr<c_int>) -> Result<()> {
    for (is_null, name) in [(out.is_null(), "uniqueId"), (nranks.is_null(), "nranks"), (rank.is_null(), "rank")] {
        if is_null {
            return Err(null(name));
        }
    }
    let mut store = Store::from_env(Settings::from_env().0.bootstrap_limit())?;
    let mine = if store.rank == 0 { Comm::unique_id()?.0.to_vec() } else { Vec::new() };
    let id = store.broadcast(&mine)?.try_into().map_err(|told: Vec<u8>| {
        Error::Remote(format!("process 0 of the job has sent {} bytes, which are no unique id", told.len()))
    })?;
    nranks.set("nranks", store.size as c_int)?;
    rank.set("rank", store.rank as c_int)?;
    out.set("uniqueId", UniqueIdBytes(id))
}

/// `ncclCommInitRank`
pub fn init_rank(newcomm: Ptr<CommHandle>, nranks: c_int, id: UniqueIdBytes, rank: c_int) -> Result<()> {
    init_rank_config(newcomm, nranks, id, rank, Ptr::null())
}

/// `ncclCommInitRankMulti`. Several ranks may be on a device in any case, so nothing is to be told apart by virtual ids.
pub fn init_rank_multi(
    newcomm: Ptr<CommHandle>,
    nranks: c_int,
    id: UniqueIdBytes,
    rank: c_int,
    _virtual_id: c_int,
) -> Result<()> {
    init_rank(newcomm, nranks, id, rank)
}

/// `ncclCommInitRankConfig`
pub fn init_rank_config(
    newcomm: Ptr<CommHandle>,
    nranks: c_int,
    id: UniqueIdBytes,
    rank: c_int,
    config: Ptr<NcclConfig>,
) -> Result<()> {
    group::noted(init(newcomm, nranks, rank, config, || Ok(vec![UniqueId(id.0)])))
}

/// `ncclCommInitRankScalable`
pub fn init_rank_scalable(
    newcomm: Ptr<CommHandle>,
    nranks: c_int,
    rank: c_int,
    nids: c_int,
    ids: Ptr<UniqueIdBytes>,
    config: Ptr<NcclConfig>,
) -> Result<()> {
    let read = || match usize::try_from(nids) {
        Ok(count) if count > 0 && nids <= nranks => {
            Ok(ids.as_const().get_all(count, "commIds")?.into_iter().map(|id| UniqueId(id.0)).collect())
        }
        _ => invalid(format!("improper number of ids: nId = {nids}, nranks = {nranks}")),
    };
    group::noted(init(newcomm, nranks, rank, config, read))
}

/// `strataCommInitHost`
pub fn init_host(
    newcomm: Ptr<CommHandle>,
    nranks: c_int,
    id: UniqueIdBytes,
    rank: c_int,
    timeout_ms: c_int,
) -> Result<()> {
    let record = || {
        if newcomm.is_null() {
            return Err(null("comm"));
        }
        let (nranks, rank) = ranks(nranks, rank)?;
        // An id of ncclGetUniqueId in front of the vendor's library carries Strata's.
        let ids = vec![read_id(&id.0).unwrap_or(UniqueId(id.0))];
        if let Err(error) = ids[0].credentials() {
            return invalid(format!("{error}; strataGetUniqueId makes ids for strataCommInitHost"));
        }
        let on_host = Some(OnHost { timeout_ms: u64::try_from(timeout_ms).ok() });
        let options = CommOptions { on_host, ..CommOptions::default() };
        let params = InitParams { nranks, rank, ids, options, device: 0, gpu: None };
        // Before the program has a handle that is not the vendor's.
        super::table::serve_host_communicators();
        make(newcomm, true, move |cancel| Comm::init(params, cancel))
    };
    group::noted(record())
}

fn init(
    newcomm: Ptr<CommHandle>,
    nranks: c_int,
    rank: c_int,
    config: Ptr<NcclConfig>,
    ids: impl FnOnce() -> Result<Vec<UniqueId>>,
) -> Result<()> {
    if newcomm.is_null() {
        return Err(null("comm"));
    }
    let (nranks, rank) = ranks(nranks, rank)?;
    let ids = ids()?;
    let options = options::communicator(config.as_const(), None)?;
    let blocking = options.blocking;
    let gpu = gpu(None)?;
    let device = gpu.as_ref().map_or(0, |gpu| gpu.number());
    let params = InitParams { nranks, rank, ids, options, device, gpu };
    make(newcomm, blocking, move |cancel| Comm::init(params, cancel))
}

fn ranks(nranks: c_int, rank: c_int) -> Result<(usize, usize)> {
    match (usize::try_from(nranks), usize::try_from(rank)) {
        (Ok(all), Ok(one)) if one < all => Ok((all, one)),
        _ => invalid(format!("Invalid rank requested : {rank}/{nranks}")),
    }
}

/// The GPU that the program uses, as its driver has it current on this thread, or the one of a number; none where it uses
/// none, or has said so.
pub fn gpu(number: Option<c_int>) -> Result<Option<Arc<GpuDevice>>> {
    match Settings::from_env().0.device {
        DeviceSetting::Host => Ok(None),
        DeviceSetting::Auto => GpuDevice::of_thread(number),
    }
}

/// `ncclCommInitAll`
pub fn init_all(comms: Ptr<CommHandle>, ndev: c_int, devices: ConstPtr<c_int>) -> Result<()> {
    group::noted(init_all_unnoted(comms, ndev, devices))
}

fn init_all_unnoted(comms: Ptr<CommHandle>, ndev: c_int, devices: ConstPtr<c_int>) -> Result<()> {
    if comms.is_null() {
        return Err(null("comms"));
    }
    let nranks = usize::try_from(ndev).ok().filter(|&ndev| ndev > 0);
    let Some(nranks) = nranks else {
        return invalid(format!("invalid number of devices {ndev}"));
    };
    let devices = match devices.is_null() {
        true => (0..ndev).collect(),
        false => devices.get_all(nranks, "devlist")?,
    };
    for (index, device) in devices.iter().enumerate() {
        if *device < 0 {
            return invalid(format!("invalid device {device}"));
        }
        if devices[..index].contains(device) {
            return Err(Error::InvalidUsage(format!("device {device} is listed more than once")));
        }
    }
    has_addresses(nranks)?;
    let options = options::communicator(ConstPtr::null(), None)?;
    let id = Comm::unique_id()?;
    group::start();
    let mut outcome = Ok(());
    for (rank, device) in devices.into_iter().enumerate() {
        let gpu = gpu(Some(device))?;
        let params = InitParams { nranks, rank, ids: vec![id], options: options.clone(), device, gpu };
        let made = make(comms.at(rank), options.blocking, move |cancel| Comm::init(params, cancel));
        outcome = outcome.and(group::noted(made));
    }
    outcome.and(group::end())
}

/// `ncclCommSplit`
pub fn split(
    comm: CommHandle,
    color: c_int,
    key: c_int,
    newcomm: Ptr<CommHandle>,
    config: Ptr<NcclConfig>,
) -> Result<()> {
    let record = || {
        let (handle, parent, options) = parent(comm, newcomm, config)?;
        if color < NO_COLOR {
            return invalid(format!("invalid color {color}"));
        }
        derive(handle, newcomm, options.blocking, move |cancel| parent.split(color, key, options, cancel))
    };
    group::noted(record())
}

/// What the calls that derive a communicator check first.
fn parent(
    comm: CommHandle,
    newcomm: Ptr<CommHandle>,
    config: Ptr<NcclConfig>,
) -> Result<(Arc<Handle>, Arc<Comm>, CommOptions)> {
    let handle = handles::find(comm)?;
    if newcomm.is_null() {
        return Err(null("newcomm"));
    }
    let parent = handle.parent()?;
    let options = options::communicator(config.as_const(), Some(parent.options()))?;
    Ok((handle, parent, options))
}

/// `ncclCommShrink`
pub fn shrink(
    comm: CommHandle,
    excluded: Ptr<c_int>,
    count: c_int,
    newcomm: Ptr<CommHandle>,
    config: Ptr<NcclConfig>,
    flags: c_int,
) -> Result<()> {
    let record = || {
        let handle = handles::find(comm)?;
        if newcomm.is_null() {
            return Err(null("newcomm"));
        }
        let Some(count) = usize::try_from(count).ok().filter(|&count| count > 0) else {
            return invalid(format!("invalid number of excluded ranks {count}"));
        };
        let abort = match flags {
            0 => false,
            1 => true,
            _ => return invalid(format!("invalid shrink flags {flags:#x}")),
        };
        // A communicator that has failed is what SHRINK_ABORT is for.
        let parent = if abort { handle.to_recover()? } else { handle.parent()? };
        // Checked before the list is read: nobody can be excluded twice, and somebody must be left.
        if count >= parent.nranks() {
            return invalid(format!("{count} of {} cannot be excluded", counted(parent.nranks(), "rank")));
        }
        let listed = excluded.as_const().get_all(count, "excludeRanksList")?;
        let excluded = excluded_ranks(&listed, &parent)?;
        let options = options::communicator(config.as_const(), Some(parent.options()))?;
        derive(handle, newcomm, options.blocking, move |cancel| {
            parent.shrink(&excluded, abort, options, cancel).map(Some)
        })
    };
    group::noted(record())
}

fn excluded_ranks(listed: &[c_int], parent: &Comm) -> Result<Vec<usize>> {
    let mut excluded = Vec::new();
    for &rank in listed {
        match usize::try_from(rank) {
            Ok(index) if index == parent.rank() => return invalid(format!("rank {rank} is excluded and calls")),
            Ok(index) if index < parent.nranks() && !excluded.contains(&index) => excluded.push(index),
            _ => {
                return invalid(format!(
                    "rank {rank} is not one of {}, or excluded twice",
                    counted(parent.nranks(), "rank")
                ))
            }
        }
    }
    Ok(excluded)
}

/// `ncclCommGetUniqueId`
pub fn grow_id(comm: CommHandle, out: Ptr<UniqueIdBytes>) -> Result<()> {
    let handle = handles::find(comm)?;
    if out.is_null() {
        return Err(null("uniqueId"));
    }
    out.set("uniqueId", UniqueIdBytes(handle.parent()?.grow_id()?.0))
}

/// `ncclCommGrow`
pub fn grow(
    comm: CommHandle,
    nranks: c_int,
    id: ConstPtr<UniqueIdBytes>,
    rank: c_int,
    newcomm: Ptr<CommHandle>,
    config: Ptr<NcclConfig>,
) -> Result<()> {
    let read_id = || id.get("uniqueId").map(|id| UniqueId(id.0));
    let join = || {
        if newcomm.is_null() {
            return Err(null("newcomm"));
        }
        let id = read_id()?;
        let (nranks, rank) = ranks(nranks, rank)?;
        let options = options::communicator(config.as_const(), None)?;
        // The GPU is the one of this thread, not of the thread that makes the communicator.
        let gpu = gpu(None)?;
        let device = gpu.as_ref().map_or(0, |gpu| gpu.number());
        let (blocking, ids) = (options.blocking, vec![id]);
        let params = InitParams { nranks, rank, ids, options, device, gpu };
        make(newcomm, blocking, move |cancel| Comm::init(params, cancel))
    };
    let extend = || {
        let (handle, parent, options) = parent(comm, newcomm, config)?;
        let id = if id.is_null() { None } else { Some(read_id()?) };
        if rank != -1 {
            return invalid(format!("existing ranks give rank -1, not {rank}"));
        }
        let Some(nranks) = usize::try_from(nranks).ok().filter(|&nranks| nranks > parent.nranks()) else {
            return invalid(format!("a communicator of {} cannot grow to {nranks}", counted(parent.nranks(), "rank")));
        };
        let blocking = options.blocking;
        derive(handle, newcomm, blocking, move |cancel| {
            Comm::grow(Some(&parent), nranks, id, None, options, cancel).map(Some)
        })
    };
    group::noted(if comm.is_null() { join() } else { extend() })
}

/// `ncclCommFinalize`
pub fn finalize(comm: CommHandle) -> Result<()> {
    if comm.is_null() {
        return Ok(());
    }
    let handle = handles::find(comm)?;
    let record = || {
        let comm = handle.ready()?;
        windows::refuse_open(&comm, "ncclCommFinalize")?;
        let blocking = handle.blocking;
        run_on(handle, blocking, false, move |_, _| comm.finalize())
    };
    group::noted(record())
}

/// `ncclCommDestroy`
pub fn destroy(comm: CommHandle) -> Result<()> {
    if comm.is_null() {
        return Ok(());
    }
    let handle = handles::find(comm)?;
    if handle.outcome() == Err(Error::InProgress) {
        return handle.ready().map(drop);
    }
    if let Ok(comm) = handle.ready() {
        windows::refuse_open(&comm, "ncclCommDestroy")?;
    }
    handle.not_in_callback()?;
    // The name goes first, so that no other call finds a communicator that is being freed.
    let Some(comm) = handle.remove() else {
        return Ok(());
    };
    let waits = handle.blocking || !group::is_open();
    let mut doomed = Doomed { handle: handle.clone(), comm: Some(comm) };
    run_on(handle, waits, true, move |_, _| doomed.comm.take().map_or(Ok(()), |comm| comm.destroy()))
}

/// A communicator whose name has been taken away. A group that is dropped does nothing, so it gives the name back.
struct Doomed {
    handle: Arc<Handle>,
    comm: Option<Arc<Comm>>,
}

impl Drop for Doomed {
    fn drop(&mut self) {
        if let Some(comm) = self.comm.take() {
            self.handle.restore(comm);
        }
    }
}

/// `ncclCommAbort`
pub fn abort(comm: CommHandle) -> Result<()> {
    if comm.is_null() {
        return Ok(());
    }
    if let Some(postponed) = interrupted::postpone(comm) {
        return postponed;
    }
    if interrupted::has_interrupted() {
        return interrupted::tell(comm);
    }
    let handle = handles::find(comm)?;
    handle.cancel();
    if let Some(comm) = handle.remove() {
        comm.abort();
    }
    Ok(())
}

/// `strataCommOnChange`
pub fn on_change(comm: CommHandle, callback: Callback, argument: Buffer) -> Result<()> {
    let comm = handles::find(comm)?.ready()?;
    watch(&comm, callback, argument)
}

/// Has a program's function called when ranks of a communicator are lost.
pub(super) fn watch(comm: &Comm, callback: Callback, argument: Buffer) -> Result<()> {
    let act = callback.get("callback").ok().map(|callback| {
        let argument = argument.address();
        Box::new(move || callback(argument)) as Box<dyn Fn() + Send>
    });
    comm.on_change(act)
}

/// `strataCommAdapt`
pub fn adapt(comm: CommHandle, options: Text) -> Result<()> {
    let comm = handles::find(comm)?.usable()?;
    comm.adapt(adapt_options(options)?, None)
}

/// What a program asks for; null names nothing.
pub(super) fn adapt_options(options: Text) -> Result<AdaptOptions> {
    if options.is_null() {
        return Ok(AdaptOptions::default());
    }
    options.get("options")?.parse()
}

/// `strataCommProfile`
pub fn profile(comm: CommHandle) -> Result<()> {
    handles::find(comm)?.usable()?.profile()
}

/// `ncclCommRevoke`
pub fn revoke(comm: CommHandle, flags: c_int) -> Result<()> {
    if comm.is_null() {
        return Ok(());
    }
    let handle = handles::find(comm)?;
    if flags != 0 {
        return invalid(format!("invalid revoke flags {flags:#x}"));
    }
    let comm = handle.to_recover()?;
    handle.set_revoked();
    comm.revoke()
}

/// `ncclCommGetAsyncError`
pub fn async_error(comm: CommHandle, out: Ptr<crate::interface::types::Status>) -> Result<()> {
    let handle = handles::find(comm)?;
    let code = match handle.outcome() {
        Ok(()) => crate::error::SUCCESS,
        Err(error) => {
            if !matches!(error, Error::InProgress) {
                // No call has returned it yet; who is told the code may ask for the words.
                crate::log::keep(error.text());
                crate::log::keep_for_thread(error.text());
            }
            error.code()
        }
    };
    out.set("asyncError", crate::interface::types::Status(code))
}
