//! Communicators with TCP and MPI side by side: calls choose.

use super::{alone, built, mpi};
use std::path::Path;

const BOTH: (&str, &str) = ("STRATA_CARRIERS", "tcp,mpi");

#[test]
fn opposite_orders_over_tcp_and_mpi_do_not_hang_and_results_are_right() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let program = mpi.compile("carriers", &[]);
    for ranks in [2, 4] {
        let said = mpi.run(ranks, "exec \"$@\"", &[program.to_str().unwrap(), "100"], &[BOTH]);
        assert!(said.contains("100 programs in opposite orders went well"), "{said}");
        assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn every_collective_is_right_over_the_carrier_that_the_environment_names() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for (collective, variable) in [
        ("all_reduce", "STRATA_ALLREDUCE_ALGO"),
        ("alltoall", "STRATA_ALLTOALL_ALGO"),
        ("broadcast", "STRATA_BROADCAST_ALGO"),
    ] {
        let arguments = [collective, "-b", "8", "-e", "2M", "-f", "64", "-n", "2", "-w", "1", "-c", "1"];
        let said = mpi.perf(4, &arguments, &[BOTH, (variable, "@mpi")]);
        assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
    }
}

#[test]
fn a_plugin_that_is_not_there_leaves_the_carrier_out_with_one_line_or_refuses_where_it_is_required() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let call = ["all_reduce", "-b", "8", "-e", "8", "-n", "1"];
    let none = ("STRATA_MPI_PLUGIN", "/nonexistent/plugin.so");
    let said = mpi.perf(3, &call, &[BOTH, none, ("NCCL_DEBUG", "")]);
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("mpi is left out")).collect();
    assert!(matches!(lines[..], [line] if line.contains("/nonexistent/plugin.so")), "{said}");
    let library = built::library();
    let line = [env!("CARGO_BIN_EXE_strata"), "perf", "--library", library.to_str().unwrap()];
    let script = "\"$@\" && exit 1; exit 0";
    let required = ("STRATA_CARRIERS", "tcp,mpi!");
    let said = mpi.run(3, script, &[&line[..], &call].concat(), &[required, none]);
    assert!(said.contains("STRATA_CARRIERS=tcp,mpi!: mpi cannot carry messages between these nodes: "), "{said}");
}

/// Both are tried in one run, and a table that has carriers in its rows is followed.
#[test]
fn a_tuning_run_tries_both_carriers_and_its_table_is_followed() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let library = built::library();
    let table = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("carriers-{}.toml", std::process::id()));
    let _ = std::fs::remove_file(&table);
    let (strata, library, table) = (env!("CARGO_BIN_EXE_strata"), library.to_str().unwrap(), table.to_str().unwrap());
    let line = [strata, "tune", "--library", library, "--collectives", "broadcast", "--sizes", "64K", "--budget", "20"];
    let said = mpi.run(3, "exec \"$@\"", &[&line[..], &["--output", table]].concat(), &[BOTH]);
    let written = std::fs::read_to_string(table).unwrap_or_else(|error| panic!("{error}\n{said}"));
    for tried in ["tree\"", "tree@mpi\""] {
        assert!(written.contains(&format!("{{ algorithm = \"{tried}")), "{written}");
    }
    // Whichever was the faster one: its row, with the other carrier in its place.
    let (head, row) = written.split_once("[[row]]").unwrap();
    let head = head.replace("format = 1", "format = 2");
    let fields: Vec<&str> = row.lines().take_while(|line| !line.starts_with("measured")).collect();
    let fields: Vec<&str> = fields.into_iter().filter(|line| !line.starts_with("carrier")).collect();
    std::fs::write(table, format!("{head}[[row]]{}\ncarrier = \"mpi\"\n", fields.join("\n"))).unwrap();
    let call = ["broadcast", "-b", "64K", "-e", "64K", "-n", "1", "-c", "1"];
    let follows = ("STRATA_TUNING_TABLE", table);
    let said = mpi.perf(3, &call, &[BOTH, follows]);
    assert!(!said.contains("left out"), "{said}");
    // Without the carrier the row has no say, and that is told.
    let said = mpi.perf(3, &call, &[("STRATA_CARRIERS", "tcp"), follows]);
    assert!(said.contains("1 row left out: this communicator has no carrier mpi but tcp"), "{said}");
    std::fs::remove_file(table).unwrap();
}
