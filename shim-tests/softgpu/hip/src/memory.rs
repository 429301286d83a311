//! Memory and copies.
#![allow(non_snake_case)]

use crate::devices::{current, unsafe_current};
use softgpu::copies;
use softgpu::entry::put;
use softgpu::fault::{Result, INVALID_VALUE};
use softgpu::memory::{self, used_bytes, Kind};
use softgpu::settings::settings;
use softgpu::stream::{self, Stream};
use softgpu::work::Fill;
use std::sync::Arc;

fn on(stream: usize) -> Result<Arc<Stream>> {
    stream::find(stream, &current()?)
}

/// Allocates; of nothing comes no address.
fn allocate(address: *mut u64, kind: Kind, bytes: usize) -> Result {
    let context = unsafe_current()?;
    put(address, if bytes == 0 { 0 } else { memory::allocate(&context, kind, bytes)? })
}

fn free(address: u64, kinds: &[Kind]) -> Result {
    unsafe_current()?;
    if address == 0 {
        return Ok(());
    }
    memory::free(address, kinds)
}

/// `hipMemcpyKind`: from the host (0, 1), from a device (2, 3), or by the addresses (4).
fn check_kind(kind: i32) -> Result {
    if (0..=4).contains(&kind) {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}

softgpu::exports! { any_time:
    fn hipMalloc(address: *mut u64, bytes: usize) { allocate(address, Kind::Device, bytes) }
    fn hipFree(address: u64) { free(address, &[Kind::Device, Kind::Managed]) }
    fn hipMallocManaged(address: *mut u64, bytes: usize, _flags: u32) { allocate(address, Kind::Managed, bytes) }
    fn hipHostMalloc(address: *mut u64, bytes: usize, _flags: u32) { allocate(address, Kind::Pinned, bytes) }
    fn hipHostFree(address: u64) { free(address, &[Kind::Pinned]) }
    fn hipHostRegister(address: u64, bytes: usize, _flags: u32) {
        memory::register(&*unsafe_current()?, address, bytes)
    }
    fn hipHostUnregister(address: u64) { free(address, &[Kind::Registered]) }
    fn hipHostGetDevicePointer(device: *mut u64, address: u64, _flags: u32) {
        let is_host = memory::find(address).is_some_and(|block| block.kind != Kind::Device);
        if is_host { put(device, address) } else { Err(INVALID_VALUE) }
    }
    fn hipMemGetInfo(free: *mut usize, total: *mut usize) {
        let all = settings().memory_bytes;
        put(free, (all - used_bytes(current()?.device)) as usize)?;
        put(total, all as usize)
    }
    fn hipMemcpy(dst: u64, src: u64, bytes: usize, kind: i32) {
        check_kind(kind)?;
        copies::copy(&on(0)?, dst, src, bytes)
    }
    fn hipMemcpyAsync(dst: u64, src: u64, bytes: usize, kind: i32, stream: usize) {
        check_kind(kind)?;
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn hipMemcpyHtoD(dst: u64, src: u64, bytes: usize) { copies::copy(&on(0)?, dst, src, bytes) }
    fn hipMemcpyDtoH(dst: u64, src: u64, bytes: usize) { copies::copy(&on(0)?, dst, src, bytes) }
    fn hipMemcpyDtoD(dst: u64, src: u64, bytes: usize) { copies::copy(&on(0)?, dst, src, bytes) }
    fn hipMemcpyHtoDAsync(dst: u64, src: u64, bytes: usize, stream: usize) {
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn hipMemcpyDtoHAsync(dst: u64, src: u64, bytes: usize, stream: usize) {
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn hipMemcpyDtoDAsync(dst: u64, src: u64, bytes: usize, stream: usize) {
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn hipMemset(dst: u64, value: i32, bytes: usize) {
        copies::fill(&on(0)?, Fill::of_row(dst, value as u32, 1, bytes))
    }
    fn hipMemsetAsync(dst: u64, value: i32, bytes: usize, stream: usize) {
        copies::fill(&on(stream)?, Fill::of_row(dst, value as u32, 1, bytes))
    }
}
