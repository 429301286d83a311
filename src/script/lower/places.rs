//! What the chunks of one rank's buffers hold while a script runs, and where that lies.
#![forbid(unsafe_code)]

use super::emit::Emitter;
use super::Chunks;
use crate::plan::contract::{Contract, Promise};
use crate::plan::rank_sets::RankSets;
use crate::plan::{Action, Buffer, Collective, Shape, Span, Spans, StepRef};
use crate::script::{Place, Script, ScriptBuffer};
use crate::topo::Rank;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// What a chunk holds: whose contributions to which chunk of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Value {
    /// The chunk of the contributors' input.
    pub chunk: u32,
    /// The contributors, a number of [`RankSets`].
    pub set: u32,
    pub finished: bool,
}

impl Value {
    /// Nothing has been stored.
    pub const NONE: Value = Value { chunk: u32::MAX, set: 0, finished: false };

    pub fn is_none(self) -> bool {
        self.chunk == u32::MAX
    }
}

/// A chunk that is read or written: where it lies, and what it holds.
pub(super) type Held = (Span, Value);

/// A step of a script, by thread block and number, and what it has put where something else belongs.
pub(super) type Misplaced = ((u32, u32), String);

#[derive(Debug, Clone, Copy)]
struct Version {
    value: Value,
    span: Span,
    /// It lies in the caller's send buffer, and has passed no prologue.
    is_raw: bool,
    /// The copy that put it there, where it is Strata's own.
    after: Option<StepRef>,
    /// The step of the script that put it there, by thread block and number.
    by: Option<(u32, u32)>,
}

/// The chunks of one rank.
pub(super) struct Places {
    collective: Collective,
    /// The script was written for one buffer.
    one_buffer: bool,
    reduces: bool,
    /// The form has one buffer.
    in_place: bool,
    /// Input is read where the caller has it, also where that is the output.
    reads_there: bool,
    prologue: bool,
    rank: u32,
    /// The set that has this rank alone.
    mine: u32,
    per_block: u32,
    input_chunks: u32,
    output_chunks: u32,
    contract: Option<Arc<Contract>>,
    /// The step of the script that is carried out, by thread block and number.
    pub at: (u32, u32),
    versions: FxHashMap<Place, Version>,
    /// Scratch of places that are not scratch in the script.
    slots: FxHashMap<Place, u32>,
    pub next_slot: u32,
    /// The copies of a send buffer that is about to be overwritten, by chunk.
    saved: FxHashMap<u32, StepRef>,
}

impl Places {
    /// `reads_there`: input is read where the caller has it, also where that is the output.
    pub fn new(
        script: &Script,
        (shape, reads_there): (&Shape, bool),
        rank: usize,
        mine: u32,
        emitter: &mut Emitter,
    ) -> Places {
        let per_block = script.chunks_per_block();
        let me = Rank::from_index(rank);
        let collective = script.collective;
        let mut places = Places {
            collective,
            one_buffer: script.in_place,
            reduces: script.reduces(),
            in_place: shape.in_place,
            reads_there,
            prologue: shape.prologue,
            rank: rank as u32,
            mine,
            per_block,
            input_chunks: shape.input_blocks(me) as u32 * per_block,
            output_chunks: shape.output_blocks(me) as u32 * per_block,
            contract: shape.contract.clone(),
            at: (0, 0),
            versions: FxHashMap::default(),
            slots: FxHashMap::default(),
            next_slot: script.ranks[rank].scratch,
            saved: FxHashMap::default(),
        };
        if places.in_place && !places.one_buffer && !reads_there {
            for step in script.ranks[rank].blocks.iter().flat_map(|block| &block.steps) {
                let read =
                    [(step.kind.reads(), step.src), (step.kind == crate::script::ScriptStepKind::Reduce, step.dst)];
                for (_, first) in read.into_iter().filter(|(reads, _)| *reads) {
                    places.load(Chunks { first, count: step.count }, emitter);
                }
            }
        }
        places
    }

    /// Reads chunks; adds what the step that does so has to wait for.
    pub fn read(&mut self, chunks: Chunks, emitter: &mut Emitter, deps: &mut Vec<StepRef>) -> Vec<Held> {
        self.load(chunks, emitter);
        let mut held = Vec::with_capacity(chunks.count as usize);
        for place in chunks.places() {
            let place = self.canonical(place);
            let Some(version) = self.version(place) else {
                emitter.note(|| format!("reads {place}, which nothing has written"));
                held.push((self.home(place, Value::NONE), Value::NONE));
                continue;
            };
            deps.extend(version.after.filter(|step| !deps.contains(step)));
            held.push((version.span, version.value));
        }
        held
    }

