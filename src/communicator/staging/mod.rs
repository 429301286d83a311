//! Messages between devices through host memory, and the local half of a plan on a device.
//!
//! What is sent is copied from the device into a slot of host memory and goes out from there; what arrives in a slot is
//! copied to the device, or combined there with what it has: kernels read pinned memory themselves. Each direction has a
//! stream of its own, and local steps have a third, so that the copies of one segment overlap with the messages and the
//! reductions of others. All jobs that one poll finds ready go out in one launch for each stream and kernel.
//!
//! A step is over when the event behind its work has ended, which a poll sees.
mod calls;
mod kernel_queue;
mod provided;
mod sequence;
mod slots;

pub use calls::Provider;

use super::device::{CodedResult, Coding, Device, Scaling};
use crate::device::gpu::kernels::{Batch, Kernel};
use crate::device::gpu::memory::DeviceBuffer;
use crate::device::gpu::stream::GpuStream;
use crate::device::gpu::GpuDevice;
use crate::device::host::Combine;
use crate::dtype::{DataType, Operator};
use crate::error::{Error, Result};
use crate::exec::{Program, Started, Token};
use crate::memory::{DeviceRegion, OnDevice};
use crate::plan::layout::Layout;
use crate::plan::{Channel, OperandOrder};
use crate::selection::MOST_FOLDED_ON_DEVICES;
use crate::topo::Rank;
use crate::transport::provider::Provision;
use crate::transport::{Envelope, NodeCall, Router, Sink, Transport};
use calls::NodeCalls;
use kernel_queue::{KernelQueue, Work};
use provided::ProvidedCall;
use slots::{MessageSlot, Slots};
use smallvec::{smallvec, SmallVec};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Up to so many pieces of a message are copied by the device's copy engine, one by one; more by one kernel.
const COPIES_BY_ENGINE: usize = 4;

type Regions = SmallVec<[DeviceRegion; 2]>;

/// A message on its way from the device to a slot.
#[derive(Debug)]
struct Leaving {
    /// Its number on the stream out.
    number: u64,
    token: Token,
    to: Rank,
    envelope: Envelope,
    slot: MessageSlot,
}

/// A message that the transport will put into a slot.
#[derive(Debug)]
struct Arriving {
    slot: MessageSlot,
    dst: Regions,
    /// How it is combined with what the device has; stored without.
    combine: Option<(Combine, Regions)>,
    /// Bytes of a message in ordinary memory that have been combined already.
    combined: usize,
}

/// What a communicator needs to work on a device.
#[derive(Debug)]
pub struct Staging {
    gpu: Arc<GpuDevice>,
    out: GpuStream,
    /// Copies of what has arrived, and reductions with it.
    into: KernelQueue,
    /// Steps that move nothing between ranks.
    local: KernelQueue,
    /// Collectives inside the node that another provider does.
    calls: Option<NodeCalls>,
    /// Those of a provider that has ended, which keep their memory and streams for the next one: freeing them waits for all streams of the
    /// device.
    retired: Option<NodeCalls>,
    slots: Slots,
    leaving: VecDeque<Leaving>,
    /// Slots of messages that the transport is sending.
    sending: HashMap<Token, MessageSlot>,
    arriving: HashMap<Token, Arriving>,
    /// Messages that are longer than this, in one piece, go from and to device memory without slots of the host.
    direct_above: Option<usize>,
    /// Messages in ordinary memory that a kernel must read: they go through the bounce slot, piece by piece.
    ashore: VecDeque<(Token, Arriving)>,
    /// The call of all ranks that a provider does.
    provided: Option<Box<ProvidedCall>>,
    arrived: Vec<Token>,
    /// Goes last: work of the streams above may use it.
    scratch: DeviceScratch,
}

