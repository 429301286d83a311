//! A batch: the operations of one communicator from one group as they run, the loop that waits for them, and how they fail.
#![forbid(unsafe_code)]

use super::engine::Engine;
use super::engine_watch::Claim;
use super::epochs::Epochs;
use super::front::Followed;
use super::independent::IndependentBatch;
use super::late::{LateCall, NextOfLate};
use super::messages::Messages;
use super::recorded::BatchRecords;
use super::stall::{LinkState, Stall};
use super::{CollectiveCall, Comm, Direction, Message, Operation};
use crate::device::host::stream::HostStream;
use crate::error::{Error, Result};
use crate::exec::Progress;
use crate::health::Loss;
use crate::records::{CallTicket, CommRecords};
use crate::sync::locked;
use crate::topo::Rank;
use crate::transport::{Idle, Transport, Waker};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The operations of one communicator from one group.
pub(super) struct OperationBatch {
    pub(super) comm: Arc<Comm>,
    /// None until it has one.
    turn: Option<u64>,
    /// The turn is another one's, which ends it.
    is_lent: bool,
    pub(super) collectives: SmallVec<[CollectiveCall; 1]>,
    /// How many of the collectives have begun.
    begun: usize,
    /// Of each of them, where it is followed.
    pub(super) followed: SmallVec<[SmallVec<[Followed; 1]>; 1]>,
    /// The messages that are followed.
    pub(super) followed_messages: Vec<Followed>,
    /// Those that have not begun.
    pub(super) messages: Vec<Message>,
    pub(super) active: Active,
    /// The collective that is under way, where late ranks may bring their parts of it later.
    late: Option<Box<LateCall>>,
    /// After the collectives the ranks tell each other what their links deliver.
    telling: Option<Telling>,
    /// Messages alone that wait for no turn, once they have their places.
    pub(super) independent: bool,
    /// The stream whose next messages these may take in.
    pub(super) stream: Option<Arc<HostStream>>,
    /// Whether this thread watches the engine, where several may wait for it.
    claim: Claim,
    /// Fails as soon as a rank is known to be lost.
    pub(super) needs_all: bool,
    /// It can be made again over other NICs.
    pub(super) is_made_again: bool,
    /// How long this rank's NIC has been down.
    link: LinkState,
    /// Its collectives are over words of the ranks' own, in host memory wherever the program's data is.
    pub(super) is_own: bool,
    /// What the last poll knew of the engine's news and visits.
    seen: (u64, u64),
    pub(super) records: BatchRecords,
}

/// What the ranks tell each other, and whether they measure their links first.
struct Telling {
    epochs: Arc<Epochs>,
    measures: bool,
}

pub(super) enum Active {
    Waiting,
    Collective,
    Telling,
    Messages(Messages),
    Independent(IndependentBatch),
}

/// How long a rank that asks why it waits in vain gives the others to answer.
const GRACE: Duration = Duration::from_millis(1000);
/// Idle polls between two looks at whom a run waits for: by then it sleeps between polls.
const TELL_POLLS: u32 = 64;
/// How long a rank that has met the consequence of a failure waits to hear of the failure.
const ECHO: Duration = Duration::from_millis(500);
/// How long another thread that has failed the communicator first may take to tell the others.
const FAILS: Duration = Duration::from_secs(5);
/// How long a run that waits for a lost rank gets no further before it fails: what the rank sent may be on its way.
const LOST: Duration = Duration::from_secs(1);
/// The same for a run that waits for others: they may be late, and find that they need nothing of the lost rank.
const LOST_FOR_OTHERS: Duration = Duration::from_secs(5);
/// How long a run waits for its turn before it looks for a failure.
const TURN_WAIT: Duration = Duration::from_millis(50);
/// How long a thread that has several runs sleeps on one of them.
const SHARED_WAIT: Duration = Duration::from_micros(200);

impl OperationBatch {
    pub(super) fn new(comm: Arc<Comm>) -> OperationBatch {
        OperationBatch {
            comm,
            turn: None,
            is_lent: false,
            collectives: SmallVec::new(),
            begun: 0,
            followed: SmallVec::new(),
            followed_messages: Vec::new(),
            messages: Vec::new(),
            active: Active::Waiting,
            late: None,
            telling: None,
            independent: false,
            stream: None,
            claim: Claim::default(),
            needs_all: false,
            is_made_again: false,
            link: LinkState::default(),
            is_own: false,
            seen: (0, 0),
            records: BatchRecords::default(),
        }
    }

