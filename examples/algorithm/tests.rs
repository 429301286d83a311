//! The toy algorithm [`rank_order`] on the way of every algorithm: proved, attacked, simulated, and run on ranks.
//!
//! docs/developer-guide.md goes through these files.
#![forbid(unsafe_code)]

mod rank_order;
mod threads;

use rank_order::RANK_ORDER;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use strata::algorithms::{self, Algorithm, Choice};
use strata::communicator::{launch, CollectiveCall, Comm, CommOptions, InitParams, Launch, Operation};
use strata::device::StreamRef;
use strata::dtype::DataType;
use strata::memory::Arena;
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
                let report = verify(&plans(grid.clone(), in_place), &Options { capacity: 1, vectored: false });
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
    let outcome = kill(&plans(Grid::flat(3), false), &Options { capacity: 1, vectored: false });
    assert!(outcome.killed > 0);
    assert_eq!(outcome.missed, [], "accepted, and wrong");
}

#[test]
fn it_gathers_under_every_seed_of_the_simulator() {
    let (nranks, count) = (5, 250);
    let inputs = inputs(nranks, count * DataType::U32.size());
    let programs = sim::compile(plans(Grid::blocks(&[3, 2]), false)).expect("the plans compile");
    let job =
        Job { count, blocks: None, dtype: DataType::U32, segment_bytes: 256, inputs: Some(&inputs), weights: None };
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

/// The same with scratch that it does not declare.
const GREEDY: Algorithm = Algorithm {
    name: "greedy",
    build: &|shape, rank| Plan { scratch_chunks: 1, ..(RANK_ORDER.build)(shape, rank) },
    ..RANK_ORDER
};

/// Registered, it runs like the library's own wherever it is named: by a call here, by `STRATA_ALLGATHER_ALGO` elsewhere.
#[test]
fn registered_it_runs_on_communicators_that_name_it() {
    algorithms::register(&RANK_ORDER).expect("the name is free");
    algorithms::register(&GREEDY).expect("the name is free");
    assert_eq!(RANK_ORDER.name.parse::<Choice>(), Ok(Choice::flat(RANK_ORDER.name)));
    let grid = Arc::new(Grid::blocks(&[2, 1]));
    assert!(algorithms::choices(Collective::AllGather, &grid).contains(&Choice::flat(RANK_ORDER.name)));

    let (nranks, count) = (grid.nranks(), 5003);
    let inputs = inputs(nranks, count);
    let id = Comm::unique_id().expect("a unique id");
    let run = |rank: usize| {
        let host_id = Some(format!("node{}", grid.node(Rank::from_index(rank)).index()));
        let options = CommOptions { host_id, ..CommOptions::default() };
        let params = InitParams { nranks, rank, ids: vec![id], options, device: 0, gpu: None };
        let comm = Comm::init(params, &AtomicBool::new(false)).expect("init");
        let memory = |bytes| Arena::new(bytes).leak();
        let (input, output) = (memory(count), memory(count * nranks));
        input.write(&inputs[rank]);
        let gather = |algorithm: &str| {
            let call = CollectiveCall {
                collective: Collective::AllGather,
                input: input.as_device(),
                output: output.as_device(),
                count,
                blocks: None,
                joined: None,
                tag: 0,
                dtype: DataType::I8,
                reduction: None,
                factor_at: None,
                residual: None,
                root: Rank(0),
                algorithm: Some(algorithm.to_string()),
                decision: None,
            };
            launch(vec![Launch { comm: comm.clone(), operation: Operation::Collective(call), stream: StreamRef::Null }])
        };
        gather(RANK_ORDER.name).expect("the call");
        let mut gathered = vec![0; count * nranks];
        output.read(&mut gathered);
        assert_eq!(gathered, inputs.concat(), "rank {rank}");
        // A name that means nothing is an error of the call; the communicator goes on.
        let error = gather("rank_odder").expect_err("there is no such algorithm");
        assert!(error.text().contains("did you mean rank_order?"), "{error}");
        gather(RANK_ORDER.name).expect("the next call");
        let error = gather(GREEDY.name).expect_err("more scratch than is declared");
        assert!(error.text().contains("declares 0 blocks of scratch"), "{error}");
        comm.destroy().expect("destroy");
    };
    std::thread::scope(|scope| (0..nranks).for_each(|rank| drop(scope.spawn(move || run(rank)))));
}

#[test]
fn a_name_that_has_a_meaning_is_not_given_twice() {
    for name in ["ring", "auto", "vendor", "two_level(direct,log)", ""] {
        let algorithm: &'static Algorithm = Box::leak(Box::new(Algorithm { name, ..RANK_ORDER }));
        assert!(algorithms::register(algorithm).is_err(), "{name}");
    }
}
