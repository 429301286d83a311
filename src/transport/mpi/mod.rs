//! MPI between nodes, through a plugin that is opened at run time.
//!
//! `libstrata.so` links no MPI, so that one build loads everywhere. A plugin, built against the site's MPI, is a table of
//! functions ([`vtable`], the one file that both compile). All calls of MPI are made on one thread ([`worker_thread`]). All
//! ranks of a communicator use MPI or none does: they tell each other what they have ([`capabilities`]) and decide alike.

mod calls;
pub(crate) mod capabilities;
mod collectives;
mod endpoint;
#[cfg(test)]
mod fake;
mod library;
mod peer;
#[cfg(test)]
mod tests;
pub(super) mod together;
mod worker;
mod worker_thread;
// The plugin uses what the library does not.
#[allow(dead_code)]
#[path = "../../../plugins/mpi/src/vtable.rs"]
mod vtable;

pub use collectives::MpiCollectives;
pub use library::own_file;

use super::shm::wakeup::{Waker, Wakeups};
use super::{Endpoint, Exchange, Opener, Probe, Site, TransportKind};
use crate::carrier::{Carrier, Inter};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::log::Level;
use crate::topo::export::{export_nic, MpiJob, MpiLibrary};
use crate::topo::interface::{self, Filter};
use crate::topo::local::LocalRank;
use crate::topo::machine::{gpus_of_ranks, Machine};
use crate::topo::pinning::Rules;
use crate::topo::Rank;
use capabilities::{decide, Capabilities, LauncherEnv};
use endpoint::MpiEndpoint;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use together::together;
use worker::{Addresses, MpiLink, MpiWorker, NewComm};

/// Its name in `STRATA_INTER` and tuning tables.
const NAME: &str = "mpi";

/// Finds the thread that calls MPI, or says why there is none.
type FindWorker = dyn Fn(&Config, &LauncherEnv) -> std::result::Result<Arc<MpiWorker>, String> + Send + Sync;

/// What a process has of MPI: what the launcher said, and the way to the thread that calls it.
pub struct MpiEnvironment {
    launch: LauncherEnv,
    worker: Box<FindWorker>,
}

/// The thread of this process, and the process: a forked child has none.
static WORKER: Mutex<Option<(u32, Arc<MpiWorker>)>> = Mutex::new(None);

/// Whether the program had an MPI before a plugin was looked for.
static PROGRAM_HAS_MPI: OnceLock<bool> = OnceLock::new();

/// What the program's exit calls, if anything.
static AT_EXIT: OnceLock<extern "C" fn()> = OnceLock::new();

/// Notes what was registered with `atexit` and ends in [`leave`].
pub fn note_exit_handler(handler: extern "C" fn()) {
    // The first one counts; there is only one.
    let _ = AT_EXIT.set(handler);
}

/// Registers the exit handler once more. Handlers run in the opposite order of their registration, and MPICH registers
/// one when it is initialised that tells the launcher of the end, if MPI has been finalised by then.
fn leave_before_mpi() {
    if let Some(&handler) = AT_EXIT.get() {
        // SAFETY: the function must stay mapped until the process exits; because the library is linked `-z nodelete`.
        let _ = unsafe { libc::atexit(handler) };
    }
}

/// Whether a communicator of this process has failed.
static FAILED: AtomicBool = AtomicBool::new(false);
/// How long `MPI_Finalize` may then take.
const FAILED_LIMIT: Duration = Duration::from_secs(5);

/// Tells MPI which NIC this process uses, where the launcher has told its local rank. MPI does without if that fails; who
/// wrote a map hears of it whatever `NCCL_DEBUG` says.
fn export(description: &str, nic_map: &str, addresses: &Addresses) {
    let Some(local) = LocalRank::from_env() else { return };
    let exported = Machine::this().and_then(|machine| {
        let gpus = gpus_of_ranks(&machine, &vec![None; local.size]);
        export_nic(
            &MpiJob { library: MpiLibrary::from_version(description), ucx: library::ucx_version(), addresses },
            local,
            &gpus,
            &Rules::new(nic_map, Filter::from_env())?,
        )
    });
    if let Err(error) = exported {
        let text = format!("MPI is not told which NIC to use: {error}");
        match (local.rank, nic_map) {
            (0, map) if map != "auto" => crate::log::notice(&text),
            _ => crate::log::write(Level::Warn, &text),
        }
    }
}

