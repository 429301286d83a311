//! Who does a call, and how: one decision, by an ordered list of policies.
//!
//! A decision is a pure function of what is equal on all ranks: the call, the grid, the configuration that rank 0 sent when
//! the communicator was made, and what is known of the machine. It is made where a call is accepted, and the engine is handed
//! it. In front of a vendor library the policies are asked twice: who does the call, and if Strata's own transports carry it,
//! by which algorithm.
#![forbid(unsafe_code)]

use super::carried::{asked, CarriedName, CommCarriers};
use super::strategy::Strategies;
use super::table::{has_thresholds, has_thresholds_over, Tuned};
use super::vendor::{self, Route, Vendor, VENDOR};
use super::{coded, cost, message_bytes, model, provided, thresholds, vectored};
use crate::algorithms::{self, levels, Choice};
use crate::carrier::Carrier;
use crate::code::FloatCode;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::weights::ChunkWeights;
use crate::plan::{Collective, Shape};
use crate::script::{LoadedScript, SharedScripts};
use crate::sim::price::PricedPlan;
use crate::sim::Cluster;
use crate::topo::{Grid, Rank};
use crate::transport::provider::{CommProviders, ProviderSet};
use std::sync::Arc;

/// What a communicator knows beside its configuration; the same on all its ranks.
#[derive(Debug, Clone, Default)]
pub struct Knowledge {
    /// The rows of rank 0's tuning table.
    pub tuned: Arc<Tuned>,
    /// The scripts of rank 0, and what their names mean here.
    pub scripts: Arc<SharedScripts>,
    /// Rank 0's strategies for this grid.
    pub strategies: Arc<Strategies>,
    /// What the cost model goes by: the machine that `STRATA_MACHINE` names, or the links as they were measured.
    pub machine: Option<Arc<Cluster>>,
}

/// The vendor library in front of which a communicator is.
#[derive(Debug, Clone, Copy)]
pub struct Front {
    /// The library.
    pub library: Vendor,
    /// What moves messages between nodes in calls that the library does not do alone.
    pub carrier: Carrier,
    /// Calls go on without lost ranks, which those of the library do not.
    pub outlasts: bool,
}

/// What all decisions of a communicator rest on; the same on all its ranks.
#[derive(Debug, Clone)]
pub struct Context {
    /// Where the ranks are.
    pub grid: Arc<Grid>,
    /// Rank 0's settings.
    pub config: Config,
    /// The tuning table and the machine.
    pub knowledge: Knowledge,
    /// Whether all ranks of the one node share a board.
    pub board: bool,
    /// Whether the ranks of the one node outnumber the processors that they may run on.
    pub crowded: bool,
    /// Whether the data of any rank is not in host memory.
    pub on_devices: bool,
    /// Where the two ranks of the one node have the kernel read each other's long parts: from how many bytes on an operation
    /// bypasses the cache of one of them. All ranks must have the same.
    pub lends: Option<usize>,
    /// The vendor library, if a program has one.
    pub front: Option<Front>,
    /// What calls may choose between nodes.
    pub carriers: CommCarriers,
    /// The libraries that do whole collectives.
    pub providers: Arc<CommProviders>,
}

impl Context {
    /// Without a vendor library, a table or a machine.
    pub fn new(grid: Arc<Grid>, config: Config, board: bool) -> Context {
        let (knowledge, carriers, providers) = (Knowledge::default(), CommCarriers::default(), Arc::default());
        let (crowded, on_devices, lends, front) = (false, false, None, None);
        Context { grid, config, knowledge, board, crowded, on_devices, lends, front, carriers, providers }
    }
}

/// What a call is decided by.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// What is to be done.
    pub collective: Collective,
    /// Bytes of one block: of the vector for all-reduce, broadcast and reduce, of one rank's part for the others.
    pub block_bytes: usize,
    /// An algorithm named by the call itself.
    pub named: Option<&'a str>,
    /// The root, for collectives that have one (else rank 0).
    pub root: Rank,
    /// The form that its messages between nodes shall have, if the call names no algorithm.
    pub code: Option<FloatCode>,
    /// Whether blocks differ in size; then `block_bytes` is what they have on average, as far as all ranks know.
    pub sizes: Sizes,
    /// The providers that carry out calls of its type, operation and size.
    pub provided: ProviderSet,
}

/// Whether blocks differ in size, and who knows the sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sizes {
    /// All are of one size.
    Even,
    /// They differ, and all ranks know all sizes.
    Known {
        /// The longest block's.
        longest_bytes: usize,
    },
    /// They differ, and each rank knows its own: they decide nothing.
    Own,
}

