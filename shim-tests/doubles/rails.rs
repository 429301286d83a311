//! Collectives of a program on GPUs whose rails are Strata's own and whose nodes are the vendor's, on soft GPUs.
//!
//! The program (`vendor/programs/rails.c`) puts copies in, collectives and copies out on streams and waits for nothing in
//! between, so a missing synchronisation anywhere shows as a wrong number or a trap.

use crate::built::{checked, library, root};
use crate::soft;
use crate::vendor::{Double, NCCL, RCCL};
use std::path::{Path, PathBuf};
use std::process::Command;

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
    another(double, "rails", arguments)
}

/// A program on the double alone.
fn another(double: Double, program: &str, arguments: &[&str]) -> Command {
    let driver = driver(double);
    let mut command = Command::new(double.gpu_program(program, &driver));
    let path = |dirs: &[&Path]| std::env::join_paths(dirs).unwrap();
    command.args(arguments).env("LD_LIBRARY_PATH", path(&[&double.dir(), &driver]));
    command
}

/// The program with Strata in front.
pub fn served(double: Double, inter: &str, arguments: &[&str]) -> Command {
    in_front(double, inter, alone(double, arguments))
}

/// A program with Strata in front.
fn in_front(double: Double, inter: &str, mut command: Command) -> Command {
    command.env("LD_PRELOAD", library()).env("STRATA_NCCL_LIB", double.library()).env("STRATA_INTER", inter);
    command
}

/// Runs a command, which must succeed; all that it writes.
fn said_by(command: &mut Command) -> String {
    let output = command.env("NCCL_DEBUG", "INFO").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    said
}

/// Runs a command, in which Strata must have carried something by this algorithm.
fn carried(command: &mut Command, algorithm: &str) {
    let said = said_by(command);
    // Which collectives come up the seed decides.
    let carried = said.lines().any(|line| line.contains(" INFO ") && line.contains(&format!("-> {algorithm}")));
    assert!(carried, "nothing was Strata's: {command:?}\n{said}");
}

/// The program on Strata alone, whose ranks all use its transports.
fn unserved(double: Double, arguments: &[&str]) -> Command {
    let mut command = alone(double, arguments);
    command.env("LD_PRELOAD", library()).env("STRATA_NCCL_LIB", "none");
    command
}

