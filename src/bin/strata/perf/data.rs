//! Test data that every rank can compute for all ranks, and the check of results against it.
//!
//! A rank's input repeats a table of [`PERIOD`] elements, a prime, so that no chunk or block boundary falls on the
//! period. A result is checked against a reference in higher precision for one period; further periods that are equal
//! to it bit by bit need no second look, which keeps the check of large buffers cheap.
#![forbid(unsafe_code)]

use super::collective::{Kind, Place, Reduce};
use half::{bf16, f16};
use strata::dtype::{DataType, RedOp, ScalarBytes};
use strata::memory::Region;

/// Elements after which a rank's input repeats.
const PERIOD: usize = 65521;

/// The data of one collective, type and reduction.
pub struct Data {
    dtype: DataType,
    reduce: Reduce,
    nranks: usize,
    period: usize,
    // One table per rank.
    tables: Vec<Vec<u8>>,
}

/// A well-mixed number for a rank and a position (splitmix64).
fn mixed(rank: usize, index: usize) -> u64 {
    let mut x = (rank as u64) << 40 ^ index as u64 ^ 0x5851_f42d_4c95_7f2d;
    x = (x ^ x >> 30).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The bytes of a small number that every type can hold exactly: `halves / 2`, at most 8 in size, whole for integers.
fn encode(dtype: DataType, halves: i32) -> ScalarBytes {
    let value = f64::from(halves) / 2.0;
    let mut bytes = [0; 8];
    let mut put = |from: &[u8]| bytes[..from.len()].copy_from_slice(from);
    match dtype {
        DataType::F16 => put(&f16::from_f64(value).to_le_bytes()),
        DataType::BF16 => put(&bf16::from_f64(value).to_le_bytes()),
        DataType::F32 => put(&(value as f32).to_le_bytes()),
        DataType::F64 => put(&value.to_le_bytes()),
        DataType::F8E4M3 => put(&[eight_bits(value, 3, 7)]),
        DataType::F8E5M2 => put(&[eight_bits(value, 2, 15)]),
        _ => put(&i64::from(halves / 2).to_le_bytes()),
    }
    bytes
}

/// An 8-bit float of a value that it can hold exactly and that is not subnormal.
fn eight_bits(value: f64, mantissa_bits: u32, bias: i32) -> u8 {
    if value == 0.0 {
        return 0;
    }
    let sign = if value < 0.0 { 0x80 } else { 0 };
    let exponent = value.abs().log2().floor() as i32;
    let mantissa = (value.abs() / f64::from(exponent).exp2() - 1.0) * f64::from(1 << mantissa_bits);
    sign | ((exponent + bias) as u8) << mantissa_bits | mantissa as u8
}

impl Data {
    /// Data for `reduce` (or for moving) `dtype` among `nranks` ranks, in buffers of at most `elems` elements.
    pub fn new(dtype: DataType, reduce: Reduce, nranks: usize, elems: usize) -> Data {
        let period = PERIOD.min(elems.max(1));
        let mut data = Data { dtype, reduce, nranks, period, tables: Vec::new() };
        data.tables = (0..nranks).map(|rank| data.table(rank)).collect();
        data
    }

    /// The element type.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The reduction.
    pub fn reduce(&self) -> Reduce {
        self.reduce
    }

    fn table(&self, rank: usize) -> Vec<u8> {
        let size = self.dtype.size();
        let mut table = Vec::with_capacity(self.period * size);
        for index in 0..self.period {
            table.extend_from_slice(&self.element(rank, index)[..size]);
        }
        table
    }

    /// Moved data is any bits. Reduced data is such that no rounding hides an error: sums are of small whole numbers,
    /// products of one 2, one 1/2 and ones (integers: odd numbers, which wrap but do not become zero), extremes of
    /// numbers spread over the type.
    fn element(&self, rank: usize, index: usize) -> ScalarBytes {
        let random = mixed(rank, index);
        let dtype = self.dtype;
        let unsigned = matches!(dtype, DataType::U8 | DataType::U32 | DataType::U64);
        match self.reduce {
            Reduce::None => random.to_le_bytes(),
            Reduce::Builtin(RedOp::Prod) if dtype.is_integer() => (random | 1).to_le_bytes(),
            Reduce::Builtin(RedOp::Prod) => {
                let special = (index + rank) % self.nranks;
                encode(
                    dtype,
                    if special == 0 {
                        4
                    } else if special == 1 {
                        1
                    } else {
                        2
                    },
                )
            }
            Reduce::Builtin(RedOp::Max | RedOp::Min) if dtype.is_integer() => random.to_le_bytes(),
            Reduce::Builtin(RedOp::Max | RedOp::Min) if dtype == DataType::F32 => {
                let mut bytes = [0; 8];
                bytes[..4].copy_from_slice(&(random as i32 as f32).to_le_bytes());
                bytes
            }
            Reduce::Builtin(RedOp::Max | RedOp::Min) if dtype == DataType::F64 => (random as i64 as f64).to_le_bytes(),
            _ => {
                let small = (random % 9) as i32;
                encode(dtype, 2 * if unsigned { small } else { small - 4 })
            }
        }
    }

    /// The factor of the PreMulSum operation.
    pub fn scalar(dtype: DataType) -> ScalarBytes {
        encode(dtype, 4)
    }

    /// Writes a rank's input from element `first` on.
    pub fn fill(&self, to: Region, rank: usize, first: usize) {
        self.runs(to.len(), first, |offset, bytes| to.part(offset, bytes.len()).write(&self.tables[rank][bytes]));
    }

    /// Calls `act` with each run of `len` bytes that lies within one period: its offset, and its place in a table.
    fn runs(&self, len: usize, first: usize, mut act: impl FnMut(usize, std::ops::Range<usize>)) {
        let size = self.dtype.size();
        let period = self.period * size;
        let mut phase = first % self.period * size;
        let mut offset = 0;
        while offset < len {
            let run = (period - phase).min(len - offset);
            act(offset, phase..phase + run);
            offset += run;
            phase = 0;
        }
    }

    /// How many elements of a rank's result are wrong.
    pub fn wrong(&self, kind: Kind, result: Region, count: usize, place: Place) -> usize {
        let Place { rank, nranks, root } = place;
        let block = count * self.dtype.size();
        let (_, blocks) = kind.blocks(place);
        let moved = |from: usize, first: usize| self.wrong_moved(result.part(0, block), from, first);
        match kind {
            Kind::AllReduce | Kind::Reduce => self.wrong_reduced(result.part(0, blocks * block), 0),
            Kind::ReduceScatter => self.wrong_reduced(result.part(0, block), rank * count),
            Kind::Broadcast => moved(root, 0),
            Kind::Scatter => moved(root, rank * count),
            Kind::SendRecv => moved((rank + nranks - 1) % nranks, 0),
            Kind::AllGather | Kind::Gather | Kind::AllToAll => {
                let first = if kind == Kind::AllToAll { rank * count } else { 0 };
                (0..blocks).map(|from| self.wrong_moved(result.part(from * block, block), from, first)).sum()
            }
        }
    }

    fn wrong_moved(&self, result: Region, from: usize, first: usize) -> usize {
        let size = self.dtype.size();
        let mut wrong = 0;
        let mut got = Vec::new();
        self.runs(result.len(), first, |offset, bytes| {
            got.resize(bytes.len(), 0);
            result.part(offset, bytes.len()).read(&mut got);
            let wanted = &self.tables[from][bytes];
            if got != wanted {
                wrong += got.chunks(size).zip(wanted.chunks(size)).filter(|(got, wanted)| got != wanted).count();
            }
        });
        wrong
    }

    fn wrong_reduced(&self, result: Region, first: usize) -> usize {
        let mut wrong = 0;
        let mut got = Vec::new();
        let mut right = Vec::new();
        self.runs(result.len(), first, |offset, bytes| {
            got.resize(bytes.len(), 0);
            result.part(offset, bytes.len()).read(&mut got);
            if got == right {
                return;
            }
            let inputs: Vec<&[u8]> = self.tables.iter().map(|table| &table[bytes.clone()]).collect();
            let found = self.compare(&inputs, &got);
            wrong += found;
            if found == 0 && bytes.len() == self.tables[0].len() {
                right.clone_from(&got);
            }
        });
        wrong
    }

    fn compare(&self, inputs: &[&[u8]], got: &[u8]) -> usize {
        let size = self.dtype.size();
        let read = |bytes: &[u8]| -> f64 {
            match self.dtype {
                DataType::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap_or_default())),
                _ => f64::from(bytes[0]),
            }
        };
        let sum = |at: usize| inputs.iter().map(|input| read(&input[at..at + size])).sum::<f64>();
        (0..got.len()).step_by(size).filter(|&at| read(&got[at..at + size]) != sum(at)).count()
    }
}
