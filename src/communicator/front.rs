//! How much of the results of calls under way is final, for programs that go on with what is there already.
//!
//! A call on a stream is *followed* from the moment it is queued until it has ended. Its front is where its leading segments end that
//! are complete: what lies before it in each block of the receive buffer is final, and Strata touches it no more. Calls on the null
//! stream have ended when they return, and are not followed. A call that has failed is remembered until another one has its place,
//! or its communicator is gone, so that who asks later is told of the failure.
//! Source: C-Cube (Jo, Son and Kim, HPCA 2023), section III-D, where the gradient's address is its place in the queue.
#![forbid(unsafe_code)]

use super::{CollectiveCall, Comm};
use crate::device::host::stream::HostStream;
use crate::device::StreamRef;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::sync::locked;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

/// The part of a call's results that is final.
#[derive(Debug)]
pub struct CallFront {
    /// The receive buffer, and the length of its blocks.
    begin: usize,
    end: usize,
    block_bytes: usize,
    /// Bytes of each block that are final.
    bytes: AtomicUsize,
    comm: Weak<Comm>,
    stream: Weak<HostStream>,
    calls: &'static Calls,
}

/// Calls under way, in the order in which they were queued, and those that have failed.
#[derive(Debug, Default)]
struct Calls {
    open: Mutex<Open>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Open {
    calls: Vec<(Arc<CallFront>, Option<Error>)>,
    /// How many threads wait for a change.
    waiting: usize,
}

static CALLS: PerProcess<Calls> = PerProcess::new(Calls::default);

/// A call that is followed; when this is dropped it has ended.
#[derive(Debug)]
pub struct Followed {
    front: Arc<CallFront>,
}

/// Bytes of memory that a program asks for.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    begin: usize,
    end: usize,
}

impl Range {
    /// `bytes` bytes from an address on.
    ///
    /// # Errors
    /// `InvalidArgument` for null, and for a range beyond the end of memory.
    pub fn new(address: usize, bytes: usize) -> Result<Range> {
        let wrong = |what: &str| Error::InvalidArgument(format!("a range of {bytes} bytes from {address:#x}: {what}"));
        if address == 0 {
            return Err(wrong("it begins at null"));
        }
        let end = address.checked_add(bytes).ok_or_else(|| wrong("it goes beyond the end of memory"))?;
        Ok(Range { begin: address, end })
    }
}

impl CallFront {
    /// Follows a call that is about to be queued on a stream.
    pub fn follow(comm: &Arc<Comm>, call: &CollectiveCall, stream: &StreamRef) -> Option<Followed> {
        let StreamRef::Stream(stream) = stream else { return None };
        let (begin, len) = (call.output.address() as usize, call.output.len());
        let calls: &'static Calls = CALLS.get();
        let front = Arc::new(CallFront {
            begin,
            end: begin + len,
            block_bytes: (call.count * call.dtype.size()).max(1),
            bytes: AtomicUsize::new(0),
            comm: Arc::downgrade(comm),
            stream: Arc::downgrade(stream),
            calls,
        });
        if len == 0 {
            return None;
        }
        let mut open = locked(&calls.open);
        open.calls.retain(|(other, failure)| {
            failure.is_none() || (other.comm.strong_count() > 0 && !other.overlaps(begin, begin + len))
        });
        open.calls.push((front.clone(), None));
        Some(Followed { front })
    }

    /// So many bytes of each block are final now.
    pub fn advance(&self, bytes: usize) {
        self.bytes.store(bytes.min(self.block_bytes), Ordering::Release);
        self.calls.tell();
    }

    fn overlaps(&self, begin: usize, end: usize) -> bool {
        begin < self.end && self.begin < end
    }

    /// The first byte from an address of the buffer on that is not final.
    fn first_open(&self, from: usize) -> usize {
        let bytes = self.bytes.load(Ordering::Acquire);
        if bytes >= self.block_bytes {
            return self.end;
        }
        let (block, at) = ((from - self.begin) / self.block_bytes, (from - self.begin) % self.block_bytes);
        from.max(self.begin + block * self.block_bytes + bytes.max(at).min(self.block_bytes)).min(self.end)
    }

    /// Where in a range the results of this call are not final yet: the first byte.
    fn open_in(&self, range: Range) -> Option<usize> {
        let (from, to) = (range.begin.max(self.begin), range.end.min(self.end));
        (from < to).then(|| self.first_open(from)).filter(|&open| open < to)
    }
}

impl Calls {
    /// Wakes those who wait, if there are any.
    fn tell(&self) {
        // Who waits has counted itself under the lock before it looked: either it sees the front, or is seen here.
        if locked(&self.open).waiting > 0 {
            self.changed.notify_all();
        }
    }
}

impl Followed {
    /// The call's front.
    pub fn front(&self) -> Arc<CallFront> {
        self.front.clone()
    }

    /// The call has failed.
    pub fn fail(self, error: &Error) {
        let calls = self.front.calls;
        let mut open = locked(&calls.open);
        for (front, failure) in &mut open.calls {
            if Arc::ptr_eq(front, &self.front) {
                failure.get_or_insert_with(|| error.clone());
            }
        }
        drop(open);
        calls.changed.notify_all();
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let calls = self.front.calls;
        locked(&calls.open).calls.retain(|(front, failure)| !Arc::ptr_eq(front, &self.front) || failure.is_some());
        calls.tell();
    }
}

/// How many bytes from the beginning of a range on are final. What belongs to no call is.
pub fn final_bytes(range: Range) -> Result<usize> {
    let open = locked(&CALLS.get().open);
    let mut end = range.end;
    for (front, failure) in open.calls.iter().filter(|(front, _)| front.overlaps(range.begin, range.end)) {
        failure.as_ref().map_or(Ok(()), |error| Err(error.clone()))?;
        end = end.min(front.open_in(range).unwrap_or(end));
    }
    Ok(end - range.begin)
}

/// What is to be waited for: the calls that were under way when this was made.
#[derive(Debug)]
pub struct RangeWait {
    range: Range,
    fronts: Vec<Arc<CallFront>>,
}

impl RangeWait {
    /// What a range waits for now.
    pub fn new(range: Range) -> RangeWait {
        let open = locked(&CALLS.get().open);
        let under_way = open.calls.iter().filter(|(front, _)| front.overlaps(range.begin, range.end));
        RangeWait { range, fronts: under_way.map(|(front, _)| front.clone()).collect() }
    }

    /// Whether one of the calls is queued behind what this thread does, on its own stream.
    pub fn is_behind_this(&self) -> bool {
        self.fronts.iter().any(|front| front.stream.upgrade().is_some_and(|stream| stream.is_working_here()))
    }

    /// Waits until the range is final in all of them; the error of one that has failed.
    pub fn wait(self) -> Result<()> {
        let calls = CALLS.get();
        let mut open = locked(&calls.open);
        open.waiting += 1;
        let outcome = loop {
            match self.state(&open) {
                Some(outcome) => break outcome,
                None => open = calls.changed.wait(open).unwrap_or_else(PoisonError::into_inner),
            }
        };
        open.waiting -= 1;
        outcome
    }

    /// What came of it, if that is known.
    fn state(&self, open: &Open) -> Option<Result<()>> {
        for front in &self.fronts {
            let Some((_, failure)) = open.calls.iter().find(|(other, _)| Arc::ptr_eq(other, front)) else { continue };
            match failure {
                Some(error) => return Some(Err(error.clone())),
                None if front.open_in(self.range).is_some() => return None,
                None => {}
            }
        }
        Some(Ok(()))
    }
}
