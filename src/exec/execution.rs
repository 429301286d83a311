//! One run of a program.
//!
//! Each lane has a place (segment, step). A lane that can go on is in `ready`; one that cannot is found again through
//! what it waits for: the token of its operation, the last of its dependencies, the end of an older segment, or, for a
//! full channel, the next poll. So a poll costs what it moves.
#![forbid(unsafe_code)]

use super::lists::Lists;
use super::program::{Program, StepCode, StepKind};
use super::{Op, Started, Token, World};
use crate::error::{Error, Result};
use crate::plan::layout::{Layout, Piece};
use crate::plan::Collective;
use std::sync::Arc;

/// What a poll achieved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All steps of all segments have completed.
    Done,
    /// Something started or completed; poll again.
    Moved,
    /// Nothing to do until the world reports something.
    Idle,
}

/// What a run has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Messages sent.
    pub messages: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// The longest chain of receives on this rank in one segment, each waiting for the one before.
    pub rounds: usize,
}

/// One run of one program. Reusable: a second run of the same program and sizes allocates nothing.
#[derive(Debug, Default)]
pub struct Execution {
    pub(super) run: Option<PlanRun>,
    pub(super) state: RunState,
    resolved: Resolved,
    limit_ns: u64,
    /// When the first of the polls that found nothing to do was, if the last one did not.
    idle_since: Option<u64>,
    ended: Option<Result<()>>,
}

/// What is being run.
#[derive(Debug)]
pub(super) struct PlanRun {
    pub(super) program: Arc<Program>,
    pub(super) layout: Layout,
}

/// The lists of the steps, and memory to hand them to the world.
#[derive(Debug, Default)]
struct Resolved {
    lists: Lists,
    /// Whether `lists` holds all lists of the program for the layout of the run, which has one segment.
    whole: bool,
    /// Kept for its allocation; empty between steps.
    refs: Vec<&'static [Piece]>,
    /// Where coded chunks lie in the row of blocks.
    rows: Vec<usize>,
}

/// Why a lane stands where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// It is in `ready`.
    Nothing,
    /// Its step is running.
    Operation,
    /// Its channel was full; it is in `full`.
    Channel,
    /// Other steps must complete first.
    Dependency,
    /// An older segment must complete first.
    Segment,
    /// It has gone through all segments.
    End,
}

/// Where a lane is.
#[derive(Debug, Clone, Copy)]
pub(super) struct LanePosition {
    pub(super) segment: u32,
    pub(super) slot: u32,
    /// Index in [`Program::steps`].
    pub(super) step: u32,
    pub(super) wait: Wait,
}

/// A segment in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentSlot {
    /// Its number.
    segment: u32,
    /// Steps that have not completed.
    left: u32,
}

/// Places and counters of a run. What belongs to a step is indexed by `slot * steps + step`.
#[derive(Debug, Default)]
pub(super) struct RunState {
    pub(super) segments: u32,
    pub(super) places: Vec<LanePosition>,
    pub(super) slots: Vec<SegmentSlot>,
    /// Dependencies that have not completed. Set to the full number when the step starts, for the slot's next segment.
    missing: Vec<u32>,
    /// Whether the world has the step and has not reported its end.
    pub(super) pending: Vec<bool>,
    npending: usize,
    segments_left: u32,
    /// How many leading segments have completed, as the world knows.
    front: u32,
    /// How many may begin.
    admitted: u32,
    ready: Vec<u32>,
    full: Vec<u32>,
    done: Vec<Token>,
    moves: u64,
    messages: u64,
    bytes_sent: u64,
}

impl Execution {
    /// An execution of nothing: it is done.
    pub fn new() -> Execution {
        Execution::default()
    }

