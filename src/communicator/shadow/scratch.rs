//! Device memory for the parts between two phases, one piece for each stream.
//!
//! Calls on one stream follow each other, so they may share a piece; calls on two streams may run at once, and those of
//! one group do. A piece that has become too small is kept to the end: what was issued before may still use it.

use super::subcomms::{Prepared, SubComms};
use super::Attached;
use crate::error::Code;
use crate::interface::pointer::{Buffer, Ptr};
use crate::sync::locked;
use crate::vendor::calls::{VendorAddress, VendorStream};
use crate::vendor::Library;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The least that is asked for.
const LEAST_BYTES: usize = 1 << 20;

/// Parts of a piece begin at multiples of this.
const ALIGN: usize = 512;

/// The calls of a group that can run at once in the scratch memory that their communicators may take, and the others.
/// All ranks of a communicator have the same calls of it in the group, so they decide alike.
pub fn what_fits(calls: Vec<Prepared>) -> (Vec<Prepared>, Vec<Prepared>) {
    let mut taken: Vec<(*const Attached, usize)> = Vec::new();
    calls.into_iter().partition(|call| {
        let comm = Arc::as_ptr(&call.attached);
        let index = taken.iter().position(|(other, _)| *other == comm).unwrap_or_else(|| {
            taken.push((comm, 0));
            taken.len() - 1
        });
        let bytes = taken[index].1.saturating_add(call.scratch_bytes.next_multiple_of(ALIGN));
        let most = call.attached.subcomms.get().map_or(0, SubComms::most_scratch);
        // A single call has been asked about before.
        let fits = taken[index].1 == 0 || bytes <= most;
        if fits {
            taken[index].1 = bytes;
        }
        fits
    })
}

/// Gives calls that run at once their scratch memory.
pub fn share_out(calls: &mut [Prepared], library: &Library) -> Result<(), Code> {
    let mut totals: Vec<(Arc<Attached>, VendorStream, usize)> = Vec::new();
    let mut places = Vec::new();
    for call in calls.iter().filter(|call| call.scratch_bytes > 0) {
        let same = |(comm, stream, _): &(Arc<Attached>, VendorStream, usize)| {
            Arc::ptr_eq(comm, &call.attached) && *stream == call.call.stream
        };
        let index = totals.iter().position(same).unwrap_or_else(|| {
            totals.push((call.attached.clone(), call.call.stream, 0));
            totals.len() - 1
        });
        places.push((index, totals[index].2));
        totals[index].2 += call.scratch_bytes.next_multiple_of(ALIGN);
    }
    let piece = |(comm, stream, bytes): &(Arc<Attached>, VendorStream, usize)| {
        comm.subcomms.get().map_or(Ok(0), |subcomms| subcomms.scratch(*stream, *bytes, library))
    };
    let pieces: Vec<VendorAddress> = totals.iter().map(piece).collect::<Result<_, Code>>()?;
    for (call, (index, offset)) in calls.iter_mut().filter(|call| call.scratch_bytes > 0).zip(places) {
        call.scratch = pieces[index] + offset;
    }
    Ok(())
}

/// The pieces of one communicator.
#[derive(Debug, Default)]
pub struct StreamScratch {
    pieces: Mutex<Pieces>,
}

#[derive(Debug, Default)]
struct Pieces {
    by_stream: HashMap<VendorStream, (VendorAddress, usize)>,
    outgrown: Vec<VendorAddress>,
}

impl StreamScratch {
    /// At least `bytes` bytes for a stream.
    pub fn of(&self, stream: VendorStream, bytes: usize, library: &Library) -> Result<VendorAddress, Code> {
        let mut pieces = locked(&self.pieces);
        match pieces.by_stream.get(&stream) {
            Some((address, len)) if *len >= bytes => return Ok(*address),
            _ => {}
        }
        // Twice as much each time, so that all that is kept is no more than twice what is used.
        let len = bytes.max(LEAST_BYTES).next_power_of_two();
        let mut made = Buffer::NULL;
        // SAFETY: the place must be there during the call; because it is a local.
        let place = unsafe { Ptr::to(&mut made) };
        // SAFETY: the place must be valid; because it is a local.
        library.call(|vendor| unsafe { vendor.ncclMemAlloc(place, len) })?;
        let address = made.address();
        if let Some((old, _)) = pieces.by_stream.insert(stream, (address, len)) {
            pieces.outgrown.push(old);
        }
        Ok(address)
    }

    /// Gives everything back. Nothing that was issued may still run.
    pub fn free(&self, library: &Library) {
        let Pieces { by_stream, outgrown } = std::mem::take(&mut *locked(&self.pieces));
        for address in by_stream.into_values().map(|(address, _)| address).chain(outgrown) {
            // SAFETY: the address must be of memory of the vendor's; because it came from there.
            let memory = unsafe { Buffer::from_address(address) };
            // SAFETY: the memory must be the vendor's and unused; because it came from there, and the communicators that
            // used it have ended.
            if let Err(code) = library.call(|vendor| unsafe { vendor.ncclMemFree(memory) }) {
                crate::info!("freeing scratch memory: the vendor's library returns {code}");
            }
        }
    }
}
