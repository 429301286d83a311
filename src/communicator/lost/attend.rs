//! Meetings of ranks whose programs make no call.
//!
//! Who finds a loss meets all that are left, and those come with their next call. Where a window is closed by time a rank may not come to
//! that: it waits for the word of all that the window closes, over a communicator of its own, and for who waits to be met. So ranks with
//! such windows come to a meeting as soon as they hear of a loss, on a thread of the library.
#![forbid(unsafe_code)]

use super::Survivors;
use crate::communicator::Comm;
use crate::health::RankStatus;
use crate::process::thread;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Whether ranks come to meetings without a call.
#[derive(Debug, Default)]
pub(super) struct Meetings {
    /// They do.
    attends: AtomicBool,
    /// A thread does so now.
    is_there: AtomicBool,
    /// The program has not been told of what was found in one.
    untold: AtomicBool,
}

impl Comm {
    /// Has this rank come to meetings without a call from now on.
    pub(in crate::communicator) fn attend_meetings(self: &Arc<Comm>) {
        let Some(survivors) = self.survivors.get() else { return };
        if survivors.meetings.attends.swap(true, Ordering::AcqRel) {
            return;
        }
        let generation = survivors.generation();
        survivors.hear_of_losses(self, &self.status);
        generation.comm.iter().for_each(|comm| survivors.hear_of_losses(self, &comm.status));
        // What has been heard before.
        attend(&Arc::downgrade(self));
    }
}

impl Survivors {
    /// Has news of a generation bring this rank to a meeting.
    pub(super) fn hear_of_losses(&self, first: &Arc<Comm>, status: &RankStatus) {
        if self.meetings.attends.load(Ordering::Acquire) {
            let first = Arc::downgrade(first);
            status.wakes_also(move || attend(&first));
        }
    }

    /// Tells the program of what was found while it made no call.
    pub(super) fn tell_untold(&self) {
        if self.meetings.untold.swap(false, Ordering::AcqRel) {
            self.tell_program();
        }
    }

    /// Meets the others as long as there is a reason to, in a turn among the program's operations.
    fn come(&self, first: &Arc<Comm>) {
        self.wait_turn(self.turns.issue());
        while !self.has_ended() {
            let generation = self.generation();
            let Some(error) = generation.broken(first).or_else(|| generation.comm(first).failure()) else { break };
            if self.go_on(first, &generation, self.finished(), error).is_err() {
                break;
            }
            self.meetings.untold.store(true, Ordering::Release);
        }
        self.turns.advance();
    }
}

/// Comes to a meeting on a thread, if none is there. Called on the service's thread, which waits for nobody.
fn attend(first: &Weak<Comm>) {
    let Some(first) = first.upgrade() else { return };
    let Some(survivors) = first.survivors.get().cloned() else { return };
    if survivors.has_ended() || survivors.meetings.is_there.swap(true, Ordering::AcqRel) {
        return;
    }
    let there = survivors.clone();
    let started = thread("strata-meeting").and_then(|thread| {
        thread.spawn(move || {
            survivors.meetings.is_there.store(false, Ordering::Release);
            survivors.come(&first);
        })
    });
    if let Err(error) = started {
        there.meetings.is_there.store(false, Ordering::Release);
        crate::info!("no thread to meet the ranks that are left: {error}");
    }
}
