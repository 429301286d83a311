//! A communicator's GPU: the order of its operations against the program's streams, and the thread that runs them.
//!
//! The program's thread only records where its stream is and has the stream wait (see [`order`]); the operation runs on a
//! thread of the communicator's, which starts with the first operation and ends with the communicator.
//!
//! What a driver may do only when all of its streams have come to rest (allocating, freeing, loading code) is done when the
//! communicator is made or on the program's thread before its stream waits: a stream that waits for the thread that does
//! such things would wait for ever.
//!
//! [`order`]: crate::device::gpu::order
#![forbid(unsafe_code)]

use super::Operation;
use crate::device::gpu::driver::DriverHandle;
use crate::device::gpu::kernels::Module;
use crate::device::gpu::order::{Arrival, CommFlag, Means, StreamOrder};
use crate::device::gpu::GpuDevice;
use crate::device::host::stream::HostStream;
use crate::dtype::Operator;
use crate::error::{Error, Result};
use crate::memory::DeviceRegion;
use crate::sync::locked;
use std::sync::{Arc, Mutex, MutexGuard};

/// What a communicator on a GPU has beside its engine.
#[derive(Debug)]
pub struct GpuLauncher {
    gpu: Arc<GpuDevice>,
    gate: Arc<CommFlag>,
    /// Runs operations in the order in which they were accepted.
    progress: Arc<HostStream>,
    /// Held while an operation gets its turn, its place on its streams and its place on the thread, so that all three
    /// are in one order.
    accepting: Mutex<()>,
}

impl GpuLauncher {
    /// What is needed on this GPU.
    pub fn new(gpu: &Arc<GpuDevice>) -> Result<GpuLauncher> {
        gpu.load(Module::Move)?;
        let gate = CommFlag::new(gpu)?;
        Ok(GpuLauncher { gpu: gpu.clone(), gate, progress: HostStream::new(), accepting: Mutex::default() })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<GpuDevice> {
        &self.gpu
    }

    /// Gets ready what an operation needs of the driver.
    pub fn prepare(&self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Collective(super::CollectiveCall { dtype, reduction: Some(reduction), .. }) => {
                if !dtype.is_nccl() || !Operator::ON_GPUS.contains(&reduction.operator) {
                    let text = format!("{:?} of {} is not reduced on devices", reduction.operator, dtype.name());
                    return Err(Error::InvalidArgument(text));
                }
                self.gpu.load(Module::Of(*dtype))
            }
            _ => Ok(()),
        }
    }

    /// While this is held no other operation is accepted.
    pub fn accepting(&self) -> MutexGuard<'_, ()> {
        locked(&self.accepting)
    }

    /// Notes where these streams are.
    pub fn arrive(&self, streams: &[DriverHandle]) -> Result<Arrival> {
        self.refuse_captured(streams)?;
        self.gate.arrive(streams)
    }

    /// An error where one of these streams is being captured.
    pub fn refuse_captured(&self, streams: &[DriverHandle]) -> Result<()> {
        if streams.iter().any(|&stream| self.gpu.is_captured(stream)) {
            let text = "the stream is being captured into a graph; only the vendor's library can be captured";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        Ok(())
    }

    /// Has the streams wait for the operation.
    pub fn hold(&self, arrival: Arrival) -> (StreamOrder, Result<()>) {
        self.gate.hold(arrival, Means::Either)
    }

    /// A place of its own on a stream, which goes on when that is dropped.
    pub fn place_on(&self, stream: DriverHandle) -> Result<StreamOrder> {
        let gate = CommFlag::new(&self.gpu)?;
        let arrival = self.arrive(&[stream])?;
        let (place, held) = gate.hold(arrival, Means::Either);
        held.map(|()| place)
    }

    /// Has the communicator's thread do something after what it was given before.
    pub fn run(&self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        self.progress.enqueue(job)
    }

    /// Waits until the thread has done all that it was given: what is freed afterwards is freed elsewhere.
    pub fn settle(&self) {
        // Failures have been told.
        let _ = self.progress.synchronize();
    }

    /// An error for memory that the device cannot use.
    pub fn check(&self, region: DeviceRegion, name: &str) -> Result<()> {
        let at = |offset: usize| region.address() + offset as u64;
        match region.is_empty() || (self.gpu.can_use(at(0)) && self.gpu.can_use(at(region.len() - 1))) {
            true => Ok(()),
            false => self.gpu.check_alive().and(Err(Error::InvalidArgument(format!(
                "{name} {:#x} of {} bytes is neither memory of device {} nor host memory that its driver knows",
                region.address(),
                region.len(),
                self.gpu.number()
            )))),
        }
    }
}

impl Drop for GpuLauncher {
    fn drop(&mut self) {
        self.progress.close();
    }
}
