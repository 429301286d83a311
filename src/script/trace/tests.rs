//! Traces by seed: what they compile to does what they say, whatever runs first. And traces that are wrong.
#![forbid(unsafe_code)]

use super::*;
use crate::plan::contract::Promise;
use crate::script::RankScript;
use crate::script::{self, Place, ScriptBuffer, ScriptStepKind};
use crate::topo::{Grid, Rank};
use crate::verify::Check;
use std::collections::{BTreeMap, VecDeque};

/// What a chunk holds: the ranks and chunks of input that went into it.
type Value = Vec<(u32, u32)>;

/// Numbers by seed.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % u64::from(limit)) as u32
    }

    fn one_in(&mut self, many: u32) -> bool {
        self.below(many) == 0
    }
}

/// The chunks of all ranks while a trace runs, one step after another.
#[derive(Default)]
struct Sequential {
    held: BTreeMap<(u32, TraceBuffer, u32), Value>,
}

impl Sequential {
    fn value(&self, trace: &Trace, rank: u32, buffer: &TraceBuffer, index: u32) -> Option<Value> {
        let cell = trace.cell(rank, buffer, index);
        let given = match (&cell.buffer, trace.collective) {
            (TraceBuffer::Input, _) => Some(vec![(rank, cell.index)]),
            (TraceBuffer::Output, Collective::AllGather) if trace.in_place => {
                let own = cell.index / trace.chunks == rank;
                own.then(|| vec![(rank, cell.index % trace.chunks)])
            }
            _ => None,
        };
        self.held.get(&(cell.rank, cell.buffer, cell.index)).cloned().or(given)
    }

    fn run(trace: &Trace) -> Sequential {
        let mut all = Sequential::default();
        for step in trace.steps() {
            for offset in 0..step.count {
                let at = |place: &TracePlace| (place.rank, place.buffer.clone(), place.index + offset);
                let ((rank, buffer, index), (to, into, at)) = (at(&step.src), at(&step.dst));
                let mut value = all.value(trace, rank, &buffer, index).expect("a source holds something");
                if step.op == TraceOp::Reduce {
                    value.extend(all.value(trace, to, &into, at).expect("a destination holds something"));
                    value.sort_unstable();
                }
                let cell = trace.cell(to, &into, at);
                all.held.insert((cell.rank, cell.buffer, cell.index), value);
            }
        }
        all
    }
}

const COLLECTIVES: [(Collective, bool); 8] = [
    (Collective::Custom, true),
    (Collective::Custom, false),
    (Collective::AllReduce, true),
    (Collective::AllReduce, false),
    (Collective::AllGather, true),
    (Collective::ReduceScatter, true),
    (Collective::AllToAll, false),
    (Collective::Broadcast, true),
];

/// A trace by seed. Reductions are of the same chunk, and of each rank's at most once.
fn random(seed: u64) -> Trace {
    let mut random = Seeded(seed);
    random.below(2);
    let (collective, in_place) = COLLECTIVES[random.below(8) as usize];
    let (ranks, chunks) = (1 + random.below(5), 1 + random.below(3));
    let mut trace = Trace::new("random", collective, ranks, chunks).unwrap().in_place(in_place);
    trace = trace.instances(1 + random.below(8).saturating_sub(5));
    if trace.blocks() == 1 && random.one_in(3) {
        trace = trace.policy(InstancePolicy::Blocked);
    }
    let (fragments, channels, labels) = (random.one_in(3), random.one_in(3), random.one_in(6));
    for _ in 0..random.below(60) {
        if fragments && random.one_in(4) {
            let parts = 1 + random.below(3);
            let _ = trace.parallelize(parts, |trace| {
                (0..3).for_each(|_| drop(step(trace, &mut random, channels, labels)));
                Ok(())
            });
        } else {
            let _ = step(&trace, &mut random, channels, labels);
        }
    }
    if collective == Collective::Custom && random.one_in(2) {
        let _ = full_reduction(&trace);
    }
    if collective == Collective::Custom {
        let contract = promised(&trace);
        trace = trace.contract(contract);
    }
    trace
}

/// Reduces chunk 0 of all ranks into rank 0's output, where it still lies in the inputs.
fn full_reduction(trace: &Trace) -> Result<(), BadTrace> {
    let state = Sequential::run(trace);
    let input = TraceBuffer::Input;
    if !(0..trace.nranks).all(|rank| state.value(trace, rank, &input, 0) == Some(vec![(rank, 0)])) {
        return Ok(());
    }
    let mut sum = trace.chunk(0, "input", 0, 1)?.copy(0, "output", 0)?;
    for rank in 1..trace.nranks {
        sum = sum.reduce(&trace.chunk(rank, "input", 0, 1)?)?;
    }
    Ok(())
}

