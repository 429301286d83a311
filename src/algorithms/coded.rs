//! Each rank with each, in a code: for what leaves the node, where precision is worth less than bytes.
//!
//! Every contribution is coded once and goes to the rank that folds its chunk, in float32; all-reduce codes the result once and
//! sends that to everybody. Who has coded something goes on with what all others decode, so that all ranks end with the same
//! bits. Messages have the bytes of [`FloatCode::bytes`]; rounds and messages are those of [`direct`](super::direct).
//!
//! The order in which a chunk's contributions are folded is that of the ranks, whoever folds it.
//!
//! ```text
//! all-reduce on 3 ranks, chunk 1:
//! rank 0   code(a1) --.                                   .--> a1' + b1' + c1' of code(...)
//! rank 1   code(b1) ---+--> a1' + b1' + c1', code(...) ---+--> the same, decoded, not what was folded
//! rank 2   code(c1) --'                                   '--> the same
//! ```
#![forbid(unsafe_code)]

use super::builder::{alone, own, Builder};
use super::direct::{others, recv, send};
use super::needs::{all_or, largest_node, Needs};
use super::Algorithm;
use crate::code::FloatCode;
use crate::plan::{Action, Collective, Plan, Shape, Span, StepRef};
use crate::topo::Rank;

/// In bfloat16.
pub const BF16: Algorithm = Algorithm {
    name: "coded_bf16",
    text: "each rank with each, in bfloat16, folded in float32",
    build: &|shape, rank| build(FloatCode::Bf16, shape, rank),
    ..CODED
};

/// In blocks of fp8.
pub const MX8: Algorithm = Algorithm {
    name: "coded_mx8",
    text: "each rank with each, in blocks of fp8 that share a scale, folded in float32",
    build: &|shape, rank| build(FloatCode::Mx8, shape, rank),
    ..CODED
};

/// In blocks of integers.
pub const INT8: Algorithm = Algorithm {
    name: "coded_int8",
    text: "each rank with each, in blocks of 8-bit integers that share a scale, folded in float32",
    build: &|shape, rank| build(FloatCode::Int8, shape, rank),
    ..CODED
};

/// What all have in common.
const CODED: Algorithm = Algorithm {
    name: "",
    text: "",
    collectives: &[Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll],
    is_leveled: false,
    // Chunks that go by another rank would be in scratch of the wrong kind there.
    supports: &|shape| shape.grid.links().is_none(),
    build: &|shape, rank| build(FloatCode::Bf16, shape, rank),
    needs: &|shape, _| needs(shape),
};

/// Blocks of slots: no coded chunk is longer than it was.
fn needs(shape: &Shape) -> Needs {
    let p = shape.nranks();
    if p == 1 {
        return Needs::default();
    }
    let slots = match shape.collective {
        Collective::AllReduce => 4,
        Collective::AllGather => p,
        _ => 2 * p,
    };
    let prologue = if shape.collective == Collective::ReduceScatter { all_or(shape, 0) } else { 0 };
    let sent = if shape.collective == Collective::AllToAll { largest_node(shape) - 1 } else { 0 };
    Needs::new(slots + prologue, sent)
}

fn build(code: FloatCode, shape: &Shape, rank: Rank) -> Plan {
    let name = name_of(code);
    if shape.nranks() == 1 {
        return alone(shape, rank, name);
    }
    match shape.collective {
        Collective::AllGather => all_gather(code, shape, Builder::new(shape, rank, name, 1), rank),
        Collective::ReduceScatter => reduce_scatter(code, shape, Builder::new(shape, rank, name, 1), rank),
        Collective::AllToAll => all_to_all(code, shape, Builder::new(shape, rank, name, 1), rank),
        _ => all_reduce(code, shape, Builder::new(shape, rank, name, shape.nranks()), rank),
    }
}

/// Codes, decodes, or copies what is coded.
fn copy(src: Span, dst: Span, finish: bool) -> Action {
    Action::Copy { src: vec![src], dst: vec![dst], start: false, finish }
}

