//! MPI between nodes, with a real MPI: all collectives, programs that have initialised MPI, plugins of another version,
//! and ranks that die.
//!
//! `STRATA_TEST_MPICC` names the compiler wrapper of the MPI to test with (default `mpicc`), `STRATA_TEST_MPIEXEC` its
//! launcher (default `mpirun`). Nodes are make-believe: `NCCL_HOSTID` says who shares one.

mod carriers;
mod late;
mod providers;
mod python;
mod scripts;

use crate::built;
use crate::soft;
use crate::vendor;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(180);

/// Held by the test that runs ranks: they are many for one machine.
static ALONE: Mutex<()> = Mutex::new(());

/// The MPI at hand.
struct Mpi {
    mpicc: String,
    mpiexec: String,
    is_open_mpi: bool,
    plugin: PathBuf,
}

fn variable(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_string())
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(text)
}

/// The MPI at hand with its plugin, built once; without an MPI a line says that the test was skipped.
fn mpi() -> Option<&'static Mpi> {
    static MPI: OnceLock<Result<Mpi, String>> = OnceLock::new();
    let made = MPI.get_or_init(|| {
        let (mpicc, mpiexec) = (variable("STRATA_TEST_MPICC", "mpicc"), variable("STRATA_TEST_MPIEXEC", "mpirun"));
        output(Command::new(&mpicc).arg("-show")).ok_or(format!("there is no {mpicc}"))?;
        let version =
            output(Command::new(&mpiexec).arg("--version")).ok_or(format!("there is no {mpiexec} for {mpicc}"))?;
        let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("strata_mpi-{}.so", std::process::id()));
        let build = built::root().join("scripts/build-mpi");
        let build = Command::new(build).args(["--mpicc", &mpicc, "--out"]).arg(&plugin).output();
        let build = build.map_err(|error| error.to_string())?;
        assert!(build.status.success(), "scripts/build-mpi: {}", String::from_utf8_lossy(&build.stderr));
        Ok(Mpi { mpicc, mpiexec, is_open_mpi: version.contains("Open MPI") || version.contains("OpenRTE"), plugin })
    });
    match made {
        Ok(mpi) => Some(mpi),
        Err(why) => {
            println!("SKIPPED: {why}, so MPI is not tested");
            None
        }
    }
}

/// A launcher's processes, ended when the test is, however it ends.
struct Job {
    child: Child,
    lines: Receiver<String>,
    /// The launcher's own: those of Open MPI that start and end at once take a common one away from each other.
    _folder: tempfile::TempDir,
}

impl Drop for Job {
    fn drop(&mut self) {
        // Asked kindly, a launcher ends its ranks; a process that is killed leaves them behind.
        if matches!(self.child.try_wait(), Ok(None)) {
            built::signal("TERM", self.child.id());
        }
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a rank does first: it takes its place from the launcher's variables.
const PLACE: &str = "RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}; \
                     NCCL_HOSTID=node$(((RANK + 1) / 2)); export RANK WORLD_SIZE NCCL_HOSTID;";

impl Mpi {
    /// Starts `n` ranks, on nodes of 1, 2, 2, ... ranks. Each runs `script` with these arguments.
    fn start(&self, n: usize, options: &[&str], script: &str, arguments: &[&str], vars: &[(&str, &str)]) -> Job {
        let port = built::free_port();
        let mut command = Command::new(&self.mpiexec);
        let folder = tempfile::tempdir().unwrap();
        command.env("TMPDIR", folder.path());
        if self.is_open_mpi {
            command.args(["--oversubscribe"]);
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        }
        command.args(options).args(["-n", &n.to_string(), "sh", "-c", &format!("{PLACE} {script}"), "sh"]);
        command.args(arguments);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("NCCL_DEBUG", "INFO").env("STRATA_MPI_PLUGIN", &self.plugin).env("STRATA_INTER", "auto");
        command.env("LD_LIBRARY_PATH", built::library_dir()).envs(vars.iter().copied());
        // A library of Strata's would warn of names that it does not know.
        command.env_remove("STRATA_TEST_MPICC").env_remove("STRATA_TEST_MPIEXEC");
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (send, lines) = channel();
        let streams: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for stream in streams {
            let send = send.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let _ = send.send(line);
                }
            });
        }
        Job { child, lines, _folder: folder }
    }

    /// Runs ranks to their end, which must be good; what they said.
    fn run(&self, n: usize, script: &str, arguments: &[&str], vars: &[(&str, &str)]) -> String {
        let mut job = self.start(n, &[], script, arguments, vars);
        let end = Instant::now() + LIMIT;
        let mut said = String::new();
        while let Ok(line) = job.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            said += &line;
            said.push('\n');
        }
        while matches!(job.child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = job.child.try_wait().unwrap();
        assert!(status.is_some_and(|status| status.success()), "{arguments:?}: {status:?}\n{said}");
        said
    }

    /// Measures, with results checked, and returns what was said.
    fn perf(&self, n: usize, arguments: &[&str], vars: &[(&str, &str)]) -> String {
        let library = built::library();
        let fixed = [env!("CARGO_BIN_EXE_strata"), "perf", "--library", library.to_str().unwrap()];
        let said = self.run(n, "exec \"$@\"", &[&fixed, arguments].concat(), vars);
        assert!(said.contains("# Out of bounds values : 0 OK"), "{arguments:?}\n{said}");
        said
    }
}

