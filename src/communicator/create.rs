//! Making communicators: from a unique id, and out of another communicator.
#![forbid(unsafe_code)]

use super::device::{DeviceHome, MakeDevice};
use super::engine::{DataPlace, Engine};
use super::engine_watch::EngineWatch;
use super::fuse::FuseRules;
use super::gpu::GpuLauncher;
use super::meeting_watch::MeetingWatch;
use super::members::{check_kinds, check_versions, Member};
use super::messages::Counters;
use super::siblings::{self, AsSibling};
use super::windows::Windows;
use super::{late, nics, ops, provided, tuning, Comm, OperationQueue, ALIVE, ENDED};
use crate::bootstrap::connection::Interrupt;
use crate::bootstrap::launcher;
use crate::bootstrap::rendezvous::ranges;
use crate::bootstrap::{Credentials, Service, ServiceAddr};
use crate::bootstrap::{Derived, Session, UniqueId};
use crate::carrier::{Carrier, FurtherCarrier};
use crate::config::{Config, Fuse};
use crate::device::gpu::driver::Driver;
use crate::device::gpu::GpuDevice;
use crate::digest::Digest;
use crate::error::{counted, Error, Result};
use crate::fork::{Origin, PerProcess};
use crate::health::{Monitor, RankStatus};
use crate::log::Level;
use crate::memory::stream_bytes;
use crate::script::share;
use crate::script::store;
use crate::selection;
use crate::selection::links::Links;
use crate::selection::strategy;
use crate::selection::table::agree::{Followers, OwnTable};
use crate::selection::{Context, Knowledge, Selector};
use crate::sim::Cluster;
use crate::sync::biased::Biased;
use crate::sync::locked;
use crate::topo::local::LocalRank;
use crate::topo::{host, Grid, Rank};
use crate::transport::provider::CommProviders;
use crate::transport::shm::Rates;
use crate::transport::{self, Exchange as _, Waker};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::time::Duration;

/// What a program may ask of a communicator (`ncclConfig_t`); what has no meaning on the host is kept and ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommOptions {
    /// Calls wait until they have ended; else they return `InProgress`.
    pub blocking: bool,
    /// A name for messages.
    pub name: Option<String>,
    /// Children share the parent's resources.
    pub split_share: bool,
    /// The node this rank is on, if it is not the one the system says (ranks of one process on several "nodes").
    pub host_id: Option<String>,
    /// It stands beside one of the vendor's.
    pub companion: Option<Companion>,
    /// It is one of `strataCommInitHost`, or made out of one.
    pub on_host: Option<OnHost>,
    /// Data is on a device that this makes; without it on the GPU that is given, or in host memory.
    pub make_device: Option<MakeDevice>,
}

/// What a program may ask of a communicator of the host (`strataCommInitHost`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnHost {
    /// Limits its making and each of its operations in place of the settings; 0 sets no limit.
    pub timeout_ms: Option<u64>,
}

/// A communicator beside one of the vendor's. Its ranks only come together, unless Strata's transports are to carry what
/// goes between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Companion {
    /// The program's number of the GPU that the vendor's is on.
    pub device: Option<i32>,
}

impl Default for CommOptions {
    fn default() -> CommOptions {
        CommOptions {
            blocking: true,
            name: None,
            split_share: false,
            host_id: None,
            companion: None,
            on_host: None,
            make_device: None,
        }
    }
}

/// A rank's arguments for [`Comm::init`].
#[derive(Debug, Clone)]
pub struct InitParams {
    /// How many ranks there will be.
    pub nranks: usize,
    /// This one's number.
    pub rank: usize,
    /// One id, or several that share the work of bringing the ranks together.
    pub ids: Vec<UniqueId>,
    /// What the program asks for.
    pub options: CommOptions,
    /// The rank's device.
    pub device: i32,
    /// The GPU on which its data is; none on the host.
    pub gpu: Option<Arc<GpuDevice>>,
}

/// Who a new communicator's ranks are and how they meet.
struct Meeting<'a> {
    session: Session<'a>,
    rank: usize,
    nranks: usize,
    options: CommOptions,
    device: i32,
    gpu: Option<Arc<GpuDevice>>,
    /// What the parent knows of the links between nodes.
    links: Option<Links>,
    cancel: &'a AtomicBool,
    /// What it is for, where it is a further carrier of another communicator of the same ranks.
    sibling: Option<AsSibling<'a>>,
}