fn worker(config: &Config, launch: &LauncherEnv) -> std::result::Result<Arc<MpiWorker>, String> {
    let mut worker = WORKER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match &*worker {
        Some((pid, worker)) if *pid == std::process::id() => return Ok(worker.clone()),
        Some(_) => return Err("it is a forked child of a process that uses MPI".to_string()),
        None => {}
    }
    // Asked for once, since a plugin that cannot be used may have brought an MPI with it all the same.
    let program_has_mpi = *PROGRAM_HAS_MPI.get_or_init(library::program_has_mpi);
    let plugin = library::find(&config.mpi_plugin, launch.flavour)?;
    let (description, nic_map) = (plugin.description.clone(), config.nic_map.clone());
    let before_init = move |addresses: &Addresses| export(&description, &nic_map, addresses);
    let mut started =
        MpiWorker::start(plugin.calls, plugin.description, || {}, before_init).map_err(|error| error.to_string())?;
    started.program_has_mpi = program_has_mpi;
    let started = Arc::new(started);
    *worker = Some((std::process::id(), started.clone()));
    Ok(started)
}

/// What `MPI_Finalize` calls first, on the thread of whoever calls it. A panic is a bug of ours and ends here.
extern "C" fn mpi_ends() {
    if std::panic::catch_unwind(retire).is_err() {
        crate::log::warn("MPI_Finalize: a bug in Strata: communicators that use MPI could not be ended");
    }
}

/// Ends this process's use of MPI.
fn retire() {
    // While `leave` finalises MPI itself it holds the lock, and there is nothing to be done here.
    let Ok(worker) = WORKER.try_lock() else { return };
    let worker = worker.as_ref().filter(|(pid, _)| *pid == std::process::id()).map(|(_, worker)| worker.clone());
    if let Some(worker) = worker {
        worker.retire();
    }
}

/// Whether this process has ended its use of MPI.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Finalises MPI if we initialised it. Called while the process exits, by each of the handlers; the first one does it. None waits for
/// another one: MPI may end the process while it is finalised.
fn leave() {
    let Ok(worker) = WORKER.try_lock() else { return };
    let Some((_, worker)) = worker.as_ref().filter(|(pid, _)| *pid == std::process::id()) else { return };
    if LEFT.swap(true, Ordering::Relaxed) {
        return;
    }
    // The other ranks may be busy for long after this one has ended, and a launcher takes an end without
    // MPI_Finalize for a failure of the job.
    let limit = match Config::from_env().0.timeout_ms {
        _ if FAILED.load(Ordering::Relaxed) => FAILED_LIMIT,
        0 => Duration::from_secs(u64::from(u32::MAX)),
        ms => Duration::from_millis(ms),
    };
    if let Err(error) = worker.leave(limit) {
        crate::info!("MPI was not finalised: {error}");
    }
}

impl MpiEnvironment {
    /// The real one.
    pub fn of_this_process() -> MpiEnvironment {
        MpiEnvironment { launch: LauncherEnv::from_vars(|name| std::env::var(name).ok()), worker: Box::new(worker) }
    }
}

/// A decision for MPI.
struct Joined {
    me: Rank,
    worker: Arc<MpiWorker>,
    /// Each rank's rank in MPI's world.
    world: Vec<i32>,
    /// This one's, and the world's size.
    rank: i32,
    size: i32,
    exclusive: bool,
    limit: Duration,
    /// Whose device memory this process's MPI takes addresses of.
    device_memory: i32,
}

/// For people: which MPIs the library in this file could use, or why none is.
pub fn survey(config: &Config, file: &std::path::Path) -> Vec<String> {
    match config.inter {
        Inter::Only(Carrier::Own(name)) if name != NAME => vec![format!("off: STRATA_INTER is {name}")],
        _ => library::survey(&config.mpi_plugin, file),
    }
}

