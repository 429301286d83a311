//! In front of NVIDIA's real library, without a GPU: what it answers, a program gets, through both names of each function.
//!
//! `scripts/fetch-nccl` puts the libraries into target/nccl; a release that is not there is a counted `SKIPPED`.

use crate::built::{self, checked, library, Compiler};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const RELEASES: [&str; 2] = ["2.32.3", "2.21.5"];

fn real(release: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/nccl").join(release).join("libnccl.so.2");
    match path.exists() {
        true => Some(path),
        false => {
            println!("SKIPPED: NCCL {release} is not in target/nccl (scripts/fetch-nccl gets it)");
            None
        }
    }
}

/// Each release that is there.
fn each_release(mut test: impl FnMut(&str, &Path)) {
    for release in RELEASES {
        if let Some(path) = real(release) {
            test(release, &path);
        }
    }
}

fn symbols(library: &Path) -> BTreeSet<String> {
    let listing = checked(Command::new("nm").args(["-D", "--defined-only"]).arg(library));
    listing.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_string).collect()
}

/// A program that asks the library that `NCCL_NAME` names, or the one that is preloaded.
fn program() -> PathBuf {
    let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("shim-tests/c/answers.c")).unwrap();
    Compiler::new("c").compile(&source, &["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread", "-ldl"])
}

/// What the program prints, alone in front of the real library or with Strata between.
fn answers(program: &Path, real: &Path, through: Option<&Path>) -> String {
    checked(asking(program, real).env("NCCL_NAME", through.unwrap_or(real)))
}

/// The program, in front of a release.
fn asking(program: &Path, real: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("STRATA_NCCL_LIB", real).env("NCCL_COMM_ID", "127.0.0.1:45678").env_remove("NCCL_DEBUG");
    command
}

/// That Strata's answers are the real library's. Functions that it does not have are refused with ncclInvalidUsage.
fn same(alone: &str, served: &str, what: &str) {
    let asked = |line: &str| line.split_once(" of nulls ").map(|(function, _)| format!("{function} of nulls "));
    let lacking = |line: &&str| {
        line.ends_with(" of nulls 5")
            && asked(line).is_some_and(|asked| !alone.lines().any(|line| line.starts_with(&asked)))
    };
    let served: Vec<&str> = served.lines().filter(|line| !lacking(line)).collect();
    assert_eq!(alone.lines().collect::<Vec<_>>(), served, "{what}");
}

#[test]
fn strata_exports_what_the_real_library_exports() {
    each_release(|release, real| {
        let is_nccl = |name: &&String| name.starts_with("nccl") || name.starts_with("pnccl");
        let (ours, theirs) = (symbols(&library()), symbols(real));
        let (ours, theirs): (BTreeSet<&String>, BTreeSet<&String>) =
            (ours.iter().filter(is_nccl).collect(), theirs.iter().filter(is_nccl).collect());
        assert!(theirs.is_subset(&ours), "{release}: {:?}", theirs.difference(&ours).collect::<Vec<_>>());
        if release == "2.32.3" {
            // Of MSCCL, a fork of it, Strata has a function, too; and it is a profiler of NCCL's.
            let more: Vec<&str> = ours.difference(&theirs).map(|name| name.as_str()).collect();
            assert_eq!(more, [&["ncclCustomCollective"][..], &strata::abi::table::PROFILER_TABLES].concat());
        }
    });
}

#[test]
fn a_program_gets_the_real_library_s_answers_through_both_names() {
    let program = program();
    each_release(|release, real| {
        let alone = answers(&program, real, None);
        let served = answers(&program, real, Some(&library()));
        assert!(
            alone.contains(&format!("version {}", release.replace('.', ""))) || alone.contains("version 2"),
            "{alone}"
        );
        assert!(alone.lines().count() > 80, "{alone}");
        same(&alone, &served, release);
    });
    std::fs::remove_file(program).unwrap();
}

