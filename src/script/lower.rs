//! From a script to the plans of all ranks.
//!
//! The script is run once on symbols, all ranks together, each thread block as far as it gets, and each operation leaves its
//! steps in the plan's lane of its thread block. The run knows what each chunk holds, and so where it has to lie:
//!
//! - What a rank has not written yet is read where the caller has it. So a script written for calls in place serves others
//!   without a copy; a chunk of the output that is never written is copied at the end.
//! - What belongs to the output goes there; all else goes to scratch, also what the script writes into the send buffer, and a
//!   chunk that is put where one of another size belongs.
//! - Where the shape has a prologue, or a script written for two buffers runs in place, input is copied first, in a lane of
//!   its own.
//! - Of a fold and of a receive that reduces, the operand that holds the lowest rank comes first, so that all ranks reduce alike.
//! - A value that holds all ranks is final with the step that makes it.
//!
//! The run judges nothing but whether it comes to an end: what else is wrong with a script (it races, computes something else)
//! is as wrong with its plans, and the verifier says so.
#![forbid(unsafe_code)]

mod emit;
mod places;
mod reduce;

use super::ops::{self, BlockOps, Chunks, OpKind};
use super::{Script, StepSite, ThreadBlock};
use crate::plan::rank_sets::RankSets;
use crate::plan::{Action, Channel, Plan, Shape, StepRef};
use crate::topo::{Grid, Rank};
use crate::verify::Rejection;
use emit::{Emitter, Notes};
pub(super) use places::joined;
use places::{Held, Misplaced, Places, Value};
use reduce::Reducer;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::sync::Arc;

/// What a call wants of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScriptForm {
    /// Its buffers overlap as NCCL's in-place convention says.
    pub in_place: bool,
    /// Input passes a prologue.
    pub prologue: bool,
    /// The root, for collectives that have one (else rank 0).
    pub root: Rank,
}

/// How messages leave.
#[derive(Debug, Clone, Copy)]
pub enum Sending<'a> {
    /// As in MSCCL: a send copies, and its source may be written at once. What the script means.
    Buffered,
    /// From where the data lies, but for the sends of these ranks and steps of the plans, which are copied first.
    Direct {
        /// Rank and place, in the plans made with no such exception.
        copied: &'a FxHashSet<(u32, StepRef)>,
    },
    /// From where the data lies, and in place a script for two buffers reads its input there, too.
    InOneBuffer,
}

/// The plans that a script comes to.
#[derive(Debug, Clone)]
pub struct Lowered {
    /// By rank.
    pub plans: Vec<Plan>,
    /// Where the script stops for ever, if it does; the plans end there.
    pub stuck: Option<(StepSite, String)>,
    /// The step that has put a chunk of another size where a chunk of the output belongs, if one has; the plans leave it out.
    pub misplaced: Option<(StepSite, String)>,
    /// For each rank, lane and step of the plans the step of the script.
    sites: Vec<Vec<Vec<u32>>>,
    /// For each rank what is wrong with steps of the script, by thread block and number, where the plans cannot say it.
    notes: Vec<Notes>,
}

impl Lowered {
    /// Plans of which nobody asks any more where they come from.
    pub(super) fn of_plans(plans: Vec<Plan>) -> Lowered {
        Lowered { plans, stuck: None, misplaced: None, sites: Vec::new(), notes: Vec::new() }
    }

    /// Which step of the script a step of the plans comes from; none where it is Strata's own.
    pub fn site(&self, script: &Script, rank: Rank, at: StepRef) -> Option<StepSite> {
        let step = *self.sites.get(rank.index())?.get(at.lane as usize)?.get(at.step as usize)?;
        let block = script.ranks.get(rank.index())?.blocks.get(at.lane as usize)?;
        let line = block.steps.get(step as usize)?.line;
        Some(StepSite { rank: rank.0, block: at.lane, step, line })
    }

    /// Whether what is refused is a step of the script's, and not one of Strata's own.
    pub(super) fn is_of_script(&self, Rejection { rank, lane, .. }: &Rejection) -> bool {
        lane.is_some_and(|lane| self.sites.get(rank.index()).is_some_and(|sites| sites.len() > lane as usize))
    }

    /// What is wrong with a step of the script, in its own words.
    pub fn note(&self, site: &StepSite) -> Option<&str> {
        self.notes.get(site.rank as usize)?.get(&(site.block, site.step)).map(String::as_str)
    }
}

/// The plans of all ranks of a script, for calls of one form on a grid of its ranks.
pub fn lower(script: &Script, grid: &Arc<Grid>, form: ScriptForm, sending: Sending<'_>) -> Lowered {
    let ScriptForm { in_place, prologue, root } = form;
    let contract = script.contract.clone();
    let shape = Shape { root, in_place, prologue, contract, ..Shape::new(script.collective, grid.clone()) };
    let mut run = Run::new(script, &shape, sending);
    run.run();
    run.into_plans(&shape)
}

