//! Ranks as on a cluster: started by MPI or by `strata launch`, on nodes of their own with NICs of their own, and leaving
//! when they like. They run the command, so this is of its package.

// What is not used here other test programs use.
#[allow(dead_code)]
#[path = "../again/mod.rs"]
mod again;
#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;
#[allow(dead_code)]
#[path = "../cases/mod.rs"]
mod cases;
#[path = "../machines/mod.rs"]
mod machines;
#[allow(dead_code)]
#[path = "../soft/mod.rs"]
mod soft;
#[allow(dead_code)]
#[path = "../vendor/mod.rs"]
mod vendor;

mod leaves;
mod mpi;
mod mpi_ends;
mod mpi_networks;
mod netns;
mod nics;
mod slurm;
