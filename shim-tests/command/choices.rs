//! What decides a choice, with real processes: rank 0's settings, machine and links, and what `strata explain` says of it.
#![forbid(unsafe_code)]

use crate::launched::{chosen, lines, on_all, outcome, said, strata, LIBRARY, WORLD};
use std::path::PathBuf;

/// A program of one all-gather on all ranks, of which each has its own value of a variable.
fn each_with(variable: &str, values: [&str; 4], bytes: &str) -> String {
    let script = format!(
        "case $RANK in 0) v=$0;; 1) v=$1;; 2) v=$2;; *) v=$3;; esac; shift 3; export {variable}=\"$v\"; exec \"$@\""
    );
    let mut command = strata();
    command.args(WORLD).args(["--", "sh", "-c", &script]).args(values).arg(env!("CARGO_BIN_EXE_strata"));
    command.args(["perf", "all_gather", "-b", bytes, "-e", bytes, "-n", "1", "--library", &LIBRARY]);
    said(command.env("NCCL_DEBUG", "INFO"))
}

fn explain(arguments: &[&str]) -> String {
    said(strata().arg("explain").args(arguments))
}

#[test]
fn ranks_with_different_settings_take_rank_zero_s_and_each_hears_of_it_once() {
    let told = each_with("STRATA_ALLGATHER_ALGO", ["ring", "two_level", "log", "ring"], "1K");
    assert!(chosen(&told).starts_with("ring, "), "{told}");
    let warned = lines(&told, "on rank 0, which counts");
    assert_eq!(warned.len(), 2, "{told}");
    assert!(warned.iter().any(|line| line.contains("two_level here and ring")), "{told}");
}

#[test]
fn several_differences_are_one_warning() {
    let script = "test $RANK = 0 || export STRATA_WINDOW=7 STRATA_SEGMENT_BYTES=4096 STRATA_MACHINE=none; exec \"$@\"";
    let mut command = strata();
    command.args(WORLD).args(["--", "sh", "-c", script, "sh", env!("CARGO_BIN_EXE_strata")]);
    command.args(["perf", "all_gather", "-b", "1K", "-e", "1K", "-n", "1", "--library", &LIBRARY]);
    let told = said(command.env("NCCL_DEBUG", "WARN"));
    assert_eq!(lines(&told, "which counts").len(), 3, "one on each other rank: {told}");
}

#[test]
fn the_machine_is_rank_zero_s_whatever_files_the_others_have() {
    let file = std::env::temp_dir().join(format!("strata-choices-{}.toml", std::process::id()));
    std::fs::write(&file, "name = 'broken'").unwrap();
    let broken = file.to_string_lossy().into_owned();
    // 64 nodes' worth of latency would be needed to see a difference on two: what counts is that all decide alike.
    let told = each_with("STRATA_MACHINE", ["netns", &broken, "no/such/file", "frontier"], "4M");
    assert!(!chosen(&told).is_empty());
    assert_eq!(lines(&told, "on rank 0, which counts").len(), 3, "{told}");
    assert!(!told.contains("links between nodes"), "a machine is named, so nothing is measured: {told}");
    let told = each_with("STRATA_MACHINE", [&broken, "netns", "netns", "netns"], "4M");
    assert_eq!(lines(&told, "STRATA_MACHINE is left out").len(), 1, "{told}");
    std::fs::remove_file(PathBuf::from(broken)).unwrap();
}

/// A rank reads so much of a connection at a time; what it had read ahead by then was forgotten until more came.
#[test]
fn long_messages_over_tcp_are_taken_in_to_their_end() {
    for algorithm in ["ring", "log"] {
        let mut command = strata();
        command.args(["launch", "-n", "4", "--nodes", "4", "--timeout", "90", "--", env!("CARGO_BIN_EXE_strata")]);
        command.args([
            "perf",
            "reduce_scatter",
            "-b",
            "31850496",
            "-e",
            "31850496",
            "-n",
            "2",
            "-w",
            "0",
            "-d",
            "half",
        ]);
        command.args(["--library", &LIBRARY]).env("STRATA_REDUCESCATTER_ALGO", algorithm).env("STRATA_INTER", "tcp");
        command.env("STRATA_SEGMENT_BYTES", "99000000").env("STRATA_SCRATCH_BYTES", "1000000000");
        let told = said(command.env("STRATA_TIMEOUT_MS", "20000"));
        assert!(told.contains("31850496"), "{told}");
    }
}