/// A message stream of the script.
type Stream = (u32, u32, u16);

/// Where a thread block is.
#[derive(Debug, Default, Clone)]
struct BlockState {
    next: usize,
    /// For each operation that has ended the steps of the plan that say so.
    ended: Vec<Vec<StepRef>>,
    queued: bool,
}

struct Run<'a> {
    script: &'a Script,
    sending: Sending<'a>,
    ops: Vec<Vec<BlockOps>>,
    blocks: Vec<Vec<BlockState>>,
    places: Vec<Places>,
    emitters: Vec<Emitter>,
    sets: RankSets,
    streams: FxHashMap<Stream, VecDeque<Vec<Value>>>,
    /// The channel of each stream: streams between the same ranks are numbered from 0.
    channels: FxHashMap<Stream, Channel>,
    /// Who receives from a stream.
    receivers: FxHashMap<Stream, (u32, u32)>,
    /// Who waits for an operation: rank, thread block and number.
    waiting: FxHashMap<(u32, u32, u32), Vec<u32>>,
    ready: Vec<(u32, u32)>,
    misplaced: Option<(StepSite, String)>,
}

impl<'a> Run<'a> {
    fn new(script: &'a Script, shape: &Shape, sending: Sending<'a>) -> Run<'a> {
        let nranks = script.nranks();
        let mut sets = RankSets::new(nranks);
        let singles: Vec<u32> = (0..nranks).map(|rank| sets.single(rank)).collect();
        let reads_there = matches!(sending, Sending::InOneBuffer);
        let mut emitters: Vec<Emitter> = script.ranks.iter().map(|rank| Emitter::new(rank.blocks.len())).collect();
        let mut run = Run {
            script,
            sending,
            ops: script.ranks.iter().map(ops::of_rank).collect(),
            blocks: script.ranks.iter().map(|rank| vec![BlockState::default(); rank.blocks.len()]).collect(),
            places: (0..nranks)
                .map(|rank| Places::new(script, (shape, reads_there), rank, singles[rank], &mut emitters[rank]))
                .collect(),
            emitters,
            sets,
            streams: FxHashMap::default(),
            channels: channels(script),
            receivers: FxHashMap::default(),
            waiting: FxHashMap::default(),
            ready: Vec::new(),
            misplaced: None,
        };
        for (rank, of_rank) in (0u32..).zip(&script.ranks) {
            for (block, of_block) in (0u32..).zip(&of_rank.blocks) {
                if let Some(from) = of_block.from {
                    run.receivers.insert((from, rank, of_block.channel), (rank, block));
                }
                run.wake(rank, block);
            }
        }
        run
    }

    fn wake(&mut self, rank: u32, block: u32) {
        let state = &mut self.blocks[rank as usize][block as usize];
        if !std::mem::replace(&mut state.queued, true) {
            self.ready.push((rank, block));
        }
    }

    /// Runs everything as far as it gets.
    fn run(&mut self) {
        while let Some((rank, block)) = self.ready.pop() {
            self.blocks[rank as usize][block as usize].queued = false;
            while self.advance(rank, block) {}
        }
        for (rank, (places, emitter)) in (0u32..).zip(self.places.iter_mut().zip(&mut self.emitters)) {
            let misplaced = places.complete_output(emitter, &self.sets, self.script.nranks());
            let site = |((block, step), text): Misplaced| (StepSite { rank, block, step, line: 0 }, text);
            self.misplaced = self.misplaced.take().or_else(|| misplaced.map(site));
        }
        if let Some((StepSite { rank, block, step, line }, _)) = &mut self.misplaced {
            *line = self.script.ranks[*rank as usize].blocks[*block as usize].steps[*step as usize].line;
        }
    }

    /// Where the script has stopped for ever, if it has: a step that waits for itself, or for what never comes.
    fn stuck(&self) -> Option<(StepSite, String)> {
        let is_stuck = |rank: u32, block: u32| {
            let (ops, state) = (&self.ops[rank as usize][block as usize], &self.blocks[rank as usize][block as usize]);
            state.next < ops.ops.len()
        };
        let all =
            (0u32..).zip(&self.blocks).flat_map(|(rank, blocks)| (0..blocks.len() as u32).map(move |at| (rank, at)));
        let mut at = all.into_iter().find(|&(rank, block)| is_stuck(rank, block))?;
        let mut seen = FxHashSet::default();
        loop {
            let (rank, block) = at;
            let of_rank = &self.ops[rank as usize];
            let op = &of_rank[block as usize].ops[self.blocks[rank as usize][block as usize].next];
            let line = self.script.ranks[rank as usize].blocks[block as usize].steps[op.step as usize].line;
            let site = StepSite { rank, block, step: op.step, line };
            let ended = |&&(tb, step): &&(u32, u32)| {
                self.blocks[rank as usize][tb as usize].next <= of_rank[tb as usize].op_of_step[step as usize] as usize
            };
            let (text, next) = match op.deps.iter().find(ended) {
                Some(&(tb, step)) => (format!("waits for ever for step {step} of thread block {tb}"), Some((rank, tb))),
                None => {
                    let of_block = &self.script.ranks[rank as usize].blocks[block as usize];
                    let from = of_block.from.unwrap_or_default();
                    let senders = &self.script.ranks[from as usize].blocks;
                    let sends = |sender: &ThreadBlock| sender.to == Some(rank) && sender.channel == of_block.channel;
                    let sender = senders.iter().position(sends).map(|sender| (from, sender as u32));
                    let text = format!("waits for ever for a message on channel {} from rank {from}", of_block.channel);
                    (text, sender.filter(|&(rank, block)| is_stuck(rank, block)))
                }
            };
            match next.filter(|_| seen.insert(at)) {
                Some(next) => at = next,
                None => return Some((site, text)),
            }
        }
    }

    /// Carries out the next operation of a thread block, if it can be.
    fn advance(&mut self, rank: u32, block: u32) -> bool {
        let at = self.blocks[rank as usize][block as usize].next;
        let Some(op) = self.ops[rank as usize][block as usize].ops.get(at) else { return false };
        for &(tb, step) in &op.deps {
            let wanted = self.ops[rank as usize][tb as usize].op_of_step[step as usize];
            if self.blocks[rank as usize][tb as usize].next <= wanted as usize {
                self.waiting.entry((rank, tb, wanted)).or_default().push(block);
                return false;
            }
        }
        let message = match op.kind {
            OpKind::Recv { .. } | OpKind::RecvReduce { .. } => {
                let of_block = &self.script.ranks[rank as usize].blocks[block as usize];
                let stream = (of_block.from.unwrap_or_default(), rank, of_block.channel);
                match self.streams.get_mut(&stream).and_then(VecDeque::pop_front) {
                    Some(message) => message,
                    None => return false,
                }
            }
            _ => Vec::new(),
        };
        self.carry_out(rank, block, at, message);
        self.blocks[rank as usize][block as usize].next += 1;
        for waiter in self.waiting.remove(&(rank, block, at as u32)).unwrap_or_default() {
            self.wake(rank, waiter);
        }
        true
    }

    fn carry_out(&mut self, rank: u32, block: u32, at: usize, message: Vec<Value>) {
        let op = self.ops[rank as usize][block as usize].ops[at].clone();
        let mut deps = self.deps_of(rank, block, &op.deps);
        let me = rank as usize;
        (self.emitters[me].block, self.emitters[me].script_step) = (block, op.step);
        self.places[me].at = (block, op.step);
        let (places, emitter) = (&mut self.places[me], &mut self.emitters[me]);
        let of_block = &self.script.ranks[me].blocks[block as usize];
        let from = Rank(of_block.from.unwrap_or_default());
        let channel = self.channels.get(&(from.0, rank, of_block.channel)).copied().unwrap_or_default();
        let mut sent = None;
        let ended = match op.kind {
            OpKind::Send { src } => {
                let held = places.read(src, emitter, &mut deps);
                let before = at.checked_sub(1).map(|at| &self.blocks[me][block as usize].ended[at]);
                let mut ended: Vec<StepRef> = before.into_iter().flatten().chain(&deps).copied().collect();
                ended.sort_unstable();
                ended.dedup();
                if ended.len() > MOST_ENDED {
                    ended = vec![emitter.emit(block, Action::Nop, ended)];
                    deps = Vec::new();
                }
                sent = Some((held, deps));
                ended
            }
            OpKind::Recv { dst, forward } => {
                let values = padded(message, dst.count);
                let spans = places.write(dst, &values, &mut deps);
                let action = Action::Recv { from, channel, dst: joined(spans.iter().copied()) };
                sent = forward.then(|| (spans.into_iter().zip(values).collect(), Vec::new()));
                vec![emitter.emit(block, action, deps)]
            }
            OpKind::RecvReduce { src, dst, forward } => {
                let mut reducer = Reducer { places, emitter, sets: &mut self.sets, block, script: self.script };
                let (held, end) = reducer.receive((from, channel), &padded(message, src.count), (src, dst), deps);
                sent = forward.then_some((held, Vec::new()));
                vec![end]
            }
            OpKind::Copy { src, dst } => {
                let mut reducer = Reducer { places, emitter, sets: &mut self.sets, block, script: self.script };
                vec![reducer.copy(src, dst, deps)]
            }
            OpKind::Fold { dst, srcs } => {
                let mut reducer = Reducer { places, emitter, sets: &mut self.sets, block, script: self.script };
                vec![reducer.fold(dst, &srcs, deps)]
            }
            OpKind::Nop => vec![emitter.emit(block, Action::Nop, deps)],
        };
        let copied = sent.and_then(|(held, deps)| {
            let to = of_block.to.unwrap_or_default();
            self.send(rank, block, (to, of_block.channel), held, deps)
        });
        // What has been copied may be written again.
        self.blocks[me][block as usize].ended.push(copied.map_or(ended, |copy| vec![copy]));
    }

    /// The steps of the plan that stand for the ends of steps of the script.
    fn deps_of(&self, rank: u32, block: u32, deps: &[(u32, u32)]) -> Vec<StepRef> {
        let mut steps: Vec<StepRef> = Vec::new();
        for &(tb, step) in deps.iter().filter(|(tb, _)| *tb != block) {
            let op = self.ops[rank as usize][tb as usize].op_of_step[step as usize] as usize;
            steps.extend(self.blocks[rank as usize][tb as usize].ended.get(op).into_iter().flatten());
        }
        steps.sort_unstable();
        steps.dedup();
        steps.retain(|step| step.lane != block);
        steps
    }

    /// Sends chunks; the step that copies them first, if one does.
    fn send(
        &mut self,
        rank: u32,
        block: u32,
        (to, of_script): (u32, u16),
        held: Vec<Held>,
        deps: Vec<StepRef>,
    ) -> Option<StepRef> {
        let emitter = &mut self.emitters[rank as usize];
        let copied = match self.sending {
            Sending::Buffered => true,
            Sending::InOneBuffer => false,
            Sending::Direct { copied } => copied.contains(&(rank, emitter.place_without_copies(block))),
        };
        let values: Vec<Value> = held.iter().map(|held| held.1).collect();
        let src = joined(held.iter().map(|held| held.0));
        let (step, src, deps) = if copied {
            let copy = joined(self.places[rank as usize].fresh(&values));
            let action = Action::Copy { src, dst: copy.clone(), start: false, finish: false };
            (Some(emitter.emit_copy(block, action, deps)), copy, Vec::new())
        } else {
            (None, src, deps)
        };
        let stream = (rank, to, of_script);
        let channel = self.channels.get(&stream).copied().unwrap_or_default();
        emitter.emit(block, Action::Send { to: Rank(to), channel, src }, deps);
        self.streams.entry(stream).or_default().push_back(values);
        if let Some(&(rank, block)) = self.receivers.get(&stream) {
            self.wake(rank, block);
        }
        step
    }

    fn into_plans(mut self, shape: &Shape) -> Lowered {
        let mut lowered = Lowered {
            stuck: self.stuck(),
            misplaced: self.misplaced.take(),
            plans: Vec::new(),
            sites: Vec::new(),
            notes: Vec::new(),
        };
        for (rank, (places, emitter)) in self.places.into_iter().zip(self.emitters).enumerate() {
            let (lanes, sites, notes) = emitter.finish();
            lowered.sites.push(sites);
            lowered.notes.push(notes);
            lowered.plans.push(Plan {
                shape: shape.clone(),
                rank: Rank::from_index(rank),
                algorithm: self.script.name.clone(),
                chunks_per_block: self.script.chunks_per_block(),
                scratch_chunks: places.next_slot,
                coded: None,
                lanes,
            });
        }
        lowered
    }
}

/// The channels of a script's streams. Files number channels for all ranks together; fewer serve between two.
fn channels(script: &Script) -> FxHashMap<Stream, Channel> {
    let mut streams: Vec<Stream> = Vec::new();
    for (rank, of_rank) in (0u32..).zip(&script.ranks) {
        for block in &of_rank.blocks {
            streams.extend(block.to.map(|to| (rank, to, block.channel)));
            streams.extend(block.from.map(|from| (from, rank, block.channel)));
        }
    }
    streams.sort_unstable();
    streams.dedup();
    let between = streams.chunk_by(|one, other| (one.0, one.1) == (other.0, other.1));
    between.flat_map(|run| run.iter().copied().zip(0..)).collect()
}

/// Channels between those two of a script's ranks that have most, one way.
pub(super) fn most_channels(script: &Script) -> Channel {
    channels(script).values().max().map_or(0, |last| last.saturating_add(1))
}

/// Ends of an operation that are carried on by themselves; more become one step.
const MOST_ENDED: usize = 3;

/// A message as long as its receiver expects it; the verifier says where it is not.
fn padded(mut message: Vec<Value>, count: u32) -> Vec<Value> {
    message.resize(count as usize, Value::NONE);
    message
}
