//! Two levels in which each block leaves its node over all rails of it: for collectives with a root, and for blocks of which one is
//! far above the mean.
//!
//! `two_level` sends a block over its own rank's rail, so the longest block, and a root's, is as slow as one NIC. Here rail `j` carries
//! part `j` of every block, and all NICs of a node carry the same.
//!
//! *All-gather*: the ranks of a node first gather the node's blocks, which all of them need anyway; rails; the node gathers the parts
//! that its rails have brought. *Broadcast*: the root's node scatters the parts over its ranks; each rail broadcasts its part; every
//! node gathers the parts. *Reduce* is the mirror image: every node reduce-scatters, each rail reduces its part to the root's
//! node, which gathers. The form with a root is van de Geijn's inside the node and any algorithm between nodes, on vectors `k` times as
//! short (Thakur, Rabenseifner and Gropp, 2005, section 3).
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
//!
//! broadcast of Aa by rank 0
//! node 0: scatter                         Aa           a    |
//! rail 0: first part, rail 1: second      Aa           a    |     A            a
//! each node: all-gather                   Aa          Aa    |     Aa          Aa
//! ```
#![forbid(unsafe_code)]

use super::builder::{own, Builder};
use super::needs::{InnerNeeds, Needs};
use super::two_level::{has_levels, GridView};
use super::Algorithm;
use crate::plan::{Action, Call, Collective, LinkLevel, Plan, Shape, Span, Spans};
use crate::topo::{NodeId, Rank};

/// Two levels, each block over all rails of its node.
pub const TWO_LEVEL_SPLIT: Algorithm = Algorithm {
    name: "two_level_split",
    text: "two levels in which each block leaves over all rails of its node: for roots, and for blocks of which one is long",
    collectives: &[Collective::AllGather, Collective::Broadcast, Collective::Reduce],
    is_leveled: true,
    supports: &has_levels,
    build: &|shape, rank| match shape.collective {
        Collective::AllGather => all_gather(shape, rank),
        Collective::Broadcast => broadcast(shape, rank),
        _ => reduce(shape, rank),
    },
    needs: &needs,
};

/// The most that a rank of any node needs.
fn needs(shape: &Shape, inner: &InnerNeeds<'_>) -> Needs {
    let of = |size: usize| match shape.collective {
        Collective::AllGather => needs_of_gather(shape, inner, size),
        collective => needs_with_root(shape, collective, inner, size),
    };
    shape.grid.node_ids().map(|node| of(shape.grid.members(node).len())).fold(Needs::default(), Needs::max)
}

/// All-gather's, on a node of so many ranks.
fn needs_of_gather(shape: &Shape, inner: &InnerNeeds<'_>, size: usize) -> Needs {
    let (all, nodes, nrails) = (shape.nranks(), shape.grid.nnodes(), shape.grid.nrails());
    let on_rail = inner(LinkLevel::Rail, Collective::AllGather, nodes);
    let rails = nrails.div_ceil(size);
    let call = if size > 1 { inner(LinkLevel::Node, Collective::AllGather, size) } else { Needs::default() };
    // The own block, and the parts of other nodes' blocks that came over the rank's rails.
    let blocks = 1 + ((all - size) * rails).div_ceil(nrails);
    Needs::new(call.scratch * blocks + on_rail.scratch * rails, call.sent * blocks)
}

/// That of broadcast and reduce. Calls handle the vector's parts: one for each rail that the rank serves.
fn needs_with_root(shape: &Shape, collective: Collective, inner: &InnerNeeds<'_>, size: usize) -> Needs {
    let (nodes, nrails) = (shape.grid.nnodes(), shape.grid.nrails());
    let rails = nrails.div_ceil(size);
    let part = |blocks: usize| (blocks * rails).div_ceil(nrails);
    let on_node = |collective| if size > 1 { inner(LinkLevel::Node, collective, size) } else { Needs::default() };
    let (first, last, kept) = match collective {
        Collective::Broadcast => (Collective::Scatter, Collective::AllGather, 0),
        _ => (Collective::ReduceScatter, Collective::Gather, usize::from(shape.prologue) + part(1)),
    };
    let (first, last) = (on_node(first), on_node(last));
    let scratch = kept + part(first.scratch + last.scratch) + part(inner(LinkLevel::Rail, collective, nodes).scratch);
    Needs::new(scratch, part(first.sent + last.sent))
}

