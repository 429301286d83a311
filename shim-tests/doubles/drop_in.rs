//! Strata in front of doubles of the vendors' libraries, in programs that come by it in every way: what is the vendor's
//! reaches it as the program made it, what is Strata's runs in two levels, and results and errors are the same.
//!
//! Each program runs on the double alone first. How the double and the programs work, `shim-tests/doubles/double.rs` tests.

use crate::built::{checked, library, library_dir};
use crate::vendor::{cuda_dir, Double, Recording, Way, NCCL, OLD_NCCL, OLD_RCCL, RCCL};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How a program comes by Strata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Through {
    /// It is linked with NCCL, and finds Strata in its place.
    Linked,
    /// Strata is preloaded.
    Preloaded,
    /// It opens NCCL by its name, and finds Strata in its place.
    ByName,
    /// It opens NCCL by its name, and Strata, which is preloaded, answers.
    ByNamePreloaded,
    /// Strata is preloaded, and the vendor's library is mapped before anything calls it.
    BothPreloaded,
}

use Through::{BothPreloaded, ByName, ByNamePreloaded, Linked, Preloaded};

/// The collectives that Strata has, in two levels even where they are small.
const TWO_LEVEL: [(&str, &str); 3] = [
    ("STRATA_ALLGATHER_ALGO", "two_level"),
    ("STRATA_REDUCESCATTER_ALGO", "two_level"),
    ("STRATA_ALLREDUCE_ALGO", "two_level"),
];

/// A program on the double alone.
fn alone(double: Double, name: &str, arguments: &[&str]) -> Command {
    double.command(name, Way::Linked, arguments)
}

/// A program with Strata in front of the double.
fn served(double: Double, through: Through, name: &str, arguments: &[&str]) -> Command {
    let way = if matches!(through, ByName | ByNamePreloaded) { Way::ByName } else { Way::Linked };
    let mut command = double.command(name, way, arguments);
    match through {
        Linked | ByName => command.env("LD_LIBRARY_PATH", library_dir()),
        Preloaded | ByNamePreloaded => command.env("LD_PRELOAD", library()),
        BothPreloaded => command.env("LD_PRELOAD", format!("{} {}", library().display(), double.library().display())),
    };
    command.env("STRATA_NCCL_LIB", double.library());
    command
}

/// What a command prints, and what reaches the vendor's library.
fn recorded(command: &mut Command) -> (String, Vec<Vec<String>>) {
    let recording = Recording::new();
    let output = checked(command.env("DOUBLE_RECORD", recording.prefix()));
    (output, recording.processes())
}

/// The same without what Strata itself asks each time it opens a library: its release.
fn handed_on(command: &mut Command) -> (String, Vec<Vec<String>>) {
    let (output, mut processes) = recorded(command);
    for lines in &mut processes {
        assert_eq!(lines.remove(0), "ncclGetVersion depth=0 -> 0");
    }
    (output, processes)
}

/// Nothing of what was made is left, and so many communicators of Strata's were made.
fn nothing_is_left(lines: &[String]) -> bool {
    let last = lines.last().unwrap();
    last.starts_with("exit comms=0 ") && last.ends_with(" bytes=0 redops=0 registrations=0 windows=0")
}

/// Whether anything of Strata's own ran.
fn has_levels(lines: &[String]) -> bool {
    lines.iter().any(|line| line.starts_with("launch") && line.contains(" comm=strata-"))
}

/// The same where the library, an old one, takes no names: of the program there is one communicator.
fn has_nameless_levels(lines: &[String]) -> bool {
    lines.iter().any(|line| line.starts_with("launch") && !line.contains(" comm=comm0 "))
}

/// A command that may fail in part: what it prints to both.
fn told(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    (out, err)
}

