//! What the processes of a program share: a small file that all have mapped. Each rank writes down where it is in the
//! program, so that a watchdog can say it of a rank that hangs or is dead; and unique ids are handed over here.

use crate::library::Id;
use memmap2::MmapRaw;
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const MAX_RANKS: usize = 64;
pub const MAX_COMMS: usize = 256;
const MAX_OPS: usize = 1024;
/// The survivors of a fault meet here.
pub const LAST_MEETING: usize = MAX_OPS - 1;
const MAX_IDS: usize = 4;

#[repr(C)]
struct Shared {
    /// Ranks that have come here: nobody begins before all are there.
    started: AtomicU32,
    places: [AtomicU64; MAX_RANKS],
    arrived: [AtomicU32; MAX_OPS],
    ready: [AtomicU32; MAX_COMMS],
    ids: [[[AtomicU32; 32]; MAX_IDS]; MAX_COMMS],
}

/// The shared file.
pub struct Board(MmapRaw);

/// Where a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    NotStarted,
    /// In this operation.
    In(usize),
    /// Waits for the others of its process.
    Through,
    /// Has found something wrong.
    Failed,
}

impl Board {
    /// Makes the file, empty.
    pub fn create(path: &Path) -> std::io::Result<()> {
        std::fs::File::create(path)?.set_len(size_of::<Shared>() as u64)
    }

    /// Maps the file.
    pub fn open(path: &Path) -> std::io::Result<Board> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Board(MmapRaw::map_raw(&file)?))
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping must hold the structure; because `create` made the file that large, mappings begin on a page,
        // and all of it is atomic numbers, for which any bytes will do.
        unsafe { &*self.0.as_ptr().cast::<Shared>() }
    }

    /// Writes down where a rank is.
    pub fn note(&self, rank: usize, place: Place) {
        let number = match place {
            Place::NotStarted => 0,
            Place::Through => 1,
            Place::Failed => 2,
            Place::In(op) => op as u64 + 3,
        };
        self.shared().places[rank].store(number, Ordering::Release);
    }

    /// Where a rank is.
    pub fn place(&self, rank: usize) -> Place {
        match self.shared().places[rank].load(Ordering::Acquire) {
            0 => Place::NotStarted,
            1 => Place::Through,
            2 => Place::Failed,
            op => Place::In(op as usize - 3),
        }
    }

    /// Waits until so many ranks have come to this operation.
    pub fn meet(&self, op: usize, ranks: usize, limit: Duration) -> Result<(), String> {
        let arrived = &self.shared().arrived[op];
        arrived.fetch_add(1, Ordering::AcqRel);
        poll(limit, || arrived.load(Ordering::Acquire) as usize >= ranks, "the others did not come")
    }

    /// Waits until all ranks run.
    pub fn start(&self, ranks: usize, limit: Duration) -> Result<(), String> {
        self.shared().started.fetch_add(1, Ordering::AcqRel);
        let all = || self.shared().started.load(Ordering::Acquire) as usize >= ranks;
        poll(limit, all, "not all ranks were started")
    }

    /// Whether a communicator's ids are there.
    pub fn has_ids(&self, comm: usize) -> bool {
        self.shared().ready[comm].load(Ordering::Acquire) != 0
    }

    /// Hands over the ids of a communicator.
    pub fn put_ids(&self, comm: usize, ids: &[Id]) {
        for (slot, id) in self.shared().ids[comm].iter().zip(ids) {
            for (word, bytes) in slot.iter().zip(id.0.chunks(4)) {
                word.store(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]), Ordering::Relaxed);
            }
        }
        self.shared().ready[comm].store(1, Ordering::Release);
    }

    /// Waits for the ids of a communicator.
    pub fn ids(&self, comm: usize, count: usize, limit: Duration) -> Result<Vec<Id>, String> {
        poll(limit, || self.has_ids(comm), "nobody made the unique id")?;
        let id = |slot: &[AtomicU32; 32]| {
            let mut bytes = [0; 128];
            for (word, bytes) in slot.iter().zip(bytes.chunks_mut(4)) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
            Id(bytes)
        };
        Ok(self.shared().ids[comm][..count].iter().map(id).collect())
    }
}

fn poll(limit: Duration, done: impl Fn() -> bool, text: &str) -> Result<(), String> {
    let end = Instant::now() + limit;
    while !done() {
        if Instant::now() > end {
            return Err(text.to_string());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}
