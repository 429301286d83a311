//! Which calls in front of a vendor library run in two levels, and which are the library's alone.
//!
//! Two levels are taken by default where the vendor's own rings pay for every rank in turn and bandwidth does not rule.
//! NVIDIA's all-gather and reduce-scatter use rings wherever a node has several GPUs, while its all-reduce has trees; AMD's
//! all-gather has two levels of its own since 2.28.3.
#![forbid(unsafe_code)]

use super::thresholds::compared;
use crate::algorithms::{self, Choice};
use crate::carrier::Carrier;
use crate::config::Config;
use crate::dtype::{DataType, RedOp};
use crate::error::counted;
use crate::plan::{Collective, Shape};
use crate::topo::Grid;
use std::sync::Arc;

/// The collectives that can run in two levels.
pub const COLLECTIVES: [Collective; 3] = [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce];

/// What `STRATA_<COLLECTIVE>_ALGO` calls the vendor's own.
pub const VENDOR: &str = "vendor";

/// AMD's first release whose all-gather has two levels.
const RCCL_HIERARCHICAL: i32 = 22803;

/// The vendor's library.
#[derive(Debug, Clone, Copy)]
pub struct Vendor {
    /// Its release, as `ncclGetVersion` tells it.
    pub version: i32,
    /// Whether it is AMD's.
    pub rccl: bool,
}

/// Who does a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// The vendor library alone.
    Vendor,
    /// Strata, in two levels.
    TwoLevel,
}

/// Why a call of a program is the vendor library's, on whatever communicator. Type and operation are the program's numbers.
pub fn obstacle(collective: Collective, count: usize, dtype: i32, op: i32) -> Option<&'static str> {
    if !COLLECTIVES.contains(&collective) {
        return Some("no two levels for this collective");
    }
    let known = DataType::from_code(dtype).filter(|dtype| dtype.is_nccl());
    let Some(dtype) = known else { return Some("an unknown type") };
    if count == 0 {
        return Some("no elements");
    }
    match RedOp::from_code(op).filter(|op| op.is_nccl()) {
        _ if !collective.reduces() => None,
        None => Some("an operation of the program's own"),
        Some(RedOp::Avg) if dtype.is_integer() => Some("averages of integers are rounded once"),
        Some(_) => None,
    }
}

/// Why no call of a collective can run in two levels on a grid.
pub(super) fn unfit(collective: Collective, grid: &Grid, carrier: Carrier) -> Option<&'static str> {
    match carrier.is_own() {
        _ if !COLLECTIVES.contains(&collective) => Some("no two levels for this collective"),
        false if !is_even(grid) => Some("nodes of different sizes, or one rank a node, or one node"),
        true if grid.nnodes() == 1 => Some("one node"),
        _ => None,
    }
}

/// What an algorithm means that the environment names.
pub(super) fn named(name: &str, collective: Collective, grid: &Arc<Grid>, carrier: Carrier) -> Option<(Route, String)> {
    let vendor = |why: &str| Some((Route::Vendor, why.to_string()));
    match (name, carrier.is_own()) {
        ("auto", _) => None,
        (VENDOR, _) => vendor("named by the environment"),
        (name, false) if !name.parse().is_ok_and(|choice| algorithms::is_leveled(&choice)) => {
            vendor("the environment names an algorithm of the host device's")
        }
        (name, true) if !is_possible(name, collective, grid) => {
            vendor("the environment names an algorithm that does not do it on these nodes")
        }
        _ => Some((Route::TwoLevel, "named by the environment".to_string())),
    }
}

