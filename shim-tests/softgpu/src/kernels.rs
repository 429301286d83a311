//! Strata's kernels, computed on the host by its own reductions, or the PTX that a program loads.

use crate::fault::{Result, LAUNCH_FAILED, NOT_FOUND};
use crate::interpreted;
use crate::memory::{By, View};
use crate::random::Random;
use crate::settings::is_broken;
use crate::stream::Stream;
use crate::work::{pieces, Word};
use std::fmt;
use std::sync::Arc;
use strata::device::gpu::kernels::{self, element, fold, kernels_of, Batch, Flag, Kernel, Module, Shuffle, WORDS};
use strata::device::host;
use strata::device::host::coding::{self, Folded};
use strata::dtype::{DataType, Operator, Prologue, Reduction};
use strata::memory::Region;

/// Which kernel a name means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Twin {
    /// `strata_reduce_*`
    Reduce(Operator, DataType),
    /// `strata_scale_*`
    Scale(DataType),
    /// `strata_copy`
    Copy,
    /// `strata_shuffle`
    Shuffle,
    /// `strata_wait`
    Wait,
    /// `strata_raise`
    Raise,
    /// `strata_encode_*`, `strata_decode_*`, `strata_fold_*`
    Code(Kernel),
}

impl Twin {
    /// The kernel of this name.
    pub fn of(name: &str) -> Result<Twin> {
        let plain = [
            (kernels::COPY, Twin::Copy),
            (kernels::SHUFFLE, Twin::Shuffle),
            (kernels::WAIT, Twin::Wait),
            (kernels::RAISE, Twin::Raise),
        ];
        if let Some((_, twin)) = plain.into_iter().find(|(known, _)| *known == name) {
            return Ok(twin);
        }
        if let Some(kernel) = kernels_of(Module::Codes).into_iter().find(|kernel| kernel.name() == name) {
            return Ok(Twin::Code(kernel));
        }
        for dtype in DataType::ALL {
            if kernels::scale(dtype) == name {
                return Ok(Twin::Scale(dtype));
            }
            let operators = [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min];
            let found = operators.into_iter().find(|operator| kernels::reduce(dtype, *operator) == name);
            if let Some(operator) = found {
                return Ok(Twin::Reduce(operator, dtype));
            }
        }
        Err(NOT_FOUND)
    }

    /// The kernel's name.
    fn name(self) -> String {
        match self {
            Twin::Reduce(operator, dtype) => kernels::reduce(dtype, operator),
            Twin::Scale(dtype) => kernels::scale(dtype),
            Twin::Copy => kernels::COPY.to_string(),
            Twin::Shuffle => kernels::SHUFFLE.to_string(),
            Twin::Wait => kernels::WAIT.to_string(),
            Twin::Raise => kernels::RAISE.to_string(),
            Twin::Code(kernel) => kernel.name(),
        }
    }

    /// Bytes of its argument.
    pub fn argument_bytes(self) -> usize {
        match self {
            Twin::Reduce(..) | Twin::Scale(_) | Twin::Copy | Twin::Code(_) => size_of::<Batch>(),
            Twin::Shuffle => size_of::<Shuffle>(),
            Twin::Wait | Twin::Raise => size_of::<Flag>(),
        }
    }
}

/// What a function of a module is.
#[derive(Clone)]
pub enum Code {
    /// One of Strata's kernels, computed on the host.
    Twin(Twin),
    /// The kernel of this name.
    Ptx(Arc<ptx::Module>, String),
}

impl Code {
    /// Where its parameters lie in the bytes that a launch copies, and how long they are.
    pub fn params(&self) -> Vec<(usize, usize)> {
        match self {
            Code::Twin(twin) => vec![(0, twin.argument_bytes())],
            Code::Ptx(module, name) => module.kernel(name).map_or(Vec::new(), |kernel| kernel.params.clone()),
        }
    }

