//! An interpreter of PTX, for tests.
//!
//! It executes the text that a driver would compile, thread by thread, and is stricter than a GPU: what it does not know it
//! refuses when it parses; an instruction that a GPU would let pass with an undefined result is a [`Trap`]:
//!
//! - an access outside of an allocation, or not aligned to its size,
//! - a register or predicate that is read before it was written,
//! - a byte that two threads write,
//! - a byte that one thread reads and another writes, if what was read reaches a store or an address. What is read and
//!   dropped may be anything,
//! - a division of integers by 0, a thread that does not end.
//!
//! | module | |
//! |---|---|
//! | [`forms`] | the arithmetic: what each instruction does to bits |
//! | [`module`] | text to kernels |
//! | [`launch`] | blocks and threads in an order that a seed decides; one thread |
//! | [`sharing`] | which thread wrote and read each byte, and where values come from |
//! | [`mutate`] | text with one instruction changed |
//!
//! What it does not have, because Strata's kernels do not: shared and local memory, barriers, atomics, calls, textures.
//! Threads run one after the other: the checks of shared bytes are what makes that enough.
#![forbid(unsafe_code)]

pub mod forms;
pub mod launch;
pub mod module;
pub mod mutate;
pub mod sharing;
#[cfg(test)]
mod tests;
mod tokens;

pub use launch::{Device, Launch, Manner, Nan, Trap};
pub use module::{Kernel, Module};
