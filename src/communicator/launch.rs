//! From recorded operations to running ones: their turns, and the streams that they wait for and hold up.
#![forbid(unsafe_code)]

use super::admission::admit;
use super::batch::{drive, OperationBatch};
use super::bundle::{self, Bundle};
use super::gpu::GpuLauncher;
use super::siblings::{self, Spread};
use super::{lost, Comm, Operation, StreamRef, ALIVE};
use crate::device::gpu::driver::DriverHandle;
use crate::device::gpu::order::{Arrival, StreamOrder};
use crate::error::{Error, Result};
use crate::transport::Idle;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// An operation, where it runs, and in what order.
pub struct Launch {
    /// The communicator.
    pub comm: Arc<Comm>,
    /// What is to be done.
    pub operation: Operation,
    /// The stream that orders it.
    pub stream: StreamRef,
}

/// Launches the operations of a group (or a single one). Operations on null streams have ended when this returns;
/// others are queued on their streams.
///
/// Per communicator, collectives run in the order in which they were recorded, then all sends and receives at once.
/// A communicator used with several streams in one group waits for all of them and holds all of them up, as NCCL does. Sends
/// and receives on communicators of [`OnHost`](super::OnHost) wait for neither collectives nor messages the other way.
pub fn launch(batch: Vec<Launch>) -> Result<()> {
    match <[Launch; 1]>::try_from(batch) {
        Ok([alone]) => launch_one(alone),
        Err(batch) => launch_group(batch),
    }
}

/// Launches a single operation.
pub fn launch_one(alone: Launch) -> Result<()> {
    if alone.comm.survivors.get().is_some() {
        return lost::launch_alone(alone);
    }
    let mut here = None;
    begin_one(alone, &mut here)?;
    drive(here.as_mut_slice())
}

/// Launches an operation on its stream, or leaves `here` what this thread is to run: there is one of it on the stack. A function of its own,
/// so that what it needs of the stack is free again while that runs.
#[inline(never)]
fn begin_one(mut alone: Launch, here: &mut Option<OperationBatch>) -> Result<()> {
    alone.go_by_carrier()?;
    admit(std::slice::from_ref(&alone))?;
    let Launch { comm, operation, stream } = alone;
    let run = here.insert(OperationBatch::new(comm));
    run.add(operation)?;
    match stream {
        StreamRef::Null => {
            run.take_turn();
            Ok(())
        }
        stream => here.take().map_or(Ok(()), |run| on_stream(run, stream)),
    }
}

/// Has an operation run in the order of its stream.
#[inline(never)]
fn on_stream(mut run: OperationBatch, stream: StreamRef) -> Result<()> {
    if let StreamRef::Gpu(stream) = stream {
        let arrival = device_of(&run.comm)?.arrive(&[stream])?;
        return on_gpu(run, arrival);
    }
    let _order = run.comm.numbers.as_ref().map(|_| bundle::order());
    run.follow(&stream);
    run.take_turn();
    run.enqueue(&stream)
}

/// Has an operation run on its communicator's thread, in the order of the driver's streams.
fn on_gpu(mut run: OperationBatch, arrival: Arrival) -> Result<()> {
    let comm = run.comm.clone();
    let device = device_of(&comm)?;
    let _accepting = device.accepting();
    let (mut ordered, held) = device.hold(arrival);
    if let Err(error) = held {
        // Streams that wait already go on in their turn.
        device.run(move || {
            drop(ordered);
            Ok(())
        })?;
        return Err(error);
    }
    // In front of a vendor's library these are parts of operations.
    if comm.options.companion.is_none() {
        run.follow_from(Weak::new());
    }
    run.take_turn();
    device.run(move || {
        let has_failed = run.comm.failure().is_some();
        let come = match run.comm.late.get().cloned() {
            None => await_streams(&mut ordered, || run.comm.failure().is_some(), |_| {}),
            Some(late) => late.await_streams(&run, &mut ordered),
        };
        let outcome = match come {
            Ok(()) => drive(std::slice::from_mut(&mut run)),
            Err(error) => {
                let error = run.reason(error);
                Err(run.fail(error))
            }
        };
        // No call returns the first failure, so its text is kept for who asks; the program knows of its own abort.
        if let (false, Err(error), ALIVE) = (has_failed, &outcome, run.comm.phase.load(Ordering::Acquire)) {
            crate::log::warn(error.text());
        }
        // The next operation may begin, and then the streams go on.
        drop(run);
        drop(ordered);
        outcome
    })
}

