//! `strata plan`: shows the steps of an algorithm for a shape, and proves algorithms for many shapes.
#![forbid(unsafe_code)]

mod grids;
mod prove;
mod scripts;

use crate::draw::lanes;
use crate::options::{parse_algorithm, parse_size, Nodes, Spread};
use clap::Subcommand;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use strata::algorithms::{self, Choice};
use strata::config::Config;
use strata::error::{counted, Error, Result};
use strata::plan::{text, Collective, Plan, Shape};
use strata::script::store::{self, Steps};
use strata::selection::{self, message_bytes, Context, Executor, Request};
use strata::sim::Cluster;
use strata::topo::{Grid, Rank};

/// What to do with plans.
#[derive(Subcommand)]
pub enum Options {
    /// Print, or draw, the steps of an algorithm.
    Show(Show),
    /// Prove algorithms for many shapes; the exit code is 1 when one is rejected.
    Verify(prove::Options),
    /// Write an algorithm as a file in MSCCL's XML.
    Convert(scripts::Convert),
    /// Compile an algorithm that was written as a trace to a file in MSCCL's XML.
    Compile(scripts::Compile),
}

/// How a drawing is read; printed under it and with `--help`.
const LEGEND: &str = "\
Ranks stand side by side; time goes down. A step stands in the first round in which it can happen if every message takes
one round. Chunks are those of the input (i), of the output (o) and of scratch memory (s), counted from 0:
  >1 o0       sends chunk 0 of the output to rank 1
  <1 s2       receives from rank 1 into chunk 2 of scratch
  <1+ o2      receives from rank 1 and reduces into chunk 2 of the output
  <1+ i2=o2   receives from rank 1, reduces with chunk 2 of the input, writes chunk 2 of the output
  i0=o3       copies chunk 0 of the input to chunk 3 of the output
  i0+s1=o0    reduces two chunks into a third
  o4-7,o9     chunks 4 to 7 and 9
  nop         waits for other steps; nothing moves";

/// More ranks than a drawing can show side by side.
const MOST_DRAWN: usize = 64;

/// Options of `strata plan show`.
#[derive(clap::Args)]
#[command(after_long_help = format!("Drawings (--draw):\n{LEGEND}"))]
pub struct Show {
    /// all_reduce, all_gather, reduce_scatter, broadcast, reduce, alltoall, gather or scatter; or a file in MSCCL's XML, which
    /// says its number of ranks itself.
    #[arg(value_name = "COLLECTIVE|FILE")]
    what: String,
    /// The algorithm, such as `ring` or `two_level(direct,log)`; by default the one that Strata would take.
    #[arg(long, value_parser = parse_algorithm)]
    algo: Option<Choice>,
    /// Bytes of the message by which Strata would choose.
    #[arg(long, default_value = "1M", value_parser = parse_size)]
    bytes: usize,
    #[command(flatten)]
    spread: Spread,
    /// The links of this machine, or the one in a file, inside nodes that have as many ranks.
    #[arg(long)]
    machine: Option<String>,
    /// Only this rank.
    #[arg(long)]
    rank: Option<usize>,
    /// The root, where there is one.
    #[arg(long, default_value = "0")]
    root: usize,
    /// Input and output overlap as NCCL's in-place form has it.
    #[arg(long)]
    in_place: bool,
    /// Draw who sends to whom, round by round, for all ranks, instead of listing steps.
    #[arg(long)]
    draw: bool,
    /// Draw the lanes of all ranks over time as an SVG, with messages and dependencies as arrows.
    #[arg(long, conflicts_with = "draw")]
    svg: bool,
    /// A file's steps as the host runs them: lanes that do the same on other chunks are one.
    #[arg(long)]
    merged: bool,
    /// The contract of a file with a custom collective, where it does not lie beside it.
    #[arg(long, value_name = "FILE")]
    contract: Option<PathBuf>,
}

/// The collective of a name.
pub fn parse_collective(text: &str) -> std::result::Result<Collective, String> {
    let names = || Collective::ALL.map(Collective::name).join(", ");
    Collective::from_name(text).ok_or_else(|| match std::path::Path::new(text).is_dir() {
        true => "a folder; name its files (FOLDER/*.xml)".to_string(),
        false => format!("not one of {}", names()),
    })
}

/// Runs the subcommand.
pub fn run(options: &Options) -> Result<ExitCode> {
    match options {
        Options::Show(options) => show(options),
        Options::Verify(options) => prove::run(options),
        Options::Convert(options) => scripts::convert(options),
        Options::Compile(options) => scripts::compile(options),
    }
}