/// Codes this rank's contributions, sends each to its owner, folds those to its own chunk into `dst`. `input` and `mine` name
/// the chunks of all owners and this rank's own. The fold's lane, its result, and the step that has read each owner's chunk.
fn fold_contributions(
    builder: &mut Builder,
    (code, shape, rank): (FloatCode, &Shape, Rank),
    (sends, deps): (usize, &[StepRef]),
    input: &dyn Fn(usize) -> Span,
    result: &dyn Fn(&mut Builder, usize) -> (Span, bool),
) -> (usize, Span, Vec<StepRef>) {
    let p = shape.nranks();
    let (first, received) = (builder.coded(code, p), builder.coded(code, p));
    let like = |chunk: usize| input(chunk).like as usize;
    let mut coded = vec![StepRef { lane: 0, step: 0 }; p];
    for peer in others(shape, rank) {
        let slot = Span::coded(first + peer.index(), 1, like(peer.index()));
        coded[peer.index()] = builder.push_after(sends, copy(input(peer.index()), slot, false), deps);
        builder.push(sends, send(peer, 0, slot));
    }
    let me = rank.index();
    let own_slot = Span::coded(first + me, 1, like(me));
    let lane = builder.lane();
    coded[me] = builder.push_after(lane, copy(input(me), own_slot, false), deps);
    let mut arrived = Vec::new();
    for peer in others(shape, rank) {
        let lane = builder.lane();
        arrived.push(builder.push(lane, recv(peer, 0, Span::coded(received + peer.index(), 1, like(me)))));
    }
    let contribution = |rank: usize| if rank == me { own_slot } else { Span::coded(received + rank, 1, like(me)) };
    let srcs = (0..p).map(|rank| vec![contribution(rank)]).collect();
    let (dst, finish) = result(builder, like(me));
    builder.push_after(lane, Action::Reduce { srcs, dst: vec![dst], finish }, &arrived);
    (lane, dst, coded)
}

fn reduce_scatter(code: FloatCode, shape: &Shape, mut builder: Builder, rank: Rank) -> Plan {
    let p = shape.nranks();
    let sends = builder.lane();
    let mut deps = Vec::new();
    let mut input: Vec<Span> = (0..p).map(|block| Span::input(block, 1)).collect();
    if shape.prologue {
        let first = builder.scratch(p);
        let scaled: Vec<Span> = (0..p).map(|block| Span::scratch(first + block, 1, block)).collect();
        let scale = Action::Copy { src: input, dst: scaled.clone(), start: true, finish: false };
        deps.push(builder.push(sends, scale));
        input = scaled;
    }
    let result = |_: &mut Builder, _| (Span::output(0, 1), true);
    fold_contributions(&mut builder, (code, shape, rank), (sends, &deps), &|block| input[block], &result);
    builder.plan()
}

fn all_reduce(code: FloatCode, shape: &Shape, mut builder: Builder, rank: Rank) -> Plan {
    let p = shape.nranks();
    let sends = builder.lane();
    let mut deps = Vec::new();
    if shape.prologue {
        let action =
            Action::Copy { src: vec![own(shape, 0, p)], dst: vec![Span::output(0, p)], start: true, finish: false };
        deps.push(builder.push(sends, action));
    }
    let input = |chunk| if shape.prologue { Span::output(chunk, 1) } else { own(shape, chunk, 1) };
    let result = |builder: &mut Builder, like| (Span::coded(builder.coded(code, 1), 1, like), false);
    let (lane, folded, coded) = fold_contributions(&mut builder, (code, shape, rank), (sends, &deps), &input, &result);
    for peer in others(shape, rank) {
        builder.push(lane, send(peer, 1, folded));
    }
    builder.push(lane, copy(folded, Span::output(rank.index(), 1), true));
    let results = builder.coded(code, p);
    for peer in others(shape, rank) {
        let lane = builder.lane();
        let slot = Span::coded(results + peer.index(), 1, peer.index());
        builder.push(lane, recv(peer, 1, slot));
        // A result contains what this rank has sent of its chunk, so the step waits for nothing; but the proof finds at once
        // why the chunk's place may be written.
        builder.push_after(lane, copy(slot, Span::output(peer.index(), 1), true), &[coded[peer.index()]]);
    }
    builder.plan()
}

