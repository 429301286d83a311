//! NCCL's profiler interface between the vendor's library and Strata, on the double: its calls are in Strata's trace although they go
//! straight to it, and a profiler of the program's own is left to it and hears Strata's calls as well.

use crate::built::{checked, library_dir, root, Compiler};
use crate::rails;
use crate::vendor::{Double, Recording, Way, NCCL, OLD_NCCL, RCCL};
use std::path::{Path, PathBuf};
use std::process::Command;
use strata::records::{chrome, CallRecord, CallState, CallTrace};

/// Releases whose profilers have tables of versions 7, 5 and 4.
const RELEASES: [Double; 3] = [NCCL, Double { version: 22803, rccl: false }, Double { version: 22703, rccl: false }];

/// The collectives that Strata has, in two levels even where they are small.
const TWO_LEVEL: [(&str, &str); 3] = [
    ("STRATA_ALLGATHER_ALGO", "two_level"),
    ("STRATA_REDUCESCATTER_ALGO", "two_level"),
    ("STRATA_ALLREDUCE_ALGO", "two_level"),
];

/// A folder for one test's files.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("profiled-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn trace(&self, rank: usize) -> CallTrace {
        chrome::read(&std::fs::read(self.0.join(format!("t-{rank}.json"))).unwrap()).unwrap()
    }

    fn logs(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.0).unwrap().map(|file| file.unwrap().path());
        let is_log = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("log.");
        files.filter(is_log).map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The program with Strata in front of the double, with records.
fn served(double: Double, grid: &str, folder: &Folder) -> Command {
    let mut command = double.command("profiled", Way::Linked, &[grid]);
    command.env("LD_LIBRARY_PATH", library_dir()).env("STRATA_NCCL_LIB", double.library());
    command.env("STRATA_TRACE", folder.0.join("t-%r.json")).env_remove("NCCL_PROFILER_PLUGIN");
    command
}

/// The plugin that writes down what it hears.
fn listening(version: u32) -> PathBuf {
    let source = std::fs::read_to_string(root().join("shim-tests/c/profiler.c")).unwrap();
    let flags = ["-std=gnu11", "-Wall", "-Wextra", "-shared", "-fPIC", "-g", "-pthread"];
    let version = format!("-DPROFILER_VERSION={version}");
    Compiler::new("c").compile(&source, &[&flags[..], &[&version]].concat())
}

