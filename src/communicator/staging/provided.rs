//! Collectives of all ranks by a provider, whose data is copied to host memory and back.
//!
//! A provider knows host memory. What a rank sends is copied into a slot, block behind block, as messages are; when the copy has
//! ended, the provider gets the slots of what is sent and of the result in the place of the program's buffers; and when it has ended,
//! the result lands on the device as a message that has arrived does. Nothing waits on the caller's thread: a poll sees each end.
#![forbid(unsafe_code)]

use super::slots::{MessageSlot, Slots};
use super::{Arriving, Regions, Staging};
use crate::device::host::Combine;
use crate::dtype::DataType;
use crate::error::Result;
use crate::exec::{Started, Token};
use crate::memory::OnDevice;
use crate::plan::Collective;
use crate::transport::provider::Provision;
use crate::transport::{Blocks, NodeCall, Router};

/// A call on copies in host memory.
#[derive(Debug)]
pub(super) struct ProvidedCall {
    token: Token,
    /// The number of the copy of what is sent on the stream out; none where nothing is.
    copy: Option<u64>,
    /// Whether the provider has it.
    has_begun: bool,
    name: String,
    dtype: DataType,
    is_uneven: bool,
    collective: Collective,
    root: usize,
    combine: Option<Combine>,
    operation_bytes: usize,
    /// What is sent, and the result.
    slots: [MessageSlot; 2],
    /// Their blocks.
    src: Blocks,
    dst: Blocks,
    /// Where the result goes on the device.
    results: Regions,
}

/// The blocks of a buffer in a slot, one behind the other.
fn blocks_in(slot: &MessageSlot, blocks: &Blocks<OnDevice>) -> Blocks {
    let (whole, mut at) = (slot.region(), 0);
    let mut copies = Blocks::default();
    for index in 0..blocks.len() {
        let bytes = blocks.block_bytes(index);
        copies.push((bytes > 0).then(|| whole.part(at, bytes)).into_iter());
        at += bytes;
    }
    copies
}

fn slot(slots: &mut Slots, bytes: usize) -> Result<MessageSlot> {
    if bytes == 0 {
        Ok(MessageSlot::Nothing)
    } else {
        slots.take(bytes)
    }
}

impl Staging {
    /// Has what a rank sends copied out. `Busy` while another call is under way.
    pub(super) fn take_provided(
        &mut self,
        transport: &Router,
        token: Token,
        by: Provision<'_, OnDevice>,
        call: NodeCall<'_, OnDevice>,
    ) -> Result<Started> {
        if self.provided.is_some() {
            return Ok(Started::Busy);
        }
        // Before anything is copied.
        transport.check_provided(&by, &call)?;
        let NodeCall { collective, root, src, dst, combine, operation_bytes } = call;
        let send = slot(&mut self.slots, src.bytes())?;
        let slots = match slot(&mut self.slots, dst.bytes()) {
            Ok(recv) => [send, recv],
            Err(error) => {
                self.slots.put(send);
                return Err(error);
            }
        };
        let mut taken = ProvidedCall {
            token,
            copy: None,
            has_begun: false,
            name: by.name.to_string(),
            dtype: by.dtype,
            is_uneven: by.uneven.is_some(),
            collective,
            root,
            combine,
            operation_bytes,
            src: blocks_in(&slots[0], src),
            dst: blocks_in(&slots[1], dst),
            slots,
            results: Regions::from_slice(dst.regions()),
        };
        if src.bytes() > 0 {
            let gpu = self.gpu.clone();
            let _entered = gpu.enter()?;
            match self.copy_out(src.regions(), &taken.slots[0]) {
                Ok(number) => taken.copy = Some(number),
                Err(error) => {
                    // Some of the pieces may be on their way; the first error is the one that tells why.
                    let _ = self.out.finish();
                    taken.slots.into_iter().for_each(|slot| self.slots.put(slot));
                    return Err(error);
                }
            }
        }
        self.provided = Some(Box::new(taken));
        Ok(Started::Pending)
    }

    /// Gives a call to the provider once its copy has ended.
    pub(super) fn begin_provided(&mut self, transport: &mut Router, copied: u64) -> Result<()> {
        let is_ready =
            |call: &&mut Box<ProvidedCall>| !call.has_begun && call.copy.is_none_or(|number| number < copied);
        let Some(call) = self.provided.as_mut().filter(is_ready) else { return Ok(()) };
        let ProvidedCall { token, dtype, collective, root, combine, operation_bytes, .. } = **call;
        let uneven = call.is_uneven.then(|| [0, 1].map(|index| call.slots[index].region()));
        let by = Provision { name: &call.name, dtype, uneven };
        let given = NodeCall { collective, root, src: &call.src, dst: &call.dst, combine, operation_bytes };
        let started = transport.provide(token, by, given)?;
        call.has_begun = started != Started::Busy;
        if started == Started::Done {
            self.arrived.push(token);
        }
        Ok(())
    }

    /// Has the result of a call that has ended land on the device; false where the token is none of a provider's.
    pub(super) fn land_provided(&mut self, token: Token, done: &mut Vec<Token>) -> Result<bool> {
        let Some(call) = self.provided.take_if(|call| call.token == token) else { return Ok(false) };
        let ProvidedCall { slots: [send, recv], results, .. } = *call;
        self.slots.put(send);
        match recv {
            MessageSlot::Nothing => done.push(token),
            slot => self.land(token, Arriving { slot, dst: results, combine: None, combined: 0 })?,
        }
        Ok(true)
    }

    /// Whether a call waits for its copy.
    pub(super) fn is_copying(&self) -> bool {
        self.provided.as_ref().is_some_and(|call| !call.has_begun)
    }

    /// Gives up the call that is under way. A library that cannot cancel may hold addresses for good: what it has got is kept.
    pub(super) fn cancel_provided(&mut self) {
        let Some(call) = self.provided.take() else { return };
        for slot in call.slots {
            if call.has_begun {
                self.slots.keep(slot)
            } else {
                self.slots.put(slot)
            }
        }
    }
}
