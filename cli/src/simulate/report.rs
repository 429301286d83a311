//! What the simulation says, as a table and as JSON.
#![forbid(unsafe_code)]

use super::cells::{Answer, Cell};
use super::lists::size_text;
use super::method::{way_text, Method};
use serde_json::{json, Value};
use std::fmt::Write;
use strata::plan::Collective;
use strata::sim::price::How;
use strata::sim::Cluster;

/// All cells with what each method takes for them.
pub struct Outcome<'a> {
    /// The machine, without the terms that were left out.
    pub machine: &'a Cluster,
    /// The terms that were left out.
    pub without: &'a [String],
    /// The cells.
    pub cells: &'a [Cell],
    /// The methods.
    pub methods: &'a [Method],
    /// The method that the others are compared with, by its place.
    pub against: usize,
    /// For each cell, what each method takes.
    pub answers: &'a [Vec<Option<Answer>>],
    /// Whether what each price cost to find out is told.
    pub costs: bool,
    /// Whether it is told when the first segment is final.
    pub fronts: bool,
}

impl Outcome<'_> {
    /// How many times as fast a method is as the one that it is compared with.
    pub fn ratio(&self, cell: usize, method: usize) -> Option<f64> {
        let answers = &self.answers[cell];
        Some(answers[self.against].as_ref()?.price.ns / answers[method].as_ref()?.price.ns)
    }

    /// Whether the overload term counts in a method's ratio.
    pub fn is_overloaded(&self, cell: usize, method: usize) -> bool {
        let counts = |method: usize| self.answers[cell][method].as_ref().is_some_and(|answer| answer.overloaded);
        counts(method) != counts(self.against)
    }

    /// The table; with `below`, only of the rows whose ratio is less than that.
    pub fn table(&self, below: Option<f64>) -> String {
        let mut text = self.head();
        let width = self.methods.iter().map(|method| method.to_string().len()).max().unwrap_or(0).max(6);
        let costs =
            if self.costs { format!("{:>9} {:>10} {:>9}  ", "cost s", "events", "peak MiB") } else { String::new() };
        let fronts = if self.fronts { format!("{:>9}  ", "first ms") } else { String::new() };
        let _ = writeln!(
            text,
            "{:<14} {:>5} {:>7}  {:<width$} {:>10} {:>8}  {:>5}  {:<32}  {fronts}{costs}by",
            "collective", "ranks", "bytes", "method", "ms", "ratio", "busy", "busiest"
        );
        let mut nrows = 0;
        for (index, cell) in self.cells.iter().enumerate() {
            for (method, answer) in self.answers[index].iter().enumerate() {
                let ratio = self.ratio(index, method);
                if below.is_some_and(|below| method == self.against || ratio.is_none_or(|ratio| ratio >= below)) {
                    continue;
                }
                nrows += 1;
                let Cell { collective, nranks, message_bytes } = *cell;
                let _ = write!(
                    text,
                    "{:<14} {nranks:>5} {:>7}  {:<width$} ",
                    collective.name(),
                    size_text(message_bytes),
                    self.methods[method]
                );
                match answer {
                    Some(answer) => self.row(&mut text, cell, answer, ratio, self.is_overloaded(index, method)),
                    None => text.push_str("         -        -      -  (no route of its own here)\n"),
                }
            }
        }
        if let Some(below) = below {
            let _ = writeln!(text, "# {nrows} of {} ratios are below {below}", self.nratios());
        }
        text + &self.summary() + &self.foot()
    }

    fn nratios(&self) -> usize {
        let others = |cell: usize| {
            (0..self.methods.len()).filter(move |&method| method != self.against && self.ratio(cell, method).is_some())
        };
        (0..self.cells.len()).map(|cell| others(cell).count()).sum()
    }

    fn row(&self, text: &mut String, cell: &Cell, answer: &Answer, ratio: Option<f64>, marked: bool) {
        let Answer { way, price, overloaded, cost } = answer;
        let star = |marked: bool| if marked { '*' } else { ' ' };
        let ms = format!("{:.3}{}", price.ns / 1e6, star(*overloaded));
        let ratio = ratio.map_or(String::from("- "), |ratio| format!("{ratio:.2}{}", star(marked)));
        let (busy, busiest) = match price.binding() {
            Some((resource, share)) => (format!("{:.0} %", share * 100.0), resource.to_string()),
            None => (String::from("-"), String::from("- (a law, not a simulation)")),
        };
        let by = way_text(way, cell.collective, cell.nranks, cell.message_bytes);
        let _ = write!(text, "{ms:>10} {ratio:>8}  {busy:>5}  {busiest:<32}  ");
        if self.fronts {
            let _ = write!(text, "{:>9.3}  ", price.first_ns() / 1e6);
        }
        if self.costs {
            let (seconds, peak) = cost;
            let peak = peak.map_or(String::from("-"), |bytes| (bytes >> 20).to_string());
            let _ = write!(text, "{seconds:>9.3} {:>10} {peak:>9}  ", price.events);
        }
        let _ = writeln!(text, "{by}");
    }

    fn head(&self) -> String {
        let Cluster { name, text, .. } = self.machine;
        let against = &self.methods[self.against];
        format!(
            "# strata simulate: {name} ({text})\n\
             # ratio: the time of {against} by the method's; busy: the part of the time in which the busiest resource was at work\n"
        )
    }

    /// The least and the greatest ratio of each method.
    fn summary(&self) -> String {
        let mut text = String::new();
        let mut collectives: Vec<Collective> = Vec::new();
        for cell in self.cells {
            if !collectives.contains(&cell.collective) {
                collectives.push(cell.collective);
            }
        }
        for collective in collectives {
            for (method, name) in self.methods.iter().enumerate().filter(|(method, _)| *method != self.against) {
                let cells = (0..self.cells.len()).filter(|&cell| self.cells[cell].collective == collective);
                let ratios = cells.filter_map(|cell| Some((self.ratio(cell, method)?, self.cells[cell])));
                let mut least: Option<(f64, Cell)> = None;
                let mut most = least;
                for (ratio, cell) in ratios {
                    least = least.filter(|(least, _)| *least <= ratio).or(Some((ratio, cell)));
                    most = most.filter(|(most, _)| *most >= ratio).or(Some((ratio, cell)));
                }
                let (Some(least), Some(most)) = (least, most) else { continue };
                let place = |cell: Cell| format!("{} ranks, {}", cell.nranks, size_text(cell.message_bytes));
                let _ = writeln!(
                    text,
                    "# {}: {name} is from {:.2} ({}) to {:.2} ({}) times as fast as {}",
                    collective.name(),
                    least.0,
                    place(least.1),
                    most.0,
                    place(most.1),
                    self.methods[self.against]
                );
            }
        }
        text
    }

    /// What is to be known of terms that stand for somebody's software.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let ours = |answer: &Answer| matches!(answer.way, How::Strata(_));
        if self.answers.iter().flatten().flatten().any(ours) {
            notes.push(String::from(
                "Strata's times are simulated, with an assumed cost of each call: nothing of it was measured there. Over a",
            ));
            notes.push(format!(
                "vendor's library a program goes this way with STRATA_INTER=mpi or tcp, by itself with STRATA_MACHINE={} too",
                self.machine.name
            ));
        }
        if !self.without.is_empty() {
            notes.push(format!("without the machine's terms: {}", self.without.join(", ")));
        }
        let counts = self.answers.iter().flatten().flatten().any(|answer| answer.overloaded);
        if let Some(overload) = self.machine.overload.as_ref().filter(|_| counts) {
            notes.push(format!(
                "* the overload term counts here: on more than {} ranks and from {:.0} bytes on, the vendor's library is \
                 taken to be {} times as slow as its law",
                overload.above_ranks.value, overload.from_bytes.value, overload.factor.value
            ));
            let fitted = if overload.factor.fitted { "fitted: " } else { "" };
            notes.push(format!("  ({fitted}{}); --without overload leaves it out", overload.factor.source));
        }
        notes
    }

    fn foot(&self) -> String {
        self.notes().iter().map(|note| format!("# {note}\n")).collect()
    }

    /// Everything, for programs.
    pub fn json(&self) -> Value {
        let answer = |cell: usize, method: usize| {
            let Cell { collective, nranks, message_bytes } = self.cells[cell];
            let name = self.methods[method].to_string();
            let Some(Answer { way, price, overloaded, cost }) = &self.answers[cell][method] else {
                return json!({ "method": name, "ms": null });
            };
            let busiest: Vec<Value> = price
                .busiest
                .iter()
                .map(|(resource, ns)| json!({ "resource": resource.to_string(), "busy_ms": *ns as f64 / 1e6 }))
                .collect();
            let mut value = json!({
                "method": name, "by": way_text(way, collective, nranks, message_bytes), "ms": price.ns / 1e6,
                "first_ms": price.first_ns() / 1e6,
                "ratio": self.ratio(cell, method), "overload": overloaded, "simulated": !price.busiest.is_empty(),
                "busiest": price.binding().map(|(resource, _)| resource.to_string()),
                "busy": price.binding().map(|(_, share)| share), "resources": busiest, "events": price.events,
            });
            if self.fronts {
                value["front"] = price.front.iter().map(|&(bytes, ns)| json!([bytes, ns / 1e6])).collect();
            }
            if self.costs {
                value["cost_seconds"] = json!(cost.0);
                value["cost_peak_bytes"] = json!(cost.1);
            }
            value
        };
        let cells: Vec<Value> = (0..self.cells.len())
            .map(|index| {
                let Cell { collective, nranks, message_bytes } = self.cells[index];
                let methods: Vec<Value> = (0..self.methods.len()).map(|method| answer(index, method)).collect();
                json!({
                    "collective": collective.name(), "ranks": nranks, "bytes": message_bytes, "methods": methods,
                })
            })
            .collect();
        json!({
            "machine": self.machine.name, "text": self.machine.text, "without": self.without,
            "against": self.methods[self.against].to_string(), "cells": cells,
        })
    }
}
