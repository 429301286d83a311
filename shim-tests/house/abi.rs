//! The library as the linker and the C compiler see it: symbols, dynamic section, headers.
//!
//! The symbols of NCCL 2.32.3 are listed in `nccl-symbols.txt` beside this file, independently of the table, so that
//! neither can lose one unseen.

use crate::built::{checked, library, run, run_with, Compiler};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use strata::abi::{header, matrix, table};

fn exported() -> BTreeSet<String> {
    let listing = checked(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    listing.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_string).collect()
}

#[test]
fn nccl_s_symbols_are_exported_and_declared_each_and_no_others() {
    let listed: BTreeSet<String> = include_str!("../nccl-symbols.txt").lines().map(str::to_string).collect();
    assert_eq!(listed.len(), 193);
    let declared: BTreeSet<String> = table::nccl_functions().flat_map(|function| function.names()).collect();
    assert_eq!(declared, listed);
    // MSCCL is a fork of NCCL: programs of its look for the one function that it adds in NCCL's library. NCCL itself looks for the
    // tables of its profilers.
    let (others, of_nccl): (BTreeSet<String>, BTreeSet<String>) = exported()
        .into_iter()
        .filter(|name| !name.starts_with("strata"))
        .partition(|name| name == "ncclCustomCollective" || name.starts_with("ncclProfiler_"));
    assert_eq!(of_nccl, listed);
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    assert_eq!(others, [&["ncclCustomCollective"][..], &table::PROFILER_TABLES].concat());
}

#[test]
fn strata_s_own_symbols_are_exported_and_declared_each_and_no_others() {
    let declared: BTreeSet<String> = table::own_functions().flat_map(|function| function.names()).collect();
    let own: BTreeSet<String> = exported().into_iter().filter(|name| name.starts_with("strata")).collect();
    assert_eq!(own, declared);
}

