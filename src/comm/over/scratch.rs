//! Device memory for the parts between two phases, one piece for each stream.
//!
//! Calls on one stream follow each other, so they may share a piece; calls on two streams may run at once. A piece that
//! has become too small is kept to the end: what was issued before may still use it.

use crate::comm::locked;
use crate::error::Code;
use crate::vendor::calls::{Address, Stream};
use crate::vendor::Library;
use std::collections::HashMap;
use std::sync::Mutex;

/// The least that is asked for.
const LEAST_BYTES: usize = 1 << 20;

/// The pieces of one communicator.
#[derive(Debug, Default)]
pub struct Scratch {
    pieces: Mutex<Pieces>,
}

#[derive(Debug, Default)]
struct Pieces {
    by_stream: HashMap<Stream, (Address, usize)>,
    outgrown: Vec<Address>,
}

impl Scratch {
    /// At least `bytes` bytes for a stream.
    pub fn of(&self, stream: Stream, bytes: usize, library: &Library) -> Result<Address, Code> {
        let mut pieces = locked(&self.pieces);
        match pieces.by_stream.get(&stream) {
            Some((address, len)) if *len >= bytes => return Ok(*address),
            _ => {}
        }
        // Twice as much each time, so that all that is kept is no more than twice what is used.
        let len = bytes.max(LEAST_BYTES).next_power_of_two();
        let mut address = 0;
        // SAFETY: the place must be valid; because it is a local.
        unsafe { library.mem_alloc(&mut address, len) }?;
        if let Some((old, _)) = pieces.by_stream.insert(stream, (address, len)) {
            pieces.outgrown.push(old);
        }
        Ok(address)
    }

    /// Gives everything back. Nothing that was issued may still run.
    pub fn free(&self, library: &Library) {
        let Pieces { by_stream, outgrown } = std::mem::take(&mut *locked(&self.pieces));
        for address in by_stream.into_values().map(|(address, _)| address).chain(outgrown) {
            // SAFETY: the memory must be the vendor's and unused; because it came from there, and the communicators that
            // used it have ended.
            if let Err(code) = unsafe { library.mem_free(address) } {
                crate::info!("freeing scratch memory: the vendor's library returns {code}");
            }
        }
    }
}
