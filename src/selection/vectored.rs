//! Calls whose blocks differ in size: which algorithm does them.
//!
//! Algorithms of messages, and providers where a call or a setting names them: boards and scripts are for blocks of one size, and tables
//! and the cost model know no others. Where each rank knows its own sizes only, a block goes straight from the rank that has it to the
//! one that gets it, and nothing but the shape decides. Of an all-to-all in two steps, where one is named, or a bound for blocks is set
//! and small, ranks are told how long the blocks are that they hand on.
#![forbid(unsafe_code)]

use super::carried::asked;
use super::decision::{routed, selected};
use super::vendor::Route;
use super::{coded, provided, thresholds, Context, Decision, Executor, Knowledge, Policy, Request, Selection, Sizes};
use crate::algorithms::{self, two_step, Choice};
use crate::error::{Error, Result};
use crate::plan::{Collective, Shape};
use crate::topo::{Grid, Rank};
use std::sync::Arc;

/// Algorithms that hand no block to a rank that does not keep it.
const STRAIGHT: [&str; 2] = ["direct", "pairwise"];
/// From how many times the average on the longest block decides: a ring waits for it in every round.
const LONG: usize = 2;
/// Into how many pieces for each node a ring divides a long block.
const PIECES_A_NODE: usize = 4;
/// The pieces of a long block that go at a time, over all rails of a node.
const LEAST_PIECE_BYTES: usize = 32 << 10;
const MOST_PIECE_BYTES: usize = 1 << 20;

/// Decides a call. In front of a vendor library only what Strata's own transports carry between nodes can be Strata's: the library's
/// collectives over its communicators of nodes and rails are for blocks of one size.
pub(super) fn decide(request: &Request<'_>, context: &Context) -> Result<Decision> {
    let Some(front) = context.front else { return by_own_transports(request, context) };
    let (by, route, why) = routed(request, request.message_bytes(context), context, front)
        .ok_or_else(|| Error::Internal("no policy says who does a call".to_string()))?;
    let reason = match (route, front.carrier.is_own()) {
        (Route::TwoLevel, true) => {
            let own = by_own_transports(request, context)?;
            let reason = if why == own.reason { why } else { format!("{why}; {}", own.reason) };
            return Ok(Decision { by, reason, ..own });
        }
        (Route::TwoLevel, false) => "blocks differ in size, and the vendor's levels are for one size".to_string(),
        (Route::Vendor, _) => why,
    };
    Ok(Decision { by, executor: Executor::Vendor, reason })
}

fn by_own_transports(request: &Request<'_>, context: &Context) -> Result<Decision> {
    let context =
        &Context { board: false, lends: None, knowledge: Knowledge::default(), front: None, ..context.clone() };
    let asked = asked(request, context)?;
    let carrier = asked.carrier.flatten();
    let named = match asked.algorithm {
        Some(name) if provided::serves(name, request, context)? => named(name, request, context),
        _ => None,
    };
    let coded = if named.is_none() { in_code(request, context) } else { None };
    let (by, named, why) = match (named, coded) {
        (None, Some((choice, reason))) => (Policy::Code, Some(choice), reason),
        (None, None) => (Policy::Defaults, None, String::new()),
        (named, _) => {
            let why = format!("named by the {}", if request.named.is_some() { "call" } else { "environment" });
            (Policy::Named, named, why)
        }
    };
    let (choice, segment_bytes, reason) = match (named, request.sizes) {
        (Some(choice), Sizes::Known { .. }) => (choice, 0, why),
        (None, Sizes::Known { longest_bytes }) => by_sizes(longest_bytes, request, context),
        (Some(choice), _) if algorithms::provider_of(&choice).is_some() => (choice, 0, why),
        (named, _) => by_shape(named.map(|choice| (choice, why)), request, context),
    };
    let reason = match provided::passed_over(request, context) {
        Some(why) if by != Policy::Named => format!("{reason} ({why})"),
        _ => reason,
    };
    let selection = match segment_bytes {
        // A block goes whole.
        usize::MAX => Selection { choice, segment_bytes, window: 1, carrier, shares: None },
        _ => Selection { carrier, ..selected(choice, (segment_bytes, 0), request, context)? },
    };
    Ok(Decision { by, executor: Executor::Own(selection), reason })
}

