//! What a rank calls, small enough to be noted for every operation, so that ranks can compare it and errors can say it.
#![forbid(unsafe_code)]

use crate::code::FloatCode;
use crate::digest::Digest;
use crate::dtype::{DataType, Operator, Prologue, RedOp, Reduction};
use crate::plan::Collective;
use crate::topo::Rank;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The operations a reducing collective can have, by their place in a call's words.
const OPERATIONS: [&str; 10] =
    ["no operation", "sum", "prod", "max", "min", "avg", "pre-multiplied sum", "band", "bor", "bxor"];

/// In the place of a collective: a message.
const SEND: u64 = 0xff;

/// What all ranks of a collective must agree on, in two words: the elements; and the collective, the type, the operation (a byte
/// each), whether blocks differ in size (half a byte), the code (three bits), whether there is a residual (a bit), the root (three bytes),
/// and who carries it out, if that is a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CallSummary(pub [u64; 2]);

impl CallSummary {
    /// A call of a collective. What a user-made operation multiplies by is each rank's own business.
    pub fn new(
        collective: Collective,
        count: usize,
        dtype: DataType,
        reduction: Option<Reduction>,
        root: Rank,
    ) -> CallSummary {
        let operation: u64 = match reduction {
            None => 0,
            Some(Reduction { prologue: Prologue::Scalar(_), .. }) => 6,
            Some(Reduction { prologue: Prologue::Reciprocal(_), .. }) => 5,
            Some(Reduction { divisor, .. }) if divisor != 1 => 5,
            Some(Reduction { operator, .. }) => match operator {
                Operator::Sum => 1,
                Operator::Prod => 2,
                Operator::Max => 3,
                Operator::Min => 4,
                Operator::And => 7,
                Operator::Or => 8,
                Operator::Xor => 9,
            },
        };
        CallSummary([count as u64, collective as u64 | (dtype as u64) << 8 | operation << 16 | u64::from(root.0) << 32])
    }
}

/// Beside the operation: blocks differ in size, and all ranks know the sizes, or each its own.
const KNOWN_SIZES: u64 = 1;
const OWN_SIZES: u64 = 2;
/// Several calls of one group; and in the place of the root, if they have several.
const JOINED: u64 = 3;
const SEVERAL_ROOTS: u32 = ROOT_BITS as u32;
const ROOT_BITS: u64 = 0xff_ffff;
/// Where a byte of the digest of a provider's name is, and never 0; 0 where Strata itself carries a call out.
const PROVIDER_AT: u32 = 56;
/// The half byte of these; where the code is after it, one more than its place among all, 0 for none; and its bits.
const HALF_BYTE: u64 = 0xf;
const CODE_AT: u32 = 28;
const CODE_BITS: u64 = 7;
/// What coding leaves out is kept.
const RESIDUAL: u64 = 1 << 31;
/// Bits of the sum of sizes; the digest of the sizes has the others of a word.
const SUM_BITS: u32 = 44;

/// A sum of elements and the digest of what it is the sum of, as a word.
fn summed(sum: u64, digest: Digest) -> u64 {
    sum & ((1 << SUM_BITS) - 1) | (digest.value() as u64) << SUM_BITS
}

impl CallSummary {
    /// A call with blocks of different sizes: `sizes` where all ranks must have the same.
    pub fn vectored(
        collective: Collective,
        sizes: Option<&[usize]>,
        dtype: DataType,
        reduction: Option<Reduction>,
        root: Rank,
    ) -> CallSummary {
        let CallSummary([_, rest]) = CallSummary::new(collective, 0, dtype, reduction, root);
        let Some(sizes) = sizes else { return CallSummary([0, rest | OWN_SIZES << 24]) };
        let sum: u64 = sizes.iter().map(|&count| count as u64).sum();
        let of = |digest: Digest, &count: &usize| digest.number(count as u64);
        CallSummary([summed(sum, sizes.iter().fold(Digest::new("sizes"), of)), rest | KNOWN_SIZES << 24])
    }

    /// Several calls of one group that are made as one: how many elements each has, and its root.
    pub fn joined(
        collective: Collective,
        calls: impl Iterator<Item = (usize, Rank)>,
        dtype: DataType,
        reduction: Option<Reduction>,
    ) -> CallSummary {
        let (mut sum, mut numbers, mut common) = (0u64, Vec::new(), None);
        for (count, root) in calls {
            sum += count as u64;
            numbers.extend_from_slice(&(count as u64).to_le_bytes());
            numbers.extend_from_slice(&root.0.to_le_bytes());
            common = Some(common.map_or(root, |common| if common == root { root } else { Rank(SEVERAL_ROOTS) }));
        }
        let CallSummary([_, rest]) = CallSummary::new(collective, 0, dtype, reduction, common.unwrap_or(Rank(0)));
        CallSummary([summed(sum, Digest::new("calls").bytes(&numbers)), rest | JOINED << 24])
    }

