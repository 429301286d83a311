//! Small plans written by hand, each family for any number of ranks: what the verifier's tests are tried on.
#![forbid(unsafe_code)]

use crate::plan::{
    Action, Buffer, Call, Channel, Collective, Lane, LinkLevel, OperandOrder, Plan, Shape, Span, Step, StepRef,
};
use crate::topo::{Grid, NodeId, Rank};
use std::sync::Arc;

/// A plan of `nlanes` empty lanes.
pub(crate) fn blank(shape: &Shape, rank: usize, per_block: u32, scratch: u32, nlanes: usize) -> Plan {
    Plan {
        shape: shape.clone(),
        rank: Rank(rank as u32),
        algorithm: "sample".into(),
        chunks_per_block: per_block,
        scratch_chunks: scratch,
        coded: None,
        lanes: vec![Lane::default(); nlanes],
    }
}

/// Appends a step to a lane; returns its place.
pub(crate) fn push(plan: &mut Plan, lane: usize, action: Action, deps: &[StepRef]) -> StepRef {
    let steps = &mut plan.lanes[lane].steps;
    steps.push(Step { action, deps: deps.to_vec() });
    StepRef { lane: lane as u32, step: steps.len() as u32 - 1 }
}

fn send(to: usize, channel: Channel, span: Span) -> Action {
    Action::Send { to: Rank(to as u32), channel, src: vec![span] }
}

fn recv(from: usize, channel: Channel, span: Span) -> Action {
    Action::Recv { from: Rank(from as u32), channel, dst: vec![span] }
}

fn recv_reduce(from: usize, local: Span, dst: Span, order: OperandOrder, finish: bool) -> Action {
    let (local, dst) = (vec![local], vec![dst]);
    Action::RecvReduce { from: Rank(from as u32), channel: 0, local, dst, order, finish }
}

fn copy(src: Span, dst: Span) -> Action {
    Action::Copy { src: vec![src], dst: vec![dst], start: false, finish: false }
}

fn flat(collective: Collective, nranks: usize) -> Shape {
    Shape::new(collective, Arc::new(Grid::flat(nranks)))
}

fn per_rank(shape: &Shape, make: impl Fn(usize) -> Plan) -> Vec<Plan> {
    (0..shape.nranks()).map(make).collect()
}

/// All-gather around a ring, in two lanes: one sends, one receives.
pub(crate) fn ring_all_gather(p: usize, in_place: bool) -> Vec<Plan> {
    let shape = Shape { in_place, ..flat(Collective::AllGather, p) };
    per_rank(&shape, |rank| {
        let mut plan = blank(&shape, rank, 1, 0, 3);
        if !in_place {
            push(&mut plan, 2, copy(Span::input(0, 1), Span::output(rank, 1)), &[]);
        }
        let (next, last) = ((rank + 1) % p, (rank + p - 1) % p);
        for round in 0..p - 1 {
            let arriving = (rank + p - 1 - round) % p;
            let leaving = (arriving + 1) % p;
            if round == 0 {
                push(&mut plan, 0, send(next, 0, Span::input(0, 1)), &[]);
            } else {
                let arrived = StepRef { lane: 1, step: round as u32 - 1 };
                push(&mut plan, 0, send(next, 0, Span::output(leaving, 1)), &[arrived]);
            }
            push(&mut plan, 1, recv(last, 0, Span::output(arriving, 1)), &[]);
        }
        plan
    })
}

/// Reduce-scatter around a ring in one lane, through two scratch slots that take turns.
pub(crate) fn ring_reduce_scatter(p: usize) -> Vec<Plan> {
    let shape = flat(Collective::ReduceScatter, p);
    per_rank(&shape, |rank| {
        let mut plan = blank(&shape, rank, 1, 2, 1);
        let (next, last) = ((rank + 1) % p, (rank + p - 1) % p);
        if p == 1 {
            let (src, dst) = (vec![Span::input(0, 1)], vec![Span::output(0, 1)]);
            push(&mut plan, 0, Action::Copy { src, dst, start: false, finish: true }, &[]);
            return plan;
        }
        let mut sends = vec![push(&mut plan, 0, send(next, 0, Span::input(last, 1)), &[])];
        for round in 0..p - 1 {
            let block = (rank + 2 * p - 2 - round) % p;
            let done = round == p - 2;
            let slot = Span::scratch(round % 2, 1, 0);
            let dst = if done { Span::output(0, 1) } else { slot };
            // Slot `round % 2` was last sent two rounds ago.
            let free = if round >= 2 && !done { vec![sends[round - 1]] } else { vec![] };
            let step = recv_reduce(last, Span::input(block, 1), dst, OperandOrder::IncomingFirst, done);
            push(&mut plan, 0, step, &free);
            if !done {
                sends.push(push(&mut plan, 0, send(next, 0, slot), &[]));
            }
        }
        plan
    })
}

