//! Communicators on soft GPUs under attack: too little memory, contexts that end, ranks that die or never call, streams
//! that are held up or captured, odd memory and counts. Each must end in a clear error or in right results; nothing hangs.
//!
//! The programs are `vendor/programs/gpu_*.c`. They run with Strata alone, which then works on device memory itself, and
//! with Strata over a vendor's library, whose rails are Strata's by TCP.

// What is not used here other test programs use.
#[allow(dead_code)]
mod built;
#[allow(dead_code)]
mod soft;
#[allow(dead_code)]
mod vendor;

use built::library;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use vendor::{Double, NCCL, RCCL};

/// How Strata serves a program.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mode {
    Alone,
    Over,
}
use Mode::{Alone, Over};

const BOTH: [Mode; 2] = [Alone, Over];
type Variables<'a> = &'a [(&'a str, &'a str)];

fn driver(double: Double) -> PathBuf {
    match double.rccl {
        true => soft::hip_dir(),
        false => soft::cuda_dir(),
    }
}

/// Runs a case on a grid; what the ranks printed, and what Strata wrote down.
fn run(mode: Mode, double: Double, [program, case, grid]: [&str; 3], variables: Variables) -> (String, String) {
    // Limits of time are checked: the ranks of one case have the machine to themselves.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let driver = driver(double);
    let mut command = Command::new(double.gpu_program(program, &driver));
    let path = |dirs: &[&Path]| std::env::join_paths(dirs).unwrap();
    command.args([case, grid]).env("LD_LIBRARY_PATH", path(&[&double.dir(), &driver])).env("LD_PRELOAD", library());
    match mode {
        Alone => command.env("STRATA_NCCL_LIB", "none"),
        Over => {
            let algorithms = ["ALLGATHER", "REDUCESCATTER", "ALLREDUCE"];
            command.envs(algorithms.map(|name| (format!("STRATA_{name}_ALGO"), "two_level")));
            command.env("STRATA_NCCL_LIB", double.library()).env("STRATA_INTER", "tcp")
        }
    };
    command.env("NCCL_DEBUG", "WARN").envs(variables.iter().copied());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // Every rank has an alarm.
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{mode:?} {command:?}: {}\n{out}{err}", output.status);
    (out, err)
}

fn holds(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "there is no {word:?} in\n{text}");
    }
}

#[test]
fn without_memory_a_communicator_is_not_made_and_the_vendor_serves_alone() {
    let cases: [(&str, &[&str]); 3] = [
        ("SOFTGPU_MEMORY_BYTES=1048576", &["device 1", "4194304 bytes"]),
        ("SOFTGPU_PINNED_BYTES=1048576", &["device 1", "16777216 bytes", "pinned"]),
        // Enough for the communicator, but not for what a vendor's library under it needs.
        ("SOFTGPU_MEMORY_BYTES=8388608", &["device 1", "67108864 bytes"]),
    ];
    for (limit, words) in cases {
        for double in [NCCL, RCCL] {
            let variables = [("RANK_ENV_1", limit)];
            if !limit.ends_with("8388608") {
                let (out, _) = run(Alone, double, ["gpu_failures", "no_memory", "2x2"], &variables);
                // Strata alone has room to bring the data of a group's calls together.
                let words = words.iter().map(|word| if *word == "4194304 bytes" { "6291584 bytes" } else { word });
                holds(&out, &std::iter::once("rank 1: 1 ").chain(words).collect::<Vec<_>>());
            }
            let (_, log) = run(Over, double, ["gpu_failures", "no_memory", "2x2"], &variables);
            holds(&log, &[&["the vendor's library alone serves"], words].concat());
        }
    }
}

/// All that operations need is there when a communicator has been made.
#[test]
fn memory_that_ends_later_does_not_matter() {
    let variables = [
        ("RANK_ENV_1", "SOFTGPU_MEMORY_BYTES=2300000"),
        ("STRATA_SCRATCH_BYTES", "64"),
        ("STRATA_REDUCE_ALGO", "reduce_scatter_gather"),
    ];
    run(Alone, NCCL, ["gpu_failures", "no_memory_later", "2x2"], &variables);
}

