//! The kernels of codes, as [`kernels`](super::kernels) checks the others.

use super::kernels::Tally;
use super::twice::{Random, Twice};
use strata::code::FloatCode;
use strata::device::gpu::kernels::{operator_name, type_name, Batch, BatchScale, Kernel};
use strata::device::host::coding::{self, Folded};
use strata::dtype::{DataType, Operator};
use strata::error::Result;
use strata::memory::Region;

const COUNTS: [usize; 8] = [1, 31, 32, 33, 64, 100, 2049, 20_000];

/// What one launch does.
#[derive(Debug)]
struct Case {
    kernel: Kernel,
    code: FloatCode,
    dtype: DataType,
    operator: Operator,
    n: usize,
    /// How many chunks are folded.
    sources: usize,
    /// Whether the fold's result is coded.
    is_coded: bool,
    has_residual: bool,
}

impl Case {
    fn random(kernel: Kernel, code: FloatCode, random: &mut Random) -> Case {
        let types: Vec<DataType> = DataType::ALL.into_iter().filter(|dtype| code.codes(*dtype)).collect();
        let is_fold = matches!(kernel, Kernel::FoldCoded(_));
        let is_coded = matches!(kernel, Kernel::Encode(_)) || is_fold && random.below(2) == 0;
        Case {
            kernel,
            code,
            dtype: random.one_of(&types),
            operator: if is_fold { random.one_of(&Operator::ON_GPUS) } else { Operator::Sum },
            n: random.one_of(&COUNTS),
            sources: if is_fold { random.one_of(&[1, 2, 3, 9]) } else { 0 },
            is_coded,
            has_residual: is_coded && random.below(2) == 0,
        }
    }

    /// Runs it on the device and on the host; what differs.
    fn check(&self, memory: &mut Twice, random: &mut Random) -> Result<Option<String>> {
        let &Case { kernel, code, dtype, operator, n, .. } = self;
        let size = dtype.size();
        memory.clear();
        let elements = memory.place(n * size, random.one_of(&[0, size, 1]));
        let residual = memory.place(4 * n, random.one_of(&[0, 4, 8]));
        let chunks: Vec<usize> = (0..self.sources + 1).map(|_| memory.place(code.bytes(n), random.below(16))).collect();
        let (chunk, sources) = (chunks[0], &chunks[1..]);
        memory.fill(random)?;
        let is_whole = matches!(kernel, Kernel::FoldCoded(_)) && !self.is_coded;
        let kept = if self.has_residual { memory.address(residual) } else { 0 };
        let mut words = vec![kept];
        words.extend(sources.iter().map(|at| memory.address(*at)));
        if is_whole || self.sources == 0 {
            words.extend([memory.address(elements), n as u64]);
        }
        let mut batch = Batch::new(1, BatchScale::None, 0);
        batch.begin_codes(words.len(), dtype, (operator, self.sources));
        batch.push(n, if is_whole { 0 } else { memory.address(chunk) }, words.into_iter());
        // SAFETY: the places must stay until this has ended; because `memory` keeps them and waits for its stream.
        unsafe { memory.track.coding(kernel, &batch) }?;
        memory.track.issued();
        let kept = self.has_residual.then(|| memory.region(residual, 4 * n));
        let (elements, chunk) = ([memory.region(elements, n * size)], memory.region(chunk, code.bytes(n)));
        let sources: Vec<Region> = sources.iter().map(|at| memory.region(*at, code.bytes(n))).collect();
        match kernel {
            Kernel::Encode(_) => coding::encode(code, dtype, &elements, kept, chunk)?,
            Kernel::Decode(_) => coding::decode(code, dtype, chunk, &elements)?,
            _ => {
                let to = if is_whole { Folded::Elements(dtype, &elements) } else { Folded::Coded(chunk) };
                coding::fold(code, operator, &sources, kept, to)?
            }
        }
        let what = || {
            let names = (kernel.name(), type_name(dtype), operator_name(operator));
            format!("{} of {n} {}, {} sources, {}: {self:?}", names.0, names.1, self.sources, names.2)
        };
        Ok(memory.difference()?.map(|difference| format!("{}: {difference}", what())))
    }
}

/// Launches of every kernel of codes.
pub fn tallies(memory: &mut Twice, random: &mut Random) -> Result<Vec<Tally>> {
    let mut tallies = ["encode", "decode", "fold"].map(Tally::new);
    for code in FloatCode::ALL {
        let kernels = [Kernel::Encode(code), Kernel::Decode(code), Kernel::FoldCoded(code)];
        for (tally, kernel) in tallies.iter_mut().zip(kernels) {
            for _ in 0..16 {
                tally.count(Case::random(kernel, code, random).check(memory, random)?);
            }
        }
    }
    Ok(tallies.into())
}
