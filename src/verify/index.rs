//! Plans, checked step by step and numbered for the run: every lane, step, channel, group and place gets an index.
//!
//! What this pass accepts can be run without a further bounds check: spans lie in their buffers, sizes match within each
//! step, dependencies and peers exist.
#![forbid(unsafe_code)]

use super::{Check, Rejection};
use crate::plan::{Action, Buffer, Call, Channel, Collective, Plan, Shape, Span, Spans, StepRef};
use crate::topo::Rank;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Stands for "no such index".
pub(super) const NONE: u32 = u32::MAX;

/// The most chunk accesses that plans may make together; a bound on time.
const MAX_ACCESSES: usize = 1 << 28;
/// The most places that all buffers may have together; a bound on memory.
pub(crate) const MAX_PLACES: usize = 1 << 26;

/// One chunk of a list of spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Where it lies; the same number for the same memory, whichever buffer names it.
    pub place: u32,
    /// Its position in a block, which says how large it is.
    pub class: u32,
    /// Which block of the row it belongs to; 0 where all are of one size.
    pub block: u32,
    /// Whether it lies in coded scratch.
    pub coded: bool,
}

/// Where the buffers of one rank begin.
#[derive(Debug, Clone, Copy)]
struct Buffers {
    base: u32,
    input: u32,
    output: u32,
    output_len: u32,
    scratch: u32,
    coded: u32,
    end: u32,
}

/// A lane of some rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaneInfo {
    /// Whose lane.
    pub rank: u32,
    /// Its number on that rank.
    pub number: u32,
    /// Its first step.
    pub first: u32,
    /// One past its last step.
    pub end: u32,
}

/// A step of some lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepInfo<'a> {
    /// What it does.
    pub action: &'a Action,
    /// What it waits for.
    pub deps: &'a [StepRef],
    /// Its lane.
    pub lane: u32,
    /// Its channel (messages) or group (calls), or [`NONE`].
    pub link: u32,
}

/// A message stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChannelInfo {
    /// The lane that sends, or [`NONE`].
    pub sender: u32,
    /// The lane that receives, or [`NONE`].
    pub receiver: u32,
}

/// Numbered plans.
#[derive(Debug)]
pub(super) struct Index<'a> {
    /// What they are for.
    pub shape: &'a Shape,
    /// Chunks in a block.
    pub per_block: u32,
    /// Whether blocks may differ in size.
    pub vectored: bool,
    /// The plans, by rank.
    pub plans: &'a [Plan],
    /// All lanes, rank by rank.
    pub lanes: Vec<LaneInfo>,
    /// The first lane of each rank.
    lane_base: Vec<u32>,
    /// All steps, lane by lane.
    pub steps: Vec<StepInfo<'a>>,
    /// All message streams.
    pub channels: Vec<ChannelInfo>,
    /// The members of all groups that calls name.
    pub groups: Vec<&'a [Rank]>,
    buffers: Vec<Buffers>,
}

/// The tables that only this pass needs.
struct Pass<'a> {
    channels: FxHashMap<(u32, u32, Channel), u32>,
    groups: FxHashMap<&'a [Rank], u32>,
    accesses: usize,
    /// For each place of a rank, the step that last wrote it and at which position of its list.
    written: Vec<(u32, u32)>,
    members: Vec<u32>,
    step: u32,
}

