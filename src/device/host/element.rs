//! How the elements of each type are read, computed with and written.
//!
//! An element is *widened* into the form that the arithmetic uses, *settled* after every pair (rounded to its type, but
//! kept wide) and *narrowed* when it is stored. Everything is branch-free plain Rust on whole strips of elements, which
//! the compiler turns into vector code; the same source gives the portable path, so both give the same bits.
//!
//! A NaN that is computed is always stored as the type's one quiet NaN: which payload an addition of two NaNs yields
//! depends on the order of a machine instruction's operands, which no compiler promises, and replicas must not differ.
#![forbid(unsafe_code)]

use std::marker::PhantomData;

/// A type as the kernels see it.
pub(super) trait Element {
    /// The stored form.
    type Bits: Copy + Default;
    /// The form computed with.
    type Wide: Copy + Default;

    /// The stored value in the wide form; exact.
    fn widen(bits: Self::Bits) -> Self::Wide;

    /// A computed value rounded to the type, still in the wide form.
    fn settle(wide: Self::Wide) -> Self::Wide;

    /// A computed value rounded to the type.
    fn narrow(wide: Self::Wide) -> Self::Bits;

    /// [`Element::widen`] for a strip.
    #[inline(always)]
    fn widen_strip<const L: usize>(bits: &[Self::Bits; L]) -> [Self::Wide; L] {
        let mut wide = [Self::Wide::default(); L];
        for i in 0..L {
            wide[i] = Self::widen(bits[i]);
        }
        wide
    }

    /// [`Element::settle`] for a strip.
    #[inline(always)]
    fn settle_strip<const L: usize>(wide: &mut [Self::Wide; L]) {
        for value in wide {
            *value = Self::settle(*value);
        }
    }

    /// [`Element::narrow`] for a strip.
    #[inline(always)]
    fn narrow_strip<const L: usize>(wide: &[Self::Wide; L]) -> [Self::Bits; L] {
        let mut bits = [Self::Bits::default(); L];
        for i in 0..L {
            bits[i] = Self::narrow(wide[i]);
        }
        bits
    }
}

/// What is done to two wide values.
pub(super) trait Pair<W> {
    /// The first operand with the second.
    fn pair(first: W, second: W) -> W;
}

/// a + b
pub(super) struct Sum;
/// a * b
pub(super) struct Prod;
/// The larger, of wide forms whose order is the element's.
pub(super) struct Larger;
/// The smaller, of wide forms whose order is the element's.
pub(super) struct Smaller;

/// The bits that both have.
pub(super) struct And;
/// The bits that one of them has.
pub(super) struct Or;
/// The bits in which they differ.
pub(super) struct Xor;

impl<W: Ord> Pair<W> for Larger {
    #[inline(always)]
    fn pair(first: W, second: W) -> W {
        first.max(second)
    }
}

impl<W: Ord> Pair<W> for Smaller {
    #[inline(always)]
    fn pair(first: W, second: W) -> W {
        first.min(second)
    }
}

/// A wide form that multiplies.
pub(super) trait Times: Copy {
    /// The product; of integers, modulo 2^bits.
    fn times(self, factor: Self) -> Self;
}

macro_rules! integers {
    ($($int:ty),*) => {$(
        impl Element for $int {
            type Bits = $int;
            type Wide = $int;
            #[inline(always)]
            fn widen(bits: $int) -> $int {
                bits
            }
            #[inline(always)]
            fn settle(wide: $int) -> $int {
                wide
            }
            #[inline(always)]
            fn narrow(wide: $int) -> $int {
                wide
            }
        }
        impl Times for $int {
            #[inline(always)]
            fn times(self, factor: $int) -> $int {
                self.wrapping_mul(factor)
            }
        }
        impl Pair<$int> for Sum {
            #[inline(always)]
            fn pair(first: $int, second: $int) -> $int {
                first.wrapping_add(second)
            }
        }
        impl Pair<$int> for Prod {
            #[inline(always)]
            fn pair(first: $int, second: $int) -> $int {
                first.wrapping_mul(second)
            }
        }
        impl Pair<$int> for And {
            #[inline(always)]
            fn pair(first: $int, second: $int) -> $int {
                first & second
            }
        }
        impl Pair<$int> for Or {
            #[inline(always)]
            fn pair(first: $int, second: $int) -> $int {
                first | second
            }
        }
        impl Pair<$int> for Xor {
            #[inline(always)]
            fn pair(first: $int, second: $int) -> $int {
                first ^ second
            }
        }
    )*};
}
integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! floats {
    ($($float:ty),*) => {$(
        impl Element for $float {
            type Bits = $float;
            type Wide = $float;
            #[inline(always)]
            fn widen(bits: $float) -> $float {
                bits
            }
            #[inline(always)]
            fn settle(wide: $float) -> $float {
                wide
            }
            #[inline(always)]
            fn narrow(wide: $float) -> $float {
                if wide.is_nan() { <$float>::NAN } else { wide }
            }
        }
        impl Times for $float {
            #[inline(always)]
            fn times(self, factor: $float) -> $float {
                self * factor
            }
        }
        impl Pair<$float> for Sum {
            #[inline(always)]
            fn pair(first: $float, second: $float) -> $float {
                first + second
            }
        }
        impl Pair<$float> for Prod {
            #[inline(always)]
            fn pair(first: $float, second: $float) -> $float {
                first * second
            }
        }
    )*};
}
floats!(f32, f64);

