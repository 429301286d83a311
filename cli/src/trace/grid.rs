//! From the communicators of a program to the dimensions of a workload's grid.
//!
//! Ranks of a communicator that are equally far apart are a dimension, or some that lie side by side: `0,8,16,24` of 32
//! ranks is the outer one of a grid of 8 x 4. Distances and sizes of all communicators together cut the grid.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use strata::error::{Error, Result};
use strata::records::trace::from_ranges;
use strata::records::TraceComm;

/// The dimensions, innermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankGrid {
    /// How many ranks there are.
    pub world: u32,
    /// From each rank to the next one of a dimension, and at last the number of ranks.
    cuts: Vec<u32>,
}

/// No job has more ranks; a damaged trace may.
const MOST_RANKS: u32 = 1 << 20;

/// Ranks that are equally far apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stride {
    distance: u32,
    ranks: u32,
}

/// The ranks of a communicator as such, if they are.
fn stride(comm: &TraceComm, world: u32) -> Result<Stride> {
    let told = from_ranges(&comm.members).filter(|members| members.len() == comm.nranks as usize);
    let members = match told {
        Some(members) => members,
        None if comm.nranks == world => (0..world).collect(),
        None => {
            let key = strata::records::chrome::short(&comm.key);
            let text = format!(
                "communicator {key} has {} of {world} ranks, and the trace does not tell which: no launcher had numbered them",
                comm.nranks
            );
            return Err(Error::InvalidArgument(text));
        }
    };
    let distance = members.get(1).map_or(1, |second| second.saturating_sub(members[0]));
    let is_even = members.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(distance));
    let begins = |distance: u32| members.first().is_some_and(|first| (first / distance).is_multiple_of(comm.nranks));
    match is_even && distance > 0 && begins(distance) {
        true => Ok(Stride { distance, ranks: comm.nranks }),
        false => Err(Error::InvalidArgument(format!(
            "ranks {} make calls together, and a workload's groups are rows of a grid of the ranks",
            comm.members
        ))),
    }
}

impl RankGrid {
    /// The grid that has all these communicators as groups.
    pub fn of(comms: &[&TraceComm], world: u32) -> Result<RankGrid> {
        if world > MOST_RANKS {
            return Err(Error::InvalidArgument(format!("a communicator of {world} ranks; {MOST_RANKS} are the most")));
        }
        let mut cuts = BTreeSet::from([1, world]);
        for comm in comms {
            let Stride { distance, ranks } = stride(comm, world)?;
            cuts.extend([distance, distance.saturating_mul(ranks)]);
        }
        let cuts: Vec<u32> = cuts.into_iter().collect();
        match cuts.windows(2).all(|pair| pair[1] % pair[0] == 0) && cuts.last() == Some(&world) {
            true => Ok(RankGrid { world, cuts }),
            false => Err(Error::InvalidArgument(format!(
                "the communicators of {world} ranks are not the dimensions of one grid: groups begin or end at every \
                 {cuts:?} ranks"
            ))),
        }
    }

    /// Name and size of each dimension, innermost first; the outermost is what is left.
    pub fn dimensions(&self) -> Vec<(String, String)> {
        let sizes: Vec<u32> = self.cuts.windows(2).map(|pair| pair[1] / pair[0]).collect();
        let size = |(index, size): (usize, &u32)| {
            let text = if index + 1 == sizes.len() { "\"rest\"".to_string() } else { size.to_string() };
            (format!("dimension{index}"), text)
        };
        sizes.iter().enumerate().map(size).collect()
    }

    /// A communicator as a workload names it.
    pub fn group(&self, comm: &TraceComm) -> Result<String> {
        let Stride { distance, ranks } = stride(comm, self.world)?;
        if ranks == self.world {
            return Ok("\"world\"".to_string());
        }
        let inside = |cut: &u32| *cut >= distance && *cut < distance.saturating_mul(ranks);
        let dimensions = self.cuts.iter().enumerate().filter(|(_, cut)| inside(cut));
        let names: Vec<String> = dimensions.map(|(index, _)| format!("\"dimension{index}\"")).collect();
        Ok(match names.len() {
            1 => names.concat(),
            _ => format!("[{}]", names.join(", ")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comm(nranks: u32, members: &str) -> TraceComm {
        TraceComm { key: "ab".to_string(), nranks, members: members.to_string(), ..TraceComm::default() }
    }

    #[test]
    fn groups_of_ranks_are_dimensions_or_several_side_by_side() {
        let (all, node, rail) = (comm(16, "0-15"), comm(4, "4-7"), comm(4, "1,5,9,13"));
        let grid = RankGrid::of(&[&all, &node, &rail], 16).unwrap();
        let dimension = |index: usize, size: &str| (format!("dimension{index}"), size.to_string());
        assert_eq!(grid.dimensions(), [dimension(0, "4"), dimension(1, "\"rest\"")]);
        let names = [&all, &node, &rail].map(|comm| grid.group(comm).unwrap());
        assert_eq!(names, ["\"world\"", "\"dimension0\"", "\"dimension1\""]);
        let pair = comm(2, "8,9");
        let grid = RankGrid::of(&[&node, &pair], 16).unwrap();
        assert_eq!(grid.dimensions(), [dimension(0, "2"), dimension(1, "2"), dimension(2, "\"rest\"")]);
        assert_eq!(grid.group(&node).unwrap(), "[\"dimension0\", \"dimension1\"]");
        let unknown = RankGrid::of(&[&comm(16, "")], 16).unwrap();
        assert_eq!(unknown.dimensions(), [dimension(0, "\"rest\"")]);
    }

    #[test]
    fn a_damaged_number_of_ranks_takes_no_memory() {
        let damaged = comm(u32::MAX, "0-3");
        let refused = RankGrid::of(&[&damaged], u32::MAX).map(|_| ()).unwrap_err();
        assert!(refused.text().contains("4294967295 ranks"), "{refused}");
    }

    #[test]
    fn what_is_no_grid_is_refused_in_words() {
        for (comms, said) in [
            (&[comm(2, "")][..], "has 2 of 16 ranks, and the trace does not tell which"),
            (&[comm(3, "0,1,3")], "ranks 0,1,3 make calls together"),
            (&[comm(4, "1-4")], "ranks 1-4 make calls together"),
            (&[comm(4, "0-3"), comm(6, "0-5")], "not the dimensions of one grid"),
            (&[comm(3, "0,6,12")], "not the dimensions of one grid"),
        ] {
            let comms: Vec<&TraceComm> = comms.iter().collect();
            let error = RankGrid::of(&comms, 16).unwrap_err();
            assert!(error.text().contains(said), "{said}: {error}");
        }
    }
}
