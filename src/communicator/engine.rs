//! What a communicator runs operations with: its transport, its plans, its scratch memory.

use super::live::{Buffers, DeviceTransport, LiveWorld, RegionLists};
use super::messages::{Counters, Messages};
use super::staging::{self, OnDevice, Provider, Staging};
use super::CollectiveCall;
use crate::algorithms::{self, needs::needs};
use crate::carrier::Switch;
use crate::config::Config;
use crate::device::gpu::driver::DriverKind;
use crate::device::gpu::GpuDevice;
use crate::digest::Digest;
use crate::dtype::Prologue;
use crate::error::{counted, Error, Result};
use crate::exec::{Execution, Program, Progress};
use crate::memory::{shared, Arena, Bytes, Region};
use crate::plan::layout::Layout;
use crate::plan::stage::stage;
use crate::plan::{Buffer, Collective, Plan, Shape, Span};
use crate::selection::{self, Knowledge, Request, Selection};
use crate::topo::{Grid, Rank};
use crate::transport::{Departure, Router, Transport, Waker};
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

/// A communicator's own memory: shared with the node, so that peers read it in place, or ordinary, or a device's.
enum Scratch {
    Shared(shared::Owned),
    Plain(Arena),
    Device(staging::DeviceScratch),
}

impl Scratch {
    /// None yet.
    fn none() -> Scratch {
        Scratch::Plain(Arena::new(0))
    }

    fn new(bytes: usize) -> Result<Scratch> {
        match shared::Owned::new(bytes) {
            Ok(owned) => Ok(Scratch::Shared(owned)),
            Err(error) => Arena::try_new(bytes).map(Scratch::Plain).ok_or(error),
        }
    }

    /// Its bytes. They are there until the scratch grows or goes.
    fn region(&mut self) -> Bytes<'_> {
        match self {
            Scratch::Shared(owned) => owned.region(),
            Scratch::Plain(arena) => arena.region(),
            Scratch::Device(scratch) => scratch.region(),
        }
    }

    /// At least so many bytes; what it held is lost.
    fn grow(&mut self, bytes: usize) -> Result<()> {
        match self {
            Scratch::Device(scratch) => return scratch.grow(bytes),
            _ if bytes > self.bytes() => *self = Scratch::new(bytes)?,
            _ => {}
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        match self {
            Scratch::Shared(owned) => owned.region().len(),
            Scratch::Plain(arena) => arena.len(),
            Scratch::Device(scratch) => scratch.bytes(),
        }
    }
}

/// What distinguishes two choices of one communicator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ChoiceKey {
    collective: Collective,
    block_bytes: usize,
    named: Option<String>,
}

/// The call that is running.
struct Running {
    call: CollectiveCall,
    buffers: Buffers,
    /// Index in `recent`.
    ready: usize,
}

/// Everything a call of one shape needs, kept so that the next one of that shape allocates nothing.
struct Ready {
    call: CollectiveCall,
    staged: Staged,
    program: Arc<Program>,
    layout: Layout,
    window: usize,
    signature: u32,
    execution: Execution,
}

/// Runs the operations of one communicator, one collective (or group of messages) at a time.
pub struct Engine {
    rank: Rank,
    grid: Arc<Grid>,
    config: Config,
    knowledge: Knowledge,
    /// Whether choices are not told: nobody has made these calls.
    silent: bool,
    /// Declared before the scratch: when it goes, it forgets the messages that point there.
    transport: Router,
    /// Where data is a device's.
    staging: Option<Staging>,
    /// Whether the ranks exchange on boards.
    board: bool,
    /// What a message of the program's is cut into, the same on all ranks.
    part_bytes: usize,
    programs: HashMap<PlanKey, Arc<Program>>,
    choices: HashMap<ChoiceKey, Arc<Prepared>>,
    recent: Vec<Ready>,
    explained: std::collections::HashSet<(Collective, u32, String)>,
    scratch: Scratch,
    lists: RegionLists,
    running: Option<Running>,
    sequence: u64,
    counters: Counters,
}