    /// Starts over with a program, forgetting whatever ran before. At most `window` segments are in flight, which
    /// needs `window` times the layout's scratch. `limit_ns` is how long, by the world's time, the run may go without
    /// any progress before it ends in [`Error::Timeout`]; 0 is for ever.
    pub fn begin(&mut self, program: Arc<Program>, layout: Layout, window: usize, limit_ns: u64) {
        let again = self.run.as_ref().is_some_and(|run| Arc::ptr_eq(&run.program, &program));
        let same = again && self.run.as_ref().is_some_and(|run| run.layout == layout);
        let clean = again && matches!(self.ended, Some(Ok(())));
        self.state.begin(&program, layout.segments(), window, clean);
        if layout.segments() > 1 {
            self.resolved.whole = false;
        } else if !(same && self.resolved.whole) {
            self.resolved.lists.resolve(&program, &layout, (0, 0), 0..program.nlists());
            self.resolved.whole = true;
        }
        self.limit_ns = limit_ns;
        self.idle_since = None;
        self.ended = None;
        if !again {
            self.run = Some(PlanRun { program, layout });
        } else if let Some(run) = &mut self.run {
            run.layout = layout;
        }
    }

    /// Does what can be done now. After an error (the world's, or a time-out) every poll returns that error; the owner
    /// of the world sees to it that operations still pending there are cancelled.
    pub fn poll<W: World + ?Sized>(&mut self, world: &mut W) -> Result<Progress> {
        if let Some(ended) = &self.ended {
            return ended.clone().map(|()| Progress::Done);
        }
        let Some(run) = &self.run else { return Ok(Progress::Done) };
        let mut outcome = self.state.advance(run, &mut self.resolved, world);
        match outcome {
            Ok(Progress::Moved) => self.idle_since = None,
            Ok(Progress::Idle) => outcome = self.check_time(world.now_ns()).map(|()| Progress::Idle),
            Ok(Progress::Done) | Err(_) => {}
        }
        match &outcome {
            Ok(Progress::Done) => self.ended = Some(Ok(())),
            Ok(_) => {}
            Err(error) => self.ended = Some(Err(error.clone())),
        }
        outcome
    }

    /// How many leading segments have been begun, in part or whole.
    pub fn entered(&self) -> usize {
        let begun = |place: &LanePosition| if place.wait == Wait::End { place.segment } else { place.segment + 1 };
        self.state.places.iter().map(begun).max().unwrap_or(0) as usize
    }

    /// Lets so many leading segments of the run begin, and no others until it is told of more; the first one at least. All may where this is
    /// not called.
    pub fn admit(&mut self, segments: usize) {
        let state = &mut self.state;
        state.admitted = u32::try_from(segments).unwrap_or(u32::MAX).max(1);
        for (lane, place) in (0u32..).zip(&mut state.places) {
            let is_on = state.slots.get(place.slot as usize).is_some_and(|slot| slot.segment == place.segment);
            if place.wait == Wait::Segment && is_on && place.segment < state.admitted {
                place.wait = Wait::Nothing;
                state.ready.push(lane);
            }
        }
    }

    /// What the run has done so far.
    pub fn stats(&self) -> Stats {
        let rounds = self.run.as_ref().map_or(0, |run| run.program.rounds());
        Stats { messages: self.state.messages, bytes_sent: self.state.bytes_sent, rounds }
    }

    /// An error for a run that waits for nothing, or that has got no further for too long.
    fn check_time(&mut self, now_ns: u64) -> Result<()> {
        if self.state.npending == 0 && self.state.full.is_empty() {
            if self.state.places.iter().any(|place| place.wait == Wait::Segment && place.segment >= self.state.admitted)
            {
                return Ok(());
            }
            return Err(Error::Internal(format!("nothing is left to wait for; {}", self.describe())));
        }
        let since = *self.idle_since.get_or_insert(now_ns);
        match self.limit_ns > 0 && now_ns.saturating_sub(since) >= self.limit_ns {
            true => Err(self.time_out(self.limit_ns)),
            false => Ok(()),
        }
    }
}

