//! Two-step all-to-all: inside the nodes, then between them, for any placement and uneven nodes.
//!
//! What a node has for one remote rank leaves in one message, sent by the local rank that *serves* the receiver: the owner,
//! on the sending node, of the receiver's rail. Step 1, inside the node: every rank hands each local rank its own block
//! and the blocks for the ranks that one serves. Step 2, between nodes: every rank sends each rank it serves one message
//! with a block of every rank of the node, which lands in the receiver's output. So a message between nodes carries as
//! many blocks as the sending node has ranks, and on even nodes each rank talks to its own rail only.
//! Source: message combining as in NCCL's PXN ("Doubling all2all Performance with NCCL 2.12", NVIDIA, 2022).
//!
//! Steps a rank, on `n` nodes of `g` ranks: `g - 1` messages inside the node, `n - 1` between nodes (`p - g` without
//! combining). Blocks: `n(g - 1)` inside the node, `p - g` between nodes.
//!
//! ```text
//! 4 ranks on nodes {0 1} {2 3}; "02" is rank 0's block for rank 2
//!            step 1               step 2              result
//!   rank 0:  01 03 -> rank 1      02 12 -> rank 2     00 10 20 30
//!   rank 1:  10 12 -> rank 0      03 13 -> rank 3     01 11 21 31
//!   rank 2:  23 21 -> rank 3      20 30 -> rank 0     02 12 22 32
//!   rank 3:  32 30 -> rank 2      21 31 -> rank 1     03 13 23 33
//! ```
//!
//! Where blocks differ in size and each rank knows its own only, an all-to-all of their lengths comes before, by this very plan: a slot
//! of scratch holds the length of the block that it holds afterwards.
#![forbid(unsafe_code)]

use super::builder::{alone, joined, Builder};
use super::needs::{InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::blocks::BlockTable;
use crate::plan::{Action, Collective, Plan, Shape, Span, Spans};
use crate::topo::{Grid, NodeId, Rank};
use std::sync::Arc;

/// Two-step all-to-all.
pub const TWO_STEP: Algorithm = Algorithm {
    name: "two_step",
    text: "all-to-all inside the nodes, then one message per node and receiver between them",
    collectives: &[Collective::AllToAll],
    is_leveled: false,
    supports: &|_| true,
    build: &build,
    needs: &needs,
};

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    let sizes: Vec<usize> = shape.grid.node_ids().map(|node| shape.grid.members(node).len()).collect();
    let scratch = sizes.iter().enumerate().map(|(node, &size)| {
        let others = sizes.iter().enumerate().filter(|&(other, _)| other != node);
        (size - 1) * others.map(|(_, other)| other.div_ceil(size)).sum::<usize>()
    });
    Needs::new(scratch.max().unwrap_or(0), shape.nranks() - 1)
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    if shape.nranks() == 1 {
        return alone(shape, rank, TWO_STEP.name);
    }
    let place = Place { grid: &shape.grid, rank };
    let mut builder = Builder::new(shape, rank, TWO_STEP.name, 1);
    let lane = builder.lane();
    let served: Vec<Vec<Rank>> = (1..place.grid.nnodes()).map(|step| place.served(rank, place.node_at(step))).collect();
    let nserved: usize = served.iter().map(Vec::len).sum();
    builder.scratch(nserved * (place.members().len() - 1));
    for step in 1..place.members().len() {
        push_local(&mut builder, lane, &place, step, nserved);
    }
    let mut before = 0;
    for (served, step) in served.iter().zip(1..) {
        for (i, &to) in served.iter().enumerate() {
            builder.push(lane, Action::Send { to, channel: 0, src: place.collected(to, before + i, nserved) });
        }
        before += served.len();
        let node = place.node_before(step);
        let from = place.grid.owner(node, place.grid.local(rank));
        let dst = place.grid.members(node).iter().map(|member| Span::output(member.index(), 1));
        builder.push(lane, Action::Recv { from, channel: 0, dst: joined(dst) });
    }
    let own = rank.index();
    builder.copy(vec![Span::input(own, 1)], vec![Span::output(own, 1)], false, false);
    builder.plan()
}

