//! The simulated world: all ranks of a collective in one thread, under a virtual clock and a seed.
//!
//! The ranks run the production executor. Messages, copies and calls take the times that a [`Durations`] says; with
//! [`Chaos`] these are random, so that completions come in every order a transport may produce. Bytes move as late, or
//! as early, as a transport may move them: a plan with a race gives a wrong result under some seeds. The same seed gives
//! the same events.
#![forbid(unsafe_code)]

mod arithmetic;
mod calls;
pub mod carriers;
mod durations;
mod fabric;
pub mod machine;
mod memory;
mod network;
pub mod nodes;
pub mod orders;
mod outcome;
pub mod price;
mod random;
pub mod skew;
mod stream;
pub mod terms;
#[cfg(test)]
mod tests;

pub use arithmetic::{expected, expected_of, Arithmetic};
pub use durations::{CallWork, Chaos, Durations, InFlight, LocalWork, Uniform};
pub use fabric::{Busy, Resource};
pub use machine::Cluster;
pub use outcome::{RankOutcome, SimFailure, SimReport};
pub use random::Random;

use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::exec::{Execution, Program, Progress};
use crate::plan::blocks::BlockTable;
use crate::plan::layout::Layout;
use crate::plan::weights::ChunkWeights;
use crate::plan::Plan;
use crate::topo::Rank;
use memory::RankMemory;
use network::{Network, SimEvent, SimWorld};
use std::sync::Arc;

/// Something that goes wrong at a chosen time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFault {
    /// The rank stops for ever.
    Die {
        /// Which.
        rank: Rank,
        /// When.
        at_ns: u64,
    },
    /// The rank stops for a time; `u64::MAX` is for ever.
    Freeze {
        /// Which.
        rank: Rank,
        /// When.
        at_ns: u64,
        /// How long.
        for_ns: u64,
    },
    /// The rank's next operation returns an error.
    Fail {
        /// Which.
        rank: Rank,
        /// When.
        at_ns: u64,
    },
}

/// The circumstances of a simulated run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimOptions {
    /// Segments in flight.
    pub window: usize,
    /// Messages under way from one rank to another on one channel; one more is refused. At least 1.
    pub capacity: usize,
    /// How long a rank waits without progress, in ns; 0 is for ever.
    pub limit_ns: u64,
    /// Whether the program overwrites what is final as soon as it is, and keeps what it was.
    pub overwrites: bool,
    /// What goes wrong.
    pub faults: Vec<InjectedFault>,
}

impl Default for SimOptions {
    fn default() -> SimOptions {
        SimOptions { window: 2, capacity: 1, limit_ns: 0, overwrites: false, faults: Vec::new() }
    }
}

/// What is to be computed.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    /// Elements in a block, where all are of one size.
    pub count: usize,
    /// The blocks of each rank, where they differ in size.
    pub blocks: Option<&'a [Arc<BlockTable>]>,
    /// Their type.
    pub dtype: DataType,
    /// Bytes of each block in a segment.
    pub segment_bytes: usize,
    /// One input per rank, of `Collective::input_blocks` blocks or as `blocks` says; None simulates sizes and times only.
    pub inputs: Option<&'a [Vec<u8>]>,
    /// What each chunk of a block has of it, where that differs; blocks have one size.
    pub weights: Option<&'a Arc<ChunkWeights>>,
}

impl Job<'_> {
    fn layout(&self, program: &Program) -> Layout {
        let elem_bytes = self.dtype.size();
        let layout = match self.blocks.and_then(|blocks| blocks.get(program.plan().rank.index())) {
            None => program.layout(self.count, elem_bytes, self.segment_bytes),
            Some(blocks) => program.layout_of(Arc::clone(blocks), elem_bytes, self.segment_bytes),
        };
        match self.weights {
            Some(weights) if weights.chunks() == program.plan().chunks_per_block as usize => {
                layout.weighted(Arc::clone(weights))
            }
            _ => layout,
        }
    }
}

/// Events after which a run is given up.
const MOST_EVENTS: u64 = 1 << 32;

