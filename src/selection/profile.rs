//! When links are measured, and what a round of messages says of them.
//!
//! In a round every node sends as much to another one on each rail, `distance` nodes further, and all ranks tell what they have received in
//! which time. What a rank receives is no faster than its own link nor than the sender's: so of several rounds with different nodes the
//! best says what a link does, as a receiver's and as a sender's. Source: AdapCC (Zhao, Zhang and Wu), whose profiler has a round for each
//! distance; here there are as many as tell a few slow nodes from the others, and a link that one round has found slow beyond doubt is left
//! out of the next ones.
//!
//! What a link takes at once after a pause (a token bucket's burst, full buffers) says nothing of its rate, so a rank times what comes
//! after a round's [`prelude`](Round::prelude). Assumed is a bucket of at most 144 KiB where rounds are short, as switches and NICs have them. One
//! that lasts for longer than a round, as clouds have them by the minute, is not seen: as long as it lasts, calls are as fast as rounds.
#![forbid(unsafe_code)]

use crate::topo::{Grid, NodeId, Rank};
use std::collections::HashMap;

/// Rounds at least: with fewer nodes the same ones again.
const LEAST_ROUNDS: usize = 3;
/// All rounds together are to take so long on the slowest link, by how long calls have taken; tellings between them come on top. So they
/// have as many bytes of a rail at first, within these bounds. With fewer hardly more than the prelude would be left.
const BUDGET_US: f64 = 65_000.0;
const LEAST_BYTES: usize = 288 << 10;
const FIRST_BYTES: usize = 1 << 20;
/// Bytes of a rail in a round that are not timed: so many, or this part of it.
const PRELUDE: usize = 144 << 10;
const PRELUDE_PART: usize = 8;
/// A link that receives and sends less than this part of what one of four exceeds is slow.
const SLOW: f64 = 0.6;
/// It is the slowest where that is so many times what calls have told of the slowest one, and both ways differ less than by this.
const AS_SLOW: std::ops::Range<f64> = 0.9..1.5;
const ALIKE: f64 = 1.2;
/// Where the quickest rank has a round's bytes in less than that time, as many as take it a little longer, and no more than these.
const LEAST_US: f64 = 2000.0;
const LONGER: f64 = 1.25;
const MOST_BYTES: usize = 64 << 20;
/// So many times the least time of a byte is slower than before.
const SLOWER: f64 = 1.1;
/// Links are measured again when calls have taken so many times as long as measuring took: while shares hold, and where calls are slower.
/// It is twice as many each time that nothing has changed, at most `MOST_PATIENCE` times as many.
const WHILE_SHARES_HOLD: f64 = 25.0;
const WHERE_SLOWER: f64 = 10.0;
const MOST_PATIENCE: f64 = 16.0;
/// While shares hold, one round looks whether a link has become better, when calls have taken so many times as long as that round: a round
/// in which one has received so many times what its rate allows has links be measured.
const LOOKS_APART: f64 = 25.0;
const BETTER: f64 = 1.25;

/// A round of messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// How many nodes further the receivers are.
    pub distance: usize,
    /// Bytes of each rail.
    pub bytes: usize,
    /// Ranks that neither send nor receive: what their links do is known.
    pub without: Vec<Rank>,
}

impl Round {
    /// So many of the bytes of a rail come before what is timed.
    pub fn prelude(&self) -> usize {
        PRELUDE.max(self.bytes / PRELUDE_PART).min(self.bytes / 2)
    }

    /// Bytes that a rank sends to each rank, and receives of each.
    pub fn blocks(&self, grid: &Grid, me: Rank) -> [Vec<usize>; 2] {
        let mut blocks = [vec![0; grid.nranks()], vec![0; grid.nranks()]];
        for (from, to) in self.pairs(grid) {
            if from == me {
                blocks[0][to.index()] += self.bytes;
            }
            if to == me {
                blocks[1][from.index()] += self.bytes;
            }
        }
        blocks
    }

