//! Carriers in names of algorithms: `two_level(direct,log)@mpi` is the algorithm over the carrier `mpi`.
//!
//! The one place where such names are taken apart: settings, calls, tuning tables and the command line have them. `@mpi` and
//! `auto@mpi` name the carrier and leave the algorithm to Strata; a name without `@` leaves the carrier to the tuning table,
//! and else to the communicator, whose own it is then.
#![forbid(unsafe_code)]

use super::{Context, Request};
use crate::carrier::Carrier;
use crate::error::{Error, Result};

/// What leaves a choice to Strata, whatever settings name.
pub const AUTO: &str = "auto";

/// An algorithm's name, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CarriedName<'a> {
    /// The algorithm's part; `auto` where it is left to Strata.
    pub algorithm: &'a str,
    /// The carrier; none where it is left open.
    pub carrier: Option<Carrier>,
}

impl<'a> CarriedName<'a> {
    /// Takes a name apart. A carrier that does not exist is `InvalidArgument`, and the nearest one is told.
    pub fn parse(text: &'a str) -> Result<CarriedName<'a>> {
        // No algorithm and no script has the sign in its name.
        let Some((algorithm, carrier)) = text.split_once('@') else {
            return Ok(CarriedName { algorithm: text, carrier: None });
        };
        let wrong = |what: String| Error::InvalidArgument(format!("algorithm {text}: {what}"));
        let carrier = Some(carrier.parse::<Carrier>().map_err(wrong)?);
        Ok(CarriedName { algorithm: if algorithm.is_empty() { AUTO } else { algorithm }, carrier })
    }

    /// The algorithm, unless it is left to Strata.
    pub fn algorithm(&self) -> Option<&'a str> {
        Some(self.algorithm).filter(|name| *name != AUTO)
    }

    /// The name with this algorithm in the place of its own.
    pub fn with(&self, algorithm: &str) -> String {
        match self.carrier {
            None => algorithm.to_string(),
            Some(carrier) => format!("{algorithm}@{}", carrier.name()),
        }
    }
}

/// The carriers of a communicator; the same on all its ranks.
#[derive(Debug, Clone, Default)]
pub struct CommCarriers {
    /// Its own. None on one node, where nothing goes between nodes, and before it is known: then every carrier stands for it
    /// that is not a further one.
    pub own: Option<Carrier>,
    /// Those with a sibling communicator.
    pub further: Vec<Carrier>,
    /// Those that were wanted and that some rank lacks, and why.
    pub left_out: Vec<(Carrier, String)>,
}

impl CommCarriers {
    /// The same by its name; without one it is the communicator's own.
    pub fn find_named(&self, name: Option<&str>) -> Result<Option<Carrier>> {
        let Some(name) = name else { return Ok(None) };
        self.find(name.parse().map_err(Error::InvalidUsage)?)
    }

    /// The further carrier that is meant, none where it is the communicator's own. What it does not have is `InvalidUsage`.
    pub fn find(&self, carrier: Carrier) -> Result<Option<Carrier>> {
        if self.further.contains(&carrier) {
            return Ok(Some(carrier));
        }
        let name = carrier.name();
        if let Some((_, why)) = self.left_out.iter().find(|(left_out, _)| *left_out == carrier) {
            return Err(Error::InvalidUsage(format!("carrier {name} was left out of this communicator: {why}")));
        }
        match self.own {
            Some(own) if own != carrier => {
                let all: Vec<&str> =
                    std::iter::once(own).chain(self.further.iter().copied()).map(Carrier::name).collect();
                let all = all.join(",");
                Err(Error::InvalidUsage(format!(
                    "this communicator has no carrier {name} but {all}: STRATA_CARRIERS={all},{name} gives it one"
                )))
            }
            _ => Ok(None),
        }
    }
}

/// What a call, or else the environment, asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    /// The algorithm, unless it is left to Strata.
    pub algorithm: Option<&'a str>,
    /// Whether a carrier is named; then which further one, none for the communicator's own.
    pub carrier: Option<Option<Carrier>>,
    /// By whom, in words.
    pub by: &'static str,
}

