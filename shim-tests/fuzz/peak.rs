//! What a test has allocated in all, and at most at one time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, which counts.
pub struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static TOTAL: AtomicUsize = AtomicUsize::new(0);

/// Bytes that were allocated.
#[derive(Debug, Clone, Copy, Default)]
pub struct Allocated {
    /// All, freed or not.
    pub total: usize,
    /// The most at one time.
    pub peak: usize,
}

/// What the body allocates. Only one thread may do so.
pub fn of<T>(body: impl FnOnce() -> T) -> (T, Allocated) {
    let (live, total) = (LIVE.load(Relaxed), TOTAL.load(Relaxed));
    PEAK.store(live, Relaxed);
    let value = body();
    let allocated = Allocated { total: TOTAL.load(Relaxed) - total, peak: PEAK.load(Relaxed).saturating_sub(live) };
    (value, allocated)
}

fn grown(bytes: usize) {
    TOTAL.fetch_add(bytes, Relaxed);
    PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: what the trait asks for; because the system's allocator does all of it, and counting touches no memory of its.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: a layout that is not empty; because the caller promises that.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: a layout that is not empty; because the caller promises that.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both are there while one is copied to the other.
        grown(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: a place of this allocator with this layout, and a size; because the caller promises that.
        unsafe { System.realloc(place, layout, size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: a place of this allocator with this layout; because the caller promises that.
        unsafe { System.dealloc(place, layout) }
    }
}
