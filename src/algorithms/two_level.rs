//! Two levels: rails between the nodes, and inside each node a collective over its ranks.
//!
//! Ranks of equal local index form a *rail*; all rails work at once, each on its own NIC. On a node with fewer ranks than
//! rails a rank serves several. Source: PCCL (Singh, PhD thesis, University of Maryland, 2025, chapter 6), extended to
//! uneven nodes and any placement.
//!
//! All-gather is rail, then node; reduce-scatter is node, then rail; all-reduce is node reduce-scatter, rail all-reduce,
//! node all-gather. Rounds between nodes are the rail algorithm's: `ceil(log2 n)` for `log`, `n-1` for `ring`, on `n`
//! nodes. Bytes over a NIC: `(n-1)/n` of the rail's share.
//!
//! ```text
//! all-gather on 2 nodes of 2:          rank 0    rank 1  |  rank 2    rank 3
//! own block                               A         B    |     C         D
//! rail 0: 0 and 2, rail 1: 1 and 3       A C       B D   |    A C       B D
//! node 0: 0 and 1, node 1: 2 and 3       ABCD      ABCD  |    ABCD      ABCD
//! ```
//!
//! Parts go straight to their place in rank order. Providers whose buffers must be contiguous get them in two other ways:
//! `two_level_staged` gathers each rail in scratch, from where the node's calls place the parts; `two_level_shuffle`
//! keeps every call's parts contiguous in scratch and permutes once at the end.
#![forbid(unsafe_code)]

use super::builder::{own, Builder};
use super::needs::{InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Call, Collective, LinkLevel, Plan, Shape, Span, Spans, StepRef};
use crate::topo::{NodeId, Rank};

/// Two levels, parts placed directly.
pub const TWO_LEVEL: Algorithm = Algorithm {
    name: "two_level",
    text: "rails between the nodes and a collective inside each, overlapped",
    collectives: &[
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
    ],
    is_leveled: true,
    supports: &has_levels,
    build: &|shape, rank| match shape.collective {
        Collective::AllGather => all_gather(shape, rank, Parts::Placed),
        Collective::ReduceScatter => reduce_scatter(shape, rank, false),
        Collective::AllReduce => all_reduce(shape, rank),
        Collective::Broadcast => broadcast(shape, rank),
        _ => reduce(shape, rank),
    },
    needs: &|shape, inner| needs(shape, inner, Parts::Placed),
};

/// Two levels, contiguous parts and a device-local shuffle.
pub const TWO_LEVEL_SHUFFLE: Algorithm = Algorithm {
    name: "two_level_shuffle",
    text: "the same with contiguous parts and one device-local shuffle, as PCCL does it",
    collectives: &[Collective::AllGather, Collective::ReduceScatter],
    is_leveled: true,
    supports: &has_levels,
    build: &|shape, rank| match shape.collective {
        Collective::AllGather => all_gather(shape, rank, Parts::Shuffled),
        _ => reduce_scatter(shape, rank, true),
    },
    needs: &|shape, inner| needs(shape, inner, Parts::Shuffled),
};

/// Two levels, each rail's parts contiguous in scratch before the node's calls place them.
pub const TWO_LEVEL_STAGED: Algorithm = Algorithm {
    name: "two_level_staged",
    text: "the same with each rail's parts contiguous in scratch, as a vendor's all-gather wants them",
    collectives: &[Collective::AllGather],
    is_leveled: true,
    supports: &has_levels,
    build: &|shape, rank| all_gather(shape, rank, Parts::Staged),
    needs: &|shape, inner| needs(shape, inner, Parts::Staged),
};

/// Where a collective's parts are between its calls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parts {
    /// In their place.
    Placed,
    /// The rail's in scratch.
    Staged,
    /// The rail's and the node's in scratch.
    Shuffled,
}

/// Whether there are several nodes, and one has several ranks.
pub(super) fn has_levels(shape: &Shape) -> bool {
    shape.grid.nnodes() > 1 && shape.grid.nrails() > 1
}

