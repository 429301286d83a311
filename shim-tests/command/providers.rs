//! The provider in `examples/provider` on real processes: its results, what says that it was chosen, and providers that go wrong.

use crate::built::{self, checked, header_dir, library_dir, root, Compiler};
use crate::launched::{lines, said, strata};
use crate::soft;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The settings of collectives whose blocks may differ in size.
const VECTORED: [&str; 5] = [
    "STRATA_ALLGATHER_ALGO",
    "STRATA_REDUCESCATTER_ALGO",
    "STRATA_ALLTOALL_ALGO",
    "STRATA_GATHER_ALGO",
    "STRATA_SCATTER_ALGO",
];

/// Where ranks' data is: on the host, or on the GPU of a driver's double.
const PLACES: [Option<&str>; 3] = [None, Some("cuda"), Some("hip")];

/// A file of this process's.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("providers-{}-{name}", std::process::id()))
}

/// Compiles a library.
fn plugin(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let out = file(name);
    let mut command = Command::new("cc");
    command.args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I"]).arg(header_dir());
    checked(command.args(options).arg(root().join(source)).arg("-o").arg(&out));
    out
}

fn mesh() -> &'static str {
    static MESH: OnceLock<String> = OnceLock::new();
    MESH.get_or_init(|| plugin("examples/provider/mesh.c", "libmesh.so", &[]).to_str().unwrap().to_string())
}

fn bad() -> &'static str {
    static BAD: OnceLock<String> = OnceLock::new();
    BAD.get_or_init(|| plugin("shim-tests/c/bad_provider.c", "libbad.so", &[]).to_str().unwrap().to_string())
}

/// Compiles a program of `shim-tests/c`.
fn compiled(source: &str, name: &str) -> String {
    let out = file(name);
    let mut command = Command::new("cc");
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"]).arg(header_dir());
    command.arg(root().join("shim-tests/c").join(source)).arg("-L").arg(library_dir());
    checked(command.args(["-lnccl", "-ldl", "-o"]).arg(&out));
    out.to_str().unwrap().to_string()
}

/// The program that compares.
fn program() -> &'static str {
    static PROGRAM: OnceLock<String> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled("providers.c", "program"))
}

/// The command on so many ranks of so many nodes, with these variables.
fn on(ranks: usize, nodes: usize, line: &[&str], vars: &[(&str, &str)]) -> Command {
    let mut command = strata();
    command
        .args(["launch", "-n", &ranks.to_string(), "--nodes", &nodes.to_string(), "--timeout", "90", "--"])
        .args(line);
    command.env("LD_LIBRARY_PATH", library_dir()).env("NCCL_DEBUG", "INFO").envs(vars.iter().copied());
    command
}

/// The same with the ranks' data in such a place, each rank's on a device of its own.
fn at(place: Option<&str>, ranks: usize, nodes: usize, line: &[&str], vars: &[(&str, &str)]) -> Command {
    let mut command = on(ranks, nodes, line, vars);
    if let Some(driver) = place {
        let dir = if driver == "hip" { soft::hip_dir() } else { soft::cuda_dir() };
        let path = std::env::join_paths([library_dir(), dir]).unwrap();
        command.env("LD_LIBRARY_PATH", path).env("SOFT_DEVICE", driver);
    }
    command
}

fn once(ranks: usize, provider: &str, vars: &[(&str, &str)]) -> String {
    said(&mut on(ranks, 2, &[program(), provider, "once"], vars))
}

#[test]
fn every_call_that_the_example_takes_is_right_over_nodes_and_on_one_and_others_are_strata_s_on_the_host_and_on_gpus() {
    for place in PLACES {
        for (ranks, nodes) in [(4, 2), (3, 1)] {
            let vars = [("STRATA_PROVIDERS", mesh()), ("SOFTGPU_EAGER", "1")];
            let said = said(&mut at(place, ranks, nodes, &[program(), "mesh", "all"], &vars));
            assert!(said.contains("calls by provider:mesh went well"), "{place:?}\n{said}");
            assert!(!lines(&said, "-> provider:mesh, 1 segment").is_empty(), "{place:?}: it was not used\n{said}");
        }
    }
}

