//! Memory by address: of devices, pinned, registered, managed.
//!
//! The address of device memory lies in a range that nothing may touch, so a load or store of the host traps. What is in
//! the memory lies at an alias, which only the double knows. No address is given out twice, and freed memory traps.

use crate::context::Context;
use crate::fault::{Result, ALREADY_REGISTERED, ILLEGAL_ADDRESS, INVALID_VALUE, NOT_REGISTERED, OUT_OF_MEMORY};
use crate::reserved::{self, Physical};
use crate::settings::settings;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

/// What kind of memory a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Device memory.
    Device,
    /// Memory of host and device.
    Managed,
    /// Host memory that was allocated pinned.
    Pinned,
    /// The program's own memory, registered.
    Registered,
}

/// A range of memory that the driver knows.
pub struct Block {
    /// The first address, as the program sees it.
    pub start: u64,
    /// The length, as it was asked for.
    pub bytes: u64,
    /// The kind.
    pub kind: Kind,
    /// The device that it belongs to.
    pub device: i32,
    /// The handle of the context that it belongs to.
    pub context: usize,
    /// Where the host finds it.
    host: u64,
    /// What is mapped here, where the address was reserved.
    mapped: Option<Mapped>,
    /// Whether a stream is to free it, which nothing else may do any more.
    is_let_go: AtomicBool,
}

/// Memory at a reserved address.
pub struct Mapped {
    /// The memory.
    pub memory: Arc<Physical>,
    /// The devices that may use it, as bits.
    pub access: AtomicU64,
}

/// Fresh memory is filled with this.
pub(crate) const FRESH: u8 = 0xc5;
/// Granularity of addresses, and the gap between two blocks.
const GRANULE: u64 = 64 << 10;

static BLOCKS: RwLock<BTreeMap<u64, Arc<Block>>> = RwLock::new(BTreeMap::new());

pub(crate) fn map(bytes: u64, access: i32) -> Option<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: any length and no wished address are allowed; because nothing that is mapped is replaced.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, access, flags, -1, 0) };
    (start != libc::MAP_FAILED).then_some(start as u64)
}

/// The addresses of device memory, of which none can be touched: where they begin, and how many they are.
fn space() -> (u64, u64) {
    static SPACE: OnceLock<(u64, u64)> = OnceLock::new();
    *SPACE.get_or_init(|| {
        // A process may be limited in its addresses.
        let sizes = (34..=42).rev().map(|bits| 1u64 << bits);
        let found = sizes.into_iter().find_map(|bytes| map(bytes, libc::PROT_NONE).map(|start| (start, bytes)));
        found.expect("16 GiB of addresses")
    })
}

/// Whether an address is one of device memory, be it live or not.
fn is_of_device(address: u64) -> bool {
    let (start, bytes) = space();
    (start..start + bytes).contains(&address)
}

/// Addresses of a device for so many bytes, never given out before.
pub(crate) fn addresses(bytes: u64) -> Result<u64> {
    static USED: AtomicU64 = AtomicU64::new(0);
    let (start, size) = space();
    let taken =
        bytes.checked_next_multiple_of(GRANULE).and_then(|bytes| bytes.checked_add(GRANULE)).ok_or(OUT_OF_MEMORY)?;
    let take = |used: u64| used.checked_add(taken).filter(|end| *end <= size);
    let at = USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).map_err(|_| OUT_OF_MEMORY)?;
    Ok(start.next_multiple_of(GRANULE) + at)
}

impl Drop for Block {
    fn drop(&mut self) {
        let length = self.bytes.next_multiple_of(GRANULE) as usize;
        let start = self.host as *mut libc::c_void;
        match self.kind {
            Kind::Registered => {}
            // Another block may be there by now.
            Kind::Device if self.mapped.is_some() => {}
            // SAFETY: the range must be a mapping of its own that nobody uses; because `allocate` made it, only views
            // know it, and they hold the block.
            Kind::Device => drop(unsafe { libc::munmap(start, length) }),
            Kind::Managed | Kind::Pinned => {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
                // SAFETY: what is replaced must be nobody else's; because `allocate` made it. The addresses stay taken,
                // so that a program that still uses them traps.
                unsafe { libc::mmap(start, length, libc::PROT_NONE, flags, -1, 0) };
            }
        }
    }
}

fn live(blocks: &BTreeMap<u64, Arc<Block>>, counts: impl Fn(&Block) -> bool) -> u64 {
    blocks.values().filter(|block| counts(block)).map(|block| block.bytes).sum()
}

/// Bytes of a device that are in use.
pub fn used_bytes(device: i32) -> u64 {
    live(&BLOCKS.read().unwrap(), |block| is_of(block, device)) + reserved::physical_bytes(device)
}

fn is_of(block: &Block, device: i32) -> bool {
    block.device == device && block.mapped.is_none() && matches!(block.kind, Kind::Device | Kind::Managed)
}

