//! What is taken out of a script's plans: steps of which nothing depends, `nop`s, and messages that can be one.
//!
//! Dead steps: those that write what no promised chunk of any output depends on, and the messages that carry it. Whether a chunk
//! of memory matters is asked for the whole plan at once: it does where the output has it, or where a step that matters reads it.
//! Messages: two that follow each other from one lane into another become one where nobody waits for the first alone and the
//! second waits for nothing that the first has not waited for. That is MSCCLang's aggregation, but for chunks anywhere, since a
//! list of spans can say that.
//!
//! Ranks of one call may hold their buffers in different ways, so the plans of all forms must have the same messages. While passes
//! run, what a message carries is written as numbers of chunks ([`Marked`]), which the forms have in common; [`Marked::messages`]
//! says whether they still have. Nothing else is believed of the passes: the verifier proves what comes out.
#![forbid(unsafe_code)]

use super::lower::joined;
use crate::plan::contract::Promise;
use crate::plan::{Action, Buffer, Channel, Lane, Plan, Span, Spans, Step, StepRef};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// Plans whose sends have numbers in the place of chunks: the chunks that a rank sends are numbered stream by stream.
#[derive(Debug, Clone)]
pub(super) struct Marked {
    pub plans: Vec<Plan>,
    /// For each rank the chunks that the numbers stand for.
    chunks: Vec<Vec<Span>>,
}

/// A message stream: receiver and channel, or sender and channel.
type Stream = (u32, Channel);
/// A message: its sender, its stream, and the numbers of its chunks.
pub(super) type SentChunks = (u32, Stream, Vec<usize>);

impl Marked {
    /// The plans with numbers in their sends.
    pub fn new(plans: &[Plan]) -> Marked {
        let mut marked = Marked { plans: plans.to_vec(), chunks: Vec::new() };
        for plan in &mut marked.plans {
            let mut streams: BTreeMap<Stream, Vec<&mut Spans>> = BTreeMap::new();
            for step in plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
                if let Action::Send { to, channel, src } = &mut step.action {
                    streams.entry((to.0, *channel)).or_default().push(src);
                }
            }
            let mut chunks = Vec::new();
            for src in streams.into_values().flatten() {
                let first = chunks.len();
                chunks.extend(one_by_one(src));
                let len = chunks.len() - first;
                *src = if len == 0 { Spans::new() } else { vec![Span::scratch(first, len, first)] };
            }
            marked.chunks.push(chunks);
        }
        marked
    }

    /// The plans with chunks in their sends again.
    pub fn plans(&self) -> Vec<Plan> {
        let mut plans = self.plans.clone();
        for (plan, chunks) in plans.iter_mut().zip(&self.chunks) {
            for step in plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
                if let Action::Send { src, .. } = &mut step.action {
                    *src = joined(numbers(src).map(|number| chunks[number]));
                }
            }
        }
        plans
    }

    /// All messages, by sender, stream and order: which chunks each carries, by their numbers.
    pub fn messages(&self) -> Vec<SentChunks> {
        let of_plan = |plan: &Plan| {
            let mut sent = Vec::new();
            for step in plan.lanes.iter().flat_map(|lane| &lane.steps) {
                if let Action::Send { to, channel, src } = &step.action {
                    sent.push((plan.rank.0, (to.0, *channel), numbers(src).collect()));
                }
            }
            // Messages of one stream stand in one lane, in their order.
            sent.sort_by_key(|(_, stream, _): &SentChunks| *stream);
            sent
        };
        self.plans.iter().flat_map(of_plan).collect()
    }

    /// With lanes that are alike as one; none where no two are.
    pub fn merged(&self) -> Option<Marked> {
        let plans = super::merge::merge(&self.plans)?;
        Some(Marked { plans, chunks: self.chunks.clone() })
    }

    /// What a step reads, by the chunk.
    fn reads(&self, rank: usize, action: &Action) -> Vec<Span> {
        match action {
            Action::Send { src, .. } => numbers(src).map(|number| self.chunks[rank][number]).collect(),
            Action::RecvReduce { local, .. } => one_by_one(local).collect(),
            Action::Copy { src, .. } => one_by_one(src).collect(),
            Action::Reduce { srcs, .. } => srcs.iter().flat_map(|src| one_by_one(src)).collect(),
            Action::Recv { .. } | Action::Call(_) | Action::Nop => Vec::new(),
        }
    }

    /// Without steps of which no promised output depends; none where there are none.
    pub fn without_dead_steps(&self) -> Option<Marked> {
        let live = Live::of(self);
        let mut dropped = 0;
        let plans = self.plans.iter().enumerate().map(|(rank, plan)| {
            let waiters = waiters(plan);
            // A `nop` goes if that makes no more dependencies than it and its own are.
            let is_idle = |at: StepRef, step: &Step| {
                let follows = plan.lanes[at.lane as usize].steps.len() > at.step as usize + 1;
                step.deps.len() <= 1 || waiters.get(&at).copied().unwrap_or(0) + usize::from(follows) <= 1
            };
            let dead = |at: StepRef, step: &Step| match step.action {
                Action::Nop => is_idle(at, step),
                Action::Call(_) => false,
                _ => !live.steps[rank].contains(&at),
            };
            let gone: FxHashSet<StepRef> =
                refs(plan).filter(|&at| dead(at, &plan.lanes[at.lane as usize].steps[at.step as usize])).collect();
            dropped += gone.len();
            without(plan, &gone)
        });
        let plans = plans.collect();
        (dropped > 0).then(|| Marked { plans, chunks: self.chunks.clone() })
    }
}

