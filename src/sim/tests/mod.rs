//! The simulated world against plans written by hand: right ones are right under every seed, racy ones are caught by
//! some, and a rank that stops makes every other one stop in time.
#![forbid(unsafe_code)]

mod faults;
mod folding;
mod plans;
mod priced;
mod property;
mod scripts;
mod terms;
mod vectored;

use super::*;
use crate::plan::contract::Promise;
use crate::plan::{Collective, Shape};
use crate::topo::Grid;

/// Seeds each right plan must survive.
const SEEDS: u64 = 240;

/// Seeds from 0, or the one in the variable `SIM_SEED`, to replay a failure.
fn seeds(most: u64) -> std::ops::Range<u64> {
    match std::env::var("SIM_SEED").ok().and_then(|seed| seed.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..most,
    }
}

/// Inputs whose sums are exact in every type, whatever their order.
fn inputs(shape: &Shape, dtype: DataType, count: usize, random: &mut Random) -> Vec<Vec<u8>> {
    let input = |rank: usize, random: &mut Random| -> Vec<u8> {
        let blocks = shape.input_blocks(Rank::from_index(rank));
        let element = |random: &mut Random| match dtype {
            DataType::F32 => (random.below(1000) as f32).to_le_bytes().to_vec(),
            DataType::F64 => (random.below(1000) as f64).to_le_bytes().to_vec(),
            _ => random.next_u64().to_le_bytes()[..dtype.size()].to_vec(),
        };
        (0..blocks * count).flat_map(|_| element(random)).collect()
    };
    (0..shape.nranks()).map(|rank| input(rank, random)).collect()
}

/// Options, a count and more random numbers.
fn circumstances(seed: u64) -> (SimOptions, usize, Random) {
    let mut random = Random::new(!seed);
    let window = 1 + (seed % 4) as usize;
    let limit_ns = if seed.is_multiple_of(3) { 50_000_000 } else { 0 };
    let capacity = random.pick(&[1, 8]);
    let count = random.pick(&[0, 1, 3, 16, 17, 40, 129, 300]);
    let options = SimOptions { window, capacity, limit_ns, overwrites: random.one_in(2), faults: Vec::new() };
    (options, count, random)
}

/// Runs programs under circumstances that follow from the seed. An error says what was wrong and how to see it again.
fn run_seed(sim: &mut Sim, shape: &Shape, programs: &[Arc<Program>], seed: u64) -> std::result::Result<u64, String> {
    let (options, count, mut random) = circumstances(seed);
    let dtype = random.pick(&[DataType::I32, DataType::U64, DataType::F32]);
    let inputs = inputs(shape, dtype, count, &mut random);
    let segment_bytes = random.pick(&[64, 192, 1 << 20]);
    let job = Job { count, blocks: None, dtype, segment_bytes, inputs: Some(&inputs), weights: None };
    sim.reset(seed, options.clone());
    let again = format!("(replay: SIM_SEED={seed}; {options:?}, {count} of {dtype:?}, segments of {segment_bytes})");
    let report = sim.run(programs, &job).map_err(|failure| format!("{failure}{again}"))?;
    let arithmetic = Arithmetic::new(dtype, shape.prologue).map_err(|error| error.to_string())?;
    let expected = expected(shape, arithmetic, count * dtype.size(), &inputs);
    let is_wrong = |rank: &usize| !is_right(shape, *rank, &report.outputs[*rank], &expected[*rank]);
    match (0..shape.nranks()).find(is_wrong) {
        Some(rank) => Err(format!("rank {rank} has a wrong result {again}")),
        None => Ok(report.trace),
    }
}

/// Whether a rank's output is as expected, where anything is promised of it.
fn is_right(shape: &Shape, rank: usize, output: &[u8], expected: &[u8]) -> bool {
    let Some(contract) = &shape.contract else { return output == expected };
    let block = (expected.len() / contract.blocks()).max(1);
    let mut blocks = output.chunks(block).zip(expected.chunks(block)).enumerate();
    let right = |(at, (output, expected)): (usize, (&[u8], &[u8]))| {
        contract.promise_of_block(rank, at) == Promise::Anything || output == expected
    };
    output.len() == expected.len() && blocks.all(right)
}