impl Request<'_> {
    /// A call that names no algorithm; the root is rank 0.
    pub fn new(collective: Collective, block_bytes: usize) -> Request<'static> {
        let (named, code, sizes, provided) = (None, None, Sizes::Even, ProviderSet::default());
        Request { collective, block_bytes, named, root: Rank(0), code, sizes, provided }
    }

    /// The bytes that thresholds and tables speak of.
    pub fn message_bytes(&self, context: &Context) -> usize {
        message_bytes(self.collective, context.grid.nranks(), self.block_bytes)
    }
}

/// How Strata's own transports run a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// The algorithm.
    pub choice: Choice,
    /// Bytes of each block handled at a time; `usize::MAX` handles the message whole.
    pub segment_bytes: usize,
    /// Segments in flight.
    pub window: usize,
    /// The further carrier by which it goes; none for the communicator's own.
    pub carrier: Option<Carrier>,
    /// What each chunk of a block has of it, where a strategy says so.
    pub shares: Option<Arc<ChunkWeights>>,
}

/// Who runs a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Executor {
    /// The vendor library alone.
    Vendor,
    /// The vendor library's communicators of nodes and rails, in two levels.
    SubComms,
    /// Strata's own transports.
    Own(Selection),
}

/// How a call is run, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The first policy that had an opinion.
    pub by: Policy,
    /// Who runs it.
    pub executor: Executor,
    /// Why, in words: what was compared with what.
    pub reason: String,
}

/// What can decide a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Collectives and grids that cannot run in two levels, in front of a vendor library.
    Conditions,
    /// `STRATA_VENDOR_ONLY` and `NCCL_ALGO`, in front of a vendor library.
    VendorOnly,
    /// An algorithm named by the call, or by `STRATA_<COLLECTIVE>_ALGO`.
    Named,
    /// `STRATA_<COLLECTIVE>_CODE`.
    Code,
    /// A script that was loaded for such calls.
    Script,
    /// Thresholds that the user has set.
    Thresholds,
    /// `STRATA_STRATEGY`. In front of a vendor library what has two levels, over transports of Strata's own.
    Strategy,
    /// `STRATA_TUNING_TABLE`.
    TuningTable,
    /// The cost model, of `STRATA_MACHINE` or of measured links, where it sees a clear win.
    CostModel,
    /// Thresholds that nobody has set.
    Defaults,
}

/// The order in which policies are asked. The last one always has an opinion.
pub const POLICIES: [Policy; 10] = [
    Policy::Conditions,
    Policy::VendorOnly,
    Policy::Named,
    Policy::Code,
    Policy::Script,
    Policy::Thresholds,
    Policy::Strategy,
    Policy::TuningTable,
    Policy::CostModel,
    Policy::Defaults,
];

/// Decides a call.
pub fn decide(request: &Request<'_>, context: &Context) -> Result<Decision> {
    if request.sizes != Sizes::Even {
        return vectored::decide(request, context);
    }
    let taken = match context.front {
        None => None,
        Some(front) => {
            let (by, route, reason) = routed(request, request.message_bytes(context), context, front)
                .ok_or_else(|| Error::Internal("no policy says who does a call".to_string()))?;
            match route {
                Route::Vendor => return Ok(Decision { by, executor: Executor::Vendor, reason }),
                Route::TwoLevel if front.carrier.is_own() => Some((by, reason)),
                Route::TwoLevel => return Ok(Decision { by, executor: Executor::SubComms, reason }),
            }
        }
    };
    for policy in POLICIES {
        if let Some((mut selection, how)) = policy.select(request, context)? {
            if let (Some(carrier), None) = (asked(request, context)?.carrier, taken.as_ref()) {
                selection.carrier = carrier;
            }
            let how = match provided::passed_over(request, context).or_else(|| coded::passed_over(request, context)) {
                Some(why) if policy != Policy::Named => format!("{how} ({why})"),
                _ => how,
            };
            let (by, reason) = match taken {
                None => (policy, how),
                Some((by, why)) if why == how => (by, why),
                Some((by, why)) => (by, format!("{why}; {how}")),
            };
            return Ok(Decision { by, executor: Executor::Own(selection), reason });
        }
    }
    Err(Error::Internal("no policy names an algorithm".to_string()))
}

/// Whether any call in front of a vendor library can come to be Strata's: else the communicator needs no further ones.
pub fn can_profit(context: &Context) -> bool {
    let Some(front) = context.front else { return true };
    vendor::COLLECTIVES.into_iter().any(|collective| {
        let request = Request { code: context.config.code(collective), ..Request::new(collective, 0) };
        let ours = |bytes| matches!(routed(&request, bytes, context, front), Some((_, Route::TwoLevel, _)));
        // A row of the table may be about sizes between two powers of 2.
        let rows = context.knowledge.tuned.taken_over(collective).take(MOST_ROWS_TRIED);
        rows.chain((0..=model::MOST_LOG).map(|log| 1 << log)).any(ours)
    })
}

