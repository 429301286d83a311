//! Communicators: who takes part, in which state, and the order in which operations run.
//!
//! A [`Comm`] is what an `ncclComm_t` names. Its operations run one after another in the order in which they were
//! launched (its *turns*), on the caller's thread for the null stream and on the stream's thread otherwise; sends and receives
//! of `strataCommInitHost`'s communicators take no turns ([`independent`]). Once an operation fails, or another rank reports a failure, the communicator keeps that first failure and every later call
//! returns it.

mod adapt;
mod admission;
mod again;
mod batch;
mod bundle;
mod create;
pub mod device;
mod ending;
mod engine;
mod engine_watch;
mod epochs;
pub mod exit;
pub mod front;
mod fuse;
pub mod gpu;
pub mod group;
mod independent;
mod joined;
mod joining;
mod late;
mod launch;
mod live;
mod lost;
mod measure;
mod meeting_watch;
pub(crate) mod members;
mod messages;
mod nics;
mod ops;
mod provided;
mod queue;
mod recorded;
mod round_clock;
pub mod shadow;
mod siblings;
mod signature;
#[cfg(test)]
mod simulated_orders;
mod staging;
mod stall;
mod tuning;
mod window_stream;
mod windows;

pub use crate::bootstrap::UniqueId;
pub use adapt::AdaptOptions;
pub use again::Again;
pub use create::{CommOptions, Companion, InitParams, OnHost};
pub use launch::{launch, launch_one, Launch};
pub use ops::Factor;
pub use windows::WindowBounds;

use crate::algorithms;
use crate::bootstrap::Credentials;
use crate::carrier::Carrier;
use crate::code::FloatCode;
use crate::config::Config;
use crate::device::gpu::kernels::{Module, MOST_CHUNKS};
use crate::device::StreamRef;
use crate::dtype::{DataType, Prologue, RedOp, Reduction};
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::health::{CallSummary, Exchanges, Loss, Monitor, RankStatus};
use crate::memory::DeviceRegion;
use crate::plan::blocks::{BlockTable, Extent};
use crate::plan::{Collective, Shape};
use crate::records::CommRecords;
use crate::script::SharedScripts;
use crate::selection::links::Links;
use crate::selection::{Decision, Executor, Request, Selection, Selector, Sizes};
use crate::sync::biased::Biased;
use crate::sync::locked;
use crate::topo::{Grid, Rank};
use crate::transport::provider::CommProviders;
use crate::transport::{CollectiveKind, Waker};
use engine::Engine;
pub use joined::Joined;
use members::Member;
use queue::OperationQueue;
use siblings::{Family, Siblings};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use windows::Windows;

/// One operation of a program.
#[derive(Debug, Clone)]
pub enum Operation {
    /// A collective.
    Collective(CollectiveCall),
    /// `ncclSend`
    Send {
        /// The receiver.
        to: Rank,
        /// What is sent.
        data: DeviceRegion,
        /// How the program counts it.
        elements: Elements,
    },
    /// `ncclRecv`
    Recv {
        /// The sender.
        from: Rank,
        /// Where it goes.
        data: DeviceRegion,
        /// How the program counts it.
        elements: Elements,
    },
}

/// A number of elements, for messages to a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elements {
    /// How many.
    pub count: usize,
    /// Of this type.
    pub dtype: DataType,
}

impl Elements {
    fn bytes(self) -> usize {
        self.count * self.dtype.size()
    }
}

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of {} ({} bytes)", self.count, self.dtype.name(), self.bytes())
    }
}

