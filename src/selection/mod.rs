//! Who does a call, by which algorithm, and why.
//!
//! [`decide`] asks the [`POLICIES`] in order; the first one with an opinion decides.
#![forbid(unsafe_code)]

mod carried;
mod coded;
pub mod cost;
mod decision;
pub mod links;
pub mod model;
pub mod profile;
mod provided;
mod selector;
pub mod shares;
pub mod strategy;
pub mod synthesis;
pub mod table;
mod thresholds;
mod vectored;
pub mod vendor;

pub use carried::{CarriedName, CommCarriers, AUTO};
pub use coded::{most_scratch_bytes, MOST_FOLDED_ON_DEVICES};
pub use decision::{
    can_profit, decide, Context, Decision, Executor, Front, Knowledge, Policy, Request, Selection, Sizes, POLICIES,
};
pub use selector::Selector;
pub use vectored::takes_blocks_of_any_sizes;

use crate::algorithms::{self, Choice};
use crate::carrier::Inter;
use crate::code::FloatCode;
use crate::config::Config;
use crate::plan::Collective;
use crate::script::SharedScripts;
use crate::topo::{Grid, Rank};
use crate::transport::provider;
use decision::choice_of;
use std::sync::Arc;

/// The bytes thresholds speak of: the full vector (all-gather: the output; reduce-scatter: the input).
pub fn message_bytes(collective: Collective, nranks: usize, block_bytes: usize) -> usize {
    match collective {
        Collective::AllGather | Collective::ReduceScatter => block_bytes.saturating_mul(nranks),
        _ => block_bytes,
    }
}

/// One warning for each `STRATA_<COLLECTIVE>_ALGO` that names no algorithm, or one that never does the collective, and for
/// each other name in the settings that nothing has.
pub fn unknown_names(config: &Config) -> Vec<String> {
    let mut warnings = unknown_algorithms(config);
    let names = config.vendor_only.split(',').map(str::trim).filter(|name| !["", "none"].contains(name));
    let strange = names.filter(|name| Collective::from_name(name).is_none());
    warnings.extend(
        strange.map(|name| format!("STRATA_VENDOR_ONLY={}: there is no collective {name}", config.vendor_only)),
    );
    if let Err(what) = config.carriers.read() {
        warnings.push(format!("{what}; no communicator can be made whose rank 0 says so"));
    }
    if let Err(what) = provider::wanted(&config.providers) {
        warnings.push(format!("{what}; no communicator can be made whose rank 0 says so"));
    }
    if let Inter::Unknown(text) = &config.inter {
        let choices = Inter::choices();
        warnings.push(format!(
            "STRATA_INTER={text} is none of {choices}; no communicator can be made whose rank 0 says so"
        ));
    }
    warnings
}

fn unknown_algorithms(config: &Config) -> Vec<String> {
    let wrong = |collective: Collective| -> Option<String> {
        let name = match CarriedName::parse(config.algorithm(collective)) {
            Ok(name) => name.algorithm,
            Err(error) => return Some(error.text().to_string()),
        };
        // Scripts are read when a communicator is made.
        if name == "auto" || name == vendor::VENDOR || name.contains("script:") {
            return None;
        }
        match name.parse::<Choice>() {
            Err(error) => Some(error.to_string()),
            Ok(choice) => match algorithms::does(&choice, collective) {
                true => None,
                false => Some(format!("algorithm {name} does not do {}", collective.name())),
            },
        }
    };
    let line = |collective: Collective| {
        wrong(collective).map(|why| {
            let variable = format!("STRATA_{}_ALGO", collective.name().replace('_', "").to_ascii_uppercase());
            format!("{variable}={}: {why}; every such call will fail", config.algorithm(collective))
        })
    };
    Collective::ALL.into_iter().filter_map(line).collect()
}

