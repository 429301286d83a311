//! Whether plans work, found out by trying: the second opinion that the verifier is tested against.
//!
//! A plain interpreter moves numbers, in several segments with a window, under random schedules and for every number of
//! chunks that a small count can leave; the results are compared with what the collective promises. Races are found by
//! holding steps back: two steps are unordered if each can happen while the other has begun and does not end. All this
//! is slow, meant for small plans, and shares nothing with the verifier but the plan's types.
#![forbid(unsafe_code)]

mod number;
mod races;
mod world;

use crate::plan::{Action, Buffer, Call, Channel, Collective, Plan, Span, Spans, StepRef};
use crate::topo::Rank;
use std::collections::{HashMap, HashSet};

/// A step of all plans: rank, lane, position.
type At = (usize, usize, usize);

/// Whether the plans work at this channel capacity; if not, an example of how they fail.
pub fn try_out(plans: &[Plan], capacity: usize) -> Result<(), String> {
    well_formed(plans)?;
    let per_block = plans[0].chunks_per_block as usize;
    // A count may leave chunks empty, from the last one on: `filled` of each block have elements.
    for filled in (1..=per_block).rev() {
        let sizes = Sizes { per_block, filled };
        races::find_races(plans, sizes)?;
        for seed in 0..4 {
            world::run(plans, sizes, capacity, seed)?;
        }
    }
    Ok(())
}

/// How many elements the chunks have.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    per_block: usize,
    filled: usize,
}

/// The most elements a chunk has.
const FULL: usize = 2;

impl Sizes {
    /// Elements of a chunk: full ones, then a shorter one, then empty ones.
    fn of(self, chunk: usize) -> usize {
        match (chunk % self.per_block) + 1 {
            position if position < self.filled => FULL,
            position if position == self.filled => 1,
            _ => 0,
        }
    }
}

/// One element of a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    /// In the caller's buffers.
    User(usize),
    /// In scratch.
    Scratch(usize),
    /// In coded scratch.
    Coded(usize),
}

/// The elements that a list of spans names.
fn elements(plan: &Plan, spans: &[Span], sizes: Sizes) -> Vec<Place> {
    let mut places = Vec::new();
    for span in spans {
        for i in 0..span.len as usize {
            let chunk = span.start as usize + i;
            for element in 0..sizes.of(span.like as usize + i) {
                places.push(match span.buffer {
                    Buffer::Scratch => Place::Scratch(chunk * FULL + element),
                    // Coded numbers are the numbers here: how often they are coded this does not judge.
                    Buffer::Coded => Place::Coded(chunk * FULL + element),
                    buffer => Place::User((user_start(plan, buffer) + chunk) * FULL + element),
                });
            }
        }
    }
    places
}

/// Where a user buffer begins, in chunks: the two are the same memory when in place.
fn user_start(plan: &Plan, buffer: Buffer) -> usize {
    let (input, output) = (plan.chunks(Buffer::Input), plan.chunks(Buffer::Output));
    let block = plan.rank.index() * plan.chunks_per_block as usize;
    if !plan.shape.in_place || input == 0 || output == 0 {
        return if buffer == Buffer::Input { 0 } else { input };
    }
    match (plan.shape.collective, buffer) {
        (Collective::AllGather | Collective::Gather, Buffer::Input) => block,
        (Collective::ReduceScatter | Collective::Scatter, Buffer::Output) => block,
        _ => 0,
    }
}

/// The lists a step reads, each apart, and the lists it writes.
fn lists(action: &Action) -> (Vec<&Spans>, Vec<&Spans>) {
    match action {
        Action::Send { src, .. } => (vec![src], vec![]),
        Action::Recv { dst, .. } => (vec![], vec![dst]),
        Action::RecvReduce { local, dst, .. } => (vec![local], vec![dst]),
        Action::Copy { src, dst, .. } => (vec![src], vec![dst]),
        Action::Reduce { srcs, dst, .. } => (srcs.iter().collect(), vec![dst]),
        Action::Call(call) => (call.src.iter().collect(), call.dst.iter().collect()),
        Action::Nop => (vec![], vec![]),
    }
}

/// Whether a step has nothing to do, since all its chunks are empty.
fn is_empty(plan: &Plan, action: &Action, sizes: Sizes) -> bool {
    let (reads, writes) = lists(action);
    let vectored = match action {
        Action::Nop => return false,
        Action::Call(call) => {
            matches!(call.collective, Collective::AllToAll | Collective::Gather | Collective::Scatter)
        }
        _ => false,
    };
    !vectored && reads.into_iter().chain(writes).all(|spans| elements(plan, spans, sizes).is_empty())
}

