//! Division of many integers by one divisor, without a division instruction.
//!
//! The quotient of an unsigned n of N bits is `(h + ((n - h) >> 1)) >> shift`, where h is the upper half of n times a
//! constant. Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994, figure 4.1.
//! A signed number is divided by its magnitude, which truncates toward zero as C does.
#![forbid(unsafe_code)]

/// A divisor made ready for one type.
pub(super) struct Divisor<T> {
    multiplier: T,
    shift: u32,
}

/// A type that can be divided by a ready divisor.
pub(super) trait Quotient: Copy {
    /// What holds the magnitude.
    type Unsigned;

    /// The constants for `divisor`, which is at least 2. A divisor that the type cannot hold gives quotients of 0.
    fn ready(divisor: u64) -> Divisor<Self::Unsigned>;

    /// The quotient, truncated toward zero.
    fn over(self, divisor: &Divisor<Self::Unsigned>) -> Self;
}

macro_rules! quotients {
    ($unsigned:ty, $signed:ty, $double:ty) => {
        impl Quotient for $unsigned {
            type Unsigned = $unsigned;

            fn ready(divisor: u64) -> Divisor<$unsigned> {
                assert!(divisor >= 2, "a divisor of {divisor} is not divided by");
                if divisor > <$unsigned>::MAX as u64 {
                    return Divisor { multiplier: 0, shift: <$unsigned>::BITS - 1 };
                }
                let bits = 64 - (divisor - 1).leading_zeros();
                let above = (1u128 << bits) - u128::from(divisor);
                let multiplier = (above << <$unsigned>::BITS) / u128::from(divisor) + 1;
                Divisor { multiplier: multiplier as $unsigned, shift: bits - 1 }
            }

            #[inline(always)]
            fn over(self, divisor: &Divisor<$unsigned>) -> $unsigned {
                let product = <$double>::from(self) * <$double>::from(divisor.multiplier);
                let high = (product >> <$unsigned>::BITS) as $unsigned;
                (high + ((self - high) >> 1)) >> divisor.shift
            }
        }

        impl Quotient for $signed {
            type Unsigned = $unsigned;

            fn ready(divisor: u64) -> Divisor<$unsigned> {
                <$unsigned>::ready(divisor)
            }

            #[inline(always)]
            fn over(self, divisor: &Divisor<$unsigned>) -> $signed {
                let quotient = self.unsigned_abs().over(divisor) as $signed;
                if self < 0 {
                    quotient.wrapping_neg()
                } else {
                    quotient
                }
            }
        }
    };
}
quotients!(u8, i8, u16);
quotients!(u16, i16, u32);
quotients!(u32, i32, u64);
quotients!(u64, i64, u128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_over_every_divisor_truncates() {
        for divisor in 2..300u64 {
            let ready = u8::ready(divisor);
            for n in 0..=255u8 {
                assert_eq!(u64::from(n.over(&ready)), u64::from(n) / divisor, "{n} / {divisor}");
                let signed = n as i8;
                assert_eq!(i64::from(signed.over(&ready)), i64::from(signed) / divisor as i64, "{signed} / {divisor}");
            }
        }
    }

    #[test]
    fn wide_integers_near_multiples_and_extremes_truncate() {
        let divisors = [2, 3, 5, 7, 10, 641, 2048, 65_537, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 33]
            .into_iter()
            .chain([u64::MAX / 2, 1 << 63, u64::MAX - 1, u64::MAX]);
        for divisor in divisors {
            let multiples = [0u64, 1, 2, 3, 1000, u64::MAX / divisor, u64::MAX / divisor / 2];
            let near = multiples.into_iter().flat_map(|k| {
                let n = k.wrapping_mul(divisor);
                [n.wrapping_sub(1), n, n.wrapping_add(1), n ^ (1 << 63)]
            });
            for n in near {
                assert_eq!(n.over(&u64::ready(divisor)), n / divisor, "{n} / {divisor}");
                let signed = (i128::from(n as i64) / i128::from(divisor)) as i64;
                assert_eq!((n as i64).over(&i64::ready(divisor)), signed, "{} / {divisor}", n as i64);
                let short = n as u32;
                assert_eq!(u64::from(short.over(&u32::ready(divisor))), u64::from(short) / divisor);
                let (word, signed) = (n as u16, n as i16);
                assert_eq!(u64::from(word.over(&u16::ready(divisor))), u64::from(word) / divisor, "{word} / {divisor}");
                let expected = (i128::from(signed) / i128::from(divisor)) as i16;
                assert_eq!(signed.over(&i16::ready(divisor)), expected, "{signed} / {divisor}");
                let short = n as i32;
                let expected = (i128::from(short) / i128::from(divisor)) as i32;
                assert_eq!(short.over(&i32::ready(divisor)), expected, "{short} / {divisor}");
            }
        }
    }
}