    /// The same call, with its messages between nodes in a code.
    pub fn in_code(self, code: Option<FloatCode>) -> CallSummary {
        let CallSummary([count, rest]) = self;
        let place = code.and_then(|code| FloatCode::ALL.into_iter().position(|known| known == code));
        CallSummary([count, rest | place.map_or(0, |place| place as u64 + 1) << CODE_AT])
    }

    /// The same call, with a residual or none.
    pub fn with_residual(self, has_residual: bool) -> CallSummary {
        let CallSummary([count, rest]) = self;
        CallSummary([count, if has_residual { rest | RESIDUAL } else { rest }])
    }

    /// The same call, carried out by a provider or not.
    pub fn by_provider(self, name: Option<&str>) -> CallSummary {
        let CallSummary([count, rest]) = self;
        // Every call has one, so it is a cheap one.
        let digest = |name: &str| name.bytes().fold(0, |sum: u64, byte| (31 * sum + u64::from(byte)) % 0xff) + 1;
        CallSummary([count, rest | name.map_or(0, digest) << PROVIDER_AT])
    }

    fn provider(self) -> u64 {
        let [_, rest] = self.0;
        if self.receiver().is_none() {
            rest >> PROVIDER_AT
        } else {
            0
        }
    }

    /// The code, if it has one.
    pub fn code(self) -> Option<FloatCode> {
        let [_, rest] = self.0;
        let place = (rest >> CODE_AT & CODE_BITS).checked_sub(1).filter(|_| self.receiver().is_none())?;
        FloatCode::ALL.get(place as usize).copied()
    }

    /// The call in words beside another one, from which it may differ in its code alone, or in who carries it out.
    pub fn beside(self, other: CallSummary) -> String {
        let text = match (self.code(), other.code()) {
            (None, Some(_)) if self.receiver().is_none() => format!("{self} without a code"),
            _ => self.to_string(),
        };
        match (self.provider(), other.provider()) {
            (mine, theirs) if mine == theirs || self.receiver().is_some() => text,
            (0, _) => text + " by no provider",
            (_, 0) => text + " by a provider",
            _ => text + " by another provider",
        }
    }

    /// The elements, their type and the operation of an all-reduce of one block without a code; none of other calls, and of words
    /// that mean nothing.
    pub fn all_reduce(self, nranks: usize) -> Option<(usize, Reduction)> {
        let [count, rest] = self.0;
        let byte = |at: u32| usize::from((rest >> at) as u8);
        if byte(0) != Collective::AllReduce as usize || byte(24) != 0 || rest >> 32 != 0 {
            return None;
        }
        let dtype = *DataType::HOST.get(byte(8))?;
        let op = match byte(16) {
            1 => RedOp::Sum,
            2 => RedOp::Prod,
            3 => RedOp::Max,
            4 => RedOp::Min,
            5 => RedOp::Avg,
            6 => return Some((count as usize, Reduction::pre_mul_sum(dtype, Default::default()))),
            7 => RedOp::BitAnd,
            8 => RedOp::BitOr,
            9 => RedOp::BitXor,
            _ => return None,
        };
        RedOp::of(dtype).find(|known| *known == op)?;
        Some((count as usize, Reduction::new(op, dtype, nranks)))
    }

    /// A message of so many bytes that a rank waits to send.
    pub fn send(bytes: usize, to: Rank) -> CallSummary {
        CallSummary([bytes as u64, SEND | u64::from(to.0) << 32])
    }

    /// To whom, if it is a message.
    pub fn receiver(self) -> Option<u32> {
        let [_, rest] = self.0;
        (rest & 0xffff_ffff == SEND).then_some((rest >> 32) as u32)
    }
}

