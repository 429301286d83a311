//! How much of the data of operations under way is final, for programs that go on with what is there already.
//!
//! An operation on a stream, of the host or of a device, is *followed* from the moment it is queued until it has ended. A collective's front is where its leading
//! segments end that are complete: what lies before it in each block of the send and the receive buffer is final, and Strata touches it
//! no more. A send or a receive is final as a whole. Operations on the null stream have ended when they return, and are not
//! followed. One that has failed is remembered until another one is followed in its place, or its communicator is gone, so that who
//! asks later is told of the failure.
//! Source: C-Cube (Jo, Son and Kim, HPCA 2023), section III-D, where the gradient's address is its place in the queue.
#![forbid(unsafe_code)]

use super::batch::OperationBatch;
use super::{CollectiveCall, Comm, Message};
use crate::device::gpu::driver::{Driver, DriverHandle};
use crate::device::gpu::order::StreamOrder;
use crate::device::host::stream::HostStream;
use crate::device::StreamRef;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::memory::DeviceRegion;
use crate::sync::locked;
use crate::vendor::{self, Mode};
use smallvec::{smallvec, SmallVec};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

/// The part of an operation's data that is final.
#[derive(Debug)]
pub struct CallFront {
    /// The send buffer and the receive buffer; one may be empty, and one may lie in the other.
    buffers: [Range; 2],
    block_bytes: usize,
    /// Bytes of each block that are final.
    bytes: AtomicUsize,
    comm: Weak<Comm>,
    stream: Weak<HostStream>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The ranges that threads wait for.
    awaited: SmallVec<[Range; 2]>,
    /// Places of waits on streams of a device: each goes on when the range is final in all operations that it waits for.
    held: Vec<(Range, Arc<StreamOrder>)>,
    /// What came of it.
    outcome: Option<Result<()>>,
}

/// Operations under way, in the order in which they were queued, and those that have failed.
#[derive(Debug, Default)]
struct Calls {
    open: VecDeque<Arc<CallFront>>,
    failed: Vec<(Arc<CallFront>, Error)>,
    /// Fronts of operations that have ended, for the next ones.
    spare: Vec<Arc<CallFront>>,
}

/// How many of them are kept.
const MOST_SPARE: usize = 64;

static CALLS: PerProcess<Mutex<Calls>> = PerProcess::new(Mutex::default);

/// An operation that is followed; when this is dropped it has ended.
#[derive(Debug)]
pub struct Followed {
    calls: &'static Mutex<Calls>,
    front: Arc<CallFront>,
}

/// Bytes of memory that a program asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    begin: usize,
    end: usize,
}

impl Range {
    /// `bytes` bytes from an address on.
    ///
    /// # Errors
    /// `InvalidArgument` for null, and for a range beyond the end of memory. `InvalidUsage` for memory of a device in front of a vendor's
    /// library, whose operations nobody follows.
    pub fn new(address: usize, bytes: usize) -> Result<Range> {
        let wrong = |what: &str| Error::InvalidArgument(format!("a range of {bytes} bytes from {address:#x}: {what}"));
        if address == 0 {
            return Err(wrong("it begins at null"));
        }
        let is_alone = matches!(vendor::mode(), Mode::Host);
        if !is_alone && Driver::get().is_some_and(|driver| driver.is_of_device(address as u64)) {
            let text = format!(
                "a range at {address:#x} is memory of a device; where there is a vendor's library only operations in host \
                 memory are followed"
            );
            return Err(Error::InvalidUsage(text));
        }
        let end = address.checked_add(bytes).ok_or_else(|| wrong("it goes beyond the end of memory"))?;
        Ok(Range { begin: address, end })
    }

    fn of(region: DeviceRegion) -> Range {
        let begin = region.address() as usize;
        Range { begin, end: begin + region.len() }
    }

    fn overlaps(self, other: Range) -> bool {
        self.begin < other.end && other.begin < self.end
    }
}

impl CallFront {
    /// Follows a collective that is about to be queued on a stream: one of the host's, or none of those.
    pub fn follow(comm: &Arc<Comm>, call: &CollectiveCall, stream: &Weak<HostStream>) -> Followed {
        // Blocks of different sizes are final all at once.
        let block_bytes = match &call.blocks {
            None => call.count * call.dtype.size(),
            Some(_) => call.input.len().max(call.output.len()),
        };
        CallFront::of(comm, [call.input, call.output], block_bytes, stream)
    }

    /// The same of all calls that are made as one.
    pub(super) fn follow_all(
        comm: &Arc<Comm>,
        call: &CollectiveCall,
        stream: &Weak<HostStream>,
    ) -> SmallVec<[Followed; 1]> {
        let Some(joined) = &call.joined else { return smallvec![CallFront::follow(comm, call, stream)] };
        joined.calls.iter().map(|call| CallFront::follow_whole(comm, [call.input, call.output], stream)).collect()
    }