#[test]
fn a_communicator_follows_the_model_of_its_machine() {
    let file = std::env::temp_dir().join(format!("strata-far-{}.toml", std::process::id()));
    // Nodes so far apart that a message had better go in few pieces.
    let far = include_str!("../../machines/netns.toml").replacen(
        "latency_us = { value = 20.0",
        "latency_us = { value = 50000.0",
        1,
    );
    std::fs::write(&file, far).unwrap();
    let name = file.to_string_lossy().into_owned();
    let with = each_with("STRATA_MACHINE", [&name; 4], "8M");
    assert!(chosen(&with).contains("because: the cost model of netns"), "{with}");
    let without = each_with("STRATA_MACHINE", ["none"; 4], "8M");
    let segments =
        |told: &str| chosen(told).split(", ").nth(1).unwrap().split(' ').next().unwrap().parse::<usize>().unwrap();
    assert!(segments(&with) < segments(&without), "{} and {}", chosen(&with), chosen(&without));
    std::fs::remove_file(file).unwrap();
}

#[test]
fn links_between_nodes_are_measured_within_a_budget_and_all_ranks_have_the_same() {
    let told = each_with("STRATA_MEASURE_US", ["2000000"; 4], "1M");
    let measured = lines(&told, "links between nodes: about ");
    assert_eq!(measured.len(), 4, "{told}");
    let figures = |line: &str| line.split_once("about ").unwrap().1.to_string();
    assert!(measured.iter().all(|line| figures(line) == figures(measured[0])), "{measured:?}");
    let told = each_with("STRATA_MEASURE_US", ["0"; 4], "1M");
    assert!(!told.contains("links between nodes"), "{told}");
    let told = each_with("STRATA_MEASURE_US", ["1"; 4], "1M");
    assert!(!told.contains("links between nodes"), "nothing can be told in a microsecond: {told}");
}

#[test]
fn explain_tells_the_stage_that_decides() {
    let world = ["-n", "256", "--nodes", "32"];
    let asked = |more: &[&str]| explain(&[&["all_gather", "64M"], &world[..], more].concat());
    let by_model = asked(&["--machine", "frontier"]);
    assert!(
        by_model.contains("-> two_level(direct,log)") && by_model.contains("because: the cost model of frontier"),
        "{by_model}"
    );
    let by_thresholds = asked(&["--machine", "none"]);
    assert!(by_thresholds.contains("67108864 bytes <= STRATA_ALLGATHER_RD_MAX_BYTES=67108864"), "{by_thresholds}");
    let over = asked(&["--machine", "frontier", "--over", "rccl"]);
    assert!(over.contains("vendor forced") && over.contains("-> "), "{over}");
    let mut ours = strata();
    ours.args(["explain", "all_gather", "64M", "--machine", "frontier", "--over", "rccl"]).args(world);
    let ours = said(ours.env("STRATA_INTER", "mpi"));
    assert!(ours.contains("-> two_level(direct,log), ") && ours.contains("decided by: cost model"), "{ours}");
    let mut named = strata();
    named.args(["explain", "all_gather", "64M"]).args(world).env("STRATA_ALLGATHER_ALGO", "ring");
    let named = said(&mut named);
    assert!(named.contains("-> ring") && named.contains("named by the environment"), "{named}");
    let mut set = strata();
    set.args(["explain", "all_gather", "64M", "--machine", "frontier"])
        .args(world)
        .env("STRATA_ALLGATHER_RD_MAX_BYTES", "1");
    let set = said(&mut set);
    assert!(set.contains("-> two_level(direct,ring)") && set.contains("decided by: thresholds of the user"), "{set}");
}

