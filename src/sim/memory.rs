//! The buffers of one simulated rank.
#![forbid(unsafe_code)]

use crate::plan::layout::{Layout, Piece};
use crate::plan::{Buffer, Collective, Plan};

/// The user's buffers and the scratch of one rank. In place, `Input` and `Output` share bytes as NCCL has it.
#[derive(Debug, Default)]
pub(super) struct RankMemory {
    user: Vec<u8>,
    scratch: Vec<u8>,
    input_at: usize,
    output_at: usize,
    output_len: usize,
}

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
        RankMemory { user, scratch, input_at, output_at, output_len }
    }

    /// The bytes of the pieces, one after the other.
    pub(super) fn read(&self, pieces: &[Piece]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(pieces.iter().map(|piece| piece.len).sum());
        for piece in pieces {
            let (buffer, at) = match piece.buffer {
                Buffer::Input => (&self.user, self.input_at + piece.offset),
                Buffer::Output => (&self.user, self.output_at + piece.offset),
                Buffer::Scratch => (&self.scratch, piece.offset),
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
                Buffer::Scratch => (&mut self.scratch, piece.offset),
            };
            let (head, tail) = rest.split_at(piece.len);
            buffer[at..at + piece.len].copy_from_slice(head);
            rest = tail;
        }
        true
    }

    /// The receive buffer.
    pub(super) fn output(&self) -> &[u8] {
        &self.user[self.output_at..self.output_at + self.output_len]
    }
}
