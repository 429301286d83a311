//! A collective, written out step by step for one rank.
//!
//! A plan speaks of *chunks*, never of bytes. Each buffer is a row of chunks: a *block* (the `count` elements of the
//! NCCL call) is `chunks_per_block` consecutive chunks, and `Input` and `Output` have as many blocks as the collective
//! says ([`Collective::input_blocks`], [`Collective::output_blocks`]). [`layout`] turns chunks into bytes at run time.
//!
//! **Order.** A plan has *lanes*. A lane issues its steps in order; a step other than `Send` completes before the next
//! one of its lane is issued, a `Send` only has to be accepted by its channel. A dependency waits until the named step
//! has *completed*, which for a `Send` means that its source may be written again. All of this holds per segment: when a
//! long message is cut into segments, the plan runs once for each, lanes go from one segment to the next on their own,
//! and segment `s + window` starts when segment `s` has completed.
//!
//! **Messages** from one rank to another on one channel arrive in the order in which they were sent. On each rank, one
//! lane at most sends to, and one lane at most receives from, a given (peer, channel).
#![forbid(unsafe_code)]

pub mod blocks;
pub mod contract;
pub mod inline;
pub mod layout;
pub(crate) mod rank_sets;
pub mod stage;
pub mod text;
pub mod weights;

use crate::code::FloatCode;
use crate::topo::{Grid, Rank};
use std::sync::Arc;

/// The contract a plan fulfils.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Collective {
    /// Every rank gets the reduction of all vectors.
    AllReduce,
    /// Every rank gets every rank's block, in rank order.
    AllGather,
    /// Rank i gets block i of the reduction of all inputs.
    ReduceScatter,
    /// Every rank gets the root's vector.
    Broadcast,
    /// The root gets the reduction of all vectors.
    Reduce,
    /// Rank i gets block i of every rank's input, in rank order.
    AllToAll,
    /// The root gets every rank's block, in rank order.
    Gather,
    /// Rank i gets block i of the root's input.
    Scatter,
    /// What its [`Contract`](contract::Contract) says. That also says of how many blocks each rank's input and output are:
    /// [`Shape::blocks`].
    Custom,
}

impl Collective {
    /// All collectives that have a name of their own.
    pub const ALL: [Collective; 8] = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::AllToAll,
        Collective::Gather,
        Collective::Scatter,
    ];

    /// The name used in variables, logs and the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::AllToAll => "all_to_all",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::Custom => "custom",
        }
    }

    /// The collective with this name; `-`, `_` and case do not matter (`AllGather`, `all-gather`, `allgather`).
    pub fn from_name(name: &str) -> Option<Collective> {
        let plain = |text: &str| text.replace(['_', '-'], "").to_ascii_lowercase();
        Self::ALL.into_iter().find(|collective| plain(collective.name()) == plain(name))
    }

    /// Whether data of several ranks is combined; of a custom one its contract says it ([`Shape::reduces`]).
    pub const fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce)
    }

    /// Whether one rank is special.
    pub const fn has_root(self) -> bool {
        matches!(self, Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter)
    }

    /// Blocks of the larger of the two buffers; of a custom collective as if it had one.
    pub fn blocks(self, nranks: usize) -> usize {
        match self {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::Custom => 1,
            _ => nranks,
        }
    }

    /// Blocks in a rank's `Input`. A rank that has none (a non-root of `Broadcast` and `Scatter`) may pass null.
    pub fn input_blocks(self, nranks: usize, rank: Rank, root: Rank) -> usize {
        match self {
            Collective::AllReduce | Collective::AllGather | Collective::Reduce | Collective::Gather => 1,
            Collective::Custom => 1,
            Collective::ReduceScatter | Collective::AllToAll => nranks,
            Collective::Broadcast => usize::from(rank == root),
            Collective::Scatter => nranks * usize::from(rank == root),
        }
    }

    /// Blocks in a rank's `Output`.
    pub fn output_blocks(self, nranks: usize, rank: Rank, root: Rank) -> usize {
        match self {
            Collective::AllReduce | Collective::ReduceScatter | Collective::Broadcast | Collective::Scatter => 1,
            Collective::Custom => 1,
            Collective::AllGather | Collective::AllToAll => nranks,
            Collective::Reduce => usize::from(rank == root),
            Collective::Gather => nranks * usize::from(rank == root),
        }
    }
}

