//! Runs of bytes that belong to somebody else: user buffers, shared mappings, scratch.
//!
//! A [`Region`] is a pointer and a length and nothing more. What is on a device or in another process is a region of another
//! type, which has no way to read or write it ([`DeviceRegion`], [`PeerRegion`]). A region is never a Rust reference, since several ranks (and,
//! for shared mappings, several processes) read and write the memory behind it as the plan says; the verifier proves
//! that no two of them conflict. Making a region that nothing bounds is the unsafe act; using one is checked against its
//! length. What an owner of this module gives out safely borrows from it ([`Bytes`]).

mod cache;
mod copy;
mod limits;
pub mod mapping;
pub mod objects;
pub mod shared;
pub mod vectored;

pub use copy::stream_bytes;
use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// The space of addresses that this process reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InProcess {}

/// The space of a communicator's device: a GPU's memory, or the host's where that is the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDevice {}

/// The space of another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InPeer {}

/// A run of bytes of whoever owns them for `'a`. Only those in this process can be read and written here; of others there is
/// an address and a length.
#[derive(Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Bytes<'a, Space = InProcess> {
    start: *mut u8,
    len: usize,
    owner: PhantomData<(&'a (), Space)>,
}

/// A run of bytes whose owner is not known to the compiler: whoever made it has promised that they last ([`Bytes::new`]).
pub type Region = Bytes<'static>;

/// A run of bytes on a communicator's device, which nothing but the device reads or writes:
///
/// ```compile_fail,E0599
/// strata::memory::DeviceRegion::EMPTY.write(&[]);
/// ```
pub type DeviceRegion = Bytes<'static, OnDevice>;

/// A run of bytes of another process.
pub type PeerRegion = Bytes<'static, InPeer>;

impl<Space> Clone for Bytes<'_, Space> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Space> Copy for Bytes<'_, Space> {}

// SAFETY: the bytes must be usable from any thread; because whoever made the region promised it (`Bytes::new`). That
// no two uses of them conflict is the plan's promise, not the type's.
unsafe impl<Space> Send for Bytes<'_, Space> {}
// SAFETY: shared use must do no more than owned use; because a region is `Copy`, and its methods take `&self`.
unsafe impl<Space> Sync for Bytes<'_, Space> {}

impl<'a, Space> Bytes<'a, Space> {
    /// A region of no bytes.
    pub const EMPTY: Bytes<'a, Space> = Bytes::at(std::ptr::null_mut(), 0);

    const fn at(start: *mut u8, len: usize) -> Bytes<'a, Space> {
        Bytes { start, len, owner: PhantomData }
    }

    /// A region over `len` bytes at `start`.
    ///
    /// # Safety
    /// The bytes must be readable (and writable, where the region is written) in their space for as long as the region or a
    /// part of it is in use, from any thread, and no Rust reference to them may be alive in that time. The lifetime is the
    /// caller's to choose: an owner ties it to itself.
    pub const unsafe fn new(start: *mut u8, len: usize) -> Bytes<'a, Space> {
        Bytes::at(start, len)
    }

    /// The first byte's address, in its space.
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// This region and the `next` one together, if that begins where this one ends.
    pub fn followed_by(&self, next: Bytes<'a, Space>) -> Option<Bytes<'a, Space>> {
        let is_next = self.start.wrapping_add(self.len) == next.start;
        is_next.then(|| Bytes::at(self.start, self.len + next.len))
    }

    /// Whether both have bytes in common.
    pub fn overlaps(&self, other: Bytes<'_, Space>) -> bool {
        let end = |start: *mut u8, len: usize| start as usize + len;
        (self.start as usize) < end(other.start, other.len) && (other.start as usize) < end(self.start, self.len)
    }

    /// The part of `len` bytes from `offset`.
    ///
    /// # Panics
    /// When the part does not lie inside the region.
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Bytes<'a, Space> {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "part {offset}+{len} of a region of {} bytes", self.len);
        Bytes::at(self.start.wrapping_add(offset), len)
    }
}

impl DeviceRegion {
    /// The same bytes, as ones that this process reads and writes.
    ///
    /// # Safety
    /// The device must be the host, or whoever gets them, like an MPI that takes addresses of a device, know that it is not.
    pub unsafe fn in_process(self) -> Region {
        Bytes::at(self.start, self.len)
    }

