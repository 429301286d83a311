//! What happens before what, and whether two accesses to one place are ordered.
//!
//! A step is before another if lane order, completed dependencies and delivered messages say so. That a `Send` was issued
//! orders nothing after the end of its reading: that is ordered only by a dependency on the send, or by the receiver's
//! having received. That a send has completed does not say that its message was received, nor does a full channel.
//!
//! The run executes steps in one order that agrees with "before". When a step touches a place that earlier steps have
//! touched, each of them must be found among its causes: in its own lane or its dependencies, else among the origins of
//! its data ([`Origins`]), else by a search back through all that must have happened.
#![forbid(unsafe_code)]

use super::index::{Chunk, Index, NONE};
use super::origins::Origins;
use crate::plan::{Action, Collective, Spans};
use smallvec::SmallVec;
use std::collections::VecDeque;

/// How many steps all searches together may look at; a bound on time.
const MAX_VISITS: u64 = 1 << 33;

/// An access that a later one has to be ordered after.
#[derive(Debug, Clone, Copy)]
struct Access {
    step: u32,
    class: u32,
    block: u32,
    next: u32,
}

/// What has bytes where an order is needed: of one or two blocks the chunks of a position and of all lower ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Filled([(u32, u32); 2]);

impl Filled {
    /// The lowest chunks of all blocks, where these are of one size.
    pub const LOWEST: Filled = Filled([(0, 0); 2]);
    /// No chunk need have any.
    pub const NOTHING: Filled = Filled([(NONE, 0); 2]);

    /// Where two accesses to one place touch anything, both chunks have bytes.
    fn by(access: &Access, chunk: &Chunk) -> Filled {
        if access.block == chunk.block {
            return Filled([(chunk.block, access.class.max(chunk.class)); 2]);
        }
        let (one, other) = ((access.block, access.class), (chunk.block, chunk.class));
        Filled([one.min(other), one.max(other)])
    }

    /// Whether a chunk of this block and position has bytes, too.
    fn fills(&self, block: u32, class: u32) -> bool {
        self.0.iter().any(|filled| filled.0 == block && class <= filled.1)
    }

    /// The position, where all blocks are of one size.
    fn class(&self) -> u32 {
        self.0[0].1
    }
}

/// How many steps that are before another are asked for the origins of their data, before a search.
const ORIGINS: usize = 4;

/// Up to this many steps, unit tests demand that a search confirms what the origins of data tell.
const SEARCHED_TOO: usize = 100_000;

/// The accesses of one place. Reads are apart, since another read has nothing to do with them: what a rank sends to all
/// others it reads as often.
#[derive(Debug, Clone, Copy)]
struct Place {
    reads: u32,
    writes: u32,
}

/// What the run has done so far, as far as order is concerned.
#[derive(Debug)]
pub(super) struct AccessOrder {
    /// When each step was executed, or 0.
    executed: Vec<u32>,
    now: u32,
    /// For a send its receive, for a receive its send, for a call its instance.
    partner: Vec<u32>,
    /// For a send the lowest position in a block among its chunks: with fewer elements it carries nothing.
    class: Vec<u32>,
    /// The same for each block of which it has chunks, where blocks differ in size.
    carried: Vec<SmallVec<[(u32, u32); 2]>>,
    /// The steps of each call, in member order.
    instances: Vec<Vec<u32>>,
    /// The latest accesses of each place that later ones must be ordered after: heads of lists in `accesses`.
    places: Vec<Place>,
    accesses: Vec<Access>,
    free: u32,
    origins: Origins,
    /// Conflicts of the step at hand, kept to be reused.
    conflicts: Vec<(u32, bool, Filled)>,
    search: Search,
    /// Sends, and steps that write what they may still be reading, where these are asked for and no fault.
    pub early: Option<Vec<(u32, u32)>>,
}

/// The state of one search, kept to be reused.
#[derive(Debug, Default)]
struct Search {
    round: u32,
    /// For each lane the round of its entry, and how many of its steps are known to be before.
    reached: Vec<(u32, u32)>,
    local: Vec<(u32, u32, u32)>,
    /// Taken from the back. What steps of the goal's rank lead to waits at the front: the newest of them is followed to
    /// its origin before the next.
    remote: VecDeque<(u32, u32, u32)>,
    at_home: bool,
    visits: u64,
    /// The dependencies of the step at hand, in order.
    deps: Vec<u32>,
}

/// What one search looks for: that `step` has completed, told by messages that carry bytes when `filled` does.
#[derive(Debug, Clone, Copy)]
struct Goal {
    step: u32,
    filled: Filled,
    since: u32,
    home: u32,
    /// The lane and position that show it when they are reached.
    lane: u32,
    position: u32,
}

