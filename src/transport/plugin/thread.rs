//! The one thread of this process that calls MPI.
//!
//! Ranks hand it commands through a queue and find what has ended in their mailbox; a rank that sleeps is woken. It
//! calls MPI only while something is under way: a transfer that is not complete, or a rank that waits for one. Between
//! polls that find nothing it spins briefly, then gives way, then sleeps for some tens of microseconds, since there may
//! be fewer processors than threads.

use super::calls::Calls;
use super::vtable::{state, thread_level, Completion, World};
use crate::error::{Error, Result};
use crate::memory::{Arena, Region};
use crate::transport::Waker;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Polls without a pause after something has happened.
const SPINS: u32 = 50;
/// How long the thread then yields between polls.
const YIELDS: Duration = Duration::from_micros(200);
/// What it sleeps between polls after that.
const NAP: Duration = Duration::from_micros(50);
/// How long it goes on polling when nothing is under way any more, so that what MPI holds back still leaves.
const LINGER: Duration = Duration::from_millis(2);
/// How long cancelled operations may take to end.
const CANCEL_PATIENCE: Duration = Duration::from_secs(1);
/// How long a cancel waits for sends that nobody receives. They only read, and mostly nobody will ever take them.
const SEND_PATIENCE: Duration = Duration::from_millis(100);
/// How long a rank waits for the answer to a command that does not wait for other ranks.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// The bytes of a transfer.
#[derive(Debug)]
pub enum Bytes {
    /// The user's; they stay valid until the transfer has ended or the communicator is cancelled.
    Theirs(Region),
    /// Ours, of which the first so many count; given back with the event.
    Ours(Arena, usize),
}

impl Bytes {
    fn region(&mut self) -> Region {
        match self {
            Bytes::Theirs(region) => *region,
            Bytes::Ours(arena, len) => arena.region().part(0, *len),
        }
    }
}

/// The end of a transfer.
#[derive(Debug)]
pub struct Event {
    /// The number it was posted with.
    pub id: usize,
    /// Of a receive: the sender's rank in the communicator.
    pub source: i32,
    /// The bytes received, or what went wrong.
    pub outcome: Result<usize>,
    /// The buffer, if it was ours.
    pub buffer: Option<Arena>,
}

/// Where a communicator's events go.
struct Mailbox {
    events: Mutex<Vec<Event>>,
    full: AtomicBool,
    /// The rank waits for something.
    waiting: AtomicBool,
    waker: Waker,
}

impl Mailbox {
    fn put(&self, event: Event) {
        locked(&self.events).push(event);
        self.full.store(true, Ordering::Release);
    }
}

struct Transfer {
    comm: usize,
    id: usize,
    bytes: Bytes,
    peer: Option<i32>,
    tag: i32,
    send: bool,
    /// It waits for whatever may come, and is no reason to call MPI.
    idle: bool,
}

enum Command {
    Look(Sender<Result<World>>),
    Init(Sender<Result<World>>),
    Create { ranks: Vec<i32>, tag: i32, mailbox: Arc<Mailbox>, answer: Sender<Result<usize>> },
    Post(Transfer),
    Cancel { comm: usize, answer: Sender<()> },
    Free { comm: usize, answer: Sender<()> },
    Quiet(Sender<()>),
    Leave(Sender<Result<()>>),
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    asleep: bool,
}

