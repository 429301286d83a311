//! Each rank with each, without detours: the fewest rounds, for ranks that share memory or are few.
//!
//! Sends are issued first, to the next rank, the one after it and so on, so that no receiver is everybody's first.
//! Source: the all-pairs algorithms of MSCCLang (Cowan et al., 2023).
//!
//! Steps a rank: `p-1` messages (all-gather, reduce-scatter, all-to-all, one-round all-reduce), `2(p-1)` (all-reduce).
//! Bytes a rank: `(p-1)/p` of the full vector, twice that for all-reduce, `p-1` vectors for the one-round all-reduce.
//!
//! ```text
//! reduce-scatter          rank 0    rank 1    rank 2    rank 3
//! rank 0 sends               -      block 1   block 2   block 3
//! rank 1 sends            block 0      -      block 2   block 3    and each adds what it receives
//! rank 2 sends            block 0   block 1      -      block 3    to its own block, in a fixed order
//! rank 3 sends            block 0   block 1   block 2      -
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, own, Builder};
use super::needs::{all_or, largest_node, InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Collective, OperandOrder, Plan, Shape, Span, StepRef};
use crate::topo::Rank;

/// Each rank with each.
pub const DIRECT: Algorithm = Algorithm {
    name: "direct",
    text: "each rank with each: one round (all-reduce: two)",
    collectives: &Collective::ALL,
    is_leveled: false,
    supports: &|_| true,
    build: &build,
    needs: &needs,
};

/// Whole vectors to everybody.
pub const ONE_ROUND: Algorithm = Algorithm {
    name: "direct_one_round",
    text: "every rank gets all vectors and reduces them itself: one round, for few bytes",
    collectives: &[Collective::AllReduce],
    is_leveled: false,
    supports: &|_| true,
    build: &one_round,
    needs: &|_, _| Needs::new(1, 1),
};

/// One partner at a time.
pub const PAIRWISE: Algorithm = Algorithm {
    name: "pairwise",
    text: "each rank with each, one partner at a time: p-1 rounds",
    collectives: &[Collective::AllToAll],
    is_leveled: false,
    supports: &|_| true,
    build: &pairwise,
    needs: &|shape, _| Needs::new(0, largest_node(shape) - 1),
};

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    let others = largest_node(shape) - 1;
    match shape.collective {
        Collective::ReduceScatter => Needs::new(all_or(shape, 0), others),
        Collective::AllToAll | Collective::Scatter => Needs::new(0, others),
        Collective::Reduce => Needs::new(usize::from(shape.prologue), 1),
        _ => Needs::new(0, 1),
    }
}

/// The other ranks, beginning with the one after `rank`.
pub(super) fn others(shape: &Shape, rank: Rank) -> impl Iterator<Item = Rank> {
    let p = shape.nranks();
    (1..p).map(move |distance| Rank::from_index((rank.index() + distance) % p))
}

/// A message of one span.
pub(super) fn send(to: Rank, channel: u16, src: Span) -> Action {
    Action::Send { to, channel, src: vec![src] }
}

/// The receive of one.
pub(super) fn recv(from: Rank, channel: u16, dst: Span) -> Action {
    Action::Recv { from, channel, dst: vec![dst] }
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    if shape.nranks() == 1 {
        return alone(shape, rank, "direct");
    }
    match shape.collective {
        Collective::AllGather => all_gather(shape, rank),
        Collective::ReduceScatter => reduce_scatter(shape, rank),
        Collective::AllReduce => all_reduce(shape, rank),
        Collective::AllToAll => all_to_all(shape, rank),
        Collective::Gather | Collective::Scatter => rooted_blocks(shape, rank),
        Collective::Broadcast => broadcast(shape, rank),
        Collective::Reduce => reduce(shape, rank),
        // Only scripts do these.
        Collective::Custom => Builder::new(shape, rank, "direct", 1).plan(),
    }
}

fn all_gather(shape: &Shape, rank: Rank) -> Plan {
    let mut builder = Builder::new(shape, rank, "direct", 1);
    let home = Span::output(rank.index(), 1);
    let mine = if shape.in_place { home } else { Span::input(0, 1) };
    let sends = builder.lane();
    for peer in others(shape, rank) {
        builder.push(sends, send(peer, 0, mine));
    }
    builder.copy(vec![mine], vec![home], false, false);
    for peer in others(shape, rank) {
        let lane = builder.lane();
        builder.push(lane, recv(peer, 0, Span::output(peer.index(), 1)));
    }
    builder.plan()
}