impl AccessOrder {
    /// Nothing has happened yet.
    pub fn new(index: &Index) -> AccessOrder {
        AccessOrder {
            executed: vec![0; index.steps.len()],
            now: 0,
            partner: vec![NONE; index.steps.len()],
            class: vec![NONE; index.steps.len()],
            carried: vec![SmallVec::new(); if index.vectored { index.steps.len() } else { 0 }],
            instances: Vec::new(),
            places: vec![Place { reads: NONE, writes: NONE }; index.nplaces()],
            accesses: Vec::new(),
            free: NONE,
            origins: Origins::new(index.steps.len()),
            conflicts: Vec::new(),
            early: None,
            search: Search { reached: vec![(0, 0); index.lanes.len()], ..Search::default() },
        }
    }

    /// Notes that a step has been executed.
    pub fn execute(&mut self, step: u32) {
        self.now += 1;
        self.executed[step as usize] = self.now;
    }

    /// Notes what a send carries.
    pub fn sent(&mut self, index: &Index, send: u32, chunks: &[Chunk]) {
        self.class[send as usize] = chunks.iter().map(|chunk| chunk.class).min().unwrap_or(NONE);
        if index.vectored {
            let mut carried: SmallVec<[(u32, u32); 2]> =
                chunks.iter().map(|chunk| (chunk.block, chunk.class)).collect();
            carried.sort_unstable();
            carried.dedup_by_key(|chunk| chunk.0);
            self.carried[send as usize] = carried;
        }
    }

    /// Whether a send's message has bytes whenever those of the goal have.
    fn has_bytes(&self, send: u32, goal: &Goal) -> bool {
        match self.carried.get(send as usize) {
            None => self.class[send as usize] <= goal.filled.class(),
            Some(carried) => carried.iter().any(|&(block, class)| goal.filled.fills(block, class)),
        }
    }

    /// Notes which send's message a receive takes.
    pub fn received(&mut self, send: u32, receive: u32) {
        self.partner[send as usize] = receive;
        self.partner[receive as usize] = send;
        self.origins.link(receive, send, self.class[send as usize]);
    }

    /// Notes that a step, which is no receive, has read what `writer` wrote, a chunk of position `class`.
    pub fn read(&mut self, step: u32, writer: u32, class: u32) {
        self.origins.link(step, writer, class);
    }

    /// Notes the steps that make up a call, in member order.
    pub fn called(&mut self, steps: &[u32]) {
        for &step in steps {
            self.partner[step as usize] = self.instances.len() as u32;
        }
        self.instances.push(steps.to_vec());
    }

    /// Records what `step` reads and writes; says which earlier step it races with, if any.
    pub fn access(&mut self, index: &Index, step: u32, reads: &[Chunk], writes: &[Chunk]) -> Result<(), u32> {
        // What a receive writes has arrived, so it is ordered after whatever was before the sending.
        let info = &index.steps[step as usize];
        let receives = matches!(info.action, Action::Recv { .. } | Action::RecvReduce { .. });
        let mut conflicts = std::mem::take(&mut self.conflicts);
        conflicts.clear();
        let mut collect = |mut at: u32, chunk: &Chunk, arrives: bool| {
            while let Some(&access) = self.accesses.get(at as usize) {
                at = access.next;
                let earlier = &index.steps[access.step as usize];
                let apart = earlier.lane != info.lane || matches!(earlier.action, Action::Send { .. });
                if access.step != step && apart {
                    conflicts.push((access.step, arrives, Filled::by(&access, chunk)));
                }
            }
        };
        for chunk in reads {
            collect(self.places[chunk.place as usize].writes, chunk, false);
        }
        for chunk in writes {
            let Place { reads, writes } = self.places[chunk.place as usize];
            collect(reads, chunk, receives);
            collect(writes, chunk, receives);
        }
        // Of several conflicts with one step the one with the lowest class decides: fewer messages carry bytes then.
        conflicts.sort_unstable();
        match index.vectored {
            true => conflicts.dedup(),
            false => conflicts.dedup_by_key(|conflict| (conflict.0, conflict.1)),
        }
        // A step may wait for as many others as it conflicts with.
        self.search.mark_deps(index, step, conflicts.len());
        let mut early = self.early.take();
        let unordered = conflicts.iter().find(|&&(before, arrived, filled)| {
            if self.search.is_marked(before) || self.is_before(index, before, (step, arrived), filled) {
                return false;
            }
            match &mut early {
                Some(early) if matches!(index.steps[before as usize].action, Action::Send { .. }) => {
                    early.push((before, step));
                    false
                }
                _ => true,
            }
        });
        let unordered = unordered.map(|conflict| conflict.0);
        self.early = early;
        self.conflicts = conflicts;
        if let Some(before) = unordered {
            return Err(before);
        }
        reads.iter().for_each(|chunk| self.note(step, chunk, false));
        writes.iter().for_each(|chunk| self.note(step, chunk, true));
        Ok(())
    }

