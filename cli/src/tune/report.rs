//! `strata tune --report`: draws a table. For each collective and world a heat map, algorithms by sizes: how many times
//! as long as the fastest each takes.
#![forbid(unsafe_code)]

use super::candidates::Candidate;
use crate::draw::heatmap::{stacked, Cell, HeatMap, Scale};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use strata::error::{counted, Error, Result};
use strata::selection::table::{Measured, Row, Table};

/// Who takes so many times as long as the best is as red as can be.
const REDDEST: f64 = 4.0;

/// A size in bytes as it is said: `64 KiB`, or the bytes where that is not a whole number.
pub fn size_text(bytes: usize) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let whole = units.into_iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit));
    whole.map_or(format!("{bytes} B"), |(unit, name)| format!("{} {name}", bytes / unit))
}

/// Draws the table at one path to another, whose ending says how.
pub fn run(from: &Path, to: &Path) -> Result<ExitCode> {
    let table = Table::load(from)?;
    let maps = maps(&table);
    if maps.is_empty() {
        let text = format!("{} has no measured rows to draw", from.display());
        return Err(Error::InvalidArgument(text));
    }
    let text = match to.extension().and_then(|ending| ending.to_str()) {
        Some("svg") => stacked(&maps),
        Some("html" | "htm") => page(&table, &maps),
        _ => {
            let text = format!("{}: a drawing is an .html or .svg file", to.display());
            return Err(Error::InvalidArgument(text));
        }
    };
    std::fs::write(to, text).map_err(|error| Error::System(format!("cannot write {}: {error}", to.display())))?;
    outln!("{} of {} in {}", counted(maps.len(), "heat map"), from.display(), to.display());
    Ok(ExitCode::SUCCESS)
}