/// The algorithm that the call of a program asks for under a name of NCCL's (`RING_SIMPLE`), or under one of ours, if
/// there is one that does this; these are the scripts that there are.
pub fn by_nccl_name(name: &str, collective: Collective, grid: &Arc<Grid>, scripts: &SharedScripts) -> Option<Choice> {
    let base = name.to_ascii_lowercase();
    // Protocols mean something on a GPU only.
    let base = ["_simple", "_ll128", "_ll"].iter().find_map(|protocol| base.strip_suffix(protocol)).unwrap_or(&base);
    let candidates: &[&str] = match base {
        // NCCL's trees are logarithmic, and so are PAT's.
        "tree" => &["tree", "log"],
        "pat" => &["log"],
        base => &[name, base],
    };
    if let Some(code) = FloatCode::from_name(base) {
        return algorithms::coded_choice(code, collective, grid);
    }
    // A script with a root does calls with that one.
    let root = |name: &str| scripts.by_name(name).map_or(Rank(0), |script| script.root);
    let choice = |name: &&str| choice_of(name, (collective, root(name)), grid, scripts).ok();
    candidates.iter().find_map(choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_or_a_carrier_that_does_not_exist_is_told() {
        let left = |names: &str| unknown_names(&Config { vendor_only: names.to_string(), ..Config::default() });
        for right in ["none", "allgather", "all_gather, ReduceScatter", ""] {
            assert_eq!(left(right), [""; 0], "{right}");
        }
        assert_eq!(left("allgather,gathr"), ["STRATA_VENDOR_ONLY=allgather,gathr: there is no collective gathr"]);
        let told = unknown_names(&Config { inter: Inter::Unknown("mpl".to_string()), ..Config::default() });
        assert!(told.len() == 1 && told[0].starts_with("STRATA_INTER=mpl is none of"), "{told:?}");
        let told = unknown_names(&Config { carriers: "tcp,mpl".parse().unwrap(), ..Config::default() });
        assert!(
            told.len() == 1
                && told[0].starts_with("STRATA_CARRIERS=tcp,mpl: there is no carrier mpl; did you mean mpi?"),
            "{told:?}"
        );
    }

    #[test]
    fn a_wrong_name_is_told_with_the_nearest_one_and_a_right_one_is_not() {
        let named = |name: &str| unknown_algorithms(&Config { all_gather_algo: name.to_string(), ..Config::default() });
        for right in ["auto", "vendor", "ring", "two_level", "two_level(direct,log)", "ring@mpi", "@tcp"] {
            assert_eq!(named(right), [""; 0], "{right}");
        }
        assert!(named("rign")[0].starts_with("STRATA_ALLGATHER_ALGO=rign: algorithm rign: unknown; did you mean ring?"));
        assert!(named("ring@tpc")[0].contains("there is no carrier tpc; did you mean tcp?"));
        assert!(named("rign@tcp")[0].contains("did you mean ring?"));
        assert!(named("two_level(dircet,log)")[0].contains("did you mean direct?"));
        assert!(named("reduce_scatter_gather")[0].contains("does not do all_gather"));
        for collective in Collective::ALL {
            let variable = format!("STRATA_{}_ALGO", collective.name().replace('_', "").to_ascii_uppercase());
            let mut config = Config::default();
            assert_eq!(config.set(&variable, "nothing"), Some(Ok(())), "{variable}");
            assert_eq!(unknown_algorithms(&config).len(), 1);
        }
    }

    #[test]
    fn nccl_s_names_of_algorithms_stand_for_ours() {
        let grid = Arc::new(Grid::blocks(&[2, 2]));
        let scripts = SharedScripts::default();
        let found = |name: &str, collective| by_nccl_name(name, collective, &grid, &scripts);
        let ours = |name: &str, collective| found(name, collective).map(|choice| choice.exact());
        assert_eq!(ours("RING_SIMPLE", Collective::AllReduce).as_deref(), Some("ring"));
        assert_eq!(ours("RING_LL128", Collective::AllGather).as_deref(), Some("ring"));
        assert_eq!(ours("PAT_SIMPLE", Collective::ReduceScatter).as_deref(), Some("log"));
        assert_eq!(ours("TREE_LL", Collective::AllReduce).as_deref(), Some("log"));
        assert_eq!(ours("TREE_LL", Collective::Broadcast).as_deref(), Some("tree"));
        assert_eq!(ours("two_level(ring,ring)", Collective::AllGather).as_deref(), Some("two_level(ring,ring)"));
        assert_eq!(ours("NVLS_SIMPLE", Collective::AllReduce), None);
    }
}