/// The blocks of a message seen from one rank: what an algorithm writes a plan for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    /// What is to be done.
    pub collective: Collective,
    /// Who is where.
    pub grid: Arc<Grid>,
    /// The root, for collectives that have one (else rank 0).
    pub root: Rank,
    /// The buffers overlap as NCCL's in-place convention says: `Input` *is* `Output` (AllReduce, Broadcast, Reduce on
    /// the root, AllToAll, Custom), or `Input` is block `rank` of `Output` (AllGather; Gather on the root), or `Output` is
    /// block `rank` of `Input` (ReduceScatter; Scatter on the root). None of the library's own algorithms does AllToAll so.
    pub in_place: bool,
    /// Every rank's own input must pass through a `Copy` with `start` before it is reduced or sent.
    pub prologue: bool,
    /// What a custom collective promises.
    pub contract: Option<Arc<contract::Contract>>,
}

impl Shape {
    /// An out-of-place shape without prologue and with root 0.
    pub fn new(collective: Collective, grid: Arc<Grid>) -> Shape {
        Shape { collective, grid, root: Rank(0), in_place: false, prologue: false, contract: None }
    }

    /// Whether data of several ranks is combined.
    pub fn reduces(&self) -> bool {
        self.collective.reduces() || self.contract.as_ref().is_some_and(|contract| contract.reduces())
    }

    /// How many ranks take part.
    pub fn nranks(&self) -> usize {
        self.grid.nranks()
    }

    /// Blocks of the larger of the two buffers.
    pub fn blocks(&self) -> usize {
        self.contract.as_ref().map_or_else(|| self.collective.blocks(self.nranks()), |contract| contract.blocks())
    }

    /// Blocks in a rank's `Input`.
    pub fn input_blocks(&self, rank: Rank) -> usize {
        let of_collective = || self.collective.input_blocks(self.nranks(), rank, self.root);
        self.contract.as_ref().map_or_else(of_collective, |contract| contract.blocks())
    }

    /// Which block of the row of blocks a block of a rank's `Input` or `Output` is. The row has one block for each rank; for
    /// all-reduce, broadcast and reduce it is one block, and for all-to-all the block from rank `i` to rank `j` is number
    /// `i * nranks + j`. Of a custom collective's buffers each is a row by itself.
    pub fn row_block(&self, rank: Rank, buffer: Buffer, block: usize) -> usize {
        self.collective.row_block(self.nranks(), rank, buffer, block)
    }

    /// Blocks in a rank's `Output`.
    pub fn output_blocks(&self, rank: Rank) -> usize {
        let of_collective = || self.collective.output_blocks(self.nranks(), rank, self.root);
        self.contract.as_ref().map_or_else(of_collective, |contract| contract.blocks())
    }
}

impl Collective {
    /// [`Shape::row_block`] on so many ranks.
    pub fn row_block(self, nranks: usize, rank: Rank, buffer: Buffer, block: usize) -> usize {
        let (me, p) = (rank.index(), nranks);
        match (self, buffer) {
            (Collective::AllGather | Collective::Gather, Buffer::Input) => me,
            (Collective::ReduceScatter | Collective::Scatter, Buffer::Output) => me,
            (Collective::AllToAll, Buffer::Input) => me * p + block,
            (Collective::AllToAll, Buffer::Output) => block * p + me,
            _ => block,
        }
    }
}

