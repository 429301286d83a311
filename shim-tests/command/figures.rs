//! The programs that `scripts/msccl` generates: proved to do what they say, and priced as MSCCLang's paper has it.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A folder of programs that is removed in the end; none where there is no Python.
struct Programs(PathBuf);

impl Programs {
    fn new(name: &str) -> Option<Programs> {
        if Command::new("python3").arg("--version").output().is_err() {
            println!("SKIPPED: scripts/msccl: there is no python3");
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("msccl-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        Some(Programs(folder))
    }

    fn generate(&self, name: &str, arguments: &[&str]) -> String {
        let path = self.0.join(format!("{name}.xml"));
        let path = path.to_str().expect("a path in UTF-8").to_string();
        let output = generate(&[arguments, &["-o", &path]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        path
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn generate(arguments: &[&str]) -> Output {
    let mut command = Command::new("python3");
    command.env("PYTHONDONTWRITEBYTECODE", "1").arg(root().join("scripts/msccl/generate.py")).args(arguments);
    command.env("STRATA_COMMAND", env!("CARGO_BIN_EXE_strata")).output().expect("python3 starts")
}

fn strata(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strata")).args(arguments).output().expect("the command starts")
}

#[test]
fn every_generated_program_does_what_it_says() {
    let Some(programs) = Programs::new("proved") else { return };
    for (index, words) in [
        "ring --gpus 4 --channels 2 --instances 3 --protocol LL128",
        "ring --nodes 2 --gpus 4 --instances 5",
        "reduce_scatter --gpus 5 --instances 2",
        "all_gather --gpus 5 --instances 2",
        "all_pairs --gpus 6 --instances 2 --protocol LL",
        "hierarchical --nodes 2 --gpus 4 --instances 3 --rails 2",
        "hierarchical --nodes 3 --gpus 2",
        "tree --nodes 2 --gpus 4 --channels 3",
        "direct --nodes 2 --gpus 4 --at-once 3",
        "two_step --nodes 3 --gpus 4",
        "next_direct --nodes 2 --gpus 3",
        "all_to_next --nodes 3 --gpus 3 --instances 2",
    ]
    .into_iter()
    .enumerate()
    {
        let arguments: Vec<&str> = words.split(' ').collect();
        let path = programs.generate(&format!("program{index}"), &arguments);
        let verified = strata(&["plan", "verify", &path]);
        let said = text(&verified.stdout) + &text(&verified.stderr);
        assert!(verified.status.success() && said.contains("1 accepted"), "{words}: {said}");
    }
}

#[test]
fn all_to_next_wins_by_all_nics_and_by_more_than_one_connection() {
    let Some(programs) = Programs::new("next") else { return };
    let direct = programs.generate("direct", &["next_direct", "--nodes", "3"]);
    let ours = programs.generate("ours", &["all_to_next", "--nodes", "3", "--instances", "8"]);
    let method = format!("script:{direct},script:{ours}/segment=1M/window=8");
    let ratio = |bytes: &str, without: &[&str]| {
        let cell = ["simulate", "--machine", "ndv4", "--collective", "custom", "-n", "24", "--json", "-"];
        let output = strata(&[&cell[..], &["--bytes", bytes, "--method", &method], without].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        value["cells"][0]["methods"][1]["ratio"].as_f64().expect("a ratio")
    };
    assert!(ratio("4K", &[]) < 1.0, "two steps more cost more than they save");
    let (both, wires) = (ratio("64M", &[]), ratio("64M", &["--without", "lanes"]));
    assert!((9.0..14.0).contains(&both), "{both}");
    assert!((6.0..8.01).contains(&wires), "eight NICs in place of one, and no more: {wires}");
}

#[test]
fn programs_that_cannot_be_are_refused() {
    if Programs::new("refused").is_none() {
        return;
    }
    for (words, said) in [
        ("rong", "invalid choice"),
        ("ring --gpus 0", "from 1 to 1024"),
        ("two_step --nodes 512", "1,024 ranks"),
        ("tree --nodes 3", "--nodes 2"),
        ("ring --gpus 1", "two ranks"),
        ("ring --protocol LL64", "invalid choice"),
    ] {
        let output = generate(&words.split(' ').collect::<Vec<_>>());
        let complaint = text(&output.stderr);
        assert!(output.status.code() == Some(2) && complaint.contains(said), "{words}: {complaint}");
    }
}
