//! What the options of several subcommands have in common: numbers, sizes, and where ranks are.
#![forbid(unsafe_code)]

use clap::builder::RangedU64ValueParser;
use std::ops::RangeInclusive;
use std::str::FromStr;
use strata::algorithms::Choice;
pub use strata::bootstrap::launcher::MOST_RANKS;
use strata::error::{counted, Error, Result};
use strata::selection::CarriedName;

/// A whole number within bounds.
pub fn number(bounds: RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(bounds)
}

/// An algorithm, over whatever carrier: that is nothing to its plan.
pub fn parse_algorithm(text: &str) -> Result<Choice> {
    CarriedName::parse(text)?.algorithm.parse()
}

/// A size in bytes; K, M and G are powers of 1024.
pub fn parse_size(text: &str) -> std::result::Result<usize, String> {
    let (number, unit) = match text.to_ascii_uppercase().chars().last() {
        Some('K') => (&text[..text.len() - 1], 1u64 << 10),
        Some('M') => (&text[..text.len() - 1], 1 << 20),
        Some('G') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    match number.parse::<f64>().map(|number| number * unit as f64) {
        Ok(bytes) if (0.0..9e18).contains(&bytes) => Ok(bytes as usize),
        Ok(bytes) if bytes >= 9e18 => Err(format!("`{text}` is more than any memory holds")),
        _ => Err(format!("`{text}` is not a size such as 8, 64K, 1.5M or 2G")),
    }
}

/// How many ranks there are and which nodes they are on.
#[derive(clap::Args)]
pub struct Spread {
    /// Ranks in all; may be left out when `--nodes` gives the size of each node. `plan show`: 4 by default.
    #[arg(short = 'n', long = "ranks", value_parser = number(1..=MOST_RANKS as u64))]
    pub ranks: Option<usize>,
    /// Nodes: how many (`2`), or the ranks on each (`3,1,4`).
    #[arg(long, default_value = "1")]
    pub nodes: Nodes,
    /// How ranks are dealt out to the nodes.
    #[arg(long, value_enum, default_value = "block")]
    pub placement: Placement,
    /// The same as `--placement round-robin`.
    #[arg(long, hide = true, conflicts_with = "placement")]
    pub round_robin: bool,
}

/// The value of `--nodes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Nodes {
    /// So many nodes, as even as possible.
    Count(usize),
    /// The ranks on each.
    Sizes(Vec<usize>),
}

impl FromStr for Nodes {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Nodes, String> {
        let number = |part: &str| match part.trim().parse::<usize>() {
            Ok(number) if (1..=MOST_RANKS).contains(&number) => Ok(number),
            _ => Err(format!("`{part}` is not a number from 1 to {MOST_RANKS}")),
        };
        if text.contains(',') {
            text.split(',').map(number).collect::<std::result::Result<_, _>>().map(Nodes::Sizes)
        } else {
            number(text).map(Nodes::Count)
        }
    }
}

/// How ranks are dealt out to the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Placement {
    /// Consecutive ranks share a node.
    Block,
    /// Ranks are dealt out one by one.
    RoundRobin,
}

impl Spread {
    /// The ranks on each node, and the node of each rank.
    pub fn resolve(&self) -> Result<(Vec<usize>, Vec<usize>)> {
        let sizes = node_sizes(self.ranks, &self.nodes)?;
        let placement = if self.round_robin { Placement::RoundRobin } else { self.placement };
        let nodes = place(&sizes, placement);
        Ok((sizes, nodes))
    }
}

