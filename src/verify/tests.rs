//! What the verifier accepts, and that each of its ten checks finds what it is for.
#![forbid(unsafe_code)]

use super::samples::*;
use super::*;
use crate::plan::text::tests::any_action;
use crate::plan::{Action, Collective, OperandOrder, Shape, Span, StepRef};
use crate::topo::Grid;
use proptest::prelude::*;
use std::sync::Arc;

fn check(plans: &[Plan]) -> Option<Check> {
    verify(plans, &Options::default()).err().map(|rejection| rejection.check)
}

#[test]
fn every_sample_is_accepted() {
    for (name, plans) in all() {
        for capacity in [1, 2, 8] {
            let verdict = verify(&plans, &Options { capacity, vectored: false });
            assert!(verdict.is_ok(), "{name}: {}", verdict.unwrap_err());
        }
    }
}

#[test]
fn a_report_counts_messages_and_rounds() {
    let report = verify(&ring_all_gather(4, false), &Options::default()).unwrap();
    assert_eq!((report.messages, report.chunks, report.rounds, report.calls), (12, 12, 3, 0));
    let report = verify(&two_level_all_reduce(2, 2), &Options::default()).unwrap();
    assert_eq!((report.messages, report.rounds, report.calls), (0, 3, 6));
}

#[test]
fn waiting_for_ones_own_send_before_receiving_is_a_deadlock() {
    let mut plans = doubling_all_reduce(2, 1, false, false);
    for plan in &mut plans {
        plan.lanes[0].steps[2].deps = vec![StepRef { lane: 0, step: 1 }];
    }
    assert_eq!(check(&plans), Some(Check::Progress));
}

/// Plans with one step replaced.
fn with(mut plans: Vec<Plan>, (rank, lane, step): (usize, usize, usize), change: impl Fn(&mut Action)) -> Vec<Plan> {
    change(&mut plans[rank].lanes[lane].steps[step].action);
    plans
}

fn turn_finish(action: &mut Action) {
    match action {
        Action::Copy { finish, .. } | Action::RecvReduce { finish, .. } | Action::Reduce { finish, .. } => {
            *finish ^= true
        }
        Action::Call(call) => call.finish ^= true,
        _ => {}
    }
}

#[test]
fn each_check_finds_what_it_is_for() {
    let doubling = || doubling_all_reduce(2, 2, false, true);
    let to_own_block = with(direct_all_gather(3), (1, 2, 0), |action| {
        let Action::Recv { dst, .. } = action else { panic!("{action:?}") };
        *dst = vec![Span::output(2, 1)];
    });
    assert_eq!(check(&to_own_block), Some(Check::Race), "two receives write block 2");
    let wrong_block = with(ring_all_gather(3, false), (0, 0, 1), |action| {
        let Action::Send { src, .. } = action else { panic!("{action:?}") };
        *src = vec![Span::input(0, 1)];
    });
    assert_eq!(check(&wrong_block), Some(Check::Provenance));
    let twice = with(doubling_all_reduce(2, 1, false, false), (0, 0, 0), |action| {
        let Action::Copy { src, dst, .. } = action.clone() else { panic!("{action:?}") };
        *action = Action::Reduce { srcs: vec![src.clone(), src], dst, finish: false };
    });
    assert_eq!(check(&twice), Some(Check::ExactlyOnce));
    let no_copy = with(direct_all_gather(3), (1, 0, 0), |action| *action = Action::Nop);
    assert_eq!(check(&no_copy), Some(Check::Completeness));
    let unsent = with(direct_all_gather(3), (1, 1, 0), |action| *action = Action::Nop);
    assert_eq!(check(&unsent), Some(Check::Progress));
    let mut unordered = ring_reduce_scatter(5);
    unordered.iter_mut().flat_map(|plan| &mut plan.lanes[0].steps).for_each(|step| step.deps.clear());
    assert_eq!(check(&unordered), Some(Check::Race));
    let exchanged = with(doubling(), (1, 0, 2), |action| {
        let Action::RecvReduce { order, .. } = action else { panic!("{action:?}") };
        *order = OperandOrder::LocalFirst;
    });
    assert_eq!(check(&exchanged), Some(Check::SameTree));
    let unscaled = with(doubling(), (1, 0, 2), turn_finish);
    assert_eq!(check(&unscaled), Some(Check::Epilogue));
    let scaled_early = with(two_level_all_reduce(2, 2), (1, 0, 0), turn_finish);
    assert_eq!(check(&scaled_early), Some(Check::Calls), "the other members' calls do not finish");
    let unstarted = with(doubling(), (1, 0, 0), |action| {
        let Action::Copy { start, .. } = action else { panic!("{action:?}") };
        *start = false;
    });
    assert_eq!(check(&unstarted), Some(Check::Epilogue));
    let outside = with(ring_all_gather(3, false), (2, 1, 0), |action| {
        let Action::Recv { dst, .. } = action else { panic!("{action:?}") };
        dst[0].len = u32::MAX;
    });
    assert_eq!(check(&outside), Some(Check::Bounds));
}

