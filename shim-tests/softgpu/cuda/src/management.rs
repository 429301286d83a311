//! The part of NVIDIA's management library that PyTorch asks about a device's connections: there are none. Programs find it
//! as `libnvidia-ml.so.1`, another name of this library.
#![allow(non_snake_case)]

use softgpu::entry::put;
use softgpu::fault::Code;
use softgpu::settings::settings;
use std::ffi::{c_char, c_void, CStr};

const INVALID_ARGUMENT: Code = Code(2);
const NOT_SUPPORTED: Code = Code(3);
const NOT_FOUND: Code = Code(6);

/// The device of a PCI address, as text.
fn device_at(address: *const c_char) -> Result<usize, Code> {
    if address.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: a 0 must follow; because the program promises that of a text.
    let address = unsafe { CStr::from_ptr(address) }.to_string_lossy().to_uppercase();
    let devices = 0..settings().devices;
    // There may be more zeros at its beginning.
    let found = devices.into_iter().find(|device| address.ends_with(&crate::contexts::pci_address(*device)));
    found.map(|device| device as usize + 1).ok_or(NOT_FOUND)
}

softgpu::exports! { early:
    fn nvmlInit_v2() { Ok(()) }
    fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, device: *mut usize) { put(device, device_at(address)?) }
    fn nvmlDeviceGetGpuFabricInfoV(_device: usize, _information: *mut c_void) { Err(NOT_SUPPORTED) }
    fn nvmlDeviceGetNvLinkRemoteDeviceType(_device: usize, _link: u32, _kind: *mut u32) { Err(NOT_SUPPORTED) }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_device: usize, _link: u32, _pci: *mut c_void) { Err(NOT_SUPPORTED) }
    fn nvmlDeviceGetComputeRunningProcesses(_device: usize, _count: *mut u32, _list: *mut c_void) { Err(NOT_SUPPORTED) }
    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) { put(version, 13_020) }
}
