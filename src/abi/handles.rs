//! The communicators a program holds: names for them, and the state that goes with a name.
//!
//! An `ncclComm_t` is a number that was never used before and cannot be an address, so a handle that was destroyed, or
//! that never was one, is recognised by looking it up and is never dereferenced. A name can stand for a communicator
//! that is still being made (nonblocking, or recorded in a group).
//!
//! A forked child begins with no communicators: its parent's it knows by their numbers alone, and refuses them.
#![forbid(unsafe_code)]

use super::interrupted::HoldsNames;
use crate::communicator::Comm;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::interface::types::CommHandle;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LockResult, Mutex, MutexGuard, RwLock};

/// Names begin here. Bits 48 to 63 of an address of a user program are zero.
const FIRST_NAME: usize = 0x0c0c_0000_0000_0010;
const NAME_STEP: usize = 0x10;

static NEXT_NAME: AtomicUsize = AtomicUsize::new(FIRST_NAME);
static NAMES: PerProcess<Names> =
    PerProcess::new(|| Names { first: NEXT_NAME.load(Ordering::Relaxed), live: RwLock::default() });

/// The communicators of one process.
struct Names {
    /// Lower numbers are names that the process this one was forked from gave out.
    first: usize,
    live: RwLock<HashMap<usize, Arc<Handle>>>,
}

/// A lock of this module's, which a signal handler of this thread does not wait for.
struct Held<G> {
    guard: G,
    _holds: HoldsNames,
}

impl<G> Held<G> {
    fn new(lock: impl FnOnce() -> LockResult<G>) -> Held<G> {
        let holds = HoldsNames::enter();
        Held { guard: lock().unwrap_or_else(|poisoned| poisoned.into_inner()), _holds: holds }
    }
}

impl<G: Deref> Deref for Held<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Held<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

/// A communicator as the program sees it.
pub struct Handle {
    /// Its name.
    pub name: CommHandle,
    /// Whether calls wait until they have ended.
    pub blocking: bool,
    /// Buffers registered with it, by the number that was given out.
    pub registered: Mutex<HashMap<usize, (usize, usize)>>,
    revoked: AtomicBool,
    /// Whether operations can be started on it, as far as its state here says.
    open: AtomicBool,
    /// Aborted inside a call of its thread, which takes the name away.
    told: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    comm: Option<Arc<Comm>>,
    /// Tasks on the communicator that have not ended.
    busy: usize,
    /// Why the communicator could not be made, or a bug that struck it.
    failure: Option<Error>,
    removed: bool,
    /// Its collectives are held back.
    has_window: bool,
    /// Raised to end the tasks that make communicators: this one, or others out of it.
    cancels: Vec<Arc<AtomicBool>>,
    cancelled: bool,
}

impl Handle {
    /// A new name, for a communicator that is still to be made.
    pub fn reserve(blocking: bool) -> Arc<Handle> {
        // Before a number is taken: what this process takes is its own.
        let names = NAMES.get();
        let name = NEXT_NAME.fetch_add(NAME_STEP, Ordering::Relaxed);
        let handle = Arc::new(Handle {
            name: CommHandle(name),
            blocking,
            registered: Mutex::default(),
            revoked: AtomicBool::new(false),
            open: AtomicBool::new(false),
            told: AtomicBool::new(false),
            state: Mutex::default(),
        });
        Held::new(|| names.live.write()).insert(name, handle.clone());
        handle
    }

