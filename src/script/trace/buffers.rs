//! What the steps of a trace do to memory: which places exist, which hold data, and which step wrote them last.
#![forbid(unsafe_code)]

use super::{
    shortened, BadTrace, Trace, TraceBuffer, TraceOp, TracePlace, TraceStep, MAX_INSTANCES, MAX_MOVED, MAX_NAME,
};
use crate::plan::Collective;
use crate::script::xml;
use rustc_hash::FxHashMap;

/// A chunk of a rank, under the one name it has where buffers overlap.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Cell {
    pub rank: u32,
    pub buffer: TraceBuffer,
    pub index: u32,
}

/// Which step wrote each chunk last.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    writers: FxHashMap<Cell, u32>,
    /// Steps so far, in words, for messages about chunks that are out of date.
    pub nsteps: u32,
    moved: u64,
}

impl Memory {
    /// The step that wrote a chunk last.
    pub fn writer(&self, cell: &Cell) -> Option<u32> {
        self.writers.get(cell).copied()
    }

    /// Whether a chunk holds data: the caller's, or what a step has put there.
    pub fn holds(&self, trace: &Trace, cell: &Cell) -> bool {
        trace.is_given(cell) || self.writers.contains_key(cell)
    }

    /// Carries a step out.
    ///
    /// # Errors
    /// What is wrong with it: places that do not exist, hold nothing or overlap, or directives that mean nothing.
    pub fn apply(&mut self, trace: &Trace, step: TraceStep) -> Result<TraceStep, BadTrace> {
        let number = self.nsteps as usize;
        let bad = |text: String| BadTrace { step: Some(number), text: format!("{}: {text}", step.title(number)) };
        if number >= xml::MAX_STEPS {
            return Err(bad(format!("there are more than {} steps", xml::MAX_STEPS)));
        }
        self.moved += u64::from(step.count);
        if self.moved > MAX_MOVED {
            return Err(bad(format!("all steps together move more than {MAX_MOVED} chunks")));
        }
        let src = trace.cells(&step.src, step.count).map_err(bad)?;
        let dst = trace.cells(&step.dst, step.count).map_err(bad)?;
        if let (Some(one), Some(other)) = (src.first(), dst.first()) {
            let far = one.index.abs_diff(other.index);
            if one.rank == other.rank && one.buffer == other.buffer && far < step.count {
                let (src, dst) = (step.src.text(step.count), step.dst.text(step.count));
                return Err(bad(format!("{src} and {dst} overlap")));
            }
        }
        let reads = [Some((&src, &step.src)), Some((&dst, &step.dst)).filter(|_| step.op == TraceOp::Reduce)];
        for (cells, place) in reads.into_iter().flatten() {
            if let Some(at) = cells.iter().position(|cell| !self.holds(trace, cell)) {
                let place = TracePlace { index: place.index + at as u32, ..place.clone() };
                return Err(bad(format!("{} holds nothing yet", place.text(1))));
            }
        }
        if step.parallel.is_some_and(|(parts, _)| !(1..=MAX_INSTANCES).contains(&parts)) {
            return Err(bad(format!("a fragment has 1 to {MAX_INSTANCES} parts")));
        }
        if let Some(channel) = step.directives.channel.filter(|&channel| channel >= xml::MAX_CHANNELS) {
            return Err(bad(format!("channel {channel} is not in 0 to {}", xml::MAX_CHANNELS - 1)));
        }
        for cell in dst {
            self.writers.insert(cell, number as u32);
        }
        self.nsteps += 1;
        Ok(step)
    }
}

impl TraceStep {
    /// The step by its number and place, for messages.
    pub(super) fn title(&self, number: usize) -> String {
        match &self.at {
            Some(at) => format!("step {number} ({})", shortened(at)),
            None => format!("step {number}"),
        }
    }

    /// What the step does, in words.
    pub(super) fn text(&self) -> String {
        let (src, dst) = (self.src.text(self.count), self.dst.text(self.count));
        match self.op {
            TraceOp::Copy => format!("copies {src} to {dst}"),
            TraceOp::Reduce => format!("reduces {src} into {dst}"),
        }
    }
}

impl Trace {
    /// Chunks of a rank's input, or output.
    pub(super) fn chunks_of(&self, buffer: &TraceBuffer) -> Option<u32> {
        let all = self.chunks * self.blocks();
        let small = self.chunks;
        match (buffer, self.collective) {
            (TraceBuffer::Input, Collective::AllGather | Collective::Gather) => Some(small),
            (TraceBuffer::Output, Collective::ReduceScatter | Collective::Scatter) => Some(small),
            (TraceBuffer::Input | TraceBuffer::Output, _) => Some(all),
            (name, _) => self.scratch.iter().find(|(known, _)| known == name).map(|(_, chunks)| *chunks),
        }
    }

    /// The one name of a chunk where input and output overlap: a chunk of the larger buffer.
    pub(super) fn cell(&self, rank: u32, buffer: &TraceBuffer, index: u32) -> Cell {
        let own = rank * self.chunks + index;
        let (buffer, index) = match (buffer, self.collective) {
            (TraceBuffer::Scratch(_), _) => (buffer.clone(), index),
            (buffer, _) if !self.in_place => (buffer.clone(), index),
            (TraceBuffer::Input, Collective::AllGather | Collective::Gather) => (TraceBuffer::Output, own),
            (TraceBuffer::Output, Collective::ReduceScatter | Collective::Scatter) => (TraceBuffer::Input, own),
            (
                TraceBuffer::Output,
                Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::Custom,
            ) => (TraceBuffer::Input, index),
            (buffer, _) => (buffer.clone(), index),
        };
        Cell { rank, buffer, index }
    }

    /// The chunks of a place.
    pub(super) fn cells(&self, place: &TracePlace, count: u32) -> Result<Vec<Cell>, String> {
        let TracePlace { rank, buffer, index } = place;
        if *rank >= self.nranks {
            return Err(format!("there is no rank {rank} among {}", self.nranks));
        }
        if count == 0 {
            return Err("a count of 0 moves nothing".to_string());
        }
        if let TraceBuffer::Scratch(name) = buffer {
            if name.is_empty() || name.len() > MAX_NAME {
                return Err(format!("a buffer's name has 1 to {MAX_NAME} bytes"));
            }
        }
        let chunks = self.chunks_of(buffer).unwrap_or(xml::MAX_CHUNKS - 1);
        if u64::from(*index) + u64::from(count) > u64::from(chunks) {
            return Err(format!("{}, which has {chunks}", place.text(count)));
        }
        Ok((*index..index + count).map(|index| self.cell(*rank, buffer, index)).collect())
    }

    /// Whether the caller has put data there.
    fn is_given(&self, cell: &Cell) -> bool {
        match (&cell.buffer, self.collective) {
            (TraceBuffer::Input, _) => true,
            (TraceBuffer::Output, Collective::AllGather | Collective::Gather) if self.in_place => {
                cell.index / self.chunks == cell.rank
            }
            _ => false,
        }
    }

    /// Whether the caller wants what is there in the end.
    pub(super) fn is_wanted(&self, cell: &Cell) -> bool {
        match (&cell.buffer, self.collective) {
            (TraceBuffer::Scratch(_), _) => false,
            (TraceBuffer::Output, _) => true,
            (TraceBuffer::Input, Collective::ReduceScatter | Collective::Scatter) => {
                self.in_place && cell.index / self.chunks == cell.rank
            }
            (
                TraceBuffer::Input,
                Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::Custom,
            ) => self.in_place,
            (TraceBuffer::Input, _) => false,
        }
    }
}
