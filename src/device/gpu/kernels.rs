//! The kernels by name, and the arguments they take.
//!
//! Each kernel has one argument, a structure by value. Reductions, scalings, copies and codes take a [`Batch`] of jobs, so that
//! all that is ready goes out in one launch: `gridDim.y` is the number of jobs, and the blocks along x share a job.
//! A kernel computes the bits that the host device computes.
#![forbid(unsafe_code)]

use crate::code::FloatCode;
use crate::dtype::{DataType, Operator};

/// What is loaded at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Module {
    /// Reductions and scalings of a type.
    Of(DataType),
    /// Copies, shuffles, flags.
    Move,
    /// Codes of floats.
    Codes,
}

/// What a kernel takes.
pub trait KernelArgument: Copy {}

impl KernelArgument for Batch {}
impl KernelArgument for Shuffle {}
impl KernelArgument for Flag {}

/// 64-bit words of a [`Batch`] for its jobs: with its head, what a kernel's arguments may have.
pub const WORDS: usize = 498;

/// The most coded chunks that a kernel folds: a job has room for these and for what else it needs.
pub const MOST_CHUNKS: usize = 400;

/// The most threads of a block, for which all kernels are compiled.
pub const THREADS: u32 = 512;

/// What happens to the result of each element of a [`Batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum BatchScale {
    /// Nothing.
    None = 0,
    /// It is multiplied by `factor`, a scalar of the element type in the low bytes.
    Multiply = 1,
    /// It is multiplied by 1/`factor` as a float32; integers are divided.
    Reciprocal = 2,
    /// It is divided by `factor`, as [`host::divide`](crate::device::host::divide) does it.
    Divide = 3,
    /// It is multiplied by the upper half of `factor` over the lower one, whole numbers, as
    /// [`host::multiply_by_ratio`](crate::device::host::multiply_by_ratio) does it; of floats.
    Ratio = 4,
}

/// Jobs of one launch.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Batch {
    /// How many jobs there are.
    pub njobs: u32,
    /// How many sources each job has.
    pub nsrcs: u32,
    /// A [`BatchScale`]; of codes an [`element`].
    pub scale: u32,
    /// 0; of folds of coded chunks a [`fold`].
    pub operation: u32,
    /// The scale's factor; of folds of coded chunks how many sources there are.
    pub factor: u64,
    /// Job after job: its bytes, its destination, its sources in the order of the fold; of codes see [`Kernel::Encode`].
    pub words: [u64; WORDS],
}

/// A permutation of blocks: block `(row, column)` of `src` goes to block `(row, column)` of `dst`, each with strides of its
/// own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Shuffle {
    /// Where the first block is.
    pub src: u64,
    /// Where it goes.
    pub dst: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Rows of blocks.
    pub rows: u64,
    /// Columns of blocks.
    pub columns: u64,
    /// Bytes from one row of the source to the next.
    pub src_row_bytes: u64,
    /// Bytes from one column of the source to the next.
    pub src_column_bytes: u64,
    /// The same of the destination.
    pub dst_row_bytes: u64,
    /// The same of the destination.
    pub dst_column_bytes: u64,
}

/// A 32-bit word in memory that host and device share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Flag {
    /// Where it is.
    pub address: u64,
    /// What is waited for, or written. A wait ends when `(int32_t)(*address - value) >= 0`.
    pub value: u32,
    /// 0.
    pub reserved: u32,
}

/// Copies: one source a job, any alignment.
pub const COPY: &str = "strata_copy";
/// Takes a [`Shuffle`].
pub const SHUFFLE: &str = "strata_shuffle";
/// Takes a [`Flag`] and ends when the word has come so far. One thread.
pub const WAIT: &str = "strata_wait";
/// Takes a [`Flag`] and writes the word after everything before it on the stream is visible to the host. One thread.
pub const RAISE: &str = "strata_raise";

/// A type in the names of kernels.
pub const fn type_name(dtype: DataType) -> &'static str {
    match dtype {
        DataType::I8 => "i8",
        DataType::U8 => "u8",
        DataType::I32 => "i32",
        DataType::U32 => "u32",
        DataType::I64 => "i64",
        DataType::U64 => "u64",
        DataType::F16 => "f16",
        DataType::F32 => "f32",
        DataType::F64 => "f64",
        DataType::BF16 => "bf16",
        DataType::F8E4M3 => "e4m3",
        DataType::F8E5M2 => "e5m2",
        // Communicators of GPUs refuse them.
        DataType::I16 | DataType::U16 => "none",
    }
}

