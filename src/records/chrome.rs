//! Traces as Chrome's JSON, which Perfetto opens, and back. It has everything: what reads traces reads these.
//!
//! A process of the picture is a rank of the job; its rows are its communicators. A call is one event from its begin to its
//! end, or until the trace was written where it has not ended, and its `args` are the whole record. Calls of one communicator
//! that overlap get rows of their own. Beside the events stand `strata`, the version of this form, `processes` and `comms`.
#![forbid(unsafe_code)]

use super::call::{CallRecord, CallState};
use super::trace::{CallTrace, TraceComm, TraceProcess};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// The version of what stands beside the events.
const VERSION: u32 = 1;
/// Rows of a communicator; further calls that overlap share the last one.
const ROWS: usize = 64;
/// The color of calls that have failed, by Chrome's name.
const FAILED: &str = "terrible";

#[derive(Deserialize)]
struct ReadFile {
    strata: Option<u32>,
    #[serde(default)]
    processes: Vec<TraceProcess>,
    #[serde(default)]
    comms: Vec<TraceComm>,
    #[serde(rename = "traceEvents")]
    events: Vec<ReadEvent>,
}

#[derive(Deserialize)]
struct ReadEvent {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    args: Value,
}

#[derive(Serialize)]
struct CallEvent<'a> {
    name: &'a str,
    cat: &'static str,
    ph: &'static str,
    pid: u32,
    tid: usize,
    ts: f64,
    dur: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cname: Option<&'static str>,
    args: &'a CallRecord,
}

/// The category of events that are calls.
const CALL: &str = "call";

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

/// The rows of a communicator's rank, each with the end of its last call.
struct Rows {
    first: usize,
    ends: Vec<u64>,
}

impl Rows {
    /// The first row that is free then.
    fn take(&mut self, begin: u64, end: u64) -> usize {
        let free = self.ends.iter().position(|&last| last <= begin);
        let row = match free {
            Some(row) => row,
            None if self.ends.len() < ROWS => {
                self.ends.push(0);
                self.ends.len() - 1
            }
            None => ROWS - 1,
        };
        self.ends[row] = self.ends[row].max(end);
        self.first + row
    }
}

/// Writes a trace.
pub fn write(trace: &CallTrace, out: &mut dyn Write) -> io::Result<()> {
    let head = json!({ "processes": trace.processes, "comms": trace.comms });
    let head = head.to_string();
    write!(out, "{{\"strata\":{VERSION},\"displayTimeUnit\":\"ns\",{},\n\"traceEvents\":[", &head[1..head.len() - 1])?;
    let mut comma = "\n";
    let mut put = |out: &mut dyn Write, text: &str| {
        let written = write!(out, "{comma}{text}");
        comma = ",\n";
        written
    };
    for process in &trace.processes {
        let name = format!("rank {} ({}, process {})", process.rank, process.host, process.pid);
        let (pid, args) = (process.rank, json!({ "name": name }));
        put(out, &json!({ "ph": "M", "name": "process_name", "pid": pid, "args": args }).to_string())?;
        let args = json!({ "sort_index": pid });
        put(out, &json!({ "ph": "M", "name": "process_sort_index", "pid": pid, "args": args }).to_string())?;
    }
    let mut rows: BTreeMap<(&str, u32), Rows> = BTreeMap::new();
    for (index, comm) in trace.comms.iter().enumerate() {
        let first = index * ROWS;
        rows.insert((&comm.key, comm.rank), Rows { first, ends: Vec::new() });
        let called = if comm.name.is_empty() { short(&comm.key) } else { &comm.name };
        let args = json!({ "name": format!("{called}, rank {} of {}", comm.rank, comm.nranks) });
        let name = json!({ "ph": "M", "name": "thread_name", "pid": comm.process, "tid": first, "args": args });
        put(out, &name.to_string())?;
    }
    let index = trace.index();
    let until = trace.processes.iter().map(|process| process.written_ns).max().unwrap_or(0);
    for call in &trace.calls {
        let begin = call.begun_ns.unwrap_or(call.accepted_ns);
        let end = call.ended_ns.unwrap_or(until).max(begin);
        let row = rows.get_mut(&(call.comm.as_str(), call.rank)).map_or(0, |rows| rows.take(begin, end));
        let event = CallEvent {
            name: &call.call,
            cat: CALL,
            ph: "X",
            pid: index.process_of(call),
            tid: row,
            ts: us(begin),
            dur: us(end - begin),
            cname: (call.state == CallState::Failed).then_some(FAILED),
            args: call,
        };
        put(out, &serde_json::to_string(&event)?)?;
    }
    out.write_all(b"\n]}\n")
}

/// As much of a communicator's key as tells it from others.
pub fn short(key: &str) -> &str {
    key.get(..8).unwrap_or(key)
}

/// Reads a trace; the error says what is wrong with the text.
pub fn read(text: &[u8]) -> Result<CallTrace, String> {
    let file: ReadFile = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    match file.strata {
        Some(VERSION) => {}
        Some(version) => return Err(format!("it is of version {version}, this program reads {VERSION}")),
        None => return Err("it is a trace, but not one of Strata's".to_string()),
    }
    let calls = file.events.into_iter().filter(|event| event.cat == CALL);
    let calls = calls.map(|event| serde_json::from_value(event.args)).collect::<Result<Vec<CallRecord>, _>>();
    let calls = calls.map_err(|error| format!("a call that is none: {error}"))?;
    Ok(CallTrace { processes: file.processes, comms: file.comms, calls })
}

#[cfg(test)]
mod tests {
    use super::super::samples::sample;
    use super::*;

    #[test]
    fn a_trace_comes_back_as_it_was_written() {
        let trace = sample();
        let mut text = Vec::new();
        write(&trace, &mut text).unwrap();
        assert_eq!(read(&text), Ok(trace));
    }

    #[test]
    fn calls_that_overlap_have_rows_of_their_own_and_failures_a_color() {
        let mut trace = sample();
        trace.calls[1].begun_ns = trace.calls[0].begun_ns.map(|begun| begun + 1);
        trace.calls[1].ended_ns = trace.calls[0].ended_ns;
        trace.calls[2].begun_ns = trace.calls[0].ended_ns;
        trace.calls[2].state = CallState::Failed;
        let mut text = Vec::new();
        write(&trace, &mut text).unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        let events: Vec<&Value> =
            value["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(events.iter().map(|event| event["tid"].as_u64().unwrap()).collect::<Vec<_>>()[..3], [0, 1, 0]);
        assert_eq!(events[0]["ts"].as_f64().unwrap(), trace.calls[0].begun_ns.unwrap() as f64 / 1000.0);
        assert_eq!(events[0]["dur"].as_f64().unwrap(), trace.calls[0].duration_ns().unwrap() as f64 / 1000.0);
        assert!(events[0].get("cname").is_none() && events[2]["cname"] == FAILED);
    }

    #[test]
    fn what_is_no_trace_of_ours_is_refused_in_words() {
        for (text, said) in [
            ("", "EOF"),
            ("{\"traceEvents\":[]}", "not one of Strata's"),
            ("{\"strata\":2,\"traceEvents\":[]}", "version 2, this program reads 1"),
            ("{\"strata\":1}", "missing field `traceEvents`"),
            ("{\"strata\":1,\"traceEvents\":[{\"cat\":\"call\",\"args\":{}}]}", "a call that is none"),
        ] {
            let error = read(text.as_bytes()).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
