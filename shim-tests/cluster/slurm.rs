//! Ranks that Slurm starts, on nodes of 1, 3 and 2 ranks of a cluster of network namespaces: what it tells them is enough.
//!
//! Where there is no Slurm, no MPI, or namespaces may not be created, each test says `SKIPPED: why`.

use crate::built::{self, checked};
use crate::netns::script;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs `srun` with these options; what was said.
fn srun(options: &[&str], line: &[&str], variables: &[(&str, &str)]) -> Option<String> {
    let mut command = Command::new(script());
    let name = format!("slurm-{}-{}", std::process::id(), options.join("").replace(['=', '-'], ""));
    command.args(["with", "--name", &name, "--slurm", "--nodes", "3", "--nics", "1", "--ranks", "1,3,2", "--"]);
    command.args(["timeout", "150", "srun", "-N", "3", "-n", "6"]).args(options).args(line);
    command.envs(variables.iter().copied()).env("NCCL_DEBUG", "INFO").stdin(Stdio::null());
    let output = command.output().expect("the script starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) {
        println!("SKIPPED: {}", said.trim());
        return None;
    }
    assert!(output.status.success(), "{}\n{said}", output.status);
    Some(said)
}

/// The measurement of a collective, with results checked.
fn perf(options: &[&str], collective: &str, variables: &[(&str, &str)]) -> Option<String> {
    let (library, sizes) = (built::library(), ["-b", "8", "-e", "2M", "-f", "64", "-n", "2", "-w", "1", "-c", "1"]);
    let line = [env!("CARGO_BIN_EXE_strata"), "perf", collective, "--library", library.to_str().expect("a path")];
    let said = srun(options, &[&line[..], &sizes].concat(), variables)?;
    assert!(said.contains("# Out of bounds values : 0 OK"), "{said}");
    assert!(said.contains("6 ranks in 6 processes"), "{said}");
    Some(said)
}

#[test]
fn a_step_without_mpi_is_served_over_tcp_on_uneven_nodes() {
    for collective in ["all_reduce", "all_gather", "reduce_scatter"] {
        let Some(said) = perf(&["--mpi=none"], collective, &[("STRATA_INTER", "tcp")]) else { return };
        // Nodes are known by what Slurm says, before anything is exchanged.
        assert!(said.contains("3 nodes"), "{said}");
    }
}

#[test]
fn a_step_with_pmix_is_served_over_mpi_on_uneven_nodes() {
    let mpicc = std::env::var("STRATA_TEST_MPICC").unwrap_or("mpicc.openmpi".to_string());
    if Command::new(&mpicc).arg("-show").output().is_err() {
        println!("SKIPPED: there is no {mpicc}, whose ranks Slurm starts by PMIx");
        return;
    }
    let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("slurm_mpi-{}.so", std::process::id()));
    let build = built::root().join("scripts/build-mpi");
    checked(Command::new(build).args(["--mpicc", &mpicc, "--out"]).arg(&plugin));
    for collective in ["all_reduce", "all_gather", "reduce_scatter"] {
        let plugin = plugin.to_str().expect("a path");
        let variables = [("STRATA_INTER", "mpi"), ("STRATA_MPI_PLUGIN", plugin)];
        let Some(said) = perf(&["--mpi=pmix"], collective, &variables) else { return };
        assert!(said.contains("MPI carries messages between nodes"), "{said}");
    }
    std::fs::remove_file(plugin).expect("the plugin can be removed");
}
