//! NCCL's profiler interface: the plugin of a program's own hears the calls that Strata runs.
//!
//! `NCCL_PROFILER_PLUGIN` names a library as it does for NCCL, and NCCL's rules say where it is looked for ([`plugin`]). Every
//! communicator of Strata's is a context of it ([`heard`]); each call is told as NCCL tells its own, with one channel where
//! the plugin asks for channels. The layouts of all versions of the interface are in [`layouts`], and serve the other
//! direction as well: the calls of the vendor's library, which come in at the symbols of `abi::profiler`.
//!
//! A plugin that is missing, has no table that is known, or fails is one warning, and calls go on without it.

pub mod heard;
pub mod layouts;
pub mod logger;
pub mod plugin;

pub use heard::{HeardCall, HeardComm, ProfiledComm};
