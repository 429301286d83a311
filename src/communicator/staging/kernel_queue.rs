//! Work on a stream of ours, gathered into few launches.

use super::slots::{MessageSlot, Slots};
use crate::device::gpu::driver::DriverHandle;
use crate::device::gpu::kernels::{Batch, BatchScale, Kernel, Shuffle};
use crate::device::gpu::stream::GpuStream;
use crate::device::gpu::GpuDevice;
use crate::dtype::{DataType, Operator, Prologue};
use crate::error::{Error, Result};
use crate::exec::Token;
use crate::memory::DeviceRegion;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;

/// What is done to the stretches of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Work {
    /// They are copied.
    Copy,
    /// Sources are folded, and the result divided; 1 leaves it.
    Reduce { dtype: DataType, operator: Operator, divisor: u64 },
    /// A rank's own input is scaled before it is used.
    Prologue { dtype: DataType, prologue: Prologue },
    /// Results are divided.
    Divide { dtype: DataType, divisor: u64 },
    /// A kernel of codes works on elements of a type; of a fold `sources` chunks are folded.
    Code { kernel: Kernel, dtype: DataType, operator: Operator, sources: usize },
}

impl Work {
    /// Makes a batch one of no jobs of this work.
    fn begin(self, batch: &mut Batch, nsrcs: usize) {
        let (scale, factor) = match self {
            Work::Copy | Work::Reduce { divisor: 1, .. } => (BatchScale::None, 0),
            Work::Reduce { divisor, .. } | Work::Divide { divisor, .. } => (BatchScale::Divide, divisor),
            Work::Prologue { prologue: Prologue::None, .. } => (BatchScale::None, 0),
            Work::Prologue { prologue: Prologue::Scalar(scalar), .. } => {
                (BatchScale::Multiply, u64::from_le_bytes(scalar))
            }
            Work::Prologue { prologue: Prologue::Reciprocal(n), .. } => (BatchScale::Reciprocal, n),
            Work::Code { dtype, operator, sources, .. } => {
                return batch.begin_codes(nsrcs, dtype, (operator, sources));
            }
        };
        batch.begin(nsrcs, scale, factor);
    }

    fn launch(self, track: &mut GpuStream, batch: &Batch) -> Result<()> {
        // What a batch names is of the call's buffers, of scratch memory and of slots.
        match self {
            // SAFETY: it must stay until this has ended; because a run that ends or is cancelled waits for its streams.
            Work::Copy => unsafe { track.copy(batch) },
            // SAFETY: it must stay until this has ended; because a run that ends or is cancelled waits for its streams.
            Work::Reduce { dtype, operator, .. } => unsafe { track.reduce(dtype, operator, batch) },
            Work::Prologue { dtype, .. } | Work::Divide { dtype, .. } => {
                // SAFETY: it must stay until this has ended; because a run that ends or is cancelled waits for its streams.
                unsafe { track.scale(dtype, batch) }
            }
            // SAFETY: it must stay until this has ended; because a run that ends or is cancelled waits for its streams.
            Work::Code { kernel, .. } => unsafe { track.coding(kernel, batch) },
        }
    }
}

/// A step whose work has been launched.
#[derive(Debug)]
struct Launched {
    number: u64,
    token: Option<Token>,
    slot: Option<MessageSlot>,
}

/// A stream, the work that is being gathered for it, and the steps that wait for it.
#[derive(Debug)]
pub struct KernelQueue {
    gpu: Arc<GpuDevice>,
    track: GpuStream,
    /// Jobs of one kind, not yet launched.
    open: Option<(Work, Box<Batch>)>,
    /// Kept for its allocation.
    spare: Option<Box<Batch>>,
    /// Steps whose last job is among those.
    ending: Vec<(Option<Token>, Option<MessageSlot>)>,
    launched: VecDeque<Launched>,
}

impl KernelQueue {
    /// A queue with a stream of its own.
    pub fn new(gpu: &Arc<GpuDevice>) -> Result<KernelQueue> {
        Ok(KernelQueue {
            gpu: gpu.clone(),
            track: GpuStream::new(gpu)?,
            open: None,
            spare: None,
            ending: Vec::new(),
            launched: VecDeque::new(),
        })
    }

    /// Whether there is work that has not ended.
    pub fn is_busy(&self) -> bool {
        self.open.is_some() || !self.ending.is_empty() || self.track.is_busy()
    }

    /// Adds one job; of codes `bytes` are elements, `dst` is the chunk, and the others follow as [`Kernel::Encode`] has them.
    pub fn add(&mut self, work: Work, bytes: usize, dst: u64, srcs: &[u64]) -> Result<()> {
        if Batch::capacity(srcs.len()) == 0 {
            return Err(Error::InvalidUsage(format!("{} operands of one reduction on a device", srcs.len())));
        }
        let fits = |(open, batch): &(Work, Box<Batch>)| {
            *open == work && batch.nsrcs as usize == srcs.len() && !batch.is_full()
        };
        if !self.open.as_ref().is_some_and(fits) {
            self.flush()?;
        }
        let (_, batch) = self.open.get_or_insert_with(|| {
            let mut batch = self.spare.take().unwrap_or_else(|| Box::new(Batch::new(1, BatchScale::None, 0)));
            work.begin(&mut batch, srcs.len());
            (work, batch)
        });
        batch.push(bytes, dst, srcs.iter().copied());
        Ok(())
    }

