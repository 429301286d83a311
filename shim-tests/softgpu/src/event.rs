//! Events: places in streams.
#![forbid(unsafe_code)]

use crate::capture::{self, Capture};
use crate::context::Context;
use crate::fault::{Result, CAPTURE_UNSUPPORTED, CONTEXT_IS_DESTROYED, INVALID_HANDLE, NOT_READY};
use crate::handles::Handles;
use crate::settings::is_broken;
use crate::stream::{Fence, Stream};
use crate::work::Work;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// An event.
pub struct Event {
    context: Arc<Context>,
    /// Whether the time is taken when it is reached.
    is_timed: bool,
    recorded: Mutex<Recorded>,
}

/// What an event stands for.
#[derive(Clone)]
enum Recorded {
    /// It was never recorded, and counts as complete.
    Never,
    /// A place in a stream, and when it was reached.
    At(Fence, Arc<OnceLock<Instant>>),
    /// Nodes of a capture.
    Captured(Arc<Capture>, Vec<usize>),
}

static EVENTS: Handles<Event> = Handles::empty();

/// Creates an event.
pub fn create(context: &Arc<Context>, is_timed: bool) -> usize {
    EVENTS.add(Event { context: context.clone(), is_timed, recorded: Mutex::new(Recorded::Never) })
}

/// Destroys an event; who waits for it goes on waiting.
pub fn destroy(handle: usize) -> Result {
    let event = EVENTS.remove(handle).ok_or(INVALID_HANDLE)?;
    if event.context.is_destroyed() {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(())
}

/// The event of a handle.
pub fn find(handle: usize) -> Result<Arc<Event>> {
    let event = EVENTS.get(handle).ok_or(INVALID_HANDLE)?;
    event.context.check()?;
    Ok(event)
}

/// Live events.
pub fn count() -> u64 {
    EVENTS.count(|event| !event.context.is_destroyed()) as u64
}

impl Event {
    /// Records all that was submitted to a stream of the event's context.
    pub fn record(&self, stream: &Arc<Stream>) -> Result {
        if !Arc::ptr_eq(&self.context, &stream.context) {
            return Err(INVALID_HANDLE);
        }
        let recorded = match stream.capture() {
            Some(capture) => {
                let nodes = capture.front(stream)?;
                Recorded::Captured(capture, nodes)
            }
            None if is_broken("cuEventRecord") => Recorded::Never,
            None => {
                let reached = Arc::new(OnceLock::new());
                Recorded::At(stream.submit(Work::Reach(reached.clone()))?, reached)
            }
        };
        *self.recorded.lock().unwrap() = recorded;
        Ok(())
    }

    /// The place that the host may ask about.
    fn place(&self) -> Result<Option<Fence>> {
        let recorded = self.recorded.lock().unwrap().clone();
        if let Recorded::Captured(capture, _) = &recorded {
            capture.invalidate();
            return Err(CAPTURE_UNSUPPORTED);
        }
        capture::forbid_unsafe()?;
        Ok(if let Recorded::At(fence, _) = recorded { Some(fence) } else { None })
    }

    /// Whether it is complete.
    pub fn query(&self) -> Result {
        let place = self.place()?.filter(|_| !is_broken("cuEventQuery"));
        if place.is_some_and(|fence| !fence.is_reached()) {
            self.context.check()?;
            return Err(NOT_READY);
        }
        self.context.check()
    }

    /// Waits until it is complete.
    pub fn synchronize(&self) -> Result {
        if let Some(fence) = self.place()?.filter(|_| !is_broken("cuEventSynchronize")) {
            fence.wait();
        }
        self.context.check()
    }

    /// What is submitted to the stream from now on comes after the event as it is now.
    pub fn hold(&self, stream: &Arc<Stream>) -> Result {
        let recorded = self.recorded.lock().unwrap().clone();
        match recorded {
            Recorded::Captured(capture, nodes) => capture.join(stream, &nodes),
            _ if stream.capture().is_some() => capture::isolation(stream),
            Recorded::Never => Ok(()),
            Recorded::At(..) if is_broken("cuStreamWaitEvent") => Ok(()),
            Recorded::At(fence, _) => stream.submit(Work::After(fence)).map(drop),
        }
    }

    /// When it was reached.
    fn time(&self) -> Result<Instant> {
        match &*self.recorded.lock().unwrap() {
            Recorded::At(_, reached) if self.is_timed => reached.get().copied().ok_or(NOT_READY),
            _ => Err(INVALID_HANDLE),
        }
    }

    /// Milliseconds from another event to this one, which both must have been reached.
    pub fn milliseconds_after(&self, start: &Event) -> Result<f32> {
        let (from, to) = (start.time()?, self.time()?);
        let apart = |late: Instant, early: Instant| late.duration_since(early).as_secs_f32() * 1e3;
        Ok(if to >= from { apart(to, from) } else { -apart(from, to) })
    }
}
