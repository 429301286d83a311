//! `strata trace`: traces of calls, as `STRATA_TRACE=...json` makes them: merged, summed up, or as a workload.
#![forbid(unsafe_code)]

mod align;
mod grid;
mod period;
mod workload;

#[cfg(test)]
pub use workload::samples;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use strata::error::{counted, Error, Result};
use strata::records::{chrome, summary, CallTrace};

/// How to make traces, for `--help`.
const USE: &str = "\
  STRATA_TRACE=trace-%r.json strata launch -n 4 -- ./program     # or mpirun, torchrun, srun
  strata trace merge trace-*.json -o all.json                    # to be opened at https://ui.perfetto.dev
  strata trace summary trace-*.json
  strata trace workload trace-*.json -o program.toml
  strata launch -n 4 -- strata perf --workload program.toml";

/// What is done with traces.
#[derive(clap::Subcommand)]
#[command(after_long_help = USE)]
pub enum Options {
    /// One trace of the traces of several ranks, with one clock.
    Merge {
        /// Traces, as STRATA_TRACE=FILE.json makes them.
        #[arg(required = true, value_name = "TRACE")]
        traces: Vec<PathBuf>,
        /// The trace to write.
        #[arg(short = 'o', long, value_name = "FILE")]
        output: PathBuf,
    },
    /// For each collective and size how many calls, their times and rates; and which rank waited for which.
    Summary {
        /// Traces of some ranks, or a merged one.
        #[arg(required = true, value_name = "TRACE")]
        traces: Vec<PathBuf>,
    },
    /// A workload file for `strata perf --workload`: the calls of one rank, and the time between them.
    Workload {
        /// Traces of all ranks, or of one.
        #[arg(required = true, value_name = "TRACE")]
        traces: Vec<PathBuf>,
        /// The file to write.
        #[arg(short = 'o', long, value_name = "FILE")]
        output: PathBuf,
        /// The rank whose calls they are; the first one unless something else is said.
        #[arg(long)]
        rank: Option<u32>,
        /// Leave out the time between calls.
        #[arg(long)]
        no_compute: bool,
    },
}

/// Reads one trace.
pub fn read(path: &Path) -> Result<CallTrace> {
    let unread = |why: String| Error::InvalidArgument(format!("cannot read the trace {}: {why}", path.display()));
    let bytes = fs::read(path).map_err(|error| unread(error.to_string()))?;
    chrome::read(&bytes).map_err(unread)
}

/// Reads traces and brings them to one clock.
pub fn read_all(paths: &[PathBuf]) -> Result<CallTrace> {
    let traces = paths.iter().map(|path| read(path)).collect::<Result<Vec<CallTrace>>>()?;
    // Not by their clocks: merged traces have one for all.
    let mut seen: BTreeMap<(u32, u32, &str), &Path> = BTreeMap::new();
    for (trace, path) in traces.iter().zip(paths) {
        for process in &trace.processes {
            if let Some(other) = seen.insert((process.rank, process.pid, &process.host), path) {
                let (one, other) = (path.display(), other.display());
                return Err(Error::InvalidArgument(format!("{one} and {other} are traces of the same process")));
            }
        }
    }
    Ok(align::merge(traces))
}

/// Traces in an error: the first, and how many more there are.
fn named(paths: &[PathBuf]) -> String {
    let first = paths.first().map_or(String::new(), |path| path.display().to_string());
    match paths.len() {
        0 | 1 => format!("the trace {first}"),
        many => format!("the traces {first} and {} more", many - 1),
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(Error::InvalidArgument(format!("{} is there and is no regular file", path.display())));
    }
    fs::write(path, bytes).map_err(|error| Error::System(format!("cannot write {}: {error}", path.display())))
}

/// Does what is asked for.
pub fn run(options: &Options) -> Result<ExitCode> {
    match options {
        Options::Merge { traces, output } => {
            let merged = read_all(traces)?;
            let mut bytes = Vec::new();
            chrome::write(&merged, &mut bytes).map_err(|error| Error::System(error.to_string()))?;
            write(output, &bytes)?;
            let (calls, ranks) = (counted(merged.calls.len(), "call"), counted(merged.processes.len(), "process"));
            outln!("# {calls} of {ranks} in {}; https://ui.perfetto.dev opens it", output.display());
        }
        Options::Summary { traces } => out!("{}", summary::text(&read_all(traces)?)),
        Options::Workload { traces, output, rank, no_compute } => {
            let made = workload::make(&read_all(traces)?, *rank, !no_compute);
            let made = made.map_err(|error| Error::InvalidArgument(format!("{}: {}", named(traces), error.text())))?;
            write(output, made.text.as_bytes())?;
            outln!("# {} in {}; strata perf --workload {}", made.told, output.display(), output.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}