impl Staging {
    /// Streams, and so many bytes of pinned memory and of scratch memory on the device.
    pub fn new(gpu: &Arc<GpuDevice>, pinned_bytes: usize, scratch_bytes: usize) -> Result<Staging> {
        Ok(Staging {
            gpu: gpu.clone(),
            scratch: DeviceScratch::new(gpu, scratch_bytes)?,
            out: GpuStream::new(gpu)?,
            into: KernelQueue::new(gpu)?,
            local: KernelQueue::new(gpu)?,
            calls: None,
            retired: None,
            slots: Slots::new(gpu, pinned_bytes)?,
            leaving: VecDeque::new(),
            sending: HashMap::new(),
            arriving: HashMap::new(),
            direct_above: None,
            ashore: VecDeque::new(),
            provided: None,
            arrived: Vec::new(),
        })
    }

    /// Gives the network addresses on the device of messages that are longer than so many bytes.
    pub fn give_addresses(&mut self, above_bytes: usize) -> Result<()> {
        self.slots.make_room(&self.gpu)?;
        self.direct_above = Some(above_bytes);
        Ok(())
    }

    /// Whether the network gets a message's address on the device.
    fn is_direct(&self, transport: &Router, peer: Rank, bytes: usize) -> bool {
        self.direct_above.is_some_and(|above| bytes > above) && transport.is_far(peer)
    }

    /// Enqueues the copy of a message into its slot; its number on the stream out.
    fn copy_out(&mut self, src: &[DeviceRegion], slot: &MessageSlot) -> Result<u64> {
        let host = slot.region();
        let mut at = 0;
        match slot.address() {
            Some(address) if src.len() > COPIES_BY_ENGINE => {
                let jobs = src.iter().map(|part| {
                    at += part.len();
                    (part.len(), address + (at - part.len()) as u64, part.address())
                });
                kernel_queue::copy_now(&mut self.out, jobs)?;
            }
            _ => {
                for part in src {
                    let (to, from) = (host.part(at, part.len()).as_ptr(), part.address());
                    // SAFETY: both must stay until this has ended; because the slot is sent when it has, and the call's buffers
                    // stay.
                    unsafe { self.out.to_host(to, from, part.len()) }?;
                    at += part.len();
                }
            }
        }
        Ok(self.out.issued())
    }

    /// Posts messages whose copies have ended, in order; one whose channel is full holds up those behind it there.
    fn post(&mut self, transport: &mut Router, copied: u64, done: &mut Vec<Token>) -> Result<()> {
        let mut full: SmallVec<[(Rank, Channel); 4]> = SmallVec::new();
        let mut index = 0;
        while let Some(message) = self.leaving.get(index).filter(|message| message.number < copied) {
            let stream = (message.to, message.envelope.channel);
            let started = match full.contains(&stream) {
                true => Started::Busy,
                false => transport.send(message.token, message.to, message.envelope, &[message.slot.region()])?,
            };
            if started == Started::Busy {
                full.push(stream);
                index += 1;
                continue;
            }
            let Some(Leaving { token, slot, .. }) = self.leaving.remove(index) else { break };
            match started {
                Started::Done => {
                    self.slots.put(slot);
                    done.push(token);
                }
                _ => drop(self.sending.insert(token, slot)),
            }
        }
        Ok(())
    }

    /// Takes in what the transport has completed.
    fn take_in(&mut self, done: &mut Vec<Token>) -> Result<()> {
        while let Some(token) = self.arrived.pop() {
            if let Some(slot) = self.sending.remove(&token) {
                self.slots.put(slot);
                done.push(token);
                continue;
            }
            if self.land_provided(token, done)? {
                continue;
            }
            let unknown = || Error::Internal(format!("the transport finished token {token:#x}, which is not pending"));
            let message = self.arriving.remove(&token).ok_or_else(unknown)?;
            match message.slot {
                MessageSlot::Nothing => done.push(token),
                _ => self.land(token, message)?,
            }
        }
        self.bounce()
    }

