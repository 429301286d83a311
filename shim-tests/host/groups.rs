//! Groups of collectives, whose calls become fewer ones: a C program that checks itself, on seeds.

use crate::built::run_with;
use crate::grouped::Grouped;
use crate::world::run;
use strata::topo::Grid;

/// Runs groups of these seeds.
fn groups(how: &str, numbers: [u32; 4]) {
    let numbers = numbers.map(|number| number.to_string());
    let words = [how, &numbers[0], &numbers[1], &numbers[2], &numbers[3]];
    print!("{how}: {}", run_with("groups.c", &[], &words));
}

#[test]
fn groups_of_any_calls_have_the_results_of_each_in_threads() {
    groups("threads", [2, 1, 0, 30]);
    groups("threads", [5, 1, 100, 130]);
}

#[test]
fn groups_of_any_calls_have_the_results_of_each_in_processes_of_one_node() {
    groups("processes", [3, 1, 1000, 1030]);
    groups("processes", [4, 1, 1100, 1130]);
}

#[test]
fn groups_of_any_calls_have_the_results_of_each_between_nodes() {
    groups("processes", [4, 2, 2000, 2040]);
    groups("processes", [5, 3, 2100, 2140]);
    groups("processes", [6, 6, 2200, 2220]);
}

/// Each rank records the calls of different communicators in an order of its own, and has them on one stream or on several; also where calls
/// go on without lost ranks, by another way to the streams.
#[test]
fn calls_of_several_communicators_in_one_group_wait_for_no_order_among_these() {
    for lost in ["fail", "continue"] {
        for [ranks, nodes, from, to] in [["2", "1", "1", "60"], ["3", "2", "100", "160"], ["5", "5", "200", "230"]] {
            print!("{lost}: {}", run_with("several.c", &[], &[lost, ranks, nodes, from, to]));
        }
    }
}

/// On one node a communicator has both, and needs no MPI.
#[test]
fn groups_of_any_calls_that_name_carriers_have_the_results_of_each() {
    groups("carriers", [3, 1, 4000, 4030]);
}

#[test]
fn calls_in_windows_have_the_results_of_each() {
    groups("windows-threads", [2, 1, 5000, 5030]);
    groups("windows-threads", [5, 1, 5100, 5120]);
    groups("windows", [3, 1, 5200, 5230]);
    groups("windows", [4, 2, 5300, 5340]);
    groups("windows", [6, 6, 5400, 5420]);
}

/// What is held back, what closes windows, and what is refused in them.
#[test]
fn windows_hold_calls_back_until_bytes_time_or_the_end_close_them() {
    let ends = ["revoked", "abort", "shrunk"];
    let cases = ["bytes", "time", "streams", "one-thread", "refused", "differ-time", "differ-bytes"];
    for case in cases.into_iter().chain(ends) {
        print!("{}", run_with("windows.c", &[], &[case]));
    }
}

/// In host memory, and on the double of each driver.
#[test]
fn windows_that_time_closes_leave_other_communicators_calls_in_order() {
    print!("{}", run_with("windows_beside.c", &[], &[]));
    crate::survivors::on_gpus("windows_beside.c", &[]);
}

#[test]
fn calls_of_a_group_that_depend_on_each_other_run_in_order() {
    run_with("groups.c", &[], &["chain"]);
    run_with("groups.c", &[], &["rooted"]);
}

#[test]
fn groups_that_differ_between_ranks_are_told() {
    for case in 0..4 {
        print!("{}", run_with("groups.c", &[], &["differ", &case.to_string()]));
    }
}

/// On the device that `SOFT_DEVICE` names, if it does.
#[test]
fn groups_on_any_device_and_on_any_streams_have_the_results_of_each() {
    for (at, sizes) in [&[2][..], &[2, 2], &[1, 3], &[1, 1, 1, 1, 1]].into_iter().enumerate() {
        run(Grid::blocks(sizes), move |member| {
            let mut groups = Grouped::new(&member.comm, &[None]);
            let first = 3000 + 100 * at as u64;
            (first..first + 30).for_each(|seed| groups.run(seed));
        });
    }
}
