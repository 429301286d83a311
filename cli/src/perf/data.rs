//! Test data that every rank can compute for all ranks, and the check of results against it.
//!
//! A rank's input repeats a table of [`PERIOD`] elements, a prime, so that no chunk or block boundary falls on the
//! period. A result is checked against a reference in higher precision for one period; further periods that are equal
//! to it bit by bit need no second look, which keeps the check of large buffers cheap.
#![forbid(unsafe_code)]

use super::collective::{Kind, Place, Reduce};
use strata::config::Config;
use strata::device::host::reference::{check, encode, premultiplied};
use strata::dtype::{DataType, RedOp, ScalarBytes};
use strata::memory::Bytes;
use strata::plan::Collective;

/// Elements after which a rank's input repeats.
const PERIOD: usize = 65521;

/// Bytes of the tables of `nranks` ranks, at most, for buffers of `bytes` bytes.
pub fn table_bytes(nranks: usize, bytes: usize) -> usize {
    nranks.saturating_mul(bytes.clamp(8, 8 * PERIOD))
}

/// The data of one collective, type and reduction.
pub struct Data {
    dtype: DataType,
    reduce: Reduce,
    nranks: usize,
    period: usize,
    /// Floats are such that codes leave nothing of them out.
    coded: bool,
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

impl Data {
    /// Data for `reduce` (or for moving) `dtype` among `nranks` ranks, in buffers of at most `elems` elements.
    pub fn new(dtype: DataType, reduce: Reduce, nranks: usize, elems: usize) -> Data {
        let period = PERIOD.min(elems.max(1));
        let mut data = Data { dtype, reduce, nranks, period, coded: false, tables: Vec::new() };
        data.tables = (0..nranks).map(|rank| data.table(rank)).collect();
        data
    }

    /// The same, of floats that survive any code if the environment sets one: whole numbers, of which few ranks have one that
    /// is not 0, so that no sum is larger than 16.
    pub fn survives_codes(mut self) -> Data {
        let (config, _) = Config::from_env();
        let is_coded = |collective: &Collective| {
            config.code(*collective).is_some() || config.algorithm(*collective).contains("coded_")
        };
        if !self.dtype.is_integer() && Collective::ALL.iter().any(is_coded) {
            self.coded = true;
            self.tables = (0..self.nranks).map(|rank| self.table(rank)).collect();
        }
        self
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
        let unsigned = dtype.is_unsigned();
        match self.reduce {
            reduce if self.coded && reduce != Reduce::Builtin(RedOp::Prod) => {
                let is_zero = reduce != Reduce::None && (rank + index) % self.nranks >= 8;
                encode(dtype, if is_zero { 0.0 } else { (random % 5) as f64 - 2.0 })
            }
            Reduce::Builtin(RedOp::Prod | RedOp::Max | RedOp::Min) => {
                self.of_products_and_extremes(rank, index, random)
            }
            Reduce::None | Reduce::Builtin(RedOp::BitAnd | RedOp::BitOr | RedOp::BitXor) => random.to_le_bytes(),
            _ => {
                let small = (random % 9) as f64;
                encode(dtype, if unsigned { small } else { small - 4.0 })
            }
        }
    }

    fn of_products_and_extremes(&self, rank: usize, index: usize, random: u64) -> ScalarBytes {
        let dtype = self.dtype;
        match self.reduce {
            Reduce::Builtin(RedOp::Prod) if dtype.is_integer() => (random | 1).to_le_bytes(),
            Reduce::Builtin(RedOp::Prod) => {
                let special = (index + rank) % self.nranks;
                encode(dtype, [2.0, 0.5].get(special).copied().unwrap_or(1.0))
            }
            Reduce::Builtin(RedOp::Max | RedOp::Min) if dtype.is_integer() => random.to_le_bytes(),
            _ => encode(dtype, f64::from(random as i8)),
        }
    }

    /// The factor of the PreMulSum operation.
    pub fn scalar(dtype: DataType) -> ScalarBytes {
        encode(dtype, 2.0)
    }

