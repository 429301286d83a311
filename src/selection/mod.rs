//! Which algorithm a call runs, and why.
//!
//! The choice is a pure function of what is equal on all ranks: the call, the grid, and the configuration that rank 0
//! sent when the communicator was made. In order: an algorithm named in the call or in `STRATA_<COLLECTIVE>_ALGO`,
//! then thresholds that the user has set, the tuning table, and the thresholds below, in bytes, unless the cost model sees a
//! clear win over them.
#![forbid(unsafe_code)]

pub mod cost;
pub mod links;
pub mod model;
pub mod table;
pub mod vendor;

use crate::algorithms::{self, Choice};
use crate::carrier::{Carrier, Inter};
use crate::config::Config;
use crate::error::{counted, Error, Result};
use crate::plan::{Collective, Shape};
use crate::sim::price::PricedPlan;
use crate::sim::Cluster;
use crate::topo::Grid;
use crate::transport::shm::BOARD_BYTES;
use std::sync::Arc;
use table::Tuned;

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

/// A piece of a message that stays in a core's cache while it is pulled and reduced.
const CACHE_BYTES: usize = 128 << 10;
/// What a rank reduces of everybody's part at a time on the board.
const BOARD_PART_BYTES: usize = 32 << 10;
/// Gathers and scatters of few bytes on more ranks than these go along a tree.
const TREE_MIN_RANKS: usize = 64;
/// What crosses the network at a time when phases overlap: large enough for full rate, small against the message. On 16 ranks
/// a block's part is then 64 KiB, which MPIs send at once over TCP; of twice that they first ask the receiver, and every round
/// waits for the answer: all-gather of 64 MB took 0.71 s instead of 0.53 (Open MPI and MPICH, NICs of 200 Mbit/s).
const PIPELINE_BYTES: usize = 1 << 20;

/// The bytes thresholds speak of: the full vector (all-gather: the output; reduce-scatter: the input).
pub fn message_bytes(collective: Collective, nranks: usize, block_bytes: usize) -> usize {
    match collective {
        Collective::AllGather | Collective::ReduceScatter => block_bytes.saturating_mul(nranks),
        _ => block_bytes,
    }
}

/// What a communicator knows beside its configuration; the same on all its ranks.
#[derive(Debug, Clone, Default)]
pub struct Knowledge {
    /// The rows of rank 0's tuning table.
    pub tuned: Arc<Tuned>,
    /// What the cost model goes by: the machine that `STRATA_MACHINE` names, or the links as they were measured.
    pub machine: Option<Arc<Cluster>>,
}

/// Chooses for one call on a communicator with this grid, configuration and knowledge.
pub fn choose(request: &Request<'_>, grid: &Arc<Grid>, config: &Config, knowledge: &Knowledge) -> Result<Selection> {
    let collective = request.collective;
    let from_env = config.algorithm(collective);
    let named = match request.named {
        Some(name) => Some((name, "named by the call")),
        None if from_env != "auto" => Some((from_env, "named by the environment")),
        None => None,
    };
    let advice = match named {
        Some(_) => None,
        None => knowledge.tuned.advice(request, grid.nranks(), config),
    };
    let is_said = named.is_some() || advice.is_some();
    let (segments, window) = advice.as_ref().map_or((0, 0), |advice| (advice.segment_bytes, advice.window));
    let (choice, reason) = match (named, advice) {
        (Some((name, by)), _) => (named_choice(name, collective, grid)?, by.to_string()),
        (None, Some(advice)) => (advice.choice, advice.reason),
        (None, None) => match on_board(request, grid, config) {
            Some(chosen) => chosen,
            None => by_thresholds(request, grid, config),
        },
    };
    let on_board = algorithms::is_on_board(&choice);
    if on_board && !request.board {
        let text = "algorithm board needs shared memory between all ranks of the node";
        return Err(Error::InvalidUsage(text.to_string()));
    }
    let segment_bytes = match config.segment_bytes {
        _ if on_board => board_segment(collective, grid.nranks()),
        0 if segments > 0 => segments,
        0 => segment(&choice, collective, grid),
        bytes => bytes,
    };
    let window = match window {
        1.. if !config.is_given("STRATA_WINDOW") => window,
        _ => config.window,
    };
    let selection = Selection { choice, segment_bytes, window: window.clamp(1, 64), reason };
    Ok(match &knowledge.machine {
        Some(machine) if !is_said && !on_board => by_model(selection, request, grid, config, machine),
        _ => selection,
    })
}