#[test]
fn random_calls_in_two_levels_give_what_the_vendor_s_library_gives() {
    let cases: [(&str, &str, &str, &[Through]); 9] = [
        ("2x2", "1", "1", &[Linked, Preloaded, ByName, ByNamePreloaded, BothPreloaded]),
        ("3x2", "2", "3", &[Linked, Preloaded]),
        ("2x4", "3", "1", &[ByName]),
        ("4x2", "4", "3", &[BothPreloaded]),
        ("2x3", "5", "3", &[ByName]),
        ("rr3x2", "6", "1", &[Linked]),
        ("rr2x3", "7", "1", &[Preloaded]),
        ("3+1", "8", "1", &[Linked]),
        ("5x1", "9", "1", &[Preloaded]),
    ];
    for (grid, seed, threads, ways) in cases {
        let arguments = [grid, seed, "50", threads];
        let expected = checked(&mut alone(NCCL, "differential", &arguments));
        for &way in ways {
            let (output, processes) = recorded(served(NCCL, way, "differential", &arguments).envs(TWO_LEVEL));
            assert_eq!(output, expected, "{grid} {way:?}");
            // Even nodes of several ranks, in the world or in a half of it.
            let expects = !["3+1", "5x1"].contains(&grid);
            for lines in processes {
                assert_eq!(has_levels(&lines), expects, "{grid} {way:?}");
                assert!(nothing_is_left(&lines), "{}", lines.last().unwrap());
            }
        }
    }
}

/// A group whose calls do not all fit into the scratch memory, and single calls that do not fit, are partly the vendor's.
#[test]
fn calls_that_do_not_fit_into_scratch_memory_are_the_vendor_s() {
    let arguments = ["2x2", "14", "150", "1"];
    let expected = checked(&mut alone(NCCL, "differential", &arguments));
    let run = |bytes: &str| {
        let mut command = served(NCCL, Linked, "differential", &arguments);
        recorded(command.envs(TWO_LEVEL).env("STRATA_VENDOR_SCRATCH_BYTES", bytes))
    };
    let (plenty, little) = (run("1000000000"), run("20000"));
    assert!(plenty.0 == expected && little.0 == expected);
    let own = |lines: &[String]| launches(lines).iter().map(|line| line.matches("strata-").count()).sum::<usize>();
    let (plenty, little) = (own(&plenty.1[0]), own(&little.1[0]));
    assert!(0 < little && little < plenty, "{little} of {plenty}");
    // There is room for the parts of one all-gather of a group, not for those of two.
    let mut command = served(NCCL, Linked, "nodes", &["2x2"]);
    let (_, processes) = recorded(command.envs(TWO_LEVEL).env("STRATA_VENDOR_SCRATCH_BYTES", "600"));
    let halves = |line: &String| line.contains("AllGather world 1 | ") && line.contains("AllGather strata-rail0 1");
    assert!(launches(&processes[0]).iter().any(halves), "{:#?}", launches(&processes[0]));
}

#[test]
fn other_releases_and_rccl_are_served_alike() {
    for (double, way) in [(OLD_NCCL, Linked), (OLD_NCCL, BothPreloaded), (RCCL, Preloaded), (OLD_RCCL, Preloaded)] {
        for (grid, seed, threads) in [("2x2", "11", "1"), ("3x2", "12", "2")] {
            let arguments = [grid, seed, "40", threads];
            let expected = checked(&mut alone(double, "differential", &arguments));
            let (output, processes) = recorded(served(double, way, "differential", &arguments).envs(TWO_LEVEL));
            assert_eq!(output, expected, "{double:?} {grid}");
            for lines in processes {
                // Older releases give their communicators no names.
                let splits = lines.iter().filter(|line| line.starts_with("ncclCommSplit")).count();
                assert!(splits > 6 && nothing_is_left(&lines), "{double:?} {grid}: {splits} {:?}", lines.last());
                // Nor do they take more options than they know.
                let named = double.version >= 22703;
                let options = if named { "size=72 version=22703" } else { "size=48 version=21801" };
                assert!(lines.iter().any(|line| line.contains(&format!("config({options} blocking=1"))), "{double:?}");
            }
        }
    }
}

