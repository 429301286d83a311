//! Leaving in good order when the program ends without destroying its communicators, as many do.
//!
//! A rank whose process just ends looks as if it had died, and ends the calls of ranks that are still in the last
//! collective. So at exit every communicator says goodbye.
#![forbid(unsafe_code)]

use super::engine::Engine;
use super::Comm;
use crate::bootstrap::Service;
use crate::fork::PerProcess;
use crate::health::Monitor;
use std::sync::{Arc, Mutex, Weak};

/// The communicators of this process. A forked child does not speak for its parent.
static LIVE: PerProcess<Mutex<Vec<Weak<Comm>>>> = PerProcess::new(Mutex::default);

/// Notes a communicator that has come to life.
pub(super) fn remember(comm: &Arc<Comm>) {
    let mut live = crate::sync::locked(LIVE.get());
    live.retain(|other| other.strong_count() > 0);
    live.push(Arc::downgrade(comm));
}

/// Says goodbye for every communicator that is still there. Called while the process exits: takes no lock that another
/// thread may hold for ever.
pub fn leave_all() {
    let Ok(mut live) = LIVE.get().try_lock() else { return };
    let mut monitors = Vec::new();
    for comm in live.drain(..).filter_map(|comm| comm.upgrade()) {
        // The others of an operation that is cut short fail, and do not come to the end of MPI in good order.
        if comm.status.cause().is_some() || !comm.is_quiet() {
            crate::transport::note_failure();
        }
        comm.write_failure();
        // A rank that ends in the middle of an operation has not left in good order.
        if comm.is_quiet() && comm.failure().is_none() {
            let engine = comm.engine.try_lock().and_then(|mut engine| engine.take());
            comm.keep(engine.and_then(Engine::leave_at_exit), comm.patience());
            monitors.extend(comm.monitor.try_lock().ok().and_then(|mut monitor| monitor.take()));
        }
        // What the program's other threads still use stays where it is.
        std::mem::forget(comm);
    }
    Monitor::leave_all(monitors);
    if let Some(service) = Service::running() {
        service.await_departures();
    }
    crate::transport::leave_process();
}