    fn state(&self) -> Held<MutexGuard<'_, State>> {
        Held::new(|| self.state.lock())
    }

    /// Changes the state.
    fn change<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state();
        let done = act(&mut state);
        let open =
            state.comm.is_some() && state.busy == 0 && state.failure.is_none() && !state.removed && !state.has_window;
        self.open.store(open && !self.revoked.load(Ordering::Acquire), Ordering::Release);
        done
    }

    /// Says that a task on the communicator has begun; each is followed by one of the three below.
    pub fn begin(&self) {
        self.change(|state| state.busy += 1);
    }

    /// A flag for a task on the communicator, which [`cancel`](Handle::cancel) raises.
    pub fn cancellable(&self) -> Arc<AtomicBool> {
        let mut state = self.state();
        state.cancels.retain(|cancel| Arc::strong_count(cancel) > 1);
        let cancel = Arc::new(AtomicBool::new(state.cancelled));
        state.cancels.push(cancel.clone());
        cancel
    }

    /// Whether a task on the communicator has been told to end early, by an abort or by the failure of its group.
    pub fn is_cancelled(&self) -> bool {
        let state = self.state();
        state.cancelled || state.cancels.iter().any(|cancel| cancel.load(Ordering::Acquire))
    }

    /// Ends all tasks on the communicator that can be ended, those still to come included.
    pub fn cancel(&self) {
        let mut state = self.state();
        state.cancelled = true;
        state.cancels.iter().for_each(|cancel| cancel.store(true, Ordering::Release));
    }

    /// Says that a task has ended.
    pub fn finish(&self) {
        self.change(|state| state.busy -= 1);
    }

    /// Says that the communicator has been made. A name that is gone by now ends the communicator.
    pub fn made(&self, comm: Arc<Comm>) {
        let late = self.change(|state| {
            state.busy -= 1;
            if state.removed {
                return Some(comm);
            }
            state.comm = Some(comm);
            None
        });
        if let Some(comm) = late {
            comm.abort();
        }
    }

    /// Says that a task has failed, which every later call will return.
    pub fn failed(&self, error: Error) {
        self.change(|state| {
            state.busy -= 1;
            state.failure.get_or_insert(error);
        });
    }

    /// Takes the name away and returns the communicator, if it had been made.
    pub fn remove(&self) -> Option<Arc<Comm>> {
        Held::new(|| NAMES.get().live.write()).remove(&self.name.0);
        self.take()
    }

    fn take(&self) -> Option<Arc<Comm>> {
        self.change(|state| {
            state.removed = true;
            state.comm.take()
        })
    }

    /// Takes a removal back.
    pub fn restore(self: &Arc<Handle>, comm: Arc<Comm>) {
        self.change(|state| {
            state.removed = false;
            state.comm = Some(comm);
        });
        Held::new(|| NAMES.get().live.write()).insert(self.name.0, self.clone());
    }

    /// Does something unless the name has been taken away, which cannot happen meanwhile.
    pub fn while_named<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let state = self.state();
        (!state.removed).then(act)
    }

    /// Does something with the communicator, if it has been made, which stays meanwhile whatever becomes of it.
    pub fn with_made(&self, act: impl FnOnce(&Comm)) {
        if let Some(comm) = &self.state().comm {
            act(comm);
        }
    }

    /// An error in a callback that can call nothing of the communicator.
    pub fn not_in_callback(&self) -> Result<()> {
        let mut may = Ok(());
        self.with_made(|comm| may = comm.not_in_callback());
        may
    }

    /// Notes whether a window is open: no call goes the short way then.
    pub fn set_window(&self, is_open: bool) {
        self.change(|state| state.has_window = is_open);
    }

    /// Notes that the interrupted call is to take the name away.
    pub fn set_told(&self) {
        self.told.store(true, Ordering::Release);
    }

    /// The communicator, once it is made and no task runs on it.
    pub fn ready(&self) -> Result<Arc<Comm>> {
        let state = self.state();
        match (&state.failure, &state.comm) {
            (Some(failure), _) => Err(failure.clone()),
            (None, Some(comm)) if state.busy == 0 => Ok(comm.clone()),
            _ => Err(Error::InvalidArgument(
                "Attempt to use communicator before the previous operation returned ncclSuccess".to_string(),
            )),
        }
    }

    /// The communicator, once no task runs on it, to be revoked or shrunk without those that are lost: also after a task on
    /// it has failed, but not after a bug.
    pub fn to_recover(&self) -> Result<Arc<Comm>> {
        let state = self.state();
        match (&state.failure, &state.comm) {
            (Some(Error::Internal(_)), _) => {}
            (Some(_), Some(comm)) if state.busy == 0 => return Ok(comm.clone()),
            _ => {}
        }
        drop(state);
        self.ready()
    }

    /// The communicator, if operations can be started on it.
    pub fn usable(&self) -> Result<Arc<Comm>> {
        let comm = self.ready()?;
        if self.revoked.load(Ordering::Acquire) {
            return Err(Error::InvalidUsage("the communicator has been revoked".to_string()));
        }
        comm.usable()?;
        Ok(comm)
    }

    /// The communicator, if others can be made from it: after a revocation too, but not after a failure.
    pub fn parent(&self) -> Result<Arc<Comm>> {
        let comm = self.ready()?;
        match comm.final_failure() {
            Some(failure) if !self.revoked.load(Ordering::Acquire) => Err(failure),
            _ => Ok(comm),
        }
    }

    /// Notes that the program has revoked the communicator; it is no failure then that its operations have ended.
    pub fn set_revoked(&self) {
        self.revoked.store(true, Ordering::Release);
        self.change(|_| ());
    }

    /// What `ncclCommGetAsyncError` tells.
    pub fn outcome(&self) -> Result<()> {
        let state = self.state();
        match (&state.failure, &state.comm) {
            (Some(failure), _) => Err(failure.clone()),
            (None, _) if state.busy > 0 => Err(Error::InProgress),
            (None, Some(comm)) if !self.revoked.load(Ordering::Acquire) => {
                comm.asynchronous_failure().map_or(Ok(()), Err)
            }
            _ => Ok(()),
        }
    }
}

