//! Traces of real programs: a C program notes the calls that it makes, and its traces have these calls and no others. `strata trace`
//! merges them, sums them up, and makes a workload that runs; `strata tune` measures what they have.

use crate::built::{library_dir, root, Compiler};
use crate::launched::{lines, on_all, outcome, said, strata, WORLD};
use crate::pytorch::python;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use strata::records::{chrome, CallRecord, CallState, CallTrace};

/// A folder for one test's files.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("traces-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    pub fn trace(&self, name: &str) -> CallTrace {
        let bytes = std::fs::read(self.file(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        chrome::read(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// What a rank has noted of its calls.
    pub fn made(&self, rank: usize) -> Vec<Made> {
        let text = std::fs::read_to_string(self.file(&format!("made.{rank}"))).unwrap();
        text.lines().map(Made::parse).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A call, by what the program knows of it: communicator, what, count, type, operation, root or peer, in place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Made(pub String, pub String, pub u64, pub String, pub String, pub i64, pub bool);

impl Made {
    fn parse(line: &str) -> Made {
        let words: Vec<&str> = line.split(' ').collect();
        let [comm, call, count, dtype, op, peer, in_place] = words[..] else { panic!("{line}") };
        let op = op.trim_matches('-').to_string();
        let number = |text: &str| text.parse::<i64>().unwrap();
        let texts = [comm, call, dtype].map(str::to_string);
        let [comm, call, dtype] = texts;
        Made(comm, call, number(count) as u64, dtype, op, number(peer), in_place == "1")
    }

    /// The same of a record, with the name of its communicator.
    fn of(call: &CallRecord, comm: &str) -> Made {
        let peer = call.root.or(call.peer).map_or(-1, i64::from);
        let (comm, dtype, op) = (comm.to_string(), call.dtype.clone(), call.op.clone());
        Made(comm, call.call.clone(), call.count, dtype, op, peer, call.in_place)
    }
}

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    let source = std::fs::read_to_string(root().join("shim-tests/c/traced.c")).unwrap();
    let dir = library_dir();
    let flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", "-L", dir.to_str().unwrap(), "-lnccl"];
    Compiler::new("c").compile(&source, &flags)
});

/// The program on four ranks of two nodes.
pub fn launched(words: &[&str]) -> Command {
    let mut command = strata();
    command.args(WORLD).arg("--").arg(&*PROGRAM).args(words).env("LD_LIBRARY_PATH", library_dir());
    command
}

/// The program by itself.
pub fn alone(words: &[&str]) -> Command {
    let mut command = Command::new(&*PROGRAM);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("STRATA_")) {
        command.env_remove(name);
    }
    command.args(words).env("LD_LIBRARY_PATH", library_dir()).env("STRATA_NCCL_LIB", "none");
    command
}

/// What each communicator is called by the program, by its number of ranks.
fn by_comm(calls: &[CallRecord], nranks: &[(u32, &str)]) -> BTreeMap<String, Vec<Made>> {
    let mut made: BTreeMap<String, Vec<Made>> = BTreeMap::new();
    for call in calls {
        let (_, name) = nranks.iter().find(|(ranks, _)| *ranks == call.nranks).expect("a known communicator");
        made.entry(name.to_string()).or_default().push(Made::of(call, name));
    }
    made
}

fn sorted_by_comm(made: Vec<Made>) -> BTreeMap<String, Vec<Made>> {
    let mut sorted: BTreeMap<String, Vec<Made>> = BTreeMap::new();
    made.into_iter().for_each(|made| sorted.entry(made.0.clone()).or_default().push(made));
    sorted
}

#[test]
fn a_trace_has_the_calls_that_were_made_and_no_others() {
    let folder = Folder::new("calls");
    let names = format!("{},{}", folder.file("t-%r.json"), folder.file("t.csv"));
    said(launched(&["calls", &folder.file("made")]).env("STRATA_TRACE", names));
    let comms = [(4, "world"), (3, "host"), (2, "half"), (1, "alone")];
    for rank in 0..4 {
        let trace = folder.trace(&format!("t-{rank}.json"));
        let mut made = sorted_by_comm(folder.made(rank));
        // An average of one rank's is a sum.
        made.get_mut("alone").unwrap().iter_mut().filter(|made| made.4 == "avg").for_each(|made| made.4 = "sum".into());
        assert_eq!(by_comm(&trace.calls, &comms), made, "rank {rank}");
        for call in &trace.calls {
            assert_eq!(call.state, CallState::Ended, "{call:?}");
            let times = (Some(call.accepted_ns), call.begun_ns, call.ended_ns);
            assert!(times.0 <= times.1 && times.1 <= times.2 && times.1.is_some(), "{call:?}");
            let is_chosen = call.nranks > 1 && !call.is_message();
            assert!(!is_chosen || !call.algorithm.is_empty(), "{call:?}");
            assert_eq!(call.carrier, if call.nranks == 1 { "none" } else { "tcp" }, "{call:?}");
            let far = call.peer.is_some_and(|peer| call.call == "send" && is_far(call, peer));
            let bytes = call.count * 4;
            assert!(!call.is_message() || call.nic_bytes == Some(if far { bytes } else { 0 }), "{call:?}");
        }
        let sent: u64 = trace.calls.iter().filter(|call| !call.is_message()).filter_map(|call| call.nic_bytes).sum();
        assert!(sent > 0, "collectives between nodes send something");
        for comm in &trace.comms {
            let members =
                [(4, "0-3"), (3, "0-2"), (2, if rank % 2 == 0 { "0,2" } else { "1,3" }), (1, &rank.to_string())];
            let (_, members) = members.into_iter().find(|(nranks, _)| *nranks == comm.nranks).unwrap();
            assert_eq!((comm.members.as_str(), comm.process as usize), (members, rank));
        }
        let numbers: Vec<u64> = collectives(&trace, 4).map(|call| call.number).collect();
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
        let csv = std::fs::read_to_string(folder.file(&format!("t.{rank}.csv"))).unwrap();
        assert_eq!(csv.lines().count(), trace.calls.len() + 1);
    }
    let files = std::fs::read_dir(&folder.0).unwrap().count();
    assert_eq!(files, 12, "made, json, csv: a forked child writes none");
}

/// Whether a message of rank `rank` of this communicator goes to another node: ranks 0 and 1 share one, 2 and 3; of the halves
/// each rank has one.
fn is_far(call: &CallRecord, peer: u32) -> bool {
    match call.nranks {
        3 | 4 => call.rank / 2 != peer / 2,
        2 => call.rank != peer,
        _ => false,
    }
}

fn collectives(trace: &CallTrace, nranks: u32) -> impl Iterator<Item = &CallRecord> {
    trace.calls.iter().filter(move |call| call.nranks == nranks && !call.is_message())
}

#[test]
fn a_failure_is_written_by_itself_with_the_awaited_rank() {
    let folder = Folder::new("fails");
    let mut program = launched(&["fails", &folder.file("made")]);
    let (text, _) = outcome(program.env("STRATA_TRACE", folder.file("t-%r.json")).env("STRATA_TIMEOUT_MS", "20000"));
    for rank in [0, 2, 3] {
        let trace = folder.trace(&format!("t-{rank}.json"));
        let told: Vec<_> = trace.calls.iter().map(|call| (call.call.as_str(), call.state)).collect();
        let ended = ("all_reduce", CallState::Ended);
        assert_eq!(told, [ended, ended, ended, ("all_gather", CallState::Failed)], "rank {rank}: {text}");
        assert!(!trace.calls[3].algorithm.is_empty());
        let dump = std::fs::read(folder.file(&format!("flight/nccl_trace_rank_{rank}"))).unwrap();
        assert!(dump.starts_with(b"\x80\x02") && dump.ends_with(b"."));
        let has = |text: &[u8]| dump.windows(text.len()).any(|window| window == text);
        assert!(has(b"nccl:_all_gather_base") && has(b"started") && has(b"completed"), "rank {rank}");
    }
    let awaited = folder.trace("t-0.json").calls[3].awaited;
    assert_eq!(awaited, Some(1), "rank 0 shares a node with it");
    assert!(!Path::new(&folder.file("t-1.json")).exists(), "it was killed");
}

#[test]
fn pytorch_s_analyser_names_the_rank_that_has_called_something_else() {
    let analyser = "import torch.distributed.flight_recorder.fr_trace as fr; fr.main()";
    let Some(python) = python("pytorch_s_analyser_names_the_rank_that_has_called_something_else") else { return };
    let folder = Folder::new("torch");
    outcome(launched(&["differs", &folder.file("made")]).env("STRATA_TRACE", folder.file("t-%r.json")));
    let output = Command::new(&python)
        .args(["-c", analyser, "--prefix", "nccl_trace_rank_", &folder.file("flight")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("Collective sequence number: 4 has errors"), "{text}");
    assert!(text.contains("Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH"), "{text}");
    assert!(!text.contains("sequence number: 3") && !text.contains("we missed FR dumps"), "{text}");
}

#[test]
fn a_trace_that_cannot_be_written_is_one_warning_and_calls_go_on() {
    let folder = Folder::new("unwritten");
    let mut program = launched(&["calls", &folder.file("made")]);
    let text = said(program.env("STRATA_TRACE", folder.file("missing/t-%r.json")));
    let warnings = lines(&text, "the trace of calls cannot be written");
    assert_eq!(warnings.len(), 4, "one of each rank: {text}");
    assert!(warnings.iter().all(|line| line.contains("No such file or directory")), "{text}");
    let mut program = launched(&["many", &folder.file("made"), "3"]);
    let text = said(program.env("STRATA_TRACE", folder.file("t-%r.png")));
    assert!(text.contains("t-%r.png is ignored: a trace's name ends in .json"), "{text}");
}

#[test]
fn a_trace_that_says_nothing_of_use_is_told_with_its_file() {
    let folder = Folder::new("malformed");
    let empty = r#"{"strata":1,"processes":[],"comms":[],"traceEvents":[]}"#;
    for (name, text, why) in [
        ("missing", None, "No such file"),
        ("cut", Some("{\"strata\":1,\"trace"), "EOF"),
        ("other", Some("{\"traceEvents\":[]}"), "not one of Strata's"),
        ("empty", Some(empty), "has no calls that a workload can have"),
    ] {
        let file = folder.file(&format!("{name}.json"));
        text.iter().for_each(|text| std::fs::write(&file, text).unwrap());
        let output = folder.file("made.toml");
        let mut command = strata();
        command.args(["trace", "workload", &file, "-o", &output]);
        let (said, succeeded) = outcome(&mut command);
        assert!(said.contains(&file) && said.contains(why) && !said.contains("panicked"), "{name}: {said}");
        assert!(!succeeded && !Path::new(&output).exists(), "{name}: {said}");
    }
}

#[test]
fn a_full_ring_keeps_the_newest_calls() {
    let folder = Folder::new("ring");
    let mut program = launched(&["many", &folder.file("made"), "1000"]);
    said(program.env("STRATA_TRACE", folder.file("t.json")).env("STRATA_TRACE_RECORDS", "64"));
    for rank in 0..4 {
        let trace = folder.trace(&format!("t.{rank}.json"));
        let numbers: Vec<u64> = trace.calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers, (937..=1000).collect::<Vec<_>>());
        assert_eq!(trace.processes[0].overwritten, 936);
    }
}

#[test]
fn threads_of_one_process_share_a_trace_and_are_ranks_of_their_own_in_it() {
    let folder = Folder::new("threads");
    let mut program = alone(&["threads", &folder.file("made")]);
    said(program.env("STRATA_TRACE", folder.file("t.json")));
    let trace = folder.trace("t.json");
    for rank in 0..3 {
        let calls: Vec<CallRecord> = trace.calls.iter().filter(|call| call.rank == rank).cloned().collect();
        assert_eq!(by_comm(&calls, &[(3, "world")]), sorted_by_comm(folder.made(rank as usize)), "rank {rank}");
        let index = trace.index();
        assert!(calls.iter().all(|call| index.process_of(call) == rank && call.state == CallState::Ended));
    }
}

#[test]
fn a_fork_with_communicators_of_its_own_leaves_its_parent_s_trace_alone() {
    let folder = Folder::new("forks");
    said(alone(&["forks", &folder.file("child")]).env("STRATA_TRACE", folder.file("t.json")));
    let child = std::fs::read_to_string(folder.file("child")).unwrap();
    let calls = |name: &str| folder.trace(name).calls.iter().map(|call| call.call.clone()).collect::<Vec<_>>();
    assert_eq!(calls("t.json"), ["all_reduce"; 5]);
    assert_eq!(calls(&format!("t.{child}.json")), ["broadcast"]);
}

#[test]
fn nothing_is_written_where_nothing_is_asked_for() {
    let folder = Folder::new("off");
    said(&mut launched(&["many", &folder.file("made"), "10"]));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 4, "only what the program writes itself");
}

