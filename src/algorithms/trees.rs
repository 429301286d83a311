//! Overlapped trees: sums go up a tree while results already come down it, for all-reduce, reduce and broadcast.
//!
//! A plan is written for one segment; segments follow one another up the tree, and each goes down as soon as its sum has reached the
//! root, on the links' other direction. A rank has a lane for each child and one for what comes down, so no direction waits for
//! another. The second child's sum of a segment waits for the first one's, which keeps both links busy, and
//! operands stay in the order of ranks. `two_trees` cuts each block into two chunks and sends each along a tree of its own, in which
//! leaves are those who have children in the other ([`forest`]): all ranks send and receive about as much.
//! With a root (reduce, broadcast) the two trees are of all other ranks, and the root is above both.
//! Source: C-Cube (Jo, Son and Kim, HPCA 2023), section III-C; Sanders, Speck and Träff, 2009.
//!
//! Steps: `2 floor(log2 p)` messages from the first send to the last receive, half of that with a root. Bytes: with one tree a rank
//! receives up to two vectors from its children and one from its parent; with two trees about one each way.
//!
//! ```text
//! one_tree, all-reduce, p = 4, two segments a and b (root: rank 3)
//!   step 1: a: 0 -> 1                       step 4: b: 1 -> 3   a: 3 -> 1
//!   step 2: a: 2 -> 1   b: 0 -> 1           step 5: b: 3 -> 1   a: 1 -> 0, 1 -> 2
//!   step 3: a: 1 -> 3   b: 2 -> 1           step 6: b: 1 -> 0, 1 -> 2
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, own, Builder};
use super::forest::{self, TreeNode, Which};
use super::needs::{InnerNeeds, Needs};
use super::packing::{self, LinkTree};
use super::Algorithm;
use crate::plan::{Action, Channel, Collective, OperandOrder, Plan, Shape, Span, StepRef};
use crate::topo::links::NodeLinks;
use crate::topo::Rank;
use std::sync::Arc;

const COLLECTIVES: &[Collective] = &[Collective::AllReduce, Collective::Reduce, Collective::Broadcast];

/// One tree.
pub const ONE_TREE: Algorithm = Algorithm {
    name: "one_tree",
    text: "a binary tree on which results come down while sums go up",
    collectives: COLLECTIVES,
    is_leveled: false,
    supports: &|_| true,
    build: &|shape, rank| build(shape, rank, ONE_TREE.name, &[Which::First]),
    needs: &needs,
};

/// Two trees, half of each block along each.
pub const TWO_TREES: Algorithm = Algorithm {
    name: "two_trees",
    text: "two such trees, in which the leaves of one have children in the other",
    collectives: COLLECTIVES,
    is_leveled: false,
    supports: &|_| true,
    build: &|shape, rank| build(shape, rank, TWO_TREES.name, &[Which::First, Which::Second]),
    needs: &needs,
};

/// Trees on a node's links.
pub const LINK_TREES: Algorithm = Algorithm {
    name: "link_trees",
    text: "as many such trees as the links of a single node hold, where the machine's file has its links",
    collectives: COLLECTIVES,
    is_leveled: false,
    supports: &|shape| shape.grid.nnodes() == 1 && shape.grid.links().is_some_and(|links| links.is_connected()),
    build: &build_on_links,
    needs: &needs,
};

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    match shape.collective {
        Collective::AllReduce => Needs::new(0, 2),
        Collective::Reduce => Needs::new(1, 1),
        _ => Needs::new(0, 1),
    }
}

fn build(shape: &Shape, rank: Rank, name: &str, trees: &[Which]) -> Plan {
    let nranks = shape.nranks();
    if nranks == 1 {
        return alone(shape, rank, name);
    }
    let mut builder = Builder::new(shape, rank, name, trees.len());
    for (chunk, which) in trees.iter().enumerate() {
        let node = match (shape.collective, trees.len()) {
            (Collective::AllReduce, _) => forest::of_all(*which, nranks, rank),
            (_, 1) => forest::of_all_from(nranks, rank, shape.root),
            _ => forest::below(*which, nranks, rank, shape.root),
        };
        Tree { shape, rank, node: node.into(), chunk }.write(&mut builder);
    }
    builder.plan()
}

/// The trees of a node's links for a shape: with its root, or the roots that make them flattest.
fn packed(links: &NodeLinks, shape: &Shape) -> Arc<Vec<LinkTree>> {
    packing::trees(links, shape.collective.has_root().then_some(shape.root.index()))
}

/// How many trees a node's links hold for a shape, and the depth of the deepest.
pub fn on_links(links: &NodeLinks, shape: &Shape) -> (usize, usize) {
    let trees = packed(links, shape);
    (trees.len().max(1), trees.iter().map(LinkTree::depth).max().unwrap_or(0))
}

/// Into how many chunks the algorithm of this name cuts a block, if it sends each along a tree of its own.
pub fn chunks(name: &str, shape: &Shape) -> u32 {
    match shape.grid.links() {
        _ if name == TWO_TREES.name => 2,
        Some(links) if name == LINK_TREES.name => packing::trees(links, None).len().max(1) as u32,
        _ => 1,
    }
}

