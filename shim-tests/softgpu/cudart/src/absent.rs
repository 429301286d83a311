//! What PyTorch links and no test needs, and what is asked of the driver by name.

use crate::calls::calls;
use crate::driver;
use crate::errors::{note, INVALID_DEVICE_FUNCTION, INVALID_VALUE, NOT_SUPPORTED};
use std::ffi::{c_char, c_void};

macro_rules! absent {
    ($($name:ident)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the runtime: it is not there.")]
        #[no_mangle]
        pub extern "C" fn $name() -> i32 {
            note(NOT_SUPPORTED)
        }
    )*};
}

// Their arguments are not looked at.
absent! {
    cudaDeviceGetGraphMemAttribute cudaDeviceSetGraphMemAttribute
    cudaFuncSetAttribute cudaKernelSetAttributeForDevice
    cudaOccupancyMaxActiveBlocksPerMultiprocessor cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    cudaGetSymbolAddress cudaMemcpyToSymbol
    cudaGraphAddNode cudaGraphConditionalHandleCreate cudaGraphRetainUserObject cudaStreamBeginCaptureToGraph
    cudaUserObjectCreate cudaUserObjectRelease
    cudaIpcCloseMemHandle cudaIpcGetEventHandle cudaIpcGetMemHandle cudaIpcOpenEventHandle cudaIpcOpenMemHandle
    cudaLibraryGetGlobal cudaLibraryGetKernel cudaLibraryGetKernelCount cudaLibraryGetManaged
    cudaLibraryGetUnifiedFunction cudaLibraryLoadData cudaLibraryLoadFromFile cudaLibraryUnload
}

/// `cudaFuncAttributes`, of which nothing is known.
type FunctionAttributes = [u8; 144];

calls! { plain:
    fn cudaFuncGetAttributes(_out: *mut FunctionAttributes, _function: *const c_void) { INVALID_DEVICE_FUNCTION }
    fn cudaProfilerStart() { 0 }
    fn cudaProfilerStop() { 0 }
    fn cudaGetDriverEntryPointByVersion(
        name: *const c_char,
        function: *mut *mut c_void,
        version: u32,
        flags: u64,
        status: *mut i32,
    ) {
        if name.is_null() || function.is_null() {
            return INVALID_VALUE;
        }
        match driver::cuInit(0) {
            0 => driver::cuGetProcAddress_v2(name, function, version as i32, flags, status),
            code => code,
        }
    }
}
