//! `strata info`: what was found on this machine, and every setting and algorithm.
#![forbid(unsafe_code)]

use crate::nccl::Library;
use crate::nics;
use crate::process::read_memory_of;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use strata::algorithms::ALGORITHMS;
use strata::config::{Config, VARIABLES};
use strata::error::{Error, Result};
use strata::selection::unknown_names;
use strata::topo::host;
use strata::transport::mpi;
use strata::vendor::find;

/// Options of `strata info`.
#[derive(clap::Args)]
pub struct Options {
    /// Every environment variable with its value, default and meaning.
    #[arg(long)]
    env: bool,
    /// GPUs and NICs, and which local rank uses which NIC and why.
    #[arg(long)]
    nics: bool,
    /// With --nics: how many ranks the node has; by default what the launcher has told, else as many as GPUs, or NICs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// With --nics: another machine's sysfs, with a file `addresses` of lines such as `eth0 10.0.0.1/24`.
    #[arg(long, value_name = "FOLDER")]
    sysfs: Option<PathBuf>,
    /// With --nics: measure where NICs and GPUs are, for machines whose sysfs does not say, such as virtual ones. Takes seconds.
    #[arg(long, requires = "nics", conflicts_with = "sysfs")]
    probe: bool,
    /// Every algorithm with its collectives.
    #[arg(long)]
    algorithms: bool,
    /// The library to look at, instead of the one beside this command.
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// For the command itself: reads `process:address` and says what is there.
    #[arg(long, hide = true)]
    reads: Option<String>,
}

/// Prints what was asked for.
pub fn run(options: &Options) -> Result<ExitCode> {
    if let Some(what) = &options.reads {
        return read(what);
    }
    if options.env {
        print_variables();
    }
    if options.algorithms {
        print_algorithms();
    }
    if options.nics || options.sysfs.is_some() {
        return nics::print(options.sysfs.as_deref(), options.ranks.map(usize::from), options.probe);
    }
    if !options.env && !options.algorithms {
        print_found(options);
    }
    Ok(ExitCode::SUCCESS)
}

fn line(name: &str, value: impl std::fmt::Display) {
    outln!("{name:<16} {value}");
}

fn print_found(options: &Options) {
    let (config, warnings) = Config::from_env();
    let mut mpi = Vec::new();
    line("strata", env!("CARGO_PKG_VERSION"));
    match Library::open(options.library.as_deref()) {
        Ok(library) => {
            line("library", library.path().display());
            mpi = mpi::survey(&config, library.path());
            line("NCCL version", library.version().unwrap_or_else(|error| error.to_string()));
        }
        Err(error) => line("library", format!("not found: {error}")),
    }
    match (find::find(&config.nccl_lib), config.nccl_lib.as_str()) {
        (_, "none") => line("device", "host (buffers are ordinary memory): STRATA_NCCL_LIB is none"),
        (Ok(vendor), _) => {
            line("over", format!("{vendor}{}", if config.disable { ": STRATA_DISABLE hands it all calls" } else { "" }))
        }
        (Err(why), "auto") => line("device", format!("host (buffers are ordinary memory): {why}")),
        (Err(why), wanted) => {
            line("over", format!("nothing, and all calls will fail: STRATA_NCCL_LIB={wanted}: {why}"))
        }
    }
    line("host id", host::host_id());
    let given = std::env::var("NCCL_HOSTID").is_ok_and(|value| !value.is_empty());
    line("", if given { "from NCCL_HOSTID: ranks with the same one share a node" } else { "host name and boot id" });
    let network = nics::summary().unwrap_or_else(|error| vec![error.to_string()]);
    network.iter().enumerate().for_each(|(index, text)| line(if index == 0 { "network" } else { "" }, text));
    mpi.push("where it cannot be used, or no MPI launcher starts the job, nodes talk over TCP".to_string());
    mpi.iter().enumerate().for_each(|(index, text)| line(if index == 0 { "MPI" } else { "" }, text));
    line("shared memory", shared_memory(&config));
    line("direct reads", direct_reads(&config));
    line("processor", processor());
    warnings.iter().chain(&unknown_names(&config)).for_each(|warning| line("warning", warning));
}

fn shared_memory(config: &Config) -> String {
    if !config.shm {
        return "off: STRATA_SHM is false".into();
    }
    // Ranks share memory through files in memory, which every process may make; what limits them is /dev/shm's size
    // where a container has set one.
    match fs::metadata("/dev/shm") {
        Ok(_) => "on".into(),
        Err(error) => format!("on, but /dev/shm cannot be used: {error}"),
    }
}

/// Whether a process may read another's memory: tried out with a child that reads ours.
fn direct_reads(config: &Config) -> String {
    if !config.cma {
        return "off: STRATA_CMA is false".into();
    }
    let secret = Box::new(0x5354_5241_5441_u64 ^ u64::from(std::process::id()));
    let place = format!("{}:{}", std::process::id(), std::ptr::from_ref(&*secret) as usize);
    let child = std::env::current_exe().and_then(|exe| Command::new(exe).args(["info", "--reads", &place]).output());
    let said = match child {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_string(),
        Err(error) => return format!("not known: cannot start a process to try it: {error}"),
    };
    if said == secret.to_string() {
        return "on: a process may read another's memory (process_vm_readv)".into();
    }
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let why = match scope.trim() {
        "" | "0" => "a container's or sandbox's rules, most likely".to_string(),
        scope => format!("kernel.yama.ptrace_scope is {scope}"),
    };
    format!("off: {said}; {why}. Large messages go through shared memory instead")
}

fn read(what: &str) -> Result<ExitCode> {
    let wrong = || Error::InvalidArgument(format!("`{what}` is not process:address"));
    let (pid, address) = what.split_once(':').ok_or_else(wrong)?;
    let (pid, address) = (pid.parse().map_err(|_| wrong())?, address.parse().map_err(|_| wrong())?);
    match read_memory_of(pid, address) {
        Ok(value) => outln!("{value}"),
        Err(error) => outln!("process_vm_readv: {error}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split_once(": "));
    let name = field("model name").map_or("unknown", |(_, value)| value);
    let flags = field("flags").map_or("", |(_, value)| value);
    let known = ["avx2", "f16c", "avx512f", "avx512_bf16", "avx512_fp16"];
    let has: Vec<&str> = known.into_iter().filter(|known| flags.split(' ').any(|flag| flag == *known)).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "{name}, {cores} usable cores, {}",
        if has.is_empty() { "no vector extensions".into() } else { has.join(" ") }
    )
}

fn print_variables() {
    let (config, warnings) = Config::from_env();
    for variable in VARIABLES {
        let value = config.get(variable.name).unwrap_or_default();
        let source = if value == variable.default { "default" } else { "set" };
        let agreed = if variable.agreed { "; all ranks use rank 0's value" } else { "" };
        outln!("{}={value}  ({source}{agreed})\n    {} Default: {}.", variable.name, variable.text, variable.default);
    }
    warnings.iter().chain(&unknown_names(&config)).for_each(|warning| outln!("warning: {warning}"));
}

fn print_algorithms() {
    for algorithm in ALGORITHMS {
        let collectives: Vec<&str> = algorithm.collectives.iter().map(|collective| collective.name()).collect();
        outln!("{}\n    {}\n    {}", algorithm.name, algorithm.text, collectives.join(", "));
    }
    outln!(
        "\nSet STRATA_<COLLECTIVE>_ALGO to one of them, or to auto. A two-level one may name its inner ones:\n\
         two_level(direct,log) is direct inside a node and log between nodes."
    );
}
