//! What a collective is to do on a machine's links: the algorithm, the bytes of a segment, the segments in flight, and what each
//! rank of each rail owns.
//!
//! Shares are the formula of [`shares`]. Algorithm and segments are found by pricing: the simulator counts for each
//! link what AdapCC's cost model does (latency, and bytes by the rate that flows leave each other; equations 2, 3 and 5), so a first
//! look prices every algorithm with one cut, and a second one prices the best of them with all cuts. A pure function: the same
//! machine, grid and bytes give the same strategy. No solver. Source: AdapCC (Zhao, Zhang and Wu), section IV-D.
#![forbid(unsafe_code)]

use super::shares;
use crate::algorithms::{self, Choice};
use crate::carrier::Carrier;
use crate::error::{Error, Result};
use crate::plan::weights::ChunkWeights;
use crate::plan::{Collective, Shape};
use crate::sim::price::{block_bytes, price, Detail, How, PricedPlan};
use crate::sim::Cluster;
use crate::topo::Grid;
use std::sync::Arc;

/// What was found for one collective and size.
#[derive(Debug, Clone, PartialEq)]
pub struct Synthesized {
    /// Algorithm and segments.
    pub route: PricedPlan,
    /// What each rank of each rail owns of an all-reduce; none where that is even.
    pub weights: Option<Arc<ChunkWeights>>,
    /// What it takes on the machine, in ns.
    pub ns: f64,
}

impl Synthesized {
    /// The way as it is priced.
    pub fn how(&self) -> How {
        match &self.weights {
            Some(weights) => How::Shared(self.route.clone(), weights.clone()),
            None => How::Strata(self.route.clone()),
        }
    }
}

/// Into how many segments a message is cut at a first look, and how many are in flight.
const FIRST: (usize, usize) = (16, 4);
/// The same of a second look, at the best algorithms.
const CUTS: [usize; 8] = [4, 8, 16, 32, 64, 128, 256, 512];
const WINDOWS: [usize; 3] = [2, 4, 8];
/// A second look tries no cuts that take more events than this to simulate; a first one did as well as it did.
const MOST_EVENTS: u64 = 1_000_000;
/// How many algorithms get a second look.
const SECOND_LOOKS: usize = 3;
/// A segment of less than this, in bytes of a block, is not worth its steps.
const LEAST_SEGMENT: usize = 64 << 10;
/// Beyond this many ranks each of them does not send to each other, nor round one ring.
const MOST_FLAT: usize = 64;

/// The algorithms worth a look: in exact arithmetic, without a board. With more than [`MOST_FLAT`] ranks those of two levels.
fn choices(collective: Collective, grid: &Arc<Grid>) -> Vec<Choice> {
    let mut choices = algorithms::choices(collective, grid);
    choices.push(Choice::leveled("two_level", "direct", "direct"));
    let shape = Shape::new(collective, grid.clone());
    let is_known = |choice: &Choice| !algorithms::is_on_board(choice) && algorithms::provider_of(choice).is_none();
    let is_small = |choice: &Choice| grid.nranks() <= MOST_FLAT || algorithms::is_leveled(choice);
    let leveled = choices.iter().any(algorithms::is_leveled);
    choices.retain(|choice| is_known(choice) && algorithms::supports(choice, &shape));
    choices.retain(|choice| is_small(choice) || !leveled);
    let mut seen: Vec<Choice> = Vec::new();
    choices.retain(|choice| {
        !seen.contains(choice) && {
            seen.push(choice.clone());
            true
        }
    });
    choices
}

/// The algorithm of which each rank of a rail owns a chunk, by which all-reduces have shares.
pub fn shared_choice(grid: &Grid) -> Choice {
    match grid.nrails() {
        1 => Choice::flat("direct"),
        _ => Choice::leveled("two_level", "direct", "direct"),
    }
}

/// A search among ways to do one collective of one size.
struct Search<'a> {
    machine: &'a Arc<Cluster>,
    grid: &'a Arc<Grid>,
    collective: Collective,
    bytes: usize,
}

impl Search<'_> {
    /// A way and what it takes, with the events of its simulation.
    fn try_out(
        &self,
        choice: &Choice,
        (cut, window): (usize, usize),
        weights: Option<&Arc<ChunkWeights>>,
    ) -> Result<(Synthesized, u64)> {
        let block = block_bytes(self.collective, self.grid.nranks(), self.bytes).max(1);
        // Segments begin at multiples of 64 bytes of a block.
        let segment_bytes = match block.div_ceil(cut).next_multiple_of(64) {
            bytes if cut > 1 && bytes >= LEAST_SEGMENT => bytes,
            _ if cut > 1 && block > LEAST_SEGMENT => LEAST_SEGMENT,
            _ => usize::MAX,
        };
        let window = if segment_bytes == usize::MAX { 1 } else { window };
        let route = PricedPlan { choice: choice.clone(), segment_bytes, window, carrier: Carrier::MPI };
        let found = Synthesized { route, weights: weights.cloned(), ns: 0.0 };
        let price = price(self.machine, self.grid, self.collective, self.bytes, &found.how(), Detail::default())?;
        Ok((Synthesized { ns: price.ns, ..found }, price.events))
    }

    /// The best way, of these algorithms with these weights.
    fn best(&self, ways: &[(Choice, Option<Arc<ChunkWeights>>)]) -> Result<Option<Synthesized>> {
        let mut first = Vec::new();
        for (choice, weights) in ways {
            let way = |cut| self.try_out(choice, cut, weights.as_ref());
            let ((cut, _), (whole, events)) = (way(FIRST)?, way((1, 1))?);
            first.push((if whole.ns <= cut.ns { whole } else { cut }, events));
        }
        first.sort_by(|(one, _), (other, _)| one.ns.total_cmp(&other.ns));
        first.truncate(SECOND_LOOKS);
        let mut best = first.first().map(|(first, _)| first.clone());
        for (looked, events) in &first {
            let is_cheap = |cut: &usize| *cut as u64 * events <= MOST_EVENTS;
            let cuts = CUTS.into_iter().filter(is_cheap).flat_map(|cut| WINDOWS.map(|window| (cut, window)));
            for cut in cuts {
                let (way, _) = self.try_out(&looked.route.choice, cut, looked.weights.as_ref())?;
                if best.as_ref().is_none_or(|best| way.ns < best.ns) {
                    best = Some(way);
                }
            }
        }
        Ok(best)
    }
}