    /// What each rank receives for each microsecond on links of these rates, each of which is shared evenly by what it carries; 0 where it
    /// receives nothing.
    pub fn figures(&self, grid: &Grid, rates: &[f64]) -> Vec<f64> {
        let mut loads = [vec![0.0; rates.len()], vec![0.0; rates.len()]];
        for (from, to) in self.pairs(grid) {
            loads[0][from.index()] += 1.0;
            loads[1][to.index()] += 1.0;
        }
        let mut times = vec![0.0f64; rates.len()];
        for (from, to) in self.pairs(grid) {
            let time = |rank: Rank, load: &[f64]| self.bytes as f64 * load[rank.index()] / rates[rank.index()];
            let needed = time(from, &loads[0]).max(time(to, &loads[1]));
            times[to.index()] = times[to.index()].max(needed);
        }
        let figure = |(time, load): (f64, f64)| if load > 0.0 { self.bytes as f64 * load / time } else { 0.0 };
        times.into_iter().zip(loads[1].iter().copied()).map(figure).collect()
    }

    /// Of each rail and node, who sends to whom.
    fn pairs<'a>(&'a self, grid: &'a Grid) -> impl Iterator<Item = (Rank, Rank)> + 'a {
        let nodes = grid.nnodes();
        let rails = 0..grid.nrails();
        let pairs = rails.flat_map(move |rail| {
            let owner = move |node: usize| grid.owner(NodeId((node % nodes) as u32), rail);
            (0..nodes).map(move |node| (owner(node), owner(node + self.distance)))
        });
        pairs.filter(|(from, to)| !self.without.contains(from) && !self.without.contains(to))
    }

    /// How many rails each rank receives of.
    fn served(&self, grid: &Grid) -> Vec<f64> {
        let mut served = vec![0.0f64; grid.nranks()];
        self.pairs(grid).for_each(|(_, to)| served[to.index()] += 1.0);
        served
    }

    /// Ranks of which these figures show beyond doubt that their links are the slowest, of which calls have told how slow they are: as slow
    /// as that, alike both ways, and each with which they have exchanged has been quicker with another one, so it was not that one's doing.
    /// Between two nodes others show nothing more. A rank that only had no processor for a while is off in one of these.
    fn slow(&self, grid: &Grid, figures: &[f64], slowest: f64) -> Vec<Rank> {
        let served = self.served(grid);
        let figure = |to: Rank| figures[to.index()] / served[to.index()];
        // Not the most of all: a figure may be off.
        let mut all: Vec<f64> =
            self.pairs(grid).map(|(_, to)| figure(to)).filter(|figure| figure.is_finite()).collect();
        all.sort_by(f64::total_cmp);
        let quick = all.get(3 * all.len() / 4).copied().unwrap_or(0.0);
        // The least that each rank sends, and receives; and the most of both.
        let mut least = [vec![f64::INFINITY; figures.len()], vec![f64::INFINITY; figures.len()]];
        let mut most = vec![0.0f64; figures.len()];
        let is_slowest = |figure: f64| figure < SLOW * quick && AS_SLOW.contains(&(figure / slowest));
        let mut is_slow = vec![true; figures.len()];
        for (from, to) in self.pairs(grid) {
            for (way, rank) in [from, to].into_iter().enumerate() {
                least[way][rank.index()] = least[way][rank.index()].min(figure(to));
                most[rank.index()] = most[rank.index()].max(figure(to));
                is_slow[rank.index()] &= is_slowest(figure(to));
            }
        }
        let alike = |rank: usize| most[rank] < ALIKE * least[0][rank].min(least[1][rank]);
        if grid.nnodes() > 2 {
            for (from, to) in self.pairs(grid) {
                is_slow[from.index()] &= least[0][to.index()] > BETTER * figure(to);
                is_slow[to.index()] &= least[1][from.index()] > BETTER * figure(to);
            }
        }
        (0..figures.len())
            .filter(|&rank| served[rank] > 0.0 && is_slow[rank] && alike(rank))
            .map(Rank::from_index)
            .collect()
    }
}

