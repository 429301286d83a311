//! The command `strata` as its users run it. This is of its package, so that cargo builds it and says where it is.

// What is not used here other test programs use.
#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;
#[path = "../launched/mod.rs"]
mod launched;
#[allow(dead_code)]
#[path = "../soft/mod.rs"]
mod soft;
#[allow(dead_code)]
#[path = "../vendor/mod.rs"]
mod vendor;

mod choices;
mod command;
mod compile;
mod figures;
mod gpu;
mod launch;
mod mcr_dl;
mod probe;
mod profilers;
mod providers;
mod pytorch;
mod script_folders;
mod simulate;
mod strategies;
mod traces;
mod tune;
mod workloads;
