//! What a reduction should give, computed slowly and plainly in higher precision: the judge of every other path.
//!
//! Nothing here is shared with the kernels. Elements are decoded to f64 (integers to i128), reduced there, and a result
//! is accepted when it is as near as *any* order of reducing the inputs, with a rounding to the type after every step,
//! can be guaranteed to come. Integers, maxima and minima have to be exact.
#![forbid(unsafe_code)]

use crate::dtype::{DataType, RedOp, ScalarBytes};

/// The layout of a float type.
struct Float {
    bits: u32,
    fraction: u32,
    bias: i32,
    largest: f64,
    /// Whether overflow gives the largest finite value.
    saturates: bool,
}

fn float(dtype: DataType) -> Float {
    let (bits, fraction, bias, largest, saturates) = match dtype {
        DataType::F16 => (16, 10, 15, 65504.0, false),
        DataType::BF16 => (16, 7, 127, f64::from(f32::from_bits(0x7f7f_0000)), false),
        DataType::F32 => (32, 23, 127, f64::from(f32::MAX), false),
        DataType::F64 => (64, 52, 1023, f64::MAX, false),
        DataType::F8E4M3 => (8, 3, 7, 448.0, true),
        DataType::F8E5M2 => (8, 2, 15, 57344.0, true),
        _ => unreachable!("{} is no float", dtype.name()),
    };
    Float { bits, fraction, bias, largest, saturates }
}

/// 2^exponent, for exponents that an f64 holds.
fn power_of_two(exponent: i32) -> f64 {
    if exponent < -1022 {
        f64::from_bits(1 << (exponent + 1074))
    } else {
        f64::from_bits(((exponent + 1023) as u64) << 52)
    }
}

/// The first element of `bytes`, as the low bits of a number.
fn raw(dtype: DataType, bytes: &[u8]) -> u64 {
    let mut scalar = ScalarBytes::default();
    scalar[..dtype.size()].copy_from_slice(&bytes[..dtype.size()]);
    u64::from_le_bytes(scalar)
}

/// The first element of `bytes` as an exact integer.
///
/// # Panics
/// When the type is a float.
pub fn decode_integer(dtype: DataType, bytes: &[u8]) -> i128 {
    let raw = raw(dtype, bytes);
    match dtype {
        DataType::I8 => i128::from(raw as i8),
        DataType::I16 => i128::from(raw as i16),
        DataType::I32 => i128::from(raw as i32),
        DataType::I64 => i128::from(raw as i64),
        DataType::U8 | DataType::U16 | DataType::U32 | DataType::U64 => i128::from(raw),
        _ => unreachable!("{} is no integer", dtype.name()),
    }
}

/// The element whose value is `value` modulo 2^bits.
pub fn encode_integer(dtype: DataType, value: i128) -> ScalarBytes {
    let mut scalar = (value as u64).to_le_bytes();
    scalar[dtype.size()..].fill(0);
    scalar
}

/// The value of the first element of `bytes`; exact for every type but 64-bit integers, which are rounded.
pub fn decode(dtype: DataType, bytes: &[u8]) -> f64 {
    let bits = raw(dtype, bytes);
    match dtype {
        DataType::F64 => return f64::from_bits(bits),
        DataType::F32 => return f64::from(f32::from_bits(bits as u32)),
        _ if dtype.is_integer() => return decode_integer(dtype, bytes) as f64,
        _ => {}
    }
    let layout = float(dtype);
    let fraction_mask = (1 << layout.fraction) - 1;
    let exponents = (1 << (layout.bits - 1 - layout.fraction)) - 1;
    let fraction = bits & fraction_mask;
    let exponent = (bits >> layout.fraction) & exponents;
    let in_fractions =
        |units: u64, exponent: u64| units as f64 * power_of_two(exponent as i32 - layout.bias - layout.fraction as i32);
    let magnitude = if dtype == DataType::F8E4M3 && exponent == exponents && fraction == fraction_mask {
        f64::NAN
    } else if dtype != DataType::F8E4M3 && exponent == exponents {
        if fraction == 0 {
            f64::INFINITY
        } else {
            f64::NAN
        }
    } else if exponent == 0 {
        in_fractions(fraction, 1)
    } else {
        in_fractions(fraction + fraction_mask + 1, exponent)
    };
    let negative = bits >> (layout.bits - 1) == 1;
    if negative {
        -magnitude
    } else {
        magnitude
    }
}

