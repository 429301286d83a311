//! What MPI knows: its state, its communicators, and sends and receives that have not ended.

use crate::abi::number::*;
use crate::abi::word::*;
use crate::abi::Handle;
use crate::library::{self, Comm, Functions, UniqueId};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

/// An error: its class, and a text.
pub type Result<T> = std::result::Result<T, (c_int, String)>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The text of the last error of the process.
static LAST_ERROR: Mutex<String> = Mutex::new(String::new());

/// A result as MPI's code; an error's text is kept for `MPI_Error_string`.
pub fn code(result: Result<()>) -> c_int {
    match result {
        Ok(()) => MPIABI_SUCCESS,
        Err((class, text)) => {
            *locked(&LAST_ERROR) = text;
            class
        }
    }
}

/// The text of the last error.
pub fn last_error() -> String {
    locked(&LAST_ERROR).clone()
}

/// Strata's functions.
pub fn strata() -> Result<&'static Functions> {
    library::functions().as_ref().map_err(|why| (MPIABI_ERR_OTHER, why.clone()))
}

/// Strata's answer as a result.
pub fn check(functions: &Functions, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        _ => Err((MPIABI_ERR_OTHER, functions.last_error())),
    }
}

/// A send or a receive: the next that its communicator waits for runs it.
#[derive(Debug)]
pub struct Message {
    /// Whether it is a send.
    pub sends: bool,
    /// The data, which the program leaves alone until it has waited.
    pub data: *mut c_void,
    /// Its bytes.
    pub bytes: usize,
    /// The other rank.
    pub peer: c_int,
}

/// A request of `MPI_Isend` or `MPI_Irecv`.
pub struct Request {
    /// What it is.
    pub message: Message,
    comm: Arc<Communicator>,
    ended: OnceLock<Result<()>>,
}

// SAFETY: the address must be usable by any thread; because MPI may use a request's data on any thread until it has ended.
unsafe impl Send for Request {}
// SAFETY: the address must be usable by any thread; because MPI may use a request's data on any thread until it has ended.
unsafe impl Sync for Request {}

/// A communicator.
pub struct Communicator {
    handle: Comm,
    /// This process's rank.
    pub rank: c_int,
    /// How many ranks there are.
    pub size: c_int,
    pending: Mutex<Vec<Arc<Request>>>,
}

// SAFETY: the handle must be usable by any thread; because Strata's calls may be made on any.
unsafe impl Send for Communicator {}
// SAFETY: the handle must be usable by several threads; because Strata's calls may be made on several.
unsafe impl Sync for Communicator {}

impl Communicator {
    fn new(handle: Comm, rank: c_int, size: c_int) -> Communicator {
        Communicator { handle, rank, size, pending: Mutex::default() }
    }

    /// Strata's handle.
    pub fn handle(&self) -> Comm {
        self.handle
    }

    /// Notes a message, which begins when one of the communicator's is waited for.
    pub fn post(self: &Arc<Self>, message: Message) -> Arc<Request> {
        let request = Arc::new(Request { message, comm: self.clone(), ended: OnceLock::new() });
        locked(&self.pending).push(request.clone());
        request
    }

    /// Ends all messages that have been noted, as one group: none waits for another.
    fn run_pending(&self) {
        // Held while they run: who waits for one of them waits here.
        let mut pending = locked(&self.pending);
        let requests = std::mem::take(&mut *pending);
        if requests.is_empty() {
            return;
        }
        let outcome = self.exchange(requests.iter().map(|request| &request.message));
        for request in requests {
            // Nobody else sets it.
            let _ = request.ended.set(outcome.clone());
        }
    }

    /// Runs messages as one group.
    pub fn exchange<'a>(&self, messages: impl Iterator<Item = &'a Message>) -> Result<()> {
        const BYTES: c_int = crate::abi::Element::Uint8 as c_int;
        let strata = strata()?;
        // SAFETY: no requirement.
        check(strata, unsafe { (strata.ncclGroupStart)() })?;
        let mut outcome = Ok(());
        for Message { sends, data, bytes, peer } in messages {
            let null = std::ptr::null_mut();
            let code = match sends {
                // SAFETY: the data must stay until the group has ended; because MPI asks that of its callers.
                true => unsafe { (strata.ncclSend)(*data, *bytes, BYTES, *peer, self.handle, null) },
                // SAFETY: the data must stay until the group has ended; because MPI asks that of its callers.
                false => unsafe { (strata.ncclRecv)(*data, *bytes, BYTES, *peer, self.handle, null) },
            };
            outcome = outcome.and_then(|()| check(strata, code));
        }
        // SAFETY: no requirement.
        let ended = check(strata, unsafe { (strata.ncclGroupEnd)() });
        outcome.and(ended)
    }
}

impl Request {
    /// Waits until the message has ended.
    pub fn wait(&self) -> Result<()> {
        if self.ended.get().is_none() {
            self.comm.run_pending();
        }
        self.ended.get().cloned().unwrap_or_else(|| Err((MPIABI_ERR_REQUEST, "the request was not begun".to_string())))
    }
}

/// Communicators by their handles.
static COMMS: RwLock<Option<Table>> = RwLock::new(None);

#[derive(Default)]
struct Table {
    comms: HashMap<Handle, Arc<Communicator>>,
    issued: Handle,
}

/// Whether MPI was initialised, and was finalised.
static STATE: Mutex<(bool, bool)> = Mutex::new((false, false));