/// Who does a call like the one that is asked about, of so many bytes, in front of a vendor library: by the first policy with an
/// opinion.
pub(super) fn routed(
    request: &Request<'_>,
    bytes: usize,
    context: &Context,
    front: Front,
) -> Option<(Policy, Route, String)> {
    let (policy, route, reason) = POLICIES.iter().find_map(|policy| {
        let (route, reason) = policy.route(request, bytes, context, front)?;
        Some((*policy, route, reason))
    })?;
    let is_required = matches!(policy, Policy::Conditions | Policy::VendorOnly | Policy::Named);
    match route {
        // Nobody knows beforehand in which call a rank will be lost.
        Route::Vendor if front.outlasts && !is_required => {
            Some((policy, Route::TwoLevel, "calls go on without lost ranks (STRATA_LOST=continue)".to_string()))
        }
        route => Some((policy, route, reason)),
    }
}

impl Policy {
    /// Its name, as `strata explain` shows it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Conditions => "conditions",
            Policy::VendorOnly => "vendor forced",
            Policy::Named => "algorithm named",
            Policy::Code => "code",
            Policy::Script => "script",
            Policy::Thresholds => "thresholds of the user",
            Policy::Strategy => "strategy",
            Policy::TuningTable => "tuning table",
            Policy::CostModel => "cost model",
            Policy::Defaults => "defaults",
        }
    }

    /// What it says of a call by itself, whoever decides: with its reason. Nothing where it has no opinion.
    pub fn opinion(self, request: &Request<'_>, context: &Context) -> Result<Option<(Executor, String)>> {
        let Some(front) = context.front else {
            let selected = self.select(request, context)?;
            return Ok(selected.map(|(selection, reason)| (Executor::Own(selection), reason)));
        };
        Ok(self.route(request, request.message_bytes(context), context, front).map(|(route, reason)| match route {
            Route::Vendor => (Executor::Vendor, reason),
            Route::TwoLevel => (Executor::SubComms, reason),
        }))
    }

    /// Who does a call in front of a vendor library.
    fn route(self, request: &Request<'_>, bytes: usize, context: &Context, front: Front) -> Option<(Route, String)> {
        let Context { grid, config, knowledge, .. } = context;
        let Request { collective, .. } = *request;
        match self {
            Policy::Conditions => {
                let why = vendor::unfit(collective, grid, front.carrier)?;
                Some((Route::Vendor, why.to_string()))
            }
            Policy::VendorOnly if config.leaves_to_vendor(collective) => {
                Some((Route::Vendor, "STRATA_VENDOR_ONLY or NCCL_ALGO names it".to_string()))
            }
            Policy::VendorOnly => None,
            Policy::Named => {
                let name = match CarriedName::parse(config.algorithm(collective)) {
                    Ok(CarriedName { carrier: Some(other), .. }) if other != front.carrier => {
                        let why = format!("the environment names the carrier {}, which is not here", other.name());
                        return Some((Route::Vendor, why));
                    }
                    name => name.map_or("", |name| name.algorithm),
                };
                let exact = knowledge.scripts.exact(name).unwrap_or_else(|_| name.to_string());
                vendor::named(&exact, collective, grid, front.carrier)
            }
            Policy::Code if front.carrier.is_own() => {
                coded::choice_of(request, bytes, context).map(|(_, reason)| (Route::TwoLevel, reason))
            }
            // The vendor library runs no scripts and has no codes, and does not leave calls to those that do.
            Policy::Script | Policy::Code => None,
            Policy::Thresholds if has_thresholds_over(collective, config) => {
                Some(vendor::by_bytes(collective, bytes, grid, config, front.library))
            }
            Policy::Strategy if front.carrier.is_own() => {
                let strategy = knowledge.strategies.find(collective, bytes)?;
                algorithms::is_leveled(&strategy.choice).then(|| (Route::TwoLevel, strategy.said_of(bytes)))
            }
            Policy::Thresholds | Policy::Strategy => None,
            Policy::TuningTable => {
                let route = match knowledge.tuned.leaves_to_vendor(collective, bytes)? {
                    true => Route::Vendor,
                    false => Route::TwoLevel,
                };
                Some((route, "the tuning table has it".to_string()))
            }
            Policy::CostModel => {
                let machine = knowledge.machine.as_ref()?;
                Some(match model::takes_over(machine, grid, collective, front.carrier, bytes)? {
                    true => (Route::TwoLevel, "the cost model sees a clear win".to_string()),
                    false => (Route::Vendor, "the cost model sees no clear win".to_string()),
                })
            }
            Policy::Defaults => Some(vendor::by_bytes(collective, bytes, grid, config, front.library)),
        }
    }

    /// By which algorithm Strata's own transports do a call.
    fn select(self, request: &Request<'_>, context: &Context) -> Result<Option<(Selection, String)>> {
        let Context { config, knowledge, .. } = context;
        let Request { collective, .. } = *request;
        let by_thresholds = || {
            let (choice, reason) = thresholds::choose(request, context);
            Ok((selected(choice, (0, 0), request, context)?, reason))
        };
        match self {
            Policy::Conditions | Policy::VendorOnly => Ok(None),
            Policy::Named => {
                let asked = asked(request, context)?;
                let Some(name) = asked.algorithm else { return Ok(None) };
                if !provided::serves(name, request, context)? {
                    return Ok(None);
                }
                let choice = named_choice(name, request, context)?;
                Ok(Some((selected(choice, (0, 0), request, context)?, asked.by.to_string())))
            }
            Policy::Code => match coded::choice(request, context) {
                Some((choice, reason)) => Ok(Some((selected(choice, (0, 0), request, context)?, reason))),
                None => Ok(None),
            },
            Policy::Script => by_script(request, context),
            Policy::Thresholds if !has_thresholds(collective, config) => Ok(None),
            Policy::Thresholds | Policy::Defaults => by_thresholds().map(Some),
            Policy::Strategy => {
                let found = knowledge.strategies.select(request, context)?;
                Ok(found.filter(|(found, _)| context.front.is_none() || algorithms::is_leveled(&found.choice)))
            }
            Policy::TuningTable => match knowledge.tuned.advice(request, context) {
                None => Ok(None),
                Some(advice) => {
                    let selection = selected(advice.choice, (advice.segment_bytes, advice.window), request, context)?;
                    Ok(Some((Selection { carrier: advice.carrier, ..selection }, advice.reason)))
                }
            },
            Policy::CostModel => match &knowledge.machine {
                None => Ok(None),
                Some(machine) => Ok(by_model(by_thresholds()?.0, request, context, machine)),
            },
        }
    }
}

