//! What follows when the vendor makes a communicator for the program: Strata's companion, and the two subcommunicators.
//!
//! Where the program waits for the vendor, it waits for this as well, and uses the communicator only afterwards. Where it
//! does not, this goes on in the background, and the program is told that the communicator (or the one that it is made out
//! of) is in progress until it has ended.
//!
//! The ranks' companions meet by means of the vendor's unique id: it fills the first 40 of its 128 bytes, and its last 64
//! carry what Strata's own needs. An id without them (of a process without Strata, or one from `NCCL_COMM_ID`) makes a
//! communicator that is the vendor's alone.

use super::calls::wait_ready;
use super::subcomms::SubComms;
use super::{companion_options, group, insert, remove, Attached, Busy, Handle, IN_PROGRESS};
use crate::communicator::{Comm, InitParams, UniqueId};
use crate::error::{Code, Error, Result, SUCCESS};
use crate::log::Level;
use crate::process::thread;
use crate::vendor::Library;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

/// Bytes of an id that are the vendor's.
const VENDOR_BYTES: usize = 64;

/// How a program makes a communicator.
pub enum CreatedBy {
    /// From unique ids.
    Ids {
        /// Strata's part of the ids.
        ids: Vec<UniqueId>,
        /// How many ranks there will be.
        nranks: usize,
        /// This one's number.
        rank: usize,
    },
    /// By color out of another one.
    Split {
        /// The other one.
        parent: Arc<Attached>,
        /// As the program says it; negative for a rank that gets none.
        color: i32,
        /// As the program says it.
        key: i32,
    },
    /// By leaving ranks out of another one.
    Shrink {
        /// The other one.
        parent: Arc<Attached>,
        /// The ranks that are left out.
        excluded: Vec<usize>,
        /// Whether operations of the other one are ended first.
        abort: bool,
    },
    /// By adding ranks to another one.
    Grow {
        /// The other one.
        parent: Arc<Attached>,
        /// How many ranks there will be.
        nranks: usize,
        /// Strata's part of the new ranks' id, on the one rank that gives it.
        id: Option<UniqueId>,
    },
    /// As one of the ranks added.
    Join {
        /// Strata's part of the id.
        id: UniqueId,
        /// How many ranks there will be.
        nranks: usize,
        /// This one's number.
        rank: usize,
    },
}

/// A communicator that the vendor makes.
pub struct CommInit {
    /// How.
    pub origin: CreatedBy,
    /// Where the vendor writes its handle.
    pub place: *const Handle,
    /// Whether calls on it will wait; none where that is as on its parent.
    pub blocking: Option<bool>,
}

// SAFETY: the place may be read from another thread; because the vendor itself writes there from its own threads, and the
// program keeps it for them.
unsafe impl Send for CommInit {}

impl CommInit {
    fn handle(&self) -> Handle {
        // SAFETY: the place must be valid for reads; because the program gave it to the vendor for the handle and keeps it
        // until it has been told that the making has ended.
        unsafe { self.place.read_unaligned() }
    }

    fn parent(&self) -> Option<&Arc<Attached>> {
        match &self.origin {
            CreatedBy::Split { parent, .. } | CreatedBy::Shrink { parent, .. } | CreatedBy::Grow { parent, .. } => {
                Some(parent)
            }
            CreatedBy::Ids { .. } | CreatedBy::Join { .. } => None,
        }
    }

    fn attached(&self) -> Arc<Attached> {
        let inherited = || self.parent().is_none_or(|parent| parent.blocking);
        Attached::new(self.handle(), self.blocking.unwrap_or_else(inherited))
    }

    /// Strata's communicator of the same ranks. Collective. None for a rank that gets none.
    fn companion(&self, handle: Handle, library: &Library, cancel: &AtomicBool) -> Result<Option<Arc<Comm>>> {
        let of = |parent: &Attached| {
            parent.companion.get().cloned().ok_or_else(|| Error::Internal("a parent without a companion".to_string()))
        };
        let options = companion_options(handle, library);
        match &self.origin {
            CreatedBy::Ids { ids, nranks, rank } => {
                let params =
                    InitParams { nranks: *nranks, rank: *rank, ids: ids.clone(), options, device: 0, gpu: None };
                Comm::init(params, cancel).map(Some)
            }
            CreatedBy::Split { parent, color, key } => of(parent)?.split(*color, *key, options, cancel),
            CreatedBy::Shrink { parent, excluded, abort } => {
                of(parent)?.shrink(excluded, *abort, options, cancel).map(Some)
            }
            CreatedBy::Grow { parent, nranks, id } => {
                Comm::grow(Some(&of(parent)?), *nranks, *id, None, options, cancel).map(Some)
            }
            CreatedBy::Join { id, nranks, rank } => {
                Comm::grow(None, *nranks, Some(*id), Some(*rank), options, cancel).map(Some)
            }
        }
    }
}

/// Strata's part of a unique id, if there is one.
pub fn read_id(id: &[u8; 128]) -> Option<UniqueId> {
    let mut own = [0; 128];
    own[..VENDOR_BYTES].copy_from_slice(&id[VENDOR_BYTES..]);
    let own = UniqueId(own);
    own.credentials().is_ok().then_some(own)
}

