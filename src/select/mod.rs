//! Which algorithm a call runs, and why.
//!
//! The choice is a pure function of what is equal on all ranks: the call, the grid, and the configuration that rank 0
//! sent when the communicator was made. In order: an algorithm named in the call or in `STRATA_<COLLECTIVE>_ALGO`,
//! then the thresholds below, in bytes.
#![forbid(unsafe_code)]

use crate::algo::{self, Choice};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::{Collective, Shape};
use crate::topo::Grid;
use crate::transport::shm::BOARD_BYTES;
use std::sync::Arc;

/// What is known of a call when its algorithm is chosen.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// What is to be done.
    pub collective: Collective,
    /// Bytes of one block: of the vector for all-reduce, broadcast and reduce, of one rank's part for the others.
    pub block_bytes: usize,
    /// An algorithm named by the call itself.
    pub named: Option<&'a str>,
    /// Whether all ranks of the one node share a board; the same on all of them.
    pub board: bool,
}

/// How a call is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// The algorithm.
    pub choice: Choice,
    /// Bytes of each block handled at a time; `usize::MAX` handles the message whole.
    pub segment_bytes: usize,
    /// Segments in flight.
    pub window: usize,
    /// Why, for the log.
    pub reason: String,
}

/// The algorithm that needs a board.
const BOARD: &str = "board";
/// A piece of a message that stays in a core's cache while it is pulled and reduced.
const CACHE_BYTES: usize = 128 << 10;
/// What crosses the network at a time when phases overlap: large enough for full rate, small against the message.
const PIPELINE_BYTES: usize = 2 << 20;

/// The bytes thresholds speak of: the full vector (all-gather: the output; reduce-scatter: the input).
pub fn message_bytes(collective: Collective, nranks: usize, block_bytes: usize) -> usize {
    match collective {
        Collective::AllGather | Collective::ReduceScatter => block_bytes.saturating_mul(nranks),
        _ => block_bytes,
    }
}

/// Chooses for one call on a communicator with this grid and configuration.
pub fn choose(request: &Request<'_>, grid: &Arc<Grid>, config: &Config) -> Result<Selection> {
    let collective = request.collective;
    let from_env = config.algorithm(collective);
    let named = match request.named {
        Some(name) => Some((name, "named by the call")),
        None if from_env != "auto" => Some((from_env, "named by the environment")),
        None => None,
    };
    let (choice, reason) = match named {
        Some((name, by)) => (named_choice(name, collective, grid)?, by.to_string()),
        None => match on_board(request, grid, config) {
            Some(chosen) => chosen,
            None => by_thresholds(request, grid, config),
        },
    };
    let on_board = choice.name == BOARD;
    if on_board && !request.board {
        let text = "algorithm board needs shared memory between all ranks of the node";
        return Err(Error::InvalidUsage(text.to_string()));
    }
    let segment_bytes = match config.segment_bytes {
        _ if on_board => board_segment(collective, grid.nranks()),
        0 => segment(&choice, collective, grid),
        bytes => bytes,
    };
    Ok(Selection { choice, segment_bytes, window: config.window.clamp(1, 64), reason })
}

fn named_choice(name: &str, collective: Collective, grid: &Arc<Grid>) -> Result<Choice> {
    let choice: Choice = name.parse()?;
    if algo::choices(collective, grid).contains(&choice)
        || algo::supports(&choice, &Shape::new(collective, grid.clone()))
    {
        return Ok(choice);
    }
    let known: Vec<String> = algo::choices(collective, grid).iter().map(Choice::to_string).collect();
    Err(Error::InvalidUsage(format!(
        "algorithm {name} does not do {} on {grid}; these do: {}",
        collective.name(),
        known.join(", ")
    )))
}

