//! The operations of a group on host streams: which of its communicators run together, and which streams they hold up.
#![forbid(unsafe_code)]

use super::batch::{drive, OperationBatch};
use super::StreamRef;
use crate::error::Result;
use crate::fork::PerProcess;
use crate::sync::locked;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Held while a bundle is put on its streams.
static ORDER: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);

/// Held as long as operations get their places and are put on streams: who holds it meets no other thread's in between.
pub type Order = MutexGuard<'static, ()>;

/// Waits for other threads that put operations on streams.
pub fn order() -> Order {
    locked(ORDER.get())
}

/// Runs of one group whose communicators share streams: they wait for all of these streams together, go on together, and
/// hold all of them up. One after the other they would wait for each other.
pub struct Bundle<R = OperationBatch> {
    pub(super) runs: Vec<R>,
    pub(super) streams: Vec<StreamRef>,
}

impl<R> Bundle<R> {
    /// Adds a run, and joins the bundles with which it shares a stream.
    pub fn add(bundles: &mut Vec<Bundle<R>>, run: R, streams: Vec<StreamRef>) {
        let mut whole = Bundle { runs: Vec::new(), streams };
        let mut apart = Vec::new();
        for mut bundle in bundles.drain(..) {
            if !bundle.streams.iter().any(|stream| whole.streams.contains(stream)) {
                apart.push(bundle);
                continue;
            }
            whole.runs.append(&mut bundle.runs);
            let new: Vec<StreamRef> =
                bundle.streams.into_iter().filter(|stream| !whole.streams.contains(stream)).collect();
            whole.streams.extend(new);
        }
        whole.runs.push(run);
        apart.push(whole);
        *bundles = apart;
    }

    /// Whether the null stream is among its streams.
    pub fn has_null(&self) -> bool {
        self.streams.iter().any(StreamRef::is_null)
    }
}

impl Bundle {
    /// Runs on the null stream, if that is among the streams, and has ended when this returns; else on the first one. Takes
    /// the order where the caller has not, and lets go of it to run here.
    pub fn launch(self, order: &mut Option<Order>) -> Result<()> {
        let mut runs = self.runs;
        let (home, gate) = hold_up(self.streams, order)?;
        if home.is_null() {
            *order = None;
            return on_stream(runs, gate);
        }
        runs.iter_mut().for_each(|run| run.follow(&home));
        if runs.len() == 1 && gate.0.is_none() {
            return runs.remove(0).enqueue(&home);
        }
        home.enqueue(move || on_stream(runs, gate))
    }
}

/// Has all of these streams but one wait where they come to this place; the one on which goes on what they wait for.
pub(super) fn hold_up(mut streams: Vec<StreamRef>, order: &mut Option<Order>) -> Result<(StreamRef, Opens)> {
    let first = streams.iter().position(StreamRef::is_null).unwrap_or(0);
    let home = streams.swap_remove(first);
    let gate = Opens((!streams.is_empty()).then(|| Arc::new(Gate::new(streams.len()))));
    // Two bundles of several threads on the same streams have the same order on each.
    order.get_or_insert_with(self::order);
    for stream in streams {
        if let Some(gate) = gate.0.clone() {
            stream.enqueue(move || gate.pass())?;
        }
    }
    Ok((home, gate))
}

/// Runs them once the gate's streams have arrived, and lets those go on.
fn on_stream(mut runs: Vec<OperationBatch>, gate: Opens) -> Result<()> {
    gate.wait_arrived();
    // The failure is kept in the communicator; the stream goes on, as a GPU stream would.
    drive(&mut runs)
}

/// Opens a gate at its end, also where the runs have never come to it: a stream may have no memory for its thread.
pub(super) struct Opens(Option<Arc<Gate>>);

impl Opens {
    /// Waits until the gate's streams have come to it.
    pub(super) fn wait_arrived(&self) {
        self.0.iter().for_each(|gate| gate.wait_arrived());
    }
}

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.iter().for_each(|gate| gate.open());
    }
}

/// Holds streams up while another one works for them.
struct Gate {
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Gate {
    fn new(expected: usize) -> Gate {
        Gate { state: Mutex::new((expected, false)), changed: Condvar::new() }
    }

    /// Arrives and waits until the gate is open.
    fn pass(&self) -> Result<()> {
        let mut state = locked(&self.state);
        state.0 -= 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |state| !state.1));
        Ok(())
    }

    fn wait_arrived(&self) {
        drop(self.changed.wait_while(locked(&self.state), |state| state.0 > 0));
    }

    fn open(&self) {
        locked(&self.state).1 = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::stream::HostStream;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn streams_go_on_where_another_one_takes_no_job() {
        let (taken, closed) = (HostStream::new(), HostStream::new());
        closed.close();
        for other in [StreamRef::Null, StreamRef::Stream(HostStream::new())] {
            let streams = [other, StreamRef::Stream(closed.clone()), StreamRef::Stream(taken.clone())].to_vec();
            assert!(Bundle { runs: Vec::new(), streams }.launch(&mut None).is_err());
            let (ends, ended) = mpsc::channel();
            let stream = taken.clone();
            std::thread::spawn(move || ends.send(stream.synchronize()));
            assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
        }
    }
}