/// Said once in a process.
static NO_MACHINE: PerProcess<Once> = PerProcess::new(Once::new);

/// A part of so many bytes is a long one.
const LONG_BYTES: usize = 1 << 20;
/// The purpose of a meeting that leaves ranks out begins with this.
const SHRINK: &str = "shrink to";
/// And that of a meeting of those who go on without lost ranks.
const SURVIVORS: &str = "survivors";
/// The same of those who have lost nobody since they met.
const RENEWED: &str = "survivors renewed";

/// Whether ranks that have failed in the parent may come, and come again.
fn is_without_lost(purpose: &str) -> bool {
    purpose.starts_with(SHRINK) || purpose.starts_with(SURVIVORS)
}

/// How long ranks whose vendor's communicator stands already wait for each other. Who does not come by then has no Strata.
const COMPANION_PATIENCE: Duration = Duration::from_secs(30);

/// This process's settings for a communicator.
fn settings(options: &CommOptions) -> Config {
    let (mut config, _) = Config::from_env();
    if let Some(timeout_ms) = options.on_host.and_then(|on_host| on_host.timeout_ms) {
        (config.timeout_ms, config.bootstrap_timeout_ms) = (timeout_ms, timeout_ms);
    }
    config
}

/// Tells what is wrong with the settings, once: on rank 0 of the process's first communicator, which is one process of a
/// job of any size, in any case; elsewhere only to those who asked for warnings.
fn tell_wrong_settings(rank: usize, id: &UniqueId) {
    static FIRST: OnceLock<UniqueId> = OnceLock::new();
    static TOLD: [Once; 2] = [const { Once::new() }; 2];
    if FIRST.get_or_init(|| *id).0 != id.0 {
        return;
    }
    let tell = |text: &String| match rank {
        0 => crate::log::notice(text),
        _ => crate::log::write(Level::Warn, text),
    };
    TOLD[usize::from(rank == 0)].call_once(|| {
        let (config, mut warnings) = Config::from_env();
        warnings.extend(selection::unknown_names(&config));
        warnings.iter().for_each(tell);
    });
}

fn myself(device: i32) -> Result<Member> {
    Ok(Member {
        host_id: host::host_id(),
        host: crate::log::host_name(),
        pid: std::process::id(),
        device,
        local: LocalRank::from_env().map(|local| (local.rank, local.size)),
        launched: launcher::numbers().map(|(rank, _)| rank as u32),
        gpu: nics::gpu_of_this_process(device),
        service: Service::get()?.addr().0.to_string(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        color: 0,
        key: 0,
        on_gpu: false,
        on_host: false,
        extra: Vec::new(),
    })
}

/// Whether the data of any rank is not in host memory.
fn on_devices(members: &[Member]) -> bool {
    members.iter().any(|member| member.on_gpu)
}

fn decode_all(infos: &[Vec<u8>]) -> Result<Vec<Member>> {
    infos.iter().enumerate().map(|(rank, bytes)| Member::decode(rank, bytes)).collect()
}

fn parse<T: std::str::FromStr>(text: Option<&String>) -> Result<T> {
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| Error::Remote("rank 0 sent settings that cannot be read".to_string()))
}

/// A number that every member derives alike.
fn derive(key: u128, purpose: &str, number: u64, color: i32) -> u128 {
    Digest::new("room").bytes(&key.to_le_bytes()).text(purpose).number(number).number(color).value()
}

fn address(member: &Member) -> Result<ServiceAddr> {
    parse(Some(&member.service)).map(ServiceAddr)
}

impl Comm {
    /// A new unique id; this process brings together the ranks that use it.
    pub fn unique_id() -> Result<UniqueId> {
        UniqueId::create()
    }

    /// Makes a communicator together with the other ranks that have the same ids. Collective.
    pub fn init(params: InitParams, cancel: &AtomicBool) -> Result<Arc<Comm>> {
        Comm::init_unless(params, cancel, cancel)
    }