#[test]
fn memory_that_a_device_cannot_use_is_refused_by_name() {
    for double in [NCCL, RCCL] {
        run(Alone, double, ["gpu_failures", "host_memory", "2x2"], &[]);
    }
}

#[test]
fn a_context_that_the_program_ends_is_an_error_everywhere() {
    for double in [NCCL, RCCL] {
        for mode in BOTH {
            let (_, log) = run(mode, double, ["gpu_failures", "reset_before", "2x2"], &[]);
            holds(&log, &["rank 1 aborted"]);
            run(mode, double, ["gpu_failures", "reset_during", "2x2"], &[]);
            run(mode, double, ["gpu_failures", "reset_idle", "2x2"], &[]);
        }
    }
    let (out, _) = run(Alone, NCCL, ["gpu_failures", "reset_before", "2x2"], &[]);
    holds(&out, &["rank 1: 1 ", "the program has ended the context of device 1"]);
}

#[test]
fn a_rank_that_never_calls_is_named_and_streams_go_on() {
    for (double, mode) in [(NCCL, Alone), (RCCL, Alone), (NCCL, Over)] {
        let limit = [("STRATA_TIMEOUT_MS", "2000")];
        let (out, log) = run(mode, double, ["gpu_failures", "never_calls", "2x2"], &limit);
        holds(&out, &["rank 0: 8 "]);
        holds(if mode == Alone { &out } else { &log }, &["rank 1 is alive but has not joined"]);
    }
}

#[test]
fn a_stream_that_waits_for_a_range_has_the_results_while_the_call_goes_on() {
    let grains =
        [("STRATA_SEGMENT_BYTES", "1048576"), ("STRATA_TIMEOUT_MS", "3000"), ("STRATA_ALLREDUCE_ALGO", "two_trees")];
    for (double, seed) in [(NCCL, "1"), (NCCL, "2"), (RCCL, "3")] {
        run(Alone, double, ["gpu_failures", "fronts", "2x2"], &[&grains[..], &[("SOFTGPU_SEED", seed)]].concat());
    }
    run(Over, NCCL, ["gpu_failures", "unfollowed", "2x2"], &[]);
}

#[test]
fn a_rank_that_dies_or_leaves_or_gives_up_ends_the_others_collectives() {
    for mode in BOTH {
        for (double, seed) in [(NCCL, "1"), (NCCL, "2"), (RCCL, "3")] {
            for case in ["killed", "aborted", "leaves"] {
                run(mode, double, ["gpu_failures", case, "2x2"], &[("SOFTGPU_SEED", seed)]);
            }
        }
    }
}

/// At the end of a process the driver may have gone before its user.
#[test]
fn a_process_that_ends_leaves_the_driver_alone() {
    for (double, mode) in [(NCCL, Alone), (RCCL, Alone), (NCCL, Over)] {
        let (_, log) = run(mode, double, ["gpu_failures", "forgets", "2x2"], &[]);
        assert!(!log.contains("panicked"), "{log}");
    }
}

#[test]
fn a_stream_that_has_ended_is_an_error_and_the_communicator_as_good_as_before() {
    for (double, mode) in [(NCCL, Alone), (RCCL, Alone), (NCCL, Over)] {
        run(mode, double, ["gpu_failures", "bad_stream", "2x2"], &[]);
    }
}

#[test]
fn calls_return_while_streams_are_held_up_and_nobody_else_has_called() {
    for (double, mode) in [(NCCL, Alone), (RCCL, Alone), (NCCL, Over)] {
        for seed in ["1", "2"] {
            run(mode, double, ["gpu_streams", "queue", "2x2"], &[("SOFTGPU_SEED", seed)]);
        }
    }
}