    /// The same of what is final all at once.
    pub(super) fn follow_whole(comm: &Arc<Comm>, buffers: [DeviceRegion; 2], stream: &Weak<HostStream>) -> Followed {
        CallFront::of(comm, buffers, buffers[0].len().max(buffers[1].len()), stream)
    }

    /// The same of a send or a receive.
    pub(super) fn follow_message(comm: &Arc<Comm>, message: &Message, stream: &Weak<HostStream>) -> Followed {
        CallFront::of(comm, [message.data, DeviceRegion::EMPTY], message.data.len(), stream)
    }

    fn of(comm: &Arc<Comm>, buffers: [DeviceRegion; 2], block_bytes: usize, stream: &Weak<HostStream>) -> Followed {
        let front = CallFront {
            buffers: buffers.map(Range::of),
            block_bytes: block_bytes.max(1),
            bytes: AtomicUsize::new(0),
            comm: Arc::downgrade(comm),
            stream: stream.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        let calls = CALLS.get();
        let mut known = locked(calls);
        known.forget_failures(|failed| front.buffers.iter().any(|buffer| failed.overlaps(*buffer)));
        let front = known.place(front);
        known.open.push_back(front.clone());
        drop(known);
        Followed { calls, front }
    }

    /// So many bytes of each block are final now.
    pub fn advance(&self, bytes: usize) {
        // Who waits says so under the lock before it looks: either it sees the front, or is seen here.
        self.bytes.store(bytes.min(self.block_bytes), Ordering::Release);
        self.tell(None);
    }

    fn tell(&self, outcome: Option<Result<()>>) {
        let mut state = locked(&self.state);
        if outcome.is_some() {
            state.outcome = outcome;
        }
        let is_over = |range: &Range| state.outcome.is_some() || self.open_in(*range).is_none();
        if state.awaited.iter().any(is_over) {
            self.changed.notify_all();
        }
        let State { held, outcome, .. } = &mut *state;
        held.retain(|(range, _)| outcome.is_none() && self.open_in(*range).is_some());
    }

    /// Keeps a stream's place until the range is final here, or the operation has ended.
    fn hold(&self, range: Range, place: &Arc<StreamOrder>) {
        let mut state = locked(&self.state);
        if state.outcome.is_none() && self.open_in(range).is_some() {
            state.held.push((range, place.clone()));
        }
    }

    fn overlaps(&self, range: Range) -> bool {
        self.buffers.iter().any(|buffer| buffer.overlaps(range))
    }

    /// The first byte of a range that is not final yet.
    fn open_in(&self, range: Range) -> Option<usize> {
        let bytes = self.bytes.load(Ordering::Acquire);
        let first_open = |buffer: &Range| {
            let (from, to) = (range.begin.max(buffer.begin), range.end.min(buffer.end));
            if from >= to || bytes >= self.block_bytes {
                return None;
            }
            let (block, at) = ((from - buffer.begin) / self.block_bytes, (from - buffer.begin) % self.block_bytes);
            let open = if at >= bytes { from } else { buffer.begin + block * self.block_bytes + bytes };
            (open < to).then_some(open)
        };
        self.buffers.iter().filter_map(first_open).min()
    }

    /// Waits until a range is final in it; its error if it fails before.
    fn wait(&self, range: Range) -> Result<()> {
        let mut state = locked(&self.state);
        state.awaited.push(range);
        let outcome = loop {
            match &state.outcome {
                Some(outcome) => break outcome.clone(),
                None if self.open_in(range).is_none() => break Ok(()),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        let own = state.awaited.iter().position(|awaited| *awaited == range);
        own.map(|own| state.awaited.swap_remove(own));
        outcome
    }
}

impl Calls {
    /// Forgets failures of communicators that are gone, and these.
    fn forget_failures(&mut self, also: impl Fn(&CallFront) -> bool) {
        self.failed.retain(|(front, _)| front.comm.strong_count() > 0 && !also(front));
    }

    /// Gives a front its memory: that of one which nobody looks at any more, where there is one.
    fn place(&mut self, front: CallFront) -> Arc<CallFront> {
        let Some(mut spare) = self.spare.pop() else { return Arc::new(front) };
        match Arc::get_mut(&mut spare) {
            Some(place) => *place = front,
            None => return Arc::new(front),
        }
        spare
    }

    /// Takes out one that is open; false if it was not.
    fn end(&mut self, front: &Arc<CallFront>) -> bool {
        let Some(at) = self.open.iter().position(|open| Arc::ptr_eq(open, front)) else { return false };
        let ended = self.open.remove(at).filter(|_| self.spare.len() < MOST_SPARE);
        self.spare.extend(ended);
        true
    }
}

impl Followed {
    /// The operation's front.
    pub fn front(&self) -> Arc<CallFront> {
        self.front.clone()
    }

    /// The operation has failed.
    pub fn fail(self, error: &Error) {
        let mut calls = locked(self.calls);
        calls.end(&self.front);
        calls.failed.push((self.front.clone(), error.clone()));
        drop(calls);
        self.front.tell(Some(Err(error.clone())));
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if locked(self.calls).end(&self.front) {
            self.front.tell(Some(Ok(())));
        }
    }
}

impl OperationBatch {
    /// Has its operations followed, which are about to be queued on a stream.
    pub(super) fn follow(&mut self, stream: &StreamRef) {
        if let StreamRef::Stream(stream) = stream {
            self.follow_from(Arc::downgrade(stream));
        }
    }

    /// The same of one of the host's streams, or of none of those.
    pub(super) fn follow_from(&mut self, stream: Weak<HostStream>) {
        let comm = &self.comm;
        self.followed = self.collectives.iter().map(|call| CallFront::follow_all(comm, call, &stream)).collect();
        let messages = self.messages.iter();
        self.followed_messages = messages.map(|message| CallFront::follow_message(comm, message, &stream)).collect();
    }

    /// Tells those who wait for what is followed that it has failed.
    pub(super) fn end_followed(&mut self, error: &Error) {
        let collectives = self.followed.drain(..).flatten();
        collectives.chain(self.followed_messages.drain(..)).for_each(|followed| followed.fail(error));
    }
}

/// How many bytes from the beginning of a range on are final. What belongs to no operation is.
pub fn final_bytes(range: Range) -> Result<usize> {
    let mut calls = locked(CALLS.get());
    calls.forget_failures(|_| false);
    if let Some((_, error)) = calls.failed.iter().find(|(front, _)| front.overlaps(range)) {
        return Err(error.clone());
    }
    let open = calls.open.iter().filter_map(|front| front.open_in(range)).min();
    Ok(open.unwrap_or(range.end) - range.begin)
}

/// What is to be waited for: the operations that were under way when this was made.
#[derive(Debug)]
pub struct RangeWait {
    range: Range,
    fronts: Vec<Arc<CallFront>>,
    failure: Option<Error>,
}

impl RangeWait {
    /// What a range waits for now.
    pub fn new(range: Range) -> RangeWait {
        let mut calls = locked(CALLS.get());
        calls.forget_failures(|_| false);
        let failure = calls.failed.iter().find(|(front, _)| front.overlaps(range)).map(|(_, error)| error.clone());
        let fronts = calls.open.iter().filter(|front| front.overlaps(range)).cloned().collect();
        RangeWait { range, fronts, failure }
    }

    /// Whether one of the operations is a device's.
    pub fn is_on_device(&self) -> bool {
        self.fronts.iter().any(|front| front.comm.upgrade().is_some_and(|comm| comm.gpu().is_some()))
    }

    /// Whether one of the operations is queued behind what this thread does, on its own stream.
    pub fn is_behind_this(&self) -> bool {
        self.fronts.iter().any(|front| front.stream.upgrade().is_some_and(|stream| stream.is_working_here()))
    }

    /// Has a stream of a device wait until the range is final in all of them, or they have ended: what the stream is given from now on
    /// comes after it. The error of one that has failed already.
    pub fn hold(self, stream: DriverHandle) -> Result<()> {
        self.failure.map_or(Ok(()), Err)?;
        let Some(comm) = self.fronts.iter().find_map(|front| front.comm.upgrade()) else { return Ok(()) };
        let Some(device) = comm.gpu() else {
            let text = "the stream is none of strataStreamCreate's, and the range is of operations in host memory";
            return Err(Error::InvalidArgument(text.to_string()));
        };
        let place = Arc::new(device.place_on(stream)?);
        self.fronts.iter().for_each(|front| front.hold(self.range, &place));
        Ok(())
    }

    /// Waits until the range is final in all of them; the error of one that has failed.
    pub fn wait(self) -> Result<()> {
        self.failure.map_or(Ok(()), Err)?;
        self.fronts.iter().try_for_each(|front| front.wait(self.range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(calls: &mut Calls) -> Arc<CallFront> {
        let none = Range { begin: 0, end: 0 };
        let front = calls.place(CallFront {
            buffers: [none; 2],
            block_bytes: 1,
            bytes: AtomicUsize::new(0),
            comm: Weak::new(),
            stream: Weak::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        calls.open.push_back(front.clone());
        front
    }

    #[test]
    fn an_operation_takes_the_memory_of_one_that_has_ended_and_that_nobody_looks_at() {
        let mut calls = Calls::default();
        let first = begin(&mut calls);
        let second = begin(&mut calls);
        assert!(calls.end(&first) && !calls.end(&first));
        let (place, other) = (Arc::as_ptr(&first), Arc::as_ptr(&second));
        drop(first);
        second.bytes.store(1, Ordering::Relaxed);
        let third = begin(&mut calls);
        assert_eq!(Arc::as_ptr(&third), place);
        assert!(calls.end(&second));
        let fourth = begin(&mut calls);
        assert_ne!(Arc::as_ptr(&fourth), other, "the second one is still looked at");
        assert!(calls.end(&fourth));
        drop((second, fourth));
        assert_eq!(begin(&mut calls).bytes.load(Ordering::Relaxed), 0);
    }
}
