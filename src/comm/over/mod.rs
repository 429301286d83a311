//! Strata over the vendor's library: what it knows of each of the vendor's communicators.
//!
//! The handle a program holds is the vendor's own. Beside it Strata keeps, in a table by that handle, a *companion*: a
//! communicator of its own with the same ranks, by which they tell each other where they are and what their rank 0's
//! settings are. Where nodes are even and two levels can pay, there are two more communicators of the vendor's, made out
//! of the program's: the node's and the rail's ([`levels`]). A communicator that is not in the table is the vendor's
//! alone.
//!
//! Calls that run in two levels are recorded inside groups and issued phase by phase at the outermost end ([`group`]).

mod calls;
pub mod group;
mod levels;
mod making;
mod scratch;

pub use calls::{finalize, resume, revoke, suspend};
pub use levels::{Call, Prepared};
pub use making::{after, join_id, read_id, Making, Origin};

use crate::error::{Code, Error, SUCCESS};
use crate::vendor::calls::Comm as Handle;
use crate::vendor::Library;
use levels::Levels;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, RwLock};
use std::time::{Duration, Instant};

/// `ncclInProgress`
const IN_PROGRESS: Code = 7;
/// How long an abort waits for what is still being made out of the communicator.
const MAKING_PATIENCE: Duration = Duration::from_secs(10);

/// What Strata knows of one of the vendor's communicators.
pub struct Attached {
    /// The vendor's handle.
    handle: Handle,
    /// Whether calls on it wait until they have ended.
    blocking: bool,
    /// Strata's own communicator of the same ranks.
    companion: OnceLock<Arc<super::Comm>>,
    levels: OnceLock<Levels>,
    /// Communicators that are being made: this one, or others out of it. The program is told that it is in progress.
    busy: AtomicUsize,
    /// Raised when the program ends the communicator.
    ended: Arc<AtomicBool>,
    /// Memory windows that the vendor's own kernels want have been registered: it does better then.
    symmetric: AtomicBool,
}

static TABLE: LazyLock<RwLock<FxHashMap<Handle, Arc<Attached>>>> = LazyLock::new(RwLock::default);

/// What is known of a communicator; nothing of one that is the vendor's alone.
pub fn find(handle: Handle) -> Option<Arc<Attached>> {
    let table = TABLE.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    table.get(&handle).cloned()
}

/// How many communicators the table has.
pub fn known() -> usize {
    TABLE.read().unwrap_or_else(|poisoned| poisoned.into_inner()).len()
}

fn insert(attached: &Arc<Attached>) {
    let mut table = TABLE.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    table.insert(attached.handle, attached.clone());
}

fn remove(handle: Handle) -> Option<Arc<Attached>> {
    let mut table = TABLE.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    table.remove(&handle)
}

impl Attached {
    fn new(handle: Handle, blocking: bool) -> Arc<Attached> {
        Arc::new(Attached {
            handle,
            blocking,
            companion: OnceLock::new(),
            levels: OnceLock::new(),
            busy: AtomicUsize::new(0),
            ended: Arc::default(),
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

    /// An id for ranks that are to join by growing, to be carried by the vendor's.
    pub fn grow_id(&self) -> Option<super::UniqueId> {
        self.companion.get()?.grow_id().ok()
    }

    /// What `ncclCommGetAsyncError` tells where the vendor tells `told`: while something is being made, in progress; else
    /// the first failure of the communicators that serve this one.
    pub fn async_error(&self, library: &Library, told: Code) -> Code {
        if told != SUCCESS {
            return told;
        }
        if self.busy.load(Ordering::Acquire) > 0 {
            return IN_PROGRESS;
        }
        self.levels.get().map_or(SUCCESS, |levels| levels.async_error(library))
    }

    /// Does the same to the communicators that serve this one as the program does to it.
    pub fn each_level(&self, act: impl FnMut(Handle) -> Result<(), Code>) -> Result<(), Code> {
        self.levels.get().map_or(Ok(()), |levels| levels.each(act))
    }

    /// A call with its plan, if it runs in two levels.
    pub fn prepare(self: &Arc<Self>, call: Call) -> Option<Prepared> {
        self.levels.get()?.prepare(self, call)
    }

    /// Waits for what is being made out of the communicator, which has been told to end.
    fn wait_made(&self) {
        let deadline = Instant::now() + MAKING_PATIENCE;
        while self.busy.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
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
    let Some(attached) = remove(handle) else { return };
    attached.ended.store(true, Ordering::Release);
    group::drop_calls_of(&attached);
    attached.wait_made();
    let Some(companion) = attached.companion.get() else { return };
    if let Some(levels) = attached.levels.get() {
        levels.end(library, end);
    }
    match end {
        End::Abort => companion.abort(),
        End::Destroy => {
            if let Err(error) = companion.destroy() {
                crate::info!("ending a companion: {error}");
            }
        }
    }
}

/// Tells in the log what the vendor answered to a call that Strata made itself.
fn told(call: &str, code: Code) -> Error {
    Error::System(format!("{call}: the vendor's library returns {code}"))
}

/// Strata's own settings of a communicator beside one of the vendor's.
fn companion_options() -> super::CommOptions {
    super::CommOptions { companion: true, ..super::CommOptions::default() }
}
