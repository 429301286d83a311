//! Going on without lost ranks (`STRATA_LOST=continue`).
//!
//! A call ends with a word among all ranks: who returns from it knows that every rank has its result. So when a rank is lost, either
//! all others have the result of the call that they are in, and it stands, or none has returned from it, and all make it again
//! among themselves. They meet, as ranks that shrink a communicator do, tell each other how many calls they have finished, and go on
//! over a communicator of their own, the next *generation*, under the same handle: numbers of ranks stay as they are. A rank that
//! is lost while they meet makes them meet again without it.

mod adapt;
mod attend;
mod call;
mod kept;
mod queued;
mod renew;

use super::adapt::AdaptOptions;
use super::batch::{drive, OperationBatch};
use super::device::DeviceHome;
use super::engine::Engine;
use super::{CollectiveCall, Comm, Operation, OperationQueue};
use crate::carrier::Carrier;
use crate::config::Lost;
use crate::dtype::RedOp;
use crate::error::{counted, Error, Result};
use crate::fork::PerProcess;
use crate::health::Loss;
use crate::log::Level;
use crate::selection::AUTO;
use crate::sync::locked;
use crate::topo::Rank;
use attend::Meetings;
pub(super) use kept::CommitWord;
use kept::{KeptInput, KeptOnGpu};
pub(super) use queued::run_words;
pub(super) use queued::{launch, launch_alone};
pub use renew::Provide;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::time::{Duration, Instant};

/// How long ranks that have failed wait to hear which rank is lost.
const NEWS: Duration = Duration::from_secs(3);
/// How long a thread sleeps at most until it looks whether it is its turn.
const LOOK: Duration = Duration::from_millis(50);
/// How often they ask meanwhile whether the others are still there.
const ASKED_EACH: Duration = Duration::from_millis(200);

/// Said once in a process.
static REFUSED: PerProcess<Once> = PerProcess::new(Once::new);

/// The ranks that go on, and over what.
struct Generation {
    /// None for the communicator itself.
    comm: Option<Arc<Comm>>,
    /// Numbers in the communicator itself, in ascending order.
    members: Vec<usize>,
    /// How many there have been before.
    number: u64,
    /// Its first call.
    first_call: u64,
    /// Who has been lost, and what is known of that.
    gone: Vec<(usize, String)>,
}

impl Generation {
    /// All ranks.
    fn first(nranks: usize) -> Generation {
        Generation { comm: None, members: (0..nranks).collect(), number: 0, first_call: 1, gone: Vec::new() }
    }

    /// What its calls go over.
    fn comm<'a>(&'a self, first: &'a Arc<Comm>) -> &'a Arc<Comm> {
        self.comm.as_ref().unwrap_or(first)
    }

    /// Why others have to go on, as far as this rank knows: a member is lost, or a NIC is down.
    fn broken(&self, first: &Arc<Comm>) -> Option<Error> {
        let lost = self.lost(first).into_iter().next().map(|(_, error)| error);
        let status = &self.comm(first).status;
        lost.or_else(|| status.has_lost_link().then(|| status.cause()).flatten())
    }

    /// Members that are known to be lost.
    fn lost(&self, first: &Comm) -> Vec<(usize, Error)> {
        let of_first = first.status.losses().into_iter().map(|(_, loss)| (loss.rank as usize, loss));
        let later = self.comm.iter().flat_map(|comm| comm.status.losses());
        let of_later = later.filter_map(|(_, loss)| {
            let rank = *self.members.get(loss.rank as usize)?;
            Some((rank, Loss { error: renumbered(&loss.error, loss.rank as usize, rank), ..loss }))
        });
        let mut lost: Vec<(usize, Loss)> = of_first.chain(of_later).filter(|(_, loss)| loss.is_death()).collect();
        lost.retain(|(rank, _)| self.members.contains(rank));
        lost.sort_by_key(|(rank, _)| *rank);
        lost.dedup_by_key(|(rank, _)| *rank);
        lost.into_iter().map(|(rank, loss)| (rank, loss.error)).collect()
    }
}