    fn name(&self) -> String {
        match self {
            Code::Twin(twin) => twin.name(),
            Code::Ptx(_, name) => name.clone(),
        }
    }
}

/// A launch: the kernel, the bytes of its parameters, how many blocks there are, and how many threads in each.
pub struct Launch {
    code: Code,
    params: Vec<u8>,
    blocks: [u32; 3],
    threads: [u32; 3],
}

/// A launch of a kernel that is computed on the host.
struct Computed {
    twin: Twin,
    words: Vec<u64>,
    blocks: [u32; 3],
    threads: u32,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let words = words(&self.params);
        let head = &words[..words.len().min(9)];
        write!(f, "kernel {} on {:?} blocks with {head:x?}", self.code.name(), self.blocks)
    }
}

/// What a kernel does with the words of a [`Batch`].
struct Jobs<'a> {
    count: usize,
    sources: usize,
    scale: u32,
    operation: u32,
    factor: u64,
    words: &'a [u64],
}

/// A kernel was launched with arguments that make no sense.
fn nonsense<T>(why: &str) -> Result<T> {
    eprintln!("softgpu: {why}");
    Err(LAUNCH_FAILED)
}

/// Bytes as words of 64 bits.
fn words(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

impl Launch {
    /// A launch with the bytes of the parameters.
    pub fn new(code: Code, params: Vec<u8>, blocks: [u32; 3], threads: [u32; 3]) -> Launch {
        Launch { code, params, blocks, threads }
    }

    /// Does what the kernel does.
    pub fn run(&self, stream: &Stream, random: &mut Random) -> Result {
        if is_broken(&self.code.name()) {
            return Ok(());
        }
        match &self.code {
            Code::Twin(twin) => {
                let (words, blocks) = (words(&self.params), self.blocks);
                Computed { twin: *twin, words, blocks, threads: self.threads.iter().product() }.run(stream, random)
            }
            Code::Ptx(module, name) => {
                interpreted::run(module, name, &self.params, (self.blocks, self.threads), stream, random)
            }
        }
    }
}

impl Computed {
    fn run(&self, stream: &Stream, random: &mut Random) -> Result {
        let by = By::Kernel(stream.context.device);
        match self.twin {
            Twin::Wait | Twin::Raise if (self.blocks, self.threads) != ([1; 3], 1) => {
                nonsense(&format!("{:?} on {:?} blocks of {} threads", self.twin, self.blocks, self.threads))
            }
            Twin::Wait => {
                let value = self.words[1] as u32;
                let word = Word::at(self.words[0], by)?;
                word.wait(stream, |now| now.wrapping_sub(value) as i32 >= 0);
                Ok(())
            }
            Twin::Raise => {
                Word::at(self.words[0], by)?.set(self.words[1] as u32);
                Ok(())
            }
            Twin::Shuffle => self.shuffle(stream, random, by),
            Twin::Copy | Twin::Scale(_) | Twin::Reduce(..) => {
                let jobs = self.jobs()?;
                for job in random.order(jobs.count) {
                    self.job(&jobs, job, stream, random, by)?;
                }
                Ok(())
            }
            Twin::Code(kernel) => {
                let jobs = self.jobs()?;
                for job in random.order(jobs.count) {
                    coding(kernel, &jobs, job, by)?;
                    stream.breathe(random);
                }
                Ok(())
            }
        }
    }

    fn jobs(&self) -> Result<Jobs<'_>> {
        let low = |word: u64| (word & u64::from(u32::MAX)) as usize;
        let high = |word: u64| (word >> 32) as usize;
        let [first, second, factor, ref words @ ..] = self.words[..] else { return nonsense("a batch without a head") };
        let (count, sources) = (low(first), high(first));
        let most = WORDS / (2 + sources);
        let one = matches!(self.twin, Twin::Copy | Twin::Scale(_));
        if count == 0 || count > most || sources == 0 || (one && sources != 1) {
            return nonsense(&format!("{:?} of {count} jobs with {sources} sources each", self.twin));
        }
        // Blocks of jobs that are not there end at once.
        if (self.blocks[1] as usize) < count || self.blocks[2] != 1 {
            return nonsense(&format!("{:?} of {count} jobs on {:?} blocks", self.twin, self.blocks));
        }
        let operation = high(second);
        if operation != 0 && !matches!(self.twin, Twin::Code(Kernel::FoldCoded(_))) {
            return nonsense("a batch with an operation that its kernel does not have");
        }
        Ok(Jobs { count, sources, scale: second as u32, operation: operation as u32, factor, words })
    }

    fn job(&self, jobs: &Jobs, job: usize, stream: &Stream, random: &mut Random, by: By) -> Result {
        let words = &jobs.words[job * (2 + jobs.sources)..][..2 + jobs.sources];
        let bytes = words[0] as usize;
        if bytes == 0 {
            return Ok(());
        }
        let dst = View::of(words[1], bytes, by)?;
        let srcs = words[2..].iter().map(|src| View::of(*src, bytes, by)).collect::<Result<Vec<View>>>()?;
        let mut same = vec![&dst];
        same.extend(&srcs);
        for view in &srcs {
            let apart = (view.host() as usize).abs_diff(dst.host() as usize);
            if apart != 0 && apart < bytes {
                return nonsense("a source overlaps the destination and is not it");
            }
        }
        for (at, length) in pieces(bytes, random) {
            let regions: Vec<Region> = same.iter().map(|view| region(view, at, length)).collect();
            self.piece(jobs, regions[0], &regions[1..])?;
            stream.breathe(random);
        }
        Ok(())
    }

    fn piece(&self, jobs: &Jobs, dst: Region, srcs: &[Region]) -> Result {
        let factor = jobs.factor;
        match (self.twin, jobs.scale) {
            (Twin::Copy, 0) => host::copy(dst, srcs[0]),
            (Twin::Scale(_), 0) => host::copy(dst, srcs[0]),
            (Twin::Scale(dtype), 1) => multiply(dtype, Prologue::Scalar(factor.to_le_bytes()), srcs[0], dst),
            (Twin::Scale(dtype), 2) if factor != 0 => multiply(dtype, Prologue::Reciprocal(factor), srcs[0], dst),
            (Twin::Scale(dtype), 3) if factor != 0 => host::divide(dtype, factor, srcs[0], dst),
            (Twin::Scale(dtype), 4) if factor >> 32 != 0 && factor as u32 != 0 && !dtype.is_integer() => {
                host::copy(dst, srcs[0]);
                host::multiply_by_ratio(dtype, (factor >> 32, u64::from(factor as u32)), dst);
            }
            (Twin::Reduce(operator, dtype), 0) => host::reduce(dtype, operator, 1, srcs, dst),
            (Twin::Reduce(operator, dtype), 3) if factor != 0 => host::reduce(dtype, operator, factor, srcs, dst),
            (twin, scale) => return nonsense(&format!("{twin:?} with scale {scale} and factor {factor}")),
        }
        Ok(())
    }

    fn shuffle(&self, stream: &Stream, random: &mut Random, by: By) -> Result {
        let [src, dst, block, rows, columns, src_row, src_column, dst_row, dst_column] = self.words[..] else {
            return nonsense("a shuffle without its nine words");
        };
        if block == 0 {
            return Ok(());
        }
        for index in random.order((rows * columns) as usize) {
            let (row, column) = (index as u64 / columns, index as u64 % columns);
            // Distances may be negative: the kernel's arithmetic wraps around.
            let place = |first: u64, row_bytes: u64, column_bytes: u64| {
                first.wrapping_add(row.wrapping_mul(row_bytes)).wrapping_add(column.wrapping_mul(column_bytes))
            };
            let from = View::of(place(src, src_row, src_column), block as usize, by)?;
            let to = View::of(place(dst, dst_row, dst_column), block as usize, by)?;
            host::copy(region(&to, 0, to.bytes()), region(&from, 0, from.bytes()));
            stream.breathe(random);
        }
        Ok(())
    }
}

