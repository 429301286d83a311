//! The command's parsers, as [`strata::fuzz`] has the library's. The including crate has `nccl` and `perf` at its root.

use crate::perf::workload::file::{Step, Workload};
use crate::perf::workload::formula::{Formula, Names};
use crate::perf::workload::program::{Program, Setting};
use strata::fuzz::Parser;

/// Workload files, their formulas, and what is made of both.
pub const PARSERS: &[Parser] = &[
    Parser { name: "workload", run: workload, seeds: workload_seeds },
    Parser { name: "workload_program", run: workload_program, seeds: workload_seeds },
    Parser { name: "formula", run: formula, seeds: formula_seeds },
];

/// All formulas of the steps, those of repeated ones too.
fn formulas<'a>(steps: &'a [Step], found: &mut Vec<&'a Formula>) {
    for step in steps {
        match step {
            Step::Repeat(times, steps) => {
                found.push(times);
                formulas(steps, found);
            }
            Step::Call(call) => found.push(&call.count),
            Step::Flops(formula) | Step::Micros(formula) => found.push(formula),
            Step::WaitUntil(_, elements, _) => found.push(elements),
            Step::Wait(..) => {}
        }
    }
}

/// A file, and every formula in it, but not the loops: those have a bound that takes long to reach.
pub fn workload(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(workload) = Workload::parse(text) else { return };
    let mut names = Names::default();
    names.set("world", 64.0);
    workload.parameters.iter().for_each(|(name, parameter)| names.define(name, &parameter.formula));
    let mut found = Vec::new();
    workload.phases.iter().for_each(|phase| formulas(&phase.steps, &mut found));
    for formula in found {
        let _ = names.whole(formula);
    }
}

/// A file as a step of 64 ranks.
pub fn workload_program(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(workload) = Workload::parse(text) else { return };
    let setting = Setting { world: 64, flops: 1e12, scale: 1.0, compute: true, set: Vec::new(), sizes: None };
    if let Ok(program) = Program::new(&workload, &setting) {
        assert!(program.compute_us() >= 0.0);
        program.calls.iter().for_each(|call| assert!(call.group < program.groups.len()));
    }
}

fn workload_seeds() -> Vec<Vec<u8>> {
    [
        &include_bytes!("../../workloads/zero3.toml")[..],
        include_bytes!("../../workloads/axonn.toml"),
        include_bytes!("../../workloads/ted.toml"),
        include_bytes!("../../workloads/dlrm.toml"),
    ]
    .map(<[u8]>::to_vec)
    .to_vec()
}

/// A formula over two names, of which one needs the other.
pub fn formula(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let formula = |text: &str| Formula { text: text.to_string(), line: 7 };
    let mut names = Names::default();
    names.set("hidden", 4.0);
    names.set("experts", 16.0);
    names.define("layer", &formula("12 * hidden^2 + 13 * hidden"));
    names.define("itself", &formula("itself + 1"));
    if let Ok(value) = names.value(&formula(text)) {
        assert!((0.0..=9.1e15).contains(&value), "{value}");
    }
}

fn formula_seeds() -> Vec<Vec<u8>> {
    [
        "layer * 2 / (experts - 4) + ceil(hidden / 3)",
        "max(hidden, 3) + min(1, 2) - floor(sqrt(2)) * log2(8)",
        "4.5e3 * 2E-1 + 25 * 2^20",
        "((1 + itself) * -hidden)",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}
