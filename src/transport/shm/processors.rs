//! Whether others than ranks compute on the node's processors.
//!
//! A rank that yields gets its processor back at once where nobody else wants it, after the others' turns where ranks share
//! it, and after a time slice where somebody computes. The last two are told apart by a note that each rank makes when it
//! gives its processor away: where none was made for as long as the yield took, nobody else's rank has run there.

use super::segment::{ProcessorCells, PROCESSORS};
use std::sync::atomic::Ordering::Relaxed;

/// A yield that took so long, in ns, was a time slice, or many turns of other ranks.
const LATE_NS: u64 = 2_000_000;
/// How long processors are taken to be busy after a late yield, in ns, and at most, where that goes on.
const BUSY_NS: u64 = 10_000_000;
const LONGEST_BUSY_NS: u64 = 2_000_000_000;

/// The ranks' notes about processors.
#[derive(Debug, Clone, Copy)]
pub struct ProcessorNotes<'a> {
    processors: &'a ProcessorCells,
}

/// The system's monotonic clock, which all processes share.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl<'a> ProcessorNotes<'a> {
    /// Notes in a segment.
    pub fn new(processors: &'a ProcessorCells) -> ProcessorNotes<'a> {
        ProcessorNotes { processors }
    }

    /// Notes that a rank is on this processor, and is about to leave it. Returns which, and when.
    fn note(&self) -> (usize, u64) {
        let (processor, now) = (rustix::thread::sched_getcpu() % PROCESSORS, now_ns());
        self.processors.touched[processor].0.store(now, Relaxed);
        (processor, now)
    }

    /// A rank is about to sleep.
    pub fn touch(&self) {
        self.note();
    }

    /// Yields the processor; whether somebody who is no rank has computed on it meanwhile.
    pub fn give_way(&self) -> bool {
        let (processor, before) = self.note();
        std::thread::yield_now();
        let now = now_ns();
        let late = now.saturating_sub(before) >= LATE_NS && self.absent(processor, now);
        if late {
            self.say_busy(now);
        }
        late
    }

    /// Whether no rank has noted that it was on a processor lately.
    fn absent(&self, processor: usize, now: u64) -> bool {
        now.saturating_sub(self.processors.touched[processor].0.load(Relaxed)) >= LATE_NS
    }

    /// Tells all ranks; the longer the more often it was so in a row.
    fn say_busy(&self, now: u64) {
        let (until, last) = (self.processors.busy_until.0.load(Relaxed), self.processors.busy_ns.0.load(Relaxed));
        if now < until {
            return;
        }
        let length = if now - until < last { (2 * last).min(LONGEST_BUSY_NS) } else { BUSY_NS };
        self.processors.busy_ns.0.store(length, Relaxed);
        self.processors.busy_until.0.store(now + length, Relaxed);
    }

    /// Whether processors are taken to be busy.
    pub fn are_busy(&self) -> bool {
        now_ns() < self.processors.busy_until.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment::Segment;
    use super::*;

    #[test]
    fn processors_are_busy_for_longer_the_more_often_they_are_found_so() {
        let segment = Segment::of_heap(1);
        let presence = ProcessorNotes::new(segment.processors());
        assert!(!presence.are_busy());
        let start = now_ns();
        let mut at = start;
        for length in [BUSY_NS, 2 * BUSY_NS, 4 * BUSY_NS] {
            presence.say_busy(at);
            assert_eq!(segment.processors().busy_until.0.load(Relaxed), at + length);
            // While that lasts nobody makes it longer.
            presence.say_busy(at + length / 2);
            assert_eq!(segment.processors().busy_until.0.load(Relaxed), at + length);
            at += length + 1;
        }
        assert!(presence.are_busy());
        at += 4 * BUSY_NS;
        presence.say_busy(at);
        assert_eq!(segment.processors().busy_until.0.load(Relaxed), at + BUSY_NS, "after as long without, anew");
        (0..20).for_each(|_| {
            at = segment.processors().busy_until.0.load(Relaxed);
            presence.say_busy(at);
        });
        assert_eq!(segment.processors().busy_ns.0.load(Relaxed), LONGEST_BUSY_NS);
    }

    #[test]
    fn a_rank_that_was_there_makes_a_late_yield_no_sign_of_others() {
        let segment = Segment::of_heap(1);
        let presence = ProcessorNotes::new(segment.processors());
        let (processor, at) = presence.note();
        assert!(!presence.absent(processor, at + LATE_NS - 1));
        assert!(presence.absent(processor, at + LATE_NS));
        // A rank that came there later.
        segment.processors().touched[processor].0.store(at + LATE_NS, Relaxed);
        assert!(!presence.absent(processor, at + LATE_NS));
    }
}
