//! A lock that one thread takes over and over, without an atomic instruction of the expensive kind.
//!
//! A thread that has taken the lock many times in a row becomes its *owner* and gets a seat. From then on it says on its seat
//! that it is inside, and looks whether it is the owner still: two plain accesses with a [light fence](super::fence). Any other
//! thread takes an ordinary mutex, ends the ownership by a heavy fence, and waits until the owner is not inside any more. So
//! for programs that call from one thread the lock costs nearly nothing, and for others what a mutex costs.
//!
//! A thread whose ownership has ended may still be about to look, and writes on its seat meanwhile; so seats are used once.

use super::{fence, locked};
use std::cell::{Cell, UnsafeCell};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// How often in a row a thread takes the lock before it owns it.
const STREAK: u32 = 32;
/// Owners one after another; where there have been more, no thread is likely to stay one.
const SEATS: usize = 8;
/// In the place of a seat's number: nobody owns the lock.
const NOBODY: usize = SEATS;

/// Numbers of threads, never used again.
fn thread() -> u64 {
    thread_local! {
        static THREAD: Cell<u64> = const { Cell::new(0) };
    }
    static NEXT: AtomicU64 = AtomicU64::new(1);
    match THREAD.get() {
        0 => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            THREAD.set(number);
            number
        }
        number => number,
    }
}

#[derive(Debug, Default)]
struct Seat {
    /// Whose it is; written before it is given out.
    thread: AtomicU64,
    inside: AtomicBool,
}

#[derive(Debug, Default)]
struct Record {
    /// Who took the lock last, and how often in a row.
    thread: u64,
    times: u32,
    seats_used: usize,
    /// The seat of an owner that has been told to go and may be inside.
    leaving: Option<usize>,
}

/// A value behind such a lock.
#[derive(Debug)]
pub struct Biased<T> {
    record: Mutex<Record>,
    /// The owner's seat.
    owner: AtomicUsize,
    seats: [Seat; SEATS],
    value: UnsafeCell<T>,
}

// SAFETY: a reference from several threads must give no two of them the value at once; because every access is through a guard,
// and guards exclude each other. The value itself goes from thread to thread, for which it is `Send`.
unsafe impl<T: Send> Sync for Biased<T> {}

/// The value, as long as this lives.
pub struct BiasedGuard<'a, T> {
    of: &'a Biased<T>,
    /// The owner's seat, where the owner has it.
    seat: Option<&'a Seat>,
    record: MutexGuard<'a, Record>,
}

/// As long as it lives the owner is inside.
struct Inside<'a>(&'a Seat);

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.inside.store(false, Ordering::Release);
    }
}

impl<T> Biased<T> {
    /// A value that nobody owns.
    pub fn new(value: T) -> Biased<T> {
        Biased {
            record: Mutex::default(),
            owner: AtomicUsize::new(NOBODY),
            seats: Default::default(),
            value: UnsafeCell::new(value),
        }
    }

    /// The value, which nobody else can have.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// Takes the lock, for which it waits. What a panic of a holder leaves is as it was then.
    pub fn lock(&self) -> BiasedGuard<'_, T> {
        let mut record = locked(&self.record);
        let seat = self.settle(&mut record);
        // Holding the record keeps others from coming in between. An owner stays for microseconds, or as long as a system call.
        while self.is_inside(&mut record, seat) {
            std::thread::sleep(Duration::from_micros(5));
        }
        self.enter(record, seat)
    }

    /// Takes the lock if nobody has it.
    pub fn try_lock(&self) -> Option<BiasedGuard<'_, T>> {
        let mut record = match self.record.try_lock() {
            Ok(record) => record,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let seat = self.settle(&mut record);
        (!self.is_inside(&mut record, seat)).then(|| self.enter(record, seat))
    }

    /// Does something with the value if nobody has it, for a thread that is likely to come again: it may become the owner, and
    /// is let in as such. No guard, whose way through memory would cost as much as the rest.
    #[inline]
    pub fn try_often<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        let owner = self.owner.load(Ordering::Relaxed);
        let seat = self.seats.get(owner).filter(|seat| seat.thread.load(Ordering::Relaxed) == thread());
        let Some(seat) = seat else { return self.try_to_own(act) };
        if seat.inside.load(Ordering::Relaxed) {
            // A signal handler has interrupted this thread inside.
            return None;
        }
        seat.inside.store(true, Ordering::Relaxed);
        fence::light();
        let inside = Inside(seat);
        if self.owner.load(Ordering::Relaxed) != owner {
            drop(inside);
            return self.try_to_own(act);
        }
        // SAFETY: nobody else may have the value; because the owner is inside, and others wait until it has left.
        Some(act(unsafe { &mut *self.value.get() }))
    }

    /// Has this thread own the lock if it has come often enough.
    #[inline(never)]
    fn try_to_own<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut guard = self.try_lock()?;
        let record = &mut guard.record;
        record.times += 1;
        if guard.seat.is_none() && record.times >= STREAK && record.seats_used < SEATS {
            let number = record.seats_used;
            record.seats_used += 1;
            let seat = &self.seats[number];
            seat.thread.store(thread(), Ordering::Relaxed);
            seat.inside.store(true, Ordering::Relaxed);
            self.owner.store(number, Ordering::Relaxed);
            guard.seat = Some(seat);
        }
        Some(act(&mut guard))
    }

    /// Ends another thread's ownership; the seat of this one where it is the owner. The owner changes only with the record held.
    fn settle(&self, record: &mut Record) -> Option<&Seat> {
        let me = thread();
        if record.thread != me {
            (record.thread, record.times) = (me, 0);
        }
        let owner = self.owner.load(Ordering::Relaxed);
        let seat = self.seats.get(owner)?;
        if seat.thread.load(Ordering::Relaxed) == me {
            return Some(seat);
        }
        self.owner.store(NOBODY, Ordering::Relaxed);
        fence::heavy();
        record.leaving = Some(owner);
        None
    }

    /// Whether an owner is inside: a former one, or this thread itself, which a signal handler has interrupted.
    fn is_inside(&self, record: &mut Record, seat: Option<&Seat>) -> bool {
        let is_inside = |seat: &Seat| seat.inside.load(Ordering::Acquire);
        if record.leaving.is_some_and(|leaving| is_inside(&self.seats[leaving])) {
            return true;
        }
        record.leaving = None;
        seat.is_some_and(is_inside)
    }

    fn enter<'a>(&'a self, record: MutexGuard<'a, Record>, seat: Option<&'a Seat>) -> BiasedGuard<'a, T> {
        if let Some(seat) = seat {
            seat.inside.store(true, Ordering::Relaxed);
        }
        BiasedGuard { of: self, seat, record }
    }
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: nobody else may write the value; because guards exclude each other.
        unsafe { &*self.of.value.get() }
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: nobody else may have the value; because guards exclude each other.
        unsafe { &mut *self.of.value.get() }
    }
}

