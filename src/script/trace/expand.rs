//! From the steps of a trace to transfers: every instance and part by itself, in the chunks and buffers of the script, without
//! steps that nobody needs the result of.
#![forbid(unsafe_code)]

use super::buffers::Cell;
use super::{BadTrace, Directives, InstancePolicy, Trace, TraceBuffer, TraceOp, TracePlace, TraceStep, MAX_MOVED};
use crate::plan::contract::{Contract, Promise};
use crate::script::{xml, Place, ScriptBuffer};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Chunks of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Spot {
    pub rank: u32,
    pub place: Place,
}

impl Spot {
    /// The spot that lies so many chunks further on.
    pub fn plus(self, offset: u32) -> Spot {
        Spot { place: self.place.plus(offset), ..self }
    }
}

/// A step of the script to be: a message, or work within a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkMove {
    pub op: TraceOp,
    pub src: Spot,
    pub dst: Spot,
    pub count: u32,
    pub directives: Directives,
    /// Which instance of the trace, and which part of a fragment. Those of different lanes share no channel.
    pub lane: u32,
    /// The step of the trace.
    pub step: u32,
}

/// A trace in the script's terms.
#[derive(Debug, Clone)]
pub(super) struct Expanded {
    pub transfers: Vec<ChunkMove>,
    /// Chunks of the script for each chunk of the trace.
    pub factor: u32,
    /// Scratch of each rank, in chunks of the script.
    pub scratch: Vec<u32>,
    /// Chunks of the script in a block.
    pub per_block: u32,
    /// The contract in the chunks of the script.
    pub contract: Option<Arc<Contract>>,
}

/// Where chunks of the trace lie among those of the script.
struct Layout {
    instances: u32,
    /// Parts into which a chunk of an instance is divided, so that all fragments' numbers of parts divide it.
    parts: u32,
    policy: InstancePolicy,
    /// By rank and name: where a scratch buffer begins, and how long it is, in chunks of the trace.
    scratch: FxHashMap<(u32, TraceBuffer), (u32, u32)>,
}

/// The transfers of a trace, in its order.
pub(super) fn expand(trace: &Trace, steps: &[(u32, TraceStep)]) -> Result<Expanded, BadTrace> {
    let (parts, most_parts) = fragments(steps)?;
    let factor = parts * trace.instances;
    let chunks = u64::from(trace.chunks) * u64::from(trace.blocks()) * u64::from(factor);
    if chunks > u64::from(xml::MAX_CHUNKS) {
        let text = format!("divided by {factor}, buffers have {chunks} chunks, more than {}", xml::MAX_CHUNKS);
        return Err(BadTrace::new(text));
    }
    let moved: u64 = steps.iter().map(|(_, step)| u64::from(step.count) * u64::from(factor)).sum();
    if moved > MAX_MOVED {
        return Err(BadTrace::new(format!(
            "divided by {factor}, the steps move {moved} chunks, more than {MAX_MOVED}"
        )));
    }
    let (scratch, lengths) = scratch(trace, steps, factor)?;
    let layout = Layout { instances: trace.instances, parts, policy: trace.policy, scratch };
    let mut transfers = Vec::new();
    for (number, step) in steps {
        let pieces = step.parallel.map_or(1, |(parts, _)| parts);
        for instance in 0..trace.instances {
            for piece in 0..pieces {
                let at = |place: &TracePlace| layout.spot(trace, place, step.count, (instance, piece, pieces));
                transfers.push(ChunkMove {
                    op: step.op,
                    src: at(&step.src),
                    dst: at(&step.dst),
                    count: step.count * parts / pieces,
                    directives: step.directives,
                    lane: instance * most_parts + piece,
                    step: *number,
                });
            }
        }
    }
    let transfers = live(trace, factor, transfers);
    let contract = contract(trace, factor, transfers.iter().any(|transfer| transfer.op == TraceOp::Reduce));
    let per_buffer = trace.chunks * trace.blocks() * factor;
    let blocks = contract.as_ref().map_or(trace.blocks(), |contract| contract.blocks() as u32);
    Ok(Expanded { transfers, factor, scratch: lengths, per_block: per_buffer / blocks, contract })
}

