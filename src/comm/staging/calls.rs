//! Collectives inside the node by another provider: the vendor's rings, on a stream of ours.
//!
//! A provider wants each block contiguous and all blocks of one length, and it wants all members of a node to make their
//! calls in one order. Where the blocks are not so, they are brought together in device memory of ours, with the longest
//! block's length for all, and taken apart again; that is the shuffle of two-level algorithms.
//!
//! The order: with several segments in flight, which of a plan's calls comes next depends on when messages arrive, and that
//! differs from rank to rank. So calls are issued in an order that follows from the plan and the number of segments alone:
//! those of later phases lag behind those of the first by as many segments as the window has room for.
#![forbid(unsafe_code)]

use super::desk::{Desk, Work};
use super::slots::{Runs, Slots};
use crate::device::gpu::driver::Handle;
use crate::device::gpu::kernels::Shuffle;
use crate::device::gpu::memory::Memory;
use crate::device::gpu::Gpu;
use crate::dtype::{DataType, Operator};
use crate::error::{Error, Result};
use crate::exec::{Program, Token};
use crate::memory::Region;
use crate::plan::layout::Layout;
use crate::plan::Collective;
use crate::transport::{Blocks, NodeCall};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Who does collectives among the ranks of a node.
pub trait Provider: Send + Sync {
    /// Gives one collective to a stream: all-gather, reduce-scatter or all-reduce of `count` elements a block.
    fn issue(
        &self,
        collective: Collective,
        buffers: [u64; 2],
        count: usize,
        how: (DataType, Option<Operator>),
        stream: Handle,
    ) -> Result<()>;

    /// Ends what has been issued; nothing can be issued any more.
    fn abort(&self);
}

/// The order of the calls of one run.
#[derive(Debug, Default)]
struct Sequence {
    /// Steps with the phase that each belongs to, phase by phase.
    calls: Vec<(u32, u32)>,
    segments: usize,
    /// How many segments a phase lags behind the one before.
    lag: usize,
    /// Where we are: a time, and the place in `calls`.
    time: usize,
    place: usize,
}

impl Sequence {
    fn new(mut calls: Vec<(u32, u32)>, segments: usize, window: usize) -> Sequence {
        calls.sort_by_key(|&(step, phase)| (phase, step));
        let last = calls.last().map_or(0, |&(_, phase)| phase as usize);
        // The last phase of a segment must come before the first of the one that takes its place in the window.
        let lag = (window.min(segments) - 1).checked_div(last).unwrap_or(0);
        Sequence { calls, segments, lag, time: 0, place: 0 }
    }

    /// The step and the segment that come next.
    fn next(&mut self) -> Option<(u32, usize)> {
        let end = self.segments + self.calls.last().map_or(0, |&(_, phase)| phase as usize * self.lag);
        while self.time < end {
            while let Some(&(step, phase)) = self.calls.get(self.place) {
                let segment = self.time.checked_sub(phase as usize * self.lag);
                match segment.filter(|&segment| segment < self.segments) {
                    Some(segment) => return Some((step, segment)),
                    None => self.place += 1,
                }
            }
            (self.time, self.place) = (self.time + 1, 0);
        }
        None
    }

    fn advance(&mut self) {
        self.place += 1;
    }
}

/// A call that a plan has begun.
#[derive(Debug)]
struct Waiting {
    token: Token,
    collective: Collective,
    how: (DataType, Option<Operator>),
    divisor: u64,
    /// This rank's place among the members.
    me: usize,
    src: Blocks,
    dst: Blocks,
}

/// A communicator's calls inside its node.
pub struct Calls {
    provider: Arc<dyn Provider>,
    desk: Desk,
    /// Where blocks are brought together.
    room: Memory,
    runs: Runs,
    /// The room of calls that have been issued.
    taken: HashMap<Token, (usize, usize)>,
    sequence: Sequence,
    /// How often each step has been begun in this run.
    begun: HashMap<u32, usize>,
    waiting: HashMap<(u32, usize), Waiting>,
    running: Option<(Arc<Program>, Layout)>,
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calls({} waiting)", self.waiting.len())
    }
}

/// The one stretch that all blocks fill one after another, each `stride` bytes long.
fn contiguous(blocks: &Blocks, stride: usize) -> Option<Region> {
    let first = blocks.block(0).first()?;
    let follows = |index: usize| match blocks.block(index) {
        [one] => one.len() == stride && one.as_ptr() as usize == first.as_ptr() as usize + index * stride,
        _ => false,
    };
    (0..blocks.len()).all(follows).then_some(*first)
}