    /// One call that has begun, in this turn.
    pub(super) fn begun(
        comm: Arc<Comm>,
        turn: u64,
        call: CollectiveCall,
        record: Option<CallTicket>,
    ) -> OperationBatch {
        let mut run = OperationBatch::new(comm);
        run.records.goes_on(record);
        run.collectives.push(call);
        (run.turn, run.begun, run.active) = (Some(turn), 1, Active::Collective);
        run
    }

    /// A message alone that has begun, in this turn.
    pub(super) fn with_message(
        comm: Arc<Comm>,
        turn: u64,
        message: Messages,
        record: (Option<CallTicket>, u64),
    ) -> OperationBatch {
        let mut run = OperationBatch::new(comm);
        run.records.message_goes_on(record);
        (run.turn, run.active) = (Some(turn), Active::Messages(message));
        run
    }

    /// Brings what has begun to its end.
    pub(super) fn end(mut self, begun: Result<()>) -> Result<()> {
        match begun {
            Ok(()) => drive(std::slice::from_mut(&mut self)),
            Err(error) => {
                let error = self.reason(error);
                Err(self.fail(error))
            }
        }
    }

    /// Gets the next place among the communicator's operations; messages that wait for no turn, among those of their peers.
    pub(super) fn take_turn(&mut self) {
        if let Some(numbers) = self.comm.numbers.as_ref().filter(|_| !self.messages.is_empty()) {
            let (mut numbers, me) = (locked(numbers), self.comm.rank);
            for message in self.messages.iter_mut().filter(|message| message.peer != me) {
                message.sequence = numbers.next(message.direction, message.peer);
            }
            if self.collectives.is_empty() {
                self.independent = true;
                return self.comm.turns.begin_independent();
            }
        }
        self.turn = Some(self.comm.turns.issue());
    }

    /// Gets the next place if nothing is running or queued; whether it does.
    pub(super) fn take_turn_now(&mut self) -> bool {
        self.turn = self.comm.turns.issue_now();
        self.turn.is_some()
    }

    /// Without operations, in this one's turn, which has not begun.
    pub(super) fn in_its_turn(&self) -> OperationBatch {
        let mut batch = OperationBatch::new(self.comm.clone());
        (batch.turn, batch.is_lent) = (self.turn, true);
        batch
    }

    /// Runs a call of the others' in the program's place.
    pub(super) fn relay(&mut self, call: CollectiveCall, late: Box<LateCall>) {
        self.collectives.push(call);
        self.late = Some(late);
    }

    /// Has the ranks measure their links.
    pub(super) fn profile(mut self, epochs: Arc<Epochs>) -> Result<()> {
        self.telling = Some(Telling { epochs, measures: true });
        self.take_turn();
        drive(std::slice::from_mut(&mut self))
    }

    /// Has the one that relays this call contribute to what has not begun.
    fn arrive(&self) {
        let is_next = |turn: u64| turn.checked_sub(1).is_some_and(|before| self.comm.turns.is(before));
        if let (Some(late), Some(call)) = (self.comm.late.get(), self.collectives.get(self.begun)) {
            if self.turn.is_some_and(is_next) {
                late.arrive(call, self.comm.waker.as_ref());
            }
        }
    }

    /// Whether it is this run's turn, or it waits for none.
    pub(super) fn is_on(&self) -> bool {
        self.independent || self.turn.is_some_and(|turn| self.comm.turns.is(turn))
    }

    /// Whether what this run waits for is what ranks are told that this one waits for.
    fn is_told(&self) -> bool {
        self.is_on() && (!self.independent || self.comm.turns.is_idle())
    }

    /// The only operation.
    pub(super) fn add(&mut self, operation: Operation) -> Result<()> {
        self.record(operation);
        self.decide()
    }

