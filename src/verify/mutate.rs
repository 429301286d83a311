//! Mutants: plans with one thing changed, to test that the verifier notices.
//!
//! A mutant that the verifier accepts must be *equivalent*: as good a plan as the original, which
//! [`oracle::try_out`] decides on its own, by running it.
#![forbid(unsafe_code)]

use super::{oracle, verify, Options};
use crate::plan::{Action, Buffer, Call, Collective, LinkLevel, OperandOrder, Plan, Span, Spans, Step, StepRef};
use crate::topo::Rank;

/// What became of the mutants of some plans.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MutantOutcome {
    /// How many there are.
    pub mutants: usize,
    /// How many were rejected.
    pub killed: usize,
    /// How many were accepted and work.
    pub equivalent: usize,
    /// Those that were accepted and do not work: what was changed, and how they fail.
    pub missed: Vec<(String, String)>,
}

/// Verifies every mutant of plans, which should be small, and tries out what is accepted. The capacity must be at
/// least 1.
pub fn kill(plans: &[Plan], options: &Options) -> MutantOutcome {
    let mut outcome = MutantOutcome::default();
    for (name, mutant) in mutants(plans) {
        outcome.mutants += 1;
        if verify(&mutant, options).is_err() {
            outcome.killed += 1;
        } else if let Err(text) = oracle::try_out(&mutant, options.capacity) {
            outcome.missed.push((name, text));
        } else {
            outcome.equivalent += 1;
        }
    }
    outcome
}

/// All mutants of plans, each with a description of what was changed.
pub fn mutants(plans: &[Plan]) -> impl Iterator<Item = (String, Vec<Plan>)> + '_ {
    let ranks = plans.iter().enumerate();
    ranks.flat_map(move |(rank, plan)| {
        let edits = plan_edits(plan).into_iter().chain(plan_steps(plan).flat_map(|at| step_edits(plan, at)));
        edits.map(move |(name, mutant)| {
            let mut mutants = plans.to_vec();
            mutants[rank] = mutant;
            (format!("rank {rank}: {name}"), mutants)
        })
    })
}

fn plan_steps(plan: &Plan) -> impl Iterator<Item = StepRef> + '_ {
    plan.lanes.iter().enumerate().flat_map(|(lane, steps)| {
        (0..steps.steps.len()).map(move |step| StepRef { lane: lane as u32, step: step as u32 })
    })
}

/// Changes to what a plan says about itself.
fn plan_edits(plan: &Plan) -> Vec<(String, Plan)> {
    let mut edits: Vec<(String, Plan)> = Vec::new();
    let mut edit = |name: &str, change: &dyn Fn(&mut Plan)| {
        let mut mutant = plan.clone();
        change(&mut mutant);
        edits.push((name.into(), mutant));
    };
    edit("one chunk more in a block", &|plan| plan.chunks_per_block += 1);
    edit("one chunk less in a block", &|plan| plan.chunks_per_block -= 1);
    edit("one scratch slot more", &|plan| plan.scratch_chunks += 1);
    if plan.scratch_chunks > 0 {
        edit("one scratch slot less", &|plan| plan.scratch_chunks -= 1);
    }
    edit("in place turned", &|plan| plan.shape.in_place ^= true);
    edit("prologue turned", &|plan| plan.shape.prologue ^= true);
    edit("another root", &|plan| plan.shape.root.0 += 1);
    edit("another rank", &|plan| plan.rank.0 += 1);
    edit("the lanes joined to one", &|plan| {
        // References no longer fit and are dropped.
        let mut steps: Vec<Step> = plan.lanes.drain(..).flat_map(|lane| lane.steps).collect();
        steps.iter_mut().for_each(|step| step.deps.clear());
        plan.lanes.push(crate::plan::Lane { steps });
    });
    for lane in 0..plan.lanes.len() {
        edit(&format!("lane {lane} emptied"), &|plan| {
            plan.lanes[lane].steps.iter_mut().for_each(|step| *step = Action::Nop.into());
        });
    }
    edits
}

/// Changes to one step, or to its place in its lane.
fn step_edits(plan: &Plan, at: StepRef) -> Vec<(String, Plan)> {
    let lane = at.lane as usize;
    let position = at.step as usize;
    let step = &plan.lanes[lane].steps[position];
    let mut changed: Vec<(String, Step)> = Vec::new();
    for (name, action) in action_edits(plan, &step.action) {
        changed.push((name, Step { action, deps: step.deps.clone() }));
    }
    for (name, deps) in dep_edits(plan, at) {
        changed.push((name, Step { action: step.action.clone(), deps }));
    }
    changed.push(("left out".into(), Step { action: Action::Nop, deps: step.deps.clone() }));
    changed.push(("left out with its dependencies".into(), Action::Nop.into()));
    let mut edits = Vec::new();
    for (name, step) in changed {
        let mut mutant = plan.clone();
        mutant.lanes[lane].steps[position] = step;
        edits.push((format!("step {lane}.{position}: {name}"), mutant));
    }
    let mut repeated = plan.clone();
    repeated.lanes[lane].steps.insert(position, step.clone());
    renumber(&mut repeated, lane, |step| step + u32::from(step >= at.step));
    edits.push((format!("step {lane}.{position}: done twice"), repeated));
    if position + 1 < plan.lanes[lane].steps.len() {
        let mut swapped = plan.clone();
        swapped.lanes[lane].steps.swap(position, position + 1);
        renumber(&mut swapped, lane, |step| match step {
            _ if step == at.step => step + 1,
            _ if step == at.step + 1 => step - 1,
            _ => step,
        });
        edits.push((format!("step {lane}.{position}: swapped with the next"), swapped));
    }
    edits
}

