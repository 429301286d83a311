//! Streams of our own, events, and what is given to streams.

use super::driver::{Address, Driver, DriverHandle, CAPTURE_IMPLICIT, NOT_READY, SUCCESS};
use super::kernels::{element, fold, Batch, BatchScale, Flag, Kernel, Shuffle, THREADS, WORDS};
use super::GpuDevice;
use crate::dtype::{DataType, Operator};
use crate::error::Result;
use crate::sync::locked;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;

/// `CU_STREAM_NON_BLOCKING`, `hipStreamNonBlocking`: the legacy stream does not hold it up.
pub(super) const NON_BLOCKING: u32 = 1;
/// What one block of a kernel moves at least, so that short jobs take few.
const BLOCK_BYTES: u64 = 16 << 10;
/// Blocks for each multiprocessor that long jobs take at most.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;

/// Whether what is given to a stream is recorded into a graph instead of running.
pub fn is_captured(driver: &Driver, stream: DriverHandle) -> bool {
    let mut status = 0;
    // SAFETY: the stream must be one of the driver's; because the program gave it as one.
    let answer = unsafe { driver.stream_is_capturing(stream, &mut status) };
    answer == CAPTURE_IMPLICIT || (answer == SUCCESS && status != 0)
}

/// A point in a stream. Goes back to its device's pool with the value.
#[derive(Debug)]
pub struct GpuEvent {
    gpu: Arc<GpuDevice>,
    handle: DriverHandle,
}

impl GpuEvent {
    pub(super) fn new(gpu: Arc<GpuDevice>, handle: DriverHandle) -> GpuEvent {
        GpuEvent { gpu, handle }
    }

    /// Stands for all that the stream has been given so far. The context must be current.
    pub fn record(&self, stream: DriverHandle) -> Result<()> {
        // SAFETY: event and stream must be alive and of one context; because the program gives streams of the device
        // that its communicator is on, and the driver refuses others.
        self.gpu.check("event_record", unsafe { self.gpu.driver.event_record(self.handle, stream) })
    }

    /// Has a stream wait for it. The context must be current.
    pub fn hold(&self, stream: DriverHandle) -> Result<()> {
        // SAFETY: event and stream must be alive and of one context; because both are ours and of one device.
        let status = unsafe { self.gpu.driver.stream_wait_event(stream, self.handle, 0) };
        self.gpu.check("stream_wait_event", status)
    }

    /// Whether all of it has ended. A failure of the device shows here.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event must be alive; because it is ours.
        match unsafe { self.gpu.driver.event_query(self.handle) } {
            NOT_READY => Ok(false),
            status => self.gpu.check("event_query", status).map(|()| true),
        }
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        locked(&self.gpu.events).push(self.handle);
    }
}

/// A stream of ours, and how far it has come. What it is given gets a number; numbers complete in order.
#[derive(Debug)]
pub struct GpuStream {
    gpu: Arc<GpuDevice>,
    stream: DriverHandle,
    /// The number of what comes next.
    next: u64,
    /// Everything below has an event.
    marked: u64,
    /// Everything below has ended.
    done: u64,
    /// Events in order, with the number that each completes up to.
    events: VecDeque<(u64, GpuEvent)>,
}

impl GpuStream {
    /// A stream of the greatest priority: what a collective waits for goes before what others compute, and, since drivers
    /// have queues for each priority, it is not held up by streams of the program's that wait.
    pub fn new(gpu: &Arc<GpuDevice>) -> Result<GpuStream> {
        GpuStream::of_priority(gpu, gpu.greatest_priority)
    }

    /// A stream as the program makes them, on which calls are.
    pub fn ordinary(gpu: &Arc<GpuDevice>) -> Result<GpuStream> {
        GpuStream::of_priority(gpu, 0)
    }

    fn of_priority(gpu: &Arc<GpuDevice>, priority: c_int) -> Result<GpuStream> {
        let _entered = gpu.enter()?;
        let mut stream = 0;
        // SAFETY: the place must be valid; because it is a local.
        let status = unsafe { gpu.driver.stream_create(&mut stream, NON_BLOCKING, priority) };
        gpu.check("stream_create", status)?;
        Ok(GpuStream { gpu: gpu.clone(), stream, next: 0, marked: 0, done: 0, events: VecDeque::new() })
    }

    /// Its device.
    pub fn gpu(&self) -> &Arc<GpuDevice> {
        &self.gpu
    }

    /// The driver's handle, for what others enqueue; [`issued`](GpuStream::issued) gives that its number.
    pub fn handle(&self) -> DriverHandle {
        self.stream
    }

