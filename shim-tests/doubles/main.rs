//! Strata between a program and what vendors make, NCCL or RCCL and a GPU's driver. Most of these are doubles: [`vendor`] and
//! [`soft`]. They are tested here, too.

// What is not used here other test programs use.
#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;
#[allow(dead_code)]
#[path = "../soft/mod.rs"]
mod soft;
#[path = "../vendor/mod.rs"]
mod vendor;

mod double;
mod drop_in;
mod opposite;
mod profiler;
mod rails;
mod real;
mod softgpu;
mod vectors;
