//! The cost model as a counsellor: where it sees a clear win over what Strata would do without it, its route is taken.
//!
//! A clear win is [`CLEAR`] or more. So figures that are a little off, or that noise has moved, change nothing: neither
//! between one run and the next nor between two communicators of a job.
#![forbid(unsafe_code)]

use super::cost::{self, Candidate, Model};
use crate::carrier::Carrier;
use crate::error::{Error, Result};
use crate::plan::Collective;
use crate::sim::price::{price, Detail, How, PricedPlan};
use crate::sim::Cluster;
use crate::topo::Grid;
use std::sync::Arc;

/// How many times as fast a way must be to replace the one that is taken without a model.
pub const CLEAR: f64 = 1.1;

/// Longer messages are treated like those of two to this.
pub const MOST_LOG: u32 = 47;

/// The value of `STRATA_MACHINE` with which a communicator measures its own links.
pub const AUTO: &str = "auto";
/// The value that leaves everything to thresholds.
pub const NONE: &str = "none";

/// The text of the machine that `STRATA_MACHINE` names, to be sent to all ranks; empty where none is named.
pub fn offer(name: &str) -> Result<String> {
    match name {
        AUTO | NONE | "" => Ok(String::new()),
        name => {
            let text = Cluster::text(name)?;
            parsed(&text, name)?;
            Ok(text)
        }
    }
}

/// Apart from its callers, whose frames it would make too large for the smallest stacks: a machine has kilobytes.
#[inline(never)]
fn parsed(text: &str, name: &str) -> Result<Arc<Cluster>> {
    Cluster::parse(text, name).map(Arc::new)
}

/// The machine that rank 0 has sent, if any.
pub fn agree(text: &str) -> Result<Option<Arc<Cluster>>> {
    match text {
        "" => Ok(None),
        text => parsed(text, "of rank 0").map(Some).map_err(|error| Error::Remote(error.text().to_string())),
    }
}

/// What the model would rather have than a route, with its reason; None where the route is as good, or nearly.
pub fn better(
    machine: &Cluster,
    grid: &Arc<Grid>,
    collective: Collective,
    bytes: usize,
    route: &PricedPlan,
) -> Option<(PricedPlan, String)> {
    let ns = match grid.links() {
        // By which links an algorithm's messages go is not in the model.
        Some(_) if grid.nnodes() == 1 => {
            let machine = Arc::new(machine.clone());
            price(&machine, grid, collective, bytes, &How::Strata(route.clone()), Detail::default()).ok()?.ns
        }
        _ => Model::new(machine, grid).route_ns(collective, bytes, route),
    };
    let candidates = cost::candidates(machine, grid, collective, bytes);
    let best = candidates.into_iter().find_map(|candidate| own(candidate, Carrier::MPI))?;
    if best.1 * CLEAR > ns {
        return None;
    }
    let PricedPlan { choice, .. } = route;
    let reason = format!(
        "the cost model of {}: {} us, where {choice} as by the thresholds would take {} us",
        machine.name,
        (best.1 / 1e3).round(),
        (ns / 1e3).round()
    );
    Some((best.0, reason))
}

/// A candidate as a route of ours over this carrier.
fn own(candidate: Candidate, carrier: Carrier) -> Option<(PricedPlan, f64)> {
    match candidate.how {
        How::Strata(route) if route.carrier.is_own() == carrier.is_own() => Some((route, candidate.ns)),
        _ => None,
    }
}

/// Whether Strata takes a collective of so many bytes over from the vendor library. All sizes between two powers of 2 are
/// treated alike. None where the machine does not know the vendor's times, alone or as the carrier between nodes.
pub fn takes_over(
    machine: &Cluster,
    grid: &Arc<Grid>,
    collective: Collective,
    carrier: Carrier,
    bytes: usize,
) -> Option<bool> {
    if !carrier.is_own() && machine.network_vendor.is_none() {
        return None;
    }
    let bytes = 1usize << bytes.max(1).ilog2().min(MOST_LOG);
    let vendor = machine.vendor_ns(collective, grid, bytes)?;
    let candidates = cost::candidates(machine, grid, collective, bytes);
    let best = candidates.into_iter().find_map(|candidate| own(candidate, carrier));
    Some(best.is_some_and(|(_, ns)| ns * CLEAR <= vendor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::Choice;
    use crate::selection::links::Links;

    fn route(rail: &str, segment_bytes: usize) -> PricedPlan {
        let choice = Choice::leveled("two_level", "direct", rail);
        PricedPlan { choice, segment_bytes, window: 4, carrier: Carrier::MPI }
    }

    #[test]
    fn a_route_that_is_nearly_as_good_is_kept_and_a_bad_one_replaced() {
        let machine = Links { latency_us: 50.0, gbps: 1.0 }.machine(4);
        let grid = Arc::new(Grid::blocks(&[4; 64]));
        let asked = |route: &PricedPlan| better(&machine, &grid, Collective::AllGather, 1 << 20, route);
        let (best, reason) = asked(&route("ring", usize::MAX)).expect("63 rounds where 6 do");
        assert_eq!(best.choice.rail, "log");
        assert!(reason.contains("measured"), "{reason}");
        assert_eq!(asked(&best), None);
        let slower = PricedPlan { segment_bytes: best.segment_bytes / 2, ..best };
        assert!(asked(&slower).is_none_or(|(better, _)| better != slower));
    }

    #[test]
    fn on_frontier_strata_takes_over_where_the_thesis_has_it_win() {
        let machine = Cluster::find("frontier").unwrap();
        let taken = |nodes: usize, mib: usize| {
            let grid = Arc::new(Grid::blocks(&vec![8; nodes]));
            takes_over(&machine, &grid, Collective::AllGather, Carrier::MPI, mib << 20).unwrap()
        };
        assert!(taken(256, 16) && taken(256, 1024) && taken(4, 16));
        assert!(!taken(4, 256), "RCCL's ring is as fast there");
        let grid = Arc::new(Grid::blocks(&[8; 4]));
        let over = |rail| takes_over(&machine, &grid, Collective::AllGather, rail, 1 << 20);
        assert_eq!(over(Carrier::Vendor), None, "RCCL between nodes was not measured there");
        assert!(over(Carrier::MPI).is_some());
        assert_eq!(
            takes_over(
                &Links { latency_us: 1.0, gbps: 1.0 }.machine(8),
                &Arc::new(Grid::blocks(&[8; 4])),
                Collective::AllGather,
                Carrier::MPI,
                1 << 20
            ),
            None
        );
    }

    #[test]
    fn a_machine_travels_as_its_text() {
        assert_eq!(agree(&offer(AUTO).unwrap()).unwrap(), None);
        let machine = agree(&offer("perlmutter").unwrap()).unwrap().unwrap();
        assert_eq!(*machine, Cluster::find("perlmutter").unwrap());
        assert!(offer("no/such/machine").is_err());
        assert!(matches!(agree("name = 7"), Err(Error::Remote(_))));
    }
}
