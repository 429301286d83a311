//! What a rank's NIC delivers, by what the peers' systems have acknowledged while time passed.
//!
//! A stretch of time in which the NIC had nothing to send, or a receiver was too busy to read, says too little, and never too much. So of
//! several stretches the best one counts.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// Bytes of a stretch at least: a link may take some hundred KiB at once after a pause.
const STRETCH_BYTES: u64 = 1 << 20;
/// Its time at least, unless so much more was delivered.
const STRETCH: Duration = Duration::from_millis(10);
const MANY_BYTES: u64 = 16 << 20;
/// A stretch in which fewer were delivered for so long has pauses.
const LONGEST: Duration = Duration::from_millis(500);

/// The pause between two looks, at least; and so many times what a look takes.
const PAUSE: Duration = Duration::from_millis(5);
const COST: u32 = 50;
/// Polls between two glances at the clock.
const POLLS: u32 = 16;

/// What a NIC delivers.
#[derive(Debug)]
pub struct NicMeter {
    polls: u32,
    /// When to look.
    next: Instant,
    /// When the stretch began, and what had been acknowledged then.
    begun: (Instant, u64),
    /// What had been acknowledged at the last look.
    last: u64,
    /// Bytes for each microsecond in the best stretch.
    best: Option<f64>,
}

impl NicMeter {
    /// A meter that begins now.
    pub fn new(now: Instant) -> NicMeter {
        NicMeter { polls: 0, next: now, begun: (now, 0), last: 0, best: None }
    }

    /// Whether to look, at a poll.
    pub fn is_due(&mut self) -> bool {
        self.polls = (self.polls + 1) % POLLS;
        self.polls == 0 && Instant::now() >= self.next
    }

    /// Looks at what has been acknowledged in all.
    pub fn look(&mut self, begun: Instant, acknowledged: impl FnOnce() -> u64) {
        self.take_in(begun, acknowledged());
        let now = Instant::now();
        self.next = now + PAUSE.max((now - begun) * COST);
    }

    /// So much has been acknowledged in all.
    fn take_in(&mut self, now: Instant, acknowledged: u64) {
        let (since, before) = self.begun;
        let (time, bytes) = (now.saturating_duration_since(since), acknowledged.saturating_sub(before));
        let stands = acknowledged == self.last;
        self.last = acknowledged;
        if bytes >= MANY_BYTES || (bytes >= STRETCH_BYTES && time >= STRETCH) {
            let rate = bytes as f64 / (time.as_nanos() as f64 / 1e3).max(1.0);
            self.best = Some(self.best.map_or(rate, |best| best.max(rate)));
        } else if !stands && time < LONGEST {
            return;
        }
        self.begun = (now, acknowledged);
    }

    /// The best since that was last asked.
    pub fn take(&mut self) -> Option<f64> {
        self.best.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_stretch_counts_and_pauses_do_not() {
        let begun = Instant::now();
        let mut meter = NicMeter::new(begun);
        let look = |meter: &mut NicMeter, ms: u64, kib: u64| {
            meter.take_in(begun + Duration::from_millis(ms), kib << 10);
        };
        look(&mut meter, 0, 0);
        // 25 MB/s, then nothing, then as much after a pause, and a receiver that is busy.
        (1..=20).for_each(|step| look(&mut meter, 10 * step, 250 * step));
        look(&mut meter, 1000, 5000);
        look(&mut meter, 2000, 5100);
        (1..=10).for_each(|step| look(&mut meter, 2000 + 100 * step, 5100 + 250 * step));
        let rate = meter.take().unwrap();
        assert!((25.0..26.0).contains(&rate), "{rate}");
        assert_eq!(meter.take(), None);
        (1..=20).for_each(|step| look(&mut meter, 4000 + 40 * step, 7600 + 250 * step));
        let rate = meter.take().unwrap();
        assert!((6.0..7.0).contains(&rate), "{rate}");
    }

    #[test]
    fn too_few_bytes_say_nothing() {
        let begun = Instant::now();
        let mut meter = NicMeter::new(begun);
        (1..=50).for_each(|step| meter.take_in(begun + Duration::from_millis(20 * step), step << 10));
        assert_eq!(meter.take(), None);
    }
}