/// All steps with their places.
fn steps(plans: &[Plan]) -> impl Iterator<Item = (At, &crate::plan::Step)> {
    plans.iter().enumerate().flat_map(|(rank, plan)| {
        plan.lanes.iter().enumerate().flat_map(move |(lane, steps)| {
            steps.steps.iter().enumerate().map(move |(position, step)| ((rank, lane, position), step))
        })
    })
}

/// Rules that hold for the form of a plan; what breaks them cannot even be tried.
fn well_formed(plans: &[Plan]) -> Result<(), String> {
    let first = plans.first().ok_or("no plans")?;
    for (rank, plan) in plans.iter().enumerate() {
        // Whether it calls in place is each rank's own affair.
        let shape = crate::plan::Shape { in_place: first.shape.in_place, ..plan.shape.clone() };
        let same = shape == first.shape && plan.chunks_per_block == first.chunks_per_block;
        if !same || plan.rank.index() != rank || plans.len() != plan.shape.nranks() || plan.chunks_per_block == 0 {
            return Err(format!("the plan of rank {rank} does not belong here"));
        }
    }
    let mut users: HashMap<(usize, usize, Channel, bool), usize> = HashMap::new();
    for (at, step) in steps(plans) {
        let plan = &plans[at.0];
        let (reads, writes) = lists(&step.action);
        for (spans, write) in reads.iter().map(|s| (s, false)).chain(writes.iter().map(|s| (s, true))) {
            spans.iter().try_for_each(|span| span_fits(plan, span, write)).map_err(|text| format!("{at:?}: {text}"))?;
        }
        if let Some(dep) = step.deps.iter().find(|dep| plan.step(**dep).is_none()) {
            return Err(format!("{at:?}: there is no step {dep:?}"));
        }
        let key = match &step.action {
            Action::Send { to, channel, .. } => (at.0, to.index(), *channel, true),
            Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                (from.index(), at.0, *channel, false)
            }
            Action::Call(call) => {
                call_fits(call, at.0, plans.len()).map_err(|text| format!("{at:?}: {text}"))?;
                continue;
            }
            _ => continue,
        };
        if key.0 == key.1 || key.0.max(key.1) >= plans.len() || *users.entry(key).or_insert(at.1) != at.1 {
            return Err(format!("{at:?}: not a stream of its own to another rank"));
        }
    }
    Ok(())
}

fn span_fits(plan: &Plan, span: &Span, write: bool) -> Result<(), String> {
    let end = span.start as usize + span.len as usize;
    let per_block = plan.chunks_per_block;
    let user = !span.buffer.is_own();
    if span.len == 0 || end > plan.chunks(span.buffer) || (user && span.start % per_block != span.like % per_block) {
        return Err(format!("{span:?} does not fit its buffer"));
    }
    if write && span.buffer == Buffer::Input {
        let outputs = user_start(plan, Buffer::Output)..;
        let count = plan.chunks(Buffer::Output);
        let mut chunks = (span.start as usize..end).map(|chunk| user_start(plan, Buffer::Input) + chunk);
        if !chunks.all(|chunk| outputs.contains(&chunk) && chunk - outputs.start < count) {
            return Err("the send buffer is written".into());
        }
    }
    Ok(())
}

fn call_fits(call: &Call, rank: usize, nranks: usize) -> Result<(), String> {
    let members: HashSet<Rank> = call.group.iter().copied().collect();
    let me = call.group.iter().position(|member| member.index() == rank).ok_or("not a member")?;
    let root = Rank::from_index(call.root);
    let blocks = (
        call.collective.input_blocks(call.group.len(), Rank::from_index(me), root),
        call.collective.output_blocks(call.group.len(), Rank::from_index(me), root),
    );
    let real = members.len() == call.group.len() && members.iter().all(|member| member.index() < nranks);
    if !real || call.root >= call.group.len() || blocks != (call.src.len(), call.dst.len()) {
        return Err("no call at all".into());
    }
    Ok(())
}

/// The step that a reference of some rank names.
fn named(rank: usize, dep: &StepRef) -> At {
    (rank, dep.lane as usize, dep.step as usize)
}

/// Whether member `from` of a call sends something to member `to`, whose call this is. Parts match in size, so what
/// arrives says what is sent.
fn flows(plan: &Plan, call: &Call, (from, to): (usize, usize), sizes: Sizes) -> bool {
    let block = match call.collective {
        Collective::AllGather | Collective::Gather | Collective::AllToAll => from,
        Collective::Broadcast | Collective::Scatter if from != call.root => return false,
        Collective::Reduce if to != call.root => return false,
        _ => 0,
    };
    call.dst.get(block).is_some_and(|spans| !elements(plan, spans, sizes).is_empty())
}