/// Whether this is the name of a communicator of Strata's, also of one that is gone, and no address of another library's.
pub fn is_name(name: CommHandle) -> bool {
    name.0 >> 48 == FIRST_NAME >> 48
}

/// The handle with this name. The name is all that is looked at, so any number may be given.
pub fn find(name: CommHandle) -> Result<Arc<Handle>> {
    if name.is_null() {
        return Err(crate::interface::types::null("comm"));
    }
    let names = NAMES.get();
    let live = Held::new(|| names.live.read());
    let was_one = (FIRST_NAME..NEXT_NAME.load(Ordering::Relaxed)).contains(&name.0) && name.0.is_multiple_of(NAME_STEP);
    live.get(&name.0).cloned().ok_or_else(|| {
        let name = name.0;
        match was_one {
            false => Error::InvalidArgument(format!("comm argument {name:#x} is not a communicator")),
            true if name < names.first => Error::InvalidUsage(format!(
                "communicator {name:#x} is of the process that forked this one, {}: a forked child cannot use its \
                 parent's communicators, nor destroy them; start it with exec (\"spawn\"), or let it make its own",
                std::process::id()
            )),
            true => Error::InvalidArgument(format!("comm argument {name:#x} has been destroyed")),
        }
    })
}

/// Does something with the handle of this name, which stays meanwhile; nothing where there is none.
pub fn visit<T>(name: CommHandle, act: impl FnOnce(&Handle) -> T) -> Option<T> {
    Held::new(|| NAMES.get().live.read()).get(&name.0).map(|handle| act(handle))
}

/// Takes away the names of those that have been told of their abort; the communicators that had been made.
pub fn take_told() -> Vec<Arc<Comm>> {
    let mut live = Held::new(|| NAMES.get().live.write());
    let told: Vec<Arc<Handle>> = live.values().filter(|handle| handle.told.load(Ordering::Acquire)).cloned().collect();
    told.iter().for_each(|handle| drop(live.remove(&handle.name.0)));
    drop(live);
    told.iter().filter_map(|handle| handle.take()).collect()
}

/// A communicator that a thread has used lately.
struct Recent {
    name: CommHandle,
    handle: Arc<Handle>,
    comm: Arc<Comm>,
}

/// How many a thread keeps.
const RECENT: usize = 4;

thread_local! {
    static USED: RefCell<Vec<Recent>> = const { RefCell::new(Vec::new()) };
}

/// Does something with a communicator that this thread has used lately and that can be used still.
///
/// The other argument is whether its calls wait until they have ended.
pub fn recent<T>(name: CommHandle, act: impl FnOnce(&Arc<Comm>, bool) -> Option<T>) -> Option<T> {
    // Nothing where a signal handler has interrupted just this, or the thread ends.
    let found = |used: &RefCell<Vec<Recent>>| {
        let used = used.try_borrow().ok()?;
        let recent = used.iter().find(|recent| recent.name == name)?;
        let open = || recent.handle.open.load(Ordering::Acquire);
        let done = if open() { act(&recent.comm, recent.handle.blocking) } else { None };
        Some((done, open()))
    };
    let (done, open) = USED.try_with(found).ok()??;
    if !open {
        // What is left of it goes with the last that holds it.
        let _ = USED.try_with(|used| {
            let gone = used.try_borrow_mut().map(|mut used| {
                let at = used.iter().position(|recent| recent.name == name);
                at.map(|at| used.remove(at))
            });
            drop(gone);
        });
    }
    done
}