fn assert_right(shape: &Shape, plans: Vec<Plan>) {
    let programs = compile(plans).unwrap();
    let mut sim = Sim::new(0, SimOptions::default());
    for seed in seeds(SEEDS) {
        if let Err(text) = run_seed(&mut sim, shape, &programs, seed) {
            panic!("{text}");
        }
    }
}

/// How many seeds find the plans wrong.
fn caught(shape: &Shape, plans: Vec<Plan>) -> usize {
    let programs = compile(plans).unwrap();
    let mut sim = Sim::new(0, SimOptions::default());
    (0..SEEDS).filter(|&seed| run_seed(&mut sim, shape, &programs, seed).is_err()).count()
}

#[test]
fn a_ring_all_gather_is_right_under_every_seed() {
    for nranks in [2, 3, 5] {
        let mut shape = plans::flat(Collective::AllGather, nranks);
        assert_right(&shape, plans::all(&shape, plans::ring_all_gather));
        shape.in_place = true;
        assert_right(&shape, plans::all(&shape, plans::ring_all_gather));
    }
}

#[test]
fn a_ring_all_reduce_is_right_under_every_seed() {
    for nranks in [2, 3, 5] {
        let mut shape = plans::flat(Collective::AllReduce, nranks);
        assert_right(&shape, plans::all(&shape, plans::ring_all_reduce));
        shape.in_place = true;
        assert_right(&shape, plans::all(&shape, plans::ring_all_reduce));
    }
}

#[test]
fn recursive_doubling_is_right_under_every_seed() {
    let shape = plans::flat(Collective::AllGather, 8);
    assert_right(&shape, plans::all(&shape, plans::doubling_all_gather));
    for nranks in [2, 8] {
        let mut shape = plans::flat(Collective::AllReduce, nranks);
        assert_right(&shape, plans::all(&shape, plans::doubling_all_reduce));
        shape.prologue = true;
        assert_right(&shape, plans::all(&shape, plans::doubling_all_reduce));
    }
}

#[test]
fn two_levels_of_calls_are_right_under_every_seed() {
    for grid in [Grid::blocks(&[2, 2]), Grid::round_robin(6, 2), Grid::blocks(&[1, 1, 1])] {
        let shape = Shape::new(Collective::AllReduce, Arc::new(grid));
        assert_right(&shape, plans::all(&shape, plans::two_level_all_reduce));
    }
}

#[test]
fn many_lanes_and_channels_are_right_under_every_seed() {
    let shape = plans::flat(Collective::AllToAll, 5);
    assert_right(&shape, plans::all(&shape, plans::pairwise_all_to_all));
    let shape = plans::flat(Collective::Broadcast, 2);
    assert_right(&shape, plans::all(&shape, plans::many_channels));
}

#[test]
fn a_missing_dependency_is_caught_by_some_seed() {
    let shape = plans::flat(Collective::AllGather, 4);
    assert!(caught(&shape, plans::all(&shape, plans::hasty_ring_all_gather)) > 100);
}

#[test]
fn a_source_written_before_it_was_sent_is_caught_by_some_seed() {
    let shape = plans::flat(Collective::AllReduce, 4);
    assert!(caught(&shape, plans::all(&shape, plans::hasty_doubling_all_reduce)) > 10);
}

#[test]
fn a_missing_prologue_or_a_second_epilogue_gives_a_wrong_result() {
    use crate::plan::Action;
    let nonzero = (0..SEEDS).filter(|&seed| circumstances(seed).1 > 0).count();
    let mut shape = plans::flat(Collective::AllReduce, 4);
    let mut twice = plans::all(&shape, plans::ring_all_reduce);
    for step in twice.iter_mut().flat_map(|plan| &mut plan.lanes[1].steps) {
        if let Action::RecvReduce { finish, .. } = &mut step.action {
            *finish = true;
        }
    }
    assert_eq!(caught(&shape, twice), nonzero);
    let without = plans::all(&shape, plans::doubling_all_reduce);
    shape.prologue = true;
    let without = without.into_iter().map(|plan| Plan { shape: shape.clone(), ..plan }).collect();
    assert_eq!(caught(&shape, without), nonzero);
}

