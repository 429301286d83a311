//! Ranks that die or are stopped, and the others that go on without them. A C program makes processes, kills some by a seed, and
//! looks that all that are left have the same contributors in every result.

use crate::built::{checked, free_port, library_dir, root, run_with, Compiler};
use crate::soft;
use crate::vendor::{NCCL, RCCL};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[test]
fn those_who_are_left_have_the_same_contributors_in_every_result() {
    print!("{}", run_with("survivors.c", &[], &["1", "40"]));
}

/// Those in a call that a loss has broken, and those who wait for the next window to close, come together.
#[test]
fn those_who_are_left_meet_in_windows_that_time_closes() {
    for seed in ["1314", "2118"] {
        (0..4).for_each(|_| print!("{}", run_with("survivors.c", &[], &[seed, "1"])));
    }
    print!("{}", run_with("survivors.c", &[], &["10", "10", "6"]));
}

/// On the double of each driver: the program's streams wait until the call has been made again.
#[test]
fn those_who_are_left_go_on_on_gpus() {
    on_gpus("survivors.c", &["1", "8"]);
}

/// In front of the double of each vendor's library, which works inside the nodes until the first rank is lost.
#[test]
fn those_who_are_left_go_on_in_front_of_a_vendor_s_library() {
    on_gpus_with("survivors.c", &["1", "12"], in_front);
}

/// A stream goes on where the library has ended a collective on it: what it gives then is nobody's result.
#[test]
fn a_collective_that_stops_inside_a_node_has_no_result_anywhere() {
    on_gpus_with("survivors.c", &["1", "2", "break"], in_front);
}

/// The program's thread frees what is left, when the communicator's has done its part.
#[test]
fn a_communicator_on_a_gpu_may_end_while_its_calls_wait_on_their_stream() {
    on_gpus("survivors.c", &["1", "10", "leave"]);
}

fn in_front(driver: &str) -> Vec<(&'static str, PathBuf)> {
    let double = if driver == "hip" { RCCL } else { NCCL };
    vec![("STRATA_NCCL_LIB", double.library()), ("SURVIVORS_IN_FRONT", "1".into())]
}

/// Runs a program on the double of each driver.
pub fn on_gpus(program: &str, arguments: &[&str]) {
    on_gpus_with(program, arguments, |_| Vec::new());
}

/// The same with settings of its own for each driver.
pub fn on_gpus_with(program: &str, arguments: &[&str], settings: impl Fn(&str) -> Vec<(&'static str, PathBuf)>) {
    let source = std::fs::read_to_string(root().join("shim-tests/c").join(program)).unwrap();
    let dir = library_dir();
    let options = [
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        "-L",
        dir.to_str().unwrap(),
        "-lnccl",
        "-ldl",
        "-lm",
    ];
    let include = format!("-I{}", root().join("shim-tests/c").display());
    let program = Compiler::new("c").compile(&source, &[&options[..], &[&include]].concat());
    for (driver, drivers) in [("cuda", soft::cuda_dir()), ("hip", soft::hip_dir())] {
        let path = std::env::join_paths([&dir, &drivers]).unwrap();
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "300"]).arg(&program).args(arguments).env("LD_LIBRARY_PATH", path);
        // The communicator's thread must not do what waits for the program's streams, which wait for it. (Where a program ends a
        // communicator without waiting for its stream, that thread may free memory, when its stream goes on.)
        command.env("SOFT_DEVICE", driver).env("SOFTGPU_STILL", "strata-stream").envs(settings(driver));
        print!("{}", checked(command.env("STRATA_BOOTSTRAP_TIMEOUT_MS", "30000")));
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_rank_that_is_stopped_is_left_out_and_is_told_so_when_it_goes_on() {
    print!("{}", run_with("survivors.c", &[], &["1", "4", "stop"]));
}

#[test]
fn a_new_process_comes_in_the_place_of_a_lost_rank() {
    print!("{}", run_with("come_back.c", &[], &["1", "10"]));
}

#[test]
fn sums_are_rescaled_where_the_program_asks_for_it() {
    print!("{}", run_with("adapt_lost.c", &[], &[]));
    on_gpus("adapt_lost.c", &[]);
}

#[test]
fn queued_calls_wait_for_a_rank_that_does_not_come_once() {
    print!("{}", run_with("queued_behind.c", &[], &[]));
}

/// What the ranks of the example that come to their end print.
fn train(program: &Path, ends: Option<(&str, &str)>) -> String {
    const RANKS: usize = 4;
    let port = free_port();
    let start = |rank: usize| {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "120"]).arg(program);
        command.env("LD_LIBRARY_PATH", library_dir()).env("STRATA_LOST", "continue").envs(ends);
        command.env("NCCL_COMM_ID", format!("127.0.0.1:{port}")).env("NCCL_HOSTID", format!("node{}", rank / 2));
        command.env("STRATA_TIMEOUT_MS", "60000").env("STRATA_BOOTSTRAP_TIMEOUT_MS", "60000");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string()).stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks: Vec<_> = (0..RANKS).map(start).collect();
    let ended = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap());
    ended.map(|output| String::from_utf8(output.stdout).unwrap()).collect()
}

#[test]
fn training_loses_as_much_by_a_death_as_by_a_rank_that_leaves_in_order() {
    let source = std::fs::read_to_string(root().join("examples/elastic.c")).unwrap();
    let dir = library_dir();
    let program = Compiler::new("c").compile(&source, &["-Wall", "-Werror", "-L", dir.to_str().unwrap(), "-lnccl"]);
    let last = |text: &str| text.lines().find(|line| line.starts_with("step 200")).unwrap_or(text).to_string();
    let whole = last(&train(&program, None));
    assert!(whole.ends_with("of 512 samples on 4 ranks"), "{whole}");
    for rank in [0, 3] {
        let at = format!("{rank}:120");
        let [died, left] = ["ELASTIC_DIE", "ELASTIC_LEAVE"].map(|name| last(&train(&program, Some((name, &at)))));
        println!("whole: {whole}; rank {rank} died: {died}; left: {left}");
        assert!(died.ends_with("of 512 samples on 3 ranks"), "{died}");
        assert_eq!(died, left);
    }
    std::fs::remove_file(program).unwrap();
}
