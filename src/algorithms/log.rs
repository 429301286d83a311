//! Logarithmic all-gather, reduce-scatter and all-reduce, for any number of ranks.
//!
//! *All-gather.* Before the round of reach `d` (1, 2, 4, ...) a rank holds the blocks of the `d` ranks from itself on,
//! cyclically. It sends as many of them as are wanted to the rank `d` before it, and receives those that follow its own
//! from the rank `d` after it. Blocks go straight to their places in rank order, so nothing is rotated afterwards.
//! *Reduce-scatter* is the mirror image: reaches fall, a rank sends its sums for the blocks from `d` on to the rank `d`
//! after it, and adds what comes from the rank `d` before it to those it keeps. Each block's sum flows along a tree that
//! spans all ranks, so every contribution counts once. *All-reduce* is the second and then the first.
//! Sources: Bruck et al., 1997; Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024.
//!
//! Steps a rank: `ceil(log2 p)` messages, twice that for all-reduce. Bytes a rank: `p - 1` blocks, twice that (of `1/p`
//! of the vector) for all-reduce: the least there can be.
//!
//! ```text
//! all-gather, 4 ranks     reach 1: r -> r-1            reach 2: r -> r-2
//!   rank 0:  A . . .        A B . .                      A B C D
//!   rank 1:  . B . .        . B C .                      A B C D
//!   rank 2:  . . C .        . . C D                      A B C D
//!   rank 3:  . . . D        A . . D                      A B C D
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, own, Builder};
use super::needs::{all_or, InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Buffer, Collective, OperandOrder, Plan, Shape, Span, Spans};
use crate::topo::Rank;

/// The logarithmic algorithm.
pub const LOG: Algorithm = Algorithm {
    name: "log",
    text: "ceil(log2 p) rounds for any number of ranks (Bruck; circulant reduce-scatter)",
    collectives: &[Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter],
    is_leveled: false,
    supports: &|_| true,
    build: &build,
    needs: &needs,
};

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    let p = shape.nranks();
    match shape.collective {
        Collective::ReduceScatter => Needs::new(all_or(shape, p.div_ceil(2)), p - 1),
        Collective::AllGather => Needs::new(0, p - 1),
        _ => Needs::new(0, 2),
    }
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    if shape.nranks() == 1 {
        return alone(shape, rank, LOG.name);
    }
    match shape.collective {
        Collective::AllGather => all_gather(shape, rank),
        Collective::ReduceScatter => reduce_scatter(shape, rank),
        _ => all_reduce(shape, rank),
    }
}

fn all_gather(shape: &Shape, rank: Rank) -> Plan {
    let circle = Circle::new(shape.nranks(), rank, Rank(0));
    let mut builder = Builder::new(shape, rank, LOG.name, 1);
    let lane = builder.lane();
    let mine = vec![Span::output(rank.index(), 1)];
    let input = if shape.in_place { mine.clone() } else { vec![Span::input(0, 1)] };
    for reach in reaches(circle.nranks) {
        let (send, recv) = circle.gather_round(reach, &|_| 1, Buffer::Output);
        match send {
            // The first message leaves from the caller's buffer, so that it need not wait for the copy.
            Some(Action::Send { to, channel, .. }) if reach == 1 => {
                builder.push(lane, Action::Send { to, channel, src: input.clone() });
                if !shape.in_place {
                    let (src, dst) = (input.clone(), mine.clone());
                    builder.push(lane, Action::Copy { src, dst, start: false, finish: false });
                }
            }
            send => send.into_iter().for_each(|send| _ = builder.push(lane, send)),
        }
        recv.into_iter().for_each(|recv| _ = builder.push(lane, recv));
    }
    builder.plan()
}

fn reduce_scatter(shape: &Shape, rank: Rank) -> Plan {
    let circle = Circle::new(shape.nranks(), rank, Rank(0));
    let mut builder = Builder::new(shape, rank, LOG.name, 1);
    let lane = builder.lane();
    let first = if shape.prologue {
        builder.scratch(circle.nranks);
        let (src, dst) = (circle.row(Buffer::Input, 0, circle.nranks), circle.row(Buffer::Scratch, 0, circle.nranks));
        builder.push(lane, Action::Copy { src, dst, start: true, finish: false });
        Buffer::Scratch
    } else {
        builder.scratch(circle.partials());
        Buffer::Input
    };
    circle.reduce_scatter(&mut builder, lane, first, Buffer::Scratch, vec![Span::output(0, 1)]);
    builder.plan()
}