/// The best that Strata's algorithms do for a collective of so many bytes with even shares.
///
/// # Errors
/// `InvalidArgument` where no algorithm does it.
pub fn evenly(machine: &Arc<Cluster>, grid: &Arc<Grid>, collective: Collective, bytes: usize) -> Result<Synthesized> {
    let ways: Vec<_> = choices(collective, grid).into_iter().map(|choice| (choice, None)).collect();
    let none = || Error::InvalidArgument(format!("no algorithm does {} on {grid}", collective.name()));
    Search { machine, grid, collective, bytes }.best(&ways)?.ok_or_else(none)
}

/// The same with shares by what links deliver, where those are quicker.
///
/// # Errors
/// As [`evenly`].
pub fn synthesize(
    machine: &Arc<Cluster>,
    grid: &Arc<Grid>,
    collective: Collective,
    bytes: usize,
) -> Result<Synthesized> {
    let even = evenly(machine, grid, collective, bytes)?;
    if collective != Collective::AllReduce {
        return Ok(even);
    }
    let Some(shares) = shares::of_known_rates(grid, &machine.rank_rates(grid)) else { return Ok(even) };
    let ways = [(shared_choice(grid), Some(shares.weights))];
    let shared = Search { machine, grid, collective, bytes }.best(&ways)?;
    Ok(shared.filter(|shared| shared.ns < even.ns).unwrap_or(even))
}

/// The least time that NICs allow a collective whose root is on the first node, in ns: of each node what must leave it or come to it.
/// `bytes` is the message as [`price`] has it. None of collectives that this says nothing of, and on one node.
pub fn nic_bound_ns(machine: &Cluster, grid: &Grid, collective: Collective, bytes: usize) -> Option<f64> {
    if grid.nnodes() < 2 {
        return None;
    }
    let rates = machine.rank_rates(grid);
    let members = |node| grid.members(node).len() as f64;
    // In GB/s, which are bytes a ns.
    let rate = |node| grid.members(node).iter().map(|rank| rates[rank.index()]).sum::<f64>() / 1e3;
    let (nranks, bytes) = (grid.nranks() as f64, bytes as f64);
    let longest =
        |moved: &dyn Fn(f64) -> f64| grid.node_ids().map(|node| moved(members(node)) / rate(node)).fold(0.0, f64::max);
    match collective {
        Collective::AllReduce => {
            let sum: f64 = grid.node_ids().map(rate).sum();
            let least = grid.node_ids().map(rate).fold(f64::INFINITY, f64::min);
            Some(bytes / least.min(sum / (2.0 * (grid.nnodes() as f64 - 1.0))))
        }
        Collective::Reduce | Collective::Broadcast => Some(longest(&|_| bytes)),
        Collective::AllGather | Collective::ReduceScatter => {
            Some(longest(&|members| (bytes * (nranks - members) / nranks).max(bytes * members / nranks)))
        }
        Collective::AllToAll => Some(longest(&|members| members * (nranks - members) * bytes)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::price::grid_of;

    fn testbed() -> Arc<Cluster> {
        Arc::new(Cluster::find("adapcc").unwrap())
    }

    /// AdapCC's figure 12: the paper reports 1.05 to 1.29 times NCCL's rate.
    #[test]
    fn six_servers_of_two_generations_all_reduce_at_one_and_a_half_times_the_even_rate() {
        let machine = testbed();
        let grid = grid_of(&machine, 24);
        let bytes = 256_000_000;
        let even = evenly(&machine, &grid, Collective::AllReduce, bytes).unwrap();
        let found = synthesize(&machine, &grid, Collective::AllReduce, bytes).unwrap();
        let bound = nic_bound_ns(&machine, &grid, Collective::AllReduce, bytes).unwrap();
        assert!((40.9e6..41.0e6).contains(&bound), "{bound}");
        assert!(even.ns >= 68.2e6 && even.ns / found.ns >= 1.5, "{even:?} {found:?}");
        assert!(found.ns >= bound && bound / found.ns >= 0.9, "{found:?} of {bound}");
        assert_eq!(found, synthesize(&machine, &grid, Collective::AllReduce, bytes).unwrap(), "a pure function");
    }

    #[test]
    fn equal_nodes_have_even_shares() {
        let machine = testbed();
        let found = synthesize(&machine, &grid_of(&machine, 16), Collective::AllReduce, 256_000_000).unwrap();
        assert_eq!(found.weights, None);
    }
}
