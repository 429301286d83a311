//! A toy device: memory in which every byte is stored inverted.
//!
//! Whatever reads or writes it without the device gets wrong data, so a test that passes shows that everything goes through
//! the device. Like a GPU it cannot give its memory to a transport: messages go through slots of host memory. Work ends at the
//! poll after the one that began it, so nothing may rely on work that has only been given.

use std::collections::HashMap;
use strata::communicator::device::{Device, MakeDevice, Scaling};
use strata::device::host::{self, Combine};
use strata::dtype::{DataType, Operator};
use strata::error::{Error, Result};
use strata::exec::{Started, Token};
use strata::memory::{Arena, DeviceRegion, OnDevice, Region};
use strata::plan::OperandOrder;
use strata::topo::Rank;
use strata::transport::provider::Provision;
use strata::transport::{Blocks, Envelope, NodeCall, Router, Sink, Transport};

/// Communicators with this in their options work on the toy device.
pub const INVERTED: MakeDevice = MakeDevice(|scratch_bytes| {
    let (free, work) = (Vec::new(), Vec::new());
    let (sending, arriving) = (HashMap::new(), HashMap::new());
    Ok(Box::new(Inverted { scratch: slot(scratch_bytes), free, sending, arriving, work, provided: None }))
});

/// Host memory for what is on its way. It is never freed, as memory that a driver has pinned often is not.
fn slot(bytes: usize) -> Region {
    Arena::new(bytes).leak()
}

/// A region of the device, as memory that its driver can reach.
fn at(region: DeviceRegion) -> Region {
    // SAFETY: the bytes must be this process's; because the toy's are.
    unsafe { region.in_process() }
}

/// The bytes of regions of the device, one after another.
fn load(regions: &[DeviceRegion]) -> Vec<u8> {
    let mut bytes = vec![0; regions.iter().map(DeviceRegion::len).sum()];
    let mut rest = &mut bytes[..];
    for region in regions {
        let (part, after) = rest.split_at_mut(region.len());
        at(*region).read(part);
        rest = after;
    }
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    bytes
}

/// Stores bytes in regions of the device, one after another.
fn store(mut bytes: Vec<u8>, regions: &[DeviceRegion]) {
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    let mut rest = &bytes[..];
    for region in regions {
        let (part, after) = rest.split_at(region.len());
        at(*region).write(part);
        rest = after;
    }
}

/// A message that the transport puts into a slot.
struct Arriving {
    slot: Region,
    dst: Vec<DeviceRegion>,
    combine: Option<(Combine, Vec<DeviceRegion>)>,
}

/// A call that a provider does on slots: its token, what is sent, and the message that its result is.
struct Provided(Token, Region, Arriving);

/// The blocks of a buffer in a slot, one behind the other.
fn blocks_in(slot: Region, blocks: &Blocks<OnDevice>) -> Blocks {
    let (mut copies, mut at) = (Blocks::default(), 0);
    for index in 0..blocks.len() {
        let bytes = blocks.block_bytes(index);
        copies.push((bytes > 0).then(|| slot.part(at, bytes)).into_iter());
        at += bytes;
    }
    copies
}

/// The device of one rank.
struct Inverted {
    scratch: Region,
    /// Slots that nothing uses.
    free: Vec<Region>,
    /// Slots of messages that the transport sends.
    sending: HashMap<Token, Region>,
    arriving: HashMap<Token, Arriving>,
    /// Local work that ends at the next poll.
    work: Vec<Token>,
    provided: Option<Provided>,
}

impl Inverted {
    /// A slot of just so many bytes.
    fn take(&mut self, bytes: usize) -> Region {
        match self.free.iter().position(|free| free.len() == bytes) {
            Some(index) => self.free.swap_remove(index),
            None => slot(bytes),
        }
    }

    fn in_slot(&mut self, bytes: &[u8]) -> Region {
        let slot = self.take(bytes.len());
        slot.write(bytes);
        slot
    }

    /// Puts a message where it belongs, or combines it with what is there.
    fn land(&mut self, Arriving { slot, dst, combine }: Arriving) {
        if let Some((Combine { dtype, operator, order, divisor }, local)) = combine {
            let local = self.in_slot(&load(&local));
            let sources = match order {
                OperandOrder::LocalFirst => [local, slot],
                OperandOrder::IncomingFirst => [slot, local],
            };
            host::reduce(dtype, operator, divisor, &sources, slot);
            self.free.push(local);
        }
        let mut bytes = vec![0; slot.len()];
        slot.read(&mut bytes);
        store(bytes, &dst);
        self.free.push(slot);
    }
}

