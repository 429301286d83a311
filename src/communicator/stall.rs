//! Runs that get no further: when their devices and NICs are looked at, when it is asked whether others are still there, and when ranks
//! compare what they call.
#![forbid(unsafe_code)]

use super::batch::{Active, OperationBatch};
use crate::health::CallSummary;
use crate::sync::locked;
use std::time::{Duration, Instant};

/// How long nothing moves before ranks compare what they call.
const STALL: Duration = Duration::from_secs(1);
/// The longest time between two comparisons.
const LONGEST_STALL: Duration = Duration::from_secs(60);
/// How long nothing moves before those who are awaited are asked whether they are there, where one that does not answer is lost: so long at
/// least, and so long for each rank, since all may ask one that is only late; no longer than they wait to compare.
const PROBE: Duration = Duration::from_millis(100);
const PROBE_FOR_RANK: Duration = Duration::from_millis(1);
/// How often that is asked within the time that they have to answer: a question may get lost on a busy machine.
const PROBES: u32 = 4;
/// How often a NIC is looked at, until it has been looked at for so long; then as devices are.
const NIC_EACH: Duration = Duration::from_millis(50);
const NIC_FOR: Duration = Duration::from_secs(2);
/// How long a NIC is down before runs are made again over others. What is shorter TCP bridges: it sends again after 200 ms at the earliest.
const DOWN: Duration = Duration::from_millis(200);
/// How many ranks are asked each time.
const ASKED_AT_ONCE: usize = 16;

/// How long nothing has moved, and when to ask about it: after a second, and at growing distances, since a rank that is
/// late may call something else when it comes.
pub struct Stall {
    since: Option<Instant>,
    /// When devices are to be looked at, and NICs.
    looks_after: Duration,
    looks_at_nic_after: Duration,
    asks_after: Duration,
    asked: usize,
    probed: u32,
}

/// Whether a NIC has been down for a while.
#[derive(Debug, Default)]
pub struct LinkState {
    since: Option<Instant>,
}

impl LinkState {
    /// It has been looked at. Whether it has been down at each look for so long that it is no hiccup.
    pub fn is_down_for_good(&mut self, now: Instant, is_down: bool) -> bool {
        self.since = self.since.or(Some(now)).filter(|_| is_down);
        self.since.is_some_and(|since| now.duration_since(since) >= DOWN)
    }
}

/// Those of the ranks that are asked this `time`: others each time if they are many.
pub fn asked_at<T: Copy>(ranks: &[T], time: usize) -> Vec<T> {
    let number = ranks.len().min(ASKED_AT_ONCE);
    ranks.iter().copied().cycle().skip(time * ASKED_AT_ONCE).take(number).collect()
}

impl Stall {
    /// Nothing has been waited for yet.
    pub const NONE: Stall =
        Stall { since: None, looks_after: STALL, looks_at_nic_after: NIC_EACH, asks_after: STALL, asked: 0, probed: 0 };

    /// When nothing moved for the first time.
    pub fn since(&mut self) -> Instant {
        *self.since.get_or_insert_with(Instant::now)
    }

    /// Something has moved.
    pub fn end(&mut self, runs: &[OperationBatch]) {
        if self.probed > 0 || self.asked > 0 {
            runs.iter().for_each(|run| run.comm.status.resume());
        }
        *self = Stall::NONE;
    }

    /// Whether devices are to be looked at now.
    pub fn looks(&mut self) -> bool {
        let waited = self.since().elapsed();
        let looks = waited >= self.looks_after;
        if looks {
            self.looks_after = waited + STALL;
        }
        looks
    }

    /// Whether this rank's NIC is to be looked at now, where that may end a run.
    pub fn looks_at_nic(&mut self) -> bool {
        let waited = self.since().elapsed();
        let looks = waited >= self.looks_at_nic_after;
        if looks {
            self.looks_at_nic_after = waited + if waited < NIC_FOR { NIC_EACH } else { STALL };
        }
        looks
    }