fn cards(exchange: &mut dyn Exchange, mine: &Capabilities) -> Result<Vec<Capabilities>> {
    exchange.allgather(mine.encode())?.iter().map(|bytes| Capabilities::decode(bytes)).collect()
}

/// MPI, through the plugin of this process.
pub struct MpiKind;

impl TransportKind for MpiKind {
    fn name(&self) -> &'static str {
        NAME
    }

    fn probe(&self, site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Probe> {
        MpiEnvironment::of_this_process().probe(site, exchange)
    }

    fn waits_for_descriptors(&self) -> bool {
        false
    }

    fn note_failure(&self) {
        FAILED.store(true, Ordering::Relaxed);
    }

    fn leave_process(&self) {
        leave();
    }
}

impl TransportKind for MpiEnvironment {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Decides with all ranks whether MPI carries what goes between their nodes; initialises it if need be.
    fn probe(&self, site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<Probe> {
        let Site { me, grid, .. } = *site;
        if grid.node_ids().count() < 2 {
            if me == Rank(0) && self.launch.rank.is_some() {
                crate::info!("MPI has nothing to carry: all ranks are on one node (NCCL_HOSTID makes it several)");
            }
            return Ok(Probe::Unwanted);
        }
        Ok(match self.join(site, site.asks_for(NAME), exchange)? {
            Ok(joined) => {
                let (name, rank, size) = (library::name_in(&joined.worker.description), joined.rank, joined.size);
                crate::info!("MPI carries messages between nodes: rank {me} is rank {rank} of {size} in {name}");
                Probe::Taken(Box::new(joined))
            }
            Err(why) => Probe::Refused(why),
        })
    }

    fn waits_for_descriptors(&self) -> bool {
        MpiKind.waits_for_descriptors()
    }
}

impl MpiEnvironment {
    /// Decides with all ranks whether they have MPI; initialises it if need be. Why they have not, the same on all.
    fn join(
        &self,
        site: &Site<'_>,
        is_asked_for: bool,
        exchange: &mut dyn Exchange,
    ) -> Result<std::result::Result<Joined, String>> {
        let limit = site.config.bootstrap_limit();
        let (worker, mut card, mut exclusive) = look(site, self, is_asked_for);
        let told = cards(exchange, &card)?;
        let mut outcome = decide(&told).map(|running| (running, told));
        if let (Some(worker), Ok((false, told))) = (&worker, &outcome) {
            let addresses = told.iter().map(|card| card.addresses.clone()).collect();
            let started = together(exchange, |meanwhile| worker.init(addresses, limit, meanwhile));
            leave_before_mpi();
            exclusive = false;
            outcome = match started? {
                Ok(world) => {
                    together(exchange, |meanwhile| worker.meet(limit, meanwhile))?.map_err(no_way)?;
                    card = Capabilities::new(&world, &self.launch, &worker.description);
                    let told = cards(exchange, &card)?;
                    decide(&told).map(|running| (running, told))
                }
                Err(error) => Err(error.text().to_string()),
            };
        }
        Ok(match (worker, outcome) {
            (Some(worker), Ok((_, told))) => {
                let (rank, size, device_memory) = (card.world_rank, card.world_size, card.device_memory);
                let world = told.iter().map(|card| card.world_rank).collect();
                Ok(Joined { me: site.me, worker, world, rank, size, exclusive, limit, device_memory })
            }
            (_, outcome) => Err(outcome.err().unwrap_or_default()),
        })
    }
}

/// The error of a barrier just after MPI has been initialised.
fn no_way(error: Error) -> Error {
    Error::Remote(format!(
        "MPI's processes do not all reach each other; STRATA_NIC_MAP and MPI's own variables, such as UCX_NET_DEVICES, \
         OMPI_MCA_btl_tcp_if_include and FI_TCP_IFACE, say which NICs it uses: {}",
        error.text()
    ))
}

/// The addresses by which other hosts may reach this one.
fn own_addresses() -> Vec<IpAddr> {
    let all = interface::all().unwrap_or_default();
    let reachable = all.into_iter().filter(|interface| interface.up && !interface.loopback && !interface.link_local());
    reachable.map(|interface| interface.addr).collect()
}

/// What this process has of MPI. Without a launcher, and unless the user asks for MPI, no plugin is looked for.
fn look(
    site: &Site<'_>,
    environment: &MpiEnvironment,
    is_asked_for: bool,
) -> (Option<Arc<MpiWorker>>, Capabilities, bool) {
    if environment.launch.rank.is_none() && !is_asked_for {
        return (None, Capabilities::refusal("no MPI launcher started it"), false);
    }
    let found = (environment.worker)(site.config, &environment.launch);
    let worker = match found {
        Ok(worker) => worker,
        Err(why) => return (None, Capabilities::refusal(&why), false),
    };
    match worker.look() {
        // MPI may be initialised once, and a program that finds it done by us would be ended by MPI.
        Ok(world) if world.state == vtable::state::FRESH && worker.program_has_mpi && !is_asked_for => {
            let why = "the program has an MPI of its own and has not initialised it: that has to happen before the \
                       first communicator, or STRATA_INTER=mpi lets Strata do it";
            (None, Capabilities::refusal(why), false)
        }
        Ok(world) => {
            let mut card = Capabilities::new(&world, &environment.launch, &worker.description);
            if world.state == vtable::state::FRESH {
                card.addresses = own_addresses();
            }
            let exclusive = world.thread_level < vtable::thread_level::MULTIPLE;
            (Some(worker), card, exclusive)
        }
        Err(error) => (None, Capabilities::refusal(error.text()), false),
    }
}

impl Opener for Joined {
    /// Makes the MPI communicator and the transport to the ranks `far`. All ranks call it together.
    fn open(
        self: Box<Self>,
        _: &Site<'_>,
        far: &[Rank],
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<Option<Box<dyn Endpoint>>> {
        let (me, device_memory) = (self.me, (self.device_memory, self.worker.clone()));
        let (link, nonce) = self.link(wakeups, exchange)?;
        Ok(Some(Box::new(MpiEndpoint::new(me, link, nonce, far, wakeups.clone(), device_memory))))
    }
}

impl Joined {
    /// Makes an MPI communicator of these ranks, in their order, and a number that all of them know. All ranks call it together.
    fn link(&self, wakeups: &Arc<Wakeups>, exchange: &mut dyn Exchange) -> Result<(MpiLink, u64)> {
        let nonce = exchange.allgather(super::shm::open::random()?.to_le_bytes().to_vec())?;
        let nonce = nonce.first().and_then(|bytes| bytes.as_slice().try_into().ok()).map(u64::from_le_bytes);
        let nonce = nonce.ok_or_else(|| Error::Remote("rank 0 told no number".to_string()))?;
        self.take_turns(nonce, exchange)?;
        let tag = (nonce % vtable::MAX_TAG as u64) as i32;
        let waker = Waker::new(wakeups.clone());
        let (ranks, exclusive, limit) = (self.world.clone(), self.exclusive, self.limit);
        let wish = NewComm { ranks, tag, exclusive, waker, limit };
        let made = together(exchange, |meanwhile| self.worker.create(wish, meanwhile));
        self.worker.let_create();
        Ok((made??, nonce))
    }

    /// Waits until every rank's process makes this communicator and no other: making one blocks the thread that calls
    /// MPI, so two processes that made two in opposite orders would wait for each other for ever.
    fn take_turns(&self, nonce: u64, exchange: &mut dyn Exchange) -> Result<()> {
        let end = Instant::now() + self.limit;
        let mut pause = Duration::from_micros(200);
        loop {
            let mine = self.worker.may_create();
            let told = exchange.allgather(vec![u8::from(mine)]);
            if told.as_ref().is_ok_and(|told| told.iter().all(|may| may == &[1])) {
                return Ok(());
            }
            if mine {
                self.worker.let_create();
            }
            told?;
            if Instant::now() > end {
                let text = "the ranks' processes were busy making other communicators until the time was up";
                return Err(Error::Timeout(text.to_string()));
            }
            // All ranks of one communicator pause alike, those of different ones differently.
            let jitter = nonce.rotate_left(pause.subsec_micros() % 64) % 1000;
            std::thread::sleep(pause + pause * jitter as u32 / 500);
            pause = (2 * pause).min(Duration::from_millis(50));
        }
    }
}
