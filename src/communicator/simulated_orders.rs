//! Calls on two carriers in opposite orders, simulated: the production queues and executor under seeds that decide when what happens.
//!
//! `SIM_SEEDS=10000` runs so many, `SIM_SEED` one of them again.
#![forbid(unsafe_code)]

use super::queue::OperationQueue;
use crate::algorithms;
use crate::dtype::DataType;
use crate::plan::{Collective, Plan, Shape};
use crate::sim::orders::{CarriedCall, OrderedCalls, ThreadAct, TurnQueue};
use crate::sim::{compile, expected, Arithmetic, Random};
use crate::topo::{Grid, Rank};
use std::ops::Range;
use std::sync::Arc;

/// Seeds where nothing else is said.
const SEEDS: u64 = 300;
const CARRIERS: usize = 2;
const DTYPE: DataType = DataType::I32;

impl TurnQueue for OperationQueue {
    fn issue(&self) -> u64 {
        OperationQueue::issue(self)
    }

    fn is(&self, turn: u64) -> bool {
        OperationQueue::is(self, turn)
    }

    fn advance(&self) {
        OperationQueue::advance(self);
    }
}

fn seeds() -> Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match (number("SIM_SEED"), number("SIM_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, most) => 0..most.unwrap_or(SEEDS),
    }
}

/// A program of calls on both carriers, and what they must give.
struct Program {
    nranks: usize,
    arithmetic: Arithmetic,
    calls: Vec<CarriedCall>,
    expected: Vec<Vec<Vec<u8>>>,
    acts: Vec<Vec<ThreadAct>>,
}

/// A collective by a random algorithm of messages.
fn plans(random: &mut Random, grid: &Arc<Grid>) -> (Shape, Vec<Plan>) {
    loop {
        let mut shape = Shape::new(random.pick(&Collective::ALL), grid.clone());
        if shape.collective.has_root() {
            shape.root = Rank::from_index(random.below(grid.nranks() as u64) as usize);
        }
        let mut choices = algorithms::choices(shape.collective, grid);
        choices.retain(|choice| algorithms::supports(choice, &shape) && !algorithms::is_on_board(choice));
        if choices.is_empty() {
            continue;
        }
        let choice = &choices[random.below(choices.len() as u64) as usize];
        let plan = |rank| algorithms::build(choice, &shape, Rank::from_index(rank));
        if let Ok(plans) = (0..grid.nranks()).map(plan).collect::<crate::error::Result<Vec<Plan>>>() {
            return (shape, plans);
        }
    }
}

/// The order of a rank's calls: on each carrier the same on all ranks, between the carriers by chance, even ranks beginning with one
/// and odd ranks with the other. They wait the other way round.
fn acts(random: &mut Random, rank: usize, calls: &[CarriedCall]) -> Vec<ThreadAct> {
    let on = |carrier: usize| (0..calls.len()).filter(move |call| calls[*call].carrier == carrier);
    let mut left = [on(0).collect::<Vec<usize>>(), on(1).collect()];
    left.iter_mut().for_each(|calls| calls.reverse());
    let first = rank % 2;
    let mut acts = vec![ThreadAct::Call(left[first].pop().expect("a call on each carrier"))];
    while left.iter().any(|calls| !calls.is_empty()) {
        let carrier = random.below(2) as usize;
        acts.extend(left[carrier].pop().map(ThreadAct::Call));
    }
    acts.extend([1 - first, first].map(ThreadAct::Wait));
    acts
}

fn program(random: &mut Random) -> Program {
    let nodes: Vec<usize> = (0..1 + random.below(3)).map(|_| 1 + random.below(3) as usize).collect();
    let grid = Arc::new(Grid::blocks(if nodes.iter().sum::<usize>() < 2 { &[1, 1] } else { &nodes }));
    let nranks = grid.nranks();
    let arithmetic = Arithmetic::new(DTYPE, false).expect("a type that adds");
    let (mut calls, mut outputs) = (Vec::new(), Vec::new());
    for carrier in 0..CARRIERS {
        for _ in 0..1 + random.below(3) {
            let (shape, plans) = plans(random, &grid);
            let count = random.pick(&[1, 3, 17, 129]);
            let input = |rank: usize, random: &mut Random| -> Vec<u8> {
                let elements = shape.input_blocks(Rank::from_index(rank)) * count;
                (0..elements).flat_map(|_| (random.below(1000) as i32).to_le_bytes()).collect()
            };
            let inputs: Vec<Vec<u8>> = (0..nranks).map(|rank| input(rank, random)).collect();
            outputs.push(expected(&shape, arithmetic, count * DTYPE.size(), &inputs));
            let (programs, segment_bytes) = (compile(plans).expect("plans of ours"), random.pick(&[64, 1 << 20]));
            calls.push(CarriedCall { carrier, programs, count, segment_bytes, inputs });
        }
    }
    let acts = (0..nranks).map(|rank| acts(random, rank, &calls)).collect();
    Program { nranks, arithmetic, calls, expected: outputs, acts }
}

/// Runs the program of a seed, with a queue for each carrier of a rank, or one for all.
fn run(seed: u64, one_queue: bool) -> Result<(), String> {
    let random = &mut Random::new(seed);
    let program = program(random);
    let (capacity, window) = (random.pick(&[1, 8]), 1 + random.below(3) as usize);
    let queues: Vec<Vec<Arc<dyn TurnQueue>>> = (0..program.nranks)
        .map(|_| {
            let shared = Arc::new(OperationQueue::new());
            let queue = |_| if one_queue { shared.clone() } else { Arc::new(OperationQueue::new()) };
            (0..CARRIERS).map(|carrier| queue(carrier) as Arc<dyn TurnQueue>).collect()
        })
        .collect();
    let Program { nranks, arithmetic, calls, expected, acts } = &program;
    let job = OrderedCalls {
        nranks: *nranks,
        carriers: CARRIERS,
        calls,
        acts,
        arithmetic: *arithmetic,
        elem_bytes: DTYPE.size(),
        capacity,
        window,
    };
    let outputs = job.run(!seed, &queues)?;
    match outputs == *expected {
        true => Ok(()),
        false => Err("a result is wrong".to_string()),
    }
}

#[test]
fn ranks_that_call_on_two_carriers_in_opposite_orders_come_to_an_end_with_right_results() {
    for seed in seeds() {
        run(seed, false).unwrap_or_else(|why| panic!("SIM_SEED={seed}: {why}"));
    }
}

/// What the test above would see if all carriers of a communicator shared the order of their calls.
#[test]
fn with_one_queue_for_both_carriers_they_wait_for_each_other_for_ever() {
    let hung = |seed: &u64| run(*seed, true).is_err_and(|why| why.starts_with("ranks wait for each other for ever"));
    let hung = (0..100).filter(hung).count();
    assert!(hung > 50, "{hung} of 100");
}