/// A provider does whatever has blocks of different sizes, where it takes it.
#[test]
fn blocks_of_different_sizes_arrive_by_the_example_over_nodes_and_on_one() {
    let vectored = compiled("vectored.c", "vectored");
    let by_mesh = VECTORED.map(|variable| (variable, "provider:mesh"));
    let vars = [&[("STRATA_PROVIDERS", mesh())], &by_mesh[..]].concat();
    for (ranks, nodes, [from, to]) in [(4, 2, ["7000", "7060"]), (3, 1, ["7100", "7160"])] {
        let said = said(&mut on(ranks, nodes, &[&vectored, "launched", from, to], &vars));
        for collective in ["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"] {
            let by = lines(&said, "-> provider:mesh, 1 segment");
            assert!(by.iter().any(|line| line.contains(&format!(" {collective}: "))), "{collective}\n{said}");
        }
    }
    // Broadcasts with several roots become such an all-gather.
    let groups = compiled("groups.c", "groups");
    let said = said(&mut on(4, 2, &[&groups, "launched", "7200", "7230"], &vars));
    assert!(!lines(&said, "-> provider:mesh").is_empty(), "{said}");
    [vectored, groups].iter().for_each(|program| std::fs::remove_file(program).unwrap());
}

/// Blocks of different sizes that are too much together: where all ranks know it nobody asks the provider, and else all ranks fail.
#[test]
fn blocks_of_different_sizes_that_are_too_much_are_strata_s_or_fail_on_all_ranks() {
    let vars = [("STRATA_PROVIDERS", bad()), ("PROVIDER_FAULT", "uneven"), ("STRATA_TIMEOUT_MS", "60000")];
    for place in PLACES {
        let text = said(&mut at(place, 3, 2, &[program(), "mesh", "much"], &vars));
        assert_eq!(lines(&text, ": error ").len(), 3, "{place:?}\n{text}");
        let why = "provider mesh: gather of blocks of different sizes: rank 0 has 1200 bytes, and 1000 are the most that it takes";
        assert!(text.contains(why), "{place:?}\n{text}");
    }
}

/// On soft GPUs by several seeds, which say how late streams run. A program that does not wait for what it copies in (`put` in
/// `places.h`) goes wrong in one run of four, by a provider or without.
#[test]
fn several_communicators_may_use_it_in_opposite_orders() {
    for place in PLACES {
        for seed in 1..=if place.is_some() { 8 } else { 1 } {
            let vars = [("STRATA_PROVIDERS", mesh()), ("SOFTGPU_SEED", &seed.to_string())];
            let said = said(&mut at(place, 4, 2, &[program(), "mesh", "comms"], &vars));
            assert!(said.contains("3 communicators in opposite orders went well"), "{place:?}, seed {seed}\n{said}");
        }
    }
}

#[test]
fn a_setting_and_a_row_of_a_table_name_it_and_records_and_explain_say_so() {
    let trace = file("trace.json");
    let vars = [
        ("STRATA_PROVIDERS", mesh()),
        ("STRATA_ALLREDUCE_ALGO", "provider:mesh"),
        ("STRATA_TRACE", trace.to_str().unwrap()),
    ];
    let library = built::library();
    let perf = [env!("CARGO_BIN_EXE_strata"), "perf", "--library", library.to_str().unwrap()];
    let call = ["all_reduce", "-b", "64K", "-e", "64K", "-n", "2", "-c", "1", "-d", "all"];
    let text = said(&mut on(4, 2, &[&perf[..], &call].concat(), &vars));
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
    assert!(!lines(&text, "int32 (65536 bytes a block) -> provider:mesh").is_empty(), "{text}");
    // The first of each algorithm is told: of what the provider does not take, of int8.
    let others = lines(&text, "int8 (65536 bytes a block) -> ");
    assert!(
        !others.is_empty() && others.iter().all(|line| line.contains("(provider mesh takes no all_reduce")),
        "{text}"
    );
    let folder = trace.parent().unwrap();
    let name = trace.file_stem().unwrap().to_str().unwrap().to_string();
    let is_trace = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&name);
    let traces: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(is_trace).collect();
    let recorded: Vec<bool> =
        traces.iter().map(|path| std::fs::read_to_string(path).unwrap().contains("provider:mesh")).collect();
    assert!(!recorded.is_empty() && recorded.iter().all(|is| *is), "{traces:?} {recorded:?}");
    traces.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    let told = said(strata().args(["explain", "all_reduce", "64K", "-n", "4", "--nodes", "2"]).envs(vars));
    assert!(told.contains("-> provider:mesh, as one call"), "{told}");
    assert!(told.contains("provider mesh moves the data its own way"), "{told}");
    let plan = said(strata().args(["plan", "show", "all_reduce", "--algo", "provider:mesh", "-n", "2"]).envs(vars));
    assert!(plan.contains("call all_reduce all group 0 1"), "{plan}");
}

