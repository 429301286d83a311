//! Aborts in a signal handler that has interrupted a call of its own thread.
//!
//! Such a thread may hold any lock, also the memory allocator's. So `ncclCommAbort` only tells the communicator there, by
//! which its waits end; the interrupted call does the rest when it ends. It may wait for just that, on another communicator;
//! so a thread of its own does it when [`PATIENCE`] is over. Inside a lock of the names ([`super::handles`]) not even the
//! communicator can be told; that is done when the lock is given back. In the handler no memory is taken or given back.
#![forbid(unsafe_code)]

use super::handles::{self, Handle};
use crate::bootstrap::Service;
use crate::communicator::Comm;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::interface::types::CommHandle;
use crate::sync::locked;
use std::sync::atomic::{compiler_fence, AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::Duration;

/// How many communicators can be aborted inside one lock of the names.
const MOST: usize = 32;
/// How long the interrupted call has to end what has been told.
const PATIENCE: Duration = Duration::from_millis(100);

/// Held by who ends what has been told: nobody returns from a call before it is done.
static ENDING: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);

/// What a thread is in. Each word is written and read in the order of the program, as its signal handlers see it.
struct Calls {
    /// Calls that have begun and not ended: a signal handler makes all but the first.
    depth: Word,
    /// Whether communicators are to be ended when the first call ends.
    owes: Word,
    /// Locks of the names that the thread holds.
    locks: Word,
    /// What was to be aborted meanwhile: how many, and which.
    untold: Word,
    names: [Word; MOST],
}

/// A word that only its thread and the signal handlers on it use.
struct Word(AtomicUsize);

impl Word {
    const fn new() -> Word {
        Word(AtomicUsize::new(0))
    }

    #[inline]
    fn get(&self) -> usize {
        compiler_fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }

    #[inline]
    fn set(&self, value: usize) {
        self.0.store(value, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }
}

thread_local! {
    static CALLS: Calls = const {
        Calls {
            depth: Word::new(),
            owes: Word::new(),
            locks: Word::new(),
            untold: Word::new(),
            names: [const { Word::new() }; MOST],
        }
    };
}

/// Notes that this thread begins a call.
#[inline]
pub fn begin() {
    CALLS.with(|calls| calls.depth.set(calls.depth.get() + 1));
}

/// Notes that the call ends.
#[inline]
pub fn end() {
    CALLS.with(|calls| {
        let depth = calls.depth.get() - 1;
        // Before it is looked what is owed: from here on a handler aborts by itself.
        calls.depth.set(depth);
        while depth == 0 && calls.owes.get() > 0 {
            calls.depth.set(1);
            calls.owes.set(0);
            end_told();
            calls.depth.set(0);
        }
    });
}

/// Ends the communicators that have been told of their abort.
#[cold]
fn end_told() {
    let _ending = locked(ENDING.get());
    for comm in handles::take_told() {
        comm.abort();
    }
}

/// What the thread does that does not wait for the interrupted call.
fn end_told_later() {
    std::thread::sleep(PATIENCE);
    end_told();
}

/// Whether the call that asks has interrupted another one of this thread.
pub fn has_interrupted() -> bool {
    CALLS.with(|calls| calls.depth.get() > 1)
}

/// Tells a communicator that it has been aborted. The service may end it meanwhile, so nothing of it is owned here, which
/// the handler would free as its last owner.
pub fn tell(name: CommHandle) -> Result<()> {
    let tell = |handle: &Handle| {
        handle.cancel();
        handle.set_told();
        CALLS.with(|calls| calls.owes.set(1));
        handle.with_made(Comm::interrupt);
    };
    // The text of an error would be memory that is taken.
    handles::visit(name, tell).ok_or(Error::InvalidArgument(String::new()))?;
    Service::ask(end_told_later);
    Ok(())
}

/// Where this thread holds a lock of the names, notes that the communicator is to be told when it is given back.
pub fn postpone(name: CommHandle) -> Option<Result<()>> {
    CALLS.with(|calls| {
        if calls.locks.get() == 0 {
            return None;
        }
        let untold = calls.untold.get();
        let Some(place) = calls.names.get(untold) else { return Some(Err(Error::InProgress)) };
        place.set(name.0);
        calls.untold.set(untold + 1);
        Some(Ok(()))
    })
}

/// As long as it lives this thread holds a lock of the names, or is about to take it.
pub struct HoldsNames(());

impl HoldsNames {
    /// Notes it; to be dropped after the lock.
    pub fn enter() -> HoldsNames {
        CALLS.with(|calls| calls.locks.set(calls.locks.get() + 1));
        HoldsNames(())
    }
}

impl Drop for HoldsNames {
    fn drop(&mut self) {
        let untold = CALLS.with(|calls| {
            calls.locks.set(calls.locks.get() - 1);
            calls.locks.get() == 0 && calls.untold.get() > 0
        });
        if untold {
            tell_postponed();
        }
    }
}

#[cold]
fn tell_postponed() {
    let last = || {
        CALLS.with(|calls| {
            let last = calls.untold.get().checked_sub(1)?;
            calls.untold.set(last);
            Some(CommHandle(calls.names[last].get()))
        })
    };
    while let Some(name) = last() {
        // Others are gone already.
        let _ = tell(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A communicator that an abort inside of another call of this thread has been told of, and what it is like then.
    fn told(abort: impl FnOnce(CommHandle)) -> (CommHandle, bool) {
        let handle = Handle::reserve(true);
        begin();
        begin();
        abort(handle.name);
        end();
        let is_told = handle.is_cancelled();
        assert!(handles::find(handle.name).is_ok(), "the interrupted call takes the name away, not the handler");
        end();
        (handle.name, is_told)
    }

    #[test]
    fn an_abort_inside_a_call_is_told_at_once_and_ended_with_the_call() {
        let (name, is_told) = told(|name| super::super::communicators::abort(name).unwrap());
        assert!(is_told);
        assert!(handles::find(name).is_err());
    }

    #[test]
    fn an_abort_inside_a_lock_of_the_names_is_told_when_the_lock_is_given_back() {
        let (name, is_told) = told(|name| {
            let holds = HoldsNames::enter();
            super::super::communicators::abort(name).unwrap();
            assert!(!handles::find(name).unwrap().is_cancelled());
            drop(holds);
        });
        assert!(is_told);
        assert!(handles::find(name).is_err());
    }

    #[test]
    fn what_a_call_that_does_not_end_owes_is_done_without_it() {
        // The service is there, as wherever a communicator is.
        let _service = Service::get().unwrap();
        let handle = Handle::reserve(true);
        begin();
        begin();
        super::super::communicators::abort(handle.name).unwrap();
        end();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while handles::find(handle.name).is_ok() {
            assert!(std::time::Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        end();
    }
}
