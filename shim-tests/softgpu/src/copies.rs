//! How copies behave towards the host, which depends on what kind of memory they meet.

use crate::capture;
use crate::fault::{Result, INVALID_VALUE};
use crate::memory::{self, By, Kind, View};
use crate::random::Random;
use crate::stream::{self, Stream};
use crate::work::{Fill, Work};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

static BLOCKING: AtomicU64 = AtomicU64::new(0);

/// How many calls made the host wait.
pub fn blocking_calls() -> u64 {
    BLOCKING.load(Ordering::Relaxed)
}

/// A call makes the host wait.
pub fn note_blocking() {
    BLOCKING.fetch_add(1, Ordering::Relaxed);
}

fn wait(stream: &Arc<Stream>) -> Result {
    note_blocking();
    stream::synchronize(stream)
}

/// Where memory is, as far as copies are concerned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Device,
    Pinned,
    Pageable,
}

fn place(address: u64, bytes: usize) -> Result<Place> {
    View::of(address, bytes, By::Copy).map_err(|_| INVALID_VALUE)?;
    Ok(match memory::find(address).map(|block| block.kind) {
        None => Place::Pageable,
        Some(Kind::Pinned | Kind::Registered) => Place::Pinned,
        Some(Kind::Device | Kind::Managed) => Place::Device,
    })
}

/// Whether a driver that may synchronise does it now.
fn perhaps() -> bool {
    static RANDOM: LazyLock<Mutex<Random>> = LazyLock::new(|| Mutex::new(Random::new(u64::MAX)));
    RANDOM.lock().unwrap().below(2) == 0
}

fn snapshot(src: u64, bytes: usize) -> Arc<[u8]> {
    // SAFETY: the memory must be readable and not change meanwhile; because the program promises that of a copy's
    // source.
    unsafe { std::slice::from_raw_parts(src as *const u8, bytes) }.into()
}

/// A copy on the legacy stream. It is over when this returns, except from device to device, and from pageable memory,
/// which only has been read by then.
pub fn copy(stream: &Arc<Stream>, dst: u64, src: u64, bytes: usize) -> Result {
    if bytes == 0 {
        return Ok(());
    }
    capture::forbid_unsafe()?;
    match (place(src, bytes)?, place(dst, bytes)?) {
        (Place::Device, Place::Device) => stream.submit(Work::Copy { dst, src, bytes }).map(drop),
        (Place::Pageable, Place::Device) => {
            stream.submit(Work::Nothing)?;
            wait(stream)?;
            stream.submit(Work::Upload { dst, data: snapshot(src, bytes) }).map(drop)
        }
        _ => {
            stream.submit(Work::Copy { dst, src, bytes })?;
            wait(stream)
        }
    }
}

/// A copy on a stream. With pageable memory, and within the host, the host may wait.
pub fn copy_async(stream: &Arc<Stream>, dst: u64, src: u64, bytes: usize) -> Result {
    if bytes == 0 {
        return Ok(());
    }
    let (from, to) = (place(src, bytes)?, place(dst, bytes)?);
    let work = Work::Copy { dst, src, bytes };
    if stream.capture().is_some() {
        return stream.submit(work).map(drop);
    }
    match (from, to) {
        (Place::Pageable, Place::Device) => {
            if perhaps() {
                wait(stream)?;
            }
            stream.submit(Work::Upload { dst, data: snapshot(src, bytes) }).map(drop)
        }
        (Place::Device, Place::Device | Place::Pinned) | (Place::Pinned, Place::Device) => {
            stream.submit(work).map(drop)
        }
        _ => {
            stream.submit(work)?;
            wait(stream)
        }
    }
}

/// Sets elements; the host does not wait.
pub fn fill(stream: &Arc<Stream>, fill: Fill) -> Result {
    if fill.span() == 0 {
        return Ok(());
    }
    let is_aligned = fill.dst.is_multiple_of(fill.width as u64) && fill.pitch.is_multiple_of(fill.width);
    if !is_aligned || fill.pitch < fill.row || place(fill.dst, fill.span())? == Place::Pageable {
        return Err(INVALID_VALUE);
    }
    stream.submit(Work::Fill(fill)).map(drop)
}
