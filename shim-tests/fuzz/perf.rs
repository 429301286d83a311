//! The parts of the command that read files, as modules of the fuzzers.

#[path = "../../cli/src/perf/collective.rs"]
pub mod collective;
#[path = "workload.rs"]
pub mod workload;