fn all_gather(code: FloatCode, shape: &Shape, mut builder: Builder, rank: Rank) -> Plan {
    let home = Span::output(rank.index(), 1);
    let mine = if shape.in_place { home } else { Span::input(0, 1) };
    let first = builder.coded(code, shape.nranks());
    let slot = |rank: Rank| Span::coded(first + rank.index(), 1, rank.index());
    let sends = builder.lane();
    builder.push(sends, copy(mine, slot(rank), false));
    for peer in others(shape, rank) {
        builder.push(sends, send(peer, 0, slot(rank)));
    }
    builder.push(sends, copy(slot(rank), home, false));
    for peer in others(shape, rank) {
        let lane = builder.lane();
        builder.push(lane, recv(peer, 0, slot(peer)));
        builder.push(lane, copy(slot(peer), Span::output(peer.index(), 1), false));
    }
    builder.plan()
}

/// Only what leaves the node is coded.
fn all_to_all(code: FloatCode, shape: &Shape, mut builder: Builder, rank: Rank) -> Plan {
    let (p, me) = (shape.nranks(), rank.index());
    let leaves = |peer: Rank| shape.grid.node(peer) != shape.grid.node(rank);
    let (first, received) = (builder.coded(code, p), builder.coded(code, p));
    let sends = builder.lane();
    for peer in others(shape, rank) {
        let input = Span::input(peer.index(), 1);
        if !leaves(peer) {
            builder.push(sends, send(peer, 0, input));
            continue;
        }
        let slot = Span::coded(first + peer.index(), 1, me * p + peer.index());
        builder.push(sends, copy(input, slot, false));
        builder.push(sends, send(peer, 0, slot));
    }
    builder.copy(vec![Span::input(me, 1)], vec![Span::output(me, 1)], false, false);
    for peer in others(shape, rank) {
        let lane = builder.lane();
        let output = Span::output(peer.index(), 1);
        if !leaves(peer) {
            builder.push(lane, recv(peer, 0, output));
            continue;
        }
        let slot = Span::coded(received + peer.index(), 1, peer.index() * p + me);
        builder.push(lane, recv(peer, 0, slot));
        builder.push(lane, copy(slot, output, false));
    }
    builder.plan()
}

/// The algorithm between nodes that uses a code.
pub fn name_of(code: FloatCode) -> &'static str {
    match code {
        FloatCode::Bf16 => BF16.name,
        FloatCode::Mx8 => MX8.name,
        FloatCode::Int8 => INT8.name,
    }
}

/// The code of the algorithm with this name.
pub fn code_of(name: &str) -> Option<FloatCode> {
    FloatCode::ALL.into_iter().find(|code| name_of(*code) == name)
}

#[cfg(test)]
mod tests {
    use super::super::{build, coded_choices, Choice};
    use super::*;
    use crate::plan::Buffer;
    use crate::topo::Grid;
    use crate::verify::{verify, Check, Options};
    use std::sync::Arc;

    const COLLECTIVES: [Collective; 4] =
        [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll];

    fn grids() -> Vec<Grid> {
        let sizes = [vec![1], vec![4], vec![1; 2], vec![1; 5], vec![2, 2], vec![3, 1, 2], vec![4, 4, 4], vec![1, 3]];
        sizes.iter().map(|sizes| Grid::blocks(sizes)).collect()
    }

    fn plans(choice: &Choice, shape: &Shape) -> Vec<Plan> {
        (0..shape.nranks()).map(|rank| build(choice, shape, Rank::from_index(rank)).unwrap()).collect()
    }

