//! What the engine gets ready before a call runs: its program, its layout, its room, and what each rank has of it.
#![forbid(unsafe_code)]

use super::{least_scratch, signature, Engine, Ready, Running, Staged};
use crate::algorithms;
use crate::communicator::device::Device;
use crate::communicator::epochs::{self, Epochs};
use crate::communicator::joined::CallStage;
use crate::communicator::CollectiveCall;
use crate::error::{Error, Result};
use crate::exec::{Execution, Program};
use crate::plan::layout::Layout;
use crate::plan::weights::ChunkWeights;
use crate::plan::{Buffer, Collective};
use crate::selection::{Decision, Executor, Policy, Selection};
use std::sync::Arc;

/// How a call that is new will run.
struct Planned {
    choice: algorithms::Choice,
    staged: Staged,
    weights: Option<Arc<ChunkWeights>>,
    program: Arc<Program>,
    segment_bytes: usize,
    window: usize,
}

impl Engine {
    /// Begins a call in which ranks tell each other of their links.
    #[inline(never)]
    pub(in crate::communicator) fn begin_telling(&mut self, epochs: &Arc<Epochs>, call: CollectiveCall) -> Result<()> {
        let delivers = self.transport.delivers();
        let Engine { transport, pace, grid, rank, .. } = self;
        epochs.begin((grid, *rank), delivers, pace.as_deref_mut(), &|from| transport.received_from(from));
        self.begin_own(call)?;
        self.running.iter_mut().for_each(|running| running.epochs = Some(epochs.clone()));
        Ok(())
    }

    /// Looks at a call in which ranks measure their links, if that is what is running.
    #[inline(never)]
    pub(in crate::communicator) fn with_round_looked_at(&mut self) -> &mut Engine {
        if let Some(epochs) = self.running.as_ref().and_then(|running| running.epochs.as_ref()) {
            epochs.look(&|from| self.transport.received_from(from));
        }
        self
    }

    /// Begins a call of the ranks' own, whose data is in host memory whatever the device. Not on every call's stack.
    #[inline(never)]
    pub(in crate::communicator) fn begin_own(&mut self, call: CollectiveCall) -> Result<()> {
        self.sequence += 1;
        let undecided = || Error::Internal("a call of the ranks' own has not been decided".to_string());
        let index = self.prepare(&call, call.decision.as_ref().ok_or_else(undecided)?)?;
        self.transport.set_wide(false);
        let limit_ns = self.limit_ns();
        let ready = &mut self.recent[index];
        let scratch = self.host.scratch(ready.layout.scratch_bytes() * ready.window.min(ready.layout.segments()))?;
        ready.execution.begin(ready.program.clone(), ready.layout.clone(), ready.window, limit_ns);
        let (packed, stage, front, epochs) = (None, CallStage::Runs, None, None);
        self.running = Some(Running { call, scratch, packed, stage, ready: index, front, on_host: true, epochs });
        Ok(())
    }

    /// Begins a call over a word of the ranks' own: as any, where all data is in host memory.
    pub(in crate::communicator) fn begin_word(&mut self, call: &CollectiveCall) -> Result<bool> {
        match self.device.is_host() || call.moves_nothing(self.grid.nranks()) {
            true => self.begin(call),
            false => self.begin_own(call.clone()).map(|()| true),
        }
    }

    /// The call that was running has ended: if ranks have told each other of their links in it, other shares may hold from now on.
    #[inline(never)]
    pub(super) fn end_running(&mut self) {
        let epochs = self.running.as_mut().and_then(|running| running.epochs.take());
        self.running = None;
        self.transport.call_ends();
        match (epochs, &mut self.pace) {
            (Some(epochs), _) => {
                let received = |from| self.transport.received_from(from);
                self.shares = epochs.end(&self.grid, self.sequence + 1, &received);
            }
            (None, Some(pace)) => pace.end(),
            (None, None) => {}
        }
    }

    /// The index in `recent` of what this call needs. Apart from `poll`, whose frame is on every call's stack; and what finds, plans and
    /// keeps is apart, so that none is on the stack of the others.
    #[inline(never)]
    pub(super) fn prepare(&mut self, call: &CollectiveCall, decision: &Arc<Decision>) -> Result<usize> {
        if let Some(index) = self.known(call, decision) {
            return Ok(index);
        }
        let planned = self.planned(call, decision)?;
        self.remember(call, decision, &planned);
        let index = self.recent.len() - 1;
        self.explain_choice(index, &planned.choice);
        Ok(index)
    }

    #[inline(never)]
    fn known(&self, call: &CollectiveCall, decision: &Arc<Decision>) -> Option<usize> {
        let staged = self.staged(call);
        let shared = self.shared(call, decision);
        let weights = shared.as_ref().map(|(_, weights)| weights);
        let known = |ready: &Ready| {
            ready.staged == staged
                && ready.weights.as_ref() == weights
                && Arc::ptr_eq(&ready.decision, decision)
                && ready.call.same_shape(call, self.rank)
        };
        self.recent.iter().position(known)
    }

