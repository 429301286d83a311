//! What a forked child must not share with its parent.
//!
//! Programs fork while communicators are in use (a data loader's workers, for instance). A child inherits every
//! descriptor, and a socket that lives on in the child keeps its parent's links standing after the parent's death, so
//! that the other ranks would miss it only when their time is over. Therefore each of our sockets is [`Unshared`]: in a
//! child its number names a dead socket, and nothing the child does can reach the parent's peers. The state of a
//! process as a whole is [`PerProcess`]: a child begins without any, and never waits for a lock that another thread of
//! its parent held.
//!
//! This rests on `pthread_atfork`, so it holds for `fork`, and not for a bare `clone` system call.

use crate::process::above_standard;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Duration;

/// Numbers of descriptors that are looked after: as many as a process can have where the administrator has not raised
/// the system's limit (`fs.nr_open`).
const NUMBERS: usize = 1 << 20;

/// One bit for each number that names an unshared descriptor. A table without allocation, since the handlers of `fork`
/// run when no memory may be had. Its pages cost nothing until they are written.
static OURS: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// One past the last word of the table that was ever written.
static WORDS: AtomicUsize = AtomicUsize::new(0);
/// Whether somebody opens or closes an unshared descriptor, or the process forks: one excludes the other.
static HELD: AtomicBool = AtomicBool::new(false);
/// How many forks lie between this process and the first one that used the library.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// What takes the place of unshared descriptors in a child: a socket that was never connected.
static DEAD: OnceLock<OwnedFd> = OnceLock::new();

fn take_hold() {
    while HELD.swap(true, Ordering::Acquire) {
        // Whoever holds it makes one system call; a sleep lets it run whatever the priorities are.
        std::thread::sleep(Duration::from_micros(20));
    }
}

fn let_go() {
    HELD.store(false, Ordering::Release);
}

extern "C" fn before() {
    take_hold();
}

extern "C" fn in_parent() {
    let_go();
}

extern "C" fn in_child() {
    for (index, word) in OURS.iter().enumerate().take(WORDS.load(Ordering::Relaxed)) {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            replace((index * 64) as RawFd + bits.trailing_zeros() as RawFd);
            bits &= bits - 1;
        }
    }
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let_go();
}

/// Lets a number name the dead socket. It stays taken, so that nothing of the child's comes to be closed by mistake.
fn replace(number: RawFd) {
    if let Some(dead) = DEAD.get() {
        // SAFETY: the call must be allowed between `fork` and `exec`; because `dup3` is a bare system call.
        if unsafe { libc::dup3(dead.as_raw_fd(), number, libc::O_CLOEXEC) } == number {
            return;
        }
    }
    // SAFETY: nobody may use the number afterwards; because it names a descriptor of ours, which a child leaves alone.
    // An inherited `Unshared` that is dropped all the same closes the number again.
    unsafe { libc::close(number) };
}

/// From now on forks are noticed.
fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        use rustix::net::{socket_with, AddressFamily, SocketFlags, SocketType};
        if let Ok(dead) = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None) {
            // Nobody else sets it.
            let _ = DEAD.set(above_standard(dead));
        }
        // SAFETY: the handlers must stay mapped until the process ends; because the library is linked `-z nodelete`.
        // Without memory for them a child shares its parent's links, as it would share any other library's.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

/// Which process this is among those that came from one another by forking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin(u64);