/// One run of a campaign: everything follows from the seed.
fn run_of(seed: u64) -> (String, Command) {
    let pick = |salt: u64, count: usize| {
        let mixed = (seed ^ salt << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as usize % count
    };
    let double = [NCCL, RCCL][pick(1, 2)];
    let grid = ["2x2", "2x3", "4x1", "3+1", "rr2x2", "1x3", "2+1+2", "6x1", "rr3x2"][pick(2, 9)];
    let most = ["64", "4000", "40000", "300000"][pick(3, 4)];
    let segment = ["0", "1024", "16384"][pick(4, 3)];
    let pinned = ["16777216", "16777216", "16777216", "65536"][pick(5, 4)];
    let window = ["1", "2", "4", "7"][pick(6, 4)];
    let number = seed.to_string();
    let arguments = [grid, &number, "8", most];
    let waits = if double.rccl { "hipStreamWaitValue32" } else { "cuStreamWaitValue32_v2" };
    let connections = ["8", "8", "1"][pick(10, 3)];
    let beside = ["1048576", "0", "0", "20000"][pick(11, 4)];
    let absent = ["", "", "", waits][pick(7, 4)];
    let (way, mut command) = match pick(8, 2) {
        0 => ("over the vendor", served(double, "tcp", &arguments)),
        _ => ("alone", unserved(double, &arguments)),
    };
    if way == "over the vendor" {
        let has_levels = !grid.ends_with("x1") && !grid.starts_with("1x");
        let algorithm = if has_levels { "two_level" } else { ["log", "ring"][pick(9, 2)] };
        command.envs(TWO_LEVEL.map(|(name, _)| (name, algorithm)));
    }
    let small = [
        ("STRATA_SEGMENT_BYTES", segment),
        ("STRATA_PINNED_BYTES", pinned),
        ("STRATA_WINDOW", window),
        ("STRATA_PACK_BESIDE_BYTES", beside),
    ];
    command.envs(small).env("SOFTGPU_SEED", &number).env("SOFTGPU_ABSENT", absent);
    command.env("SOFTGPU_CONNECTIONS", connections);
    let driver = if double.rccl { "HIP" } else { "CUDA" };
    let what = format!("seed {seed}: {driver} {way}, {grid}, blocks up to {most}, {small:?}, absent: {absent:?}, queues: {connections}");
    (what, command)
}

/// A sample of seeds; `SOFT_SEEDS=FIRST..END` chooses others, and `scripts/soft-campaign` runs a thousand.
#[test]
fn whatever_the_order_of_events_results_are_right() {
    let range = std::env::var("SOFT_SEEDS").unwrap_or_else(|_| "1..16".to_string());
    let (first, end) = range.split_once("..").expect("FIRST..END");
    let (first, end): (u64, u64) = (first.parse().unwrap(), end.parse().unwrap());
    seeds(first..end, &[]);
}

/// The same, with the PTX that the library loads.
#[test]
fn with_the_kernels_ptx_interpreted_results_are_right() {
    // A seed may have HIP, whose kernels are no PTX.
    let is_cuda = |seed: &u64| run_of(*seed).0.contains("CUDA");
    seeds((1..40).filter(is_cuda).take(8), &[("SOFTGPU_PTX", "1")]);
}

/// Runs of a campaign, all right.
fn seeds(seeds: impl Iterator<Item = u64>, variables: &[(&str, &str)]) {
    let (mut count, mut wrong) = (0, Vec::new());
    for seed in seeds {
        let (what, mut command) = run_of(seed);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        count += 1;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            println!("{what}: {}\n{said}", output.status);
            wrong.push(what);
        }
    }
    println!("{count} seeds, {} wrong", wrong.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What notices a missing synchronisation: with any one of those that Strata uses left out, results are wrong.
#[test]
fn a_synchronisation_that_is_left_out_is_noticed() {
    for (double, broken) in [
        (NCCL, ["cuEventQuery", "cuEventRecord", "cuStreamWaitValue32_v2"]),
        (RCCL, ["hipEventQuery", "hipEventRecord", "hipStreamWaitValue32"]),
    ] {
        for call in broken {
            for command in [served(double, "tcp", &["2x2", "1", "24"]), unserved(double, &["2x2", "1", "24"])] {
                let mut command = command;
                let output = command.envs(TWO_LEVEL).env("SOFTGPU_BREAK", call).output().unwrap();
                assert!(!output.status.success(), "{call} may be left out: {command:?}");
            }
        }
    }
}

/// No stream of Strata's waits for another one but those of the stages of a long call: with waits left out, results are
/// wrong where calls are long, and right where they are short.
#[test]
fn the_blocks_of_long_calls_are_arranged_on_other_streams_and_those_of_short_ones_in_line() {
    for (double, wait) in [(NCCL, "cuStreamWaitEvent"), (RCCL, "hipStreamWaitEvent")] {
        for (beside_bytes, waits, is_right) in [("1000000000", false, true), ("0", false, false), ("0", true, true)] {
            let mut command = in_front(double, "tcp", another(double, "gpu_calls", &["corners", "2x2"]));
            command.envs(TWO_LEVEL).env("STRATA_PACK_BESIDE_BYTES", beside_bytes).env("NCCL_DEBUG", "INFO");
            command.env("SOFTGPU_BREAK", if waits { "" } else { wait });
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.success(), is_right, "{command:?}\n{said}");
            assert!(said.contains("-> two_level(vendor,"), "nothing was Strata's: {command:?}\n{said}");
        }
    }
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
            carried(served(double, "tcp", &[grid, seed, "12"]).envs(TWO_LEVEL), "two_level(vendor,");
        }
        // A rank a node: nothing is inside a node.
        for algorithm in ["log", "ring", "rd"] {
            let names = TWO_LEVEL.map(|(name, _)| (name, algorithm));
            carried(served(double, "tcp", &["4x1", "3", "12"]).envs(names), algorithm);
        }
    }
}