#[test]
fn what_strata_leaves_alone_reaches_the_vendor_call_by_call() {
    const VENDOR_ONLY: (&str, &str) = ("STRATA_VENDOR_ONLY", "allgather,reducescatter,allreduce");
    type Case = (&'static str, Through, &'static [(&'static str, &'static str)]);
    let cases: [Case; 7] = [
        ("2x2", Linked, &[]),
        ("3x2", Preloaded, &[]),
        ("2x2", BothPreloaded, &[("STRATA_DISABLE", "1")]),
        ("rr3x2", ByName, &[VENDOR_ONLY]),
        ("2x2", ByNamePreloaded, &[("NCCL_ALGO", "Ring")]),
        ("3+1", Linked, &TWO_LEVEL),
        ("1x4", Preloaded, &TWO_LEVEL),
    ];
    for (grid, through, settings) in cases {
        let arguments = [grid, "21", "50", "1"];
        let expected = recorded(&mut alone(NCCL, "differential", &arguments));
        let mut command = served(NCCL, through, "differential", &arguments);
        if settings.first().is_some_and(|(name, _)| !name.starts_with("STRATA_ALL")) {
            command.envs(TWO_LEVEL);
        }
        let found = handed_on(command.envs(settings.iter().copied()));
        assert_eq!(found.0, expected.0);
        for (rank, (found, expected)) in found.1.iter().zip(&expected.1).enumerate() {
            for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert_eq!(found, expected, "{grid} {settings:?}: line {} of rank {rank}", index + 1);
            }
            assert_eq!(found.len(), expected.len());
        }
        assert_eq!(found.1.len(), expected.1.len());
    }
}

/// `launch 2 | AllGather strata-node0 64 | ...`
fn launches(lines: &[String]) -> Vec<String> {
    let short = |call: &str| {
        let words: Vec<&str> = call.split_whitespace().collect();
        let value = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)).unwrap_or("").to_string();
        format!("{} {} {}", words[0].trim_start_matches("nccl"), value("comm="), value("count="))
    };
    let launched = lines.iter().filter_map(|line| line.strip_prefix("launch "));
    launched
        .map(|line| {
            let mut parts = line.split(" | ");
            let count = parts.next().unwrap().trim().to_string();
            std::iter::once(count).chain(parts.map(short)).collect::<Vec<_>>().join(" | ")
        })
        .collect()
}

/// What rank 0 of two nodes of two launches for the calls of capture.c, in two levels.
const IN_TURN: [&str; 7] = [
    "1 | AllGather strata-rail0 64",
    "2 | AllGather strata-node0 64 | AllGather strata-node0 64",
    "1 | ReduceScatter strata-node0 32",
    "1 | AllReduce strata-rail0 32",
    "1 | AllGather strata-node0 32",
    "2 | ReduceScatter strata-node0 1 | ReduceScatter strata-node0 1",
    "1 | ReduceScatter strata-rail0 1",
];
/// The first two of them in a group.
const TOGETHER: [&str; 5] = [
    "2 | AllGather strata-rail0 64 | ReduceScatter strata-node0 32",
    "3 | AllGather strata-node0 64 | AllGather strata-node0 64 | AllReduce strata-rail0 32",
    "1 | AllGather strata-node0 32",
    "2 | ReduceScatter strata-node0 1 | ReduceScatter strata-node0 1",
    "1 | ReduceScatter strata-rail0 1",
];

fn with_cuda(through: Through) -> Command {
    let mut command = served(NCCL, through, "capture", &["2x2"]);
    let first = if through == Linked { library_dir() } else { NCCL.dir() };
    command.env("LD_LIBRARY_PATH", format!("{}:{}", first.display(), cuda_dir().display()));
    command
}

