//! One call of all ranks of the one node, carried out by what the node's ranks share: on the host a board in shared
//! memory, on which each rank writes its part once and reads everybody's.
//!
//! Steps a rank: one `Call`. It has no messages, so nothing of it is replaced by another algorithm's plan.
//! Bytes a rank: its input is written once; it reads `p` blocks (all-gather, reduce-scatter) or `p` vectors (all-reduce).
#![forbid(unsafe_code)]

use super::builder::{own, Builder};
use super::Algorithm;
use crate::plan::{Action, Call, Collective, Level, Plan, Shape, Span};
use crate::topo::Rank;

/// All parts on a shared board.
pub const BOARD: Algorithm = Algorithm {
    name: "board",
    text: "every rank writes its part in shared memory and reads everybody's: no messages, for few bytes on one node",
    collectives: &[Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter],
    supports: |shape| shape.grid.nnodes() == 1 && shape.nranks() > 1,
    build,
};

fn build(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "board", 1);
    let lane = builder.lane();
    let (mut src, dst): (Vec<Span>, Vec<Span>) = match shape.collective {
        Collective::AllGather => {
            let home = Span::output(rank.index(), 1);
            let mine = if shape.in_place { home } else { Span::input(0, 1) };
            (vec![mine], (0..p).map(|block| Span::output(block, 1)).collect())
        }
        Collective::ReduceScatter => ((0..p).map(|block| Span::input(block, 1)).collect(), vec![Span::output(0, 1)]),
        _ => (vec![own(shape, 0, 1)], vec![Span::output(0, 1)]),
    };
    if shape.prologue {
        let first = builder.scratch(src.len());
        let scaled: Vec<Span> = (0..src.len()).map(|block| Span::scratch(first + block, 1, block)).collect();
        builder.push(lane, Action::Copy { src, dst: scaled.clone(), start: true, finish: false });
        src = scaled;
    }
    let call = Call {
        collective: shape.collective,
        level: Level::Node,
        group: (0..p).map(Rank::from_index).collect(),
        root: 0,
        src: src.into_iter().map(|span| vec![span]).collect(),
        dst: dst.into_iter().map(|span| vec![span]).collect(),
        finish: shape.collective.reduces(),
    };
    builder.push(lane, Action::Call(call));
    builder.plan()
}
