//! Algorithms written as traces: all compile, are proved in every form, and need no more steps and messages than the files
//! that msccl-tools makes of the same algorithms.
#![forbid(unsafe_code)]

mod all_pairs;
mod all_to_next;
mod hierarchical;
mod more;
mod ring;
mod two_step;

use std::path::Path;
use std::sync::Arc;
use strata::script::trace::{BadTrace, InstancePolicy, Trace};
use strata::script::{self, Script, ScriptForm, ScriptStepKind};
use strata::topo::Grid;

/// Steps but for `nop`s, all steps, messages, thread blocks.
fn counts(script: &Script) -> [usize; 4] {
    let steps = || script.ranks.iter().flat_map(|rank| &rank.blocks).flat_map(|block| &block.steps);
    let moving = steps().filter(|step| step.kind != ScriptStepKind::Nop).count();
    let sends = steps().filter(|step| step.kind.sends()).count();
    let blocks = script.ranks.iter().map(|rank| rank.blocks.len()).sum();
    [moving, steps().count(), sends, blocks]
}

/// The capacity that a script needs, proved in every form that calls may want.
fn proved(what: &str, script: &Script) -> usize {
    let grid = Arc::new(Grid::flat(script.nranks()));
    let root = script::root(script, &grid).unwrap_or_else(|refusal| panic!("{what}: {refusal}"));
    script::judge(script, &grid, root).unwrap_or_else(|refusal| panic!("{what}: {refusal}"));
    let forms = [(false, false), (false, true), (true, false), (true, true)];
    let forms = forms.into_iter().filter(|(_, prologue)| !prologue || script.reduces());
    let capacity = |(in_place, prologue)| {
        let form = ScriptForm { in_place, prologue, root };
        script::prove(script, &grid, form).unwrap_or_else(|refusal| panic!("{what}: {form:?}: {refusal}")).capacity
    };
    forms.map(capacity).max().unwrap_or(1)
}

fn file(name: &str) -> Script {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim-tests/scripts").join(name);
    let text = std::fs::read_to_string(&path).unwrap();
    let contract = std::fs::read_to_string(path.with_extension("toml")).ok();
    script::read(&text, contract.as_deref()).unwrap()
}

#[test]
fn compiled_traces_need_no_more_steps_and_messages_than_the_files_of_msccl_tools() {
    type Case = (&'static str, Result<Trace, BadTrace>);
    let cases: Vec<Case> = vec![
        ("a2a_2step_2n4g.xml", two_step::all_to_all(2, 4)),
        ("a2a_2step_2n8g.xml", two_step::all_to_all(2, 8)),
        ("a2a_3step_2n8g.xml", more::three_step(8)),
        ("a2a_allpairs_8.xml", two_step::all_pairs(8)),
        ("ag_allpairs_8.xml", more::all_gather_pairs(8)),
        ("ag_pcie_4.xml", more::all_gather_near_pairs()),
        ("ag_rd_8.xml", more::all_gather_doubling(8)),
        ("ag_rd_16.xml", more::all_gather_doubling(16)),
        ("ag_ring_8.xml", ring::all_gather(8)),
        ("alltonext_fwd_2n.xml", all_to_next::all_to_next(2, 8)),
        ("ar_1step_4.xml", more::all_reduce_one_round(4)),
        ("ar_allpairs_4_simple.xml", all_pairs::all_reduce(4, 4)),
        (
            "ar_allpairs_8_ll.xml",
            all_pairs::all_reduce(8, 8).map(|trace| trace.instances(2).policy(InstancePolicy::Blocked)),
        ),
        (
            "ar_allpairs_v2_8.xml",
            more::all_pairs_tree(8).map(|trace| trace.instances(2).policy(InstancePolicy::Blocked)),
        ),
        ("ar_hier_2n4g.xml", hierarchical::all_reduce(2, 4, false)),
        ("ar_hier_2n8g_auto.xml", hierarchical::all_reduce(2, 8, false)),
        ("ar_hier_2n8g_manual.xml", hierarchical::all_reduce(2, 8, true)),
        ("ar_hier_4n8g.xml", hierarchical::all_reduce(4, 8, false)),
        ("ar_multinode_allpairs.xml", more::two_nodes(8)),
        ("ar_ncv4.xml", more::near_halves().map(|trace| trace.instances(2).policy(InstancePolicy::Blocked))),
        ("ar_rdh_8.xml", more::all_reduce_halving(8)),
        ("ar_rdh_16.xml", more::all_reduce_halving(16)),
        ("ar_ring_4_1ch.xml", ring::all_reduce(4, 1)),
        ("ar_ring_8_4ch_ll128.xml", ring::all_reduce(8, 4).map(|trace| trace.instances(2))),
    ];
    println!("Steps without and with nops, messages, thread blocks.");
    println!("{:<26} {:>24} {:>24} capacity", "file", "of the file", "compiled");
    let mut worse = Vec::new();
    for (name, trace) in cases {
        let script = trace.and_then(|trace| trace.compile()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let capacity = proved(name, &script);
        let (theirs, ours) = (counts(&file(name)), counts(&script));
        println!("{name:<26} {:>24} {:>24} {capacity}", format!("{theirs:?}"), format!("{ours:?}"));
        if ours.iter().zip(theirs).take(3).any(|(&ours, theirs)| ours > theirs) {
            worse.push(name);
        }
    }
    assert_eq!(worse, [""; 0]);
}