/// The most that a rank of any node needs.
fn needs(shape: &Shape, inner: &InnerNeeds<'_>, parts: Parts) -> Needs {
    let mut sizes: Vec<usize> = shape.grid.node_ids().map(|node| shape.grid.members(node).len()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let of = |size: usize| needs_on_node(shape, inner, parts, size);
    sizes.into_iter().map(of).fold(Needs::default(), Needs::max)
}

/// The same on a node of so many ranks.
fn needs_on_node(shape: &Shape, inner: &InnerNeeds<'_>, parts: Parts, size: usize) -> Needs {
    let (all, nodes, nrails) = (shape.nranks(), shape.grid.nnodes(), shape.grid.nrails());
    // Rails that a rank serves, and the blocks that travel on them.
    let rails = nrails.div_ceil(size);
    let served = (rails * nodes).min(all);
    let on_node = |collective| if size > 1 { inner(LinkLevel::Node, collective, size) } else { Needs::default() };
    let on_rail = |collective| inner(LinkLevel::Rail, collective, nodes);
    let calls = usize::from(size > 1);
    match (shape.collective, parts) {
        (Collective::AllGather, _) => {
            let call = on_node(Collective::AllGather);
            let (scratch, sent) = match parts {
                Parts::Placed => (0, call.sent * served),
                Parts::Staged => (served, call.sent * served),
                Parts::Shuffled => (served + calls * all, 0),
            };
            Needs::new(scratch + call.scratch * served + rails * on_rail(Collective::AllGather).scratch, sent)
        }
        (Collective::ReduceScatter, _) => {
            let (call, copied) = (on_node(Collective::ReduceScatter), parts == Parts::Shuffled || shape.prologue);
            let scratch = if copied { all } else { 0 } + calls * served + call.scratch * served;
            let sent = if copied { 0 } else { call.sent * served };
            Needs::new(scratch + rails * on_rail(Collective::ReduceScatter).scratch, sent)
        }
        (Collective::AllReduce, _) => {
            let (first, last) = (on_node(Collective::ReduceScatter), on_node(Collective::AllGather));
            // Calls handle the vector's parts: one for each rail that the rank serves.
            let part = |blocks: usize| (blocks * rails).div_ceil(nrails);
            let scratch = part(first.scratch + last.scratch) + part(on_rail(Collective::AllReduce).scratch);
            Needs::new(scratch, part(first.sent + last.sent))
        }
        (Collective::Reduce, _) => {
            let call = on_node(Collective::Reduce);
            let scratch = usize::from(shape.prologue) + calls + call.scratch;
            Needs::new(scratch + on_rail(Collective::Reduce).scratch, call.sent)
        }
        (collective, _) => {
            let call = on_node(collective);
            Needs::new(call.scratch + on_rail(collective).scratch, call.sent)
        }
    }
}

/// One rank's view of the grid.
pub(super) struct GridView<'a> {
    shape: &'a Shape,
    node: NodeId,
    members: Vec<Rank>,
}