/// What a kernel of codes does with a job.
fn coding(kernel: Kernel, jobs: &Jobs, job: usize, by: By) -> Result {
    let (Kernel::Encode(code) | Kernel::Decode(code) | Kernel::FoldCoded(code)) = kernel else {
        return nonsense(&format!("{kernel:?} is no kernel of codes"));
    };
    let width = 2 + jobs.sources;
    let words = &jobs.words[job * width..][..width];
    let types = [DataType::F16, DataType::BF16, DataType::F32, DataType::F64];
    let Some(dtype) = types.into_iter().find(|dtype| element(*dtype) == jobs.scale && code.codes(*dtype)) else {
        return nonsense(&format!("{} of elements of type {}", kernel.name(), jobs.scale));
    };
    let is_fold = matches!(kernel, Kernel::FoldCoded(_));
    let chunks = if is_fold { jobs.factor as usize } else { 0 };
    let [n, chunk, residual, ref others @ ..] = *words else { return nonsense("a coded chunk without its words") };
    let n = n as usize;
    if others.len() < chunks || (others.len() - chunks) % 2 != 0 {
        return nonsense(&format!("{chunks} sources of {} words", others.len()));
    }
    let (sources, stretches) = others.split_at(chunks);
    let ends = stretches.iter().skip(1).step_by(2).map(|end| *end as usize);
    let begins = std::iter::once(0).chain(ends.clone());
    let mut elements = Vec::new();
    for ((at, begin), end) in stretches.iter().step_by(2).zip(begins).zip(ends) {
        if end < begin || end > n {
            return nonsense(&format!("a stretch of the elements {begin} to {end} of {n}"));
        }
        elements.push(View::of(*at, (end - begin) * dtype.size(), by)?);
    }
    let chunk_at = |at: u64| View::of(at, code.bytes(n), by);
    let sources = sources.iter().map(|at| chunk_at(*at)).collect::<Result<Vec<View>>>()?;
    let chunk = if chunk == 0 { None } else { Some(chunk_at(chunk)?) };
    let residual = if residual == 0 { None } else { Some(View::of(residual, 4 * n, by)?) };
    let whole = |view: &View| region(view, 0, view.bytes());
    let elements: Vec<Region> = elements.iter().map(whole).collect();
    let residual = residual.as_ref().map(whole);
    let done = match (kernel, chunk.as_ref().map(whole)) {
        (Kernel::Encode(_), Some(chunk)) => coding::encode(code, dtype, &elements, residual, chunk),
        (Kernel::Decode(_), Some(chunk)) => coding::decode(code, dtype, chunk, &elements),
        (_, chunk) => {
            let operators = Operator::ON_GPUS.into_iter().find(|operator| fold(*operator) == jobs.operation);
            let Some(operator) = operators else { return nonsense(&format!("fold {}", jobs.operation)) };
            let sources: Vec<Region> = sources.iter().map(whole).collect();
            let to = chunk.map_or(Folded::Elements(dtype, &elements), Folded::Coded);
            coding::fold(code, operator, &sources, residual, to)
        }
    };
    done.or_else(|error| nonsense(error.text()))
}

fn multiply(dtype: DataType, prologue: Prologue, src: Region, dst: Region) {
    host::prologue(&Reduction { dtype, operator: Operator::Sum, prologue, divisor: 1 }, src, dst);
}

fn region(view: &View, at: usize, bytes: usize) -> Region {
    // SAFETY: the memory must stay while the region is used, which others may change meanwhile; because it is a part of
    // a view, which outlives the region, and data that others change has no value that anybody may rely on.
    unsafe { Region::new(view.host().wrapping_add(at), bytes) }
}
