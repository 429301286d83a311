//! Memory of our own: on the device, and on the host where the device sees it.

use super::driver::{Address, ALREADY_REGISTERED, OUT_OF_MEMORY, SUCCESS};
use super::GpuDevice;
use crate::error::{Error, Result};
use crate::memory::{shared, Bytes, DeviceRegion};
use std::sync::Arc;

/// `CU_MEMHOSTREGISTER_PORTABLE` and `_DEVICEMAP`, and HIP's.
const PORTABLE_AND_MAPPED: u32 = 3;

/// Device memory, freed with the value. Nothing on the device may use it then.
#[derive(Debug)]
pub struct DeviceBuffer {
    gpu: Arc<GpuDevice>,
    address: Address,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates device memory.
    pub fn new(gpu: &Arc<GpuDevice>, bytes: usize) -> Result<DeviceBuffer> {
        let mut address = 0;
        if bytes > 0 {
            let _entered = gpu.enter()?;
            // SAFETY: the place must be valid; because it is a local.
            let status = unsafe { gpu.driver.allocate(&mut address, bytes) };
            if status == OUT_OF_MEMORY {
                let number = gpu.number;
                return Err(Error::Device(format!("device {number} has no {bytes} bytes of memory left for Strata")));
            }
            gpu.check("allocate", status)?;
        }
        Ok(DeviceBuffer { gpu: gpu.clone(), address, bytes })
    }

    /// Where it is.
    pub fn region(&self) -> DeviceRegion {
        // SAFETY: the bytes must be usable while the region is; because the device uses them only while their owner lives.
        unsafe { DeviceRegion::new(self.address as *mut u8, self.bytes) }
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // Where the program has ended the context, the memory has ended with it, and may be somebody else's by now.
            if let (true, Ok(_entered)) = (self.gpu.is_alive(), self.gpu.enter()) {
                // SAFETY: the memory must be ours and unused; because it was allocated above, and its owner says so.
                unsafe { self.gpu.driver.free(self.address) };
            }
        }
    }
}

/// Shared host memory that the device can use as well.
#[derive(Debug)]
pub struct Pinned {
    gpu: Arc<GpuDevice>,
    owned: shared::Owned,
    /// Where the device sees it.
    address: Address,
}

impl Pinned {
    /// Allocates host memory, which other processes of the node can map, and pins it.
    pub fn new(gpu: &Arc<GpuDevice>, bytes: usize) -> Result<Pinned> {
        let owned = shared::Owned::new(bytes)?;
        let region = owned.region();
        let start = region.as_ptr().cast();
        let _entered = gpu.enter()?;
        // SAFETY: the memory must be there until it is unregistered; because it is freed after that.
        let status = unsafe { gpu.driver.host_register(start, region.len(), PORTABLE_AND_MAPPED) };
        if status != SUCCESS && status != ALREADY_REGISTERED {
            let number = gpu.number;
            let name = |error: Error| {
                let text =
                    format!("{bytes} bytes of host memory cannot be pinned for device {number}: {}", error.text());
                Error::Device(text)
            };
            gpu.check("host_register", status).map_err(name)?;
        }
        let mut address = 0;
        // SAFETY: the place must be valid; because it is a local.
        let status = unsafe { gpu.driver.host_address(&mut address, start, 0) };
        if let Err(error) = gpu.check("host_address", status) {
            // SAFETY: it must be registered; because it was.
            unsafe { gpu.driver.host_unregister(start) };
            return Err(error);
        }
        Ok(Pinned { gpu: gpu.clone(), owned, address })
    }

    /// Where the host sees it.
    pub fn host(&self) -> Bytes<'_> {
        self.owned.region()
    }

    /// Where the device sees its first byte.
    pub fn address(&self) -> Address {
        self.address
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let (true, Ok(_entered)) = (self.gpu.is_alive(), self.gpu.enter()) {
            // SAFETY: the memory must be registered and unused by the device; because its owner says so.
            unsafe { self.gpu.driver.host_unregister(self.owned.region().as_ptr().cast()) };
        }
    }
}