impl<'a> Index<'a> {
    /// Numbers plans, or says why they are malformed.
    pub fn new(plans: &'a [Plan], vectored: bool) -> Result<Index<'a>, Rejection> {
        let (shape, per_block) = agree(plans)?;
        let mut index = Index {
            shape,
            per_block,
            vectored,
            plans,
            lanes: Vec::new(),
            lane_base: Vec::new(),
            steps: Vec::new(),
            channels: Vec::new(),
            groups: Vec::new(),
            buffers: Vec::new(),
        };
        index.place_buffers()?;
        index.number_steps()?;
        let most = index.buffers.iter().map(|buffers| buffers.end - buffers.base).max().unwrap_or(0);
        let mut pass = Pass {
            channels: FxHashMap::default(),
            groups: FxHashMap::default(),
            accesses: 0,
            written: vec![(NONE, 0); most as usize],
            members: vec![NONE; plans.len()],
            step: 0,
        };
        for step in 0..index.steps.len() as u32 {
            pass.step = step;
            let link = index.check_step(&mut pass)?;
            index.steps[step as usize].link = link;
        }
        Ok(index)
    }

    /// How many places all ranks have.
    pub fn nplaces(&self) -> usize {
        self.buffers.last().map_or(0, |buffers| buffers.end as usize)
    }

    /// The place of a chunk of `Input` or `Output`.
    pub fn user_place(&self, rank: usize, buffer: Buffer, chunk: u32) -> u32 {
        self.buffers[rank].place(buffer) + chunk
    }

    /// The chunks of a list, in order.
    pub fn chunks<'s>(&self, rank: usize, spans: &'s [Span]) -> impl Iterator<Item = Chunk> + 's {
        let buffers = self.buffers[rank];
        let (per_block, vectored) = (self.per_block, self.vectored);
        let (collective, nranks, me) = (self.shape.collective, self.plans.len(), Rank::from_index(rank));
        let block_of = move |span: &Span, at: u32| match (vectored, span.buffer) {
            (false, _) => 0,
            (true, Buffer::Scratch | Buffer::Coded) => span.like.wrapping_add(at) / per_block,
            (true, buffer) => collective.row_block(nranks, me, buffer, ((span.start + at) / per_block) as usize) as u32,
        };
        spans.iter().flat_map(move |span| {
            let first = buffers.place(span.buffer) + span.start;
            let mut next = span.like % per_block;
            (0..span.len).map(move |at| {
                let class = next;
                next = if class + 1 == per_block { 0 } else { class + 1 };
                Chunk { place: first + at, class, block: block_of(span, at), coded: span.buffer == Buffer::Coded }
            })
        })
    }

    /// The lane of a step.
    pub fn lane(&self, step: u32) -> &LaneInfo {
        &self.lanes[self.steps[step as usize].lane as usize]
    }

    /// The rank of a step.
    pub fn rank(&self, step: u32) -> usize {
        self.lane(step).rank as usize
    }

    /// The number of a step that a rank's plan refers to.
    pub fn resolve(&self, rank: usize, at: StepRef) -> Option<u32> {
        let lane = self.lane_base[rank].checked_add(at.lane).filter(|&lane| lane < self.lane_base[rank + 1])?;
        let lane = &self.lanes[lane as usize];
        lane.first.checked_add(at.step).filter(|&step| step < lane.end)
    }

    /// A rejection that blames a step.
    pub fn reject<T>(&self, check: Check, step: u32, text: String) -> Result<T, Rejection> {
        let lane = self.lane(step);
        let (rank, at) = (Rank(lane.rank), step - lane.first);
        Err(Rejection { check, rank, lane: Some(lane.number), step: Some(at), text })
    }

    /// A step as a reader finds it: `step 0.3` of the rank.
    pub fn name(&self, step: u32) -> String {
        let lane = self.lane(step);
        format!("step {}.{}", lane.number, step - lane.first)
    }

    fn place_buffers(&mut self) -> Result<(), Rejection> {
        let mut base = 0usize;
        for (rank, plan) in self.plans.iter().enumerate() {
            let ninput = plan.chunks(Buffer::Input);
            let noutput = plan.chunks(Buffer::Output);
            let block = rank.saturating_mul(self.per_block as usize);
            let shared = plan.shape.in_place && ninput > 0 && noutput > 0;
            let (input, output, user) = match plan.shape.collective {
                _ if !shared => (0, ninput, ninput.saturating_add(noutput)),
                Collective::AllGather | Collective::Gather => (block, 0, noutput),
                Collective::ReduceScatter | Collective::Scatter => (0, block, ninput),
                _ => (0, 0, ninput),
            };
            // Only scratch that is used needs a place, so that a plan that declares too much is still verified.
            let [scratch, coded] = [Buffer::Scratch, Buffer::Coded].map(|buffer| slots_used(plan, buffer));
            let end = base.saturating_add(user).saturating_add(scratch).saturating_add(coded);
            if end > MAX_PLACES {
                return reject_plan(rank, format!("the buffers have more than {MAX_PLACES} chunks in all"));
            }
            self.buffers.push(Buffers {
                base: base as u32,
                input: (base + input) as u32,
                output: (base + output) as u32,
                output_len: noutput as u32,
                scratch: (base + user) as u32,
                coded: (base + user + scratch) as u32,
                end: end as u32,
            });
            base = end;
        }
        Ok(())
    }

    fn number_steps(&mut self) -> Result<(), Rejection> {
        let nsteps: usize = self.plans.iter().map(Plan::nsteps).sum();
        let nlanes: usize = self.plans.iter().map(|plan| plan.lanes.len()).sum();
        if nsteps >= MAX_ACCESSES || nlanes >= MAX_ACCESSES {
            return reject_plan(0, format!("the plans have more than {MAX_ACCESSES} steps or lanes in all"));
        }
        for (rank, plan) in self.plans.iter().enumerate() {
            self.lane_base.push(self.lanes.len() as u32);
            for (number, lane) in plan.lanes.iter().enumerate() {
                let first = self.steps.len() as u32;
                let index = self.lanes.len() as u32;
                self.steps.extend(lane.steps.iter().map(|step| StepInfo {
                    action: &step.action,
                    deps: &step.deps,
                    lane: index,
                    link: NONE,
                }));
                let end = self.steps.len() as u32;
                self.lanes.push(LaneInfo { rank: rank as u32, number: number as u32, first, end });
            }
        }
        self.lane_base.push(self.lanes.len() as u32);
        Ok(())
    }

    /// Checks one step; returns its link.
    fn check_step(&mut self, pass: &mut Pass<'a>) -> Result<u32, Rejection> {
        let step = pass.step;
        let rank = self.rank(step);
        let StepInfo { action, deps, .. } = self.steps[step as usize];
        for &dep in deps {
            if self.resolve(rank, dep).is_none() {
                let text = format!("depends on step {}.{}, which does not exist", dep.lane, dep.step);
                return self.reject(Check::Bounds, step, text);
            }
        }
        if let Err(text) = action.check_coded() {
            return self.reject(Check::Bounds, step, text);
        }
        match action {
            Action::Send { to, channel, src } => {
                self.check_list(pass, src, false, false)?;
                self.link(pass, rank as u32, to.0, *channel, true)
            }
            Action::Recv { from, channel, dst } => {
                self.check_list(pass, dst, true, false)?;
                self.mark(pass, dst)?;
                self.link(pass, from.0, rank as u32, *channel, false)
            }
            Action::RecvReduce { from, channel, local, dst, .. } => {
                self.check_list(pass, local, false, false)?;
                self.check_list(pass, dst, true, false)?;
                self.check_pair(pass, local, dst)?;
                self.link(pass, from.0, rank as u32, *channel, false)
            }
            Action::Copy { src, dst, .. } => {
                self.check_list(pass, src, false, false)?;
                self.check_list(pass, dst, true, false)?;
                self.check_pair(pass, src, dst)?;
                Ok(NONE)
            }
            Action::Reduce { srcs, dst, .. } => {
                if srcs.len() < 2 {
                    return self.reject(Check::Bounds, step, format!("reduces {} operands, not 2 or more", srcs.len()));
                }
                for src in srcs {
                    self.check_list(pass, src, false, false)?;
                }
                self.check_list(pass, dst, true, false)?;
                srcs.iter().try_for_each(|src| self.check_pair(pass, src, dst))?;
                Ok(NONE)
            }
            Action::Call(call) => self.check_call(pass, call),
            Action::Nop => Ok(NONE),
        }
    }

    /// Checks that the spans of a list are what [`Span`] says.
    fn check_list(&self, pass: &mut Pass, spans: &[Span], write: bool, may_be_empty: bool) -> Result<(), Rejection> {
        let rank = self.rank(pass.step);
        let plan = &self.plans[rank];
        let buffers = self.buffers[rank];
        let bad = |text: String| self.reject(Check::Bounds, pass.step, text);
        if spans.is_empty() && !may_be_empty {
            return bad("has an empty list of spans".into());
        }
        for span in spans {
            let (start, end) = (u64::from(span.start), u64::from(span.start) + u64::from(span.len));
            let name = || format!("{:?}[{start}..{end}]", span.buffer);
            if span.len == 0 {
                return bad(format!("{} is an empty span", name()));
            }
            if end > plan.chunks(span.buffer) as u64 {
                return bad(format!("{} ends after the buffer's {} chunks", name(), plan.chunks(span.buffer)));
            }
            if !span.buffer.is_own() && span.like % self.per_block != span.start % self.per_block {
                return bad(format!("{} cannot be as large as chunk {}", name(), span.like));
            }
            let first = buffers.place(Buffer::Input) + span.start;
            let in_output = first >= buffers.output && first + span.len <= buffers.output + buffers.output_len;
            if write && span.buffer == Buffer::Input && !in_output {
                return bad(format!("{} is written, but belongs to the caller's send buffer", name()));
            }
            pass.accesses = pass.accesses.saturating_add(span.len as usize);
        }
        pass.accesses = pass.accesses.saturating_add(1);
        if pass.accesses > MAX_ACCESSES {
            return bad(format!("the plans make more than {MAX_ACCESSES} accesses in all"));
        }
        Ok(())
    }

    /// Checks that two lists match in size, and that `src` overlaps `dst` exactly or not at all.
    fn check_pair(&self, pass: &mut Pass, src: &[Span], dst: &[Span]) -> Result<(), Rejection> {
        let rank = self.rank(pass.step);
        let size = |chunk: Chunk| (chunk.block, chunk.class);
        let same = self.chunks(rank, src).map(size).eq(self.chunks(rank, dst).map(size));
        if !same {
            return self.reject(Check::Bounds, pass.step, "source and destination differ in size".into());
        }
        self.mark(pass, dst)?;
        self.check_marks(pass, src, |at, written| at == written)
    }

    /// Marks the chunks of all destinations of a step as written, once each.
    fn mark(&self, pass: &mut Pass, dst: &[Span]) -> Result<(), Rejection> {
        let rank = self.rank(pass.step);
        let base = self.buffers[rank].base;
        for (at, chunk) in self.chunks(rank, dst).enumerate() {
            let mark = &mut pass.written[(chunk.place - base) as usize];
            if mark.0 == pass.step && mark.1 != at as u32 {
                return self.reject(Check::Race, pass.step, "writes one chunk twice".into());
            }
            *mark = (pass.step, at as u32);
        }
        Ok(())
    }

    fn check_marks(&self, pass: &Pass, src: &[Span], allowed: impl Fn(u32, u32) -> bool) -> Result<(), Rejection> {
        let rank = self.rank(pass.step);
        let base = self.buffers[rank].base;
        for (at, chunk) in self.chunks(rank, src).enumerate() {
            let (step, written) = pass.written[(chunk.place - base) as usize];
            if step == pass.step && !allowed(at as u32, written) {
                let text = "a destination overlaps a source, and is not exactly it".into();
                return self.reject(Check::Race, pass.step, text);
            }
        }
        Ok(())
    }

    /// The channel of a message; at most one lane sends and one receives.
    fn link(&mut self, pass: &mut Pass, from: u32, to: u32, number: Channel, sends: bool) -> Result<u32, Rejection> {
        let peer = if sends { to } else { from };
        if peer as usize >= self.plans.len() {
            return self.reject(Check::Bounds, pass.step, format!("there is no rank {peer}"));
        }
        if from == to {
            return self.reject(Check::Bounds, pass.step, "a rank cannot exchange messages with itself".into());
        }
        let next = self.channels.len() as u32;
        let channel = *pass.channels.entry((from, to, number)).or_insert(next);
        if channel == next {
            self.channels.push(ChannelInfo { sender: NONE, receiver: NONE });
        }
        let lane = self.steps[pass.step as usize].lane;
        let info = &mut self.channels[channel as usize];
        let (user, does) = if sends { (&mut info.sender, "sends to") } else { (&mut info.receiver, "receives from") };
        if *user != NONE && *user != lane {
            let text = format!("a second lane {does} rank {peer} on channel {number}");
            return self.reject(Check::Bounds, pass.step, text);
        }
        *user = lane;
        Ok(channel)
    }

    fn check_call(&mut self, pass: &mut Pass<'a>, call: &'a Call) -> Result<u32, Rejection> {
        let step = pass.step;
        let rank = self.rank(step);
        let bad = |text: String| self.reject(Check::Calls, step, text);
        for member in &call.group {
            match pass.members.get_mut(member.index()) {
                None => return bad(format!("there is no rank {member}")),
                Some(last) if *last == step => return bad(format!("rank {member} is a member twice")),
                Some(last) => *last = step,
            }
        }
        let Some(me) = call.group.iter().position(|member| member.index() == rank) else {
            return bad("the rank is not a member of its own call".into());
        };
        let has_root = call.collective.has_root();
        if (has_root && call.root >= call.group.len()) || (!has_root && call.root != 0) {
            return bad(format!("there is no root {} in a group of {}", call.root, call.group.len()));
        }
        let (me_rank, root) = (Rank::from_index(me), Rank::from_index(call.root));
        let nsrc = call.collective.input_blocks(call.group.len(), me_rank, root);
        let ndst = call.collective.output_blocks(call.group.len(), me_rank, root);
        if call.src.len() != nsrc || call.dst.len() != ndst {
            let (src, dst) = (call.src.len(), call.dst.len());
            return bad(format!("has {src} and {dst} blocks in place of {nsrc} and {ndst}"));
        }
        for spans in &call.src {
            self.check_list(pass, spans, false, true)?;
        }
        for spans in &call.dst {
            self.check_list(pass, spans, true, true)?;
        }
        self.check_call_overlap(pass, call, me)?;
        pass.accesses = pass.accesses.saturating_add(call.group.len());
        let next = self.groups.len() as u32;
        let group = *pass.groups.entry(&call.group).or_insert(next);
        if group == next {
            self.groups.push(&call.group);
        }
        Ok(group)
    }

    /// A call's buffers may overlap as NCCL's in-place convention says, and in no other way.
    fn check_call_overlap(&self, pass: &mut Pass, call: &Call, me: usize) -> Result<(), Rejection> {
        let joined = |lists: &[Spans]| lists.concat();
        let dst = joined(&call.dst);
        self.mark(pass, &dst)?;
        let chunks_before = |lists: &[Spans]| lists[..me].iter().map(|s| crate::plan::chunks_in(s) as u32).sum::<u32>();
        match call.collective {
            Collective::AllToAll => self.check_marks(pass, &joined(&call.src), |_, _| false),
            Collective::AllGather | Collective::Gather if !call.dst.is_empty() => {
                let before = chunks_before(&call.dst);
                self.check_marks(pass, &call.src[0], |at, written| written == before + at)
            }
            Collective::ReduceScatter | Collective::Scatter if !call.src.is_empty() => {
                let before = chunks_before(&call.src);
                self.check_marks(pass, &joined(&call.src), |at, written| at == before + written)
            }
            _ => self.check_marks(pass, &joined(&call.src), |at, written| at == written),
        }
    }
}

