//! Which device a thread uses, and its context.

use crate::calls::{calls, put};
use crate::driver::{self, CONTEXT_IS_NONE};
use crate::errors::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Mutex;

thread_local! {
    /// The device of a thread that has no context yet.
    static DEVICE: Cell<i32> = const { Cell::new(0) };
}

/// The primary contexts of the devices that were used so far.
static PRIMARY: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

fn current() -> usize {
    let mut context = CONTEXT_IS_NONE;
    match driver::cuCtxGetCurrent(&mut context) {
        0 => context,
        _ => CONTEXT_IS_NONE,
    }
}

/// The primary context of a device, which is retained once.
fn primary(device: i32) -> Result<usize, i32> {
    let mut primary = PRIMARY.lock().unwrap();
    if let Some(context) = primary.get(&device) {
        return Ok(*context);
    }
    let mut context = CONTEXT_IS_NONE;
    match driver::cuDevicePrimaryCtxRetain(&mut context, device) {
        0 => {
            primary.insert(device, context);
            Ok(context)
        }
        code => Err(code),
    }
}

/// Makes the context of the calling thread's device current, unless the program made another one current.
pub(crate) fn enter() -> i32 {
    let code = driver::cuInit(0);
    if code != 0 || current() != CONTEXT_IS_NONE {
        return code;
    }
    primary(DEVICE.get()).map_or_else(|code| code, |context| driver::cuCtxSetCurrent(context))
}

/// How many devices there are.
pub(crate) fn device_count() -> Result<i32, i32> {
    let mut count = 0;
    match driver::cuInit(0) {
        0 => {}
        code => return Err(code),
    }
    match driver::cuDeviceGetCount(&mut count) {
        0 if count == 0 => Err(NO_DEVICE),
        0 => Ok(count),
        code => Err(code),
    }
}

/// The calling thread's device.
pub(crate) fn device() -> i32 {
    let mut device = DEVICE.get();
    if current() != CONTEXT_IS_NONE {
        driver::cuCtxGetDevice(&mut device);
    }
    device
}

calls! { plain:
    fn cudaGetDeviceCount(count: *mut i32) {
        if count.is_null() {
            return INVALID_VALUE;
        }
        match device_count() {
            Ok(found) => {
                put(count, found);
                0
            }
            Err(code) => {
                put(count, 0);
                code
            }
        }
    }
    fn cudaGetDevice(out: *mut i32) {
        if out.is_null() {
            return INVALID_VALUE;
        }
        put(out, device());
        0
    }
    fn cudaSetDevice(device: i32) {
        match device_count() {
            Ok(count) if (0..count).contains(&device) => {}
            Ok(_) => return INVALID_DEVICE,
            Err(code) => return code,
        }
        DEVICE.set(device);
        primary(device).map_or_else(|code| code, |context| driver::cuCtxSetCurrent(context))
    }
    fn cudaDriverGetVersion(version: *mut i32) { driver::cuDriverGetVersion(version) }
    fn cudaRuntimeGetVersion(version: *mut i32) {
        put(version, 13_020);
        0
    }
}

calls! { ready:
    fn cudaDeviceSynchronize() { driver::cuCtxSynchronize() }
    fn cudaDeviceGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        driver::cuCtxGetStreamPriorityRange(least, greatest)
    }
}
