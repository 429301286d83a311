//! What the simulated ranks have in common: the clock, the queue of events, and who is alive.
#![forbid(unsafe_code)]

use super::arithmetic::Arithmetic;
use super::calls::CallQueue;
use super::durations::{Durations, LocalWork};
use super::memory::RankMemory;
use super::random::{mix, Random};
use super::stream::{MessageNumber, SimStream, StreamId};
use super::InjectedFault;
use crate::code::FloatCode;
use crate::error::{Error, Result};
use crate::exec::{Op, Started, Token, World};
use crate::plan::layout::Piece;
use crate::plan::{Buffer, Channel, Collective, LinkLevel};
use crate::topo::Rank;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Something that happens at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SimEvent {
    /// A rank gets to run.
    Poll(Rank),
    /// A rank learns that its operation has completed.
    Complete(Rank, Token),
    /// A copy or reduction takes effect.
    Local(Rank, Token),
    /// An eager message leaves: its source is copied.
    Leave(StreamId, MessageNumber),
    /// An eager message is at its receiver.
    Arrive(StreamId, MessageNumber),
    /// A message meets its receive; the source of one that is not eager is copied now.
    Deliver(StreamId, MessageNumber),
    /// A message's destination is written.
    Write(StreamId, MessageNumber),
    /// A call takes effect on all members.
    Call(usize, u64),
    /// A planned fault, by index.
    Fault(usize),
}

/// One rank's side of the network.
#[derive(Debug, Default)]
pub(super) struct Station {
    /// Neither dead nor ended in an error.
    pub(super) alive: bool,
    /// Runs again at this time.
    pub(super) frozen_until: u64,
    /// What its next contact with the world returns.
    pub(super) error: Option<Error>,
    /// When it must run again even if nothing happens, to notice a time-out.
    pub(super) deadline: u64,
    /// When an event for that is in the queue.
    pub(super) alarm_at: u64,
    /// How many leading segments are final on it.
    front: usize,
    done: Vec<Token>,
    locals: Vec<(Token, Local)>,
}

/// A copy or reduction under way.
#[derive(Debug, Default)]
struct Local {
    srcs: Vec<Vec<Piece>>,
    dst: Vec<Piece>,
    start: bool,
    finish: bool,
    /// The form of those lists that are coded.
    code: Option<FloatCode>,
    /// Whether what is read is coded.
    from_code: bool,
    /// Whether the result is.
    to_code: bool,
}

/// The network.
pub(super) struct Network {
    pub(super) now: u64,
    pub(super) random: Random,
    pub(super) durations: Box<dyn Durations>,
    /// Messages of one stream that may be under way.
    pub(super) capacity: usize,
    pub(super) stations: Vec<Station>,
    pub(super) streams: Vec<SimStream>,
    pub(super) stream_of: HashMap<(Rank, Rank, Channel), StreamId>,
    pub(super) calls: Vec<CallQueue>,
    pub(super) call_of: HashMap<(LinkLevel, Collective, usize, Vec<Rank>, u32), usize>,
    /// None when only sizes are simulated.
    pub(super) memory: Option<Vec<RankMemory>>,
    pub(super) arithmetic: Arithmetic,
    pub(super) faults: Vec<InjectedFault>,
    /// Ranks whose part others play too, so that they do nothing themselves; empty when there are none.
    pub(super) mirrored: Vec<bool>,
    /// Ranks that have stopped for ever and of which the simulation has not taken note.
    pub(super) gone: Vec<Rank>,
    /// A digest of all events so far.
    pub(super) trace: u64,
    /// When each segment became final on the last of the ranks, so far.
    pub(super) front_ns: Vec<u64>,
    queue: BinaryHeap<Reverse<(u64, u64, SimEvent)>>,
    queued: u64,
}

impl Network {
    pub(super) fn new(
        nranks: usize,
        random: Random,
        durations: Box<dyn Durations>,
        memory: Option<Vec<RankMemory>>,
        arithmetic: Arithmetic,
    ) -> Network {
        let stations = (0..nranks).map(|_| Station { alive: true, ..Station::default() }).collect();
        Network {
            now: 0,
            random,
            durations,
            capacity: 1,
            stations,
            streams: Vec::new(),
            stream_of: HashMap::new(),
            calls: Vec::new(),
            call_of: HashMap::new(),
            memory,
            arithmetic,
            faults: Vec::new(),
            mirrored: Vec::new(),
            gone: Vec::new(),
            trace: 0,
            front_ns: Vec::new(),
            queue: BinaryHeap::new(),
            queued: 0,
        }
    }

    /// Puts an event into the queue. Events of one moment happen in the order in which they were put there.
    pub(super) fn at(&mut self, time_ns: u64, event: SimEvent) {
        self.queued += 1;
        self.queue.push(Reverse((time_ns.max(self.now), self.queued, event)));
    }

    /// A moment from now on at which a rank may learn of something, not before `earliest`.
    pub(super) fn soon(&mut self, earliest: u64) -> u64 {
        let notice = self.durations.notice_ns(&mut self.random);
        earliest.max(self.now + notice)
    }