fn check_limit(blocks: &BTreeMap<u64, Arc<Block>>, kind: Kind, device: i32, bytes: u64) -> Result {
    let (used, limit) = match kind {
        Kind::Device | Kind::Managed => {
            let used = live(blocks, |block| is_of(block, device)) + reserved::physical_bytes(device);
            (used, settings().memory_bytes)
        }
        _ => (live(blocks, is_pinned), settings().pinned_bytes),
    };
    if used.saturating_add(bytes) > limit {
        return Err(OUT_OF_MEMORY);
    }
    Ok(())
}

/// Allocates memory of a context.
pub fn allocate(context: &Context, kind: Kind, bytes: usize) -> Result<u64> {
    crate::settings::check_still("allocating");
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let bytes = bytes as u64;
    let mut blocks = BLOCKS.write().unwrap();
    check_limit(&blocks, kind, context.device, bytes)?;
    let mapped = map(bytes.next_multiple_of(GRANULE), libc::PROT_READ | libc::PROT_WRITE);
    let host = mapped.ok_or(OUT_OF_MEMORY)?;
    // SAFETY: so many bytes must be writable; because they were just mapped.
    unsafe { ptr::write_bytes(host as *mut u8, FRESH, bytes as usize) };
    let start = if kind == Kind::Device { addresses(bytes)? } else { host };
    let (device, context, is_let_go) = (context.device, context.handle, AtomicBool::new(false));
    let block = Block { start, bytes, kind, device, context, host, mapped: None, is_let_go };
    blocks.insert(start, Arc::new(block));
    Ok(start)
}

/// Registers memory of the program.
pub fn register(context: &Context, start: u64, bytes: usize) -> Result {
    crate::settings::check_still("pinning");
    let bytes = bytes as u64;
    let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
    if bytes == 0 || start == 0 || is_of_device(start) {
        return Err(INVALID_VALUE);
    }
    let mut blocks = BLOCKS.write().unwrap();
    let below = blocks.range(..end).next_back();
    if below.is_some_and(|(_, block)| block.start + block.bytes > start) {
        return Err(ALREADY_REGISTERED);
    }
    check_limit(&blocks, Kind::Registered, context.device, bytes)?;
    let (device, context) = (context.device, context.handle);
    let is_let_go = AtomicBool::new(false);
    let kind = Kind::Registered;
    let block = Block { start, bytes, kind, device, context, host: start, mapped: None, is_let_go };
    blocks.insert(start, Arc::new(block));
    Ok(())
}

/// Frees the block that starts here and is of one of these kinds.
pub fn free(start: u64, kinds: &[Kind]) -> Result {
    crate::settings::check_still("freeing");
    let mut blocks = BLOCKS.write().unwrap();
    let found = blocks.get(&start).is_some_and(|block| kinds.contains(&block.kind) && block.may_be_freed());
    if !found {
        return Err(if kinds == [Kind::Registered] { NOT_REGISTERED } else { INVALID_VALUE });
    }
    blocks.remove(&start);
    Ok(())
}

/// Leaves it to a stream to free a device's memory; nothing else frees it from then on.
pub fn let_go(start: u64) -> Result {
    crate::settings::check_still("unpinning");
    let block = find(start).filter(|block| block.start == start && block.kind == Kind::Device && block.may_be_freed());
    match block.ok_or(INVALID_VALUE)?.is_let_go.swap(true, Ordering::SeqCst) {
        true => Err(INVALID_VALUE),
        false => Ok(()),
    }
}

/// Frees what was left to a stream, if it is there still: a context may have ended.
pub(crate) fn free_let_go(start: u64) {
    let mut blocks = BLOCKS.write().unwrap();
    if blocks.get(&start).is_some_and(|block| block.is_let_go.load(Ordering::SeqCst)) {
        blocks.remove(&start);
    }
}

/// Puts memory at reserved addresses, where there is none.
pub(crate) fn insert_mapped(start: u64, bytes: u64, host: u64, memory: Arc<Physical>) -> Result {
    let mut blocks = BLOCKS.write().unwrap();
    let below = blocks.range(..start + bytes).next_back();
    if below.is_some_and(|(_, block)| block.start + block.bytes > start) {
        return Err(INVALID_VALUE);
    }
    let device = memory.device;
    let mapped = Some(Mapped { memory, access: AtomicU64::new(0) });
    let (kind, is_let_go) = (Kind::Device, AtomicBool::new(false));
    blocks.insert(start, Arc::new(Block { start, bytes, kind, device, context: 0, host, mapped, is_let_go }));
    Ok(())
}

