//! What a collective costs on a machine, by whichever way: the vendor's library by its law, plans by running them.
//!
//! Plans run on the production executor under a virtual clock, with the times of a machine (`sim::fabric`). Where all nodes are
//! equal, ranks on different NICs of a node play the same part at the same time, so only those on the first NIC of each node
//! are run; `folding_changes_nothing` holds that the times are the same.
#![forbid(unsafe_code)]

use super::fabric::{Busy, Fabric, Manner, Resource};
use super::machine::Cluster;
use super::skew::Skew;
use super::{Job, Sim, SimOptions};
use crate::algorithms::{self, levels, two_step, Choice};
use crate::carrier::Carrier;
use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::exec::Program;
use crate::plan::weights::ChunkWeights;
use crate::plan::{Call, Collective, LinkLevel, Shape};
use crate::script::store;
use crate::topo::{Grid, Rank};
use std::sync::Arc;

/// A plan and how it is run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PricedPlan {
    /// The algorithm.
    pub choice: Choice,
    /// Bytes of each block handled at a time.
    pub segment_bytes: usize,
    /// Segments in flight.
    pub window: usize,
    /// Between nodes.
    pub carrier: Carrier,
}

/// Who does a collective.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum How {
    /// The vendor's library on all ranks.
    Vendor,
    /// The machine's MPI on all ranks.
    Mpi,
    /// The carrier of this name on all ranks.
    Carrier(String),
    /// The carrier that is the quickest for the call.
    Mix,
    /// PCCL as it was published: two levels, one after the other, with this algorithm between nodes (`ring`, `rd`).
    Pccl {
        /// Between nodes.
        rail: &'static str,
        /// And its carrier.
        carrier: Carrier,
    },
    /// Strata.
    Strata(PricedPlan),
    /// Strata, each chunk of a block with a share of its own (`selection::shares`).
    Shared(PricedPlan, Arc<ChunkWeights>),
}

/// How much is to be found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Detail {
    /// Run only ranks that differ.
    pub fold: bool,
    /// Keep every activity.
    pub timeline: bool,
    /// How blocks differ in size, where they do.
    pub skew: Option<Skew>,
}

impl Default for Detail {
    fn default() -> Detail {
        Detail { fold: true, timeline: false, skew: None }
    }
}

/// The price of a collective.
#[derive(Debug, Clone, PartialEq)]
pub struct Price {
    /// Until the last rank has its result.
    pub ns: f64,
    /// How many leading bytes of the message are final on all ranks from when on, in ns, as far as ranks tell it before the end: of
    /// messages of one block, by plans.
    pub front: Vec<(usize, f64)>,
    /// For how long the busiest resource of each kind was busy, in ns; empty for a law.
    pub busiest: Vec<(Resource, u64)>,
    /// What was busy when, if it was kept.
    pub timeline: Vec<Busy>,
    /// Events of the simulation.
    pub events: u64,
}

impl Price {
    /// The *turnaround*: when the first segment is final on all ranks, in ns.
    pub fn first_ns(&self) -> f64 {
        self.front.first().map_or(self.ns, |&(_, ns)| ns)
    }

    /// When so many leading bytes of the message are final on all ranks, in ns.
    pub fn final_ns(&self, bytes: usize) -> f64 {
        self.front.iter().find(|&&(front, _)| front >= bytes).map_or(self.ns, |&(_, ns)| ns)
    }

    /// The same a while later.
    fn later(mut self, ns: f64) -> Price {
        self.ns += ns;
        self.front.iter_mut().for_each(|(_, front)| *front += ns);
        self
    }

    /// The resource that was busy for the longest time, with its share of the whole.
    pub fn binding(&self) -> Option<(Resource, f64)> {
        let (resource, ns) = self.busiest.iter().copied().max_by_key(|&(_, ns)| ns)?;
        Some((resource, ns as f64 / self.ns.max(1.0)))
    }

    /// A price that nothing was run for.
    pub fn by_law(ns: f64) -> Price {
        Price { ns, front: Vec::new(), busiest: Vec::new(), timeline: Vec::new(), events: 0 }
    }
}

/// The bytes of one block of a message: all-gather's output and reduce-scatter's input hold a block of each rank. Of a custom
/// collective the bytes of its whole buffer.
pub fn block_bytes(collective: Collective, nranks: usize, message_bytes: usize) -> usize {
    match collective {
        Collective::AllGather | Collective::ReduceScatter => message_bytes.div_ceil(nranks.max(1)),
        _ => message_bytes,
    }
}

/// The bytes that laws of carriers speak of: of an all-to-all, whose message is one block, all that a rank sends.
fn whole_bytes(collective: Collective, nranks: usize, message_bytes: usize) -> usize {
    match collective {
        Collective::AllToAll => message_bytes.saturating_mul(nranks),
        _ => message_bytes,
    }
}

