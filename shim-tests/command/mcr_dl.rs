//! MCR-DL's figures as `scripts/mcr-dl-figures` makes them: the page is fresh, and what is fitted still meets the paper.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const STRATA: &str = env!("CARGO_BIN_EXE_strata");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn strata(words: &[&str]) -> Output {
    Command::new(STRATA).args(words).stdin(Stdio::null()).output().expect("the command starts")
}

/// The steps of a workload by some routes, in microseconds.
fn steps(workload: &str, machine: &str, nranks: &str, routes: &str) -> Vec<f64> {
    let carriers = "nccl,mvapich2-gdr";
    let output = strata(&[
        "perf",
        "--workload",
        workload,
        "--simulate",
        machine,
        "-n",
        nranks,
        "--routes",
        routes,
        "--carriers",
        carriers,
        "--json",
        "-",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let figures: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let found = figures["routes"].as_array().expect("routes");
    let step =
        |name: &str| found.iter().find(|route| route["route"] == name).and_then(|route| route["step_us"].as_f64());
    routes.split(',').map(|name| step(name).expect("a step")).collect()
}

#[test]
fn the_page_is_what_its_script_makes() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("SKIPPED: scripts/mcr-dl-figures: there is no python3");
        return;
    }
    let mut command = Command::new("python3");
    command
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .arg(root().join("scripts/mcr-dl-figures"))
        .args(["--check", "--strata", STRATA]);
    let output = command.output().expect("python3 starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn what_is_fitted_meets_the_paper_and_what_is_predicted_is_as_near_as_the_page_says() {
    for (workload, machine, most, over_mv2, over_nccl, efficiency) in
        [("ds-moe", "lassen", "256", 1.31, 1.35, 0.81), ("dlrm-mcr", "thetagpu", "32", 1.25, 1.30, 0.75)]
    {
        let routes = "mvapich2-gdr,nccl,mix";
        let [mv2, nccl, mix] = steps(workload, machine, most, routes)[..] else { panic!("three routes") };
        assert!((mv2 / mix / over_mv2 - 1.0).abs() < 0.005, "{workload}: {}", mv2 / mix);
        assert!((nccl / mix / over_nccl - 1.0).abs() < 0.005, "{workload}: {}", nccl / mix);
        let [mv2_few, nccl_few, mix_few] = steps(workload, machine, "16", routes)[..] else { panic!("three routes") };
        assert!((mix_few / mix / efficiency - 1.0).abs() < 0.05, "{workload}: efficiency {}", mix_few / mix);
        // NCCL is ahead on 16 ranks, MVAPICH2-GDR on 32.
        let [mv2_32, nccl_32] = steps(workload, machine, "32", "mvapich2-gdr,nccl")[..] else { panic!("two routes") };
        assert!(nccl_few < mv2_few && mv2_32 < nccl_32, "{workload}: {nccl_few} {mv2_few} {nccl_32} {mv2_32}");
    }
}

#[test]
fn a_carrier_that_a_machine_does_not_have_is_told() {
    let output = strata(&["perf", "--workload", "ds-moe", "--simulate", "lassen", "-n", "16", "--carriers", "sccl"]);
    assert!(!output.status.success());
    let said = text(&output.stderr);
    assert!(said.contains("machine lassen has no carrier sccl; its carriers: mvapich2-gdr, nccl"), "{said}");
    let output = strata(&["simulate", "--machine", "lassen", "-n", "16", "--bytes", "1M", "--method", "carrier(sccl)"]);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(said.contains("no carrier sccl"), "{said}");
}

#[test]
fn table_ii_comes_out_row_by_row() {
    let expected = ["mvapich2-gdr", "mvapich2-gdr", "mvapich2-gdr", "mvapich2-gdr", "nccl", "nccl", "sccl", "sccl"];
    for (power, expected) in (8..16).zip(expected) {
        let bytes = (32usize << power).to_string();
        let output = strata(&[
            "simulate",
            "--machine",
            "thetagpu",
            "--collective",
            "all_gather",
            "-n",
            "32",
            "--bytes",
            &bytes,
            "--method",
            "carrier(mvapich2-gdr),carrier(nccl),carrier(sccl),mix",
            "--json",
            "-",
        ]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let figures: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let methods = figures["cells"][0]["methods"].as_array().expect("methods");
        let ms: Vec<f64> = methods.iter().map(|method| method["ms"].as_f64().expect("a time")).collect();
        let names = ["mvapich2-gdr", "nccl", "sccl"];
        let (_, quickest) = ms[..3].iter().zip(names).min_by(|a, b| a.0.total_cmp(b.0)).expect("three");
        assert_eq!(quickest, expected, "{bytes} bytes: {ms:?}");
        assert_eq!(ms[3], ms[..3].iter().copied().fold(f64::INFINITY, f64::min), "the mix is the quickest");
    }
}
