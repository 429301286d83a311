//! Random programs over the whole C interface of NCCL, by seed: generated, run by real processes, judged by a model that
//! knows what each call must return and what memory must hold. See docs/reliability.md.

mod board;
mod c_text;
mod conduct;
mod fault;
mod generate;
mod gpu;
mod library;
mod model;
mod process;
mod program;
mod rank;
mod report;
mod shrink;
mod times;
mod usage;

use clap::{Args, Parser, Subcommand};
use conduct::{Carriers, Conduct, Verdict};
use generate::Weights;
use program::{Carrier, FaultKind, Program};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[derive(Parser)]
#[command(about = "Random NCCL programs, run by seed and judged by a model")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the program of one seed.
    Run {
        #[arg(long)]
        seed: u64,
        #[command(flatten)]
        options: Options,
        /// How often; the first failure ends it.
        #[arg(long, default_value_t = 1)]
        times: u32,
    },
    /// Runs the programs of many seeds; prints those that fail, and the numbers.
    Many {
        #[arg(long, default_value_t = 0)]
        from: u64,
        #[arg(long, default_value_t = 100)]
        count: u64,
        /// Begins no new program after so many seconds; 0 is no limit.
        #[arg(long, default_value_t = 0)]
        seconds: u64,
        /// Programs at a time.
        #[arg(long, default_value_t = 2)]
        jobs: usize,
        /// Adds a line for each program and for each survivor's first error to a file, which `table` reads.
        #[arg(long)]
        record: Option<PathBuf>,
        #[command(flatten)]
        options: Options,
    },
    /// Prints a record of `many` as a table: how long after a fault survivors had their first error.
    Table { record: PathBuf },
    /// Cuts a failing program down, and prints what is left as C.
    Shrink {
        #[arg(long)]
        seed: u64,
        /// Runs of a candidate before it counts as one that passes.
        #[arg(long, default_value_t = 3)]
        tries: u32,
        /// Writes the program that is left, as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
        #[command(flatten)]
        options: Options,
    },
    /// Prints the program of a seed.
    Print {
        #[arg(long)]
        seed: u64,
        /// As C; else as JSON.
        #[arg(long)]
        c: bool,
        #[command(flatten)]
        options: Options,
    },
    /// A process of a program.
    #[command(hide = true)]
    Process {
        dir: PathBuf,
        /// As an MPI launcher says, unless given.
        #[arg(long)]
        number: Option<usize>,
        #[arg(long)]
        library: PathBuf,
    },
}

#[derive(Args, Clone)]
struct Options {
    /// What carries messages; TCP or shared memory, by the seed, unless given.
    #[arg(long)]
    carrier: Option<Carrier>,
    /// The library under test.
    #[arg(long, env = "PROGRAMS_LIBRARY", default_value = "target/debug/libstrata.so")]
    library: PathBuf,
    /// Seconds without progress after which a program hangs.
    #[arg(long, default_value_t = 60)]
    limit: u64,
    /// Programs with faults.
    #[arg(long)]
    faults: bool,
    /// Only faults of this kind.
    #[arg(long)]
    fault: Option<FaultKind>,
    /// A program as JSON, in place of the seed's.
    #[arg(long)]
    program: Option<PathBuf>,
    /// Keeps the files of the run.
    #[arg(long)]
    keep: bool,
    /// Has gdb say where the threads of ranks that hang are.
    #[arg(long)]
    stacks: bool,
    #[command(flatten)]
    carriers: Carriers,
    #[command(flatten)]
    weights: Weights,
}

impl Options {
    fn program(&self, seed: u64) -> Result<Program, String> {
        if let Some(path) = &self.program {
            let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            return serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()));
        }
        let program = generate::program(seed, self.carrier, &self.weights);
        if self.faults || self.fault.is_some() {
            return Ok(generate::with_fault(program, self.fault));
        }
        Ok(program)
    }

    fn conduct(&self) -> Result<Conduct, String> {
        let library = self.library.canonicalize().map_err(|error| format!("{}: {error}", self.library.display()))?;
        let Carriers { mpi_plugin, vendor, driver, .. } = &self.carriers;
        let (needed, option) = match self.carrier {
            Some(Carrier::Mpi) => (mpi_plugin, "--mpi-plugin"),
            Some(Carrier::Vendor) => (vendor, "--vendor"),
            Some(Carrier::Softgpu) => (driver, "--driver"),
            _ => (&None, ""),
        };
        if needed.is_none() && !option.is_empty() {
            return Err(format!("this carrier needs {option}"));
        }
        Ok(Conduct {
            library,
            limit: Duration::from_secs(self.limit),
            keep: self.keep,
            stacks: self.stacks,
            carriers: self.carriers.clone(),
        })
    }
}

