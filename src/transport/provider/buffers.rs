//! The memory of a call as a provider gets it: buffers in one piece, and where in them blocks lie that differ in size.

use super::UnevenBlocks;
use crate::error::{Error, Result};
use crate::memory::{Arena, Region};
use crate::plan::Collective;
use crate::topo::Rank;
use crate::transport::Blocks;

/// Memory of a call, as a provider sees it.
#[derive(Debug)]
pub(super) struct ProviderBuffer {
    /// In one piece.
    pub whole: Region,
    /// Ours, if that is not the call's memory.
    pub staging: Option<Arena>,
}

/// Blocks of a buffer, which may differ in size.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockList {
    /// Elements of each.
    pub counts: Vec<u64>,
    /// Where each begins, in elements from the buffer's start.
    pub places: Vec<u64>,
}

impl ProviderBuffer {
    /// Memory in one piece, or of ours in its place.
    pub fn of(regions: &[Region]) -> Result<ProviderBuffer> {
        match joined(regions) {
            Some(whole) => Ok(ProviderBuffer { whole, staging: None }),
            None => ProviderBuffer::staged(regions.iter().map(|region| region.len()).sum()),
        }
    }

    /// Memory of ours.
    pub fn staged(bytes: usize) -> Result<ProviderBuffer> {
        let arena = Arena::try_new(bytes);
        let mut arena =
            arena.ok_or_else(|| Error::System(format!("no memory for {bytes} bytes of a provider's call")))?;
        // SAFETY: the memory must outlive every use; because the buffer keeps it beside the region, and a call that is cancelled
        // forgets it.
        let whole = unsafe { arena.region().unbound() };
        Ok(ProviderBuffer { whole, staging: Some(arena) })
    }

    /// The blocks of a buffer that differ in size. Where they do not follow one another they stay where they are in the `buffer`
    /// of the call if a provider takes places up to the `farthest`, and else go through memory of ours.
    pub fn of_blocks(
        blocks: &Blocks,
        (buffer, elem_bytes): (Region, usize),
        farthest: Option<u64>,
    ) -> Result<(ProviderBuffer, BlockList)> {
        let counts: Vec<u64> = (0..blocks.len()).map(|block| (blocks.block_bytes(block) / elem_bytes) as u64).collect();
        if joined(blocks.regions()).is_none() {
            let places = farthest.and_then(|farthest| places_in(buffer, blocks, elem_bytes, farthest));
            if let Some(places) = places {
                return Ok((ProviderBuffer { whole: buffer, staging: None }, BlockList { counts, places }));
            }
        }
        let places = counts.iter().scan(0, |end, count| Some(std::mem::replace(end, *end + count))).collect();
        Ok((ProviderBuffer::of(blocks.regions())?, BlockList { counts, places }))
    }

    /// Fills memory of ours with what lies in several pieces.
    pub fn gather(&self, regions: &[Region]) {
        let mut at = 0;
        for region in regions.iter().filter(|_| self.staging.is_some()) {
            self.whole.part(at, region.len()).copy_from(*region);
            at += region.len();
        }
    }

    /// Copies memory of ours to where it belongs.
    pub fn scatter(&self, regions: &[Region]) {
        let mut at = 0;
        for region in regions.iter().filter(|_| self.staging.is_some()) {
            region.copy_from(self.whole.part(at, region.len()));
            at += region.len();
        }
    }
}

/// Regions as one, if each begins where the one before it ends.
fn joined(regions: &[Region]) -> Option<Region> {
    regions.iter().try_fold(Region::EMPTY, |whole, region| match whole.is_empty() {
        true => Some(*region),
        false => whole.followed_by(*region),
    })
}

/// Where blocks begin in a buffer, in elements, if each lies there in one piece and none begins farther than that.
fn places_in(buffer: Region, blocks: &Blocks, elem_bytes: usize, farthest: u64) -> Option<Vec<u64>> {
    let end = buffer.address() + buffer.len() as u64;
    let place = |region: &Region| {
        let is_there = region.address() >= buffer.address() && region.address() + region.len() as u64 <= end;
        let place = region.address().wrapping_sub(buffer.address()) / elem_bytes as u64;
        (is_there && place <= farthest).then_some(place)
    };
    let places = (0..blocks.len()).map(|block| match blocks.block(block) {
        // Nothing lies anywhere.
        [] => Some(0),
        [whole] => place(whole),
        _ => None,
    });
    places.collect()
}

/// Whether buffers overlap as NCCL's in-place convention says.
pub(super) fn is_in_place(
    collective: Collective,
    me: Rank,
    (send, recv): (Region, Region),
    block_bytes: usize,
) -> bool {
    if send.is_empty() || recv.is_empty() {
        return false;
    }
    let (send, recv, own) = (send.address(), recv.address(), (me.index() * block_bytes) as u64);
    match collective {
        Collective::AllGather | Collective::Gather => send == recv + own,
        Collective::ReduceScatter | Collective::Scatter => recv == send + own,
        _ => send == recv,
    }
}

/// The same of buffers whose blocks differ in size.
pub(super) fn is_in_place_among(
    collective: Collective,
    me: Rank,
    (send, recv): (Region, Region),
    blocks: &UnevenBlocks,
    elem_bytes: usize,
) -> bool {
    if send.is_empty() || recv.is_empty() {
        return false;
    }
    let own = |buffer: Region, list: &BlockList| {
        list.places.get(me.index()).map(|place| buffer.address() + place * elem_bytes as u64)
    };
    match collective {
        Collective::AllGather | Collective::Gather => own(recv, &blocks.recv) == Some(send.address()),
        Collective::ReduceScatter | Collective::Scatter => own(send, &blocks.send) == Some(recv.address()),
        _ => false,
    }
}

/// The bytes of a block.
pub(super) fn block_bytes(src: &Blocks, dst: &Blocks) -> usize {
    match src.is_empty() {
        false => src.block_bytes(0),
        true if dst.is_empty() => 0,
        true => dst.block_bytes(0),
    }
}
