//! A process's records, from calls to traces.

use super::*;
use crate::dtype::DataType;
use crate::plan::Collective;
use std::path::PathBuf;

fn recorder(records: usize, trace: &str) -> &'static Recorder {
    let config = Config { trace: trace.to_string(), trace_records: records, ..Config::default() };
    Box::leak(Box::new(Recorder::new(&config, 3, true).expect("a file is named")))
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("strata-recorder-{}-{name}", std::process::id()))
}

fn comm(key: u128, rank: u32, launched: &[Option<u32>]) -> RecordedComm {
    RecordedComm {
        key,
        rank,
        launched: launched.to_vec(),
        nodes: 1,
        carrier: "none".to_string(),
        ..RecordedComm::default()
    }
}

fn call(kind: CallKind) -> NewCall {
    let dtype = Some(DataType::F32);
    let buffers = (64, 64);
    let (addresses, tag, reduction) = ((0, 0), 0, None);
    NewCall { kind, dtype, reduction, peer: 0, count: 16, buffers, in_place: false, vectored: false, addresses, tag }
}

#[test]
fn no_name_is_no_recorder_and_a_name_without_a_form_is_none() {
    assert!(Recorder::new(&Config::default(), 0, true).is_none());
    let wrong = Config { trace: "trace.png".to_string(), ..Config::default() };
    assert!(Recorder::new(&wrong, 0, true).is_none());
    let two = Config { trace: "a.json, b.csv".to_string(), ..Config::default() };
    let recorder = Recorder::new(&two, 0, true).unwrap();
    assert_eq!((recorder.outputs.len(), recorder.at_failure.is_some()), (2, true));
    let quiet = Config { trace_failure: "none".to_string(), ..two };
    assert!(Recorder::new(&quiet, 0, true).unwrap().at_failure.is_none());
}

#[test]
fn collectives_and_messages_count_apart_and_go_through_their_states() {
    let recorder = recorder(64, "unused.json");
    let records = CommRecords::of(recorder, &comm(9, 1, &[Some(3), Some(5)]));
    let reduce = records.words(&call(CallKind::Collective(Collective::AllReduce)));
    let send = records.words(&call(CallKind::Send));
    let tickets = [&reduce, &send, &reduce, &send].map(|words| records.accepted(words));
    records.grouped(&[tickets[1], tickets[3]]);
    records.begun(tickets[0], records.names("ring"));
    records.ended(tickets[0], Some(7));
    records.begun(tickets[1], records.plain());
    records.failed(tickets[2], Some(1));
    let trace = recorder.trace();
    let told: Vec<_> = trace.calls.iter().map(|call| (call.call.as_str(), call.number, call.state)).collect();
    let expected = [
        ("all_reduce", 1, CallState::Ended),
        ("send", 1, CallState::Begun),
        ("all_reduce", 2, CallState::Failed),
        ("send", 2, CallState::Accepted),
    ];
    assert_eq!(told, expected);
    assert_eq!((trace.calls[0].algorithm.as_str(), trace.calls[0].nic_bytes), ("ring", Some(7)));
    assert_eq!((trace.calls[1].group, trace.calls[3].group, trace.calls[0].group), (Some(1), Some(1), None));
    assert_eq!((trace.calls[2].awaited, trace.calls[2].carrier.as_str()), (Some(1), ""));
    assert!(trace.calls[0].accepted_ns <= trace.calls[0].begun_ns.unwrap());
    assert!(trace.calls[0].begun_ns <= trace.calls[0].ended_ns);
    assert_eq!((trace.comms[0].members.as_str(), trace.comms[0].process), ("3,5", 5));
}

#[test]
fn ranks_of_one_process_are_told_apart_where_no_launcher_has_numbered_them() {
    let path = file("ranks.json");
    let recorder = recorder(64, path.to_str().unwrap());
    let alone = CommRecords::of(recorder, &comm(1, 0, &[None, None]));
    assert_eq!(recorder.trace().comms[0].process, 3, "the process's");
    let together = [0, 1].map(|rank| CommRecords::of(recorder, &comm(2, rank, &[Some(0), Some(0)])));
    let processes: Vec<u32> = recorder.trace().comms.iter().map(|comm| comm.process).collect();
    assert_eq!(processes, [3, 0, 1]);
    [&alone, &together[0], &together[1]].into_iter().for_each(CommRecords::leave);
    assert_eq!(recorder.live.load(Ordering::Relaxed), 0);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_full_ring_forgets_the_oldest_calls_and_says_so_and_communicators_with_them() {
    let path = file("full.json");
    let recorder = recorder(64, path.to_str().unwrap());
    let first = CommRecords::of(recorder, &comm(1, 0, &[None]));
    let second = CommRecords::of(recorder, &comm(2, 0, &[None]));
    let gather = first.words(&call(CallKind::Collective(Collective::AllGather)));
    first.ended(first.begun_at_once(&gather, first.plain()), None);
    first.leave();
    assert!(!path.exists(), "another one lives");
    let gather = second.words(&call(CallKind::Collective(Collective::AllGather)));
    for _ in 0..100 {
        second.ended(second.begun_at_once(&gather, second.names("ring")), None);
    }
    second.leave();
    let written = chrome::read(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!((written.calls.len(), written.processes[0].overwritten), (64, 37));
    assert_eq!(written.calls.iter().map(|call| call.number).collect::<Vec<_>>(), (37..=100).collect::<Vec<_>>());
    let third = CommRecords::of(recorder, &comm(3, 0, &[None]));
    let keys: Vec<String> = recorder.trace().comms.iter().map(|comm| comm.key.clone()).collect();
    assert_eq!(keys, [2u128, 3].map(|key| format!("{key:032x}")), "of the first there is no call any more");
    assert_eq!(third.plain().algorithm, 0);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_failure_is_written_at_once_and_once_for_each_communicator() {
    let (path, dump) = (file("failure.json"), file("dump_%r"));
    let config = Config {
        trace: path.to_str().unwrap().to_string(),
        trace_failure: dump.to_str().unwrap().to_string(),
        ..Config::default()
    };
    let recorder: &'static Recorder = Box::leak(Box::new(Recorder::new(&config, 0, true).unwrap()));
    let records = CommRecords::of(recorder, &comm(1, 0, &[None, None]));
    let ticket = records.accepted(&records.words(&call(CallKind::Collective(Collective::AllGather))));
    records.failed(ticket, Some(1));
    records.write_failure();
    let written = chrome::read(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!((written.calls[0].state, written.calls[0].awaited), (CallState::Failed, Some(1)));
    let dump = file("dump_0");
    assert!(std::fs::read(&dump).unwrap().starts_with(b"\x80\x02"));
    for path in [&path, &dump] {
        std::fs::remove_file(path).unwrap();
    }
    records.write_failure();
    assert!(!path.exists() && !dump.exists());
    records.leave();
}
