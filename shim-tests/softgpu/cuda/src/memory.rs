//! Memory and copies.
#![allow(non_snake_case)]

use softgpu::capture;
use softgpu::context::{current, Context};
use softgpu::copies;
use softgpu::entry::put;
use softgpu::fault::{Result, INVALID_VALUE};
use softgpu::memory::{self, Kind};
use softgpu::stream::{self, Stream};
use softgpu::work::Fill;
use std::sync::Arc;

/// The current context, for a call that a capture forbids.
fn unsafe_current() -> Result<Arc<Context>> {
    let context = current()?;
    capture::forbid_unsafe()?;
    Ok(context)
}

/// The legacy stream, on which calls without a stream work.
fn legacy() -> Result<Arc<Stream>> {
    Ok(current()?.legacy())
}

fn on(stream: usize) -> Result<Arc<Stream>> {
    stream::find(stream, &current()?)
}

/// Bytes of so many elements.
fn bytes_of(count: usize, width: usize) -> Result<usize> {
    count.checked_mul(width).ok_or(INVALID_VALUE)
}

softgpu::exports! { call:
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        put(address, memory::allocate(&*unsafe_current()?, Kind::Device, bytes)?)
    }
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, _flags: u32) {
        put(address, memory::allocate(&*unsafe_current()?, Kind::Managed, bytes)?)
    }
    fn cuMemFree_v2(address: u64) {
        unsafe_current()?;
        if address == 0 { Ok(()) } else { memory::free(address, &[Kind::Device, Kind::Managed]) }
    }
    fn cuMemHostAlloc(address: *mut u64, bytes: usize, _flags: u32) {
        put(address, memory::allocate(&*unsafe_current()?, Kind::Pinned, bytes)?)
    }
    fn cuMemAllocHost_v2(address: *mut u64, bytes: usize) {
        put(address, memory::allocate(&*unsafe_current()?, Kind::Pinned, bytes)?)
    }
    fn cuMemFreeHost(address: u64) {
        unsafe_current()?;
        memory::free(address, &[Kind::Pinned])
    }
    fn cuMemHostRegister_v2(address: u64, bytes: usize, _flags: u32) {
        memory::register(&*unsafe_current()?, address, bytes)
    }
    fn cuMemHostUnregister(address: u64) {
        unsafe_current()?;
        memory::free(address, &[Kind::Registered])
    }
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, address: u64, _flags: u32) {
        current()?;
        let block = memory::find(address).filter(|block| block.kind != Kind::Device).ok_or(INVALID_VALUE)?;
        drop(block);
        put(device, address)
    }
    fn cuMemcpy(dst: u64, src: u64, bytes: usize) { copies::copy(&legacy()?, dst, src, bytes) }
    fn cuMemcpyHtoD_v2(dst: u64, src: u64, bytes: usize) { copies::copy(&legacy()?, dst, src, bytes) }
    fn cuMemcpyDtoH_v2(dst: u64, src: u64, bytes: usize) { copies::copy(&legacy()?, dst, src, bytes) }
    fn cuMemcpyDtoD_v2(dst: u64, src: u64, bytes: usize) { copies::copy(&legacy()?, dst, src, bytes) }
    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: usize) {
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn cuMemcpyHtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: usize) {
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn cuMemcpyDtoHAsync_v2(dst: u64, src: u64, bytes: usize, stream: usize) {
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: usize) {
        copies::copy_async(&on(stream)?, dst, src, bytes)
    }
    fn cuMemsetD8_v2(dst: u64, value: u8, bytes: usize) {
        copies::fill(&legacy()?, Fill::of_row(dst, value.into(), 1, bytes))
    }
    fn cuMemsetD8Async(dst: u64, value: u8, bytes: usize, stream: usize) {
        copies::fill(&on(stream)?, Fill::of_row(dst, value.into(), 1, bytes))
    }
    fn cuMemsetD16Async(dst: u64, value: u16, count: usize, stream: usize) {
        copies::fill(&on(stream)?, Fill::of_row(dst, value.into(), 2, bytes_of(count, 2)?))
    }
    fn cuMemsetD32Async(dst: u64, value: u32, count: usize, stream: usize) {
        copies::fill(&on(stream)?, Fill::of_row(dst, value, 4, bytes_of(count, 4)?))
    }
    fn cuMemsetD2D32Async(dst: u64, pitch: usize, value: u32, width: usize, rows: usize, stream: usize) {
        copies::fill(&on(stream)?, Fill { dst, value, width: 4, row: bytes_of(width, 4)?, rows, pitch })
    }
}
