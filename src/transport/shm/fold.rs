//! Reductions of what the members of a call have posted, each part read where it lies.

use super::post::{Posting, Unread};
use crate::device::host::{self, Combine};
use crate::memory::{Arena, Region};
use crate::transport::target::Pieces;
use smallvec::SmallVec;

/// Bytes of parts in other processes that are copied at a time, all together: they stay in cache until they are reduced.
const STAGED: usize = 128 << 10;

/// One operand, in the members' order.
pub struct Operand<'a> {
    /// The member's part of the call.
    pub bytes: OperandBytes<'a>,
    /// Where in it the operand begins.
    pub offset: usize,
}

/// Whose part it is.
pub enum OperandBytes<'a> {
    /// Ours.
    Own(&'a Pieces),
    /// Another member's, by its place among those posts.
    Posted(usize, &'a Posting),
}

/// Folds the operands in their order, which is the same expression on every rank, from byte `done` on. An error is that of
/// the post at this place; what has been folded by then is final, and `done` says how far that is. Pieces are of whole
/// elements.
pub fn fold(
    combine: Combine,
    operands: &[Operand<'_>],
    to: &Pieces,
    staging: &mut Arena,
    done: &mut usize,
) -> Result<(), (usize, Unread)> {
    let away = |operand: &&Operand<'_>| matches!(operand.bytes, OperandBytes::Posted(_, Posting::There { .. }));
    let away = operands.iter().filter(away).count();
    if away > 0 && staging.is_empty() {
        *staging = Arena::new(STAGED);
    }
    // Whole lines, and so whole elements.
    let most = STAGED.checked_div(away).map_or(usize::MAX, |share| (share / 64 * 64).max(64));
    while *done < to.bytes() {
        let dst = to.run(*done, most);
        let mut runs: SmallVec<[Region; 16]> = SmallVec::new();
        let mut staged = 0;
        for Operand { bytes, offset } in operands {
            let at = offset + *done;
            runs.push(match bytes {
                OperandBytes::Own(pieces) => pieces.run(at, dst.len()),
                OperandBytes::Posted(_, Posting::Here { pieces, .. }) => pieces.run(at, dst.len()),
                OperandBytes::Posted(place, post) => {
                    let room = staging.region().part(staged, dst.len());
                    // SAFETY: the arena must outlive every use; because the runs are used and gone before it is.
                    let room = unsafe { room.unbound() };
                    staged += dst.len().next_multiple_of(64);
                    post.copy(at, &[room], room.len()).map_err(|unread| (*place, unread))?;
                    room
                }
            });
        }
        let len = runs.iter().map(Region::len).min().unwrap_or(0);
        runs.iter_mut().for_each(|run| *run = run.part(0, len));
        host::reduce(combine.dtype, combine.operator, combine.divisor, &runs, dst.part(0, len));
        *done += len;
    }
    Ok(())
}
