//! Half precision by the processor's own conversions, eight elements an instruction, and fp8 read by way of it; the bits
//! are those of [`Small`].

use super::element::{E4m3, E5m2, Element, Format, Small, F16};
use std::arch::x86_64::{__m128i, __m256, _mm256_cvtph_ps, _mm256_cvtps_ph, _MM_FROUND_TO_NEAREST_INT};
use std::marker::PhantomData;
use std::mem::transmute;

/// IEEE half precision on a processor that has AVX2 and F16C; used by no other kernel than those that require them.
pub(super) struct HalfF16c;

#[inline(always)]
fn widen8(bits: &[u16]) -> [f32; 8] {
    let bits: [u16; 8] = bits.try_into().expect("eight elements");
    // SAFETY: both types must have 16 bytes and no invalid values; because they are eight integers and a vector of
    // integers.
    let bits = unsafe { transmute::<[u16; 8], __m128i>(bits) };
    // SAFETY: the processor must have F16C; because only kernels that were chosen after detecting it use this type.
    let wide = unsafe { _mm256_cvtph_ps(bits) };
    // SAFETY: both types must have 32 bytes and no invalid values; because they are a vector of eight floats and eight
    // floats.
    unsafe { transmute::<__m256, [f32; 8]>(wide) }
}

#[inline(always)]
fn narrow8(wide: &[f32]) -> [u16; 8] {
    let wide: [f32; 8] = wide.try_into().expect("eight elements");
    // SAFETY: both types must have 32 bytes and no invalid values; because they are eight floats and a vector of eight
    // floats.
    let wide = unsafe { transmute::<[f32; 8], __m256>(wide) };
    // SAFETY: the processor must have F16C; because only kernels that were chosen after detecting it use this type.
    let bits = unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide) };
    // SAFETY: both types must have 16 bytes and no invalid values; because they are a vector of integers and eight
    // integers.
    unsafe { transmute::<__m128i, [u16; 8]>(bits) }
}

impl Element for HalfF16c {
    type Bits = u16;
    type Wide = f32;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        Small::<F16>::widen(bits)
    }

    #[inline(always)]
    fn settle(wide: f32) -> f32 {
        Small::<F16>::settle(wide)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        Small::<F16>::narrow(wide)
    }

    #[inline(always)]
    fn widen_strip<const L: usize>(bits: &[u16; L]) -> [f32; L] {
        let mut wide = [0.0; L];
        for (wide, bits) in wide.chunks_exact_mut(8).zip(bits.chunks_exact(8)) {
            wide.copy_from_slice(&widen8(bits));
        }
        wide
    }

    #[inline(always)]
    fn settle_strip<const L: usize>(wide: &mut [f32; L]) {
        for wide in wide.chunks_exact_mut(8) {
            wide.copy_from_slice(&widen8(&narrow8(wide)));
        }
    }

    #[inline(always)]
    fn narrow_strip<const L: usize>(wide: &[f32; L]) -> [u16; L] {
        let mut bits = [0; L];
        for (bits, wide) in bits.chunks_exact_mut(8).zip(wide.chunks_exact(8)) {
            let mut quiet = [0.0; 8];
            for i in 0..8 {
                quiet[i] = f32::narrow(wide[i]);
            }
            bits.copy_from_slice(&narrow8(&quiet));
        }
        bits
    }
}

/// A format whose values half precision holds, but for a factor.
pub(super) trait ThroughHalf: Format {
    /// What the half float is to be multiplied by.
    const FACTOR: f32;

    /// The value divided by the factor, in half precision.
    fn half(bits: Self::Bits) -> u16;
}

impl ThroughHalf for E4m3 {
    /// A half float's bias is larger by 8.
    const FACTOR: f32 = 256.0;

    /// The fields are shifted into place. A NaN, the one magnitude that carries when 1 is added, gets the highest bit of
    /// the exponent, whose others it has; said by arithmetic, since a selection would be moved behind the conversion.
    #[inline(always)]
    fn half(bits: u8) -> u16 {
        let fields = (i16::from(bits as i8) << 7) as u16 & 0xbfff;
        let carry = (u16::from(bits & 0x7f) + 1) & 0x80;
        fields | (carry << 7)
    }
}

impl ThroughHalf for E5m2 {
    const FACTOR: f32 = 1.0;

    /// E5M2 is the upper half of a half float.
    #[inline(always)]
    fn half(bits: u8) -> u16 {
        u16::from(bits) << 8
    }
}

/// fp8 on such a processor: read through half precision, which holds every value of both formats; rounded and written
/// as everywhere, since going back through half precision would round twice.
pub(super) struct SmallF16c<F>(PhantomData<F>);

impl<F: ThroughHalf> Element for SmallF16c<F> {
    type Bits = F::Bits;
    type Wide = f32;

    #[inline(always)]
    fn widen(bits: F::Bits) -> f32 {
        Small::<F>::widen(bits)
    }

    #[inline(always)]
    fn settle(wide: f32) -> f32 {
        Small::<F>::settle(wide)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> F::Bits {
        Small::<F>::narrow(wide)
    }

    #[inline(always)]
    fn widen_strip<const L: usize>(bits: &[F::Bits; L]) -> [f32; L] {
        let mut halves = [0; L];
        for i in 0..L {
            halves[i] = F::half(bits[i]);
        }
        let mut wide = HalfF16c::widen_strip(&halves);
        for value in &mut wide {
            *value *= F::FACTOR;
        }
        wide
    }
}
