//! The soft GPU by itself: what is not synchronised goes wrong with it, and what is does not.
//!
//! The scenarios are in `c/softgpu.c`; each runs in a process of its own.

use crate::built::{checked, Compiler};
use crate::soft;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Compiles a program against a library of the double.
fn compiled(source: &str, dir: &Path, library: &str) -> PathBuf {
    let headers = soft::header_dir();
    let strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I", headers.to_str().unwrap()];
    let linked = ["-L", dir.to_str().unwrap(), library];
    Compiler::new("c").without_headers().compile(source, &[&strict[..], &linked].concat())
}

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled(include_str!("../c/softgpu.c"), &soft::cuda_dir(), "-lcuda"))
}

fn scenario(name: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program());
    command.arg(name).env("LD_LIBRARY_PATH", soft::cuda_dir()).envs(variables.iter().copied());
    command
}

fn output(name: &str, variables: &[(&str, &str)]) -> String {
    checked(&mut scenario(name, variables)).trim_end().to_string()
}

#[test]
fn it_exports_the_driver_s_functions_and_no_others() {
    let check = |library: PathBuf, prefixes: &[&str]| {
        let listing = checked(Command::new("nm").args(["-D", "--defined-only"]).arg(library));
        let names: Vec<&str> = listing.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
        for name in &names {
            assert!(prefixes.iter().any(|prefix| name.starts_with(prefix)), "{name}");
        }
        names.len()
    };
    assert!(check(soft::cuda_dir().join("libcuda.so.1"), &["cu", "nvml", "softgpu"]) >= 80);
    assert!(check(soft::hip_dir().join("libamdhip64.so.6"), &["hip", "softgpu"]) >= 80);
}

#[test]
fn the_host_cannot_touch_device_memory_or_freed_memory() {
    for name in ["load", "store", "freed"] {
        let status = scenario(name, &[]).stdout(Stdio::null()).status().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "{name}: {status}");
    }
    output("fresh", &[]);
}

#[test]
fn what_is_not_waited_for_is_not_there() {
    assert_eq!(output("unfinished", &[]), "wrong without waiting, right after it");
    assert_eq!(output("sources", &[]), "pinned late, pageable in time");
}

#[test]
fn streams_run_in_any_order_that_events_allow() {
    assert_eq!(output("orders", &[]), "free: any order, held: one order");
}

const SYNCHRONISATIONS: [&str; 6] = [
    "cuStreamWaitEvent",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamWaitValue32_v2",
    "strata_wait",
];

#[test]
fn each_synchronisation_holds_and_leaving_it_out_is_noticed() {
    assert_eq!(output("pipeline", &[("HOW", "not at all")]), "wrong");
    for how in SYNCHRONISATIONS {
        assert_eq!(output("pipeline", &[("HOW", how)]), "right", "{how}");
        assert_eq!(output("pipeline", &[("HOW", how), ("SOFTGPU_BREAK", how)]), "wrong", "{how} broken");
    }
}

#[test]
fn a_stream_waits_for_a_word() {
    output("words", &[]);
}

#[test]
fn the_legacy_stream_synchronises_with_blocking_streams_only() {
    assert_eq!(output("legacy", &[]), "blocking right, non-blocking wrong, per thread wrong");
}

#[test]
fn memory_ends() {
    output("memory", &[("SOFTGPU_MEMORY_BYTES", "1048576"), ("SOFTGPU_PINNED_BYTES", "1024")]);
}

#[test]
fn kernels_compute_what_the_host_device_computes() {
    output("kernels", &[]);
    output("kernels", &[("SOFTGPU_EAGER", "1")]);
}

#[test]
fn kernels_reach_their_device_and_pinned_memory_only() {
    for what in ["pageable", "range", "freed", "foreign", "jobs"] {
        output("forbidden", &[("HOW", what)]);
    }
}

#[test]
fn the_ptx_that_a_program_loads_is_run() {
    let folder = crate::built::root().join("kernels/ptx");
    let variables = [("SOFTGPU_PTX", "1"), ("PTX", folder.to_str().unwrap())];
    output("kernels", &variables);
    output("words", &variables);
    for what in ["pageable", "range", "freed", "foreign"] {
        output("forbidden", &[&variables[..], &[("HOW", what)]].concat());
    }
    for how in ["strata_wait", "cuStreamWaitEvent"] {
        let variables = [&variables[..], &[("HOW", how)]].concat();
        assert_eq!(output("pipeline", &variables), "right", "{how}");
        assert_eq!(output("pipeline", &[&variables[..], &[("SOFTGPU_BREAK", how)]].concat()), "wrong", "{how} broken");
    }
}

#[test]
fn ptx_that_cannot_be_run_is_told_with_its_line() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ptx.{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let text = std::fs::read_to_string(crate::built::root().join("kernels/ptx/move.ptx")).unwrap();
    std::fs::write(folder.join("move.ptx"), text.replacen("membar.sys;", "bar.sync 0;", 1)).unwrap();
    let mut command = scenario("kernels", &[("SOFTGPU_PTX", "1"), ("PTX", folder.to_str().unwrap())]);
    let output = command.output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("PTX that cannot be run: line ") && said.contains("bar.sync: is not known"), "{said}");
}

#[test]
fn captured_work_runs_when_its_graph_is_launched() {
    output("capture", &[]);
    output("spoilt", &[]);
}

#[test]
fn a_destroyed_context_answers_so_and_nothing_hangs() {
    output("destroyed", &[]);
}

#[test]
fn counts_go_back_to_zero() {
    let counts = output("counts", &[]);
    assert_eq!(counts, "1 100 2 1 1 1 1 2\n0 0 0 0 0 0 1 2");
}

#[test]
fn pointers_and_devices_are_known() {
    output("pointers", &[("SOFTGPU_DEVICES", "3"), ("SOFTGPU_ABSENT", "cuStreamWaitValue32_v2")]);
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    output("host_functions", &[]);
}

#[test]
fn it_is_hip_too() {
    let dir = soft::hip_dir();
    let program = compiled(include_str!("../c/softgpu_hip.c"), &dir, "-lamdhip64");
    let output = checked(Command::new(&program).env("LD_LIBRARY_PATH", &dir));
    std::fs::remove_file(program).unwrap();
    assert_eq!(output, "wrong early, right late\n0 0 0 1 0 1\n0 0 0 0 0 0\n");
}