/// bfloat16: the upper half of a float32.
pub(super) struct Bf16;

impl Bf16 {
    /// The bits of `wide` with the upper half rounded to nearest even; the lower half is left over.
    #[inline(always)]
    fn rounded(wide: f32) -> u32 {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // Rounding the bits of a NaN could carry into an infinity or past the sign.
        if wide.is_nan() {
            0x7fc0_0000
        } else {
            rounded
        }
    }
}

impl Element for Bf16 {
    type Bits = u16;
    type Wide = f32;
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
    #[inline(always)]
    fn settle(wide: f32) -> f32 {
        f32::from_bits(Self::rounded(wide) & 0xffff_0000)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        (Self::rounded(wide) >> 16) as u16
    }
}

/// The layout of a float of at most 16 bits with an exponent narrower than that of float32.
pub(super) trait Format {
    /// The stored form.
    type Bits: Copy + Default + Into<u32>;
    /// Bits of the fraction.
    const FRACTION: u32;
    /// The exponent's bias.
    const BIAS: u32;
    /// The sign's mask.
    const SIGN: u32;
    /// The largest magnitude, as stored, that is not a NaN.
    const TOP: u32;
    /// Where larger values end: the largest finite value, or for a type that overflows to infinity the power of two
    /// whose encoding is infinity.
    const CLAMP: f32;
    /// Whether the exponent of all ones means infinity and NaN.
    const INFINITY: bool;
    /// The stored form of a NaN.
    const NAN: u32;
    /// The low bits of `bits`.
    fn truncate(bits: u32) -> Self::Bits;
}

/// IEEE half precision.
pub(super) struct F16;
/// OCP E4M3: no infinity; overflow saturates.
pub(super) struct E4m3;
/// OCP E5M2: as IEEE, but overflow saturates.
pub(super) struct E5m2;

macro_rules! format {
    ($name:ty, $bits:ty, $fraction:literal, $bias:literal, $top:literal, $clamp:literal, $infinity:literal, $nan:literal) => {
        impl Format for $name {
            type Bits = $bits;
            const FRACTION: u32 = $fraction;
            const BIAS: u32 = $bias;
            const SIGN: u32 = 1 << (<$bits>::BITS - 1);
            const TOP: u32 = $top;
            const CLAMP: f32 = $clamp;
            const INFINITY: bool = $infinity;
            const NAN: u32 = $nan;
            #[inline(always)]
            fn truncate(bits: u32) -> $bits {
                bits as $bits
            }
        }
    };
}
format!(F16, u16, 10, 15, 0x7c00, 65536.0, true, 0x7e00);
format!(E4m3, u8, 3, 7, 0x7e, 448.0, false, 0x7f);
format!(E5m2, u8, 2, 15, 0x7c, 57344.0, true, 0x7f);

/// A small float computed with in float32.
pub(super) struct Small<F>(PhantomData<F>);

