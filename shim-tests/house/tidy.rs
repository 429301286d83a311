//! House rules, held by a test: which module may use which, how long files and functions may be, where `unsafe` may
//! stand and how it is explained, what every file begins with, and that documents are fresh.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library's modules, lowest first: each may use those before it.
const ORDER: [&str; 32] = [
    "error",
    "carrier",
    "digest",
    "process",
    "dtype",
    "code",
    "config",
    "fork",
    "sync",
    "log",
    "admission",
    "listen",
    "memory",
    "topo",
    "plan",
    "algorithms",
    "verify",
    "script",
    "transport",
    "device",
    "exec",
    "sim",
    "selection",
    "profiler",
    "records",
    "interface",
    "vendor",
    "health",
    "bootstrap",
    "communicator",
    "abi",
    "fuzz",
];

/// Uses against the order, and why each is right: (module, what it uses, reason).
const EXCEPTIONS: [(&str, &str, &str); 6] = [
    ("carrier", "transport", "the names that STRATA_INTER takes are those of the registry of transports"),
    ("config", "plan", "settings per collective are named by plan::Collective"),
    ("transport", "device", "a receiver combines what arrives while it is in cache (Combine)"),
    ("transport", "exec", "tokens name pending operations on both sides (Token, Started)"),
    ("device", "exec", "a device is the local half of a World"),
    ("health", "bootstrap", "the links between ranks are connections of the process's service"),
];

/// Where `unsafe` may stand, and for what.
const UNSAFE: [(&str, &str); 29] = [
    ("mpitrampoline/src", "functions of a library opened at run time, and pointers of C callers"),
    ("src/process.rs", "what the system was told when the process began, and numbers of descriptors"),
    ("src/fork.rs", "handlers of fork, and values that live as long as the process"),
    ("src/abi", "functions behind addresses, and jumps to them"),
    ("src/interface", "pointers of C callers, and functions of a library opened at run time"),
    ("src/sync/biased.rs", "a value that one thread at a time has"),
    ("src/memory", "regions, arenas, mappings, and the system calls that fill them"),
    ("src/transport/shm", "shared memory between processes"),
    ("src/transport/mpi", "functions of a library opened at run time"),
    ("src/transport/provider", "functions of a library opened at run time, and memory that calls under way point to"),
    ("src/records/clock.rs", "an instruction of the processor's"),
    ("src/profiler", "functions of a profiler of the program's, and what the C library formats for it"),
    ("src/vendor", "functions of the vendor's library, and jumps to them"),
    ("src/communicator/device.rs", "scratch that messages under way point to"),
    ("src/communicator/epochs.rs", "the words of an epoch, buffers of a call that keeps them"),
    ("src/communicator/late", "parts that late ranks bring, buffers of calls that keep them"),
    (
        "src/communicator/lost/kept.rs",
        "inputs of calls that may be made again, buffers of a call that ends before they do",
    ),
    ("src/communicator/measure.rs", "buffers of a call that ends before they do"),
    ("src/communicator/windows.rs", "the words that close windows, buffers of a call that ends before they do"),
    ("src/communicator/staging", "slots that messages under way point to"),
    ("src/communicator/shadow", "functions of the vendor's library, with what Strata knows of its communicators"),
    ("src/transport/mod.rs", "lists of a device that is the host"),
    ("examples/device", "memory of the toy device, which is this process's"),
    ("plugins/mpi/src", "calls of MPI"),
    ("src/device/gpu", "functions of a GPU's driver, and words that streams wait for"),
    ("src/device/host", "vector instructions and loops over raw elements"),
    ("cli/src/gpu", "copies and kernels of a GPU, on memory that is kept beside its stream"),
    ("cli/src/nccl.rs", "calls of a library opened at run time"),
    ("cli/src/process.rs", "signals and child processes"),
];

const FILE_WARN_LINES: usize = 600;
const FILE_MAX_LINES: usize = 800;
const FUNCTION_MAX_LINES: usize = 70;
/// What is not for a first visit is a page in docs.
const README_MAX_LINES: usize = 200;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// All files below the root with this extension, as paths relative to it; build output and hidden folders left out.
fn files(extension: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).expect("a folder of the tree can be read");
        for path in entries.map(|entry| entry.expect("an entry can be read").path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("").to_string();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|found| found == extension) {
                let relative = path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
                found.push((relative, fs::read_to_string(&path).expect("a text file")));
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no .{extension} files found");
    found
}

