//! Proves plans: do they, run together, do what their collective promises?
//!
//! [`verify`] runs the plans of all ranks once, on symbols in place of numbers, and checks ten things ([`Check`]). It
//! shares nothing with builders, executors and algorithms but the plan's types, and it is total: any plans in, a verdict
//! out, after work bounded by the plans' own size.
//!
//! **Why one segment is enough.** The executor runs a plan once per segment, several at a time. Segments share no memory
//! at the same time: user buffers are cut between them, and a set of scratch passes from segment `s` to `s + window` only
//! when `s` has completed on its rank. Each message stream has one sending and one receiving lane, both in order, so when
//! a segment leaves no message behind (checked), segment `s` sends what segment `s` receives. Lanes that wait for
//! messages, room, dependencies and calls form a network in which what can happen stays possible until it happens, so
//! all schedules get equally far; and one schedule is to run the segments one after the other. It finishes if a single
//! segment does. So whatever window and number of segments, the verdict for one segment holds.
//!
//! **Empty chunks.** A small count leaves the chunks of the higher positions in a block empty, and an operation of no
//! bytes is never carried out. A message therefore orders two accesses only if it carries bytes whenever they do: the
//! race check takes into account the lowest position of a block in each message.
//!
//! **Empty blocks.** Where blocks differ in size ([`Options::vectored`]) any of them may be empty, and a message of nothing orders
//! nothing, though the executor sends it in the first segment. Then the race check looks at the blocks of each message as well, and
//! every span in scratch has to name the block that it holds.
//!
//! **Codes.** A coded value is another than the one that was coded, and decoding it gives a third. What lies in coded scratch is
//! coded, and nothing else is. A contribution is coded at most once on its way, what is folded of coded contributions once more
//! when it is whole, and nothing that was decoded is reduced again: so the error of a result does not grow with the ranks.
#![forbid(unsafe_code)]

mod expr;
mod index;
pub mod mutate;
pub mod oracle;
mod order;
mod origins;
mod run;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;

pub(crate) use index::MAX_PLACES;

use crate::plan::{Plan, StepRef};
use crate::topo::Rank;
use std::fmt;

/// What [`verify`] looks for, by the number it has in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Check {
    /// The right chunk is in the right place.
    Provenance = 1,
    /// A rank's contribution is in a reduction exactly once.
    ExactlyOnce,
    /// Every output chunk is written, and final.
    Completeness,
    /// Every step finishes at the given channel capacity.
    Progress,
    /// Two accesses to one place, one of them a write, are ordered.
    Race,
    /// The same result has the same reduction tree on every rank.
    SameTree,
    /// Prologue and epilogue are applied exactly once on each path.
    Epilogue,
    /// Calls are equal and in one order on all members.
    Calls,
    /// Spans lie inside their buffers, sizes match, and the plans belong together.
    Bounds,
    /// Each contribution is coded once and each result once, and all ranks have what the code leaves, with the same bits.
    Coding,
}

impl Check {
    /// The name used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Check::Provenance => "provenance",
            Check::ExactlyOnce => "exactly once",
            Check::Completeness => "completeness",
            Check::Progress => "progress",
            Check::Race => "race",
            Check::SameTree => "same tree",
            Check::Epilogue => "epilogue",
            Check::Calls => "calls",
            Check::Bounds => "bounds",
            Check::Coding => "coding",
        }
    }
}

/// What the plans are verified for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// How many undelivered messages a channel holds before it takes no more. With 0 a message is accepted only when
    /// its receiver waits for it. That the receiver waits does not add to the capacity.
    pub capacity: usize,
    /// Whether blocks may differ in size, and any of them be empty.
    pub vectored: bool,
}

impl Default for Options {
    /// The least capacity a transport may declare: 1.
    fn default() -> Options {
        Options { capacity: 1, vectored: false }
    }
}

/// Why plans were rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// What failed.
    pub check: Check,
    /// On this rank.
    pub rank: Rank,
    /// In this lane, if one step is to blame.
    pub lane: Option<u32>,
    /// At this position of the lane, if one step is to blame.
    pub step: Option<u32>,
    /// What is wrong.
    pub text: String,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (check {}): rank {}", self.check.name(), self.check as u8, self.rank)?;
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        write!(f, ": {}", self.text)
    }
}

impl std::error::Error for Rejection {}

/// What accepted plans do, all ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// How many ranks.
    pub ranks: usize,
    /// How many steps.
    pub steps: usize,
    /// How many messages are sent.
    pub messages: usize,
    /// How many chunks these messages carry.
    pub chunks: usize,
    /// How many calls are made, each counted once for all its members.
    pub calls: usize,
    /// The longest chain in which each message (or call) can only be sent after the one before it has arrived.
    pub rounds: usize,
}

/// Proves that the plans, `plans[r]` being rank r's, together implement their collective; or says where they fail.
pub fn verify(plans: &[Plan], options: &Options) -> Result<Report, Rejection> {
    let index = index::Index::new(plans, options.vectored)?;
    run::SymbolicRun::new(&index, *options).run()
}

/// A step that writes what a send of its rank may still be reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlyWrite {
    /// Whose steps.
    pub rank: Rank,
    /// The send.
    pub send: StepRef,
    /// The step that writes.
    pub write: StepRef,
}

/// The writes that nothing orders after sends from the same place; with a dependency on the send each is in order.
///
/// # Errors
/// Where the plans fail otherwise on the way.
pub fn early_writes(plans: &[Plan], options: &Options) -> Result<Vec<EarlyWrite>, Rejection> {
    let index = index::Index::new(plans, options.vectored)?;
    let early = run::SymbolicRun::new(&index, *options).early_writes()?;
    let at = |step: u32| {
        let lane = index.lane(step);
        StepRef { lane: lane.number, step: step - lane.first }
    };
    let write =
        |(send, write)| EarlyWrite { rank: Rank::from_index(index.rank(send)), send: at(send), write: at(write) };
    Ok(early.into_iter().map(write).collect())
}
