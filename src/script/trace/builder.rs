//! Writing a trace: chunks, and what becomes of them.
#![forbid(unsafe_code)]

use super::{BadTrace, Directives, Trace, TraceBuffer, TraceOp, TracePlace, TraceStep};
use std::panic::Location;

/// The chunks that lay at a place when it was asked for, or that a step has put there.
///
/// It can be used as long as they lie there: when a later step has written one of them, it is out of date.
#[derive(Debug, Clone)]
pub struct ChunkRef<'a> {
    trace: &'a Trace,
    place: TracePlace,
    count: u32,
    /// Steps that had been written when it was made.
    taken: u32,
    at: &'static Location<'static>,
    directives: Directives,
}

impl Trace {
    /// The chunks that lie at a place: `count` of them, from `index` of a rank's buffer on.
    ///
    /// # Errors
    /// A rank or chunk that does not exist, or holds nothing yet.
    #[track_caller]
    pub fn chunk(
        &self,
        rank: u32,
        buffer: impl Into<TraceBuffer>,
        index: u32,
        count: u32,
    ) -> Result<ChunkRef<'_>, BadTrace> {
        let at = Location::caller();
        let place = TracePlace { rank, buffer: buffer.into(), index };
        let written = self.written.borrow();
        let bad = |text: String| BadTrace::new(format!("{}: {text}", source(at)));
        let cells = self.cells(&place, count).map_err(bad)?;
        if let Some(offset) = cells.iter().position(|cell| !written.memory.holds(self, cell)) {
            let place = TracePlace { index: index + offset as u32, ..place };
            return Err(bad(format!("{} holds nothing yet", place.text(1))));
        }
        let taken = written.memory.nsteps;
        Ok(ChunkRef { trace: self, place, count, taken, at, directives: Directives::default() })
    }

    /// Divides what `fragment` writes into so many parts, which run at the same time and on channels of their own.
    ///
    /// # Errors
    /// Those of the fragment; one within another.
    pub fn parallelize<'a, T>(
        &'a self,
        parts: u32,
        fragment: impl FnOnce(&'a Trace) -> Result<T, BadTrace>,
    ) -> Result<T, BadTrace> {
        if self.fragment.get().is_some() {
            return Err(BadTrace::new("a parallelized fragment stands within another"));
        }
        let number = self.fragments.get();
        self.fragments.set(number + 1);
        self.fragment.set(Some((parts, number)));
        let result = fragment(self);
        self.fragment.set(None);
        result
    }

    /// Adds a step.
    pub(super) fn push(&self, step: TraceStep) -> Result<(), BadTrace> {
        let mut written = self.written.borrow_mut();
        let step = written.memory.apply(self, step)?;
        written.steps.push(step);
        Ok(())
    }
}

fn source(at: &Location<'_>) -> String {
    format!("{}:{}", at.file(), at.line())
}

impl<'a> ChunkRef<'a> {
    /// Whose chunks they are.
    pub fn rank(&self) -> u32 {
        self.place.rank
    }

    /// The first of them.
    pub fn index(&self) -> u32 {
        self.place.index
    }

    /// How many they are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// How the next step that is made of them is to be carried out.
    pub fn directives(&self) -> Directives {
        self.directives
    }

    /// The same chunks, of which the next step is to be carried out so.
    pub fn directed(mut self, directives: Directives) -> ChunkRef<'a> {
        self.directives = directives;
        self
    }

    /// The channel of the message that the next step makes of them.
    pub fn channel(mut self, channel: u16) -> ChunkRef<'a> {
        self.directives.channel = Some(channel);
        self
    }

    /// The thread blocks that carry the next step out: that of the sender, or the only one within a rank, and that of the
    /// receiver. The numbers are labels: steps of one label share a thread block of their rank.
    pub fn blocks(mut self, send: u32, recv: u32) -> ChunkRef<'a> {
        (self.directives.send_tb, self.directives.recv_tb) = (Some(send), Some(recv));
        self
    }

    /// `offset` to `offset + count` of them.
    ///
    /// # Errors
    /// Where there are fewer.
    #[track_caller]
    pub fn part(&self, offset: u32, count: u32) -> Result<ChunkRef<'a>, BadTrace> {
        let at = Location::caller();
        if count == 0 || u64::from(offset) + u64::from(count) > u64::from(self.count) {
            let end = u64::from(offset) + u64::from(count);
            let text = format!("{}: chunks {offset} to {end} of {}", source(at), self.count);
            return Err(BadTrace::new(text));
        }
        let place = TracePlace { index: self.place.index + offset, ..self.place.clone() };
        Ok(ChunkRef { place, count, directives: Directives::default(), ..self.clone() })
    }

    /// Copies the chunks to a place, and gives what lies there then.
    ///
    /// # Errors
    /// Chunks that are out of date, and what [`Trace`] refuses of a step.
    #[track_caller]
    pub fn copy(&self, rank: u32, buffer: impl Into<TraceBuffer>, index: u32) -> Result<ChunkRef<'a>, BadTrace> {
        let at = Location::caller();
        let dst = TracePlace { rank, buffer: buffer.into(), index };
        self.step(TraceOp::Copy, self.place.clone(), dst, self.directives, at)
    }

    /// Reduces other chunks into these, where these lie, and gives the result. The directives are these chunks'.
    ///
    /// # Errors
    /// Chunks that are out of date, other numbers of chunks, and what [`Trace`] refuses of a step.
    #[track_caller]
    pub fn reduce(&self, other: &ChunkRef<'_>) -> Result<ChunkRef<'a>, BadTrace> {
        let at = Location::caller();
        if self.count != other.count {
            let text = format!("{}: reduces {} chunks into {}", source(at), other.count, self.count);
            return Err(BadTrace::new(text));
        }
        other.is_current(TraceOp::Reduce, at)?;
        self.step(TraceOp::Reduce, other.place.clone(), self.place.clone(), self.directives, at)
    }

    fn step(
        &self,
        op: TraceOp,
        src: TracePlace,
        dst: TracePlace,
        directives: Directives,
        at: &'static Location<'static>,
    ) -> Result<ChunkRef<'a>, BadTrace> {
        self.is_current(op, at)?;
        let (trace, count, parallel) = (self.trace, self.count, self.trace.fragment.get());
        let step = TraceStep { op, src, dst: dst.clone(), count, directives, parallel, at: Some(source(at)) };
        trace.push(step)?;
        let taken = trace.written.borrow().memory.nsteps;
        Ok(ChunkRef { trace, place: dst, count, taken, at, directives: Directives::default() })
    }

    /// Refuses chunks that a step has written since they were taken.
    fn is_current(&self, op: TraceOp, at: &Location<'_>) -> Result<(), BadTrace> {
        let written = self.trace.written.borrow();
        let cells = self.trace.cells(&self.place, self.count).map_err(BadTrace::new)?;
        for (offset, cell) in (0u32..).zip(&cells) {
            let Some(writer) = written.memory.writer(cell).filter(|&writer| writer >= self.taken) else { continue };
            let place = TracePlace { index: self.place.index + offset, ..self.place.clone() };
            let step = &written.steps[writer as usize];
            let what = if op == TraceOp::Copy { "copy" } else { "reduce" };
            let text = format!(
                "{}: {what} uses {} as taken in {}, but {} has written it since: it {}",
                source(at),
                place.text(1),
                source(self.at),
                step.title(writer as usize),
                step.text()
            );
            return Err(BadTrace { step: Some(writer as usize), text });
        }
        Ok(())
    }
}
