//! Where data lives and is computed on.

pub mod gpu;
pub mod host;

use crate::error::{Error, Result};
use gpu::driver::DriverHandle;
use host::stream::HostStream;
use std::sync::Arc;

/// Where an operation is ordered.
#[derive(Debug, Clone)]
pub enum StreamRef {
    /// The null stream: finished when the call returns.
    Null,
    /// A host stream of the program.
    Stream(Arc<HostStream>),
    /// A stream of the GPU's driver, on a communicator of a GPU; the driver's null streams included.
    Gpu(DriverHandle),
}

impl PartialEq for StreamRef {
    fn eq(&self, other: &StreamRef) -> bool {
        match (self, other) {
            (StreamRef::Null, StreamRef::Null) => true,
            (StreamRef::Stream(one), StreamRef::Stream(two)) => Arc::ptr_eq(one, two),
            (StreamRef::Gpu(one), StreamRef::Gpu(two)) => one == two,
            _ => false,
        }
    }
}

impl StreamRef {
    /// Whether this is the null stream of the host.
    pub fn is_null(&self) -> bool {
        matches!(self, StreamRef::Null)
    }

    /// Queues a job; on the null stream runs it and returns its outcome. Only the driver gives work to its own streams.
    pub fn enqueue(&self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        match self {
            StreamRef::Null => job(),
            StreamRef::Stream(stream) => stream.enqueue(job),
            StreamRef::Gpu(_) => Err(Error::Internal("a job for a stream of the GPU's driver".to_string())),
        }
    }
}
