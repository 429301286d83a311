//! Runs the plans of all ranks over symbolic values, step by step, in a chosen order; for tests of algorithms.
//!
//! A value knows which chunk it is, how often each rank contributed, how it was put together, and whether prologue and
//! epilogue were applied. A message's values are read when it is received, and writing what an undelivered message still
//! has to carry is an error, so overwritten sources show.
#![forbid(unsafe_code)]

use super::{build, choices, code_of, coded_choices, is_leveled, is_on_board, supports, Algorithm, Choice};
use crate::code::FloatCode;
use crate::plan::{Action, Buffer, Channel, Collective, OperandOrder, Plan, Shape, Span, Step, StepRef};
use crate::topo::links::tests::dgx1;
use crate::topo::{Grid, Rank};
use crate::verify::{verify, Options};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// What a chunk holds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Value {
    /// The chunk's number in the input it came from.
    chunk: usize,
    /// How often each rank's input is in it.
    counts: Vec<u32>,
    /// Identifies the expression that made it.
    expression: u64,
    started: bool,
    finished: bool,
}

type Message = (usize, Vec<(Buffer, usize)>, Vec<usize>, StepRef);

/// All ranks' plans, part of the way through.
struct Run<'a> {
    plans: &'a [Plan],
    capacity: usize,
    memory: Vec<HashMap<(Buffer, usize), Value>>,
    channels: HashMap<(usize, usize, Channel), VecDeque<Message>>,
    next: Vec<Vec<usize>>,
    completed: Vec<Vec<Vec<bool>>>,
}

