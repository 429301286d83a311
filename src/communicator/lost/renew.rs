//! What the program's next [`adapt`](crate::communicator::Comm::adapt) brings back after a loss.
//!
//! A NIC that is up again, since a communicator's connections are over those that were up when it was made. And a vendor's library inside the
//! nodes: after a loss Strata's own transports do its part, since a new communicator of its takes memory, which no driver promises to give while
//! the program's streams wait for the call that is made again. In `strataCommAdapt` nothing waits; there all members go on in another
//! communicator. That is an operation like a call: it stands if some rank has come to its end, and else all make it again.
#![forbid(unsafe_code)]

use super::{Generation, Survivors};
use crate::communicator::engine::Engine;
use crate::communicator::launch::device_of;
use crate::communicator::{nics, Comm};
use crate::error::{Error, Result};
use crate::sync::locked;
use std::sync::Arc;

/// Has something work inside the nodes of a communicator. Collective.
pub type Provide<'a> = &'a mut dyn FnMut(&Arc<Comm>) -> Result<()>;

/// Whether there is something to provide inside the nodes of a communicator.
fn has_levels(comm: &Comm) -> bool {
    comm.grid.nnodes() > 1 && comm.grid.nrails() > 1
}

/// How it has gone.
enum Attempt {
    /// All go on over what was made.
    Done,
    /// Some rank is lost. Whether this one goes on over what was made, but does not know that all do.
    Broken { error: Error, goes_on: bool },
}

impl Comm {
    /// Whether a communicator that were made now would be better for this rank: by another NIC or, where something can provide that, by what is
    /// inside the nodes.
    pub(in crate::communicator) fn wants_renewal(&self, has_provider: bool) -> bool {
        let over = self.generation();
        let lacks = |over: &Arc<Comm>| over.options.companion.is_none() && has_levels(over);
        let lacks_provider = has_provider && over.as_ref().is_some_and(lacks);
        let over = over.as_deref().unwrap_or(self);
        let nic = over.engine.lock().as_ref().and_then(|engine| engine.nic().map(str::to_string));
        let has_better_nic = nic.is_some_and(|nic| {
            nics::name_now(over.rank, &over.grid, &over.members, &over.config).is_ok_and(|now| now != nic)
        });
        self.survivors.get().is_some() && (lacks_provider || has_better_nic)
    }

    /// Has the ranks that are left go on with what has come back, in the communicator's next turn. Collective over them, where some rank
    /// `wants_renewal` and all know that.
    pub(in crate::communicator) fn renew(self: &Arc<Comm>, mut provide: Option<Provide<'_>>) -> Result<()> {
        let Some(survivors) = self.survivors.get() else { return Ok(()) };
        let turn = {
            let device = survivors.is_on_gpu().then(|| device_of(self)).transpose()?;
            let _accepting = device.map(|device| device.accepting());
            survivors.turns.issue()
        };
        survivors.wait_turn(turn);
        let outcome = survivors.renew(self, &mut provide);
        survivors.turns.advance();
        outcome
    }
}

impl Survivors {
    fn renew(&self, first: &Arc<Comm>, provide: &mut Option<Provide<'_>>) -> Result<()> {
        let before = self.finished();
        loop {
            self.still_go_on()?;
            let (error, goes_on) = match self.try_renew(first, provide) {
                Attempt::Done => {
                    self.finish(before + 1);
                    return Ok(());
                }
                Attempt::Broken { error, goes_on } => (error, goes_on),
            };
            let generation = self.generation();
            let stands = self.go_on(first, &generation, before + u64::from(goes_on), error)?;
            self.tell_program();
            if goes_on && stands > before {
                self.finish(before + 1);
                return Ok(());
            }
        }
    }

    fn try_renew(&self, first: &Arc<Comm>, provide: &mut Option<Provide<'_>>) -> Attempt {
        let generation = self.generation();
        let next = match self.make_next(first, &generation, provide) {
            Ok(next) => next,
            Err(error) => return Attempt::Broken { error, goes_on: false },
        };
        let Generation { number, first_call, .. } = *generation;
        let (members, gone) = (generation.members.clone(), generation.gone.clone());
        let renewed = Generation { comm: Some(next.clone()), members, number, first_call, gone };
        *locked(&self.generation) = Arc::new(renewed);
        self.hear_of_losses(first, &next.status);
        if self.has_ended() {
            next.abort();
        }
        // The word by which all know that all go on. Who left the one before earlier would be taken for lost by those who are still in it.
        if let Err(error) = next.tell(Vec::new(), &self.is_aborted) {
            return Attempt::Broken { error, goes_on: true };
        }
        crate::info!("generation {number} goes on with what has come back: {}", next.grid);
        if let Some(Err(error)) = generation.comm.as_ref().map(|before| before.destroy()) {
            crate::info!("ending what a generation went over: {error}");
        }
        Attempt::Done
    }

    /// The communicator over which the members go on.
    fn make_next(
        &self,
        first: &Arc<Comm>,
        generation: &Generation,
        provide: &mut Option<Provide<'_>>,
    ) -> Result<Arc<Comm>> {
        if let Some(error) = generation.broken(first) {
            return Err(error);
        }
        let over = generation.comm(first);
        let mut provide = provide.as_mut().filter(|_| has_levels(over));
        over.await_delivery(first.deadline())?;
        if self.on_gpu.is_some() {
            over.engine.lock().iter_mut().for_each(Engine::give_device_back);
        }
        let device = self.on_gpu.as_ref().map(|on_gpu| &on_gpu.device);
        let next = first.renewed(&generation.members, (device, provide.is_some()), &self.is_aborted)?;
        next.late.get().into_iter().for_each(|late| late.adapt(self.options()));
        provide.iter_mut().try_for_each(|provide| provide(&next)).inspect_err(|_| next.abort())?;
        Ok(next)
    }
}
