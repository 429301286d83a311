//! Memory for `ncclMemAlloc` that other processes of the node can map.
//!
//! A process has one heap: a memory file that grows, cut into page-aligned allocations, each mapped on its own. One
//! file means one descriptor however many allocations there are. A freed allocation's pages are given back at once (a
//! hole is punched), so mappings of it that peers still hold cost no memory.
//!
//! A peer learns where bytes lie as a [`SegmentKey`] and an offset, and maps the allocation through
//! `/proc/<pid>/fd/<fd>` ([`map_peer`]). Mappings are kept until no communicator has the peer any more ([`Met`]), the least
//! recently used go first; a generation number tells an allocation from a later one in the same place.

use super::mapping::{Access, Mapping};
use super::{limits, Bytes, Region};
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::process::{above_standard, check_file_size};
use rustix::fs::{FallocateFlags, MemfdFlags};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

const PAGE: usize = 4096;
/// Allocations of at least this size begin at a multiple of it, so that huge pages fit.
const HUGE_PAGE: usize = 2 << 20;
/// Allocations of at least this size are taken only where memory is available, and this much at a time.
const CHECKED: usize = 1 << 20;
const PIECE: u64 = 256 << 20;
/// Mappings of peers' allocations kept at most.
const MAX_MAPPED: usize = 512;

/// Names an allocation to other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SegmentKey {
    /// The owner's process number.
    pub pid: u32,
    /// The heap's descriptor in the owner.
    pub fd: u32,
    /// The heap's inode, which shows that the descriptor is what it should be.
    pub inode: u64,
    /// Where the allocation begins in the heap.
    pub start: u64,
    /// The allocation's bytes, whole pages.
    pub len: u64,
    /// The number of the allocation; never used twice.
    pub generation: u64,
}

struct Heap {
    pid: u32,
    file: OwnedFd,
    inode: u64,
    size: u64,
    free: BTreeMap<u64, u64>,
    generations: u64,
    live: BTreeMap<usize, Allocation>,
}

struct Allocation {
    mapping: Mapping,
    key: SegmentKey,
}

/// A forked child may use what it inherited, but not free it: the pages are its parent's.
static HEAP: PerProcess<RwLock<Option<Heap>>> = PerProcess::new(RwLock::default);
/// Bounds of all addresses ever allocated: most look-ups are for ordinary memory and end here.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// Allocates `bytes` (at least one page), zeroed and present in memory.
pub fn allocate(bytes: usize) -> Result<NonNull<u8>> {
    let len = bytes.max(1).checked_next_multiple_of(PAGE);
    let len = len.ok_or_else(|| Error::InvalidArgument(format!("no allocation has {bytes} bytes")))?;
    let mut slot = HEAP.get().write().unwrap_or_else(PoisonError::into_inner);
    if slot.is_none() {
        *slot = Some(Heap::new()?);
    }
    slot.as_mut().expect("the heap was made above").allocate(len)
}

/// Frees what [`allocate`] returned.
pub fn free(start: *mut u8) -> Result<()> {
    let mut slot = HEAP.get().write().unwrap_or_else(PoisonError::into_inner);
    let unknown = || Error::InvalidArgument(format!("{start:p} was not allocated by ncclMemAlloc"));
    slot.as_mut().ok_or_else(unknown)?.free(start as usize).ok_or_else(unknown)
}

/// The allocation that holds all of `len` bytes at `address`, and where in it they begin.
pub fn find(address: usize, len: usize) -> Option<(SegmentKey, usize)> {
    let end = address.checked_add(len)?;
    if address < LOWEST.load(Ordering::Relaxed) || end > HIGHEST.load(Ordering::Relaxed) {
        return None;
    }
    let slot = HEAP.get().read().unwrap_or_else(PoisonError::into_inner);
    let (start, allocation) = slot.as_ref()?.live.range(..=address).next_back()?;
    let offset = address - start;
    (offset + len <= allocation.mapping.region().len()).then_some((allocation.key, offset))
}

impl Heap {
    fn new() -> Result<Heap> {
        let failed = |error: rustix::io::Errno| Error::System(format!("making shared memory: {error}"));
        let file = above_standard(rustix::fs::memfd_create("strata-heap", MemfdFlags::CLOEXEC).map_err(failed)?);
        let inode = rustix::fs::fstat(&file).map_err(failed)?.st_ino;
        Ok(Heap {
            pid: std::process::id(),
            file,
            inode,
            size: 0,
            free: BTreeMap::new(),
            generations: 0,
            live: BTreeMap::new(),
        })
    }

