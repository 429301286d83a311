//! Every algorithm: a pure function from a shape and a rank to that rank's plan.
//!
//! [`build`] writes the plan of a [`Choice`]; two-level algorithms are composed of `Call`s, which are replaced here by
//! the plans of the choice's inner algorithms ([`build_with_calls`] leaves them for another provider).
//! All ranks get matching plans whether or not each holds its buffers in place.
#![forbid(unsafe_code)]

mod board;
mod builder;
pub mod coded;
mod detour;
mod direct;
mod forest;
#[cfg(test)]
mod interpreter;
pub mod levels;
mod log;
pub mod needs;
mod packing;
mod provided;
mod rd;
mod ring;
mod scatter_gather;
mod tree;
mod trees;
mod two_level;
mod two_level_split;
pub mod two_step;

use crate::code::FloatCode;
use crate::error::{Error, Result};
use crate::plan::inline::inline_but;
use crate::plan::{Action, Call, Collective, LinkLevel, Plan, Shape, StepRef};
use crate::topo::{Grid, Rank};
use needs::{InnerNeeds, Needs};
pub use provided::{is_provider_name, provider_in, provider_of, PROVIDER};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

/// One algorithm, as data.
pub struct Algorithm {
    /// Its name in variables, logs and on the command line.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub text: &'static str,
    /// The collectives it does.
    pub collectives: &'static [Collective],
    /// Whether it is made of inner algorithms: one inside the node and one between nodes.
    pub is_leveled: bool,
    /// Whether it does this shape, given that it does the collective.
    pub supports: &'static (dyn Fn(&Shape) -> bool + Send + Sync),
    /// Writes the plan of one rank; may contain `Call`s.
    pub build: &'static (dyn Fn(&Shape, Rank) -> Plan + Send + Sync),
    /// What the rank that needs most has beside the caller's buffers, whichever way each rank holds those. The last argument
    /// says it of inner algorithms.
    pub needs: &'static (dyn Fn(&Shape, &InnerNeeds<'_>) -> Needs + Send + Sync),
}

/// The library's own algorithms.
pub const ALGORITHMS: &[&Algorithm] = &[
    &ring::RING,
    &direct::DIRECT,
    &direct::ONE_ROUND,
    &direct::PAIRWISE,
    &rd::RD,
    &rd::RD_ONE,
    &log::LOG,
    &tree::TREE,
    &trees::ONE_TREE,
    &trees::TWO_TREES,
    &trees::LINK_TREES,
    &scatter_gather::SCATTER_ALLGATHER,
    &scatter_gather::REDUCE_SCATTER_GATHER,
    &two_level::TWO_LEVEL,
    &two_level::TWO_LEVEL_SHUFFLE,
    &two_level::TWO_LEVEL_STAGED,
    &two_level_split::TWO_LEVEL_SPLIT,
    &two_step::TWO_STEP,
    &board::BOARD,
    &board::TWO_ROUNDS,
    &coded::BF16,
    &coded::MX8,
    &coded::INT8,
];

/// What programs have registered.
static REGISTERED: RwLock<Vec<&'static Algorithm>> = RwLock::new(Vec::new());
/// What settings say in the place of an algorithm's name.
const RESERVED: [&str; 2] = ["auto", "vendor"];
/// How the names of scripts begin.
pub const SCRIPT: &str = "script:";

/// Adds an algorithm. It is taken where a call, a setting or a tuning table names it. All ranks' programs register it before
/// they make the first communicator. Nothing proves it here: `verify` does, before it is registered.
///
/// # Errors
/// `InvalidUsage` when the name is taken, or has a meaning in settings or in the text form of a choice.
pub fn register(algorithm: &'static Algorithm) -> Result<()> {
    let name = algorithm.name;
    let refused = |why: &str| Err(Error::InvalidUsage(format!("an algorithm cannot be registered as {name}: {why}")));
    let is_word = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if RESERVED.contains(&name) || !is_word(name) {
        return refused("that is no name of an algorithm");
    }
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if ALGORITHMS.iter().chain(registered.iter()).any(|known| known.name == name) {
        return refused("the name is taken");
    }
    registered.push(algorithm);
    Ok(())
}

/// Adds an algorithm whose name only the library gives.
pub(crate) fn add(algorithm: &'static Algorithm) {
    REGISTERED.write().unwrap_or_else(PoisonError::into_inner).push(algorithm);
}

/// All algorithms: the library's, and those that programs have registered.
pub fn all() -> Vec<&'static Algorithm> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    ALGORITHMS.iter().chain(registered.iter()).copied().collect()
}