#[test]
fn captured_streams_are_the_vendor_s_and_others_run_phase_by_phase() {
    for through in [Linked, Preloaded] {
        let (output, processes) = recorded(with_cuda(through).envs(TWO_LEVEL));
        assert!(output.contains("a device was made current, contexts left: 0"), "{output}");
        let vendor_s = ["1 | AllGather world 64", "1 | AllReduce world 64", "1 | ReduceScatter world 1"];
        let vendor_s_group = ["2 | AllGather world 64 | AllReduce world 64", "1 | ReduceScatter world 1"];
        let expected = [&IN_TURN[..], &vendor_s, &IN_TURN, &vendor_s_group, &TOGETHER, &vendor_s, &TOGETHER].concat();
        assert_eq!(launches(&processes[0]), expected);
        let rank = |name: &str| launches(&processes[3]).iter().filter(|line| line.contains(name)).count();
        assert_eq!((rank("strata-node0"), rank("strata-rail0")), (0, 0), "rank 3 is on node 1 and rail 1");
        let own: Vec<&String> = processes[0].iter().filter(|line| line.contains("new=strata-")).collect();
        let made = |level: &str| {
            format!(
                "ncclCommSplit comm=world nranks=4 rank=0 color=0 key=0 config(size=72 version=22703 blocking=1 \
                 commName=strata-{level}0) new=strata-{level}0 depth=0 -> 0"
            )
        };
        assert_eq!(own, [&made("node"), &made("rail")]);
        let ends: Vec<&str> = processes[0].iter().filter_map(|line| line.strip_prefix("ncclCommDestroy ")).collect();
        assert!(
            ends.iter().map(|line| &line[..10]).eq(["comm=strat", "comm=strat", "comm=world"]),
            "before the program's own: {ends:?}"
        );
        assert!(processes.iter().all(|lines| nothing_is_left(lines)));
    }
}

#[test]
fn one_collective_alone_can_be_left_to_the_vendor() {
    for (name, value) in [("STRATA_VENDOR_ONLY", "allgather"), ("NCCL_ALGO", "allgather:ring")] {
        let (_, processes) = recorded(with_cuda(Preloaded).envs(TWO_LEVEL).env(name, value));
        let launched = launches(&processes[0]);
        assert!(launched.iter().all(|line| !line.contains("AllGather strata-rail")), "{launched:?}");
        // Its first phase waits for the end of the group; the vendor's own call is in there already.
        assert!(
            launched.contains(&"2 | AllGather world 64 | ReduceScatter strata-node0 32".to_string()),
            "{launched:?}"
        );
        assert!(launched.contains(&"1 | ReduceScatter strata-rail0 1".to_string()), "{launched:?}");
    }
}

/// Memory that a stream may still use is not given back: nothing is launched between a communicator's end and that.
fn frees_after_the_end(lines: &[String]) {
    let (mut ended, mut freed) = (false, 0);
    for line in lines {
        ended = (ended || line.starts_with("ncclCommDestroy")) && !line.starts_with("launch");
        assert!(ended || !line.starts_with("ncclMemFree"), "{line}");
        freed += usize::from(line.starts_with("ncclMemFree"));
    }
    assert!(freed > 4, "{freed}");
}

#[test]
fn one_thread_may_drive_the_ranks_of_a_node() {
    for (double, grid, through) in
        [(NCCL, "2x2", Linked), (NCCL, "3x2", Preloaded), (NCCL, "2x4", ByName), (OLD_NCCL, "2x3", Preloaded)]
    {
        for kind in [&[grid][..], &[grid, "nonblocking"]] {
            let expected = checked(&mut alone(double, "nodes", kind));
            let (output, processes) = recorded(served(double, through, "nodes", kind).envs(TWO_LEVEL));
            assert_eq!(output, expected);
            assert!(processes.iter().all(|lines| nothing_is_left(lines)), "{grid}");
            if double == NCCL {
                assert!(processes.iter().all(|lines| has_levels(lines)), "{grid} {kind:?}");
            }
        }
    }
    let (_, processes) = recorded(served(NCCL, Linked, "nodes", &["2x2"]).envs(TWO_LEVEL));
    processes.iter().for_each(|lines| frees_after_the_end(lines));
    let launched = launches(&processes[0]);
    // Messages join the first phases of both ranks.
    let mut mixed =
        ["10", "Send world 1", "Recv world 1", "AllGather strata-rail0 1", "AllGather strata-rail1 1"].to_vec();
    mixed.extend(["Send world 1", "Recv world 1", "AllGather strata-rail0 1", "AllGather strata-rail1 1"]);
    mixed.extend(["ReduceScatter strata-node0 50"; 2]);
    mixed.sort();
    let sorted = |line: &str| {
        let mut calls: Vec<String> = line.split(" | ").map(str::to_string).collect();
        calls.sort();
        calls
    };
    assert!(launched.iter().any(|line| sorted(line) == mixed), "{launched:#?}");
    for rest in ["10 | AllGather strata-node0 1 | ", "2 | AllGather strata-node0 50"] {
        assert!(launched.iter().any(|line| line.starts_with(rest)), "{rest}: {launched:#?}");
    }
}

