//! Calls that a provider may carry out: which of the communicator's providers take a call of its type, operation and size.
#![forbid(unsafe_code)]

use super::{CollectiveCall, Comm};
use crate::algorithms;
use crate::dtype::{DataType, Operator, Reduction};
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::plan::Collective;
use crate::selection::CarriedName;
use crate::topo::Rank;
use crate::transport::provider::{self, CommProviders, ProvidedKind, ProviderFacts, ProviderSet};
use crate::transport::{Exchange, Router, Site};
use std::collections::BTreeMap;
use std::sync::Once;

/// Said once in a process.
static LEFT_OUT: PerProcess<Once> = PerProcess::new(Once::new);

/// Opens the providers that rank 0's settings name. All ranks call it together.
pub(super) fn open(router: &mut Router, site: &Site<'_>, exchange: &mut dyn Exchange) -> Result<CommProviders> {
    let wanted = provider::wanted(&site.config.providers).map_err(Error::InvalidUsage)?;
    if wanted.is_empty() || site.grid.nranks() < 2 {
        return Ok(CommProviders::default());
    }
    let known = router.open_providers(site, exchange)?;
    if site.me == Rank(0) {
        for (name, why) in &known.left_out {
            let (name, setting) = (format!("provider:{name}"), &site.config.providers);
            LEFT_OUT.get().call_once(|| {
                crate::log::notice(&format!("STRATA_PROVIDERS={setting}: {name} is left out: {why}"));
            });
            crate::info!("{name} is left out: {why}");
        }
        let names: Vec<String> = known.all.iter().map(|facts| format!("provider:{}", facts.name)).collect();
        if !names.is_empty() {
            crate::info!("calls may go by {}", names.join(", "));
        }
    }
    Ok(known)
}

impl Comm {
    /// The providers that carry out such calls.
    pub(super) fn providers_for(&self, call: &CollectiveCall) -> ProviderSet {
        if self.providers.all.is_empty() {
            return ProviderSet::default();
        }
        let (collective, dtype, uneven) = (call.collective, call.dtype, call.blocks.is_some());
        let elements = match call.known_sizes() {
            _ if !uneven => call.count,
            Some(sizes) => sizes.iter().fold(0, |sum: usize, &count| sum.saturating_add(count)),
            // What a rank has too much of is told when the call begins.
            None => 0,
        };
        let operator = call.reduction.map(|reduction| reduction.operator);
        self.providers.of(ProvidedKind { collective, dtype, operator, uneven }, elements.saturating_mul(dtype.size()))
    }

    /// Its providers by name, each with the collectives that it does of float32, where they reduce as a sum.
    pub fn providers(&self) -> BTreeMap<&str, Vec<&'static str>> {
        let does = |facts: &ProviderFacts, collective: Collective| {
            let operator = collective.reduces().then_some(Operator::Sum);
            facts.most.get(ProvidedKind { collective, dtype: DataType::F32, operator, uneven: false }) > 0
        };
        let of = |facts: &ProviderFacts| -> Vec<&'static str> {
            Collective::ALL.into_iter().filter(|collective| does(facts, *collective)).map(Collective::name).collect()
        };
        self.providers.all.iter().map(|facts| (facts.name.as_str(), of(facts))).collect()
    }

    /// Whether an algorithm is no provider's, or one that carries out calls of so many bytes a block.
    pub fn provides(
        &self,
        algorithm: &str,
        (collective, block_bytes): (Collective, usize),
        (dtype, reduction): (DataType, Option<Reduction>),
    ) -> bool {
        let operator = reduction.map(|reduction| reduction.operator);
        let kind = ProvidedKind { collective, dtype, operator, uneven: false };
        self.is_served(algorithm, || self.providers.of(kind, block_bytes))
    }

    /// Whether an algorithm is no provider's, or one that carries out such a call.
    pub fn provides_call(&self, algorithm: &str, call: &CollectiveCall) -> bool {
        self.is_served(algorithm, || self.providers_for(call))
    }

    fn is_served(&self, algorithm: &str, set: impl FnOnce() -> ProviderSet) -> bool {
        let name = CarriedName::parse(algorithm).map_or(algorithm, |name| name.algorithm);
        let Some(provider) = algorithms::provider_in(name) else { return true };
        self.providers.place(provider).is_some_and(|place| set().has(place))
    }
}
