//! `strata synthesize`: finds what collectives are to do on a machine's links, and writes it as a file of strategies.
#![forbid(unsafe_code)]

use crate::options::number;
use crate::simulate::lists::{self, List};
use crate::simulate::mixed::Mixed;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::selection::strategy::{Strategies, Strategy, MOST_PROVED};
use strata::selection::synthesis::{evenly, nic_bound_ns, synthesize, Synthesized};
use strata::sim::price::grid_of;
use strata::sim::Cluster;
use strata::topo::Grid;

/// What is not plain from the options.
const MORE: &str = "\
For each collective and size the algorithms that do it are run in the simulator on the machine's links, with messages cut in
several ways. All-reduces get shares by what each node's NICs deliver, where that is quicker. The same machine and sizes give
the same file. A line of the file is for messages from half of its size on, below twice that; between two sizes, up to where
they are equally far.

Examples:
  strata synthesize all_reduce 256M --machine adapcc -o s.txt
  strata synthesize all_reduce,reduce,all_to_all 16M..256M --machine adapcc --kinds 2,2 -o s.txt
  strata plan verify --strategy s.txt
  STRATA_STRATEGY=s.txt strata launch -n 24 --nodes 6 -- ./program";

/// Options of `strata synthesize`.
#[derive(clap::Args)]
#[command(after_long_help = MORE)]
pub struct Options {
    /// all_reduce, reduce, broadcast, all_gather, reduce_scatter or all_to_all; several separated by commas.
    #[arg(required = true, value_delimiter = ',', value_parser = lists::collective)]
    collective: Vec<Collective>,
    /// Sizes as `strata simulate --bytes` has them: `256M`, `16M..1G`.
    #[arg(value_parser = lists::sizes)]
    bytes: List,
    /// A machine by name, or a file of its numbers.
    #[arg(long)]
    machine: String,
    #[command(flatten)]
    mixed: Mixed,
    /// Ranks; by default those of all nodes that the machine's file counts.
    #[arg(short = 'n', long, value_parser = number(2..=4096))]
    ranks: Option<usize>,
    /// The file; by default it is printed.
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs the subcommand.
pub fn run(options: &Options) -> Result<ExitCode> {
    let machine = Arc::new(options.mixed.applied(Cluster::find(&options.machine)?)?);
    let counted: usize = machine.nodes.iter().map(|kind| kind.count.value as usize).sum();
    let ranks = match options.ranks {
        Some(ranks) => ranks,
        None if counted > 0 => counted * machine.ranks_per_node(),
        None => {
            let text = format!("machine {} does not say how many nodes there are: give the ranks (-n)", machine.name);
            return Err(Error::InvalidArgument(text));
        }
    };
    let grid = grid_of(&machine, ranks);
    let mut all = Vec::new();
    for &collective in &options.collective {
        let classes = classes(&options.bytes.0);
        for (bytes, from_bytes, below_bytes) in classes {
            let found = synthesize(&machine, &grid, collective, bytes)?;
            tell_found(&machine, &grid, (collective, bytes), &found)?;
            let Synthesized { route, weights, .. } = found;
            let (choice, segment_bytes, window) = (route.choice, route.segment_bytes, route.window);
            let line = all.len() + 1;
            all.push(Strategy {
                collective,
                from_bytes,
                below_bytes,
                choice,
                segment_bytes,
                window,
                shares: weights,
                line,
            });
        }
    }
    let strategies = Strategies::of(&grid, all);
    // What is written is what is read.
    let text = format!("# strata synthesize, for machine {} ({})\n{strategies}", machine.name, machine.text);
    let read = Strategies::parse(&text).and_then(|read| read.prove(&grid, MOST_PROVED).map(|_| ()));
    read.map_err(|fault| Error::Internal(format!("a strategy that is not proved: {fault}")))?;
    match &options.output {
        None => out!("{text}"),
        Some(path) => write(path, &text)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|error| Error::System(format!("cannot write {}: {error}", path.display())))
}

/// For each size the messages that it speaks for.
fn classes(sizes: &[usize]) -> Vec<(usize, usize, usize)> {
    let mut sizes: Vec<usize> = sizes.iter().copied().filter(|&bytes| bytes > 0).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let between = |one: usize, other: usize| ((one as f64 * other as f64).sqrt().round() as usize).max(one + 1);
    let from = |at: usize| if at == 0 { sizes[0].div_ceil(2) } else { between(sizes[at - 1], sizes[at]) };
    let below = |at: usize| if at + 1 == sizes.len() { 2 * sizes[at] } else { between(sizes[at], sizes[at + 1]) };
    (0..sizes.len()).map(|at| (sizes[at], from(at), below(at))).collect()
}

/// Says what was found, against even shares and the bound of the NICs.
fn tell_found(
    machine: &Arc<Cluster>,
    grid: &Arc<Grid>,
    (collective, bytes): (Collective, usize),
    found: &Synthesized,
) -> Result<()> {
    let even = match &found.weights {
        Some(_) => {
            let even = evenly(machine, grid, collective, bytes)?.ns;
            format!(", {:.2} times as fast as even shares ({:.3} ms)", even / found.ns, even / 1e6)
        }
        None => String::new(),
    };
    let bound = nic_bound_ns(machine, grid, collective, bytes).map_or(String::new(), |bound| {
        format!("; NICs allow {:.3} ms: {:.0} % of it", bound / 1e6, 100.0 * bound / found.ns)
    });
    let (name, size) = (collective.name(), lists::size_text(bytes));
    tell!("{name} of {size} on {grid}: {} in {:.3} ms{even}{bound}", found.route.choice, found.ns / 1e6);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_speak_for_messages_up_to_where_the_next_does() {
        assert_eq!(classes(&[256]), [(256, 128, 512)]);
        assert_eq!(classes(&[64, 16, 16]), [(16, 8, 32), (64, 32, 128)]);
        assert_eq!(classes(&[1, 2]), [(1, 1, 2), (2, 2, 4)]);
    }
}