#[test]
fn one_thread_may_drive_all_ranks() {
    for double in [NCCL, OLD_NCCL, RCCL, OLD_RCCL] {
        let expected = checked(&mut alone(double, "one_thread", &["4"]));
        for through in [Preloaded, BothPreloaded] {
            assert_eq!(checked(served(double, through, "one_thread", &["4"]).envs(TWO_LEVEL)), expected);
        }
    }
}

/// On its own threads the double calls public functions, which come to Strata where it is mapped first.
#[test]
fn nonblocking_communicators_tell_the_same_at_the_same_moments() {
    let delay = ("DOUBLE_DELAY_MS", "60");
    for (double, through) in [(NCCL, Linked), (NCCL, ByName), (NCCL, BothPreloaded), (OLD_NCCL, Preloaded)] {
        let expected = checked(alone(double, "nonblocking", &["2x2"]).envs([delay]));
        let mut command = served(double, through, "nonblocking", &["2x2"]);
        let (output, processes) = recorded(command.envs(TWO_LEVEL).envs([delay]));
        assert_eq!(output, expected, "{double:?} {through:?}");
        assert!(processes.iter().all(|lines| nothing_is_left(lines)));
        assert!(double != NCCL || processes.iter().all(|lines| has_levels(lines)));
    }
}

#[test]
fn calls_return_what_the_communicator_s_own_kind_returns() {
    checked(&mut alone(NCCL, "kinds", &["2x2"]));
    for (grid, through) in [("2x2", Linked), ("3x2", BothPreloaded)] {
        let (_, processes) = recorded(served(NCCL, through, "kinds", &[grid]).envs(TWO_LEVEL));
        assert!(processes.iter().all(|lines| nothing_is_left(lines) && has_levels(lines)));
    }
}

/// What a program has done on communicators of the host, none of which the vendor's library may see.
fn is_on_host(line: &str) -> bool {
    line.contains("count=777") || line.contains("datatype=99") && line.contains("0x0c0c") || line.contains("comm=?")
}

#[test]
fn communicators_of_the_host_live_beside_the_vendor_s_and_never_reach_it() {
    for (double, through, grid) in
        [(NCCL, Linked, "2x2"), (NCCL, BothPreloaded, "3x1"), (OLD_NCCL, Preloaded, "2x2"), (RCCL, Preloaded, "2x2")]
    {
        let (_, processes) = recorded(&mut served(double, through, "host_comms", &[grid, "over"]));
        for lines in processes {
            assert!(nothing_is_left(&lines), "{double:?} {through:?}: {:?}", lines.last());
            assert!(lines.iter().any(|line| line.contains("count=10 ")), "the vendor's are the vendor's");
            assert!(!lines.iter().any(|line| is_on_host(line)), "{lines:#?}");
        }
    }
    let (_, processes) = recorded(served(NCCL, Linked, "host_comms", &["2x2", "disabled"]).env("STRATA_DISABLE", "1"));
    assert!(processes.iter().all(|lines| nothing_is_left(lines) && !lines.iter().any(|line| is_on_host(line))));
    checked(served(NCCL, Linked, "host_comms", &["2x2", "nobody"]).env("STRATA_NCCL_LIB", "/nowhere/libnccl.so.2"));
}

/// Host memory and host streams, which a communicator of a GPU refuses.
#[test]
fn communicators_of_the_host_are_on_the_host_where_a_gpu_is_current() {
    let driver = crate::soft::cuda_dir().join("libcuda.so.1");
    crate::built::run_with("host.c", &["-ldl"], &[driver.to_str().unwrap()]);
}

