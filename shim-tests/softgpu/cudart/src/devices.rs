//! Devices: attributes and properties.

use crate::calls::{calls, put};
use crate::context::{self, device_count};
use crate::driver;
use crate::errors::{INVALID_DEVICE, INVALID_VALUE};
use std::ffi::c_char;

/// Bytes of `cudaDeviceProp`.
const BYTES: usize = 1008;
const UUID: usize = 256;
const TOTAL_MEMORY: usize = 288;
/// Where the fields of `cudaDeviceProp` lie that are attributes of the driver: their offset and bytes, and the attribute.
/// The test `c/cudart.c` reads them by NVIDIA's header.
const ATTRIBUTES: [(usize, usize, i32); 33] = [
    (296, 8, 8),   // sharedMemPerBlock
    (304, 4, 12),  // regsPerBlock
    (308, 4, 10),  // warpSize
    (312, 8, 11),  // memPitch
    (320, 4, 1),   // maxThreadsPerBlock
    (324, 4, 2),   // maxThreadsDim
    (328, 4, 3),   //
    (332, 4, 4),   //
    (336, 4, 5),   // maxGridSize
    (340, 4, 6),   //
    (344, 4, 7),   //
    (352, 8, 9),   // totalConstMem
    (360, 4, 75),  // major
    (364, 4, 76),  // minor
    (384, 4, 16),  // multiProcessorCount
    (388, 4, 18),  // integrated
    (392, 4, 19),  // canMapHostMemory
    (560, 4, 31),  // concurrentKernels
    (564, 4, 32),  // ECCEnabled
    (568, 4, 33),  // pciBusID
    (572, 4, 34),  // pciDeviceID
    (576, 4, 50),  // pciDomainID
    (584, 4, 40),  // asyncEngineCount
    (588, 4, 41),  // unifiedAddressing
    (596, 4, 38),  // l2CacheSize
    (604, 4, 39),  // maxThreadsPerMultiProcessor
    (608, 4, 78),  // streamPrioritiesSupported
    (624, 8, 81),  // sharedMemPerMultiprocessor
    (632, 4, 82),  // regsPerMultiprocessor
    (636, 4, 83),  // managedMemory
    (668, 4, 95),  // cooperativeLaunch
    (704, 4, 99),  // hostRegisterSupported
    (720, 4, 115), // memoryPoolsSupported
];

/// The bytes of `cudaDeviceProp`.
fn properties(device: i32) -> Result<[u8; BYTES], i32> {
    let mut bytes = [0; BYTES];
    let mut name = [0u8; UUID];
    let mut uuid = [0; 16];
    let mut memory = 0usize;
    for code in [
        driver::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device),
        driver::cuDeviceGetUuid_v2(&mut uuid, device),
        driver::cuDeviceTotalMem_v2(&mut memory, device),
    ] {
        if code != 0 {
            return Err(code);
        }
    }
    bytes[..UUID].copy_from_slice(&name);
    bytes[UUID..UUID + 16].copy_from_slice(&uuid);
    bytes[TOTAL_MEMORY..TOTAL_MEMORY + 8].copy_from_slice(&memory.to_ne_bytes());
    for (offset, width, attribute) in ATTRIBUTES {
        let mut value = 0;
        match driver::cuDeviceGetAttribute(&mut value, attribute, device) {
            0 => bytes[offset..offset + width].copy_from_slice(&i64::from(value).to_ne_bytes()[..width]),
            code => return Err(code),
        }
    }
    Ok(bytes)
}

/// Checks the number of a device.
fn check(device: i32) -> i32 {
    match device_count() {
        Ok(count) if (0..count).contains(&device) => 0,
        Ok(_) => INVALID_DEVICE,
        Err(code) => code,
    }
}

calls! { plain:
    fn cudaGetDeviceProperties(out: *mut [u8; BYTES], device: i32) {
        if out.is_null() {
            return INVALID_VALUE;
        }
        match (check(device), properties(device)) {
            (0, Ok(found)) => {
                put(out, found);
                0
            }
            (0, Err(code)) | (code, _) => code,
        }
    }
    fn cudaDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) {
        match check(device) {
            0 => driver::cuDeviceGetAttribute(value, attribute, device),
            code => code,
        }
    }
    fn cudaDeviceGetPCIBusId(text: *mut c_char, room: i32, device: i32) {
        match check(device) {
            0 => driver::cuDeviceGetPCIBusId(text, room, device),
            code => code,
        }
    }
    fn cudaDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) {
        match check(device).max(check(peer)) {
            0 => driver::cuDeviceCanAccessPeer(can, device, peer),
            code => code,
        }
    }
    fn cudaDeviceEnablePeerAccess(peer: i32, flags: u32) {
        let mut can = 0;
        let code = match check(peer) {
            0 if flags != 0 => INVALID_VALUE,
            0 => driver::cuDeviceCanAccessPeer(&mut can, context::device(), peer),
            code => code,
        };
        // 217: cudaErrorPeerAccessUnsupported.
        if code == 0 && can == 0 { 217 } else { code }
    }
}
