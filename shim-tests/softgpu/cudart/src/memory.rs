//! Memory and copies.

use crate::calls::{calls, put};
use crate::driver;
use crate::errors::{INVALID_MEMCPY_DIRECTION, INVALID_VALUE};
use std::ffi::c_void;

/// `cudaMemcpyDefault`, the last of the directions; with one address space the addresses say what the direction is.
const DEFAULT: i32 = 4;

/// `cudaPointerAttributes`.
#[repr(C)]
pub struct PointerAttributes {
    kind: i32,
    device: i32,
    device_pointer: u64,
    host_pointer: u64,
    reserved: [u64; 8],
}

fn is_direction(direction: i32) -> bool {
    (0..=DEFAULT).contains(&direction)
}

/// Allocates; nothing has no address.
fn allocate(out: *mut u64, bytes: usize, how: impl Fn(*mut u64, usize) -> i32) -> i32 {
    if out.is_null() {
        return INVALID_VALUE;
    }
    put(out, 0);
    if bytes == 0 {
        0
    } else {
        how(out, bytes)
    }
}

/// Frees what has an address.
fn free(address: u64, how: impl Fn(u64) -> i32) -> i32 {
    if address == 0 {
        0
    } else {
        how(address)
    }
}

calls! { ready:
    fn cudaMalloc(address: *mut u64, bytes: usize) { allocate(address, bytes, |at, bytes| driver::cuMemAlloc_v2(at, bytes)) }
    fn cudaMallocManaged(address: *mut u64, bytes: usize, flags: u32) {
        allocate(address, bytes, |at, bytes| driver::cuMemAllocManaged(at, bytes, flags))
    }
    fn cudaFree(address: u64) { free(address, |at| driver::cuMemFree_v2(at)) }
    fn cudaMallocHost(address: *mut u64, bytes: usize) {
        allocate(address, bytes, |at, bytes| driver::cuMemHostAlloc(at, bytes, 0))
    }
    fn cudaHostAlloc(address: *mut u64, bytes: usize, flags: u32) {
        allocate(address, bytes, |at, bytes| driver::cuMemHostAlloc(at, bytes, flags))
    }
    fn cudaFreeHost(address: u64) { free(address, |at| driver::cuMemFreeHost(at)) }
    fn cudaHostRegister(address: u64, bytes: usize, flags: u32) { driver::cuMemHostRegister_v2(address, bytes, flags) }
    fn cudaHostUnregister(address: u64) { driver::cuMemHostUnregister(address) }
    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) { driver::cuMemGetInfo_v2(free, total) }
    fn cudaMallocAsync(address: *mut u64, bytes: usize, stream: usize) {
        allocate(address, bytes, |at, bytes| driver::cuMemAllocAsync(at, bytes, stream))
    }
    fn cudaFreeAsync(address: u64, stream: usize) { free(address, |at| driver::cuMemFreeAsync(at, stream)) }
    fn cudaDeviceGetDefaultMemPool(pool: *mut usize, device: i32) { driver::cuDeviceGetDefaultMemPool(pool, device) }
    fn cudaMemPoolGetAttribute(pool: usize, attribute: i32, value: *mut c_void) {
        driver::cuMemPoolGetAttribute(pool, attribute, value)
    }
    fn cudaMemPoolSetAttribute(pool: usize, attribute: i32, value: *mut c_void) {
        driver::cuMemPoolSetAttribute(pool, attribute, value)
    }
    fn cudaMemPoolSetAccess(pool: usize, accesses: *const c_void, count: usize) {
        driver::cuMemPoolSetAccess(pool, accesses, count)
    }
    fn cudaMemPoolTrimTo(pool: usize, bytes: usize) { driver::cuMemPoolTrimTo(pool, bytes) }
    fn cudaMemcpy(dst: u64, src: u64, bytes: usize, direction: i32) {
        if !is_direction(direction) {
            return INVALID_MEMCPY_DIRECTION;
        }
        driver::cuMemcpy(dst, src, bytes)
    }
    fn cudaMemcpyAsync(dst: u64, src: u64, bytes: usize, direction: i32, stream: usize) {
        if !is_direction(direction) {
            return INVALID_MEMCPY_DIRECTION;
        }
        driver::cuMemcpyAsync(dst, src, bytes, stream)
    }
    fn cudaMemcpyPeerAsync(dst: u64, _dst_device: i32, src: u64, _src_device: i32, bytes: usize, stream: usize) {
        driver::cuMemcpyAsync(dst, src, bytes, stream)
    }
    fn cudaMemcpy2DAsync(
        dst: u64,
        dst_pitch: usize,
        src: u64,
        src_pitch: usize,
        width: usize,
        height: usize,
        direction: i32,
        stream: usize,
    ) {
        if !is_direction(direction) {
            return INVALID_MEMCPY_DIRECTION;
        }
        if width > dst_pitch || width > src_pitch {
            return INVALID_VALUE;
        }
        let row = |row: usize| {
            driver::cuMemcpyAsync(dst + (row * dst_pitch) as u64, src + (row * src_pitch) as u64, width, stream)
        };
        (0..height).map(row).find(|code| *code != 0).unwrap_or(0)
    }
    fn cudaMemset(dst: u64, value: i32, bytes: usize) { driver::cuMemsetD8_v2(dst, value as u8, bytes) }
    fn cudaMemsetAsync(dst: u64, value: i32, bytes: usize, stream: usize) {
        driver::cuMemsetD8Async(dst, value as u8, bytes, stream)
    }
    fn cudaPointerGetAttributes(out: *mut PointerAttributes, address: u64) {
        // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL, _DEVICE_POINTER, _HOST_POINTER.
        let wanted = [2, 8, 9, 3, 4];
        let (mut kind, mut is_managed, mut device, mut device_pointer, mut host_pointer) = (0u32, 0u32, 0i32, 0u64, 0u64);
        let places: [*mut c_void; 5] = [
            (&raw mut kind).cast(),
            (&raw mut is_managed).cast(),
            (&raw mut device).cast(),
            (&raw mut device_pointer).cast(),
            (&raw mut host_pointer).cast(),
        ];
        match driver::cuPointerGetAttributes(5, wanted.as_ptr(), places.as_ptr(), address) {
            0 => {}
            code => return code,
        }
        let (kind, device, host_pointer) = match kind {
            // What the driver does not know is pageable memory of the host.
            0 => (0, -2, address),
            _ if is_managed != 0 => (3, device, host_pointer),
            kind => (kind as i32, device, host_pointer),
        };
        put(out, PointerAttributes { kind, device, device_pointer, host_pointer, reserved: [0; 8] });
        0
    }
}