impl<F: Format> Small<F> {
    /// Rounds |`wide`| to the type by adding a power of two so large that the sum's last bit is the type's.
    ///
    /// Returns the sum, the power, and the power's exponent field, counted from that of the smallest normal number.
    #[inline(always)]
    fn round(wide: f32) -> (f32, f32, u32) {
        let smallest = (128 - F::BIAS) << 23;
        let magnitude = wide.abs();
        let clamped = if magnitude < F::CLAMP { magnitude } else { F::CLAMP };
        let exponent = (clamped.to_bits() & 0x7f80_0000).max(smallest);
        let power = f32::from_bits(exponent + ((23 - F::FRACTION) << 23));
        (clamped + power, power, exponent - smallest)
    }
}

impl<F: Format> Element for Small<F> {
    type Bits = F::Bits;
    type Wide = f32;

    #[inline(always)]
    fn widen(bits: F::Bits) -> f32 {
        let bits: u32 = bits.into();
        let magnitude = bits & (F::SIGN - 1);
        let shifted = magnitude << (23 - F::FRACTION);
        let normal = shifted + ((127 - F::BIAS) << 23);
        // A subnormal is read as the fraction of the smallest normal number, which is then taken away again.
        let one = (128 - F::BIAS) << 23;
        let subnormal = (f32::from_bits(shifted + one) - f32::from_bits(one)).to_bits();
        let finite = if magnitude < (1 << F::FRACTION) { subnormal } else { normal };
        let special = if F::INFINITY { magnitude >= F::TOP } else { magnitude > F::TOP };
        let value = if special { shifted | 0x7f80_0000 } else { finite };
        f32::from_bits(value | ((bits & F::SIGN) * (0x8000_0000 / F::SIGN)))
    }

    #[inline(always)]
    fn settle(wide: f32) -> f32 {
        let (sum, power, _) = Self::round(wide);
        let magnitude = sum - power;
        // Where the clamp is not a value of the type, reaching it means infinity.
        let overflowed = F::CLAMP == 65536.0 && magnitude >= F::CLAMP;
        let magnitude = if overflowed { f32::INFINITY } else { magnitude };
        if wide.is_nan() {
            wide
        } else {
            magnitude.copysign(wide)
        }
    }

    #[inline(always)]
    fn narrow(wide: f32) -> F::Bits {
        let (sum, _, exponent) = Self::round(wide);
        let magnitude = (exponent >> (23 - F::FRACTION)) + (sum.to_bits() & ((4 << F::FRACTION) - 1));
        let sign = (wide.to_bits() / (0x8000_0000 / F::SIGN)) & F::SIGN;
        F::truncate(if wide.is_nan() { F::NAN } else { magnitude | sign })
    }
}

/// A float that is only compared: its wide form is the integer of the same order, in which +0 is above -0 and a NaN is
/// below everything (or above, where the smaller is sought), so that a number wins.
pub(super) struct Ranked<T, const LARGER: bool>(PhantomData<T>);

/// A ranked type: the stored form, the largest magnitude that is no NaN, and the NaN stored.
macro_rules! ranked {
    ($name:ty, $bits:ty, $rank:ty, $top:literal, $nan:literal) => {
        impl<const LARGER: bool> Element for Ranked<$name, LARGER> {
            type Bits = $bits;
            type Wide = $rank;
            #[inline(always)]
            fn widen(bits: $bits) -> $rank {
                let signed = bits as $rank;
                let rank = signed ^ ((signed >> (<$rank>::BITS - 1)) & <$rank>::MAX);
                let nan = if LARGER { <$rank>::MIN } else { <$rank>::MAX };
                if signed & <$rank>::MAX > $top {
                    nan
                } else {
                    rank
                }
            }
            #[inline(always)]
            fn settle(rank: $rank) -> $rank {
                rank
            }
            #[inline(always)]
            fn narrow(rank: $rank) -> $bits {
                let bits = rank ^ ((rank >> (<$rank>::BITS - 1)) & <$rank>::MAX);
                if bits & <$rank>::MAX > $top {
                    $nan
                } else {
                    bits as $bits
                }
            }
        }
    };
}
ranked!(f64, u64, i64, 0x7ff0_0000_0000_0000, 0x7ff8_0000_0000_0000);
ranked!(f32, u32, i32, 0x7f80_0000, 0x7fc0_0000);
ranked!(Bf16, u16, i16, 0x7f80, 0x7fc0);
ranked!(F16, u16, i16, 0x7c00, 0x7e00);
ranked!(E4m3, u8, i8, 0x7e, 0x7f);
ranked!(E5m2, u8, i8, 0x7c, 0x7f);
