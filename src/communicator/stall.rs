//! How long a thread has waited in vain, and what it does about it.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// How long nothing moves before ranks compare what they call.
const STALL: Duration = Duration::from_secs(1);
/// The longest time between two comparisons.
const LONGEST_STALL: Duration = Duration::from_secs(60);

/// How long nothing has moved, and when to ask about it: after a second, and at growing distances, since a rank that is
/// late may call something else when it comes.
pub(super) struct Stall {
    since: Option<Instant>,
    /// When devices are to be looked at.
    looks_after: Duration,
    asks_after: Duration,
    asked: usize,
}

impl Stall {
    /// Nothing has stalled.
    pub const NONE: Stall = Stall { since: None, looks_after: STALL, asks_after: STALL, asked: 0 };

    /// When nothing moved for the first time.
    pub fn since(&mut self) -> Instant {
        *self.since.get_or_insert_with(Instant::now)
    }

    /// Whether devices are to be looked at now.
    pub fn looks(&mut self) -> bool {
        let waited = self.since().elapsed();
        let looks = waited >= self.looks_after;
        if looks {
            self.looks_after = waited + STALL;
        }
        looks
    }

    /// How often it has been asked before, if it is to be asked now.
    pub fn due(&mut self) -> Option<usize> {
        let waited = self.since().elapsed();
        let due = waited >= self.asks_after;
        if due {
            self.asks_after = waited + waited.min(LONGEST_STALL);
            self.asked += 1;
        }
        due.then(|| self.asked - 1)
    }
}
