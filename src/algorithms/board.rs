//! One call of all ranks of the one node, carried out by what the node's ranks share: on the host a board in shared
//! memory, on which each rank writes its part once and reads everybody's.
//!
//! Steps a rank: one `Call`. It has no messages, so nothing of it is replaced by another algorithm's plan.
//! Bytes a rank: what others need of its input is written once, or read where it lies; it reads `p - 1` blocks (all-gather,
//! reduce-scatter, all-to-all; the root of a gather) or vectors (all-reduce; the root of a reduce), or one (broadcast, scatter).
#![forbid(unsafe_code)]

use super::builder::{own, Builder};
use super::needs::{InnerNeeds, Needs};
use super::Algorithm;
use crate::plan::{Action, Buffer, Call, Collective, LinkLevel, Plan, Shape, Span};
use crate::topo::Rank;

/// All parts on a shared board.
pub const BOARD: Algorithm = Algorithm {
    name: "board",
    text: "every rank shows its part in shared memory, and who needs it reads it there: no messages, on one node",
    collectives: &Collective::ALL,
    is_leveled: false,
    supports: &supports,
    build: &build,
    needs: &needs,
};

/// A reduce-scatter and an all-gather, or a gather, on the board.
pub const TWO_ROUNDS: Algorithm = Algorithm {
    name: "board_two_rounds",
    text: "all-reduce as a reduce-scatter and an all-gather on the board, reduce as one and a gather",
    collectives: &[Collective::AllReduce, Collective::Reduce],
    is_leveled: false,
    supports: &supports,
    build: &two_rounds,
    needs: &two_rounds_needs,
};

/// More ranks would leave less than a cache line or two of a board for each.
const MOST_RANKS: usize = 512;

fn supports(shape: &Shape) -> bool {
    shape.grid.nnodes() == 1 && (2..=MOST_RANKS).contains(&shape.nranks())
}

fn call(
    shape: &Shape,
    (collective, level): (Collective, LinkLevel),
    (src, dst): (Vec<Span>, Vec<Span>),
    finish: bool,
) -> Action {
    let lists = |spans: Vec<Span>| spans.into_iter().map(|span| vec![span]).collect();
    Action::Call(Call {
        collective,
        level,
        group: (0..shape.nranks()).map(Rank::from_index).collect(),
        root: if has_root(collective) { shape.root.index() } else { 0 },
        src: lists(src),
        dst: lists(dst),
        finish,
    })
}

fn has_root(collective: Collective) -> bool {
    use Collective::{Broadcast, Gather, Reduce, Scatter};
    matches!(collective, Broadcast | Gather | Reduce | Scatter)
}

fn two_rounds_needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    // What is scaled before it goes on the board, and the part of the sum of a rank that has no output.
    let part = usize::from(shape.collective == Collective::Reduce);
    Needs::new(usize::from(shape.prologue) + part, 0)
}

pub(super) fn needs(shape: &Shape, _: &InnerNeeds<'_>) -> Needs {
    // Nothing but what is scaled before others see it.
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
    one_call(shape, rank, (BOARD.name, LinkLevel::Node))
}

/// The plan of one call of all ranks, on this level.
pub(super) fn one_call(shape: &Shape, rank: Rank, (name, level): (&str, LinkLevel)) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, name, 1);
    let lane = builder.lane();
    let is_root = rank == shape.root;
    let at_root = |spans: Vec<Span>| if is_root { spans } else { Vec::new() };
    let output = vec![Span::output(0, 1)];
    let (src, dst) = match shape.collective {
        Collective::AllGather if shape.in_place => (vec![Span::output(rank.index(), 1)], blocks(Buffer::Output, p)),
        Collective::AllGather => (vec![Span::input(0, 1)], blocks(Buffer::Output, p)),
        Collective::Gather if shape.in_place && is_root => {
            (vec![Span::output(rank.index(), 1)], blocks(Buffer::Output, p))
        }
        Collective::Gather => (vec![Span::input(0, 1)], at_root(blocks(Buffer::Output, p))),
        Collective::ReduceScatter => (blocks(Buffer::Input, p), output),
        Collective::AllToAll => (blocks(Buffer::Input, p), blocks(Buffer::Output, p)),
        Collective::Scatter => (at_root(blocks(Buffer::Input, p)), output),
        Collective::Broadcast => (at_root(vec![own(shape, 0, 1)]), output),
        Collective::Reduce => (vec![mine(shape, rank, 0)], at_root(output)),
        Collective::AllReduce => (vec![own(shape, 0, 1)], output),
        // Only scripts do these.
        Collective::Custom => (Vec::new(), Vec::new()),
    };
    let src = started(&mut builder, lane, shape, src);
    builder.push(lane, call(shape, (shape.collective, level), (src, dst), shape.collective.reduces()));
    builder.plan()
}

/// A chunk of the input of a collective in which only the root has an output.
fn mine(shape: &Shape, rank: Rank, chunk: usize) -> Span {
    if rank == shape.root || shape.collective == Collective::AllReduce {
        return own(shape, chunk, 1);
    }
    Span::input(chunk, 1)
}

fn two_rounds(shape: &Shape, rank: Rank) -> Plan {
    let p = shape.nranks();
    let mut builder = Builder::new(shape, rank, "board_two_rounds", p);
    let lane = builder.lane();
    let src = (0..p).map(|chunk| mine(shape, rank, chunk)).collect();
    let src = started(&mut builder, lane, shape, src);
    let all = shape.collective == Collective::AllReduce;
    let part = match all || rank == shape.root {
        true => vec![Span::output(rank.index(), 1)],
        false => vec![Span::scratch(builder.scratch(1), 1, rank.index())],
    };
    builder.push(lane, call(shape, (Collective::ReduceScatter, LinkLevel::Node), (src, part.clone()), true));
    let dst = if all || rank == shape.root { blocks(Buffer::Output, p) } else { Vec::new() };
    let second = if all { Collective::AllGather } else { Collective::Gather };
    builder.push(lane, call(shape, (second, LinkLevel::Node), (part, dst), false));
    builder.plan()
}
