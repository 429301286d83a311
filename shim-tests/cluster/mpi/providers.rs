//! MPI's own collectives as a provider.

use super::{alone, built, mpi, soft, Mpi, LIMIT};
use std::path::PathBuf;
use std::time::Instant;

const MPI_TOO: (&str, &str) = ("STRATA_PROVIDERS", "mpi");
/// MPI has each call at once.
const UNCHECKED: (&str, &str) = ("STRATA_PROVIDER_CHECK", "0");

/// The settings of collectives whose blocks may differ in size.
const VECTORED: [&str; 5] = [
    "STRATA_ALLGATHER_ALGO",
    "STRATA_REDUCESCATTER_ALGO",
    "STRATA_ALLTOALL_ALGO",
    "STRATA_GATHER_ALGO",
    "STRATA_SCATTER_ALGO",
];

/// The program that compares, with the library and without MPI.
fn program() -> PathBuf {
    compiled("providers")
}

/// A program of `shim-tests/c`, with the library and without MPI.
fn compiled(name: &str) -> PathBuf {
    let source = built::root().join(format!("shim-tests/c/{name}.c"));
    let number = format!("provided-{name}-{}", std::process::id());
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(number);
    let mut command = std::process::Command::new("cc");
    command.arg(source).args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"]).arg(built::header_dir());
    command.arg("-L").arg(built::library_dir()).args(["-lnccl", "-ldl", "-o"]).arg(&program);
    built::checked(&mut command);
    program
}

fn run(mpi: &Mpi, n: usize, what: &str, vars: &[(&str, &str)]) -> String {
    let program = program();
    mpi.run(n, "exec \"$@\"", &[program.to_str().unwrap(), "mpi", what], vars)
}

/// What ranks say of which MPI may not be finalised, which launchers take for a failure: what they say counts.
fn said_by(mpi: &Mpi, n: usize, script: &str, vars: &[(&str, &str)]) -> String {
    let job = mpi.start(n, &[], script, &[program().to_str().unwrap()], vars);
    let end = Instant::now() + LIMIT;
    let next = || job.lines.recv_timeout(end.saturating_duration_since(Instant::now())).ok();
    let said = std::iter::from_fn(next).collect::<Vec<String>>().join("\n");
    assert!(Instant::now() < end, "{said}");
    said
}

/// Where each rank has a soft GPU of this driver, on which its data is.
fn on_gpus(driver: &'static str) -> [(&'static str, String); 3] {
    let dir = if driver == "hip" { soft::hip_dir() } else { soft::cuda_dir() };
    let path = std::env::join_paths([built::library_dir(), dir]).unwrap().into_string().unwrap();
    [("LD_LIBRARY_PATH", path), ("SOFT_DEVICE", driver.to_string()), ("SOFTGPU_EAGER", "1".to_string())]
}

/// What MPI does, on copies of what is on GPUs; a dead rank does not hold up those who wait for its part.
#[test]
fn on_gpus_every_collective_type_and_operation_is_right_and_a_rank_that_does_not_come_is_told() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for (driver, n, inter) in [("cuda", 4, "tcp"), ("hip", 3, "mpi")] {
        let place = on_gpus(driver);
        let place = place.each_ref().map(|(name, value)| (*name, value.as_str()));
        for (what, done) in [("all", "calls by provider:mpi went well"), ("comms", "in opposite orders went well")] {
            let said = run(mpi, n, what, &[&place[..], &[MPI_TOO, ("STRATA_INTER", inter)]].concat());
            assert!(said.contains(done), "{driver}\n{said}");
            assert!(said.contains("-> provider:mpi, 1 segment"), "{driver}: it was not used\n{said}");
        }
        one_does_not_come(mpi, "idle", &[&place[..], &[UNCHECKED]].concat(), "provider mpi has not completed it");
    }
}

#[test]
fn every_collective_type_and_operation_is_right_beside_each_carrier() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for (n, inter) in [(4, "tcp"), (3, "mpi")] {
        let said = run(mpi, n, "all", &[MPI_TOO, ("STRATA_INTER", inter)]);
        assert!(said.contains("calls by provider:mpi went well"), "{said}");
        assert!(said.contains("-> provider:mpi, 1 segment"), "it was not used\n{said}");
    }
}

#[test]
fn communicators_in_opposite_orders_do_not_hang_and_end_in_any_order() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for n in [2, 4] {
        let said = run(mpi, n, "comms", &[MPI_TOO]);
        assert!(said.contains("3 communicators in opposite orders went well"), "{said}");
        assert!(!said.contains("MPI was not finalised"), "it was, by the first of two handlers\n{said}");
    }
}

#[test]
fn settings_choose_it_for_every_collective_and_long_messages_are_right() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for (collective, variable) in [
        ("all_reduce", "STRATA_ALLREDUCE_ALGO"),
        ("all_gather", "STRATA_ALLGATHER_ALGO"),
        ("reduce_scatter", "STRATA_REDUCESCATTER_ALGO"),
        ("broadcast", "STRATA_BROADCAST_ALGO"),
        ("reduce", "STRATA_REDUCE_ALGO"),
        ("alltoall", "STRATA_ALLTOALL_ALGO"),
        ("gather", "STRATA_GATHER_ALGO"),
        ("scatter", "STRATA_SCATTER_ALGO"),
    ] {
        let arguments = [collective, "-b", "8", "-e", "8M", "-f", "32", "-n", "2", "-w", "1", "-c", "1"];
        let said = mpi.perf(3, &arguments, &[MPI_TOO, (variable, "provider:mpi")]);
        assert!(said.contains("-> provider:mpi"), "it was not used\n{said}");
    }
}

