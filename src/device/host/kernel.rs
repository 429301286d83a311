//! The loops over memory, compiled once for any processor and once for AVX2, and the table that chooses among them.
//!
//! Data is taken in strips of 128 bytes of the wide form: four vector registers that hold the accumulator while every
//! source is read once. The last, shorter strip goes through the same arithmetic in a buffer, so that an element's bits
//! depend neither on its place nor on alignment.

use super::divide::Quotient;
use super::element::{And, Or, Xor};
use super::element::{Bf16, E4m3, E5m2, Element, Larger, Pair, Prod, Ranked, Small, Smaller, Sum, Times, F16};
#[cfg(target_arch = "x86_64")]
use super::f16c::{HalfF16c, SmallF16c};
use crate::dtype::{DataType, Operator, Prologue, ScalarBytes};
use std::ops::Div;
use std::ptr;

/// Which instructions may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InstructionSet {
    /// What every processor of the architecture has.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl InstructionSet {
    /// The best level of this processor.
    pub(super) fn best() -> InstructionSet {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            return InstructionSet::Avx2;
        }
        InstructionSet::Portable
    }
}

/// Folds sources of `bytes` bytes from the left into a destination, which may be exactly one of them.
///
/// # Safety
/// The processor must have the level that the kernel was chosen for; there must be a source; every source must be
/// readable and the destination writable for the given number of bytes.
pub(super) type Fold = unsafe fn(srcs: &[*const u8], dst: *mut u8, bytes: usize);

/// # Safety
/// `from` must be readable for `count` elements, and `count` at most `L`.
#[inline(always)]
unsafe fn load<B: Copy + Default, const L: usize>(from: *const u8, count: usize) -> [B; L] {
    if count == L {
        // SAFETY: `L` elements must be readable; because `count` are. Alignment does not matter.
        return unsafe { ptr::read_unaligned(from.cast()) };
    }
    let mut strip = [B::default(); L];
    // SAFETY: `count` elements must be readable and fit the strip; because the caller promises both. The strip is a
    // local, so elsewhere, and any bits are a number.
    unsafe { ptr::copy_nonoverlapping(from, strip.as_mut_ptr().cast(), count * size_of::<B>()) };
    strip
}

/// # Safety
/// `to` must be writable for `count` elements, and `count` at most `L`.
#[inline(always)]
unsafe fn store<B: Copy, const L: usize>(to: *mut u8, strip: [B; L], count: usize) {
    if count == L {
        // SAFETY: `L` elements must be writable; because `count` are. Alignment does not matter.
        return unsafe { ptr::write_unaligned(to.cast(), strip) };
    }
    // SAFETY: `count` elements must be writable, and be in the strip; because the caller promises both. The strip is a
    // local, so elsewhere.
    unsafe { ptr::copy_nonoverlapping(strip.as_ptr().cast(), to, count * size_of::<B>()) };
}

/// So many elements at the end are folded one by one: a strip of them would go through memory twice. Not of the types that are
/// converted several at a time.
const FEW: usize = 4;

/// Folds one strip: `count` elements at `at`.
///
/// # Safety
/// As for [`Fold`], for the bytes of the strip.
#[inline(always)]
unsafe fn fold_strip<E: Element, P: Pair<E::Wide>, const L: usize>(
    srcs: &[*const u8],
    dst: *mut u8,
    at: usize,
    count: usize,
) {
    // SAFETY: the strip must be readable; because the caller promises it of every source.
    let first = unsafe { load::<E::Bits, L>(srcs[0].wrapping_add(at), count) };
    let mut folded = E::widen_strip(&first);
    for (k, src) in srcs[1..].iter().enumerate() {
        if k > 0 {
            E::settle_strip(&mut folded);
        }
        // SAFETY: the strip must be readable; because the caller promises it of every source.
        let next = unsafe { load::<E::Bits, L>(src.wrapping_add(at), count) };
        let next = E::widen_strip(&next);
        for i in 0..L {
            folded[i] = P::pair(folded[i], next[i]);
        }
    }
    // SAFETY: the strip must be writable; because the caller promises it of the destination.
    unsafe { store(dst.wrapping_add(at), E::narrow_strip(&folded), count) };
}

