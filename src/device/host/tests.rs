//! The kernels against a plain pairwise oracle, bit for bit, on every path, at every alignment.

use super::kernel::{InstructionSet, Scale};
use super::reference::{check, decode, decode_integer, encode, encode_integer, premultiplied};
use super::{combine, copy, divide, prologue, reduce, reduce_at, scale_at, Combine, BLOCK_BYTES};
use crate::dtype::{DataType, Operator, Prologue, RedOp, Reduction, ScalarBytes};
use crate::memory::{Arena, Region};
use crate::plan::OperandOrder;

fn levels() -> Vec<InstructionSet> {
    let mut levels = vec![InstructionSet::Portable];
    if InstructionSet::best() != InstructionSet::Portable {
        levels.push(InstructionSet::best());
    }
    levels
}

/// What one pair must give, bit for bit.
fn oracle(dtype: DataType, operator: Operator, a: &[u8], b: &[u8]) -> ScalarBytes {
    if dtype.is_integer() {
        let (a, b) = (decode_integer(dtype, a), decode_integer(dtype, b));
        return encode_integer(
            dtype,
            match operator {
                Operator::Sum => a + b,
                Operator::Prod => a.wrapping_mul(b),
                Operator::Max => a.max(b),
                Operator::Min => a.min(b),
                Operator::And => a & b,
                Operator::Or => a | b,
                Operator::Xor => a ^ b,
            },
        );
    }
    let (x, y) = (decode(dtype, a), decode(dtype, b));
    let first_wins = match operator {
        Operator::Sum | Operator::Prod => {
            let narrow = dtype != DataType::F64;
            let single = |wide: f64, narrow_result: f32| if narrow { f64::from(narrow_result) } else { wide };
            let value = match operator {
                Operator::Sum => single(x + y, x as f32 + y as f32),
                _ => single(x * y, x as f32 * y as f32),
            };
            return encode(dtype, value);
        }
        _ if x.is_nan() && y.is_nan() => return encode(dtype, f64::NAN),
        _ if x.is_nan() || y.is_nan() => y.is_nan(),
        Operator::Max => x.total_cmp(&y).is_ge(),
        Operator::Min => x.total_cmp(&y).is_le(),
        _ => unreachable!("floats have no bits"),
    };
    let mut scalar = ScalarBytes::default();
    scalar[..dtype.size()].copy_from_slice(&if first_wins { a } else { b }[..dtype.size()]);
    scalar
}

/// The left fold of whole buffers by the oracle.
fn oracle_fold(dtype: DataType, operator: Operator, inputs: &[Vec<u8>]) -> Vec<u8> {
    let size = dtype.size();
    let mut folded = inputs[0].clone();
    for input in &inputs[1..] {
        for (a, b) in folded.chunks_exact_mut(size).zip(input.chunks_exact(size)) {
            let result = oracle(dtype, operator, a, b);
            a.copy_from_slice(&result[..size]);
        }
    }
    folded
}

/// A generator with a seed: xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// `count` elements: numbers of ordinary size, arbitrary bits (NaNs, subnormals), and special values.
    fn elements(&mut self, dtype: DataType, count: usize) -> Vec<u8> {
        let specials = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0, 448.0, 65504.0, 57344.0];
        let mut bytes = Vec::new();
        for _ in 0..count {
            let random = self.next();
            let scalar = match random >> 61 {
                0 => encode(dtype, specials[random as usize % specials.len()]),
                1..=3 => random.to_le_bytes(),
                _ => encode(dtype, (random as i32 >> 8) as f64 / f64::from(1 << 19)),
            };
            bytes.extend_from_slice(&scalar[..dtype.size()]);
        }
        bytes
    }
}

/// Buffers inside one arena, each at an address of its own choice.
struct Buffers {
    _arena: Arena,
    regions: Vec<Region>,
}

impl Buffers {
    /// Buffer k starts `offsets[k]` bytes past a multiple of 64, and holds `contents[k]`.
    fn new(contents: &[&[u8]], offsets: &[usize]) -> Buffers {
        let room = contents.iter().map(|bytes| bytes.len()).max().unwrap_or(0).next_multiple_of(64) + 128;
        let mut arena = Arena::new(room * contents.len());
        // SAFETY: the arena must outlive the region; because it goes with it, in one value.
        let whole = unsafe { arena.region().unbound() };
        let mut regions = Vec::new();
        for (k, bytes) in contents.iter().enumerate() {
            let region = whole.part(k * room + offsets[k % offsets.len()], bytes.len());
            region.write(bytes);
            regions.push(region);
        }
        Buffers { _arena: arena, regions }
    }
}