/// Adds a step, where it can be.
fn step(trace: &Trace, random: &mut Seeded, channels: bool, labels: bool) -> Result<(), BadTrace> {
    let place = |random: &mut Seeded| {
        let buffer = TraceBuffer::from(["input", "output", "output", "s", "t"][random.below(5) as usize]);
        let chunks = trace.chunks_of(&buffer).unwrap_or(3);
        (random.below(trace.nranks), buffer, random.below(chunks))
    };
    let (from, to, count) = (place(random), place(random), 1 + random.below(6) / 5);
    let src = trace.chunk(from.0, from.1.clone(), from.2, count)?;
    let src = if channels && random.one_in(2) { src.channel(random.below(2) as u16) } else { src };
    let src = if labels { src.blocks(random.below(3), 3 + random.below(3)) } else { src };
    let state = Sequential::run(trace);
    let adds = |offset: u32| {
        let mine = state.value(trace, to.0, &to.1, to.2 + offset)?;
        let theirs = state.value(trace, from.0, &from.1, from.2 + offset)?;
        let chunk = mine[0].1;
        let is_new = |(rank, _): &(u32, u32)| mine.iter().all(|(known, _)| known != rank);
        let all = mine.iter().chain(&theirs).all(|(_, other)| *other == chunk);
        (all && theirs.iter().all(is_new)).then_some(())
    };
    if (0..count).all(|offset| adds(offset).is_some()) {
        let dst = trace.chunk(to.0, to.1, to.2, count)?.directed(src.directives());
        return dst.reduce(&src).map(|_| ());
    }
    src.copy(to.0, to.1, to.2).map(|_| ())
}

/// What the output of a trace holds in the end, as far as it is one rank's.
fn promised(trace: &Trace) -> Contract {
    let state = Sequential::run(trace);
    let promise = |rank: u32, chunk: u32| match state.value(trace, rank, &TraceBuffer::Output, chunk).as_deref() {
        Some(&[(rank, chunk)]) => Promise::Chunk { rank, chunk },
        // The same sum elsewhere may have been added up in another order, which is not allowed.
        Some(sum) if sum.len() == trace.nranks as usize && (rank, chunk) == (0, 0) => {
            Promise::Reduction { chunk: sum[0].1 }
        }
        _ => Promise::Anything,
    };
    let of_rank = |rank: u32| (0..trace.chunks).map(|chunk| promise(rank, chunk)).collect();
    Contract::new((0..trace.nranks).map(of_rank).collect())
}

/// A script while it runs on symbols, thread blocks in any order.
struct Machine<'a> {
    script: &'a Script,
    held: BTreeMap<(u32, Place), Value>,
    /// By rank and thread block, the next step, and whether it has received and still has to send.
    at: Vec<Vec<(usize, Option<Vec<Value>>)>>,
    messages: BTreeMap<(u32, u32, u16), VecDeque<Vec<Value>>>,
    capacity: usize,
}

impl Machine<'_> {
    fn values(&self, rank: u32, first: Place, count: u32) -> Vec<Value> {
        (0..count).map(|offset| self.held.get(&(rank, first.plus(offset))).cloned().unwrap_or_default()).collect()
    }

    fn store(&mut self, rank: u32, first: Place, values: &[Value]) {
        for (offset, value) in (0u32..).zip(values) {
            self.held.insert((rank, first.plus(offset)), value.clone());
        }
    }

    /// Carries out the next step of a thread block, or its second half, if it can be.
    fn advance(&mut self, rank: u32, block: usize) -> bool {
        let of_block = &self.script.ranks[rank as usize].blocks[block];
        let (at, half) = self.at[rank as usize][block].clone();
        let Some(step) = of_block.steps.get(at) else { return false };
        if step.dep.is_some_and(|(other, wanted)| self.at[rank as usize][other as usize].0 <= wanted as usize) {
            return false;
        }
        let goes = (rank, of_block.to.unwrap_or_default(), of_block.channel);
        let comes = (of_block.from.unwrap_or_default(), rank, of_block.channel);
        let mut moved = half.clone().unwrap_or_default();
        if half.is_none() {
            if step.kind.receives() {
                let Some(message) = self.messages.entry(comes).or_default().pop_front() else { return false };
                assert_eq!(message.len(), step.count as usize, "both ends of a message are as long");
                moved = message;
            }
            if step.kind.reads() {
                let read = self.values(rank, step.src, step.count);
                moved = if step.kind.receives() { reduced(&moved, &read) } else { read };
            }
            if step.kind == ScriptStepKind::Reduce {
                moved = reduced(&moved, &self.values(rank, step.dst, step.count));
            }
            if step.kind.writes() {
                self.store(rank, step.dst, &moved);
            }
        }
        if step.kind.sends() {
            let queue = self.messages.entry(goes).or_default();
            if queue.len() >= self.capacity {
                let waits = half.is_none() && step.kind.receives();
                self.at[rank as usize][block].1 = step.kind.receives().then_some(moved);
                return waits;
            }
            queue.push_back(moved);
        }
        self.at[rank as usize][block] = (at + 1, None);
        true
    }
}