    /// Decides about all operations of a group, of which several may become one.
    pub(super) fn decide(&mut self) -> Result<()> {
        if self.collectives.len() > 1 {
            let calls = std::mem::take(&mut self.collectives).into_vec();
            self.collectives = self.comm.fuse(calls).into_iter().map(|(_, call)| call).collect();
        }
        self.collectives.iter_mut().try_for_each(|call| self.comm.decide(call))?;
        self.comm.late.get().map_or(Ok(()), |late| late.accept(&self.collectives))?;
        self.records.accept(&self.comm, &self.collectives);
        let due = self.comm.epochs.get().filter(|epochs| epochs.are_due(&self.collectives)).cloned();
        self.telling = due.map(|epochs| Telling { epochs, measures: false });
        Ok(())
    }

    pub(super) fn record(&mut self, operation: Operation) {
        self.records.accept_message(&self.comm, &operation);
        match operation {
            Operation::Collective(call) => self.collectives.push(call),
            Operation::Send { to, data, .. } => {
                self.messages.push(Message { direction: Direction::Send, peer: to, data, sequence: 0 });
            }
            Operation::Recv { from, data, .. } => {
                self.messages.push(Message { direction: Direction::Recv, peer: from, data, sequence: 0 });
            }
        }
    }

    /// Goes as far as possible without waiting. After an error the communicator is to be failed, once its engine is not locked
    /// any more.
    fn poll(&mut self) -> Result<Progress> {
        if !self.is_on() {
            self.arrive();
            return Ok(Progress::Idle);
        }
        self.seize();
        self.join_next();
        let told = self.is_told();
        let mut moved = false;
        let mut engine = self.comm.engine(&self.claim);
        let engine = engine.as_mut().ok_or_else(|| self.comm.usable().err().unwrap_or_else(ended))?;
        self.seen = (self.comm.watch.news(), engine.visit());
        loop {
            if let Some(failure) = self.comm.failure() {
                return Err(failure);
            }
            let progress = match &mut self.active {
                Active::Waiting => {
                    let of_records = (&mut self.records, &mut self.followed);
                    if self.begun > 0 && self.late.is_some() {
                        go_on_late(&self.comm, engine, (&mut self.late, &mut self.active), of_records, self.begun)?;
                    } else if let Some(call) = self.collectives.get_mut(self.begun) {
                        self.begun += 1;
                        let which = (self.begun - 1, self.is_own);
                        if begin(&self.comm, engine, call, &mut self.late, of_records, which)? {
                            self.active = Active::Collective;
                        }
                    } else if self.telling.is_some() {
                        tell(&self.comm, engine, &mut self.telling, &mut self.active)?;
                    } else if !self.messages.is_empty() {
                        self.records.begin_messages(&self.comm);
                        self.active = begin_messages(engine, std::mem::take(&mut self.messages))?;
                    } else {
                        self.followed_messages.clear();
                        return Ok(Progress::Done);
                    }
                    moved = true;
                    continue;
                }
                Active::Collective => poll_call(engine, &self.late)?,
                Active::Telling => poll_call(engine.with_round_looked_at(), &self.late)?,
                Active::Messages(messages) => engine.poll_messages(messages)?,
                Active::Independent(batch) if !self.messages.is_empty() => {
                    self.records.begin_messages(&self.comm);
                    engine.join_independent(batch, std::mem::take(&mut self.messages))?;
                    Progress::Moved
                }
                Active::Independent(messages) => engine.poll_independent(messages)?,
            };
            if engine.has_news() {
                self.comm.watch.tell();
            }
            match progress {
                Progress::Done => {
                    if told {
                        self.comm.status.wait_for(None);
                        self.comm.status.send(None);
                    }
                    let of_records = (&mut self.records, &mut self.followed);
                    end(&self.comm, engine, (&self.active, self.late.is_some()), of_records, self.begun);
                    self.active = Active::Waiting;
                }
                Progress::Moved => moved = true,
                Progress::Idle => return Ok(if moved { Progress::Moved } else { Progress::Idle }),
            }
        }
    }

    /// Has this thread watch the engine in its turn, where others wait for messages.
    fn seize(&mut self) {
        let turns = &self.comm.turns;
        if self.independent || self.claim.is_made() || turns.independent.load(Ordering::Acquire) == 0 {
            return;
        }
        if self.comm.watch.seize(&mut self.claim) {
            self.comm.waker.iter().for_each(Waker::wake);
        }
    }

