//! Ten thousand steps on links whose rates drift, by the library's own policy and the formula of its shares: what following them gains
//! over even shares, with all that measuring costs. Nothing is sent; a step is an all-reduce of 256 MB.

use strata::plan::weights::ChunkWeights;
use strata::selection::profile::{AfterTelling, CallsTook, LinkProfiler, Round, RoundTook};
use strata::selection::shares::{self, NodeShares};
use strata::topo::{Grid, Rank};

const STEPS: usize = 10_000;
const BYTES: f64 = 256e6;
/// Bytes for each microsecond that a NIC has at most: 100 Gbit/s.
const RATE: f64 = 12_500.0;
/// All-reduces between two tellings, and what a telling takes.
const EVERY: usize = 10;
const TELLING_US: f64 = 100.0;
/// How far what is measured is off, either way.
const NOISE: f64 = 0.03;
/// Steps for which a node's rate stays as it is, on average.
const STAYS: f64 = 300.0;

/// NICs of nodes, all of a node at the same part of their rate: from all of it down to `1 - depth`, drawn anew from time to time.
struct Drift {
    depth: f64,
    parts: Vec<f64>,
    state: u64,
}

impl Drift {
    fn new(nodes: usize, depth: f64, seed: u64) -> Drift {
        let mut drift = Drift { depth, parts: vec![1.0; nodes], state: seed };
        (0..nodes).for_each(|node| drift.parts[node] = drift.part());
        drift
    }

    /// A number from 0 to 1.
    fn unit(&mut self) -> f64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 11) as f64 / (1u64 << 53) as f64
    }

    fn part(&mut self) -> f64 {
        1.0 - self.depth * self.unit()
    }

    fn step(&mut self) {
        for node in 0..self.parts.len() {
            if self.unit() < 1.0 / STAYS {
                self.parts[node] = self.part();
            }
        }
    }

    fn rates(&self, grid: &Grid) -> Vec<f64> {
        (0..grid.nranks()).map(|rank| RATE * self.parts[grid.node(Rank::from_index(rank)).index()]).collect()
    }

    /// A figure, as somebody measures it.
    fn measured(&mut self, figure: f64) -> f64 {
        figure * (1.0 + NOISE * (2.0 * self.unit() - 1.0))
    }
}

/// What each rank receives in a round for each microsecond, and how long the round takes: a rail's messages share the links of both ends.
fn figures(grid: &Grid, round: &Round, rates: &[f64]) -> (Vec<f64>, f64) {
    let blocks: Vec<[Vec<usize>; 2]> =
        (0..grid.nranks()).map(|rank| round.blocks(grid, Rank::from_index(rank))).collect();
    let all = |rank: usize, way: usize| blocks[rank][way].iter().sum::<usize>() as f64;
    let time = |rank: usize| {
        let senders = (0..grid.nranks()).filter(|&from| blocks[rank][1][from] > 0);
        let sent = senders.map(|from| all(from, 0) / rates[from]).fold(0.0, f64::max);
        sent.max(all(rank, 1) / rates[rank])
    };
    let times: Vec<f64> = (0..grid.nranks()).map(time).collect();
    let figures = (0..grid.nranks()).map(|rank| all(rank, 1) / times[rank].max(1e-3)).collect();
    (figures, times.iter().copied().fold(0.0, f64::max))
}

/// How many times as fast all steps are as with even shares.
fn gain(sizes: &[usize], depth: f64, seed: u64) -> f64 {
    let grid = Grid::blocks(sizes);
    let mut drift = Drift::new(grid.nnodes(), depth, seed);
    let even = ChunkWeights::new(&vec![1; grid.nrails() * grid.nnodes()]).expect("some chunk has a weight");
    let (mut profiler, mut shares): (LinkProfiler, Option<NodeShares>) = Default::default();
    let (mut fixed_us, mut adapting_us, mut least) = (0.0, 0.0, f64::INFINITY);
    for step in 1..=STEPS {
        drift.step();
        let rates = drift.rates(&grid);
        fixed_us += BYTES * shares::time(&grid, &rates, &even);
        let took = BYTES * shares::time(&grid, &rates, shares.as_ref().map_or(&even, |shares| &shares.weights));
        adapting_us += took;
        least = drift.measured(took).min(least);
        if step % EVERY > 0 {
            continue;
        }
        adapting_us += TELLING_US;
        let pace = 1e3 * least / BYTES;
        let slowest = shares::slowest(&grid, shares.as_ref(), pace);
        let told = CallsTook { calls: EVERY as u64, class: BYTES.log2() as u32, pace: Some(pace), slowest };
        let mut passed = 0.0;
        let mut after = profiler.calls_took(&grid, told, shares.is_some());
        least = f64::INFINITY;
        while let AfterTelling::Measure(round) = after {
            let (received, took) = figures(&grid, &round, &rates);
            adapting_us += took + TELLING_US;
            passed += took + TELLING_US;
            let told: Vec<f64> = received.into_iter().map(|figure| drift.measured(figure)).collect();
            after = profiler.round_took(&grid, RoundTook { figures: &told, us: passed });
        }
        if let AfterTelling::Rates(found) = after {
            let before = shares.take();
            shares = shares::next(&grid, before.clone(), &found);
            profiler.has_changed(shares != before);
        }
    }
    fixed_us / adapting_us
}

#[test]
fn following_links_that_drift_is_never_much_slower_than_even_shares() {
    for (name, sizes) in [("4 nodes of 4", &[4; 4][..]), ("8 nodes of 8", &[8; 8]), ("32 nodes of 1", &[1; 32])] {
        for depth in [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7] {
            let mut gains: Vec<f64> = (0..5).map(|seed| gain(sizes, depth, seed)).collect();
            gains.sort_by(f64::total_cmp);
            println!("{name}, rates down to {:.1}: {:.3} ({:.3} to {:.3})", 1.0 - depth, gains[2], gains[0], gains[4]);
            assert!(gains[0] >= 1.0 / 1.02, "{name}, {depth}: {gains:?}");
            assert!(depth < 0.5 || gains[2] >= 1.05, "{name}, {depth}: {gains:?}");
        }
    }
}
