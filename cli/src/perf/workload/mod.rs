//! `strata perf --workload`: the collectives of a training step, replayed through the C interface or simulated.
//!
//! A workload is a file ([`mod@file`] describes the format; those in `workloads/` are built in), made concrete for a number
//! of ranks by [`program`]. [`replay`] runs it on the ranks that a launcher has started, [`timeline`] lays it out with
//! prices of a simulated machine; both follow the same list of operations.
#![forbid(unsafe_code)]

mod catalogue;
mod file;
mod formula;
mod groups;
mod outcome;
mod program;
mod replay;
mod simulate;
#[cfg(test)]
mod tests;
mod timeline;
mod ways;

use super::collective::Kind;
use crate::simulate::mixed::Mixed;
use file::{BlockSizes, Workload};
use indicatif::ProgressBar;
use outcome::Outcome;
use program::{Program, Setting};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;
use strata::bootstrap::store::{Store, LIMIT};
use strata::error::{Error, Result};
use strata::sim::Cluster;

/// Half of the 312e12 operations a second that NVIDIA gives for an A100 in half precision, dense; AxoNN reports 57 % of
/// that peak (arXiv 2305.13525), other trainers of large models somewhat less.
const A100_FLOPS: &str = "156T";

/// What is replayed, and how.
#[derive(clap::Args)]
#[group(id = "replay")]
pub struct Options {
    /// Replay a training step instead: a workload's name, or its file; `list` shows the names.
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "collective", help_heading = "Training steps")]
    pub workload: Option<String>,
    /// Simulate it on this machine, for -n ranks, instead of running it.
    #[arg(
        long,
        value_name = "MACHINE",
        requires = "workload",
        conflicts_with = "collective",
        help_heading = "Training steps"
    )]
    simulate: Option<String>,
    #[command(flatten)]
    mixed: Mixed,
    /// By which part the last rank of a simulated step computes longer than the one whose timeline is shown: 0.1. What that one waits for
    /// it counts as exposed.
    #[arg(long, value_name = "PART", default_value = "0", value_parser = parse_late, requires = "simulate",
          help_heading = "Training steps")]
    late: f64,
    /// Mix only these carriers of the simulated machine: nccl,mvapich2-gdr
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "simulate", help_heading = "Training steps")]
    carriers: Vec<String>,
    /// Of a simulated step only these routes, by their names in the table: nccl,mix
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "simulate", help_heading = "Training steps")]
    routes: Vec<String>,
    /// Multiply all sizes, and the time of computing, by this: 1/64, 0.5.
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = parse_scale, requires = "workload", conflicts_with = "collective",
          help_heading = "Training steps")]
    scale: f64,
    /// Operations a second at which a rank computes; K, M, G, T and P are powers of 1000.
    #[arg(long, value_name = "RATE", default_value = A100_FLOPS, value_parser = parse_rate, requires = "workload", conflicts_with = "collective",
          help_heading = "Training steps")]
    flops: f64,
    /// Leave the computing out.
    #[arg(long, requires = "workload", conflicts_with = "collective", help_heading = "Training steps")]
    no_compute: bool,
    /// Set a parameter or a dimension of the workload: layers=2. May be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_set, requires = "workload", conflicts_with = "collective",
          help_heading = "Training steps")]
    set: Vec<(String, String)>,
    /// Blocks of different sizes in the calls of which the workload says how theirs differ, as the exchanges of ds-moe and ted: even,
    /// zipf, one (one rank has nine tenths) or zeros (every other rank has none).
    #[arg(long, value_name = "SKEW", value_parser = parse_skew, requires = "workload", conflicts_with = "collective", help_heading = "Training steps")]
    skew: Option<BlockSizes>,
}

fn parse_scale(text: &str) -> std::result::Result<f64, String> {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let value = match text.split_once('/') {
        Some((above, below)) => number(above).zip(number(below)).map(|(above, below)| above / below),
        None => number(text),
    };
    value
        .filter(|scale| (1e-12..=1e6).contains(scale))
        .ok_or_else(|| format!("`{text}` is not a factor such as 1/64 or 0.5"))
}

fn parse_late(text: &str) -> std::result::Result<f64, String> {
    let part = text.parse::<f64>().ok().filter(|part| (0.0..=100.0).contains(part));
    part.ok_or_else(|| format!("`{text}` is not a part such as 0.1"))
}

fn parse_rate(text: &str) -> std::result::Result<f64, String> {
    let units = [('K', 1e3), ('M', 1e6), ('G', 1e9), ('T', 1e12), ('P', 1e15)];
    let unit = units.iter().find(|(unit, _)| text.to_ascii_uppercase().ends_with(*unit));
    let (number, unit) = unit.map_or((text, 1.0), |(_, factor)| (&text[..text.len() - 1], *factor));
    let rate = number.trim().parse::<f64>().ok().map(|number| number * unit);
    rate.filter(|rate| (1.0..=1e21).contains(rate)).ok_or_else(|| format!("`{text}` is not a rate such as 156T"))
}

fn parse_set(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.into(), value.into())),
        _ => Err(format!("`{text}` is not of the form layers=2")),
    }
}

