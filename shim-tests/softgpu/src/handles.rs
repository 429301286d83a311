//! Handles that programs get: numbers that trap when they are taken for pointers.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

/// A handle that nothing else has.
pub fn fresh() -> usize {
    // Not canonical: no address of a program on any processor with 64 bits.
    static NEXT: AtomicUsize = AtomicUsize::new(0x5000_0000_0000_0000);
    NEXT.fetch_add(16, Ordering::Relaxed) + 16
}

/// Things by their handles.
pub struct Handles<T> {
    items: RwLock<BTreeMap<usize, Arc<T>>>,
}

impl<T> Handles<T> {
    /// Without any.
    pub const fn empty() -> Handles<T> {
        Handles { items: RwLock::new(BTreeMap::new()) }
    }

    /// Names a thing by a handle, in place of what had the name.
    pub fn name(&self, handle: usize, item: Arc<T>) {
        self.items.write().unwrap().insert(handle, item);
    }

    /// Gives a thing a fresh handle.
    pub fn add(&self, item: T) -> usize {
        self.add_shared(Arc::new(item))
    }

    /// Gives a thing that others have a fresh handle.
    pub fn add_shared(&self, item: Arc<T>) -> usize {
        let handle = fresh();
        self.name(handle, item);
        handle
    }

    /// The handle of a thing.
    pub fn handle_of(&self, item: &Arc<T>) -> Option<usize> {
        let items = self.items.read().unwrap();
        items.iter().find(|(_, other)| Arc::ptr_eq(other, item)).map(|(handle, _)| *handle)
    }

    /// The thing of a handle.
    pub fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.items.read().unwrap().get(&handle).cloned()
    }

    /// A thing of which this holds.
    pub fn find(&self, holds: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        self.items.read().unwrap().values().find(|item| holds(item)).cloned()
    }

    /// Takes a thing out.
    pub fn remove(&self, handle: usize) -> Option<Arc<T>> {
        self.items.write().unwrap().remove(&handle)
    }

    /// How many things there are of which this holds.
    pub fn count(&self, holds: impl Fn(&T) -> bool) -> usize {
        self.items.read().unwrap().values().filter(|item| holds(item)).count()
    }
}
