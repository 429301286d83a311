//! The C interface: NCCL 2.32.3's 193 symbols, and a few of Strata's own.
//!
//! [`crate::interface`] declares every function once. Of its lines [`table`] makes the exported entries and their `pnccl`
//! twins, the prototypes of `include/nccl.h` ([`header`]) and the list that tests compare with the built library. An entry
//! checks, converts, calls, converts back; its body is in the module named in its line.
//!
//! Nothing a program passes is dereferenced but what the interface says is memory ([`crate::interface::pointer`]);
//! communicators and streams are names that are looked up ([`handles`], [`streams`]).

mod communicators;
pub mod entry;
mod events;
mod exit;
mod handles;
pub mod header;
mod info;
mod interrupted;
pub mod matrix;
mod memory;
mod operations;
mod options;
mod params;
mod profiler;
mod scripts;
mod shadow;
mod streams;
pub mod table;
mod vectored;
mod windows;