/// The root sends a scratch slot, waits for an answer of one chunk, and writes the slot again.
fn reuse_after_answer(answer: usize) -> Vec<Plan> {
    let shape = Shape::new(Collective::Broadcast, Arc::new(Grid::flat(2)));
    let [mut root, mut other] = [blank(&shape, 0, 2, 2, 1), blank(&shape, 1, 2, 0, 1)];
    let copy = |src, dst| Action::Copy { src: vec![src], dst: vec![dst], start: false, finish: false };
    let send = |to, src| Action::Send { to: Rank(to), channel: 0, src: vec![src] };
    let recv = |from, dst| Action::Recv { from: Rank(from), channel: 0, dst: vec![dst] };
    for action in [
        copy(Span::input(0, 2), Span::output(0, 2)),
        send(1, Span::input(1, 1)),
        copy(Span::input(0, 1), Span::scratch(0, 1, 0)),
        send(1, Span::scratch(0, 1, 0)),
        recv(1, Span::scratch(1, 1, answer)),
        copy(Span::input(0, 1), Span::scratch(0, 1, 0)),
    ] {
        push(&mut root, 0, action, &[]);
    }
    for action in [recv(0, Span::output(1, 1)), recv(0, Span::output(0, 1)), send(0, Span::output(answer, 1))] {
        push(&mut other, 0, action, &[]);
    }
    vec![root, other]
}

#[test]
fn a_message_that_can_be_empty_orders_nothing_for_chunks_that_are_not() {
    assert_eq!(check(&reuse_after_answer(0)), None);
    assert_eq!(oracle::try_out(&reuse_after_answer(0), 1), Ok(()));
    assert_eq!(check(&reuse_after_answer(1)), Some(Check::Race));
    assert!(oracle::try_out(&reuse_after_answer(1), 1).is_err());
}

/// Of an all-gather: rank 0 sends its block from scratch, receives rank 1's, and writes the slot again, with the block of a rank.
fn reuse_after_block(of: u32) -> Vec<Plan> {
    let shape = Shape::new(Collective::AllGather, Arc::new(Grid::flat(2)));
    let [mut one, mut other] = [blank(&shape, 0, 1, 1, 1), blank(&shape, 1, 1, 0, 1)];
    let copy = |src, dst| Action::Copy { src: vec![src], dst: vec![dst], start: false, finish: false };
    let send = |to, src| Action::Send { to: Rank(to), channel: 0, src: vec![src] };
    let recv = |from, dst| Action::Recv { from: Rank(from), channel: 0, dst: vec![dst] };
    let again = if of == 0 { Span::input(0, 1) } else { Span::output(1, 1) };
    for action in [
        copy(Span::input(0, 1), Span::output(0, 1)),
        copy(Span::input(0, 1), Span::scratch(0, 1, 0)),
        send(1, Span::scratch(0, 1, 0)),
        recv(1, Span::output(1, 1)),
        copy(again, Span::scratch(0, 1, of as usize)),
    ] {
        push(&mut one, 0, action, &[]);
    }
    let own = copy(Span::input(0, 1), Span::output(1, 1));
    for action in [recv(0, Span::output(0, 1)), own, send(0, Span::output(1, 1))] {
        push(&mut other, 0, action, &[]);
    }
    vec![one, other]
}