    /// Writes chunks; adds what the step that does so has to wait for.
    pub fn write(&mut self, chunks: Chunks, values: &[Value], deps: &mut Vec<StepRef>) -> Vec<Span> {
        let mut spans = Vec::with_capacity(values.len());
        for (place, &value) in chunks.places().zip(values) {
            let place = self.canonical(place);
            let span = self.home(place, value);
            if span.buffer == Buffer::Output {
                let overwritten = self.input_under(span.start).and_then(|chunk| self.saved.get(&chunk));
                deps.extend(overwritten.filter(|step| !deps.contains(step)));
            }
            // What has been copied here and never read is overwritten no sooner.
            let before =
                self.versions.insert(place, Version { value, span, is_raw: false, after: None, by: Some(self.at) });
            let copied = before.filter(|before| before.span.buffer == span.buffer && before.span.start == span.start);
            deps.extend(copied.and_then(|before| before.after).filter(|step| !deps.contains(step)));
            spans.push(span);
        }
        spans
    }

    /// Scratch that nothing else uses, for these values.
    pub fn fresh(&mut self, values: &[Value]) -> Vec<Span> {
        let mut slot = || {
            self.next_slot += 1;
            self.next_slot - 1
        };
        let slots: Vec<u32> = values.iter().map(|_| slot()).collect();
        let fresh = slots.iter().zip(values);
        fresh.map(|(&slot, value)| Span::scratch(slot as usize, 1, self.like(*value, 0) as usize)).collect()
    }

    /// Copies whatever of the output lies elsewhere. Gives the first step that has put there what cannot be the output, being of
    /// another size, and what that is.
    pub fn complete_output(&mut self, emitter: &mut Emitter, sets: &RankSets, nranks: usize) -> Option<Misplaced> {
        let mut misplaced = None;
        let mut copies: Vec<(Span, Span, bool, bool, Option<StepRef>)> = Vec::new();
        for chunk in 0..self.output_chunks {
            let promise = self.contract.as_ref().map(|contract| contract.promise(self.rank as usize, chunk as usize));
            if promise == Some(Promise::Anything) {
                continue;
            }
            let place = self.place_of_output(chunk);
            let Some(Version { value, span, is_raw, after, by }) = self.version(place) else { continue };
            if !value.is_none() && self.like(value, chunk) != self.like_of_output(chunk) {
                let what =
                    format!("output chunk {chunk} ends as chunk {} of {}", value.chunk, sets.describe(value.set));
                misplaced = misplaced.or_else(|| by.map(|by| (by, what)));
                continue;
            }
            let finish = self.reduces && !value.finished && sets.len(value.set) == nranks;
            let start = is_raw && self.prologue;
            let there = span.buffer == Buffer::Output && span.start == chunk
                || self.in_place && span.buffer == Buffer::Input && self.input_under(chunk) == Some(span.start);
            if there && !finish && !start {
                continue;
            }
            copies.push((span, Span::output(chunk as usize, 1), start, finish, after));
        }
        let goes_on = |one: &(Span, Span, bool, bool, Option<StepRef>),
                       next: &(Span, Span, bool, bool, Option<StepRef>)| {
            (one.2, one.3, one.4) == (next.2, next.3, next.4)
                && continues(&one.0, &next.0)
                && continues(&one.1, &next.1)
        };
        for run in copies.chunk_by(goes_on) {
            let (_, _, start, finish, after) = run[0];
            let src = joined(run.iter().map(|copy| copy.0));
            let dst = joined(run.iter().map(|copy| copy.1));
            emitter.emit_apart(Action::Copy { src, dst, start, finish }, after.into_iter().collect());
        }
        misplaced
    }

    /// Copies input that must not be read where the caller has it, if it has not been copied yet.
    fn load(&mut self, chunks: Chunks, emitter: &mut Emitter) {
        if !self.prologue && (self.one_buffer || !self.in_place || self.reads_there) {
            return;
        }
        let mut loaded = Vec::new();
        for place in chunks.places() {
            let place = self.canonical(place);
            let Some(version) = self.version(place).filter(|version| version.is_raw) else { continue };
            let is_safe = !self.prologue && !self.is_under_output(version.span.start);
            if !is_safe {
                let span = self.home(place, version.value);
                self.versions.insert(place, Version { span, is_raw: false, ..version });
                loaded.push((place, version.span, span));
            }
        }
        if loaded.is_empty() {
            return;
        }
        let (src, dst) = (joined(loaded.iter().map(|load| load.1)), joined(loaded.iter().map(|load| load.2)));
        let step = emitter.emit_apart(Action::Copy { src, dst, start: self.prologue, finish: false }, Vec::new());
        for (place, span, _) in loaded {
            self.saved.insert(span.start, step);
            if let Some(version) = self.versions.get_mut(&place) {
                version.after = Some(step);
            }
        }
    }

