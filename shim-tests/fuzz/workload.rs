//! The reader of workload files, with what makes a program of one.

#[path = "../../src/bin/strata/perf/workload/file.rs"]
pub mod file;
#[path = "../../src/bin/strata/perf/workload/formula.rs"]
pub mod formula;
#[path = "../../src/bin/strata/perf/workload/groups.rs"]
pub mod groups;
#[path = "../../src/bin/strata/perf/workload/program.rs"]
pub mod program;