/// Lets references to a lane follow its steps to their new places.
fn renumber(plan: &mut Plan, lane: usize, place: impl Fn(u32) -> u32) {
    let steps = plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps);
    for dep in steps.flat_map(|step| &mut step.deps).filter(|dep| dep.lane as usize == lane) {
        dep.step = place(dep.step);
    }
}

fn dep_edits(plan: &Plan, at: StepRef) -> Vec<(String, Vec<StepRef>)> {
    let deps = &plan.lanes[at.lane as usize].steps[at.step as usize].deps;
    let mut edits = Vec::new();
    for (i, dep) in deps.iter().enumerate() {
        let name = |what: &str| format!("dependency on {}.{} {what}", dep.lane, dep.step);
        let with = |changed: StepRef| {
            let mut deps = deps.clone();
            deps[i] = changed;
            deps
        };
        let mut fewer = deps.clone();
        fewer.remove(i);
        edits.push((name("dropped"), fewer));
        edits.push((name("on the step after"), with(StepRef { step: dep.step + 1, ..*dep })));
        edits.push((name("on the step before"), with(StepRef { step: dep.step.wrapping_sub(1), ..*dep })));
        edits.push((name("on the next lane"), with(StepRef { lane: dep.lane + 1, ..*dep })));
        edits.push((name("on the lane before"), with(StepRef { lane: dep.lane.wrapping_sub(1), ..*dep })));
    }
    for extra in plan_steps(plan) {
        let mut more = deps.clone();
        more.push(extra);
        edits.push((format!("dependency on {}.{} added", extra.lane, extra.step), more));
    }
    edits
}

fn action_edits(plan: &Plan, action: &Action) -> Vec<(String, Action)> {
    let mut edits = list_edits(plan, action);
    let mut edit = |name: &str, change: &dyn Fn(&mut Action)| {
        let mut mutant = action.clone();
        change(&mut mutant);
        if mutant != *action {
            edits.push((name.into(), mutant));
        }
    };
    for rank in 0..=plan.shape.nranks() as u32 {
        edit(&format!("peer {rank}"), &|action| match action {
            Action::Send { to: peer, .. } | Action::Recv { from: peer, .. } => *peer = Rank(rank),
            Action::RecvReduce { from: peer, .. } => *peer = Rank(rank),
            _ => {}
        });
    }
    for by in [1, u16::MAX] {
        edit("another channel", &|action| match action {
            Action::Send { channel, .. } | Action::Recv { channel, .. } => *channel = channel.wrapping_add(by),
            Action::RecvReduce { channel, .. } => *channel = channel.wrapping_add(by),
            _ => {}
        });
    }
    edit("operands exchanged", &|action| match action {
        Action::RecvReduce { order: order @ OperandOrder::LocalFirst, .. } => *order = OperandOrder::IncomingFirst,
        Action::RecvReduce { order, .. } => *order = OperandOrder::LocalFirst,
        Action::Reduce { srcs, .. } => srcs.reverse(),
        _ => {}
    });
    edit("operands rotated", &|action| {
        if let Action::Reduce { srcs, .. } = action {
            srcs.rotate_left(1);
        }
    });
    for count in [1, 3] {
        edit(&format!("{count} operands"), &|action| {
            if let Action::Reduce { srcs, .. } = action {
                let first = srcs.first().cloned().unwrap_or_default();
                srcs.resize(count, first);
            }
        });
    }
    edit("finish turned", &|action| match action {
        Action::RecvReduce { finish, .. } | Action::Copy { finish, .. } => *finish ^= true,
        Action::Reduce { finish, .. } => *finish ^= true,
        Action::Call(call) => call.finish ^= true,
        _ => {}
    });
    edit("start turned", &|action| {
        if let Action::Copy { start, .. } = action {
            *start ^= true;
        }
    });
    edit("another kind of step", &change_kind);
    if let Action::Call(call) = action {
        edits.extend(call_edits(plan, call).into_iter().map(|(name, call)| (name, Action::Call(call))));
    }
    edits
}

