//! Errors: their names, and the last one of each thread.

use std::cell::Cell;
use std::ffi::{c_char, CStr};

thread_local! {
    static LAST: Cell<i32> = const { Cell::new(0) };
}

/// Remembers an error as the calling thread's last one.
pub(crate) fn note(code: i32) -> i32 {
    if code != 0 {
        LAST.set(code);
    }
    code
}

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal, $said:literal;)*) => {
        $(#[allow(dead_code, reason = "some are only the driver's to return")]
        pub(crate) const $name: i32 = $code;)*

        /// The name of an error and what it means.
        fn texts(code: i32) -> Option<[&'static CStr; 2]> {
            match code {
                0 => Some([c"cudaSuccess", c"no error"]),
                $($code => Some([$text, $said]),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, c"cudaErrorInvalidValue", c"invalid argument";
    MEMORY_ALLOCATION = 2, c"cudaErrorMemoryAllocation", c"out of memory";
    INITIALIZATION = 3, c"cudaErrorInitializationError", c"initialization error";
    INVALID_CONFIGURATION = 9, c"cudaErrorInvalidConfiguration", c"invalid configuration argument";
    INVALID_MEMCPY_DIRECTION = 21, c"cudaErrorInvalidMemcpyDirection", c"invalid copy direction for memcpy";
    INVALID_DEVICE_FUNCTION = 98, c"cudaErrorInvalidDeviceFunction", c"invalid device function";
    NO_DEVICE = 100, c"cudaErrorNoDevice", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"cudaErrorInvalidDevice", c"invalid device ordinal";
    INVALID_KERNEL_IMAGE = 200, c"cudaErrorInvalidKernelImage", c"device kernel image is invalid";
    DEVICE_UNINITIALIZED = 201, c"cudaErrorDeviceUninitialized", c"invalid device context";
    INVALID_RESOURCE_HANDLE = 400, c"cudaErrorInvalidResourceHandle", c"invalid resource handle";
    SYMBOL_NOT_FOUND = 500, c"cudaErrorSymbolNotFound", c"named symbol not found";
    NOT_READY = 600, c"cudaErrorNotReady", c"device not ready";
    ILLEGAL_ADDRESS = 700, c"cudaErrorIllegalAddress", c"an illegal memory access was encountered";
    PEER_ACCESS_ALREADY_ENABLED = 704, c"cudaErrorPeerAccessAlreadyEnabled", c"peer access is already enabled";
    CONTEXT_IS_DESTROYED = 709, c"cudaErrorContextIsDestroyed", c"context is destroyed";
    ALREADY_REGISTERED = 712, c"cudaErrorHostMemoryAlreadyRegistered", c"host memory is already registered";
    NOT_REGISTERED = 713, c"cudaErrorHostMemoryNotRegistered", c"host memory is not registered";
    LAUNCH_FAILURE = 719, c"cudaErrorLaunchFailure", c"unspecified launch failure";
    NOT_PERMITTED = 800, c"cudaErrorNotPermitted", c"operation not permitted";
    NOT_SUPPORTED = 801, c"cudaErrorNotSupported", c"operation not supported";
    CAPTURE_UNSUPPORTED = 900, c"cudaErrorStreamCaptureUnsupported", c"operation not permitted when stream is capturing";
    CAPTURE_INVALIDATED = 901, c"cudaErrorStreamCaptureInvalidated", c"a capture failed because of an earlier error";
    CAPTURE_MERGE = 902, c"cudaErrorStreamCaptureMerge", c"two captures would merge";
    CAPTURE_UNMATCHED = 903, c"cudaErrorStreamCaptureUnmatched", c"the capture did not begin on this stream";
    CAPTURE_UNJOINED = 904, c"cudaErrorStreamCaptureUnjoined", c"a captured stream did not join the first one";
    CAPTURE_ISOLATION = 905, c"cudaErrorStreamCaptureIsolation", c"a captured stream would wait for uncaptured work";
    CAPTURE_IMPLICIT = 906, c"cudaErrorStreamCaptureImplicit", c"a captured stream would wait for the legacy stream";
    CAPTURED_EVENT = 907, c"cudaErrorCapturedEvent", c"the event was last recorded in a capture";
    CAPTURE_WRONG_THREAD = 908, c"cudaErrorStreamCaptureWrongThread", c"another thread began the capture";
    UNKNOWN = 999, c"cudaErrorUnknown", c"unknown error";
}

fn text(code: i32, which: usize) -> *const c_char {
    texts(code).map_or(c"unrecognized error code", |texts| texts[which]).as_ptr()
}

/// `cudaGetErrorName` of the runtime.
#[no_mangle]
pub extern "C" fn cudaGetErrorName(code: i32) -> *const c_char {
    text(code, 0)
}

/// `cudaGetErrorString` of the runtime.
#[no_mangle]
pub extern "C" fn cudaGetErrorString(code: i32) -> *const c_char {
    text(code, 1)
}

/// `cudaGetLastError` of the runtime.
#[no_mangle]
pub extern "C" fn cudaGetLastError() -> i32 {
    LAST.replace(0)
}

/// `cudaPeekAtLastError` of the runtime.
#[no_mangle]
pub extern "C" fn cudaPeekAtLastError() -> i32 {
    LAST.get()
}
