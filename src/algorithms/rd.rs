//! Recursive doubling and halving, for powers of two.
//!
//! *All-gather* doubles: in round `i` a rank exchanges all it has with the rank whose number differs in bit `i`.
//! *Reduce-scatter* halves: from the highest bit down, two partners split the blocks they share, each sends the half the
//! other keeps and adds what it gets to its own. *All-reduce* (`rd`) is the second and then the first (Rabenseifner).
//! `rd_one` doubles with the whole vector: half the rounds, `log2 p` times the bytes, for messages so short that only
//! rounds count. The operand of the lower rank always comes first, so sums are folded in rank order, and both partners
//! of an exchange compute the same expression.
//! Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
//!
//! Steps a rank: `log2 p` messages, `2 log2 p` for the all-reduce of `rd`. Bytes a rank: `p - 1` blocks; `2(p-1)/p` of the
//! vector; `log2 p` vectors for `rd_one`.
//!
//! ```text
//! all-gather, 4 ranks     bit 0                        bit 1
//!   rank 0:  A . . .        A B . .  <-> 1               A B C D  <-> 2
//!   rank 1:  . B . .        A B . .  <-> 0               A B C D  <-> 3
//!   rank 2:  . . C .        . . C D  <-> 3               A B C D  <-> 0
//!   rank 3:  . . . D        . . C D  <-> 2               A B C D  <-> 1
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, own, Builder};
use super::needs::{all_or, InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Collective, OperandOrder, Plan, Shape, Span};
use crate::topo::Rank;

/// Recursive doubling and halving.
pub const RD: Algorithm = Algorithm {
    name: "rd",
    text: "recursive doubling and halving, for powers of two",
    collectives: &[Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter],
    is_leveled: false,
    supports: &|shape| shape.nranks().is_power_of_two(),
    build: &build,
    needs: &needs,
};

/// Recursive doubling with the whole vector.
pub const RD_ONE: Algorithm = Algorithm {
    name: "rd_one",
    text: "recursive doubling with the whole vector in each of log2 p rounds, for powers of two",
    collectives: &[Collective::AllReduce],
    is_leveled: false,
    supports: &|shape| shape.nranks().is_power_of_two(),
    build: &build_one,
    needs: &|_, _| Needs::new(1, 2),
};

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    let p = shape.nranks();
    match shape.collective {
        Collective::ReduceScatter => Needs::new(all_or(shape, p / 2), p / 2),
        Collective::AllGather => Needs::new(0, p - 1),
        _ => Needs::new(0, 2),
    }
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    if shape.nranks() == 1 {
        return alone(shape, rank, RD.name);
    }
    match shape.collective {
        Collective::AllGather => all_gather(shape, rank),
        Collective::ReduceScatter => reduce_scatter(shape, rank),
        _ => all_reduce(shape, rank),
    }
}

fn all_gather(shape: &Shape, rank: Rank) -> Plan {
    let mut builder = Builder::new(shape, rank, RD.name, 1);
    let lane = builder.lane();
    let me = rank.index();
    let mine = Span::output(me, 1);
    let input = if shape.in_place { mine } else { Span::input(0, 1) };
    for bit in bits(shape.nranks()) {
        let partner = me ^ bit;
        // The first message leaves from the caller's buffer, so that it need not wait for the copy.
        let src = if bit == 1 { input } else { Span::output(group(me, bit), bit) };
        builder.push(lane, Action::Send { to: Rank::from_index(partner), channel: 0, src: vec![src] });
        if bit == 1 && !shape.in_place {
            let (src, dst) = (vec![input], vec![mine]);
            builder.push(lane, Action::Copy { src, dst, start: false, finish: false });
        }
        push_recv(&mut builder, lane, partner, bit);
    }
    builder.plan()
}

fn reduce_scatter(shape: &Shape, rank: Rank) -> Plan {
    let nranks = shape.nranks();
    let mut builder = Builder::new(shape, rank, RD.name, 1);
    let lane = builder.lane();
    // With a prologue every block has a slot; without, only those of the half that is kept at first.
    let slots = if shape.prologue { nranks } else { nranks / 2 };
    if slots > 1 {
        builder.scratch(slots);
    }
    if shape.prologue {
        let (src, dst) = (vec![Span::input(0, nranks)], vec![Span::scratch(0, nranks, 0)]);
        builder.push(lane, Action::Copy { src, dst, start: true, finish: false });
    }
    let row = |untouched: bool, start: usize, len| match untouched && !shape.prologue {
        true => Span::input(start, len),
        false => Span::scratch(start % slots, len, start),
    };
    halve(&mut builder, lane, (nranks, rank.index()), Span::output(0, 1), &row);
    builder.plan()
}

