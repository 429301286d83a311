//! Strata over the vendor's library: what it knows of each of the vendor's communicators.
//!
//! The handle a program holds is the vendor's own. Beside it Strata keeps, in a table by that handle, a *companion*: a
//! communicator of its own with the same ranks, by which they tell each other where they are and what their rank 0's
//! settings are. Where nodes are even and two levels can pay, there are two more communicators of the vendor's, made out
//! of the program's: the node's and the rail's ([`subcomms`]). A communicator that is not in the table is the vendor's
//! alone.
//!
//! Calls that run in two levels are recorded inside groups and issued phase by phase at the outermost end ([`group`]).

mod calls;
pub mod coded;
pub mod group;
mod init;
mod scratch;
mod subcomms;
mod two_level;
pub mod vectored;

pub use calls::{finalize, resume, revoke, suspend};
pub use init::{after, join_id, read_id, CommInit, CreatedBy};
pub use subcomms::{Prepared, VendorCall};

use super::adapt::AdaptOptions;
use crate::config::Config;
use crate::device::gpu::driver::Driver;
use crate::error::{Code, Error, SUCCESS};
use crate::vendor::calls::VendorComm as Handle;
use crate::vendor::Library;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};
use subcomms::SubComms;

/// `ncclInProgress`
pub const IN_PROGRESS: Code = 7;
/// How long the end of a communicator waits for what still goes on with it in the background.
const MAKING_PATIENCE: Duration = Duration::from_secs(10);

/// What Strata knows of one of the vendor's communicators.
pub struct Attached {
    /// The vendor's handle.
    handle: Handle,
    /// Whether calls on it wait until they have ended.
    blocking: bool,
    /// Strata's own communicator of the same ranks.
    companion: OnceLock<Arc<super::Comm>>,
    subcomms: OnceLock<SubComms>,
    /// What goes on in the background: this one is being made, or others out of it, or calls on it are being issued. The
    /// program is told that it is in progress.
    busy: AtomicUsize,
    /// Raised when the program ends the communicator.
    ended: Arc<AtomicBool>,
    /// The first failure of calls that were issued after the program's had returned.
    failed: AtomicI32,
    /// Memory windows that the vendor's own kernels want have been registered: it does better then.
    symmetric: AtomicBool,
}

static TABLE: LazyLock<RwLock<FxHashMap<Handle, Arc<Attached>>>> = LazyLock::new(RwLock::default);

/// What is known of a communicator; nothing of one that is the vendor's alone.
pub fn find(handle: Handle) -> Option<Arc<Attached>> {
    let table = TABLE.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    table.get(&handle).cloned()
}

/// Communicators that are the vendor's alone because all their ranks share a node.
static ON_ONE_NODE: LazyLock<Mutex<FxHashSet<Handle>>> = LazyLock::new(Mutex::default);

/// Notes whether all ranks of a communicator share a node, or that it ends.
fn note_one_node(handle: Handle, is_on_one: bool) {
    let mut noted = crate::sync::locked(&ON_ONE_NODE);
    match is_on_one {
        true => noted.insert(handle),
        false => noted.remove(&handle),
    };
}

/// How many communicators the table has.
pub fn known() -> usize {
    TABLE.read().unwrap_or_else(|poisoned| poisoned.into_inner()).len()
}

/// Adds a communicator, unless the program has ended it meanwhile: the handle may be another one's by now.
fn insert(attached: &Arc<Attached>) {
    let mut table = TABLE.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    if !attached.ended.load(Ordering::Acquire) {
        table.insert(attached.handle, attached.clone());
    }
}

/// Leaves a communicator to the vendor alone.
fn remove(attached: &Arc<Attached>) {
    let mut table = TABLE.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    if table.get(&attached.handle).is_some_and(|known| Arc::ptr_eq(known, attached)) {
        table.remove(&attached.handle);
    }
}

/// Takes a communicator that the program ends out of the table for good.
fn take(handle: Handle) -> Option<Arc<Attached>> {
    let mut table = TABLE.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    let attached = table.remove(&handle)?;
    attached.ended.store(true, Ordering::Release);
    Some(attached)
}

