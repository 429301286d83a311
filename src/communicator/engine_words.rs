//! The round of words before a call, by which ranks know of each other what the call's own messages would not show.
//!
//! Before an all-to-all in two steps whose blocks differ in size, the ranks tell each other, in two steps, how long the blocks are. So a rank
//! knows what it hands on, and whether it gets what it expects: of a message with the blocks of a node only their sum would show.
//!
//! Before a provider has a call, the ranks tell each other that they make it. Messages of the round have the call's signature, and each rank
//! hears of each, by way of others, so no provider gets a call that some rank makes otherwise: libraries that take no heed of that, as MPI
//! does not, would end it with wrong data. Where each rank knows its own sizes only, a round in which they tell each other these comes before
//! it, and a rank that finds others than it expects does not take part in the second.
//!
//! Words are in host memory, wherever the data is.
#![forbid(unsafe_code)]

use super::{explain, Engine, Running};
use crate::algorithms::{two_step, Choice};
use crate::communicator::device::Device;
use crate::communicator::independent::IndependentMessages;
use crate::communicator::joined::CallStage;
use crate::communicator::live::{Buffers, LiveWorld};
use crate::communicator::CollectiveCall;
use crate::dtype::DataType;
use crate::error::{counted, Error, Result};
use crate::exec::{Execution, Program, Progress};
use crate::memory::DeviceRegion;
use crate::plan::layout::Layout;
use crate::plan::{Buffer, Collective, Shape, Span};
use crate::topo::Rank;
use std::sync::Arc;

/// Bytes of a word.
const WORD_BYTES: usize = size_of::<u64>();

/// A round of words; kept from call to call.
#[derive(Debug, Default)]
pub(super) struct WordRound {
    execution: Execution,
    /// What this rank tells, and what it is told.
    words: Option<[DeviceRegion; 2]>,
    /// Whether these are counts.
    of_counts: bool,
    /// The round in which all hear of all.
    agreement: Option<Arc<Program>>,
}

impl WordRound {
    /// The ranks whose words are missing.
    pub(super) fn waiting_for(&self) -> Vec<Rank> {
        self.execution.waiting_for()
    }
}

impl Engine {
    /// Whether ranks hand on blocks of others in a call, of which each rank knows its own only.
    fn hands_on(&self, call: &CollectiveCall, index: usize) -> bool {
        call.has_own_sizes() && self.recent[index].program.plan().algorithm == two_step::TWO_STEP.name
    }

    /// Begins a call that is in `recent`, with a round of words before it where it has one.
    pub(super) fn begin_prepared(&mut self, call: &CollectiveCall, index: usize) -> Result<()> {
        let is_agreed = self.is_agreed(index);
        if self.hands_on(call, index) || is_agreed && call.has_own_sizes() {
            return self.begin_counts(call, index);
        }
        match is_agreed {
            true => self.begin_agreement(call, index),
            false => self.run(call, index),
        }
    }

    /// Whether the ranks make sure that all make a call before it begins.
    fn is_agreed(&self, index: usize) -> bool {
        self.config.provider_check && self.recent[index].decision.provider().is_some()
    }

    /// Begins the round in which the ranks hear how long the blocks are that they get or hand on.
    #[inline(never)]
    fn begin_counts(&mut self, call: &CollectiveCall, index: usize) -> Result<()> {
        let program = match (self.hands_on(call, index), call.collective) {
            (true, _) => self.recent[index].program.clone(),
            (false, Collective::AllToAll) if self.grid.nnodes() > 1 => self.words(call, two_step::TWO_STEP.name)?,
            (false, Collective::AllToAll) => self.words(call, "direct")?,
            (false, _) => self.words(call, "tree")?,
        };
        self.telling.of_counts = true;
        self.begin_words(call, index, program)
    }

    /// A call's collective, of words.
    fn words(&mut self, call: &CollectiveCall, algorithm: &str) -> Result<Arc<Program>> {
        let root = if call.collective.has_root() { call.root } else { Rank(0) };
        let shape = Shape { root, ..Shape::new(call.collective, self.grid.clone()) };
        self.program(&Choice::flat(algorithm), &shape, Default::default())
    }

    /// Begins the round by which all ranks know that they make the same call.
    #[inline(never)]
    fn begin_agreement(&mut self, call: &CollectiveCall, index: usize) -> Result<()> {
        let program = match &self.telling.agreement {
            Some(program) => program.clone(),
            None => {
                let choice = match self.grid.nnodes() > 1 && self.grid.nrails() > 1 {
                    true => Choice::leveled("two_level", "direct", "log"),
                    false => Choice::flat("log"),
                };
                let shape = Shape::new(Collective::AllGather, self.grid.clone());
                let program = self.program(&choice, &shape, Default::default())?;
                self.telling.agreement.insert(program).clone()
            }
        };
        self.telling.of_counts = false;
        self.begin_words(call, index, program)
    }

