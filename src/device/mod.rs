//! Where data lives and is computed on.

pub mod host;