impl GridView<'_> {
    /// That of `rank`.
    pub(super) fn new(shape: &Shape, rank: Rank) -> GridView<'_> {
        let node = shape.grid.node(rank);
        GridView { shape, node, members: shape.grid.members(node).to_vec() }
    }

    /// Its node.
    pub(super) fn node(&self) -> NodeId {
        self.node
    }

    /// The ranks of its node.
    pub(super) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// The rails that a member of this node serves.
    pub(super) fn rails_of(&self, member: Rank) -> Vec<usize> {
        (0..self.shape.grid.nrails()).filter(|&rail| self.shape.grid.owner(self.node, rail) == member).collect()
    }

    /// The rank whose block travels on `rail` for each node; nodes with fewer ranks have none.
    fn blocks_on(&self, rail: usize) -> Vec<Option<Rank>> {
        let grid = &self.shape.grid;
        grid.node_ids().map(|node| grid.members(node).get(rail).copied()).collect()
    }

    /// For each node the place of the block that travels on `rail`, where `places[i]` is that of `served[i]`; empty for a
    /// node that has none.
    fn parts_on(&self, rail: usize, served: &[Rank], places: &[Span]) -> Vec<Spans> {
        let place = |block: Option<Rank>| -> Spans {
            let index = block.and_then(|block| served.iter().position(|&other| other == block));
            index.map(|index| places[index]).into_iter().collect()
        };
        self.blocks_on(rail).into_iter().map(place).collect()
    }

    /// The ranks whose blocks a member of this node serves, rail by rail.
    fn served_by(&self, member: Rank) -> Vec<Rank> {
        self.rails_of(member).into_iter().flat_map(|rail| self.blocks_on(rail)).flatten().collect()
    }

    /// A call of a collective without a root, whose results are not the last.
    pub(super) fn call(
        &self,
        collective: Collective,
        level: LinkLevel,
        group: Vec<Rank>,
        src: Vec<Spans>,
        dst: Vec<Spans>,
    ) -> Call {
        Call { collective, level, group, root: 0, src, dst, finish: false }
    }
}

/// Scratch slots for a list of ranks' blocks, one after another.
fn slots(first: usize, ranks: &[Rank]) -> Spans {
    ranks.iter().enumerate().map(|(i, rank)| Span::scratch(first + i, 1, rank.index())).collect()
}

fn outputs(ranks: &[Rank]) -> Spans {
    ranks.iter().map(|rank| Span::output(rank.index(), 1)).collect()
}

fn inputs(ranks: &[Rank]) -> Spans {
    ranks.iter().map(|rank| Span::input(rank.index(), 1)).collect()
}

fn all_gather(shape: &Shape, rank: Rank, parts: Parts) -> Plan {
    let view = GridView::new(shape, rank);
    let grid = &shape.grid;
    let mut builder = Builder::new(shape, rank, "two_level", 1);
    let home = Span::output(rank.index(), 1);
    let mine = if shape.in_place { home } else { Span::input(0, 1) };
    let served = view.served_by(rank);
    // A node of one has no call that would place its parts.
    let alone = view.members.len() == 1;
    let gathered = match parts {
        Parts::Placed => outputs(&served),
        Parts::Staged if alone => outputs(&served),
        _ => slots(builder.scratch(served.len()), &served),
    };
    let mut rails_done = Vec::new();
    for rail in 0..grid.nrails() {
        // One lane for each rail, on every rank: channels follow from it.
        let lane = builder.lane();
        if grid.owner(view.node, rail) != rank {
            continue;
        }
        let dst = view.parts_on(rail, &served, &gathered);
        let src = if grid.local(rank) == rail { vec![mine] } else { Vec::new() };
        let call = view.call(Collective::AllGather, LinkLevel::Rail, grid.rail(rail), vec![src], dst);
        rails_done.push(builder.push(lane, Action::Call(call)));
    }
    let lane = builder.lane();
    let served_by: Vec<Vec<Rank>> = view.members.iter().map(|&member| view.served_by(member)).collect();
    let all: Vec<Rank> = served_by.concat();
    if parts != Parts::Shuffled {
        if !alone {
            let dst = served_by.iter().map(|part| outputs(part)).collect();
            let call = view.call(Collective::AllGather, LinkLevel::Node, view.members.clone(), vec![gathered], dst);
            builder.push_after(lane, Action::Call(call), &rails_done);
        }
        return builder.plan();
    }
    let mut staged = gathered.clone();
    let mut ready = rails_done;
    if !alone {
        staged = slots(builder.scratch(all.len()), &all);
        let mut rest = &staged[..];
        let dst = served_by.iter().map(|part| take(&mut rest, part.len())).collect();
        let call = view.call(Collective::AllGather, LinkLevel::Node, view.members.clone(), vec![gathered], dst);
        ready = vec![builder.push_after(lane, Action::Call(call), &ready)];
    }
    let shuffle_lane = builder.lane();
    let copy = Action::Copy { src: staged, dst: outputs(&all), start: false, finish: false };
    builder.push_after(shuffle_lane, copy, &ready);
    builder.plan()
}