#[test]
fn a_message_of_another_block_orders_nothing_where_it_can_be_empty() {
    let vectored = |plans: &[Plan]| {
        let options = Options { vectored: true, ..Options::default() };
        verify(plans, &options).err().map(|rejection| rejection.check)
    };
    assert_eq!((check(&reuse_after_block(0)), check(&reuse_after_block(1))), (None, None));
    assert_eq!(vectored(&reuse_after_block(0)), Some(Check::Race), "block 1 may be empty where block 0 is not");
    assert_eq!(vectored(&reuse_after_block(1)), None, "where both are written to the slot, the message has bytes");
    assert_eq!(check(&ring_reduce_scatter(4)), None);
    assert_eq!(vectored(&ring_reduce_scatter(4)), Some(Check::Bounds), "its slots name block 0, whatever they hold");
}

#[test]
fn calls_with_members_in_common_must_be_ordered() {
    let mut plans = two_level_all_reduce(1, 2);
    let gather = plans[0].lanes[0].steps.remove(1);
    plans[0].lanes.push(crate::plan::Lane { steps: vec![gather] });
    assert_eq!(check(&plans), None, "a dependency orders the calls as well as a lane");
    plans[0].lanes[2].steps[0].deps.clear();
    assert_eq!(check(&plans), Some(Check::Calls));
}

#[test]
fn lanes_that_all_wait_for_messages_are_a_deadlock() {
    let mut plans = ring_reduce_scatter(3);
    plans.iter_mut().for_each(|plan| plan.lanes[0].steps.rotate_left(1));
    assert_eq!(check(&plans), Some(Check::Progress));
}

#[test]
fn a_ring_of_sends_needs_a_capacity() {
    let plans = ring_all_reduce(3);
    let verdict = verify(&plans, &Options { capacity: 0, vectored: false });
    assert_eq!(verdict.unwrap_err().check, Check::Progress);
    assert!(
        verify(&ring_all_gather(3, false), &Options { capacity: 0, vectored: false }).is_ok(),
        "receives have a lane of their own"
    );
}

#[test]
fn every_sample_works_when_tried_out() {
    for (name, plans) in all() {
        if let Err(text) = oracle::try_out(&plans, 1) {
            panic!("{name}: {text}");
        }
    }
}

#[test]
fn every_mutant_that_does_not_work_is_rejected() {
    let mut total = mutate::MutantOutcome::default();
    for (name, plans) in all() {
        let outcome = mutate::kill(&plans, &Options::default());
        assert_eq!(outcome.missed, [], "{name}");
        assert_eq!(outcome.killed + outcome.equivalent, outcome.mutants);
        total.mutants += outcome.mutants;
        total.killed += outcome.killed;
    }
    println!("{} mutants, {} killed, all others equivalent", total.mutants, total.killed);
    assert!(total.killed * 4 > total.mutants * 3, "most mutants do not work: {total:?}");
}

/// Mutants of mutants that are still accepted: several changes can be wrong where none is alone.
#[test]
fn every_mutant_of_an_equivalent_mutant_that_does_not_work_is_rejected() {
    let mut seen = 0;
    for (name, plans) in all().into_iter().filter(|(_, plans)| plans.len() <= 3) {
        let accepted = mutate::mutants(&plans).filter(|(_, mutant)| check(mutant).is_none());
        for (first, mutant) in accepted.step_by(7) {
            for (second, plans) in mutate::mutants(&mutant).step_by(5) {
                seen += 1;
                if check(&plans).is_none() {
                    let tried = oracle::try_out(&plans, 1);
                    assert!(tried.is_ok(), "{name}, {first}, {second}: {}", tried.unwrap_err());
                }
            }
        }
    }
    assert!(seen > 1000, "{seen}");
}

