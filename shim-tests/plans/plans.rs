//! Every plan of every algorithm is proved: all small shapes, and some large ones.

use std::sync::Arc;
use strata::algorithms::{self, Choice};
use strata::config::Config;
use strata::dtype::DataType;
use strata::plan::stage::stage;
use strata::plan::{Collective, Plan, Shape};
use strata::selection::{self, Context, Executor, Request, Selection};
use strata::sim::{self, Job, Sim, SimOptions, Uniform};
use strata::topo::{Grid, Rank};
use strata::verify::mutate::kill;
use strata::verify::{verify, Options};

fn plans(choice: &Choice, shape: &Shape) -> Vec<Plan> {
    let ranks = (0..shape.nranks()).map(Rank::from_index);
    ranks
        .map(|rank| algorithms::build(choice, shape, rank).unwrap_or_else(|error| panic!("{choice}: {error}")))
        .collect()
}

/// Proves every choice for every collective on a grid, in place and not, with and without prologue, for the given roots.
fn prove(grid: Grid, roots: &[usize], options: &[Options]) -> usize {
    let grid = Arc::new(grid);
    let mut proved = 0;
    for collective in Collective::ALL {
        for choice in algorithms::choices(collective, &grid) {
            for &root in if collective.has_root() { roots } else { &[0] } {
                for (in_place, prologue) in [(false, false), (true, false), (false, true), (true, true)] {
                    if (in_place && collective == Collective::AllToAll) || (prologue && !collective.reduces()) {
                        continue;
                    }
                    let root = Rank::from_index(root);
                    let shape = Shape { collective, grid: grid.clone(), root, in_place, prologue };
                    let plans = plans(&choice, &shape);
                    let staged: Vec<Plan> = plans.iter().map(|plan| stage(plan, &|_, _| true)).collect();
                    for (options, plans) in options.iter().flat_map(|options| [(options, &plans), (options, &staged)]) {
                        verify(plans, options).unwrap_or_else(|rejection| {
                            let what = format!("root {root} in_place {in_place} prologue {prologue} {options:?}");
                            panic!("{} {choice} on {grid}, {what}: {rejection}", collective.name())
                        });
                        proved += 1;
                    }
                }
            }
        }
    }
    proved
}

const CAPACITIES: [Options; 2] = [Options { capacity: 1 }, Options { capacity: 8 }];

#[test]
fn every_algorithm_is_proved_for_up_to_sixteen_ranks() {
    let mut proved = 0;
    for p in 1..=16 {
        let roots: Vec<usize> = if p <= 8 { (0..p).collect() } else { vec![0, p - 1] };
        proved += prove(Grid::flat(p), &roots, &CAPACITIES);
        for nodes in (2..=p).filter(|nodes| p % nodes == 0) {
            proved += prove(Grid::blocks(&vec![p / nodes; nodes]), &[0, p / 2], &CAPACITIES);
        }
        if p > 2 {
            proved += prove(Grid::round_robin(p, 2 + p % 3), &[0, p - 1], &CAPACITIES);
        }
    }
    for sizes in [&[3, 1, 4][..], &[1, 2], &[2, 1], &[1, 1, 5], &[4, 3, 2, 1], &[7, 7, 1]] {
        proved += prove(Grid::blocks(sizes), &[0, 2], &CAPACITIES);
    }
    println!("{proved} plans proved");
}

#[test]
fn two_level_plans_are_proved_with_their_calls_left_to_another_provider() {
    for grid in [Grid::blocks(&[2, 2]), Grid::blocks(&[3, 1, 4]), Grid::blocks(&[4, 3, 2, 1]), Grid::round_robin(7, 3)]
    {
        let grid = Arc::new(grid);
        for collective in Collective::ALL {
            for choice in
                algorithms::choices(collective, &grid).iter().filter(|choice| choice.name.starts_with("two_level"))
            {
                for in_place in [false, true] {
                    let shape = Shape { in_place, ..Shape::new(collective, grid.clone()) };
                    let ranks = (0..shape.nranks()).map(Rank::from_index);
                    let plans: Vec<Plan> =
                        ranks.map(|rank| algorithms::build_with_calls(choice, &shape, rank).expect("a plan")).collect();
                    verify(&plans, &Options::default()).unwrap_or_else(|why| {
                        panic!("{} {choice} on {grid} in_place {in_place}: {why}", collective.name())
                    });
                }
            }
        }
    }
}

