//! What is run on a bed and compared with the host device. Errors are sentences.

use super::beds::{Argument, Bed, Grid};
use super::memory::{Random, Twice};
use strata::device::gpu::kernels::{self, Batch, BatchScale, Shuffle, WORDS};
use strata::device::host;
use strata::dtype::{DataType, Operator, Prologue, Reduction};
use strata::memory::Region;

pub const OPERATORS: [Operator; 4] = [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min];

const DIVISORS: [u64; 14] = [1, 2, 3, 5, 7, 100, 128, 255, 256, 70_001, u32::MAX as u64, 1 << 32, 1 << 33, u64::MAX];

/// One job: bytes, where the destination is, where the sources are.
#[derive(Debug)]
struct Job {
    bytes: usize,
    dst: usize,
    srcs: Vec<usize>,
}

impl Job {
    /// A job of random length and places: all aligned alike, or but for one bit, aligned to elements, or to nothing; often in
    /// place.
    fn random(dtype: DataType, nsrcs: usize, memory: &mut Twice, random: &mut Random) -> Job {
        let size = dtype.size();
        let bytes = random.one_of(&[0, 1, 2, 5, 15, 16, 17, 63, 200, 1000]) * size;
        let alike = random.below(16 / size) * size;
        let (alignment, bit) = (random.below(5), 1 << random.below(4));
        let mut place = || {
            let misplaced = match alignment {
                0 | 1 => alike,
                2 => alike ^ (bit * random.below(2)),
                3 => random.below(16 / size) * size,
                _ => random.below(16),
            };
            memory.place(bytes, misplaced)
        };
        let srcs: Vec<usize> = (0..nsrcs).map(|_| place()).collect();
        let elsewhere = place();
        let dst = if random.below(2) == 0 { random.one_of(&srcs) } else { elsewhere };
        Job { bytes, dst, srcs }
    }

    /// The job's regions of the host's memory: the sources, the destination.
    fn regions(&self, memory: &Twice) -> (Vec<Region>, Region) {
        let srcs = self.srcs.iter().map(|at| memory.region(*at, self.bytes)).collect();
        (srcs, memory.region(self.dst, self.bytes))
    }
}

fn batch(jobs: &[Job], memory: &Twice, scale: BatchScale, factor: u64) -> Batch {
    let nsrcs = jobs[0].srcs.len();
    // What lies behind the jobs is nothing.
    let mut words = [0x1234_5678_9abc_def1; WORDS];
    for (words, job) in words.chunks_exact_mut(2 + nsrcs).zip(jobs) {
        words[0] = job.bytes as u64;
        words[1] = memory.address(job.dst);
        for (word, at) in words[2..].iter_mut().zip(&job.srcs) {
            *word = memory.address(*at);
        }
    }
    Batch { njobs: jobs.len() as u32, nsrcs: nsrcs as u32, scale: scale as u32, operation: 0, factor, words }
}

/// Memory, filled, and one to three jobs in it.
fn jobs(dtype: DataType, nsrcs: usize, random: &mut Random) -> (Twice, Vec<Job>) {
    let count = 1 + random.below(3);
    // No job has more than this, with the gaps around it.
    let most = 1000 * dtype.size() + 48;
    let mut memory = Twice::new(64 + (count * (nsrcs + 1) * most).next_multiple_of(4096));
    memory.fill(dtype, random);
    let jobs = (0..count).map(|_| Job::random(dtype, nsrcs, &mut memory, random)).collect();
    (memory, jobs)
}

/// A reduction of random jobs.
pub fn reduction(
    bed: &dyn Bed,
    dtype: DataType,
    operator: Operator,
    nsrcs: usize,
    random: &mut Random,
) -> Result<(), String> {
    let (memory, jobs) = jobs(dtype, nsrcs, random);
    let divisor = if random.below(3) == 0 { random.one_of(&DIVISORS) } else { 1 };
    let scale = if divisor == 1 && random.below(2) == 0 { BatchScale::None } else { BatchScale::Divide };
    let (grid, batch) = (random.grid(), batch(&jobs, &memory, scale, divisor));
    let what = || format!("{dtype:?} {operator:?} / {divisor}, {grid:?}, {jobs:?}");
    bed.run(&kernels::reduce(dtype, operator), Argument::Batch(&batch), &memory, grid)
        .map_err(|why| format!("{}: {why}", what()))?;
    for job in &jobs {
        let (srcs, dst) = job.regions(&memory);
        host::reduce(dtype, operator, divisor, &srcs, dst);
    }
    memory.same(what)
}

/// A scaling of random jobs; `round` decides which.
pub fn scaling(bed: &dyn Bed, dtype: DataType, round: usize, random: &mut Random) -> Result<(), String> {
    let (memory, jobs) = jobs(dtype, 1, random);
    let divisor = DIVISORS[round / 4 % DIVISORS.len()];
    let ratio = 1 + random.below(12) as u64;
    let scalar = random.element(dtype);
    let (scale, factor, prologue) = match round % 4 {
        0 => (BatchScale::None, 0, Prologue::None),
        1 => (BatchScale::Multiply, u64::from_le_bytes(scalar), Prologue::Scalar(scalar)),
        2 => (BatchScale::Reciprocal, divisor, Prologue::Reciprocal(divisor)),
        3 if !dtype.is_integer() && random.below(2) == 0 => (BatchScale::Ratio, 7 << 32 | ratio, Prologue::None),
        _ => (BatchScale::Divide, divisor, Prologue::None),
    };
    let (grid, batch) = (random.grid(), batch(&jobs, &memory, scale, factor));
    let what = || format!("{dtype:?} {scale:?} {factor:#x}, {grid:?}, {jobs:?}");
    bed.run(&kernels::scale(dtype), Argument::Batch(&batch), &memory, grid)
        .map_err(|why| format!("{}: {why}", what()))?;
    for job in &jobs {
        let (srcs, dst) = job.regions(&memory);
        if scale == BatchScale::Divide {
            host::divide(dtype, divisor, srcs[0], dst);
        } else if scale == BatchScale::Ratio {
            dst.copy_from(srcs[0]);
            host::multiply_by_ratio(dtype, (7, ratio), dst);
        } else {
            host::prologue(&Reduction { dtype, operator: Operator::Sum, prologue, divisor: 1 }, srcs[0], dst);
        }
    }
    memory.same(what)
}

