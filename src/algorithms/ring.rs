//! Around a ring: all-gather, reduce-scatter, all-reduce; broadcast and reduce along the opened ring.
//!
//! Each rank sends to the next and receives from the previous, so every link carries the same load; the ring visits
//! rank after rank of a node before it goes on to the next node. Source: Patarasuk and Yuan, 2009.
//!
//! Steps a rank: `p-1` messages (all-gather, reduce-scatter), `2(p-1)` (all-reduce), one (broadcast, reduce).
//! Bytes a rank: `(p-1)/p` of the full vector, twice that for all-reduce, the whole vector for broadcast and reduce.
//!
//! ```text
//! all-gather     rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0
//! round 0:           A        B        C        D        each sends its own block
//! round 1:           D        A        B        C        and then what it received last
//! round 2:           C        D        A        B
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, own, ring_order, Builder};
use super::needs::{all_or, InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Collective, OperandOrder, Plan, Shape, Span};
use crate::topo::Rank;

/// The ring.
pub const RING: Algorithm = Algorithm {
    name: "ring",
    text: "around a ring of all ranks: p-1 rounds, every link equally busy",
    collectives: &[
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
    ],
    is_leveled: false,
    supports: &|_| true,
    build: &build,
    needs: &needs,
};

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    match shape.collective {
        Collective::ReduceScatter => Needs::new(2 + all_or(shape, 0), 1),
        Collective::AllGather => Needs::new(0, shape.nranks() - 1),
        Collective::AllReduce => Needs::new(0, 2),
        Collective::Reduce => Needs::new(1 + usize::from(shape.prologue), 1),
        _ => Needs::new(0, 1),
    }
}

/// A rank's place in the ring.
struct Place {
    order: Vec<Rank>,
    at: usize,
}

impl Place {
    /// The rank `back` places before this one.
    fn before(&self, back: usize) -> Rank {
        let p = self.order.len();
        self.order[(self.at + 2 * p - back) % p]
    }

    fn next(&self) -> Rank {
        self.order[(self.at + 1) % self.order.len()]
    }
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    if shape.nranks() == 1 {
        return alone(shape, rank, "ring");
    }
    let order = ring_order(shape);
    let at = order.iter().position(|&other| other == rank).expect("every rank is in the ring");
    let place = Place { order, at };
    match shape.collective {
        Collective::AllGather => all_gather(shape, rank, &place),
        Collective::ReduceScatter => reduce_scatter(shape, rank, &place),
        Collective::AllReduce => all_reduce(shape, rank, &place),
        Collective::Broadcast => broadcast(shape, rank, &place),
        _ => reduce(shape, rank, &place),
    }
}

fn all_gather(shape: &Shape, rank: Rank, place: &Place) -> Plan {
    let mut builder = Builder::new(shape, rank, "ring", 1);
    let lane = builder.lane();
    let home = Span::output(rank.index(), 1);
    let mine = if shape.in_place { home } else { Span::input(0, 1) };
    for round in 0..shape.nranks() - 1 {
        let sent = if round == 0 { mine } else { Span::output(place.before(round).index(), 1) };
        builder.push(lane, Action::Send { to: place.next(), channel: 0, src: vec![sent] });
        let received = Span::output(place.before(round + 1).index(), 1);
        builder.push(lane, Action::Recv { from: place.before(1), channel: 0, dst: vec![received] });
    }
    builder.copy(vec![mine], vec![home], false, false);
    builder.plan()
}

fn reduce_scatter(shape: &Shape, rank: Rank, place: &Place) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "ring", 1);
    let lane = builder.lane();
    let mut input: Vec<Span> = (0..p).map(|block| Span::input(block, 1)).collect();
    if shape.prologue {
        let first = builder.scratch(p);
        let scaled: Vec<Span> = (0..p).map(|block| Span::scratch(first + block, 1, block)).collect();
        builder.push(lane, Action::Copy { src: input, dst: scaled.clone(), start: true, finish: false });
        input = scaled;
    }
    let partial = builder.scratch(2);
    let mut sends = Vec::new();
    for round in 0..p - 1 {
        let sent = place.before(round + 1).index();
        let src = if round == 0 { input[sent] } else { Span::scratch(partial + (round - 1) % 2, 1, sent) };
        sends.push(builder.push(lane, Action::Send { to: place.next(), channel: 0, src: vec![src] }));
        let block = place.before(round + 2).index();
        let last = round == p - 2;
        let dst = if last {
            Span::user(crate::plan::Buffer::Output, 0, 1)
        } else {
            Span::scratch(partial + round % 2, 1, block)
        };
        // This slot was sent one round ago: that message must be gone.
        let deps = if round >= 2 { &sends[round - 1..round] } else { &[] };
        let action = Action::RecvReduce {
            from: place.before(1),
            channel: 0,
            local: vec![input[block]],
            dst: vec![dst],
            order: OperandOrder::IncomingFirst,
            finish: last,
        };
        builder.push_after(lane, action, if last { &[] } else { deps });
    }
    builder.plan()
}

