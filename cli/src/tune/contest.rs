//! Which candidate is the fastest, within a time: successive halving.
//!
//! Everybody is looked at once, and the slower half goes, again and again, while those that stay get more time. The best
//! two are tried with other segments, then the best with other windows, and the last few are measured in turns, so that
//! whatever else the machine does meanwhile strikes all alike.
#![forbid(unsafe_code)]

use super::bench::{Bench, Case};
use super::candidates::Candidate;
use std::time::Instant;
use strata::error::Result;
use strata::selection::table::Measured;

/// Candidates that are measured to the end.
const FINALISTS: usize = 3;
/// How often the finalists are measured in turns.
const FINAL_ROUNDS: usize = 4;
/// Who takes so many times as long as the best goes at once.
const HOPELESS: f64 = 3.0;
/// Samples of one candidate in a row, at most.
const MOST_SAMPLES: f64 = 32.0;
/// Samples of a first impression, at most.
const MOST_FIRST_SAMPLES: f64 = 5.0;
/// The part of the time for first impressions of all newcomers.
const FIRST_PART: f64 = 0.1;
/// A sample is at least so long, so that clocks and barriers do not matter.
const SAMPLE_SECONDS: f64 = 200e-6;
/// Calls in a sample, at most.
const MOST_CALLS: f64 = 64.0;
/// Other segments and windows are taken if they are better by so much: what Strata does by itself adapts to other sizes.
const WORTH: f64 = 1.02;

struct Entrant {
    candidate: Candidate,
    samples: Vec<f64>,
}

impl Entrant {
    fn median(&self) -> f64 {
        quantile(&self.samples, 0.5)
    }

    /// How many samples of how many calls take about so many seconds.
    fn sampling(&self, seconds: f64, most: f64) -> (usize, usize) {
        let time = self.median().max(1e-9);
        let calls = (SAMPLE_SECONDS / time).clamp(1.0, MOST_CALLS).floor();
        let samples = (seconds / (time * calls)).clamp(1.0, most).floor();
        (samples as usize, calls as usize)
    }

    fn measured(self) -> Measured {
        let us = |at: f64| quantile(&self.samples, at) * 1e6;
        let [low_us, median_us, high_us] = [0.25, 0.5, 0.75].map(us);
        let Candidate { algorithm, segment_bytes, window } = self.candidate;
        Measured { algorithm, segment_bytes, window, median_us, low_us, high_us, samples: self.samples.len() }
    }
}

/// The value below which this part of the samples lies, between the two nearest ones.
fn quantile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::INFINITY };
    let at = part * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// What measures: the bench, or a test's law.
pub trait Stopwatch {
    /// Seconds of samples of some calls, or nothing if the candidate cannot do it.
    fn time(&mut self, candidate: &Candidate, size: (usize, usize)) -> Result<Option<Vec<f64>>>;
    /// Seconds since the contest began, the same on all processes.
    fn elapsed(&mut self) -> Result<f64>;
    /// Bytes of a block, if other segments can matter to this candidate.
    fn block_bytes(&self, candidate: &Candidate) -> Option<usize>;
}

struct OnBench<'a, 'b> {
    bench: &'a mut Bench<'b>,
    case: Case,
    start: Instant,
}

impl Stopwatch for OnBench<'_, '_> {
    fn time(&mut self, candidate: &Candidate, size: (usize, usize)) -> Result<Option<Vec<f64>>> {
        self.bench.time(candidate, &self.case, size)
    }

    fn elapsed(&mut self) -> Result<f64> {
        self.bench.elapsed(self.start)
    }

    fn block_bytes(&self, candidate: &Candidate) -> Option<usize> {
        let bytes = self.case.block_bytes();
        candidate.has_segments(bytes, self.bench.machine().inter == "vendor").then_some(bytes)
    }
}

/// All that could do it, the fastest first, after about so many seconds.
pub fn run(bench: &mut Bench, case: &Case, candidates: Vec<Candidate>, seconds: f64) -> Result<Vec<Measured>> {
    let start = Instant::now();
    hold(&mut OnBench { bench, case: *case, start }, candidates, seconds)
}

