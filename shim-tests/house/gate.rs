//! `scripts/check` itself, in a copy of the tree's list of tests, with a cargo that says what the test wants it to say:
//! what it counts, what it refuses, and that it runs every file of tests that there is.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A cargo that also keeps its arguments.
const RECORDING: &str = "#!/bin/sh\necho \"$@\" >>\"$(dirname \"$0\")/../ran\"\ncat \"$(dirname \"$0\")/../said\"\n";

/// A folder with the check, its lists and the manifests, where cargo only prints.
struct Copy {
    folder: PathBuf,
}

impl Copy {
    /// `said` is what cargo prints for each test program; it succeeds.
    fn new(name: &str, said: &str) -> Copy {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gate-{name}.{}", std::process::id()));
        let lists = ["scripts/check", ".ci/skips", ".ci/fast", "Cargo.toml", "cli/Cargo.toml"].map(PathBuf::from);
        for file in lists.into_iter().chain(programs().into_iter().map(|(_, path)| path)) {
            fs::create_dir_all(folder.join(&file).parent().expect("a folder")).expect("a folder can be made");
            fs::copy(root().join(&file), folder.join(&file)).expect("a file of the gate can be copied");
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

    /// The arguments of each cargo that ran.
    fn ran(&self) -> String {
        fs::read_to_string(self.folder.join("ran")).expect("cargo ran")
    }

    /// Those of each that ran tests of a program.
    fn tested(&self) -> Vec<String> {
        let is_test = |line: &&str| line.starts_with("test ");
        self.ran().lines().filter(is_test).map(str::to_string).collect()
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

/// A part of the check, the test program that has it, and the file with its tests.
struct Part {
    name: String,
    program: String,
    path: PathBuf,
    /// What the names of its tests begin with.
    scope: String,
}

/// The parts that test programs are: the files beside a main.rs, and any other program.
fn parts() -> Vec<Part> {
    let mut found = Vec::new();
    for (program, path) in programs() {
        if !path.ends_with("main.rs") {
            found.push(Part { name: program.clone(), program, path, scope: String::new() });
            continue;
        }
        let folder = path.parent().expect("a folder");
        for entry in fs::read_dir(root().join(folder)).expect("a folder of tests") {
            let file = PathBuf::from(entry.expect("an entry can be read").file_name());
            if file.as_path() != Path::new("main.rs") {
                let name = file.file_stem().and_then(|name| name.to_str()).expect("a name").to_string();
                let scope = format!("{name}::");
                found.push(Part { name, program: program.clone(), path: folder.join(file), scope });
            }
        }
    }
    found
}

#[test]
fn every_file_of_tests_is_a_part() {
    let parts = parts();
    let names: BTreeSet<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    assert!(names.is_superset(&BTreeSet::from(["book", "new_algorithm", "new_transport", "mpi", "fuzz"])), "{names:?}");
    assert_eq!(names.len(), parts.len(), "two parts of one name: {names:?}");
    let copy = Copy::new("parts", &run_of("x", "test x ... ok", 1, 0));
    copy.cargo(RECORDING);
    let (succeeded, said) = copy.check(&["--list"], "");
    assert!(succeeded);
    let known: BTreeSet<&str> = said.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let missing: Vec<&&str> = names.iter().filter(|name| !known.contains(**name)).collect();
    assert!(missing.is_empty(), "no parts: {missing:?}");
    // Each runs by itself.
    for Part { name, program, scope, .. } in &parts {
        assert!(copy.check(&[name], "").0, "{name}");
        let line = format!("test --locked --test {program} -- --show-output {scope}");
        assert_eq!(copy.tested().last().map(String::as_str), Some(line.trim_end()), "{name}");
    }
    // And a file of tests that no manifest names would run nowhere.
    for entry in fs::read_dir(root().join("shim-tests")).expect("the folder of tests") {
        let path = Path::new("shim-tests").join(entry.expect("an entry can be read").file_name());
        let runs = parts.iter().any(|part| part.path == path);
        assert!(runs || path.extension().is_none_or(|end| end != "rs"), "{path:?} runs nowhere");
    }
}

/// The check asks a test program for the tests with a module's name in theirs.
#[test]
fn no_part_of_a_program_gets_the_tests_of_another() {
    let parts = parts();
    for part in &parts {
        let others = parts.iter().filter(|other| other.program == part.program && other.name != part.name);
        let taken: Vec<&str> =
            others.map(|other| other.name.as_str()).filter(|other| other.ends_with(&part.name)).collect();
        assert!(taken.is_empty(), "the filter {}:: matches {taken:?}", part.name);
    }
}

#[test]
fn a_part_that_runs_no_test_fails() {
    let nothing = run_of("x", "", 0, 0);
    for said in [nothing.clone(), run_of("y", "test y ... ok", 1, 0) + &nothing] {
        let (succeeded, said) = Copy::new("nothing", &said).check(&["mpi"], "");
        assert!(!succeeded && row(&said, "mpi").contains("no test is called"), "{said}");
    }
    // All crates' own tests are asked for, and a crate may have none.
    let (succeeded, said) = Copy::new("few", &(run_of("y", "test y ... ok", 1, 0) + &nothing)).check(&["unit"], "");
    assert!(succeeded, "{said}");
}

#[test]
fn in_ci_a_skip_without_a_reason_fails_whatever_test_program_says_it() {
    let parts = parts();
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
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
    let (succeeded, said) = install("#!/bin/sh\ncase \"$*\" in *'max-ranks 4') exit 1 ;; esac\n");
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
    let copy = Copy::new("fast", &run_of("x", "test abi::first_of_all ... ok", 1, 0));
    copy.cargo(RECORDING);
    copy.write(".ci/fast", "# PART | TESTS | WHY\nplans | | all of it\nabi | first | one\n");
    let (succeeded, said) = copy.check(&["--fast"], "");
    assert!(succeeded && last(&said) == "2 passed, 0 failed, 0 skipped", "{said}");
    let ran = copy.ran();
    assert!(ran.contains("--test house -- --show-output abi::first\n"), "{ran}");
    assert!(ran.contains("--test plans -- --show-output plans::\n"), "{ran}");
    // By name the part is the whole of it.
    assert!(copy.check(&["abi"], "").0);
    assert!(copy.ran().ends_with("--test house -- --show-output abi::\n"), "{}", copy.ran());
    copy.write(".ci/fast", "abi | first second | one of them has another name now\n");
    let (succeeded, said) = copy.check(&["--fast"], "");
    assert!(!succeeded && row(&said, "abi").contains("no test is called"), "{said}");
    copy.write(".ci/fast", "nowhere | | no part\n");
    assert!(!copy.check(&["--fast"], "").0);
}

#[test]
fn the_list_of_the_fast_check_names_parts_and_tests_that_there_are() {
    let (succeeded, said) = Copy::new("list", "").check(&["--fast", "--list"], "");
    assert!(succeeded && said.lines().count() > 10, "{said}");
    let parts = parts();
    for line in said.lines() {
        let mut words = line.split_whitespace();
        let part = words.next().expect("a part");
        for begin in words.skip(1) {
            let Part { path, .. } = parts.iter().find(|known| known.name == part).expect("a part with tests");
            let text = fs::read_to_string(root().join(path)).expect("a file of tests");
            let named = text.lines().any(|line| line.starts_with(&format!("fn {begin}")));
            assert!(named, "{part}: there is no test {begin}");
        }
    }
}
