//! What collectives will cost on a machine, in closed form: quick enough to compare hundreds of ways when a communicator
//! chooses. The simulator prices the same ways event by event, and tests hold the two together.
//!
//! A message of `S` bytes in `k` segments goes through stages: the rails, `r`, and the calls inside the node, `c`, each for
//! one segment. Where the vendor wants blocks together that are not so, they are brought together, `p`, and taken apart,
//! `u`, beside the calls of other segments. With a window `w` of segments in flight a new one comes every
//! `max(r, p, c, u, (r + p + c + u) / w)`, so the whole takes
//!
//! ```text
//! r + p + c + u + (k - 1) max(r, p, c, u, (r + p + c + u) / w)
//! ```
//!
//! Where the ranks of a single node are linked only in part, trees on the links are a candidate: a message of each tree and piece
//! for every step (C-Cube, equation 7).
//!
//! A script that is named for a level is priced by its rounds and by what its busiest rank receives and reduces.
//!
//! For short calls all of `p`, `c` and `u` is one stage. An all-reduce has calls before and after its rails, which share the
//! links inside the node: `c` is their sum.
#![forbid(unsafe_code)]

use super::thresholds::TreePieces;
use crate::algorithms::{self, Choice};
use crate::carrier::Carrier;
use crate::config::Config;
use crate::plan::{Collective, Shape};
use crate::script::store::{self, ScriptWork};
use crate::sim::machine::{Cluster, InterNode};
use crate::sim::price::{block_bytes, How, PricedPlan};
use crate::topo::Grid;
use std::sync::Arc;

/// A way to do a collective, with what it will take.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The way.
    pub how: How,
    /// The time, in ns.
    pub ns: f64,
}

/// The collectives that the model speaks of.
pub const COLLECTIVES: [Collective; 3] = [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce];

/// Whether the model prices an algorithm: those of two levels, and what they are made of between nodes.
pub fn prices(choice: &Choice) -> bool {
    ["two_level", "log", "ring"].contains(&choice.name.as_str())
}

/// Into how many segments a message may be cut.
const CUTS: [usize; 11] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64];
/// A segment of less than this, in bytes of the message, is not worth its steps.
const LEAST_SEGMENT: usize = 256 << 10;
/// Windows worth their scratch. An all-reduce has three stages.
fn windows(collective: Collective) -> &'static [usize] {
    match collective {
        Collective::AllReduce => &[3, 4],
        _ => &[2, 3, 4],
    }
}

/// The times of one segment inside the node: bringing blocks together, calls, and taking blocks apart.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Inside {
    packs: f64,
    calls: f64,
    unpacks: f64,
}

impl Inside {
    fn sum(self) -> f64 {
        self.packs + self.calls + self.unpacks
    }
}

/// The times of one segment: over the rails, inside the node, and on processors that all share.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Stages {
    rails: f64,
    node: Inside,
    processors: f64,
}

impl Stages {
    fn pipelined(self, segments: usize, window: usize) -> f64 {
        let once = self.rails + self.node.sum();
        let Inside { packs, calls, unpacks } = self.node;
        let longest = self.rails.max(packs).max(calls).max(unpacks);
        let period = longest.max(once / window.max(1) as f64).max(self.processors);
        once.max(self.processors) + (segments - 1) as f64 * period
    }
}

/// A machine as ranks of a grid see it.
#[derive(Debug)]
pub struct Model<'a> {
    machine: &'a Cluster,
    grid: &'a Arc<Grid>,
    /// Calls of more bytes have their blocks brought together and taken apart beside others.
    beside_bytes: f64,
}