fn take(rest: &mut &[Span], count: usize) -> Spans {
    let (part, left) = rest.split_at(count);
    *rest = left;
    part.to_vec()
}

fn reduce_scatter(shape: &Shape, rank: Rank, shuffle: bool) -> Plan {
    let view = GridView::new(shape, rank);
    let grid = &shape.grid;
    let mut builder = Builder::new(shape, rank, "two_level", 1);
    let node_lane = builder.lane();
    let parts: Vec<Vec<Rank>> = view.members.iter().map(|&member| view.served_by(member)).collect();
    let all: Vec<Rank> = parts.concat();
    let mut input = inputs(&all);
    let mut ready: Vec<StepRef> = Vec::new();
    if shuffle || shape.prologue {
        let staged = slots(builder.scratch(all.len()), &all);
        let lane = builder.lane();
        let copy = Action::Copy { src: input, dst: staged.clone(), start: shape.prologue, finish: false };
        ready.push(builder.push(lane, copy));
        input = staged;
    } else {
        // The same lanes on every rank and in both forms: channels follow from them.
        builder.lane();
    }
    let served = view.served_by(rank);
    let mut partial = input.clone();
    if view.members.len() > 1 {
        partial = slots(builder.scratch(served.len()), &served);
        let mut rest = &input[..];
        let src = parts.iter().map(|part| take(&mut rest, part.len())).collect();
        let call =
            view.call(Collective::ReduceScatter, LinkLevel::Node, view.members.clone(), src, vec![partial.clone()]);
        ready = vec![builder.push_after(node_lane, Action::Call(call), &ready)];
    }
    for rail in 0..grid.nrails() {
        let lane = builder.lane();
        if grid.owner(view.node, rail) != rank {
            continue;
        }
        let src = view.parts_on(rail, &served, &partial);
        let dst = if grid.local(rank) == rail { vec![Span::output(0, 1)] } else { Vec::new() };
        let mut call = view.call(Collective::ReduceScatter, LinkLevel::Rail, grid.rail(rail), src, vec![dst]);
        call.finish = true;
        builder.push_after(lane, Action::Call(call), &ready);
    }
    builder.plan()
}

fn all_reduce(shape: &Shape, rank: Rank) -> Plan {
    let view = GridView::new(shape, rank);
    let grid = &shape.grid;
    let per_shard = grid.nnodes();
    let chunks = grid.nrails() * per_shard;
    let mut builder = Builder::new(shape, rank, "two_level", chunks);
    let scatter_lane = builder.lane();
    let gather_lane = builder.lane();
    let shards_of = |member: Rank, place: &dyn Fn(usize, usize) -> Span| -> Spans {
        view.rails_of(member).into_iter().map(|rail| place(rail * per_shard, per_shard)).collect()
    };
    let mut ready = Vec::new();
    let prologue_lane = builder.lane();
    if shape.prologue {
        let src = vec![own(shape, 0, chunks)];
        let copy = Action::Copy { src, dst: vec![Span::output(0, chunks)], start: true, finish: false };
        ready.push(builder.push(prologue_lane, copy));
    }
    let input = |start, len| if shape.prologue { Span::output(start, len) } else { own(shape, start, len) };
    let alone = view.members.len() == 1;
    if !alone {
        let src = view.members.iter().map(|&member| shards_of(member, &input)).collect();
        let dst = shards_of(rank, &Span::output);
        let call = view.call(Collective::ReduceScatter, LinkLevel::Node, view.members.clone(), src, vec![dst]);
        ready = vec![builder.push_after(scatter_lane, Action::Call(call), &ready)];
    }
    let mut rails_done = Vec::new();
    for rail in 0..grid.nrails() {
        let lane = builder.lane();
        if grid.owner(view.node, rail) != rank {
            continue;
        }
        let dst = Span::output(rail * per_shard, per_shard);
        let src = if alone { input(rail * per_shard, per_shard) } else { dst };
        let mut call =
            view.call(Collective::AllReduce, LinkLevel::Rail, grid.rail(rail), vec![vec![src]], vec![vec![dst]]);
        call.finish = true;
        rails_done.push(builder.push_after(lane, Action::Call(call), &ready));
    }
    if !alone {
        let dst = view.members.iter().map(|&member| shards_of(member, &Span::output)).collect();
        let src = shards_of(rank, &Span::output);
        let call = view.call(Collective::AllGather, LinkLevel::Node, view.members.clone(), vec![src], dst);
        builder.push_after(gather_lane, Action::Call(call), &rails_done);
    }
    builder.plan()
}

