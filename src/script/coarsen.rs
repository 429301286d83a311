//! Chunks that always move together, made one: what is left of a script's instances when their lanes are one ([`super::merge`]).
//!
//! A message of 24 chunks that lie apart is 24 pieces to send, reduce and copy. Where the chunks of a block fall into classes of which
//! every list of every plan has all or none, each class becomes one chunk, so the pieces of a message lie side by side. That
//! changes which elements of a block a chunk has; all chunks of a block are alike, so no promise speaks of it. A contract may tell
//! chunks of a block apart, so scripts with one stay as they are. Whether what comes out is right is for the verifier to say.
#![forbid(unsafe_code)]

use super::lower::joined;
use super::merge::{lists, with_lists};
use super::passes::one_by_one;
use crate::plan::{Buffer, Lane, Plan, Span, Spans, Step};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

/// The plans of all ranks in all forms with fewer chunks; none where no two chunks always move together.
pub(super) fn coarsened(forms: &[Vec<Plan>]) -> Option<Vec<Vec<Plan>>> {
    let first = forms.first()?.first()?;
    if first.chunks_per_block < 2 || first.shape.contract.is_some() {
        return None;
    }
    let classes = Classes::of(forms, first.chunks_per_block)?;
    let of_form = |plans: &Vec<Plan>| plans.iter().map(|plan| classes.applied(plan)).collect();
    forms.iter().map(of_form).collect()
}

/// The chunks of a block in classes of one size.
struct Classes {
    per_block: u32,
    size: u32,
    /// By chunk of a block: its class, and its place in the class.
    of_chunk: Vec<(u32, u32)>,
}

/// How often each chunk of a block has come in a list so far.
#[derive(Default)]
struct Seen(FxHashMap<u32, u32>);

impl Seen {
    fn next(&mut self, chunk: u32) -> u32 {
        let times = self.0.entry(chunk).or_default();
        *times += 1;
        *times - 1
    }
}

impl Classes {
    fn of(forms: &[Vec<Plan>], per_block: u32) -> Option<Classes> {
        // What is true of each chunk in all lists. What stands at one place of the lists of a step, or of both ends of a message,
        // is the same chunk of a block, wherever it lies.
        let mut traits = vec![0u64; per_block as usize];
        let mut number = 0u64;
        for step in forms.iter().flatten().flat_map(|plan| &plan.lanes).flat_map(|lane| &lane.steps) {
            for list in lists(&step.action) {
                let mut seen = Seen::default();
                number += 1;
                for chunk in one_by_one(list) {
                    let of_block = chunk.like % per_block;
                    let one = &mut traits[of_block as usize];
                    let mut hasher = FxHasher::default();
                    (*one, number, seen.next(of_block), chunk.buffer, block(&chunk, per_block)).hash(&mut hasher);
                    *one = hasher.finish();
                }
            }
        }
        let mut members: FxHashMap<u64, Vec<u32>> = FxHashMap::default();
        for (chunk, traits) in (0u32..).zip(traits) {
            members.entry(traits).or_default().push(chunk);
        }
        let size = members.values().fold(0, |size, class| greatest_common_divisor(size, class.len() as u32));
        if size < 2 {
            return None;
        }
        let mut parts: Vec<&[u32]> = members.values().flat_map(|class| class.chunks(size as usize)).collect();
        parts.sort_unstable();
        let mut of_chunk = vec![(0, 0); per_block as usize];
        for (class, part) in (0u32..).zip(parts) {
            for (at, &chunk) in (0u32..).zip(part) {
                of_chunk[chunk as usize] = (class, at);
            }
        }
        Some(Classes { per_block, size, of_chunk })
    }

    /// The plan with a chunk for each class; none where one of its lists has a part of a class.
    fn applied(&self, plan: &Plan) -> Option<Plan> {
        let mut slots = Slots::default();
        let mut lanes = Vec::with_capacity(plan.lanes.len());
        for lane in &plan.lanes {
            let mut steps: Vec<Step> = Vec::with_capacity(lane.steps.len());
            for step in &lane.steps {
                let of_classes = lists(&step.action).into_iter().map(|list| self.list(list, &mut slots));
                let of_classes: Vec<Spans> = of_classes.collect::<Option<_>>()?;
                let action = with_lists(&step.action, |nth| of_classes[nth].clone());
                steps.push(Step { action, deps: step.deps.clone() });
            }
            lanes.push(Lane { steps });
        }
        let (chunks_per_block, scratch_chunks) = (self.per_block / self.size, slots.of_chunks.len() as u32);
        Some(Plan { chunks_per_block, scratch_chunks, lanes, ..plan.clone() })
    }

