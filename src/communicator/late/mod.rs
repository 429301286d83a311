//! Late ranks (`STRATA_LATE=relay`): the others do not wait for them.
//!
//! Ranks that have made a call run it at once. Where they get no further for a while, they ask those whom they wait for to *relay* the
//! call: a thread of the late rank's communicator runs it in the program's place, with an input that leaves every other one as it is
//! ([`identity`]). So one plan serves, whoever is there. A rank that comes meanwhile contributes to the segments that have not begun.
//! After the call all ranks tell each other how much of the vector they have not contributed to, a front of it, mostly nothing. Where that is
//! something, the rank brings it when its program makes the call: a broadcast, and a local reduction on all ranks. Results are complete and the
//! same on all ranks; only the order of operands depends on who was late.
//! Source: AdapCC (Zhao, Zhang and Wu), whose relays these are.

mod dropped;
mod identity;
mod memory;
mod relay;

use super::batch::OperationBatch;
use super::engine::Engine;
use super::engine_watch::Claim;
use super::members::Member;
use super::stall::asked_at;
use super::{AdaptOptions, CollectiveCall, Comm, CommOptions};
use crate::carrier::Carrier;
use crate::config::{Config, Late, Lost};
use crate::device::gpu::order::StreamOrder;
use crate::dtype::{Prologue, Reduction};
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::health::{CallSummary, RelayRequest};
use crate::memory::{Arena, DeviceRegion, Region};
use crate::plan::Collective;
use crate::selection::{Executor, Selection, AUTO};
use crate::sync::locked;
use crate::topo::Rank;
use crate::transport::Waker;
use memory::{LateMemory, Vector};
use relay::Relay;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, Weak};
use std::time::{Duration, Instant};

/// Bytes of the shortest all-reduces that are relayed: for shorter ones the word after them costs too much.
pub(super) const LEAST_BYTES: usize = 1 << 20;
/// A rank's word after a call: to how many bytes it has not contributed, and what it has called.
const WORD: usize = 3 * size_of::<u64>();
/// Ranks that get no further for this part of what such a call takes ask for relays; and no sooner than this.
const PART: f64 = 0.15;
const SOONEST: Duration = Duration::from_millis(2);
/// The same where what late ranks have is left out: as long as the call takes.
const PART_TO_DROP: f64 = 1.0;
/// Who relays asks further ones after this.
const ASKED_BY_RELAY: Duration = Duration::from_millis(2);
/// Who gets no further all the same asks again after twice as long each time, at most after this.
const LONGEST_PATIENCE: Duration = Duration::from_secs(1);
/// What a broadcast takes of an all-reduce of as many bytes, about.
const BROADCAST: f64 = 0.7;

/// Said once in a process.
static REFUSED: PerProcess<Once> = PerProcess::new(Once::new);

/// What a rank has not contributed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Absence {
    rank: Rank,
    /// Of the vector from its front.
    bytes: usize,
}

#[derive(Debug, Default)]
struct LateState {
    /// Of calls of each size the least time of a byte in ns, with nobody absent.
    paces: HashMap<u32, f64>,
    /// The call that this rank relays, or has relayed and not made yet.
    relay: Option<Relay>,
    /// What this rank is asked to relay while its stream has not come to the call, and when that was heard, as the question's age in us.
    asked: Option<(RelayRequest, u64)>,
    /// What the program has asked for.
    options: AdaptOptions,
}

/// How the calls of a communicator go on without those who are late.
pub(super) struct LateRanks {
    /// The all-gather of the ranks' words.
    call: CollectiveCall,
    word: Region,
    words: Region,
    _arenas: [Arena; 2],
    /// For parts that come late.
    memory: Arc<LateMemory>,
    state: Mutex<LateState>,
    /// A thread relays, or is about to.
    is_relaying: AtomicBool,
    /// Whether a vendor's library reduces inside the node.
    is_in_front: bool,
    /// Calls in which somebody was absent.
    calls: AtomicU64,
}

