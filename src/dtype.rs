//! Element types and reduction operations, numbered as NCCL numbers them, and a few that NCCL does not have: those are for
//! communicators in host memory.
#![forbid(unsafe_code)]

/// The type of one element. The discriminants of NCCL's types are `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataType {
    /// `ncclInt8`
    I8 = 0,
    /// `ncclUint8`
    U8 = 1,
    /// `ncclInt32`
    I32 = 2,
    /// `ncclUint32`
    U32 = 3,
    /// `ncclInt64`
    I64 = 4,
    /// `ncclUint64`
    U64 = 5,
    /// `ncclFloat16`
    F16 = 6,
    /// `ncclFloat32`
    F32 = 7,
    /// `ncclFloat64`
    F64 = 8,
    /// `ncclBfloat16`
    BF16 = 9,
    /// `ncclFloat8e4m3` (OCP: no infinity, NaN is 0x7f and 0xff)
    F8E4M3 = 10,
    /// `ncclFloat8e5m2` (OCP)
    F8E5M2 = 11,
    /// `strataInt16`
    I16 = 12,
    /// `strataUint16`
    U16 = 13,
}

/// The numbers of Strata's own types and operations: far from NCCL's, and from those of operations that programs make.
const OWN_CODES: i32 = 0x5354_0000;

impl DataType {
    /// NCCL's types, in its order.
    pub const ALL: [DataType; 12] = [
        DataType::I8,
        DataType::U8,
        DataType::I32,
        DataType::U32,
        DataType::I64,
        DataType::U64,
        DataType::F16,
        DataType::F32,
        DataType::F64,
        DataType::BF16,
        DataType::F8E4M3,
        DataType::F8E5M2,
    ];

    /// The types of communicators in host memory, by their discriminants.
    pub const HOST: [DataType; 14] = {
        let mut all = [DataType::U16; 14];
        let mut at = 0;
        while at < Self::ALL.len() {
            all[at] = Self::ALL[at];
            at += 1;
        }
        all[Self::ALL.len()] = DataType::I16;
        all
    };

    /// Its number in the C interface.
    pub const fn code(self) -> i32 {
        match self.is_nccl() {
            true => self as i32,
            false => OWN_CODES + self as i32,
        }
    }

    /// The type with this number in the C interface.
    pub fn from_code(code: i32) -> Option<DataType> {
        Self::HOST.into_iter().find(|dtype| dtype.code() == code)
    }

    /// Whether NCCL has it, and so GPUs.
    pub const fn is_nccl(self) -> bool {
        (self as usize) < Self::ALL.len()
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 | DataType::F8E4M3 | DataType::F8E5M2 => 1,
            DataType::F16 | DataType::BF16 | DataType::I16 | DataType::U16 => 2,
            DataType::I32 | DataType::U32 | DataType::F32 => 4,
            DataType::I64 | DataType::U64 | DataType::F64 => 8,
        }
    }

    /// Whether the type is an integer.
    pub const fn is_integer(self) -> bool {
        (self as u8) < DataType::F16 as u8 || matches!(self, DataType::I16 | DataType::U16)
    }

    /// Whether the type is an integer without a sign.
    pub const fn is_unsigned(self) -> bool {
        matches!(self, DataType::U8 | DataType::U16 | DataType::U32 | DataType::U64)
    }

    /// The name nccl-tests prints and accepts.
    pub const fn name(self) -> &'static str {
        match self {
            DataType::I8 => "int8",
            DataType::U8 => "uint8",
            DataType::I32 => "int32",
            DataType::U32 => "uint32",
            DataType::I64 => "int64",
            DataType::U64 => "uint64",
            DataType::F16 => "half",
            DataType::F32 => "float",
            DataType::F64 => "double",
            DataType::BF16 => "bfloat16",
            DataType::F8E4M3 => "f8e4m3",
            DataType::F8E5M2 => "f8e5m2",
            DataType::I16 => "int16",
            DataType::U16 => "uint16",
        }
    }
}

