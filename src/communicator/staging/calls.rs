//! Collectives inside the node by another provider: the vendor's rings, on a stream of ours.
//!
//! A provider wants each block contiguous and all blocks of one length, and it wants all members of a node to make their
//! calls in one order ([`sequence`](super::sequence)). Where the blocks are not so, they are brought together in device
//! memory of ours, with the longest block's length for all, and taken apart again; that is the shuffle of two-level
//! algorithms.
//!
//! The shuffle runs beside the calls of other segments where it is worth it:
//!
//! ```text
//! stream  time ->
//! pack    0  1  2  3
//! call       0  1  2  3      in one order on all members
//! unpack        0  1  2  3
//! ```
//!
//! Each stream waits for an event of the one before it, so nothing waits on the host, and short calls, for which the events
//! would cost more than they gain, have all three stages on the stream of the calls. What a stream waits for was always given
//! to the driver before the wait, so a driver may run all three through one queue.
#![forbid(unsafe_code)]

use super::kernel_queue::{KernelQueue, Work};
use super::sequence::CallSequence;
use super::slots::{Runs, Slots};
use crate::device::gpu::driver::DriverHandle;
use crate::device::gpu::kernels::Shuffle;
use crate::device::gpu::memory::DeviceBuffer;
use crate::device::gpu::GpuDevice;
use crate::dtype::{DataType, Operator};
use crate::error::{Error, Result};
use crate::exec::{Program, Token};
use crate::memory::{DeviceRegion, OnDevice};
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
        stream: DriverHandle,
    ) -> Result<()>;

    /// An error if what has been issued has not ended as it should: a stream goes on where a collective is ended, too.
    fn check(&self) -> Result<()>;

    /// Ends what has been issued; nothing can be issued any more.
    fn abort(&self);
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
    src: Blocks<OnDevice>,
    dst: Blocks<OnDevice>,
}

/// Where in [`NodeCalls::queues`] blocks are brought together, where the provider's calls go, and where blocks are taken apart.
const PACK: usize = 0;
const CALL: usize = 1;
const UNPACK: usize = 2;

/// A communicator's calls inside its node.
pub struct NodeCalls {
    provider: Arc<dyn Provider>,
    /// A stream for each stage.
    queues: [KernelQueue; 3],
    /// The stages of calls of more bytes than this run on streams of their own.
    beside_bytes: usize,
    /// Where blocks are brought together.
    room: DeviceBuffer,
    runs: Runs,
    /// The room of calls that have been issued.
    taken: HashMap<Token, (usize, usize)>,
    order: CallSequence<Waiting>,
    running: Option<(Arc<Program>, Layout)>,
}

impl fmt::Debug for NodeCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calls({} waiting)", self.order.len())
    }
}

