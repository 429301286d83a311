//! The round of counts before an all-to-all in two steps whose blocks differ in size: the ranks tell each other, in two steps, how long the
//! blocks are. So a rank knows what it hands on, and whether it gets what it expects: of a message with the blocks of a node only their
//! sum would show. Counts are in host memory, wherever the data is.
#![forbid(unsafe_code)]

use super::{explain, Engine, Running};
use crate::algorithms::two_step;
use crate::communicator::device::Device;
use crate::communicator::independent::IndependentMessages;
use crate::communicator::joined::CallStage;
use crate::communicator::live::{Buffers, LiveWorld};
use crate::communicator::CollectiveCall;
use crate::dtype::DataType;
use crate::error::{counted, Error, Result};
use crate::exec::{Execution, Progress};
use crate::memory::DeviceRegion;
use crate::plan::layout::Layout;
use crate::plan::{Buffer, Span};
use crate::topo::Rank;
use std::sync::Arc;

/// Bytes of a count.
const COUNT_BYTES: usize = size_of::<u64>();

/// A round of counts; kept from call to call.
#[derive(Debug, Default)]
pub(super) struct CountRound {
    execution: Execution,
    /// How much this rank has for each rank, and each rank for this one.
    counts: Option<[DeviceRegion; 2]>,
}

impl CountRound {
    /// The ranks whose counts are missing.
    pub(super) fn waiting_for(&self) -> Vec<Rank> {
        self.execution.waiting_for()
    }
}

impl Engine {
    /// Whether ranks hand on blocks of others in a call, of which each rank knows its own only.
    pub(super) fn hands_on(&self, call: &CollectiveCall, index: usize) -> bool {
        call.has_own_sizes() && self.recent[index].program.plan().algorithm == two_step::TWO_STEP.name
    }

    /// Where the counts of a call that is in `recent` lie.
    fn layout_of_counts(&self, index: usize) -> Layout {
        self.recent[index].program.layout(1, COUNT_BYTES, usize::MAX)
    }

    /// Begins the round of counts before a call that is in `recent`.
    #[inline(never)]
    pub(super) fn begin_counts(&mut self, call: &CollectiveCall, index: usize) -> Result<()> {
        let (layout, bytes) = (self.layout_of_counts(index), COUNT_BYTES * self.grid.nranks());
        let scratch = self.host.scratch(layout.scratch_bytes() + 2 * bytes)?;
        let counts = [0, bytes].map(|at| scratch.part(layout.scratch_bytes() + at, bytes));
        let blocks = call.blocks.iter().flat_map(|blocks| blocks.input());
        let said: Vec<u8> = blocks.flat_map(|block| (block.count as u64).to_ne_bytes()).collect();
        self.host.write(counts[0], &said);
        self.counting.counts = Some(counts);
        let (program, limit_ns) = (self.recent[index].program.clone(), self.limit_ns());
        self.counting.execution.begin(program, layout, 1, limit_ns);
        let (packed, stage, front, epochs) = (None, CallStage::Counts, None, None);
        let call = call.clone();
        self.running = Some(Running { call, scratch, packed, stage, ready: index, front, on_host: true, epochs });
        Ok(())
    }

    /// Makes progress with the round; behind it the call begins.
    #[inline(never)]
    pub(super) fn poll_counts(&mut self) -> Result<Progress> {
        let (Some(running), Some(counts)) = (&self.running, self.counting.counts) else {
            return Err(Error::Internal("no round of counts is running".to_string()));
        };
        let mut world = LiveWorld {
            device: &mut self.host,
            transport: &mut self.transport,
            buffers: Buffers::of(&running.call, running.scratch, Some(counts)),
            rank: self.rank,
            dtype: DataType::U64,
            reduction: None,
            residual: None,
            sequence: self.sequence,
            signature: self.recent[running.ready].signature,
            provider: None,
            uneven: false,
            independent: self.independent.as_mut(),
            lists: &mut self.lists,
            front: None,
        };
        let outcome = self.counting.execution.poll(&mut world);
        let beside = || self.independent.as_ref().is_some_and(IndependentMessages::are_open);
        let progress =
            outcome.map_err(|error| explain(error, &running.call, (self.sequence, self.own_sizes), beside()))?;
        if progress == Progress::Done {
            self.run_with_counts(counts[1])?;
            return Ok(Progress::Moved);
        }
        Ok(progress)
    }

    /// The counts are there: has the call run.
    fn run_with_counts(&mut self, told: DeviceRegion) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        self.compare_counts(&running.call, told)?;
        let layout = self.layout_of_counts(running.ready);
        let nslots = self.recent[running.ready].program.plan().chunks(Buffer::Scratch);
        let (mut counts, mut place) = (Vec::with_capacity(nslots), Vec::new());
        for slot in 0..nslots {
            place.clear();
            layout.pieces(0, 0, &Span::scratch(slot, 1, 0), &mut place);
            let at = place.first().map_or(0, |piece| piece.offset);
            counts.push(self.count_at(running.scratch.part(at, COUNT_BYTES))?);
        }
        let ready = &mut self.recent[running.ready];
        if let Some(blocks) = &running.call.blocks {
            let blocks = Arc::new(blocks.handing(counts));
            ready.layout = ready.program.layout_of(blocks, running.call.dtype.size(), ready.segment_bytes);
        }
        self.run(&running.call, running.ready)?;
        self.running.iter_mut().for_each(|begun| begun.front = running.front.clone());
        Ok(())
    }

    /// An error where a rank has other than this one expects of it.
    fn compare_counts(&mut self, call: &CollectiveCall, told: DeviceRegion) -> Result<()> {
        let Some(blocks) = &call.blocks else { return Ok(()) };
        for (rank, expected) in blocks.output().iter().map(|block| block.count).enumerate() {
            let count = self.count_at(told.part(rank * COUNT_BYTES, COUNT_BYTES))?;
            if count != expected {
                let (sequence, dtype, me) = (self.sequence, call.dtype.name(), self.rank);
                return Err(Error::InvalidUsage(format!(
                    "operation {sequence} is not the same on all ranks, {} of blocks of different sizes of {dtype}: rank {rank} has \
                     {} for rank {me}, which expects {expected} of it",
                    call.collective.name(),
                    counted(count, "element")
                )));
            }
        }
        Ok(())
    }

    fn count_at(&mut self, place: DeviceRegion) -> Result<usize> {
        let mut count = [0; COUNT_BYTES];
        self.host.read(place, &mut count)?;
        Ok(u64::from_ne_bytes(count) as usize)
    }
}