/// The distances of the rounds between so many nodes.
fn distances(nodes: usize) -> Vec<usize> {
    let mut distances: Vec<usize> = match nodes {
        0..=4 => (1..nodes).collect(),
        _ => std::iter::successors(Some(1), |distance| Some(2 * distance))
            .take_while(|&distance| distance < nodes)
            .collect(),
    };
    while !distances.is_empty() && distances.len() < LEAST_ROUNDS {
        distances.extend_from_within(..);
    }
    distances
}

/// Rounds that go on.
#[derive(Debug)]
struct Rounds {
    next: usize,
    bytes: usize,
    /// Of each rank the most that it has sent and received, in bytes for each microsecond.
    sent: Vec<f64>,
    received: Vec<f64>,
    /// Whether this one round only looks whether links have become better.
    looks: bool,
    /// Ranks that rounds have found slow beyond doubt.
    found: Vec<Rank>,
    /// Microseconds that have passed since the first round, and those of the longest one.
    passed: f64,
    longest: f64,
}

impl Rounds {
    fn new(nranks: usize, bytes: usize, looks: bool) -> Rounds {
        let (sent, received) = (vec![0.0; nranks], vec![0.0; nranks]);
        Rounds { next: 0, bytes, sent, received, looks, found: Vec::new(), passed: 0.0, longest: 0.0 }
    }

    /// A round of these has shown this.
    fn take_in(&mut self, grid: &Grid, round: &Round, figures: &[f64], slowest: Option<f64>) {
        let served = round.served(grid);
        let mut sent = vec![0.0; grid.nranks()];
        for (from, to) in round.pairs(grid) {
            sent[from.index()] += figures[to.index()] / served[to.index()];
        }
        let best = |all: &mut [f64], new: &[f64]| {
            all.iter_mut().zip(new).filter(|(_, new)| new.is_finite()).for_each(|(most, new)| *most = most.max(*new));
        };
        best(&mut self.sent, &sent);
        best(&mut self.received, figures);
        self.found.extend(slowest.map_or_else(Vec::new, |slowest| round.slow(grid, figures, slowest)));
        self.next += 1;
    }

    /// After so many microseconds: where the links that are left are quicker than the slowest, longer rounds fit into the budget, and say
    /// more. What was slow one way only is taken for the other end's doing.
    fn lengthen(&mut self, grid: &Grid, next: &Round, spent: f64) {
        let left = distances(grid.nnodes()).len().saturating_sub(self.next).max(1) as f64;
        let served = next.served(grid);
        let rate = |rank: usize| self.sent[rank].max(self.received[rank]) / served[rank];
        let rates = (0..grid.nranks()).filter(|&rank| served[rank] > 0.0).map(rate);
        let bytes = rates.fold(f64::INFINITY, f64::min) * (BUDGET_US - spent) / left;
        if bytes.is_finite() && bytes > self.bytes as f64 {
            self.bytes = self.bytes.max((bytes as usize).min(FIRST_BYTES));
        }
    }
}

/// What comes after the ranks have told.
#[derive(Debug, PartialEq)]
pub enum AfterTelling {
    /// The program's calls.
    Nothing,
    /// This round.
    Measure(Round),
    /// The rate of each rank's link.
    Rates(Vec<Option<f64>>),
}

/// Calls of the program between two tellings.
#[derive(Debug, Clone, Copy)]
pub struct CallsTook {
    /// How many.
    pub calls: u64,
    /// How large the largest were, as a power of two.
    pub class: u32,
    /// The least time of a byte of these, in nanoseconds, where it is known.
    pub pace: Option<f64>,
    /// What the slowest link delivers by that of each rail, in bytes for each microsecond; none where rounds are to be as long as without.
    pub slowest: Option<f64>,
}

/// A round, as all ranks have told of it.
#[derive(Debug, Clone, Copy)]
pub struct RoundTook<'a> {
    /// What each rank has received for each microsecond.
    pub figures: &'a [f64],
    /// Microseconds since the first of the rounds began, on the rank on which these are most.
    pub us: f64,
}

impl CallsTook {
    /// Microseconds of all of them, if none was larger and none slower.
    fn us(self) -> f64 {
        self.pace.map_or(0.0, |pace| self.calls as f64 * pace * 2f64.powi(self.class as i32) / 1e3)
    }
}