/// The first script that was meant for such a call. One with a root is for calls with that root.
fn by_script(request: &Request<'_>, context: &Context) -> Result<Option<(Selection, String)>> {
    let Context { grid, knowledge, .. } = context;
    let Request { collective, root, .. } = *request;
    let bytes = request.block_bytes.saturating_mul(collective.blocks(grid.nranks()));
    let has_root = |script: &LoadedScript| !collective.has_root() || script.root == root;
    let fits = |script: &&&LoadedScript| has_root(script) && script.is_for(collective, grid.nranks(), bytes);
    let Some(script) = knowledge.scripts.scripts.iter().find(fits) else { return Ok(None) };
    let selection = selected(Choice::flat(&script.unique_name), (0, 0), request, context)?;
    let rooted = if collective.has_root() { format!(" with root {root}") } else { String::new() };
    Ok(Some((selection, format!("the first script for {bytes} bytes on {} ranks{rooted}", grid.nranks()))))
}

/// An algorithm with its segments and window: as asked for, or by default where that is 0.
pub(super) fn selected(
    choice: Choice,
    (segments, window): (usize, usize),
    request: &Request<'_>,
    context: &Context,
) -> Result<Selection> {
    let Context { grid, config, board, .. } = context;
    if let Some(why) = coded::unfit(&choice, request, context) {
        return Err(Error::InvalidUsage(why));
    }
    if algorithms::provider_of(&choice).is_some() {
        // One call whatever its length: the library knows how to cut it.
        return Ok(Selection { choice, segment_bytes: usize::MAX, window: 1, carrier: None, shares: None });
    }
    let on_board = algorithms::is_on_board(&choice);
    if on_board && !board {
        let text = format!("algorithm {choice} needs shared memory between all ranks of the node");
        return Err(Error::InvalidUsage(text));
    }
    let in_trees = thresholds::in_trees(&choice, request, context);
    let segment_bytes = match config.segment_bytes {
        _ if on_board => thresholds::board_segment(request, context),
        0 if segments > 0 => segments,
        0 => in_trees.map_or_else(|| thresholds::segment(&choice, request, grid), |(bytes, _)| bytes),
        bytes => bytes,
    };
    let window = match window {
        1.. if !config.is_given("STRATA_WINDOW") => window,
        0 if !config.is_given("STRATA_WINDOW") => in_trees.map_or(config.window, |(_, window)| window),
        _ => config.window,
    };
    Ok(Selection { choice, segment_bytes, window: window.clamp(1, 64), carrier: None, shares: None })
}

