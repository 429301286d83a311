//! The toy algorithm [`rank_order`] on the way of every algorithm: proved, attacked, simulated, and run on ranks.
//!
//! docs/developer-guide.md goes through these files.
#![forbid(unsafe_code)]

mod rank_order;
mod threads;

use rank_order::RANK_ORDER;
use std::sync::Arc;
use strata::algorithms::{self, Choice};
use strata::dtype::DataType;
use strata::plan::{Collective, Plan, Shape};
use strata::sim::{self, Job, Sim, SimOptions};
use strata::topo::{Grid, Rank};
use strata::verify::mutate::kill;
use strata::verify::{verify, Check, Options};

/// The plans of all ranks.
fn plans(grid: Grid, in_place: bool) -> Vec<Plan> {
    let shape = Shape { in_place, ..Shape::new(Collective::AllGather, Arc::new(grid)) };
    assert!(RANK_ORDER.does(&shape));
    (0..shape.nranks()).map(|rank| (RANK_ORDER.build)(&shape, Rank::from_index(rank))).collect()
}

/// A block of each rank, no two of which begin alike.
fn inputs(nranks: usize, bytes: usize) -> Vec<Vec<u8>> {
    (0..nranks).map(|rank| (0..bytes).map(|at| (rank * 31 + at) as u8).collect()).collect()
}

#[test]
fn it_is_proved_for_up_to_sixteen_ranks() {
    for p in 1..=16 {
        for grid in [Grid::flat(p), Grid::round_robin(p, 1 + p / 2)] {
            for in_place in [false, true] {
                let report = verify(&plans(grid.clone(), in_place), &Options { capacity: 1 });
                let report = report.unwrap_or_else(|why| panic!("{grid}, in place {in_place}: {why}"));
                assert_eq!((report.messages, report.rounds), (p * (p - 1), usize::from(p > 1)), "{grid}");
            }
        }
    }
}

#[test]
fn a_forgotten_receive_is_found() {
    let mut plans = plans(Grid::flat(3), false);
    plans[1].lanes[1].steps.clear();
    let rejection = verify(&plans, &Options::default()).expect_err("rank 1 does not receive from rank 0");
    assert!([Check::Completeness, Check::Progress].contains(&rejection.check), "{rejection}");
}

#[test]
fn every_mutant_is_rejected_or_as_good_as_the_original() {
    let outcome = kill(&plans(Grid::flat(3), false), &Options { capacity: 1 });
    assert!(outcome.killed > 0);
    assert_eq!(outcome.missed, [], "accepted, and wrong");
}

#[test]
fn it_gathers_under_every_seed_of_the_simulator() {
    let (nranks, count) = (5, 250);
    let inputs = inputs(nranks, count * DataType::U32.size());
    let programs = sim::compile(plans(Grid::blocks(&[3, 2]), false)).expect("the plans compile");
    let job = Job { count, dtype: DataType::U32, segment_bytes: 256, inputs: Some(&inputs) };
    for seed in 0..50 {
        let report = Sim::new(seed, SimOptions::default()).run(&programs, &job).expect("all ranks succeed");
        assert!(report.outputs.iter().all(|output| *output == inputs.concat()), "seed {seed}");
    }
}

#[test]
fn it_gathers_on_ranks_in_threads_over_shared_memory_and_tcp() {
    for (grid, in_place) in [(Grid::flat(4), false), (Grid::flat(3), true), (Grid::blocks(&[2, 1]), false)] {
        // One segment and several, short messages and long ones.
        for (count, segment_bytes) in [(100, 1 << 20), (200_000, 64 << 10)] {
            let inputs = inputs(grid.nranks(), count);
            let outputs = threads::run(plans(grid.clone(), in_place), count, segment_bytes, &inputs);
            assert!(outputs.iter().all(|output| *output == inputs.concat()), "{count} bytes on {grid}");
        }
    }
}

/// What is missing: the library chooses among the algorithms of its own list. When a program can add one, this fails, and
/// docs/developer-guide.md is to say how.
#[test]
fn an_algorithm_of_a_program_cannot_be_registered_yet() {
    assert!(algorithms::by_name(RANK_ORDER.name).is_none());
    assert!(RANK_ORDER.name.parse::<Choice>().is_err());
}