/// A unique id of the vendor's together with Strata's; as it is, if the vendor uses all of it.
pub fn join_id(mut id: [u8; 128], own: UniqueId) -> [u8; 128] {
    let free = id[VENDOR_BYTES..].iter().all(|&byte| byte == 0);
    if free && own.0[VENDOR_BYTES..].iter().all(|&byte| byte == 0) {
        id[VENDOR_BYTES..].copy_from_slice(&own.0[..VENDOR_BYTES]);
    }
    id
}

/// To be called when the vendor's function has returned `code`: what follows is done now, in the background, or at the
/// end of the open group. Returns what the program is to be told.
pub fn after(making: CommInit, code: Code, library: &'static Library) -> Code {
    if code != SUCCESS && code != IN_PROGRESS {
        return code;
    }
    if group::is_open() {
        group::record_making(making);
    } else {
        finish(vec![making], code, library);
    }
    code
}

/// Does what follows for communicators that the vendor makes together: now, if it has made them, else in the background.
pub(super) fn finish(makings: Vec<CommInit>, code: Code, library: &'static Library) {
    match code {
        _ if makings.is_empty() => {}
        SUCCESS => std::thread::scope(|scope| {
            // Each on a thread of its own: they wait for other ranks, which may be this process's, too.
            for making in makings {
                let work = move || make(&making, making.attached(), library);
                if let Err(error) = thread("strata-attach").and_then(|thread| thread.spawn_scoped(scope, work)) {
                    crate::log::warn(&format!("starting a thread for a communicator: {error}"));
                }
            }
        }),
        _ => makings.into_iter().for_each(|making| in_background(making, library)),
    }
}

fn in_background(making: CommInit, library: &'static Library) {
    let parent = making.parent().map(Busy::new);
    // A communicator that has no parent has its handle at once.
    let own = parent.is_none().then(|| {
        let attached = making.attached();
        insert(&attached);
        Busy::new(&attached)
    });
    let work = move || {
        let watched = own.as_ref().or(parent.as_ref()).map(|busy| busy.0.clone());
        let Some(watched) = watched else { return };
        if wait_ready(library, watched.handle, &watched.ended).is_err() {
            own.iter().for_each(|own| remove(&own.0));
            return;
        }
        match &own {
            Some(own) => make(&making, own.0.clone(), library),
            None => {
                let attached = making.attached();
                let busy = Busy::new(&attached);
                if attached.handle != 0 {
                    insert(&attached);
                    if wait_ready(library, attached.handle, &watched.ended).is_err() {
                        remove(&attached);
                        return;
                    }
                }
                make(&making, attached, library);
                drop(busy);
            }
        }
    };
    if let Err(error) = thread("strata-attach").and_then(|thread| thread.spawn(work)) {
        crate::log::warn(&format!("starting a thread for a communicator: {error}"));
    }
}

/// Brings the companions together and makes the subcomms. A communicator for which that fails, or for which it cannot pay,
/// is the vendor's alone.
fn make(making: &CommInit, attached: Arc<Attached>, library: &Library) {
    let cancel = making.parent().map_or(&attached, |parent| parent).ended.clone();
    super::note_one_node(attached.handle, false);
    match try_make(making, &attached, library, &cancel) {
        Ok(true) => insert(&attached),
        Ok(false) => remove(&attached),
        Err(error) => {
            remove(&attached);
            let text = format!("the vendor's library alone serves a communicator: {error}");
            crate::log::write(Level::Warn, &text);
        }
    }
}

/// Whether the communicator, or one made out of it, can come to run in two levels.
fn try_make(making: &CommInit, attached: &Arc<Attached>, library: &Library, cancel: &AtomicBool) -> Result<bool> {
    let Some(companion) = making.companion(attached.handle, library, cancel)? else { return Ok(false) };
    let grid = companion.grid();
    if attached.handle == 0 || grid.nnodes() == 1 || (grid.nrails() == 1 && companion.gpu().is_none()) {
        let is_on_one = attached.handle != 0 && grid.nnodes() == 1;
        companion.destroy()?;
        super::note_one_node(attached.handle, is_on_one);
        return Ok(false);
    }
    match SubComms::make(attached, &companion, library, cancel) {
        Ok(subcomms) => {
            let (rank, nranks) = (companion.rank(), companion.nranks());
            if subcomms.is_some() {
                crate::info!("rank {rank} of {nranks}: two levels over {library}, {grid}");
            }
            // Nobody else knows the communicator yet.
            if let Some(subcomms) = subcomms {
                let _ = attached.subcomms.set(subcomms);
            }
            let _ = attached.companion.set(companion);
            Ok(true)
        }
        Err(error) => {
            companion.abort();
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_carries_both_and_one_that_is_full_or_bare_the_vendor_s_alone() {
        let own = UniqueId::from_address("127.0.0.1:4321", "").unwrap();
        let mut vendor = [0; 128];
        vendor[..40].fill(7);
        assert!(read_id(&vendor).is_none());
        let joined = join_id(vendor, own);
        assert_eq!(joined[..64], vendor[..64]);
        assert!(read_id(&joined) == Some(own));
        vendor[100] = 1;
        assert_eq!(join_id(vendor, own), vendor);
    }
}
