//! Runs of bytes that belong to somebody else: user buffers, shared mappings, scratch.
//!
//! A [`Region`] is a pointer and a length and nothing more. It is never a Rust reference, since several ranks (and,
//! for shared mappings, several processes) read and write the memory behind it as the plan says; the verifier proves
//! that no two of them conflict. Making a region is the unsafe act; using it is checked against its length.

mod copy;
mod limits;
pub mod mapping;
pub mod objects;
pub mod shared;
pub mod vectored;

use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::ptr::NonNull;

/// A run of bytes in this process's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    start: *mut u8,
    len: usize,
}

// SAFETY: a region is an address and a length; whoever made it promised that the bytes may be used from any thread.
unsafe impl Send for Region {}
// SAFETY: as above; a shared region offers nothing that an owned one does not.
unsafe impl Sync for Region {}

impl Region {
    /// A region of no bytes.
    pub const EMPTY: Region = Region { start: std::ptr::null_mut(), len: 0 };

    /// A region over `len` bytes at `start`.
    ///
    /// # Safety
    /// The bytes must be readable (and writable, where the region is written) for as long as the region or a part of
    /// it is in use, from any thread, and no Rust reference to them may be alive in that time.
    pub unsafe fn new(start: *mut u8, len: usize) -> Region {
        Region { start, len }
    }

    /// The first byte's address.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part of `len` bytes from `offset`.
    ///
    /// # Panics
    /// When the part does not lie inside the region.
    pub fn part(&self, offset: usize, len: usize) -> Region {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "part {offset}+{len} of a region of {} bytes", self.len);
        Region { start: self.start.wrapping_add(offset), len }
    }

    /// Copies the bytes of `source`, which has the same length; the two may overlap.
    pub fn copy_from(&self, source: Region) {
        assert_eq!(self.len, source.len, "copy between regions of different lengths");
        if self.len == 0 || self.start == source.start {
            return;
        }
        // SAFETY: both regions are valid for `len` bytes, by the promise of `Region::new`.
        unsafe { copy::copy(source.start, self.start, self.len) }
    }

    /// Copies the bytes of a slice of the same length into the region.
    pub fn write(&self, bytes: &[u8]) {
        assert_eq!(self.len, bytes.len(), "write of a different length");
        if self.len > 0 {
            // SAFETY: the region is valid for `len` bytes, and no reference to them is alive, so `bytes` is elsewhere.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, self.len) }
        }
    }

    /// Copies the region's bytes into a slice of the same length.
    pub fn read(&self, bytes: &mut [u8]) {
        assert_eq!(self.len, bytes.len(), "read of a different length");
        if self.len > 0 {
            // SAFETY: the region is valid for `len` bytes, and no reference to them is alive, so `bytes` is elsewhere.
            unsafe { std::ptr::copy_nonoverlapping(self.start, bytes.as_mut_ptr(), self.len) }
        }
    }
}

/// Memory of our own, aligned to a page, that regions are cut from.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    layout: Layout,
}

const PAGE: usize = 4096;

// SAFETY: the bytes are the arena's own, reached only through regions, which may be used from any thread.
unsafe impl Send for Arena {}
// SAFETY: as above; a shared arena offers nothing but its length.
unsafe impl Sync for Arena {}

impl Arena {
    /// An arena of `len` bytes, zeroed. Without memory for it the process ends, as for any other Rust allocation.
    pub fn new(len: usize) -> Arena {
        let layout = || Layout::array::<u8>(len).unwrap_or(Layout::new::<u8>());
        Arena::try_new(len).unwrap_or_else(|| handle_alloc_error(layout()))
    }

    /// An arena of `len` bytes, zeroed; `None` where there is no memory for it.
    pub fn try_new(len: usize) -> Option<Arena> {
        let layout = Layout::from_size_align(len, PAGE).ok()?;
        if len == 0 {
            return Some(Arena { start: NonNull::dangling(), layout });
        }
        // SAFETY: the layout must not be empty; because `len` is not 0.
        NonNull::new(unsafe { alloc_zeroed(layout) }).map(|start| Arena { start, layout })
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Whether the arena has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The whole arena. The region is valid for as long as the arena lives.
    pub fn region(&mut self) -> Region {
        // SAFETY: the bytes are ours and initialised; `&mut self` shows that no reference into them is alive.
        unsafe { Region::new(self.start.as_ptr(), self.len()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if !self.is_empty() {
            // SAFETY: the memory must come from this allocator with this layout; because `try_new` got it so.
            unsafe { dealloc(self.start.as_ptr(), self.layout) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_copied_and_nothing_beside_it() {
        let mut arena = Arena::new(10);
        let region = arena.region();
        region.part(2, 3).write(&[7, 8, 9]);
        region.part(5, 3).copy_from(region.part(2, 3));
        let mut bytes = [0; 10];
        region.read(&mut bytes);
        assert_eq!(bytes, [0, 0, 7, 8, 9, 7, 8, 9, 0, 0]);
    }

    #[test]
    fn an_arena_is_zeroed_aligned_to_a_page_and_refused_where_there_is_no_memory() {
        let mut arena = Arena::new(5000);
        let mut bytes = [1; 5000];
        arena.region().read(&mut bytes);
        assert_eq!(bytes, [0; 5000]);
        assert_eq!(arena.region().as_ptr() as usize % PAGE, 0);
        // An allocation that nobody looks at need not be made.
        assert!(std::hint::black_box(Arena::try_new(isize::MAX as usize - PAGE)).is_none());
        assert!(Arena::try_new(usize::MAX).is_none());
        assert!(Arena::new(0).region().is_empty());
    }

    #[test]
    #[should_panic(expected = "part 8+3 of a region of 10 bytes")]
    fn a_part_beyond_the_end_is_refused() {
        Arena::new(10).region().part(8, 3);
    }
}