/// The board, for few bytes on one node whose ranks share one.
fn on_board(request: &Request<'_>, grid: &Grid, config: &Config) -> Option<(Choice, String)> {
    let collective = request.collective;
    let does = matches!(collective, Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter);
    if !(does && request.board && grid.nnodes() == 1 && grid.nranks() > 1) {
        return None;
    }
    // What a rank reads: all vectors of an all-reduce, one part of each rank in the others.
    let bytes = request.block_bytes.saturating_mul(grid.nranks());
    let fits = request.block_bytes <= board_segment(collective, grid.nranks());
    (fits && bytes <= config.board_max_bytes)
        .then(|| (Choice::flat(BOARD), format!("one node, {bytes} bytes to read: a board in shared memory")))
}

/// The bytes of a block such that what a rank brings fits on its board.
fn board_segment(collective: Collective, nranks: usize) -> usize {
    match collective {
        Collective::ReduceScatter => BOARD_BYTES / nranks,
        _ => BOARD_BYTES,
    }
}

fn by_thresholds(request: &Request<'_>, grid: &Grid, config: &Config) -> (Choice, String) {
    let nranks = grid.nranks();
    let bytes = message_bytes(request.collective, nranks, request.block_bytes);
    let node_direct = grid.nrails() <= config.direct_max_ranks;
    if nranks == 1 {
        return (Choice::flat("direct"), "one rank".to_string());
    }
    match request.collective {
        Collective::AllReduce => {
            let rail = rail_algorithm(bytes, config.all_reduce_rd_max_bytes);
            all_reduce(bytes, rail, grid, config, node_direct)
        }
        Collective::AllGather => {
            leveled(grid, node_direct, rail_algorithm(bytes, config.all_gather_rd_max_bytes), bytes)
        }
        Collective::ReduceScatter => {
            leveled(grid, node_direct, rail_algorithm(bytes, config.reduce_scatter_rd_max_bytes), bytes)
        }
        Collective::Broadcast if grid.nnodes() == 1 && node_direct => {
            (Choice::flat("direct"), "one node: all ranks read the root's memory".to_string())
        }
        Collective::Broadcast if bytes <= config.tree_max_bytes => {
            (Choice::flat("tree"), format!("{bytes} bytes are few"))
        }
        Collective::Broadcast => (Choice::flat("scatter_allgather"), format!("{bytes} bytes are many")),
        Collective::Reduce if bytes <= config.tree_max_bytes => {
            (Choice::flat("tree"), format!("{bytes} bytes are few"))
        }
        Collective::Reduce => (Choice::flat("reduce_scatter_gather"), format!("{bytes} bytes are many")),
        Collective::AllToAll if grid.nnodes() > 1 && grid.nrails() > 1 && bytes <= config.two_step_max_bytes => {
            (Choice::flat("two_step"), format!("blocks of {bytes} bytes are aggregated per node"))
        }
        Collective::AllToAll => (Choice::flat("direct"), format!("blocks of {bytes} bytes travel on their own")),
        Collective::Gather | Collective::Scatter if nranks > 64 && bytes <= config.tree_max_bytes => {
            (Choice::flat("tree"), format!("blocks of {bytes} bytes are few on {nranks} ranks"))
        }
        Collective::Gather | Collective::Scatter => {
            (Choice::flat("direct"), "the root's link is the limit".to_string())
        }
    }
}

fn rail_algorithm(bytes: usize, logarithmic_max: usize) -> &'static str {
    if bytes <= logarithmic_max {
        "log"
    } else {
        "ring"
    }
}

fn all_reduce(bytes: usize, rail: &'static str, grid: &Grid, config: &Config, node_direct: bool) -> (Choice, String) {
    let small = bytes <= config.one_round_max_bytes;
    if grid.nnodes() == 1 && node_direct && small {
        return (Choice::flat("direct_one_round"), format!("one node, {bytes} bytes: whole vectors in one round"));
    }
    if small && grid.nranks() == grid.nnodes() && grid.nranks().is_power_of_two() {
        return (Choice::flat("rd_one"), format!("one rank a node, {bytes} bytes: whole vectors in log2 p rounds"));
    }
    leveled(grid, node_direct, rail, bytes)
}