/// Notes that this thread uses a communicator. A stream's thread does not: what is called there waits for no null stream.
pub fn note(handle: &Arc<Handle>, comm: &Arc<Comm>) {
    if crate::device::host::stream::is_worker() {
        return;
    }
    let noted = |used: &RefCell<Vec<Recent>>| {
        let Ok(mut used) = used.try_borrow_mut() else { return None };
        if used.iter().any(|recent| recent.name == handle.name) {
            return None;
        }
        let oldest = (used.len() == RECENT).then(|| used.remove(0));
        used.push(Recent { name: handle.name, handle: handle.clone(), comm: comm.clone() });
        oldest
    };
    // Dropped here, when nothing is borrowed any more.
    drop(USED.try_with(noted));
}

/// Makes every later call on a communicator fail: a bug has struck it.
pub fn poison(name: CommHandle, error: &Error) {
    if let Ok(handle) = find(name) {
        handle.change(|state| {
            state.failure.get_or_insert(error.clone());
        });
    }
}

/// Which rank of which communicator a log line is about.
pub fn describe(name: CommHandle) -> String {
    match find(name) {
        Ok(handle) => {
            // Not written while the state is locked: a signal handler may abort the communicator meanwhile.
            let place = handle.state().comm.as_ref().map(|comm| (comm.rank(), comm.nranks()));
            match place {
                Some((rank, nranks)) => format!(", rank {rank} of {nranks} of communicator {:#x}", name.0),
                None => format!(", communicator {:#x}", name.0),
            }
        }
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_from_its_reservation_to_its_removal_and_never_again() {
        let handle = Handle::reserve(true);
        assert!(find(handle.name).is_ok());
        handle.remove();
        let error = find(handle.name).err().unwrap();
        assert!(error.text().contains("has been destroyed"), "{error}");
        assert_ne!(Handle::reserve(true).name, handle.name);
    }

    #[test]
    fn any_other_number_is_not_a_communicator() {
        for garbage in [1, 2, 0xdead_beef, usize::MAX, FIRST_NAME + 1, FIRST_NAME - NAME_STEP] {
            let error = find(CommHandle(garbage)).err().unwrap();
            assert_eq!(error.code(), 4);
            assert!(error.text().contains("is not a communicator"), "{error}");
        }
    }

    #[test]
    fn a_communicator_that_is_being_made_is_in_progress_and_cannot_be_used() {
        let handle = Handle::reserve(false);
        handle.begin();
        assert_eq!(handle.outcome(), Err(Error::InProgress));
        assert_eq!(handle.ready().err().unwrap().code(), 4);
        handle.failed(Error::Remote("nobody came".into()));
        assert_eq!(handle.outcome().err().unwrap().code(), 6);
        assert_eq!(handle.ready().err().unwrap().code(), 6);
        handle.remove();
    }

    #[test]
    fn a_communicator_on_which_a_split_has_failed_can_be_recovered_and_one_with_a_bug_cannot() {
        let handle = Handle::reserve(false);
        handle.begin();
        handle.failed(Error::Timeout("rank 1 did not join".into()));
        assert_eq!(handle.to_recover().err().unwrap().code(), 8, "it was never made");
        let id = Comm::unique_id().unwrap();
        let options = crate::communicator::CommOptions::default();
        let params =
            crate::communicator::InitParams { nranks: 1, rank: 0, ids: vec![id], options, device: 0, gpu: None };
        let comm = Comm::init(params, &AtomicBool::new(false)).unwrap();
        handle.begin();
        handle.made(comm.clone());
        assert!(handle.ready().is_err());
        assert!(handle.to_recover().is_ok());
        handle.remove();
        let broken = Handle::reserve(false);
        broken.begin();
        broken.made(comm.clone());
        poison(broken.name, &Error::Internal("bug".into()));
        assert_eq!(broken.to_recover().err().unwrap().code(), 3);
        broken.remove();
        comm.destroy().unwrap();
    }

    #[test]
    fn a_cancelled_handle_ends_the_tasks_on_it_and_those_that_come_too_late() {
        let handle = Handle::reserve(false);
        let [one, other] = [handle.cancellable(), handle.cancellable()];
        one.store(true, Ordering::Release);
        assert!(!other.load(Ordering::Acquire), "a task that fails ends only its own group");
        handle.cancel();
        assert!(other.load(Ordering::Acquire) && handle.cancellable().load(Ordering::Acquire));
        handle.remove();
    }

    #[test]
    fn a_bug_leaves_its_communicator_unusable() {
        let handle = Handle::reserve(true);
        poison(handle.name, &Error::Internal("bug".into()));
        assert_eq!(handle.outcome(), Err(Error::Internal("bug".into())));
        handle.remove();
    }
}
