//! Windows: collectives between `strataWindowBegin` and `strataWindowEnd` are held back, and run as calls of one group.
//!
//! Where bytes alone close a window every rank finds the same place by itself: with the call that fills it. Where time does, rank 0
//! says for all closings, also those by bytes, how many calls of the window run now; a thread of the communicator tells the others
//! or hears it, over a communicator of its own in host memory, and launches them. Where lost ranks end nothing (`STRATA_LOST`) the
//! lowest one that is left says it, in a reduction, which goes on without them as all calls do.

use super::window_stream::{StreamPlace, WindowStream};
use super::{launch, CollectiveCall, Comm, Launch, Operation, ENDED};
use crate::device::gpu::stream::GpuStream;
use crate::device::StreamRef;
use crate::dtype::{DataType, RedOp, Reduction};
use crate::error::{Error, Result};
use crate::memory::{Arena, DeviceRegion};
use crate::plan::Collective;
use crate::process;
use crate::selection::AUTO;
use crate::sync::locked;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// How long a thread that waits for calls sleeps until it looks for a failure.
const LOOK: Duration = Duration::from_millis(20);

/// What closes a window before its end; 0 for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowBounds {
    /// Bytes of the calls that are held back.
    pub bytes: usize,
    /// Microseconds on rank 0 since the first of them was made.
    pub us: u32,
}

/// The open window of a communicator, if any, and what its closings are told over.
#[derive(Default)]
pub(super) struct Windows {
    is_open: AtomicBool,
    current: Mutex<Option<Arc<Window>>>,
    words: OnceLock<Arc<Comm>>,
    /// Where data is on a GPU: what the calls of windows of time run on.
    gpu_stream: OnceLock<Arc<GpuStream>>,
}

/// One window.
struct Window {
    bounds: WindowBounds,
    /// Where time may close it.
    stream: Option<WindowStream>,
    state: Mutex<WindowState>,
    news: Condvar,
}

#[derive(Default)]
struct WindowState {
    held: Vec<HeldCall>,
    /// The bytes of all of them.
    bytes: usize,
    /// The calls that have been made in this window.
    made: u64,
    /// `strataWindowEnd` has been called.
    has_ended: bool,
    /// The communicator has come to its end.
    is_cancelled: bool,
    /// How the thread that launches the calls has fared.
    outcome: Option<Result<()>>,
}

/// A call that is held back.
struct HeldCall {
    launch: Launch,
    /// What it comes after, where it runs on the window's own stream.
    place: Option<StreamPlace>,
    bytes: usize,
    /// When it was made.
    since: Instant,
}

/// Rank 0's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Closing {
    /// So many calls of the window run, with those that have run.
    calls: u64,
    /// None come after them.
    is_last: bool,
}

/// The bytes of a call as all ranks know them: of the largest buffer of any rank, 0 where each knows its own blocks only.
fn known_bytes(call: &CollectiveCall, nranks: usize) -> usize {
    let elements = match (&call.blocks, call.known_sizes()) {
        (None, _) => call.collective.blocks(nranks) * call.count,
        (Some(_), Some(sizes)) => sizes.iter().sum(),
        (Some(_), None) => 0,
    };
    elements * call.dtype.size()
}

