//! What a thread block does, one operation after another, with `re` steps in a row folded into one and `nop`s turned into
//! dependencies.
//!
//! Files write a reduction of several operands as several `re`s, in whatever order suited the writer, and each rank has its
//! own. As one fold its operands can stand in an order that all ranks share.
#![forbid(unsafe_code)]

use super::{Place, RankScript, ScriptStep, ScriptStepKind, ThreadBlock};
use rustc_hash::FxHashSet;

/// Consecutive chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunks {
    pub first: Place,
    pub count: u32,
}

impl Chunks {
    pub fn places(self) -> impl Iterator<Item = Place> {
        let Place { buffer, chunk } = self.first;
        (chunk..chunk + self.count).map(move |chunk| Place { buffer, chunk })
    }
}

/// What an operation does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OpKind {
    Send {
        src: Chunks,
    },
    Recv {
        dst: Chunks,
        forward: bool,
    },
    /// Without a destination the result is only sent on.
    RecvReduce {
        src: Chunks,
        dst: Option<Chunks>,
        forward: bool,
    },
    Copy {
        src: Chunks,
        dst: Chunks,
    },
    /// The destination becomes itself, reduced with all sources.
    Fold {
        dst: Chunks,
        srcs: Vec<Chunks>,
    },
    Nop,
}

/// An operation of a thread block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ScriptOp {
    pub kind: OpKind,
    /// The step of the script that it comes from, or the first of them.
    pub step: u32,
    /// Steps of the rank that must have ended, by thread block and number.
    pub deps: Vec<(u32, u32)>,
}

/// The operations of a thread block.
#[derive(Debug, Default)]
pub(super) struct BlockOps {
    pub ops: Vec<ScriptOp>,
    /// For each step of the script the operation with whose end it has ended.
    pub op_of_step: Vec<u32>,
}

/// The operations of all thread blocks of a rank.
pub(super) fn of_rank(rank: &RankScript) -> Vec<BlockOps> {
    let waited_for: FxHashSet<(u32, u32)> =
        rank.blocks.iter().flat_map(|block| &block.steps).filter_map(|step| step.dep).collect();
    let blocks = (0u32..).zip(&rank.blocks);
    blocks.map(|(number, block)| of_block(block, &|step| waited_for.contains(&(number, step)))).collect()
}

fn of_block(block: &ThreadBlock, is_waited_for: &dyn Fn(u32) -> bool) -> BlockOps {
    let mut all = BlockOps::default();
    let mut deps = Vec::new();
    let mut at = 0;
    while at < block.steps.len() {
        let step = &block.steps[at];
        deps.extend(step.dep);
        let mut end = at + 1;
        let kinds = match step.kind {
            ScriptStepKind::Nop if is_waited_for(at as u32) => vec![OpKind::Nop],
            ScriptStepKind::Nop => Vec::new(),
            ScriptStepKind::Reduce => {
                end = window(&block.steps, at, is_waited_for);
                deps.extend(block.steps[at + 1..end].iter().filter_map(|step| step.dep));
                folds(&block.steps[at..end])
            }
            _ => vec![plain(step)],
        };
        for kind in kinds {
            // The first waits for all, and those after it come later.
            all.ops.push(ScriptOp { kind, step: at as u32, deps: std::mem::take(&mut deps) });
        }
        // A `nop` that nobody waits for ends with the operation after it; nobody asks.
        all.op_of_step.resize(end, (all.ops.len() as u32).saturating_sub(1));
        at = end;
    }
    all
}

fn plain(step: &ScriptStep) -> OpKind {
    let (src, dst) = (Chunks { first: step.src, count: step.count }, Chunks { first: step.dst, count: step.count });
    match step.kind {
        ScriptStepKind::Send => OpKind::Send { src },
        ScriptStepKind::Recv => OpKind::Recv { dst, forward: false },
        ScriptStepKind::RecvCopySend => OpKind::Recv { dst, forward: true },
        ScriptStepKind::RecvReduceCopy => OpKind::RecvReduce { src, dst: Some(dst), forward: false },
        ScriptStepKind::RecvReduceSend => OpKind::RecvReduce { src, dst: None, forward: true },
        ScriptStepKind::RecvReduceCopySend => OpKind::RecvReduce { src, dst: Some(dst), forward: true },
        ScriptStepKind::Copy => OpKind::Copy { src, dst },
        ScriptStepKind::Reduce => OpKind::Fold { dst, srcs: vec![src] },
        ScriptStepKind::Nop => OpKind::Nop,
    }
}

/// One past the last step that can be folded with the `re` at `begin`: `re`s and `nop`s, none of which writes what another
/// reads, and of which nobody waits for any but the last.
fn window(steps: &[ScriptStep], begin: usize, is_waited_for: &dyn Fn(u32) -> bool) -> usize {
    let (mut read, mut written) = (FxHashSet::default(), FxHashSet::default());
    let places = |first, count| Chunks { first, count }.places();
    let mut end = begin;
    for (at, step) in steps.iter().enumerate().skip(begin) {
        match step.kind {
            ScriptStepKind::Reduce => {
                let clashes = places(step.src, step.count).any(|place| written.contains(&place))
                    || places(step.dst, step.count).any(|place| read.contains(&place));
                if clashes && at > begin {
                    break;
                }
                read.extend(places(step.src, step.count));
                written.extend(places(step.dst, step.count));
                end = at + 1;
            }
            ScriptStepKind::Nop => {}
            _ => break,
        }
        if is_waited_for(at as u32) {
            break;
        }
    }
    end
}

/// The folds of a window, one for each run of chunks that have their sources alike.
fn folds(steps: &[ScriptStep]) -> Vec<OpKind> {
    let reduces = steps.iter().filter(|step| step.kind == ScriptStepKind::Reduce);
    let mut operands: Vec<(Place, Vec<Place>)> = Vec::new();
    let mut known = rustc_hash::FxHashMap::default();
    for step in reduces {
        for offset in 0..step.count {
            let (src, dst) = (step.src.plus(offset), step.dst.plus(offset));
            let index = *known.entry(dst).or_insert_with(|| {
                operands.push((dst, Vec::new()));
                operands.len() - 1
            });
            operands[index].1.push(src);
        }
    }
    operands.sort_by_key(|(dst, _)| *dst);
    let continues = |(dst, srcs): &(Place, Vec<Place>), (next, others): &(Place, Vec<Place>)| {
        *next == dst.plus(1)
            && srcs.len() == others.len()
            && srcs.iter().zip(others).all(|(src, other)| *other == src.plus(1))
    };
    let runs = operands.chunk_by(|one, next| continues(one, next));
    let fold = |run: &[(Place, Vec<Place>)]| {
        let chunks = |first| Chunks { first, count: run.len() as u32 };
        OpKind::Fold { dst: chunks(run[0].0), srcs: run[0].1.iter().map(|&src| chunks(src)).collect() }
    };
    runs.map(fold).collect()
}

impl Place {
    /// The chunk that lies so many further on.
    pub(super) fn plus(self, offset: u32) -> Place {
        Place { chunk: self.chunk + offset, ..self }
    }
}
