//! Blocks of different sizes for simulated calls: how the bytes of a message are spread over ranks.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::plan::blocks::{packed, BlockTable};
use crate::plan::Collective;
use crate::topo::Rank;
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

    /// The sizes of `n` blocks that have `total` elements together.
    pub fn sizes(self, n: usize, total: usize) -> Vec<usize> {
        let weight = |rank: usize| match self {
            Skew::Zipf => 1.0 / (rank + 1) as f64,
            Skew::One if rank == n / 2 => 9.0 * (n.max(2) - 1) as f64,
            Skew::One => 1.0,
            Skew::Zeros => f64::from(u8::from(rank.is_multiple_of(2))),
        };
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
    fn what_a_rank_is_sent_in_an_all_to_all_is_what_it_receives() {
        let tables = Skew::Zipf.tables(Collective::AllToAll, 4, 100).unwrap();
        for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
            assert_eq!(tables[from].input()[to].count, tables[to].output()[from].count);
        }
        assert!(Skew::One.tables(Collective::Broadcast, 4, 100).is_err_and(|error| error.text().contains("broadcast")));
        assert!("half".parse::<Skew>().is_err_and(|why| why.contains("zipf, one, zeros")));
    }
}
