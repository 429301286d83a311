//! Order against the program's streams, without anybody waiting on the host.
//!
//! When an operation is accepted, an event is recorded on each of its streams, and the stream is given a wait for a word
//! in memory. The thread that runs the operation begins when the events have ended and raises the word at the end.
//!
//! Words are never given back to the system: a stream may look at one long after the operation has ended. A word only
//! grows, from user to user, so a late look finds it raised.

use super::driver::{Address, DriverHandle, DriverKind, DriverStatus, SUCCESS};
use super::kernels::Flag;
use super::memory::Pinned;
use super::stream::{wait_by_kernel, GpuEvent};
use super::GpuDevice;
use crate::error::Result;
use crate::memory::Region;
use crate::sync::locked;
use smallvec::SmallVec;
use std::sync::atomic::{fence, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Words lie so far apart, so that raising one disturbs no look at another.
const WORD_BYTES: usize = 64;
/// How many words are made at once.
const WORDS_AT_ONCE: usize = 64;
/// `CU_STREAM_WAIT_VALUE_GEQ`, `hipStreamWaitValueGte`
pub(super) const AT_LEAST: u32 = 0;

/// A word that streams wait for.
#[derive(Debug)]
pub struct CompletionFlag {
    place: Region,
    address: Address,
    /// What the last wait waits for.
    promised: u32,
}

impl CompletionFlag {
    /// Lets waits for this value end, and never takes back what has been raised.
    fn raise(&self, value: u32) {
        fence(Ordering::SeqCst);
        // SAFETY: the place must be valid for ever and used atomically; because words are never freed, and the device's
        // looks are atomic.
        let word = unsafe { AtomicU32::from_ptr(self.place.as_ptr().cast()) };
        let higher = |raised: u32| (value.wrapping_sub(raised) as i32 > 0).then_some(value);
        // What is not higher changes nothing.
        let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, higher);
    }
}

/// By what streams wait for a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// An operation of the driver's on streams.
    Driver,
    /// A kernel of ours.
    Kernel,
    /// The driver's operation where it has one, else the kernel.
    Either,
}

/// The word of a communicator; goes back to its device's pool with the value.
#[derive(Debug)]
pub struct CommFlag {
    gpu: Arc<GpuDevice>,
    word: Mutex<Option<CompletionFlag>>,
}

/// What an operation comes after: the places that its streams had come to.
#[derive(Debug)]
pub struct Arrival {
    streams: SmallVec<[DriverHandle; 1]>,
    events: SmallVec<[GpuEvent; 1]>,
}

/// An operation's place in the order of its streams. Dropping it lets the streams go on. Those of one gate are to be
/// dropped in the order in which they were made.
#[derive(Debug)]
pub struct StreamOrder {
    gate: Arc<CommFlag>,
    events: SmallVec<[GpuEvent; 1]>,
    value: u32,
}

impl CommFlag {
    /// A word of this device's pool.
    pub fn new(gpu: &Arc<GpuDevice>) -> Result<Arc<CommFlag>> {
        let mut words = locked(&gpu.words);
        if words.is_empty() {
            // Never freed: see above.
            let pinned = Box::leak(Box::new(Pinned::new(gpu, WORDS_AT_ONCE * WORD_BYTES)?));
            let word = |index: usize| CompletionFlag {
                place: pinned.host().part(index * WORD_BYTES, 4),
                address: pinned.address() + (index * WORD_BYTES) as Address,
                promised: 0,
            };
            words.extend((0..WORDS_AT_ONCE).map(word));
        }
        Ok(Arc::new(CommFlag { gpu: gpu.clone(), word: Mutex::new(words.pop()) }))
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<GpuDevice> {
        &self.gpu
    }

    /// Notes where these streams are: what they were given so far comes before an operation.
    pub fn arrive(&self, streams: &[DriverHandle]) -> Result<Arrival> {
        let _entered = self.gpu.enter()?;
        let mut events = SmallVec::new();
        for &stream in streams {
            let event = self.gpu.event()?;
            event.record(stream)?;
            events.push(event);
        }
        Ok(Arrival { streams: streams.into(), events })
    }

    /// Has the streams wait: what they are given from now on comes after the operation. Some may wait by the time that
    /// this fails, so the place is there in any case.
    pub fn hold(self: &Arc<CommFlag>, arrival: Arrival, means: Means) -> (StreamOrder, Result<()>) {
        let Arrival { streams, events } = arrival;
        let flag = self.promise();
        let ordered = StreamOrder { gate: self.clone(), events, value: flag.value };
        let held =
            self.gpu.enter().and_then(|_entered| streams.iter().try_for_each(|&stream| self.wait(stream, flag, means)));
        (ordered, held)
    }

    /// Takes a place in the order of these streams, which wait by these means.
    pub fn accept_by(self: &Arc<CommFlag>, streams: &[DriverHandle], means: Means) -> Result<StreamOrder> {
        let (ordered, held) = self.hold(self.arrive(streams)?, means);
        held.map(|()| ordered)
    }

    /// What the next operation will raise the word to.
    fn promise(&self) -> Flag {
        let mut word = locked(&self.word);
        let Some(word) = word.as_mut() else { unreachable!("a gate has its word until it is dropped") };
        word.promised = word.promised.wrapping_add(1);
        Flag { address: word.address, value: word.promised, reserved: 0 }
    }

    /// Has a stream wait for the word.
    fn wait(&self, stream: DriverHandle, flag: Flag, means: Means) -> Result<()> {
        if means != Means::Kernel {
            let status = self.wait_by_driver(stream, flag);
            // What else a driver without such operations may refuse, it refuses the kernel as well.
            if status == SUCCESS || means == Means::Driver {
                return self.gpu.check("stream_wait_value", status);
            }
        }
        wait_by_kernel(&self.gpu, stream, flag)
    }

    fn wait_by_driver(&self, stream: DriverHandle, flag: Flag) -> DriverStatus {
        let (driver, Flag { address, value, .. }) = (self.gpu.driver, flag);
        match driver.kind {
            // SAFETY: the stream must be alive and the word must stay; because the program gives the one, and words are
            // never freed.
            DriverKind::Cuda => unsafe { driver.stream_wait_value(stream, address, value, AT_LEAST) },
            // SAFETY: the stream must be alive and the word must stay; because the program gives the one, and words are
            // never freed.
            DriverKind::Hip => unsafe { driver.stream_wait_masked(stream, address, value, AT_LEAST, u32::MAX) },
        }
    }
}

impl Drop for CommFlag {
    fn drop(&mut self) {
        let word = self.word.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        locked(&self.gpu.words).extend(word);
    }
}

impl StreamOrder {
    /// Whether the streams have come so far that the operation may begin.
    pub fn may_begin(&mut self) -> Result<bool> {
        let _entered = self.gate.gpu.enter()?;
        while let Some(event) = self.events.last() {
            if !event.is_done()? {
                return Ok(false);
            }
            self.events.pop();
        }
        Ok(true)
    }
}

impl Drop for StreamOrder {
    fn drop(&mut self) {
        if let Some(word) = locked(&self.gate.word).as_ref() {
            word.raise(self.value);
        }
    }
}
