//! Fetching a large message out of its sender's memory.
//!
//! Three ways, the first that is possible: the memory is in our own address space (the sender is a thread of this
//! process, or the memory is shared and mapped), and is read where it lies; or the kernel copies it, straight to its
//! destination, or through a buffer that stays in cache when it is to be combined.

use super::record::Listing;
use super::segment::Control;
use crate::error::{Error, Result};
use crate::memory::mapping::Mapping;
use crate::memory::{shared, Bytes, InPeer, PeerRegion, Region};
use crate::topo::Rank;
use crate::transport::streams::Posted;
use crate::transport::target::Pieces;
use smallvec::SmallVec;
use std::fmt;
use std::sync::atomic::{fence, Ordering};
use std::sync::Arc;

/// Bytes of a message fetched between two looks at everything else.
pub const SLICE: usize = 2 << 20;
/// Bytes that are combined at a time when the kernel copies them.
pub const STAGING: usize = 128 << 10;
/// The staging buffer: what it holds may begin anywhere in its first page.
pub const STAGING_BUFFER: usize = STAGING + PAGE;
const PAGE: usize = 4096;
/// Pieces handed to the kernel at a time.
const MAX_PIECES: usize = 256;

/// How a local peer's memory can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The peer is a thread of this process.
    SameProcess,
    /// The kernel copies from process `pid`.
    Kernel {
        /// The peer's process.
        pid: u32,
    },
    /// Not at all, except for shared allocations; messages come through the ring.
    Ring {
        /// The peer's process.
        pid: u32,
    },
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reach::SameProcess => f.write_str("large messages are read in place, in this process"),
            Reach::Kernel { pid } => write!(f, "large messages are read from process {pid} (process_vm_readv)"),
            Reach::Ring { pid } => write!(f, "large messages of process {pid} come through shared memory"),
        }
    }
}

/// Where the bytes of a message are.
#[derive(Debug)]
enum Source {
    /// In our address space, kept there by these mappings.
    Here { pieces: Pieces, _mappings: Mappings },
    /// At these addresses of another process.
    There { pieces: Pieces<InPeer>, pid: u32 },
}

/// A large message being fetched.
#[derive(Debug)]
pub struct Pull {
    /// The sender's index among the local peers.
    pub peer: usize,
    /// The sender's number of the message.
    pub slot: u32,
    /// Whose message it is.
    pub posted: Posted,
    rank: Rank,
    source: Source,
    done: usize,
}

