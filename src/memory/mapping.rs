//! Files mapped into this process's memory, shared with whoever else maps them.

use super::{Bytes, Region};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::AsFd;

/// What a mapping may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// A part of a file in memory; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    region: Region,
}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` (a multiple of the page size). With `populate` the pages are entered
    /// into the page table at once, so that no fault interrupts the first use.
    pub fn new(file: impl AsFd, offset: u64, len: usize, access: Access, populate: bool) -> io::Result<Mapping> {
        let mut flags = MapFlags::SHARED;
        flags.set(MapFlags::POPULATE, populate);
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: no memory in use may be replaced; because the kernel chooses a free address.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file, offset) }?;
        // SAFETY: the bytes must stay valid while the region is used; because the users of a mapping keep it alive.
        let region = unsafe { Region::new(start.cast(), len) };
        Ok(Mapping { region })
    }

    /// The mapped bytes.
    pub fn region(&self) -> Bytes<'_> {
        self.region
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nobody may use the bytes any more; because regions of a mapping are used only while it lives.
        let unmapped = unsafe { rustix::mm::munmap(self.region.as_ptr().cast(), self.region.len()) };
        debug_assert!(unmapped.is_ok(), "a whole mapping can be unmapped");
    }
}