fn all_reduce(shape: &Shape, rank: Rank) -> Plan {
    let circle = Circle::new(shape.nranks(), rank, Rank(0));
    let mut builder = Builder::new(shape, rank, LOG.name, circle.nranks);
    let lane = builder.lane();
    let mut first = Buffer::Input;
    if shape.prologue {
        let (src, dst) = (vec![own(shape, 0, circle.nranks)], vec![Span::output(0, circle.nranks)]);
        builder.push(lane, Action::Copy { src, dst, start: true, finish: false });
        first = Buffer::Output;
    }
    let last = vec![Span::output(rank.index(), 1)];
    circle.reduce_scatter(&mut builder, lane, first, Buffer::Output, last);
    // Sums that were sent above are overwritten below without waiting for the sends: the result of a block can only
    // arrive after this rank's part of it did.
    for reach in reaches(circle.nranks) {
        let (send, recv) = circle.gather_round(reach, &|_| 1, Buffer::Output);
        send.into_iter().chain(recv).for_each(|action| _ = builder.push(lane, action));
    }
    builder.plan()
}

/// The reaches of the rounds, rising: all powers of two below `nranks`.
pub fn reaches(nranks: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..nranks.next_power_of_two().trailing_zeros()).map(|round| 1 << round)
}

/// The ranks in a circle, seen from one of them. Position `i` is the rank `i` after the root, cyclically, and block `i`
/// is the one that belongs to it; *offsets* count from the own position.
pub struct Circle {
    /// How many ranks there are.
    pub nranks: usize,
    /// The own position.
    pub me: usize,
    /// The rank at position 0.
    pub root: usize,
}

impl Circle {
    /// The circle seen from `rank`.
    pub fn new(nranks: usize, rank: Rank, root: Rank) -> Circle {
        let me = (rank.index() + nranks - root.index()) % nranks;
        Circle { nranks, me, root: root.index() }
    }

    /// The rank at an offset.
    pub fn rank_at(&self, offset: usize) -> Rank {
        Rank::from_index((self.root + self.me + offset) % self.nranks)
    }

    /// The rank at an offset backwards.
    pub fn rank_before(&self, offset: usize) -> Rank {
        self.rank_at(self.nranks - offset)
    }

    /// The blocks with offsets `from..to`: in `Scratch` at the slot of their offset, elsewhere at their own place.
    pub fn row(&self, buffer: Buffer, from: usize, to: usize) -> Spans {
        let start = self.me + from;
        let wrap = self.nranks.clamp(start, self.me + to);
        [(start, wrap), (wrap, self.me + to)]
            .into_iter()
            .filter(|(start, end)| start < end)
            .map(|(start, end)| match buffer {
                Buffer::Scratch => Span::scratch(start - self.me, end - start, start % self.nranks),
                _ => Span::user(buffer, start % self.nranks, end - start),
            })
            .collect()
    }

    /// What one round of the all-gather sends and receives. `held(position)` says how many blocks, from its own on, the
    /// rank at a position holds before the first round: those it is not sent.
    pub fn gather_round(
        &self,
        reach: usize,
        held: &dyn Fn(usize) -> usize,
        source: Buffer,
    ) -> (Option<Action>, Option<Action>) {
        let end = (2 * reach).min(self.nranks);
        let to = self.rank_before(reach);
        let wanted_from = held((self.me + self.nranks - reach) % self.nranks).max(reach);
        let send = (wanted_from < end).then(|| Action::Send {
            to,
            channel: 0,
            src: self.row(source, wanted_from - reach, end - reach),
        });
        let missing_from = held(self.me).max(reach);
        let recv = (missing_from < end).then(|| Action::Recv {
            from: self.rank_at(reach),
            channel: 0,
            dst: self.row(Buffer::Output, missing_from, end),
        });
        (send, recv)
    }

    /// How many partial sums [`Circle::reduce_scatter`] holds at once beside the caller's input.
    pub fn partials(&self) -> usize {
        let top = reaches(self.nranks).next_back().unwrap_or(0);
        if top == 1 {
            return 0;
        }
        (top / 2).max(self.nranks - top)
    }

    /// Writes a reduce-scatter. A block lies in `first` until this rank has added something to it, then in `partial`;
    /// the last sum, of the own block, is finished and goes to `last`.
    pub fn reduce_scatter(&self, builder: &mut Builder, lane: usize, first: Buffer, partial: Buffer, last: Spans) {
        let mut touched = if first == partial { self.nranks } else { 0 };
        for reach in reaches(self.nranks).rev() {
            let end = (2 * reach).min(self.nranks);
            let at = |from: usize, to: usize| {
                let cut = touched.clamp(from, to);
                let mut spans = if from < cut { self.row(partial, from, cut) } else { Vec::new() };
                spans.extend(self.row(first, cut, to));
                spans
            };
            builder.push(lane, Action::Send { to: self.rank_at(reach), channel: 0, src: at(reach, end) });
            let count = end - reach;
            let is_last = reach == 1;
            builder.push(
                lane,
                Action::RecvReduce {
                    from: self.rank_before(reach),
                    channel: 0,
                    local: at(0, count),
                    dst: if is_last { last.clone() } else { self.row(partial, 0, count) },
                    order: OperandOrder::LocalFirst,
                    finish: is_last,
                },
            );
            touched = touched.max(count);
        }
    }
}
