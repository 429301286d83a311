//! What is done to device memory beside the calls of a communicator, on a stream of its own. Each piece of it has ended when its function
//! returns.

use super::kernels::{Batch, BatchScale};
use super::stream::GpuStream;
use super::GpuDevice;
use crate::dtype::{DataType, Operator, Prologue, Reduction};
use crate::error::Result;
use crate::memory::DeviceRegion;
use crate::sync::locked;
use std::sync::{Arc, Mutex};

/// A stream for it.
#[derive(Debug)]
pub struct GpuWork {
    gpu: Arc<GpuDevice>,
    stream: Mutex<GpuStream>,
}

impl GpuWork {
    /// On this device.
    pub fn new(gpu: &Arc<GpuDevice>) -> Result<GpuWork> {
        Ok(GpuWork { gpu: gpu.clone(), stream: Mutex::new(GpuStream::new(gpu)?) })
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<GpuDevice> {
        &self.gpu
    }

    /// Copies to the first of each pair, one after the other.
    pub fn copy(&self, copies: impl Iterator<Item = (DeviceRegion, DeviceRegion)>) -> Result<()> {
        self.done(|stream| copies.map(|(to, from)| copy_on(stream, to, from)).find(Result::is_err).unwrap_or(Ok(())))
    }

    /// Writes these bytes again and again, so that the region is full of them. Neither is empty.
    pub fn fill(&self, region: DeviceRegion, pattern: &[u8]) -> Result<()> {
        self.done(|stream| {
            let mut full = pattern.len().min(region.len());
            // SAFETY: both must be there until the copy has ended; because that is waited for, the pattern is borrowed until then, and
            // the region is the caller's.
            unsafe { stream.to_device(region.address(), pattern.as_ptr(), full) }?;
            while full < region.len() {
                let bytes = full.min(region.len() - full);
                copy_on(stream, region.part(full, bytes), region.part(0, bytes))?;
                full += bytes;
            }
            Ok(())
        })
    }

    /// Applies a reduction's prologue, also to a region as it is.
    pub fn prologue(&self, reduction: &Reduction, to: DeviceRegion, from: DeviceRegion) -> Result<()> {
        let (scale, factor) = match reduction.prologue {
            Prologue::None => return self.copy(std::iter::once((to, from))),
            Prologue::Scalar(scalar) => (BatchScale::Multiply, u64::from_le_bytes(scalar)),
            Prologue::Reciprocal(n) => (BatchScale::Reciprocal, n),
        };
        self.scale(reduction.dtype, (scale, factor), to, from)
    }

    /// Scales every element.
    pub fn scale(
        &self,
        dtype: DataType,
        (scale, factor): (BatchScale, u64),
        to: DeviceRegion,
        from: DeviceRegion,
    ) -> Result<()> {
        let mut batch = Box::new(Batch::new(1, scale, factor));
        batch.push(to.len(), to.address(), std::iter::once(from.address()));
        // SAFETY: the memory must stay until this has ended; because that is waited for, and the regions are the caller's.
        self.done(|stream| unsafe { stream.scale(dtype, &batch) })
    }

    /// Multiplies floats by the first number over the second.
    pub fn multiply_by_ratio(
        &self,
        dtype: DataType,
        (factor, divisor): (u64, u64),
        region: DeviceRegion,
    ) -> Result<()> {
        self.scale(dtype, (BatchScale::Ratio, factor << 32 | divisor), region, region)
    }

    /// Folds a region and another one into the first.
    pub fn fold(&self, (dtype, operator): (DataType, Operator), into: DeviceRegion, other: DeviceRegion) -> Result<()> {
        let mut batch = Box::new(Batch::new(2, BatchScale::None, 0));
        batch.push(into.len(), into.address(), [into, other].map(|region| region.address()).into_iter());
        // SAFETY: the memory must stay until this has ended; because that is waited for, and the regions are the caller's.
        self.done(|stream| unsafe { stream.reduce(dtype, operator, &batch) })
    }

    /// Does something on the stream, and waits until it has been done.
    fn done(&self, work: impl FnOnce(&mut GpuStream) -> Result<()>) -> Result<()> {
        let mut stream = locked(&self.stream);
        let begun = {
            let _entered = self.gpu.enter()?;
            work(&mut stream)
        };
        begun.and(stream.finish())
    }
}

fn copy_on(stream: &mut GpuStream, to: DeviceRegion, from: DeviceRegion) -> Result<()> {
    // SAFETY: both must be there until the copy has ended; because who calls this waits for it, and the regions are the caller's.
    unsafe { stream.on_device(to.address(), from.address(), to.len()) }
}
