//! The model: what memory must hold after a call.
//!
//! Data is chosen so that every order of summation gives the same bits: whole numbers whose partial sums and products are
//! exact in the type, and for integers anything, since they wrap. Only averages by a number of ranks that is no power
//! of two are compared with a tolerance.

use crate::program::{Call, Kind, Reduction, Type};
use half::{bf16, f16};

/// A number that depends on everything it is given.
pub fn mixed(salt: u64, a: u64, b: u64) -> u64 {
    let mut x = salt ^ a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 29)
}

/// Whole numbers up to this size are exact in the type.
fn exact(dtype: Type) -> i64 {
    match dtype {
        Type::E5m2 => 8,
        Type::E4m3 => 16,
        Type::Bf16 => 256,
        Type::F16 => 2048,
        Type::F32 => 1 << 24,
        _ => 1 << 30,
    }
}

fn is_float(dtype: Type) -> bool {
    matches!(dtype, Type::E5m2 | Type::E4m3 | Type::Bf16 | Type::F16 | Type::F32 | Type::F64)
}

fn is_unsigned(dtype: Type) -> bool {
    matches!(dtype, Type::U8 | Type::U32 | Type::U64)
}

/// What elements are drawn from so that the result is exact; `None` where there is nothing but zero.
pub fn range(dtype: Type, reduction: Reduction, nranks: usize) -> Option<(i64, i64)> {
    let n = nranks as i64;
    let range = match (reduction, is_float(dtype)) {
        (Reduction::Sum | Reduction::PreMulSum { .. } | Reduction::Prod, false) => (-100, 100),
        (Reduction::Max | Reduction::Min, false) if is_unsigned(dtype) => (0, 255),
        (Reduction::Max | Reduction::Min, false) => (-128, 127),
        (Reduction::Max | Reduction::Min, true) => (-exact(dtype), exact(dtype)),
        (Reduction::Avg, false) => (0, (if dtype == Type::I8 { 127 } else { 255 }) / n),
        (Reduction::Avg, true) => (0, (exact(dtype) / n).min(10_000)),
        (Reduction::Sum, true) => (-(exact(dtype) / n), exact(dtype) / n),
        (Reduction::PreMulSum { .. }, true) => (-(exact(dtype) / n / 2), exact(dtype) / n / 2),
        // Powers of two, chosen in `value`.
        (Reduction::Prod, true) => (0, if n <= 8 { 3 } else { 0 }),
    };
    (range.1 > 0).then_some(range)
}

/// An element of a rank's contribution to a reduction.
fn value(call: &Call, range: (i64, i64), rank: usize, index: usize) -> i64 {
    let span = (range.1 - range.0 + 1) as u64;
    let drawn = mixed(call.salt, rank as u64 + 1, index as u64) >> 32;
    let drawn = range.0 + ((drawn * span) >> 32) as i64;
    match call.reduction {
        Reduction::Prod if is_float(call.dtype) => [1, -1, 2, -2][drawn as usize & 3],
        _ => drawn,
    }
}

/// Writes a whole number, or one over a power of two that the type has exactly.
fn encode(dtype: Type, value: i64, over: i64, out: &mut Vec<u8>) {
    let float = value as f64 / over as f64;
    match dtype {
        Type::I8 | Type::U8 => out.push(value as u8),
        Type::I32 | Type::U32 => out.extend((value as u32).to_ne_bytes()),
        Type::I64 | Type::U64 => out.extend(value.to_ne_bytes()),
        Type::F16 => out.extend(f16::from_f64(float).to_ne_bytes()),
        Type::Bf16 => out.extend(bf16::from_f64(float).to_ne_bytes()),
        Type::F32 => out.extend((float as f32).to_ne_bytes()),
        Type::F64 => out.extend(float.to_ne_bytes()),
        Type::E4m3 => out.push(small_float(float, 3, 7)),
        Type::E5m2 => out.push(small_float(float, 2, 15)),
    }
}

