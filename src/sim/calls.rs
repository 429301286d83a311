//! Calls: when the last member has arrived, all inputs are read and all outputs written at one moment.
#![forbid(unsafe_code)]

use super::durations::CallWork;
use super::network::{bytes_in, Network, SimEvent};
use crate::error::{Error, Result};
use crate::exec::Token;
use crate::plan::layout::Piece;
use crate::plan::{Call, Collective};
use crate::topo::Rank;
use std::collections::VecDeque;

/// All calls of one group, level, collective, root and lane, in order.
#[derive(Debug)]
pub(super) struct CallQueue {
    /// How many calls each member has made.
    made: Vec<u64>,
    /// The number of the first open call.
    first: u64,
    open: VecDeque<Instance>,
    ends_at: u64,
}

#[derive(Debug)]
struct Instance {
    call: Call,
    parts: Vec<Option<Part>>,
}

/// What one member brings.
#[derive(Debug)]
struct Part {
    token: Token,
    src: Vec<Block>,
    dst: Vec<Block>,
    /// Bytes that do not lie together, going in and coming out.
    scattered: [usize; 2],
}

#[derive(Debug)]
struct Block {
    pieces: Vec<Piece>,
    bytes: usize,
}

impl Network {
    pub(super) fn start_call(
        &mut self,
        rank: Rank,
        token: Token,
        (call, lane): (&Call, u32),
        src: &[&[Piece]],
        dst: &[&[Piece]],
    ) -> Result<()> {
        let Some(member) = call.group.iter().position(|&member| member == rank) else {
            return Err(Error::Internal(format!("rank {rank} calls a group that it is not in")));
        };
        let blocks = |lists: &[&[Piece]]| -> Vec<Block> {
            lists.iter().map(|list| Block { pieces: self.keep(list), bytes: bytes_in(list) }).collect()
        };
        let part = Part { token, src: blocks(src), dst: blocks(dst), scattered: [scattered(src), scattered(dst)] };
        let key = (call.level, call.collective, call.root, call.group.clone(), lane);
        let (calls, nmembers) = (&mut self.calls, call.group.len());
        let id = *self.call_of.entry(key).or_insert_with(|| {
            calls.push(CallQueue { made: vec![0; nmembers], first: 0, open: VecDeque::new(), ends_at: 0 });
            calls.len() - 1
        });
        let queue = &mut self.calls[id];
        let number = queue.made[member];
        queue.made[member] += 1;
        let index = (number - queue.first) as usize;
        if index == queue.open.len() {
            queue.open.push_back(Instance { call: call.clone(), parts: (0..nmembers).map(|_| None).collect() });
        }
        let instance = &mut queue.open[index];
        instance.parts[member] = Some(part);
        let mirrored = &self.mirrored;
        let is_mirrored = |rank: &Rank| mirrored.get(rank.index()).copied().unwrap_or(false);
        if instance.parts.iter().zip(&call.group).all(|(part, rank)| part.is_some() || is_mirrored(rank)) {
            let work = work(instance, self.now);
            let time = self.durations.call_ns(call, &work, &mut self.random);
            let queue = &mut self.calls[id];
            queue.ends_at = queue.ends_at.max(self.now + time);
            let ends_at = queue.ends_at;
            self.at(ends_at, SimEvent::Call(id, number));
        }
        Ok(())
    }

    pub(super) fn end_call(&mut self, id: usize, number: u64) {
        let queue = &mut self.calls[id];
        debug_assert_eq!(number, queue.first, "calls of one group end in order");
        let Some(instance) = queue.open.pop_front() else { return };
        queue.first += 1;
        let group = instance.call.group.clone();
        if group.iter().any(|rank| !self.stations[rank.index()].alive) {
            return;
        }
        let parts: Vec<&Part> = instance.parts.iter().flatten().collect();
        // Where some are mirrored, the bytes of the others alone mean nothing.
        let carried = if parts.len() == group.len() { self.carry_out(instance.call, &parts) } else { Ok(()) };
        if let Err(text) = carried {
            for rank in group {
                self.fail(rank, Error::InvalidUsage(text.clone()));
            }
            return;
        }
        for (rank, part) in group.into_iter().zip(instance.parts) {
            let Some(part) = part else { continue };
            let done = self.soon(0);
            self.at(done, SimEvent::Complete(rank, part.token));
        }
    }

    /// Reads everything, then writes everything.
    fn carry_out(&mut self, call: Call, parts: &[&Part]) -> std::result::Result<(), String> {
        let mut results = Vec::new();
        for (member, part) in parts.iter().enumerate() {
            for (index, block) in part.dst.iter().enumerate() {
                let mut result: Option<Vec<u8>> = None;
                for (source, source_index) in sources(&call, member, index) {
                    let from = parts[source].src.get(source_index).filter(|from| from.bytes == block.bytes);
                    let Some(from) = from else {
                        let name = call.collective.name();
                        return Err(format!("call of {name}: blocks of members {source} and {member} differ"));
                    };
                    let Some(memory) = &self.memory else { continue };
                    let bytes = memory[call.group[source].index()].read(&from.pieces);
                    match &mut result {
                        Some(sum) => self.arithmetic.add(sum, &bytes),
                        None => result = Some(bytes),
                    }
                }
                if let Some(result) = result {
                    results.push((call.group[member], &block.pieces, result));
                }
            }
        }
        let Some(memory) = &mut self.memory else { return Ok(()) };
        for (rank, pieces, mut result) in results {
            if call.finish {
                self.arithmetic.finish(&mut result);
            }
            if !memory[rank.index()].write(pieces, &result) {
                return Err(String::from("a call's block changed its size"));
            }
        }
        Ok(())
    }
}

/// The inputs (member, block) whose sum is a member's output block.
fn sources(call: &Call, member: usize, block: usize) -> Vec<(usize, usize)> {
    let members = 0..call.group.len();
    match call.collective {
        Collective::AllReduce | Collective::Reduce => members.map(|source| (source, 0)).collect(),
        Collective::ReduceScatter => members.map(|source| (source, member)).collect(),
        Collective::AllGather | Collective::Gather => vec![(block, 0)],
        Collective::Broadcast => vec![(call.root, 0)],
        Collective::AllToAll => vec![(block, member)],
        Collective::Scatter => vec![(call.root, member)],
        Collective::Custom => Vec::new(),
    }
}

/// What a call is to its provider: the largest member's bytes.
fn work(instance: &Instance, now_ns: u64) -> CallWork {
    let sum = |blocks: &[Block]| blocks.iter().map(|block| block.bytes).sum::<usize>();
    let mut work = CallWork { now_ns, bytes: 0, packed: 0, unpacked: 0 };
    for part in instance.parts.iter().flatten() {
        let [packed, unpacked] = part.scattered;
        work.bytes = work.bytes.max(sum(&part.src)).max(sum(&part.dst));
        work.packed = work.packed.max(packed);
        work.unpacked = work.unpacked.max(unpacked);
    }
    work
}

/// The bytes of these blocks, unless they lie one after another.
fn scattered(blocks: &[&[Piece]]) -> usize {
    let mut pieces = blocks.iter().flat_map(|block| block.iter());
    let Some(mut last) = pieces.next() else { return 0 };
    for piece in pieces {
        if piece.buffer != last.buffer || piece.offset != last.offset + last.len {
            return blocks.iter().map(|block| bytes_in(block)).sum();
        }
        last = piece;
    }
    0
}
