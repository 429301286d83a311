//! A plan compiled for running: flat arrays instead of nested lists, dependencies turned round, so that the executor
//! only ever follows indices.
#![forbid(unsafe_code)]

use crate::code::FloatCode;
use crate::error::{Error, Result};
use crate::plan::blocks::BlockTable;
use crate::plan::layout::Layout;
use crate::plan::{is_coded, Action, Call, Channel, CodedScratch, OperandOrder, Plan, Span, StepRef};
use crate::topo::Rank;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A plan, ready to be run any number of times. Made once per plan, and shared.
#[derive(Debug)]
pub struct Program {
    plan: Arc<Plan>,
    /// All steps, lane after lane.
    pub(super) steps: Vec<StepCode>,
    /// The steps of each lane that has any.
    pub(super) lanes: Vec<Range<u32>>,
    /// The steps that wait for a step; each step has its own range here.
    pub(super) dependents: Vec<u32>,
    /// The spans of all lists, one list after the other.
    spans: Vec<Span>,
    /// Where each list begins in `spans`, and the end of the last.
    bounds: Vec<u32>,
    rounds: u32,
}

/// One step without its spans.
#[derive(Debug, Clone)]
pub(super) struct StepCode {
    pub(super) kind: StepKind,
    /// Index in [`Program::lanes`].
    pub(super) lane: u32,
    /// Where the plan has it.
    pub(super) at: StepRef,
    /// How many steps it waits for.
    pub(super) ndeps: u32,
    /// Range in [`Program::dependents`].
    pub(super) dependents: Range<u32>,
    /// Its span lists: sources before destinations.
    pub(super) lists: Range<u32>,
}

/// What a step does.
#[derive(Debug, Clone, Copy)]
pub(super) enum StepKind {
    Send {
        to: Rank,
        channel: Channel,
    },
    Recv {
        from: Rank,
        channel: Channel,
    },
    RecvReduce {
        from: Rank,
        channel: Channel,
        order: OperandOrder,
        finish: bool,
    },
    Copy {
        start: bool,
        finish: bool,
    },
    Reduce {
        finish: bool,
    },
    Encode {
        code: FloatCode,
    },
    Decode {
        code: FloatCode,
        finish: bool,
    },
    FoldCoded {
        code: FloatCode,
        finish: bool,
    },
    /// The first `nsrc` lists are the input.
    Call {
        nsrc: u32,
    },
    Nop,
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StepKind::Send { to, channel } => write!(f, "send to {to} on channel {channel}"),
            StepKind::Recv { from, channel } => write!(f, "receive from {from} on channel {channel}"),
            StepKind::RecvReduce { from, channel, .. } => {
                write!(f, "receive and reduce from {from} on channel {channel}")
            }
            StepKind::Copy { .. } => f.write_str("copy"),
            StepKind::Reduce { .. } | StepKind::FoldCoded { .. } => f.write_str("reduce"),
            StepKind::Encode { .. } => f.write_str("encode"),
            StepKind::Decode { .. } => f.write_str("decode"),
            StepKind::Call { .. } => f.write_str("call"),
            StepKind::Nop => f.write_str("nop"),
        }
    }
}

impl Program {
    /// Compiles a plan. Refuses one that names steps, ranks or chunks that do not exist, or whose steps wait for each
    /// other in a circle; whether the plan does what its collective says is the verifier's business.
    pub fn new(plan: Plan) -> Result<Program> {
        let mut program = Program {
            steps: Vec::with_capacity(plan.nsteps()),
            lanes: Vec::new(),
            dependents: Vec::new(),
            spans: Vec::new(),
            bounds: vec![0],
            rounds: 0,
            plan: Arc::new(plan),
        };
        program.compile_lanes(&Arc::clone(&program.plan))?;
        program.link_dependents()?;
        program.measure_rounds()?;
        Ok(program)
    }

    /// The plan it was made from.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The longest chain of receives on this rank in one segment, each waiting for the one before.
    pub fn rounds(&self) -> usize {
        self.rounds as usize
    }

    /// The layout to run this program with.
    pub fn layout(&self, count: usize, elem_bytes: usize, segment_bytes: usize) -> Layout {
        let Plan { chunks_per_block, scratch_chunks, .. } = *self.plan;
        Layout::new(count, elem_bytes, chunks_per_block as usize, scratch_chunks as usize, segment_bytes)
            .with_coded(self.plan.coded)
    }

