//! How a communicator comes to its end: finalised, destroyed, aborted or revoked.
#![forbid(unsafe_code)]

use super::engine::Engine;
use super::gpu::GpuLauncher;
use super::{abortion, Comm, ABORTED, ENDED, FINALIZED, FOREVER, LAST_WORDS, REVOKED};
use crate::bootstrap::Service;
use crate::error::{Error, Result};
use crate::sync::locked;
use crate::transport::{Departure, Waker};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Comm {
    fn enter_phase(&self, phase: u32, call: &str) -> Result<()> {
        self.at_home()?;
        let entered = self.phase.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| match (old, phase) {
            (ENDED, _) => None,
            (FINALIZED | REVOKED, FINALIZED) => None,
            _ => Some(phase),
        });
        match entered {
            Ok(_) => Ok(()),
            Err(ENDED) => Err(Error::InvalidArgument(format!("{call}: the communicator has been destroyed"))),
            Err(REVOKED) => Err(Error::InvalidUsage(format!("{call}: the communicator has been revoked"))),
            Err(_) => Err(Error::InvalidArgument(format!("{call}: the communicator has been finalized already"))),
        }
    }

    pub(super) fn quiesce(&self) -> Result<()> {
        let limit = self.limit().map_or(FOREVER, |limit| limit + Duration::from_secs(5));
        let survive = self.survivors.get().is_none_or(|survivors| survivors.wait_all(limit));
        match survive && self.turns.wait_all(limit) {
            true => Ok(()),
            false => Err(Error::Timeout(format!("operations did not end within {} ms", self.config.timeout_ms))),
        }
    }

    /// Waits until all operations have ended and the others' systems have everything that was sent to them; no operation
    /// may be started afterwards.
    pub fn finalize(&self) -> Result<()> {
        self.enter_phase(FINALIZED, "ncclCommFinalize")?;
        let deadline = self.deadline();
        self.quiesce()?;
        self.await_delivery(deadline)?;
        self.windows.destroy()?;
        self.generation().map_or(Ok(()), |generation| generation.finalize())?;
        self.siblings().try_for_each(|sibling| sibling.finalize())
    }

    /// Waits until the others' systems have everything that was sent to them.
    pub(super) fn await_delivery(&self, deadline: Option<Instant>) -> Result<()> {
        let mut pause = Duration::from_micros(100);
        loop {
            let owed = self.engine.lock().as_mut().map_or_else(Vec::new, Engine::undelivered);
            if owed.is_empty() || self.failure().is_some() {
                return Ok(());
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let ranks: Vec<u32> = owed.iter().map(|rank| rank.0).collect();
                let (ms, ranks) = (self.config.timeout_ms, crate::bootstrap::rendezvous::name_ranks(&ranks));
                return Err(Error::Timeout(format!("{ranks} did not take all that was sent within {ms} ms")));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(5));
        }
    }

    /// When an operation that begins now has to end.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.limit().map(|limit| Instant::now() + limit)
    }

    /// The time that an operation may take, unless it may take for ever.
    pub(super) fn limit(&self) -> Option<Duration> {
        (self.config.timeout_ms > 0).then(|| Duration::from_millis(self.config.timeout_ms))
    }

    /// Waits until all operations have ended and frees everything. What was sent and has not arrived yet the process
    /// keeps until it has.
    pub fn destroy(self: &Arc<Comm>) -> Result<()> {
        self.enter_phase(ENDED, "ncclCommDestroy")?;
        let mut quiet = self.quiesce();
        if quiet.is_ok() {
            // The last operation's job may still hold what this thread is to free.
            self.gpu().into_iter().for_each(GpuLauncher::settle);
        }
        self.siblings().for_each(|sibling| quiet = std::mem::replace(&mut quiet, Ok(())).and(sibling.destroy()));
        quiet = quiet.and(self.windows.destroy());
        quiet = quiet.and(self.generation().map_or(Ok(()), |generation| generation.destroy()));
        if quiet.is_err() {
            self.status.fail(Error::InvalidUsage("the communicator has been destroyed".to_string()));
        }
        self.release(self.patience());
        quiet
    }

    /// Ends operations at once, tells the other ranks if there were any, and frees everything. A rank with nothing under
    /// way just leaves: it fails only what needs it.
    pub fn abort(&self) {
        self.windows.abort();
        self.survivors.get().into_iter().for_each(|survivors| survivors.abort());
        self.siblings().for_each(|sibling| sibling.abort());
        let is_over = !self.origin.is_here() || self.phase.swap(ENDED, Ordering::AcqRel) == ENDED;
        let was_interrupted = locked(&self.abortion).replace(abortion(self.rank)).is_none();
        if was_interrupted {
            self.report(&abortion(self.rank));
        } else if is_over {
            return;
        }
        // On a device a call may have failed before it began, which only its rank knows: others may be in it.
        if self.is_quiet() && self.status.cause().is_none() && self.gpu.is_none() {
            return self.release(ABORTED);
        }
        self.stop(abortion(self.rank));
        // What runs sees the failure at its next poll; the limit is for a thread that was stopped from outside.
        self.turns.wait_all(Duration::from_secs(10));
        // Nothing of the program's is written any more, by a call that is being made again neither. A callback is in such a call itself.
        if let (Some(survivors), Ok(())) = (self.survivors.get(), self.not_in_callback()) {
            survivors.wait_all(Duration::from_secs(10));
        }
        self.release(LAST_WORDS);
    }

    /// What an abort can do in a signal handler that has interrupted a call of this thread's on the communicator: its
    /// operations end. [`abort`](Comm::abort) does the rest when the call has ended.
    pub fn interrupt(&self) {
        if !self.origin.is_here() || self.phase.swap(ENDED, Ordering::AcqRel) == ENDED {
            return;
        }
        // Made before: no memory is to be had here, nor given back.
        if let Some(abortion) = self.abortion.try_lock().ok().and_then(|mut abortion| abortion.take()) {
            std::mem::forget(self.status.fail_or_return(abortion));
        }
        self.waker.iter().for_each(Waker::wake);
        self.siblings().for_each(|sibling| sibling.interrupt());
        self.survivors.get().into_iter().for_each(|survivors| survivors.interrupt());
        self.windows.interrupt();
    }

    /// Ends operations at once; the communicator may be split, shrunk, grown and destroyed afterwards.
    pub fn revoke(&self) -> Result<()> {
        self.enter_phase(REVOKED, "ncclCommRevoke")?;
        self.windows.abort();
        self.stop(Error::InvalidUsage(format!("rank {} revoked the communicator", self.rank)));
        self.turns.wait_all(Duration::from_secs(10));
        self.siblings().try_for_each(|sibling| sibling.revoke())
    }

    pub(super) fn stop(&self, error: Error) {
        let is_told = !self.is_quiet() || self.gpu.is_some();
        // Who gives up because of another rank's failure is not its cause.
        let cause = self.status.cause();
        // Nothing was wrong with the others' calls.
        let told = cause.unwrap_or_else(|| Error::Remote(error.text().to_string()));
        self.status.fail_after(error, || {
            if is_told {
                self.report(&told);
            }
        });
        self.waker.iter().for_each(Waker::wake);
    }

    /// Frees everything; what others have not got yet is kept for them, for `limit` at most.
    pub(super) fn release(&self, limit: Duration) {
        if self.status.cause().is_some() {
            crate::transport::note_failure();
        }
        let departure = self.engine.lock().take().and_then(Engine::leave);
        self.keep(departure, limit);
        drop(locked(&self.monitor).take());
        self.end_records();
    }

    /// How long what others have not got yet is kept: as long as an operation may take, but not after a failure.
    pub(super) fn patience(&self) -> Duration {
        match self.status.cause() {
            None => self.limit().unwrap_or(FOREVER),
            Some(_) => LAST_WORDS,
        }
    }

    /// Has the process's service keep what others have not got yet.
    pub(super) fn keep(&self, departure: Option<Departure>, limit: Duration) {
        if let Some(departure) = departure {
            // Without a service there are no other ranks either.
            let _ = Service::get().and_then(|service| service.keep(departure, limit));
        }
    }
}
