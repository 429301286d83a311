//! One call of all ranks of the one node, carried out by what the node's ranks share: on the host a board in shared
//! memory, on which each rank writes its part once and reads everybody's.
//!
//! Steps a rank: one `Call`. It has no messages, so nothing of it is replaced by another algorithm's plan.
//! Bytes a rank: its input is written once; it reads `p` blocks (all-gather, reduce-scatter) or `p` vectors (all-reduce).
#![forbid(unsafe_code)]

use super::builder::{own, Builder};
use super::needs::{InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Buffer, Call, Collective, LinkLevel, Plan, Shape, Span};
use crate::topo::Rank;

/// All parts on a shared board.
pub const BOARD: Algorithm = Algorithm {
    name: "board",
    text: "every rank writes its part in shared memory and reads everybody's: no messages, for few bytes on one node",
    collectives: &[Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter],
    is_leveled: false,
    supports,
    build,
    needs,
};

/// A reduce-scatter and an all-gather on the board.
pub const TWO_ROUNDS: Algorithm = Algorithm {
    name: "board_two_rounds",
    text: "all-reduce as a reduce-scatter and an all-gather on the board",
    collectives: &[Collective::AllReduce],
    is_leveled: false,
    supports,
    build: two_rounds,
    needs,
};

/// More ranks would leave less than a cache line or two of a board for each.
const MOST_RANKS: usize = 512;

fn supports(shape: &Shape) -> bool {
    shape.grid.nnodes() == 1 && (2..=MOST_RANKS).contains(&shape.nranks())
}

fn call(shape: &Shape, collective: Collective, src: Vec<Span>, dst: Vec<Span>, finish: bool) -> Action {
    let lists = |spans: Vec<Span>| spans.into_iter().map(|span| vec![span]).collect();
    Action::Call(Call {
        collective,
        level: LinkLevel::Node,
        group: (0..shape.nranks()).map(Rank::from_index).collect(),
        root: 0,
        src: lists(src),
        dst: lists(dst),
        finish,
    })
}

fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    // Nothing but what is scaled before it goes on the board.
    let input = if shape.collective == Collective::ReduceScatter { shape.nranks() } else { 1 };
    Needs::new(if shape.prologue { input } else { 0 }, 0)
}

fn blocks(buffer: Buffer, n: usize) -> Vec<Span> {
    (0..n).map(|block| Span::user(buffer, block, 1)).collect()
}

/// The input after the prologue.
fn started(builder: &mut Builder, lane: usize, shape: &Shape, src: Vec<Span>) -> Vec<Span> {
    if !shape.prologue {
        return src;
    }
    let first = builder.scratch(src.len());
    let scaled: Vec<Span> = (0..src.len()).map(|block| Span::scratch(first + block, 1, block)).collect();
    builder.push(lane, Action::Copy { src, dst: scaled.clone(), start: true, finish: false });
    scaled
}

fn build(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "board", 1);
    let lane = builder.lane();
    let (src, dst) = match shape.collective {
        Collective::AllGather if shape.in_place => (vec![Span::output(rank.index(), 1)], blocks(Buffer::Output, p)),
        Collective::AllGather => (vec![Span::input(0, 1)], blocks(Buffer::Output, p)),
        Collective::ReduceScatter => (blocks(Buffer::Input, p), vec![Span::output(0, 1)]),
        _ => (vec![own(shape, 0, 1)], vec![Span::output(0, 1)]),
    };
    let src = started(&mut builder, lane, shape, src);
    builder.push(lane, call(shape, shape.collective, src, dst, shape.collective.reduces()));
    builder.plan()
}

fn two_rounds(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "board_two_rounds", p);
    let lane = builder.lane();
    let src = (0..p).map(|chunk| own(shape, chunk, 1)).collect();
    let src = started(&mut builder, lane, shape, src);
    let mine = vec![Span::output(rank.index(), 1)];
    builder.push(lane, call(shape, Collective::ReduceScatter, src, mine.clone(), true));
    builder.push(lane, call(shape, Collective::AllGather, mine, blocks(Buffer::Output, p), false));
    builder.plan()
}
