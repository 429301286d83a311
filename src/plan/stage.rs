//! A plan whose messages leave from scratch memory, which peers on the node can read in place.
//!
//! Ordinary user memory can be read by another process only through the kernel, page by page; scratch is shared memory.
//! Copying a segment there first costs one copy that stays in cache, and then every receiver reads or reduces it
//! directly. The messages themselves do not change, so each rank decides for itself.
#![forbid(unsafe_code)]

use super::{chunks_in, is_coded, Action, Lane, Plan, Span, Spans, Step, StepRef};
use crate::topo::Rank;
use rustc_hash::FxHashMap;

/// Who asks for sends from scratch: by receiver and source.
pub type Wanted<'a> = dyn Fn(Rank, &[Span]) -> bool + 'a;

/// The plan with a copy to scratch before each send for which `wanted` says so (receiver, source). Sends of the same
/// data share one copy: those in a row, and those of several lanes that read what cannot have changed between them.
pub fn stage(plan: &Plan, wanted: &Wanted<'_>) -> Plan {
    // Coded chunks are in scratch, and nowhere else are they coded.
    let wanted: &Wanted<'_> = &|to, src| !is_coded(src) && wanted(to, src);
    let mut scratch = plan.scratch_chunks as usize;
    let shared = shared_copies(plan, wanted, &mut scratch);
    let mut positions: Vec<Vec<u32>> = Vec::with_capacity(plan.lanes.len());
    let mut lanes: Vec<Lane> = Vec::with_capacity(plan.lanes.len() + shared.copies.len());
    for (number, lane) in (0u32..).zip(&plan.lanes) {
        let (mut steps, mut places) = (Vec::with_capacity(lane.steps.len()), Vec::with_capacity(lane.steps.len()));
        let mut staged: Option<(&Spans, Spans)> = None;
        for (at, step) in (0u32..).zip(&lane.steps) {
            match &step.action {
                Action::Send { to, channel, src } if wanted(*to, src) => {
                    if let Some(&copy) = shared.of_send.get(&StepRef { lane: number, step: at }) {
                        let src = shared.copies[copy].dst.clone();
                        let action = Action::Send { to: *to, channel: *channel, src };
                        // Numbered as if all lanes came before the copies', which is where they are put.
                        let made = StepRef { lane: (plan.lanes.len() + copy) as u32, step: 0 };
                        steps.push(Step { action, deps: vec![made] });
                        places.push(steps.len() as u32 - 1);
                        continue;
                    }
                    let known = staged.take().filter(|(source, _)| *source == src);
                    let shared = known.is_some();
                    let (_, copy) = known.unwrap_or_else(|| (src, slots(plan, src, &mut scratch)));
                    if !shared {
                        let action = Action::Copy { src: src.clone(), dst: copy.clone(), start: false, finish: false };
                        steps.push(Step { action, deps: step.deps.clone() });
                    }
                    let deps = if shared { step.deps.clone() } else { Vec::new() };
                    steps.push(Step { action: Action::Send { to: *to, channel: *channel, src: copy.clone() }, deps });
                    staged = Some((src, copy));
                }
                action => {
                    if !matches!(action, Action::Send { .. }) {
                        staged = None;
                    }
                    steps.push(step.clone());
                }
            }
            places.push(steps.len() as u32 - 1);
        }
        positions.push(places);
        lanes.push(Lane { steps });
    }
    positions.resize(plan.lanes.len() + shared.copies.len(), vec![0]);
    lanes.extend(shared.copies.into_iter().map(|SharedCopy { src, dst, deps }| {
        let action = Action::Copy { src, dst, start: false, finish: false };
        Lane { steps: vec![Step { action, deps }] }
    }));
    for step in lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
        for StepRef { lane, step } in &mut step.deps {
            *step = positions[*lane as usize][*step as usize];
        }
    }
    Plan { lanes, scratch_chunks: scratch as u32, ..plan.clone() }
}

/// A copy to scratch, and what it waits for.
struct SharedCopy {
    src: Spans,
    dst: Spans,
    deps: Vec<StepRef>,
}

/// Copies that sends of several lanes share, each in a lane of its own: no send waits for another one's lane.
#[derive(Default)]
struct SharedCopies {
    copies: Vec<SharedCopy>,
    /// By send which of the copies.
    of_send: FxHashMap<StepRef, usize>,
}

/// Sends of different lanes that read the same chunks and wait for the same steps. What they read is the same for all of them where
/// each is the first step of its lane (what comes before one comes before all, and the plan has no races), or where every write
/// of these chunks comes before what they wait for.
fn shared_copies(plan: &Plan, wanted: &Wanted<'_>, scratch: &mut usize) -> SharedCopies {
    let mut groups: FxHashMap<(&Spans, Vec<StepRef>), Vec<StepRef>> = FxHashMap::default();
    let mut order = Vec::new();
    for (number, lane) in (0u32..).zip(&plan.lanes) {
        for (at, Step { action, deps }) in (0u32..).zip(&lane.steps) {
            let Action::Send { to, src, .. } = action else { continue };
            if wanted(*to, src) {
                let mut deps = deps.clone();
                deps.sort_unstable();
                let group = groups.entry((src, deps.clone())).or_default();
                if group.is_empty() {
                    order.push((src, deps));
                }
                group.push(StepRef { lane: number, step: at });
            }
        }
    }
    let mut shared = SharedCopies::default();
    for key in order {
        let sends = &groups[&key];
        let (src, deps) = key;
        let in_one_lane = sends.iter().all(|send| send.lane == sends[0].lane);
        let all_first = sends.iter().all(|send| send.step == 0);
        if in_one_lane || !(all_first || writes_come_before(plan, src, &deps)) {
            continue;
        }
        shared.of_send.extend(sends.iter().map(|&send| (send, shared.copies.len())));
        let dst = slots(plan, src, scratch);
        shared.copies.push(SharedCopy { src: src.clone(), dst, deps });
    }
    shared
}

