//! `scripts/check` itself, in a copy of the tree's list of tests, with a cargo that says what the test wants it to say:
//! what it counts, what it refuses, and that it runs every test program that there is.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A folder with the check, its lists and the manifests, where cargo only prints.
struct Copy {
    folder: PathBuf,
}

impl Copy {
    /// `said` is what cargo prints for each test program; it succeeds.
    fn new(name: &str, said: &str) -> Copy {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gate-{name}.{}", std::process::id()));
        for file in ["scripts/check", ".ci/skips", ".ci/fast", "Cargo.toml", "cli/Cargo.toml"] {
            fs::create_dir_all(folder.join(file).parent().expect("a folder")).expect("a folder can be made");
            fs::copy(root().join(file), folder.join(file)).expect("a file of the gate can be copied");
        }
        let copy = Copy { folder };
        copy.write("said", said);
        copy.cargo("#!/bin/sh\ncat \"$(dirname \"$0\")/../said\"\n");
        copy
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.folder.join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder can be made");
        fs::write(path, text).expect("a file can be written");
    }

    fn cargo(&self, script: &str) {
        self.write("bin/cargo", script);
        let path = self.folder.join("bin/cargo");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("made executable");
    }

    fn check(&self, arguments: &[&str], ci: &str) -> (bool, String) {
        let path = format!("{}:{}", self.folder.join("bin").display(), std::env::var("PATH").expect("a PATH"));
        let mut command = Command::new(self.folder.join("scripts/check"));
        let output = command.args(arguments).env("PATH", path).env("CI", ci).output().expect("the check runs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // What is left over lies in target.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// What cargo prints of a test program, with this among it.
fn run_of(name: &str, said: &str, passed: usize, ignored: usize) -> String {
    format!(
        "     Running shim-tests/{name}.rs (target/debug/deps/{name})\n{said}\ntest result: ok. {passed} passed; 0 failed; \
         {ignored} ignored; 0 measured; 0 filtered out; finished in 1.50s\n"
    )
}

fn last(said: &str) -> &str {
    said.lines().last().unwrap_or("")
}

/// The row of a part in the table.
fn row<'a>(said: &'a str, part: &str) -> &'a str {
    let table = said.lines().skip_while(|line| !line.starts_with("part "));
    table.into_iter().find(|line| line.split_whitespace().next() == Some(part)).unwrap_or("")
}

/// The test programs of both packages, as (name, path from the root).
fn programs() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for package in ["", "cli"] {
        let text = fs::read_to_string(root().join(package).join("Cargo.toml")).expect("a manifest");
        let manifest: toml::Table = text.parse().expect("a manifest is TOML");
        assert_eq!(manifest["package"]["autotests"].as_bool(), Some(false), "{package}: cargo adds none by itself");
        for test in manifest["test"].as_array().expect("test programs") {
            let text = |key: &str| test[key].as_str().expect("a name and a path").to_string();
            let path = text("path");
            found.push((text("name"), PathBuf::from(path.trim_start_matches("../"))));
        }
    }
    found
}

#[test]
fn every_test_program_of_both_packages_is_a_part() {
    let programs = programs();
    let names: Vec<&str> = programs.iter().map(|(name, _)| name.as_str()).collect();
    assert!(
        ["book", "new_algorithm", "new_transport", "mpi", "fuzz"].iter().all(|name| names.contains(name)),
        "{names:?}"
    );
    let (succeeded, said) = Copy::new("parts", "").check(&["--list"], "");
    assert!(succeeded);
    let parts: BTreeSet<&str> = said.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let missing: Vec<&&str> = names.iter().filter(|name| !parts.contains(**name)).collect();
    assert!(missing.is_empty(), "no parts: {missing:?}");
    // And a file of tests that no manifest names would run nowhere.
    let listed: BTreeSet<&Path> = programs.iter().map(|(_, path)| path.as_path()).collect();
    for entry in fs::read_dir(root().join("shim-tests")).expect("the folder of tests") {
        let name = entry.expect("an entry can be read").file_name();
        let path = Path::new("shim-tests").join(name);
        assert!(
            path.extension().is_none_or(|end| end != "rs") || listed.contains(path.as_path()),
            "{path:?} runs nowhere"
        );
    }
}

#[test]
fn in_ci_a_skip_without_a_reason_fails_whatever_test_program_says_it() {
    let programs = programs();
    let names: Vec<&str> = programs.iter().map(|(name, _)| name.as_str()).collect();
    let skip = run_of("x", "SKIPPED: there is no such tool", 2, 0);
    let copy = Copy::new("skips", &skip);
    let (succeeded, said) = copy.check(&names, "");
    assert!(succeeded, "{said}");
    assert!(last(&said).ends_with(&format!("passed, 0 failed, {} skipped", names.len())), "{said}");
    for (arguments, ci) in [(&["--strict"][..], ""), (&[][..], "true")] {
        let (succeeded, said) = copy.check(&[arguments, &names].concat(), ci);
        assert!(!succeeded, "{said}");
        for name in &names {
            assert!(row(&said, name).contains("1 skipped that .ci/skips does not allow"), "{name}: {said}");
        }
    }
    // An ignored test is a skip as well; one with a reason passes.
    copy.write("said", &run_of("x", "test a::b ... ignored, takes long", 1, 1));
    assert!(!copy.check(&["--strict", "book"], "").0);
    copy.write(".ci/skips", "always | a::b | takes long\n");
    assert!(copy.check(&["--strict", "book"], "").0);
}

