//! Which calls run in two levels over the vendor's communicators, and which are the vendor's alone.
//!
//! The choice is a pure function of what is equal on all ranks: the call's count, type and operation, the grid, the
//! agreed configuration, and the vendor's release. In order: `STRATA_VENDOR_ONLY` and `NCCL_ALGO` leave a collective to
//! the vendor; `STRATA_<COLLECTIVE>_ALGO` names `vendor` or `two_level`; thresholds that the user has set; the tuning
//! table; the cost model, where `STRATA_MACHINE` names a machine whose vendor's times are known; else two levels are taken
//! where the vendor's own rings pay for every rank in turn and bandwidth does not rule.
//!
//! Facts behind the last: NVIDIA's all-gather and reduce-scatter use rings wherever a node has several GPUs, while its
//! all-reduce has trees; AMD's all-gather has two levels of its own since 2.28.3.
#![forbid(unsafe_code)]

use super::table::{has_thresholds_over, Tuned};
use super::{compared, message_bytes, model, Knowledge};
use crate::algorithms::{self, Choice};
use crate::carrier::Carrier;
use crate::config::Config;
use crate::dtype::{DataType, RedOp};
use crate::error::counted;
use crate::plan::{Collective, Shape};
use crate::topo::Grid;
use std::fmt;
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

/// What is known of a call.
#[derive(Debug, Clone, Copy)]
pub struct VendorRequest {
    /// What is to be done.
    pub collective: Collective,
    /// Elements in one block.
    pub count: usize,
    /// The type of an element.
    pub dtype: i32,
    /// The operation, for those that reduce.
    pub op: i32,
}

/// Who does a call, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VendorRoute {
    /// Strata, in two levels.
    TwoLevel(Reason),
    /// The vendor's library alone.
    Vendor(Reason),
}

/// Why a call goes where it goes; made for each call, and written out for few.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// In words.
    Words(&'static str),
    /// The call's bytes, against the value of a variable.
    Bytes {
        /// The message's.
        bytes: usize,
        /// The variable.
        variable: &'static str,
        /// Its value.
        threshold: usize,
    },
    /// So many nodes, and fewer than `STRATA_TWO_LEVEL_MIN_NODES`.
    Nodes(usize, usize),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::Words(words) => f.write_str(words),
            Reason::Bytes { bytes, variable, threshold } => f.write_str(&compared(bytes, variable, threshold)),
            Reason::Nodes(nodes, least) => write!(f, "{} < STRATA_TWO_LEVEL_MIN_NODES={least}", counted(nodes, "node")),
        }
    }
}

fn vendor(words: &'static str) -> VendorRoute {
    VendorRoute::Vendor(Reason::Words(words))
}

fn two_level(words: &'static str) -> VendorRoute {
    VendorRoute::TwoLevel(Reason::Words(words))
}

/// What holds for all calls of one collective on a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// They all go there.
    All(VendorRoute),
    /// They run in two levels up to as many bytes as this variable says.
    UpTo(&'static str, usize),
}

/// What holds on one communicator: decided once, so that a call costs a look.
#[derive(Debug, Clone)]
pub struct VendorRules {
    nranks: usize,
    carrier: Carrier,
    of: [Rule; COLLECTIVES.len()],
    /// What is asked before the rule, for collectives about which the user has said nothing.
    tuned: [Option<Arc<Tuned>>; COLLECTIVES.len()],
    /// What the cost model says, asked behind the table: by the logarithm of the bytes.
    model: [Option<u64>; COLLECTIVES.len()],
}

impl VendorRules {
    /// The rules on this grid, under the agreed configuration.
    pub fn new(grid: &Grid, config: &Config, vendor: Vendor, carrier: Carrier) -> VendorRules {
        let of = COLLECTIVES.map(|collective| rule(collective, grid, config, (vendor, carrier)));
        let nobody = [const { None }; COLLECTIVES.len()];
        VendorRules { nranks: grid.nranks(), carrier, of, tuned: nobody, model: [None; COLLECTIVES.len()] }
    }