    /// The ranks this run waits for.
    pub(super) fn waiting_for(&self) -> Vec<Rank> {
        match &self.active {
            Active::Messages(messages) => messages.waiting_for(),
            Active::Independent(messages) => messages.waiting_for(),
            _ => self.comm.engine(&self.claim).as_ref().map_or_else(Vec::new, |engine| engine.waiting_for()),
        }
    }

    /// Why a run that has got no further since then cannot, if that is because ranks are lost.
    #[inline(never)]
    fn lost(&self, since: Instant) -> Option<Error> {
        let losses = self.comm.losses();
        if losses.is_empty() || !self.is_on() {
            return None;
        }
        let (mut waiting, begun) = (self.waiting_for(), self.comm.status.begun());
        if let Some(engine) = self.comm.engine(&self.claim).as_ref() {
            waiting.retain(|rank| !engine.tells_what_can_come(*rank));
        }
        let is_lost = |(known, loss): &(Instant, Loss)| {
            let patience = match waiting.contains(&Rank(loss.rank)) {
                _ if self.needs_all && loss.is_death() => Duration::ZERO,
                true => LOST,
                false => LOST_FOR_OTHERS,
            };
            let hopeless = matches!(self.active, Active::Collective | Active::Telling)
                && loss.from.is_some_and(|from| from <= begun);
            hopeless || since.max(*known).elapsed() >= patience
        };
        // Who is awaited may have left because another one was lost first.
        losses.iter().any(is_lost).then(|| losses[0].1.error.clone())
    }

    /// Why the device of a run that gets no further cannot go on, if it cannot: a device with nothing to do shows that only
    /// when it is asked.
    fn device_error(&self) -> Option<Error> {
        let engine = self.comm.engine(&self.claim);
        engine.as_ref().filter(|_| self.is_on()).and_then(|engine| engine.check_device().err())
    }

    /// What is to be told of a NIC of this rank's that is down; nothing of one that is not.
    #[inline(never)]
    pub(super) fn nic_down(&self) -> Option<String> {
        let engine = self.comm.engine(&self.claim);
        let name = engine.as_ref().filter(|_| self.is_on()).and_then(|engine| engine.nic_down())?;
        Some(format!("{name}, the NIC of rank {}, is down", self.comm.rank))
    }

    /// Why a run that gets no further cannot go on over this rank's NIC, where it can be made again over others and the NIC has been down
    /// for a while.
    #[inline(never)]
    fn link_error(&mut self) -> Option<Error> {
        let nic = self.is_made_again.then(|| self.nic_down()).flatten();
        if !self.link.is_down_for_good(Instant::now(), nic.is_some()) {
            return None;
        }
        self.comm.status.lose_link();
        nic.map(Error::Remote)
    }

    /// What is to be told of an error: the failure of which it is the consequence, or who is awaited and why.
    #[inline(never)]
    pub(super) fn reason(&self, error: Error) -> Error {
        let comm = &self.comm;
        if matches!(error, Error::Remote(_)) {
            // A link that breaks may be the echo of a failure elsewhere; the news of the failure itself is on its way.
            comm.await_news(ECHO);
        }
        match (comm.failure(), error) {
            (None, Error::Remote(text)) => comm.status.cause().unwrap_or(Error::Remote(text)),
            (None, Error::Timeout(text)) => {
                let waiting = self.waiting_for();
                let monitor = locked(&comm.monitor);
                // With another thread's failure on its way, this one's is not told.
                let asked = monitor.as_ref().filter(|_| !comm.status.is_failing());
                let why = asked.map(|monitor| monitor.diagnose(&waiting, GRACE));
                let whys =
                    [self.nic_down(), why, comm.by_carrier()].into_iter().flatten().filter(|why| !why.is_empty());
                Error::Timeout([text].into_iter().chain(whys).collect::<Vec<String>>().join(": "))
            }
            (None, Error::InvalidUsage(text)) if matches!(self.active, Active::Collective | Active::Telling) => {
                // Two messages did not match: what was called says more than what arrived.
                let waiting = self.waiting_for();
                let words = locked(&comm.monitor).as_ref().and_then(|monitor| monitor.mismatch(&waiting, GRACE));
                crate::info!("{text}");
                if words.is_none() {
                    // The other may have found out first, told it and left.
                    comm.await_news(GRACE);
                }
                words.map_or_else(|| comm.failure().unwrap_or(Error::InvalidUsage(text)), Error::InvalidUsage)
            }
            (_, error) => error,
        }
    }

