//! The watch over one rank of one communicator, as the communicator holds it.
#![forbid(unsafe_code)]

use super::diagnosis::{self, Inquiry};
use super::failure_detector::Watch;
use super::status::SENDING;
use super::{CallSummary, RankStatus, RelayRequest};
use crate::bootstrap::reactor::ServiceCommand;
use crate::bootstrap::{Credentials, Service, ServiceAddr};
use crate::error::{Error, Result};
use crate::sync::locked;
use crate::topo::Rank;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a rank waits at most for its neighbours' links. All ranks have started their monitors by then; one that
/// does not answer is watched as soon as it does.
const LINK_PATIENCE: Duration = Duration::from_secs(10);
/// How long a leaving rank waits for the service, which itself waits for the goodbye to be sent.
const LEAVE_PATIENCE: Duration = Duration::from_secs(2);

/// Tells a rank when another dies, and the others when this one fails or leaves. Dropping it leaves in good order.
pub struct Monitor {
    service: Arc<Service>,
    comm: Credentials,
    me: Rank,
    members: Vec<ServiceAddr>,
    status: Arc<RankStatus>,
    standing: Mutex<Receiver<()>>,
}

impl Monitor {
    /// Starts the watch. All ranks call this with the same credentials and members (rank `i`'s service is
    /// `members[i]`). It waits for nobody: the links to the neighbours come to stand by and by.
    ///
    /// A rank that is asked and does not answer for `mute_after` is lost, where that is given.
    pub fn start(
        comm: Credentials,
        me: Rank,
        members: Vec<ServiceAddr>,
        status: Arc<RankStatus>,
        mute_after: Option<Duration>,
    ) -> Result<Monitor> {
        if me.index() >= members.len() {
            return Err(Error::Internal(format!("rank {me} watches a communicator of {} ranks", members.len())));
        }
        let service = Service::get()?;
        let (ready, standing) = channel();
        let watch = Watch { comm, me: me.0, members: members.clone(), status: status.clone(), ready, mute_after };
        service.command(ServiceCommand::Start(watch))?;
        Ok(Monitor { service, comm, me, members, status, standing: Mutex::new(standing) })
    }

    /// Waits until the links to both neighbours stand, so that whoever leaves later is missed by somebody; no longer
    /// than `limit`, and not once `cancel` is set. To be called when all ranks are known to have started their watch.
    /// Fails if a neighbour is dead already.
    pub fn wait_linked(&self, limit: Duration, cancel: &AtomicBool) -> Result<()> {
        let standing = locked(&self.standing);
        let deadline = Instant::now() + limit.min(LINK_PATIENCE);
        while !cancel.load(Ordering::Acquire) {
            match standing.recv_timeout(Duration::from_millis(20)) {
                Ok(()) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Internal("the service's thread has ended".to_string()))
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(error) = self.status.failure() {
                        return Err(error.clone());
                    }
                    if Instant::now() > deadline {
                        let me = self.me;
                        crate::info!("rank {me}: the neighbours' links do not stand yet; going on without waiting");
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// The state that others are told.
    pub fn status(&self) -> &Arc<RankStatus> {
        &self.status
    }

    /// Tells all other ranks that this one has failed, timed out or aborted, and completes no collective numbered `from`
    /// or higher. They get a `Timeout` for a `Timeout`, an `InvalidUsage` for an `InvalidUsage`, else a `Remote`, with this
    /// rank's number and the text.
    pub fn report(&self, from: u64, error: &Error) {
        let text = format!("rank {} ({}): {error}", self.me, crate::bootstrap::Process::this());
        let told = match error {
            Error::Timeout(_) => Error::Timeout(text),
            Error::InvalidUsage(_) => Error::InvalidUsage(text),
            _ => Error::Remote(text),
        };
        if let Err(error) = self.service.command(ServiceCommand::Report((self.comm.key, self.me.0), from, told)) {
            crate::info!("the other ranks could not be told: {error}");
        }
    }

    /// Why the awaited ranks do not come: asks their services, follows those who wait themselves, and names the
    /// culprits. Takes `grace` in all if somebody does not answer, and milliseconds if everybody does.
    pub fn diagnose(&self, waiting_for: &[Rank], grace: Duration) -> String {
        diagnosis::diagnose(&self.inquiry(), waiting_for, grace)
    }

    /// In words, what this rank and one that it waits for have called, if that differs. Takes as long as
    /// [`diagnose`](Monitor::diagnose).
    pub fn mismatch(&self, waiting_for: &[Rank], grace: Duration) -> Option<String> {
        diagnosis::mismatch(&self.inquiry(), waiting_for, grace)
    }

    /// Has the service find out whether those who are waited for call what this rank calls. Returns at once; if not,
    /// all ranks get an `InvalidUsage` that says so.
    pub fn compare(&self, waiting_for: &[Rank]) {
        self.ask(waiting_for, self.status.begun());
    }

    /// Has the service find out whether those whose messages are awaited are still there, and whether one that this rank
    /// waits to send to waits to send to this one. Returns at once.
    pub fn compare_sends(&self, waiting_for: &[Rank]) {
        self.ask(waiting_for, SENDING);
    }

    /// Has the service ask those who are waited for to relay the operation of this number, if they have not begun it. Returns at once.
    pub fn ask_to_relay(&self, waiting_for: &[Rank], number: u64, call: CallSummary) {
        let others = waiting_for.iter().map(|rank| rank.0).collect();
        let request = RelayRequest::new(self.me.0, number, call);
        // Without a service nobody is asked, and all wait.
        let _ = self.service.command(ServiceCommand::Relay((self.comm.key, self.me.0), others, request));
    }

    fn ask(&self, ranks: &[Rank], number: u64) {
        let others = ranks.iter().map(|rank| rank.0).collect();
        // Without a service nobody is asked; the wait has its limit all the same.
        let asked = (number, self.status.resumed());
        let _ = self.service.command(ServiceCommand::Compare((self.comm.key, self.me.0), others, asked));
    }

    fn inquiry(&self) -> Inquiry<'_> {
        let begun = self.status.begun();
        let (call, empty) = (self.status.call(begun), self.status.empty().map(|(after, _)| after));
        Inquiry { comm: self.comm, me: self.me.0, members: &self.members, begun, call, empty }
    }
}

impl Monitor {
    /// Begins to leave in good order; the receiver hears when the others can know.
    fn begin_to_leave(&self) -> Option<Receiver<()>> {
        let (done, left) = channel();
        self.service.command(ServiceCommand::Leave((self.comm.key, self.me.0), done)).ok().map(|()| left)
    }

    /// Leaves with all of these at once, as a process does that ends: takes no longer than one of them.
    pub fn leave_all(monitors: Vec<Monitor>) {
        let monitors = monitors.into_iter().map(ManuallyDrop::new);
        let leaving: Vec<Receiver<()>> = monitors.filter_map(|monitor| monitor.begin_to_leave()).collect();
        let deadline = Instant::now() + LEAVE_PATIENCE;
        for left in leaving {
            // As in `drop`.
            let _ = left.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if let Some(left) = self.begin_to_leave() {
            // A goodbye that is not sent in time looks like a death to the others: the log of one of them will say so.
            let _ = left.recv_timeout(LEAVE_PATIENCE);
        }
    }
}
