//! When coding pays: by the speed of the link, the time of coding, and what the bytes gain.
//!
//! The system counts for each connection how long bytes of it were under way and how many arrived. The peer's own delays (its window) and
//! this rank's (nothing to send) are not in that time, so a rank that waits for a processor does not take its link for a slow one. Where
//! several messages go out at once they share the link, and each one's time is divided by their number.
//!
//! ```text
//! coding pays where   time of a byte on the link * (1 - 1 / ratio)   >   time to code and decode a byte
//! ```
#![forbid(unsafe_code)]

use super::codec::PlaneForm;
use crate::memory::vectored::Delivery;

/// Bytes given to connections between two looks at what arrived.
const LOOK: usize = 512 << 10;
/// The system's clock for this has ticks of up to 10 ms; so long a time is of several.
const SURE_US: u64 = 40_000;
/// After so many bytes without it the link is a fast one.
const SURE_BYTES: u64 = 16 << 20;
/// Original bytes for which one look at a sample counts.
const SAMPLED: usize = 256 << 10;
/// The most bytes that go as they are between two samples.
const MOST_UNSAMPLED: usize = 16 << 20;
/// What coding has to gain before it begins.
const MARGIN: f64 = 1.25;
/// What floats gain, about, until it is known.
const RATIO: f64 = 1.3;

/// What is known of the messages to one peer.
#[derive(Debug)]
pub struct Gauge {
    /// Whether the link is slow enough.
    is_slow: bool,
    /// Bytes given to connections since the last look.
    given: usize,
    /// What has been measured since the link was judged last.
    busy_us: u64,
    arrived: u64,
    /// Messages to peers at each look, and looks.
    sharers: usize,
    looks: usize,
    /// Original bytes for one coded byte.
    ratio: f64,
    /// The message that the sample was taken of, and how it is coded.
    sampled: u64,
    form: Option<PlaneForm>,
    /// Bytes until the next sample.
    until: usize,
    /// The same where bytes do not shrink, longer each time.
    patience: usize,
}

impl Default for Gauge {
    fn default() -> Gauge {
        Gauge {
            is_slow: false,
            given: 0,
            busy_us: 0,
            arrived: 0,
            sharers: 0,
            looks: 0,
            ratio: RATIO,
            sampled: u64::MAX,
            form: None,
            until: 0,
            patience: SAMPLED,
        }
    }
}

impl Gauge {
    /// Whether the link has been found slow enough.
    pub fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Bytes have been given to a connection.
    pub fn gave(&mut self, bytes: usize) {
        self.given += bytes;
    }

    /// Whether it is time to look at what arrived.
    pub fn is_due(&self) -> bool {
        self.given >= LOOK
    }

    /// Takes what connections have delivered since the last look, while messages to `sharers` peers were under way; coding takes
    /// `cost_ns` a byte, on both sides together.
    pub fn look(&mut self, delivered: impl Iterator<Item = Delivery>, sharers: usize, cost_ns: f64) {
        let (mut busy_us, mut connections) = (0, 0);
        for Delivery { bytes, busy_us: time } in delivered.filter(|delivery| delivery.bytes > 0) {
            self.arrived += bytes;
            busy_us += time;
            connections += 1;
        }
        self.given = 0;
        self.busy_us += busy_us / connections.max(1);
        self.sharers += sharers.max(1);
        self.looks += 1;
        if self.busy_us >= SURE_US || self.arrived >= SURE_BYTES {
            let byte_ns = self.busy_us as f64 * 1e3 / self.arrived.max(1) as f64;
            let own_ns = byte_ns * self.looks as f64 / self.sharers as f64;
            let margin = if self.is_slow { 1.0 } else { MARGIN };
            self.is_slow = own_ns * (1.0 - 1.0 / self.ratio) > cost_ns * margin;
            (self.busy_us, self.arrived, self.sharers, self.looks) = (0, 0, 0, 0);
        }
    }

    /// Whether a sample is to be taken before the next bytes of a message of so many go out.
    pub fn wants_sample(&self, message: u64, bytes: usize) -> bool {
        let is_new = self.sampled != message;
        self.until == 0 || (is_new && (self.form.is_some() || bytes >= SAMPLED))
    }