fn all_reduce(shape: &Shape, rank: Rank) -> Plan {
    let nranks = shape.nranks();
    let mut builder = Builder::new(shape, rank, RD.name, nranks);
    let lane = builder.lane();
    if shape.prologue {
        let (src, dst) = (vec![own(shape, 0, nranks)], vec![Span::output(0, nranks)]);
        builder.push(lane, Action::Copy { src, dst, start: true, finish: false });
    }
    let row = |untouched: bool, start: usize, len| match untouched && !shape.prologue {
        true => own(shape, start, len),
        false => Span::output(start, len),
    };
    halve(&mut builder, lane, (nranks, rank.index()), Span::output(rank.index(), 1), &row);
    // Sums that were sent above are overwritten below without waiting for the sends: the result of a block can only
    // arrive after this rank's part of it did.
    for bit in bits(nranks) {
        let partner = rank.index() ^ bit;
        let src = vec![Span::output(group(rank.index(), bit), bit)];
        builder.push(lane, Action::Send { to: Rank::from_index(partner), channel: 0, src });
        push_recv(&mut builder, lane, partner, bit);
    }
    builder.plan()
}

/// Receives what the partner across `bit` has gathered.
fn push_recv(builder: &mut Builder, lane: usize, partner: usize, bit: usize) {
    let dst = vec![Span::output(group(partner, bit), bit)];
    builder.push(lane, Action::Recv { from: Rank::from_index(partner), channel: 0, dst });
}

/// Recursive halving; the own block's sum is finished and goes to `last`. `row(untouched, start, len)` says where blocks
/// lie: those to which nothing has been added, or sums.
fn halve(
    builder: &mut Builder,
    lane: usize,
    (nranks, me): (usize, usize),
    last: Span,
    row: &dyn Fn(bool, usize, usize) -> Span,
) {
    for bit in bits(nranks).rev() {
        let untouched = 2 * bit == nranks;
        let partner = me ^ bit;
        let (kept, given) = (group(me, bit), group(partner, bit));
        let src = vec![row(untouched, given, bit)];
        builder.push(lane, Action::Send { to: Rank::from_index(partner), channel: 0, src });
        let dst = if bit == 1 { last } else { row(false, kept, bit) };
        builder.push(lane, recv_reduce(me, partner, row(untouched, kept, bit), dst, bit == 1));
    }
}

/// Adds the partner's message to `local`, the lower rank's operand first.
fn recv_reduce(me: usize, partner: usize, local: Span, dst: Span, finish: bool) -> Action {
    Action::RecvReduce {
        from: Rank::from_index(partner),
        channel: 0,
        local: vec![local],
        dst: vec![dst],
        order: if me < partner { OperandOrder::LocalFirst } else { OperandOrder::IncomingFirst },
        finish,
    }
}

fn build_one(shape: &Shape, rank: Rank) -> Plan {
    if shape.nranks() == 1 {
        return alone(shape, rank, RD_ONE.name);
    }
    let mut builder = Builder::new(shape, rank, RD_ONE.name, 1);
    let rounds = shape.nranks().trailing_zeros() as usize;
    // The vector alternates between two places, so that a round's result never lands on what the round sends; the last
    // result lands in the output.
    let (output, other) = (Span::output(0, 1), Span::scratch(0, 1, 0));
    let place = |round: usize| if (rounds - round).is_multiple_of(2) { output } else { other };
    let copied = shape.prologue || (shape.in_place && place(0) != output);
    if rounds > 1 || copied {
        builder.scratch(1);
    }
    // Sends and receives have a lane each, so that a receive can wait for an earlier send.
    let (sends, recvs) = (builder.lane(), builder.lane());
    let mut have = None;
    if copied {
        let (src, dst) = (vec![own(shape, 0, 1)], vec![place(0)]);
        have = Some(builder.push(recvs, Action::Copy { src, dst, start: shape.prologue, finish: false }));
    }
    let mut sent_before = None;
    for round in 0..rounds {
        let at = if round == 0 && !copied { own(shape, 0, 1) } else { place(round) };
        let partner = rank.index() ^ (1 << round);
        let send = Action::Send { to: Rank::from_index(partner), channel: 0, src: vec![at] };
        let sent = builder.push_after(sends, send, have.as_slice());
        let reduce = recv_reduce(rank.index(), partner, at, place(round + 1), round + 1 == rounds);
        have = Some(builder.push_after(recvs, reduce, sent_before.as_slice()));
        sent_before = Some(sent);
    }
    builder.plan()
}

/// The bits of rank numbers, rising.
fn bits(nranks: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..nranks.trailing_zeros()).map(|bit| 1 << bit)
}

/// The first of the `size` ranks that share all but the low bits with `rank`.
fn group(rank: usize, size: usize) -> usize {
    rank & !(size - 1)
}