    /// Advances the clock to the next event and lets it happen. Returns the rank that should run now.
    /// None when nothing will ever happen again.
    pub(super) fn step(&mut self) -> Option<Option<Rank>> {
        let Reverse((time, _, event)) = self.queue.pop()?;
        self.now = time;
        if let Some(owner) = self.owner(event) {
            let station = &self.stations[owner.index()];
            if !station.alive || station.frozen_until == u64::MAX {
                return Some(None);
            }
            if station.frozen_until > time {
                let thaw = station.frozen_until;
                self.at(thaw, event);
                return Some(None);
            }
        }
        self.record(time, event);
        Some(self.happen(event))
    }

    /// The rank without whose doing an event cannot happen.
    fn owner(&self, event: SimEvent) -> Option<Rank> {
        match event {
            SimEvent::Poll(rank) | SimEvent::Complete(rank, _) | SimEvent::Local(rank, _) => Some(rank),
            SimEvent::Leave(stream, _) => Some(self.streams[stream].from),
            SimEvent::Deliver(stream, _) | SimEvent::Write(stream, _) => Some(self.streams[stream].to),
            SimEvent::Arrive(..) | SimEvent::Call(..) | SimEvent::Fault(_) => None,
        }
    }

    fn record(&mut self, time: u64, event: SimEvent) {
        let (kind, first, second) = match event {
            SimEvent::Poll(rank) => (0, u64::from(rank.0), 0),
            SimEvent::Complete(rank, token) => (1, u64::from(rank.0), token),
            SimEvent::Local(rank, token) => (2, u64::from(rank.0), token),
            SimEvent::Leave(stream, number) => (3, stream as u64, number),
            SimEvent::Arrive(stream, number) => (4, stream as u64, number),
            SimEvent::Deliver(stream, number) => (5, stream as u64, number),
            SimEvent::Write(stream, number) => (6, stream as u64, number),
            SimEvent::Call(queue, number) => (7, queue as u64, number),
            SimEvent::Fault(index) => (8, index as u64, 0),
        };
        for part in [time, kind, first, second] {
            self.trace = mix(self.trace.wrapping_mul(31).wrapping_add(part));
        }
    }

    fn happen(&mut self, event: SimEvent) -> Option<Rank> {
        match event {
            SimEvent::Poll(rank) => return Some(rank),
            SimEvent::Complete(rank, token) => {
                self.stations[rank.index()].done.push(token);
                return Some(rank);
            }
            SimEvent::Local(rank, token) => self.end_local(rank, token),
            SimEvent::Leave(stream, number) => self.leave(stream, number),
            SimEvent::Arrive(stream, number) => self.arrive(stream, number),
            SimEvent::Deliver(stream, number) => self.deliver(stream, number),
            SimEvent::Write(stream, number) => {
                let token = self.write(stream, number);
                let done = self.soon(self.streams[stream].noticed_at);
                self.streams[stream].noticed_at = done;
                self.at(done, SimEvent::Complete(self.streams[stream].to, token));
            }
            SimEvent::Call(queue, number) => self.end_call(queue, number),
            SimEvent::Fault(index) => self.begin_fault(index),
        }
        None
    }

    fn begin_fault(&mut self, index: usize) {
        match self.faults[index] {
            InjectedFault::Die { rank, .. } => {
                self.stations[rank.index()].alive = false;
                self.gone.push(rank);
            }
            InjectedFault::Freeze { rank, for_ns, .. } => {
                let until = self.now.saturating_add(for_ns);
                self.stations[rank.index()].frozen_until = until;
                self.gone.extend((until == u64::MAX).then_some(rank));
            }
            InjectedFault::Fail { rank, at_ns } => {
                self.fail(rank, Error::System(format!("the fault planned for {at_ns} ns")));
            }
        }
    }

    /// Makes a rank's next contact with the world an error.
    pub(super) fn fail(&mut self, rank: Rank, error: Error) {
        self.stations[rank.index()].error.get_or_insert(error);
        self.at(self.now, SimEvent::Poll(rank));
    }

    /// Pieces, where there are bytes to move.
    pub(super) fn keep(&self, pieces: &[Piece]) -> Vec<Piece> {
        match self.memory {
            Some(_) => pieces.to_vec(),
            None => Vec::new(),
        }
    }

    fn start_local(&mut self, rank: Rank, token: Token, local: Local, bytes: usize) -> Started {
        let operands = local.srcs.len();
        let decoded = if local.from_code { bytes * operands } else { 0 };
        let work = LocalWork {
            now_ns: self.now,
            rank,
            bytes,
            operands,
            encoded: if local.to_code { bytes } else { 0 },
            decoded,
        };
        let time = self.durations.local_ns(&work, &mut self.random);
        if time == 0 {
            self.apply_local(rank, &local);
            return Started::Done;
        }
        self.stations[rank.index()].locals.push((token, local));
        self.at(self.now + time, SimEvent::Local(rank, token));
        Started::Pending
    }