/// Addresses of another process, or of this one.
pub fn pieces_at<Space>(listing: &Listing) -> Pieces<Space> {
    let region = |&(address, len, _): &(u64, u64, Option<usize>)| {
        // SAFETY: the bytes must be usable in their space while the region is; because a sender does not touch a message until
        // we acknowledge it, and the kernel checks what is in another process.
        unsafe { Bytes::new(address as *mut u8, len as usize) }
    };
    Pieces::new(&listing.pieces.iter().map(region).collect::<SmallVec<[Bytes<'static, Space>; 4]>>())
}

/// The mappings that keep a peer's shared memory in our address space.
pub type Mappings = SmallVec<[Arc<Mapping>; 2]>;

/// The pieces of a listing in our address space, if all of them lie in shared allocations that can be mapped.
pub fn mapped(listing: &Listing) -> Option<(Pieces, Mappings)> {
    let keyed = listing.pieces.iter().all(|(_, _, key)| key.is_some());
    if !keyed || listing.pieces.is_empty() {
        return None;
    }
    let mappings: Mappings = listing.keys.iter().map(|(key, _)| shared::map_peer(key)).collect::<Option<_>>()?;
    let place = |&(address, len, key): &(u64, u64, Option<usize>)| {
        let index = key?;
        let offset = address.checked_sub(listing.keys.get(index)?.1)? as usize;
        let region = mappings[index].region();
        let inside = offset.checked_add(len as usize).is_some_and(|end| end <= region.len());
        // SAFETY: the mapping must outlive every use; because pieces and mappings are returned, and kept, together.
        inside.then(|| unsafe { region.part(offset, len as usize).unbound() })
    };
    let regions: SmallVec<[Region; 4]> = listing.pieces.iter().map(place).collect::<Option<_>>()?;
    Some((Pieces::new(&regions), mappings))
}

impl Pull {
    /// Begins to fetch a message; gives the receive back when its bytes cannot be reached.
    pub fn new(
        peer: usize,
        rank: Rank,
        reach: Reach,
        slot: u32,
        listing: &Listing,
        posted: Posted,
    ) -> std::result::Result<Pull, Box<Posted>> {
        let here = || mapped(listing).map(|(pieces, mappings)| Source::Here { pieces, _mappings: mappings });
        let source = match reach {
            _ if listing.pieces.is_empty() => None,
            Reach::SameProcess => Some(Source::Here { pieces: pieces_at(listing), _mappings: SmallVec::new() }),
            Reach::Kernel { pid } => here().or_else(|| Some(Source::There { pieces: pieces_at(listing), pid })),
            Reach::Ring { .. } => here(),
        };
        match source {
            Some(source) => Ok(Pull { peer, slot, posted, rank, source, done: 0 }),
            None => Err(Box::new(posted)),
        }
    }

    /// Bytes still to be fetched.
    pub fn left(&self) -> usize {
        self.posted.target.bytes() - self.done
    }

    /// Bytes that have been fetched.
    pub fn done(&self) -> usize {
        self.done
    }

    /// Fetches up to `most` bytes (a few more, to end between elements). `control` is the sender's direction. False: this
    /// process may not read the sender's memory any more, since one of the two has given up rights.
    pub fn advance(&mut self, most: usize, control: &Control, staging: Bytes<'_>) -> Result<bool> {
        // The sender sets `cancelled`, then waits until `reading` is not set; we set `reading`, then look at
        // `cancelled`. Both sequentially consistent: whoever comes second sees the other.
        control.reading.0.store(1, Ordering::SeqCst);
        let gave_up = || control.cancelled.0.load(Ordering::SeqCst) != 0;
        let result = if gave_up() { Ok(true) } else { self.fetch(most, staging) };
        // A process that does not answer is not waited for: where it has read late, its sender's memory may already have
        // held something else.
        fence(Ordering::SeqCst);
        let result = if gave_up() { Err(gave_up_error(self.rank)) } else { result };
        control.reading.0.store(0, Ordering::Release);
        result
    }

    fn fetch(&mut self, most: usize, staging: Bytes<'_>) -> Result<bool> {
        let end = self.done + most.min(self.left());
        while self.done < end {
            let left = end - self.done;
            self.done += match &self.source {
                Source::Here { pieces, .. } => self.take_here(pieces, left, staging),
                Source::There { pieces, pid } => match self.take_there(pieces, *pid, left, staging)? {
                    Some(taken) => taken,
                    None => return Ok(false),
                },
            };
        }
        Ok(true)
    }

    /// Takes the next run of bytes that lie in our address space.
    fn take_here(&self, pieces: &Pieces, left: usize, staging: Bytes<'_>) -> usize {
        let target = &self.posted.target;
        let grain = target.grain();
        let run = pieces.run(self.done, left);
        let whole = run.len() - run.len() % grain;
        if whole > 0 {
            target.consume(self.done, run.part(0, whole));
            return whole;
        }
        // An element lies across a border of pieces: put it together.
        let mut gathered = 0;
        while gathered < grain {
            let part = pieces.run(self.done + gathered, grain - gathered);
            staging.part(gathered, part.len()).copy_from(part);
            gathered += part.len();
        }
        target.consume(self.done, staging.part(0, grain));
        grain
    }

    /// Has the kernel copy the next bytes; `None` where it refuses.
    fn take_there(&self, pieces: &Pieces<InPeer>, pid: u32, left: usize, staging: Bytes<'_>) -> Result<Option<usize>> {
        let target = &self.posted.target;
        let grain = target.grain();
        let mut into: SmallVec<[Bytes<'_>; 16]> = SmallVec::new();
        let mut from: SmallVec<[PeerRegion; 16]> = SmallVec::new();
        let first = pieces.run(self.done, left);
        let direct = target.store().filter(|dst| !copies_slowly(first, dst.run(self.done, left)));
        // Equal places in their pages make the copy into the buffer a fast one.
        let staged = staging.part(first.address() as usize % PAGE, STAGING);
        let wanted = match direct {
            Some(dst) => dst.runs(self.done, left, MAX_PIECES, &mut into),
            None => {
                let len = left.next_multiple_of(grain).min(self.left()).min(STAGING);
                into.push(staged.part(0, len));
                len
            }
        };
        pieces.runs(self.done, wanted, MAX_PIECES, &mut from);
        let got = match read_process(pid, &into, &from) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return Ok(None),
            got => got.map_err(|error| unreadable(&error, self.rank, pid, &into))?,
        };
        let got = got - got % grain;
        if got == 0 {
            return Err(Error::Remote(format!("the memory of rank {} (process {pid}) cannot be read", self.rank)));
        }
        if direct.is_none() {
            target.consume(self.done, staged.part(0, got));
        }
        Ok(Some(got))
    }
}

/// Why bytes of a rank's process could not be copied into these regions.
pub fn unreadable(error: &std::io::Error, rank: Rank, pid: u32, into: &[Bytes<'_>]) -> Error {
    match error.raw_os_error() {
        Some(libc::ESRCH) => Error::Remote(format!("rank {rank} is gone: its process {pid} has ended")),
        // The kernel does not say on which side it could not go on.
        Some(libc::EFAULT) if !is_writable(into) => {
            Error::InvalidArgument(format!("the buffer for a message of rank {rank} cannot be written"))
        }
        Some(libc::EFAULT) => {
            Error::Remote(format!("a buffer of rank {rank} (process {pid}) was unmapped while it was being sent"))
        }
        _ => Error::System(format!("reading the memory of rank {rank} (process {pid}): {error}")),
    }
}

/// What a rank says whose operations needed memory of one that has given up.
pub fn gave_up_error(rank: Rank) -> Error {
    Error::Remote(format!("rank {rank} has cancelled its operations"))
}

/// Whether the kernel's way of copying is slow for these addresses. Where the destination lies 1 to 31 bytes after the
/// source within its page, as blocks that `malloc` gave out one after the other do, `rep movsb` runs at a sixth of its
/// speed on some processors (measured on Zen 3: 2.4 instead of 11 GB/s); one more copy, in cache, is much cheaper.
pub fn copies_slowly(from: PeerRegion, into: Region) -> bool {
    let distance = into.address().wrapping_sub(from.address()) as usize % PAGE;
    (1..32).contains(&distance) && from.len() > PAGE && into.len() > PAGE
}

/// A list for the kernel.
fn vector<Space>(regions: &[Bytes<'_, Space>]) -> SmallVec<[libc::iovec; 16]> {
    let part = |region: &Bytes<'_, Space>| libc::iovec {
        iov_base: region.address() as *mut libc::c_void,
        iov_len: region.len(),
    };
    regions.iter().map(part).collect()
}

/// Copies bytes of process `pid` into regions of ours.
pub fn read_process(pid: u32, into: &[Bytes<'_>], from: &[Bytes<'_, InPeer>]) -> std::io::Result<usize> {
    let (into, from) = (vector(into), vector(from));
    let (into_len, from_len) = (into.len() as libc::c_ulong, from.len() as libc::c_ulong);
    // SAFETY: the local parts must be writable; because regions are, by the promise of `Region::new`. The remote
    // addresses are checked by the kernel.
    let got =
        unsafe { libc::process_vm_readv(pid as libc::pid_t, into.as_ptr(), into_len, from.as_ptr(), from_len, 0) };
    usize::try_from(got).map_err(|_| std::io::Error::last_os_error())
}

/// Whether memory of ours, which nobody else uses now, can be read and written, shown by having the kernel copy it onto
/// itself.
fn is_writable(regions: &[Bytes<'_>]) -> bool {
    let bytes: usize = regions.iter().map(Bytes::len).sum();
    let from: SmallVec<[Bytes<'_, InPeer>; 16]> = regions.iter().map(|region| region.as_peer()).collect();
    read_process(std::process::id(), regions, &from).is_ok_and(|copied| copied == bytes)
}

/// Whether the kernel lets us read process `pid`, shown by a value known to be at `address` there.
pub fn probe(pid: u32, address: u64, value: u64) -> bool {
    let mut bytes = [0u8; 8];
    // SAFETY: the bytes must be writable while the region is used; because they are ours and borrowed by nobody else.
    let into = unsafe { Region::new(bytes.as_mut_ptr(), 8) };
    // SAFETY: the bytes must be readable in the other process; because the kernel checks that.
    let from = unsafe { PeerRegion::new(address as *mut u8, 8) };
    read_process(pid, &[into], &[from]).is_ok_and(|got| got == 8) && u64::from_ne_bytes(bytes) == value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;
    use crate::transport::{Envelope, Sink};

    /// Pages of which the kernel allows no use beyond `protection`.
    fn pages(protection: libc::c_int) -> Region {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the arguments must be those of a fresh mapping; because there is no address and no file.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), 4 * PAGE, protection, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        // SAFETY: the bytes must be usable as the test uses them; because only the kernel touches them, and it checks.
        unsafe { Region::new(address.cast(), 4 * PAGE) }
    }

    /// Fetches a message through the kernel, as from another process.
    fn fetch(from: Region, into: Region) -> Result<()> {
        let envelope = Envelope { channel: 0, sequence: 1, signature: 0 };
        let posted = Posted::new(0, envelope, Sink::Store(&[into]));
        let listing = Listing { pieces: vec![(from.as_ptr() as u64, from.len() as u64, None)], keys: Vec::new() };
        let reach = Reach::Kernel { pid: std::process::id() };
        let pull = Pull::new(0, Rank(3), reach, 0, &listing, posted);
        let mut staging = Arena::new(STAGING_BUFFER);
        pull.expect("it can be reached").fetch(from.len(), staging.region()).map(|read| assert!(read, "it may be read"))
    }

    #[test]
    fn memory_that_cannot_be_used_is_blamed_on_the_side_that_has_it() {
        let both = libc::PROT_READ | libc::PROT_WRITE;
        assert_eq!(fetch(pages(both), pages(both)), Ok(()));
        for unwritable in [libc::PROT_READ, libc::PROT_NONE] {
            let ours = fetch(pages(both), pages(unwritable)).expect_err("nothing can be stored");
            assert!(matches!(&ours, Error::InvalidArgument(text) if text.contains("cannot be written")), "{ours}");
        }
        let theirs = fetch(pages(libc::PROT_NONE), pages(both)).expect_err("nothing can be read");
        assert!(matches!(&theirs, Error::Remote(text) if text.contains("rank 3")), "{theirs}");
    }
}
