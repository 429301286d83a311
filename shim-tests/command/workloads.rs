//! Training steps replayed by `strata launch`, scaled down, and simulated: what is said, and the exit code.

use crate::built;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const STRATA: &str = env!("CARGO_BIN_EXE_strata");

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `strata perf` with these words; with ranks, started by the launcher on two nodes. The launcher ends what hangs.
fn perf(nranks: Option<usize>, words: &[&str]) -> Output {
    let mut command = Command::new(STRATA);
    if let Some(nranks) = nranks {
        command.args(["launch", "--nodes", "2", "--timeout", "60", "-n", &nranks.to_string(), "--", STRATA]);
    }
    command.arg("perf").args(words);
    if nranks.is_some() {
        command.arg("--library").arg(built::library());
    }
    command.stdin(Stdio::null()).output().expect("the command starts")
}

fn json(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("workload-{name}-{}.json", std::process::id()))
}

/// Replays a workload on ranks; the table and the figures.
fn replay(nranks: usize, words: &[&str]) -> (String, serde_json::Value) {
    let (_, name) = words[1].rsplit_once('/').unwrap_or(("", words[1]));
    let file = json(name);
    let words = [words, &["-n", "3", "-w", "1", "--json", file.to_str().unwrap()]].concat();
    let output = perf(Some(nranks), &words);
    assert!(output.status.success(), "{words:?}: {:?}\n{}", output.status, text(&output.stderr));
    let figures = serde_json::from_slice(&std::fs::read(&file).expect("the figures")).expect("JSON");
    std::fs::remove_file(file).expect("the file can go");
    (text(&output.stdout), figures)
}

/// Calls and bytes of the figures' rows, by phase, collective and group.
fn rows(figures: &serde_json::Value) -> Vec<(String, u64, u64)> {
    let rows = figures["routes"][0]["rows"].as_array().expect("rows");
    let row = |row: &serde_json::Value| {
        assert!(row["time_us"].as_f64().expect("a time") > 0.0, "{row}");
        let words = ["phase", "call", "group"].map(|key| row[key].as_str().expect("a word"));
        (words.join(" "), row["calls"].as_u64().expect("calls"), row["bytes"].as_u64().expect("bytes"))
    };
    rows.iter().map(row).collect()
}

