//! Whether a script does what it says, and which plans of it run.
#![forbid(unsafe_code)]

use super::{lower, Lowered, Script, ScriptForm, Sending, StepSite};
use crate::plan::{Collective, StepRef};
use crate::topo::{Grid, Rank};
use crate::verify::{self, Check, Options, Rejection, Report};
use rustc_hash::FxHashSet;
use std::fmt;
use std::sync::Arc;

/// Messages that a channel holds, of every transport, however long they are. MSCCL's runtimes have eight slots.
pub const CAPACITY: usize = 8;

/// The plans of a script that has been proved.
#[derive(Debug, Clone)]
pub struct Proof {
    /// What runs.
    pub lowered: Lowered,
    /// What the plans do.
    pub report: Report,
    /// The least messages that channels must hold.
    pub capacity: usize,
}

/// Why a script is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The step to blame, if there is one.
    pub site: Option<StepSite>,
    /// What the verifier found.
    pub rejection: Rejection,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rejection { check, rank, text, .. } = &self.rejection;
        match &self.site {
            Some(site) => write!(f, "{site}: {text} (check {}, {})", *check as u8, check.name()),
            None => write!(f, "rank {rank}: {text} (check {}, {})", *check as u8, check.name()),
        }
    }
}

impl std::error::Error for Refusal {}

/// Proves that a script does what it says, for calls of one form on a grid of its ranks, and gives the plans to run.
///
/// What the script means is proved with sends that copy, as MSCCL's do. What runs sends from where the data lies; where the
/// script writes there before the message must have been received, the write waits for that, or, where it would wait for
/// itself, the message is copied first.
///
/// # Errors
/// Where the script does not do it.
pub fn prove(script: &Script, grid: &Arc<Grid>, form: ScriptForm) -> Result<Proof, Refusal> {
    let meant = lower(script, grid, form, Sending::Buffered);
    check(&meant, CAPACITY).map_err(|rejection| refusal(script, &meant, rejection))?;
    let (lowered, report) = direct(script, grid, form).unwrap_or_else(|| {
        let report = check(&meant, CAPACITY).unwrap_or_default();
        (meant, report)
    });
    let enough = |capacity: &usize| check(&lowered, *capacity).is_ok();
    let capacity = (1..CAPACITY).find(enough).unwrap_or(CAPACITY);
    Ok(Proof { lowered, report, capacity })
}

/// The root of a script, which files do not name: the rank with which it does what it says. Rank 0 where there is none to find.
///
/// # Errors
/// Where it does it with none; what the likeliest one lacks.
pub fn root(script: &Script, grid: &Arc<Grid>) -> Result<Rank, Refusal> {
    if !script.collective.has_root() {
        return Ok(Rank(0));
    }
    let is_source = matches!(script.collective, Collective::Broadcast | Collective::Scatter);
    // Data leaves the root of a broadcast, and never comes to it; the other way round for a reduce.
    let leaf = |rank: &usize| {
        let mut blocks = script.ranks[*rank].blocks.iter();
        blocks.all(|block| if is_source { block.from.is_none() } else { block.to.is_none() })
    };
    let mut candidates: Vec<usize> = (0..script.nranks()).collect();
    candidates.sort_by_key(|rank| !leaf(rank));
    let mut first = None;
    for root in candidates.into_iter().map(Rank::from_index) {
        let meant = lower(script, grid, ScriptForm { in_place: false, prologue: false, root }, Sending::Buffered);
        match check(&meant, CAPACITY) {
            Ok(_) => return Ok(root),
            Err(rejection) => first = first.or_else(|| Some(refusal(script, &meant, rejection))),
        }
    }
    first.map_or(Ok(Rank(0)), Err)
}

/// The plans that copy as few messages as can be.
fn direct(script: &Script, grid: &Arc<Grid>, form: ScriptForm) -> Option<(Lowered, Report)> {
    let mut lowered = lower(script, grid, form, Sending::Direct { copied: &FxHashSet::default() });
    let early = verify::early_writes(&lowered.plans, &Options { capacity: CAPACITY }).ok()?;
    for write in &early {
        let deps = &mut lowered.plans[write.rank.index()].lanes[write.write.lane as usize].steps
            [write.write.step as usize]
            .deps;
        if !deps.contains(&write.send) {
            deps.push(write.send);
        }
    }
    match check(&lowered, CAPACITY) {
        Ok(report) => Some((lowered, report)),
        Err(_) => {
            let copied: FxHashSet<(u32, StepRef)> = early.iter().map(|write| (write.rank.0, write.send)).collect();
            let lowered = lower(script, grid, form, Sending::Direct { copied: &copied });
            check(&lowered, CAPACITY).ok().map(|report| (lowered, report))
        }
    }
}

fn check(lowered: &Lowered, capacity: usize) -> Result<Report, Rejection> {
    verify::verify(&lowered.plans, &Options { capacity })
}

fn refusal(script: &Script, lowered: &Lowered, rejection: Rejection) -> Refusal {
    let at = rejection.lane.zip(rejection.step).map(|(lane, step)| StepRef { lane, step });
    let site = at.and_then(|at| lowered.site(script, rejection.rank, at));
    Refusal { site, rejection }
}

impl Refusal {
    /// Which of the verifier's checks failed.
    pub fn check(&self) -> Check {
        self.rejection.check
    }
}