fn reduced(one: &[Value], other: &[Value]) -> Vec<Value> {
    let both = |(one, other): (&Value, &Value)| {
        let mut both = [one.as_slice(), other.as_slice()].concat();
        both.sort_unstable();
        both
    };
    one.iter().zip(other).map(both).collect()
}

/// Where a part of a trace's chunk lies in the script's buffer of so many chunks of the trace.
fn part(trace: &Trace, factor: u32, length: u32, (chunk, part): (u32, u32)) -> u32 {
    let parts = factor / trace.instances;
    match trace.policy {
        InstancePolicy::Interleaved => chunk * factor + part,
        InstancePolicy::Blocked => (part / parts * length + chunk) * parts + part % parts,
    }
}

/// Runs a script in an order by seed and compares its outputs with the trace's.
fn runs_as_written(trace: &Trace, script: &Script, seed: u64) {
    let wanted = Sequential::run(trace);
    let factor = script.chunks / (trace.chunks * trace.blocks());
    let mut random = Seeded(seed);
    let blocks = |rank: &RankScript| vec![(0, None); rank.blocks.len()];
    let capacity = script::CAPACITY;
    let at = script.ranks.iter().map(blocks).collect();
    let mut machine = Machine { script, held: BTreeMap::new(), at, messages: BTreeMap::new(), capacity };
    let empty = Trace { written: RefCell::default(), ..trace.clone() };
    let all = |trace: &Trace| {
        let buffers = [(TraceBuffer::Input, ScriptBuffer::Input), (TraceBuffer::Output, ScriptBuffer::Output)];
        let of = |(name, buffer): (TraceBuffer, ScriptBuffer)| {
            let chunks = trace.chunks_of(&name).unwrap();
            (0..trace.nranks).flat_map(move |rank| {
                let name = name.clone();
                (0..chunks).map(move |chunk| (rank, name.clone(), buffer, chunk))
            })
        };
        buffers.into_iter().flat_map(of).collect::<Vec<_>>()
    };
    let given = Sequential::run(&empty);
    let refined = |value: &Value, index: u32| -> Value {
        let length = trace.chunks_of(&TraceBuffer::Input).unwrap();
        value.iter().map(|&(rank, chunk)| (rank, part(trace, factor, length, (chunk, index)))).collect()
    };
    let place = |name: &TraceBuffer, rank: u32, chunk: u32, index: u32| {
        let cell = trace.cell(rank, name, chunk);
        let buffer = if cell.buffer == TraceBuffer::Input { ScriptBuffer::Input } else { ScriptBuffer::Output };
        let length = trace.chunks_of(&cell.buffer).unwrap();
        Place { buffer, chunk: part(trace, factor, length, (cell.index, index)) }
    };
    for (rank, name, _, chunk) in all(trace) {
        for index in 0..factor {
            if let Some(value) = given.value(trace, rank, &name, chunk) {
                machine.held.insert((rank, place(&name, rank, chunk, index)), refined(&value, index));
            }
        }
    }
    let mut lanes: Vec<(u32, usize)> = (0u32..)
        .zip(&script.ranks)
        .flat_map(|(rank, of_rank)| (0..of_rank.blocks.len()).map(move |block| (rank, block)))
        .collect();
    loop {
        for at in (1..lanes.len()).rev() {
            lanes.swap(at, random.below(at as u32 + 1) as usize);
        }
        let mut moved = false;
        for &(rank, block) in &lanes {
            moved |= !random.one_in(3) && machine.advance(rank, block);
        }
        if !moved && !lanes.iter().any(|&(rank, block)| machine.advance(rank, block)) {
            break;
        }
    }
    let ended = |(rank, block): &(u32, usize)| {
        machine.at[*rank as usize][*block].0 == script.ranks[*rank as usize].blocks[*block].steps.len()
    };
    assert!(lanes.iter().all(ended), "the script stops with capacity {capacity}");
    for (rank, name, _, chunk) in all(trace).into_iter().filter(|(_, name, ..)| *name == TraceBuffer::Output) {
        let Some(value) = wanted.value(trace, rank, &name, chunk) else { continue };
        for index in 0..factor {
            let place = place(&name, rank, chunk, index);
            let found = machine.held.get(&(rank, place)).cloned().unwrap_or_default();
            assert_eq!(found, refined(&value, index), "output chunk {chunk}, part {index} of rank {rank}");
        }
    }
}

