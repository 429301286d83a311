//! The lanes of one rank's plan while they grow.
#![forbid(unsafe_code)]

use crate::plan::{Action, Lane, Step, StepRef};
use rustc_hash::FxHashMap;

/// What is wrong with steps of a script where a chunk is not what it should be, by thread block and number.
pub(super) type Notes = FxHashMap<(u32, u32), String>;

/// A lane for each thread block, and one for copies that none of them makes.
pub(super) struct Emitter {
    lanes: Vec<Lane>,
    sites: Vec<Vec<u32>>,
    /// For each lane how many of its steps copy what is sent next.
    copies: Vec<u32>,
    /// The step of the script that the next steps come from.
    pub script_step: u32,
    /// And its thread block.
    pub block: u32,
    /// What is wrong with steps of the script, by thread block and number, where a plan cannot say it.
    notes: Notes,
}

impl Emitter {
    pub fn new(blocks: usize) -> Emitter {
        Emitter {
            lanes: vec![Lane::default(); blocks + 1],
            sites: vec![Vec::new(); blocks],
            copies: vec![0; blocks],
            script_step: 0,
            block: 0,
            notes: FxHashMap::default(),
        }
    }

    /// Adds a step to the lane of a thread block.
    pub fn emit(&mut self, block: u32, action: Action, deps: Vec<StepRef>) -> StepRef {
        self.sites[block as usize].push(self.script_step);
        push(&mut self.lanes, block, action, deps)
    }

    /// Adds the copy of what is sent next.
    pub fn emit_copy(&mut self, block: u32, action: Action, deps: Vec<StepRef>) -> StepRef {
        self.copies[block as usize] += 1;
        self.emit(block, action, deps)
    }

    /// Notes what is wrong with the step at hand.
    pub fn note(&mut self, text: impl FnOnce() -> String) {
        self.notes.entry((self.block, self.script_step)).or_insert_with(text);
    }

    /// Adds a step to the lane that belongs to no thread block.
    pub fn emit_apart(&mut self, action: Action, deps: Vec<StepRef>) -> StepRef {
        let lane = self.lanes.len() as u32 - 1;
        push(&mut self.lanes, lane, action, deps)
    }

    /// The place that the next step of a lane would have if nothing sent had been copied.
    pub fn place_without_copies(&self, block: u32) -> StepRef {
        let steps = self.lanes[block as usize].steps.len() as u32;
        StepRef { lane: block, step: steps - self.copies[block as usize] }
    }

    /// All lanes, for each step of a thread block's lane the step of the script, and the notes.
    pub fn finish(mut self) -> (Vec<Lane>, Vec<Vec<u32>>, Notes) {
        if self.lanes.last().is_some_and(|lane| lane.steps.is_empty()) {
            self.lanes.pop();
        }
        (self.lanes, self.sites, self.notes)
    }
}

fn push(lanes: &mut [Lane], lane: u32, action: Action, deps: Vec<StepRef>) -> StepRef {
    let steps = &mut lanes[lane as usize].steps;
    steps.push(Step { action, deps });
    StepRef { lane, step: steps.len() as u32 - 1 }
}
