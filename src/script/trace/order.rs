//! One order of all instructions, in which they could run one after another, messages of a connection first in, first out.
//!
//! Thread blocks take their instructions in this order. So a script can always go on: of all that has not run the first in the
//! order waits for nothing.
#![forbid(unsafe_code)]

use super::dag::Dag;
use crate::script::CAPACITY;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// How instructions that are ready are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Preference {
    /// By the longest way that leads to them, then by the longest that leads on.
    Depth,
    /// As the trace has them.
    Trace,
}

/// A connection: sender, receiver, lane and channel.
pub(super) type TraceLink = (u32, u32, u32, u16);

/// Messages on the way, and who waits for their turn.
#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<u32>,
    /// Ready instructions whose message is not the first.
    receivers: Vec<u32>,
    /// Ready instructions that find no room.
    senders: Vec<u32>,
}

/// The order, or the messages at which it comes to a halt.
///
/// Connections that hold two messages do for most; where that is not enough, they hold as many as all transports do.
pub(super) fn order(dag: &Dag, of_message: &[TraceLink], preference: Preference) -> Result<Vec<u32>, Vec<u32>> {
    order_with(dag, of_message, preference, 2).or_else(|_| order_with(dag, of_message, preference, CAPACITY))
}

fn order_with(dag: &Dag, of_message: &[TraceLink], preference: Preference, room: usize) -> Result<Vec<u32>, Vec<u32>> {
    let count = dag.instructions.len();
    let mut waits = vec![0u32; count];
    let mut next: Vec<Vec<u32>> = vec![Vec::new(); count];
    for (at, instruction) in dag.instructions.iter().enumerate() {
        let sender = instruction.receives.map(|message| dag.messages[message as usize].sender);
        for before in instruction.deps.iter().map(|dep| dep.before).chain(sender) {
            next[before as usize].push(at as u32);
            waits[at] += 1;
        }
    }
    let (depths, heights) = levels(dag, &next, &waits);
    let key = |at: u32| match preference {
        Preference::Depth => (depths[at as usize], Reverse(heights[at as usize]), at),
        Preference::Trace => (0, Reverse(0), at),
    };
    let begins = |at: &usize| waits[*at] == 0 && !dag.instructions[*at].is_fused;
    let mut ready: BinaryHeap<Reverse<(u32, Reverse<u32>, u32)>> =
        (0..count).filter(begins).map(|at| Reverse(key(at as u32))).collect();
    let mut queues: FxHashMap<TraceLink, Queue> = FxHashMap::default();
    let mut order = Vec::with_capacity(count);
    while let Some(Reverse((_, _, at))) = ready.pop() {
        let instruction = &dag.instructions[at as usize];
        if let Some(message) = instruction.receives {
            let queue = queues.entry(of_message[message as usize]).or_default();
            if queue.messages.front() != Some(&message) {
                queue.receivers.push(at);
                continue;
            }
        }
        if let Some(message) = instruction.sends {
            let queue = queues.entry(of_message[message as usize]).or_default();
            if queue.messages.len() >= room {
                queue.senders.push(at);
                continue;
            }
            queue.messages.push_back(message);
        }
        if let Some(message) = instruction.receives {
            let queue = queues.entry(of_message[message as usize]).or_default();
            queue.messages.pop_front();
            let waiting = queue.receivers.drain(..).chain(queue.senders.drain(..));
            ready.extend(waiting.map(|at| Reverse(key(at))));
        }
        order.push(at);
        for &after in &next[at as usize] {
            waits[after as usize] -= 1;
            if waits[after as usize] == 0 {
                ready.push(Reverse(key(after)));
            }
        }
    }
    if order.len() == dag.instructions.iter().filter(|instruction| !instruction.is_fused).count() {
        return Ok(order);
    }
    let receives = |at: &u32| dag.instructions[*at as usize].receives;
    let sends = |at: &u32| dag.instructions[*at as usize].sends;
    let early: Vec<u32> = queues.values().flat_map(|queue| queue.receivers.iter().filter_map(receives)).collect();
    match early.is_empty() {
        false => Err(early),
        true => Err(queues.values().flat_map(|queue| queue.senders.iter().filter_map(sends)).collect()),
    }
}

/// The longest ways that lead to each instruction and from it.
fn levels(dag: &Dag, next: &[Vec<u32>], waits: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let count = waits.len();
    let mut waits = waits.to_vec();
    let mut depths = vec![0u32; count];
    let mut order: Vec<u32> = (0..count as u32).filter(|&at| waits[at as usize] == 0).collect();
    let mut at = 0;
    while let Some(&before) = order.get(at) {
        at += 1;
        for &after in &next[before as usize] {
            depths[after as usize] = depths[after as usize].max(depths[before as usize] + 1);
            waits[after as usize] -= 1;
            if waits[after as usize] == 0 {
                order.push(after);
            }
        }
    }
    let mut heights = vec![0u32; count];
    for &at in order.iter().rev() {
        let after = next[at as usize].iter().map(|&after| heights[after as usize] + 1);
        heights[at as usize] = after.max().unwrap_or(0);
    }
    debug_assert_eq!(order.len(), dag.instructions.len());
    (depths, heights)
}