/// A collective's arguments.
#[derive(Debug, Clone)]
pub struct CollectiveCall {
    /// What is to be done.
    pub collective: Collective,
    /// The send buffer; empty where the rank has none.
    pub input: DeviceRegion,
    /// The receive buffer; empty where the rank has none.
    pub output: DeviceRegion,
    /// Elements in one block; in the longest that this rank knows where they differ.
    pub count: usize,
    /// The blocks, where they differ in size. Of an all-gather and a reduce-scatter all ranks know all sizes, of the other
    /// collectives each its own.
    pub blocks: Option<Arc<BlockTable>>,
    /// The type of an element.
    pub dtype: DataType,
    /// What a reducing collective computes.
    pub reduction: Option<Reduction>,
    /// Where the factor of the reduction is read when the call runs, if not known before.
    pub factor_at: Option<DeviceRegion>,
    /// What coding has left out of the row of blocks, a float32 for each element, where the program keeps that.
    pub residual: Option<DeviceRegion>,
    /// The root, where there is one (else rank 0).
    pub root: Rank,
    /// An algorithm named by the call.
    pub algorithm: Option<String>,
    /// What the program calls it in traces (`userProfilerTag`); 0 for nothing.
    pub tag: u64,
    /// The memory, where this stands for several calls of a group; `input` and `output` are empty then.
    pub joined: Option<Arc<Joined>>,
    /// How it is run. None until the communicator has accepted the call.
    pub decision: Option<Arc<Decision>>,
}

impl CollectiveCall {
    /// A call of blocks of `count` elements that reduces nothing, of rank 0 where there is a root: its send and its receive buffer.
    pub fn new(collective: Collective, buffers: [DeviceRegion; 2], count: usize, dtype: DataType) -> CollectiveCall {
        let [input, output] = buffers;
        CollectiveCall {
            collective,
            input,
            output,
            count,
            blocks: None,
            dtype,
            reduction: None,
            factor_at: None,
            residual: None,
            root: Rank(0),
            algorithm: None,
            tag: 0,
            joined: None,
            decision: None,
        }
    }

    /// Whether the buffers of `rank` overlap as NCCL's in-place convention says.
    pub fn in_place(&self, rank: Rank) -> bool {
        if let Some(joined) = &self.joined {
            return joined.in_place;
        }
        let (input, output) = (self.input.address() as usize, self.output.address() as usize);
        let block = self.count * self.dtype.size();
        if let Some(blocks) = &self.blocks {
            let place = |blocks: &[Extent]| blocks.get(rank.index()).map_or(0, |block| block.at * self.dtype.size());
            return match self.collective {
                Collective::Gather | Collective::Scatter if rank != self.root => false,
                Collective::AllGather | Collective::Gather => input == output + place(blocks.output()),
                Collective::ReduceScatter | Collective::Scatter => output == input + place(blocks.input()),
                _ => false,
            };
        }
        match self.collective {
            Collective::AllReduce | Collective::AllToAll | Collective::Custom => input == output,
            Collective::Broadcast | Collective::Reduce => rank == self.root && input == output,
            Collective::AllGather => input == output + rank.index() * block,
            Collective::ReduceScatter => output == input + rank.index() * block,
            Collective::Gather => rank == self.root && input == output + rank.index() * block,
            Collective::Scatter => rank == self.root && output == input + rank.index() * block,
        }
    }

    /// Whether there is nothing to do on a communicator of `nranks`: no elements, or one rank whose result lies there
    /// already.
    fn moves_nothing(&self, nranks: usize) -> bool {
        let unchanged = |reduction: Reduction| !reduction.needs_prologue() && reduction.divisor == 1;
        if self.joined.is_some() {
            return false;
        }
        if self.blocks.is_some() {
            // Where this rank has no elements another may have some, and only messages tell.
            return nranks == 1 && self.in_place(Rank(0)) && self.reduction.is_none_or(unchanged);
        }
        // The chunks of a custom collective's one rank may change places.
        let in_place = self.input.address() == self.output.address() && self.collective != Collective::Custom;
        self.count == 0 || (nranks == 1 && in_place && self.reduction.is_none_or(unchanged))
    }