/// The algorithm for the code that is set, if it does such calls.
fn in_code(request: &Request<'_>, context: &Context) -> Option<(Choice, String)> {
    let asked = (request.collective, request.root);
    let does = |choice: &Choice| takes_blocks_of_any_sizes(&choice.exact(), asked, &context.grid);
    coded::choice(request, context).filter(|(choice, _)| does(choice))
}

/// What the environment or the call names, if it does such calls.
fn named(name: &str, request: &Request<'_>, context: &Context) -> Option<Choice> {
    // Whether a provider takes it has been asked.
    let is_provider = algorithms::provider_in(name).is_some();
    let is_fit = is_provider || takes_blocks_of_any_sizes(name, (request.collective, request.root), &context.grid);
    is_fit.then(|| name.parse().ok())?
}

/// Whether an algorithm of messages does a collective of blocks of different sizes on a grid.
pub fn takes_blocks_of_any_sizes(name: &str, (collective, root): (Collective, Rank), grid: &Arc<Grid>) -> bool {
    let Ok(choice) = name.parse::<Choice>() else { return false };
    let is_script = [&choice.name, &choice.node, &choice.rail].iter().any(|name| name.starts_with(algorithms::SCRIPT));
    let is_known = matches!(collective, Collective::AllGather | Collective::ReduceScatter);
    // A coded block is in scratch, and its size follows from the row, which has to be known.
    let is_straight = is_known || STRAIGHT.contains(&choice.name.as_str()) || hands_on(&choice);
    let shape = Shape { root, ..Shape::new(collective, grid.clone()) };
    let is_whole = algorithms::is_on_board(&choice) || algorithms::provider_of(&choice).is_some();
    !is_script && !is_whole && is_straight && algorithms::supports(&choice, &shape)
}

/// Whether ranks hand on blocks, and tell each other first how long these are.
fn hands_on(choice: &Choice) -> bool {
    choice.name == two_step::TWO_STEP.name
}

/// Where each rank knows its own sizes only: by the shape, and by the bound that the settings have for blocks of an all-to-all.
fn by_shape(named: Option<(Choice, String)>, request: &Request<'_>, context: &Context) -> (Choice, usize, String) {
    let bound = context.config.all_to_all_v_bound_bytes;
    let bounded = || {
        let request = Request { block_bytes: bound, ..*request };
        let (choice, why) = thresholds::choose(&request, context);
        let is_fit = bound > 0 && request.collective == Collective::AllToAll && hands_on(&choice);
        is_fit.then(|| (choice, format!("by STRATA_ALLTOALLV_BOUND_BYTES {why}")))
    };
    let own = || (Choice::flat("direct"), "each rank knows the sizes of its own blocks only".to_string());
    let (choice, why) = named.or_else(bounded).unwrap_or_else(own);
    // A block that is handed on goes in parts that find room on the way, any other one whole.
    let segment_bytes = if hands_on(&choice) { 0 } else { usize::MAX };
    (choice, segment_bytes, why)
}