    fn end_local(&mut self, rank: Rank, token: Token) {
        let locals = &mut self.stations[rank.index()].locals;
        let Some(index) = locals.iter().position(|(pending, _)| *pending == token) else { return };
        let (_, local) = locals.swap_remove(index);
        self.apply_local(rank, &local);
        let done = self.soon(0);
        self.at(done, SimEvent::Complete(rank, token));
    }

    fn apply_local(&mut self, rank: Rank, local: &Local) {
        let Some(memory) = &mut self.memory else { return };
        let memory = &mut memory[rank.index()];
        let arithmetic = self.arithmetic;
        let plain = |pieces: &Vec<Piece>| match local.code.filter(|_| is_coded(pieces)) {
            None => memory.read(pieces),
            Some(code) => pieces.iter().flat_map(|piece| arithmetic.decoded(code, &memory.read(&[*piece]))).collect(),
        };
        let mut operands = local.srcs.iter().map(plain);
        let Some(mut result) = operands.next() else { return };
        if local.start {
            self.arithmetic.start(&mut result);
        }
        operands.by_ref().for_each(|operand| self.arithmetic.add(&mut result, &operand));
        if local.finish {
            self.arithmetic.finish(&mut result);
        }
        drop(operands);
        if let Some(code) = local.code.filter(|_| is_coded(&local.dst)) {
            let lens = local.dst.iter().map(|piece| code.elements(piece.len).unwrap_or(0));
            result = arithmetic.encoded(code, &result, lens);
        }
        if !memory.write(&local.dst, &result) {
            self.fail(rank, Error::Internal(String::from("a copy or reduction whose lists differ in size")));
        }
    }
}

/// The world as one rank sees it.
pub(super) struct SimWorld<'a> {
    pub(super) network: &'a mut Network,
    pub(super) rank: Rank,
}

impl SimWorld<'_> {
    fn check(&mut self) -> Result<()> {
        match &self.network.stations[self.rank.index()].error {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

impl World for SimWorld<'_> {
    fn now_ns(&self) -> u64 {
        self.network.now
    }

    fn start(&mut self, token: Token, op: Op<'_>) -> Result<Started> {
        self.check()?;
        let (network, rank) = (&mut *self.network, self.rank);
        Ok(match op {
            Op::Send { to, channel, src } => network.start_send(token, (rank, to, channel), src),
            Op::Recv { from, channel, dst } => network.start_recv(token, (from, rank, channel), None, dst),
            Op::RecvReduce { from, channel, local, dst, order, finish } => {
                network.start_recv(token, (from, rank, channel), Some((local, order, finish)), dst)
            }
            Op::Copy { src, dst, start, finish } => {
                let local =
                    Local { srcs: vec![network.keep(src)], dst: network.keep(dst), start, finish, ..Local::default() };
                network.start_local(rank, token, local, bytes_in(dst))
            }
            Op::Reduce { srcs, dst, finish } => {
                let srcs = srcs.iter().map(|src| network.keep(src)).collect();
                let local = Local { srcs, dst: network.keep(dst), finish, ..Local::default() };
                network.start_local(rank, token, local, bytes_in(dst))
            }
            // A coded chunk costs what the memory costs that it stands for.
            Op::Encode { code, src, dst, .. } => {
                let (srcs, dst) = (vec![network.keep(src)], network.keep(dst));
                let local = Local { srcs, dst, code: Some(code), to_code: true, ..Local::default() };
                network.start_local(rank, token, local, bytes_in(src))
            }
            Op::Decode { code, src, dst, finish } => {
                let (srcs, bytes) = (vec![network.keep(src)], bytes_in(dst));
                let dst = network.keep(dst);
                let local = Local { srcs, dst, finish, code: Some(code), from_code: true, ..Local::default() };
                network.start_local(rank, token, local, bytes)
            }
            Op::FoldCoded { code, srcs, dst, finish, .. } => {
                let bytes = bytes_in(dst).max(bytes_in(srcs[0]));
                let (from_code, to_code) = (srcs.iter().any(|src| is_coded(src)), is_coded(dst));
                let srcs = srcs.iter().map(|src| network.keep(src)).collect();
                let dst = network.keep(dst);
                let local = Local { srcs, dst, finish, code: Some(code), from_code, to_code, ..Local::default() };
                network.start_local(rank, token, local, bytes)
            }
            Op::Call { call, lane, src, dst } => {
                network.start_call(rank, token, (call, lane), src, dst)?;
                Started::Pending
            }
        })
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        self.check()?;
        done.append(&mut self.network.stations[self.rank.index()].done);
        Ok(())
    }

    fn front(&mut self, segments: usize) {
        let Network { now, stations, front_ns, memory, .. } = &mut *self.network;
        let known = std::mem::replace(&mut stations[self.rank.index()].front, segments);
        front_ns.resize(front_ns.len().max(segments), 0);
        front_ns[known..segments].fill(*now);
        if let Some(memory) = memory {
            memory[self.rank.index()].overwrite_final(known..segments);
        }
    }
}

/// Whether pieces lie in coded scratch.
fn is_coded(pieces: &[Piece]) -> bool {
    pieces.first().is_some_and(|piece| piece.buffer == Buffer::Coded)
}

/// How many bytes the pieces have together.
pub(super) fn bytes_in(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.len).sum()
}