/// Whether all steps of this rank that write some of the chunks come before one of `deps` or are one.
fn writes_come_before(plan: &Plan, chunks: &[Span], deps: &[StepRef]) -> bool {
    // One past the last step of each lane that comes before.
    let mut before = vec![0; plan.lanes.len()];
    let mut open = deps.to_vec();
    while let Some(StepRef { lane, step }) = open.pop() {
        let end = &mut before[lane as usize];
        let from = *end;
        *end = from.max(step + 1);
        let steps = plan.lanes[lane as usize].steps.get(from as usize..=step as usize).unwrap_or_default();
        open.extend(steps.iter().flat_map(|step| &step.deps));
    }
    let overlaps = |one: &Span, other: &Span| match one.buffer == other.buffer {
        true => one.start < other.start + other.len && other.start < one.start + one.len,
        // In place the one buffer is in the other, wherever.
        false => plan.shape.in_place && !one.buffer.is_own() && !other.buffer.is_own(),
    };
    let changes = |step: &Step| {
        let (_, writes) = step.action.lists();
        writes.iter().any(|spans| spans.iter().any(|span| chunks.iter().any(|chunk| overlaps(span, chunk))))
    };
    let mut later = plan.lanes.iter().zip(&before).flat_map(|(lane, &before)| lane.steps.iter().skip(before as usize));
    !later.any(changes)
}

/// Fresh scratch slots for a list of chunks.
fn slots(plan: &Plan, src: &[Span], scratch: &mut usize) -> Spans {
    let mut next = *scratch;
    *scratch += chunks_in(src);
    let slot = |span: Span| {
        next += span.len as usize;
        Span::scratch(next - span.len as usize, span.len as usize, span.like as usize)
    };
    plan.in_row(src).map(slot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Collective, Shape};
    use crate::topo::Grid;
    use std::sync::Arc;

    #[test]
    fn sends_of_the_same_data_in_a_row_share_one_copy() {
        let send = |to| Step::from(Action::Send { to: Rank(to), channel: 0, src: vec![Span::input(0, 1)] });
        let wait = Step { action: Action::Nop, deps: vec![StepRef { lane: 0, step: 1 }] };
        let plan = Plan {
            shape: Shape::new(Collective::AllGather, Arc::new(Grid::flat(3))),
            rank: Rank(0),
            algorithm: String::new(),
            chunks_per_block: 1,
            scratch_chunks: 4,
            coded: None,
            lanes: vec![Lane { steps: vec![send(1), send(2)] }, Lane { steps: vec![wait] }],
        };
        let staged = stage(&plan, &|_, _| true);
        assert_eq!(staged.scratch_chunks, 5);
        assert_eq!(staged.lanes[0].steps.len(), 3, "one copy and two sends");
        assert_eq!(staged.lanes[1].steps[0].deps, [StepRef { lane: 0, step: 2 }]);
        let only_rank_1 = stage(&plan, &|to, _| to == Rank(1));
        assert_eq!(only_rank_1.lanes[0].steps[2], plan.lanes[0].steps[1]);
    }

    /// A plan of two lanes that send output 0 after lane 0, which ends with a receive into it, and maybe one that writes there again.
    fn two_senders(again: bool) -> Plan {
        let send = |to| Action::Send { to: Rank(to), channel: 0, src: vec![Span::output(0, 1)] };
        let recv = |at| Action::Recv { from: Rank(1), channel: 0, dst: vec![Span::output(at, 1)] };
        let after = |lane| vec![StepRef { lane, step: 0 }];
        let lane = |to| Lane { steps: vec![Step::from(Action::Nop), Step { action: send(to), deps: after(0) }] };
        let last = Step { action: recv(usize::from(!again)), deps: [after(1), after(2)].concat() };
        Plan {
            shape: Shape::new(Collective::AllGather, Arc::new(Grid::flat(3))),
            rank: Rank(0),
            algorithm: String::new(),
            chunks_per_block: 1,
            scratch_chunks: 0,
            coded: None,
            lanes: vec![Lane { steps: vec![recv(0).into()] }, lane(1), lane(2), Lane { steps: vec![last] }],
        }
    }

    #[test]
    fn sends_of_several_lanes_share_a_copy_of_what_does_not_change_between_them() {
        let plan = two_senders(false);
        let staged = stage(&plan, &|_, _| true);
        assert_eq!((staged.scratch_chunks, staged.lanes.len()), (1, 5));
        let copy = &staged.lanes[4].steps[0];
        assert!(matches!(copy.action, Action::Copy { .. }) && copy.deps == [StepRef { lane: 0, step: 0 }]);
        for lane in &staged.lanes[1..3] {
            assert_eq!(lane.steps[1].deps, [StepRef { lane: 4, step: 0 }]);
        }
        assert_eq!(stage(&two_senders(true), &|_, _| true).scratch_chunks, 2, "written again: a copy each");
        assert_eq!(stage(&plan, &|to, _| to == Rank(1)).scratch_chunks, 1);
        assert_eq!(stage(&plan, &|_, _| false), plan);
    }
}