fn parse_skew(text: &str) -> std::result::Result<BlockSizes, String> {
    BlockSizes::named(text).map_err(|what| format!("--skew {what}"))
}

/// Replays or simulates a workload; the exit code is 1 when a result was wrong.
pub fn run(name: &str, options: &super::Options) -> Result<ExitCode> {
    if name == "list" {
        out!("{}", catalogue::list()?);
        return Ok(ExitCode::SUCCESS);
    }
    let workload = catalogue::find(name)?;
    let replay = &options.replay;
    let (flops, scale, compute) = (replay.flops, replay.scale, !replay.no_compute);
    let setting = Setting { world: 1, flops, scale, compute, set: replay.set.clone(), sizes: replay.skew };
    match &replay.simulate {
        Some(machine) => simulated(name, &workload, setting, machine, options),
        None => measured(name, &workload, setting, options),
    }
}

/// An error for the text of a file that is no workload of so many ranks.
#[cfg(test)]
pub fn check(text: &str, world: usize) -> Result<()> {
    let setting = Setting { world, flops: 1e12, scale: 1.0, compute: true, set: Vec::new(), sizes: None };
    Program::new(&Workload::parse(text)?, &setting).map(drop)
}

fn program_of(name: &str, workload: &Workload, setting: &Setting) -> Result<Program> {
    Program::new(workload, setting).map_err(|error| catalogue::within(name, &error))
}

fn simulated(
    name: &str,
    workload: &Workload,
    setting: Setting,
    machine: &str,
    options: &super::Options,
) -> Result<ExitCode> {
    let Some(world) = options.iterations else {
        return Err(Error::InvalidUsage("--simulate needs the number of ranks: -n 2048".into()));
    };
    if world > simulate::MOST_RANKS {
        return Err(Error::InvalidArgument(format!("-n: at most {} ranks are simulated", simulate::MOST_RANKS)));
    }
    let machine = options.replay.mixed.applied(Cluster::find(machine)?)?.with_carriers(&options.replay.carriers)?;
    let setting = Setting { world, ..setting };
    let program = Program { late: options.replay.late, ..program_of(name, workload, &setting)? };
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::new_spinner(),
        false => ProgressBar::hidden(),
    };
    bar.enable_steady_tick(Duration::from_millis(200));
    let ways::Routes { routes, notes } = ways::routes(&program, &machine, &options.replay.routes, &bar)?;
    bar.finish_and_clear();
    let by_links = machine.carriers.is_empty()
        && !machine.has_unequal_nodes()
        && program.rows.iter().any(|row| matches!(row.kind, Kind::AllToAll | Kind::Broadcast));
    let late = match options.replay.late {
        0.0 => String::new(),
        late => format!("\n# the last rank computes {late} of its time longer than the one whose timeline this is"),
    };
    let mut how = format!("simulated on {}\n# {}", machine.text, simulate::NOT_MEASURED);
    if machine.has_unequal_nodes() {
        how = format!("simulated on {}\n# {}", machine.text, simulate::ON_UNEQUAL);
    }
    if by_links {
        how += &format!("\n# {}", simulate::BY_LINKS);
    }
    if program.rows.iter().any(|row| row.skew.is_some()) {
        how += &format!("\n# {}", simulate::OF_SKEWED);
    }
    how += &late;
    how.extend(notes.iter().map(|note| format!("\n# {note}")));
    if let Some(overload) = machine.overload.as_ref().filter(|overload| world as f64 > overload.above_ranks.value) {
        how += &format!(
            "\n# on more than {} ranks and from {:.0} bytes on the vendor's library is taken to be {} times as slow (fitted)",
            overload.above_ranks.value, overload.from_bytes.value, overload.factor.value
        );
    }
    let (program, setting) = (&program, &setting);
    let outcome = Outcome { name, workload, program, setting, how, routes, steps: Vec::new(), wrong: None };
    outcome.tell(options.json.as_deref()).map(|()| ExitCode::SUCCESS)
}

fn measured(name: &str, workload: &Workload, setting: Setting, options: &super::Options) -> Result<ExitCode> {
    if options.ranks_here > 1 {
        return Err(Error::InvalidUsage(
            "a workload needs a process for each rank (strata launch -n 8 -- strata perf --workload ...), not -g"
                .into(),
        ));
    }
    let mut store = Store::from_env(LIMIT)?;
    if store.size == 1 {
        return Err(Error::InvalidUsage(format!(
            "a workload needs several ranks: strata launch -n 8 -- strata perf --workload {name}"
        )));
    }
    let setting = Setting { world: store.size, ..setting };
    let program = program_of(name, workload, &setting)?;
    let library = options.library()?;
    let how = format!("library {}, NCCL {}", library.path().display(), library.version()?);
    let measured = replay::run(&program, options, &library, &mut store)?;
    let (routes, steps, wrong) = (vec![("measured".to_string(), measured.times)], measured.steps, measured.wrong);
    let (program, setting) = (&program, &setting);
    let outcome = Outcome { name, workload, program, setting, how, routes, steps, wrong };
    if store.rank == 0 {
        outcome.tell(options.json.as_deref())?;
    }
    Ok(if wrong.unwrap_or(0) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
