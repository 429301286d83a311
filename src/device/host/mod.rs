//! The host device: buffers are host memory, reductions run on the calling thread, vectorised for every type.
//!
//! **Bits.** An element's result depends on its operands and their order, and on nothing else: not on alignment, on its
//! place, on how many sources are folded at once, or on the processor's vector instructions. Integers wrap. Half floats
//! and fp8 are computed in float32 and rounded to nearest even after every pair; fp8 saturates where it would overflow.
//! The larger and the smaller of floats are exact, prefer a number to a NaN and hold +0 above -0. A computed NaN is
//! stored as the type's one quiet NaN.

pub mod coding;
mod divide;
mod element;
pub mod event;
#[cfg(target_arch = "x86_64")]
mod f16c;
mod kernel;
pub mod reference;
pub mod stream;

#[cfg(test)]
mod tests;

use crate::dtype::{DataType, Operator, Prologue, Reduction};
use crate::memory::{Arena, Bytes};
use crate::plan::OperandOrder;
use kernel::{InstructionSet, Scale};
use std::cell::RefCell;

/// How an incoming element meets a local one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Combine {
    /// The element type.
    pub dtype: DataType,
    /// The operation.
    pub operator: Operator,
    /// Which operand comes first.
    pub order: OperandOrder,
    /// Divide the result by this (1: leave it): the epilogue, where the step finishes a result.
    pub divisor: u64,
}

/// Bytes that are folded, and then divided, while they stay in the first-level cache.
const BLOCK_BYTES: usize = 8 << 10;

/// Sources read side by side; more streams than this outrun the processor's prefetchers.
const STREAMS: usize = 8;

/// Writes `local (op) incoming`, in the order that `how` says, divided by its divisor.
///
/// # Panics
/// When the regions differ in length, or the length is not a multiple of the element's size, or the divisor is 0.
/// `dst` may be exactly `local` or exactly `incoming`; it may not overlap them in any other way.
pub fn combine(how: Combine, local: Bytes<'_>, incoming: Bytes<'_>, dst: Bytes<'_>) {
    let srcs = match how.order {
        OperandOrder::LocalFirst => [local, incoming],
        OperandOrder::IncomingFirst => [incoming, local],
    };
    reduce(how.dtype, how.operator, how.divisor, &srcs, dst);
}