    /// The same for blocks of different sizes.
    pub fn layout_of(&self, blocks: Arc<BlockTable>, elem_bytes: usize, segment_bytes: usize) -> Layout {
        let Plan { chunks_per_block, scratch_chunks, .. } = *self.plan;
        Layout::vectored(blocks, elem_bytes, chunks_per_block as usize, scratch_chunks as usize, segment_bytes)
            .with_coded(self.plan.coded)
    }

    /// The spans of a list.
    pub(super) fn list(&self, list: u32) -> &[Span] {
        let list = list as usize;
        &self.spans[self.bounds[list] as usize..self.bounds[list + 1] as usize]
    }

    /// How many lists all steps have.
    pub(super) fn nlists(&self) -> u32 {
        self.bounds.len() as u32 - 1
    }

    /// The call that the plan has at a step.
    pub(super) fn call(&self, at: StepRef) -> Option<&Call> {
        match &self.plan.step(at)?.action {
            Action::Call(call) => Some(call),
            _ => None,
        }
    }

    fn compile_lanes(&mut self, plan: &Plan) -> Result<()> {
        for (lane, steps) in plan.lanes.iter().enumerate() {
            let first = self.steps.len() as u32;
            for (index, step) in steps.steps.iter().enumerate() {
                let at = StepRef { lane: lane as u32, step: index as u32 };
                let before = self.nlists();
                let kind = self.compile_action(plan, &step.action).map_err(|what| bad_step(plan, at, &what))?;
                self.steps.push(StepCode {
                    kind,
                    lane: self.lanes.len() as u32,
                    at,
                    ndeps: step.deps.len() as u32,
                    dependents: 0..0,
                    lists: before..self.nlists(),
                });
            }
            if !steps.steps.is_empty() {
                self.lanes.push(first..self.steps.len() as u32);
            }
        }
        Ok(())
    }

    fn compile_action(&mut self, plan: &Plan, action: &Action) -> std::result::Result<StepKind, String> {
        action.check_coded()?;
        let peer = |rank: Rank| match rank.index() < plan.shape.nranks() && rank != plan.rank {
            true => Ok(rank),
            false => Err(format!("names rank {rank} as its peer")),
        };
        let mut push = |spans: &[Span]| self.push_list(plan, spans);
        Ok(match action {
            Action::Send { to, channel, src } => {
                push(src)?;
                StepKind::Send { to: peer(*to)?, channel: *channel }
            }
            Action::Recv { from, channel, dst } => {
                push(dst)?;
                StepKind::Recv { from: peer(*from)?, channel: *channel }
            }
            Action::RecvReduce { from, channel, local, dst, order, finish } => {
                push(local)?;
                push(dst)?;
                StepKind::RecvReduce { from: peer(*from)?, channel: *channel, order: *order, finish: *finish }
            }
            Action::Copy { src, dst, start, finish } => {
                push(src)?;
                push(dst)?;
                match (plan.coded, is_coded(src), is_coded(dst)) {
                    (Some(CodedScratch { code, .. }), false, true) => StepKind::Encode { code },
                    (Some(CodedScratch { code, .. }), true, false) => StepKind::Decode { code, finish: *finish },
                    _ => StepKind::Copy { start: *start, finish: *finish },
                }
            }
            Action::Reduce { srcs, dst, finish } => {
                srcs.iter().try_for_each(|src| push(src))?;
                push(dst)?;
                match plan.coded.filter(|_| srcs.iter().any(|src| is_coded(src))) {
                    Some(CodedScratch { code, .. }) => StepKind::FoldCoded { code, finish: *finish },
                    None => StepKind::Reduce { finish: *finish },
                }
            }
            Action::Call(call) => {
                if let Some(rank) = call.group.iter().find(|rank| rank.index() >= plan.shape.nranks()) {
                    return Err(format!("names rank {rank} as a member"));
                }
                call.src.iter().chain(&call.dst).try_for_each(|list| push(list))?;
                StepKind::Call { nsrc: call.src.len() as u32 }
            }
            Action::Nop => StepKind::Nop,
        })
    }

    fn push_list(&mut self, plan: &Plan, spans: &[Span]) -> std::result::Result<(), String> {
        for span in spans {
            let chunks = plan.chunks(span.buffer);
            if span.start as usize + span.len as usize > chunks {
                return Err(format!(
                    "uses chunks {}+{} of {:?}, which has {chunks}",
                    span.start, span.len, span.buffer
                ));
            }
            let per_block = plan.chunks_per_block.max(1);
            if !span.buffer.is_own() && span.start % per_block != span.like % per_block {
                return Err(format!("gives chunk {} the size of chunk {}", span.start, span.like));
            }
        }
        self.spans.extend_from_slice(spans);
        self.bounds.push(self.spans.len() as u32);
        Ok(())
    }

