//! Every plan of every algorithm is proved, once for the whole tree: all small shapes, and some large ones. What else
//! calls the verifier shows something else: the interpreter of `src/algorithms` runs plans, `strata plan verify` is a command.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use strata::algorithms::{self, Choice};
use strata::code::FloatCode;
use strata::config::Config;
use strata::dtype::DataType;
use strata::plan::stage::stage;
use strata::plan::{Action, Collective, Plan, Shape};
use strata::selection::{self, Context, Executor, Request, Selection};
use strata::sim::{self, Job, Sim, SimOptions, Uniform};
use strata::topo::{Grid, Rank};
use strata::verify::mutate::kill;
use strata::verify::{verify, Options};

pub fn plans(choice: &Choice, shape: &Shape) -> Vec<Plan> {
    let ranks = (0..shape.nranks()).map(Rank::from_index);
    ranks
        .map(|rank| algorithms::build(choice, shape, rank).unwrap_or_else(|error| panic!("{choice}: {error}")))
        .collect()
}

/// The choices for a collective in one code: those in others have the same plans, and inside a node rings have what they have without.
fn in_a_code(collective: Collective, grid: &Arc<Grid>) -> impl Iterator<Item = Choice> {
    let all = algorithms::coded_choices(collective, grid);
    all.into_iter().filter(|choice| algorithms::code_of(choice) == Some(FloatCode::Mx8) && choice.node == "direct")
}

/// The call of a provider, which has one plan whatever its name, on several ranks.
fn by_a_provider(grid: &Arc<Grid>) -> Option<Choice> {
    (grid.nranks() > 1).then(|| Choice::flat("provider:any"))
}

/// Proves every choice for a collective on a grid, in place and not, with and without prologue, for the given roots.
pub fn prove(collective: Collective, grid: &Arc<Grid>, roots: &[usize], options: &[Options]) -> usize {
    let mut proved = 0;
    // Other tests of this program load scripts, which are proved when they are loaded.
    let is_built_in = |choice: &Choice| !choice.to_string().contains("script:");
    let choices = algorithms::choices(collective, grid).into_iter().chain(in_a_code(collective, grid));
    for choice in choices.chain(by_a_provider(grid)).filter(is_built_in) {
        for &root in if collective.has_root() { roots } else { &[0] } {
            for (in_place, prologue) in [(false, false), (true, false), (false, true), (true, true)] {
                if (in_place && collective == Collective::AllToAll) || (prologue && !collective.reduces()) {
                    continue;
                }
                let root = Rank::from_index(root);
                let shape = Shape { root, in_place, prologue, ..Shape::new(collective, grid.clone()) };
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
    proved
}

const CAPACITIES: [Options; 2] = [Options { capacity: 1, vectored: false }, Options { capacity: 8, vectored: false }];

/// Up to sixteen ranks: on one node, on as even nodes as can be, dealt out to nodes, and some uneven ones.
fn small_grids() -> Vec<Grid> {
    let mut grids = Vec::new();
    let mut add = |grid: Grid| {
        if !grids.contains(&grid) {
            grids.push(grid);
        }
    };
    for p in 1..=16 {
        add(Grid::flat(p));
        for nodes in 2..=p {
            let has_few = [2, 3, p / 2].contains(&nodes);
            if has_few || p % nodes == 0 {
                let sizes: Vec<usize> = (0..nodes).map(|node| p / nodes + usize::from(node < p % nodes)).collect();
                add(Grid::blocks(&sizes));
            }
            if has_few || nodes == 2 + p % 3 {
                add(Grid::round_robin(p, nodes));
            }
        }
    }
    for sizes in [&[1, 2][..], &[2, 1], &[1, 5], &[1, 6], &[3, 1, 4], &[1, 1, 5], &[6, 1, 2], &[4, 4, 1], &[6, 1, 1, 1]]
    {
        add(Grid::blocks(sizes));
    }
    for sizes in [&[4, 3, 2, 1][..], &[1, 1, 8], &[2, 7, 3], &[7, 7, 1]] {
        add(Grid::blocks(sizes));
    }
    add(Grid::from_labels(&[0, 1, 0, 0, 2, 1, 0, 2, 2, 2, 2]));
    grids
}

/// All roots of few ranks on one node, elsewhere the first, the last and one between.
fn roots(grid: &Grid) -> Vec<usize> {
    let p = grid.nranks();
    if grid.nnodes() == 1 && p <= 8 {
        return (0..p).collect();
    }
    let mut roots = vec![0, p / 2, p - 1];
    roots.dedup();
    roots
}

/// Proves a collective on all small grids.
fn prove_small(collective: Collective) {
    let grids = small_grids().into_iter().map(Arc::new);
    let proved: usize = grids.map(|grid| prove(collective, &grid, &roots(&grid), &CAPACITIES)).sum();
    println!("{proved} plans proved");
}

/// Changes plans of a collective on few ranks in every way, on all processors: half of all mutants are of all-reduces. Of
/// those of four ranks, which take the longest, it is one choice in four, on each grid others, or all with `MUTANTS=all`.
fn attack(collective: Collective) {
    let mut cases = Vec::new();
    let few = std::env::var("MUTANTS").map_or(true, |which| which != "all");
    let grids = [Grid::blocks(&[2, 2]), Grid::flat(4), Grid::flat(3), Grid::blocks(&[2, 1]), Grid::flat(2)];
    for (nth, grid) in grids.map(Arc::new).into_iter().enumerate() {
        // Three ranks show every kind of mutant of what is coded.
        let coded = in_a_code(collective, &grid).filter(|_| grid.nranks() < 4);
        let every = if few && grid.nranks() == 4 { 4 } else { 1 };
        let choices = algorithms::choices(collective, &grid).into_iter().chain(coded).chain(by_a_provider(&grid));
        for (_, choice) in choices.enumerate().filter(|(at, _)| (at + nth) % every == 0) {
            // Four ranks in place add minutes and no kind of mutant.
            let all =
                if collective == Collective::AllToAll || grid.nranks() == 4 { &[false][..] } else { &[false, true] };
            let shape = |&in_place| Shape { in_place, ..Shape::new(collective, grid.clone()) };
            cases.extend(all.iter().map(|in_place| (choice.clone(), shape(in_place))));
        }
    }
    println!("{}", kill_all(&cases));
}

/// Changes plans of few ranks in every way; what became of the mutants.
pub fn kill_all(cases: &[(Choice, Shape)]) -> String {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = [0; 3];
        while let Some((choice, shape)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = kill(&plans(choice, shape), &Options { capacity: 1, vectored: false });
            let (what, grid, in_place) = (shape.collective.name(), &shape.grid, shape.in_place);
            let what = format!("{what} {choice} on {grid} in_place {in_place}");
            assert_eq!(outcome.missed, [], "{what}: accepted, and wrong");
            found = [found[0] + outcome.mutants, found[1] + outcome.killed, found[2] + outcome.equivalent];
        }
        found
    };
    let [mutants, killed, equivalent] = std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let each = threads.into_iter().map(|thread| thread.join().expect("no mutant is missed"));
        each.fold([0; 3], |sum, found| std::array::from_fn(|at| sum[at] + found[at]))
    });
    format!("{mutants} mutants: {killed} rejected, {equivalent} equivalent")
}

