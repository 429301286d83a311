//! Strata: a drop-in for NCCL and RCCL whose collectives run in two levels.
//!
//! A collective is a [`plan`]: the algorithm written out, step by step, for one rank. [`algorithms`] writes plans,
//! [`verify`] proves them, [`exec`] runs them over a [`transport`] and a [`device`], [`sim`] runs the same executor under a
//! virtual clock. [`selection`] chooses. Ranks meet through the [`bootstrap`], and [`health`] notices those that are lost.
//! [`communicator`] ties all of it together, [`vendor`] is NCCL or RCCL where there is one, and `abi` implements the C
//! [`interface`].
//!
//! Each module may use those below it only; `shim-tests/house/tidy.rs` has the order.

// Examples are compiled into the tests, too.
#[cfg(test)]
extern crate self as strata;

pub mod abi;
pub mod admission;
pub mod algorithms;
pub mod bootstrap;
pub mod carrier;
pub mod code;
pub mod communicator;
pub mod config;
pub mod device;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod exec;
pub mod fork;
#[doc(hidden)]
pub mod fuzz;
pub mod health;
pub mod interface;
pub mod listen;
pub mod log;
pub mod memory;
pub mod plan;
pub mod process;
pub mod profiler;
pub mod records;
pub mod script;
pub mod selection;
pub mod sim;
pub mod sync;
pub mod topo;
pub mod transport;
pub mod vendor;
pub mod verify;
