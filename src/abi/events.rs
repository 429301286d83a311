//! Events as C programs see them: marks in the order of host streams, for which other streams wait.
//!
//! An event's name is a number that is looked up and never dereferenced, so an event of CUDA's is recognised as not ours.
#![forbid(unsafe_code)]

use super::streams;
use crate::communicator::group;
use crate::device::host::event::HostEvent;
use crate::device::host::stream::HostStream;
use crate::device::StreamRef;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::interface::pointer::Ptr;
use crate::interface::types::{null, EventHandle, StreamHandle};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

/// Names begin here; no address of a user program has these bits, and no stream is called so.
const FIRST_NAME: usize = 0x0c0e_0000_0000_0010;
const NAME_STEP: usize = 0x10;

static NEXT_NAME: AtomicUsize = AtomicUsize::new(FIRST_NAME);
/// A forked child has none of its parent's events, as it has none of its streams.
static LIVE: PerProcess<RwLock<HashMap<usize, Arc<HostEvent>>>> = PerProcess::new(RwLock::default);

fn find(name: EventHandle) -> Result<Arc<HostEvent>> {
    let live = LIVE.get().read().unwrap_or_else(|poisoned| poisoned.into_inner());
    live.get(&name.0).cloned().ok_or_else(|| {
        let is_own = (FIRST_NAME..NEXT_NAME.load(Ordering::Relaxed)).contains(&name.0);
        Error::InvalidArgument(match is_own {
            true => format!("event {:#x} has been destroyed, or is of the process that forked this one", name.0),
            false => format!("event {:#x} is not one of strataEventCreate's", name.0),
        })
    })
}

/// The host stream of this name; none for the null stream.
fn stream(name: StreamHandle) -> Result<Option<Arc<HostStream>>> {
    Ok(match streams::find(name)? {
        StreamRef::Stream(stream) => Some(stream),
        StreamRef::Null | StreamRef::Gpu(_) => None,
    })
}

fn outside_of_groups(what: &str) -> Result<()> {
    match group::is_open() {
        true => Err(Error::InvalidUsage(format!(
            "{what} in an open group, whose operations are queued when it ends: call it before ncclGroupStart or after \
             ncclGroupEnd"
        ))),
        false => Ok(()),
    }
}

/// `strataEventCreate`
pub fn create(out: Ptr<EventHandle>) -> Result<()> {
    if out.is_null() {
        return Err(null("event"));
    }
    let name = NEXT_NAME.fetch_add(NAME_STEP, Ordering::Relaxed);
    LIVE.get().write().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(name, HostEvent::new());
    out.set("event", EventHandle(name))
}

/// `strataEventRecord`
pub fn record(name: EventHandle, on: StreamHandle) -> Result<()> {
    let event = find(name)?;
    let stream = stream(on)?;
    outside_of_groups("an event cannot be recorded")?;
    event.record(stream.as_ref())
}

/// `strataEventStreamWait`
pub fn stream_wait(on: StreamHandle, name: EventHandle) -> Result<()> {
    let stream = stream(on)?;
    let event = find(name)?;
    outside_of_groups("an event cannot be awaited by a stream")?;
    event.hold(stream.as_ref())
}

/// `strataEventQuery`
pub fn query(name: EventHandle) -> Result<()> {
    find(name)?.query()
}

/// `strataEventSynchronize`
pub fn synchronize(name: EventHandle) -> Result<()> {
    find(name)?.synchronize()
}

/// `strataEventDestroy`
pub fn destroy(name: EventHandle) -> Result<()> {
    find(name)?;
    LIVE.get().write().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&name.0);
    Ok(())
}
