//! Which local rank gets which NIC: evenly, and then as near as possible.
//!
//! Of `m` ranks on `k` NICs each NIC serves `m / k`, rounded down or up. Among these assignments one of least total
//! distance is taken; among those, one that gives rank `i` the NIC `i % k` as often as it can, so that ranks of equal
//! local rank use equal NICs on all nodes (a rail), whatever the nodes' sizes.
#![forbid(unsafe_code)]

use super::distance::Distance;
use pathfinding::prelude::{kuhn_munkres_min, Matrix};

/// The NIC of each rank. `distance` is that between a rank and a NIC; `None` where a rank has no place, to which all
/// NICs are equally near. A pure function: all ranks of a node compute the same.
pub fn assign(ranks: usize, nics: usize, distance: impl Fn(usize, usize) -> Option<Distance>) -> Vec<usize> {
    assert!(nics > 0, "nothing to assign");
    if ranks == 0 {
        return Vec::new();
    }
    // One column for each rank that a NIC can take. Those of the last round are so dear that no more of them are taken
    // than must be, so every other one is taken: that makes it even.
    let rounds = ranks.div_ceil(nics);
    let step = ranks as i64 + 1;
    let last_round = (ranks as i64 + 1) * (Distance::Sys as i64 + 1) * step;
    let cost = |(rank, column): (usize, usize)| {
        let (round, nic) = (column / nics, column % nics);
        let far = distance(rank, nic).map_or(0, |distance| distance as i64);
        let out_of_turn = i64::from(nic != rank % nics);
        let dear = if round + 1 == rounds { last_round } else { 0 };
        far * step + out_of_turn + dear
    };
    let costs = Matrix::from_fn(ranks, rounds * nics, cost);
    let (_, columns) = kuhn_munkres_min(&costs);
    columns.into_iter().map(|column| column % nics).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads(assigned: &[usize], nics: usize) -> Vec<usize> {
        (0..nics).map(|nic| assigned.iter().filter(|&&of| of == nic).count()).collect()
    }

    fn total(assigned: &[usize], distances: &[Vec<Distance>]) -> usize {
        assigned.iter().enumerate().map(|(rank, &nic)| distances[rank][nic] as usize).sum()
    }

    /// The least total distance of all even assignments, by trying them all.
    fn least(distances: &[Vec<Distance>], nics: usize) -> usize {
        let ranks = distances.len();
        let every = (0..nics.pow(ranks as u32)).map(|mut code| {
            let digit = |_| {
                let nic = code % nics;
                code /= nics;
                nic
            };
            (0..ranks).map(digit).collect::<Vec<usize>>()
        });
        let even = |assigned: &Vec<usize>| {
            let loads = loads(assigned, nics);
            loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1
        };
        every.filter(even).map(|assigned| total(&assigned, distances)).min().unwrap()
    }

    const CLASSES: [Distance; 5] = [Distance::Pix, Distance::Pxb, Distance::Phb, Distance::Node, Distance::Sys];

    fn tables(ranks: usize, nics: usize) -> impl Strategy<Value = Vec<Vec<Distance>>> {
        let table = move |(ranks, nics)| {
            let row = prop::collection::vec(prop::sample::select(CLASSES.to_vec()), nics);
            prop::collection::vec(row, ranks)
        };
        (1..=ranks, 1..=nics).prop_flat_map(table)
    }

    proptest! {
        #[test]
        fn loads_differ_by_at_most_one(distances in tables(40, 12)) {
            let nics = distances[0].len();
            let assigned = assign(distances.len(), nics, |rank, nic| Some(distances[rank][nic]));
            let loads = loads(&assigned, nics);
            prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1, "{:?}", loads);
        }

        #[test]
        fn no_even_assignment_is_nearer(distances in tables(6, 4)) {
            let nics = distances[0].len();
            let assigned = assign(distances.len(), nics, |rank, nic| Some(distances[rank][nic]));
            prop_assert_eq!(total(&assigned, &distances), least(&distances, nics));
        }
    }

    #[test]
    fn ranks_to_which_all_nics_are_equal_take_turns() {
        for distance in [None, Some(Distance::Sys)] {
            for (ranks, nics) in [(0, 2), (1, 4), (3, 4), (8, 4), (7, 3), (5, 1)] {
                let turns: Vec<usize> = (0..ranks).map(|rank| rank % nics).collect();
                assert_eq!(assign(ranks, nics, |_, _| distance), turns, "{ranks} ranks on {nics} NICs");
            }
        }
    }

    #[test]
    fn a_large_node_is_assigned_too() {
        let near = |rank: usize, nic: usize| Some(if rank / 32 == nic { Distance::Pix } else { Distance::Sys });
        assert_eq!(assign(256, 8, near), (0..256).map(|rank| rank / 32).collect::<Vec<_>>());
    }
}