    fn allocate(&mut self, len: usize) -> Result<NonNull<u8>> {
        let start = self.reserve(len as u64)?;
        let mapping = self.fill(start, len).inspect_err(|_| self.give_back(start, len as u64))?;
        self.generations += 1;
        let generation = self.generations;
        let fd = self.file.as_raw_fd() as u32;
        let key = SegmentKey { pid: self.pid, fd, inode: self.inode, start, len: len as u64, generation };
        let address = mapping.region().as_ptr();
        LOWEST.fetch_min(address as usize, Ordering::Relaxed);
        HIGHEST.fetch_max(address as usize + len, Ordering::Relaxed);
        self.live.insert(address as usize, Allocation { mapping, key });
        NonNull::new(address).ok_or_else(|| Error::Internal("a mapping at address 0".into()))
    }

    fn free(&mut self, address: usize) -> Option<()> {
        let allocation = self.live.remove(&address)?;
        let SegmentKey { start, len, .. } = allocation.key;
        drop(allocation);
        self.give_back(start, len);
        Some(())
    }

    /// Takes memory for a run and maps it.
    fn fill(&self, start: u64, len: usize) -> Result<Mapping> {
        let end = start + len as u64;
        let mut at = start;
        // In pieces, so that several processes that take memory at once see what is left in between.
        while len >= CHECKED && at < end {
            limits::check(end - at)?;
            let piece = PIECE.min(end - at);
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, FallocateFlags::empty(), at, piece))
                .map_err(|error| Error::System(format!("taking {piece} bytes of {len} of shared memory: {error}")))?;
            at += piece;
        }
        Mapping::new(&self.file, start, len, Access::ReadWrite, true)
            .map_err(|error| Error::System(format!("mapping {len} bytes of shared memory: {error}")))
    }

    /// Returns a run's pages to the system and the run to the heap.
    fn give_back(&mut self, start: u64, len: u64) {
        let _ = rustix::fs::fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, len);
        self.release(start, len);
    }

    /// Takes `len` bytes of the file: the first free run that is long enough, or new ones at its end.
    fn reserve(&mut self, len: u64) -> Result<u64> {
        let align = if len >= HUGE_PAGE as u64 { HUGE_PAGE } else { PAGE } as u64;
        let fits = |(&start, &run): (&u64, &u64)| {
            let at = start.next_multiple_of(align);
            (at + len <= start + run).then_some((start, run, at))
        };
        let (start, run, at) = match self.free.iter().find_map(fits) {
            Some(found) => found,
            None => {
                let at = self.size.next_multiple_of(align);
                check_file_size(at + len)
                    .and_then(|()| Ok(rustix::fs::ftruncate(&self.file, at + len)?))
                    .map_err(|error| Error::System(format!("growing shared memory by {len} bytes: {error}")))?;
                let grown = (self.size, at + len - self.size, at);
                self.size = at + len;
                grown
            }
        };
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + len < start + run {
            self.free.insert(at + len, start + run - at - len);
        }
        Ok(at)
    }

    /// Puts a run back, joined with free neighbours.
    fn release(&mut self, mut start: u64, mut len: u64) {
        if let Some(after) = self.free.remove(&(start + len)) {
            len += after;
        }
        let before = self.free.range(..start).next_back().map(|(&at, &run)| (at, run));
        if let Some((at, run)) = before.filter(|(at, run)| at + run == start) {
            start = at;
            len += run;
        }
        self.free.insert(start, len);
    }
}

/// Another process's heap, or our own, and how many have met it.
struct PeerFile {
    file: OwnedFd,
    met: usize,
}

/// Other processes' heaps and the allocations of theirs that are mapped here.
#[derive(Default)]
struct Peers {
    files: HashMap<(u32, u64), PeerFile>,
    mapped: HashMap<SegmentKey, (Arc<Mapping>, u64)>,
    clock: u64,
}

static PEERS: PerProcess<Mutex<Peers>> = PerProcess::new(Mutex::default);

/// The bytes of another process's allocation, for reading. `None` when that process does not let us map it.
pub fn map_peer(key: &SegmentKey) -> Option<Arc<Mapping>> {
    key.start.checked_add(key.len)?;
    let mut peers = PEERS.get().lock().unwrap_or_else(PoisonError::into_inner);
    let peers = &mut *peers;
    peers.clock += 1;
    let now = peers.clock;
    if let Some((mapping, used)) = peers.mapped.get_mut(key) {
        *used = now;
        return Some(mapping.clone());
    }
    peers.evict(key);
    let heap = peers.heap(key.pid, key.fd, key.inode)?;
    let mapping = Arc::new(Mapping::new(&heap.file, key.start, key.len as usize, Access::Read, true).ok()?);
    peers.mapped.insert(*key, (mapping.clone(), now));
    Some(mapping)
}