/// Ranks on each node.
fn node_sizes(ranks: Option<usize>, nodes: &Nodes) -> Result<Vec<usize>> {
    let wrong = |text: String| Err(Error::InvalidArgument(text));
    match (ranks, nodes) {
        (None, Nodes::Count(_)) => {
            wrong("give the number of ranks (-n), or the size of each node (--nodes 3,1,4)".into())
        }
        (Some(ranks), Nodes::Count(count)) if ranks < *count => {
            wrong(format!("{} cannot fill {}", counted(ranks, "rank"), counted(*count, "node")))
        }
        (Some(ranks), Nodes::Count(count)) => {
            Ok((0..*count).map(|node| ranks / count + usize::from(node < ranks % count)).collect())
        }
        (ranks, Nodes::Sizes(sizes)) => {
            let total = sizes.iter().fold(0usize, |sum, &size| sum.saturating_add(size));
            match ranks {
                _ if total > MOST_RANKS => wrong(format!("--nodes holds more than {MOST_RANKS} ranks")),
                Some(ranks) if ranks != total => wrong(format!(
                    "-n {ranks} and --nodes contradict each other: the nodes hold {}",
                    counted(total, "rank")
                )),
                _ => Ok(sizes.clone()),
            }
        }
    }
}

/// The node of each rank.
pub fn place(sizes: &[usize], placement: Placement) -> Vec<usize> {
    match placement {
        Placement::Block => sizes.iter().enumerate().flat_map(|(node, &size)| vec![node; size]).collect(),
        Placement::RoundRobin => {
            let rounds = sizes.iter().copied().max().unwrap_or(0);
            let deal = |round: usize| (0..sizes.len()).filter(move |&node| round < sizes[node]);
            (0..rounds).flat_map(deal).collect()
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The options of a subcommand's line.
    pub fn parse_line<O: clap::Args>(line: &str) -> O {
        let command = O::augment_args(clap::Command::new("strata"));
        let matches = command.try_get_matches_from(line.split_whitespace()).expect("the line parses");
        O::from_arg_matches(&matches).expect("the options are those of the line")
    }

    #[test]
    fn ranks_are_split_over_nodes_as_evenly_as_possible() {
        assert_eq!(node_sizes(Some(8), &Nodes::Count(3)).unwrap(), [3, 3, 2]);
        assert_eq!(node_sizes(None, &"3,1,4".parse().unwrap()).unwrap(), [3, 1, 4]);
        assert!(node_sizes(Some(7), &"3,1,4".parse().unwrap()).is_err());
        assert!(node_sizes(Some(2), &Nodes::Count(3)).is_err());
        assert!(node_sizes(None, &Nodes::Sizes(vec![usize::MAX, 2])).is_err());
        for text in ["", "0", "3,0", "-1", "x", "65537", "18446744073709551615"] {
            assert!(text.parse::<Nodes>().is_err(), "{text}");
        }
    }

    #[test]
    fn round_robin_deals_ranks_to_nodes_that_have_room() {
        assert_eq!(place(&[3, 1, 4], Placement::Block), [0, 0, 0, 1, 2, 2, 2, 2]);
        assert_eq!(place(&[3, 1, 4], Placement::RoundRobin), [0, 1, 2, 0, 2, 0, 2, 2]);
    }

    #[test]
    fn a_plan_is_the_same_over_every_carrier_and_a_wrong_carrier_is_told() {
        assert_eq!(parse_algorithm("ring@mpi"), parse_algorithm("ring"));
        assert_eq!(parse_algorithm("two_level(direct,log)@tcp").unwrap().to_string(), "two_level(direct,log)");
        assert!(parse_algorithm("ring@mpl").unwrap_err().text().contains("did you mean mpi?"));
        assert!(parse_algorithm("rign@mpi").unwrap_err().text().contains("did you mean ring?"));
        assert!(parse_algorithm("@mpi").is_err(), "a plan has an algorithm");
    }

    #[test]
    fn a_size_is_a_number_with_a_unit_that_memory_can_hold() {
        assert_eq!(parse_size("1.5M"), Ok(3 << 19));
        assert_eq!(parse_size("0"), Ok(0));
        for text in ["", "K", "-1", "1T", "nan", "inf", "1e300", "99999999999G", "8 K", "ä"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
