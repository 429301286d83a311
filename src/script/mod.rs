//! Scripts: algorithms that come as files, in the XML format of MSCCL.
//!
//! [`xml::read`] reads a file into a [`Script`], as it stands. [`lower()`] makes the plans of all ranks out of it, in the form a
//! call wants: in place or not, with or without a prologue. Nothing is believed of a file: the plans are proved before they
//! move a byte ([`prove`]).
#![forbid(unsafe_code)]

mod coarsen;
mod convert;
mod lower;
mod merge;
pub mod names;
mod ops;
mod passes;
mod proof;
pub mod share;
pub mod store;
#[cfg(test)]
mod tests;
pub mod trace;
mod write;
pub mod xml;

pub use convert::convert;
pub use lower::{lower, Lowered, ScriptForm, Sending};
pub use names::{ScriptNames, SharedScripts};
pub use proof::{judge, merged, optimized, prove, root, Proof, Refusal, CAPACITY};
pub use store::LoadedScript;
pub use write::write;

use crate::plan::contract::Contract;
use crate::plan::Collective;
use crate::topo::{Grid, Rank};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// An algorithm as its file says it: what each thread block of each rank does. Offsets and counts are chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// The name its writer gave it.
    pub name: String,
    /// What it does.
    pub collective: Collective,
    /// Chunks of a rank's larger buffer.
    pub chunks: u32,
    /// The protocol of its messages in the runtime it was written for: only simulated machines have such.
    pub protocol: String,
    /// Its writer had in mind that send and receive buffer are the same memory, as NCCL's in-place convention says.
    pub in_place: bool,
    /// Calls out of place may use it.
    pub serves_out_of_place: bool,
    /// Bytes of a rank's larger buffer for which it was meant.
    pub bytes: RangeInclusive<u64>,
    /// What it promises, if that has no name of its own: told beside the file.
    pub contract: Option<Arc<Contract>>,
    /// What each rank does.
    pub ranks: Vec<RankScript>,
}

/// What one rank does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankScript {
    /// Chunks of scratch.
    pub scratch: u32,
    /// Its thread blocks, which run at the same time.
    pub blocks: Vec<ThreadBlock>,
}

/// Steps that run one after another, with at most one rank to send to and one to receive from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ThreadBlock {
    /// The rank it sends to.
    pub to: Option<u32>,
    /// The rank it receives from.
    pub from: Option<u32>,
    /// Tells its messages from others between the same ranks.
    pub channel: u16,
    /// In this order.
    pub steps: Vec<ScriptStep>,
}

/// A step of a thread block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScriptStep {
    /// What it does.
    pub kind: ScriptStepKind,
    /// The first chunk it reads.
    pub src: Place,
    /// The first chunk it writes.
    pub dst: Place,
    /// How many chunks.
    pub count: u32,
    /// A step of the same rank that must have ended first.
    pub dep: Option<(u32, u32)>,
    /// Where the file has it.
    pub line: u32,
}

/// A chunk of one of a rank's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Which buffer.
    pub buffer: ScriptBuffer,
    /// The chunk.
    pub chunk: u32,
}

/// `i[5]`: chunk 5 of the input.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.buffer.letter(), self.chunk)
    }
}

/// A buffer as files name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScriptBuffer {
    /// `i`: the call's send buffer.
    Input,
    /// `o`: the call's receive buffer.
    Output,
    /// `s`: memory of the runtime's.
    Scratch,
}

impl ScriptBuffer {
    /// The letter that files use.
    pub const fn letter(self) -> char {
        match self {
            ScriptBuffer::Input => 'i',
            ScriptBuffer::Output => 'o',
            ScriptBuffer::Scratch => 's',
        }
    }
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScriptStepKind {
    /// `s`
    Send,
    /// `r`
    Recv,
    /// `rcs`: receive, and send the same on.
    RecvCopySend,
    /// `rrc`: receive, reduce with the source, write the destination.
    RecvReduceCopy,
    /// `rrs`: receive, reduce with the source, send the result on and keep nothing.
    RecvReduceSend,
    /// `rrcs`: receive, reduce with the source, write the destination and send it on.
    RecvReduceCopySend,
    /// `cpy`
    Copy,
    /// `re`: the destination becomes itself, reduced with the source.
    Reduce,
    /// `nop`: carries a dependency.
    Nop,
}

impl ScriptStepKind {
    /// All kinds.
    pub const ALL: [ScriptStepKind; 9] = [
        ScriptStepKind::Send,
        ScriptStepKind::Recv,
        ScriptStepKind::RecvCopySend,
        ScriptStepKind::RecvReduceCopy,
        ScriptStepKind::RecvReduceSend,
        ScriptStepKind::RecvReduceCopySend,
        ScriptStepKind::Copy,
        ScriptStepKind::Reduce,
        ScriptStepKind::Nop,
    ];

    /// The word that files use.
    pub const fn name(self) -> &'static str {
        match self {
            ScriptStepKind::Send => "s",
            ScriptStepKind::Recv => "r",
            ScriptStepKind::RecvCopySend => "rcs",
            ScriptStepKind::RecvReduceCopy => "rrc",
            ScriptStepKind::RecvReduceSend => "rrs",
            ScriptStepKind::RecvReduceCopySend => "rrcs",
            ScriptStepKind::Copy => "cpy",
            ScriptStepKind::Reduce => "re",
            ScriptStepKind::Nop => "nop",
        }
    }

