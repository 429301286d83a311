//! Kernels of codes on a bed, compared with the host's.

use super::beds::{Argument, Bed};
use super::cases::OPERATORS;
use super::memory::{Random, Twice};
use strata::code::FloatCode;
use strata::device::gpu::kernels::{element, fold, kernels_of, Batch, Kernel, Module, WORDS};
use strata::device::host::coding::{self, Folded};
use strata::dtype::{DataType, Operator};
use strata::memory::Region;

/// A chunk of one job: its elements, or rather how many, where they lie, and the chunks and the residual that belong to it.
#[derive(Debug)]
struct Job {
    n: usize,
    /// Of each stretch of elements the place and its elements.
    stretches: Vec<(usize, usize)>,
    chunk: usize,
    sources: Vec<usize>,
    residual: Option<usize>,
}

/// What all jobs of a batch have in common.
#[derive(Debug, Clone, Copy)]
struct Batched {
    code: FloatCode,
    dtype: DataType,
    operator: Operator,
    stretches: usize,
    sources: usize,
    residual: bool,
}

/// Elements of one size, or of all sizes and kinds.
fn elements(dtype: DataType, n: usize, random: &mut Random) -> Vec<u8> {
    let small = (random.next() as u32 >> 8) as f64 * 2f64.powi(random.below(200) as i32 - 100);
    let is_wild = random.below(3) == 0;
    let one = |random: &mut Random| match is_wild {
        true => random.element(dtype),
        false => {
            let share = (random.next() as i32 >> 8) as f64 / f64::from(1 << 22);
            strata::device::host::reference::encode(dtype, share * small)
        }
    };
    (0..n).flat_map(|_| one(random)[..dtype.size()].to_vec()).collect()
}

impl Job {
    fn random(of: &Batched, memory: &mut Twice, random: &mut Random) -> Job {
        let (n, size) = (random.one_of(&[0, 1, 2, 31, 32, 33, 64, 100, 515]), of.dtype.size());
        let apart = random.below(3);
        let place = |memory: &mut Twice, bytes: usize, unit: usize, random: &mut Random| {
            memory.place(bytes, if apart == 0 { random.below(16) } else { random.below(16 / unit) * unit })
        };
        let mut cuts: Vec<usize> = (1..of.stretches).map(|_| random.below(n + 1)).chain([n]).collect();
        cuts.sort_unstable();
        let mut stretches = Vec::new();
        let mut first = 0;
        for end in cuts.into_iter().take(of.stretches) {
            let at = place(memory, (end - first) * size, size, random);
            memory.write(at, &elements(of.dtype, end - first, random));
            stretches.push((at, end - first));
            first = end;
        }
        let residual = of.residual.then(|| {
            let at = place(memory, 4 * n, 4, random);
            memory.write(at, &elements(DataType::F32, n, random));
            at
        });
        let chunk_of = |memory: &mut Twice, random: &mut Random| {
            let at = place(memory, of.code.bytes(n), 1, random);
            let values: Vec<f32> = elements(DataType::F32, n, random)
                .chunks(4)
                .map(|bits| f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]))
                .collect();
            let mut coded = strata::code::encode(of.code, &values);
            if random.below(4) == 0 {
                // Any scale and any byte mean something, also what no code has.
                coded.iter_mut().for_each(|byte| *byte = random.next() as u8);
            }
            memory.write(at, &coded);
            at
        };
        let chunk = chunk_of(memory, random);
        let sources = (0..of.sources).map(|_| chunk_of(memory, random)).collect();
        Job { n, stretches, chunk, sources, residual }
    }

    /// What the host does of it.
    fn expect(&self, kernel: Kernel, of: &Batched, memory: &Twice) -> strata::error::Result<()> {
        let size = of.dtype.size();
        let stretches: Vec<Region> = self.stretches.iter().map(|&(at, n)| memory.region(at, n * size)).collect();
        let chunk_at = |at: usize| memory.region(at, of.code.bytes(self.n));
        let residual = self.residual.map(|at| memory.region(at, 4 * self.n));
        let chunk = chunk_at(self.chunk);
        match kernel {
            Kernel::Encode(_) => coding::encode(of.code, of.dtype, &stretches, residual, chunk),
            Kernel::Decode(_) => coding::decode(of.code, of.dtype, chunk, &stretches),
            _ => {
                let sources: Vec<Region> = self.sources.iter().map(|&at| chunk_at(at)).collect();
                let to = match of.stretches {
                    0 => Folded::Coded(chunk),
                    _ => Folded::Elements(of.dtype, &stretches),
                };
                coding::fold(of.code, of.operator, &sources, residual, to)
            }
        }
    }

    fn words(&self, kernel: Kernel, of: &Batched, memory: &Twice) -> Vec<u64> {
        let is_fold = matches!(kernel, Kernel::FoldCoded(_));
        let chunk = if is_fold && of.stretches > 0 { 0 } else { memory.address(self.chunk) };
        let residual = self.residual.map_or(0, |at| memory.address(at));
        let sources = self.sources.iter().map(|&at| memory.address(at));
        let mut end = 0;
        let stretches = self.stretches.iter().flat_map(|&(at, n)| {
            end += n as u64;
            [memory.address(at), end]
        });
        [self.n as u64, chunk, residual].into_iter().chain(sources).chain(stretches).collect()
    }
}

