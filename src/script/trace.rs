//! Traces: algorithms written down as what happens to chunks, one step after another, and compiled to scripts.
//!
//! A [`Trace`] is a sequential program over the buffers of all ranks: copy these chunks there, reduce those into these. Its
//! order is its meaning. [`Trace::compile`] makes messages of the steps between two ranks, fuses what a receive and a send
//! can do in one, spreads the rest over thread blocks and channels, and keeps as dependencies what the order of the trace
//! demands. The script does what the trace says, and cannot deadlock; whether that is the collective it names,
//! [`judge`](super::judge) says.
//!
//! Source: Cowan et al., "MSCCLang: Microsoft Collective Communication Language", ASPLOS 2023, sections 3 to 5.
#![forbid(unsafe_code)]

mod blocks;
mod buffers;
mod builder;
mod dag;
mod expand;
mod fuse;
mod json;
mod order;
mod schedule;
#[cfg(test)]
mod tests;

pub use builder::ChunkRef;

use super::{xml, Script};
use crate::plan::contract::Contract;
use crate::plan::Collective;
use buffers::Memory;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;

/// Chunks that all steps of a trace move, divided as instances say; more are refused.
pub const MAX_MOVED: u64 = 1 << 22;
/// Instances of a trace, or of a part of it.
pub const MAX_INSTANCES: u32 = 64;
/// The longest name of a buffer, in bytes.
const MAX_NAME: usize = 100;

/// A buffer of a rank as a trace names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TraceBuffer {
    /// What the call sends.
    Input,
    /// What the call receives.
    Output,
    /// Memory for the time of the call. Each name is a buffer of its own, as long as the trace uses it.
    Scratch(Arc<str>),
}

impl From<&str> for TraceBuffer {
    /// `input`, `output`; any other word names a scratch buffer.
    fn from(name: &str) -> TraceBuffer {
        match name {
            "input" => TraceBuffer::Input,
            "output" => TraceBuffer::Output,
            name => TraceBuffer::Scratch(name.into()),
        }
    }
}

impl From<String> for TraceBuffer {
    fn from(name: String) -> TraceBuffer {
        name.as_str().into()
    }
}

impl fmt::Display for TraceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TraceBuffer::Input => "input",
            TraceBuffer::Output => "output",
            TraceBuffer::Scratch(name) => name,
        })
    }
}

/// Where chunks begin.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TracePlace {
    /// Whose.
    pub rank: u32,
    /// In which buffer.
    pub buffer: TraceBuffer,
    /// The first chunk.
    pub index: u32,
}

impl TracePlace {
    /// The place with so many chunks, in words.
    fn text(&self, count: u32) -> String {
        let TracePlace { rank, buffer, index } = self;
        match count {
            1 => format!("{buffer} chunk {index} of rank {rank}"),
            _ => {
                format!("{buffer} chunks {index} to {} of rank {rank}", u64::from(*index) + u64::from(count).max(1) - 1)
            }
        }
    }
}

/// What a step does with its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TraceOp {
    /// The destination becomes the source.
    Copy,
    /// The destination becomes itself, reduced with the source.
    Reduce,
}

/// How a step is to be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Directives {
    /// The channel of its message; the compiler's choice where there is none.
    pub channel: Option<u16>,
    /// A thread block of the rank that sends, or, of a step within one rank, carries it out. The numbers are labels: steps of
    /// one label share a thread block of their rank.
    pub send_tb: Option<u32>,
    /// A thread block of the rank that receives.
    pub recv_tb: Option<u32>,
}

/// A step of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceStep {
    /// What it does.
    pub op: TraceOp,
    /// The chunks it reads.
    pub src: TracePlace,
    /// The chunks it writes.
    pub dst: TracePlace,
    /// How many chunks.
    pub count: u32,
    /// How.
    pub directives: Directives,
    /// In how many parts at the same time, and which fragment of the trace, counted from 0, says so.
    pub parallel: Option<(u32, u32)>,
    /// Where its writer wrote it.
    pub at: Option<String>,
}