/// A call of which late ranks' parts may come later.
pub(super) struct LateCall {
    late: Arc<LateRanks>,
    summary: CallSummary,
    /// What the program gave; the call that runs reduces without dividing.
    reduction: Reduction,
    call: CollectiveCall,
    /// Whether this rank relays it.
    relays: bool,
    options: AdaptOptions,
    begun: Instant,
    asked_at: Option<Instant>,
    /// How often it has asked since something moved.
    asked: u32,
    stage: Stage,
}

/// How far it is.
enum Stage {
    /// Those who are there reduce.
    Reduces,
    /// All tell what they have not contributed to.
    Tells,
    /// This rank relayed it, and its program has come.
    Comes(Coming),
    /// Those who were late bring their parts.
    Brings {
        coming: Coming,
        /// What is under way: where it is, or goes.
        part: DeviceRegion,
        memory: Option<Vector>,
    },
    /// The result is there.
    Ended,
}

/// Parts that late ranks bring.
struct Coming {
    absences: Vec<Absence>,
    /// The one that comes next.
    next: usize,
    /// This rank's own, where it was late.
    own: Option<DeviceRegion>,
    /// What that lies in, where it is not the send buffer.
    _kept: Option<Vector>,
}

impl Coming {
    /// Whether all come in one reduction: where that is quicker than a broadcast of each. The most bytes of one.
    fn together(&self) -> Option<usize> {
        let most = self.absences.iter().map(|absence| absence.bytes).max()?;
        let sum: usize = self.absences.iter().map(|absence| absence.bytes).sum();
        (sum as f64 * BROADCAST > most as f64).then_some(most)
    }
}

/// What is to be done next.
pub(super) enum NextOfLate {
    /// This call of the ranks' own, in host memory.
    Tell(CollectiveCall),
    /// This call.
    Bring(CollectiveCall),
    /// Nothing more.
    Nothing,
}

/// Memory of the host.
pub(super) fn here(region: DeviceRegion) -> Region {
    // SAFETY: the bytes must be this process's; because who calls this knows that the communicator's data is in host memory.
    unsafe { region.in_process() }
}

/// The size of a call as a power of two.
fn class(bytes: usize) -> u32 {
    bytes.max(1).ilog2()
}

fn bytes_of(call: &CollectiveCall) -> usize {
    call.count.saturating_mul(call.dtype.size())
}

impl LateRanks {
    fn new(comm: &Comm) -> Result<LateRanks> {
        let nranks = comm.nranks();
        let (mut input, mut output) = (Arena::new(WORD), Arena::new(WORD * nranks));
        // SAFETY: the arena must outlive every use; because the call that uses it keeps this, and a communicator that fails cancels it.
        let word = unsafe { input.region().unbound() };
        // SAFETY: the arena must outlive every use; because of the same.
        let words = unsafe { output.region().unbound() };
        let call = comm.gather_of_words([word, words])?;
        let (_arenas, state) = ([input, output], Mutex::default());
        let memory = LateMemory::new(comm.gpu().map(|device| device.gpu()))?;
        let (is_relaying, calls) = (AtomicBool::new(false), AtomicU64::new(0));
        let is_in_front = comm.options.companion.is_some();
        Ok(LateRanks { call, word, words, _arenas, memory, state, is_relaying, is_in_front, calls })
    }

    /// Whether calls like this one go on without late ranks; the same on all ranks.
    fn is_relayed(&self, call: &CollectiveCall) -> bool {
        let is_plain =
            call.blocks.is_none() && call.joined.is_none() && call.residual.is_none() && call.algorithm.is_none();
        let Some(decision) = call.decision.as_ref().filter(|_| is_plain) else { return false };
        let is_own = matches!(&decision.executor, Executor::Own(Selection { .. }));
        let is_neutral = |reduction: &Reduction| !self.is_in_front || identity::is_neutral_anywhere(reduction);
        call.collective == Collective::AllReduce
            && bytes_of(call) >= LEAST_BYTES
            && is_own
            && call.reduction.as_ref().is_none_or(is_neutral)
            && decision.code().is_none()
            && decision.provider().is_none()
    }