/// Compiles a trace by seed, proves it and runs it.
fn check(seed: u64) -> Result<(usize, bool, bool), BadTrace> {
    let trace = random(seed);
    let script = trace.compile()?;
    let text = script::write(&script);
    let contract = script.contract.as_ref().map(|contract| contract.text());
    let again = script::read(&text, contract.as_deref()).unwrap_or_else(|error| panic!("seed {seed}: {error}\n{text}"));
    assert_eq!(script::write(&again), text, "seed {seed}");
    assert_eq!(again.contract, script.contract, "seed {seed}");
    let grid = Arc::new(Grid::flat(script.nranks()));
    let verdict = script::judge(&script, &grid, Rank(0));
    let mut runs = verdict.is_ok();
    if let Err(refusal) = &verdict {
        // A trace by seed is no collective with a name.
        let is_expected = trace.collective != Collective::Custom
            && !matches!(refusal.check(), Check::Race | Check::Progress | Check::ExactlyOnce);
        assert!(is_expected, "seed {seed}: {refusal}\n{text}");
    } else {
        for (in_place, prologue) in [(false, false), (true, false), (false, true), (true, true)] {
            if prologue && !script.reduces() {
                continue;
            }
            let form = script::ScriptForm { in_place, prologue, root: Rank(0) };
            runs &= script::prove(&script, &grid, form)
                .inspect_err(|refusal| println!("seed {seed}, {form:?}: {refusal}"))
                .is_ok();
        }
    }
    for order in 0..4 {
        runs_as_written(&trace, &script, seed.wrapping_add(order * 977));
    }
    Ok((script.nsteps(), verdict.is_ok(), runs))
}

#[test]
fn traces_by_seed_do_as_scripts_what_they_say() {
    let (mut compiled, mut proved, mut running, mut refused, mut steps) = (0, 0, 0, 0, 0);
    for seed in 0..if cfg!(miri) { 4 } else { 6000 } {
        match check(seed) {
            Ok((nsteps, is_proved, runs)) => {
                compiled += 1;
                proved += usize::from(is_proved);
                running += usize::from(runs);
                steps += nsteps;
            }
            // Thread blocks that a trace names may contradict each other.
            Err(bad) => {
                assert!(bad.text.contains("thread block"), "seed {seed}: {bad}");
                refused += 1;
            }
        }
    }
    println!(
        "{compiled} compiled with {steps} steps, {proved} of them proved, {running} in all forms, {refused} refused"
    );
    assert_eq!(proved, running, "what does as it says has plans for calls of every form");
    let enough = compiled > 10 * refused && 5 * proved > compiled && steps > 10 * compiled;
    assert!(cfg!(miri) || enough, "{compiled} {proved} {refused} {steps}");
}

/// Rank 0 keeps its chunk 0 in thread block 1, which then copies and sends chunk 1. When rank 1 has answered to thread block 2, that one
/// sends what was kept and the answer as one message: so it comes after the answer in any order.
fn kept_while_another_chunk_goes_round(trace: &Trace) -> Result<(), BadTrace> {
    trace.chunk(0, "input", 0, 1)?.blocks(1, 1).copy(0, "kept", 0)?;
    let own = trace.chunk(0, "input", 1, 1)?.blocks(1, 1).copy(0, "own", 0)?;
    let sum = trace.chunk(1, "input", 1, 1)?.blocks(1, 3).channel(0).reduce(&own)?;
    sum.blocks(6, 2).channel(1).copy(0, "kept", 1)?;
    trace.chunk(0, "kept", 0, 2)?.blocks(2, 4).channel(1).copy(1, "got", 0)?;
    let sum = trace.chunk(1, "input", 0, 1)?.blocks(4, 4).reduce(&trace.chunk(1, "got", 0, 1)?)?;
    sum.blocks(7, 5).channel(2).copy(0, "input", 0)?;
    trace.chunk(0, "kept", 1, 1)?.blocks(2, 2).copy(0, "input", 1).map(|_| ())
}