/// Which chunks an instance of a trace works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InstancePolicy {
    /// Each chunk is divided, and every instance takes a part of each.
    #[default]
    Interleaved,
    /// Each buffer is divided, and every instance takes a part with as many chunks as the trace has. For collectives whose
    /// buffers are one block.
    Blocked,
}

/// What is wrong with a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadTrace {
    /// The step, counted from 0, where one is to blame.
    pub step: Option<usize>,
    /// What is wrong, with the step's number and place.
    pub text: String,
}

impl fmt::Display for BadTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for BadTrace {}

impl BadTrace {
    fn new(text: impl Into<String>) -> BadTrace {
        BadTrace { step: None, text: text.into() }
    }
}

/// A trace of an algorithm, while it is written and when it is complete.
///
/// ```
/// use strata::plan::Collective;
/// use strata::script::trace::Trace;
///
/// // Two ranks exchange their vectors' halves and add.
/// let trace = Trace::new("exchange", Collective::AllReduce, 2, 2)?.in_place(true);
/// for rank in 0..2 {
///     let theirs = trace.chunk(1 - rank, "input", rank, 1)?;
///     trace.chunk(rank, "input", rank, 1)?.reduce(&theirs)?.copy(1 - rank, "output", rank)?;
/// }
/// let script = trace.compile()?;
/// assert_eq!(script.nsteps(), 6);
/// # Ok::<(), strata::script::trace::BadTrace>(())
/// ```
#[derive(Debug, Clone)]
pub struct Trace {
    name: String,
    collective: Collective,
    nranks: u32,
    chunks: u32,
    in_place: bool,
    instances: u32,
    protocol: String,
    policy: InstancePolicy,
    contract: Option<Arc<Contract>>,
    scratch: Vec<(TraceBuffer, u32)>,
    written: RefCell<Written>,
    fragment: Cell<Option<(u32, u32)>>,
    fragments: Cell<u32>,
}

/// The steps so far, and what they have done to memory.
#[derive(Debug, Clone, Default)]
struct Written {
    steps: Vec<TraceStep>,
    memory: Memory,
}

impl Trace {
    /// A trace without steps, for so many ranks. `chunks` are those of a rank's input for all-reduce, broadcast, reduce and
    /// custom collectives, and those of one rank's block for all others, so that their larger buffer has `ranks * chunks`.
    ///
    /// # Errors
    /// More ranks or chunks than a script may have, or none.
    pub fn new(name: &str, collective: Collective, ranks: u32, chunks: u32) -> Result<Trace, BadTrace> {
        if ranks == 0 || ranks as usize > xml::MAX_RANKS {
            return Err(BadTrace::new(format!("ranks: {ranks} is not in 1 to {}", xml::MAX_RANKS)));
        }
        let blocks = collective.blocks(ranks as usize) as u64;
        let most = u64::from(xml::MAX_CHUNKS) / blocks;
        if chunks == 0 || u64::from(chunks) > most {
            return Err(BadTrace::new(format!("chunks: {chunks} is not in 1 to {most}")));
        }
        Ok(Trace {
            name: name.to_string(),
            collective,
            nranks: ranks,
            chunks,
            in_place: false,
            instances: 1,
            protocol: "Simple".to_string(),
            policy: InstancePolicy::default(),
            contract: None,
            scratch: Vec::new(),
            written: RefCell::default(),
            fragment: Cell::new(None),
            fragments: Cell::new(0),
        })
    }

    /// Whether input and output overlap as NCCL's in-place convention says: they are one buffer, or the smaller one is the
    /// rank's own block of the larger. All-to-all always has two buffers.
    pub fn in_place(mut self, in_place: bool) -> Trace {
        self.in_place = in_place && self.collective != Collective::AllToAll;
        self
    }

    /// Runs so many copies of the trace at the same time, each on its part of the data and on channels of its own. Every
    /// chunk becomes as many.
    pub fn instances(mut self, instances: u32) -> Trace {
        self.instances = instances;
        self
    }

    /// How instances divide the data.
    pub fn policy(mut self, policy: InstancePolicy) -> Trace {
        self.policy = policy;
        self
    }

    /// The protocol that the script names: `Simple`, `LL` or `LL128`.
    pub fn protocol(mut self, protocol: &str) -> Trace {
        self.protocol = protocol.to_string();
        self
    }

