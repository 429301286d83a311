//! How long after a fault the survivors had their first error: written down for each program, and summed up in a table.

use crate::conduct::Verdict;
use crate::program::Program;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

/// Adds what came of a program: a line for the program, and one for each delay in milliseconds.
pub fn append(path: &Path, program: &Program, verdict: &Verdict) -> std::io::Result<()> {
    let kind = program.fault.as_ref().map_or("none".to_string(), |fault| format!("{:?}", fault.kind));
    let row = format!("{:?},{kind}", program.carrier);
    let mut text = format!("{row},program\n");
    if let Verdict::Passed { delays, .. } = verdict {
        delays.iter().for_each(|delay| text += &format!("{row},{:.3}\n", 1e3 * delay.as_secs_f64()));
    }
    OpenOptions::new().create(true).append(true).open(path)?.write_all(text.as_bytes())
}

/// The record as a table.
pub fn table(path: &Path) -> Result<String, String> {
    let record = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut rows: BTreeMap<(&str, &str), (u64, Vec<f64>)> = BTreeMap::new();
    for line in record.lines() {
        let mut fields = line.split(',');
        let (Some(carrier), Some(fault), Some(what)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let row = rows.entry((carrier, fault)).or_default();
        match what.parse() {
            Ok(delay) => row.1.push(delay),
            Err(_) => row.0 += 1,
        }
    }
    let mut text =
        "| carrier | fault | programs | errors | median ms | worst ms |\n|---|---|---|---|---|---|\n".to_string();
    for ((carrier, fault), (programs, mut delays)) in rows {
        delays.sort_unstable_by(f64::total_cmp);
        let shown = |at: Option<&f64>| at.map_or("-".to_string(), |delay| format!("{delay:.0}"));
        let (median, worst) = (shown(delays.get(delays.len() / 2)), shown(delays.last()));
        let _ = writeln!(text, "| {carrier} | {fault} | {programs} | {} | {median} | {worst} |", delays.len());
    }
    Ok(text)
}
