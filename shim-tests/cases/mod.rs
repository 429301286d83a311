//! Calls of collectives on known data, checked against a reference in higher precision, and scripts to make them by.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use strata::communicator::CollectiveCall;
use strata::device::host::reference;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error;
use strata::memory::Region;
use strata::plan::Collective;
use strata::script::store::{self, Steps};
use strata::script::LoadedScript;
use strata::sim::Random;
use strata::topo::Rank;

/// A deterministic stream of numbers.
pub fn noise(seed: u64) -> impl FnMut() -> u64 {
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
pub fn elements(dtype: DataType, op: Option<RedOp>, count: usize, rank: usize) -> Vec<u8> {
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

/// The same, made once for the ranks of this process that need them: each looks at all ranks' inputs.
pub fn kept_elements(dtype: DataType, op: Option<RedOp>, count: usize, rank: usize) -> Arc<Vec<u8>> {
    type Key = (DataType, Option<RedOp>, usize, usize);
    static KEPT: Mutex<Vec<(Key, Arc<Vec<u8>>)>> = Mutex::new(Vec::new());
    const MOST: usize = 32;
    let key = (dtype, op, count, rank);
    let kept = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, made)) = kept().iter().rev().find(|(of, _)| *of == key) {
        return made.clone();
    }
    let made = Arc::new(elements(dtype, op, count, rank));
    let mut all = kept();
    if all.len() == MOST {
        all.remove(0);
    }
    all.push((key, made.clone()));
    made
}

/// One call of a collective.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub collective: Collective,
    pub dtype: DataType,
    pub op: Option<RedOp>,
    pub count: usize,
    pub root: usize,
    pub in_place: bool,
    pub misalign: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { collective, dtype, op, count, root, in_place, misalign } = self;
        let (name, dtype) = (collective.name(), dtype.name());
        write!(f, "{name} {dtype} {op:?} count {count} root {root} in_place {in_place} misaligned {misalign}")
    }
}

/// The bytes of a buffer as a region.
pub fn host_region(bytes: &mut [u8]) -> Region {
    // SAFETY: the bytes must stay, and nobody touch them, until the call that uses the region has ended; because each
    // test keeps its buffers so long.
    unsafe { Region::new(bytes.as_mut_ptr(), bytes.len()) }
}

impl Case {
    /// Makes the call on one of so many ranks, by this algorithm or whichever the library takes, and checks what came out, and
    /// what must not have changed. The output is returned.
    pub fn run(
        &self,
        (nranks, me): (usize, usize),
        algorithm: Option<&str>,
        launch: impl FnOnce(CollectiveCall) -> error::Result<()>,
    ) -> Vec<u8> {
        let Case { collective, dtype, op, count, root, in_place, misalign } = *self;
        let block = count * dtype.size();
        let (rank, root_rank) = (Rank::from_index(me), Rank::from_index(root));
        let inputs: Vec<Arc<Vec<u8>>> = (0..nranks)
            .map(|rank| {
                let blocks = collective.input_blocks(nranks, Rank::from_index(rank), root_rank);
                kept_elements(dtype, op, blocks * count, rank)
            })
            .collect();
        let out_bytes = collective.output_blocks(nranks, rank, root_rank) * block;
        let mut send = vec![0xa5; misalign];
        send.extend_from_slice(&inputs[me]);
        let mut recv = vec![UNTOUCHED; misalign + out_bytes + 16];
        let mut input = host_region(&mut send).part(misalign, inputs[me].len());
        let mut output = host_region(&mut recv).part(misalign, out_bytes);
        if in_place {
            (input, output) = place(collective, me, me == root, block, &inputs[me], input, output);
        }
        let call = CollectiveCall {
            collective,
            input: input.as_device(),
            output: output.as_device(),
            count,
            blocks: None,
            joined: None,
            tag: 0,
            dtype,
            reduction: op.map(|op| Reduction::new(op, dtype, nranks)),
            factor_at: None,
            residual: None,
            root: root_rank,
            algorithm: algorithm.map(str::to_string),
            decision: None,
        };
        let what = format!("{algorithm:?} {self} rank {me} of {nranks}");
        launch(call).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut result = vec![0; out_bytes];
        output.read(&mut result);
        verify(collective, dtype, op, block, me, root, &inputs, &result)
            .unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
        if !in_place {
            assert_eq!(send[misalign..], inputs[me][..], "{what}: the input was written");
            let behind = &recv[misalign + out_bytes..];
            assert!(behind.iter().all(|&byte| byte == UNTOUCHED), "{what}: wrote beyond the output");
        }
        result
    }
}