/// The least number of parts that all fragments' numbers divide, and the most of a fragment.
fn fragments(steps: &[(u32, TraceStep)]) -> Result<(u32, u32), BadTrace> {
    let (mut common, mut most) = (1u32, 1);
    let mut known: FxHashMap<u32, u32> = FxHashMap::default();
    for (number, step) in steps.iter().map(|(number, step)| (*number as usize, step)) {
        let Some((parts, fragment)) = step.parallel else { continue };
        let first = *known.entry(fragment).or_insert(parts);
        if first != parts {
            let text = format!("{}: fragment {fragment} has {first} parts, not {parts}", step.title(number));
            return Err(BadTrace { step: Some(number), text });
        }
        let (mut one, mut other) = (common, parts);
        while other != 0 {
            (one, other) = (other, one % other);
        }
        common = (common / one).saturating_mul(parts);
        most = most.max(parts);
        if common > xml::MAX_CHUNKS {
            let text = format!("{}: the numbers of parts have no small common multiple", step.title(number));
            return Err(BadTrace { step: Some(number), text });
        }
    }
    Ok((common, most))
}

type ScratchPlaces = FxHashMap<(u32, TraceBuffer), (u32, u32)>;

/// Where each scratch buffer begins, one after another, and how much each rank has.
fn scratch(trace: &Trace, steps: &[(u32, TraceStep)], factor: u32) -> Result<(ScratchPlaces, Vec<u32>), BadTrace> {
    let mut lengths: Vec<Vec<(TraceBuffer, u32)>> = vec![trace.scratch.clone(); trace.nranks as usize];
    for (_, step) in steps {
        for place in [&step.src, &step.dst] {
            if !matches!(place.buffer, TraceBuffer::Scratch(_)) {
                continue;
            }
            let end = place.index + step.count;
            let of_rank = &mut lengths[place.rank as usize];
            match of_rank.iter_mut().find(|(name, _)| *name == place.buffer) {
                Some((_, length)) => *length = end.max(*length),
                None => of_rank.push((place.buffer.clone(), end)),
            }
        }
    }
    let mut places = FxHashMap::default();
    let mut totals = Vec::with_capacity(lengths.len());
    for (rank, of_rank) in (0u32..).zip(lengths) {
        let mut total = 0u64;
        for (name, length) in of_rank {
            places.insert((rank, name), (total as u32, length));
            total += u64::from(length);
            if total * u64::from(factor) >= u64::from(xml::MAX_CHUNKS) {
                let most = xml::MAX_CHUNKS;
                return Err(BadTrace::new(format!("rank {rank} has {most} chunks of scratch or more")));
            }
        }
        totals.push(total as u32 * factor);
    }
    Ok((places, totals))
}

impl Layout {
    /// Where a piece of an instance of some chunks begins.
    fn spot(&self, trace: &Trace, place: &TracePlace, count: u32, part: (u32, u32, u32)) -> Spot {
        let (instance, piece, pieces) = part;
        let cell = trace.cell(place.rank, &place.buffer, place.index);
        let (buffer, (begin, length)) = match &cell.buffer {
            TraceBuffer::Input => (ScriptBuffer::Input, (0, trace.chunks * trace.blocks())),
            TraceBuffer::Output => (ScriptBuffer::Output, (0, trace.chunks * trace.blocks())),
            name => {
                let found = self.scratch.get(&(cell.rank, name.clone())).copied();
                (ScriptBuffer::Scratch, found.unwrap_or_default())
            }
        };
        let begin = begin * self.instances * self.parts;
        // All buffers are divided alike, so a step over several chunks can be cut anywhere.
        let offset = match self.policy {
            InstancePolicy::Interleaved => {
                let all = self.instances * pieces;
                cell.index * self.instances * self.parts
                    + (instance * pieces + piece) * (count * self.instances * self.parts / all)
            }
            InstancePolicy::Blocked => {
                (instance * length + cell.index) * self.parts + piece * (count * self.parts / pieces)
            }
        };
        Spot { rank: cell.rank, place: Place { buffer, chunk: begin + offset } }
    }
}

/// The transfers of which something is wanted in the end.
fn live(trace: &Trace, factor: u32, transfers: Vec<ChunkMove>) -> Vec<ChunkMove> {
    // Whether what a spot holds at some time is wanted later; of those that are not here the end decides.
    let mut wanted: FxHashMap<Spot, bool> = FxHashMap::default();
    let mut kept = Vec::with_capacity(transfers.len());
    for transfer in transfers.into_iter().rev() {
        let spots = |first: Spot| (0..transfer.count).map(move |offset| first.plus(offset));
        let is_wanted = |spot: Spot, wanted: &FxHashMap<Spot, bool>| {
            wanted.get(&spot).copied().unwrap_or_else(|| is_wanted(trace, factor, spot))
        };
        if !spots(transfer.dst).any(|spot| is_wanted(spot, &wanted)) {
            continue;
        }
        wanted.extend(spots(transfer.dst).map(|spot| (spot, transfer.op == TraceOp::Reduce)));
        wanted.extend(spots(transfer.src).map(|spot| (spot, true)));
        kept.push(transfer);
    }
    kept.reverse();
    kept
}

