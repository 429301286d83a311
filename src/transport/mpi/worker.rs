//! How ranks reach the one thread of this process that calls MPI: they hand it commands through a queue, find what has
//! ended in their mailbox, and are woken if they sleep.
#![forbid(unsafe_code)]

use super::calls::MpiCalls;
use super::collectives::MpiCollective;
use super::together::ROUND;
use super::vtable::World;
use super::worker_thread::{self, WorkerThread};
use crate::error::{Error, Result};
use crate::memory::{Arena, Bytes, Region};
use crate::process;
use crate::sync::locked;
use crate::transport::Waker;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// How long cancelled operations may take to end.
pub const CANCEL_PATIENCE: Duration = Duration::from_secs(1);
/// How long a rank waits for the answer to a command that does not wait for other ranks.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// How long a rank that leaves a communicator waits until the thread calls MPI no more for it, where the program's threads may
/// all call MPI: the program may finalise MPI next. The thread itself takes some milliseconds, but may have no processor.
const FLUSH_PATIENCE: Duration = Duration::from_secs(3);
/// The same while another rank of the process makes a communicator, for which the thread waits for other processes.
const FLUSH_PATIENCE_CREATING: Duration = Duration::from_millis(100);
/// How long a process that ends waits for the thread to take note of that. Inside a call of MPI that waits for other ranks,
/// or that will never return, it does not.
const NOTICE_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 3 });
/// How long whoever needs an answer waits when the last one did not come.
const LATER_PATIENCE: Duration = Duration::from_millis(100);
/// How long a barrier may take once `MPI_Init_thread` has returned on all ranks.
const MEET_LIMIT: Duration = Duration::from_secs(60);
/// How long `MPI_Finalize` may take once all ranks are about to call it.
const FINALIZE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 20 });

/// The addresses of each rank's node.
pub type Addresses = Vec<Vec<IpAddr>>;
/// Runs just before MPI is initialised.
pub type BeforeInit = Box<dyn FnOnce(&Addresses) + Send>;

/// The bytes of a transfer.
#[derive(Debug)]
pub enum TransferBytes {
    /// The user's; they stay valid until the transfer has ended or the communicator is cancelled.
    Theirs(Region),
    /// Ours, of which the first so many count; given back with the event.
    Ours(Arena, usize),
}

impl TransferBytes {
    /// The bytes themselves.
    pub fn region(&mut self) -> Bytes<'_> {
        match self {
            TransferBytes::Theirs(region) => *region,
            TransferBytes::Ours(arena, len) => arena.region().part(0, *len),
        }
    }
}

/// The end of a transfer.
#[derive(Debug)]
pub struct TransferEnd {
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
pub struct Mailbox {
    events: Mutex<Vec<TransferEnd>>,
    full: AtomicBool,
    waiting: AtomicBool,
    waker: Waker,
}

impl Mailbox {
    /// Takes out what is in it, in the order it was put in.
    pub fn take(&self) -> Vec<TransferEnd> {
        let mut events = locked(&self.events);
        self.full.store(false, Ordering::Relaxed);
        std::mem::take(&mut events)
    }

    /// Puts an event in and wakes the rank.
    pub fn put(&self, event: TransferEnd) {
        locked(&self.events).push(event);
        self.full.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Whether the rank waits for something.
    pub fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst)
    }
}

/// A message, or a part of one, on its way.
pub struct Transfer {
    /// The communicator's number.
    pub comm: usize,
    /// The number that its rank gave it.
    pub id: usize,
    /// Its bytes.
    pub bytes: TransferBytes,
    /// The other rank; none for whoever sends.
    pub peer: Option<i32>,
    /// The tag.
    pub tag: i32,
    /// Sent, not received.
    pub send: bool,
    /// It waits for whatever may come, and is no reason to call MPI.
    pub idle: bool,
    /// It is no message but a collective, which cannot be cancelled; its bytes are the result's.
    pub collective: Option<Box<MpiCollective>>,
}

/// What the thread has to know of a rank that leaves a communicator.
#[derive(Debug)]
pub struct MpiDeparture {
    /// Which communicator its headers belong to.
    pub nonce: u64,
    /// Ranks that have not left, from which packets may still come: acknowledgements of what they took late.
    pub awaited: Vec<i32>,
    /// Another communicator of the same ranks, in which nothing is on its way when all have left this one.
    pub behind: Option<usize>,
}

