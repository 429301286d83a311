//! What a rank that is not there contributes to a reduction: the element that leaves every other one as it is.
#![forbid(unsafe_code)]

use crate::dtype::{DataType, Operator, Prologue, Reduction, ScalarBytes};
use crate::memory::Bytes;

/// Bytes that are written at a time.
const STRETCH: usize = 1 << 14;

/// The bits of an element, as a number.
fn bits(dtype: DataType, operator: Operator) -> u64 {
    let width = 8 * dtype.size() as u32;
    let (all, sign) = (u64::MAX >> (64 - width), 1 << (width - 1));
    let is_float = !dtype.is_integer();
    match operator {
        // The sum of two negative zeros is one.
        Operator::Sum if is_float => sign,
        Operator::Sum | Operator::Or | Operator::Xor => 0,
        Operator::Prod => one(dtype),
        // A number wins over a NaN, and of NaN alone comes NaN.
        Operator::Max | Operator::Min if is_float => all >> 1,
        Operator::Max if dtype.is_unsigned() => 0,
        Operator::Max => sign,
        Operator::Min if dtype.is_unsigned() => all,
        Operator::Min => all >> 1,
        Operator::And => all,
    }
}

/// One, as the bits of an element.
fn one(dtype: DataType) -> u64 {
    match dtype {
        DataType::F16 => 0x3c00,
        DataType::BF16 => 0x3f80,
        DataType::F32 => u64::from(1f32.to_bits()),
        DataType::F64 => 1f64.to_bits(),
        DataType::F8E4M3 => 0x38,
        DataType::F8E5M2 => 0x3c,
        _ => 1,
    }
}

/// It again and again, in at most so many bytes.
pub fn pattern(reduction: &Reduction, most: usize) -> Vec<u8> {
    let element = bits(reduction.dtype, reduction.operator).to_le_bytes();
    element[..reduction.dtype.size()].iter().copied().cycle().take(STRETCH.min(most)).collect()
}

/// Fills a region with it.
pub fn fill(region: Bytes<'_>, reduction: &Reduction) {
    let pattern = pattern(reduction, region.len());
    let mut at = 0;
    while at < region.len() {
        let len = pattern.len().min(region.len() - at);
        region.part(at, len).write(&pattern[..len]);
        at += len;
    }
}

/// The reduction for a rank whose input is this, or has been multiplied already. What is multiplied by a factor of the rank's own is
/// multiplied by one; that of all ranks leaves it.
pub fn without_own_factor(reduction: Reduction) -> Reduction {
    match reduction.prologue {
        Prologue::Scalar(_) => {
            let scalar: ScalarBytes = one(reduction.dtype).to_le_bytes();
            Reduction { prologue: Prologue::Scalar(scalar), ..reduction }
        }
        Prologue::None | Prologue::Reciprocal(_) => reduction,
    }
}

/// Whether any library's reduction takes what stands for no input as none. What greatest and least floats are beside NaN differs between
/// libraries, and between their releases.
pub fn is_neutral_anywhere(reduction: &Reduction) -> bool {
    reduction.dtype.is_integer() || !matches!(reduction.operator, Operator::Max | Operator::Min)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host;
    use crate::dtype::RedOp;
    use crate::memory::Arena;

    /// Bits of elements that show what is done to them: all of the narrow types, some of the others.
    fn elements(dtype: DataType) -> Vec<u8> {
        let width = 8 * dtype.size();
        let mut state = 7u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ (state >> 29)
        };
        let special = |number: usize| match number % 6 {
            0 => 0,
            1 => 1 << (width - 1),
            2 => u64::MAX >> (64 - width),
            3 => (u64::MAX >> (64 - width)) >> 1,
            4 => one(dtype),
            _ => number as u64,
        };
        let number = |index: usize| match width {
            8 | 16 => index as u64,
            _ if index < 60 => special(index),
            _ => random(),
        };
        let mut all: Vec<u64> = (0..if width <= 16 { 1 << width } else { 4096 }).map(number).collect();
        all.resize(all.len().next_multiple_of(64), 0);
        all.into_iter().flat_map(|bits| bits.to_le_bytes()[..dtype.size()].to_vec()).collect()
    }

    fn is_nan(dtype: DataType, bits: u64) -> bool {
        let exponent_and_fraction = bits & ((1 << (8 * dtype.size() - 1)) - 1);
        exponent_and_fraction
            > match dtype {
                DataType::F16 | DataType::F8E5M2 => 0x7c << (8 * (dtype.size() - 1)),
                DataType::BF16 => 0x7f80,
                DataType::F32 => 0x7f80_0000,
                DataType::F64 => 0x7ff0_0000_0000_0000,
                DataType::F8E4M3 => 0x7e,
                _ => return false,
            }
    }

    #[test]
    fn it_leaves_every_element_of_every_type_as_it_is() {
        for dtype in DataType::HOST {
            for op in RedOp::of(dtype) {
                let reduction = Reduction { divisor: 1, ..Reduction::new(op, dtype, 5) };
                let values = elements(dtype);
                let (mut present, mut absent) = (Arena::new(values.len()), Arena::new(values.len()));
                for sides in [[0, 1], [1, 0]] {
                    let regions = [present.region(), absent.region()];
                    regions[0].write(&values);
                    fill(regions[1], &reduction);
                    let srcs = sides.map(|side| regions[side]);
                    host::reduce(dtype, reduction.operator, 1, &srcs, regions[0]);
                    let mut after = vec![0; values.len()];
                    regions[0].read(&mut after);
                    for (before, after) in values.chunks(dtype.size()).zip(after.chunks(dtype.size())) {
                        let bits =
                            |bytes: &[u8]| bytes.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
                        let (before, after) = (bits(before), bits(after));
                        // Any sum of these saturates.
                        let saturates = dtype == DataType::F8E5M2 && before & 0x7f == 0x7c;
                        let is_same = before == after || saturates || (is_nan(dtype, before) && is_nan(dtype, after));
                        assert!(is_same, "{} {}: {before:#x} became {after:#x}", op.name(), dtype.name());
                    }
                }
            }
        }
    }

    #[test]
    fn a_factor_is_applied_once() {
        let scaled = Reduction::pre_mul_sum(DataType::F32, [0, 0, 0, 0x40, 0, 0, 0, 0]);
        let without = without_own_factor(scaled);
        assert_eq!(without.prologue, Prologue::Scalar([0, 0, 0x80, 0x3f, 0, 0, 0, 0]));
        let average = Reduction::new(RedOp::Avg, DataType::F16, 4);
        assert_eq!(without_own_factor(average), average);
    }
}
