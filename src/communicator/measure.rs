//! How fast a new communicator's links between nodes are: a few short all-gathers and a longer one, within a budget.
//!
//! Collective. Every rank runs the same operations: whether a further one follows is decided by what rank 0 said in the one
//! before. Each tells all others its times, so that all have the same figures and choose alike.

use super::members::on_host;
use super::{CollectiveCall, Comm, Operation};
use crate::dtype::DataType;
use crate::error::Result;
use crate::memory::{Arena, DeviceRegion};
use crate::plan::Collective;
use crate::selection::links::Links;
use crate::selection::model::AUTO;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Short all-gathers, of which the quickest counts; the first ones make connections and plans.
const SHORT: usize = 6;
/// Longer ones, at most.
const LONG: usize = 3;
/// How often all this is done, where the longer ones seem quicker than the short ones: other programs took the processors.
const TRIES: usize = 5;
/// Bytes of a rank in a longer all-gather, at most, and of all ranks together.
const LONG_BLOCK: usize = 128 << 10;
const LONG_TOTAL: usize = 2 << 20;
/// Bytes of a rank in a short one: its time of the one before, and whether it wants more.
const WORD: usize = 16;

impl CollectiveCall {
    /// A call of Strata's own that only moves bytes, of rank 0 where there is a root: input and output, and the bytes of a block.
    pub(super) fn of_bytes(collective: Collective, buffers: [DeviceRegion; 2], count: usize) -> CollectiveCall {
        CollectiveCall::new(collective, buffers, count, DataType::I8)
    }
}

/// A communicator whose links are being measured.
struct Meter<'a> {
    comm: &'a Arc<Comm>,
    input: Arena,
    output: Arena,
}

impl Meter<'_> {
    /// One all-gather of `block` bytes a rank, which begin with `word`. Returns all ranks' words and the time it took here.
    fn gather(&mut self, word: [u8; WORD], block: usize) -> Result<(Vec<[u8; WORD]>, Duration)> {
        let two_levels = self.comm.grid().nrails() > 1;
        let nranks = self.comm.nranks();
        // SAFETY: the arena must outlive every use; because the launch below ends with the operation, and a communicator
        // that fails cancels it.
        let input = unsafe { self.input.region().unbound() };
        // SAFETY: the arena must outlive every use; because the launch below ends with the operation, as above.
        let output = unsafe { self.output.region().unbound() };
        input.part(0, WORD).write(&word);
        let buffers = [input.part(0, block).as_device(), output.part(0, block * nranks).as_device()];
        let algorithm = Some(String::from(if two_levels { "two_level(direct,log)" } else { "log" }));
        let call = CollectiveCall { algorithm, ..CollectiveCall::of_bytes(Collective::AllGather, buffers, block) };
        let operation = Operation::Collective(call);
        let begun = Instant::now();
        // Ranks that go on without lost ones may be on a stream's thread.
        super::lost::run(self.comm, [operation], (false, false))?;
        let time = begun.elapsed();
        let mut said = vec![[0; WORD]; nranks];
        said.iter_mut().enumerate().for_each(|(rank, word)| output.part(rank * block, WORD).read(word));
        Ok((said, time))
    }

    /// The quickest of several all-gathers in ns, each as long as the rank that waited longest, and whether rank 0 wants more.
    /// A rank that comes late finds the others' data there already: its own time says nothing.
    fn quickest(&mut self, block: usize, runs: usize, deadline: Instant) -> Result<(u64, bool)> {
        let (mut least, mut mine) = (u64::MAX, 0u64);
        for run in 0..=runs {
            let mut word = [0; WORD];
            word[..8].copy_from_slice(&mine.to_le_bytes());
            word[8] = u8::from(Instant::now() < deadline);
            // The last one only tells the times of the one before.
            let (said, time) = self.gather(word, if run < runs { block } else { WORD })?;
            let before = |word: &[u8; WORD]| u64::from_le_bytes(std::array::from_fn(|index| word[index]));
            if run > 0 {
                least = least.min(said.iter().map(before).max().unwrap_or(0));
            }
            mine = time.as_nanos() as u64;
            if said[0][8] == 0 {
                return Ok((least, false));
            }
        }
        Ok((least, true))
    }
}

/// Measures the links between a communicator's nodes; all ranks find the same. None where they could not be told within the
/// budget.
pub(super) fn measure(comm: &Arc<Comm>, budget: Duration) -> Result<Option<Links>> {
    let grid = comm.grid();
    let (nranks, nodes) = (grid.nranks(), grid.nnodes() as f64);
    let block = LONG_BLOCK.min(LONG_TOTAL / nranks).max(WORD);
    let deadline = Instant::now() + budget;
    let mut meter = Meter { comm, input: Arena::new(block), output: Arena::new(block * nranks) };
    let taken = (block * nranks) as f64 / grid.nrails() as f64 * (nodes - 1.0) / nodes;
    let (mut short, mut long) = (u64::MAX, u64::MAX);
    // All ranks have the same times, and so go on or not together.
    for _ in 0..TRIES {
        let (quickest, more) = meter.quickest(WORD, SHORT, deadline)?;
        short = short.min(quickest);
        if !more {
            return Ok(None);
        }
        let (quickest, more) = meter.quickest(block, LONG, deadline)?;
        long = long.min(quickest);
        if long == u64::MAX {
            return Ok(None);
        }
        let latency_us = short as f64 / 1e3 / nodes.log2().ceil();
        let links = Links { latency_us, gbps: taken / long.saturating_sub(short) as f64 }.rounded();
        if links.is_some() || !more {
            return Ok(links);
        }
    }
    Ok(None)
}

impl Comm {
    /// Finds out what the links between the nodes are, unless the parent's are known or a machine is named. Collective.
    pub(super) fn meter(self: &Arc<Comm>, parent: Option<Links>) -> Result<()> {
        let on_host = on_host(&self.members, &self.options);
        let auto = self.config.machine == AUTO && self.config.measure_us > 0;
        if !(on_host && auto) || self.grid.nnodes() == 1 {
            return Ok(());
        }
        let links = match parent {
            Some(links) => Some(links),
            None => {
                let quiet = |quiet| self.engine.lock().iter_mut().for_each(|engine| engine.keep_quiet(quiet));
                quiet(true);
                let links = measure(self, Duration::from_micros(self.config.measure_us))?;
                quiet(false);
                links
            }
        };
        let Some(links) = links else { return Ok(()) };
        let Links { latency_us, gbps } = links;
        crate::info!("links between nodes: about {latency_us:.1} us a message and {gbps:.3} GB/s a rank");
        // Set once: this runs once for each communicator.
        let _ = self.links.set(links);
        self.selector.know_machine(Arc::new(links.machine(self.grid.nrails())));
        Ok(())
    }
}
