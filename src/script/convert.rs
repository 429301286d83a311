//! From plans to a script: any algorithm of the library's as a file for those who read MSCCL's XML.
//!
//! A lane that sends to one rank at most, and receives from one, becomes a thread block. Others become several: one for each
//! message stream, and one for what moves nothing between ranks; what the lane's order said dependencies say. A thread block
//! moves one run of chunks at a time, so a list of spans becomes several steps, and both ends of a message are cut alike.
#![forbid(unsafe_code)]

use super::{Place, RankScript, Script, ScriptBuffer, ScriptStep, ScriptStepKind, ThreadBlock};
use crate::plan::{Action, Buffer, Channel, Plan, Span, Step, StepRef};
use crate::topo::Rank;
use rustc_hash::{FxHashMap, FxHashSet};

/// The script of the plans of all ranks, for calls out of place; their algorithm's name is the script's.
///
/// # Errors
/// Where a plan has calls, a prologue or one buffer, or more channels than a file can say.
pub fn convert(plans: &[Plan]) -> Result<Script, String> {
    let first = plans.first().ok_or("no plans")?;
    let shape = &first.shape;
    if plans.iter().any(|plan| plan.coded.is_some()) {
        return Err("files have no coded chunks".to_string());
    }
    if shape.in_place || shape.prologue {
        return Err("files say what calls out of place and without a prologue do".to_string());
    }
    let cuts = Cuts::new(plans);
    let ranks = plans.iter().map(|plan| Writer::new(plan, &cuts).rank()).collect::<Result<Vec<_>, _>>()?;
    Ok(Script {
        name: first.algorithm.clone(),
        collective: shape.collective,
        chunks: first.chunks_per_block * shape.blocks() as u32,
        protocol: "Simple".to_string(),
        in_place: false,
        serves_out_of_place: true,
        bytes: 0..=u64::MAX,
        contract: shape.contract.clone(),
        ranks,
    })
}

/// A message stream: sender, receiver, channel.
type Stream = (Rank, Rank, Channel);

/// Where the messages of each stream are cut, in chunks from their beginning: where either end's list has a gap. And the
/// channel of each in the file: readers have few, so those between two ranks are numbered from 0.
struct Cuts {
    messages: FxHashMap<Stream, Vec<Vec<u32>>>,
    channels: FxHashMap<Stream, Channel>,
}

impl Cuts {
    fn new(plans: &[Plan]) -> Cuts {
        let mut cuts: FxHashMap<Stream, Vec<Vec<u32>>> = FxHashMap::default();
        for is_sender in [true, false] {
            for plan in plans {
                let mut seen: FxHashMap<Stream, usize> = FxHashMap::default();
                for step in plan.lanes.iter().flat_map(|lane| &lane.steps) {
                    let (stream, lists) = match &step.action {
                        Action::Send { to, channel, src } if is_sender => ((plan.rank, *to, *channel), vec![src]),
                        Action::Recv { from, channel, dst } if !is_sender => ((*from, plan.rank, *channel), vec![dst]),
                        Action::RecvReduce { from, channel, local, dst, .. } if !is_sender => {
                            ((*from, plan.rank, *channel), vec![local, dst])
                        }
                        _ => continue,
                    };
                    let number = seen.entry(stream).or_default();
                    let messages = cuts.entry(stream).or_default();
                    if messages.len() <= *number {
                        messages.resize(*number + 1, Vec::new());
                    }
                    lists.into_iter().for_each(|list| messages[*number].extend(gaps(list)));
                    *number += 1;
                }
            }
        }
        for message in cuts.values_mut().flatten() {
            message.sort_unstable();
            message.dedup();
        }
        let mut streams: Vec<Stream> = cuts.keys().copied().collect();
        streams.sort_unstable();
        let between = streams.chunk_by(|one, other| (one.0, one.1) == (other.0, other.1));
        let channels = between.flat_map(|run| run.iter().copied().zip(0..)).collect();
        Cuts { messages: cuts, channels }
    }
}

/// Where a list goes on elsewhere, counted in chunks, and its end.
fn gaps(list: &[Span]) -> Vec<u32> {
    let mut at = 0;
    let mut gaps = Vec::with_capacity(list.len());
    for (index, span) in list.iter().enumerate() {
        at += span.len;
        let goes_on =
            list.get(index + 1).is_some_and(|next| next.buffer == span.buffer && next.start == span.start + span.len);
        if !goes_on {
            gaps.push(at);
        }
    }
    gaps
}

/// The chunk that lies so far into a list.
fn place(list: &[Span], mut at: u32) -> Place {
    for span in list {
        if at < span.len {
            let buffer = match span.buffer {
                Buffer::Input => ScriptBuffer::Input,
                Buffer::Output => ScriptBuffer::Output,
                Buffer::Scratch | Buffer::Coded => ScriptBuffer::Scratch,
            };
            return Place { buffer, chunk: span.start + at };
        }
        at -= span.len;
    }
    Place { buffer: ScriptBuffer::Scratch, chunk: 0 }
}