/// The bits of a number in a float of one byte, rounded down; exact for all that the model uses but averages.
fn small_float(value: f64, mantissa: u32, bias: i32) -> u8 {
    let sign = if value.is_sign_negative() && value != 0.0 { 0x80 } else { 0 };
    let size = value.abs();
    if size == 0.0 {
        return 0;
    }
    let exponent = (size.log2().floor() as i32).max(1 - bias);
    let scaled = (size / 2f64.powi(exponent) * f64::from(1 << mantissa)).round() as u32;
    // A mantissa without its leading bit is subnormal, and one that was rounded up to the next power carries over.
    let bits = (((exponent + bias - 1) as u32) << mantissa) + scaled;
    sign | bits as u8
}

fn small_value(bits: u8, mantissa: u32, bias: i32) -> f64 {
    let exponent = i32::from(bits & 0x7f) >> mantissa;
    let fraction = f64::from(bits & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let size = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    };
    if bits & 0x80 != 0 {
        -size
    } else {
        size
    }
}

/// The number that an element's bytes are.
fn decode(dtype: Type, bytes: &[u8]) -> f64 {
    let two = || [bytes[0], bytes[1]];
    let four = || [bytes[0], bytes[1], bytes[2], bytes[3]];
    match dtype {
        Type::E4m3 => small_value(bytes[0], 3, 7),
        Type::E5m2 => small_value(bytes[0], 2, 15),
        Type::F16 => f16::from_ne_bytes(two()).to_f64(),
        Type::Bf16 => bf16::from_ne_bytes(two()).to_f64(),
        Type::F32 => f64::from(f32::from_ne_bytes(four())),
        Type::F64 => f64::from_ne_bytes(std::array::from_fn(|i| bytes[i])),
        _ => f64::NAN,
    }
}

/// The factor that operations of our own have.
pub fn two(dtype: Type) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(dtype, 2, 1, &mut bytes);
    bytes
}

/// How far a result may be off, as a part of the largest operand; 0 is to the bit.
pub fn tolerance(call: &Call, nranks: usize) -> f64 {
    if !call.kind.reduces() || call.reduction != Reduction::Avg || nranks.is_power_of_two() {
        return 0.0;
    }
    let ulp = match call.dtype {
        Type::E5m2 => 0.25,
        Type::E4m3 => 0.125,
        Type::Bf16 => 1.0 / 256.0,
        Type::F16 => 1.0 / 1024.0,
        Type::F32 => 1e-6,
        Type::F64 => 1e-14,
        _ => return 0.0,
    };
    ulp * (nranks + 1) as f64
}

/// Whether an output is as the model has it.
pub fn agrees(call: &Call, nranks: usize, got: &[u8], wanted: &[u8]) -> bool {
    let tolerance = tolerance(call, nranks);
    if tolerance == 0.0 || got == wanted {
        return got == wanted;
    }
    let size = call.dtype.size();
    got.chunks(size).zip(wanted.chunks(size)).all(|(got, wanted)| {
        let (got, wanted) = (decode(call.dtype, got), decode(call.dtype, wanted));
        (got - wanted).abs() <= tolerance * wanted.abs().max(1.0)
    })
}

/// The elements that a rank gives: random bytes, or numbers where they are reduced.
pub fn contribution(call: &Call, nranks: usize, rank: usize, from: usize, count: usize, out: &mut Vec<u8>) {
    if !call.kind.reduces() {
        let size = call.dtype.size();
        for index in from..from + count {
            out.extend(&mixed(call.salt, rank as u64 + 1, index as u64).to_ne_bytes()[..size]);
        }
        return;
    }
    let range = range(call.dtype, call.reduction, nranks).expect("reductions are generated with a range");
    for index in from..from + count {
        encode(call.dtype, value(call, range, rank, index), 1, out);
    }
}

