//! A soft GPU: a double of the GPU drivers' libraries, in which what is not synchronised goes wrong.
//!
//! Streams are threads that run late and out of step, as a seed decides; device memory traps when the host touches it;
//! kernels are Strata's, computed on the host, or any, interpreted. A program finds it under the driver's file name.
//!
//! | variable | |
//! |---|---|
//! | `SOFTGPU_DEVICES` | how many devices there are (8) |
//! | `SOFTGPU_SEED` | what decides how late streams run (1); also `softgpuSeed` |
//! | `SOFTGPU_EAGER=1` | streams do not dally |
//! | `SOFTGPU_CONNECTIONS=1` | all streams of a priority share one queue ([`pipe`]) |
//! | `SOFTGPU_MEMORY_BYTES`, `SOFTGPU_PINNED_BYTES` | memory of each device, and host memory that may be pinned |
//! | `SOFTGPU_PTX=1` | kernels are the PTX that the program loads, interpreted ([`interpreted`]), and not computed on the host |
//! | `SOFTGPU_SWITCHES` | the PCIe switch of each device, as numbers separated by commas; without it copies are as fast as they are |
//! | `SOFTGPU_SWITCH_MBS` | MB/s that the copies to the host behind one switch share (1000) |
//! | `SOFTGPU_STILL` | the beginning of threads' names: one of them that allocates, frees, pins or loads ends the process |
//! | `SOFTGPU_ABSENT` | functions, separated by commas, that are not supported |
//! | `SOFTGPU_BREAK` | synchronisations and kernels, separated by commas, that do nothing and claim success |
//!
//! What can be broken: `cuStreamWaitEvent`, `cuEventQuery`, `cuEventSynchronize`, `cuEventRecord`,
//! `cuStreamWaitValue32_v2`, their namesakes of HIP, and every kernel of Strata's.
//!
//! What it is stricter in than a driver: calls that the documentation lets be asynchronous are; freeing memory waits for
//! nothing; a kernel reaches only its own device's memory and pinned memory; nothing is ever at an address again.

// Fields of variants that have the names of a driver's parameters; functions of a C interface take its pointers on trust, and are
// not declared unsafe.
#![allow(missing_docs, clippy::not_unsafe_ptr_arg_deref)]

pub mod capture;
pub mod context;
pub mod copies;
pub mod entry;
pub mod event;
pub mod fault;
pub mod handles;
pub mod interpreted;
pub mod kernels;
pub mod memory;
pub mod modules;
pub mod pipe;
pub mod pools;
pub mod random;
pub mod reserved;
pub mod settings;
pub mod stream;
pub mod switch;
pub mod work;

use memory::{By, View};
use std::ffi::c_void;

/// Where the host finds device memory; null for any other address.
pub fn host_address(address: u64) -> *mut c_void {
    let is_device = memory::find(address).is_some_and(|block| block.kind == memory::Kind::Device);
    match View::of(address, 1, By::Copy) {
        Ok(view) if is_device => view.host().cast(),
        _ => std::ptr::null_mut(),
    }
}

/// Live allocations, their bytes, live pinned blocks, streams, events; contexts retained; launches and blocking calls so
/// far.
pub fn counts() -> [u64; 8] {
    let [allocations, bytes, pinned] = memory::counts();
    let (streams, events, contexts) = (stream::count(), event::count(), context::retained());
    [allocations, bytes, pinned, streams, events, contexts, modules::launches(), copies::blocking_calls()]
}

/// Declares the functions that the double has beside the driver's.
#[macro_export]
macro_rules! own_exports {
    () => {
        /// Where the host finds device memory; null for any other address.
        #[no_mangle]
        pub extern "C" fn softgpuHostAddress(address: u64) -> *mut std::ffi::c_void {
            $crate::host_address(address)
        }

        /// All streams start over with this seed.
        #[no_mangle]
        pub extern "C" fn softgpuSeed(seed: u32) {
            $crate::settings::set_seed(seed);
        }

        /// Eight counters: see [`softgpu::counts`].
        #[no_mangle]
        pub extern "C" fn softgpuCounts(out: *mut [u64; 8]) {
            $crate::entry::put_if_wanted(out, $crate::counts());
        }
    };
}
