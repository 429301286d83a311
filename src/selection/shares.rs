//! What each rank is to own of an all-reduce, by what the links of its node deliver: less where they are slow.
//!
//! Rails carry shares of the vector side by side, and on each rail every node owns a part of the rail's share: it receives that part
//! from all others, reduces it, and sends the result to all. On `n` nodes a node of which the part is `w` of a rail's share `L`
//! sends `L + (n-2) w`, and receives as much. So with rates `b` a rail takes the time `T` at least in which
//!
//! ```text
//! L + (n-2) w_i <= b_i T for each node i,   sum of w_i = L
//! L = T * min(min b_i, sum b_i / (2 (n-1))),   w_i in proportion to b_i T - L
//! ```
//!
//! and rails end together where their shares are in proportion to `L / T`. Even shares take `2 (n-1)/n L / min b_i`.
//! Source: the bound of AdapCC's setting (Zhao, Zhang and Wu), without its solver: ports bind, and pairs do not.
#![forbid(unsafe_code)]

use crate::plan::weights::ChunkWeights;
use crate::topo::Grid;
use std::sync::Arc;

/// Rates between these parts of the usual one are taken for it: figures are not exact, and a link takes some bytes at once after a pause.
const USUAL: std::ops::Range<f64> = 0.9..1.6;
/// How many times as fast other shares must be before they are taken.
const WORTH: f64 = 1.07;
/// The same where rates are exact: what whole parts are off.
const EXACT: f64 = 1.001;
/// Parts of an even share.
const PARTS: f64 = 1024.0;

/// What ranks own.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeShares {
    /// The rate of each rank, in bytes for each microsecond.
    pub rates: Vec<f64>,
    /// How many times as fast they are as even ones, by these rates and with whole parts.
    pub gain: f64,
    /// The weight of chunk `rail * nodes + node`.
    pub weights: Arc<ChunkWeights>,
}

/// The usual one of the rates that are known.
fn usual(rates: &[Option<f64>]) -> Option<f64> {
    let mut known: Vec<f64> = rates.iter().flatten().copied().collect();
    known.sort_by(f64::total_cmp);
    known.get(known.len() / 2).copied()
}

/// Rates for all ranks: where nothing is known, or nearly the usual one, the usual one.
fn complete(rates: &[Option<f64>]) -> Option<Vec<f64>> {
    let usual = usual(rates)?;
    let complete = |rate: &Option<f64>| rate.filter(|rate| !USUAL.contains(&(rate / usual))).unwrap_or(usual);
    Some(rates.iter().map(complete).collect())
}

/// Shares by the rates of all ranks, in bytes for each microsecond, where that is known. Nothing where even ones do.
pub fn of_rates(grid: &Grid, rates: &[Option<f64>]) -> Option<NodeShares> {
    let meant = |rate: &Option<f64>| rate.filter(|rate| rate.is_finite() && *rate > 0.0);
    let rates = complete(&rates.iter().map(meant).collect::<Vec<_>>())?;
    of_known_rates(grid, &rates).filter(|shares| shares.gain >= WORTH)
}

/// The same by rates that are known exactly, such as a machine's file has them. Nothing where even shares are as fast.
pub fn of_known_rates(grid: &Grid, rates: &[f64]) -> Option<NodeShares> {
    let rates = rates.to_vec();
    let (nodes, nrails) = (grid.nnodes(), grid.nrails());
    if nodes < 2 {
        return None;
    }
    let served = |rank| (0..nrails).filter(|&rail| grid.owner(grid.node(rank), rail) == rank).count().max(1) as f64;
    let mut parts = vec![0.0; nrails * nodes];
    let mut all = 0.0;
    for rail in 0..nrails {
        let of_nodes: Vec<f64> = grid.rail(rail).iter().map(|&rank| rates[rank.index()] / served(rank)).collect();
        let least = of_nodes.iter().copied().fold(f64::INFINITY, f64::min);
        let sum: f64 = of_nodes.iter().sum();
        let share = least.min(sum / (2.0 * (nodes as f64 - 1.0)));
        let room: f64 = of_nodes.iter().map(|rate| rate - share).sum();
        for (node, rate) in of_nodes.iter().enumerate() {
            // Two nodes send as much whichever of them owns what, and so do nodes that all have nothing to spare.
            let part = if nodes > 2 && room > 0.0 { (rate - share) / room } else { 1.0 / nodes as f64 };
            parts[rail * nodes + node] = share * part;
        }
        all += share;
    }
    let of_all = |part: &f64| (part / all * PARTS * parts.len() as f64).round() as u32;
    let weights = ChunkWeights::new(&parts.iter().map(of_all).collect::<Vec<_>>())?;
    let even = ChunkWeights::new(&vec![1; parts.len()])?;
    let gain = time(grid, &rates, &even) / time(grid, &rates, &weights);
    (gain > EXACT).then(|| NodeShares { rates, gain, weights: Arc::new(weights) })
}

