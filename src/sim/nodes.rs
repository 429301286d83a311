//! Nodes that are not equal: kinds of nodes of a machine's file (`[[nodes]]`), and NICs that are slower than their file says, from
//! some time on.
//!
//! The first nodes of a grid are those of the first kind, as many as it has, then those of the second, and so on; nodes beyond are of
//! the last kind. What a kind says nothing of is as in the rest of the file.
#![forbid(unsafe_code)]

use super::machine::{Cluster, InterNode, Sourced};
use crate::error::{Error, Result};
use crate::topo::Grid;
use serde::Deserialize;

/// Nodes of one kind.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeKind {
    /// What they are.
    pub text: String,
    /// How many there are.
    pub count: Sourced,
    /// Rate of a NIC, each way, in place of `network.nic_gbps`.
    pub nic_gbps: Option<Sourced>,
    /// Rate of the way into a rank from its node, in place of `inside.rank_gbps`.
    pub rank_gbps: Option<Sourced>,
    /// Bytes copied a second, in place of `local.copy_gbps`.
    pub copy_gbps: Option<Sourced>,
    /// Bytes of results a second, in place of `local.reduce_gbps`.
    pub reduce_gbps: Option<Sourced>,
}

/// A node whose NICs have a part of their rate, from some time of a simulation on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlowNode {
    /// Which node.
    pub node: usize,
    /// The part of its rate.
    pub factor: f64,
    /// From when on.
    pub from_ns: u64,
}

/// More changes of rates than anybody needs.
const MOST_SLOW: usize = 1024;

/// The rates of a node, as parts of what the machine's file says for all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct NodeRates {
    pub nic: f64,
    pub inside: f64,
    pub copy: f64,
    pub reduce: f64,
}

impl Cluster {
    /// The kind of a node, where the machine has several.
    pub fn kind_of(&self, node: usize) -> Option<&NodeKind> {
        let mut before = 0;
        let of_kind = self.nodes.iter().find(|kind| {
            before += kind.count.value as usize;
            node < before
        });
        of_kind.or(self.nodes.last())
    }

    /// The machine with so many nodes of each kind, in their order.
    ///
    /// # Errors
    /// `InvalidArgument` where it has another number of kinds.
    pub fn with_nodes(mut self, counts: &[usize]) -> Result<Cluster> {
        if counts.len() != self.nodes.len() {
            let (name, kinds) = (&self.name, self.nodes.len());
            return Err(Error::InvalidArgument(format!(
                "machine {name} has {kinds} kinds of nodes, and numbers of {} are given",
                counts.len()
            )));
        }
        self.nodes.iter_mut().zip(counts).for_each(|(kind, &count)| kind.count.value = count as f64);
        Ok(self)
    }

    /// The machine with a node whose NICs have a part of their rate.
    ///
    /// # Errors
    /// `InvalidArgument` for a part that is none.
    pub fn with_slow(mut self, slow: SlowNode) -> Result<Cluster> {
        if !(0.001..=1000.0).contains(&slow.factor) || self.slow.len() == MOST_SLOW {
            let (node, factor) = (slow.node, slow.factor);
            return Err(Error::InvalidArgument(format!("node {node} at {factor} of its rate is not simulated")));
        }
        self.slow.push(slow);
        Ok(self)
    }

    /// The machine with all NICs at a part of their rate.
    pub fn scale_nics(&mut self, factor: f64) {
        let networks = [Some(&mut self.network), self.network_vendor.as_mut()];
        networks.into_iter().flatten().for_each(|network| network.nic_gbps.value *= factor);
        self.nodes.iter_mut().filter_map(|kind| kind.nic_gbps.as_mut()).for_each(|rate| rate.value *= factor);
    }

    /// What a node has of the rates of the file.
    pub(super) fn rates_of(&self, node: usize) -> NodeRates {
        let kind = self.kind_of(node);
        let part = |own: fn(&NodeKind) -> &Option<Sourced>, usual: &Sourced| {
            kind.and_then(|kind| own(kind).as_ref()).map_or(1.0, |own| own.value / usual.value)
        };
        NodeRates {
            nic: part(|kind| &kind.nic_gbps, &self.network.nic_gbps),
            inside: part(|kind| &kind.rank_gbps, &self.inside.rank_gbps),
            copy: part(|kind| &kind.copy_gbps, &self.local.copy_gbps),
            reduce: part(|kind| &kind.reduce_gbps, &self.local.reduce_gbps),
        }
    }

