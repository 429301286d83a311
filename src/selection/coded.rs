//! Calls whose messages between nodes are in a code: because a setting says so, or because they name an algorithm of one.
#![forbid(unsafe_code)]

use super::{Context, Decision, Executor, Request};
use crate::algorithms::{self, Choice};
use crate::code::FloatCode;
use crate::config::Config;
use crate::plan::Collective;

/// Ranks whose contributions a device folds at once: their addresses are arguments of one launch, beside those of the result's stretches.
pub const MOST_FOLDED_ON_DEVICES: usize = 400;

impl Decision {
    /// The code in which its messages go between nodes.
    pub fn code(&self) -> Option<FloatCode> {
        match &self.executor {
            Executor::Own(selection) => algorithms::code_of(&selection.choice),
            _ => None,
        }
    }
}

/// The algorithm for the code that is set, with the reason: for calls of enough bytes.
pub(super) fn choice(request: &Request<'_>, context: &Context) -> Option<(Choice, String)> {
    choice_of(request, request.message_bytes(context), context)
}

/// The same of such a call of so many bytes.
pub(super) fn choice_of(request: &Request<'_>, bytes: usize, context: &Context) -> Option<(Choice, String)> {
    let code = request.code.filter(|_| bytes >= context.config.code_min_bytes)?;
    let choice = algorithms::coded_choice(code, request.collective, &context.grid)?;
    if unfit(&choice, request, context).is_some() {
        return None;
    }
    Some((choice, format!("messages between nodes go in {}", code.name())))
}

/// Why a choice in a code cannot be had: on devices more ranks exchange than one of them can fold the contributions of.
pub(super) fn unfit(choice: &Choice, request: &Request<'_>, context: &Context) -> Option<String> {
    let folds = matches!(request.collective, Collective::AllReduce | Collective::ReduceScatter);
    if !context.on_devices || !folds || algorithms::code_of(choice).is_none() {
        return None;
    }
    let (folded, whose) = match algorithms::is_leveled(choice) {
        true => (context.grid.nnodes(), "nodes"),
        false => (context.grid.nranks(), "ranks"),
    };
    let text = format!(
        "algorithm {choice}: a GPU folds coded contributions of at most {MOST_FOLDED_ON_DEVICES} {whose}, not {folded}"
    );
    (folded > MOST_FOLDED_ON_DEVICES).then_some(text)
}

/// Why the code that a call shall have is left out.
pub(super) fn passed_over(request: &Request<'_>, context: &Context) -> Option<String> {
    let code = request.code.filter(|_| request.message_bytes(context) >= context.config.code_min_bytes)?;
    unfit(&algorithms::coded_choice(code, request.collective, &context.grid)?, request, context)
}

/// The most scratch memory for calls by a choice. Coded chunks are short, and long segments keep their messages few. Devices
/// have the memory that they had when the communicator was made: a driver may allocate only when its streams have come to rest.
pub fn most_scratch_bytes(choice: &Choice, config: &Config, on_devices: bool) -> usize {
    let is_coded = algorithms::code_of(choice).is_some();
    let is_roomy = is_coded && !on_devices && !config.is_given("STRATA_SCRATCH_BYTES");
    config.scratch_bytes.saturating_mul(if is_roomy { 4 } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::super::{decide, Executor, Policy};
    use super::*;
    use crate::topo::Grid;
    use std::sync::Arc;

    /// An all-reduce of 64 MiB that mx8 is set for, on so many nodes of two ranks.
    fn on_nodes(nodes: usize, on_devices: bool, named: Option<&'static str>) -> Result<Decision, String> {
        let grid = Arc::new(Grid::blocks(&vec![2; nodes]));
        let context = Context { on_devices, ..Context::new(grid, Config::default(), false) };
        let request = Request { code: Some(FloatCode::Mx8), named, ..Request::new(Collective::AllReduce, 64 << 20) };
        decide(&request, &context).map_err(|error| error.to_string())
    }

    #[test]
    fn gpus_code_among_as_many_nodes_as_one_launch_folds_and_hosts_among_any() {
        for (nodes, on_devices, coded) in [(400, true, true), (401, true, false), (401, false, true)] {
            let decision = on_nodes(nodes, on_devices, None).unwrap();
            assert_eq!(decision.code().is_some(), coded, "{nodes} nodes, on devices: {on_devices}: {decision:?}");
            assert_eq!(decision.by == Policy::Code, coded);
            assert_eq!(decision.reason.contains("at most 400 nodes, not 401"), !coded, "{}", decision.reason);
            assert!(matches!(decision.executor, Executor::Own(_)));
        }
        let named = |name| on_nodes(401, true, Some(name)).unwrap_err();
        assert!(named("two_level(direct,coded_mx8)").contains("at most 400 nodes, not 401"));
        assert!(named("coded_mx8").contains("at most 400 ranks, not 802"));
    }

    #[test]
    fn coded_calls_have_more_scratch_on_hosts_and_no_more_than_there_is_on_devices() {
        let (config, coded) = (Config::default(), Choice::flat("coded_mx8"));
        assert_eq!(most_scratch_bytes(&coded, &config, false), 4 * config.scratch_bytes);
        assert_eq!(most_scratch_bytes(&coded, &config, true), config.scratch_bytes);
        assert_eq!(most_scratch_bytes(&Choice::flat("direct"), &config, false), config.scratch_bytes);
    }
}
