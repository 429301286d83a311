//! A vendor's library for those who are left.
//!
//! After a loss Strata's own transports do what a vendor's library did inside the nodes: a new communicator of its takes memory, which no
//! driver promises to give while the program's streams wait for the call that is made again. Where the program calls
//! `strataCommAdapt` nothing waits, and there all members go on in another communicator, with the vendor's for their nodes.
#![forbid(unsafe_code)]

use super::{Generation, Survivors};
use crate::communicator::launch::device_of;
use crate::communicator::Comm;
use crate::error::{Error, Result};
use crate::sync::locked;
use std::sync::Arc;

impl Comm {
    /// Has something `provide` what is inside the nodes of the ranks that are left, where ranks were lost since something did. Collective over
    /// them, in the communicator's next turn.
    pub(in crate::communicator) fn renew_provider(
        self: &Arc<Comm>,
        provide: impl FnMut(&Arc<Comm>) -> Result<()>,
    ) -> Result<()> {
        let Some(survivors) = self.survivors.get() else { return Ok(()) };
        let turn = {
            let _accepting = device_of(self)?.accepting();
            survivors.turns.issue()
        };
        survivors.wait_turn(turn);
        let outcome = survivors.renew(self, provide);
        survivors.turns.advance();
        outcome
    }
}

impl Survivors {
    /// Ranks may be lost meanwhile: then those who are left do it among themselves.
    fn renew(&self, first: &Arc<Comm>, mut provide: impl FnMut(&Arc<Comm>) -> Result<()>) -> Result<()> {
        loop {
            self.still_go_on()?;
            let Err(error) = self.try_renew(first, &mut provide) else { return Ok(()) };
            let generation = self.generation();
            self.go_on(first, &generation, self.finished(), error)?;
            self.tell_program();
        }
    }

    fn try_renew(&self, first: &Arc<Comm>, provide: &mut impl FnMut(&Arc<Comm>) -> Result<()>) -> Result<()> {
        let generation = self.generation();
        let Some(over) = &generation.comm else { return Ok(()) };
        if over.options.companion.is_some() || over.grid.nnodes() == 1 || over.grid.nrails() == 1 {
            return Ok(());
        }
        if let Some(error) = generation.broken(first) {
            return Err(error);
        }
        let lacks_device = || Error::Internal("a vendor's library without a device".to_string());
        let device = &self.on_gpu.as_ref().ok_or_else(lacks_device)?.device;
        over.await_delivery(None)?;
        over.engine.lock().iter_mut().for_each(|engine| engine.give_device_back());
        let next = first.with_provider(&generation.members, device, &self.is_aborted)?;
        provide(&next).inspect_err(|_| next.abort())?;
        let Generation { number, first_call, .. } = *generation;
        let (members, gone) = (generation.members.clone(), generation.gone.clone());
        let renewed = Generation { comm: Some(next.clone()), members, number, first_call, gone };
        *locked(&self.generation) = Arc::new(renewed);
        self.hear_of_losses(first, &next.status);
        if self.has_ended() {
            next.abort();
        }
        // Who leaves the old one is taken for lost by those who are still in it.
        next.tell(Vec::new(), &self.is_aborted)?;
        over.destroy()
    }
}
