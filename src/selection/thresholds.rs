//! Algorithms by thresholds in bytes: those that the user has set, or the defaults.
#![forbid(unsafe_code)]

use super::{message_bytes, Context, Request};
use crate::algorithms::{self, Choice};
use crate::config::Config;
use crate::error::counted;
use crate::plan::{Collective, Shape};
use crate::sim::Cluster;
use crate::topo::Grid;
use crate::transport::shm::{area_bytes, pipelined_bytes};

/// A piece of a message that stays in a core's cache while it is pulled and reduced.
const CACHE_BYTES: usize = 128 << 10;
/// What a rank reduces of everybody's part at a time on the board.
const BOARD_PART_BYTES: usize = 32 << 10;
/// What a rank copies at a time, where others are to read it meanwhile.
const AREA_PIECE_BYTES: usize = 512 << 10;
/// Between so few ranks what is on the board at a time stays in cache however long it is, and each stop for the others counts.
const FEW_RANKS: usize = 2;
/// Gathers and scatters of few bytes on more ranks than these go along a tree.
const TREE_MIN_RANKS: usize = 64;
/// What crosses the network at a time when phases overlap: large enough for full rate, small against the message. On 16 ranks
/// a block's part is then 64 KiB, which MPIs send at once over TCP; of twice that they first ask the receiver, and every round
/// waits for the answer: all-gather of 64 MB took 0.71 s instead of 0.53 (Open MPI and MPICH, NICs of 200 Mbit/s).
const PIPELINE_BYTES: usize = 1 << 20;
/// The same for each rail where every rail has a part of its own of one vector.
const RAIL_PIPELINE_BYTES: usize = 2 << 20;
/// Nodes up to which a long vector goes along all of them, in pieces, once over each NIC; on more of them filling the pipeline takes longer
/// than the second half that a scatter and a gather send.
const RING_NODES: usize = 4;
/// Pieces of a vector that goes along a ring.
const RING_PIECES: usize = 16;
/// What a link is taken to carry in its latency where that is not known.
const LATENCY_BYTES: usize = 64 << 10;
/// No shorter pieces go along a tree.
const LEAST_PIECE_BYTES: usize = 4 << 10;

/// The algorithm for a call, and why: the board where the node has one, else by the thresholds.
pub fn choose(request: &Request<'_>, context: &Context) -> (Choice, String) {
    on_board(request, context).unwrap_or_else(|| by_bytes(request, &context.grid, &context.config))
}

/// The board, on one node whose ranks share one.
fn on_board(request: &Request<'_>, context: &Context) -> Option<(Choice, String)> {
    let Request { collective, block_bytes, .. } = *request;
    let Context { grid, config, board, crowded, .. } = context;
    let one_round = match collective {
        // Two rounds divide the root's work, where there are processors for that.
        Collective::Reduce if *crowded => true,
        Collective::Reduce | Collective::AllReduce => whole_vectors(block_bytes, grid.nranks() - 1, config),
        _ => true,
    };
    let choice = Choice::flat(if one_round { "board" } else { "board_two_rounds" });
    let can = *board && config.board && algorithms::supports(&choice, &Shape::new(collective, grid.clone()));
    can.then(|| (choice, format!("one node, {} a block: a board in shared memory", counted(block_bytes, "byte"))))
}

/// Whether an all-reduce that receives `vectors` vectors does so in one go.
fn whole_vectors(bytes: usize, vectors: usize, config: &Config) -> bool {
    bytes.saturating_mul(vectors) <= config.one_round_max_bytes
}

/// The bytes of a block that go on the board at a time: what is copied or reduced together stays in a core's cache, and
/// what a rank brings fits on its board. Segments begin at multiples of 64 bytes.
pub fn board_segment(request: &Request<'_>, context: &Context) -> usize {
    let (collective, nranks) = (request.collective, context.grid.nranks());
    let bytes = match collective {
        Collective::Gather => request.block_bytes.saturating_mul(nranks),
        _ => message_bytes(collective, nranks, request.block_bytes),
    };
    // What is read to be reduced should be in a cache when it is.
    let is_long = |stream_bytes| bytes >= pipelined_bytes(collective, stream_bytes);
    let is_read_whole = !collective.reduces() && context.lends.is_some_and(|stream_bytes| !is_long(stream_bytes));
    let most = area_bytes(nranks).min(if is_read_whole { usize::MAX } else { AREA_PIECE_BYTES });
    let each = most / nranks / 64 * 64;
    if nranks <= FEW_RANKS {
        return match collective {
            Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter => each,
            _ => most,
        };
    }
    match collective {
        Collective::ReduceScatter => BOARD_PART_BYTES.min(each),
        Collective::AllReduce | Collective::Reduce => (BOARD_PART_BYTES * nranks).min(most),
        Collective::AllToAll | Collective::Scatter => CACHE_BYTES.min(each),
        _ => CACHE_BYTES,
    }
}

