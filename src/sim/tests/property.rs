//! What the verifier accepts the executor runs right: algorithms of all kinds over random shapes, whole and damaged.
#![forbid(unsafe_code)]

use super::*;
use crate::algorithms;
use crate::plan::{Action, Spans};
use crate::topo::links::NodeLinks;
use crate::verify;
use std::sync::mpsc;
use std::time::Duration;

/// Cases of each test.
const CASES: u64 = 600;
/// How long the verifier may take over plans that take it a millisecond.
const VERDICT_LIMIT: Duration = Duration::from_secs(20);

fn grid(random: &mut Random) -> Grid {
    let nranks = 1 + random.below(12) as usize;
    match random.below(5) {
        0 => Grid::flat(nranks),
        4 => linked(random),
        1 => Grid::round_robin(nranks, 1 + random.below(nranks as u64) as usize),
        2 => Grid::blocks(&vec![1 + random.below(4) as usize; 1 + random.below(4) as usize]),
        _ => {
            let labels: Vec<u64> = (0..nranks).map(|_| random.below(4)).collect();
            Grid::from_labels(&labels)
        }
    }
}

/// Nodes whose ranks are linked by chance: along a path, and some others.
fn linked(random: &mut Random) -> Grid {
    let nranks = 2 + random.below(7) as usize;
    let mut links = Vec::new();
    for (one, other) in (0..nranks).flat_map(|one| (one + 1..nranks).map(move |other| (one, other))) {
        if other == one + 1 || random.one_in(3) {
            links.push(([one, other], 1 + random.below(2) as usize));
        }
    }
    let links = Arc::new(NodeLinks::new(nranks, &links).unwrap());
    Grid::blocks(&vec![nranks; 1 + random.below(2) as usize]).with_links(&links)
}

fn shape(random: &mut Random) -> Shape {
    let collective = random.pick(&Collective::ALL);
    let mut shape = Shape::new(collective, Arc::new(grid(random)));
    if collective.has_root() {
        shape.root = Rank::from_index(random.below(shape.nranks() as u64) as usize);
    }
    shape.in_place = collective != Collective::AllToAll && random.one_in(2);
    shape.prologue = collective.reduces() && random.one_in(3);
    shape
}

/// The plans of a random algorithm for a random shape, its calls replaced by plans or left to the world.
pub(super) fn case(random: &mut Random) -> Option<(Shape, String, Vec<Plan>)> {
    let shape = shape(random);
    let mut choices: Vec<_> = algorithms::choices(shape.collective, &shape.grid);
    choices.retain(|choice| algorithms::supports(choice, &shape));
    if choices.is_empty() {
        return None;
    }
    let choice = &choices[random.below(choices.len() as u64) as usize];
    let complete = ["log", "tree"].iter().all(|name| algorithms::by_name(name).is_some());
    let build = if random.one_in(3) || !complete { algorithms::build_with_calls } else { algorithms::build };
    let plans: Result<Vec<Plan>> =
        (0..shape.nranks()).map(|rank| build(choice, &shape, Rank::from_index(rank))).collect();
    Some((shape, choice.to_string(), plans.ok()?))
}

/// The verifier's verdict at capacity 1. A verifier that comes to none fails the test instead of holding it up.
pub(super) fn accepted(plans: &[Plan], vectored: bool, again: &str) -> bool {
    let (plans, (tell, verdict)) = (plans.to_vec(), mpsc::channel());
    std::thread::spawn(move || tell.send(verify::verify(&plans, &verify::Options { capacity: 1, vectored }).is_ok()));
    verdict.recv_timeout(VERDICT_LIMIT).unwrap_or_else(|_| panic!("the verifier comes to no verdict: {again}"))
}

/// Damages one step of one rank.
fn damage(plans: &mut [Plan], random: &mut Random) -> Option<String> {
    let rank = random.below(plans.len() as u64) as usize;
    let nranks = plans.len() as u32;
    let plan = &mut plans[rank];
    let lane = random.below(plan.lanes.len().max(1) as u64) as usize;
    let steps = &mut plan.lanes.get_mut(lane)?.steps;
    let at = random.below(steps.len().max(1) as u64) as usize;
    let what = random.below(7);
    if what == 1 && at + 1 < steps.len() {
        steps.swap(at, at + 1);
        return Some(format!("steps {at} and {} of rank {rank} lane {lane} exchanged", at + 1));
    }
    let step = steps.get_mut(at)?;
    match (what, &mut step.action) {
        (0, _) if !step.deps.is_empty() => drop(step.deps.pop()),
        (2, action) => *action = Action::Nop,
        (3, Action::Send { to: peer, .. } | Action::Recv { from: peer, .. }) => peer.0 = (peer.0 + 1) % nranks,
        (4, Action::Send { channel, .. } | Action::Recv { channel, .. }) => *channel += 1,
        (5, Action::RecvReduce { finish, .. } | Action::Reduce { finish, .. }) => *finish = !*finish,
        (5, Action::Copy { start, .. }) => *start = !*start,
        (6, Action::Send { src: list, .. } | Action::Recv { dst: list, .. } | Action::RecvReduce { dst: list, .. })
        | (6, Action::Copy { dst: list, .. } | Action::Reduce { dst: list, .. }) => shift(list, random)?,
        _ => return None,
    }
    Some(format!("damage {what} to rank {rank} lane {lane} step {at}"))
}

