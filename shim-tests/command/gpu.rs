//! `strata gpu` and `scripts/gpu-check` on soft GPUs: what is right passes, what is broken is told, and what is not there is
//! told in words. That of a GPU which only one can show, bits above all, is `scripts/gpu-check`'s to show.

use crate::built::{self, root};
use crate::soft;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(200);

/// Runs a command to its end; one that hangs is ended, with the processes of its group.
fn output(command: &mut Command) -> Output {
    use std::os::unix::process::CommandExt;
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let child = child.spawn().expect("the command starts");
    let group = rustix::process::Pid::from_raw(child.id() as i32).expect("a process has a number");
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if wait.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    });
    let start = Instant::now();
    let output = child.wait_with_output().expect("the command ends");
    drop(done);
    watchdog.join().expect("the watchdog");
    assert!(start.elapsed() < LIMIT, "{command:?} did not end");
    output
}

#[derive(Clone, Copy, Debug)]
enum Vendor {
    Cuda,
    Hip,
}

const VENDORS: [Vendor; 2] = [Vendor::Cuda, Vendor::Hip];

impl Vendor {
    fn dir(self) -> PathBuf {
        match self {
            Vendor::Cuda => soft::cuda_dir(),
            Vendor::Hip => soft::hip_dir(),
        }
    }
}