/// The blocks of reserved addresses that make up a range; fails unless whole ones do.
pub(crate) fn mapped_in(start: u64, bytes: u64) -> Result<Vec<Arc<Block>>> {
    let end = start.checked_add(bytes).filter(|end| *end > start).ok_or(INVALID_VALUE)?;
    let blocks = BLOCKS.read().unwrap();
    let found: Vec<Arc<Block>> = blocks.range(start..end).map(|(_, block)| block.clone()).collect();
    let mut at = start;
    for block in &found {
        if block.start != at || block.mapped.is_none() {
            return Err(INVALID_VALUE);
        }
        at += block.bytes;
    }
    if at == end {
        Ok(found)
    } else {
        Err(INVALID_VALUE)
    }
}

/// Whether memory is at any of these addresses.
pub(crate) fn any_in(start: u64, bytes: u64) -> bool {
    BLOCKS.read().unwrap().range(start..start + bytes).next().is_some()
}

/// Takes the blocks of reserved addresses away that make up a range. The caller sees to it that no other does meanwhile.
pub(crate) fn remove_mapped(start: u64, bytes: u64) -> Result<Vec<Arc<Block>>> {
    let found = mapped_in(start, bytes)?;
    let mut blocks = BLOCKS.write().unwrap();
    found.iter().for_each(|block| drop(blocks.remove(&block.start)));
    Ok(found)
}

/// Frees all that belongs to a context.
pub fn free_all_of(context: usize) {
    BLOCKS.write().unwrap().retain(|_, block| block.context != context);
}

/// The block that an address is in.
pub fn find(address: u64) -> Option<Arc<Block>> {
    let blocks = BLOCKS.read().unwrap();
    let (_, block) = blocks.range(..=address).next_back()?;
    (address - block.start < block.bytes).then(|| block.clone())
}

/// Checks that an address is one of a word that streams can wait for or write: not pageable memory.
pub fn check_word(address: u64) -> Result {
    let block = find(address).filter(|_| address.is_multiple_of(4)).ok_or(INVALID_VALUE)?;
    if block.bytes - (address - block.start) < 4 {
        return Err(INVALID_VALUE);
    }
    Ok(())
}

fn is_pinned(block: &Block) -> bool {
    matches!(block.kind, Kind::Pinned | Kind::Registered)
}

/// Live allocations of devices, their bytes, and live pinned blocks.
pub fn counts() -> [u64; 3] {
    let blocks = BLOCKS.read().unwrap();
    let pinned = blocks.values().filter(|block| is_pinned(block)).count() as u64;
    [blocks.len() as u64 - pinned, live(&blocks, |block| !is_pinned(block)), pinned]
}

impl Block {
    /// Whether a program may free it by its address.
    fn may_be_freed(&self) -> bool {
        self.mapped.is_none() && !self.is_let_go.load(Ordering::SeqCst)
    }

    /// What is mapped here, where the address was reserved.
    pub fn mapped(&self) -> Option<&Mapped> {
        self.mapped.as_ref()
    }

    /// Where the host finds it.
    pub(crate) fn host(&self) -> u64 {
        self.host
    }

    /// Whether it may be used so.
    fn allows(&self, by: By) -> bool {
        match (&self.mapped, by) {
            (Some(mapped), By::Copy) => mapped.access.load(Ordering::Relaxed) != 0,
            (Some(mapped), By::Kernel(device)) => mapped.access.load(Ordering::Relaxed) >> device & 1 != 0,
            (None, By::Kernel(device)) => self.kind != Kind::Device || self.device == device,
            (None, By::Copy) => true,
        }
    }
}

/// Memory as the host reaches it. As long as a view is there the memory stays.
pub struct View {
    host: u64,
    bytes: usize,
    _blocks: Vec<Arc<Block>>,
}

/// Who looks at memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// A copy of the driver, which reaches any memory.
    Copy,
    /// A kernel, which reaches its own device's memory and pinned memory.
    Kernel(i32),
}

impl View {
    /// `bytes` at `address`, which must lie within one block, or within blocks that are mapped side by side.
    pub fn of(address: u64, bytes: usize, by: By) -> Result<View> {
        let Some(block) = find(address) else {
            let pageable = by == By::Copy && address != 0 && !is_of_device(address);
            let view = View { host: address, bytes, _blocks: Vec::new() };
            return if pageable { Ok(view) } else { Err(ILLEGAL_ADDRESS) };
        };
        let host = block.host + (address - block.start);
        let mut end = block.start + block.bytes;
        let mut blocks = vec![block];
        // Other blocks have a gap between them.
        while end - address < bytes as u64 {
            blocks.push(find(end).ok_or(ILLEGAL_ADDRESS)?);
            end += blocks[blocks.len() - 1].bytes;
        }
        if blocks.iter().any(|block| !block.allows(by)) {
            return Err(ILLEGAL_ADDRESS);
        }
        Ok(View { host, bytes, _blocks: blocks })
    }

    /// Where the host reaches it.
    pub fn host(&self) -> *mut u8 {
        self.host as *mut u8
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