/// Fails with all complaints at once.
fn none(rule: &str, complaints: Vec<String>) {
    assert!(complaints.is_empty(), "{rule}:\n  {}", complaints.join("\n  "));
}

/// The source with comments, strings and character literals blanked out, so that braces and words can be counted.
fn code_of(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        let skipped = literal_len(rest, at.checked_sub(1).map(|before| chars[before]));
        for c in &rest[..skipped] {
            code.push(if *c == '\n' { '\n' } else { ' ' });
        }
        if skipped == 0 {
            code.push(rest[0]);
        }
        at += skipped.max(1);
    }
    code
}

/// Characters of the comment, string or character literal that `rest` begins with; 0 if it begins with code.
fn literal_len(rest: &[char], before: Option<char>) -> usize {
    let starts = |text: &str| text.chars().enumerate().all(|(index, c)| rest.get(index) == Some(&c));
    let until = |from: usize, end: &[char]| {
        (from..rest.len()).find(|&at| rest[at..].starts_with(end)).map_or(rest.len(), |at| at + end.len())
    };
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if starts("//") {
        return until(0, &['\n']) - usize::from(rest.contains(&'\n'));
    }
    if starts("/*") {
        return until(2, &['*', '/']);
    }
    if rest[0] == 'r' && !in_word {
        let hashes = rest[1..].iter().take_while(|&&c| c == '#').count();
        if rest.get(1 + hashes) == Some(&'"') {
            let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
            return until(2 + hashes, &end);
        }
    }
    if rest[0] == '"' {
        let mut at = 1;
        while at < rest.len() && rest[at] != '"' {
            at += if rest[at] == '\\' { 2 } else { 1 };
        }
        return (at + 1).min(rest.len());
    }
    if rest[0] == '\'' {
        let escaped = rest.get(1) == Some(&'\\');
        let end = if escaped { until(3, &['\'']) } else { 3 };
        // Anything longer is a lifetime or a label.
        if (escaped && end <= 12) || rest.get(2) == Some(&'\'') {
            return end;
        }
    }
    0
}

/// The library's module that a file belongs to; none for `lib.rs` and what is not below `src`.
fn module_of(path: &str) -> Option<&str> {
    let inner = path.strip_prefix("src/")?;
    let name = inner.split('/').next()?.trim_end_matches(".rs");
    (name != "lib").then_some(name)
}

/// Names that follow `crate::` in code, groups in braces included.
fn used_modules(code: &str) -> BTreeSet<String> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut used = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => used.extend([word(rest)]),
            Some(group) => {
                let mut depth = 1;
                let mut item = true;
                for (offset, c) in group.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        ',' if depth == 1 => item = true,
                        c if item && c.is_alphabetic() => {
                            used.extend([word(&group[offset..])]);
                            item = false;
                        }
                        _ => {}
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
        }
    }
    used
}

/// Files (and folders) that are compiled for tests only; tests may use anything.
fn test_only(files: &[(String, String)]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, source) in files {
        let folder = path.trim_end_matches(".rs").trim_end_matches("/mod");
        for rest in source.split("#[cfg(test)]").skip(1) {
            let name = rest.trim_start().strip_prefix("mod ").and_then(|rest| rest.split_once([';', ' ']));
            found.extend(name.map(|(name, _)| format!("{folder}/{name}")));
        }
    }
    found
}

/// Whether a file is one of these modules or inside one.
fn is_in(path: &str, modules: &[String]) -> bool {
    let inside = |rest: &str| rest == ".rs" || rest.starts_with('/');
    modules.iter().any(|module| path.strip_prefix(module.as_str()).is_some_and(inside))
}

/// The code before the first test module.
fn shipped(code: &str) -> &str {
    let end = code.match_indices("#[cfg(test)]").find(|(at, found)| {
        let after = code[at + found.len()..].trim_start();
        after.starts_with("mod ") && after.split_once('\n').is_some_and(|(line, _)| line.trim_end().ends_with('{'))
    });
    end.map_or(code, |(at, _)| &code[..at])
}