/// Folds what the other ranks send onto `mine`, in rotated order; the result in `dst` is final.
fn fold(
    builder: &mut Builder,
    lane: usize,
    shape: &Shape,
    rank: Rank,
    mine: Span,
    dst: Span,
    deps: &[StepRef],
) -> StepRef {
    let mut local = mine;
    let mut at = StepRef { lane: lane as u32, step: 0 };
    for (index, peer) in others(shape, rank).enumerate() {
        let action = Action::RecvReduce {
            from: peer,
            channel: 0,
            local: vec![local],
            dst: vec![dst],
            order: OperandOrder::LocalFirst,
            finish: index == shape.nranks() - 2,
        };
        at = builder.push_after(lane, action, if index == 0 { deps } else { &[] });
        local = dst;
    }
    at
}

fn reduce_scatter(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "direct", 1);
    let sends = builder.lane();
    let mut deps = Vec::new();
    let mut input: Vec<Span> = (0..p).map(|block| Span::input(block, 1)).collect();
    if shape.prologue {
        let first = builder.scratch(p);
        let scaled: Vec<Span> = (0..p).map(|block| Span::scratch(first + block, 1, block)).collect();
        let copy = Action::Copy { src: input, dst: scaled.clone(), start: true, finish: false };
        deps.push(builder.push(sends, copy));
        input = scaled;
    }
    for peer in others(shape, rank) {
        builder.push(sends, send(peer, 0, input[peer.index()]));
    }
    let lane = builder.lane();
    fold(&mut builder, lane, shape, rank, input[rank.index()], Span::output(0, 1), &deps);
    builder.plan()
}

fn all_reduce(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "direct", p);
    let sends = builder.lane();
    let mut deps = Vec::new();
    if shape.prologue {
        let action =
            Action::Copy { src: vec![own(shape, 0, p)], dst: vec![Span::output(0, p)], start: true, finish: false };
        deps.push(builder.push(sends, action));
    }
    let input = |chunk| if shape.prologue { Span::output(chunk, 1) } else { own(shape, chunk, 1) };
    for peer in others(shape, rank) {
        builder.push(sends, send(peer, 0, input(peer.index())));
    }
    let lane = builder.lane();
    let mine = Span::output(rank.index(), 1);
    fold(&mut builder, lane, shape, rank, input(rank.index()), mine, &deps);
    for peer in others(shape, rank) {
        builder.push(lane, send(peer, 1, mine));
    }
    // A chunk of ours may still be on its way to the rank that reduces it when that rank's result is received over it:
    // it cannot be, since the result contains it.
    for peer in others(shape, rank) {
        let lane = builder.lane();
        builder.push_after(lane, recv(peer, 1, Span::output(peer.index(), 1)), &deps);
    }
    builder.plan()
}

fn one_round(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    if p == 1 {
        return alone(shape, rank, "direct_one_round");
    }
    let mut builder = Builder::new(shape, rank, "direct_one_round", 1);
    let sends = builder.lane();
    let mut mine = own(shape, 0, 1);
    let output = Span::output(0, 1);
    let mut started = Vec::new();
    if shape.prologue {
        let action = Action::Copy { src: vec![mine], dst: vec![output], start: true, finish: false };
        started.push(builder.push(sends, action));
        mine = output;
    }
    let sent: Vec<StepRef> = others(shape, rank).map(|peer| builder.push(sends, send(peer, 0, mine))).collect();
    let overwrites = mine == output;
    let partial = if overwrites { Span::scratch(builder.scratch(1), 1, 0) } else { output };
    let lane = builder.lane();
    // ((rank 0 + rank 1) + rank 2) + ..., the same expression on every rank.
    let mut local = if rank == Rank(0) { mine } else { partial };
    for index in usize::from(rank.0 == 0)..p {
        let peer = Rank::from_index(index);
        if peer == rank && rank == Rank(1) {
            // Rank 1 has met rank 0's vector with its own already.
            continue;
        }
        let last = index == p - 1 || (p == 2 && rank == Rank(1));
        // Where the result goes over the vector that is being sent, it goes there in a step of its own.
        let direct = last && !overwrites;
        let dst = if direct { output } else { partial };
        let action = if peer == rank {
            Action::Reduce { srcs: vec![vec![local], vec![mine]], dst: vec![dst], finish: direct }
        } else if index == 0 && rank == Rank(1) {
            let order = OperandOrder::IncomingFirst;
            Action::RecvReduce { from: peer, channel: 0, local: vec![mine], dst: vec![dst], order, finish: direct }
        } else if index == 0 {
            recv(peer, 0, partial)
        } else {
            let order = OperandOrder::LocalFirst;
            Action::RecvReduce { from: peer, channel: 0, local: vec![local], dst: vec![dst], order, finish: direct }
        };
        local = partial;
        builder.push_after(lane, action, &started);
    }
    if overwrites {
        let copy = Action::Copy { src: vec![partial], dst: vec![output], start: false, finish: true };
        builder.push_after(lane, copy, &sent);
    }
    builder.plan()
}