impl Buffers {
    fn place(&self, buffer: Buffer) -> u32 {
        match buffer {
            Buffer::Input => self.input,
            Buffer::Output => self.output,
            Buffer::Scratch => self.scratch,
            Buffer::Coded => self.coded,
        }
    }
}

fn reject_plan<T>(rank: usize, text: String) -> Result<T, Rejection> {
    Err(Rejection { check: Check::Bounds, rank: Rank(rank as u32), lane: None, step: None, text })
}

/// The shape and chunks per block that all plans are for.
fn agree(plans: &[Plan]) -> Result<(&Shape, u32), Rejection> {
    let Some(first) = plans.first() else {
        return reject_plan(0, "there are no plans".into());
    };
    let shape = &first.shape;
    if shape.nranks() != plans.len() {
        return reject_plan(0, format!("there are {} plans for {} ranks", plans.len(), shape.nranks()));
    }
    if shape.root.index() >= plans.len() || (!shape.collective.has_root() && shape.root != Rank(0)) {
        return reject_plan(0, format!("there is no root {}", shape.root));
    }
    if first.chunks_per_block == 0 {
        return reject_plan(0, "a block has no chunks".into());
    }
    for (rank, plan) in plans.iter().enumerate() {
        if plan.rank.index() != rank {
            return reject_plan(rank, format!("the plan is rank {}'s", plan.rank));
        }
        if !same_but_in_place(&plan.shape, shape) {
            return reject_plan(rank, "the plan is for another shape than rank 0's".into());
        }
        if plan.chunks_per_block != first.chunks_per_block {
            let (mine, zero) = (plan.chunks_per_block, first.chunks_per_block);
            return reject_plan(rank, format!("a block has {mine} chunks, and {zero} on rank 0"));
        }
    }
    Ok((shape, first.chunks_per_block))
}

/// Whether two shapes agree in all that ranks must agree in: whether it calls in place is each rank's own affair.
fn same_but_in_place(a: &Shape, b: &Shape) -> bool {
    let Shape { collective, grid, root, in_place: _, prologue, contract } = a;
    (*collective, *root, *prologue) == (b.collective, b.root, b.prologue)
        && *contract == b.contract
        && (Arc::ptr_eq(grid, &b.grid) || *grid == b.grid)
}

/// One past the last slot of one kind of scratch that a plan uses and may use.
fn slots_used(plan: &Plan, buffer: Buffer) -> usize {
    let steps = plan.lanes.iter().flat_map(|lane| &lane.steps);
    let lists = steps.map(|step| step.action.lists()).flat_map(|(reads, writes)| reads.iter().chain(writes));
    let ends = lists.flatten().filter(|span| span.buffer == buffer);
    let most = ends.map(|span| (span.start as usize).saturating_add(span.len as usize)).max();
    most.unwrap_or(0).min(plan.chunks(buffer))
}