    /// Lets the next piece of a message in ordinary memory be combined.
    fn bounce(&mut self) -> Result<()> {
        let Some((token, message)) = self.ashore.front_mut() else { return Ok(()) };
        let Some(bounce) = self.slots.take_bounce() else { return Ok(()) };
        let (whole, from) = (message.slot.region(), message.combined);
        let to = whole.len().min(from + bounce.region().len());
        bounce.region().part(0, to - from).copy_from(whole.part(from, to - from));
        message.combined = to;
        if let (Some((how, local)), Some(address)) = (&message.combine, bounce.address()) {
            fold_in(&mut self.into, *how, (local, &message.dst), address, from..to)?;
        }
        let token = (to == whole.len()).then_some(*token);
        if token.is_some() {
            self.ashore.pop_front();
        }
        self.into.end(token, Some(bounce));
        Ok(())
    }

    /// Enqueues what is to be done with a message that has arrived.
    fn land(&mut self, token: Token, message: Arriving) -> Result<()> {
        let Arriving { slot, dst, combine, .. } = message;
        let Some(address) = slot.address() else {
            if combine.is_some() {
                self.ashore.push_back((token, Arriving { slot, dst, combine, combined: 0 }));
                return Ok(());
            }
            return self.into.copy_in(token, &dst, slot);
        };
        match combine {
            None if dst.len() <= COPIES_BY_ENGINE && !matches!(slot, MessageSlot::Device { .. }) => {
                return self.into.copy_in(token, &dst, slot)
            }
            None => {
                let mut at = 0;
                for part in &dst {
                    self.into.add(Work::Copy, part.len(), part.address(), &[address + at as u64])?;
                    at += part.len();
                }
            }
            Some((how, local)) => fold_in(&mut self.into, how, (&local, &dst), address, 0..slot.region().len())?,
        }
        self.into.end(Some(token), Some(slot));
        Ok(())
    }
}

/// Combines a range of a message, whose first byte is at `address`, with what the device has.
fn fold_in(
    queue: &mut KernelQueue,
    how: Combine,
    (local, dst): (&[DeviceRegion], &[DeviceRegion]),
    address: u64,
    range: Range<usize>,
) -> Result<()> {
    let Combine { dtype, operator, order, divisor } = how;
    let work = Work::Reduce { dtype, operator, divisor };
    let mut at = 0;
    for (local, dst) in in_step(local, dst) {
        let (from, to) = (range.start.max(at), range.end.min(at + dst.len()));
        if from < to {
            let (local, dst) = (local.part(from - at, to - from), dst.part(from - at, to - from));
            let (mine, theirs) = (local.address(), address + (from - range.start) as u64);
            let srcs = match order {
                OperandOrder::LocalFirst => [mine, theirs],
                OperandOrder::IncomingFirst => [theirs, mine],
            };
            queue.add(work, dst.len(), dst.address(), &srcs)?;
        }
        at += dst.len();
    }
    Ok(())
}

/// Two lists of equal total length, cut at the same places.
fn in_step<'a>(
    one: &'a [DeviceRegion],
    two: &'a [DeviceRegion],
) -> impl Iterator<Item = (DeviceRegion, DeviceRegion)> + 'a {
    let (mut first, mut second) = ((0, 0), (0, 0));
    std::iter::from_fn(move || {
        let (a, b) = (one.get(first.0)?, two.get(second.0)?);
        let len = (a.len() - first.1).min(b.len() - second.1);
        let parts = (a.part(first.1, len), b.part(second.1, len));
        for (at, whole) in [(&mut first, a), (&mut second, b)] {
            at.1 += len;
            if at.1 == whole.len() {
                *at = (at.0 + 1, 0);
            }
        }
        Some(parts)
    })
}