/// What thresholds say of a message of so many bytes.
pub(super) fn by_bytes(
    collective: Collective,
    bytes: usize,
    grid: &Grid,
    config: &Config,
    library: Vendor,
) -> (Route, String) {
    let (variable, most) = match collective {
        Collective::AllGather if library.rccl && library.version >= RCCL_HIERARCHICAL => {
            return (Route::Vendor, "RCCL has two levels of its own".to_string())
        }
        Collective::AllGather => ("STRATA_ALLGATHER_RD_MAX_BYTES", config.all_gather_rd_max_bytes),
        Collective::ReduceScatter => ("STRATA_REDUCESCATTER_RD_MAX_BYTES", config.reduce_scatter_rd_max_bytes),
        _ => return (Route::Vendor, "the vendor's trees are logarithmic".to_string()),
    };
    let (nodes, least) = (grid.nnodes(), config.two_level_min_nodes);
    if nodes < least {
        return (Route::Vendor, format!("{} < STRATA_TWO_LEVEL_MIN_NODES={least}", counted(nodes, "node")));
    }
    let route = if bytes <= most { Route::TwoLevel } else { Route::Vendor };
    (route, compared(bytes, variable, most))
}

/// Whether an algorithm does a collective on a grid without a board.
fn is_possible(name: &str, collective: Collective, grid: &Arc<Grid>) -> bool {
    let shape = Shape::new(collective, grid.clone());
    let does = |choice: Choice| algorithms::supports(&choice, &shape) && !algorithms::is_on_board(&choice);
    name.parse::<Choice>().is_ok_and(does)
}

/// Whether all nodes have the same number of ranks, more than one, and there are several nodes.
fn is_even(grid: &Grid) -> bool {
    let (nodes, rails) = (grid.nnodes(), grid.nrails());
    nodes > 1 && rails > 1 && grid.nranks() == nodes * rails
}

/// What is left to the vendor in this process: what `STRATA_VENDOR_ONLY` names, and what `NCCL_ALGO` speaks of.
pub fn left_to_vendor(vendor_only: &str) -> String {
    let forced = named_by_nccl_algo(&std::env::var("NCCL_ALGO").unwrap_or_default());
    let names = vendor_only.split(',').chain(forced.iter().map(|collective| collective.name()));
    names.collect::<Vec<&str>>().join(",")
}

