//! Scripts as others wrote them, in every form, under random times.
#![forbid(unsafe_code)]

use super::*;
use crate::plan::contract::Contract;
use crate::script::trace::{InstancePolicy, Trace};
use crate::script::{judge, prove, read, root, Script, ScriptForm};

/// The files of `shim-tests/scripts` whose algorithms are right, and those that compute something else.
fn files() -> (Vec<(String, Script)>, Vec<String>) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/shim-tests/scripts");
    let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.extension().is_some_and(|extension| extension == "xml"));
    names.sort();
    let wrong = ["ar_pcie_hier_4", "pipe_ring_8", "pipe_allpairs_8"];
    let (mut right, mut refused) = (Vec::new(), Vec::new());
    for path in names {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        match read(&std::fs::read_to_string(&path).unwrap(), None) {
            Ok(script) if !wrong.contains(&&*name) => right.push((name, script)),
            _ => refused.push(name),
        }
    }
    (right, refused)
}

#[test]
fn scripts_of_others_are_right_in_every_form_under_every_seed() {
    let mut sim = Sim::new(0, SimOptions::default());
    let (right, _) = files();
    assert_eq!(right.len(), 23);
    for (name, script) in right {
        let grid = Arc::new(Grid::flat(script.nranks()));
        let root = root(&script, &grid).unwrap();
        judge(&script, &grid, root).unwrap();
        for (in_place, prologue) in [(false, false), (true, false), (false, true), (true, true)] {
            if prologue && !script.reduces() {
                continue;
            }
            let proof = prove(&script, &grid, ScriptForm { in_place, prologue, root })
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            let shape = proof.lowered.plans[0].shape.clone();
            let programs = compile(proof.lowered.plans).unwrap();
            for seed in seeds(6) {
                if let Err(text) = run_seed(&mut sim, &shape, &programs, seed) {
                    panic!("{name}, in place {in_place}, prologue {prologue}: {text}");
                }
            }
        }
    }
}

/// A trace that fetches what a contract promises, chunk by chunk, by way of scratch.
fn fetching(contract: Contract, ranks: u32, chunks: u32, in_place: bool) -> Trace {
    let trace = Trace::new("fetching", Collective::Custom, ranks, chunks).unwrap().in_place(in_place);
    let promised = contract.outputs().iter().flatten().zip(0..);
    let fetched: Vec<(Promise, u32)> = promised.map(|(&promise, at)| (promise, at)).collect();
    for &(promise, at) in &fetched {
        let (rank, chunk) = match promise {
            Promise::Anything => continue,
            Promise::Chunk { rank, chunk } => (rank, chunk),
            Promise::Reduction { chunk } => (0, chunk),
        };
        let mut held = trace.chunk(rank, "input", chunk, 1).unwrap().copy(at / chunks, "s", at % chunks).unwrap();
        for other in (1..ranks).filter(|_| matches!(promise, Promise::Reduction { .. })) {
            held = held.reduce(&trace.chunk(other, "input", chunk, 1).unwrap()).unwrap();
        }
    }
    for &(_, at) in fetched.iter().filter(|(promise, _)| *promise != Promise::Anything) {
        trace.chunk(at / chunks, "s", at % chunks, 1).unwrap().copy(at / chunks, "output", at % chunks).unwrap();
    }
    trace.contract(contract)
}

#[test]
fn chunks_that_change_places_arrive_in_every_form_whatever_the_count() {
    let contracts = [
        "[[output]]\nchunk_shift = 1\nwraps = true",
        "[[output]]\nchunk_shift = -2\nrank_shift = 1\nwraps = true",
        "[[output]]\nchunks = \"0-2\"\nchunk_shift = 3\nrank = 2\n[[output]]\nchunks = \"3-5\"\nchunk_shift = -3",
        "[[output]]\nranks = \"1-2\"\nchunks = \"1\"\nchunk = 4",
        "[[output]]\nchunk_shift = 3\nwraps = true\nreduced = true\n[[output]]\nranks = \"1\"\nchunks = \"5\"\nchunk = 0",
        "[[output]]\nranks = \"1-2\"\nrank_shift = -1",
    ];
    let mut sim = Sim::new(0, SimOptions::default());
    for (text, nranks) in contracts.into_iter().flat_map(|text| [(text, 3), (text, 4)]) {
        for (instances, policy) in
            [(1, InstancePolicy::Interleaved), (2, InstancePolicy::Interleaved), (2, InstancePolicy::Blocked)]
        {
            for in_place in [false, true] {
                let contract = Contract::parse(text, nranks, 6).unwrap();
                let trace = fetching(contract, nranks as u32, 6, in_place).instances(instances).policy(policy);
                let written = trace.compile().unwrap();
                let beside = written.contract.as_ref().unwrap().text();
                let script = read(&crate::script::write(&written), Some(&beside)).unwrap();
                assert_eq!((script.in_place, &script.contract), (in_place, &written.contract));
                let grid = Arc::new(Grid::flat(nranks));
                judge(&script, &grid, Rank(0)).unwrap_or_else(|refusal| panic!("{text}\n{refusal}"));
                for (in_place, prologue) in [(false, false), (true, false), (false, true), (true, true)] {
                    if prologue && !script.reduces() {
                        continue;
                    }
                    let proof = prove(&script, &grid, ScriptForm { in_place, prologue, root: Rank(0) }).unwrap();
                    let shape = proof.lowered.plans[0].shape.clone();
                    let programs = compile(proof.lowered.plans).unwrap();
                    for seed in seeds(6) {
                        run_seed(&mut sim, &shape, &programs, seed).unwrap_or_else(|error| panic!("{text}\n{error}"));
                    }
                }
            }
        }
    }
}
