//! How a simulated run ended.
#![forbid(unsafe_code)]

use super::SimOptions;
use crate::error::Error;
use crate::exec::Stats;
use std::fmt;

/// How one rank ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankOutcome {
    /// It has not.
    Running,
    /// It did nothing, since others played its part.
    Mirrored,
    /// It finished its plan.
    Done {
        /// When.
        at_ns: u64,
    },
    /// Its execution returned an error.
    Failed {
        /// When.
        at_ns: u64,
        /// Which.
        error: Error,
    },
    /// It died, or froze for ever, as planned.
    Gone {
        /// When.
        at_ns: u64,
    },
    /// It waits for something that will never happen.
    Stuck {
        /// Where.
        place: String,
    },
}

impl RankOutcome {
    /// When it finished its plan, if it did.
    pub fn done_at(&self) -> Option<u64> {
        match self {
            RankOutcome::Done { at_ns } => Some(*at_ns),
            _ => None,
        }
    }
}

impl fmt::Display for RankOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankOutcome::Running => f.write_str("did not start"),
            RankOutcome::Mirrored => f.write_str("is mirrored by others"),
            RankOutcome::Done { at_ns } => write!(f, "done after {at_ns} ns"),
            RankOutcome::Failed { at_ns, error } => write!(f, "failed after {at_ns} ns: {error}"),
            RankOutcome::Gone { at_ns } => write!(f, "gone after {at_ns} ns"),
            RankOutcome::Stuck { place } => write!(f, "stuck: {place}"),
        }
    }
}

/// A run in which every rank succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimReport {
    /// Each rank's receive buffer; empty when only sizes were simulated.
    pub outputs: Vec<Vec<u8>>,
    /// When each rank was done.
    pub finish_ns: Vec<u64>,
    /// When each segment was final on all ranks.
    pub front_ns: Vec<u64>,
    /// What each rank sent.
    pub stats: Vec<Stats>,
    /// How many events there were.
    pub events: u64,
    /// A digest of all events; equal seeds give equal digests.
    pub trace: u64,
}

impl SimReport {
    /// When the last rank was done.
    pub fn last_ns(&self) -> u64 {
        self.finish_ns.iter().copied().max().unwrap_or(0)
    }
}

/// A run in which some rank did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimFailure {
    /// The seed.
    pub seed: u64,
    /// The circumstances.
    pub options: SimOptions,
    /// Why.
    pub reason: String,
    /// How each rank ended.
    pub outcomes: Vec<RankOutcome>,
    /// A digest of all events.
    pub trace: u64,
}

impl fmt::Display for SimFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}; replay with Sim::new({}, {:?})", self.reason, self.seed, self.options)?;
        for (rank, outcome) in self.outcomes.iter().enumerate() {
            writeln!(f, "  rank {rank} {outcome}")?;
        }
        Ok(())
    }
}

impl std::error::Error for SimFailure {}