impl Mpi {
    /// Compiles `shim-tests/c/mpi/<name>.c` with MPI's compiler.
    fn compile(&self, name: &str, options: &[&str]) -> PathBuf {
        let source = built::root().join(format!("shim-tests/c/mpi/{name}.c"));
        let number = format!("{name}-{}-{}", std::process::id(), options.len());
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(number);
        let mut command = Command::new(&self.mpicc);
        command.arg(source).args(["-Wall", "-Wextra", "-Werror", "-pthread", "-I"]).arg(built::header_dir());
        command.arg("-L").arg(built::library_dir()).args(["-lnccl", "-ldl"]).args(options);
        built::checked(command.arg("-o").arg(&program));
        program
    }

    /// Runs `order.c` in one of its ways; what was said.
    fn order(&self, way: &str) -> String {
        let program = self.compile("order", &[]);
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("order-{way}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("id");
        let said = self.run(3, "exec \"$@\"", &[program.to_str().unwrap(), way, file.to_str().unwrap()], &[]);
        assert!(said.contains("all went well"), "{said}");
        std::fs::remove_dir_all(dir).unwrap();
        std::fs::remove_file(program).unwrap();
        said
    }
}

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[test]
fn every_collective_is_right_over_mpi_on_uneven_nodes() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let collectives = [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "alltoall",
        "gather",
        "scatter",
        "sendrecv",
    ];
    for collective in collectives {
        let said = mpi.perf(4, &[collective, "-b", "8", "-e", "8M", "-f", "32", "-n", "2", "-w", "1", "-c", "1"], &[]);
        assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
    }
    let kinds = ["all_reduce", "-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "-d", "all", "-o", "all", "-c", "1"];
    mpi.perf(3, &kinds, &[]);
}

/// Runs a program of calls that follow from seeds on ranks that MPI has started.
fn by_seeds(mpi: &Mpi, file: &str, runs: &[(usize, &[&str])]) {
    let source = std::fs::read_to_string(built::root().join("shim-tests/c").join(file)).unwrap();
    let library = built::library_dir();
    let program = built::Compiler::new("c").compile(&source, &["-pthread", "-L", library.to_str().unwrap(), "-lnccl"]);
    let program_path = program.to_str().unwrap();
    for &(n, arguments) in runs {
        let said = mpi.run(n, "exec \"$@\"", &[&[program_path], arguments].concat(), &[]);
        assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
        let is_used = |name: &&str| said.contains(&format!("-> {name}"));
        assert!(arguments.get(3).is_none_or(is_used), "{arguments:?}: it was not used\n{said}");
        assert_eq!(said.lines().filter(|line| line.starts_with(&format!("a rank of {n}: "))).count(), n, "{said}");
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn blocks_of_different_sizes_arrive_over_mpi_on_uneven_nodes() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    by_seeds(
        mpi,
        "vectored.c",
        &[
            (4, &["launched", "3000", "3060"]),
            (3, &["launched", "3100", "3140"]),
            (4, &["launched", "3200", "3230", "two_step"]),
        ],
    );
}

#[test]
fn groups_and_windows_have_the_results_of_each_call_over_mpi() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let runs: [(usize, &[&str]); 4] = [
        (4, &["launched", "6000", "6040"]),
        (3, &["launched", "6100", "6130"]),
        (4, &["windows-launched", "6200", "6240"]),
        (3, &["windows-launched", "6300", "6330"]),
    ];
    by_seeds(mpi, "groups.c", &runs);
}

#[test]
fn messages_in_codes_arrive_over_mpi() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for (collective, variable) in [
        ("all_reduce", "STRATA_ALLREDUCE_CODE"),
        ("all_gather", "STRATA_ALLGATHER_CODE"),
        ("reduce_scatter", "STRATA_REDUCESCATTER_CODE"),
        ("alltoall", "STRATA_ALLTOALL_CODE"),
    ] {
        for (n, code) in [(4, "mx8"), (3, "bf16")] {
            let sizes = ["-b", "256K", "-e", "2M", "-f", "8", "-d", "float", "-n", "2", "-w", "1", "-c", "1"];
            let said = mpi.perf(n, &[&[collective][..], &sizes].concat(), &[(variable, code)]);
            assert!(said.contains(&format!("coded_{code}")), "nothing was coded\n{said}");
        }
    }
}