/// What the thread and the ranks share.
struct Shared {
    queue: Mutex<Queue>,
    bell: Condvar,
    /// Somebody makes a communicator.
    creating: AtomicBool,
    /// Why MPI cannot be used in this process any more.
    given_up: Mutex<Option<Error>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Shared {
    fn command(&self, command: Command) {
        let mut queue = locked(&self.queue);
        queue.commands.push_back(command);
        if queue.asleep {
            self.bell.notify_one();
        }
    }

    fn give_up(&self, why: Error) -> Error {
        locked(&self.given_up).get_or_insert(why).clone()
    }

    fn usable(&self) -> Result<()> {
        match &*locked(&self.given_up) {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Sends a command and waits for its answer. One that does not come means that MPI does not return.
    fn ask<T>(&self, limit: Duration, doing: &str, command: impl FnOnce(Sender<Result<T>>) -> Command) -> Result<T> {
        self.usable()?;
        let (answer, answered) = channel();
        self.command(command(answer));
        answered.recv_timeout(limit).unwrap_or_else(|_| {
            Err(self.give_up(Error::Timeout(format!("{doing} did not return within {} ms", limit.as_millis()))))
        })
    }
}

/// The thread that calls MPI, as the process knows it.
pub struct Hub {
    shared: Arc<Shared>,
    /// MPI's description of itself.
    pub description: String,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("description", &self.description).finish_non_exhaustive()
    }
}

impl Hub {
    /// Starts the thread. `at_start` runs on it first; `before_init` just before MPI is initialised, if it has to be: the
    /// place for variables that MPI reads then.
    pub fn start(
        calls: Calls,
        description: String,
        at_start: impl FnOnce() + Send + 'static,
        before_init: impl FnOnce() + Send + 'static,
    ) -> Result<Hub> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            bell: Condvar::new(),
            creating: AtomicBool::new(false),
            given_up: Mutex::new(None),
        });
        let worker = Worker {
            calls,
            shared: shared.clone(),
            comms: Vec::new(),
            requests: Vec::new(),
            transfers: Vec::new(),
            ended: Vec::new(),
            before_init: Some(Box::new(before_init)),
            initialised: false,
            exclusive: false,
            troubled: false,
            last: Instant::now(),
            idle_polls: 0,
        };
        let thread = std::thread::Builder::new().name("strata-mpi".to_string());
        thread
            .spawn(move || {
                at_start();
                worker.run();
            })
            .map_err(|error| Error::System(format!("starting the thread for MPI: {error}")))?;
        Ok(Hub { shared, description })
    }

    /// The state of MPI in this process.
    pub fn look(&self) -> Result<World> {
        self.shared.ask(ANSWER_PATIENCE, "asking for the state of MPI", Command::Look)
    }

    /// Initialises MPI together with the whole job, and says what came of it.
    pub fn init(&self, limit: Duration) -> Result<World> {
        self.shared.ask(limit, "MPI_Init_thread", Command::Init)
    }

    /// Whether the caller may make a communicator now; if so it has to [`let_create`](Hub::let_create) afterwards.
    pub fn may_create(&self) -> bool {
        !self.shared.creating.swap(true, Ordering::AcqRel)
    }

    /// Lets others make communicators.
    pub fn let_create(&self) {
        self.shared.creating.store(false, Ordering::Release);
    }

    /// Makes a communicator of these ranks of the world, all of which call this. `exclusive`: the program may call MPI
    /// whenever none of its own operations is under way here.
    pub fn create(&self, ranks: Vec<i32>, tag: i32, exclusive: bool, waker: Waker, limit: Duration) -> Result<Link> {
        let mailbox = Arc::new(Mailbox {
            events: Mutex::default(),
            full: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            waker,
        });
        let theirs = mailbox.clone();
        let create = |answer| Command::Create { ranks, tag, mailbox: theirs, answer };
        let comm = self.shared.ask(limit, "MPI_Comm_create_group", create)?;
        let posted = AtomicBool::new(false);
        Ok(Link { shared: self.shared.clone(), comm, mailbox, exclusive, posted })
    }

    /// Finalises MPI if this thread initialised it and nothing has gone wrong; waits for the job's other ranks as
    /// `MPI_Finalize` does, up to `limit`.
    pub fn leave(&self, limit: Duration) -> Result<()> {
        self.shared.ask(limit, "MPI_Finalize", Command::Leave)
    }
}

/// One communicator, as its rank holds it.
pub struct Link {
    shared: Arc<Shared>,
    comm: usize,
    mailbox: Arc<Mailbox>,
    exclusive: bool,
    /// Transfers have been posted since MPI was last known to be silent.
    posted: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("comm", &self.comm).finish_non_exhaustive()
    }
}

impl Link {
    /// Whether the program may call MPI whenever nothing of ours is under way.
    pub fn exclusive(&self) -> bool {
        self.exclusive
    }

    fn post(&self, id: usize, bytes: Bytes, peer: Option<i32>, tag: i32, send: bool) {
        self.posted.store(true, Ordering::Relaxed);
        let transfer = Transfer { comm: self.comm, id, bytes, peer, tag, send, idle: peer.is_none() };
        self.shared.command(Command::Post(transfer));
    }

    /// Sends bytes to a rank of the communicator.
    pub fn send(&self, id: usize, bytes: Bytes, to: i32, tag: i32) {
        self.post(id, bytes, Some(to), tag, true);
    }