/// A built-in reduction. The discriminants of NCCL's are `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RedOp {
    /// `ncclSum`
    Sum = 0,
    /// `ncclProd`
    Prod = 1,
    /// `ncclMax`
    Max = 2,
    /// `ncclMin`
    Min = 3,
    /// `ncclAvg`
    Avg = 4,
    /// `strataBitAnd`, of integers
    BitAnd = 5,
    /// `strataBitOr`, of integers
    BitOr = 6,
    /// `strataBitXor`, of integers
    BitXor = 7,
}

impl RedOp {
    /// NCCL's operations, in its order.
    pub const ALL: [RedOp; 5] = [RedOp::Sum, RedOp::Prod, RedOp::Max, RedOp::Min, RedOp::Avg];
    /// The operations on bits, of communicators in host memory.
    pub const BITS: [RedOp; 3] = [RedOp::BitAnd, RedOp::BitOr, RedOp::BitXor];

    /// Its number in the C interface.
    pub const fn code(self) -> i32 {
        match self.is_nccl() {
            true => self as i32,
            false => OWN_CODES + 0x100 + self as i32,
        }
    }

    /// The operation with this number in the C interface.
    pub fn from_code(code: i32) -> Option<RedOp> {
        Self::ALL.into_iter().chain(Self::BITS).find(|op| op.code() == code)
    }

    /// Whether NCCL has it, and so GPUs.
    pub const fn is_nccl(self) -> bool {
        (self as usize) < Self::ALL.len()
    }

    /// The operations for elements of a type.
    pub fn of(dtype: DataType) -> impl Iterator<Item = RedOp> {
        Self::ALL.into_iter().chain(Self::BITS.into_iter().filter(move |_| dtype.is_integer()))
    }

    /// The name nccl-tests prints and accepts.
    pub const fn name(self) -> &'static str {
        match self {
            RedOp::Sum => "sum",
            RedOp::Prod => "prod",
            RedOp::Max => "max",
            RedOp::Min => "min",
            RedOp::Avg => "avg",
            RedOp::BitAnd => "band",
            RedOp::BitOr => "bor",
            RedOp::BitXor => "bxor",
        }
    }
}

/// How two elements become one. Integers wrap; `Max` and `Min` of floats are IEEE `maxNum` and `minNum`
/// (a number wins over a NaN), as on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operator {
    /// a + b
    Sum,
    /// a * b
    Prod,
    /// the larger
    Max,
    /// the smaller
    Min,
    /// a & b, of integers
    And,
    /// a | b, of integers
    Or,
    /// a ^ b, of integers
    Xor,
}

impl Operator {
    /// The operators that GPUs have.
    pub const ON_GPUS: [Operator; 4] = [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min];
    /// The operators on bits, of integers in host memory.
    pub const BITS: [Operator; 3] = [Operator::And, Operator::Or, Operator::Xor];

    /// The operators for elements of a type.
    pub fn of(dtype: DataType) -> impl Iterator<Item = Operator> {
        Self::ON_GPUS.into_iter().chain(Self::BITS.into_iter().filter(move |_| dtype.is_integer()))
    }
}

/// A scalar of some [`DataType`], as its bytes (little endian, the first `size` of them).
pub type ScalarBytes = [u8; 8];

/// What happens to the data of a reducing collective: one value per element, from all ranks.
///
/// The *prologue* is applied once to each rank's own input, the *epilogue* once to each finished result.
/// The plan says where (`start` and `finish` of its steps), this says what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduction {
    /// The element type.
    pub dtype: DataType,
    /// The pairwise operation.
    pub operator: Operator,
    /// What multiplies each input element before it is used.
    pub prologue: Prologue,
    /// Divides each result (`ncclAvg` of integers truncates toward zero, as in C); 1 does nothing.
    pub divisor: u64,
}

