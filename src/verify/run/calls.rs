//! Calls in a run: matched among their members, then carried out at once.
//!
//! The n-th call of a rank on a group meets the n-th call of every other member on that group. So that all members mean
//! the same by "n-th", and providers that run calls in the order of their issue cannot block each other, a rank's calls
//! on groups with two members in common must be ordered.
#![forbid(unsafe_code)]

use super::*;

impl<'a> SymbolicRun<'a> {
    /// Issues a call; the last member to do so carries it out.
    pub(super) fn call(&mut self, step: u32, call: &'a Call) -> Verdict<bool> {
        let count = self.join(step)?;
        let group = self.index.steps[step as usize].link;
        let members = call.group.len();
        let me = call.group.iter().position(|member| member.index() == self.index.rank(step)).unwrap_or(0);
        let gathering = self
            .gatherings
            .entry((group, count))
            .or_insert_with(|| Gathering { steps: vec![NONE; members], missing: members });
        if gathering.steps[me] != NONE {
            return Ok(false);
        }
        gathering.steps[me] = step;
        gathering.missing -= 1;
        if gathering.missing > 0 {
            return Ok(false);
        }
        let Some(gathering) = self.gatherings.remove(&(group, count)) else { return Ok(false) };
        self.carry_out(&gathering.steps)?;
        let lane_rounds = |&step: &u32| self.lanes[self.index.steps[step as usize].lane as usize].rounds;
        let rounds = gathering.steps.iter().map(lane_rounds).max().unwrap_or(0) + 1;
        for &step in &gathering.steps {
            let lane = self.index.steps[step as usize].lane;
            self.lanes[lane as usize].rounds = rounds;
            self.order.execute(step);
            self.move_on(step);
            self.complete(step);
            self.wake(lane);
        }
        self.report.calls += 1;
        Ok(true)
    }

    /// Notes that a rank issues a call, after all it must be ordered after. Returns its number on its group.
    fn join(&mut self, step: u32) -> Verdict<u32> {
        let rank = self.index.rank(step);
        let group = self.index.steps[step as usize].link;
        let known = self.last_calls[rank].iter().position(|entry| entry.0 == group);
        if let Some(at) = known {
            let last = self.last_calls[rank][at].1;
            if last.step == step {
                // The lane was woken while it waits for the other members.
                return Ok(last.count);
            }
        }
        let filled = if self.index.vectored { Filled::NOTHING } else { Filled::LOWEST };
        for at in 0..self.last_calls[rank].len() {
            let (other, last) = self.last_calls[rank][at];
            if !self.overlap(group, other) {
                continue;
            }
            let ordered = self.completed[last.step as usize]
                && self.order.is_before(self.index, last.step, (step, false), filled);
            if !ordered {
                let text =
                    format!("nothing orders this call after {}, with members in common", self.index.name(last.step));
                return self.index.reject(Check::Calls, step, text);
            }
        }
        let Some(at) = known else {
            self.last_calls[rank].push((group, LastCall { step, count: 0 }));
            return Ok(0);
        };
        let last = &mut self.last_calls[rank][at].1;
        *last = LastCall { step, count: last.count + 1 };
        Ok(last.count)
    }

    /// Whether two groups have two members in common.
    fn overlap(&mut self, a: u32, b: u32) -> bool {
        if a == b {
            return self.index.groups[a as usize].len() > 1;
        }
        let key = (a.min(b), a.max(b));
        if let Some(&known) = self.overlaps.get(&key) {
            return known;
        }
        let set: std::collections::HashSet<Rank> = self.index.groups[a as usize].iter().copied().collect();
        let common = self.index.groups[b as usize].iter().filter(|member| set.contains(member)).count();
        self.overlaps.insert(key, common > 1);
        common > 1
    }

    fn carry_out(&mut self, steps: &[u32]) -> Verdict {
        let calls = self.check_equal(steps)?;
        let first = calls[0];
        let made = Made::Call { collective: first.collective, members: calls.len() as u32, root: first.root as u32 };
        let mut reads = Vec::with_capacity(calls.len());
        let mut inputs = Vec::with_capacity(calls.len());
        for (&step, call) in steps.iter().zip(&calls) {
            let (mut chunks, mut blocks) = (Chunks::new(), Vec::new());
            for spans in &call.src {
                let (places, values) = self.load(step, spans)?;
                self.check_started(step, &values)?;
                chunks.extend(places);
                blocks.push(values);
            }
            reads.push(chunks);
            inputs.push(blocks);
        }
        self.order.called(steps);
        let mut shared = None;
        for (me, (&step, call)) in steps.iter().zip(&calls).enumerate() {
            let mut writes = Chunks::new();
            let mut results = Values::new();
            for (block, spans) in call.dst.iter().enumerate() {
                let values = match first.collective {
                    Collective::AllReduce if shared.is_some() => shared.clone().unwrap_or_default(),
                    Collective::AllReduce | Collective::Reduce => self.fold(step, made, &inputs, 0)?,
                    Collective::ReduceScatter => self.fold(step, made, &inputs, me)?,
                    Collective::AllGather | Collective::Gather => inputs[block][0].clone(),
                    Collective::AllToAll => inputs[block][me].clone(),
                    Collective::Broadcast => inputs[first.root][0].clone(),
                    Collective::Scatter => inputs[first.root][me].clone(),
                    Collective::Custom => {
                        let text = "a custom collective cannot be called within another".to_string();
                        return self.index.reject(Check::Calls, step, text);
                    }
                };
                if first.collective == Collective::AllReduce {
                    shared.get_or_insert_with(|| values.clone());
                }
                self.check_call_length(step, values.len(), spans)?;
                results.extend(self.finish(step, values, first.finish)?);
                writes.extend(self.index.chunks(self.index.rank(step), spans));
            }
            self.access(step, &reads[me], &writes)?;
            self.put(step, &writes, &results)?;
        }
        Ok(())
    }

    /// The calls of all members, which must say the same.
    fn check_equal(&self, steps: &[u32]) -> Verdict<Vec<&'a Call>> {
        let mut calls: Vec<&'a Call> = Vec::with_capacity(steps.len());
        for &step in steps {
            let Action::Call(call) = self.index.steps[step as usize].action else { continue };
            let first = *calls.first().unwrap_or(&call);
            let same = call.collective == first.collective
                && call.root == first.root
                && call.level == first.level
                && call.finish == first.finish;
            if !same {
                let rank = first.group[0];
                return self.index.reject(Check::Calls, step, format!("the call differs from rank {rank}'s"));
            }
            calls.push(call);
        }
        let first = calls[0];
        if first.finish && !first.collective.reduces() {
            return self.index.reject(
                Check::Epilogue,
                steps[0],
                format!("{} has no epilogue", first.collective.name()),
            );
        }
        Ok(calls)
    }

    fn fold(&mut self, step: u32, made: Made, inputs: &[Vec<Values>], block: usize) -> Verdict<Values> {
        let mut folded = inputs[0][block].clone();
        for member in &inputs[1..] {
            if member[block].len() != folded.len() {
                return self.index.reject(Check::Calls, step, "the members' parts differ in size".into());
            }
            folded = self.combine(step, made, &folded, &member[block])?;
        }
        Ok(folded)
    }

    fn check_call_length(&self, step: u32, count: usize, dst: &[Span]) -> Verdict {
        let room = crate::plan::chunks_in(dst);
        if count != room {
            let text = format!("a part of {count} chunks arrives where {room} are expected");
            return self.index.reject(Check::Calls, step, text);
        }
        Ok(())
    }
}