/// Where a chunk lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The call's send buffer; never written (except where it is `Output` too).
    Input,
    /// The call's receive buffer.
    Output,
    /// Strata's own memory, one set per segment in flight; holds nothing when a segment starts.
    Scratch,
    /// More of it, whose chunks are coded ([`CodedScratch`]): smaller, and other than the same chunks elsewhere. A `Copy` between
    /// it and another buffer codes or decodes, a `Reduce` whose sources lie in it decodes them. The lists of a step lie in it
    /// whole or not at all, and no other step combines what does.
    Coded,
}

impl Buffer {
    /// Whether it is Strata's own memory.
    pub const fn is_own(self) -> bool {
        matches!(self, Buffer::Scratch | Buffer::Coded)
    }
}

/// The scratch memory of a plan whose messages are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodedScratch {
    /// The form of its chunks.
    pub code: FloatCode,
    /// How many slots there are, each as large as the largest coded chunk.
    pub chunks: u32,
}

/// A span of a rank's, cut where its chunks' places in the row of blocks do not follow one another; `like` says these places.
fn row_spans(shape: &Shape, rank: Rank, per_block: u32, span: Span) -> impl Iterator<Item = Span> {
    let mut rest = Some(span);
    let shape = shape.clone();
    std::iter::from_fn(move || {
        let span = rest.take()?;
        if span.buffer.is_own() {
            return Some(span);
        }
        let place = |chunk: u32| {
            let block = shape.row_block(rank, span.buffer, (chunk / per_block) as usize) as u32;
            block * per_block + chunk % per_block
        };
        let like = place(span.start);
        let follows = |at: &u32| place(span.start + at) == like + at;
        let len = 1 + (1..span.len).take_while(follows).count() as u32;
        if len < span.len {
            rest = Some(Span { start: span.start + len, len: span.len - len, ..span });
        }
        Some(Span { len, like, ..span })
    })
}

/// Consecutive chunks of one buffer.
///
/// Chunks differ in size (a count need not divide), so a span says whose size its chunks have: chunk `start + i` is as
/// large as chunk `like + i`. For `Input` and `Output` `like` and `start` agree modulo `chunks_per_block`, and the block follows
/// from `start`; a scratch slot takes a chunk of any block, and `like` counts in the row of blocks ([`Shape::row_block`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// The buffer.
    pub buffer: Buffer,
    /// The first chunk.
    pub start: u32,
    /// How many chunks; at least one.
    pub len: u32,
    /// The first chunk whose size is meant.
    pub like: u32,
}

impl Span {
    /// Chunks of `Input` or `Output`, whose sizes follow from their place.
    pub fn user(buffer: Buffer, start: usize, len: usize) -> Span {
        Span { buffer, start: start as u32, len: len as u32, like: start as u32 }
    }

    /// `len` chunks of `Input` from `start`.
    pub fn input(start: usize, len: usize) -> Span {
        Span::user(Buffer::Input, start, len)
    }

    /// `len` chunks of `Output` from `start`.
    pub fn output(start: usize, len: usize) -> Span {
        Span::user(Buffer::Output, start, len)
    }

    /// `len` coded slots from `start`, holding chunks `like..like + len` of the row of blocks.
    pub fn coded(start: usize, len: usize, like: usize) -> Span {
        Span { buffer: Buffer::Coded, ..Span::scratch(start, len, like) }
    }

    /// `len` scratch slots from `start`, holding chunks as large as `like..like + len`.
    pub fn scratch(start: usize, len: usize, like: usize) -> Span {
        Span { buffer: Buffer::Scratch, start: start as u32, len: len as u32, like: like as u32 }
    }
}

/// A list of spans, read or written in order: a gather or scatter list. Strided data is one span per run.
pub type Spans = Vec<Span>;

/// How many chunks a list of spans covers.
pub fn chunks_in(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.len as usize).sum()
}

