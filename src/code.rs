//! Codes: forms in which floats take fewer bytes between nodes, at the price of precision.
//!
//! A chunk of `n` elements is coded by itself. `bf16` keeps two bytes of each. In the others blocks of [`BLOCK`] elements share a
//! scale, a power of 2, and each element is one byte: a fp8 (e4m3) in `mx8`, as in the Open Compute Project's microscaling
//! formats, or an integer in `int8`. First come the scales of all blocks, then the elements. The scale is the least with which
//! the largest element of its block does not saturate.
//!
//! A block that has a NaN or an infinity becomes NaN; `bf16`, which has both, keeps them. What rounds to more than the largest
//! float32 is infinite.
#![forbid(unsafe_code)]

use crate::dtype::DataType;
use crate::error::{Error, Result};
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// Elements that share a scale.
pub const BLOCK: usize = 32;
/// The scale of a block that is NaN. Others are exponents of 2, biased by 127.
const SCALE_OF_NAN: u8 = 255;
/// The least scale: with it and the largest there are no factors that are subnormal.
const LEAST_SCALE: u32 = 1;

/// A form of floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FloatCode {
    /// bfloat16: 8 bits of precision, the range of float32.
    Bf16,
    /// Blocks of fp8 (e4m3) under a scale: 4 bits of precision, and 17 binades below a block's largest element.
    Mx8,
    /// Blocks of 8-bit integers under a scale: 127 steps from 0 to about a block's largest element.
    Int8,
}

impl FloatCode {
    /// All codes.
    pub const ALL: [FloatCode; 3] = [FloatCode::Bf16, FloatCode::Mx8, FloatCode::Int8];

    /// The name used in variables, names of algorithms and the C interface.
    pub const fn name(self) -> &'static str {
        match self {
            FloatCode::Bf16 => "bf16",
            FloatCode::Mx8 => "mx8",
            FloatCode::Int8 => "int8",
        }
    }

    /// The code with this name.
    pub fn from_name(name: &str) -> Option<FloatCode> {
        Self::ALL.into_iter().find(|code| code.name() == name)
    }

    /// Bytes of `n` coded elements.
    pub const fn bytes(self, n: usize) -> usize {
        match self {
            FloatCode::Bf16 => 2 * n,
            FloatCode::Mx8 | FloatCode::Int8 => n + n.div_ceil(BLOCK),
        }
    }

    /// How many elements so many bytes are, if they are some number's.
    pub const fn elements(self, bytes: usize) -> Option<usize> {
        let n = match self {
            FloatCode::Bf16 => bytes / 2,
            FloatCode::Mx8 | FloatCode::Int8 => bytes - bytes.div_ceil(BLOCK + 1),
        };
        if self.bytes(n) == bytes {
            Some(n)
        } else {
            None
        }
    }

    /// An error for elements that it does not code.
    pub fn check(self, dtype: DataType) -> Result<()> {
        if self.codes(dtype) {
            return Ok(());
        }
        let (code, dtype) = (self.name(), dtype.name());
        let text = format!("code {code} is for floats that it makes smaller, and the elements are of {dtype}");
        Err(Error::InvalidArgument(text))
    }

    /// Whether it codes elements of a type: floats that it makes smaller.
    pub const fn codes(self, dtype: DataType) -> bool {
        match dtype {
            DataType::F32 | DataType::F64 => true,
            DataType::F16 | DataType::BF16 => !matches!(self, FloatCode::Bf16),
            _ => false,
        }
    }
}

/// What a setting says: a code, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CodeSetting(pub Option<FloatCode>);

impl FromStr for CodeSetting {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<CodeSetting, String> {
        match FloatCode::from_name(text) {
            None if text == "none" => Ok(CodeSetting(None)),
            None => Err("one of none, bf16, mx8 and int8 is wanted".to_string()),
            code => Ok(CodeSetting(code)),
        }
    }
}

impl Display for CodeSetting {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.map_or("none", FloatCode::name))
    }
}

/// bfloat16 of a float32, to nearest even; NaN becomes the quiet one.
#[inline(always)]
pub fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    if value.is_nan() {
        0x7fc0
    } else {
        rounded
    }
}

/// Codes elements, one after another.
pub fn encode(code: FloatCode, values: &[f32]) -> Vec<u8> {
    if code == FloatCode::Bf16 {
        return values.iter().flat_map(|value| to_bf16(*value).to_le_bytes()).collect();
    }
    let (mut scales, mut elements) = (Vec::new(), Vec::with_capacity(values.len()));
    for part in values.chunks(BLOCK) {
        let (mut block, mut coded) = ([0.0; BLOCK], [0; BLOCK]);
        block[..part.len()].copy_from_slice(part);
        scales.push(encode_block(code, &block, &mut coded));
        elements.extend_from_slice(&coded[..part.len()]);
    }
    [scales, elements].concat()
}

