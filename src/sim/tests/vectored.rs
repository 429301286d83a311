//! Blocks of different sizes: every algorithm of the collectives that have such, on random sizes and places.
#![forbid(unsafe_code)]

use super::property::{accepted, case};
use super::*;
use crate::algorithms::two_step;
use crate::plan::blocks::{packed, BlockTable, Extent};
use crate::plan::stage::stage;
use crate::plan::Buffer;
use std::collections::BTreeSet;

/// Cases.
const CASES: u64 = 1500;

/// Sizes of `n` blocks: mostly none, one with nine tenths of all, falling as Zipf has it, or any.
fn sizes(n: usize, random: &mut Random) -> Vec<usize> {
    let total = random.pick(&[1usize, 40, 300, 900]);
    let mut sizes: Vec<usize> = match random.below(4) {
        0 => (0..n).map(|_| if random.one_in(4) { 1 + random.below(60) as usize } else { 0 }).collect(),
        1 => {
            let mut sizes = vec![total / 10 / n.max(1); n];
            sizes[random.below(n as u64) as usize] = total * 9 / 10;
            sizes
        }
        2 => (1..=n).map(|rank| total / rank).collect(),
        _ => (0..n).map(|_| random.below(50) as usize).collect(),
    };
    (1..n).rev().for_each(|at| sizes.swap(at, random.below(at as u64 + 1) as usize));
    sizes
}

/// Places of blocks in any order, with gaps or without.
fn places(sizes: &[usize], random: &mut Random) -> Vec<Extent> {
    if random.one_in(2) {
        return packed(sizes);
    }
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    (1..order.len()).rev().for_each(|at| order.swap(at, random.below(at as u64 + 1) as usize));
    let mut blocks = vec![Extent::default(); sizes.len()];
    let mut next = random.below(3) as usize;
    for block in order {
        blocks[block] = Extent { count: sizes[block], at: next };
        next += sizes[block] + random.below(4) as usize;
    }
    blocks
}

/// The blocks of all ranks, all of which know all sizes.
fn tables(shape: &Shape, random: &mut Random) -> Vec<Arc<BlockTable>> {
    let p = shape.nranks();
    let pairs = if shape.collective == Collective::AllToAll { p * p } else { p };
    let row = sizes(pairs, random);
    let table = |rank: usize| {
        let me = Rank::from_index(rank);
        let mut side = |buffer, blocks: usize| {
            let sizes: Vec<usize> = (0..blocks).map(|block| row[shape.row_block(me, buffer, block)]).collect();
            if blocks > 1 {
                places(&sizes, random)
            } else {
                packed(&sizes)
            }
        };
        let input = side(Buffer::Input, shape.input_blocks(me));
        let output = side(Buffer::Output, shape.output_blocks(me));
        Arc::new(BlockTable::new(input, output, row.clone()))
    };
    (0..p).map(table).collect()
}

/// The bytes of blocks, one after another, and whether all that lies between is as it was before.
fn blocks_of(blocks: &[Extent], elem_bytes: usize, bytes: &[u8]) -> (Vec<u8>, bool) {
    let mut between = vec![true; bytes.len()];
    let mut found = Vec::new();
    for &Extent { count, at } in blocks {
        let range = if count == 0 { 0..0 } else { at * elem_bytes..(at + count) * elem_bytes };
        found.extend_from_slice(&bytes[range.clone()]);
        between[range].fill(false);
    }
    (found, bytes.iter().zip(&between).all(|(&byte, &is_between)| !is_between || byte == 0xa5))
}

/// Runs plans on sizes that follow from a seed, of which ranks know all or their `own` only.
fn run_case(sim: &mut Sim, shape: &Shape, plans: Vec<Plan>, seed: u64, own: bool) -> std::result::Result<(), String> {
    let mut random = Random::new(seed ^ 0x7ec);
    let tables = tables(shape, &mut random);
    let dtype = random.pick(&[DataType::I32, DataType::U64]);
    let (size, segment_bytes) = (dtype.size(), random.pick(&[64, 192, 1 << 20]));
    let inputs: Vec<Vec<u8>> =
        tables.iter().map(|table| (0..table.spans().0 * size).map(|_| random.next_u64() as u8).collect()).collect();
    let staged = random.one_in(3) && !own;
    let plans = plans.into_iter().map(|plan| if staged { stage(&plan, &|_, _| true) } else { plan }).collect();
    let programs = compile(plans).map_err(|error| error.to_string())?;
    let (options, _, _) = circumstances(seed);
    sim.reset(seed, options);
    let of_pairs = |table: &Arc<BlockTable>| BlockTable::of_pairs(table.input().to_vec(), table.output().to_vec());
    let given = |table: &Arc<BlockTable>| if own { Arc::new(of_pairs(table)) } else { table.clone() };
    let mut given: Vec<Arc<BlockTable>> = tables.iter().map(given).collect();
    if own && programs[0].plan().algorithm == two_step::TWO_STEP.name {
        given = two_step::handing(&given, &shape.grid);
    }
    let job = Job { count: 0, blocks: Some(&given), dtype, segment_bytes, inputs: Some(&inputs), weights: None };
    let again = format!("staged {staged}, segments of {segment_bytes}, {tables:?}");
    let report = sim.run(&programs, &job).map_err(|failure| format!("{failure}{again}"))?;
    let arithmetic = Arithmetic::new(dtype, shape.prologue).map_err(|error| error.to_string())?;
    let expected = expected_of(shape, arithmetic, size, &tables, &inputs);
    for (rank, table) in tables.iter().enumerate() {
        let (found, is_clean) = blocks_of(table.output(), size, &report.outputs[rank]);
        if found != expected[rank] {
            return Err(format!("rank {rank} has a wrong result; {again}"));
        }
        if !is_clean {
            return Err(format!("rank {rank} has written between blocks; {again}"));
        }
    }
    Ok(())
}