/// What the cost model would rather have than a selection by thresholds, if that is one of those it prices.
fn by_model(
    selection: Selection,
    request: &Request<'_>,
    context: &Context,
    machine: &Cluster,
) -> Option<(Selection, String)> {
    let Context { grid, config, .. } = context;
    let Selection { choice, segment_bytes, window, carrier, .. } = selection;
    let is_priced = match grid.nnodes() {
        // A board is the memory of processors, not links.
        1 => grid.links().is_some() && !algorithms::is_on_board(&choice),
        _ => cost::COLLECTIVES.contains(&request.collective) && cost::prices(&choice),
    };
    if !is_priced {
        return None;
    }
    let node = choice.node.clone();
    let route = PricedPlan { choice, segment_bytes, window, carrier: Carrier::MPI };
    let (better, reason) = model::better(machine, grid, request.collective, request.message_bytes(context), &route)?;
    let selection = Selection {
        choice: Choice { node, ..better.choice },
        segment_bytes: if config.is_given("STRATA_SEGMENT_BYTES") { segment_bytes } else { better.segment_bytes },
        window: if config.is_given("STRATA_WINDOW") { window } else { better.window },
        carrier,
        shares: None,
    };
    Some((selection, reason))
}

/// The algorithm of this name, or an error that says which ones do the collective here.
fn named_choice(name: &str, request: &Request<'_>, context: &Context) -> Result<Choice> {
    let (asked, scripts) = ((request.collective, request.root), &context.knowledge.scripts);
    // A call may name a program that its ranks have loaded themselves, with its digest; a setting means the communicator's.
    match name.parse() {
        Ok(choice) if request.named.is_some() => fitting(choice, asked, &context.grid, scripts),
        _ => choice_of(name, asked, &context.grid, scripts),
    }
}

/// The same on a grid whose ranks have these scripts. What cannot be had is `InvalidUsage`.
pub(super) fn choice_of(
    name: &str,
    (collective, root): (Collective, Rank),
    grid: &Arc<Grid>,
    scripts: &SharedScripts,
) -> Result<Choice> {
    if name == VENDOR {
        let text = format!("{} is left to the vendor's library, and there is none", collective.name());
        return Err(Error::InvalidUsage(text));
    }
    let choice = scripts.choice(name).map_err(|error| Error::InvalidUsage(error.text().to_string()))?;
    fitting(choice, (collective, root), grid, scripts)
}

/// The choice, if it does the collective on the grid.
fn fitting(
    choice: Choice,
    (collective, root): (Collective, Rank),
    grid: &Arc<Grid>,
    scripts: &SharedScripts,
) -> Result<Choice> {
    let shape = Shape { root, ..Shape::new(collective, grid.clone()) };
    if algorithms::supports(&choice, &shape) {
        return levels::check(&choice, &shape).map(|()| choice);
    }
    let known = algorithms::choices_with(collective, grid, &scripts.unique_names());
    let known: Vec<String> = known.iter().map(Choice::to_string).collect();
    let (known, asked) = (known.join(", "), collective.name());
    Err(Error::InvalidUsage(match levels::script(&choice.name) {
        Some(facts) => {
            let root = if collective.has_root() { format!(" with root {root}") } else { String::new() };
            format!("algorithm {choice} is for {facts}, and the call is {asked}{root} on {grid}; these do it: {known}")
        }
        None => {
            let text = algorithms::by_name(&choice.name).map_or("unknown", |algorithm| algorithm.text);
            format!("algorithm {choice} does not do {asked} on {grid}: it is {text}; these do: {known}")
        }
    }))
}

/// Rows of a tuning table that are tried when a communicator is made.
const MOST_ROWS_TRIED: usize = 64;

#[cfg(test)]
mod tests {
    use super::super::table::tests::{row, tuned};
    use super::super::table::{Row, Size};
    use super::super::Selector;
    use super::*;

    fn context(grid: Grid, config: &Config) -> Context {
        Context::new(Arc::new(grid), config.clone(), true)
    }

    fn decided(request: &Request<'_>, context: &Context) -> (Policy, String) {
        let decision = decide(request, context).unwrap();
        match decision.executor {
            Executor::Own(selection) => (decision.by, selection.choice.to_string()),
            other => (decision.by, format!("{other:?}")),
        }
    }