/// The other direction: the verifier is stricter than what happens to work only where a rule says so.
#[test]
fn what_is_rejected_although_it_works_breaks_a_rule() {
    let rules = ["there is no root", "has no epilogue", "a destination overlaps a source"];
    for (family, plans) in all() {
        for (name, mutant) in mutate::mutants(&plans).step_by(3) {
            let Err(rejection) = verify(&mutant, &Options::default()) else { continue };
            let strict = !rules.iter().any(|rule| rejection.text.contains(rule));
            assert!(!strict || oracle::try_out(&mutant, 1).is_err(), "{family}, {name}: {rejection}");
        }
    }
}

proptest! {
    #[test]
    fn any_plans_get_a_verdict(
        sample in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_action()), 1..4),
        capacity in 0usize..3
    ) {
        let mut samples = all();
        let sample = sample.index(samples.len());
        let plans = &mut samples[sample].1;
        for (at, action) in changes {
            let mut steps: Vec<_> =
                plans.iter_mut().flat_map(|plan| &mut plan.lanes).flat_map(|lane| &mut lane.steps).collect();
            if !steps.is_empty() {
                let at = at.index(steps.len());
                steps[at].action = action;
            }
        }
        if verify(plans, &Options { capacity, vectored: false }).is_ok() && capacity > 0 {
            prop_assert_eq!(oracle::try_out(plans, capacity), Ok(()));
        }
    }
}

#[test]
fn ranks_may_call_in_place_or_not_each_on_its_own() {
    let mut plans = ring_all_gather(3, false);
    plans[1] = ring_all_gather(3, true).swap_remove(1);
    assert_eq!(check(&plans), None);
    assert_eq!(oracle::try_out(&plans, 1), Ok(()));
}

#[test]
fn nonsense_gets_a_verdict() {
    assert_eq!(check(&[]), Some(Check::Bounds));
    let mut plans = ring_all_gather(3, false);
    plans[1].chunks_per_block = 0;
    assert_eq!(check(&plans), Some(Check::Bounds));
    plans.iter_mut().for_each(|plan| plan.chunks_per_block = u32::MAX);
    assert_eq!(check(&plans), Some(Check::Bounds));
    plans.iter_mut().for_each(|plan| plan.lanes.clear());
    assert_eq!(check(&plans), Some(Check::Bounds));
    plans.iter_mut().for_each(|plan| plan.chunks_per_block = 1);
    assert_eq!(check(&plans), Some(Check::Completeness));
    let mut plans = ring_reduce_scatter(3);
    plans.iter_mut().for_each(|plan| plan.scratch_chunks = u32::MAX);
    assert_eq!(check(&plans), None, "scratch that is declared and not used costs nothing");
    plans[0].lanes[0].steps[0].deps = vec![StepRef { lane: u32::MAX, step: u32::MAX }];
    assert_eq!(check(&plans), Some(Check::Bounds));
}

/// Prints how long verifying takes: `cargo test --release verifying_at_scale -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn verifying_at_scale_takes_seconds() {
    type Family = (&'static str, fn() -> Vec<Plan>);
    let families: [Family; 9] = [
        ("two-level all-reduce 128x8", || two_level_all_reduce(128, 8)),
        ("doubling all-reduce 1024, 1 chunk", || doubling_all_reduce(1024, 1, false, true)),
        ("doubling all-reduce 1024, 64 chunks", || doubling_all_reduce(1024, 64, false, true)),
        ("ring all-gather 1024", || ring_all_gather(1024, false)),
        ("ring reduce-scatter 1024", || ring_reduce_scatter(1024)),
        ("ring all-reduce 1024", || ring_all_reduce(1024)),
        ("ring all-reduce 256", || ring_all_reduce(256)),
        ("ring all-reduce 16", || ring_all_reduce(16)),
        ("doubling all-reduce 16", || doubling_all_reduce(16, 1, false, false)),
    ];
    for (name, make) in families {
        let plans = make();
        let start = std::time::Instant::now();
        let report = verify(&plans, &Options::default()).unwrap();
        println!("{name}: {:?}, {report:?}", start.elapsed());
    }
}