/// One rank for each node: the root, and elsewhere the first.
fn leaders(shape: &Shape) -> Vec<Rank> {
    let grid = &shape.grid;
    let root_node = grid.node(shape.root);
    grid.node_ids().map(|node| if node == root_node { shape.root } else { grid.members(node)[0] }).collect()
}

fn position(group: &[Rank], rank: Rank) -> usize {
    group.iter().position(|&other| other == rank).expect("the rank is in its group")
}

fn broadcast(shape: &Shape, rank: Rank) -> Plan {
    let view = GridView::new(shape, rank);
    let leaders = leaders(shape);
    let leader = leaders[view.node.index()];
    let mut builder = Builder::new(shape, rank, "two_level", 1);
    let (rail_lane, node_lane) = (builder.lane(), builder.lane());
    let output = vec![Span::output(0, 1)];
    let mut ready = Vec::new();
    if rank == leader {
        let src = if rank == shape.root { vec![vec![own(shape, 0, 1)]] } else { Vec::new() };
        let mut call = view.call(Collective::Broadcast, LinkLevel::Rail, leaders.clone(), src, vec![output.clone()]);
        call.root = position(&leaders, shape.root);
        ready.push(builder.push(rail_lane, Action::Call(call)));
    }
    if view.members.len() > 1 {
        let src = if rank == leader { vec![output.clone()] } else { Vec::new() };
        let mut call = view.call(Collective::Broadcast, LinkLevel::Node, view.members.clone(), src, vec![output]);
        call.root = position(&view.members, leader);
        builder.push_after(node_lane, Action::Call(call), &ready);
    }
    builder.plan()
}

fn reduce(shape: &Shape, rank: Rank) -> Plan {
    let view = GridView::new(shape, rank);
    let leaders = leaders(shape);
    let leader = leaders[view.node.index()];
    let is_root = rank == shape.root;
    let mut builder = Builder::new(shape, rank, "two_level", 1);
    let (rail_lane, node_lane) = (builder.lane(), builder.lane());
    let mut partial = if is_root { own(shape, 0, 1) } else { Span::input(0, 1) };
    let mut ready = Vec::new();
    if shape.prologue {
        let scaled = Span::scratch(builder.scratch(1), 1, 0);
        let lane = builder.lane();
        let copy = Action::Copy { src: vec![partial], dst: vec![scaled], start: true, finish: false };
        ready.push(builder.push(lane, copy));
        partial = scaled;
    }
    if view.members.len() > 1 {
        let sum = Span::scratch(builder.scratch(1), 1, 0);
        let dst = if rank == leader { vec![vec![sum]] } else { Vec::new() };
        let mut call = view.call(Collective::Reduce, LinkLevel::Node, view.members.clone(), vec![vec![partial]], dst);
        call.root = position(&view.members, leader);
        ready = vec![builder.push_after(node_lane, Action::Call(call), &ready)];
        partial = sum;
    }
    if rank == leader {
        let dst = if is_root { vec![vec![Span::output(0, 1)]] } else { Vec::new() };
        let mut call = view.call(Collective::Reduce, LinkLevel::Rail, leaders.clone(), vec![vec![partial]], dst);
        call.root = position(&leaders, shape.root);
        call.finish = true;
        builder.push_after(rail_lane, Action::Call(call), &ready);
    }
    builder.plan()
}
