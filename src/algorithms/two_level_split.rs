//! Two levels in which each block leaves its node over all rails: for blocks of which one is far above the mean.
//!
//! `two_level` sends a block over its own rank's rail, so the longest block is as slow as one NIC. Here the ranks of a node
//! first gather the node's blocks, which all of them need anyway; then rail `j` carries part `j` of every block of a node,
//! and the node gathers the parts that its rails have brought. Whatever the sizes of the blocks are, all NICs of a node
//! carry the same.
//!
//! Rounds between nodes are the rail algorithm's. Bytes over each NIC: of a node with `k` of them `1/k` of what goes out of or
//! into it. Inside a node as many bytes as in `two_level`, in two rounds.
//!
//! ```text
//! all-gather on 2 nodes of 2:          rank 0      rank 1   |  rank 2      rank 3
//! own block, of two parts                 Aa          Bb    |     Cc          Dd
//! node 0: 0 and 1, node 1: 2 and 3     Aa Bb       Aa Bb    |  Cc Dd       Cc Dd
//! rail 0: first parts, rail 1: second  Aa Bb C D   Aa Bb c d|  Cc Dd A B   Cc Dd a b
//! node: the other nodes' parts         AaBbCcDd    AaBbCcDd |  AaBbCcDd    AaBbCcDd
//! ```
#![forbid(unsafe_code)]

use super::builder::Builder;
use super::needs::{InnerNeeds, Needs};
use super::two_level::{has_levels, GridView};
use super::Algorithm;
use crate::plan::{Action, Collective, LinkLevel, Plan, Shape, Span, Spans};
use crate::topo::{NodeId, Rank};

/// Two levels, each block over all rails of its node.
pub const TWO_LEVEL_SPLIT: Algorithm = Algorithm {
    name: "two_level_split",
    text: "two levels in which each block leaves over all rails of its node, for blocks of which one is long",
    collectives: &[Collective::AllGather],
    is_leveled: true,
    supports: &has_levels,
    build: &all_gather,
    needs: &needs,
};

/// The most that a rank of any node needs.
fn needs(shape: &Shape, inner: &InnerNeeds<'_>) -> Needs {
    let (all, nodes, nrails) = (shape.nranks(), shape.grid.nnodes(), shape.grid.nrails());
    let on_rail = inner(LinkLevel::Rail, Collective::AllGather, nodes);
    let of = |size: usize| {
        let rails = nrails.div_ceil(size);
        let call = if size > 1 { inner(LinkLevel::Node, Collective::AllGather, size) } else { Needs::default() };
        // The own block, and the parts of other nodes' blocks that came over the rank's rails.
        let blocks = 1 + ((all - size) * rails).div_ceil(nrails);
        Needs::new(call.scratch * blocks + on_rail.scratch * rails, call.sent * blocks)
    };
    shape.grid.node_ids().map(|node| of(shape.grid.members(node).len())).fold(Needs::default(), Needs::max)
}

fn all_gather(shape: &Shape, rank: Rank) -> Plan {
    let (view, grid) = (GridView::new(shape, rank), &shape.grid);
    let parts = grid.nrails();
    let mut builder = Builder::new(shape, rank, "two_level_split", parts);
    let whole = |block: Rank| vec![Span::output(block.index() * parts, parts)];
    let of_node = |node: NodeId, part: usize| -> Spans {
        grid.members(node).iter().map(|block| Span::output(block.index() * parts + part, 1)).collect()
    };
    let mine = |start: usize, len: usize| match shape.in_place {
        true => Span::output(rank.index() * parts + start, len),
        false => Span::input(start, len),
    };
    let alone = view.members().len() == 1;
    let first_lane = builder.lane();
    let mut ready = Vec::new();
    if !alone {
        let dst = view.members().iter().map(|&member| whole(member)).collect();
        let src = vec![vec![mine(0, parts)]];
        let call = view.call(Collective::AllGather, LinkLevel::Node, view.members().to_vec(), src, dst);
        ready.push(builder.push(first_lane, Action::Call(call)));
    }
    let mut rails_done = Vec::new();
    for rail in 0..grid.nrails() {
        // One lane for each rail, on every rank: channels follow from it.
        let lane = builder.lane();
        if grid.owner(view.node(), rail) != rank {
            continue;
        }
        let dst = grid.node_ids().map(|node| of_node(node, rail)).collect();
        let src = if alone { vec![mine(rail, 1)] } else { of_node(view.node(), rail) };
        let call = view.call(Collective::AllGather, LinkLevel::Rail, grid.rail(rail), vec![src], dst);
        rails_done.push(builder.push_after(lane, Action::Call(call), &ready));
    }
    let last_lane = builder.lane();
    if !alone {
        let others = || grid.node_ids().filter(|&node| node != view.node());
        let brought = |member: Rank| -> Spans {
            view.rails_of(member)
                .into_iter()
                .flat_map(|rail| others().flat_map(move |node| of_node(node, rail)))
                .collect()
        };
        let dst = view.members().iter().map(|&member| brought(member)).collect();
        let src = vec![brought(rank)];
        let call = view.call(Collective::AllGather, LinkLevel::Node, view.members().to_vec(), src, dst);
        builder.push_after(last_lane, Action::Call(call), &rails_done);
    }
    builder.plan()
}

#[cfg(test)]
mod tests {
    use crate::algorithms::{build, Choice};
    use crate::plan::{Action, Buffer, Collective, Shape};
    use crate::topo::{Grid, Rank};
    use std::sync::Arc;

    /// Chunks of each block that each rank sends to other nodes.
    fn leaving(grid: &Grid, rail: &str) -> Vec<Vec<usize>> {
        let grid = Arc::new(grid.clone());
        let shape = Shape::new(Collective::AllGather, grid.clone());
        let of = |rank: Rank| {
            let plan = build(&Choice::leveled("two_level_split", "direct", rail), &shape, rank).unwrap();
            let parts = plan.chunks_per_block as usize;
            let mut sent = vec![0; grid.nranks()];
            for step in plan.lanes.iter().flat_map(|lane| &lane.steps) {
                let Action::Send { to, src, .. } = &step.action else { continue };
                for span in src.iter().filter(|_| grid.node(*to) != grid.node(rank)) {
                    assert_eq!(span.buffer, Buffer::Output, "what leaves has been gathered");
                    (span.start..span.start + span.len).for_each(|chunk| sent[chunk as usize / parts] += 1);
                }
            }
            sent
        };
        (0..grid.nranks()).map(Rank::from_index).map(of).collect()
    }

    #[test]
    fn each_rank_of_a_node_sends_one_part_of_each_of_its_node_s_blocks() {
        for rail in ["ring", "log", "direct"] {
            assert_eq!(
                leaving(&Grid::blocks(&[2, 2]), rail),
                [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]],
                "{rail}"
            );
        }
    }
}
