//! NCCL's C interface as such: its types, the structures that programs and libraries share, and the list of its functions
//! with their signatures. [`crate::abi`] implements it, [`crate::vendor`] calls another library's, and so does the command.

pub mod functions;
pub mod layouts;
pub mod pointer;
pub mod signatures;
pub mod types;
