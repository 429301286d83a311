//! Epochs: shares of all-reduces by what links deliver while the program runs.
//!
//! After every so many all-reduces (`STRATA_MEASURE_EVERY`) the ranks tell each other, in the order of calls, what their links to other
//! nodes have delivered since the last time. All compute the same [`shares`] of that, and these hold from
//! the next call on. Nothing is sent to measure anything: figures are of messages that go anyway.

use super::{CollectiveCall, Comm};
use crate::algorithms::Choice;
use crate::error::Result;
use crate::health::CallSummary;
use crate::memory::{Arena, Region};
use crate::plan::weights::ChunkWeights;
use crate::plan::Collective;
use crate::selection::shares::{self, NodeShares};
use crate::selection::{Decision, Executor, Policy, Selection};
use crate::sync::locked;
use crate::topo::Grid;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes of the shortest all-reduces that are counted and shared: what links deliver matters to those.
const LEAST_BYTES: usize = 1 << 20;
/// Tellings before the first trial of even shares, and between two of them at most.
const FIRST_PATIENCE: u32 = 4;
const MOST_PATIENCE: u32 = 64;
/// Bytes of a rank's word: its rate.
const WORD: usize = 8;

/// What is known of the links.
#[derive(Debug, Default)]
struct Known {
    /// Of each rank, what its link delivered when that was last known.
    rates: Vec<Option<f64>>,
    shares: Option<NodeShares>,
    /// How many times shares have changed.
    epoch: u64,
    /// Tellings since even shares were tried, and after how many they are.
    held: u32,
    patience: u32,
}

impl Known {
    /// Whether one call has even shares although others hold: a link that has little to carry does not show that it has recovered.
    fn is_trial(&mut self) -> bool {
        self.held += 1;
        let is_trial = self.shares.is_some() && self.held >= self.patience;
        if is_trial {
            (self.held, self.patience) = (0, (2 * self.patience).min(MOST_PATIENCE));
        }
        is_trial
    }
}

/// What holds from a call on.
pub(super) struct Epoch {
    /// What each chunk has, where that is not the same.
    pub weights: Option<Arc<ChunkWeights>>,
    /// Whether the first call has even shares all the same.
    pub is_trial: bool,
}

/// How the ranks of a communicator tell each other what their links deliver.
pub struct Epochs {
    every: u64,
    /// All-reduces of the program that were counted.
    calls: AtomicU64,
    /// The all-gather of the ranks' words.
    call: CollectiveCall,
    /// What it sends and receives.
    word: Region,
    words: Region,
    /// Where these are.
    _arenas: [Arena; 2],
    known: Mutex<Known>,
}

/// Whether calls of this kind are counted.
pub(super) fn counts(call: &CollectiveCall) -> bool {
    let bytes = call.count.saturating_mul(call.dtype.size());
    call.collective == Collective::AllReduce && call.blocks.is_none() && bytes >= LEAST_BYTES
}

impl Epochs {
    fn new(comm: &Comm, every: u64) -> Result<Epochs> {
        let nranks = comm.nranks();
        let (mut input, mut output) = (Arena::new(WORD), Arena::new(WORD * nranks));
        // SAFETY: the arena must outlive every use; because the call that uses it keeps these epochs, and a communicator that fails
        // cancels it.
        let word = unsafe { input.region().unbound() };
        // SAFETY: the arena must outlive every use; because of the same.
        let words = unsafe { output.region().unbound() };
        let algorithm = if comm.grid.nrails() > 1 { "two_level(direct,log)" } else { "log" };
        let buffers = [word.as_device(), words.as_device()];
        let mut call = CollectiveCall {
            algorithm: Some(algorithm.to_string()),
            ..CollectiveCall::of_bytes(Collective::AllGather, buffers, WORD)
        };
        comm.decide(&mut call)?;
        let known = Known { rates: vec![None; nranks], ..Known::default() };
        Ok(Epochs {
            every,
            calls: AtomicU64::new(0),
            call,
            word,
            words,
            _arenas: [input, output],
            known: Mutex::new(known),
        })
    }

    /// Whether the ranks tell each other after these calls, by their number.
    pub(super) fn are_due(&self, calls: &[CollectiveCall]) -> bool {
        let more = calls.iter().filter(|call| counts(call)).count() as u64;
        let before = self.calls.fetch_add(more, Ordering::Relaxed);
        before / self.every != (before + more) / self.every
    }