/// The algorithm with this name.
pub fn by_name(name: &str) -> Option<&'static Algorithm> {
    if provider_in(name).is_some() {
        return Some(&provided::PROVIDED);
    }
    let own = ALGORITHMS.iter().find(|algorithm| algorithm.name == name);
    own.copied().or_else(|| {
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        registered.iter().find(|algorithm| algorithm.name == name).copied()
    })
}

impl Algorithm {
    /// Whether it does this shape.
    pub fn does(&self, shape: &Shape) -> bool {
        // A rank would send its blocks while others' go over them; scripts copy first what they have yet to send.
        let keeps_input = !shape.in_place || shape.collective != Collective::AllToAll || self.is_script();
        self.collectives.contains(&shape.collective) && keeps_input && (self.supports)(shape)
    }

    /// Whether it came as a file.
    fn is_script(&self) -> bool {
        self.name.starts_with(SCRIPT)
    }
}

/// An algorithm, with the inner ones of a two-level one: `ring`, `two_level(direct,log)`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Choice {
    /// The algorithm.
    pub name: String,
    /// What it runs inside a node.
    pub node: String,
    /// What it runs between nodes.
    pub rail: String,
}

impl Choice {
    /// An algorithm by itself.
    pub fn flat(name: &str) -> Choice {
        Choice::leveled(name, "direct", "log")
    }

    /// An algorithm with its inner ones.
    pub fn leveled(name: &str, node: &str, rail: &str) -> Choice {
        Choice { name: name.to_string(), node: node.to_string(), rail: rail.to_string() }
    }
}

impl Choice {
    /// As it is read again: names of scripts have their digests.
    pub fn exact(&self) -> String {
        match is_leveled(self) {
            true => format!("{}({},{})", self.name, self.node, self.rail),
            false => self.name.clone(),
        }
    }
}

/// As people name it.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [name, node, rail] = [&self.name, &self.node, &self.rail].map(|name| plain_name(name));
        match is_leveled(self) {
            true => write!(f, "{name}({node},{rail})"),
            false => f.write_str(name),
        }
    }
}

/// A script's name without its digest; other names as they are.
pub fn plain_name(name: &str) -> &str {
    let is_digest = |text: &str| text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match name.rsplit_once('~') {
        Some((plain, digest)) if name.starts_with(SCRIPT) && is_digest(digest) => plain,
        _ => name,
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Choice> {
        let wrong = |what: &str| Error::InvalidArgument(format!("algorithm {text}: {what}"));
        let (name, inner) = match text.split_once('(') {
            None => (text, None),
            Some((name, rest)) => (name, Some(rest.strip_suffix(')').ok_or_else(|| wrong("a bracket is not closed"))?)),
        };
        let algorithm = by_name(name).ok_or_else(|| wrong(&unknown(name)))?;
        let Some(inner) = inner else { return Ok(Choice::flat(name)) };
        if !algorithm.is_leveled {
            return Err(wrong("only a two-level algorithm has inner ones"));
        }
        let (node, rail) = inner.split_once(',').ok_or_else(|| wrong("two inner algorithms, (node,rail)"))?;
        for inner in [node, rail] {
            match by_name(inner) {
                Some(inner) if !inner.is_leveled && provider_in(inner.name).is_none() => {}
                None if inner.starts_with(SCRIPT) => return Err(wrong(&unknown(inner))),
                _ => return Err(wrong(&format!("{}{inner} is no inner algorithm", meant(inner)))),
            }
        }
        if coded::code_of(node).is_some() {
            return Err(wrong("only what goes between nodes is coded, by the second inner algorithm"));
        }
        Ok(Choice::leveled(name, node, rail))
    }
}

/// What is said of a name that nothing has.
fn unknown(name: &str) -> String {
    if name.starts_with(SCRIPT) {
        return format!("there is no such script; {}", levels::loaded_text(&[]));
    }
    if name.starts_with(PROVIDER) {
        return "a provider's name has letters, digits and _, as provider:mpi has".to_string();
    }
    let known: Vec<&str> = known_names().collect();
    format!("unknown; {}there are {}", meant(name), known.join(", "))
}

/// The names of all algorithms but scripts.
fn known_names() -> impl Iterator<Item = &'static str> {
    all().into_iter().filter(|known| !known.is_script()).map(|known| known.name)
}

/// `did you mean ring? `, where a name is near.
fn meant(name: &str) -> String {
    match known_names().map(|known| (strsim::damerau_levenshtein(known, name), known)).min() {
        Some((0, _)) | None => String::new(),
        Some((far, _)) if far > name.len().div_ceil(3) => String::new(),
        Some((_, near)) => format!("did you mean {near}? "),
    }
}

/// Whether a choice does a collective on some grid.
pub fn does(choice: &Choice, collective: Collective) -> bool {
    let is_coded = code_of(choice).is_none() || coded::BF16.collectives.contains(&collective);
    is_coded && by_name(&choice.name).is_some_and(|algorithm| algorithm.collectives.contains(&collective))
}

