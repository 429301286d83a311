//! Calls on several communicators in opposite orders, on soft GPUs: on a vendor's double, with Strata in front of it, whose rails
//! are the vendor's or Strata's own, and on Strata alone. No communicator of Strata's makes another one wait.
//!
//! The program (`vendor/programs/opposite.c`) says what a seed decides. A vendor's library may ask programs for more; its double
//! lets streams go on by themselves, so what hangs here hangs by Strata.

use crate::built::library;
use crate::soft;
use crate::vendor::{Double, NCCL, RCCL};
use std::process::{Command, Output};

/// The algorithms of all that the program calls and that may be Strata's.
const SETTINGS: [&str; 3] = ["STRATA_ALLGATHER_ALGO", "STRATA_REDUCESCATTER_ALGO", "STRATA_ALLREDUCE_ALGO"];

/// Who does the calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    Vendor,
    VendorBehindStrata,
    /// Between nodes Strata, by this algorithm.
    Rails(&'static str),
    Strata,
}

/// The grids, and who does the calls there.
const PLACES: [(&str, By); 6] = [
    ("2x2", By::Vendor),
    ("2x2", By::VendorBehindStrata),
    ("2x2", By::Rails("two_level")),
    ("3+1", By::Rails("two_level")),
    ("4x1", By::Rails("ring")),
    ("2x2", By::Strata),
];

fn program(double: Double, (grid, by): (&str, By), seeds: u64) -> Command {
    let driver = if double.rccl { soft::hip_dir() } else { soft::cuda_dir() };
    let mut command = Command::new(double.gpu_program("opposite", &driver));
    command.args([grid, "1", &(1 + seeds).to_string()]);
    command.env("LD_LIBRARY_PATH", std::env::join_paths([double.dir(), driver]).expect("paths"));
    if by == By::Vendor {
        return command;
    }
    command.env("LD_PRELOAD", library()).env("NCCL_DEBUG", "INFO").env("STRATA_NCCL_LIB", double.library());
    match by {
        By::Rails(algorithm) => {
            command.env("STRATA_INTER", "tcp").envs(SETTINGS.map(|setting| (setting, algorithm)));
        }
        By::Strata => drop(command.env("STRATA_NCCL_LIB", "none")),
        By::Vendor | By::VendorBehindStrata => (),
    }
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// 20 seeds each; `ORDER_SEEDS=1000` for so many.
#[test]
fn communicators_whose_calls_come_in_opposite_orders_do_not_wait_for_each_other() {
    let seeds: u64 = std::env::var("ORDER_SEEDS").map_or(20, |seeds| seeds.parse().expect("a number"));
    for double in [NCCL, RCCL] {
        for place in PLACES {
            let mut command = program(double, place, seeds);
            let output = command.output().expect("the program");
            let said = said(&output);
            assert!(output.status.success(), "{place:?}: {command:?}: {}\n{said}", output.status);
            println!("{double:?} {place:?}: {seeds} seeds are right");
            let chosen = match place.1 {
                By::Vendor | By::VendorBehindStrata => None,
                By::Rails("two_level") => Some("-> two_level(vendor,"),
                By::Rails(_) => Some("-> ring"),
                By::Strata => Some("-> "),
            };
            let own = |line: &str| line.contains(" INFO ") && line.contains(chosen.unwrap_or("-> "));
            assert_eq!(said.lines().any(own), chosen.is_some(), "{place:?}: what is Strata's\n{said}");
        }
    }
}

/// The orders are opposite indeed: where the device has one queue for all streams, they wait for each other, and Strata tells so.
#[test]
fn on_a_device_with_one_queue_opposite_orders_wait_for_each_other_and_all_ranks_are_told() {
    for double in [NCCL, RCCL] {
        for place in [("2x2", By::Strata), ("2x2", By::Rails("two_level"))] {
            let mut command = program(double, place, 1);
            let output = command.env("SOFTGPU_CONNECTIONS", "1").env("STRATA_TIMEOUT_MS", "3000").output();
            let output = output.expect("the program");
            let said = said(&output);
            assert!(!output.status.success(), "{place:?}\n{said}");
            assert!(said.contains("no progress for 3000 ms"), "{place:?}\n{said}");
        }
    }
}

/// What notices a missing synchronisation of Strata's.
#[test]
fn a_synchronisation_that_is_left_out_is_noticed_in_opposite_orders() {
    for (double, query) in [(NCCL, "cuEventQuery"), (RCCL, "hipEventQuery")] {
        let output = program(double, ("2x2", By::Rails("two_level")), 10).env("SOFTGPU_BREAK", query).output();
        assert!(!output.expect("the program").status.success(), "{query} may be left out");
    }
}