/// # Safety
/// As for [`Fold`].
#[inline(always)]
unsafe fn fold<E: Element, P: Pair<E::Wide>, const L: usize>(srcs: &[*const u8], dst: *mut u8, bytes: usize) {
    let strip = L * size_of::<E::Bits>();
    let mut at = 0;
    while at + strip <= bytes {
        // SAFETY: the strip must lie inside the buffers; because the loop's condition says so.
        unsafe { fold_strip::<E, P, L>(srcs, dst, at, L) };
        at += strip;
    }
    let left = (bytes - at) / size_of::<E::Bits>();
    if left <= FEW && size_of::<E::Bits>() >= 4 {
        for element in 0..left {
            // SAFETY: the element must lie inside the buffers; because it is one of those that are left.
            unsafe { fold_strip::<E, P, 1>(srcs, dst, at + element * size_of::<E::Bits>(), 1) };
        }
    } else {
        // SAFETY: the strip must lie inside the buffers; because it ends where they do.
        unsafe { fold_strip::<E, P, L>(srcs, dst, at, left) };
    }
}

/// # Safety
/// As for [`Fold`].
unsafe fn fold_portable<E: Element, P: Pair<E::Wide>, const L: usize>(srcs: &[*const u8], dst: *mut u8, bytes: usize) {
    // SAFETY: the requirements of `Fold` must hold; because the caller promises them.
    unsafe { fold::<E, P, L>(srcs, dst, bytes) }
}

/// # Safety
/// As for [`Fold`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn fold_avx2<E: Element, P: Pair<E::Wide>, const L: usize>(srcs: &[*const u8], dst: *mut u8, bytes: usize) {
    // SAFETY: the requirements of `Fold` must hold; because the caller promises them.
    unsafe { fold::<E, P, L>(srcs, dst, bytes) }
}

fn choose<E: Element, P: Pair<E::Wide>, const L: usize>(level: InstructionSet) -> Fold {
    match level {
        InstructionSet::Portable => fold_portable::<E, P, L>,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => fold_avx2::<E, P, L>,
    }
}

fn integers<T, const L: usize>(level: InstructionSet, operator: Operator) -> Fold
where
    T: Element<Wide = T> + Ord,
    Sum: Pair<T>,
    Prod: Pair<T>,
    And: Pair<T>,
    Or: Pair<T>,
    Xor: Pair<T>,
{
    match operator {
        Operator::Sum => choose::<T, Sum, L>(level),
        Operator::Prod => choose::<T, Prod, L>(level),
        Operator::Max => choose::<T, Larger, L>(level),
        Operator::Min => choose::<T, Smaller, L>(level),
        Operator::And => choose::<T, And, L>(level),
        Operator::Or => choose::<T, Or, L>(level),
        Operator::Xor => choose::<T, Xor, L>(level),
    }
}

/// `E` computes in floats, `L` elements a strip; `R` and `S` rank for the larger and the smaller, `M` a strip.
fn floats<E, R, S, const L: usize, const M: usize>(level: InstructionSet, operator: Operator) -> Fold
where
    E: Element,
    R: Element<Wide: Ord>,
    S: Element<Wide: Ord>,
    Sum: Pair<E::Wide>,
    Prod: Pair<E::Wide>,
{
    match operator {
        Operator::Sum => choose::<E, Sum, L>(level),
        Operator::Prod => choose::<E, Prod, L>(level),
        Operator::Max => choose::<R, Larger, M>(level),
        Operator::Min => choose::<S, Smaller, M>(level),
        Operator::And | Operator::Or | Operator::Xor => unreachable!("where a call is accepted floats have no bits"),
    }
}

/// The kernel for a type whose conversion depends on the level: half precision as `H`, the fp8 types as `A` and `B`.
fn small_kernel<H, A, B>(level: InstructionSet, dtype: DataType, operator: Operator) -> Fold
where
    H: Element<Wide = f32>,
    A: Element<Wide = f32>,
    B: Element<Wide = f32>,
{
    match dtype {
        DataType::F8E4M3 => floats::<A, Ranked<E4m3, true>, Ranked<E4m3, false>, 32, 128>(level, operator),
        DataType::F8E5M2 => floats::<B, Ranked<E5m2, true>, Ranked<E5m2, false>, 32, 128>(level, operator),
        _ => floats::<H, Ranked<F16, true>, Ranked<F16, false>, 32, 64>(level, operator),
    }
}