/// Whether a choice does a shape.
pub fn supports(choice: &Choice, shape: &Shape) -> bool {
    does(choice, shape.collective) && by_name(&choice.name).is_some_and(|algorithm| algorithm.does(shape))
}

/// Whether a choice needs a board that all ranks of the one node share.
pub fn is_on_board(choice: &Choice) -> bool {
    [board::BOARD.name, board::TWO_ROUNDS.name].contains(&choice.name.as_str())
}

/// Along how many overlapped trees a choice sends a message, and how many messages lie between a leaf and the root.
pub fn trees(choice: &Choice, shape: &Shape) -> Option<(usize, usize)> {
    if choice.name == trees::LINK_TREES.name {
        return shape.grid.links().map(|links| trees::on_links(links, shape));
    }
    let (p, is_pair) = (shape.nranks(), choice.name == trees::TWO_TREES.name);
    let has_root_above = is_pair && shape.collective.has_root();
    let depth = if has_root_above { forest::depth((p - 1).max(1)) + 1 } else { forest::depth(p) };
    (is_pair || choice.name == trees::ONE_TREE.name).then_some((1 + usize::from(is_pair), depth))
}

/// Whether a choice has inner algorithms, one inside the node and one between nodes.
pub fn is_leveled(choice: &Choice) -> bool {
    by_name(&choice.name).is_some_and(|algorithm| algorithm.is_leveled)
}

/// The code in which a choice's messages go between nodes.
pub fn code_of(choice: &Choice) -> Option<FloatCode> {
    coded::code_of(if is_leveled(choice) { &choice.rail } else { &choice.name })
}

/// Every choice that does a collective on a grid in some code.
pub fn coded_choices(collective: Collective, grid: &Arc<Grid>) -> Vec<Choice> {
    let shape = Shape::new(collective, grid.clone());
    let of = |code| {
        let rail = coded::name_of(code);
        let leveled = |name| ["direct", "ring"].map(|node| Choice::leveled(name, node, rail));
        let leveled = [two_level::TWO_LEVEL.name, two_level::TWO_LEVEL_SHUFFLE.name].into_iter().flat_map(leveled);
        leveled.chain([Choice::flat(rail)])
    };
    FloatCode::ALL.into_iter().flat_map(of).filter(|choice| supports(choice, &shape)).collect()
}

/// The choice that does a collective on a grid in a code, if there are several nodes.
pub fn coded_choice(code: FloatCode, collective: Collective, grid: &Arc<Grid>) -> Option<Choice> {
    let shape = Shape::new(collective, grid.clone());
    let rail = coded::name_of(code);
    let flat = Choice::flat(rail);
    let does = |choice: &Choice| supports(choice, &shape);
    if grid.nnodes() == 1 || !coded::BF16.collectives.contains(&collective) {
        return None;
    }
    let leveled = Choice::leveled(two_level::TWO_LEVEL.name, "direct", rail);
    Some(leveled).filter(does).or_else(|| Some(flat).filter(does))
}

/// Every choice for a collective on a grid, but for scripts and codes.
pub fn choices(collective: Collective, grid: &Arc<Grid>) -> Vec<Choice> {
    choices_with(collective, grid, &[])
}

/// Every choice for a collective on a grid, with these scripts among them.
pub fn choices_with(collective: Collective, grid: &Arc<Grid>, scripts: &[&str]) -> Vec<Choice> {
    let shape = Shape::new(collective, grid.clone());
    let mut choices = Vec::new();
    let does = |name: &&&str| by_name(name).is_some_and(|algorithm| algorithm.does(&shape));
    let is_exact = |algorithm: &&Algorithm| !algorithm.is_script() && coded::code_of(algorithm.name).is_none();
    for algorithm in all().into_iter().filter(|algorithm| is_exact(algorithm) && algorithm.does(&shape)) {
        match (algorithm.is_leveled, collective) {
            (false, _) => choices.push(Choice::flat(algorithm.name)),
            (true, Collective::Broadcast | Collective::Reduce) => {
                choices.push(Choice::leveled(algorithm.name, "direct", "tree"));
                choices.push(Choice::leveled(algorithm.name, "ring", "ring"));
                if algorithm.name == two_level_split::TWO_LEVEL_SPLIT.name {
                    let long = match collective {
                        Collective::Broadcast => scatter_gather::SCATTER_ALLGATHER.name,
                        _ => scatter_gather::REDUCE_SCATTER_GATHER.name,
                    };
                    choices.push(Choice::leveled(algorithm.name, "direct", "ring"));
                    choices.push(Choice::leveled(algorithm.name, "direct", long));
                }
                if grid.links().is_some() {
                    choices.push(Choice::leveled(algorithm.name, trees::LINK_TREES.name, trees::TWO_TREES.name));
                }
            }
            (true, _) => {
                let inner =
                    [("direct", "log"), ("direct", "ring"), ("direct", "rd"), ("ring", "log"), ("ring", "ring")];
                choices.extend(inner.map(|(node, rail)| Choice::leveled(algorithm.name, node, rail)));
            }
        }
        if algorithm.is_leveled {
            choices.extend(levels::choices(algorithm, &shape, scripts));
        }
    }
    choices.extend(scripts.iter().filter(does).map(|name| Choice::flat(name)));
    choices
}