    /// What a custom collective promises, in the chunks of the trace.
    pub fn contract(mut self, contract: Contract) -> Trace {
        self.contract = Some(Arc::new(contract));
        self
    }

    /// Gives a scratch buffer a length, on every rank. Without that it is as long as its rank uses it.
    pub fn scratch(mut self, buffer: impl Into<TraceBuffer>, chunks: u32) -> Trace {
        self.scratch.push((buffer.into(), chunks));
        self
    }

    /// How many steps have been written.
    pub fn nsteps(&self) -> usize {
        self.written.borrow().steps.len()
    }

    /// The steps that have been written.
    pub fn steps(&self) -> Vec<TraceStep> {
        self.written.borrow().steps.clone()
    }

    /// A step by its number, counted from 0, and the place where it was written, for messages.
    pub fn title(&self, step: usize) -> String {
        let written = self.written.borrow();
        written.steps.get(step).map_or_else(|| format!("step {step}"), |found| found.title(step))
    }

    /// The script that does what the trace says.
    ///
    /// A [`ScriptStep`](super::ScriptStep)'s line is the number of the trace's step that it comes from, counted from 1.
    ///
    /// # Errors
    /// Directives that contradict each other, a custom collective without a contract, more of anything than a script may have.
    pub fn compile(&self) -> Result<Script, BadTrace> {
        self.check()?;
        let written = self.steps();
        let steps: Vec<(u32, TraceStep)> = (0..).zip(written.iter().cloned()).collect();
        let plain = blocks::compile(self, &expand::expand(self, &steps)?)?;
        let joined = expand::joined(self, &written);
        if joined.len() == steps.len() {
            return Ok(plain);
        }
        // Longer messages may cost steps where parts of them go on by themselves.
        let fewer = blocks::compile(self, &expand::expand(self, &joined)?)?;
        Ok(if fewer.nsteps() <= plain.nsteps() { fewer } else { plain })
    }

    /// Checks what can only be known of the whole trace.
    fn check(&self) -> Result<(), BadTrace> {
        if !(1..=MAX_INSTANCES).contains(&self.instances) {
            return Err(BadTrace::new(format!("instances: {} is not in 1 to {MAX_INSTANCES}", self.instances)));
        }
        if !["Simple", "LL", "LL128"].contains(&self.protocol.as_str()) {
            let text = format!("protocol: {:?} is none of Simple, LL and LL128", shortened(&self.protocol));
            return Err(BadTrace::new(text));
        }
        match (&self.contract, self.collective) {
            (None, Collective::Custom) => Err(BadTrace::new("a custom collective promises nothing without a contract")),
            (Some(_), collective) if collective != Collective::Custom => {
                Err(BadTrace::new(format!("{} has no contract but its own", collective.name())))
            }
            (Some(contract), _)
                if contract.outputs().len() != self.nranks as usize
                    || contract.outputs().iter().any(|chunks| chunks.len() != self.chunks as usize) =>
            {
                Err(BadTrace::new("the contract is for other numbers of ranks or chunks"))
            }
            _ if self
                .scratch
                .iter()
                .any(|(name, chunks)| !matches!(name, TraceBuffer::Scratch(_)) || *chunks >= xml::MAX_CHUNKS) =>
            {
                Err(BadTrace::new("scratch: a length is of a scratch buffer, and within the limit of chunks"))
            }
            _ if self.policy == InstancePolicy::Blocked && self.instances > 1 && self.blocks() > 1 => {
                let name = self.collective.name();
                Err(BadTrace::new(format!(
                    "policy blocked: buffers of {name} have several blocks; interleaved has none of that"
                )))
            }
            // Aliases and lengths may have been set after steps were written.
            _ => self
                .steps()
                .into_iter()
                .try_fold(Memory::default(), |mut memory, step| memory.apply(self, step).map(|_| memory))
                .map(|_| ()),
        }
    }

    fn blocks(&self) -> u32 {
        self.collective.blocks(self.nranks as usize) as u32
    }
}

/// A word of the trace in a message.
fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(MAX_NAME).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}