    /// Calls are accepted: has what they may need, where that cannot be taken when ranks are late.
    pub(super) fn accept(&self, calls: &[CollectiveCall]) -> Result<()> {
        let options = locked(&self.state).options;
        if options.drops_late {
            calls.iter().filter(|call| self.is_relayed(call)).try_for_each(|call| options.check(call))?;
        }
        let longest = calls.iter().filter(|call| self.is_relayed(call)).map(bytes_of).max();
        longest.map_or(Ok(()), |bytes| self.memory.make_room(bytes))
    }

    /// What holds from the next call on.
    pub(super) fn adapt(&self, options: AdaptOptions) {
        locked(&self.state).options = options;
    }

    /// What the call that begins is among late ranks: one whose late parts may come later, and its form that divides nothing. A call
    /// that this rank has relayed needs not begin.
    #[inline(never)]
    pub(super) fn begin(
        self: &Arc<LateRanks>,
        comm: &Comm,
        engine: &mut Engine,
        call: &mut CollectiveCall,
    ) -> Result<Option<Box<LateCall>>> {
        let relayed = locked(&self.state).relay.take_if(|relay| relay.absences.is_some());
        if call.factor_at.is_some() && (relayed.is_some() || self.is_relayed(call)) {
            call.read_factor(engine)?;
            call.factor_at = None;
        }
        let summary = call.summary();
        if let Some(relay) = relayed {
            return relay.come(comm, self.clone(), call, summary).map(Some);
        }
        let Some(reduction) = call.reduction.filter(|_| self.is_relayed(call)) else { return Ok(None) };
        call.reduction = Some(Reduction { divisor: 1, ..reduction });
        Ok(Some(Box::new(LateCall::new(self.clone(), summary, reduction, call.clone()))))
    }

    /// Waits until the streams have come to what is called on a GPU, and relays it meanwhile where others ask for it.
    pub(super) fn await_streams(
        self: &Arc<LateRanks>,
        called: &OperationBatch,
        ordered: &mut StreamOrder,
    ) -> Result<()> {
        relay::await_streams(called, self, ordered)
    }

    /// The program has come to a call while this rank may be relaying it.
    pub(super) fn arrive(&self, call: &CollectiveCall, waker: Option<&Waker>) {
        relay::arrive(self, call, waker);
    }

    /// What such a call takes with nobody late, where that is known.
    fn usual(&self, bytes: usize) -> Option<Duration> {
        let state = locked(&self.state);
        let pace = state.paces.get(&class(bytes)).copied();
        let pace = pace.or_else(|| state.paces.values().copied().reduce(f64::max))?;
        Some(Duration::from_nanos((pace * bytes as f64) as u64))
    }

    fn took(&self, bytes: usize, time: Duration) {
        let pace = time.as_nanos() as f64 / bytes as f64;
        let mut state = locked(&self.state);
        let least = state.paces.entry(class(bytes)).or_insert(pace);
        *least = least.min(pace);
    }

    /// The words of all ranks: who was absent. All must have called the same.
    fn heard(&self, summary: CallSummary, number: u64, me: Rank) -> Result<Vec<Absence>> {
        let mut absences = Vec::new();
        for index in 0..self.words.len() / WORD {
            let mut word = [0; WORD];
            self.words.part(index * WORD, WORD).read(&mut word);
            let mut numbers = word.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
            let [bytes, one, other] = std::array::from_fn(|_| numbers.next().unwrap_or(0));
            let (rank, theirs) = (Rank::from_index(index), CallSummary([one, other]));
            if theirs != summary {
                let words = crate::health::diagnosis::differs(number, (me.0, summary), (rank.0, theirs));
                return Err(Error::InvalidUsage(words));
            }
            if bytes > 0 {
                absences.push(Absence { rank, bytes: bytes as usize });
            }
        }
        Ok(absences)
    }
}