/// The types that a file makes public, wherever in it they stand; not the associated ones of traits.
fn public_types(code: &str) -> Vec<&str> {
    let kinds = ["struct", "enum", "trait", "union", "type"];
    let of = |line: &'_ str| -> Option<(usize, usize)> {
        let rest = line.trim_start();
        let after = rest.strip_prefix("pub")?;
        let after = match after.strip_prefix('(') {
            Some(scope) => scope.split_once(')')?.1,
            None => after,
        };
        let (kind, name) = after.trim_start().split_once(' ')?;
        let len = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
        let begin = line.len() - name.len();
        let associated = kind == "type" && rest.len() < line.len();
        // A name of no letters is a macro's variable.
        (kinds.contains(&kind) && !associated && len > 0).then_some((begin, begin + len))
    };
    code.lines().filter_map(|line| of(line).map(|(begin, end)| &line[begin..end])).collect()
}

#[test]
fn a_public_type_s_name_stands_for_one_thing() {
    let mut homes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, source) in files("rs").into_iter().filter(|(path, _)| path.starts_with("src/")) {
        for name in public_types(shipped(&code_of(&source))) {
            homes.entry(name.to_string()).or_default().insert(path.clone());
        }
    }
    let several = homes.into_iter().filter(|(_, paths)| paths.len() > 1);
    let complaints = several.map(|(name, paths)| format!("{name}: {}", Vec::from_iter(paths).join(", "))).collect();
    none("a public type's name is used once in the library", complaints);
    let code = "pub struct One;\n    pub(crate) enum Two {\npub type Three<T> = T;\nimpl X {\n    pub type Four = u8;\npub fn five() {}\n";
    assert_eq!(public_types(code), ["One", "Two", "Three"]);
}

#[test]
fn every_module_uses_only_those_above_it() {
    let mut complaints = Vec::new();
    let mut needed = BTreeSet::new();
    let files = files("rs");
    let tests = test_only(&files);
    for (path, source) in files {
        let Some(module) = module_of(&path).filter(|_| !is_in(&path, &tests)) else { continue };
        let Some(place) = ORDER.iter().position(|known| *known == module) else {
            complaints.push(format!("{path}: module {module} is not in the order"));
            continue;
        };
        for used in used_modules(shipped(&code_of(&source))) {
            let Some(other) = ORDER.iter().position(|known| *known == used) else { continue };
            if other > place {
                if EXCEPTIONS.iter().any(|(user, what, _)| *user == module && *what == used) {
                    needed.insert((module.to_string(), used));
                } else {
                    complaints.push(format!("{path}: {module} may not use {used}, which is below it"));
                }
            }
        }
    }
    for (user, what, _) in EXCEPTIONS {
        if !needed.contains(&(user.to_string(), what.to_string())) {
            println!("note: the exception {user} -> {what} is not needed");
        }
    }
    none("a module may use the modules above it, see ORDER and EXCEPTIONS", complaints);
}

#[test]
fn files_and_functions_stay_short() {
    let mut complaints = Vec::new();
    for (path, source) in files("rs") {
        let lines = source.lines().count();
        if lines > FILE_MAX_LINES {
            complaints.push(format!("{path}: {lines} lines, at most {FILE_MAX_LINES}"));
        } else if lines > FILE_WARN_LINES {
            println!("note: {path} has {lines} lines; {FILE_WARN_LINES} are the aim");
        }
        for (name, line, length) in functions(&code_of(&source)) {
            if length > FUNCTION_MAX_LINES {
                complaints.push(format!("{path}:{line}: fn {name} has {length} lines, at most {FUNCTION_MAX_LINES}"));
            }
        }
    }
    let readme = fs::read_to_string(root().join("README.md")).expect("there is a README").lines().count();
    if readme > README_MAX_LINES {
        complaints.push(format!("README.md: {readme} lines, at most {README_MAX_LINES}"));
    }
    none("files and functions stay short", complaints);
}

