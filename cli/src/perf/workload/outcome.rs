//! What is said about a step: a table by phase and kind of call, and the same as JSON.
#![forbid(unsafe_code)]

use super::file::{Parameter, Workload};
use super::program::{Op, Program, Setting};
use super::timeline::Times;
use serde_json::{json, Value};
use std::fmt::Write as _;
use std::path::Path;
use strata::error::{counted, Error, Result};
use strata::sim::skew::Skew;

/// A step that was measured, or simulated on several routes.
pub struct Outcome<'a> {
    /// The workload's name.
    pub name: &'a str,
    /// The file.
    pub workload: &'a Workload,
    /// What was done.
    pub program: &'a Program,
    /// For which world.
    pub setting: &'a Setting,
    /// The library, or the machine.
    pub how: String,
    /// The times, by what carried the calls out; the first is what others are compared with.
    pub routes: Vec<(String, Times)>,
    /// Microseconds of the single iterations, of what was measured.
    pub steps: Vec<f64>,
    /// Wrong elements; `None`: not checked.
    pub wrong: Option<usize>,
}

impl Outcome<'_> {
    /// Prints the table, or writes JSON to a file too; `-` is JSON on standard output, without the table.
    pub fn tell(&self, json: Option<&Path>) -> Result<()> {
        let to_output = json.is_some_and(|path| path.to_str() == Some("-"));
        if !to_output {
            out!("{}", self.text());
        }
        let Some(path) = json else { return Ok(()) };
        let text = format!("{:#}\n", self.json());
        if to_output {
            out!("{text}");
            return Ok(());
        }
        std::fs::write(path, text).map_err(|error| Error::System(format!("cannot write {}: {error}", path.display())))
    }

    fn compute_of(&self, phase: usize) -> f64 {
        let of = |op: &Op| {
            if let Op::Compute(at, us) = op {
                if *at == phase {
                    *us
                } else {
                    0.0
                }
            } else {
                0.0
            }
        };
        self.program.ops.iter().map(of).sum()
    }

    /// The table.
    fn text(&self) -> String {
        let (program, setting) = (self.program, self.setting);
        let mut text = format!(
            "# strata perf --workload {}: {}\n# {}\n# {}: {} (innermost first)\n",
            self.name,
            self.workload.title,
            self.how,
            counted(setting.world, "rank"),
            program.layout.text()
        );
        let computing = match setting.compute {
            true => format!("computing at {} TFLOP/s", setting.flops / 1e12),
            false => "without computing".to_string(),
        };
        let _ = writeln!(text, "# {computing}; sizes and computing times {}; times in us\n#", scale(setting.scale));
        let width = program.rows.iter().map(|row| row.label().len()).max().unwrap_or(0).max(14);
        let _ = write!(text, "# {:10} {:width$} {:12} {:>6} {:>12}", "phase", "call", "group", "calls", "bytes");
        let single = self.routes.len() == 1;
        for (name, _) in &self.routes {
            let named = |what: &str| if single { what.to_string() } else { format!("{name} {what}") };
            let _ = write!(text, " {:>16} {:>16}", named("time"), named("exposed"));
        }
        text.push('\n');
        for (phase, name) in program.phases.iter().enumerate() {
            let compute = self.compute_of(phase);
            if compute > 0.0 {
                let _ = write!(text, "  {name:10} {:width$} {:12} {:>6} {:>12}", "computing", "", "", "");
                for _ in &self.routes {
                    let _ = write!(text, " {compute:16.1} {:16}", "");
                }
                text.truncate(text.trim_end().len());
                text.push('\n');
            }
            for (index, row) in program.rows.iter().enumerate().filter(|(_, row)| row.phase == phase) {
                let group = &program.groups[row.group].name;
                let _ = write!(text, "  {name:10} {:width$} {group:12} {:6} {:12}", row.label(), row.calls, row.bytes);
                for (_, times) in &self.routes {
                    let _ = write!(text, " {:16.1} {:16.1}", times.busy[index], times.exposed[index]);
                }
                text.push('\n');
            }
        }
        text + &self.closing()
    }

    /// The lines below the table.
    fn closing(&self) -> String {
        let mut text =
            format!("# bytes    : {} in {}\n", self.program.bytes(), counted(self.program.calls.len(), "call"));
        let first = self.routes[0].1.step;
        for (name, times) in &self.routes {
            let _ = write!(
                text,
                "# step     : {name} {} ms, of which exposed {} ms",
                millis(times.step),
                millis(times.all_exposed())
            );
            match self.steps.is_empty() {
                true => {
                    let _ = writeln!(text, ", {:.2} times as fast", first / times.step);
                }
                false => {
                    let least = self.steps.iter().copied().fold(f64::INFINITY, f64::min);
                    let most = self.steps.iter().copied().fold(0.0, f64::max);
                    let (least, most, steps) = (millis(least), millis(most), self.steps.len());
                    let _ = writeln!(text, " (median of {steps}; {least} to {most})");
                }
            }
        }
        if let Some(wrong) = self.wrong {
            let _ = writeln!(text, "# wrong    : {wrong} {}", if wrong == 0 { "OK" } else { "FAILED" });
        }
        text
    }

    /// All figures.
    fn json(&self) -> Value {
        let (program, setting) = (self.program, self.setting);
        let rows = |times: &Times| -> Vec<Value> {
            let row = |(index, row): (usize, &super::program::Row)| {
                json!({
                    "phase": program.phases[row.phase], "call": row.kind.name(), "skew": row.skew.map(Skew::name),
                    "group": program.groups[row.group].name, "group_ranks": program.groups[row.group].size,
                    "calls": row.calls, "bytes": row.bytes,
                    "time_us": times.busy[index], "exposed_us": times.exposed[index],
                })
            };
            program.rows.iter().enumerate().map(row).collect()
        };
        let route = |(name, times): &(String, Times)| {
            json!({
                "route": name, "step_us": times.step, "exposed_us": times.all_exposed(), "rows": rows(times),
            })
        };
        let parameter = |(name, parameter): (&String, &Parameter)| {
            let Parameter { formula, source, assumption } = parameter;
            (name.clone(), json!({ "value": formula.text, "source": source, "assumption": assumption }))
        };
        json!({
            "workload": self.name, "title": self.workload.title, "how": self.how, "ranks": setting.world,
            "grid": program.layout.dimensions.iter().map(|(name, size)| json!([name, size])).collect::<Vec<_>>(),
            "scale": setting.scale, "flops": setting.flops, "compute": setting.compute,
            "compute_us": program.compute_us(), "bytes": program.bytes(), "calls": program.calls.len(),
            "source": self.workload.source, "assumptions": self.workload.assumptions,
            "parameters": self.workload.parameters.iter().map(parameter).collect::<serde_json::Map<_, _>>(),
            "iterations_us": self.steps, "wrong": self.wrong,
            "routes": self.routes.iter().map(route).collect::<Vec<_>>(),
        })
    }
}

fn scale(factor: f64) -> String {
    match 1.0 / factor {
        _ if factor == 1.0 => "as they are".to_string(),
        inverse if factor < 1.0 && inverse.fract() < 1e-9 => format!("multiplied by 1/{inverse:.0}"),
        _ => format!("multiplied by {factor}"),
    }
}

/// Milliseconds with three significant places or more.
fn millis(us: f64) -> String {
    let value = us / 1e3;
    match value {
        ..10.0 => format!("{value:.3}"),
        ..100.0 => format!("{value:.2}"),
        _ => format!("{value:.1}"),
    }
}