impl LateCall {
    fn new(late: Arc<LateRanks>, summary: CallSummary, reduction: Reduction, call: CollectiveCall) -> LateCall {
        let (begun, asked_at, stage) = (Instant::now(), None, Stage::Reduces);
        let options = locked(&late.state).options;
        LateCall { late, summary, reduction, call, relays: false, options, begun, asked_at, asked: 0, stage }
    }

    /// Whether this rank has relayed what its program calls now.
    pub(super) fn has_come(&self) -> bool {
        matches!(self.stage, Stage::Comes(_))
    }

    /// What others are told of this call.
    pub(super) fn summary(&self) -> CallSummary {
        self.summary
    }

    /// Between two polls: what a relay contributes is ready for the segments that come next, and is its program's, if that has come, in those
    /// that have not begun.
    pub(super) fn join(&self, engine: &mut Engine) -> Result<()> {
        match self.relays && matches!(self.stage, Stage::Reduces) {
            true => relay::join(&self.late, engine),
            false => Ok(()),
        }
    }

    /// An error of what is under way, as one of the program's call.
    #[cold]
    pub(super) fn explained(&self, error: Error) -> Error {
        let what = match self.stage {
            Stage::Tells => "whose ranks tell each other who was late",
            Stage::Brings { .. } => "of which late ranks' parts come",
            Stage::Reduces | Stage::Comes(_) | Stage::Ended => return error,
        };
        let CollectiveCall { count, dtype, .. } = &self.call;
        let said = |text: String| format!("all_reduce of {count} {}, {what}: {text}", dtype.name());
        match error {
            Error::Timeout(text) => Error::Timeout(said(text)),
            Error::Remote(text) => Error::Remote(said(text)),
            other => other,
        }
    }

    /// Asks those who are waited for to relay, if nothing has moved for long enough.
    #[inline(never)]
    pub(super) fn ask(&mut self, comm: &Comm, since: Instant, waiting_for: impl Fn() -> Vec<Rank>) {
        if !matches!(self.stage, Stage::Reduces) {
            return;
        }
        let drops = self.options.drops_late;
        let patience = match (self.relays && !drops, self.asked_at) {
            (true, None) => ASKED_BY_RELAY,
            _ => match self.late.usual(bytes_of(&self.call)) {
                Some(usual) => usual.mul_f64(if drops { PART_TO_DROP } else { PART }).max(SOONEST),
                None => return,
            },
        };
        if self.asked_at.is_some_and(|asked| asked < since) {
            self.asked = 0;
        }
        let last = self.asked_at.map_or(since, |asked| asked.max(since));
        let longest = LONGEST_PATIENCE.max(patience);
        if last.elapsed() < patience.saturating_mul(1 << self.asked.min(16)).min(longest) {
            return;
        }
        let waiting = asked_at(&waiting_for(), self.asked as usize);
        self.asked_at = Some(Instant::now());
        self.asked += 1;
        if let Some(monitor) = locked(&comm.monitor).as_ref() {
            monitor.ask_to_relay(&waiting, comm.status.begun(), self.summary);
        }
    }