/// Writes `srcs[0] (op) srcs[1] (op) ...`, folded from the left and divided by `divisor`.
///
/// The bits are those of a chain of [`combine`]s. Each source is read once and the destination written once.
///
/// # Panics
/// As [`combine`], and without any source. `dst` may be exactly one of the sources, and overlap none in any other way.
pub fn reduce(dtype: DataType, operator: Operator, divisor: u64, srcs: &[Bytes<'_>], dst: Bytes<'_>) {
    reduce_at(InstructionSet::best(), dtype, operator, divisor, srcs, dst);
}

/// Applies the reduction's prologue to a rank's own input.
///
/// Integers wrap. `Reciprocal(n)` multiplies by 1/n as a float32; integers, which have no reciprocal, are divided by n.
///
/// # Panics
/// When the regions differ in length, or the length is not a multiple of the element's size.
/// `dst` may be exactly `src`; it may not overlap it in any other way.
pub fn prologue(reduction: &Reduction, src: Bytes<'_>, dst: Bytes<'_>) {
    match reduction.prologue {
        Prologue::None => copy(dst, src),
        factor => scale_at(InstructionSet::best(), reduction.dtype, Scale::Multiply(factor), src, dst),
    }
}

/// Divides every element by `divisor`: integers truncate toward zero, floats are divided in float32 (double in double)
/// and rounded once.
///
/// # Panics
/// As [`prologue`], and when the divisor is 0.
pub fn divide(dtype: DataType, divisor: u64, src: Bytes<'_>, dst: Bytes<'_>) {
    assert_ne!(divisor, 0, "division by zero");
    if divisor == 1 {
        copy(dst, src);
    } else {
        scale_at(InstructionSet::best(), dtype, Scale::Divide(divisor), src, dst);
    }
}

/// Divides every float by `divisor` and multiplies it by `factor`, in float32 (double in double); smaller types are rounded once, at the
/// end.
///
/// # Panics
/// As [`prologue`], of integers, and when the divisor is 0.
pub fn multiply_by_ratio(dtype: DataType, (factor, divisor): (u64, u64), region: Bytes<'_>) {
    assert!(divisor != 0 && !dtype.is_integer(), "{} times {factor} over {divisor}", dtype.name());
    scale_at(InstructionSet::best(), dtype, Scale::Ratio(factor, divisor), region, region);
}

/// Copies the bytes of `src` to `dst`.
///
/// # Panics
/// When the regions differ in length. They may overlap.
pub fn copy(dst: Bytes<'_>, src: Bytes<'_>) {
    dst.copy_from(src);
}

/// What it says of an error is on nobody else's stack.
#[inline(never)]
fn check(dtype: DataType, srcs: &[Bytes<'_>], dst: Bytes<'_>) {
    assert!(dst.len().is_multiple_of(dtype.size()), "{} bytes are not whole elements of {}", dst.len(), dtype.name());
    for src in srcs {
        assert_eq!(src.len(), dst.len(), "reduction of regions of different lengths");
        let apart = (src.as_ptr() as usize).abs_diff(dst.as_ptr() as usize);
        debug_assert!(apart == 0 || apart >= dst.len(), "a source overlaps the destination and is not it");
    }
}

/// Apart from what folds before, on whose stack it would be.
#[inline(never)]
fn scale_at(level: InstructionSet, dtype: DataType, how: Scale, src: Bytes<'_>, dst: Bytes<'_>) {
    check(dtype, &[src], dst);
    // SAFETY: this processor must have the level and the regions must be valid for the length; because `level` comes
    // from `Level::best` or is portable, `check` compared the lengths, and `Region::new` was promised the rest.
    unsafe { kernel::scale(level, dtype, how, src.as_ptr(), dst.as_ptr(), dst.len()) }
}

fn reduce_at(
    level: InstructionSet,
    dtype: DataType,
    operator: Operator,
    divisor: u64,
    srcs: &[Bytes<'_>],
    dst: Bytes<'_>,
) {
    assert!(!srcs.is_empty(), "a reduction of nothing");
    assert_ne!(divisor, 0, "division by zero");
    check(dtype, srcs, dst);
    for at in (0..dst.len()).step_by(BLOCK_BYTES) {
        let bytes = BLOCK_BYTES.min(dst.len() - at);
        let block = dst.part(at, bytes);
        fold_block(level, dtype, operator, srcs, at, block);
        if divisor != 1 {
            scale_at(level, dtype, Scale::Divide(divisor), block, block);
        }
    }
}

thread_local! {
    /// Memory for a partial result. Not on the stack: the program's thread may have a small one.
    static PARTIAL: RefCell<Arena> = RefCell::new(Arena::new(BLOCK_BYTES));
}

/// Folds the block of the sources at `at` into `dst`.
fn fold_block(
    level: InstructionSet,
    dtype: DataType,
    operator: Operator,
    srcs: &[Bytes<'_>],
    at: usize,
    dst: Bytes<'_>,
) {
    if let [src] = srcs {
        return copy(dst, src.part(at, dst.len()));
    }
    let fold = kernel::fold_kernel(level, dtype, operator);
    let run = |srcs: &[*const u8], dst: *mut u8, bytes: usize| {
        // SAFETY: this processor must have the level and all must be valid for `bytes`; because `level` comes from
        // `Level::best` or is portable, the blocks are parts of regions, and a partial result has a block's bytes.
        unsafe { fold(srcs, dst, bytes) }
    };
    let pointer = |src: &Bytes<'_>| src.part(at, dst.len()).as_ptr().cast_const();
    let mut streams = [std::ptr::null(); STREAMS];
    if srcs.len() <= STREAMS {
        for (stream, src) in streams.iter_mut().zip(srcs) {
            *stream = pointer(src);
        }
        return run(&streams[..srcs.len()], dst.as_ptr(), dst.len());
    }
    // The destination may be a source that is read later, so it is written last.
    let partial = PARTIAL.with_borrow_mut(|arena| arena.region().as_ptr());
    for (k, stream) in streams.iter_mut().enumerate() {
        *stream = pointer(&srcs[k]);
    }
    run(&streams, partial, dst.len());
    let groups = srcs[STREAMS..].chunks(STREAMS - 1);
    let last = groups.len() - 1;
    for (k, group) in groups.enumerate() {
        streams[0] = partial.cast_const();
        for (stream, src) in streams[1..].iter_mut().zip(group) {
            *stream = pointer(src);
        }
        run(&streams[..=group.len()], if k == last { dst.as_ptr() } else { partial }, dst.len());
    }
}