/// The tests that are long, for each collective one, so that they run beside each other.
macro_rules! for_each_collective {
    ($($collective:ident: $proved:ident, $attacked:ident;)*) => {
        const TESTED: [Collective; Collective::ALL.len()] = [$(Collective::$collective),*];
        $(
            #[test]
            fn $proved() {
                prove_small(Collective::$collective);
            }

            #[test]
            fn $attacked() {
                attack(Collective::$collective);
            }
        )*
    };
}

for_each_collective! {
    AllReduce: every_all_reduce_is_proved_for_up_to_sixteen_ranks, mutants_of_all_reduce_are_rejected_or_as_good;
    AllGather: every_all_gather_is_proved_for_up_to_sixteen_ranks, mutants_of_all_gather_are_rejected_or_as_good;
    ReduceScatter: every_reduce_scatter_is_proved_for_up_to_sixteen_ranks, mutants_of_reduce_scatter_are_rejected_or_as_good;
    Broadcast: every_broadcast_is_proved_for_up_to_sixteen_ranks, mutants_of_broadcast_are_rejected_or_as_good;
    Reduce: every_reduce_is_proved_for_up_to_sixteen_ranks, mutants_of_reduce_are_rejected_or_as_good;
    AllToAll: every_all_to_all_is_proved_for_up_to_sixteen_ranks, mutants_of_all_to_all_are_rejected_or_as_good;
    Gather: every_gather_is_proved_for_up_to_sixteen_ranks, mutants_of_gather_are_rejected_or_as_good;
    Scatter: every_scatter_is_proved_for_up_to_sixteen_ranks, mutants_of_scatter_are_rejected_or_as_good;
}

/// The collectives of which blocks may differ in size.
const VECTORED: [Collective; 5] =
    [Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll, Collective::Gather, Collective::Scatter];

#[test]
fn every_algorithm_is_proved_for_blocks_of_which_any_may_be_empty() {
    let grids = small_grids().into_iter().filter(|grid| grid.nranks() <= 8).map(Arc::new);
    let options = [Options { capacity: 1, vectored: true }];
    let prove = |grid: Arc<Grid>| {
        VECTORED.map(|collective| prove(collective, &grid, &roots(&grid), &options)).iter().sum::<usize>()
    };
    println!("{} plans proved", grids.map(prove).sum::<usize>());
}