/// Name, first line and length in lines of every function with a body.
fn functions(code: &str) -> Vec<(String, usize, usize)> {
    let bytes = code.as_bytes();
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let starts_word = at == 0 || !(bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
        let name: String = code[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if !starts_word || name.is_empty() {
            continue;
        }
        let Some(end) = end_of_body(&bytes[at..]) else { continue };
        let line = code[..at].matches('\n').count() + 1;
        found.push((name, line, code[at..at + end].matches('\n').count() + 1));
    }
    found
}

/// Where the body ends that follows a signature; `None` when a semicolon comes first.
fn end_of_body(bytes: &[u8]) -> Option<usize> {
    let mut braces = 0;
    let mut others = 0;
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            b'(' | b'[' if braces == 0 => others += 1,
            b')' | b']' if braces == 0 => others -= 1,
            b';' if braces == 0 && others == 0 => return None,
            b'{' if others == 0 => braces += 1,
            b'}' if braces > 0 => {
                braces -= 1;
                if braces == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// Lines (numbered from 1) whose code has this word.
fn lines_with_word<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let has = move |line: &str| line.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|found| found == word);
    code.lines().enumerate().filter(move |(_, line)| has(line)).map(|(index, _)| index + 1)
}

/// The text of the comment with which these lines begin.
fn comment(lines: &[&str]) -> String {
    let parts = lines.iter().map_while(|line| line.trim_start().strip_prefix("//"));
    parts.map(str::trim).collect::<Vec<_>>().join(" ")
}

#[test]
fn unsafe_stands_only_where_it_may_and_says_why() {
    let mut complaints = Vec::new();
    let files = files("rs");
    let tests = test_only(&files);
    for (path, source) in files {
        let code = code_of(&source);
        let lines: Vec<&str> = source.lines().collect();
        let code_lines: Vec<&str> = code.lines().collect();
        let listed = UNSAFE.iter().any(|(place, _)| path.starts_with(place));
        let allowed = listed || path.starts_with("shim-tests/") || is_in(&path, &tests);
        for line in lines_with_word(&code, "unsafe") {
            if !allowed {
                complaints.push(format!("{path}:{line}: unsafe outside of the listed places"));
            }
            let text = code_lines[line - 1];
            let asks = text.contains("unsafe {") || text.contains("unsafe impl");
            // The note stands directly above the statement, which may have begun a few lines earlier.
            let above = &lines[line.saturating_sub(9)..line];
            let note = above.iter().rposition(|line| line.contains("SAFETY")).map(|at| comment(&above[at..]));
            match note {
                _ if !asks => {}
                None => complaints.push(format!("{path}:{line}: unsafe without a SAFETY note")),
                Some(note) if note.contains("because") || note.contains("no requirement") => {}
                Some(note) => complaints.push(format!("{path}:{line}: a SAFETY note without its reason: {note}")),
            }
        }
    }
    none("unsafe: see UNSAFE for where, and explain each with `// SAFETY: requirement; because ...`", complaints);
}

#[test]
fn every_file_begins_with_what_it_is() {
    let begins = |(path, source): (String, String)| (!source.starts_with("//! ")).then_some(path);
    none(
        "the first line of a Rust file is `//! ` and a sentence",
        files("rs").into_iter().filter_map(begins).collect(),
    );
}

/// On Linux 6.18 threads that only yield keep others, and the kernel's own, from processors for minutes: a test that waited so for the processes that
/// it tests made these fail.
#[test]
fn tests_wait_asleep() {
    let own = |path: &str| path.starts_with("shim-tests/") && !path.starts_with("shim-tests/softgpu/");
    let yields = |code: &str| code.contains("yield_now") || code.contains("sched_yield");
    let files = files("rs").into_iter().filter(|(path, _)| own(path));
    let complaints = files.filter(|(_, text)| yields(&code_of(text))).map(|(path, _)| path).collect();
    none("test programs wait asleep, and do not yield", complaints);
    assert!(yields("std::thread::yield_now()"));
}

#[test]
fn the_command_writes_its_output_in_one_place() {
    // `println!` panics where the output is full.
    let mut complaints = Vec::new();
    for (path, source) in files("rs").iter().filter(|(path, _)| path.starts_with("cli/src/")) {
        for (index, line) in code_of(source).lines().enumerate() {
            let word = |name: &str| line.match_indices(name).any(|(at, _)| !line[..at].ends_with(['e', '_']));
            let own = path == "cli/src/process.rs" || path == "cli/src/launch.rs";
            if word("println!") || word("print!") || !own && line.contains("stdout()") {
                complaints.push(format!("{path}:{}: {}", index + 1, line.trim()));
            }
        }
    }
    none("the command writes with out! and outln!", complaints);
}

#[test]
fn each_package_uses_the_crates_that_it_depends_on() {
    // What only the command or a test uses is not built into programs with the library.
    let mut complaints = Vec::new();
    for (package, sources) in [("Cargo.toml", "src/"), ("cli/Cargo.toml", "cli/src/")] {
        let manifest = fs::read_to_string(root().join(package)).expect("a manifest");
        let manifest: toml::Table = manifest.parse().expect("a manifest is TOML");
        let of_package = files("rs").into_iter().filter(|(path, _)| path.starts_with(sources));
        let code: String = of_package.map(|(_, source)| shipped(&code_of(&source)).to_string()).collect();
        for name in manifest["dependencies"].as_table().expect("a table").keys() {
            let in_path = format!("{}::", name.replace('-', "_"));
            let begins = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            if !code.match_indices(&in_path).any(|(at, _)| begins(at)) {
                complaints.push(format!("{package}: {name}"));
            }
        }
    }
    none("a package uses the crates that it depends on", complaints);
}

#[test]
fn every_parser_has_a_fuzz_target() {
    let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).expect("there is a manifest of the targets");
    let mut parsers: BTreeSet<String> = strata::fuzz::PARSERS.iter().map(|parser| parser.name.to_string()).collect();
    parsers.extend(["workload", "workload_program", "formula"].map(str::to_string));
    let mut complaints = Vec::new();
    for name in &parsers {
        let target = root().join(format!("fuzz/fuzz_targets/{name}.rs"));
        if !target.exists() || !manifest.contains(&format!("name = \"{name}\"")) {
            complaints.push(name.clone());
        }
    }
    none("these parsers have no target in fuzz/", complaints);
}

