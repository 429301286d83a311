//! This process as the system sees it: its rights, its limits, its standard descriptors.
//!
//! A library lives in processes that it did not set up: started with more rights than whoever started them, with limits
//! that kill those who pass them, with standard descriptors closed.

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// Standard input, output and error.
const STANDARD: RawFd = 2;

/// Whether the program has rights that its starter may not have (set-user-ID, set-group-ID, capabilities of its file), so
/// that the environment must not name files.
pub fn is_elevated() -> bool {
    // SAFETY: no requirement.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Gives a new descriptor a number above the standard ones. Where a program has closed those, the system gives their
/// numbers to what is opened next, and what anybody writes to "standard error" would go there. Where no number is left the
/// descriptor stays where it is.
pub fn above_standard<T: AsRawFd + From<OwnedFd> + Into<OwnedFd>>(descriptor: T) -> T {
    if descriptor.as_raw_fd() > STANDARD {
        return descriptor;
    }
    let low: OwnedFd = descriptor.into();
    // SAFETY: the descriptor must be open; because `low` owns it.
    let high = unsafe { libc::fcntl(low.as_raw_fd(), libc::F_DUPFD_CLOEXEC, STANDARD + 1) };
    if high < 0 {
        return low.into();
    }
    // SAFETY: nobody else may own the descriptor; because `fcntl` has just made it.
    unsafe { OwnedFd::from_raw_fd(high) }.into()
}

/// A limit of this process, in bytes; none where it has none.
fn limit(resource: rustix::process::Resource) -> Option<u64> {
    rustix::process::getrlimit(resource).current
}

/// An error if a file may not have so many bytes. To be asked before a file grows, since beyond the limit the system sends
/// SIGXFSZ, which ends the program.
pub fn check_file_size(bytes: u64) -> io::Result<()> {
    match limit(rustix::process::Resource::Fsize) {
        Some(most) if bytes > most => Err(io::Error::other(format!(
            "{bytes} bytes are more than a file of this process may have: RLIMIT_FSIZE is {most} (ulimit -f)"
        ))),
        _ => Ok(()),
    }
}

/// An error if this process may not map so many bytes more. To be asked before much is begun that needs memory in small
/// pieces, since a program whose small allocations fail is ended. Where there is no limit, or nothing tells, all is well.
pub fn check_address_space(bytes: u64) -> io::Result<()> {
    let Some(most) = limit(rustix::process::Resource::As) else { return Ok(()) };
    let sizes = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = sizes.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let left = most.saturating_sub(pages * rustix::param::page_size() as u64);
    match left < bytes {
        true => Err(io::Error::other(format!(
            "{bytes} bytes of addresses are needed and {left} left: RLIMIT_AS is {most} (ulimit -v)"
        ))),
        false => Ok(()),
    }
}

/// Addresses that a thread takes as it starts, beside its stack: its signal stack, its allocations.
const THREAD_SPARE: u64 = 1 << 20;
/// The stack of a thread, unless told otherwise.
const THREAD_STACK: u64 = 2 << 20;

thread_local! {
    /// What is blocked on the program's thread that has started this one, or has started the one that did.
    static STARTER_S_MASK: Cell<Option<SigSet>> = const { Cell::new(None) };
}

/// As long as it lives the program's signals are not for this thread, nor for those that it starts.
struct WithoutSignals(Option<SigSet>);

impl WithoutSignals {
    fn enter() -> WithoutSignals {
        let mut signals = SigSet::all();
        // What an instruction raises is of its own thread: blocked, it would end the program without a word.
        for raised in [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGTRAP, Signal::SIGSYS]
        {
            signals.remove(raised);
        }
        WithoutSignals(signals.thread_swap_mask(SigmaskHow::SIG_BLOCK).ok())
    }
}

impl Drop for WithoutSignals {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            // Restoring a mask that was valid does not fail.
            let _ = before.thread_set_mask();
        }
    }
}

/// Does something with the signals that the program's thread takes which has started this one: start a process, say, which
/// inherits what is blocked.
pub fn with_signals<T>(act: impl FnOnce() -> T) -> T {
    let before = STARTER_S_MASK.get().and_then(|mask| mask.thread_swap_mask(SigmaskHow::SIG_SETMASK).ok());
    let _restored = WithoutSignals(before);
    act()
}

/// A thread to be started.
pub struct NewThread(Builder);

/// A thread to be started, where there is memory for one: one that has started and finds no memory for its signal stack ends
/// the program. The program's signals are for the program's threads: a handler that aborts a communicator would wait for what
/// it has interrupted, and one that comes before a thread has begun can call nothing.
pub fn thread(name: &str) -> io::Result<NewThread> {
    check_address_space(THREAD_STACK + THREAD_SPARE)?;
    Ok(NewThread(Builder::new().name(name.to_string())))
}

impl NewThread {
    /// Starts it.
    pub fn spawn<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
        let signals = WithoutSignals::enter();
        let mask = STARTER_S_MASK.get().or(signals.0);
        self.0.spawn(move || {
            STARTER_S_MASK.set(mask);
            work()
        })
    }

    /// Starts it within a scope.
    pub fn spawn_scoped<'scope, T: Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        let signals = WithoutSignals::enter();
        let mask = STARTER_S_MASK.get().or(signals.0);
        self.0.spawn_scoped(scope, move || {
            STARTER_S_MASK.set(mask);
            work()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_low_descriptor_is_moved_and_closed_and_a_high_one_stays() {
        // Standard input may be closed for other tests of this process; they do not read it.
        let file = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: the descriptors must be open; because 0 need not be, and `file` owns the other.
        assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), 0) }, 0);
        // SAFETY: nobody else may own the descriptor; because the test has just made it.
        let moved = above_standard(unsafe { OwnedFd::from_raw_fd(0) });
        assert!(moved.as_raw_fd() > STANDARD);
        let number = file.as_raw_fd();
        assert_eq!(above_standard(file).as_raw_fd(), number);
    }

    #[test]
    fn a_thread_takes_no_signals_of_the_program_s_but_where_it_is_to() {
        let takes = |signal| !SigSet::thread_get_mask().unwrap().contains(signal);
        let found = move || {
            let nested = thread("test")
                .unwrap()
                .spawn(move || (takes(Signal::SIGUSR1), with_signals(|| takes(Signal::SIGUSR1))));
            [(takes(Signal::SIGUSR1), takes(Signal::SIGSEGV)), nested.unwrap().join().unwrap()]
        };
        assert_eq!(thread("test").unwrap().spawn(found).unwrap().join().unwrap(), [(false, true), (false, true)]);
        let scoped = std::thread::scope(|scope| {
            thread("test").unwrap().spawn_scoped(scope, || takes(Signal::SIGUSR1)).unwrap().join().unwrap()
        });
        assert!(!scoped && takes(Signal::SIGUSR1));
    }

    #[test]
    fn this_test_has_no_more_rights_than_its_starter() {
        assert!(!is_elevated());
    }
}
