//! Profilers of a program's own, by NCCL's interface: a C program notes the calls that it makes, and a plugin in C (c/profiler.c) of each
//! version hears these calls and no others, each with its parents and its end. What is wrong with a plugin is one warning.

use crate::built::{root, Compiler};
use crate::launched::{lines, said};
use crate::traces::{alone, launched, Folder, Made};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Groups, collectives, messages, channels, and, where the interface has them, calls as they are made.
const ALL: &str = "1863";

/// The plugin, compiled with this flag, under a name of its own.
fn plugin(flags: &[&str]) -> PathBuf {
    static MADE: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap();
    made.entry(flags.concat())
        .or_insert_with(|| {
            let source = std::fs::read_to_string(root().join("shim-tests/c/profiler.c")).unwrap();
            let shared = ["-std=gnu11", "-Wall", "-Wextra", "-Wno-unused", "-shared", "-fPIC", "-g", "-pthread"];
            Compiler::new("c").compile(&source, &[&shared[..], flags].concat())
        })
        .clone()
}

fn of_version(version: u32) -> PathBuf {
    plugin(&[&format!("-DPROFILER_VERSION={version}")])
}

/// An event that a plugin has heard begin.
#[derive(Debug, Clone, Default)]
struct Heard {
    comm: u32,
    parent: u32,
    words: Vec<String>,
    ended_ns: Option<u64>,
    states: Vec<u32>,
}

/// What the plugin of a process has heard.
#[derive(Debug, Default)]
struct Log {
    /// By context: rank, ranks, nodes.
    comms: BTreeMap<u32, [u32; 3]>,
    events: BTreeMap<u32, Heard>,
    finalized: Vec<u32>,
    order: Vec<u32>,
}

impl Log {
    fn parse(text: &str) -> Log {
        let mut log = Log::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |index: usize| words[index].parse::<u32>().unwrap();
            let value = |index: usize| words[index].split_once('=').unwrap().1.parse::<u32>().unwrap();
            match words[0] {
                "init" => drop(log.comms.insert(number(1), [number(2), number(3), number(4)])),
                "begin" => {
                    let words = words[5..].iter().map(|word| word.to_string()).collect();
                    log.order.push(number(1));
                    let heard = Heard { comm: value(2), parent: value(4), words, ..Heard::default() };
                    log.events.insert(number(1), heard);
                }
                "state" => log.events.get_mut(&number(1)).unwrap().states.push(number(2)),
                "end" => log.events.get_mut(&number(1)).unwrap().ended_ns = Some(words[2].parse().unwrap()),
                "finalize" => log.finalized.push(number(1)),
                _ => panic!("{line}"),
            }
        }
        log
    }

    /// Those of all processes that wrote behind this prefix.
    fn all(folder: &Folder, prefix: &str) -> Vec<Log> {
        let files = std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().path());
        let is_log = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(prefix);
        files.filter(is_log).map(|path| Log::parse(&std::fs::read_to_string(path).unwrap())).collect()
    }

    fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Heard> {
        let heard = self.order.iter().map(|number| &self.events[number]);
        heard.filter(move |heard| heard.words[0] == kind)
    }

    /// The calls of a context in the order in which they began, as a program notes them, without what the interface does not tell.
    fn calls(&self, comm: u32) -> Vec<(String, u64, String, i64)> {
        let heard = self.order.iter().map(|number| &self.events[number]).filter(|heard| heard.comm == comm);
        heard.filter_map(Heard::call).collect()
    }

    /// Every event has ended, and its parents are those of the version.
    fn check(&self, version: u32) {
        for (number, heard) in &self.events {
            assert!(heard.ended_ns.is_some(), "{number}: {heard:?}");
            let parent = self.events.get(&heard.parent).map(|parent| parent.words[0].as_str());
            let expected = match heard.words[0].as_str() {
                "Group" | "GroupApi" => None,
                "KernelCh" if parent == Some("P2p") => Some("P2p"),
                "KernelCh" => Some("Coll"),
                "CollApi" | "P2pApi" => Some("GroupApi"),
                "Coll" if version >= 5 => Some("CollApi"),
                "P2p" if version >= 5 => Some("P2pApi"),
                _ => Some("Group"),
            };
            assert_eq!(parent, expected, "version {version}: {heard:?}");
            let states: &[u32] = match heard.words[0].as_str() {
                "KernelCh" if version >= 4 => &[22],
                "GroupApi" => &[23, 24],
                _ => &[],
            };
            assert_eq!(heard.states, states, "version {version}: {heard:?}");
            if version >= 5 && ["Coll", "P2p"].contains(&heard.words[0].as_str()) {
                let group = heard.words.iter().find_map(|word| word.strip_prefix("group=")).unwrap();
                assert_eq!(self.events[&group.parse().unwrap()].words[0], "Group");
            }
        }
        let calls = self.of_kind("Coll").count() + self.of_kind("P2p").count();
        assert_eq!(self.of_kind("KernelCh").count(), if version >= 3 { calls } else { 0 });
        let made = self.of_kind("CollApi").count() + self.of_kind("P2pApi").count();
        assert_eq!(made, if version >= 5 { calls } else { 0 });
    }
}

