//! Memory of calls that may be made again: inputs as they were, and the word that ends a call.

use crate::communicator::CollectiveCall;
use crate::device::gpu::memory::DeviceBuffer;
use crate::device::gpu::work::GpuWork;
use crate::device::gpu::GpuDevice;
use crate::dtype::{DataType, RedOp, Reduction};
use crate::error::{counted, Error, Result};
use crate::memory::{Arena, DeviceRegion, Region};
use crate::plan::Collective;
use crate::selection::AUTO;
use crate::sync::locked;
use std::sync::{Arc, Mutex};

/// Where each region begins on a GPU.
const ALIGN: usize = 256;

/// What a call writes over and needs to be made again. The memory is used again by the next call.
#[derive(Debug, Default)]
pub struct KeptInput {
    kept: Vec<(Region, Vec<u8>)>,
    spare: Vec<Vec<u8>>,
}

/// What is written over: the input of a reduction in place, and the residual. Calls that reduce nothing leave what they read.
fn written(call: &CollectiveCall) -> impl Iterator<Item = DeviceRegion> {
    let input = Some(call.input).filter(|input| call.reduction.is_some() && input.overlaps(call.output));
    input.into_iter().chain(call.residual).filter(|region| !region.is_empty())
}

impl KeptInput {
    /// Keeps what this call writes over, in place of what was kept before.
    pub fn keep(&mut self, call: &CollectiveCall) -> Result<()> {
        self.spare.extend(self.kept.drain(..).map(|(_, bytes)| bytes));
        for region in written(call) {
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.clear();
            bytes.try_reserve_exact(region.len()).map_err(|_| {
                let len = counted(region.len(), "byte");
                Error::System(format!("there is no memory to keep the {len} that the call writes over (STRATA_LOST)"))
            })?;
            bytes.resize(region.len(), 0);
            // SAFETY: the region must be in this process's memory as long as it is used; because communicators with data on a device
            // keep nothing, and the program leaves the buffers of a call alone until that has ended.
            let region = unsafe { region.in_process() };
            region.read(&mut bytes);
            self.kept.push((region, bytes));
        }
        Ok(())
    }

    /// Writes it back.
    pub fn give_back(&self) {
        self.kept.iter().for_each(|(region, bytes)| region.write(bytes));
    }
}

/// Memory on a GPU for inputs of calls that may be made again.
///
/// A driver may allocate only when its streams have come to rest, and the program's wait for a call from its acceptance on, so memory is
/// taken before that, on the program's thread.
#[derive(Debug)]
pub struct KeptOnGpu {
    work: GpuWork,
    /// The last one is the largest. The others stay: freeing waits for streams, too.
    memory: Mutex<Vec<DeviceBuffer>>,
    /// What the call that is on has kept, and where.
    kept: Mutex<Vec<(DeviceRegion, DeviceRegion)>>,
}

impl KeptOnGpu {
    /// Without memory.
    pub fn new(gpu: &Arc<GpuDevice>) -> Result<KeptOnGpu> {
        Ok(KeptOnGpu { work: GpuWork::new(gpu)?, memory: Mutex::default(), kept: Mutex::default() })
    }

    /// Has memory for what a call writes over. Others that are queued may still use what there was.
    pub fn make_room(&self, call: &CollectiveCall) -> Result<()> {
        let bytes = written(call).map(|region| region.len().next_multiple_of(ALIGN)).sum::<usize>();
        let there = locked(&self.memory).last().map_or(0, DeviceBuffer::bytes);
        if there < bytes {
            // Without the lock: where the driver waits for streams, these may wait for a call that keeps something now.
            // Twice as much at least, so that all that stays is at most three times what a call has needed.
            let more = DeviceBuffer::new(self.work.gpu(), bytes.max(2 * there))?;
            let mut memory = locked(&self.memory);
            memory.push(more);
            memory.sort_by_key(DeviceBuffer::bytes);
        }
        Ok(())
    }

    /// Keeps what this call writes over, in place of what was kept before.
    pub fn keep(&self, call: &CollectiveCall) -> Result<()> {
        let memory = locked(&self.memory).last().map_or(DeviceRegion::EMPTY, DeviceBuffer::region);
        let mut at = 0;
        let copies = written(call).map(|region| {
            let kept = memory.part(at, region.len());
            at += region.len().next_multiple_of(ALIGN);
            (region, kept)
        });
        let copies: Vec<_> = copies.collect();
        if !copies.is_empty() {
            self.work.copy(copies.iter().map(|(region, kept)| (*kept, *region)))?;
        }
        *locked(&self.kept) = copies;
        Ok(())
    }

    /// Writes it back.
    pub fn give_back(&self) -> Result<()> {
        self.work.copy(locked(&self.kept).iter().copied())
    }

    /// What is done to buffers between calls.
    pub fn work(&self) -> &GpuWork {
        &self.work
    }
}

/// A word that all ranks tell each other: when they have their results one that means nothing, and what they ask for.
pub struct CommitWord {
    word: Region,
    /// Where it is.
    _arena: Arena,
}

impl CommitWord {
    /// This word.
    pub fn new(word: u64) -> CommitWord {
        let mut arena = Arena::new(size_of::<u64>());
        // SAFETY: the arena must outlive every use; because calls that use the word end before what has it.
        let region = unsafe { arena.region().unbound() };
        region.write(&word.to_le_bytes());
        CommitWord { word: region, _arena: arena }
    }

    /// What it has become.
    pub fn said(&self) -> u64 {
        let mut said = [0; size_of::<u64>()];
        self.word.read(&mut said);
        u64::from_le_bytes(said)
    }

    /// The call by which so many ranks tell it: its result shows that all have come to it, and is the least or greatest word.
    pub fn call(&self, nranks: usize, op: RedOp) -> CollectiveCall {
        let word = self.word.as_device();
        let reduction = Some(Reduction::new(op, DataType::U64, nranks));
        // Algorithms that settings name are for the program's calls.
        let algorithm = Some(AUTO.to_string());
        let call = CollectiveCall::new(Collective::AllReduce, [word, word], 1, DataType::U64);
        CollectiveCall { reduction, algorithm, ..call }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_reduction_in_place_writes_over_comes_back() {
        let mut arena = Arena::new(128);
        // SAFETY: the arena must outlive every use; because it lives to the end of the test.
        let all = unsafe { arena.region().unbound() };
        let [memory, other] = [0, 64].map(|at| all.part(at, 64));
        let reduction = Some(Reduction::new(RedOp::Sum, DataType::I8, 4));
        let call = |output: Region| CollectiveCall {
            reduction,
            ..CollectiveCall::of_bytes(Collective::AllReduce, [memory.as_device(), output.as_device()], 64)
        };
        let (before, mut after) = ([7; 64], [0; 64]);
        memory.write(&before);
        let mut kept = KeptInput::default();
        for (output, comes_back) in [(memory, true), (other, false), (memory.part(0, 64), true)] {
            memory.write(&before);
            kept.keep(&call(output)).unwrap();
            memory.write(&[1; 64]);
            kept.give_back();
            memory.read(&mut after);
            assert_eq!(after == before, comes_back);
        }
        let moves = CollectiveCall { reduction: None, ..call(memory) };
        assert_eq!(written(&moves).count(), 0);
        let coded = CollectiveCall { residual: Some(other.as_device()), ..call(memory) };
        assert_eq!(written(&coded).count(), 2);
    }
}
