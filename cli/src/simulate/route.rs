//! The route that Strata takes: the one for which its cost model predicts the least time.
#![forbid(unsafe_code)]

use std::sync::Arc;
use strata::algorithms;
use strata::carrier::Carrier;
use strata::code::FloatCode;
use strata::config::Config;
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::selection::cost::candidates;
use strata::selection::{decide, Context, Executor, Request, Selection, Sizes};
use strata::sim::price::{block_bytes, How, PricedPlan};
use strata::sim::skew::Skew;
use strata::sim::Cluster;
use strata::topo::Grid;

/// Without falling back to the vendor's library; None where Strata has no route of its own.
pub fn own(machine: &Cluster, grid: &Arc<Grid>, collective: Collective, message_bytes: usize) -> Option<How> {
    let all = candidates(machine, grid, collective, message_bytes);
    all.into_iter().map(|candidate| candidate.how).find(|how| matches!(how, How::Strata(_)))
}

/// With the vendor's library as a candidate.
pub fn chosen(machine: &Cluster, grid: &Arc<Grid>, collective: Collective, message_bytes: usize) -> Option<How> {
    candidates(machine, grid, collective, message_bytes).into_iter().next().map(|candidate| candidate.how)
}

/// What Strata takes for blocks of different sizes, which no cost model knows.
pub fn skewed(grid: &Arc<Grid>, collective: Collective, message_bytes: usize, skew: Skew) -> Result<How> {
    let block_bytes = block_bytes(collective, grid.nranks(), message_bytes);
    let longest_bytes = skew.sizes(grid.nranks(), block_bytes.saturating_mul(grid.nranks())).into_iter().max();
    let sizes = match collective {
        Collective::AllGather | Collective::ReduceScatter => Sizes::Known { longest_bytes: longest_bytes.unwrap_or(0) },
        _ => Sizes::Own,
    };
    let request = Request { sizes, ..Request::new(collective, block_bytes) };
    of_settings(&request, grid, Config::default())
}

/// What Strata takes by default thresholds, which know nothing of the machine.
pub fn by_thresholds(grid: &Arc<Grid>, collective: Collective, message_bytes: usize) -> Result<How> {
    let block_bytes = block_bytes(collective, grid.nranks(), message_bytes);
    of_settings(&Request::new(collective, block_bytes), grid, Config::default())
}

/// What Strata takes where this code is set for the collective; None where it codes no such calls.
pub fn coded(grid: &Arc<Grid>, collective: Collective, message_bytes: usize, code: FloatCode) -> Option<How> {
    let block_bytes = block_bytes(collective, grid.nranks(), message_bytes);
    let request = Request { code: Some(code), ..Request::new(collective, block_bytes) };
    let how = of_settings(&request, grid, Config { code_min_bytes: 0, ..Config::default() }).ok()?;
    let is_coded = matches!(&how, How::Strata(plan) if algorithms::code_of(&plan.choice) == Some(code));
    is_coded.then_some(how)
}

/// What Strata takes by its settings alone, without a vendor's library.
fn of_settings(request: &Request<'_>, grid: &Arc<Grid>, config: Config) -> Result<How> {
    match decide(request, &Context::new(grid.clone(), config, false))?.executor {
        Executor::Own(Selection { choice, segment_bytes, window, .. }) => {
            Ok(How::Strata(PricedPlan { choice, segment_bytes, window, carrier: Carrier::MPI }))
        }
        other => Err(Error::Internal(format!("{other:?} does a call without a vendor's library"))),
    }
}
