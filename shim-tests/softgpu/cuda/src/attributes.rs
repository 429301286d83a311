//! Attributes of devices, functions and pointers, by CUDA's numbers.
#![allow(non_snake_case)]

use softgpu::context;
use softgpu::entry::{element, put};
use softgpu::fault::{Result, INVALID_VALUE};
use softgpu::memory::{self, Block, Kind};
use softgpu::modules::THREADS;
use softgpu::settings::is_absent;
use std::ffi::c_void;

/// An attribute of a device; 0 for those that nobody here has asked about.
pub(crate) fn of_device(attribute: i32, device: i32) -> i32 {
    let memory_operations = !is_absent("cuStreamWaitValue32_v2") && !is_absent("cuStreamWriteValue32_v2");
    match attribute {
        1 => 1024,                                                // MAX_THREADS_PER_BLOCK
        2 | 3 => 1024,                                            // MAX_BLOCK_DIM_X, _Y
        4 => 64,                                                  // MAX_BLOCK_DIM_Z
        5 => i32::MAX,                                            // MAX_GRID_DIM_X
        6 | 7 => 65535,                                           // MAX_GRID_DIM_Y, _Z
        8 => 48 << 10,                                            // MAX_SHARED_MEMORY_PER_BLOCK
        10 => 32,                                                 // WARP_SIZE
        16 => 108,                                                // MULTIPROCESSOR_COUNT
        33 => device + 1,                                         // PCI_BUS_ID
        39 => 2048,                                               // MAX_THREADS_PER_MULTIPROCESSOR
        40 => 3,                                                  // ASYNC_ENGINE_COUNT
        19 | 31 | 41 | 78 | 83 | 91 | 99 => 1, // host memory mapped, kernels side by side, one address space, priorities
        75 => 8,                               // COMPUTE_CAPABILITY_MAJOR
        92 | 93 | 94 | 122 | 123 => i32::from(memory_operations), // CAN_USE_STREAM_MEM_OPS, their 64 bits, and NOR
        102 | 115 => 1,                        // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, MEMORY_POOLS_SUPPORTED
        _ => 0,
    }
}

/// An attribute of a function.
pub(crate) fn of_function(attribute: i32) -> i32 {
    match attribute {
        0 => THREADS as i32, // MAX_THREADS_PER_BLOCK
        4 => 32,             // NUM_REGS
        5 | 6 => 80,         // PTX_VERSION, BINARY_VERSION
        _ => 0,
    }
}

/// Stores an attribute of the block that an address is in.
fn put_attribute(out: *mut c_void, attribute: i32, address: u64, block: &Block) -> Result {
    let is_host = matches!(block.kind, Kind::Pinned | Kind::Registered);
    match attribute {
        1 => put(out.cast(), block.context),
        2 => put(out.cast(), if is_host { 1u32 } else { 2 }),
        3 => put(out.cast(), address),
        4 if block.kind == Kind::Device => Err(INVALID_VALUE),
        4 => put(out.cast(), address),
        6 => Ok(()), // SYNC_MEMOPS can be set only
        8 => put(out.cast(), u32::from(block.kind == Kind::Managed)),
        9 => put(out.cast(), block.device),
        11 => put(out.cast(), block.start),
        12 => put(out.cast(), block.bytes as usize),
        13 => put(out.cast(), 1u32),
        _ => Err(INVALID_VALUE),
    }
}

softgpu::exports! { call:
    fn cuPointerGetAttribute(out: *mut c_void, attribute: i32, address: u64) {
        let block = memory::find(address).ok_or(INVALID_VALUE)?;
        put_attribute(out, attribute, address, &block)
    }
    fn cuPointerGetAttributes(count: u32, attributes: *const i32, outs: *const *mut c_void, address: u64) {
        let block = memory::find(address);
        for index in 0..count as usize {
            let (attribute, out) = (element(attributes, index)?, element(outs, index)?);
            match &block {
                Some(block) => put_attribute(out, attribute, address, block)
                    // Asked for together, what a pointer does not have is 0 and no failure.
                    .or_else(|_| put(out.cast(), 0u64))?,
                // So is everything of a pointer that the driver does not know.
                None if matches!(attribute, 1 | 3 | 4 | 11 | 12) => put(out.cast(), 0u64)?,
                None if attribute == 9 => put(out.cast(), -2i32)?,
                None => put(out.cast(), 0u32)?,
            }
        }
        Ok(())
    }
    fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, address: u64) {
        context::current()?;
        let block = memory::find(address).ok_or(INVALID_VALUE)?;
        softgpu::entry::put_if_wanted(start, block.start);
        softgpu::entry::put_if_wanted(bytes, block.bytes as usize);
        Ok(())
    }
}
