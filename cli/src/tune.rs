//! `strata tune`: measures which algorithm is fastest here, for each collective and size, and writes a tuning table.
//!
//! A client of the C interface, as `strata perf` is, on the ranks of any launcher. For each row every algorithm that
//! serves is tried; the slow ones are dropped early, the best are tried with other segments and windows, and the last few
//! are measured again and again in turns. All ranks take the same decisions: from times that all have, and from process
//! 0's clock. The file is replaced after every row, so a run that is killed goes on where it was.
#![forbid(unsafe_code)]

mod bench;
mod candidates;
mod contest;
mod file;
mod from_traces;
mod report;

use crate::nccl::Library;
use crate::options::{number, parse_size};
use crate::perf::collective::Kind;
use bench::{Bench, Case};
use candidates::Candidate;
use file::Output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use strata::bootstrap::store::{Store, LIMIT};
use strata::error::{counted, Error, Result};
use strata::plan::Collective;
use strata::selection::table::{Measured, Row, Size};
use strata::selection::CarriedName;

/// Where a table is written unless something else is said.
const DEFAULT_OUTPUT: &str = "strata-tuning.toml";

/// How to use what comes out, for `--help`.
const USE: &str = "\
  strata launch -n 4 --nodes 2 -- strata tune -o table.toml      # or mpirun, torchrun --no-python, srun
  STRATA_TUNING_TABLE=table.toml strata launch -n 4 --nodes 2 -- ./program
  strata tune --report table.toml -o table.html                  # or table.svg

A run that stops before all rows are measured, because its budget is spent or because it is ended, goes on when it is
started again with the same -o.";

/// Options of `strata tune`.
#[derive(clap::Args)]
#[command(after_long_help = USE)]
pub struct Options {
    /// The table to write or to go on with; with --report the drawing, an .html or .svg file.
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How long it may take, as 90s, 10m or 2h.
    #[arg(long, default_value = "60s", value_parser = parse_duration)]
    budget: Duration,
    /// Sizes, as thresholds speak of them: of an all-gather's output, a reduce-scatter's input, a vector, and for alltoall,
    /// gather and scatter of one rank's block.
    #[arg(long, value_delimiter = ',', value_parser = parse_size, default_value = "1K,4K,16K,64K,256K,1M,4M,16M,64M")]
    sizes: Vec<usize>,
    /// Collectives, by the names of `strata perf`.
    #[arg(long, value_delimiter = ',', default_value = "all_reduce,all_gather,reduce_scatter")]
    collectives: Vec<Kind>,
    /// Measure only the collectives and sizes of these traces (STRATA_TRACE=FILE.json), of calls on as many ranks as there are
    /// here; process 0 reads them.
    #[arg(long, value_name = "TRACE", value_delimiter = ',', conflicts_with_all = ["sizes", "collectives"])]
    from: Vec<PathBuf>,
    /// Measure rows anew that the table has already; a table of another machine is replaced.
    #[arg(long)]
    again: bool,
    /// Ranks in each process.
    #[arg(short = 'g', long = "ngpus", default_value = "1", value_parser = number(1..=1024))]
    ranks_here: usize,
    /// The library to measure, instead of the one beside this command.
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Draw a table instead: which algorithm wins where, and how much slower the others are.
    #[arg(long, value_name = "TABLE")]
    report: Option<PathBuf>,
}

fn parse_duration(text: &str) -> std::result::Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time such as 90s, 10m or 2h");
    let (number, unit) = match text.chars().last() {
        Some('s') => (&text[..text.len() - 1], 1.0),
        Some('m') => (&text[..text.len() - 1], 60.0),
        Some('h') => (&text[..text.len() - 1], 3600.0),
        _ => (text, 1.0),
    };
    let seconds: f64 = number.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(seconds * unit).map_err(|_| wrong())
}