/// An operation in the names of kernels.
pub const fn operator_name(operator: Operator) -> &'static str {
    match operator {
        Operator::Sum => "sum",
        Operator::Prod => "prod",
        Operator::Max => "max",
        Operator::Min => "min",
        // Communicators of GPUs refuse them.
        Operator::And | Operator::Or | Operator::Xor => "none",
    }
}

/// The kernel that folds the sources of each job from the left, and may divide the result ([`BatchScale::Divide`]).
pub fn reduce(dtype: DataType, operator: Operator) -> String {
    format!("strata_reduce_{}_{}", operator_name(operator), type_name(dtype))
}

/// The kernel that scales the one source of each job.
pub fn scale(dtype: DataType) -> String {
    format!("strata_scale_{}", type_name(dtype))
}

/// How kernels of codes name a type that is coded.
pub const fn element(dtype: DataType) -> u32 {
    match dtype {
        DataType::F16 => 0,
        DataType::BF16 => 1,
        DataType::F32 => 2,
        // No other is coded.
        _ => 3,
    }
}

/// How they name what folds.
pub const fn fold(operator: Operator) -> u32 {
    match operator {
        Operator::Prod => 1,
        Operator::Max => 2,
        Operator::Min => 3,
        // Floats have no other.
        _ => 0,
    }
}

/// One of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// See [`reduce`].
    Reduce(DataType, Operator),
    /// See [`scale`].
    Scale(DataType),
    /// See [`COPY`].
    Copy,
    /// See [`SHUFFLE`].
    Shuffle,
    /// See [`WAIT`].
    Wait,
    /// See [`RAISE`].
    Raise,
    /// Codes elements. A job's words: elements, the coded chunk, the residual or 0, then for each stretch of elements its address
    /// and how many elements there are up to its end.
    Encode(FloatCode),
    /// The other way, without a residual.
    Decode(FloatCode),
    /// Folds coded chunks from the left. A job's words: elements, the chunk of the result or 0, the residual or 0, the sources, and
    /// without a chunk the stretches.
    FoldCoded(FloatCode),
}

const TYPES: usize = DataType::ALL.len();
const OPERATORS: [Operator; 4] = Operator::ON_GPUS;

impl Kernel {
    /// How many there are.
    pub const COUNT: usize = TYPES * (OPERATORS.len() + 1) + 4 + 3 * FloatCode::ALL.len();

    /// Its number among all.
    pub const fn index(self) -> usize {
        let moves = TYPES * (OPERATORS.len() + 1);
        match self {
            Kernel::Reduce(dtype, operator) => dtype as usize * OPERATORS.len() + operator as usize,
            Kernel::Scale(dtype) => TYPES * OPERATORS.len() + dtype as usize,
            Kernel::Copy => moves,
            Kernel::Shuffle => moves + 1,
            Kernel::Wait => moves + 2,
            Kernel::Raise => moves + 3,
            Kernel::Encode(code) => moves + 4 + 3 * code as usize,
            Kernel::Decode(code) => moves + 5 + 3 * code as usize,
            Kernel::FoldCoded(code) => moves + 6 + 3 * code as usize,
        }
    }

    /// Its name in the module.
    pub fn name(self) -> String {
        match self {
            Kernel::Reduce(dtype, operator) => reduce(dtype, operator),
            Kernel::Scale(dtype) => scale(dtype),
            Kernel::Copy => COPY.to_string(),
            Kernel::Shuffle => SHUFFLE.to_string(),
            Kernel::Wait => WAIT.to_string(),
            Kernel::Raise => RAISE.to_string(),
            Kernel::Encode(code) => format!("strata_encode_{}", code.name()),
            Kernel::Decode(code) => format!("strata_decode_{}", code.name()),
            Kernel::FoldCoded(code) => format!("strata_fold_{}", code.name()),
        }
    }
}

/// The kernels of a module.
pub fn kernels_of(module: Module) -> Vec<Kernel> {
    match module {
        Module::Of(dtype) => {
            let reductions = OPERATORS.into_iter().map(|operator| Kernel::Reduce(dtype, operator));
            reductions.chain([Kernel::Scale(dtype)]).collect()
        }
        Module::Move => vec![Kernel::Copy, Kernel::Shuffle, Kernel::Wait, Kernel::Raise],
        Module::Codes => {
            let of = |code| [Kernel::Encode(code), Kernel::Decode(code), Kernel::FoldCoded(code)];
            FloatCode::ALL.into_iter().flat_map(of).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_number_of_its_own() {
        let modules = DataType::ALL.map(Module::Of).into_iter().chain([Module::Move, Module::Codes]);
        let mut numbers: Vec<usize> = modules.flat_map(kernels_of).map(Kernel::index).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..Kernel::COUNT));
    }
}