    /// The same with a tuning table and a machine whose costs are known.
    pub fn knowing(mut self, grid: &Arc<Grid>, config: &Config, knowledge: &Knowledge) -> VendorRules {
        let open = COLLECTIVES.map(|collective| {
            let said = config.leaves_to_vendor(collective)
                || config.algorithm(collective) != "auto"
                || has_thresholds_over(collective, config);
            let can = if self.carrier.is_own() { grid.nnodes() > 1 } else { is_even(grid) };
            (can && !said).then_some(collective)
        });
        self.tuned = open.map(|open| open.map(|_| knowledge.tuned.clone()));
        if let Some(machine) = &knowledge.machine {
            self.model = open.map(|open| model::takes_over(machine, grid, open?, self.carrier));
        }
        self
    }

    /// What goes between nodes.
    pub fn carrier(&self) -> Carrier {
        self.carrier
    }

    /// Whether any call can come to run in two levels: else the communicator needs no further ones.
    pub fn can_profit(&self) -> bool {
        let tuned = self.tuned.iter().zip(COLLECTIVES);
        self.of.iter().any(|rule| !matches!(rule, Rule::All(VendorRoute::Vendor(_))))
            || self.model.iter().flatten().any(|&sizes| sizes != 0)
            || tuned.filter_map(|(tuned, collective)| Some((tuned.as_ref()?, collective))).any(|(t, c)| t.takes_over(c))
    }

    /// Decides for one call.
    pub fn route(&self, request: &VendorRequest) -> VendorRoute {
        let VendorRequest { collective, count, dtype, op } = *request;
        let Some(index) = COLLECTIVES.iter().position(|&other| other == collective) else {
            return vendor("no two levels for this collective");
        };
        let Some(dtype) = DataType::from_code(dtype) else { return vendor("an unknown type") };
        if count == 0 {
            return vendor("no elements");
        }
        if collective.reduces() {
            match RedOp::from_code(op) {
                None => return vendor("an operation of the program's own"),
                Some(RedOp::Avg) if dtype.is_integer() => return vendor("averages of integers are rounded once"),
                Some(_) => {}
            }
        }
        let bytes = message_bytes(collective, self.nranks, count.saturating_mul(dtype.size()));
        match self.tuned[index].as_ref().and_then(|tuned| tuned.leaves_to_vendor(collective, bytes)) {
            Some(true) => return vendor("the tuning table has it"),
            Some(false) => return two_level("the tuning table has it"),
            None => {}
        }
        if let Some(sizes) = self.model[index] {
            return match sizes >> bytes.max(1).ilog2() & 1 {
                1 => two_level("the cost model sees a clear win"),
                _ => vendor("the cost model sees no clear win"),
            };
        }
        match self.of[index] {
            Rule::All(route) => route,
            Rule::UpTo(variable, threshold) => {
                let reason = Reason::Bytes { bytes, variable, threshold };
                match bytes <= threshold {
                    true => VendorRoute::TwoLevel(reason),
                    false => VendorRoute::Vendor(reason),
                }
            }
        }
    }
}

fn rule(collective: Collective, grid: &Grid, config: &Config, (library, carrier): (Vendor, Carrier)) -> Rule {
    if config.leaves_to_vendor(collective) {
        return Rule::All(vendor("STRATA_VENDOR_ONLY or NCCL_ALGO names it"));
    }
    match carrier.is_own() {
        false if !is_even(grid) => {
            return Rule::All(vendor("nodes of different sizes, or one rank a node, or one node"))
        }
        true if grid.nnodes() == 1 => return Rule::All(vendor("one node")),
        _ => {}
    }
    match (config.algorithm(collective), carrier.is_own()) {
        ("auto", _) => {}
        (VENDOR, _) => return Rule::All(vendor("named by the environment")),
        (name, false) if !name.parse().is_ok_and(|choice| algorithms::is_leveled(&choice)) => {
            return Rule::All(vendor("the environment names an algorithm of the host device's"))
        }
        (name, true) if !is_possible(name, collective, grid) => {
            return Rule::All(vendor("the environment names an algorithm that does not do it on these nodes"))
        }
        _ => return Rule::All(two_level("named by the environment")),
    }
    let (variable, most) = match collective {
        Collective::AllGather if library.rccl && library.version >= RCCL_HIERARCHICAL => {
            return Rule::All(vendor("RCCL has two levels of its own"))
        }
        Collective::AllGather => ("STRATA_ALLGATHER_RD_MAX_BYTES", config.all_gather_rd_max_bytes),
        Collective::ReduceScatter => ("STRATA_REDUCESCATTER_RD_MAX_BYTES", config.reduce_scatter_rd_max_bytes),
        _ => return Rule::All(vendor("the vendor's trees are logarithmic")),
    };
    let (nodes, least) = (grid.nnodes(), config.two_level_min_nodes);
    match nodes < least {
        true => Rule::All(VendorRoute::Vendor(Reason::Nodes(nodes, least))),
        false => Rule::UpTo(variable, most),
    }
}

