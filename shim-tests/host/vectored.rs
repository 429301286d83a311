//! Collectives whose blocks differ in size: a C program that checks itself, on seeds.

use crate::built::run_with;

/// Runs calls of these seeds.
fn calls(how: &str, [ranks, nodes, from, to]: [u32; 4], algorithm: &[&str]) {
    let numbers = [ranks, nodes, from, to].map(|number| number.to_string());
    let words = [&[how, &numbers[0], &numbers[1], &numbers[2], &numbers[3]], algorithm].concat();
    print!("{how} {algorithm:?}: {}", run_with("vectored.c", &[], &words));
}

#[test]
fn blocks_of_any_sizes_arrive_in_threads() {
    calls("threads", [1, 1, 0, 60], &[]);
    calls("threads", [3, 1, 100, 220], &[]);
    for algorithm in ["ring", "rd", "log", "board"] {
        calls("threads", [4, 1, 300, 360], &[algorithm]);
    }
}

#[test]
fn blocks_of_any_sizes_arrive_in_processes_of_one_node() {
    calls("processes", [4, 1, 1000, 1120], &[]);
    calls("processes", [5, 1, 1200, 1260], &["log"]);
}

#[test]
fn blocks_of_any_sizes_arrive_between_nodes() {
    calls("processes", [2, 2, 2000, 2060], &[]);
    calls("processes", [5, 2, 2100, 2160], &[]);
    for algorithm in ["two_level(direct,ring)", "two_level_shuffle(ring,log)", "two_level_split(direct,ring)", "direct"]
    {
        calls("processes", [4, 2, 2200, 2240], &[algorithm]);
    }
}

/// Ranks hand on blocks of others, and are told first how long they are; in segments of any length.
#[test]
fn blocks_that_ranks_hand_on_arrive_whatever_their_sizes() {
    for (seed, ranks, nodes) in [(4000, 4, 2), (4100, 5, 2), (4200, 6, 3), (4300, 7, 3), (4400, 3, 3), (4500, 3, 1)] {
        calls("processes", [ranks, nodes, seed, seed + 40], &["two_step"]);
        calls("processes", [ranks, nodes, seed + 50, seed + 70], &["two_step", "512"]);
    }
    calls("threads", [4, 1, 4600, 4640], &["two_step"]);
}

#[test]
fn counts_that_differ_between_ranks_are_told_at_once() {
    for case in 0..10 {
        print!("{}", run_with("vectored.c", &[], &["differ", &case.to_string()]));
    }
    print!("{}", run_with("vectored.c", &[], &["differ", "5", "two_step"]));
    print!("{}", run_with("vectored.c", &[], &["balanced"]));
}

#[test]
fn what_no_vectored_call_can_mean_is_refused_with_its_reason() {
    run_with("vectored.c", &[], &["refusals"]);
}
