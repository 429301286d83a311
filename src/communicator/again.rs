//! Calls that are made again: what does not change between two equal calls is prepared once.
//!
//! A call that comes by itself, in ordinary host memory and on the null stream, for the second time goes from the entry
//! straight to the board: no plan is looked up, nothing is recorded, no operation waits in the queue. It takes the
//! communicator's next turn, but only where nothing runs or waits there; else, and wherever anything is not as it was when the
//! call was prepared, it goes the long way. What it posts is what the long way posts, so other ranks need not do the same; and
//! where others are not there yet it becomes an operation like any other, which waits as they all do.
#![forbid(unsafe_code)]

use super::batch::OperationBatch;
use super::engine::Engine;
use super::messages::Messages;
use super::recorded::PreparedRecord;
use super::{CollectiveCall, Comm, Direction, Elements, Message, ALIVE};
use crate::device::host::Combine;
use crate::dtype::Reduction;
use crate::error::{Result, ShortResult};
use crate::exec::{Op, Started, Token, World};
use crate::health::CallSummary;
use crate::memory::{DeviceRegion, OnDevice};
use crate::plan::{Collective, OperandOrder};
use crate::records::CallTicket;
use crate::topo::Rank;
use crate::transport::{FlatCall, Transport};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls that are kept.
const KEPT: usize = 8;
/// Polls between two looks at the clock, and at what may have happened elsewhere.
const POLLS_PER_LOOK: u32 = 256;
/// Polls for others' parts of a rank that has no processor of its own, before it gives it away: mostly one of them waits for it.
const SHARED_POLLS: u32 = 8;
/// The same for a message: its peer may run on another processor, and answers within so many.
const SHARED_POLLS_FOR_MESSAGE: u32 = 64;

/// What all ranks' equal calls have in common, as the C interface gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Again {
    word: u64,
    count: usize,
}

impl Again {
    /// A call by its arguments; none that can be kept where they are out of range.
    pub fn new(collective: Collective, count: usize, dtype: i32, op: Option<i32>, root: i32) -> Option<Again> {
        let (dtype, op) = (u8::try_from(dtype).ok()?, op.map_or(Some(u8::MAX), |op| u8::try_from(op).ok())?);
        let root = u32::try_from(root).ok()?;
        let word = collective as u64 | u64::from(dtype) << 8 | u64::from(op) << 16 | u64::from(root) << 32;
        (count > 0).then_some(Again { word, count })
    }
}

/// A call, ready to be made again.
#[derive(Debug)]
pub(super) struct PreparedCall {
    key: Again,
    /// The call, with buffers of the right lengths.
    call: Arc<CollectiveCall>,
    /// The same for the board.
    flat: FlatCall<OnDevice>,
    summary: CallSummary,
    signature: u32,
    record: Option<PreparedRecord>,
}

/// A call that has begun and not ended, or failed.
struct Suspended {
    call: CollectiveCall,
    turn: u64,
    record: Option<CallTicket>,
    outcome: Result<()>,
}

/// Calls that are ready.
#[derive(Debug, Default)]
pub(super) struct PreparedCalls {
    kept: Vec<PreparedCall>,
    /// Some of those that cannot be.
    unfit: Vec<Again>,
}

impl PreparedCalls {
    /// Keeps a call of this signature; none is of one that cannot be made so.
    fn keep(&mut self, key: Again, call: &CollectiveCall, signature: Option<u32>, record: Option<PreparedRecord>) {
        let Some(signature) = signature else {
            if self.unfit.len() == KEPT {
                self.unfit.remove(0);
            }
            return self.unfit.push(key);
        };
        if self.kept.len() == KEPT {
            self.kept.remove(0);
        }
        let CollectiveCall { collective, count, dtype, reduction, root, .. } = *call;
        let summary = CallSummary::new(collective, count, dtype, reduction, root);
        self.kept.push(PreparedCall {
            key,
            call: Arc::new(call.clone()),
            flat: flat(call),
            summary,
            signature,
            record,
        });
    }

    fn knows(&self, key: Again) -> bool {
        self.find(key).is_some() || self.unfit.contains(&key)
    }

    fn find(&self, key: Again) -> Option<&PreparedCall> {
        self.kept.iter().find(|prepared| prepared.key == key)
    }
}

/// A call for the board.
fn flat(call: &CollectiveCall) -> FlatCall<OnDevice> {
    let CollectiveCall { collective, count, dtype, reduction, root, input, output, .. } = *call;
    let combine = reduction.map(|Reduction { dtype, operator, divisor, .. }| Combine {
        dtype,
        operator,
        order: OperandOrder::LocalFirst,
        divisor,
    });
    FlatCall { collective, root: root.index(), input, output, block_bytes: count * dtype.size(), combine }
}

/// A world in which the only step of a plan has been started already.
pub(super) struct Begun;

impl World for Begun {
    fn now_ns(&self) -> u64 {
        super::live::now_ns()
    }