/// What coded elements stand for; nothing where so many bytes are no number of them.
pub fn decode(code: FloatCode, bytes: &[u8]) -> Vec<f32> {
    let value = |bits: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([bits[0], bits[1]])) << 16);
    let Some(n) = code.elements(bytes.len()) else { return Vec::new() };
    if code == FloatCode::Bf16 {
        return bytes.chunks_exact(2).map(value).collect();
    }
    let (scales, elements) = bytes.split_at(bytes.len() - n);
    let mut values = Vec::with_capacity(n);
    for (part, scale) in elements.chunks(BLOCK).zip(scales) {
        let (mut block, mut decoded) = ([0; BLOCK], [0.0; BLOCK]);
        block[..part.len()].copy_from_slice(part);
        decode_block(code, *scale, &block, &mut decoded);
        values.extend_from_slice(&decoded[..part.len()]);
    }
    values
}

/// Codes a block of at most [`BLOCK`] elements, of a code that has scales; gives the scale.
#[inline(always)]
pub fn encode_block(code: FloatCode, values: &[f32; BLOCK], coded: &mut [u8; BLOCK]) -> u8 {
    let largest = values.iter().fold(0, |largest: u32, value| largest.max(value.to_bits() & 0x7fff_ffff));
    if largest >= f32::INFINITY.to_bits() {
        *coded = [0; BLOCK];
        return SCALE_OF_NAN;
    }
    // The largest is `m * 2^e` with `1 <= m < 2`: the scale is the exponent that leaves it at most 448 = 1.75 * 2^8, or
    // 127 = 127/64 * 2^6.
    let (exponent, fraction) = (largest >> 23, largest & 0x7f_ffff);
    let (below, above) = match code {
        FloatCode::Mx8 => (8, fraction > 0x60_0000),
        _ => (6, fraction > 0x7e_0000),
    };
    let scale = (exponent + u32::from(above)).saturating_sub(below).max(LEAST_SCALE);
    // 2^(127 - scale): a scale of 254 would make it subnormal, and none is above 249.
    let factor = power_of_2(254 - scale);
    match code {
        FloatCode::Mx8 => values.iter().zip(coded).for_each(|(value, coded)| *coded = to_e4m3(value * factor)),
        _ => values.iter().zip(coded).for_each(|(value, coded)| *coded = to_integer(value * factor)),
    }
    scale as u8
}

/// What a coded block stands for.
#[inline(always)]
pub fn decode_block(code: FloatCode, scale: u8, coded: &[u8; BLOCK], values: &mut [f32; BLOCK]) {
    if scale == SCALE_OF_NAN {
        *values = [f32::NAN; BLOCK];
        return;
    }
    let factor = power_of_2(u32::from(scale));
    match code {
        FloatCode::Mx8 => coded.iter().zip(values).for_each(|(coded, value)| *value = from_e4m3(*coded) * factor),
        _ => coded.iter().zip(values).for_each(|(coded, value)| *value = f32::from(*coded as i8) * factor),
    }
}

/// `2^(exponent - 127)`.
#[inline(always)]
fn power_of_2(exponent: u32) -> f32 {
    f32::from_bits(exponent << 23)
}

