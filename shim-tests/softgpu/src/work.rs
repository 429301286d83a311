//! What a stream can be told to do, and how it does it.

use crate::capture::Graph;
use crate::fault::{Result, ILLEGAL_ADDRESS, INVALID_VALUE};
use crate::kernels::Launch;
use crate::memory::{self, By, Kind, View};
use crate::random::Random;
use crate::settings::{is_broken, settings};
use crate::stream::{Fence, Stream};
use crate::switch::carried;
use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// One piece of work.
#[derive(Clone)]
pub enum Work {
    /// Nothing.
    Nothing,
    /// It notes the time: an event is recorded here.
    Reach(Arc<OnceLock<Instant>>),
    /// It waits for a place in another stream.
    After(Fence),
    /// It copies.
    Copy { dst: u64, src: u64, bytes: usize },
    /// It copies what was taken from pageable memory when it was submitted.
    Upload { dst: u64, data: Arc<[u8]> },
    /// It sets elements.
    Fill(Fill),
    /// It frees memory.
    Free(u64),
    /// It calls a function of the program.
    Host(HostFunction),
    /// It waits for a word.
    WaitValue { address: u64, value: u32, mask: u32, until: Until },
    /// It writes a word, after all before it.
    WriteValue { address: u64, value: u32 },
    /// It runs a kernel.
    Kernel(Arc<Launch>),
    /// It runs a graph.
    Graph(Arc<Graph>),
}

impl Work {
    /// What kind of node it is in a graph: `CUgraphNodeType`.
    pub fn kind(&self) -> u32 {
        match self {
            Work::Kernel(_) => 0,
            Work::Copy { .. } | Work::Upload { .. } => 1,
            Work::Fill(_) => 2,
            Work::Host(_) => 3,
            Work::Graph(_) => 4,
            Work::Nothing | Work::Reach(_) | Work::After(_) => 5,
            Work::Free(_) => 11,
            Work::WaitValue { .. } | Work::WriteValue { .. } => 12,
        }
    }

    /// Whether it reads or writes memory while it runs, and ends by itself.
    pub fn touches_memory(&self) -> bool {
        matches!(self, Work::Copy { .. } | Work::Upload { .. } | Work::Fill(_) | Work::Kernel(_))
    }
}

/// Rows of memory, of which each byte is set to one of an element's.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// The first address.
    pub dst: u64,
    /// The element.
    pub value: u32,
    /// Its bytes: 1, 2 or 4.
    pub width: usize,
    /// Bytes of a row.
    pub row: usize,
    /// How many rows there are.
    pub rows: usize,
    /// Bytes from one row to the next.
    pub pitch: usize,
}

impl Fill {
    /// One row.
    pub fn of_row(dst: u64, value: u32, width: usize, row: usize) -> Fill {
        Fill { dst, value, width, row, rows: 1, pitch: row }
    }

    /// Bytes from the first to the last that is set.
    pub fn span(&self) -> usize {
        if self.rows == 0 || self.row == 0 {
            0
        } else {
            // One that cannot be is too long for any memory.
            (self.rows - 1).saturating_mul(self.pitch).saturating_add(self.row)
        }
    }

    fn run(&self, stream: &Stream, random: &mut Random) -> Result {
        let dst = View::of(self.dst, self.span(), By::Copy)?;
        let element = self.value.to_le_bytes();
        // Of what is set, which has no gaps: a piece may be a part of a row, or many rows.
        for (from, length) in pieces(self.row * self.rows, random) {
            if self.width == 1 && self.rows == 1 {
                // SAFETY: the piece must be writable; because it is a part of the view.
                unsafe { ptr::write_bytes(dst.host().wrapping_add(from), element[0], length) };
                stream.breathe(random);
                continue;
            }
            for (at, byte) in (from..from + length).zip(element[..self.width].iter().cycle().skip(from % self.width)) {
                let place = dst.host().wrapping_add(at / self.row * self.pitch + at % self.row);
                // SAFETY: the byte must be writable; because it is a part of the view.
                unsafe { ptr::write(place, *byte) };
            }
            stream.breathe(random);
        }
        Ok(())
    }
}

/// When a word is what it is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// It has come as far as the value, as a counter that wraps around.
    Reached,
    /// It is the value.
    Equal,
    /// It has a bit in common with the value.
    And,
    /// A bit is set neither in it nor in the value.
    Nor,
}

impl Until {
    /// What flags mean, in CUDA and in HIP.
    pub fn of(flags: u32) -> Result<Until> {
        const FLUSH: u32 = 1 << 30;
        match flags & !FLUSH {
            0 => Ok(Until::Reached),
            1 => Ok(Until::Equal),
            2 => Ok(Until::And),
            3 => Ok(Until::Nor),
            _ => Err(INVALID_VALUE),
        }
    }

    fn holds(self, word: u32, value: u32) -> bool {
        match self {
            Until::Reached => word.wrapping_sub(value) as i32 >= 0,
            Until::Equal => word == value,
            Until::And => word & value != 0,
            Until::Nor => !(word | value) != 0,
        }
    }
}