    /// A list of chunks as classes, in the order in which the first of each comes.
    fn list(&self, chunks: &[Span], slots: &mut Slots) -> Option<Spans> {
        let mut found: FxHashMap<(u32, u32), usize> = FxHashMap::default();
        let mut classes: Vec<(u32, Vec<Option<Span>>)> = Vec::new();
        let mut seen = Seen::default();
        for chunk in one_by_one(chunks) {
            let of_block = chunk.like % self.per_block;
            let (class, at) = self.of_chunk[of_block as usize];
            let index = *found.entry((class, seen.next(of_block))).or_insert_with(|| {
                classes.push((class, vec![None; self.size as usize]));
                classes.len() - 1
            });
            classes[index].1[at as usize] = Some(chunk);
        }
        let one = |(class, chunks): (u32, Vec<Option<Span>>)| {
            let chunks: Vec<Span> = chunks.into_iter().collect::<Option<_>>()?;
            let place = |chunk: &Span| (chunk.buffer, block(chunk, self.per_block), chunk.like / self.per_block);
            let (buffer, block, like) = place(&chunks[0]);
            if chunks.iter().any(|chunk| place(chunk) != (buffer, block, like)) {
                return None;
            }
            let coarse = |block: u32| block * (self.per_block / self.size) + class;
            let start = if buffer == Buffer::Scratch { slots.of(&chunks)? } else { coarse(block) };
            Some(Span { buffer, start, len: 1, like: coarse(like) })
        };
        let all: Spans = classes.into_iter().map(one).collect::<Option<_>>()?;
        Some(joined(all))
    }
}

/// The block of the user's buffer in which a chunk lies.
fn block(chunk: &Span, per_block: u32) -> u32 {
    if chunk.buffer == Buffer::Scratch {
        chunk.like / per_block
    } else {
        chunk.start / per_block
    }
}

/// Scratch for classes, by the slots that their chunks had.
#[derive(Default)]
struct Slots {
    of_chunks: FxHashMap<Vec<u32>, u32>,
    owners: FxHashMap<u32, u32>,
}

impl Slots {
    /// None where a slot would have to be in two.
    fn of(&mut self, chunks: &[Span]) -> Option<u32> {
        let slots: Vec<u32> = chunks.iter().map(|chunk| chunk.start).collect();
        let next = self.of_chunks.len() as u32;
        let slot = *self.of_chunks.entry(slots.clone()).or_insert(next);
        let is_owner = slots.into_iter().all(|old| *self.owners.entry(old).or_insert(slot) == slot);
        is_owner.then_some(slot)
    }
}

fn greatest_common_divisor(mut one: u32, mut other: u32) -> u32 {
    while other > 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Collective;
    use crate::script::trace::{BadTrace, InstancePolicy as Policy, Trace};
    use crate::script::{optimized, prove, Script, ScriptForm};
    use crate::topo::{Grid, Rank};
    use std::sync::Arc;

    fn ring(ranks: u32, instances: u32, policy: Policy) -> Result<Script, BadTrace> {
        let trace = Trace::new("ring", Collective::AllReduce, ranks, ranks)?.in_place(true);
        let trace = trace.instances(instances).policy(policy);
        for index in 0..ranks {
            let mut sum = trace.chunk(index, "input", index, 1)?;
            for step in 1..ranks {
                sum = trace.chunk((index + step) % ranks, "input", index, 1)?.reduce(&sum)?;
            }
            for step in 0..ranks - 1 {
                sum = sum.copy((index + step) % ranks, "input", index)?;
            }
        }
        trace.compile()
    }

    fn plans(script: &Script) -> Vec<Vec<Plan>> {
        let grid = Arc::new(Grid::flat(script.nranks()));
        let form = |in_place| ScriptForm { in_place, prologue: false, root: Rank(0) };
        let proofs = [false, true].map(|in_place| prove(script, &grid, form(in_place)).unwrap());
        optimized(proofs.into()).into_iter().map(|proof| proof.lowered.plans).collect()
    }

    #[test]
    fn many_instances_have_the_plans_of_one() {
        let lanes = |instances, policy| -> Vec<Vec<Lane>> {
            let script = ring(4, instances, policy).unwrap();
            assert_eq!(script.chunks_per_block(), 4 * instances);
            plans(&script)
                .into_iter()
                .flatten()
                .inspect(|plan| assert_eq!(plan.chunks_per_block, 4))
                .map(|plan| plan.lanes)
                .collect()
        };
        let one = lanes(1, Policy::Interleaved);
        assert_eq!(lanes(24, Policy::Interleaved), one);
        assert_eq!(lanes(3, Policy::Blocked), one);
    }

    #[test]
    fn chunks_that_part_stay_chunks() {
        let once = plans(&ring(4, 1, Policy::Interleaved).unwrap());
        assert!(coarsened(&once).is_none(), "each chunk of a ring goes its own way");
        let mut twice = plans(&ring(4, 1, Policy::Interleaved).unwrap());
        for plan in twice.iter_mut().flatten() {
            plan.chunks_per_block = 8;
            for step in plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
                let double = |span: &Span| Span {
                    start: 2 * span.start,
                    len: 2 * span.len,
                    like: 2 * span.like,
                    buffer: span.buffer,
                };
                let of = |nth: usize| lists(&step.action)[nth].iter().map(double).collect();
                step.action = with_lists(&step.action, of);
            }
        }
        let coarse = coarsened(&twice).unwrap();
        assert!(coarse.iter().flatten().all(|plan| plan.chunks_per_block == 4));
        // One list of one rank that has a chunk without its fellow.
        let step = &mut twice[1][2].lanes[0].steps[0];
        let mut list = lists(&step.action)[0].clone();
        list[0].len = 1;
        step.action =
            with_lists(&step.action, |nth| if nth == 0 { list.clone() } else { lists(&step.action)[nth].clone() });
        assert!(coarsened(&twice).is_none());
    }
}