/// What holds from now on: what holds already, unless other shares are worth it.
pub fn next(grid: &Grid, current: Option<NodeShares>, rates: &[Option<f64>]) -> Option<NodeShares> {
    let wanted = of_rates(grid, rates);
    let (Some(now), Some(wanted)) = (&current, &wanted) else { return wanted };
    let with = |weights: &ChunkWeights| time(grid, &wanted.rates, weights);
    match with(&now.weights) >= WORTH * with(&wanted.weights) {
        true => Some(wanted.clone()),
        false => current,
    }
}

/// What each owner's link has to carry of each rail, as parts of the vector: of rail `rail` and node `node` in place `rail * nodes + node`.
fn loads(nodes: usize, weights: &ChunkWeights) -> Vec<f64> {
    let parts: Vec<f64> = weights.parts().map(f64::from).collect();
    let all: f64 = parts.iter().sum();
    let of_rail = |rail: &[f64]| {
        let share: f64 = rail.iter().sum();
        rail.iter().map(|part| (share + (nodes as f64 - 2.0) * part) / all).collect::<Vec<f64>>()
    };
    parts.chunks(nodes).flat_map(of_rail).collect()
}

/// What the slowest link delivers of each rail at least, in bytes for each microsecond, if calls with these shares (none: even ones) take so
/// many nanoseconds for a byte of the vector.
pub fn slowest(grid: &Grid, shares: Option<&NodeShares>, pace: f64) -> Option<f64> {
    let even = || ChunkWeights::new(&vec![1; grid.nrails() * grid.nnodes()]);
    let loads = match shares {
        Some(shares) => loads(grid.nnodes(), &shares.weights),
        None => loads(grid.nnodes(), &even()?),
    };
    let least = loads.into_iter().fold(f64::INFINITY, f64::min);
    Some(1e3 * least / pace).filter(|rate| rate.is_finite())
}