fn leveled(grid: &Grid, node_direct: bool, rail: &'static str, bytes: usize) -> (Choice, String) {
    let node = if node_direct { "direct" } else { "ring" };
    let rounds = if rail == "log" { "a logarithmic number of rounds" } else { "a ring" };
    match (grid.nnodes(), grid.nrails()) {
        (1, _) => (Choice::flat(node), format!("one node, {bytes} bytes")),
        (_, 1) => (Choice::flat(rail), format!("one rank a node, {bytes} bytes: {rounds}")),
        _ => (Choice::leveled("two_level", node, rail), format!("{grid}, {bytes} bytes: {rounds} between nodes")),
    }
}

/// Bytes of each block handled at a time. On one node reductions work on pieces that stay in cache; plain copies are
/// not cut. Between nodes the message is cut so that the phases overlap.
fn segment(choice: &Choice, collective: Collective, grid: &Grid) -> usize {
    let nranks = grid.nranks();
    let blocks = match collective {
        Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => nranks,
        _ => 1,
    };
    match (grid.nnodes(), collective) {
        (1, Collective::AllReduce | Collective::Reduce) if choice.name == "direct_one_round" => CACHE_BYTES,
        (1, Collective::AllReduce | Collective::Reduce) => CACHE_BYTES * nranks,
        (1, Collective::ReduceScatter) => CACHE_BYTES,
        (1, _) => 2 * CACHE_BYTES,
        _ => (PIPELINE_BYTES / blocks).max(4096),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(collective: Collective, block_bytes: usize, grid: Grid, config: &Config) -> String {
        let request = Request { collective, block_bytes, named: None, board: true };
        choose(&request, &Arc::new(grid), config).unwrap().choice.to_string()
    }

    #[test]
    fn several_nodes_get_two_levels_and_the_threshold_splits_log_from_ring() {
        let config = Config { all_gather_rd_max_bytes: 8000, ..Config::default() };
        let grid = Grid::blocks(&[4, 4]);
        assert_eq!(chosen(Collective::AllGather, 1000, grid.clone(), &config), "two_level(direct,log)");
        assert_eq!(chosen(Collective::AllGather, 1001, grid, &config), "two_level(direct,ring)");
        assert_eq!(chosen(Collective::AllGather, 1001, Grid::flat(4), &config), "direct");
    }

    #[test]
    fn the_environment_s_algorithm_wins_and_an_impossible_one_is_refused() {
        let config = Config { all_gather_algo: "ring".to_string(), ..Config::default() };
        assert_eq!(chosen(Collective::AllGather, 1, Grid::flat(4), &config), "ring");
        let config = Config { all_gather_algo: "rd".to_string(), ..Config::default() };
        let request = Request { collective: Collective::AllGather, block_bytes: 1, named: None, board: true };
        let error = choose(&request, &Arc::new(Grid::flat(3)), &config).unwrap_err();
        assert!(matches!(&error, Error::InvalidUsage(text) if text.contains("these do: ")), "{error:?}");
    }

    #[test]
    fn every_collective_gets_a_choice_that_exists_for_every_shape() {
        let grids = [vec![1], vec![5], vec![2, 2], vec![3, 1, 4], vec![1, 1, 1], vec![20, 3]];
        for sizes in grids {
            let grid = Arc::new(Grid::blocks(&sizes));
            for collective in Collective::ALL {
                for block_bytes in [1, 1 << 12, 1 << 20, 1 << 30] {
                    let request = Request { collective, block_bytes, named: None, board: true };
                    let selection = choose(&request, &grid, &Config::default()).unwrap();
                    let shape = Shape::new(collective, grid.clone());
                    assert!(algo::supports(&selection.choice, &shape), "{} {sizes:?}", selection.choice);
                }
            }
        }
    }
}
