//! Calls on several carriers, each in the order in which its rank makes them, under one virtual clock.
//!
//! A rank is a program's thread, which makes calls and waits for carriers, and an engine for each carrier, which runs the carrier's
//! calls by the production executor, each when its turn is on. Between the acts of a thread and the events of the networks lie
//! random times. What gives turns is the caller's, so that the production queues of a communicator are what is simulated; with
//! one queue for all carriers of a rank, ranks that call in different orders wait for each other for ever.
#![forbid(unsafe_code)]

use super::arithmetic::Arithmetic;
use super::memory::RankMemory;
use super::network::{Network, SimEvent, SimWorld};
use super::random::Random;
use super::Chaos;
use crate::error::Result;
use crate::exec::{Execution, Op, Program, Progress, Started, Token, World};
use crate::topo::Rank;
use std::collections::VecDeque;
use std::sync::Arc;

/// What a thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadAct {
    /// Makes the call of this number.
    Call(usize),
    /// Waits until all calls that it has made on this carrier have ended.
    Wait(usize),
}

/// A call of all ranks.
#[derive(Debug, Clone)]
pub struct CarriedCall {
    /// On which carrier.
    pub carrier: usize,
    /// By which program, for each rank.
    pub programs: Vec<Arc<Program>>,
    /// Elements of a block.
    pub count: usize,
    /// Bytes of each block in a segment.
    pub segment_bytes: usize,
    /// One input for each rank.
    pub inputs: Vec<Vec<u8>>,
}

/// Who gives turns to the calls on a carrier of a rank.
pub trait TurnQueue {
    /// Gives the next turn.
    fn issue(&self) -> u64;
    /// Whether it is on.
    fn is(&self, turn: u64) -> bool;
    /// Ends the turn that is on.
    fn advance(&self);
}

/// What is simulated.
pub struct OrderedCalls<'a> {
    /// Ranks.
    pub nranks: usize,
    /// Carriers.
    pub carriers: usize,
    /// The calls.
    pub calls: &'a [CarriedCall],
    /// What each rank's thread does.
    pub acts: &'a [Vec<ThreadAct>],
    /// How the elements are combined.
    pub arithmetic: Arithmetic,
    /// Bytes of an element.
    pub elem_bytes: usize,
    /// Messages under way from one rank to another on one channel.
    pub capacity: usize,
    /// Segments in flight.
    pub window: usize,
}

/// One carrier of one rank.
struct Engine {
    execution: Execution,
    /// Calls that have not ended, and their turns.
    queued: VecDeque<(usize, u64)>,
    is_running: bool,
}

/// The thread of a rank.
struct Thread {
    next: usize,
    waits_for: Option<usize>,
}

/// The world of a carrier, whose ranks lie behind those of the carriers before it.
struct OfCarrier<'a> {
    world: SimWorld<'a>,
    first: usize,
}

impl World for OfCarrier<'_> {
    fn now_ns(&self) -> u64 {
        self.world.now_ns()
    }

    fn start(&mut self, token: Token, mut op: Op<'_>) -> Result<Started> {
        if let Op::Send { to: peer, .. } | Op::Recv { from: peer, .. } | Op::RecvReduce { from: peer, .. } = &mut op {
            *peer = Rank::from_index(peer.index() + self.first);
        }
        self.world.start(token, op)
    }

    fn poll(&mut self, done: &mut Vec<Token>) -> Result<()> {
        self.world.poll(done)
    }
}

/// A run under way.
struct Run<'a> {
    job: &'a OrderedCalls<'a>,
    /// For each rank and carrier.
    queues: &'a [Vec<Arc<dyn TurnQueue>>],
    network: Network,
    engines: Vec<Engine>,
    threads: Vec<Thread>,
    /// By call and rank.
    outputs: Vec<Vec<Vec<u8>>>,
}

impl OrderedCalls<'_> {
    /// Runs the calls: the outputs of each call on each rank; or where the ranks are that wait for each other for ever.
    pub fn run(&self, seed: u64, queues: &[Vec<Arc<dyn TurnQueue>>]) -> std::result::Result<Vec<Vec<Vec<u8>>>, String> {
        let (n, engines) = (self.nranks, self.nranks * self.carriers);
        let random = Random::new(seed);
        let mut network = Network::new(engines + n, random, Box::new(Chaos), Some(Vec::new()), self.arithmetic);
        network.capacity = self.capacity.max(1);
        let engine = |_| Engine { execution: Execution::new(), queued: VecDeque::new(), is_running: false };
        let mut run = Run {
            job: self,
            queues,
            network,
            engines: (0..engines).map(engine).collect(),
            threads: (0..n).map(|_| Thread { next: 0, waits_for: None }).collect(),
            outputs: vec![vec![Vec::new(); n]; self.calls.len()],
        };
        run.finish()
    }
}