/// Raises the count of what goes on with a communicator while its program has other things to do, for as long as it lives.
struct Busy(Arc<Attached>);

impl Busy {
    fn new(attached: &Arc<Attached>) -> Busy {
        attached.busy.fetch_add(1, Ordering::AcqRel);
        Busy(attached.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Attached {
    fn new(handle: Handle, blocking: bool) -> Arc<Attached> {
        Arc::new(Attached {
            handle,
            blocking,
            companion: OnceLock::new(),
            subcomms: OnceLock::new(),
            busy: AtomicUsize::new(0),
            ended: Arc::default(),
            failed: AtomicI32::new(SUCCESS),
            symmetric: AtomicBool::new(false),
        })
    }

    /// Whether communicators made out of this one can come to run in two levels.
    pub fn has_companion(&self) -> bool {
        self.companion.get().is_some()
    }

    /// Notes that the program has registered a window for the vendor's own symmetric kernels.
    pub fn note_symmetric(&self) {
        self.symmetric.store(true, Ordering::Release);
    }

    /// What a tuning table says of the machine that it is on.
    pub fn machine(&self) -> Option<crate::selection::table::MeasuredOn> {
        Some(self.companion.get()?.machine())
    }

    /// Who takes part in calls that Strata carries.
    pub fn state(&self) -> Option<serde_json::Value> {
        Some(self.companion.get()?.state())
    }

    /// Strata's communicator of the same ranks, where its transports carry calls between nodes.
    pub fn carrier(&self) -> Option<Arc<super::Comm>> {
        self.subcomms.get().filter(|subcomms| subcomms.is_own()).map(|subcomms| subcomms.companion().clone())
    }

    /// Has calls that Strata carries adapt as the program says. Collective over those who are left.
    pub fn adapt(&self, options: AdaptOptions, library: &'static Library) -> Result<(), Error> {
        let alone = || Error::InvalidUsage("the vendor's library alone serves this communicator".to_string());
        self.subcomms.get().ok_or_else(alone)?.adapt(options, library)
    }

    /// An error where ranks are lost: calls that only the vendor's library makes would wait for them.
    pub fn has_all(&self) -> Result<(), Error> {
        self.companion.get().map_or(Ok(()), |companion| companion.has_all())
    }

    /// An id for ranks that are to join by growing, to be carried by the vendor's.
    pub fn grow_id(&self) -> Option<super::UniqueId> {
        self.companion.get()?.grow_id().ok()
    }

    /// What `ncclCommGetAsyncError` tells while something goes on in the background: that, or the first failure of the
    /// communicators that serve this one. The vendor is not asked: a thread of ours does that, and NCCL joins its own
    /// threads then, which is for one at a time.
    pub fn meanwhile(&self, library: &Library) -> Option<Code> {
        self.in_progress().then(|| match self.levels_error(library) {
            SUCCESS => IN_PROGRESS,
            code => code,
        })
    }

    /// What `ncclCommGetAsyncError` tells where the vendor tells `told`: the first failure of all that serve the program.
    pub fn async_error(&self, library: &Library, told: Code) -> Code {
        match (told, self.failed.load(Ordering::Acquire)) {
            (SUCCESS, SUCCESS) => self.levels_error(library),
            (SUCCESS, failed) => failed,
            (told, _) => told,
        }
    }

    fn levels_error(&self, library: &Library) -> Code {
        self.subcomms.get().map_or(SUCCESS, |subcomms| subcomms.async_error(library))
    }

    /// Whether the program must not use it yet.
    pub fn in_progress(&self) -> bool {
        self.busy.load(Ordering::Acquire) > 0
    }

    /// Keeps the first failure of calls that the program was told are in progress.
    fn fail(&self, code: Code) {
        let _ = self.failed.compare_exchange(SUCCESS, code, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Does the same to the communicators that serve this one as the program does to it.
    pub fn each_level(&self, act: impl FnMut(Handle) -> Result<(), Code>) -> Result<(), Code> {
        self.subcomms.get().map_or(Ok(()), |subcomms| subcomms.each(act))
    }

    /// A call with its plan, if it runs in two levels.
    pub fn prepare(self: &Arc<Self>, call: VendorCall) -> Option<Prepared> {
        self.subcomms.get()?.prepare(self, call)
    }

    /// A call as an operation of the companion, if Strata's own transports are to carry it between nodes.
    pub fn own_call(&self, call: &VendorCall) -> Option<super::Launch> {
        self.subcomms.get()?.own_call(self, call)
    }

    /// Waits for what goes on in the background, which has been told to end.
    fn wait_quiet(&self) {
        let deadline = Instant::now() + MAKING_PATIENCE;
        while self.in_progress() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// How a communicator ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// In good order, by all ranks.
    Destroy,
    /// At once.
    Abort,
}

/// Forgets a communicator that is about to end, and ends those that serve it. To be called before the vendor ends it:
/// its handle may be another one's as soon as it has.
pub fn forget(handle: Handle, end: End, library: &Library) {
    note_one_node(handle, false);
    let Some(attached) = take(handle) else { return };
    group::drop_calls_of(&attached);
    if end == End::Abort {
        // First: what goes on may wait inside calls on them.
        attached.subcomms.get().iter().for_each(|subcomms| subcomms.end(library, end));
    }
    attached.wait_quiet();
    if let (End::Destroy, Some(companion)) = (end, attached.companion.get()) {
        // What runs uses the node's communicator.
        if let Err(error) = companion.finalize() {
            crate::info!("ending what a companion runs: {error}");
        }
    }
    if let Some(subcomms) = attached.subcomms.get() {
        subcomms.end(library, end);
        subcomms.free(library);
    }
    let Some(companion) = attached.companion.get() else { return };
    match end {
        End::Abort => companion.abort(),
        End::Destroy => {
            if let Err(error) = companion.destroy() {
                crate::info!("ending a companion: {error}");
            }
        }
    }
}

/// Communicators whose making was given up: that out of which they are made, and where the vendor writes their handles.
static GIVEN_UP: Mutex<Vec<(Handle, &AtomicUsize)>> = Mutex::new(Vec::new());

fn give_up(parent: Handle, place: &'static AtomicUsize) {
    crate::sync::locked(&GIVEN_UP).push((parent, place));
}

/// To be called after the vendor has ended a communicator, and with it the making of others out of it.
pub fn end_given_up(parent: Handle, library: &Library) {
    let ended: Vec<_> = crate::sync::locked(&GIVEN_UP).extract_if(.., |(of, _)| *of == parent).collect();
    for handle in ended.into_iter().map(|(_, place)| place.load(Ordering::Acquire)).filter(|&handle| handle != 0) {
        if let Err(code) = calls::abort(library, handle) {
            crate::info!("{}", told("ending a communicator whose making was given up", code));
        }
    }
}

/// Tells in the log what the vendor answered to a call that Strata made itself.
fn told(call: &str, code: Code) -> Error {
    Error::System(format!("{call}: the vendor's library returns {code}"))
}

/// Strata's own settings of a communicator beside one of the vendor's.
fn companion_options(handle: Handle, library: &Library) -> super::CommOptions {
    // The vendor is asked where the answer can matter only.
    let own = Config::from_env().0.inter.in_front().is_own() && Driver::get().is_some();
    let number = if own && handle != 0 { calls::device(library, handle) } else { -1 };
    let companion = Some(super::Companion { device: (number >= 0).then_some(number) });
    super::CommOptions { companion, ..super::CommOptions::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_does_not_come_back_and_leaves_its_successor_in_the_table() {
        let handle = usize::MAX - 1;
        let is = |attached: &Arc<Attached>| find(handle).is_some_and(|known| Arc::ptr_eq(&known, attached));
        let old = Attached::new(handle, true);
        insert(&old);
        assert!(is(&old) && take(handle).is_some() && find(handle).is_none());
        insert(&old);
        assert!(find(handle).is_none(), "its program has ended it");
        let new = Attached::new(handle, true);
        insert(&new);
        remove(&old);
        assert!(is(&new), "the same handle, and another communicator");
        remove(&new);
        assert!(find(handle).is_none());
    }
}
