//! Replaces the `Call`s of a plan by the steps of other plans.
//!
//! A call becomes two `Nop`s in its lane: one that begins it, which the inner plan's steps wait for, and one that ends
//! it, which waits for them. The inner lanes become lanes of their own, so calls of different lanes still overlap, and
//! successive calls of one lane share them.
//!
//! Channels are allotted by the position of a call (lane, number in the lane), so members of a group must have it at the
//! same position: builders put the same phase into the same lane on all ranks, empty where a rank has no part in it.
#![forbid(unsafe_code)]

use super::{
    chunks_in, Action, Buffer, Call, Channel, CodedScratch, Collective, Lane, LinkLevel, Plan, Shape, Span, Spans,
    Step, StepRef,
};
use crate::topo::{Grid, Rank};
use std::ops::Range;
use std::sync::Arc;

/// Calls that one lane may have.
pub const CALLS: usize = 8;

/// Writes the plan of one member of a call.
pub type Inner<'a> = &'a dyn Fn(&Call, &Shape, Rank) -> Plan;

/// The plan without calls but those that `keep` names: `inner` writes the plan that replaces each, which has so many channels
/// at most.
pub fn inline_but(plan: Plan, channels: Channel, keep: &dyn Fn(&Call) -> bool, inner: Inner<'_>) -> Plan {
    let goes = |step: &Step| matches!(&step.action, Action::Call(call) if !keep(call));
    if !plan.lanes.iter().any(|lane| lane.steps.iter().any(goes)) {
        return plan;
    }
    let positions: Vec<Vec<u32>> = plan.lanes.iter().map(|lane| positions_after(lane, &goes)).collect();
    let lanes = plan.lanes.len();
    let mut out = Plan { lanes: vec![Lane::default(); lanes], ..plan };
    for (index, lane) in plan.lanes.into_iter().enumerate() {
        let mut derived = Vec::new();
        let mut calls = 0;
        for Step { action, deps } in lane.steps {
            let deps = deps
                .iter()
                .map(|dep| StepRef { step: positions[dep.lane as usize][dep.step as usize], ..*dep })
                .collect();
            match action {
                Action::Call(call) if !keep(&call) => {
                    assert!(calls < CALLS, "a lane of at most {CALLS} calls");
                    let first = (index * CALLS + calls) as Channel * channels;
                    replace(&mut out, index, &mut derived, &call, deps, first..first.saturating_add(channels), inner);
                    calls += 1;
                }
                action => out.lanes[index].steps.push(Step { action, deps }),
            }
        }
    }
    out
}

/// Where each step of a lane ends up: a call takes two places, and its end is what others wait for.
fn positions_after(lane: &Lane, goes: &dyn Fn(&Step) -> bool) -> Vec<u32> {
    let mut at = 0;
    let place = |step: &Step| {
        at += if goes(step) { 2 } else { 1 };
        at - 1
    };
    lane.steps.iter().map(place).collect()
}

