//! Placeholder, replaced by its author.

pub mod bootstrap;
pub mod service;