fn build_on_links(shape: &Shape, rank: Rank) -> Plan {
    let trees = shape.grid.links().map(|links| packed(links, shape)).unwrap_or_default();
    if trees.is_empty() {
        return alone(shape, rank, LINK_TREES.name);
    }
    let mut builder = Builder::new(shape, rank, LINK_TREES.name, trees.len());
    for (chunk, tree) in trees.iter().enumerate() {
        let of = |at: &usize| tree.parents[*at] == Some(rank.index());
        // Operands stay in the order of ranks as far as the tree is one of consecutive ranks.
        let side = |child: Rank| if child < rank { OperandOrder::IncomingFirst } else { OperandOrder::LocalFirst };
        let mut children: Vec<Rank> = (0..shape.nranks()).filter(of).map(Rank::from_index).collect();
        children.sort_by_key(|&child| if child < rank { (0, u32::MAX - child.0) } else { (1, child.0) });
        let node = Place {
            parent: tree.parents[rank.index()].map(Rank::from_index),
            children: children.into_iter().map(|child| (child, side(child))).collect(),
        };
        Tree { shape, rank, node, chunk }.write(&mut builder);
    }
    builder.plan()
}

/// A rank's place in a tree: who is above it and who below, each with the side on which its operand stands.
struct Place {
    parent: Option<Rank>,
    children: Vec<(Rank, OperandOrder)>,
}

impl From<TreeNode> for Place {
    fn from(node: TreeNode) -> Place {
        let left = node.left.map(|child| (child, OperandOrder::IncomingFirst));
        let right = node.right.map(|child| (child, OperandOrder::LocalFirst));
        Place { parent: node.parent, children: left.into_iter().chain(right).collect() }
    }
}

/// A rank's place in one tree, along which one chunk goes.
struct Tree<'a> {
    shape: &'a Shape,
    rank: Rank,
    node: Place,
    chunk: usize,
}

impl Tree<'_> {
    fn channel(&self) -> Channel {
        self.chunk as Channel
    }

    fn write(&self, builder: &mut Builder) {
        let collective = self.shape.collective;
        let summed = match collective {
            Collective::Broadcast => None,
            _ => self.up(builder),
        };
        if collective != Collective::Reduce {
            self.down(builder, summed);
        }
    }

    /// The chunk where this rank's own input lies: one of the caller's buffers. Only a rank with an output can be in place.
    fn input(&self) -> Span {
        let has_output = self.shape.output_blocks(self.rank) > 0;
        if has_output {
            own(self.shape, self.chunk, 1)
        } else {
            Span::input(self.chunk, 1)
        }
    }

    /// Sums of the subtree go to the parent; the step after which the root has the result.
    fn up(&self, builder: &mut Builder) -> Option<StepRef> {
        let Place { parent, ref children } = self.node;
        let has_sum = !children.is_empty() || self.shape.prologue;
        let sum = if self.shape.output_blocks(self.rank) > 0 {
            Span::output(self.chunk, 1)
        } else if has_sum {
            Span::scratch(builder.scratch(1), 1, self.chunk)
        } else {
            self.input()
        };
        let mut local = self.input();
        let mut lane = None;
        let mut before: Option<StepRef> = None;
        if self.shape.prologue {
            let first = *lane.get_or_insert_with(|| builder.lane());
            let copy = Action::Copy { src: vec![local], dst: vec![sum], start: true, finish: false };
            before = Some(builder.push(first, copy));
            local = sum;
        }
        for (at, &(child, order)) in children.iter().enumerate() {
            // Each child has a lane, in which its next segment may come while the other's is awaited.
            let own_lane = if at == 0 { *lane.get_or_insert_with(|| builder.lane()) } else { builder.lane() };
            let finish = parent.is_none() && at + 1 == children.len();
            let reduce = Action::RecvReduce {
                from: child,
                channel: self.channel(),
                local: vec![local],
                dst: vec![sum],
                order,
                finish,
            };
            let deps: Vec<StepRef> = before.filter(|before| before.lane as usize != own_lane).into_iter().collect();
            before = Some(builder.push_after(own_lane, reduce, &deps));
            (lane, local) = (Some(own_lane), sum);
        }
        if let Some(parent) = parent {
            let lane = lane.unwrap_or_else(|| builder.lane());
            builder.push(lane, Action::Send { to: parent, channel: self.channel(), src: vec![local] });
        }
        before
    }

    /// The result comes from the parent, or is there after a step, and goes to the children.
    fn down(&self, builder: &mut Builder, summed: Option<StepRef>) {
        let result = vec![Span::output(self.chunk, 1)];
        let mut src = result.clone();
        let lane = builder.lane();
        let mut deps: Vec<StepRef> = Vec::new();
        if let Some(parent) = self.node.parent {
            builder.push(lane, Action::Recv { from: parent, channel: self.channel(), dst: result.clone() });
        } else if summed.is_some() {
            deps.extend(summed);
        } else {
            src = vec![self.input()];
        }
        for &(child, _) in &self.node.children {
            builder.push_after(lane, Action::Send { to: child, channel: self.channel(), src: src.clone() }, &deps);
            deps.clear();
        }
        if self.node.parent.is_none() && summed.is_none() {
            builder.copy(src, result, false, false);
        }
    }
}