    /// Numbers what has just been given to the stream.
    pub fn issued(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Marks what has been issued since the last time, so that [`poll`](GpuStream::poll) sees it end. The context must be
    /// current.
    pub fn mark(&mut self) -> Result<()> {
        if self.marked < self.next {
            let event = self.gpu.event()?;
            event.record(self.stream)?;
            self.events.push_back((self.next, event));
            self.marked = self.next;
        }
        Ok(())
    }

    /// What this stream is given from now on comes after all that is [marked](GpuStream::mark) on another one. The context must
    /// be current.
    pub fn follow(&mut self, other: &GpuStream) -> Result<()> {
        // Where there is no event, all of it has ended.
        other.events.back().map_or(Ok(()), |(_, event)| event.hold(self.stream))
    }

    /// Looks how far the stream has come; everything below the result has ended. The context must be current.
    pub fn poll(&mut self) -> Result<u64> {
        while let Some((upto, event)) = self.events.front() {
            if !event.is_done()? {
                break;
            }
            self.done = *upto;
            self.events.pop_front();
        }
        Ok(self.done)
    }

    /// Whether something that was issued has not ended, as far as is known.
    pub fn is_busy(&self) -> bool {
        self.done < self.next
    }

    /// Waits until all of it has ended, whatever its outcome.
    pub fn settle(&mut self) {
        if self.is_busy() {
            if let Ok(_entered) = self.gpu.enter() {
                // SAFETY: the stream must be alive; because it is ours.
                unsafe { self.gpu.driver.stream_synchronize(self.stream) };
            }
            self.events.clear();
            (self.marked, self.done) = (self.next, self.next);
        }
    }

    /// Waits until all of it has ended, and tells a failure of the device.
    pub fn finish(&mut self) -> Result<()> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the stream must be alive; because it is ours.
        let status = unsafe { self.gpu.driver.stream_synchronize(self.stream) };
        self.events.clear();
        (self.marked, self.done) = (self.next, self.next);
        self.gpu.check("stream_synchronize", status)
    }

    /// Copies device memory into pinned host memory. The context must be current.
    ///
    /// # Safety
    /// Both places have so many bytes until the copy has ended; nobody else touches those that are written.
    pub unsafe fn to_host(&mut self, to: *mut u8, from: Address, bytes: usize) -> Result<()> {
        // SAFETY: both must be there for so many bytes until this has ended; because the caller promises it.
        let status = unsafe { self.gpu.driver.copy_to_host(to.cast(), from, bytes, self.stream) };
        self.gpu.check("copy_to_host", status)
    }

    /// Copies pinned host memory into device memory. The context must be current.
    ///
    /// # Safety
    /// Both places have so many bytes until the copy has ended; nobody else touches those that are written.
    pub unsafe fn to_device(&mut self, to: Address, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: both must be there for so many bytes until this has ended; because the caller promises it.
        let status = unsafe { self.gpu.driver.copy_to_device(to, from.cast(), bytes, self.stream) };
        self.gpu.check("copy_to_device", status)
    }

    /// Copies device memory. The context must be current.
    ///
    /// # Safety
    /// Both places have so many bytes until the copy has ended; nobody else touches those that are written.
    pub unsafe fn on_device(&mut self, to: Address, from: Address, bytes: usize) -> Result<()> {
        // SAFETY: both must be there for so many bytes until this has ended; because the caller promises it.
        let status = unsafe { self.gpu.driver.copy_on_device(to, from, bytes, self.stream) };
        self.gpu.check("copy_on_device", status)
    }

    /// Launches a reduction of a batch. The context must be current.
    ///
    /// # Safety
    /// The device's memory that is named there stays until this has ended; nobody else touches what is written.
    pub unsafe fn reduce(&mut self, dtype: DataType, operator: Operator, batch: &Batch) -> Result<()> {
        self.batch(Kernel::Reduce(dtype, operator), batch)
    }

    /// Launches a scaling of a batch. The context must be current.
    ///
    /// # Safety
    /// The device's memory that is named there stays until this has ended; nobody else touches what is written.
    pub unsafe fn scale(&mut self, dtype: DataType, batch: &Batch) -> Result<()> {
        self.batch(Kernel::Scale(dtype), batch)
    }

    /// Launches the copies of a batch. The context must be current.
    ///
    /// # Safety
    /// The device's memory that is named there stays until this has ended; nobody else touches what is written.
    pub unsafe fn copy(&mut self, batch: &Batch) -> Result<()> {
        self.batch(Kernel::Copy, batch)
    }