/// Adding it leaves the integer nearest to a small number in the lowest bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// The nearest integer, ties to even, of a number of at most 127.
#[inline(always)]
fn to_integer(value: f32) -> u8 {
    ((value + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) as u8
}

/// The same for the subnormal fp8, whose steps are 2^-9.
const ROUND_SUBNORMAL: f32 = 16_384.0;
/// The least normal fp8.
const LEAST_NORMAL: f32 = 1.0 / 64.0;

/// The nearest fp8 (e4m3), ties to even, of a number of at most 448.
#[inline(always)]
fn to_e4m3(value: f32) -> u8 {
    let bits = value.to_bits();
    let (sign, size) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    let normal = (size + 0x7_ffff + (size >> 20 & 1)) >> 20;
    let subnormal = (f32::from_bits(size) + ROUND_SUBNORMAL).to_bits().wrapping_sub(ROUND_SUBNORMAL.to_bits());
    let is_normal = size >= LEAST_NORMAL.to_bits();
    // The exponent's bias goes from 127 to 7.
    let small = if is_normal { normal.wrapping_sub(120 << 3) } else { subnormal };
    (sign | small) as u8
}

/// What a fp8 (e4m3) stands for; 0x7f and 0xff, which are NaN, are never coded.
#[inline(always)]
fn from_e4m3(coded: u8) -> f32 {
    let (sign, size) = (u32::from(coded & 0x80) << 24, u32::from(coded & 0x7f));
    let normal = f32::from_bits((size << 20).wrapping_add(120 << 23));
    let subnormal = size as i32 as f32 * (1.0 / 512.0);
    let value = if size >= 8 { normal } else { subnormal };
    f32::from_bits(value.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All fp8 (e4m3) from 0 up, by their definition.
    fn e4m3(bits: u8) -> f64 {
        let (exponent, fraction) = (i32::from(bits >> 3), f64::from(bits & 7));
        match exponent {
            0 => fraction / 8.0 * 2f64.powi(-6),
            _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
        }
    }

    #[test]
    fn sizes_are_those_of_the_elements_and_back() {
        for code in FloatCode::ALL {
            assert_eq!(FloatCode::from_name(code.name()), Some(code));
            for n in 0..1000 {
                assert_eq!(code.elements(code.bytes(n)), Some(n), "{code:?} of {n}");
                assert!(code.bytes(n) <= if code == FloatCode::Bf16 { 2 * n } else { 33 * n / 32 + 1 });
            }
            for dtype in DataType::HOST.into_iter().filter(|dtype| code.codes(*dtype)) {
                assert!((1..1000).all(|n| code.bytes(n) <= dtype.size() * n), "{code:?} of {dtype:?}");
            }
        }
        assert_eq!([FloatCode::Mx8.elements(1), FloatCode::Mx8.elements(34), FloatCode::Bf16.elements(3)], [None; 3]);
        assert!(
            !FloatCode::Bf16.codes(DataType::BF16)
                && !FloatCode::Mx8.codes(DataType::I32)
                && FloatCode::Mx8.codes(DataType::F16)
        );
    }

    #[test]
    fn every_fp8_is_read_and_written_as_defined() {
        for bits in 0..0x7f {
            assert_eq!(f64::from(from_e4m3(bits)), e4m3(bits), "{bits:#x}");
            assert_eq!(f64::from(from_e4m3(bits | 0x80)), -e4m3(bits));
            assert_eq!(to_e4m3(e4m3(bits) as f32), bits);
            assert_eq!(to_e4m3(-e4m3(bits) as f32), bits | 0x80);
        }
        for bits in 0..0x7e {
            let (low, high) = (e4m3(bits), e4m3(bits + 1));
            let tie = (low + high) / 2.0;
            assert_eq!(to_e4m3(tie as f32), bits + (bits & 1), "halfway between {low} and {high}: the even one");
            let (below, above) = ((tie as f32).next_down(), (tie as f32).next_up());
            assert_eq!([to_e4m3(below), to_e4m3(above)], [bits, bits + 1]);
        }
    }

    /// Numbers from a seed, of all sizes that floats have.
    fn number(seed: &mut u64, from: i32, to: i32) -> f32 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (*seed >> 33) as u32;
        let exponent = from + (bits % (to - from + 1) as u32) as i32;
        let size = (1.0 + f64::from(bits >> 8) / f64::from(1u32 << 24)) * 2f64.powi(exponent);
        (if bits & 0x80 == 0 { size } else { -size }) as f32
    }

    fn coded_and_back(code: FloatCode, values: &[f32; BLOCK]) -> (u8, [f32; BLOCK]) {
        let (mut coded, mut back) = ([0; BLOCK], [0.0; BLOCK]);
        let scale = encode_block(code, values, &mut coded);
        decode_block(code, scale, &coded, &mut back);
        (scale, back)
    }

    #[test]
    fn errors_are_within_half_a_step_and_nothing_saturates() {
        let mut seed = 7;
        for (from, to) in [(-3, 3), (-20, 5), (100, 127), (-110, -90), (0, 0), (-119, 127)] {
            for _ in 0..2000 {
                let values: [f32; BLOCK] = std::array::from_fn(|_| number(&mut seed, from, to));
                let largest = values.iter().fold(0f64, |largest, value| largest.max(f64::from(value.abs())));
                for (code, relative, absolute) in
                    [(FloatCode::Mx8, 0.0625, 2f64.powi(-18)), (FloatCode::Int8, 0.0, 1.0 / 127.0)]
                {
                    let (_, back) = coded_and_back(code, &values);
                    for (value, back) in values.iter().zip(back) {
                        let (value, back) = (f64::from(*value), f64::from(back));
                        let most = relative * value.abs() + absolute * largest;
                        assert!((value - back).abs() <= most, "{code:?}: {value:e} became {back:e}, of {largest:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_keep_their_signs_the_largest_float_its_size_and_nan_takes_its_block() {
        for code in [FloatCode::Mx8, FloatCode::Int8] {
            let (scale, back) = coded_and_back(code, &[0.0; BLOCK]);
            assert_eq!((scale, back), (LEAST_SCALE as u8, [0.0; BLOCK]));
            let large = 1.75 * 2f32.powi(127);
            let mut values = [large; BLOCK];
            values[3] = -large;
            assert_eq!(coded_and_back(code, &values).1, values);
            // The nearest is 2^128.
            assert_eq!(coded_and_back(code, &[f32::MAX; BLOCK]).1, [f32::INFINITY; BLOCK]);
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = [1.0; BLOCK];
                values[31] = wrong;
                assert!(coded_and_back(code, &values).1.iter().all(|back| back.is_nan()));
            }
        }
        assert!(coded_and_back(FloatCode::Mx8, &[-0.0; BLOCK]).1.iter().all(|back| back.to_bits() == 1 << 31));
        let least = [f32::from_bits(1); BLOCK];
        assert_eq!(
            coded_and_back(FloatCode::Mx8, &least).1,
            [0.0; BLOCK],
            "far below the least scale: 0, as documented"
        );
    }
}