    /// The same of a list.
    ///
    /// # Safety
    /// As of [`in_process`](DeviceRegion::in_process), for each.
    pub unsafe fn all_in_process(list: &[DeviceRegion]) -> &[Region] {
        // SAFETY: the two types must have one layout; because they are one `repr(C)` structure whose parameter is in no field.
        unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), list.len()) }
    }
}

impl<'a> Bytes<'a> {
    /// The same bytes, with nothing that keeps their owner.
    ///
    /// # Safety
    /// The owner must outlive every use of the region and of its parts.
    pub unsafe fn unbound(self) -> Region {
        Bytes::at(self.start, self.len)
    }

    /// The same bytes, where the host is the device.
    pub fn as_device(self) -> Bytes<'a, OnDevice> {
        Bytes::at(self.start, self.len)
    }

    /// The same bytes, as another process names them.
    pub fn as_peer(self) -> Bytes<'a, InPeer> {
        Bytes::at(self.start, self.len)
    }

    /// The first byte's address.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Copies the bytes of `source`, which has the same length; the two may overlap.
    pub fn copy_from(&self, source: Bytes<'_>) {
        self.copy_part_from(source, self.len);
    }

    /// The same, of a part of a result of `total` bytes: that bypasses the cache if it would fill it.
    pub fn copy_part_from(&self, source: Bytes<'_>, total: usize) {
        assert_eq!(self.len, source.len, "copy between regions of different lengths");
        if self.len == 0 || self.start == source.start {
            return;
        }
        // SAFETY: both must be valid for `len` bytes, and nobody write to them meanwhile; because whoever made them
        // promised the one (`Bytes::new`), and the verified plan the other.
        unsafe { copy::copy(source.start, self.start, self.len, total) }
    }

    /// Copies the bytes of a slice of the same length into the region.
    pub fn write(&self, bytes: &[u8]) {
        assert_eq!(self.len, bytes.len(), "write of a different length");
        if self.len > 0 {
            // SAFETY: the region must be writable for `len` bytes and apart from `bytes`; because whoever made it
            // promised that (`Bytes::new`): no reference to its bytes is alive.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, self.len) }
        }
    }

    /// Copies the region's bytes into a slice of the same length.
    pub fn read(&self, bytes: &mut [u8]) {
        assert_eq!(self.len, bytes.len(), "read of a different length");
        if self.len > 0 {
            // SAFETY: the region must be readable for `len` bytes and apart from `bytes`; because whoever made it
            // promised that (`Bytes::new`): no reference to its bytes is alive.
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

// SAFETY: the memory must not belong to a thread; because it is an allocation, reached only through regions, which may
// be used from any.
unsafe impl Send for Arena {}
// SAFETY: shared use must be harmless; because `&Arena` gives nothing but the length.
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

    /// The whole arena, for the rest of the process: it is never freed.
    pub fn leak(self) -> Region {
        let mut kept = std::mem::ManuallyDrop::new(self);
        // SAFETY: the arena must outlive every use; because it is never dropped.
        unsafe { kept.region().unbound() }
    }

    /// The whole arena. The region borrows from it:
    ///
    /// ```compile_fail,E0716
    /// let region = strata::memory::Arena::new(64).region();
    /// region.write(&[0; 64]);
    /// ```
    pub fn region(&mut self) -> Bytes<'_> {
        // SAFETY: the bytes must be usable and without references while the region is; because they are ours, initialised,
        // nothing here makes a reference, and the region borrows from the arena.
        unsafe { Bytes::new(self.start.as_ptr(), self.len()) }
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
        // An allocation that nobody looks at need not be made. Miri ends where memory does.
        assert!(cfg!(miri) || std::hint::black_box(Arena::try_new(isize::MAX as usize - PAGE)).is_none());
        assert!(Arena::try_new(usize::MAX).is_none());
        assert!(Arena::new(0).region().is_empty());
    }

    #[test]
    #[should_panic(expected = "part 8+3 of a region of 10 bytes")]
    fn a_part_beyond_the_end_is_refused() {
        Arena::new(10).region().part(8, 3);
    }
}