impl Window {
    fn state(&self) -> MutexGuard<'_, WindowState> {
        locked(&self.state)
    }

    /// Holds a call back. Where bytes alone close the window and it is full: all that it holds, which is to run now.
    fn hold(&self, mut launch: Launch, bytes: usize) -> Result<Vec<Launch>> {
        let mut state = self.state();
        if let Some(Err(error)) = &state.outcome {
            return Err(error.clone());
        }
        let mut place = None;
        if let Some(stream) = &self.stream {
            (launch.stream, place) = stream.in_place_of(launch.stream)?;
        }
        state.held.push(HeldCall { launch, place, bytes, since: Instant::now() });
        state.made += 1;
        state.bytes += bytes;
        if self.bounds.us > 0 {
            self.news.notify_all();
            return Ok(Vec::new());
        }
        let held = if self.is_full(&state) { state.take(usize::MAX) } else { Vec::new() };
        Ok(launches(held))
    }

    fn is_full(&self, state: &WindowState) -> bool {
        self.bounds.bytes > 0 && state.bytes >= self.bounds.bytes
    }

    /// Waits until `ready` says what it waits for, or the communicator has failed or come to its end. `ready` may say until when
    /// there is nothing to look at.
    fn wait<T>(
        &self,
        comm: &Comm,
        mut ready: impl FnMut(&mut WindowState) -> std::result::Result<T, Option<Instant>>,
    ) -> Result<T> {
        let mut state = self.state();
        loop {
            if state.is_cancelled {
                return Err(Error::InvalidUsage("the communicator has come to its end in a window".to_string()));
            }
            if let Some(failure) = comm.final_failure() {
                return Err(failure);
            }
            let until = match ready(&mut state) {
                Ok(found) => return Ok(found),
                Err(until) => until,
            };
            let rest = until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()).min(LOOK));
            state = self.news.wait_timeout(state, rest).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Rank 0: waits until the window closes.
    fn closing(&self, comm: &Comm) -> Result<Closing> {
        let patience = Duration::from_micros(u64::from(self.bounds.us));
        self.wait(comm, |state| {
            let due = state.held.first().map(|call| call.since + patience);
            if state.has_ended || self.is_full(state) || due.is_some_and(|due| due <= Instant::now()) {
                return Ok(Closing { calls: state.made, is_last: state.has_ended });
            }
            Err(due)
        })
    }

    /// Another rank: waits until it has a call that rank 0's word may be about, or is at its end.
    fn await_call(&self, comm: &Comm) -> Result<()> {
        self.wait(comm, |state| (!state.held.is_empty() || state.has_ended).then_some(()).ok_or(None))
    }

    /// Waits until all calls that rank 0 speaks of have been made here, of which so many have `run`; takes the others.
    fn take(&self, comm: &Comm, run: u64, word: Closing) -> Result<Vec<HeldCall>> {
        let rank = comm.rank;
        self.wait(comm, |state| {
            if (word.is_last || state.made < word.calls) && !state.has_ended {
                return Err(None);
            }
            if state.made < word.calls || (word.is_last && state.made > word.calls) {
                let (calls, made) = (word.calls, state.made);
                let text =
                    format!("rank 0 made {calls} calls in a window, rank {rank} made {made}: all ranks make the same");
                return Ok(Err(Error::InvalidUsage(text)));
            }
            // Calls that have come since rank 0 said so stay.
            Ok(Ok(state.take(word.calls.saturating_sub(run) as usize)))
        })?
    }
}

impl WindowState {
    /// The first calls that are held back, at most so many.
    fn take(&mut self, most: usize) -> Vec<HeldCall> {
        let taken: Vec<HeldCall> = self.held.drain(..most.min(self.held.len())).collect();
        self.bytes -= taken.iter().map(|call| call.bytes).sum::<usize>();
        taken
    }
}

fn launches(held: Vec<HeldCall>) -> Vec<Launch> {
    held.into_iter().map(|call| call.launch).collect()
}

impl Windows {
    /// Lets go of what is held back, and of rank 0's words, as the communicator does of everything.
    pub(super) fn abort(&self) {
        self.cancel();
        self.words.get().into_iter().for_each(|words| words.abort());
    }

    /// The same in good order, unless a window is open still. What has come to its end before stays as it is.
    pub(super) fn destroy(&self) -> Result<()> {
        let was_open = self.cancel();
        match self.words.get().filter(|words| words.phase.load(Ordering::Acquire) != ENDED) {
            Some(words) if !was_open => words.destroy(),
            words => {
                words.into_iter().for_each(|words| words.abort());
                Ok(())
            }
        }
    }

    /// What an abort can do in a signal handler.
    pub(super) fn interrupt(&self) {
        self.words.get().into_iter().for_each(|words| words.interrupt());
    }

    /// Whether there was a window.
    fn cancel(&self) -> bool {
        let Some(window) = locked(&self.current).take() else { return false };
        self.is_open.store(false, Ordering::Release);
        let held = {
            let mut state = window.state();
            state.is_cancelled = true;
            state.take(usize::MAX)
        };
        window.news.notify_all();
        drop(held);
        true
    }
}

impl Comm {
    /// Whether a window is open.
    pub fn has_window(&self) -> bool {
        self.windows.is_open.load(Ordering::Acquire)
    }

    /// Whether time closes the window that is open.
    pub fn window_has_clock(&self) -> bool {
        locked(&self.windows.current).as_ref().is_some_and(|window| window.bounds.us > 0)
    }

    fn window(&self) -> Result<Arc<Window>> {
        let none =
            || Error::InvalidUsage("no window is open on this communicator: strataWindowBegin opens one".to_string());
        locked(&self.windows.current).clone().ok_or_else(none)
    }

