//! The soft GPU (`softgpu/`), built at need: directories in which it goes by the file names of drivers.
//!
//! A test puts such a directory on `LD_LIBRARY_PATH` of a process of its own; what else it can ask for by the environment
//! is said at the head of `softgpu/src/lib.rs`.

use crate::built::root;
use rustix::fs::{flock, FlockOperation};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A directory with `libcuda.so.1`, and `libcuda.so` for the linker.
pub fn cuda_dir() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| build("cuda", "libcuda.so.1", &["libcuda.so", "libnvidia-ml.so.1"], DRIVER)).clone()
}

/// A directory with `libcudart.so.13`, which is loaded before programs' own and finds the driver in [`cuda_dir`].
pub fn cudart_dir() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let export = "libcudart.so.13 { global: cuda[A-Z]*; __cuda[A-Z]*; local: *; };\n";
    DIR.get_or_init(|| {
        cuda_dir();
        build("cudart", "libcudart.so.13", &["libcudart.so"], export)
    })
    .clone()
}

/// What drivers export.
const DRIVER: &str = "{ global: cu[A-Z]*; nvml[A-Z]*; hip[A-Z]*; hiprtc*; softgpu[A-Z]*; local: *; };\n";

/// A directory with `libamdhip64.so.6` and its other names, `libhiprtc.so` among them.
pub fn hip_dir() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let links = ["libamdhip64.so", "libhiprtc.so", "libhiprtc.so.6"];
    DIR.get_or_init(|| build("hip", "libamdhip64.so.6", &links, DRIVER)).clone()
}

/// Where `cuda.h` and `hip.h` are, which declare what is in the libraries.
pub fn header_dir() -> PathBuf {
    root().join("shim-tests/soft")
}

/// Builds the double for a vendor, which exports this, and puts it where only its names are.
fn build(vendor: &str, name: &str, links: &[&str], exports: &str) -> PathBuf {
    let target = root().join("target");
    let dir = target.join("softgpu").join(vendor);
    fs::create_dir_all(&dir).unwrap();
    // Other test programs may build it at the same time.
    let lock = File::create(dir.with_file_name("lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    // With the packages that cargo builds by itself and a test, so that the features of what Strata needs are those that the
    // tests' library has: that is not built once more.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--lib", "--test", "house", "--package", &format!("softgpu-{vendor}")]);
    cargo.args(["strata", "strata-cli", "strata-mpitrampoline"].map(|name| format!("--package={name}")));
    cargo.current_dir(root()).arg("--target-dir").arg(&target);
    assert!(cargo.status().unwrap().success(), "{cargo:?}");
    let archive = target.join(format!("debug/libsoftgpu_{vendor}.a"));
    let age = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    if age(&dir.join(name)) < age(&archive) {
        link(&archive, &dir, name, exports);
    }
    for link in links {
        let _ = symlink(name, dir.join(link));
    }
    dir
}

/// Makes the shared library. Not by cargo: what Strata's build script says of Strata's own library, its name above all,
/// holds for every library of cargo's that has Strata in it. Exported are the driver's functions and no others. The runtime
/// calls the driver.
fn link(archive: &Path, dir: &Path, name: &str, exports: &str) {
    let map = dir.join("exports.map");
    fs::write(&map, exports).unwrap();
    // A new file under the name: a program may still have the old one mapped.
    let fresh = dir.join("fresh");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-Wl,--gc-sections", "-Wl,-z,nodelete", "-Wl,-z,defs"]);
    cc.arg(format!("-Wl,-soname,{name}")).arg(format!("-Wl,--version-script={}", map.display()));
    cc.arg("-Wl,--whole-archive").arg(archive).arg("-Wl,--no-whole-archive").arg("-o").arg(&fresh);
    cc.arg("-L").arg(dir.with_file_name("cuda"));
    if name.starts_with("libcudart") {
        cc.arg("-lcuda");
    }
    cc.args(["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"]);
    assert!(cc.status().unwrap().success(), "{cc:?}");
    fs::rename(&fresh, dir.join(name)).unwrap();
}