/// Decides when links are measured; the same on all ranks, since all are told the same.
#[derive(Debug)]
pub struct LinkProfiler {
    /// Of calls of each size the least time of a byte since links were measured.
    usual: HashMap<u32, f64>,
    /// Microseconds of calls since links were measured; none before the first time.
    since: Option<f64>,
    /// Microseconds that rounds took when they were measured.
    cost: f64,
    /// How many times as long to wait because nothing had changed.
    patience: f64,
    rounds: Option<Rounds>,
    /// Microseconds of calls since a round was last made, and those that a look takes.
    unseen: f64,
    look_cost: f64,
    /// What was found last, and by rounds of how many bytes.
    rates: Vec<Option<f64>>,
    bytes: usize,
    /// What calls have told of the slowest link.
    slowest: Option<f64>,
}

impl Default for LinkProfiler {
    fn default() -> LinkProfiler {
        LinkProfiler {
            usual: HashMap::new(),
            since: None,
            cost: 0.0,
            patience: 1.0,
            rounds: None,
            unseen: 0.0,
            look_cost: 0.0,
            rates: Vec::new(),
            bytes: FIRST_BYTES,
            slowest: None,
        }
    }
}

impl LinkProfiler {
    /// All ranks have told how long calls took. `holds` says whether shares by rates hold.
    pub fn calls_took(&mut self, grid: &Grid, calls: CallsTook, holds: bool) -> AfterTelling {
        self.since = self.since.map(|since| since + calls.us());
        self.unseen += calls.us();
        self.slowest = calls.slowest;
        let mut is_slower = false;
        if let Some(pace) = calls.pace {
            let usual = self.usual.entry(calls.class).or_insert(pace);
            is_slower = pace > SLOWER * *usual;
            *usual = usual.min(pace);
        }
        let (soon, in_time) = (WHERE_SLOWER * self.patience * self.cost, WHILE_SHARES_HOLD * self.patience * self.cost);
        let is_due = self.since.is_none_or(|since| (is_slower && since >= soon) || (holds && since >= in_time));
        if is_due {
            return self.measure_all(grid, 0.0);
        }
        if holds && !self.rates.is_empty() && self.unseen >= LOOKS_APART * self.look_cost {
            self.rounds = Some(Rounds::new(grid.nranks(), self.bytes, true));
            return self.measure(grid);
        }
        AfterTelling::Nothing
    }

    /// Has all rounds be made, so long after the first one began.
    fn measure_all(&mut self, grid: &Grid, passed: f64) -> AfterTelling {
        self.cost = 0.0;
        let rounds = distances(grid.nnodes()).len().max(1) as f64;
        let bytes = |rate: f64| ((rate * BUDGET_US / rounds) as usize).clamp(LEAST_BYTES, FIRST_BYTES);
        let bytes = self.slowest.map_or(FIRST_BYTES, bytes);
        self.rounds = Some(Rounds { passed, ..Rounds::new(grid.nranks(), bytes, false) });
        self.measure(grid)
    }

    /// Has links be measured when ranks tell next.
    pub fn forget(&mut self) {
        self.since = None;
    }

    /// The round that the ranks are in, where links are being measured.
    pub fn round(&self, grid: &Grid) -> Option<Round> {
        let rounds = self.rounds.as_ref()?;
        let distance = *distances(grid.nnodes()).get(rounds.next)?;
        Some(Round { distance, bytes: rounds.bytes, without: rounds.found.clone() })
    }

    fn measure(&self, grid: &Grid) -> AfterTelling {
        self.round(grid).map_or(AfterTelling::Nothing, AfterTelling::Measure)
    }

    /// The next of these rounds in which somebody is left.
    fn next_round(&mut self, grid: &Grid) -> Option<Round> {
        loop {
            let next = self.round(grid)?;
            let rounds = self.rounds.as_mut()?;
            if next.pairs(grid).next().is_some() {
                rounds.lengthen(grid, &next, self.cost);
                return self.round(grid);
            }
            rounds.next += 1;
        }
    }

