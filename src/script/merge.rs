//! Lanes that do the same on other chunks, made one: instances of a script, or one ring on several channels.
//!
//! A script is written with many instances so that thread blocks enough fill a GPU's link. Where one thread moves the data, and on a
//! NIC, each instance is only one more message. Lanes of a rank are alike where their steps are, with the same peers, and where
//! what they wait for and exchange messages with are alike again: the coarsest partition in which that holds, found by
//! refinement. Each class becomes one lane, whose steps and messages have the chunks of all. Whether that is still right is for
//! the verifier to say.
#![forbid(unsafe_code)]

use super::lower::joined;
use crate::plan::{chunks_in, Action, Channel, Lane, Plan, Span, Spans, Step, StepRef};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

/// A partition that is finer still after so many rounds is not worth more.
const MOST_ROUNDS: usize = 64;

/// The class of each lane of each rank.
type Classes = Vec<Vec<u64>>;

/// The plans with lanes that are alike as one; none where no two are.
///
/// Calls have no instances: plans that make one are left as they are.
pub fn merge(plans: &[Plan]) -> Option<Vec<Plan>> {
    let mut steps = plans.iter().flat_map(|plan| &plan.lanes).flat_map(|lane| &lane.steps);
    if steps.any(|step| matches!(step.action, Action::Call(_))) {
        return None;
    }
    let classes = partition(plans)?;
    let merged: Vec<Plan> = plans.iter().zip(&classes).map(|(plan, classes)| merged(plan, classes)).collect();
    let lanes = |plans: &[Plan]| plans.iter().map(|plan| plan.lanes.len()).sum::<usize>();
    (lanes(&merged) < lanes(plans)).then_some(merged)
}

fn hashed(value: impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}

/// What a step does, but for the channel and for which chunks.
fn kind(action: &Action) -> u64 {
    let place = |spans: &[Span]| spans.first().map(|span| span.buffer);
    match action {
        Action::Send { to, src, .. } => hashed((0, to.0, chunks_in(src))),
        Action::Recv { from, dst, .. } => hashed((1, from.0, chunks_in(dst), place(dst))),
        Action::RecvReduce { from, local, dst, order, finish, .. } => {
            hashed((2, from.0, chunks_in(dst), place(local), place(dst), order, finish))
        }
        Action::Copy { src, dst, start, finish } => hashed((3, chunks_in(src), place(src), place(dst), start, finish)),
        Action::Reduce { srcs, dst, finish } => {
            let srcs: Vec<_> = srcs.iter().map(|src| place(src)).collect();
            hashed((4, chunks_in(dst), srcs, place(dst), finish))
        }
        Action::Call(_) | Action::Nop => 5,
    }
}

/// A message stream: sender, receiver, channel.
type Stream = (u32, u32, Channel);

/// The streams of a lane: what it sends, what it receives.
fn streams(plan: &Plan, lane: &Lane) -> (Option<Stream>, Option<Stream>) {
    let me = plan.rank.0;
    let mut streams = (None, None);
    for step in &lane.steps {
        match step.action {
            Action::Send { to, channel, .. } => streams.0 = Some((me, to.0, channel)),
            Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                streams.1 = Some((from.0, me, channel));
            }
            _ => {}
        }
    }
    streams
}

/// The classes of lanes; none where they do not come to rest.
fn partition(plans: &[Plan]) -> Option<Classes> {
    let streams: Vec<Vec<_>> =
        plans.iter().map(|plan| plan.lanes.iter().map(|lane| streams(plan, lane)).collect()).collect();
    let (mut senders, mut receivers) = (FxHashMap::default(), FxHashMap::default());
    for (rank, streams) in streams.iter().enumerate() {
        for (lane, (sent, received)) in streams.iter().enumerate() {
            sent.map(|stream| senders.insert(stream, (rank, lane)));
            received.map(|stream| receivers.insert(stream, (rank, lane)));
        }
    }
    let first = |(rank, plan): (usize, &Plan)| {
        let of_lane =
            |lane: &Lane| hashed((rank, lane.steps.iter().map(|step| kind(&step.action)).collect::<Vec<_>>()));
        plan.lanes.iter().map(of_lane).collect::<Vec<u64>>()
    };
    let mut classes: Classes = plans.iter().enumerate().map(first).collect();
    for _ in 0..MOST_ROUNDS {
        let class = |at: Option<&(usize, usize)>| at.map(|&(rank, lane)| classes[rank][lane]);
        let refined = |rank: usize, lane: usize| {
            let (sent, received) = &streams[rank][lane];
            let peers = [
                sent.as_ref().and_then(|stream| class(receivers.get(stream))),
                received.as_ref().and_then(|stream| class(senders.get(stream))),
            ];
            let waits = |step: &Step| {
                let mut deps: Vec<_> =
                    step.deps.iter().map(|dep| (classes[rank][dep.lane as usize], dep.step)).collect();
                deps.sort_unstable();
                deps.dedup();
                deps
            };
            let waits: Vec<_> = plans[rank].lanes[lane].steps.iter().map(waits).collect();
            hashed((classes[rank][lane], peers, waits))
        };
        let next: Classes =
            (0..plans.len()).map(|rank| (0..classes[rank].len()).map(|lane| refined(rank, lane)).collect()).collect();
        let rests = number(&next) == number(&classes);
        classes = next;
        if rests {
            return Some(classes);
        }
    }
    None
}

