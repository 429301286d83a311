//! The soft GPU (`softgpu/`), built at need: directories in which it goes by the file names of drivers.
// Each test program uses a part of this.
#![allow(dead_code)]

use rustix::fs::{flock, FlockOperation};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A directory with `libcuda.so.1`, and `libcuda.so` for the linker.
pub fn cuda_dir() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| build("softgpu-cuda", "libcuda.so", "libcuda.so.1", &["libcuda.so"])).clone()
}

/// A directory with `libamdhip64.so.6` and its other names, `libhiprtc.so` among them.
pub fn hip_dir() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let names = ["libamdhip64.so", "libhiprtc.so", "libhiprtc.so.6"];
    DIR.get_or_init(|| build("softgpu-hip", "libamdhip64.so", "libamdhip64.so.6", &names)).clone()
}

/// Builds a package of the double and puts what it built where only its names are.
fn build(package: &str, built: &str, name: &str, links: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = root.join("target/softgpu");
    fs::create_dir_all(&target).unwrap();
    // Other test programs may build it at the same time.
    let lock = File::create(target.join("lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["rustc", "--quiet", "--locked", "--package", package, "--manifest-path"]);
    cargo.arg(root.join("shim-tests/softgpu/Cargo.toml")).arg("--target-dir").arg(&target);
    // On the command line, since the name that Strata's build script gives every library that has Strata in it comes
    // after what a build script could say.
    cargo.arg("--").arg(format!("-Clink-arg=-Wl,-soname,{name}"));
    assert!(cargo.status().unwrap().success(), "{cargo:?}");
    let dir = target.join(package);
    fs::create_dir_all(&dir).unwrap();
    // A new file under the name: a program may still have the old one mapped.
    let fresh = dir.join("fresh");
    fs::copy(target.join("debug").join(built), &fresh).unwrap();
    fs::rename(&fresh, dir.join(name)).unwrap();
    for link in links {
        let _ = symlink(name, dir.join(link));
    }
    dir
}