/// The steps of a plan.
fn refs(plan: &Plan) -> impl Iterator<Item = StepRef> + '_ {
    let lanes = (0u32..).zip(&plan.lanes);
    lanes.flat_map(|(lane, steps)| (0..steps.steps.len() as u32).map(move |step| StepRef { lane, step }))
}

fn numbers(src: &[Span]) -> impl Iterator<Item = usize> + '_ {
    src.iter().flat_map(|span| (span.start..span.start + span.len).map(|number| number as usize))
}

pub(super) fn one_by_one(spans: &[Span]) -> impl Iterator<Item = Span> + '_ {
    let single = |span: &Span| {
        let span = *span;
        (0..span.len).map(move |at| Span { start: span.start + at, like: span.like + at, len: 1, ..span })
    };
    spans.iter().flat_map(single)
}

/// What a step writes.
fn writes(action: &Action) -> &[Span] {
    match action {
        Action::Recv { dst, .. } | Action::RecvReduce { dst, .. } => dst,
        Action::Copy { dst, .. } | Action::Reduce { dst, .. } => dst,
        Action::Send { .. } | Action::Call(_) | Action::Nop => &[],
    }
}

/// How many steps wait for each step that is waited for.
fn waiters(plan: &Plan) -> FxHashMap<StepRef, usize> {
    let mut waiters = FxHashMap::default();
    let deps = plan.lanes.iter().flat_map(|lane| &lane.steps).flat_map(|step| &step.deps);
    deps.for_each(|&dep| *waiters.entry(dep).or_default() += 1);
    waiters
}

/// The steps that matter.
struct Live {
    steps: Vec<FxHashSet<StepRef>>,
}

impl Live {
    fn of(marked: &Marked) -> Live {
        let plans = &marked.plans;
        let of_plan = |plan: &Plan| {
            let mut of_rank: FxHashMap<(Buffer, u32), Vec<StepRef>> = FxHashMap::default();
            for at in refs(plan) {
                for chunk in one_by_one(writes(&plan.lanes[at.lane as usize].steps[at.step as usize].action)) {
                    of_rank.entry((chunk.buffer, chunk.start)).or_default().push(at);
                }
            }
            of_rank
        };
        let writers: Vec<_> = plans.iter().map(of_plan).collect();
        let mut sender: FxHashMap<(u32, StepRef), (u32, StepRef)> = FxHashMap::default();
        for ((from, to, _), (sends, receives)) in Ends::of(plans).streams {
            sender.extend(receives.into_iter().zip(sends).map(|(receive, send)| ((to, receive), (from, send))));
        }
        let mut live = Live { steps: vec![FxHashSet::default(); plans.len()] };
        let mut open: Vec<(u32, StepRef)> = Vec::new();
        for (plan, writers) in plans.iter().zip(&writers) {
            let promised = writers.iter().filter(|((buffer, chunk), _)| is_promised(plan, *buffer, *chunk));
            open.extend(promised.flat_map(|(_, steps)| steps).map(|&step| (plan.rank.0, step)));
        }
        let mut known: FxHashSet<(u32, Buffer, u32)> = FxHashSet::default();
        while let Some((rank, at)) = open.pop() {
            if !live.steps[rank as usize].insert(at) {
                continue;
            }
            let action = &plans[rank as usize].lanes[at.lane as usize].steps[at.step as usize].action;
            open.extend(sender.get(&(rank, at)));
            for span in marked.reads(rank as usize, action) {
                if known.insert((rank, span.buffer, span.start)) {
                    let steps = writers[rank as usize].get(&(span.buffer, span.start)).into_iter().flatten();
                    open.extend(steps.map(|&step| (rank, step)));
                }
            }
        }
        live
    }
}