/// Whether an algorithm does a collective on a grid without a board.
fn is_possible(name: &str, collective: Collective, grid: &Grid) -> bool {
    let shape = Shape::new(collective, Arc::new(grid.clone()));
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

/// The collectives that `NCCL_ALGO` speaks of: its user wants the vendor's algorithm.
pub fn named_by_nccl_algo(value: &str) -> Vec<Collective> {
    let mut named = Vec::new();
    for entry in value.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
        match entry.split_once(':') {
            Some((function, _)) => named.extend(Collective::from_name(function.trim())),
            None => return Collective::ALL.to_vec(),
        }
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    const NCCL: Vendor = Vendor { version: 23203, rccl: false };
    const F32: i32 = 7;

    fn routed(collective: Collective, count: usize, sizes: &[usize], config: &Config) -> bool {
        let request = VendorRequest { collective, count, dtype: F32, op: 0 };
        matches!(
            VendorRules::new(&Grid::blocks(sizes), config, NCCL, Carrier::Vendor).route(&request),
            VendorRoute::TwoLevel(_)
        )
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
        assert!(!routed(Collective::AllGather, 0, &many, &config));
        assert!(!routed(Collective::Broadcast, 1000, &many, &config));
    }

    #[test]
    fn a_reason_names_the_variable_its_value_and_the_call_s() {
        let why = |count, nodes: usize| {
            let request = VendorRequest { collective: Collective::AllGather, count, dtype: F32, op: 0 };
            let grid = Grid::blocks(&vec![4; nodes]);
            let config = Config { all_gather_rd_max_bytes: 1 << 20, two_level_min_nodes: 8, ..Config::default() };
            match VendorRules::new(&grid, &config, NCCL, Carrier::Vendor).route(&request) {
                VendorRoute::TwoLevel(why) => format!("ours: {why}"),
                VendorRoute::Vendor(why) => format!("vendor: {why}"),
            }
        };
        assert_eq!(why(1000, 8), "ours: 128000 bytes <= STRATA_ALLGATHER_RD_MAX_BYTES=1048576");
        assert_eq!(why(10_000, 8), "vendor: 1280000 bytes > STRATA_ALLGATHER_RD_MAX_BYTES=1048576");
        assert_eq!(why(1000, 7), "vendor: 7 nodes < STRATA_TWO_LEVEL_MIN_NODES=8");
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
        let config = Config { reduce_scatter_algo: "two_level".to_string(), ..Config::default() };
        let routed = |dtype, op| {
            let request = VendorRequest { collective: Collective::ReduceScatter, count: 1, dtype, op };
            matches!(
                VendorRules::new(&Grid::blocks(&[2, 2]), &config, NCCL, Carrier::Vendor).route(&request),
                VendorRoute::TwoLevel(_)
            )
        };
        assert!(routed(F32, 4), "averages of floats");
        assert!(!routed(2, 4), "averages of integers");
        assert!(!routed(F32, 5), "made by the program");
        assert!(!routed(99, 0));
    }

    #[test]
    fn rccl_keeps_its_own_two_levels() {
        let request = VendorRequest { collective: Collective::AllGather, count: 1, dtype: F32, op: 0 };
        let routed = |version| {
            let vendor = Vendor { version, rccl: true };
            matches!(
                VendorRules::new(&Grid::blocks(&[4; 8]), &Config::default(), vendor, Carrier::Vendor).route(&request),
                VendorRoute::TwoLevel(_)
            )
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
    }
}
