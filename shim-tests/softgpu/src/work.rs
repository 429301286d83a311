//! What a stream can be told to do, and how it does it.

use crate::capture::Graph;
use crate::fault::{Result, ILLEGAL_ADDRESS, INVALID_VALUE};
use crate::kernels::Launch;
use crate::memory::{By, View};
use crate::random::Random;
use crate::settings::is_broken;
use crate::stream::{Fence, Stream};
use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// One piece of work.
#[derive(Clone)]
pub enum Work {
    /// Nothing: an event is recorded here.
    Nothing,
    /// It waits for a place in another stream.
    After(Fence),
    /// It copies.
    Copy { dst: u64, src: u64, bytes: usize },
    /// It copies what was taken from pageable memory when it was submitted.
    Upload { dst: u64, data: Arc<[u8]> },
    /// It sets bytes.
    Fill { dst: u64, value: u8, bytes: usize },
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
    /// Whether it reads or writes memory while it runs, and ends by itself.
    pub fn touches_memory(&self) -> bool {
        matches!(self, Work::Copy { .. } | Work::Upload { .. } | Work::Fill { .. } | Work::Kernel(_))
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
            Work::Nothing | Work::After(_) => write!(f, "an event"),
            Work::Copy { dst, src, bytes } => write!(f, "the copy of {bytes} bytes from {src:#x} to {dst:#x}"),
            Work::Upload { dst, data } => write!(f, "the copy of {} bytes of pageable memory to {dst:#x}", data.len()),
            Work::Fill { dst, bytes, .. } => write!(f, "the setting of {bytes} bytes at {dst:#x}"),
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
            Work::After(fence) => fence.wait_unless(|| stream.context.has_stopped()),
            Work::Copy { dst, src, bytes } => {
                let (dst, src) = (View::of(*dst, *bytes, By::Copy)?, View::of(*src, *bytes, By::Copy)?);
                copy(stream, random, src.host(), &dst);
            }
            Work::Upload { dst, data } => {
                copy(stream, random, data.as_ptr(), &View::of(*dst, data.len(), By::Copy)?);
            }
            Work::Fill { dst, value, bytes } => {
                let dst = View::of(*dst, *bytes, By::Copy)?;
                for (at, length) in pieces(*bytes, random) {
                    // SAFETY: the piece must be writable; because it is a part of the view.
                    unsafe { ptr::write_bytes(dst.host().wrapping_add(at), *value, length) };
                    stream.breathe(random);
                }
            }
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
