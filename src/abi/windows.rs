//! Bodies of the entries for windows, in which collectives are held back until they are many ([`crate::communicator::group`]).
#![forbid(unsafe_code)]

use super::communicators::run_on;
use super::handles::{self, Handle};
use crate::communicator::{group, Comm, WindowBounds};
use crate::error::{Error, Result};
use crate::interface::types::CommHandle;
use crate::vendor;
use std::sync::Arc;

/// Whether it is a communicator of the vendor's library, which groups calls by itself: nothing is held back.
fn is_vendor_s(comm: CommHandle) -> bool {
    !comm.is_null() && !handles::is_name(comm) && vendor::library().is_some()
}

/// The communicator, and its handle.
fn usable(comm: CommHandle) -> Result<(Arc<Handle>, Arc<Comm>)> {
    let handle = handles::find(comm)?;
    let comm = handle.usable()?;
    Ok((handle, comm))
}

/// `strataWindowBegin`
pub fn begin(comm: CommHandle, bytes: usize, us: u32) -> Result<()> {
    if is_vendor_s(comm) {
        return Ok(());
    }
    let record = || {
        let (handle, comm) = usable(comm)?;
        let (bounds, blocking) = (WindowBounds { bytes, us }, handle.blocking);
        if us == 0 {
            comm.open_window(bounds, &Default::default())?;
            handle.set_window(true);
            return Ok(());
        }
        run_on(handle, blocking, false, move |handle, cancel| {
            comm.open_window(bounds, cancel)?;
            handle.set_window(true);
            Ok(())
        })
    };
    group::noted(record())
}

/// `strataWindowEnd`
pub fn end(comm: CommHandle) -> Result<()> {
    if is_vendor_s(comm) {
        return Ok(());
    }
    let record = || {
        let (handle, comm) = usable(comm)?;
        let blocking = handle.blocking;
        if !comm.window_has_clock() {
            let held = comm.end_window()?;
            handle.set_window(false);
            return group::release(held, blocking);
        }
        run_on(handle, blocking, false, move |handle, _| {
            let outcome = comm.await_window();
            handle.set_window(false);
            outcome
        })
    };
    group::noted(record())
}

/// An error where a window of the communicator is open and nothing has failed.
pub fn refuse_open(comm: &Comm, call: &str) -> Result<()> {
    match comm.has_window() && comm.failure().is_none() {
        true => {
            Err(Error::InvalidUsage(format!("{call} in a window of the communicator: strataWindowEnd comes first")))
        }
        false => Ok(()),
    }
}
