//! From a plan to calls of the vendor's library.
//!
//! The vendor's collectives want each block contiguous and all blocks of one size, one after another. A plan whose only
//! steps are [`Call`]s is written out in such collectives: one where a call's parts are contiguous as they are, else one
//! for each chunk, if chunk `i` of all members lies contiguous. Calls that do not depend on each other form a *phase*;
//! the phases run one after another, in the order of the caller's stream.
#![forbid(unsafe_code)]

use crate::plan::{Action, Buffer, Call, Collective, LinkLevel, Plan, Span, StepRef};
use std::collections::HashMap;

/// Consecutive chunks of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRun {
    /// The buffer.
    pub buffer: Buffer,
    /// The first chunk.
    pub start: usize,
}

/// One collective of the vendor's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VendorOp {
    /// Over the node's communicator or the rail's.
    pub level: LinkLevel,
    /// All-gather, reduce-scatter or all-reduce.
    pub collective: Collective,
    /// The send buffer.
    pub send: ChunkRun,
    /// The receive buffer.
    pub recv: ChunkRun,
    /// Chunks in one block.
    pub chunks: usize,
}

/// A plan, written out in the vendor's collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VendorPlan {
    /// What runs together; one phase after another.
    pub phases: Vec<Vec<VendorOp>>,
    /// Chunks in one block of the plan.
    pub chunks_per_block: usize,
    /// Chunks of scratch memory.
    pub scratch_chunks: usize,
}

/// Writes a plan out, or says why the vendor's collectives cannot do it.
pub fn lower(plan: &Plan) -> Result<VendorPlan, String> {
    let mut depths: HashMap<StepRef, usize> = HashMap::new();
    let mut phases: Vec<Vec<VendorOp>> = Vec::new();
    let mut open: Vec<StepRef> = refs(plan);
    while !open.is_empty() {
        let before = open.len();
        let mut waiting = Vec::new();
        for at in open {
            let Some(depth) = depth_of(plan, at, &depths) else {
                waiting.push(at);
                continue;
            };
            depths.insert(at, depth);
            match plan.step(at).map(|step| &step.action) {
                Some(Action::Call(call)) => {
                    phases.resize(phases.len().max(depth + 1), Vec::new());
                    phases[depth].extend(ops(call)?);
                }
                Some(Action::Nop) | None => {}
                Some(_) => return Err(format!("{} has steps that are not calls", plan.algorithm)),
            }
        }
        if waiting.len() == before {
            return Err(format!("{} waits for itself", plan.algorithm));
        }
        open = waiting;
    }
    let (chunks_per_block, scratch_chunks) = (plan.chunks_per_block as usize, plan.scratch_chunks as usize);
    Ok(VendorPlan { phases, chunks_per_block, scratch_chunks })
}

fn refs(plan: &Plan) -> Vec<StepRef> {
    let lanes = plan.lanes.iter().enumerate();
    lanes
        .flat_map(|(lane, steps)| {
            (0..steps.steps.len()).map(move |step| StepRef { lane: lane as u32, step: step as u32 })
        })
        .collect()
}

/// In which phase a step is, once that of all steps before it is known.
fn depth_of(plan: &Plan, at: StepRef, depths: &HashMap<StepRef, usize>) -> Option<usize> {
    let before = at.step.checked_sub(1).map(|step| StepRef { step, ..at });
    let step = plan.step(at)?;
    let mut depth = 0;
    for earlier in step.deps.iter().copied().chain(before) {
        depth = depth.max(depths.get(&earlier)? + 1);
    }
    Some(depth)
}

fn ops(call: &Call) -> Result<Vec<VendorOp>, String> {
    let op = |send, recv, chunks| VendorOp { level: call.level, collective: call.collective, send, recv, chunks };
    let no = || format!("the parts of a {} are not where the vendor wants them", call.collective.name());
    match call.collective {
        Collective::AllReduce => {
            let (send, chunks) = run(&call.src[0]).ok_or_else(no)?;
            let (recv, _) = run(&call.dst[0]).ok_or_else(no)?;
            Ok(vec![op(send, recv, chunks)])
        }
        Collective::AllGather => {
            let pairs = pair(&call.src[0], &call.dst).ok_or_else(no)?;
            Ok(pairs.into_iter().map(|(mine, all, chunks)| op(mine, all, chunks)).collect())
        }
        Collective::ReduceScatter => {
            let pairs = pair(&call.dst[0], &call.src).ok_or_else(no)?;
            Ok(pairs.into_iter().map(|(mine, all, chunks)| op(all, mine, chunks)).collect())
        }
        _ => Err(no()),
    }
}

/// The pieces of one member's part beside those of all members' parts: whole if they are contiguous, else chunk by chunk.
fn pair(mine: &[Span], all: &[Vec<Span>]) -> Option<Vec<(ChunkRun, ChunkRun, usize)>> {
    if let Some((mine, chunks)) = run(mine) {
        let runs: Option<Vec<(ChunkRun, usize)>> = all.iter().map(|part| run(part)).collect();
        if let Some(first) = runs.and_then(|runs| in_order(&runs, chunks)) {
            return Some(vec![(mine, first, chunks)]);
        }
    }
    let mine = chunks_of(mine);
    let all: Vec<Vec<ChunkRun>> = all.iter().map(|part| chunks_of(part)).collect();
    if all.iter().any(|part| part.len() != mine.len()) {
        return None;
    }
    let nth = |index: usize| -> Option<(ChunkRun, ChunkRun, usize)> {
        let runs: Vec<(ChunkRun, usize)> = all.iter().map(|part| (part[index], 1)).collect();
        Some((mine[index], in_order(&runs, 1)?, 1))
    };
    (0..mine.len()).map(nth).collect()
}

