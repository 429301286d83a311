//! The shared segment of one communicator on one node: its layout, and safe access to it.
//!
//! ```text
//! wakeups     one cache line per local rank: whether it sleeps, and how it wants to be woken
//! controls  one set of cache lines per ordered pair, [to][from]: positions and acknowledgements
//! rings     one per ordered pair, [to][from]: records, from the sender to the receiver
//! processors  a few lines for all, and one for each processor: when ranks were on it
//! places    lines of each local rank: which processors it may run on
//! cells     cache lines of each local rank: what its board's faces hold, how far it has read, what it cannot read
//! boards    of each local rank: pages for its part of a short call, and areas for that of a long one
//! ```
//! Pages are touched only where ranks exchange messages, so the rings of pairs that never do cost nothing.

use crate::error::{Error, Result};
use crate::memory::mapping::{Access, Mapping};
use crate::memory::Bytes;
#[cfg(test)]
use crate::memory::{Arena, Region};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64};

const PAGE: usize = 4096;

/// A value with a cache line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Line<T>(pub T);

/// How a rank sleeps.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct WakeupCell {
    /// One of the states of [`super::wakeup`]; also the futex word.
    pub state: AtomicU32,
    /// A peer could not reach the rank's doorbell: it must not sleep long.
    pub deaf: AtomicU32,
}

/// One bit per slot of a sender's table of messages in flight.
pub const SLOTS: usize = 512;

/// Bits that one side sets and the other takes.
pub type SlotBits = [AtomicU64; SLOTS / 64];

/// What the two ends of an ordered pair tell each other besides records.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Control {
    /// Bytes ever consumed; the receiver's.
    pub head: Line<AtomicU64>,
    /// The sender waits for space; set by the sender, taken by the receiver.
    pub hungry: Line<AtomicU32>,
    /// Messages received; set by the receiver, taken by the sender.
    pub acked: Line<SlotBits>,
    /// Messages that shall come through the ring; set by the receiver, taken by the sender.
    pub granted: Line<SlotBits>,
    /// The sender has cancelled: its memory must not be touched any more.
    pub cancelled: Line<AtomicU32>,
    /// The receiver is reading the sender's memory directly.
    pub reading: Line<AtomicU32>,
}

/// ProcessorCells that are told apart; of machines with more, some share a line.
pub const PROCESSORS: usize = 512;

/// What the ranks know of the node's processors. Times are in ns of the system's monotonic clock.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct ProcessorCells {
    /// Whether a rank publishes by plain stores; see [`super::wakeup`].
    pub light: Line<AtomicU32>,
    /// Until when they are taken to be busy.
    pub busy_until: Line<AtomicU64>,
    /// For how long that was said.
    pub busy_ns: Line<AtomicU64>,
    /// When a rank was last on each of them.
    pub touched: [Line<AtomicU64>; PROCESSORS],
}

/// Where a local rank may run.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct PlaceCells {
    /// One bit for each processor that is told apart.
    pub processors: Line<[AtomicU64; PROCESSORS / 64]>,
    /// How many of them it may use at a time; 0 until it has told.
    pub most: Line<AtomicU64>,
    /// Whether its process can take part in fences between processes.
    pub fences: Line<AtomicU32>,
    /// The processor on which it last began to wait, plus one.
    pub waits_on: Line<AtomicU64>,
}

/// The first bytes of a face's cache line. What follows in the line is written as bytes, before `call`.
#[derive(Debug)]
#[repr(C, align(16))]
pub struct FaceCell {
    /// The number of the call; stored last.
    pub call: AtomicU64,
    /// What is posted, and of which operation: see [`super::post`].
    pub check: AtomicU64,
}

/// What a rank tells about its board beside what it posts.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct BoardLines {
    /// The number of the last call in which this rank has read all it needs.
    pub read: Line<AtomicU64>,
    /// The number of the last call of which it could not read a part that lies in its poster's memory.
    pub refused: Line<AtomicU64>,
    /// The number of the last call whose part it has copied because somebody could not read it.
    pub copied: AtomicU64,
    /// Whether it can read the memory of all others: 0 until it has told, then [`READS`] or [`READS_NOT`].
    pub reads: AtomicU32,
    /// What it tells of its last long calls.
    pub times: BoardTimes,
}

/// Of how many of its last calls a rank's times are there: more than it may be behind those who post.
pub const TIMES: usize = 4;

