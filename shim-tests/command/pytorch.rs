//! Unchanged PyTorch, and NVIDIA's nccl4py, over Strata on soft GPUs: PyTorch's wheel finds a soft CUDA runtime in the place
//! of NVIDIA's.
//!
//! The ranks' programs are `third-party/soft_torch.py`, `third-party/soft_mcr_dl.py` and `third-party/soft_nccl4py.py`, which
//! compare each element of every result. Where there is no PyTorch each test says `SKIPPED: why`.

use crate::built::{checked, library, root, Compiler};
use crate::launched::strata;
use crate::soft;
use crate::vendor::NCCL;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// Python with PyTorch; where there is none, says so.
pub fn python(test: &str) -> Option<PathBuf> {
    let output = Command::new(root().join("scripts/fetch-torch")).arg("--path").output().expect("the script starts");
    let path = String::from_utf8_lossy(&output.stdout).trim().to_string();
    if output.status.success() {
        return Some(path.into());
    }
    println!("SKIPPED: {test}: there is no PyTorch; scripts/fetch-torch installs it (6 GB)");
    None
}

/// A program of `third-party` on so many ranks of nodes, with the soft GPU under it and Strata in front of it.
fn job(python: &Path, nodes: &str, preload: &[PathBuf], line: &[&str]) -> Command {
    let preload: Vec<String> = preload.iter().map(|path| path.display().to_string()).collect();
    let mut command = strata();
    command.args(["launch", "--nodes", nodes, "--timeout", "400", "--", "env"]);
    command.arg(format!("LD_PRELOAD={}", preload.join(" "))).arg(python);
    command.arg(root().join("shim-tests/third-party").join(line[0])).args(&line[1..]);
    command.env("LD_LIBRARY_PATH", soft::cuda_dir()).env("STRATA_NCCL_LIB", "none");
    // What this process computes with is not the ranks' to use.
    command.env("OMP_NUM_THREADS", "1");
    command
}

fn torch(python: &Path, nodes: &str, line: &[&str]) -> Command {
    let preload = [soft::cudart_dir().join("libcudart.so.13"), library()];
    job(python, nodes, &preload, &[&["soft_torch.py"], line].concat())
}

/// What the ranks have said, by rank: seeds, calls, wrong results.
fn results(output: &Output) -> BTreeMap<u32, [u32; 3]> {
    let said = String::from_utf8_lossy(&output.stdout);
    let result = |line: &str| {
        let (rank, said) = line.strip_prefix("rank ")?.split_once(": ")?;
        let numbers =
            said.split(", ").map(|part| part.split(' ').next()?.parse().ok()).collect::<Option<Vec<u32>>>()?;
        Some((rank.parse().ok()?, numbers.try_into().ok()?))
    };
    said.lines().filter_map(result).collect()
}

/// Each of the ranks has run so many seeds, with no wrong result.
fn assert_right(mut command: Command, ranks: usize, seeds: u32) {
    let output = command.output().expect("the job starts");
    let shown = || {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        format!("{command:?}\n{out}\n{err}")
    };
    assert!(output.status.success(), "{}", shown());
    let results = results(&output);
    assert_eq!(results.len(), ranks, "{}", shown());
    for (rank, [ran, calls, wrong]) in results {
        assert_eq!((ran, wrong), (seeds, 0), "rank {rank}: {}", shown());
        assert!(calls >= 10 * seeds, "rank {rank}: {}", shown());
        println!("rank {rank}: {ran} seeds, {calls} calls");
    }
}

#[test]
fn whatever_pytorch_calls_is_right() {
    let Some(python) = python("PyTorch on soft GPUs") else { return };
    assert_right(torch(&python, "2,2", &["seeds", "1", "8"]), 4, 8);
}

#[test]
fn with_the_kernels_ptx_interpreted_it_is_right() {
    let Some(python) = python("PyTorch with the kernels' PTX") else { return };
    let mut command = torch(&python, "2,2", &["seeds", "1", "8"]);
    command.env("SOFTGPU_PTX", "1");
    assert_right(command, 4, 8);
}

#[test]
fn uneven_nodes_and_memory_that_grows_in_place_are_right() {
    let Some(python) = python("PyTorch on uneven nodes") else { return };
    let mut command = torch(&python, "1,3,2", &["seeds", "100", "3"]);
    command.env("PYTORCH_ALLOC_CONF", "expandable_segments:True");
    assert_right(command, 6, 3);
}

#[test]
fn nodes_by_a_vendor_s_library_are_right() {
    let Some(python) = python("PyTorch over a vendor's library") else { return };
    let mut command = torch(&python, "2,2", &["seeds", "200", "3"]);
    command.env("STRATA_NCCL_LIB", NCCL.library());
    assert_right(command, 4, 3);
}

#[test]
fn a_wait_that_is_left_out_makes_results_wrong() {
    let Some(python) = python("PyTorch with broken waits") else { return };
    for (broken, ptx) in [("cuStreamWaitEvent", "0"), ("cuStreamWaitEvent", "1"), ("strata_reduce_sum_f32", "1")] {
        // Of an object that is wrong PyTorch may make anything.
        let mut command = torch(&python, "2,2", &["seeds", "3", "2", "objects"]);
        let output = command.env("SOFTGPU_BREAK", broken).env("SOFTGPU_PTX", ptx).output().expect("the job starts");
        assert!(!output.status.success(), "{broken}: {output:?}");
        let wrong: u32 = results(&output).values().map(|[_, _, wrong]| wrong).sum();
        assert!(wrong > 0, "{broken}: {output:?}");
        println!("{broken} broken: {wrong} wrong results");
    }
}

