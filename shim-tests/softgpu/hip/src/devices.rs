//! The runtime, its devices, and modules.
#![allow(non_snake_case)]

use softgpu::capture;
use softgpu::context::{self, check_device, Context};
use softgpu::copies::note_blocking;
use softgpu::entry::{put, put_if_wanted, put_text};
use softgpu::fault::{self, Result};
use softgpu::modules;
use softgpu::settings::{is_absent, settings};
use softgpu::stream;
use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex};

/// HIP 6.4.
const VERSION: i32 = 60_443_483;

thread_local! {
    static DEVICE: Cell<i32> = const { Cell::new(0) };
}

/// Held while it is decided whether a device's primary context must come to life.
static RETAINING: Mutex<()> = Mutex::new(());

/// The primary context of the thread's device, which comes to life at its first use.
pub fn current() -> Result<Arc<Context>> {
    let _retaining = RETAINING.lock().unwrap();
    let device = DEVICE.get();
    let context = match context::primary(device)? {
        Some(context) => context,
        None => context::retain(device)?,
    };
    context.check()?;
    Ok(context)
}

/// The same for a call that a capture may forbid.
pub fn unsafe_current() -> Result<Arc<Context>> {
    let context = current()?;
    capture::forbid_unsafe()?;
    Ok(context)
}

fn name(code: i32) -> *const c_char {
    fault::names(code).map_or(c"hipErrorUnknown".as_ptr(), |names| names[1].as_ptr())
}

/// The name of an error.
#[no_mangle]
pub extern "C" fn hipGetErrorName(code: i32) -> *const c_char {
    name(code)
}

/// The name of an error, which says as much as its text would.
#[no_mangle]
pub extern "C" fn hipGetErrorString(code: i32) -> *const c_char {
    name(code)
}

fn attribute(number: i32, device: i32) -> i32 {
    let waits = !is_absent("hipStreamWaitValue32") && !is_absent("hipStreamWriteValue32");
    match number {
        2 => 3,                         // AsyncEngineCount
        3 | 8 | 24 | 78 | 85 | 90 => 1, // host memory mapped, kernels side by side, managed memory, priorities
        23 => 9,                        // ComputeCapabilityMajor
        26..=28 | 56 => 1024,           // MaxBlockDim, MaxThreadsPerBlock
        29 => i32::MAX,                 // MaxGridDimX
        30 | 31 => 65535,               // MaxGridDimY, Z
        57 => 2048,                     // MaxThreadsPerMultiProcessor
        61 => 0,                        // ComputeCapabilityMinor
        63 => 104,                      // MultiprocessorCount
        67 => device + 1,               // PciBusId
        87 => 64,                       // WarpSize
        10013 => i32::from(waits),      // CanUseStreamWaitValue
        _ => 0,
    }
}

softgpu::exports! { any_time:
    fn hipInit(flags: u32) { if flags == 0 { Ok(()) } else { Err(fault::INVALID_VALUE) } }
    fn hipRuntimeGetVersion(version: *mut i32) { put(version, VERSION) }
    fn hipDriverGetVersion(version: *mut i32) { put(version, VERSION) }
    fn hipGetDeviceCount(count: *mut i32) { put(count, settings().devices) }
    fn hipSetDevice(device: i32) {
        DEVICE.set(check_device(device)?);
        Ok(())
    }
    fn hipGetDevice(device: *mut i32) { put(device, DEVICE.get()) }
    fn hipDeviceGet(device: *mut i32, ordinal: i32) { put(device, check_device(ordinal)?) }
    fn hipDeviceGetName(text: *mut c_char, room: i32, device: i32) {
        check_device(device)?;
        put_text(text, room, "Soft GPU")
    }
    fn hipDeviceTotalMem(bytes: *mut usize, device: i32) {
        check_device(device)?;
        put(bytes, settings().memory_bytes as usize)
    }
    fn hipDeviceGetAttribute(value: *mut i32, number: i32, device: i32) {
        put(value, attribute(number, check_device(device)?))
    }
    fn hipDeviceGetPCIBusId(text: *mut c_char, room: i32, device: i32) {
        check_device(device)?;
        put_text(text, room, &format!("0000:{:02x}:00.0", device + 1))
    }
    fn hipDeviceSynchronize() {
        let context = unsafe_current()?;
        note_blocking();
        context.synchronize()
    }
    fn hipDeviceReset() {
        let _retaining = RETAINING.lock().unwrap();
        match context::primary(DEVICE.get())? {
            Some(context) => context::release(context.device),
            None => Ok(()),
        }
    }
    fn hipDeviceGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        put_if_wanted(least, 1);
        put_if_wanted(greatest, -1);
        Ok(())
    }
    fn hipModuleLoadData(module: *mut usize, image: *const c_void) {
        put(module, modules::load(&unsafe_current()?, image)?)
    }
    fn hipModuleUnload(module: usize) { modules::unload(module) }
    fn hipModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        put(function, modules::function(module, name)?)
    }
    fn hipModuleLaunchKernel(
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
        let stream = stream::find(stream, &current()?)?;
        let blocks = [blocks_x, blocks_y, blocks_z];
        modules::launch(function, &stream, blocks, [threads_x, threads_y, threads_z], params, extra)
    }
}
