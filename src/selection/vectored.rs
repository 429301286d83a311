//! Calls whose blocks differ in size: which algorithm does them.
//!
//! Algorithms of messages only: boards and scripts are for blocks of one size, and tables and the cost model know no others. Where
//! each rank knows its own sizes only, a block goes straight from the rank that has it to the one that gets it, and nothing but the
//! shape decides.
#![forbid(unsafe_code)]

use super::carried::asked;
use super::decision::selected;
use super::{thresholds, Context, Decision, Executor, Knowledge, Policy, Request, Selection, Sizes};
use crate::algorithms::{self, Choice};
use crate::error::Result;
use crate::plan::Shape;

/// Algorithms that hand no block to a rank that does not keep it.
const STRAIGHT: [&str; 2] = ["direct", "pairwise"];
/// From how many times the average on the longest block decides: a ring waits for it in every round.
const LONG: usize = 2;

/// Decides a call.
pub(super) fn decide(request: &Request<'_>, context: &Context) -> Result<Decision> {
    let context =
        &Context { board: false, lends: None, knowledge: Knowledge::default(), front: None, ..context.clone() };
    let asked = asked(request, context)?;
    let carrier = asked.carrier.flatten();
    let named = asked.algorithm.and_then(|name| named(name, request, context));
    let by = if named.is_some() { Policy::Named } else { Policy::Defaults };
    let Sizes::Known { longest_bytes } = request.sizes else {
        let choice = named.unwrap_or_else(|| Choice::flat("direct"));
        let selection = Selection { choice, segment_bytes: usize::MAX, window: 1, carrier };
        let reason = "each rank knows the sizes of its own blocks only".to_string();
        return Ok(Decision { by, executor: Executor::Own(selection), reason });
    };
    let (choice, reason) = match named {
        Some(choice) => (choice, "named by the environment".to_string()),
        None => by_sizes(longest_bytes, request, context),
    };
    let selection = Selection { carrier, ..selected(choice, (0, 0), request, context)? };
    Ok(Decision { by, executor: Executor::Own(selection), reason })
}

/// What the environment or the call names, if it does such calls.
fn named(name: &str, request: &Request<'_>, context: &Context) -> Option<Choice> {
    let choice: Choice = name.parse().ok()?;
    let is_script = [&choice.name, &choice.node, &choice.rail].iter().any(|name| name.starts_with(algorithms::SCRIPT));
    let is_fit = !is_script && !algorithms::is_on_board(&choice);
    let is_straight = request.sizes != Sizes::Own || STRAIGHT.contains(&choice.name.as_str());
    let shape = Shape { root: request.root, ..Shape::new(request.collective, context.grid.clone()) };
    (is_fit && is_straight && algorithms::supports(&choice, &shape)).then_some(choice)
}

/// By the bytes of all blocks, and by the longest.
fn by_sizes(longest_bytes: usize, request: &Request<'_>, context: &Context) -> (Choice, String) {
    let (mut choice, reason) = thresholds::choose(request, context);
    if longest_bytes > LONG * request.block_bytes && [&choice.name, &choice.rail].iter().any(|name| *name == "ring") {
        match choice.name == "ring" {
            true => choice = Choice::flat("log"),
            false => choice.rail = "log".to_string(),
        }
        return (choice, format!("{reason}, and one block has {longest_bytes} bytes: no ring"));
    }
    (choice, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::plan::Collective;
    use crate::topo::Grid;
    use std::sync::Arc;

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
        assert_eq!(chosen(known(long, 8 * long), Grid::blocks(&[4, 4]), "auto"), "two_level(direct,log)");
    }

    #[test]
    fn where_ranks_know_their_own_sizes_blocks_go_straight() {
        for (collective, named, wanted) in [
            (Collective::AllToAll, "auto", "direct"),
            (Collective::AllToAll, "two_step", "direct"),
            (Collective::AllToAll, "pairwise", "pairwise"),
            (Collective::Gather, "tree", "direct"),
            (Collective::Scatter, "board", "direct"),
        ] {
            let request = Request { sizes: Sizes::Own, ..Request::new(collective, 0) };
            assert_eq!(chosen(request, Grid::blocks(&[3, 3]), named), wanted, "{}, {named}", collective.name());
        }
    }
}
