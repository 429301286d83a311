//! Finds out which MPI the plugin is built for. With the standard ABI it is for all, and no MPI need be there.

use std::io::Write;
use std::process::{Command, Stdio};

/// What a compiler wrapper would call: `gcc -I... -L... -lmpi`.
fn shown(mpicc: &str) -> Vec<String> {
    let output = Command::new(mpicc).arg("-show").output();
    let output = output.unwrap_or_else(|error| panic!("{mpicc} -show: {error}"));
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_string).collect()
}

/// The name and major version of an MPI, and its `MPI_IN_PLACE` as a number, from the macros of its header. Not by the wrapper
/// itself: Open MPI's leaves its options out when it only preprocesses.
fn flavour(shown: &[String]) -> Option<(String, isize)> {
    let mut child = Command::new(shown.first()?)
        .args(shown.iter().filter(|word| word.starts_with("-I")))
        .args(["-E", "-P", "-xc", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    child.stdin.take()?.write_all(b"#include <mpi.h>\n@ OMPI_MAJOR_VERSION MPICH_VERSION MPI_IN_PLACE\n").ok()?;
    let output = child.wait_with_output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().rev().find_map(|line| line.strip_prefix('@'))?;
    let mut words = line.split_whitespace();
    let name = match (words.next()?, words.next()?) {
        ("OMPI_MAJOR_VERSION", "MPICH_VERSION") => return None,
        ("OMPI_MAJOR_VERSION", version) => {
            format!("MPICH {}", version.trim_matches('"').split('.').next().unwrap_or_default())
        }
        (major, _) => format!("Open MPI {major}"),
    };
    // `((void *) 1)` or `(void *) -1`
    let number: String = words.flat_map(str::chars).filter(|c| c.is_ascii_digit() || *c == '-').collect();
    Some((name, number.parse().ok()?))
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
    let (name, in_place) = match flavour {
        Some(found) => found,
        None if abi => Default::default(),
        None => panic!("the header of this MPI has neither Open MPI's nor MPICH's name and MPI_IN_PLACE"),
    };
    println!("cargo:rustc-env=STRATA_MPI_FLAVOUR={name}");
    println!("cargo:rustc-env=STRATA_MPI_IN_PLACE={in_place}");
}
