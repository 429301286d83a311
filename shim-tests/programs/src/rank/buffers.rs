//! The memory of a call: what it holds before, what it must hold afterwards. Input and output lie between guards, in one
//! piece of memory, so that whatever a call writes where it should not is seen.

use crate::gpu::Gpu;
use crate::library::{Comm, Library, SUCCESS};
use crate::model::mixed;
use crate::program::Memory;
use std::borrow::Cow;
use std::ffi::c_void;
use std::ops::Range;

/// Bytes before, between and after buffers.
const GUARD: usize = 96;

/// A piece of memory with guards.
pub struct Image {
    start: *mut u8,
    /// What it must hold in the end.
    wanted: Vec<u8>,
    memory: Held,
    seed: u64,
    gpu: Option<Gpu>,
}

enum Held {
    Device,
    Heap(#[allow(dead_code)] Vec<u64>),
    Shared(*mut c_void),
}

/// Where buffers lie in an image.
pub struct Layout {
    len: usize,
}

impl Layout {
    pub fn new() -> Layout {
        Layout { len: GUARD }
    }

    /// A place for so many bytes, off an element's boundary by `misaligned`.
    pub fn place(&mut self, bytes: usize, misaligned: usize) -> Range<usize> {
        let start = self.len.next_multiple_of(16) + misaligned;
        self.len = start + bytes + GUARD;
        start..start + bytes
    }
}

impl Image {
    /// Takes the memory, on the GPU if there is one; everything in it is filler yet.
    pub fn new(
        library: &Library,
        gpu: Option<Gpu>,
        layout: &Layout,
        memory: Memory,
        seed: u64,
    ) -> Result<Image, String> {
        let len = layout.len;
        let (memory, start) = match memory {
            Memory::Shared => {
                let mut start = std::ptr::null_mut();
                // SAFETY: the pointer must be writable; because it is a local of ours.
                let code = unsafe { (library.mem_alloc)(&raw mut start, len) };
                if code != SUCCESS || start.is_null() {
                    let text = library.text(std::ptr::null_mut());
                    return Err(format!("ncclMemAlloc of {len} bytes returned {code}: {text}"));
                }
                (Held::Shared(start), start.cast::<u8>())
            }
            Memory::Heap | Memory::Registered if gpu.is_some() => {
                let gpu = gpu.expect("it was just looked at");
                (Held::Device, gpu.allocate(len)?)
            }
            Memory::Heap | Memory::Registered => {
                let mut words = vec![0u64; len.div_ceil(8)];
                let start = words.as_mut_ptr().cast::<u8>();
                (Held::Heap(words), start)
            }
        };
        let mut wanted = Vec::with_capacity(len + 8);
        for word in 0..len.div_ceil(8) {
            wanted.extend(mixed(seed, 7, word as u64).to_ne_bytes());
        }
        wanted.truncate(len);
        let image = Image { start, wanted, memory, seed, gpu };
        image.write(0..len)?;
        Ok(image)
    }

    /// Copies the wanted bytes of a range into the memory.
    fn write(&self, range: Range<usize>) -> Result<(), String> {
        let (from, to) = (&self.wanted[range.clone()], self.at(range.start));
        if let Some(gpu) = &self.gpu {
            return gpu.write(to, from);
        }
        // SAFETY: both must have the bytes and not overlap; because the range is inside, and `wanted` is memory of its own.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast(), range.len()) };
        Ok(())
    }

    /// Fills in what a call is given.
    pub fn give(&mut self, place: &Range<usize>, bytes: &[u8]) -> Result<(), String> {
        self.wanted[place.start..place.start + bytes.len()].copy_from_slice(bytes);
        self.write(place.start..place.start + bytes.len())
    }

    /// Notes what a call must leave behind.
    pub fn expect(&mut self, place: &Range<usize>, bytes: &[u8]) {
        self.wanted[place.start..place.start + bytes.len()].copy_from_slice(bytes);
    }