/// All-reduce by recursive doubling, for powers of two, between `Output` and scratch in turns: what is being sent must
/// not be overwritten, and waiting for the send first would be waiting for a peer that waits too. The lower rank's
/// operand comes first on both sides.
pub(crate) fn doubling_all_reduce(p: usize, per_block: usize, in_place: bool, prologue: bool) -> Vec<Plan> {
    let shape = Shape { in_place, prologue, ..flat(Collective::AllReduce, p) };
    let rounds = p.trailing_zeros() as usize;
    per_rank(&shape, |rank| {
        let mut plan = blank(&shape, rank, per_block as u32, per_block as u32, 1);
        let place = |round: usize| match (rounds - round) % 2 {
            0 => Span::output(0, per_block),
            _ => Span::scratch(0, per_block, 0),
        };
        let (src, dst) = (vec![Span::input(0, per_block)], vec![place(0)]);
        push(&mut plan, 0, Action::Copy { src, dst, start: prologue, finish: p == 1 }, &[]);
        let mut free = vec![];
        for round in 0..rounds {
            let peer = rank ^ (1 << round);
            let sent = push(&mut plan, 0, send(peer, 0, place(round)), &[]);
            let order = if peer < rank { OperandOrder::IncomingFirst } else { OperandOrder::LocalFirst };
            let step = recv_reduce(peer, place(round), place(round + 1), order, round + 1 == rounds);
            push(&mut plan, 0, step, &free);
            free = vec![sent];
        }
        plan
    })
}

/// All-gather in which every rank sends to every other, each message on lanes of its own.
pub(crate) fn direct_all_gather(p: usize) -> Vec<Plan> {
    let shape = flat(Collective::AllGather, p);
    per_rank(&shape, |rank| {
        let mut plan = blank(&shape, rank, 1, 0, 2 * p - 1);
        push(&mut plan, 0, copy(Span::input(0, 1), Span::output(rank, 1)), &[]);
        for offset in 1..p {
            let (to, from) = ((rank + offset) % p, (rank + p - offset) % p);
            push(&mut plan, 2 * offset - 1, send(to, 0, Span::input(0, 1)), &[]);
            push(&mut plan, 2 * offset, recv(from, 0, Span::output(from, 1)), &[]);
        }
        plan
    })
}

/// All-reduce around a ring, `p` chunks a block, in place in `Output`: in the second half arriving results overwrite
/// chunks that were sent in the first, ordered by nothing but the messages between.
pub(crate) fn ring_all_reduce(p: usize) -> Vec<Plan> {
    let shape = flat(Collective::AllReduce, p);
    per_rank(&shape, |rank| {
        let mut plan = blank(&shape, rank, p as u32, 0, 1);
        let (next, last) = ((rank + 1) % p, (rank + p - 1) % p);
        for round in 0..p - 1 {
            let (out, into) = ((rank + p - round) % p, (rank + 2 * p - 1 - round) % p);
            let src = if round == 0 { Span::input(out, 1) } else { Span::output(out, 1) };
            push(&mut plan, 0, send(next, 0, src), &[]);
            let (local, dst) = (Span::input(into, 1), Span::output(into, 1));
            push(&mut plan, 0, recv_reduce(last, local, dst, OperandOrder::IncomingFirst, round == p - 2), &[]);
        }
        for round in 0..p - 1 {
            let (out, into) = ((rank + p + 1 - round) % p, (rank + p - round) % p);
            push(&mut plan, 0, send(next, 0, Span::output(out, 1)), &[]);
            push(&mut plan, 0, recv(last, 0, Span::output(into, 1)), &[]);
        }
        plan
    })
}

