//! What travels through a ring: records of a header of one cache line and a body.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::memory::shared::SegmentKey;
use crate::memory::Region;
use crate::topo::Rank;
use crate::transport::Envelope;

/// Bytes of a header, and the unit of all records.
pub const HEADER: usize = 64;
const PIECE: usize = 24;
const KEY: usize = 48;
/// Bytes of a body that go into the header's line.
pub const INLINE: usize = 8;
/// Where in the line they are; what follows them is the ring's.
pub const INLINE_AT: usize = 8 * WORDS;
/// Words of what a header says; of the two others of its line one is a short body's and one the ring's.
pub const WORDS: usize = 6;
/// A slot number that names none.
pub const NO_SLOT: u32 = u32::MAX;

/// What a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// A message with its bytes. If it has a slot, it is to be acknowledged when it is received.
    Eager = 1,
    /// The announcement of a message that the receiver fetches; the body lists where its bytes lie.
    Large = 2,
    /// The next bytes of a message that comes through the ring.
    Chunk = 3,
    /// Nothing; the next record is at the ring's start.
    Skip = 4,
}

/// The first cache line of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHeader {
    /// What it is.
    pub kind: RecordKind,
    /// Bytes of the record, header included.
    pub len: usize,
    /// The message's envelope.
    pub envelope: Envelope,
    /// Bytes of the message; of a chunk: where in the message it begins.
    pub bytes: usize,
    /// The sender's number of the message.
    pub slot: u32,
    /// How many pieces the body lists.
    pub pieces: u32,
    /// How many keys the body lists.
    pub keys: u32,
    /// Bytes of the body.
    pub body: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

impl RecordHeader {
    /// The header as words.
    #[inline]
    pub fn encode(&self) -> [u64; WORDS] {
        let Envelope { channel, sequence, signature } = self.envelope;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        [
            pair(self.kind as u32 | u32::from(channel) << 16, signature),
            sequence,
            self.bytes as u64,
            self.len as u64,
            pair(self.slot, self.pieces),
            pair(self.keys, self.body),
        ]
    }

    /// The header in these words.
    #[inline]
    pub fn decode(words: [u64; WORDS]) -> Result<RecordHeader> {
        let [first, sequence, bytes, len, fifth, sixth] = words;
        let kind = match first as u8 {
            1 => RecordKind::Eager,
            2 => RecordKind::Large,
            3 => RecordKind::Chunk,
            4 => RecordKind::Skip,
            other => return Err(Error::Internal(format!("a shared-memory record of kind {other}"))),
        };
        let envelope = Envelope { channel: (first >> 16) as u16, sequence, signature: (first >> 32) as u32 };
        Ok(RecordHeader {
            kind,
            envelope,
            bytes: bytes as usize,
            len: len as usize,
            slot: fifth as u32,
            pieces: (fifth >> 32) as u32,
            keys: sixth as u32,
            body: (sixth >> 32) as u32,
        })
    }
}

/// Where a large message lies in its sender's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// Address and bytes of each piece, and the index of the key of the allocation that holds it.
    pub pieces: Vec<(u64, u64, Option<usize>)>,
    /// Shared allocations, and their address in the sender.
    pub keys: Vec<(SegmentKey, u64)>,
}

impl Listing {
    /// The listing of a message. `find` knows shared allocations.
    pub fn new(src: &[Region], find: impl Fn(usize, usize) -> Option<(SegmentKey, usize)>) -> Listing {
        let mut listing = Listing::default();
        for region in src {
            let address = region.as_ptr() as usize;
            let key = find(address, region.len()).map(|(key, offset)| {
                let known = listing.keys.iter().rposition(|(known, _)| *known == key);
                known.unwrap_or_else(|| {
                    listing.keys.push((key, (address - offset) as u64));
                    listing.keys.len() - 1
                })
            });
            listing.pieces.push((address as u64, region.len() as u64, key));
        }
        listing
    }

    /// Bytes of the body that [`encode`](Listing::encode) makes.
    pub fn encoded_len(&self) -> usize {
        Listing::bytes(self.pieces.len() as u32, self.keys.len() as u32)
    }

    /// Bytes of a listing of so many pieces and keys.
    pub fn bytes(pieces: u32, keys: u32) -> usize {
        pieces as usize * PIECE + keys as usize * KEY
    }

    /// The listing as the body of a record.
    pub fn encode(&self, body: &mut Vec<u8>) {
        body.clear();
        for (address, len, key) in &self.pieces {
            body.extend_from_slice(&address.to_le_bytes());
            body.extend_from_slice(&len.to_le_bytes());
            body.extend_from_slice(&key.map_or(u64::MAX, |key| key as u64).to_le_bytes());
        }
        for (key, base) in &self.keys {
            body.extend_from_slice(&key.pid.to_le_bytes());
            body.extend_from_slice(&key.fd.to_le_bytes());
            for word in [key.inode, key.start, key.len, key.generation, *base] {
                body.extend_from_slice(&word.to_le_bytes());
            }
        }
    }

    /// The listing in a body of rank `from` that begins with so many pieces.
    pub fn decode(from: Rank, pieces: u32, body: &[u8]) -> Result<Listing> {
        let (pieces, keys) = body
            .split_at_checked(pieces as usize * PIECE)
            .filter(|(_, keys)| keys.len().is_multiple_of(KEY))
            .ok_or_else(|| {
                Error::Internal(format!("malformed listing from rank {from}: {pieces} pieces in {} bytes", body.len()))
            })?;
        let piece = |bytes: &[u8]| {
            let key = u64_at(bytes, 16);
            (u64_at(bytes, 0), u64_at(bytes, 8), (key != u64::MAX).then_some(key as usize))
        };
        let key = |bytes: &[u8]| {
            let key = SegmentKey {
                pid: u32_at(bytes, 0),
                fd: u32_at(bytes, 4),
                inode: u64_at(bytes, 8),
                start: u64_at(bytes, 16),
                len: u64_at(bytes, 24),
                generation: u64_at(bytes, 32),
            };
            (key, u64_at(bytes, 40))
        };
        Ok(Listing {
            pieces: pieces.chunks_exact(PIECE).map(piece).collect(),
            keys: keys.chunks_exact(KEY).map(key).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;

    #[test]
    fn headers_and_listings_survive_the_ring() {
        let region = Arena::new(4096).leak();
        let base = region.as_ptr() as usize;
        let key = SegmentKey { pid: 1, fd: 2, inode: 3, start: 4096, len: 8192, generation: 9 };
        let find = |address, _| (address >= base + 100).then_some((key, address - base));
        let listing = Listing::new(&[region.part(0, 7), region.part(100, 8), region.part(200, 9)], find);
        assert_eq!(listing.keys, [(key, base as u64)]);
        let mut body = Vec::new();
        listing.encode(&mut body);
        assert_eq!(body.len(), listing.encoded_len());
        let header = RecordHeader {
            kind: RecordKind::Large,
            len: 640,
            envelope: Envelope { channel: 5, sequence: u64::MAX - 1, signature: 0xdead_beef },
            bytes: 5 << 32,
            slot: 17,
            pieces: 3,
            keys: 1,
            body: body.len() as u32,
        };
        assert_eq!(RecordHeader::decode(header.encode()), Ok(header));
        assert_eq!(Listing::decode(Rank(1), header.pieces, &body), Ok(listing));
    }
}
