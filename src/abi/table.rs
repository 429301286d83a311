//! The functions of the interface, made of its list ([`crate::interface::functions`]): the exported entries and what is told
//! of them. The bodies that the list names are looked up here.
#![allow(non_snake_case)]
// The interface's functions have as many arguments as NCCL gave them.
#![allow(clippy::too_many_arguments)]

use super::entry::Function;
use crate::vendor::entry;

/// NCCL's functions.
pub mod nccl {
    use crate::abi::{communicators, info, memory, operations, params, shadow};
    use crate::interface::layouts::*;
    use crate::interface::pointer::*;
    use crate::interface::types::*;
    use std::ffi::c_int;

    const WINDOWS: &str = "memory windows need GPUs whose memory their peers can reach; the host device has none";
    const ONE_SIDED: &str = "one-sided operations work on memory windows, which the host device does not have";
    const KERNELS: &str = "communication from inside kernels needs a GPU; the host device has none";

    crate::nccl_functions!({ crate::api });
}

/// NCCL's function without a `pnccl` twin.
pub mod single {
    use crate::abi::info;

    crate::single_functions!({ crate::api });
}

/// What MSCCL's fork of NCCL adds.
pub mod msccl {
    use crate::abi::scripts;
    use crate::interface::pointer::*;
    use crate::interface::types::*;
    use std::ffi::c_int;

    crate::msccl_functions!({ crate::api });
}

/// Functions that AMD's library has beside NVIDIA's. Only a Strata under RCCL's name exports them.
#[cfg_attr(not(feature = "rccl"), allow(dead_code))]
pub mod rccl {
    use crate::abi::{communicators, operations, scripts, shadow, vectored};
    use crate::interface::layouts::*;
    use crate::interface::pointer::*;
    use crate::interface::types::*;
    use std::ffi::c_int;

    const BIAS: &str = "reductions with a bias need a GPU; the host device has none";

    crate::rccl_functions!({ crate::api });
}

/// Strata's own functions.
pub mod own {
    use crate::abi::{communicators, events, info, operations, shadow, streams, vectored, windows};
    use crate::interface::layouts::*;
    use crate::interface::pointer::*;
    use crate::interface::types::*;
    use std::ffi::c_int;

    crate::own_functions!({ crate::api });
}

/// Every function of NCCL's interface.
pub fn nccl_functions() -> impl Iterator<Item = &'static Function> {
    nccl::FUNCTIONS.iter().chain(single::FUNCTIONS)
}

/// Every function that MSCCL adds to NCCL's.
pub fn msccl_functions() -> impl Iterator<Item = &'static Function> {
    msccl::FUNCTIONS.iter()
}

/// Every function that only AMD's library has.
pub fn rccl_functions() -> impl Iterator<Item = &'static Function> {
    rccl::FUNCTIONS.iter()
}

/// Every function of Strata's own.
pub fn own_functions() -> impl Iterator<Item = &'static Function> {
    own::FUNCTIONS.iter()
}

/// The data that the library exports: tables by which a vendor's library tells a profiler of its calls.
pub const PROFILER_TABLES: [&str; 3] = ["ncclProfiler_v4", "ncclProfiler_v5", "ncclProfiler_v7"];

/// From now on calls on communicators of the host are Strata's, also where another library serves the process.
pub fn serve_host_communicators() {
    entry::serve_host_communicators(
        [nccl::ENTRIES, single::ENTRIES, msccl::ENTRIES, rccl::ENTRIES, own::ENTRIES].into_iter().flatten(),
    );
}

/// Every name the library exports.
pub fn exported_names() -> Vec<String> {
    let rccl = rccl_functions().filter(|_| cfg!(feature = "rccl"));
    nccl_functions().chain(msccl_functions()).chain(rccl).chain(own_functions()).flat_map(Function::names).collect()
}
