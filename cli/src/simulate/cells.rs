//! Prices every cell, by every method, on all processors.
#![forbid(unsafe_code)]

use super::method::Method;
use super::route;
use indicatif::ProgressBar;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::selection::takes_blocks_of_any_sizes;
use strata::sim::price::{grid_of, price, Detail, How, Price};
use strata::sim::Cluster;
use strata::topo::Rank;

/// What is asked: a collective on so many ranks with a message of so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// The collective.
    pub collective: Collective,
    /// Ranks in all.
    pub nranks: usize,
    /// Bytes: all-gather's output, reduce-scatter's input, the vector of others.
    pub message_bytes: usize,
}

/// What a method takes for a cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The way by which it goes.
    pub way: How,
    /// Its price.
    pub price: Price,
    /// Whether the vendor's overload is in it.
    pub overloaded: bool,
    /// What it cost to find out: seconds, and the process's greatest memory meanwhile, in bytes.
    pub cost: (f64, Option<u64>),
}

/// How cells are priced.
#[derive(Debug, Clone)]
pub struct Manner {
    /// On what.
    pub machine: Arc<Cluster>,
    /// With what detail.
    pub detail: Detail,
    /// One after the other, so that time and memory can be told for each.
    pub alone: bool,
}

/// For each cell what each method takes, in order; None where a method has no way to go.
pub fn price_all(
    manner: &Manner,
    cells: &[Cell],
    methods: &[Method],
    bar: &ProgressBar,
) -> Result<Vec<Vec<Option<Answer>>>> {
    let mut jobs: Vec<(usize, usize)> =
        (0..cells.len()).flat_map(|cell| (0..methods.len()).map(move |method| (cell, method))).collect();
    if !manner.alone {
        // The largest first, so that no processor is left with one at the end.
        jobs.sort_by_key(|&(cell, _)| std::cmp::Reverse(cells[cell].nranks));
    }
    let answers = Mutex::new(vec![vec![None; methods.len()]; cells.len()]);
    // The job and the error of the first, in the order of the jobs, that failed: the same whichever thread was faster. Those
    // before it have been taken, and are ended.
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let next = AtomicUsize::new(0);
    let work = || {
        let take = || {
            let job = next.fetch_add(1, Ordering::Relaxed);
            jobs.get(job).map(|&(cell, method)| (job, cell, method))
        };
        while let Some((job, cell, method)) = take() {
            match ask(manner, &cells[cell], &methods[method]) {
                Ok(answer) => {
                    answers.lock().unwrap_or_else(PoisonError::into_inner)[cell][method] = answer;
                }
                Err(error) => {
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(first, _)| job < *first) {
                        *failed = Some((job, error));
                    }
                    next.store(jobs.len(), Ordering::Relaxed);
                }
            }
            bar.inc(1);
        }
    };
    let nthreads = if manner.alone { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
    std::thread::scope(|scope| {
        for _ in 1..nthreads.min(jobs.len()) {
            scope.spawn(work);
        }
        work();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(answers.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// The fastest of a method's ways for a cell.
pub fn ask(manner: &Manner, cell: &Cell, method: &Method) -> Result<Option<Answer>> {
    let Cell { collective, nranks, message_bytes } = *cell;
    let machine = &manner.machine;
    let grid = grid_of(machine, nranks);
    method.check(&grid, collective)?;
    if let (Some(_), Method::Plan { choice, .. }) = (manner.detail.skew, method) {
        let name = choice.to_string();
        if !takes_blocks_of_any_sizes(&name, (collective, Rank(0)), &grid) {
            let collective = collective.name();
            let text = format!("--skew: {name} does no {collective} of blocks of different sizes on these ranks");
            return Err(Error::InvalidArgument(text));
        }
    }
    let mut best: Option<Answer> = None;
    let ways = match (manner.detail.skew, method) {
        (Some(skew), Method::Strata) => vec![route::skewed(&grid, collective, message_bytes, skew)?],
        _ => method.ways(machine, &grid, collective, message_bytes)?,
    };
    for way in ways {
        if manner.alone {
            forget_peak();
        }
        let start = Instant::now();
        let price = price(machine, &grid, collective, message_bytes, &way, manner.detail)?;
        let cost = (start.elapsed().as_secs_f64(), if manner.alone { peak_bytes() } else { None });
        if best.as_ref().is_none_or(|best| price.ns < best.price.ns) {
            let overloaded = way == How::Vendor && machine.is_overloaded(nranks, message_bytes);
            best = Some(Answer { way, price, overloaded, cost });
        }
    }
    Ok(best)
}

/// Lets Linux count this process's greatest memory anew; where it does not, the peak is that of all cells so far.
fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The greatest memory of this process since it was last forgotten.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}