/// The element nearest to `value`, ties to even. Floats overflow to infinity, fp8 to its largest finite value; integers
/// saturate. A NaN becomes the type's quiet NaN.
pub fn encode(dtype: DataType, value: f64) -> ScalarBytes {
    if dtype.is_integer() {
        let rounded = value.round_ties_even();
        return match dtype {
            DataType::I8 => encode_integer(dtype, i128::from(rounded as i8)),
            DataType::U8 => encode_integer(dtype, i128::from(rounded as u8)),
            DataType::I16 => encode_integer(dtype, i128::from(rounded as i16)),
            DataType::U16 => encode_integer(dtype, i128::from(rounded as u16)),
            DataType::I32 => encode_integer(dtype, i128::from(rounded as i32)),
            DataType::U32 => encode_integer(dtype, i128::from(rounded as u32)),
            DataType::I64 => encode_integer(dtype, i128::from(rounded as i64)),
            _ => encode_integer(dtype, i128::from(rounded as u64)),
        };
    }
    let bits = match dtype {
        _ if value.is_nan() => match dtype {
            DataType::F64 => f64::NAN.to_bits(),
            DataType::F32 => u64::from(f32::NAN.to_bits()),
            DataType::F16 => 0x7e00,
            DataType::BF16 => 0x7fc0,
            _ => 0x7f,
        },
        DataType::F64 => value.to_bits(),
        DataType::F32 => u64::from((value as f32).to_bits()),
        _ => encode_small(&float(dtype), value),
    };
    bits.to_le_bytes()
}

fn encode_small(layout: &Float, value: f64) -> u64 {
    let sign = u64::from(value.is_sign_negative()) << (layout.bits - 1);
    let infinity = ((1 << (layout.bits - 1 - layout.fraction)) - 1) << layout.fraction;
    let magnitude = value.abs();
    if magnitude.is_infinite() && !layout.saturates {
        return sign | infinity;
    }
    let magnitude = if layout.saturates { magnitude.min(layout.largest) } else { magnitude };
    let exponent = (((magnitude.to_bits() >> 52) as i32) - 1023).max(1 - layout.bias);
    // Division by a power of two is exact, so this is the only rounding.
    let units = (magnitude / power_of_two(exponent - layout.fraction as i32)).round_ties_even();
    if units * power_of_two(exponent - layout.fraction as i32) > layout.largest {
        return sign | infinity;
    }
    // A number of units beyond the fraction's range carries into the exponent, as it should.
    let exponent = (exponent + layout.bias - 1) as u64;
    sign | ((exponent << layout.fraction) + units as u64)
}

/// Half the distance from 1 to the next larger value: the largest relative error of one rounding. Integers have none.
pub fn unit_roundoff(dtype: DataType) -> f64 {
    if dtype.is_integer() {
        return 0.0;
    }
    power_of_two(-(float(dtype).fraction as i32) - 1)
}

/// The input as the prologue of a user-made PreMulSum operation leaves it.
pub fn premultiplied(dtype: DataType, scalar: &ScalarBytes, input: &[u8]) -> Vec<u8> {
    let product = |element: &[u8]| match dtype {
        _ if dtype.is_integer() => {
            encode_integer(dtype, decode_integer(dtype, element).wrapping_mul(decode_integer(dtype, scalar)))
        }
        DataType::F64 => encode(dtype, decode(dtype, element) * decode(dtype, scalar)),
        _ => encode(dtype, f64::from(decode(dtype, element) as f32 * decode(dtype, scalar) as f32)),
    };
    input.chunks_exact(dtype.size()).flat_map(|element| product(element)[..dtype.size()].to_vec()).collect()
}

/// What a reduction of floats should give, and how far from it a result may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// The result in higher precision.
    pub value: f64,
    /// The largest error that rounding in any order can cause.
    pub bound: f64,
    /// Some order of reduction may overflow on the way: a result that is not finite is right too, and of a type that
    /// saturates every result is.
    pub may_overflow: bool,
}

impl Expected {
    fn exactly(value: f64) -> Expected {
        Expected { value, bound: 0.0, may_overflow: false }
    }