#[test]
fn no_function_is_declared_twice() {
    let mut names = table::exported_names();
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn the_library_has_nccl_s_name_stays_loaded_and_needs_only_the_system() {
    let section = checked(Command::new("readelf").arg("-dW").arg(library()));
    let entries = |tag: &str| -> Vec<String> {
        let lines = section.lines().filter(|line| line.contains(&format!("({tag})")));
        lines.filter_map(|line| Some(line.split('[').nth(1)?.split(']').next()?.to_string())).collect()
    };
    assert_eq!(entries("SONAME"), ["libnccl.so.2"]);
    assert!(section.contains("NODELETE"), "{section}");
    for needed in entries("NEEDED") {
        let system = ["libc.so.", "libgcc_s.so.", "ld-linux", "libm.so."];
        assert!(system.iter().any(|name| needed.starts_with(name)), "needs {needed}");
    }
    assert!(entries("RPATH").is_empty() && entries("RUNPATH").is_empty());
}

#[test]
fn the_headers_and_the_matrix_are_what_the_table_makes() {
    let files = [
        ("include/nccl.h", header::nccl_h()),
        ("include/rccl/rccl.h", header::rccl_h()),
        ("include/strata.h", header::strata_h()),
        ("MATRIX.md", matrix::matrix_md()),
    ];
    for (name, text) in files {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(checked_in == text, "{} is stale: run the tests once with UPDATE=1", path.display());
    }
}

/// Both languages in their strictest settings, with and without a CUDA header in sight.
#[test]
fn the_headers_compile_as_c_and_as_cpp_without_a_warning() {
    let source = "#include <rccl/rccl.h>\n#include <nccl.h>\n#include <strata.h>\n#include <strata_plugin.h>\n\
                  mscclAlgoHandle_t program;\nint main(void) { return ncclSuccess; }\n";
    let cases = [("c", "-std=c99"), ("c", "-std=c11"), ("c++", "-std=c++11"), ("c++", "-std=c++17")];
    for (language, standard) in cases {
        let strict = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", standard];
        let compiler = Compiler::new(language);
        compiler.compile(source, &strict);
        compiler.compile(source, &[&strict[..], &["-DSTRATA_NO_CUDA"]].concat());
        let fake_cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim-tests/c/cuda");
        compiler.compile(source, &[&strict[..], &["-isystem", fake_cuda.to_str().unwrap()]].concat());
    }
}

/// Every pointer type, structure and constant that programs use, printed by a C program under each header.
#[test]
fn our_header_and_nvidia_s_agree_on_layouts_and_constants() {
    let compiler = Compiler::new("c");
    let source = include_str!("../c/layout.c");
    let ours = compiler.compile(source, &["-DSTRATA_NO_CUDA"]);
    let ours = checked(&mut Command::new(ours));
    assert!(ours.contains("sizeof(ncclConfig_t) = 120\n"), "{ours}");
    // NVIDIA's own, or that in a directory of the user's choice.
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/nccl/2.32.3");
    let real = std::env::var_os("NCCL_REAL_INCLUDE").map_or(fetched, PathBuf::from);
    if !real.join("nccl.h").exists() {
        println!("SKIPPED: there is no nccl.h in {} (scripts/fetch-nccl gets it)", real.display());
        return;
    }
    let fake_cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim-tests/c/cuda");
    let arguments = ["-isystem", real.to_str().unwrap(), "-isystem", fake_cuda.to_str().unwrap()];
    let theirs = compiler.without_headers().compile(source, &arguments);
    assert_eq!(ours, checked(&mut Command::new(theirs)));
    // One unit that declares everything twice: the prototypes must be the same types.
    let theirs = std::fs::read_to_string(Path::new(&real).join("nccl.h")).unwrap();
    let unit = format!("{theirs}\n{}", prototypes_also_in(&theirs));
    let arguments = ["-fsyntax-only", "-Werror", "-isystem", fake_cuda.to_str().unwrap()];
    compiler.without_headers().compile(&unit, &arguments);
}

/// Our prototypes of the functions that another header declares as well.
fn prototypes_also_in(header: &str) -> String {
    let both = |name: &String| header.contains(&format!("{name}(")) && !name.contains("ResetDebug");
    let lines: Vec<String> = table::nccl_functions()
        .flat_map(|function| {
            function.names().into_iter().filter(both).map(|name| function.prototype(&name)).collect::<Vec<_>>()
        })
        .collect();
    assert!(lines.len() > 140, "only {} functions are in both headers", lines.len());
    lines.join("\n") + "\n"
}

/// A C program calls every function with every null, garbage and revoked argument and compares the codes.
#[test]
fn no_null_and_no_garbage_crashes_and_each_gets_nccl_s_code() {
    run("arguments.c", &[]);
}

/// Groups, streams, children and nonblocking communicators, as one thread of a C program uses them.
#[test]
fn ranks_of_one_process_work_together_in_groups_on_streams_and_in_the_background() {
    run("ranks.c", &[]);
}

/// Ranks in processes of their own, which fork, and which end with or without a word.
#[test]
fn processes_may_fork_and_end_without_destroying_their_communicators() {
    run("processes.c", &[]);
}

/// As programs do that do not link against NCCL.
#[test]
fn the_smallest_stack_of_a_thread_is_enough() {
    print!("{}", run("stack.c", &[]));
}

#[test]
fn a_program_that_opens_the_library_by_nccl_s_name_gets_this_one() {
    run("open.c", &["-ldl"]);
}

#[test]
fn processes_of_a_launcher_find_each_other() {
    run("world.c", &[]);
}

#[test]
fn communicators_of_the_host_have_limits_of_their_own_and_callbacks_are_told_what_came_of_a_stream() {
    run("host.c", &["-ldl"]);
}

#[test]
fn events_order_streams_and_tell_what_came_of_them() {
    run("events.c", &[]);
}

/// HIP's runtime on a machine without an AMD GPU, as programs meet it that were built for one; CUDA's driver alike.
#[test]
fn a_driver_that_has_no_device_is_no_error_and_leaves_the_host() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("no-device-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let hip = |init: i32, current: i32| {
        format!(
            "int hipInit(unsigned flags) {{ (void)flags; return {init}; }}\n\
             int hipGetDeviceCount(int *count) {{ *count = 0; return {init}; }}\n\
             int hipGetDevice(int *device) {{ (void)device; return {current}; }}\n"
        )
    };
    let cuda = |init: i32| {
        format!(
            "int cuInit(unsigned flags) {{ (void)flags; return {init}; }}\n\
             int cuDeviceGetCount(int *count) {{ (void)count; return {}; }}\n\
             int cuCtxGetCurrent(void **context) {{ (void)context; return 3; }}\n",
            if init == 0 { 100 } else { 3 }
        )
    };
    let drivers = [
        ("libamdhip64.so.6", hip(100, 101)),
        ("libamdhip64.so.6", hip(101, 100)),
        ("libamdhip64.so.6", hip(0, 101)),
        ("libcuda.so.1", cuda(100)),
        ("libcuda.so.1", cuda(101)),
        ("libcuda.so.1", cuda(0)),
    ];
    for (name, source) in drivers {
        let built = Compiler::new("c").compile(&source, &["-shared", "-fPIC"]);
        let driver = dir.join(name);
        std::fs::rename(built, &driver).unwrap();
        run_with("no_device.c", &["-ldl"], &[driver.to_str().unwrap()]);
    }
    std::fs::remove_dir_all(dir).unwrap();
}