#[test]
fn ranks_hear_of_one_that_has_died() {
    let Some(python) = python("PyTorch with a rank that dies") else { return };
    let said = checked(&mut torch(&python, "2,2", &["dies"]));
    for rank in 0..3 {
        let start = format!("rank {rank}: ");
        assert!(said.contains(&start), "{said}");
    }
    assert_eq!(said.matches("rank 3 (").count(), 3, "{said}");
    assert_eq!(said.matches(" died: its connection ended without leaving the communicator").count(), 3, "{said}");
}

/// `python/mcr_dl.py` on tensors of the soft GPU.
fn mcr_dl(python: &Path, nodes: &str, seeds: [&str; 2]) -> Command {
    let preload = [soft::cudart_dir().join("libcudart.so.13"), library()];
    let mut command = job(python, nodes, &preload, &["soft_mcr_dl.py", seeds[0], seeds[1]]);
    command.env("STRATA_LIBRARY", library()).env("PYTHONPATH", root().join("python"));
    command
}

#[test]
fn what_mcr_dl_calls_on_gpus_is_right() {
    let Some(python) = python("mcr_dl on soft GPUs") else { return };
    assert_right(mcr_dl(&python, "2,2", ["1", "6"]), 4, 6);
    assert_right(mcr_dl(&python, "1,2", ["50", "3"]), 3, 3);
}

#[test]
fn what_mcr_dl_calls_in_front_of_a_vendor_s_library_is_right() {
    let Some(python) = python("mcr_dl over a vendor's library") else { return };
    let mut command = mcr_dl(&python, "2,2", ["100", "3"]);
    command.env("STRATA_NCCL_LIB", NCCL.library());
    assert_right(command, 4, 3);
}

#[test]
fn a_wait_that_mcr_dl_leaves_out_makes_results_wrong() {
    let Some(python) = python("mcr_dl with broken waits") else { return };
    let mut command = mcr_dl(&python, "2,2", ["1", "4"]);
    let output = command.env("SOFTGPU_BREAK", "cuStreamWaitEvent").output().expect("the job starts");
    let wrong: u32 = results(&output).values().map(|[_, _, wrong]| wrong).sum();
    assert!(!output.status.success() && wrong > 0, "{output:?}");
}

#[test]
fn a_kernel_of_pytorch_is_refused_with_its_name() {
    let Some(python) = python("PyTorch's kernels") else { return };
    let program = "import torch\nx = torch.ones(10, device='cuda')\nassert bool((x.cpu() == 1).all())\nx + x\n";
    let mut command = Command::new(python);
    command.args(["-c", program]).env("LD_PRELOAD", soft::cudart_dir().join("libcudart.so.13"));
    let output = command.env("LD_LIBRARY_PATH", soft::cuda_dir()).output().expect("Python starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("softgpu: kernel _ZN2at6native") && said.contains("CUDAFunctor_add"), "{said}");
    assert!(said.contains("operation not supported"), "{said}");
}

#[test]
fn the_runtime_is_what_nvidia_s_headers_say() {
    let Some(python) = python("the soft runtime by NVIDIA's headers") else { return };
    let packages = checked(Command::new(python).args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]));
    let [own, triton] =
        ["nvidia/cu13/include", "triton/backends/nvidia/include"].map(|folder| Path::new(packages.trim()).join(folder));
    let (runtime, driver) = (soft::cudart_dir(), soft::cuda_dir());
    let shown = |path: &Path| path.to_str().unwrap().to_string();
    // A few files that the first includes only the second has.
    let mut options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-I"].map(str::to_string).to_vec();
    options.extend([shown(&own), "-idirafter".to_string(), shown(&triton), "-L".to_string(), shown(&runtime)]);
    options.extend(["-L".to_string(), shown(&driver), "-l:libcudart.so.13".to_string(), "-lcuda".to_string()]);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let program = Compiler::new("c").without_headers().compile(include_str!("../c/cudart.c"), &options);
    checked(Command::new(program).env("LD_LIBRARY_PATH", std::env::join_paths([runtime, driver]).unwrap()));
}

#[test]
fn nccl4py_is_right() {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let Some(python) = python("nccl4py") else { return };
    if !Command::new(&python).args(["-c", "import nccl.core"]).output().is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: nccl4py: the environment has none; scripts/fetch-torch installs it");
        return;
    }
    for ptx in ["0", "1"] {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let file = std::env::temp_dir().join(format!("strata-nccl4py-{}-{number}", std::process::id()));
        let line = ["soft_nccl4py.py", file.to_str().unwrap(), "1", "5"];
        let mut command = job(&python, "2,2", &[library()], &line);
        command.env("SOFTGPU_PTX", ptx);
        assert_right(command, 4, 5);
        let _ = std::fs::remove_file(file);
    }
}
