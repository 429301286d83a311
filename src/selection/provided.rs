//! Calls that a provider carries out: because they name it, or a setting or a row of the tuning table does.
//!
//! A provider that a setting or a row names for calls that it does not take leaves them to Strata's own algorithms. A call that names
//! it itself is refused, with the reason.
#![forbid(unsafe_code)]

use super::carried::asked;
use super::{Context, Decision, Executor, Request, Sizes};
use crate::algorithms;
use crate::error::{Error, Result};

impl Decision {
    /// The provider that carries it out.
    pub fn provider(&self) -> Option<&str> {
        match &self.executor {
            Executor::Own(selection) => algorithms::provider_of(&selection.choice),
            _ => None,
        }
    }
}

/// Why a provider does not carry a call out.
enum Unserved {
    /// The communicator was never to have it.
    Unknown(String),
    /// It does not take the call, or some rank lacks it.
    Lacks(String),
}

fn check(provider: &str, request: &Request<'_>, context: &Context) -> std::result::Result<(), Unserved> {
    let Some(place) = context.providers.place(provider) else {
        if let Some((_, why)) = context.providers.left_out.iter().find(|(name, _)| name == provider) {
            return Err(Unserved::Lacks(format!("provider {provider} was left out of this communicator: {why}")));
        }
        if context.grid.nranks() < 2 {
            return Err(Unserved::Lacks("one rank alone has no providers".to_string()));
        }
        if let [(name, why), ..] = &context.providers.left_out[..] {
            // Of one that could not be opened the name is not known.
            return Err(Unserved::Lacks(format!(
                "this communicator has no provider {provider}, and {name} was left out of it: {why}"
            )));
        }
        let known: Vec<&str> = context.providers.all.iter().map(|facts| facts.name.as_str()).collect();
        let others = if known.is_empty() { String::new() } else { format!(" but {}", known.join(", ")) };
        let remedy = "STRATA_PROVIDERS=mpi or the path of a plugin gives it one";
        return Err(Unserved::Unknown(format!("this communicator has no provider {provider}{others}; {remedy}")));
    };
    if request.provided.has(place) {
        return Ok(());
    }
    let (name, bytes) = (request.collective.name(), request.block_bytes);
    let blocks = match request.sizes {
        Sizes::Even => format!("{bytes} bytes a block"),
        Sizes::Known { .. } => format!("blocks of different sizes, on average {bytes} bytes,"),
        Sizes::Own => "blocks of different sizes".to_string(),
    };
    Err(Unserved::Lacks(format!("provider {provider} takes no {name} of {blocks} of this type and operation")))
}

/// Whether the algorithm that is asked for can be had, as far as providers go. An error where the call itself names a provider that
/// does not carry it out, or a setting one that the communicator was never to have.
pub(super) fn serves(name: &str, request: &Request<'_>, context: &Context) -> Result<bool> {
    let Some(provider) = algorithms::provider_in(name) else { return Ok(true) };
    match check(provider, request, context) {
        Ok(()) => Ok(true),
        Err(Unserved::Lacks(_)) if request.named.is_none() => Ok(false),
        Err(Unserved::Lacks(why) | Unserved::Unknown(why)) => {
            Err(Error::InvalidUsage(format!("algorithm {name}: {why}")))
        }
    }
}

/// Why a provider that a setting names does not carry the call out.
pub(super) fn passed_over(request: &Request<'_>, context: &Context) -> Option<String> {
    let provider = algorithms::provider_in(asked(request, context).ok()?.algorithm?)?;
    match check(provider, request, context) {
        Err(Unserved::Lacks(why)) => Some(why),
        _ => None,
    }
}