impl RunState {
    /// `clean` says that the last run was of the same program and came to its end, so that counters are as they
    /// must be at the start.
    fn begin(&mut self, program: &Program, segments: usize, window: usize, clean: bool) {
        let nsteps = program.steps.len();
        let nslots = window.clamp(1, segments);
        if !(clean && self.slots.len() == nslots) {
            self.missing.clear();
            self.missing.extend((0..nslots).flat_map(|_| program.steps.iter().map(|step| step.ndeps)));
            self.pending.clear();
            self.pending.resize(nslots * nsteps, false);
        }
        self.slots.clear();
        self.slots.extend((0..nslots as u32).map(|segment| SegmentSlot { segment, left: nsteps as u32 }));
        self.places.clear();
        self.places.extend(program.lanes.iter().map(|lane| LanePosition {
            segment: 0,
            slot: 0,
            step: lane.start,
            wait: Wait::Nothing,
        }));
        self.segments = segments as u32;
        self.segments_left = if nsteps == 0 { 0 } else { segments as u32 };
        self.front = 0;
        self.admitted = u32::MAX;
        self.ready.clear();
        self.ready.extend(0..program.lanes.len() as u32);
        self.full.clear();
        self.done.clear();
        self.npending = 0;
        self.messages = 0;
        self.bytes_sent = 0;
    }

    /// Takes in what the world has finished, and lets every ready lane run as far as it can.
    fn advance<W: World + ?Sized>(
        &mut self,
        run: &PlanRun,
        resolved: &mut Resolved,
        world: &mut W,
    ) -> Result<Progress> {
        let moves = self.moves;
        if self.npending > 0 || !self.full.is_empty() {
            self.collect(&run.program, world)?;
        }
        let mut index = 0;
        while let Some(&lane) = self.ready.get(index) {
            index += 1;
            self.run_lane(run, resolved, lane, world)?;
        }
        self.ready.clear();
        self.tell_front(world);
        Ok(match (self.segments_left, self.moves == moves) {
            (0, _) => Progress::Done,
            (_, true) => Progress::Idle,
            (_, false) => Progress::Moved,
        })
    }

    /// Tells the world of leading segments that have completed.
    fn tell_front<W: World + ?Sized>(&mut self, world: &mut W) {
        let nslots = self.slots.len() as u32;
        let mut front = self.front;
        // A slot goes on to its next segment when one has completed.
        while front < self.segments
            && (self.segments_left == 0 || self.slots[(front % nslots) as usize].segment > front)
        {
            front += 1;
        }
        if front > self.front {
            self.front = front;
            world.front(front as usize);
        }
    }

    /// Takes in what the world has finished, and makes lanes ready whose channel was full.
    fn collect<W: World + ?Sized>(&mut self, program: &Program, world: &mut W) -> Result<()> {
        world.poll(&mut self.done)?;
        for lane in self.full.drain(..) {
            self.ready.push(lane);
        }
        let mut index = 0;
        while let Some(&token) = self.done.get(index) {
            index += 1;
            let (slot, step) = from_token(token);
            let at = slot as usize * program.steps.len() + step as usize;
            if slot as usize >= self.slots.len() || step as usize >= program.steps.len() || !self.pending[at] {
                return Err(Error::Internal(format!("the world finished token {token:#x}, which is not pending")));
            }
            self.pending[at] = false;
            self.npending -= 1;
            self.complete(program, slot, step);
            let place = &mut self.places[program.steps[step as usize].lane as usize];
            if (place.wait, place.slot, place.step) == (Wait::Operation, slot, step) {
                place.step += 1;
                place.wait = Wait::Nothing;
                self.ready.push(program.steps[step as usize].lane);
            }
        }
        self.done.clear();
        Ok(())
    }

    fn run_lane<W: World + ?Sized>(
        &mut self,
        run: &PlanRun,
        resolved: &mut Resolved,
        lane: u32,
        world: &mut W,
    ) -> Result<()> {
        let program = &*run.program;
        let steps = program.lanes[lane as usize].clone();
        let mut place = self.places[lane as usize];
        place.wait = loop {
            if place.step == steps.end {
                place.segment += 1;
                if place.segment == self.segments {
                    break Wait::End;
                }
                place.step = steps.start;
                place.slot = if place.slot as usize + 1 == self.slots.len() { 0 } else { place.slot + 1 };
            }
            if self.slots[place.slot as usize].segment != place.segment || place.segment >= self.admitted {
                break Wait::Segment;
            }
            let code = &program.steps[place.step as usize];
            let at = place.slot as usize * program.steps.len() + place.step as usize;
            if self.missing[at] > 0 {
                break Wait::Dependency;
            }
            // Completing a step wakes the lanes that wait; this one is on its way and must not be among them.
            self.places[lane as usize] = LanePosition { wait: Wait::Nothing, ..place };
            let started = self.start(run, resolved, code, place, world);
            if started.is_err() {
                // The peer of a step that fails is among those whom the run waits for.
                self.places[lane as usize].wait = Wait::Channel;
            }
            match started? {
                Started::Busy => {
                    self.full.push(lane);
                    break Wait::Channel;
                }
                Started::Done => {
                    self.missing[at] = code.ndeps;
                    self.moves += 1;
                    self.complete(program, place.slot, place.step);
                }
                Started::Pending => {
                    self.missing[at] = code.ndeps;
                    self.moves += 1;
                    self.pending[at] = true;
                    self.npending += 1;
                    // Nothing of this lane waits for a message on its way, nor for a call that is its last step: the calls
                    // of further segments may begin beside it.
                    let is_last = place.step + 1 == steps.end;
                    if !(matches!(code.kind, StepKind::Send { .. })
                        || matches!(code.kind, StepKind::Call { .. }) && is_last)
                    {
                        break Wait::Operation;
                    }
                }
            }
            place.step += 1;
        };
        self.places[lane as usize] = place;
        Ok(())
    }