    /// One name for each chunk: a script for one buffer may call it by two.
    fn canonical(&self, place: Place) -> Place {
        if !self.one_buffer || place.buffer == ScriptBuffer::Scratch {
            return place;
        }
        let within = match (self.collective, place.buffer) {
            (Collective::AllGather | Collective::Gather, ScriptBuffer::Input)
            | (Collective::ReduceScatter | Collective::Scatter, ScriptBuffer::Output) => self.rank * self.per_block,
            _ => 0,
        };
        Place { buffer: ScriptBuffer::Input, chunk: place.chunk + within }
    }

    fn place_of_output(&self, chunk: u32) -> Place {
        self.canonical(Place { buffer: ScriptBuffer::Output, chunk })
    }

    /// What a place holds, if anything.
    fn version(&self, place: Place) -> Option<Version> {
        if let Some(&version) = self.versions.get(&place) {
            return Some(version);
        }
        let within = match self.collective {
            Collective::AllGather | Collective::Gather if self.one_buffer => self.rank * self.per_block,
            _ => 0,
        };
        let chunk = place.chunk.checked_sub(within).filter(|&chunk| chunk < self.input_chunks)?;
        (place.buffer == ScriptBuffer::Input).then(|| Version {
            value: Value { chunk, set: self.mine, finished: false },
            span: Span::input(chunk as usize, 1),
            is_raw: true,
            after: None,
            by: None,
        })
    }

    /// Where a value that is written to a place goes.
    fn home(&mut self, place: Place, value: Value) -> Span {
        if let Some(chunk) = self.output_of(place) {
            if value.is_none() || self.like(value, 0) == self.like_of_output(chunk) {
                return Span::output(chunk as usize, 1);
            }
        }
        let slot = match place.buffer {
            ScriptBuffer::Scratch => place.chunk,
            _ => *self.slots.entry(place).or_insert_with(|| {
                self.next_slot += 1;
                self.next_slot - 1
            }),
        };
        Span::scratch(slot as usize, 1, self.like(value, place.chunk) as usize)
    }

    /// The chunk of all blocks whose size a value has; where there is no value, that of the chunk. In a level of a two-level
    /// algorithm the blocks of all-gather and reduce-scatter differ in size.
    fn like(&self, value: Value, chunk: u32) -> u32 {
        match self.collective {
            _ if value.is_none() => chunk % self.per_block,
            // What is gathered has one contributor. Sets of one rank are numbered in the ranks' order.
            Collective::AllGather => {
                let contributor = (value.set + self.rank).saturating_sub(self.mine);
                let ranks = self.output_chunks / self.per_block;
                (if contributor < ranks { contributor * self.per_block } else { 0 }) + value.chunk % self.per_block
            }
            Collective::ReduceScatter => value.chunk,
            _ => value.chunk % self.per_block,
        }
    }

    /// The same of a chunk of the output.
    fn like_of_output(&self, chunk: u32) -> u32 {
        match self.collective {
            Collective::AllGather => chunk,
            Collective::ReduceScatter => self.rank * self.per_block + chunk,
            _ => chunk % self.per_block,
        }
    }

    /// The chunk of the output that a place is.
    fn output_of(&self, place: Place) -> Option<u32> {
        let chunk = match (self.one_buffer, place.buffer, self.collective) {
            (_, ScriptBuffer::Scratch, _) | (false, ScriptBuffer::Input, _) => return None,
            (true, _, Collective::ReduceScatter | Collective::Scatter) => {
                place.chunk.checked_sub(self.rank * self.per_block)?
            }
            _ => place.chunk,
        };
        (chunk < self.output_chunks).then_some(chunk)
    }

    /// Where the form has one buffer: the chunk of the input that a chunk of the output is.
    fn input_under(&self, output: u32) -> Option<u32> {
        let own = self.rank * self.per_block;
        let chunk = match self.collective {
            _ if !self.in_place => return None,
            Collective::AllGather | Collective::Gather => output.checked_sub(own)?,
            Collective::ReduceScatter | Collective::Scatter => output + own,
            _ => output,
        };
        (chunk < self.input_chunks).then_some(chunk)
    }

    /// Whether a chunk of the input is one of the output too.
    fn is_under_output(&self, input: u32) -> bool {
        let own = self.rank * self.per_block;
        let output = match self.collective {
            Collective::AllGather | Collective::Gather => Some(input + own),
            Collective::ReduceScatter | Collective::Scatter => input.checked_sub(own),
            _ => Some(input),
        };
        self.in_place && output.is_some_and(|chunk| chunk < self.output_chunks)
    }
}

fn continues(one: &Span, next: &Span) -> bool {
    one.buffer == next.buffer && one.start + one.len == next.start && one.like + one.len == next.like
}

/// Chunks as a list of spans, consecutive ones as one.
pub(in crate::script) fn joined(chunks: impl IntoIterator<Item = Span>) -> Spans {
    let mut spans = Spans::new();
    for chunk in chunks {
        match spans.last_mut() {
            Some(last) if continues(last, &chunk) => last.len += chunk.len,
            _ => spans.push(chunk),
        }
    }
    spans
}