/// One launch of random jobs.
pub fn coding(bed: &dyn Bed, kernel: Kernel, random: &mut Random) -> Result<(), String> {
    let (Kernel::Encode(code) | Kernel::Decode(code) | Kernel::FoldCoded(code)) = kernel else {
        return Err(format!("{kernel:?} codes nothing"));
    };
    let is_fold = matches!(kernel, Kernel::FoldCoded(_));
    let coded: Vec<DataType> = DataType::ALL.into_iter().filter(|dtype| code.codes(*dtype)).collect();
    let stretches = if is_fold { random.below(4) } else { 1 + random.below(3) };
    let of = Batched {
        code,
        dtype: random.one_of(&coded),
        operator: if is_fold { random.one_of(&OPERATORS) } else { Operator::Sum },
        stretches,
        sources: if is_fold { random.one_of(&[1, 2, 3, 7]) } else { 0 },
        residual: random.below(2) == 0 && (matches!(kernel, Kernel::Encode(_)) || is_fold && stretches == 0),
    };
    let mut memory = Twice::new(128 << 10);
    memory.fill(DataType::U8, random);
    let jobs: Vec<Job> = (0..1 + random.below(3)).map(|_| Job::random(&of, &mut memory, random)).collect();
    // What lies behind the jobs is nothing.
    let mut words = [0x1234_5678_9abc_def1; WORDS];
    let width = jobs[0].words(kernel, &of, &memory).len();
    for (place, job) in words.chunks_exact_mut(width).zip(&jobs) {
        place.copy_from_slice(&job.words(kernel, &of, &memory));
    }
    let batch = Batch {
        njobs: jobs.len() as u32,
        nsrcs: width as u32 - 2,
        scale: element(of.dtype),
        operation: fold(of.operator),
        factor: of.sources as u64,
        words,
    };
    let grid = random.grid();
    let what = || format!("{kernel:?} {of:?}, {grid:?}, {jobs:?}");
    bed.run(&kernel.name(), Argument::Batch(&batch), &memory, grid).map_err(|why| format!("{}: {why}", what()))?;
    jobs.iter().try_for_each(|job| job.expect(kernel, &of, &memory)).map_err(|error| error.text().to_string())?;
    memory.same(what)
}

/// The kernel of codes of this name.
pub fn named(name: &str) -> Option<Kernel> {
    kernels_of(Module::Codes).into_iter().find(|kernel| kernel.name() == name)
}

/// Launches of every kernel.
pub fn every_coding(bed: &dyn Bed) -> Result<(), String> {
    let mut random = Random(0x2468_ace0_1357_9bdf);
    kernels_of(Module::Codes)
        .into_iter()
        .try_for_each(|kernel| (0..150).try_for_each(|_| coding(bed, kernel, &mut random)))
}
