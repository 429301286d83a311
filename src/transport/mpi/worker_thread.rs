//! The one thread of this process that calls MPI.
//!
//! It calls MPI while something is under way: a transfer that is not complete, or a rank that waits for one. Between
//! polls that find nothing it spins briefly, then gives way, then sleeps for some tens of microseconds, since there may
//! be fewer processors than threads. With nothing under way it still polls now and then, since MPI moves bytes only while
//! it is called: what it has taken and not sent yet, and what a peer can send only when this process answers. Where the
//! program may call MPI only while Strata does not (`MPI_THREAD_SERIALIZED`), MPI is silent between operations instead.
//!
//! A communicator that its rank has left stays until MPI has sent all that was accepted for it and each peer has said
//! that it has left, too.
use super::calls::MpiCalls;
use super::peer::{header, PACKET};
use super::vtable::{state, thread_level, Completion, World, SUCCESS};
use super::worker::{
    Addresses, BeforeInit, Mailbox, MpiCommand, MpiDeparture, Shared, Transfer, TransferBytes, TransferEnd,
    CANCEL_PATIENCE,
};
use crate::error::{Error, Result};
use crate::memory::Arena;
use crate::sync::locked;
use crate::transport::header::FrameKind;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Polls without a pause after something has happened.
const SPINS: u32 = 50;
/// How long the thread then yields between polls.
const YIELDS: Duration = Duration::from_micros(200);
/// What it sleeps between polls after that, at first. The longer nothing has ended, the longer it sleeps, as a part of that
/// time: where many ranks share few processors their polling would take what their messages need.
const NAP: Duration = Duration::from_micros(50);
/// The longest sleep between polls while a rank waits.
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// The same while something is under way for which no rank of this process waits.
const LONGEST_UNAWAITED_NAP: Duration = Duration::from_millis(50);
/// The same with nothing under way.
const LONGEST_IDLE_NAP: Duration = Duration::from_secs(1);
/// What has passed since something ended is so many times as long as a sleep.
const WAIT_PER_NAP: u32 = 16;
/// How long it goes on polling when nothing is under way any more, so that what MPI holds back still leaves.
const LINGER: Duration = Duration::from_millis(2);
/// How long a cancel waits for sends that nobody receives. They only read, and mostly nobody will ever take them.
const SEND_PATIENCE: Duration = Duration::from_millis(100);
/// How long sends may take to end when the program finalises MPI, or when all ranks have come to the end of it.
const END_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