#[test]
fn a_message_is_no_order_for_chunks_that_have_bytes_when_it_has_none() {
    let trace = Trace::new("kept", Collective::AllReduce, 2, 2).unwrap().in_place(true);
    kept_while_another_chunk_goes_round(&trace).unwrap();
    let script = trace.compile().unwrap();
    let grid = Arc::new(Grid::flat(2));
    // One element is all in chunk 0, and then nothing goes round: the sender of what was kept waits for it.
    assert_eq!(script::judge(&script, &grid, Rank(0)), Ok(()), "{}", script::write(&script));
    let blocks = &script.ranks[0].blocks;
    let copies = |block: &script::ThreadBlock| block.steps[0].kind == ScriptStepKind::Copy;
    let copier = blocks.iter().position(copies).expect("what is kept is kept first") as u32;
    let mut waits = blocks.iter().flat_map(|block| &block.steps).filter_map(|step| step.dep);
    assert!(waits.any(|(block, _)| block == copier), "{}", script::write(&script));
}

/// Two ranks exchange halves, add, and give each other the sums, with every field that there is.
const EXCHANGE: &str = r#"{"strata_trace": 1, "name": "exchange", "collective": "all_reduce", "ranks": 2, "chunks": 2,
 "in_place": true, "instances": 2, "protocol": "LL", "policy": "blocked", "contract": null, "scratch": {"theirs": 2},
 "steps": [
  {"op": "copy", "src": [1, "input", 0], "dst": [0, "theirs", 0], "count": 1, "send_tb": 4, "recv_tb": 5, "at": "ring.py:7"},
  {"op": "reduce", "src": [0, "theirs", 0], "dst": [0, "input", 0], "send_tb": -1},
  {"op": "reduce", "src": [0, "input", 1], "dst": [1, "input", 1], "parallel": [2, 0]},
  {"op": "copy", "src": [0, "input", 0], "dst": [1, "output", 0], "channel": 1},
  {"op": "copy", "src": [1, "input", 1], "dst": [0, "output", 1], "channel": -1}]}"#;

/// What is said of a text: steps of the script, or what is wrong.
fn verdict(text: &str) -> Result<usize, String> {
    let trace = Trace::from_json(text).map_err(|bad| bad.to_string())?;
    let script = trace.compile().map_err(|bad| bad.to_string())?;
    let grid = Arc::new(Grid::flat(script.nranks()));
    script::judge(&script, &grid, Rank(0)).map_err(|refusal| refusal.to_string())?;
    Ok(script.nsteps())
}

