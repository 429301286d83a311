//! The clock of records: the processor's counter where the system itself tells the time by it, else the system's clock.
//!
//! A record takes two or three times, and to ask the system for one is a third of what a record costs. The counter is read by one
//! instruction. How long a tick is nobody has to measure beforehand: when records are read, what has passed by both clocks since
//! they began says it. (Crates that read the counter, `quanta` and `minstant`, measure a tick when a process begins, and go by that ever after.)

use std::time::Instant;

/// How often another clock is read to have a moment by both.
const TRIES: usize = 5;

/// What another clock says, and when, as nearly as a few tries bring the two together.
pub fn at_once<T>(read: impl Fn() -> T) -> (Instant, T) {
    let once = || {
        let before = Instant::now();
        let said = read();
        let took = before.elapsed();
        (took, (before + took / 2, said))
    };
    let nearer = |best: (_, _), new: (_, _)| if new.0 < best.0 { new } else { best };
    (1..TRIES).map(|_| once()).fold(once(), nearer).1
}

/// Whether the system tells the time by the processor's counter. Then that counts evenly, on all processors alike.
#[cfg(target_arch = "x86_64")]
fn is_counted() -> bool {
    if cfg!(miri) {
        return false; // It knows no such instruction.
    }
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    std::fs::read_to_string(source).is_ok_and(|name| name.trim() == "tsc")
}

#[cfg(not(target_arch = "x86_64"))]
fn is_counted() -> bool {
    false
}

/// The processor's counter.
#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: the processor must have the instruction; because every x86-64 one does.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    0
}

/// A clock that begins at 0.
#[derive(Debug, Clone, Copy)]
pub struct RecordClock {
    start: Instant,
    /// What the counter said then, where times are its ticks.
    counted: Option<u64>,
}

/// How ticks become nanoseconds: so many ticks are so many of them.
#[derive(Debug, Clone, Copy)]
pub struct TickScale {
    ticks: u64,
    ns: u64,
}

impl RecordClock {
    /// A clock that begins now.
    pub fn begin() -> RecordClock {
        if !is_counted() {
            return RecordClock::of_system();
        }
        let (start, counted) = at_once(counter);
        RecordClock { start, counted: Some(counted) }
    }

    /// The same by the system's clock: its ticks are nanoseconds.
    pub fn of_system() -> RecordClock {
        RecordClock { start: Instant::now(), counted: None }
    }

    /// When it began.
    pub fn start(&self) -> Instant {
        self.start
    }

    /// Ticks since it began.
    #[inline]
    pub fn ticks(&self) -> u64 {
        match self.counted {
            // The counters of two processors may differ by what a message between them takes.
            Some(start) => counter().saturating_sub(start),
            None => self.start.elapsed().as_nanos() as u64,
        }
    }

    /// How ticks until now become nanoseconds.
    pub fn scale(&self) -> TickScale {
        if self.counted.is_none() {
            return TickScale::NS;
        }
        let (now, ticks) = at_once(|| self.ticks());
        TickScale { ticks: ticks.max(1), ns: (now - self.start).as_nanos() as u64 }
    }
}

impl TickScale {
    /// Ticks that are nanoseconds.
    pub const NS: TickScale = TickScale { ticks: 1, ns: 1 };

    /// Nanoseconds of so many ticks.
    pub fn ns(self, ticks: u64) -> u64 {
        (u128::from(ticks) * u128::from(self.ns) / u128::from(self.ticks)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Both kinds of clock, whatever this system tells the time by.
    fn clocks() -> Vec<RecordClock> {
        vec![RecordClock::begin(), RecordClock::of_system()]
    }

    #[test]
    fn ticks_become_the_time_that_the_system_s_clock_says() {
        for clock in clocks() {
            let before = clock.start().elapsed();
            let ticks = clock.ticks();
            let after = clock.start().elapsed();
            std::thread::sleep(Duration::from_millis(20));
            let said = Duration::from_nanos(clock.scale().ns(ticks));
            // A thousandth of what has passed, for a machine that is interrupted between two reads.
            let slack = Duration::from_micros(200);
            assert!(before <= said + slack && said <= after + slack, "{before:?} {said:?} {after:?}");
        }
    }

    #[test]
    fn later_ticks_are_not_fewer() {
        for clock in clocks() {
            let ticks: Vec<u64> = (0..1000).map(|_| clock.ticks()).collect();
            assert!(ticks.is_sorted());
            let scale = clock.scale();
            assert!(scale.ns(ticks[999]) <= clock.start().elapsed().as_nanos() as u64 + 200_000);
        }
        assert_eq!(TickScale { ticks: 3, ns: 1 }.ns(7), 2);
        let most = TickScale { ticks: u64::MAX, ns: u64::MAX / 3 };
        assert_eq!(most.ns(u64::MAX - 1), (u64::MAX - 1) / 3, "no product overflows");
    }
}