/// Whether a chunk that is written must be right in the end: all of an output but what a contract does not speak of. The send
/// buffer is written only where it is the output.
fn is_promised(plan: &Plan, buffer: Buffer, chunk: u32) -> bool {
    let promise = plan.shape.contract.as_ref().map(|contract| contract.promise(plan.rank.index(), chunk as usize));
    buffer != Buffer::Scratch && promise != Some(Promise::Anything)
}

/// The plan without these steps: who waited for one waits for what that waited for, and for what stood before it.
fn without(plan: &Plan, gone: &FxHashSet<StepRef>) -> Plan {
    if gone.is_empty() {
        return plan.clone();
    }
    let mut places: Vec<Vec<u32>> = Vec::with_capacity(plan.lanes.len());
    for (lane, steps) in (0u32..).zip(&plan.lanes) {
        let mut next = 0;
        let place = |step: u32| {
            next += u32::from(!gone.contains(&StepRef { lane, step }));
            next
        };
        places.push((0..steps.steps.len() as u32).map(place).collect());
    }
    // One past the new place of the last step that is kept, up to there.
    let kept = |at: StepRef| places[at.lane as usize][at.step as usize];
    let resolve = |mine: u32, deps: &[StepRef]| {
        let (mut open, mut seen, mut found) = (deps.to_vec(), FxHashSet::default(), BTreeMap::<u32, u32>::new());
        while let Some(at) = open.pop() {
            if !seen.insert(at) {
                continue;
            }
            if let Some(last) = kept(at).checked_sub(1).filter(|_| at.lane != mine) {
                let known = found.entry(at.lane).or_insert(last);
                *known = last.max(*known);
            }
            // Steps that are gone between the last one kept and this one have left their own waits.
            let steps = &plan.lanes[at.lane as usize].steps;
            for step in (0..=at.step).rev() {
                let before = StepRef { step, ..at };
                if !gone.contains(&before) || (step < at.step && !seen.insert(before)) {
                    break;
                }
                open.extend(&steps[step as usize].deps);
            }
        }
        found.into_iter().map(|(lane, step)| StepRef { lane, step }).collect::<Vec<StepRef>>()
    };
    let lanes = (0u32..).zip(&plan.lanes).map(|(lane, old)| {
        let (mut steps, mut carried) = (Vec::new(), Vec::new());
        for (step, Step { action, deps }) in (0u32..).zip(&old.steps) {
            carried.extend(deps);
            if !gone.contains(&StepRef { lane, step }) {
                steps.push(Step { action: action.clone(), deps: resolve(lane, &carried) });
                carried.clear();
            }
        }
        Lane { steps }
    });
    Plan { lanes: lanes.collect(), ..plan.clone() }
}

/// Which steps of a rank's lanes join the one before them.
type Joins = FxHashSet<StepRef>;

impl Marked {
    /// With messages that can be one as one; none where no two can.
    pub fn aggregated(&self) -> Option<Marked> {
        let ends = Ends::of(&self.plans);
        let mut joins: Vec<Joins> = vec![Joins::default(); self.plans.len()];
        let joinable: Vec<FxHashSet<StepRef>> = self.plans.iter().map(joinable).collect();
        for ((from, to, _), (sends, receives)) in &ends.streams {
            if sends.len() != receives.len() {
                continue;
            }
            let mut whole: FxHashSet<(Buffer, u32)> = FxHashSet::default();
            for (sent, received) in sends.windows(2).zip(receives.windows(2)) {
                let action =
                    |at: StepRef| &self.plans[*to as usize].lanes[at.lane as usize].steps[at.step as usize].action;
                let touched = |at: StepRef| touched(action(at));
                if whole.is_empty() {
                    whole.extend(touched(received[0]));
                }
                let is_apart = touched(received[1]).iter().all(|chunk| !whole.contains(chunk));
                let both = joinable[*from as usize].contains(&sent[1]) && joinable[*to as usize].contains(&received[1]);
                if both && is_apart && goes_together(action(received[0]), action(received[1])) {
                    joins[*from as usize].insert(sent[1]);
                    joins[*to as usize].insert(received[1]);
                    whole.extend(touched(received[1]));
                } else {
                    whole.clear();
                }
            }
        }
        if joins.iter().all(FxHashSet::is_empty) {
            return None;
        }
        let plans = self.plans.iter().zip(&joins).map(|(plan, joins)| with_joined(plan, joins)).collect();
        Some(Marked { plans, chunks: self.chunks.clone() })
    }
}

/// The sends of a stream, and its receives.
type BothEnds = (Vec<StepRef>, Vec<StepRef>);

