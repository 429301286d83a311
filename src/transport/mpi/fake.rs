//! A make-believe MPI for tests: several worlds in one process, whose "processes" are the threads that call it.
//!
//! Sends of a bare header end at once, as small messages do with every MPI; longer ones when they are received.
//!
//! It matches messages as MPI must (in order between two ranks under one tag) and completes what is matched in an
//! adversarial order: each test of a list completes some of the matched requests, chosen by a seed, and others later.

use super::calls::MpiCalls;
use super::capabilities::LauncherEnv;
use super::vtable::{
    state, thread_level, Collective, Completion, Hook, Vtable, World, ANY_SOURCE, NO_REQUEST, SUCCESS, VERSION,
};
use super::worker::MpiWorker;
use super::MpiEnvironment;
use crate::transport::header::HEADER;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

/// An error code of this MPI: what a test planted.
pub const PLANTED: c_int = 77;

struct Pending {
    owner: usize,
    comm: u64,
    peer: i32,
    tag: i32,
    start: usize,
    len: usize,
    send: bool,
    order: u64,
    outcome: Option<Completion>,
    matched: Option<u64>,
    /// The bytes of a send that has ended without its receiver.
    copy: Option<Vec<u8>>,
}

#[derive(Default)]
struct State {
    initialised: Vec<bool>,
    comms: HashMap<u64, Vec<i32>>,
    gathering: HashMap<(Vec<i32>, i32), (u64, usize)>,
    requests: HashMap<u64, Pending>,
    next: u64,
    random: u64,
    /// Ranks of the world whose next send fails.
    planted: Vec<usize>,
    /// Ranks that have come to the barrier before the end.
    met: Vec<usize>,
    /// Ranks that do not answer: what is sent to them stays on its way.
    silent: Vec<usize>,
    /// Ranks whose next send runs something on the thread that calls MPI, which then never returns.
    ending: HashMap<usize, Box<dyn FnOnce() + Send>>,
    /// Ranks whose `MPI_Finalize` never returns.
    stuck: Vec<usize>,
    /// Ranks of the world that cannot learn what has ended.
    deaf: Vec<usize>,
    /// Ranks that have finalised MPI.
    finalised: Vec<usize>,
    /// Ranks that have asked to hear of the end of MPI.
    hooks: Vec<usize>,
    /// The rank and the communicator of each that was freed.
    freed: Vec<(usize, u64)>,
    /// Messages to ranks that had freed their communicator.
    late: usize,
    /// Calls made so far.
    calls: u64,
}

/// A world of make-believe processes.
pub struct Universe {
    size: usize,
    level: i32,
    state: Mutex<State>,
    changed: Condvar,
}

thread_local! {
    static PLACE: RefCell<Option<(Arc<Universe>, usize)>> = const { RefCell::new(None) };
}

