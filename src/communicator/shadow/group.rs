//! Groups of a program's calls, where some of them run in two levels.
//!
//! The vendor's group is opened and closed as the program does it, so that what Strata does not look at goes there as it
//! is. Calls that run in two levels are recorded; at the outermost end their first phase joins the open group, and each
//! further phase is a group of its own. So calls of one group, also on several devices of one thread, go on together
//! phase by phase, as all ranks do it. Those on communicators whose calls do not wait are issued by a thread of their own:
//! the vendor's calls on the two subcommunicators do wait.
#![forbid(unsafe_code)]

use super::init::{self, CommInit};
use super::subcomms::Prepared;
use super::two_level;
use super::{calls, scratch, Attached, Busy, IN_PROGRESS};
use crate::communicator::Launch;
use crate::error::{Code, Error, SUCCESS};
use crate::process;
use crate::vendor::Library;
use std::cell::RefCell;
use std::sync::Arc;

#[derive(Default)]
struct Recording {
    depth: usize,
    calls: Vec<Prepared>,
    own: Vec<Launch>,
    makings: Vec<CommInit>,
}

thread_local! {
    static RECORDING: RefCell<Recording> = RefCell::default();
}

/// Whether the program has a group open on this thread.
pub fn is_open() -> bool {
    RECORDING.with_borrow(|recording| recording.depth > 0)
}

/// `ncclGroupStart`; `vendor` is the vendor's.
pub fn start(vendor: impl FnOnce() -> Code) -> Code {
    let code = vendor();
    if code == SUCCESS {
        RECORDING.with_borrow_mut(|recording| recording.depth += 1);
    }
    code
}

/// Records a call, or issues it where no group is open.
pub fn submit(call: Prepared, library: &'static Library) -> Code {
    let alone = RECORDING.with_borrow_mut(|recording| match recording.depth {
        0 => Some(call),
        _ => {
            recording.calls.push(call);
            None
        }
    });
    let Some(call) = alone else { return SUCCESS };
    let waits = call.attached.blocking;
    let mut alone = [call];
    match scratch::share_out(&mut alone, library) {
        Ok(()) if waits => issue_from(0, &alone, library),
        Ok(()) => issue_in_background(alone.into(), library),
        Err(code) => code,
    }
}

/// Records an operation of a companion, or launches it where no group is open.
pub fn submit_own(operation: Launch) -> Code {
    let alone = RECORDING.with_borrow_mut(|recording| match recording.depth {
        0 => Some(operation),
        _ => {
            recording.own.push(operation);
            None
        }
    });
    alone.map_or(SUCCESS, |alone| two_level::launch(vec![alone]))
}

/// Records that a communicator is being made in the open group.
pub(super) fn record_making(making: CommInit) {
    RECORDING.with_borrow_mut(|recording| recording.makings.push(making));
}

/// Forgets recorded calls of a communicator that ends.
pub(super) fn drop_calls_of(attached: &Arc<Attached>) {
    let keep = |call: &Prepared| !Arc::ptr_eq(&call.attached, attached);
    let companion = attached.companion.get();
    RECORDING.with_borrow_mut(|recording| {
        recording.calls.retain(keep);
        recording.own.retain(|launch| companion.is_none_or(|companion| !Arc::ptr_eq(companion, &launch.comm)));
    });
}

/// Closes the innermost group; what was recorded, if it was the outermost one.
fn close() -> Option<Recording> {
    RECORDING.with_borrow_mut(|recording| match recording.depth {
        0 => None,
        1 => Some(std::mem::take(recording)),
        _ => {
            recording.depth -= 1;
            None
        }
    })
}

/// `ncclGroupEnd`; `vendor` is the vendor's.
pub fn end(library: &'static Library, vendor: impl FnOnce() -> Code) -> Code {
    let Some(Recording { calls, own, makings, .. }) = close() else { return vendor() };
    let (mut calls, left) = scratch::what_fits(calls);
    // Communicators of both kinds cannot share a group, and those that serve a nonblocking one are blocking themselves.
    let waits = calls.iter().all(|call| call.attached.blocking);
    let begun = left.iter().try_for_each(|call| calls::as_made(call, library)).and_then(|()| {
        scratch::share_out(&mut calls, library)?;
        if waits {
            issue(0, &calls, library)?;
        }
        Ok(())
    });
    let ended = vendor();
    if let Err(code) = begun {
        // The vendor drops a group in which a call has failed.
        return if ended == SUCCESS { code } else { ended };
    }
    if ended != SUCCESS && ended != IN_PROGRESS {
        return ended;
    }
    let code = match waits {
        true => issue_from(1, &calls, library),
        false => issue_in_background(calls, library),
    };
    let code = match code {
        SUCCESS if !own.is_empty() => two_level::launch(own),
        code => code,
    };
    init::finish(makings, ended, library);
    if code == SUCCESS {
        ended
    } else {
        code
    }
}

/// `ncclGroupSimulateEnd`; `vendor` is the vendor's, which sees the calls as the program made them.
pub fn simulate_end(library: &Library, vendor: impl FnOnce() -> Code) -> Code {
    for call in close().into_iter().flat_map(|recording| recording.calls) {
        if let Err(code) = calls::as_made(&call, library) {
            let ended = vendor();
            return if ended == SUCCESS { code } else { ended };
        }
    }
    vendor()
}

/// Issues all phases of calls that do not wait. Their communicators are in progress meanwhile.
fn issue_in_background(calls: Vec<Prepared>, library: &'static Library) -> Code {
    let busy: Vec<Busy> = calls.iter().map(|call| Busy::new(&call.attached)).collect();
    let work = move || {
        // The vendor's part of the group first, as on all other ranks: its threads may still be about to issue it.
        let vendor_s = |call: &Prepared| calls::wait_ready(library, call.attached.handle, &call.attached.ended);
        let code = match calls.iter().try_for_each(vendor_s) {
            Ok(()) => issue_from(0, &calls, library),
            Err(code) => code,
        };
        if code != SUCCESS {
            calls.iter().for_each(|call| call.attached.fail(code));
        }
        drop(busy);
    };
    match process::thread("strata-issue").and_then(|thread| thread.spawn(work)) {
        Ok(_) => IN_PROGRESS,
        Err(error) => {
            let error = Error::System(format!("starting a thread for calls: {error}"));
            crate::log::failed(error.text());
            error.code()
        }
    }
}

/// Issues the phases from `first` on, each as a group.
fn issue_from(first: usize, calls: &[Prepared], library: &Library) -> Code {
    let phases = calls.iter().map(Prepared::phases).max().unwrap_or(0);
    for phase in first..phases {
        let width: usize = calls.iter().map(|call| call.width(phase)).sum();
        let outcome = match width {
            0 => Ok(()),
            1 => issue(phase, calls, library),
            _ => calls::in_group(library, || issue(phase, calls, library)),
        };
        if let Err(code) = outcome {
            return code;
        }
    }
    SUCCESS
}

fn issue(phase: usize, calls: &[Prepared], library: &Library) -> Result<(), Code> {
    calls.iter().try_for_each(|call| call.issue(phase, library))
}
