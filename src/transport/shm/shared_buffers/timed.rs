//! Which way long parts go that only the kernel could read where they lie, by what calls of each way took.
//!
//! A poster may be ahead of those who read: what it waits for says little of what the call costs. So each rank that reads tells when
//! it began a call and when it had read all, by the machine's clock, and the poster looks later. A call took the time from
//! when all were there and the call before had been read until its last reader had read it.

use super::super::pull::Reach;
use super::super::segment::{BoardTimes, PAGE_BYTES, TIMES};
use super::super::tried_ways::size_class;
use super::{takes, SharedBuffers, Waiting};
use crate::plan::Collective;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// The ways of a part that only the kernel could read where it lies.
pub(super) const KERNEL: usize = 0;
pub(super) const AREA: usize = 1;

/// Up to so many bytes a part is always copied.
pub(super) const TRIED_BYTES: usize = PAGE_BYTES / 2;

/// One of so many calls by pages is timed, and the end of the one before it told.
const PAGES_TIMED: u64 = 8;

/// A time holds the low bits of its call's number.
const CALL_BITS: u32 = 8;

/// The way of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct TakenWay {
    class: usize,
    way: usize,
    begun: u64,
}

impl TakenWay {
    pub(super) fn is_kernel(&self) -> bool {
        self.way == KERNEL
    }
}

/// A call of ours whose readers' times have not been seen.
#[derive(Debug)]
pub(super) struct TimedCall {
    call: u64,
    collective: Collective,
    root: usize,
    bytes: usize,
    taken: TakenWay,
}

/// The class of calls of a collective and a size.
fn class(collective: Collective, operation_bytes: usize) -> usize {
    collective as usize * usize::BITS as usize + size_class(operation_bytes)
}

/// The machine's clock in ns, the same for all its processes.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A time of a call.
fn word(ns: u64, call: u64) -> u64 {
    (ns << CALL_BITS) | (call % (1 << CALL_BITS))
}

fn tell(times: &[AtomicU64; TIMES], call: u64) {
    times[call as usize % TIMES].store(word(now(), call), Ordering::Relaxed);
}

/// The time of a call, if it is still there.
fn told(times: &[AtomicU64; TIMES], call: u64) -> Option<u64> {
    let word = times[call as usize % TIMES].load(Ordering::Relaxed);
    (word % (1 << CALL_BITS) == call % (1 << CALL_BITS)).then_some(word >> CALL_BITS)
}

impl SharedBuffers {
    fn times(&self, member: usize) -> &BoardTimes {
        &self.segment.board(member).times
    }

    /// Tells that we begin the call, if it is long and we read others' parts.
    pub(super) fn tell_begin(&self, collective: Collective, root: usize) {
        if self.operation_bytes > TRIED_BYTES && takes(collective, self.local, root) {
            tell(&self.times(self.local).begun, self.calls);
        }
    }

    /// Tells that we have read all we need of it; before others hear of that.
    pub(super) fn tell_end(&self) {
        if self.operation_bytes > TRIED_BYTES {
            tell(&self.times(self.local).ended, self.calls);
        }
    }

    /// The same of a call that went by a page of so many bytes.
    pub(super) fn tell_page(&self, bytes: usize) {
        if bytes > TRIED_BYTES && (self.calls + 1) % PAGES_TIMED < 2 && self.may_lend() {
            tell(&self.times(self.local).ended, self.calls);
        }
    }

    /// Whether our next part, of so many bytes of a call of so many, goes by a page without more ado: it is short, or that is known to
    /// be the quicker way and it is not to be timed.
    #[inline]
    pub(super) fn goes_by_page(&self, collective: Collective, bytes: usize, operation_bytes: usize) -> bool {
        if bytes <= TRIED_BYTES
            || !self.may_lend()
            || self.members.iter().all(|member| member.reach == Reach::SameProcess)
        {
            return true;
        }
        let is_timed = (self.calls + 1).is_multiple_of(PAGES_TIMED);
        !is_timed && self.ways.best(class(collective, operation_bytes)) == Some(AREA)
    }

    /// Whether the kernel shall read our part of the call: chosen once for each.
    pub(super) fn chooses_kernel(&mut self, first: usize) -> bool {
        if let Some(taken) = self.waiting.as_ref().and_then(|waiting| waiting.taken) {
            return taken.is_kernel();
        }
        self.look_at_times();
        let Some(waiting) = &mut self.waiting else { return false };
        let class = class(waiting.collective, self.operation_bytes);
        let taken = TakenWay { class, way: self.ways.choose(class, first), begun: now() };
        waiting.taken = Some(taken);
        taken.is_kernel()
    }