    fn link_dependents(&mut self) -> Result<()> {
        let mut first_of = Vec::with_capacity(self.plan.lanes.len());
        let mut first = 0;
        for lane in &self.plan.lanes {
            first_of.push(first);
            first += lane.steps.len();
        }
        let mut waiting = vec![Vec::new(); self.steps.len()];
        for (index, code) in self.steps.iter().enumerate() {
            let step = &self.plan.lanes[code.at.lane as usize].steps[code.at.step as usize];
            for dep in &step.deps {
                if self.plan.step(*dep).is_none() {
                    let what = format!("waits for step {} of lane {}, which does not exist", dep.step, dep.lane);
                    return Err(bad_step(&self.plan, code.at, &what));
                }
                waiting[first_of[dep.lane as usize] + dep.step as usize].push(index as u32);
            }
        }
        for (code, waiting) in self.steps.iter_mut().zip(&waiting) {
            let start = self.dependents.len() as u32;
            self.dependents.extend_from_slice(waiting);
            code.dependents = start..self.dependents.len() as u32;
        }
        Ok(())
    }

    /// The calls left in the plan, by their place among all steps, each with the number of calls that come before it
    /// in a chain.
    pub fn calls(&self) -> Result<Vec<(u32, u32)>> {
        let is_call = |kind: &StepKind| matches!(kind, StepKind::Call { .. });
        let chains = self.longest_chains(is_call)?;
        let calls = (0u32..).zip(&self.steps).filter(|(_, code)| is_call(&code.kind));
        Ok(calls.map(|(index, _)| (index, chains[index as usize] - 1)).collect())
    }

    /// Whether a call moves nothing in a segment.
    pub fn is_empty_call(&self, step: u32, layout: &Layout, segment: usize) -> bool {
        let mut pieces = Vec::new();
        let spans = self.steps[step as usize].lists.clone().flat_map(|list| self.list(list));
        spans.for_each(|span| layout.pieces(segment, 0, span, &mut pieces));
        pieces.is_empty()
    }

    fn measure_rounds(&mut self) -> Result<()> {
        let receives = |kind: &StepKind| matches!(kind, StepKind::Recv { .. } | StepKind::RecvReduce { .. });
        self.rounds = self.longest_chains(receives)?.into_iter().max().unwrap_or(0);
        Ok(())
    }

    /// For each step how many of the steps that count are in the longest chain that ends with it. Walks the steps in an
    /// order that respects lanes and dependencies.
    fn longest_chains(&self, counts: impl Fn(&StepKind) -> bool) -> Result<Vec<u32>> {
        let is_first = |index: u32| self.lanes[self.steps[index as usize].lane as usize].start == index;
        let is_last = |index: u32| self.lanes[self.steps[index as usize].lane as usize].end == index + 1;
        let mut missing: Vec<u32> = (0u32..).zip(&self.steps).map(|(i, s)| s.ndeps + u32::from(!is_first(i))).collect();
        let mut chain = vec![0u32; self.steps.len()];
        let mut ready: Vec<u32> = (0..self.steps.len() as u32).filter(|&index| missing[index as usize] == 0).collect();
        let mut walked = 0;
        while let Some(index) = ready.pop() {
            walked += 1;
            let code = &self.steps[index as usize];
            chain[index as usize] += u32::from(counts(&code.kind));
            let after = (!is_last(index)).then_some(index + 1);
            let waiting = &self.dependents[code.dependents.start as usize..code.dependents.end as usize];
            for &next in waiting.iter().chain(&after) {
                chain[next as usize] = chain[next as usize].max(chain[index as usize]);
                missing[next as usize] -= 1;
                if missing[next as usize] == 0 {
                    ready.push(next);
                }
            }
        }
        match missing.iter().position(|&missing| missing > 0).filter(|_| walked < self.steps.len()) {
            Some(stuck) => Err(bad_step(&self.plan, self.steps[stuck].at, "waits for itself through its dependencies")),
            None => Ok(chain),
        }
    }
}

fn bad_step(plan: &Plan, at: StepRef, what: &str) -> Error {
    let Plan { algorithm, rank, .. } = plan;
    let name = plan.shape.collective.name();
    Error::Internal(format!("plan {algorithm} of {name} on rank {rank}: lane {} step {} {what}", at.lane, at.step))
}