fn all_gather(shape: &Shape, rank: Rank) -> Plan {
    let (view, grid) = (GridView::new(shape, rank), &shape.grid);
    let parts = grid.nrails();
    let mut builder = Builder::new(shape, rank, TWO_LEVEL_SPLIT.name, parts);
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

/// What the ranks of a call with a root have in common here: whose node it is, and how members divide the vector.
struct Rooted<'a> {
    shape: &'a Shape,
    view: GridView<'a>,
    root_node: NodeId,
}

impl Rooted<'_> {
    fn new(shape: &Shape, rank: Rank) -> Rooted<'_> {
        Rooted { shape, view: GridView::new(shape, rank), root_node: shape.grid.node(shape.root) }
    }

    fn is_alone(&self) -> bool {
        self.view.members().len() == 1
    }

    fn is_at_root(&self) -> bool {
        self.view.node() == self.root_node
    }

    /// The parts of a member's rails, where `place` says each is.
    fn parts(&self, member: Rank, place: &dyn Fn(usize) -> Span) -> Spans {
        self.view.rails_of(member).into_iter().map(place).collect()
    }

    /// For each member of the node the parts of its rails.
    fn parts_of_all(&self, place: &dyn Fn(usize) -> Span) -> Vec<Spans> {
        self.view.members().iter().map(|&member| self.parts(member, place)).collect()
    }

    /// A call inside the node; its root, if it has one, is the vector's.
    fn on_node(&self, collective: Collective, src: Vec<Spans>, dst: Vec<Spans>) -> Call {
        let root = self.view.members().iter().position(|&member| member == self.shape.root).unwrap_or(0);
        let root = if collective.has_root() { root } else { 0 };
        Call { root, ..self.view.call(collective, LinkLevel::Node, self.view.members().to_vec(), src, dst) }
    }

    /// A call of a rail, whose root is on the vector's root's node.
    fn on_rail(&self, rail: usize, src: Vec<Spans>, dst: Vec<Spans>) -> Call {
        let (collective, group) = (self.shape.collective, self.shape.grid.rail(rail));
        Call { root: self.root_node.index(), ..self.view.call(collective, LinkLevel::Rail, group, src, dst) }
    }
}

/// Chunks of a rail's part: algorithms between nodes divide it as often.
fn chunks_of_part(shape: &Shape) -> usize {
    shape.grid.nnodes()
}

fn broadcast(shape: &Shape, rank: Rank) -> Plan {
    let (of, grid) = (Rooted::new(shape, rank), &shape.grid);
    let (nrails, each) = (grid.nrails(), chunks_of_part(shape));
    let mut builder = Builder::new(shape, rank, TWO_LEVEL_SPLIT.name, nrails * each);
    let output = |rail: usize| Span::output(rail * each, each);
    let source = |rail: usize| own(shape, rail * each, each);
    let scatter_lane = builder.lane();
    let mut ready = Vec::new();
    if of.is_at_root() && !of.is_alone() {
        let src = if rank == shape.root { of.parts_of_all(&source) } else { Vec::new() };
        let call = of.on_node(Collective::Scatter, src, vec![of.parts(rank, &output)]);
        ready.push(builder.push(scatter_lane, Action::Call(call)));
    }
    let mut done = ready.clone();
    for rail in 0..nrails {
        // One lane for each rail, on every rank: channels follow from it.
        let lane = builder.lane();
        if grid.owner(of.view.node(), rail) != rank {
            continue;
        }
        let src = match (of.is_at_root(), of.is_alone()) {
            (false, _) => Vec::new(),
            (true, true) => vec![vec![source(rail)]],
            (true, false) => vec![vec![output(rail)]],
        };
        let call = of.on_rail(rail, src, vec![vec![output(rail)]]);
        done.push(builder.push_after(lane, Action::Call(call), &ready));
    }
    let gather_lane = builder.lane();
    if !of.is_alone() {
        let call = of.on_node(Collective::AllGather, vec![of.parts(rank, &output)], of.parts_of_all(&output));
        builder.push_after(gather_lane, Action::Call(call), &done);
    }
    builder.plan()
}

