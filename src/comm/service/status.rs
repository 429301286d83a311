//! How a rank is: written by its engine with plain atomics, read by the service's thread when others ask.
#![forbid(unsafe_code)]

use super::wire::Answer;
use crate::error::Error;
use crate::topo::Rank;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

type Wake = Box<dyn Fn() + Send + Sync>;

/// One rank's state in one communicator.
#[derive(Default)]
pub struct Status {
    begun: AtomicU64,
    finished: AtomicU64,
    /// The awaited rank and one, or 0.
    waiting_for: AtomicU64,
    aborted: AtomicBool,
    failure: OnceLock<Error>,
    wake: Mutex<Option<Wake>>,
}

impl Status {
    /// A rank that has done nothing yet. `wake` is called once, from the service's thread, when a failure arrives.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Status {
        Status { wake: Mutex::new(Some(Box::new(wake))), ..Status::default() }
    }

    /// Another operation has been begun; returns its number, from 1.
    pub fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Another operation has been finished.
    pub fn finish(&self) {
        self.finished.fetch_add(1, Ordering::Relaxed);
    }

    /// How many operations have been begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// How many operations have been finished.
    pub fn finished(&self) -> u64 {
        self.finished.load(Ordering::Relaxed)
    }

    /// The rank whose message is awaited now, or nothing.
    pub fn wait_for(&self, rank: Option<Rank>) {
        self.waiting_for.store(rank.map_or(0, |rank| u64::from(rank.0) + 1), Ordering::Relaxed);
    }

    /// The rank has aborted the communicator.
    pub fn set_aborted(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    /// Whether the rank has aborted the communicator.
    pub fn aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// What failed, if anything. One load, so the executor may ask at every turn.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Puts a failure in. The first one stays and wakes the waiter; returns whether this was it.
    pub fn fail(&self, error: Error) -> bool {
        let first = self.failure.set(error).is_ok();
        if first {
            let wake = self.wake.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if let Some(wake) = &*wake {
                wake();
            }
        }
        first
    }

    /// As others are told.
    pub fn answer(&self) -> Answer {
        let waiting_for = self.waiting_for.load(Ordering::Relaxed);
        Answer {
            begun: self.begun(),
            finished: self.finished(),
            waiting_for: waiting_for.checked_sub(1).and_then(|rank| u32::try_from(rank).ok()),
            aborted: self.aborted(),
            left: false,
            failure: self.failure().map(|error| error.text().to_string()).unwrap_or_default(),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.answer().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_first_failure_stays_and_wakes_once() {
        let woken = Arc::new(AtomicU64::new(0));
        let counter = woken.clone();
        let status = Status::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        assert!(status.fail(Error::Remote("first".to_string())));
        assert!(!status.fail(Error::Remote("second".to_string())));
        assert_eq!(status.failure().unwrap().text(), "first");
        assert_eq!(woken.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn an_answer_tells_counts_and_the_awaited_rank() {
        let status = Status::default();
        assert_eq!(status.begin(), 1);
        status.begin();
        status.finish();
        status.wait_for(Some(Rank(0)));
        let answer = status.answer();
        assert_eq!((answer.begun, answer.finished, answer.waiting_for), (2, 1, Some(0)));
        status.wait_for(None);
        assert_eq!(status.answer().waiting_for, None);
    }
}