    /// Launches a batch of a kernel of codes. The context must be current.
    ///
    /// # Safety
    /// The device's memory that is named there stays until this has ended; nobody else touches what is written.
    pub unsafe fn coding(&mut self, kernel: Kernel, batch: &Batch) -> Result<()> {
        self.batch(kernel, batch)
    }

    /// Launches a permutation of blocks. The context must be current.
    ///
    /// # Safety
    /// The device's memory that is named there stays until this has ended; nobody else touches what is written.
    pub unsafe fn shuffle(&mut self, shuffle: &Shuffle) -> Result<()> {
        let blocks = self.blocks(shuffle.block_bytes.saturating_mul(shuffle.rows).saturating_mul(shuffle.columns), 1);
        self.gpu.launch(self.stream, Kernel::Shuffle, [blocks, 1, THREADS], shuffle)
    }

    /// Launches what waits until a word has come so far. The context must be current.
    pub fn wait(&mut self, flag: Flag) -> Result<()> {
        wait_by_kernel(&self.gpu, self.stream, flag)
    }

    /// Launches what raises a word after everything before it. The context must be current.
    pub fn raise(&mut self, flag: Flag) -> Result<()> {
        self.gpu.launch(self.stream, Kernel::Raise, [1, 1, 1], &flag)
    }

    fn batch(&mut self, kernel: Kernel, batch: &Batch) -> Result<()> {
        let longest = batch.jobs().map(|job| job[0]).max().unwrap_or(0);
        let blocks = self.blocks(longest, batch.njobs);
        self.gpu.launch(self.stream, kernel, [blocks, batch.njobs, THREADS], batch)
    }

    /// How many blocks share a job of so many bytes where there are `njobs` of them.
    fn blocks(&self, bytes: u64, njobs: u32) -> u32 {
        let most = (BLOCKS_PER_MULTIPROCESSOR * self.gpu.multiprocessors / njobs.max(1)).max(1);
        u32::try_from(bytes.div_ceil(BLOCK_BYTES)).unwrap_or(u32::MAX).clamp(1, most)
    }
}

impl Drop for GpuStream {
    fn drop(&mut self) {
        self.settle();
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: the stream must be alive; because it is ours, and nobody else has it.
            unsafe { self.gpu.driver.stream_destroy(self.stream) };
        }
    }
}

/// Has a stream wait by a kernel until a word has come so far, where the driver has no operation for it. The context must
/// be current.
pub(super) fn wait_by_kernel(gpu: &GpuDevice, stream: DriverHandle, flag: Flag) -> Result<()> {
    gpu.launch(stream, Kernel::Wait, [1, 1, 1], &flag)
}

impl Batch {
    /// No jobs yet, each of which will have so many sources.
    pub fn new(nsrcs: usize, scale: BatchScale, factor: u64) -> Batch {
        Batch { njobs: 0, nsrcs: nsrcs as u32, scale: scale as u32, operation: 0, factor, words: [0; WORDS] }
    }

    /// Forgets its jobs; further ones will have so many sources.
    pub fn begin(&mut self, nsrcs: usize, scale: BatchScale, factor: u64) {
        (self.njobs, self.nsrcs, self.scale, self.operation, self.factor) = (0, nsrcs as u32, scale as u32, 0, factor);
    }

    /// Forgets its jobs; further ones are coded chunks of elements of a type, of so many words each beside the first two.
    pub fn begin_codes(&mut self, words: usize, dtype: DataType, (operator, sources): (Operator, usize)) {
        self.begin(words, BatchScale::None, sources as u64);
        (self.scale, self.operation) = (element(dtype), fold(operator));
    }

    /// The jobs: bytes, destination, sources.
    pub fn jobs(&self) -> impl Iterator<Item = &[u64]> {
        self.words.chunks_exact(2 + self.nsrcs as usize).take(self.njobs as usize)
    }

    /// How many jobs of so many sources fit.
    pub const fn capacity(nsrcs: usize) -> usize {
        WORDS / (2 + nsrcs)
    }

    /// Whether no further job fits.
    pub fn is_full(&self) -> bool {
        self.njobs as usize >= Batch::capacity(self.nsrcs as usize)
    }

    /// Adds a job. The batch must not be full, and the job has as many sources as all of them.
    pub fn push(&mut self, bytes: usize, dst: Address, srcs: impl Iterator<Item = Address>) {
        let width = 2 + self.nsrcs as usize;
        let at = self.njobs as usize * width;
        let job = &mut self.words[at..at + width];
        job[0] = bytes as u64;
        job[1] = dst;
        job[2..].iter_mut().zip(srcs).for_each(|(word, src)| *word = src);
        self.njobs += 1;
    }
}