/// Makes a step one of another kind with the same lists.
fn change_kind(action: &mut Action) {
    match action.clone() {
        Action::RecvReduce { from, channel, dst, .. } => *action = Action::Recv { from, channel, dst },
        Action::Recv { from, channel, dst } => {
            let (local, order) = (dst.clone(), OperandOrder::LocalFirst);
            *action = Action::RecvReduce { from, channel, local, dst, order, finish: false };
        }
        Action::Copy { src, dst, start, finish } => *action = Action::Copy { src: dst, dst: src, start, finish },
        Action::Reduce { mut srcs, dst, finish } => {
            let src = srcs.swap_remove(0);
            *action = Action::Copy { src, dst, start: false, finish };
        }
        _ => {}
    }
}

fn call_edits(plan: &Plan, call: &Call) -> Vec<(String, Call)> {
    let mut edits: Vec<(String, Call)> = Vec::new();
    let mut edit = |name: &str, change: &dyn Fn(&mut Call)| {
        let mut mutant = call.clone();
        change(&mut mutant);
        if mutant != *call {
            edits.push((name.into(), mutant));
        }
    };
    for collective in Collective::ALL {
        edit(collective.name(), &|call| call.collective = collective);
    }
    edit("another level", &|call| {
        call.level = match call.level {
            LinkLevel::Node => LinkLevel::Rail,
            LinkLevel::Rail => LinkLevel::All,
            LinkLevel::All => LinkLevel::Node,
        };
    });
    edit("another root", &|call| call.root += 1);
    edit("members reversed", &|call| call.group.reverse());
    for member in 0..call.group.len() {
        edit("a member left out", &|call| {
            call.group.remove(member);
        });
        for rank in 0..=plan.shape.nranks() as u32 {
            edit("another member", &|call| call.group[member] = Rank(rank));
        }
    }
    edit("input blocks reversed", &|call| call.src.reverse());
    edit("output blocks reversed", &|call| call.dst.reverse());
    edit("an input block left out", &|call| drop(call.src.pop()));
    edit("an output block left out", &|call| drop(call.dst.pop()));
    edit("an input block more", &|call| call.src.push(Vec::new()));
    edit("an output block more", &|call| call.dst.push(Vec::new()));
    edits
}

/// Changes to the lists of spans of an action.
fn list_edits(plan: &Plan, action: &Action) -> Vec<(String, Action)> {
    let mut edits = Vec::new();
    let count = lists_mut(&mut action.clone()).len();
    for list in 0..count {
        let spans = lists_mut(&mut action.clone())[list].clone();
        for (name, changed) in span_edits(plan, &spans) {
            let mut mutant = action.clone();
            *lists_mut(&mut mutant)[list] = changed;
            edits.push((format!("list {list}: {name}"), mutant));
        }
    }
    edits
}

/// All lists of an action.
fn lists_mut(action: &mut Action) -> Vec<&mut Spans> {
    match action {
        Action::Send { src: list, .. } | Action::Recv { dst: list, .. } => vec![list],
        Action::RecvReduce { local, dst, .. } => vec![local, dst],
        Action::Copy { src, dst, .. } => vec![src, dst],
        Action::Reduce { srcs, dst, .. } => srcs.iter_mut().chain([dst]).collect(),
        Action::Call(call) => call.src.iter_mut().chain(&mut call.dst).collect(),
        Action::Nop => vec![],
    }
}

fn span_edits(plan: &Plan, spans: &Spans) -> Vec<(String, Spans)> {
    let mut edits: Vec<(String, Spans)> = Vec::new();
    let per_block = plan.chunks_per_block;
    for at in 0..spans.len() {
        let mut edit = |name: &str, change: &dyn Fn(&mut Span)| {
            let mut mutant = spans.clone();
            change(&mut mutant[at]);
            edits.push((format!("span {at} {name}"), mutant));
        };
        for by in [1, per_block, u32::MAX] {
            edit("begins elsewhere", &|span| span.start = span.start.wrapping_add(by));
            edit("is elsewhere", &|span| {
                span.start = span.start.wrapping_add(by);
                span.like = span.like.wrapping_add(by);
            });
            edit("has another size", &|span| span.like = span.like.wrapping_add(by));
        }
        edit("is longer", &|span| span.len += 1);
        edit("is shorter", &|span| span.len -= 1);
        edit("has no end", &|span| span.len = u32::MAX);
        for buffer in [Buffer::Input, Buffer::Output, Buffer::Scratch, Buffer::Coded] {
            if buffer != spans[at].buffer {
                edit("is in another buffer", &|span| span.buffer = buffer);
            }
        }
        let (mut fewer, mut more) = (spans.clone(), spans.clone());
        fewer.remove(at);
        more.insert(at, spans[at]);
        edits.push((format!("span {at} left out"), fewer));
        edits.push((format!("span {at} twice"), more));
    }
    if spans.len() > 1 {
        edits.push(("spans reversed".into(), spans.iter().rev().copied().collect()));
    }
    edits
}
