//! What a run must have come to: every step done, every message received, every output right.
#![forbid(unsafe_code)]

use super::*;
use crate::plan::contract::Promise;

impl SymbolicRun<'_> {
    /// Every lane must have come to its end, and every message to its receiver.
    pub(super) fn check_finished(&self) -> Verdict {
        for (lane, state) in self.index.lanes.iter().zip(&self.lanes) {
            if state.next < lane.end {
                return self.index.reject(Check::Progress, state.next, self.why_stuck(state.next));
            }
        }
        for channel in 0..self.index.channels.len() as u32 {
            if let Some(message) = self.channels.front(channel) {
                return self.index.reject(Check::Progress, message.send, "nobody receives the message".into());
            }
        }
        Ok(())
    }

    /// Follows what a step waits for to the step that waits for itself, or for something that never comes.
    fn why_stuck(&self, step: u32) -> String {
        let info = self.index.steps[step as usize];
        let rank = self.index.rank(step);
        let state = &self.lanes[info.lane as usize];
        if let Some(&dep) = info.deps.get(state.deps_done) {
            return format!("waits for ever for step {}.{}", dep.lane, dep.step);
        }
        match info.action {
            Action::Send { to, channel, .. } => {
                let capacity = self.options.capacity;
                format!("waits for ever for room on channel {channel} to rank {to}, of capacity {capacity}")
            }
            Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                format!("waits for ever for a message on channel {channel} from rank {from}")
            }
            Action::Call(call) => {
                let joined = |gathering: &&Gathering| gathering.steps.contains(&step);
                let missing = self.gatherings.values().find(joined).and_then(|gathering| {
                    let absent = gathering.steps.iter().position(|&step| step == NONE)?;
                    call.group.get(absent)
                });
                match missing {
                    Some(member) => format!("waits for ever for rank {member} to make the same call"),
                    None => format!("waits for ever for the other members of rank {rank}'s group"),
                }
            }
            _ => "never runs".into(),
        }
    }

    /// Every output chunk must be what the collective promises, and the same value on all ranks.
    pub(super) fn check_outputs(&mut self) -> Verdict {
        let mut trees = FxHashMap::default();
        for (rank, plan) in self.index.plans.iter().enumerate() {
            for chunk in 0..plan.chunks(Buffer::Output) as u32 {
                let place = self.index.user_place(rank, Buffer::Output, chunk);
                let value = self.values[place as usize];
                if let Err((check, text)) = self.check_output(rank, chunk, value, &mut trees) {
                    let writer = self.writers[place as usize];
                    let untouched = if writer == NONE && value != EMPTY { ", and no step writes it" } else { "" };
                    let ends_as = self.exprs.describe(value);
                    let text = format!("output chunk {chunk} ends as {ends_as}{untouched}; {text}");
                    if writer != NONE {
                        return self.index.reject(check, writer, text);
                    }
                    return Err(Rejection { check, rank: Rank(rank as u32), lane: None, step: None, text });
                }
            }
        }
        Ok(())
    }

    fn check_output(
        &mut self,
        rank: usize,
        chunk: u32,
        value: Expr,
        trees: &mut FxHashMap<u32, (Expr, usize)>,
    ) -> Result<(), Fault> {
        let shape = self.index.shape;
        let per_block = self.index.per_block;
        let (block, within, root) = (chunk / per_block, chunk % per_block, shape.root.index());
        let of_rank = rank as u32 * per_block + chunk;
        let promise = shape.contract.as_ref().map(|contract| contract.promise(rank, chunk as usize));
        let (from, wanted) = match shape.collective {
            Collective::Custom => match promise {
                None | Some(Promise::Anything) => return Ok(()),
                Some(Promise::Chunk { rank, chunk }) => (Some(rank as usize), chunk),
                Some(Promise::Reduction { chunk }) => (None, chunk),
            },
            Collective::AllReduce | Collective::Reduce => (None, chunk),
            Collective::ReduceScatter => (None, of_rank),
            Collective::Broadcast => (Some(root), chunk),
            Collective::Scatter => (Some(root), of_rank),
            Collective::AllGather | Collective::Gather => (Some(block as usize), within),
            Collective::AllToAll => (Some(block as usize), rank as u32 * per_block + within),
        };
        if value == EMPTY {
            return Err((Check::Completeness, "it was never written".into()));
        }
        let info = self.exprs.info(value);
        if info.coded {
            return Err((Check::Coding, "it is coded".into()));
        }
        if info.started != shape.prologue {
            return Err((Check::Epilogue, "its prologue is missing".into()));
        }
        if let Some(from) = from {
            let mut right = self.exprs.input(from, wanted);
            if shape.prologue {
                right = self.exprs.start(right);
            }
            if value != right && self.exprs.coded_once(right) != value {
                return Err((Check::Provenance, format!("wanted is {}", self.exprs.describe(right))));
            }
            if self.index.plans[rank].coded.is_some() {
                let (same, first) = *trees.entry(right).or_insert((value, rank));
                if same != value {
                    return Err((Check::Coding, format!("rank {first} has {}", self.exprs.describe(same))));
                }
            }
            return Ok(());
        }
        if info.chunk != wanted {
            return Err((Check::Provenance, format!("wanted is chunk {wanted}")));
        }
        if !self.exprs.is_full(value) {
            return Err((Check::Completeness, "contributions are missing".into()));
        }
        if !info.finished {
            return Err((Check::Epilogue, "the epilogue is missing".into()));
        }
        let (tree, first) = *trees.entry(wanted).or_insert((value, rank));
        if self.exprs.info(tree).codings != info.codings {
            return Err((Check::Coding, format!("rank {first} has {}", self.exprs.describe(tree))));
        }
        if tree != value {
            return Err((Check::SameTree, format!("rank {first} reduces it in another order")));
        }
        Ok(())
    }
}
