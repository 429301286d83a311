//! From chunks to bytes: where each chunk of a plan lies for a given count, element size and segment.
//!
//! A block of `count` elements is cut into `segments` equal runs (the last may be shorter), and each run into
//! `chunks_per_block` chunks: all of the same size `chunk_elems`, a multiple of 64 bytes, but for a shorter one and
//! empty ones at the end. So a row of chunks is contiguous, and a scratch slot of `chunk_elems` holds any chunk.
//!
//! Where blocks differ in size ([`BlockTable`]) segments are as long as before, so that a shorter block has elements in the first
//! ones only, and the longest says how many there are. Each block's run is cut into chunks by itself.
//!
//! Chunks may have different shares of a block ([`ChunkWeights`]): each run is cut by them, and a scratch slot holds the largest.
//!
//! Where each rank knows its own sizes only, all ranks must give the same length of segments, and a block goes as full segments
//! and a shorter one, perhaps of nothing: so its end shows in the first message that is not full, and counts that differ between
//! ranks are noticed wherever they do.
#![forbid(unsafe_code)]

use super::blocks::{BlockTable, Extent};
use super::weights::ChunkWeights;
use super::{Buffer, CodedScratch, Span};
use std::sync::Arc;

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    elem_bytes: usize,
    /// Elements of a block; of the longest where they differ.
    count: usize,
    chunks_per_block: usize,
    segment_elems: usize,
    segments: usize,
    scratch_slot_bytes: usize,
    scratch_chunks: usize,
    /// The coded chunks, which lie behind the others in scratch.
    coded: Option<CodedScratch>,
    /// The blocks, where they differ in size.
    blocks: Option<Arc<BlockTable>>,
    /// Whether blocks end with a segment that is not full: this rank knows its own sizes only.
    open_ended: bool,
    /// What each chunk of a block has of it, where that differs.
    weights: Option<Arc<ChunkWeights>>,
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
            coded: None,
            blocks: None,
            open_ended: false,
            weights: None,
        };
        layout.scratch_slot_bytes = layout.chunk_elems(layout.elems_in(0)) * elem_bytes;
        layout
    }

    /// The same for blocks of different sizes.
    pub fn vectored(
        blocks: Arc<BlockTable>,
        elem_bytes: usize,
        chunks_per_block: usize,
        scratch_chunks: usize,
        segment_bytes: usize,
    ) -> Layout {
        let even = |bytes| Layout::new(blocks.longest(), elem_bytes, chunks_per_block, scratch_chunks, bytes);
        if blocks.knows_all() {
            return Layout { blocks: Some(blocks.clone()), ..even(segment_bytes) };
        }
        let align = (ALIGN_BYTES / elem_bytes).max(1);
        let longest = blocks.longest();
        let wanted = (segment_bytes / elem_bytes).max(align).checked_next_multiple_of(align);
        let mut layout = even(usize::MAX);
        // A rank whose blocks are all shorter has one segment, of whatever length: one message to each of the others.
        if let Some(segment_elems) = wanted.filter(|&elems| longest >= elems) {
            (layout.segment_elems, layout.open_ended) = (segment_elems, true);
            layout.segments = longest / segment_elems + 1;
            layout.scratch_slot_bytes = layout.chunk_elems(segment_elems) * elem_bytes;
        }
        Layout { blocks: Some(blocks), ..layout }
    }

    /// The same for a plan that has coded chunks. A chunk's elements are coded by themselves, so that a message has as many bytes
    /// as they take.
    pub fn with_coded(self, coded: Option<CodedScratch>) -> Layout {
        Layout { coded, ..self }
    }

    /// The same with chunks of different shares of their block, of which there are as many as weights. Blocks have one size.
    pub fn weighted(self, weights: Arc<ChunkWeights>) -> Layout {
        let scratch_slot_bytes = weights.longest(self.elems_in(0), self.align()) * self.elem_bytes;
        Layout { scratch_slot_bytes, weights: Some(weights), ..self }
    }

    /// Bytes of a slot for a coded chunk: of the largest.
    fn coded_slot_bytes(&self) -> usize {
        let elems = self.scratch_slot_bytes / self.elem_bytes;
        self.coded.map_or(0, |coded| coded.code.bytes(elems).next_multiple_of(ALIGN_BYTES))
    }

    /// Where the chunks that a list of spans in coded scratch names lie in the row of blocks, in elements, without empty ones.
    pub fn rows(&self, segment: usize, spans: &[Span], rows: &mut Vec<usize>) {
        rows.clear();
        let per_block = self.chunks_per_block;
        for span in spans {
            for chunk in span.like as usize..span.like as usize + span.len as usize {
                let (block, phase) = (chunk / per_block, chunk % per_block);
                let (count, at) = match &self.blocks {
                    None => (self.count, block * self.count),
                    Some(blocks) => (blocks.row_count(block), (0..block).map(|before| blocks.row_count(before)).sum()),
                };
                let elems = self.elems_of(count, segment);
                let from = self.chunk_start(phase, elems);
                if from < self.chunk_start(phase + 1, elems) {
                    rows.push(at + segment * self.segment_elems + from);
                }
            }
        }
    }

    /// Whether the last segment of one of the blocks of `span` is this one, where blocks end with one that is not full.
    pub fn ends_in(&self, segment: usize, span: &Span) -> bool {
        let Some(blocks) = self.blocks.as_ref().filter(|_| self.open_ended) else { return false };
        let (start, end) = (span.start as usize, (span.start + span.len) as usize);
        let count = |block: usize| match span.buffer {
            Buffer::Input => blocks.input().get(block).map(|extent| extent.count),
            Buffer::Output => blocks.output().get(block).map(|extent| extent.count),
            Buffer::Scratch if blocks.hands_on() => Some(blocks.held_count(block, 0)),
            Buffer::Scratch | Buffer::Coded => None,
        };
        let mut all = start / self.chunks_per_block..end.div_ceil(self.chunks_per_block);
        all.any(|block| count(block).is_some_and(|count| count / self.segment_elems == segment))
    }

    /// The blocks, where they may differ in size.
    pub fn blocks(&self) -> Option<&BlockTable> {
        self.blocks.as_deref()
    }

    /// Bytes of an element.
    pub fn elem_bytes(&self) -> usize {
        self.elem_bytes
    }

    /// Whether blocks may differ in size.
    pub fn is_vectored(&self) -> bool {
        self.blocks.is_some()
    }

    /// How many times the plan runs.
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// Bytes of scratch one segment needs.
    pub fn scratch_bytes(&self) -> usize {
        let coded = self.coded.map_or(0, |coded| coded.chunks as usize);
        self.scratch_slot_bytes * self.scratch_chunks + self.coded_slot_bytes() * coded
    }

    /// Bytes of one block; of the longest where they differ.
    pub fn block_bytes(&self) -> usize {
        self.count * self.elem_bytes
    }

    /// Bytes of each block that the first so many segments cover. Where blocks differ in size all is covered at once.
    pub fn front_bytes(&self, segments: usize) -> usize {
        if self.is_vectored() {
            return if segments < self.segments { 0 } else { usize::MAX };
        }
        (segments * self.segment_elems).min(self.count) * self.elem_bytes
    }

    /// Bytes of each block that a segment covers; of all of them where blocks differ in size.
    pub fn segment_bytes(&self) -> usize {
        if self.is_vectored() {
            usize::MAX
        } else {
            self.segment_elems * self.elem_bytes
        }
    }

    /// Elements of each block that a segment covers; of the longest where they differ.
    fn elems_in(&self, segment: usize) -> usize {
        self.elems_of(self.count, segment)
    }

    /// The same of a block of `count` elements.
    fn elems_of(&self, count: usize, segment: usize) -> usize {
        self.segment_elems.min(count - (segment * self.segment_elems).min(count))
    }

    /// Elements of which chunks begin at multiples.
    fn align(&self) -> usize {
        (ALIGN_BYTES / self.elem_bytes).max(1)
    }

    /// Elements of a full chunk where a segment has so many of a block.
    fn chunk_elems(&self, elems: usize) -> usize {
        elems.div_ceil(self.chunks_per_block).next_multiple_of(self.align())
    }

    /// Where a chunk begins in so many elements of a block; at their end for the number of chunks.
    fn chunk_start(&self, chunk: usize, elems: usize) -> usize {
        match &self.weights {
            None => (chunk * self.chunk_elems(elems)).min(elems),
            Some(weights) => weights.start(chunk, elems, self.align()),
        }
    }

    /// The place of a slot in the set of scratch memory `set`, and bytes of a chunk of so many elements there.
    fn own_piece(&self, buffer: Buffer, set: usize, chunk: usize, elems: usize) -> Piece {
        let (before, slot, len) = match (buffer, self.coded) {
            (Buffer::Coded, Some(coded)) => {
                (self.scratch_chunks * self.scratch_slot_bytes, self.coded_slot_bytes(), coded.code.bytes(elems))
            }
            _ => (0, self.scratch_slot_bytes, elems * self.elem_bytes),
        };
        Piece { buffer, offset: set * self.scratch_bytes() + before + chunk * slot, len }
    }

    /// Appends the pieces of `span` in `segment`, in order, without empty ones, adjacent ones joined, but for coded ones.
    /// `slot` is the set of scratch the segment uses: the segment's number modulo the window.
    pub fn pieces(&self, segment: usize, slot: usize, span: &Span, pieces: &mut Vec<Piece>) {
        if let Some(blocks) = &self.blocks {
            return self.pieces_of_blocks(blocks, (segment, slot), span, pieces);
        }
        let elems = self.elems_in(segment);
        let per_block = self.chunks_per_block;
        let mut done = 0;
        while done < span.len as usize {
            let phase = (span.like as usize + done) % per_block;
            // Chunks of the last segment may be shorter than their slots; each stays in its own, so that it is found there
            // whichever others it is named with.
            let run = if span.buffer.is_own() { 1 } else { (span.len as usize - done).min(per_block - phase) };
            let (from, to) = (self.chunk_start(phase, elems), self.chunk_start(phase + run, elems));
            let at = span.start as usize + done;
            push(
                pieces,
                match span.buffer.is_own() {
                    true => self.own_piece(span.buffer, slot, at, to - from),
                    false => {
                        let first = at / per_block * self.count + segment * self.segment_elems + from;
                        let (offset, len) = (first * self.elem_bytes, (to - from) * self.elem_bytes);
                        Piece { buffer: span.buffer, offset, len }
                    }
                },
            );
            done += run;
        }
    }

    /// The same where blocks differ in size.
    fn pieces_of_blocks(
        &self,
        blocks: &BlockTable,
        (segment, slot): (usize, usize),
        span: &Span,
        pieces: &mut Vec<Piece>,
    ) {
        let per_block = self.chunks_per_block;
        let mut done = 0;
        while done < span.len as usize {
            let (at, like) = (span.start as usize + done, span.like as usize + done);
            let (phase, left) = (at % per_block, span.len as usize - done);
            let (Extent { count, at: place }, phase, run) = match span.buffer {
                Buffer::Scratch | Buffer::Coded => {
                    (Extent { count: blocks.held_count(at, like / per_block), at: 0 }, like % per_block, 1)
                }
                Buffer::Input => (blocks.input()[at / per_block], phase, left.min(per_block - phase)),
                Buffer::Output => (blocks.output()[at / per_block], phase, left.min(per_block - phase)),
            };
            let elems = self.elems_of(count, segment);
            let (from, to) = (self.chunk_start(phase, elems), self.chunk_start(phase + run, elems));
            push(
                pieces,
                match span.buffer.is_own() {
                    true => self.own_piece(span.buffer, slot, at, to - from),
                    false => {
                        let first = place + segment * self.segment_elems + from;
                        let (offset, len) = (first * self.elem_bytes, (to - from) * self.elem_bytes);
                        Piece { buffer: span.buffer, offset, len }
                    }
                },
            );
            done += run;
        }
    }
}

fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    if piece.len == 0 {
        return;
    }
    // How many elements a coded piece has follows from its length.
    let may_join = |last: &Piece| last.buffer == piece.buffer && piece.buffer != Buffer::Coded;
    match pieces.last_mut() {
        Some(last) if may_join(last) && last.offset + last.len == piece.offset => last.len += piece.len,
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
    fn chunks_and_segments_cover_blocks_of_any_sizes_once_and_nothing_between() {
        use super::super::blocks::Extent;
        use crate::plan::Collective;
        use crate::topo::Rank;
        for counts in [[0usize, 0, 0], [1, 0, 300], [17, 16, 15], [4097, 3, 1000]] {
            for (per_block, segment_bytes) in [(1, 64), (3, 256), (8, 1 << 20), (7, 100)] {
                // Two elements between blocks, the last one first.
                let at = [counts[2] + 2, counts[2] + counts[0] + 4, 0];
                let blocks: Vec<Extent> = (0..3).map(|i| Extent { count: counts[i], at: at[i] }).collect();
                let mut wanted = vec![0; 4 * (counts.iter().sum::<usize>() + 4)];
                blocks.iter().for_each(|block| wanted[4 * block.at..4 * (block.at + block.count)].fill(1));
                let table = Arc::new(BlockTable::of_all(Collective::AllGather, Rank(1), blocks));
                let layout = Layout::vectored(table, 4, per_block, per_block, segment_bytes);
                let mut seen = vec![0; wanted.len()];
                for segment in 0..layout.segments() {
                    for chunk in 0..3 * per_block {
                        let found = pieces_of(&layout, segment, Span::output(chunk, 1));
                        let bytes: usize = found.iter().map(|piece| piece.1).sum();
                        for (offset, len) in found {
                            seen[offset..offset + len].iter_mut().for_each(|times| *times += 1);
                        }
                        let slot = pieces_of(&layout, segment, Span::scratch(chunk % per_block, 1, chunk));
                        assert_eq!(slot.iter().map(|piece| piece.1).sum::<usize>(), bytes, "a slot is as large");
                        assert!(slot.iter().all(|piece| piece.0 + piece.1 <= layout.scratch_bytes()));
                        if chunk / per_block == 1 {
                            let own = pieces_of(&layout, segment, Span::input(chunk % per_block, 1));
                            assert_eq!(own.iter().map(|piece| piece.1).sum::<usize>(), bytes, "the own block");
                        }
                    }
                }
                assert_eq!(seen, wanted, "counts {counts:?} chunks {per_block}");
            }
        }
    }

    /// The lengths of the messages that a block goes in, as a rank says whose longest block has so many elements.
    fn messages_of(block: usize, longest: usize, segment_bytes: usize) -> Vec<usize> {
        use super::super::blocks::packed;
        let table = Arc::new(BlockTable::of_pairs(packed(&[block, longest]), packed(&[0, 0])));
        let (layout, span) = (Layout::vectored(table, 4, 1, 0, segment_bytes), Span::input(0, 1));
        let told = |segment: &usize| *segment == 0 || layout.ends_in(*segment, &span);
        let bytes = |segment: usize| pieces_of(&layout, segment, span).iter().map(|piece| piece.1).sum::<usize>();
        (0..layout.segments()).filter(|segment| bytes(*segment) > 0 || told(segment)).map(bytes).collect()
    }

    #[test]
    fn a_block_goes_in_the_same_messages_whatever_else_a_rank_has_and_another_block_in_others() {
        for segment_bytes in [64, 100, 256, usize::MAX] {
            let blocks = [0usize, 1, 15, 16, 17, 31, 32, 33, 64, 100, 128, 1000];
            let messages = blocks.map(|block| {
                let alone = messages_of(block, block, segment_bytes);
                assert_eq!(alone.iter().sum::<usize>(), 4 * block);
                for longest in blocks.into_iter().filter(|&longest| longest >= block) {
                    assert_eq!(messages_of(block, longest, segment_bytes), alone, "{block} {longest} {segment_bytes}");
                }
                alone
            });
            for (index, one) in messages.iter().enumerate() {
                for other in &messages[..index] {
                    // Or else a rank that gives a wrong count would wait in vain, and another would not notice.
                    let both = one.iter().zip(other);
                    assert!(both.clone().any(|(one, other)| one != other), "{one:?} {other:?} of {segment_bytes}");
                }
            }
        }
    }

    #[test]
    fn blocks_of_one_size_lie_as_even_ones_do() {
        use super::super::blocks::packed;
        use crate::plan::Collective;
        use crate::topo::Rank;
        let table = Arc::new(BlockTable::of_all(Collective::AllGather, Rank(0), packed(&[77; 4])));
        let (even, vectored) = (Layout::new(77, 4, 3, 6, 128), Layout::vectored(table, 4, 3, 6, 128));
        assert_eq!(even.segments(), vectored.segments());
        for segment in 0..even.segments() {
            for span in [Span::output(0, 12), Span::output(4, 5), Span::scratch(1, 4, 5), Span::input(1, 2)] {
                assert_eq!(pieces_of(&even, segment, span), pieces_of(&vectored, segment, span), "{span:?}");
            }
        }
    }

    #[test]
    fn weighted_chunks_and_segments_cover_every_block_once_and_fit_their_slots() {
        let weights = Arc::new(ChunkWeights::new(&[0, 3, 1, 7, 0]).unwrap());
        for count in [0usize, 1, 16, 100, 1000, 4097] {
            for segment_bytes in [64, 320, 1 << 20] {
                let layout = Layout::new(count, 4, 5, 5, segment_bytes).weighted(weights.clone());
                let mut seen = vec![0; 2 * count * 4];
                for segment in 0..layout.segments() {
                    for chunk in 0..10 {
                        let bytes = |pieces: &[(usize, usize)]| pieces.iter().map(|piece| piece.1).sum::<usize>();
                        let found = pieces_of(&layout, segment, Span::output(chunk, 1));
                        for &(offset, len) in &found {
                            seen[offset..offset + len].iter_mut().for_each(|times| *times += 1);
                        }
                        let slot = pieces_of(&layout, segment, Span::scratch(chunk % 5, 1, chunk));
                        assert_eq!(bytes(&slot), bytes(&found));
                        let end = (chunk % 5 + 1) * layout.scratch_bytes() / 5;
                        assert!(slot.iter().all(|piece| piece.0 + piece.1 <= end), "{slot:?} in {layout:?}");
                        assert!(chunk % 5 != 0 && chunk % 5 != 4 || found.is_empty(), "no parts, no bytes");
                    }
                }
                assert!(seen.iter().all(|&times| times == 1), "count {count}");
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