    /// Receives bytes from a rank.
    pub fn recv(&self, id: usize, bytes: Bytes, from: i32, tag: i32) {
        self.post(id, bytes, Some(from), tag, false);
    }

    /// Receives bytes from any rank, some day.
    pub fn listen(&self, id: usize, bytes: Bytes, tag: i32) {
        self.post(id, bytes, None, tag, false);
    }

    /// Appends what has ended.
    pub fn take(&self, events: &mut Vec<Event>) -> Result<()> {
        if self.mailbox.full.load(Ordering::Acquire) {
            let mut mailbox = locked(&self.mailbox.events);
            self.mailbox.full.store(false, Ordering::Relaxed);
            events.append(&mut mailbox);
        }
        Ok(())
    }

    /// Whether there is something to take.
    pub fn has_events(&self) -> bool {
        self.mailbox.full.load(Ordering::Acquire)
    }

    /// Says whether the rank waits for something. When it does not and the program may call MPI itself, MPI is silent
    /// when this returns.
    pub fn wait_for(&self, something: bool) {
        let waited = self.mailbox.waiting.load(Ordering::Relaxed);
        if waited != something {
            self.mailbox.waiting.store(something, Ordering::SeqCst);
        }
        if something && !waited {
            let queue = locked(&self.shared.queue);
            if queue.asleep {
                self.shared.bell.notify_one();
            }
        } else if !something && self.exclusive && (self.posted.swap(false, Ordering::Relaxed) || waited) {
            let (answer, answered) = channel();
            self.shared.command(Command::Quiet(answer));
            // A thread that does not answer is stuck in MPI, which others find out.
            let _ = answered.recv_timeout(ANSWER_PATIENCE);
        }
    }

    /// Ends all transfers; afterwards no memory of the user is written any more.
    pub fn cancel(&self) {
        self.mailbox.waiting.store(false, Ordering::SeqCst);
        let (answer, answered) = channel();
        self.shared.command(Command::Cancel { comm: self.comm, answer });
        if answered.recv_timeout(CANCEL_PATIENCE + ANSWER_PATIENCE).is_err() {
            let text = "MPI did not return, so an operation could not be cancelled";
            self.shared.give_up(Error::Internal(text.to_string()));
            crate::log::warn(text);
        }
    }

    /// Frees the communicator, on which only receives from anybody are pending.
    pub fn free(&self) {
        let (answer, answered) = channel();
        self.shared.command(Command::Free { comm: self.comm, answer });
        // A thread that does not answer is stuck in MPI; then nothing can be freed.
        let _ = answered.recv_timeout(ANSWER_PATIENCE);
    }
}

struct Member {
    comm: u64,
    mailbox: Arc<Mailbox>,
}

/// The thread's own side.
struct Worker {
    calls: Calls,
    shared: Arc<Shared>,
    comms: Vec<Option<Member>>,
    requests: Vec<u64>,
    transfers: Vec<Transfer>,
    ended: Vec<Completion>,
    before_init: Option<Box<dyn FnOnce() + Send>>,
    initialised: bool,
    exclusive: bool,
    troubled: bool,
    last: Instant,
    idle_polls: u32,
}

impl Worker {
    fn run(mut self) {
        loop {
            let commands = self.next();
            for command in commands {
                self.carry_out(command);
                self.moved();
            }
            if self.is_busy() && self.shared.usable().is_ok() && self.poll() {
                self.moved();
            }
        }
    }

    fn moved(&mut self) {
        self.idle_polls = 0;
        self.last = Instant::now();
    }

    /// Whether somebody needs MPI to be called.
    fn is_busy(&self) -> bool {
        let waits = |member: &Member| member.mailbox.waiting.load(Ordering::SeqCst);
        self.transfers.iter().any(|transfer| !transfer.idle)
            || self.comms.iter().flatten().any(waits)
            || (!self.exclusive && !self.transfers.is_empty() && self.last.elapsed() < LINGER)
    }

