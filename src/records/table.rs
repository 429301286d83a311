//! Traces as CSV, a call a line, for spreadsheets and data frames.
#![forbid(unsafe_code)]

use super::call::CallRecord;
use super::trace::CallTrace;
use serde::Serialize;
use std::io::{self, Write};

/// The columns before those of a record.
#[derive(Serialize)]
struct Origin<'a> {
    host: &'a str,
    pid: u32,
    process: u32,
}

/// Writes a trace. The wall clock at the trace's 0 is the same in all lines of a process, in the last column.
pub fn write(trace: &CallTrace, out: &mut dyn Write) -> io::Result<()> {
    let mut csv = csv::WriterBuilder::new().has_headers(false).from_writer(out);
    csv.write_record(HEAD)?;
    let index = trace.index();
    for call in &trace.calls {
        let rank = index.process_of(call);
        // What a process writes itself is of that process alone.
        let process = trace.processes.first();
        let origin = Origin {
            host: process.map_or("", |process| &process.host),
            pid: process.map_or(0, |process| process.pid),
            process: rank,
        };
        let line: (Origin<'_>, &CallRecord, u64) = (origin, call, process.map_or(0, |process| process.wall_ns));
        csv.serialize(line)?;
    }
    csv.flush()
}

/// The names of the columns.
const HEAD: [&str; 30] = [
    "host",
    "pid",
    "process",
    "record",
    "comm",
    "rank",
    "nranks",
    "call",
    "number",
    "count",
    "dtype",
    "bytes",
    "input_bytes",
    "output_bytes",
    "op",
    "root",
    "peer",
    "in_place",
    "vectored",
    "tag",
    "algorithm",
    "carrier",
    "group",
    "nic_bytes",
    "accepted_ns",
    "begun_ns",
    "ended_ns",
    "state",
    "awaited",
    "wall_ns",
];

#[cfg(test)]
mod tests {
    use super::super::samples::sample;
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn every_call_is_a_line_and_every_column_has_its_name() {
        let trace = sample();
        let mut text = Vec::new();
        write(&trace, &mut text).unwrap();
        let mut csv = csv::Reader::from_reader(&text[..]);
        let lines: Vec<HashMap<String, String>> = csv.deserialize().map(Result::unwrap).collect();
        assert_eq!(lines.len(), trace.calls.len());
        for (line, call) in lines.iter().zip(&trace.calls) {
            let value = serde_json::to_value(call).unwrap();
            for (name, value) in value.as_object().unwrap() {
                let text = match value {
                    serde_json::Value::Null => String::new(),
                    serde_json::Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                assert_eq!(line[name], text, "{name}");
            }
            assert_eq!((line["host"].as_str(), line["pid"].as_str(), line["process"].as_str()), ("node7", "4711", "1"));
            assert_eq!(line["wall_ns"], trace.processes[0].wall_ns.to_string());
        }
    }
}