    /// Whether a reduction of this type may give `result`.
    pub fn accepts(&self, dtype: DataType, result: f64) -> bool {
        if self.may_overflow && (float(dtype).saturates || !result.is_finite()) {
            return true;
        }
        if !self.value.is_finite() {
            return result == self.value || (result.is_nan() && self.value.is_nan());
        }
        (result - self.value).abs() <= self.bound
    }
}

/// A number as an unevaluated sum, twice as precise as an f64.
#[derive(Clone, Copy)]
struct Precise(f64, f64);

impl Precise {
    fn add(self, x: f64) -> Precise {
        let sum = self.0 + x;
        let part = sum - self.0;
        Precise(sum, self.1 + ((self.0 - (sum - part)) + (x - part)))
    }

    fn times(self, x: f64) -> Precise {
        let product = self.0 * x;
        Precise(product, self.0.mul_add(x, -product) + self.1 * x)
    }

    fn value(self) -> f64 {
        // An error term is meaningless once the value is not finite.
        if self.1.is_finite() {
            self.0 + self.1
        } else {
            self.0
        }
    }
}

/// What the reduction of these float elements should give.
///
/// # Panics
/// When there are no values, or the type is an integer (whose results are exact: see [`check`]).
pub fn expected(op: RedOp, dtype: DataType, values: &[f64]) -> Expected {
    let n = values.len();
    assert!(n > 0, "a reduction of nothing");
    match op {
        RedOp::Max | RedOp::Min => {
            let wins = if op == RedOp::Max { f64::max } else { f64::min };
            return Expected::exactly(values.iter().copied().fold(f64::NAN, wins));
        }
        _ if n == 1 => return Expected::exactly(values[0]),
        _ if values.iter().any(|x| x.is_nan()) => return Expected::exactly(f64::NAN),
        _ => {}
    }
    let layout = float(dtype);
    // Small types are rounded twice: to float32, in which they are computed, and to the type.
    let twice = if layout.bits < 32 { power_of_two(-24) } else { 0.0 };
    let roundings = if op == RedOp::Avg { n + 1 } else { n - 1 };
    let unit = unit_roundoff(dtype) + twice + power_of_two(-100);
    // This function computes in f64 too, and for doubles its own last rounding shows.
    let own =
        if op == RedOp::Prod || dtype == DataType::F64 { n as f64 * power_of_two(-52) } else { power_of_two(-52) };
    let growth = (roundings as f64 * unit.ln_1p()).exp_m1() + own;
    let smallest = power_of_two(1 - layout.bias - layout.fraction as i32);
    let rounding = Rounding { layout, growth, floor: n as f64 * smallest };
    match op {
        RedOp::Prod => rounding.product(values),
        _ => rounding.sum(values, op == RedOp::Avg, dtype),
    }
}

/// What the roundings of a reduction can do.
struct Rounding {
    layout: Float,
    /// The relative growth of an error over all roundings.
    growth: f64,
    /// The absolute error of roundings below the smallest normal number.
    floor: f64,
}

impl Rounding {
    fn sum(&self, values: &[f64], average: bool, dtype: DataType) -> Expected {
        let n = values.len() as f64;
        let divisor = if average { n } else { 1.0 };
        let magnitude: f64 = values.iter().filter(|x| x.is_finite()).map(|x| x.abs()).sum();
        // Types of small range are scaled before they are added.
        let scaled_first = matches!(dtype, DataType::F16 | DataType::F8E4M3 | DataType::F8E5M2);
        let reach = if scaled_first { magnitude / divisor } else { magnitude } * (1.0 + self.growth);
        let overflow = reach > self.layout.largest;
        if values.iter().any(|x| x.is_infinite()) {
            let value: f64 = values.iter().filter(|x| x.is_infinite()).sum();
            return Expected { value, bound: 0.0, may_overflow: overflow || self.layout.saturates };
        }
        let value = values.iter().fold(Precise(0.0, 0.0), |sum, x| sum.add(*x)).value() / divisor;
        let one_sided = values.iter().all(|x| *x >= 0.0) || values.iter().all(|x| *x <= 0.0);
        let floor = if average { self.floor + self.floor / n } else { 0.0 };
        self.within(value, magnitude / divisor * self.growth + floor, overflow, one_sided)
    }