/// PyTorch maps the real file before anything calls it, which takes `RTLD_DEEPBIND` its effect.
#[test]
fn there_is_no_recursion_whichever_library_is_mapped_first() {
    let program = program();
    each_release(|release, real| {
        let alone = answers(&program, real, None);
        for preload in [format!("{} {}", library().display(), real.display()), library().display().to_string()] {
            let mut command = asking(&program, real);
            let served = checked(command.env("NCCL_NAME", "preloaded").env("LD_PRELOAD", &preload));
            same(&alone, &served, &format!("{release} {preload}"));
        }
    });
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_function_that_an_older_release_lacks_is_refused_with_the_release() {
    let Some(real) = real("2.21.5") else { return };
    let source = "#include <nccl.h>\n#include <stdio.h>\nint main(void) { ncclComm_t c; \
                  printf(\"%d %d\\n\", ncclCommGrow(NULL, 1, NULL, 0, &c, NULL), ncclCommShrink(NULL, NULL, 0, &c, NULL, 0)); \
                  return 0; }\n";
    let dir = built::library_dir();
    let program = Compiler::new("c").compile(source, &["-L", dir.to_str().unwrap(), "-lnccl"]);
    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", &dir).env("STRATA_NCCL_LIB", &real).env("NCCL_DEBUG", "WARN");
    command.stderr(std::process::Stdio::piped());
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(out, "5 5\n", "{err}");
    assert!(err.contains("ncclCommGrow: it is not in NCCL 2.21.5"), "{err}");
    std::fs::remove_file(program).unwrap();
}

#[test]
fn the_real_library_alone_answers_when_strata_is_disabled() {
    let program = program();
    each_release(|release, real| {
        let mut command = asking(&program, real);
        let served = checked(command.env("NCCL_NAME", library()).env("STRATA_DISABLE", "1"));
        same(&answers(&program, real, None), &served, release);
    });
    std::fs::remove_file(program).unwrap();
}

/// The linker takes a preloaded Strata for the vendor's library, and never goes where the program says that it is.
#[test]
fn the_library_that_a_program_names_by_its_run_path_is_found_behind_a_preloaded_strata() {
    let Some(real) = real("2.21.5") else { return };
    let source = "#include <nccl.h>\n#include <stdio.h>\nint main(void) { int version = 0; ncclGetVersion(&version); \
                  printf(\"%d\\n\", version); return 0; }\n";
    let (real, dir) = (real.to_str().unwrap(), real.parent().unwrap().display());
    for tags in ["disable", "enable"] {
        let path = format!("-Wl,--allow-shlib-undefined,--{tags}-new-dtags,-rpath,{dir}");
        let program = Compiler::new("c").compile(source, &[real, &path]);
        let mut command = Command::new(&program);
        command.env_remove("LD_LIBRARY_PATH").env_remove("STRATA_NCCL_LIB").env("LD_PRELOAD", library());
        assert_eq!(checked(&mut command), "22105\n", "{tags}-new-dtags");
        std::fs::remove_file(program).unwrap();
    }
}

/// Programs make strings of these texts, which a null ends.
#[test]
fn errors_have_a_text_where_the_library_asked_for_is_not_there() {
    let source = "#include <nccl.h>\n#include <stdio.h>\nint main(void) { int version; \
                  ncclResult_t result = ncclGetVersion(&version); \
                  puts(ncclGetErrorString(result)); puts(ncclGetLastError(NULL)); return 0; }\n";
    let dir = built::library_dir();
    let program = Compiler::new("c").compile(source, &["-L", dir.to_str().unwrap(), "-lnccl"]);
    let mut command = Command::new(&program);
    let said = checked(command.env("LD_LIBRARY_PATH", &dir).env("STRATA_NCCL_LIB", "/nowhere/libnccl.so.2"));
    assert!(said.starts_with("invalid usage"), "{said}");
    assert!(said.contains("ncclGetVersion: STRATA_NCCL_LIB=/nowhere/libnccl.so.2: No such file"), "{said}");
    std::fs::remove_file(program).unwrap();
}

/// A preload costs a program that never uses NCCL nothing but the mapping of Strata's own file.
#[test]
fn a_program_that_never_calls_has_no_thread_no_output_and_no_library_of_the_vendor_s() {
    let Some(real) = real("2.32.3") else { return };
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ls /proc/$$/task | wc -l; grep -c libnccl /proc/$$/maps; grep -q libstrata /proc/$$/maps && echo here",
    ]);
    command.env("LD_PRELOAD", library()).env("STRATA_NCCL_LIB", real).env("NCCL_DEBUG", "INFO");
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n0\nhere\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