/// One exchange inside the node: to the member `step` after this one, from the member `step` before it. The sender's blocks
/// for the ranks this rank serves become one row of scratch, in the order in which they are sent on.
fn push_local(builder: &mut Builder, lane: usize, place: &Place, step: usize, nserved: usize) {
    let members = place.members();
    let local = place.grid.local(place.rank);
    let to = members[(local + step) % members.len()];
    let from = members[(local + members.len() - step) % members.len()];
    let src = std::iter::once(to).chain(place.handed(to)).map(|block| Span::input(block.index(), 1));
    builder.push(lane, Action::Send { to, channel: 0, src: joined(src) });
    let mut dst = vec![Span::output(from.index(), 1)];
    dst.extend(joined(place.handed(place.rank).enumerate().map(|(index, to)| place.held(from, to, index, nserved))));
    builder.push(lane, Action::Recv { from, channel: 0, dst });
}

/// The tables of all ranks with what each hands on, where the sizes of all blocks are at hand.
pub fn handing(tables: &[Arc<BlockTable>], grid: &Grid) -> Vec<Arc<BlockTable>> {
    let of = |(rank, table): (usize, &Arc<BlockTable>)| {
        let handed = handed(grid, Rank::from_index(rank)).into_iter();
        Arc::new(table.handing(handed.map(|[from, to]| tables[from.index()].input()[to.index()].count).collect()))
    };
    tables.iter().enumerate().map(of).collect()
}

/// The blocks that a rank hands on, as pairs of sender and receiver, by their slots of scratch.
fn handed(grid: &Grid, rank: Rank) -> Vec<[Rank; 2]> {
    let place = Place { grid, rank };
    let others = place.members().iter().filter(|&&member| member != rank);
    others.flat_map(|&member| place.handed(rank).map(move |to| [member, to])).collect()
}

/// A rank among the nodes.
struct Place<'a> {
    grid: &'a Grid,
    rank: Rank,
}

impl Place<'_> {
    fn members(&self) -> &[Rank] {
        self.grid.members(self.grid.node(self.rank))
    }

    /// The node `step` after this one, cyclically.
    fn node_at(&self, step: usize) -> NodeId {
        NodeId(((self.grid.node(self.rank).index() + step) % self.grid.nnodes()) as u32)
    }

    /// The node `step` before this one, cyclically.
    fn node_before(&self, step: usize) -> NodeId {
        self.node_at(self.grid.nnodes() - step)
    }

    /// The ranks of a remote node to which `server`, a rank of this node, sends: those whose local rank is a rail that
    /// `server` owns here.
    fn served(&self, server: Rank, node: NodeId) -> Vec<Rank> {
        let rails = self.grid.local(server)..self.grid.members(node).len();
        rails.step_by(self.members().len()).map(|rail| self.grid.members(node)[rail]).collect()
    }

    /// All ranks to which `server`, a rank of this node, sends for the node, in the order in which it does.
    fn handed(&self, server: Rank) -> impl Iterator<Item = Rank> + '_ {
        (1..self.grid.nnodes()).flat_map(move |step| self.served(server, self.node_at(step)))
    }

    /// Which row of scratch holds what another rank of the node has handed over.
    fn slot(&self, member: Rank) -> usize {
        let (theirs, mine) = (self.grid.local(member), self.grid.local(self.rank));
        theirs - usize::from(theirs > mine)
    }

    /// The blocks of all ranks of this node for `to`, the served rank of number `index`.
    fn collected(&self, to: Rank, index: usize, nserved: usize) -> Spans {
        let spans = self.members().iter().map(|&member| match member == self.rank {
            true => Span::input(to.index(), 1),
            false => self.held(member, to, index, nserved),
        });
        joined(spans)
    }

    /// Where the block of another rank of this node for `to`, the served rank of number `index`, is kept.
    fn held(&self, member: Rank, to: Rank, index: usize, nserved: usize) -> Span {
        let pair = member.index() * self.grid.nranks() + to.index();
        Span::scratch(self.slot(member) * nserved + index, 1, pair)
    }
}