/// The kernel that folds this type with this operator.
pub(super) fn fold_kernel(level: InstructionSet, dtype: DataType, operator: Operator) -> Fold {
    match dtype {
        DataType::I8 => integers::<i8, 128>(level, operator),
        DataType::U8 => integers::<u8, 128>(level, operator),
        DataType::I16 => integers::<i16, 64>(level, operator),
        DataType::U16 => integers::<u16, 64>(level, operator),
        DataType::I32 => integers::<i32, 32>(level, operator),
        DataType::U32 => integers::<u32, 32>(level, operator),
        DataType::I64 => integers::<i64, 16>(level, operator),
        DataType::U64 => integers::<u64, 16>(level, operator),
        DataType::F32 => floats::<f32, Ranked<f32, true>, Ranked<f32, false>, 32, 32>(level, operator),
        DataType::F64 => floats::<f64, Ranked<f64, true>, Ranked<f64, false>, 16, 16>(level, operator),
        DataType::BF16 => floats::<Bf16, Ranked<Bf16, true>, Ranked<Bf16, false>, 32, 64>(level, operator),
        DataType::F16 | DataType::F8E4M3 | DataType::F8E5M2 => match level {
            InstructionSet::Portable => small_kernel::<Small<F16>, Small<E4m3>, Small<E5m2>>(level, dtype, operator),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => small_kernel::<HalfF16c, SmallF16c<E4m3>, SmallF16c<E5m2>>(level, dtype, operator),
        },
    }
}

/// What is done to every element of one buffer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// The prologue.
    Multiply(Prologue),
    /// The epilogue.
    Divide(u64),
    /// Times the first over the second; of floats.
    Ratio(u64, u64),
}

/// # Safety
/// `src` must be readable and `dst`, which may be `src`, writable for `bytes` bytes.
#[inline(always)]
unsafe fn map<E: Element, const L: usize>(f: impl Fn(E::Wide) -> E::Wide, src: *const u8, dst: *mut u8, bytes: usize) {
    let strip = L * size_of::<E::Bits>();
    for at in (0..bytes).step_by(strip) {
        let count = strip.min(bytes - at) / size_of::<E::Bits>();
        // SAFETY: the strip must be readable; because it ends with the buffer at the latest.
        let bits = unsafe { load::<E::Bits, L>(src.wrapping_add(at), count) };
        let mut wide = E::widen_strip(&bits);
        for value in &mut wide {
            *value = f(*value);
        }
        // SAFETY: the strip must be writable; because it ends with the buffer at the latest.
        unsafe { store(dst.wrapping_add(at), E::narrow_strip(&wide), count) };
    }
}

/// The first bytes of a scalar, as an element.
fn scalar<T: Copy + Default>(bytes: &ScalarBytes) -> T {
    const { assert!(size_of::<T>() <= size_of::<ScalarBytes>()) };
    // SAFETY: an element of at most 8 bytes must be readable; because a scalar has 8.
    unsafe { load::<T, 1>(bytes.as_ptr(), 1)[0] }
}

/// # Safety
/// As for [`map`].
#[inline(always)]
unsafe fn scale_integers<T, const L: usize>(scale: Scale, src: *const u8, dst: *mut u8, bytes: usize)
where
    T: Element<Wide = T, Bits = T> + Quotient + Times + Default,
{
    match scale {
        Scale::Multiply(Prologue::Scalar(factor)) => {
            let factor = scalar::<T>(&factor);
            // SAFETY: `map`'s requirements must hold; because the caller promises them.
            unsafe { map::<T, L>(|x| x.times(factor), src, dst, bytes) }
        }
        Scale::Multiply(Prologue::Reciprocal(n)) | Scale::Divide(n) if n != 1 => {
            let divisor = T::ready(n);
            // SAFETY: `map`'s requirements must hold; because the caller promises them.
            unsafe { map::<T, L>(|x| x.over(&divisor), src, dst, bytes) }
        }
        // SAFETY: `src` must be readable and `dst` writable for `bytes` bytes; because the caller promises it.
        _ => unsafe { ptr::copy(src, dst, bytes) },
    }
}

/// # Safety
/// As for [`map`].
#[inline(always)]
unsafe fn scale_floats<E, const L: usize>(scale: Scale, src: *const u8, dst: *mut u8, bytes: usize)
where
    E: Element<Wide: Times + FromCount + From<f32> + Div<Output = E::Wide>>,
{
    match scale {
        Scale::Multiply(Prologue::Scalar(factor)) => {
            let factor = E::widen(scalar::<E::Bits>(&factor));
            // SAFETY: `map`'s requirements must hold; because the caller promises them.
            unsafe { map::<E, L>(|x| x.times(factor), src, dst, bytes) }
        }
        Scale::Multiply(Prologue::Reciprocal(n)) => {
            let factor = E::Wide::from(1.0 / n as f32);
            // SAFETY: `map`'s requirements must hold; because the caller promises them.
            unsafe { map::<E, L>(|x| x.times(factor), src, dst, bytes) }
        }
        Scale::Divide(n) if n != 1 => {
            let divisor = E::Wide::from_count(n);
            // SAFETY: `map`'s requirements must hold; because the caller promises them.
            unsafe { map::<E, L>(|x| x / divisor, src, dst, bytes) }
        }
        Scale::Ratio(factor, divisor) => {
            let ratio = E::Wide::from_count(factor) / E::Wide::from_count(divisor);
            // SAFETY: `map`'s requirements must hold; because the caller promises them.
            unsafe { map::<E, L>(|x| x.times(ratio), src, dst, bytes) }
        }
        // SAFETY: `src` must be readable and `dst` writable for `bytes` bytes; because the caller promises it.
        _ => unsafe { ptr::copy(src, dst, bytes) },
    }
}