thread_local! {
    static CALLS_MPI: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is the one that calls MPI, so that no command is carried out while it waits.
pub fn is_this() -> bool {
    CALLS_MPI.get()
}

struct Member {
    comm: u64,
    /// None once its rank has left it.
    mailbox: Option<Arc<Mailbox>>,
    /// Then: what its rank has left behind. None in one that is kept for good.
    departure: Option<MpiDeparture>,
}

/// What the thread has.
pub struct WorkerThread {
    calls: MpiCalls,
    shared: Arc<Shared>,
    comms: Vec<Option<Member>>,
    requests: Vec<u64>,
    transfers: Vec<Transfer>,
    ended: Vec<Completion>,
    before_init: Option<BeforeInit>,
    initialised: bool,
    hooked: bool,
    exclusive: bool,
    troubled: bool,
    /// The end of MPI has come, or is about to.
    over: bool,
    last: Instant,
    idle_polls: u32,
}

impl WorkerThread {
    /// A thread that has done nothing. `before_init` runs just before it initialises MPI.
    pub fn new(calls: MpiCalls, shared: Arc<Shared>, before_init: BeforeInit) -> WorkerThread {
        WorkerThread {
            calls,
            shared,
            comms: Vec::new(),
            requests: Vec::new(),
            transfers: Vec::new(),
            ended: Vec::new(),
            before_init: Some(before_init),
            initialised: false,
            hooked: false,
            exclusive: false,
            troubled: false,
            over: false,
            last: Instant::now(),
            idle_polls: 0,
        }
    }

    /// Carries out commands for ever.
    pub fn run(mut self) {
        CALLS_MPI.set(true);
        loop {
            let commands = self.next();
            let slept = commands.is_empty();
            for command in commands {
                match command {
                    MpiCommand::Lend(lend, back) => {
                        // Whoever does not take it has stopped waiting. With whom it is lost there is nothing to do.
                        match lend.send(self) {
                            Ok(()) => match back.recv() {
                                Ok(worker) => self = worker,
                                Err(_) => return,
                            },
                            Err(unsent) => self = unsent.0,
                        }
                    }
                    command => self.carry_out(command),
                }
                self.moved();
            }
            let wanted = self.is_busy() || (self.watches() && (slept || !self.yields_to_program()));
            if wanted && self.shared.usable().is_ok() && self.poll() {
                self.free_left();
                self.moved();
            }
        }
    }

    fn moved(&mut self) {
        self.idle_polls = 0;
        self.last = Instant::now();
    }

    /// Whether a rank waits for something.
    fn is_awaited(&self) -> bool {
        self.comms.iter().flatten().filter_map(|member| member.mailbox.as_ref()).any(|mailbox| mailbox.is_awaited())
    }

    /// Whether somebody needs MPI to be called.
    fn is_busy(&self) -> bool {
        self.transfers.iter().any(|transfer| !transfer.idle)
            || self.is_awaited()
            || (!self.exclusive
                && !self.yields_to_program()
                && !self.transfers.is_empty()
                && self.last.elapsed() < LINGER)
    }

    /// Whether the program may finalise its MPI at any moment: it has left all communicators. MPICH (4.0 to 5.0) drops its
    /// locking when `MPI_Finalize` begins, before it calls the hook, and aborts if another thread is in MPI just then.
    fn yields_to_program(&self) -> bool {
        !self.initialised && self.comms.iter().flatten().all(|member| member.mailbox.is_none())
    }

    /// Whether MPI is called now and then although nothing is under way.
    fn watches(&self) -> bool {
        !self.comms.is_empty() && !self.exclusive && !self.troubled && !self.over
    }

    /// How long to sleep between two polls when nothing has ended for so long.
    fn nap(&self, waited: Duration) -> Duration {
        let (shortest, longest) = match () {
            () if self.is_awaited() => (NAP, LONGEST_NAP),
            () if self.is_busy() => (NAP, LONGEST_UNAWAITED_NAP),
            () if self.yields_to_program() => (LONGEST_UNAWAITED_NAP, LONGEST_IDLE_NAP),
            () => (NAP, LONGEST_IDLE_NAP),
        };
        (waited / WAIT_PER_NAP).clamp(shortest, longest)
    }

    /// Waits as long as it should, and returns the commands that have come.
    fn next(&mut self) -> VecDeque<MpiCommand> {
        let shared = self.shared.clone();
        let mut queue = locked(&shared.queue);
        while queue.commands.is_empty() {
            if !(self.is_busy() || self.watches()) || shared.usable().is_err() {
                queue.asleep = true;
                queue = shared.awake.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
                queue.asleep = false;
                self.moved();
                continue;
            }
            let rarely = !self.is_busy() && self.yields_to_program();
            self.idle_polls = self.idle_polls.saturating_add(1);
            if !rarely && self.idle_polls < SPINS {
                break;
            }
            let waited = self.last.elapsed();
            if !rarely && waited < YIELDS {
                drop(queue);
                std::thread::yield_now();
                queue = locked(&shared.queue);
                break;
            }
            queue.asleep = true;
            let was_idle = !self.is_busy();
            let woken = shared.awake.wait_timeout(queue, self.nap(waited));
            let (again, slept) = woken.unwrap_or_else(|poisoned| poisoned.into_inner());
            queue = again;
            queue.asleep = false;
            if was_idle && !slept.timed_out() {
                self.moved();
            }
            break;
        }
        std::mem::take(&mut queue.commands)
    }

    fn carry_out(&mut self, command: MpiCommand) {
        // Whoever has stopped waiting for an answer does not miss it.
        match command {
            MpiCommand::Look(answer) => drop(answer.send(self.look())),
            MpiCommand::Init(addresses, answer) => drop(answer.send(self.init(&addresses))),
            MpiCommand::Meet(answer) => drop(answer.send(self.calls.barrier())),
            MpiCommand::Create { ranks, tag, mailbox, answer } => {
                let made = self.hook().and_then(|()| self.calls.comm_create(&ranks, tag));
                drop(answer.send(made.map(|comm| self.keep(comm, mailbox))));
            }
            MpiCommand::Post(transfer) => self.post(transfer),
            MpiCommand::Cancel { comm, answer } => {
                self.cancel(comm);
                let _ = answer.send(());
            }
            MpiCommand::Part { comm, departure } => self.part(comm, departure),
            MpiCommand::Flush { comm, answer } => {
                self.flush(comm);
                let _ = answer.send(());
            }
            MpiCommand::Run(job) => job(),
            MpiCommand::Quiet(answer) => {
                let _ = answer.send(());
            }
            MpiCommand::Leave(answer) => drop(answer.send(self.leave())),
            MpiCommand::Finalize(answer) => {
                let outcome = self.calls.finalize();
                if outcome.is_ok() {
                    // Other threads of the program may still wait: MPI must not be called for them any more.
                    self.shared.give_up(Error::InvalidUsage("MPI has been finalised: the process ends".to_string()));
                }
                drop(answer.send(outcome));
            }
            MpiCommand::Lend(..) => {}
        }
    }

    /// The number of a communicator that was made.
    fn keep(&mut self, comm: u64, mailbox: Arc<Mailbox>) -> usize {
        let place = self.comms.iter().position(Option::is_none).unwrap_or_else(|| {
            self.comms.push(None);
            self.comms.len() - 1
        });
        self.comms[place] = Some(Member { comm, mailbox: Some(mailbox), departure: None });
        place
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

    fn init(&mut self, addresses: &Addresses) -> Result<World> {
        if self.look()?.state == state::FRESH {
            if let Some(before_init) = self.before_init.take() {
                before_init(addresses);
            }
            // MPI may start processes and threads of its own.
            crate::process::with_signals(|| self.calls.init())?;
            self.initialised = true;
        }
        self.look()
    }

    /// Asks to be told when the program finalises MPI, which it may do with communicators of ours alive.
    fn hook(&mut self) -> Result<()> {
        if !self.hooked {
            self.calls.at_finalize(super::mpi_ends)?;
            self.hooked = true;
        }
        Ok(())
    }

    fn post(&mut self, mut transfer: Transfer) {
        let Some(Some(member)) = self.comms.get(transfer.comm) else { return };
        let call = transfer.collective.as_ref().map(|call| call.for_mpi());
        let region = transfer.bytes.region();
        let posted = self.shared.usable().and_then(|()| match (transfer.send, transfer.peer, call) {
            // SAFETY: nobody else may use the buffers until the request has ended; because whoever gave them leaves them alone until
            // the transfer's end or the communicator's cancel, and one that has not ended by then ends the use of MPI (`cancel`).
            // The lists stay with the transfer, and are forgotten with it.
            (_, _, Some(call)) => unsafe { self.calls.collective(member.comm, &call) },
            // SAFETY: the bytes must stay until the request has ended; because `self.transfers` keeps those of ours, or they
            // are forgotten, and whoever gave us theirs leaves them alone until the transfer's end or the communicator's
            // cancel. After that a send rests on nobody receiving it (`cancel`).
            (true, Some(to), None) => unsafe { self.calls.isend(member.comm, region, to, transfer.tag) },
            // SAFETY: nobody else may use the bytes until the request has ended; because they are kept as above. A receive
            // that cannot be cancelled ends the use of MPI (`cancel`).
            (_, from, None) => unsafe { self.calls.irecv(member.comm, region, from, transfer.tag) },
        });
        match posted {
            Ok(request) => {
                self.requests.push(request);
                self.transfers.push(transfer);
            }
            Err(error) => {
                if let Some(mailbox) = &member.mailbox {
                    mailbox.put(event(transfer, -1, Err(error)));
                }
            }
        }
    }

    /// Makes progress; whether anything ended.
    fn poll(&mut self) -> bool {
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
        let (cancelled, doing) = match &transfer.collective {
            // Of a collective the status says nothing but the error.
            Some(call) => (0, call.name()),
            None => (completion.cancelled, if transfer.send { "MPI_Isend" } else { "MPI_Irecv" }),
        };
        let outcome = match (cancelled, completion.error) {
            (0, SUCCESS) => Ok(completion.bytes as usize),
            (0, error) => Err(self.calls.error(doing, error)),
            _ => return,
        };
        match &member.mailbox {
            Some(mailbox) => mailbox.put(event(transfer, completion.source, outcome)),
            None => self.overhear(transfer.comm, event(transfer, completion.source, outcome)),
        }
    }

    /// MPI itself has failed: every communicator learns it.
    fn fail_all(&mut self, error: Error) {
        self.troubled = true;
        let error = self.shared.give_up(error);
        let transfers = std::mem::take(&mut self.transfers);
        self.requests.clear();
        for transfer in transfers {
            let member = self.comms.get(transfer.comm).and_then(Option::as_ref);
            if let Some(mailbox) = member.and_then(|member| member.mailbox.as_ref()) {
                let outcome = Err(error.clone());
                mailbox.put(TransferEnd { id: transfer.id, source: -1, outcome, buffer: None });
            }
            // MPI may still use what it was given, so our buffers and lists are not used again.
            std::mem::forget((transfer.bytes, transfer.collective));
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
            if transfer.comm == comm && !transfer.send && transfer.collective.is_none() {
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
        let written = |transfer: &Transfer| !transfer.send && matches!(transfer.bytes, TransferBytes::Theirs(_));
        if !self.drain(comm, written, CANCEL_PATIENCE) {
            let text = match self.pending(comm, |transfer| transfer.collective.is_some()) {
                true => "a collective of MPI's did not end, and MPI cannot cancel it, so MPI is not used any more in this process",
                false => "a receive could not be cancelled, so MPI is not used any more in this process",
            };
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

    /// Ends a rank's part in a communicator: it takes nothing any more, and what it has sent goes on leaving.
    fn part(&mut self, comm: usize, departure: MpiDeparture) {
        let Some(Some(member)) = self.comms.get_mut(comm) else { return };
        let mailbox = member.mailbox.take();
        member.departure = Some(departure);
        for event in mailbox.map(|mailbox| mailbox.take()).unwrap_or_default() {
            self.overhear(comm, event);
        }
        // Sends until MPI has confirmed that they are gone.
        let is_message = |transfer: &&mut Transfer| transfer.collective.is_none();
        let sends = |transfer: &&mut Transfer| transfer.comm == comm && transfer.send && is_message(transfer);
        self.transfers.iter_mut().filter(sends).for_each(|transfer| transfer.idle = false);
        self.free_left();
    }

    /// Takes what has ended in a communicator that its rank has left, and goes on receiving while packets may come.
    fn overhear(&mut self, comm: usize, event: TransferEnd) {
        let Some(Some(Member { departure: Some(departure), .. })) = self.comms.get_mut(comm) else { return };
        let bytes = match event.outcome {
            Ok(bytes) => bytes,
            Err(error) => return crate::info!("a communicator that its rank has left: {error}"),
        };
        // Only receives have a source, and with a buffer of ours those for packets alone: no others are under way.
        let (true, Some(mut packet)) = (event.source >= 0, event.buffer) else { return };
        let header = header(packet.region().part(0, bytes), departure.nonce);
        if header.is_some_and(|header| header.kind == FrameKind::Leave) {
            departure.awaited.retain(|&rank| rank != event.source);
        }
        if !departure.awaited.is_empty() && !self.over {
            self.listen(comm, packet);
        }
    }

    fn listen(&mut self, comm: usize, packet: Arena) {
        let bytes = TransferBytes::Ours(packet, PACKET);
        let (peer, tag, send, idle, collective) = (None, 0, false, true, None);
        self.post(Transfer { comm, id: 0, bytes, peer, tag, send, idle, collective });
    }

    /// Sends what a rank that has left a communicator has left to send, where the program may call or finalise MPI next.
    fn flush(&mut self, comm: usize) {
        if self.shared.usable().is_ok() && (self.exclusive || self.yields_to_program()) {
            self.linger();
            let patience = if self.exclusive { CANCEL_PATIENCE } else { LINGER };
            self.drain(comm, |transfer| transfer.send && transfer.collective.is_none(), patience);
            self.free_left();
        }
    }

    /// Frees the communicators that their ranks have left, on which nothing is on its way and no packet can come.
    fn free_left(&mut self) {
        for comm in 0..self.comms.len() {
            let Some(Some(Member { departure: Some(departure), .. })) = self.comms.get(comm) else { continue };
            let sends = |comm: usize| self.pending(comm, |transfer| transfer.send);
            let quiet = departure.awaited.is_empty() && !sends(comm) && !departure.behind.is_some_and(sends);
            if !quiet || self.shared.usable().is_err() {
                continue;
            }
            self.cancel_receives(comm);
            // A communicator with something left on it is kept: its number must not come to mean another one.
            let quiet = self.drain(comm, |_| true, CANCEL_PATIENCE);
            if !quiet {
                self.troubled = true;
                self.comms[comm].iter_mut().for_each(|member| member.departure = None);
                continue;
            }
            if let Some(Err(error)) = self.comms[comm].take().map(|member| self.calls.comm_free(member.comm)) {
                crate::info!("{error}");
            }
        }
    }

    /// Polls a little longer: MPI may have taken more than it has sent, and the last acknowledgements are on their way.
    fn linger(&mut self) {
        let end = Instant::now() + LINGER;
        while Instant::now() < end {
            self.poll();
            std::thread::yield_now();
        }
    }

    /// Comes to the end of MPI together with all ranks; whether it is to be finalised here.
    fn leave(&mut self) -> Result<bool> {
        if !self.initialised {
            return Ok(false);
        }
        self.initialised = false;
        let left = || Error::Remote("operations have failed or are still under way".to_string());
        if self.troubled {
            return Err(left());
        }
        self.over = true;
        self.linger();
        let receives = |transfer: &Transfer| !transfer.send;
        let mut settled = true;
        for comm in 0..self.comms.len() {
            self.cancel_receives(comm);
            settled &= self.drain(comm, receives, SEND_PATIENCE);
        }
        if !settled {
            return Err(left());
        }
        // Meanwhile sends go on leaving, for as long as there is a rank that may still want them.
        self.calls.barrier()?;
        match self.settle() {
            true => Ok(true),
            false => Err(left()),
        }
    }

    /// Ends what is pending on all communicators; whether all of it has ended.
    fn settle(&mut self) -> bool {
        self.linger();
        let end = Instant::now() + if self.troubled { SEND_PATIENCE } else { END_PATIENCE };
        let mut settled = true;
        for comm in 0..self.comms.len() {
            self.cancel_receives(comm);
            settled &= self.drain(comm, |_| true, end.saturating_duration_since(Instant::now()).max(SEND_PATIENCE));
        }
        settled
    }

    /// The program finalises MPI on the calling thread, which has been lent this: from here on MPI is not called any more.
    pub fn retire(&mut self) {
        self.initialised = false;
        self.over = true;
        if self.shared.usable().is_ok() {
            CALLS_MPI.set(true);
            self.settle();
            CALLS_MPI.set(false);
        }
        let text = "the program has finalised MPI, which carried what goes between nodes; communicators have to be \
                    destroyed before";
        self.fail_all(Error::InvalidUsage(text.to_string()));
    }
}

fn event(transfer: Transfer, source: i32, outcome: Result<usize>) -> TransferEnd {
    let source = if transfer.send { -1 } else { source };
    let buffer = match transfer.bytes {
        TransferBytes::Ours(arena, _) => Some(arena),
        TransferBytes::Theirs(_) => None,
    };
    TransferEnd { id: transfer.id, source, outcome, buffer }
}