    /// What was under way has ended: what comes next.
    #[inline(never)]
    pub(super) fn next(&mut self, comm: &Comm) -> Result<NextOfLate> {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Reduces => {
                let absent = if self.relays { relay::absent(&self.late) } else { 0 };
                let CallSummary([one, other]) = self.summary;
                let word: Vec<u8> =
                    [absent as u64, one, other].iter().flat_map(|number| number.to_le_bytes()).collect();
                self.late.word.write(&word);
                self.stage = Stage::Tells;
                Ok(NextOfLate::Tell(self.late.call.clone()))
            }
            Stage::Tells => {
                // The word was the last operation.
                let absences = self.late.heard(self.summary, comm.status.begun() - 1, comm.rank)?;
                if !self.relays && absences.is_empty() {
                    self.late.took(bytes_of(&self.call), self.begun.elapsed());
                }
                if self.relays {
                    relay::ended(&self.late, absences);
                    return Ok(NextOfLate::Nothing);
                }
                self.tell(comm, &absences);
                if self.options.drops_late {
                    self.settle(comm, &absences)?;
                    return Ok(NextOfLate::Nothing);
                }
                self.bring(comm, Coming { absences, next: 0, own: None, _kept: None }, None)
            }
            Stage::Comes(coming) => self.bring(comm, coming, None),
            Stage::Brings { coming, part, memory } => {
                self.late.memory.fold(&self.reduction, self.call.output.part(0, part.len()), part)?;
                self.bring(comm, coming, memory)
            }
            Stage::Ended => Ok(NextOfLate::Nothing),
        }
    }

    fn tell(&self, comm: &Comm, absences: &[Absence]) {
        if absences.is_empty() {
            return;
        }
        self.late.calls.fetch_add(1, Ordering::Relaxed);
        let (number, all) = (comm.status.begun() - 1, bytes_of(&self.call));
        let part = if self.options.drops_late { "is left out of" } else { "brings its part of" };
        for Absence { rank, bytes } in absences {
            crate::info!("operation {number}: rank {rank} was late, and {part} {bytes} of {all} bytes");
        }
    }

    /// Ends the call without what these have not contributed.
    fn settle(&self, comm: &Comm, absences: &[Absence]) -> Result<()> {
        let output = self.call.output.part(0, bytes_of(&self.call));
        let what = (&self.reduction, self.options.rescale);
        dropped::settle(&self.late.memory, what, output, (absences, comm.nranks()))
    }

    /// Begins to bring what those who were late have not contributed to: all of it in one reduction, or the next one's.
    fn bring(&mut self, comm: &Comm, mut coming: Coming, memory: Option<Vector>) -> Result<NextOfLate> {
        let together = coming.together().filter(|_| coming.next == 0);
        let Some(&Absence { rank, bytes }) = coming.absences.get(coming.next) else {
            if !self.options.drops_late {
                self.divide()?;
            }
            return Ok(NextOfLate::Nothing);
        };
        let is_own = together.is_none() && rank == comm.rank;
        let bytes = together.unwrap_or(bytes);
        coming.next = if together.is_some() { coming.absences.len() } else { coming.next + 1 };
        let (memory, part) = match coming.own.filter(|_| is_own) {
            Some(own) => (memory, own.part(0, bytes)),
            None => {
                drop(memory);
                let vector = self.late.memory.take(bytes)?;
                let region = vector.region();
                (Some(vector), region)
            }
        };
        let call = match together {
            Some(_) => self.reduction_of_all(comm, &coming, part)?,
            None => broadcast(comm, rank, part)?,
        };
        self.stage = Stage::Brings { coming, part, memory };
        Ok(NextOfLate::Bring(call))
    }

    /// The all-reduce of the parts of all who were late, in this memory.
    fn reduction_of_all(&self, comm: &Comm, coming: &Coming, part: DeviceRegion) -> Result<CollectiveCall> {
        let reduction = Reduction { divisor: 1, prologue: Prologue::None, ..self.reduction };
        let own = coming.own.map_or(0, |own| own.len());
        coming.own.map_or(Ok(()), |from| self.late.memory.copy(part.part(0, own), from))?;
        self.late.memory.fill(part.part(own, part.len() - own), &reduction)?;
        let count = part.len() / reduction.dtype.size();
        let call = CollectiveCall::new(Collective::AllReduce, [part, part], count, reduction.dtype);
        let mut call = CollectiveCall { reduction: Some(reduction), ..call };
        comm.decide(&mut call)?;
        Ok(call)
    }

    /// What is divided of averages is the sum of all.
    fn divide(&self) -> Result<()> {
        let Reduction { dtype, divisor, .. } = self.reduction;
        let output = self.call.output.part(0, bytes_of(&self.call));
        if divisor == 1 {
            Ok(())
        } else {
            self.late.memory.divide(dtype, divisor, output)
        }
    }
}

