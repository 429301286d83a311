//! Options for machines whose nodes are not equal: how many there are of each kind, and which are slow.
#![forbid(unsafe_code)]

use std::str::FromStr;
use strata::error::Result;
use strata::sim::nodes::SlowNode;
use strata::sim::Cluster;

/// What is changed of a machine's nodes.
#[derive(clap::Args)]
pub struct Mixed {
    /// Nodes of each kind of the machine's `[[nodes]]`, in their order: `2,2` of adapcc are two servers with A100 and two with V100.
    #[arg(long, value_delimiter = ',', value_name = "COUNTS")]
    kinds: Vec<usize>,
    /// A node whose NICs have a part of their rate (`7=0.5`), or have it from some microsecond on (`7=0.5@2000`). May be given several
    /// times; of what is said of one node the latest holds.
    #[arg(long, value_name = "NODE=PART")]
    slow: Vec<Slow>,
}

/// A node and what its NICs have.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Slow(SlowNode);

impl FromStr for Slow {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Slow, String> {
        let wrong = || format!("`{text}` is not a node and a part of its rate, such as 7=0.5 or 7=0.5@2000");
        let (node, rest) = text.split_once('=').ok_or_else(wrong)?;
        let (factor, from_us) = rest.split_once('@').unwrap_or((rest, "0"));
        let number =
            |text: &str| text.parse::<f64>().ok().filter(|number| (0.0..1e12).contains(number)).ok_or_else(wrong);
        let from_ns = (number(from_us)? * 1e3) as u64;
        Ok(Slow(SlowNode { node: node.parse().map_err(|_| wrong())?, factor: number(factor)?, from_ns }))
    }
}

impl Mixed {
    /// The machine with these nodes.
    pub fn applied(&self, mut machine: Cluster) -> Result<Cluster> {
        if !self.kinds.is_empty() {
            machine = machine.with_nodes(&self.kinds)?;
        }
        self.slow.iter().try_fold(machine, |machine, slow| machine.with_slow(slow.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_node_is_read_with_the_time_from_which_it_is_slow() {
        let slow = |node, factor, from_ns| Ok(Slow(SlowNode { node, factor, from_ns }));
        assert_eq!("7=0.5".parse::<Slow>(), slow(7, 0.5, 0));
        assert_eq!("0=0.25@2000".parse::<Slow>(), slow(0, 0.25, 2_000_000));
        for text in ["7", "7=", "x=1", "7=-1", "7=0.5@", "7=nan"] {
            assert!(text.parse::<Slow>().is_err(), "{text}");
        }
    }
}