fn all_to_all(shape: &Shape, rank: Rank) -> Plan {
    let mut builder = Builder::new(shape, rank, "direct", 1);
    let sends = builder.lane();
    for peer in others(shape, rank) {
        builder.push(sends, send(peer, 0, Span::input(peer.index(), 1)));
    }
    builder.copy(vec![Span::input(rank.index(), 1)], vec![Span::output(rank.index(), 1)], false, false);
    for peer in others(shape, rank) {
        let lane = builder.lane();
        builder.push(lane, recv(peer, 0, Span::output(peer.index(), 1)));
    }
    builder.plan()
}

fn pairwise(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    if p == 1 {
        return alone(shape, rank, "pairwise");
    }
    let mut builder = Builder::new(shape, rank, "pairwise", 1);
    let lane = builder.lane();
    for distance in 1..p {
        let to = Rank::from_index((rank.index() + distance) % p);
        let from = Rank::from_index((rank.index() + p - distance) % p);
        let sent = builder.push(lane, send(to, 0, Span::input(to.index(), 1)));
        let received = builder.push(lane, recv(from, 0, Span::output(from.index(), 1)));
        builder.push_after(lane, Action::Nop, &[sent, received]);
    }
    builder.copy(vec![Span::input(rank.index(), 1)], vec![Span::output(rank.index(), 1)], false, false);
    builder.plan()
}

/// Gather and scatter: the root's blocks come or go one by one.
fn rooted_blocks(shape: &Shape, rank: Rank) -> Plan {
    let mut builder = Builder::new(shape, rank, "direct", 1);
    let gather = shape.collective == Collective::Gather;
    if rank != shape.root {
        let lane = builder.lane();
        let action =
            if gather { send(shape.root, 0, Span::input(0, 1)) } else { recv(shape.root, 0, Span::output(0, 1)) };
        builder.push(lane, action);
        return builder.plan();
    }
    let sends = builder.lane();
    for peer in others(shape, rank) {
        if gather {
            let lane = builder.lane();
            builder.push(lane, recv(peer, 0, Span::output(peer.index(), 1)));
        } else {
            builder.push(sends, send(peer, 0, Span::input(peer.index(), 1)));
        }
    }
    let (src, dst) = match gather {
        true => (Span::input(0, 1), Span::output(rank.index(), 1)),
        false => (Span::input(rank.index(), 1), Span::output(0, 1)),
    };
    if !shape.in_place {
        builder.copy(vec![src], vec![dst], false, false);
    }
    builder.plan()
}

fn broadcast(shape: &Shape, rank: Rank) -> Plan {
    let mut builder = Builder::new(shape, rank, "direct", 1);
    let lane = builder.lane();
    let output = Span::output(0, 1);
    if rank != shape.root {
        builder.push(lane, recv(shape.root, 0, output));
        return builder.plan();
    }
    let mine = own(shape, 0, 1);
    for peer in others(shape, rank) {
        builder.push(lane, send(peer, 0, mine));
    }
    builder.copy(vec![mine], vec![output], false, false);
    builder.plan()
}

fn reduce(shape: &Shape, rank: Rank) -> Plan {
    let mut builder = Builder::new(shape, rank, "direct", 1);
    let lane = builder.lane();
    let is_root = rank == shape.root;
    let mut mine = if is_root { own(shape, 0, 1) } else { Span::input(0, 1) };
    if shape.prologue {
        let scaled = Span::scratch(builder.scratch(1), 1, 0);
        builder.push(lane, Action::Copy { src: vec![mine], dst: vec![scaled], start: true, finish: false });
        mine = scaled;
    }
    if is_root {
        fold(&mut builder, lane, shape, rank, mine, Span::output(0, 1), &[]);
    } else {
        builder.push(lane, send(shape.root, 0, mine));
    }
    builder.plan()
}