/// The entrants that are still in, and those that are not.
struct Contest<'a, W> {
    watch: &'a mut W,
    seconds: f64,
    alive: Vec<Entrant>,
    out: Vec<Entrant>,
}

fn hold(watch: &mut impl Stopwatch, candidates: Vec<Candidate>, seconds: f64) -> Result<Vec<Measured>> {
    let mut contest = Contest { watch, seconds, alive: Vec::new(), out: Vec::new() };
    contest.enter(candidates)?;
    while contest.alive.len() > FINALISTS {
        contest.keep(contest.alive.len().div_ceil(2).max(FINALISTS));
        contest.look(0.15)?;
    }
    let segments: Vec<Candidate> = (contest.alive.iter().take(2))
        .filter_map(|entrant| Some(entrant.candidate.with_segments(contest.watch.block_bytes(&entrant.candidate)?)))
        .flatten()
        .collect();
    if !segments.is_empty() {
        contest.enter(segments)?;
        contest.keep(2 * FINALISTS);
        contest.look(0.2)?;
        contest.keep(FINALISTS);
        let best = contest.alive.first().map(|entrant| entrant.candidate.clone());
        if let Some(best) = best.filter(|best| contest.watch.block_bytes(best).is_some()) {
            contest.enter(best.with_windows())?;
            contest.keep(FINALISTS);
        }
    }
    for round in 0..FINAL_ROUNDS {
        contest.look(1.0 / (FINAL_ROUNDS - round) as f64)?;
    }
    Ok(contest.ranked())
}

