//! What copies cost on this machine: measured by each process once, when a part is first long enough to matter.

use super::pull::read_process;
use crate::memory::Arena;
use std::sync::OnceLock;
use std::time::Instant;

/// Bytes that are copied to measure: they stay in a core's cache, as parts in shared memory should.
const BYTES: usize = 128 << 10;
/// A short copy, to see what a system call costs.
const SHORT: usize = 4 << 10;
const REPEATS: usize = 8;
/// A copy into lines that another processor has read last, as a multiple of one into lines of our own. Measured on a Xeon: an
/// all-to-all of 64 KB to 1 MB between two ranks takes half as long again out of shared memory where the kernel's copy takes
/// 1.7 times the time of our own.
const LINES_BACK: f64 = 2.0;

/// Times of copies.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    /// ns a byte of a copy in this process's memory.
    copy_ns: f64,
    /// ns a byte of a copy that the kernel makes out of a process, and for each call.
    kernel_ns: f64,
    kernel_call_ns: f64,
}

static RATES: OnceLock<Rates> = OnceLock::new();

fn best_ns(mut act: impl FnMut()) -> f64 {
    let timed = (0..REPEATS).map(|_| {
        let start = Instant::now();
        act();
        start.elapsed().as_nanos() as f64
    });
    timed.fold(f64::INFINITY, f64::min).max(1.0)
}

impl Rates {
    /// This machine's.
    pub fn get() -> Rates {
        *RATES.get_or_init(Rates::measure)
    }

    fn measure() -> Rates {
        let (mut from, mut to) = (Arena::new(BYTES), Arena::new(BYTES));
        let (from, to) = (from.region(), to.region());
        let copy = best_ns(|| to.copy_from(from));
        let pid = std::process::id();
        let read = |bytes: usize| {
            best_ns(|| {
                // Where it is not allowed nothing of others is read so.
                let _ = read_process(pid, &[to.part(0, bytes)], &[from.part(0, bytes).as_peer()]);
            })
        };
        let (long, short) = (read(BYTES), read(SHORT));
        let kernel_ns = ((long - short) / (BYTES - SHORT) as f64).max(0.0);
        let kernel_call_ns = (short - kernel_ns * SHORT as f64).max(0.0);
        Rates { copy_ns: copy / BYTES as f64, kernel_ns, kernel_call_ns }
    }

    /// Whether `readers` ranks fetch a part of so many bytes sooner out of its owner's memory, each by a call of the kernel's,
    /// than out of shared memory, where it would be copied first, into cache lines that others have read last.
    pub fn lends(&self, bytes: usize, readers: usize) -> bool {
        let (bytes, readers) = (bytes as f64, readers as f64);
        let slower = (self.kernel_ns - self.copy_ns).max(0.0);
        readers * (self.kernel_call_ns + bytes * slower) < bytes * self.copy_ns * LINES_BACK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_reader_fetches_long_parts_itself_and_many_share_a_copy() {
        let rates = Rates { copy_ns: 0.02, kernel_ns: 0.03, kernel_call_ns: 430.0 };
        assert!(!rates.lends(4 << 10, 1), "the call costs more than the copy");
        assert!(rates.lends(64 << 10, 1));
        assert!(!rates.lends(64 << 10, 7), "seven calls, and the kernel is slower than memory");
        let measured = Rates::get();
        assert!(measured.copy_ns > 0.0 && measured.kernel_call_ns >= 0.0, "{measured:?}");
    }
}