impl Heard {
    fn call(&self) -> Option<(String, u64, String, i64)> {
        let [kind, function, count, datatype, peer, ..] = &self.words[..] else { return None };
        let known = [
            ("AllReduce", "all_reduce"),
            ("AllGather", "all_gather"),
            ("ReduceScatter", "reduce_scatter"),
            ("Broadcast", "broadcast"),
            ("Reduce", "reduce"),
            ("AlltoAll", "all_to_all"),
            ("Gather", "gather"),
            ("Scatter", "scatter"),
            ("Send", "send"),
            ("Recv", "recv"),
        ];
        let (_, call) = known.into_iter().find(|(name, _)| name == function)?;
        let has_peer = kind == "P2p" || ["broadcast", "reduce", "gather", "scatter"].contains(&call);
        let calls = ["Coll", "P2p"].contains(&kind.as_str());
        calls.then(|| {
            (
                call.to_string(),
                count.parse().unwrap(),
                datatype.clone(),
                if has_peer { peer.parse().unwrap() } else { -1 },
            )
        })
    }
}

/// The same of what the program has noted.
fn noted(made: &Made) -> (String, u64, String, i64) {
    let types = [
        ("int8", "ncclInt8"),
        ("uint8", "ncclUint8"),
        ("int32", "ncclInt32"),
        ("int64", "ncclInt64"),
        ("half", "ncclFloat16"),
        ("float", "ncclFloat32"),
        ("double", "ncclFloat64"),
    ];
    let (_, datatype) = types.into_iter().find(|(name, _)| *name == made.3).unwrap();
    (made.1.clone(), made.2, datatype.to_string(), made.5)
}

#[test]
fn a_profiler_of_each_version_hears_the_calls_that_are_made_and_no_others() {
    let folder = Folder::new("profilers");
    for version in 2..=7 {
        let log = format!("v{version}");
        let mut program = alone(&["threads", &folder.file("made")]);
        program.env("NCCL_PROFILER_PLUGIN", of_version(version)).env("PROFILER_MASK", ALL);
        said(program.env("PROFILER_LOG", folder.file(&log)));
        let logs = Log::all(&folder, &log);
        assert_eq!(logs.len(), 1, "one process");
        logs[0].check(version);
        let mut heard: Vec<_> = logs[0].comms.keys().map(|comm| logs[0].calls(*comm)).collect();
        let made = |rank| folder.made(rank).iter().map(noted).collect::<Vec<_>>();
        let mut made: Vec<_> = (0..3).map(made).collect();
        heard.sort();
        made.sort();
        assert_eq!(heard, made, "version {version}");
        assert_eq!(logs[0].finalized.len(), 3);
        if version >= 4 {
            let mut comms: Vec<[u32; 3]> = logs[0].comms.values().copied().collect();
            comms.sort();
            assert_eq!(comms, [[0, 3, 1], [1, 3, 1], [2, 3, 1]]);
        }
        let chosen = logs[0].of_kind("Coll").filter(|heard| heard.words[6] != "-").count();
        assert_eq!(chosen, logs[0].of_kind("Coll").count(), "every collective has its algorithm");
    }
}

