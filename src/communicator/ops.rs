//! Reduction operations that a program makes itself (`ncclRedOpCreatePreMulSum`).
#![forbid(unsafe_code)]

use crate::dtype::{DataType, RedOp, Reduction, ScalarBytes};
use crate::error::{Error, Result};
use crate::memory::DeviceRegion;

/// The first number a user-made operation can have: the built-in ones come before it.
const FIRST: i32 = RedOp::ALL.len() as i32;

/// The user-made operations of one communicator.
#[derive(Debug, Default)]
pub struct Operations {
    made: Vec<Option<(DataType, Factor)>>,
}

/// Where the factor of a PreMulSum operation comes from.
#[derive(Debug, Clone, Copy)]
pub enum Factor {
    /// It was given when the operation was made.
    Value(ScalarBytes),
    /// It is read here when a call runs, in the order of the call's stream.
    At(DeviceRegion),
}

impl Operations {
    /// Makes a PreMulSum operation for `dtype`; returns its number.
    pub fn create(&mut self, dtype: DataType, factor: Factor) -> i32 {
        let free = self.made.iter().position(Option::is_none).unwrap_or(self.made.len());
        if free == self.made.len() {
            self.made.push(None);
        }
        self.made[free] = Some((dtype, factor));
        FIRST + free as i32
    }

    fn slot(&mut self, op: i32) -> Option<&mut Option<(DataType, Factor)>> {
        let index = usize::try_from(op.checked_sub(FIRST)?).ok()?;
        self.made.get_mut(index).filter(|slot| slot.is_some())
    }

    /// Forgets an operation.
    pub fn destroy(&mut self, op: i32) -> Result<()> {
        if RedOp::from_code(op).is_some() {
            return Err(Error::InvalidArgument(format!("operation {op} is built in and cannot be destroyed")));
        }
        match self.slot(op) {
            Some(slot) => {
                *slot = None;
                Ok(())
            }
            None => Err(unknown(op)),
        }
    }

    /// What operation `op` does to `dtype` over `nranks` ranks, and where its factor is read when the call runs.
    pub fn reduction(&mut self, op: i32, dtype: DataType, nranks: usize) -> Result<(Reduction, Option<DeviceRegion>)> {
        if let Some(op) = RedOp::from_code(op) {
            if !RedOp::of(dtype).any(|other| other == op) {
                let (op, dtype) = (op.name(), dtype.name());
                let text = format!("operation {op} is for the bits of integers, and {dtype} is a float");
                return Err(Error::InvalidArgument(text));
            }
            return Ok((Reduction::new(op, dtype, nranks), None));
        }
        match self.slot(op) {
            Some(Some((made_for, factor))) if *made_for == dtype => Ok(match *factor {
                Factor::Value(scalar) => (Reduction::pre_mul_sum(dtype, scalar), None),
                Factor::At(place) => (Reduction::pre_mul_sum(dtype, [0; 8]), Some(place)),
            }),
            Some(Some((made_for, _))) => Err(Error::InvalidArgument(format!(
                "operation {op} was made for {} and is used with {}",
                made_for.name(),
                dtype.name()
            ))),
            _ => Err(unknown(op)),
        }
    }
}

fn unknown(op: i32) -> Error {
    Error::InvalidArgument(format!("operation {op} is unknown to this communicator"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destroyed_operation_is_unknown_and_its_number_free() {
        let mut operations = Operations::default();
        let first = operations.create(DataType::F32, Factor::Value([1; 8]));
        let second = operations.create(DataType::I8, Factor::Value([2; 8]));
        assert_eq!((first, second), (5, 6));
        operations.destroy(first).unwrap();
        assert!(operations.destroy(first).is_err());
        assert!(operations.reduction(first, DataType::F32, 2).is_err());
        assert!(operations.reduction(second, DataType::F32, 2).is_err(), "made for another type");
        assert!(operations.reduction(second, DataType::I8, 2).is_ok());
        assert_eq!(operations.create(DataType::F32, Factor::Value([3; 8])), first);
        assert!(operations.destroy(0).is_err());
        for op in RedOp::BITS {
            assert!(operations.destroy(op.code()).is_err());
            assert!(operations.reduction(op.code(), DataType::U16, 2).is_ok());
            let refused = operations.reduction(op.code(), DataType::BF16, 2).err().unwrap();
            assert!(refused.code() == 4 && refused.text().ends_with("bfloat16 is a float"), "{refused}");
        }
    }
}