/// What is asked for a call.
pub(super) fn asked<'a>(request: &Request<'a>, context: &'a Context) -> Result<Asked<'a>> {
    let (text, by) = match request.named {
        Some(name) => (name, "named by the call"),
        None => (context.config.algorithm(request.collective), "named by the environment"),
    };
    let name = CarriedName::parse(text)?;
    let carrier = name.carrier.map(|carrier| context.carriers.find(carrier)).transpose();
    let carrier = carrier.map_err(|error| Error::InvalidUsage(format!("algorithm {text}: {}", error.text())))?;
    Ok(Asked { algorithm: name.algorithm(), carrier, by })
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::{row, tuned};
    use super::super::table::Row;
    use super::super::{decide, Decision, Executor, Knowledge, Policy, Sizes};
    use super::*;
    use crate::config::Config;
    use crate::plan::Collective;
    use crate::topo::Grid;
    use std::sync::Arc;

    fn over(own: Carrier, further: &[Carrier], config: Config) -> Context {
        let carriers = CommCarriers { own: Some(own), further: further.to_vec(), left_out: Vec::new() };
        Context { carriers, ..Context::new(Arc::new(Grid::blocks(&[2, 2])), config, false) }
    }

    fn named(name: &str) -> Config {
        Config { all_gather_algo: name.to_string(), ..Config::default() }
    }

    /// Who decides, the algorithm, and the further carrier.
    fn chosen(decision: Decision) -> (Policy, String, Option<&'static str>) {
        let Executor::Own(selection) = decision.executor else { panic!("{decision:?}") };
        (decision.by, selection.choice.to_string(), selection.carrier.map(Carrier::name))
    }

    fn refused(request: &Request<'_>, context: &Context) -> String {
        decide(request, context).unwrap_err().text().to_string()
    }

    #[test]
    fn a_name_is_taken_apart_at_its_sign_and_a_carrier_that_is_none_is_told_with_the_nearest() {
        let parts = |text: &'static str| {
            let name = CarriedName::parse(text).unwrap();
            (name.algorithm, name.carrier.map(Carrier::name), name.algorithm())
        };
        assert_eq!(parts("ring"), ("ring", None, Some("ring")));
        assert_eq!(parts("auto"), ("auto", None, None));
        assert_eq!(
            parts("two_level(direct,log)@mpi"),
            ("two_level(direct,log)", Some("mpi"), Some("two_level(direct,log)"))
        );
        assert_eq!(parts("@tcp"), ("auto", Some("tcp"), None));
        assert_eq!(parts("auto@tcp"), parts("@tcp"));
        for (text, part) in
            [("ring@mpj", "did you mean mpi?"), ("ring@", "name is missing"), ("ring@tcp@mpi", "carrier tcp@mpi")]
        {
            let told = CarriedName::parse(text).unwrap_err();
            assert!(told.text().starts_with(&format!("algorithm {text}: ")) && told.text().contains(part), "{told}");
        }
    }

    #[test]
    fn a_call_s_carrier_counts_before_the_environment_s_and_its_algorithm_stays_strata_s() {
        let request = Request::new(Collective::AllGather, 1 << 10);
        let context = over(Carrier::TCP, &[Carrier::MPI], named("ring@mpi"));
        let of = |request: &Request<'_>, context: &Context| chosen(decide(request, context).unwrap());
        assert_eq!(of(&request, &context), (Policy::Named, "ring".to_string(), Some("mpi")));
        let call = |name| Request { named: Some(name), ..request };
        assert_eq!(of(&call("log@tcp"), &context), (Policy::Named, "log".to_string(), None));
        assert_eq!(of(&call("log"), &context), (Policy::Named, "log".to_string(), None));
        let open = of(&call("auto"), &over(Carrier::TCP, &[Carrier::MPI], Config::default()));
        assert_eq!(of(&call("@mpi"), &context), (open.0, open.1, Some("mpi")));
        for sizes in [Sizes::Own, Sizes::Known { longest_bytes: 1 << 11 }] {
            let decision = decide(&Request { sizes, ..call("@mpi") }, &context).unwrap();
            assert_eq!(chosen(decision).2, Some("mpi"), "blocks of different sizes");
        }
    }

    #[test]
    fn a_carrier_that_the_communicator_does_not_have_is_refused_with_the_reason_and_on_one_node_all_are_its_own() {
        let request = Request { named: Some("ring@mpi"), ..Request::new(Collective::AllGather, 1 << 10) };
        let mut context = over(Carrier::TCP, &[], Config::default());
        assert!(
            refused(&request, &context).ends_with("has no carrier mpi but tcp: STRATA_CARRIERS=tcp,mpi gives it one")
        );
        context.carriers.left_out.push((Carrier::MPI, "rank 3: no MPI launcher started it".to_string()));
        assert!(refused(&request, &context).contains("was left out of this communicator: rank 3: no MPI"));
        context.carriers = CommCarriers::default();
        assert_eq!(chosen(decide(&request, &context).unwrap()).2, None);
        assert!(refused(&Request { named: Some("ring@mpl"), ..request }, &context).contains("did you mean mpi?"));
    }

    #[test]
    fn a_row_s_carrier_counts_where_nothing_else_names_one_and_one_that_is_not_there_has_no_say() {
        let rows = [Row { carrier: Some("mpi".to_string()), ..row(Collective::AllGather, 4096, "ring") }];
        let knowledge = Knowledge { tuned: Arc::new(tuned(&rows)), ..Knowledge::default() };
        let on = |further: &[Carrier], name: &str| {
            let context = Context { knowledge: knowledge.clone(), ..over(Carrier::TCP, further, Config::default()) };
            let request = Request {
                named: Some(name).filter(|name| !name.is_empty()),
                ..Request::new(Collective::AllGather, 1024)
            };
            chosen(decide(&request, &context).unwrap())
        };
        assert_eq!(on(&[Carrier::MPI], ""), (Policy::TuningTable, "ring".to_string(), Some("mpi")));
        assert_eq!(on(&[Carrier::MPI], "@tcp"), (Policy::TuningTable, "ring".to_string(), None));
        assert_eq!(on(&[], "").0, Policy::Defaults);
    }
}
