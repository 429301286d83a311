//! Codes: results within the bounds of their forms whatever the numbers, the same bits on all ranks, and what is left out comes
//! back with the next call.

use crate::built::run_with;
use crate::cases::noise;
use crate::world::{is_on_device, region, run, toy, Member};
use strata::code::{FloatCode, BLOCK};
use strata::communicator::CollectiveCall;
use strata::device::host::reference;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::Error;
use strata::plan::Collective;
use strata::topo::{Grid, Rank};

/// What one coding leaves out of an element at most: relative to it, and to the largest of its block.
fn bounds(code: FloatCode) -> (f64, f64) {
    match code {
        FloatCode::Bf16 => (2f64.powi(-8), 0.0),
        // Half a step of the subnormals, 2^-10, where the largest is more than 224.
        FloatCode::Mx8 => (2f64.powi(-4), 2f64.powi(-10) / 224.0),
        // Half a step, where the largest is more than 63.5.
        FloatCode::Int8 => (0.0, 1.0 / 127.0),
    }
}

/// What a type rounds off at most.
fn precision(dtype: DataType) -> f64 {
    match dtype {
        DataType::F16 => 2f64.powi(-11),
        DataType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// Numbers of very different sizes, of both signs, which nearly cancel between ranks now and then; whole stretches are zeros.
fn adversarial(count: usize, rank: usize, dtype: DataType) -> Vec<f64> {
    let mut shared = noise(count as u64);
    let mut own = noise((rank as u64 + 1) << 40 | count as u64);
    let value = |index: usize| {
        let (same, random) = (shared(), own());
        let exponent = (same % 25) as i32 - 14;
        let unit = 1.0 + (random >> 40) as f64 / (1u64 << 24) as f64;
        let sign = if (same >> 8 & 3 == 0 && rank % 2 == 1) || random & 7 == 0 { -1.0 } else { 1.0 };
        let is_zero = index / 40 % 7 == 3 || random >> 8 & 15 == 0;
        if is_zero {
            0.0
        } else {
            sign * unit * 2f64.powi(exponent)
        }
    };
    // As the type holds it.
    (0..count).map(value).map(|value| reference::decode(dtype, &reference::encode(dtype, value))).collect()
}

fn to_bytes(dtype: DataType, values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| reference::encode(dtype, *value)[..dtype.size()].to_vec()).collect()
}

fn to_values(dtype: DataType, bytes: &[u8]) -> Vec<f64> {
    let value = |element: &[u8]| {
        let mut bits = [0; 8];
        bits[..element.len()].copy_from_slice(element);
        reference::decode(dtype, &bits)
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

fn call(
    (collective, dtype, op): (Collective, DataType, Option<RedOp>),
    (send, recv): (&mut [u8], &mut [u8]),
    count: usize,
    nranks: usize,
    algorithm: &str,
) -> CollectiveCall {
    CollectiveCall {
        collective,
        input: region(send),
        output: region(recv),
        count,
        blocks: None,
        joined: None,
        dtype,
        reduction: op.map(|op| Reduction::new(op, dtype, nranks)),
        factor_at: None,
        residual: None,
        tag: 0,
        root: Rank(0),
        algorithm: Some(algorithm.to_string()),
        decision: None,
    }
}

/// What all ranks have, with the largest of each stretch of as many elements as share a scale.
struct Inputs {
    values: Vec<Vec<f64>>,
    peaks: Vec<Vec<f64>>,
}

impl Inputs {
    fn new(values: Vec<Vec<f64>>) -> Inputs {
        let largest = |part: &[f64]| part.iter().fold(0f64, |largest, value| largest.max(value.abs()));
        let peaks = values.iter().map(|values| values.chunks(BLOCK).map(largest).collect()).collect();
        Inputs { values, peaks }
    }

    /// What an element may differ by: from the sizes of what all ranks have there, and of the largest near it.
    fn allowed(&self, code: FloatCode, dtype: DataType, codings: i32, at: usize) -> f64 {
        let (relative, absolute) = bounds(code);
        let all: f64 = self.values.iter().map(|input| input[at].abs()).sum();
        let near = |peaks: &Vec<f64>| {
            let (from, to) = ((at / BLOCK).saturating_sub(1), (at / BLOCK + 2).min(peaks.len()));
            peaks[from..to].iter().fold(0f64, |largest, value| largest.max(*value))
        };
        let largest: f64 = self.peaks.iter().map(near).sum();
        let coded =
            ((1.0 + relative).powi(codings) - 1.0) * all + absolute * f64::from(codings) * (1.0 + absolute) * largest;
        coded + (self.values.len() as f64 + 2.0) * precision(dtype) * 2.0 * all + 1e-30
    }
}

fn same_on_all(member: &Member, bytes: &[u8], what: &str) {
    member.board.lock().unwrap()[member.rank] = bytes.to_vec();
    member.barrier.wait();
    {
        let board = member.board.lock().unwrap();
        assert!(board.iter().all(|other| *other == board[0]), "{what}: ranks differ");
    }
    member.barrier.wait();
}

fn check(member: &Member, code: FloatCode, collective: Collective, dtype: DataType, (count, in_place): (usize, bool)) {
    let (nranks, me) = (member.grid.nranks(), member.rank);
    let blocks = collective.input_blocks(nranks, Rank::from_index(me), Rank(0));
    let inputs = Inputs::new((0..nranks).map(|rank| adversarial(blocks * count, rank, dtype)).collect());
    let outputs = collective.output_blocks(nranks, Rank::from_index(me), Rank(0));
    let block = count * dtype.size();
    let mut send = to_bytes(dtype, &inputs.values[me]);
    let mut recv = vec![0x77; outputs * block];
    let op = collective.reduces().then_some(RedOp::Sum);
    let algorithm = if member.grid.nrails() > 1 && collective != Collective::AllToAll {
        format!("two_level(direct,coded_{})", code.name())
    } else {
        format!("coded_{}", code.name())
    };
    let what =
        format!("{algorithm} {} {} of {count} in_place {in_place} on {}", collective.name(), dtype.name(), member.grid);
    let mut coded = call((collective, dtype, op), (&mut send, &mut recv), count, nranks, &algorithm);
    if in_place {
        match collective {
            Collective::AllReduce => coded.output = coded.input,
            Collective::AllGather => {
                recv[me * block..][..block].copy_from_slice(&send);
                coded.input = coded.output.part(me * block, block);
            }
            _ => coded.output = coded.input.part(me * block, block),
        }
    }
    member.collective(coded).unwrap_or_else(|error| panic!("{what}: {error}"));
    let is_in_send = in_place && collective != Collective::AllGather;
    let from = if collective == Collective::AllReduce { 0 } else { me * block };
    let result = if is_in_send { send[from..][..outputs * block].to_vec() } else { recv };
    let values = to_values(dtype, &result);
    let differs = |at: usize, expected: f64, most: f64| {
        let got = values[at];
        assert!((got - expected).abs() <= most, "{what}: element {at} is {got}, not {expected} but for {most}");
    };
    match collective {
        Collective::AllReduce | Collective::ReduceScatter => {
            let (first, codings) = if collective == Collective::AllReduce { (0, 2) } else { (me * count, 1) };
            for at in 0..count {
                let sum = inputs.values.iter().map(|input| input[first + at]).sum();
                differs(at, sum, inputs.allowed(code, dtype, codings, first + at));
            }
        }
        _ => {
            for (rank, input) in inputs.values.iter().enumerate() {
                let first = if collective == Collective::AllGather { 0 } else { me * count };
                let own = Inputs::new(vec![input[first..][..count].to_vec()]);
                for (at, value) in own.values[0].iter().enumerate() {
                    differs(rank * count + at, *value, own.allowed(code, dtype, 1, at));
                }
            }
        }
    }
    if matches!(collective, Collective::AllReduce | Collective::AllGather) {
        same_on_all(member, &result, &what);
    }
}

const COLLECTIVES: [Collective; 4] =
    [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll];

#[test]
fn results_are_within_the_bound_of_their_code_and_the_same_on_all_ranks() {
    if toy().is_some() {
        return;
    }
    let grids = [vec![1, 1], vec![1; 3], vec![2, 2], vec![3, 1, 2], vec![1; 7]];
    for grid in grids.iter().map(|sizes| Grid::blocks(sizes)) {
        run(grid, |member| {
            for code in FloatCode::ALL {
                for collective in COLLECTIVES {
                    for dtype in DataType::HOST.into_iter().filter(|dtype| code.codes(*dtype)) {
                        for (turn, count) in [1, 31, 33, 259, 5003].into_iter().enumerate() {
                            let in_place = turn % 2 == 1 && collective != Collective::AllToAll;
                            check(member, code, collective, dtype, (count, in_place));
                        }
                    }
                    // Several segments, the last of which is shorter.
                    let long = if member.grid.nranks() < 5 { 150_001 } else { 40_001 };
                    check(member, code, collective, DataType::F32, (long, false));
                }
            }
        });
    }
}

#[test]
fn a_block_with_a_nan_or_an_infinity_is_nan_on_all_ranks_and_no_other_is() {
    if toy().is_some() {
        return;
    }
    run(Grid::blocks(&[1, 1, 1]), |member| {
        for (code, wrong) in
            [(FloatCode::Mx8, f32::NAN), (FloatCode::Mx8, f32::INFINITY), (FloatCode::Int8, f32::NEG_INFINITY)]
        {
            let count = 3 * 320;
            let mut values = vec![1f32; count];
            if member.rank == 1 {
                values[40] = wrong;
            }
            let mut send: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let mut recv = vec![0; send.len()];
            let name = format!("coded_{}", code.name());
            let of = (Collective::AllReduce, DataType::F32, Some(RedOp::Sum));
            member.collective(call(of, (&mut send, &mut recv), count, 3, &name)).unwrap();
            for (at, value) in to_values(DataType::F32, &recv).into_iter().enumerate() {
                assert!(if (32..64).contains(&at) { value.is_nan() } else { value == 3.0 }, "{code:?}: {at}: {value}");
            }
        }
    });
}

/// The mean of what a call gives again and again for the same numbers, as a share of the largest sum: how far it is from them.
fn drift(member: &Member, code: FloatCode, dtype: DataType, times: usize, with_residual: bool) -> f64 {
    let (nranks, count) = (member.grid.nranks(), 4099);
    let inputs: Vec<Vec<f64>> = (0..nranks).map(|rank| adversarial(count, rank, dtype)).collect();
    let mut kept = vec![0u8; 4 * count];
    let mut sums = vec![0f64; count];
    for _ in 0..times {
        let mut send = to_bytes(dtype, &inputs[member.rank]);
        let mut recv = vec![0; send.len()];
        let name = if member.grid.nrails() > 1 {
            format!("two_level(direct,coded_{})", code.name())
        } else {
            format!("coded_{}", code.name())
        };
        let of = (Collective::AllReduce, dtype, Some(RedOp::Avg));
        let mut coded = call(of, (&mut send, &mut recv), count, nranks, &name);
        coded.residual = with_residual.then(|| region(&mut kept));
        member.collective(coded).unwrap();
        same_on_all(member, &recv, "with a residual");
        sums.iter_mut().zip(to_values(dtype, &recv)).for_each(|(sum, value)| *sum += value);
    }
    let exact: Vec<f64> =
        (0..count).map(|at| inputs.iter().map(|input| input[at]).sum::<f64>() / nranks as f64).collect();
    let largest = exact.iter().fold(0f64, |largest, value| largest.max(value.abs()));
    let far = sums.iter().zip(&exact).map(|(sum, exact)| (sum / times as f64 - exact).abs());
    far.fold(0f64, f64::max) / largest
}

#[test]
fn what_a_code_leaves_out_comes_back_with_the_next_calls_where_a_residual_keeps_it() {
    if toy().is_some() {
        return;
    }
    for grid in [Grid::blocks(&[1, 1, 1]), Grid::blocks(&[2, 2]), Grid::blocks(&[2, 1, 3])] {
        run(grid, |member| {
            for code in FloatCode::ALL {
                let (kept, lost) =
                    (drift(member, code, DataType::F32, 60, true), drift(member, code, DataType::F32, 60, false));
                assert!(kept * 12.0 < lost, "{code:?} on {}: {kept:e} with a residual, {lost:e} without", member.grid);
            }
        });
    }
}

#[test]
fn what_cannot_be_coded_is_refused_in_words() {
    if toy().is_some() {
        return;
    }
    run(Grid::blocks(&[2, 2]), |member| {
        let refused = |dtype: DataType, collective, algorithm: &str| {
            let (mut send, mut recv) = (vec![0; 4 * 64 * 8], vec![0; 4 * 64 * 8]);
            let op = Collective::reduces(collective).then_some(RedOp::Sum);
            member.collective(call((collective, dtype, op), (&mut send, &mut recv), 64, 4, algorithm)).unwrap_err()
        };
        let integers = refused(DataType::I32, Collective::AllReduce, "two_level(direct,coded_mx8)");
        assert!(matches!(&integers, Error::InvalidArgument(text) if text.contains("int32")), "{integers}");
        let same = refused(DataType::BF16, Collective::AllGather, "two_level(direct,coded_bf16)");
        assert!(matches!(&same, Error::InvalidArgument(text) if text.contains("bfloat16")), "{same}");
        let inside = refused(DataType::F32, Collective::AllReduce, "two_level(coded_mx8,log)");
        assert!(inside.text().contains("between nodes"), "{inside}");
        let rooted = refused(DataType::F32, Collective::Broadcast, "two_level(direct,coded_mx8)");
        assert!(rooted.text().contains("broadcast"), "{rooted}");
        // The communicator is as good as before.
        check(member, FloatCode::Mx8, Collective::AllReduce, DataType::F32, (100, false));
    });
}

#[test]
fn ranks_that_ask_for_different_codes_are_told() {
    if toy().is_some() {
        return;
    }
    // Both codes of the first make as many bytes of it; a message without a code has others.
    for names in
        [["coded_mx8", "coded_int8"], ["coded_mx8", "coded_bf16"], ["direct", "coded_mx8"], ["ring", "coded_bf16"]]
    {
        run(Grid::blocks(&[1, 1]), move |member| {
            let (mut send, mut recv) = (vec![0; 4096], vec![0; 4096]);
            let of = (Collective::AllReduce, DataType::F32, Some(RedOp::Sum));
            let error = member.collective(call(of, (&mut send, &mut recv), 1024, 2, names[member.rank])).unwrap_err();
            for (rank, name) in names.into_iter().enumerate() {
                let in_code =
                    name.strip_prefix("coded_").map_or("without a code".to_string(), |code| format!("in {code}"));
                let told = format!("rank {rank} called all_reduce of 1024 float (sum) {in_code}");
                assert!(error.text().contains(&told), "{names:?}: {error}");
            }
        });
    }
}

/// A network of two layers, trained on numbers that a hidden one of the same kind makes; each rank has its own.
struct Training {
    weights: Vec<f32>,
    batch: Vec<([f32; INPUTS], f32)>,
}

const INPUTS: usize = 12;
const HIDDEN: usize = 16;
const WEIGHTS: usize = HIDDEN * (INPUTS + 2);

/// The output of a network, and what its hidden units are.
fn output(weights: &[f32], input: &[f32; INPUTS]) -> (f32, [f32; HIDDEN]) {
    let unit = |unit: usize| {
        let weights = &weights[unit * (INPUTS + 2)..];
        let sum: f32 = input.iter().zip(weights).map(|(value, weight)| value * weight).sum();
        (sum + weights[INPUTS]).tanh()
    };
    let hidden: [f32; HIDDEN] = std::array::from_fn(unit);
    (hidden.iter().enumerate().map(|(unit, value)| value * weights[unit * (INPUTS + 2) + INPUTS + 1]).sum(), hidden)
}

impl Training {
    fn new(rank: usize) -> Training {
        let number = |next: &mut dyn FnMut() -> u64| (next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        let mut all = noise(7);
        let hidden: Vec<f32> = (0..WEIGHTS).map(|_| 2.0 * number(&mut all)).collect();
        let weights = (0..WEIGHTS).map(|_| number(&mut all)).collect();
        let mut own = noise(100 + rank as u64);
        let sample = |_| {
            let input: [f32; INPUTS] = std::array::from_fn(|_| number(&mut own));
            (input, output(&hidden, &input).0 + 0.3 * number(&mut own))
        };
        Training { weights, batch: (0..64).map(sample).collect() }
    }

    /// The loss, and its gradient.
    fn gradient(&self) -> (f64, Vec<f32>) {
        let (mut loss, mut gradient) = (0f64, vec![0f32; WEIGHTS]);
        for (input, wanted) in &self.batch {
            let (got, hidden) = output(&self.weights, input);
            let error = got - wanted;
            loss += f64::from(error * error) / self.batch.len() as f64;
            let scale = 2.0 * error / self.batch.len() as f32;
            for (unit, value) in hidden.iter().enumerate() {
                let first = unit * (INPUTS + 2);
                let back = scale * self.weights[first + INPUTS + 1] * (1.0 - value * value);
                input.iter().enumerate().for_each(|(index, input)| gradient[first + index] += back * input);
                gradient[first + INPUTS] += back;
                gradient[first + INPUTS + 1] += scale * value;
            }
        }
        (loss, gradient)
    }

    /// The mean loss of all ranks after so many steps on averaged gradients.
    fn train(mut self, member: &Member, algorithm: &str, keeps: bool) -> f64 {
        let nranks = member.grid.nranks();
        let mut kept = vec![0u8; 4 * WEIGHTS];
        for _ in 0..1000 {
            let (_, gradient) = self.gradient();
            let mut send: Vec<u8> = gradient.iter().flat_map(|value| value.to_le_bytes()).collect();
            let mut recv = vec![0; send.len()];
            let of = (Collective::AllReduce, DataType::F32, Some(RedOp::Avg));
            let mut averaged = call(of, (&mut send, &mut recv), WEIGHTS, nranks, algorithm);
            averaged.residual = keeps.then(|| region(&mut kept));
            member.collective(averaged).unwrap();
            let mean = recv.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            self.weights.iter_mut().zip(mean).for_each(|(weight, slope)| *weight -= 0.05 * slope);
        }
        let (loss, _) = self.gradient();
        member.board.lock().unwrap()[member.rank] = loss.to_le_bytes().to_vec();
        member.barrier.wait();
        let all = member
            .board
            .lock()
            .unwrap()
            .iter()
            .map(|loss| f64::from_le_bytes(loss[..].try_into().unwrap()))
            .sum::<f64>();
        member.barrier.wait();
        all / nranks as f64
    }
}

#[test]
fn a_model_trained_for_a_thousand_steps_with_residuals_ends_with_the_loss_of_exact_gradients() {
    if is_on_device() {
        return;
    }
    run(Grid::blocks(&[1, 1, 1, 1]), |member| {
        let exact = Training::new(member.rank).train(member, "direct", false);
        for code in FloatCode::ALL {
            let name = format!("coded_{}", code.name());
            let coded = Training::new(member.rank).train(member, &name, true);
            println!("rank {}: loss {exact} exact, {coded} in {}", member.rank, code.name());
            assert!((coded - exact).abs() <= 0.01 * exact, "{code:?}: {coded}, and {exact} exact");
        }
    });
}

#[test]
fn a_c_program_names_codes_and_keeps_residuals() {
    run_with("codes.c", &["-lm"], &["entries", "3", "3"]);
    run_with("codes.c", &["-lm"], &["entries", "4", "2"]);
    run_with("codes.c", &["-lm"], &["one-residual", "3", "3"]);
}

#[test]
fn the_environment_codes_floats_and_leaves_everything_else_as_it_is() {
    run_with("codes.c", &["-lm"], &["environment", "4", "2"]);
}

#[test]
fn blocks_of_different_sizes_are_coded_as_equal_ones() {
    run_with("codes.c", &["-lm"], &["vectored", "3", "3"]);
    run_with("codes.c", &["-lm"], &["vectored", "5", "2"]);
}