    /// Waits as long as it should, and returns the commands that have come.
    fn next(&mut self) -> VecDeque<Command> {
        let shared = self.shared.clone();
        let mut queue = locked(&shared.queue);
        while queue.commands.is_empty() {
            if !self.is_busy() || shared.usable().is_err() {
                queue.asleep = true;
                queue = shared.bell.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
                queue.asleep = false;
                self.moved();
                continue;
            }
            self.idle_polls = self.idle_polls.saturating_add(1);
            if self.idle_polls < SPINS {
                break;
            }
            if self.last.elapsed() < YIELDS {
                drop(queue);
                std::thread::yield_now();
                queue = locked(&shared.queue);
                break;
            }
            queue.asleep = true;
            (queue, _) = shared.bell.wait_timeout(queue, NAP).unwrap_or_else(|poisoned| poisoned.into_inner());
            queue.asleep = false;
            break;
        }
        std::mem::take(&mut queue.commands)
    }

    fn carry_out(&mut self, command: Command) {
        // Whoever has stopped waiting for an answer does not miss it.
        match command {
            Command::Look(answer) => drop(answer.send(self.look())),
            Command::Init(answer) => drop(answer.send(self.init())),
            Command::Create { ranks, tag, mailbox, answer } => {
                let made = self.calls.comm_create(&ranks, tag).map(|comm| {
                    self.comms.push(Some(Member { comm, mailbox }));
                    self.comms.len() - 1
                });
                drop(answer.send(made));
            }
            Command::Post(transfer) => self.post(transfer),
            Command::Cancel { comm, answer } => {
                self.cancel(comm);
                let _ = answer.send(());
            }
            Command::Free { comm, answer } => {
                self.free(comm);
                let _ = answer.send(());
            }
            Command::Quiet(answer) => {
                let _ = answer.send(());
            }
            Command::Leave(answer) => drop(answer.send(self.leave())),
        }
    }

    fn look(&mut self) -> Result<World> {
        let mut world = self.calls.look()?;
        if self.initialised {
            // Nobody else calls MPI, so its level does not matter.
            world.thread_level = thread_level::MULTIPLE;
        }
        self.exclusive = world.thread_level < thread_level::MULTIPLE;
        Ok(world)
    }

    fn init(&mut self) -> Result<World> {
        if self.look()?.state == state::FRESH {
            if let Some(before_init) = self.before_init.take() {
                before_init();
            }
            self.calls.init()?;
            self.initialised = true;
        }
        self.look()
    }

    fn post(&mut self, mut transfer: Transfer) {
        let Some(Some(member)) = self.comms.get(transfer.comm) else { return };
        let region = transfer.bytes.region();
        let posted = self.shared.usable().and_then(|()| match (transfer.send, transfer.peer) {
            (true, Some(to)) => self.calls.isend(member.comm, region, to, transfer.tag),
            (_, from) => self.calls.irecv(member.comm, region, from, transfer.tag),
        });
        match posted {
            Ok(request) => {
                self.requests.push(request);
                self.transfers.push(transfer);
            }
            Err(error) => {
                member.mailbox.put(event(transfer, -1, Err(error)));
                member.mailbox.waker.wake();
            }
        }
    }

    /// Makes progress; whether anything ended.
    fn poll(&mut self) -> bool {
        if self.requests.is_empty() {
            return false;
        }
        if let Err(error) = self.calls.test_some(&mut self.requests, &mut self.ended) {
            self.fail_all(error);
            return true;
        }
        if self.ended.is_empty() {
            return false;
        }
        let mut ended = std::mem::take(&mut self.ended);
        // In MPI's order for the mailboxes, from the back for the list.
        let mut places: Vec<usize> = ended.iter().map(|completion| completion.index as usize).collect();
        places.sort_unstable();
        let mut taken: Vec<(usize, Transfer)> = Vec::with_capacity(places.len());
        for &place in places.iter().rev() {
            self.requests.swap_remove(place);
            taken.push((place, self.transfers.swap_remove(place)));
        }
        for completion in &ended {
            let at = taken.iter().position(|(place, _)| *place == completion.index as usize);
            let Some((_, transfer)) = at.map(|at| taken.swap_remove(at)) else { continue };
            self.deliver(transfer, completion);
        }
        ended.clear();
        self.ended = ended;
        true
    }

    fn deliver(&mut self, transfer: Transfer, completion: &Completion) {
        let Some(Some(member)) = self.comms.get(transfer.comm) else { return };
        let outcome = match (completion.cancelled, completion.error) {
            (0, super::vtable::SUCCESS) => Ok(completion.bytes as usize),
            (0, error) => Err(self.calls.error(if transfer.send { "MPI_Isend" } else { "MPI_Irecv" }, error)),
            _ => return,
        };
        member.mailbox.put(event(transfer, completion.source, outcome));
        member.mailbox.waker.wake();
    }

