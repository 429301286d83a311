//! Blocks of different sizes for simulated calls: how the bytes of a message are spread over ranks.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::plan::blocks::{packed, BlockTable};
use crate::plan::Collective;
use crate::topo::{Grid, Rank};
use std::str::FromStr;
use std::sync::Arc;

/// How the elements of a message are spread. Of an all-to-all every rank spreads what it sends like that over the others, as tokens
/// are over experts, so that some ranks receive more than others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Skew {
    /// As Zipf has it: the share of rank `i` is in proportion to `1 / (i + 1)`.
    Zipf,
    /// Nine tenths are one rank's, which is in the middle.
    One,
    /// Every other rank has none.
    Zeros,
}

impl Skew {
    /// All, with their names.
    pub const ALL: [(&'static str, Skew); 3] = [("zipf", Skew::Zipf), ("one", Skew::One), ("zeros", Skew::Zeros)];

    /// Its name.
    pub fn name(self) -> &'static str {
        Skew::ALL.iter().find_map(|&(name, skew)| (skew == self).then_some(name)).unwrap_or("")
    }

    /// The weight of a rank's block among `n`.
    fn weight(self, rank: usize, n: usize) -> f64 {
        match self {
            Skew::Zipf => 1.0 / (rank + 1) as f64,
            Skew::One if rank == n / 2 => 9.0 * (n.max(2) - 1) as f64,
            Skew::One => 1.0,
            Skew::Zeros => f64::from(u8::from(rank.is_multiple_of(2))),
        }
    }

    /// The share that each of `n` blocks has of all elements.
    pub fn shares(self, n: usize) -> Vec<f64> {
        let whole: f64 = (0..n).map(|rank| self.weight(rank, n)).sum();
        (0..n).map(|rank| self.weight(rank, n) / whole).collect()
    }

    /// The bytes of `n` blocks that are all as long as the longest, of which they have so many without that.
    pub fn padded_bytes(self, n: usize, bytes: usize) -> usize {
        let longest = self.shares(n).into_iter().fold(0.0, f64::max);
        ((bytes as f64 * longest).ceil() as usize).saturating_mul(n)
    }

    /// The sizes of `n` blocks that have `total` elements together.
    pub fn sizes(self, n: usize, total: usize) -> Vec<usize> {
        let weight = |rank: usize| self.weight(rank, n);
        let whole: f64 = (0..n).map(weight).sum();
        let (mut before, mut weights) = (0, 0.0);
        (0..n)
            .map(|rank| {
                // By the ends of blocks, so that what is rounded off is in none twice.
                weights += weight(rank);
                let end = if rank + 1 == n { total } else { (total as f64 * (weights / whole)).round() as usize };
                let end = end.clamp(before, total);
                std::mem::replace(&mut before, end).abs_diff(end)
            })
            .collect()
    }

    /// The blocks of all ranks of a call whose blocks have `count` elements on average.
    ///
    /// # Errors
    /// `InvalidArgument` for a collective whose blocks nobody skews.
    pub fn tables(self, collective: Collective, n: usize, count: usize) -> Result<Vec<Arc<BlockTable>>> {
        let sizes = self.sizes(n, count.saturating_mul(n));
        let table = |rank: usize| match collective {
            Collective::AllToAll => BlockTable::of_pairs(packed(&sizes), packed(&vec![sizes[rank]; n])),
            _ => BlockTable::of_all(collective, Rank::from_index(rank), packed(&sizes)),
        };
        match collective {
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
                Ok((0..n).map(table).map(Arc::new).collect())
            }
            other => Err(Error::InvalidArgument(format!(
                "{} has no blocks to skew; all_gather, reduce_scatter and all_to_all have",
                other.name()
            ))),
        }
    }
}

/// What an all-to-all moves over the links that have most of it, in units of what a rank sends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BusiestLinks {
    /// Between a node and all others, in one direction.
    pub node: f64,
    /// Between a rank and the others of its node, in one direction.
    pub inside: f64,
}