    fn start(&mut self, _: Token, _: Op<'_>) -> Result<Started> {
        Ok(Started::Pending)
    }

    fn poll(&mut self, _: &mut Vec<Token>) -> Result<()> {
        Ok(())
    }
}

impl Comm {
    /// Makes a call as it was made before, on the null stream, and returns when it has ended. None where it has to go the
    /// long way; nothing has been done then. `buffers` gives both for their lengths.
    pub fn again(
        self: &Arc<Comm>,
        key: Again,
        buffers: impl FnOnce(usize, usize) -> Option<(DeviceRegion, DeviceRegion)>,
    ) -> Option<ShortResult<()>> {
        if self.numbers.is_some() || !self.is_ready() {
            return None;
        }
        let call = |engine: &mut Option<Engine>| {
            let engine = engine.as_mut()?;
            let prepared = engine.prepared.find(key)?;
            let (input, output) = buffers(prepared.flat.input.len(), prepared.flat.output.len())?;
            let flat = FlatCall { input, output, ..prepared.flat };
            let (signature, summary) = (prepared.signature, prepared.summary);
            let turn = self.turns.issue_now()?;
            let record = self.begin_prepared(&prepared.record, input.address(), output.address());
            self.status.begin(summary);
            let outcome = match engine.call_flat(signature, &flat) {
                Ok(Started::Pending) => self.spin(engine),
                outcome => outcome,
            };
            Some(match outcome {
                Ok(Started::Done) => Ok((turn, record)),
                outcome => Err(engine.suspend(key, (input, output), (turn, record), outcome)),
            })
        };
        Some(match self.engine.try_often(call)?? {
            Ok((turn, record)) => {
                self.end_short(record, 0);
                self.status.finish();
                self.turns.advance_from(turn);
                Ok(())
            }
            Err(suspended) => self.go_on(*suspended).map_err(Box::new),
        })
    }

    /// Has a call that has not ended yet, or has failed, go on as any other.
    #[inline(never)]
    fn go_on(self: &Arc<Comm>, Suspended { call, turn, record, outcome }: Suspended) -> Result<()> {
        OperationBatch::begun(self.clone(), turn, call, record).end(outcome)
    }

    /// A call that has been made before, to be made again; none where it would have to go the long way.
    pub(super) fn prepared(&self, key: Again) -> Option<Arc<CollectiveCall>> {
        if self.numbers.is_some() || !self.is_ready() {
            return None;
        }
        let held = self.engine.try_lock()?;
        Some(held.as_ref()?.prepared.find(key)?.call.clone())
    }

    /// Sends or receives a message by itself, on the null stream, and returns when that has ended. None where it has to go the
    /// long way; nothing has been done then.
    pub fn message_alone(
        self: &Arc<Comm>,
        direction: Direction,
        peer: Rank,
        (data, elements): (DeviceRegion, Elements),
    ) -> Option<ShortResult<()>> {
        if self.numbers.is_some() || peer == self.rank || !self.is_ready() {
            return None;
        }
        let exchange = |engine: &mut Option<Engine>| {
            let engine = engine.as_mut().filter(|engine| engine.takes_alone(data.len()))?;
            let turn = self.turns.issue_now()?;
            let message = Message { direction, peer, data, sequence: 0 };
            let sequence = engine.number_alone(&message);
            let record = self.begin_alone(direction, peer, (data, elements));
            Some(match self.exchange_alone(engine, &message, sequence) {
                Ok(Started::Done) => Ok((turn, record)),
                outcome => Err(Box::new(((turn, record), (message, sequence), outcome))),
            })
        };
        Some(match self.engine.try_often(exchange)?? {
            Ok((turn, record)) => {
                self.end_short(record.0, record.1);
                self.turns.advance_from(turn);
                Ok(())
            }
            Err(open) => {
                let (turn, message, outcome) = *open;
                self.message_goes_on(turn, message, outcome).map_err(Box::new)
            }
        })
    }

    /// Has a message that has not been exchanged yet, or has failed, go on as any other.
    #[inline(never)]
    fn message_goes_on(
        self: &Arc<Comm>,
        (turn, record): (u64, (Option<CallTicket>, u64)),
        (message, sequence): (Message, u64),
        outcome: ShortResult<Started>,
    ) -> Result<()> {
        let is_posted = !matches!(outcome, Ok(Started::Busy));
        let message = Messages::of_one(message, sequence, is_posted);
        let run = OperationBatch::with_message(self.clone(), turn, message, record);
        run.end(outcome.map(|_| ()).map_err(|error| *error))
    }

    /// Begins a message and polls for a while. A short one of this node needs not be posted.
    #[inline]
    fn exchange_alone(&self, engine: &mut Engine, message: &Message, sequence: u64) -> ShortResult<Started> {
        let mut started = engine.exchange_short(message, sequence)?;
        if started == Started::Pending {
            started =
                self.spin_while(engine, SHARED_POLLS_FOR_MESSAGE, |engine| engine.exchange_short(message, sequence))?;
        }
        match started {
            Started::Done => Ok(Started::Done),
            started => self.post_alone(engine, message, sequence, started),
        }
    }