impl<'a> Run<'a> {
    fn new(plans: &'a [Plan], capacity: usize) -> Run<'a> {
        let mut memory = vec![HashMap::new(); plans.len()];
        for (rank, plan) in plans.iter().enumerate() {
            for chunk in 0..plan.chunks(Buffer::Input) {
                let mut counts = vec![0; plans.len()];
                counts[rank] = 1;
                let expression = mix(rank as u64 + 1, chunk as u64 + 1);
                let value = Value { chunk, counts, expression, started: false, finished: false };
                memory[rank].insert(home(plan, Buffer::Input, chunk), value);
            }
        }
        Run {
            plans,
            capacity,
            memory,
            channels: HashMap::new(),
            next: plans.iter().map(|plan| vec![0; plan.lanes.len()]).collect(),
            completed: plans
                .iter()
                .map(|plan| plan.lanes.iter().map(|lane| vec![false; lane.steps.len()]).collect())
                .collect(),
        }
    }

    /// The places of a list, and the size class of each.
    fn places(&self, rank: usize, spans: &[Span]) -> (Vec<(Buffer, usize)>, Vec<usize>) {
        let plan = &self.plans[rank];
        let per_block = plan.chunks_per_block as usize;
        let (mut places, mut classes) = (Vec::new(), Vec::new());
        assert!(!spans.is_empty(), "an empty list");
        for span in spans {
            assert!(span.len > 0, "an empty span");
            assert!(
                (span.start + span.len) as usize <= plan.chunks(span.buffer),
                "rank {rank}: {span:?} out of bounds"
            );
            let user = !span.buffer.is_own();
            assert!(!user || span.start % plan.chunks_per_block == span.like % plan.chunks_per_block, "{span:?}");
            for i in 0..span.len as usize {
                places.push(home(plan, span.buffer, span.start as usize + i));
                classes.push((span.like as usize + i) % per_block);
            }
        }
        (places, classes)
    }

    fn read(&self, rank: usize, spans: &[Span]) -> Vec<Value> {
        let (places, classes) = self.places(rank, spans);
        self.read_places(rank, &places, &classes)
    }

    fn read_places(&self, rank: usize, places: &[(Buffer, usize)], classes: &[usize]) -> Vec<Value> {
        let per_block = self.plans[rank].chunks_per_block as usize;
        let mut values = Vec::new();
        for (place, class) in places.iter().zip(classes) {
            let value =
                self.memory[rank].get(place).unwrap_or_else(|| panic!("rank {rank} reads nothing at {place:?}"));
            assert_eq!(value.chunk % per_block, *class, "rank {rank} takes {place:?} for a chunk of another size");
            values.push(value.clone());
        }
        values
    }

    fn write(&mut self, rank: usize, spans: &[Span], values: Vec<Value>) {
        let (places, classes) = self.places(rank, spans);
        assert_eq!(places.len(), values.len(), "rank {rank}: lists differ in length");
        for ((place, class), value) in places.into_iter().zip(classes).zip(values) {
            assert_eq!(value.chunk % self.plans[rank].chunks_per_block as usize, class, "rank {rank}: sizes differ");
            assert_ne!(place.0, Buffer::Input, "rank {rank} writes its input");
            let in_flight =
                self.channels.values().flatten().any(|(from, src, ..)| *from == rank && src.contains(&place));
            assert!(!in_flight, "rank {rank} overwrites {place:?}, which is being sent");
            self.memory[rank].insert(place, value);
        }
    }

    /// Takes the next step of a lane, if it can be taken.
    fn step(&mut self, rank: usize, lane: usize) -> bool {
        let plans = self.plans;
        let at = self.next[rank][lane];
        let Some(Step { action, deps }) = plans[rank].lanes[lane].steps.get(at) else { return false };
        if deps.iter().any(|dep| !self.completed[rank][dep.lane as usize][dep.step as usize]) {
            return false;
        }
        match action {
            Action::Send { to, channel, src } => {
                assert_ne!(rank, to.index(), "rank {rank} sends to itself");
                let (places, classes) = self.places(rank, src);
                self.read_places(rank, &places, &classes);
                let queue = self.channels.entry((rank, to.index(), *channel)).or_default();
                if queue.len() == self.capacity {
                    return false;
                }
                queue.push_back((rank, places, classes, StepRef { lane: lane as u32, step: at as u32 }));
                self.next[rank][lane] += 1;
                return true;
            }
            Action::Recv { from, channel, dst } => {
                let Some(values) = self.take(rank, *from, *channel) else { return false };
                self.write(rank, dst, values);
            }
            Action::RecvReduce { from, channel, local, dst, order, finish } => {
                let Some(incoming) = self.take(rank, *from, *channel) else { return false };
                let local = self.read(rank, local);
                assert_eq!(local.len(), incoming.len(), "rank {rank}: message and operand differ in length");
                let sums = match order {
                    OperandOrder::LocalFirst => local.into_iter().zip(incoming),
                    OperandOrder::IncomingFirst => incoming.into_iter().zip(local),
                };
                let sums = sums.map(|(a, b)| add(a, b, *finish, plans[rank].shape.prologue)).collect();
                self.write(rank, dst, sums);
            }
            Action::Copy { src, dst, start, finish } => {
                let mut values = self.read(rank, src);
                for value in &mut values {
                    let twice = (*start && value.started) || (*finish && value.finished);
                    assert!(!twice, "rank {rank}: prologue or epilogue is applied twice");
                    value.started |= start;
                    value.finished |= finish;
                }
                self.write(rank, dst, values);
            }
            Action::Nop => {}
            Action::Reduce { srcs, dst, finish } => {
                let mut operands = srcs.iter().map(|spans| self.read(rank, spans));
                let mut sums = operands.next().expect("an operand");
                for (index, operand) in operands.enumerate() {
                    assert_eq!(sums.len(), operand.len(), "rank {rank}: operands differ in length");
                    let last = *finish && index + 2 == srcs.len();
                    let pairs = sums.into_iter().zip(operand);
                    sums = pairs.map(|(a, b)| add(a, b, last, plans[rank].shape.prologue)).collect();
                }
                self.write(rank, dst, sums);
            }
            Action::Call(_) => panic!("rank {rank}: a call was left in the plan"),
        }
        self.completed[rank][lane][at] = true;
        self.next[rank][lane] += 1;
        true
    }

    fn take(&mut self, rank: usize, from: Rank, channel: Channel) -> Option<Vec<Value>> {
        let queue = self.channels.get_mut(&(from.index(), rank, channel))?;
        let (from, places, classes, sent) = queue.pop_front()?;
        self.completed[from][sent.lane as usize][sent.step as usize] = true;
        Some(self.read_places(from, &places, &classes))
    }

    /// Runs to the end; `pick(n)` chooses among `n` lanes.
    fn finish(&mut self, mut pick: impl FnMut(usize) -> usize) {
        let lanes: Vec<(usize, usize)> = self
            .plans
            .iter()
            .enumerate()
            .flat_map(|(rank, plan)| (0..plan.lanes.len()).map(move |lane| (rank, lane)))
            .collect();
        let mut left: usize = self.plans.iter().map(Plan::nsteps).sum();
        while left > 0 {
            let first = pick(lanes.len());
            let order = (0..lanes.len()).map(|i| lanes[(first + i) % lanes.len()]);
            let moved = order.into_iter().any(|(rank, lane)| self.step(rank, lane));
            assert!(moved, "stuck at {:?}", self.next);
            left -= 1;
        }
        assert!(self.channels.values().all(VecDeque::is_empty), "messages are left");
    }

    /// Checks the result against the collective's definition.
    fn check(&self) {
        let nranks = self.plans.len();
        let mut expressions: HashMap<usize, u64> = HashMap::new();
        for (rank, plan) in self.plans.iter().enumerate() {
            let (per_block, shape) = (plan.chunks_per_block as usize, &plan.shape);
            for at in 0..plan.chunks(Buffer::Output) {
                let (block, within) = (at / per_block, at % per_block);
                let (chunk, source) = match shape.collective {
                    Collective::Custom => unreachable!("no algorithm does it"),
                    Collective::AllReduce | Collective::Reduce => (at, None),
                    Collective::ReduceScatter => (rank * per_block + within, None),
                    Collective::AllGather | Collective::Gather => (within, Some(block)),
                    Collective::Broadcast => (at, Some(shape.root.index())),
                    Collective::AllToAll => (rank * per_block + within, Some(block)),
                    Collective::Scatter => (rank * per_block + within, Some(shape.root.index())),
                };
                let value = self.memory[rank].get(&home(plan, Buffer::Output, at));
                let value = value.unwrap_or_else(|| panic!("rank {rank} has nothing at {at}"));
                let counts: Vec<u32> =
                    (0..nranks).map(|i| u32::from(source.is_none_or(|source| source == i))).collect();
                assert_eq!((value.chunk, &value.counts), (chunk, &counts), "rank {rank} chunk {at}");
                assert_eq!(value.finished, shape.collective.reduces(), "rank {rank} chunk {at}: epilogue");
                assert!(value.started || !(shape.prologue && shape.collective.reduces()), "rank {rank}: no prologue");
                if shape.collective == Collective::AllReduce {
                    assert_eq!(*expressions.entry(at).or_insert(value.expression), value.expression, "replicas differ");
                }
            }
            for chunk in 0..plan.chunks(Buffer::Input) {
                let place = home(plan, Buffer::Input, chunk);
                let own = mix(rank as u64 + 1, chunk as u64 + 1);
                assert!(place.0 != Buffer::Input || self.memory[rank][&place].expression == own, "input changed");
            }
        }
    }
}

/// The one name of a place that two buffers share when they overlap.
fn home(plan: &Plan, buffer: Buffer, at: usize) -> (Buffer, usize) {
    let (ninput, noutput) = (plan.chunks(Buffer::Input), plan.chunks(Buffer::Output));
    if !plan.shape.in_place || ninput == 0 || noutput == 0 || buffer.is_own() {
        return (buffer, at);
    }
    let block = plan.rank.index() * plan.chunks_per_block as usize;
    match (plan.shape.collective, buffer) {
        (Collective::AllGather | Collective::Gather, Buffer::Input) => (Buffer::Output, at + block),
        (Collective::ReduceScatter | Collective::Scatter, Buffer::Input) if (block..block + noutput).contains(&at) => {
            (Buffer::Output, at - block)
        }
        (Collective::AllReduce | Collective::Broadcast | Collective::Reduce, Buffer::Input) => (Buffer::Output, at),
        _ => (buffer, at),
    }
}

fn add(a: Value, b: Value, finish: bool, prologue: bool) -> Value {
    assert_eq!(a.chunk, b.chunk, "different chunks are combined");
    assert!(!a.finished && !b.finished, "a final result is combined");
    assert!(a.started == prologue && b.started == prologue, "the prologue is missing or too much");
    let counts = a.counts.iter().zip(&b.counts).map(|(a, b)| a + b).collect();
    Value { counts, expression: mix(a.expression, b.expression.rotate_left(7)), finished: finish, ..a }
}

fn mix(a: u64, b: u64) -> u64 {
    let z = (a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ (z >> 31)
}

fn run(plans: &[Plan], label: &str) {
    for capacity in [1, 8] {
        // Larger plans take longer in each order, and show little that smaller ones do not.
        for seed in 0..if plans.len() > 8 { 4 } else { 8u64 } {
            let context = format!("{label} capacity {capacity} order {seed}");
            let result = std::panic::catch_unwind(|| {
                let mut run = Run::new(plans, capacity);
                let (mut turn, mut state) = (0usize, seed);
                run.finish(|n| match seed {
                    // In turns; always the first that can; always the last but one that can; at random.
                    0 => {
                        turn += 1;
                        turn % n
                    }
                    1 => 0,
                    2 => n - 1,
                    _ => {
                        state = mix(state, 1);
                        (state >> 33) as usize % n
                    }
                });
                run.check();
            });
            assert!(result.is_ok(), "{context}");
        }
    }
}

/// The plans of all ranks, calls replaced, a third of the ranks in place if `some_in_place`.
fn plans_of(choice: &Choice, shape: &Shape, some_in_place: bool) -> Vec<Plan> {
    let in_place = |rank| shape.in_place || (some_in_place && rank % 3 == 1);
    let plan = |rank| {
        let shape = Shape { in_place: in_place(rank), ..shape.clone() };
        build(choice, &shape, Rank::from_index(rank)).unwrap()
    };
    (0..shape.nranks()).map(plan).collect()
}

/// Runs every algorithm on a grid: all roots up to 8 ranks, in place on all, some and no ranks, with and without prologue.
/// Returns the names of those that ran.
fn run_all(grid: &Arc<Grid>) -> BTreeSet<String> {
    let nranks = grid.nranks();
    let mut names = BTreeSet::new();
    for collective in Collective::ALL {
        let roots = match (collective.has_root(), nranks) {
            (false, _) => vec![0],
            (true, ..=8) => (0..nranks).collect(),
            (true, _) => vec![0, 1, nranks / 2 + 1, nranks - 1],
        };
        // The plan of a board is one call, for which this interpreter knows no provider; the verifier and the simulated
        // world do.
        let own = choices(collective, grid).into_iter().filter(|choice| !is_on_board(choice));
        // What is coded is taken for what it stands for here; in other codes plans are the same.
        let in_a_code = coded_choices(collective, grid).into_iter();
        let in_a_code = in_a_code.filter(|choice| !is_leveled(choice) || code_of(choice) == Some(FloatCode::Mx8));
        let choices: Vec<Choice> = own.chain(in_a_code).collect();
        for (choice, root) in choices.iter().flat_map(|choice| roots.iter().map(move |&r| (choice, r))) {
            for (in_place, prologue) in [(0, false), (1, false), (2, false), (0, true), (1, true), (2, true)] {
                if (in_place > 0 && collective == Collective::AllToAll) || (prologue && !collective.reduces()) {
                    continue;
                }
                let root = Rank::from_index(root);
                let shape = Shape { root, in_place: in_place == 1, prologue, ..Shape::new(collective, grid.clone()) };
                if !supports(choice, &shape) {
                    continue;
                }
                let plans = plans_of(choice, &shape, in_place == 2);
                let name = collective.name();
                run(&plans, &format!("{choice} {name} on {grid} root {root} in place {in_place} prologue {prologue}"));
                names.insert(choice.name.clone());
            }
        }
    }
    names
}

#[test]
fn every_algorithm_does_its_collectives_for_1_to_16_ranks() {
    let mut names = BTreeSet::new();
    for nranks in 1..=16 {
        names.extend(run_all(&Arc::new(Grid::flat(nranks))));
    }
    for nnodes in 2..=8 {
        names.extend(run_all(&Arc::new(Grid::blocks(&vec![2; nnodes]))));
    }
    names.extend(run_all(&Arc::new(Grid::flat(8).with_links(&Arc::new(dgx1())))));
    let on_board = |name: &str| is_on_board(&Choice::flat(name));
    for algorithm in super::ALGORITHMS.iter().filter(|algorithm| !on_board(algorithm.name)) {
        assert!(names.contains(algorithm.name), "{} was never run", algorithm.name);
    }
}

#[test]
fn every_algorithm_takes_any_placement_on_nodes() {
    let grids = [
        Grid::blocks(&[4, 4]),
        Grid::blocks(&[2, 2, 2, 2]),
        Grid::blocks(&[3, 3, 3]),
        Grid::blocks(&[1, 1, 1, 1, 1]),
        Grid::blocks(&[3, 1, 4]),
        Grid::blocks(&[1, 6]),
        Grid::blocks(&[6, 1, 2]),
        Grid::round_robin(8, 2),
        Grid::round_robin(11, 3),
        Grid::from_labels(&[0, 1, 0, 0, 2, 1, 0, 2, 2, 2, 2]),
    ];
    for grid in grids.map(Arc::new) {
        assert!(!run_all(&grid).is_empty());
    }
}

#[test]
fn rounds_are_logarithmic_and_no_block_travels_twice() {
    let plans = |algorithm: &Algorithm, collective, nranks: usize| -> Vec<Plan> {
        let shape = Shape::new(collective, Arc::new(Grid::flat(nranks)));
        (0..nranks).map(|rank| (algorithm.build)(&shape, Rank::from_index(rank))).collect()
    };
    use Collective::*;
    for nranks in [2usize, 3, 5, 7, 8, 13, 16, 31, 64, 100] {
        let log = nranks.next_power_of_two().trailing_zeros() as usize;
        let all = nranks * (nranks - 1);
        let cases = [
            (&super::log::LOG, AllGather, log, Some(all)),
            (&super::log::LOG, ReduceScatter, log, Some(all)),
            (&super::log::LOG, AllReduce, 2 * log, Some(2 * all)),
            (&super::rd::RD, AllGather, log, Some(all)),
            (&super::rd::RD, ReduceScatter, log, Some(all)),
            (&super::rd::RD, AllReduce, 2 * log, Some(2 * all)),
            (&super::rd::RD_ONE, AllReduce, log, Some(nranks * log)),
            (&super::tree::TREE, Broadcast, log, Some(nranks - 1)),
            (&super::tree::TREE, Reduce, log, Some(nranks - 1)),
            (&super::tree::TREE, Gather, log, None),
            (&super::tree::TREE, Scatter, log, None),
            (&super::scatter_gather::SCATTER_ALLGATHER, Broadcast, 2 * log, Some(all)),
            (&super::scatter_gather::REDUCE_SCATTER_GATHER, Reduce, 2 * log, None),
        ];
        for (algorithm, collective, rounds, chunks) in cases {
            if !nranks.is_power_of_two() && algorithm.name.starts_with("rd") {
                continue;
            }
            let what = format!("{} {} {nranks}", algorithm.name, collective.name());
            let plans = plans(algorithm, collective, nranks);
            let report =
                verify(&plans, &Options { capacity: 1, vectored: false }).unwrap_or_else(|why| panic!("{what}: {why}"));
            assert!(report.rounds <= rounds, "{what}: {} rounds", report.rounds);
            assert!(chunks.is_none_or(|chunks| chunks == report.chunks), "{what}: {} chunks", report.chunks);
        }
    }
}

#[test]
#[should_panic(expected = "capacity 1 order")]
fn a_result_that_lands_on_a_vector_still_being_sent_is_noticed() {
    let shape = Shape::new(Collective::AllReduce, Arc::new(Grid::flat(8)));
    let mut plans: Vec<Plan> = (0..8).map(|rank| (super::rd::RD_ONE.build)(&shape, Rank(rank))).collect();
    plans.iter_mut().flat_map(|plan| &mut plan.lanes[1].steps).for_each(|step| step.deps.clear());
    run(&plans, "without dependencies");
}