/// One row that is to be measured.
struct Task {
    kind: Kind,
    collective: Collective,
    /// Elements in a block.
    count: usize,
    /// As the table has it.
    bytes: usize,
}

/// Tunes, or draws.
pub fn run(options: &Options) -> Result<ExitCode> {
    if let Some(table) = &options.report {
        let to = options.output.clone().unwrap_or_else(|| table.with_extension("html"));
        return report::run(table, &to);
    }
    let mut store = Store::from_env(LIMIT)?;
    if std::env::var_os("STRATA_NCCL_LIB").is_none() {
        std::env::set_var("STRATA_NCCL_LIB", "none");
    }
    // What is to be written must not decide what is measured.
    std::env::remove_var("STRATA_TUNING_TABLE");
    let library = Library::open(options.library.as_deref())?;
    let nranks = store.size * options.ranks_here;
    if nranks == 1 {
        let text =
            "one rank has nothing to choose; start this with a launcher: strata launch -n 4 --nodes 2 -- strata tune";
        return Err(Error::InvalidUsage(text.to_string()));
    }
    let tasks = match options.from.is_empty() {
        true => tasks(options, nranks)?,
        false => from_traces::tasks(&options.from, nranks, &mut store)?,
    };
    let mut bench =
        Bench::new(&library, &mut store, options.ranks_here, &tasks.iter().map(Task::case).collect::<Vec<_>>())?;
    let path = options.output.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_OUTPUT));
    let mut output = Output::open(&path, &mut bench, options.again)?;
    let outcome = measure(&tasks, options, &mut bench, &mut output);
    bench.finish(outcome.is_ok())?;
    outcome
}

/// The rows asked for, without those that come to the same message.
fn tasks(options: &Options, nranks: usize) -> Result<Vec<Task>> {
    let mut tasks: Vec<Task> = Vec::new();
    for &kind in &options.collectives {
        for &size in &options.sizes {
            add_task(&mut tasks, kind, size, nranks)?;
        }
    }
    Ok(tasks)
}

/// Adds a row, unless there is one that comes to the same message.
fn add_task(tasks: &mut Vec<Task>, kind: Kind, size: usize, nranks: usize) -> Result<()> {
    let collective = Collective::from_name(kind.name())
        .ok_or_else(|| Error::InvalidArgument(format!("{} has no algorithms to choose from", kind.name())))?;
    let unit = strata::selection::message_bytes(collective, nranks, bench::ELEMENT_BYTES);
    let count = (size / unit).max(1);
    let task = Task { kind, collective, count, bytes: count * unit };
    let known = |other: &Task| other.collective == collective && other.bytes == task.bytes;
    if !tasks.iter().any(known) {
        tasks.push(task);
    }
    Ok(())
}

impl Task {
    fn case(&self) -> Case {
        Case { kind: self.kind, count: self.count }
    }
}

fn measure(tasks: &[Task], options: &Options, bench: &mut Bench, output: &mut Output) -> Result<ExitCode> {
    let start = Instant::now();
    let speaks = bench.is_first();
    let is_done = |task: &&Task| !options.again && output.has(task.collective, task.bytes);
    let (known, open): (Vec<&Task>, Vec<&Task>) = tasks.iter().partition(is_done);
    let bar = progress(speaks, open.len())?;
    if speaks {
        outln!("# strata tune: {}, {}", bench.grid(), bench.machine().summary());
        if !known.is_empty() {
            outln!("# {} of {} in {} already", known.len(), counted(tasks.len(), "row"), output.path().display());
        }
    }
    let mut rows = 0;
    for (index, task) in open.iter().enumerate() {
        let left = options.budget.as_secs_f64() - bench.elapsed(start)?;
        if left <= 0.0 {
            break;
        }
        bar.set_message(format!("{} {}", task.collective.name(), report::size_text(task.bytes)));
        let candidates = candidates::serving(task.collective, bench);
        if candidates.is_empty() {
            if speaks {
                bar.suspend(|| outln!("# {}: nothing to choose from here", task.collective.name()));
            }
            continue;
        }
        let seconds = left / (open.len() - index) as f64;
        let measured = contest::run(bench, &task.case(), candidates, seconds)?;
        let row = row(task, bench, measured)?;
        bar.inc(1);
        if speaks {
            bar.suspend(|| outln!("{}", told(&row)));
            // A table that is read through a pipe should grow line by line.
            crate::process::flush_out();
        }
        output.add(row, bench)?;
        rows += 1;
    }
    bar.finish_and_clear();
    if speaks {
        closing(known.len() + rows, tasks.len(), output.path());
    }
    Ok(ExitCode::SUCCESS)
}