    /// The same for one that has to be posted, and may have been waited for already.
    #[inline(never)]
    fn post_alone(
        &self,
        engine: &mut Engine,
        message: &Message,
        sequence: u64,
        before: Started,
    ) -> ShortResult<Started> {
        Ok(match (before, engine.post_alone(message, sequence)?) {
            (Started::Busy, Started::Pending) => self.spin_on(engine)?,
            (_, started) => started,
        })
    }

    /// Whether nothing is known yet of calls like this one.
    pub fn would_learn(&self, key: Again) -> bool {
        let is_new = |engine: &Engine| !engine.prepared.knows(key);
        self.engine.try_lock().is_some_and(|held| held.as_ref().is_some_and(is_new))
    }

    /// Has a call made again like this one go straight to the board from now on, if it is of the kind that does.
    pub fn learn(&self, key: Again, mut call: CollectiveCall) {
        // An error is the call's own to tell.
        // One that a sibling carries has that one's turn.
        if self.decide(&mut call).is_ok() && self.sibling_for(&call).is_none() {
            let record = self.prepared_record(&call);
            if let Some(engine) = self.engine.try_lock().as_mut().and_then(|held| held.as_mut()) {
                engine.learn(key, &call, record);
            }
        }
    }

    /// Whether an operation can be started, by a look at what mostly says so.
    pub(super) fn is_ready(&self) -> bool {
        self.origin.is_here()
            && self.phase.load(Ordering::Acquire) == ALIVE
            && !self.suspended.load(Ordering::Acquire)
            && self.status.failure().is_none()
            && self.family.get().is_none_or(|family| family.failure().is_none())
            && self.survivors.get().is_none()
            && self.late.get().is_none()
    }

    /// Polls for a while.
    fn spin(&self, engine: &mut Engine) -> ShortResult<Started> {
        self.spin_while(engine, SHARED_POLLS, |engine| engine.transport().advance_board())
    }

    /// The same for a message that has been posted.
    fn spin_on(&self, engine: &mut Engine) -> ShortResult<Started> {
        let mut done = std::mem::take(&mut engine.done_alone);
        let ended = self.spin_while(engine, SHARED_POLLS_FOR_MESSAGE, |engine| {
            done.clear();
            engine.transport().poll(&mut done)?;
            Ok(if done.is_empty() { Started::Pending } else { Started::Done })
        });
        engine.done_alone = done;
        ended
    }

    /// Polls with the engine at hand, and between polls gives a shared processor away, for `STRATA_SPIN_US`. Where others compute
    /// there, that would cost a time slice: the call waits as operations do.
    fn spin_while(
        &self,
        engine: &mut Engine,
        shared_polls: u32,
        mut poll: impl FnMut(&mut Engine) -> ShortResult<Started>,
    ) -> ShortResult<Started> {
        let is_alone = !engine.transport().shares_among_ranks();
        let limit = Duration::from_micros(self.config.spin_us);
        let mut since = None;
        loop {
            for _ in 0..if is_alone { POLLS_PER_LOOK } else { shared_polls } {
                let started = poll(engine)?;
                if started != Started::Pending {
                    return Ok(started);
                }
            }
            if let Some(failure) = self.failure() {
                return Err(Box::new(failure));
            }
            let is_over = since.get_or_insert_with(Instant::now).elapsed() >= limit;
            let transport = engine.transport();
            if is_over || (!is_alone && (transport.on_busy_processors() || transport.give_way())) {
                return Ok(Started::Pending);
            }
        }
    }
}

impl Engine {
    /// Whether a message of so many bytes can be posted by itself: nothing else is under way that could end meanwhile.
    fn takes_alone(&self, bytes: usize) -> bool {
        self.takes_messages_alone() && bytes > 0
    }

    /// Leaves a call as any other is left that waits for others.
    #[inline(never)]
    fn suspend(
        &mut self,
        key: Again,
        (input, output): (DeviceRegion, DeviceRegion),
        (turn, record): (u64, Option<CallTicket>),
        outcome: ShortResult<Started>,
    ) -> Box<Suspended> {
        let prepared = self.prepared.find(key).expect("the call that has just been begun");
        let call = CollectiveCall { input, output, ..(*prepared.call).clone() };
        let outcome = match outcome {
            Ok(_) => self.resume(&call),
            Err(error) => Err(self.explained(*error, &call)),
        };
        Box::new(Suspended { call, turn, record, outcome })
    }

    fn learn(&mut self, key: Again, call: &CollectiveCall, record: Option<PreparedRecord>) {
        if self.prepared.knows(key) {
            return;
        }
        let signature = self.signature_if_flat(call).unwrap_or(None);
        self.prepared.keep(key, call, signature, record);
    }
}