fn replace(
    out: &mut Plan,
    lane: usize,
    derived: &mut Vec<usize>,
    call: &Call,
    deps: Vec<StepRef>,
    channels: Range<Channel>,
    inner: Inner<'_>,
) {
    let me = call.group.iter().position(|&member| member == out.rank).expect("a call's rank is a member");
    let shape = Shape {
        root: Rank::from_index(call.root),
        in_place: is_in_place(call, me),
        ..Shape::new(call.collective, Arc::new(part(&out.shape.grid, call)))
    };
    let plan = inner(call, &shape, Rank::from_index(me));
    let begin = out.lanes[lane].steps.len() as u32;
    out.lanes[lane].steps.push(Step { action: Action::Nop, deps });
    let begin = StepRef { lane: lane as u32, step: begin };
    while derived.len() < plan.lanes.len() {
        out.lanes.push(Lane::default());
        derived.push(out.lanes.len() - 1);
    }
    let mapping = Mapping::new(call, &plan, out);
    out.scratch_chunks += mapping.slots(plan.scratch_chunks as usize) as u32;
    if let Some(coded) = plan.coded {
        let all = out.coded.get_or_insert(CodedScratch { chunks: 0, ..coded });
        assert_eq!(all.code, coded.code, "a plan has one code");
        all.chunks += mapping.slots(coded.chunks as usize) as u32;
    }
    let offsets: Vec<u32> = derived.iter().map(|&lane| out.lanes[lane].steps.len() as u32).collect();
    let moved =
        |at: &StepRef| StepRef { lane: derived[at.lane as usize] as u32, step: offsets[at.lane as usize] + at.step };
    let mut ends = vec![begin];
    for (inner_lane, steps) in plan.lanes.iter().enumerate() {
        let last = steps.steps.len().wrapping_sub(1);
        for (index, step) in steps.steps.iter().enumerate() {
            let mut deps: Vec<StepRef> = step.deps.iter().map(moved).collect();
            if index == 0 {
                deps.push(begin);
            }
            let action = mapping.action(&step.action, call, &channels);
            if index == last || matches!(action, Action::Send { .. }) {
                ends.push(moved(&StepRef { lane: inner_lane as u32, step: index as u32 }));
            }
            out.lanes[derived[inner_lane]].steps.push(Step { action, deps });
        }
    }
    ends.remove(0);
    out.lanes[lane].steps.push(Step { action: Action::Nop, deps: ends });
}

/// The grid of a call's members, with their node's links where they are all of it.
fn part(grid: &Grid, call: &Call) -> Grid {
    let part = Grid::flat(call.group.len());
    match grid.links() {
        Some(links) if call.level == LinkLevel::Node && grid.members(grid.node(call.group[0])) == call.group => {
            part.with_links(links)
        }
        _ => part,
    }
}

/// Whether a member's part of the call's smaller side lies exactly in its place on the larger side.
fn is_in_place(call: &Call, me: usize) -> bool {
    match call.collective {
        Collective::AllReduce => call.src[0] == call.dst[0],
        Collective::AllGather => call.src[0] == call.dst[me],
        Collective::ReduceScatter => call.dst[0] == call.src[me],
        Collective::Broadcast | Collective::Reduce if me == call.root => call.src[0] == call.dst[0],
        Collective::Gather if me == call.root => call.src[0] == call.dst[me],
        Collective::Scatter if me == call.root => call.dst[0] == call.src[me],
        _ => false,
    }
}

/// From the chunks of an inner plan to those of the plan around it.
struct Mapping {
    per_block: usize,
    input: Vec<Vec<Span>>,
    output: Vec<Vec<Span>>,
    /// The call's row of blocks, as far as this member knows it, for the sizes of scratch slots: in chunks of the outer row.
    row: Vec<Vec<Span>>,
    first_slot: usize,
    first_coded: usize,
    widest: usize,
}

impl Mapping {
    fn new(call: &Call, plan: &Plan, out: &Plan) -> Mapping {
        let per_block = plan.chunks_per_block as usize;
        let single = |blocks: &[Spans]| -> Vec<Vec<Span>> { blocks.iter().map(|block| one_by_one(block)).collect() };
        let (input, output) = (single(&call.src), single(&call.dst));
        let full = if call.src.len() > call.dst.len() { &call.src } else { &call.dst };
        let in_row = |block: &Spans| one_by_one(&out.in_row(block).collect::<Spans>());
        let row: Vec<Vec<Span>> = match call.collective {
            Collective::AllToAll => {
                let (me, p) = (plan.rank.index(), call.group.len());
                let pair = |at: usize| if at % p == me { &call.dst[at / p] } else { &call.src[at % p] };
                (0..p * p).map(|at| in_row(pair(at))).collect()
            }
            _ => full.iter().map(in_row).collect(),
        };
        let widest = full.iter().map(|block| chunks_in(block).div_ceil(per_block)).max().unwrap_or(0);
        let [first_slot, first_coded] = [Buffer::Scratch, Buffer::Coded].map(|buffer| out.chunks(buffer));
        Mapping { per_block, input, output, row, first_slot, first_coded, widest }
    }

    /// Slots of the outer plan for `slots` of the inner one.
    fn slots(&self, slots: usize) -> usize {
        slots * self.widest
    }

