//! Traces as dumps of PyTorch's flight recorder, which `torchfrtrace` compares across ranks.
//!
//! A dump is of one process rank. Its entries are the calls that the ring still has; what a call waits for shows as its
//! `state`: scheduled, started or completed. The analyser compares entries by sequence number and rejects names that PyTorch
//! does not have, so custom collectives are left out, and sizes are those by which ranks have to agree. Messages of one group
//! count as one operation, closed by an entry `coalesced`, as PyTorch has it.
#![forbid(unsafe_code)]

use super::call::{CallRecord, CallState};
use super::pickle::PyValue;
use super::trace::{from_ranges, CallTrace, TraceComm};
use std::collections::{BTreeMap, BTreeSet};

/// The version of the form.
const VERSION: &str = "2.5";
/// The first sequence number of messages. The analyser takes a message for a part of a collective of the same number.
const FIRST_MESSAGES: u64 = 1 << 32;

/// PyTorch's name of a call.
fn name_of(call: &CallRecord) -> Option<String> {
    let peer = call.peer.unwrap_or(0);
    let name = match call.call.as_str() {
        "all_gather" => "_all_gather_base",
        "reduce_scatter" => "_reduce_scatter_base",
        "all_reduce" | "broadcast" | "reduce" | "all_to_all" | "gather" | "scatter" => &call.call,
        "send" => return Some(format!("nccl:send {}->{peer}", call.rank)),
        "recv" => return Some(format!("nccl:recv {}<-{peer}", call.rank)),
        _ => return None,
    };
    Some(format!("nccl:{name}"))
}

/// Elements of input and output, as all ranks count them. Of a gather and a scatter whose blocks differ in size no two ranks need
/// know the same; of an all-to-all the analyser adds up what ranks send and receive.
fn sizes_of(call: &CallRecord) -> (u64, u64) {
    let uneven = call.vectored && matches!(call.call.as_str(), "gather" | "scatter");
    let one = if uneven { 1 } else { call.count };
    let all = one.saturating_mul(u64::from(call.nranks));
    match call.call.as_str() {
        "all_gather" | "gather" => (one, all),
        "reduce_scatter" | "scatter" => (all, one),
        "all_to_all" => {
            let elem_bytes = call.input_bytes.checked_div(all).filter(|_| !call.vectored).unwrap_or(1).max(1);
            (call.input_bytes / elem_bytes, call.output_bytes / elem_bytes)
        }
        _ => (one, one),
    }
}

/// PyTorch's name of a type.
fn type_of(dtype: &str) -> &str {
    match dtype {
        "int8" => "Char",
        "uint8" => "Byte",
        "int16" => "Short",
        "uint16" => "UInt16",
        "int32" => "Int",
        "uint32" => "UInt32",
        "int64" => "Long",
        "uint64" => "UInt64",
        "half" => "Half",
        "float" => "Float",
        "double" => "Double",
        "bfloat16" => "BFloat16",
        "f8e4m3" => "Float8_e4m3fn",
        "f8e5m2" => "Float8_e5m2",
        other => other,
    }
}

/// The sequence numbers of a communicator: its last collective, its last operation of messages and the group of that.
#[derive(Default)]
struct Sequence {
    collective: u64,
    messages: u64,
    group: Option<u64>,
    operations: u64,
}

fn group_name(comm: &TraceComm) -> PyValue {
    let desc = if comm.name.is_empty() { "undefined" } else { &comm.name };
    PyValue::Pair(Box::new([PyValue::text(&comm.key), PyValue::text(desc)]))
}

/// One entry: `sizes` are empty of one that ends a group of messages.
fn entry(call: &CallRecord, comm: &TraceComm, name: &str, sequence: &Sequence, wall_ns: u64) -> PyValue {
    let wall = |ns: u64| PyValue::number(wall_ns.saturating_add(ns));
    let (input, output) = sizes_of(call);
    let sizes = |elements: u64| PyValue::List(vec![PyValue::List(vec![PyValue::number(elements)])]);
    let types = || PyValue::List(vec![PyValue::text(type_of(&call.dtype))]);
    let state = match (call.state, call.begun_ns) {
        (CallState::Ended, _) => "completed",
        (_, Some(_)) => "started",
        (_, None) => "scheduled",
    };
    let completed = call.state == CallState::Ended;
    PyValue::dict([
        ("frames", PyValue::List(Vec::new())),
        ("record_id", PyValue::number(call.record)),
        ("pg_id", PyValue::Int(0)),
        ("process_group", group_name(comm)),
        ("collective_seq_id", PyValue::number(sequence.collective)),
        ("p2p_seq_id", PyValue::number(FIRST_MESSAGES + sequence.messages)),
        ("op_id", PyValue::number(sequence.operations)),
        ("profiling_name", PyValue::text(name)),
        ("time_created_ns", wall(call.accepted_ns)),
        ("input_sizes", sizes(input)),
        ("input_dtypes", types()),
        ("output_sizes", sizes(output)),
        ("output_dtypes", types()),
        ("state", PyValue::text(state)),
        ("time_discovered_started_ns", call.begun_ns.map_or(PyValue::None, wall)),
        ("time_discovered_completed_ns", call.ended_ns.filter(|_| completed).map_or(PyValue::None, wall)),
        ("duration_ms", PyValue::None),
        ("retired", PyValue::Bool(completed)),
        ("timeout_ms", PyValue::Int(0)),
        ("is_p2p", PyValue::Bool(call.is_message())),
    ])
}

/// The process ranks that a trace has calls of.
pub fn ranks(trace: &CallTrace) -> BTreeSet<u32> {
    trace.comms.iter().map(|comm| comm.process).collect()
}

