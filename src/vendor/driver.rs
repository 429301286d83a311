//! What Strata asks of the GPU's driver beside the vendor's calls: whether a stream is being captured into a graph, and to
//! make a device current.

use super::calls::VendorStream;
use crate::device::gpu::driver::{Driver, DriverHandle, DriverKind, SUCCESS};
use crate::device::gpu::stream;
use std::ffi::c_int;

/// Whether calls on this stream are recorded into a graph instead of running. Where there is no driver, none are.
pub fn is_captured(stream: VendorStream) -> bool {
    Driver::get().is_some_and(|driver| stream::is_captured(driver, stream))
}

/// Does something while a device is current on this thread; where there is no driver, just does it.
pub fn on_device<T>(device: c_int, act: impl FnOnce() -> T) -> T {
    match Driver::get() {
        Some(driver) if device >= 0 && driver.kind == DriverKind::Cuda => on_cuda(driver, device, act),
        Some(driver) if device >= 0 => on_hip(driver, device, act),
        _ => act(),
    }
}

/// The device's own context is pushed, and popped again: the program's is untouched.
fn on_cuda<T>(driver: &Driver, device: c_int, act: impl FnOnce() -> T) -> T {
    let (mut number, mut context): (c_int, DriverHandle) = (0, 0);
    // SAFETY: the place must be valid; because it is a local.
    let retained = unsafe { driver.device_get(&mut number, device) } == SUCCESS
        // SAFETY: the place must be valid; because it is a local.
        && unsafe { driver.context_retain(&mut context, number) } == SUCCESS;
    // SAFETY: the context must be alive; because it is retained.
    let pushed = retained && unsafe { driver.context_push(context) } == SUCCESS;
    let done = act();
    if pushed {
        // SAFETY: the place must be valid; because it is a local. What is popped is what was pushed, if `act` leaves
        // the stack as it was.
        unsafe { driver.context_pop(&mut context) };
    }
    if retained {
        // SAFETY: the device must have been retained; because it was.
        unsafe { driver.context_release(number) };
    }
    done
}

/// The thread's device is set, and set back.
fn on_hip<T>(driver: &Driver, device: c_int, act: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: the place must be valid; because it is a local.
    let known = unsafe { driver.device_current(&mut before) } == SUCCESS;
    // SAFETY: no requirement.
    unsafe { driver.device_set(device) };
    let done = act();
    if known {
        // SAFETY: no requirement.
        unsafe { driver.device_set(before) };
    }
    done
}