/// How long the busiest NIC takes with these shares, in microseconds a byte of the vector.
pub fn time(grid: &Grid, rates: &[f64], weights: &ChunkWeights) -> f64 {
    let mut of_ranks = vec![0.0; grid.nranks()];
    for (rail, of_rail) in loads(grid.nnodes(), weights).chunks(grid.nnodes()).enumerate() {
        for (rank, load) in grid.rail(rail).into_iter().zip(of_rail) {
            of_ranks[rank.index()] += load;
        }
    }
    of_ranks.iter().zip(rates).map(|(load, rate)| load / rate).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn grid(sizes: &[usize]) -> Grid {
        Grid::blocks(sizes)
    }

    fn known(rates: &[f64]) -> Vec<Option<f64>> {
        rates.iter().map(|&rate| Some(rate)).collect()
    }

    fn four_by_four(change: impl Fn(usize) -> f64) -> Vec<Option<f64>> {
        (0..16).map(|rank| Some(25.0 * change(rank))).collect()
    }

    #[test]
    fn equal_links_keep_even_shares() {
        let grid = grid(&[4; 4]);
        assert_eq!(of_rates(&grid, &four_by_four(|_| 1.0)), None);
        assert_eq!(of_rates(&grid, &four_by_four(|rank| 0.93 + 0.01 * rank as f64)), None, "figures are not exact");
        assert_eq!(of_rates(&grid, &[None; 16]), None);
    }

    #[test]
    fn one_nic_at_a_quarter_costs_an_eighth() {
        let grid = grid(&[4; 4]);
        let shares = of_rates(&grid, &four_by_four(|rank| if rank == 5 { 0.25 } else { 1.0 })).unwrap();
        assert!((3.35..3.4).contains(&shares.gain), "{shares:?}");
        let parts: Vec<u32> = shares.weights.parts().collect();
        assert_eq!(parts[4 + 1], 0, "it owns nothing: {parts:?}");
        assert!(parts[4] < parts[0], "its rail has less: {parts:?}");
        let missing = four_by_four(|_| 1.0);
        let known = |(rank, rate): (usize, &Option<f64>)| if rank == 3 { None } else { *rate };
        assert_eq!(of_rates(&grid, &missing.iter().enumerate().map(known).collect::<Vec<_>>()), None);
    }

    #[test]
    fn a_node_at_half_costs_no_more_than_its_own_vector() {
        let grid = grid(&[4; 4]);
        let shares = of_rates(&grid, &four_by_four(|rank| if rank / 4 == 2 { 0.5 } else { 1.0 })).unwrap();
        assert!((1.49..1.51).contains(&shares.gain), "{shares:?}");
        let one_of_32 = Grid::blocks(&[1; 32]);
        let rates: Vec<f64> = (0..32).map(|node| if node == 7 { 12.5 } else { 25.0 }).collect();
        let shares = of_rates(&one_of_32, &known(&rates)).unwrap();
        let even = 2.0 * 31.0 / 32.0 / 25.0;
        assert!(time(&one_of_32, &rates, &shares.weights) / even < 1.06, "OptCC: 1.02 to 1.06");
    }

    /// AdapCC's mixed cluster: four servers with 100 Gbit/s and two with 50. The paper reports 1.05 to 1.29 over NCCL's equal shares.
    #[test]
    fn six_servers_of_two_generations_share_up_to_the_bound() {
        let grid = grid(&[4; 6]);
        let rates: Vec<f64> = (0..24).map(|rank| if rank < 16 { 3125.0 } else { 1562.5 }).collect();
        let shares = of_rates(&grid, &known(&rates)).unwrap();
        assert!((1.65..1.667).contains(&shares.gain), "{shares:?}");
        let parts: Vec<u32> = shares.weights.parts().collect();
        assert!(parts.chunks(6).all(|rail| rail[0] > 100 && rail[4..] == [0, 0]), "the slow ones only send: {parts:?}");
    }

    #[test]
    fn two_nodes_share_by_rails_alone() {
        let grid = grid(&[2; 2]);
        let shares = of_rates(&grid, &known(&[25.0, 25.0, 25.0, 5.0])).unwrap();
        let parts: Vec<u32> = shares.weights.parts().collect();
        assert_eq!((parts[0], parts[2]), (parts[1], parts[3]));
        assert!((4.9..5.2).contains(&(f64::from(parts[0]) / f64::from(parts[2]))) && shares.gain > 2.9, "{shares:?}");
    }

    #[test]
    fn shares_that_hold_are_kept_unless_others_are_worth_it() {
        let grid = grid(&[4; 4]);
        let slow = |part: f64| four_by_four(move |rank| if rank == 5 { part } else { 1.0 });
        let first = next(&grid, None, &slow(0.25));
        assert!(first.is_some());
        assert_eq!(next(&grid, first.clone(), &slow(0.27)), first);
        assert_ne!(next(&grid, first.clone(), &slow(0.6)), first);
        assert_eq!(next(&grid, first, &slow(1.0)), None, "back to even ones");
    }

    proptest! {
        #[test]
        fn shares_are_as_fast_as_links_allow_and_never_slower_than_even_ones(
            sizes in proptest::collection::vec(1usize..5, 2..6),
            seed in proptest::collection::vec(1.0f64..100.0, 20)
        ) {
            let grid = grid(&sizes);
            let rates: Vec<f64> = seed.iter().take(grid.nranks()).copied().collect();
            if let Some(shares) = of_rates(&grid, &known(&rates)) {
                prop_assert!(shares.gain >= WORTH);
                let least = 0.98 * time(&grid, &shares.rates, &shares.weights);
                prop_assert!(!grid.is_even() || least < bound(&grid, &shares.rates), "{} for {}", least, bound(&grid, &shares.rates));
            }
        }
    }

    /// The least time of a byte, from what each rail's NICs deliver: AdapCC's bound.
    fn bound(grid: &Grid, rates: &[f64]) -> f64 {
        let most = |rail| {
            let of_nodes: Vec<f64> = grid.rail(rail).iter().map(|rank| rates[rank.index()]).collect();
            let sum: f64 = of_nodes.iter().sum();
            of_nodes.into_iter().fold(sum / (2.0 * (grid.nnodes() as f64 - 1.0)), f64::min)
        };
        1.0 / (0..grid.nrails()).map(most).sum::<f64>()
    }
}
