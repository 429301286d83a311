//! Error codes, which CUDA and HIP share, with their names.
#![forbid(unsafe_code)]

use std::ffi::CStr;

/// An error code of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub i32);

/// What a call of the driver comes to.
pub type Result<T = ()> = std::result::Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $code:literal, $cuda:literal, $hip:literal;)*) => {
        $(#[doc = concat!("`", stringify!($name), "`")]
        pub const $name: Code = Code($code);)*

        /// The names of a code in CUDA and in HIP.
        pub fn names(code: i32) -> Option<[&'static CStr; 2]> {
            match code {
                0 => Some([c"CUDA_SUCCESS", c"hipSuccess"]),
                $($code => Some([$cuda, $hip]),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE", c"hipErrorInvalidValue";
    OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"hipErrorOutOfMemory";
    NOT_INITIALIZED = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"hipErrorNotInitialized";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"hipErrorInvalidDevice";
    INVALID_IMAGE = 200, c"CUDA_ERROR_INVALID_IMAGE", c"hipErrorInvalidImage";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"hipErrorInvalidContext";
    INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE", c"hipErrorInvalidHandle";
    NOT_FOUND = 500, c"CUDA_ERROR_NOT_FOUND", c"hipErrorNotFound";
    NOT_READY = 600, c"CUDA_ERROR_NOT_READY", c"hipErrorNotReady";
    ILLEGAL_ADDRESS = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"hipErrorIllegalAddress";
    CONTEXT_IS_DESTROYED = 709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"hipErrorContextIsDestroyed";
    ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"hipErrorHostMemoryAlreadyRegistered";
    NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"hipErrorHostMemoryNotRegistered";
    LAUNCH_FAILED = 719, c"CUDA_ERROR_LAUNCH_FAILED", c"hipErrorLaunchFailure";
    NOT_PERMITTED = 800, c"CUDA_ERROR_NOT_PERMITTED", c"hipErrorNotPermitted";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"hipErrorNotSupported";
    CAPTURE_UNSUPPORTED = 900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"hipErrorStreamCaptureUnsupported";
    CAPTURE_INVALIDATED = 901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"hipErrorStreamCaptureInvalidated";
    CAPTURE_MERGE = 902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"hipErrorStreamCaptureMerge";
    CAPTURE_UNMATCHED = 903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"hipErrorStreamCaptureUnmatched";
    CAPTURE_UNJOINED = 904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"hipErrorStreamCaptureUnjoined";
    CAPTURE_ISOLATION = 905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"hipErrorStreamCaptureIsolation";
    CAPTURE_IMPLICIT = 906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"hipErrorStreamCaptureImplicit";
    CAPTURED_EVENT = 907, c"CUDA_ERROR_CAPTURED_EVENT", c"hipErrorCapturedEvent";
    CAPTURE_WRONG_THREAD = 908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"hipErrorStreamCaptureWrongThread";
    UNKNOWN = 999, c"CUDA_ERROR_UNKNOWN", c"hipErrorUnknown";
}
