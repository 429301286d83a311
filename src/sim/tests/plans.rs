//! Small plans written by hand, independent of the algorithms that the library uses.
#![forbid(unsafe_code)]

use crate::plan::{Action, Call, Collective, Lane, LinkLevel, OperandOrder, Plan, Shape, Span, Spans, Step, StepRef};
use crate::topo::{Grid, Rank};
use std::sync::Arc;

/// A plan of every rank of a shape.
pub(super) fn all(shape: &Shape, plan: impl Fn(&Shape, usize) -> Plan) -> Vec<Plan> {
    (0..shape.nranks()).map(|rank| plan(shape, rank)).collect()
}

/// A shape of ranks on one node.
pub(super) fn flat(collective: Collective, nranks: usize) -> Shape {
    Shape::new(collective, Arc::new(Grid::flat(nranks)))
}

fn plan(shape: &Shape, rank: usize, name: &str, chunks: (usize, usize), lanes: Vec<Vec<Step>>) -> Plan {
    Plan {
        shape: shape.clone(),
        rank: Rank::from_index(rank),
        algorithm: String::from(name),
        chunks_per_block: chunks.0 as u32,
        scratch_chunks: chunks.1 as u32,
        coded: None,
        lanes: lanes.into_iter().map(|steps| Lane { steps }).collect(),
    }
}

fn send(to: usize, src: Span) -> Step {
    Action::Send { to: Rank::from_index(to), channel: 0, src: vec![src] }.into()
}

fn recv(from: usize, dst: Span) -> Step {
    Action::Recv { from: Rank::from_index(from), channel: 0, dst: vec![dst] }.into()
}

fn recv_reduce(from: usize, local: Span, dst: Span, order: OperandOrder, finish: bool) -> Step {
    let from = Rank::from_index(from);
    Action::RecvReduce { from, channel: 0, local: vec![local], dst: vec![dst], order, finish }.into()
}

fn copy(src: Span, dst: Span, start: bool) -> Step {
    Action::Copy { src: vec![src], dst: vec![dst], start, finish: false }.into()
}

fn after(mut step: Step, lane: usize, at: usize) -> Step {
    step.deps.push(StepRef { lane: lane as u32, step: at as u32 });
    step
}

/// All-gather around a ring, one lane sending and one receiving. In place, the own block is there already.
pub(super) fn ring_all_gather(shape: &Shape, rank: usize) -> Plan {
    let nranks = shape.nranks();
    let block = |back: usize| Span::output((rank + nranks - back) % nranks, 1);
    let (next, previous) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    let own = copy(Span::input(0, 1), block(0), false);
    let own = if shape.in_place { Step::from(Action::Nop) } else { own };
    let (mut sends, mut receives) = (vec![own], Vec::new());
    for round in 0..nranks - 1 {
        let sending = send(next, block(round));
        sends.push(if round == 0 { sending } else { after(sending, 1, round - 1) });
        receives.push(recv(previous, block(round + 1)));
    }
    plan(shape, rank, "ring", (1, 0), vec![sends, receives])
}

/// The same without waiting for a block before it is sent on.
pub(super) fn hasty_ring_all_gather(shape: &Shape, rank: usize) -> Plan {
    let mut plan = ring_all_gather(shape, rank);
    plan.lanes[0].steps.iter_mut().for_each(|step| step.deps.clear());
    plan
}

/// Reduce-scatter around a ring and then all-gather around the same ring.
pub(super) fn ring_all_reduce(shape: &Shape, rank: usize) -> Plan {
    let nranks = shape.nranks();
    let chunk = |back: usize| (rank + 2 * nranks - back) % nranks;
    let (next, previous) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    let (mut sends, mut receives) = (vec![send(next, Span::input(chunk(0), 1))], Vec::new());
    for round in 0..nranks - 1 {
        let (local, dst) = (Span::input(chunk(round + 1), 1), Span::output(chunk(round + 1), 1));
        receives.push(recv_reduce(previous, local, dst, OperandOrder::IncomingFirst, round == nranks - 2));
        sends.push(after(send(next, dst), 1, round));
    }
    for round in 0..nranks - 1 {
        let dst = Span::output(chunk(round), 1);
        receives.push(recv(previous, dst));
        if round < nranks - 2 {
            sends.push(after(send(next, dst), 1, nranks - 1 + round));
        }
    }
    plan(shape, rank, "ring", (nranks, 0), vec![sends, receives])
}