    /// Ends the communicator's work with `error`: nobody else waits for this rank, and later calls return it.
    #[inline(never)]
    pub(super) fn fail(&mut self, error: Error) -> Error {
        let comm = &self.comm;
        let awaited = comm.records.get().and_then(|_| self.waiting_for().first().copied());
        // Told before the links are given up, so that the others hear the reason first.
        if !comm.status.fail_after(error.clone(), || comm.report(&error)) {
            comm.await_failure(FAILS);
        }
        if let Some(engine) = comm.engine(&self.claim).as_mut() {
            engine.cancel();
        }
        let error = comm.failure().unwrap_or(error);
        self.records.fail(comm, awaited);
        self.end_followed(&error);
        self.stop_watching();
        self.comm.records.get().into_iter().for_each(CommRecords::write_failure);
        error
    }

    /// Says which rank is awaited, for ranks that look for the one that holds everybody up.
    fn tell(&self) {
        if self.is_told() {
            self.comm.status.wait_for(self.waiting_for().first().copied());
        }
    }

    /// Has those who are awaited relay the call, if they are late and it can be relayed.
    fn ask_late(&mut self, since: Instant) {
        if !matches!(self.active, Active::Collective) {
            return;
        }
        if let Some(mut late) = self.late.take() {
            late.ask(&self.comm, since, || self.waiting_for());
            self.late = Some(late);
        }
    }

    /// Passes a little time, at most `limit` where the wait is for another run.
    fn wait(&mut self, idle: &mut Idle, limit: Option<Duration>) {
        if !self.is_on() {
            let turn = self.turn.unwrap_or(u64::MAX);
            return self.comm.turns.wait(turn, limit.unwrap_or(TURN_WAIT));
        }
        if self.independent && !self.comm.watch.take(&mut self.claim) {
            if !self.comm.watch.wait(self.seen.0, limit.unwrap_or(TURN_WAIT)) {
                idle.has_slept();
            }
            return;
        }
        if let Some(engine) = self.comm.engine(&self.claim).as_mut() {
            if engine.visits() != self.seen.1 {
                // Another thread has polled since, and may have found what this one waits for.
                return;
            }
            if engine.waits_for_device() {
                return idle.nap();
            }
            // An error shows at the next poll, which has the operation to name.
            let _ = match limit {
                None => idle.pause(engine.transport()),
                Some(limit) => engine.transport().sleep(limit),
            };
        }
        if limit.is_some() {
            // The next wait may be another run's.
            self.stop_watching();
        }
    }

    fn stop_watching(&mut self) {
        self.comm.watch.give_up(&mut self.claim);
    }

    /// Gives back the places of messages that were never handed in: those of a stream that takes no job, say.
    fn withdraw(&mut self) {
        let comm = &self.comm;
        let (Some(numbers), None) = (&comm.numbers, comm.failure()) else { return };
        let mut numbers = locked(numbers);
        let mut placed = self.messages.iter().rev().filter(|message| message.sequence > 0);
        let is_given = placed.all(|message| numbers.take_back(message.direction, message.peer, message.sequence));
        drop(numbers);
        if !is_given {
            // Those behind them in their orders could never be posted.
            let error = Error::InvalidUsage("a send or receive could not be put on its stream".to_string());
            comm.status.fail_after(error.clone(), || comm.report(&error));
        }
    }
}

impl Drop for OperationBatch {
    fn drop(&mut self) {
        self.stop_watching();
        self.withdraw();
        self.records.fail(&self.comm, None);
        if !self.followed.is_empty() || !self.followed_messages.is_empty() {
            // Those that have ended are followed no more.
            let error = self.comm.failure().unwrap_or_else(ended);
            self.end_followed(&error);
        }
        if self.independent {
            return self.comm.turns.end_independent();
        }
        // Turns end in order even when a run is given up before its own came.
        let Some(turn) = self.turn.filter(|_| !self.is_lent) else { return };
        if !self.is_on() {
            self.comm.turns.wait(turn, Duration::from_secs(10));
        }
        self.comm.turns.advance();
    }
}

