//! `strata plan`: shows the steps of an algorithm for a shape, and proves algorithms for many shapes.
#![forbid(unsafe_code)]

mod grids;
mod prove;

use clap::Subcommand;
use grids::parse_grid;
use std::process::ExitCode;
use std::sync::Arc;
use strata::algo::{self, Choice};
use strata::error::{Error, Result};
use strata::plan::{text, Collective, Shape};
use strata::topo::{Grid, Rank};

/// What to do with plans.
#[derive(Subcommand)]
pub enum Options {
    /// Print, or draw, the steps of an algorithm.
    Show(Show),
    /// Prove algorithms for many shapes; the exit code is 1 when one is rejected.
    Verify(prove::Options),
}

/// Options of `strata plan show`.
#[derive(clap::Args)]
pub struct Show {
    /// all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, gather or scatter.
    #[arg(value_parser = parse_collective)]
    collective: Collective,
    /// The algorithm, such as `ring` or `two_level(direct,log)`.
    #[arg(long, default_value = "two_level")]
    algo: Choice,
    /// Ranks in all.
    #[arg(long, default_value = "4")]
    ranks: usize,
    /// Nodes: how many (`2`), or the ranks on each (`3,1,4`, which wins over --ranks).
    #[arg(long, default_value = "2")]
    nodes: String,
    /// Deal ranks out to the nodes one by one instead of in blocks.
    #[arg(long)]
    round_robin: bool,
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
}

fn parse_collective(text: &str) -> std::result::Result<Collective, String> {
    let names = || Collective::ALL.map(Collective::name).join(", ");
    Collective::from_name(text).ok_or_else(|| format!("not one of {}", names()))
}

/// Runs the subcommand.
pub fn run(options: &Options) -> Result<ExitCode> {
    match options {
        Options::Show(options) => show(options),
        Options::Verify(options) => prove::run(options),
    }
}

fn show(options: &Show) -> Result<ExitCode> {
    let grid = grid_of(options)?;
    let nranks = grid.nranks();
    let exists = |rank: usize| match rank < nranks {
        true => Ok(Rank::from_index(rank)),
        false => Err(Error::InvalidArgument(format!("there is no rank {rank} among {nranks}"))),
    };
    let mut shape = Shape::new(options.collective, grid);
    shape.root = exists(options.root)?;
    shape.in_place = options.in_place;
    let ranks: Vec<Rank> = match options.rank.filter(|_| !options.draw) {
        Some(rank) => vec![exists(rank)?],
        None => (0..nranks).map(Rank::from_index).collect(),
    };
    let plans = ranks.iter().map(|&rank| algo::build(&options.algo, &shape, rank)).collect::<Result<Vec<_>>>()?;
    if options.draw {
        println!("{}", shape.grid);
        print!("{}", text::draw(&plans));
        println!("`>1 o0` sends chunk 0 of the output to rank 1, `<1 s2` receives from rank 1 into slot 2 of scratch, `i` is the input.");
    } else {
        plans.iter().for_each(|plan| print!("{}", text::print(plan)));
    }
    Ok(ExitCode::SUCCESS)
}

fn grid_of(options: &Show) -> Result<Arc<Grid>> {
    let wrong = |text: String| Err(Error::InvalidArgument(text));
    if options.nodes.contains(',') {
        return Ok(Arc::new(parse_grid(&options.nodes).map_err(Error::InvalidArgument)?));
    }
    let nodes: usize = match options.nodes.parse() {
        Ok(nodes) if nodes > 0 && nodes <= options.ranks => nodes,
        _ => return wrong(format!("--nodes {} must be between 1 and the {} ranks", options.nodes, options.ranks)),
    };
    Ok(Arc::new(match options.round_robin {
        true => Grid::round_robin(options.ranks, nodes),
        false => grids::even(options.ranks, nodes),
    }))
}