/// What the thread is asked to do.
pub enum MpiCommand {
    /// Tell the state of MPI.
    Look(Sender<Result<World>>),
    /// Initialise MPI, of whose ranks the nodes have these addresses.
    Init(Addresses, Sender<Result<World>>),
    /// Wait for all ranks of MPI's world.
    Meet(Sender<Result<()>>),
    /// Make a communicator of these ranks of the world.
    Create {
        /// The ranks.
        ranks: Vec<i32>,
        /// The tag that the making uses.
        tag: i32,
        /// Where its events go.
        mailbox: Arc<Mailbox>,
        /// Its number.
        answer: Sender<Result<usize>>,
    },
    /// Begin a transfer.
    Post(Transfer),
    /// End a communicator's transfers.
    Cancel {
        /// The communicator.
        comm: usize,
        /// It is done.
        answer: Sender<()>,
    },
    /// End a rank's part in a communicator, which is freed when all that it has sent has left and no peer sends any more.
    Part {
        /// The communicator.
        comm: usize,
        /// What is left of the rank.
        departure: MpiDeparture,
    },
    /// Send what is left, after which MPI is not called for a communicator that its rank has left.
    Flush {
        /// The communicator.
        comm: usize,
        /// It is done.
        answer: Sender<()>,
    },
    /// Do something.
    Run(Box<dyn FnOnce() + Send>),
    /// Say that all earlier commands have been carried out.
    Quiet(Sender<()>),
    /// Come to the end of MPI with all ranks, and say whether it is to be finalised here.
    Leave(Sender<Result<bool>>),
    /// Finalise MPI.
    Finalize(Sender<Result<()>>),
    /// Let another thread do this one's work, and wait until it is given back.
    Lend(Sender<WorkerThread>, Receiver<WorkerThread>),
}

/// Commands that have come, and whether the thread has to be woken for more.
#[derive(Default)]
pub struct Queue {
    /// In the order they came.
    pub commands: VecDeque<MpiCommand>,
    /// The thread sleeps.
    pub asleep: bool,
}

/// What the thread and the ranks share.
pub struct Shared {
    /// The commands.
    pub queue: Mutex<Queue>,
    /// Wakes the thread.
    pub awake: Condvar,
    /// Somebody makes a communicator.
    creating: AtomicBool,
    /// The program has finalised MPI.
    retired: AtomicBool,
    /// An answer did not come in time, and none has come since.
    unresponsive: AtomicBool,
    /// Why MPI cannot be used in this process any more.
    given_up: Mutex<Option<Error>>,
}

impl Shared {
    fn command(&self, command: MpiCommand) {
        let mut queue = locked(&self.queue);
        queue.commands.push_back(command);
        if queue.asleep {
            self.awake.notify_one();
        }
    }

    /// Ends the use of MPI in this process; returns the reason, which is the first one given.
    pub fn give_up(&self, why: Error) -> Error {
        locked(&self.given_up).get_or_insert(why).clone()
    }