    fn note(&mut self, step: u32, chunk: &Chunk, write: bool) {
        let mut place = self.places[chunk.place as usize];
        if write {
            place.reads = self.forget(place.reads, chunk);
            place.writes = self.forget(place.writes, chunk);
        } else if self.accesses.get(place.reads as usize).is_some_and(|access| access.step == step) {
            return;
        }
        let head = if write { &mut place.writes } else { &mut place.reads };
        let access = Access { step, class: chunk.class, block: chunk.block, next: *head };
        *head = if self.free == NONE {
            self.accesses.push(access);
            self.accesses.len() as u32 - 1
        } else {
            let slot = self.free;
            self.free = self.accesses[slot as usize].next;
            self.accesses[slot as usize] = access;
            slot
        };
        self.places[chunk.place as usize] = place;
    }

    /// Drops the accesses that a write of a chunk supersedes: whoever is ordered after it is ordered after them. Not
    /// those of a lower position or another block: they touch the place even when the write is empty.
    fn forget(&mut self, mut at: u32, chunk: &Chunk) -> u32 {
        let mut kept = NONE;
        while let Some(&access) = self.accesses.get(at as usize) {
            let goes = access.block == chunk.block && access.class >= chunk.class;
            let list = if goes { &mut self.free } else { &mut kept };
            self.accesses[at as usize].next = *list;
            *list = at;
            at = access.next;
        }
        kept
    }

    /// Whether `before` has completed whenever `after` is issued (or, if the flag is set, its message has arrived), in all
    /// calls in which what is `filled` has bytes.
    pub fn is_before(&mut self, index: &Index, before: u32, after: (u32, bool), filled: Filled) -> bool {
        let is_send = matches!(index.steps[before as usize].action, Action::Send { .. });
        // Of a send, what shows its completion is the receive; of all others, that the lane has got past it.
        let shown_by = if is_send { self.partner[before as usize] } else { before };
        let (lane, position) = if shown_by == NONE {
            (NONE, 0)
        } else {
            let lane = index.steps[shown_by as usize].lane;
            (lane, shown_by - index.lanes[lane as usize].first)
        };
        let since = self.executed[before as usize];
        let goal = Goal { step: before, filled, since, home: index.lane(before).rank, lane, position };
        // The origins of data know positions, and no blocks.
        let told = shown_by != NONE && !index.vectored && self.is_origin(index, &goal, shown_by, after);
        if told && !(cfg!(test) && index.steps.len() < SEARCHED_TOO) {
            return true;
        }
        self.search.round += 1;
        self.search.local.clear();
        self.search.remote.clear();
        let found = self.find(index, &goal, after);
        debug_assert!(found || !told, "step {after:?} has data of step {before} and is not after it");
        found
    }

    /// Whether data that arrives with a step, or that steps before it have, came by `shown_by` or a later step of its lane.
    fn is_origin(&self, index: &Index, goal: &Goal, shown_by: u32, (after, arrived): (u32, bool)) -> bool {
        let info = &index.steps[after as usize];
        let rank = index.rank(after);
        let previous = (after > index.lane(after).first).then(|| after - 1);
        let deps = info.deps.iter().filter_map(|&dep| index.resolve(rank, dep));
        let starts = arrived.then_some(after).into_iter().chain(previous).chain(deps);
        let since = self.executed[shown_by as usize];
        let is_later = |step: u32| self.executed[step as usize] >= since;
        starts.take(ORIGINS).any(|start| {
            let origin = self.origins.farthest(start, goal.filled.class(), is_later);
            index.steps[origin as usize].lane == goal.lane && origin >= shown_by
        })
    }

    fn find(&mut self, index: &Index, goal: &Goal, (after, arrived): (u32, bool)) -> bool {
        let lane = index.steps[after as usize].lane;
        let position = after - index.lanes[lane as usize].first;
        self.search.at_home = true;
        if self.see_deps(index, goal, after) || self.search.reach(index, goal, lane, position) {
            return true;
        }
        if arrived && self.expand(index, goal, after) {
            return true;
        }
        // In turns a step of the same rank, since most orders are local, and one of another rank.
        while self.search.visits < MAX_VISITS {
            let Search { local, remote, visits, .. } = &mut self.search;
            let next = if *visits % 2 == 0 { local.pop() } else { remote.pop_back() };
            let Some((lane, from, to)) = next.or_else(|| local.pop()).or_else(|| remote.pop_back()) else { break };
            let first = index.lanes[lane as usize].first;
            let step = first + to - 1;
            if self.executed[step as usize] <= goal.since {
                continue;
            }
            self.search.at_home = index.lanes[lane as usize].rank == goal.home;
            if to - 1 > from {
                self.search.push(index, goal, (lane, from, to - 1));
            }
            self.search.visits += 1;
            if self.expand(index, goal, step) {
                return true;
            }
        }
        false
    }

