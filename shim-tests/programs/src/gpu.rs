//! The driver of a GPU, a soft one: memory, streams and copies, by the driver's C interface.

use crate::library::Stream;
use std::ffi::{c_int, c_uint, c_void};

type Address = u64;

/// The driver's functions that programs need.
#[derive(Clone, Copy)]
pub struct Gpu {
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    set_current: unsafe extern "C" fn(*mut c_void) -> c_int,
    alloc: unsafe extern "C" fn(*mut Address, usize) -> c_int,
    free: unsafe extern "C" fn(Address) -> c_int,
    to_device: unsafe extern "C" fn(Address, *const c_void, usize) -> c_int,
    to_host: unsafe extern "C" fn(*mut c_void, Address, usize) -> c_int,
    stream_create: unsafe extern "C" fn(*mut Stream, c_uint) -> c_int,
    stream_destroy: unsafe extern "C" fn(Stream) -> c_int,
    stream_synchronize: unsafe extern "C" fn(Stream) -> c_int,
}

fn checked(what: &str, code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(format!("{what} returned {code}")),
    }
}

impl Gpu {
    /// Opens the driver and initialises it. It stays open.
    pub fn open() -> Result<Gpu, String> {
        let said = |error: libloading::Error| error.to_string();
        // SAFETY: its initialisers must be fit to run; because it is a driver, or the double of one.
        let driver = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(said)?;
        let driver: &'static libloading::Library = Box::leak(Box::new(driver));
        macro_rules! find {
            ($name:literal) => {{
                // SAFETY: the function must have the field's type; because cuda.h declares it so.
                *unsafe { driver.get($name) }.map_err(said)?
            }};
        }
        let init: unsafe extern "C" fn(c_uint) -> c_int = find!(b"cuInit");
        // SAFETY: no requirement.
        checked("cuInit", unsafe { init(0) })?;
        Ok(Gpu {
            retain: find!(b"cuDevicePrimaryCtxRetain"),
            set_current: find!(b"cuCtxSetCurrent"),
            alloc: find!(b"cuMemAlloc_v2"),
            free: find!(b"cuMemFree_v2"),
            to_device: find!(b"cuMemcpyHtoD_v2"),
            to_host: find!(b"cuMemcpyDtoH_v2"),
            stream_create: find!(b"cuStreamCreate"),
            stream_destroy: find!(b"cuStreamDestroy_v2"),
            stream_synchronize: find!(b"cuStreamSynchronize"),
        })
    }

    /// Makes a device current on this thread.
    pub fn enter(&self, device: usize) -> Result<(), String> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer must be writable; because it is a local of ours.
        checked("cuDevicePrimaryCtxRetain", unsafe { (self.retain)(&raw mut context, device as c_int) })?;
        // SAFETY: the context must be alive; because it was just retained.
        checked("cuCtxSetCurrent", unsafe { (self.set_current)(context) })
    }

    pub fn allocate(&self, bytes: usize) -> Result<*mut u8, String> {
        let mut address = 0;
        // SAFETY: the pointer must be writable; because it is a local of ours.
        checked("cuMemAlloc", unsafe { (self.alloc)(&raw mut address, bytes) })?;
        Ok(address as *mut u8)
    }

    pub fn release(&self, address: *mut u8) -> Result<(), String> {
        // SAFETY: it must come from `allocate` and be freed once; because callers own it.
        checked("cuMemFree", unsafe { (self.free)(address as Address) })
    }

    /// Copies to the device, and waits.
    pub fn write(&self, to: *mut c_void, from: &[u8]) -> Result<(), String> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: both must have the bytes; because callers name a place inside their memory.
        checked("cuMemcpyHtoD", unsafe { (self.to_device)(to as Address, from.as_ptr().cast(), from.len()) })?;
        // It returns when the bytes have been read, and streams that do not wait for the null stream may come before it.
        checked("cuStreamSynchronize", self.synchronize(std::ptr::null_mut()))
    }

    /// Copies from the device.
    pub fn read(&self, from: *const u8, bytes: usize) -> Result<Vec<u8>, String> {
        let mut found = vec![0; bytes];
        // SAFETY: both must have the bytes; because callers name their memory.
        checked("cuMemcpyDtoH", unsafe { (self.to_host)(found.as_mut_ptr().cast(), from as Address, bytes) })?;
        Ok(found)
    }

    pub fn stream(&self) -> Result<Stream, String> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer must be writable; because it is a local of ours.
        checked("cuStreamCreate", unsafe { (self.stream_create)(&raw mut stream, 1) })?;
        Ok(stream)
    }

    pub fn end_stream(&self, stream: Stream) {
        // SAFETY: the stream must be alive; because callers made it and end it once.
        unsafe { (self.stream_destroy)(stream) };
    }

    /// Waits for a stream, the null stream as well.
    pub fn synchronize(&self, stream: Stream) -> c_int {
        // SAFETY: the stream must be alive; because callers end it later.
        unsafe { (self.stream_synchronize)(stream) }
    }
}