#[test]
fn the_plugin_keeps_its_contract_with_the_library() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let plugin = mpi.plugin.to_str().unwrap();
    // In the second way the program has functions of MPI's names, as one that is linked with another MPI.
    for options in [&[][..], &["-DOTHER", "-rdynamic", "-Wno-unused"]] {
        let program = mpi.compile("contract", options);
        let said = mpi.run(1, "exec \"$@\"", &[program.to_str().unwrap(), plugin], &[]);
        assert!(said.contains("the contract holds"), "{said}");
        std::fs::remove_file(program).unwrap();
    }
}

/// With nothing but the launcher's own variables, behind another program.
#[test]
fn a_measurement_finds_its_processes_by_the_launcher_s_variables() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let library = built::library();
    let line = [env!("CARGO_BIN_EXE_strata"), "perf", "all_gather", "-b", "8", "-e", "8", "-n", "1", "--library"];
    let script = "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; sh -c '\"$@\" || exit 1' sh \"$@\"";
    let said = mpi.run(3, script, &[&line[..], &[library.to_str().unwrap()]].concat(), &[]);
    assert!(said.contains("3 ranks in 3 processes") && said.contains("# Out of bounds values : 0 OK"), "{said}");
    let told = "MPI carries messages between nodes: rank 2 is rank 2 of 3 in ";
    assert!(said.contains(told), "{said}");
}

#[test]
fn where_all_ranks_share_a_node_one_line_says_that_mpi_has_nothing_to_carry() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let said = mpi.perf(2, &["all_reduce", "-b", "8", "-e", "8", "-n", "1"], &[("STRATA_INTER", "auto")]);
    assert!(!said.contains("MPI has nothing to carry"), "two nodes\n{said}");
    let library = built::library();
    let line = [env!("CARGO_BIN_EXE_strata"), "perf", "all_gather", "-b", "8", "-e", "8", "-n", "1", "--library"];
    let line = [&line[..], &[library.to_str().unwrap()]].concat();
    let said = mpi.run(2, "unset NCCL_HOSTID; exec \"$@\"", &line, &[]);
    assert_eq!(said.lines().filter(|line| line.contains("MPI has nothing to carry")).count(), 1, "{said}");
}

#[test]
fn a_nic_that_is_not_there_is_told_although_mpi_goes_on_without() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let vars = [("STRATA_NIC_MAP", "nowhere0"), ("NCCL_DEBUG", "")];
    let said = mpi.perf(2, &["all_reduce", "-b", "8", "-e", "8", "-n", "1"], &vars);
    let told = "MPI is not told which NIC to use: STRATA_NIC_MAP=nowhere0 names nowhere0";
    assert_eq!(said.lines().filter(|line| line.contains(told)).count(), 1, "{said}");
}

#[test]
fn with_tcp_asked_for_mpi_is_left_alone() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let said = mpi.perf(2, &["all_reduce", "-b", "8", "-e", "8", "-n", "1"], &[("STRATA_INTER", "tcp")]);
    assert!(!said.contains("MPI carries messages between nodes"), "{said}");
}

#[test]
fn a_program_that_has_initialised_mpi_is_served_as_its_thread_level_allows() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let program = mpi.compile("initialised", &[]);
    for level in ["single", "funneled", "serialized", "multiple"] {
        let said = mpi.run(3, "exec \"$@\"", &[program.to_str().unwrap(), level], &[]);
        // An MPI may provide more than was asked for.
        let (_, provided) = said.split_once("all sums are right at the level ").unwrap_or_else(|| panic!("{said}"));
        let told = match provided.lines().next() {
            Some("single") => "the program has initialised MPI with MPI_THREAD_SINGLE",
            Some("funneled") => "the program has initialised MPI with MPI_THREAD_FUNNELED",
            _ => "MPI carries messages between nodes",
        };
        assert!(said.contains(told), "{level}: {told} is missing\n{said}");
    }
    let _ = std::fs::remove_file(program);
}

#[test]
fn a_program_may_initialise_mpi_after_its_first_communicator() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let said = mpi.order("late");
    assert!(said.contains("the program has an MPI of its own and has not initialised it"), "{said}");
}