/// The plans with the last of a rank's spans in scratch naming another block of the row.
fn misnamed(plans: &[Plan], rank: usize) -> Option<Vec<Plan>> {
    let mut plans = plans.to_vec();
    let per_block = plans[rank].chunks_per_block;
    let steps = plans[rank].lanes.iter_mut().flat_map(|lane| &mut lane.steps);
    let spans = steps.flat_map(|step| match &mut step.action {
        Action::Send { src: list, .. } | Action::Recv { dst: list, .. } => vec![list],
        Action::RecvReduce { local, dst, .. } => vec![local, dst],
        Action::Copy { src, dst, .. } => vec![src, dst],
        _ => Vec::new(),
    });
    let span = spans.flatten().filter(|span| span.buffer.is_own()).last()?;
    span.like += per_block;
    Some(plans)
}

#[test]
fn a_span_that_names_another_block_is_seen_where_blocks_differ_in_size() {
    let grid = Arc::new(Grid::blocks(&[2, 3]));
    let mut seen = 0;
    for collective in VECTORED {
        let root = Rank(u32::from(collective.has_root()));
        let shape = Shape { root, ..Shape::new(collective, grid.clone()) };
        let choices = algorithms::choices(collective, &grid).into_iter().chain(in_a_code(collective, &grid));
        for choice in choices.filter(|choice| !algorithms::is_on_board(choice)) {
            let right: Vec<Plan> = plans(&choice, &shape).iter().map(|plan| stage(plan, &|_, _| true)).collect();
            for wrong in (0..5).filter_map(|rank| misnamed(&right, rank)) {
                let verdict = |vectored| verify(&wrong, &Options { capacity: 1, vectored });
                assert_eq!(verdict(false).err(), None, "{choice}: all blocks are as large");
                let why = verdict(true).expect_err("another block").to_string();
                assert!(why.starts_with("bounds"), "{} {choice}: {why}", collective.name());
                seen += 1;
            }
        }
    }
    assert!(seen > 50, "{seen}");
}

#[test]
fn every_collective_is_proved_and_attacked() {
    assert_eq!(TESTED, Collective::ALL);
}

/// Proves plans whose calls another provider does, of every choice with such calls.
fn prove_calls(grid: Grid, roots: &[usize]) {
    let grid = Arc::new(grid);
    for collective in Collective::ALL {
        let choices = algorithms::choices(collective, &grid);
        for choice in choices.iter().filter(|choice| choice.name.starts_with("two_level")) {
            for (in_place, &root) in roots.iter().flat_map(|root| [(false, root), (true, root)]) {
                let root = Rank::from_index(if collective.has_root() { root } else { 0 });
                let shape = Shape { in_place, root, ..Shape::new(collective, grid.clone()) };
                let ranks = (0..shape.nranks()).map(Rank::from_index);
                let plans: Vec<Plan> =
                    ranks.map(|rank| algorithms::build_with_calls(choice, &shape, rank).expect("a plan")).collect();
                for options in &CAPACITIES {
                    verify(&plans, options).unwrap_or_else(|why| {
                        panic!("{} {choice} on {grid} root {root} in_place {in_place}: {why}", collective.name())
                    });
                }
            }
        }
    }
}

#[test]
fn two_level_plans_are_proved_with_their_calls_left_to_another_provider() {
    for grid in [Grid::blocks(&[2, 2]), Grid::blocks(&[3, 1, 4]), Grid::blocks(&[4, 3, 2, 1]), Grid::round_robin(7, 3)]
    {
        prove_calls(grid, &[0, 3]);
    }
}

/// Many ranks: on one node, on even and uneven nodes, and dealt out.
fn large_grids() -> [Grid; 4] {
    let uneven: Vec<usize> = (0..20).map(|node| 1 + node * 7 % 5).collect();
    [Grid::flat(64), Grid::blocks(&[8; 16]), Grid::blocks(&uneven), Grid::round_robin(67, 9)]
}

#[test]
fn every_algorithm_is_proved_on_some_large_shapes() {
    for grid in large_grids().map(Arc::new) {
        for collective in Collective::ALL {
            prove(collective, &grid, &[5], &[Options { capacity: 1, vectored: false }]);
        }
    }
}

#[test]
fn two_level_plans_are_proved_with_calls_on_some_large_shapes() {
    large_grids().into_iter().for_each(|grid| prove_calls(grid, &[5]));
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
    let job = Job {
        count: block_bytes / 4,
        blocks: None,
        dtype: DataType::F32,
        segment_bytes: usize::MAX,
        inputs: None,
        weights: None,
    };
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
