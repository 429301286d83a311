//! A run on numbers: random schedules, several segments in flight, results compared with arithmetic.
#![forbid(unsafe_code)]

use super::number::{finished, fold, mix, OracleNumber};
use super::*;
use crate::plan::contract::Promise;
use crate::plan::OperandOrder;
use std::collections::VecDeque;

const SEGMENTS: usize = 4;
const WINDOW: usize = 2;

/// A step in some segment.
type Instance = (At, usize);

/// A message, whose source may be read when it is sent or only when it arrives.
struct Message {
    send: Instance,
    read: Option<Vec<OracleNumber>>,
}

struct World<'a> {
    plans: &'a [Plan],
    sizes: Sizes,
    capacity: usize,
    random: u64,
    /// By rank; user memory by segment, scratch by place in the window.
    memory: Vec<HashMap<(Place, usize), OracleNumber>>,
    /// By rank and lane: segment and position.
    lanes: Vec<Vec<(usize, usize)>>,
    ended: HashSet<Instance>,
    /// By rank and segment: how many steps have not ended.
    left: HashMap<(usize, usize), usize>,
    channels: HashMap<(usize, usize, Channel), VecDeque<Message>>,
    /// By rank, group and segment: the calls made.
    calls: HashMap<(usize, &'a [Rank], usize), Vec<At>>,
}

/// Runs the plans and compares the outputs.
pub(super) fn run(plans: &[Plan], sizes: Sizes, capacity: usize, seed: u64) -> Result<(), String> {
    let mut world = World {
        plans,
        sizes,
        capacity,
        random: mix(seed),
        memory: vec![HashMap::new(); plans.len()],
        lanes: plans.iter().map(|plan| vec![(0, 0); plan.lanes.len()]).collect(),
        ended: HashSet::new(),
        left: HashMap::new(),
        channels: HashMap::new(),
        calls: HashMap::new(),
    };
    for (rank, plan) in plans.iter().enumerate() {
        for segment in 0..SEGMENTS {
            world.left.insert((rank, segment), plan.nsteps());
            let input = Span::input(0, plan.chunks(Buffer::Input));
            for (element, place) in elements(plan, &[input], sizes).into_iter().enumerate() {
                world.memory[rank].insert((place, segment), OracleNumber::input(rank, segment, element));
            }
        }
    }
    world.go()?;
    world.compare()
}

impl<'a> World<'a> {
    fn chance(&mut self, of: usize) -> usize {
        self.random = mix(self.random);
        (self.random % of as u64) as usize
    }