/// The sends and receives of each stream, in their order.
struct Ends {
    streams: BTreeMap<(u32, u32, Channel), BothEnds>,
}

impl Ends {
    fn of(plans: &[Plan]) -> Ends {
        let mut streams: BTreeMap<(u32, u32, Channel), BothEnds> = BTreeMap::new();
        for plan in plans {
            for at in refs(plan) {
                match plan.lanes[at.lane as usize].steps[at.step as usize].action {
                    Action::Send { to, channel, .. } => {
                        streams.entry((plan.rank.0, to.0, channel)).or_default().0.push(at);
                    }
                    Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                        streams.entry((from.0, plan.rank.0, channel)).or_default().1.push(at);
                    }
                    _ => {}
                }
            }
        }
        Ends { streams }
    }
}

/// The sends and receives of a plan that may join the step before them in their lane: that one is of the same stream, nobody waits
/// for it alone, and what this one waits for has been waited for.
fn joinable(plan: &Plan) -> FxHashSet<StepRef> {
    let mut awaited: FxHashSet<StepRef> = FxHashSet::default();
    for Step { deps, .. } in plan.lanes.iter().flat_map(|lane| &lane.steps) {
        // Of several dependencies on a lane the last implies the others.
        let is_last = |dep: &&StepRef| !deps.iter().any(|other| other.lane == dep.lane && other.step > dep.step);
        awaited.extend(deps.iter().filter(is_last));
    }
    let stream = |action: &Action| match *action {
        Action::Send { to, channel, .. } => Some((true, to, channel)),
        Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => Some((false, from, channel)),
        _ => None,
    };
    let mut found = FxHashSet::default();
    for (number, lane) in (0u32..).zip(&plan.lanes) {
        let mut waited: FxHashMap<u32, u32> = FxHashMap::default();
        for (at, steps) in (1u32..).zip(lane.steps.windows(2)) {
            for dep in &steps[0].deps {
                let last = waited.entry(dep.lane).or_insert(dep.step);
                *last = dep.step.max(*last);
            }
            let covered = |dep: &StepRef| waited.get(&dep.lane).is_some_and(|&last| last >= dep.step);
            let same = stream(&steps[0].action).is_some_and(|one| stream(&steps[1].action) == Some(one));
            let is_alone = awaited.contains(&StepRef { lane: number, step: at - 1 });
            if same && !is_alone && steps[1].deps.iter().all(covered) {
                found.insert(StepRef { lane: number, step: at });
            }
        }
    }
    found
}

/// The chunks that a receive reads or writes.
fn touched(action: &Action) -> Vec<(Buffer, u32)> {
    let local = if let Action::RecvReduce { local, .. } = action { &local[..] } else { &[] };
    one_by_one(local).chain(one_by_one(writes(action))).map(|chunk| (chunk.buffer, chunk.start)).collect()
}

/// Whether two receives are of one kind.
fn goes_together(one: &Action, next: &Action) -> bool {
    match (one, next) {
        (Action::Recv { .. }, Action::Recv { .. }) => true,
        (
            Action::RecvReduce { order, finish, .. },
            Action::RecvReduce { order: next_order, finish: next_finish, .. },
        ) => (order, finish) == (next_order, next_finish),
        _ => false,
    }
}

/// The plan with these steps joined to those before them.
fn with_joined(plan: &Plan, joins: &Joins) -> Plan {
    let mut places: Vec<Vec<u32>> = Vec::with_capacity(plan.lanes.len());
    for (lane, steps) in (0u32..).zip(&plan.lanes) {
        let mut next = 0;
        let place = |step: u32| {
            next += u32::from(!joins.contains(&StepRef { lane, step }));
            next - 1
        };
        places.push((0..steps.steps.len() as u32).map(place).collect());
    }
    let moved = |at: &StepRef| StepRef { step: places[at.lane as usize][at.step as usize], ..*at };
    let lanes = (0u32..).zip(&plan.lanes).map(|(lane, old)| {
        let mut steps: Vec<Step> = Vec::new();
        for (step, old) in (0u32..).zip(&old.steps) {
            match steps.last_mut().filter(|_| joins.contains(&StepRef { lane, step })) {
                Some(last) => {
                    last.action = super::merge::together(&[last, old]);
                    last.deps.extend(old.deps.iter().map(moved));
                    last.deps.sort_unstable();
                    last.deps.dedup();
                }
                None => steps.push(Step { action: old.action.clone(), deps: old.deps.iter().map(moved).collect() }),
            }
        }
        Lane { steps }
    });
    Plan { lanes: lanes.collect(), ..plan.clone() }
}
