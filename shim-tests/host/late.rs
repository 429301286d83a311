//! Ranks that measure their links; ranks that are late, and the others that do not wait for them. A C program makes processes and lets some come late by a seed; it
//! compares every element, and the bits of results between ranks.

use crate::built::run_with;
use crate::vendor::{NCCL, RCCL};

#[test]
fn results_are_complete_and_the_same_on_all_ranks_whoever_is_late() {
    print!("{}", run_with("late.c", &["-O2", "-lm"], &["1", "8"]));
}

/// On the double of each driver a rank's stream is late, or its program.
#[test]
fn results_on_gpus_are_complete_and_the_same_on_all_ranks_whoever_is_late() {
    crate::survivors::on_gpus("late.c", &["1", "2"]);
}

/// In front of the double of each vendor's library, which reduces inside the nodes.
#[test]
fn results_in_front_of_a_vendor_s_library_are_complete_whoever_is_late() {
    crate::survivors::on_gpus_with("late.c", &["1", "4"], |driver| {
        let double = if driver == "hip" { RCCL } else { NCCL };
        vec![
            ("STRATA_NCCL_LIB", double.library()),
            ("LATE_IN_FRONT", "1".into()),
            ("STRATA_ALLREDUCE_ALGO", "two_level".into()),
        ]
    });
}

/// On the host and on the double of each driver.
#[test]
fn what_late_ranks_have_is_left_out_where_a_program_asks_for_it() {
    print!("{}", run_with("late_dropped.c", &["-O2", "-lm"], &[]));
    crate::survivors::on_gpus("late_dropped.c", &[]);
}

#[test]
fn links_are_measured_where_a_program_asks_for_it() {
    print!("{}", run_with("profile.c", &[], &[]));
}
