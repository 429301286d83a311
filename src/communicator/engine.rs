//! What a communicator runs operations with: its transport, its plans, its scratch memory.

#[path = "engine_prepare.rs"]
mod prepare;
#[path = "engine_words.rs"]
mod words;

use super::again::{Begun, PreparedCalls};
use super::device::{Device, DeviceHome, DeviceSeat, HostDevice, MakeDevice};
use super::epochs::{CallPace, Epochs};
use super::front::CallFront;
use super::independent::{IndependentBatch, IndependentMessages};
use super::joined::{self, CallStage, PACKED_ROOM_BYTES};
use super::live::{Buffers, LiveWorld, RegionLists};
use super::messages::{Counters, Messages};
use super::signature::{explain, signature};
use super::staging::{Provider, Staging};
use super::CollectiveCall;
use crate::algorithms::{self, needs::needs};
use crate::carrier::Switch;
use crate::config::{Config, Fuse};
use crate::device::gpu::driver::DriverKind;
use crate::device::gpu::GpuDevice;
use crate::dtype::{Prologue, Reduction};
use crate::error::{counted, Error, Result, ShortResult};
use crate::exec::{Execution, Program, Progress, Started, Token};
use crate::memory::{shared, DeviceRegion, OnDevice};
use crate::plan::layout::Layout;
use crate::plan::stage::stage;
use crate::plan::weights::ChunkWeights;
use crate::plan::{Buffer, Collective, Plan, Shape, Span};
use crate::records::{CallNames, CommRecords};
use crate::selection::{Decision, Executor, Policy, Selection};
use crate::topo::{Grid, Rank};
use crate::transport::{Departure, Envelope, FlatCall, Router, Transport, Waker};
use std::collections::HashMap;
use std::sync::Arc;

/// What distinguishes two plans of one communicator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PlanKey {
    choice: algorithms::Choice,
    collective: Collective,
    root: Rank,
    in_place: bool,
    prologue: bool,
    staged: Staged,
}

/// Which of the call's buffers peers on the node cannot read in place, so that what is sent from there is staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Staged {
    input: bool,
    output: bool,
}

/// The call that is running.
struct Running {
    call: CollectiveCall,
    /// Our own memory.
    scratch: DeviceRegion,
    /// Where the data of several calls is brought together: what is sent, and what is received.
    packed: Option<[DeviceRegion; 2]>,
    stage: CallStage,
    /// Index in `recent`.
    ready: usize,
    /// Where those who follow it see how far it is.
    front: Option<Arc<CallFront>>,
    /// Whether its data is the host's, whatever the device: it is no call of the program's.
    on_host: bool,
    /// Whose words these are.
    epochs: Option<Arc<Epochs>>,
}

/// Everything a call of one shape needs, kept so that the next one of that shape allocates nothing.
struct Ready {
    call: CollectiveCall,
    decision: Arc<Decision>,
    staged: Staged,
    program: Arc<Program>,
    layout: Layout,
    segment_bytes: usize,
    window: usize,
    /// What each chunk has, where that is not the same.
    weights: Option<Arc<ChunkWeights>>,
    signature: u32,
    execution: Execution,
    /// What records call its algorithm, once one has asked.
    names: Option<CallNames>,
}

/// Runs the operations of one communicator, one collective (or group of messages) at a time.
pub struct Engine {
    rank: Rank,
    grid: Arc<Grid>,
    config: Config,
    /// Whether choices are not told: nobody has made these calls.
    silent: bool,
    /// Declared before the device: when it goes, it forgets the messages that point into the device's scratch.
    transport: Router,
    /// Where data is.
    device: DeviceSeat,
    /// Where the engine's own words are.
    host: HostDevice,
    /// What each rank has of all-reduces, where links deliver differently.
    shares: Option<Arc<ChunkWeights>>,
    /// How long all-reduces take, where ranks tell each other.
    pace: Option<Box<CallPace>>,
    /// Whether the ranks exchange on boards.
    board: bool,
    /// What a message of the program's is cut into, the same on all ranks.
    part_bytes: usize,
    programs: HashMap<PlanKey, Arc<Program>>,
    recent: Vec<Ready>,
    /// Calls that go straight to the board.
    pub(super) prepared: PreparedCalls,
    /// Kept for its allocation.
    pub(super) done_alone: Vec<Token>,
    explained: std::collections::HashSet<(Collective, u32, String)>,
    lists: RegionLists,
    running: Option<Running>,
    telling: words::WordRound,
    sequence: u64,
    /// That of the last one in which each rank knew its own sizes only; 0: none.
    own_sizes: u64,
    counters: Counters,
    /// Messages that do not wait for operations in turn, where the communicator has such.
    independent: Option<IndependentMessages>,
    /// How often threads have polled.
    visits: u64,
}