#[test]
fn nothing_is_left_to_do() {
    // Spelt in halves, or this file would find itself.
    let words = [["TO", "DO"], ["FIX", "ME"], ["X", "XX"]].map(|halves| halves.concat());
    let macros = [["to", "do!"], ["unimplem", "ented!"]].map(|halves| halves.concat());
    let mut complaints = Vec::new();
    for extension in ["rs", "c", "h", "md", "toml"] {
        let found = if has_any(extension) { files(extension) } else { Vec::new() };
        for (path, source) in found {
            for (index, line) in source.lines().enumerate() {
                let as_word = |word: &String| lines_with_word(line, word).next().is_some();
                if words.iter().any(as_word) || macros.iter().any(|name| line.contains(name)) {
                    complaints.push(format!("{path}:{}: {}", index + 1, line.trim()));
                }
            }
        }
    }
    none("a known gap is an ignored test or a line in docs/limits.md", complaints);
}

fn has_any(extension: &str) -> bool {
    let top = |folder: &str| root().join(folder);
    let folders = ["", "include", "examples", "src", "cli/src", "shim-tests"];
    folders
        .iter()
        .filter_map(|folder| fs::read_dir(top(folder)).ok())
        .flatten()
        .flatten()
        .any(|entry| entry.path().extension().is_some_and(|found| found == extension))
}

#[test]
fn no_module_is_a_drawer_for_odds_and_ends() {
    let drawers = ["utils", "util", "common", "misc", "helpers", "helper"];
    let is_drawer = |path: &str| {
        let parts = path.split('/').map(|part| part.trim_end_matches(".rs"));
        parts.into_iter().any(|part| drawers.contains(&part))
    };
    let found = files("rs").into_iter().map(|(path, _)| path).filter(|path| is_drawer(path)).collect();
    none("a module is named by what it does", found);
}

const TABLE_BEGIN: &str = "<!-- variables: written by the tidy test from src/config.rs -->\n";
const TABLE_END: &str = "<!-- end of variables -->";

/// The table of docs/environment.md.
fn variable_table() -> String {
    let mut table = String::from("| variable | default | |\n|---|---|---|\n");
    for variable in strata::config::VARIABLES {
        let agreed = if variable.agreed { " *All ranks use rank 0's value.*" } else { "" };
        table += &format!("| `{}` | `{}` | {}{agreed} |\n", variable.name, variable.default, variable.text);
    }
    table
}

/// With `STRATA_TIDY=write` in the environment the table is written instead of checked.
#[test]
fn the_table_of_variables_is_fresh() {
    let path = root().join("docs/environment.md");
    let page = fs::read_to_string(&path).expect("there is a page of variables");
    let (before, rest) = page.split_once(TABLE_BEGIN).expect("the page has the table's beginning");
    let (table, after) = rest.split_once(TABLE_END).expect("the page has the table's end");
    if std::env::var("STRATA_TIDY").is_ok_and(|value| value == "write") {
        let fresh = format!("{before}{TABLE_BEGIN}{}{TABLE_END}{after}", variable_table());
        fs::write(&path, fresh).expect("the page can be written");
    } else {
        let hint = "STRATA_TIDY=write cargo test --test house tidy::the_table_of_variables";
        assert_eq!(table, variable_table(), "the table is stale: {hint}");
    }
}