/// What is said of a rank of a generation, with its number in the communicator itself.
fn renumbered(error: &Error, number: usize, rank: usize) -> Error {
    match error.text().strip_prefix(&format!("rank {number} ")) {
        Some(what) => Error::of_code(error.code(), format!("rank {rank} {what}")),
        None => error.clone(),
    }
}

/// How far a rank has come: what the members of a new generation tell each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Standing {
    /// Calls of which this rank has the result.
    finished: u64,
    /// The number of the generation that it was in.
    generation: u64,
}

impl Standing {
    fn encode(self) -> Vec<u8> {
        [self.finished.to_le_bytes(), self.generation.to_le_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Standing> {
        let wrong = || Error::Remote("a rank told what cannot be read".to_string());
        let number = |at: usize| bytes.get(at..at + 8).and_then(|part| part.try_into().ok()).map(u64::from_le_bytes);
        Ok(Standing { finished: number(0).ok_or_else(wrong)?, generation: number(8).ok_or_else(wrong)? })
    }

    /// Of all members: the calls that stand, and the last generation.
    fn of_all(told: &[Vec<u8>]) -> Result<Standing> {
        let told = told.iter().map(|bytes| Standing::decode(bytes)).collect::<Result<Vec<Standing>>>()?;
        let finished = told.iter().map(|standing| standing.finished).min().unwrap_or(0);
        let generation = told.iter().map(|standing| standing.generation).max().unwrap_or(0);
        Ok(Standing { finished, generation })
    }
}

/// Those who go on when ranks of a communicator are lost.
pub(super) struct Survivors {
    /// The order of operations, as the program has made them.
    turns: OperationQueue,
    /// Ends meetings.
    is_aborted: AtomicBool,
    /// What ends the communicator after all.
    failure: OnceLock<Error>,
    generation: Mutex<Arc<Generation>>,
    /// Calls that have ended. Only the operation that is on counts.
    finished: AtomicU64,
    /// The number of the generation in which the last of them ran.
    ran_in: AtomicU64,
    /// What the program has asked for.
    options: Mutex<AdaptOptions>,
    /// What is called when ranks have been lost.
    on_change: Mutex<Option<Box<dyn Fn() + Send>>>,
    /// What only the operation that is on uses.
    memory: Mutex<CallMemory>,
    /// Where data is on a GPU.
    on_gpu: Option<OnGpu>,
    meetings: Meetings,
}

/// What goes on from one generation to the next where data is on a GPU.
struct OnGpu {
    /// Where the device waits meanwhile.
    device: DeviceHome,
    kept: KeptOnGpu,
}

/// What a call needs beside its buffers.
struct CallMemory {
    kept: KeptInput,
    word: CommitWord,
}

impl Survivors {
    fn new(nranks: usize, on_gpu: Option<OnGpu>) -> Survivors {
        Survivors {
            on_gpu,
            meetings: Meetings::default(),
            turns: OperationQueue::new(),
            is_aborted: AtomicBool::new(false),
            failure: OnceLock::new(),
            generation: Mutex::new(Arc::new(Generation::first(nranks))),
            finished: AtomicU64::new(0),
            ran_in: AtomicU64::new(0),
            options: Mutex::default(),
            on_change: Mutex::default(),
            memory: Mutex::new(CallMemory { kept: KeptInput::default(), word: CommitWord::new(0) }),
        }
    }

    fn generation(&self) -> Arc<Generation> {
        locked(&self.generation).clone()
    }

    fn finished(&self) -> u64 {
        self.finished.load(Ordering::Acquire)
    }

    /// An error where the communicator has ended after all: what is queued then does not wait once more for those who did not come.
    fn still_go_on(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Ends the communicator, for this reason or one before it; which.
    fn end(&self, error: Error) -> Error {
        self.failure.get_or_init(|| error).clone()
    }

    /// Whether data is on a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.on_gpu.is_some()
    }

    /// Whether nothing runs any more.
    fn has_ended(&self) -> bool {
        self.failure.get().is_some() || self.is_aborted.load(Ordering::Acquire)
    }

    /// Whether ranks have been lost since the last call ran, as far as this one knows: others may have known when they went on from it.
    pub(super) fn is_new_since_call(&self) -> bool {
        self.generation().number != self.ran_in.load(Ordering::Acquire)
    }

    /// So many calls have ended, the last one in this generation.
    fn finish_in(&self, generation: &Generation, calls: u64) {
        self.ran_in.store(generation.number, Ordering::Release);
        self.finish(calls);
    }

    /// So many calls have ended.
    fn finish(&self, calls: u64) {
        self.finished.store(calls, Ordering::Release);
    }

    /// Waits until all operations have ended; whether they have.
    pub(super) fn wait_all(&self, limit: Duration) -> bool {
        self.turns.wait_all(limit)
    }

    /// Waits until it is this operation's turn.
    fn wait_turn(&self, turn: u64) {
        while !self.turns.is(turn) {
            self.turns.wait(turn, LOOK);
        }
    }

    /// Whether no operation is running or queued.
    pub(super) fn is_idle(&self) -> bool {
        self.turns.is_idle()
    }

    /// Ends what runs.
    pub(super) fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
        let generation = locked(&self.generation).comm.clone();
        generation.iter().for_each(|comm| comm.abort());
    }

    /// The same in a signal handler: nothing is waited for, and no memory taken or given back.
    pub(super) fn interrupt(&self) {
        self.is_aborted.store(true, Ordering::Release);
        if let Ok(generation) = self.generation.try_lock() {
            generation.comm.iter().for_each(|comm| comm.interrupt());
        }
    }
}

/// Runs operations of one kind over a communicator to their end. With `needs_all` they fail as soon as a rank is lost, or this rank's
/// NIC is found down; what `is_own` is a call over words of the library's.
pub(super) fn run(
    comm: &Arc<Comm>,
    operations: impl IntoIterator<Item = Operation>,
    (needs_all, is_own): (bool, bool),
) -> Result<()> {
    let mut run = OperationBatch::new(comm.clone());
    operations.into_iter().for_each(|operation| run.record(operation));
    (run.needs_all, run.is_made_again, run.is_own) = (needs_all, needs_all, is_own);
    run_in_turn(run)
}

fn run_in_turn(mut run: OperationBatch) -> Result<()> {
    run.decide()?;
    run.take_turn();
    drive(std::slice::from_mut(&mut run))
}

/// What is told of ranks by number.
fn named(ranks: &[usize]) -> String {
    let ranks: Vec<u32> = ranks.iter().map(|&rank| rank as u32).collect();
    crate::bootstrap::rendezvous::name_ranks(&ranks)
}

/// How a call over one generation has ended.
enum Outcome {
    /// All have their results.
    Done,
    /// It cannot be made; on no rank, where it `counts`.
    Refused { error: Error, counts: bool },
    /// The generation has failed. This rank may have its result, but not know that all have theirs.
    Broken { error: Error, has_result: bool },
}

/// Has so many ranks tell each other that they have come to the end of a call.
fn commit(over: &Arc<Comm>, word: &CommitWord, nranks: usize) -> Result<()> {
    let mut run = OperationBatch::new(over.clone());
    run.record(Operation::Collective(over.around_vendor(word.call(nranks, RedOp::Max))));
    (run.is_own, run.is_made_again) = (true, true);
    run_in_turn(run)
}

/// Makes a call over one generation.
fn attempt(
    comm: &Arc<Comm>,
    generation: &Generation,
    call: &CollectiveCall,
    (memory, on_gpu): (&mut CallMemory, Option<&OnGpu>),
    (keeps, is_own): (&mut bool, bool),
) -> Outcome {
    if let Some(error) = generation.broken(comm) {
        return Outcome::Broken { error, has_result: false };
    }
    let over = generation.comm(comm);
    let mut among = match call::among(call, comm.nranks(), &generation.members, comm.rank()) {
        Ok(among) => among,
        Err(error) => return Outcome::Refused { error, counts: true },
    };
    if is_own {
        among = over.around_vendor(among);
    } else if generation.comm.is_none() {
        // In front of a vendor's library it has been decided whose call it is.
        among.decision.clone_from(&call.decision);
    }
    if let (Some(_), Err(error)) = (&generation.comm, over.decide(&mut among)) {
        tell_left_out(&generation.members, comm.rank(), &error);
        among.algorithm = Some(AUTO.to_string());
    }
    if !std::mem::replace(keeps, true) {
        let kept = match on_gpu {
            Some(on_gpu) => on_gpu.kept.keep(call),
            None => memory.kept.keep(call),
        };
        if let Err(error) = kept {
            return Outcome::Refused { error, counts: false };
        }
    }
    if let Err(error) = run(over, [Operation::Collective(among)], (true, is_own)) {
        return match over.failure() {
            None => Outcome::Refused { error, counts: false },
            Some(_) => Outcome::Broken { error, has_result: false },
        };
    }
    match commit(over, &memory.word, generation.members.len()) {
        Ok(()) => Outcome::Done,
        Err(error) => Outcome::Broken { error, has_result: true },
    }
}

/// Makes a collective, again where ranks are lost in it. One that `is_own` is over words in host memory wherever the program's data is.
fn survive(comm: &Arc<Comm>, survivors: &Survivors, call: &CollectiveCall, is_own: bool) -> Result<()> {
    let mut memory = locked(&survivors.memory);
    let mut keeps = false;
    let before = survivors.finished();
    survivors.still_go_on()?;
    survivors.tell_untold();
    survivors.options().check(call)?;
    let on_gpu = survivors.on_gpu.as_ref().filter(|_| !is_own);
    loop {
        let generation = survivors.generation();
        let call_memory = (&mut *memory, on_gpu);
        let (error, has_result) = match attempt(comm, &generation, call, call_memory, (&mut keeps, is_own)) {
            Outcome::Done => {
                survivors.finish_in(&generation, before + 1);
                return survivors.rescale(comm, call, generation.members.len());
            }
            Outcome::Refused { error, counts } => {
                survivors.finish(before + u64::from(counts));
                return Err(error);
            }
            Outcome::Broken { error, has_result } => (error, has_result),
        };
        let stands = survivors.go_on(comm, &generation, before + u64::from(has_result), error)?;
        if has_result && stands > before {
            survivors.finish_in(&generation, before + 1);
            survivors.tell_program();
            return survivors.rescale(comm, call, generation.members.len());
        }
        survivors.tell_program();
        if survivors.is_aborted.load(Ordering::Acquire) {
            return Err(super::abortion(comm.rank));
        }
        match on_gpu {
            Some(on_gpu) if keeps => on_gpu.kept.give_back()?,
            None if keeps => memory.kept.give_back(),
            _ => {}
        }
    }
}

/// Sends and receives. What is under way when a rank is lost is not made again.
fn exchange(comm: &Arc<Comm>, survivors: &Survivors, messages: Vec<Operation>) -> Result<()> {
    survivors.still_go_on()?;
    survivors.tell_untold();
    let mut generation = survivors.generation();
    while let Some(error) = generation.broken(comm) {
        survivors.go_on(comm, &generation, survivors.finished(), error)?;
        survivors.tell_program();
        generation = survivors.generation();
    }
    let messages = messages.into_iter().map(|message| call::message_among(message, &generation.members));
    run(generation.comm(comm), messages.collect::<Result<Vec<Operation>>>()?, (false, false))
}

impl Survivors {
    /// Has the ranks that are left go on in another generation, or all of them over NICs that are up; the calls that stand. An error where
    /// neither a rank nor a link is lost, or this rank is.
    fn go_on(&self, comm: &Arc<Comm>, generation: &Generation, finished: u64, error: Error) -> Result<u64> {
        let deadline = comm.limit().map(|limit| Instant::now() + limit);
        // Who is in a call still need not wait for this rank.
        let over = generation.comm(comm);
        over.status.fail_after(error.clone(), || over.report(&error));
        if self.on_gpu.is_some() {
            over.engine.lock().iter_mut().for_each(Engine::give_device_back);
        }
        let (mut tried, mut error, mut is_late) = (generation.members.clone(), error, false);
        // Of a NIC that is down the generation's links tell once, and all can meet as they are.
        let mut tried_link = false;
        loop {
            let (left, lost) = self.await_loss(comm, generation, (&tried, tried_link), &error);
            let is_link = !tried_link && over.status.has_lost_link();
            tried_link |= is_link;
            if self.is_aborted.load(Ordering::Acquire) {
                return Err(super::abortion(comm.rank));
            }
            // Who comes later than a meeting waits is met once more.
            let again = is_late && deadline.is_none_or(|deadline| Instant::now() < deadline);
            let own = lost
                .iter()
                .find(|(rank, _)| *rank == comm.rank())
                .map(|(_, error)| Error::Remote(format!("{error}: the others go on without it")));
            if own.is_some() || (left == tried && !again && !is_link) {
                return Err(self.failure.get_or_init(|| own.unwrap_or(error)).clone());
            }
            match self.meet(comm, generation, (&left, &lost), finished) {
                Ok(standing) => {
                    tell_change(&left, &lost, standing, &error);
                    return Ok(standing.finished);
                }
                Err(new) => (is_late, error, tried) = (matches!(new, Error::Timeout(_)), new, left),
            }
        }
    }