fn reduce(shape: &Shape, rank: Rank) -> Plan {
    let (of, grid) = (Rooted::new(shape, rank), &shape.grid);
    let (nrails, each, is_root) = (grid.nrails(), chunks_of_part(shape), rank == shape.root);
    let chunks = nrails * each;
    let mut builder = Builder::new(shape, rank, TWO_LEVEL_SPLIT.name, chunks);
    let given = |start: usize, len: usize| if is_root { own(shape, start, len) } else { Span::input(start, len) };
    let scaled = if shape.prologue { builder.scratch(chunks) } else { 0 };
    let input = |rail: usize| match shape.prologue {
        true => Span::scratch(scaled + rail * each, each, rail * each),
        false => given(rail * each, each),
    };
    // Only the root has an output. Elsewhere the slot of a part is its rail's place among the rank's own.
    let rails = of.view.rails_of(rank);
    let first = if is_root { 0 } else { builder.scratch(rails.len() * each) };
    let sum = |rail: usize| match rails.iter().position(|&other| other == rail) {
        Some(slot) if !is_root => Span::scratch(first + slot * each, each, rail * each),
        _ => Span::output(rail * each, each),
    };
    let (scale_lane, scatter_lane) = (builder.lane(), builder.lane());
    let mut ready = Vec::new();
    if shape.prologue {
        let (src, dst) = (vec![given(0, chunks)], vec![Span::scratch(scaled, chunks, 0)]);
        ready.push(builder.push(scale_lane, Action::Copy { src, dst, start: true, finish: false }));
    }
    if !of.is_alone() {
        let call = of.on_node(Collective::ReduceScatter, of.parts_of_all(&input), vec![of.parts(rank, &sum)]);
        ready = vec![builder.push_after(scatter_lane, Action::Call(call), &ready)];
    }
    let mut done = ready.clone();
    for rail in 0..nrails {
        let lane = builder.lane();
        if !rails.contains(&rail) {
            continue;
        }
        let src = if of.is_alone() { input(rail) } else { sum(rail) };
        let dst = if of.is_at_root() { vec![vec![sum(rail)]] } else { Vec::new() };
        let call = Call { finish: true, ..of.on_rail(rail, vec![vec![src]], dst) };
        done.push(builder.push_after(lane, Action::Call(call), &ready));
    }
    let gather_lane = builder.lane();
    if of.is_at_root() && !of.is_alone() {
        let dst = if is_root { of.parts_of_all(&|rail| Span::output(rail * each, each)) } else { Vec::new() };
        let call = of.on_node(Collective::Gather, vec![of.parts(rank, &sum)], dst);
        builder.push_after(gather_lane, Action::Call(call), &done);
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

    /// Each part is two chunks on two nodes.
    #[test]
    fn a_root_s_vector_leaves_over_all_rails() {
        for rail in ["ring", "tree"] {
            for (grid, root, expected) in [
                (Grid::blocks(&[2, 2]), 1, vec![2, 2, 0, 0]),
                (Grid::blocks(&[3, 1]), 0, vec![2, 2, 2, 0]),
                // One rank serves all three rails of its node.
                (Grid::blocks(&[1, 3]), 0, vec![6, 0, 0, 0]),
            ] {
                let grid = Arc::new(grid);
                let shape = Shape { root: Rank(root), ..Shape::new(Collective::Broadcast, grid.clone()) };
                let of = |rank: Rank| {
                    let plan = build(&Choice::leveled("two_level_split", "direct", rail), &shape, rank).unwrap();
                    let steps = plan.lanes.iter().flat_map(|lane| &lane.steps);
                    let far = steps.filter_map(|step| match &step.action {
                        Action::Send { to, src, .. } if grid.node(*to) != grid.node(rank) => Some(src.iter()),
                        _ => None,
                    });
                    far.flatten().map(|span| span.len).sum::<u32>()
                };
                let sent: Vec<u32> = (0..grid.nranks()).map(Rank::from_index).map(of).collect();
                assert_eq!(sent, expected, "{rail}, {grid} from {root}");
            }
        }
    }
}
