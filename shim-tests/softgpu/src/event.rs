//! Events: places in streams.
#![forbid(unsafe_code)]

use crate::capture::{self, Capture};
use crate::context::Context;
use crate::fault::{Result, CAPTURE_UNSUPPORTED, CONTEXT_IS_DESTROYED, INVALID_HANDLE, NOT_READY};
use crate::handles::Handles;
use crate::settings::is_broken;
use crate::stream::{Fence, Stream};
use crate::work::Work;
use std::sync::{Arc, Mutex};

/// An event.
pub struct Event {
    context: Arc<Context>,
    recorded: Mutex<Recorded>,
}

/// What an event stands for.
#[derive(Clone)]
enum Recorded {
    /// It was never recorded, and counts as complete.
    Never,
    /// A place in a stream.
    At(Fence),
    /// Nodes of a capture.
    Captured(Arc<Capture>, Vec<usize>),
}

static EVENTS: Handles<Event> = Handles::empty();

/// Creates an event.
pub fn create(context: &Arc<Context>) -> usize {
    EVENTS.add(Event { context: context.clone(), recorded: Mutex::new(Recorded::Never) })
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
            None => Recorded::At(stream.submit(Work::Nothing)?),
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
        Ok(if let Recorded::At(fence) = recorded { Some(fence) } else { None })
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
            Recorded::At(_) if is_broken("cuStreamWaitEvent") => Ok(()),
            Recorded::At(fence) => stream.submit(Work::After(fence)).map(drop),
        }
    }
}
