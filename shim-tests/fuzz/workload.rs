//! The reader of workload files, with what makes a program of one.

#[path = "../../cli/src/perf/workload/file.rs"]
pub mod file;
#[path = "../../cli/src/perf/workload/formula.rs"]
pub mod formula;
#[path = "../../cli/src/perf/workload/groups.rs"]
pub mod groups;
#[path = "../../cli/src/perf/workload/program.rs"]
pub mod program;