impl Device for Inverted {
    fn scratch(&mut self, bytes: usize) -> Result<DeviceRegion> {
        if bytes > self.scratch.len() {
            self.scratch = slot(bytes);
        }
        Ok(self.scratch.as_device())
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch.len()
    }

    fn read(&mut self, from: DeviceRegion, bytes: &mut [u8]) -> Result<()> {
        bytes.copy_from_slice(&load(&[from]));
        Ok(())
    }

    fn send(
        &mut self,
        transport: &mut Router,
        token: Token,
        to: Rank,
        envelope: Envelope,
        src: &[DeviceRegion],
    ) -> Result<Started> {
        let slot = self.in_slot(&load(src));
        let started = transport.send(token, to, envelope, &[slot])?;
        match started {
            Started::Pending => drop(self.sending.insert(token, slot)),
            Started::Busy | Started::Done => self.free.push(slot),
        }
        Ok(started)
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
            Sink::Store(dst) => (dst.to_vec(), None),
            Sink::Reduce { local, dst, combine } => (dst.to_vec(), Some((combine, local.to_vec()))),
        };
        let slot = self.take(dst.iter().map(DeviceRegion::len).sum());
        let message = Arriving { slot, dst, combine };
        let started = transport.recv(token, from, envelope, Sink::Store(&[slot]))?;
        match started {
            Started::Busy => self.free.push(slot),
            Started::Done => self.land(message),
            Started::Pending => drop(self.arriving.insert(token, message)),
        }
        Ok(started)
    }

    fn call_provider(
        &mut self,
        transport: &mut Router,
        token: Token,
        by: Provision<'_, OnDevice>,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started> {
        let NodeCall { collective, root, src, dst, combine, operation_bytes } = call;
        let (send, recv) = (self.in_slot(&load(src.regions())), self.take(dst.bytes()));
        let (sent, received) = (blocks_in(send, src), blocks_in(recv, dst));
        let by = Provision { name: by.name, dtype: by.dtype, uneven: by.uneven.map(|_| [send, recv]) };
        let call = NodeCall { collective, root, src: &sent, dst: &received, combine, operation_bytes };
        let started = transport.provide(token, by, call)?;
        match started {
            Started::Pending => {
                let result = Arriving { slot: recv, dst: dst.regions().to_vec(), combine: None };
                self.provided = Some(Provided(token, send, result));
            }
            // A provider's calls end in a poll.
            Started::Busy | Started::Done => self.free.extend([send, recv]),
        }
        Ok(started)
    }

    fn copy(&mut self, scaling: Option<Scaling>, src: DeviceRegion, dst: DeviceRegion) -> Result<()> {
        let slot = self.in_slot(&load(&[src]));
        if let Some(Scaling { reduction, start, divisor }) = scaling {
            if start {
                host::prologue(&reduction, slot, slot);
            }
            if divisor != 1 {
                host::divide(reduction.dtype, divisor, slot, slot);
            }
        }
        self.land(Arriving { slot, dst: vec![dst], combine: None });
        Ok(())
    }

    fn reduce(&mut self, how: (DataType, Operator, u64), srcs: &[DeviceRegion], dst: DeviceRegion) -> Result<()> {
        let (dtype, operator, divisor) = how;
        let slots: Vec<Region> = srcs.iter().map(|src| self.in_slot(&load(&[*src]))).collect();
        let result = self.take(dst.len());
        host::reduce(dtype, operator, divisor, &slots, result);
        self.free.extend(slots);
        self.land(Arriving { slot: result, dst: vec![dst], combine: None });
        Ok(())
    }

    fn step(&mut self, token: Token) -> Started {
        self.work.push(token);
        Started::Pending
    }

    fn poll(&mut self, transport: &mut Router, done: &mut Vec<Token>) -> Result<()> {
        done.append(&mut self.work);
        let before = done.len();
        transport.poll(done)?;
        for token in &done[before..] {
            if let Some(slot) = self.sending.remove(token) {
                self.free.push(slot);
            } else if let Some(message) = self.arriving.remove(token) {
                self.land(message);
            } else if let Some(Provided(_, send, result)) = self.provided.take_if(|call| call.0 == *token) {
                self.free.push(send);
                self.land(result);
            } else {
                return Err(Error::Internal(format!("the transport finished token {token}, which is not pending")));
            }
        }
        Ok(())
    }

    fn is_busy(&self) -> bool {
        !self.work.is_empty()
    }

    /// The transport has forgotten its messages before this is called.
    fn cancel(&mut self) {
        self.work.clear();
        // Slots that a provider may still know stay as they are.
        self.provided = None;
        self.free.extend(self.sending.drain().map(|(_, slot)| slot));
        self.free.extend(self.arriving.drain().map(|(_, message)| message.slot));
    }
}
