//! Streams: each runs its work in order, on a thread of its own, late.
#![forbid(unsafe_code)]

use crate::capture::{self, Capture};
use crate::context::Context;
use crate::fault::{Result, CAPTURE_IMPLICIT, CAPTURE_UNSUPPORTED, CONTEXT_IS_DESTROYED};
use crate::fault::{INVALID_HANDLE, LAUNCH_FAILED, NOT_READY};
use crate::handles::Handles;
use crate::pipe::{self, Place};
use crate::random::Random;
use crate::settings::settings;
use crate::work::Work;
use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A stream.
pub struct Stream {
    /// Its context.
    pub context: Arc<Context>,
    /// Whether it synchronises with the legacy stream.
    pub blocking: bool,
    /// Its priority, which changes nothing.
    pub priority: i32,
    number: u64,
    state: Mutex<State>,
    changed: Condvar,
    /// How often somebody asked how far it is.
    asked: AtomicU64,
    /// Whether it is at work on memory.
    touching: AtomicBool,
}

struct State {
    queue: VecDeque<(Work, Option<Place>)>,
    submitted: u64,
    completed: u64,
    started: bool,
    closing: bool,
    capture: Option<Arc<Capture>>,
}

/// A place in a stream: it is reached when all that was submitted before it has run.
#[derive(Clone)]
pub struct Fence {
    stream: Arc<Stream>,
    number: u64,
}

impl Fence {
    /// Whether it is reached. This counts as asking.
    pub fn is_reached(&self) -> bool {
        self.stream.asked.fetch_add(1, Ordering::Relaxed);
        self.stream.has_completed(&self.stream.state.lock().unwrap(), self.number)
    }

    /// Waits until it is reached.
    pub fn wait(&self) {
        self.wait_unless(|| false);
    }

    /// Waits until it is reached or the waiter gives up.
    pub fn wait_unless(&self, gives_up: impl Fn() -> bool) {
        let stream = &self.stream;
        let mut pause = Duration::from_micros(50);
        let mut state = stream.state.lock().unwrap();
        while !stream.has_completed(&state, self.number) && !gives_up() {
            stream.asked.fetch_add(1, Ordering::Relaxed);
            state = stream.changed.wait_timeout(state, pause).unwrap().0;
            pause = (pause * 2).min(Duration::from_millis(4));
        }
    }
}

/// The streams that programs made.
static STREAMS: Handles<Stream> = Handles::empty();

