//! Locks, whatever became of whoever held them before.

pub mod biased;
pub mod fence;

use std::sync::{Mutex, MutexGuard};

/// Locks. A panic of a holder leaves the value as it was then, which every user of this has to bear.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