impl Origin {
    /// This process.
    pub fn here() -> Origin {
        watch();
        Origin(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether it is this process. One load.
    pub fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}

/// As long as it lives the process does not fork. Not to be held while waiting for anything.
#[derive(Debug)]
pub struct Hold(());

/// Keeps the process from forking between the making of a descriptor and [`Unshared::new`].
pub fn hold() -> Hold {
    watch();
    take_hold();
    Hold(())
}

impl Drop for Hold {
    fn drop(&mut self) {
        let_go();
    }
}

/// A descriptor that forked children do not share.
#[derive(Debug)]
pub struct Unshared<T: AsRawFd>(ManuallyDrop<T>);

impl<T: AsRawFd + From<OwnedFd> + Into<OwnedFd>> Unshared<T> {
    /// Looks after a descriptor that was made under `hold`, at a number above the standard ones.
    pub fn new(descriptor: T, _hold: &Hold) -> Unshared<T> {
        let descriptor = above_standard(descriptor);
        let number = descriptor.as_raw_fd() as usize;
        if let Some(word) = OURS.get(number / 64) {
            word.fetch_or(1 << (number % 64), Ordering::Relaxed);
            WORDS.fetch_max(number / 64 + 1, Ordering::Relaxed);
        }
        Unshared(ManuallyDrop::new(descriptor))
    }
}

impl<T: AsRawFd> Deref for Unshared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> Drop for Unshared<T> {
    fn drop(&mut self) {
        // A child of a fork between the two would keep the socket open, and the peer would not see it end.
        let _hold = hold();
        let number = self.0.as_raw_fd() as usize;
        if let Some(word) = OURS.get(number / 64) {
            word.fetch_and(!(1 << (number % 64)), Ordering::Relaxed);
        }
        // SAFETY: the value must not be used afterwards; because this is the end of its owner.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

struct Slot<T> {
    origin: Origin,
    value: T,
}

/// A value of the process as a whole, made when first asked for. A forked child has its own; what it inherited stays in
/// memory untouched, since the threads that used it are not there.
pub struct PerProcess<T> {
    current: AtomicPtr<Slot<T>>,
    make: fn() -> T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// A value that `make` makes.
    pub const fn new(make: fn() -> T) -> PerProcess<T> {
        PerProcess { current: AtomicPtr::new(null_mut()), make }
    }

    /// This process's value.
    pub fn get(&'static self) -> &'static T {
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: the slot must live for ever; because slots in `current` are never freed.
        match unsafe { current.as_ref() } {
            Some(slot) if slot.origin.is_here() => &slot.value,
            _ => self.renew(current),
        }
    }

    fn renew(&'static self, old: *mut Slot<T>) -> &'static T {
        let fresh = Box::into_raw(Box::new(Slot { origin: Origin::here(), value: (self.make)() }));
        let found = match self.current.compare_exchange(old, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                // Another thread was faster.
                // SAFETY: the slot must be ours alone; because it was made above and never published.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        };
        // SAFETY: the slot must live for ever; because slots in `current` are never freed.
        unsafe { &(*found).value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    static STATE: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(7));

    /// Runs `body` in a forked child; whether it returned true. The body must not touch what other threads may hold.
    fn in_a_child(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child must use only what survives a fork of many threads; because each body says so itself.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = if body() { 0 } else { 1 };
            // SAFETY: no handler of the test harness may run in the child; because `_exit` runs none.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: the place must be writable; because it is a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        status == 0
    }

    #[test]
    fn a_child_s_copy_of_a_socket_is_dead_and_the_parent_s_end_ends_the_connection() {
        let (mut near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let far = {
            let hold = hold();
            Unshared::new(far, &hold)
        };
        let (go, mut wait) = UnixStream::pair().unwrap();
        // SAFETY: the child must use only what survives a fork of many threads; because it makes bare system calls
        // only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let dead = (&*far).read(&mut [0]).is_err();
            // Until the parent says so the child lives, and holds what it holds.
            drop(go);
            let told = wait.read(&mut [0]).is_ok();
            // SAFETY: no handler of the test harness may run in the child; because `_exit` runs none.
            unsafe { libc::_exit(i32::from(!(dead && told))) };
        }
        drop(far);
        assert_eq!(near.read(&mut [0]).unwrap(), 0, "the connection ended although the child lives");
        drop(go);
        let mut status = 0;
        // SAFETY: the place must be writable; because it is a local.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_child_has_its_own_state_even_when_a_lock_of_the_parent_s_was_held() {
        let mut held = STATE.get().lock().unwrap();
        *held = 8;
        let origin = Origin::here();
        assert!(in_a_child(|| !origin.is_here() && *STATE.get().lock().unwrap() == 7));
        assert!(origin.is_here());
    }
}