impl Run<'_> {
    fn wake(&mut self, station: usize) {
        let at = self.network.soon(0);
        self.network.at(at, SimEvent::Poll(Rank::from_index(station)));
    }

    fn finish(&mut self) -> std::result::Result<Vec<Vec<Vec<u8>>>, String> {
        let (n, engines) = (self.job.nranks, self.engines.len());
        self.network.memory = Some((0..engines).map(|_| RankMemory::default()).collect());
        (0..n).for_each(|rank| self.wake(engines + rank));
        while let Some(wanted) = self.network.step() {
            let Some(station) = wanted.map(|rank| rank.index()) else { continue };
            if station >= engines {
                self.go_on(station - engines);
            } else {
                self.poll(station)?;
            }
        }
        let is_done = |rank: usize| self.threads[rank].next == self.job.acts[rank].len();
        let stuck: Vec<String> = (0..n).filter(|rank| !is_done(*rank)).map(|rank| self.place(rank)).collect();
        match stuck.is_empty() {
            true => Ok(std::mem::take(&mut self.outputs)),
            false => Err(format!("ranks wait for each other for ever: {}", stuck.join("; "))),
        }
    }

    fn place(&self, rank: usize) -> String {
        let engines = (0..self.job.carriers).map(|carrier| {
            let engine = &self.engines[carrier * self.job.nranks + rank];
            match engine.queued.front() {
                None => format!("carrier {carrier} idle"),
                Some((call, turn)) if !engine.is_running => {
                    format!("carrier {carrier}: call {call} waits for turn {turn}")
                }
                Some((call, _)) => format!("carrier {carrier}: call {call}, {}", engine.execution.describe()),
            }
        });
        format!(
            "rank {rank} at {:?}: {}",
            self.job.acts[rank].get(self.threads[rank].next),
            engines.collect::<Vec<_>>().join(", ")
        )
    }

    /// The thread of a rank does its next act, if it can.
    fn go_on(&mut self, rank: usize) {
        let (n, engines) = (self.job.nranks, self.engines.len());
        let Some(act) = self.job.acts[rank].get(self.threads[rank].next) else { return };
        match *act {
            ThreadAct::Call(call) => {
                let carrier = self.job.calls[call].carrier;
                let turn = self.queues[rank][carrier].issue();
                let station = carrier * n + rank;
                self.engines[station].queued.push_back((call, turn));
                self.wake(station);
            }
            ThreadAct::Wait(carrier) if !self.engines[carrier * n + rank].queued.is_empty() => {
                self.threads[rank].waits_for = Some(carrier);
                return;
            }
            ThreadAct::Wait(_) => {}
        }
        self.threads[rank].next += 1;
        self.wake(engines + rank);
    }

    /// The engine of a rank and carrier begins what has its turn, and goes on with it.
    fn poll(&mut self, station: usize) -> std::result::Result<(), String> {
        let (n, job) = (self.job.nranks, self.job);
        let (carrier, rank) = (station / n, station % n);
        let engine = &mut self.engines[station];
        let Some(&(call, turn)) = engine.queued.front() else { return Ok(()) };
        let made = &job.calls[call];
        if !engine.is_running {
            if !self.queues[rank][carrier].is(turn) {
                return Ok(());
            }
            let program = &made.programs[rank];
            let layout = program.layout(made.count, job.elem_bytes, made.segment_bytes);
            let memory = RankMemory::new(program.plan(), &layout, job.window, &made.inputs[rank]);
            self.network.memory.as_mut().expect("set at the beginning")[station] = memory;
            engine.execution.begin(Arc::clone(program), layout, job.window, 0);
            engine.is_running = true;
        }
        loop {
            let world = SimWorld { network: &mut self.network, rank: Rank::from_index(station) };
            match engine.execution.poll(&mut OfCarrier { world, first: carrier * n }) {
                Ok(Progress::Done) => break,
                Ok(Progress::Moved) => {}
                Ok(Progress::Idle) => return Ok(()),
                Err(error) => return Err(format!("rank {rank}, call {call}: {error}")),
            }
        }
        self.outputs[call][rank] =
            self.network.memory.as_ref().expect("set at the beginning")[station].output().to_vec();
        engine.is_running = false;
        engine.queued.pop_front();
        let is_waited_for = engine.queued.is_empty() && self.threads[rank].waits_for == Some(carrier);
        self.queues[rank][carrier].advance();
        // Whatever has its turn now: with a queue for all carriers that may be another one's.
        (0..job.carriers).for_each(|other| self.wake(other * n + rank));
        if is_waited_for {
            self.threads[rank].waits_for = None;
            self.wake(self.engines.len() + rank);
        }
        Ok(())
    }
}