/// The reduction of all contributions.
fn reduced(call: &Call, nranks: usize, from: usize, count: usize, out: &mut Vec<u8>) {
    let range = range(call.dtype, call.reduction, nranks).expect("reductions are generated with a range");
    for index in from..from + count {
        let values = (0..nranks).map(|rank| value(call, range, rank, index));
        let wrapped = |value: i64| if is_unsigned(call.dtype) { value.max(0) } else { value };
        let (value, over) = match call.reduction {
            Reduction::Sum => (values.fold(0, i64::wrapping_add), 1),
            Reduction::Prod => (values.fold(1, i64::wrapping_mul), 1),
            Reduction::Max => (values.max().map_or(0, wrapped), 1),
            Reduction::Min => (values.min().map_or(0, wrapped), 1),
            Reduction::PreMulSum { .. } => (values.fold(0, |sum, value| sum + 2 * value), 1),
            Reduction::Avg if is_float(call.dtype) => (values.sum(), nranks as i64),
            Reduction::Avg => (values.sum::<i64>() / nranks as i64, 1),
        };
        encode(call.dtype, value, over, out);
    }
}

/// Elements that a rank passes in.
pub fn input_count(call: &Call, nranks: usize, rank: usize) -> usize {
    match call.kind {
        Kind::ReduceScatter | Kind::AlltoAll => call.count * nranks,
        Kind::Scatter if rank == call.root => call.count * nranks,
        Kind::Scatter | Kind::Messages => 0,
        Kind::Broadcast | Kind::Bcast if rank != call.root => 0,
        _ => call.count,
    }
}

/// Elements that a rank gets.
pub fn output_count(call: &Call, nranks: usize, rank: usize) -> usize {
    match call.kind {
        Kind::AllGather | Kind::AlltoAll => call.count * nranks,
        Kind::Gather if rank == call.root => call.count * nranks,
        Kind::Gather | Kind::Messages => 0,
        Kind::Reduce if rank != call.root => 0,
        _ => call.count,
    }
}

/// What a rank must have got.
pub fn output(call: &Call, nranks: usize, rank: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(output_count(call, nranks, rank) * call.dtype.size());
    let count = call.count;
    match call.kind {
        Kind::AllReduce => reduced(call, nranks, 0, count, &mut out),
        Kind::Reduce if rank == call.root => reduced(call, nranks, 0, count, &mut out),
        Kind::ReduceScatter => reduced(call, nranks, rank * count, count, &mut out),
        Kind::Broadcast | Kind::Bcast => contribution(call, nranks, call.root, 0, count, &mut out),
        Kind::Scatter => contribution(call, nranks, call.root, rank * count, count, &mut out),
        Kind::AllGather => (0..nranks).for_each(|from| contribution(call, nranks, from, 0, count, &mut out)),
        Kind::Gather if rank == call.root => {
            (0..nranks).for_each(|from| contribution(call, nranks, from, 0, count, &mut out));
        }
        Kind::AlltoAll => (0..nranks).for_each(|from| contribution(call, nranks, from, rank * count, count, &mut out)),
        Kind::Reduce | Kind::Gather | Kind::Messages => {}
    }
    out
}

/// The bytes of a message: its place in the call's list is its seed.
pub fn message(call: &Call, place: usize) -> Vec<u8> {
    let count = call.messages[place].2;
    let mut out = Vec::with_capacity(count * call.dtype.size() + 8);
    for index in 0..(count * call.dtype.size()).div_ceil(8) {
        out.extend(mixed(call.salt, place as u64 + 100, index as u64).to_ne_bytes());
    }
    out.truncate(count * call.dtype.size());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_of_one_byte_have_their_bits() {
        for (value, mantissa, bias, bits) in [
            (1.0, 3, 7, 0x38),
            (-2.0, 3, 7, 0xc0),
            (16.0, 3, 7, 0x58),
            (0.125, 3, 7, 0x20),
            (1.0, 2, 15, 0x3c),
            (-7.0, 2, 15, 0xc7),
            (256.0, 3, 7, 0x78),
        ] {
            assert_eq!(small_float(value, mantissa, bias), bits, "{value}");
            assert_eq!(small_value(bits, mantissa, bias), value);
        }
    }
}