/// What the cost model would rather have than a selection by thresholds, if that is one of those it speaks of.
fn by_model(
    selection: Selection,
    request: &Request<'_>,
    grid: &Arc<Grid>,
    config: &Config,
    machine: &Cluster,
) -> Selection {
    let collective = request.collective;
    let Selection { choice, segment_bytes, window, .. } = selection.clone();
    let spoken_of = ["two_level", "log", "ring"].contains(&choice.name.as_str());
    let set = table::has_thresholds(collective, config);
    if set || !spoken_of || grid.nnodes() == 1 || !cost::COLLECTIVES.contains(&collective) {
        return selection;
    }
    let bytes = message_bytes(collective, grid.nranks(), request.block_bytes);
    let node = choice.node.clone();
    let route = PricedPlan { choice, segment_bytes, window, carrier: Carrier::MPI };
    let Some((better, reason)) = model::better(machine, grid, collective, bytes, &route) else { return selection };
    Selection {
        choice: Choice { node, ..better.choice },
        segment_bytes: if config.is_given("STRATA_SEGMENT_BYTES") { segment_bytes } else { better.segment_bytes },
        window: if config.is_given("STRATA_WINDOW") { window } else { better.window },
        reason,
    }
}

/// One warning for each `STRATA_<COLLECTIVE>_ALGO` that names no algorithm, or one that never does the collective, and for
/// each other name in the settings that nothing has.
pub fn unknown_names(config: &Config) -> Vec<String> {
    let mut warnings = unknown_algorithms(config);
    let names = config.vendor_only.split(',').map(str::trim).filter(|name| !["", "none"].contains(name));
    let strange = names.filter(|name| Collective::from_name(name).is_none());
    warnings.extend(
        strange.map(|name| format!("STRATA_VENDOR_ONLY={}: there is no collective {name}", config.vendor_only)),
    );
    if let Inter::Unknown(text) = &config.inter {
        let choices = Inter::choices();
        warnings.push(format!("STRATA_INTER={text} is none of {choices}; no communicator can be made"));
    }
    warnings
}

fn unknown_algorithms(config: &Config) -> Vec<String> {
    let wrong = |collective: Collective| -> Option<String> {
        let name = config.algorithm(collective);
        if name == "auto" || name == vendor::VENDOR {
            return None;
        }
        match name.parse::<Choice>() {
            Err(error) => Some(error.to_string()),
            Ok(choice) => match algorithms::does(&choice, collective) {
                true => None,
                false => Some(format!("algorithm {name} does not do {}", collective.name())),
            },
        }
    };
    let line = |collective: Collective| {
        wrong(collective).map(|why| {
            let variable = format!("STRATA_{}_ALGO", collective.name().replace('_', "").to_ascii_uppercase());
            format!("{variable}={}: {why}; every such call will fail", config.algorithm(collective))
        })
    };
    Collective::ALL.into_iter().filter_map(line).collect()
}

/// The algorithm that the call of a program asks for under a name of NCCL's (`RING_SIMPLE`), or under one of ours, if
/// there is one that does this.
pub fn by_nccl_name(name: &str, collective: Collective, grid: &Arc<Grid>) -> Option<String> {
    let base = name.to_ascii_lowercase();
    // Protocols mean something on a GPU only.
    let base = ["_simple", "_ll128", "_ll"].iter().find_map(|protocol| base.strip_suffix(protocol)).unwrap_or(&base);
    let candidates: &[&str] = match base {
        // NCCL's trees are logarithmic, and so are PAT's.
        "tree" => &["tree", "log"],
        "pat" => &["log"],
        base => &[name, base],
    };
    candidates.iter().find(|candidate| named_choice(candidate, collective, grid).is_ok()).map(ToString::to_string)
}

fn named_choice(name: &str, collective: Collective, grid: &Arc<Grid>) -> Result<Choice> {
    if name == vendor::VENDOR {
        let text = format!("{} is left to the vendor's library, and there is none", collective.name());
        return Err(Error::InvalidUsage(text));
    }
    let choice: Choice = name.parse()?;
    if algorithms::choices(collective, grid).contains(&choice)
        || algorithms::supports(&choice, &Shape::new(collective, grid.clone()))
    {
        return Ok(choice);
    }
    let known: Vec<String> = algorithms::choices(collective, grid).iter().map(Choice::to_string).collect();
    Err(Error::InvalidUsage(format!(
        "algorithm {name} does not do {} on {grid}; these do: {}",
        collective.name(),
        known.join(", ")
    )))
}

