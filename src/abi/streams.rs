//! Streams as C programs see them, and the `strata` functions that make and end them.
//!
//! A stream's name, like a communicator's, is a number that is looked up and never dereferenced; so a stream of CUDA's
//! is recognised as not ours. Null, `cudaStreamLegacy` (1) and `cudaStreamPerThread` (2) are the null stream.
#![forbid(unsafe_code)]

use crate::communicator::front::{self, Range, RangeWait};
use crate::communicator::{group, Comm};
use crate::device::gpu::driver::Driver;
use crate::device::host::stream::HostStream;
use crate::device::StreamRef;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::interface::pointer::{Buffer, Callback, ConstBuffer, Ptr, StatusCallback};
use crate::interface::types::{null, Status, StreamHandle};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

/// Names begin here; no address of a user program has these bits.
const FIRST_NAME: usize = 0x0c0d_0000_0000_0010;
const NAME_STEP: usize = 0x10;
const LAST_NULL: usize = 2;

static NEXT_NAME: AtomicUsize = AtomicUsize::new(FIRST_NAME);
/// A forked child has none of its parent's streams: their threads are not there.
static LIVE: PerProcess<RwLock<HashMap<usize, Arc<HostStream>>>> = PerProcess::new(RwLock::default);

/// Whether this is a name of the null stream.
pub fn is_named_null(name: StreamHandle) -> bool {
    name.0 <= LAST_NULL
}

/// The stream with this name.
pub fn find(name: StreamHandle) -> Result<StreamRef> {
    if name.0 <= LAST_NULL {
        return Ok(StreamRef::Null);
    }
    let live = LIVE.get().read().unwrap_or_else(|poisoned| poisoned.into_inner());
    let stream = live.get(&name.0).cloned();
    stream.map(StreamRef::Stream).ok_or_else(|| {
        let text = match is_own(name) {
            true => format!("stream {:#x} has been destroyed, or is of the process that forked this one", name.0),
            false => format!(
                "stream {:#x} is not one of strataStreamCreate's; without a GPU there are no CUDA streams",
                name.0
            ),
        };
        Error::InvalidArgument(text)
    })
}

/// Whether a name is, or was, one of ours.
fn is_own(name: StreamHandle) -> bool {
    (FIRST_NAME..NEXT_NAME.load(Ordering::Relaxed)).contains(&name.0)
}

/// The stream that orders an operation of a communicator: on a GPU's the driver's, whatever its name is, elsewhere one of
/// ours.
pub fn of(comm: &Comm, name: StreamHandle) -> Result<StreamRef> {
    if comm.gpu().is_none() {
        return find(name);
    }
    match is_own(name) {
        true => Err(of_driver(name, "on a GPU")),
        false => Ok(StreamRef::Gpu(name.0)),
    }
}

/// An error for a stream of ours on a communicator of the vendor's library, which would take it for one of the driver's.
pub fn check_of_vendor(name: StreamHandle) -> Result<()> {
    match is_own(name) {
        true => Err(of_driver(name, "another library's on a GPU")),
        false => Ok(()),
    }
}

fn of_driver(name: StreamHandle, whose: &str) -> Error {
    Error::InvalidArgument(format!(
        "stream {:#x} is one of strataStreamCreate's; the communicator is {whose}, whose driver makes its streams",
        name.0
    ))
}

/// `strataStreamCreate`
pub fn create(out: Ptr<StreamHandle>) -> Result<()> {
    if out.is_null() {
        return Err(null("stream"));
    }
    let name = NEXT_NAME.fetch_add(NAME_STEP, Ordering::Relaxed);
    LIVE.get().write().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(name, HostStream::new());
    out.set("stream", StreamHandle(name))
}

/// `strataStreamDestroy`
pub fn destroy(name: StreamHandle) -> Result<()> {
    match find(name)? {
        StreamRef::Null | StreamRef::Gpu(_) => {
            Err(Error::InvalidArgument("the null stream cannot be destroyed".to_string()))
        }
        StreamRef::Stream(stream) => {
            LIVE.get().write().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&name.0);
            stream.close();
            Ok(())
        }
    }
}

/// `strataStreamSynchronize`
pub fn synchronize(name: StreamHandle) -> Result<()> {
    match find(name)? {
        StreamRef::Null | StreamRef::Gpu(_) => Ok(()),
        StreamRef::Stream(stream) => stream.synchronize(),
    }
}

/// `strataStreamQuery`
pub fn query(name: StreamHandle) -> Result<()> {
    match find(name)? {
        StreamRef::Null | StreamRef::Gpu(_) => Ok(()),
        StreamRef::Stream(stream) => stream.query(),
    }
}

/// `strataStreamWaitRange`
pub fn wait_range(name: StreamHandle, data: ConstBuffer, bytes: usize) -> Result<()> {
    let found = match find(name) {
        Err(error) if is_own(name) => return Err(error),
        found => found,
    };
    let range = Range::new(data.address(), bytes)?;
    if group::is_open() {
        let text = "a range cannot be awaited in an open group: its operations are queued when it ends";
        return Err(Error::InvalidUsage(text.to_string()));
    }
    let wait = RangeWait::new(range);
    // Other names are the driver's, if there is one. Its null stream is a stream.
    let stream = match found {
        Ok(StreamRef::Stream(stream)) => return stream.enqueue(move || wait.wait()),
        _ if wait.is_on_device() => StreamRef::Gpu(name.0),
        Err(_) if Driver::known().is_some() => StreamRef::Gpu(name.0),
        found => found?,
    };
    match stream {
        StreamRef::Gpu(stream) => wait.hold(stream),
        StreamRef::Null if wait.is_behind_this() => {
            let text = "a callback of a stream cannot wait for an operation that is queued behind it";
            Err(Error::InvalidUsage(text.to_string()))
        }
        _ => wait.wait(),
    }
}

/// `strataRangeQuery`
pub fn query_range(data: ConstBuffer, bytes: usize, out: Ptr<usize>) -> Result<()> {
    if out.is_null() {
        return Err(null("finalBytes"));
    }
    let known = Range::new(data.address(), bytes).and_then(front::final_bytes);
    out.set("finalBytes", *known.as_ref().unwrap_or(&0))?;
    known.map(drop)
}

/// `strataStreamAddCallback`
pub fn add_callback(name: StreamHandle, callback: Callback, argument: Buffer) -> Result<()> {
    let stream = find(name)?;
    let callback = callback.get("callback")?;
    stream.enqueue(move || {
        callback(argument.address());
        Ok(())
    })
}

/// `strataStreamAddCallbackStatus`. On the null stream nothing is queued, so there is nothing to tell of.
pub fn add_callback_status(name: StreamHandle, callback: StatusCallback, argument: Buffer) -> Result<()> {
    let stream = find(name)?;
    let callback = callback.get("callback")?;
    let tell = move |outcome: Result<()>| match outcome {
        Ok(()) => callback(argument.address(), Status::SUCCESS),
        Err(error) => {
            crate::log::warn(error.text());
            crate::log::while_told(error.text(), || callback(argument.address(), Status(error.code())));
        }
    };
    match stream {
        StreamRef::Stream(stream) => stream.tell(tell),
        StreamRef::Null | StreamRef::Gpu(_) => {
            tell(Ok(()));
            Ok(())
        }
    }
}
