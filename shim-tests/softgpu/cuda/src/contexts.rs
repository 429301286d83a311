//! The driver, its devices, contexts and modules.
#![allow(non_snake_case)]

use crate::attributes;
use softgpu::capture;
use softgpu::context::{self, check_device};
use softgpu::copies::note_blocking;
use softgpu::entry::{self, put, put_if_wanted, put_text};
use softgpu::fault::{self, INVALID_VALUE, NOT_FOUND};
use softgpu::memory::used_bytes;
use softgpu::modules;
use softgpu::settings::settings;
use softgpu::stream;
use std::ffi::{c_char, c_void, CStr, CString};

softgpu::exports! { early:
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        entry::initialize();
        Ok(())
    }
    fn cuDriverGetVersion(version: *mut i32) { put(version, 13_020) }
    fn cuGetErrorName(code: i32, text: *mut *const c_char) { error_text(code, text) }
    fn cuGetErrorString(code: i32, text: *mut *const c_char) { error_text(code, text) }
    fn cuGetProcAddress_v2(
        symbol: *const c_char,
        function: *mut *mut c_void,
        _version: i32,
        _flags: u64,
        status: *mut i32,
    ) {
        let found = symbol_of(symbol);
        put_if_wanted(status, i32::from(found.is_null()));
        put(function, found)?;
        if found.is_null() { Err(NOT_FOUND) } else { Ok(()) }
    }
}

fn error_text(code: i32, text: *mut *const c_char) -> fault::Result {
    let found = fault::names(code);
    put(text, found.map_or(std::ptr::null(), |names| names[0].as_ptr()))?;
    found.map(drop).ok_or(INVALID_VALUE)
}

/// The newest form of a function of this library.
fn symbol_of(name: *const c_char) -> *mut c_void {
    if name.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: a 0 must follow; because the program promises that of a text.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let own = c"libcuda.so.1";
    // SAFETY: the name must be a text; because it is a literal. The library is there, so nothing is loaded.
    let library = unsafe { libc::dlopen(own.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let library = if library.is_null() { libc::RTLD_DEFAULT } else { library };
    let forms = ["_v2", ""].map(|suffix| CString::new(format!("{name}{suffix}")).unwrap_or_default());
    // SAFETY: the library must be open and the name a text; because both were just made.
    let found = forms.iter().map(|form| unsafe { libc::dlsym(library, form.as_ptr()) });
    found.into_iter().find(|found| !found.is_null()).unwrap_or(std::ptr::null_mut())
}

/// Where a device is on the PCI bus.
pub(crate) fn pci_address(device: i32) -> String {
    format!("0000:{:02X}:00.0", device + 1)
}

/// A device's own.
fn uuid_of(device: i32) -> [u8; 16] {
    let mut uuid = *b"soft GPU\0\0\0\0\0\0\0\0";
    uuid[15] = device as u8;
    uuid
}

softgpu::exports! { call:
    fn cuDeviceGetCount(count: *mut i32) { put(count, settings().devices) }
    fn cuDeviceGet(device: *mut i32, ordinal: i32) { put(device, check_device(ordinal)?) }
    fn cuDeviceGetName(name: *mut c_char, room: i32, device: i32) {
        check_device(device)?;
        put_text(name, room, "Soft GPU")
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) {
        check_device(device)?;
        put(bytes, settings().memory_bytes as usize)
    }
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) {
        put(value, attributes::of_device(attribute, check_device(device)?))
    }
    fn cuDeviceGetPCIBusId(text: *mut c_char, room: i32, device: i32) {
        check_device(device)?;
        put_text(text, room, &pci_address(device))
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) { put(uuid, uuid_of(check_device(device)?)) }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) { put(uuid, uuid_of(check_device(device)?)) }
    fn cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) {
        check_device(device)?;
        check_device(peer)?;
        // Kernels reach their own device's memory.
        put(can, 0)
    }
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) { put(context, context::retain(device)?.handle) }
    fn cuDevicePrimaryCtxRelease_v2(device: i32) { context::release(device) }
    fn cuDevicePrimaryCtxReset_v2(device: i32) { context::reset(device) }
    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) {
        let context = context::primary(device)?;
        put(flags, 0)?;
        put(active, i32::from(context.is_some()))
    }
    fn cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32) {
        put(context, context::create(flags, device)?.handle)
    }
    fn cuCtxDestroy_v2(context: usize) { context::destroy(context) }
    fn cuCtxPushCurrent_v2(context: usize) {
        context::push(context::find(context)?);
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        put_if_wanted(context, context::pop()?.handle);
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut usize) { put(context, context::top().map_or(0, |context| context.handle)) }
    fn cuCtxSetCurrent(context: usize) {
        context::set(if context == 0 { None } else { Some(context::find(context)?) });
        Ok(())
    }
    fn cuCtxGetDevice(device: *mut i32) { put(device, context::current()?.device) }
    fn cuCtxGetFlags(flags: *mut u32) { put(flags, context::current()?.flags) }
    fn cuCtxSynchronize() {
        let context = context::current()?;
        capture::forbid_unsafe()?;
        capture::forbid_legacy(&context)?;
        note_blocking();
        context.synchronize()
    }
    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        context::current()?;
        put_if_wanted(least, 0);
        put_if_wanted(greatest, -5);
        Ok(())
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let all = settings().memory_bytes;
        put(free, (all - used_bytes(context::current()?.device)) as usize)?;
        put(total, all as usize)
    }
    fn cuModuleLoadData(module: *mut usize, image: *const c_void) {
        let context = context::current()?;
        capture::forbid_unsafe()?;
        put(module, modules::load(&context, image)?)
    }
    fn cuModuleUnload(module: usize) { modules::unload(module) }
    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        context::current()?;
        put(function, modules::function(module, name)?)
    }
    fn cuFuncGetAttribute(value: *mut i32, attribute: i32, function: usize) {
        modules::check_function(function)?;
        put(value, attributes::of_function(attribute))
    }
    fn cuLaunchKernel(
        function: usize,
        blocks_x: u32,
        blocks_y: u32,
        blocks_z: u32,
        threads_x: u32,
        threads_y: u32,
        threads_z: u32,
        _shared_bytes: u32,
        stream: usize,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let stream = stream::find(stream, &context::current()?)?;
        let blocks = [blocks_x, blocks_y, blocks_z];
        modules::launch(function, &stream, blocks, [threads_x, threads_y, threads_z], params, extra)
    }
}