#[test]
fn a_tuning_run_tries_it_and_its_row_is_followed() {
    let table = file("table.toml");
    let library = built::library();
    let line = [env!("CARGO_BIN_EXE_strata"), "tune", "--library", library.to_str().unwrap(), "--output"];
    let what = [table.to_str().unwrap(), "--collectives", "all_gather", "--sizes", "64K", "--budget", "10"];
    let providers = ("STRATA_PROVIDERS", mesh());
    let text = said(&mut on(3, 3, &[&line[..], &what].concat(), &[providers]));
    let written = std::fs::read_to_string(&table).unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert!(written.contains("{ algorithm = \"provider:mesh\""), "{written}");
    let (head, row) = written.split_once("[[row]]").unwrap();
    let fields = row.lines().take_while(|line| !line.starts_with("measured"));
    let fields = fields.map(|line| match line.starts_with("algorithm") {
        true => "algorithm = \"provider:mesh\"",
        false => line,
    });
    std::fs::write(&table, format!("{head}[[row]]{}\n", fields.collect::<Vec<_>>().join("\n"))).unwrap();
    let perf = [env!("CARGO_BIN_EXE_strata"), "perf", "--library", library.to_str().unwrap()];
    let call = ["all_gather", "-b", "64K", "-e", "64K", "-n", "1", "-c", "1"];
    let follows = ("STRATA_TUNING_TABLE", table.to_str().unwrap());
    let text = said(&mut on(3, 3, &[&perf[..], &call].concat(), &[providers, follows]));
    assert!(!lines(&text, "-> provider:mesh").is_empty(), "{text}");
    let text = said(&mut on(3, 3, &[&perf[..], &call].concat(), &[follows]));
    assert!(lines(&text, "-> provider:mesh").is_empty() && text.contains("0 OK"), "{text}");
    std::fs::remove_file(table).unwrap();
}

/// Ranks die in calls of a provider's, and before they have come to them.
#[test]
fn those_who_are_left_go_on_by_it_where_ranks_may_be_lost() {
    let survivors = compiled("survivors.c", "survivors");
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "300", &survivors, "1", "12"]);
    command.env("LD_LIBRARY_PATH", library_dir()).env("STRATA_PROVIDERS", mesh());
    let told = said(command.env("SURVIVORS_PROVIDER", "provider:mesh").env("NCCL_DEBUG", "INFO"));
    assert!(told.contains("12 seeds from 1") && !lines(&told, "-> provider:mesh").is_empty(), "{told}");
    std::fs::remove_file(survivors).unwrap();
}

/// One that cannot be used is left out on all ranks, with one line that says where and why, and calls that name it are refused.
#[test]
fn a_provider_that_one_rank_cannot_use_is_left_out_on_all_with_the_reason() {
    for (fault, why) in [
        ("open:1", "rank 1: open returned 5: out of order"),
        ("connect:2", "rank 2: connect returned 6"),
        ("null", "it has no table of functions"),
        ("version", "its table is of version 77"),
        ("size", "(40 bytes), and this library needs version 2 (72 bytes)"),
        ("name", "its name is no word, and a provider's has up to 32 letters, digits and _"),
        ("mpi", "its name is mpi, which is MPI's"),
        ("lacks", "its table lacks a function"),
    ] {
        let text = once(3, "mesh", &[("STRATA_PROVIDERS", bad()), ("PROVIDER_FAULT", fault), ("NCCL_DEBUG", "")]);
        let told = lines(&text, "is left out: ");
        assert!(matches!(told[..], [line] if line.contains(why)), "{fault}\n{text}");
        assert_eq!(lines(&text, "error 5: ").len(), 3, "{fault}\n{text}");
        assert_eq!(lines(&text, "was left out of").len(), 3, "{fault}\n{text}");
    }
    let slow =
        [("STRATA_PROVIDERS", bad()), ("PROVIDER_FAULT", "unconnected:1"), ("STRATA_BOOTSTRAP_TIMEOUT_MS", "3000")];
    let text = once(3, "mesh", &slow);
    assert!(text.contains("connect has not ended within 3000 ms"), "{text}");
    let text = once(3, "mesh", &[("STRATA_PROVIDERS", "/nonexistent/libmesh.so"), ("NCCL_DEBUG", "")]);
    assert_eq!(
        lines(&text, "provider:mesh is left out: rank 0: /nonexistent/libmesh.so cannot be used").len(),
        1,
        "{text}"
    );
    assert_eq!(lines(&text, "provider mesh was left out of this communicator: rank 0").len(), 3, "{text}");
    let empty = file("empty.c");
    std::fs::write(&empty, "int nothing;\n").unwrap();
    let lacks = plugin(empty.to_str().unwrap(), "libempty.so", &[]);
    let text = once(2, "empty", &[("STRATA_PROVIDERS", lacks.to_str().unwrap())]);
    assert!(text.contains("undefined symbol: strata_provider_plugin"), "{text}");
}