/// The board, on one node whose ranks share one.
fn on_board(request: &Request<'_>, grid: &Arc<Grid>, config: &Config) -> Option<(Choice, String)> {
    let Request { collective, block_bytes, board, .. } = *request;
    let one_round = collective != Collective::AllReduce || whole_vectors(block_bytes, grid.nranks() - 1, config);
    let choice = Choice::flat(if one_round { "board" } else { "board_two_rounds" });
    let can = board && config.board && algorithms::supports(&choice, &Shape::new(collective, grid.clone()));
    can.then(|| (choice, format!("one node, {} a block: a board in shared memory", counted(block_bytes, "byte"))))
}

/// Whether an all-reduce that receives `vectors` vectors does so in one go.
fn whole_vectors(bytes: usize, vectors: usize, config: &Config) -> bool {
    bytes.saturating_mul(vectors) <= config.one_round_max_bytes
}

/// The bytes of a block that go on the board at a time: what is copied or reduced together stays in a core's cache, and
/// what a rank brings fits on its board. Segments begin at multiples of 64 bytes.
fn board_segment(collective: Collective, nranks: usize) -> usize {
    match collective {
        Collective::ReduceScatter => BOARD_PART_BYTES.min(BOARD_BYTES / nranks / 64 * 64),
        Collective::AllReduce => (BOARD_PART_BYTES * nranks).min(BOARD_BYTES),
        _ => CACHE_BYTES,
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
        Collective::Broadcast | Collective::Reduce => {
            let long = match request.collective {
                Collective::Broadcast => "scatter_allgather",
                _ => "reduce_scatter_gather",
            };
            let algorithm = if bytes <= config.tree_max_bytes { "tree" } else { long };
            (Choice::flat(algorithm), compared(bytes, "STRATA_TREE_MAX_BYTES", config.tree_max_bytes))
        }
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
    }
}