fn shift(list: &mut Spans, random: &mut Random) -> Option<()> {
    let nspans = list.len() as u64;
    let span = list.get_mut(random.below(nspans.max(1)) as usize)?;
    match random.one_in(2) {
        true => span.start += 1,
        false => span.start = span.start.checked_sub(1)?,
    }
    Some(())
}

#[test]
fn what_the_verifier_accepts_the_executor_runs_right() {
    let mut sim = Sim::new(0, SimOptions::default());
    let mut ran = 0;
    for seed in seeds(CASES) {
        let Some((shape, name, plans)) = case(&mut Random::new(seed)) else { continue };
        let again = format!("SIM_SEED={seed}: {name}, {shape:?}");
        if !accepted(&plans, false, &again) {
            continue;
        }
        let programs = compile(plans).unwrap_or_else(|error| panic!("{again}: {error}"));
        if let Err(text) = run_seed(&mut sim, &shape, &programs, seed) {
            panic!("{again}: {text}");
        }
        ran += 1;
    }
    assert!(ran > CASES / 2 || std::env::var("SIM_SEED").is_ok(), "only {ran} of {CASES} were accepted");
}

/// Plans that come to no end are left out here: whether the verifier sees that is for its own tests.
#[test]
fn a_damaged_plan_that_the_verifier_accepts_runs_right_all_the_same() {
    let mut sim = Sim::new(0, SimOptions::default());
    let (mut accepted_damaged, mut refused, mut found) = (0, 0, 0);
    for seed in seeds(10 * CASES) {
        let mut random = Random::new(seed ^ 0xdada);
        let Some((shape, name, mut plans)) = case(&mut random) else { continue };
        let Some(damage) = damage(&mut plans, &mut random) else { continue };
        let Ok(programs) = compile(plans.clone()) else { continue };
        let again = format!("SIM_SEED={seed}: {damage}: {name}, {shape:?}");
        let wrong = (0..4).find_map(|more| run_seed(&mut sim, &shape, &programs, seed + more * 1_000_000).err());
        let ends = |text: &String| !text.contains("for ever") && !text.contains("no progress");
        if !wrong.as_ref().is_none_or(ends) {
            continue;
        }
        let sound = accepted(&plans, false, &again);
        if let (true, Some(text)) = (sound, &wrong) {
            panic!("{again}: {text}");
        }
        accepted_damaged += u64::from(sound);
        refused += u64::from(!sound);
        found += u64::from(!sound && wrong.is_some());
    }
    println!("{accepted_damaged} accepted, {refused} refused, of these {found} went wrong in four runs");
    assert!(
        found * 2 > refused || std::env::var("SIM_SEED").is_ok(),
        "the executor notices too few of the refused plans: {found} of {refused}"
    );
}

#[test]
fn all_ranks_have_the_same_bits_after_an_all_reduce_of_rough_floats() {
    let mut sim = Sim::new(0, SimOptions::default());
    for seed in seeds(CASES / 2) {
        let mut random = Random::new(seed ^ 0xf1);
        let Some((shape, name, plans)) = case(&mut random) else { continue };
        if shape.collective != Collective::AllReduce || !accepted(&plans, false, &name) {
            continue;
        }
        let count = 1 + random.below(50) as usize;
        let element = |random: &mut Random| (random.next_u64() as f64 / 1e7).to_le_bytes();
        let inputs: Vec<Vec<u8>> =
            plans.iter().map(|_| (0..count).flat_map(|_| element(&mut random)).collect()).collect();
        sim.reset(seed, SimOptions::default());
        let job =
            Job { count, blocks: None, dtype: DataType::F64, segment_bytes: 128, inputs: Some(&inputs), weights: None };
        let report = sim.run(&compile(plans).unwrap(), &job).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(report.outputs.iter().all(|output| *output == report.outputs[0]), "SIM_SEED={seed} {name} {shape:?}");
    }
}
