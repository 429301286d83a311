//! Gives the shared library the name that programs look for.
//!
//! `libstrata.so` carries the SONAME `libnccl.so.2`, so a program linked against it, or against NVIDIA's own
//! library, finds it by that name. `-z nodelete` keeps it mapped: its threads and thread-locals outlive a `dlclose`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