/// The factor applied to a rank's own input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Prologue {
    /// Leave the input as it is.
    None,
    /// Multiply by a scalar of the element type (`ncclRedOpCreatePreMulSum`); wrapping for integers.
    Scalar(ScalarBytes),
    /// Multiply by 1/n, computed in float32: the average of types whose sum could overflow (f16 and both fp8).
    Reciprocal(u64),
}

impl Reduction {
    /// The reduction for a built-in operation over `nranks` ranks.
    ///
    /// `ncclAvg` of f32, f64, bf16 and integers is sum, then divide; of f16 and fp8, whose range is small, every input
    /// is multiplied by 1/n first, as NCCL does for all floats.
    pub fn new(op: RedOp, dtype: DataType, nranks: usize) -> Reduction {
        let narrow = matches!(dtype, DataType::F16 | DataType::F8E4M3 | DataType::F8E5M2);
        let (operator, prologue, divisor) = match op {
            RedOp::Sum => (Operator::Sum, Prologue::None, 1),
            RedOp::Prod => (Operator::Prod, Prologue::None, 1),
            RedOp::Max => (Operator::Max, Prologue::None, 1),
            RedOp::Min => (Operator::Min, Prologue::None, 1),
            RedOp::Avg if narrow && nranks > 1 => (Operator::Sum, Prologue::Reciprocal(nranks as u64), 1),
            RedOp::Avg => (Operator::Sum, Prologue::None, nranks as u64),
            RedOp::BitAnd => (Operator::And, Prologue::None, 1),
            RedOp::BitOr => (Operator::Or, Prologue::None, 1),
            RedOp::BitXor => (Operator::Xor, Prologue::None, 1),
        };
        Reduction { dtype, operator, prologue, divisor }
    }

    /// The reduction of a user-made PreMulSum operation.
    pub fn pre_mul_sum(dtype: DataType, scalar: ScalarBytes) -> Reduction {
        Reduction { dtype, operator: Operator::Sum, prologue: Prologue::Scalar(scalar), divisor: 1 }
    }

    /// Whether a plan for this reduction must apply the prologue.
    pub fn needs_prologue(&self) -> bool {
        self.prologue != Prologue::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for (code, dtype) in DataType::ALL.into_iter().enumerate() {
            assert_eq!(DataType::from_code(code as i32), Some(dtype));
        }
        for (code, op) in RedOp::ALL.into_iter().enumerate() {
            assert_eq!(RedOp::from_code(code as i32), Some(op));
        }
        let near = |code: i32| [code - 1, code + 3];
        for code in [12, 13, -1, OWN_CODES].into_iter().chain(near(DataType::I16.code())) {
            assert_eq!(DataType::from_code(code), None, "{code:#x}");
        }
        for code in [5, 6, 7, -1, i32::MAX].into_iter().chain(near(RedOp::BitAnd.code())) {
            assert_eq!(RedOp::from_code(code), None, "{code:#x}");
        }
    }

    #[test]
    fn strata_s_own_codes_round_trip_and_stay_as_programs_were_compiled_with_them() {
        for (index, dtype) in DataType::HOST.into_iter().enumerate() {
            assert_eq!((dtype as usize, DataType::from_code(dtype.code())), (index, Some(dtype)));
        }
        assert_eq!([DataType::I16, DataType::U16].map(DataType::code), [0x5354_000c, 0x5354_000d]);
        assert_eq!(RedOp::BITS.map(RedOp::code), [0x5354_0105, 0x5354_0106, 0x5354_0107]);
        for op in RedOp::BITS {
            assert_eq!(RedOp::from_code(op.code()), Some(op));
        }
    }

    #[test]
    fn an_average_is_scaled_on_one_side_only() {
        for dtype in DataType::HOST {
            let average = Reduction::new(RedOp::Avg, dtype, 6);
            assert_ne!(average.needs_prologue(), average.divisor == 6, "{dtype:?}");
        }
    }
}