#[test]
fn zero_3_runs_on_four_ranks_and_its_results_are_right() {
    let (said, figures) = replay(4, &["--workload", "zero3", "--scale", "1/2048", "--set", "layers=3"]);
    for part in ["# 4 ranks: data=4", "multiplied by 1/2048", "# wrong    : 0 OK", "computing", "median of 3"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(figures["wrong"], 0);
    assert_eq!(figures["iterations_us"].as_array().expect("three").len(), 3);
    // Three layers of 314,639,360 and an embedding of 267,811,840 elements, over 2,048, of two bytes, in blocks.
    let (layer, embedding) =
        (314_639_360u64.div_ceil(2048).div_ceil(4) * 8, 267_811_840u64.div_ceil(2048).div_ceil(4) * 8);
    let each = 3 * layer + embedding;
    let expected = [
        ("forward all_gather data", 4, each),
        ("backward all_gather data", 4, each),
        ("backward reduce_scatter data", 4, each),
        ("optimizer all_reduce data", 1, 4),
    ];
    assert_eq!(rows(&figures), expected.map(|(name, calls, bytes)| (name.to_string(), calls, bytes)));
    // The step cannot take less than what it computes and what it waits for.
    let route = &figures["routes"][0];
    let number = |value: &serde_json::Value| value.as_f64().expect("a number");
    assert!(number(&route["step_us"]) >= number(&route["exposed_us"]) + number(&figures["compute_us"]), "{figures:#}");
}

#[test]
fn axonn_s_groups_are_split_off_along_every_dimension() {
    let words = ["--workload", "axonn", "--scale", "1/65536", "--set", "z=1", "--set", "layers=2", "--no-compute"];
    let (said, figures) = replay(8, &words);
    assert!(said.contains("# 8 ranks: x=2 y=2 z=1 data=2") && said.contains("# without computing"), "{said}");
    assert!(!said.contains(" z "), "groups of one rank make no calls: {said}");
    let calls: Vec<(String, u64)> = rows(&figures).into_iter().map(|(name, calls, _)| (name, calls)).collect();
    let expected = [
        ("forward all_reduce x", 4),
        ("forward all_reduce y", 4),
        ("backward all_reduce x", 8),
        ("backward all_reduce y", 8),
        ("backward all_reduce data", 1),
    ];
    assert_eq!(calls, expected.map(|(name, calls)| (name.to_string(), calls)));
    assert_eq!((&figures["wrong"], &figures["compute_us"]), (&0.into(), &0.0.into()));
}

#[test]
fn experts_and_tables_are_exchanged() {
    let ted =
        ["--workload", "ted", "--scale", "1/16384", "--set", "tensor=2", "--set", "experts=2", "--set", "layers=2"];
    let (said, _) = replay(4, &ted);
    assert!(said.contains("alltoall       expert") && said.contains("# wrong    : 0 OK"), "{said}");
    let (said, _) = replay(3, &["--workload", "dlrm", "--scale", "1/256"]);
    assert!(said.contains("alltoall       data") && said.contains("# wrong    : 0 OK"), "{said}");
}

/// All three collectives that have blocks, in groups of several sizes, with blocks that differ in every way, none among them.
const SKEWED: &str = r#"
title = "blocks of different sizes"
source = []
dtype = "float"
grid = [{ name = "inner", size = 2 }, { name = "outer", size = "rest" }]
[[phase]]
name = "step"
steps = [
    { call = "alltoall", group = "world", count = 1001, skew = "zipf", overlap = "x" },
    { call = "all_gather", group = "world", count = 4096, skew = "zeros", overlap = "y" },
    { wait = "y", until = 4000 },
    { call = "reduce_scatter", group = "inner", count = 777, skew = "one" },
    { call = "all_gather", group = "outer", count = 3, skew = "one" },
    { call = "alltoall", group = "outer", count = 64, skew = "even" },
    { call = "alltoall", group = "world", count = 1001 },
    { wait_all = "x" },
    { wait_all = "y" },
]
"#;

#[test]
fn blocks_of_different_sizes_arrive_and_are_checked() {
    let file = json("skewed").with_extension("toml");
    std::fs::write(&file, SKEWED).expect("a file");
    let path = file.to_str().expect("a path");
    let labelled = |words: &[&str]| {
        let (said, figures) = replay(6, &[&["--workload", path][..], words].concat());
        assert!(said.contains("# wrong    : 0 OK") && figures["wrong"] == 0, "{said}");
        let rows = figures["routes"][0]["rows"].as_array().expect("rows").clone();
        let label = |row: &serde_json::Value| format!("{} {}", row["call"], row["skew"]).replace('"', "");
        (said, rows.iter().map(label).collect::<Vec<_>>())
    };
    let (said, rows) = labelled(&["--set", "inner=3"]);
    assert!(said.contains("  step       alltoall(zipf)      world "), "{said}");
    let even = ["alltoall null", "alltoall null"];
    assert_eq!(
        rows,
        ["alltoall zipf", "all_gather zeros", "reduce_scatter one", "all_gather one", even[0], even[1]],
        "{said}"
    );
    let (said, rows) = labelled(&["--skew", "zipf"]);
    assert_eq!(rows.iter().filter(|row| row.contains("zipf")).count(), 5, "{said}");
    assert_eq!(rows.iter().filter(|row| row.contains("null")).count(), 1, "{said}");
    std::fs::remove_file(file).expect("the file can go");
    let (said, _) = replay(4, &["--workload", "ds-moe", "--scale", "1/16384", "--skew", "one"]);
    assert!(said.contains("alltoall(one)") && said.contains("# wrong    : 0 OK"), "{said}");
}

#[test]
fn skewed_exchanges_cost_a_simulated_step_more_by_every_way() {
    let steps = |words: &[&str]| {
        let words = [&["--workload", "ds-moe", "-n", "32", "--no-compute", "--json", "-"][..], words].concat();
        let output = perf(None, &words);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let figures: serde_json::Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
        let routes = figures["routes"].as_array().expect("routes");
        let step = |route: &serde_json::Value| {
            (route["route"].as_str().expect("a name").to_string(), route["step_us"].as_f64().expect("a time"))
        };
        (routes.iter().map(step).collect::<Vec<_>>(), figures["how"].as_str().expect("words").to_string())
    };
    for machine in ["lassen", "frontier"] {
        let (even, said) = steps(&["--simulate", machine]);
        assert!(!said.contains("blocks of different sizes"), "{said}");
        assert_eq!(steps(&["--simulate", machine, "--skew", "even"]).0, even);
        let (zipf, said) = steps(&["--simulate", machine, "--skew", "zipf"]);
        assert!(said.contains("blocks of different sizes: a library sends"), "{said}");
        assert_eq!(zipf.len(), even.len());
        for ((name, even), (_, zipf)) in even.iter().zip(&zipf) {
            assert!(zipf > &(1.2 * even), "{machine}, {name}: {even} {zipf}");
        }
    }
}

#[test]
fn a_simulated_step_compares_the_ways() {
    let output = perf(None, &["--workload", "axonn", "--simulate", "frontier", "-n", "64", "--json", "-"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    let routes = figures["routes"].as_array().expect("routes");
    let names: Vec<&str> = routes.iter().map(|route| route["route"].as_str().expect("a name")).collect();
    assert_eq!(names, ["vendor", "PCCL", "Strata"]);
    let step = |index: usize| routes[index]["step_us"].as_f64().expect("a time");
    assert!(step(2) <= step(0) && step(2) > figures["compute_us"].as_f64().expect("a time"));
    let said = text(&perf(None, &["--workload", "dlrm", "--simulate", "perlmutter", "-n", "8"]).stdout);
    assert!(said.contains("# step     : Strata") && said.contains("the vendor's on every route"), "{said}");
}

#[test]
fn what_cannot_be_replayed_is_told_and_the_exit_code_is_2() {
    let file = json("wrong").with_extension("toml");
    let good = include_str!("../../workloads/dlrm.toml");
    std::fs::write(&file, good.replacen("samples * tables", "sample * tables", 1)).expect("a file");
    let path = file.to_str().expect("a path");
    let simulated = ["--simulate", "frontier", "-n", "8"];
    let with = |words: &[&'static str]| [words, &simulated[..]].concat();
    let (near, none) =
        (with(&["--workload", "ds-moe", "--skew", "zipff"]), with(&["--workload", "zero3", "--skew", "one"]));
    let cases: [(Option<usize>, &[&str], &str); 11] = [
        (Some(3), &["--workload", "axonn"], "needs a multiple of 16 ranks, not 3"),
        (None, &["--workload", "zero3"], "needs several ranks: strata launch"),
        (None, &["--workload", "zero4", "--simulate", "frontier", "-n", "8"], "did you mean `zero3`?"),
        (None, &["--workload", "zero3", "--simulate", "frontier"], "-n 2048"),
        (None, &["--workload", "zero3", "--simulate", "moon", "-n", "8"], "moon"),
        (
            None,
            &["--workload", path, "--simulate", "frontier", "-n", "8"],
            "unknown name `sample`; did you mean `samples`?",
        ),
        (Some(2), &["--workload", "zero3"], "--scale 1/64 makes all sizes smaller"),
        (None, &["all_reduce", "--workload", "zero3"], "cannot be used with"),
        (None, &["broadcast", "--simulate", "frontier", "-n", "8"], "cannot be used with"),
        (None, &near, "--skew uses the unknown name `zipff`; did you mean `zipf`?"),
        (None, &none, "workload zero3: --skew: no call of this workload says how its blocks differ in size"),
    ];
    for (nranks, words, part) in cases {
        let words = match part.starts_with("--scale") {
            // More than any machine has.
            true => [words, &["--scale", "1e6"]].concat(),
            false => words.to_vec(),
        };
        let output = perf(nranks, &words);
        let said = text(&output.stderr);
        assert!(said.contains(part) && !said.contains("panicked"), "{words:?}: {said}");
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
    }
    std::fs::remove_file(file).expect("the file can go");
    let listed = text(&perf(None, &["--workload", "list"]).stdout);
    assert!(listed.lines().count() == 17 && listed.contains("\nfsdp "), "{listed}");
}