fn run(seed: u64, options: &Options, times: u32) -> Result<bool, String> {
    let (program, conduct) = (options.program(seed)?, options.conduct()?);
    for _ in 0..times {
        match conduct.run(&program)? {
            Verdict::Passed { took, .. } => println!("seed {seed}: passed in {} ms", took.as_millis()),
            Verdict::Failed { what, story } => {
                println!("seed {seed}: FAILED: {what}\n{story}");
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn print(seed: u64, c: bool, options: &Options) -> Result<bool, String> {
    let program = options.program(seed)?;
    let json = || serde_json::to_string_pretty(&program).expect("plain data");
    println!("{}", if c { c_text::program(&program, "whole") } else { json() });
    Ok(true)
}

fn cut_down(seed: u64, tries: u32, json: Option<PathBuf>, options: &Options) -> Result<bool, String> {
    let conduct = options.conduct()?;
    match shrink::shrink(&options.program(seed)?, &conduct, tries)? {
        None => println!("seed {seed}: passes"),
        Some((program, what)) => {
            println!("{}", c_text::program(&program, &what));
            if let Some(path) = json {
                let text = serde_json::to_string(&program).expect("plain data");
                std::fs::write(path, text).map_err(|error| error.to_string())?;
            }
        }
    }
    Ok(true)
}

/// Of how many failed programs `many` tells everything, so that a failure that comes seldom need not come again.
const STORIES: u64 = 2;

/// Which programs `many` runs.
struct Range {
    from: u64,
    count: u64,
    seconds: u64,
    jobs: usize,
}

fn many(range: &Range, record: Option<&Path>, options: &Options) -> Result<bool, String> {
    let &Range { from, count, seconds, jobs } = range;
    let conduct = options.conduct()?;
    let end = (seconds > 0).then(|| Instant::now() + Duration::from_secs(seconds));
    let next = AtomicU64::new(from);
    let counts = Mutex::new((0u64, 0u64));
    std::thread::scope(|scope| {
        let worker = || -> Result<(), String> {
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= from + count || end.is_some_and(|end| Instant::now() > end) {
                    return Ok(());
                }
                let program = options.program(seed)?;
                let verdict = conduct.run(&program)?;
                let mut counts = counts.lock().map_err(|_| "a worker panicked")?;
                if let Some(path) = record {
                    times::append(path, &program, &verdict).map_err(|error| format!("{}: {error}", path.display()))?;
                }
                match verdict {
                    Verdict::Passed { .. } => counts.0 += 1,
                    Verdict::Failed { what, story } => {
                        counts.1 += 1;
                        let what: String = what.chars().take(400).collect();
                        println!("seed {seed} over {:?}: {what}", program.carrier);
                        if counts.1 <= STORIES || options.stacks {
                            print!("{story}");
                        }
                    }
                }
            }
        };
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a worker panicked".to_string())?)
    })?;
    let (passed, failed) = *counts.lock().map_err(|_| "a worker panicked")?;
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run { seed, options, times } => run(seed, &options, times),
        Command::Many { from, count, seconds, jobs, record, options } => {
            many(&Range { from, count, seconds, jobs }, record.as_deref(), &options)
        }
        Command::Table { record } => times::table(&record).map(|table| {
            print!("{table}");
            true
        }),
        Command::Shrink { seed, tries, json, options } => cut_down(seed, tries, json, &options),
        Command::Print { seed, c, options } => print(seed, c, &options),
        Command::Process { dir, number, library } => process::run(&dir, number, &library).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(text) => {
            eprintln!("programs: {text}");
            ExitCode::from(2)
        }
    }
}