#[test]
fn every_algorithm_is_proved_on_some_large_shapes() {
    let options = [Options { capacity: 1 }];
    for grid in [Grid::blocks(&[8; 8]), Grid::blocks(&[5, 9, 13, 2, 16, 1]), Grid::round_robin(60, 7)] {
        prove(grid, &[3], &options);
    }
}

#[test]
fn every_mutant_of_every_algorithm_is_rejected_or_as_good_as_the_original() {
    let (mut mutants, mut killed, mut equivalent) = (0, 0, 0);
    for grid in [Grid::flat(2), Grid::flat(3), Grid::flat(4), Grid::blocks(&[2, 1]), Grid::blocks(&[2, 2])] {
        let grid = Arc::new(grid);
        for collective in Collective::ALL {
            for choice in algorithms::choices(collective, &grid) {
                for in_place in [false, true] {
                    // Four ranks in place add minutes and no kind of mutant.
                    if in_place && (collective == Collective::AllToAll || grid.nranks() == 4) {
                        continue;
                    }
                    let shape = Shape { in_place, ..Shape::new(collective, grid.clone()) };
                    let outcome = kill(&plans(&choice, &shape), &Options { capacity: 1 });
                    let what = format!("{} {choice} on {grid} in_place {in_place}", collective.name());
                    assert_eq!(outcome.missed, [], "{what}: accepted, and wrong");
                    mutants += outcome.mutants;
                    killed += outcome.killed;
                    equivalent += outcome.equivalent;
                }
            }
        }
    }
    println!("{mutants} mutants: {killed} rejected, {equivalent} equivalent");
}

/// Rounds of what is chosen for a kilobyte on these nodes: by the executor's count on each rank, which is the longest
/// chain of messages it receives, and by a clock that only messages advance.
fn rounds(collective: Collective, grid: &Arc<Grid>, named: Option<&str>) -> (usize, u64) {
    let block_bytes = if collective == Collective::AllReduce { 1024 } else { 1024 / grid.nranks() };
    let request = Request { named, ..Request::new(collective, block_bytes) };
    let context = Context::new(grid.clone(), Config::default(), true);
    let Executor::Own(Selection { choice, .. }) = selection::decide(&request, &context).unwrap().executor else {
        panic!("there is no vendor library");
    };
    let programs = sim::compile(plans(&choice, &Shape::new(collective, grid.clone()))).unwrap();
    let job = Job { count: block_bytes / 4, dtype: DataType::F32, segment_bytes: usize::MAX, inputs: None };
    let clock = Uniform { alpha_ns: 1, beta_ps: 0 };
    let report = Sim::with_durations(1, SimOptions::default(), clock).run(&programs, &job).unwrap();
    let counted = report.stats.iter().map(|stats| stats.rounds).max().unwrap();
    (counted, report.last_ns())
}

#[test]
fn sixteen_nodes_of_one_rank_exchange_short_messages_in_four_rounds() {
    let grid = Arc::new(Grid::blocks(&[1; 16]));
    for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
        assert_eq!(rounds(collective, &grid, None), (4, 4), "{}", collective.name());
        let around = if collective == Collective::AllReduce { 30 } else { 15 };
        assert_eq!(rounds(collective, &grid, Some("ring")), (around, around as u64), "{}", collective.name());
    }
}

#[test]
fn rounds_between_any_number_of_nodes_are_the_logarithm_rounded_up() {
    for nnodes in 2..=33_usize {
        let log = nnodes.next_power_of_two().trailing_zeros() as usize;
        let grid = Arc::new(Grid::blocks(&vec![1; nnodes]));
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            assert_eq!(rounds(collective, &grid, None), (log, log as u64), "{} on {grid}", collective.name());
        }
        // Whole vectors can be exchanged only between as many ranks as a power of two; others gather what they reduced.
        let both = if nnodes.is_power_of_two() { log } else { 2 * log };
        assert_eq!(rounds(Collective::AllReduce, &grid, None), (both, both as u64), "{grid}");
        // Inside a node there is one round more for each phase.
        let grid = Arc::new(Grid::blocks(&vec![4; nnodes]));
        assert_eq!(rounds(Collective::AllGather, &grid, None), (log + 1, log as u64 + 1), "{grid}");
    }
}