    #[test]
    fn all_forms_are_proved_on_nodes_of_all_kinds() {
        let mut proved = 0;
        for grid in grids().into_iter().map(Arc::new) {
            for collective in COLLECTIVES {
                for choice in coded_choices(collective, &grid) {
                    for (in_place, prologue) in [(false, false), (true, false), (false, true), (true, true)] {
                        let shape = Shape { in_place, prologue, ..Shape::new(collective, grid.clone()) };
                        if in_place && collective == Collective::AllToAll || prologue && !collective.reduces() {
                            continue;
                        }
                        for vectored in [false, collective != Collective::AllReduce] {
                            let options = Options { vectored, ..Options::default() };
                            let outcome = verify(&plans(&choice, &shape), &options);
                            assert!(outcome.is_ok(), "{choice} of {} on {grid}: {outcome:?}", collective.name());
                            proved += 1;
                        }
                    }
                }
            }
        }
        assert!(proved > 500, "{proved}");
    }

    /// Changes each step of rank 0 that `change` changes, one after another, and expects a rejection.
    fn rejected(plans: &[Plan], change: &dyn Fn(&mut Action) -> bool) -> Vec<Check> {
        let mut checks = Vec::new();
        for lane in 0..plans[0].lanes.len() {
            for step in 0..plans[0].lanes[lane].steps.len() {
                let mut mutant = plans.to_vec();
                if change(&mut mutant[0].lanes[lane].steps[step].action) {
                    let outcome = verify(&mutant, &Options::default());
                    checks.push(outcome.expect_err(&format!("lane {lane} step {step} is changed")).check);
                }
            }
        }
        checks
    }

    #[test]
    fn what_codes_twice_or_keeps_what_others_do_not_have_is_rejected() {
        let shape = |collective| Shape::new(collective, Arc::new(Grid::blocks(&[1, 1, 1])));
        let gathers = plans(&Choice::flat("coded_mx8"), &shape(Collective::AllGather));
        // A rank's own block as it was, where the others have what the code left.
        let keeps = rejected(&gathers, &|action| match action {
            Action::Copy { src, dst, .. } if dst[0] == Span::output(0, 1) => {
                *src = vec![Span::input(0, 1)];
                true
            }
            _ => false,
        });
        assert_eq!(keeps, [Check::Coding]);
        // What is decoded is coded again.
        let again = |plans: &[Plan]| {
            let mut mutant = plans.to_vec();
            let coded = mutant[0].coded.as_mut().unwrap();
            let slot = Span::coded(coded.chunks as usize, 1, 0);
            coded.chunks += 1;
            let lane = mutant[0].lanes.iter().position(|lane| {
                matches!(&lane.steps.last().unwrap().action, Action::Copy { dst, .. } if dst[0].buffer == Buffer::Output)
            });
            let lane = lane.unwrap();
            let Action::Copy { dst, .. } = mutant[0].lanes[lane].steps.last().unwrap().action.clone() else { panic!() };
            let like = dst[0].like as usize;
            mutant[0].lanes[lane].steps.push(copy(dst[0], Span { like: like as u32, ..slot }, false).into());
            mutant[0].lanes[lane].steps.push(copy(Span { like: like as u32, ..slot }, dst[0], false).into());
            verify(&mutant, &Options::default()).unwrap_err().check
        };
        assert_eq!(again(&gathers), Check::Coding);
        let reduces = plans(&Choice::flat("coded_int8"), &shape(Collective::AllReduce));
        // The owner keeps what it has folded, not what it has sent.
        let mut mutant = reduces.clone();
        for lane in &mut mutant[1].lanes {
            let folds = lane.steps.iter().position(|step| matches!(step.action, Action::Reduce { .. }));
            if let Some(at) = folds {
                let Action::Reduce { srcs, .. } = lane.steps[at].action.clone() else { panic!() };
                let last = lane.steps.len() - 1;
                lane.steps[last].action = Action::Reduce { srcs, dst: vec![Span::output(1, 1)], finish: true };
            }
        }
        assert_eq!(verify(&mutant, &Options::default()).unwrap_err().check, Check::Coding);
        // A contribution that is not coded.
        let plain = rejected(&reduces, &|action| match action {
            Action::Send { channel: 0, src, .. } => {
                *src = vec![Span::input(src[0].like as usize, 1)];
                true
            }
            _ => false,
        });
        assert!(plain.len() == 2 && plain.iter().all(|check| *check == Check::Coding), "{plain:?}");
    }
}
