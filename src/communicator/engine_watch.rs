//! Which of several threads that wait for operations of one communicator waits inside its engine.
//!
//! Collectives run one after another, but messages of `strataCommInitHost`'s communicators may be waited for by many threads
//! at once ([`super::independent`]). One of them *watches*: it polls, and sleeps in the transport with the engine locked. The
//! others sleep here until something of theirs may have completed or nobody watches. The thread of a collective takes
//! the watch from that of a message, since it polls in any case. Who else needs the engine says that it *wants* it and wakes the
//! one that sleeps there, who lets it in before it locks the engine again.
#![forbid(unsafe_code)]

use super::engine::Engine;
use super::Comm;
use crate::sync::biased::BiasedGuard;
use crate::sync::locked;
use crate::transport::Waker;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A thread's claim to watch: that of nobody at first, and void once another thread has a later one.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Claim(u64);

impl Claim {
    /// Whether the thread watches, unless the watch has been taken from it since it last asked.
    pub fn is_made(&self) -> bool {
        *self != NOBODY
    }
}

const NOBODY: Claim = Claim(0);

#[derive(Debug, Default)]
struct Claims {
    issued: u64,
    /// Who watches.
    valid: Claim,
}

impl Claims {
    fn issue(&mut self) -> Claim {
        self.issued += 1;
        self.valid = Claim(self.issued);
        Claim(self.issued)
    }
}

/// What the threads of one communicator know of each other.
#[derive(Debug, Default)]
pub struct EngineWatch {
    claims: Mutex<Claims>,
    changed: Condvar,
    /// Changes when something has completed, and when nobody watches any more.
    news: AtomicU64,
    asleep: AtomicUsize,
    wanting: AtomicUsize,
}

impl EngineWatch {
    /// How much news there has been. To be read while the engine is locked, before it is looked at.
    pub fn news(&self) -> u64 {
        self.news.load(Ordering::SeqCst)
    }

    /// Has a thread that waits for messages watch if nobody does; whether it watches, from now on or still.
    pub fn take(&self, claim: &mut Claim) -> bool {
        let mut claims = locked(&self.claims);
        if claims.valid == NOBODY {
            *claim = claims.issue();
        } else if claims.valid != *claim {
            *claim = NOBODY;
        }
        claim.is_made()
    }

    /// Has the thread of the operation whose turn it is watch; whether another one did.
    pub fn seize(&self, claim: &mut Claim) -> bool {
        let mut claims = locked(&self.claims);
        let had = claims.valid != NOBODY;
        *claim = claims.issue();
        had
    }

    /// The thread does not watch any more. One that the watch was taken from has nothing to give up.
    pub fn give_up(&self, claim: &mut Claim) {
        let given = std::mem::take(claim);
        if !given.is_made() {
            return;
        }
        let mut claims = locked(&self.claims);
        if claims.valid == given {
            claims.valid = NOBODY;
        }
        drop(claims);
        self.tell();
    }

    /// Wakes those who sleep here.
    pub fn tell(&self) {
        self.news.fetch_add(1, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            // Who has looked at the news and not fallen asleep yet holds it.
            drop(locked(&self.claims));
            self.changed.notify_all();
        }
    }

    /// Sleeps until there is more news than `seen`, for at most `limit`; whether there is.
    pub fn wait(&self, seen: u64, limit: Duration) -> bool {
        let claims = locked(&self.claims);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let nothing = |claims: &mut Claims| self.news() == seen && claims.valid != NOBODY;
        drop(self.changed.wait_timeout_while(claims, limit, nothing));
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        self.news() != seen
    }

    /// Says that a thread wants the engine, as long as the result lives.
    pub fn want(&self) -> Wants<'_> {
        self.wanting.fetch_add(1, Ordering::SeqCst);
        Wants(&self.wanting)
    }

    /// Lets those have the engine that want it.
    pub fn let_in(&self) {
        while self.wanting.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
    }
}

/// A thread that wants the engine.
pub struct Wants<'a>(&'a AtomicUsize);

impl Drop for Wants<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Comm {
    /// The engine. Where several threads may wait for it, one that sleeps inside is woken; who has the `claim` to watch lets
    /// the others in first.
    pub(super) fn engine(&self, claim: &Claim) -> BiasedGuard<'_, Option<Engine>> {
        if self.numbers.is_none() {
            return self.engine.lock();
        }
        if claim.is_made() {
            self.watch.let_in();
        }
        self.engine.try_lock().unwrap_or_else(|| {
            let _wants = self.watch.want();
            self.waker.iter().for_each(Waker::wake);
            self.engine.lock()
        })
    }

    /// Has threads that wait for messages look at what has changed beside the engine.
    pub(super) fn look_again(&self) {
        self.waker.iter().for_each(Waker::wake);
        self.watch.tell();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn one_thread_watches_at_a_time_and_a_turn_comes_first() {
        let watch = EngineWatch::default();
        let (mut one, mut other, mut turn) = <(Claim, Claim, Claim)>::default();
        assert!(watch.take(&mut one) && !watch.take(&mut other) && watch.take(&mut one));
        assert!(watch.seize(&mut turn), "a message's thread is to be woken");
        assert!(!watch.take(&mut other) && one.is_made(), "it has not asked since");
        watch.give_up(&mut one);
        assert!(!watch.take(&mut other), "the turn still watches");
        watch.give_up(&mut turn);
        assert!(watch.take(&mut other) && !watch.take(&mut one));
    }

    #[test]
    fn a_claim_of_before_a_turn_is_void_after_it() {
        let watch = EngineWatch::default();
        let (mut one, mut other, mut turn) = <(Claim, Claim, Claim)>::default();
        assert!(watch.take(&mut one));
        watch.seize(&mut turn);
        watch.give_up(&mut turn);
        assert!(watch.take(&mut other) && one.is_made());
        let mut late = Claim(one.0);
        assert!(!watch.take(&mut one) && !one.is_made());
        watch.give_up(&mut late);
        assert!(!watch.take(&mut one) && watch.take(&mut other));
    }

    #[test]
    fn who_sleeps_wakes_for_news_and_for_the_end_of_the_watch_and_misses_neither() {
        let watch = Arc::new(EngineWatch::default());
        assert!(!watch.wait(watch.news(), LIMIT), "nobody watches, so nobody would wake it");
        let mut claim = Claim::default();
        watch.seize(&mut claim);
        let seen = watch.news();
        watch.tell();
        assert!(watch.wait(seen, LIMIT), "what came before it slept counts");
        for ends in [false, true] {
            let seen = watch.news();
            let sleeper = watch.clone();
            let sleeps = std::thread::spawn(move || sleeper.wait(seen, LIMIT));
            while watch.asleep.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            if ends {
                watch.give_up(&mut claim);
            } else {
                watch.tell();
            }
            assert!(sleeps.join().unwrap());
        }
        watch.seize(&mut claim);
        assert!(!watch.wait(watch.news(), Duration::from_millis(1)));
    }
}