    /// Reads the factor of the reduction. To be done when the call runs: what its stream did before may have written it.
    fn read_factor(&mut self, engine: &mut Engine) -> Result<()> {
        if let (Some(place), Some(reduction)) = (self.factor_at, &mut self.reduction) {
            let mut scalar = [0; 8];
            engine.read(place, &mut scalar[..place.len()])?;
            reduction.prologue = Prologue::Scalar(scalar);
        }
        Ok(())
    }

    /// Whether another call of `rank` differs only in its buffers' addresses.
    fn same_shape(&self, other: &CollectiveCall, rank: Rank) -> bool {
        let key = |call: &CollectiveCall| (call.collective, call.count, call.dtype, call.root, call.in_place(rank));
        let joined = |call: &CollectiveCall| call.joined.as_ref().map(|joined| joined.summary);
        let is_same = key(self) == key(other) && self.reduction == other.reduction && self.blocks == other.blocks;
        is_same && joined(self) == joined(other)
    }

    /// The sizes that all ranks know, where blocks differ in size.
    fn known_sizes(&self) -> Option<&[usize]> {
        let known = matches!(self.collective, Collective::AllGather | Collective::ReduceScatter);
        self.blocks.as_ref().filter(|_| known).map(|blocks| blocks.row())
    }

    /// Whether blocks differ in size, and each rank knows its own sizes only.
    fn has_own_sizes(&self) -> bool {
        self.blocks.is_some() && self.known_sizes().is_none()
    }

    /// Whether some NICs of a node may have more to carry than others: with a root, and where blocks differ by a quarter, or may.
    fn loads_unevenly(&self) -> bool {
        let differ = |sizes: &[usize]| {
            let (longest, all) = (sizes.iter().max().copied().unwrap_or(0), sizes.iter().sum::<usize>());
            longest.saturating_mul(4 * sizes.len()) > all.saturating_mul(5)
        };
        self.collective.has_root() || self.known_sizes().map_or(self.blocks.is_some(), differ)
    }

    /// What other calls are like it, and its bytes as this rank knows them.
    fn kind(&self) -> (CollectiveKind, usize) {
        let (elements, all_know) = match (&self.blocks, self.known_sizes()) {
            (None, _) => (self.count, true),
            (Some(_), Some(sizes)) => (sizes.iter().sum(), true),
            (Some(blocks), None) => (blocks.elements().iter().sum::<usize>(), false),
        };
        let bytes = elements.saturating_mul(self.dtype.size());
        let class = all_know.then(|| bytes.checked_ilog2().unwrap_or(0) as u8);
        (CollectiveKind { collective: self.collective, dtype: self.dtype, class }, bytes)
    }