    fn chosen(collective: Collective, block_bytes: usize, grid: Grid, config: &Config) -> String {
        decided(&Request::new(collective, block_bytes), &context(grid, config)).1
    }

    fn set(variable: &str, value: &str, mut config: Config) -> Config {
        assert_eq!(config.set(variable, value), Some(Ok(())));
        config.given.insert(variable.to_string());
        config
    }

    #[test]
    fn several_nodes_get_two_levels_and_the_threshold_splits_log_from_ring() {
        let config = Config { all_gather_rd_max_bytes: 8000, ..Config::default() };
        let grid = Grid::blocks(&[4, 4]);
        assert_eq!(chosen(Collective::AllGather, 1000, grid.clone(), &config), "two_level(direct,log)");
        assert_eq!(chosen(Collective::AllGather, 1001, grid, &config), "two_level(direct,ring)");
    }

    #[test]
    fn two_ranks_take_a_tree_at_every_size_and_others_up_to_the_threshold() {
        for (collective, long) in
            [(Collective::Broadcast, "scatter_allgather"), (Collective::Reduce, "reduce_scatter_gather")]
        {
            let on = |sizes: &[usize], bytes| chosen(collective, bytes, Grid::blocks(sizes), &Config::default());
            for bytes in [8, 65536, 65537, 1 << 30] {
                assert_eq!(on(&[1, 1], bytes), "tree", "{collective:?} of {bytes} bytes");
            }
            let three = [65536, 65537, 1 << 20, (1 << 20) + 1].map(|bytes| on(&[1; 3], bytes));
            assert_eq!(three, ["tree", long, long, "ring"]);
            assert_eq!(on(&[1; 5], 1 << 30), long);
            // On several nodes each rail has a part, which is long or not.
            let split = |rail: &str| format!("two_level_split(direct,{rail})");
            let sizes = [65536, 65537, 4 * 65536, 4 * 65536 + 1, 1 << 30];
            let few = sizes.map(|bytes| on(&[4; 4], bytes));
            assert_eq!(few, ["tree".to_string(), split("tree"), split("tree"), split(long), split("ring")]);
            assert_eq!(on(&[4; 5], 1 << 30), split(long));
            assert_eq!(on(&[17, 17], 1 << 30), "two_level_split(ring,ring)");
        }
    }

    #[test]
    fn one_node_gets_the_board_where_its_ranks_share_one() {
        let config = Config::default();
        let on = |board, collective, block_bytes, config: &Config| {
            let context = Context { board, ..context(Grid::flat(4), config) };
            decided(&Request::new(collective, block_bytes), &context).1
        };
        assert_eq!(on(true, Collective::AllGather, 1001, &config), "board");
        assert_eq!(on(true, Collective::AllReduce, 131_072 / 3, &config), "board");
        assert_eq!(on(true, Collective::AllReduce, 131_072 / 3 + 1, &config), "board_two_rounds");
        assert_eq!(on(false, Collective::AllGather, 1001, &config), "direct");
        assert_eq!(on(true, Collective::AllToAll, 1001, &config), "board");
        assert_eq!(on(true, Collective::Reduce, 131_072 / 3 + 1, &config), "board_two_rounds");
        for (collective, expected) in [(Collective::Reduce, "board"), (Collective::AllReduce, "board_two_rounds")] {
            let crowded = Context { crowded: true, ..context(Grid::flat(4), &config) };
            assert_eq!(decided(&Request::new(collective, 1 << 24), &crowded).1, expected, "{collective:?}");
        }
        let segment = |lends, collective, block_bytes| {
            let context = Context { board: true, lends, ..context(Grid::flat(2), &config) };
            thresholds::board_segment(&Request::new(collective, block_bytes), &context)
        };
        // What is read as a whole goes at once; what goes through areas, or may, piece after piece.
        let lends = Some(18 << 20);
        assert_eq!(segment(lends, Collective::AllGather, 1 << 20), 8 << 20);
        assert_eq!(segment(lends, Collective::AllToAll, 1 << 30), 4 << 20);
        assert_eq!(segment(lends, Collective::AllReduce, 1 << 20), 512 << 10);
        assert_eq!(segment(lends, Collective::Gather, 512 << 10), 512 << 10);
        assert_eq!(segment(None, Collective::AllGather, 1 << 20), 512 << 10);
        // What this process knows of its cache does not count, since another may know something else.
        assert_eq!(segment(Some(192 << 10), Collective::AllGather, 1 << 20), 512 << 10);
        assert_eq!(segment(Some(1 << 40), Collective::AllGather, 1 << 30), 8 << 20);
        let off = Config { board: false, ..config };
        assert_eq!(on(true, Collective::AllGather, 1001, &off), "direct");
        let named = Request { named: Some("board"), ..Request::new(Collective::AllGather, 8) };
        let refused = decide(&named, &Context { board: false, ..context(Grid::flat(4), &off) });
        assert!(matches!(refused, Err(Error::InvalidUsage(_))), "{refused:?}");
    }