fn by_bytes(request: &Request<'_>, grid: &Grid, config: &Config) -> (Choice, String) {
    let nranks = grid.nranks();
    let bytes = message_bytes(request.collective, nranks, request.block_bytes);
    let node_direct = grid.nrails() <= config.direct_max_ranks;
    if nranks == 1 {
        return (Choice::flat("direct"), "one rank".to_string());
    }
    match request.collective {
        Collective::AllReduce => all_reduce(bytes, grid, config, node_direct),
        Collective::AllGather => {
            leveled(grid, node_direct, bytes, ("STRATA_ALLGATHER_RD_MAX_BYTES", config.all_gather_rd_max_bytes))
        }
        Collective::ReduceScatter => {
            leveled(grid, node_direct, bytes, ("STRATA_REDUCESCATTER_RD_MAX_BYTES", config.reduce_scatter_rd_max_bytes))
        }
        Collective::Broadcast if grid.nnodes() == 1 && node_direct => {
            (Choice::flat("direct"), "one node: all ranks read the root's memory".to_string())
        }
        Collective::Broadcast | Collective::Reduce if nranks == 2 => {
            (Choice::flat("tree"), "two ranks: all bytes go from one to the other once".to_string())
        }
        Collective::Broadcast | Collective::Reduce => rooted(request.collective, bytes, grid, config, node_direct),
        Collective::AllToAll if grid.nnodes() == 1 || grid.nrails() == 1 => {
            (Choice::flat("direct"), "one node, or one rank a node: nothing to aggregate".to_string())
        }
        Collective::AllToAll => {
            let algorithm = if bytes <= config.two_step_max_bytes { "two_step" } else { "direct" };
            let why = compared(bytes, "STRATA_ALLTOALL_TWO_STEP_MAX_BYTES", config.two_step_max_bytes);
            (Choice::flat(algorithm), format!("blocks of {why}"))
        }
        Collective::Gather | Collective::Scatter if nranks <= TREE_MIN_RANKS => {
            (Choice::flat("direct"), format!("{nranks} ranks: the root's link is the limit"))
        }
        Collective::Gather | Collective::Scatter => {
            let algorithm = if bytes <= config.tree_max_bytes { "tree" } else { "direct" };
            let why = compared(bytes, "STRATA_TREE_MAX_BYTES", config.tree_max_bytes);
            (Choice::flat(algorithm), format!("{nranks} ranks, blocks of {why}"))
        }
        Collective::Custom => (Choice::flat("direct"), "a custom call that names no script".to_string()),
    }
}

/// On which side of a threshold a number of bytes is: `1024 bytes <= STRATA_TREE_MAX_BYTES=65536`.
pub fn compared(bytes: usize, variable: &str, threshold: usize) -> String {
    let sign = if bytes <= threshold { "<=" } else { ">" };
    format!("{} {sign} {variable}={threshold}", counted(bytes, "byte"))
}

fn all_reduce(bytes: usize, grid: &Grid, config: &Config, node_direct: bool) -> (Choice, String) {
    let one_round = |vectors: usize| {
        compared(bytes.saturating_mul(vectors), "STRATA_ALLREDUCE_ONE_ROUND_MAX_BYTES", config.one_round_max_bytes)
    };
    if grid.nnodes() == 1 && node_direct && whole_vectors(bytes, grid.nranks() - 1, config) {
        let why = one_round(grid.nranks() - 1);
        return (Choice::flat("direct_one_round"), format!("one node, whole vectors in one round: {why}"));
    }
    let rounds = grid.nranks().ilog2() as usize;
    let one_each = grid.nranks() == grid.nnodes() && grid.nranks().is_power_of_two();
    if one_each && whole_vectors(bytes, rounds, config) {
        let why = one_round(rounds);
        return (Choice::flat("rd_one"), format!("one rank a node, whole vectors in {rounds} rounds: {why}"));
    }
    leveled(grid, node_direct, bytes, ("STRATA_ALLREDUCE_RD_MAX_BYTES", config.all_reduce_rd_max_bytes))
}

/// Broadcasts and reduces. A vector leaves the root's node over all of its rails, each of which has an algorithm for its own part's length.
fn rooted(collective: Collective, bytes: usize, grid: &Grid, config: &Config, node_direct: bool) -> (Choice, String) {
    let most = config.tree_max_bytes;
    if bytes <= most {
        return (Choice::flat("tree"), compared(bytes, "STRATA_TREE_MAX_BYTES", most));
    }
    let (nodes, rails) = (grid.nnodes(), grid.nrails());
    let (part, has_rails) = (bytes.div_ceil(rails), nodes > 1 && rails > 1);
    let rail = match collective {
        _ if has_rails && part <= most => "tree",
        _ if (2..=RING_NODES).contains(&nodes) && bytes > PIPELINE_BYTES => "ring",
        Collective::Broadcast => "scatter_allgather",
        _ => "reduce_scatter_gather",
    };
    if !has_rails {
        return (Choice::flat(rail), compared(bytes, "STRATA_TREE_MAX_BYTES", most));
    }
    let node = if node_direct { "direct" } else { "ring" };
    let why = format!(
        "{grid}, of {} for each rail {}",
        counted(bytes, "byte"),
        compared(part, "STRATA_TREE_MAX_BYTES", most)
    );
    (Choice::leveled("two_level_split", node, rail), why)
}