    /// How often it has been asked before, if it is to be asked now.
    pub fn due(&mut self) -> Option<usize> {
        let waited = self.since().elapsed();
        let due = waited >= self.asks_after;
        if due {
            self.asks_after = waited + waited.min(LONGEST_STALL);
            self.asked += 1;
        }
        due.then(|| self.asked - 1)
    }

    /// How often so many ranks have been asked before whether they are there, of which one that does not answer within the limit is lost,
    /// if they are to be asked now.
    fn probe_due(&mut self, limit: Duration, nranks: usize) -> Option<usize> {
        let first = PROBE_FOR_RANK.saturating_mul(nranks as u32).clamp(PROBE, STALL);
        let due = self.probed < PROBES && self.since().elapsed() >= first + limit / PROBES * self.probed;
        self.probed += u32::from(due);
        due.then(|| self.probed as usize - 1)
    }

    /// Has those whom a run waits for asked whether they are there, where it can be made again without them.
    pub fn probe(&mut self, run: &OperationBatch) {
        let Some(limit) = run.comm.config.mute_after().filter(|_| run.is_made_again && run.is_on()) else { return };
        if let Some(time) = self.probe_due(limit, run.comm.nranks()) {
            let others = asked_at(&run.waiting_for(), time);
            locked(&run.comm.monitor).iter().for_each(|monitor| monitor.compare_sends(&others));
        }
    }
}

impl OperationBatch {
    /// Has those who are awaited asked whether they call the same; others each `time` if they are many.
    #[inline(never)]
    pub(super) fn compare(&self, time: usize) {
        if !self.is_on() {
            return;
        }
        if let Some(nic) = self.nic_down() {
            crate::log::warn(&format!("{nic}: operation {} waits for it", self.comm.status.begun()));
        }
        let others = asked_at(&self.waiting_for(), time);
        let monitor = locked(&self.comm.monitor);
        let Some(monitor) = monitor.as_ref() else { return };
        match &self.active {
            Active::Messages(messages) => {
                let stuck = messages.stuck_send();
                self.comm.status.send(stuck.map(|(to, bytes)| CallSummary::send(bytes, to)));
                monitor.compare_sends(&others);
            }
            // Whether the others are still there. That both send is no mistake: either may yet receive.
            Active::Independent(_) => monitor.compare_sends(&others),
            _ => monitor.compare(&others),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that has got no further for so many milliseconds.
    fn waited(ms: u64, stall: Stall) -> Stall {
        Stall { since: Some(Instant::now() - Duration::from_millis(ms)), ..stall }
    }

    #[test]
    fn whether_others_are_there_is_asked_early_and_again_while_they_may_answer() {
        let limit = Duration::from_secs(1);
        let mut stall = waited(90, Stall::NONE);
        assert_eq!(stall.probe_due(limit, 16), None);
        let mut asked = Vec::new();
        for ms in [120, 130, 360, 610, 860, 1110, 5000] {
            stall = waited(ms, stall);
            asked.push(stall.probe_due(limit, 16));
        }
        assert_eq!(asked, [Some(0), None, Some(1), Some(2), Some(3), None, None]);
        assert_eq!(waited(400, Stall::NONE).probe_due(limit, 500), None, "all of many may ask one that is late");
        assert_eq!(waited(1010, Stall::NONE).probe_due(limit, 1 << 20), Some(0));
    }

    #[test]
    fn a_nic_is_looked_at_early_and_counts_when_it_stays_down() {
        assert!(!waited(20, Stall::NONE).looks_at_nic());
        let mut stall = waited(60, Stall::NONE);
        assert!(stall.looks_at_nic() && !stall.looks_at_nic() && !stall.looks());
        stall = waited(3000, stall);
        assert!(stall.looks_at_nic());
        stall = waited(3500, stall);
        assert!(!stall.looks_at_nic(), "not so often any more");

        let (begun, mut link) = (Instant::now(), LinkState::default());
        let mut look = |ms, is_down| link.is_down_for_good(begun + Duration::from_millis(ms), is_down);
        assert!(!look(0, false) && !look(50, true) && !look(200, true) && !look(240, false));
        assert!(!look(300, true) && !look(450, true) && look(510, true), "it has come back in between");
    }
}
