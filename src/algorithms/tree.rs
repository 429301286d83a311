//! Binomial trees: broadcast, reduce, gather and scatter, for any number of ranks and any root.
//!
//! Positions count from the root, cyclically. Position `v` is the parent of `v + 1`, `v + 2`, `v + 4`, ... below the lowest
//! set bit of `v` (for the root: below `p`), so the subtree of `v` is the positions from `v` on, as many as that bit
//! says. Broadcast and scatter serve the largest subtree first, reduce and gather the smallest. Inner ranks of gather and
//! scatter keep their subtree's blocks in scratch; the root reads and writes the caller's buffers directly.
//! Source: binomial trees as in Thakur, Rabenseifner and Gropp, 2005, section 3.
//!
//! Steps: `ceil(log2 p)` rounds; a rank sends or receives one message per child and one for its parent. Bytes: a message is
//! the vector (broadcast, reduce), or the blocks of the subtree (gather, scatter).
//!
//! ```text
//! positions, p = 4       broadcast                 reduce
//!      0                 round 1: 0 -> 2           round 1: 1 -> 0, 3 -> 2
//!     / \                round 2: 0 -> 1, 2 -> 3   round 2: 2 -> 0
//!    2   1
//!    |                   gather: 3 -> 2 {3}, 1 -> 0 {1}, 2 -> 0 {2 3}
//!    3                   scatter: 0 -> 2 {2 3}, 0 -> 1 {1}, 2 -> 3 {3}
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, joined, own, Builder};
use super::log::{reaches, Circle};
use super::needs::{InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Buffer, Collective, OperandOrder, Plan, Shape, Span, Spans};
use crate::topo::Rank;

/// Binomial trees.
pub const TREE: Algorithm = Algorithm {
    name: "tree",
    text: "a binomial tree of ceil(log2 p) rounds",
    collectives: &[Collective::Broadcast, Collective::Reduce, Collective::Gather, Collective::Scatter],
    is_leveled: false,
    supports: &|_| true,
    build: &build,
    needs: &needs,
};

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    // The largest subtree below the root has half of the ranks.
    let half = shape.nranks().div_ceil(2);
    match shape.collective {
        Collective::Gather => Needs::new(half, half),
        Collective::Scatter => Needs::new(half, shape.nranks() - 1),
        Collective::Reduce => Needs::new(1, 1),
        _ => Needs::new(0, 1),
    }
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    let nranks = shape.nranks();
    if nranks == 1 {
        return alone(shape, rank, TREE.name);
    }
    let circle = Circle::new(nranks, rank, shape.root);
    let node = Node { reach: subtree(circle.me, nranks), circle };
    let mut builder = Builder::new(shape, rank, TREE.name, 1);
    match shape.collective {
        Collective::Broadcast => node.broadcast(shape, &mut builder),
        Collective::Reduce => node.reduce(shape, &mut builder),
        Collective::Gather => node.gather(&mut builder),
        _ => node.scatter(&mut builder),
    }
    builder.plan()
}

/// How many positions, from itself on, the subtree of a position covers.
pub fn subtree(position: usize, nranks: usize) -> usize {
    if position == 0 {
        return nranks;
    }
    (1 << position.trailing_zeros()).min(nranks - position)
}

/// The offset from a position (not the root's) back to its parent.
pub fn to_parent(position: usize) -> usize {
    1 << position.trailing_zeros()
}

/// The offsets from a position to its children, nearest (and smallest) first, and the sizes of their subtrees.
pub fn children(position: usize, nranks: usize) -> impl DoubleEndedIterator<Item = (usize, usize)> {
    reaches(subtree(position, nranks)).map(move |offset| (offset, subtree(position + offset, nranks)))
}

/// One rank of the tree.
struct Node {
    circle: Circle,
    reach: usize,
}

impl Node {
    fn is_root(&self) -> bool {
        self.circle.me == 0
    }

    fn parent(&self) -> Rank {
        self.circle.rank_before(to_parent(self.circle.me))
    }

    fn children(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        children(self.circle.me, self.circle.nranks)
    }