/// A selection with what it needs on every rank.
#[derive(Debug)]
struct Prepared {
    selection: Selection,
    /// Scratch that the rank that needs most has for each segment, in blocks.
    scratch_blocks: usize,
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

/// Where a rank's data is.
enum Either<'a> {
    Host(&'a mut Router),
    Device(OnDevice<'a>),
}

impl<'a> Either<'a> {
    fn of(staging: &'a mut Option<Staging>, transport: &'a mut Router) -> Either<'a> {
        match staging {
            Some(staging) => Either::Device(staging.device(transport)),
            None => Either::Host(transport),
        }
    }

    fn device(&mut self) -> &mut dyn DeviceTransport {
        match self {
            Either::Host(transport) => *transport,
            Either::Device(device) => device,
        }
    }
}

/// What a message between devices is cut into, so that copies and network overlap.
const GPU_PART_BYTES: usize = 1 << 20;
/// Device memory that is taken to bring blocks together, at most.
const MOST_ROOM_BYTES: usize = 64 << 20;
/// How many recent calls are remembered whole, so that a training step's calls are prepared once.
const RECENT: usize = 32;

/// Bytes of scratch memory for the shortest segments: their chunks have 64 bytes, and no plan has more of them than three
/// full vectors.
fn least_scratch(grid: &Grid, window: usize) -> usize {
    64 * 3 * window * grid.nranks()
}

impl Engine {
    /// The engine of `rank` on `grid`, with data on `gpu` or on the host. `gpus` says whether any rank has one.
    pub fn new(
        rank: Rank,
        grid: Arc<Grid>,
        config: Config,
        transport: Router,
        (gpu, gpus): (Option<&Arc<GpuDevice>>, bool),
    ) -> Result<Engine> {
        let mut staging = gpu.map(|gpu| Staging::new(gpu, config.pinned_bytes)).transpose()?;
        if let (Some(staging), Some(gpu)) = (&mut staging, gpu) {
            give_addresses(staging, gpu, &transport, &config)?;
        }
        // All that a plan's segments need, from the beginning: see `gpu`.
        let scratch = match gpu {
            Some(gpu) => {
                let bytes = config.scratch_bytes.max(least_scratch(&grid, config.window.clamp(1, 64)));
                Scratch::Device(staging::DeviceScratch::new(gpu, bytes)?)
            }
            None => Scratch::none(),
        };
        Ok(Engine {
            rank,
            staging,
            board: transport.has_board() && !gpus,
            part_bytes: if gpus { GPU_PART_BYTES } else { usize::MAX },
            scratch,
            counters: Counters::new(grid.nranks()),
            grid,
            config,
            knowledge: Knowledge::default(),
            silent: false,
            transport,
            programs: HashMap::new(),
            choices: HashMap::new(),
            recent: Vec::new(),
            explained: Default::default(),
            lists: RegionLists::default(),
            running: None,
            sequence: 0,
        })
    }

    /// Has choices made by this knowledge; the same on all ranks, between the same two operations.
    pub fn know(&mut self, knowledge: &Knowledge) {
        self.knowledge = knowledge.clone();
        self.choices.clear();
        self.recent.clear();
    }

    /// Has what follows left untold, or ends that: then the program's first operation is number 1. All ranks do so between
    /// the same two operations.
    pub fn keep_quiet(&mut self, quiet: bool) {
        self.silent = quiet;
        self.sequence = 0;
    }

    /// Wakes the thread that waits for an operation.
    pub fn waker(&self) -> Waker {
        self.transport.waker()
    }

    /// The transport.
    pub fn transport(&mut self) -> &mut Router {
        &mut self.transport
    }

