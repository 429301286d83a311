//! Several calls of one group as one: where their data lies, one behind another.
//!
//! A plan counts bytes in the concatenation of the calls' blocks, and a piece of it becomes as many regions as it has parts
//! ([`Concatenation::parts`]). Nothing is brought together in memory, but for short data in many parts.
#![forbid(unsafe_code)]

use super::device::Device;
use super::CollectiveCall;
use crate::error::Result;
use crate::exec::{Started, Token};
use crate::health::CallSummary;
use crate::memory::DeviceRegion;

/// From how many parts on data is brought together that is short: a message of many parts costs more than a copy of each.
const MANY_PARTS: usize = 4;
/// The longest part on the average.
const SHORT_PART_BYTES: usize = 4096;
/// The longest data.
const MOST_PACKED_BYTES: usize = 1 << 20;
/// Where packed data begins at multiples of.
const LINE_BYTES: usize = 64;
/// What packed data takes at most beside the scratch of a plan: what is sent and what is received.
pub const PACKED_ROOM_BYTES: usize = 2 * (MOST_PACKED_BYTES + LINE_BYTES);

/// Regions one behind another, as one run of bytes.
#[derive(Debug, Clone, Default)]
pub struct Concatenation {
    regions: Vec<DeviceRegion>,
    /// Where each of them ends, counted from the first one's start.
    ends: Vec<usize>,
}

/// What a call has that stands for several.
#[derive(Debug, Clone)]
pub struct Joined {
    /// Its send buffer.
    pub input: Concatenation,
    /// Its receive buffer.
    pub output: Concatenation,
    /// Whether the data is brought together in memory of Strata's, for it lies in many short parts.
    pub is_packed: bool,
    /// Whether the two overlap as NCCL's in-place convention says; no packed ones do.
    pub in_place: bool,
    /// What is copied before it begins, from where and to where: the input of calls that are not in place, beside others that are,
    /// unless it is brought together. A device may do them, and what brings data together, in any order.
    pub copies: Vec<(DeviceRegion, DeviceRegion)>,
    /// The calls, for those who follow or record them.
    pub calls: Vec<CollectiveCall>,
    /// What all ranks must agree on.
    pub summary: CallSummary,
}

impl Joined {
    /// Has short data brought together that lies in many parts.
    pub fn pack(&mut self) {
        let sides = [&self.input, &self.output];
        self.is_packed =
            sides.iter().all(|side| side.bytes() <= MOST_PACKED_BYTES) && sides.iter().any(|side| side.is_scattered());
        self.in_place &= !self.is_packed;
    }

    /// Whether data is copied on this rank before it runs.
    fn moves_data(&self) -> bool {
        self.is_packed || !self.copies.is_empty()
    }
}

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallStage {
    /// Ranks tell each other what they make sure of before it, or how long blocks are.
    Words,
    /// It stands for several, whose data is being brought together.
    Gathers,
    /// It runs, as most calls do from the beginning.
    Runs,
    /// Its results are being taken apart.
    Scatters,
}

/// The scratch of a call that stands for several, the memory where their data is brought together, if it is to be, and whether
/// that is being done still; then `token` completes it. Of calls of which some are in place, the others are brought there.
pub fn gather(
    device: &mut dyn Device,
    joined: &Joined,
    scratch_bytes: usize,
    token: Token,
) -> Result<(DeviceRegion, Option<[DeviceRegion; 2]>, CallStage)> {
    joined.copies.iter().try_for_each(|&(from, to)| device.copy(None, from, to))?;
    let (scratch, packed) = match joined.is_packed {
        false => (device.scratch(scratch_bytes)?, None),
        true => {
            let (sent, received) = (joined.input.bytes(), joined.output.bytes());
            let input_at = scratch_bytes.next_multiple_of(LINE_BYTES);
            let output_at = (input_at + sent).next_multiple_of(LINE_BYTES);
            let all = device.scratch(output_at + received)?;
            let input = all.part(input_at, sent);
            let copy = |(at, from): (usize, DeviceRegion)| device.copy(None, from, input.part(at, from.len()));
            joined.input.places().try_for_each(copy)?;
            (all.part(0, scratch_bytes), Some([input, all.part(output_at, received)]))
        }
    };
    let stage = match joined.moves_data() {
        true if device.keep_order(token)? == Started::Pending => CallStage::Gathers,
        _ => CallStage::Runs,
    };
    Ok((scratch, packed, stage))
}

/// Takes the results apart that have been brought together there; `token` completes what this leaves pending.
pub fn scatter(
    device: &mut dyn Device,
    joined: &Joined,
    packed: Option<[DeviceRegion; 2]>,
    token: Token,
) -> Result<Started> {
    if let Some([_, packed]) = packed {
        joined.output.places().try_for_each(|(at, to)| device.copy(None, packed.part(at, to.len()), to))?;
    }
    Ok(if joined.moves_data() { device.step(token) } else { Started::Done })
}

impl Concatenation {
    /// Adds a region at the end.
    pub fn push(&mut self, region: DeviceRegion) {
        if region.is_empty() {
            return;
        }
        let end = self.bytes() + region.len();
        if let (Some(last), Some(last_end)) = (self.regions.last_mut(), self.ends.last_mut()) {
            if let Some(both) = last.followed_by(region) {
                (*last, *last_end) = (both, end);
                return;
            }
        }
        self.regions.push(region);
        self.ends.push(end);
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The regions.
    pub fn regions(&self) -> &[DeviceRegion] {
        &self.regions
    }

    /// The regions, each with the place where it begins.
    pub fn places(&self) -> impl Iterator<Item = (usize, DeviceRegion)> + '_ {
        self.regions.iter().zip(&self.ends).map(|(region, end)| (end - region.len(), *region))
    }

    /// Whether it lies in many short parts.
    fn is_scattered(&self) -> bool {
        let parts = self.regions.len();
        parts >= MANY_PARTS && self.bytes() <= parts * SHORT_PART_BYTES
    }

    /// The regions of `len` bytes from `offset` on, in order.
    ///
    /// # Panics
    /// When there are not so many bytes.
    pub fn parts(&self, offset: usize, len: usize, mut visit: impl FnMut(DeviceRegion)) {
        assert!(offset + len <= self.bytes(), "part {offset}+{len} of a concatenation of {} bytes", self.bytes());
        let first = self.ends.partition_point(|&end| end <= offset);
        let mut at = offset;
        for (region, end) in self.regions[first..].iter().zip(&self.ends[first..]) {
            if at >= offset + len {
                return;
            }
            let until = (offset + len).min(*end);
            visit(region.part(region.len() - (end - at), until - at));
            at = until;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;

    #[test]
    fn every_part_of_a_concatenation_has_its_bytes_in_order() {
        let memory = Arena::new(64).leak().as_device();
        let lens = [(0, 3), (10, 0), (3, 4), (40, 5), (20, 1), (21, 7)];
        let mut all = Concatenation::default();
        lens.iter().for_each(|&(at, len)| all.push(memory.part(at, len)));
        let bytes: Vec<u64> = lens.iter().flat_map(|&(at, len)| at as u64..(at + len) as u64).collect();
        assert_eq!((all.bytes(), all.regions().len()), (bytes.len(), 3), "neighbours are one region");
        for offset in 0..=bytes.len() {
            for len in 0..=bytes.len() - offset {
                let mut seen = Vec::new();
                all.parts(offset, len, |part| {
                    let at = part.address() - memory.address();
                    assert!(!part.is_empty());
                    seen.extend(at..at + part.len() as u64);
                });
                assert_eq!(seen, bytes[offset..offset + len], "{offset}+{len}");
            }
        }
    }
}
