//! The order of calls inside the node, the same on all of its ranks.
//!
//! A provider wants all members of a node to make their calls in one order. With several segments in flight, which of a
//! plan's calls begins next depends on when messages arrive, and that differs from rank to rank. So the order follows from
//! the plan and the number of segments alone: calls of later phases lag behind those of the first by as many segments as the
//! window has room for, and a call that begins early waits for its place.
#![forbid(unsafe_code)]

use std::collections::HashMap;

/// The order of the calls of one run.
#[derive(Debug, Default)]
struct Sequence {
    /// Steps with the phase that each belongs to, phase by phase.
    calls: Vec<(u32, u32)>,
    segments: usize,
    /// How many segments a phase lags behind the one before.
    lag: usize,
    /// Where we are: a time, and the place in `calls`.
    time: usize,
    place: usize,
}

impl Sequence {
    fn new(mut calls: Vec<(u32, u32)>, segments: usize, window: usize) -> Sequence {
        calls.sort_by_key(|&(step, phase)| (phase, step));
        let last = calls.last().map_or(0, |&(_, phase)| phase as usize);
        // The last phase of a segment must come before the first of the one that takes its place in the window.
        let lag = (window.min(segments) - 1).checked_div(last).unwrap_or(0);
        Sequence { calls, segments, lag, time: 0, place: 0 }
    }

    /// The step and the segment that come next.
    fn next(&mut self) -> Option<(u32, usize)> {
        let end = self.segments + self.calls.last().map_or(0, |&(_, phase)| phase as usize * self.lag);
        while self.time < end {
            while let Some(&(step, phase)) = self.calls.get(self.place) {
                let segment = self.time.checked_sub(phase as usize * self.lag);
                match segment.filter(|&segment| segment < self.segments) {
                    Some(segment) => return Some((step, segment)),
                    None => self.place += 1,
                }
            }
            (self.time, self.place) = (self.time + 1, 0);
        }
        None
    }

    fn advance(&mut self) {
        self.place += 1;
    }
}

/// Calls that have begun and wait for their place in the order.
#[derive(Debug)]
pub struct CallSequence<T> {
    sequence: Sequence,
    /// How often each step has begun in this run.
    begun: HashMap<u32, usize>,
    waiting: HashMap<(u32, usize), T>,
}

impl<T> CallSequence<T> {
    /// No calls, of no run.
    pub fn new() -> CallSequence<T> {
        CallSequence { sequence: Sequence::default(), begun: HashMap::new(), waiting: HashMap::new() }
    }

    /// A run begins, with these steps and the phase of each.
    pub fn begin(&mut self, calls: Vec<(u32, u32)>, segments: usize, window: usize) {
        self.clear();
        self.sequence = Sequence::new(calls, segments, window);
    }

    /// Takes the call of a step's next segment.
    pub fn put(&mut self, step: u32, call: T) {
        let begun = self.begun.entry(step).or_default();
        self.waiting.insert((step, *begun), call);
        *begun += 1;
    }

    /// The call whose turn it is, if it has begun; it keeps its turn until [`advance`](CallSequence::advance). Places whose calls
    /// never begin, as `is_empty` says of a step and a segment, are passed over.
    pub fn next(&mut self, is_empty: impl Fn(u32, usize) -> bool) -> Option<T> {
        while let Some((step, segment)) = self.sequence.next() {
            if let Some(call) = self.waiting.remove(&(step, segment)) {
                return Some(call);
            }
            if !is_empty(step, segment) {
                return None;
            }
            self.sequence.advance();
        }
        None
    }

    /// Gives the turn to the next one.
    pub fn advance(&mut self) {
        self.sequence.advance();
    }

    /// Takes back the call whose turn it still is.
    pub fn put_back(&mut self, call: T) {
        if let Some(place) = self.sequence.next() {
            self.waiting.insert(place, call);
        }
    }

    /// How many calls wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = CallSequence::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Random;

    fn order(calls: &[(u32, u32)], segments: usize, window: usize) -> Vec<(u32, usize)> {
        let mut sequence = Sequence::new(calls.to_vec(), segments, window);
        let mut order = Vec::new();
        while let Some(next) = sequence.next() {
            order.push(next);
            sequence.advance();
        }
        order
    }

    #[test]
    fn later_phases_lag_behind_and_every_call_comes_once() {
        assert_eq!(order(&[(5, 1), (2, 0)], 3, 1), [(2, 0), (5, 0), (2, 1), (5, 1), (2, 2), (5, 2)]);
        assert_eq!(order(&[(2, 0), (5, 1)], 4, 3), [(2, 0), (2, 1), (2, 2), (5, 0), (2, 3), (5, 1), (5, 2), (5, 3)]);
        assert_eq!(order(&[(1, 0), (3, 0)], 2, 4), [(1, 0), (3, 0), (1, 1), (3, 1)]);
        assert_eq!(order(&[], 3, 4), []);
    }

    /// A segment may begin only when the one whose place in the window it takes has ended.
    #[test]
    fn the_order_never_wants_a_segment_that_the_window_has_no_room_for() {
        for phases in 1..5 {
            for window in 1..7 {
                let calls: Vec<(u32, u32)> = (0..phases).map(|phase| (phase, phase)).collect();
                let order = order(&calls, 10, window);
                assert_eq!(order.len(), phases as usize * 10);
                let at = |call: (u32, usize)| order.iter().position(|&other| other == call).unwrap();
                for segment in window..10 {
                    assert!(at((phases - 1, segment - window)) < at((0, segment)), "{phases} {window} {segment}");
                }
            }
        }
    }

    /// Issues the calls of a run that begin in a random order, of each step one segment after another; some find no room
    /// at first.
    fn issued(calls: &[(u32, u32)], segments: usize, window: usize, seed: u64) -> Vec<(u32, usize)> {
        let mut random = Random::new(seed);
        let mut ordered = CallSequence::new();
        ordered.begin(calls.to_vec(), segments, window);
        let mut left: Vec<(u32, usize)> = calls.iter().map(|&(step, _)| (step, 0)).collect();
        let mut issued = Vec::new();
        while !left.is_empty() {
            let index = random.below(left.len() as u64) as usize;
            let (step, segment) = left[index];
            ordered.put(step, (step, segment));
            match segment + 1 < segments {
                true => left[index].1 += 1,
                false => drop(left.remove(index)),
            }
            while let Some(call) = ordered.next(|_, _| false) {
                if random.one_in(3) {
                    ordered.put_back(call);
                    continue;
                }
                ordered.advance();
                issued.push(call);
            }
        }
        assert_eq!(ordered.len(), 0);
        issued
    }

    #[test]
    fn whichever_call_begins_first_they_are_issued_in_one_order() {
        let calls = [(4, 0), (7, 1), (9, 2)];
        for seed in 1..200 {
            for window in [1, 2, 4] {
                assert_eq!(issued(&calls, 6, window, seed), order(&calls, 6, window), "{window} {seed}");
            }
        }
    }
}
