//! Memory for what late ranks bring, and what is done there: of the host, or of the GPU that the communicator's data is on.

use super::{here, identity};
use crate::device::gpu::kernels::BatchScale;
use crate::device::gpu::memory::DeviceBuffer;
use crate::device::gpu::work::GpuWork;
use crate::device::gpu::GpuDevice;
use crate::device::host;
use crate::dtype::{DataType, Reduction};
use crate::error::{Error, Result};
use crate::memory::{Arena, DeviceRegion};
use crate::sync::locked;
use std::sync::{Arc, Mutex};

/// Vectors of memory of the host that are kept for the next call with late ranks.
const SPARE: usize = 2;
/// Vectors that a call with late ranks takes at most: what it relays with, and what it brings.
const VECTORS: usize = 2;

/// Where the data of a communicator's calls is.
#[derive(Debug)]
pub enum LateMemory {
    /// In memory of the host, which is taken when it is needed.
    Host(Mutex<Vec<Arena>>),
    /// On a GPU.
    Gpu(OnGpu),
}

/// On a GPU. A driver may allocate only when its streams have come to rest, and the program's wait for a call from its acceptance on, so
/// memory is taken before that, on the program's thread.
#[derive(Debug)]
pub struct OnGpu {
    work: GpuWork,
    vectors: Mutex<Vectors>,
}

#[derive(Debug, Default)]
struct Vectors {
    free: Vec<DeviceBuffer>,
    /// Bytes of all, in use or not. None is given back: freeing waits for streams, too.
    made: Vec<usize>,
}

/// A vector. It is kept for the next call with late ranks when this is dropped.
#[derive(Debug)]
pub struct Vector {
    region: DeviceRegion,
    /// None once it has gone back.
    owner: Option<Owner>,
    from: Arc<LateMemory>,
}

#[derive(Debug)]
enum Owner {
    Host(Arena),
    Gpu(DeviceBuffer),
}

impl Vector {
    /// Where it is; not to be used when this is gone.
    pub fn region(&self) -> DeviceRegion {
        self.region
    }
}

impl Drop for Vector {
    fn drop(&mut self) {
        match (&*self.from, self.owner.take()) {
            (LateMemory::Host(spare), Some(Owner::Host(arena))) => {
                let mut spare = locked(spare);
                if spare.len() == SPARE {
                    spare.remove(0);
                }
                spare.push(arena);
            }
            (LateMemory::Gpu(OnGpu { vectors, .. }), Some(Owner::Gpu(vector))) => locked(vectors).free.push(vector),
            _ => {}
        }
    }
}

fn none(bytes: usize) -> Error {
    Error::System(format!("there is no memory for the {bytes} bytes of a late rank's part (STRATA_LATE)"))
}

impl LateMemory {
    /// For data on this GPU, or of the host's.
    pub fn new(gpu: Option<&Arc<GpuDevice>>) -> Result<Arc<LateMemory>> {
        Ok(Arc::new(match gpu {
            None => LateMemory::Host(Mutex::default()),
            Some(gpu) => LateMemory::Gpu(OnGpu { work: GpuWork::new(gpu)?, vectors: Mutex::default() }),
        }))
    }

    /// Has what a call of so many bytes may need, where it cannot be taken later.
    pub fn make_room(&self, bytes: usize) -> Result<()> {
        let LateMemory::Gpu(OnGpu { work, vectors }) = self else { return Ok(()) };
        loop {
            let made = locked(vectors).made.clone();
            if made.iter().filter(|&&made| made >= bytes).count() >= VECTORS {
                return Ok(());
            }
            // Without the lock: where the driver waits for streams, these may wait for a call that takes a vector now. Twice as much as
            // before at least, so that all that stays is at most three times what a call has needed.
            let mut sorted = made;
            sorted.sort_unstable();
            let before = sorted.iter().rev().nth(VECTORS - 1).copied().unwrap_or(0);
            let more = DeviceBuffer::new(work.gpu(), bytes.max(2 * before))?;
            let mut vectors = locked(vectors);
            vectors.made.push(more.bytes());
            vectors.free.push(more);
        }
    }