#[test]
fn explain_tells_of_the_code_that_is_set() {
    let asked = |arguments: &[&str]| {
        let mut command = strata();
        command.arg("explain").args(arguments).args(["-n", "4", "--nodes", "2"]).env("STRATA_ALLREDUCE_CODE", "mx8");
        said(&mut command)
    };
    let long = asked(&["all_reduce", "1M"]);
    assert!(long.contains("-> two_level(direct,coded_mx8)") && long.contains("decided by: code"), "{long}");
    for exact in [&["all_reduce", "1K"][..], &["all_gather", "1M"], &["all_reduce", "1M", "--over", "nccl"]] {
        let exact = asked(exact);
        assert!(!exact.contains("coded_mx8"), "{exact}");
    }
}

#[test]
fn explain_shows_what_carries_a_call_between_nodes() {
    let asked = |settings: &[(&str, &str)], arguments: &[&str]| {
        let mut command = strata();
        command.args(["explain", "all_reduce", "1M", "-n", "4"]).args(arguments).envs(settings.iter().copied());
        outcome(&mut command)
    };
    let (ring, two) = (("STRATA_ALLREDUCE_ALGO", "ring@mpi"), ["--nodes", "2"]);
    let both = ("STRATA_CARRIERS", "tcp,mpi");
    for (settings, arguments, wanted) in [
        (&[both, ring][..], &two[..], "carrier: mpi, beside the communicator's own (STRATA_CARRIERS=tcp,mpi)"),
        (&[both], &two, "carrier: tcp, the communicator's own"),
        (&[("STRATA_INTER", "mpi"), ring], &two, "carrier: mpi, the communicator's own"),
        (&[], &two, "carrier: the communicator's own: MPI where"),
        (&[both], &["--nodes", "1"], "carrier: none, there is one node"),
        (&[], &["--nodes", "2", "--over", "nccl"], "carrier: vendor"),
    ] {
        let (text, succeeded) = asked(settings, arguments);
        assert!(succeeded && text.contains(wanted), "{settings:?}: {text}");
    }
    let (text, succeeded) = asked(&[("STRATA_CARRIERS", "tcp"), ring], &two);
    assert!(!succeeded && text.contains("STRATA_CARRIERS=tcp,mpi gives it one"), "{text}");
}

#[test]
fn a_carrier_that_ranks_lack_is_refused_with_what_they_lack() {
    let mut command = on_all(&["perf", "all_reduce", "-b", "8", "-e", "8", "-n", "1"]);
    command.env("STRATA_CARRIERS", "mpi,tcp!").env("STRATA_ALLREDUCE_ALGO", "ring@mpi");
    let (text, succeeded) = outcome(command.env("STRATA_MPI_PLUGIN", "/nowhere/mpi.so"));
    assert!(!succeeded && text.contains("carrier mpi was left out of this communicator: rank 0: "), "{text}");
    assert!(text.contains("/nowhere/mpi.so") && !text.contains("gives it one"), "{text}");
}

#[test]
fn explain_refuses_nonsense_with_the_reason() {
    for (arguments, reason) in [
        (&["all_gatherer", "1M", "-n", "4"][..], "there is no collective all_gatherer"),
        (&["all_gather", "1M"], "number of ranks"),
        (&["all_gather", "1M", "-n", "4", "--machine", "no/such"], "no/such"),
        (&["all_gather", "lots", "-n", "4"], "is not a size"),
    ] {
        let (text, succeeded) = outcome(strata().arg("explain").args(arguments));
        assert!(!succeeded && text.contains(reason), "{arguments:?}: {text}");
    }
}

/// A folder with these files, each as `strata plan convert` writes it.
fn folder(name: &str, files: &[(&str, &[&str])]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("choices-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    for (file, arguments) in files {
        let text = said(strata().args(["plan", "convert"]).args(*arguments));
        std::fs::write(folder.join(file), text).unwrap();
    }
    folder
}