/// Whether a row's provider, if it names one, carries the call out.
pub(super) fn serves_row(choice: &algorithms::Choice, request: &Request<'_>, context: &Context) -> bool {
    algorithms::provider_of(choice).is_none_or(|provider| check(provider, request, context).is_ok())
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::{row, tuned};
    use super::super::{decide, Knowledge, Policy};
    use super::*;
    use crate::config::Config;
    use crate::plan::Collective;
    use crate::topo::Grid;
    use crate::transport::provider::{CommProviders, ProviderSet};
    use std::sync::Arc;

    fn context(config: Config) -> Context {
        with_left_out(config, vec![("bar".to_string(), "rank 2: no such file".to_string())])
    }

    fn with_left_out(config: Config, left_out: Vec<(String, String)>) -> Context {
        let providers = CommProviders { left_out, ..CommProviders::assumed(["foo".to_string()]) };
        Context { providers: Arc::new(providers), ..Context::new(Arc::new(Grid::blocks(&[2, 2])), config, true) }
    }

    fn named(algorithm: &str) -> Config {
        Config { all_reduce_algo: algorithm.to_string(), ..Config::default() }
    }

    fn request(named: Option<&'static str>, provided: ProviderSet) -> Request<'static> {
        Request { named, provided, ..Request::new(Collective::AllReduce, 4096) }
    }

    fn chosen(request: &Request<'_>, context: &Context) -> (Policy, String, usize) {
        let decision = decide(request, context).unwrap();
        let Executor::Own(selection) = &decision.executor else { panic!("{decision:?}") };
        (decision.by, selection.choice.to_string(), selection.segment_bytes)
    }

    #[test]
    fn a_provider_is_named_by_calls_settings_and_rows_and_gets_a_call_whole() {
        let all = ProviderSet::ALL;
        let whole = |by| (by, "provider:foo".to_string(), usize::MAX);
        assert_eq!(chosen(&request(Some("provider:foo"), all), &context(Config::default())), whole(Policy::Named));
        assert_eq!(chosen(&request(None, all), &context(named("provider:foo"))), whole(Policy::Named));
        let knowledge = Knowledge {
            tuned: Arc::new(tuned(&[row(Collective::AllReduce, 4096, "provider:foo")])),
            ..Knowledge::default()
        };
        let context = Context { knowledge, ..context(Config::default()) };
        assert_eq!(chosen(&request(None, all), &context), whole(Policy::TuningTable));
        assert_eq!(chosen(&request(None, ProviderSet::default()), &context).0, Policy::Defaults);
    }

    #[test]
    fn a_setting_s_calls_that_the_provider_does_not_take_are_strata_s_and_a_call_that_names_it_is_refused() {
        let none = ProviderSet::default();
        for setting in ["provider:foo", "provider:bar"] {
            let decision = decide(&request(None, none), &context(named(setting))).unwrap();
            assert_eq!(decision.by, Policy::Defaults);
            assert!(decision.reason.contains(setting.trim_start_matches("provider:")), "{}", decision.reason);
        }
        let refused = |name, config: &Config| {
            decide(&request(name, none), &context(config.clone())).unwrap_err().text().to_string()
        };
        let auto = Config::default();
        assert!(refused(Some("provider:foo"), &auto).contains("takes no all_reduce of 4096 bytes"));
        assert!(refused(Some("provider:bar"), &auto).ends_with("left out of this communicator: rank 2: no such file"));
        assert!(refused(Some("provider:mpi"), &auto).contains("no provider mpi, and bar was left out of it"));
        for (name, config) in [(Some("provider:mpi"), auto.clone()), (None, named("provider:mpi"))] {
            let told = decide(&request(name, none), &with_left_out(config, Vec::new())).unwrap_err();
            assert!(told.text().contains("no provider mpi but foo; STRATA_PROVIDERS="), "{told}");
        }
        let alone = Context { providers: Arc::default(), ..context(auto.clone()) };
        let told = decide(&request(Some("provider:mpi"), none), &alone).unwrap_err();
        assert!(told.text().contains("this communicator has no provider mpi; STRATA_PROVIDERS="), "{told}");
        assert!(refused(Some("provider:m-i"), &auto).contains("letters, digits and _"));
        assert!(refused(Some("two_level(provider:foo,log)"), &auto).contains("is no inner algorithm"));
    }
}
