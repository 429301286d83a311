//! What the program's next [`adapt`](crate::communicator::Comm::adapt) brings back after a loss.
//!
//! A NIC that is up again, since a communicator's connections are over those that were up when it was made. And a vendor's library inside the
//! nodes: after a loss Strata's own transports do its part, since a new communicator of its takes memory, which no driver promises to give while
//! the program's streams wait for the call that is made again. In `strataCommAdapt` nothing waits; there all members go on in another
//! communicator.
#![forbid(unsafe_code)]

use super::{Generation, Survivors};
use crate::communicator::engine::Engine;
use crate::communicator::launch::device_of;
use crate::communicator::{nics, Comm};
use crate::error::Result;
use crate::sync::locked;
use std::sync::Arc;

/// Has something work inside the nodes of a communicator. Collective.
pub type Provide<'a> = &'a mut dyn FnMut(&Arc<Comm>) -> Result<()>;

impl Comm {
    /// Whether a communicator that were made now would have another NIC for this rank.
    pub(in crate::communicator) fn has_better_nic(&self) -> bool {
        let over = self.generation();
        let over = over.as_deref().unwrap_or(self);
        let Some(name) = over.engine.lock().as_ref().and_then(|engine| engine.nic().map(str::to_string)) else {
            return false;
        };
        let now = nics::binding(over.rank, &over.grid, &over.members, &over.config);
        self.survivors.get().is_some() && now.is_ok_and(|now| now.address.name != name)
    }

    /// Has the ranks that are left go on with what has come back: NICs, if some rank `has_better_nic`, and what can `provide`. Collective over
    /// them, in the communicator's next turn.
    pub(in crate::communicator) fn renew(
        self: &Arc<Comm>,
        has_better_nic: bool,
        mut provide: Option<Provide<'_>>,
    ) -> Result<()> {
        let Some(survivors) = self.survivors.get().filter(|_| has_better_nic || provide.is_some()) else {
            return Ok(());
        };
        let turn = {
            let _accepting =
                survivors.is_on_gpu().then(|| device_of(self)).transpose()?.map(|device| device.accepting());
            survivors.turns.issue()
        };
        survivors.wait_turn(turn);
        let outcome = survivors.renew(self, has_better_nic, &mut provide);
        survivors.turns.advance();
        outcome
    }
}

impl Survivors {
    /// Ranks may be lost meanwhile: then those who are left do it among themselves.
    fn renew(&self, first: &Arc<Comm>, has_better_nic: bool, provide: &mut Option<Provide<'_>>) -> Result<()> {
        loop {
            self.still_go_on()?;
            let Err(error) = self.try_renew(first, has_better_nic, provide) else { return Ok(()) };
            let generation = self.generation();
            self.go_on(first, &generation, self.finished(), error)?;
            self.tell_program();
        }
    }

    fn try_renew(&self, first: &Arc<Comm>, has_better_nic: bool, provide: &mut Option<Provide<'_>>) -> Result<()> {
        let generation = self.generation();
        let over = generation.comm(first);
        let has_levels = over.grid.nnodes() > 1 && over.grid.nrails() > 1;
        let mut provide = provide.as_mut().filter(|_| has_levels);
        let lacks_provider = provide.is_some() && over.options.companion.is_none();
        if !has_better_nic && !lacks_provider {
            return Ok(());
        }
        if let Some(error) = generation.broken(first) {
            return Err(error);
        }
        over.await_delivery(None)?;
        if self.on_gpu.is_some() {
            over.engine.lock().iter_mut().for_each(Engine::give_device_back);
        }
        let device = self.on_gpu.as_ref().map(|on_gpu| &on_gpu.device);
        let next = first.renewed(&generation.members, (device, provide.is_some()), &self.is_aborted)?;
        next.late.get().into_iter().for_each(|late| late.adapt(self.options()));
        provide.iter_mut().try_for_each(|provide| provide(&next)).inspect_err(|_| next.abort())?;
        let Generation { number, first_call, .. } = *generation;
        let (members, gone) = (generation.members.clone(), generation.gone.clone());
        let renewed = Generation { comm: Some(next.clone()), members, number, first_call, gone };
        *locked(&self.generation) = Arc::new(renewed);
        self.hear_of_losses(first, &next.status);
        if self.has_ended() {
            next.abort();
        }
        // Who leaves the one before is taken for lost by those who are still in it.
        next.tell(Vec::new(), &self.is_aborted)?;
        if has_better_nic {
            crate::info!("generation {number} goes on over NICs that are up again");
        }
        generation.comm.as_ref().map_or(Ok(()), |before| before.destroy())
    }
}