/// A simulated machine.
pub struct Sim<D = Chaos> {
    seed: u64,
    options: SimOptions,
    durations: D,
    /// One per rank; kept from run to run, as a communicator keeps its own.
    executions: Vec<Execution>,
}

/// Compiles the plans of all ranks.
pub fn compile(plans: Vec<Plan>) -> Result<Vec<Arc<Program>>> {
    plans.into_iter().map(|plan| Program::new(plan).map(Arc::new)).collect()
}

impl Sim<Chaos> {
    /// A world of random times.
    pub fn new(seed: u64, options: SimOptions) -> Sim<Chaos> {
        Sim::with_durations(seed, options, Chaos)
    }
}

impl<D: Durations + Clone + 'static> Sim<D> {
    /// A world with the times of a machine, each run beginning with a copy of `durations`.
    pub fn with_durations(seed: u64, options: SimOptions, durations: D) -> Sim<D> {
        Sim { seed, options, durations, executions: Vec::new() }
    }

    /// Changes seed and circumstances; the ranks' executions are used again.
    pub fn reset(&mut self, seed: u64, options: SimOptions) {
        self.seed = seed;
        self.options = options;
    }

    /// Runs one collective, `programs[i]` on rank i, until every rank has come to an end. An error when a rank did not
    /// succeed; that includes ranks which died as planned.
    pub fn run(&mut self, programs: &[Arc<Program>], job: &Job<'_>) -> std::result::Result<SimReport, Box<SimFailure>> {
        let programs: Vec<Option<Arc<Program>>> = programs.iter().cloned().map(Some).collect();
        self.run_mirrored(&programs, job)
    }

    /// The same where some ranks have no program: others play the same part at the same time, so that these do nothing and
    /// are taken to have come wherever a call waits for them. No other rank may send them anything.
    pub fn run_mirrored(
        &mut self,
        programs: &[Option<Arc<Program>>],
        job: &Job<'_>,
    ) -> std::result::Result<SimReport, Box<SimFailure>> {
        let mut outcomes: Vec<RankOutcome> = programs
            .iter()
            .map(|program| if program.is_some() { RankOutcome::Running } else { RankOutcome::Mirrored })
            .collect();
        let mut network = match self.network(programs, job) {
            Ok(network) => network,
            Err(error) => return Err(self.failure(error.text().to_owned(), outcomes, 0)),
        };
        self.executions.resize_with(programs.len(), Execution::new);
        let mut running = 0;
        for (rank, program) in programs.iter().enumerate() {
            let Some(program) = program else { continue };
            let layout = job.layout(program);
            self.executions[rank].begin(Arc::clone(program), layout, self.options.window, self.options.limit_ns);
            let start = network.soon(0);
            network.at(start, SimEvent::Poll(Rank::from_index(rank)));
            running += 1;
        }
        let mut events = 0;
        while running > 0 && events < MOST_EVENTS {
            let Some(wanted) = network.step() else { break };
            events += 1;
            if let Some(rank) = wanted.filter(|rank| outcomes[rank.index()] == RankOutcome::Running) {
                outcomes[rank.index()] = self.poll(&mut network, rank);
                running -= usize::from(outcomes[rank.index()] != RankOutcome::Running);
            }
            for rank in network.gone.drain(..) {
                let outcome = &mut outcomes[rank.index()];
                if *outcome == RankOutcome::Running {
                    *outcome = RankOutcome::Gone { at_ns: network.now };
                    running -= 1;
                }
            }
        }
        self.conclude(network, outcomes, events)
    }

    fn network(&self, programs: &[Option<Arc<Program>>], job: &Job<'_>) -> Result<Network> {
        let prologue = programs.iter().flatten().any(|program| program.plan().shape.prologue);
        let arithmetic = Arithmetic::new(job.dtype, prologue)?;
        let memory = job.inputs.map(|inputs| {
            let memory = |(program, input): (&Arc<Program>, &Vec<u8>)| {
                let layout = job.layout(program);
                let memory = RankMemory::new(program.plan(), &layout, self.options.window, input);
                if self.options.overwrites {
                    memory.overwritten_once_final(&layout)
                } else {
                    memory
                }
            };
            programs.iter().flatten().zip(inputs).map(memory).collect::<Vec<_>>()
        });
        if memory.as_ref().is_some_and(|memory| memory.len() != programs.len()) {
            return Err(Error::InvalidArgument(String::from("there must be one input for each rank")));
        }
        let durations = Box::new(self.durations.clone());
        let mut network = Network::new(programs.len(), Random::new(self.seed), durations, memory, arithmetic);
        network.capacity = self.options.capacity.max(1);
        network.mirrored = programs.iter().map(Option::is_none).collect();
        network.faults.clone_from(&self.options.faults);
        for (index, fault) in self.options.faults.iter().enumerate() {
            let (InjectedFault::Die { rank, at_ns }
            | InjectedFault::Freeze { rank, at_ns, .. }
            | InjectedFault::Fail { rank, at_ns }) = *fault;
            if rank.index() >= programs.len() {
                return Err(Error::InvalidArgument(format!("a fault is planned for rank {rank}, which is not there")));
            }
            network.at(at_ns, SimEvent::Fault(index));
        }
        Ok(network)
    }

    /// Lets a rank run until it can do no more.
    fn poll(&mut self, network: &mut Network, rank: Rank) -> RankOutcome {
        let execution = &mut self.executions[rank.index()];
        let mut moved = network.stations[rank.index()].deadline == 0;
        loop {
            match execution.poll(&mut SimWorld { network, rank }) {
                Ok(Progress::Done) => return RankOutcome::Done { at_ns: network.now },
                Ok(Progress::Moved) => moved = true,
                Ok(Progress::Idle) => break,
                Err(error) => {
                    network.stations[rank.index()].alive = false;
                    return RankOutcome::Failed { at_ns: network.now, error };
                }
            }
        }
        if self.options.limit_ns > 0 {
            Self::set_alarm(network, rank, moved, self.options.limit_ns);
        }
        RankOutcome::Running
    }

    /// Sees to it that an idle rank is polled when its time is up. A rank has one alarm in the queue at most.
    fn set_alarm(network: &mut Network, rank: Rank, moved: bool, limit_ns: u64) {
        let now = network.now;
        let station = &mut network.stations[rank.index()];
        if moved {
            station.deadline = now + limit_ns;
        }
        if station.alarm_at <= now {
            let deadline = station.deadline;
            station.alarm_at = deadline;
            network.at(deadline, SimEvent::Poll(rank));
        }
    }

    fn conclude(
        &self,
        network: Network,
        mut outcomes: Vec<RankOutcome>,
        events: u64,
    ) -> std::result::Result<SimReport, Box<SimFailure>> {
        let stuck = outcomes.contains(&RankOutcome::Running);
        for (outcome, execution) in outcomes.iter_mut().zip(&self.executions) {
            if *outcome == RankOutcome::Running {
                *outcome = RankOutcome::Stuck { place: execution.describe() };
            }
        }
        let finish_ns: Vec<u64> = outcomes.iter().filter_map(RankOutcome::done_at).collect();
        let mirrored = outcomes.iter().filter(|outcome| **outcome == RankOutcome::Mirrored).count();
        if finish_ns.len() + mirrored < outcomes.len() {
            let reason = if stuck { "ranks wait for each other for ever" } else { "not every rank succeeded" };
            return Err(self.failure(reason.to_owned(), outcomes, network.trace));
        }
        Ok(SimReport {
            outputs: network.memory.iter().flatten().map(|memory| memory.output().to_vec()).collect(),
            finish_ns,
            front_ns: network.front_ns,
            stats: self.executions[..outcomes.len()].iter().map(Execution::stats).collect(),
            events,
            trace: network.trace,
        })
    }

    fn failure(&self, reason: String, outcomes: Vec<RankOutcome>, trace: u64) -> Box<SimFailure> {
        Box::new(SimFailure { seed: self.seed, options: self.options.clone(), reason, outcomes, trace })
    }
}
