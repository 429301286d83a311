//! What a call is among the ranks that are left.
#![forbid(unsafe_code)]

use super::named;
use crate::communicator::{CollectiveCall, Operation};
use crate::dtype::{Prologue, Reduction};
use crate::error::{Error, Result};
use crate::plan::blocks::{BlockTable, Extent};
use crate::plan::Collective;
use crate::topo::Rank;
use std::sync::Arc;

/// The number of a rank among the members.
fn place(members: &[usize], rank: Rank) -> Option<Rank> {
    members.binary_search(&rank.index()).ok().map(Rank::from_index)
}

pub(super) fn lacks(what: &str, ranks: &[usize]) -> Error {
    let verb = if ranks.len() == 1 { "is" } else { "are" };
    Error::Remote(format!(
        "{what} {}, which {verb} lost; ncclCommShrink makes a communicator without what is lost",
        named(ranks)
    ))
}

/// Averages are over the members.
fn average(reduction: Reduction, nranks: u64) -> Reduction {
    let prologue = match reduction.prologue {
        Prologue::Reciprocal(_) => Prologue::Reciprocal(nranks),
        other => other,
    };
    let divisor = if reduction.divisor > 1 { nranks } else { reduction.divisor };
    Reduction { prologue, divisor, ..reduction }
}

/// A call of the rank `me` of `nranks` as the `members` make it among themselves. It is the same on all whether they can: an error is of a
/// call that needs something of a lost rank.
pub fn among(call: &CollectiveCall, nranks: usize, members: &[usize], me: usize) -> Result<CollectiveCall> {
    let mut among = CollectiveCall { decision: None, ..call.clone() };
    if members.len() == nranks {
        return Ok(among);
    }
    let lost: Vec<usize> = (0..nranks).filter(|rank| !members.contains(rank)).collect();
    let rank = place(members, Rank::from_index(me)).ok_or_else(|| lacks("the call needs", &[me]))?;
    among.reduction = call.reduction.map(|reduction| average(reduction, members.len() as u64));
    if call.collective.has_root() {
        among.root = place(members, call.root).ok_or_else(|| lacks("the root is", &[call.root.index()]))?;
    }
    match call.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => {}
        Collective::ReduceScatter => {
            let blocks = blocks_of(call, members, |blocks| blocks.input());
            among.blocks = Some(Arc::new(BlockTable::of_all(Collective::ReduceScatter, rank, blocks)));
        }
        Collective::Scatter => {
            let own = call.blocks.as_ref().and_then(|blocks| blocks.output().first().copied());
            let sent =
                if me == call.root.index() { blocks_of(call, members, |blocks| blocks.input()) } else { Vec::new() };
            let own = own.unwrap_or(Extent { count: call.count, at: 0 });
            among.blocks = Some(Arc::new(BlockTable::of_pairs(sent, vec![own])));
        }
        Collective::AllGather | Collective::AllToAll | Collective::Gather | Collective::Custom => {
            return Err(lacks(&format!("{} needs what is of", call.collective.name()), &lost));
        }
    }
    if let Some(blocks) = &among.blocks {
        among.count = blocks.longest();
    }
    Ok(among)
}

/// The members' blocks among those of all ranks.
fn blocks_of(call: &CollectiveCall, members: &[usize], of: impl Fn(&BlockTable) -> &[Extent]) -> Vec<Extent> {
    let block = |&rank: &usize| match &call.blocks {
        Some(blocks) => of(blocks).get(rank).copied().unwrap_or_default(),
        None => Extent { count: call.count, at: rank * call.count },
    };
    members.iter().map(block).collect()
}

/// A message as the members exchange it.
pub fn message_among(message: Operation, members: &[usize]) -> Result<Operation> {
    let peer = |rank: Rank| place(members, rank).ok_or_else(|| lacks("the peer is", &[rank.index()]));
    Ok(match message {
        Operation::Send { to, data, elements } => Operation::Send { to: peer(to)?, data, elements },
        Operation::Recv { from, data, elements } => Operation::Recv { from: peer(from)?, data, elements },
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{DataType, RedOp};
    use crate::memory::DeviceRegion;

    fn call(collective: Collective, op: RedOp, dtype: DataType) -> CollectiveCall {
        let reduction = Some(Reduction::new(op, dtype, 5));
        CollectiveCall {
            reduction,
            root: Rank(4),
            ..CollectiveCall::new(collective, [DeviceRegion::EMPTY; 2], 10, dtype)
        }
    }

    #[test]
    fn averages_are_over_those_who_are_left() {
        for (dtype, divisor, prologue) in
            [(DataType::F32, 3, Prologue::None), (DataType::F16, 1, Prologue::Reciprocal(3))]
        {
            let among = among(&call(Collective::AllReduce, RedOp::Avg, dtype), 5, &[0, 2, 4], 2).unwrap();
            let reduction = among.reduction.unwrap();
            assert_eq!((reduction.divisor, reduction.prologue), (divisor, prologue));
        }
        let sum = among(&call(Collective::AllReduce, RedOp::Sum, DataType::F32), 5, &[0, 2, 4], 2).unwrap();
        assert_eq!(sum.reduction.unwrap().divisor, 1);
    }

    #[test]
    fn blocks_and_roots_are_those_of_the_members() {
        let made =
            |collective, members: &[usize], me| among(&call(collective, RedOp::Sum, DataType::F32), 5, members, me);
        let scattered = made(Collective::ReduceScatter, &[0, 3, 4], 3).unwrap();
        let blocks = scattered.blocks.unwrap();
        assert_eq!(blocks.input().iter().map(|block| block.at).collect::<Vec<_>>(), [0, 30, 40]);
        assert_eq!((blocks.row(), blocks.output()), (&[10; 3][..], &[Extent { count: 10, at: 0 }][..]));
        let of_root = made(Collective::Scatter, &[1, 2, 4], 4).unwrap();
        assert_eq!((of_root.root, of_root.blocks.unwrap().input().len()), (Rank(2), 3));
        assert!(made(Collective::Scatter, &[1, 2, 4], 1).unwrap().blocks.unwrap().input().is_empty());
        assert_eq!(made(Collective::Broadcast, &[1, 4], 1).unwrap().root, Rank(1));
        for (collective, members) in [
            (Collective::Broadcast, &[0, 1][..]),
            (Collective::Reduce, &[0, 1]),
            (Collective::AllGather, &[0, 4]),
            (Collective::AllToAll, &[0, 4]),
            (Collective::Gather, &[0, 4]),
            (Collective::Custom, &[0, 4]),
        ] {
            let error = made(collective, members, 0).unwrap_err();
            assert!(matches!(&error, Error::Remote(text) if text.contains("lost")), "{collective:?}: {error}");
        }
        assert!(made(Collective::AllGather, &[0, 1, 2, 3, 4], 0).is_ok(), "nobody is lost");
    }

    #[test]
    fn messages_go_to_those_who_are_left() {
        let elements = crate::communicator::Elements { count: 1, dtype: DataType::F32 };
        let to = |to| Operation::Send { to: Rank(to), data: DeviceRegion::EMPTY, elements };
        assert!(matches!(message_among(to(4), &[0, 4]), Ok(Operation::Send { to: Rank(1), .. })));
        assert!(message_among(to(3), &[0, 4]).is_err());
    }
}
