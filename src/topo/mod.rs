//! Where ranks live: nodes, local ranks, rails; and what a node has for them: GPUs, NICs, and which rank uses which.
//!
//! [`machine`] reads GPUs and NICs, [`nics`] says which NICs are fit for use, [`pinning`] gives each local rank its own,
//! [`binding`] holds sockets to it and [`export`] tells it to an MPI. Both ask the kernel's routes (`route`). [`probe`] measures
//! where devices are on machines that do not say.
#![forbid(unsafe_code)]

mod assign;
pub mod binding;
pub mod distance;
pub mod export;
pub mod host;
pub mod interface;
pub mod links;
pub mod local;
pub mod machine;
pub mod nics;
pub mod pinning;
pub mod probe;
#[cfg(test)]
mod recorded;
mod route;

use crate::error::counted;
use links::NodeLinks;
use std::fmt;
use std::sync::Arc;

/// A process's (GPU's) number in a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The rank with this index.
    pub fn from_index(index: usize) -> Rank {
        Rank(u32::try_from(index).expect("a rank fits 32 bits"))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A node's number: nodes are numbered in the order of their lowest rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl NodeId {
    /// The node as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which rank is on which node. Any placement: nodes may be uneven, and a node's ranks need not be consecutive. Where a node's
/// ranks are not each linked with each, it is known who is with whom.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grid {
    node_of: Vec<NodeId>,
    local_of: Vec<u32>,
    nodes: Vec<Vec<Rank>>,
    links: Option<Arc<NodeLinks>>,
}

impl Grid {
    /// The grid in which rank `i` lives on the node labelled `labels[i]`. Equal labels are one node.
    pub fn from_labels<L: Eq + std::hash::Hash>(labels: &[L]) -> Grid {
        let mut ids = std::collections::HashMap::new();
        let mut grid = Grid { node_of: Vec::new(), local_of: Vec::new(), nodes: Vec::new(), links: None };
        for (index, label) in labels.iter().enumerate() {
            let next = NodeId(ids.len() as u32);
            let node = *ids.entry(label).or_insert(next);
            if node == next {
                grid.nodes.push(Vec::new());
            }
            let members = &mut grid.nodes[node.index()];
            grid.node_of.push(node);
            grid.local_of.push(members.len() as u32);
            members.push(Rank::from_index(index));
        }
        grid
    }

    /// Consecutive ranks on nodes of these sizes.
    pub fn blocks(sizes: &[usize]) -> Grid {
        let labels: Vec<usize> = sizes.iter().enumerate().flat_map(|(node, &size)| vec![node; size]).collect();
        Grid::from_labels(&labels)
    }

    /// All ranks on one node.
    pub fn flat(nranks: usize) -> Grid {
        Grid::blocks(&[nranks])
    }

    /// Rank `i` on node `i % nnodes`.
    pub fn round_robin(nranks: usize, nnodes: usize) -> Grid {
        let labels: Vec<usize> = (0..nranks).map(|rank| rank % nnodes).collect();
        Grid::from_labels(&labels)
    }

    /// The same with links inside each node, if nodes have as many ranks as those are for: of others it is not known which
    /// ranks of a node take part.
    pub fn with_links(mut self, links: &Arc<NodeLinks>) -> Grid {
        if self.nodes.iter().all(|members| members.len() == links.nranks()) {
            self.links = Some(links.clone());
        }
        self
    }

    /// The links inside each node, where ranks are not each linked with each.
    pub fn links(&self) -> Option<&Arc<NodeLinks>> {
        self.links.as_ref()
    }

    /// Whether messages from one rank to another need no third one's help.
    pub fn is_direct(&self, one: Rank, other: Rank) -> bool {
        let is_linked = |links: &NodeLinks| links.count(self.local(one), self.local(other)) > 0;
        one == other || self.node(one) != self.node(other) || self.links().is_none_or(|links| is_linked(links))
    }

    /// How many ranks there are.
    pub fn nranks(&self) -> usize {
        self.node_of.len()
    }

    /// How many nodes there are.
    pub fn nnodes(&self) -> usize {
        self.nodes.len()
    }

    /// The node of a rank.
    pub fn node(&self, rank: Rank) -> NodeId {
        self.node_of[rank.index()]
    }

    /// The index of a rank among the ranks of its node.
    pub fn local(&self, rank: Rank) -> usize {
        self.local_of[rank.index()] as usize
    }

    /// The ranks of a node, in rank order.
    pub fn members(&self, node: NodeId) -> &[Rank] {
        &self.nodes[node.index()]
    }

    /// The node numbers.
    pub fn node_ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// Ranks on the largest node: the number of rails.
    pub fn nrails(&self) -> usize {
        self.nodes.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Whether all nodes have the same number of ranks.
    pub fn is_even(&self) -> bool {
        self.nodes.iter().all(|members| members.len() == self.nrails())
    }

    /// The rank that serves `rail` on `node`. On a node with fewer ranks than rails a rank serves several.
    pub fn owner(&self, node: NodeId, rail: usize) -> Rank {
        let members = self.members(node);
        members[rail % members.len()]
    }

    /// One rank per node, in node order: the ranks that serve `rail`.
    pub fn rail(&self, rail: usize) -> Vec<Rank> {
        self.node_ids().map(|node| self.owner(node, rail)).collect()
    }
}

impl fmt::Display for Grid {
    /// `8 ranks on 2 nodes (4+4)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<String> = self.nodes.iter().map(|members| members.len().to_string()).collect();
        let sizes = if self.is_even() && self.nnodes() > 4 {
            format!("{}x{}", self.nnodes(), self.nrails())
        } else {
            sizes.join("+")
        };
        write!(f, "{} on {} ({sizes})", counted(self.nranks(), "rank"), counted(self.nnodes(), "node"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_and_uneven_grids_know_their_rails() {
        let grid = Grid::round_robin(5, 2);
        assert_eq!(grid.members(NodeId(0)), [Rank(0), Rank(2), Rank(4)]);
        assert_eq!(grid.rail(2), [Rank(4), Rank(1)]);
        assert_eq!(grid.local(Rank(3)), 1);
        assert!(!grid.is_even());
        assert_eq!(grid.to_string(), "5 ranks on 2 nodes (3+2)");
    }
}
