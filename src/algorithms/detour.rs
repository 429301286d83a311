//! Detours: messages between ranks of a node that are not linked go over ranks between them.
//!
//! A message between two such ranks becomes one from the sender to the next rank on the way, which receives it into scratch memory in
//! a lane of its own and sends it on. So every message of a plan is between ranks that are linked, whatever the algorithm;
//! of those that are not linked by any way nothing changes.
//! Source: C-Cube (Jo, Son and Kim, HPCA 2023), section IV-A, where a kernel on the GPU between two forwards what others send.
//!
//! All ranks of a node find the same detours, since each writes the plans of all of them. Streams keep their order: each has a channel of its own on
//! each part of its way.
#![forbid(unsafe_code)]

use super::Choice;
use crate::plan::{Action, Channel, Collective, Lane, Plan, Shape, Span, Spans, Step};
use crate::sync::locked;
use crate::topo::{Grid, Rank};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex};

/// A rank's plan on links, which `write` writes without detours.
pub fn detoured(plan: Plan, write: &dyn Fn(Rank) -> Plan) -> Plan {
    let grid = plan.shape.grid.clone();
    if grid.links().is_none() {
        return plan;
    }
    let (rank, members) = (plan.rank, grid.members(grid.node(plan.rank)));
    let mut plans: Vec<Plan> =
        members.iter().map(|&member| if member == rank { plan.clone() } else { write(member) }).collect();
    detour_all(&mut plans);
    plans.swap_remove(grid.local(rank))
}

/// Answers of [`relayed_blocks`].
type Relayed = FxHashMap<(Choice, Collective, Arc<Grid>), usize>;
static RELAYED: LazyLock<Mutex<Relayed>> = LazyLock::new(Mutex::default);
/// Answers that are kept.
const KEPT: usize = 1024;

/// Blocks of scratch that the rank needs which relays most, whoever is the root.
pub fn relayed_blocks(choice: &Choice, shape: &Shape) -> usize {
    if shape.grid.links().is_none() || super::is_on_board(choice) {
        return 0;
    }
    let key = (choice.clone(), shape.collective, shape.grid.clone());
    if let Some(&known) = locked(&RELAYED).get(&key) {
        return known;
    }
    let roots = if shape.collective.has_root() { 0..shape.nranks() } else { 0..1 };
    let shape_of = |root| Shape { root: Rank::from_index(root), in_place: false, ..shape.clone() };
    let blocks = roots.map(|root| relayed_by_root(choice, &shape_of(root))).max().unwrap_or(0);
    let mut relayed = locked(&RELAYED);
    if relayed.len() >= KEPT {
        relayed.clear();
    }
    relayed.insert(key, blocks);
    blocks
}

fn relayed_by_root(choice: &Choice, shape: &Shape) -> usize {
    let write = |rank: Rank| super::build_direct(choice, shape, rank, &|_| false);
    let relayed = |members: &[Rank]| {
        let Ok(mut plans) = members.iter().map(|&rank| write(rank)).collect::<Result<Vec<Plan>, _>>() else { return 0 };
        let before: Vec<u32> = plans.iter().map(|plan| plan.scratch_chunks).collect();
        detour_all(&mut plans);
        let blocks =
            |(plan, before): (&Plan, u32)| (plan.scratch_chunks - before).div_ceil(plan.chunks_per_block) as usize;
        plans.iter().zip(before).map(blocks).max().unwrap_or(0)
    };
    shape.grid.node_ids().map(|node| relayed(shape.grid.members(node))).max().unwrap_or(0)
}

/// Messages from one rank to another, on a channel.
type Stream = (Rank, Rank, Channel);

/// Leads the messages of a node's plans, one of each of its ranks in their order, along its links.
fn detour_all(plans: &mut [Plan]) {
    let grid = plans[0].shape.grid.clone();
    let Some(links) = grid.links() else { return };
    let members = grid.members(grid.node(plans[0].rank)).to_vec();
    let mut channels = Channels::above(plans);
    // Each turn brings every message that is not on links yet nearer to its end.
    loop {
        let streams = unlinked(plans);
        let mut changed = false;
        for ((from, to, channel), messages) in streams {
            let Some(relay) = links.next(grid.local(from), grid.local(to)) else { continue };
            let relay_rank = members[relay];
            let [first, second] = [(from, relay_rank), (relay_rank, to)].map(|way| channels.take(way));
            lead(&mut plans[grid.local(from)], |action| match action {
                Action::Send { to: end, channel: old, .. } if (*end, *old) == (to, channel) => {
                    (*end, *old) = (relay_rank, first);
                }
                _ => {}
            });
            lead(&mut plans[grid.local(to)], |action| match action {
                Action::Recv { from: end, channel: old, .. } | Action::RecvReduce { from: end, channel: old, .. }
                    if (*end, *old) == (from, channel) =>
                {
                    (*end, *old) = (relay_rank, second);
                }
                _ => {}
            });
            relay_in(&mut plans[relay], (from, first), (to, second), &messages);
            changed = true;
        }
        if !changed {
            return;
        }
    }
}

/// Channels that are not taken yet, for each pair of ranks.
struct Channels {
    first: Channel,
    taken: FxHashMap<(Rank, Rank), Channel>,
}

impl Channels {
    fn above(plans: &[Plan]) -> Channels {
        let steps = plans.iter().flat_map(|plan| &plan.lanes).flat_map(|lane| &lane.steps);
        let channel = |step: &Step| match step.action {
            Action::Send { channel, .. } | Action::Recv { channel, .. } | Action::RecvReduce { channel, .. } => {
                Some(channel)
            }
            _ => None,
        };
        Channels { first: steps.filter_map(channel).max().map_or(0, |most| most + 1), taken: FxHashMap::default() }
    }

    fn take(&mut self, way: (Rank, Rank)) -> Channel {
        let taken = self.taken.entry(way).or_default();
        *taken += 1;
        self.first + *taken - 1
    }
}

/// What is sent between ranks of the node that are not linked, stream by stream, as chunks of the row of blocks.
fn unlinked(plans: &[Plan]) -> BTreeMap<Stream, Vec<Spans>> {
    let mut streams: BTreeMap<Stream, Vec<Spans>> = BTreeMap::new();
    for plan in plans {
        for step in plan.lanes.iter().flat_map(|lane| &lane.steps) {
            let Action::Send { to, channel, src } = &step.action else { continue };
            if !plan.shape.grid.is_direct(plan.rank, *to) {
                streams.entry((plan.rank, *to, *channel)).or_default().push(plan.in_row(src).collect());
            }
        }
    }
    streams
}

fn lead(plan: &mut Plan, mut change: impl FnMut(&mut Action)) {
    plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps).for_each(|step| change(&mut step.action));
}

/// Adds a lane that receives a stream's messages and sends each on.
fn relay_in(plan: &mut Plan, (from, received): (Rank, Channel), (to, sent): (Rank, Channel), messages: &[Spans]) {
    let mut lane = Lane::default();
    for message in messages {
        let slot = |span: &Span| {
            let start = plan.scratch_chunks;
            plan.scratch_chunks += span.len;
            Span::scratch(start as usize, span.len as usize, span.like as usize)
        };
        let held: Spans = message.iter().map(slot).collect();
        lane.steps.push(Action::Recv { from, channel: received, dst: held.clone() }.into());
        lane.steps.push(Action::Send { to, channel: sent, src: held }.into());
    }
    plan.lanes.push(lane);
}
