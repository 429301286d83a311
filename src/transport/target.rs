//! What a posted receive does with the bytes of its message, wherever in the message they belong.
//!
//! A [`Target`] is a [`Sink`] that owns its lists. Transports give it runs of bytes with their offset in the message, in
//! any order; it stores them or combines them with local data, across the borders of pieces.
#![forbid(unsafe_code)]

use super::Sink;
use crate::device::host::{combine, Combine};
use crate::memory::{Arena, Bytes, InProcess};
use smallvec::SmallVec;

/// Bytes of a kept message that are reduced at a time, so that they stay in cache.
const STAGED: usize = 8 << 10;

/// Pieces in message order, and where in the message each one ends.
#[derive(Debug, Clone)]
pub struct Pieces<Space = InProcess> {
    regions: SmallVec<[Bytes<'static, Space>; 4]>,
    ends: SmallVec<[usize; 4]>,
}

impl<Space> Pieces<Space> {
    /// Pieces in message order.
    pub fn new(regions: &[Bytes<'static, Space>]) -> Pieces<Space> {
        let mut end = 0;
        let ends = regions.iter().map(|region| {
            end += region.len();
            end
        });
        Pieces { ends: ends.collect(), regions: regions.into() }
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The contiguous run at `offset` of the message, `most` bytes at most.
    pub fn run(&self, offset: usize, most: usize) -> Bytes<'static, Space> {
        let index = self.ends.partition_point(|&end| end <= offset);
        let inside = offset - if index == 0 { 0 } else { self.ends[index - 1] };
        let piece = self.regions[index];
        piece.part(inside, most.min(piece.len() - inside))
    }

    /// Appends the runs that make up `len` bytes from `offset`, `most` runs at most; returns the bytes they cover.
    pub fn runs<'a>(&self, offset: usize, len: usize, most: usize, runs: &mut impl Extend<Bytes<'a, Space>>) -> usize
    where
        Space: 'a,
    {
        let mut done = 0;
        let first = self.ends.partition_point(|&end| end <= offset);
        for (&end, piece) in self.ends[first..].iter().zip(&self.regions[first..]).take(most) {
            if done == len {
                break;
            }
            let take = (len - done).min(end - offset - done);
            runs.extend([piece.part(piece.len() - (end - offset - done), take)]);
            done += take;
        }
        done
    }
}

/// An owned [`Sink`].
#[derive(Debug, Clone)]
pub struct Target {
    dst: Pieces,
    reduce: Option<(Pieces, Combine)>,
}

impl Target {
    /// The target for a sink.
    pub fn new(sink: Sink<'_>) -> Target {
        match sink {
            Sink::Store(dst) => Target { dst: Pieces::new(dst), reduce: None },
            Sink::Reduce { local, dst, combine } => {
                Target { dst: Pieces::new(dst), reduce: Some((Pieces::new(local), combine)) }
            }
        }
    }

    /// Bytes of the message it takes.
    pub fn bytes(&self) -> usize {
        self.dst.bytes()
    }

    /// The pieces to store into, when nothing is to be combined.
    pub fn store(&self) -> Option<&Pieces> {
        self.reduce.is_none().then_some(&self.dst)
    }

    /// Bytes that cannot be taken apart: the element size of a reduction.
    pub fn grain(&self) -> usize {
        self.reduce.as_ref().map_or(1, |(_, how)| how.dtype.size())
    }

    /// Takes the bytes of the message from `offset`. For a reduction both ends lie between elements.
    pub fn consume(&self, offset: usize, incoming: Bytes<'_>) {
        let mut done = 0;
        while done < incoming.len() {
            let at = offset + done;
            let dst = self.dst.run(at, incoming.len() - done);
            match &self.reduce {
                None => {
                    dst.copy_part_from(incoming.part(done, dst.len()), self.bytes());
                    done += dst.len();
                }
                Some((local, how)) => {
                    let local = local.run(at, dst.len());
                    let len = local.len();
                    combine(*how, local, incoming.part(done, len), dst.part(0, len));
                    done += len;
                }
            }
        }
    }

    /// Takes the bytes of the message from `offset`, which were kept. For a reduction both ends lie between elements. `staging` is of
    /// the caller's keeping, and may be empty.
    pub fn consume_copy(&self, offset: usize, bytes: &[u8], staging: &mut Arena) {
        let mut done = 0;
        while done < bytes.len() && self.reduce.is_none() {
            let dst = self.dst.run(offset + done, bytes.len() - done);
            dst.write(&bytes[done..done + dst.len()]);
            done += dst.len();
        }
        while done < bytes.len() {
            if staging.is_empty() {
                *staging = Arena::new(STAGED);
            }
            let part = &bytes[done..bytes.len().min(done + STAGED)];
            let staged = staging.region().part(0, part.len());
            staged.write(part);
            self.consume(offset + done, staged);
            done += part.len();
        }
    }
}