    fn product(&self, values: &[f64]) -> Expected {
        let product = values.iter().fold(Precise(1.0, 0.0), |product, x| product.times(*x)).value();
        if values.iter().any(|x| x.is_infinite()) {
            return Expected { value: product, bound: 0.0, may_overflow: true };
        }
        let reach: f64 = values.iter().map(|x| x.abs().max(1.0)).product::<f64>() * (1.0 + self.growth);
        let bound = product.abs() * self.growth + self.floor * reach;
        let never_shrinks = values.iter().all(|x| x.abs() >= 1.0);
        self.within(product, bound, reach > self.layout.largest, never_shrinks)
    }

    /// A type that saturates stays at its largest value where no later operand can bring it back.
    fn within(&self, value: f64, bound: f64, overflow: bool, monotone: bool) -> Expected {
        let largest = self.layout.largest;
        if self.layout.saturates && monotone {
            return Expected { value: value.clamp(-largest, largest), bound, may_overflow: false };
        }
        Expected { value, bound, may_overflow: overflow }
    }
}

/// The exact result of a reduction of integers, modulo 2^bits. An average divides the wrapped sum, truncating.
fn expected_integer(op: RedOp, dtype: DataType, values: &[i128]) -> ScalarBytes {
    let wrapped = |value: i128| decode_integer(dtype, &encode_integer(dtype, value));
    let sum = || values.iter().fold(0, |sum, x| wrapped(sum + x));
    let value = match op {
        RedOp::Sum => sum(),
        RedOp::Avg => sum() / values.len() as i128,
        RedOp::Prod => values.iter().fold(1, |product: i128, x| wrapped(product.wrapping_mul(*x))),
        RedOp::Max => values.iter().copied().max().unwrap_or(0),
        RedOp::Min => values.iter().copied().min().unwrap_or(0),
        RedOp::BitAnd => values.iter().fold(-1, |bits, x| bits & x),
        RedOp::BitOr => values.iter().fold(0, |bits, x| bits | x),
        RedOp::BitXor => values.iter().fold(0, |bits, x| bits ^ x),
    };
    encode_integer(dtype, value)
}