impl Peers {
    /// The heap of another process, opened if it is not yet.
    fn heap(&mut self, pid: u32, fd: u32, inode: u64) -> Option<&mut PeerFile> {
        Some(match self.files.entry((pid, inode)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(PeerFile { file: open_heap(pid, fd, inode)?, met: 0 }),
        })
    }

    /// Drops mappings of what lay where `key` lies now, and the least recently used one when there are too many.
    fn evict(&mut self, key: &SegmentKey) {
        let end = key.start + key.len;
        self.mapped.retain(|old, _| {
            (old.pid, old.inode) != (key.pid, key.inode) || old.start >= end || old.start + old.len <= key.start
        });
        if self.mapped.len() >= MAX_MAPPED {
            let oldest = self.mapped.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            oldest.and_then(|key| self.mapped.remove(&key));
        }
        let Peers { files, mapped, .. } = self;
        if files.len() >= MAX_MAPPED {
            files.retain(|file, heap| heap.met > 0 || mapped.keys().any(|key| (key.pid, key.inode) == *file));
        }
    }
}

/// A heap that was opened by [`meet`]. With the last one of a process go the heap and what is mapped of it.
#[derive(Debug)]
pub struct Met {
    pid: u32,
    inode: u64,
}

impl Drop for Met {
    fn drop(&mut self) {
        let mut peers = PEERS.get().lock().unwrap_or_else(PoisonError::into_inner);
        let Peers { files, mapped, .. } = &mut *peers;
        // A forked child has nothing of its parent's.
        let Some(heap) = files.get_mut(&(self.pid, self.inode)) else { return };
        heap.met -= 1;
        if heap.met == 0 {
            files.remove(&(self.pid, self.inode));
            mapped.retain(|key, _| (key.pid, key.inode) != (self.pid, self.inode));
        }
    }
}

/// Opens the heap of another process (numbered as here) for [`map_peer`], so that it can be mapped for as long as the
/// process lives, also when it may not be opened any more. None if that did not work.
pub fn meet(pid: u32, fd: u32, inode: u64) -> Option<Met> {
    let mut peers = PEERS.get().lock().unwrap_or_else(PoisonError::into_inner);
    peers.heap(pid, fd, inode)?.met += 1;
    Some(Met { pid, inode })
}

/// The heap's descriptor and inode, for others to [`meet`] it. The heap is made if there is none.
pub fn heap() -> Result<(u32, u64)> {
    let mut slot = HEAP.get().write().unwrap_or_else(PoisonError::into_inner);
    if slot.is_none() {
        *slot = Some(Heap::new()?);
    }
    let heap = slot.as_ref().expect("the heap was made above");
    Ok((heap.file.as_raw_fd() as u32, heap.inode))
}

/// Opens a heap: our own, which needs no rights, or another process's.
fn open_heap(pid: u32, fd: u32, inode: u64) -> Option<OwnedFd> {
    let slot = HEAP.get().read().unwrap_or_else(PoisonError::into_inner);
    match slot.as_ref().filter(|heap| heap.inode == inode) {
        Some(heap) => heap.file.try_clone().ok().map(above_standard),
        None => open_peer(pid, fd, inode),
    }
}

/// Opens a memory file of another process, and makes sure that it is the one meant: where that process counts in another
/// PID namespace, its number is somebody else's here, or nobody's.
pub fn open_peer(pid: u32, fd: u32, inode: u64) -> Option<OwnedFd> {
    let path = format!("/proc/{pid}/fd/{fd}");
    // Looked at before it is opened, since opening a device or a pipe of a stranger has effects.
    let named = std::fs::read_link(&path).ok()?;
    named.as_os_str().as_encoded_bytes().starts_with(b"/memfd:strata-").then_some(())?;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    (stat.st_ino == inode).then(|| above_standard(file.into()))
}

