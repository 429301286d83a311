//! Runs plans. The executor never blocks, never looks at a clock and touches no byte: time, messages, copies and
//! reductions all come from a [`World`], so the simulated world runs this very code.
//!
//! A [`Program`] is a plan compiled for running, an [`Execution`] one run of it, driven by [`Execution::poll`].
#![forbid(unsafe_code)]

mod execution;
mod lists;
mod program;
mod report;
#[cfg(test)]
mod tests;

pub use execution::{Execution, Progress, Stats};
pub use program::Program;

use crate::code::FloatCode;
use crate::error::Result;
use crate::plan::layout::Piece;
use crate::plan::{Call, Channel, OperandOrder};
use crate::topo::Rank;

/// Names a pending operation to the world that carries it out; chosen by the executor.
pub type Token = u64;

/// One operation, its chunks resolved to pieces of the call's buffers. Lists never contain empty pieces, and an
/// operation of no bytes is not given to the world, but for two kinds: an [`Op::Call`] of all-to-all, gather or scatter, since the
/// other members cannot know that this rank has nothing to move; and, where blocks differ in size, a message of the first segment,
/// or of that in which a block ends that other ranks do not know, so that counts that differ between ranks are noticed.
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    /// Send one message.
    Send {
        /// The receiver.
        to: Rank,
        /// The message stream.
        channel: Channel,
        /// What is sent.
        src: &'a [Piece],
    },
    /// Receive one message.
    Recv {
        /// The sender.
        from: Rank,
        /// The message stream.
        channel: Channel,
        /// Where it goes.
        dst: &'a [Piece],
    },
    /// Receive one message and combine it with local data.
    RecvReduce {
        /// The sender.
        from: Rank,
        /// The message stream.
        channel: Channel,
        /// The local operand.
        local: &'a [Piece],
        /// Where the result goes.
        dst: &'a [Piece],
        /// Which operand comes first.
        order: OperandOrder,
        /// Apply the reduction's epilogue to the result.
        finish: bool,
    },
    /// Copy.
    Copy {
        /// From here.
        src: &'a [Piece],
        /// To here.
        dst: &'a [Piece],
        /// Apply the reduction's prologue.
        start: bool,
        /// Apply the reduction's epilogue.
        finish: bool,
    },
    /// Combine local data, folding from the left.
    Reduce {
        /// The operands.
        srcs: &'a [&'a [Piece]],
        /// Where the result goes.
        dst: &'a [Piece],
        /// Apply the reduction's epilogue to the result.
        finish: bool,
    },
    /// FloatCode chunks.
    Encode {
        /// The form of what is coded.
        code: FloatCode,
        /// From here.
        src: &'a [Piece],
        /// To here: coded chunks, each in a piece of its own.
        dst: &'a [Piece],
        /// Where each of them lies in the row of blocks, in elements.
        rows: &'a [usize],
    },
    /// Decode chunks.
    Decode {
        /// The form of what is coded.
        code: FloatCode,
        /// From here: coded chunks, each in a piece of its own.
        src: &'a [Piece],
        /// To here.
        dst: &'a [Piece],
        /// Apply the reduction's epilogue.
        finish: bool,
    },
    /// Combine coded chunks, folding from the left.
    FoldCoded {
        /// The form of what is coded.
        code: FloatCode,
        /// The operands.
        srcs: &'a [&'a [Piece]],
        /// Where the result goes: coded, too, or not.
        dst: &'a [Piece],
        /// Where the chunks lie in the row of blocks, in elements.
        rows: &'a [usize],
        /// Apply the reduction's epilogue to the result, which is not coded then.
        finish: bool,
    },
    /// A collective of another provider.
    Call {
        /// What and with whom.
        call: &'a Call,
        /// The lane that it is in, on all its members: a plan may have several such calls of one group.
        lane: u32,
        /// The input, per block.
        src: &'a [&'a [Piece]],
        /// The output, per block.
        dst: &'a [&'a [Piece]],
    },
}

/// How an operation began. As wide as a pointer, so that a [`ShortResult`](crate::error::ShortResult) of it fits two registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Started {
    /// It is complete already.
    Done,
    /// It was accepted; [`World::poll`] will report its token.
    Pending,
    /// The channel is full. Nothing happened; the executor tries again after each later poll.
    Busy,
}

/// Everything the executor needs from the outside.
pub trait World {
    /// The time, in ns from some start.
    fn now_ns(&self) -> u64;

    /// Starts an operation.
    fn start(&mut self, token: Token, op: Op<'_>) -> Result<Started>;

    /// Makes progress and appends the tokens of operations that have completed since the last call.
    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()>;

    /// The first `segments` segments have completed all their steps, which are more than before: what they wrote is final, and
    /// nothing of theirs is read any more. The last time that is all of them.
    fn front(&mut self, segments: usize) {
        let _ = segments;
    }
}
