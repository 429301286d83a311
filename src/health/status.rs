//! How a rank is: written by its engine with plain atomics, read by the service's thread when others ask.
#![forbid(unsafe_code)]

use super::CallSummary;
use crate::bootstrap::protocol::{self, Answer};
use crate::error::Error;
use crate::sync::locked;
use crate::topo::Rank;
use serde::{Deserialize, Serialize};
use smallvec::{smallvec, SmallVec};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

type Wake = Box<dyn Fn() + Send + Sync>;
type ActOnRelay = Box<dyn Fn(RelayRequest) + Send + Sync>;

/// How many calls are remembered: no rank is further ahead of one that waits for it.
const KEPT: usize = 64;

/// News of a rank that takes no further part: it has died, or its own part has failed. What it did before that stands:
/// operations that it has completed can still be completed by others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// Which rank.
    pub rank: u32,
    /// The first collective that cannot be completed, if the rank has told.
    pub from: Option<u64>,
    /// It lives, and so do all others, but a NIC of its is down: all can go on over others.
    pub is_link: bool,
    /// What happened to it.
    #[serde(with = "protocol::error")]
    pub error: Error,
}

impl Loss {
    /// Whether the rank itself is gone: it has died or left, and no failure of its part has been told.
    pub fn is_death(&self) -> bool {
        self.from.is_none_or(|from| from == 0)
    }
}

/// What a rank that is late is asked for by one that waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayRequest {
    /// Who waits.
    pub from: u32,
    /// The number of the operation.
    pub number: u64,
    /// What it is.
    pub call: CallSummary,
    /// When it was asked, in microseconds of the clock of who waits.
    pub at_us: u64,
}

impl RelayRequest {
    /// Of now.
    pub fn new(from: u32, number: u64, call: CallSummary) -> RelayRequest {
        RelayRequest { from, number, call, at_us: clock_us() }
    }

    /// How many microseconds ago it was asked, as far as the two clocks agree.
    pub fn age_us(&self) -> u64 {
        clock_us().saturating_sub(self.at_us)
    }
}

/// Microseconds of the system's clock.
fn clock_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_micros() as u64)
}

/// With whom a rank exchanges elements in an operation of which each rank knows the sizes of its own blocks only; a bit for each rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exchanges([SmallVec<[u64; 4]>; 2]);

impl Exchanges {
    /// For those to whom the rank has elements, and those from whom it expects some.
    pub fn new(nranks: usize, to: impl Iterator<Item = usize>, from: impl Iterator<Item = usize>) -> Exchanges {
        let none = || smallvec![0; nranks.div_ceil(64)];
        let mut both = Exchanges([none(), none()]);
        to.for_each(|rank| both.0[0][rank / 64] |= 1 << (rank % 64));
        from.for_each(|rank| both.0[1][rank / 64] |= 1 << (rank % 64));
        both
    }

    /// Whether it has elements for a rank, and whether it expects some from there.
    pub fn with(&self, rank: usize) -> [bool; 2] {
        [0, 1].map(|way| self.0[way].get(rank / 64).is_some_and(|word| word >> (rank % 64) & 1 == 1))
    }
}

/// In the place of an operation's number: the message that a rank waits to send.
pub const SENDING: u64 = u64::MAX;

/// A call and the operation's number, which is 0 while the call is written. One thread at a time writes.
#[derive(Default)]
struct Noted {
    number: AtomicU64,
    words: [AtomicU64; 2],
}

/// One rank's state in one communicator.
pub struct RankStatus {
    calls: [Noted; KEPT],
    /// With whom elements are exchanged, in those of the calls for which that follows from no summary; the last ones.
    exchanges: Mutex<VecDeque<(u64, Exchanges)>>,
    sending: Noted,
    /// The last collective of no elements; its number is that of the operation which comes next.
    empty: Noted,
    has_told_sending: AtomicBool,
    begun: AtomicU64,
    finished: AtomicU64,
    /// The awaited rank and one, or 0.
    waiting_for: AtomicU64,
    aborted: AtomicBool,
    /// Set by whoever puts the failure in.
    fails: AtomicBool,
    failure: OnceLock<Error>,
    has_losses: AtomicBool,
    has_lost_link: AtomicBool,
    losses: Mutex<Vec<(Instant, Loss)>>,
    /// How often a run that had others asked whether they are there has gone on.
    resumed: AtomicU64,
    wake: Mutex<Option<Wake>>,
    relays: OnceLock<ActOnRelay>,
}