    /// Our call is complete, and its way known.
    pub(super) fn await_times(&mut self, waiting: &Waiting) {
        let Some(taken) = waiting.taken else { return };
        let Waiting { collective, root, .. } = *waiting;
        if self.timed.len() == TIMES {
            self.timed.pop_front();
        }
        self.timed.push_back(TimedCall { call: self.calls, collective, root, bytes: self.operation_bytes, taken });
    }

    /// What the calls took that have been read by now.
    fn look_at_times(&mut self) {
        while let Some(timed) = self.timed.front() {
            let readers = || (0..self.members.len()).filter(|&member| takes(timed.collective, member, timed.root));
            if readers().any(|member| member != self.local && !self.has_read(member, timed.call)) {
                return;
            }
            // None where a reader has not told it.
            let later = |last: u64, member: usize| Some(last.max(told(&self.times(member).ended, timed.call)?));
            let ended = readers().try_fold(0, later);
            let there = readers().filter_map(|member| told(&self.times(member).begun, timed.call)).max();
            let before = readers().filter_map(|member| told(&self.times(member).ended, timed.call - 1)).max();
            let begun = timed.taken.begun.max(there.unwrap_or(0)).max(before.unwrap_or(0));
            let TimedCall { bytes, taken: TakenWay { class, way, .. }, .. } = *timed;
            self.timed.pop_front();
            if let Some(ns) = ended.and_then(|ended| ended.checked_sub(begun)) {
                self.ways.tell(class, way, ns as f64 / bytes.max(1) as f64);
            }
        }
    }
}

/// Calls of ours whose times have not been seen.
pub(super) type TimedCalls = VecDeque<TimedCall>;

#[cfg(test)]
mod tests {
    use super::super::super::segment::Segment;
    use super::super::super::wakeup::Wakeups;
    use super::*;
    use crate::topo::Rank;
    use crate::transport::Envelope;
    use std::sync::Arc;

    const BYTES: usize = 1 << 20;

    /// The way of the poster's next call of a reduction, which its reader has read this long after the call before.
    fn reduce(segment: &Segment, poster: &mut SharedBuffers, at: &mut u64, ns: [u64; 2]) -> usize {
        poster.calls += 1;
        poster.operation_bytes = BYTES;
        let envelope = Envelope { channel: 0, sequence: 0, signature: 0 };
        poster.waiting = Some(Waiting::new(0, envelope, (Collective::Reduce, 0), None));
        let way = if poster.chooses_kernel(AREA) { KERNEL } else { AREA };
        let waiting = poster.waiting.take().unwrap();
        poster.await_times(&waiting);
        *at += ns[way];
        let reader = segment.board(0);
        reader.times.ended[poster.calls as usize % TIMES].store(word(*at, poster.calls), Ordering::Relaxed);
        reader.read.0.store(poster.calls, Ordering::Release);
        way
    }

    #[test]
    fn a_poster_that_is_ahead_takes_the_way_that_is_quicker_for_who_reads() {
        for quick in [KERNEL, AREA] {
            let segment = Arc::new(Segment::of_heap(2));
            let wakeups = Arc::new(Wakeups::new(segment.clone(), 1, vec![0; 2], None).unwrap());
            let members = (0..2).map(|member| (Rank::from_index(member), Reach::SameProcess)).collect();
            let mut poster = SharedBuffers::new(&segment, &wakeups, 1, members, false);
            let mut ns = [300_000; 2];
            ns[quick] = 100_000;
            // All of it lies behind the times at which the poster begins its calls.
            let mut at = now() + 3_600_000_000_000;
            let taken: Vec<usize> = (0..1000).map(|_| reduce(&segment, &mut poster, &mut at, ns)).collect();
            let slow = taken.iter().filter(|way| **way != quick).count();
            assert!(slow < 10, "{slow} of 1000 by the slower way");
        }
    }

    #[test]
    fn a_time_of_another_call_is_none() {
        let times = std::array::from_fn(|_| AtomicU64::new(0));
        tell(&times, 7);
        assert!(told(&times, 7).is_some());
        assert!([3, 6, 11].iter().all(|call| told(&times, *call).is_none()));
    }
}
