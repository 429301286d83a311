//! The command `strata`.
fn main() {}
