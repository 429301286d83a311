//! A plan whose messages leave from scratch memory, which peers on the node can read in place.
//!
//! Ordinary user memory can be read by another process only through the kernel, page by page; scratch is shared memory.
//! Copying a segment there first costs one copy that stays in cache, and then every receiver reads or reduces it
//! directly. The messages themselves do not change, so each rank decides for itself.
#![forbid(unsafe_code)]

use super::{chunks_in, Action, Lane, Plan, Span, Spans, Step, StepRef};
use crate::topo::Rank;

/// The plan with a copy to scratch before each send for which `wanted` says so (receiver, source). Sends of the same
/// data in a row share one copy.
pub fn stage(plan: &Plan, wanted: &dyn Fn(Rank, &[Span]) -> bool) -> Plan {
    let mut scratch = plan.scratch_chunks as usize;
    let mut positions: Vec<Vec<u32>> = Vec::with_capacity(plan.lanes.len());
    let mut lanes: Vec<Lane> = Vec::with_capacity(plan.lanes.len());
    for lane in &plan.lanes {
        let (mut steps, mut places) = (Vec::with_capacity(lane.steps.len()), Vec::with_capacity(lane.steps.len()));
        let mut staged: Option<(&Spans, Spans)> = None;
        for step in &lane.steps {
            match &step.action {
                Action::Send { to, channel, src } if wanted(*to, src) => {
                    let known = staged.take().filter(|(source, _)| *source == src);
                    let shared = known.is_some();
                    let (_, copy) = known.unwrap_or_else(|| (src, slots(src, &mut scratch)));
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
    for step in lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
        for StepRef { lane, step } in &mut step.deps {
            *step = positions[*lane as usize][*step as usize];
        }
    }
    Plan { lanes, scratch_chunks: scratch as u32, ..plan.clone() }
}

/// Fresh scratch slots for a list of chunks.
fn slots(src: &[Span], scratch: &mut usize) -> Spans {
    let mut next = *scratch;
    *scratch += chunks_in(src);
    let slot = |span: &Span| {
        next += span.len as usize;
        Span::scratch(next - span.len as usize, span.len as usize, span.like as usize)
    };
    src.iter().map(slot).collect()
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
            lanes: vec![Lane { steps: vec![send(1), send(2)] }, Lane { steps: vec![wait] }],
        };
        let staged = stage(&plan, &|_, _| true);
        assert_eq!(staged.scratch_chunks, 5);
        assert_eq!(staged.lanes[0].steps.len(), 3, "one copy and two sends");
        assert_eq!(staged.lanes[1].steps[0].deps, [StepRef { lane: 0, step: 2 }]);
        let only_rank_1 = stage(&plan, &|to, _| to == Rank(1));
        assert_eq!(only_rank_1.lanes[0].steps[2], plan.lanes[0].steps[1]);
    }
}