fn bytes_of(region: Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(&mut bytes);
    bytes
}

fn assert_same(dtype: DataType, got: &[u8], wanted: &[u8], what: impl Fn() -> String) {
    if got == wanted {
        return;
    }
    let size = dtype.size();
    let i = got.chunks(size).zip(wanted.chunks(size)).position(|(a, b)| a != b).unwrap_or(usize::MAX);
    let at = |bytes: &[u8]| bytes.chunks(size).nth(i).map(<[u8]>::to_vec);
    panic!("{dtype:?} {}: element {i} is {:x?}, wanted {:x?}", what(), at(got), at(wanted));
}

#[test]
fn every_type_operator_alignment_and_length_gives_the_oracles_bits_on_every_path() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for dtype in DataType::HOST {
        for operator in Operator::of(dtype) {
            let longest = 2500;
            let inputs = [random.elements(dtype, longest), random.elements(dtype, longest)];
            let wanted = oracle_fold(dtype, operator, &inputs);
            for count in (0..=70).chain([127, 128, 129, 255, 1000, longest]) {
                let bytes = count * dtype.size();
                for offset in 0..8 {
                    let contents = [&inputs[0][..bytes], &inputs[1][..bytes], &[0x5a; 20_000][..bytes]];
                    for level in levels() {
                        let buffers = Buffers::new(&contents, &[offset, (offset + 3) % 8, (7 * offset + 1) % 8]);
                        let [a, b, dst] = buffers.regions[..] else { unreachable!() };
                        reduce_at(level, dtype, operator, 1, &[a, b], dst);
                        let what = || format!("{operator:?} {level:?} of {count} at {offset}");
                        assert_same(dtype, &bytes_of(dst), &wanted[..bytes], what);
                        assert_eq!(bytes_of(b), contents[1], "a source changed");
                    }
                }
            }
        }
    }
}

#[test]
fn nothing_is_written_beside_the_destination() {
    for dtype in DataType::HOST {
        for count in [0, 1, 5, 31, 33, 200] {
            let bytes = count * dtype.size();
            let buffers = Buffers::new(&[&vec![1; bytes], &vec![2; bytes], &vec![0xee; bytes + 20]], &[1, 2, 3]);
            let [a, b, around] = buffers.regions[..] else { unreachable!() };
            for operator in Operator::of(dtype) {
                reduce(dtype, operator, 3, &[a, b], around.part(9, bytes));
                assert_eq!(bytes_of(around.part(0, 9)), [0xee; 9]);
                assert_eq!(bytes_of(around.part(9 + bytes, 11)), [0xee; 11]);
            }
        }
    }
}

