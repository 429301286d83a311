//! Memory that streams allocate and free, from a pool of each device.
//!
//! It has its address, and may be used, at once; it is gone when the stream comes to the freeing.
#![forbid(unsafe_code)]

use crate::context::check_device;
use crate::fault::{Result, CAPTURE_UNSUPPORTED, INVALID_HANDLE, INVALID_VALUE};
use crate::handles::Handles;
use crate::memory::{self, Kind};
use crate::stream::Stream;
use crate::work::Work;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A device's pool.
pub struct Pool {
    device: i32,
    /// How many bytes it may keep, which changes nothing: it keeps none.
    threshold: AtomicU64,
}

static POOLS: Handles<Pool> = Handles::empty();

/// The pool of a device.
pub fn default_of(device: i32) -> Result<usize> {
    static MAKING: Mutex<()> = Mutex::new(());
    check_device(device)?;
    let _making = MAKING.lock().unwrap();
    let known = POOLS.find(|pool| pool.device == device).and_then(|pool| POOLS.handle_of(&pool));
    Ok(known.unwrap_or_else(|| POOLS.add(Pool { device, threshold: AtomicU64::new(0) })))
}

/// The pool of a handle.
pub fn find(handle: usize) -> Result<Arc<Pool>> {
    POOLS.get(handle).ok_or(INVALID_HANDLE)
}

impl Pool {
    /// An attribute, by `CUmemPool_attribute`: how much it may keep (4), has (5, 6) and gives (7, 8).
    pub fn attribute(&self, attribute: i32) -> Result<u64> {
        match attribute {
            4 => Ok(self.threshold.load(Ordering::Relaxed)),
            5..=8 => Ok(memory::used_bytes(self.device)),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Sets how much it may keep; the highest values so far (6, 8) may only be forgotten.
    pub fn set_attribute(&self, attribute: i32, value: u64) -> Result {
        match attribute {
            4 => self.threshold.store(value, Ordering::Relaxed),
            6 | 8 if value == 0 => {}
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }
}

/// Allocates on a stream.
pub fn allocate(stream: &Arc<Stream>, bytes: usize) -> Result<u64> {
    if stream.capture().is_some() {
        return Err(CAPTURE_UNSUPPORTED);
    }
    memory::allocate(&stream.context, Kind::Device, bytes)
}

/// Frees when the stream comes to it.
pub fn free(stream: &Arc<Stream>, address: u64) -> Result {
    if stream.capture().is_some() {
        return Err(CAPTURE_UNSUPPORTED);
    }
    memory::let_go(address)?;
    stream.submit(Work::Free(address)).map(drop)
}