    /// Gives scratch memory back. On a device it stays: freeing would wait for all of its streams.
    pub fn free_scratch(&mut self) {
        if self.staging.is_none() {
            self.scratch = Scratch::none();
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

    /// Leaves what is on a device to the end of the process, at which the driver may have ended already.
    pub fn leave_device(&mut self) {
        if self.staging.is_some() {
            std::mem::forget(self.staging.take());
            std::mem::forget(std::mem::replace(&mut self.scratch, Scratch::none()));
        }
    }

    /// Reads what a program has left on its device.
    pub fn read(&mut self, from: Region, bytes: &mut [u8]) -> Result<()> {
        match &mut self.staging {
            Some(staging) => staging.read(from, bytes),
            None => {
                from.read(bytes);
                Ok(())
            }
        }
    }

    /// Whether a device has work whose end only a poll sees.
    pub fn waits_for_device(&self) -> bool {
        self.staging.as_ref().is_some_and(Staging::is_busy)
    }

    /// Bytes of scratch memory held.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    fn limit_ns(&self) -> u64 {
        self.config.timeout_ms.saturating_mul(1_000_000)
    }

    /// Has a provider do collectives inside the node.
    pub fn provide(&mut self, provider: Arc<dyn Provider>) -> Result<()> {
        let room_bytes = self.room_bytes();
        match &mut self.staging {
            Some(staging) => staging.provide(provider, room_bytes, self.config.pack_beside_bytes),
            None => Err(Error::Internal("a provider of collectives on the host".to_string())),
        }
    }

    /// Device memory to bring blocks together for a provider; the same on all ranks.
    fn room_bytes(&self) -> usize {
        self.config.vendor_scratch_bytes.min(MOST_ROOM_BYTES)
    }

    /// Whether a provider does the calls inside the node of this choice's plans.
    fn is_around_node(&self, choice: &algorithms::Choice) -> bool {
        self.staging.as_ref().is_some_and(Staging::has_provider) && algorithms::is_leveled(choice)
    }

    /// Begins a collective. Returns false when there is nothing to do.
    pub fn begin(&mut self, call: &CollectiveCall) -> Result<bool> {
        self.sequence += 1;
        if call.moves_nothing(self.grid.nranks()) {
            return Ok(false);
        }
        let index = self.prepare(call)?;
        let limit_ns = self.limit_ns();
        let ready = &mut self.recent[index];
        let scratch_bytes = ready.layout.scratch_bytes() * ready.window.min(ready.layout.segments());
        self.scratch.grow(scratch_bytes)?;
        // SAFETY: the scratch must outlive every use; because only a call that begins lets it grow, one runs at a time, and
        // the transport goes first.
        let scratch = unsafe { self.scratch.region().unbound() };
        let buffers = Buffers { input: call.input, output: call.output, scratch };
        if let Some(staging) = &mut self.staging {
            staging.begin(&ready.program, &ready.layout, ready.window)?;
        }
        ready.execution.begin(ready.program.clone(), ready.layout, ready.window, limit_ns);
        self.running = Some(Running { call: call.clone(), buffers, ready: index });
        Ok(true)
    }

    /// Makes progress with the collective that is running.
    pub fn poll(&mut self) -> Result<Progress> {
        let running = self.running.as_ref().ok_or_else(|| Error::Internal("no collective is running".to_string()))?;
        let ready = &mut self.recent[running.ready];
        let mut device = Either::of(&mut self.staging, &mut self.transport);
        let mut world = LiveWorld {
            device: device.device(),
            buffers: running.buffers,
            rank: self.rank,
            reduction: running.call.reduction,
            sequence: self.sequence,
            signature: ready.signature,
            lists: &mut self.lists,
        };
        let outcome = ready.execution.poll(&mut world);
        let progress = outcome.map_err(|error| explain(error, &running.call, self.sequence))?;
        if progress == Progress::Done {
            self.running = None;
        }
        Ok(progress)
    }

    /// Begins a group of sends and receives.
    pub fn begin_messages(&mut self, messages: Vec<super::Message>) -> Messages {
        Messages::begin(messages, self.rank, self.part_bytes, &mut self.counters)
    }

    /// Makes progress with sends and receives.
    pub fn poll_messages(&mut self, messages: &mut Messages) -> Result<Progress> {
        let limit_ns = self.limit_ns();
        let (done, moved) = messages.poll(Either::of(&mut self.staging, &mut self.transport).device(), limit_ns)?;
        Ok(match (done, moved) {
            (true, _) => Progress::Done,
            (false, true) => Progress::Moved,
            (false, false) => Progress::Idle,
        })
    }

    /// The ranks that the running collective waits for.
    pub fn waiting_for(&self) -> Vec<Rank> {
        let missing = self.transport.missing();
        if !missing.is_empty() {
            return missing;
        }
        self.running.as_ref().map_or_else(Vec::new, |running| self.recent[running.ready].execution.waiting_for())
    }

    /// Forgets what is running; user memory is not touched afterwards.
    pub fn cancel(&mut self) {
        self.transport.cancel();
        self.staging.iter_mut().for_each(Staging::cancel);
        self.running = None;
    }

    /// The index in `recent` of what this call needs.
    fn prepare(&mut self, call: &CollectiveCall) -> Result<usize> {
        let staged = self.staged(call);
        let known = |ready: &Ready| ready.staged == staged && ready.call.same_shape(call, self.rank);
        if let Some(index) = self.recent.iter().position(known) {
            return Ok(index);
        }
        let prepared = self.choice(call)?;
        let program = self.program(&prepared.selection.choice, call, staged)?;
        let k = program.plan().chunks_per_block as usize;
        let window = prepared.selection.window;
        // Scratch is `window * scratch_blocks` segments of a block on the rank that needs most: this bounds them on all.
        let most = self.config.scratch_bytes / window / prepared.scratch_blocks.max(1);
        let mut segment_bytes = match prepared.scratch_blocks {
            0 => prepared.selection.segment_bytes,
            _ => prepared.selection.segment_bytes.min(most.max(64 * k)),
        };
        if self.is_around_node(&prepared.selection.choice) {
            // The longest call of a segment has all blocks, and three find room: one is brought together and one is taken
            // apart while the provider has the one between them.
            let blocks = if call.collective == Collective::AllReduce { 1 } else { self.grid.nranks() };
            segment_bytes = segment_bytes.min((self.room_bytes() / 3 / blocks).max(64));
        }
        let scratch_chunks = program.plan().scratch_chunks as usize;
        let layout = Layout::new(call.count, call.dtype.size(), k, scratch_chunks, segment_bytes);
        self.explain_choice(call, &prepared.selection, &layout, program.rounds());
        if self.recent.len() == RECENT {
            self.recent.remove(0);
        }
        let signature = signature(call, &program.plan().algorithm);
        let execution = Execution::new();
        self.recent.push(Ready { call: call.clone(), staged, program, layout, window, signature, execution });
        Ok(self.recent.len() - 1)
    }

    /// What of this call is staged: nothing when its messages are short enough to be copied into shared memory anyway.
    fn staged(&self, call: &CollectiveCall) -> Staged {
        let block_bytes = call.count * call.dtype.size();
        if self.staging.is_some() || !self.config.stage || block_bytes <= self.config.eager_bytes {
            return Staged::default();
        }
        let ordinary = |region: &Region| shared::find(region.as_ptr() as usize, region.len()).is_none();
        Staged { input: ordinary(&call.input), output: ordinary(&call.output) }
    }

    /// The plan as this rank runs it.
    fn plan(&self, choice: &algorithms::Choice, shape: &Shape, rank: Rank, staged: Staged) -> Result<Plan> {
        if self.is_around_node(choice) {
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
            Buffer::Scratch => false,
        };
        Ok(stage(&plan, &|to, src| self.grid.node(to) == node && src.iter().any(from_user)))
    }

    fn choice(&mut self, call: &CollectiveCall) -> Result<Arc<Prepared>> {
        let block_bytes = call.count * call.dtype.size();
        let key = ChoiceKey { collective: call.collective, block_bytes, named: call.algorithm.clone() };
        if let Some(prepared) = self.choices.get(&key) {
            return Ok(prepared.clone());
        }
        let named = call.algorithm.as_deref();
        let board = self.board;
        let request = Request { collective: call.collective, block_bytes, named, board };
        let mut selection = selection::choose(&request, &self.grid, &self.config, &self.knowledge)?;
        // A table may have a larger window than the settings, for which a device's scratch was made.
        let room = self.config.scratch_bytes.max(least_scratch(&self.grid, self.config.window.clamp(1, 64)));
        selection.window = selection.window.min(room / least_scratch(&self.grid, 1)).max(1);
        let scratch_blocks = self.most_scratch(&selection.choice, call);
        let prepared = Arc::new(Prepared { selection, scratch_blocks });
        if self.choices.len() > 4096 {
            self.choices.clear();
        }
        self.choices.insert(key, prepared.clone());
        Ok(prepared)
    }

    /// Blocks of scratch that the rank that needs most has, whichever way it holds its buffers. All ranks must cut a message
    /// into the same segments, and whether a call is in place is known to its own rank only.
    fn most_scratch(&self, choice: &algorithms::Choice, call: &CollectiveCall) -> usize {
        let prologue = call.reduction.is_some_and(|reduction| reduction.prologue != Prologue::None);
        let needs = needs(choice, &Shape { prologue, ..self.shape(call) });
        let staged = self.config.stage && call.count * call.dtype.size() > self.config.eager_bytes;
        needs.scratch + if staged { needs.sent } else { 0 }
    }

    fn shape(&self, call: &CollectiveCall) -> Shape {
        Shape {
            collective: call.collective,
            grid: self.grid.clone(),
            root: call.root,
            in_place: call.in_place(self.rank),
            prologue: call.reduction.is_some_and(|reduction| reduction.needs_prologue()),
        }
    }

    fn program(&mut self, choice: &algorithms::Choice, call: &CollectiveCall, staged: Staged) -> Result<Arc<Program>> {
        let shape = self.shape(call);
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
        let program = Arc::new(Program::new(self.plan(choice, &shape, self.rank, staged)?)?);
        self.programs.insert(key, program.clone());
        Ok(program)
    }

    fn explain_choice(&mut self, call: &CollectiveCall, selection: &Selection, layout: &Layout, rounds: usize) {
        if self.silent || !crate::log::enabled(crate::log::Level::Info) {
            return;
        }
        let bytes = layout.block_bytes();
        let provided = match self.is_around_node(&selection.choice) {
            true => algorithms::Choice { node: "vendor".to_string(), ..selection.choice.clone() },
            false => selection.choice.clone(),
        };
        let choice = provided.to_string();
        if self.explained.insert((call.collective, bytes.max(1).ilog2(), choice.clone())) {
            let name = call.collective.name();
            crate::info!(
                "{name}: {} of {} ({} a block) -> {choice}, {} of {}, because: {}",
                counted(call.count, "element"),
                call.dtype.name(),
                counted(bytes, "byte"),
                counted(layout.segments(), "segment"),
                counted(rounds, "round"),
                selection.reason
            );
        }
    }
}

fn explain(error: Error, call: &CollectiveCall, sequence: u64) -> Error {
    let what = format!("operation {sequence}, {} of {} {}: ", call.collective.name(), call.count, call.dtype.name());
    match error {
        Error::InvalidUsage(text) => Error::InvalidUsage(what + &text),
        Error::Timeout(text) => Error::Timeout(what + &text),
        Error::Remote(text) => Error::Remote(what + &text),
        other => other,
    }
}

/// A digest of what all ranks of one collective must agree on.
fn signature(call: &CollectiveCall, algorithm: &str) -> u32 {
    let mut digest = Digest::new("collective").text(call.collective.name()).number(call.count as u64);
    digest = digest.text(call.dtype.name()).number(call.root.0).text(algorithm);
    if let Some(reduction) = call.reduction {
        let prologue = match reduction.prologue {
            Prologue::None => "none",
            Prologue::Scalar(_) => "scalar",
            Prologue::Reciprocal(_) => "reciprocal",
        };
        digest = digest.number(reduction.operator as u8).number(reduction.divisor).text(prologue);
    }
    digest.value() as u32
}