    /// Fails once MPI has been given up.
    pub fn usable(&self) -> Result<()> {
        match &*locked(&self.given_up) {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Sends a command and waits for its answer. One that does not come means that MPI does not return.
    fn ask<T>(&self, limit: Duration, doing: &str, command: impl FnOnce(Sender<Result<T>>) -> MpiCommand) -> Result<T> {
        self.ask_beside(limit, doing, &mut || Ok(()), command)
    }

    /// As [`ask`](Shared::ask). Between whiles `meanwhile` is asked whether there is anything to wait for; its error ends the
    /// use of MPI, whose call may never return.
    fn ask_beside<T>(
        &self,
        limit: Duration,
        doing: &str,
        meanwhile: &mut dyn FnMut() -> Result<()>,
        command: impl FnOnce(Sender<Result<T>>) -> MpiCommand,
    ) -> Result<T> {
        self.usable()?;
        let (answer, answered) = channel();
        self.command(command(answer));
        let begin = Instant::now();
        // What is to be done by this very thread is not done while it waits.
        while !worker_thread::is_this() {
            let left = limit.saturating_sub(begin.elapsed());
            match answered.recv_timeout(left.min(ROUND)) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if left > ROUND => meanwhile().map_err(|error| self.give_up(error))?,
                Err(_) => break,
            }
        }
        Err(self.give_up(Error::Timeout(format!("{doing} did not return within {} ms", limit.as_millis()))))
    }

    /// Waits for the answer to a command that does not wait for other ranks, unless it is to be given by the calling thread:
    /// handlers of the process's end run on the thread that calls MPI when MPI ends the process.
    fn wait_for<T>(&self, answered: &Receiver<T>, limit: Duration) -> Option<T> {
        if worker_thread::is_this() {
            return None;
        }
        let limit = match self.unresponsive.load(Ordering::Relaxed) {
            true => limit.min(LATER_PATIENCE),
            false => limit,
        };
        let answer = answered.recv_timeout(limit).ok();
        self.unresponsive.store(answer.is_none(), Ordering::Relaxed);
        answer
    }
}

/// An MPI communicator that is to be made.
pub struct NewComm {
    /// Its ranks in MPI's world.
    pub ranks: Vec<i32>,
    /// Tells it from others that are made at the same time.
    pub tag: i32,
    /// Whether the program may call MPI whenever nothing of ours is under way.
    pub exclusive: bool,
    /// Wakes the rank.
    pub waker: Waker,
    /// How long it may take.
    pub limit: Duration,
}

/// The thread that calls MPI, as the process knows it.
pub struct MpiWorker {
    shared: Arc<Shared>,
    /// MPI's description of itself.
    pub description: String,
    /// The program has an MPI of its own, which it may initialise whenever it likes.
    pub program_has_mpi: bool,
}

impl std::fmt::Debug for MpiWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("description", &self.description).finish_non_exhaustive()
    }
}

impl MpiWorker {
    /// Starts the thread. `at_start` runs on it first; `before_init` just before MPI is initialised, if it has to be: the
    /// place for variables that MPI reads then.
    pub fn start(
        calls: MpiCalls,
        description: String,
        at_start: impl FnOnce() + Send + 'static,
        before_init: impl FnOnce(&Addresses) + Send + 'static,
    ) -> Result<MpiWorker> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            awake: Condvar::new(),
            creating: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            unresponsive: AtomicBool::new(false),
            given_up: Mutex::new(None),
        });
        let worker = WorkerThread::new(calls, shared.clone(), Box::new(before_init));
        let work = move || {
            at_start();
            worker.run();
        };
        process::thread("strata-mpi")
            .and_then(|thread| thread.spawn(work))
            .map_err(|error| Error::System(format!("starting the thread for MPI: {error}")))?;
        Ok(MpiWorker { shared, description, program_has_mpi: false })
    }

    /// The state of MPI in this process.
    pub fn look(&self) -> Result<World> {
        self.shared.ask(ANSWER_PATIENCE, "asking for the state of MPI", MpiCommand::Look)
    }

    /// Initialises MPI together with the whole job, and says what came of it. An error of `meanwhile` ends the wait.
    pub fn init(
        &self,
        addresses: Addresses,
        limit: Duration,
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<World> {
        self.shared.ask_beside(limit, "MPI_Init_thread", meanwhile, |answer| MpiCommand::Init(addresses, answer))
    }

    /// Waits for all ranks of the world, where Strata has initialised MPI on all: MPI's processes reach each other, or an
    /// error says that they do not. Open MPI 4.1 finds out at the first message only, and `MPI_Comm_create_group` returns
    /// success then on the rank whose message could not be sent. An error of `meanwhile` ends the wait.
    pub fn meet(&self, limit: Duration, meanwhile: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.shared.ask_beside(limit.min(MEET_LIMIT), "MPI_Barrier after MPI_Init_thread", meanwhile, MpiCommand::Meet)
    }

    /// Has the thread do something, whenever it comes to it.
    pub fn run(&self, job: Box<dyn FnOnce() + Send>) {
        self.shared.command(MpiCommand::Run(job));
    }

    /// Whether the caller may make a communicator now; if so it has to [`let_create`](MpiWorker::let_create) afterwards.
    pub fn may_create(&self) -> bool {
        !self.shared.creating.swap(true, Ordering::AcqRel)
    }

    /// Lets others make communicators.
    pub fn let_create(&self) {
        self.shared.creating.store(false, Ordering::Release);
    }

    /// Makes a communicator of these ranks of the world, all of which call this. `exclusive`: the program may call MPI
    /// whenever none of its own operations is under way here. An error of `meanwhile` ends the wait.
    pub fn create(&self, wish: NewComm, meanwhile: &mut dyn FnMut() -> Result<()>) -> Result<MpiLink> {
        let NewComm { ranks, tag, exclusive, waker, limit } = wish;
        let mailbox = Arc::new(Mailbox {
            events: Mutex::default(),
            full: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            waker,
        });
        let theirs = mailbox.clone();
        let create = |answer| MpiCommand::Create { ranks, tag, mailbox: theirs, answer };
        let comm = self.shared.ask_beside(limit, "MPI_Comm_create_group", meanwhile, create)?;
        let posted = AtomicBool::new(false);
        Ok(MpiLink { shared: self.shared.clone(), comm, mailbox, exclusive, posted })
    }

    /// Finalises MPI if this thread initialised it and nothing has gone wrong; waits for the job's other ranks as
    /// `MPI_Finalize` does, up to `limit`. Once they are all there it takes no time, or for ever: MPICH 4.0 over UCX can
    /// wait in it for what a rank that is further on will never do. Hydra mostly takes processes that leave it out for ended.
    pub fn leave(&self, limit: Duration) -> Result<()> {
        if self.shared.retired.load(Ordering::Acquire) {
            return Ok(());
        }
        let gone = |why: &str| Err(self.shared.give_up(Error::Remote(why.to_string())));
        if worker_thread::is_this() {
            return gone("MPI itself ends the process");
        }
        let (answer, answered) = channel();
        self.shared.command(MpiCommand::Quiet(answer));
        if self.shared.wait_for(&answered, NOTICE_PATIENCE.min(limit)).is_none() {
            return gone("a thread is still in a call of MPI, which may never return");
        }
        match self.shared.ask(limit, "MPI_Barrier before MPI_Finalize", MpiCommand::Leave)? {
            true => self.shared.ask(limit.min(FINALIZE_LIMIT), "MPI_Finalize", MpiCommand::Finalize),
            false => Ok(()),
        }
    }
}