/// All-gather among a power of two of ranks: what is exchanged doubles from round to round.
pub(super) fn doubling_all_gather(shape: &Shape, rank: usize) -> Plan {
    let mut lane = vec![copy(Span::input(0, 1), Span::output(rank, 1), false)];
    for round in 0..shape.nranks().ilog2() {
        let width = 1 << round;
        let (peer, own) = (rank ^ width, rank / width * width);
        lane.push(send(peer, Span::output(own, width)));
        lane.push(recv(peer, Span::output(own ^ width, width)));
    }
    plan(shape, rank, "recursive doubling", (1, 0), vec![lane])
}

/// All-reduce among a power of two of ranks, whole vectors in each round. A partial sum that is being sent may not be
/// written, so each round has its own.
pub(super) fn doubling_all_reduce(shape: &Shape, rank: usize) -> Plan {
    doubling(shape, rank, |round| round as usize)
}

/// The same with one partial sum, written while it may still be on its way out.
pub(super) fn hasty_doubling_all_reduce(shape: &Shape, rank: usize) -> Plan {
    doubling(shape, rank, |_| 0)
}

fn doubling(shape: &Shape, rank: usize, slot: impl Fn(u32) -> usize) -> Plan {
    let rounds = shape.nranks().ilog2();
    let sum = |round: u32| Span::scratch(slot(round), 1, 0);
    let mut lane = vec![copy(Span::input(0, 1), sum(0), shape.prologue)];
    for round in 0..rounds {
        let peer = rank ^ (1 << round);
        let order = if peer > rank { OperandOrder::LocalFirst } else { OperandOrder::IncomingFirst };
        let last = round + 1 == rounds;
        let dst = if last { Span::output(0, 1) } else { sum(round + 1) };
        lane.push(send(peer, sum(round)));
        lane.push(recv_reduce(peer, sum(round), dst, order, last));
    }
    plan(shape, rank, "recursive doubling", (1, rounds.max(1) as usize), vec![lane])
}

/// Reduce-scatter in the node, all-reduce over the rail, all-gather in the node, on an even grid.
pub(super) fn two_level_all_reduce(shape: &Shape, rank: usize) -> Plan {
    let (grid, me) = (&shape.grid, Rank::from_index(rank));
    let (members, local) = (grid.members(grid.node(me)).to_vec(), grid.local(me));
    let each =
        |span: fn(usize, usize) -> Span| -> Vec<Spans> { (0..members.len()).map(|i| vec![span(i, 1)]).collect() };
    let part = |slot: usize| vec![vec![Span::scratch(slot, 1, local)]];
    let call = |collective, level, group: Vec<Rank>, src, dst, finish| {
        Step::from(Action::Call(Call { collective, level, group, root: 0, src, dst, finish }))
    };
    let steps = vec![
        call(Collective::ReduceScatter, LinkLevel::Node, members.clone(), each(Span::input), part(0), false),
        call(Collective::AllReduce, LinkLevel::Rail, grid.rail(local), part(0), part(1), true),
        call(Collective::AllGather, LinkLevel::Node, members.clone(), part(1), each(Span::output), false),
    ];
    // A lane for each phase lets the phases of different segments overlap.
    let mut lanes: Vec<Vec<Step>> = steps.into_iter().map(|step| vec![step]).collect();
    lanes[1][0].deps.push(StepRef { lane: 0, step: 0 });
    lanes[2][0].deps.push(StepRef { lane: 1, step: 0 });
    plan(shape, rank, "two-level", (members.len(), 2), lanes)
}

/// Each rank sends each other rank its block, on a channel of its own, in a lane of its own.
pub(super) fn pairwise_all_to_all(shape: &Shape, rank: usize) -> Plan {
    let nranks = shape.nranks();
    let lane = |shift: usize| {
        let (to, from) = ((rank + shift) % nranks, (rank + nranks - shift) % nranks);
        let (src, dst) = (Span::input(to, 1), Span::output(from, 1));
        match shift {
            0 => vec![copy(Span::input(rank, 1), Span::output(rank, 1), false)],
            _ => vec![send(to, src), recv(from, dst)],
        }
    };
    plan(shape, rank, "pairwise", (1, 0), (0..nranks).map(lane).collect())
}

/// Every block travels over an own channel between the same two ranks, which the channels may deliver in any order.
pub(super) fn many_channels(shape: &Shape, rank: usize) -> Plan {
    let chunks = 6;
    let lane = |chunk: usize| {
        let step = |action: Action| Step::from(action);
        match rank {
            0 => vec![
                copy(Span::input(chunk, 1), Span::output(chunk, 1), false),
                step(Action::Send { to: Rank(1), channel: chunk as u16, src: vec![Span::input(chunk, 1)] }),
            ],
            _ => vec![step(Action::Recv { from: Rank(0), channel: chunk as u16, dst: vec![Span::output(chunk, 1)] })],
        }
    };
    plan(shape, rank, "many channels", (chunks, 0), (0..chunks).map(lane).collect())
}