#[test]
fn tests_that_run_their_program_again_are_counted_once() {
    let nested = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 7.00s\n";
    let copy = Copy::new("counts", &(run_of("a", nested, 5, 0) + &run_of("b", nested, 3, 0)));
    let (succeeded, said) = copy.check(&["unit"], "");
    assert!(succeeded && last(&said) == "8 passed, 0 failed, 0 skipped", "{said}");
    // Part, result, time, time in tests.
    assert_eq!(row(&said, "unit").split_whitespace().nth(3), Some("3s"), "{said}");
}

/// bash ignores `set -e` in what is a condition, also in functions called there.
#[test]
fn a_part_ends_at_its_first_command_that_fails() {
    let copy = Copy::new("first", "");
    let install = |script: &str| {
        copy.write("target/check/prefix/bin/strata", script);
        let path = copy.folder.join("target/check/prefix/bin/strata");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("made executable");
        copy.check(&["verify"], "")
    };
    let (succeeded, said) = install("#!/bin/sh\necho \"$@\"\n");
    assert!(succeeded && last(&said) == "1 passed, 0 failed, 0 skipped", "{said}");
    // Only the first of the part's commands has this argument.
    let (succeeded, said) = install("#!/bin/sh\ncase \"$*\" in *'max-ranks 16') exit 1 ;; esac\n");
    assert!(!succeeded && last(&said) == "0 passed, 1 failed, 0 skipped", "{said}");
}

#[test]
fn the_table_of_times_keeps_what_each_part_last_took_the_longest_first() {
    let copy = Copy::new("times", &run_of("x", "test x ... ok", 1, 0));
    copy.write(
        "target/check/times",
        "part\nplans 9s 7s passed long ago\nbook 11s 7s passed long ago\nabi 10s - passed\n",
    );
    assert!(copy.check(&["book"], "").0);
    let times = fs::read_to_string(copy.folder.join("target/check/times")).expect("a table of times");
    let order: Vec<&str> = times.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(order, ["part", "abi", "plans", "book"], "{times}");
    let (_, said) = copy.check(&["--list", "plans"], "");
    assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["plans", "9s"]);
}

#[test]
fn the_fast_check_runs_what_is_listed_and_fails_where_a_listed_test_is_gone() {
    let copy = Copy::new("fast", &run_of("x", "test here::first ... ok", 1, 0));
    copy.cargo("#!/bin/sh\necho \"$@\" >>\"$(dirname \"$0\")/../ran\"\ncat \"$(dirname \"$0\")/../said\"\n");
    copy.write(".ci/fast", "# PART | TESTS | WHY\nplans | | all of it\nabi | here::first | one\n");
    let (succeeded, said) = copy.check(&["--fast"], "");
    assert!(succeeded && last(&said) == "2 passed, 0 failed, 0 skipped", "{said}");
    let ran = fs::read_to_string(copy.folder.join("ran")).expect("cargo ran");
    assert!(ran.contains("--test abi -- --show-output here::first\n"), "{ran}");
    assert!(ran.contains("--test plans -- --show-output\n"), "{ran}");
    // By name the part is the whole of it.
    assert!(copy.check(&["abi"], "").0);
    let ran = fs::read_to_string(copy.folder.join("ran")).expect("cargo ran");
    assert!(ran.ends_with("--test abi -- --show-output\n"), "{ran}");
    copy.write(".ci/fast", "abi | here::first here::renamed | one of them has another name now\n");
    let (succeeded, said) = copy.check(&["--fast"], "");
    assert!(!succeeded && row(&said, "abi").contains("no test is called"), "{said}");
    copy.write(".ci/fast", "nowhere | | no part\n");
    assert!(!copy.check(&["--fast"], "").0);
}

#[test]
fn the_list_of_the_fast_check_names_parts_and_tests_that_there_are() {
    let (succeeded, said) = Copy::new("list", "").check(&["--fast", "--list"], "");
    assert!(succeeded && said.lines().count() > 10, "{said}");
    let programs = programs();
    for line in said.lines() {
        let mut words = line.split_whitespace();
        let part = words.next().expect("a part");
        for filter in words.skip(1) {
            let (_, path) = programs.iter().find(|(name, _)| name == part).expect("a test program");
            let text = fs::read_to_string(root().join(path)).expect("a test program's file");
            let named = text.lines().any(|line| line.starts_with("fn ") && line.contains(filter));
            assert!(named, "{part}: there is no test {filter}");
        }
    }
}