impl MpiWorker {
    /// The program finalises MPI, on the calling thread and with MPI still whole: what is pending ends, and MPI is not
    /// called afterwards. The calling thread does that, since MPI may have locked others out.
    pub fn retire(&self) {
        self.shared.retired.store(true, Ordering::Release);
        let ((lend, lent), (give_back, back)) = (channel(), channel());
        self.shared.command(MpiCommand::Lend(lend, back));
        match lent.recv_timeout(ANSWER_PATIENCE) {
            Ok(mut worker) => {
                worker.retire();
                // The thread waits for it.
                let _ = give_back.send(worker);
            }
            Err(_) => {
                let text = "the program has finalised MPI while another thread was in a call of MPI";
                self.shared.give_up(Error::InvalidUsage(text.to_string()));
            }
        }
    }
}

/// One communicator, as its rank holds it.
pub struct MpiLink {
    shared: Arc<Shared>,
    comm: usize,
    mailbox: Arc<Mailbox>,
    exclusive: bool,
    /// Transfers have been posted since MPI was last known to be silent.
    posted: AtomicBool,
}

impl std::fmt::Debug for MpiLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("comm", &self.comm).finish_non_exhaustive()
    }
}

impl MpiLink {
    /// Whether the program may call MPI whenever nothing of ours is under way.
    pub fn exclusive(&self) -> bool {
        self.exclusive
    }

    fn post(&self, id: usize, bytes: TransferBytes, peer: Option<i32>, tag: i32, send: bool) {
        self.posted.store(true, Ordering::Relaxed);
        let (comm, idle) = (self.comm, peer.is_none());
        let transfer = Transfer { comm, id, bytes, peer, tag, send, idle, collective: None };
        self.shared.command(MpiCommand::Post(transfer));
    }

    /// Sends bytes to a rank of the communicator.
    pub fn send(&self, id: usize, bytes: TransferBytes, to: i32, tag: i32) {
        self.post(id, bytes, Some(to), tag, true);
    }

