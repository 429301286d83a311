//! Host memory for messages on their way between a device and the network.
//!
//! Pinned memory is made once, when the communicator is: see [`gpu`](crate::communicator::gpu). A message for which none is left
//! gets ordinary memory of the heap that the node shares, so no message ever waits for another one's memory, and ranks
//! cannot come to wait for each other by it.
use crate::device::gpu::driver::Address;
use crate::device::gpu::memory::{DeviceBuffer, Pinned};
use crate::device::gpu::GpuDevice;
use crate::error::Result;
use crate::memory::{shared, DeviceRegion, Region};
use std::sync::Arc;

/// Slots begin at multiples of this, so that vector accesses of device and host are aligned.
const ALIGN: usize = 256;
/// The bounce slot's bytes, where there is so much.
const BOUNCE_BYTES: usize = 256 << 10;

/// Runs of a piece of memory, given out and taken back.
#[derive(Debug)]
pub struct Runs {
    bytes: usize,
    /// Free runs by where they begin, none adjacent to another.
    free: Vec<(usize, usize)>,
}

impl Runs {
    /// A piece of memory of so many bytes, all of it free.
    pub fn new(bytes: usize) -> Runs {
        let bytes = bytes.max(ALIGN) / ALIGN * ALIGN;
        Runs { bytes, free: vec![(0, bytes)] }
    }