    #[test]
    fn the_environment_s_algorithm_wins_and_an_impossible_one_is_refused() {
        let config = Config { all_gather_algo: "ring".to_string(), ..Config::default() };
        assert_eq!(chosen(Collective::AllGather, 1, Grid::flat(4), &config), "ring");
        let config = Config { all_gather_algo: "rd".to_string(), ..Config::default() };
        let error = decide(&Request::new(Collective::AllGather, 1), &context(Grid::flat(3), &config)).unwrap_err();
        assert!(matches!(&error, Error::InvalidUsage(text) if text.contains("these do: ")), "{error:?}");
    }

    #[test]
    fn every_collective_gets_a_choice_that_exists_for_every_shape() {
        let grids = [vec![1], vec![5], vec![2, 2], vec![3, 1, 4], vec![1, 1, 1], vec![20, 3]];
        for sizes in grids {
            let context = context(Grid::blocks(&sizes), &Config::default());
            for collective in Collective::ALL {
                for block_bytes in [1, 1 << 12, 1 << 20, 1 << 30] {
                    let decision = decide(&Request::new(collective, block_bytes), &context).unwrap();
                    let Executor::Own(selection) = decision.executor else { panic!("there is no vendor library") };
                    let shape = Shape::new(collective, context.grid.clone());
                    assert!(algorithms::supports(&selection.choice, &shape), "{} {sizes:?}", selection.choice);
                }
            }
        }
    }

    /// Each policy decides when those before it are silent: the settings are taken back one by one.
    #[test]
    fn policies_are_asked_in_their_order() {
        let collective = Collective::AllGather;
        let machine = Some(Arc::new(Cluster::find("frontier").unwrap()));
        let grid = Grid::blocks(&[8; 32]);
        let table = Knowledge {
            tuned: Arc::new(tuned(&[row(collective, 1 << 20, "two_level(ring,ring)")])),
            machine,
            ..Knowledge::default()
        };
        let model = Knowledge { tuned: Arc::default(), machine: table.machine.clone(), ..Knowledge::default() };
        let named = set("STRATA_ALLGATHER_ALGO", "ring", Config::default());
        let threshold = |config| set("STRATA_ALLGATHER_RD_MAX_BYTES", "1048575", config);
        let by = |knowledge: &Knowledge, config: &Config, name: Option<&str>| {
            let context = Context { knowledge: knowledge.clone(), ..context(grid.clone(), config) };
            decided(&Request { named: name, ..Request::new(collective, (1 << 20) / 256) }, &context)
        };
        let ours = |policy, algorithm: &str| (policy, algorithm.to_string());
        assert_eq!(by(&table, &threshold(named.clone()), Some("direct")), ours(Policy::Named, "direct"));
        assert_eq!(by(&table, &threshold(named), None), ours(Policy::Named, "ring"));
        let thresholds = by(&table, &threshold(Config::default()), None);
        assert_eq!(thresholds, ours(Policy::Thresholds, "two_level(direct,ring)"));
        assert_eq!(by(&table, &Config::default(), None), ours(Policy::TuningTable, "two_level(ring,ring)"));
        let slow = Config { all_gather_rd_max_bytes: 1, ..Config::default() };
        assert_eq!(by(&model, &slow, None), ours(Policy::CostModel, "two_level(direct,log)"));
        assert_eq!(by(&Knowledge::default(), &slow, None), ours(Policy::Defaults, "two_level(direct,ring)"));
    }