    fn go(&mut self) -> Result<(), String> {
        let lanes_of = |(rank, plan): (usize, &Plan)| (0..plan.lanes.len()).map(move |lane| (rank, lane));
        let mut lanes: Vec<(usize, usize)> = self.plans.iter().enumerate().flat_map(lanes_of).collect();
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for at in (1..lanes.len()).rev() {
                lanes.swap(at, self.chance(at + 1));
            }
            for &(rank, lane) in &lanes {
                moved |= self.step(rank, lane)?;
            }
        }
        match self.left.values().sum::<usize>() {
            0 => Ok(()),
            left => Err(format!("{left} steps never end")),
        }
    }

    /// Tries the next step of a lane.
    fn step(&mut self, rank: usize, lane: usize) -> Result<bool, String> {
        let plans = self.plans;
        let (segment, position) = self.lanes[rank][lane];
        let free = segment < WINDOW || self.left[&(rank, segment - WINDOW)] == 0;
        if segment == SEGMENTS || !free {
            return Ok(false);
        }
        let Some(step) = plans[rank].lanes[lane].steps.get(position) else {
            self.lanes[rank][lane] = (segment + 1, 0);
            return Ok(true);
        };
        let at = (rank, lane, position);
        if !step.deps.iter().all(|dep| self.ended.contains(&(named(rank, dep), segment))) {
            return Ok(false);
        }
        let done = if is_empty(&plans[rank], &step.action, self.sizes) {
            self.end((at, segment));
            true
        } else {
            let done = self.act((at, segment), &step.action);
            done.map_err(|text| format!("{at:?} in segment {segment}: {text}"))?
        };
        if done {
            self.lanes[rank][lane] = (segment, position + 1);
        }
        Ok(done)
    }

    fn end(&mut self, (at, segment): Instance) {
        if self.ended.insert((at, segment)) {
            *self.left.entry((at.0, segment)).or_insert(1) -= 1;
        }
    }

    fn read(&self, rank: usize, spans: &[Span], segment: usize) -> Result<Vec<OracleNumber>, String> {
        let places = elements(&self.plans[rank], spans, self.sizes);
        let value = |place: &Place| self.memory[rank].get(&(*place, slot(place, segment))).copied();
        places.iter().map(|place| value(place).ok_or(format!("{place:?} holds nothing"))).collect()
    }

    fn write(&mut self, rank: usize, spans: &[Span], segment: usize, values: &[OracleNumber]) -> Result<(), String> {
        let places = elements(&self.plans[rank], spans, self.sizes);
        if places.len() != values.len() || places.iter().collect::<HashSet<_>>().len() != places.len() {
            return Err(format!("{} elements go to {} places", values.len(), places.len()));
        }
        for (place, &value) in places.iter().zip(values) {
            self.memory[rank].insert((*place, slot(place, segment)), value);
        }
        Ok(())
    }

    /// Destinations may be exactly a source, and overlap it in no other way.
    fn overlap_is_exact(&self, rank: usize, src: &[Span], dst: &[Span]) -> Result<(), String> {
        let src = elements(&self.plans[rank], src, self.sizes);
        let dst = elements(&self.plans[rank], dst, self.sizes);
        let inexact = |(i, place)| dst.iter().position(|other| other == place).is_some_and(|j| i != j);
        match src.iter().enumerate().any(inexact) {
            true => Err("a destination overlaps a source".into()),
            false => Ok(()),
        }
    }

    /// Tries a step. Says whether its lane can go on.
    fn act(&mut self, at: Instance, action: &'a Action) -> Result<bool, String> {
        let ((rank, ..), segment) = at;
        match action {
            Action::Send { to, channel, src } => return self.send(at, (rank, to.index(), *channel), src),
            Action::Recv { from, channel, dst } => {
                let Some(values) = self.receive((from.index(), rank, *channel))? else { return Ok(false) };
                self.write(rank, dst, segment, &values)?;
            }
            Action::RecvReduce { from, channel, local, dst, order, finish } => {
                let Some(values) = self.receive((from.index(), rank, *channel))? else { return Ok(false) };
                let mine = self.read(rank, local, segment)?;
                self.overlap_is_exact(rank, local, dst)?;
                let reduced = match order {
                    OperandOrder::LocalFirst => fold(&[&mine, &values], 0)?,
                    OperandOrder::IncomingFirst => fold(&[&values, &mine], 0)?,
                };
                self.write(rank, dst, segment, &finished(reduced, *finish))?;
            }
            Action::Copy { src, dst, start, finish } => {
                let values = self.read(rank, src, segment)?;
                self.overlap_is_exact(rank, src, dst)?;
                let values = values.into_iter().map(|value| if *start { value.start() } else { value }).collect();
                self.write(rank, dst, segment, &finished(values, *finish))?;
            }
            Action::Reduce { srcs, dst, finish } => {
                let operands = srcs.iter().map(|src| self.read(rank, src, segment)).collect::<Result<Vec<_>, _>>()?;
                srcs.iter().try_for_each(|src| self.overlap_is_exact(rank, src, dst))?;
                let operands: Vec<&[OracleNumber]> = operands.iter().map(Vec::as_slice).collect();
                self.write(rank, dst, segment, &finished(fold(&operands, 0)?, *finish))?;
            }
            Action::Call(call) => return self.call(at, call),
            Action::Nop => {}
        }
        self.end(at);
        Ok(true)
    }

    fn send(&mut self, send: Instance, key: (usize, usize, Channel), src: &[Span]) -> Result<bool, String> {
        if self.channels.get(&key).map_or(0, VecDeque::len) >= self.capacity {
            return Ok(false);
        }
        let read = match self.chance(2) {
            0 => None,
            _ => Some(self.read(key.0, src, send.1)?),
        };
        self.channels.entry(key).or_default().push_back(Message { send, read });
        Ok(true)
    }

    fn receive(&mut self, key: (usize, usize, Channel)) -> Result<Option<Vec<OracleNumber>>, String> {
        let Some(message) = self.channels.get_mut(&key).and_then(VecDeque::pop_front) else { return Ok(None) };
        let ((rank, lane, position), segment) = message.send;
        let values = match message.read {
            Some(values) => values,
            None => {
                let step = &self.plans[rank].lanes[lane].steps[position];
                self.read(rank, lists(&step.action).0[0], segment)?
            }
        };
        self.end(message.send);
        Ok(Some(values))
    }

    /// Joins a call; the last member carries it out, the others go on when it has ended.
    fn call(&mut self, (at, segment): Instance, call: &'a Call) -> Result<bool, String> {
        if self.ended.contains(&(at, segment)) {
            return Ok(true);
        }
        let made = self.calls.entry((at.0, &call.group, segment)).or_default();
        if !made.contains(&at) {
            made.push(at);
        }
        let nth = made.iter().position(|other| *other == at).unwrap_or(0);
        let joined =
            |member: &Rank| self.calls.get(&(member.index(), call.group.as_slice(), segment))?.get(nth).copied();
        let Some(places) = call.group.iter().map(joined).collect::<Option<Vec<At>>>() else { return Ok(false) };
        let plans = self.plans;
        let call_at = |place: &At| match &plans[place.0].lanes[place.1].steps[place.2].action {
            Action::Call(call) => Some(call),
            _ => None,
        };
        let calls: Vec<&Call> = places.iter().filter_map(call_at).collect();
        let key = |call: &Call| (call.collective, call.level, call.root, call.finish);
        if calls.iter().any(|other| key(other) != key(call)) {
            return Err("the calls differ".into());
        }
        let mut inputs = Vec::new();
        for (place, call) in places.iter().zip(&calls) {
            let blocks = call.src.iter().map(|spans| self.read(place.0, spans, segment));
            inputs.push(blocks.collect::<Result<Vec<_>, String>>()?);
        }
        for (member, (place, call)) in places.iter().zip(&calls).enumerate() {
            for (block, spans) in call.dst.iter().enumerate() {
                let values = call_result(call, &inputs, member, block)?;
                self.write(place.0, spans, segment, &finished(values, call.finish))?;
            }
            self.end((*place, segment));
        }
        Ok(true)
    }

    /// Compares all outputs with what the collective promises, and those of different ranks with each other.
    fn compare(&self) -> Result<(), String> {
        let mut trees: HashMap<(usize, usize), u64> = HashMap::new();
        for (rank, plan) in self.plans.iter().enumerate() {
            for segment in 0..SEGMENTS {
                let output = Span::output(0, plan.chunks(Buffer::Output));
                for (element, place) in elements(plan, &[output], self.sizes).iter().enumerate() {
                    let Some((wanted, result)) = self.promised(rank, segment, element) else { continue };
                    let value = self.memory[rank].get(&(*place, slot(place, segment)));
                    let value = value.ok_or(format!("{place:?} holds nothing"))?;
                    if value.sum != wanted {
                        return Err(format!("rank {rank} segment {segment}: element {element} is wrong"));
                    }
                    if *trees.entry((segment, result)).or_insert(value.tree) != value.tree {
                        return Err(format!("rank {rank} segment {segment}: element {element} differs in its tree"));
                    }
                }
            }
        }
        Ok(())
    }

    /// The sum an output element must have, and a number for the result it is part of; none where it may be anything.
    fn promised(&self, rank: usize, segment: usize, element: usize) -> Option<(u64, usize)> {
        let shape = &self.plans[rank].shape;
        let block_len: usize = (0..self.sizes.per_block).map(|chunk| self.sizes.of(chunk)).sum();
        let (block, within) = (element / block_len, element % block_len);
        let started = |rank: usize, element: usize| {
            let number = OracleNumber::input(rank, segment, element);
            if shape.prologue {
                number.start().sum
            } else {
                number.sum
            }
        };
        let total = |element: usize| {
            let sum = (0..self.plans.len()).fold(0u64, |sum, rank| sum.wrapping_add(started(rank, element)));
            (OracleNumber { sum, tree: 0 }.finish().sum, element)
        };
        let (root, mine) = (shape.root.index(), rank * block_len + within);
        let (from, element) = match shape.collective {
            Collective::AllReduce | Collective::Reduce => return Some(total(element)),
            Collective::ReduceScatter => return Some(total(mine)),
            Collective::Broadcast => (root, element),
            Collective::Scatter => (root, mine),
            Collective::AllGather | Collective::Gather => (block, within),
            Collective::AllToAll => (block, mine),
            Collective::Custom => match shape.contract.as_ref()?.promise_of_block(rank, block) {
                Promise::Anything => return None,
                Promise::Chunk { rank, chunk } => (rank as usize, chunk as usize * block_len + within),
                Promise::Reduction { chunk } => return Some(total(chunk as usize * block_len + within)),
            },
        };
        let blocks = self.plans.len().max(shape.blocks());
        Some((started(from, element), (1 + from) * blocks * block_len + element))
    }
}

/// What a member of a call gets in one of its blocks.
fn call_result(
    call: &Call,
    inputs: &[Vec<Vec<OracleNumber>>],
    me: usize,
    block: usize,
) -> Result<Vec<OracleNumber>, String> {
    let reduced = |block: usize| {
        let operands: Vec<&[OracleNumber]> = inputs.iter().map(|member| member[block].as_slice()).collect();
        fold(&operands, 1 + call.collective as u64)
    };
    Ok(match call.collective {
        Collective::AllReduce | Collective::Reduce => reduced(0)?,
        Collective::ReduceScatter => reduced(me)?,
        Collective::AllGather | Collective::Gather => inputs[block][0].clone(),
        Collective::AllToAll => inputs[block][me].clone(),
        Collective::Broadcast => inputs[call.root][0].clone(),
        Collective::Scatter => inputs[call.root][me].clone(),
        Collective::Custom => return Err("a custom collective cannot be called".to_string()),
    })
}

/// User memory is the segment's own; scratch is shared by segments a window apart, and keeps what it held.
fn slot(place: &Place, segment: usize) -> usize {
    match place {
        Place::User(_) => segment,
        Place::Scratch(_) | Place::Coded(_) => segment % WINDOW,
    }
}