impl Stream {
    /// A stream of a context, without a handle.
    pub fn new(context: &Arc<Context>, blocking: bool, priority: i32) -> Arc<Stream> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let state =
            State { queue: VecDeque::new(), submitted: 0, completed: 0, started: false, closing: false, capture: None };
        let stream = Arc::new(Stream {
            context: context.clone(),
            blocking,
            priority,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(state),
            changed: Condvar::new(),
            asked: AtomicU64::new(0),
            touching: AtomicBool::new(false),
        });
        context.adopt(&stream);
        stream
    }

    fn has_completed(&self, state: &State, number: u64) -> bool {
        state.completed >= number || self.context.is_destroyed()
    }

    /// Everything that was submitted so far.
    pub fn fence(self: &Arc<Stream>) -> Fence {
        Fence { stream: self.clone(), number: self.state.lock().unwrap().submitted }
    }

    /// The capture that the stream takes part in.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        self.state.lock().unwrap().capture.clone()
    }

    /// The stream takes part in a capture, or in none.
    pub fn set_capture(&self, capture: Option<Arc<Capture>>) {
        self.state.lock().unwrap().capture = capture;
    }

    /// Submits work, or adds it to the capture that the stream takes part in.
    pub fn submit(self: &Arc<Stream>, work: Work) -> Result<Fence> {
        self.context.check()?;
        if let Some(capture) = self.capture() {
            capture.add(self, work)?;
            return Ok(self.fence());
        }
        let _order = self.context.order.lock().unwrap();
        if self.context.is_legacy(self) {
            capture::forbid_legacy(&self.context)?;
            for other in self.context.streams().iter().filter(|other| other.blocking && !Arc::ptr_eq(other, self)) {
                self.push_after(other.fence());
            }
        } else if self.blocking {
            self.push_after(self.context.legacy().fence());
        }
        Ok(self.push(work))
    }

    fn push_after(self: &Arc<Stream>, fence: Fence) {
        let reached = fence.stream.has_completed(&fence.stream.state.lock().unwrap(), fence.number);
        if !reached {
            self.push(Work::After(fence));
        }
    }

    fn push(self: &Arc<Stream>, work: Work) -> Fence {
        let mut state = self.state.lock().unwrap();
        let place = settings().one_queue.then(|| pipe::of(self.context.handle, self.priority).enter());
        state.queue.push_back((work, place));
        state.submitted += 1;
        if !state.started {
            state.started = true;
            let stream = self.clone();
            let builder = thread::Builder::new().name(format!("softgpu {}", self.number));
            builder.spawn(move || stream.serve()).expect("a thread for a stream");
        }
        self.changed.notify_all();
        Fence { stream: self.clone(), number: state.submitted }
    }

    /// Waits until it is not at work on memory: nothing of a context that has ended is.
    pub fn let_go(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.touching.load(Ordering::SeqCst) && Instant::now() < deadline {
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// The context ended: the thread and all waiters look again.
    pub fn wake(&self) {
        let _state = self.state.lock().unwrap();
        self.changed.notify_all();
    }

    fn serve(self: Arc<Stream>) {
        let mut random = Random::new(self.number);
        while let Some((work, mut place)) = self.next() {
            if !matches!(work, Work::After(_)) {
                self.dally(&mut random);
            }
            if let Some(place) = &mut place {
                place.wait_unless(|| self.context.has_stopped());
                if !matches!(work, Work::After(_) | Work::WaitValue { .. }) {
                    place.pass();
                }
            }
            self.touching.store(work.touches_memory(), Ordering::SeqCst);
            if !self.context.has_stopped() {
                self.run(&work, &mut random);
            }
            self.touching.store(false, Ordering::SeqCst);
            drop(work);
            self.state.lock().unwrap().completed += 1;
            self.changed.notify_all();
        }
    }

    /// The next work; none when there will be none.
    fn next(&self) -> Option<(Work, Option<Place>)> {
        let mut state = self.state.lock().unwrap();
        loop {
            if self.context.is_destroyed() {
                state.queue.clear();
                return None;
            }
            match state.queue.pop_front() {
                Some(work) => return Some(work),
                None if state.closing => return None,
                None => state = self.changed.wait(state).unwrap(),
            }
        }
    }

    /// Does work; what goes wrong is the context's fault from then on.
    pub fn run(&self, work: &Work, random: &mut Random) {
        let result = panic::catch_unwind(AssertUnwindSafe(|| work.run(self, random)));
        if let Err(code) = result.unwrap_or(Err(LAUNCH_FAILED)) {
            if !self.context.is_destroyed() {
                eprintln!("softgpu: {work:?} failed with {}", code.0);
            }
            self.context.fail(code);
        }
    }

    /// Goes on at once, a little later, or when it was asked a few times (or for a few milliseconds was not).
    pub fn dally(&self, random: &mut Random) {
        if settings().eager {
            return;
        }
        match random.below(16) {
            0..=6 => {}
            7..=10 => (0..=random.below(8)).for_each(|_| thread::yield_now()),
            11..=14 => thread::sleep(Duration::from_micros(10 + random.below(291))),
            _ => {
                let goal = self.asked.load(Ordering::Relaxed) + 1 + random.below(4);
                let deadline = Instant::now() + Duration::from_millis(4);
                while self.asked.load(Ordering::Relaxed) < goal && Instant::now() < deadline {
                    thread::sleep(Duration::from_micros(20));
                }
            }
        }
    }

    /// Lets others run, in the middle of long work.
    pub fn breathe(&self, random: &mut Random) {
        if !settings().eager && random.below(4) == 0 {
            thread::yield_now();
        }
    }
}

/// Creates a stream.
pub fn create(context: &Arc<Context>, blocking: bool, priority: i32) -> usize {
    let stream = Stream::new(context, blocking, priority);
    let handle = crate::handles::fresh();
    STREAMS.name(handle, stream);
    handle
}

/// The stream of a handle: 0 and 1 are the legacy stream, 2 is the thread's own.
pub fn find(handle: usize, context: &Arc<Context>) -> Result<Arc<Stream>> {
    let stream = match handle {
        0 | 1 => context.legacy(),
        2 => context.per_thread(),
        _ => STREAMS.get(handle).ok_or(INVALID_HANDLE)?,
    };
    stream.context.check()?;
    Ok(stream)
}

/// Destroys a stream, whose work still runs to its end.
pub fn destroy(handle: usize) -> Result {
    let stream = STREAMS.remove(handle).ok_or(INVALID_HANDLE)?;
    if let Some(capture) = stream.capture() {
        capture.invalidate();
    }
    let mut state = stream.state.lock().unwrap();
    state.closing = true;
    stream.changed.notify_all();
    if stream.context.is_destroyed() {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(())
}

/// Whether all work of a stream has run; while it is captured nobody may ask.
pub fn query(stream: &Arc<Stream>) -> Result {
    forbid_captured(stream)?;
    let reached = stream.fence().is_reached();
    stream.context.check()?;
    if reached {
        Ok(())
    } else {
        Err(NOT_READY)
    }
}

/// Waits for all work of a stream.
pub fn synchronize(stream: &Arc<Stream>) -> Result {
    forbid_captured(stream)?;
    stream.fence().wait();
    stream.context.check()
}

fn forbid_captured(stream: &Arc<Stream>) -> Result {
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        return Err(CAPTURE_UNSUPPORTED);
    }
    if stream.context.is_legacy(stream) {
        capture::forbid_legacy(&stream.context)?;
        return capture::forbid_unsafe().map_err(|_| CAPTURE_IMPLICIT);
    }
    capture::forbid_unsafe()
}

/// Live streams that programs made.
pub fn count() -> u64 {
    STREAMS.count(|stream| !stream.context.is_destroyed()) as u64
}
