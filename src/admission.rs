//! Bounds for connections of strangers, over the whole process, and for the log lines about them.
//!
//! Whoever can reach a listening socket can connect to it. Until a caller has shown the secret its connection holds a
//! [`BudgetShare`] of a [`Budget`]. A listener that finds no place left does not accept: callers wait in the kernel's backlog,
//! where they cost the process nothing. To have places again it ends connections that have been served, and those that
//! have said nothing for [`GRACE`] although it has listened to them. A needed rank greets at once, so it is let in when
//! its turn comes.
//!
//! Each kind of listener has a budget of its own, so that callers of one do not keep out those of another. All together
//! take at most a quarter of the descriptors that the process may have. None accepts while fewer than [`RESERVE`] are left
//! ([`may_accept`]): the program needs some, too.
#![forbid(unsafe_code)]

use crate::error::counted;
use crate::fork::{self, PerProcess};
use crate::log::{self, Level};
use rustix::process::{getrlimit, Resource};
use std::fmt::Display;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

/// How long a caller that says nothing keeps its place when others may be waiting for one.
pub const GRACE: Duration = Duration::from_millis(200);
/// Descriptors that are left to the process; of a process with few, an eighth.
pub const RESERVE: u64 = 32;
/// The most and the fewest places of a budget.
const PLACES: (usize, usize) = (16, 256);
/// Refused connections that are told one by one in a minute; the rest are counted.
const TOLD: u64 = 5;
const MINUTE: Duration = Duration::from_secs(60);

/// Places for connections that have not been admitted.
pub struct Budget(PerProcess<AtomicUsize>);

/// Callers of the service.
pub static SERVICE: Budget = Budget::new();
/// Callers of the transports, of all communicators together.
pub static TRANSPORTS: Budget = Budget::new();

/// A place of a budget, free again when dropped.
#[derive(Debug)]
pub struct BudgetShare(&'static AtomicUsize);

impl Budget {
    const fn new() -> Budget {
        Budget(PerProcess::new(AtomicUsize::default))
    }

    /// How many places there are: an eighth of the descriptors that the process may have, within limits.
    pub fn most() -> usize {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        usize::try_from(limit / 8).unwrap_or(usize::MAX).clamp(PLACES.0, PLACES.1)
    }

    /// A place, if one is free.
    pub fn take(&'static self) -> Option<BudgetShare> {
        let (taken, most) = (self.0.get(), Budget::most());
        let more = |taken: usize| (taken < most).then_some(taken + 1);
        taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| BudgetShare(taken))
    }

    /// Whether no place is free.
    pub fn is_full(&'static self) -> bool {
        self.0.get().load(Ordering::Relaxed) >= Budget::most()
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether so many descriptors are left that a connection of `listener` may be accepted. Says so once if not.
pub fn may_accept(listener: impl AsFd) -> bool {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return true };
    let next = {
        // The system gives out the lowest number that is free, so it tells how many are not.
        let _hold = fork::hold();
        rustix::io::fcntl_dupfd_cloexec(listener, 0).map(|copy| rustix::fd::AsRawFd::as_raw_fd(&copy) as u64)
    };
    let enough = next.is_ok_and(|next| next + RESERVE.min(limit / 8) < limit);
    if !enough {
        static SAID: PerProcess<Once> = PerProcess::new(Once::new);
        SAID.get().call_once(|| {
            let text =
                format!("nearly all of {limit} file descriptors (ulimit -n) are taken: connections have to wait");
            log::write(Level::Warn, &text);
        });
    }
    enough
}

/// The lines about refused connections: a few a minute, and then how many more there were.
#[derive(Debug, Default)]
struct Tally {
    began: Option<Instant>,
    refused: u64,
}

impl Tally {
    /// Another connection was refused: whether it is to be told.
    fn note(&mut self, now: Instant) -> bool {
        self.began.get_or_insert(now);
        self.refused += 1;
        self.refused <= TOLD
    }

    /// At the end of a minute: how many were not told.
    fn settle(&mut self, now: Instant) -> Option<u64> {
        if self.began.is_none_or(|began| now < began + MINUTE) {
            return None;
        }
        let untold = self.refused.saturating_sub(TOLD);
        *self = Tally::default();
        (untold > 0).then_some(untold)
    }
}

static TALLY: PerProcess<Mutex<Tally>> = PerProcess::new(Mutex::default);

fn tally<T>(act: impl FnOnce(&mut Tally) -> T) -> T {
    act(&mut TALLY.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// A connection from `from` to the port called `port` was refused. Logged with INFO, a few times a minute.
pub fn refused(port: &str, from: impl Display, why: &str) {
    let now = Instant::now();
    sum_up(now);
    if tally(|tally| tally.note(now)) {
        crate::info!("{port} refused a connection from {from}: {why}");
    }
}

/// Logs how many connections were refused beside those that were told, once in a minute. To be called now and then.
pub fn sum_up(now: Instant) {
    if let Some(untold) = tally(|tally| tally.settle(now)) {
        crate::info!("{} more refused within a minute", counted(untold as usize, "connection"));
    }
}

/// When [`sum_up`] has something to say.
pub fn sum_up_due() -> Option<Instant> {
    tally(|tally| tally.began.filter(|_| tally.refused > TOLD).map(|began| began + MINUTE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_and_come_back() {
        static OWN: Budget = Budget::new();
        let places: Vec<BudgetShare> = std::iter::from_fn(|| OWN.take()).collect();
        assert_eq!(places.len(), Budget::most());
        assert!(OWN.is_full() && OWN.take().is_none());
        drop(places);
        assert!(!OWN.is_full());
    }

    #[test]
    fn a_hundred_thousand_refusals_are_a_few_lines_a_minute() {
        let (mut tally, began) = (Tally::default(), Instant::now());
        let told = (0..100_000).filter(|_| tally.note(began)).count();
        assert_eq!(told, 5);
        assert_eq!(tally.settle(began + MINUTE / 2), None);
        assert_eq!(tally.settle(began + MINUTE), Some(99_995));
        assert_eq!(tally.settle(began + MINUTE), None);
        assert!(tally.note(began + MINUTE), "a new minute");
        assert_eq!(tally.settle(began + 3 * MINUTE), None, "all were told");
    }
}