/// A step of the script: its thread block and number.
type At = (u32, u32);

/// Which thread block a step of a lane goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Home {
    /// All of a lane.
    Lane(u32),
    /// What a lane sends to a rank on a channel.
    To(u32, Rank, Channel),
    /// What a lane receives so.
    From(u32, Rank, Channel),
}

/// Writes the thread blocks of one rank.
struct Writer<'a> {
    plan: &'a Plan,
    cuts: &'a Cuts,
    blocks: Vec<ThreadBlock>,
    homes: FxHashMap<Home, u32>,
    /// For each step of the plan the last of the script's that came of it.
    ends: FxHashMap<StepRef, At>,
    sent: FxHashMap<Stream, usize>,
    received: FxHashMap<Stream, usize>,
}

impl<'a> Writer<'a> {
    fn new(plan: &'a Plan, cuts: &'a Cuts) -> Writer<'a> {
        let (homes, ends) = (FxHashMap::default(), FxHashMap::default());
        let (sent, received) = (FxHashMap::default(), FxHashMap::default());
        Writer { plan, cuts, blocks: Vec::new(), homes, ends, sent, received }
    }

    fn rank(mut self) -> Result<RankScript, String> {
        let order = self.order();
        for (lane, steps) in (0u32..).zip(&self.plan.lanes) {
            let homes: Vec<Home> = steps.steps.iter().map(|step| home(lane, &step.action)).collect();
            let streams: FxHashSet<Home> =
                homes.iter().copied().filter(|home| !matches!(home, Home::Lane(_))).collect();
            let sends = streams.iter().filter(|home| matches!(home, Home::To(..))).count();
            let channels: FxHashSet<Channel> = streams.iter().filter_map(|home| self.channel(*home)).collect();
            // A thread block has one channel for both ways.
            let whole = sends <= 1 && streams.len() - sends <= 1 && channels.len() <= 1;
            if whole {
                let block = self.block(Home::Lane(lane));
                for home in homes {
                    self.name_peer(block, home);
                    self.homes.insert(home, block);
                }
            } else {
                for home in &homes {
                    let block = self.block(*home);
                    self.name_peer(block, *home);
                }
            }
        }
        // The steps of all lanes, each after those it waits for: files name steps, which have to be there.
        for at in order {
            self.step(at)?;
        }
        Ok(RankScript { scratch: self.plan.scratch_chunks, blocks: self.blocks })
    }

    /// The channel of what goes there.
    fn channel(&self, home: Home) -> Option<Channel> {
        let me = self.plan.rank;
        let stream = match home {
            Home::Lane(_) => return None,
            Home::To(_, peer, channel) => (me, peer, channel),
            Home::From(_, peer, channel) => (peer, me, channel),
        };
        self.cuts.channels.get(&stream).copied()
    }

    fn block(&mut self, home: Home) -> u32 {
        *self.homes.entry(home).or_insert_with(|| {
            self.blocks.push(ThreadBlock::default());
            self.blocks.len() as u32 - 1
        })
    }

    fn name_peer(&mut self, block: u32, home: Home) {
        let channel = self.channel(home);
        let block = &mut self.blocks[block as usize];
        block.channel = channel.unwrap_or(block.channel);
        match home {
            Home::Lane(_) => {}
            Home::To(_, peer, _) => block.to = Some(peer.0),
            Home::From(_, peer, _) => block.from = Some(peer.0),
        }
    }

    /// The steps in an order that lanes and dependencies agree with.
    fn order(&self) -> Vec<StepRef> {
        let mut next: Vec<u32> = vec![0; self.plan.lanes.len()];
        let mut order = Vec::with_capacity(self.plan.nsteps());
        loop {
            let before = order.len();
            for lane in 0..next.len() {
                while let Some(step) = self.plan.lanes[lane].steps.get(next[lane] as usize) {
                    if step.deps.iter().any(|dep| next.get(dep.lane as usize).is_some_and(|&done| done <= dep.step)) {
                        break;
                    }
                    order.push(StepRef { lane: lane as u32, step: next[lane] });
                    next[lane] += 1;
                }
            }
            if order.len() == before {
                return order;
            }
        }
    }

    fn step(&mut self, at: StepRef) -> Result<(), String> {
        let step = &self.plan.lanes[at.lane as usize].steps[at.step as usize];
        let block = self.homes[&home(at.lane, &step.action)];
        // What came before in the lane has ended. Sends have begun: what they waited for has.
        let mut deps: Vec<At> = step.deps.iter().filter_map(|dep| self.ends.get(dep)).copied().collect();
        for before in (0..at.step).rev() {
            let before = StepRef { lane: at.lane, step: before };
            match self.plan.step(before) {
                Some(Step { action: Action::Send { .. }, deps: waited }) => {
                    deps.extend(waited.iter().filter_map(|dep| self.ends.get(dep)));
                }
                _ => {
                    deps.extend(self.ends.get(&before));
                    break;
                }
            }
        }
        deps.sort_unstable();
        deps.dedup();
        deps.retain(|dep| dep.0 != block);
        let end = self.steps(block, &step.action, deps)?;
        self.ends.insert(at, end);
        Ok(())
    }

    /// Writes what an action does, and gives the step that ends it.
    fn steps(&mut self, block: u32, action: &Action, mut deps: Vec<At>) -> Result<At, String> {
        let mut parts: Vec<(ScriptStepKind, Place, Place, u32)> = Vec::new();
        let nowhere = Place { buffer: ScriptBuffer::Scratch, chunk: 0 };
        let me = self.plan.rank;
        match action {
            Action::Send { to, channel, src } => {
                for (at, len) in self.cut((me, *to, *channel), true) {
                    parts.push((ScriptStepKind::Send, place(src, at), nowhere, len));
                }
            }
            Action::Recv { from, channel, dst } => {
                for (at, len) in self.cut((*from, me, *channel), false) {
                    parts.push((ScriptStepKind::Recv, nowhere, place(dst, at), len));
                }
            }
            Action::RecvReduce { from, channel, local, dst, .. } => {
                for (at, len) in self.cut((*from, me, *channel), false) {
                    parts.push((ScriptStepKind::RecvReduceCopy, place(local, at), place(dst, at), len));
                }
            }
            Action::Copy { src, dst, .. } => {
                for (at, len) in runs(&[src, dst]) {
                    parts.push((ScriptStepKind::Copy, place(src, at), place(dst, at), len));
                }
            }
            Action::Reduce { srcs, dst, .. } => {
                let lists: Vec<&Vec<Span>> = srcs.iter().chain([dst]).collect();
                for (at, len) in runs(&lists) {
                    let to = place(dst, at);
                    let mut from: Vec<Place> = srcs.iter().map(|src| place(src, at)).collect();
                    match from.iter().position(|src| *src == to) {
                        Some(own) => drop(from.remove(own)),
                        None => parts.push((ScriptStepKind::Copy, from.remove(0), to, len)),
                    }
                    parts.extend(from.into_iter().map(|src| (ScriptStepKind::Reduce, src, to, len)));
                }
            }
            Action::Nop => {}
            Action::Call(_) => return Err("a file has messages alone, and this plan has calls, of a board in shared memory or of another provider".to_string()),
        }
        if parts.is_empty() {
            parts.push((ScriptStepKind::Nop, nowhere, nowhere, 0));
        }
        let last = deps.pop();
        for dep in deps {
            self.push(block, (ScriptStepKind::Nop, nowhere, nowhere, 0), Some(dep));
        }
        for (index, part) in parts.into_iter().enumerate() {
            self.push(block, part, last.filter(|_| index == 0));
        }
        Ok((block, self.blocks[block as usize].steps.len() as u32 - 1))
    }

    fn push(&mut self, block: u32, part: (ScriptStepKind, Place, Place, u32), dep: Option<At>) {
        let (kind, src, dst, count) = part;
        self.blocks[block as usize].steps.push(ScriptStep { kind, src, dst, count, dep, line: 0 });
    }

    /// The pieces of a stream's next message: where each begins, and how long it is.
    fn cut(&mut self, stream: Stream, sends: bool) -> Vec<(u32, u32)> {
        let counts = if sends { &mut self.sent } else { &mut self.received };
        let number = counts.entry(stream).or_default();
        *number += 1;
        pieces(
            self.cuts.messages.get(&stream).and_then(|messages| messages.get(*number - 1)).map_or(&[], Vec::as_slice),
        )
    }
}

fn home(lane: u32, action: &Action) -> Home {
    match action {
        Action::Send { to, channel, .. } => Home::To(lane, *to, *channel),
        Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
            Home::From(lane, *from, *channel)
        }
        _ => Home::Lane(lane),
    }
}

/// The runs in which all lists are contiguous.
fn runs(lists: &[&Vec<Span>]) -> Vec<(u32, u32)> {
    let mut ends: Vec<u32> = lists.iter().flat_map(|list| gaps(list)).collect();
    ends.sort_unstable();
    ends.dedup();
    pieces(&ends)
}

fn pieces(ends: &[u32]) -> Vec<(u32, u32)> {
    let mut begin = 0;
    let piece = |&end: &u32| (std::mem::replace(&mut begin, end), end);
    ends.iter().map(piece).map(|(begin, end)| (begin, end - begin)).collect()
}