#[test]
fn one_that_is_required_refuses_the_communicator_and_one_that_takes_nothing_does_nothing() {
    let required = format!("{}!", bad());
    let text = once(3, "mesh", &[("STRATA_PROVIDERS", &required), ("PROVIDER_FAULT", "open:1"), ("NCCL_DEBUG", "")]);
    assert_eq!(lines(&text, "no communicator: ").len(), 3, "{text}");
    assert!(text.contains("rank 1: open returned 5: out of order; without the ! it would be left out"), "{text}");
    let text = once(3, "mesh", &[("STRATA_PROVIDERS", bad()), ("PROVIDER_FAULT", "most:2")]);
    assert_eq!(lines(&text, ": error 5: ").len(), 3, "{text}");
    assert!(text.contains("provider mesh takes no all_reduce of 40000 bytes"), "{text}");
    let text = once(3, "other", &[("STRATA_PROVIDERS", bad())]);
    assert_eq!(lines(&text, ": error 5: ").len(), 3, "{text}");
    assert!(text.contains("this communicator has no provider other but mesh"), "{text}");
    let text = once(3, "mesh", &[("STRATA_PROVIDERS", "mesh")]);
    assert!(text.contains("mesh is neither mpi nor the path of a plugin"), "{text}");
}

/// A failure while a call runs ends it on all ranks, and names the provider.
#[test]
fn a_call_that_goes_wrong_or_never_ends_fails_everywhere_and_names_the_provider() {
    PLACES.into_iter().for_each(goes_wrong);
}

fn goes_wrong(place: Option<&str>) {
    let with = |fault: &str, ms: &str| {
        let vars = [("STRATA_PROVIDERS", bad()), ("PROVIDER_FAULT", fault), ("STRATA_TIMEOUT_MS", ms)];
        said(&mut at(place, 3, 2, &[program(), "mesh", "once"], &vars))
    };
    let text = with("start:1", "60000");
    assert_eq!(lines(&text, ": error ").len(), 3, "{text}");
    assert!(text.contains(&format!("provider mesh: start of all_reduce returned 7: {}", "x".repeat(256))), "{text}");
    let text = with("test:2", "60000");
    assert_eq!(lines(&text, ": error ").len(), 3, "{text}");
    assert!(text.contains("provider mesh: test returned 8: it broke"), "{text}");
    let text = with("never", "2000");
    assert_eq!(lines(&text, ": error ").len(), 3, "{text}");
    assert!(text.contains("provider mesh has not completed it"), "{text}");
}

#[test]
fn a_program_in_cpp_may_be_a_provider() {
    let source = "#include <strata_plugin.h>\n#include <strata_plugin.h>\n\
                  static_assert(sizeof(strata_provider) == 72 && sizeof(strata_provider_call) == 88, \"\");\n\
                  int main() { return STRATA_SCATTER - 7; }\n";
    let program = Compiler::new("c++").compile(source, &["-std=c++11", "-Wall", "-Wextra", "-pedantic", "-Werror"]);
    checked(&mut Command::new(&program));
    std::fs::remove_file(program).unwrap();
}
