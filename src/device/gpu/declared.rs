//! The driver's table against declarations that were made from CUDA's own header (the `cudarc` crate).

use super::driver::{argument_bytes, ALREADY_REGISTERED, CAPTURE_IMPLICIT, NOT_READY, OUT_OF_MEMORY, SUCCESS};
use cudarc::driver::sys;

/// The bytes of a function's arguments.
trait Arguments {
    fn bytes(self) -> Vec<usize>;
}

macro_rules! arities {
    ($($($argument:ident)+;)*) => { $(
        impl<Returned, $($argument),+> Arguments for unsafe fn($($argument),+) -> Returned {
            fn bytes(self) -> Vec<usize> {
                vec![$(size_of::<$argument>()),+]
            }
        }
    )* };
}

arities! {
    A;
    A B;
    A B C;
    A B C D;
    A B C D E F G H I J K;
}

macro_rules! declared {
    ($($name:ident($($argument:tt)+),)*) => {
        vec![$((stringify!($name), (sys::$name as unsafe fn($(declared!(@$argument)),+) -> sys::CUresult).bytes())),*]
    };
    (@_) => { _ };
}

#[test]
fn every_function_of_the_table_takes_what_cuda_s_header_says() {
    let declared: Vec<(&str, Vec<usize>)> = declared! {
        cuInit(_),
        cuDriverGetVersion(_),
        cuGetErrorString(_ _),
        cuDeviceGetCount(_),
        cuDeviceGet(_ _),
        cuDeviceGetAttribute(_ _ _),
        cuDeviceGetName(_ _ _),
        cuDeviceGetPCIBusId(_ _ _),
        cuMemGetInfo_v2(_ _),
        cuDevicePrimaryCtxRetain(_ _),
        cuDevicePrimaryCtxRelease_v2(_),
        cuCtxGetCurrent(_),
        cuCtxPushCurrent_v2(_),
        cuCtxPopCurrent_v2(_),
        cuCtxGetDevice(_),
        cuCtxGetStreamPriorityRange(_ _),
        cuMemAlloc_v2(_ _),
        cuMemFree_v2(_),
        cuMemHostRegister_v2(_ _ _),
        cuMemHostUnregister(_),
        cuMemHostGetDevicePointer_v2(_ _ _),
        cuPointerGetAttribute(_ _ _),
        cuMemcpyDtoHAsync_v2(_ _ _ _),
        cuMemcpyHtoDAsync_v2(_ _ _ _),
        cuMemcpyDtoDAsync_v2(_ _ _ _),
        cuStreamCreateWithPriority(_ _ _),
        cuStreamGetPriority(_ _),
        cuStreamDestroy_v2(_),
        cuStreamSynchronize(_),
        cuStreamWaitEvent(_ _ _),
        cuStreamIsCapturing(_ _),
        cuThreadExchangeStreamCaptureMode(_),
        cuStreamWaitValue32_v2(_ _ _ _),
        cuEventCreate(_ _),
        cuEventDestroy_v2(_),
        cuEventRecord(_ _),
        cuEventQuery(_),
        cuModuleLoadData(_ _),
        cuModuleUnload(_),
        cuModuleGetFunction(_ _ _),
        cuLaunchKernel(_ _ _ _ _ _ _ _ _ _ _),
    };
    for (name, bytes) in argument_bytes().into_iter().filter(|(name, _)| !name.is_empty()) {
        let (_, theirs) = declared.iter().find(|(other, _)| *other == name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(bytes, *theirs, "{name}");
    }
}

#[test]
fn numbers_are_those_of_cuda_s_header() {
    let statuses = [SUCCESS, OUT_OF_MEMORY, NOT_READY, ALREADY_REGISTERED, CAPTURE_IMPLICIT];
    let theirs = [
        sys::CUresult::CUDA_SUCCESS,
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        sys::CUresult::CUDA_ERROR_NOT_READY,
        sys::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    ];
    assert_eq!(statuses, theirs.map(|status| status as i32));
    let attributes = [super::MULTIPROCESSORS.0, super::PAGEABLE_MEMORY_ACCESS];
    let theirs = [
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    ];
    assert_eq!(attributes, theirs.map(|attribute| attribute as i32));
    assert_eq!(super::MEMORY_TYPE, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as i32);
    assert_eq!(super::DEVICE_ORDINAL, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as i32);
    assert_eq!(super::DEVICE_MEMORY, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as i32);
    assert_eq!(super::order::AT_LEAST, sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32);
    assert_eq!(super::stream::NON_BLOCKING, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32);
    assert_eq!(super::NO_TIMING, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32);
}