impl Default for RankStatus {
    fn default() -> RankStatus {
        RankStatus {
            calls: std::array::from_fn(|_| Noted::default()),
            exchanges: Mutex::default(),
            sending: Noted::default(),
            empty: Noted::default(),
            has_told_sending: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            waiting_for: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            fails: AtomicBool::new(false),
            failure: OnceLock::new(),
            has_losses: AtomicBool::new(false),
            has_lost_link: AtomicBool::new(false),
            losses: Mutex::default(),
            resumed: AtomicU64::new(0),
            wake: Mutex::default(),
            relays: OnceLock::new(),
        }
    }
}

impl Noted {
    fn write(&self, number: u64, call: CallSummary) {
        self.number.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        self.words.iter().zip(call.0).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        self.number.store(number, Ordering::Release);
    }

    fn read(&self, number: u64) -> Option<CallSummary> {
        let before = self.number.load(Ordering::Acquire);
        let call = CallSummary([0, 1].map(|index| self.words[index].load(Ordering::Relaxed)));
        fence(Ordering::Acquire);
        (before == number && self.number.load(Ordering::Relaxed) == number).then_some(call)
    }
}

impl RankStatus {
    /// A rank that has done nothing yet. `wake` is called once, from the service's thread, when a failure arrives.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> RankStatus {
        RankStatus { wake: Mutex::new(Some(Box::new(wake))), ..RankStatus::default() }
    }

    /// Another collective has been begun; returns its number, from 1. Sends and receives are not counted: ranks need
    /// not have made equally many.
    pub fn begin(&self, call: CallSummary) -> u64 {
        let number = self.begun.load(Ordering::Relaxed) + 1;
        self.calls[number as usize % KEPT].write(number, call);
        self.begun.store(number, Ordering::Release);
        number
    }

    /// The same of a call in which each rank knows the sizes of its own blocks only.
    pub fn begin_exchange(&self, call: CallSummary, with: Exchanges) -> u64 {
        let mut kept = locked(&self.exchanges);
        kept.truncate(KEPT - 1);
        kept.push_front((self.begun.load(Ordering::Relaxed) + 1, with));
        drop(kept);
        self.begin(call)
    }

    /// Whether elements go to a rank, and come from it, in such an operation, if it is not long past.
    pub fn exchanges(&self, number: u64, rank: u32) -> Option<[bool; 2]> {
        let kept = locked(&self.exchanges);
        kept.iter().find(|(kept, _)| *kept == number).map(|(_, with)| with.with(rank as usize))
    }

    /// What was called as the operation with this number, if it has been begun and is not long past.
    pub fn call(&self, number: u64) -> Option<CallSummary> {
        if number == SENDING {
            return self.sending.read(1);
        }
        self.calls[number as usize % KEPT].read(number).filter(|_| number > 0)
    }

    /// A collective of no elements has been called, which is no operation.
    pub fn note_empty(&self, call: CallSummary) {
        self.empty.write(self.begun() + 1, call);
    }

    /// The last collective of no elements, and how many operations had been begun then.
    pub fn empty(&self) -> Option<(u64, CallSummary)> {
        let next = self.empty.number.load(Ordering::Acquire);
        Some((next.checked_sub(1)?, self.empty.read(next)?))
    }

    /// The message that the rank has waited to send for a while, or none any more.
    pub fn send(&self, message: Option<CallSummary>) {
        match message {
            Some(message) => self.sending.write(1, message),
            None => {
                self.sending.number.store(0, Ordering::Relaxed);
                self.has_told_sending.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Whether it is to be told now that the message cannot be sent; once for each wait.
    pub fn tells_sending(&self) -> bool {
        !self.has_told_sending.swap(true, Ordering::Relaxed)
    }

    /// Another collective has been finished.
    pub fn finish(&self) {
        // One thread at a time writes.
        self.finished.store(self.finished.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// How many collectives have been begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    /// How many collectives have been finished.
    pub fn finished(&self) -> u64 {
        self.finished.load(Ordering::Relaxed)
    }

    /// The rank whose message is awaited now, or nothing.
    pub fn wait_for(&self, rank: Option<Rank>) {
        self.waiting_for.store(rank.map_or(0, |rank| u64::from(rank.0) + 1), Ordering::Relaxed);
    }

    /// A run has got further that had others asked whether they are there: who has not answered yet has done no harm.
    pub fn resume(&self) {
        self.resumed.fetch_add(1, Ordering::Relaxed);
    }

    /// How often that has been.
    pub fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Relaxed)
    }

    /// The rank has aborted the communicator.
    pub fn set_aborted(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    /// Whether the rank has aborted the communicator.
    pub fn aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// What failed, if anything. One load, so the executor may ask at every turn.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Puts a failure in. The first one stays and wakes the waiter; returns whether this was it.
    pub fn fail(&self, error: Error) -> bool {
        self.fail_after(error, || {})
    }

    /// Like [`fail`](RankStatus::fail) for a signal handler, which may free nothing: what is not the first failure comes back.
    pub fn fail_or_return(&self, error: Error) -> Option<Error> {
        if self.fails.swap(true, Ordering::AcqRel) {
            return Some(error);
        }
        self.put(error);
        None
    }

    /// Like [`fail`](RankStatus::fail), and if this is the first failure, the others are told by `tell` before anybody here
    /// can see it: the program may end at once, and what it has not told by then nobody hears.
    pub fn fail_after(&self, error: Error, tell: impl FnOnce()) -> bool {
        if self.fails.swap(true, Ordering::AcqRel) {
            return false;
        }
        tell();
        self.put(error);
        true
    }

    /// Only who has set `fails` comes here.
    fn put(&self, error: Error) {
        let _ = self.failure.set(error);
        self.wake();
    }

    /// Whether a failure is there or about to be: the others are being told.
    pub fn is_failing(&self) -> bool {
        self.fails.load(Ordering::Acquire)
    }

    /// Has this act, on the service's thread, where the rank is asked to relay an operation. Once.
    pub fn relays_by(&self, act: impl Fn(RelayRequest) + Send + Sync + 'static) {
        // The first one stays.
        let _ = self.relays.set(Box::new(act));
    }

    /// The rank is asked to relay an operation. One that has begun it needs not.
    pub fn relay(&self, request: RelayRequest) {
        if let Some(act) = self.relays.get().filter(|_| self.begun() < request.number) {
            act(request);
        }
    }

    /// Has news wake this, too.
    pub fn wakes_also(&self, also: impl Fn() + Send + Sync + 'static) {
        let mut wake = locked(&self.wake);
        let former = wake.take();
        *wake = Some(Box::new(move || {
            former.iter().for_each(|former| former());
            also();
        }));
    }

    fn wake(&self) {
        let wake = locked(&self.wake);
        if let Some(wake) = &*wake {
            wake();
        }
    }

    /// Notes a loss. It is a failure only of operations that need the lost rank, which show as they get no further; an
    /// operation that the rank says cannot be completed fails at once.
    pub fn lose(&self, loss: Loss) {
        if loss.is_link {
            self.lose_link();
        }
        if loss.from.is_some_and(|from| from <= self.begun()) {
            self.fail(loss.error.clone());
        }
        let mut losses = locked(&self.losses);
        if losses.iter().all(|(_, known)| *known != loss) {
            losses.push((Instant::now(), loss));
        }
        drop(losses);
        self.has_losses.store(true, Ordering::Release);
        self.wake();
    }

    /// A NIC of this rank or another one is down, and nobody is lost: to be noted before that is told as a failure.
    pub fn lose_link(&self) {
        self.has_lost_link.store(true, Ordering::Release);
    }

    /// Whether that is so.
    pub fn has_lost_link(&self) -> bool {
        self.has_lost_link.load(Ordering::Acquire)
    }

    /// The losses that are known, each with the time at which it became known.
    pub fn losses(&self) -> Vec<(Instant, Loss)> {
        match self.has_losses.load(Ordering::Acquire) {
            true => locked(&self.losses).clone(),
            false => Vec::new(),
        }
    }

    /// The failure, or the first loss: what a rank that gives up should name as the reason.
    pub fn cause(&self) -> Option<Error> {
        self.failure().cloned().or_else(|| self.losses().first().map(|(_, loss)| loss.error.clone()))
    }

    /// As the rank `from` is told, which asks about the operation with this number.
    pub fn answer(&self, number: u64, from: u32) -> Answer {
        let waiting_for = self.waiting_for.load(Ordering::Relaxed);
        Answer {
            begun: self.begun(),
            finished: self.finished(),
            waiting_for: waiting_for.checked_sub(1).and_then(|rank| u32::try_from(rank).ok()),
            aborted: self.aborted(),
            left: false,
            call: self.call(number),
            exchanges: self.exchanges(number, from),
            empty: self.empty(),
            failure: self.failure().map(|error| error.text().to_string()).unwrap_or_default(),
        }
    }
}

impl fmt::Debug for RankStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.answer(self.begun(), u32::MAX).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_failure_shows_when_the_others_have_been_told_and_only_the_first_is_told() {
        let status = RankStatus::default();
        let error = |text: &str| Error::Remote(text.to_string());
        let told = AtomicU64::new(0);
        let tell = || {
            assert!(status.failure().is_none(), "a program that sees the failure ends, and its word with it");
            assert!(!status.fail(error("another")), "only one is the first");
            told.fetch_add(1, Ordering::Relaxed);
        };
        assert!(status.fail_after(error("first"), tell));
        assert!(!status.fail_after(error("second"), || panic!("nobody is told of it")));
        assert_eq!((status.failure(), told.into_inner()), (Some(&error("first")), 1));
    }

    #[test]
    fn with_whom_elements_are_exchanged_is_known_of_the_last_such_operations() {
        let status = RankStatus::default();
        let call = CallSummary([3, 0]);
        let number = status.begin_exchange(call, Exchanges::new(130, [0, 129].into_iter(), [64].into_iter()));
        status.begin(call);
        let with = |rank| status.answer(number, rank).exchanges;
        assert_eq!([0, 1, 64, 129].map(with), [[true, false], [false, false], [false, true], [true, false]].map(Some));
        assert_eq!((status.exchanges(number + 1, 0), with(u32::MAX)), (None, Some([false; 2])));
        for _ in 1..KEPT {
            status.begin_exchange(call, Exchanges::default());
        }
        assert!(with(0).is_some());
        status.begin_exchange(call, Exchanges::default());
        assert_eq!(with(0), None);
    }

    #[test]
    fn the_first_failure_stays_and_wakes_once() {
        let woken = Arc::new(AtomicU64::new(0));
        let counter = woken.clone();
        let status = RankStatus::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        assert!(status.fail(Error::Remote("first".to_string())));
        assert!(!status.fail(Error::Remote("second".to_string())));
        assert_eq!(status.failure().unwrap().text(), "first");
        assert_eq!(woken.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_loss_fails_only_operations_that_cannot_be_completed() {
        let loss =
            |rank, from| Loss { rank, from, is_link: false, error: Error::Remote(format!("rank {rank} is lost")) };
        let status = RankStatus::default();
        (1..=5).for_each(|number| assert_eq!(status.begin(CallSummary::default()), number));
        status.lose(loss(1, None));
        status.lose(loss(2, Some(6)));
        status.lose(loss(2, Some(6)));
        assert!(status.failure().is_none(), "operation 5 does not need them any more, as far as is known");
        assert_eq!(status.losses().len(), 2);
        assert_eq!(status.cause().unwrap().text(), "rank 1 is lost");
        status.lose(loss(3, Some(5)));
        assert_eq!(status.failure().unwrap().text(), "rank 3 is lost");
    }

    #[test]
    fn an_answer_tells_counts_and_the_awaited_rank() {
        let status = RankStatus::default();
        let call = |count| CallSummary([count, 7]);
        assert_eq!(status.begin(call(1)), 1);
        status.begin(call(2));
        status.finish();
        status.wait_for(Some(Rank(0)));
        let answer = status.answer(1, 0);
        assert_eq!(answer.call, Some(call(1)));
        assert_eq!((answer.begun, answer.finished, answer.waiting_for), (2, 1, Some(0)));
        status.wait_for(None);
        assert_eq!(status.answer(0, 0).waiting_for, None);
    }

    #[test]
    fn calls_are_known_by_number_until_they_are_long_past() {
        let status = RankStatus::default();
        assert!(status.call(0).is_none() && status.call(1).is_none());
        (1..=100).for_each(|number| assert_eq!(status.begin(CallSummary([number, 0])), number));
        assert_eq!(status.call(100), Some(CallSummary([100, 0])));
        assert_eq!(status.call(37), Some(CallSummary([37, 0])));
        assert!(status.call(36).is_none() && status.call(101).is_none());
        assert_eq!(status.call(SENDING), None);
        status.send(Some(CallSummary([7, 7])));
        assert!(status.call(SENDING) == Some(CallSummary([7, 7])) && status.tells_sending() && !status.tells_sending());
        status.send(None);
        assert!(status.call(SENDING).is_none() && status.tells_sending());
    }
}
