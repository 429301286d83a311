//! Operations that go on when ranks are lost, on their streams.
#![forbid(unsafe_code)]

use super::{exchange, survive, Survivors};
use crate::communicator::admission::admit;
use crate::communicator::bundle::{self, Bundle, Opens};
use crate::communicator::front::{CallFront, Followed};
use crate::communicator::launch::{arrive, await_streams, device_of};
use crate::communicator::{launch as launch_others, CollectiveCall, Comm, Launch, Operation, StreamRef, ALIVE};
use crate::device::gpu::order::Arrival;
use crate::error::{Error, Result};
use crate::memory::DeviceRegion;
use crate::process::thread;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// The operations of one communicator from one group: collectives one after the other, then messages together.
struct Queued {
    comm: Arc<Comm>,
    survivors: Arc<Survivors>,
    /// None until it has one.
    turn: Option<u64>,
    operations: Vec<Operation>,
    followed: Vec<Followed>,
}

impl Queued {
    fn wait_turn(&self) {
        self.turn.into_iter().for_each(|turn| self.survivors.wait_turn(turn));
    }

    /// Runs them to their end; the first error.
    fn run(mut self) -> Result<()> {
        self.wait_turn();
        let (mut outcome, mut messages) = (Ok(()), Vec::new());
        for operation in std::mem::take(&mut self.operations) {
            match operation {
                Operation::Collective(call) => {
                    outcome = outcome.and(survive(&self.comm, &self.survivors, &call, false))
                }
                message => messages.push(message),
            }
        }
        if !messages.is_empty() {
            outcome = outcome.and(exchange(&self.comm, &self.survivors, messages));
        }
        if let Err(error) = &outcome {
            self.fail(error);
        }
        outcome
    }

    fn fail(&mut self, error: &Error) {
        self.followed.drain(..).for_each(|followed| followed.fail(error));
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        if !self.operations.is_empty() {
            // A stream that takes no job has never come to them.
            self.fail(&Error::InvalidUsage("an operation could not be put on its stream".to_string()));
        }
        self.followed.clear();
        // Turns end in order.
        self.wait_turn();
        if self.turn.is_some() {
            self.survivors.turns.advance();
        }
    }
}

/// The memory of an operation.
fn buffers(operation: &Operation) -> [DeviceRegion; 2] {
    match operation {
        Operation::Collective(call) => [call.input, call.output],
        Operation::Send { data, .. } | Operation::Recv { data, .. } => [*data, DeviceRegion::EMPTY],
    }
}

/// Launches an operation that goes on when ranks are lost. Apart from those that do not, on whose stacks it would be.
#[cold]
#[inline(never)]
pub fn launch_alone(alone: Launch) -> Result<()> {
    launch(vec![alone])
}

/// Launches operations, some of which go on when ranks are lost. Those on null streams have ended when this returns.
#[inline(never)]
pub fn launch(batch: Vec<Launch>) -> Result<()> {
    admit(&batch)?;
    let mut others = Vec::new();
    let mut parts: Vec<(Queued, Vec<StreamRef>)> = Vec::new();
    for launch in batch {
        let Some(survivors) = launch.comm.survivors.get().cloned() else {
            others.push(launch);
            continue;
        };
        let Launch { comm, operation, stream } = launch;
        let index = parts.iter().position(|(queued, _)| Arc::ptr_eq(&queued.comm, &comm)).unwrap_or_else(|| {
            let (operations, followed) = (Vec::new(), Vec::new());
            // Set to the next turn below, in one order with the streams.
            parts.push((Queued { comm, survivors, turn: None, operations, followed }, Vec::new()));
            parts.len() - 1
        });
        let (queued, streams) = &mut parts[index];
        queued.operations.push(operation);
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }
    let (on_gpus, parts): (Vec<_>, Vec<_>) = parts.into_iter().partition(|(queued, _)| queued.comm.gpu().is_some());
    let placed = place_on_gpus(on_gpus)?;
    let here = enqueue(parts)?;
    placed.into_iter().try_for_each(|(queued, arrival)| run_on_gpu(queued, arrival))?;
    match here {
        Some((here, gate)) => run_together(here, gate, others),
        None if others.is_empty() => Ok(()),
        None => launch_others(others),
    }
}

