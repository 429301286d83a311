//! Commands of `strata` on the ranks of a small world, and what they say.

use crate::built;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Longer than anything here takes.
pub const LIMIT: Duration = Duration::from_secs(100);
/// Four ranks on two nodes.
pub const WORLD: [&str; 7] = ["launch", "-n", "4", "--nodes", "2", "--timeout", "90"];

/// The library that is measured: the one beside the command may be older than this test.
pub static LIBRARY: LazyLock<String> = LazyLock::new(|| built::library().to_string_lossy().into_owned());

/// The command, without the settings of whoever runs the tests.
pub fn strata() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("STRATA_") && name != "STRATA_NCCL_LIB") {
        command.env_remove(name);
    }
    command.env_remove("NCCL_DEBUG").env_remove("NCCL_DEBUG_FILE").stdin(Stdio::null());
    command
}

/// The command on every rank of the world.
pub fn on_all(arguments: &[&str]) -> Command {
    let mut command = strata();
    command.args(WORLD).args(["--", env!("CARGO_BIN_EXE_strata")]).args(arguments).args(["--library", &LIBRARY]);
    command
}

/// What it says to both, if it succeeds; one that hangs is ended by the launcher.
pub fn said(command: &mut Command) -> String {
    let (text, succeeded) = outcome(command);
    assert!(succeeded, "{command:?}: {text}");
    text
}

/// The same, with whether it succeeds.
pub fn outcome(command: &mut Command) -> (String, bool) {
    let start = Instant::now();
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    assert!(start.elapsed() < LIMIT, "{command:?} took {:?}", start.elapsed());
    (String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr), status.success())
}

/// The lines in which something is said.
pub fn lines<'a>(text: &'a str, what: &str) -> Vec<&'a str> {
    text.lines().filter(|line| line.contains(what)).collect()
}

/// What all ranks say that they chose, and why.
pub fn chosen(text: &str) -> &str {
    let lines = lines(text, " -> ");
    let [first, rest @ ..] = &lines[..] else { panic!("nothing was chosen: {text}") };
    let choice = |line: &'_ str| line.split_once(" -> ").unwrap().1.to_string();
    assert!(rest.len() == 3 && rest.iter().all(|line| choice(line) == choice(first)), "{text}");
    first.split_once(" -> ").unwrap().1
}
