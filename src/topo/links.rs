//! Links between the ranks of a node, where not each of them is linked with each.
//!
//! Ranks are known here by their place on the node. A link carries data both ways at once; two ranks may have several.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::collections::VecDeque;

/// Two ranks of a node cannot have more links than this.
pub const MOST_LINKS: usize = 64;

/// Ranks of a node with links: where there are more, each is linked with each by a switch.
pub const MOST_LINKED: usize = 64;

/// Which ranks of a node are linked, and by how many links.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NodeLinks {
    /// For each rank whom it is linked with, in order, and by how many links.
    neighbours: Vec<Vec<(usize, usize)>>,
}

impl NodeLinks {
    /// The links of a node of `nranks` ranks: pairs, each with how many links it has.
    ///
    /// # Errors
    /// More than [`MOST_LINKED`] ranks; a pair with a rank that the node does not have, of a rank with itself, that is there twice, or with no links or more
    /// than [`MOST_LINKS`].
    pub fn new(nranks: usize, pairs: &[([usize; 2], usize)]) -> Result<NodeLinks> {
        if nranks > MOST_LINKED {
            let text = format!("a node of {nranks} ranks; links are for {MOST_LINKED} at most");
            return Err(Error::InvalidArgument(text));
        }
        let mut neighbours: Vec<Vec<(usize, usize)>> = vec![Vec::new(); nranks];
        for &([one, other], count) in pairs {
            let wrong =
                |what: String| Err(Error::InvalidArgument(format!("the links of ranks {one} and {other}: {what}")));
            if let Some(absent) = [one, other].into_iter().find(|&rank| rank >= nranks) {
                return wrong(format!("there is no rank {absent} on a node of {nranks}"));
            }
            if one == other {
                return wrong("a rank is not linked with itself".to_string());
            }
            if !(1..=MOST_LINKS).contains(&count) {
                return wrong(format!("{count} is not from 1 to {MOST_LINKS}"));
            }
            if neighbours[one].iter().any(|&(known, _)| known == other) {
                return wrong("they are named twice".to_string());
            }
            neighbours[one].push((other, count));
            neighbours[other].push((one, count));
        }
        neighbours.iter_mut().for_each(|linked| linked.sort_unstable());
        Ok(NodeLinks { neighbours })
    }

    /// How many ranks the node has.
    pub fn nranks(&self) -> usize {
        self.neighbours.len()
    }

    /// Whom a rank is linked with, in order, and by how many links.
    pub fn neighbours(&self, rank: usize) -> &[(usize, usize)] {
        &self.neighbours[rank]
    }

    /// How many links two ranks have.
    pub fn count(&self, one: usize, other: usize) -> usize {
        let found = self.neighbours[one].binary_search_by_key(&other, |&(known, _)| known);
        found.map_or(0, |at| self.neighbours[one][at].1)
    }