    fn init_unless(params: InitParams, interrupt: &dyn Interrupt, cancel: &AtomicBool) -> Result<Arc<Comm>> {
        let InitParams { nranks, rank, ids, options, device, gpu } = params;
        if let Some(id) = ids.first() {
            tell_wrong_settings(rank, id);
        }
        let mut timeout = settings(&options).bootstrap_limit();
        if options.companion.is_some() {
            timeout = timeout.min(COMPANION_PATIENCE);
        }
        let session = Session::join(&ids, nranks, Rank::from_index(rank), timeout, interrupt)?;
        Meeting { session, rank, nranks, options, device, gpu, links: None, cancel, sibling: None }.hold()
    }

    /// A communicator of the ranks that give the same `color`, ordered by `key` and rank. Collective over the parent.
    /// Setting `cancel` ends it within milliseconds, here and in what follows.
    pub fn split(
        self: &Arc<Comm>,
        color: i32,
        key: i32,
        options: CommOptions,
        cancel: &AtomicBool,
    ) -> Result<Option<Arc<Comm>>> {
        let number = self.children.load(Ordering::Acquire);
        let mut me = myself(self.device)?;
        (me.color, me.key) = (color, key);
        let told = decode_all(&self.tell(me.encode(), cancel)?)?;
        if color < 0 {
            return Ok(None);
        }
        let mut ours: Vec<(i32, usize)> =
            told.iter().enumerate().filter(|(_, m)| m.color == color).map(|(rank, m)| (m.key, rank)).collect();
        ours.sort_unstable();
        let ours: Vec<usize> = ours.into_iter().map(|(_, rank)| rank).collect();
        self.child(&ours, ("color", number, color), options, cancel).map(Some)
    }

    /// A communicator of all ranks but those in `exclude`, which do not call. Collective over the others.
    /// With `abort` the parent's operations are ended first.
    pub fn shrink(
        self: &Arc<Comm>,
        exclude: &[usize],
        abort: bool,
        options: CommOptions,
        cancel: &AtomicBool,
    ) -> Result<Arc<Comm>> {
        self.at_home()?;
        if abort {
            self.windows.abort();
            self.stop(Error::Remote(format!("rank {} shrank the communicator", self.rank)));
            self.turns.wait_all(Duration::from_secs(10));
        }
        let left: Vec<usize> = (0..self.nranks()).filter(|rank| !exclude.contains(rank)).collect();
        // The ranks left out do not call and do not count: the number is one of those who do. Nor do time-outs, which ranks that
        // came too late have not met.
        let number = locked(&self.shrinks).get(&left).copied().unwrap_or(0);
        let child = self.child(&left, (&format!("{SHRINK} {left:?}"), number, 0), options, cancel);
        if !matches!(child, Err(Error::Timeout(_))) {
            *locked(&self.shrinks).entry(left).or_default() += 1;
        }
        child
    }

    /// An id for ranks that are to join this communicator by [`Comm::grow`].
    pub fn grow_id(&self) -> Result<UniqueId> {
        let mut pending = locked(&self.grow_id);
        if pending.is_some() {
            return Err(Error::InvalidUsage("the previous id of this communicator has not been used yet".to_string()));
        }
        let id = UniqueId::create()?;
        *pending = Some(id);
        Ok(id)
    }

    /// A communicator of `nranks` ranks: the parent's, which keep their numbers (`rank` is `None`, one of them gives the
    /// `id`), and new ones (no parent, an `id` and a `rank`). Collective over all.
    pub fn grow(
        parent: Option<&Arc<Comm>>,
        nranks: usize,
        id: Option<UniqueId>,
        rank: Option<usize>,
        options: CommOptions,
        cancel: &AtomicBool,
    ) -> Result<Arc<Comm>> {
        let missing = |what: &str| Error::InvalidArgument(format!("ncclCommGrow needs {what}"));
        let (id, rank, device) = match parent {
            None => (id.ok_or_else(|| missing("an id on a new rank"))?, rank.ok_or_else(|| missing("a rank"))?, 0),
            Some(parent) => {
                if nranks <= parent.nranks() {
                    let text = format!("growing {} to {nranks}", counted(parent.nranks(), "rank"));
                    return Err(Error::InvalidArgument(text));
                }
                (parent.pass_id(id, cancel)?, parent.rank(), parent.device)
            }
        };
        let gpu = match parent {
            Some(parent) => parent.gpu().map(|device| device.gpu().clone()),
            None if options.companion.is_some() => None,
            None => GpuDevice::of_thread(None)?,
        };
        let params = InitParams { nranks, rank, ids: vec![id], options, device, gpu };
        let Some(parent) = parent else { return Comm::init(params, cancel) };
        let ranks: Vec<usize> = (0..parent.nranks()).collect();
        let watch = MeetingWatch::new(parent, &ranks, false, cancel);
        let comm = Comm::init_unless(params, &watch, cancel)?;
        *locked(&parent.grow_id) = None;
        Ok(comm)
    }

