//! `strata plan verify`: every algorithm, every shape, one line per algorithm.
#![forbid(unsafe_code)]

use super::grids::{parse_grid, standard, MOST_PROVED};
use super::scripts;
use crate::options::{number, parse_algorithm};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use strata::algorithms::{self, Choice};
use strata::error::{counted, Error, Result};
use strata::plan::{Collective, Shape};
use strata::selection::strategy::{self, Strategies, Strategy};
use strata::sim::Cluster;
use strata::topo::{Grid, Rank};
use strata::verify::{self, verify};

/// Options of `strata plan verify`.
#[derive(clap::Args)]
pub struct Options {
    /// A collective, or all; or files with MSCCL's algorithms, which are proved in every form that calls may want.
    #[arg(value_name = "COLLECTIVE|FILE", default_value = "all")]
    what: Vec<String>,
    /// Only this algorithm.
    #[arg(long, value_parser = parse_algorithm)]
    algo: Option<Choice>,
    /// Every number of ranks up to this one, on several shapes of nodes.
    #[arg(long, default_value = "16", value_parser = number(0..=256))]
    max_ranks: usize,
    /// A further shape (`64x8`, `3,1,4`, `rr:8/3`); may be given several times. With --max-ranks 0: only these.
    #[arg(long = "shape", value_parser = parse_grid)]
    shapes: Vec<Grid>,
    /// The links of this machine, or the one in a file, inside the nodes of shapes that have as many ranks.
    #[arg(long)]
    machine: Option<String>,
    /// Of each shape only the hardest form: in place, with a prologue, and the last rank as root.
    #[arg(long)]
    hardest: bool,
    /// Messages that a channel holds before it takes no more.
    #[arg(long, default_value = "1")]
    capacity: usize,
    /// Also change every plan of up to four ranks in every way, and demand that each change is rejected or does no harm.
    #[arg(long)]
    mutate: bool,
    /// The contract of files with a custom collective, where it does not lie beside them.
    #[arg(long, value_name = "FILE")]
    contract: Option<PathBuf>,
    /// The strategies of this file, which `strata synthesize` writes, for the grid that it names; nothing else is proved.
    #[arg(long, value_name = "FILE", exclusive = true)]
    strategy: Option<PathBuf>,
}

/// The most ranks whose mutants are tried: their number grows with the square of the ranks and more.
const MUTATED_RANKS: usize = 4;

/// One line of the table.
struct Line {
    collective: Collective,
    choice: Choice,
    shapes: Vec<Shape>,
}

/// What became of a line.
#[derive(Default)]
struct Verdict {
    accepted: usize,
    rejected: Vec<String>,
    messages: usize,
    mutants: usize,
    took: Duration,
}