#[test]
fn a_program_may_finalise_mpi_before_it_destroys_its_communicators_or_without() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    for way in ["early", "leak"] {
        let said = mpi.order(way);
        assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
    }
}

/// What is said where this is the plugin and MPI is asked for, of which there is one line whatever `NCCL_DEBUG` is.
fn refusal(mpi: &Mpi, plugin: &str) -> String {
    let vars = [("STRATA_MPI_PLUGIN", plugin), ("STRATA_INTER", "mpi"), ("NCCL_DEBUG", "")];
    let said = mpi.perf(2, &["all_reduce", "-b", "8", "-e", "8", "-n", "1"], &vars);
    let mut warnings = said.lines().filter(|line| line.contains("STRATA WARN"));
    let warning = warnings.next().unwrap_or_else(|| panic!("nothing was said\n{said}"));
    assert_eq!(warnings.next(), None, "{said}");
    assert!(warning.contains("TCP carries messages between nodes, not MPI"), "{warning}");
    warning.to_string()
}

#[test]
fn a_plugin_that_cannot_be_used_is_refused_with_a_message_and_tcp_is_used() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let entry = |body: &str| format!("static const unsigned table[2] = {{999, 8}};\n{body}\n");
    for (source, why) in [
        ("const void* strata_mpi_plugin(void) { return table; }", "is refused: it is of version 999"),
        ("const void* strata_mpi_plugin(void) { (void)table; return 0; }", "is refused: it has no table"),
        ("const void* another(void) { return table; }", "undefined symbol: strata_mpi_plugin"),
    ] {
        let plugin = built::Compiler::new("c").compile(&entry(source), &["-shared", "-fPIC"]);
        let said = refusal(mpi, plugin.to_str().unwrap());
        assert!(said.contains(why), "{said}");
        let _ = std::fs::remove_file(plugin);
    }
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    assert!(refusal(mpi, text).contains("Cargo.toml cannot be opened"));
}

/// The packages' plugin: it finds MPI when it is opened, or another one in the program.
#[test]
fn the_plugin_of_the_standard_abi_is_built_without_an_mpi_and_refuses_a_program_that_has_another() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let plugin = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("strata_mpi-abi-{}.so", std::process::id()));
    let mut build = Command::new(built::root().join("scripts/build-mpi"));
    built::checked(build.env("MPICC", "/nonexistent/mpicc").args(["--abi", "--out"]).arg(&plugin));
    let said = refusal(mpi, plugin.to_str().unwrap());
    let why = "is refused: no MPI with the standard ABI of MPI 5 can be opened: libmpi_abi.so.1";
    assert!(said.contains(why), "{said}");
    let program = mpi.compile("contract", &["-DOTHER", "-rdynamic", "-Wno-unused"]);
    let abi = built::root().join("target/mpich/5.0.2/lib");
    if abi.join("libmpi_abi.so.1").exists() {
        let path = format!("{}:{}", built::library_dir().display(), abi.display());
        let line = [program.to_str().unwrap(), plugin.to_str().unwrap()];
        let said = mpi.run(1, "exec \"$@\"", &line, &[("LD_LIBRARY_PATH", &path)]);
        assert!(said.contains("the contract holds"), "{said}");
    } else {
        println!("SKIPPED: scripts/fetch-mpich has not run, so a second MPI beside the program's is not tested");
    }
    std::fs::remove_file(program).unwrap();
    std::fs::remove_file(plugin).unwrap();
}

#[test]
fn without_a_plugin_tcp_is_used_and_one_line_says_so() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let vars = [("STRATA_MPI_PLUGIN", "/nonexistent/plugin.so")];
    let said = mpi.perf(2, &["all_reduce", "-b", "8", "-e", "8", "-n", "1"], &vars);
    assert_eq!(said.lines().filter(|line| line.contains("TCP carries messages between nodes")).count(), 1, "{said}");
}

