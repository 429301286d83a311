//! How a rank waits: first awake, then giving way, then asleep.
//!
//! Spinning finds a message soonest, but where ranks outnumber processors it keeps the very rank from running that would
//! send it. So a rank that shares its processor does not spin: it yields, and soon sleeps until it is woken; one that has a
//! processor of its own spins and yields twenty times as long. Where others compute on its processor a yield costs a time
//! slice (4 ms), and a rank that is woken runs at once: there it sleeps without yielding, as soon as it has spun, and at once
//! where the one it may wait for was last on the same processor.
#![forbid(unsafe_code)]

use super::Transport;
use crate::error::Result;
use std::time::{Duration, Instant};

/// Polls between two looks at the clock.
const POLLS_PER_LOOK: u32 = 32;
/// A rank yields so many times as long as it spins.
const YIELDS_PER_SPIN: u32 = 20;
/// A rank that has a processor of its own waits awake so many times as long.
const AWAKE_ON_OWN: u32 = 20;
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
    polls: u32,
    since: Option<Instant>,
    /// The rank shares its processor.
    shares: bool,
    /// This wait does not yield, but sleeps.
    busy: bool,
    sleep: Duration,
}

impl Idle {
    /// Waits by polling for `spin_us`, then by yielding for twenty times as long, then by sleeping; a rank that has a
    /// processor of its own, as the transport says, takes twenty times as long for both, and one that shares does not poll.
    ///
    /// Yielding costs next to nothing where the processor is free, and where it is not it lets run whoever the rank
    /// waits for; so spinning is short. Measured: a peer that is not running costs a spinning rank its whole spin time.
    pub fn new(spin_us: u64) -> Idle {
        let spin = Duration::from_micros(spin_us);
        Idle { spin, polls: 0, since: None, shares: true, busy: false, sleep: FIRST_SLEEP }
    }

    /// Something happened: wait awake again.
    pub fn reset(&mut self) {
        self.polls = 0;
        self.since = None;
        self.sleep = FIRST_SLEEP;
    }

    /// The wait has slept elsewhere.
    pub fn has_slept(&mut self) {
        self.sleep = self.sleep.max(2 * FIRST_SLEEP);
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
            self.shares = transport.shares_processor();
            self.busy = transport.on_busy_processors();
            return Ok(());
        };
        let (spin, yields) = match self.shares {
            true => (Duration::ZERO, YIELDS_PER_SPIN * self.spin),
            false => (AWAKE_ON_OWN * self.spin, AWAKE_ON_OWN * YIELDS_PER_SPIN * self.spin),
        };
        if !spin.is_zero() && !self.polls.is_multiple_of(POLLS_PER_LOOK) {
            std::hint::spin_loop();
            return Ok(());
        }
        let waited = since.elapsed();
        if waited < spin {
            return Ok(());
        }
        if waited < yields && !self.busy {
            self.busy = transport.give_way();
            return Ok(());
        }
        self.fall_asleep(transport)
    }

    fn fall_asleep(&mut self, transport: &mut dyn Transport) -> Result<()> {
        transport.sleep(self.sleep)?;
        self.sleep = (2 * self.sleep).min(LONGEST_SLEEP);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::{Started, Token};
    use crate::topo::Rank;
    use crate::transport::{Envelope, Sink};

    /// Counts how a wait passes its time.
    #[derive(Default)]
    struct Counting {
        is_busy: bool,
        has_own: bool,
        yields: usize,
        sleeps: usize,
    }

    impl Transport for Counting {
        fn send(&mut self, _: Token, _: Rank, _: Envelope, _: &[crate::memory::Region]) -> Result<Started> {
            Ok(Started::Busy)
        }

        fn recv(&mut self, _: Token, _: Rank, _: Envelope, _: Sink<'_>) -> Result<Started> {
            Ok(Started::Busy)
        }

        fn poll(&mut self, _: &mut Vec<Token>) -> Result<()> {
            Ok(())
        }

        fn give_way(&mut self) -> bool {
            self.yields += 1;
            self.is_busy
        }

        fn shares_processor(&self) -> bool {
            !self.has_own
        }

        fn on_busy_processors(&self) -> bool {
            self.is_busy
        }

        fn sleep(&mut self, _: Duration) -> Result<()> {
            self.sleeps += 1;
            Ok(())
        }

        fn cancel(&mut self) {}
    }

    #[test]
    fn a_wait_on_busy_processors_sleeps_at_once_and_the_next_one_does_not_even_yield() {
        let mut idle = Idle::new(1_000_000);
        let mut transport = Counting::default();
        (0..10).for_each(|_| idle.pause(&mut transport).unwrap());
        assert_eq!((transport.yields, transport.sleeps), (9, 0), "the first pause only looks at the clock");
        transport.is_busy = true;
        (0..3).for_each(|_| idle.pause(&mut transport).unwrap());
        assert_eq!((transport.yields, transport.sleeps), (10, 2));
        idle.reset();
        (0..3).for_each(|_| idle.pause(&mut transport).unwrap());
        assert_eq!((transport.yields, transport.sleeps), (10, 4));
        transport.is_busy = false;
        idle.reset();
        (0..3).for_each(|_| idle.pause(&mut transport).unwrap());
        assert_eq!((transport.yields, transport.sleeps), (12, 4), "tried again");
    }

    #[test]
    fn a_rank_with_a_processor_of_its_own_that_others_compute_on_spins_and_then_sleeps_without_yielding() {
        let mut idle = Idle::new(1);
        let mut transport = Counting { has_own: true, is_busy: true, ..Counting::default() };
        let mut pauses = 0;
        while transport.sleeps == 0 {
            idle.pause(&mut transport).unwrap();
            pauses += 1;
        }
        assert!(pauses > 2 * POLLS_PER_LOOK, "slept after {pauses} polls");
        assert_eq!(transport.yields, 0);
    }

    #[test]
    fn a_rank_polls_on_a_processor_of_its_own_and_gives_a_shared_one_away() {
        for has_own in [true, false] {
            let mut idle = Idle::new(1_000_000);
            let mut transport = Counting { has_own, ..Counting::default() };
            (0..200).for_each(|_| idle.pause(&mut transport).unwrap());
            assert_eq!((transport.yields, transport.sleeps), (if has_own { 0 } else { 199 }, 0));
        }
    }
}
