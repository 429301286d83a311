//! The ways in which a simulated step's calls may be carried out, and the step laid out by each.
//!
//! Of the machine's carriers two mixes are made, as MCR-DL has them: one carrier for each collective, and one for each collective and
//! size. The first is the best of all assignments by the step that it gives, so neither mix is slower than any carrier by itself.
#![forbid(unsafe_code)]

use super::super::collective::Kind;
use super::program::{label, Call, Program};
use super::simulate::{price_in, Asked};
use super::timeline::{lay_out, Pricer, Times};
use std::collections::HashMap;
use strata::error::{Error, Result};
use strata::sim::price::Price;
use strata::sim::skew::Skew;
use strata::sim::Cluster;

/// Who carries a call out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CallBy {
    /// The vendor's library.
    Vendor,
    /// PCCL, and the vendor's library where it has nothing.
    Pccl,
    /// A carrier of the machine.
    Carrier(String),
    /// The quickest carrier for this call.
    Quickest,
    /// Strata's own plans.
    Strata,
    /// The quickest of Strata's plans with even shares, found by pricing them.
    Even,
    /// The same with shares by what links deliver.
    Synthesized,
}

/// A way to carry the calls of a step out.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    /// All alike.
    All(CallBy),
    /// A carrier for each collective.
    ByCollective(Vec<(Kind, String)>),
    /// Strata's own plan or a carrier, whichever is quicker for the call.
    Chosen,
}

/// The names of the ways on a machine without carriers.
pub const WAYS: [&str; 3] = ["vendor", "PCCL", "Strata"];
/// The names of the ways on a machine of unequal nodes.
pub const UNEQUAL: [&str; 2] = ["even", "synthesized"];
/// The name of the mix that has a carrier for each collective.
const BY_COLLECTIVE: &str = "mix";
/// The name of the mix that has a carrier for each collective and size.
const BY_SIZE: &str = "tuned mix";
/// The name of the way that has Strata's plans beside the carriers.
const CHOSEN: &str = "chosen";

/// A step by each way.
#[derive(Debug)]
pub struct Routes {
    /// The names of the ways, and the times.
    pub routes: Vec<(String, Times)>,
    /// What the mixes chose, in lines.
    pub notes: Vec<String>,
}

/// Lays the step out by each way, or by those of `only`; what a machine cannot price is left out.
///
/// # Errors
/// `InvalidArgument` for a name in `only` that is none of the machine's ways.
pub fn routes(program: &Program, machine: &Cluster, only: &[String], bar: &indicatif::ProgressBar) -> Result<Routes> {
    let mut prices = Prices { machine, known: HashMap::new(), bar };
    let all = |(name, by): (&str, CallBy)| (name.to_string(), Way::All(by));
    let named: Vec<(String, Way)> = match machine.carriers.is_empty() {
        true if machine.has_unequal_nodes() => {
            UNEQUAL.into_iter().zip([CallBy::Even, CallBy::Synthesized]).map(all).collect()
        }
        true => WAYS.into_iter().zip([CallBy::Vendor, CallBy::Pccl, CallBy::Strata]).map(all).collect(),
        false => {
            let carriers = machine.carriers.keys().map(|name| (name.clone(), Way::All(CallBy::Carrier(name.clone()))));
            let mix = (BY_COLLECTIVE.to_string(), Way::ByCollective(Vec::new()));
            let rest = [all((BY_SIZE, CallBy::Quickest)), all((WAYS[2], CallBy::Strata))];
            carriers.chain([mix]).chain(rest).chain([(CHOSEN.to_string(), Way::Chosen)]).collect()
        }
    };
    if let Some(unknown) = only.iter().find(|name| named.iter().all(|(known, _)| known != *name)) {
        let known = named.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        let machine = &machine.name;
        return Err(Error::InvalidArgument(format!("--routes: machine {machine} has no way {unknown}, only {known}")));
    }
    let mut found = Routes { routes: Vec::new(), notes: Vec::new() };
    let wanted = |name: &str| only.is_empty() || only.iter().any(|only| only == name);
    for (name, way) in named.into_iter().filter(|(name, _)| wanted(name)) {
        let times = match &way {
            Way::ByCollective(_) => prices.by_collective(program, &mut found.notes)?,
            way => prices.step(program, way)?,
        };
        if way == Way::All(CallBy::Quickest) {
            found.notes.extend(prices.chosen_by_size(program)?);
        }
        found.routes.extend(times.map(|times| (name, times)));
    }
    match found.routes.is_empty() {
        true => {
            Err(Error::InvalidUsage(format!("machine {} has no way that does all calls of this step", machine.name)))
        }
        false => Ok(found),
    }
}