#[test]
fn a_call_takes_the_first_file_whose_root_is_its_own() {
    let tree = |root| ["broadcast", "--algo", "tree", "-n", "4", "--root", root];
    let files = folder("roots", &[("r0.xml", &tree("0")), ("r2.xml", &tree("2")), ("r2_too.xml", &tree("2"))]);
    let asked = |root: &str, setting: (&str, &str)| {
        let mut command = strata();
        command.args(["explain", "broadcast", "1M", "-n", "4", "--root", root]);
        outcome(command.env("STRATA_PROGRAM_DIR", &files).env(setting.0, setting.1))
    };
    let none = ("STRATA_MACHINE", "none");
    for (root, wanted) in [("0", "-> script:r0,"), ("2", "-> script:r2,"), ("1", "-> board,")] {
        let (text, _) = asked(root, none);
        assert!(text.contains(wanted), "{root}: {text}");
    }
    assert!(asked("2", none).0.contains("the first script for 1048576 bytes on 4 ranks with root 2"));
    // Who names a file gets it or hears why not.
    let (text, succeeded) = asked("1", ("STRATA_BROADCAST_ALGO", "script:r2"));
    assert!(!succeeded && text.contains("script:r2 is for broadcast on 4 ranks with root 2"), "{text}");
    assert!(text.contains("the call is broadcast with root 1"), "{text}");
    let (text, succeeded) = asked("2", ("STRATA_BROADCAST_ALGO", "script:r2_too"));
    assert!(succeeded && text.contains("-> script:r2_too,"), "{text}");
    let (text, succeeded) = asked("2", ("STRATA_BROADCAST_ALGO", "script:r3"));
    let loaded =
        "loaded scripts: script:r0 (broadcast on 4 ranks with root 0), script:r2 (broadcast on 4 ranks with root 2)";
    assert!(!succeeded && text.contains("did you mean script:r0?") && text.contains(loaded), "{text}");
    assert!(!asked("4", none).1);
    // The ranks of a program agree on it; nobody has named the file.
    for (root, wanted) in [("2", "script:r2,"), ("0", "script:r0,")] {
        let arguments = ["perf", "broadcast", "-b", "64K", "-e", "64K", "-n", "1", "-w", "1", "--root", root];
        let mut command = on_all(&arguments);
        let told = said(command.env("STRATA_PROGRAM_DIR", &files).env("NCCL_DEBUG", "INFO"));
        // Each rank has its own number of rounds.
        let taken = lines(&told, &format!(" -> {wanted}")).len();
        assert!(taken >= 4 && taken == lines(&told, " -> ").len(), "{told}");
    }
    let _ = std::fs::remove_dir_all(files);
}

#[test]
fn a_file_is_a_level_where_it_is_named_and_tune_tries_it() {
    let node = ["all_gather", "--algo", "ring", "-n", "2"];
    let files = folder("levels", &[("inside.xml", &node)]);
    let mut command = strata();
    command.args(["explain", "all_gather", "64M", "-n", "256", "--nodes", "128", "--machine", "frontier"]);
    command.env("STRATA_ALLGATHER_ALGO", "two_level(script:inside,log)").env("STRATA_PROGRAM_DIR", &files);
    let told = said(&mut command);
    assert!(told.contains("-> two_level(script:inside,log)"), "{told}");
    assert!(told.contains("us by the cost model of frontier"), "{told}");
    let table = files.join("table.toml");
    let output = table.to_string_lossy().into_owned();
    let mut command =
        on_all(&["tune", "--collectives", "all_gather", "--sizes", "1K", "--budget", "5s", "-o", &output]);
    command.env("STRATA_PROGRAM_DIR", &files);
    said(&mut command);
    let told = std::fs::read_to_string(&table).unwrap();
    assert!(told.contains("two_level(script:inside,log)"), "{told}");
    let _ = std::fs::remove_dir_all(files);
}
