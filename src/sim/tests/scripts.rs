//! Scripts as others wrote them, in every form, under random times.
#![forbid(unsafe_code)]

use super::*;
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
            if (in_place && !script.has_in_place()) || (prologue && !script.reduces()) {
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