/// The bytes of an allocation of this process; for tests and for the owner itself.
///
/// # Safety
/// The allocation must not be freed before every use has ended.
pub unsafe fn region_of(start: NonNull<u8>) -> Option<Region> {
    let slot = HEAP.get().read().unwrap_or_else(PoisonError::into_inner);
    let region = slot.as_ref()?.live.get(&(start.as_ptr() as usize))?.mapping.region();
    // SAFETY: the mapping must outlive every use; because it stays until the allocation is freed, and the caller promises
    // the rest.
    Some(unsafe { region.unbound() })
}

/// Shared memory of our own, freed with the value.
#[derive(Debug)]
pub struct Owned(Region);

impl Owned {
    /// `bytes` of shared memory, zeroed.
    pub fn new(bytes: usize) -> Result<Owned> {
        let start = allocate(bytes)?;
        // SAFETY: the allocation must not be freed before every use has ended; because the value frees it, and lends its
        // region only.
        let region =
            unsafe { region_of(start) }.ok_or_else(|| Error::Internal("an allocation is not found".to_string()))?;
        Ok(Owned(region))
    }

    /// Its bytes.
    pub fn region(&self) -> Bytes<'_> {
        self.0
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // A forked child does not have its parent's heap; then there is nothing of ours to free.
        let _ = free(self.0.as_ptr());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_is_found_from_any_address_inside_and_seen_through_its_key() {
        let start = allocate(10_000).unwrap();
        // SAFETY: the allocation must be there; because it is freed below, after the last use.
        let region = unsafe { region_of(start) }.unwrap();
        region.part(5000, 3).write(&[7, 8, 9]);
        let (key, offset) = find(start.as_ptr() as usize + 5000, 3).unwrap();
        assert_eq!(offset, 5000);
        let mapping = map_peer(&key).unwrap();
        let mut bytes = [0; 3];
        mapping.region().part(offset, 3).read(&mut bytes);
        assert_eq!(bytes, [7, 8, 9]);
        assert!(find(start.as_ptr() as usize + 5000, 8000).is_none(), "beyond the end");
        free(start.as_ptr()).unwrap();
        assert!(find(start.as_ptr() as usize, 1).is_none());
        assert!(free(start.as_ptr()).is_err());
    }

    #[test]
    fn ten_thousand_allocations_leak_neither_descriptors_nor_file_nor_mappings() {
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        allocate(1).unwrap();
        let before = descriptors();
        for round in 0..10_000 {
            let start = allocate(1 + round % 9000).unwrap();
            let (key, _) = find(start.as_ptr() as usize, 1).unwrap();
            let mapping = map_peer(&key).unwrap();
            assert_eq!(key.len as usize, mapping.region().len());
            free(start.as_ptr()).unwrap();
        }
        assert!(descriptors() < before + 50, "other tests open some");
        assert!(PEERS.get().lock().unwrap().mapped.len() <= MAX_MAPPED);
        assert!(HEAP.get().read().unwrap().as_ref().unwrap().size < 1 << 30);
    }

    #[test]
    fn mappings_of_a_peer_go_with_the_last_that_has_met_it() {
        let other = Heap::new().unwrap();
        let met = [(); 2].map(|()| meet(other.pid, other.file.as_raw_fd() as u32, other.inode).unwrap());
        rustix::fs::ftruncate(&other.file, PAGE as u64).unwrap();
        let fd = other.file.as_raw_fd() as u32;
        let key =
            SegmentKey { pid: other.pid, fd, inode: other.inode, start: 0, len: PAGE as u64, generation: u64::MAX };
        let mapping = Arc::downgrade(&map_peer(&key).unwrap());
        let [one, two] = met;
        drop(one);
        assert!(mapping.upgrade().is_some());
        drop(two);
        assert!(mapping.upgrade().is_none());
        assert!(!PEERS.get().lock().unwrap().files.contains_key(&(other.pid, other.inode)));
    }

    #[test]
    fn memory_that_is_reused_is_zeroed_and_mapped_anew() {
        let first = allocate(PAGE).unwrap();
        // SAFETY: the allocation must be there; because it is freed after this.
        unsafe { region_of(first) }.unwrap().write(&[1; PAGE]);
        let (old, _) = find(first.as_ptr() as usize, 1).unwrap();
        map_peer(&old).unwrap();
        free(first.as_ptr()).unwrap();
        let second = allocate(PAGE).unwrap();
        let (new, _) = find(second.as_ptr() as usize, 1).unwrap();
        assert_ne!(old.generation, new.generation);
        let mut byte = [1];
        map_peer(&new).unwrap().region().part(0, 1).read(&mut byte);
        assert_eq!(byte, [0]);
        free(second.as_ptr()).unwrap();
    }
}