    /// A vector of so many bytes.
    pub fn take(self: &Arc<LateMemory>, bytes: usize) -> Result<Vector> {
        let (region, owner) = match &**self {
            LateMemory::Host(spare) => {
                let spare = {
                    let mut spare = locked(spare);
                    let place = spare.iter().position(|arena| arena.len() >= bytes);
                    place.map(|place| spare.swap_remove(place))
                };
                let mut arena = spare.or_else(|| Arena::try_new(bytes)).ok_or_else(|| none(bytes))?;
                // SAFETY: the arena must outlive every use; because who uses the region keeps the vector, and a communicator that
                // fails cancels what uses it.
                let region = unsafe { arena.region().part(0, bytes).unbound() };
                (region.as_device(), Owner::Host(arena))
            }
            LateMemory::Gpu(OnGpu { vectors, .. }) => {
                let free = &mut locked(vectors).free;
                let fits = free.iter().enumerate().filter(|(_, vector)| vector.bytes() >= bytes);
                let place = fits.min_by_key(|(_, vector)| vector.bytes()).map(|(place, _)| place);
                let vector = free.swap_remove(place.ok_or_else(|| none(bytes))?);
                (vector.region().part(0, bytes), Owner::Gpu(vector))
            }
        };
        Ok(Vector { region, owner: Some(owner), from: self.clone() })
    }

    /// Bytes that are filled ahead of what needs them: a GPU does it at once, but each time has its price.
    pub fn ahead(&self) -> usize {
        match self {
            LateMemory::Host(_) => 1 << 20,
            LateMemory::Gpu(_) => 64 << 20,
        }
    }

    /// Fills a region with the neutral element of a reduction.
    pub fn fill(&self, region: DeviceRegion, reduction: &Reduction) -> Result<()> {
        match self {
            _ if region.is_empty() => Ok(()),
            LateMemory::Host(_) => {
                identity::fill(here(region), reduction);
                Ok(())
            }
            LateMemory::Gpu(OnGpu { work, .. }) => work.fill(region, &identity::pattern(reduction, region.len())),
        }
    }

    /// Copies.
    pub fn copy(&self, to: DeviceRegion, from: DeviceRegion) -> Result<()> {
        match self {
            _ if to.is_empty() => Ok(()),
            LateMemory::Host(_) => {
                here(to).copy_from(here(from));
                Ok(())
            }
            LateMemory::Gpu(OnGpu { work, .. }) => work.copy(std::iter::once((to, from))),
        }
    }

    /// Applies a reduction's prologue.
    pub fn prologue(&self, reduction: &Reduction, to: DeviceRegion, from: DeviceRegion) -> Result<()> {
        match self {
            _ if to.is_empty() => Ok(()),
            LateMemory::Host(_) => {
                host::prologue(reduction, here(from), here(to));
                Ok(())
            }
            LateMemory::Gpu(OnGpu { work, .. }) => work.prologue(reduction, to, from),
        }
    }

    /// Reduces a region and another one into the first.
    pub fn fold(&self, reduction: &Reduction, into: DeviceRegion, other: DeviceRegion) -> Result<()> {
        let Reduction { dtype, operator, .. } = *reduction;
        match self {
            _ if into.is_empty() => Ok(()),
            LateMemory::Host(_) => {
                let [into, other] = [into, other].map(here);
                host::reduce(dtype, operator, 1, &[into, other], into);
                Ok(())
            }
            LateMemory::Gpu(OnGpu { work, .. }) => work.fold((dtype, operator), into, other),
        }
    }

    /// Multiplies floats by the first number over the second.
    pub fn multiply_by_ratio(&self, dtype: DataType, ratio: (u64, u64), region: DeviceRegion) -> Result<()> {
        match self {
            _ if region.is_empty() => Ok(()),
            LateMemory::Host(_) => {
                host::multiply_by_ratio(dtype, ratio, here(region));
                Ok(())
            }
            LateMemory::Gpu(OnGpu { work, .. }) => work.multiply_by_ratio(dtype, ratio, region),
        }
    }

    /// Divides every element.
    pub fn divide(&self, dtype: DataType, divisor: u64, region: DeviceRegion) -> Result<()> {
        match self {
            _ if region.is_empty() => Ok(()),
            LateMemory::Host(_) => {
                host::divide(dtype, divisor, here(region), here(region));
                Ok(())
            }
            LateMemory::Gpu(OnGpu { work, .. }) => work.scale(dtype, (BatchScale::Divide, divisor), region, region),
        }
    }
}