/// Rows of one collective on one world, in the table's order.
fn groups(table: &Table) -> Vec<Vec<&Row>> {
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    let key = |row: &Row| (row.collective.clone(), row.ranks, row.nodes);
    for row in table.rows.iter().filter(|row| !row.measured.is_empty()) {
        match groups.iter_mut().find(|group| key(group[0]) == key(row)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups.iter_mut().for_each(|group| group.sort_by_key(|row| row.bytes()));
    groups
}

fn maps(table: &Table) -> Vec<HeatMap> {
    groups(table).iter().map(|group| map(group)).collect()
}

fn map(group: &[&Row]) -> HeatMap {
    let mut algorithms: Vec<&str> = Vec::new();
    for measured in group.iter().flat_map(|row| &row.measured) {
        if !algorithms.contains(&measured.algorithm.as_str()) {
            algorithms.push(&measured.algorithm);
        }
    }
    algorithms.sort_unstable();
    let cells = |algorithm: &&str| group.iter().map(|row| cell(row, algorithm)).collect();
    let (ranks, nodes) = (group[0].ranks.unwrap_or(0), group[0].nodes.unwrap_or(0));
    HeatMap {
        title: format!("{} on {}, {}", group[0].collective, counted(ranks, "rank"), counted(nodes, "node")),
        row_title: "algorithm".to_string(),
        column_title: "message".to_string(),
        rows: algorithms.iter().map(ToString::to_string).collect(),
        columns: group.iter().map(|row| size_text(row.bytes())).collect(),
        cells: algorithms.iter().map(cells).collect(),
        scale: Scale::Worse(1.0, REDDEST),
        legend:
            "times as long as the fastest; * with other segments or window than Strata's own; framed: the row's choice"
                .to_string(),
    }
}

/// The best that an algorithm took, against the row's choice.
fn cell(row: &Row, algorithm: &str) -> Option<Cell> {
    let of = || row.measured.iter().filter(|measured| measured.algorithm == algorithm);
    let marked = row.algorithm == algorithm;
    let chosen = |one: &&Measured| (one.segment_bytes, one.window) == (row.segment_bytes, row.window);
    let best = of().min_by(|one, other| one.median_us.total_cmp(&other.median_us))?;
    let best = of().find(chosen).filter(|_| marked).unwrap_or(best);
    let fastest = row.measured.iter().map(|measured| measured.median_us).fold(f64::INFINITY, f64::min);
    let value = best.median_us / fastest;
    let candidate = Candidate::of(best);
    Some(Cell {
        value,
        text: format!("{value:.2}{}", if candidate.is_plain() { "" } else { "*" }),
        more: format!("{candidate}: {}", times(best)),
        marked,
    })
}

fn times(measured: &Measured) -> String {
    let Measured { median_us, low_us, high_us, samples, .. } = measured;
    format!("{median_us:.1} us ({low_us:.1} to {high_us:.1}, {})", counted(*samples, "sample"))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The maps with what was chosen, as a page.
fn page(table: &Table, maps: &[HeatMap]) -> String {
    let mut page = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Strata: tuning table</title>\n<style>\
         body{font-family:Helvetica,Arial,sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}\
         td,th{padding:.2em 1em;text-align:left;border-bottom:1px solid #ddd}</style></head><body>\n\
         <h1>Tuning table</h1>\n",
    );
    if let Some(header) = &table.header {
        let about = format!("{}. Strata {}, {}.", header.machine.summary(), header.strata, header.date);
        let _ = writeln!(page, "<p>{}</p>", escaped(&about));
    }
    for (map, group) in maps.iter().zip(groups(table)) {
        page.push_str(&map.svg());
        page.push_str("\n<table><tr><th>message</th><th>choice</th><th>time</th><th>next</th></tr>\n");
        for row in group {
            let best = &row.measured[0];
            let next = row.measured.iter().find(|other| other.algorithm != best.algorithm);
            let next = next.map_or(String::new(), |next| {
                format!("{}, {:.2} times as long", Candidate::of(next), next.median_us / best.median_us)
            });
            let columns = [size_text(row.bytes()), Candidate::of(best).to_string(), times(best), next];
            let columns: String = columns.iter().map(|text| format!("<td>{}</td>", escaped(text))).collect();
            let _ = writeln!(page, "<tr>{columns}</tr>");
        }
        page.push_str("</table>\n");
    }
    page + "</body></html>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_said_in_the_largest_unit_that_is_whole() {
        assert_eq!(
            [0, 1000, 1024, 1536, 3 << 20, 1 << 30].map(size_text),
            ["0 B", "1000 B", "1 KiB", "1536 B", "3 MiB", "1 GiB"]
        );
    }

    #[test]
    fn a_report_has_every_algorithm_and_frames_the_choice_of_each_size() {
        let text = "format = 1\nstrata = \"0.1.0\"\ndate = \"\"\n[machine]\ncpu = \"<c>\"\ndevice = \"host\"\n\
                    inter = \"tcp\"\nvendor = \"none\"\n";
        let row = |bytes: usize, algorithm: &str, other: &str| {
            let measured = |name: &str, us: f64, segment: usize| {
                format!(
                    "{{ algorithm = \"{name}\", segment_bytes = {segment}, median_us = {us:.1}, low_us = 1.0, \
                     high_us = 9.0, samples = 3 }}"
                )
            };
            let rows = [measured(algorithm, 10.0, 65536), measured(other, 25.0, 0), measured(algorithm, 12.0, 0)];
            format!(
                "[[row]]\ncollective = \"all_gather\"\nranks = 4\nnodes = 2\nbytes = {bytes}\n\
                 algorithm = \"{algorithm}\"\nsegment_bytes = 65536\nmeasured = [{}]\n",
                rows.join(",")
            )
        };
        let table = Table::parse(&format!("{text}{}{}", row(4096, "ring", "log"), row(1024, "log", "ring"))).unwrap();
        let maps = maps(&table);
        let [map] = &maps[..] else { panic!("{maps:?}") };
        assert_eq!(
            (&map.rows[..], &map.columns[..]),
            (&["log".into(), "ring".into()][..], &["1 KiB".into(), "4 KiB".into()][..])
        );
        let text =
            |row: usize, column: usize| map.cells[row][column].as_ref().map(|cell| (cell.text.as_str(), cell.marked));
        assert_eq!(text(0, 0), Some(("1.00*", true)));
        assert_eq!(text(0, 1), Some(("2.50", false)));
        let page = page(&table, &maps);
        assert!(page.contains("&lt;c&gt;") && page.contains("ring, 2.50 times as long"), "{page}");
    }
}
