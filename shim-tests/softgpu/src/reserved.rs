//! Reserved addresses, and memory that is mapped at them: what a program builds growing buffers of.
//!
//! Memory is a file of its own, so that the same can be at two addresses. Of reserved addresses the host's alias is in one
//! piece too, so what is mapped side by side can be used as one buffer.

use crate::context::check_device;
use crate::fault::{Result, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY};
use crate::handles::Handles;
use crate::memory::{self, FRESH};
use crate::settings::settings;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// Memory, and addresses, come in multiples of this.
pub const GRANULARITY: u64 = 2 << 20;

/// Memory of a device that has no address by itself.
pub struct Physical {
    /// The device.
    pub device: i32,
    /// The length.
    pub bytes: u64,
    file: OwnedFd,
    /// How often its handle was retained.
    retained: AtomicU64,
}

static PHYSICAL: Handles<Physical> = Handles::empty();
/// Bytes of each device's memory of this kind.
static USED: Mutex<BTreeMap<i32, u64>> = Mutex::new(BTreeMap::new());
/// Lengths and the host's aliases of what is reserved, by address.
static RESERVED: RwLock<BTreeMap<u64, (u64, u64)>> = RwLock::new(BTreeMap::new());

/// Held by who maps, unmaps, or gives addresses back.
static MAPPING: Mutex<()> = Mutex::new(());

impl Drop for Physical {
    fn drop(&mut self) {
        *USED.lock().unwrap().entry(self.device).or_default() -= self.bytes;
    }
}

/// Bytes of a device that are in use so, mapped or not.
pub fn physical_bytes(device: i32) -> u64 {
    USED.lock().unwrap().get(&device).copied().unwrap_or(0)
}

fn check_length(bytes: u64) -> Result {
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(INVALID_VALUE);
    }
    Ok(())
}

/// Puts pages at an alias, in place of what is there: those of a file, or new ones.
fn put_pages(at: u64, bytes: u64, file: Option<&OwnedFd>, offset: u64) -> Result {
    let flags = match file {
        Some(_) => libc::MAP_SHARED | libc::MAP_FIXED,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
    };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let file = file.map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: what is replaced must be nobody else's; because it lies in an alias that `reserve` made, and pages stay
    // there, so that late work, which may not use them any more, harms nobody.
    let mapped = unsafe { libc::mmap(at as *mut _, bytes as usize, access, flags, file, offset as libc::off_t) };
    if mapped == libc::MAP_FAILED {
        Err(OUT_OF_MEMORY)
    } else {
        Ok(())
    }
}

/// Allocates memory without an address.
pub fn create(device: i32, bytes: u64) -> Result<usize> {
    check_device(device)?;
    check_length(bytes)?;
    if memory::used_bytes(device).saturating_add(bytes) > settings().memory_bytes {
        return Err(OUT_OF_MEMORY);
    }
    // SAFETY: the name must be a text; because it is a literal.
    let file = unsafe { libc::memfd_create(c"softgpu".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(OUT_OF_MEMORY);
    }
    // SAFETY: the file must be open and nobody else's; because it was just made.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    // SAFETY: the file must be open; because it was just made.
    if unsafe { libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t) } != 0 {
        return Err(OUT_OF_MEMORY);
    }
    *USED.lock().unwrap().entry(device).or_default() += bytes;
    let memory = Physical { device, bytes, file, retained: AtomicU64::new(1) };
    let at = memory::map(bytes, libc::PROT_NONE).ok_or(OUT_OF_MEMORY)?;
    put_pages(at, bytes, Some(&memory.file), 0)?;
    // SAFETY: so many bytes must be writable; because they were just mapped.
    unsafe { ptr::write_bytes(at as *mut u8, FRESH, bytes as usize) };
    // SAFETY: the range must be a mapping that nobody uses; because it is this function's own.
    unsafe { libc::munmap(at as *mut _, bytes as usize) };
    Ok(PHYSICAL.add(memory))
}