#[test]
fn blocks_of_different_sizes_arrive_by_mpi_s_own_collectives_of_such() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let by_mpi = VECTORED.map(|variable| (variable, "provider:mpi"));
    let (vectored, groups) = (compiled("vectored"), compiled("groups"));
    for (n, inter, [from, to]) in
        [(4, "tcp", ["7000", "7080"]), (3, "mpi", ["7100", "7160"]), (2, "tcp", ["7300", "7340"])]
    {
        let vars = [&[MPI_TOO, ("STRATA_INTER", inter)], &by_mpi[..]].concat();
        let said = mpi.run(n, "exec \"$@\"", &[vectored.to_str().unwrap(), "launched", from, to], &vars);
        let by: Vec<&str> = said.lines().filter(|line| line.contains("-> provider:mpi, 1 segment")).collect();
        for collective in ["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"] {
            assert!(by.iter().any(|line| line.contains(&format!(" {collective}: "))), "{collective}\n{said}");
        }
    }
    // Broadcasts with several roots become such an all-gather, and reduces such a reduce-scatter.
    let vars = [&[MPI_TOO], &by_mpi[..]].concat();
    let said = mpi.run(4, "exec \"$@\"", &[groups.to_str().unwrap(), "launched", "7200", "7230"], &vars);
    assert!(said.contains("-> provider:mpi"), "{said}");
    [vectored, groups].iter().for_each(|program| std::fs::remove_file(program).unwrap());
}

/// More than MPI counts, on one rank only: all fail, in time.
#[test]
fn blocks_of_different_sizes_beyond_mpi_s_counts_fail_on_all_ranks_with_the_reason() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let vars = [MPI_TOO, ("STRATA_TIMEOUT_MS", "60000"), ("STRATA_INTER", "tcp")];
    let said = said_by(mpi, 3, "exec \"$1\" mpi much", &vars);
    assert_eq!(said.lines().filter(|line| line.contains(": error ")).count(), 3, "{said}");
    assert!(said.contains("rank 0 has 3221225472 bytes, and 2147483647 are the most that it takes"), "{said}");
}

#[test]
fn without_a_plugin_it_is_left_out_with_one_line_and_calls_that_name_it_are_refused() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let none = ("STRATA_MPI_PLUGIN", "/nonexistent/plugin.so");
    let said = run(mpi, 3, "once", &[MPI_TOO, none, ("STRATA_INTER", "tcp"), ("NCCL_DEBUG", "")]);
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("provider:mpi is left out")).collect();
    assert!(matches!(lines[..], [line] if line.contains("/nonexistent/plugin.so")), "{said}");
    assert_eq!(said.lines().filter(|line| line.contains("provider mpi was left out")).count(), 3, "{said}");
}

/// A rank that ends in the midst: MPI's call never ends, the others are told, and nobody hangs.
#[test]
fn a_rank_that_does_not_come_fails_the_others_in_time_and_the_error_names_the_provider() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    one_does_not_come(mpi, "idle", &[UNCHECKED], "provider mpi has not completed it");
    one_does_not_come(mpi, "idle", &[], "rank 2 is alive but has not joined operation 1");
}

/// What a rank does to leave is no part of the others' call, which would have a result without it.
#[test]
fn a_rank_that_has_left_in_order_fails_the_others_call() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    one_does_not_come(mpi, "left", &[UNCHECKED], "rank 2 has left");
    one_does_not_come(mpi, "left", &[], "has left");
}

/// MPI would give some ranks wrong data, and no error.
#[test]
fn a_call_that_one_rank_makes_otherwise_fails_on_all_ranks_before_mpi_has_it() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for (n, inter, seeds) in [(4, "tcp", "0 16"), (3, "mpi", "100 116"), (2, "tcp", "200 208")] {
        let said = said_by(mpi, n, &format!("exec \"$1\" mpi differ {seeds}"), &[MPI_TOO, ("STRATA_INTER", inter)]);
        assert!(said.contains("calls that differ failed on all ranks"), "{said}");
    }
}

/// Where no rank knows all sizes: MPI has no error for fewer elements than are expected. It is used afterwards, so it has not had the call.
#[test]
fn sizes_that_two_ranks_know_differently_fail_on_all_ranks_before_mpi_has_the_call() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for (n, inter, seeds) in [(4, "tcp", "0 16"), (3, "mpi", "100 116")] {
        let said = said_by(mpi, n, &format!("exec \"$1\" mpi sizes {seeds}"), &[MPI_TOO, ("STRATA_INTER", inter)]);
        assert!(said.contains("of which ranks know different sizes failed on all ranks"), "{said}");
        assert!(said.contains("which expects ") && said.contains("not the same on all ranks"), "{said}");
    }
}

/// The last one of three ranks does something else, and the others' calls fail with these words.
fn one_does_not_come(mpi: &Mpi, instead: &str, place: &[(&str, &str)], words: &str) {
    let script = format!("if [ $RANK = 2 ]; then exec \"$1\" mpi {instead}; fi; exec \"$1\" mpi once");
    let vars = [place, &[MPI_TOO, ("STRATA_TIMEOUT_MS", "3000"), ("STRATA_INTER", "tcp")]].concat();
    let said = said_by(mpi, 3, &script, &vars);
    let errors: Vec<&str> = said.lines().filter(|line| line.contains(": error ")).collect();
    assert!(errors.len() == 2 && errors.iter().any(|line| line.contains(words)), "{said}");
}