/// Begins the next call in which the ranks tell each other of their links, or measure them, until there is none.
#[inline(never)]
fn tell(comm: &Comm, engine: &mut Engine, telling: &mut Option<Telling>, active: &mut Active) -> Result<()> {
    let Some(Telling { epochs, measures }) = telling else { return Ok(()) };
    if std::mem::take(measures) {
        epochs.measure_now();
    }
    let Some(call) = epochs.next(comm)? else {
        *telling = None;
        return Ok(());
    };
    comm.status.begin(call.summary());
    engine.begin_telling(epochs, call)?;
    *active = Active::Telling;
    Ok(())
}

/// What was active has ended, when so many collectives have begun. One of which late ranks' parts may come has not.
fn end(
    comm: &Comm,
    engine: &Engine,
    (active, is_late): (&Active, bool),
    (records, followed): (&mut BatchRecords, &mut SmallVec<[SmallVec<[Followed; 1]>; 1]>),
    begun: usize,
) {
    match active {
        Active::Collective if is_late => comm.status.finish(),
        Active::Telling => comm.status.finish(),
        Active::Collective => {
            records.end_collective(comm, engine, begun - 1);
            followed.get_mut(begun - 1).map(SmallVec::clear);
            comm.status.finish();
        }
        _ => records.end_messages(comm),
    }
}

/// Makes progress with a call; of one that is relayed, with what this rank gives in the place of its program's input, or as that.
fn poll_call(engine: &mut Engine, late: &Option<Box<LateCall>>) -> Result<Progress> {
    let Some(late) = late else { return engine.poll() };
    late.join(engine)?;
    engine.poll().map_err(|error| late.explained(error))
}

/// Begins what comes next in a call of which late ranks' parts may come later, until there is nothing.
#[inline(never)]
fn go_on_late(
    comm: &Comm,
    engine: &mut Engine,
    (late, active): (&mut Option<Box<LateCall>>, &mut Active),
    of_records: (&mut BatchRecords, &mut SmallVec<[SmallVec<[Followed; 1]>; 1]>),
    begun: usize,
) -> Result<()> {
    let Some(under_way) = late else { return Ok(()) };
    match under_way.next(comm)? {
        NextOfLate::Tell(call) => {
            comm.status.begin(call.summary());
            engine.begin_own(call)?;
            *active = Active::Telling;
        }
        NextOfLate::Bring(call) => {
            comm.status.begin(call.summary());
            engine.begin(&call)?;
            *active = Active::Telling;
        }
        NextOfLate::Nothing => {
            *late = None;
            let (records, followed) = of_records;
            records.end_collective(comm, engine, begun - 1);
            followed.get_mut(begun - 1).map(SmallVec::clear);
        }
    }
    Ok(())
}

/// Begins sends and receives.
#[inline(never)]
fn begin_messages(engine: &mut Engine, messages: Vec<Message>) -> Result<Active> {
    Ok(match engine.begin_independent(messages)? {
        Ok(batch) => Active::Independent(batch),
        Err(messages) => Active::Messages(engine.begin_messages(messages)),
    })
}

/// Begins a collective; false where nothing is to be done now. Who follows it is told how far it is. Apart from `poll`, whose frame is on
/// every call's stack.
#[inline(never)]
fn begin(
    comm: &Comm,
    engine: &mut Engine,
    call: &mut CollectiveCall,
    late: &mut Option<Box<LateCall>>,
    (records, followed): (&mut BatchRecords, &mut SmallVec<[SmallVec<[Followed; 1]>; 1]>),
    (index, is_own): (usize, bool),
) -> Result<bool> {
    records.begin(comm, engine, index);
    if let Some(all) = comm.late.get().filter(|_| late.is_none()) {
        *late = all.begin(comm, engine, call)?;
        if late.as_ref().is_some_and(|late| late.has_come()) {
            return Ok(false);
        }
    }
    if call.factor_at.is_some() {
        call.read_factor(engine)?;
    }
    let summary = late.as_ref().map_or_else(|| call.summary(), |late| late.summary());
    match call.exchanges(comm.rank, comm.grid.nranks()) {
        Some(exchanges) => comm.status.begin_exchange(summary, exchanges),
        None => comm.status.begin(summary),
    };
    let has_begun = if is_own { engine.begin_word(call)? } else { engine.begin(call)? };
    match (has_begun, followed.get_mut(index)) {
        // The data of calls that are made as one is final at its end, and so is that to which late ranks may add.
        (true, Some(followed)) if call.joined.is_none() && late.is_none() => {
            followed.iter().for_each(|followed| engine.follow(followed.front()));
        }
        (false, Some(followed)) => followed.clear(),
        _ => {}
    }
    records.runs(comm, engine, index, has_begun);
    if !has_begun {
        comm.status.finish();
    }
    Ok(has_begun)
}