    /// Whether the searches were cut short: an order that was not found may exist.
    pub fn is_exhausted(&self) -> bool {
        self.search.visits >= MAX_VISITS
    }

    /// Follows what must have happened before `step` was issued, beside its lane.
    fn see_deps(&mut self, index: &Index, goal: &Goal, step: u32) -> bool {
        let rank = index.rank(step);
        for &dep in index.steps[step as usize].deps {
            let Some(dep) = index.resolve(rank, dep) else { continue };
            let lane = index.steps[dep as usize].lane;
            if dep == goal.step || self.search.reach(index, goal, lane, dep - index.lanes[lane as usize].first + 1) {
                return true;
            }
        }
        false
    }

    /// Follows what must have happened before `step` completed (for a send: was issued), beside its lane.
    fn expand(&mut self, index: &Index, goal: &Goal, step: u32) -> bool {
        match index.steps[step as usize].action {
            Action::Recv { .. } | Action::RecvReduce { .. } => {
                let send = self.partner[step as usize];
                if send != NONE && self.has_bytes(send, goal) {
                    let lane = index.steps[send as usize].lane;
                    let position = send - index.lanes[lane as usize].first + 1;
                    if send == goal.step || self.search.reach(index, goal, lane, position) {
                        return true;
                    }
                }
            }
            Action::Call(call) => {
                let instance = self.partner[step as usize] as usize;
                let me = call.group.iter().position(|member| member.index() == index.rank(step));
                for member in 0..self.instances.get(instance).map_or(0, Vec::len) {
                    let other = self.instances[instance][member];
                    if other == step || !flows(index, &self.instances[instance], (member, me), goal) {
                        continue;
                    }
                    let lane = index.steps[other as usize].lane;
                    let position = other - index.lanes[lane as usize].first;
                    if self.see_deps(index, goal, other) || self.search.reach(index, goal, lane, position) {
                        return true;
                    }
                }
            }
            _ => {}
        }
        self.see_deps(index, goal, step)
    }
}

impl Search {
    /// Notes the dependencies of a step, if there is something to ask about them.
    fn mark_deps(&mut self, index: &Index, step: u32, questions: usize) {
        self.deps.clear();
        if questions > 0 {
            let rank = index.rank(step);
            let deps = index.steps[step as usize].deps.iter();
            self.deps.extend(deps.filter_map(|&dep| index.resolve(rank, dep)));
            self.deps.sort_unstable();
        }
    }

    fn is_marked(&self, step: u32) -> bool {
        self.deps.binary_search(&step).is_ok()
    }

    /// Notes that the first `count` steps of a lane are before; says whether that shows the goal.
    fn reach(&mut self, index: &Index, goal: &Goal, lane: u32, count: u32) -> bool {
        if lane == goal.lane && count > goal.position {
            return true;
        }
        let entry = &mut self.reached[lane as usize];
        let from = if entry.0 == self.round { entry.1 } else { 0 };
        if count > from {
            *entry = (self.round, count);
            self.push(index, goal, (lane, from, count));
        }
        false
    }

    fn push(&mut self, index: &Index, goal: &Goal, range: (u32, u32, u32)) {
        if index.lanes[range.0 as usize].rank == goal.home {
            self.local.push(range);
        } else if self.at_home {
            self.remote.push_front(range);
        } else {
            self.remote.push_back(range);
        }
    }
}

/// Whether data that has bytes whenever those of the goal have goes from one member of a call to another. Only data orders: a
/// provider may let a member go that waits for nothing.
fn flows(index: &Index, steps: &[u32], (from, to): (usize, Option<usize>), goal: &Goal) -> bool {
    let call_of = |member: usize| match index.steps[steps[member] as usize].action {
        Action::Call(call) => Some(call),
        _ => None,
    };
    let (Some(to), Some(source)) = (to, call_of(from)) else { return false };
    let Some(target) = call_of(to) else { return false };
    let has_bytes = |blocks: &[Spans], block: usize, member: usize| {
        let spans = blocks.get(block).map_or(&[][..], Vec::as_slice);
        let rank = index.rank(steps[member]);
        index.chunks(rank, spans).any(|chunk| goal.filled.fills(chunk.block, chunk.class))
    };
    match source.collective {
        Collective::AllReduce | Collective::AllGather => has_bytes(&source.src, 0, from),
        Collective::Broadcast if from == source.root => has_bytes(&source.src, 0, from),
        Collective::Reduce | Collective::Gather if to == source.root => has_bytes(&source.src, 0, from),
        Collective::AllToAll => has_bytes(&source.src, to, from),
        Collective::ReduceScatter => has_bytes(&target.dst, 0, to),
        Collective::Scatter if from == source.root => has_bytes(&target.dst, 0, to),
        _ => false,
    }
}