/// Blocks whose parts are all of one length and lie at even distances: one launch permutes them, however many they are.
#[derive(Debug, PartialEq, Eq)]
struct Lattice {
    first: u64,
    bytes: u64,
    /// Blocks, and the distance of one from the next.
    rows: u64,
    row_bytes: u64,
    /// Parts of a block, and their distance.
    columns: u64,
    column_bytes: u64,
}

impl Lattice {
    fn of(blocks: &Blocks) -> Option<Lattice> {
        let at = |row: usize, column: usize| Some(blocks.block(row).get(column)?.as_ptr() as u64);
        let (rows, columns) = (blocks.len(), blocks.block(0).len());
        let (first, bytes) = (at(0, 0)?, blocks.block(0).first()?.len());
        // Descending distances wrap around, as the kernel's arithmetic does.
        let row_bytes = if rows > 1 { at(1, 0)?.wrapping_sub(first) } else { 0 };
        let column_bytes = if columns > 1 { at(0, 1)?.wrapping_sub(first) } else { 0 };
        let fits = |row: usize| {
            let parts = blocks.block(row);
            let place = |column: usize| {
                first
                    .wrapping_add(row_bytes.wrapping_mul(row as u64))
                    .wrapping_add(column_bytes.wrapping_mul(column as u64))
            };
            let right = |(column, part): (usize, &Region)| part.len() == bytes && part.as_ptr() as u64 == place(column);
            parts.len() == columns && parts.iter().enumerate().all(right)
        };
        (rows * columns > 1 && (0..rows).all(fits)).then_some(Lattice {
            first,
            bytes: bytes as u64,
            rows: rows as u64,
            row_bytes,
            columns: columns as u64,
            column_bytes,
        })
    }
}

impl Calls {
    /// Calls by a provider, with so many bytes of device memory for what must be brought together.
    pub fn new(gpu: &Arc<Gpu>, provider: Arc<dyn Provider>, room_bytes: usize) -> Result<Calls> {
        let runs = Runs::new(room_bytes);
        Ok(Calls {
            provider,
            desk: Desk::new(gpu)?,
            room: Memory::new(gpu, runs.bytes())?,
            runs,
            taken: HashMap::new(),
            sequence: Sequence::default(),
            begun: HashMap::new(),
            waiting: HashMap::new(),
            running: None,
        })
    }

    /// A run of a program begins.
    pub fn begin(&mut self, program: &Arc<Program>, layout: &Layout, window: usize) -> Result<()> {
        self.sequence = Sequence::new(program.calls()?, layout.segments(), window);
        self.begun.clear();
        self.running = Some((program.clone(), *layout));
        Ok(())
    }

    /// Whether there is work that has not ended.
    pub fn is_busy(&self) -> bool {
        self.desk.is_busy()
    }

    /// Takes a call that the plan has begun.
    pub fn take(&mut self, token: Token, me: usize, call: NodeCall<'_>) -> Result<()> {
        let internal = |what: &str| Error::Internal(format!("a {} inside a node {what}", call.collective.name()));
        if !matches!(call.collective, Collective::AllGather | Collective::ReduceScatter | Collective::AllReduce) {
            return Err(internal("that no provider does"));
        }
        let step = token as u32;
        let begun = self.begun.entry(step).or_default();
        let segment = *begun;
        *begun += 1;
        let (how, divisor) = match call.combine {
            Some(combine) => ((combine.dtype, Some(combine.operator)), combine.divisor),
            None => ((DataType::I8, None), 1),
        };
        let (src, dst) = (call.src.clone(), call.dst.clone());
        let waiting = Waiting { token, collective: call.collective, how, divisor, me, src, dst };
        match self.waiting.insert((step, segment), waiting) {
            None => Ok(()),
            Some(_) => Err(internal("begun twice")),
        }
    }