    /// The part of its NICs' rate that a node has at a time: what was said last of the past.
    pub(super) fn slowness(&self, node: usize, now_ns: u64) -> f64 {
        let told = self.slow.iter().filter(|slow| slow.node == node && slow.from_ns <= now_ns);
        told.max_by_key(|slow| slow.from_ns).map_or(1.0, |slow| slow.factor)
    }

    /// Whether its file has kinds of nodes, or some node is slow.
    pub fn has_unequal_nodes(&self) -> bool {
        !self.nodes.is_empty() || !self.slow.is_empty()
    }

    /// Whether some node of a grid has other NICs than the rest at the beginning.
    pub fn is_mixed(&self, grid: &Grid) -> bool {
        let part = |node| self.rates_of(node).nic * self.slowness(node, 0);
        (1..grid.nnodes()).any(|node| part(node) != part(0))
    }

    /// The rate of a NIC of the slowest node of so many, in GB/s.
    pub fn slowest_gbps(&self, network: &InterNode, nnodes: usize) -> f64 {
        let part = |node| self.rates_of(node).nic * self.slowness(node, 0);
        network.nic_gbps.value * (0..nnodes.max(1)).map(part).fold(f64::INFINITY, f64::min)
    }

    /// What each rank's part of its NIC delivers at the beginning, in bytes for each microsecond.
    pub fn rank_rates(&self, grid: &Grid) -> Vec<f64> {
        let rate = |rank: usize| {
            let rank = crate::topo::Rank::from_index(rank);
            let (node, members) = (grid.node(rank).index(), grid.members(grid.node(rank)).len());
            let nic = self.nic_of(grid.local(rank), members);
            let sharers = (0..members).filter(|&local| self.nic_of(local, members) == nic).count().max(1);
            let part = self.rates_of(node).nic * self.slowness(node, 0);
            self.network.nic_gbps.value * part * 1e3 / sharers as f64
        };
        (0..grid.nranks()).map(rate).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Grid;

    #[test]
    fn nodes_are_of_their_kinds_in_order_and_beyond_of_the_last() {
        let machine = Cluster::find("adapcc").unwrap();
        let nics: Vec<f64> = (0..8).map(|node| machine.rates_of(node).nic).collect();
        assert_eq!(nics, [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]);
        let mixed = machine.clone().with_nodes(&[2, 2]).unwrap();
        assert_eq!((mixed.rates_of(1).nic, mixed.rates_of(2).nic), (1.0, 0.5));
        assert!(machine.clone().with_nodes(&[2]).unwrap_err().text().contains("2 kinds"));
        assert!(Cluster::find("frontier").unwrap().with_nodes(&[1]).is_err());
        assert!(machine.is_mixed(&Grid::blocks(&[4; 6])) && !machine.is_mixed(&Grid::blocks(&[4; 4])));
    }

    #[test]
    fn ranks_share_what_their_node_s_nic_delivers_and_a_node_may_be_slower_from_a_time_on() {
        let machine = Cluster::find("adapcc").unwrap();
        let nic = machine.network.nic_gbps.value;
        let slow = |factor, from_ns| SlowNode { node: 1, factor, from_ns };
        let machine = machine.with_slow(slow(0.5, 0)).unwrap().with_slow(slow(0.25, 1000)).unwrap();
        let rates = machine.rank_rates(&Grid::blocks(&[4; 6]));
        let of = |part: f64| nic * 1e3 / 4.0 * part;
        assert_eq!((rates[0], rates[4], rates[16]), (of(1.0), of(0.5), of(0.5)));
        assert_eq!([0, 999, 1000].map(|now| machine.slowness(1, now)), [0.5, 0.5, 0.25]);
        assert!((machine.slowest_gbps(&machine.network, 2) - nic / 2.0).abs() < 1e-9);
        assert!(machine.with_slow(slow(0.0, 0)).is_err());
    }
}