/// Which operand of a reduction comes first. All ranks that compute the same result must agree bit for bit, so the
/// order is part of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperandOrder {
    /// `local (op) incoming`
    LocalFirst,
    /// `incoming (op) local`
    IncomingFirst,
}

/// A message stream between two ranks. Messages of one channel from one rank to another keep their order.
pub type Channel = u16;

/// What a step does. Source and destination lists cover the same number of chunks, pairwise of the same size.
/// A destination may be exactly a source (in place) and may not overlap one in any other way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Sends the chunks of `src` as one message.
    Send {
        /// The receiver.
        to: Rank,
        /// The message stream.
        channel: Channel,
        /// What is sent.
        src: Spans,
    },
    /// Receives one message into `dst`.
    Recv {
        /// The sender.
        from: Rank,
        /// The message stream.
        channel: Channel,
        /// Where it goes.
        dst: Spans,
    },
    /// Receives one message, combines it with `local`, writes `dst`.
    RecvReduce {
        /// The sender.
        from: Rank,
        /// The message stream.
        channel: Channel,
        /// The local operand.
        local: Spans,
        /// Where the result goes.
        dst: Spans,
        /// Which operand comes first.
        order: OperandOrder,
        /// The result is final: apply the reduction's epilogue.
        finish: bool,
    },
    /// Copies `src` to `dst`.
    Copy {
        /// From here.
        src: Spans,
        /// To here.
        dst: Spans,
        /// The data is this rank's own input, used for the first time: apply the reduction's prologue.
        start: bool,
        /// The data is a final result: apply the reduction's epilogue.
        finish: bool,
    },
    /// `dst = srcs[0] (op) srcs[1] (op) ...`, folded from the left. At least two sources.
    Reduce {
        /// The operands.
        srcs: Vec<Spans>,
        /// Where the result goes.
        dst: Spans,
        /// The result is final: apply the reduction's epilogue.
        finish: bool,
    },
    /// A whole collective over some of the ranks, given to another provider or replaced by another plan.
    Call(Call),
    /// Nothing; waits for its dependencies.
    Nop,
}

/// Whether a list lies in coded scratch.
pub fn is_coded(spans: &[Span]) -> bool {
    spans.first().is_some_and(|span| span.buffer == Buffer::Coded)
}

impl Action {
    /// The lists that it reads, and those that it writes.
    pub fn lists(&self) -> (&[Spans], &[Spans]) {
        use std::slice::from_ref;
        match self {
            Action::Send { src, .. } => (from_ref(src), &[]),
            Action::Recv { dst, .. } => (&[], from_ref(dst)),
            Action::RecvReduce { local, dst, .. } => (from_ref(local), from_ref(dst)),
            Action::Copy { src, dst, .. } => (from_ref(src), from_ref(dst)),
            Action::Reduce { srcs, dst, .. } => (srcs, from_ref(dst)),
            Action::Call(call) => (&call.src, &call.dst),
            Action::Nop => (&[], &[]),
        }
    }

    /// Whether it uses coded chunks as [`Buffer::Coded`] says; else why not.
    ///
    /// # Errors
    /// A text that goes on a sentence about the step.
    pub fn check_coded(&self) -> Result<(), String> {
        let (reads, writes) = self.lists();
        let is = |span: &Span| span.buffer == Buffer::Coded;
        let mixed = |spans: &Spans| spans.iter().any(is) && !spans.iter().all(is);
        if reads.iter().chain(writes).any(mixed) {
            return Err("has coded chunks and others in one list".into());
        }
        let (from, to) = (reads.iter().any(|spans| is_coded(spans)), writes.iter().any(|spans| is_coded(spans)));
        match self {
            _ if !from && !to => Ok(()),
            Action::Send { .. } | Action::Recv { .. } | Action::Nop => Ok(()),
            Action::Copy { start: true, .. } => Err("applies the prologue to coded chunks".into()),
            Action::Copy { finish: true, .. } if to => Err("finishes what is coded afterwards".into()),
            Action::Copy { .. } => Ok(()),
            Action::Reduce { srcs, .. } if !srcs.iter().all(|src| is_coded(src)) => {
                Err("combines coded chunks with others".into())
            }
            Action::Reduce { finish: true, .. } if to => Err("finishes what is coded afterwards".into()),
            Action::Reduce { .. } => Ok(()),
            Action::RecvReduce { .. } | Action::Call(_) => Err("combines or calls with coded chunks".into()),
        }
    }
}

