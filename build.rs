//! Gives the shared library the name that programs look for.
//!
//! `libstrata.so` carries the SONAME `libnccl.so.2` (with the feature `rccl`: `librccl.so.1`), so a program linked
//! against it, or against the vendor's own library, finds it by that name. `-z nodelete` keeps it mapped: its threads and
//! thread-locals outlive a `dlclose`.

fn main() {
    let rccl = std::env::var_os("CARGO_FEATURE_RCCL").is_some();
    let name = if rccl { "librccl.so.1" } else { "libnccl.so.2" };
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{name}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