fn progress(speaks: bool, rows: usize) -> Result<ProgressBar> {
    let bar = match speaks && std::io::stderr().is_terminal() {
        true => ProgressBar::with_draw_target(Some(rows as u64), ProgressDrawTarget::stderr()),
        false => ProgressBar::hidden(),
    };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} rows, {eta} left: {msg}");
    bar.set_style(style.map_err(|error| Error::Internal(error.to_string()))?);
    bar.enable_steady_tick(Duration::from_millis(200));
    Ok(bar)
}

fn closing(done: usize, all: usize, path: &Path) {
    let path = path.display();
    match done == all {
        true => outln!("# {} in {path}; STRATA_TUNING_TABLE={path} makes Strata follow them", counted(all, "row")),
        false => outln!("# the budget is spent: {done} of {} in {path}; run again to go on", counted(all, "row")),
    }
}

/// The row of the fastest.
fn row(task: &Task, bench: &Bench, measured: Vec<Measured>) -> Result<Row> {
    let Some(best) = measured.first() else {
        let name = task.collective.name();
        return Err(Error::System(format!("no algorithm could do {name} of {} bytes", task.bytes)));
    };
    let name = CarriedName::parse(&best.algorithm)?;
    Ok(Row {
        collective: task.collective.name().to_string(),
        ranks: Some(bench.grid().nranks()),
        nodes: Some(bench.grid().nnodes()),
        size: Size::Near(task.bytes),
        algorithm: name.algorithm.to_string(),
        carrier: name.carrier.map(|carrier| carrier.name().to_string()),
        segment_bytes: best.segment_bytes,
        window: best.window,
        measured,
    })
}

/// A row in a line, with the best that is another algorithm.
fn told(row: &Row) -> String {
    let best = &row.measured[0];
    let next = row.measured.iter().find(|other| other.algorithm != best.algorithm);
    let next = next.map_or(String::new(), |next| {
        format!("; {} takes {:.2} times as long", next.algorithm, next.median_us / best.median_us)
    });
    format!(
        "{:14} {:>7}  {}: {:.0} us ({:.0} to {:.0}){next}",
        row.collective,
        report::size_text(row.bytes()),
        Candidate::of(best),
        best.median_us,
        best.low_us,
        best.high_us
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::parse_line;

    fn parse(line: &str) -> Options {
        parse_line(line)
    }

    #[test]
    fn a_budget_is_a_number_with_a_unit() {
        assert_eq!(parse_duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
        for text in ["", "s", "-1s", "1d", "nan", "1e300h", "ä"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_that_come_to_the_same_message_are_one_row() {
        let options = parse("tune --collectives all_gather,broadcast --sizes 1,2,16,20,1K");
        let rows: Vec<_> = tasks(&options, 4).unwrap().iter().map(|task| (task.kind.name(), task.bytes)).collect();
        let gather = [16, 1024].map(|bytes| ("all_gather", bytes));
        let broadcast = [4, 16, 20, 1024].map(|bytes| ("broadcast", bytes));
        assert_eq!(rows, [&gather[..], &broadcast[..]].concat());
        assert!(tasks(&parse("tune --collectives sendrecv"), 4).is_err());
    }
}
