//! What needs no ranks: every plan is proved and its mutants rejected, the cost model gives the published times, and the
//! GPUs' kernels have the host's bits.

mod kernels;
mod levels;
mod links;
mod model;
mod plans;
