//! Scripts as the levels of a two-level algorithm: which calls one serves, and what a plan with room for it looks like.
//!
//! A library algorithm does any call of its level, on any number of ranks. A script does one collective on one number of ranks,
//! in chunks and on channels of its own. So the outer plan's chunks are divided until the script's fit into each block, its calls
//! get as many channels as the script uses, and a choice whose script serves none of the calls is refused with its reason.
#![forbid(unsafe_code)]

use super::{by_name, composed, plain_name, Algorithm, Choice};
use crate::error::{counted, Error, Result};
use crate::plan::{Action, Call, Channel, Collective, LinkLevel, Plan, Shape, Span};
use crate::topo::{Grid, Rank};
use rustc_hash::FxHashMap;
use std::sync::{Arc, PoisonError, RwLock};

/// What a level has to know of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScriptFacts {
    /// What it does.
    pub collective: Collective,
    /// How many ranks it is for.
    pub nranks: usize,
    /// The rank with which it does it, for collectives with a root.
    pub root: Option<Rank>,
    /// Chunks in one of its blocks.
    pub chunks_per_block: u32,
    /// Channels between two of its ranks.
    pub channels: Channel,
}

/// The most chunks into which a level divides a block.
const MOST_CHUNKS: u32 = 1 << 16;
/// Channels that the calls of library algorithms have.
const OWN_CHANNELS: Channel = 16;
/// Channels that all calls of a plan have together: the last is for messages outside collectives.
const ALL_CHANNELS: usize = Channel::MAX as usize;
/// Calls of a lane, each with its own channels.
const CALLS: usize = crate::plan::inline::CALLS;

/// The scripts among the algorithms, by their names.
static SCRIPTS: RwLock<Option<FxHashMap<&'static str, ScriptFacts>>> = RwLock::new(None);

/// Remembers that an algorithm is a script.
pub(crate) fn remember(name: &'static str, facts: ScriptFacts) {
    SCRIPTS.write().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(name, facts);
}

/// What is known of the script of this name.
pub fn script(name: &str) -> Option<ScriptFacts> {
    SCRIPTS.read().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(name).copied()
}

/// `all_reduce on 8 ranks`
pub fn facts_text(collective: Collective, nranks: usize) -> String {
    format!("{} on {}", collective.name(), counted(nranks, "rank"))
}

impl std::fmt::Display for ScriptFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&facts_text(self.collective, self.nranks))?;
        self.root.map_or(Ok(()), |root| write!(f, " with root {root}"))
    }
}

/// These scripts, for a message: `loaded scripts: script:a (all_reduce on 8 ranks), ...`.
pub fn loaded_text(scripts: &[&str]) -> String {
    let told = |name: &&str| script(name).map(|facts| format!("{} ({facts})", plain_name(name)));
    let mut told: Vec<String> = scripts.iter().filter_map(told).collect();
    told.sort_unstable();
    match told.is_empty() {
        true => {
            let from = "STRATA_PROGRAM_DIR, MSCCL_ALGO_DIR and MSCCL_XML_FILES";
            format!("no scripts are loaded for these ranks; files that serve them are those of {from}")
        }
        false => format!("loaded scripts: {}", told.join(", ")),
    }
}

/// The shape of a call for its members.
fn shape_of(call: &Call) -> Shape {
    let root = Rank::from_index(call.root);
    Shape { root, ..Shape::new(call.collective, Arc::new(Grid::flat(call.group.len()))) }
}

/// Whether a call is done by the script that the choice names for its level.
pub fn is_by_script(choice: &Choice, call: &Call) -> bool {
    let name = level_name(choice, call.level);
    script(name).is_some() && by_name(name).is_some_and(|algorithm| algorithm.does(&shape_of(call)))
}

fn level_name(choice: &Choice, level: LinkLevel) -> &str {
    match level {
        LinkLevel::Node => &choice.node,
        LinkLevel::Rail => &choice.rail,
        LinkLevel::All => &choice.name,
    }
}

/// The scripts that a choice names for its levels.
fn on_levels(choice: &Choice) -> impl Iterator<Item = (LinkLevel, ScriptFacts)> + '_ {
    let is_leveled = by_name(&choice.name).is_some_and(|algorithm| algorithm.is_leveled);
    let levels = [LinkLevel::Node, LinkLevel::Rail].into_iter().filter(move |_| is_leveled);
    levels.filter_map(|level| script(level_name(choice, level)).map(|facts| (level, facts)))
}

/// Whether a choice names a script for a level.
pub fn has_script(choice: &Choice) -> bool {
    on_levels(choice).next().is_some()
}

/// Channels of each call of a choice's plans, the same on all ranks.
pub(super) fn channels(choice: &Choice) -> Channel {
    on_levels(choice).map(|(_, facts)| facts.channels).fold(OWN_CHANNELS, Channel::max)
}

/// Into how many each chunk of the outer plan is divided, so that each block has chunks enough for the scripts, and for one along
/// each of several trees.
fn factor(choice: &Choice, shape: &Shape) -> u32 {
    let of_scripts = on_levels(choice).map(|(_, facts)| facts.chunks_per_block);
    let names = [&choice.node, &choice.rail].into_iter().filter(|_| super::is_leveled(choice));
    let of_trees = names.map(|name| super::trees::chunks(name, shape));
    of_scripts.chain(of_trees).fold(1, least_common_multiple)
}