/// The first of these runs, if they lie one after another and all are so long.
fn in_order(runs: &[(ChunkRun, usize)], chunks: usize) -> Option<ChunkRun> {
    let first = runs.first()?.0;
    let follows = |(index, (run, len)): (usize, &(ChunkRun, usize))| {
        *len == chunks && run.buffer == first.buffer && run.start == first.start + index * chunks
    };
    runs.iter().enumerate().all(follows).then_some(first)
}

/// Spans as one run with its length, if they lie one after another.
fn run(spans: &[Span]) -> Option<(ChunkRun, usize)> {
    let chunks = chunks_of(spans);
    let pairs: Vec<(ChunkRun, usize)> = chunks.iter().map(|&chunk| (chunk, 1)).collect();
    Some((in_order(&pairs, 1)?, chunks.len()))
}

fn chunks_of(spans: &[Span]) -> Vec<ChunkRun> {
    let each = |span: &Span| {
        let (buffer, start) = (span.buffer, span.start as usize);
        (0..span.len as usize).map(move |index| ChunkRun { buffer, start: start + index })
    };
    spans.iter().flat_map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::{build_with_calls, Choice};
    use crate::plan::Shape;
    use crate::topo::{Grid, Rank};
    use std::sync::Arc;

    fn lowered(algorithm: &str, collective: Collective, grid: Grid) -> Result<VendorPlan, String> {
        let shape = Shape::new(collective, Arc::new(grid));
        lower(&build_with_calls(&Choice::leveled(algorithm, "direct", "log"), &shape, Rank(3)).unwrap())
    }

    fn text(lowered: &VendorPlan) -> Vec<Vec<String>> {
        let place = |run: &ChunkRun| format!("{:?}{}", run.buffer, run.start);
        let op = |op: &VendorOp| {
            format!("{:?} {} {} {} {}", op.level, op.collective.name(), place(&op.send), place(&op.recv), op.chunks)
        };
        lowered.phases.iter().map(|phase| phase.iter().map(op).collect()).collect()
    }

    #[test]
    fn an_all_gather_goes_over_the_rail_into_scratch_and_from_there_to_its_place() {
        let grid = || Grid::blocks(&[2, 2]);
        assert!(lowered("two_level", Collective::AllGather, grid()).is_err(), "every second block of the output");
        let staged = lowered("two_level_staged", Collective::AllGather, grid()).unwrap();
        assert_eq!(
            text(&staged),
            [
                vec!["Rail all_gather Input0 Scratch0 1"],
                vec!["Node all_gather Scratch0 Output0 1", "Node all_gather Scratch1 Output2 1"]
            ]
        );
        assert_eq!((staged.chunks_per_block, staged.scratch_chunks), (1, 2));
        assert!(lowered("two_level_shuffle", Collective::AllGather, grid()).is_err(), "a shuffle is no call");
    }

    #[test]
    fn ranks_dealt_out_in_turn_have_contiguous_rails_and_need_no_scratch() {
        let labels = ["a", "b", "a", "b"];
        let placed = lowered("two_level", Collective::AllGather, Grid::from_labels(&labels)).unwrap();
        assert_eq!(text(&placed), [["Rail all_gather Input0 Output2 1"], ["Node all_gather Output2 Output0 2"]]);
        assert_eq!(placed.scratch_chunks, 0);
    }

    #[test]
    fn a_reduce_scatter_reduces_each_node_s_blocks_and_then_over_the_rail() {
        let lowered = lowered("two_level", Collective::ReduceScatter, Grid::blocks(&[2, 2])).unwrap();
        assert_eq!(
            text(&lowered),
            [
                vec!["Node reduce_scatter Input0 Scratch0 1", "Node reduce_scatter Input2 Scratch1 1"],
                vec!["Rail reduce_scatter Scratch0 Output0 1"]
            ]
        );
    }

    #[test]
    fn an_all_reduce_is_three_collectives_in_its_output() {
        let lowered = lowered("two_level", Collective::AllReduce, Grid::blocks(&[2, 2])).unwrap();
        assert_eq!(
            text(&lowered),
            [
                ["Node reduce_scatter Input0 Output2 2"],
                ["Rail all_reduce Output2 Output2 2"],
                ["Node all_gather Output2 Output0 2"]
            ]
        );
    }

    #[test]
    fn uneven_nodes_are_left_to_the_vendor() {
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            for algorithm in ["two_level", "two_level_staged"] {
                let lowered = lowered(algorithm, Collective::AllGather, Grid::blocks(&[3, 1]));
                assert!(lowered.is_err(), "{collective:?} {lowered:?}");
            }
        }
    }
}