/// Whether the caller wants what a spot holds in the end.
pub(super) fn is_wanted(trace: &Trace, factor: u32, spot: Spot) -> bool {
    let buffer = match spot.place.buffer {
        ScriptBuffer::Input => TraceBuffer::Input,
        ScriptBuffer::Output => TraceBuffer::Output,
        ScriptBuffer::Scratch => return false,
    };
    // Where instances have blocks of their own the buffer is one block, and all of it is wanted or nothing.
    trace.is_wanted(&Cell { rank: spot.rank, buffer, index: spot.place.chunk / factor })
}

/// The same with messages of neighbouring chunks, and work on them, joined: steps that stand one after another, between the
/// same ranks and with the same directives, whose sources one earlier step has written, or none. With each its number.
pub(super) fn joined(trace: &Trace, steps: &[TraceStep]) -> Vec<(u32, TraceStep)> {
    let mut writers: FxHashMap<Cell, usize> = FxHashMap::default();
    let mut joined: Vec<(u32, TraceStep)> = Vec::with_capacity(steps.len());
    for (number, step) in (0u32..).zip(steps) {
        let cells = |place: &TracePlace| trace.cells(place, step.count).unwrap_or_default();
        let source = cells(&step.src);
        let goes_on = joined.last().is_some_and(|(_, before)| {
            let first = trace.cell(before.src.rank, &before.src.buffer, before.src.index);
            let writer = writers.get(&first);
            continues(trace, before, step) && source.iter().all(|cell| writers.get(cell) == writer)
        });
        match joined.last_mut().filter(|_| goes_on) {
            Some((_, before)) => before.count += step.count,
            None => joined.push((number, step.clone())),
        }
        writers.extend(cells(&step.dst).into_iter().map(|cell| (cell, joined.len())));
    }
    joined
}

/// Whether a step goes on where the one before it ends, and touches nothing of it.
fn continues(trace: &Trace, before: &TraceStep, next: &TraceStep) -> bool {
    let follows = |one: &TracePlace, other: &TracePlace| {
        (one.rank, &one.buffer, one.index + before.count) == (other.rank, &other.buffer, other.index)
    };
    let cell = |place: &TracePlace| trace.cell(place.rank, &place.buffer, place.index);
    let (src, dst) = (cell(&before.src), cell(&before.dst));
    let apart =
        src.rank != dst.rank || src.buffer != dst.buffer || src.index.abs_diff(dst.index) >= before.count + next.count;
    apart
        && (before.op, before.directives, before.parallel) == (next.op, next.directives, next.parallel)
        && follows(&before.src, &next.src)
        && follows(&before.dst, &next.dst)
}

/// A contract in the chunks of the script.
fn contract(trace: &Trace, factor: u32, combines: bool) -> Option<Arc<Contract>> {
    let contract = trace.contract.as_ref()?;
    let (length, parts) = (trace.chunks, factor / trace.instances);
    // Which chunk of the trace a chunk of the script is a part of, and which part.
    let of_trace = |chunk: u32| match trace.policy {
        InstancePolicy::Interleaved => (chunk / factor, chunk % factor),
        InstancePolicy::Blocked => {
            let (instance, rest) = (chunk / (length * parts), chunk % (length * parts));
            (rest / parts, instance * parts + rest % parts)
        }
    };
    let of_script = |chunk: u32, part: u32| match trace.policy {
        InstancePolicy::Interleaved => chunk * factor + part,
        InstancePolicy::Blocked => (part / parts * length + chunk) * parts + part % parts,
    };
    let refined = |outputs: &Vec<Promise>| {
        let chunks = 0..length * factor;
        chunks
            .map(|chunk| {
                let (chunk, part) = of_trace(chunk);
                match outputs[chunk as usize] {
                    Promise::Anything => Promise::Anything,
                    Promise::Chunk { rank, chunk } => Promise::Chunk { rank, chunk: of_script(chunk, part) },
                    Promise::Reduction { chunk } => Promise::Reduction { chunk: of_script(chunk, part) },
                }
            })
            .collect()
    };
    let refined = Contract::new(contract.outputs().iter().map(refined).collect());
    Some(Arc::new(refined.combining(combines)))
}