/// The broadcast of a late rank's part.
fn broadcast(comm: &Comm, root: Rank, part: DeviceRegion) -> Result<CollectiveCall> {
    let of_bytes = CollectiveCall::of_bytes(Collective::Broadcast, [part, part], part.len());
    // Settings are for the program's broadcasts.
    let mut call = CollectiveCall { root, algorithm: Some(AUTO.to_string()), ..of_bytes };
    comm.decide(&mut call)?;
    Ok(call)
}

impl Comm {
    /// Calls in which late ranks were absent; none where nobody relays.
    pub(super) fn late_calls(&self) -> Option<u64> {
        self.late.get().map(|late| late.calls.load(Ordering::Relaxed))
    }

    /// Whether this rank relays. One that does not is waited for, and nobody has to know of it.
    fn may_relay(&self) -> bool {
        let mut engine = self.engine(&Claim::default());
        self.gpu().is_some() || !engine.as_mut().is_some_and(|engine| engine.transport().only_in_calls())
    }

    /// Has late ranks relayed, where that is set and can be.
    pub(super) fn begin_late(self: &Arc<Comm>) -> Result<()> {
        match relays(&self.config, &self.members, &self.options, (self.grid.nnodes(), self.carrier)) {
            Ok(false) => {}
            Ok(true) => {
                let late = Arc::new(LateRanks::new(self)?);
                let comm: Weak<Comm> = Arc::downgrade(self);
                if self.may_relay() {
                    self.status.relays_by(move |request| relay::begin(&comm, request));
                }
                // Set once: this runs once for each communicator.
                let _ = self.late.set(late);
            }
            Err(why) if self.rank == Rank(0) => {
                let tell = || crate::log::notice(&format!("STRATA_LATE=relay is left out: {why}"));
                REFUSED.get().call_once(tell);
            }
            Err(_) => {}
        }
        Ok(())
    }
}

/// Whether late ranks of such a communicator are relayed; the same on all ranks. An error says why not, where that is set.
pub(super) fn relays(
    config: &Config,
    members: &[Member],
    options: &CommOptions,
    (nnodes, carrier): (usize, Option<Carrier>),
) -> std::result::Result<bool, &'static str> {
    if config.late != Late::Relay || members.len() == 1 {
        return Ok(false);
    }
    if options.companion.is_some() && !matches!(carrier, Some(Carrier::TCP | Carrier::MPI)) {
        return Err(match nnodes {
            1 => "on one node the vendor's library makes all calls",
            _ => "the vendor's library carries what goes between nodes (STRATA_INTER)",
        });
    }
    if options.make_device.is_some() {
        return Err("data is on devices that are neither the host nor GPUs");
    }
    if members.iter().any(|member| member.on_gpu != members[0].on_gpu) {
        return Err("data is on GPUs on some ranks only");
    }
    if members[0].on_gpu && config.lost == Lost::Continue {
        return Err("on GPUs it does not go with STRATA_LOST=continue");
    }
    match carrier {
        Some(Carrier::TCP | Carrier::MPI) => Ok(true),
        _ if nnodes == 1 => Ok(true),
        _ => Err("it is known to work over TCP and MPI only (STRATA_INTER)"),
    }
}

/// Whether a rank relays calls that its program has not made. On a GPU it relays those that its stream has not come to: there programs
/// run ahead, and what a relay needs of the driver is taken when a call is accepted.
pub(super) fn relays_before_calls(
    config: &Config,
    members: &[Member],
    options: &CommOptions,
    between: (usize, Option<Carrier>),
) -> bool {
    relays(config, members, options, between) == Ok(true) && !members.iter().any(|member| member.on_gpu)
}