#[test]
fn captured_calls_are_the_vendor_s_or_refused() {
    for double in [NCCL, RCCL] {
        run(Alone, double, ["gpu_streams", "capture", "2x2"], &[]);
        let (_, log) = run(Over, double, ["gpu_streams", "capture", "2x2"], &[]);
        assert_eq!(log.matches("captured into a graph").count(), 1, "once\n{log}");
    }
}

#[test]
fn a_capture_beside_a_collective_is_not_spoilt() {
    for double in [NCCL, RCCL] {
        for mode in BOTH {
            run(mode, double, ["gpu_streams", "capture_beside", "2x2"], &[]);
        }
    }
}

#[test]
fn many_communicators_streams_and_threads_at_once_are_right() {
    for (double, seed) in [(NCCL, "1"), (RCCL, "2")] {
        for mode in BOTH {
            run(mode, double, ["gpu_streams", "many", "2x2"], &[("SOFTGPU_SEED", seed)]);
        }
        run(Alone, double, ["gpu_streams", "threads", "1x1"], &[("SOFTGPU_SEED", seed)]);
    }
}

#[test]
fn the_drivers_own_streams_contexts_and_threads_without_a_device_are_served() {
    for double in [NCCL, RCCL] {
        run(Alone, double, ["gpu_streams", "nulls", "2x2"], &[]);
    }
    run(Over, NCCL, ["gpu_streams", "nulls", "2x2"], &[]);
    run(Alone, NCCL, ["gpu_streams", "contexts", "2x2"], &[]);
}

#[test]
fn communicators_made_out_of_others_and_ranks_without_a_gpu_work() {
    for (double, mode) in [(NCCL, Alone), (RCCL, Alone), (NCCL, Over)] {
        run(mode, double, ["gpu_streams", "derived", "2x2"], &[]);
    }
    for double in [NCCL, RCCL] {
        run(Alone, double, ["gpu_streams", "mixed", "2x2"], &[("RANK_ENV_1", "STRATA_DEVICE=host")]);
    }
}

#[test]
fn every_call_is_right_on_device_memory() {
    for (double, seed) in [(NCCL, "1"), (RCCL, "2")] {
        for case in ["messages", "moves", "reductions", "corners", "allocated"] {
            run(Alone, double, ["gpu_calls", case, "2x2"], &[("SOFTGPU_SEED", seed)]);
        }
        run(Over, double, ["gpu_calls", "corners", "2x2"], &[("SOFTGPU_SEED", seed)]);
    }
    run(Alone, NCCL, ["gpu_calls", "messages", "3+1"], &[]);
    let (out, _) = run(Alone, NCCL, ["gpu_calls", "unequal", "2x2"], &[]);
    holds(&out, &["rank 1: 5 ", "500000"]);
}

#[test]
fn little_memory_and_drivers_without_waits_for_words_change_nothing() {
    let variables: [(&str, &str); 5] = [
        ("STRATA_PINNED_BYTES", "4096"),
        ("STRATA_PINNED_BYTES", "70000"),
        ("STRATA_SCRATCH_BYTES", "65536"),
        ("SOFTGPU_ABSENT", "cuStreamWaitValue32_v2,hipStreamWaitValue32"),
        ("ONE_DEVICE", "1"),
    ];
    for (index, variable) in variables.into_iter().enumerate() {
        let double = if index % 2 == 0 { NCCL } else { RCCL };
        for case in ["messages", "reductions", "corners"] {
            run(Alone, double, ["gpu_calls", case, "2x2"], &[variable]);
        }
        run(Over, double, ["gpu_calls", "corners", "2x2"], &[variable]);
    }
}

#[test]
fn communicators_that_come_and_go_leave_nothing() {
    run(Alone, NCCL, ["gpu_calls", "cycles", "2x1"], &[("CYCLES", "300")]);
    run(Alone, RCCL, ["gpu_calls", "cycles", "1x2"], &[("CYCLES", "100")]);
    run(Over, NCCL, ["gpu_calls", "cycles", "2x1"], &[("CYCLES", "60")]);
}