/// On which side of a threshold a number of bytes is: `1024 bytes <= STRATA_TREE_MAX_BYTES=65536`.
fn compared(bytes: usize, variable: &str, threshold: usize) -> String {
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
        (1, _) => CACHE_BYTES,
        _ => (PIPELINE_BYTES / blocks).max(4096),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(collective: Collective, block_bytes: usize, grid: Grid, config: &Config) -> String {
        let request = Request { collective, block_bytes, named: None, board: true };
        choose(&request, &Arc::new(grid), config, &Knowledge::default()).unwrap().choice.to_string()
    }

    #[test]
    fn several_nodes_get_two_levels_and_the_threshold_splits_log_from_ring() {
        let config = Config { all_gather_rd_max_bytes: 8000, ..Config::default() };
        let grid = Grid::blocks(&[4, 4]);
        assert_eq!(chosen(Collective::AllGather, 1000, grid.clone(), &config), "two_level(direct,log)");
        assert_eq!(chosen(Collective::AllGather, 1001, grid, &config), "two_level(direct,ring)");
    }

    #[test]
    fn one_node_gets_the_board_where_its_ranks_share_one() {
        let config = Config::default();
        let on = |board, collective, block_bytes, config: &Config| {
            let request = Request { collective, block_bytes, named: None, board };
            choose(&request, &Arc::new(Grid::flat(4)), config, &Knowledge::default()).unwrap().choice.to_string()
        };
        assert_eq!(on(true, Collective::AllGather, 1001, &config), "board");
        assert_eq!(on(true, Collective::AllReduce, 131_072 / 3, &config), "board");
        assert_eq!(on(true, Collective::AllReduce, 131_072 / 3 + 1, &config), "board_two_rounds");
        assert_eq!(on(false, Collective::AllGather, 1001, &config), "direct");
        assert_eq!(on(true, Collective::AllToAll, 1001, &config), "direct");
        let off = Config { board: false, ..config };
        assert_eq!(on(true, Collective::AllGather, 1001, &off), "direct");
        let named = Request { collective: Collective::AllGather, block_bytes: 8, named: Some("board"), board: false };
        let refused = choose(&named, &Arc::new(Grid::flat(4)), &off, &Knowledge::default());
        assert!(matches!(refused, Err(Error::InvalidUsage(_))), "{refused:?}");
    }

    #[test]
    fn the_environment_s_algorithm_wins_and_an_impossible_one_is_refused() {
        let config = Config { all_gather_algo: "ring".to_string(), ..Config::default() };
        assert_eq!(chosen(Collective::AllGather, 1, Grid::flat(4), &config), "ring");
        let config = Config { all_gather_algo: "rd".to_string(), ..Config::default() };
        let request = Request { collective: Collective::AllGather, block_bytes: 1, named: None, board: true };
        let error = choose(&request, &Arc::new(Grid::flat(3)), &config, &Knowledge::default()).unwrap_err();
        assert!(matches!(&error, Error::InvalidUsage(text) if text.contains("these do: ")), "{error:?}");
    }

    #[test]
    fn a_collective_or_a_carrier_that_does_not_exist_is_told() {
        let left = |names: &str| unknown_names(&Config { vendor_only: names.to_string(), ..Config::default() });
        for right in ["none", "allgather", "all_gather, ReduceScatter", ""] {
            assert_eq!(left(right), [""; 0], "{right}");
        }
        assert_eq!(left("allgather,gathr"), ["STRATA_VENDOR_ONLY=allgather,gathr: there is no collective gathr"]);
        let told = unknown_names(&Config { inter: Inter::Unknown("mpl".to_string()), ..Config::default() });
        assert!(told.len() == 1 && told[0].starts_with("STRATA_INTER=mpl is none of"), "{told:?}");
    }

    #[test]
    fn a_wrong_name_is_told_with_the_nearest_one_and_a_right_one_is_not() {
        let named = |name: &str| unknown_algorithms(&Config { all_gather_algo: name.to_string(), ..Config::default() });
        for right in ["auto", "vendor", "ring", "two_level", "two_level(direct,log)"] {
            assert_eq!(named(right), [""; 0], "{right}");
        }
        assert!(named("rign")[0].starts_with("STRATA_ALLGATHER_ALGO=rign: algorithm rign: unknown; did you mean ring?"));
        assert!(named("two_level(dircet,log)")[0].contains("did you mean direct?"));
        assert!(named("reduce_scatter_gather")[0].contains("does not do all_gather"));
        for collective in Collective::ALL {
            let variable = format!("STRATA_{}_ALGO", collective.name().replace('_', "").to_ascii_uppercase());
            let mut config = Config::default();
            assert_eq!(config.set(&variable, "nothing"), Some(Ok(())), "{variable}");
            assert_eq!(unknown_algorithms(&config).len(), 1);
        }
    }

    #[test]
    fn nccl_s_names_of_algorithms_stand_for_ours() {
        let grid = Arc::new(Grid::blocks(&[2, 2]));
        let ours = |name: &str, collective| by_nccl_name(name, collective, &grid);
        assert_eq!(ours("RING_SIMPLE", Collective::AllReduce).as_deref(), Some("ring"));
        assert_eq!(ours("RING_LL128", Collective::AllGather).as_deref(), Some("ring"));
        assert_eq!(ours("PAT_SIMPLE", Collective::ReduceScatter).as_deref(), Some("log"));
        assert_eq!(ours("TREE_LL", Collective::AllReduce).as_deref(), Some("log"));
        assert_eq!(ours("TREE_LL", Collective::Broadcast).as_deref(), Some("tree"));
        assert_eq!(ours("two_level(ring,ring)", Collective::AllGather).as_deref(), Some("two_level(ring,ring)"));
        assert_eq!(ours("NVLS_SIMPLE", Collective::AllReduce), None);
    }

    #[test]
    fn every_collective_gets_a_choice_that_exists_for_every_shape() {
        let grids = [vec![1], vec![5], vec![2, 2], vec![3, 1, 4], vec![1, 1, 1], vec![20, 3]];
        for sizes in grids {
            let grid = Arc::new(Grid::blocks(&sizes));
            for collective in Collective::ALL {
                for block_bytes in [1, 1 << 12, 1 << 20, 1 << 30] {
                    let request = Request { collective, block_bytes, named: None, board: true };
                    let selection = choose(&request, &grid, &Config::default(), &Knowledge::default()).unwrap();
                    let shape = Shape::new(collective, grid.clone());
                    assert!(algorithms::supports(&selection.choice, &shape), "{} {sizes:?}", selection.choice);
                }
            }
        }
    }
}