    /// Opens a window; collective where time closes it.
    pub fn open_window(self: &Arc<Comm>, bounds: WindowBounds, cancel: &AtomicBool) -> Result<()> {
        self.usable()?;
        if self.has_window() {
            let text = "a window is open on this communicator already: strataWindowEnd ends it";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        let has_clock = bounds.us > 0;
        if has_clock && self.nranks() > 1 && self.windows.words.get().is_none() {
            let words = match self.survivors.get() {
                None => self.make_words(cancel).map_err(|error| {
                    let text = format!("a window with a limit of time, which all ranks open: {}", error.text());
                    Error::of_code(error.code(), text)
                })?,
                Some(survivors) if survivors.is_on_gpu() => {
                    let text = "windows that time closes are not for communicators on GPUs that go on without lost ranks (STRATA_LOST)";
                    return Err(Error::InvalidUsage(text.to_string()));
                }
                Some(_) => self.words_of_survivors(cancel)?,
            };
            let _ = self.windows.words.set(words);
            self.attend_meetings();
        }
        let stream = has_clock.then(|| self.window_stream()).transpose()?;
        let window = Arc::new(Window { bounds, stream, state: Mutex::default(), news: Condvar::new() });
        if has_clock {
            let (comm, window) = (self.clone(), window.clone());
            process::thread("strata-window")
                .and_then(|thread| thread.spawn(move || comm.run_window(&window)))
                .map_err(|error| Error::System(format!("starting a thread for a window: {error}")))?;
        }
        *locked(&self.windows.current) = Some(window);
        self.windows.is_open.store(true, Ordering::Release);
        Ok(())
    }

    /// What the calls of a window run on that time may close.
    fn window_stream(&self) -> Result<WindowStream> {
        if let (Some(device), None) = (self.gpu(), self.windows.gpu_stream.get()) {
            let _ = self.windows.gpu_stream.set(Arc::new(GpuStream::ordinary(device.gpu())?));
        }
        Ok(WindowStream::new(self.windows.gpu_stream.get().cloned()))
    }

    /// Makes the communicator for words among the ranks that are left. All of them have it, or make it again without those that were
    /// lost meanwhile.
    fn words_of_survivors(self: &Arc<Comm>, cancel: &AtomicBool) -> Result<Arc<Comm>> {
        let over = || self.generation().unwrap_or_else(|| self.clone());
        // Who has been lost before is found out here.
        self.word_of_all(0, RedOp::Min)?;
        loop {
            // Who was in the word still when a rank was lost comes here over what is new; others were here before, have given up with what
            // was lost, and are in the next word. So what is new is used by all only behind a word that ran over it.
            let is_new = self.survivors.get().is_some_and(|survivors| survivors.is_new_since_call());
            let before = over();
            let made = match is_new {
                true => Err(Error::Remote("ranks were lost while a window was opened".to_string())),
                false => before.make_words(cancel).and_then(|words| words.begin_survivors().map(|()| words)),
            };
            let all_have_it = self.word_of_all(u64::from(made.is_ok()), RedOp::Min);
            let error = match (made, all_have_it) {
                (Ok(words), Ok(1)) => return Ok(words),
                (Ok(words), outcome) => {
                    words.abort();
                    let other = "another rank could not make the communicator that windows with a time need";
                    outcome.err().unwrap_or_else(|| Error::Remote(other.to_string()))
                }
                (Err(error), outcome) => outcome.err().unwrap_or(error),
            };
            if self.final_failure().is_some() || (!is_new && Arc::ptr_eq(&before, &over())) {
                return Err(error);
            }
        }
    }

    /// Ends a window that no time closes; what it holds is to run now.
    pub fn end_window(&self) -> Result<Vec<Launch>> {
        let held = self.window()?.state().take(usize::MAX);
        self.forget_window();
        Ok(launches(held))
    }

    /// Ends a window that time may close, and waits until its last calls have been launched.
    pub fn await_window(&self) -> Result<()> {
        let window = self.window()?;
        window.state().has_ended = true;
        window.news.notify_all();
        let outcome = loop {
            let state = window.state();
            if let Some(outcome) = &state.outcome {
                break outcome.clone();
            }
            drop(window.news.wait(state));
        };
        let joined = window.stream.iter().try_for_each(|stream| stream.join(self));
        self.forget_window();
        outcome.and(joined)
    }

    fn forget_window(&self) {
        self.windows.is_open.store(false, Ordering::Release);
        let former = locked(&self.windows.current).take();
        drop(former);
    }

    /// The thread of a window that time may close.
    fn run_window(self: &Arc<Comm>, window: &Window) {
        let broken = || Err(Error::Internal("a window panicked".to_string()));
        let outcome = catch_unwind(AssertUnwindSafe(|| self.keep_time(window))).unwrap_or_else(|_| broken());
        if let Err(error) = &outcome {
            // Others wait for calls that this rank does not make.
            self.status.fail_after(error.clone(), || self.report(error));
            self.windows.words.get().into_iter().for_each(|words| words.abort());
        }
        let held = {
            let mut state = window.state();
            state.outcome = Some(outcome);
            state.take(usize::MAX)
        };
        window.news.notify_all();
        drop(held);
    }

    /// Whether this rank says when a window closes, on the communicator over which it is said.
    fn says_closings(&self) -> bool {
        self.lowest() == self.rank()
    }

    /// Runs the window's calls as they are to run. A call that fails without ending the communicator does not end the window: all ranks
    /// have it fail.
    fn keep_time(&self, window: &Window) -> Result<()> {
        let (mut run, mut failed) = (0, None);
        loop {
            let words = self.windows.words.get();
            let mut word = match words.is_none_or(|words| words.says_closings()) {
                true => window.closing(self)?,
                false => {
                    window.await_call(self)?;
                    Closing { calls: 0, is_last: false }
                }
            };
            if let Some(words) = words {
                word = words.pass_on(word)?;
            }
            let held = window.take(self, run, word)?;
            run = run.max(word.calls);
            if !held.is_empty() {
                let places = || held.iter().filter_map(|call| call.place.as_ref());
                window.stream.iter().try_for_each(|own| places().try_for_each(|place| own.wait_for(place)))?;
                match launch(launches(held)) {
                    Err(error) if self.survivors.get().is_some() && self.final_failure().is_none() => {
                        failed.get_or_insert(error);
                    }
                    outcome => outcome?,
                }
            }
            if word.is_last {
                return failed.map_or(Ok(()), Err);
            }
        }
    }

    /// Has all ranks know the word of the rank that says it.
    fn pass_on(self: &Arc<Comm>, word: Closing) -> Result<Closing> {
        let said = word.calls << 1 | u64::from(word.is_last);
        let said = match self.survivors.get() {
            // The others say 0.
            Some(_) => self.word_of_all(said, RedOp::Max)?,
            None => {
                self.said(said, |place| CollectiveCall::of_bytes(Collective::Broadcast, place, size_of::<u64>()))?
            }
        };
        Ok(Closing { calls: said >> 1, is_last: said & 1 == 1 })
    }

    /// The least or the greatest of all ranks' words.
    pub(super) fn word_of_all(self: &Arc<Comm>, word: u64, op: RedOp) -> Result<u64> {
        self.said(word, |place| {
            let reduction = Some(Reduction::new(op, DataType::U64, self.nranks()));
            CollectiveCall { reduction, ..CollectiveCall::new(Collective::AllReduce, place, 1, DataType::U64) }
        })
    }

    /// What a call makes of a word in the place that it is given.
    fn said(self: &Arc<Comm>, word: u64, call: impl FnOnce([DeviceRegion; 2]) -> CollectiveCall) -> Result<u64> {
        let mut memory = Arena::new(size_of::<u64>());
        // SAFETY: the arena must outlive every use; because the launch below ends with the operation, and a communicator that
        // fails cancels it.
        let place = unsafe { memory.region().unbound() };
        place.write(&word.to_le_bytes());
        let call = CollectiveCall { algorithm: Some(AUTO.to_string()), ..call([place.as_device(); 2]) };
        super::launch_one(Launch {
            comm: self.clone(),
            operation: Operation::Collective(call),
            stream: StreamRef::Null,
        })?;
        let mut said = [0; size_of::<u64>()];
        place.read(&mut said);
        Ok(u64::from_le_bytes(said))
    }
}

/// Holds an operation back in its communicator's window; what is to run now.
pub(super) fn hold(launch: Launch) -> Result<Vec<Launch>> {
    let comm = launch.comm.clone();
    let Operation::Collective(call) = &launch.operation else {
        let text =
            "messages are not made in a window, whose collectives would come after them: strataWindowEnd comes first";
        return Err(Error::InvalidUsage(text.to_string()));
    };
    if let (StreamRef::Gpu(stream), Some(device)) = (&launch.stream, comm.gpu()) {
        device.refuse_captured(&[*stream])?;
    }
    let bytes = known_bytes(call, comm.nranks());
    comm.window()?.hold(launch, bytes)
}