/// Where the data of a communicator's rank is.
pub enum DataPlace<'a> {
    /// In host memory.
    Host,
    /// On a GPU.
    Gpu(&'a Arc<GpuDevice>),
    /// On a device that the program has made.
    Made(MakeDevice),
    /// On the device of a communicator in whose place this one is.
    Taken(&'a DeviceHome),
}

/// Has messages to other nodes go from and to device memory, where the transport takes addresses there.
fn give_addresses(staging: &mut Staging, gpu: &Arc<GpuDevice>, transport: &Router, config: &Config) -> Result<()> {
    let taken = transport.takes_device_memory();
    let says = match gpu.driver().kind {
        DriverKind::Cuda => taken.cuda,
        DriverKind::Hip => taken.hip,
    };
    // Transports other than MPI take none, whoever wants it.
    let direct = match config.gpu_direct {
        Switch::Off => false,
        Switch::On => taken.above_bytes > 0,
        Switch::Auto => says,
    };
    if direct {
        crate::info!("MPI gets addresses on the device of messages longer than {} bytes", taken.above_bytes);
        let gpu = gpu.clone();
        // MPI asks the driver about addresses, which wants a context.
        transport.run_where_it_is_used(Box::new(move || gpu.stay()));
        staging.give_addresses(taken.above_bytes)?;
    }
    Ok(())
}

/// What a message between devices is cut into, so that copies and network overlap.
const DEVICE_PART_BYTES: usize = 1 << 20;
/// Device memory that is taken to bring blocks together, at most.
const MOST_ROOM_BYTES: usize = 64 << 20;
/// The step that brings data together before a call, and the one that takes it apart behind it: no plan is running then.
const MOVES: Token = 0;
/// How many recent calls are remembered whole, so that a training step's calls are prepared once.
const RECENT: usize = 32;

/// Bytes of scratch memory for the shortest segments: their chunks have 64 bytes, and no plan has more of them than three
/// full vectors.
fn least_scratch(grid: &Grid, window: usize) -> usize {
    64 * 3 * window * grid.nranks()
}

impl Engine {
    /// The engine of `rank` on `grid`. `on_devices` says whether the data of any rank is not in host memory.
    pub fn new(
        rank: Rank,
        grid: Arc<Grid>,
        config: Config,
        transport: Router,
        (place, on_devices): (DataPlace<'_>, bool),
    ) -> Result<Engine> {
        // All that a plan's segments need, from the beginning: see `gpu`.
        let scratch_bytes = config.scratch_bytes.max(least_scratch(&grid, config.window.clamp(1, 64)));
        let scratch_bytes = scratch_bytes + if config.fuse == Fuse::Off { 0 } else { PACKED_ROOM_BYTES };
        let made = |device: Box<dyn Device>| DeviceSeat::from(device);
        let device = match place {
            DataPlace::Host => made(Box::<HostDevice>::default()),
            DataPlace::Gpu(gpu) => {
                let mut staging = Staging::new(gpu, config.pinned_bytes, scratch_bytes)?;
                give_addresses(&mut staging, gpu, &transport, &config)?;
                made(Box::new(staging))
            }
            DataPlace::Made(MakeDevice(make)) => made(make(scratch_bytes)?),
            DataPlace::Taken(home) => DeviceSeat::taken_from(home)?,
        };
        Ok(Engine {
            rank,
            device,
            host: HostDevice::default(),
            shares: None,
            pace: (config.measure_every > 0).then(Box::default),
            board: transport.has_board() && !on_devices,
            part_bytes: if on_devices { DEVICE_PART_BYTES } else { usize::MAX },
            counters: Counters::new(grid.nranks()),
            grid,
            config,
            silent: false,
            transport,
            programs: HashMap::new(),
            recent: Vec::new(),
            prepared: PreparedCalls::default(),
            done_alone: Vec::new(),
            explained: Default::default(),
            lists: RegionLists::default(),
            running: None,
            telling: Default::default(),
            sequence: 0,
            own_sizes: 0,
            independent: None,
            visits: 0,
        })
    }

    /// Has messages wait for nothing but their partners; they are numbered by those who begin them.
    pub fn free_messages(&mut self) {
        self.independent = Some(IndependentMessages::default());
    }

    /// Whether messages have completed since this was asked last, and other threads than this one wait for them.
    pub fn has_news(&mut self) -> bool {
        self.independent.as_mut().is_some_and(IndependentMessages::has_news)
    }

    /// A thread is about to poll; the number of its visit.
    pub fn visit(&mut self) -> u64 {
        self.visits += 1;
        self.visits
    }

    /// The last visit's number.
    pub fn visits(&self) -> u64 {
        self.visits
    }

    /// Whether the ranks exchange on boards.
    pub fn has_board(&self) -> bool {
        self.board
    }

    /// Has what follows left untold, or ends that: then the program's first operation is number 1. All ranks do so between
    /// the same two operations.
    pub fn keep_quiet(&mut self, quiet: bool) {
        self.silent = quiet;
        (self.sequence, self.own_sizes) = (0, 0);
    }

    /// Wakes the thread that waits for an operation.
    pub fn waker(&self) -> Waker {
        self.transport.waker()
    }

    /// The transport.
    pub fn transport(&mut self) -> &mut Router {
        &mut self.transport
    }

    /// Gives scratch memory back, where the device can.
    pub fn free_scratch(&mut self) {
        // Another thread may have begun a call: it keeps what it uses.
        if self.running.is_none() {
            self.device.free_scratch();
        }
    }

    /// Whether the connection to a rank tells what of that rank's can still come.
    pub fn tells_what_can_come(&self, rank: Rank) -> bool {
        self.transport.tells_what_can_come(rank)
    }

    /// The ranks whose systems do not have yet everything that was sent to them.
    pub fn undelivered(&mut self) -> Vec<Rank> {
        self.transport.undelivered()
    }

    /// Ends; what is still on its way to others.
    pub fn leave(mut self) -> Option<Departure> {
        self.transport.leave()
    }

    /// The same while the process exits: the device is left to the end of the process, as its driver may have ended already.
    pub fn leave_at_exit(self) -> Option<Departure> {
        let Engine { mut transport, mut device, .. } = self;
        let departure = transport.leave();
        // First, as its messages may point into the device's scratch.
        drop(transport);
        device.leave();
        departure
    }

    /// Reads what a program has left on its device.
    pub fn read(&mut self, from: DeviceRegion, bytes: &mut [u8]) -> Result<()> {
        self.device.read(from, bytes)
    }

    /// Whether a device has work whose end only a poll sees.
    pub fn waits_for_device(&self) -> bool {
        self.device.is_busy()
    }

    /// An error if the device cannot be used any more.
    pub fn check_device(&self) -> Result<()> {
        self.device.check()
    }

    /// The NIC of this rank, where its transport knows it.
    pub fn nic(&self) -> Option<&str> {
        self.transport.nic()
    }

    /// The NIC of this rank that is down, where its transport knows that.
    pub fn nic_down(&self) -> Option<&str> {
        self.transport.nic_down()
    }

    /// Bytes of scratch memory held.
    pub fn scratch_bytes(&self) -> usize {
        self.device.scratch_bytes()
    }

    fn limit_ns(&self) -> u64 {
        self.config.timeout_ms.saturating_mul(1_000_000)
    }

    /// Has a provider do collectives inside the node.
    pub fn provide(&mut self, provider: Arc<dyn Provider>) -> Result<()> {
        let room_bytes = self.room_bytes();
        self.device.provide(provider, room_bytes, self.config.pack_beside_bytes)
    }

    /// Ends the provider.
    pub fn retire_provider(&mut self) {
        self.device.retire_provider();
    }

    /// Device memory to bring blocks together for a provider; the same on all ranks.
    fn room_bytes(&self) -> usize {
        self.config.vendor_scratch_bytes.min(MOST_ROOM_BYTES)
    }

    /// Whether a provider does the calls inside the node of this choice's plans. None has roots.
    fn is_around_node(&self, choice: &algorithms::Choice, collective: Collective) -> bool {
        self.device.has_provider() && algorithms::is_leveled(choice) && !collective.has_root()
    }

    /// Begins a collective. Returns false for one that moves nothing: nobody has decided about it.
    pub fn begin(&mut self, call: &CollectiveCall) -> Result<bool> {
        self.sequence += 1;
        if call.has_own_sizes() {
            self.own_sizes = self.sequence;
        }
        if call.moves_nothing(self.grid.nranks()) {
            return Ok(false);
        }
        let undecided = || Error::Internal("a call that moves data has not been decided".to_string());
        let decision = call.decision.as_ref().ok_or_else(undecided)?;
        let index = self.prepare(call, decision)?;
        self.transport.set_wide(call.loads_unevenly());
        self.transport.call_begins(&|| call.kind());
        self.begin_prepared(call, index)?;
        self.pace.iter_mut().for_each(|pace| pace.begin(call));
        Ok(true)
    }

    /// Runs a call that is in `recent`.
    fn run(&mut self, call: &CollectiveCall, index: usize) -> Result<()> {
        let limit_ns = self.limit_ns();
        let ready = &mut self.recent[index];
        let scratch_bytes = ready.layout.scratch_bytes() * ready.window.min(ready.layout.segments());
        let (scratch, packed, stage) = match &call.joined {
            None => (self.device.scratch(scratch_bytes)?, None, CallStage::Runs),
            Some(joined) => joined::gather(&mut *self.device, joined, scratch_bytes, MOVES)?,
        };
        self.device.begin(&ready.program, &ready.layout, ready.window)?;
        ready.execution.begin(ready.program.clone(), ready.layout.clone(), ready.window, limit_ns);
        self.running = Some(Running {
            call: call.clone(),
            scratch,
            packed,
            stage,
            ready: index,
            front: None,
            on_host: false,
            epochs: None,
        });
        Ok(())
    }

    /// What records call the algorithm of what has begun.
    pub(super) fn names(&mut self, records: &CommRecords) -> Option<CallNames> {
        let ready = &mut self.recent[self.running.as_ref()?.ready];
        let Executor::Own(Selection { choice, .. }) = &ready.decision.executor else { return None };
        Some(*ready.names.get_or_insert_with(|| records.names(&choice.to_string())))
    }

    /// Bytes that operations in turn have sent to other nodes.
    pub(super) fn sent_far(&self) -> u64 {
        self.transport.sent_far() - self.independent.as_ref().map_or(0, IndependentMessages::sent_far)
    }

    /// Has what has begun tell how far it is.
    pub fn follow(&mut self, front: Arc<CallFront>) {
        if let Some(running) = &mut self.running {
            running.front = Some(front);
        }
    }

    /// The signature of a call that can be made straight on the board, or needs nobody else; none of others.
    pub(super) fn signature_if_flat(&mut self, call: &CollectiveCall) -> Result<Option<u32>> {
        let plain = |reduction: Reduction| !reduction.needs_prologue();
        let is_plain = call.factor_at.is_none() && call.algorithm.is_none() && call.reduction.is_none_or(plain);
        if !self.device.is_host() || !is_plain || self.independent.is_some() {
            return Ok(None);
        }
        if self.grid.nranks() == 1 {
            return Ok(call.reduction.is_none_or(|reduction| reduction.divisor == 1).then_some(0));
        }
        let Some(decision) = &call.decision else { return Ok(None) };
        let on_board = |choice: &algorithms::Choice| choice.name == "board";
        if !matches!(&decision.executor, Executor::Own(selection) if on_board(&selection.choice)) {
            return Ok(None);
        }
        let index = self.prepare(call, decision)?;
        let Ready { layout, signature, .. } = &self.recent[index];
        Ok((layout.segments() == 1).then_some(*signature))
    }

    /// Begins such a call.
    #[inline]
    pub(super) fn call_flat(&mut self, signature: u32, call: &FlatCall<OnDevice>) -> ShortResult<Started> {
        self.sequence += 1;
        if self.grid.nranks() == 1 {
            self.device.copy(None, call.input, call.output)?;
            return Ok(Started::Done);
        }
        let envelope = Envelope { channel: 0, sequence: self.sequence, signature };
        self.device.call_flat(&mut self.transport, envelope, call)
    }

    /// Has such a call that has not ended go on as any other.
    pub(super) fn resume(&mut self, call: &CollectiveCall) -> Result<()> {
        let undecided = || Error::Internal("a prepared call has not been decided".to_string());
        let decision = call.decision.as_ref().ok_or_else(undecided)?;
        let index = self.prepare(call, decision)?;
        self.run(call, index)?;
        self.recent[index].execution.poll(&mut Begun).map(|_| ())
    }

    /// Whether a message can be posted by itself: in host memory, where nothing else runs whose end a poll could show.
    pub(super) fn takes_messages_alone(&self) -> bool {
        self.device.is_host() && self.part_bytes == usize::MAX && self.running.is_none() && self.independent.is_none()
    }

    /// The number of a message that comes by itself.
    pub(super) fn number_alone(&mut self, message: &super::Message) -> u64 {
        self.counters.next(message.direction, message.peer)
    }

    /// Posts a message by itself, as token 0.
    pub(super) fn post_alone(&mut self, message: &super::Message, sequence: u64) -> Result<Started> {
        super::messages::post(&mut *self.device, &mut self.transport, 0, message, sequence)
    }

    /// Sends or takes a message that comes by itself where it needs not be posted.
    #[inline]
    pub(super) fn exchange_short(&mut self, message: &super::Message, sequence: u64) -> ShortResult<Started> {
        super::messages::exchange_short(&mut *self.device, &mut self.transport, message, sequence)
    }

    /// An error of such a call, said as of any.
    pub(super) fn explained(&self, error: Error, call: &CollectiveCall) -> Error {
        explain(error, call, (self.sequence, self.own_sizes), false)
    }

    /// Makes progress with the collective that is running.
    pub fn poll(&mut self) -> Result<Progress> {
        let running = self.running.as_ref().ok_or_else(|| Error::Internal("no collective is running".to_string()))?;
        match running.stage {
            CallStage::Runs => {}
            CallStage::Words => return self.poll_words(),
            CallStage::Gathers | CallStage::Scatters => return self.poll_moves(),
        }
        let ready = &mut self.recent[running.ready];
        let device: &mut dyn Device = match running.on_host {
            false => &mut *self.device,
            true => &mut self.host,
        };
        let mut world = LiveWorld {
            device,
            transport: &mut self.transport,
            buffers: Buffers::of(&running.call, running.scratch, running.packed),
            rank: self.rank,
            dtype: running.call.dtype,
            reduction: running.call.reduction,
            residual: running.call.residual,
            sequence: self.sequence,
            signature: ready.signature,
            provider: ready.decision.provider(),
            uneven: running.call.blocks.is_some(),
            independent: self.independent.as_mut(),
            lists: &mut self.lists,
            front: running.front.as_deref().map(|front| (front, &ready.layout)),
        };
        let outcome = ready.execution.poll(&mut world);
        let beside = || self.independent.as_ref().is_some_and(IndependentMessages::are_open);
        let progress =
            outcome.map_err(|error| explain(error, &running.call, (self.sequence, self.own_sizes), beside()))?;
        if progress == Progress::Done {
            if let Some(Running { call: CollectiveCall { joined: Some(joined), .. }, packed, stage, .. }) =
                &mut self.running
            {
                if joined::scatter(&mut *self.device, joined, *packed, MOVES)? == Started::Pending {
                    *stage = CallStage::Scatters;
                    return Ok(Progress::Moved);
                }
            }
            self.end_running();
        }
        Ok(progress)
    }

    /// Looks whether the device has moved the data of calls that run as one.
    #[inline(never)]
    fn poll_moves(&mut self) -> Result<Progress> {
        let mut done = std::mem::take(&mut self.done_alone);
        done.clear();
        let polled = match &mut self.independent {
            None => self.device.poll(&mut self.transport, &mut done),
            Some(messages) => {
                messages.poll(&mut *self.device, &mut self.transport).map(|_| messages.take_others(&mut done))
            }
        };
        let has_moved = done.contains(&MOVES);
        self.done_alone = done;
        polled?;
        match &mut self.running {
            Some(running) if has_moved && running.stage == CallStage::Gathers => {
                running.stage = CallStage::Runs;
                Ok(Progress::Moved)
            }
            _ if has_moved => {
                self.running = None;
                Ok(Progress::Done)
            }
            _ => Ok(Progress::Idle),
        }
    }

    /// Begins a group of sends and receives.
    pub fn begin_messages(&mut self, messages: Vec<super::Message>) -> Messages {
        Messages::begin(messages, self.rank, self.part_bytes, &mut self.counters)
    }

    /// Begins a group of sends and receives that wait for nothing but their partners, if the communicator has such; else
    /// gives them back.
    pub fn begin_independent(
        &mut self,
        messages: Vec<super::Message>,
    ) -> Result<std::result::Result<IndependentBatch, Vec<super::Message>>> {
        match &mut self.independent {
            Some(all) => all.begin(messages, self.rank, &mut *self.device).map(Ok),
            None => Ok(Err(messages)),
        }
    }

    /// Adds messages to a group of such that has begun.
    pub fn join_independent(&mut self, batch: &mut IndependentBatch, messages: Vec<super::Message>) -> Result<()> {
        if let Ok(more) = self.begin_independent(messages)? {
            batch.add(more);
        }
        Ok(())
    }

    /// Makes progress with such messages.
    pub fn poll_independent(&mut self, batch: &mut IndependentBatch) -> Result<Progress> {
        let limit_ns = self.limit_ns();
        let all = self.independent.as_mut();
        let all = all.ok_or_else(|| Error::Internal("messages of another communicator".to_string()))?;
        let moved = all.poll(&mut *self.device, &mut self.transport)?;
        Ok(match batch.poll(all, limit_ns)? {
            (true, _) => Progress::Done,
            (false, some) if some || moved => Progress::Moved,
            _ => Progress::Idle,
        })
    }

    /// Makes progress with sends and receives.
    pub fn poll_messages(&mut self, messages: &mut Messages) -> Result<Progress> {
        let limit_ns = self.limit_ns();
        let (done, moved) = messages.poll(&mut *self.device, &mut self.transport, limit_ns)?;
        Ok(match (done, moved) {
            (true, _) => Progress::Done,
            (false, true) => Progress::Moved,
            (false, false) => Progress::Idle,
        })
    }

    /// Bytes of each block, from its front, that what is running may have read or written.
    pub(super) fn touched_bytes(&self) -> usize {
        self.running.as_ref().map_or(usize::MAX, |running| {
            let Ready { layout, execution, .. } = &self.recent[running.ready];
            layout.front_bytes(execution.entered())
        })
    }

    /// Bytes of each block that a segment of what is running covers.
    pub(super) fn segment_bytes(&self) -> usize {
        self.running.as_ref().map_or(usize::MAX, |running| self.recent[running.ready].layout.segment_bytes())
    }

    /// Has what is running use only so many bytes of each block, from its front, until it is told of more. Whole segments count, of which
    /// there is one at least.
    pub(super) fn admit(&mut self, bytes: usize) {
        if let Some(running) = &self.running {
            let Ready { layout, execution, .. } = &mut self.recent[running.ready];
            let is_all = bytes >= layout.block_bytes();
            execution.admit(if is_all { usize::MAX } else { bytes / layout.segment_bytes() });
        }
    }

    /// The ranks that the running collective waits for.
    pub fn waiting_for(&self) -> Vec<Rank> {
        let missing = self.transport.missing();
        if !missing.is_empty() {
            return missing;
        }
        self.running.as_ref().map_or_else(Vec::new, |running| match running.stage {
            CallStage::Words => self.telling.waiting_for(),
            _ => self.recent[running.ready].execution.waiting_for(),
        })
    }

    /// Forgets what is running; user memory is not touched afterwards.
    pub fn cancel(&mut self) {
        self.transport.cancel();
        self.device.cancel();
        self.independent.iter_mut().for_each(IndependentMessages::cancel);
        self.running = None;
    }

    /// Gives the device a home, where another communicator may go on with it.
    pub fn settle_device(&mut self, home: DeviceHome) {
        self.device.settle(home);
    }

    /// Sends the device there. Nothing runs here any more.
    pub fn give_device_back(&mut self) {
        self.cancel();
        self.device.give_back();
    }

    /// Makes room among the recent calls. One that is running stays, and is found where it is.
    fn forget_oldest(&mut self) {
        let running = self.running.as_mut().map(|running| &mut running.ready);
        if self.recent.len() < RECENT {
            return;
        }
        match running {
            Some(ready) if *ready == 0 => drop(self.recent.remove(1)),
            running => {
                self.recent.remove(0);
                running.into_iter().for_each(|ready| *ready -= 1);
            }
        }
    }

    /// What of this call is staged: nothing when its messages are short enough to be copied into shared memory anyway.
    fn staged(&self, call: &CollectiveCall) -> Staged {
        let is_packed = call.joined.as_ref().is_some_and(|joined| joined.is_packed);
        if !self.device.is_host() || is_packed || !self.may_stage(call) {
            return Staged::default();
        }
        let ordinary = |region: &DeviceRegion| shared::find(region.address() as usize, region.len()).is_none();
        match &call.joined {
            None => Staged { input: ordinary(&call.input), output: ordinary(&call.output) },
            Some(joined) => Staged {
                input: joined.input.regions().iter().any(ordinary),
                output: joined.output.regions().iter().any(ordinary),
            },
        }
    }

    /// Whether messages are long enough to be staged; the same on all ranks. Where each rank knows its own counts only, none are:
    /// such a message is one segment.
    fn may_stage(&self, call: &CollectiveCall) -> bool {
        self.config.stage && !call.has_own_sizes() && call.count * call.dtype.size() > self.config.eager_bytes
    }

    /// Whether a call's blocks, of which each rank knows its own only, go in parts: where some rank's data is on a device, and
    /// their copies overlap with messages. A provider gets them whole.
    fn cuts_messages(&self, call: &CollectiveCall, decision: &Decision) -> bool {
        call.has_own_sizes() && self.part_bytes != usize::MAX && decision.provider().is_none()
    }

    /// The plan as this rank runs it.
    fn plan(&self, choice: &algorithms::Choice, shape: &Shape, rank: Rank, staged: Staged) -> Result<Plan> {
        if self.is_around_node(choice, shape.collective) {
            return algorithms::build_around_node(choice, shape, rank);
        }
        let plan = algorithms::build(choice, shape, rank)?;
        if staged == Staged::default() {
            return Ok(plan);
        }
        let node = self.grid.node(rank);
        let from_user = |span: &Span| match span.buffer {
            Buffer::Input => staged.input,
            Buffer::Output => staged.output,
            Buffer::Scratch | Buffer::Coded => false,
        };
        Ok(stage(&plan, &|to, src| self.grid.node(to) == node && src.iter().any(from_user)))
    }

    /// Blocks of scratch that the rank that needs most has, whichever way it holds its buffers. All ranks must cut a message
    /// into the same segments, and whether a call is in place is known to its own rank only.
    fn most_scratch(&self, choice: &algorithms::Choice, call: &CollectiveCall) -> usize {
        let prologue = call.reduction.is_some_and(|reduction| reduction.prologue != Prologue::None);
        let needs = needs(choice, &Shape { prologue, in_place: false, ..self.shape(call) });
        needs.scratch + if self.may_stage(call) { needs.sent } else { 0 }
    }

    fn shape(&self, call: &CollectiveCall) -> Shape {
        Shape {
            root: call.root,
            in_place: call.in_place(self.rank),
            prologue: call.reduction.is_some_and(|reduction| reduction.needs_prologue()),
            ..Shape::new(call.collective, self.grid.clone())
        }
    }

    fn program(&mut self, choice: &algorithms::Choice, shape: &Shape, staged: Staged) -> Result<Arc<Program>> {
        let key = PlanKey {
            choice: choice.clone(),
            collective: shape.collective,
            root: shape.root,
            in_place: shape.in_place,
            prologue: shape.prologue,
            staged,
        };
        if let Some(program) = self.programs.get(&key) {
            return Ok(program.clone());
        }
        let program = Arc::new(Program::new(self.plan(choice, shape, self.rank, staged)?)?);
        self.programs.insert(key, program.clone());
        Ok(program)
    }

    /// Says once why calls of this size go by this choice. Not on the stack of those that run.
    #[inline(never)]
    fn explain_choice(&mut self, index: usize, choice: &algorithms::Choice) {
        if self.silent || !crate::log::enabled(crate::log::Level::Info) {
            return;
        }
        let Ready { call, decision, program, layout, weights, .. } = &self.recent[index];
        let bytes = layout.block_bytes();
        let provided = match self.is_around_node(choice, call.collective) {
            true => algorithms::Choice { node: "vendor".to_string(), ..choice.clone() },
            false => choice.clone(),
        };
        let choice = provided.to_string();
        if !self.explained.insert((call.collective, bytes.max(1).ilog2(), choice.clone())) {
            return;
        }
        let by_links = weights.is_some() && decision.by != Policy::Strategy;
        crate::info!(
            "{}: {} of {} ({} a block) -> {choice}, {} of {}, because: {}",
            call.collective.name(),
            counted(call.count, "element"),
            call.dtype.name(),
            counted(bytes, "byte"),
            counted(layout.segments(), "segment"),
            counted(program.rounds(), "round"),
            if by_links { "links deliver differently" } else { &decision.reason }
        );
    }
}