/// The collectives that `NCCL_ALGO` speaks of: its user wants the vendor's algorithm. Where `MSCCL` is among the algorithms the
/// user wants scripts, and the library's algorithms where none fits: that names nothing.
pub fn named_by_nccl_algo(value: &str) -> Vec<Collective> {
    let has_scripts = |algorithms: &str| {
        !algorithms.trim_start().starts_with('^')
            && algorithms.split(',').any(|algorithm| algorithm.trim().eq_ignore_ascii_case("msccl"))
    };
    let mut named = Vec::new();
    for entry in value.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
        match entry.split_once(':') {
            Some((_, algorithms)) if has_scripts(algorithms) => {}
            None if has_scripts(entry) => {}
            Some((function, _)) => named.extend(Collective::from_name(function.trim())),
            None => return Collective::ALL.to_vec(),
        }
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::selection::{decide, Context, Decision, Executor, Front, Request};

    const NCCL: Vendor = Vendor { version: 23203, rccl: false };
    const F32: i32 = 7;

    fn decision(collective: Collective, count: usize, sizes: &[usize], config: &Config, library: Vendor) -> Decision {
        let front = Some(Front { library, carrier: Carrier::Vendor, outlasts: false });
        let context = Context { front, ..Context::new(Arc::new(Grid::blocks(sizes)), config.clone(), false) };
        decide(&Request::new(collective, 4 * count), &context).unwrap()
    }

    fn routed(collective: Collective, count: usize, sizes: &[usize], config: &Config) -> bool {
        decision(collective, count, sizes, config, NCCL).executor == Executor::SubComms
    }

    #[test]
    fn small_messages_on_many_nodes_run_in_two_levels_and_others_do_not() {
        let config = Config::default();
        let many = [4; 8];
        assert!(routed(Collective::AllGather, 1000, &many, &config));
        assert!(routed(Collective::ReduceScatter, 1000, &many, &config));
        assert!(!routed(Collective::AllReduce, 1000, &many, &config), "NCCL has trees for it");
        assert!(!routed(Collective::AllGather, 1 << 20, &many, &config), "128 MiB");
        assert!(!routed(Collective::AllGather, 1000, &[4; 7], &config));
        assert!(!routed(Collective::Broadcast, 1000, &many, &config));
    }

    #[test]
    fn a_reason_names_the_variable_its_value_and_the_call_s() {
        let why = |count, nodes: usize| {
            let config = Config { all_gather_rd_max_bytes: 1 << 20, two_level_min_nodes: 8, ..Config::default() };
            let decision = decision(Collective::AllGather, count, &vec![4; nodes], &config, NCCL);
            format!("{:?}: {}", decision.executor, decision.reason)
        };
        assert_eq!(why(1000, 8), "SubComms: 128000 bytes <= STRATA_ALLGATHER_RD_MAX_BYTES=1048576");
        assert_eq!(why(10_000, 8), "Vendor: 1280000 bytes > STRATA_ALLGATHER_RD_MAX_BYTES=1048576");
        assert_eq!(why(1000, 7), "Vendor: 7 nodes < STRATA_TWO_LEVEL_MIN_NODES=8");
    }

    #[test]
    fn shapes_that_are_not_even_are_left_to_the_vendor_even_if_named() {
        let named = Config { all_gather_algo: "two_level".to_string(), ..Config::default() };
        assert!(routed(Collective::AllGather, 1, &[2, 2], &named));
        for sizes in [&[3, 1][..], &[1, 1], &[4], &[2, 2, 1]] {
            assert!(!routed(Collective::AllGather, 1, sizes, &named), "{sizes:?}");
        }
    }

    #[test]
    fn what_the_user_leaves_to_the_vendor_stays_there() {
        let named = Config { all_reduce_algo: "two_level".to_string(), ..Config::default() };
        assert!(routed(Collective::AllReduce, 1, &[2, 2], &named));
        let left = Config { vendor_only: "all_reduce,broadcast".to_string(), ..named };
        assert!(!routed(Collective::AllReduce, 1, &[2, 2], &left));
        let vendor = Config { all_gather_algo: "vendor".to_string(), ..Config::default() };
        assert!(!routed(Collective::AllGather, 1, &[4; 8], &vendor));
    }

    #[test]
    fn operations_that_do_not_compose_are_left_to_the_vendor() {
        let can = |dtype, op| obstacle(Collective::ReduceScatter, 1, dtype, op).is_none();
        assert!(can(F32, 4), "averages of floats");
        assert!(!can(2, 4), "averages of integers");
        assert!(!can(F32, 5), "made by the program");
        assert!(!can(99, 0));
        assert!(obstacle(Collective::AllGather, 0, F32, 0).is_some(), "nothing to do");
        assert!(obstacle(Collective::AllGather, 1, 2, 99).is_none(), "it has no operation");
    }

    #[test]
    fn rccl_keeps_its_own_two_levels() {
        let routed = |version| {
            let library = Vendor { version, rccl: true };
            decision(Collective::AllGather, 1, &[4; 8], &Config::default(), library).executor == Executor::SubComms
        };
        assert!(routed(22707));
        assert!(!routed(22803));
    }

    #[test]
    fn nccl_algo_names_functions_or_all() {
        use Collective::{AllGather, AllReduce};
        assert_eq!(named_by_nccl_algo("allgather:ring;allreduce:tree,ring"), [AllGather, AllReduce]);
        assert_eq!(named_by_nccl_algo("Ring,Tree"), Collective::ALL);
        assert_eq!(named_by_nccl_algo("^tree"), Collective::ALL);
        assert_eq!(named_by_nccl_algo("allgather:^ring"), [AllGather]);
        assert_eq!(named_by_nccl_algo(""), []);
        assert_eq!(named_by_nccl_algo("MSCCL,RING,TREE"), []);
        assert_eq!(named_by_nccl_algo("allgather:ring,msccl;allreduce:tree"), [AllReduce]);
        assert_eq!(named_by_nccl_algo("^msccl"), Collective::ALL);
    }
}