/// Has streams of the driver's wait for what has been launched on the communicator before.
pub(super) fn hold_up(comm: &Comm, streams: &[StreamRef]) -> Result<()> {
    let device = device_of(comm)?;
    let arrival = arrive(comm, streams)?;
    let _accepting = device.accepting();
    let (ordered, held) = device.hold(arrival);
    device.run(move || {
        drop(ordered);
        Ok(())
    })?;
    held
}

pub(super) fn device_of(comm: &Comm) -> Result<&GpuLauncher> {
    comm.gpu().ok_or_else(|| Error::Internal("a stream of a driver's without a device".to_string()))
}

/// Notes where those of the streams are that are the driver's.
pub(super) fn arrive(comm: &Comm, streams: &[StreamRef]) -> Result<Arrival> {
    let handle = |stream: &StreamRef| if let StreamRef::Gpu(handle) = stream { Some(*handle) } else { None };
    let streams: SmallVec<[DriverHandle; 4]> = streams.iter().filter_map(handle).collect();
    device_of(comm)?.arrive(&streams)
}

/// Waits until the streams have come to the operation, which takes as long as the program's own work on them, or the
/// communicator `has_failed`. Does something `meanwhile`, again and again.
pub(super) fn await_streams(
    ordered: &mut StreamOrder,
    has_failed: impl Fn() -> bool,
    mut meanwhile: impl FnMut(&mut StreamOrder),
) -> Result<()> {
    let mut idle = Idle::new(0);
    while !has_failed() && !ordered.may_begin()? {
        meanwhile(ordered);
        idle.nap();
    }
    Ok(())
}

fn launch_group(batch: Vec<Launch>) -> Result<()> {
    if batch.iter().any(|launch| launch.comm.survivors.get().is_some()) {
        return lost::launch(batch);
    }
    admit(&batch)?;
    siblings::spread(batch)?.into_iter().try_for_each(launch_part)
}

fn launch_part(part: Vec<Spread>) -> Result<()> {
    let (bundles, mut order) = begin_part(part)?;
    // What this thread runs comes last: it waits for streams that others may have to reach as well.
    let (here, elsewhere): (Vec<Bundle>, Vec<Bundle>) = bundles.into_iter().partition(Bundle::has_null);
    elsewhere.into_iter().chain(here).try_for_each(|bundle| bundle.launch(&mut order))
}

/// Launches what runs on GPUs; gives what is left, and the order, which is held for it where threads may share communicators. A
/// function of its own, so that what it needs of the stack is free again while the bundles run.
#[inline(never)]
fn begin_part(part: Vec<Spread>) -> Result<(Vec<Bundle>, Option<bundle::Order>)> {
    let mut parts: Vec<(OperationBatch, Vec<StreamRef>)> = Vec::new();
    for (Launch { comm, operation, stream }, further) in part {
        let index = parts.iter().position(|(run, _)| Arc::ptr_eq(&run.comm, &comm)).unwrap_or_else(|| {
            parts.push((OperationBatch::new(comm), Vec::new()));
            parts.len() - 1
        });
        let (run, streams) = &mut parts[index];
        run.record(operation);
        for stream in std::iter::once(stream).chain(further) {
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
    }
    parts.iter_mut().try_for_each(|(run, _)| run.decide())?;
    // Threads may share communicators of the host, and their operations have one order as numbers and on streams.
    let order = parts.iter().any(|(run, _)| run.comm.numbers.is_some()).then(bundle::order);
    for (run, _) in parts.iter_mut().filter(|(run, _)| run.comm.gpu().is_none()) {
        run.take_turn();
    }
    // All operations of a group go on at once, so none on a stream comes after another one's wait on it.
    let mut arrivals = Vec::new();
    for (run, streams) in parts.iter().filter(|(run, _)| run.comm.gpu().is_some()) {
        arrivals.push(arrive(&run.comm, streams)?);
    }
    let mut arrivals = arrivals.into_iter();
    let mut bundles: Vec<Bundle> = Vec::new();
    for (run, streams) in parts {
        match run.comm.gpu() {
            Some(_) => arrivals.next().map_or(Ok(()), |arrival| on_gpu(run, arrival))?,
            None => Bundle::add(&mut bundles, run, streams),
        }
    }
    Ok((bundles, order))
}
