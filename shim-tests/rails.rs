//! Collectives of a program on GPUs whose rails are Strata's own and whose nodes are the vendor's, on soft GPUs.
//!
//! The program (`vendor/programs/rails.c`) puts copies in, collectives and copies out on streams and waits for nothing in
//! between, so a missing synchronisation anywhere shows as a wrong number or a trap.

mod built;
mod soft;
mod vendor;

use built::{checked, library};
use std::path::{Path, PathBuf};
use std::process::Command;
use vendor::{Double, NCCL, RCCL};

/// The collectives that Strata has, even where they are small.
const TWO_LEVEL: [(&str, &str); 3] = [
    ("STRATA_ALLGATHER_ALGO", "two_level"),
    ("STRATA_REDUCESCATTER_ALGO", "two_level"),
    ("STRATA_ALLREDUCE_ALGO", "two_level"),
];

fn driver(double: Double) -> PathBuf {
    match double.rccl {
        true => soft::hip_dir(),
        false => soft::cuda_dir(),
    }
}

/// The program on the double alone.
fn alone(double: Double, arguments: &[&str]) -> Command {
    let driver = driver(double);
    let mut command = Command::new(double.gpu_program("rails", &driver));
    let path = |dirs: &[&Path]| std::env::join_paths(dirs).unwrap();
    command.args(arguments).env("LD_LIBRARY_PATH", path(&[&double.dir(), &driver]));
    command
}

/// The program with Strata in front.
fn served(double: Double, inter: &str, arguments: &[&str]) -> Command {
    let mut command = alone(double, arguments);
    command.env("LD_PRELOAD", library()).env("STRATA_NCCL_LIB", double.library()).env("STRATA_INTER", inter);
    command
}

#[test]
fn the_program_is_right_on_the_vendor_s_library_alone() {
    for double in [NCCL, RCCL] {
        for seed in ["1", "2"] {
            checked(&mut alone(double, &["2x2", seed, "12"]));
        }
    }
}

#[test]
fn rails_by_tcp_and_nodes_by_the_vendor_give_right_results() {
    for double in [NCCL, RCCL] {
        for (grid, seed) in [("2x2", "1"), ("2x3", "2"), ("3+1", "4"), ("rr2x2", "5")] {
            checked(served(double, "tcp", &[grid, seed, "12"]).envs(TWO_LEVEL));
        }
        // A rank a node: nothing is inside a node.
        for algorithm in ["log", "ring", "rd"] {
            let names = TWO_LEVEL.map(|(name, _)| (name, algorithm));
            checked(served(double, "tcp", &["4x1", "3", "12"]).envs(names));
        }
    }
}