#[test]
fn every_algorithm_runs_right_on_blocks_of_any_sizes() {
    let mut sim = Sim::new(0, SimOptions::default());
    let (mut ran, mut names) = (0, BTreeSet::new());
    for seed in seeds(CASES) {
        let Some((shape, name, plans)) = case(&mut Random::new(seed)) else { continue };
        let one_block = matches!(shape.collective, Collective::AllReduce | Collective::Broadcast | Collective::Reduce);
        let again = format!("SIM_SEED={seed}: {name}, {shape:?}");
        if one_block || !accepted(&plans, true, &again) {
            continue;
        }
        if let Err(text) = run_case(&mut sim, &shape, plans, seed, false) {
            panic!("{again}: {text}");
        }
        ran += 1;
        names.insert(format!("{} {name}", shape.collective.name()));
    }
    println!("{ran} cases of {names:?}");
    assert!(ran > CASES / 3 || std::env::var("SIM_SEED").is_ok(), "only {ran} of {CASES} were accepted");
}

fn direct(name: &str, shape: &Shape) -> Vec<Plan> {
    let ranks = (0..shape.nranks()).map(Rank::from_index);
    ranks.map(|rank| crate::algorithms::build(&crate::algorithms::Choice::flat(name), shape, rank).unwrap()).collect()
}

#[test]
fn where_ranks_know_their_own_sizes_only_blocks_go_in_parts_that_both_ends_cut_alike() {
    let mut sim = Sim::new(0, SimOptions::default());
    for seed in seeds(600) {
        let mut random = Random::new(seed);
        let nodes: Vec<usize> = (0..1 + random.below(3)).map(|_| 1 + random.below(4) as usize).collect();
        let nranks = nodes.iter().sum::<usize>();
        let collective = random.pick(&[Collective::AllToAll, Collective::Gather, Collective::Scatter]);
        let name = match collective {
            Collective::AllToAll => random.pick(&["direct", "pairwise", "two_step"]),
            _ => "direct",
        };
        let root = if collective.has_root() { random.below(nranks as u64) as usize } else { 0 };
        let grid = Arc::new(crate::topo::Grid::blocks(&nodes));
        let shape = Shape { root: Rank::from_index(root), ..Shape::new(collective, grid) };
        if let Err(text) = run_case(&mut sim, &shape, direct(name, &shape), seed, true) {
            panic!("SIM_SEED={seed}: {name}, {shape:?}: {text}");
        }
    }
}

#[test]
fn empty_blocks_have_no_messages_where_ranks_know_their_own_sizes_only() {
    let shape = Shape::new(Collective::AllToAll, Arc::new(crate::topo::Grid::flat(3)));
    for name in ["direct", "pairwise"] {
        let programs = compile(direct(name, &shape)).unwrap();
        let table = |input: [usize; 3], output: [usize; 3]| BlockTable::of_pairs(packed(&input), packed(&output));
        // Rank 0 has 5 elements for rank 2, and rank 2 as many as a segment has for itself and for rank 0.
        let pairs = [([0, 0, 5], [0, 0, 16]), ([0; 3], [0; 3]), ([16, 0, 16], [5, 0, 16])];
        let tables = pairs.map(|(input, output)| Arc::new(table(input, output)));
        let job = Job {
            count: 0,
            blocks: Some(&tables),
            dtype: DataType::I32,
            segment_bytes: 64,
            inputs: None,
            weights: None,
        };
        let report = Sim::new(1, SimOptions::default()).run(&programs, &job).unwrap();
        // A block that fills its segment is followed by an empty message, which says that it ends.
        let messages: Vec<u64> = report.stats.iter().map(|stats| stats.messages).collect();
        assert_eq!(messages, [1, 0, 2], "{name}");
    }
}

/// What rank 2 is told where rank 0 has so many elements for it, and it expects others; segments have 16.
fn told(sent: usize, expected: usize) -> String {
    let shape = Shape::new(Collective::AllToAll, Arc::new(crate::topo::Grid::flat(3)));
    let programs = compile(direct("direct", &shape)).unwrap();
    let table = |input: [usize; 3], output: [usize; 3]| Arc::new(BlockTable::of_pairs(packed(&input), packed(&output)));
    let tables = [table([0, 0, sent], [0; 3]), table([0; 3], [0; 3]), table([0; 3], [expected, 0, 0])];
    let job =
        Job { count: 0, blocks: Some(&tables), dtype: DataType::I32, segment_bytes: 64, inputs: None, weights: None };
    let failure = Sim::new(1, SimOptions::default()).run(&programs, &job).unwrap_err();
    let RankOutcome::Failed { error, .. } = &failure.outcomes[2] else { panic!("{failure}") };
    error.text().to_string()
}

#[test]
fn counts_that_differ_are_noticed_where_the_shorter_one_ends() {
    assert_eq!(told(16, 32), "a message of 0 bytes from rank 0 where 64 were expected");
    assert_eq!(told(48, 32), "a message of 64 bytes from rank 0 where 0 were expected");
    assert_eq!(told(47, 48), "a message of 60 bytes from rank 0 where 64 were expected");
}
