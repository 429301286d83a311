//! Broadcast as scatter and all-gather, reduce as reduce-scatter and gather: for long vectors.
//!
//! The vector is `p` chunks, chunk `v` belonging to position `v`, counted from the root. *Broadcast*: a binomial scatter
//! gives each subtree its chunks, in one run that lands in the output; the logarithmic all-gather passes them on, but to
//! nobody who had them from the scatter. *Reduce* is the mirror image: the logarithmic reduce-scatter, whose results, one
//! chunk a rank, go up the binomial tree. Ranks without an output keep sums and subtrees in scratch.
//! Sources: van de Geijn's broadcast and Rabenseifner's reduce, as in Thakur, Rabenseifner and Gropp, 2005, section 3.
//!
//! Steps: `2 ceil(log2 p)` rounds. Bytes a rank sends: at most `2(p-1)/p` of the vector.
//!
//! ```text
//! broadcast, 4 ranks     scatter: 0 -> 2, 0 -> 1, 2 -> 3      all-gather 1: v -> v-1    2: v -> v-2
//!   position 0:  A B C D    A B C D                             A B C D                   A B C D
//!   position 1:  . . . .    . B . .                             . B C .                   A B C D
//!   position 2:  . . . .    . . C D                             . . C D                   A B C D
//!   position 3:  . . . .    . . . D                             A . . D                   A B C D
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, own, Builder};
use super::log::{reaches, Circle};
use super::needs::Needs;
use super::tree::{children, subtree, to_parent};
use super::Algorithm;
use crate::plan::{Action, Buffer, Collective, Plan, Shape, Span};
use crate::topo::Rank;

/// Broadcast as scatter and all-gather.
pub const SCATTER_ALLGATHER: Algorithm = Algorithm {
    name: "scatter_allgather",
    text: "broadcast as a binomial scatter and a logarithmic all-gather (van de Geijn)",
    collectives: &[Collective::Broadcast],
    is_leveled: false,
    supports: &|_| true,
    build: &broadcast,
    needs: &|_, _| Needs::new(0, 2),
};

/// Reduce as reduce-scatter and gather.
pub const REDUCE_SCATTER_GATHER: Algorithm = Algorithm {
    name: "reduce_scatter_gather",
    text: "reduce as a logarithmic reduce-scatter and a binomial gather (Rabenseifner)",
    collectives: &[Collective::Reduce],
    is_leveled: false,
    supports: &|_| true,
    build: &reduce,
    needs: &|_, _| Needs::new(1, 1),
};

fn broadcast(shape: &Shape, rank: Rank) -> Plan {
    let nranks = shape.nranks();
    if nranks == 1 {
        return alone(shape, rank, SCATTER_ALLGATHER.name);
    }
    let circle = Circle::new(nranks, rank, shape.root);
    let me = circle.me;
    let mut builder = Builder::new(shape, rank, SCATTER_ALLGATHER.name, nranks);
    let lane = builder.lane();
    let source = if me == 0 { own(shape, 0, nranks).buffer } else { Buffer::Output };
    if me > 0 {
        let dst = vec![Span::output(me, subtree(me, nranks))];
        builder.push(lane, Action::Recv { from: circle.rank_before(to_parent(me)), channel: 0, dst });
    }
    for (offset, size) in children(me, nranks).rev() {
        let src = vec![Span::user(source, me + offset, size)];
        builder.push(lane, Action::Send { to: circle.rank_at(offset), channel: 0, src });
    }
    for reach in reaches(nranks) {
        let (send, recv) = circle.gather_round(reach, &|position| subtree(position, nranks), source);
        send.into_iter().chain(recv).for_each(|action| _ = builder.push(lane, action));
    }
    if me == 0 {
        builder.copy(vec![Span::user(source, 0, nranks)], vec![Span::output(0, nranks)], false, false);
    }
    builder.plan()
}

fn reduce(shape: &Shape, rank: Rank) -> Plan {
    let nranks = shape.nranks();
    if nranks == 1 {
        return alone(shape, rank, REDUCE_SCATTER_GATHER.name);
    }
    let circle = Circle::new(nranks, rank, shape.root);
    let me = circle.me;
    let is_root = me == 0;
    let mut builder = Builder::new(shape, rank, REDUCE_SCATTER_GATHER.name, nranks);
    let lane = builder.lane();
    // Only the root has an output. Elsewhere the slot of a chunk is its offset from the own one.
    let sums = if is_root { Buffer::Output } else { Buffer::Scratch };
    let slots = if shape.prologue { nranks } else { circle.partials().max(subtree(me, nranks)) };
    if !is_root {
        builder.scratch(slots);
    }
    let mut first = Buffer::Input;
    if shape.prologue {
        let (src, dst) = (circle.row(Buffer::Input, 0, nranks), circle.row(sums, 0, nranks));
        builder.push(lane, Action::Copy { src, dst, start: true, finish: false });
        first = sums;
    }
    circle.reduce_scatter(&mut builder, lane, first, sums, circle.row(sums, 0, 1));
    // A subtree's results may land on sums that were sent above: a chunk's result contains this rank's part, so that part
    // has been received.
    for (offset, size) in children(me, nranks) {
        let dst = circle.row(sums, offset, offset + size);
        builder.push(lane, Action::Recv { from: circle.rank_at(offset), channel: 0, dst });
    }
    if !is_root {
        let src = circle.row(sums, 0, subtree(me, nranks));
        builder.push(lane, Action::Send { to: circle.rank_before(to_parent(me)), channel: 0, src });
    }
    builder.plan()
}