/// When a rank was where in its last long calls, by their numbers.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct BoardTimes {
    /// When it began the call.
    pub begun: [AtomicU64; TIMES],
    /// When it had read all it needs of it.
    pub ended: [AtomicU64; TIMES],
}

/// See [`BoardLines::reads`].
pub const READS: u32 = 1;
/// See [`BoardLines::reads`].
pub const READS_NOT: u32 = 2;

/// One face of a rank's board.
#[derive(Debug, Clone, Copy)]
pub struct Face<'a> {
    /// Whose post it is.
    pub cell: &'a FaceCell,
    /// The rest of the cell's cache line.
    pub line: Bytes<'a>,
    segment: &'a Segment,
    /// Where the page is.
    page_at: usize,
}

impl<'a> Face<'a> {
    /// Room for a short post. Some faces have one page.
    pub fn page(&self) -> Bytes<'a> {
        self.segment.region().part(self.page_at, PAGE_BYTES)
    }

    /// Has its line brought, and as much of its page as so many bytes take, to be written soon: others have read them, and a
    /// write that is to be seen waits for theirs.
    #[inline]
    pub fn own_soon(&self, page_bytes: usize) {
        own(std::ptr::from_ref(self.cell).cast());
        if page_bytes > 0 {
            let page = self.page();
            (0..page_bytes.min(SOON_BYTES)).step_by(64).for_each(|at| own(page.as_ptr().wrapping_add(at)));
        }
    }
}

/// Bytes of a page that are brought before they are written.
const SOON_BYTES: usize = 512;

