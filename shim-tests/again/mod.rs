//! A test of this program in a process of its own, where it needs that: for its environment, its memory, or as one rank.

use std::process::Command;

/// One test of this program in a process of its own; `module` is that of the test, by `module_path!()`.
pub fn again(module: &str, test: &str) -> Command {
    let (_, module) = module.split_once("::").expect("a module of a test program");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([&format!("{module}::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
    command
}

/// Such a process must run its test, and pass; what it says.
pub fn passes(command: &mut Command) -> String {
    let output = command.output().expect("this program starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    // A name that no test has would pass as well.
    assert!(output.status.success() && said.contains("\nrunning 1 test\n"), "{command:?}: {said}");
    said
}