/// All-reduce in two levels on even nodes: reduce-scatter in the node, all-reduce on the rail, all-gather in the node.
/// Lane 0 makes the calls in the node, lane 1 those on the rail.
pub(crate) fn two_level_all_reduce(nodes: usize, per_node: usize) -> Vec<Plan> {
    let grid = Grid::blocks(&vec![per_node; nodes]);
    let shape = Shape::new(Collective::AllReduce, Arc::new(grid));
    let per_block = per_node as u32;
    per_rank(&shape, |rank| {
        let mut plan = blank(&shape, rank, per_block, 1, 2);
        let (node, local) = (rank / per_node, rank % per_node);
        let members = shape.grid.members(NodeId(node as u32)).to_vec();
        let rail: Vec<Rank> = (0..nodes).map(|node| Rank((node * per_node + local) as u32)).collect();
        let chunks = |buffer| (0..per_node).map(|chunk| vec![Span::user(buffer, chunk, 1)]).collect::<Vec<_>>();
        let mine = vec![vec![Span::scratch(0, 1, local)]];
        let call = |collective, level, group: &[Rank], src, dst, finish| {
            Action::Call(Call { collective, level, group: group.to_vec(), root: 0, src, dst, finish })
        };
        let scatter =
            call(Collective::ReduceScatter, LinkLevel::Node, &members, chunks(Buffer::Input), mine.clone(), false);
        let scattered = push(&mut plan, 0, scatter, &[]);
        let reduce = call(Collective::AllReduce, LinkLevel::Rail, &rail, mine.clone(), mine.clone(), true);
        let reduced = push(&mut plan, 1, reduce, &[scattered]);
        let gather = call(Collective::AllGather, LinkLevel::Node, &members, mine, chunks(Buffer::Output), false);
        push(&mut plan, 0, gather, &[reduced]);
        plan
    })
}

/// Broadcast down a binomial tree.
pub(crate) fn binomial_broadcast(p: usize, root: usize, in_place: bool) -> Vec<Plan> {
    let shape = Shape { root: Rank(root as u32), in_place, ..flat(Collective::Broadcast, p) };
    per_rank(&shape, |rank| {
        let mut plan = blank(&shape, rank, 1, 0, 1);
        let me = (rank + p - root) % p;
        let mut distance = p.next_power_of_two();
        if me == 0 {
            push(&mut plan, 0, copy(Span::input(0, 1), Span::output(0, 1)), &[]);
        } else {
            distance = 1 << me.trailing_zeros();
            push(&mut plan, 0, recv((me - distance + root) % p, 0, Span::output(0, 1)), &[]);
        }
        while distance > 1 {
            distance /= 2;
            if me + distance < p {
                push(&mut plan, 0, send((me + distance + root) % p, 0, Span::output(0, 1)), &[]);
            }
        }
        plan
    })
}

/// Every family at small sizes, by name.
pub(crate) fn all() -> Vec<(String, Vec<Plan>)> {
    let mut plans = Vec::new();
    for p in 1..=4 {
        plans.push((format!("ring_all_gather {p}"), ring_all_gather(p, false)));
        plans.push((format!("ring_all_gather {p} in place"), ring_all_gather(p, true)));
        plans.push((format!("ring_reduce_scatter {p}"), ring_reduce_scatter(p)));
        plans.push((format!("direct_all_gather {p}"), direct_all_gather(p)));
        plans.push((format!("binomial_broadcast {p}"), binomial_broadcast(p, p / 2, p % 2 == 0)));
    }
    for p in [2, 3, 4] {
        plans.push((format!("ring_all_reduce {p}"), ring_all_reduce(p)));
    }
    for p in [1, 2, 4] {
        plans.push((format!("doubling_all_reduce {p}"), doubling_all_reduce(p, 2, false, true)));
        plans.push((format!("doubling_all_reduce {p} in place"), doubling_all_reduce(p, 1, true, false)));
    }
    for (nodes, per_node) in [(1, 1), (2, 2), (2, 3), (3, 2)] {
        plans.push((format!("two_level_all_reduce {nodes}x{per_node}"), two_level_all_reduce(nodes, per_node)));
    }
    plans
}