#[test]
fn every_pair_of_fp8_values_gives_the_rounded_saturated_result() {
    for dtype in [DataType::F8E4M3, DataType::F8E5M2] {
        let first: Vec<u8> = (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect();
        let second: Vec<u8> = (0..=u16::MAX).map(|pair| pair as u8).collect();
        for operator in Operator::of(dtype) {
            let wanted = oracle_fold(dtype, operator, &[first.clone(), second.clone()]);
            for level in levels() {
                let buffers = Buffers::new(&[&first, &second, &first], &[0]);
                let [a, b, dst] = buffers.regions[..] else { unreachable!() };
                reduce_at(level, dtype, operator, 1, &[a, b], dst);
                assert_same(dtype, &bytes_of(dst), &wanted, || format!("{operator:?} {level:?}"));
            }
        }
    }
}

#[test]
fn every_half_float_meets_ordinary_and_special_partners() {
    for dtype in [DataType::F16, DataType::BF16] {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for partner in [0u16, 0x8000, 1, 0x03ff, 0x0400, 0x3c00, 0x3f80, 0x3555, 0x7bff, 0xfbff, 0x7c00, 0x7f80, 0x7fff]
        {
            let partners: Vec<u8> = partner.to_le_bytes().repeat(1 << 16);
            for operator in Operator::of(dtype) {
                let wanted = oracle_fold(dtype, operator, &[all.clone(), partners.clone()]);
                for level in levels() {
                    let buffers = Buffers::new(&[&all, &partners], &[0]);
                    let [a, b] = buffers.regions[..] else { unreachable!() };
                    reduce_at(level, dtype, operator, 1, &[a, b], b);
                    assert_same(dtype, &bytes_of(b), &wanted, || format!("{operator:?} {level:?} {partner:#x}"));
                }
            }
        }
    }
}

#[test]
fn many_sources_fold_as_a_chain_of_pairs_and_in_place_at_every_source() {
    let mut random = Random(7);
    for dtype in DataType::HOST {
        for operator in Operator::of(dtype) {
            for n in [1, 2, 3, 5, 8, 9, 15, 16, 23] {
                let count = if n == 9 { 2 * BLOCK_BYTES / dtype.size() + 77 } else { 150 };
                let inputs: Vec<Vec<u8>> = (0..n).map(|_| random.elements(dtype, count)).collect();
                let wanted = oracle_fold(dtype, operator, &inputs);
                let contents: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                let places = if n == 9 { vec![0, 8] } else { (0..n).collect() };
                for (level, place) in levels().into_iter().flat_map(|l| places.iter().map(move |p| (l, *p))) {
                    let buffers = Buffers::new(&contents, &[0, 5, 2, 11]);
                    reduce_at(level, dtype, operator, 1, &buffers.regions, buffers.regions[place]);
                    let what = || format!("{operator:?} {level:?} of {n} in place of {place}");
                    assert_same(dtype, &bytes_of(buffers.regions[place]), &wanted, what);
                }
            }
        }
    }
}

#[test]
fn combine_keeps_the_plans_operand_order_and_works_in_place() {
    let mut random = Random(11);
    for dtype in DataType::HOST {
        let (local, incoming) = (random.elements(dtype, 100), random.elements(dtype, 100));
        for order in [OperandOrder::LocalFirst, OperandOrder::IncomingFirst] {
            let how = Combine { dtype, operator: Operator::Sum, order, divisor: 1 };
            let sources = match order {
                OperandOrder::LocalFirst => [local.clone(), incoming.clone()],
                OperandOrder::IncomingFirst => [incoming.clone(), local.clone()],
            };
            let wanted = oracle_fold(dtype, Operator::Sum, &sources);
            for place in 0..3 {
                let buffers = Buffers::new(&[&local, &incoming, &local], &[3]);
                combine(how, buffers.regions[0], buffers.regions[1], buffers.regions[place]);
                assert_same(dtype, &bytes_of(buffers.regions[place]), &wanted, || format!("{order:?} into {place}"));
            }
        }
    }
}

/// The quotient of one element, rounded once.
fn quotient(dtype: DataType, element: &[u8], divisor: u64) -> ScalarBytes {
    match dtype {
        _ if dtype.is_integer() => encode_integer(dtype, decode_integer(dtype, element) / i128::from(divisor)),
        DataType::F64 => encode(dtype, decode(dtype, element) / divisor as f64),
        _ => encode(dtype, f64::from(decode(dtype, element) as f32 / divisor as f32)),
    }
}

#[test]
fn a_divisor_divides_the_rounded_result_once() {
    let mut random = Random(13);
    for dtype in DataType::HOST {
        let size = dtype.size();
        let inputs = [random.elements(dtype, 3000), random.elements(dtype, 3000)];
        let sums = oracle_fold(dtype, Operator::Sum, &inputs);
        for divisor in [1, 2, 3, 7, 8, 100, 1000, 1 << 31, u64::MAX] {
            let divided = |bytes: &[u8]| -> Vec<u8> {
                bytes.chunks_exact(size).flat_map(|x| quotient(dtype, x, divisor)[..size].to_vec()).collect()
            };
            // A division by 1 leaves even a NaN's payload alone.
            let wanted = if divisor == 1 { sums.clone() } else { divided(&sums) };
            for level in levels() {
                let buffers = Buffers::new(&[&inputs[0], &inputs[1]], &[1]);
                let [a, b] = buffers.regions[..] else { unreachable!() };
                reduce_at(level, dtype, Operator::Sum, divisor, &[a, b], a);
                assert_same(dtype, &bytes_of(a), &wanted, || format!("sum / {divisor} {level:?}"));
            }
            let buffers = Buffers::new(&[&inputs[0], &inputs[1]], &[1]);
            let [a, b] = buffers.regions[..] else { unreachable!() };
            divide(dtype, divisor, a, b);
            let wanted = if divisor == 1 { inputs[0].clone() } else { divided(&inputs[0]) };
            assert_same(dtype, &bytes_of(b), &wanted, || format!("/ {divisor}"));
        }
    }
}

#[test]
fn a_prologue_multiplies_and_rounds_once_on_every_path_and_in_place() {
    let mut random = Random(17);
    for dtype in DataType::HOST {
        let size = dtype.size();
        let input = random.elements(dtype, 777);
        for scalar in random.elements(dtype, 12).chunks_exact(size) {
            let mut factor = ScalarBytes::default();
            factor[..size].copy_from_slice(scalar);
            let wanted = premultiplied(dtype, &factor, &input);
            for level in levels() {
                let buffers = Buffers::new(&[&input], &[5]);
                let region = buffers.regions[0];
                scale_at(level, dtype, Scale::Multiply(Prologue::Scalar(factor)), region, region);
                assert_same(dtype, &bytes_of(region), &wanted, || format!("x {scalar:x?} {level:?}"));
            }
        }
        let buffers = Buffers::new(&[&input, &input], &[1, 6]);
        let [src, dst] = buffers.regions[..] else { unreachable!() };
        dst.write(&vec![0; dst.len()]);
        prologue(&Reduction::new(RedOp::Sum, dtype, 4), src, dst);
        assert_eq!(bytes_of(dst), input);
    }
}

#[test]
fn a_reciprocal_prologue_multiplies_by_the_float32_reciprocal() {
    let mut random = Random(19);
    for dtype in [DataType::F16, DataType::F8E4M3, DataType::F8E5M2] {
        let size = dtype.size();
        let input = random.elements(dtype, 500);
        for n in [2u64, 3, 6, 7, 1000] {
            let scaled = |x: &[u8]| encode(dtype, f64::from(decode(dtype, x) as f32 * (1.0 / n as f32)));
            let wanted: Vec<u8> = input.chunks_exact(size).flat_map(|x| scaled(x)[..size].to_vec()).collect();
            for level in levels() {
                let buffers = Buffers::new(&[&input, &input], &[0, 1]);
                let [src, dst] = buffers.regions[..] else { unreachable!() };
                let reduction = Reduction::new(RedOp::Avg, dtype, n as usize);
                scale_at(level, dtype, Scale::Multiply(reduction.prologue), src, dst);
                assert_same(dtype, &bytes_of(dst), &wanted, || format!("x 1/{n} {level:?}"));
            }
        }
    }
}

#[test]
fn whole_reductions_lie_within_the_references_bound() {
    let mut random = Random(23);
    for dtype in DataType::HOST {
        for op in RedOp::of(dtype) {
            for n in [1, 2, 3, 4, 8, 13] {
                let ordinary = |random: &mut Random| {
                    let value = |random: &mut Random| (random.next() as i32 >> 8) as f64 / f64::from(1 << 21);
                    (0..300).flat_map(|_| encode(dtype, value(random))[..dtype.size()].to_vec()).collect()
                };
                for wild in [false, true] {
                    let inputs: Vec<Vec<u8>> = (0..n)
                        .map(|_| if wild { random.elements(dtype, 300) } else { ordinary(&mut random) })
                        .collect();
                    let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                    let buffers = Buffers::new(&slices, &[0]);
                    let reduction = Reduction::new(op, dtype, n);
                    for region in &buffers.regions {
                        prologue(&reduction, *region, *region);
                    }
                    let dst = buffers.regions[0];
                    reduce(dtype, reduction.operator, reduction.divisor, &buffers.regions, dst);
                    let verdict = check(op, dtype, &slices, &bytes_of(dst));
                    assert_eq!(verdict, Ok(()), "{dtype:?} {op:?} of {n}");
                }
            }
        }
    }
}

#[test]
fn copies_move_every_byte_at_any_alignment() {
    let bytes: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
    for offset in 0..8 {
        let buffers = Buffers::new(&[&bytes, &vec![0; 5000]], &[offset, 3]);
        copy(buffers.regions[1], buffers.regions[0]);
        assert_eq!(bytes_of(buffers.regions[1]), bytes);
    }
}

#[test]
#[should_panic(expected = "regions of different lengths")]
fn regions_of_different_lengths_are_refused() {
    let buffers = Buffers::new(&[&[0; 8], &[0; 12]], &[0]);
    reduce(DataType::F32, Operator::Sum, 1, &buffers.regions, buffers.regions[0]);
}

#[test]
#[should_panic(expected = "6 bytes are not whole elements of float")]
fn half_an_element_is_refused() {
    let buffers = Buffers::new(&[&[0; 6], &[0; 6]], &[0]);
    reduce(DataType::F32, Operator::Sum, 1, &buffers.regions, buffers.regions[0]);
}