/// Proves what the options name and prints the table.
pub fn run(options: &Options) -> Result<ExitCode> {
    if let Some(path) = &options.strategy {
        return prove_strategies(path);
    }
    if options.what.iter().any(|what| scripts::is_file(what)) {
        let files: Vec<PathBuf> = options.what.iter().map(PathBuf::from).collect();
        return scripts::verify(&files, options.contract.as_deref());
    }
    let lines = lines(options)?;
    let total: usize = lines.iter().map(|line| line.shapes.len()).sum();
    if total == 0 {
        return Err(Error::InvalidArgument("no algorithm does any of these shapes".into()));
    }
    let bar = progress(total);
    let start = Instant::now();
    let verdicts = prove(&lines, options, &bar);
    bar.finish_and_clear();
    outln!("{:<15} {:<30} {:>7} {:>9} {:>11} {:>9}", "collective", "algorithm", "shapes", "accepted", "messages", "ms");
    for (line, verdict) in lines.iter().zip(&verdicts) {
        outln!(
            "{:<15} {:<30} {:>7} {:>9} {:>11} {:>9.1}",
            line.collective.name(),
            line.choice.to_string(),
            line.shapes.len(),
            verdict.accepted,
            verdict.messages,
            verdict.took.as_secs_f64() * 1e3
        );
        verdict.rejected.iter().take(3).for_each(|text| outln!("    rejected: {text}"));
    }
    let rejected: usize = verdicts.iter().map(|verdict| verdict.rejected.len()).sum();
    outln!(
        "{} on {}: {} accepted, {rejected} rejected, in {:.1} s",
        counted(lines.len(), "algorithm"),
        counted(total, "shape"),
        total - rejected,
        start.elapsed().as_secs_f64()
    );
    if options.mutate {
        let mutants: usize = verdicts.iter().map(|verdict| verdict.mutants).sum();
        let verdict = if rejected == 0 { "all rejected, or as good as the original" } else { "see above" };
        let mutants = counted(mutants, "mutant");
        outln!("{mutants} of plans of up to {MUTATED_RANKS} ranks: {verdict}");
    }
    Ok(if rejected == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Proves a file of strategies, and prints a line for each.
fn prove_strategies(path: &Path) -> Result<ExitCode> {
    let text = strategy::text_of(path)?;
    let proved = Strategies::parse(&text).and_then(|strategies| {
        let reports = strategies.prove(&Arc::new(Grid::blocks(&strategies.nodes)), MOST_PROVED)?;
        Ok((strategies, reports))
    });
    let (strategies, reports) = match proved {
        Ok(proved) => proved,
        Err(fault) => {
            outln!("rejected: {}: {fault}", path.display());
            return Ok(ExitCode::FAILURE);
        }
    };
    outln!("{:<15} {:>11} {:>11} {:<30} {:<8} {:>9}", "collective", "from", "below", "algorithm", "shares", "messages");
    for (strategy, report) in strategies.all.iter().zip(reports) {
        let Strategy { collective, from_bytes, below_bytes, choice, shares, .. } = strategy;
        let shares = if shares.is_some() { "unequal" } else { "even" };
        let (name, choice) = (collective.name(), choice.to_string());
        outln!("{name:<15} {from_bytes:>11} {below_bytes:>11} {choice:<30} {shares:<8} {:>9}", report.messages);
    }
    outln!("{} accepted on {}", counted(strategies.all.len(), "line"), Grid::blocks(&strategies.nodes));
    Ok(ExitCode::SUCCESS)
}

fn progress(total: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
    match ProgressStyle::with_template("{bar:40} {pos}/{len} shapes, {eta} left") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Every collective and choice that the options name, with the shapes it does.
fn lines(options: &Options) -> Result<Vec<Line>> {
    let mut collectives = Vec::new();
    for what in &options.what {
        match what.as_str() {
            "all" => collectives.extend(Collective::ALL),
            name => collectives.push(super::parse_collective(name).map_err(Error::InvalidArgument)?),
        }
    }
    let mut grids = standard(options.max_ranks);
    grids.extend(options.shapes.iter().cloned().map(Arc::new));
    if let Some(name) = &options.machine {
        let machine = Cluster::find(name)?;
        grids = grids.into_iter().map(|grid| Arc::new(machine.on_links(Grid::clone(&grid)))).collect();
    }
    let mut lines: Vec<Line> = Vec::new();
    for collective in collectives {
        for grid in &grids {
            let mut choices = algorithms::choices(collective, grid);
            choices.extend(algorithms::coded_choices(collective, grid));
            if let Some(wanted) = &options.algo {
                choices = vec![wanted.clone()];
            }
            for choice in choices {
                let forms = forms(collective, grid, options.hardest);
                let shapes = forms.into_iter().filter(|shape| algorithms::supports(&choice, shape));
                match lines.iter_mut().find(|line| line.collective == collective && line.choice == choice) {
                    Some(line) => line.shapes.extend(shapes),
                    None => lines.push(Line { collective, shapes: shapes.collect(), choice }),
                }
            }
        }
    }
    lines.retain(|line| !line.shapes.is_empty());
    Ok(lines)
}

/// A collective on a grid: in and out of place, with and without a prologue, with the first and the last rank as root;
/// or only the last of these.
fn forms(collective: Collective, grid: &Arc<Grid>, hardest: bool) -> Vec<Shape> {
    let last = Rank::from_index(grid.nranks() - 1);
    let roots = if collective.has_root() && last != Rank(0) { vec![Rank(0), last] } else { vec![Rank(0)] };
    let in_place = if collective == Collective::AllToAll { &[false][..] } else { &[false, true] };
    let prologue = if collective.reduces() { &[false, true][..] } else { &[false] };
    let mut forms = Vec::new();
    for root in roots {
        for &in_place in in_place {
            for &prologue in prologue {
                forms.push(Shape { root, in_place, prologue, ..Shape::new(collective, grid.clone()) });
            }
        }
    }
    if hardest {
        forms.drain(..forms.len() - 1);
    }
    forms
}

/// Proves all shapes of all lines; the verdicts are in the order of the lines.
fn prove(lines: &[Line], options: &Options, bar: &ProgressBar) -> Vec<Verdict> {
    let mut work: Vec<(usize, &Line, &Shape)> = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        work.extend(line.shapes.iter().map(|shape| (index, line, shape)));
    }
    let outcomes = in_parallel(&work, |(_, line, shape)| {
        let start = Instant::now();
        let outcome = prove_shape(&line.choice, shape, options);
        bar.inc(1);
        (outcome, start.elapsed())
    });
    let mut verdicts: Vec<Verdict> = lines.iter().map(|_| Verdict::default()).collect();
    for ((index, _, shape), (outcome, took)) in work.iter().zip(outcomes) {
        let verdict = &mut verdicts[*index];
        verdict.took += took;
        match outcome {
            Ok((messages, mutants)) => {
                verdict.accepted += 1;
                verdict.messages += messages;
                verdict.mutants += mutants;
            }
            Err(text) => verdict.rejected.push(format!("{}: {text}", describe(shape))),
        }
    }
    verdicts
}

/// How many messages the plans of a shape send, and how many mutants of them were tried.
fn prove_shape(choice: &Choice, shape: &Shape, options: &Options) -> std::result::Result<(usize, usize), String> {
    let ranks = || (0..shape.nranks()).map(Rank::from_index);
    let build = || ranks().map(|rank| algorithms::build(choice, shape, rank)).collect::<Result<Vec<_>>>();
    // A builder that panics is a mistake like any other here; the shape that shows it must be named.
    let built = std::panic::catch_unwind(std::panic::AssertUnwindSafe(build));
    let plans = built.map_err(|_| "the builder panicked")?.map_err(|error| error.to_string())?;
    let how = verify::Options { capacity: options.capacity, vectored: false };
    let report = verify(&plans, &how).map_err(|rejection| rejection.to_string())?;
    if !options.mutate || options.capacity == 0 || shape.nranks() > MUTATED_RANKS {
        return Ok((report.messages, 0));
    }
    let outcome = verify::mutate::kill(&plans, &how);
    match outcome.missed.first() {
        Some((change, harm)) => Err(format!("a mutant was accepted: {change}; it fails: {harm}")),
        None => Ok((report.messages, outcome.mutants)),
    }
}

/// A shape in words.
pub fn describe(shape: &Shape) -> String {
    let mut text = shape.grid.to_string();
    if shape.collective.has_root() {
        text += &format!(", root {}", shape.root);
    }
    if shape.in_place {
        text += ", in place";
    }
    if shape.prologue {
        text += ", prologue";
    }
    text
}

/// Does the work on all processors; results in order.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((index, item)) = nth(items, next.fetch_add(1, Ordering::Relaxed)) {
                    let result = work(item);
                    done.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

fn nth<T>(items: &[T], index: usize) -> Option<(usize, &T)> {
    items.get(index).map(|item| (index, item))
}
