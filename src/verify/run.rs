//! One run of all plans together, on symbols, and the checks made on the way.
//!
//! Lanes run until they wait for something; each message, completion and call wakes the lane that waits for it. In what
//! order they run does not matter (see [`super`]), so there is no schedule to explore.
#![forbid(unsafe_code)]

use super::expr::{Expr, Exprs, Fault, Info, Made, EMPTY};
use super::index::{Chunk, Index, NONE};
use super::order::{AccessOrder, Filled};
use super::{Check, Options, Rejection, Report};
use crate::plan::{is_coded, Action, Buffer, Call, Collective, Span};
use crate::topo::Rank;
use queues::Queues;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

mod calls;
mod outcome;
mod queues;

/// The chunks of most steps are few.
type Chunks = SmallVec<[Chunk; 4]>;
/// Their values.
type Values = SmallVec<[Expr; 4]>;

/// A message on its way.
#[derive(Debug)]
struct Message {
    send: u32,
    rounds: u32,
    values: Values,
}

#[derive(Debug, Clone, Copy)]
struct LaneState {
    /// The next step.
    next: u32,
    /// How many of its dependencies have been seen completed.
    deps_done: usize,
    /// The step in whose list of waiters it is, or [`NONE`].
    waits_for: u32,
    queued: bool,
    rounds: u32,
}

impl LaneState {
    fn at(first: u32) -> LaneState {
        LaneState { next: first, deps_done: 0, waits_for: NONE, queued: true, rounds: 0 }
    }
}

/// A call that some of its members have issued.
#[derive(Debug)]
struct Gathering {
    steps: Vec<u32>,
    missing: usize,
}

/// The calls a rank has made on one group.
#[derive(Debug, Clone, Copy)]
struct LastCall {
    step: u32,
    count: u32,
}

/// The state of a run.
#[derive(Debug)]
pub(super) struct SymbolicRun<'a> {
    index: &'a Index<'a>,
    options: Options,
    exprs: Exprs,
    order: AccessOrder,
    values: Vec<Expr>,
    /// The step that last wrote each place.
    writers: Vec<u32>,
    lanes: Vec<LaneState>,
    channels: Queues,
    completed: Vec<bool>,
    rounds: Vec<u32>,
    /// For each step the first lane that waits for it, for each lane the next one that waits for the same step.
    first_waiter: Vec<u32>,
    next_waiter: Vec<u32>,
    ready: Vec<u32>,
    gatherings: FxHashMap<(u32, u32), Gathering>,
    /// For each rank the groups it has called.
    last_calls: Vec<Vec<(u32, LastCall)>>,
    overlaps: FxHashMap<(u32, u32), bool>,
    report: Report,
}

type Verdict<T = ()> = Result<T, Rejection>;

