//! The order in which the operations of a communicator run: each takes a turn, and runs when those before it have ended.
#![forbid(unsafe_code)]

use crate::sync::biased::Biased;
use crate::sync::{fence, locked};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// The order in which the operations of a communicator run.
#[derive(Debug)]
pub struct OperationQueue {
    /// Held by who issues turns, mostly the one thread that makes the communicator's calls.
    issuing: Biased<()>,
    issued: AtomicU64,
    current: AtomicU64,
    /// Groups of messages that wait for no turn and have not ended.
    pub independent: AtomicUsize,
    /// And how many have.
    independent_ended: AtomicU64,
    /// How many threads wait for a turn to end.
    waiters: AtomicUsize,
    /// Held where such a wait begins and where it is ended, so that it loses no wake-up.
    lock: Mutex<()>,
    changed: Condvar,
}

impl OperationQueue {
    /// Without operations.
    pub fn new() -> OperationQueue {
        OperationQueue {
            issuing: Biased::new(()),
            issued: AtomicU64::new(0),
            current: AtomicU64::new(0),
            independent: AtomicUsize::new(0),
            independent_ended: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Gives the next turn.
    pub fn issue(&self) -> u64 {
        let _issuing = self.issuing.lock();
        let turn = self.issued.load(Ordering::Relaxed);
        self.issued.store(turn + 1, Ordering::Release);
        turn
    }

    /// Takes a turn that is on at once, if no operation is running or queued.
    #[inline]
    pub fn issue_now(&self) -> Option<u64> {
        self.issuing.try_often(|_| {
            let turn = self.current.load(Ordering::Acquire);
            let is_next = self.issued.load(Ordering::Relaxed) == turn;
            if is_next {
                self.issued.store(turn + 1, Ordering::Release);
            }
            is_next.then_some(turn)
        })?
    }

    /// Whether no operation in turn is running or queued.
    pub fn is_idle(&self) -> bool {
        self.current.load(Ordering::Acquire) >= self.issued.load(Ordering::Acquire)
    }

    /// Messages begin that wait for no turn.
    pub fn begin_independent(&self) {
        self.independent.fetch_add(1, Ordering::AcqRel);
    }

    /// They have ended.
    pub fn end_independent(&self) {
        self.independent_ended.fetch_add(1, Ordering::SeqCst);
        self.independent.fetch_sub(1, Ordering::SeqCst);
        self.wake_waiters();
    }

    /// A waiter counts itself before it looks, and who ends something looks for waiters afterwards: one sees the other.
    fn wake_waiters(&self) {
        if self.waiters.load(Ordering::SeqCst) > 0 {
            let _held = locked(&self.lock);
            self.changed.notify_all();
        }
    }

    /// How many operations have ended.
    pub fn ended(&self) -> u64 {
        self.current.load(Ordering::Acquire) + self.independent_ended.load(Ordering::Acquire)
    }

    /// Whether it is `turn`.
    pub fn is(&self, turn: u64) -> bool {
        self.current.load(Ordering::Acquire) == turn
    }

    /// Ends the turn that is on.
    pub fn advance(&self) {
        self.current.fetch_add(1, Ordering::SeqCst);
        self.wake_waiters();
    }

    /// Ends the turn that is on, which was taken at once.
    pub fn advance_from(&self, turn: u64) {
        self.current.store(turn + 1, Ordering::Release);
        fence::light();
        self.wake_waiters();
    }

    /// Waits until it is `turn`, for at most `limit`.
    pub fn wait(&self, turn: u64, limit: Duration) {
        self.wait_while(limit, || self.current.load(Ordering::SeqCst) < turn);
    }

    /// Waits until all issued turns are over and all messages that wait for none, for at most `limit`; whether they are.
    pub fn wait_all(&self, limit: Duration) -> bool {
        let issued = self.issued.load(Ordering::Acquire);
        self.wait_while(limit, || {
            self.current.load(Ordering::SeqCst) < issued || self.independent.load(Ordering::SeqCst) > 0
        })
    }

    /// False where the time was over first.
    fn wait_while(&self, limit: Duration, waits: impl Fn() -> bool) -> bool {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        fence::heavy();
        let waited = self.changed.wait_timeout_while(locked(&self.lock), limit, |()| waits());
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        !waited.unwrap_or_else(|poisoned| poisoned.into_inner()).1.timed_out()
    }
}
