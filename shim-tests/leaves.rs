//! What a rank does after its last call never fails that call elsewhere: the rows of `leaves.c` over TCP, with the ranks
//! that need others late, so that those who need nobody have left. `scripts/leaves` counts failures of many runs.

mod built;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The program, compiled once.
static PROGRAM: LazyLock<std::path::PathBuf> = LazyLock::new(|| {
    let dir = built::library_dir();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim-tests/c/leaves.c");
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
}

/// Sockets of 16 KiB hold little, so most of what is sent waits on the sender's side, for longer than the 2 s that a leaving
/// rank once lingered.
#[test]
fn what_was_sent_through_small_buffers_arrives_at_a_rank_that_comes_late() {
    let small = "ip link set lo up && sysctl -qw net.ipv4.tcp_rmem='4096 8192 16384' \
                 net.ipv4.tcp_wmem='4096 8192 16384' && exec \"$@\"";
    if !Command::new("unshare").args(["-n", "true"]).status().is_ok_and(|status| status.success()) {
        return println!("SKIPPED: small buffers: no network namespaces can be made");
    }
    for name in ["send", "finalize", "exit"] {
        let mut command = Command::new("unshare");
        command.args(["-n", "sh", "-c", small, "sh", env!("CARGO_BIN_EXE_strata")]);
        command.args(["launch", "-n", "4", "--nodes", "2", "--timeout", "60", "--"]).arg(&*PROGRAM);
        command.args([name, "7000", "3000"]);
        command.env("LD_LIBRARY_PATH", built::library_dir()).env_remove("STRATA_INTER").stdin(Stdio::null());
        built::checked(&mut command);
    }
}
