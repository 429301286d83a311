//! Reductions for checking, not for speed: element by element, on byte slices.
//!
//! The sum stands for every operation. Prologue and epilogue are maps that show when they are applied twice or not at
//! all: `3x`, and `5x + 1` for integers, `x/2 + 1` for floats.
#![forbid(unsafe_code)]

use crate::code::FloatCode;
use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::plan::blocks::{BlockTable, Extent};
use crate::plan::contract::Promise;
use crate::plan::{Collective, OperandOrder, Shape};
use std::sync::Arc;

/// Arithmetic on elements of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arithmetic {
    kind: Kind,
    prologue: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U32,
    U64,
    F32,
    F64,
}

/// Applies a function to each element, read as a number type.
macro_rules! each {
    ($type:ty, $bytes:expr, $map:expr) => {
        for element in $bytes.chunks_exact_mut(size_of::<$type>()) {
            let value = <$type>::from_le_bytes(element.try_into().expect("an exact chunk"));
            let map: fn($type) -> $type = $map;
            element.copy_from_slice(&map(value).to_le_bytes());
        }
    };
}

/// Applies a function to each pair of elements; the result replaces the first.
macro_rules! pairs {
    ($type:ty, $left:expr, $right:expr, $fold:expr) => {
        for (left, right) in $left.chunks_exact_mut(size_of::<$type>()).zip($right.chunks_exact(size_of::<$type>())) {
            let value = <$type>::from_le_bytes((&*left).try_into().expect("an exact chunk"));
            let other = <$type>::from_le_bytes(right.try_into().expect("an exact chunk"));
            let fold: fn($type, $type) -> $type = $fold;
            left.copy_from_slice(&fold(value, other).to_le_bytes());
        }
    };
}

impl Arithmetic {
    /// The arithmetic of a type of 32 or 64 bits. `prologue` is the shape's.
    pub fn new(dtype: DataType, prologue: bool) -> Result<Arithmetic> {
        let kind = match dtype {
            DataType::I32 | DataType::U32 => Kind::U32,
            DataType::I64 | DataType::U64 => Kind::U64,
            DataType::F32 => Kind::F32,
            DataType::F64 => Kind::F64,
            other => return Err(Error::InvalidArgument(format!("the simulated world does not add {}", other.name()))),
        };
        Ok(Arithmetic { kind, prologue })
    }

    /// `acc = acc + other`.
    pub fn add(self, acc: &mut [u8], other: &[u8]) {
        match self.kind {
            Kind::U32 => pairs!(u32, acc, other, |a, b| a.wrapping_add(b)),
            Kind::U64 => pairs!(u64, acc, other, |a, b| a.wrapping_add(b)),
            Kind::F32 => pairs!(f32, acc, other, |a, b| a + b),
            Kind::F64 => pairs!(f64, acc, other, |a, b| a + b),
        }
    }

    /// The sum of local and incoming data, in the given order.
    pub fn combine(self, local: Vec<u8>, incoming: Vec<u8>, order: OperandOrder) -> Vec<u8> {
        let (mut first, second) = match order {
            OperandOrder::LocalFirst => (local, incoming),
            OperandOrder::IncomingFirst => (incoming, local),
        };
        self.add(&mut first, &second);
        first
    }

    /// The prologue, where the shape has one.
    pub fn start(self, bytes: &mut [u8]) {
        if !self.prologue {
            return;
        }
        match self.kind {
            Kind::U32 => each!(u32, bytes, |a| a.wrapping_mul(3)),
            Kind::U64 => each!(u64, bytes, |a| a.wrapping_mul(3)),
            Kind::F32 => each!(f32, bytes, |a| a * 3.0),
            Kind::F64 => each!(f64, bytes, |a| a * 3.0),
        }
    }

    /// What coded elements stand for, as bytes of this type. Integers are coded as the floats nearest to them.
    pub fn decoded(self, code: FloatCode, bytes: &[u8]) -> Vec<u8> {
        let values = crate::code::decode(code, bytes).into_iter();
        match self.kind {
            Kind::U32 => values.flat_map(|value| (value as u32).to_le_bytes()).collect(),
            Kind::U64 => values.flat_map(|value| (value as u64).to_le_bytes()).collect(),
            Kind::F32 => values.flat_map(f32::to_le_bytes).collect(),
            Kind::F64 => values.flat_map(|value| f64::from(value).to_le_bytes()).collect(),
        }
    }

