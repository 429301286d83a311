//! Instructions that one step can do together: what a rank receives and sends on, it sends on as it receives it.
#![forbid(unsafe_code)]

use super::dag::{Dag, Dep, Instruction};
use crate::script::ScriptStepKind;
use rustc_hash::FxHashSet;

impl Dag {
    /// Fuses sends into the receives whose data they send on, but for those that are forbidden to be.
    ///
    /// A send is fused that reads all that a receive has written and nothing else, so that nothing but the receive comes before
    /// it; of several the one from which the longest way leads on. A receive that reduces keeps no result that only the send
    /// reads.
    pub fn fuse(&mut self, forbidden: &FxHashSet<u32>) {
        let heights = self.heights();
        // What a fused message and those before it ask for, by the message that goes on.
        let mut channels: Vec<Option<u16>> =
            self.messages.iter().map(|message| self.instructions[message.sender as usize].channel).collect();
        for at in 0..self.instructions.len() {
            let receive = &self.instructions[at];
            let Some(received) = receive.receives else { continue };
            let fits = |send: &&u32| {
                let (number, send) = (**send, &self.instructions[**send as usize]);
                let Some(sent) = send.sends else { return false };
                send.kind == ScriptStepKind::Send
                    && !forbidden.contains(&number)
                    && send.deps.iter().all(|dep| dep.before == at as u32)
                    && (send.src, send.count, send.lane, send.label)
                        == (receive.dst, receive.count, receive.lane, receive.label)
                    && (channels[sent as usize].is_none()
                        || channels[received as usize].is_none()
                        || channels[sent as usize] == channels[received as usize])
            };
            // The first of those with the longest way.
            let best = self.uses[at].iter().filter(fits).rev().max_by_key(|&&send| heights[send as usize]).copied();
            let Some(send) = best else { continue };
            let Some(sent) = self.instructions[send as usize].sends else { continue };
            let channel = channels[received as usize].or(channels[sent as usize]);
            channels[sent as usize] = channel;
            let is_needed = self.is_kept[at] || self.uses[at].iter().any(|&user| user != send);
            let receive = &mut self.instructions[at];
            receive.kind = match (receive.kind, is_needed) {
                (ScriptStepKind::Recv, _) => ScriptStepKind::RecvCopySend,
                (_, true) => ScriptStepKind::RecvReduceCopySend,
                (_, false) => ScriptStepKind::RecvReduceSend,
            };
            receive.sends = Some(sent);
            self.messages[sent as usize].sender = at as u32;
            self.instructions[send as usize].is_fused = true;
            self.instructions[send as usize].deps = vec![Dep { before: at as u32, position: 0, is_read: true }];
        }
        self.follow();
    }

    /// Lets those that wait for a fused send wait for what does its work.
    fn follow(&mut self) {
        let stands_for: Vec<Option<u32>> = self
            .instructions
            .iter()
            .map(|send| send.deps.first().filter(|_| send.is_fused).map(|dep| dep.before))
            .collect();
        for at in 0..self.instructions.len() {
            let Instruction { deps, is_fused, .. } = &mut self.instructions[at];
            if *is_fused {
                deps.clear();
                continue;
            }
            for dep in deps.iter_mut() {
                dep.before = stands_for[dep.before as usize].unwrap_or(dep.before);
            }
            deps.sort_unstable_by_key(|dep| (dep.before, dep.position));
            deps.dedup_by(|next, kept| {
                let is_same = next.before == kept.before;
                *kept = if is_same { kept.with(*next) } else { *kept };
                is_same
            });
        }
    }

    /// The longest way from each instruction to an end, in instructions.
    fn heights(&self) -> Vec<u32> {
        let mut heights = vec![0u32; self.instructions.len()];
        for at in (0..self.instructions.len()).rev() {
            let instruction = &self.instructions[at];
            let height = heights[at] + 1;
            let sender = instruction.receives.map(|message| self.messages[message as usize].sender);
            for before in instruction.deps.iter().map(|dep| dep.before).chain(sender) {
                heights[before as usize] = heights[before as usize].max(height);
            }
        }
        heights
    }
}