#[test]
fn streams_of_a_group_wrong_calls_and_windows_are_as_with_the_vendor_alone() {
    checked(&mut alone(NCCL, "corners", &["2x2"]));
    for grid in ["2x2", "3x2"] {
        let (_, processes) = recorded(served(NCCL, Linked, "corners", &[grid]).envs(TWO_LEVEL));
        for lines in processes {
            assert!(nothing_is_left(&lines));
            let launched = launches(&lines);
            let is = |line: &String, comm: &str| line.contains(&format!("AllGather {comm}"));
            assert!(launched.iter().any(|line| is(line, "strata-node")), "{launched:#?}");
            // With a window for them, the vendor's own kernels do better.
            let last = launched.iter().rposition(|line| line.contains("AllGather"));
            assert!(last.is_some_and(|last| launched[last] == "1 | AllGather world 300"), "{launched:#?}");
        }
    }
}

#[test]
fn a_failure_of_a_call_that_strata_makes_is_the_program_s() {
    let run = |fails: &str| {
        checked(served(NCCL, Linked, "corners", &["2x2", "failing"]).envs(TWO_LEVEL).env("DOUBLE_FAIL_CALLS", fails))
    };
    for (fails, code) in [("nothing", 0), ("strata-", 3)] {
        let told = run(fails);
        for kind in ["waits", "does not"] {
            assert!(told.contains(&format!("a call that {kind}: {code}\n")), "{fails}: {told}");
        }
    }
}

#[test]
fn where_one_rank_cannot_make_its_levels_the_vendor_serves_all() {
    let arguments = ["2x2", "61", "20", "1"];
    let expected = checked(&mut alone(NCCL, "differential", &arguments));
    for level in ["strata-node", "strata-rail"] {
        let settings = rank_environment(&[1], &[("DOUBLE_FAIL_SPLIT", level.to_string())]);
        let mut command = served(NCCL, Linked, "differential", &arguments);
        let (output, processes) = recorded(command.envs(TWO_LEVEL).envs(settings));
        assert_eq!(output, expected, "{level}");
        for (rank, lines) in processes.iter().enumerate() {
            let used = lines.iter().any(|line| line.starts_with("launch") && line.contains("comm=strata-"));
            assert!(!used && nothing_is_left(lines), "{level}, rank {rank}: {:?}", lines.last());
        }
    }
}

#[test]
fn what_ends_while_it_is_being_made_leaves_nothing_behind() {
    checked(&mut alone(NCCL, "races", &["2x2", "10"]));
    let (_, processes) = recorded(served(NCCL, Linked, "races", &["2x2", "60"]).envs(TWO_LEVEL));
    for lines in processes {
        assert!(nothing_is_left(&lines) && has_levels(&lines), "{}", lines.last().unwrap());
    }
}

#[test]
fn nobody_waits_for_ever() {
    // With one of the vendor's communicators for each level, a rank may wait for one that the double does not know to be
    // in trouble: the double's own patience counts.
    let mut cases = vec![("thread", "3"), ("vanish", "3"), ("background", "60"), ("late", "60")];
    cases.extend([("init", "60"), ("revoke", "60")]);
    for (case, patience) in cases {
        let patience = ("DOUBLE_TIMEOUT_S", patience);
        let expected = checked(alone(NCCL, "abort", &["2x2", case]).envs([patience]));
        for through in [Linked, BothPreloaded] {
            let begun = Instant::now();
            let mut command = served(NCCL, through, "abort", &["2x2", case]);
            assert_eq!(checked(command.envs(TWO_LEVEL).envs([patience])), expected);
            // An abort frees those that wait inside calls; Strata waits for them for 10 s at most.
            assert!(begun.elapsed() < Duration::from_secs(8), "{case} {through:?}: {:?}", begun.elapsed());
        }
    }
}

#[test]
fn wrong_calls_get_the_vendor_s_codes_and_texts() {
    for double in [NCCL, OLD_NCCL, RCCL, OLD_RCCL] {
        let expected = recorded(&mut alone(double, "errors", &[]));
        for through in [Preloaded, BothPreloaded] {
            let found = handed_on(served(double, through, "errors", &[]).envs(TWO_LEVEL));
            assert_eq!(found, expected, "{double:?} {through:?}");
        }
    }
}