fn ended() -> Error {
    Error::InvalidArgument("the communicator has been destroyed".to_string())
}

/// Runs all of `runs` to their end on this thread. The first failure is returned; the others are run to their end.
pub(super) fn drive(runs: &mut [OperationBatch]) -> Result<()> {
    drive_beside(runs, || {})
}

/// The same, with something beside it, now and then.
#[inline(always)]
pub(super) fn drive_beside(runs: &mut [OperationBatch], mut beside: impl FnMut()) -> Result<()> {
    let mut first = Ok(());
    let mut open: SmallVec<[bool; 8]> = runs.iter().map(|_| true).collect();
    let mut left = runs.len();
    let mut idle = Idle::new(runs.first().map_or(0, |run| run.comm.config.spin_us));
    let mut idle_polls = 0u32;
    let mut stall = Stall::NONE;
    while left > 0 {
        beside();
        let mut moved = false;
        for (run, open) in runs.iter_mut().zip(&mut open).filter(|(_, open)| **open) {
            match run.poll() {
                Ok(Progress::Idle) => continue,
                Ok(Progress::Moved) => {}
                Ok(Progress::Done) => {
                    (*open, left) = (false, left - 1);
                    run.stop_watching();
                }
                Err(error) => {
                    let error = run.reason(error);
                    (*open, left) = (false, left - 1);
                    first = first.and(Err(run.fail(error)));
                }
            }
            moved = true;
        }
        if moved {
            idle.reset();
            idle_polls = 0;
            stall.end(runs);
            continue;
        }
        idle_polls += 1;
        if idle_polls.is_multiple_of(TELL_POLLS) || idle.sleeps() {
            let waiting = runs.iter().zip(&open).filter(|(_, open)| **open).map(|(run, _)| run);
            waiting.clone().for_each(OperationBatch::tell);
            waiting.for_each(|run| stall.probe(run));
            let waiting = runs.iter().zip(&open).filter(|(_, open)| **open).map(|(run, _)| run);
            if let Some(time) = stall.due() {
                waiting.for_each(|run| run.compare(time));
            }
            let (since, looks, looks_at_nic) = (stall.since(), stall.looks(), stall.looks_at_nic());
            for (run, _) in runs.iter_mut().zip(&open).filter(|(_, open)| **open) {
                run.ask_late(since);
            }
            for (run, open) in runs.iter_mut().zip(&mut open).filter(|(_, open)| **open) {
                let ended = if looks { run.device_error() } else { None };
                let ended = ended.or_else(|| if looks_at_nic { run.link_error() } else { None });
                let Some(error) = ended.or_else(|| run.lost(since)) else { continue };
                let error = run.fail(error);
                (*open, left) = (false, left - 1);
                first = first.and(Err(error));
            }
        }
        let Some((run, _)) = runs.iter_mut().zip(&open).find(|(_, open)| **open) else { break };
        match left {
            1 => run.wait(&mut idle, None),
            // Several runs on one thread: only one of them can be slept on, so not at once and not for long.
            _ if idle_polls < 100 => std::thread::yield_now(),
            _ => run.wait(&mut idle, Some(SHARED_WAIT)),
        }
    }
    first
}

impl Comm {
    /// Tells the others that this rank has failed and completes no more operations.
    pub(super) fn report(&self, error: &Error) {
        if let Some(monitor) = locked(&self.monitor).as_ref() {
            monitor.report(self.status.finished() + 1, error);
        }
    }

    /// Waits a little for another rank's word about a failure.
    fn await_news(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.status.cause().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a failure that another thread has met can be seen.
    fn await_failure(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.failure().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether no operation is running or queued.
    pub fn is_quiet(&self) -> bool {
        self.survivors.get().is_none_or(|survivors| survivors.is_idle())
            && self.turns.is_idle()
            && self.turns.independent.load(Ordering::Acquire) == 0
    }
}
