//! Prices of some ranks for all: what `sim::price` leaves out changes nothing.

use crate::algorithms::Choice;
use crate::carrier::Carrier;
use crate::plan::Collective;
use crate::sim::price::{grid_of, price, Detail, How, PricedPlan};
use crate::sim::Cluster;
use std::sync::Arc;

/// Shapes of several nodes, machines whose NICs have one rank and two, algorithms, segments and windows.
fn each_way(mut check: impl FnMut(&Arc<Cluster>, usize, Collective, usize, &How)) {
    let routes = |nranks: usize, bytes: usize| {
        let block = bytes / nranks;
        let mut ways =
            vec![How::Pccl { rail: "ring", carrier: Carrier::MPI }, How::Pccl { rail: "rd", carrier: Carrier::MPI }];
        for rail in ["log", "ring"] {
            for (segment_bytes, window) in [(usize::MAX, 1), (block.div_ceil(3), 2), (block.div_ceil(8), 4)] {
                let choice = Choice::leveled("two_level", "direct", rail);
                ways.push(How::Strata(PricedPlan { choice, segment_bytes, window, carrier: Carrier::MPI }));
            }
        }
        ways
    };
    for name in ["frontier", "perlmutter"] {
        let machine = Arc::new(Cluster::find(name).unwrap());
        for nnodes in 2..=4 {
            let nranks = nnodes * machine.ranks_per_node();
            for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
                for bytes in [1 << 20, 96 << 20] {
                    routes(nranks, bytes).iter().for_each(|way| check(&machine, nranks, collective, bytes, way));
                }
            }
        }
    }
}

#[test]
fn folding_changes_nothing() {
    let mut seen = 0;
    each_way(|machine, nranks, collective, bytes, way| {
        let grid = grid_of(machine, nranks);
        let priced =
            |fold| price(machine, &grid, collective, bytes, way, Detail { fold, timeline: false, skew: None }).unwrap();
        let (folded, whole) = (priced(true), priced(false));
        let what = format!("{} {} of {bytes} on {nranks}: {way:?}", machine.name, collective.name());
        assert_eq!(folded.ns, whole.ns, "{what}");
        assert_eq!(folded.busiest, whole.busiest, "{what}");
        assert!(folded.events < whole.events, "something was left out: {what}");
        seen += 1;
    });
    assert_eq!(seen, 2 * 3 * 3 * 2 * 8);
}