    /// Gives every rank what each has to say. Collective.
    pub fn tell(&self, said: Vec<u8>, cancel: &AtomicBool) -> Result<Vec<Vec<u8>>> {
        let number = self.children.fetch_add(1, Ordering::AcqRel);
        let all: Vec<usize> = (0..self.nranks()).collect();
        let watch = MeetingWatch::new(self, &all, false, cancel);
        let mut session = self.meet(&all, "tell", number, 0, &watch)?;
        let told = session.allgather(said)?;
        session.close();
        Ok(told)
    }

    /// Gives the id that one of the parent's ranks has to all of them.
    fn pass_id(&self, id: Option<UniqueId>, cancel: &AtomicBool) -> Result<UniqueId> {
        let told = self.tell(id.map_or(Vec::new(), |id| id.0.to_vec()), cancel)?;
        let ids: Vec<&Vec<u8>> = told.iter().filter(|bytes| !bytes.is_empty()).collect();
        match ids[..] {
            [id] => <[u8; 128]>::try_from(&id[..])
                .map(UniqueId)
                .map_err(|_| Error::Remote("an id of a wrong length".to_string())),
            _ => Err(Error::InvalidUsage(format!("{} of the existing ranks gave an id; one must", ids.len()))),
        }
    }

    /// A session of some of this communicator's ranks, at the first one's service.
    fn meet<'a>(
        &self,
        ranks: &[usize],
        purpose: &str,
        number: u64,
        color: i32,
        interrupt: &'a dyn Interrupt,
    ) -> Result<Session<'a>> {
        self.at_home()?;
        if self.phase.load(Ordering::Acquire) == ENDED {
            return Err(Error::InvalidArgument("the communicator has been destroyed".to_string()));
        }
        let position = ranks.iter().position(|&rank| rank == self.rank());
        let me = position.ok_or_else(|| Error::InvalidArgument(format!("rank {} is excluded", self.rank)))?;
        let leader = address(&self.members[ranks[0]])?;
        let key = derive(self.credentials.key, purpose, number, color);
        let room = Credentials { key, secret: self.credentials.secret };
        let timeout = self.config.bootstrap_limit();
        let leader_rank = Rank::from_index(ranks[0]);
        Session::join_derived(
            Derived { leader, leader_rank, room, retries: is_without_lost(purpose) },
            ranks.len(),
            Rank::from_index(me),
            timeout,
            interrupt,
        )
    }

    /// Says which ranks of this communicator those of the new one are, where their numbers differ.
    fn in_parent(&self, ranks: &[usize], error: Error) -> Error {
        let Error::Timeout(text) = error else { return error };
        match ranks.iter().enumerate().all(|(new, &old)| new == old) {
            true => Error::Timeout(text),
            false => {
                let old = ranges(ranks.iter().map(|&rank| rank as u32));
                Error::Timeout(format!("{text}; its ranks are {old} of the parent, in this order"))
            }
        }
    }

    /// A communicator of all its ranks for a further carrier. Collective.
    pub(super) fn make_sibling(&self, sibling: AsSibling<'_>, cancel: &AtomicBool) -> Result<Arc<Comm>> {
        let all: Vec<usize> = (0..self.nranks()).collect();
        let watch = MeetingWatch::new(self, &all, false, cancel);
        let session = self.meet(&all, &format!("carrier {}", sibling.name()), 0, 0, &watch)?;
        let own_name = self.options.name.as_deref().unwrap_or_default();
        let options = CommOptions { name: Some(format!("{own_name}@{}", sibling.name())), ..self.options.clone() };
        let carries_data = sibling.carries_data();
        let gpu = self.gpu().filter(|_| carries_data).map(|device| device.gpu().clone());
        let make_device = options.make_device.filter(|_| carries_data);
        let options = CommOptions { make_device, ..options };
        let (rank, nranks, device, links) = (self.rank(), self.nranks(), self.device, None);
        Meeting { session, rank, nranks, options, device, gpu, links, cancel, sibling: Some(sibling) }.hold()
    }

    /// The communicator with which the ranks that are `left` go on in this one's place. Collective over them.
    pub(super) fn without_lost(
        &self,
        left: &[usize],
        on_device: Option<&DeviceHome>,
        cancel: &AtomicBool,
    ) -> Result<Arc<Comm>> {
        // The vendor's communicator of the node has ranks that are lost: Strata's own transports do its part from now on.
        let options = CommOptions { companion: None, ..self.options.clone() };
        self.of_survivors(left, SURVIVORS, (on_device, options), cancel)
    }

    /// The same for ranks that go on as they are; whether a vendor's library will work inside the nodes.
    pub(super) fn renewed(
        &self,
        left: &[usize],
        (on_device, around_vendor): (Option<&DeviceHome>, bool),
        cancel: &AtomicBool,
    ) -> Result<Arc<Comm>> {
        let companion = self.options.companion.filter(|_| around_vendor);
        let options = CommOptions { companion, ..self.options.clone() };
        self.of_survivors(left, RENEWED, (on_device, options), cancel)
    }

    fn of_survivors(
        &self,
        left: &[usize],
        purpose: &str,
        (device, options): (Option<&DeviceHome>, CommOptions),
        cancel: &AtomicBool,
    ) -> Result<Arc<Comm>> {
        let watch = MeetingWatch::among_survivors(self, left, cancel);
        let session = self.meet(left, &format!("{purpose} {left:?}"), 0, 0, &watch)?;
        let rank = left.iter().position(|&rank| rank == self.rank()).expect("meet checked it");
        let sibling = Some(AsSibling::Survivors { parent: self, device });
        let (nranks, device, gpu, links) = (left.len(), self.device, None, self.links.get().copied());
        Meeting { session, rank, nranks, options, device, gpu, links, cancel, sibling }.hold()
    }

    /// What a communicator gets when it has been made: the figures of its links, and its siblings.
    fn complete(
        self: &Arc<Comm>,
        links: Option<Links>,
        further: &[FurtherCarrier],
        sibling: Option<&AsSibling<'_>>,
        cancel: &AtomicBool,
    ) -> Result<()> {
        super::exit::remember(self);
        let made = self.meter(links).and_then(|()| self.make_siblings(further, cancel));
        made.inspect_err(|_| self.abort())?;
        if sibling.is_none_or(AsSibling::carries_data) {
            self.record_calls();
            self.begin_epochs(matches!(sibling, Some(AsSibling::Survivors { .. })))?;
            self.begin_late()?;
        }
        if sibling.is_none() {
            self.begin_survivors()?;
        }
        Ok(())
    }

    fn child(
        &self,
        ranks: &[usize],
        (purpose, number, color): (&str, u64, i32),
        options: CommOptions,
        cancel: &AtomicBool,
    ) -> Result<Arc<Comm>> {
        let watch = MeetingWatch::new(self, ranks, is_without_lost(purpose), cancel);
        let session = self.meet(ranks, purpose, number, color, &watch).map_err(|error| self.in_parent(ranks, error))?;
        let rank = ranks.iter().position(|&rank| rank == self.rank()).expect("meet checked it");
        let options = CommOptions {
            host_id: options.host_id.or_else(|| self.options.host_id.clone()),
            make_device: options.make_device.or(self.options.make_device),
            on_host: self.options.on_host,
            ..options
        };
        let gpu = match options.companion {
            Some(_) => None,
            None => self.gpu().map(|device| device.gpu().clone()),
        };
        let (links, nranks, device) = (self.links.get().copied(), ranks.len(), self.device);
        Meeting { session, rank, nranks, options, device, gpu, links, cancel, sibling: None }.hold()
    }
}

