//! What every algorithm uses to write a plan down.
#![forbid(unsafe_code)]

use crate::code::FloatCode;
use crate::plan::{Action, Buffer, CodedScratch, Collective, Lane, Plan, Shape, Span, Spans, Step, StepRef};
use crate::topo::Rank;

/// A plan being written.
pub struct Builder {
    plan: Plan,
}

impl Builder {
    /// An empty plan of `rank`, with blocks of `chunks_per_block` chunks.
    pub fn new(shape: &Shape, rank: Rank, algorithm: &str, chunks_per_block: usize) -> Builder {
        Builder {
            plan: Plan {
                shape: shape.clone(),
                rank,
                algorithm: algorithm.to_string(),
                chunks_per_block: chunks_per_block as u32,
                scratch_chunks: 0,
                coded: None,
                lanes: Vec::new(),
            },
        }
    }

    /// A new lane.
    pub fn lane(&mut self) -> usize {
        self.plan.lanes.push(Lane::default());
        self.plan.lanes.len() - 1
    }

    /// Appends a step.
    pub fn push(&mut self, lane: usize, action: Action) -> StepRef {
        self.push_after(lane, action, &[])
    }

    /// Appends a step that waits for others.
    pub fn push_after(&mut self, lane: usize, action: Action, deps: &[StepRef]) -> StepRef {
        let steps = &mut self.plan.lanes[lane].steps;
        steps.push(Step { action, deps: deps.to_vec() });
        StepRef { lane: lane as u32, step: steps.len() as u32 - 1 }
    }

    /// Takes `chunks` scratch slots; returns the first.
    pub fn scratch(&mut self, chunks: usize) -> usize {
        let first = self.plan.scratch_chunks as usize;
        self.plan.scratch_chunks += chunks as u32;
        first
    }

    /// Takes `chunks` slots for chunks in a code; returns the first. A plan has one code.
    pub fn coded(&mut self, code: FloatCode, chunks: usize) -> usize {
        let coded = self.plan.coded.get_or_insert(CodedScratch { code, chunks: 0 });
        let first = coded.chunks as usize;
        coded.chunks += chunks as u32;
        first
    }

    /// The finished plan.
    pub fn plan(self) -> Plan {
        self.plan
    }

    /// Copies the chunks of `src` to `dst` in a new lane, unless they are there already and nothing is applied.
    /// Returns the step to wait for.
    pub fn copy(&mut self, src: Spans, dst: Spans, start: bool, finish: bool) -> Option<StepRef> {
        let in_place = src == dst || self.same_place(&src, &dst);
        if in_place && !start && !finish {
            return None;
        }
        let lane = self.lane();
        Some(self.push(lane, Action::Copy { src, dst, start, finish }))
    }

    fn same_place(&self, src: &[Span], dst: &[Span]) -> bool {
        let Plan { shape, rank, chunks_per_block: k, .. } = &self.plan;
        let home = |span: &Span| match (shape.in_place, shape.collective, span.buffer) {
            (true, Collective::AllGather | Collective::Gather, Buffer::Input) => {
                (Buffer::Output, span.start + rank.0 * k)
            }
            (true, Collective::ReduceScatter | Collective::Scatter, Buffer::Output) => {
                (Buffer::Input, span.start + rank.0 * k)
            }
            (true, _, Buffer::Input) => (Buffer::Output, span.start),
            (_, _, buffer) => (buffer, span.start),
        };
        src.len() == dst.len() && src.iter().zip(dst).all(|(a, b)| home(a) == home(b) && a.len == b.len)
    }
}

/// The same chunks with neighbouring spans made one.
pub fn joined(spans: impl IntoIterator<Item = Span>) -> Spans {
    let mut longer = Spans::new();
    for span in spans {
        match longer.last_mut() {
            Some(last)
                if last.buffer == span.buffer
                    && last.start + last.len == span.start
                    && last.like + last.len == span.like =>
            {
                last.len += span.len;
            }
            _ => longer.push(span),
        }
    }
    longer
}

/// `len` chunks from `start` of the single-block input, where an in-place call holds it.
pub fn own(shape: &Shape, start: usize, len: usize) -> Span {
    Span::user(if shape.in_place { Buffer::Output } else { Buffer::Input }, start, len)
}

/// All ranks, node by node: the order in which a ring crosses each node's border least often.
pub fn ring_order(shape: &Shape) -> Vec<Rank> {
    shape.grid.node_ids().flat_map(|node| shape.grid.members(node).to_vec()).collect()
}

/// The plan of a communicator of one rank: the input is the result, but for the prologue and the epilogue.
pub fn alone(shape: &Shape, rank: Rank, algorithm: &str) -> Plan {
    let mut builder = Builder::new(shape, rank, algorithm, 1);
    let finish = shape.collective.reduces();
    let src = if shape.in_place { Span::output(0, 1) } else { Span::input(0, 1) };
    builder.copy(vec![src], vec![Span::output(0, 1)], shape.prologue, finish);
    builder.plan()
}