/// Has the cache line at an address brought to be written.
#[inline]
fn own(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the instruction must change nothing; because it is a hint, which processors without it pass over.
    unsafe {
        std::arch::asm!("prefetchw [{line}]", line = in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = line;
}

/// Bytes of an area on a node of so many ranks. Only what is used of it takes memory.
pub const fn area_bytes(ranks: usize) -> usize {
    match ranks {
        0..=2 => 8 << 20,
        _ => 512 << 10,
    }
}

/// Areas of a board, for posts that are longer than a face's page.
pub const AREAS: usize = 2;
/// Bytes of a page.
pub const PAGE_BYTES: usize = 16 << 10;
/// Faces of a board: a rank that only posts is at most so many calls ahead of those that read.
pub const FACES: usize = 128;
/// Pages of a board, for posts that are longer than a line.
pub const PAGES: usize = 32;
/// Bytes of a post that go into the face's cache line.
pub const LINE_BYTES: usize = 64 - size_of::<FaceCell>();
const CELLS_BYTES: usize = FACES * 64 + size_of::<BoardLines>();

/// The mapped segment.
#[derive(Debug)]
pub struct Segment {
    memory: SegmentMemory,
    ranks: usize,
    /// Where cells and boards begin, which every call asks for.
    cells_at: usize,
    boards_at: usize,
    board_bytes: usize,
}

#[derive(Debug)]
enum SegmentMemory {
    Mapped(Mapping),
    /// Of this process alone, for ranks that are threads under a checker that knows no mappings.
    #[cfg(test)]
    Heap(Region, #[allow(dead_code, reason = "the region's memory")] Arena),
}

/// Bytes of each ring on a node of so many ranks.
pub const fn ring_bytes(ranks: usize) -> usize {
    match ranks {
        0..=16 => 256 << 10,
        17..=64 => 64 << 10,
        _ => 32 << 10,
    }
}

fn controls_at(ranks: usize) -> usize {
    (ranks * size_of::<WakeupCell>()).next_multiple_of(PAGE)
}

fn rings_at(ranks: usize) -> usize {
    (controls_at(ranks) + ranks * ranks * size_of::<Control>()).next_multiple_of(PAGE)
}

fn processors_at(ranks: usize) -> usize {
    rings_at(ranks) + ranks * ranks * ring_bytes(ranks)
}

fn places_at(ranks: usize) -> usize {
    processors_at(ranks) + size_of::<ProcessorCells>()
}

fn cells_at(ranks: usize) -> usize {
    (places_at(ranks) + ranks * size_of::<PlaceCells>()).next_multiple_of(PAGE)
}

fn board_bytes(ranks: usize) -> usize {
    PAGES * PAGE_BYTES + AREAS * area_bytes(ranks)
}

fn boards_at(ranks: usize) -> usize {
    (cells_at(ranks) + ranks * CELLS_BYTES).next_multiple_of(PAGE)
}

impl Segment {
    /// Bytes of the segment for so many local ranks.
    pub fn bytes(ranks: usize) -> usize {
        boards_at(ranks) + ranks * board_bytes(ranks)
    }

    /// Maps a file of [`Segment::bytes`] bytes, all zero when it was made.
    pub fn map(file: impl AsFd, ranks: usize) -> Result<Segment> {
        let mapping = Mapping::new(file, 0, Segment::bytes(ranks), Access::ReadWrite, false)
            .map_err(|error| Error::System(format!("mapping the node's shared segment: {error}")))?;
        Ok(Segment::of(SegmentMemory::Mapped(mapping), ranks))
    }

    fn of(memory: SegmentMemory, ranks: usize) -> Segment {
        let (cells_at, boards_at, board_bytes) = (cells_at(ranks), boards_at(ranks), board_bytes(ranks));
        Segment { memory, ranks, cells_at, boards_at, board_bytes }
    }

    /// A segment of this process alone.
    #[cfg(test)]
    pub fn of_heap(ranks: usize) -> Segment {
        let mut arena = Arena::new(Segment::bytes(ranks));
        // SAFETY: the arena must outlive every use; because the segment has it, and gives the region out borrowed.
        let region = unsafe { arena.region().unbound() };
        Segment::of(SegmentMemory::Heap(region, arena), ranks)
    }

    #[inline]
    fn region(&self) -> Bytes<'_> {
        match &self.memory {
            SegmentMemory::Mapped(mapping) => mapping.region(),
            #[cfg(test)]
            SegmentMemory::Heap(region, _) => *region,
        }
    }

    /// How many local ranks it is for.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// A reference to atomics in the segment.
    #[inline]
    fn at<T>(&self, offset: usize) -> &T {
        let place = self.region().part(offset, size_of::<T>());
        assert!(place.as_ptr().cast::<T>().is_aligned());
        // SAFETY: the place must hold a T and be written only through atomics; because it lies inside the mapping, is
        // aligned, T consists of atomic integers (any bits are valid), and no ring overlaps it.
        unsafe { &*place.as_ptr().cast::<T>() }
    }

    /// The wakeup of a local rank.
    #[inline]
    pub fn wakeup_cell(&self, local: usize) -> &WakeupCell {
        assert!(local < self.ranks);
        self.at(local * size_of::<WakeupCell>())
    }

    /// What ranks know of the node's processors.
    pub fn processors(&self) -> &ProcessorCells {
        self.at(processors_at(self.ranks))
    }

    /// Where a local rank may run.
    pub fn place(&self, local: usize) -> &PlaceCells {
        assert!(local < self.ranks);
        self.at(places_at(self.ranks) + local * size_of::<PlaceCells>())
    }

    /// What a local rank tells about its board.
    #[inline]
    pub fn board(&self, local: usize) -> &BoardLines {
        assert!(local < self.ranks);
        self.at(self.cells_at + local * CELLS_BYTES + FACES * 64)
    }

    /// A face of a local rank's board.
    #[inline]
    pub fn face(&self, local: usize, face: usize) -> Face<'_> {
        assert!(local < self.ranks && face < FACES);
        let cell = self.cells_at + local * CELLS_BYTES + face * 64;
        let page_at = self.boards_at + local * self.board_bytes + face % PAGES * PAGE_BYTES;
        let line = self.region().part(cell + size_of::<FaceCell>(), LINE_BYTES);
        Face { cell: self.at(cell), line, segment: self, page_at }
    }

    /// An area of a local rank's board.
    pub fn area(&self, local: usize, area: usize) -> Bytes<'_> {
        assert!(local < self.ranks && area < AREAS);
        let bytes = area_bytes(self.ranks);
        let board = self.boards_at + local * self.board_bytes;
        self.region().part(board + PAGES * PAGE_BYTES + area * bytes, bytes)
    }

    #[inline]
    fn pair(&self, from: usize, to: usize) -> usize {
        assert!(from < self.ranks && to < self.ranks);
        to * self.ranks + from
    }

    /// What `from` and `to` tell each other about messages in this direction.
    #[inline]
    pub fn control(&self, from: usize, to: usize) -> &Control {
        self.at(controls_at(self.ranks) + self.pair(from, to) * size_of::<Control>())
    }

    /// The ring from `from` to `to`.
    pub fn ring(&self, from: usize, to: usize) -> Bytes<'_> {
        let bytes = ring_bytes(self.ranks);
        self.region().part(rings_at(self.ranks) + self.pair(from, to) * bytes, bytes)
    }
}