/// A grid of `nranks` on this machine's nodes; the last one may have fewer.
pub fn grid_of(machine: &Cluster, nranks: usize) -> Arc<Grid> {
    let per_node = machine.ranks_per_node();
    let sizes: Vec<usize> = (0..nranks.div_ceil(per_node)).map(|node| per_node.min(nranks - node * per_node)).collect();
    Arc::new(machine.on_links(Grid::blocks(&sizes)))
}

/// Prices a collective of `message_bytes` (all-gather: of the output; reduce-scatter: of the input; else of the vector).
pub fn price(
    machine: &Arc<Cluster>,
    grid: &Arc<Grid>,
    collective: Collective,
    message_bytes: usize,
    how: &How,
    detail: Detail,
) -> Result<Price> {
    let no_law = |whose: &str| {
        Error::InvalidArgument(format!("machine {} knows no {} of {whose}", machine.name, collective.name()))
    };
    if let (Some(_), false) = (detail.skew, matches!(how, How::Strata(_))) {
        let text = "laws speak of blocks of one size: skewed ones are simulated for Strata and for algorithms";
        return Err(Error::InvalidArgument(text.to_string()));
    }
    match how {
        How::Vendor => {
            let law = machine.vendor_ns(collective, grid, message_bytes);
            law.map(Price::by_law).ok_or_else(|| no_law("the vendor's library"))
        }
        How::Mpi => {
            let law = machine.mpi.as_ref().and_then(|laws| laws.ns(collective, grid.nranks(), message_bytes));
            law.map(Price::by_law).ok_or_else(|| no_law("its MPI"))
        }
        How::Carrier(name) => {
            let law = machine.carrier_ns(
                name,
                collective,
                grid,
                whole_bytes(collective, grid.nranks(), message_bytes),
                None,
            )?;
            law.map(Price::by_law).ok_or_else(|| no_law(name))
        }
        How::Mix => {
            let best = machine.mix_ns(collective, grid, whole_bytes(collective, grid.nranks(), message_bytes), None);
            best.map(|(_, ns)| Price::by_law(ns)).ok_or_else(|| no_law("any carrier"))
        }
        How::Pccl { rail, carrier } => pccl(machine, grid, collective, message_bytes, (rail, *carrier), detail),
        How::Strata(route) => {
            let manner =
                Manner { vendor_rails: route.carrier == Carrier::Vendor, keep: detail.timeline, ..Manner::default() };
            let price = run(machine, grid, (collective, message_bytes), (route, None), manner, detail)?;
            Ok(price.later(machine.strata_call_ns()))
        }
        How::Shared(route, weights) => {
            let manner = Manner { keep: detail.timeline, ..Manner::default() };
            let price = run(machine, grid, (collective, message_bytes), (route, Some(weights)), manner, detail)?;
            Ok(price.later(machine.strata_call_ns()))
        }
    }
}

fn pccl(
    machine: &Arc<Cluster>,
    grid: &Arc<Grid>,
    collective: Collective,
    message_bytes: usize,
    (rail, carrier): (&str, Carrier),
    detail: Detail,
) -> Result<Price> {
    let mut manner = Manner { vendor_rails: carrier == Carrier::Vendor, keep: detail.timeline, ..Manner::default() };
    let mut call_ns = 0.0;
    if let Some(pccl) = &machine.pccl {
        call_ns = pccl.call_us.value * 1e3;
        manner.reduce_gbps = pccl.reduce_gbps.value;
        if rail != "ring" && carrier.is_own() {
            manner.round_ns = (pccl.round_us.value * 1e3) as u64;
        }
    }
    if grid.nnodes() == 1 {
        let law = machine.vendor_ns(collective, grid, message_bytes);
        let no_law = || Error::InvalidArgument(format!("machine {} knows no calls inside a node", machine.name));
        return law.map(|law| Price::by_law(law + call_ns)).ok_or_else(no_law);
    }
    let name = if collective == Collective::AllReduce { "two_level" } else { "two_level_shuffle" };
    let choice = Choice::leveled(name, "direct", rail);
    let route = PricedPlan { choice, segment_bytes: usize::MAX, window: 1, carrier };
    Ok(run(machine, grid, (collective, message_bytes), (&route, None), manner, detail)?.later(call_ns))
}