/// A function of the program with its argument.
#[derive(Clone, Copy)]
pub struct HostFunction {
    /// The function.
    pub function: extern "C" fn(*mut c_void),
    /// Its argument.
    pub argument: usize,
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread runs a function of the program, which may not call the driver.
pub fn is_in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Work::Nothing | Work::Reach(_) | Work::After(_) => write!(f, "an event"),
            Work::Copy { dst, src, bytes } => write!(f, "the copy of {bytes} bytes from {src:#x} to {dst:#x}"),
            Work::Upload { dst, data } => write!(f, "the copy of {} bytes of pageable memory to {dst:#x}", data.len()),
            Work::Fill(fill) => write!(f, "the setting of {} bytes at {:#x}", fill.span(), fill.dst),
            Work::Free(address) => write!(f, "the freeing of {address:#x}"),
            Work::Host(_) => write!(f, "a function of the host"),
            Work::WaitValue { address, value, .. } => write!(f, "the wait for {value} at {address:#x}"),
            Work::WriteValue { address, value } => write!(f, "the writing of {value} at {address:#x}"),
            Work::Kernel(launch) => write!(f, "{launch:?}"),
            Work::Graph(_) => write!(f, "a graph"),
        }
    }
}

impl Work {
    /// Does it, on the thread of a stream.
    pub fn run(&self, stream: &Stream, random: &mut Random) -> Result {
        match self {
            Work::Nothing => {}
            Work::Reach(reached) => drop(reached.set(Instant::now())),
            Work::After(fence) => fence.wait_unless(|| stream.context.has_stopped()),
            Work::Copy { dst, src, bytes } if is_to_host(*dst, *src) && !settings().switches.is_empty() => {
                copy_by_switch(stream, (View::of(*dst, *bytes, By::Copy)?, View::of(*src, *bytes, By::Copy)?));
            }
            Work::Copy { dst, src, bytes } => {
                let (dst, src) = (View::of(*dst, *bytes, By::Copy)?, View::of(*src, *bytes, By::Copy)?);
                copy(stream, random, src.host(), &dst);
            }
            Work::Upload { dst, data } => {
                copy(stream, random, data.as_ptr(), &View::of(*dst, data.len(), By::Copy)?);
            }
            Work::Fill(fill) => fill.run(stream, random)?,
            Work::Free(address) => memory::free_let_go(*address),
            Work::Host(host) => {
                IN_HOST_FUNCTION.set(true);
                (host.function)(host.argument as *mut c_void);
                IN_HOST_FUNCTION.set(false);
            }
            Work::WaitValue { .. } if is_broken("cuStreamWaitValue32_v2") => {}
            Work::WaitValue { address, value, mask, until } => {
                let word = Word::at(*address, By::Copy)?;
                word.wait(stream, |now| until.holds(now & mask, *value));
            }
            Work::WriteValue { address, value } => Word::at(*address, By::Copy)?.set(*value),
            Work::Kernel(launch) => launch.run(stream, random)?,
            Work::Graph(graph) => graph.run(stream, random)?,
        }
        Ok(())
    }
}

/// Cuts bytes into pieces, from either end; small copies are one piece. Pieces hold whole elements of any type.
pub fn pieces(bytes: usize, random: &mut Random) -> Vec<(usize, usize)> {
    let piece = 4096 << random.below(4);
    let mut pieces: Vec<_> = (0..bytes).step_by(piece).map(|at| (at, piece.min(bytes - at))).collect();
    if random.below(2) == 1 {
        pieces.reverse();
    }
    pieces
}

fn copy(stream: &Stream, random: &mut Random, src: *const u8, dst: &View) {
    let apart = (src as usize).abs_diff(dst.host() as usize) >= dst.bytes();
    let pieces = if apart { pieces(dst.bytes(), random) } else { vec![(0, dst.bytes())] };
    for (at, length) in pieces {
        // SAFETY: the source must be readable and the piece writable; because the piece is a part of the view, and what
        // lies outside of the driver's memory is as long as the program said.
        unsafe { ptr::copy(src.wrapping_add(at), dst.host().wrapping_add(at), length) };
        stream.breathe(random);
    }
}

/// Whether a copy goes from a device to the host.
fn is_to_host(dst: u64, src: u64) -> bool {
    let is_device = |address: u64| memory::find(address).is_some_and(|block| block.kind == Kind::Device);
    is_device(src) && !is_device(dst)
}

/// Copies in the time that the device's switch takes, in pieces that take turns with those of others.
fn copy_by_switch(stream: &Stream, (dst, src): (View, View)) {
    const PIECE: usize = 1 << 20;
    let mut until = Instant::now();
    for at in (0..dst.bytes()).step_by(PIECE) {
        let length = PIECE.min(dst.bytes() - at);
        // A thread that wakes late makes up for it.
        until = carried(stream.context.device, length, until);
        // SAFETY: the pieces must be readable and writable and not overlap; because they are parts of views, and of memory of
        // a device and of the host.
        unsafe { ptr::copy(src.host().wrapping_add(at), dst.host().wrapping_add(at), length) };
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// A 32-bit word that host and device share.
pub struct Word {
    view: View,
}

impl Word {
    /// The word at an address.
    pub fn at(address: u64, by: By) -> Result<Word> {
        if !address.is_multiple_of(4) {
            return Err(ILLEGAL_ADDRESS);
        }
        Ok(Word { view: View::of(address, 4, by)? })
    }

    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: the word must be aligned, stay, and be used by atomic operations only; because `at` checked it, the
        // view holds the memory, and the program shares it.
        unsafe { AtomicU32::from_ptr(self.view.host().cast()) }
    }

    /// Writes it, after all that was written before.
    pub fn set(&self, value: u32) {
        self.atomic().store(value, Ordering::SeqCst);
    }

    /// Waits until it is as wanted; the end of the stream's context ends the wait.
    pub fn wait(&self, stream: &Stream, holds: impl Fn(u32) -> bool) {
        let mut looks = 0u32;
        while !holds(self.atomic().load(Ordering::SeqCst)) && !stream.context.has_stopped() {
            looks = looks.saturating_add(1);
            match looks {
                0..=50 => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(u64::from(looks).min(500))),
            }
        }
    }
}