/// Shares of a file, some of them nothing, cut what the vendor's library reduces inside a node into parts of different sizes. The ranks also measure
/// their links between calls.
#[test]
fn nodes_may_own_different_shares_of_what_the_vendor_reduces_inside_them() {
    let file = root().join(format!("target/tmp/shares-{}.txt", std::process::id()));
    for (double, grid, sizes, shares, seed) in [
        (NCCL, "3x2", "2,2,2", "2,1,0", "1"),
        (RCCL, "3x2", "2,2,2", "1,1,5", "2"),
        (NCCL, "2+1+2", "2,1,2", "1,3,1", "3"),
        (RCCL, "3+1+2", "3,1,2", "0,1,2", "4"),
    ] {
        let text = format!(
            "strata strategy 1\ngrid {sizes}\nall_reduce 1 1G two_level(direct,direct) segment=64K window=2 shares={shares}\n"
        );
        std::fs::write(&file, text).unwrap();
        for most in ["5000", "1500000"] {
            let mut command = served(double, "tcp", &[grid, seed, "12", most]);
            let said = said_by(command.env("STRATA_STRATEGY", &file).env("STRATA_MEASURE_EVERY", "1"));
            assert!(said.contains("-> two_level(vendor,direct)"), "no shares: {command:?}\n{said}");
            assert!(said.contains("STRATA_STRATEGY, line 3"), "another reason: {command:?}\n{said}");
            assert!(!said.contains("left out"), "{command:?}\n{said}");
        }
    }
    std::fs::remove_file(file).unwrap();
}

/// Numbers that codes hold as they are, so that every result is exact: in front of the vendor and on Strata alone, with the
/// kernels' PTX and without.
#[test]
fn rails_in_codes_give_right_results() {
    for (seed, code, grid) in [("1", "bf16", "2x2"), ("2", "mx8", "3+1"), ("3", "int8", "rr2x3")] {
        let coded = ["ALLREDUCE", "ALLGATHER", "REDUCESCATTER"].map(|name| (format!("STRATA_{name}_CODE"), code));
        let small = [("RAILS_FLOATS", "1"), ("STRATA_CODE_MIN_BYTES", "1"), ("STRATA_SEGMENT_BYTES", "16384")];
        for double in [NCCL, RCCL] {
            let mut command = served(double, "tcp", &[grid, seed, "8"]);
            carried(command.envs(coded.clone()).envs(small), &format!("two_level(vendor,coded_{code})"));
            let mut command = unserved(double, &[grid, seed, "8", "4000"]);
            let ptx = ("SOFTGPU_PTX", if double.rccl { "0" } else { "1" });
            carried(command.envs(coded.clone()).envs(small).envs([ptx]), &format!("two_level(direct,coded_{code})"));
        }
    }
}

/// The program that makes calls with a code, with Strata in front.
fn coded(double: Double, inter: &str, arguments: &[&str]) -> Command {
    in_front(double, inter, another(double, "coded", arguments))
}

/// Strata has what it needs for such calls where it carries any call of the communicator.
const ANY_CALL: (&str, &str) = ("STRATA_ALLGATHER_ALGO", "two_level");

#[test]
fn calls_with_a_code_and_a_residual_are_strata_s_where_its_transports_go_between_nodes() {
    for (double, grid, name) in [
        (NCCL, "2x2", "two_level(vendor,coded_mx8)"),
        (RCCL, "2x2", "two_level(vendor,coded_mx8)"),
        (NCCL, "3+1", "two_level(vendor,coded_mx8)"),
        (RCCL, "rr2x3", "two_level(vendor,coded_mx8)"),
        // A rank a node: nothing is inside a node.
        (NCCL, "4x1", "coded_mx8"),
    ] {
        let ptx = ("SOFTGPU_PTX", if double.rccl || grid != "2x2" { "0" } else { "1" });
        let any = (ANY_CALL.0, if grid == "4x1" { "log" } else { ANY_CALL.1 });
        carried(coded(double, "tcp", &[grid, "runs"]).envs([any, ptx]), name);
    }
}

#[test]
fn where_nothing_goes_between_nodes_calls_with_a_code_are_the_vendor_s_as_they_are() {
    for (double, grid) in [(NCCL, "1x3"), (RCCL, "1x2"), (NCCL, "1x1")] {
        for inter in ["tcp", "auto"] {
            checked(&mut coded(double, inter, &[grid, "plain"]));
        }
    }
}

#[test]
fn calls_with_a_code_are_refused_in_words_where_strata_cannot_code_them() {
    for (double, inter, variables, why) in [
        (NCCL, "auto", [ANY_CALL, ("", "")], "STRATA_INTER=tcp or mpi"),
        (RCCL, "tcp", [("STRATA_TWO_LEVEL_MIN_NODES", "100"), ("", "")], "STRATA_TWO_LEVEL_MIN_NODES=2"),
        (NCCL, "tcp", [ANY_CALL, ("STRATA_DISABLE", "1")], "switched off"),
    ] {
        let variables = variables.into_iter().filter(|(name, _)| !name.is_empty());
        checked(coded(double, inter, &["2x2", "refused", why]).envs(variables));
    }
}