    /// The outer chunks of inner chunk `index` of some blocks. Of others than its own a member that is no root may know
    /// nothing: they are as large.
    fn run<'a>(&self, blocks: &'a [Vec<Span>], index: usize) -> &'a [Span] {
        let block = blocks.get(index / self.per_block).unwrap_or(&blocks[0]);
        let part = index % self.per_block;
        &block[part * block.len() / self.per_block..(part + 1) * block.len() / self.per_block]
    }

    fn spans(&self, spans: &[Span]) -> Spans {
        let mut mapped = Spans::new();
        for span in spans {
            for offset in 0..span.len as usize {
                let index = span.start as usize + offset;
                match span.buffer {
                    Buffer::Input => self.run(&self.input, index).iter().for_each(|&chunk| join(&mut mapped, chunk)),
                    Buffer::Output => self.run(&self.output, index).iter().for_each(|&chunk| join(&mut mapped, chunk)),
                    Buffer::Scratch | Buffer::Coded => {
                        let is_coded = span.buffer == Buffer::Coded;
                        let first = if is_coded { self.first_coded } else { self.first_slot };
                        let like = self.run(&self.row, span.like as usize + offset);
                        for (position, chunk) in like.iter().enumerate() {
                            let slot = first + index * self.widest + position;
                            let of = if is_coded { Span::coded } else { Span::scratch };
                            join(&mut mapped, of(slot, 1, chunk.like as usize));
                        }
                    }
                }
            }
        }
        mapped
    }

    fn action(&self, action: &Action, call: &Call, channels: &Range<Channel>) -> Action {
        let rank = |member: Rank| call.group[member.index()];
        let stream = |channel: Channel| {
            assert!(channel < channels.end - channels.start, "an inner plan within {channels:?}");
            channels.start + channel
        };
        let mapped = match action {
            Action::Send { to, channel, src } => {
                Action::Send { to: rank(*to), channel: stream(*channel), src: self.spans(src) }
            }
            Action::Recv { from, channel, dst } => {
                Action::Recv { from: rank(*from), channel: stream(*channel), dst: self.spans(dst) }
            }
            Action::RecvReduce { from, channel, local, dst, order, finish } => Action::RecvReduce {
                from: rank(*from),
                channel: stream(*channel),
                local: self.spans(local),
                dst: self.spans(dst),
                order: *order,
                finish: *finish && call.finish,
            },
            Action::Copy { src, dst, start, finish } => Action::Copy {
                src: self.spans(src),
                dst: self.spans(dst),
                start: *start,
                finish: *finish && call.finish,
            },
            Action::Reduce { srcs, dst, finish } => Action::Reduce {
                srcs: srcs.iter().map(|src| self.spans(src)).collect(),
                dst: self.spans(dst),
                finish: *finish && call.finish,
            },
            Action::Call(_) | Action::Nop => Action::Nop,
        };
        if is_empty(&mapped) {
            Action::Nop
        } else {
            mapped
        }
    }
}

/// Whether nothing is left of a step: its blocks are empty on all members alike.
fn is_empty(action: &Action) -> bool {
    match action {
        Action::Send { src, .. } => chunks_in(src) == 0,
        Action::Recv { dst, .. } | Action::RecvReduce { dst, .. } | Action::Reduce { dst, .. } => chunks_in(dst) == 0,
        Action::Copy { src, dst, finish, start } => chunks_in(dst) == 0 || (src == dst && !finish && !start),
        Action::Call(_) | Action::Nop => false,
    }
}

/// Each chunk as a span of its own.
fn one_by_one(spans: &[Span]) -> Vec<Span> {
    let single = |span: &Span| {
        let span = *span;
        (0..span.len).map(move |i| Span { start: span.start + i, like: span.like + i, len: 1, ..span })
    };
    spans.iter().flat_map(single).collect()
}

/// Appends a chunk, to the last span where it continues it.
fn join(spans: &mut Spans, chunk: Span) {
    match spans.last_mut() {
        Some(last)
            if last.buffer == chunk.buffer
                && last.start + last.len == chunk.start
                && last.like + last.len == chunk.like =>
        {
            last.len += 1;
        }
        _ => spans.push(chunk),
    }
}
