//! Where data lives and is computed on.

pub mod gpu;
pub mod host;
