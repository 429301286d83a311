//! Writes a tuning table, for people as much as for [`read`](super::read).
#![forbid(unsafe_code)]

use super::{Measured, Row, Table, TableHeader, FORMAT, OLDEST_FORMAT};
use std::fmt::Write as _;

/// A string as TOML has it.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

impl Table {
    /// The table as TOML, rows in their order. Rows of NCCL's plugin have no place in it: only those of a measured size
    /// are written, and no notes.
    pub fn to_toml(&self) -> String {
        let mut text = String::from(
            "# Written by `strata tune`; STRATA_TUNING_TABLE=<this file> makes Strata follow it.\n\
             # Times in microseconds of the slowest rank: the median, and where the fastest and the slowest quarter begin.\n",
        );
        let has_carriers = self.rows.iter().any(|row| row.carrier.is_some());
        let format = if has_carriers { FORMAT } else { OLDEST_FORMAT };
        let _ = writeln!(text, "format = {format}");
        if let Some(TableHeader { strata, date, machine }) = &self.header {
            let _ = writeln!(text, "strata = {}\ndate = {}", quoted(strata), quoted(date));
            let _ = writeln!(
                text,
                "\n[machine]\ncpu = {}\ndevice = {}\ninter = {}\nvendor = {}",
                quoted(&machine.cpu),
                quoted(&machine.device),
                quoted(&machine.inter),
                quoted(&machine.vendor)
            );
        }
        for row in &self.rows {
            if let (Some(ranks), Some(nodes)) = (row.ranks, row.nodes) {
                write_row(&mut text, row, ranks, nodes);
            }
        }
        text
    }
}

fn write_row(text: &mut String, row: &Row, ranks: usize, nodes: usize) {
    let _ = writeln!(
        text,
        "\n[[row]]\ncollective = {}\nranks = {ranks}\nnodes = {nodes}\nbytes = {}\nalgorithm = {}",
        quoted(&row.collective),
        row.bytes(),
        quoted(&row.algorithm)
    );
    if let Some(carrier) = &row.carrier {
        let _ = writeln!(text, "carrier = {}", quoted(carrier));
    }
    for (name, value) in [("segment_bytes", row.segment_bytes), ("window", row.window)] {
        if value > 0 {
            let _ = writeln!(text, "{name} = {value}");
        }
    }
    if row.measured.is_empty() {
        return;
    }
    text.push_str("measured = [\n");
    for measured in &row.measured {
        let Measured { algorithm, segment_bytes, window, median_us, low_us, high_us, samples } = measured;
        let _ = write!(text, "    {{ algorithm = {}", quoted(algorithm));
        for (name, value) in [("segment_bytes", segment_bytes), ("window", window)] {
            if *value > 0 {
                let _ = write!(text, ", {name} = {value}");
            }
        }
        let _ = writeln!(
            text,
            ", median_us = {median_us:.1}, low_us = {low_us:.1}, high_us = {high_us:.1}, samples = {samples} }},"
        );
    }
    text.push_str("]\n");
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{MeasuredOn, Size};
    use super::*;

    pub(in crate::selection::table) fn sample() -> Table {
        let machine = MeasuredOn {
            cpu: "A \"processor\" of 2\\3".to_string(),
            device: "host".to_string(),
            inter: "tcp".to_string(),
            vendor: "none".to_string(),
        };
        let measured = |algorithm: &str, segment_bytes, window| Measured {
            algorithm: algorithm.to_string(),
            segment_bytes,
            window,
            median_us: 812.5,
            low_us: 800.0,
            high_us: 840.1,
            samples: 45,
        };
        let row = |bytes, algorithm: &str, segment_bytes, window| Row {
            collective: "all_gather".to_string(),
            ranks: Some(8),
            nodes: Some(2),
            size: Size::Near(bytes),
            algorithm: algorithm.to_string(),
            carrier: None,
            segment_bytes,
            window,
            measured: vec![measured(algorithm, segment_bytes, window), measured("ring", 0, 0)],
        };
        let (strata, date) = (env!("CARGO_PKG_VERSION").to_string(), "2025-11-30".to_string());
        Table {
            header: Some(TableHeader { strata, date, machine }),
            rows: vec![row(1 << 20, "two_level(direct,log)", 65536, 4), row(1024, "vendor", 0, 0)],
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_table_is_read_as_it_is_written() {
        assert_eq!(Table::parse(&sample().to_toml()), Ok(sample()));
        let mut carried = sample();
        carried.rows[0].carrier = Some("mpi".to_string());
        assert!(carried.to_toml().contains("format = 2\n") && sample().to_toml().contains("format = 1\n"));
        assert_eq!(Table::parse(&carried.to_toml()), Ok(carried));
        let bare = Table { rows: Vec::new(), ..sample() };
        assert_eq!(Table::parse(&bare.to_toml()), Ok(bare));
    }
}
