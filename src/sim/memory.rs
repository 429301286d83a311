//! The buffers of one simulated rank.
#![forbid(unsafe_code)]

use crate::plan::layout::{Layout, Piece};
use crate::plan::{Buffer, Collective, Plan};
use std::ops::Range;

/// The user's buffers and the scratch of one rank. In place, `Input` and `Output` share bytes as NCCL has it.
#[derive(Debug, Default)]
pub(super) struct RankMemory {
    user: Vec<u8>,
    scratch: Vec<u8>,
    input_at: usize,
    output_at: usize,
    output_len: usize,
    input_len: usize,
    kept: Option<Kept>,
}

/// The receive buffer as it was when each part of it became final, where parts are overwritten then.
#[derive(Debug)]
struct Kept {
    layout: Layout,
    output: Vec<u8>,
}

/// What a program writes into memory that is final.
const OVERWRITTEN: u8 = 0x3c;

impl RankMemory {
    /// The memory for a run of `plan`: the given input, and garbage in everything else.
    pub(super) fn new(plan: &Plan, layout: &Layout, window: usize, input: &[u8]) -> RankMemory {
        let (shape, me) = (&plan.shape, plan.rank.index());
        let (output_len, within) = match layout.blocks() {
            None => (shape.output_blocks(plan.rank) * layout.block_bytes(), me * layout.block_bytes()),
            Some(blocks) => {
                let whole = if matches!(shape.collective, Collective::AllGather | Collective::Gather) {
                    blocks.output()
                } else {
                    blocks.input()
                };
                let at = whole.get(me).map_or(0, |block| block.at);
                (blocks.spans().1 * layout.elem_bytes(), at * layout.elem_bytes())
            }
        };
        let (input_at, output_at) = match shape.collective {
            _ if !shape.in_place || input.is_empty() || output_len == 0 => (0, input.len()),
            Collective::AllGather | Collective::Gather => (within, 0),
            Collective::ReduceScatter | Collective::Scatter => (0, within),
            _ => (0, 0),
        };
        let len = (input_at + input.len()).max(output_at + output_len);
        let mut user = vec![0xa5; len];
        user[input_at..input_at + input.len()].copy_from_slice(input);
        let scratch = vec![0x5a; layout.scratch_bytes() * window];
        RankMemory { user, scratch, input_at, output_at, output_len, input_len: input.len(), kept: None }
    }

    /// The same, of a program that overwrites what is final.
    pub(super) fn overwritten_once_final(mut self, layout: &Layout) -> RankMemory {
        self.kept = Some(Kept { layout: layout.clone(), output: vec![OVERWRITTEN; self.output_len] });
        self
    }

    /// These segments are final now.
    pub(super) fn overwrite_final(&mut self, segments: Range<usize>) {
        let Some(Kept { layout, output }) = &mut self.kept else { return };
        // Blocks of different sizes are final all at once.
        let block = if layout.is_vectored() { usize::MAX } else { layout.block_bytes().max(1) };
        let (from, to) = (layout.front_bytes(segments.start), layout.front_bytes(segments.end));
        let parts = |len: usize| (0..len).step_by(block).map(move |at| at + from..at.saturating_add(to).min(len));
        for part in parts(self.output_len) {
            output[part.clone()].copy_from_slice(&self.user[self.output_at..][part]);
        }
        for (at, len) in [(self.output_at, self.output_len), (self.input_at, self.input_len)] {
            parts(len).for_each(|part| self.user[at..][part].fill(OVERWRITTEN));
        }
    }

    /// The bytes of the pieces, one after the other.
    pub(super) fn read(&self, pieces: &[Piece]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(pieces.iter().map(|piece| piece.len).sum());
        for piece in pieces {
            let (buffer, at) = match piece.buffer {
                Buffer::Input => (&self.user, self.input_at + piece.offset),
                Buffer::Output => (&self.user, self.output_at + piece.offset),
                Buffer::Scratch | Buffer::Coded => (&self.scratch, piece.offset),
            };
            bytes.extend_from_slice(&buffer[at..at + piece.len]);
        }
        bytes
    }

    /// Writes bytes into the pieces, one after the other; false when the lengths differ.
    #[must_use]
    pub(super) fn write(&mut self, pieces: &[Piece], bytes: &[u8]) -> bool {
        if pieces.iter().map(|piece| piece.len).sum::<usize>() != bytes.len() {
            return false;
        }
        let mut rest = bytes;
        for piece in pieces {
            let (buffer, at) = match piece.buffer {
                Buffer::Input => (&mut self.user, self.input_at + piece.offset),
                Buffer::Output => (&mut self.user, self.output_at + piece.offset),
                Buffer::Scratch | Buffer::Coded => (&mut self.scratch, piece.offset),
            };
            let (head, tail) = rest.split_at(piece.len);
            buffer[at..at + piece.len].copy_from_slice(head);
            rest = tail;
        }
        true
    }

    /// The receive buffer, or what was kept of it.
    pub(super) fn output(&self) -> &[u8] {
        match &self.kept {
            Some(kept) => &kept.output,
            None => &self.user[self.output_at..self.output_at + self.output_len],
        }
    }
}
