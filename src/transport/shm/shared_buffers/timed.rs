//! Which way long parts go that only the kernel could read where they lie, by what calls of each way took.
//!
//! A poster may be ahead of those who read: what it waits for says little of what the call costs. So each rank that reads tells when
//! it began a call and when it had read all, by the machine's clock, and the poster looks later. A call took the time from
//! when all were there and the call before had been read until its last reader had read it.

use super::super::segment::{BoardTimes, PAGE_BYTES, TIMES};
use super::super::tried_ways::size_class;
use super::{takes, SharedBuffers, Waiting};
use crate::plan::Collective;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// The ways of a part that only the kernel could read where it lies.
pub(super) const KERNEL: usize = 0;
pub(super) const AREA: usize = 1;

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

/// The machine's clock in ns, the same for all its processes.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn tell(times: &[AtomicU64; TIMES], call: u64) {
    let word = now() << CALL_BITS | call % (1 << CALL_BITS);
    times[call as usize % TIMES].store(word, Ordering::Relaxed);
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
        if self.operation_bytes > PAGE_BYTES && takes(collective, self.local, root) {
            tell(&self.times(self.local).begun, self.calls);
        }
    }

    /// Tells that we have read all we need of it; before others hear of that.
    pub(super) fn tell_end(&self) {
        if self.operation_bytes > PAGE_BYTES {
            tell(&self.times(self.local).ended, self.calls);
        }
    }

    /// Whether the kernel shall read our part of the call: chosen once for each.
    pub(super) fn chooses_kernel(&mut self, first: usize) -> bool {
        if let Some(taken) = self.waiting.as_ref().and_then(|waiting| waiting.taken) {
            return taken.is_kernel();
        }
        self.look_at_times();
        let size = size_class(self.operation_bytes);
        let Some(waiting) = &mut self.waiting else { return false };
        let class = waiting.collective as usize * usize::BITS as usize + size;
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
            let ended: Option<Vec<u64>> = readers().map(|member| told(&self.times(member).ended, timed.call)).collect();
            let ended = ended.and_then(|ended| ended.into_iter().max());
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
