//! What is final of a collective under way: a C program that uses it and checks itself.

use crate::built::run_with;

#[test]
fn what_is_final_of_a_call_can_be_used_and_overwritten_while_it_goes_on() {
    for algorithm in ["two_trees", "one_tree", "ring", "log", "board"] {
        print!("{algorithm}: {}", run_with("fronts.c", &[], &["follow", algorithm]));
    }
}

#[test]
fn ranges_that_cannot_be_awaited_are_refused_and_those_of_no_call_are_final() {
    run_with("fronts.c", &[], &["refusals"]);
}

#[test]
fn a_wait_for_a_call_that_fails_ends_with_its_error() {
    run_with("fronts.c", &[], &["failure"]);
}