/// Who carries a call out, and what is called: the collective, the group, its bytes and how blocks differ.
type PriceKey = (CallBy, Kind, usize, usize, Option<Skew>);

/// Prices by who carries a call out and by what is called.
struct Prices<'a> {
    machine: &'a Cluster,
    known: HashMap<PriceKey, Option<Price>>,
    bar: &'a indicatif::ProgressBar,
}

struct StepPricer<'a, 'b, 'c> {
    prices: &'a mut Prices<'b>,
    way: &'c Way,
}

impl Pricer for StepPricer<'_, '_, '_> {
    fn price(&mut self, program: &Program, call: &Call) -> Result<Price> {
        let price = self.prices.of(program, call, self.way)?;
        price.ok_or_else(|| {
            let (machine, kind) = (&self.prices.machine.name, call.kind.name());
            Error::InvalidUsage(format!("machine {machine} knows no price of {kind} by {:?}", self.way))
        })
    }
}

impl Prices<'_> {
    /// What a call takes; none where the way does not do it.
    fn of(&mut self, program: &Program, call: &Call, way: &Way) -> Result<Option<Price>> {
        match way {
            Way::All(by) => self.one(program, call, by),
            Way::ByCollective(names) => match names.iter().find(|(kind, _)| *kind == call.kind) {
                Some((_, name)) => self.one(program, call, &CallBy::Carrier(name.clone())),
                None => Ok(None),
            },
            Way::Chosen => {
                let (own, carried) =
                    (self.one(program, call, &CallBy::Strata)?, self.one(program, call, &CallBy::Quickest)?);
                Ok(own.into_iter().chain(carried).min_by(|one, other| one.ns.total_cmp(&other.ns)))
            }
        }
    }

    /// What a call takes by one of those who may carry it out; none where they do not do it.
    fn one(&mut self, program: &Program, call: &Call, by: &CallBy) -> Result<Option<Price>> {
        let bytes = program.bytes_of(call);
        let key = (by.clone(), call.kind, call.group, bytes, call.skew);
        if let Some(price) = self.known.get(&key) {
            return Ok(price.clone());
        }
        let group = &program.groups[call.group];
        self.bar.set_message(format!("{} of {bytes} bytes in {}", call.kind.name(), group.name));
        let price = price_in(program, group, self.machine, by, &Asked { kind: call.kind, bytes, skew: call.skew })?;
        self.known.insert(key, price.clone());
        Ok(price)
    }

    /// The step by a way; none where it does not do all calls.
    fn step(&mut self, program: &Program, way: &Way) -> Result<Option<Times>> {
        match lay_out(program, &mut StepPricer { prices: self, way }) {
            Ok(times) => Ok(Some(times)),
            Err(Error::InvalidUsage(_)) if *way != Way::All(CallBy::Strata) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The step by the best assignment of a carrier to each collective.
    fn by_collective(&mut self, program: &Program, notes: &mut Vec<String>) -> Result<Option<Times>> {
        let mut kinds: Vec<Kind> = Vec::new();
        for call in &program.calls {
            if !kinds.contains(&call.kind) {
                kinds.push(call.kind);
            }
        }
        let carriers: Vec<String> = self.machine.carriers.keys().cloned().collect();
        let mut best: Option<(Times, Vec<(Kind, String)>)> = None;
        for number in 0..carriers.len().pow(kinds.len() as u32) {
            let digit = |place: usize| number / carriers.len().pow(place as u32) % carriers.len();
            let names = kinds.iter().enumerate().map(|(place, &kind)| (kind, carriers[digit(place)].clone())).collect();
            let way = Way::ByCollective(names);
            let Some(times) = self.step(program, &way)? else { continue };
            let Way::ByCollective(names) = way else { continue };
            if best.as_ref().is_none_or(|(best, _)| times.step < best.step) {
                best = Some((times, names));
            }
        }
        Ok(best.map(|(times, names)| {
            let text = |(kind, name): &(Kind, String)| format!("{} by {name}", kind.name());
            notes.push(format!("{BY_COLLECTIVE}: {}", names.iter().map(text).collect::<Vec<_>>().join(", ")));
            times
        }))
    }

    /// Which carrier is the quickest for each different call, in lines.
    fn chosen_by_size(&mut self, program: &Program) -> Result<Vec<String>> {
        let mut lines: Vec<String> = Vec::new();
        for call in &program.calls {
            let mut best: Option<(f64, &String)> = None;
            for name in self.machine.carriers.keys() {
                let price = self.one(program, call, &CallBy::Carrier(name.clone()))?;
                let quicker = |price: &Price| best.is_none_or(|(ns, _)| price.ns < ns);
                if let Some(price) = price.filter(quicker) {
                    best = Some((price.ns, name));
                }
            }
            let Some((_, name)) = best else { continue };
            let (group, bytes) = (&program.groups[call.group].name, program.bytes_of(call));
            let what = label(call.kind, call.skew);
            let line = format!("{BY_SIZE}: {what} of {bytes} bytes in {group} by {name}");
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalogue::find;
    use super::super::program::Setting;
    use super::*;

    const CASES: [(&str, &str, [usize; 3]); 3] = [
        ("ds-moe", "lassen", [16, 64, 256]),
        ("dlrm-mcr", "thetagpu", [8, 16, 32]),
        ("megatron-6.7b", "thetagpu", [8, 16, 32]),
    ];

    fn program(name: &str, world: usize) -> Program {
        let setting = Setting { world, flops: 156e12, scale: 1.0, compute: true, set: Vec::new(), sizes: None };
        Program::new(&find(name).unwrap(), &setting).unwrap()
    }

    fn laid_out(name: &str, machine: &str, world: usize, only: &[&str]) -> Result<Routes> {
        let only: Vec<String> = only.iter().map(|name| name.to_string()).collect();
        let (program, machine) = (program(name, world), Cluster::find(machine).unwrap());
        routes(&program, &machine, &only, &indicatif::ProgressBar::hidden())
    }

    #[test]
    fn a_mix_is_never_slower_than_its_best_carrier_and_a_tuned_mix_than_any_other() {
        for (name, machine, worlds) in CASES {
            for world in worlds {
                let found = laid_out(name, machine, world, &[]).unwrap().routes;
                let step = |name: &str| found.iter().find(|(known, _)| known == name).map(|(_, times)| times.step);
                let (mix, tuned, chosen) =
                    (step(BY_COLLECTIVE).unwrap(), step(BY_SIZE).unwrap(), step(CHOSEN).unwrap());
                let carriers = Cluster::find(machine).unwrap().carriers;
                let single: Vec<f64> = carriers.keys().filter_map(|name| step(name)).collect();
                assert!(single.len() >= 2, "{name}: {found:?}");
                let best = single.into_iter().fold(f64::INFINITY, f64::min);
                assert!(
                    mix <= best && tuned <= mix && chosen <= tuned,
                    "{name}, {world}: {best} {mix} {tuned} {chosen}"
                );
                assert!(chosen <= step("Strata").unwrap(), "{name}, {world}");
            }
        }
    }

    #[test]
    fn a_carrier_that_lacks_a_collective_has_no_route_and_the_mixes_say_what_they_chose() {
        let found = laid_out("dlrm-mcr", "thetagpu", 32, &["nccl", "sccl", "mix", "tuned mix"]).unwrap();
        let names: Vec<&str> = found.routes.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["nccl", "mix", "tuned mix"], "sccl has no all-to-all");
        assert!(
            found.notes.contains(&"mix: alltoall by mvapich2-gdr, all_reduce by sccl".to_string()),
            "{:?}",
            found.notes
        );
        let line = "tuned mix: alltoall of 2097152 bytes in data by mvapich2-gdr".to_string();
        assert!(found.notes.contains(&line), "{:?}", found.notes);
    }

    #[test]
    fn a_route_that_the_machine_does_not_have_is_told_with_those_that_it_has() {
        let error = laid_out("ds-moe", "lassen", 16, &["sccl"]).unwrap_err();
        let known = "mvapich2-gdr, nccl, mix, tuned mix, Strata, chosen";
        assert_eq!(error.text(), format!("--routes: machine lassen has no way sccl, only {known}"));
        let error = laid_out("ds-moe", "frontier", 16, &["mix"]).unwrap_err();
        assert!(error.text().ends_with("only vendor, PCCL, Strata"), "{error}");
    }
}