/// What is shown: the shape, and the algorithm for it.
fn subject(options: &Show) -> Result<(Shape, Choice)> {
    if scripts::is_file(&options.what) {
        let steps = if options.merged { Steps::Merged } else { Steps::AsWritten };
        let script = store::load_file(Path::new(&options.what), options.contract.as_deref(), steps)?;
        let nranks = script.script.nranks();
        if options.algo.is_some() || options.spread.ranks.is_some_and(|ranks| ranks != nranks) {
            let text = format!("{} is an algorithm itself, for {}", options.what, counted(nranks, "rank"));
            return Err(Error::InvalidArgument(text));
        }
        let grid = Arc::new(Grid::flat(nranks));
        let contract = script.script.contract.clone();
        let shape = Shape { root: script.root, contract, ..Shape::new(script.script.collective, grid) };
        return Ok((Shape { in_place: options.in_place, ..shape }, Choice::flat(&script.unique_name)));
    }
    let collective = parse_collective(&options.what).map_err(Error::InvalidArgument)?;
    let mut grid = grid_of(&options.spread)?;
    if let Some(name) = &options.machine {
        grid = Arc::new(Cluster::find(name)?.on_links(Grid::clone(&grid)));
    }
    let mut shape = Shape { in_place: options.in_place, ..Shape::new(collective, grid) };
    shape.root = rank_of(options.root, &shape.grid)?;
    let choice = match &options.algo {
        Some(choice) => choice.clone(),
        None => chosen(collective, options.bytes, &shape.grid)?,
    };
    Ok((shape, choice))
}

fn rank_of(rank: usize, grid: &Grid) -> Result<Rank> {
    match rank < grid.nranks() {
        true => Ok(Rank::from_index(rank)),
        false => Err(Error::InvalidArgument(format!("there is no rank {rank} among {}", grid.nranks()))),
    }
}

fn show(options: &Show) -> Result<ExitCode> {
    let (shape, choice) = match subject(options) {
        Err(Error::InvalidUsage(text)) if scripts::is_file(&options.what) => return Ok(scripts::refused(&text)),
        subject => subject?,
    };
    let nranks = shape.nranks();
    if (options.draw || options.svg) && nranks > MOST_DRAWN {
        return Err(Error::InvalidArgument(format!("a drawing has room for {MOST_DRAWN} ranks, not for {nranks}")));
    }
    if options.draw || options.svg {
        let ranks = (0..nranks).map(Rank::from_index);
        let plans = ranks.map(|rank| algorithms::build(&choice, &shape, rank)).collect::<Result<Vec<_>>>()?;
        let steps: usize = plans.iter().map(Plan::nsteps).sum();
        if options.draw {
            out!("{}\n{}\n{LEGEND}\n", shape.grid, text::draw(&plans));
        } else if steps > lanes::MOST_STEPS {
            let most = lanes::MOST_STEPS;
            return Err(Error::InvalidArgument(format!("a picture has room for {most} steps, not for {steps}")));
        } else {
            out!("{}", lanes::sheet(&format!("{} {choice}, {}", shape.collective.name(), shape.grid), &plans));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let ranks = match options.rank {
        Some(rank) => rank_of(rank, &shape.grid)?.index()..rank + 1,
        None => 0..nranks,
    };
    // One at a time: all plans of a large shape need not be in memory at once.
    for rank in ranks.map(Rank::from_index) {
        out!("{}", text::print(&algorithms::build(&choice, &shape, rank)?));
    }
    Ok(ExitCode::SUCCESS)
}

/// What Strata would take with its default settings.
fn chosen(collective: Collective, bytes: usize, grid: &Arc<Grid>) -> Result<Choice> {
    let block_bytes = bytes / message_bytes(collective, grid.nranks(), 1);
    let request = Request::new(collective, block_bytes);
    let context = Context::new(grid.clone(), Config::default(), true);
    match selection::decide(&request, &context)?.executor {
        Executor::Own(selection) => Ok(selection.choice),
        _ => Err(Error::Internal("a vendor library where there is none".to_string())),
    }
}

fn grid_of(spread: &Spread) -> Result<Arc<Grid>> {
    let ranks = match (spread.ranks, &spread.nodes) {
        (None, Nodes::Count(count)) => Some(4.max(*count)),
        (ranks, _) => ranks,
    };
    let (_, nodes) = Spread { ranks, nodes: spread.nodes.clone(), ..*spread }.resolve()?;
    Ok(Arc::new(Grid::from_labels(&nodes)))
}
