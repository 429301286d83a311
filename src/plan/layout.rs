//! From chunks to bytes: where each chunk of a plan lies for a given count, element size and segment.
//!
//! A block of `count` elements is cut into `segments` equal runs (the last may be shorter), and each run into
//! `chunks_per_block` chunks: all of the same size `chunk_elems`, a multiple of 64 bytes, but for a shorter one and
//! empty ones at the end. So a row of chunks is contiguous, and a scratch slot of `chunk_elems` holds any chunk.
#![forbid(unsafe_code)]

use super::{Buffer, Span};

/// Consecutive bytes of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The buffer.
    pub buffer: Buffer,
    /// The first byte, counted from the buffer's start.
    pub offset: usize,
    /// How many bytes; at least one.
    pub len: usize,
}

/// The sizes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    elem_bytes: usize,
    count: usize,
    chunks_per_block: usize,
    segment_elems: usize,
    segments: usize,
    scratch_slot_bytes: usize,
    scratch_chunks: usize,
}

/// Chunks and segments begin at multiples of this many bytes of their block.
const ALIGN_BYTES: usize = 64;

impl Layout {
    /// The layout for blocks of `count` elements of `elem_bytes`, cut into segments of about `segment_bytes` of each
    /// block. `chunks_per_block` and `scratch_chunks` are the plan's.
    pub fn new(
        count: usize,
        elem_bytes: usize,
        chunks_per_block: usize,
        scratch_chunks: usize,
        segment_bytes: usize,
    ) -> Layout {
        let align = (ALIGN_BYTES / elem_bytes).max(1);
        let wanted = (segment_bytes / elem_bytes).max(align);
        let segments = count.div_ceil(wanted).max(1);
        let segment_elems = count.div_ceil(segments).next_multiple_of(align).max(align);
        let segments = count.div_ceil(segment_elems).max(1);
        let mut layout = Layout {
            elem_bytes,
            count,
            chunks_per_block,
            segment_elems,
            segments,
            scratch_slot_bytes: 0,
            scratch_chunks,
        };
        layout.scratch_slot_bytes = layout.chunk_elems(0) * elem_bytes;
        layout
    }

    /// How many times the plan runs.
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// Bytes of scratch one segment needs.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_slot_bytes * self.scratch_chunks
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.count * self.elem_bytes
    }

    /// Bytes of each block that the first so many segments cover.
    pub fn front_bytes(&self, segments: usize) -> usize {
        (segments * self.segment_elems).min(self.count) * self.elem_bytes
    }

    /// Elements of each block that a segment covers.
    fn elems_in(&self, segment: usize) -> usize {
        self.segment_elems.min(self.count - (segment * self.segment_elems).min(self.count))
    }

    /// Elements of a full chunk in a segment.
    fn chunk_elems(&self, segment: usize) -> usize {
        let align = (ALIGN_BYTES / self.elem_bytes).max(1);
        self.elems_in(segment).div_ceil(self.chunks_per_block).next_multiple_of(align)
    }

    /// Appends the pieces of `span` in `segment`, in order, without empty ones, adjacent ones joined.
    /// `slot` is the set of scratch the segment uses: the segment's number modulo the window.
    pub fn pieces(&self, segment: usize, slot: usize, span: &Span, pieces: &mut Vec<Piece>) {
        let full = self.chunk_elems(segment);
        let elems = self.elems_in(segment);
        let per_block = self.chunks_per_block;
        let mut done = 0;
        while done < span.len as usize {
            let phase = (span.like as usize + done) % per_block;
            let run = match span.buffer {
                // Chunks of the last segment may be shorter than their slots; each stays in its own, so that it is found
                // there whichever others it is named with.
                Buffer::Scratch => 1,
                _ => (span.len as usize - done).min(per_block - phase),
            };
            let from = (phase * full).min(elems);
            let to = ((phase + run) * full).min(elems);
            let offset = match span.buffer {
                Buffer::Scratch => slot * self.scratch_bytes() + (span.start as usize + done) * self.scratch_slot_bytes,
                _ => {
                    let block = (span.start as usize + done) / per_block;
                    (block * self.count + segment * self.segment_elems + from) * self.elem_bytes
                }
            };
            push(pieces, Piece { buffer: span.buffer, offset, len: (to - from) * self.elem_bytes });
            done += run;
        }
    }
}

fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    if piece.len == 0 {
        return;
    }
    match pieces.last_mut() {
        Some(last) if last.buffer == piece.buffer && last.offset + last.len == piece.offset => last.len += piece.len,
        _ => pieces.push(piece),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces_of(layout: &Layout, segment: usize, span: Span) -> Vec<(usize, usize)> {
        let mut pieces = Vec::new();
        layout.pieces(segment, 0, &span, &mut pieces);
        pieces.iter().map(|piece| (piece.offset, piece.len)).collect()
    }

    #[test]
    fn chunks_and_segments_cover_every_block_once() {
        for count in [0usize, 1, 15, 16, 17, 100, 1000, 4097] {
            for (per_block, segment_bytes) in [(1, 64), (3, 256), (8, 1 << 20), (7, 100)] {
                let layout = Layout::new(count, 4, per_block, 0, segment_bytes);
                let mut seen = vec![0; 3 * count * 4];
                for segment in 0..layout.segments() {
                    for chunk in 0..3 * per_block {
                        for (offset, len) in pieces_of(&layout, segment, Span::output(chunk, 1)) {
                            seen[offset..offset + len].iter_mut().for_each(|times| *times += 1);
                        }
                    }
                }
                assert!(seen.iter().all(|&times| times == 1), "count {count} chunks {per_block}");
            }
        }
    }

    #[test]
    fn a_span_over_blocks_is_one_piece_when_the_message_is_one_segment() {
        let layout = Layout::new(100, 4, 2, 0, 1 << 20);
        assert_eq!(pieces_of(&layout, 0, Span::output(2, 4)), [(400, 800)]);
        let cut = Layout::new(128, 4, 2, 0, 256);
        assert_eq!(pieces_of(&cut, 1, Span::output(2, 4)), [(512 + 256, 256), (1024 + 256, 256)]);
    }

    #[test]
    fn a_scratch_slot_takes_a_chunk_of_any_size() {
        let layout = Layout::new(40, 4, 3, 4, 1 << 20);
        assert_eq!(pieces_of(&layout, 0, Span::scratch(1, 1, 2)), [(64, 32)]);
        assert_eq!(pieces_of(&layout, 0, Span::scratch(0, 2, 2)), [(0, 32), (64, 64)]);
        assert_eq!(layout.scratch_bytes(), 256);
    }

    #[test]
    fn a_chunk_is_found_whichever_others_it_is_named_with() {
        // Slots hold 32 elements; those of the last segment are filled with 16.
        let layout = Layout::new(80, 4, 2, 4, 192);
        assert_eq!((layout.segments(), layout.scratch_bytes()), (2, 512));
        for segment in 0..2 {
            for span in [Span::scratch(0, 4, 0), Span::scratch(1, 3, 1), Span::output(0, 4)] {
                let one_by_one = |i| Span { start: span.start + i, like: span.like + i, len: 1, ..span };
                let mut pieces = Vec::new();
                (0..span.len).for_each(|i| layout.pieces(segment, 0, &one_by_one(i), &mut pieces));
                let pieces: Vec<_> = pieces.iter().map(|piece| (piece.offset, piece.len)).collect();
                assert_eq!(pieces_of(&layout, segment, span), pieces, "{span:?} of segment {segment}");
            }
        }
    }
}