/// Numbers messages where they take no turns, and has the engine know that they do not. Where late ranks are relayed before their programs
/// have made the call, messages that waited for such a call would wait for who waits for them.
fn numbers(
    config: &Config,
    members: &[Member],
    options: &CommOptions,
    between: (usize, Option<Carrier>),
    engine: &mut Option<Engine>,
) -> Option<Mutex<Counters>> {
    let takes_none = options.on_host.is_some() || late::relays_before_calls(config, members, options, between);
    takes_none.then(|| {
        engine.iter_mut().for_each(Engine::free_messages);
        Mutex::new(Counters::new(members.len()))
    })
}

/// How rank 0's process is reached, and what it is asked with.
fn credentials(zero: &[String]) -> Result<Credentials> {
    let secret = parse::<u128>(zero.get(2))?.to_le_bytes();
    Ok(Credentials { key: parse(zero.get(1))?, secret })
}

/// Takes over rank 0's settings; one warning tells all that differ.
fn take_over(config: &mut Config, zero: &[String]) {
    let differences = config.take_over(zero.first().map_or("", String::as_str));
    if !differences.is_empty() {
        crate::log::warn(&differences.join("; "));
    }
}

/// Who is on which node, and the links inside nodes, if the machine has some.
fn grid_of(members: &[Member], machine: Option<&Cluster>) -> Grid {
    let labels: Vec<&str> = members.iter().map(|member| member.host_id.as_str()).collect();
    let grid = Grid::from_labels(&labels);
    match machine {
        Some(machine) => machine.on_links(grid),
        None => grid,
    }
}