impl<T> Drop for BiasedGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(seat) = self.seat {
            seat.inside.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_owner(lock: &Biased<u64>) -> bool {
        lock.owner.load(Ordering::Relaxed) != NOBODY
    }

    fn is_held(lock: &Biased<u64>) -> bool {
        lock.try_often(|_| ()).is_none() && lock.try_lock().is_none()
    }

    fn own(lock: &Biased<u64>) {
        for _ in 0..=STREAK {
            lock.try_often(|value| *value += 1).unwrap();
        }
        assert!(has_owner(lock), "no owner after {STREAK} times");
    }

    #[test]
    fn who_comes_often_owns_the_lock_until_another_thread_takes_it() {
        let lock = Biased::new(0);
        own(&lock);
        {
            let _held = lock.lock();
            assert!(is_held(&lock), "the owner holds it");
        }
        std::thread::scope(|scope| {
            let inside = |_: &mut u64| {
                assert!(is_held(&lock), "a handler on the owner's thread");
                scope.spawn(|| assert!(lock.try_lock().is_none())).join().unwrap();
            };
            lock.try_often(inside).unwrap();
            scope.spawn(|| *lock.try_lock().unwrap() += 1).join().unwrap();
        });
        assert!(!has_owner(&lock), "still the owner");
        own(&lock);
    }

    #[test]
    fn one_who_waits_gets_in_when_the_owner_leaves() {
        let lock = Biased::new(0);
        own(&lock);
        let before = *lock.lock();
        std::thread::scope(|scope| {
            let inside = |value: &mut u64| {
                let waiter = scope.spawn(|| {
                    let mut other = lock.lock();
                    *other += 1;
                    *other
                });
                std::thread::sleep(Duration::from_millis(20));
                *value += 10;
                waiter
            };
            let waiter = lock.try_often(inside).unwrap();
            assert_eq!(waiter.join().unwrap(), before + 11);
        });
    }

    #[test]
    fn seats_run_out_and_the_lock_goes_on() {
        let lock = Biased::new(0u64);
        let rounds = 3 * SEATS as u64;
        for _ in 0..rounds {
            std::thread::scope(|scope| {
                scope.spawn(|| (0..2 * STREAK).for_each(|_| lock.try_often(|value| *value += 1).unwrap()));
            });
        }
        assert_eq!(*lock.lock(), rounds * 2 * u64::from(STREAK));
        assert_eq!(lock.record.lock().unwrap().seats_used, SEATS);
    }

    /// Threads by seeds, each of which mostly comes in bursts, so that ownership comes and goes.
    #[test]
    fn nobody_is_inside_with_another() {
        fence::prepare();
        const BURSTS: u64 = if cfg!(miri) { 6 } else { 3_000 };
        for round in 0..if cfg!(miri) { 1 } else { 20 } {
            let lock = Biased::new((0u64, 0u64));
            let counts: Vec<u64> = std::thread::scope(|scope| {
                let run = |thread: u64| {
                    let mut state = thread * 77 + round + 1;
                    let mut entered = 0;
                    for _ in 0..BURSTS {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        for _ in 0..(state >> 33) % 80 {
                            let inside = |held: &mut (u64, u64)| {
                                held.0 += 1;
                                std::hint::spin_loop();
                                held.1 += 1;
                                assert_eq!(held.0, held.1);
                                1
                            };
                            let done = match (state >> 40) % 8 {
                                0 => Some(inside(&mut lock.lock())),
                                1 => lock.try_lock().map(|mut held| inside(&mut held)),
                                _ => lock.try_often(inside),
                            };
                            entered += done.unwrap_or(0);
                        }
                        if state >> 60 == 0 {
                            std::thread::yield_now();
                        }
                    }
                    entered
                };
                let threads: Vec<_> = (0..3).map(|thread| scope.spawn(move || run(thread))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let held = lock.lock();
            assert_eq!((held.0, held.1), (counts.iter().sum(), counts.iter().sum()));
        }
    }
}
