//! Every collective, type and operation on every shape, against a reference in higher precision.

use crate::built::run_with;
use crate::world::{self, host_region, region, run, Member};
use strata::communicator::CollectiveCall;
use strata::device::host::reference;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::memory::Region;
use strata::plan::Collective;
use strata::script::store::{self, Steps};
use strata::script::LoadedScript;
use strata::topo::{Grid, Rank};

/// A deterministic stream of numbers.
fn noise(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// `count` elements of rank `rank`: any bits for integers, modest numbers for floats and averages.
fn elements(dtype: DataType, op: Option<RedOp>, count: usize, rank: usize) -> Vec<u8> {
    let mut next = noise((rank as u64) << 32 | count as u64);
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for _ in 0..count {
        let random = next();
        let full_range = dtype.is_integer() && op != Some(RedOp::Avg);
        let element = if op.is_none() || full_range {
            random.to_le_bytes()
        } else {
            let unit = (random >> 40) as f64 / (1u64 << 24) as f64;
            let value = match (op, dtype.is_integer()) {
                (Some(RedOp::Prod), _) => 0.75 + unit / 2.0,
                (_, true) => (unit * 7.0).floor(),
                _ => unit * 4.0 - 2.0,
            };
            reference::encode(dtype, value)
        };
        bytes.extend_from_slice(&element[..dtype.size()]);
    }
    bytes
}

struct Case {
    collective: Collective,
    dtype: DataType,
    op: Option<RedOp>,
    count: usize,
    root: usize,
    in_place: bool,
    misalign: usize,
}

/// Runs one case on this rank, by this algorithm or whichever the library takes, and checks what came out, and what must not have changed.
fn check(member: &Member, case: &Case, algorithm: Option<&str>) {
    let Case { collective, dtype, op, count, root, in_place, misalign } = *case;
    let (nranks, me) = (member.grid.nranks(), member.rank);
    let block = count * dtype.size();
    let (rank, root_rank) = (Rank::from_index(me), Rank::from_index(root));
    let inputs: Vec<Vec<u8>> = (0..nranks)
        .map(|rank| {
            let blocks = collective.input_blocks(nranks, Rank::from_index(rank), root_rank);
            elements(dtype, op, blocks * count, rank)
        })
        .collect();
    let out_bytes = collective.output_blocks(nranks, rank, root_rank) * block;
    let mut send = vec![0xa5; misalign];
    send.extend_from_slice(&inputs[me]);
    let mut recv = vec![0x5a; misalign + out_bytes + 16];
    let mut input = host_region(&mut send).part(misalign, inputs[me].len());
    let mut output = host_region(&mut recv).part(misalign, out_bytes);
    if in_place {
        (input, output) = place(collective, me, me == root, block, &inputs[me], input, output);
    }
    let reduction = op.map(|op| Reduction::new(op, dtype, nranks));
    let call = CollectiveCall {
        collective,
        input: input.as_device(),
        output: output.as_device(),
        count,
        dtype,
        reduction,
        factor_at: None,
        root: root_rank,
        algorithm: algorithm.map(str::to_string),
        decision: None,
    };
    let what = format!(
        "{} {algorithm:?} {} {:?} count {count} root {root} in_place {in_place} misaligned {misalign} rank {me} of {}",
        collective.name(),
        dtype.name(),
        op,
        member.grid
    );
    member.collective(call).unwrap_or_else(|error| panic!("{what}: {error}"));
    let mut result = vec![0; out_bytes];
    output.read(&mut result);
    verify(collective, dtype, op, block, me, root, &inputs, &result).unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
    if !in_place {
        assert_eq!(send[misalign..], inputs[me][..], "{what}: the input was written");
        assert!(recv[misalign + out_bytes..].iter().all(|&byte| byte == 0x5a), "{what}: wrote beyond the output");
    }
    if collective == Collective::AllReduce {
        same_on_all(member, result, &what);
    }
}

/// The in-place form: where both buffers are, with the input in its place.
fn place(
    collective: Collective,
    me: usize,
    is_root: bool,
    block: usize,
    data: &[u8],
    input: Region,
    output: Region,
) -> (Region, Region) {
    match collective {
        Collective::AllReduce | Collective::AllToAll => {
            output.write(data);
            (output, output)
        }
        Collective::Broadcast | Collective::Reduce if is_root => {
            output.write(data);
            (output, output)
        }
        Collective::AllGather => {
            output.part(me * block, block).write(data);
            (output.part(me * block, block), output)
        }
        Collective::Gather if is_root => {
            output.part(me * block, block).write(data);
            (output.part(me * block, block), output)
        }
        Collective::ReduceScatter => (input, input.part(me * block, block)),
        Collective::Scatter if is_root => (input, input.part(me * block, block)),
        _ => (input, output),
    }
}

#[allow(clippy::too_many_arguments)]
fn verify(
    collective: Collective,
    dtype: DataType,
    op: Option<RedOp>,
    block: usize,
    me: usize,
    root: usize,
    inputs: &[Vec<u8>],
    result: &[u8],
) -> Result<(), String> {
    let part = |rank: usize, index: usize| &inputs[rank][index * block..(index + 1) * block];
    if let (true, Some(op)) = (collective.reduces(), op) {
        let index = if collective == Collective::ReduceScatter { me } else { 0 };
        let operands: Vec<&[u8]> = (0..inputs.len()).map(|rank| part(rank, index)).collect();
        return if result.is_empty() { Ok(()) } else { reference::check(op, dtype, &operands, result) };
    }
    let ranks = 0..inputs.len();
    let expected: Vec<&[u8]> = match collective {
        Collective::AllGather => ranks.map(|rank| part(rank, 0)).collect(),
        Collective::Gather if me == root => ranks.map(|rank| part(rank, 0)).collect(),
        Collective::Broadcast => vec![part(root, 0)],
        Collective::Scatter => vec![part(root, me)],
        Collective::AllToAll => ranks.map(|rank| part(rank, me)).collect(),
        _ => Vec::new(),
    };
    let expected = expected.concat();
    match expected.iter().zip(result).position(|(a, b)| a != b) {
        None if expected.len() == result.len() => Ok(()),
        at => Err(format!("byte {at:?} of {} differs", expected.len())),
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
fn all_cases(member: &Member, collective: Collective, algorithm: Option<&str>) {
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
fn run_by(
    member: &Member,
    collective: Collective,
    choice: &strata::algorithms::Choice,
    (dtype, op): (DataType, RedOp),
) {
    let op = collective.reduces().then_some(op);
    let nranks = member.grid.nranks();
    let (count, size) = (5003, dtype.size());
    let rank = Rank::from_index(member.rank);
    let input = |r| elements(dtype, op, collective.input_blocks(nranks, Rank::from_index(r), Rank(0)) * count, r);
    let inputs: Vec<Vec<u8>> = (0..nranks).map(input).collect();
    let mut send = inputs[member.rank].clone();
    let mut recv = vec![0; collective.output_blocks(nranks, rank, Rank(0)) * count * size];
    let call = CollectiveCall {
        collective,
        input: region(&mut send),
        output: region(&mut recv),
        count,
        dtype,
        reduction: op.map(|op| Reduction::new(op, dtype, nranks)),
        factor_at: None,
        root: Rank(0),
        algorithm: Some(choice.to_string()),
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

/// The files of others that do what they say, with their numbers of ranks.
fn scripts() -> Vec<&'static LoadedScript> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/shim-tests/scripts");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "xml"));
    files.sort();
    let load = |file: &std::path::PathBuf| {
        let (text, contract) = (std::fs::read_to_string(file).ok()?, store::contract_beside(file));
        store::load(file.file_stem()?.to_str()?, &text, contract.as_deref(), Steps::Merged).ok()
    };
    files.iter().filter_map(load).collect()
}

#[test]
fn scripts_are_right_on_every_type_and_operation_in_both_places() {
    assert_eq!(scripts().len(), 24);
    for nranks in [4, 8] {
        let half = nranks / 2;
        for grid in [Grid::flat(nranks), Grid::blocks(&[half, half]), Grid::round_robin(nranks, half)] {
            run(grid, |member| {
                let nranks = member.grid.nranks();
                for script in scripts().iter().filter(|script| script.script.nranks() == nranks) {
                    all_cases(member, script.script.collective, Some(&script.name));
                }
            });
        }
    }
}

const ALL_TO_NEXT: &str = "script:alltonext_fwd_2n";

/// A custom collective: its contract promises each rank but the first the vector of the rank before.
#[test]
fn a_script_of_a_custom_collective_does_what_its_contract_says() {
    scripts();
    run(Grid::blocks(&[8, 8]), |member| {
        for (count, in_place) in [0, 1, 7, 1000, 65_537].into_iter().flat_map(|count| [(count, false), (count, true)]) {
            let vector = |rank: usize| elements(DataType::F32, None, count, rank);
            let (mut send, mut recv) = (vector(member.rank), vec![0x5a; count * 4]);
            let call = CollectiveCall {
                collective: Collective::Custom,
                input: region(&mut send),
                output: if in_place { region(&mut send) } else { region(&mut recv) },
                count,
                dtype: DataType::F32,
                reduction: None,
                factor_at: None,
                root: Rank(0),
                algorithm: Some(ALL_TO_NEXT.to_string()),
                decision: None,
            };
            member.collective(call).unwrap_or_else(|error| panic!("{error}"));
            let Some(before) = member.rank.checked_sub(1) else {
                assert!(in_place || recv == vec![0x5a; count * 4]);
                continue;
            };
            assert!(
                *(if in_place { &send } else { &recv }) == vector(before),
                "rank {} of {count} elements",
                member.rank
            );
        }
    });
}

#[test]
fn scripts_for_more_ranks_are_right() {
    for nranks in [16, 32] {
        run(Grid::blocks(&[nranks / 2, nranks / 2]), |member| {
            let nranks = member.grid.nranks();
            let fits = |script: &LoadedScript| script.script.nranks() == nranks && script.name != ALL_TO_NEXT;
            for script in scripts().iter().filter(|script| fits(script)) {
                let choice = script.name.parse().unwrap();
                run_by(member, script.script.collective, &choice, (DataType::F16, RedOp::Avg));
                run_by(member, script.script.collective, &choice, (DataType::I32, RedOp::Sum));
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
