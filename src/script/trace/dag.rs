//! The instructions of a trace: what each rank does of each transfer, and which of its own instructions must have come first.
#![forbid(unsafe_code)]

use super::expand::{is_wanted, ChunkMove, Expanded, Spot};
use super::{Trace, TraceOp};
use crate::script::{Place, ScriptBuffer, ScriptStepKind};
use rustc_hash::FxHashMap;

/// An instruction of the same rank that comes before another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dep {
    pub before: u32,
    /// The lowest position in a block of the chunks that both touch: a message proves this order only if it has bytes
    /// whenever those chunks have.
    pub position: u32,
    /// It reads what the other has written. A receive that reduces may read before its message has come.
    pub is_read: bool,
}

impl Dep {
    /// Two of one instruction on another as one.
    pub fn with(self, other: Dep) -> Dep {
        Dep { position: self.position.min(other.position), is_read: self.is_read || other.is_read, ..self }
    }
}

/// A step of the script to be, of one rank.
#[derive(Debug, Clone)]
pub(super) struct Instruction {
    pub kind: ScriptStepKind,
    pub rank: u32,
    pub src: Place,
    pub dst: Place,
    pub count: u32,
    /// The step of the trace.
    pub step: u32,
    pub lane: u32,
    /// The channel that the trace asks for.
    pub channel: Option<u16>,
    /// The thread block that the trace asks for.
    pub label: Option<u32>,
    /// The message it sends.
    pub sends: Option<u32>,
    /// The message it receives.
    pub receives: Option<u32>,
    pub deps: Vec<Dep>,
    /// Another does its work too.
    pub is_fused: bool,
}

/// A message between two ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    pub sender: u32,
    pub receiver: u32,
    pub from: u32,
    pub to: u32,
    /// The lowest position in a block of its chunks.
    pub position: u32,
}

/// The instructions of all ranks, in an order in which they could run one after another.
#[derive(Debug)]
pub(super) struct Dag {
    pub instructions: Vec<Instruction>,
    pub messages: Vec<Message>,
    /// Which instructions read what an instruction has written.
    pub uses: Vec<Vec<u32>>,
    /// Whether something is left in the end of what an instruction has written, and wanted.
    pub is_kept: Vec<bool>,
}

/// What a spot holds, and who has to do with it.
#[derive(Debug, Default)]
struct Held {
    writer: Option<u32>,
    readers: Vec<u32>,
    position: u32,
}

struct Builder {
    per_block: u32,
    held: FxHashMap<Spot, Held>,
    dag: Dag,
}

impl Dag {
    /// The instructions of transfers.
    pub fn new(trace: &Trace, expanded: &Expanded) -> Dag {
        let dag = Dag { instructions: Vec::new(), messages: Vec::new(), uses: Vec::new(), is_kept: Vec::new() };
        let mut builder = Builder { per_block: expanded.per_block, held: FxHashMap::default(), dag };
        for transfer in &expanded.transfers {
            builder.transfer(transfer);
        }
        let Builder { held, mut dag, .. } = builder;
        for (spot, held) in held {
            if let Some(writer) = held.writer.filter(|_| is_wanted(trace, expanded.factor, spot)) {
                dag.is_kept[writer as usize] = true;
            }
        }
        dag
    }
}

impl Builder {
    fn transfer(&mut self, transfer: &ChunkMove) {
        let ChunkMove { op, src, dst, count, .. } = *transfer;
        let reduces = op == TraceOp::Reduce;
        let positions: Vec<u32> = (0..count).map(|offset| self.held(src.plus(offset)).position).collect();
        if src.rank == dst.rank {
            let kind = if reduces { ScriptStepKind::Reduce } else { ScriptStepKind::Copy };
            let at = self.push(transfer, kind, transfer.directives.send_tb);
            self.reads(at, src, count);
            if reduces {
                self.reads(at, dst, count);
            }
            self.writes(at, dst, &positions);
            return;
        }
        let send = self.push(transfer, ScriptStepKind::Send, transfer.directives.send_tb);
        self.reads(send, src, count);
        let kind = if reduces { ScriptStepKind::RecvReduceCopy } else { ScriptStepKind::Recv };
        let recv = self.push(transfer, kind, transfer.directives.recv_tb);
        if reduces {
            self.reads(recv, dst, count);
        }
        self.writes(recv, dst, &positions);
        let message = self.dag.messages.len() as u32;
        self.dag.instructions[send as usize].sends = Some(message);
        self.dag.instructions[recv as usize].receives = Some(message);
        let position = positions.into_iter().min().unwrap_or(0);
        self.dag.messages.push(Message { sender: send, receiver: recv, from: src.rank, to: dst.rank, position });
    }

    fn push(&mut self, transfer: &ChunkMove, kind: ScriptStepKind, label: Option<u32>) -> u32 {
        let ChunkMove { src, dst, count, directives, lane, step, .. } = *transfer;
        // A sender has no destination of its own, and a receiver that reduces does so where it writes.
        let (rank, src, dst) = match kind {
            ScriptStepKind::Send => (src.rank, src.place, src.place),
            ScriptStepKind::Recv | ScriptStepKind::RecvReduceCopy => (dst.rank, dst.place, dst.place),
            _ => (src.rank, src.place, dst.place),
        };
        self.dag.instructions.push(Instruction {
            kind,
            rank,
            src,
            dst,
            count,
            step,
            lane,
            channel: directives.channel,
            label,
            sends: None,
            receives: None,
            deps: Vec::new(),
            is_fused: false,
        });
        self.dag.uses.push(Vec::new());
        self.dag.is_kept.push(false);
        self.dag.instructions.len() as u32 - 1
    }

    fn held(&mut self, spot: Spot) -> &mut Held {
        let per_block = self.per_block;
        self.held.entry(spot).or_insert_with(|| Held {
            position: match spot.place.buffer {
                ScriptBuffer::Scratch => u32::MAX,
                _ => spot.place.chunk % per_block,
            },
            ..Held::default()
        })
    }

    fn reads(&mut self, at: u32, first: Spot, count: u32) {
        for offset in 0..count {
            let held = self.held(first.plus(offset));
            let (writer, position) = (held.writer, held.position);
            if held.readers.last() != Some(&at) {
                held.readers.push(at);
            }
            let Some(writer) = writer else { continue };
            self.depends(at, Dep { before: writer, position, is_read: true });
            let uses = &mut self.dag.uses[writer as usize];
            if uses.last() != Some(&at) {
                uses.push(at);
            }
        }
    }

    fn writes(&mut self, at: u32, first: Spot, positions: &[u32]) {
        for (offset, &position) in (0u32..).zip(positions) {
            let held = self.held(first.plus(offset));
            let readers = std::mem::take(&mut held.readers);
            let writer = held.writer.replace(at);
            let lowest = position.min(held.position);
            held.position = position;
            // Whoever reads has waited for the one that wrote.
            let others = readers.into_iter().filter(|&reader| reader != at);
            let before: Vec<u32> = others.collect();
            match (before.is_empty(), writer) {
                (false, _) => {
                    before
                        .into_iter()
                        .for_each(|before| self.depends(at, Dep { before, position: lowest, is_read: false }));
                }
                (true, Some(writer)) => self.depends(at, Dep { before: writer, position: lowest, is_read: false }),
                (true, None) => {}
            }
        }
    }

    fn depends(&mut self, at: u32, new: Dep) {
        let deps = &mut self.dag.instructions[at as usize].deps;
        match deps.iter_mut().rev().find(|dep| dep.before == new.before) {
            Some(dep) => *dep = dep.with(new),
            None => deps.push(new),
        }
    }
}