impl Device for Staging {
    fn scratch(&mut self, bytes: usize) -> Result<DeviceRegion> {
        self.scratch.grow(bytes)?;
        Ok(self.scratch.region())
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    fn read(&mut self, from: DeviceRegion, bytes: &mut [u8]) -> Result<()> {
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let slot = self.slots.take(bytes.len())?;
        let copied = self.copy_out(&[from], &slot).and_then(|_| self.out.finish());
        if copied.is_ok() {
            slot.region().read(bytes);
        }
        self.slots.put(slot);
        copied
    }

    fn begin(&mut self, program: &Arc<Program>, layout: &Layout, window: usize) -> Result<()> {
        self.calls.as_mut().map_or(Ok(()), |calls| calls.begin(program, layout, window))
    }

    fn send(
        &mut self,
        transport: &mut Router,
        token: Token,
        to: Rank,
        envelope: Envelope,
        src: &[DeviceRegion],
    ) -> Result<Started> {
        let bytes = src.iter().map(DeviceRegion::len).sum();
        // What is still being copied on the same channel goes first.
        let follows = |message: &Leaving| message.to == to && message.envelope.channel == envelope.channel;
        if src.len() == 1 && self.is_direct(transport, to, bytes) && !self.leaving.iter().any(follows) {
            let started = {
                // SAFETY: only what takes addresses on the device may get them; because `is_direct` has asked the transport.
                let src = unsafe { DeviceRegion::all_in_process(src) };
                transport.send(token, to, envelope, src)?
            };
            if started == Started::Pending {
                self.sending.insert(token, MessageSlot::Nothing);
            }
            return Ok(started);
        }
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        let slot = self.slots.take(bytes)?;
        match self.copy_out(src, &slot) {
            Ok(number) => {
                self.leaving.push_back(Leaving { number, token, to, envelope, slot });
                Ok(Started::Pending)
            }
            Err(error) => {
                // Some of the pieces may be on their way; the first error is the one that tells why.
                let _ = self.out.finish();
                self.slots.put(slot);
                Err(error)
            }
        }
    }

    fn recv(
        &mut self,
        transport: &mut Router,
        token: Token,
        from: Rank,
        envelope: Envelope,
        sink: Sink<'_, OnDevice>,
    ) -> Result<Started> {
        let (dst, combine) = match sink {
            Sink::Store(dst) => (dst, None),
            Sink::Reduce { local, dst, combine } => (dst, Some((combine, Regions::from_slice(local)))),
        };
        let bytes = dst.iter().map(DeviceRegion::len).sum();
        let slot = match self.is_direct(transport, from, bytes) {
            true if dst.len() == 1 && combine.is_none() => MessageSlot::Nothing,
            true => match self.slots.take_device(bytes) {
                Some(slot) => slot,
                None => self.slots.take(bytes)?,
            },
            false => self.slots.take(bytes)?,
        };
        let message = Arriving { slot, dst: Regions::from_slice(dst), combine, combined: 0 };
        let place = match message.slot {
            // SAFETY: only what takes addresses on the device may get them; because `is_direct` has asked the transport.
            MessageSlot::Nothing => unsafe { dst[0].in_process() },
            _ => message.slot.region(),
        };
        match transport.recv(token, from, envelope, Sink::Store(&[place])) {
            Ok(Started::Busy) => {
                self.slots.put(message.slot);
                Ok(Started::Busy)
            }
            Ok(started) => {
                self.arriving.insert(token, message);
                if started == Started::Done {
                    self.arrived.push(token);
                }
                Ok(Started::Pending)
            }
            Err(error) => {
                self.slots.put(message.slot);
                Err(error)
            }
        }
    }

    fn call(
        &mut self,
        _transport: &mut Router,
        token: Token,
        _envelope: Envelope,
        me: usize,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started> {
        match &mut self.calls {
            Some(calls) => calls.take(token, me, call).map(|()| Started::Pending),
            None => Err(Error::Internal(format!("a {} that nobody does on this device", call.collective.name()))),
        }
    }

    fn call_provider(
        &mut self,
        transport: &mut Router,
        token: Token,
        by: Provision<'_, OnDevice>,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started> {
        self.take_provided(transport, token, by, call)
    }

    fn poll(&mut self, transport: &mut Router, done: &mut Vec<Token>) -> Result<()> {
        let staging = self;
        let gpu = staging.gpu.clone();
        let _entered = gpu.enter()?;
        transport.poll(&mut staging.arrived)?;
        staging.take_in(done)?;
        staging.out.mark()?;
        let copied = staging.out.poll()?;
        staging.post(transport, copied, done)?;
        staging.begin_provided(transport, copied)?;
        staging.into.turn(&mut staging.slots, done)?;
        staging.local.turn(&mut staging.slots, done)?;
        staging.calls.as_mut().map_or(Ok(()), |calls| calls.turn(&mut staging.slots, done))
    }

    fn copy(&mut self, scaling: Option<Scaling>, src: DeviceRegion, dst: DeviceRegion) -> Result<()> {
        let queue = &mut self.local;
        let (bytes, from, to) = (dst.len(), src.address(), dst.address());
        let Some(Scaling { reduction, start, divisor }) = scaling else {
            return queue.add(Work::Copy, bytes, to, &[from]);
        };
        let dtype = reduction.dtype;
        let mut from = from;
        if start {
            queue.add(Work::Prologue { dtype, prologue: reduction.prologue }, bytes, to, &[from])?;
            from = to;
        }
        if divisor != 1 {
            queue.add(Work::Divide { dtype, divisor }, bytes, to, &[from])?;
        }
        Ok(())
    }

    fn reduce(&mut self, how: (DataType, Operator, u64), srcs: &[DeviceRegion], dst: DeviceRegion) -> Result<()> {
        let (dtype, operator, divisor) = how;
        let srcs: SmallVec<[u64; 16]> = srcs.iter().map(|src| src.address()).collect();
        self.local.add(Work::Reduce { dtype, operator, divisor }, dst.len(), dst.address(), &srcs)
    }

    fn encode(&mut self, how: Coding, src: &[DeviceRegion], dst: DeviceRegion) -> Result<()> {
        let mut words: CodeWords = smallvec![residual_at(&how)];
        add_stretches(&mut words, &how, src);
        let (kernel, dtype) = (Kernel::Encode(how.code), how.dtype);
        let work = Work::Code { kernel, dtype, operator: Operator::Sum, sources: 0 };
        self.local.add(work, elements_of(&how, dst), dst.address(), &words)
    }

    fn decode(&mut self, how: Coding, divisor: u64, src: DeviceRegion, dst: &[DeviceRegion]) -> Result<()> {
        let mut words: CodeWords = smallvec![0];
        add_stretches(&mut words, &how, dst);
        let (kernel, dtype) = (Kernel::Decode(how.code), how.dtype);
        let work = Work::Code { kernel, dtype, operator: Operator::Sum, sources: 0 };
        self.local.add(work, elements_of(&how, src), src.address(), &words)?;
        self.divide(dtype, divisor, dst)
    }

    fn fold_coded(
        &mut self,
        how: Coding,
        (operator, divisor): (Operator, u64),
        srcs: &[DeviceRegion],
        dst: CodedResult<'_>,
    ) -> Result<()> {
        let mut words: CodeWords = smallvec![residual_at(&how)];
        words.extend(srcs.iter().map(|src| src.address()));
        let (chunk, stretches) = match dst {
            CodedResult::Coded(chunk) => (chunk.address(), &[][..]),
            CodedResult::Elements(stretches) => (0, stretches),
        };
        add_stretches(&mut words, &how, stretches);
        let dtype = how.dtype;
        let work = Work::Code { kernel: Kernel::FoldCoded(how.code), dtype, operator, sources: srcs.len() };
        let elements = srcs.first().map_or(0, |src| elements_of(&how, *src));
        self.local.add(work, elements, chunk, &words)?;
        self.divide(dtype, divisor, stretches)
    }

    fn step(&mut self, token: Token) -> Started {
        self.local.end(Some(token), None);
        Started::Pending
    }

    fn keep_order(&mut self, token: Token) -> Result<Started> {
        // What a network reads by itself must be there before it gets the address.
        if self.direct_above.is_some() {
            return Ok(self.step(token));
        }
        let gpu = self.gpu.clone();
        let _entered = gpu.enter()?;
        self.into.follow(&mut self.local)?;
        self.local.lead(&mut self.out)?;
        Ok(Started::Done)
    }

    fn is_busy(&self) -> bool {
        let calls = self.calls.as_ref().is_some_and(NodeCalls::is_busy);
        let ashore = !self.ashore.is_empty() || self.is_copying();
        self.out.is_busy() || self.into.is_busy() || self.local.is_busy() || calls || ashore
    }

    fn check(&self) -> Result<()> {
        self.gpu.check_alive()
    }

    fn cancel(&mut self) {
        // First: other streams may share a queue of the device's with one that waits for a call.
        self.calls.iter_mut().for_each(|calls| calls.cancel(&mut self.slots));
        self.out.settle();
        self.cancel_provided();
        self.into.cancel(&mut self.slots);
        self.local.cancel(&mut self.slots);
        // Another communicator may go on with this device, whose tokens begin anew.
        self.arrived.clear();
        let leaving = self.leaving.drain(..).map(|message| message.slot);
        let sending = self.sending.drain().map(|(_, slot)| slot);
        let arriving = self.arriving.drain().map(|(_, message)| message.slot);
        let ashore = self.ashore.drain(..).map(|(_, message)| message.slot);
        leaving.chain(sending).chain(arriving).chain(ashore).for_each(|slot| self.slots.put(slot));
        debug_assert!(self.slots.is_whole());
    }

    fn provide(&mut self, provider: Arc<dyn Provider>, room_bytes: usize, beside_bytes: usize) -> Result<()> {
        self.calls = Some(match self.retired.take() {
            Some(calls) => calls.by(provider),
            None => NodeCalls::new(&self.gpu, provider, room_bytes, beside_bytes)?,
        });
        Ok(())
    }

    fn has_provider(&self) -> bool {
        self.calls.is_some()
    }

    fn retire_provider(&mut self) {
        if let Some(calls) = self.calls.take() {
            calls.retire();
            self.retired = Some(calls);
        }
    }

    fn leave(self: Box<Self>) {
        std::mem::forget(self);
    }
}

/// What a job of a kernel of codes has beside its elements and its chunk.
type CodeWords = SmallVec<[u64; 16]>;

/// Where a residual lies, or 0.
fn residual_at(how: &Coding) -> u64 {
    how.residual.map_or(0, |residual| residual.address())
}

fn elements_of(how: &Coding, chunk: DeviceRegion) -> usize {
    how.code.elements(chunk.len()).unwrap_or(0)
}

// Contributions of as many ranks as are promised are one launch, with the residual and some stretches.
const _: () = assert!(Batch::capacity(1 + MOST_FOLDED_ON_DEVICES + 2 * 32) > 0);

/// Adds stretches of elements as the kernels have them: where each lies, and how many elements there are up to its end.
fn add_stretches(words: &mut CodeWords, how: &Coding, stretches: &[DeviceRegion]) {
    let mut end = 0;
    for stretch in stretches {
        end += stretch.len() / how.dtype.size();
        words.extend([stretch.address(), end as u64]);
    }
}

impl Staging {
    /// Divides elements that a kernel of codes has written.
    fn divide(&mut self, dtype: DataType, divisor: u64, stretches: &[DeviceRegion]) -> Result<()> {
        if divisor == 1 {
            return Ok(());
        }
        let work = Work::Divide { dtype, divisor };
        stretches.iter().try_for_each(|part| self.local.add(work, part.len(), part.address(), &[part.address()]))
    }
}

/// Scratch memory on a device. What has been outgrown is kept to the end: freeing waits for all streams of the device,
/// and those of the program may wait for this communicator.
#[derive(Debug)]
pub struct DeviceScratch {
    gpu: Arc<GpuDevice>,
    pieces: Vec<DeviceBuffer>,
}

impl DeviceScratch {
    /// Scratch memory of so many bytes.
    pub fn new(gpu: &Arc<GpuDevice>, bytes: usize) -> Result<DeviceScratch> {
        Ok(DeviceScratch { gpu: gpu.clone(), pieces: vec![DeviceBuffer::new(gpu, bytes)?] })
    }

    /// At least so many bytes.
    pub fn grow(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.region().len() {
            self.pieces.push(DeviceBuffer::new(&self.gpu, bytes.next_power_of_two())?);
        }
        Ok(())
    }

    /// The piece that is used.
    pub fn region(&self) -> DeviceRegion {
        self.pieces.last().map_or(DeviceRegion::EMPTY, DeviceBuffer::region)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(DeviceBuffer::bytes).sum()
    }
}
