//! Doubles of the vendors' libraries, and C programs that use them, compiled at need.
//!
//! `double/` is NCCL on host memory (double.h says what it promises), built as a release of NCCL or of RCCL;
//! `programs/` are programs that come by NCCL in several ways. Both lie below the build directory and are compiled anew
//! when a source is newer.

use crate::built::{checked, header_dir, root};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

const STRICT: [&str; 9] =
    ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-D_GNU_SOURCE", "-DSTRATA_NO_CUDA"];

/// A release of a vendor's library that the double can be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Double {
    /// As NCCL_VERSION_CODE.
    pub version: u32,
    /// AMD's library instead of NVIDIA's.
    pub rccl: bool,
}

/// NCCL 2.32.3.
pub const NCCL: Double = Double { version: 23203, rccl: false };
/// NCCL 2.21.5, with a third of the functions.
pub const OLD_NCCL: Double = Double { version: 22105, rccl: false };
/// RCCL at the level of NCCL 2.32.3.
pub const RCCL: Double = Double { version: 23203, rccl: true };
/// RCCL of ROCm 6.3.
pub const OLD_RCCL: Double = Double { version: 22105, rccl: true };

/// How a program comes by NCCL. A program is preloaded by giving a linked one `LD_PRELOAD`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// It is linked with the library.
    Linked,
    /// It opens the library by its file name.
    ByName,
}

impl Double {
    /// The file name, which is also the SONAME.
    pub fn file_name(&self) -> &'static str {
        if self.rccl {
            "librccl.so.1"
        } else {
            "libnccl.so.2"
        }
    }

    /// The library; its directory holds nothing else but the name for the linker.
    pub fn library(&self) -> PathBuf {
        let name = if self.rccl { "rccl" } else { "nccl" };
        let dir = build_dir().join(format!("{name}-{}", self.version));
        let mut arguments = vec![format!("-DDOUBLE_VERSION={}", self.version)];
        if self.rccl {
            arguments.push("-DDOUBLE_RCCL".into());
        } else if self.version >= 23000 {
            // NVIDIA's older releases and AMD's have no such list.
            arguments.push(format!("-Wl,--version-script={}", sources("double").join("nccl.map").display()));
        }
        arguments.push(format!("-Wl,-soname,{}", self.file_name()));
        let library = dir.join(self.file_name());
        compile(&library, &double_sources(), &[&shared()[..], &arguments].concat(), &["-lrt", "-lm"]);
        let link = dir.join(format!("lib{name}.so"));
        if !link.exists() {
            // Another test may have been faster.
            let _ = std::os::unix::fs::symlink(self.file_name(), link);
        }
        library
    }

    /// Where the library is.
    pub fn dir(&self) -> PathBuf {
        self.library().parent().unwrap().to_path_buf()
    }

    /// `programs/<name>.c`, which gets this library unless it is told otherwise.
    pub fn program(&self, name: &str, way: Way) -> PathBuf {
        let (suffix, arguments) = match way {
            Way::ByName => ("by-name".to_string(), vec!["-DBY_NAME".to_string()]),
            Way::Linked => {
                let linked = if self.rccl { "-lrccl" } else { "-lnccl" };
                (linked[2..].to_string(), vec![format!("-L{}", self.dir().display()), linked.to_string()])
            }
        };
        let program = build_dir().join(format!("{name}-{suffix}"));
        let source = sources("programs").join(format!("{name}.c"));
        let libraries: Vec<&str> = arguments.iter().map(String::as_str).chain(["-ldl", "-lm"]).collect();
        compile(&program, &[source], &[], &libraries);
        program
    }

    /// `programs/<name>.c` for the soft GPU in `driver`, a directory with the driver under its file name; for HIP where
    /// this library is AMD's.
    pub fn gpu_program(&self, name: &str, driver: &Path) -> PathBuf {
        let (vendor, linked, flags) = match self.rccl {
            true => ("rccl", "-lamdhip64", vec!["-DHIP".to_string()]),
            false => ("nccl", "-lcuda", Vec::new()),
        };
        let program = build_dir().join(format!("{name}-gpu-{vendor}"));
        let source = sources("programs").join(format!("{name}.c"));
        let places = [self.dir(), driver.to_path_buf()].map(|dir| format!("-L{}", dir.display()));
        let libraries = [&places[0], &format!("-l{vendor}"), &places[1], linked, "-ldl", "-lm"];
        compile(&program, &[source], &flags, &libraries.map(|library| library as &str));
        program
    }

    /// Such a program ready to run on this library alone.
    pub fn command(&self, name: &str, way: Way, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program(name, way));
        command.args(arguments).env("LD_LIBRARY_PATH", self.dir()).env("NCCL_NAME", self.file_name());
        command
    }
}

/// The directory of the double of `libcuda.so.1`.
pub fn cuda_dir() -> PathBuf {
    let dir = build_dir().join("cuda");
    let arguments = [&shared()[..], &["-Wl,-soname,libcuda.so.1".to_string()]].concat();
    compile(&dir.join("libcuda.so.1"), &[sources("double").join("cuda.c")], &arguments, &[]);
    dir
}

/// What the double wrote down in a run.
pub struct Recording {
    dir: PathBuf,
}

impl Recording {
    /// One that is empty yet.
    pub fn new() -> Recording {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = build_dir().join(format!("record-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Recording { dir }
    }

    /// The value for `DOUBLE_RECORD`.
    pub fn prefix(&self) -> PathBuf {
        self.dir.join("calls")
    }

    /// The lines of each process that called anything, in the order of the processes' ids.
    pub fn processes(&self) -> Vec<Vec<String>> {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(&self.dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        let id = |path: &PathBuf| path.extension().and_then(|id| id.to_str()?.parse::<u32>().ok());
        files.sort_by_key(id);
        let lines = |path: PathBuf| std::fs::read_to_string(path).unwrap().lines().map(str::to_string).collect();
        files.into_iter().map(lines).collect()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn build_dir() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("vendor")
}

fn sources(folder: &str) -> PathBuf {
    root().join("shim-tests/vendor").join(folder)
}

fn shared() -> Vec<String> {
    ["-fPIC", "-fvisibility=hidden", "-shared"].map(str::to_string).to_vec()
}

fn double_sources() -> Vec<PathBuf> {
    let files = std::fs::read_dir(sources("double")).unwrap().map(|entry| entry.unwrap().path());
    let is_source = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "c") && !path.ends_with("cuda.c");
    let mut found: Vec<PathBuf> = files.filter(is_source).collect();
    found.sort();
    found
}

/// Compiles unless the result is newer than everything that it may come from. Other tests may do the same at once: the
/// result appears under its name when it is whole.
fn compile(result: &Path, files: &[PathBuf], arguments: &[String], libraries: &[&str]) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _held = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let age = |path: &Path| std::fs::metadata(path).and_then(|data| data.modified()).ok();
    let folders = [sources("double"), sources("programs"), header_dir(), sources("../soft")];
    let newest = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()).map(|e| age(&e.unwrap().path()));
    if age(result) > newest.max().flatten() {
        return;
    }
    std::fs::create_dir_all(result.parent().unwrap()).unwrap();
    let fresh = result.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
    let mut command = Command::new("cc");
    command.args(STRICT).arg("-I").arg(header_dir()).args(arguments).args(files).arg("-o").arg(&fresh);
    checked(command.args(libraries));
    std::fs::rename(fresh, result).unwrap();
}
