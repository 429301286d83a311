//! What the verifier accepts, and that each of its nine checks finds what it is for.
#![forbid(unsafe_code)]

use super::samples::*;
use super::*;
use crate::plan::StepRef;

fn check(plans: &[Plan]) -> Option<Check> {
    verify(plans, &Options::default()).err().map(|rejection| rejection.check)
}

#[test]
fn every_sample_is_accepted() {
    for (name, plans) in all() {
        for capacity in [1, 2, 8] {
            let verdict = verify(&plans, &Options { capacity });
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

#[test]
fn a_ring_of_sends_needs_a_capacity() {
    let plans = ring_all_reduce(3);
    let verdict = verify(&plans, &Options { capacity: 0 });
    assert_eq!(verdict.unwrap_err().check, Check::Progress);
    assert!(verify(&ring_all_gather(3, false), &Options { capacity: 0 }).is_ok(), "receives have a lane of their own");
}

#[test]
fn every_sample_works_when_tried_out() {
    for (name, plans) in all() {
        if let Err(text) = oracle::try_out(&plans, 1) {
            panic!("{name}: {text}");
        }
    }
}
