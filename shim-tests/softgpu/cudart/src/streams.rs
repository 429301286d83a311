//! Streams and events.

use crate::calls::{calls, put};
use crate::driver::{self, HostFunction};
use crate::errors::INVALID_VALUE;
use std::ffi::c_void;

/// `cudaStreamCallback_t`: the stream, an error, and the program's argument.
type Callback = extern "C" fn(usize, i32, *mut c_void);

/// A callback of a stream with what it is called with.
struct Called {
    callback: Callback,
    stream: usize,
    argument: *mut c_void,
}

extern "C" fn call_back(called: *mut c_void) {
    // SAFETY: the pointer must be of a box that nobody else uses; because `cudaStreamAddCallback` made it for this call,
    // which is the only one.
    let called = unsafe { Box::from_raw(called.cast::<Called>()) };
    (called.callback)(called.stream, 0, called.argument);
}

calls! { ready:
    fn cudaStreamCreate(stream: *mut usize) { driver::cuStreamCreateWithPriority(stream, 0, 0) }
    fn cudaStreamCreateWithFlags(stream: *mut usize, flags: u32) { driver::cuStreamCreateWithPriority(stream, flags, 0) }
    fn cudaStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) {
        driver::cuStreamCreateWithPriority(stream, flags, priority)
    }
    fn cudaStreamDestroy(stream: usize) { driver::cuStreamDestroy_v2(stream) }
    fn cudaStreamSynchronize(stream: usize) { driver::cuStreamSynchronize(stream) }
    fn cudaStreamQuery(stream: usize) { driver::cuStreamQuery(stream) }
    fn cudaStreamGetPriority(stream: usize, priority: *mut i32) { driver::cuStreamGetPriority(stream, priority) }
    fn cudaStreamWaitEvent(stream: usize, event: usize, flags: u32) { driver::cuStreamWaitEvent(stream, event, flags) }
    fn cudaLaunchHostFunc(stream: usize, function: HostFunction, argument: *mut c_void) {
        driver::cuLaunchHostFunc(stream, function, argument)
    }
    fn cudaStreamAddCallback(stream: usize, callback: Option<Callback>, argument: *mut c_void, flags: u32) {
        let Some(callback) = callback.filter(|_| flags == 0) else { return INVALID_VALUE };
        let called = Box::into_raw(Box::new(Called { callback, stream, argument }));
        driver::cuLaunchHostFunc(stream, Some(call_back), called.cast())
    }
    fn cudaEventCreate(event: *mut usize) { driver::cuEventCreate(event, 0) }
    fn cudaEventCreateWithFlags(event: *mut usize, flags: u32) { driver::cuEventCreate(event, flags) }
    fn cudaEventDestroy(event: usize) { driver::cuEventDestroy_v2(event) }
    fn cudaEventRecord(event: usize, stream: usize) { driver::cuEventRecord(event, stream) }
    fn cudaEventRecordWithFlags(event: usize, stream: usize, flags: u32) {
        driver::cuEventRecordWithFlags(event, stream, flags)
    }
    fn cudaEventQuery(event: usize) { driver::cuEventQuery(event) }
    fn cudaEventSynchronize(event: usize) { driver::cuEventSynchronize(event) }
    fn cudaEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) {
        let mut found = 0.0;
        let code = driver::cuEventElapsedTime(&mut found, start, end);
        put(milliseconds, found);
        code
    }
}