    /// What it is decided by.
    fn request(&self) -> Request<'_> {
        let even = Request::new(self.collective, self.count * self.dtype.size());
        let elem_bytes = self.dtype.size();
        let (block_bytes, sizes) = match (&self.blocks, self.known_sizes()) {
            (None, _) => (even.block_bytes, Sizes::Even),
            (Some(_), None) => (0, Sizes::Own),
            (Some(_), Some(sizes)) => {
                let average = sizes.iter().sum::<usize>().div_ceil(sizes.len().max(1));
                (average * elem_bytes, Sizes::Known { longest_bytes: even.block_bytes })
            }
        };
        Request { named: self.algorithm.as_deref(), root: self.root, block_bytes, sizes, ..even }
    }

    /// With whom the rank `me` exchanges elements, where each rank knows the sizes of its own blocks only.
    fn exchanges(&self, me: Rank, nranks: usize) -> Option<Exchanges> {
        let blocks = self.blocks.as_ref().filter(|blocks| !blocks.knows_all())?;
        // A rank other than the root has one block, whose other end is the root.
        let (all, is_root, root) = (self.collective == Collective::AllToAll, self.root == me, self.root.index());
        let peers = |is_list: bool| {
            move |(at, block): (usize, &Extent)| {
                let peer = if is_list { at } else { root };
                (block.count > 0 && peer != me.index()).then_some(peer)
            }
        };
        let to = peers(all || (is_root && self.collective == Collective::Scatter));
        let from = peers(all || (is_root && self.collective == Collective::Gather));
        let [input, output] = [blocks.input(), blocks.output()].map(|blocks| blocks.iter().enumerate());
        Some(Exchanges::new(nranks, input.filter_map(to), output.filter_map(from)))
    }

    /// What all ranks must agree on.
    fn summary(&self) -> CallSummary {
        let CollectiveCall { collective, count, dtype, reduction, root, .. } = *self;
        let provider = self.decision.as_ref().and_then(|decision| decision.provider());
        if let Some(joined) = &self.joined {
            return joined.summary.by_provider(provider);
        }
        let call = match (&self.blocks, self.known_sizes()) {
            (None, _) => CallSummary::new(collective, count, dtype, reduction, root),
            (Some(_), sizes) => CallSummary::vectored(collective, sizes, dtype, reduction, root),
        };
        let code = self.decision.as_ref().and_then(|decision| decision.code());
        call.in_code(code).with_residual(self.keeps_residual()).by_provider(provider)
    }

    /// Whether what coding leaves out is kept.
    fn keeps_residual(&self) -> bool {
        self.residual.is_some() && self.decision.as_ref().is_some_and(|decision| decision.code().is_some())
    }
}

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// To the peer.
    Send,
    /// From the peer.
    Recv,
}

/// One send or receive.
#[derive(Debug, Clone, Copy)]
struct Message {
    direction: Direction,
    peer: Rank,
    data: DeviceRegion,
    /// Its number among the messages to or from this peer, where it does not follow from turns; else 0.
    sequence: u64,
}

/// How long a communicator has been idle when a program that asks for failures hears of a rank's death: sooner it could
/// take that for a failure of the operation that has just ended.
const TOLD_WHEN_IDLE: Duration = Duration::from_secs(1);
/// A time that does not come.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// How long what a rank has sent before it aborted a communicator in good order is kept for those who have not got it.
const ABORTED: Duration = Duration::from_secs(10);
/// How long what a failed communicator's rank has sent is kept for those who have not got it.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Where a communicator is in its life.
const ALIVE: u32 = 0;
const FINALIZED: u32 = 1;
const REVOKED: u32 = 2;
const ENDED: u32 = 3;

/// A group of ranks that operate together.
pub struct Comm {
    /// The process it belongs to; forked children do not.
    origin: Origin,
    credentials: Credentials,
    rank: Rank,
    device: i32,
    grid: Arc<Grid>,
    members: Vec<Member>,
    config: Config,
    /// Decides calls.
    selector: Selector,
    /// Which calls of a group become one.
    fuse: fuse::FuseRules,
    /// The libraries that do whole collectives for it.
    providers: Arc<CommProviders>,
    /// What its calls may choose beside its own carrier, once they have been made.
    siblings: OnceLock<Siblings>,
    /// Holds its collectives back, where the program says so.
    windows: Windows,
    /// How its ranks tell each other what their links deliver, where they do.
    epochs: OnceLock<Arc<epochs::Epochs>>,
    /// How its calls go on without late ranks, where they do.
    late: OnceLock<Arc<late::LateRanks>>,
    /// Those who go on when ranks are lost, where they do.
    survivors: OnceLock<Arc<lost::Survivors>>,
    /// The communicators that fail together, where there are several.
    family: OnceLock<Arc<Family>>,
    /// The links between nodes, once they have been measured.
    links: OnceLock<Links>,
    /// What carries messages between nodes.
    carrier: Option<Carrier>,
    options: CommOptions,
    engine: Biased<Option<Engine>>,
    /// Where its data is a device's.
    gpu: Option<gpu::GpuLauncher>,
    /// Wakes the thread that runs an operation; a companion has none.
    waker: Option<Waker>,
    status: Arc<RankStatus>,
    monitor: Mutex<Option<Monitor>>,
    turns: OperationQueue,
    /// Numbers messages when they are called, where they wait for no turn.
    numbers: Option<Mutex<messages::Counters>>,
    /// Which thread waits inside the engine, where several may.
    watch: engine_watch::EngineWatch,
    phase: AtomicU32,
    /// What a call fails with that is interrupted by its abort: not there from then on until the others have been told.
    abortion: Mutex<Option<Error>>,
    suspended: AtomicBool,
    operations: Mutex<ops::Operations>,
    /// How many communicators all ranks have made out of this one together.
    children: AtomicU64,
    /// How many each set of ranks has made out of this one by leaving the others out.
    shrinks: Mutex<HashMap<Vec<usize>, u64>>,
    grow_id: Mutex<Option<UniqueId>>,
    /// How many operations had ended when a program asked for failures last, and since when.
    seen: Mutex<Option<(u64, Instant)>>,
    /// Where its calls are recorded.
    records: OnceLock<CommRecords>,
}

