//! The host device: buffers are host memory, reductions run on the calling thread, vectorised for every type.

pub mod stream;

use crate::dtype::{DataType, Operator};
use crate::plan::Order;

/// How an incoming element meets a local one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Combine {
    /// The element type.
    pub dtype: DataType,
    /// The operation.
    pub operator: Operator,
    /// Which operand comes first.
    pub order: Order,
    /// Divide the result by this (1: leave it): the epilogue, where the step finishes a result.
    pub divisor: u64,
}