#[test]
fn cycles_leave_nothing_behind() {
    let cycles = "300";
    let (output, processes) = recorded(served(NCCL, Linked, "cycles", &["2x2", cycles]).envs(TWO_LEVEL));
    for lines in processes {
        assert!(nothing_is_left(&lines) && has_levels(&lines), "{}", lines.last().unwrap());
    }
    // The program itself fails if there are more files, threads or mappings at the end than after the first tenth.
    let resident = |line: &&str| -> Option<i64> { line.split_once("rss_kb=")?.1.split(' ').next()?.parse().ok() };
    for rank in 0..4 {
        let lines: Vec<&str> = output.lines().filter(|line| line.starts_with(&format!("rank {rank} "))).collect();
        let [first, last] = [lines.first(), lines.last()].map(|line| line.and_then(resident).unwrap());
        assert!(last - first < 1024, "rank {rank}: {first} KiB and later {last}\n{output}");
    }
}

/// The environment of some of a program's ranks, or nodes.
fn rank_environment(ranks: &[usize], settings: &[(&str, String)]) -> Vec<(String, String)> {
    let text: Vec<String> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
    ranks.iter().map(|rank| (format!("RANK_ENV_{rank}"), text.join(";"))).collect()
}

#[test]
fn where_only_some_ranks_have_strata_the_vendor_serves_all() {
    let arguments = ["2x2", "31", "20", "1"];
    let expected = checked(&mut alone(NCCL, "differential", &arguments));
    for with_strata in [&[0, 1, 2][..], &[1, 3], &[0]] {
        let settings = [
            ("LD_PRELOAD", library().display().to_string()),
            ("STRATA_NCCL_LIB", NCCL.library().display().to_string()),
            ("STRATA_BOOTSTRAP_TIMEOUT_MS", "1500".to_string()),
        ];
        let mut command = alone(NCCL, "differential", &arguments);
        let (output, processes) = recorded(command.envs(TWO_LEVEL).envs(rank_environment(with_strata, &settings)));
        assert_eq!(output, expected, "{with_strata:?}");
        let asked = processes.iter().filter(|lines| lines[0] == "ncclGetVersion depth=0 -> 0" && lines[1] == lines[0]);
        assert_eq!(asked.count(), with_strata.len(), "Strata is where it should be");
        assert!(processes.iter().all(|lines| !has_levels(lines) && nothing_is_left(lines)));
    }
}

#[test]
fn where_settings_differ_rank_0_s_count() {
    let own = [("STRATA_ALLREDUCE_ALGO", "vendor".to_string()), ("STRATA_VENDOR_ONLY", "allgather".to_string())];
    let run = |ranks: &[usize]| {
        let recording = Recording::new();
        let mut command = served(NCCL, Preloaded, "differential", &["2x2", "41", "20", "1"]);
        command.envs(TWO_LEVEL).env("NCCL_DEBUG", "WARN").env("DOUBLE_RECORD", recording.prefix());
        let (output, warnings) = told(command.envs(rank_environment(ranks, &own)));
        let launched: Vec<Vec<String>> = recording.processes().iter().map(|lines| launches(lines)).collect();
        (output, launched, warnings)
    };
    let (expected, as_rank_0, quiet) = run(&[]);
    assert!(!quiet.contains("on rank 0"), "{quiet}");
    let (output, launched, warnings) = run(&[1]);
    assert_eq!((&output, &launched), (&expected, &as_rank_0));
    for text in ["STRATA_ALLREDUCE_ALGO is vendor here and two_level on rank 0", "STRATA_VENDOR_ONLY is allgather here"]
    {
        assert!(warnings.contains(text), "{warnings}");
    }
    let (output, launched, _) = run(&[0]);
    assert_eq!(output, expected);
    let levels = |lines: &[String], call: &str| lines.iter().any(|line| line.contains(&format!("{call} strata-rail")));
    assert!(levels(&as_rank_0[0], "AllReduce") && levels(&as_rank_0[0], "AllGather"));
    assert!(launched.iter().all(|lines| !levels(lines, "AllReduce") && !levels(lines, "AllGather")));
    assert!(launched.iter().all(|lines| levels(lines, "ReduceScatter")));
}