impl<W: Stopwatch> Contest<'_, W> {
    /// Calls each newcomer once to warm up and once more, and where they are short some times for a first impression.
    fn enter(&mut self, candidates: Vec<Candidate>) -> Result<()> {
        let each = self.seconds * FIRST_PART / candidates.len().max(1) as f64;
        for candidate in candidates {
            if self.watch.time(&candidate, (1, 1))?.is_none() {
                continue;
            }
            let Some(once) = self.watch.time(&candidate, (1, 1))? else { continue };
            let mut entrant = Entrant { candidate, samples: once };
            if entrant.median() < each {
                let size = entrant.sampling(each, MOST_FIRST_SAMPLES);
                // The first one was in a hurry.
                entrant.samples = self.watch.time(&entrant.candidate, size)?.unwrap_or(entrant.samples);
            }
            self.alive.push(entrant);
        }
        self.sort();
        Ok(())
    }

    fn sort(&mut self) {
        self.alive.sort_by(|one, other| one.median().total_cmp(&other.median()));
    }

    /// Leaves the best so many in, and of those none that is hopeless; the best with Strata's own segments and window is
    /// always one of them.
    fn keep(&mut self, most: usize) {
        let best = self.alive.first().map_or(0.0, Entrant::median);
        let hopeful = self.alive.iter().take_while(|entrant| entrant.median() <= HOPELESS * best).count();
        let most = most.min(hopeful.max(1)).min(self.alive.len());
        if let Some(plain) = self.alive.iter().position(|entrant| entrant.candidate.is_plain() && most > 0) {
            let plain = self.alive.remove(plain);
            let at = self.alive.iter().take(most - 1).take_while(|other| other.median() <= plain.median()).count();
            self.alive.insert(at, plain);
        }
        self.out.extend(self.alive.drain(most..));
    }

    /// Measures all that are in, in turns, within this part of the time that is left.
    fn look(&mut self, part: f64) -> Result<()> {
        let left = (self.seconds - self.watch.elapsed()?).max(0.0) * part;
        let each = left / self.alive.len().max(1) as f64;
        for entrant in &mut self.alive {
            let size = entrant.sampling(each, MOST_SAMPLES);
            if let Some(more) = self.watch.time(&entrant.candidate, size)? {
                entrant.samples.extend(more);
            }
        }
        self.sort();
        Ok(())
    }

    fn ranked(mut self) -> Vec<Measured> {
        // Finalists first: what the others have is a first impression.
        let best = self.alive.first().map_or(0.0, Entrant::median);
        let plain = |entrant: &Entrant| entrant.candidate.is_plain() && entrant.median() <= WORTH * best;
        if let Some(at) = self.alive.iter().position(plain) {
            let plain = self.alive.remove(at);
            self.alive.insert(0, plain);
        }
        self.out.sort_by(|one, other| one.median().total_cmp(&other.median()));
        self.alive.into_iter().chain(self.out).map(Entrant::measured).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which everything takes what a law says, and time passes by that.
    struct Law<F> {
        seconds: F,
        now: f64,
        calls: usize,
    }

    impl<F: Fn(&Candidate) -> Option<f64>> Stopwatch for Law<F> {
        fn time(&mut self, candidate: &Candidate, (samples, calls): (usize, usize)) -> Result<Option<Vec<f64>>> {
            let Some(seconds) = (self.seconds)(candidate) else { return Ok(None) };
            self.now += seconds * (samples * calls) as f64;
            self.calls += samples * calls;
            Ok(Some(vec![seconds; samples]))
        }

        fn elapsed(&mut self) -> Result<f64> {
            Ok(self.now)
        }

        fn block_bytes(&self, candidate: &Candidate) -> Option<usize> {
            (candidate.algorithm != "a0").then_some(200_000)
        }
    }

    fn candidates(count: usize) -> Vec<Candidate> {
        let named = |index| Candidate { algorithm: format!("a{index}"), segment_bytes: 0, window: 0 };
        (0..count).map(named).collect()
    }

    fn held(count: usize, budget: f64, seconds: impl Fn(&Candidate) -> Option<f64>) -> (Vec<Measured>, f64) {
        let mut law = Law { seconds, now: 0.0, calls: 0 };
        let measured = hold(&mut law, candidates(count), budget).unwrap();
        (measured, law.now)
    }

    fn index(candidate: &Candidate) -> f64 {
        candidate.algorithm[1..].parse().unwrap()
    }

    #[test]
    fn the_fastest_wins_with_its_best_segment_and_window_and_gets_most_of_the_time() {
        let law = |candidate: &Candidate| {
            let plain = 1e-3 * (1.0 + (index(candidate) - 5.0).abs());
            let segment = if candidate.segment_bytes == 64 << 10 { 0.8 } else { 1.0 };
            Some(plain * segment * if candidate.window == 8 { 0.9 } else { 1.0 })
        };
        let (measured, took) = held(12, 2.0, law);
        let best = &measured[0];
        assert_eq!((best.algorithm.as_str(), best.segment_bytes, best.window), ("a5", 64 << 10, 8));
        assert!((best.median_us - 720.0).abs() < 1e-6, "{best:?}");
        assert!(took < 2.2, "{took}");
        let slowest = measured.iter().find(|one| one.algorithm == "a11").unwrap();
        assert!(best.samples > 10 * slowest.samples, "{} and {}", best.samples, slowest.samples);
        assert!((0..12).all(|index| measured.iter().any(|one| one.algorithm == format!("a{index}"))));
    }

    #[test]
    fn strata_s_own_segments_stay_where_others_hardly_help_and_who_cannot_do_it_is_left_out() {
        let law = |candidate: &Candidate| match index(candidate) as usize {
            0 => None,
            _ => Some(if candidate.is_plain() { 1e-3 } else { 0.99e-3 }),
        };
        let (measured, _) = held(4, 1.0, law);
        assert_eq!((measured[0].segment_bytes, measured[0].window), (0, 0));
        assert!(measured.iter().all(|one| one.algorithm != "a0"));
    }

    #[test]
    fn a_budget_that_is_spent_costs_few_calls() {
        let (measured, took) = held(8, 0.0, |candidate| Some(0.1 * (1.0 + index(candidate))));
        assert_eq!(measured[0].algorithm, "a0");
        assert!(took < 15.0, "{took}");
    }

    #[test]
    fn quantiles_lie_between_the_samples() {
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(|at| quantile(&[4.0, 1.0, 3.0, 2.0], at)), [1.0, 1.75, 2.5, 4.0]);
        assert_eq!(quantile(&[], 0.5), f64::INFINITY);
    }
}