/// What an operation fails with when this rank has aborted its communicator.
fn abortion(rank: Rank) -> Error {
    Error::Remote(format!("rank {rank} aborted the communicator"))
}

impl Comm {
    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank.index()
    }

    /// How many ranks there are.
    pub fn nranks(&self) -> usize {
        self.grid.nranks()
    }

    /// A collective of no elements has been called: it is nothing to do, and who waits for this rank can be told of it.
    pub fn note_empty(&self, call: CallSummary) {
        let all = std::iter::once(&self.status).chain(self.siblings().map(|sibling| &sibling.status));
        all.for_each(|status| status.note_empty(call));
        self.generation().into_iter().for_each(|generation| generation.status.note_empty(call));
    }

    /// The device given when the communicator was made.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Decides how a call is run, unless that is known or there is nothing to do.
    fn decide(&self, call: &mut CollectiveCall) -> Result<()> {
        if call.decision.is_none() && !call.moves_nothing(self.nranks()) {
            let (code, provided) = (self.code_set_for(call.collective, call.dtype), self.providers_for(call));
            let request = Request { code, provided, ..call.request() };
            let decision = self.selector.decide(&request)?;
            self.check_code(call, &decision)?;
            call.decision = Some(decision);
        }
        match self.gpu() {
            Some(device) if call.decision.as_ref().is_some_and(|decision| decision.code().is_some()) => {
                device.gpu().load(Module::Codes)
            }
            _ => Ok(()),
        }
    }

    /// The code that is set for such calls, if it codes their elements.
    pub fn code_set_for(&self, collective: Collective, dtype: DataType) -> Option<FloatCode> {
        self.config.code(collective).filter(|code| self.check_codes().is_ok() && code.codes(dtype))
    }

    /// An error where data is on what has no codes.
    fn check_codes(&self) -> Result<()> {
        if self.options.make_device.is_some() {
            return Err(Error::InvalidUsage("a device of the program's own has no codes".to_string()));
        }
        let nnodes = self.grid.nnodes();
        if self.members.iter().any(|member| member.on_gpu) && nnodes > MOST_CHUNKS {
            return Err(Error::InvalidUsage(format!(
                "codes on GPUs are for {MOST_CHUNKS} nodes, and there are {nnodes}"
            )));
        }
        Ok(())
    }

    /// An error for a call that a code is asked for which cannot code it.
    fn check_code(&self, call: &CollectiveCall, decision: &Decision) -> Result<()> {
        let Some(code) = decision.code() else { return Ok(()) };
        if call.blocks.as_ref().is_some_and(|blocks| !blocks.knows_all()) {
            // The size of a coded block follows from the row of blocks.
            return Err(Error::Internal(format!("a {} in a code of blocks of unknown sizes", call.collective.name())));
        }
        code.check(call.dtype)?;
        self.check_codes()
    }

    /// Makes fewer calls of those of one group; of each, in whose places it is.
    fn fuse(&self, calls: Vec<CollectiveCall>) -> Vec<(fuse::GroupPlaces, CollectiveCall)> {
        fuse::fuse(calls, (self.rank, self.nranks()), &self.fuse)
    }

    /// Decides how a call is run, and says whether that does calls whose buffers overlap as in-place calls' do: of an
    /// all-to-all and a custom collective scripts do.
    pub fn does_in_place(&self, call: &mut CollectiveCall) -> Result<bool> {
        let rank = Rank::from_index(self.rank());
        if !call.in_place(rank) || call.moves_nothing(self.nranks()) {
            return Ok(call.in_place(rank));
        }
        self.decide(call)?;
        let Some(Executor::Own(Selection { choice, .. })) = call.decision.as_ref().map(|decision| &decision.executor)
        else {
            return Ok(false);
        };
        let prologue = call.reduction.is_some_and(|reduction| reduction.needs_prologue());
        let shape =
            Shape { root: call.root, in_place: true, prologue, ..Shape::new(call.collective, self.grid.clone()) };
        Ok(algorithms::supports(choice, &shape))
    }

    /// The scripts that all its ranks have.
    pub fn scripts(&self) -> Arc<SharedScripts> {
        self.selector.scripts()
    }

    /// Has a provider do collectives inside the node.
    fn provide(&self, provider: Arc<dyn staging::Provider>) -> Result<()> {
        self.engine.lock().as_mut().map_or(Ok(()), |engine| engine.provide(provider))
    }

    /// Takes that back.
    fn retire_provider(&self) {
        self.engine.lock().iter_mut().for_each(|engine| engine.retire_provider());
    }

    /// The GPU on which its data is; none on the host.
    pub fn gpu(&self) -> Option<&gpu::GpuLauncher> {
        self.gpu.as_ref()
    }

    /// An error for memory that an operation cannot use.
    pub fn check_memory(&self, region: DeviceRegion, name: &str) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.check(region, name))
    }

    /// An error for elements that cannot be used on this communicator: what NCCL does not have is for host memory.
    pub fn check_type(&self, dtype: DataType) -> Result<()> {
        match dtype.is_nccl() {
            true => Ok(()),
            false => self.in_host_memory(&format!("data type {}", dtype.name())),
        }
    }

    /// An error where some rank's data is on a device, the same on all ranks.
    fn in_host_memory(&self, what: &str) -> Result<()> {
        match self.members.iter().position(|member| member.on_gpu) {
            None => Ok(()),
            Some(rank) => Err(Error::InvalidArgument(format!(
                "{what} is for communicators in host memory; the data of rank {rank} is on a device"
            ))),
        }
    }

    /// Who is on which node.
    pub fn grid(&self) -> &Arc<Grid> {
        &self.grid
    }

    /// The options it was made with.
    pub fn options(&self) -> &CommOptions {
        &self.options
    }

    /// The first failure, if there is one, here or in a communicator that fails with this one.
    pub fn failure(&self) -> Option<Error> {
        self.status.failure().or_else(|| self.family.get()?.failure()).cloned()
    }

    /// The first failure; also the death of a rank, once nothing has run for a while that the death may leave untouched.
    /// What the program has been told so stays.
    pub fn asynchronous_failure(&self) -> Option<Error> {
        if self.survivors.get().is_some() {
            return self.final_failure();
        }
        let failure = self.failure().or_else(|| self.siblings().find_map(|sibling| sibling.asynchronous_failure()));
        let losses = if failure.is_none() { self.status.losses() } else { Vec::new() };
        let Some((known, loss)) = losses.first().cloned() else { return failure };
        // An operation that waits for its stream, say, has not begun, and will not be completed.
        let next = self.status.begun() + 1;
        let is_hopeless = |loss: &Loss| loss.from.is_some_and(|from| from <= next);
        if let Some((_, loss)) = losses.iter().find(|(_, loss)| !self.is_quiet() && is_hopeless(loss)) {
            self.status.fail(loss.error.clone());
            return self.failure();
        }
        let ended = self.turns.ended();
        let mut seen = locked(&self.seen);
        if !self.is_quiet() || seen.is_none_or(|(before, _)| before != ended) {
            *seen = Some((ended, Instant::now()));
            return None;
        }
        let idle = seen.is_some_and(|(_, since)| since.max(known).elapsed() >= TOLD_WHEN_IDLE);
        idle.then(|| {
            self.status.fail(loss.error.clone());
            self.failure().unwrap_or(loss.error)
        })
    }

    /// An error in a forked child, which has neither the links nor the threads.
    fn at_home(&self) -> Result<()> {
        match self.origin.is_here() {
            true => self.not_in_callback(),
            false => Err(Error::InvalidUsage("a forked child cannot use its parent's communicators".to_string())),
        }
    }

    /// An error if no operation can be started: ended, revoked, suspended, finalised, failed.
    pub fn usable(&self) -> Result<()> {
        self.at_home()?;
        match self.phase.load(Ordering::Acquire) {
            ENDED => Err(Error::InvalidArgument("the communicator has been destroyed".to_string())),
            REVOKED => Err(Error::InvalidUsage("the communicator has been revoked".to_string())),
            FINALIZED => Err(Error::InvalidUsage("the communicator has been finalized".to_string())),
            _ if self.suspended.load(Ordering::Acquire) => {
                Err(Error::InvalidUsage("the communicator is suspended".to_string()))
            }
            _ => self.final_failure().map_or(Ok(()), Err),
        }
    }

    /// Lets go of scratch memory; operations are refused until [`resume`](Comm::resume).
    pub fn suspend(&self) -> Result<()> {
        self.usable()?;
        self.quiesce()?;
        self.suspended.store(true, Ordering::Release);
        if let Some(engine) = self.engine.lock().as_mut() {
            engine.free_scratch();
        }
        self.siblings().try_for_each(|sibling| sibling.suspend())
    }

    /// Ends a suspension.
    pub fn resume(&self) -> Result<()> {
        self.siblings().try_for_each(|sibling| sibling.resume())?;
        match self.suspended.swap(false, Ordering::AcqRel) {
            true => Ok(()),
            false => Err(Error::InvalidUsage("the communicator is not suspended".to_string())),
        }
    }

    /// Whether the communicator is suspended.
    pub fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Acquire)
    }

    /// Bytes of scratch memory held.
    pub fn scratch_bytes(&self) -> usize {
        let own = self.engine.lock().as_ref().map_or(0, Engine::scratch_bytes);
        own + self.siblings().map(|sibling| sibling.scratch_bytes()).sum::<usize>()
    }

    /// Makes a PreMulSum operation.
    pub fn create_op(&self, dtype: DataType, factor: Factor) -> Result<i32> {
        Ok(locked(&self.operations).create(dtype, factor))
    }

    /// Forgets an operation made by [`create_op`](Comm::create_op).
    pub fn destroy_op(&self, op: i32) -> Result<()> {
        locked(&self.operations).destroy(op)
    }

    /// What operation `op` does to elements of `dtype`, and where its factor is read when the call runs.
    pub fn reduction(&self, op: i32, dtype: DataType) -> Result<(Reduction, Option<DeviceRegion>)> {
        if let Some(op) = RedOp::from_code(op).filter(|op| !op.is_nccl()) {
            self.in_host_memory(&format!("operation {}", op.name()))?;
        }
        locked(&self.operations).reduction(op, dtype, self.nranks())
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if self.origin.is_here() {
            return self.release(self.patience());
        }
        // What lies in memory shared with the node is still the parent's.
        let monitor = self.monitor.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        std::mem::forget(monitor.take());
        let engine = self.engine.get_mut();
        std::mem::forget(engine.take());
    }
}