    /// Where a run of so many bytes begins, if there is one.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let need = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let index = self.free.iter().position(|&(_, len)| len >= need)?;
        let (start, len) = self.free[index];
        match len == need {
            true => drop(self.free.remove(index)),
            false => self.free[index] = (start + need, len - need),
        }
        Some(start)
    }

    /// Takes back a run that was taken with so many bytes.
    pub fn put(&mut self, start: usize, bytes: usize) {
        let len = bytes.max(1).next_multiple_of(ALIGN);
        let index = self.free.partition_point(|&(other, _)| other < start);
        self.free.insert(index, (start, len));
        if self.free.get(index + 1).is_some_and(|&(next, _)| next == start + len) {
            self.free[index].1 += self.free.remove(index + 1).1;
        }
        if index > 0 && self.free[index - 1].0 + self.free[index - 1].1 == start {
            self.free[index - 1].1 += self.free.remove(index).1;
        }
    }

    /// Bytes that are free.
    pub fn free_bytes(&self) -> usize {
        self.free.iter().map(|&(_, len)| len).sum()
    }

    /// Whether all runs have come back.
    pub fn is_whole(&self) -> bool {
        self.free == [(0, self.bytes)]
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The pinned memory of a communicator, cut into slots.
#[derive(Debug)]
pub struct Slots {
    pinned: Arc<Pinned>,
    runs: Runs,
    /// Whether somebody has a slot for good.
    is_kept: bool,
    /// A part of the pinned memory that no message waits in: whoever has it needs nothing but the device to give it back.
    bounce: Option<MessageSlot>,
    /// Memory of the device, where a transport takes addresses there.
    room: Option<(DeviceBuffer, Runs)>,
}

/// Memory for one message.
#[derive(Debug)]
pub enum MessageSlot {
    /// A run of the pinned memory. Given back by [`Slots::put`].
    Pinned {
        /// Where the host sees it.
        host: Region,
        /// Where the device sees it.
        address: Address,
        /// Where it begins in the pinned memory.
        start: usize,
    },
    /// Ordinary memory that other processes of the node can map.
    Ordinary(shared::Owned, usize),
    /// A run of memory of the device, for a transport that takes addresses there. Given back by [`Slots::put`].
    Device {
        /// The range of addresses.
        region: DeviceRegion,
        /// Where it begins in the room.
        start: usize,
    },
    /// A pinned slot for messages in ordinary memory, one of a kind.
    Bounce(Box<MessageSlot>),
    /// None: the transport has the program's own memory.
    Nothing,
}

impl MessageSlot {
    /// Where the transport finds it: host memory, but for [`MessageSlot::Device`].
    pub fn region(&self) -> Region {
        match self {
            MessageSlot::Pinned { host, .. } => *host,
            // SAFETY: the memory must outlive every use; because a message keeps its slot until it has ended, or until the
            // transport has forgotten it (`Staging::cancel`).
            MessageSlot::Ordinary(owned, bytes) => unsafe { owned.region().part(0, *bytes).unbound() },
            // SAFETY: only what takes addresses on the device may get them; because such a slot is taken only for a transport
            // that does (`Staging::is_direct`).
            MessageSlot::Device { region, .. } => unsafe { region.in_process() },
            MessageSlot::Bounce(slot) => slot.region(),
            MessageSlot::Nothing => Region::EMPTY,
        }
    }

    /// Where the device sees it, if it does.
    pub fn address(&self) -> Option<Address> {
        match self {
            MessageSlot::Pinned { address, .. } => Some(*address),
            MessageSlot::Device { region, .. } => Some(region.address()),
            MessageSlot::Bounce(slot) => slot.address(),
            MessageSlot::Ordinary(..) | MessageSlot::Nothing => None,
        }
    }
}

impl Slots {
    /// Pinned memory of so many bytes.
    pub fn new(gpu: &Arc<GpuDevice>, bytes: usize) -> Result<Slots> {
        let runs = Runs::new(bytes.max(2 * ALIGN));
        let pinned = Arc::new(Pinned::new(gpu, runs.bytes())?);
        let mut slots = Slots { pinned, runs, is_kept: false, bounce: None, room: None };
        let bounce_bytes = (slots.runs.bytes() / 4).clamp(ALIGN, BOUNCE_BYTES);
        slots.bounce = slots.take_pinned(bounce_bytes).map(|slot| MessageSlot::Bounce(Box::new(slot)));
        Ok(slots)
    }

    /// Gets as much memory on the device.
    pub fn make_room(&mut self, gpu: &Arc<GpuDevice>) -> Result<()> {
        let runs = Runs::new(self.runs.bytes());
        self.room = Some((DeviceBuffer::new(gpu, runs.bytes())?, runs));
        Ok(())
    }

    /// The bounce slot, if it is free.
    pub fn take_bounce(&mut self) -> Option<MessageSlot> {
        self.bounce.take()
    }

    /// A slot on the device, if there is a free run of so many bytes.
    pub fn take_device(&mut self, bytes: usize) -> Option<MessageSlot> {
        let (memory, runs) = self.room.as_mut()?;
        let start = runs.take(bytes)?;
        Some(MessageSlot::Device { region: memory.region().part(start, bytes), start })
    }

    /// A slot of so many bytes: pinned if there is a free run.
    pub fn take(&mut self, bytes: usize) -> Result<MessageSlot> {
        match self.take_pinned(bytes) {
            Some(slot) => Ok(slot),
            None => Ok(MessageSlot::Ordinary(shared::Owned::new(bytes)?, bytes)),
        }
    }

    /// A pinned slot, if there is a free run of so many bytes.
    pub fn take_pinned(&mut self, bytes: usize) -> Option<MessageSlot> {
        let start = self.runs.take(bytes)?;
        // SAFETY: the memory must outlive every use; because it goes with the staging, which goes after its transport.
        let host = unsafe { self.pinned.host().part(start, bytes).unbound() };
        Some(MessageSlot::Pinned { host, address: self.pinned.address() + start as Address, start })
    }

    /// Takes a slot back.
    pub fn put(&mut self, slot: MessageSlot) {
        match (slot, &mut self.room) {
            (MessageSlot::Bounce(slot), _) => self.bounce = Some(MessageSlot::Bounce(slot)),
            (MessageSlot::Pinned { host, start, .. }, _) => self.runs.put(start, host.len()),
            (MessageSlot::Device { region, start }, Some((_, runs))) => runs.put(start, region.len()),
            _ => {}
        }
    }

    /// Leaves a slot of the host's as it is to the end of the process, since somebody may write there whom nothing stops.
    pub fn keep(&mut self, slot: MessageSlot) {
        if let MessageSlot::Pinned { .. } = slot {
            self.is_kept = true;
            std::mem::forget(self.pinned.clone());
        }
        std::mem::forget(slot);
    }

    /// Whether all slots have come back, but for those that are kept.
    pub fn is_whole(&self) -> bool {
        if self.is_kept {
            return true;
        }
        let bounce = self.bounce.as_ref().map_or(0, |slot| slot.region().len());
        self.runs.free_bytes() + bounce.next_multiple_of(ALIGN) == self.runs.bytes()
            && self.room.as_ref().is_none_or(|(_, runs)| runs.is_whole())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_come_back_in_any_order_and_become_one_again() {
        let mut runs = Runs::new(1000);
        assert_eq!(runs.bytes(), 768, "whole multiples of the alignment");
        let starts: Vec<usize> = (0..3).map(|_| runs.take(1).unwrap()).collect();
        assert_eq!(starts, [0, 256, 512]);
        assert_eq!(runs.take(1), None);
        runs.put(0, 1);
        runs.put(512, 1);
        assert_eq!(runs.take(300), None, "no two of them are adjacent");
        runs.put(256, 1);
        assert!(runs.is_whole());
        assert_eq!(runs.take(768), Some(0));
    }
}