    /// Whether it sends a message.
    pub const fn sends(self) -> bool {
        matches!(
            self,
            ScriptStepKind::Send
                | ScriptStepKind::RecvCopySend
                | ScriptStepKind::RecvReduceSend
                | ScriptStepKind::RecvReduceCopySend
        )
    }

    /// Whether it receives a message.
    pub const fn receives(self) -> bool {
        matches!(
            self,
            ScriptStepKind::Recv
                | ScriptStepKind::RecvCopySend
                | ScriptStepKind::RecvReduceCopy
                | ScriptStepKind::RecvReduceSend
                | ScriptStepKind::RecvReduceCopySend
        )
    }

    /// Whether it reads its source.
    pub const fn reads(self) -> bool {
        !matches!(self, ScriptStepKind::Recv | ScriptStepKind::RecvCopySend | ScriptStepKind::Nop)
    }

    /// Whether it writes its destination.
    pub const fn writes(self) -> bool {
        !matches!(self, ScriptStepKind::Send | ScriptStepKind::RecvReduceSend | ScriptStepKind::Nop)
    }
}

/// A step of a script, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSite {
    /// Whose step.
    pub rank: u32,
    /// In which thread block.
    pub block: u32,
    /// Its number there.
    pub step: u32,
    /// Its line in the file.
    pub line: u32,
}

impl fmt::Display for StepSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepSite { rank, block, step, line } = self;
        write!(f, "line {line}: rank {rank}, thread block {block}, step {step}")
    }
}

/// The script in a file's text, and, of a custom collective, its contract in the TOML beside it.
///
/// # Errors
/// What is wrong with either; a custom collective without a contract.
pub fn read(text: &str, contract: Option<&str>) -> Result<Script, xml::BadScript> {
    let mut script = xml::read(text)?;
    let bad = |text: String| xml::BadScript { line: 1, text };
    script.contract = match (script.collective, contract) {
        (Collective::Custom, Some(text)) => {
            let contract = Contract::parse(text, script.nranks(), script.chunks);
            let contract = contract.map_err(|error| bad(format!("its contract: {error}")))?;
            Some(Arc::new(contract.combining(script.has_reductions())))
        }
        (Collective::Custom, None) => {
            let text = "coll=\"custom\" promises nothing: a file of the same name with .toml says what";
            return Err(bad(text.to_string()));
        }
        (_, _) => None,
    };
    script.in_place = script.in_place && !is_for_two_buffers(&script);
    Ok(script)
}

/// Whether a script of a collective whose buffers are equally long, in the words of its file in place, has two buffers all the
/// same: tools say so of all-to-all and custom programs, whose steps name two. Where it does what it says either way it is.
fn is_for_two_buffers(script: &Script) -> bool {
    let mut steps = script.ranks.iter().flat_map(|rank| &rank.blocks).flat_map(|block| &block.steps);
    let names_output = |step: &ScriptStep| {
        (step.kind.reads() && step.src.buffer == ScriptBuffer::Output)
            || (step.kind.writes() && step.dst.buffer == ScriptBuffer::Output)
    };
    if !matches!(script.collective, Collective::AllToAll | Collective::Custom) || !steps.any(names_output) {
        return false;
    }
    let grid = Arc::new(Grid::flat(script.nranks()));
    let does = |in_place: bool| judge(&Script { in_place, ..script.clone() }, &grid, Rank(0)).is_ok();
    does(false) || !does(true)
}

impl Script {
    /// Whether data of several ranks is combined.
    pub fn reduces(&self) -> bool {
        self.collective.reduces() || self.contract.as_ref().is_some_and(|contract| contract.reduces())
    }

    /// Whether it has steps that combine data.
    fn has_reductions(&self) -> bool {
        let mut steps = self.ranks.iter().flat_map(|rank| &rank.blocks).flat_map(|block| &block.steps);
        steps.any(|step| step.kind == ScriptStepKind::Reduce || (step.kind.receives() && step.kind.reads()))
    }

    /// Blocks of the larger buffer.
    fn blocks(&self) -> usize {
        self.contract.as_ref().map_or_else(|| self.collective.blocks(self.nranks()), |contract| contract.blocks())
    }

    /// How many ranks it is for.
    pub fn nranks(&self) -> usize {
        self.ranks.len()
    }

    /// How many steps all ranks have.
    pub fn nsteps(&self) -> usize {
        self.ranks.iter().flat_map(|rank| &rank.blocks).map(|block| block.steps.len()).sum()
    }

    /// Chunks that a rank's send buffer, or its receive buffer, may have, root or not.
    pub(crate) fn chunks_of(&self, input: bool) -> u32 {
        let is_one_block = match self.collective {
            Collective::AllGather | Collective::Gather => input,
            Collective::ReduceScatter | Collective::Scatter => !input,
            _ => false,
        };
        if is_one_block {
            self.chunks_per_block()
        } else {
            self.chunks
        }
    }

    /// Chunks of all buffers of a rank.
    fn places(&self, rank: &RankScript) -> usize {
        [self.chunks_of(true), self.chunks_of(false), rank.scratch].map(|chunks| chunks as usize).iter().sum()
    }

    /// Chunks in one block of the collective: what the larger buffer's are divided by.
    pub fn chunks_per_block(&self) -> u32 {
        self.chunks / self.blocks() as u32
    }
}