#[test]
fn survivors_of_a_killed_rank_learn_of_it_when_the_launcher_does_not_end_them() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let options: &[&str] = match mpi.is_open_mpi {
        true => &["--mca", "orte_abort_on_non_zero_status", "0", "--enable-recovery"],
        false => &["-disable-auto-cleanup"],
    };
    let library = built::library();
    let perf = [env!("CARGO_BIN_EXE_strata"), "perf", "--library", library.to_str().unwrap(), "all_reduce"];
    let arguments = [&perf[..], &["-b", "2M", "-e", "2M", "-n", "1000000", "-c", "0"]].concat();
    // What ranks say goes to files: a launcher whose rank has died may not pass it on.
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("survivors-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    // On one machine UCX, below MPICH, has ranks read each other's memory, and ends a process that reads a dead one's.
    let vars = [("SAID", dir.to_str().unwrap()), ("UCX_TLS", "^cma")];
    let rank = "exec >\"$SAID/$RANK\" 2>&1; echo $$ >\"$SAID/$RANK.pid\"; exec \"$@\"";
    // MPICH's launcher ends all ranks when a second one has ended, so there each has a shell that stays.
    let stays = format!("trap '' USR1; sh -c '{rank}' sh \"$@\"; sleep 200");
    let _job = mpi.start(4, options, if mpi.is_open_mpi { rank } else { &stays }, &arguments, &vars);
    let said = |rank: usize| std::fs::read_to_string(dir.join(rank.to_string())).unwrap_or_default();
    let all = || (0..4).map(said).collect::<String>();
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        let end = Instant::now() + LIMIT;
        while !holds() {
            assert!(Instant::now() < end, "{what}\n{}", all());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    // A rank says how it goes about a collective when its first call has begun.
    until("not all ranks run", &|| (0..4).all(|rank| said(rank).contains("all_reduce: 524288 elements")));
    assert!(all().contains("MPI carries messages between nodes"), "MPI was not used\n{}", all());
    let victim = std::fs::read_to_string(dir.join("3.pid")).unwrap();
    assert!(built::signal("KILL", victim.trim().parse().unwrap()));
    let knows =
        |rank: usize| said(rank).lines().any(|line| line.starts_with("strata: rank") && line.contains("rank 3"));
    until("not all survivors learnt of it", &|| (0..3).all(knows));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
#[ignore = "takes 10 GiB of memory"]
fn one_message_may_be_longer_than_two_gibibytes() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let said = mpi.perf(2, &["sendrecv", "-b", "2100M", "-e", "2100M", "-n", "1", "-w", "0", "-c", "1"], &[]);
    assert!(said.contains("MPI carries messages between nodes"), "MPI was not used\n{said}");
}

/// Device memory goes through pinned memory to an MPI that takes host memory only, and from and to the device where MPI says
/// that it takes such addresses, as it does with `aware.c` in front of it.
#[test]
fn rails_of_device_memory_go_over_mpi_staged_or_directly() {
    let (_alone, Some(mpi)) = (alone(), mpi()) else { return };
    let (double, driver) = (vendor::NCCL, soft::cuda_dir());
    let program = double.gpu_program("rails", &driver);
    let aware = mpi.compile("aware", &["-shared", "-fPIC", "-Wl,--allow-shlib-undefined"]);
    let seen = aware.with_extension("seen");
    let shared = aware.with_extension("ids");
    let path = std::env::join_paths([double.dir(), driver]).unwrap();
    let strata = built::library();
    let vendor = double.library();
    let file = |path: &Path| path.to_str().unwrap().to_string();
    for preload in [file(&strata), format!("{} {}", file(&aware), file(&strata))] {
        let _ = std::fs::remove_file(&seen);
        for grid in ["2x2", "4x1"] {
            let _ = std::fs::remove_file(&shared);
            let algorithm = if grid == "2x2" { "two_level" } else { "rd" };
            let script = "LD_PRELOAD=\"$PRELOAD\" exec \"$@\"";
            let arguments = [&file(&program), grid, "1", "8", "300000", &file(&shared)];
            let (vendor, seen, path) = (file(&vendor), file(&seen), path.to_str().unwrap().to_string());
            let vars = [
                ("PRELOAD", preload.as_str()),
                ("LD_LIBRARY_PATH", &path),
                ("STRATA_NCCL_LIB", &vendor),
                ("STRATA_INTER", "mpi"),
                ("STRATA_ALLGATHER_ALGO", algorithm),
                ("STRATA_REDUCESCATTER_ALGO", algorithm),
                ("STRATA_ALLREDUCE_ALGO", algorithm),
                ("AWARE_SEEN", &seen),
            ];
            let said = mpi.run(4, script, &arguments, &vars);
            assert!(said.contains("8 calls are right"), "{said}");
            assert!(said.contains("MPI carries messages between nodes"), "{said}");
        }
        let direct = std::fs::read_to_string(&seen).unwrap_or_default();
        let is_aware = preload != file(&strata);
        for what in ["send", "receive"] {
            assert_eq!(direct.lines().any(|line| line == what), is_aware, "{what}: {preload}");
        }
    }
    for path in [aware, seen, shared] {
        let _ = std::fs::remove_file(path);
    }
}