/// How a communicator fares; its first failure wakes the thread that runs an operation.
fn status(waker: &Option<Waker>) -> Arc<RankStatus> {
    let wake = waker.clone();
    Arc::new(RankStatus::new(move || wake.iter().for_each(Waker::wake)))
}

/// What watches the ranks, if there are several.
fn monitor(
    credentials: Credentials,
    rank: Rank,
    members: &[Member],
    status: &Arc<RankStatus>,
    config: &Config,
) -> Result<Option<Monitor>> {
    let addresses = members.iter().map(address).collect::<Result<Vec<ServiceAddr>>>()?;
    match members.len() {
        1 => Ok(None),
        _ => Monitor::start(credentials, rank, addresses, status.clone(), config.mute_after()).map(Some),
    }
}

/// The text of the machine that rank 0's user names. One that cannot be read is told and left out.
fn offered_machine(name: &str) -> String {
    selection::model::offer(name).unwrap_or_else(|error| {
        NO_MACHINE.get().call_once(|| crate::log::notice(&format!("STRATA_MACHINE is left out: {}", error.text())));
        String::new()
    })
}

/// Waits for the links, unless the making is cancelled; the others, who have the communicator by now, are told that.
fn link(monitor: Option<&Monitor>, config: &Config, cancel: &AtomicBool) -> Result<()> {
    let linked = monitor.map_or(Ok(()), |monitor| monitor.wait_linked(config.bootstrap_limit(), cancel));
    if !cancel.load(Ordering::Acquire) {
        return linked;
    }
    let aborted = Error::Remote("it aborted the communicator while it was being made".to_string());
    monitor.iter().for_each(|monitor| monitor.report(0, &aborted));
    Err(Error::InvalidUsage("the communicator was aborted while it was being made".to_string()))
}

fn tell_made(key: u128, name: Option<&str>, rank: Rank, grid: &Grid) {
    let name = name.map_or(String::new(), |name| format!(" {name}"));
    crate::info!("comm {key:032x}{name} rank {rank} nranks {} on {grid} Init COMPLETE", grid.nranks());
}

