//! Random contents, and memory that a bed and the host device work on.

use super::beds::Grid;
use std::cell::RefCell;
use strata::device::host;
use strata::dtype::DataType;
use strata::memory::{Arena, Region};

/// A generator with a seed: xorshift.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 3
    }

    pub fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Arbitrary bits, numbers of ordinary size, and special values.
    pub fn element(&mut self, dtype: DataType) -> [u8; 8] {
        let smallest = [f64::from(f32::MIN_POSITIVE), 6e-5, 1.5e-5, 0.015, 0.002, 1e-7, 3e-308, 1e-45];
        let specials = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0, -1.0, 448.0, 65504.0, 57344.0];
        let number = (self.next() as i32 >> 8) as f64 / f64::from(1 << 19);
        match self.below(8) {
            0 => host::reference::encode(dtype, self.one_of(&specials)),
            1 => host::reference::encode(dtype, number * self.one_of(&smallest)),
            2..=4 => (self.next() << 3 ^ self.next()).to_le_bytes(),
            _ => host::reference::encode(dtype, number),
        }
    }

    /// The values at which something begins or ends: numbers, infinities, the first and last NaN, of either sign.
    fn limit(&mut self, dtype: DataType) -> [u8; 8] {
        let numbers = [0.0, 1.0, 448.0, 65504.0, 57344.0, f64::INFINITY, f64::NAN, f64::from(f32::MIN_POSITIVE)];
        let first = u64::from_le_bytes(host::reference::encode(dtype, self.one_of(&numbers)));
        let sign = 1u64 << (8 * dtype.size() - 1);
        let bits = match self.below(8) {
            0 => first.wrapping_add(1),
            1 => first.wrapping_sub(1),
            2 => sign - 1,
            3 => self.below(3) as u64,
            // Around a power of two.
            4 | 5 => (1u64 << self.below(8 * dtype.size())).wrapping_add(self.below(3) as u64).wrapping_sub(1),
            _ => first,
        };
        (if self.below(2) == 0 { bits } else { bits ^ sign }).to_le_bytes()
    }

    pub fn grid(&mut self) -> Grid {
        Grid { blocks: self.one_of(&[1, 2, 5]), threads: self.one_of(&[1, 32, 50]), seed: self.below(1 << 30) as u64 }
    }
}

/// The same memory twice: what a bed works on and what the host device works on.
pub struct Twice {
    arenas: [Region; 2],
    taken: usize,
    /// Where something lies, and how many bytes it has: for a bed these are the allocations.
    placed: Vec<(usize, usize)>,
}

thread_local! {
    /// Memory of earlier cases, which stays to the end of the process.
    static FREE: RefCell<Vec<[Region; 2]>> = const { RefCell::new(Vec::new()) };
}

impl Drop for Twice {
    fn drop(&mut self) {
        FREE.with_borrow_mut(|free| free.push(self.arenas));
    }
}

impl Twice {
    pub fn new(bytes: usize) -> Twice {
        let known = FREE.with_borrow_mut(|free| {
            let at = free.iter().position(|arenas| arenas[0].len() == bytes)?;
            Some(free.swap_remove(at))
        });
        let arenas = known.unwrap_or_else(|| [bytes; 2].map(|bytes| Arena::new(bytes).leak()));
        Twice { arenas, taken: 64, placed: Vec::new() }
    }

    pub fn fill(&mut self, dtype: DataType, random: &mut Random) {
        let size = dtype.size();
        let element = if random.below(3) == 0 { Random::limit } else { Random::element };
        let bytes: Vec<u8> =
            (0..self.arenas[0].len()).step_by(size).flat_map(|_| element(random, dtype)[..size].to_vec()).collect();
        self.write(0, &bytes[..self.arenas[0].len()]);
    }

    /// Writes the same into both.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        for arena in self.arenas {
            assert_eq!(arena.as_ptr() as usize % 64, 0);
            arena.part(at, bytes.len()).write(bytes);
        }
    }

    /// Room for `bytes` bytes, `misplaced` bytes past a multiple of 16; a gap stays on either side.
    pub fn place(&mut self, bytes: usize, misplaced: usize) -> usize {
        let at = self.taken.next_multiple_of(16) + misplaced;
        self.taken = at + bytes + 17;
        self.placed.push((at, bytes));
        at
    }

    /// An address of the bed's memory.
    pub fn address(&self, at: usize) -> u64 {
        self.arenas[0].as_ptr() as u64 + at as u64
    }

    /// Some of the host's memory.
    pub fn region(&self, at: usize, bytes: usize) -> Region {
        self.arenas[1].part(at, bytes)
    }

    /// Some of the bed's memory, which must lie in what was placed at once.
    pub fn reached(&self, address: u64, bytes: usize) -> Result<Region, String> {
        let at = address.wrapping_sub(self.arenas[0].as_ptr() as u64) as usize;
        let below = self.placed.partition_point(|(start, _)| *start <= at).checked_sub(1).map(|last| self.placed[last]);
        match below {
            Some((start, length)) if at - start + bytes <= length => Ok(self.arenas[0].part(at, bytes)),
            _ => Err(format!("{bytes} bytes at {address:#x}, which no allocation has")),
        }
    }

    /// An error where they differ, also outside of what was to be written.
    pub fn same(&self, what: impl Fn() -> String) -> Result<(), String> {
        let [got, wanted] = self.arenas.map(|arena| {
            let mut bytes = vec![0; arena.len()];
            arena.read(&mut bytes);
            bytes
        });
        match got.iter().zip(&wanted).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => {
                let near = at & !7..(at & !7) + 8;
                Err(format!("{}: at {at}: {:02x?}, wanted {:02x?}", what(), &got[near.clone()], &wanted[near]))
            }
        }
    }
}
