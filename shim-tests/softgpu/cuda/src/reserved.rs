//! Reserved addresses, memory that is mapped at them, and pools.
#![allow(non_snake_case)]

use softgpu::context::current;
use softgpu::entry::{element, put};
use softgpu::fault::{Result, INVALID_VALUE, NOT_SUPPORTED};
use softgpu::stream;
use softgpu::{pools, reserved};
use std::ffi::c_void;

/// `CUmemLocation`: what kind of place (1: a device), and its number.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Location {
    kind: u32,
    id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: *const c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    location: Location,
    flags: u32,
}

const PINNED: u32 = 1;
const DEVICE: u32 = 1;
const READ_WRITE: u32 = 3;

/// The device that memory with these properties is of.
fn device_of(properties: *const Properties) -> Result<i32> {
    let properties = element(properties, 0)?;
    if properties.kind != PINNED || properties.location.kind != DEVICE {
        return Err(INVALID_VALUE);
    }
    // 1: a file, as PyTorch asks for; it is made, and nothing can be had of it.
    if properties.handle_types & !1 != 0 {
        return Err(NOT_SUPPORTED);
    }
    Ok(properties.location.id)
}

softgpu::exports! { call:
    fn cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const Properties, option: u32) {
        device_of(properties)?;
        if option > 1 {
            return Err(INVALID_VALUE);
        }
        put(bytes, reserved::GRANULARITY as usize)
    }
    fn cuMemCreate(handle: *mut usize, bytes: usize, properties: *const Properties, flags: u64) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        put(handle, reserved::create(device_of(properties)?, bytes as u64)?)
    }
    fn cuMemRelease(handle: usize) { reserved::release(handle) }
    fn cuMemRetainAllocationHandle(handle: *mut usize, address: u64) { put(handle, reserved::retain(address)?) }
    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: usize) {
        let location = Location { kind: DEVICE, id: reserved::find(handle)?.device };
        let win32 = std::ptr::null();
        let plain = Properties {
            kind: PINNED, handle_types: 0, location, win32, compression: 0, rdma: 0, usage: 0, reserved: [0; 4],
        };
        put(properties, plain)
    }
    fn cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, _wish: u64, flags: u64) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        put(address, reserved::reserve(bytes as u64, alignment as u64)?)
    }
    fn cuMemAddressFree(address: u64, bytes: usize) { reserved::free(address, bytes as u64) }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: usize, flags: u64) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        reserved::map(address, bytes as u64, offset as u64, handle)
    }
    fn cuMemUnmap(address: u64, bytes: usize) { reserved::unmap(address, bytes as u64) }
    fn cuMemSetAccess(address: u64, bytes: usize, accesses: *const Access, count: usize) {
        if count == 0 {
            return Err(INVALID_VALUE);
        }
        for index in 0..count {
            let access = element(accesses, index)?;
            if access.location.kind != DEVICE || ![0, READ_WRITE].contains(&access.flags) {
                return Err(INVALID_VALUE);
            }
            reserved::set_access(address, bytes as u64, access.location.id, access.flags == READ_WRITE)?;
        }
        Ok(())
    }
    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: i32) { put(pool, pools::default_of(device)?) }
    fn cuDeviceGetMemPool(pool: *mut usize, device: i32) { put(pool, pools::default_of(device)?) }
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: usize, stream: usize) {
        pools::find(pool)?;
        put(address, pools::allocate(&stream::find(stream, &current()?)?, bytes)?)
    }
    fn cuMemPoolGetAttribute(pool: usize, attribute: i32, value: *mut u64) {
        put(value, pools::find(pool)?.attribute(attribute)?)
    }
    fn cuMemPoolSetAttribute(pool: usize, attribute: i32, value: *const u64) {
        pools::find(pool)?.set_attribute(attribute, element(value, 0)?)
    }
    fn cuMemPoolSetAccess(pool: usize, accesses: *const Access, count: usize) {
        pools::find(pool)?;
        (0..count).try_for_each(|index| element(accesses, index).map(drop))
    }
    fn cuMemPoolTrimTo(pool: usize, _bytes: usize) { pools::find(pool).map(drop) }
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: usize) {
        put(address, pools::allocate(&stream::find(stream, &current()?)?, bytes)?)
    }
    fn cuMemFreeAsync(address: u64, stream: usize) { pools::free(&stream::find(stream, &current()?)?, address) }
}
