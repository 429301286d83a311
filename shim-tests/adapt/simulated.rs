//! AdapCC's figures on its testbed, simulated (docs/simulation/adapcc.md): what shares and cuts by links give, and how near to what NICs
//! allow it comes.

use std::sync::Arc;
use strata::carrier::Carrier;
use strata::plan::Collective;
use strata::selection::shares;
use strata::selection::synthesis::{self, evenly, nic_bound_ns, synthesize};
use strata::sim::nodes::SlowNode;
use strata::sim::price::{grid_of, price, Detail, How, PricedPlan};
use strata::sim::Cluster;
use strata::topo::Grid;

/// The paper's size: 256 MB.
const BYTES: usize = 256_000_000;

fn testbed() -> Cluster {
    Cluster::find("adapcc").expect("a known machine")
}

/// How many times as fast as with even shares, and the part of what NICs allow that is reached.
fn figures(machine: Cluster, grid: &Arc<Grid>, collective: Collective, bytes: usize) -> (f64, f64) {
    let machine = Arc::new(machine);
    let even = evenly(&machine, grid, collective, bytes).expect("a plan");
    let found = synthesize(&machine, grid, collective, bytes).expect("a plan");
    let bound = nic_bound_ns(&machine, grid, collective, bytes).expect("several nodes");
    assert!(found.ns >= 0.999 * bound, "faster than NICs: {found:?} of {bound}");
    (even.ns / found.ns, bound / found.ns)
}

#[test]
fn all_reduces_of_mixed_servers_are_at_least_one_and_a_half_times_as_fast_as_even_ones() {
    let machine = testbed();
    let (gain, part) = figures(machine.clone(), &grid_of(&machine, 24), Collective::AllReduce, BYTES);
    assert!(gain >= 1.5 && part >= 0.95, "six servers: {gain} times, {part} of the bound");
    let mixed = machine.with_nodes(&[2, 2]).expect("two kinds");
    let (gain, part) = figures(mixed.clone(), &grid_of(&mixed, 16), Collective::AllReduce, BYTES);
    assert!(gain >= 1.45 && part >= 0.95, "two and two: {gain} times, {part} of the bound");
}

#[test]
fn other_collectives_reach_nine_tenths_of_what_nics_allow() {
    let machine = testbed();
    let grid = grid_of(&machine, 24);
    for (collective, bytes) in [
        (Collective::Reduce, BYTES),
        (Collective::Broadcast, BYTES),
        (Collective::AllToAll, BYTES / 24),
        (Collective::AllGather, BYTES),
        (Collective::ReduceScatter, BYTES),
    ] {
        let (_, part) = figures(machine.clone(), &grid, collective, bytes);
        assert!(part >= 0.9, "{}: {part} of the bound", collective.name());
    }
}

#[test]
fn a_node_of_32_at_half_its_rate_costs_six_percent_at_most() {
    let machine = testbed().with_nodes(&[32, 0]).expect("two kinds");
    let slow = machine.clone().with_slow(SlowNode { node: 7, factor: 0.5, from_ns: 0 }).expect("a part");
    let grid = Arc::new(Grid::blocks(&[1; 32]));
    // One cut for both: a search would price thousands of messages for each of many.
    let choice = synthesis::shared_choice(&grid);
    let route = PricedPlan { choice, segment_bytes: BYTES / 64, window: 4, carrier: Carrier::MPI };
    let time = |machine: Cluster| {
        let shares = shares::of_known_rates(&grid, &machine.rank_rates(&grid));
        let how = match shares {
            Some(shares) => How::Shared(route.clone(), shares.weights),
            None => How::Strata(route.clone()),
        };
        let bound = nic_bound_ns(&machine, &grid, Collective::AllReduce, BYTES).expect("several nodes");
        let ns = price(&Arc::new(machine), &grid, Collective::AllReduce, BYTES, &how, Detail::default());
        (ns.expect("a price").ns, bound)
    };
    let ((with, bound), (without, _)) = (time(slow), time(machine));
    assert!((1.01..1.06).contains(&(with / without)), "{with} of {without}, where NICs allow {bound}");
    assert!(with < 1.05 * bound, "{with} of {bound}");
}

#[test]
fn a_nic_that_slows_down_in_the_middle_of_a_call_counts_from_then_on() {
    let machine = testbed();
    let grid = grid_of(&machine, 16);
    let time = |from_ns| {
        let slow = SlowNode { node: 1, factor: 0.5, from_ns };
        let machine = Arc::new(machine.clone().with_slow(slow).expect("a part"));
        evenly(&machine, &grid, Collective::AllReduce, BYTES).expect("a plan").ns
    };
    let [always, later, never] = [0, 15_000_000, u64::MAX].map(time);
    assert!(never < 0.8 * later && later < 0.8 * always, "{always} {later} {never}");
}