/// A collective over a group of ranks, as one step. All members have equal calls (`collective`, `group`, `root`,
/// `level`) in the same order, and their parts match in size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Call {
    /// What is to be done among the members.
    pub collective: Collective,
    /// Which links it uses; chooses the provider.
    pub level: LinkLevel,
    /// The members; a member's index here is its rank within the call.
    pub group: Vec<Rank>,
    /// The root's index in `group`, for collectives that have one (else 0).
    pub root: usize,
    /// The call's input, one list per block: `Collective::input_blocks` of them. Blocks may differ in size
    /// (and be empty), as in a vectored collective.
    pub src: Vec<Spans>,
    /// The call's output, one list per block: `Collective::output_blocks` of them.
    pub dst: Vec<Spans>,
    /// The results are final: the epilogue is applied.
    pub finish: bool,
}

/// Which links a [`Call`] runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkLevel {
    /// Members share a node.
    Node,
    /// Members are on different nodes.
    Rail,
    /// All ranks are members, and a library with collectives of its own does the call.
    All,
}

/// A step of the same rank, by lane and position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepRef {
    /// Index of the lane.
    pub lane: u32,
    /// Index of the step in its lane.
    pub step: u32,
}

/// One entry of a lane.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    /// What is done.
    pub action: Action,
    /// Steps of other lanes that must have completed first.
    pub deps: Vec<StepRef>,
}

impl From<Action> for Step {
    fn from(action: Action) -> Step {
        Step { action, deps: Vec::new() }
    }
}

/// An in-order list of steps.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Lane {
    /// The steps.
    pub steps: Vec<Step>,
}

/// An algorithm, written out for one rank of one shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    /// What the plan was written for.
    pub shape: Shape,
    /// Whose plan it is.
    pub rank: Rank,
    /// The name of the algorithm.
    pub algorithm: String,
    /// Chunks in one block; the same on all ranks.
    pub chunks_per_block: u32,
    /// Scratch slots used, each as large as the largest chunk.
    pub scratch_chunks: u32,
    /// Scratch slots for coded chunks, where there are some.
    pub coded: Option<CodedScratch>,
    /// The lanes.
    pub lanes: Vec<Lane>,
}

impl Plan {
    /// Chunks in this rank's buffer.
    pub fn chunks(&self, buffer: Buffer) -> usize {
        let per_block = self.chunks_per_block as usize;
        match buffer {
            Buffer::Input => self.shape.input_blocks(self.rank) * per_block,
            Buffer::Output => self.shape.output_blocks(self.rank) * per_block,
            Buffer::Scratch => self.scratch_chunks as usize,
            Buffer::Coded => self.coded.map_or(0, |coded| coded.chunks as usize),
        }
    }

    /// Chunks of this rank's, as [`like`](Span::like) names them for scratch that takes them over: spans of which each is in one
    /// block, or in scratch.
    pub fn in_row<'a>(&'a self, spans: &'a [Span]) -> impl Iterator<Item = Span> + 'a {
        spans.iter().flat_map(|span| row_spans(&self.shape, self.rank, self.chunks_per_block, *span))
    }

    /// The step a reference names.
    pub fn step(&self, at: StepRef) -> Option<&Step> {
        self.lanes.get(at.lane as usize)?.steps.get(at.step as usize)
    }

    /// How many steps all lanes have together.
    pub fn nsteps(&self) -> usize {
        self.lanes.iter().map(|lane| lane.steps.len()).sum()
    }
}