impl Universe {
    /// A world of so many processes whose programs have initialised MPI at `level`, or not at all.
    pub fn new(size: usize, level: Option<i32>, seed: u64) -> Arc<Universe> {
        let state = State { initialised: vec![level.is_some(); size], random: seed | 1, ..State::default() };
        let level = level.unwrap_or(thread_level::MULTIPLE);
        Arc::new(Universe { size, level, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// What the process of this rank has of MPI.
    pub fn site(self: &Arc<Universe>, rank: usize) -> MpiEnvironment {
        self.site_with(rank, false)
    }

    /// The same, with or without an MPI of the program's own.
    pub fn site_with(self: &Arc<Universe>, rank: usize, program_has_mpi: bool) -> MpiEnvironment {
        let launch =
            LauncherEnv { rank: Some(rank as i32), size: Some(self.size as i32), job: "test".into(), flavour: None };
        let (universe, worker) = (self.clone(), OnceLock::new());
        let worker = move |_: &_, _: &_| {
            let start = || {
                let universe = universe.clone();
                // The thread takes its place before it makes its first call.
                let take_place = move || universe.take_place(rank);
                let mut worker =
                    MpiWorker::start(MpiCalls::new(&TABLE), "Make-believe MPI".into(), take_place, |_| {}).unwrap();
                worker.program_has_mpi = program_has_mpi;
                Arc::new(worker)
            };
            Ok(worker.get_or_init(start).clone())
        };
        MpiEnvironment { launch, worker: Box::new(worker) }
    }

    /// Makes the calling thread one of the process of this rank.
    pub fn take_place(self: &Arc<Universe>, rank: usize) {
        PLACE.with_borrow_mut(|here| *here = Some((self.clone(), rank)));
    }

    /// Requests that have not been reported as ended.
    pub fn pending(&self) -> usize {
        self.state.lock().unwrap().requests.values().filter(|one| one.copy.is_none()).count()
    }

    /// Makes the next send of a rank fail.
    pub fn plant(&self, rank: usize) {
        self.state.lock().unwrap().planted.push(rank);
    }

    /// Makes each look of a rank at its requests fail.
    pub fn deafen(&self, rank: usize) {
        self.state.lock().unwrap().deaf.push(rank);
    }

    /// Keeps what is sent to a rank on its way until it answers again.
    pub fn silence(&self, rank: usize, silent: bool) {
        let mut state = self.state.lock().unwrap();
        state.silent.retain(|&one| one != rank);
        state.silent.extend(silent.then_some(rank));
    }

    /// Lets a rank's next send run something and never return, like an MPI that ends the process.
    pub fn end_in_send(&self, rank: usize, act: impl FnOnce() + Send + 'static) {
        self.state.lock().unwrap().ending.insert(rank, Box::new(act));
    }

    /// Lets a rank's `MPI_Finalize` never return.
    pub fn stick(&self, rank: usize) {
        self.state.lock().unwrap().stuck.push(rank);
    }

    /// The ranks whose MPI was finalised, in that order.
    pub fn finalised(&self) -> Vec<usize> {
        self.state.lock().unwrap().finalised.clone()
    }

    /// The ranks that have asked to hear of the end of MPI, each as often as it asked.
    pub fn hooks(&self) -> Vec<usize> {
        self.state.lock().unwrap().hooks.clone()
    }

    /// How many communicators have been made, and how many of them each of their ranks has freed, once.
    pub fn made_and_freed(&self) -> (usize, usize) {
        let state = self.state.lock().unwrap();
        let freed_by_all = |(comm, ranks): (&u64, &Vec<i32>)| {
            ranks.iter().all(|&rank| state.freed.iter().filter(|&&one| one == (rank as usize, *comm)).count() == 1)
        };
        (state.comms.len(), state.comms.iter().filter(|&comm| freed_by_all(comm)).count())
    }

    /// Messages that came, or would have come, to a rank after it had freed their communicator.
    pub fn late(&self) -> usize {
        self.state.lock().unwrap().late
    }

    /// The communicator that was made last.
    pub fn last_comm(&self) -> u64 {
        self.state.lock().unwrap().comms.keys().copied().max().unwrap()
    }

    /// Calls of MPI so far, all ranks together.
    pub fn calls(&self) -> u64 {
        self.state.lock().unwrap().calls
    }
}

fn here<T>(act: impl FnOnce(&Universe, usize, &mut State) -> T) -> T {
    PLACE.with_borrow(|place| {
        let (universe, rank) = place.as_ref().expect("a thread with a place");
        let mut state = universe.state.lock().unwrap();
        state.calls += 1;
        act(universe, *rank, &mut state)
    })
}

unsafe fn put(text: &str, place: *mut c_char, len: usize) {
    let bytes = text.len().min(len - 1);
    // SAFETY: `place` must be writable for `len` bytes, which are not 0; because `Calls` passes a buffer with its
    // length.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), bytes) };
    // SAFETY: the index must be below `len`; because `bytes` is at most `len - 1`.
    unsafe { place.wrapping_add(bytes).write(0) };
}

unsafe extern "C" fn describe(place: *mut c_char, len: usize) -> c_int {
    // SAFETY: `place` must be writable for `len` bytes, which are not 0; because `Calls` passes a buffer with its
    // length.
    unsafe { put("Make-believe MPI", place, len) };
    SUCCESS
}

unsafe extern "C" fn look(world: *mut World) -> c_int {
    let found = here(|universe, rank, state| World {
        state: if state.initialised[rank] { state::RUNNING } else { state::FRESH },
        thread_level: universe.level,
        rank: rank as i32,
        size: universe.size as i32,
        device_memory: 0,
    });
    // SAFETY: `world` must be writable; because `Calls::look` passes a local.
    unsafe { world.write(found) };
    SUCCESS
}

/// It has no collectives of its own.
unsafe extern "C" fn collective(_: u64, _: *const Collective, _: *mut u64) -> c_int {
    PLANTED
}

unsafe extern "C" fn init() -> c_int {
    here(|_, rank, state| state.initialised[rank] = true);
    SUCCESS
}

/// Does not wait: in a test one rank may leave it out.
unsafe extern "C" fn barrier() -> c_int {
    here(|_, rank, state| state.met.push(rank));
    SUCCESS
}

unsafe extern "C" fn finalize() -> c_int {
    let (met, stuck) = here(|_, rank, state| {
        state.finalised.push(rank);
        (state.met.contains(&rank), state.stuck.contains(&rank))
    });
    if !met {
        return PLANTED;
    }
    if stuck {
        loop {
            std::thread::park();
        }
    }
    SUCCESS
}

unsafe extern "C" fn at_finalize(_: Hook) -> c_int {
    here(|_, rank, state| state.hooks.push(rank));
    SUCCESS
}

unsafe extern "C" fn comm_create(ranks: *const c_int, count: c_int, tag: c_int, comm: *mut u64) -> c_int {
    // SAFETY: `ranks` must have `count` elements; because `Calls::comm_create` passes a slice's.
    let ranks = unsafe { std::slice::from_raw_parts(ranks, count as usize) }.to_vec();
    let (universe, _) = PLACE.with_borrow(|place| place.clone()).expect("a thread with a place");
    let mut state = universe.state.lock().unwrap();
    state.next += 1;
    let fresh = state.next;
    let key = (ranks.clone(), tag);
    let (made, here) = state.gathering.get(&key).copied().unwrap_or((fresh, 0));
    state.gathering.insert(key, (made, here + 1));
    state.comms.insert(made, ranks.clone());
    universe.changed.notify_all();
    // Like the real one it returns when all members are here, and until then its thread does nothing else.
    let everybody = |state: &mut State| state.gathering[&(ranks.clone(), tag)].1 < ranks.len();
    drop(universe.changed.wait_while(state, everybody).unwrap());
    // SAFETY: `comm` must be writable; because `Calls::comm_create` passes a local.
    unsafe { comm.write(made) };
    SUCCESS
}

unsafe extern "C" fn comm_free(comm: u64) -> c_int {
    here(|_, rank, state| {
        let place = state.comms[&comm].iter().position(|&member| member as usize == rank).unwrap();
        let here = |one: &&Pending| one.send && one.comm == comm && one.peer == place as i32 && one.outcome.is_none();
        state.late += state.requests.values().filter(here).count();
        state.freed.push((rank, comm));
    });
    SUCCESS
}

fn post(comm: u64, start: usize, len: u64, peer: i32, tag: i32, send: bool) -> Result<u64, c_int> {
    if let Some(end) = here(|_, rank, state| if send { state.ending.remove(&rank) } else { None }) {
        end();
        loop {
            std::thread::park();
        }
    }
    here(|_, rank, state| {
        if let Some(at) = state.planted.iter().position(|&planted| send && planted == rank) {
            state.planted.remove(at);
            return Err(PLANTED);
        }
        state.next += 1;
        let order = state.next;
        let owner = state.comms[&comm].iter().position(|&member| member as usize == rank).unwrap();
        let len = len as usize;
        if send {
            let to = state.comms[&comm][peer as usize] as usize;
            state.late += usize::from(state.freed.contains(&(to, comm)));
        }
        let fresh = |order, start, copy| Pending {
            owner,
            comm,
            peer,
            tag,
            start,
            len,
            send,
            order,
            outcome: None,
            matched: None,
            copy,
        };
        if send && len <= HEADER {
            // SAFETY: `len` bytes must be readable at an address that is not null; because what is sent is a part of a
            // buffer that is there.
            let copy = unsafe { std::slice::from_raw_parts(start as *const u8, len) }.to_vec();
            state.requests.insert(order, fresh(order, copy.as_ptr() as usize, Some(copy)));
            state.next += 1;
            let told = Completion { source: owner as i32, bytes: len as u64, ..Completion::default() };
            let ended = Pending { outcome: Some(told), matched: Some(order), ..fresh(state.next, start, None) };
            state.requests.insert(state.next, ended);
            return Ok(state.next);
        }
        state.requests.insert(order, fresh(order, start, None));
        Ok(order)
    })
}

fn answer(posted: Result<u64, c_int>, place: *mut u64) -> c_int {
    match posted {
        Ok(request) => {
            // SAFETY: `place` must be writable; because `Calls::isend` and `Calls::irecv` pass a local.
            unsafe { place.write(request) };
            SUCCESS
        }
        Err(error) => error,
    }
}

unsafe extern "C" fn isend(comm: u64, start: *const u8, len: u64, to: c_int, tag: c_int, request: *mut u64) -> c_int {
    answer(post(comm, start as usize, len, to, tag, true), request)
}

unsafe extern "C" fn irecv(comm: u64, start: *mut u8, len: u64, from: c_int, tag: c_int, request: *mut u64) -> c_int {
    answer(post(comm, start as usize, len, from, tag, false), request)
}

impl State {
    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below.max(1) as u64) as usize
    }

    /// Pairs sends with receives, each in the order they were posted.
    fn pair_up(&mut self) {
        let open = |send: bool| {
            let mut open: Vec<u64> = self
                .requests
                .values()
                .filter(|one| one.send == send && one.matched.is_none())
                .map(|one| one.order)
                .collect();
            open.sort_unstable();
            open
        };
        let (sends, receives) = (open(true), open(false));
        for send in sends {
            let out = &self.requests[&send];
            let fits = |receive: &&u64| {
                let into = &self.requests[*receive];
                let answers = !self.silent.contains(&(self.comms[&into.comm][into.owner] as usize));
                answers
                    && into.matched.is_none()
                    && (into.comm, into.tag, into.owner as i32) == (out.comm, out.tag, out.peer)
                    && (into.peer == ANY_SOURCE || into.peer == out.owner as i32)
            };
            if let Some(&receive) = receives.iter().find(fits) {
                self.requests.get_mut(&send).unwrap().matched = Some(receive);
                self.requests.get_mut(&receive).unwrap().matched = Some(send);
            }
        }
    }

    /// Moves the bytes of a matched pair.
    fn complete(&mut self, request: u64) {
        let Some(other) = self.requests[&request].matched else { return };
        let (send, receive) = if self.requests[&request].send { (request, other) } else { (other, request) };
        let (out, into) = (&self.requests[&send], &self.requests[&receive]);
        assert!(out.len <= into.len, "a message of {} bytes for a receive of {}", out.len, into.len);
        // SAFETY: both runs must be valid and apart; because each side keeps a buffer of its own until it has been told
        // of the end, which comes after this. After a cancel that is the test's affair.
        unsafe { std::ptr::copy_nonoverlapping(out.start as *const u8, into.start as *mut u8, out.len) };
        let told = Completion { source: out.owner as i32, bytes: out.len as u64, ..Completion::default() };
        for id in [send, receive] {
            self.requests.get_mut(&id).unwrap().outcome = Some(told);
        }
        // Who sent it has been told long ago.
        self.requests.retain(|_, one| one.copy.is_none() || one.outcome.is_none());
    }
}

unsafe extern "C" fn test_some(
    requests: *mut u64,
    count: usize,
    ended: *mut Completion,
    how_many: *mut usize,
) -> c_int {
    // SAFETY: `requests` must have `count` elements that nobody else uses; because `Calls::test_some` passes a slice's.
    let requests = unsafe { std::slice::from_raw_parts_mut(requests, count) };
    let mut told = Vec::new();
    if here(|_, rank, state| state.deaf.contains(&rank)) {
        return PLANTED;
    }
    here(|_, _, state| {
        state.pair_up();
        for _ in 0..count.min(8) {
            let place = state.random(count);
            let ready = |id: &u64| state.requests.get(id).is_some_and(|one| one.outcome.is_none());
            if ready(&requests[place]) && state.random(3) > 0 {
                state.complete(requests[place]);
            }
        }
        for (index, request) in requests.iter_mut().enumerate() {
            let over = state.requests.get(request).and_then(|one| one.outcome);
            if let Some(outcome) = over.filter(|_| state.random(4) > 0) {
                state.requests.remove(request);
                *request = NO_REQUEST;
                told.push(Completion { index: index as u32, ..outcome });
            }
        }
        for at in (1..told.len()).rev() {
            let other = state.random(at + 1);
            told.swap(at, other);
        }
    });
    for (nth, completion) in told.iter().enumerate() {
        // SAFETY: `ended` must have room for `count` entries; because `Calls::test_some` makes it so long, and a
        // request is told once.
        unsafe { ended.wrapping_add(nth).write(*completion) };
    }
    // SAFETY: `how_many` must be writable; because `Calls::test_some` passes a local.
    unsafe { how_many.write(told.len()) };
    SUCCESS
}

unsafe extern "C" fn cancel(request: u64) -> c_int {
    here(|_, _, state| {
        let one = state.requests.get_mut(&request).unwrap();
        // What is matched cannot be cancelled any more.
        if one.matched.is_none() {
            one.matched = Some(request);
            one.outcome = Some(Completion { cancelled: 1, ..Completion::default() });
        }
    });
    SUCCESS
}

unsafe extern "C" fn error_text(error: c_int, place: *mut c_char, len: usize) -> c_int {
    // SAFETY: `place` must be writable for `len` bytes, which are not 0; because `Calls` passes a buffer with its
    // length.
    unsafe { put(&format!("planted error {error}"), place, len) };
    super::vtable::fault::REMOTE
}

/// The make-believe plugin.
pub static TABLE: Vtable = Vtable {
    version: VERSION,
    size: size_of::<Vtable>() as u32,
    describe,
    look,
    init,
    barrier,
    finalize,
    at_finalize,
    comm_create,
    comm_free,
    isend,
    irecv,
    test_some,
    cancel,
    collective,
    error_text,
};