/// By the bytes of all blocks, and by the longest: the algorithm, the bytes of each block that are handled at a time, where they
/// are not the default, and why.
fn by_sizes(longest_bytes: usize, request: &Request<'_>, context: &Context) -> (Choice, usize, String) {
    let (choice, reason) = thresholds::choose(request, context);
    if longest_bytes <= LONG * request.block_bytes {
        return (choice, 0, reason);
    }
    let why = format!("{reason}, and one block has {longest_bytes} bytes");
    if request.collective == Collective::AllGather && choice.name == "two_level" {
        // In a ring a long block's node sends it once, and it takes a round more for each node to pass on but in many pieces.
        let piece_bytes = longest_bytes / (PIECES_A_NODE * context.grid.nnodes());
        let rail = if piece_bytes >= LEAST_PIECE_BYTES { "ring" } else { "log" };
        let choice = Choice { name: "two_level_split".to_string(), rail: rail.to_string(), ..choice };
        let segment_bytes = if rail == "ring" { piece_bytes.min(MOST_PIECE_BYTES) } else { 0 };
        return (choice, segment_bytes, format!("{why}: over all rails of its node"));
    }
    match [&choice.name, &choice.rail].map(|name| name == "ring") {
        [true, _] => (Choice::flat("log"), 0, format!("{why}: no ring")),
        [_, true] => (Choice { rail: "log".to_string(), ..choice }, 0, format!("{why}: no ring")),
        _ => (choice, 0, reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carrier::Carrier;
    use crate::config::Config;
    use crate::selection::vendor::Vendor;
    use crate::selection::Front;

    fn chosen(request: Request<'_>, grid: Grid, algorithm: &str) -> String {
        let mut config = Config::default();
        let variable = format!("STRATA_{}_ALGO", request.collective.name().replace('_', "").to_ascii_uppercase());
        assert_eq!(config.set(&variable, algorithm), Some(Ok(())));
        let decision = decide(&request, &Context::new(Arc::new(grid), config, true)).unwrap();
        let Executor::Own(selection) = decision.executor else { panic!("{decision:?}") };
        selection.choice.to_string()
    }

    #[test]
    fn a_board_is_for_blocks_of_one_size_and_a_ring_for_none_that_is_long() {
        let known = |block_bytes, longest_bytes| Request {
            sizes: Sizes::Known { longest_bytes },
            ..Request::new(Collective::AllGather, block_bytes)
        };
        assert_eq!(chosen(known(8, 16), Grid::flat(4), "auto"), "direct");
        assert_eq!(chosen(known(8, 16), Grid::flat(4), "board"), "direct");
        assert_eq!(chosen(known(8, 16), Grid::flat(4), "ring"), "ring");
        let long = 64 << 20;
        assert_eq!(chosen(known(long, long), Grid::blocks(&[4, 4]), "auto"), "two_level(direct,ring)");
        assert_eq!(chosen(known(long, 8 * long), Grid::blocks(&[4, 4]), "auto"), "two_level_split(direct,ring)");
        assert_eq!(chosen(known(1000, 8000), Grid::blocks(&[4, 4]), "auto"), "two_level_split(direct,log)");
        assert_eq!(chosen(known(long, 8 * long), Grid::blocks(&[1; 8]), "auto"), "log");
        let scattered = Request { collective: Collective::ReduceScatter, ..known(long, 8 * long) };
        assert_eq!(chosen(scattered, Grid::blocks(&[4, 4]), "auto"), "two_level(direct,log)");
    }

    #[test]
    fn what_a_call_names_counts_for_more_than_what_the_environment_does() {
        let config = Config { all_gather_algo: "ring".to_string(), ..Config::default() };
        let context = Context::new(Arc::new(Grid::blocks(&[2, 2])), config, true);
        let sizes = Sizes::Known { longest_bytes: 9 };
        let named = |named, collective, sizes| {
            let decision = decide(&Request { named, sizes, ..Request::new(collective, 8) }, &context).unwrap();
            let Executor::Own(selection) = decision.executor else { panic!("{decision:?}") };
            format!("{}, {}", selection.choice, decision.reason)
        };
        assert_eq!(named(Some("log"), Collective::AllGather, sizes), "log, named by the call");
        assert_eq!(named(None, Collective::AllGather, sizes), "ring, named by the environment");
        let takes = |name, collective| takes_blocks_of_any_sizes(name, (collective, Rank(0)), &context.grid);
        assert!(takes("two_level", Collective::ReduceScatter) && takes("pairwise", Collective::AllToAll));
        assert!(takes("two_step", Collective::AllToAll) && !takes("board", Collective::AllGather));
        assert!(!takes("script:mine", Collective::AllGather) && !takes("nothing", Collective::AllGather));
    }

    #[test]
    fn in_front_of_a_vendor_library_only_own_transports_take_such_calls() {
        let library = Vendor { version: 23203, rccl: false };
        let decided = |collective, sizes, carrier, algorithm: &str| {
            let config = Config { all_gather_algo: algorithm.to_string(), ..Config::default() };
            let front = Some(Front { library, carrier, outlasts: false });
            let context = Context { front, ..Context::new(Arc::new(Grid::blocks(&[2, 2])), config, false) };
            let decision = decide(&Request { sizes, ..Request::new(collective, 1000) }, &context).unwrap();
            match decision.executor {
                Executor::Own(selection) => selection.choice.to_string(),
                other => format!("{other:?}"),
            }
        };
        let known = Sizes::Known { longest_bytes: 3000 };
        assert_eq!(decided(Collective::AllGather, known, Carrier::MPI, "two_level"), "two_level(direct,log)");
        assert_eq!(decided(Collective::AllGather, known, Carrier::Vendor, "two_level"), "Vendor");
        assert_eq!(decided(Collective::AllGather, known, Carrier::MPI, "vendor"), "Vendor");
        assert_eq!(decided(Collective::AllGather, known, Carrier::MPI, "auto"), "Vendor", "two nodes are few");
        assert_eq!(decided(Collective::AllToAll, Sizes::Own, Carrier::MPI, "auto"), "Vendor");
    }

    #[test]
    fn where_ranks_know_their_own_sizes_blocks_go_straight_unless_two_steps_are_named() {
        for (collective, named, wanted) in [
            (Collective::AllToAll, "auto", "direct"),
            (Collective::AllToAll, "two_step", "two_step"),
            (Collective::AllToAll, "pairwise", "pairwise"),
            (Collective::Gather, "tree", "direct"),
            (Collective::Scatter, "board", "direct"),
        ] {
            let request = Request { sizes: Sizes::Own, ..Request::new(collective, 0) };
            assert_eq!(chosen(request, Grid::blocks(&[3, 3]), named), wanted, "{}, {named}", collective.name());
        }
    }

    #[test]
    fn a_small_bound_has_blocks_of_an_all_to_all_handed_on_where_nodes_have_several_ranks() {
        for (collective, nodes, bound, wanted) in [
            (Collective::AllToAll, &[3, 3][..], 4096, "two_step"),
            (Collective::AllToAll, &[3, 3], 1 << 20, "direct"),
            (Collective::AllToAll, &[1, 1], 4096, "direct"),
            (Collective::AllToAll, &[4], 4096, "direct"),
            (Collective::Gather, &[3, 3], 4096, "direct"),
        ] {
            let config = Config { all_to_all_v_bound_bytes: bound, ..Config::default() };
            let context = Context::new(Arc::new(Grid::blocks(nodes)), config, true);
            let decision = decide(&Request { sizes: Sizes::Own, ..Request::new(collective, 0) }, &context).unwrap();
            let Executor::Own(selection) = decision.executor else { panic!("{decision:?}") };
            assert_eq!(selection.choice.to_string(), wanted, "{}, {nodes:?}, {bound}", collective.name());
            assert_eq!(selection.segment_bytes == usize::MAX, wanted == "direct", "only what goes straight goes whole");
        }
    }

    #[test]
    fn a_provider_does_such_calls_where_it_is_named_and_leaves_to_strata_what_it_does_not_take() {
        use crate::transport::provider::{CommProviders, ProviderSet};
        let known = Sizes::Known { longest_bytes: 9 };
        let decided = |named, setting: &str, collective, sizes, provided| {
            let config =
                Config { all_gather_algo: setting.to_string(), gather_algo: setting.to_string(), ..Config::default() };
            let providers = Arc::new(CommProviders::assumed(["foo".to_string()]));
            let context = Context { providers, ..Context::new(Arc::new(Grid::blocks(&[2, 2])), config, true) };
            let decision = decide(&Request { named, sizes, provided, ..Request::new(collective, 8) }, &context)?;
            let Executor::Own(selection) = decision.executor else { panic!("{decision:?}") };
            Ok(format!("{}, {}", selection.choice, decision.reason))
        };
        let (foo, all, none) = ("provider:foo", ProviderSet::ALL, ProviderSet::default());
        for (collective, sizes) in [(Collective::AllGather, known), (Collective::Gather, Sizes::Own)] {
            let told =
                |named, setting, provided| -> Result<String> { decided(named, setting, collective, sizes, provided) };
            assert_eq!(told(Some(foo), "auto", all).unwrap(), "provider:foo, named by the call");
            assert_eq!(told(None, foo, all).unwrap(), "provider:foo, named by the environment");
            let left = told(None, foo, none).unwrap();
            assert!(!left.starts_with(foo) && left.contains("(provider foo takes no "), "{left}");
            let refused = told(Some(foo), "auto", none).unwrap_err();
            assert!(refused.text().contains("of blocks of different sizes"), "{refused}");
        }
    }
}
