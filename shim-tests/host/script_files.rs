//! Algorithms that come as files, those of others, on ranks that are threads: over shared memory and TCP, and, with
//! `SOFT_DEVICE`, on a soft GPU.

use crate::again::{again, passes};
use crate::cases::{calls_by_seed, elements, scripts, Case, SEGMENT_BYTES};
use crate::collectives::{all_cases, check, run_by};
use crate::world::{self, region, run, Member};
use std::collections::BTreeSet;
use std::ops::Range;
use strata::communicator::CollectiveCall;
use strata::dtype::{DataType, RedOp};
use strata::plan::Collective;
use strata::script::LoadedScript;
use strata::topo::{Grid, Rank};

#[test]
fn scripts_are_right_on_every_type_and_operation_in_both_places() {
    assert_eq!(scripts().len(), FILES);
    for nranks in [4, 8] {
        let half = nranks / 2;
        for grid in [Grid::flat(nranks), Grid::blocks(&[half, half]), Grid::round_robin(nranks, half)] {
            run(grid, |member| {
                let nranks = member.grid.nranks();
                for script in scripts().iter().filter(|script| script.script.nranks() == nranks) {
                    all_cases(member, script.script.collective, Some(&script.unique_name));
                }
            });
        }
    }
}

const ALL_TO_NEXT: &str = "script:alltonext_fwd_2n";
/// Files that do what they say; three do not.
const FILES: usize = 24;

/// A custom collective: its contract promises each rank but the first the vector of the rank before.
#[test]
fn a_script_of_a_custom_collective_does_what_its_contract_says() {
    let script = scripts().into_iter().find(|script| script.name == ALL_TO_NEXT).unwrap();
    let name = script.unique_name.clone();
    run(Grid::blocks(&[8, 8]), move |member| {
        for (count, in_place) in [0, 1, 7, 1000, 65_537].into_iter().flat_map(|count| [(count, false), (count, true)]) {
            let vector = |rank: usize| elements(DataType::F32, None, count, rank);
            let (mut send, mut recv) = (vector(member.rank), vec![0x5a; count * 4]);
            let call = CollectiveCall {
                collective: Collective::Custom,
                input: region(&mut send),
                output: if in_place { region(&mut send) } else { region(&mut recv) },
                count,
                blocks: None,
                joined: None,
                tag: 0,
                dtype: DataType::F32,
                reduction: None,
                factor_at: None,
                residual: None,
                root: Rank(0),
                algorithm: Some(name.clone()),
                decision: None,
            };
            member.collective(call).unwrap_or_else(|error| panic!("{error}"));
            let Some(before) = member.rank.checked_sub(1) else {
                assert!(in_place || recv == vec![0x5a; count * 4]);
                continue;
            };
            let got = if in_place { &send } else { &recv };
            assert!(*got == vector(before), "rank {} of {count} elements", member.rank);
        }
    });
}

#[test]
fn scripts_for_more_ranks_are_right() {
    for nranks in [16, 32] {
        run(Grid::blocks(&[nranks / 2, nranks / 2]), |member| {
            let nranks = member.grid.nranks();
            let fits = |script: &LoadedScript| script.script.nranks() == nranks && script.name != ALL_TO_NEXT;
            for script in scripts().iter().filter(|script| fits(script)) {
                let choice = script.unique_name.parse().unwrap();
                run_by(member, script.script.collective, &choice, (DataType::F16, RedOp::Avg));
                run_by(member, script.script.collective, &choice, (DataType::I32, RedOp::Sum));
            }
        });
    }
}

/// `SCRIPT_SEEDS=FIRST..END` chooses others.
fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("SCRIPT_SEEDS") else { return 1..2 };
    let (first, end) = text.split_once("..").expect("SCRIPT_SEEDS=FIRST..END");
    first.parse().expect("a first seed")..end.parse().expect("a last seed")
}

/// Fewer calls where there are more ranks, all of which run on the processors of one machine.
const CALLS: [(usize, usize); 4] = [(4, 96), (8, 48), (16, 24), (32, 12)];

fn calls_of(script: &LoadedScript, seed: u64) -> Vec<Case> {
    let of_ranks = CALLS.iter().find(|(nranks, _)| *nranks == script.script.nranks());
    let (_, calls) = of_ranks.expect("a number of calls for its ranks");
    // The soft GPU takes its time.
    let calls = if world::is_on_device() { calls.div_ceil(4) } else { *calls };
    calls_by_seed(script, seed, calls, world::is_on_device())
}

/// What the seeds pick, for whoever reads the log.
fn tell(seeds: &Range<u64>) {
    let calls: Vec<Case> =
        scripts().iter().flat_map(|script| seeds.clone().flat_map(|seed| calls_of(script, seed))).collect();
    let types: BTreeSet<&str> = calls.iter().map(|case| case.dtype.name()).collect();
    let ops: BTreeSet<&str> = calls.iter().filter_map(|case| Some(case.op?.name())).collect();
    let in_place = calls.iter().filter(|case| case.in_place).count();
    println!(
        "seeds {seeds:?}: {} files, {} calls, {in_place} in place, of {} types and {} operations, segments of {SEGMENT_BYTES} bytes",
        scripts().len(),
        calls.len(),
        types.len(),
        ops.len()
    );
}

/// In a process of its own, for its segments.
#[test]
fn all_scripts_are_right_by_seed_in_several_segments() {
    const SEGMENTS: &str = "STRATA_SEGMENT_BYTES";
    let seeds = seeds();
    if std::env::var(SEGMENTS).as_deref() != Ok(SEGMENT_BYTES) {
        let mut itself = again(module_path!(), "all_scripts_are_right_by_seed_in_several_segments");
        let said = passes(itself.env(SEGMENTS, SEGMENT_BYTES).env("NCCL_DEBUG", "INFO"));
        for script in scripts() {
            let mut served = said.lines().filter(|line| line.contains(&format!("-> {}, ", script.name)));
            assert!(served.any(|line| !line.contains(", 1 segment of ")), "{} in segments\n{said}", script.name);
        }
        tell(&seeds);
        return;
    }
    for (nranks, _) in CALLS {
        let seeds = seeds.clone();
        run(Grid::blocks(&[nranks / 2, nranks / 2]), move |member| by_seed(member, seeds.clone()));
    }
}

fn by_seed(member: &Member, seeds: Range<u64>) {
    let nranks = member.grid.nranks();
    for script in scripts().iter().filter(|script| script.script.nranks() == nranks) {
        for seed in seeds.clone() {
            calls_of(script, seed).iter().for_each(|case| check(member, case, Some(&script.unique_name)));
        }
    }
}
