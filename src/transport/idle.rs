//! How a rank waits: first awake, then giving way, then asleep.
//!
//! Spinning finds a message soonest, but where ranks outnumber processors it keeps the very rank from running that would
//! send it. So an oversubscribed rank does not spin: it yields, and soon sleeps until it is woken.
#![forbid(unsafe_code)]

use super::Transport;
use crate::error::Result;
use std::time::{Duration, Instant};

/// Polls between two looks at the clock.
const POLLS_PER_LOOK: u32 = 32;
/// A rank yields so many times as long as it spins.
const YIELDS_PER_SPIN: u32 = 20;
/// The first sleep's limit; each further one is twice as long.
const FIRST_SLEEP: Duration = Duration::from_millis(1);
/// The longest sleep: errors and time-outs are noticed this late.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// How long a wait for something that wakes nobody stays awake, and how long its naps are then.
const AWAKE: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

/// The waiting policy of one wait loop.
#[derive(Debug)]
pub struct Idle {
    spin: Duration,
    yields: Duration,
    polls: u32,
    since: Option<Instant>,
    sleep: Duration,
}

impl Idle {
    /// Waits by polling for `spin_us`, then by yielding for twenty times as long, then by sleeping. `oversubscribed`: the
    /// node has more ranks than this process has processors, so polling is left out.
    ///
    /// Yielding costs next to nothing where the processor is free, and where it is not it lets run whoever the rank
    /// waits for; so spinning is short. Measured: a peer that is not running costs a spinning rank its whole spin time.
    pub fn new(spin_us: u64, oversubscribed: bool) -> Idle {
        let spin = Duration::from_micros(spin_us);
        let yields = YIELDS_PER_SPIN * spin;
        let spin = if oversubscribed { Duration::ZERO } else { spin };
        Idle { spin, yields, polls: 0, since: None, sleep: FIRST_SLEEP }
    }

    /// Something happened: wait awake again.
    pub fn reset(&mut self) {
        self.polls = 0;
        self.since = None;
        self.sleep = FIRST_SLEEP;
    }

    /// Whether the wait has become a sleep.
    pub fn sleeps(&self) -> bool {
        self.sleep > FIRST_SLEEP
    }

    /// Nothing happened, and what is waited for wakes nobody: gives way first, and then sleeps a little.
    pub fn nap(&mut self) {
        let since = *self.since.get_or_insert_with(Instant::now);
        match since.elapsed() < AWAKE {
            true => std::thread::yield_now(),
            false => std::thread::sleep(NAP),
        }
    }

    /// Nothing happened: passes a little time. Called between polls, with no lock held.
    pub fn pause(&mut self, transport: &mut dyn Transport) -> Result<()> {
        self.polls = self.polls.wrapping_add(1);
        let Some(since) = self.since else {
            self.since = Some(Instant::now());
            return Ok(());
        };
        if self.spin > Duration::ZERO && !self.polls.is_multiple_of(POLLS_PER_LOOK) {
            std::hint::spin_loop();
            return Ok(());
        }
        let waited = since.elapsed();
        if waited < self.spin {
            return Ok(());
        }
        if waited < self.yields {
            std::thread::yield_now();
            return Ok(());
        }
        transport.sleep(self.sleep)?;
        self.sleep = (2 * self.sleep).min(LONGEST_SLEEP);
        Ok(())
    }
}
