//! What a rank does after its last call never fails that call elsewhere: the rows of `leaves.c` over TCP, with the ranks
//! that need others late, so that those who need nobody have left. `scripts/leaves` counts failures of many runs.

use crate::built;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The program, compiled once.
static PROGRAM: LazyLock<std::path::PathBuf> = LazyLock::new(|| {
    let dir = built::library_dir();
    let source = built::root().join("shim-tests/c/leaves.c");
    let source = std::fs::read_to_string(source).unwrap();
    let strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-L", dir.to_str().unwrap(), "-lnccl"];
    built::Compiler::new("c").compile(&source, &strict)
});

/// Four ranks on as many nodes as this says run a row, `runs` times.
fn row(name: &str, nodes: &str, late_ms: &str, runs: usize) {
    for _ in 0..runs {
        let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
        command.args(["launch", "-n", "4", "--nodes", nodes, "--timeout", "100", "--"]);
        command.arg(&*PROGRAM).args([name, "600", late_ms]);
        command.env("LD_LIBRARY_PATH", built::library_dir()).env_remove("STRATA_INTER").stdin(Stdio::null());
        built::checked(&mut command);
    }
}

#[test]
fn who_destroys_after_its_last_call_fails_nobody() {
    for name in ["broadcast", "send", "finalize", "exit"] {
        row(name, "2", "300", 1);
        row(name, "2", "0", 3);
    }
}

#[test]
fn subcommunicators_that_are_used_once_fail_nobody() {
    for name in ["split_scatter", "split_broadcast", "split_gather", "split_reduce", "allgather", "allreduce"] {
        row(name, "2", "0", 1);
        row(name, "4", "5", 1);
    }
}

#[test]
fn who_aborts_or_ends_after_its_last_call_fails_nobody() {
    for name in ["root_exits", "root_aborts", "one_aborts"] {
        row(name, "2", "300", 1);
        row(name, "2", "0", 3);
    }
    for name in ["init_root_exits", "split_root_exits"] {
        row(name, "4", "0", 10);
    }
}

/// Runs a row in a network namespace whose system has this setting.
fn row_in_namespace(setting: &str, row: &[&str], vars: &[(&str, &str)]) {
    let needs = ["-n", "sh", "-c", "ip link set lo up && command -v sysctl >/dev/null"];
    if !Command::new("unshare").args(needs).status().is_ok_and(|status| status.success()) {
        return println!("SKIPPED: {setting}: no network namespaces can be made, or there is no ip or sysctl");
    }
    let prepare = format!("ip link set lo up && sysctl -qw {setting} && exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["-n", "sh", "-c", &prepare, "sh", env!("CARGO_BIN_EXE_strata")]);
    command.args(["launch", "-n", "4", "--nodes", "2", "--timeout", "60", "--"]).arg(&*PROGRAM).args(row);
    command.env("LD_LIBRARY_PATH", built::library_dir()).env_remove("STRATA_INTER").stdin(Stdio::null());
    built::checked(command.envs(vars.iter().copied()));
}

/// Sockets of 16 KiB hold little, so most of what is sent waits on the sender's side, for longer than the 2 s that a leaving
/// rank once lingered.
#[test]
fn what_was_sent_through_small_buffers_arrives_at_a_rank_that_comes_late() {
    let small = "net.ipv4.tcp_rmem='4096 8192 16384' net.ipv4.tcp_wmem='4096 8192 16384'";
    for name in ["send", "finalize", "exit"] {
        row_in_namespace(small, &[name, "7000", "3000"], &[]);
    }
}

/// Closed connections keep their ports for a minute; communicators that come and go need more of them than there are.
#[test]
fn ports_of_closed_connections_are_used_again() {
    row_in_namespace("net.ipv4.ip_local_port_range='40000 40199'", &["churn"], &[("LEAVES_ROUNDS", "200")]);
}