    /// Gives a step to the world.
    fn start<W: World + ?Sized>(
        &mut self,
        run: &PlanRun,
        resolved: &mut Resolved,
        code: &StepCode,
        place: LanePosition,
        world: &mut W,
    ) -> Result<Started> {
        let PlanRun { program, layout } = run;
        let view = if resolved.whole {
            resolved.lists.view(code.lists.clone())
        } else {
            let at = (place.segment as usize, place.slot as usize);
            resolved.lists.resolve(program, layout, at, code.lists.clone());
            resolved.lists.view(0..code.lists.end - code.lists.start)
        };
        if view.is_empty() && moves_nothing(program, code) && !is_told(run, code, place.segment as usize) {
            return Ok(Started::Done);
        }
        let token = to_token(place.slot, place.step);
        match code.kind {
            StepKind::Send { to, channel } => {
                let src = view.list(0);
                let started = world.start(token, Op::Send { to, channel, src })?;
                if started != Started::Busy {
                    self.messages += 1;
                    self.bytes_sent += src.iter().map(|piece| piece.len as u64).sum::<u64>();
                }
                Ok(started)
            }
            StepKind::Recv { from, channel } => world.start(token, Op::Recv { from, channel, dst: view.list(0) }),
            StepKind::RecvReduce { from, channel, order, finish } => {
                let (local, dst) = (view.list(0), view.list(1));
                world.start(token, Op::RecvReduce { from, channel, local, dst, order, finish })
            }
            StepKind::Copy { start, finish } => {
                world.start(token, Op::Copy { src: view.list(0), dst: view.list(1), start, finish })
            }
            StepKind::Reduce { finish } => {
                let last = view.len() - 1;
                let mut srcs = std::mem::take(&mut resolved.refs);
                srcs.extend(view.lists(0..last));
                let started = world.start(token, Op::Reduce { srcs: &srcs, dst: view.list(last), finish });
                resolved.refs = emptied(srcs);
                started
            }
            StepKind::Encode { .. } | StepKind::Decode { .. } | StepKind::FoldCoded { .. } => {
                start_coded(run, resolved, code, place, world)
            }
            StepKind::Call { nsrc } => {
                let Some(call) = program.call(code.at) else {
                    return Err(Error::Internal(String::from("a compiled call has no call in its plan")));
                };
                let mut lists = std::mem::take(&mut resolved.refs);
                lists.extend(view.lists(0..view.len()));
                let (src, dst) = lists.split_at(nsrc as usize);
                let started = world.start(token, Op::Call { call, lane: code.at.lane, src, dst });
                resolved.refs = emptied(lists);
                started
            }
            StepKind::Nop => Ok(Started::Done),
        }
    }

