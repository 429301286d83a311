//! Drawings: what several subcommands draw alike.
#![forbid(unsafe_code)]

pub mod heatmap;
