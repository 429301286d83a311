//! Collectives of blocks of different sizes on memory and streams of GPUs, on soft GPUs: of Strata alone, and in front of a
//! vendor's library, whose functions do them but for what Strata's own transports carry between nodes.
//!
//! The program (`vendor/programs/vectors.c`) waits for nothing between copies in, collectives and copies out, so a missing
//! synchronisation anywhere shows as a wrong number or a trap.

use crate::built::{checked, library};
use crate::soft;
use crate::vendor::{Double, Recording, Way, NCCL, OLD_NCCL, OLD_RCCL, RCCL};
use std::path::{Path, PathBuf};
use std::process::Command;

fn driver(double: Double) -> PathBuf {
    match double.rccl {
        true => soft::hip_dir(),
        false => soft::cuda_dir(),
    }
}

/// The program with Strata loaded before the double.
fn program(double: Double, arguments: &[&str]) -> Command {
    let driver = driver(double);
    let mut command = Command::new(double.gpu_program("vectors", &driver));
    let path = |dirs: &[&Path]| std::env::join_paths(dirs).unwrap();
    command.args(arguments).env("LD_LIBRARY_PATH", path(&[&double.dir(), &driver])).env("LD_PRELOAD", library());
    command
}

/// With Strata alone, whose ranks all use its transports.
fn alone(double: Double, arguments: &[&str]) -> Command {
    let mut command = program(double, arguments);
    command.env("STRATA_NCCL_LIB", "none");
    command
}

/// With Strata in front of the double; `inter` is what carries messages between nodes.
fn in_front(double: Double, inter: &str, arguments: &[&str]) -> Command {
    let mut command = program(double, arguments);
    command.env("STRATA_NCCL_LIB", double.library()).env("STRATA_INTER", inter);
    command
}

#[test]
fn on_gpus_of_strata_alone_blocks_of_any_sizes_arrive() {
    for double in [NCCL, RCCL] {
        for (grid, seed) in [("4x1", "1"), ("1x3", "2"), ("2x2", "3"), ("3+1", "4"), ("1x1", "5"), ("2+1+2", "6")] {
            checked(&mut alone(double, &[grid, seed, "40"]));
        }
    }
}

/// Blocks of several parts, where each rank knows its own sizes only, and slots that have no room for them all.
#[test]
fn on_gpus_of_strata_alone_long_blocks_go_in_parts() {
    for (double, pinned) in [(NCCL, "16777216"), (RCCL, "1048576")] {
        checked(alone(double, &["2x2", "7", "24", "12000000"]).env("STRATA_PINNED_BYTES", pinned));
    }
}

#[test]
fn on_gpus_of_strata_alone_each_algorithm_takes_blocks_of_any_sizes() {
    for (index, algorithm) in
        ["ring", "log", "direct", "two_level(direct,ring)", "two_level_split"].into_iter().enumerate()
    {
        let double = [NCCL, RCCL][index % 2];
        let mut command = alone(double, &["2x2", &(20 + index).to_string(), "40"]);
        command.env("STRATA_ALLGATHER_ALGO", algorithm).env("STRATA_REDUCESCATTER_ALGO", algorithm);
        checked(command.env("STRATA_SEGMENT_BYTES", "1024").env("STRATA_WINDOW", "3"));
    }
}

/// Ranks hand on blocks whose sizes they are told in host memory; named, or by a bound.
#[test]
fn on_gpus_of_strata_alone_blocks_are_handed_on_in_two_steps() {
    let (named, bounded) = (("STRATA_ALLTOALL_ALGO", "two_step"), ("STRATA_ALLTOALLV_BOUND_BYTES", "4096"));
    for (double, (name, value), arguments) in [
        (NCCL, named, &["2x2", "30", "24"][..]),
        (RCCL, bounded, &["3+1", "31", "24"]),
        (NCCL, bounded, &["2x3", "32", "24"]),
        (RCCL, named, &["2x2", "33", "24", "12000000"]),
    ] {
        let mut command = alone(double, arguments);
        let said = said(command.env(name, value).env("NCCL_DEBUG", "INFO"));
        assert!(said.contains("-> two_step"), "{command:?}\n{said}");
    }
}

#[test]
fn in_front_of_a_vendor_s_library_blocks_of_any_sizes_arrive() {
    for double in [NCCL, RCCL] {
        for (grid, seed) in [("1x3", "31"), ("2x2", "32"), ("3+1", "33"), ("1x1", "34"), ("4x1", "35")] {
            checked(&mut in_front(double, "auto", &[grid, seed, "40"]));
        }
    }
}

#[test]
fn with_strata_switched_off_the_vendor_s_library_does_them_too() {
    for double in [NCCL, RCCL] {
        checked(in_front(double, "auto", &["2x2", "41", "40"]).env("STRATA_DISABLE", "1"));
    }
}

