//! Fences in pairs, of which the side that comes often pays nothing.
//!
//! Two threads each write a word and then read the other's. At least one must see what the other has written, for which both
//! need a fence between the two. Where the system has `membarrier`, one side's [`heavy`] fence is one on all threads of
//! the process, so that the other side's [`light`] one has only to keep the compiler from reordering. Elsewhere both are whole.
#![forbid(unsafe_code)]

use rustix::thread::{membarrier, membarrier_query, MembarrierCommand, MembarrierQuery};
use std::sync::atomic::{compiler_fence, fence, AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

/// Whether light fences may be nothing.
static LIGHT: AtomicBool = AtomicBool::new(false);

fn register() -> bool {
    let has = membarrier_query().contains(MembarrierQuery::PRIVATE_EXPEDITED);
    has && membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// Makes light fences light, where the system can.
pub fn prepare() {
    static ONCE: Once = Once::new();
    // Miri knows no such system call.
    ONCE.call_once(|| LIGHT.store(!cfg!(miri) && register(), Ordering::SeqCst));
}

/// The fence of the side that comes often.
#[inline]
pub fn light() {
    if LIGHT.load(Ordering::Acquire) {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The fence of the side that comes seldom: some hundred nanoseconds.
pub fn heavy() {
    fence(Ordering::SeqCst);
    if !LIGHT.load(Ordering::SeqCst) {
        return;
    }
    let barrier = || membarrier(MembarrierCommand::PrivateExpedited);
    // A forked child is not registered where its parent was.
    if let Err(error) = barrier().or_else(|error| if register() { barrier() } else { Err(error) }) {
        // Other threads rely on what cannot be had any more: no fence of this one would do.
        eprintln!("strata: membarrier, which this process has used, is refused now: {error}");
        std::process::abort();
    }
}

/// Whether this process can take part in fences between processes: its [`light`] ones, where all have prepared, are whole
/// wherever another calls [`heavy_everywhere`].
///
/// Linux (seen on 6.18) notes of each processor whether the process there takes part, and looks anew only where the processor comes
/// from another process's memory. One that was idle, with this process's memory still, when the process registered is left out until another
/// process has run there: on it a light fence may be none. Measured: 1 to 20 of the first 300,000 pairs are blind in some runs, and 200 without any
/// fence. So who relies on these fences must not sleep for ever: a rank looks again after a millisecond, then after twice that.
pub fn prepare_everywhere() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        !cfg!(miri)
            && membarrier_query().contains(MembarrierQuery::GLOBAL_EXPEDITED)
            && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
    })
}

/// A fence of this thread and of all that run in processes that have prepared; false where the system refuses it.
pub fn heavy_everywhere() -> bool {
    fence(Ordering::SeqCst);
    membarrier(MembarrierCommand::GlobalExpedited).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// The pair's promise, which without the fences is broken many times.
    #[test]
    fn one_of_two_sees_the_other() {
        const ROUNDS: u32 = if cfg!(miri) { 20 } else { 100_000 };
        prepare();
        let words: [AtomicU32; 2] = Default::default();
        let begun: [AtomicU32; 2] = Default::default();
        let run = |side: usize| -> Vec<u32> {
            let round = |round: u32| {
                begun[side].store(round, Ordering::Release);
                let mut looks = 0;
                while begun[1 - side].load(Ordering::Acquire) < round {
                    looks += 1;
                    if looks % 1000 == 0 {
                        std::thread::yield_now();
                    }
                }
                words[side].store(round, Ordering::Relaxed);
                if side == 0 {
                    light();
                } else {
                    heavy();
                }
                words[1 - side].load(Ordering::Relaxed)
            };
            (1..=ROUNDS).map(round).collect()
        };
        let (ones, others) = std::thread::scope(|scope| {
            let ones = scope.spawn(|| run(0));
            let others = run(1);
            (ones.join().unwrap(), others)
        });
        let seen = (1..).zip(ones.iter().zip(&others));
        let blind = seen.filter(|(round, (one, other))| *one < round && *other < round).count();
        assert_eq!(blind, 0, "rounds in which neither saw the other");
    }
}