/// The patterns of .ci/skips for what is left out on every machine.
fn listed_skips() -> Vec<String> {
    let text = fs::read_to_string(root().join(".ci/skips")).expect("the list of skips");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let fields = lines.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    let always = fields.filter(|fields| {
        assert!(
            matches!(fields[..], ["always" | "maybe", pattern, reason] if !pattern.is_empty() && !reason.is_empty())
        );
        fields[0] == "always"
    });
    always.map(|fields| fields[1].to_string()).collect()
}

#[test]
fn what_is_left_out_on_every_machine_is_listed_with_a_reason() {
    let mut ignored = Vec::new();
    for (path, text) in files("rs") {
        // With the path, since cargo names a test by its modules.
        let path =
            path.trim_end_matches(".rs").trim_start_matches("cli/").trim_start_matches("src/").replace('/', "::");
        for (at, _) in text.match_indices("\n#[ignore").chain(text.match_indices("\n    #[ignore")) {
            let after = text[at..].split("fn ").nth(1).expect("an ignored test");
            ignored.push(format!("{path}::{}", after.split('(').next().unwrap_or("")));
        }
    }
    assert!(!ignored.is_empty(), "no ignored test found");
    let listed = listed_skips();
    let unlisted = ignored.iter().filter(|name| !listed.iter().any(|pattern| name.contains(pattern)));
    none("an ignored test stands in .ci/skips", unlisted.cloned().collect());
    let said = |pattern: &str| files("rs").iter().any(|(_, text)| text.contains(&format!("SKIPPED: {pattern}")));
    let stale = listed.iter().filter(|pattern| !ignored.iter().any(|name| name.contains(*pattern)) && !said(pattern));
    none("a line of .ci/skips is about something that is left out", stale.cloned().collect());
}

#[test]
fn the_check_fails_when_asked_to_leave_out_nothing_that_is_not_listed() {
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("no-rustfmt.{}", std::process::id()));
    fs::create_dir_all(&tools).expect("a folder for the tool");
    let cargo = tools.join("cargo");
    fs::write(&cargo, "#!/bin/sh\nexit 1\n").expect("a cargo that cannot format");
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).expect("made executable");
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").expect("a PATH"));
    let check = |strict: &[&str], ci: &str| {
        let mut command = Command::new(root().join("scripts/check"));
        let output = command.args(strict).arg("format").env("PATH", &path).env("CI", ci).output();
        let output = output.expect("the check runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("rustfmt is not installed"), "{said}");
        (output.status.success(), said.lines().last().unwrap_or("").to_string())
    };
    assert_eq!(check(&[], ""), (true, "0 passed, 0 failed, 1 skipped".to_string()));
    assert_eq!(check(&["--strict"], ""), (false, "0 passed, 1 failed, 0 skipped".to_string()));
    assert_eq!(check(&[], "true"), (false, "0 passed, 1 failed, 0 skipped".to_string()));
    fs::remove_dir_all(&tools).expect("the folder can be removed");
}

#[test]
fn the_rules_themselves_find_what_they_look_for() {
    let code =
        code_of("fn a<'x>() { let c = '{'; \"fn b() {\"; } // unsafe {\nfn long() {\n\n}\n/* fn z() {} */ r#\"}\"#");
    assert_eq!(functions(&code), [("a".into(), 1, 1), ("long".into(), 2, 3)]);
    assert_eq!(lines_with_word(&code, "unsafe").count(), 0);
    let used: Vec<String> = used_modules("use crate::plan::{x, y}; use crate::{memory::Region, topo}; crate::log::a()")
        .into_iter()
        .collect();
    assert_eq!(used, ["log", "memory", "plan", "topo"]);
    assert_eq!(
        shipped("a\n#[cfg(test)]\nmod tests;\nb\n#[cfg(test)]\nmod tests {\nc"),
        "a\n#[cfg(test)]\nmod tests;\nb\n"
    );
    let declared = |path: &str, text: &str| test_only(&[(path.to_string(), text.to_string())]);
    assert_eq!(declared("src/plan/mod.rs", "#[cfg(test)]\nmod samples;\n"), ["src/plan/samples"]);
    assert_eq!(module_of("src/plan/mod.rs"), Some("plan"));
    assert_eq!(module_of("src/log.rs"), Some("log"));
    assert_eq!(module_of("cli/src/main.rs"), None);
}