#[test]
fn a_trace_that_is_wrong_is_refused_with_its_step() {
    assert_eq!(verdict(EXCHANGE), Ok(24));
    let cases = [
        ("\"ranks\": 2", "\"ranks\": 0", "ranks: 0 is not in 1 to 1024"),
        ("\"chunks\": 2", "\"chunks\": 1048577", "chunks: 1048577 is not in 1 to 1048576"),
        ("\"strata_trace\": 1", "\"strata_trace\": 2", "strata_trace: version 2 of traces, where 1 is known"),
        ("all_reduce", "all_sum", "collective: \"all_sum\" is none"),
        ("all_reduce", "custom", "a custom collective promises nothing without a contract"),
        ("\"contract\": null", "\"contract\": []", "all_reduce has no contract but its own"),
        ("\"LL\"", "\"LL64\"", "protocol: \"LL64\" is none of Simple, LL and LL128"),
        ("\"instances\": 2", "\"instances\": 65", "instances: 65 is not in 1 to 64"),
        ("\"scratch\"", "\"scratches\"", "no trace: unknown field `scratches`"),
        ("{\"theirs\": 2}", "{\"input\": 2}", "scratch: \"input\" of 2 chunks"),
        ("\"theirs\", 0]", "\"theirs\", 2]", "step 0 (ring.py:7): theirs chunk 2 of rank 0, which has 2"),
        ("[1, \"input\", 0]", "[2, \"input\", 0]", "step 0 (ring.py:7): there is no rank 2 among 2"),
        ("[1, \"input\", 0]", "[1, \"mine\", 0]", "step 0 (ring.py:7): mine chunk 0 of rank 1 holds nothing yet"),
        ("[1, \"input\", 0]", "[0, \"theirs\", 0]", "step 0 (ring.py:7): theirs chunk 0 of rank 0 and theirs chunk 0"),
        ("\"count\": 1", "\"count\": 0", "step 0 (ring.py:7): a count of 0 moves nothing"),
        ("[2, 0]", "[0, 0]", "step 2: a fragment has 1 to 64 parts"),
        ("[2, 0]}", "[2, 0]}, {\"op\": \"copy\", \"src\": [0, \"input\", 0], \"dst\": [0, \"x\", 0], \"parallel\": [3, 0]}", "step 3: fragment 0 has 2 parts, not 3"),
        ("\"channel\": 1", "\"channel\": 4096", "step 3: channel 4096 is not in -1 to 4095"),
        ("\"send_tb\": -1", "\"send_tb\": 1024", "step 1: send_tb 1024 is not in -1 to 1023"),
        ("\"channel\": 1", "\"channel\": 1, \"send_tb\": 4}, {\"op\": \"reduce\", \"src\": [0, \"input\", 1], \"dst\": [1, \"output\", 0], \"channel\": 2, \"send_tb\": 4", "step 4: thread block 4 of rank 0 would have channels 1 and 2"),
        ("\"op\": \"reduce\", \"src\": [0, \"theirs\"", "\"op\": \"copy\", \"src\": [0, \"theirs\"", "line "),
    ];
    for (what, by, wanted) in cases {
        assert!(EXCHANGE.contains(what), "{what}");
        let said = verdict(&EXCHANGE.replacen(what, by, 1)).expect_err(by);
        assert!(said.starts_with(wanted), "{what} -> {by}\n  {said}\n  {wanted}");
    }
}

#[test]
fn chunks_that_have_been_overwritten_are_refused_with_both_steps() {
    let trace = Trace::new("stale", Collective::AllReduce, 2, 2).unwrap().in_place(true);
    let old = trace.chunk(1, "output", 0, 2).unwrap();
    let new = trace.chunk(0, "input", 1, 1).unwrap().copy(1, "input", 1).unwrap();
    let said = old.copy(0, "x", 0).unwrap_err();
    let has = |text: &str| assert!(said.text.contains(text), "{text}: {said}");
    [
        "copy uses output chunk 1 of rank 1 as taken in",
        "but step 0 (",
        "copies input chunk 1 of rank 0 to input chunk 1 of rank 1",
    ]
    .into_iter()
    .for_each(has);
    assert_eq!((said.step, trace.nsteps()), (Some(0), 1));
    assert!(old.part(0, 1).unwrap().copy(0, "x", 0).is_ok() && old.part(1, 1).unwrap().copy(0, "x", 1).is_err());
    let mine = trace.chunk(0, "input", 0, 1).unwrap();
    assert!(mine.reduce(&new).is_ok());
    assert!(mine.reduce(&new).unwrap_err().text.contains("reduce uses input chunk 0 of rank 0 as taken in"));
    assert!(trace.chunk(0, "input", 0, 2).unwrap().reduce(&new).unwrap_err().text.contains("reduces 1 chunks into 2"));
    assert!(trace.parallelize(2, |trace| trace.parallelize(2, |_| Ok(()))).is_err());
}

#[test]
fn damaged_json_gets_a_verdict() {
    for end in 0..EXCHANGE.len() {
        assert!(verdict(&EXCHANGE[..end]).is_err());
    }
    let mut random = Seeded(7);
    let mut accepted = 0;
    for _ in 0..if cfg!(miri) { 4 } else { 4000 } {
        let mut text = EXCHANGE.as_bytes().to_vec();
        for _ in 0..1 + random.below(2) {
            let at = random.below(text.len() as u32) as usize;
            let by = b"0123456789-,:[]{}\"aeinopst "[random.below(27) as usize];
            match random.below(3) {
                0 => text[at] = by,
                1 => text.insert(at, by),
                _ => drop(text.remove(at)),
            }
        }
        // Numbers are the likeliest to be taken.
        let digits: Vec<usize> = (0..text.len()).filter(|&at| text[at].is_ascii_digit()).collect();
        text[digits[random.below(digits.len() as u32) as usize]] = b'0' + random.below(10) as u8;
        accepted += usize::from(verdict(&String::from_utf8(text).unwrap()).is_ok());
    }
    assert!(cfg!(miri) || accepted > 20, "{accepted}");
}