impl Model<'_> {
    /// The model of a machine for a grid.
    pub fn new<'a>(machine: &'a Cluster, grid: &'a Arc<Grid>) -> Model<'a> {
        Model { machine, grid, beside_bytes: Config::default().pack_beside_bytes as f64 }
    }

    fn network(&self, carrier: Carrier) -> &InterNode {
        match (&self.machine.network_vendor, carrier) {
            (Some(network), Carrier::Vendor) => network,
            _ => &self.machine.network,
        }
    }

    /// ns for a byte that a rank takes in from other nodes, when all rails are busy: ranks share NICs.
    fn rail_ns_per_byte(&self, carrier: Carrier) -> f64 {
        let ranks = self.grid.nrails();
        let nics = (self.machine.node.nics.value as usize).clamp(1, ranks);
        ranks.div_ceil(nics) as f64 / self.machine.slowest_gbps(self.network(carrier), self.grid.nnodes())
    }

    /// What the script of this name does of a collective on so many ranks; none where it is no script, or not for that.
    fn script(name: &str, collective: Collective, nranks: usize) -> Option<ScriptWork> {
        let script = store::by_name(name)?;
        (script.script.collective == collective && script.script.nranks() == nranks).then(|| script.work())?
    }

    /// Rounds, bytes that a rank takes in on its rail for `bytes` of a segment, and bytes that it reduces of them.
    fn rail(&self, collective: Collective, rail: &str, bytes: f64) -> (f64, f64, f64) {
        if let Some(work) = Self::script(rail, collective, self.grid.nnodes()) {
            let bytes = bytes / self.grid.nrails() as f64;
            return (work.rounds as f64, work.received * bytes, work.reduced * bytes);
        }
        let nodes = self.grid.nnodes() as f64;
        let part = bytes * (nodes - 1.0) / nodes / self.grid.nrails() as f64;
        let rounds = if rail == "ring" { nodes - 1.0 } else { nodes.log2().ceil() };
        match collective {
            Collective::AllReduce => (2.0 * rounds, 2.0 * part, part),
            Collective::AllGather => (rounds, part, 0.0),
            _ => (rounds, part, part),
        }
    }

    /// The times inside the node for `bytes` of a segment.
    fn inside(&self, collective: Collective, (bytes, node): (f64, &str), carrier: Carrier) -> Inside {
        let ranks = self.grid.nrails();
        let local = &self.machine.local;
        if ranks == 1 {
            return Inside::default();
        }
        let halves: &[Collective] = match collective {
            Collective::AllReduce => &[Collective::ReduceScatter, Collective::AllGather],
            Collective::ReduceScatter => &[Collective::ReduceScatter],
            _ => &[Collective::AllGather],
        };
        let script = |half: &Collective| Self::script(node, *half, ranks);
        let by_library = self.machine.calls.is_some() && halves.iter().any(|half| script(half).is_none());
        let one = |half: &Collective| match (&self.machine.calls, script(half)) {
            (_, Some(work)) => {
                let (received, reduced) = (work.received * bytes, work.reduced * bytes);
                let launches = if reduced > 0.0 { work.rounds as f64 * local.launch_us.value } else { 0.0 };
                (work.rounds as f64 * self.machine.inside.latency_us.value + launches) * 1e3
                    + received / self.machine.inside.rank_gbps.value
                    + reduced / local.reduce_gbps.value
            }
            (Some(laws), None) => laws.ns(*half, ranks, bytes as usize).unwrap_or(0.0),
            (None, None) => {
                let share = bytes * (ranks as f64 - 1.0) / ranks as f64;
                let reduced = if *half == Collective::ReduceScatter { share / local.reduce_gbps.value } else { 0.0 };
                self.machine.inside.latency_us.value * 1e3 + share / self.machine.inside.rank_gbps.value + reduced
            }
        };
        let calls = halves.iter().map(one).sum();
        // Blocks of several nodes are brought together before a call, and taken apart behind it: a rank's own, and all.
        let (own, all) = (bytes / ranks as f64 / local.copy_gbps.value, bytes / local.copy_gbps.value);
        let (packs, unpacks) = match collective {
            _ if !by_library => (0.0, 0.0),
            // There a call is made for each node's blocks, which lie together.
            _ if carrier == Carrier::Vendor => (0.0, 0.0),
            Collective::AllReduce => (0.0, 0.0),
            Collective::ReduceScatter => (all, own),
            _ => (own, all),
        };
        match bytes > self.beside_bytes {
            true => Inside { packs, calls, unpacks },
            false => Inside { calls: packs + calls + unpacks, ..Inside::default() },
        }
    }

    fn stages(&self, collective: Collective, route: &PricedPlan, bytes: f64) -> Stages {
        let network = self.network(route.carrier);
        let local = &self.machine.local;
        let (rounds, taken, reduced) = self.rail(collective, &route.choice.rail, bytes);
        let launches = if collective == Collective::AllGather { 0.0 } else { rounds * local.launch_us.value * 1e3 };
        let round = (network.latency_us.value + network.gap_us.value + 2.0 * network.post_us.value) * 1e3;
        let rails = rounds * round
            + taken * self.rail_ns_per_byte(route.carrier)
            + launches
            + reduced / local.reduce_gbps.value;
        let node = self.inside(collective, (bytes, &route.choice.node), route.carrier);
        let processors = match local.processors.value {
            shared if shared >= 1.0 => {
                let carried = match network.processor_gbps.value {
                    rate if rate > 0.0 => 2.0 * taken / rate,
                    _ => 0.0,
                };
                (node.sum() + carried + reduced / local.reduce_gbps.value) * self.grid.nranks() as f64 / shared
            }
            _ => 0.0,
        };
        Stages { rails, node, processors }
    }

    /// The time of a route in two levels, in ns, for a message of so many bytes.
    pub fn route_ns(&self, collective: Collective, bytes: usize, route: &PricedPlan) -> f64 {
        let block = block_bytes(collective, self.grid.nranks(), bytes).max(1);
        let segments = block.div_ceil(route.segment_bytes.max(1)).max(1);
        let stages = self.stages(collective, route, bytes as f64 / segments as f64);
        self.machine.strata_call_ns() + stages.pipelined(segments, route.window.min(segments))
    }

    /// The time of a choice in two levels with segments of its own, where the model speaks of it.
    pub fn choice_ns(&self, collective: Collective, bytes: usize, route: &PricedPlan) -> Option<f64> {
        let levels = self.grid.nnodes() > 1 && COLLECTIVES.contains(&collective) && route.choice.name == "two_level";
        let known = |rail: &str| ["log", "ring"].contains(&rail) || store::by_name(rail).is_some();
        (levels && known(&route.choice.rail)).then(|| self.route_ns(collective, bytes, route))
    }

    /// The routes worth a look, and the vendor's library where the machine has one; the quickest first.
    pub fn candidates(&self, collective: Collective, bytes: usize) -> Vec<Candidate> {
        let mut all = Vec::new();
        let vendor = self.machine.vendor_ns(collective, self.grid, bytes);
        all.extend(vendor.map(|ns| Candidate { how: How::Vendor, ns }));
        if self.grid.nnodes() > 1 && COLLECTIVES.contains(&collective) {
            for route in self.routes(collective, bytes) {
                let ns = self.route_ns(collective, bytes, &route);
                all.push(Candidate { how: How::Strata(route), ns });
            }
        }
        all.extend(self.on_links(collective, bytes));
        all.sort_by(|one, other| one.ns.total_cmp(&other.ns));
        all
    }

    /// Trees on the links of a single node: as many messages as a piece goes through and there are pieces, each of a piece of one tree.
    fn on_links(&self, collective: Collective, bytes: usize) -> Option<Candidate> {
        let shape = Shape::new(collective, self.grid.clone());
        let choice = Choice::flat("link_trees");
        let cut = TreePieces::new(&choice, &shape, bytes, Some(self.machine))
            .filter(|_| algorithms::supports(&choice, &shape))?;
        let inside = &self.machine.inside;
        let of_tree = cut.bytes.min(bytes) as f64 / cut.trees as f64;
        let message = (inside.latency_us.value + inside.gap_us.value) * 1e3 + of_tree / inside.link_gbps.value;
        let messages = cut.steps + bytes.div_ceil(cut.bytes.max(1)).max(1) - 1;
        let route = PricedPlan { choice, segment_bytes: cut.bytes, window: cut.steps + 2, carrier: Carrier::MPI };
        Some(Candidate { how: How::Strata(route), ns: self.machine.strata_call_ns() + messages as f64 * message })
    }

    /// The routes in two levels, or, where each node has one rank, in one.
    fn routes(&self, collective: Collective, bytes: usize) -> Vec<PricedPlan> {
        let shape = Shape::new(collective, self.grid.clone());
        let block = block_bytes(collective, self.grid.nranks(), bytes).max(1);
        let name = |rail: &str| match self.grid.nrails() {
            1 => Choice::flat(rail),
            _ => Choice::leveled("two_level", "direct", rail),
        };
        let mut routes = Vec::new();
        for rail in ["log", "ring"] {
            let choice = Choice { rail: rail.to_string(), ..name(rail) };
            if !algorithms::supports(&choice, &shape) {
                continue;
            }
            for cut in CUTS.into_iter().filter(|&cut| cut == 1 || bytes / cut >= LEAST_SEGMENT) {
                let windows = if cut == 1 { &[1] } else { windows(collective) };
                routes.extend(windows.iter().filter(|&&window| window <= cut.max(2)).map(|&window| {
                    // Segments begin at multiples of 64 bytes of a block.
                    let segment_bytes = if cut == 1 { usize::MAX } else { block.div_ceil(cut).next_multiple_of(64) };
                    PricedPlan { choice: choice.clone(), segment_bytes, window, carrier: Carrier::MPI }
                }));
            }
            if self.machine.network_vendor.is_some() && self.grid.nrails() > 1 {
                routes.push(PricedPlan { choice, segment_bytes: usize::MAX, window: 1, carrier: Carrier::Vendor });
            }
        }
        routes
    }
}

/// The candidates for a message on a machine, the quickest first.
pub fn candidates(machine: &Cluster, grid: &Arc<Grid>, collective: Collective, bytes: usize) -> Vec<Candidate> {
    Model::new(machine, grid).candidates(collective, bytes)
}
