//! `strata launch` with real processes: what ranks are told, and that none outlives its launch.

use crate::built;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything here takes; shorter than the ranks would sleep if nobody ended them.
const LIMIT: Duration = Duration::from_secs(30);

fn strata(line: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.arg("launch").args(line);
    if !line.contains(&"--timeout") {
        command.args(["--timeout", "60"]);
    }
    command.args(["--", "sh", "-c", script]);
    command.stdin(Stdio::null());
    command
}

fn output(line: &[&str], script: &str) -> (Output, Duration) {
    let start = Instant::now();
    let output = strata(line, script).output().expect("the command starts");
    (output, start.elapsed())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Starts ranks that print their process ids and then sleep; returns the launcher and the ids.
fn sleepers(line: &[&str], nranks: usize) -> (Child, Vec<u32>) {
    // `exec` makes the printed id that of the sleeping process.
    let mut launcher = strata(line, "echo $$; exec sleep 600").stdout(Stdio::piped()).spawn().expect("it starts");
    let lines = BufReader::new(launcher.stdout.take().expect("a pipe")).lines();
    let ids = lines.take(nranks).map(|line| line.expect("a line").trim().parse().expect("a process id")).collect();
    (launcher, ids)
}

fn wait_until_gone(ids: &[u32]) {
    let deadline = Instant::now() + LIMIT;
    let alive = |id: &u32| {
        let stat = std::fs::read_to_string(Path::new("/proc").join(id.to_string()).join("stat")).unwrap_or_default();
        // A zombie without a parent that reaps it has ended all the same.
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    };
    while ids.iter().any(alive) {
        assert!(Instant::now() < deadline, "ranks {ids:?} are still there");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn ranks_are_told_who_and_where_they_are() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $NODE_RANK $MASTER_ADDR";
    let (output, _) = output(&["-n", "4", "--nodes", "3,1", "--placement", "round-robin"], script);
    assert!(output.status.success());
    let out = text(&output.stdout);
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    let expected = ["0 4 0 3 0 0 127.0.0.1", "1 4 0 1 1 1 127.0.0.1", "2 4 1 3 0 0 127.0.0.1", "3 4 2 3 0 0 127.0.0.1"];
    assert_eq!(lines, expected);
}

#[test]
fn ranks_of_a_node_share_a_host_id_that_no_other_launch_has() {
    let host_ids = || {
        let (output, _) = output(&["-n", "4", "--nodes", "2", "--tag-output"], "echo $NCCL_HOSTID");
        let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_string).collect();
        lines.sort_unstable();
        let id = |line: &String| line.split_once("] ").expect("a tag").1.to_string();
        lines.iter().map(id).collect::<Vec<_>>()
    };
    let (first, second) = (host_ids(), host_ids());
    assert_eq!(first[0], first[1]);
    assert_eq!(first[2], first[3]);
    assert_ne!(first[0], first[2]);
    assert!(first.iter().all(|id| !second.contains(id)));
}

#[test]
fn the_first_failure_ends_all_and_gives_its_exit_code() {
    let script = "if [ $RANK = 2 ]; then exit 7; fi; exec sleep 600";
    let (output, took) = output(&["-n", "4"], script);
    assert_eq!(output.status.code(), Some(7));
    assert!(text(&output.stderr).contains("rank 2 exited with code 7"), "{}", text(&output.stderr));
    assert!(took < LIMIT);
}

#[test]
fn a_rank_ended_by_a_signal_is_named_with_it() {
    let (output, _) = output(&["-n", "2"], "if [ $RANK = 1 ]; then kill -SEGV $$; fi; exec sleep 600");
    assert_eq!(output.status.code(), Some(128 + 11));
    assert!(text(&output.stderr).contains("rank 1 was ended by signal 11"));
}

#[test]
fn with_no_kill_the_others_go_on_and_the_first_failure_gives_the_exit_code() {
    // Rank 0 ends last, and fails after rank 1 has been seen to fail.
    let script = "case $RANK in 0) sleep 1; echo went on; exit 4;; 1) exit 3;; esac";
    let (output, _) = output(&["-n", "3", "--no-kill"], script);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(text(&output.stdout), "went on\n");
    let said = text(&output.stderr);
    for rank in [0, 1] {
        assert_eq!(said.matches(&format!("rank {rank} ")).count(), 1, "{said}");
    }
}

#[test]
fn ranks_that_ignore_sigterm_are_killed_after_the_grace() {
    let script = "trap '' TERM; if [ $RANK = 0 ]; then exit 3; fi; sleep 600 & wait; sleep 600";
    let (output, took) = output(&["-n", "3", "--grace", "0.2"], script);
    assert_eq!(output.status.code(), Some(3));
    assert!(took < LIMIT);
}

#[test]
fn a_timeout_names_who_still_runs() {
    let script = "if [ $RANK = 1 ]; then exit 0; fi; exec sleep 600";
    let (output, took) = output(&["-n", "4", "--timeout", "0.5"], script);
    assert_eq!(output.status.code(), Some(124));
    assert!(text(&output.stderr).contains("still running: ranks 0, 2-3"), "{}", text(&output.stderr));
    assert!(took < LIMIT);
}

#[test]
fn a_launcher_that_is_told_to_end_ends_its_ranks() {
    let (mut launcher, ids) = sleepers(&["-n", "3"], 3);
    assert!(built::signal("TERM", launcher.id()));
    let status = launcher.wait().expect("the launcher ends");
    assert_eq!(status.code(), Some(128 + 15));
    wait_until_gone(&ids);
}

#[test]
fn a_killed_launcher_leaves_no_rank_behind() {
    let (mut launcher, ids) = sleepers(&["-n", "3"], 3);
    launcher.kill().expect("the launcher can be killed");
    launcher.wait().expect("it has ended");
    wait_until_gone(&ids);
}

#[test]
fn a_frozen_rank_is_ended_too() {
    let (mut launcher, ids) = sleepers(&["-n", "2"], 2);
    assert!(built::signal("STOP", ids[0]));
    assert!(built::signal("KILL", ids[1]));
    let status = launcher.wait().expect("the launcher ends");
    assert_eq!(status.code(), Some(128 + 9));
    wait_until_gone(&ids);
}

#[test]
fn a_program_that_does_not_exist_is_an_error_and_nothing_runs() {
    let command = Command::new(env!("CARGO_BIN_EXE_strata")).args(["launch", "-n", "2", "/does/not/exist"]).output();
    let output = command.expect("the command starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("/does/not/exist"));
}

#[test]
fn contradicting_numbers_are_refused() {
    let (output, _) = output(&["-n", "3", "--nodes", "2,2"], "true");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("contradict"));
}
