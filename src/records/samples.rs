//! A trace for tests.

use super::call::{CallRecord, CallState};
use super::trace::{CallTrace, TraceComm, TraceProcess};

/// An all-reduce, an all-gather, a send, and an all-reduce that has not ended, of rank 1 of 2.
pub fn sample() -> CallTrace {
    let call = |record: u64, call: &str, begun: u64| CallRecord {
        record,
        comm: "00000000000000ab".to_string(),
        rank: 1,
        nranks: 2,
        call: call.to_string(),
        number: record + 1,
        count: 256,
        dtype: "float".to_string(),
        bytes: 1024,
        input_bytes: 1024,
        output_bytes: 1024,
        op: String::new(),
        root: None,
        peer: None,
        in_place: false,
        vectored: false,
        tag: 0,
        algorithm: "ring".to_string(),
        carrier: "tcp".to_string(),
        group: None,
        nic_bytes: Some(512),
        accepted_ns: begun - 100,
        begun_ns: Some(begun),
        ended_ns: Some(begun + 2000),
        state: CallState::Ended,
        awaited: None,
    };
    let reduce = |record, begun| CallRecord { op: "sum".to_string(), ..call(record, "all_reduce", begun) };
    let send = CallRecord { peer: Some(0), group: Some(2), number: 1, ..call(2, "send", 20_000) };
    let open = CallRecord { ended_ns: None, state: CallState::Begun, nic_bytes: None, ..reduce(3, 30_000) };
    CallTrace {
        processes: vec![TraceProcess {
            host: "node7".to_string(),
            pid: 4711,
            rank: 1,
            strata: "0.1.0".to_string(),
            wall_ns: 1_700_000_000_000_000_000,
            written_ns: 50_000,
            overwritten: 3,
            lost: 0,
        }],
        comms: vec![TraceComm {
            key: "00000000000000ab".to_string(),
            name: String::new(),
            rank: 1,
            nranks: 2,
            nodes: 2,
            members: "0-1".to_string(),
            process: 1,
            companion: false,
        }],
        calls: vec![reduce(0, 1_000), call(1, "all_gather", 10_000), send, open],
    }
}