    /// Issues the calls whose turn it is, and collects those that have ended. The device must be current.
    pub fn turn(&mut self, slots: &mut Slots, done: &mut Vec<Token>) -> Result<()> {
        while let Some((step, segment)) = self.sequence.next() {
            if let Some(waiting) = self.waiting.remove(&(step, segment)) {
                if let Some(waiting) = self.issue(waiting)? {
                    // There is no room: others must end first, and they need nothing that comes later.
                    self.waiting.insert((step, segment), waiting);
                    break;
                }
            } else if !self
                .running
                .as_ref()
                .is_some_and(|(program, layout)| program.is_empty_call(step, layout, segment))
            {
                break;
            }
            self.sequence.advance();
        }
        let before = done.len();
        self.desk.turn(slots, done)?;
        for token in &done[before..] {
            if let Some((start, bytes)) = self.taken.remove(token) {
                self.runs.put(start, bytes);
            }
        }
        Ok(())
    }

    /// Issues a call; gives it back where there is no room for it now.
    fn issue(&mut self, call: Waiting) -> Result<Option<Waiting>> {
        let parts = match call.collective {
            Collective::ReduceScatter => &call.src,
            _ => &call.dst,
        };
        let stride = (0..parts.len()).map(|index| parts.block_bytes(index)).max().unwrap_or(0);
        let element = call.how.0.size();
        let (send, recv) = (contiguous(&call.src, stride), contiguous(&call.dst, stride));
        if let (Some(send), Some(recv)) = (send, recv) {
            let buffers = [send, recv].map(|region| region.as_ptr() as u64);
            self.provider.issue(call.collective, buffers, stride / element, call.how, self.desk.stream())?;
            self.finish(&call, &call.dst)?;
            self.desk.end(Some(call.token), None);
            return Ok(None);
        }
        let stride = stride.next_multiple_of(16);
        let Some(start) = self.runs.take(stride * parts.len()) else {
            return match self.taken.is_empty() {
                true => Err(Error::Internal(format!("a {} inside a node is too long", call.collective.name()))),
                false => Ok(Some(call)),
            };
        };
        self.taken.insert(call.token, (start, stride * parts.len()));
        let all = self.room.region().part(start, stride * parts.len());
        let mine = all.part(if parts.len() > 1 { call.me * stride } else { 0 }, stride);
        match call.collective {
            Collective::ReduceScatter => self.bring(&call.src, all, stride)?,
            _ => self.bring(&call.src, mine, stride)?,
        }
        let (send, recv) = match call.collective {
            Collective::AllGather => (mine, all),
            Collective::ReduceScatter => (all, mine),
            _ => (all, all),
        };
        self.desk.launch()?;
        let buffers = [send, recv].map(|region| region.as_ptr() as u64);
        self.provider.issue(call.collective, buffers, stride / element, call.how, self.desk.stream())?;
        self.spread(recv, stride, &call.dst)?;
        self.finish(&call, &call.dst)?;
        self.desk.end(Some(call.token), None);
        Ok(None)
    }

    /// Brings blocks together, each at a multiple of `stride`.
    fn bring(&mut self, blocks: &Blocks, to: Region, stride: usize) -> Result<()> {
        if let Some(Lattice { first, bytes, rows, columns, row_bytes, column_bytes }) = Lattice::of(blocks) {
            return self.desk.shuffle(&Shuffle {
                src: first,
                dst: to.as_ptr() as u64,
                block_bytes: bytes,
                rows,
                columns,
                src_row_bytes: row_bytes,
                src_column_bytes: column_bytes,
                dst_row_bytes: stride as u64,
                dst_column_bytes: bytes,
            });
        }
        self.each(blocks, to, stride, |desk, part, place| {
            desk.add(Work::Copy, part.len(), place, &[part.as_ptr() as u64])
        })
    }

    /// Takes blocks apart again.
    fn spread(&mut self, from: Region, stride: usize, blocks: &Blocks) -> Result<()> {
        if let Some(Lattice { first, bytes, rows, columns, row_bytes, column_bytes }) = Lattice::of(blocks) {
            return self.desk.shuffle(&Shuffle {
                src: from.as_ptr() as u64,
                dst: first,
                block_bytes: bytes,
                rows,
                columns,
                src_row_bytes: stride as u64,
                src_column_bytes: bytes,
                dst_row_bytes: row_bytes,
                dst_column_bytes: column_bytes,
            });
        }
        self.each(blocks, from, stride, |desk, part, place| {
            desk.add(Work::Copy, part.len(), part.as_ptr() as u64, &[place])
        })
    }

