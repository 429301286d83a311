//! Random programs over the whole C interface, by seed (`programs/`), with and without faults: a sample for every day, of
//! which `scripts/campaign` runs as many as there is time for.

use crate::built;
use crate::soft;
use crate::vendor;
use rustix::fs::{flock, FlockOperation};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

/// Held by the test that runs programs: their ranks are many for one machine.
static ALONE: Mutex<()> = Mutex::new(());

/// The tester, built once.
fn tester() -> &'static Path {
    static TESTER: OnceLock<PathBuf> = OnceLock::new();
    TESTER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let target = root.join("target/programs");
        std::fs::create_dir_all(&target).unwrap();
        let lock = File::create(target.join("lock")).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked", "--manifest-path"]);
        cargo.arg(root.join("shim-tests/programs/Cargo.toml")).arg("--target-dir").arg(&target);
        assert!(cargo.status().unwrap().success(), "{cargo:?}");
        target.join("debug/programs")
    })
}

/// Runs the tester against the library that cargo built.
fn programs(command: &str, arguments: &[&str]) -> Command {
    let mut programs = Command::new(tester());
    programs.arg(command).arg("--library").arg(built::library()).args(arguments);
    programs
}

fn run(command: &mut Command) -> (Output, String) {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    (output, said)
}

/// Runs the programs of many seeds, of which none may fail.
fn all_pass(arguments: &[&str]) {
    let mut command = programs("many", &[&["--jobs", "2"], arguments].concat());
    let (output, said) = run(&mut command);
    if output.status.code() == Some(2) && said.contains("no namespace can be made") {
        return println!("SKIPPED: {}: no namespace can be made on this machine", arguments.join(" "));
    }
    assert!(output.status.success() && said.contains(" passed, 0 failed"), "{command:?}: {}\n{said}", output.status);
    assert!(!said.contains("\n0 passed"), "nothing ran");
}

#[test]
fn programs_over_shared_memory_are_as_the_model_has_them() {
    all_pass(&["--carrier", "shm", "--from", "1", "--count", "80", "--seconds", "8"]);
}

#[test]
fn programs_over_tcp_are_as_the_model_has_them() {
    all_pass(&["--carrier", "tcp", "--from", "1", "--count", "100", "--seconds", "7"]);
}

#[test]
fn faults_are_told_and_survivors_go_on() {
    let kinds = ["kill", "exit", "exit-now", "pause", "freeze", "descriptors", "memory", "small-shm", "slow", "glitch"];
    for kind in kinds {
        all_pass(&["--faults", "--fault", kind, "--from", "1", "--count", "6", "--seconds", "2"]);
    }
}

#[test]
fn survivors_of_a_cut_network_hold_nothing() {
    all_pass(&["--faults", "--fault", "cut", "--from", "1", "--count", "5", "--seconds", "120"]);
}

#[test]
fn programs_in_front_of_a_vendor_are_as_the_model_has_them() {
    let library = vendor::NCCL.library();
    let vendor = ["--carrier", "vendor", "--vendor", library.to_str().unwrap()];
    all_pass(&[&vendor[..], &["--from", "1", "--count", "30", "--seconds", "7"]].concat());
}

#[test]
fn programs_on_soft_gpus_are_as_the_model_has_them() {
    let driver = soft::cuda_dir();
    let soft = ["--carrier", "softgpu", "--driver", driver.to_str().unwrap()];
    all_pass(&[&soft[..], &["--from", "1", "--count", "20", "--seconds", "8"]].concat());
}

#[test]
fn programs_over_mpi_are_as_the_model_has_them() {
    let told = |program: &str| {
        let output = Command::new(program).arg("--version").output().ok().filter(|output| output.status.success());
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (Some(_), Some(launcher)) = (told("mpicc"), told("mpiexec")) else {
        println!("SKIPPED: there is no mpicc with an mpiexec, so no programs run over MPI");
        return;
    };
    let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("strata_mpi-programs-{}.so", std::process::id()));
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/build-mpi");
    let built = Command::new(build).arg("--out").arg(&plugin).output().unwrap();
    assert!(built.status.success(), "scripts/build-mpi: {}", String::from_utf8_lossy(&built.stderr));
    let mut arguments = vec!["--carrier", "mpi", "--mpi-plugin", plugin.to_str().unwrap()];
    if launcher.contains("Open MPI") || launcher.contains("OpenRTE") {
        arguments.push("--mpi-option=--oversubscribe");
    }
    all_pass(&[&arguments[..], &["--from", "1", "--count", "20", "--seconds", "8"]].concat());
    std::fs::remove_file(plugin).unwrap();
}

/// Builds the vendor's double, and says where it is, for `scripts/campaign`.
#[test]
fn what_vendor_needs() {
    println!("\nbuilt: {}", vendor::NCCL.library().display());
}

/// The same for the soft GPU.
#[test]
fn what_softgpu_needs() {
    println!("\nbuilt: {}", soft::cuda_dir().display());
}

/// A tester that finds nothing may be blind: a byte behind a buffer is changed, which it must notice.
#[test]
fn a_byte_too_many_is_noticed() {
    let mut command = programs("run", &["--seed", "2"]);
    let (output, said) = run(command.env("PROGRAMS_SPOIL", "1"));
    assert!(!output.status.success() && said.contains("outside of the output was written"), "{said}");
}

/// The program of a seed as C compiles.
#[test]
fn a_program_is_printed_as_c() {
    for seed in ["1", "2", "3"] {
        let (output, _) = run(&mut programs("print", &["--seed", seed, "--c"]));
        let text = String::from_utf8(output.stdout).unwrap();
        let strict = ["-std=gnu11", "-Wall", "-Werror", "-DSTRATA_NO_CUDA", "-fsyntax-only"];
        built::Compiler::new("c").compile(&text, &strict);
    }
}
