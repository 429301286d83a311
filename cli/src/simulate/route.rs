//! The route that Strata takes: the one for which its cost model predicts the least time.
#![forbid(unsafe_code)]

use std::sync::Arc;
use strata::plan::Collective;
use strata::selection::cost::candidates;
use strata::sim::price::How;
use strata::sim::Cluster;
use strata::topo::Grid;

/// Without falling back to the vendor's library; None where Strata has no route of its own.
pub fn own(machine: &Cluster, grid: &Arc<Grid>, collective: Collective, message_bytes: usize) -> Option<How> {
    let all = candidates(machine, grid, collective, message_bytes);
    all.into_iter().map(|candidate| candidate.how).find(|how| matches!(how, How::Strata(_)))
}

/// With the vendor's library as a candidate.
pub fn chosen(machine: &Cluster, grid: &Arc<Grid>, collective: Collective, message_bytes: usize) -> Option<How> {
    candidates(machine, grid, collective, message_bytes).into_iter().next().map(|candidate| candidate.how)
}
