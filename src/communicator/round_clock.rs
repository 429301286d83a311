//! How fast what a rank receives in a round of messages comes, without the burst at its beginning.
#![forbid(unsafe_code)]

use crate::selection::profile::Round;
use crate::topo::Rank;
use std::time::Instant;

/// What has been received of some ranks so far.
type Received<'a> = &'a dyn Fn(Rank) -> Option<u64>;

/// The times of one round on one rank.
#[derive(Debug)]
pub struct RoundClock {
    begun: Instant,
    /// Of whom this rank receives, how many bytes together, and after how many of these it is timed.
    from: Vec<Rank>,
    bytes: usize,
    prelude: u64,
    /// What they had sent when it began, where the transport knows that.
    before: Option<u64>,
    /// When it was last looked at.
    looked: Instant,
    /// What had come when it was first seen that the prelude had, and since when it may have been there.
    timed: Option<(Instant, u64)>,
}

impl RoundClock {
    /// A round begins in which so many bytes come of each rank.
    pub fn new(now: Instant, round: &Round, blocks: &[usize], received: Received<'_>) -> RoundClock {
        let from = (0..blocks.len()).filter(|&rank| blocks[rank] > 0).map(Rank::from_index).collect();
        let bytes = blocks.iter().sum();
        let prelude = round.prelude() as u64 * (bytes / round.bytes.max(1)) as u64;
        let clock = RoundClock { begun: now, from, bytes, prelude, before: None, looked: now, timed: None };
        RoundClock { before: clock.count(received), ..clock }
    }

    fn count(&self, received: Received<'_>) -> Option<u64> {
        self.from.iter().map(|&rank| received(rank)).sum()
    }

    /// Notes what has come since the last look: it came after that look. So a rank that has had no processor for a while finds less, and
    /// never more, than its link delivers.
    pub fn look(&mut self, now: Instant, received: Received<'_>) {
        if self.timed.is_none() {
            let came = self.count(received).zip(self.before).map(|(count, before)| count.saturating_sub(before));
            self.timed = came.filter(|&came| came > self.prelude).map(|came| (self.looked, came));
        }
        self.looked = now;
    }

    /// The round has ended: what was received for each microsecond. Of what came after the prelude, where that was seen when half of the rest
    /// was still to come. Not of all: ranks begin a round some milliseconds apart.
    pub fn figure(&self, now: Instant, received: Received<'_>) -> f64 {
        let us = |since: Instant| (now.duration_since(since).as_nanos() as f64 / 1e3).max(1e-3);
        let all = self.count(received).zip(self.before).map_or(0, |(count, before)| count.saturating_sub(before));
        let whole = self.bytes as f64 / us(self.begun);
        match self.timed {
            // Bytes on the wire may be others than those of the messages.
            Some((since, came)) if 2 * all.saturating_sub(came) >= all.saturating_sub(self.prelude) => {
                self.bytes as f64 * (all - came) as f64 / all as f64 / us(since)
            }
            _ => whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const ROUND: Round = Round { distance: 1, bytes: 1_000_000, without: Vec::new() };

    /// The figure where so many bytes have come after so many microseconds, at each look and at the end.
    fn figure(looks: &[(u64, u64)]) -> f64 {
        let begun = Instant::now();
        let at = |us: u64| begun + Duration::from_micros(us);
        let of = |bytes: u64| move |rank: Rank| (rank == Rank(2)).then_some(500 + bytes);
        let mut clock = RoundClock::new(begun, &ROUND, &[0, 0, 1_000_000], &of(0));
        let ((end, all), before) = looks.split_last().unwrap();
        before.iter().for_each(|&(us, bytes)| clock.look(at(us), &of(bytes)));
        clock.figure(at(*end), &of(*all))
    }

    #[test]
    fn what_a_bucket_lets_through_at_once_is_not_timed() {
        // 25 bytes for each microsecond, behind a burst.
        let looks: Vec<(u64, u64)> = (0..=34).map(|i| (1000 * i, 150_000 + 25_000 * i)).collect();
        let found = figure(&looks);
        assert!((24.0..=25.0).contains(&found), "{found}");
        let whole = 1_000_000.0 / 34_000.0;
        assert!(whole > 1.17 * 25.0);
    }

    #[test]
    fn a_rank_that_gets_no_processor_for_a_while_finds_less_and_not_more() {
        // The prelude is found with what came in ten milliseconds after it.
        let found = figure(&[(1000, 0), (2000, 50_000), (12_000, 300_000), (12_100, 300_000), (40_000, 1_000_000)]);
        assert!((18.0..25.0).contains(&found), "{found}");
        // What is left then is too little.
        let found = figure(&[(1000, 0), (38_000, 950_000), (38_001, 950_000), (40_000, 1_000_000)]);
        assert!((found - 25.0).abs() < 0.01, "{found}");
    }

    #[test]
    fn without_counts_the_whole_round_is_timed() {
        let begun = Instant::now();
        let none = |_: Rank| None;
        let mut clock = RoundClock::new(begun, &ROUND, &[0, 1_000_000, 1_000_000], &none);
        clock.look(begun + Duration::from_micros(10), &none);
        assert!((clock.figure(begun + Duration::from_micros(1000), &none) - 2000.0).abs() < 1e-6);
    }
}