    /// The same in front of a vendor library, with the vendor's communicators and with transports of Strata's.
    #[test]
    fn in_front_of_a_vendor_library_policies_are_asked_in_the_same_order() {
        let collective = Collective::AllGather;
        let library = Vendor { version: 22703, rccl: true };
        let machine = Some(Arc::new(Cluster::find("frontier").unwrap()));
        let table =
            Knowledge { tuned: Arc::new(tuned(&[row(collective, 16 << 20, VENDOR)])), machine, ..Knowledge::default() };
        let model = Knowledge { tuned: Arc::default(), machine: table.machine.clone(), ..Knowledge::default() };
        let grid = || Grid::blocks(&[8; 256]);
        let by = |knowledge: &Knowledge, config: &Config, carrier, grid: Grid| {
            let front = Some(Front { library, carrier, outlasts: false });
            let context = context(grid, config);
            let context = Context { knowledge: knowledge.clone(), front, ..context };
            decided(&Request::new(collective, (16 << 20) / 2048), &context)
        };
        let left = Config { vendor_only: "all_gather".to_string(), ..Config::default() };
        let named = set("STRATA_ALLGATHER_ALGO", "two_level", left.clone());
        let alone = |policy| (policy, "Vendor".to_string());
        assert_eq!(by(&table, &named, Carrier::MPI, Grid::flat(2048)), alone(Policy::Conditions));
        assert_eq!(by(&table, &named, Carrier::MPI, grid()), alone(Policy::VendorOnly));
        let named = Config { vendor_only: String::new(), ..named };
        assert_eq!(by(&table, &named, Carrier::Vendor, grid()), (Policy::Named, "SubComms".to_string()));
        assert_eq!(by(&table, &named, Carrier::MPI, grid()), (Policy::Named, "two_level(direct,log)".to_string()));
        let threshold = set("STRATA_ALLGATHER_RD_MAX_BYTES", "1", Config::default());
        assert_eq!(by(&table, &threshold, Carrier::MPI, grid()), alone(Policy::Thresholds));
        assert_eq!(by(&table, &Config::default(), Carrier::MPI, grid()), alone(Policy::TuningTable));
        let priced = by(&model, &Config::default(), Carrier::MPI, grid());
        assert_eq!(priced, (Policy::CostModel, "two_level(direct,log)".to_string()));
        let nothing = Knowledge::default();
        assert_eq!(
            by(&nothing, &Config::default(), Carrier::Vendor, grid()),
            (Policy::Defaults, "SubComms".to_string())
        );
    }

    /// Calls that go on without lost ranks are Strata's, but those that somebody wants to be the vendor's.
    #[test]
    fn what_outlasts_ranks_is_not_left_to_the_vendor() {
        let library = Vendor { version: 23203, rccl: false };
        let by = |outlasts, config: &Config, bytes| {
            let front = Some(Front { library, carrier: Carrier::TCP, outlasts });
            let context = Context { front, ..context(Grid::blocks(&[2; 2]), config) };
            (decided(&Request::new(Collective::AllReduce, bytes), &context).1 == "Vendor", can_profit(&context))
        };
        let config = Config::default();
        for bytes in [8, 64 << 20] {
            assert_eq!(by(false, &config, bytes), (true, false), "two nodes are few");
            assert_eq!(by(true, &config, bytes), (false, true));
            let left = Config { vendor_only: "all_reduce".to_string(), ..config.clone() };
            assert!(by(true, &left, bytes).0);
            assert!(by(true, &set("STRATA_ALLREDUCE_ALGO", VENDOR, config.clone()), bytes).0);
        }
    }

    #[test]
    fn a_decision_is_kept_until_the_machine_is_known() {
        let config = Config { all_gather_rd_max_bytes: 1, ..Config::default() };
        let selector = Selector::new(context(Grid::blocks(&[8; 32]), &config));
        let request = Request::new(Collective::AllGather, 4096);
        let first = selector.decide(&request).unwrap();
        assert!(Arc::ptr_eq(&first, &selector.decide(&request).unwrap()));
        let named = Request { named: Some("direct"), ..request };
        assert_eq!(selector.decide(&named).unwrap().by, Policy::Named);
        assert!(Arc::ptr_eq(&first, &selector.decide(&request).unwrap()), "a name is another call");
        selector.know_machine(Arc::new(Cluster::find("frontier").unwrap()));
        assert_eq!(selector.decide(&request).unwrap().by, Policy::CostModel);
    }

    #[test]
    fn a_communicator_profits_where_any_size_can_be_taken_over() {
        let front = |config: &Config, knowledge: Knowledge| {
            let library = Vendor { version: 23203, rccl: false };
            let front = Some(Front { library, carrier: Carrier::Vendor, outlasts: false });
            Context { front, knowledge, ..context(Grid::blocks(&[2; 2]), config) }
        };
        let odd = |algorithm| Row { size: Size::Within(1000, 1010), ..row(Collective::AllReduce, 1000, algorithm) };
        let knowing = |algorithm| Knowledge { tuned: Arc::new(tuned(&[odd(algorithm)])), ..Knowledge::default() };
        let config = Config::default();
        assert!(!can_profit(&front(&config, Knowledge::default())), "two nodes are few");
        assert!(can_profit(&front(&Config { two_level_min_nodes: 2, ..config.clone() }, Knowledge::default())));
        assert!(can_profit(&front(&config, knowing("two_level"))));
        assert!(!can_profit(&front(&config, knowing(VENDOR))));
    }
}