    /// A round has ended.
    pub fn round_took(&mut self, grid: &Grid, RoundTook { figures, us }: RoundTook<'_>) -> AfterTelling {
        let (Some(round), Some(rounds)) = (self.round(grid), &mut self.rounds) else { return AfterTelling::Nothing };
        let took = (us - rounds.passed).max(0.0);
        rounds.passed = us;
        if rounds.looks {
            (self.rounds, self.unseen, self.look_cost) = (None, 0.0, took);
            let known: Vec<f64> = self.rates.iter().map(|rate| rate.unwrap_or(f64::INFINITY)).collect();
            let expected = round.figures(grid, &known);
            // One round of the quick links may be off, and more than theirs gives nobody another share.
            let most = expected.iter().copied().fold(0.0, f64::max);
            let is_better = |(figure, expected): (&f64, &f64)| *expected < most / BETTER && *figure > BETTER * expected;
            return match figures.iter().zip(&expected).any(is_better) {
                true => self.measure_all(grid, us),
                false => AfterTelling::Nothing,
            };
        }
        self.cost += took;
        let most = figures.iter().copied().filter(|figure| figure.is_finite()).fold(0.0, f64::max);
        if rounds.next == 0 && round.bytes < MOST_BYTES && most * LEAST_US > round.bytes as f64 {
            rounds.bytes = ((most * LEAST_US * LONGER) as usize).min(MOST_BYTES);
            return self.measure(grid);
        }
        rounds.longest = rounds.longest.max(took);
        if rounds.next == 0 {
            // A look leaves nobody out.
            self.bytes = round.bytes;
        }
        rounds.take_in(grid, &round, figures, self.slowest);
        if let Some(next) = self.next_round(grid) {
            return AfterTelling::Measure(next);
        }
        let Some(Rounds { sent, received, longest, .. }) = self.rounds.take() else {
            return AfterTelling::Nothing;
        };
        self.usual.clear();
        self.since = Some(0.0);
        let rate = |(sent, received): (&f64, &f64)| Some(sent.min(*received)).filter(|&rate| rate > 0.0);
        self.rates = sent.iter().zip(&received).map(rate).collect();
        (self.unseen, self.look_cost) = (0.0, longest);
        AfterTelling::Rates(self.rates.clone())
    }

    /// Microseconds that the rounds of the last measuring took.
    pub fn cost_us(&self) -> f64 {
        self.cost
    }

