//! What HIP says about pointers.
#![allow(non_snake_case)]

use softgpu::entry::{element, put};
use softgpu::fault::{Result, INVALID_VALUE};
use softgpu::memory::{self, Block, Kind};
use std::ffi::c_void;

/// `hipPointerAttribute_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PointerAttribute {
    /// A `hipMemoryType`.
    kind: u32,
    device: i32,
    device_pointer: u64,
    host_pointer: u64,
    is_managed: i32,
    flags: u32,
}

/// `hipMemoryType`, whose numbers are CUDA's since ROCm 6.
fn type_of(block: &Block) -> u32 {
    match block.kind {
        Kind::Pinned | Kind::Registered => 1,
        Kind::Device => 2,
        Kind::Managed => 3,
    }
}

fn attributes(address: u64, block: &Block) -> PointerAttribute {
    PointerAttribute {
        kind: type_of(block),
        device: block.device,
        device_pointer: address,
        host_pointer: if block.kind == Kind::Device { 0 } else { address },
        is_managed: i32::from(block.kind == Kind::Managed),
        flags: 0,
    }
}

const UNREGISTERED: PointerAttribute =
    PointerAttribute { kind: 0, device: -2, device_pointer: 0, host_pointer: 0, is_managed: 0, flags: 0 };

fn put_attribute(out: *mut c_void, number: i32, address: u64, block: &Block) -> Result {
    let all = attributes(address, block);
    match number {
        1 => put(out.cast(), block.context),
        2 => put(out.cast(), all.kind),
        3 => put(out.cast(), all.device_pointer),
        4 if all.host_pointer == 0 => Err(INVALID_VALUE),
        4 => put(out.cast(), all.host_pointer),
        8 => put(out.cast(), all.is_managed),
        9 => put(out.cast(), all.device),
        11 => put(out.cast(), block.start),
        12 => put(out.cast(), block.bytes as usize),
        _ => Err(INVALID_VALUE),
    }
}

softgpu::exports! { any_time:
    fn hipPointerGetAttributes(out: *mut PointerAttribute, address: u64) {
        match memory::find(address) {
            Some(block) => put(out, attributes(address, &block)),
            None => put(out, UNREGISTERED).and(Err(INVALID_VALUE)),
        }
    }
    fn hipPointerGetAttribute(out: *mut c_void, number: i32, address: u64) {
        let block = memory::find(address).ok_or(INVALID_VALUE)?;
        put_attribute(out, number, address, &block)
    }
    fn hipDrvPointerGetAttributes(count: u32, numbers: *const i32, outs: *const *mut c_void, address: u64) {
        let block = memory::find(address).ok_or(INVALID_VALUE)?;
        for index in 0..count as usize {
            put_attribute(element(outs, index)?, element(numbers, index)?, address, &block)?;
        }
        Ok(())
    }
}
