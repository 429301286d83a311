//! Every algorithm: a pure function from a shape and a rank to that rank's plan.
//!
//! All ranks get matching plans whether or not each holds its buffers in place.
#![forbid(unsafe_code)]

mod builder;
#[cfg(test)]
mod interpreter;
mod log;
mod rd;
mod scatter_gather;
mod tree;
mod two_step;

use crate::plan::{Collective, Plan, Shape};
use crate::topo::Rank;

/// One algorithm, as data.
pub struct Algorithm {
    /// Its name in variables, logs and on the command line.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub text: &'static str,
    /// The collectives it does.
    pub collectives: &'static [Collective],
    /// Whether it does this shape, given that it does the collective.
    pub supports: fn(&Shape) -> bool,
    /// Writes the plan of one rank; may contain `Call`s.
    pub build: fn(&Shape, Rank) -> Plan,
}

/// All algorithms.
pub const ALGORITHMS: &[&Algorithm] = &[
    &rd::RD,
    &rd::RD_ONE,
    &log::LOG,
    &tree::TREE,
    &scatter_gather::SCATTER_ALLGATHER,
    &scatter_gather::REDUCE_SCATTER_GATHER,
    &two_step::TWO_STEP,
];

/// The algorithm with this name.
pub fn by_name(name: &str) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().find(|algorithm| algorithm.name == name).copied()
}

impl Algorithm {
    /// Whether it does this shape.
    pub fn does(&self, shape: &Shape) -> bool {
        self.collectives.contains(&shape.collective) && (self.supports)(shape)
    }
}