#[test]
fn a_message_of_another_size_is_an_error_that_names_the_sender() {
    use crate::plan::{Action, Span};
    let shape = plans::flat(Collective::AllGather, 2);
    let mut plans = plans::all(&shape, plans::doubling_all_gather);
    if let Action::Recv { dst, .. } = &mut plans[1].lanes[0].steps[2].action {
        *dst = vec![Span::output(0, 2)];
    }
    let job = Job { count: 4, blocks: None, dtype: DataType::I32, segment_bytes: 64, inputs: None, weights: None };
    let failure = Sim::new(1, SimOptions::default()).run(&compile(plans).unwrap(), &job).unwrap_err();
    let RankOutcome::Failed { error, .. } = &failure.outcomes[1] else { panic!("{failure}") };
    assert_eq!(error.text(), "a message of 16 bytes from rank 0 where 32 were expected");
}

#[test]
fn a_seed_gives_the_same_events_again_and_another_seed_others() {
    let shape = plans::flat(Collective::AllReduce, 5);
    let programs = compile(plans::all(&shape, plans::ring_all_reduce)).unwrap();
    let trace = |seed| {
        let count = 100;
        let job = Job { count, blocks: None, dtype: DataType::F32, segment_bytes: 64, inputs: None, weights: None };
        Sim::new(seed, SimOptions::default()).run(&programs, &job).unwrap().trace
    };
    assert_eq!(trace(5), trace(5));
    assert_ne!(trace(5), trace(6));
    let mut sim = Sim::new(0, SimOptions::default());
    let first = run_seed(&mut sim, &shape, &programs, 7);
    run_seed(&mut sim, &shape, &programs, 8).unwrap();
    assert_eq!(run_seed(&mut sim, &shape, &programs, 7), first);
}

#[test]
fn with_a_message_time_of_one_the_clock_counts_rounds() {
    let rounds = |shape: &Shape, plan: fn(&Shape, usize) -> Plan| {
        let programs = compile(plans::all(shape, plan)).unwrap();
        let job =
            Job { count: 1, blocks: None, dtype: DataType::F32, segment_bytes: 1 << 20, inputs: None, weights: None };
        let mut sim = Sim::with_durations(0, SimOptions::default(), Uniform { alpha_ns: 1, beta_ps: 0 });
        let report = sim.run(&programs, &job).unwrap();
        assert!(report.stats.iter().all(|stats| stats.rounds as u64 == report.last_ns()));
        report.last_ns()
    };
    assert_eq!(rounds(&plans::flat(Collective::AllGather, 512), plans::doubling_all_gather), 9);
    assert_eq!(rounds(&plans::flat(Collective::AllGather, 12), plans::ring_all_gather), 11);
    let two = Uniform { alpha_ns: 1000, beta_ps: 2000 };
    let programs = compile(plans::all(&plans::flat(Collective::AllGather, 4), plans::ring_all_gather)).unwrap();
    let job =
        Job { count: 250, blocks: None, dtype: DataType::F32, segment_bytes: 1 << 20, inputs: None, weights: None };
    let report = Sim::with_durations(0, SimOptions::default(), two).run(&programs, &job).unwrap();
    assert_eq!(report.last_ns(), 3 * (1000 + 2 * 1000));
}

#[test]
fn plans_that_wait_for_each_other_end_the_simulation_with_every_place() {
    let shape = plans::flat(Collective::AllGather, 2);
    let mut plans = plans::all(&shape, plans::doubling_all_gather);
    plans.iter_mut().for_each(|plan| plan.lanes[0].steps.swap(1, 2));
    let job = Job { count: 4, blocks: None, dtype: DataType::I32, segment_bytes: 64, inputs: None, weights: None };
    let failure = Sim::new(3, SimOptions::default()).run(&compile(plans).unwrap(), &job).unwrap_err();
    let text = failure.to_string();
    for part in
        ["wait for each other for ever", "Sim::new(3, SimOptions {", "rank 1 stuck: all_gather", "receive from 0"]
    {
        assert!(text.contains(part), "{text}");
    }
}