    fn broadcast(&self, shape: &Shape, builder: &mut Builder) {
        let lane = builder.lane();
        let output = vec![Span::output(0, 1)];
        let mut src = output.clone();
        if self.is_root() {
            src = vec![own(shape, 0, 1)];
        } else {
            builder.push(lane, Action::Recv { from: self.parent(), channel: 0, dst: output.clone() });
        }
        for (offset, _) in self.children().rev() {
            builder.push(lane, Action::Send { to: self.circle.rank_at(offset), channel: 0, src: src.clone() });
        }
        if self.is_root() {
            builder.copy(src, output, false, false);
        }
    }

    fn reduce(&self, shape: &Shape, builder: &mut Builder) {
        let lane = builder.lane();
        // Only the root has an output, and only its buffers can overlap.
        let input = if self.is_root() { own(shape, 0, 1) } else { Span::input(0, 1) };
        let sum = if self.is_root() { Span::output(0, 1) } else { Span::scratch(0, 1, 0) };
        if !self.is_root() && (self.reach > 1 || shape.prologue) {
            builder.scratch(1);
        }
        let mut local = input;
        if shape.prologue {
            builder.push(lane, Action::Copy { src: vec![input], dst: vec![sum], start: true, finish: false });
            local = sum;
        }
        let nchildren = self.children().count();
        for (i, (offset, _)) in self.children().enumerate() {
            builder.push(
                lane,
                Action::RecvReduce {
                    from: self.circle.rank_at(offset),
                    channel: 0,
                    local: vec![local],
                    dst: vec![sum],
                    order: OperandOrder::LocalFirst,
                    finish: self.is_root() && i + 1 == nchildren,
                },
            );
            local = sum;
        }
        if !self.is_root() {
            builder.push(lane, Action::Send { to: self.parent(), channel: 0, src: vec![local] });
        }
    }

    /// Blocks `from..to` of the subtree, counted from the own one: in the caller's `whole` buffer on the root, else in
    /// scratch, except for the own one, which is in its buffer `single`.
    fn blocks(&self, whole: Buffer, single: Buffer, from: usize, to: usize) -> Spans {
        if self.is_root() {
            let circle = &self.circle;
            let start = circle.root + from;
            let wrap = circle.nranks.clamp(start, circle.root + to);
            let runs = [(start, wrap), (wrap, circle.root + to)].into_iter().filter(|(start, end)| start < end);
            return runs.map(|(start, end)| Span::user(whole, start % circle.nranks, end - start)).collect();
        }
        let mut spans = Vec::new();
        if from == 0 {
            spans.push(Span::user(single, 0, 1));
        }
        let first = from.max(1);
        if first < to {
            let slot = |offset: usize| Span::scratch(offset - 1, 1, self.circle.rank_at(offset).index());
            spans.extend(joined((first..to).map(slot)));
        }
        spans
    }

    fn gather(&self, builder: &mut Builder) {
        let lane = builder.lane();
        let blocks = |from, to| self.blocks(Buffer::Output, Buffer::Input, from, to);
        if self.is_root() {
            builder.copy(vec![Span::input(0, 1)], blocks(0, 1), false, false);
        } else {
            builder.scratch(self.reach - 1);
        }
        for (offset, size) in self.children() {
            let from = self.circle.rank_at(offset);
            builder.push(lane, Action::Recv { from, channel: 0, dst: blocks(offset, offset + size) });
        }
        if !self.is_root() {
            builder.push(lane, Action::Send { to: self.parent(), channel: 0, src: blocks(0, self.reach) });
        }
    }

    fn scatter(&self, builder: &mut Builder) {
        let lane = builder.lane();
        let blocks = |from, to| self.blocks(Buffer::Input, Buffer::Output, from, to);
        if !self.is_root() {
            builder.scratch(self.reach - 1);
            builder.push(lane, Action::Recv { from: self.parent(), channel: 0, dst: blocks(0, self.reach) });
        }
        for (offset, size) in self.children().rev() {
            let to = self.circle.rank_at(offset);
            builder.push(lane, Action::Send { to, channel: 0, src: blocks(offset, offset + size) });
        }
        if self.is_root() {
            builder.copy(blocks(0, 1), vec![Span::output(0, 1)], false, false);
        }
    }
}