    /// All pairs that are linked, the lower rank first, and by how many links.
    pub fn pairs(&self) -> impl Iterator<Item = ([usize; 2], usize)> + '_ {
        let of = |(one, linked): (usize, &'_ Vec<(usize, usize)>)| {
            let above = linked.iter().filter(move |&&(other, _)| other > one);
            above.map(move |&(other, count)| ([one, other], count)).collect::<Vec<_>>()
        };
        self.neighbours.iter().enumerate().flat_map(of)
    }

    /// How many links each rank is away from this one; none for those that cannot be reached.
    pub fn distances(&self, from: usize) -> Vec<Option<usize>> {
        let mut distances = vec![None; self.nranks()];
        distances[from] = Some(0);
        let mut open = VecDeque::from([from]);
        while let Some(at) = open.pop_front() {
            for &(next, _) in self.neighbours(at) {
                if distances[next].is_none() {
                    distances[next] = distances[at].map(|away| away + 1);
                    open.push_back(next);
                }
            }
        }
        distances
    }

    /// Whether every rank can be reached from every other.
    pub fn is_connected(&self) -> bool {
        self.nranks() < 2 || self.distances(0).iter().all(Option::is_some)
    }

    /// The rank to which a message goes first that is to reach another: that rank itself where the two are linked, else the next
    /// on a shortest way. Of several the one with the most links on the narrower of both sides, then on both, then the lowest. Nobody
    /// where there is no way.
    pub fn next(&self, from: usize, to: usize) -> Option<usize> {
        let away = self.distances(to);
        let nearer = away[from]?.checked_sub(1)?;
        let candidates = self.neighbours(from).iter().filter(|&&(next, _)| away[next] == Some(nearer));
        let widest = |&&(next, count): &&(usize, usize)| {
            let onward = if next == to {
                count
            } else {
                self.neighbours(next)
                    .iter()
                    .filter(|&&(then, _)| away[then] == nearer.checked_sub(1))
                    .map(|&(_, count)| count)
                    .max()
                    .unwrap_or(0)
            };
            (count.min(onward), count + onward, std::cmp::Reverse(next))
        };
        candidates.max_by_key(widest).map(|&(next, _)| next)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// NVIDIA DGX-1 with V100: eight GPUs with six links each.
    pub fn dgx1() -> NodeLinks {
        let singles = [[0, 1], [0, 2], [1, 3], [2, 6], [3, 7], [4, 5], [4, 6], [5, 7]];
        let doubles = [[0, 3], [0, 4], [1, 2], [1, 5], [2, 3], [4, 7], [5, 6], [6, 7]];
        let pairs: Vec<_> = singles.map(|pair| (pair, 1)).into_iter().chain(doubles.map(|pair| (pair, 2))).collect();
        NodeLinks::new(8, &pairs).unwrap()
    }

    #[test]
    fn every_gpu_of_a_dgx_1_has_six_links_and_messages_take_the_ways_of_figure_10() {
        let links = dgx1();
        for rank in 0..8 {
            assert_eq!(links.neighbours(rank).iter().map(|(_, count)| count).sum::<usize>(), 6, "{rank}");
        }
        assert_eq!(links.pairs().map(|(_, count)| count).sum::<usize>(), 24);
        assert_eq!((links.next(2, 4), links.next(4, 2)), (Some(0), Some(0)));
        assert_eq!((links.next(3, 5), links.next(5, 3)), (Some(1), Some(1)));
        assert_eq!(links.next(0, 3), Some(3));
        assert_eq!((links.count(3, 0), links.count(0, 5)), (2, 0));
        assert!(links.is_connected());
    }

    #[test]
    fn messages_reach_everybody_by_shortest_ways_and_nobody_who_has_no_links() {
        let links = NodeLinks::new(6, &[([0, 1], 1), ([1, 2], 1), ([2, 3], 1), ([3, 4], 1)]).unwrap();
        let mut at = 0;
        let mut ways = 0;
        while at != 4 {
            at = links.next(at, 4).unwrap();
            ways += 1;
        }
        assert_eq!((ways, links.distances(4)[0]), (4, Some(4)));
        assert_eq!((links.next(0, 5), links.next(5, 0), links.next(2, 2)), (None, None, None));
        assert!(!links.is_connected());
    }

    #[test]
    fn wrong_links_are_refused_with_their_ranks() {
        for (pairs, said) in [
            (vec![([0, 4], 1)], "ranks 0 and 4: there is no rank 4 on a node of 4"),
            (vec![([2, 2], 1)], "not linked with itself"),
            (vec![([0, 1], 1), ([1, 0], 1)], "ranks 1 and 0: they are named twice"),
            (vec![([0, 1], 0)], "0 is not from 1 to 64"),
            (vec![([0, 1], 1_000_000_000)], "1000000000 is not from 1 to 64"),
        ] {
            let error = NodeLinks::new(4, &pairs).unwrap_err();
            assert!(error.text().contains(said), "{error}");
        }
        assert!(NodeLinks::new(65, &[]).unwrap_err().text().contains("64 at most"));
    }
}