impl fmt::Display for CallSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [count, rest] = self.0;
        if let Some(receiver) = self.receiver() {
            return write!(f, "send of {count} bytes to rank {receiver}");
        }
        let byte = |at: u32| usize::from((rest >> at) as u8);
        let (Some(collective), Some(dtype), Some(operation)) =
            (Collective::ALL.get(byte(0)), DataType::HOST.get(byte(8)), OPERATIONS.get(byte(16)))
        else {
            // Another rank's words are not trusted.
            return f.write_str("something unknown");
        };
        let (name, dtype) = (collective.name(), dtype.name());
        match byte(24) as u64 & HALF_BYTE {
            KNOWN_SIZES => {
                let (sum, digest) = (count & ((1 << SUM_BITS) - 1), count >> SUM_BITS);
                write!(f, "{name} of blocks of {sum} {dtype} together (digest of their sizes: {digest:05x})")?;
            }
            JOINED => {
                let (sum, digest) = (count & ((1 << SUM_BITS) - 1), count >> SUM_BITS);
                write!(f, "a group's calls of {name} of {sum} {dtype} together (digest of their sizes: {digest:05x})")?;
            }
            OWN_SIZES => write!(f, "{name} of blocks of different sizes of {dtype}")?,
            _ => write!(f, "{name} of {count} {dtype}")?,
        }
        if collective.reduces() {
            write!(f, " ({operation})")?;
        }
        let root = (rest >> 32 & ROOT_BITS) as u32;
        if collective.has_root() && root == SEVERAL_ROOTS {
            f.write_str(" with several roots")?;
        } else if collective.has_root() {
            write!(f, " with root {root}")?;
        }
        if let Some(code) = self.code() {
            write!(f, " in {}", code.name())?;
            if rest & RESIDUAL != 0 {
                f.write_str(" with a residual")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::RedOp;

    #[test]
    fn an_all_reduce_is_read_from_its_words_and_nothing_else_is() {
        for dtype in DataType::HOST {
            for op in RedOp::of(dtype) {
                let reduction = Reduction::new(op, dtype, 5);
                let call = CallSummary::new(Collective::AllReduce, 77, dtype, Some(reduction), Rank(0));
                assert_eq!(call.all_reduce(5), Some((77, reduction)), "{call}");
                let other = CallSummary::new(Collective::Reduce, 77, dtype, Some(reduction), Rank(0));
                assert_eq!(other.all_reduce(5), None);
                assert_eq!(
                    CallSummary::vectored(Collective::AllReduce, None, dtype, Some(reduction), Rank(0)).all_reduce(5),
                    None
                );
                if let Some(code) = FloatCode::ALL.into_iter().find(|code| code.codes(dtype)) {
                    assert_eq!(call.in_code(Some(code)).all_reduce(5), None);
                }
            }
        }
        let bits_of_floats = CallSummary([1, Collective::AllReduce as u64 | (DataType::F32 as u64) << 8 | 7 << 16]);
        assert_eq!(bits_of_floats.all_reduce(2), None);
        assert_eq!(CallSummary([u64::MAX; 2]).all_reduce(2), None);
    }

    #[test]
    fn calls_in_different_codes_are_told_apart_by_the_codes_names() {
        let f32 = DataType::F32;
        let sum = CallSummary::new(Collective::AllReduce, 5, f32, Some(Reduction::new(RedOp::Sum, f32, 3)), Rank(0));
        let all = [None, Some(FloatCode::Bf16), Some(FloatCode::Mx8), Some(FloatCode::Int8)];
        let texts = all.map(|code| sum.in_code(code).to_string());
        let plain = "all_reduce of 5 float (sum)";
        assert_eq!(texts[0], plain);
        assert_eq!(texts[1..], ["bf16", "mx8", "int8"].map(|code| format!("{plain} in {code}")));
        assert_eq!(all.map(|code| sum.in_code(code).code()), all);
        let coded = sum.in_code(Some(FloatCode::Mx8));
        assert_eq!(coded.with_residual(true).to_string(), format!("{plain} in mx8 with a residual"));
        assert_eq!(coded.with_residual(true).code(), coded.code());
        assert_eq!(sum.beside(coded), format!("{plain} without a code"));
        assert_eq!((sum.beside(sum), coded.beside(sum)), (plain.to_string(), format!("{plain} in mx8")));
        let sizes = CallSummary::vectored(Collective::AllGather, Some(&[3, 4]), f32, None, Rank(0));
        let text = sizes.in_code(Some(FloatCode::Int8)).to_string();
        assert!(text.starts_with("all_gather of blocks of 7 float together (digest of") && text.ends_with(" in int8"));
        assert_eq!(CallSummary::send(5, Rank(0xffff_ffff)).code(), None);
    }

    #[test]
    fn a_call_that_a_provider_carries_out_on_some_ranks_is_told_apart() {
        let call = CallSummary::new(Collective::Broadcast, 6, DataType::I8, None, Rank(70_000));
        let [mpi, other] = ["mpi", "other"].map(|name| call.by_provider(Some(name)));
        assert!(call.by_provider(None) == call && mpi != call && mpi != other);
        let text = "broadcast of 6 int8 with root 70000";
        assert_eq!((mpi.to_string().as_str(), mpi.beside(mpi).as_str()), (text, text));
        assert_eq!(call.beside(mpi), format!("{text} by no provider"));
        assert_eq!(mpi.beside(call), format!("{text} by a provider"));
        assert_eq!(mpi.beside(other), format!("{text} by another provider"));
        let sum = Some(Reduction::new(RedOp::Sum, DataType::F32, 3));
        let sum = CallSummary::new(Collective::AllReduce, 5, DataType::F32, sum, Rank(0));
        assert!(sum.all_reduce(3).is_some() && sum.by_provider(Some("mpi")).all_reduce(3).is_none());
    }

    #[test]
    fn whatever_ranks_must_agree_on_shows_in_the_words_and_in_the_text() {
        let sum = |op, dtype| Some(Reduction::new(op, dtype, 3));
        let call = |collective, count, dtype, op, root| CallSummary::new(collective, count, dtype, op, Rank(root));
        let calls = [
            (
                call(Collective::AllReduce, 5, DataType::F32, sum(RedOp::Sum, DataType::F32), 0),
                "all_reduce of 5 float (sum)",
            ),
            (
                call(Collective::AllReduce, 6, DataType::F32, sum(RedOp::Avg, DataType::F32), 0),
                "all_reduce of 6 float (avg)",
            ),
            (
                call(Collective::AllReduce, 6, DataType::F16, sum(RedOp::Avg, DataType::F16), 0),
                "all_reduce of 6 half (avg)",
            ),
            (
                call(Collective::Reduce, 6, DataType::I8, sum(RedOp::Max, DataType::I8), 2),
                "reduce of 6 int8 (max) with root 2",
            ),
            (call(Collective::Broadcast, 6, DataType::I8, None, 70_000), "broadcast of 6 int8 with root 70000"),
            (call(Collective::AllToAll, 6, DataType::I8, None, 0), "all_to_all of 6 int8"),
            (call(Collective::AllToAll, 6, DataType::U16, None, 0), "all_to_all of 6 uint16"),
            (
                call(Collective::AllReduce, 6, DataType::I16, sum(RedOp::BitXor, DataType::I16), 0),
                "all_reduce of 6 int16 (bxor)",
            ),
            (
                call(Collective::AllReduce, 6, DataType::I16, sum(RedOp::BitAnd, DataType::I16), 0),
                "all_reduce of 6 int16 (band)",
            ),
            (
                call(Collective::AllReduce, 6, DataType::I16, sum(RedOp::BitOr, DataType::I16), 0),
                "all_reduce of 6 int16 (bor)",
            ),
        ];
        for (index, (call, text)) in calls.iter().enumerate() {
            assert_eq!(call.to_string(), *text);
            assert!(calls[..index].iter().all(|(other, _)| other != call));
        }
        let scaled = |scalar| Some(Reduction::pre_mul_sum(DataType::I8, [scalar; 8]));
        let [two, three] = [2, 3].map(|scalar| call(Collective::AllReduce, 1, DataType::I8, scaled(scalar), 0));
        assert_eq!(two, three, "ranks may multiply by different scalars");
        let sizes = |sizes| CallSummary::vectored(Collective::AllGather, sizes, DataType::I8, None, Rank(0));
        let (one, other, own) = (sizes(Some(&[3, 0, 4])), sizes(Some(&[0, 3, 4])), sizes(None));
        assert!(one != other && one != own && one != call(Collective::AllGather, 7, DataType::I8, None, 0));
        assert!(
            one.to_string().starts_with("all_gather of blocks of 7 int8 together (digest of their sizes: "),
            "{one}"
        );
        assert_eq!(own.to_string(), "all_gather of blocks of different sizes of int8");
        assert_eq!(CallSummary([u64::MAX; 2]).to_string(), "something unknown");
        let send = CallSummary::send(5, Rank(70_000));
        assert_eq!((send.to_string().as_str(), send.receiver()), ("send of 5 bytes to rank 70000", Some(70_000)));
        assert!(calls.iter().all(|(call, _)| call.receiver().is_none()));
    }
}
