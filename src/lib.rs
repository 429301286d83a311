//! Strata: a drop-in for NCCL and RCCL whose collectives run in two levels.
//!
//! A collective is a [`plan`]: the algorithm written out, step by step, for one rank. [`algo`] writes plans,
//! [`verify`] proves them, [`exec`] runs them over a [`transport`] and a [`device`], [`sim`] runs the same executor
//! under a virtual clock. [`select`] chooses, [`comm`] keeps communicators, `abi` is the C interface.
//!
//! The modules are listed lowest first; each may use those above it and nothing below.

pub mod abi;
pub mod admission;
pub mod algo;
pub mod comm;
pub mod config;
pub mod device;
pub mod dtype;
pub mod error;
pub mod exec;
pub mod fork;
#[doc(hidden)]
pub mod fuzz;
pub mod listen;
pub mod log;
pub mod memory;
pub mod plan;
pub mod process;
pub mod select;
pub mod sim;
pub mod topo;
pub mod transport;
pub mod vendor;
pub mod verify;