/// A reduction of two sources with these contents.
fn pairs(bed: &dyn Bed, dtype: DataType, operator: Operator, first: &[u8], second: &[u8]) -> Result<(), String> {
    let bytes = first.len();
    let mut memory = Twice::new(3 * bytes + 4096);
    memory.write(0, &vec![0; 3 * bytes + 4096]);
    let srcs = vec![memory.place(bytes, 0), memory.place(bytes, 0)];
    let jobs = [Job { bytes, dst: memory.place(bytes, 0), srcs }];
    memory.write(jobs[0].srcs[0], first);
    memory.write(jobs[0].srcs[1], second);
    let batch = batch(&jobs, &memory, BatchScale::None, 0);
    let grid = Grid { blocks: 1, threads: 256, seed: 0 };
    bed.run(&kernels::reduce(dtype, operator), Argument::Batch(&batch), &memory, grid)?;
    let (srcs, dst) = jobs[0].regions(&memory);
    host::reduce(dtype, operator, 1, &srcs, dst);
    memory.same(|| format!("{dtype:?} {operator:?}"))
}

/// Every pair of bytes, or every 16-bit element with `others` others.
pub fn every_element(
    bed: &dyn Bed,
    dtype: DataType,
    operator: Operator,
    others: usize,
    random: &mut Random,
) -> Result<(), String> {
    if dtype.size() == 1 {
        let every: Vec<u8> = (0..=u16::MAX).map(|pair| pair as u8).collect();
        let others: Vec<u8> = (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect();
        return pairs(bed, dtype, operator, &every, &others);
    }
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    (0..others).try_for_each(|_| {
        let other = random.element(dtype);
        let others: Vec<u8> = (0..=u16::MAX).flat_map(|_| [other[0], other[1]]).collect();
        pairs(bed, dtype, operator, &every, &others)
    })
}

/// A copy at any alignment.
pub fn copy(bed: &dyn Bed, random: &mut Random) -> Result<(), String> {
    let mut memory = Twice::new(64 * 1024);
    memory.fill(DataType::U8, random);
    let (apart, at) = (random.one_of(&[0, 0, 1, 2, 4, 8]), random.below(16));
    let mut job = || {
        let bytes = random.one_of(&[0, 1, 3, 16, 17, 100, 1027, 5000]);
        Job { bytes, srcs: vec![memory.place(bytes, at)], dst: memory.place(bytes, at ^ apart) }
    };
    let jobs = [job(), job()];
    let (grid, batch) = (random.grid(), batch(&jobs, &memory, BatchScale::None, 0));
    bed.run(kernels::COPY, Argument::Batch(&batch), &memory, grid)
        .map_err(|why| format!("{grid:?} {jobs:?}: {why}"))?;
    for job in &jobs {
        let (srcs, dst) = job.regions(&memory);
        host::copy(dst, srcs[0]);
    }
    memory.same(|| format!("{grid:?} {jobs:?}"))
}

/// A shuffle of random blocks.
pub fn shuffle(bed: &dyn Bed, random: &mut Random) -> Result<(), String> {
    let mut memory = Twice::new(64 * 1024);
    memory.fill(DataType::U8, random);
    let unit = random.one_of(&[1, 2, 4, 8, 16]);
    let block = unit * random.one_of(&[0, 1, 3, 16, 33]);
    let (rows, columns) = (1 + random.below(4), 1 + random.below(5));
    // Strides may be less aligned than blocks are.
    let step = random.one_of(&[unit, unit, 1]);
    let gap = |random: &mut Random| block + step * random.below(3);
    // The source's rows lie together, the destination's columns.
    let src_column = gap(random);
    let src_row = columns * src_column + step * random.below(2);
    let dst_row = gap(random);
    let dst_column = rows * dst_row + step * random.below(2);
    let src = memory.place(rows * src_row, unit % 16);
    let dst = memory.place(columns * dst_column, unit % 16);
    let shuffle = Shuffle {
        src: memory.address(src),
        dst: memory.address(dst),
        block_bytes: block as u64,
        rows: rows as u64,
        columns: columns as u64,
        src_row_bytes: if rows == 1 { 13 } else { src_row as u64 },
        src_column_bytes: if columns == 1 { 13 } else { src_column as u64 },
        dst_row_bytes: dst_row as u64,
        dst_column_bytes: dst_column as u64,
    };
    bed.run(kernels::SHUFFLE, Argument::Shuffle(&shuffle), &memory, random.grid())
        .map_err(|why| format!("{shuffle:?}: {why}"))?;
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        let from = memory.region(src + row * src_row + column * src_column, block);
        memory.region(dst + row * dst_row + column * dst_column, block).copy_from(from);
    }
    memory.same(|| format!("{shuffle:?}"))
}
