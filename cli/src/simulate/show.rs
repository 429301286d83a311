//! Every number of a machine, with its unit and its source.
#![forbid(unsafe_code)]

use std::fmt::Write;
use strata::sim::machine::TERMS;
use strata::sim::Cluster;

/// The unit of a number, by the end of its name.
fn unit(name: &str) -> &'static str {
    let last = name.rsplit('.').next().unwrap_or(name);
    match last {
        "ranks" | "above_ranks" => "ranks",
        "nics" => "NICs",
        "count" => "nodes",
        "processors" => "processors",
        "factor" => "times",
        "share" => "of rates",
        _ if last.ends_with("_us") => "us",
        _ if last.ends_with("gbps") => "GB/s",
        _ if last.ends_with("_bytes") => "bytes",
        _ => "",
    }
}

/// The machine as text.
pub fn show(machine: &Cluster, without: &[String]) -> String {
    let mut text = format!("{}: {}\n", machine.name, machine.text);
    let width = machine.numbers.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, number) in &machine.numbers {
        let term = name.split('.').next().unwrap_or("");
        let left_out = without.iter().any(|left_out| left_out == term);
        let kind = match (left_out, number.fitted) {
            (true, _) => "left out",
            (_, true) => "fitted",
            _ => "",
        };
        let _ = writeln!(text, "{name:<width$} {:>10} {:<10} {kind:<8}  {}", number.value, unit(name), number.source);
    }
    let fitted = machine.numbers.iter().filter(|(_, number)| number.fitted).count();
    let _ = writeln!(
        text,
        "\n{} numbers, {fitted} of them fitted: chosen so that the model meets measured times.\n\
         GB/s is 10^9 bytes a second. Terms that --without leaves out:",
        machine.numbers.len()
    );
    for (term, what) in TERMS {
        let _ = writeln!(text, "  {term:<10} {what}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_every_machine_is_shown_with_a_unit_but_exponents() {
        for name in Cluster::names() {
            let machine = Cluster::find(name).unwrap();
            let shown = show(&machine, &[]);
            for (place, number) in &machine.numbers {
                assert!(shown.contains(place) && shown.contains(&number.source), "{name}: {place}");
                assert!(!unit(place).is_empty() || place.ends_with(".q"), "{name}: {place} has no unit");
            }
        }
    }
}
