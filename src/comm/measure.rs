//! How fast a new communicator's links between nodes are: a few short all-gathers and a longer one, within a budget.
//!
//! Collective. Every rank runs the same operations: whether a further one follows is decided by what rank 0 said in the one
//! before. All ranks end with rank 0's figures, so that all choose alike.
#![forbid(unsafe_code)]

use super::{locked, CollectiveCall, Comm, Launch, Operation, StreamRef};
use crate::dtype::DataType;
use crate::error::Result;
use crate::memory::Arena;
use crate::plan::Collective;
use crate::select::links::{self, Links};
use crate::select::model::AUTO;
use crate::select::Knowledge;
use crate::topo::Rank;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Short all-gathers, of which the quickest counts; the first ones make connections and plans.
const SHORT: usize = 6;
/// Longer ones, at most.
const LONG: usize = 3;
/// Bytes of a rank in a longer all-gather, at most, and of all ranks together.
const LONG_BLOCK: usize = 128 << 10;
const LONG_TOTAL: usize = 2 << 20;
/// Bytes of a rank in a short one, enough for what rank 0 has to say.
const WORD: usize = links::BYTES;

/// A communicator whose links are being measured.
struct Meter<'a> {
    comm: &'a Arc<Comm>,
    input: Arena,
    output: Arena,
}

impl Meter<'_> {
    /// One all-gather of `block` bytes a rank, which begin with `word`. Returns rank 0's word and the time it took here.
    fn gather(&mut self, word: [u8; WORD], block: usize) -> Result<([u8; WORD], Duration)> {
        let two_levels = self.comm.grid().nrails() > 1;
        let (input, output) = (self.input.region(), self.output.region());
        input.part(0, WORD).write(&word);
        let call = CollectiveCall {
            collective: Collective::AllGather,
            input: input.part(0, block),
            output: output.part(0, block * self.comm.nranks()),
            count: block,
            dtype: DataType::I8,
            reduction: None,
            factor_at: None,
            root: Rank(0),
            algorithm: Some(String::from(if two_levels { "two_level(direct,log)" } else { "log" })),
        };
        let operation = Operation::Collective(call);
        let begun = Instant::now();
        super::launch(vec![Launch { comm: self.comm.clone(), operation, stream: StreamRef::Null }])?;
        let time = begun.elapsed();
        let mut said = [0; WORD];
        output.part(0, WORD).read(&mut said);
        Ok((said, time))
    }

    /// The quickest of several all-gathers, and whether rank 0 wants more.
    fn quickest(&mut self, block: usize, runs: usize, deadline: Instant) -> Result<(Duration, bool)> {
        let mut least = Duration::MAX;
        for _ in 0..runs {
            let mut word = [0; WORD];
            word[0] = u8::from(Instant::now() < deadline);
            let (said, time) = self.gather(word, block)?;
            least = least.min(time);
            if said[0] == 0 {
                return Ok((least, false));
            }
        }
        Ok((least, true))
    }
}

/// Measures the links between a communicator's nodes. None where they could not be told within the budget.
pub(super) fn measure(comm: &Arc<Comm>, budget: Duration) -> Result<Option<Links>> {
    let grid = comm.grid();
    let (nranks, nodes) = (grid.nranks(), grid.nnodes() as f64);
    let block = LONG_BLOCK.min(LONG_TOTAL / nranks).max(WORD);
    let deadline = Instant::now() + budget;
    let mut meter = Meter { comm, input: Arena::new(block), output: Arena::new(block * nranks) };
    let (short, more) = meter.quickest(WORD, SHORT, deadline)?;
    if !more {
        return Ok(None);
    }
    let (long, _) = meter.quickest(block, LONG, deadline)?;
    let taken = (block * nranks) as f64 / grid.nrails() as f64 * (nodes - 1.0) / nodes;
    let latency_us = short.as_secs_f64() * 1e6 / nodes.log2().ceil();
    let gbps = taken / long.saturating_sub(short).as_nanos() as f64;
    let mine = Links { latency_us, gbps };
    let (zero, _) = meter.gather(mine.encode(), WORD)?;
    Ok(Links::decode(zero).rounded())
}

impl Comm {
    /// Finds out what the links between the nodes are, unless the parent's are known or a machine is named. Collective.
    pub(super) fn meter(self: &Arc<Comm>, parent: Option<Links>) -> Result<()> {
        let on_host = self.gpu.is_none() && self.options.companion.is_none();
        let auto = self.config.machine == AUTO && self.config.measure_us > 0;
        if !(on_host && auto) || self.grid.nnodes() == 1 {
            return Ok(());
        }
        let links = match parent {
            Some(links) => Some(links),
            None => {
                let tell = |told| locked(&self.engine).iter_mut().for_each(|engine| engine.tell_choices(told));
                tell(false);
                let links = measure(self, Duration::from_micros(self.config.measure_us))?;
                tell(true);
                links
            }
        };
        let Some(links) = links else { return Ok(()) };
        let Links { latency_us, gbps } = links;
        crate::info!("links between nodes: about {latency_us:.1} us a message and {gbps:.3} GB/s a rank");
        // Set once: this runs once for each communicator.
        let _ = self.links.set(links);
        let machine = Some(Arc::new(links.machine(self.grid.nrails())));
        let knowledge = Knowledge { machine, ..self.knowledge.clone() };
        locked(&self.engine).iter_mut().for_each(|engine| engine.know(&knowledge));
        Ok(())
    }
}