    /// Elements coded, chunk by chunk of so many.
    pub fn encoded(self, code: FloatCode, bytes: &[u8], chunks: impl Iterator<Item = usize>) -> Vec<u8> {
        let size = match self.kind {
            Kind::U32 | Kind::F32 => 4,
            Kind::U64 | Kind::F64 => 8,
        };
        let value = |bytes: &[u8]| {
            let mut low = [0; 8];
            low[..size].copy_from_slice(bytes);
            let bits = u64::from_le_bytes(low);
            match self.kind {
                Kind::U32 | Kind::U64 => bits as f32,
                Kind::F32 => f32::from_bits(bits as u32),
                Kind::F64 => f64::from_bits(bits) as f32,
            }
        };
        let values: Vec<f32> = bytes.chunks_exact(size).map(value).collect();
        let mut rest = &values[..];
        let mut coded = Vec::new();
        for elements in chunks {
            let (chunk, left) = rest.split_at(elements.min(rest.len()));
            coded.extend(crate::code::encode(code, chunk));
            rest = left;
        }
        coded
    }

    /// The epilogue.
    pub fn finish(self, bytes: &mut [u8]) {
        match self.kind {
            Kind::U32 => each!(u32, bytes, |a| a.wrapping_mul(5).wrapping_add(1)),
            Kind::U64 => each!(u64, bytes, |a| a.wrapping_mul(5).wrapping_add(1)),
            Kind::F32 => each!(f32, bytes, |a| a * 0.5 + 1.0),
            Kind::F64 => each!(f64, bytes, |a| a * 0.5 + 1.0),
        }
    }
}

/// What every rank must hold in its output when `shape` has run on `inputs` (one per rank, of
/// [`Collective::input_blocks`] blocks of `block_bytes`), by the definition of the collective.
pub fn expected(shape: &Shape, arithmetic: Arithmetic, block_bytes: usize, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let block = |rank: usize, block: usize| &inputs[rank][block * block_bytes..(block + 1) * block_bytes];
    results(shape, arithmetic, block_bytes, (inputs.len(), &block))
}

/// The same where blocks differ in size: the blocks of each output, one after another, whatever lies between them.
pub fn expected_of(
    shape: &Shape,
    arithmetic: Arithmetic,
    elem_bytes: usize,
    blocks: &[Arc<BlockTable>],
    inputs: &[Vec<u8>],
) -> Vec<Vec<u8>> {
    let block = |rank: usize, block: usize| {
        let Extent { count, at } = blocks[rank].input()[block];
        inputs[rank].get(at * elem_bytes..(at + count) * elem_bytes).unwrap_or_default()
    };
    results(shape, arithmetic, 0, (inputs.len(), &block))
}

/// What every rank must hold, from the blocks of so many ranks' inputs.
fn results<'a>(
    shape: &Shape,
    arithmetic: Arithmetic,
    block_bytes: usize,
    (nranks, block): (usize, &dyn Fn(usize, usize) -> &'a [u8]),
) -> Vec<Vec<u8>> {
    let root = shape.root.index();
    let sum_of = |index: usize| {
        let started = |rank: usize| {
            let mut bytes = block(rank, index).to_vec();
            arithmetic.start(&mut bytes);
            bytes
        };
        let mut sum = started(0);
        (1..nranks).for_each(|rank| arithmetic.add(&mut sum, &started(rank)));
        arithmetic.finish(&mut sum);
        sum
    };
    let all = |index: usize| -> Vec<u8> { (0..nranks).flat_map(|rank| block(rank, index).to_vec()).collect() };
    // What is not promised is told as zeros.
    let custom = |rank: usize, index: usize| match shape.contract.as_ref().map(|it| it.promise_of_block(rank, index)) {
        None | Some(Promise::Anything) => vec![0; block_bytes],
        Some(Promise::Reduction { chunk }) => sum_of(chunk as usize),
        Some(Promise::Chunk { rank, chunk }) => {
            let mut bytes = block(rank as usize, chunk as usize).to_vec();
            if shape.prologue {
                arithmetic.start(&mut bytes);
            }
            bytes
        }
    };
    let output = |rank: usize| match shape.collective {
        Collective::AllReduce => sum_of(0),
        Collective::AllGather => all(0),
        Collective::ReduceScatter => sum_of(rank),
        Collective::Broadcast => block(root, 0).to_vec(),
        Collective::Reduce if rank == root => sum_of(0),
        Collective::AllToAll => all(rank),
        Collective::Gather if rank == root => all(0),
        Collective::Scatter => block(root, rank).to_vec(),
        Collective::Reduce | Collective::Gather => Vec::new(),
        Collective::Custom => (0..shape.blocks()).flat_map(|index| custom(rank, index)).collect(),
    };
    (0..nranks).map(output).collect()
}
