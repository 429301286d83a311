//! After a fault: the ranks that are left make a new communicator in the same processes, and it works.

use super::{Rank, Trouble, PATIENCE};
use crate::board::{Place, LAST_MEETING};
use crate::fault;
use crate::library::{IN_PROGRESS, SUCCESS};
use crate::program::{Action, FaultKind, Kind};
use std::ffi::c_int;
use std::time::{Duration, Instant};

impl Rank<'_> {
    /// Makes the communicator of the survivors, uses it, and ends all that is left.
    pub fn recover(&mut self) -> Result<(), Trouble> {
        let Some(found) = &self.program.fault else { return Ok(()) };
        if self.program.victims().contains(&self.me) {
            if found.kind != FaultKind::Freeze {
                // The fault may strike later than this rank is through.
                std::thread::sleep(PATIENCE);
            }
            return Ok(());
        }
        self.board.note(self.me, Place::In(self.program.ops.len()));
        if found.kind.fails_calls() {
            if let Some(strike) = self.strike.take() {
                let _ = strike.join();
            }
            if self.program.home[found.rank] == self.program.home[self.me] {
                fault::over();
            }
            let Some(Action::Calls { calls, .. }) = &self.program.recovery else { return Ok(()) };
            let comm = calls[0].comm;
            let survivors = self.program.comms[comm].ranks.len();
            self.board.meet(LAST_MEETING, survivors, 2 * PATIENCE).map_err(Trouble::Wrong)?;
            let made =
                if self.program.recovers_by_shrink() { self.shrink_without(comm) } else { self.init(comm, 1, false) };
            let named = |trouble| match trouble {
                Trouble::Failed { code, text, .. } => {
                    Trouble::Wrong(format!("a new communicator of the survivors: code {code}: {text}"))
                }
                wrong => wrong,
            };
            made.map_err(named)?;
            assert!(calls.iter().all(|call| call.kind != Kind::Messages));
            self.calls(self.program.ops.len(), calls, 0).map_err(named)?;
            self.end(comm, crate::program::End::Destroy).map_err(named)?;
        }
        for comm in 0..self.comms.len() {
            let handle = std::mem::replace(&mut self.comms[comm], std::ptr::null_mut());
            if !handle.is_null() {
                // SAFETY: the communicator must be alive; because it was neither destroyed nor aborted yet.
                unsafe { (self.library.abort)(handle) };
            }
        }
        Ok(())
    }

    /// `ncclCommShrink` with `NCCL_SHRINK_ABORT` of the first communicator.
    fn shrink_without(&mut self, child: usize) -> Result<(), Trouble> {
        let Some(shrink) = self.library.shrink else { return Ok(()) };
        let victims = self.program.victims();
        let ranks = victims.iter().filter_map(|&victim| self.program.comms[0].rank_of(victim));
        let mut excluded: Vec<c_int> = ranks.map(|rank| rank as c_int).collect();
        let (mut handle, parent) = (Box::new(std::ptr::null_mut()), self.comms[0]);
        let (at, count) = (&raw mut *handle, excluded.len() as c_int);
        // SAFETY: the pointers must be valid until the call has ended; because it is waited for below.
        let code = unsafe { shrink(parent, excluded.as_mut_ptr(), count, at, std::ptr::null_mut(), 1) };
        // A communicator that does not wait tells of its old failure until the new one is there.
        let end = Instant::now() + PATIENCE / 4;
        // SAFETY: it must be valid; because it is a local of ours.
        let made = || unsafe { at.read_volatile() };
        while code == IN_PROGRESS && made().is_null() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
        let made = made();
        let code = if made.is_null() { code } else { self.settle_handle(made, IN_PROGRESS) };
        if code != SUCCESS || made.is_null() {
            return self.must(0, "ncclCommShrink with NCCL_SHRINK_ABORT", code.max(1));
        }
        self.comms[child] = made;
        Ok(())
    }
}