    /// The call in which they do so; its regions are in host memory, whatever the communicator's device.
    pub(super) fn call(&self) -> &CollectiveCall {
        &self.call
    }

    /// What all ranks must agree on.
    pub(super) fn summary(&self) -> CallSummary {
        self.call.summary()
    }

    /// Writes what this rank's link delivers, where that is known.
    pub(super) fn tell(&self, rate: Option<f64>) {
        self.word.write(&rate.unwrap_or(0.0).to_le_bytes());
    }

    /// What holds from now on, by what all ranks have told; all find the same.
    pub(super) fn learn(&self, grid: &Grid, operation: u64) -> Epoch {
        let mut known = locked(&self.known);
        for (rank, rate) in known.rates.iter_mut().enumerate() {
            let mut word = [0; WORD];
            self.words.part(rank * WORD, WORD).read(&mut word);
            let new = f64::from_le_bytes(word);
            *rate = Some(new).filter(|new| new.is_finite() && *new > 0.0).or(*rate);
        }
        let before = known.shares.take();
        known.shares = shares::next(grid, before.clone(), &known.rates);
        if known.shares != before {
            known.epoch += 1;
            (known.held, known.patience) = (0, FIRST_PATIENCE);
            self.tell_change(&known, operation);
        }
        let weights = known.shares.as_ref().map(|shares| shares.weights.clone());
        Epoch { weights, is_trial: known.is_trial() }
    }

    #[cold]
    fn tell_change(&self, known: &Known, operation: u64) {
        let epoch = known.epoch;
        let Some(NodeShares { rates, gain, .. }) = &known.shares else {
            return crate::info!(
                "epoch {epoch} from operation {operation} on: links deliver alike, and all-reduces have even shares"
            );
        };
        let slowest = (0..rates.len()).min_by(|&one, &other| rates[one].total_cmp(&rates[other])).unwrap_or(0);
        let most = rates.iter().copied().fold(0.0, f64::max);
        crate::info!(
            "epoch {epoch} from operation {operation} on: the link of rank {slowest} delivers {:.1} MB/s, others up to {most:.1}: \
             shares of all-reduces by that, {gain:.2} times as fast as even ones",
            rates[slowest]
        );
    }
}

/// The choice for a call that is to have shares by links: with rails on which every node owns a part. None where something else was
/// asked for, or cannot have shares.
pub(super) fn shared_choice(call: &CollectiveCall, decision: &Decision, grid: &Grid) -> Option<Choice> {
    let Executor::Own(Selection { choice, .. }) = &decision.executor else { return None };
    if !counts(call) {
        return None;
    }
    let is_free = !matches!(decision.by, Policy::Named | Policy::Code | Policy::Script | Policy::Thresholds);
    let shared = match grid.nrails() {
        1 => Choice::flat("direct"),
        _ if choice.name == "two_level" => Choice { rail: "direct".to_string(), ..choice.clone() },
        _ => Choice::leveled("two_level", "direct", "direct"),
    };
    (is_free || shared == *choice).then_some(shared)
}

impl Comm {
    /// What ranks own of all-reduces now, where links deliver differently (`STRATA_MEASURE_EVERY`).
    pub fn node_shares(&self) -> Option<NodeShares> {
        self.epochs.get().and_then(|epochs| locked(&epochs.known).shares.clone())
    }

    /// Begins to count all-reduces, where that is set. On communicators with a vendor's library in front nothing is shared so.
    pub(super) fn begin_epochs(&self) -> Result<()> {
        let every = self.config.measure_every;
        let is_meant = every > 0 && self.grid.nnodes() > 1 && self.nranks() > 1;
        if is_meant && self.options.companion.is_none() && self.options.on_host.is_none() {
            // Set once: this runs once for each communicator.
            let _ = self.epochs.set(Arc::new(Epochs::new(self, every)?));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_shares_are_tried_less_and_less_often_while_others_hold() {
        let grid = Grid::blocks(&[1; 3]);
        let mut known = Known { patience: FIRST_PATIENCE, ..Known::default() };
        assert!((0..100).all(|_| !known.is_trial()), "nothing else holds");
        known.held = 0;
        known.shares = shares::of_rates(&grid, &[Some(25.0), Some(5.0), Some(25.0)]);
        let trials: Vec<u32> = (1..=200).filter(|_| known.is_trial()).collect();
        assert_eq!(trials, [4, 4 + 8, 12 + 16, 28 + 32, 60 + 64, 124 + 64]);
    }
}