    /// Receives bytes from a rank.
    pub fn recv(&self, id: usize, bytes: TransferBytes, from: i32, tag: i32) {
        self.post(id, bytes, Some(from), tag, false);
    }

    /// Begins a collective of all ranks of the communicator. Its memory stays valid until it has ended or the communicator is
    /// cancelled.
    pub fn collect(&self, id: usize, call: MpiCollective) {
        self.posted.store(true, Ordering::Relaxed);
        let bytes = TransferBytes::Theirs(call.recv);
        let collective = Some(Box::new(call));
        let (comm, peer, tag, send, idle) = (self.comm, None, 0, false, false);
        self.shared.command(MpiCommand::Post(Transfer { comm, id, bytes, peer, tag, send, idle, collective }));
    }

    /// Receives bytes from any rank, some day.
    pub fn listen(&self, id: usize, bytes: TransferBytes, tag: i32) {
        self.post(id, bytes, None, tag, false);
    }

    /// Leaves a communicator of collectives, none of which is pending here. A barrier, for which nobody waits, tells when all ranks have
    /// left it: it is freed then. The barrier is in a communicator of its own, `farewell`: others may yet begin collectives in this one,
    /// which it would take part in.
    pub fn leave_together(&self, farewell: &MpiLink) {
        let (comm, id, peer, tag) = (farewell.comm, 0, None, 0);
        let (bytes, collective) = (TransferBytes::Theirs(Region::EMPTY), Some(Box::new(MpiCollective::barrier())));
        // As a send it is waited for before the communicator is freed.
        let barrier = Transfer { comm, id, bytes, peer, tag, send: true, idle: true, collective };
        self.shared.command(MpiCommand::Post(barrier));
        farewell.leave(MpiDeparture { nonce: 0, awaited: Vec::new(), behind: None });
        self.leave(MpiDeparture { nonce: 0, awaited: Vec::new(), behind: Some(farewell.comm) });
    }

    /// Appends what has ended.
    pub fn take(&self, events: &mut Vec<TransferEnd>) -> Result<()> {
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
                self.shared.awake.notify_one();
            }
        } else if !something && self.exclusive && (self.posted.swap(false, Ordering::Relaxed) || waited) {
            let (answer, answered) = channel();
            self.shared.command(MpiCommand::Quiet(answer));
            // A thread that does not answer is stuck in MPI, which others find out.
            let _ = self.shared.wait_for(&answered, ANSWER_PATIENCE);
        }
    }

    /// Ends all transfers; afterwards no memory of the user is written any more.
    pub fn cancel(&self) {
        self.mailbox.waiting.store(false, Ordering::SeqCst);
        let (answer, answered) = channel();
        self.shared.command(MpiCommand::Cancel { comm: self.comm, answer });
        if self.shared.wait_for(&answered, CANCEL_PATIENCE + ANSWER_PATIENCE).is_none() {
            let text = "MPI did not return, so an operation could not be cancelled";
            self.shared.give_up(Error::Internal(text.to_string()));
            crate::log::warn(text);
        }
    }

    /// Leaves the communicator, on which only sends and receives from anybody are pending. It is freed when the sends have
    /// ended and every peer has left: `MPI_Comm_free` while a message is on its way is an error, of which Open MPI 4.1
    /// dies. Where the program may call MPI next, this waits until our sends have ended; the rest is done when MPI is
    /// called for another communicator, or at the end of MPI. Where it may finalise MPI next, this waits a little.
    pub fn leave(&self, departure: MpiDeparture) {
        self.mailbox.waiting.store(false, Ordering::SeqCst);
        self.shared.command(MpiCommand::Part { comm: self.comm, departure });
        let (answer, answered) = channel();
        self.shared.command(MpiCommand::Flush { comm: self.comm, answer });
        // A thread that does not answer is stuck in MPI, and nothing can be freed, or makes a communicator.
        let patience = match () {
            () if self.exclusive => ANSWER_PATIENCE,
            () if self.shared.creating.load(Ordering::Acquire) => FLUSH_PATIENCE_CREATING,
            () => FLUSH_PATIENCE,
        };
        let _ = self.shared.wait_for(&answered, patience);
    }
}
