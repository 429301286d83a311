//! The command `strata`: starts ranks, measures and tunes collectives, shows and verifies plans, tells what was found, tries
//! out a GPU.
//!
//! A thin binary. Measuring goes through the C interface of a shared library (Strata's own, or any other NCCL), the rest
//! through the library's crate.

/// Says something on the standard error; a closed one is no reason to stop.
macro_rules! tell {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($argument)*);
    }};
}

/// Writes to the standard output; where that cannot be done the command ends.
macro_rules! out {
    ($($argument:tt)*) => {
        $crate::process::write_out(format_args!($($argument)*))
    };
}

/// The same with the end of a line.
macro_rules! outln {
    ($($argument:tt)*) => {
        $crate::process::write_out(format_args!("{}\n", format_args!($($argument)*)))
    };
}

mod draw;
mod explain;
mod gpu;
mod info;
mod launch;
mod nccl;
mod nics;
mod options;
mod perf;
mod plan;
mod probe;
mod process;
mod simulate;
mod synthesize;
mod trace;
mod tune;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Two-level collectives behind NCCL's interface.
#[derive(Parser)]
#[command(name = "strata", version)]
struct Command {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Start a program on several ranks and nodes of this machine, as torchrun does.
    Launch(launch::Options),
    /// Show what Strata found on this machine; list settings and algorithms.
    Info(info::Options),
    /// Show or prove the plans of algorithms.
    #[command(subcommand)]
    Plan(plan::Options),
    /// Estimate the time of collectives on clusters you do not have: tables, heat maps, timelines.
    Simulate(simulate::Options),
    /// Find what collectives are to do on a machine's links, and write it as a file for STRATA_STRATEGY.
    Synthesize(synthesize::Options),
    /// Measure a collective, with nccl-tests' options and columns.
    Perf(perf::Options),
    /// Measure which algorithm is fastest here and write a tuning table; or draw one.
    Tune(tune::Options),
    /// Show which algorithm a collective gets under these settings, and why.
    Explain(explain::Options),
    /// Merge traces of calls, sum them up, or make a workload of them.
    #[command(subcommand)]
    Trace(trace::Options),
    /// Check a GPU of this machine: what its driver offers, whether the kernels are right on it, how fast they are.
    #[command(subcommand)]
    Gpu(gpu::Options),
}

fn main() -> ExitCode {
    let what = match Command::try_parse() {
        Ok(command) => command.what,
        Err(said) => return process::said(&said),
    };
    // Ranks are not ended because nobody reads what the launcher says.
    if !matches!(what, What::Launch(_)) {
        process::end_on_closed_output();
    }
    let outcome = match what {
        What::Launch(options) => launch::run(&options),
        What::Info(options) => info::run(&options),
        What::Plan(options) => plan::run(&options),
        What::Simulate(options) => simulate::run(&options),
        What::Synthesize(options) => synthesize::run(&options),
        What::Perf(options) => perf::run(&options),
        What::Tune(options) => tune::run(&options),
        What::Explain(options) => explain::run(&options),
        What::Trace(options) => trace::run(&options),
        What::Gpu(options) => gpu::run(&options),
    };
    match outcome {
        Ok(code) => {
            process::flush_out();
            code
        }
        Err(error) => {
            tell!("strata: {error}");
            ExitCode::from(2)
        }
    }
}