    /// Begins a round of words before a call that is in `recent`.
    #[inline(never)]
    fn begin_words(&mut self, call: &CollectiveCall, index: usize, program: Arc<Program>) -> Result<()> {
        let (layout, bytes) = (layout_of_words(&program), WORD_BYTES * self.grid.nranks());
        let scratch = self.host.scratch(layout.scratch_bytes() + 2 * bytes)?;
        let words = [0, bytes].map(|at| scratch.part(layout.scratch_bytes() + at, bytes));
        let blocks = call.blocks.iter().filter(|_| self.telling.of_counts).flat_map(|blocks| blocks.input());
        let said: Vec<u8> = blocks.flat_map(|block| (block.count as u64).to_ne_bytes()).collect();
        self.host.write(words[0].part(0, said.len()), &said);
        self.telling.words = Some(words);
        let limit_ns = self.limit_ns();
        self.telling.execution.begin(program, layout, 1, limit_ns);
        let (packed, stage, front, epochs) = (None, CallStage::Words, None, None);
        let call = call.clone();
        self.running = Some(Running { call, scratch, packed, stage, ready: index, front, on_host: true, epochs });
        Ok(())
    }

    /// Makes progress with the round; behind it the call begins.
    #[inline(never)]
    pub(super) fn poll_words(&mut self) -> Result<Progress> {
        let (Some(running), Some(words)) = (&self.running, self.telling.words) else {
            return Err(Error::Internal("no round of words is running".to_string()));
        };
        let mut world = LiveWorld {
            device: &mut self.host,
            transport: &mut self.transport,
            buffers: Buffers::of(&running.call, running.scratch, Some(words)),
            rank: self.rank,
            dtype: DataType::U64,
            reduction: None,
            residual: None,
            sequence: self.sequence,
            signature: self.recent[running.ready].signature,
            provider: None,
            uneven: false,
            independent: self.independent.as_mut(),
            lists: &mut self.lists,
            front: None,
        };
        let outcome = self.telling.execution.poll(&mut world);
        let beside = || self.independent.as_ref().is_some_and(IndependentMessages::are_open);
        let progress = outcome.map_err(|error| {
            // No provider has the call yet.
            let call = CollectiveCall { decision: None, ..running.call.clone() };
            explain(error, &call, (self.sequence, self.own_sizes), beside())
        })?;
        if progress == Progress::Done {
            self.run_with_words(words[1])?;
            return Ok(Progress::Moved);
        }
        Ok(progress)
    }

    /// The words are there: has the call run.
    fn run_with_words(&mut self, told: DeviceRegion) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let of_counts = self.telling.of_counts;
        if of_counts {
            self.compare_counts(&running.call, told)?;
        }
        match of_counts {
            true if self.is_agreed(running.ready) => self.begin_agreement(&running.call, running.ready)?,
            true => {
                self.lay_out_handed_on(&running)?;
                self.run(&running.call, running.ready)?;
            }
            false => self.run(&running.call, running.ready)?,
        }
        self.running.iter_mut().for_each(|begun| begun.front = running.front.clone());
        Ok(())
    }

    /// Lays out what this rank hands on, as it has been told.
    fn lay_out_handed_on(&mut self, running: &Running) -> Result<()> {
        let layout = layout_of_words(&self.recent[running.ready].program);
        let nslots = self.recent[running.ready].program.plan().chunks(Buffer::Scratch);
        let (mut counts, mut place) = (Vec::with_capacity(nslots), Vec::new());
        for slot in 0..nslots {
            place.clear();
            layout.pieces(0, 0, &Span::scratch(slot, 1, 0), &mut place);
            let at = place.first().map_or(0, |piece| piece.offset);
            counts.push(self.word_at(running.scratch.part(at, WORD_BYTES))?);
        }
        let ready = &mut self.recent[running.ready];
        if let Some(blocks) = &running.call.blocks {
            let blocks = Arc::new(blocks.handing(counts));
            ready.layout = ready.program.layout_of(blocks, running.call.dtype.size(), ready.segment_bytes);
        }
        Ok(())
    }

    /// An error where a rank has other than this one expects of it.
    fn compare_counts(&mut self, call: &CollectiveCall, told: DeviceRegion) -> Result<()> {
        let Some(blocks) = &call.blocks else { return Ok(()) };
        for (place, expected) in blocks.output().iter().map(|block| block.count).enumerate() {
            // What is scattered comes from the root alone.
            let rank = if call.collective == Collective::Scatter { call.root.index() } else { place };
            let count = self.word_at(told.part(place * WORD_BYTES, WORD_BYTES))?;
            if count != expected {
                let (sequence, dtype, me) = (self.sequence, call.dtype.name(), self.rank);
                return Err(Error::InvalidUsage(format!(
                    "operation {sequence} is not the same on all ranks, {} of blocks of different sizes of {dtype}: rank {rank} has \
                     {} for rank {me}, which expects {expected} of it",
                    call.collective.name(),
                    counted(count, "element")
                )));
            }
        }
        Ok(())
    }

    fn word_at(&mut self, place: DeviceRegion) -> Result<usize> {
        let mut word = [0; WORD_BYTES];
        self.host.read(place, &mut word)?;
        Ok(u64::from_ne_bytes(word) as usize)
    }
}

/// Where the words of a round lie.
fn layout_of_words(program: &Program) -> Layout {
    program.layout(1, WORD_BYTES, usize::MAX)
}