/// The plan of one rank, with its `Call`s left in. A rank that serves several rails makes their calls one after another,
/// so that ranks with several calls in common make them in one order, as a provider needs it.
pub fn build_with_calls(choice: &Choice, shape: &Shape, rank: Rank) -> Result<Plan> {
    let mut plan = composed(choice, shape, rank)?;
    let mut before = None;
    for (lane, steps) in plan.lanes.iter_mut().enumerate() {
        for (index, step) in steps.steps.iter_mut().enumerate() {
            if matches!(&step.action, Action::Call(call) if call.level == LinkLevel::Rail) {
                step.deps.extend(before.replace(StepRef { lane: lane as u32, step: index as u32 }));
            }
        }
    }
    Ok(plan)
}

fn composed(choice: &Choice, shape: &Shape, rank: Rank) -> Result<Plan> {
    let algorithm = by_name(&choice.name)
        .ok_or_else(|| Error::InvalidArgument(format!("there is no algorithm {}", choice.name)))?;
    if !supports(choice, shape) {
        let what = shape.collective.name();
        let text = format!("algorithm {choice} does not do {what} on {}: it is {}", shape.grid, algorithm.text);
        return Err(Error::InvalidUsage(text));
    }
    let mut plan = (algorithm.build)(shape, rank);
    plan.algorithm = choice.to_string();
    Ok(plan)
}

/// The plan of one rank.
pub fn build(choice: &Choice, shape: &Shape, rank: Rank) -> Result<Plan> {
    if is_on_board(choice) || provider_of(choice).is_some() {
        return composed(choice, shape, rank);
    }
    build_around(choice, shape, rank, &|_| false)
}

/// The plan of one rank, with the calls inside its node left in: another provider does them.
pub fn build_around_node(choice: &Choice, shape: &Shape, rank: Rank) -> Result<Plan> {
    build_around(choice, shape, rank, &|call| call.level == LinkLevel::Node)
}

/// The plan of one rank, with the calls left in that `keep` names.
pub fn build_around(choice: &Choice, shape: &Shape, rank: Rank, keep: &dyn Fn(&Call) -> bool) -> Result<Plan> {
    let plan = build_direct(choice, shape, rank, keep)?;
    let write =
        |rank: Rank| build_direct(choice, shape, rank, keep).expect("a choice that does a shape does it on every rank");
    Ok(detour::detoured(plan, &write))
}

/// The same, with messages between ranks that are not linked.
fn build_direct(choice: &Choice, shape: &Shape, rank: Rank, keep: &dyn Fn(&Call) -> bool) -> Result<Plan> {
    if levels::has_script(choice) {
        levels::check(choice, shape)?;
    }
    let plan = levels::divided(composed(choice, shape, rank)?, choice);
    let inner = |call: &Call, shape: &Shape, rank: Rank| (inner(choice, call.level, shape).build)(shape, rank);
    Ok(inline_but(plan, levels::channels(choice), keep, &inner))
}

/// The algorithm for a call of some level: the choice's, or where that one does not do the call, one that always does.
fn inner(choice: &Choice, level: LinkLevel, shape: &Shape) -> &'static Algorithm {
    let wanted = match level {
        LinkLevel::Node => &choice.node,
        LinkLevel::Rail => &choice.rail,
        // Its calls are never replaced.
        LinkLevel::All => &choice.name,
    };
    let always = match shape.collective {
        Collective::Broadcast | Collective::Reduce => "tree",
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter => "log",
        _ => "direct",
    };
    let found = [wanted, always].into_iter().filter_map(|name| by_name(name)).find(|algorithm| algorithm.does(shape));
    found.expect("one algorithm does any shape of each collective")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_as_it_is_written() {
        for text in ["ring", "two_level(direct,log)", "two_level_shuffle(ring,ring)"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        assert_eq!("two_level".parse::<Choice>().unwrap().to_string(), "two_level(direct,log)");
        for text in
            ["", "rong", "ring(direct,log)", "two_level(direct", "two_level(direct)", "two_level(two_level,log)"]
        {
            assert!(matches!(text.parse::<Choice>(), Err(Error::InvalidArgument(_))), "{text}");
        }
    }
}