/// What outputs hold before a call.
const UNTOUCHED: u8 = 0x5a;

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

/// What is wrong with the output of a rank, if anything. Of custom collectives only AllToNext is known.
#[allow(clippy::too_many_arguments)]
pub fn verify(
    collective: Collective,
    dtype: DataType,
    op: Option<RedOp>,
    block: usize,
    me: usize,
    root: usize,
    inputs: &[Arc<Vec<u8>>],
    result: &[u8],
) -> Result<(), String> {
    let part = |rank: usize, index: usize| &inputs[rank][index * block..(index + 1) * block];
    if let (true, Some(op)) = (collective.reduces(), op) {
        let index = if collective == Collective::ReduceScatter { me } else { 0 };
        let operands: Vec<&[u8]> = (0..inputs.len()).map(|rank| part(rank, index)).collect();
        return if result.is_empty() { Ok(()) } else { reference::check(op, dtype, &operands, result) };
    }
    let ranks = 0..inputs.len();
    let untouched = vec![UNTOUCHED; block];
    let expected: Vec<&[u8]> = match collective {
        Collective::Custom => vec![me.checked_sub(1).map_or(&untouched[..], |before| part(before, 0))],
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

/// The files of others that do what they say.
pub fn scripts() -> Vec<&'static LoadedScript> {
    scripts_for(None)
}

/// Those for so many ranks, where that is given: the others are not proved.
pub fn scripts_for(nranks: Option<usize>) -> Vec<&'static LoadedScript> {
    let folder = crate::built::root().join("shim-tests/scripts");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "xml"));
    files.sort();
    let load = |file: &std::path::PathBuf| {
        let (text, contract) = (std::fs::read_to_string(file).ok()?, store::contract_beside(file).expect("a contract"));
        let of = strata::script::read(&text, contract.as_deref()).ok()?.nranks();
        nranks.is_none_or(|nranks| nranks == of).then_some(())?;
        store::load(file.file_stem()?.to_str()?, &text, contract.as_deref(), Steps::Merged).ok()
    };
    files.iter().filter_map(load).collect()
}

/// Counts that divide into nothing, and some that take several segments of [`SEGMENT_BYTES`].
const COUNTS: [usize; 10] = [1, 2, 3, 7, 37, 203, 1001, 4099, 5003, 9241];
/// Short segments, so that messages of some thousand elements are several.
pub const SEGMENT_BYTES: &str = "4096";

/// Calls of a script: their types, operations, counts and places are a seed's choice. The first two are of several segments,
/// one in place.
pub fn calls_by_seed(script: &LoadedScript, seed: u64, calls: usize, only_nccl: bool) -> Vec<Case> {
    let of_name = script.name.bytes().fold(seed, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into()));
    let mut random = Random::new(of_name);
    let collective = script.script.collective;
    let dtypes: Vec<DataType> = DataType::HOST.into_iter().filter(|dtype| dtype.is_nccl() || !only_nccl).collect();
    let call = |number: usize| {
        let dtype = random.pick(&dtypes);
        let ops: Vec<RedOp> = RedOp::of(dtype).filter(|op| op.is_nccl() || !only_nccl).collect();
        let op = random.pick(&ops);
        let count = if number < 2 { COUNTS[COUNTS.len() - 1 - number] } else { random.pick(&COUNTS) };
        let in_place = if number < 2 { number == 1 } else { random.one_in(2) };
        Case {
            collective,
            dtype,
            op: script.script.reduces().then_some(op),
            count,
            root: script.root.index(),
            in_place,
            misalign: random.below(5) as usize,
        }
    };
    (0..calls).map(call).collect()
}
