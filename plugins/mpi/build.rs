//! Finds out which MPI the plugin is built for. With the standard ABI it is for all, and no MPI need be there.

use std::io::Write;
use std::process::{Command, Stdio};

/// What a compiler wrapper would call: `gcc -I... -L... -lmpi`.
fn shown(mpicc: &str) -> Vec<String> {
    let output = Command::new(mpicc).arg("-show").output();
    let output = output.unwrap_or_else(|error| panic!("{mpicc} -show: {error}"));
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_string).collect()
}

/// The name and major version of an MPI, from the macros of its header. Not by the wrapper itself: Open MPI's leaves its
/// options out when it only preprocesses.
fn flavour(shown: &[String]) -> Option<String> {
    let mut child = Command::new(shown.first()?)
        .args(shown.iter().filter(|word| word.starts_with("-I")))
        .args(["-E", "-P", "-xc", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    child.stdin.take()?.write_all(b"#include <mpi.h>\n@ OMPI_MAJOR_VERSION MPICH_VERSION\n").ok()?;
    let output = child.wait_with_output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().rev().find_map(|line| line.strip_prefix('@'))?;
    let mut words = line.split_whitespace();
    match (words.next()?, words.next()?) {
        ("OMPI_MAJOR_VERSION", "MPICH_VERSION") => None,
        ("OMPI_MAJOR_VERSION", version) => {
            Some(format!("MPICH {}", version.trim_matches('"').split('.').next().unwrap_or_default()))
        }
        (major, _) => Some(format!("Open MPI {major}")),
    }
}

fn main() {
    println!("cargo:rerun-if-env-changed=MPICC");
    let abi = std::env::var_os("CARGO_FEATURE_ABI").is_some();
    let shown = match std::env::var("MPICC") {
        Err(_) if abi => Vec::new(),
        mpicc => shown(&mpicc.unwrap_or_else(|_| "mpicc".to_string())),
    };
    // Where the wrapper would tell a program to look for MPI at run time.
    for option in shown.iter().filter(|word| word.starts_with("-Wl,")) {
        println!("cargo:rustc-cdylib-link-arg={option}");
    }
    let flavour = if abi { None } else { flavour(&shown) };
    println!("cargo:rustc-env=STRATA_MPI_FLAVOUR={}", flavour.unwrap_or_default());
}