    /// A step has completed: tells the steps that wait for it, and ends the segment after its last step.
    fn complete(&mut self, program: &Program, slot: u32, step: u32) {
        self.moves += 1;
        let base = slot as usize * program.steps.len();
        let waiting = program.steps[step as usize].dependents.clone();
        for &next in &program.dependents[waiting.start as usize..waiting.end as usize] {
            let missing = &mut self.missing[base + next as usize];
            *missing -= 1;
            if *missing == 0 {
                let lane = program.steps[next as usize].lane;
                let place = &mut self.places[lane as usize];
                if (place.wait, place.slot, place.step) == (Wait::Dependency, slot, next) {
                    place.wait = Wait::Nothing;
                    self.ready.push(lane);
                }
            }
        }
        let nslots = self.slots.len() as u32;
        let ending = &mut self.slots[slot as usize];
        ending.left -= 1;
        if ending.left > 0 {
            return;
        }
        self.segments_left -= 1;
        let next = ending.segment.saturating_add(nslots);
        *ending = SegmentSlot { segment: next, left: program.steps.len() as u32 };
        for (lane, place) in self.places.iter_mut().enumerate() {
            if place.wait == Wait::Segment && place.segment == next {
                place.wait = Wait::Nothing;
                self.ready.push(lane as u32);
            }
        }
    }
}

/// Gives a step to the world that codes or decodes, whose lists have been resolved.
fn start_coded<W: World + ?Sized>(
    run: &PlanRun,
    resolved: &mut Resolved,
    code: &StepCode,
    place: LanePosition,
    world: &mut W,
) -> Result<Started> {
    let PlanRun { program, layout } = run;
    let Resolved { lists, whole, refs, rows } = resolved;
    let view = lists.view(if *whole { code.lists.clone() } else { 0..code.lists.end - code.lists.start });
    let (token, last) = (to_token(place.slot, place.step), view.len() - 1);
    match code.kind {
        StepKind::Encode { code: form } => {
            layout.rows(place.segment as usize, program.list(code.lists.end - 1), rows);
            world.start(token, Op::Encode { code: form, src: view.list(0), dst: view.list(1), rows })
        }
        StepKind::FoldCoded { code: form, finish } => {
            layout.rows(place.segment as usize, program.list(code.lists.start), rows);
            let mut srcs = std::mem::take(refs);
            srcs.extend(view.lists(0..last));
            let started =
                world.start(token, Op::FoldCoded { code: form, srcs: &srcs, dst: view.list(last), rows, finish });
            *refs = emptied(srcs);
            started
        }
        StepKind::Decode { code: form, finish } => {
            world.start(token, Op::Decode { code: form, src: view.list(0), dst: view.list(1), finish })
        }
        _ => Err(Error::Internal(String::from("a step without codes is taken for one with them"))),
    }
}

/// Whether a step whose lists are all empty has no part in any message. In these collectives a member without bytes
/// means that no member has any.
fn moves_nothing(program: &Program, code: &StepCode) -> bool {
    let StepKind::Call { .. } = code.kind else { return true };
    let collective = program.call(code.at).map(|call| call.collective);
    !matches!(collective, Some(Collective::AllToAll | Collective::Gather | Collective::Scatter))
}

/// Whether a step is a message that is sent though it has no bytes. Where blocks differ in size and all ranks know all sizes, one
/// rank's list may have none where another's has some: the message tells. Where each rank knows its own, an empty block has no
/// message, as there may be thousands; a block that ends where another's would go on has its last.
fn is_told(run: &PlanRun, code: &StepCode, segment: usize) -> bool {
    let PlanRun { program, layout } = run;
    let Some(blocks) = layout.blocks() else { return false };
    let messages = matches!(code.kind, StepKind::Send { .. } | StepKind::Recv { .. } | StepKind::RecvReduce { .. });
    let mut spans = code.lists.clone().flat_map(|list| program.list(list));
    let is_told = match blocks.knows_all() {
        true => segment == 0,
        false => segment > 0 && spans.any(|span| layout.ends_in(segment, span)),
    };
    messages && is_told
}

/// The same memory for references of another lifetime: collecting the items of a vector, here none, into a vector of
/// equal layout keeps the allocation.
fn emptied(mut refs: Vec<&[Piece]>) -> Vec<&'static [Piece]> {
    refs.clear();
    refs.into_iter().map(|_| -> &'static [Piece] { &[] }).collect()
}

fn to_token(slot: u32, step: u32) -> Token {
    Token::from(slot) << 32 | Token::from(step)
}

fn from_token(token: Token) -> (u32, u32) {
    ((token >> 32) as u32, token as u32)
}