/// All-gathers and reduce-scatters whose rails are Strata's own and whose nodes are the vendor's.
#[test]
fn rails_of_strata_s_own_carry_blocks_of_any_sizes() {
    for double in [NCCL, RCCL] {
        for (grid, seed, gathers, rails) in [
            ("2x2", "51", "two_level", "log"),
            ("2x3", "52", "two_level", "ring"),
            ("3+1", "53", "two_level_split", "ring"),
            ("rr2x2", "54", "two_level_split", "log"),
        ] {
            let mut command = in_front(double, "tcp", &[grid, seed, "60"]);
            command.env("STRATA_ALLGATHER_ALGO", format!("{gathers}(direct,{rails})"));
            command.env("STRATA_REDUCESCATTER_ALGO", format!("two_level(direct,{rails})"));
            command.env("STRATA_SEGMENT_BYTES", "1024").env("STRATA_WINDOW", "2").env("NCCL_DEBUG", "INFO");
            let said = said(&mut command);
            for (collective, algorithm) in [("all_gather", gathers), ("reduce_scatter", "two_level")] {
                let chosen = format!("-> {algorithm}(vendor,{rails})");
                let carried = |line: &str| line.contains(&format!(" {collective}: ")) && line.contains(&chosen);
                assert!(said.lines().any(carried), "no {collective} was Strata's: {command:?}\n{said}");
            }
        }
    }
}

/// A rank whose blocks happen to lie as the vendor wants them asks for as much as one whose blocks do not: rails of ranks that are
/// dealt out to nodes have their blocks side by side.
#[test]
fn on_rails_of_strata_s_own_each_rank_may_have_its_own_places() {
    let mut command = in_front(NCCL, "tcp", &["rr2x3", "2", "160"]);
    command.env("STRATA_ALLGATHER_ALGO", "two_level(direct,log)");
    checked(command.env("STRATA_REDUCESCATTER_ALGO", "two_level(direct,log)"));
}

fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    said
}

/// What notices a missing synchronisation: with any one of those that Strata uses left out, results are wrong.
#[test]
fn a_synchronisation_that_is_left_out_is_noticed() {
    for (double, broken) in [
        (NCCL, ["cuEventQuery", "cuEventRecord", "cuStreamWaitValue32_v2"]),
        (RCCL, ["hipEventQuery", "hipEventRecord", "hipStreamWaitValue32"]),
    ] {
        for call in broken {
            let output = alone(double, &["2x2", "61", "24"]).env("SOFTGPU_BREAK", call).output().unwrap();
            assert!(!output.status.success(), "{call} may be left out");
        }
    }
}

/// In front of a vendor's library a call is one group of the vendor's, which joins the program's own, on the program's stream.
#[test]
fn a_call_in_front_of_a_vendor_s_library_is_one_group_of_its_functions() {
    let recording = Recording::new();
    checked(in_front(NCCL, "auto", &["1x2", "71", "64"]).env("DOUBLE_RECORD", recording.prefix()));
    let processes = recording.processes();
    assert_eq!(processes.len(), 2);
    for lines in processes {
        let launches: Vec<&String> = lines.iter().filter(|line| line.starts_with("launch")).collect();
        let has = |names: &[&str]| launches.iter().any(|line| names.iter().all(|name| line.contains(name)));
        assert!(has(&["ncclBroadcast"]) && has(&["ncclReduce "]) && has(&["ncclSend", "ncclRecv"]), "{lines:#?}");
        let two = |name: &str| launches.iter().any(|line| line.matches(name).count() > 1);
        assert!(two("ncclBroadcast") && two("ncclReduce "), "{lines:#?}");
        let is_part = |line: &str| {
            ["ncclBroadcast", "ncclReduce ", "ncclSend", "ncclRecv"].iter().any(|name| line.starts_with(name))
        };
        assert!(!lines.iter().any(|line| is_part(line) && line.contains("count=0 ")), "{lines:#?}");
    }
}

/// A program on the double in host memory, with Strata in front of it.
fn over(double: Double, case: &str, grid: &str) -> Command {
    let mut command = double.command("vectors_over", Way::Linked, &[case, grid]);
    command.env("LD_PRELOAD", library()).env("STRATA_NCCL_LIB", double.library());
    command
}

#[test]
fn on_a_vendor_s_communicator_what_no_call_can_mean_is_refused_and_its_group_with_it() {
    for (double, grid) in [(NCCL, "1x2"), (RCCL, "2x2"), (OLD_NCCL, "1x3")] {
        checked(&mut over(double, "refused", grid));
    }
}

#[test]
fn on_a_vendor_s_communicator_calls_need_not_wait() {
    for grid in ["1x2", "2x2", "1x1"] {
        checked(over(NCCL, "nonblocking", grid).env("DOUBLE_DELAY_MS", "60"));
    }
}

#[test]
fn on_a_vendor_s_communicator_nothing_is_done_before_the_outermost_group_ends() {
    for double in [NCCL, OLD_NCCL, RCCL, OLD_RCCL] {
        checked(&mut over(double, "nested", "2x2"));
    }
}