impl Meeting<'_> {
    /// This process's settings for it.
    fn settings(&self) -> Config {
        let mut config = self.sibling.as_ref().map_or_else(|| settings(&self.options), AsSibling::config);
        if self.options.companion.is_some() {
            config.vendor_only = selection::vendor::left_to_vendor(&config.vendor_only);
        }
        config
    }

    /// What moves the data, with what does whole collectives. A companion does where Strata's transports are to carry what goes
    /// between nodes.
    fn engine(
        &mut self,
        rank: Rank,
        grid: &Arc<Grid>,
        members: &[Member],
        config: &Config,
    ) -> Result<(Option<Engine>, Arc<CommProviders>)> {
        if let Some(companion) = self.options.companion {
            let all_on_gpus = members.iter().all(|member| member.on_gpu);
            if !config.inter.in_front().is_own() || grid.nnodes() == 1 || !all_on_gpus {
                return Ok((None, Arc::default()));
            }
            self.gpu = GpuDevice::of_thread(companion.device)?;
        }
        let nic = || nics::binding(rank, grid, members, config);
        let site = transport::Site { me: rank, grid, config, binding: &nic };
        let mut transport = match &self.sibling {
            None => transport::open(rank, grid, config, &nic, &mut self.session)?,
            Some(sibling) => sibling.open(&site, &mut self.session)?,
        };
        let providers = match self.options.companion {
            None => provided::open(&mut transport, &site, &mut self.session)?,
            Some(_) => CommProviders::default(),
        };
        let taken = self.sibling.as_ref().and_then(AsSibling::device);
        let place = match (self.options.make_device, &self.gpu) {
            _ if taken.is_some() => taken.map_or(DataPlace::Host, DataPlace::Taken),
            (Some(make), _) => DataPlace::Made(make),
            (None, Some(gpu)) => DataPlace::Gpu(gpu),
            (None, None) => DataPlace::Host,
        };
        let on_devices = on_devices(members);
        // In front of a vendor's library nothing is joined.
        let fuse = if self.options.companion.is_none() { config.fuse } else { Fuse::Off };
        let config = Config { fuse, ..config.clone() };
        let engine = Engine::new(rank, grid.clone(), config, transport, (place, on_devices))?;
        Ok((Some(engine), Arc::new(providers)))
    }

    /// What this rank tells the others.
    fn myself(&self, config: &Config, table: &OwnTable) -> Result<Member> {
        let mut me = myself(self.device)?;
        let beside_gpu = |companion: Companion| companion.device.is_some() && Driver::get().is_some();
        me.on_gpu =
            self.gpu.is_some() || self.options.make_device.is_some() || self.options.companion.is_some_and(beside_gpu);
        me.on_gpu |= self.sibling.as_ref().is_some_and(|sibling| sibling.device().is_some());
        me.on_host = self.options.on_host.is_some();
        if let Some(host_id) = &self.options.host_id {
            me.host_id.clone_from(host_id);
        }
        if self.rank == 0 {
            let Credentials { key, secret } = Credentials::random()?;
            let offer = tuning::offer(table, self.gpu.as_ref(), self.options.companion, self.nranks);
            let secret = u128::from_le_bytes(secret).to_string();
            me.extra = vec![config.agreed(), key.to_string(), secret, offer, offered_machine(&config.machine)];
            let nranks = self.nranks;
            let is_wanted = |name: &str, of_script| {
                store::is_wanted(config, nranks, name, of_script) || table.names_script(nranks, name)
            };
            let (scripts, complaints) = share::offer(config, &is_wanted);
            complaints.iter().for_each(|complaint| crate::log::notice(complaint));
            me.extra.push(scripts);
            me.extra.push(strategy::offer(config));
        }
        Ok(me)
    }

    /// What carries messages between nodes, and what choices are made by: rank 0's tuning table and machine, as far as they
    /// hold there.
    fn follow(
        &mut self,
        table: &OwnTable,
        zero: &[String],
        grid: &Arc<Grid>,
        machine: Option<Arc<Cluster>>,
        engine: &mut Option<Engine>,
        config: &Config,
    ) -> Result<(Option<Carrier>, Knowledge)> {
        let carrier = engine.as_mut().map_or(Some(Carrier::Vendor), |engine| engine.transport().carrier());
        // Rows of the table may name scripts.
        let offer = zero.get(5).map_or("", String::as_str);
        let scripts = share::share(offer, self.rank == 0, &mut |mine| self.session.allgather(mine))?;
        let world = Followers { grid, inter: carrier, in_front: self.options.companion.is_some(), scripts: &scripts };
        let tuned = Arc::new(tuning::agree(self.rank, table, zero.get(3), &world)?);
        let strategies = tuning::follow_strategies(self.rank, config, zero.get(6), grid)?;
        let knowledge = Knowledge { tuned, scripts: Arc::new(scripts), strategies, machine };
        Ok((carrier, knowledge))
    }

    /// The last round, when everybody has come so far. Whether some rank shares its processors with others of its node; and
    /// where all would rather have the kernel read a long part than copy it, from how many bytes on an operation bypasses the
    /// cache of one of them: each may know something else of its machine.
    fn last_round(&mut self, engine: &mut Option<Engine>) -> Result<(bool, Option<usize>)> {
        let shares = engine.as_mut().is_some_and(|engine| engine.transport().shares_among_ranks());
        let has_board = self.nranks == 2 && engine.as_ref().is_some_and(Engine::has_board);
        let lends = has_board && !shares && Rates::get().lends(LONG_BYTES, 1);
        let stream = if lends { stream_bytes() as u64 } else { 0 };
        let said = self.session.allgather([&[u8::from(shares)][..], &stream.to_le_bytes()].concat())?;
        let stream_of =
            |said: &Vec<u8>| said.get(1..).and_then(|stream| stream.try_into().ok()).map_or(0, u64::from_le_bytes);
        let stream = said.iter().map(stream_of).min();
        Ok((
            said.iter().any(|said| said.first() == Some(&1)),
            stream.filter(|&bytes| bytes > 0).map(|bytes| bytes as usize),
        ))
    }

    /// Exchanges what everybody must know and opens the links.
    fn hold(mut self) -> Result<Arc<Comm>> {
        let mut config = self.settings();
        let table = OwnTable::load(&config);
        let me = self.myself(&config, &table)?;
        let members = decode_all(&self.session.allgather(me.encode())?)?;
        check_kinds(&members)?;
        let zero = &members[0].extra;
        let credentials = credentials(zero)?;
        take_over(&mut config, zero);
        let further = siblings::wanted(&mut config, &self.options)?;
        check_versions(&members, &me.version)?;
        let machine = selection::model::agree(zero.get(4).map_or("", String::as_str))?;
        let grid = Arc::new(grid_of(&members, machine.as_deref()));
        let rank = Rank::from_index(self.rank);
        let (mut engine, providers) = self.engine(rank, &grid, &members, &config)?;
        let (carrier, knowledge) = self.follow(&table, zero, &grid, machine, &mut engine, &config)?;
        let gpu = engine.as_ref().and(self.gpu.as_ref()).map(GpuLauncher::new).transpose()?;
        let (waker, on_devices) = (engine.as_ref().map(Engine::waker), on_devices(&members));
        let status = status(&waker);
        let monitor = monitor(credentials, rank, &members, &status, &config)?;
        // Nobody may use a link, or leave, before everybody has it. Nothing may be waited for before this round but
        // what the session knows of: it names those who do not come to the round.
        let (crowded, lends) = self.last_round(&mut engine)?;
        self.session.close();
        let context = Context::new(grid.clone(), config.clone(), engine.as_ref().is_some_and(Engine::has_board));
        let context = Context { knowledge, crowded, on_devices, lends, providers: providers.clone(), ..context };
        link(monitor.as_ref(), &config, self.cancel)?;
        tell_made(credentials.key, self.options.name.as_deref(), rank, &grid);
        let comm = Arc::new(Comm {
            origin: Origin::here(),
            credentials,
            rank,
            device: self.device,
            numbers: numbers(&config, &members, &self.options, (grid.nnodes(), carrier), &mut engine),
            engine: Biased::new(engine),
            gpu,
            grid,
            config,
            fuse: FuseRules::of(&self.options, &context),
            providers,
            members,
            selector: Selector::new(context),
            siblings: OnceLock::new(),
            windows: Windows::default(),
            epochs: OnceLock::new(),
            late: OnceLock::new(),
            survivors: OnceLock::new(),
            family: OnceLock::new(),
            links: OnceLock::new(),
            carrier,
            options: self.options,
            waker,
            status,
            monitor: Mutex::new(monitor),
            turns: OperationQueue::new(),
            watch: EngineWatch::default(),
            phase: AtomicU32::new(ALIVE),
            abortion: Mutex::new(Some(super::abortion(rank))),
            suspended: AtomicBool::new(false),
            operations: Mutex::new(ops::Operations::default()),
            children: AtomicU64::new(0),
            shrinks: Mutex::default(),
            grow_id: Mutex::new(None),
            seen: Mutex::new(None),
            records: OnceLock::new(),
        });
        comm.complete(self.links, &further, self.sibling.as_ref(), self.cancel)?;
        Ok(comm)
    }
}
