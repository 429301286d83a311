//! The communicators whose operations this thread runs just now.
//!
//! A signal handler runs on a thread that may be inside a call, with locks held. What it asks of the same communicator
//! must not wait for that call, so it asks here first. No memory is taken and nothing is locked.
#![forbid(unsafe_code)]

use super::launch::OperationBatch;
use super::Comm;
use std::cell::Cell;
use std::sync::Arc;

/// Communicators of one group that are noted; with more, the thread counts as inside all there are.
const MOST: usize = 8;

/// How many communicators, and which (by address).
type Noted = (usize, [usize; MOST]);

thread_local! {
    static NOTED: Cell<Noted> = const { Cell::new((0, [0; MOST])) };
    /// One more: that of a call by itself, which is noted at less cost.
    static ALONE: Cell<usize> = const { Cell::new(0) };
}

/// As long as it lives this thread is inside calls of these communicators.
pub struct InCall(Noted);

impl InCall {
    /// Notes the communicators of `runs`.
    pub fn enter(runs: &[OperationBatch]) -> InCall {
        let mut comms = [0; MOST];
        comms.iter_mut().zip(runs).for_each(|(comm, run)| *comm = Arc::as_ptr(run.comm()) as usize);
        InCall(NOTED.replace((runs.len(), comms)))
    }
}

impl Drop for InCall {
    fn drop(&mut self) {
        NOTED.set(self.0);
    }
}

/// As long as it lives this thread is inside a call of this communicator alone.
pub struct InCallAlone(usize);

impl InCallAlone {
    /// Notes the communicator.
    pub fn enter(comm: &Comm) -> InCallAlone {
        InCallAlone(ALONE.replace(std::ptr::from_ref(comm) as usize))
    }
}

impl Drop for InCallAlone {
    fn drop(&mut self) {
        ALONE.set(self.0);
    }
}

/// Whether this thread is inside a call of this communicator.
pub fn is_inside(comm: &Comm) -> bool {
    let (count, comms) = NOTED.get();
    let comm = std::ptr::from_ref(comm) as usize;
    ALONE.get() == comm || count > MOST || comms[..count].contains(&comm)
}
