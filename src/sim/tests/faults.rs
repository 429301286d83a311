//! Ranks that die, freeze or fail in the middle.
#![forbid(unsafe_code)]

use super::*;

const LIMIT_NS: u64 = 2_000_000;
/// No healthy run here takes longer.
const HEALTHY_NS: u64 = 1_500_000;

fn ring(nranks: usize) -> Vec<Arc<Program>> {
    compile(plans::all(&plans::flat(Collective::AllGather, nranks), plans::ring_all_gather)).unwrap()
}

fn run(seed: u64, fault: InjectedFault, programs: &[Arc<Program>]) -> std::result::Result<SimReport, Box<SimFailure>> {
    let options = SimOptions { window: 2, capacity: 1, limit_ns: LIMIT_NS, overwrites: false, faults: vec![fault] };
    let job = Job { count: 64, blocks: None, dtype: DataType::I32, segment_bytes: 128, inputs: None, weights: None };
    Sim::new(seed, options).run(programs, &job)
}

/// Every other rank of a ring of 5 is done or times out soon, and whoever waits for rank 2 itself says so.
fn assert_everybody_ends(failure: &SimFailure, at_ns: u64) -> usize {
    let mut named = 0;
    for (rank, outcome) in failure.outcomes.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        match outcome {
            RankOutcome::Done { .. } => {}
            RankOutcome::Failed { at_ns: end, error: Error::Timeout(text) } => {
                assert!(*end <= at_ns + HEALTHY_NS + LIMIT_NS, "rank {rank} too late: {failure}");
                let ranks = text.split("waiting for ranks: ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
                let names_it = ranks.split(", ").any(|name| name == "2");
                assert!(text.starts_with("no progress for"), "{text}");
                // Rank 3 receives from nobody else.
                assert!(names_it || rank != 3, "{failure}");
                assert!(!names_it || rank == 1 || rank == 3, "{failure}");
                named += usize::from(names_it);
            }
            other => panic!("rank {rank} {other}: {failure}"),
        }
    }
    named
}

#[test]
fn a_rank_that_stops_for_ever_ends_all_others_in_time_and_is_named() {
    let programs = ring(5);
    let (mut hit, mut named) = (0, 0);
    for seed in seeds(SEEDS) {
        let at_ns = Random::new(seed ^ 99).below(200_000);
        let fault = match seed % 3 {
            0 => InjectedFault::Die { rank: Rank(2), at_ns },
            1 => InjectedFault::Freeze { rank: Rank(2), at_ns, for_ns: u64::MAX },
            _ => InjectedFault::Fail { rank: Rank(2), at_ns },
        };
        let Err(failure) = run(seed, fault, &programs) else { continue };
        let names = assert_everybody_ends(&failure, at_ns);
        let failed = failure.outcomes.iter().filter(|outcome| matches!(outcome, RankOutcome::Failed { .. })).count();
        assert!(names > 0 || failed <= 1, "nobody names the missing rank: {failure}");
        match &failure.outcomes[2] {
            RankOutcome::Gone { at_ns: gone } => assert_eq!(*gone, at_ns),
            RankOutcome::Failed { error, .. } => assert!(error.text().starts_with("the fault planned for"), "{error}"),
            other => panic!("rank 2 {other}"),
        }
        hit += 1;
        named += names;
    }
    assert!(std::env::var("SIM_SEED").is_ok() || (hit > 100 && named > 100), "{hit} hit, {named} named");
}

#[test]
fn a_rank_that_freezes_for_less_than_the_limit_harms_nobody() {
    let programs = ring(5);
    for seed in seeds(SEEDS) {
        let at_ns = Random::new(seed).below(100_000);
        let fault = InjectedFault::Freeze { rank: Rank(2), at_ns, for_ns: LIMIT_NS / 2 };
        let report = run(seed, fault, &programs).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(report.last_ns() < HEALTHY_NS + LIMIT_NS);
    }
}

#[test]
fn a_member_that_never_comes_to_a_call_is_named() {
    let shape = Shape::new(Collective::AllReduce, Arc::new(Grid::blocks(&[2, 2])));
    let programs = compile(plans::all(&shape, plans::two_level_all_reduce)).unwrap();
    let failure = run(1, InjectedFault::Die { rank: Rank(3), at_ns: 0 }, &programs).unwrap_err();
    for (rank, outcome) in failure.outcomes.iter().enumerate().take(3) {
        let RankOutcome::Failed { error: Error::Timeout(text), .. } = outcome else { panic!("{failure}") };
        // Ranks 0 and 2 meet on one rail, 1 and 3 on the other; rank 2 shares a node with rank 3.
        let awaited = ["2", "3", "3"][rank];
        assert!(text.ends_with(&format!("waiting for ranks: {awaited}")), "rank {rank}: {text}");
    }
}