    /// What the sample of a message said.
    pub fn sampled(&mut self, message: u64, form: Option<PlaneForm>) {
        (self.sampled, self.form, self.until) = (message, form, SAMPLED);
        match form {
            Some(_) => self.patience = SAMPLED,
            None => self.rest(),
        }
    }

    /// How the next bytes are coded, if they are.
    pub fn form(&self) -> Option<PlaneForm> {
        self.form
    }

    /// Bytes have been coded, into so many; none where they did not shrink.
    pub fn coded(&mut self, bytes: usize, into: Option<usize>) {
        self.passed(bytes);
        let ratio = bytes as f64 / into.unwrap_or(bytes).max(1) as f64;
        // Zeros are no reason to take the next bytes for zeros.
        self.ratio += (ratio.min(4.0) - self.ratio) / 16.0;
        if into.is_none() {
            self.rest();
        }
    }

    /// Bytes have gone as they are.
    pub fn passed(&mut self, bytes: usize) {
        self.until = self.until.saturating_sub(bytes);
    }

    fn rest(&mut self) {
        (self.form, self.until) = (None, self.patience);
        self.patience = (2 * self.patience).min(MOST_UNSAMPLED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gauge that has seen `mib` MiB arrive, each of which took `us` of the link, shared by messages to so many peers.
    fn after(gauge: &mut Gauge, mib: u64, us: u64, sharers: usize) -> bool {
        for _ in 0..2 * mib {
            gauge.gave(LOOK);
            assert!(gauge.is_due());
            gauge.look([Delivery { bytes: 1 << 19, busy_us: us / 2 }].into_iter(), sharers, 2.0);
        }
        gauge.is_slow()
    }

    #[test]
    fn a_link_is_slow_where_coding_takes_less_time_than_it_saves() {
        // 1 MiB in 40 ms is 38 ns a byte, of which a ratio of 1.3 saves 8.8; in 5 ms, 1.1; three peers share 38 or 12 ns.
        for (us, sharers, is_slow) in
            [(40_000, 1, true), (5_000, 1, false), (40_000, 3, true), (12_000, 3, false), (300, 1, false)]
        {
            assert_eq!(after(&mut Gauge::default(), 32, us, sharers), is_slow, "{us} us, {sharers} peers");
        }
    }

    #[test]
    fn a_link_is_not_judged_by_a_few_ticks_of_the_clock() {
        let mut gauge = Gauge::default();
        assert!(!after(&mut gauge, 1, 20_000, 1), "too short a time");
        assert!(after(&mut gauge, 1, 20_000, 1));
        assert!(after(&mut gauge, 15, 300, 1), "too few bytes");
        assert!(!after(&mut gauge, 2, 300, 1));
    }

    #[test]
    fn two_connections_carry_bytes_at_once() {
        let mut gauge = Gauge::default();
        for _ in 0..8 {
            let each = Delivery { bytes: 1 << 19, busy_us: 10_000 };
            gauge.look([each, each, Delivery { bytes: 0, busy_us: 500_000 }].into_iter(), 1, 2.5);
        }
        assert!(!gauge.is_slow(), "9.5 ns a byte save 2.2");
    }

    #[test]
    fn bytes_that_do_not_shrink_are_looked_at_less_and_less_often() {
        let mut gauge = Gauge::default();
        let mut samples = 0;
        for message in 0..2048 {
            if gauge.wants_sample(message, SAMPLED / 2) {
                samples += 1;
                gauge.sampled(message, None);
            }
            assert_eq!(gauge.form(), None);
            gauge.passed(SAMPLED / 2);
        }
        assert!((20..30).contains(&samples), "{samples} samples of 256 MiB");
        assert!(gauge.wants_sample(2048, SAMPLED), "in a longer message other things may be");
        let form = PlaneForm { width: 2, coded: 2 };
        gauge.sampled(2048, Some(form));
        assert_eq!(gauge.form(), Some(form));
        assert!(!gauge.wants_sample(2048, 1) && gauge.wants_sample(2049, 1), "another message may have another type");
        gauge.coded(64 << 10, None);
        assert_eq!(gauge.form(), None);
        assert!(!gauge.wants_sample(2049, 1));
    }
}