    /// Waits until others are lost than those without whom it was `tried`, or a link is that was not, for a while; who is left, and what is
    /// known of the others.
    fn await_loss(
        &self,
        comm: &Arc<Comm>,
        generation: &Generation,
        (tried, tried_link): (&[usize], bool),
        error: &Error,
    ) -> (Vec<usize>, Vec<(usize, Error)>) {
        // A call that another one does not match, or that takes too long, is no sign of a loss.
        let patience = match error {
            Error::InvalidUsage(_) | Error::InvalidArgument(_) | Error::Timeout(_) => Duration::ZERO,
            _ => NEWS,
        };
        let (begun, mut asked) = (Instant::now(), Instant::now());
        let status = &generation.comm(comm).status;
        loop {
            let lost = generation.lost(comm);
            let is_lost = |rank: &usize| lost.iter().any(|(other, _)| other == rank);
            let left: Vec<usize> = generation.members.iter().copied().filter(|rank| !is_lost(rank)).collect();
            let is_link = !tried_link && status.has_lost_link();
            if left != tried || is_link || begun.elapsed() >= patience || self.is_aborted.load(Ordering::Acquire) {
                return (left, lost);
            }
            if asked.elapsed() >= ASKED_EACH {
                asked = Instant::now();
                let others: Vec<Rank> = left.iter().map(|&rank| Rank::from_index(rank)).collect();
                locked(&comm.monitor).iter().for_each(|monitor| monitor.compare_sends(&others));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Comes together with the ranks that are left.
    fn meet(
        &self,
        comm: &Arc<Comm>,
        generation: &Generation,
        (left, lost): (&[usize], &[(usize, Error)]),
        finished: u64,
    ) -> Result<Standing> {
        let device = self.on_gpu.as_ref().map(|on_gpu| &on_gpu.device);
        let next = comm.without_lost(left, device, &self.is_aborted)?;
        let mine = Standing { finished, generation: generation.number };
        next.late.get().into_iter().for_each(|late| late.adapt(self.options()));
        let told = next.tell(mine.encode(), &self.is_aborted);
        let standing = told.and_then(|told| Standing::of_all(&told)).inspect_err(|_| next.abort())?;
        let standing = Standing { generation: standing.generation + 1, ..standing };
        let mut gone = generation.gone.clone();
        gone.extend(lost.iter().map(|(rank, error)| (*rank, error.text().to_string())));
        let (members, number, first_call) = (left.to_vec(), standing.generation, standing.finished + 1);
        let new = Generation { comm: Some(next.clone()), members, number, first_call, gone };
        let before = std::mem::replace(&mut *locked(&self.generation), Arc::new(new));
        self.hear_of_losses(comm, &next.status);
        before.comm.iter().for_each(|comm| comm.abort());
        if self.is_aborted.load(Ordering::Acquire) {
            next.abort();
        }
        Ok(standing)
    }

    /// Has the program know that ranks have been lost.
    fn tell_program(&self) {
        let _in_callback = InCallback::enter();
        if let Some(on_change) = &*locked(&self.on_change) {
            on_change();
        }
    }
}

thread_local! {
    static IS_IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// As long as it lives the program is told of a change.
struct InCallback;

impl InCallback {
    fn enter() -> InCallback {
        IS_IN_CALLBACK.set(true);
        InCallback
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        IS_IN_CALLBACK.set(false);
    }
}

#[cold]
#[inline(never)]
fn in_callback() -> Error {
    let text = "a callback of strataCommOnChange can call nothing but strataCommState of the communicator";
    Error::InvalidUsage(text.to_string())
}

/// Says once for each generation who goes on, and why: those that are lost, or an error of a link.
#[cold]
fn tell_change(left: &[usize], lost: &[(usize, Error)], Standing { finished, generation }: Standing, error: &Error) {
    let gone: Vec<usize> = lost.iter().map(|(rank, _)| *rank).collect();
    let why = lost.first().map_or(error, |(_, error)| error).text();
    let how = if gone.is_empty() { "over NICs that are up".to_string() } else { format!("without {}", named(&gone)) };
    let ranks = counted(left.len(), "rank");
    let verb = if left.len() == 1 { "goes" } else { "go" };
    // No call has failed by it.
    let text = format!("generation {generation} from call {} on: {ranks} {verb} on {how}: {why}", finished + 1);
    crate::log::write(Level::Warn, &text);
}

/// Says once that what was named is for other numbers of ranks.
#[cold]
#[inline(never)]
fn tell_left_out(members: &[usize], rank: usize, error: &Error) {
    static TOLD: PerProcess<Once> = PerProcess::new(Once::new);
    if members.first() == Some(&rank) {
        let text = error.text();
        TOLD.get().call_once(|| crate::log::warn(&format!("defaults choose for the ranks that are left: {text}")));
    }
}

impl Comm {
    /// The lowest rank that is left.
    pub(super) fn lowest(&self) -> usize {
        self.survivors.get().map_or(0, |survivors| survivors.generation().members.first().copied().unwrap_or(0))
    }

    /// The failure that later calls return.
    pub fn final_failure(&self) -> Option<Error> {
        match self.survivors.get() {
            Some(survivors) => survivors.failure.get().cloned(),
            None => self.failure(),
        }
    }

    /// Has this called when ranks have been lost and the others go on, on the thread of the call in which that was found. It may ask for
    /// the [`state`](Comm::state); other calls on the communicator are refused there.
    pub fn on_change(&self, act: Option<Box<dyn Fn() + Send>>) -> Result<()> {
        self.at_home()?;
        match self.survivors.get() {
            Some(survivors) => *locked(&survivors.on_change) = act,
            // A rank alone has nobody to lose.
            None if self.nranks() == 1 && self.config.lost == Lost::Continue => {}
            None => {
                let text = "ranks that are lost end the communicator (STRATA_LOST): nothing changes";
                return Err(Error::InvalidUsage(text.to_string()));
            }
        }
        Ok(())
    }

    /// Who takes part in calls, and how far they are, as an object in JSON.
    pub fn state(&self) -> serde_json::Value {
        let survivors = self.survivors.get();
        let first = || Arc::new(Generation::first(self.nranks()));
        let generation = survivors.map_or_else(first, |all| all.generation());
        let Generation { comm, members, number, first_call, gone } = &*generation;
        let lost: Vec<_> =
            gone.iter().map(|(rank, reason)| serde_json::json!({ "rank": rank, "reason": reason })).collect();
        let links = comm.as_deref().unwrap_or(self).told_links(self.nranks(), members);
        serde_json::json!({
            "ranks": self.nranks(),
            "goes_on": survivors.is_some(),
            "generation": number,
            "first_call": first_call,
            "calls": survivors.map(|survivors| survivors.finished()),
            "members": members,
            "lost": lost,
            "links": links,
            "late_calls": comm.as_deref().unwrap_or(self).late_calls(),
        })
    }

    /// An error inside of a callback that is told of a change.
    pub fn not_in_callback(&self) -> Result<()> {
        match self.survivors.get().is_some() && IS_IN_CALLBACK.get() {
            true => Err(in_callback()),
            false => Ok(()),
        }
    }

    /// An error that names the ranks that are lost.
    pub fn has_all(&self) -> Result<()> {
        let Some(survivors) = self.survivors.get() else { return Ok(()) };
        let generation = survivors.generation();
        let lost: Vec<usize> = (0..self.nranks()).filter(|rank| !generation.members.contains(rank)).collect();
        match lost.is_empty() {
            true => Ok(()),
            false => Err(call::lacks("a call that only the vendor's library makes waits for", &lost)),
        }
    }

    /// What calls go over since ranks were lost.
    pub(super) fn generation(&self) -> Option<Arc<Comm>> {
        locked(&self.survivors.get()?.generation).comm.clone()
    }

    /// A call over words of the library's own: a vendor's library takes none in host memory.
    pub(super) fn around_vendor(&self, call: CollectiveCall) -> CollectiveCall {
        match self.options.companion {
            Some(_) => CollectiveCall { algorithm: Some("log".to_string()), ..call },
            None => call,
        }
    }

    fn outlast_lost(&self) -> Result<()> {
        let on_gpu = self.gpu().map(|device| -> Result<OnGpu> {
            let home = DeviceHome::default();
            self.engine.lock().iter_mut().for_each(|engine| engine.settle_device(home.clone()));
            Ok(OnGpu { device: home, kept: KeptOnGpu::new(device.gpu())? })
        });
        // Set once: this runs once for each communicator.
        let _ = self.survivors.set(Arc::new(Survivors::new(self.nranks(), on_gpu.transpose()?)));
        Ok(())
    }

    /// Has calls go on without lost ranks, where that is set and can be.
    pub(super) fn begin_survivors(&self) -> Result<()> {
        if self.config.lost != Lost::Continue || self.nranks() == 1 {
            return Ok(());
        }
        let why = if self.options.companion.is_some() && self.grid.nnodes() == 1 {
            "on one node the vendor's library makes all calls"
        } else if self.options.companion.is_some() && self.gpu().is_none() {
            "the vendor's library carries what goes between nodes (STRATA_INTER=tcp changes that)"
        } else if self.options.make_device.is_some() {
            "data is on a device of the program's own"
        } else if self.options.on_host.is_some() {
            "sends and receives of strataCommInitHost's communicators have no order among each other"
        } else if self.siblings.get().is_some() {
            "calls choose between carriers (STRATA_CARRIERS)"
        } else if self.grid.nnodes() > 1 && self.carrier != Some(Carrier::TCP) {
            "only over TCP messages between nodes outlast a rank (STRATA_INTER=tcp)"
        } else {
            return self.outlast_lost();
        };
        if self.rank == Rank(0) {
            let tell = || crate::log::notice(&format!("STRATA_LOST=continue is left out: {why}"));
            REFUSED.get().call_once(tell);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_the_numbers_that_ranks_had_when_the_communicator_was_made() {
        let said = |text: &str| renumbered(&Error::Remote(text.to_string()), 3, 14);
        assert_eq!(said("rank 3 (host, pid 7) died"), Error::Remote("rank 14 (host, pid 7) died".to_string()));
        for other in ["rank 30 died", "no rank 3 here"] {
            assert_eq!(said(other), Error::Remote(other.to_string()));
        }
    }

    #[test]
    fn calls_stand_that_all_have_finished() {
        let told = |finished: &[u64]| -> Vec<Vec<u8>> {
            finished.iter().map(|&finished| Standing { finished, generation: finished / 2 }.encode()).collect()
        };
        assert_eq!(Standing::of_all(&told(&[7, 6, 7])), Ok(Standing { finished: 6, generation: 3 }));
        assert_eq!(Standing::of_all(&told(&[4])), Ok(Standing { finished: 4, generation: 2 }));
        assert!(Standing::of_all(&[vec![0; 15]]).is_err());
    }
}