    /// Changes a byte.
    pub fn spoil(&self, at: usize) {
        if self.gpu.is_none() {
            let byte = self.at(at).cast::<u8>();
            // SAFETY: the byte must be inside; because `at` has checked that, and guards follow every buffer.
            unsafe { *byte ^= 1 };
        }
    }

    /// The address of a place.
    pub fn at(&self, offset: usize) -> *mut c_void {
        assert!(offset <= self.wanted.len());
        // SAFETY: the offset must be inside the memory, or at its end; because it was just checked.
        unsafe { self.start.add(offset) }.cast()
    }

    pub fn len(&self) -> usize {
        self.wanted.len()
    }

    fn bytes(&self) -> Result<Cow<'_, [u8]>, String> {
        if let Some(gpu) = &self.gpu {
            return gpu.read(self.start, self.wanted.len()).map(Cow::Owned);
        }
        // SAFETY: the memory must live and nobody write it; because it is ours, and calls on it have ended.
        Ok(Cow::Borrowed(unsafe { std::slice::from_raw_parts(self.start, self.wanted.len()) }))
    }

    /// Compares the memory with what it must hold; `outputs` are judged by `agrees` and everything else to the bit.
    pub fn check(
        &self,
        outputs: &[Range<usize>],
        agrees: impl Fn(&[u8], &[u8]) -> bool,
        element: usize,
    ) -> Result<(), String> {
        let found = self.bytes()?;
        if *found == self.wanted[..] {
            return Ok(());
        }
        let is_output = |at: usize| outputs.iter().find(|place| place.contains(&at));
        for at in (0..found.len()).filter(|&at| found[at] != self.wanted[at]) {
            let Some(place) = is_output(at) else {
                return Err(format!("byte {at} outside of the output was written ({})", self.near(at, outputs)));
            };
            let first = place.start + (at - place.start) / element * element;
            let range = first..first + element;
            if !agrees(&found[range.clone()], &self.wanted[range.clone()]) {
                let wrong = (place.clone()).filter(|&at| found[at] != self.wanted[at]).count();
                let index = (first - place.start) / element;
                return Err(format!(
                    "wrong data: element {index} of {} is {:02x?} and not {:02x?}; {wrong} bytes differ{}",
                    place.len() / element,
                    &found[range.clone()],
                    &self.wanted[range],
                    if self.is_filler(place, &found) { ", all of them still as they were before the call" } else { "" },
                ));
            }
        }
        Ok(())
    }

    fn near(&self, at: usize, outputs: &[Range<usize>]) -> String {
        match outputs.iter().min_by_key(|place| at.abs_diff(place.start).min(at.abs_diff(place.end))) {
            Some(place) => format!("the nearest output is {place:?} of {}", self.len()),
            None => format!("there is none, of {} bytes", self.len()),
        }
    }

    /// Whether nothing was written here.
    fn is_filler(&self, place: &Range<usize>, found: &[u8]) -> bool {
        place.clone().all(|at| found[at] == mixed(self.seed, 7, at as u64 / 8).to_ne_bytes()[at % 8])
    }

    /// Gives the memory back.
    pub fn free(self, library: &Library) -> Result<(), String> {
        if let (Held::Device, Some(gpu)) = (&self.memory, self.gpu) {
            return gpu.release(self.start);
        }
        if let Held::Shared(start) = self.memory {
            // SAFETY: it must come from ncclMemAlloc and be freed once; because `new` got it there and this consumes it.
            let code = unsafe { (library.mem_free)(start) };
            if code != SUCCESS {
                return Err(format!("ncclMemFree returned {code}: {}", library.text(std::ptr::null_mut())));
            }
        }
        Ok(())
    }

    /// Registers the memory with a communicator.
    pub fn register(&self, library: &Library, comm: Comm) -> Result<*mut c_void, i32> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the memory must live until it is deregistered; because that is done before the image is freed.
        let code = unsafe { (library.register)(comm, self.start.cast(), self.len(), &raw mut handle) };
        if code == SUCCESS {
            Ok(handle)
        } else {
            Err(code)
        }
    }
}