/// Checks a whole buffer: `result` must be a reduction of `inputs`, one per rank, all of the same length.
///
/// # Errors
/// Names the first wrong element, its value, what was expected and how far it may be off.
///
/// # Panics
/// Without inputs.
pub fn check(op: RedOp, dtype: DataType, inputs: &[&[u8]], result: &[u8]) -> Result<(), String> {
    assert!(!inputs.is_empty(), "a reduction of nothing");
    let size = dtype.size();
    if let Some(input) = inputs.iter().find(|input| input.len() != result.len()) {
        return Err(format!("the result has {} bytes where an input has {}", result.len(), input.len()));
    }
    let mut floats = Vec::with_capacity(inputs.len());
    let mut integers = Vec::with_capacity(inputs.len());
    for (i, got) in result.chunks_exact(size).enumerate() {
        let elements = inputs.iter().map(|input| &input[i * size..(i + 1) * size]);
        let place = || format!("element {i} of {} ({} of {} inputs)", dtype.name(), op.name(), inputs.len());
        if dtype.is_integer() {
            integers.clear();
            integers.extend(elements.map(|element| decode_integer(dtype, element)));
            let wanted = expected_integer(op, dtype, &integers);
            if wanted[..size] != *got {
                let (got, wanted) = (decode_integer(dtype, got), decode_integer(dtype, &wanted));
                return Err(format!("{} is {got}, expected {wanted}", place()));
            }
        } else {
            floats.clear();
            floats.extend(elements.map(|element| decode(dtype, element)));
            let wanted = expected(op, dtype, &floats);
            let got = decode(dtype, got);
            if !wanted.accepts(dtype, got) {
                let Expected { value, bound, .. } = wanted;
                return Err(format!("{} is {got:e}, expected {value:e} within {bound:e}", place()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: [DataType; 4] = [DataType::F16, DataType::BF16, DataType::F8E4M3, DataType::F8E5M2];

    /// All encodings of a small float.
    fn encodings(dtype: DataType) -> impl Iterator<Item = ScalarBytes> {
        (0..1u64 << (8 * dtype.size())).map(u64::to_le_bytes)
    }

    #[test]
    fn every_encoding_of_a_small_float_survives_decoding_and_encoding() {
        for dtype in SMALL {
            for bytes in encodings(dtype) {
                let value = decode(dtype, &bytes);
                let back = encode(dtype, value);
                if value.is_nan() {
                    assert!(decode(dtype, &back).is_nan(), "{dtype:?} {bytes:?}");
                } else if value.is_infinite() && float(dtype).saturates {
                    assert_eq!(decode(dtype, &back).abs(), 57344.0);
                } else {
                    assert_eq!(bytes, back, "{dtype:?} {value:e}");
                }
            }
        }
    }

    #[test]
    fn half_floats_decode_as_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let (f16, bf16) = (half::f16::from_bits(bits).to_f64(), half::bf16::from_bits(bits).to_f64());
            assert!(decode(DataType::F16, &bytes).total_cmp(&f16).is_eq() || f16.is_nan(), "{bits:#x}");
            assert!(decode(DataType::BF16, &bytes).total_cmp(&bf16).is_eq() || bf16.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn a_value_between_two_neighbours_goes_to_the_nearer_and_a_tie_to_the_even_one() {
        for dtype in SMALL {
            let half = 1u64 << (8 * dtype.size() - 1);
            for code in 0..half - 1 {
                let (low, high) = (code.to_le_bytes(), (code + 1).to_le_bytes());
                let (a, b) = (decode(dtype, &low), decode(dtype, &high));
                if !a.is_finite() || !b.is_finite() {
                    continue;
                }
                let middle = a + (b - a) / 2.0;
                let even = if code % 2 == 0 { low } else { high };
                assert_eq!(encode(dtype, middle), even, "{dtype:?} {middle:e}");
                assert_eq!(encode(dtype, middle - (b - a) / 64.0), low, "{dtype:?} {middle:e}");
                assert_eq!(encode(dtype, middle + (b - a) / 64.0), high, "{dtype:?} {middle:e}");
                assert_eq!(encode(dtype, -middle), (u64::from_le_bytes(even) | half).to_le_bytes());
            }
        }
    }

    #[test]
    fn overflow_is_infinite_in_half_floats_and_saturates_in_fp8() {
        let past = |dtype, value| decode(dtype, &encode(dtype, value));
        assert_eq!(past(DataType::F16, 65519.9), 65504.0);
        assert_eq!(past(DataType::F16, 65520.0), f64::INFINITY);
        assert_eq!(past(DataType::BF16, -3.4e38), f64::NEG_INFINITY);
        assert_eq!(past(DataType::F8E4M3, 1e9), 448.0);
        assert_eq!(past(DataType::F8E4M3, f64::NEG_INFINITY), -448.0);
        assert_eq!(past(DataType::F8E5M2, 1e9), 57344.0);
    }

    #[test]
    fn check_names_the_first_wrong_element() {
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (a, b) = (bytes(&[1.0, 2.0, 3.0]), bytes(&[0.5, 0.25, 1e-3]));
        let inputs: [&[u8]; 2] = [&a, &b];
        assert_eq!(check(RedOp::Sum, DataType::F32, &inputs, &bytes(&[1.5, 2.25, 3.001])), Ok(()));
        let error = check(RedOp::Sum, DataType::F32, &inputs, &bytes(&[1.5, 2.250001, 9.0])).unwrap_err();
        assert!(error.starts_with("element 1 of float (sum of 2 inputs) is 2.25000"), "{error}");
        let error = check(RedOp::Sum, DataType::U8, &[&[200], &[100]], &[45]).unwrap_err();
        assert!(error.ends_with("is 45, expected 44"), "{error}");
        assert_eq!(check(RedOp::Avg, DataType::I8, &[&[0xfd], &[0xfe]], &[0xfe]), Ok(()));
    }

    #[test]
    fn a_lost_or_doubled_input_is_noticed_in_every_type() {
        for dtype in DataType::HOST {
            let input = encode(dtype, 3.0);
            let input = &input[..dtype.size()];
            let inputs = [input; 4];
            for (value, right) in [(12.0, true), (9.0, false), (16.0, false)] {
                // fp8 has so few bits that four roundings may lose a quarter.
                let coarse = unit_roundoff(dtype) > 0.05;
                let verdict = check(RedOp::Sum, dtype, &inputs, &encode(dtype, value)[..dtype.size()]);
                assert!(verdict.is_ok() == right || (coarse && !right), "{dtype:?} {value}: {verdict:?}");
            }
            assert!(check(RedOp::Max, dtype, &inputs, &encode(dtype, 4.0)[..dtype.size()]).is_err());
        }
    }
}