/// The memory of a handle.
pub fn find(handle: usize) -> Result<Arc<Physical>> {
    PHYSICAL.get(handle).ok_or(INVALID_HANDLE)
}

/// The handle of the memory at an address, which is to be released once more.
pub fn retain(address: u64) -> Result<usize> {
    let block = memory::find(address).ok_or(INVALID_VALUE)?;
    let memory = &block.mapped().ok_or(INVALID_VALUE)?.memory;
    memory.retained.fetch_add(1, Ordering::SeqCst);
    let known = PHYSICAL.handle_of(memory);
    Ok(known.unwrap_or_else(|| PHYSICAL.add_shared(memory.clone())))
}

/// Releases a handle; the memory goes when it is mapped nowhere.
pub fn release(handle: usize) -> Result {
    let memory = find(handle)?;
    if memory.retained.fetch_sub(1, Ordering::SeqCst) == 1 {
        PHYSICAL.remove(handle);
    }
    Ok(())
}

/// Reserves addresses, at a place of the double's choice.
pub fn reserve(bytes: u64, alignment: u64) -> Result<u64> {
    check_length(bytes)?;
    let alignment = alignment.max(GRANULARITY);
    if !alignment.is_power_of_two() {
        return Err(INVALID_VALUE);
    }
    let length = bytes.checked_add(alignment).ok_or(OUT_OF_MEMORY)?;
    let start = memory::addresses(length)?.next_multiple_of(alignment);
    let host = memory::map(bytes, libc::PROT_READ | libc::PROT_WRITE).ok_or(OUT_OF_MEMORY)?;
    RESERVED.write().unwrap().insert(start, (bytes, host));
    Ok(start)
}

/// Gives addresses back; nothing may be mapped there.
pub fn free(start: u64, bytes: u64) -> Result {
    let _alone = MAPPING.lock().unwrap();
    let mut reserved = RESERVED.write().unwrap();
    let is_known = reserved.get(&start).is_some_and(|(length, _)| *length == bytes);
    if !is_known || memory::any_in(start, bytes) {
        return Err(INVALID_VALUE);
    }
    reserved.remove(&start);
    Ok(())
}

/// Puts memory at reserved addresses.
pub fn map(start: u64, bytes: u64, offset: u64, handle: usize) -> Result {
    let memory = find(handle)?;
    check_length(bytes)?;
    if !start.is_multiple_of(GRANULARITY) || offset != 0 || bytes > memory.bytes {
        return Err(INVALID_VALUE);
    }
    let _alone = MAPPING.lock().unwrap();
    let reserved = RESERVED.read().unwrap();
    let (first, (length, host)) = reserved.range(..=start).next_back().ok_or(INVALID_VALUE)?;
    if start.checked_add(bytes).is_none_or(|end| end > first + length) {
        return Err(INVALID_VALUE);
    }
    let alias = host + (start - first);
    memory::insert_mapped(start, bytes, alias, memory.clone())?;
    put_pages(alias, bytes, Some(&memory.file), 0)
}

/// Takes memory away from whole mappings' addresses.
pub fn unmap(start: u64, bytes: u64) -> Result {
    let _alone = MAPPING.lock().unwrap();
    for block in memory::remove_mapped(start, bytes)? {
        put_pages(block.host(), block.bytes, None, 0)?;
    }
    Ok(())
}

/// Lets a device use whole mappings, or no longer.
pub fn set_access(start: u64, bytes: u64, device: i32, is_allowed: bool) -> Result {
    let bit = 1 << check_device(device)?;
    for block in memory::mapped_in(start, bytes)? {
        let Some(mapped) = block.mapped() else { continue };
        match is_allowed {
            true => mapped.access.fetch_or(bit, Ordering::SeqCst),
            false => mapped.access.fetch_and(!bit, Ordering::SeqCst),
        };
    }
    Ok(())
}
