//! Fences in pairs, of which the side that comes often pays nothing.
//!
//! Two threads each write a word and then read the other's. At least one must see what the other has written, for which both
//! need a fence between the two. Where the system has `membarrier`, one side's [`heavy`] fence is one on all threads of
//! the process, so that the other side's [`light`] one has only to keep the compiler from reordering. Elsewhere both are whole.
#![forbid(unsafe_code)]

use super::locked;
use crate::fork::PerProcess;
use crate::process::thread;
use rustix::thread::{membarrier, membarrier_query, MembarrierCommand, MembarrierQuery};
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{compiler_fence, fence, AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Whether heavy fences are ones on all threads of the process.
static HEAVY: AtomicBool = AtomicBool::new(false);
/// Whether light fences may be nothing. Set later than the other: a heavy fence that has not seen that one has ended before.
static LIGHT: AtomicBool = AtomicBool::new(false);
/// How long a communicator waits to know whether this process can take part in fences between processes.
const PATIENCE: Duration = Duration::from_millis(250);

/// What the system says to this process.
#[derive(Default)]
struct Registration {
    begun: AtomicBool,
    /// Whether it takes part in fences between processes, once that is known.
    everywhere: Mutex<Option<bool>>,
    is_known: Condvar,
}

static REGISTRATION: PerProcess<Registration> = PerProcess::new(Registration::default);

impl Registration {
    fn say(&self, everywhere: bool) {
        *locked(&self.everywhere) = Some(everywhere);
        self.is_known.notify_all();
    }
}

fn register() -> bool {
    let has = membarrier_query().contains(MembarrierQuery::PRIVATE_EXPEDITED);
    has && membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

fn register_everywhere() -> bool {
    let has = membarrier_query().contains(MembarrierQuery::GLOBAL_EXPEDITED);
    has && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
}

fn make_light() {
    if register() {
        HEAVY.store(true, Ordering::SeqCst);
        // What a heavy fence that has not seen it stands behind is visible from here on.
        let all_see = membarrier(MembarrierCommand::PrivateExpedited).is_ok();
        LIGHT.store(all_see, Ordering::SeqCst);
    }
}

/// Whether the calling thread is the process's only one.
fn is_only_thread() -> bool {
    // The links of a directory: two, and one for each thread.
    std::fs::metadata("/proc/self/task").is_ok_and(|tasks| tasks.st_nlink() == 3)
}

/// Begins to make light fences light, where the system can. To be called before the library starts a thread: a process with one registers
/// at once. With more the system waits until each processor has been through its scheduler (Linux 6.18: 10 to 20 ms, and minutes where threads that only
/// yield keep the kernel's own from processors), so then threads of the library do it, and nobody waits for them.
pub fn prepare() {
    // Miri knows neither this system call nor those that notice forks: fences are whole there.
    if cfg!(miri) {
        return;
    }
    let registration = REGISTRATION.get();
    if registration.begun.swap(true, Ordering::AcqRel) {
        return;
    }
    if is_only_thread() {
        make_light();
        return registration.say(register_everywhere());
    }
    // Without a thread all fences are whole.
    let _ = thread("strata-fence").and_then(|thread| thread.spawn(make_light));
    let everywhere = move || registration.say(register_everywhere());
    if thread("strata-fence").and_then(|thread| thread.spawn(everywhere)).is_err() {
        registration.say(false);
    }
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
    if !HEAVY.load(Ordering::SeqCst) {
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

/// Whether this process takes part in fences between processes: its [`light`] ones, where all do, are whole
/// wherever another calls [`heavy_everywhere`].
///
/// Linux (seen on 6.18) notes of each processor whether the process there takes part, and looks anew only where the processor comes
/// from another process's memory. One that was idle, with this process's memory still, when the process registered is left out until another
/// process has run there: on it a light fence may be none. Measured: 1 to 20 of the first 300,000 pairs are blind in some runs, and 200 without any
/// fence. So who relies on these fences must not sleep for ever: a rank looks again after a millisecond, then after twice that.
pub fn can_be_everywhere() -> bool {
    prepare();
    let registration = REGISTRATION.get();
    let everywhere = locked(&registration.everywhere);
    let known = registration.is_known.wait_timeout_while(everywhere, PATIENCE, |everywhere| everywhere.is_none());
    let (everywhere, _) = known.unwrap_or_else(|poisoned| poisoned.into_inner());
    *everywhere == Some(true)
}

/// A fence of this thread and of all that run in processes that take part; false where the system refuses it.
pub fn heavy_everywhere() -> bool {
    fence(Ordering::SeqCst);
    membarrier(MembarrierCommand::GlobalExpedited).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// The pair's promise, which without the fences is broken many times. Light fences become nothing on the way.
    #[test]
    fn one_of_two_sees_the_other() {
        const ROUNDS: u32 = if cfg!(miri) { 20 } else { 400_000 };
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
        if !cfg!(miri) && membarrier_query().contains(MembarrierQuery::PRIVATE_EXPEDITED) {
            assert!(LIGHT.load(Ordering::SeqCst), "light fences are still whole");
        }
    }
}