/// The dump of one process rank.
pub fn dump(trace: &CallTrace, rank: u32) -> PyValue {
    let wall_ns = trace.processes.first().map_or(0, |process| process.wall_ns);
    let mut sequences: BTreeMap<&str, Sequence> = BTreeMap::new();
    let mut entries = Vec::new();
    let comms = trace.index();
    let calls: Vec<&CallRecord> = trace.calls.iter().filter(|call| comms.process_of(call) == rank).collect();
    for (index, call) in calls.iter().enumerate() {
        let (Some(name), Some(comm)) = (name_of(call), comms.comm_of(call)) else { continue };
        let sequence = sequences.entry(&comm.key).or_default();
        sequence.operations += 1;
        if !call.is_message() {
            sequence.collective = call.number;
            entries.push(entry(call, comm, &name, sequence, wall_ns));
            continue;
        }
        if sequence.group.is_none() || sequence.group != call.group {
            (sequence.messages, sequence.group) = (sequence.messages + 1, call.group);
        }
        entries.push(entry(call, comm, &name, sequence, wall_ns));
        let same = |next: &&CallRecord| next.comm == call.comm && next.is_message() && next.group == call.group;
        if call.group.is_none() || !calls[index + 1..].iter().any(same) {
            entries.push(entry(call, comm, "nccl:coalesced", sequence, wall_ns));
        }
    }
    let own: Vec<&TraceComm> = trace.comms.iter().filter(|comm| comm.process == rank).collect();
    let config = own.iter().map(|comm| {
        let ranks = from_ranges(&comm.members).filter(|ranks| !ranks.is_empty());
        let ranks = ranks.unwrap_or_else(|| (0..comm.nranks).collect());
        let desc = if comm.name.is_empty() { "undefined" } else { &comm.name };
        let group = PyValue::dict([
            ("name", PyValue::text(&comm.key)),
            ("desc", PyValue::text(desc)),
            ("ranks", PyValue::text(&format!("{ranks:?}"))),
        ]);
        (PyValue::text(&comm.key), group)
    });
    let status = own.iter().map(|comm| (PyValue::text(&comm.key), status(&calls, comm)));
    PyValue::dict([
        ("version", PyValue::text(VERSION)),
        ("pg_config", PyValue::Dict(config.collect())),
        ("pg_status", PyValue::Dict(status.collect())),
        ("entries", PyValue::List(entries)),
    ])
}

/// The last collectives of a communicator that were accepted, begun and ended.
fn status(calls: &[&CallRecord], comm: &TraceComm) -> PyValue {
    let of_comm = || calls.iter().filter(|call| call.comm == comm.key && !call.is_message());
    let last = |fits: &dyn Fn(&CallRecord) -> bool| {
        PyValue::Int(of_comm().filter(|call| fits(call)).map(|call| call.number as i64).max().unwrap_or(-1))
    };
    PyValue::dict([
        ("last_enqueued_collective", last(&|_| true)),
        ("last_started_collective", last(&|call| call.begun_ns.is_some())),
        ("last_completed_collective", last(&|call| call.state == CallState::Ended)),
    ])
}

#[cfg(test)]
mod tests {
    use super::super::samples::sample;
    use super::*;

    fn at<'a>(value: &'a PyValue, key: &str) -> &'a PyValue {
        let PyValue::Dict(entries) = value else { panic!("a dict") };
        &entries.iter().find(|(name, _)| *name == PyValue::text(key)).unwrap_or_else(|| panic!("{key}")).1
    }

    #[test]
    fn a_dump_has_the_calls_of_its_rank_with_states_and_numbers() {
        let trace = sample();
        assert_eq!(ranks(&trace).into_iter().collect::<Vec<_>>(), [1]);
        let dump = dump(&trace, 1);
        let PyValue::List(entries) = at(&dump, "entries") else { panic!("a list") };
        let told = |key: &str| entries.iter().map(|entry| at(entry, key).clone()).collect::<Vec<_>>();
        let texts = |names: &[&str]| names.iter().map(|name| PyValue::text(name)).collect::<Vec<_>>();
        let names = ["nccl:all_reduce", "nccl:_all_gather_base", "nccl:send 1->0", "nccl:coalesced", "nccl:all_reduce"];
        assert_eq!(told("profiling_name"), texts(&names));
        assert_eq!(told("state"), texts(&["completed", "completed", "completed", "completed", "started"]));
        assert_eq!(told("collective_seq_id"), [1, 2, 2, 2, 4].map(PyValue::Int));
        assert_eq!(told("p2p_seq_id"), [0, 0, 1, 1, 1].map(|number| PyValue::number(FIRST_MESSAGES + number)));
        assert_eq!(told("is_p2p"), [false, false, true, true, false].map(PyValue::Bool));
        let group = at(at(&dump, "pg_config"), "00000000000000ab");
        assert_eq!(*at(group, "ranks"), PyValue::text("[0, 1]"));
        let status = at(at(&dump, "pg_status"), "00000000000000ab");
        assert_eq!(*at(status, "last_enqueued_collective"), PyValue::Int(4));
        assert_eq!(*at(status, "last_completed_collective"), PyValue::Int(2));
        assert_eq!(entries.len(), 5);
        let PyValue::List(others) = at(&self::dump(&trace, 0), "entries").clone() else { panic!("a list") };
        assert!(others.is_empty());
    }

    #[test]
    fn what_pytorch_has_no_name_for_is_left_out() {
        let mut trace = sample();
        trace.calls[0].call = "custom".to_string();
        let dump = dump(&trace, 1);
        let PyValue::List(entries) = at(&dump, "entries") else { panic!("a list") };
        assert_eq!(entries.len(), 4);
    }
}