#[test]
fn groups_streams_and_messages_between_processes_are_heard_beside_a_trace() {
    let folder = Folder::new("profiled");
    for version in [4, 5] {
        let (log, trace) = (format!("v{version}"), format!("t{version}-%r.json"));
        let mut program = launched(&["calls", &folder.file("made")]);
        program.env("NCCL_PROFILER_PLUGIN", of_version(version)).env("PROFILER_MASK", ALL);
        said(program.env("PROFILER_LOG", folder.file(&log)).env("STRATA_TRACE", folder.file(&trace)));
        let logs: Vec<Log> = Log::all(&folder, &log).into_iter().filter(|log| !log.events.is_empty()).collect();
        assert_eq!(logs.len(), 4);
        let mut heard: Vec<_> = Vec::new();
        for log in &logs {
            log.check(version);
            log.comms.keys().for_each(|comm| heard.extend(log.calls(*comm)));
        }
        let mut made: Vec<_> = (0..4).flat_map(|rank| folder.made(rank)).map(|made| noted(&made)).collect();
        heard.sort();
        made.sort();
        assert_eq!(heard, made, "version {version}");
        let traced: usize = (0..4).map(|rank| folder.trace(&format!("t{version}-{rank}.json")).calls.len()).sum();
        assert_eq!(traced, made.len());
    }
}

#[test]
fn a_profiler_hears_what_it_asks_for_and_is_found_as_nccl_finds_it() {
    let folder = Folder::new("found");
    let version_5 = of_version(5);
    for name in ["libnccl-profiler.so", "libnccl-profiler-mine.so"] {
        std::fs::copy(&version_5, folder.file(name)).unwrap();
    }
    let cases = [(None, true), (Some("mine"), true), (Some("libnccl-profiler-mine.so"), true), (Some("none"), false)];
    for (index, (name, is_heard)) in cases.into_iter().enumerate() {
        let mut program = alone(&["threads", &folder.file("made")]);
        if let Some(name) = name {
            program.env("NCCL_PROFILER_PLUGIN", name);
        }
        let path = format!("{}:{}", crate::built::library_dir().display(), folder.0.display());
        let log = format!("log{index}");
        said(program.env("LD_LIBRARY_PATH", path).env("PROFILER_LOG", folder.file(&log)).env("PROFILER_MASK", "4"));
        let logs = Log::all(&folder, &log);
        assert_eq!(logs.len(), usize::from(is_heard), "{name:?}");
        for log in logs {
            let kinds: std::collections::BTreeSet<_> =
                log.events.values().map(|heard| heard.words[0].as_str()).collect();
            assert_eq!(kinds.into_iter().collect::<Vec<_>>(), ["Group", "GroupApi", "P2p", "P2pApi"]);
        }
    }
}

#[test]
fn what_is_wrong_with_a_profiler_is_one_warning_and_calls_go_on() {
    let folder = Folder::new("wrong");
    let path = |path: PathBuf| path.to_string_lossy().into_owned();
    let cases = [
        ("/nowhere/profiler.so".to_string(), "cannot open shared object file"),
        (path(plugin(&["-DLACKS"])), "has no table from ncclProfiler_v2 to ncclProfiler_v7"),
        (path(plugin(&["-DNO_STOP"])), "lacks init, startEvent or stopEvent"),
        (path(plugin(&["-DREFUSES"])), "init returns 3"),
    ];
    for (name, why) in cases {
        assert!(name.starts_with("/nowhere") || Path::new(&name).exists());
        let mut program = alone(&["threads", &folder.file("made")]);
        let output = program.env("NCCL_PROFILER_PLUGIN", &name).env("NCCL_DEBUG", "WARN").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{name}: {text}");
        let warnings = lines(&text, "calls of Strata's go on without");
        assert!(warnings.len() == 1 && warnings[0].contains(why), "{name}: {text}");
    }
}