    #[inline(never)]
    fn planned(&mut self, call: &CollectiveCall, decision: &Decision) -> Result<Box<Planned>> {
        let Executor::Own(Selection { choice, segment_bytes, window, .. }) = &decision.executor else {
            return Err(Error::Internal("a call of the vendor library's comes to Strata's engine".to_string()));
        };
        let (choice, weights) = match self.shared(call, decision) {
            Some((choice, weights)) => (choice, Some(weights)),
            None => (choice.clone(), None),
        };
        let wished = match self.cuts_messages(call, decision) {
            true => (self.part_bytes, self.config.window.clamp(1, 64)),
            false => (*segment_bytes, *window),
        };
        let staged = self.staged(call);
        let program = self.program(&choice, &self.shape(call), staged)?;
        let (segment_bytes, window) = self.segments(&program, &choice, call, weights.as_ref(), wished)?;
        Ok(Box::new(Planned { choice, staged, weights, program, segment_bytes, window }))
    }

    /// Keeps what a call needs, at the end of the list.
    #[inline(never)]
    fn remember(&mut self, call: &CollectiveCall, decision: &Arc<Decision>, planned: &Planned) {
        let Planned { choice, staged, weights, program, segment_bytes, window } = planned;
        self.forget_oldest();
        self.recent.push(Ready {
            call: call.clone(),
            decision: decision.clone(),
            staged: *staged,
            program: program.clone(),
            layout: Engine::layout(program, call, *segment_bytes, weights.as_ref()),
            segment_bytes: *segment_bytes,
            window: *window,
            weights: weights.clone(),
            signature: Engine::signature(call, choice, weights.as_ref()),
            execution: Execution::new(),
            names: None,
        });
    }

    /// Where the parts of a call's blocks lie.
    #[inline(never)]
    fn layout(
        program: &Program,
        call: &CollectiveCall,
        segment_bytes: usize,
        weights: Option<&Arc<ChunkWeights>>,
    ) -> Layout {
        let elem_bytes = call.dtype.size();
        let layout = match &call.blocks {
            None => program.layout(call.count, elem_bytes, segment_bytes),
            Some(blocks) => program.layout_of(blocks.clone(), elem_bytes, segment_bytes),
        };
        match weights {
            Some(weights) => layout.weighted(weights.clone()),
            None => layout,
        }
    }

    /// What other ranks must have as well: the call, the algorithm, and the shares.
    #[inline(never)]
    fn signature(call: &CollectiveCall, choice: &algorithms::Choice, weights: Option<&Arc<ChunkWeights>>) -> u32 {
        let parts = weights.map_or(String::new(), |weights| format!(" {:?}", weights.parts().collect::<Vec<_>>()));
        signature(call, &(choice.exact() + &parts))
    }

    /// Bytes of a segment of each block, and segments in flight, of those that are wished for: what room there is for their scratch.
    #[inline(never)]
    fn segments(
        &self,
        program: &Program,
        choice: &algorithms::Choice,
        call: &CollectiveCall,
        weights: Option<&Arc<ChunkWeights>>,
        (segment_bytes, window): (usize, usize),
    ) -> Result<(usize, usize)> {
        let k = program.plan().chunks_per_block as usize;
        // A table may have a larger window than the settings, for which a device's scratch was made.
        let wished = crate::selection::most_scratch_bytes(choice, &self.config, self.part_bytes != usize::MAX);
        let room = wished.max(least_scratch(&self.grid, self.config.window.clamp(1, 64)));
        let window = window.min(room / least_scratch(&self.grid, 1)).max(1);
        // Scratch is `window * scratch_blocks` segments of a block on the rank that needs most: this bounds them on all.
        let scratch_blocks = self.most_scratch(choice, call) * weights.map_or(1, |weights| weights.largest_by_equal());
        let most = wished / window / scratch_blocks.max(1);
        let mut segment_bytes = match scratch_blocks {
            0 => segment_bytes,
            _ => segment_bytes.min(most.max(64 * k)),
        };
        if self.is_around_node(choice, call.collective) {
            // The longest call of a segment has all blocks, and three find room: one is brought together and one is taken
            // apart while the provider has the one between them.
            // Where shares differ all rails take as much room as the longest.
            let blocks = match call.collective {
                Collective::AllReduce => weights.map_or(1, |weights| weights.largest_by_equal()),
                _ => self.grid.nranks(),
            };
            segment_bytes = segment_bytes.min((self.room_bytes() / 3 / blocks).max(64));
        }
        let plan = program.plan();
        let scratch_chunks = plan.chunks(Buffer::Scratch) + plan.chunks(Buffer::Coded);
        if scratch_chunks > scratch_blocks * k {
            return Err(Error::Internal(format!(
                "algorithm {choice} declares {scratch_blocks} blocks of scratch, and its plan has {scratch_chunks} chunks of \
                 which {k} are a block"
            )));
        }
        Ok((segment_bytes, window))
    }

    /// The choice and the shares of a call that has shares by a strategy or by what links deliver.
    #[inline(never)]
    fn shared(&self, call: &CollectiveCall, decision: &Decision) -> Option<(algorithms::Choice, Arc<ChunkWeights>)> {
        if decision.by == Policy::Strategy {
            // A file's shares hold, whatever was measured.
            let Executor::Own(Selection { choice, shares, .. }) = &decision.executor else { return None };
            let shares = shares.as_ref().filter(|_| call.blocks.is_none())?;
            return Some((choice.clone(), shares.clone()));
        }
        let weights = self.shares.as_ref()?;
        Some((epochs::shared_choice(call, decision, &self.grid)?, weights.clone()))
    }
}
