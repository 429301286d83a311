//! The same memory twice: on the device, where a kernel works on it, and on the host, where the host device does.

use std::sync::Arc;
use strata::device::gpu::kernels::{Batch, BatchScale};
use strata::device::gpu::memory::{DeviceBuffer, Pinned};
use strata::device::gpu::stream::GpuStream;
use strata::device::gpu::GpuDevice;
use strata::device::host::reference;
use strata::dtype::DataType;
use strata::error::Result;
use strata::memory::{Arena, Region};

/// A generator with a seed: xorshift.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 3
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    /// One of these.
    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Arbitrary bits, numbers of ordinary size, and special values.
    pub fn element(&mut self, dtype: DataType) -> [u8; 8] {
        let smallest = [f64::from(f32::MIN_POSITIVE), 6e-5, 1.5e-5, 0.015, 0.002, 1e-7, 3e-308, 1e-45];
        let specials = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0, 448.0, 65504.0, 57344.0];
        let number = (self.next() as i32 >> 8) as f64 / f64::from(1 << 19);
        match self.below(8) {
            0 => reference::encode(dtype, self.one_of(&specials)),
            1 => reference::encode(dtype, number * self.one_of(&smallest)),
            2..=4 => (self.next() << 3 ^ self.next()).to_le_bytes(),
            _ => reference::encode(dtype, number),
        }
    }
}

/// The most bytes that jobs of one launch take, gaps included.
const BYTES: usize = 1 << 20;
/// Bytes on either side of what a job touches, which must stay as they are.
const GAP: usize = 17;

/// One job: bytes, where its destination is, where its sources are.
#[derive(Debug)]
pub struct Job {
    /// Bytes of each operand.
    pub bytes: usize,
    /// Where the destination is.
    pub dst: usize,
    /// Where the sources are.
    pub srcs: Vec<usize>,
}

/// The memory, and the stream on which kernels work on it.
#[derive(Debug)]
pub struct Twice {
    /// Where kernels are launched. Declared first: it comes to rest before the memory goes.
    pub track: GpuStream,
    device: DeviceBuffer,
    staging: Pinned,
    /// Stays to the end of the process.
    host: Region,
    /// Contents to take from, twice as many as fit.
    pool: Vec<u8>,
    taken: usize,
}

impl Twice {
    /// Memory for jobs of a type, with contents that a seed decides.
    pub fn new(gpu: &Arc<GpuDevice>, dtype: DataType, random: &mut Random) -> Result<Twice> {
        let elements = 0..2 * BYTES / dtype.size();
        Ok(Twice {
            track: GpuStream::new(gpu)?,
            device: DeviceBuffer::new(gpu, BYTES)?,
            staging: Pinned::new(gpu, BYTES)?,
            host: Arena::new(BYTES).leak(),
            pool: elements.flat_map(|_| random.element(dtype).into_iter().take(dtype.size())).collect(),
            taken: 0,
        })
    }

    /// Begins anew, without jobs.
    pub fn clear(&mut self) {
        self.taken = 64;
    }

    /// Room for so many bytes, `misplaced` bytes past a multiple of 16.
    pub fn place(&mut self, bytes: usize, misplaced: usize) -> usize {
        let at = self.taken.next_multiple_of(16) + misplaced;
        self.taken = at + bytes + GAP;
        assert!(self.taken <= BYTES, "jobs of {} bytes", self.taken);
        at
    }

    /// Where the device finds a place.
    pub fn address(&self, at: usize) -> u64 {
        self.device.region().address() + at as u64
    }

    /// Where the device finds the contents of a place in host memory, after [`fill`](Twice::fill).
    pub fn pinned_address(&self, at: usize) -> u64 {
        self.staging.address() + at as u64
    }

    /// Where the host finds a place of its own.
    pub fn region(&mut self, at: usize, bytes: usize) -> Region {
        self.host.part(at, bytes)
    }

    /// Jobs as a kernel takes them.
    pub fn batch(&self, jobs: &[Job], scale: BatchScale, factor: u64) -> Batch {
        let mut batch = Batch::new(jobs[0].srcs.len(), scale, factor);
        for job in jobs {
            batch.push(job.bytes, self.address(job.dst), job.srcs.iter().map(|at| self.address(*at)));
        }
        batch
    }

    /// Gives both memories the same contents, as far as places were taken.
    pub fn fill(&mut self, random: &mut Random) -> Result<()> {
        let from = random.below(BYTES / 64) * 64;
        let contents = &self.pool[from..from + self.taken];
        self.host.part(0, self.taken).write(contents);
        let staged = self.staging.host().part(0, self.taken);
        staged.write(contents);
        let address = self.address(0);
        // SAFETY: both must stay until this has ended; because they are kept beside the stream, which is waited for first.
        unsafe { self.track.to_device(address, staged.as_ptr(), self.taken) }?;
        self.track.issued();
        Ok(())
    }

    /// Waits for the device, and compares everything, also what was not to be written: where the first difference is.
    pub fn difference(&mut self) -> Result<Option<String>> {
        let staged = self.staging.host().part(0, self.taken);
        let address = self.address(0);
        // SAFETY: both must stay until this has ended; because they are kept beside the stream, which is waited for first.
        unsafe { self.track.to_host(staged.as_ptr(), address, self.taken) }?;
        self.track.issued();
        self.track.finish()?;
        let (mut got, mut wanted) = (vec![0; self.taken], vec![0; self.taken]);
        staged.read(&mut got);
        self.host.part(0, self.taken).read(&mut wanted);
        let at = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
        Ok(at.map(|at| {
            let near = at & !7..((at & !7) + 8).min(self.taken);
            format!("at byte {at}: {:02x?}, wanted {:02x?}", &got[near.clone()], &wanted[near])
        }))
    }
}