fn gpu(vendor: Vendor, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.arg("gpu").args(arguments).env("LD_LIBRARY_PATH", vendor.dir()).env("SOFTGPU_EAGER", "1");
    output(command.envs(variables.iter().copied()))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn succeeds(output: &Output) {
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
}

/// Fails with this status, and says this.
fn fails(output: &Output, code: i32, said: &str) {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let all = text(&output.stdout) + &text(&output.stderr);
    assert!(all.contains(said), "{said:?} is not in\n{all}");
}

#[test]
fn info_tells_the_driver_the_device_and_what_of_it_can_be_used() {
    for vendor in VENDORS {
        let found = json(&gpu(vendor, &["info", "--json", "--device", "3"], &[]));
        assert_eq!(found["name"], "Soft GPU");
        assert_eq!((&found["device"], &found["devices"]), (&3.into(), &8.into()));
        assert_eq!(found["kind"], format!("{vendor:?}").to_uppercase());
        assert_eq!(found["memory_bytes"], 16u64 << 30);
        assert!(found["multiprocessors"].as_u64().is_some_and(|count| count > 1));
        assert_eq!((&found["stream_waits"], &found["host_registration"]), (&true.into(), &true.into()));
        let text = text(&gpu(vendor, &["info"], &[]).stdout);
        assert!(text.contains("device           0 of 8: Soft GPU\n"), "{text}");
    }
}

#[test]
fn info_tells_what_the_driver_lacks() {
    let lacks = |variable| json(&gpu(Vendor::Cuda, &["info", "--json"], &[variable]));
    let found = lacks(("SOFTGPU_ABSENT", "cuStreamWaitValue32_v2"));
    assert_eq!((&found["stream_waits"], &found["host_registration"]), (&false.into(), &true.into()));
    assert!(found["stream_waits_why"].as_str().is_some_and(|why| why.contains("NOT_SUPPORTED")), "{found}");
    let found = lacks(("SOFTGPU_PINNED_BYTES", "4096"));
    assert_eq!((&found["stream_waits"], &found["host_registration"]), (&false.into(), &false.into()));
}

#[test]
fn kernels_are_checked_for_every_type_and_pass() {
    for vendor in VENDORS {
        let output = gpu(vendor, &["kernels", "--json"], &[]);
        succeeds(&output);
        let found = json(&output);
        let modules = found["modules"].as_array().expect("modules");
        assert_eq!(modules.len(), 14);
        for module in modules {
            let of = |kernel: &Value| kernel["kernel"].as_str().unwrap_or_default().to_string();
            let kernels: Vec<String> = module["kernels"].as_array().expect("kernels").iter().map(of).collect();
            match module["module"].as_str() {
                Some("move") => {
                    assert_eq!(kernels, ["copy", "shuffle", "wait+raise", "host raise", "stream wait"])
                }
                Some("codes") => assert_eq!(kernels, ["encode", "decode", "fold"]),
                _ => assert_eq!(kernels, ["sum", "prod", "max", "min", "scale"]),
            }
            for kernel in module["kernels"].as_array().expect("kernels") {
                assert!(kernel["checks"].as_u64().is_some_and(|checks| checks > 0), "{kernel}");
                assert_eq!(kernel["failures"], Value::Array(Vec::new()));
            }
        }
    }
}

#[test]
fn the_ptx_that_the_library_has_passes() {
    let output = gpu(Vendor::Cuda, &["kernels"], &[("SOFTGPU_PTX", "1")]);
    succeeds(&output);
    assert!(text(&output.stdout).contains(" passed, 0 failed"), "{}", text(&output.stdout));
}

#[test]
fn kernels_pass_whenever_streams_run() {
    for seed in ["2", "3", "4"] {
        let variables = [("SOFTGPU_EAGER", "0"), ("SOFTGPU_SEED", seed)];
        let output = gpu(Vendor::Cuda, &["kernels", "--types", "f16,i64", "--seed", seed], &variables);
        succeeds(&output);
        assert!(text(&output.stdout).ends_with(" passed, 0 failed\n"));
    }
}

#[test]
fn a_wait_or_an_event_that_does_not_hold_is_noticed() {
    for broken in ["cuStreamWaitValue32_v2", "strata_wait", "cuEventQuery", "cuEventRecord"] {
        for eager in ["0", "1"] {
            let variables = [("SOFTGPU_BREAK", broken), ("SOFTGPU_EAGER", eager)];
            let output = gpu(Vendor::Cuda, &["kernels", "--types", "i8"], &variables);
            fails(&output, 1, "FAILED: ");
            assert!(text(&output.stdout).contains("went on before its word was raised"), "{broken}: {output:?}");
        }
    }
}

#[test]
fn a_kernel_that_computes_something_else_is_noticed() {
    // Nothing is launched: the memory stays as it was.
    for (kernel, module) in
        [("strata_reduce_sum_f32", "f32 sum"), ("strata_shuffle", "Shuffle {"), ("strata_copy", "copy")]
    {
        let output = gpu(Vendor::Cuda, &["kernels", "--types", "f32"], &[("SOFTGPU_BREAK", kernel)]);
        fails(&output, 1, &format!("FAILED: {module}"));
    }
}

#[test]
fn bandwidths_are_told_beside_the_driver_s_copy() {
    for vendor in VENDORS {
        let sizes = ["-b", "64K", "-e", "256K", "--runs", "3", "--run-ms", "1"];
        let output = gpu(vendor, &[&["bandwidth", "--json", "--types", "f32,i8"], &sizes[..]].concat(), &[]);
        succeeds(&output);
        let found = json(&output);
        let rows = found["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), 2 * (4 + 2 * 3 + 4));
        for row in rows {
            let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"));
            assert!(number("min_us") <= number("median_us") && number("median_us") <= number("max_us"), "{row}");
            assert!((number("gbs") - number("moved_bytes") / number("median_us") / 1e3).abs() < 1e-6);
            assert!(number("share") > 0.0);
            if row["operation"] == row["reference"] {
                assert_eq!(number("share"), 1.0);
            }
        }
        let moved = |operation: &str| {
            let row = rows.iter().find(|row| row["operation"] == operation).expect("measured");
            row["moved_bytes"].as_u64().expect("a number") / row["bytes"].as_u64().expect("a number")
        };
        assert_eq!(["copy", "sum of 2", "sum of 8", "copy from host"].map(moved), [2, 3, 9, 1]);
    }
}

#[test]
fn without_a_driver_the_command_says_so_with_a_status_of_its_own() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    let output = output(command.args(["gpu", "info"]).env_remove("LD_LIBRARY_PATH"));
    if output.status.success() {
        println!("SKIPPED: no driver: this machine has one");
        return;
    }
    fails(&output, 3, "there is no GPU's driver on this machine");
}

#[test]
fn what_cannot_be_is_told_in_words() {
    let none = gpu(Vendor::Cuda, &["info", "--device", "2"], &[("SOFTGPU_DEVICES", "2")]);
    fails(&none, 2, "there is no device 2; the driver has 2");
    let little = [("SOFTGPU_MEMORY_BYTES", "100000")];
    let said = "device 0 has no 1048576 bytes of memory left for Strata";
    fails(&gpu(Vendor::Cuda, &["kernels"], &little), 2, said);
    fails(&gpu(Vendor::Hip, &["bandwidth"], &little), 2, "nothing could be measured: device 0 has no");
    fails(&gpu(Vendor::Cuda, &["kernels", "--types", "f31"], &[]), 2, "not one of i8, u8");
    fails(&gpu(Vendor::Cuda, &["bandwidth", "-e", "1000000G"], &[]), 2, "is more than any device holds");
    fails(&gpu(Vendor::Cuda, &["bandwidth", "-b", "1000G", "-e", "1"], &[]), 2, "nothing could be measured");
}

#[test]
fn what_does_not_fit_is_left_out_and_the_rest_is_measured() {
    let sizes = ["-b", "256K", "-e", "1M", "--runs", "1", "--run-ms", "1", "--types", "f32"];
    let arguments = [&["bandwidth"], &sizes[..]].concat();
    let output = gpu(Vendor::Cuda, &arguments, &[("SOFTGPU_MEMORY_BYTES", "1000000")]);
    succeeds(&output);
    let said = text(&output.stdout);
    let line = |start: &str, size: &str| {
        said.lines().find(|line| line.starts_with(start) && line.contains(size)).expect("a line").to_string()
    };
    assert!(line("sum of 2", "256 KiB").ends_with('%'), "{said}");
    assert!(line("sum of 8", "256 KiB").contains("SKIPPED: device 0 has no 2359296 bytes"), "{said}");
    assert!(line("copy ", "1 MiB").contains("SKIPPED"), "{said}");
}

fn has_python() -> bool {
    let there = Command::new("python3").arg("--version").output().is_ok();
    if !there {
        println!("SKIPPED: scripts/gpu-check: there is no python3");
    }
    there
}

/// A folder that looks as scripts/install leaves it.
fn prefix(name: &str) -> PathBuf {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check.{name}.{}", std::process::id()));
    for folder in ["bin", "lib", "report"] {
        std::fs::create_dir_all(prefix.join(folder)).expect("a folder can be made");
    }
    let link = |from: &Path, to: &str| std::os::unix::fs::symlink(from, prefix.join(to)).expect("a link can be made");
    link(Path::new(env!("CARGO_BIN_EXE_strata")), "bin/strata");
    link(&built::library(), "lib/libstrata.so");
    prefix
}

/// An interpreter without PyTorch: the system's, blind to installed packages.
fn without_pytorch(prefix: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = prefix.join("python");
    std::fs::write(&path, "#!/bin/sh\nexec python3 -I -S \"$@\"\n").expect("a script can be written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it can be made executable");
    path
}

/// Runs scripts/gpu-check on a soft GPU; what it said, and its report.
fn gpu_check(name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> (Output, String) {
    let prefix = prefix(name);
    let mut command = Command::new(root().join("scripts/gpu-check"));
    command.arg("--prefix").arg(&prefix).arg("--out").arg(prefix.join("report"));
    command.arg("--python").arg(without_pytorch(&prefix)).args(["--maxbytes", "1M"]).args(arguments);
    command.env("LD_LIBRARY_PATH", soft::cuda_dir()).env("SOFTGPU_EAGER", "1").envs(variables.iter().copied());
    let output = output(&mut command);
    let report = std::fs::read_to_string(prefix.join("report/soft-gpu.md"))
        .unwrap_or_else(|error| panic!("{error}: {}\n{}", text(&output.stdout), text(&output.stderr)));
    std::fs::remove_dir_all(&prefix).expect("the folder can be removed");
    (output, report)
}

#[test]
fn without_pytorch_the_report_has_the_command_s_parts_and_says_why_the_others_are_missing() {
    if !has_python() {
        return;
    }
    let (output, report) = gpu_check("whole", &[], &[]);
    succeeds(&output);
    assert!(report.starts_with("# Soft GPU\n"), "{report}");
    for part in ["strata gpu info", "strata gpu kernels", "strata gpu bandwidth"] {
        assert!(report.contains(&format!("| {part} | passed |")), "{report}");
        assert!(report.contains(&format!("\n## {part}\n")), "{report}");
    }
    let skipped: Vec<&str> = report.lines().filter(|line| line.contains("| SKIPPED |")).collect();
    assert_eq!(skipped.len(), 4, "{report}");
    assert!(skipped.iter().all(|line| line.contains("there is no PyTorch")), "{skipped:?}");
    assert!(report.contains("| driver's interface | CUDA 13020 |"), "{report}");
    assert!(report.contains("| Kernels have the host's bits | "), "{report}");
    assert!(report.contains("| sum of 8 | i8 | 1 MiB |"), "{report}");
}

#[test]
fn a_part_that_fails_is_told_and_stops_no_other() {
    if !has_python() {
        return;
    }
    let (output, report) =
        gpu_check("broken", &["--only", "info,kernels,bandwidth"], &[("SOFTGPU_BREAK", "strata_wait")]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(report.contains("| strata gpu kernels | FAILED |"), "{report}");
    assert!(report.contains("strata_wait: a stream went on"), "{report}");
    assert!(report.contains("| strata gpu bandwidth | passed |"), "{report}");
}

#[test]
fn a_folder_without_strata_is_refused() {
    if !has_python() {
        return;
    }
    let output = output(Command::new(root().join("scripts/gpu-check")).args(["--prefix", "/nowhere"]));
    fails(&output, 2, "/nowhere has no bin/strata; scripts/install");
}

#[test]
fn the_scripts_compile() {
    if !has_python() {
        return;
    }
    let program = "import sys\nfor path in sys.argv[1:]:\n    compile(open(path).read(), path, 'exec')";
    let entries = std::fs::read_dir(root().join("scripts/gpu")).expect("the scripts' folder");
    let files = entries.map(|entry| entry.expect("an entry").path());
    let files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|found| found == "py")).collect();
    assert!(files.len() >= 8, "{files:?}");
    succeeds(&output(Command::new("python3").args(["-c", program]).args(&files)));
    succeeds(&output(Command::new("bash").arg("-n").arg(root().join("scripts/gpu-check"))));
}

#[test]
fn the_check_judges_right_and_ends_what_it_starts() {
    if !has_python() {
        return;
    }
    let output = output(Command::new("python3").arg(root().join("shim-tests/gpu_check.py")));
    succeeds(&output);
    assert!(text(&output.stderr).contains("\nOK\n"), "{output:?}");
}