/// Both streams of a command that succeeds.
fn told(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

/// What a record says of a call: what, elements, type, root or peer, in place, tag, algorithm.
fn call(record: &CallRecord) -> (&str, u64, &str, Option<u32>, bool, u64, &str) {
    let (peer, algorithm) = (record.root.or(record.peer), record.algorithm.as_str());
    (&record.call, record.count, &record.dtype, peer, record.in_place, record.tag, algorithm)
}

#[test]
fn calls_of_the_vendor_s_library_are_in_the_trace_and_reach_it_untouched() {
    for double in RELEASES {
        let folder = Folder::new("calls");
        let recording = |command: &mut Command| {
            let recording = Recording::new();
            checked(command.env("DOUBLE_RECORD", recording.prefix()));
            recording.processes()
        };
        let mut expected = recording(&mut double.command("profiled", Way::Linked, &["1x2"]));
        let mut found = recording(&mut served(double, "1x2", &folder));
        found.iter_mut().for_each(|lines| assert_eq!(lines.remove(0), "ncclGetVersion depth=0 -> 0"));
        expected.sort();
        found.sort();
        assert_eq!(found, expected, "{double:?}");
        for rank in 0..2usize {
            let (other, is_last, trace) = (Some(1 - rank as u32), rank == 1, folder.trace(rank));
            let ring = "RING_SIMPLE";
            let mut calls = vec![
                ("all_reduce", 100, "float", None, false, 0, ring),
                ("all_gather", 400, "int8", None, true, 0, ring),
                ("reduce_scatter", 10, "int32", None, false, 0, ring),
                ("broadcast", 60, "int8", Some(1), false, 0, ring),
                ("reduce", 20, "double", Some(1), false, 0, ring),
                ("send", 5, "float", other, false, 0, ""),
                ("recv", 5, "float", other, false, 0, ""),
            ];
            if double == NCCL {
                calls.push(("all_reduce", 8, "float", None, false, 7, ring));
            }
            calls.push(("all_reduce", 3, "float", None, false, 0, ring));
            assert_eq!(trace.calls.iter().map(call).collect::<Vec<_>>(), calls, "{double:?}");
            for call in &trace.calls {
                assert_eq!((call.state, call.carrier.as_str(), call.nic_bytes), (CallState::Ended, "vendor", None));
                assert!(Some(call.accepted_ns) <= call.begun_ns && call.begun_ns <= call.ended_ns, "{call:?}");
                assert_eq!(call.rank, if call.nranks == 2 { rank as u32 } else { 0 });
            }
            assert_eq!((trace.calls[3].input_bytes > 0, trace.calls[4].output_bytes > 0), (is_last, is_last));
            assert_eq!(trace.comms[0].name, "world");
        }
        let keys: Vec<String> = [0, 1].map(|rank| folder.trace(rank).calls[0].comm.clone()).to_vec();
        assert_eq!(keys[0], keys[1], "ranks know their communicator by one key");
    }
}

/// The calls of a trace on communicators of this kind, each with its communicator's name.
fn on(trace: &CallTrace, companion: bool) -> Vec<(&str, &CallRecord)> {
    let comms = trace.comms.iter().filter(|comm| comm.companion == companion);
    comms
        .flat_map(|comm| {
            let calls = trace.calls.iter().filter(|call| call.comm == comm.key);
            calls.map(|call| (&*comm.name, call))
        })
        .collect()
}

#[test]
fn calls_in_two_levels_over_the_vendor_are_recorded_as_its_phases() {
    let folder = Folder::new("phases");
    told(served(NCCL, "2x2", &folder).envs(TWO_LEVEL));
    for rank in 0..4 {
        let trace = folder.trace(rank);
        let phases = on(&trace, true);
        assert!(phases.iter().all(|(comm, _)| comm.starts_with("strata-node") || comm.starts_with("strata-rail")));
        assert!(phases.iter().any(|(_, call)| call.call == "all_gather" && call.carrier == "vendor"));
        let others: Vec<_> = on(&trace, false).iter().map(|(_, call)| (call.call.as_str(), call.count)).collect();
        assert!(others.contains(&("broadcast", 60)) && !others.contains(&("all_reduce", 100)), "{others:?}");
    }
}

#[test]
fn calls_that_strata_carries_between_nodes_are_recorded_once() {
    for double in [NCCL, RCCL] {
        let folder = Folder::new("carried");
        let mut program = rails::served(double, "tcp", &["2x2", "4", "12", "4000"]);
        program.envs(TWO_LEVEL).env_remove("NCCL_PROFILER_PLUGIN");
        told(program.env("STRATA_TRACE", folder.0.join("t-%r.json")));
        for rank in 0..4 {
            let trace = folder.trace(rank);
            assert!(trace.comms.iter().all(|comm| !comm.name.starts_with("strata-")), "{:?}", trace.comms);
            assert!(trace.calls.iter().all(|call| call.state == CallState::Ended));
            let (own, others) = (on(&trace, true), on(&trace, false));
            let is_own = |call: &CallRecord| call.algorithm.starts_with("two_level") && call.carrier == "tcp";
            assert!(own.iter().any(|(_, call)| is_own(call)), "{own:?}");
            assert!(others.iter().all(|(_, call)| call.carrier == "vendor"));
            assert!(others.iter().any(|(_, call)| call.call == "broadcast"), "{others:?}");
        }
    }
}

#[test]
fn a_profiler_of_the_program_s_own_hears_both_and_a_trace_says_what_it_lacks() {
    let folder = Folder::new("both");
    let plugin = listening(7);
    let mut program = served(NCCL, "1x2", &folder);
    program.env("NCCL_PROFILER_PLUGIN", &plugin).env("PROFILER_LOG", folder.0.join("log"));
    let text = told(program.env("NCCL_DEBUG", "WARN"));
    let warnings =
        text.lines().filter(|line| line.contains("are not in the trace: the program has a profiler of its own"));
    assert_eq!(warnings.count(), 2, "one of each rank: {text}");
    let logs: Vec<String> = folder.logs().into_iter().filter(|log| log.contains("Coll")).collect();
    assert_eq!(logs.len(), 2);
    for log in logs {
        assert!(log.contains("Coll Broadcast 60 ncclInt8 1 seq=1 RING"), "the vendor's: {log}");
    }
    assert_eq!(folder.trace(0).calls, [], "Strata has run nothing");
    let folder = Folder::new("both-carried");
    let mut program = rails::served(NCCL, "tcp", &["2x2", "4", "12", "4000"]);
    program.envs(TWO_LEVEL).env("STRATA_TRACE", folder.0.join("t-%r.json"));
    told(program.env("NCCL_PROFILER_PLUGIN", &plugin).env("PROFILER_LOG", folder.0.join("log")));
    let logs: Vec<String> = folder.logs().into_iter().filter(|log| log.contains("Coll")).collect();
    assert_eq!(logs.len(), 4);
    for (rank, log) in logs.iter().enumerate() {
        assert!(log.contains(" two_level") && log.contains(" RING"), "Strata's and the vendor's: {log}");
        let trace = folder.trace(rank);
        assert!(!trace.calls.is_empty() && trace.calls.iter().all(|call| call.carrier == "tcp"));
    }
}

#[test]
fn an_old_library_is_left_alone_and_nothing_is_named_without_records() {
    let folder = Folder::new("old");
    let text = told(served(OLD_NCCL, "1x2", &folder).env("NCCL_DEBUG", "WARN"));
    assert!(text.contains("are not in the trace: only releases from 2.27.3 on"), "{text}");
    let text = told(served(NCCL, "1x2", &folder).env_remove("STRATA_TRACE").env("NCCL_DEBUG", "WARN"));
    assert!(!text.contains("profiler"), "{text}");
}