/// The one stretch that all blocks fill one after another, each `stride` bytes long.
fn contiguous(blocks: &Blocks<OnDevice>, stride: usize) -> Option<DeviceRegion> {
    let first = blocks.block(0).first()?;
    let follows = |index: usize| match blocks.block(index) {
        [one] => one.len() == stride && one.address() == first.address() + (index * stride) as u64,
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
    fn of(blocks: &Blocks<OnDevice>) -> Option<Lattice> {
        let at = |row: usize, column: usize| Some(blocks.block(row).get(column)?.address());
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
            let right = |(column, part): (usize, &DeviceRegion)| part.len() == bytes && part.address() == place(column);
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

impl NodeCalls {
    /// Calls by a provider, with so many bytes of device memory for what must be brought together. The stages of calls of
    /// more than `beside_bytes` run beside those of others.
    pub fn new(
        gpu: &Arc<GpuDevice>,
        provider: Arc<dyn Provider>,
        room_bytes: usize,
        beside_bytes: usize,
    ) -> Result<NodeCalls> {
        let runs = Runs::new(room_bytes);
        Ok(NodeCalls {
            provider,
            queues: [KernelQueue::new(gpu)?, KernelQueue::new(gpu)?, KernelQueue::new(gpu)?],
            beside_bytes,
            room: DeviceBuffer::new(gpu, runs.bytes())?,
            runs,
            taken: HashMap::new(),
            order: CallSequence::new(),
            running: None,
        })
    }

    /// A run of a program begins.
    pub fn begin(&mut self, program: &Arc<Program>, layout: &Layout, window: usize) -> Result<()> {
        self.order.begin(program.calls()?, layout.segments(), window);
        self.running = Some((program.clone(), layout.clone()));
        Ok(())
    }

    /// Whether there is work that has not ended.
    pub fn is_busy(&self) -> bool {
        self.queues.iter().any(KernelQueue::is_busy)
    }

    /// Takes a call that the plan has begun.
    pub fn take(&mut self, token: Token, me: usize, call: NodeCall<'_, OnDevice>) -> Result<()> {
        if !matches!(call.collective, Collective::AllGather | Collective::ReduceScatter | Collective::AllReduce) {
            return Err(Error::Internal(format!("a {} inside a node that no provider does", call.collective.name())));
        }
        let (how, divisor) = match call.combine {
            Some(combine) => ((combine.dtype, Some(combine.operator)), combine.divisor),
            None => ((DataType::I8, None), 1),
        };
        let (src, dst) = (call.src.clone(), call.dst.clone());
        // A token's lower half is its step.
        self.order.put(token as u32, Waiting { token, collective: call.collective, how, divisor, me, src, dst });
        Ok(())
    }

    /// Issues the calls whose turn it is, and collects those that have ended. The device must be current.
    pub fn turn(&mut self, slots: &mut Slots, done: &mut Vec<Token>) -> Result<()> {
        loop {
            let running = self.running.as_ref();
            let is_empty = |step: u32, segment: usize| {
                running.is_some_and(|(program, layout)| program.is_empty_call(step, layout, segment))
            };
            let Some(call) = self.order.next(is_empty) else { break };
            if let Some(call) = self.issue(call)? {
                // There is no room: others must end first, and they need nothing that comes later.
                self.order.put_back(call);
                break;
            }
            self.order.advance();
        }
        let before = done.len();
        self.queues.iter_mut().try_for_each(|queue| queue.turn(slots, done))?;
        if done.len() > before {
            self.provider.check()?;
        }
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
        let is_beside = stride * parts.len() > self.beside_bytes;
        let [pack, unpack] = if is_beside { [PACK, UNPACK] } else { [CALL, CALL] };
        // Where blocks differ in size each rank has places of its own for them, and all must ask for blocks of one length.
        let is_even = self.running.as_ref().is_none_or(|(_, layout)| !layout.is_vectored());
        let lie = |blocks: &Blocks<OnDevice>| contiguous(blocks, stride).filter(|_| is_even);
        let (send, recv) = (lie(&call.src), lie(&call.dst));
        let mut last = CALL;
        if let (Some(send), Some(recv)) = (send, recv) {
            self.ask(&call, [send, recv], stride)?;
        } else {
            let stride = stride.next_multiple_of(16);
            let bytes = stride * parts.len();
            let Some(start) = self.runs.take(bytes) else {
                return match self.taken.is_empty() {
                    true => Err(Error::Internal(format!("a {} inside a node is too long", call.collective.name()))),
                    false => Ok(Some(call)),
                };
            };
            self.taken.insert(call.token, (start, bytes));
            let all = self.room.region().part(start, bytes);
            let mine = all.part(if parts.len() > 1 { call.me * stride } else { 0 }, stride);
            let (send, recv) = match call.collective {
                Collective::AllGather => (mine, all),
                Collective::ReduceScatter => (all, mine),
                _ => (all, all),
            };
            bring(&mut self.queues[pack], &call.src, send, stride)?;
            self.follow(CALL, pack)?;
            self.ask(&call, [send, recv], stride)?;
            self.follow(unpack, CALL)?;
            spread(&mut self.queues[unpack], recv, stride, &call.dst)?;
            last = unpack;
        }
        if call.divisor != 1 {
            self.follow(unpack, last)?;
            divide(&mut self.queues[unpack], &call)?;
            last = unpack;
        }
        self.queues[last].end(Some(call.token), None);
        if is_beside {
            // What comes behind on the stream does not hold up its end.
            self.queues[last].mark()?;
        }
        Ok(None)
    }

    /// Has the provider make a call of blocks of so many bytes.
    fn ask(&mut self, call: &Waiting, buffers: [DeviceRegion; 2], block_bytes: usize) -> Result<()> {
        let queue = &mut self.queues[CALL];
        let buffers = buffers.map(|region| region.address());
        let count = block_bytes / call.how.0.size();
        let issued = self.provider.issue(call.collective, buffers, count, call.how, queue.stream());
        queue.end(None, None);
        issued
    }

    /// What a queue is given from now on comes after what another one, or it itself, has been given.
    fn follow(&mut self, queue: usize, other: usize) -> Result<()> {
        match self.queues.get_disjoint_mut([queue, other]) {
            Ok([queue, other]) => queue.follow(other),
            Err(_) => self.queues[queue].launch(),
        }
    }

    /// The same memory and streams for another provider.
    pub fn by(self, provider: Arc<dyn Provider>) -> NodeCalls {
        NodeCalls { provider, ..self }
    }

    /// Ends the provider. Nothing may be under way.
    pub fn retire(&self) {
        self.provider.abort();
    }

    /// Forgets everything; where something has been issued, its provider ends.
    pub fn cancel(&mut self, slots: &mut Slots) {
        if !self.taken.is_empty() || self.is_busy() || self.order.len() > 0 {
            self.provider.abort();
        }
        self.queues.iter_mut().for_each(|queue| queue.cancel(slots));
        self.order.clear();
        self.taken.drain().for_each(|(_, (start, bytes))| self.runs.put(start, bytes));
        debug_assert!(self.runs.is_whole());
    }
}

/// Brings blocks together, each at a multiple of `stride`.
fn bring(queue: &mut KernelQueue, blocks: &Blocks<OnDevice>, to: DeviceRegion, stride: usize) -> Result<()> {
    if let Some(Lattice { first, bytes, rows, columns, row_bytes, column_bytes }) = Lattice::of(blocks) {
        return queue.shuffle(&Shuffle {
            src: first,
            dst: to.address(),
            block_bytes: bytes,
            rows,
            columns,
            src_row_bytes: row_bytes,
            src_column_bytes: column_bytes,
            dst_row_bytes: stride as u64,
            dst_column_bytes: bytes,
        });
    }
    each(blocks, to, stride, |part, place| queue.add(Work::Copy, part.len(), place, &[part.address()]))
}

/// Takes blocks apart again.
fn spread(queue: &mut KernelQueue, from: DeviceRegion, stride: usize, blocks: &Blocks<OnDevice>) -> Result<()> {
    if let Some(Lattice { first, bytes, rows, columns, row_bytes, column_bytes }) = Lattice::of(blocks) {
        return queue.shuffle(&Shuffle {
            src: from.address(),
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
    each(blocks, from, stride, |part, place| queue.add(Work::Copy, part.len(), part.address(), &[place]))
}

/// Every part of some blocks, with its place where they lie together.
fn each(
    blocks: &Blocks<OnDevice>,
    together: DeviceRegion,
    stride: usize,
    mut act: impl FnMut(&DeviceRegion, u64) -> Result<()>,
) -> Result<()> {
    for index in 0..blocks.len() {
        let mut at = index * stride;
        for part in blocks.block(index) {
            act(part, together.address() + at as u64)?;
            at += part.len();
        }
    }
    Ok(())
}

/// Applies the epilogue to results.
fn divide(queue: &mut KernelQueue, call: &Waiting) -> Result<()> {
    let work = Work::Divide { dtype: call.how.0, divisor: call.divisor };
    call.dst.regions().iter().try_for_each(|region| {
        let place = region.address();
        queue.add(work, region.len(), place, &[place])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;

    fn blocks(
        all: DeviceRegion,
        rows: usize,
        columns: usize,
        place: impl Fn(usize, usize) -> usize,
    ) -> Blocks<OnDevice> {
        let mut blocks = Blocks::default();
        for row in 0..rows {
            blocks.push((0..columns).map(|column| all.part(place(row, column), 64)));
        }
        blocks
    }

    #[test]
    fn parts_at_even_distances_are_a_lattice_and_others_are_not() {
        let all = Arena::new(2 << 20).leak().as_device();
        let transposed = blocks(all, 8, 100, |row, column| 4096 + column * 8 * 64 + row * 64);
        let found = Lattice::of(&transposed).unwrap();
        assert_eq!((found.bytes, found.rows, found.columns), (64, 8, 100));
        assert_eq!(found.first, all.address() + 4096);
        assert_eq!((found.row_bytes, found.column_bytes), (64, 512));
        let descending = blocks(all, 2, 100, |row, column| (1 << 20) - column * 64 - row * 8192);
        assert_eq!(Lattice::of(&descending).unwrap().column_bytes, 0u64.wrapping_sub(64));
        let crooked =
            blocks(all, 8, 100, |row, column| 4096 + column * 512 + row * 64 + usize::from(row + column == 100));
        assert_eq!(Lattice::of(&crooked), None);
        assert_eq!(Lattice::of(&blocks(all, 1, 1, |_, _| 0)), None, "a copy");
    }
}
