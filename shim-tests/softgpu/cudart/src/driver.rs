//! The driver's functions that the runtime is made of, in their newest forms.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_void};

/// No context.
pub(crate) const CONTEXT_IS_NONE: usize = 0;

/// A function of the program that a stream calls.
pub(crate) type HostFunction = Option<extern "C" fn(*mut c_void)>;

macro_rules! driver {
    ($(fn $name:ident($($arg:ident: $kind:ty),* $(,)?);)*) => {
        // SAFETY: the signatures must be the driver's; because they are written from its public header. What it does with
        // a program's pointers the program answers for.
        unsafe extern "C" {
            $(pub(crate) safe fn $name($($arg: $kind),*) -> i32;)*
        }
    };
}

driver! {
    fn cuInit(flags: u32);
    fn cuDriverGetVersion(version: *mut i32);
    fn cuGetProcAddress_v2(name: *const c_char, function: *mut *mut c_void, version: i32, flags: u64, status: *mut i32);
    fn cuDeviceGetCount(count: *mut i32);
    fn cuDeviceGetName(name: *mut c_char, room: i32, device: i32);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    fn cuDeviceGetPCIBusId(text: *mut c_char, room: i32, device: i32);
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32);
    fn cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32);
    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: i32);
    fn cuCtxGetCurrent(context: *mut usize);
    fn cuCtxSetCurrent(context: usize);
    fn cuCtxGetDevice(device: *mut i32);
    fn cuCtxSynchronize();
    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: u32);
    fn cuMemFree_v2(address: u64);
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: usize);
    fn cuMemFreeAsync(address: u64, stream: usize);
    fn cuMemPoolGetAttribute(pool: usize, attribute: i32, value: *mut c_void);
    fn cuMemPoolSetAttribute(pool: usize, attribute: i32, value: *mut c_void);
    fn cuMemPoolSetAccess(pool: usize, accesses: *const c_void, count: usize);
    fn cuMemPoolTrimTo(pool: usize, bytes: usize);
    fn cuMemHostAlloc(address: *mut u64, bytes: usize, flags: u32);
    fn cuMemFreeHost(address: u64);
    fn cuMemHostRegister_v2(address: u64, bytes: usize, flags: u32);
    fn cuMemHostUnregister(address: u64);
    fn cuMemcpy(dst: u64, src: u64, bytes: usize);
    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: usize);
    fn cuMemsetD8_v2(dst: u64, value: u8, bytes: usize);
    fn cuMemsetD8Async(dst: u64, value: u8, bytes: usize, stream: usize);
    fn cuMemsetD16Async(dst: u64, value: u16, count: usize, stream: usize);
    fn cuMemsetD32Async(dst: u64, value: u32, count: usize, stream: usize);
    fn cuMemsetD2D32Async(dst: u64, pitch: usize, value: u32, width: usize, rows: usize, stream: usize);
    fn cuPointerGetAttributes(count: u32, attributes: *const i32, values: *const *mut c_void, address: u64);
    fn cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32);
    fn cuStreamDestroy_v2(stream: usize);
    fn cuStreamSynchronize(stream: usize);
    fn cuStreamQuery(stream: usize);
    fn cuStreamGetPriority(stream: usize, priority: *mut i32);
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32);
    fn cuLaunchHostFunc(stream: usize, function: HostFunction, argument: *mut c_void);
    fn cuEventCreate(event: *mut usize, flags: u32);
    fn cuEventDestroy_v2(event: usize);
    fn cuEventRecord(event: usize, stream: usize);
    fn cuEventRecordWithFlags(event: usize, stream: usize, flags: u32);
    fn cuEventQuery(event: usize);
    fn cuEventSynchronize(event: usize);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
    fn cuStreamIsCapturing(stream: usize, status: *mut i32);
    fn cuStreamBeginCapture_v2(stream: usize, mode: i32);
    fn cuStreamEndCapture(stream: usize, graph: *mut usize);
    fn cuStreamGetCaptureInfo_v3(
        stream: usize,
        status: *mut i32,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut *const usize,
        edges: *mut *const c_void,
        count: *mut usize,
    );
    fn cuStreamUpdateCaptureDependencies_v2(
        stream: usize,
        nodes: *const usize,
        edges: *const c_void,
        count: usize,
        flags: u32,
    );
    fn cuThreadExchangeStreamCaptureMode(mode: *mut i32);
    fn cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, flags: u64);
    fn cuGraphLaunch(exec: usize, stream: usize);
    fn cuGraphExecDestroy(exec: usize);
    fn cuGraphDestroy(graph: usize);
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize);
    fn cuGraphNodeGetDependencies_v2(node: usize, nodes: *mut usize, edges: *mut c_void, count: *mut usize);
}