impl<'a> SymbolicRun<'a> {
    /// The state before the first step.
    pub fn new(index: &'a Index<'a>, options: Options) -> SymbolicRun<'a> {
        let exprs = Exprs::new(index.plans, index.vectored);
        let mut values = vec![EMPTY; index.nplaces()];
        for (rank, plan) in index.plans.iter().enumerate() {
            for chunk in 0..plan.chunks(Buffer::Input) as u32 {
                values[index.user_place(rank, Buffer::Input, chunk) as usize] = exprs.input(rank, chunk);
            }
        }
        let nlanes = index.lanes.len();
        SymbolicRun {
            exprs,
            options,
            order: AccessOrder::new(index),
            values,
            writers: vec![NONE; index.nplaces()],
            lanes: index.lanes.iter().map(|lane| LaneState::at(lane.first)).collect(),
            channels: Queues::new(index.channels.len()),
            completed: vec![false; index.steps.len()],
            rounds: vec![0; index.steps.len()],
            first_waiter: vec![NONE; index.steps.len()],
            next_waiter: vec![NONE; nlanes],
            ready: (0..nlanes as u32).rev().collect(),
            gatherings: FxHashMap::default(),
            last_calls: vec![Vec::new(); index.plans.len()],
            overlaps: FxHashMap::default(),
            report: Report { ranks: index.plans.len(), steps: index.steps.len(), ..Report::default() },
            index,
        }
    }

    /// Runs everything and judges the outcome.
    pub fn run(mut self) -> Verdict<Report> {
        self.run_lanes()?;
        self.check_finished()?;
        self.check_outputs()?;
        self.report.rounds = self.rounds.iter().copied().max().unwrap_or(0) as usize;
        Ok(self.report)
    }

    /// Runs everything, and gives the sends whose sources are written before they must have been received, each with the
    /// step that does so.
    ///
    /// Sends go first, as soon as they can. So where a write waits for all that a send waits for, the send has read before it.
    pub fn early_writes(mut self) -> Verdict<Vec<(u32, u32)>> {
        self.order.early = Some(Vec::new());
        self.run_sends_first()?;
        Ok(self.order.early.take().unwrap_or_default())
    }

    fn run_lanes(&mut self) -> Verdict {
        while let Some(lane) = self.ready.pop() {
            self.lanes[lane as usize].queued = false;
            while self.lanes[lane as usize].next < self.index.lanes[lane as usize].end {
                let step = self.lanes[lane as usize].next;
                if !self.deps_completed(step) || !self.issue(step)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The same, but no step that is no send while a send can be issued.
    fn run_sends_first(&mut self) -> Verdict {
        let mut others = Vec::new();
        loop {
            let sends = self.ready.pop();
            let Some(lane) = sends.or_else(|| others.pop()) else { return Ok(()) };
            let step = self.lanes[lane as usize].next;
            let is_over = step >= self.index.lanes[lane as usize].end;
            if sends.is_some() && !is_over && !matches!(self.index.steps[step as usize].action, Action::Send { .. }) {
                others.push(lane);
                continue;
            }
            self.lanes[lane as usize].queued = false;
            if !is_over && self.deps_completed(step) && self.issue(step)? {
                self.wake(lane);
            }
        }
    }

    /// Whether the dependencies of a lane's next step have completed; if not, the lane will be woken.
    fn deps_completed(&mut self, step: u32) -> bool {
        let info = self.index.steps[step as usize];
        let rank = self.index.rank(step);
        let lane = &mut self.lanes[info.lane as usize];
        while let Some(&dep) = info.deps.get(lane.deps_done) {
            let Some(dep) = self.index.resolve(rank, dep) else { return false };
            if !self.completed[dep as usize] {
                // A lane may be woken for another reason, and is in the list already.
                if lane.waits_for != dep {
                    lane.waits_for = dep;
                    self.next_waiter[info.lane as usize] = self.first_waiter[dep as usize];
                    self.first_waiter[dep as usize] = info.lane;
                }
                return false;
            }
            lane.rounds = lane.rounds.max(self.rounds[dep as usize]);
            lane.deps_done += 1;
        }
        true
    }

    /// Issues a step whose dependencies have completed. Says whether the lane can go on.
    fn issue(&mut self, step: u32) -> Verdict<bool> {
        match self.index.steps[step as usize].action {
            Action::Send { src, .. } => return self.send(step, src),
            Action::Recv { dst, .. } => {
                let Some(message) = self.take(step) else { return Ok(false) };
                self.check_length(step, message.values.len(), dst)?;
                self.store(step, &[], dst, &message.values)?;
            }
            Action::RecvReduce { local, dst, order, finish, .. } => {
                let Some(message) = self.take(step) else { return Ok(false) };
                self.check_length(step, message.values.len(), dst)?;
                let (reads, mine) = self.load(step, local)?;
                let incoming_first = *order == crate::plan::OperandOrder::IncomingFirst;
                let (left, right) = if incoming_first { (&message.values, &mine) } else { (&mine, &message.values) };
                let results = self.combine(step, Made::Reduce, left, right)?;
                let results = self.finish(step, results, *finish)?;
                self.store(step, &reads, dst, &results)?;
            }
            Action::Copy { src, dst, start, finish } => {
                let (reads, mut values) = self.load(step, src)?;
                match (is_coded(src), is_coded(dst)) {
                    (false, true) => values = self.encode(step, &values)?,
                    (true, false) => values = self.decode(&values),
                    _ => {}
                }
                if *start {
                    values = self.start(step, &values)?;
                }
                let values = self.finish(step, values, *finish)?;
                self.store(step, &reads, dst, &values)?;
            }
            Action::Reduce { srcs, dst, finish } => {
                let (mut reads, mut folded) = self.load(step, &srcs[0])?;
                let coded = is_coded(&srcs[0]);
                if coded {
                    folded = self.decode(&folded);
                }
                for src in &srcs[1..] {
                    let (more, mut values) = self.load(step, src)?;
                    reads.extend(more);
                    if coded {
                        values = self.decode(&values);
                    }
                    folded = self.combine(step, if coded { Made::Fold } else { Made::Reduce }, &folded, &values)?;
                }
                if is_coded(dst) {
                    folded = self.encode(step, &folded)?;
                }
                let folded = self.finish(step, folded, *finish)?;
                self.store(step, &reads, dst, &folded)?;
            }
            Action::Call(call) => return self.call(step, call),
            Action::Nop => {}
        }
        self.order.execute(step);
        self.move_on(step);
        self.complete(step);
        Ok(true)
    }

    /// The lane goes on to its next step.
    fn move_on(&mut self, step: u32) {
        let lane = &mut self.lanes[self.index.steps[step as usize].lane as usize];
        lane.next = step + 1;
        lane.deps_done = 0;
        self.rounds[step as usize] = lane.rounds;
    }

    fn complete(&mut self, step: u32) {
        self.completed[step as usize] = true;
        let mut lane = std::mem::replace(&mut self.first_waiter[step as usize], NONE);
        while lane != NONE {
            let next = std::mem::replace(&mut self.next_waiter[lane as usize], NONE);
            self.lanes[lane as usize].waits_for = NONE;
            self.wake(lane);
            lane = next;
        }
    }

    fn wake(&mut self, lane: u32) {
        if lane != NONE && !std::mem::replace(&mut self.lanes[lane as usize].queued, true) {
            self.ready.push(lane);
        }
    }

    fn send(&mut self, step: u32, src: &'a [Span]) -> Verdict<bool> {
        let info = self.index.steps[step as usize];
        if !self.channels.has_room(info.link, self.options.capacity) {
            return Ok(false);
        }
        let (reads, values) = self.load(step, src)?;
        self.check_started(step, &values)?;
        self.access(step, &reads, &[])?;
        self.order.execute(step);
        self.order.sent(self.index, step, &reads);
        self.report.messages += 1;
        self.report.chunks += values.len();
        let rounds = self.lanes[info.lane as usize].rounds;
        self.channels.push(info.link, Message { send: step, rounds, values });
        self.wake(self.index.channels[info.link as usize].receiver);
        self.move_on(step);
        Ok(true)
    }

    /// Takes the next message for a receiving step, if it is there.
    fn take(&mut self, step: u32) -> Option<Message> {
        let info = self.index.steps[step as usize];
        let sender = self.index.channels[info.link as usize].sender;
        let (message, news) = self.channels.pop(info.link);
        // Only news wakes a lane, or lanes that wait for each other would wake each other for ever.
        if news {
            self.wake(sender);
        }
        let message = message?;
        let lane = &mut self.lanes[info.lane as usize];
        lane.rounds = lane.rounds.max(message.rounds + 1);
        self.order.received(message.send, step);
        self.complete(message.send);
        Some(message)
    }

    fn check_length(&self, step: u32, count: usize, dst: &[Span]) -> Verdict {
        let room = crate::plan::chunks_in(dst);
        if count != room {
            let text = format!("a message of {count} chunks arrives where {room} are expected");
            return self.index.reject(Check::Bounds, step, text);
        }
        Ok(())
    }

    /// The chunks of a list and their values.
    fn load(&self, step: u32, spans: &[Span]) -> Verdict<(Chunks, Values)> {
        let rank = self.index.rank(step);
        let chunks: Chunks = self.index.chunks(rank, spans).collect();
        let mut values = Values::with_capacity(chunks.len());
        for chunk in &chunks {
            let value = self.values[chunk.place as usize];
            if value == EMPTY {
                return self.index.reject(Check::Provenance, step, "reads a chunk that nothing has written".into());
            }
            self.check_class(step, chunk, value)?;
            values.push(value);
        }
        Ok((chunks, values))
    }

    /// Stores values, and records the step's accesses: `reads` and these writes.
    fn store(&mut self, step: u32, reads: &[Chunk], dst: &[Span], values: &[Expr]) -> Verdict {
        let writes: Chunks = self.index.chunks(self.index.rank(step), dst).collect();
        self.access(step, reads, &writes)?;
        self.put(step, &writes, values)
    }

    fn put(&mut self, step: u32, writes: &[Chunk], values: &[Expr]) -> Verdict {
        for (chunk, &value) in writes.iter().zip(values) {
            self.check_class(step, chunk, value)?;
            self.values[chunk.place as usize] = value;
            self.writers[chunk.place as usize] = step;
        }
        Ok(())
    }

    fn check_class(&self, step: u32, chunk: &Chunk, value: Expr) -> Verdict {
        let Info { class, block, coded, .. } = self.exprs.info(value);
        if coded != chunk.coded {
            let text =
                format!("{} is where chunks are {}coded", self.exprs.describe(value), if coded { "not " } else { "" });
            return self.index.reject(Check::Coding, step, text);
        }
        if block != chunk.block {
            let value = self.exprs.describe(value);
            let text = format!("{value} is of block {block} of the row, and the span names block {}", chunk.block);
            return self.index.reject(Check::Bounds, step, text);
        }
        if class != chunk.class {
            let value = self.exprs.describe(value);
            let text = format!("{value} is as large as chunk {class} of a block, not chunk {}", chunk.class);
            return self.index.reject(Check::Bounds, step, text);
        }
        Ok(())
    }

    fn access(&mut self, step: u32, reads: &[Chunk], writes: &[Chunk]) -> Verdict {
        let action = self.index.steps[step as usize].action;
        let Err(earlier) = self.order.access(self.index, step, reads, writes) else {
            // What a receive has comes from its message first of all.
            let lowest = reads.iter().min_by_key(|chunk| chunk.class);
            if let (Some(lowest), false) = (lowest, matches!(action, Action::RecvReduce { .. })) {
                self.order.read(step, self.writers[lowest.place as usize], lowest.class);
            }
            return Ok(());
        };
        let name = self.index.name(earlier);
        let text = match self.index.steps[earlier as usize].action {
            _ if self.order.is_exhausted() => format!("its order after {name} is too long to find"),
            Action::Send { .. } => format!("overwrites what {name} may still be sending"),
            _ => format!("nothing orders it after {name}, which touches the same chunk"),
        };
        self.index.reject(Check::Race, step, text)
    }

    /// With a prologue, raw input may neither be reduced nor leave its rank.
    fn check_started(&self, step: u32, values: &[Expr]) -> Verdict {
        if !self.index.shape.prologue {
            return Ok(());
        }
        match values.iter().find(|&&value| !self.exprs.info(value).started) {
            Some(&raw) => {
                let text = format!("uses {} without its prologue", self.exprs.describe(raw));
                self.index.reject(Check::Epilogue, step, text)
            }
            None => Ok(()),
        }
    }

    fn start(&mut self, step: u32, values: &[Expr]) -> Verdict<Values> {
        if !self.index.shape.prologue {
            return self.index.reject(Check::Epilogue, step, "the shape has no prologue".into());
        }
        let mut started = Values::with_capacity(values.len());
        for &value in values {
            let info = self.exprs.info(value);
            if info.started || info.finished {
                let text = format!("applies the prologue to {}, which has passed it", self.exprs.describe(value));
                return self.index.reject(Check::Epilogue, step, text);
            }
            started.push(self.exprs.start(value));
        }
        Ok(started)
    }

    fn finish(&mut self, step: u32, values: Values, wanted: bool) -> Verdict<Values> {
        if !wanted {
            return Ok(values);
        }
        if !self.index.shape.reduces() {
            let text = format!("a value of {} has no epilogue", self.index.shape.collective.name());
            return self.index.reject(Check::Epilogue, step, text);
        }
        self.check_started(step, &values)?;
        let mut finished = Values::with_capacity(values.len());
        for value in values {
            if self.exprs.info(value).finished || !self.exprs.is_full(value) {
                let text = format!("applies the epilogue to {}", self.exprs.describe(value));
                return self.index.reject(Check::Epilogue, step, text);
            }
            finished.push(self.exprs.finish(value));
        }
        Ok(finished)
    }

    fn encode(&mut self, step: u32, values: &[Expr]) -> Verdict<Values> {
        self.check_started(step, values)?;
        let mut coded = Values::with_capacity(values.len());
        for &value in values {
            match self.exprs.encode(value) {
                Ok(value) => coded.push(value),
                Err((check, text)) => return self.index.reject(check, step, text),
            }
        }
        Ok(coded)
    }

    fn decode(&mut self, values: &[Expr]) -> Values {
        values.iter().map(|&value| self.exprs.decode(value)).collect()
    }

    fn combine(&mut self, step: u32, made: Made, left: &[Expr], right: &[Expr]) -> Verdict<Values> {
        if !self.index.shape.reduces() {
            let text = format!("{} reduces nothing", self.index.shape.collective.name());
            return self.index.reject(Check::Provenance, step, text);
        }
        self.check_started(step, left)?;
        self.check_started(step, right)?;
        let mut results = Values::with_capacity(left.len());
        for (&a, &b) in left.iter().zip(right) {
            match self.exprs.combine(made, a, b) {
                Ok(result) => results.push(result),
                Err((check, text)) => return self.index.reject(check, step, text),
            }
        }
        Ok(results)
    }
}