fn least_common_multiple(one: u32, other: u32) -> u32 {
    let (mut divisor, mut rest) = (one, other);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (one / divisor.max(1)).saturating_mul(other)
}

/// The plan with its chunks divided for the inner algorithms of a choice.
pub(super) fn divided(mut plan: Plan, choice: &Choice) -> Plan {
    let factor = factor(choice, &plan.shape);
    if factor == 1 {
        return plan;
    }
    plan.chunks_per_block *= factor;
    plan.scratch_chunks *= factor;
    let divide = |span: &mut Span| {
        span.start *= factor;
        span.len *= factor;
        span.like *= factor;
    };
    for step in plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
        match &mut step.action {
            Action::Send { src, .. } => src.iter_mut().for_each(divide),
            Action::Recv { dst, .. } => dst.iter_mut().for_each(divide),
            Action::RecvReduce { local, dst, .. } => local.iter_mut().chain(dst).for_each(divide),
            Action::Copy { src, dst, .. } => src.iter_mut().chain(dst).for_each(divide),
            Action::Reduce { srcs, dst, .. } => srcs.iter_mut().flatten().chain(dst).for_each(divide),
            Action::Call(call) => call.src.iter_mut().chain(&mut call.dst).flatten().for_each(divide),
            Action::Nop => {}
        }
    }
    plan
}

/// The kinds of calls of a level that the plans of a shape make: what is called, by how many ranks, with which root.
fn calls_of(choice: &Choice, shape: &Shape, level: LinkLevel) -> Result<Vec<Call>> {
    let grid = &shape.grid;
    // Nodes of one size have the same calls; a node's first rank, and the root, take part in all of them.
    let mut sizes: Vec<usize> = Vec::new();
    let mut ranks = vec![shape.root];
    for node in grid.node_ids() {
        let members = grid.members(node);
        if !sizes.contains(&members.len()) || node == grid.node(shape.root) {
            sizes.push(members.len());
            ranks.push(members[0]);
        }
    }
    let mut calls: Vec<Call> = Vec::new();
    for rank in ranks {
        for step in composed(choice, shape, rank)?.lanes.into_iter().flat_map(|lane| lane.steps) {
            let Action::Call(call) = step.action else { continue };
            let same = |known: &Call| {
                (known.collective, known.group.len(), known.root) == (call.collective, call.group.len(), call.root)
            };
            if call.level == level && !calls.iter().any(same) {
                calls.push(call);
            }
        }
    }
    Ok(calls)
}

/// Why a choice cannot have the scripts that it names for its levels: none of the level's calls is the script's, or the plans
/// would have too many chunks or channels.
///
/// # Errors
/// `InvalidUsage` with the reason; the error of a choice that does not do the shape at all.
pub fn check(choice: &Choice, shape: &Shape) -> Result<()> {
    let refused = |why: String| Err(Error::InvalidUsage(format!("algorithm {choice}: {why}")));
    let mut chunks = 1;
    for (level, facts) in on_levels(choice) {
        let calls = calls_of(choice, shape, level)?;
        if !calls.iter().any(|call| is_by_script(choice, call)) {
            let where_ = if level == LinkLevel::Node { "inside nodes" } else { "between nodes" };
            let told: Vec<String> = calls.iter().map(|call| told(call, shape)).collect();
            let calls = if told.is_empty() { "nothing".to_string() } else { told.join(" and ") };
            let name = plain_name(level_name(choice, level));
            return refused(format!("{name} is for {facts}, and {} calls {calls} {where_}", choice.name));
        }
        chunks = composed(choice, shape, shape.root)?.chunks_per_block;
    }
    if !has_script(choice) {
        return Ok(());
    }
    let chunks = chunks.saturating_mul(factor(choice, shape));
    if chunks > MOST_CHUNKS {
        return refused(format!("its scripts' chunks divide a block into {chunks}; {MOST_CHUNKS} are the most"));
    }
    // Plans of two levels have a lane for each rail and a few more.
    let (lanes, channels) = (shape.grid.nrails() + 4, channels(choice));
    if lanes * CALLS * channels as usize > ALL_CHANNELS {
        let text = format!("{lanes} lanes whose calls have {channels} channels each are more than a plan has");
        return refused(text);
    }
    Ok(())
}

/// `all_gather on 4 ranks`, with the root where that matters.
fn told(call: &Call, shape: &Shape) -> String {
    let root = if shape.collective.has_root() { format!(" with root {}", call.root) } else { String::new() };
    format!("{} on {}{root}", call.collective.name(), counted(call.group.len(), "rank"))
}

/// The choices of a leveled algorithm that have one of these scripts at one of its levels.
pub(super) fn choices(algorithm: &Algorithm, shape: &Shape, scripts: &[&str]) -> Vec<Choice> {
    let (node, rail) = match shape.collective {
        Collective::Broadcast | Collective::Reduce => ("direct", "tree"),
        _ => ("direct", "log"),
    };
    let both = |name: &&str| [Choice::leveled(algorithm.name, name, rail), Choice::leveled(algorithm.name, node, name)];
    scripts.iter().flat_map(both).filter(|choice| check(choice, shape).is_ok()).collect()
}