fn number(classes: &Classes) -> usize {
    classes.iter().flatten().collect::<rustc_hash::FxHashSet<_>>().len()
}

/// A rank's plan with a lane for each class, in the order of the first lane of each.
fn merged(plan: &Plan, classes: &[u64]) -> Plan {
    let mut numbers: FxHashMap<u64, usize> = FxHashMap::default();
    let mut members: Vec<Vec<usize>> = Vec::new();
    for (lane, class) in classes.iter().enumerate() {
        let number = *numbers.entry(*class).or_insert_with(|| {
            members.push(Vec::new());
            members.len() - 1
        });
        members[number].push(lane);
    }
    let channel = |&lane: &usize| {
        let (sent, received) = streams(plan, &plan.lanes[lane]);
        (sent.or(received).map(|stream| stream.2), lane)
    };
    // Both ends of a message put the instances in the order of their channels.
    members.iter_mut().for_each(|members| members.sort_by_cached_key(channel));
    let lane_of = |lane: u32| numbers[&classes[lane as usize]] as u32;
    let lanes = members.iter().map(|members| {
        let steps = (0..plan.lanes[members[0]].steps.len()).map(|at| {
            let steps: Vec<&Step> = members.iter().map(|&lane| &plan.lanes[lane].steps[at]).collect();
            let all = steps.iter().flat_map(|step| &step.deps);
            let mut deps: Vec<StepRef> = all.map(|dep| StepRef { lane: lane_of(dep.lane), ..*dep }).collect();
            deps.sort_unstable();
            deps.dedup();
            Step { action: together(&steps), deps }
        });
        Lane { steps: steps.collect() }
    });
    Plan { lanes: lanes.collect(), ..plan.clone() }
}

/// The lists of chunks of an action, as many for all of one kind.
pub(super) fn lists(action: &Action) -> Vec<&Spans> {
    match action {
        Action::Send { src, .. } => vec![src],
        Action::Recv { dst, .. } => vec![dst],
        Action::RecvReduce { local, dst, .. } => vec![local, dst],
        Action::Copy { src, dst, .. } => vec![src, dst],
        Action::Reduce { srcs, dst, .. } => std::iter::once(dst).chain(srcs).collect(),
        Action::Call(_) | Action::Nop => Vec::new(),
    }
}

/// One action on the chunks of all.
pub(super) fn together(steps: &[&Step]) -> Action {
    let list = |nth: usize| {
        let of_step = |step: &&Step| lists(&step.action).get(nth).map_or(Spans::new(), |&list| list.clone());
        joined(steps.iter().flat_map(of_step))
    };
    with_lists(&steps[0].action, list)
}

/// The action with other chunks in its lists, in the order of [`lists`].
pub(super) fn with_lists(action: &Action, list: impl Fn(usize) -> Spans) -> Action {
    match action {
        &Action::Send { to, channel, .. } => Action::Send { to, channel, src: list(0) },
        &Action::Recv { from, channel, .. } => Action::Recv { from, channel, dst: list(0) },
        &Action::RecvReduce { from, channel, order, finish, .. } => {
            Action::RecvReduce { from, channel, local: list(0), dst: list(1), order, finish }
        }
        &Action::Copy { start, finish, .. } => Action::Copy { src: list(0), dst: list(1), start, finish },
        Action::Reduce { srcs, finish, .. } => {
            Action::Reduce { srcs: (1..=srcs.len()).map(&list).collect(), dst: list(0), finish: *finish }
        }
        other @ (Action::Call(_) | Action::Nop) => other.clone(),
    }
}