/// An algorithm inside the node and one between nodes, which is logarithmic up to the threshold of this name.
fn leveled(grid: &Grid, node_direct: bool, bytes: usize, (variable, most): (&str, usize)) -> (Choice, String) {
    let (node, sign) = if node_direct { ("direct", "<=") } else { ("ring", ">") };
    let rail = if bytes <= most { "log" } else { "ring" };
    let why = compared(bytes, variable, most);
    match (grid.nnodes(), grid.nrails()) {
        (1, ranks) => (Choice::flat(node), format!("one node, {ranks} ranks {sign} STRATA_DIRECT_MAX_RANKS")),
        (_, 1) => (Choice::flat(rail), format!("one rank a node, {why}")),
        _ => (Choice::leveled("two_level", node, rail), format!("{grid}, {why}")),
    }
}

/// The pieces of a message that go along overlapped trees, in bytes, and how many of them are on their way at once: the number of
/// pieces that C-Cube's equation 7 has its least time with, `sqrt(2 D N / t)` for trees of depth `D` and `t` of them, where `N` is in units of
/// what a link carries in its latency; and what a leaf has sent before the first result comes back.
pub fn in_trees(choice: &Choice, request: &Request<'_>, context: &Context) -> Option<(usize, usize)> {
    let shape = Shape::new(request.collective, context.grid.clone());
    let machine = context.knowledge.machine.as_deref();
    let pieces = TreePieces::new(choice, &shape, request.block_bytes, machine)?;
    Some((pieces.bytes, pieces.steps + 2))
}

/// A message cut for overlapped trees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TreePieces {
    /// How many trees there are.
    pub trees: usize,
    /// Messages that a piece goes through one after another.
    pub steps: usize,
    /// Bytes of a block that each piece has, over all trees.
    pub bytes: usize,
}

impl TreePieces {
    /// For blocks of so many bytes; nothing where the choice has no such trees, or no rank has another one to send to.
    pub fn new(choice: &Choice, shape: &Shape, block_bytes: usize, machine: Option<&Cluster>) -> Option<TreePieces> {
        let (trees, depth) = algorithms::trees(choice, shape).filter(|(_, depth)| *depth > 0)?;
        let in_latency = machine.map(|machine| {
            let (inside, network) = (&machine.inside, &machine.network);
            match (shape.grid.nnodes(), shape.grid.links()) {
                (1, Some(_)) => inside.latency_us.value * inside.link_gbps.value * 1e3,
                (1, None) => inside.latency_us.value * inside.rank_gbps.value * 1e3,
                _ => network.latency_us.value * network.nic_gbps.value * 1e3,
            }
        });
        let in_latency = in_latency.filter(|bytes| *bytes >= 1.0).unwrap_or(LATENCY_BYTES as f64);
        // A broadcast or a reduction fills the tree once.
        let steps = if shape.collective == Collective::AllReduce { 2 * depth } else { depth };
        let pieces = (steps as f64 * block_bytes as f64 / trees as f64 / in_latency).sqrt().max(1.0);
        let bytes = ((block_bytes as f64 / pieces) as usize).next_multiple_of(64).max(LEAST_PIECE_BYTES * trees);
        Some(TreePieces { trees, steps, bytes })
    }
}

/// Bytes of each block handled at a time. On one node reductions work on pieces that stay in cache; plain copies are
/// not cut. Between nodes the message is cut so that the phases overlap.
pub fn segment(choice: &Choice, request: &Request<'_>, grid: &Grid) -> usize {
    let (collective, nranks) = (request.collective, grid.nranks());
    let between = if algorithms::is_leveled(choice) { &choice.rail } else { &choice.name };
    let most = RAIL_PIPELINE_BYTES * grid.nrails();
    let blocks = match collective {
        Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => nranks,
        _ => 1,
    };
    match (grid.nnodes(), collective) {
        (1, Collective::AllReduce | Collective::Reduce) if choice.name == "direct_one_round" => CACHE_BYTES,
        (1, Collective::AllReduce | Collective::Reduce) => CACHE_BYTES * nranks,
        (1, Collective::ReduceScatter) => CACHE_BYTES,
        (1, _) => CACHE_BYTES,
        (_, Collective::Broadcast | Collective::Reduce) => match between.as_str() {
            "ring" => (request.block_bytes / RING_PIECES).clamp(PIPELINE_BYTES, most),
            "scatter_allgather" | "reduce_scatter_gather" => most,
            _ => PIPELINE_BYTES,
        },
        _ => (PIPELINE_BYTES / blocks).max(4096),
    }
}
