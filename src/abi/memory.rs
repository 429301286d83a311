//! Bodies of the entries for memory: allocation, registration, suspension.

use super::handles;
use super::windows;
use crate::device::gpu::memory::DeviceBuffer;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::interface::pointer::{Buffer, Ptr};
use crate::interface::types::{null, CommHandle, MemStat};
use crate::memory::shared;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// `ncclMemAlloc`: memory of the device that is current, or without one memory that all processes of the node can map.
pub fn allocate(out: Ptr<Buffer>, size: usize) -> Result<()> {
    if out.is_null() {
        return Err(null("ptr"));
    }
    if isize::try_from(size).is_err() {
        return Err(Error::InvalidArgument(format!("{size} bytes are more than memory can hold")));
    }
    let Some(gpu) = super::communicators::gpu(None)? else {
        let start = shared::allocate(size)?.as_ptr() as usize;
        // SAFETY: the memory must be there until it is freed; because it was just allocated.
        return out.set("ptr", unsafe { Buffer::from_address(start) });
    };
    let memory = DeviceBuffer::new(&gpu, size.max(1))?;
    let start = memory.region().address() as usize;
    on_devices().insert(start, memory);
    // SAFETY: the memory must be there until it is freed; because it was just allocated.
    out.set("ptr", unsafe { Buffer::from_address(start) })
}

/// What [`allocate`] has given out on devices, by where it begins.
fn on_devices() -> MutexGuard<'static, HashMap<usize, DeviceBuffer>> {
    static ON_DEVICES: PerProcess<Mutex<HashMap<usize, DeviceBuffer>>> = PerProcess::new(Mutex::default);
    ON_DEVICES.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// `ncclMemFree`
pub fn free(start: Buffer) -> Result<()> {
    if start.is_null() {
        return Ok(());
    }
    let on_device = on_devices().remove(&start.address());
    match on_device {
        Some(memory) => {
            drop(memory);
            Ok(())
        }
        None => shared::free(start.address() as *mut u8),
    }
}

/// `ncclCommRegister`: on the host all memory is as good as registered, so only the books are kept.
pub fn register(comm: CommHandle, start: Buffer, size: usize, out: Ptr<Buffer>) -> Result<()> {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let handle = handles::find(comm)?;
    handle.ready()?;
    if start.is_null() {
        return Err(null("buff"));
    }
    if out.is_null() {
        return Err(null("handle"));
    }
    if size == 0 {
        return Err(Error::InvalidArgument("a buffer of no bytes cannot be registered".to_string()));
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut registered = handle.registered.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    registered.insert(number, (start.address(), size));
    // SAFETY: no memory is needed; because the interface says that this is a number alone.
    out.set("handle", unsafe { Buffer::from_address(number) })
}

/// `ncclCommDeregister`
pub fn deregister(comm: CommHandle, number: Buffer) -> Result<()> {
    let handle = handles::find(comm)?;
    let mut registered = handle.registered.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match registered.remove(&number.address()) {
        Some(_) => Ok(()),
        None => Err(Error::InvalidUsage(format!("nothing is registered under {:#x}", number.address()))),
    }
}

/// `ncclCommSuspend`
pub fn suspend(comm: CommHandle, flags: c_int) -> Result<()> {
    let handle = handles::find(comm)?;
    if flags != 1 {
        return Err(Error::InvalidArgument(format!("invalid suspend flags {flags:#x}")));
    }
    let comm = handle.usable()?;
    windows::refuse_open(&comm, "ncclCommSuspend")?;
    comm.suspend()
}

/// `ncclCommResume`
pub fn resume(comm: CommHandle) -> Result<()> {
    handles::find(comm)?.ready()?.resume()
}

/// `ncclCommMemStats`: the device is the host, so its scratch memory is what could be suspended.
pub fn statistics(comm: CommHandle, which: MemStat, out: Ptr<u64>) -> Result<()> {
    let handle = handles::find(comm)?;
    if out.is_null() {
        return Err(null("value"));
    }
    let comm = handle.ready()?;
    let value = match which.0 {
        0 | 3 => comm.scratch_bytes() as u64,
        1 => u64::from(comm.is_suspended()),
        2 => 0,
        other => return Err(Error::InvalidArgument(format!("invalid memory statistic {other}"))),
    };
    out.set("value", value)
}