    /// MPI itself has failed: every communicator learns it.
    fn fail_all(&mut self, error: Error) {
        self.troubled = true;
        let error = self.shared.give_up(error);
        let transfers = std::mem::take(&mut self.transfers);
        self.requests.clear();
        for transfer in transfers {
            if let Some(Some(member)) = self.comms.get(transfer.comm) {
                // MPI may still write to what it was given, so our buffers are not used again.
                let (id, outcome) = (transfer.id, Err(error.clone()));
                std::mem::forget(transfer.bytes);
                member.mailbox.put(Event { id, source: -1, outcome, buffer: None });
                member.mailbox.waker.wake();
            }
        }
    }

    fn pending(&self, comm: usize, wanted: impl Fn(&Transfer) -> bool) -> bool {
        self.transfers.iter().any(|transfer| transfer.comm == comm && wanted(transfer))
    }

    /// Asks for the end of a communicator's receives and polls until none of these transfers is left or time is up.
    fn drain(&mut self, comm: usize, wanted: impl Fn(&Transfer) -> bool, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        while self.pending(comm, &wanted) && self.shared.usable().is_ok() {
            if Instant::now() > end {
                return false;
            }
            if !self.poll() {
                std::thread::yield_now();
            }
        }
        !self.pending(comm, wanted)
    }

    fn cancel_receives(&mut self, comm: usize) {
        for (transfer, &request) in self.transfers.iter().zip(&self.requests) {
            if transfer.comm == comm && !transfer.send {
                // A receive that cannot be cancelled shows below: it is still there.
                let _ = self.calls.cancel(request);
            }
        }
    }

    /// Ends a communicator's transfers. MPI cannot be made to let go of a receive whose message has begun to arrive
    /// and does not go on, as when its sender is frozen: then MPI is not called any more in this process. A send that
    /// nobody receives stays behind: MPI reads it only if the receiver, which hears of the failure at the same time,
    /// takes it after all.
    fn cancel(&mut self, comm: usize) {
        // Whoever has to be cancelled for may be dead, and MPI_Finalize would wait for it.
        self.troubled = true;
        if self.shared.usable().is_err() {
            return;
        }
        self.cancel_receives(comm);
        let written = |transfer: &Transfer| !transfer.send && matches!(transfer.bytes, Bytes::Theirs(_));
        if !self.drain(comm, written, CANCEL_PATIENCE) {
            let text = "a receive could not be cancelled, so MPI is not used any more in this process";
            self.shared.give_up(Error::Remote(text.to_string()));
            crate::log::warn(text);
            self.fail_all(Error::Remote(text.to_string()));
        }
        self.drain(comm, |_| true, SEND_PATIENCE);
        // What is left does not keep the thread awake.
        for transfer in self.transfers.iter_mut().filter(|transfer| transfer.comm == comm) {
            transfer.idle = true;
        }
    }

    fn free(&mut self, comm: usize) {
        if self.shared.usable().is_err() {
            return;
        }
        // MPI may have taken more than it has sent.
        let end = Instant::now() + LINGER;
        while Instant::now() < end {
            self.poll();
            std::thread::yield_now();
        }
        self.cancel_receives(comm);
        let quiet = self.drain(comm, |_| true, CANCEL_PATIENCE);
        let Some(member) = self.comms.get_mut(comm).and_then(Option::take) else { return };
        // A communicator with something left on it is kept: its number must not come to mean another one.
        if quiet {
            if let Err(error) = self.calls.comm_free(member.comm) {
                crate::info!("{error}");
            }
        } else {
            self.troubled = true;
        }
    }

    fn leave(&mut self) -> Result<()> {
        if !self.initialised {
            return Ok(());
        }
        self.initialised = false;
        let left = || Error::Remote("operations have failed or are still under way".to_string());
        if self.troubled {
            return Err(left());
        }
        for comm in 0..self.comms.len() {
            self.cancel_receives(comm);
            if !self.drain(comm, |_| true, SEND_PATIENCE) {
                return Err(left());
            }
        }
        self.calls.finalize()
    }
}

fn event(transfer: Transfer, source: i32, outcome: Result<usize>) -> Event {
    let buffer = match transfer.bytes {
        Bytes::Ours(arena, _) => Some(arena),
        Bytes::Theirs(_) => None,
    };
    Event { id: transfer.id, source, outcome, buffer }
}