fn all_reduce(shape: &Shape, rank: Rank, place: &Place) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "ring", p);
    let lane = builder.lane();
    let mut own = |chunk| own(shape, chunk, 1);
    let from_output = |chunk| Span::output(chunk, 1);
    let mut scaled = from_output;
    let input: &mut dyn FnMut(usize) -> Span = if shape.prologue { &mut scaled } else { &mut own };
    if shape.prologue {
        let src = if shape.in_place { Span::output(0, p) } else { Span::input(0, p) };
        builder.push(lane, Action::Copy { src: vec![src], dst: vec![Span::output(0, p)], start: true, finish: false });
    }
    for round in 0..p - 1 {
        let sent = place.before(round + 1).index();
        let src = if round == 0 { input(sent) } else { from_output(sent) };
        builder.push(lane, Action::Send { to: place.next(), channel: 0, src: vec![src] });
        let chunk = place.before(round + 2).index();
        let action = Action::RecvReduce {
            from: place.before(1),
            channel: 0,
            local: vec![input(chunk)],
            dst: vec![from_output(chunk)],
            order: OperandOrder::IncomingFirst,
            finish: round == p - 2,
        };
        builder.push(lane, action);
    }
    for round in 0..p - 1 {
        let sent = from_output(place.before(round).index());
        builder.push(lane, Action::Send { to: place.next(), channel: 0, src: vec![sent] });
        let received = from_output(place.before(round + 1).index());
        builder.push(lane, Action::Recv { from: place.before(1), channel: 0, dst: vec![received] });
    }
    builder.plan()
}

/// How many places after the root this rank comes.
fn distance(shape: &Shape, place: &Place) -> usize {
    let root = place.order.iter().position(|&other| other == shape.root).expect("the root is in the ring");
    (place.at + place.order.len() - root) % place.order.len()
}

fn broadcast(shape: &Shape, rank: Rank, place: &Place) -> Plan {
    let mut builder = Builder::new(shape, rank, "ring", 1);
    let lane = builder.lane();
    let distance = distance(shape, place);
    let mut src = Span::output(0, 1);
    if distance > 0 {
        builder.push(lane, Action::Recv { from: place.before(1), channel: 0, dst: vec![src] });
    } else {
        src = own(shape, 0, 1);
    }
    if distance < shape.nranks() - 1 {
        builder.push(lane, Action::Send { to: place.next(), channel: 0, src: vec![src] });
    }
    if distance == 0 {
        builder.copy(vec![src], vec![Span::output(0, 1)], false, false);
    }
    builder.plan()
}

fn reduce(shape: &Shape, rank: Rank, place: &Place) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "ring", 1);
    let lane = builder.lane();
    let distance = distance(shape, place);
    let is_root = distance == 0;
    let mut input = if is_root { own(shape, 0, 1) } else { Span::input(0, 1) };
    if shape.prologue {
        let scaled = Span::scratch(builder.scratch(1), 1, 0);
        builder.push(lane, Action::Copy { src: vec![input], dst: vec![scaled], start: true, finish: false });
        input = scaled;
    }
    let mut partial = input;
    // The farthest rank begins; the chain runs back toward the root from behind.
    if distance != 1 {
        partial = if is_root { Span::output(0, 1) } else { Span::scratch(builder.scratch(1), 1, 0) };
        let action = Action::RecvReduce {
            from: place.before(1),
            channel: 0,
            local: vec![input],
            dst: vec![partial],
            order: OperandOrder::IncomingFirst,
            finish: is_root,
        };
        builder.push(lane, action);
    }
    if !is_root {
        debug_assert!(distance < p);
        builder.push(lane, Action::Send { to: place.next(), channel: 0, src: vec![partial] });
    }
    builder.plan()
}