    /// Writes a rank's input from element `first` on.
    pub fn fill(&self, to: Bytes<'_>, rank: usize, first: usize) {
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
    pub fn wrong(&self, kind: Kind, result: Bytes<'_>, count: usize, place: Place) -> usize {
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

    /// The same where blocks differ in size and follow one another: those of an all-gather and a reduce-scatter, and what each rank of an
    /// all-to-all sends.
    pub fn wrong_skewed(&self, kind: Kind, result: Bytes<'_>, sizes: &[usize], rank: usize) -> usize {
        let size = self.dtype.size();
        let starts: Vec<usize> =
            sizes.iter().scan(0, |next, &count| Some(std::mem::replace(next, *next + count))).collect();
        match kind {
            Kind::ReduceScatter => self.wrong_reduced(result, starts[rank]),
            Kind::AllToAll => {
                let block = sizes[rank] * size;
                let from = |from: usize| self.wrong_moved(result.part(from * block, block), from, starts[rank]);
                (0..sizes.len()).map(from).sum()
            }
            _ => {
                let from = |(from, &count): (usize, &usize)| {
                    self.wrong_moved(result.part(starts[from] * size, count * size), from, 0)
                };
                sizes.iter().enumerate().map(from).sum()
            }
        }
    }

    fn wrong_moved(&self, result: Bytes<'_>, from: usize, first: usize) -> usize {
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

    fn wrong_reduced(&self, result: Bytes<'_>, first: usize) -> usize {
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
            let found = self.count_wrong(&inputs, &got);
            wrong += found;
            if found == 0 && bytes.len() == self.tables[0].len() {
                right.clone_from(&got);
            }
        });
        wrong
    }

    /// How many elements are not what the reduction of the inputs may be.
    fn count_wrong(&self, inputs: &[&[u8]], got: &[u8]) -> usize {
        let size = self.dtype.size();
        let products: Vec<Vec<u8>>;
        let mut operands = inputs.to_vec();
        let op = match self.reduce {
            Reduce::Builtin(op) => op,
            _ => {
                let scalar = Data::scalar(self.dtype);
                products = inputs.iter().map(|input| premultiplied(self.dtype, &scalar, input)).collect();
                operands = products.iter().map(Vec::as_slice).collect();
                RedOp::Sum
            }
        };
        if check(op, self.dtype, &operands, got).is_ok() {
            return 0;
        }
        let right = |at: usize| {
            let element: Vec<&[u8]> = operands.iter().map(|operand| &operand[at..at + size]).collect();
            check(op, self.dtype, &element, &got[at..at + size]).is_ok()
        };
        (0..got.len()).step_by(size).filter(|&at| !right(at)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata::memory::{Arena, Region};

    const PLACE: Place = Place { rank: 1, nranks: 3, root: 1 };

    fn reduced(data: &Data, count: usize) -> Arena {
        let size = data.dtype().size();
        let mut arena = Arena::new(count * size);
        let result = arena.region();
        let mut srcs: Vec<Arena> = (0..3).map(|_| Arena::new(count * size)).collect();
        let regions: Vec<Bytes<'_>> = srcs.iter_mut().map(Arena::region).collect();
        regions.iter().enumerate().for_each(|(rank, region)| data.fill(*region, rank, 0));
        strata::device::host::reduce(data.dtype(), strata::dtype::Operator::Sum, 1, &regions, result);
        arena
    }

    #[test]
    fn a_right_sum_is_accepted_and_every_changed_element_counted() {
        for dtype in DataType::HOST {
            let count = 3 * PERIOD + 5;
            let data = Data::new(dtype, Reduce::Builtin(RedOp::Sum), 3, count);
            let mut arena = reduced(&data, count);
            let result = arena.region();
            assert_eq!(data.wrong(Kind::AllReduce, result, count, PLACE), 0, "{dtype:?}");
            for element in [0, PERIOD, 2 * PERIOD + 7, count - 1] {
                result.part(element * dtype.size(), dtype.size()).write(&[0x55; 8][..dtype.size()]);
            }
            assert_eq!(data.wrong(Kind::AllReduce, result, count, PLACE), 4, "{dtype:?}");
        }
    }

    #[test]
    fn blocks_in_the_wrong_order_are_found() {
        let data = Data::new(DataType::U8, Reduce::None, 3, 300);
        let mut arena = Arena::new(300);
        let result = arena.region();
        (0..3).for_each(|rank| data.fill(result.part(rank * 100, 100), rank, 0));
        assert_eq!(data.wrong(Kind::AllGather, result, 100, PLACE), 0);
        data.fill(result.part(0, 100), 1, 0);
        assert!(data.wrong(Kind::AllGather, result, 100, PLACE) > 90);
        (0..3).for_each(|rank| data.fill(result.part(rank * 100, 100), rank, 100));
        assert_eq!(data.wrong(Kind::AllToAll, result, 100, PLACE), 0);
        assert!(data.wrong(Kind::AllGather, result, 100, PLACE) > 270);
    }

    #[test]
    fn blocks_of_different_sizes_are_checked_each_at_its_place() {
        let (sizes, data) = ([5, 0, 295], Data::new(DataType::U8, Reduce::None, 3, 300));
        let mut arena = Arena::new(300);
        let result = arena.region();
        [(0, 0, 5), (2, 5, 295)].iter().for_each(|&(rank, at, len)| data.fill(result.part(at, len), rank, 0));
        assert_eq!(data.wrong_skewed(Kind::AllGather, result, &sizes, 1), 0);
        result.part(4, 2).write(&[0x55; 2]);
        assert!(data.wrong_skewed(Kind::AllGather, result, &sizes, 1) >= 1);
        // Rank 0 gets the first five elements of each.
        (0..3).for_each(|rank| data.fill(result.part(rank * 5, 5), rank, 0));
        assert_eq!(data.wrong_skewed(Kind::AllToAll, result.part(0, 15), &sizes, 0), 0);
        (0..3).for_each(|rank| data.fill(result.part(rank * 5, 5), rank, 5));
        assert!(data.wrong_skewed(Kind::AllToAll, result.part(0, 15), &sizes, 0) > 10);
        let data = Data::new(DataType::F32, Reduce::Builtin(RedOp::Sum), 3, 300);
        let whole = reduced(&data, 300).leak();
        let block = |at: usize, count: usize| whole.part(at * 4, count * 4);
        assert_eq!(data.wrong_skewed(Kind::ReduceScatter, block(5, 295), &sizes, 2), 0);
        assert_eq!(data.wrong_skewed(Kind::ReduceScatter, block(5, 0), &sizes, 1), 0);
        assert!(data.wrong_skewed(Kind::ReduceScatter, block(0, 295), &sizes, 2) > 100);
    }

    #[test]
    fn a_part_is_checked_against_its_own_place() {
        let count = PERIOD / 2;
        let data = Data::new(DataType::F32, Reduce::Builtin(RedOp::Sum), 3, 3 * count);
        let whole = reduced(&data, 3 * count).leak();
        let part = |rank: usize, region: Region| region.part(rank * count * 4, count * 4);
        assert_eq!(data.wrong(Kind::ReduceScatter, part(1, whole), count, PLACE), 0);
        assert!(data.wrong(Kind::ReduceScatter, part(2, whole), count, PLACE) > count / 2);
    }
}