/// Whether MPI was initialised, and was finalised.
pub fn state() -> (bool, bool) {
    *locked(&STATE)
}

/// `MPI_Init`: all ranks meet.
pub fn init() -> Result<()> {
    let mut state = locked(&STATE);
    if *state != (false, false) {
        return Err((MPIABI_ERR_OTHER, "MPI has been initialised before".to_string()));
    }
    let strata = strata()?;
    let (mut id, mut nranks, mut rank) = (UniqueId([0; 128]), 0, 0);
    // SAFETY: the places must be writable; because they are locals.
    check(strata, unsafe { (strata.strataGetWorldId)(&mut id, &mut nranks, &mut rank) })?;
    let world = Communicator::new(init_host(strata, nranks, id, rank)?, rank, nranks);
    let mut own = UniqueId([0; 128]);
    // SAFETY: the place must be writable; because it is a local.
    check(strata, unsafe { (strata.strataGetUniqueId)(&mut own) })?;
    let alone = Communicator::new(init_host(strata, 1, own, 0)?, 0, 1);
    let comms = HashMap::from([(MPIABI_COMM_WORLD, Arc::new(world)), (MPIABI_COMM_SELF, Arc::new(alone))]);
    *COMMS.write().unwrap_or_else(PoisonError::into_inner) = Some(Table { comms, issued: 0x1000 });
    state.0 = true;
    Ok(())
}

/// With the library's own limits of time.
fn init_host(strata: &Functions, nranks: c_int, id: UniqueId, rank: c_int) -> Result<Comm> {
    let mut made = std::ptr::null_mut();
    // SAFETY: the place must be writable; because it is a local.
    check(strata, unsafe { (strata.strataCommInitHost)(&mut made, nranks, id, rank, -1) })?;
    Ok(made)
}

/// `MPI_Finalize`: communicators end, the world last.
pub fn finalize() -> Result<()> {
    let strata = strata()?;
    let mut state = locked(&STATE);
    if *state != (true, false) {
        return Err((MPIABI_ERR_OTHER, "MPI is not running".to_string()));
    }
    state.1 = true;
    let table = COMMS.write().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
    let mut comms: Vec<(Handle, Arc<Communicator>)> = table.comms.into_iter().collect();
    comms.sort_by_key(|(handle, _)| std::cmp::Reverse(*handle));
    let mut outcome = Ok(());
    for (_, comm) in &comms {
        // SAFETY: nobody may use the handle any more; because MPI asks that of who finalises it.
        outcome = outcome.and(check(strata, unsafe { (strata.ncclCommDestroy)(comm.handle) }));
    }
    outcome
}

/// The communicator of this handle.
pub fn comm(handle: Handle) -> Result<Arc<Communicator>> {
    let comms = COMMS.read().unwrap_or_else(PoisonError::into_inner);
    let table = comms.as_ref().ok_or_else(|| (MPIABI_ERR_OTHER, "MPI is not running".to_string()))?;
    let found = table.comms.get(&handle);
    found.cloned().ok_or_else(|| (MPIABI_ERR_COMM, format!("{handle:#x} is no communicator")))
}

/// Divides a communicator; none without a color.
pub fn split(parent: &Communicator, color: c_int, key: c_int) -> Result<Handle> {
    const NO_COLOR: c_int = -1;
    let strata = strata()?;
    if color < 0 && color != MPIABI_UNDEFINED {
        return Err((MPIABI_ERR_OTHER, format!("MPI_Comm_split: the color {color} is negative")));
    }
    let color = if color == MPIABI_UNDEFINED { NO_COLOR } else { color };
    let mut made = std::ptr::null_mut();
    // SAFETY: the place must be writable; because it is a local. A null pointer stands for no configuration.
    check(strata, unsafe { (strata.ncclCommSplit)(parent.handle, color, key, &mut made, std::ptr::null_mut()) })?;
    if made.is_null() {
        return Ok(MPIABI_COMM_NULL);
    }
    let (mut rank, mut size) = (0, 0);
    // SAFETY: the handle must be alive; because it was just made. The place is a local.
    check(strata, unsafe { (strata.ncclCommUserRank)(made, &mut rank) })?;
    // SAFETY: the handle must be alive; because it was just made. The place is a local.
    check(strata, unsafe { (strata.ncclCommCount)(made, &mut size) })?;
    let mut comms = COMMS.write().unwrap_or_else(PoisonError::into_inner);
    let table = comms.as_mut().ok_or_else(|| (MPIABI_ERR_OTHER, "MPI is not running".to_string()))?;
    table.issued += 1;
    table.comms.insert(table.issued, Arc::new(Communicator::new(made, rank, size)));
    Ok(table.issued)
}

/// Ends a communicator. All its ranks call.
pub fn free(handle: Handle) -> Result<()> {
    if handle == MPIABI_COMM_WORLD || handle == MPIABI_COMM_SELF {
        return Err((MPIABI_ERR_COMM, "MPI_Comm_free: the communicator is predefined".to_string()));
    }
    let strata = strata()?;
    let mut comms = COMMS.write().unwrap_or_else(PoisonError::into_inner);
    let found = comms.as_mut().and_then(|table| table.comms.remove(&handle));
    drop(comms);
    let found = found.ok_or_else(|| (MPIABI_ERR_COMM, format!("{handle:#x} is no communicator")))?;
    // SAFETY: nobody may use the handle any more; because MPI asks that of who frees a communicator.
    check(strata, unsafe { (strata.ncclCommDestroy)(found.handle) })
}
