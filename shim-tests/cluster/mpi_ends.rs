//! An MPI that ends the process, in whatever call and on whatever thread: the process ends with MPI's status, and the other
//! ranks hear of it. It takes no MPI: the plugin is `c/mpi/ends.c`.

use crate::built;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Far below the time that a call may take.
const SECONDS: Duration = Duration::from_secs(40);

fn compiled(file: &str, options: &[&str]) -> PathBuf {
    let source = built::root().join("shim-tests/c").join(file);
    let strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-pthread"];
    built::Compiler::new("c").compile(&std::fs::read_to_string(source).unwrap(), &[&strict[..], options].concat())
}

static PLUGIN: LazyLock<PathBuf> = LazyLock::new(|| compiled("mpi/ends.c", &["-shared", "-fPIC"]));
static PROGRAM: LazyLock<PathBuf> =
    LazyLock::new(|| compiled("leaves.c", &["-L", built::library_dir().to_str().unwrap(), "-lnccl"]));

/// A rank as a launcher of MPI starts it, whose status is told and is no reason to end the others.
const RANK: &str =
    "export OMPI_COMM_WORLD_RANK=$RANK OMPI_COMM_WORLD_SIZE=$WORLD_SIZE; \"$@\"; echo \"rank $RANK: $?\"";

/// Three ranks on three nodes run a row; in `call`, MPI ends rank 1 like this. The statuses of the ranks.
fn statuses(row: &str, call: &str, how: &str) -> Vec<i32> {
    outcome(row, call, how, "return").0
}

/// The statuses and what was said, where in `call` MPI goes on like this on the other ranks.
fn outcome(row: &str, call: &str, how: &str, others: &str) -> (Vec<i32>, String) {
    let begin = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.args(["launch", "-n", "3", "--nodes", "3", "--timeout", "100", "--", "sh", "-c", RANK, "sh"]);
    command.arg(&*PROGRAM).arg(row).stdin(Stdio::null());
    command.env("LD_LIBRARY_PATH", built::library_dir()).env("STRATA_MPI_PLUGIN", &*PLUGIN);
    command.env("STRATA_INTER", "mpi").env("STRATA_TIMEOUT_MS", "90000").env("STRATA_BOOTSTRAP_TIMEOUT_MS", "90000");
    command.env("ENDS_RANK", "1").env("ENDS_IN", call).env("ENDS_HOW", how).env("ENDS_OTHERS", others);
    if call == "collective" {
        command.env("STRATA_PROVIDERS", "mpi").env("STRATA_ALLREDUCE_ALGO", "provider:mpi");
        // This MPI carries no messages, by which ranks would make sure of the call first.
        command.env("STRATA_PROVIDER_CHECK", "0");
    }
    let output = command.output().expect("the command starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{row}, {how} in {call}: {}\n{said}", output.status);
    assert!(begin.elapsed() < SECONDS, "{row}, {how} in {call}: {:?}\n{said}", begin.elapsed());
    let status = |rank: usize| {
        let start = format!("rank {rank}: ");
        let line = said.lines().find_map(|line| line.strip_prefix(&start));
        line.and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{row}, {how} in {call}: {said}"))
    };
    ((0..3).map(status).collect(), said)
}

/// Whether this is the status of a shell whose program was ended as this says.
fn ended(status: i32, how: &str) -> bool {
    match how {
        "abort" => status == 128 + 6,
        // Two threads may end the process, MPI's and the program's, whose call has failed; either status may be the one.
        _ => [7, 1].contains(&status),
    }
}

#[test]
fn a_process_that_mpi_ends_at_the_start_ends_and_the_others_fail() {
    for call in ["look", "init", "meet", "create"] {
        for how in ["exit", "abort", "thread"] {
            let statuses = statuses("allreduce", call, how);
            assert!(ended(statuses[1], how), "{how} in {call}: {statuses:?}");
            assert!(statuses[0] != 0 && statuses[2] != 0, "{how} in {call}: {statuses:?}");
        }
    }
}

/// As it is with MPIs: a rank that has gone, or has no way to the others, leaves these in calls that never return.
#[test]
fn ranks_that_wait_in_mpi_for_one_that_has_ended_fail_with_its_name() {
    for (call, how) in [("init", "exit"), ("init", "abort"), ("meet", "thread"), ("create", "exit")] {
        let (statuses, said) = outcome("allreduce", call, how, "wait");
        assert!(ended(statuses[1], how), "{how} in {call}: {statuses:?}\n{said}");
        assert!(statuses[0] != 0 && statuses[2] != 0, "{how} in {call}: {statuses:?}\n{said}");
        assert!(said.contains("rank 1 ("), "{how} in {call}: {said}");
    }
}

#[test]
fn ranks_that_wait_in_mpi_for_one_where_it_has_failed_learn_why() {
    for call in ["meet", "create"] {
        let (statuses, said) = outcome("allreduce", call, "error", "wait");
        assert!(statuses.iter().all(|&status| status != 0), "{call}: {statuses:?}\n{said}");
        assert!(said.contains("rank 1: MPI_") && said.contains("error 1 (MPI error 1)"), "{call}: {said}");
    }
    // Nothing has gone over MPI yet, so TCP does.
    let (statuses, said) = outcome("allreduce", "init", "error", "wait");
    assert_eq!(statuses, [0; 3], "{said}");
    let told = "TCP carries messages between nodes, not MPI: rank 1: MPI_Init_thread: error 1";
    assert!(said.contains(told), "{said}");
}

#[test]
fn a_process_that_mpi_ends_in_an_operation_ends_and_the_others_fail() {
    for call in ["isend", "irecv", "test", "collective"] {
        for how in ["exit", "abort", "thread"] {
            let statuses = statuses("one_aborts", call, how);
            assert!(ended(statuses[1], how), "{how} in {call}: {statuses:?}");
            assert!(statuses[0] != 0 && statuses[2] != 0, "{how} in {call}: {statuses:?}");
        }
    }
}

#[test]
fn a_process_that_mpi_ends_at_its_end_ends_and_nobody_else_fails() {
    for call in ["free", "barrier", "finalize"] {
        for how in ["exit", "abort", "thread"] {
            let statuses = statuses("nothing", call, how);
            assert_eq!((statuses[0], statuses[2]), (0, 0), "{how} in {call}: {statuses:?}");
            // The program's own end may come first.
            let ended_well = statuses[1] == 0 && how != "abort";
            assert!(ended_well || ended(statuses[1], how), "{how} in {call}: {statuses:?}");
        }
    }
}
