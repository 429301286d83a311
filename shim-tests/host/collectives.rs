//! Every collective, type and operation on every shape, against a reference in higher precision.

use crate::built::run_with;
use crate::cases::{kept_elements, verify, Case};
use crate::world::{self, region, run, Member};
use std::sync::Arc;
use strata::communicator::CollectiveCall;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::plan::Collective;
use strata::topo::{Grid, Rank};

/// Runs one case on this rank, by this algorithm or whichever the library takes, and checks what came out.
pub fn check(member: &Member, case: &Case, algorithm: Option<&str>) {
    let result = case.run((member.grid.nranks(), member.rank), algorithm, |call| member.collective(call));
    if case.collective == Collective::AllReduce {
        same_on_all(member, result, &format!("{algorithm:?} {case} on {}", member.grid));
    }
}

fn same_on_all(member: &Member, result: Vec<u8>, what: &str) {
    member.board.lock().unwrap()[member.rank] = result;
    member.barrier.wait();
    {
        let board = member.board.lock().unwrap();
        assert!(board.iter().all(|other| *other == board[0]), "{what}: ranks differ");
    }
    member.barrier.wait();
}

fn grids() -> Vec<Grid> {
    let mut grids: Vec<Grid> = (1..=16).map(Grid::flat).collect();
    for sizes in [&[2, 2][..], &[4, 4], &[2, 2, 2, 2], &[3, 3, 3], &[1, 1, 1, 1, 1], &[3, 1, 4], &[8, 8], &[1, 7]] {
        grids.push(Grid::blocks(sizes));
    }
    grids.push(Grid::round_robin(6, 2));
    grids.push(Grid::round_robin(7, 3));
    grids
}

/// All operations on all types at one count, and all counts on two types, both ways of holding buffers.
pub fn all_cases(member: &Member, collective: Collective, algorithm: Option<&str>) {
    let nranks = member.grid.nranks();
    let on_device = world::is_on_device();
    let ops = |dtype: DataType| -> Vec<Option<RedOp>> {
        match collective.reduces() {
            true => RedOp::of(dtype).filter(|op| op.is_nccl() || !on_device).map(Some).collect(),
            false => vec![None],
        }
    };
    let mut turn = 0;
    let mut run_case = |dtype, op, count| {
        turn += 1;
        let root = if collective.has_root() { turn % nranks } else { 0 };
        let has_in_place =
            collective != Collective::AllToAll || algorithm.is_some_and(|name| name.starts_with("script:"));
        let in_place = turn % 2 == 0 && has_in_place;
        check(member, &Case { collective, dtype, op, count, root, in_place, misalign: turn % 5 }, algorithm);
    };
    for dtype in DataType::HOST.into_iter().filter(|dtype| dtype.is_nccl() || !on_device) {
        for op in ops(dtype) {
            run_case(dtype, op, 37);
            run_case(dtype, op, 203);
        }
    }
    for count in [0, 1, 2, nranks, nranks + 1, 1000, 4099, 33_331] {
        for dtype in [DataType::F32, DataType::BF16] {
            run_case(dtype, ops(dtype)[0], count);
            run_case(dtype, ops(dtype)[0], count);
        }
        if !on_device {
            let last = |dtype| ops(dtype).pop().flatten();
            run_case(DataType::I16, last(DataType::I16), count);
            run_case(DataType::U16, ops(DataType::U16)[0], count);
        }
    }
}

#[test]
fn every_collective_type_and_operation_is_right_on_every_shape() {
    for grid in grids() {
        run(grid, |member| {
            for collective in Collective::ALL {
                all_cases(member, collective, None);
            }
        });
    }
}

/// Several segments, the last one short: its chunks are shorter than the scratch slots they lie in.
#[test]
fn long_messages_with_a_short_last_segment_are_right() {
    for grid in [Grid::flat(4), Grid::blocks(&[2, 2]), Grid::blocks(&[1, 1, 1, 1]), Grid::blocks(&[3, 1])] {
        run(grid, |member| {
            for collective in Collective::ALL {
                let whole = matches!(collective, Collective::AllReduce | Collective::Broadcast | Collective::Reduce);
                let run_case = |dtype: DataType, op, in_place| {
                    let op = collective.reduces().then_some(op);
                    let count = if whole { 4_839_908 } else { 1_210_004 } / dtype.size() / 4 * 4 + 1;
                    let root = usize::from(collective.has_root());
                    check(member, &Case { collective, dtype, op, count, root, in_place, misalign: 0 }, None);
                };
                for in_place in [false, collective != Collective::AllToAll] {
                    run_case(DataType::I32, RedOp::Sum, in_place);
                }
                if !world::is_on_device() {
                    run_case(DataType::I16, RedOp::BitAnd, false);
                }
            }
        });
    }
}

/// Runs a collective by an algorithm and checks what came out.
pub fn run_by(
    member: &Member,
    collective: Collective,
    choice: &strata::algorithms::Choice,
    (dtype, op): (DataType, RedOp),
) {
    let op = collective.reduces().then_some(op);
    let nranks = member.grid.nranks();
    let (count, size) = (5003, dtype.size());
    let rank = Rank::from_index(member.rank);
    let of = |r| kept_elements(dtype, op, collective.input_blocks(nranks, Rank::from_index(r), Rank(0)) * count, r);
    let inputs: Vec<Arc<Vec<u8>>> = (0..nranks).map(of).collect();
    let mut send = inputs[member.rank].to_vec();
    let mut recv = vec![0; collective.output_blocks(nranks, rank, Rank(0)) * count * size];
    let call = CollectiveCall {
        collective,
        input: region(&mut send),
        output: region(&mut recv),
        count,
        blocks: None,
        joined: None,
        tag: 0,
        dtype,
        reduction: op.map(|op| Reduction::new(op, dtype, nranks)),
        factor_at: None,
        residual: None,
        root: Rank(0),
        algorithm: Some(choice.exact()),
        decision: None,
    };
    member.collective(call).unwrap_or_else(|error| panic!("{choice}: {error}"));
    verify(collective, dtype, op, count * size, member.rank, 0, &inputs, &recv)
        .unwrap_or_else(|wrong| panic!("{} {choice} on {}: {wrong}", collective.name(), member.grid));
}

#[test]
fn every_algorithm_moves_real_data_right() {
    for grid in [Grid::flat(5), Grid::blocks(&[2, 2]), Grid::blocks(&[3, 1, 4]), Grid::round_robin(6, 2)] {
        run(grid, |member| {
            for collective in Collective::ALL {
                let choices = strata::algorithms::choices(collective, &member.grid);
                // A board is host memory.
                let on_board = |choice: &strata::algorithms::Choice| strata::algorithms::is_on_board(choice);
                for choice in choices.into_iter().filter(|choice| !world::is_on_device() || !on_board(choice)) {
                    run_by(member, collective, &choice, (DataType::I32, RedOp::Sum));
                    if !world::is_on_device() {
                        run_by(member, collective, &choice, (DataType::U16, RedOp::BitXor));
                    }
                }
            }
        });
    }
}

#[test]
fn equal_calls_again_and_again_are_right_whatever_comes_between() {
    for (ranks, seed, mode) in
        [("1", "4", "processes"), ("2", "5", "processes"), ("2", "6", "threads"), ("3", "7", "processes")]
    {
        run_with("repeated.c", &["-pthread"], &[ranks, seed, mode]);
    }
    run_with("repeated.c", &["-pthread"], &["5", "8", "threads"]);
}