/// A float made from a number of ranks.
trait FromCount {
    /// The nearest float.
    fn from_count(count: u64) -> Self;
}

impl FromCount for f32 {
    fn from_count(count: u64) -> f32 {
        count as f32
    }
}

impl FromCount for f64 {
    fn from_count(count: u64) -> f64 {
        count as f64
    }
}

/// Scales `bytes` bytes; [`scale`]'s requirements must hold, and the processor have the level that it was taken for.
type Scaling = unsafe fn(Scale, *const u8, *mut u8, usize);

/// `$choose` gives `$body` for a level. Each is a function of its own, so that it takes no more stack than its type needs.
macro_rules! scalings {
    ($choose:ident, $body:ident, $($bounds:tt)+) => {
        fn $choose<E: $($bounds)+, const L: usize>(level: InstructionSet) -> Scaling {
            unsafe fn portable<E: $($bounds)+, const L: usize>(how: Scale, src: *const u8, dst: *mut u8, bytes: usize) {
                // SAFETY: the requirements of `Scaling` must hold; because the caller promises them.
                unsafe { $body::<E, L>(how, src, dst, bytes) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn wide<E: $($bounds)+, const L: usize>(how: Scale, src: *const u8, dst: *mut u8, bytes: usize) {
                // SAFETY: the requirements of `Scaling` must hold; because the caller promises them.
                unsafe { $body::<E, L>(how, src, dst, bytes) }
            }
            match level {
                InstructionSet::Portable => portable::<E, L>,
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => wide::<E, L>,
            }
        }
    };
}

scalings!(integer_scaling, scale_integers, Element<Wide = E, Bits = E> + Quotient + Times + Default);
scalings!(float_scaling, scale_floats, Element<Wide: Times + FromCount + From<f32> + Div<Output = E::Wide>>);

/// The scaling of a type whose conversion depends on the level, as for [`small_kernel`].
fn small_scaling<H, A, B>(level: InstructionSet, dtype: DataType) -> Scaling
where
    H: Element<Wide = f32>,
    A: Element<Wide = f32>,
    B: Element<Wide = f32>,
{
    match dtype {
        DataType::F8E4M3 => float_scaling::<A, 32>(level),
        DataType::F8E5M2 => float_scaling::<B, 32>(level),
        _ => float_scaling::<H, 32>(level),
    }
}

fn scaling(level: InstructionSet, dtype: DataType) -> Scaling {
    match dtype {
        DataType::I8 => integer_scaling::<i8, 128>(level),
        DataType::U8 => integer_scaling::<u8, 128>(level),
        DataType::I16 => integer_scaling::<i16, 64>(level),
        DataType::U16 => integer_scaling::<u16, 64>(level),
        DataType::I32 => integer_scaling::<i32, 32>(level),
        DataType::U32 => integer_scaling::<u32, 32>(level),
        DataType::I64 => integer_scaling::<i64, 16>(level),
        DataType::U64 => integer_scaling::<u64, 16>(level),
        DataType::F32 => float_scaling::<f32, 32>(level),
        DataType::F64 => float_scaling::<f64, 16>(level),
        DataType::BF16 => float_scaling::<Bf16, 32>(level),
        DataType::F16 | DataType::F8E4M3 | DataType::F8E5M2 => match level {
            InstructionSet::Portable => small_scaling::<Small<F16>, Small<E4m3>, Small<E5m2>>(level, dtype),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => small_scaling::<HalfF16c, SmallF16c<E4m3>, SmallF16c<E5m2>>(level, dtype),
        },
    }
}

/// Scales every element of `src` into `dst`.
///
/// # Safety
/// The processor must have `level`; `src` must be readable and `dst`, which may be exactly `src`, writable for `bytes`
/// bytes.
pub(super) unsafe fn scale(
    level: InstructionSet,
    dtype: DataType,
    how: Scale,
    src: *const u8,
    dst: *mut u8,
    bytes: usize,
) {
    // SAFETY: `Scaling`'s requirements must hold; because the caller promises them.
    unsafe { scaling(level, dtype)(how, src, dst, bytes) }
}