/// Notes where the streams of parts on GPUs are, before any waits, and has memory for what they write over: a driver may allocate as long as
/// no stream waits for this thread. What cannot be rescaled is refused here, since no call returns what is found later.
fn place_on_gpus(parts: Vec<(Queued, Vec<StreamRef>)>) -> Result<Vec<(Queued, Arrival)>> {
    let placed = parts.into_iter().map(|(queued, streams)| {
        for operation in &queued.operations {
            if let (Operation::Collective(call), Some(on_gpu)) = (operation, &queued.survivors.on_gpu) {
                queued.survivors.options().check(call)?;
                on_gpu.kept.make_room(call)?;
            }
        }
        let arrival = arrive(&queued.comm, &streams)?;
        Ok((queued, arrival))
    });
    placed.collect()
}

/// Has operations run on their communicator's thread, in the order of the driver's streams.
fn run_on_gpu(mut queued: Queued, arrival: Arrival) -> Result<()> {
    let comm = queued.comm.clone();
    let device = device_of(&comm)?;
    let _accepting = device.accepting();
    let (mut ordered, held) = device.hold(arrival);
    queued.turn = Some(queued.survivors.turns.issue());
    if held.is_err() {
        // Nothing of it runs, and streams that wait already go on in their turn.
        queued.operations.clear();
    }
    device.run(move || {
        let has_ended = || queued.survivors.has_ended();
        let come = await_streams(&mut ordered, has_ended, |_| {});
        let was_over = has_ended();
        let comm = queued.comm.clone();
        let survivors = queued.survivors.clone();
        // No call returns what is wrong with this one, and nobody would know that its result is none.
        let outcome = come.and_then(|()| queued.run()).map_err(|error| survivors.end(error));
        // Its text is kept for who asks; the program knows of its own abort.
        if let (false, Err(error), ALIVE) = (was_over, &outcome, comm.phase.load(Ordering::Acquire)) {
            crate::log::warn(error.text());
        }
        drop(ordered);
        outcome
    })?;
    held
}

/// Makes calls over words of the library's own, in the communicator's next turn, on this thread; the program's data is on a GPU.
pub fn run_words(comm: &Arc<Comm>, survivors: &Survivors, calls: &[CollectiveCall]) -> Result<()> {
    let turn = {
        let _accepting = device_of(comm)?.accepting();
        survivors.turns.issue()
    };
    survivors.wait_turn(turn);
    let outcome = calls.iter().try_for_each(|call| survive(comm, survivors, call, true));
    survivors.turns.advance();
    outcome
}

/// Gives the parts their turns, and puts them on their streams; those that run here are left, with what they hold up.
fn enqueue(mut parts: Vec<(Queued, Vec<StreamRef>)>) -> Result<Option<(Vec<Queued>, Opens)>> {
    let mut order = Some(bundle::order());
    parts.iter_mut().for_each(|(queued, _)| queued.turn = Some(queued.survivors.turns.issue()));
    let mut bundles = Vec::new();
    parts.into_iter().for_each(|(queued, streams)| Bundle::add(&mut bundles, queued, streams));
    let mut here = None;
    for Bundle { mut runs, streams } in bundles {
        let (home, gate) = bundle::hold_up(streams, &mut order)?;
        if home.is_null() {
            here = Some((runs, gate));
            continue;
        }
        let stream = if let StreamRef::Stream(stream) = &home { Arc::downgrade(stream) } else { Weak::new() };
        for queued in &mut runs {
            let follow = |operation| CallFront::follow_whole(&queued.comm, buffers(operation), &stream);
            queued.followed = queued.operations.iter().map(follow).collect();
        }
        home.enqueue(move || run_together(runs, gate, Vec::new()))?;
    }
    Ok(here)
}

/// Runs them once the gate's streams have arrived, each on a thread of its own: several communicators of a group wait for what other
/// ranks may do in another order, and ranks of one thread wait for each other.
fn run_together(mut runs: Vec<Queued>, gate: Opens, others: Vec<Launch>) -> Result<()> {
    gate.wait_arrived();
    let last = if others.is_empty() { runs.pop() } else { None };
    let threads = runs.into_iter().map(|queued| {
        let started = thread("strata-group").and_then(|thread| thread.spawn(move || queued.run()));
        started.map_err(|error| Error::System(format!("starting a thread for a group: {error}")))
    });
    let threads: Vec<_> = threads.collect();
    let mut outcome = match last {
        Some(queued) => queued.run(),
        None => launch_others(others),
    };
    for started in threads {
        let ended = started.and_then(|thread| {
            thread.join().unwrap_or_else(|_| Err(Error::Internal("a thread of a group has ended early".to_string())))
        });
        outcome = outcome.and(ended);
    }
    outcome
}