/// Runs a plan on all ranks, or on those that differ.
fn run(
    machine: &Arc<Cluster>,
    grid: &Arc<Grid>,
    (collective, message_bytes): (Collective, usize),
    (route, weights): (&PricedPlan, Option<&Arc<ChunkWeights>>),
    manner: Manner,
    detail: Detail,
) -> Result<Price> {
    let shape = Shape::new(collective, grid.clone());
    let choice = &route.choice;
    let leveled = algorithms::is_leveled(choice);
    // What a library does inside a node is known for blocks of one size.
    let calls = machine.calls.is_some() && leveled && detail.skew.is_none() && weights.is_none();
    let calls =
        calls && matches!(collective, Collective::AllGather | Collective::ReduceScatter | Collective::AllReduce);
    // The vendor's library does what is called inside a node, but for what a script is named for.
    let by_library = |call: &Call| call.level == LinkLevel::Node && !levels::is_by_script(choice, call);
    let program = |rank: usize| -> Result<Arc<Program>> {
        let rank = Rank::from_index(rank);
        let plan = match calls {
            true => algorithms::build_around(choice, &shape, rank, &by_library)?,
            false => algorithms::build(choice, &shape, rank)?,
        };
        Ok(Arc::new(Program::new(plan)?))
    };
    let on_first_nic = |rank: usize| machine.nic_of(grid.local(Rank::from_index(rank)), grid.nrails()) == 0;
    // Ranks that send to each other inside a node are not alone with their NIC's.
    let fold = detail.fold && calls && grid.is_even() && levels::script(&choice.node).is_none();
    let run_here = |rank: usize| (!fold || on_first_nic(rank)).then(|| program(rank)).transpose();
    let programs = (0..grid.nranks()).map(run_here).collect::<Result<Vec<_>>>()?;
    let protocol = |name: &str| store::by_name(name).and_then(|script| machine.protocol(&script.script.protocol));
    let (inside, between) = match leveled {
        true => (protocol(&choice.node), protocol(&choice.rail)),
        false => (protocol(&choice.name), protocol(&choice.name)),
    };
    let lanes = |program: &Arc<Program>| program.plan().lanes.iter().filter(|lane| !lane.steps.is_empty()).count();
    let lanes = programs.iter().flatten().map(lanes).max().unwrap_or(0);
    let fabric = Fabric::new(machine, grid, manner).speaking(inside, between);
    let state = fabric.state.clone();
    let dtype = DataType::F32;
    let contract = store::by_name(&choice.name).and_then(|script| script.script.contract.as_ref());
    let blocks = contract.map_or(1, |contract| contract.blocks());
    let count = block_bytes(collective, grid.nranks(), message_bytes).div_ceil(blocks * dtype.size());
    let mut tables = detail.skew.map(|skew| skew.tables(collective, grid.nranks(), count)).transpose()?;
    let mut told_ns = 0.0;
    if let (Some(tables), true) = (&mut tables, choice.name == two_step::TWO_STEP.name) {
        *tables = two_step::handing(tables, grid);
        told_ns = counts_ns(&programs, Fabric::new(machine, grid, manner))?;
    }
    let job =
        Job { count, blocks: tables.as_deref(), dtype, segment_bytes: route.segment_bytes, inputs: None, weights };
    let options = SimOptions { window: route.window, capacity: 64, ..SimOptions::default() };
    let report = Sim::with_durations(0, options, fabric)
        .run_mirrored(&programs, &job)
        .map_err(|failure| Error::Internal(format!("{choice} on {grid}: {}", failure.reason)))?;
    let mut state = state.borrow_mut();
    let price = Price {
        ns: report.last_ns() as f64,
        front: front(&programs, &job, collective, &report.front_ns),
        busiest: state.busiest(),
        timeline: state.take_kept(),
        events: report.events,
    };
    Ok(price.later(told_ns + machine.launch_ns(lanes)))
}

/// The time of the round of counts before a call by these programs.
fn counts_ns(programs: &[Option<Arc<Program>>], fabric: Fabric) -> Result<f64> {
    let programs: Vec<Arc<Program>> = programs.iter().flatten().cloned().collect();
    let job =
        Job { count: 1, blocks: None, dtype: DataType::U64, segment_bytes: usize::MAX, inputs: None, weights: None };
    let report = Sim::with_durations(0, SimOptions::default(), fabric).run(&programs, &job);
    let report = report.map_err(|failure| Error::Internal(format!("a round of counts: {}", failure.reason)))?;
    Ok(report.last_ns() as f64)
}

/// Which bytes are final when, of a message that is one block.
fn front(
    programs: &[Option<Arc<Program>>],
    job: &Job<'_>,
    collective: Collective,
    front_ns: &[u64],
) -> Vec<(usize, f64)> {
    let one_block = collective != Collective::Custom && collective.blocks(2) == 1;
    let Some(program) = programs.iter().flatten().next().filter(|_| one_block && job.blocks.is_none()) else {
        return Vec::new();
    };
    let layout = job.layout(program);
    (1..).zip(front_ns).map(|(segments, &ns)| (layout.front_bytes(segments), ns as f64)).collect()
}