    fn each(
        &mut self,
        blocks: &Blocks,
        together: Region,
        stride: usize,
        mut act: impl FnMut(&mut Desk, &Region, u64) -> Result<()>,
    ) -> Result<()> {
        for index in 0..blocks.len() {
            let mut at = index * stride;
            for part in blocks.block(index) {
                act(&mut self.desk, part, together.as_ptr() as u64 + at as u64)?;
                at += part.len();
            }
        }
        Ok(())
    }

    /// Applies the epilogue to results.
    fn finish(&mut self, call: &Waiting, dst: &Blocks) -> Result<()> {
        if call.divisor == 1 {
            return Ok(());
        }
        let work = Work::Divide { dtype: call.how.0, divisor: call.divisor };
        let regions = dst.regions().iter().map(|region| (region.len(), region.as_ptr() as u64));
        self.desk.launch()?;
        for (bytes, place) in regions {
            self.desk.add(work, bytes, place, &[place])?;
        }
        Ok(())
    }

    /// Forgets everything; where something has been issued, its provider ends.
    pub fn cancel(&mut self, slots: &mut Slots) {
        if !self.taken.is_empty() || self.desk.is_busy() || !self.waiting.is_empty() {
            self.provider.abort();
        }
        self.desk.cancel(slots);
        self.waiting.clear();
        self.taken.drain().for_each(|(_, (start, bytes))| self.runs.put(start, bytes));
        self.sequence = Sequence::default();
        debug_assert!(self.runs.is_whole());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;

    fn blocks(all: Region, rows: usize, columns: usize, place: impl Fn(usize, usize) -> usize) -> Blocks {
        let mut blocks = Blocks::default();
        for row in 0..rows {
            blocks.push((0..columns).map(|column| all.part(place(row, column), 64)));
        }
        blocks
    }

    #[test]
    fn parts_at_even_distances_are_a_lattice_and_others_are_not() {
        let mut arena = Arena::new(2 << 20);
        let all = arena.region();
        let transposed = blocks(all, 8, 100, |row, column| 4096 + column * 8 * 64 + row * 64);
        let found = Lattice::of(&transposed).unwrap();
        assert_eq!((found.bytes, found.rows, found.columns), (64, 8, 100));
        assert_eq!(found.first, all.as_ptr() as u64 + 4096);
        assert_eq!((found.row_bytes, found.column_bytes), (64, 512));
        let descending = blocks(all, 2, 100, |row, column| (1 << 20) - column * 64 - row * 8192);
        assert_eq!(Lattice::of(&descending).unwrap().column_bytes, 0u64.wrapping_sub(64));
        let crooked =
            blocks(all, 8, 100, |row, column| 4096 + column * 512 + row * 64 + usize::from(row + column == 100));
        assert_eq!(Lattice::of(&crooked), None);
        assert_eq!(Lattice::of(&blocks(all, 1, 1, |_, _| 0)), None, "a copy");
    }

    fn order(calls: &[(u32, u32)], segments: usize, window: usize) -> Vec<(u32, usize)> {
        let mut sequence = Sequence::new(calls.to_vec(), segments, window);
        let mut order = Vec::new();
        while let Some(next) = sequence.next() {
            order.push(next);
            sequence.advance();
        }
        order
    }

    #[test]
    fn later_phases_lag_behind_and_every_call_comes_once() {
        assert_eq!(order(&[(5, 1), (2, 0)], 3, 1), [(2, 0), (5, 0), (2, 1), (5, 1), (2, 2), (5, 2)]);
        assert_eq!(order(&[(2, 0), (5, 1)], 4, 3), [(2, 0), (2, 1), (2, 2), (5, 0), (2, 3), (5, 1), (5, 2), (5, 3)]);
        assert_eq!(order(&[(1, 0), (3, 0)], 2, 4), [(1, 0), (3, 0), (1, 1), (3, 1)]);
        assert_eq!(order(&[], 3, 4), []);
    }

    /// A segment may begin only when the one whose place in the window it takes has ended.
    #[test]
    fn the_order_never_wants_a_segment_that_the_window_has_no_room_for() {
        for phases in 1..5 {
            for window in 1..7 {
                let calls: Vec<(u32, u32)> = (0..phases).map(|phase| (phase, phase)).collect();
                let order = order(&calls, 10, window);
                assert_eq!(order.len(), phases as usize * 10);
                let at = |call: (u32, usize)| order.iter().position(|&other| other == call).unwrap();
                for segment in window..10 {
                    assert!(at((phases - 1, segment - window)) < at((0, segment)), "{phases} {window} {segment}");
                }
            }
        }
    }
}