#[test]
fn traces_are_merged_summed_up_and_replayed() {
    let folder = Folder::new("tools");
    said(launched(&["grid", &folder.file("made")]).env("STRATA_TRACE", folder.file("t-%r.json")));
    let files: Vec<String> = (0..4).map(|rank| folder.file(&format!("t-{rank}.json"))).collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let trace = |what: &str, more: &[&str]| {
        let mut command = strata();
        command.args([&["trace", what][..], more, &files].concat());
        command
    };
    let merged = folder.file("all.json");
    let told = said(&mut trace("merge", &["-o", &merged]));
    let all = folder.trace("all.json");
    let calls: usize = (0..4).map(|rank| folder.made(rank).len()).sum();
    assert!(told.contains(&format!("# {calls} calls of 4 processes in {merged}")), "{told}");
    assert_eq!((all.calls.len(), all.processes.len(), all.comms.len()), (calls, 4, 12));
    // Processes of one host have one clock: of an all-reduce no rank has ended before all have begun.
    for number in 1..=3 {
        let of_call = || collectives(&all, 4).filter(|call| call.number == number);
        assert_eq!(of_call().count(), 4);
        let begun = of_call().filter_map(|call| call.begun_ns).max().unwrap();
        let ended = of_call().filter_map(|call| call.ended_ns).min().unwrap();
        assert!(begun < ended + 2_000_000, "{number}: {begun} {ended}");
    }
    let summary = said(&mut trace("summary", &[]));
    let of_merged = said(strata().args(["trace", "summary", &merged]));
    assert_eq!(summary.lines().next(), of_merged.lines().next());
    assert!(summary.contains(&format!("# {calls} calls that have ended, of 4 ranks")), "{summary}");
    let reduce = lines(&summary, "all_reduce");
    assert!(reduce.iter().any(|line| line.contains("256 B")), "{summary}");
    assert!(summary.contains("others waited(ms)"), "{summary}");
    let workload = folder.file("program.toml");
    let told = said(&mut trace("workload", &["--no-compute", "-o", &workload]));
    assert!(told.contains(" of rank 0 in "), "{told}");
    let replayed = said(&mut on_all(&["perf", "--workload", &workload, "-n", "1", "-w", "0"]));
    assert!(replayed.contains("Calls of a program on 4 ranks, recorded"), "{replayed}");
    let (text, succeeded) = outcome(strata().args(["trace", "summary", files[0], files[0]]));
    assert!(!succeeded && text.contains("are traces of the same process"), "{text}");
    let (text, succeeded) = outcome(strata().args(["trace", "summary", &merged, files[0]]));
    assert!(!succeeded && text.contains("are traces of the same process"), "{text}");
    let (text, succeeded) = outcome(strata().args(["trace", "summary", &workload]));
    assert!(!succeeded && text.contains("cannot read the trace"), "{text}");
}

#[test]
fn only_what_a_program_calls_is_tuned() {
    let folder = Folder::new("tune");
    said(launched(&["many", &folder.file("made"), "5"]).env("STRATA_TRACE", folder.file("t-%r.json")));
    let (table, from) = (folder.file("table.toml"), folder.file("t-0.json"));
    let told = said(&mut on_all(&["tune", "-o", &table, "--from", &from, "--budget", "4s"]));
    assert!(told.contains("# 1 row in"), "{told}");
    let rows = strata::selection::table::Table::load(Path::new(&table)).unwrap().rows;
    let rows: Vec<_> = rows.iter().map(|row| (row.collective.as_str(), row.bytes())).collect();
    assert_eq!(rows, [("all_reduce", 64)]);
    let (text, succeeded) = outcome(&mut on_all(&["tune", "-o", &table, "--from", &folder.file("none.json")]));
    assert!(!succeeded && text.contains("cannot read the trace"), "{text}");
}