    /// The jobs of a step, or without a token of a part of one, have been added; its slot is given back when they have
    /// ended.
    pub fn end(&mut self, token: Option<Token>, slot: Option<MessageSlot>) {
        self.ending.push((token, slot));
    }

    /// Copies a message from its slot to its pieces by the device's copy engine, a whole step.
    pub fn copy_in(&mut self, token: Token, dst: &[DeviceRegion], slot: MessageSlot) -> Result<()> {
        let mut at = 0;
        for part in dst {
            let from = slot.region().part(at, part.len());
            // SAFETY: both must stay until this has ended; because the slot is given back when it has, and a run that ends or
            // is cancelled waits for its streams.
            unsafe { self.track.to_device(part.address(), from.as_ptr(), part.len()) }?;
            at += part.len();
        }
        let number = self.track.issued();
        self.launched.push_back(Launched { number, token: Some(token), slot: Some(slot) });
        Ok(())
    }

    /// The stream, for work that others give it; what has been gathered must have been launched.
    pub fn stream(&self) -> DriverHandle {
        self.track.handle()
    }

    /// Launches a permutation of blocks, after what has been gathered.
    pub fn shuffle(&mut self, shuffle: &Shuffle) -> Result<()> {
        self.launch()?;
        // SAFETY: the blocks must stay until this has ended; because they are of buffers and memory of calls, which do.
        unsafe { self.track.shuffle(shuffle) }
    }

    /// Launches what has been gathered, so that what follows on the stream comes after it.
    pub fn launch(&mut self) -> Result<()> {
        match self.open.is_some() {
            true => self.flush(),
            false => Ok(()),
        }
    }

    /// What this stream is given from now on comes after all that another one has been given. The device must be current.
    pub fn follow(&mut self, other: &mut KernelQueue) -> Result<()> {
        // What is here already comes before, and waits for nothing.
        self.mark()?;
        other.end(None, None);
        other.mark()?;
        self.track.follow(&other.track)
    }

    /// What another stream is given from now on comes after all that this one has been given. The device must be current.
    pub fn lead(&mut self, stream: &mut GpuStream) -> Result<()> {
        self.end(None, None);
        self.mark()?;
        stream.follow(&self.track)
    }

    /// Launches what has been gathered and notes where it ends, whatever comes behind it. The device must be current.
    pub fn mark(&mut self) -> Result<()> {
        self.flush()?;
        self.track.mark()
    }

    /// Launches what has been gathered.
    fn flush(&mut self) -> Result<()> {
        if let Some((work, batch)) = self.open.take() {
            let _entered = self.gpu.enter()?;
            work.launch(&mut self.track, &batch)?;
            self.spare = Some(batch);
        } else if self.ending.is_empty() {
            return Ok(());
        }
        let number = self.track.issued();
        let steps = self.ending.drain(..).map(|(token, slot)| Launched { number, token, slot });
        self.launched.extend(steps);
        Ok(())
    }

    /// Launches what has been gathered and collects the steps that have ended. The device must be current.
    pub fn turn(&mut self, slots: &mut Slots, done: &mut Vec<Token>) -> Result<()> {
        self.mark()?;
        let ended = self.track.poll()?;
        while let Some(step) = self.launched.front().filter(|step| step.number < ended) {
            done.extend(step.token);
            if let Some(slot) = self.launched.pop_front().and_then(|step| step.slot) {
                slots.put(slot);
            }
        }
        Ok(())
    }

    /// Forgets everything once the stream has come to rest.
    pub fn cancel(&mut self, slots: &mut Slots) {
        // What was given to the stream last may have no number yet.
        self.track.issued();
        self.track.settle();
        self.open = None;
        let ending = self.ending.drain(..).filter_map(|(_, slot)| slot);
        let launched = self.launched.drain(..).filter_map(|step| step.slot);
        ending.chain(launched).for_each(|slot| slots.put(slot));
    }
}

/// Launches copies (bytes, destination, source) at once, as many launches as they need.
pub fn copy_now(track: &mut GpuStream, jobs: impl Iterator<Item = (usize, u64, u64)>) -> Result<()> {
    let jobs: SmallVec<[(usize, u64, u64); 16]> = jobs.collect();
    for some in jobs.chunks(Batch::capacity(1)) {
        let mut batch = Batch::new(1, BatchScale::None, 0);
        some.iter().for_each(|&(bytes, dst, src)| batch.push(bytes, dst, std::iter::once(src)));
        // SAFETY: the places must stay until this has ended; because the slot is sent when it has, and the call's buffers stay.
        unsafe { track.copy(&batch) }?;
    }
    Ok(())
}
