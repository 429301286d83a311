//! PTX that a program loads, run thread by thread.

use crate::fault::{Result, ILLEGAL_ADDRESS, INVALID_IMAGE, LAUNCH_FAILED};
use crate::memory::{self, By, View};
use crate::random::Random;
use crate::stream::Stream;
use ptx::{Device, Launch, Manner, Module, Nan};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

/// Accesses after which a kernel lets others go on.
const BREATH: u32 = 512;

/// Reads a module.
pub fn parse(text: &str) -> Result<Module> {
    Module::parse(text).map_err(|why| {
        eprintln!("softgpu: PTX that cannot be run: {why}");
        INVALID_IMAGE
    })
}

/// Memory as a kernel on a stream reaches it.
struct Reach<'a> {
    stream: &'a Stream,
    random: RefCell<&'a mut Random>,
    /// Blocks that were reached: where they begin and end, and what holds them.
    known: RefCell<Vec<(u64, u64, View)>>,
    accesses: Cell<u32>,
    naps: Cell<u32>,
    is_illegal: Cell<bool>,
}

/// What has so many bytes, shared with the host and other streams.
macro_rules! shared {
    ($atomic:ty, $at:expr) => {
        // SAFETY: the memory must be aligned, stay, and be used by atomic operations only; because the interpreter and
        // `host` checked it, the view holds it, and what others do to it at the same time has no value to rely on.
        unsafe { <$atomic>::from_ptr($at.cast()) }
    };
}

impl Reach<'_> {
    /// Where the host finds what a kernel may reach.
    fn host(&self, address: u64, bytes: usize) -> std::result::Result<*mut u8, String> {
        self.accesses.set(self.accesses.get() + 1);
        if self.accesses.get().is_multiple_of(BREATH) {
            self.stream.breathe(&mut self.random.borrow_mut());
        }
        let find = |known: &[(u64, u64, View)]| {
            let found = known.iter().find(|(start, end, _)| *start <= address && address + bytes as u64 <= *end);
            found.map(|(start, _, view)| view.host().wrapping_add((address - start) as usize))
        };
        if let Some(host) = find(&self.known.borrow()) {
            return Ok(host);
        }
        let illegal = || {
            self.is_illegal.set(true);
            format!("{bytes} bytes at {address:#x}, which the kernel may not reach")
        };
        let block = memory::find(address).ok_or_else(illegal)?;
        let by = By::Kernel(self.stream.context.device);
        let view = View::of(block.start, block.bytes as usize, by).map_err(|_| illegal())?;
        let mut known = self.known.borrow_mut();
        known.push((block.start, block.start + block.bytes, view));
        find(&known).ok_or_else(illegal)
    }
}

impl Device for Reach<'_> {
    fn load(&self, address: u64, bytes: usize) -> std::result::Result<u128, String> {
        let at = self.host(address, bytes)?;
        Ok(match bytes {
            1 => shared!(AtomicU8, at).load(Ordering::Relaxed).into(),
            2 => shared!(AtomicU16, at).load(Ordering::Relaxed).into(),
            4 => shared!(AtomicU32, at).load(Ordering::Relaxed).into(),
            8 => shared!(AtomicU64, at).load(Ordering::Relaxed).into(),
            _ => {
                let low = shared!(AtomicU64, at).load(Ordering::Relaxed);
                let high = shared!(AtomicU64, at.wrapping_add(8)).load(Ordering::Relaxed);
                u128::from(low) | u128::from(high) << 64
            }
        })
    }

    fn store(&self, address: u64, bytes: usize, value: u128) -> std::result::Result<(), String> {
        let at = self.host(address, bytes)?;
        match bytes {
            1 => shared!(AtomicU8, at).store(value as u8, Ordering::Relaxed),
            2 => shared!(AtomicU16, at).store(value as u16, Ordering::Relaxed),
            4 => shared!(AtomicU32, at).store(value as u32, Ordering::Relaxed),
            8 => shared!(AtomicU64, at).store(value as u64, Ordering::Relaxed),
            _ => {
                shared!(AtomicU64, at).store(value as u64, Ordering::Relaxed);
                shared!(AtomicU64, at.wrapping_add(8)).store((value >> 64) as u64, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn sleep(&self) -> std::result::Result<(), String> {
        if self.stream.context.has_stopped() {
            return Err("its context has ended".to_string());
        }
        self.naps.set(self.naps.get().saturating_add(1));
        match self.naps.get() {
            0..=50 => thread::yield_now(),
            naps => thread::sleep(Duration::from_micros(u64::from(naps).min(500))),
        }
        Ok(())
    }
}

/// Runs a kernel of a module, its threads in an order that the stream's numbers decide.
pub fn run(
    module: &Module,
    kernel: &str,
    params: &[u8],
    grid: ([u32; 3], [u32; 3]),
    stream: &Stream,
    random: &mut Random,
) -> Result {
    let kernel = module.kernel(kernel).ok_or(LAUNCH_FAILED)?;
    let launch = Launch { kernel, params, blocks: grid.0, threads: grid.1 };
    let manner = Manner { seed: 1 + random.below(1 << 32), nan: Nan::Nvidia, limit: u64::MAX };
    let reach = Reach {
        stream,
        random: RefCell::new(random),
        known: RefCell::default(),
        accesses: Cell::new(0),
        naps: Cell::new(0),
        is_illegal: Cell::new(false),
    };
    match launch.run(&reach, manner) {
        Ok(_) => Ok(()),
        // What waits in a context that has ended is dropped, as other work is.
        Err(_) if stream.context.has_stopped() => Ok(()),
        Err(trap) => {
            eprintln!("softgpu: {trap}");
            Err(if reach.is_illegal.get() { ILLEGAL_ADDRESS } else { LAUNCH_FAILED })
        }
    }
}