#[test]
fn where_releases_differ_the_vendor_serves_all() {
    let old = rank_environment(&[1], &[("STRATA_NCCL_LIB", OLD_NCCL.library().display().to_string())]);
    let recording = Recording::new();
    let mut command = served(NCCL, Preloaded, "nodes", &["2x2"]);
    command.envs(TWO_LEVEL).envs(old).env("DOUBLE_RECORD", recording.prefix());
    let (_, warnings) = told(&mut command);
    assert!(warnings.contains("the ranks have different releases of the vendor's library"), "{warnings}");
    for lines in recording.processes() {
        let own = |line: &&String| line.starts_with("ncclCommSplit") && line.contains("size=48");
        assert!(!has_levels(&lines) && !lines.iter().any(|line| own(&line)) && nothing_is_left(&lines));
    }
}

/// A flavour of Strata that is built apart: `cargo build --features rccl --target-dir target/rccl`.
fn rccl_flavour() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/rccl/debug/libstrata.so");
    assert!(built.exists(), "{} is not built", built.display());
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rccl");
    std::fs::create_dir_all(&dir).unwrap();
    let place = dir.join("librccl.so.1");
    std::fs::copy(built, &place).unwrap();
    place
}

#[test]
#[ignore = "needs a second build of the library; scripts/check rccl makes it"]
fn the_flavour_for_rccl_stands_in_its_place() {
    let flavour = rccl_flavour();
    let section = checked(Command::new("readelf").arg("-dW").arg(&flavour));
    assert!(section.contains("SONAME") && section.contains("[librccl.so.1]"), "{section}");
    let listing = checked(Command::new("nm").args(["-D", "--defined-only"]).arg(&flavour));
    let names: BTreeSet<&str> = listing.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    let of_nccl = include_str!("../nccl-symbols.txt").lines().filter(|name| !name.starts_with('p'));
    let of_rccl = strata::abi::table::rccl_functions().map(|function| function.name);
    let of_msccl = strata::abi::table::msccl_functions().map(|function| function.name);
    let own = strata::abi::table::own_functions().map(|function| function.name);
    let tables = strata::abi::table::PROFILER_TABLES;
    assert_eq!(names, of_nccl.chain(of_msccl).chain(of_rccl).chain(own).chain(tables).collect());
    for double in [RCCL, OLD_RCCL] {
        for (name, arguments) in [
            ("differential", &["2x2", "51", "50", "2"][..]),
            ("one_thread", &["4"]),
            ("errors", &[]),
            ("nodes", &["2x2"]),
        ] {
            let expected = checked(&mut alone(double, name, arguments));
            let linked = ("LD_LIBRARY_PATH", flavour.parent().unwrap().display().to_string());
            let preloaded = ("LD_PRELOAD", format!("{} {}", flavour.display(), double.library().display()));
            for way in [linked, preloaded] {
                let mut command = alone(double, name, arguments);
                command.envs([way]).env("STRATA_NCCL_LIB", double.library()).envs(TWO_LEVEL);
                let (output, processes) = recorded(&mut command);
                assert_eq!(output, expected, "{double:?} {name}");
                assert!(processes.iter().all(|lines| nothing_is_left(lines)));
            }
        }
        // A function that is AMD's alone: over its library in two levels, and by Strata itself.
        let linked = ("LD_LIBRARY_PATH", flavour.parent().unwrap().display().to_string());
        let mut command = alone(double, "multi", &["2x2"]);
        command.envs([linked.clone()]).env("STRATA_NCCL_LIB", double.library()).envs(TWO_LEVEL);
        for lines in recorded(&mut command).1 {
            assert!(nothing_is_left(&lines) && has_nameless_levels(&lines), "{lines:#?}");
            let made = lines.iter().filter(|line| line.starts_with("ncclCommInitRankMulti")).count();
            assert_eq!(made, 4, "as the program made the calls");
        }
        checked(alone(double, "multi", &["2x2"]).envs([linked]).env("STRATA_NCCL_LIB", "none"));
    }
}