    /// Whether what was found has changed the shares: else it is looked for less often.
    pub fn has_changed(&mut self, is_news: bool) {
        self.patience = if is_news { 1.0 } else { (2.0 * self.patience).min(MOST_PATIENCE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selection::shares;
    use proptest::prelude::*;

    /// Calls that take so long for a byte: ten between two tellings.
    fn calls(class: u32, pace: impl Into<Option<f64>>) -> CallsTook {
        CallsTook { calls: 10, class, pace: pace.into(), slowest: None }
    }

    /// Whether these rates are found, but for what computing has rounded.
    fn are(found: &[Option<f64>], rates: &[f64]) -> bool {
        let is = |(found, rate): (&Option<f64>, &f64)| found.is_some_and(|found| (found / rate - 1.0).abs() < 1e-9);
        found.len() == rates.len() && found.iter().zip(rates).all(is)
    }

    /// How long a round with these figures takes, in microseconds.
    fn us(round: &Round, grid: &Grid, figures: &[f64]) -> f64 {
        let served = round.served(grid);
        let times = served.iter().zip(figures).map(|(served, figure)| served * round.bytes as f64 / figure);
        times.filter(|time| time.is_finite()).fold(0.0, f64::max)
    }

    /// The rates that are found, and the rounds that it took.
    fn measured(
        profiler: &mut LinkProfiler,
        grid: &Grid,
        rates: &[f64],
        begun: AfterTelling,
    ) -> (Vec<Option<f64>>, usize) {
        let (mut outcome, mut passed) = (begun, profiler.rounds.as_ref().map_or(0.0, |rounds| rounds.passed));
        for rounds in 0.. {
            match outcome {
                AfterTelling::Measure(round) => {
                    assert_eq!(profiler.round(grid).as_ref(), Some(&round));
                    let figures = round.figures(grid, rates);
                    passed += us(&round, grid, &figures);
                    outcome = profiler.round_took(grid, RoundTook { figures: &figures, us: passed });
                }
                AfterTelling::Rates(rates) => return (rates, rounds),
                AfterTelling::Nothing => panic!("nothing is measured"),
            }
        }
        unreachable!("it ends");
    }

    #[test]
    fn a_slow_nic_and_a_slow_node_are_told_from_the_others() {
        for sizes in [&[4; 4][..], &[1; 7], &[2; 3], &[8; 16]] {
            let grid = Grid::blocks(sizes);
            for is_slow in [
                |grid: &Grid, rank| rank == grid.nranks() / 2,
                |grid: &Grid, rank| grid.node(Rank::from_index(rank)).index() == 1,
            ] {
                let rates: Vec<f64> =
                    (0..grid.nranks()).map(|rank| if is_slow(&grid, rank) { 10.0 } else { 25.0 }).collect();
                let mut profiler = LinkProfiler::default();
                let begun = profiler.calls_took(&grid, calls(25, 1.0), false);
                let (found, rounds) = measured(&mut profiler, &grid, &rates, begun);
                assert!(are(&found, &rates), "{grid}: {found:?}");
                assert!(rounds <= 4, "{rounds} rounds on {grid}");
            }
        }
    }

    #[test]
    fn on_fast_links_rounds_are_long_enough_to_be_timed() {
        let grid = Grid::blocks(&[1; 3]);
        let mut profiler = LinkProfiler::default();
        let AfterTelling::Measure(first) = profiler.calls_took(&grid, calls(25, None), false) else {
            panic!("it measures")
        };
        assert_eq!(first, Round { distance: 1, bytes: FIRST_BYTES, without: Vec::new() });
        let AfterTelling::Measure(next) = profiler.round_took(&grid, RoundTook { figures: &[1e3, 9e3, 2e3], us: 1e3 })
        else {
            panic!("it measures")
        };
        assert_eq!(next, Round { distance: 1, bytes: 22_500_000, without: Vec::new() });
        let begun = AfterTelling::Measure(next);
        assert!(are(&measured(&mut profiler, &grid, &[25_000.0; 3], begun).0, &[25_000.0; 3]));
    }

    /// Four nodes of four ranks that have found this slow, by even shares. Bytes for each microsecond; how long rounds took.
    fn measured_by_calls(rates: &[f64]) -> f64 {
        let grid = Grid::blocks(&[4; 4]);
        let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let pace = 1e3 * 6.0 / 16.0 / least;
        let slowest = shares::slowest(&grid, None, pace);
        assert!(slowest.is_some_and(|rate| (rate / least - 1.0).abs() < 1e-9), "{slowest:?} for {least}");
        let mut profiler = LinkProfiler::default();
        let begun = profiler.calls_took(&grid, CallsTook { slowest, ..calls(25, pace) }, false);
        assert!(are(&measured(&mut profiler, &grid, rates, begun).0, rates));
        profiler.cost_us()
    }

    #[test]
    fn where_calls_have_told_how_slow_links_are_measuring_takes_less_than_a_tenth_of_a_second() {
        for (slow, rate) in [(&[5][..], 6.25), (&[4, 5, 6, 7], 12.5), (&[], 25.0), (&[], 1000.0)] {
            let rates: Vec<f64> =
                (0..16).map(|rank| if slow.contains(&rank) { rate } else { f64::max(rate, 25.0) }).collect();
            let took = measured_by_calls(&rates);
            assert!(took < 85_000.0, "{took} us with {slow:?} at {rate}");
        }
        // Under that a round says nothing; and none is longer than where nothing is known.
        let slow: Vec<f64> = (0..16).map(|rank| if rank == 5 { 1.0 } else { 25.0 }).collect();
        let (took, floor) = (measured_by_calls(&slow), LEAST_BYTES as f64);
        assert!((1.0 * floor..1.1 * floor).contains(&took), "{took} us");
        let even = measured_by_calls(&[100.0; 16]);
        assert!((3.0 * FIRST_BYTES as f64 / 100.0 - even).abs() < 1.0, "{even} us");
    }

    #[test]
    fn who_is_slow_beyond_doubt_is_left_out_of_further_rounds_and_nobody_else() {
        let left_out = |sizes: &[usize], slow: &[usize], slowest: f64| {
            let grid = Grid::blocks(sizes);
            let rates: Vec<f64> =
                (0..grid.nranks()).map(|rank| if slow.contains(&rank) { 5.0 } else { 25.0 }).collect();
            let round = Round { distance: 1, bytes: FIRST_BYTES, without: Vec::new() };
            let found = round.slow(&grid, &round.figures(&grid, &rates), slowest);
            found.iter().map(|rank| rank.index()).collect::<Vec<usize>>()
        };
        let nobody = [] as [usize; 0];
        assert_eq!(left_out(&[4; 4], &[5], 4.8), [5]);
        assert_eq!(left_out(&[4; 4], &[4, 5, 6, 7], 4.8), [4, 5, 6, 7]);
        assert_eq!(left_out(&[1; 3], &[2], 4.8), [2]);
        assert_eq!(left_out(&[2; 2], &[3], 4.8), [1, 3], "the two of a rail meet nobody else");
        assert_eq!(left_out(&[1; 6], &[0, 2], 4.8), nobody, "the one between them may be quick");
        assert_eq!(left_out(&[1; 6], &[], 24.0), nobody);
        assert_eq!(left_out(&[4; 4], &[5], 24.0), nobody, "calls were quicker than such a link allows");
        assert_eq!(left_out(&[4; 4], &[5], 2.0), nobody, "there is a slower one");
        let round = Round { distance: 1, bytes: 7, without: Vec::new() };
        let busy = [25.0, 24.0, 7.0, 4.5, 24.0, 25.0];
        assert!(round.slow(&Grid::blocks(&[1; 6]), &busy, 4.5).is_empty(), "it is not alike both ways");
        let (grid, without) = (Grid::blocks(&[2; 3]), vec![Rank(3)]);
        let round = Round { distance: 1, bytes: 7, without };
        assert_eq!(round.blocks(&grid, Rank(3)), [vec![0; 6], vec![0; 6]]);
        assert_eq!(round.blocks(&grid, Rank(1)), [vec![0; 6], vec![0, 0, 0, 0, 0, 7]]);
    }

    #[test]
    fn links_are_measured_first_when_calls_are_slower_and_now_and_then_while_shares_hold() {
        let grid = Grid::blocks(&[2; 3]);
        let mut profiler = LinkProfiler::default();
        let mut measures = |class, pace, holds, is_news| {
            let begun = profiler.calls_took(&grid, calls(class, pace), holds);
            let AfterTelling::Measure(ref round) = begun else { return false };
            if profiler.rounds.as_ref().is_some_and(|rounds| rounds.looks) {
                let figures = round.figures(&grid, &[25.0; 6]);
                let us = us(round, &grid, &figures);
                let after = profiler.round_took(&grid, RoundTook { figures: &figures, us });
                assert_eq!(after, AfterTelling::Nothing, "all links are as they were");
                return false;
            }
            measured(&mut profiler, &grid, &[25.0; 6], begun);
            profiler.has_changed(is_news);
            true
        };
        // Ten calls of a mebibyte take as long as the four rounds of that.
        const PACE: f64 = 16.0;
        assert!(measures(20, Some(PACE), false, true), "the first time");
        assert!((0..200).all(|_| !measures(20, Some(1.05 * PACE), false, false)), "as before");
        assert!(!measures(25, Some(5.0 * PACE), false, false), "of others nothing is known");
        assert!(!measures(20, None, false, false) && measures(20, Some(1.2 * PACE), false, true), "slower");
        assert!(!measures(20, Some(PACE), false, false), "the usual pace is known anew");
        let slower: Vec<bool> = (0..12).map(|_| measures(20, Some(1.2 * PACE), false, true)).collect();
        let first = slower.iter().position(|&measures| measures).unwrap();
        assert!((6..10).contains(&first), "measuring has its price: {slower:?}");
        // Shares hold.
        let times: Vec<usize> = (0..1000).filter(|_| measures(20, Some(PACE), true, false)).collect();
        let waits: Vec<usize> = times.windows(2).map(|two| two[1] - two[0]).collect();
        let wanted = [50, 100, 200, 400];
        assert!((15..=25).contains(&times[0]) && waits.len() == 4, "{times:?}");
        assert!(waits.iter().zip(wanted).all(|(&wait, wanted)| wait.abs_diff(wanted) <= 1), "{waits:?}");
        // What is slower without a link that is gets less attention: here every telling but the first after links were measured.
        let mut has_measured = true;
        let mut slower = || {
            let pace = if has_measured { PACE } else { 1.2 * PACE };
            has_measured = measures(20, Some(pace), false, false);
            has_measured
        };
        let times = (0..600).filter(|_| slower()).count();
        assert!((4..=6).contains(&times), "{times}");
    }

    /// After how many tellings of ten calls it is found that links have become others.
    fn found_after(before: &[f64], now: &[f64]) -> Option<usize> {
        let grid = Grid::blocks(&[4; 4]);
        let mut profiler = LinkProfiler::default();
        let begun = profiler.calls_took(&grid, calls(20, 16.0), false);
        assert!(are(&measured(&mut profiler, &grid, before, begun).0, before));
        (1..200).find(|_| {
            let AfterTelling::Measure(round) = profiler.calls_took(&grid, calls(20, 16.0), true) else { return false };
            let figures = round.figures(&grid, now);
            let us = us(&round, &grid, &figures);
            match profiler.round_took(&grid, RoundTook { figures: &figures, us }) {
                AfterTelling::Nothing => false,
                begun => are(&measured(&mut profiler, &grid, now, begun).0, now),
            }
        })
    }

    #[test]
    fn while_shares_hold_one_round_now_and_then_sees_that_a_link_is_better_again() {
        let with = |rank: usize, rate: f64| {
            let mut rates = vec![25.0; 16];
            rates[rank] = rate;
            rates
        };
        for rank in [0, 5, 15] {
            // A round on the slow link takes as long as the calls of one telling.
            let found = found_after(&with(rank, 6.25), &with(rank, 25.0));
            assert!(found.is_some_and(|tellings| (20..=30).contains(&tellings)), "{found:?}");
        }
        // A link may also be seen to be slower by it, but calls show that.
        let unchanged = found_after(&with(3, 6.25), &with(3, 6.25)).unwrap();
        assert!(unchanged > 50, "links are measured as without looks: {unchanged}");
    }

    proptest! {
        #[test]
        fn any_grid_and_any_figures_come_to_an_end(
            sizes in proptest::collection::vec(1usize..5, 2..9),
            rates in proptest::collection::vec(1.0f64..100.0, 40)
        ) {
            let grid = Grid::blocks(&sizes);
            let rates = &rates[..grid.nranks()];
            let mut profiler = LinkProfiler::default();
            let begun = profiler.calls_took(&grid, calls(20, None), false);
            let (found, _) = measured(&mut profiler, &grid, rates, begun);
            for (rank, found) in found.iter().enumerate() {
                prop_assert!(found.is_none_or(|found| found <= 1.0001 * rates[rank]), "{:?} of {}", found, rates[rank]);
            }
            let AfterTelling::Nothing = profiler.calls_took(&grid, calls(20, 1.0), false) else { panic!("it has measured") };
            profiler = LinkProfiler::default();
            let mut outcome = profiler.calls_took(&grid, calls(20, None), false);
            while let AfterTelling::Measure(_) = outcome {
                outcome = profiler.round_took(&grid, RoundTook { figures: &vec![f64::NAN; grid.nranks()], us: 0.0 });
            }
            prop_assert_eq!(outcome, AfterTelling::Rates(vec![None; grid.nranks()]));
        }
    }
}
