//! `strata simulate`: what collectives take on clusters that are not at hand, by the vendor's library, by PCCL, by Strata.
#![forbid(unsafe_code)]

mod cells;
pub mod lists;
mod method;
pub mod mixed;
mod pictures;
mod report;
pub mod route;
mod show;

use cells::{price_all, Cell, Manner};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lists::List;
use method::Method;
use mixed::Mixed;
use report::Outcome;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::sim::price::Detail;
use strata::sim::skew::Skew;
use strata::sim::Cluster;

/// What is not plain from the options.
const MORE: &str = "\
The vendor's library and the machine's MPI take what laws fitted to published measurements say; plans, PCCL's and
Strata's, are run by the executor that runs them in earnest, under a virtual clock, on the machine's NICs and links.

Methods:
  vendor             NCCL or RCCL on all ranks
  mpi                the machine's MPI
  carrier(NAME)      a library that the machine's file has as a carrier, such as carrier(nccl) on lassen
  mix                of all its carriers the quickest for each call
  pccl               PCCL as published, the best of what its authors had; one of them: pccl(ring), pccl(rd),
                     pccl(ring,vendor), which runs its ring over the vendor's library
  strata             the route that Strata takes, without falling back to the vendor's library
  chosen             the same with the vendor's library as a candidate
  thresholds         what default thresholds choose, which know nothing of the machine
  even               of Strata's algorithms and cuts the quickest, found by pricing them, with equal shares for all nodes
  synthesized        the same with shares by what each node's NICs deliver, as `strata synthesize` writes it
  code(mx8)          Strata with messages between nodes in a code: bf16, mx8 or int8
  two_level(direct,log)/segment=1M/window=4/carrier=vendor
                     an algorithm, the bytes of each rank's block that it handles at a time (or `whole`), how many such
                     segments are in flight, and what carries messages between nodes (own, vendor)
  script:FILE.xml/segment=1M/window=4
                     a program in MSCCL's format, in the protocol that it names where the machine has numbers for it
  two_level(script:FILE.xml,log)
                     the same for the ranks of a node, in place of the vendor's library; two_level(direct,script:FILE.xml)
                     for one rank of each node

Examples:
  strata simulate                                     Frontier, all-gather, 32 to 2,048 GCDs, 16 MB to 1 GB
  strata simulate --machine perlmutter -n 32..2048 --bytes 16M..1G -o map.svg
  strata simulate -n 32 --bytes 1G --method pccl,strata --timeline overlap.svg
  strata simulate --machine adapcc --collective all_reduce -n 24 --bytes 256M --method even,synthesized
  strata simulate --machine my-cluster.toml --show";

/// Options of `strata simulate`.
#[derive(clap::Args)]
#[command(after_long_help = MORE)]
pub struct Options {
    /// frontier, perlmutter, dgx-h100, ndv4, dgx2, dgx-1, lassen, thetagpu, adapcc, netns, or a file of such numbers.
    #[arg(long, default_value = "frontier")]
    machine: String,
    #[command(flatten)]
    mixed: Mixed,
    /// Print every number of the machine with its source, and whether it was fitted; nothing is simulated.
    #[arg(long)]
    show: bool,
    /// Leave out a term of the machine: overload, pccl, out, lanes, protocols, launch.
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    without: Vec<String>,
    /// all_gather, reduce_scatter, all_reduce, ...; `custom` for a script that has a contract.
    #[arg(long, value_delimiter = ',', default_value = "all_gather", value_parser = lists::collective)]
    collective: Vec<Collective>,
    /// Numbers of ranks: `32,64,..2048`, `32..2048`.
    #[arg(short = 'n', long, default_value = "32..2048", value_parser = lists::ranks)]
    ranks: List,
    /// Sizes: of all-gather's output, of reduce-scatter's input, of all-reduce's vector, on each rank.
    #[arg(long, default_value = "16M..1G", value_parser = lists::sizes)]
    bytes: List,
    /// What is compared; by default what the machine's file knows: vendor, its carriers and mix, pccl, strata.
    #[arg(long, value_name = "METHODS")]
    method: Option<String>,
    /// The contract of scripts with a custom collective, where it does not lie beside them.
    #[arg(long, value_name = "FILE")]
    contract: Option<std::path::PathBuf>,
    /// What the others are compared with; by default the first method.
    #[arg(long, value_name = "METHOD")]
    against: Option<String>,
    /// Add the method `chosen`: the route that Strata takes, with the vendor's library as a candidate.
    #[arg(long)]
    chosen: bool,
    /// In the table, only ratios below this.
    #[arg(long, value_name = "RATIO")]
    below: Option<f64>,
    /// Draw heat maps of the ratios.
    #[arg(short = 'o', long, value_name = "FILE.svg|FILE.html")]
    output: Option<PathBuf>,
    /// Draw what is busy when, for one collective, number of ranks and size.
    #[arg(long, value_name = "FILE.svg|FILE.html")]
    timeline: Option<PathBuf>,
    /// Write all figures as JSON; `-` for standard output, without the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run every rank, also where those on different NICs of a node do the same at the same time.
    #[arg(long)]
    unfolded: bool,
    /// Blocks of different sizes, of as many bytes together, by Strata's plans: `zipf`, `one` (one rank has nine tenths) or `zeros`
    /// (every other rank has none). Of an all-to-all every rank sends so.
    #[arg(long, value_name = "SKEW")]
    skew: Option<Skew>,
    /// Say when the first segment is final on all ranks: from then on a program may use it (`strataStreamWaitRange`).
    #[arg(long)]
    front: bool,
    /// Say what each price cost to find out: seconds, events, and the greatest memory of the process meanwhile.
    #[arg(long)]
    cost: bool,
}