impl BusiestLinks {
    /// Those of an all-to-all on a grid, of blocks of one size or of skewed ones.
    pub fn of(grid: &Grid, skew: Option<Skew>) -> BusiestLinks {
        let (nranks, members) = (grid.nranks() as f64, grid.nrails() as f64);
        let Some(skew) = skew else {
            return BusiestLinks { node: members * (nranks - members) / nranks, inside: (members - 1.0) / nranks };
        };
        let shares = skew.shares(grid.nranks());
        let mut busiest = BusiestLinks { node: 0.0, inside: 0.0 };
        for node in grid.node_ids() {
            let members = grid.members(node);
            let count = members.len() as f64;
            let share = |rank: &Rank| shares[rank.index()];
            let here: f64 = members.iter().map(share).sum();
            busiest.node = busiest.node.max(count * (1.0 - here)).max((nranks - count) * here);
            for own in members.iter().map(share) {
                busiest.inside = busiest.inside.max(here - own).max((count - 1.0) * own);
            }
        }
        busiest
    }
}

impl FromStr for Skew {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Skew, String> {
        let known = Skew::ALL.map(|(name, _)| name).join(", ");
        let found = Skew::ALL.into_iter().find(|(name, _)| *name == text);
        found.map(|(_, skew)| skew).ok_or_else(|| format!("there is no skew {text}; there are {known}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_all_elements_and_their_shares() {
        for (_, skew) in Skew::ALL {
            for n in [1, 2, 3, 8, 100] {
                for total in [0, 1, 7, 1000, 123_457] {
                    let sizes = skew.sizes(n, total);
                    assert_eq!((sizes.len(), sizes.iter().sum::<usize>()), (n, total), "{skew:?}");
                }
            }
        }
        assert_eq!(Skew::Zipf.sizes(3, 1100), [600, 300, 200]);
        assert_eq!(Skew::One.sizes(11, 1000), [10, 10, 10, 10, 10, 900, 10, 10, 10, 10, 10]);
        assert_eq!(Skew::Zeros.sizes(5, 300), [100, 0, 100, 0, 100]);
        assert_eq!(Skew::Zeros.sizes(4, 300), [150, 0, 150, 0]);
    }

    #[test]
    fn the_busiest_links_of_an_all_to_all_are_those_of_the_ranks_that_receive_most() {
        let grid = Grid::blocks(&[2, 2]);
        // A rank sends two of its four blocks to the other node and one inside its own.
        assert_eq!(BusiestLinks::of(&grid, None), BusiestLinks { node: 1.0, inside: 0.25 });
        // Two ranks send the hot node what they have for its two, 14/15 of it; the hot rank's neighbour sends it nine tenths.
        let busiest = BusiestLinks::of(&grid, Some(Skew::One));
        assert!((busiest.node - 2.0 * (0.9 + 0.1 / 3.0)).abs() < 1e-12, "{busiest:?}");
        assert!((busiest.inside - 0.9).abs() < 1e-12, "{busiest:?}");
        // As many to each node as of blocks of one size, but all of them to one of its ranks.
        assert_eq!(BusiestLinks::of(&grid, Some(Skew::Zeros)), BusiestLinks { node: 1.0, inside: 0.5 });
        assert!(BusiestLinks::of(&Grid::flat(4), Some(Skew::One)).node.abs() < 1e-12);
        assert_eq!((Skew::Zeros.padded_bytes(4, 100), Skew::One.padded_bytes(10, 1000)), (200, 9000));
    }

    #[test]
    fn what_a_rank_is_sent_in_an_all_to_all_is_what_it_receives() {
        let tables = Skew::Zipf.tables(Collective::AllToAll, 4, 100).unwrap();
        for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
            assert_eq!(tables[from].input()[to].count, tables[to].output()[from].count);
        }
        assert!(Skew::One.tables(Collective::Broadcast, 4, 100).is_err_and(|error| error.text().contains("broadcast")));
        assert!("half".parse::<Skew>().is_err_and(|why| why.contains("zipf, one, zeros")));
    }
}