/// Runs the subcommand.
pub fn run(options: &Options) -> Result<ExitCode> {
    let mut machine = options.mixed.applied(Cluster::find(&options.machine)?)?;
    for term in &options.without {
        machine = machine.without(term)?;
    }
    if options.show {
        out!("{}", show::show(&machine, &options.without));
        return Ok(ExitCode::SUCCESS);
    }
    let (methods, against) = methods(options, &machine)?;
    let cells = cells_of(options);
    options.output.iter().chain(&options.timeline).try_for_each(|path| pictures::check(path))?;
    if options.timeline.is_some() && cells.len() != 1 {
        let text = "--timeline shows one cell: give one collective, one number of ranks (-n) and one size (--bytes)";
        return Err(Error::InvalidArgument(String::from(text)));
    }
    let detail = Detail { fold: !options.unfolded, timeline: false, skew: options.skew };
    let manner = Manner { machine: Arc::new(machine), detail, alone: options.cost || options.unfolded };
    let bar = progress(cells.len() * methods.len())?;
    let answers = price_all(&manner, &cells, &methods, &bar);
    bar.finish_and_clear();
    let outcome = Outcome {
        machine: &manner.machine,
        without: &options.without,
        cells: &cells,
        methods: &methods,
        against,
        answers: &answers?,
        costs: options.cost,
        fronts: options.front,
    };
    if options.json.as_deref() != Some(Path::new("-")) {
        out!("{}", outcome.table(options.below));
    }
    if let Some(path) = &options.json {
        write_json(&outcome, path)?;
    }
    if let Some(path) = &options.output {
        pictures::heat_maps(&outcome, &options.ranks.0, &options.bytes.0, path)?;
    }
    if let Some(path) = &options.timeline {
        pictures::timelines(&manner, &cells[0], &methods, path)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The methods, and which of them the others are compared with.
fn methods(options: &Options, machine: &Cluster) -> Result<(Vec<Method>, usize)> {
    let contract = options.contract.as_deref();
    let mut methods = match &options.method {
        Some(text) => {
            lists::names(text).into_iter().map(|text| Method::parse(text, contract)).collect::<Result<Vec<_>>>()?
        }
        None if options.skew.is_some() => vec![Method::Strata],
        None => Method::known_to(machine),
    };
    methods.extend(options.chosen.then_some(Method::Chosen));
    if let Some(text) = &options.against {
        let against = Method::parse(text, contract)?;
        if !methods.contains(&against) {
            methods.insert(0, against);
        }
    }
    let mut seen: Vec<Method> = Vec::new();
    methods.retain(|method| {
        let new = !seen.contains(method);
        seen.extend(new.then(|| method.clone()));
        new
    });
    let against = match &options.against {
        Some(text) => Some(Method::parse(text, contract)?),
        None => None,
    };
    let place = methods.iter().position(|method| against.as_ref().is_some_and(|against| against == method));
    Ok((methods, place.unwrap_or(0)))
}

/// Every collective, number of ranks and size, each once.
fn cells_of(options: &Options) -> Vec<Cell> {
    let mut cells: Vec<Cell> = Vec::new();
    for &collective in &options.collective {
        for &nranks in &options.ranks.0 {
            for &message_bytes in &options.bytes.0 {
                let cell = Cell { collective, nranks, message_bytes };
                if !cells.contains(&cell) {
                    cells.push(cell);
                }
            }
        }
    }
    cells
}

fn progress(njobs: usize) -> Result<ProgressBar> {
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::with_draw_target(Some(njobs as u64), ProgressDrawTarget::stderr()),
        false => ProgressBar::hidden(),
    };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} prices, {eta} left");
    bar.set_style(style.map_err(|error| Error::Internal(error.to_string()))?);
    Ok(bar)
}

fn write_json(outcome: &Outcome<'_>, path: &Path) -> Result<()> {
    let text = format!("{:#}\n", outcome.json());
    match path.to_str() {
        Some("-") => {
            out!("{text}");
            Ok(())
        }
        _ => std::fs::write(path, text)
            .map_err(|error| Error::System(format!("cannot write {}: {error}", path.display()))),
    }
}
