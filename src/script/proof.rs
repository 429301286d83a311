//! Whether a script does what it says, and which plans of it run.
#![forbid(unsafe_code)]

use super::merge::merge;
use super::{lower, Lowered, Script, ScriptForm, Sending, StepSite};
use crate::plan::{Collective, StepRef};
use crate::topo::{Grid, Rank};
use crate::verify::{self, Check, EarlyWrite, Options, Rejection, Report};
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
    /// What the step does wrong, where that is known in the script's words.
    pub note: Option<String>,
    /// What the verifier found.
    pub rejection: Rejection,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.site {
            Some(site) => write!(f, "{site}: {}", self.finding()),
            None => write!(f, "rank {}: {}", self.rejection.rank, self.finding()),
        }
    }
}

impl std::error::Error for Refusal {}

/// Proves that a script does what it says, with sends that copy, as MSCCL's do, and in the place it was written for. What it
/// means is the same in every form.
///
/// # Errors
/// Where it does something else.
pub fn judge(script: &Script, grid: &Arc<Grid>, root: Rank) -> Result<(), Refusal> {
    let in_place = script.in_place;
    let meant = lower(script, grid, ScriptForm { in_place, prologue: false, root }, Sending::Buffered);
    check(&meant, CAPACITY).map(|_| ()).map_err(|rejection| refusal(script, &meant, rejection))
}

/// The plans of a script that has been judged, for calls of one form on a grid of its ranks, with the proof that they do it.
///
/// They send from where the data lies. Where the script writes there before the message must have been received, the write
/// waits for that, or, where it would wait for itself, the message is copied first.
///
/// # Errors
/// Where there are no such plans.
pub fn prove(script: &Script, grid: &Arc<Grid>, form: ScriptForm) -> Result<Proof, Refusal> {
    let none = FxHashSet::default();
    let (mut lowered, rejection) = match proof(lower(script, grid, form, Sending::Direct { copied: &none })) {
        Ok(proof) => return Ok(proof),
        Err(rejected) => *rejected,
    };
    // A channel that is full would hold a send up, and writes with it that are to come after.
    let early = verify::early_writes(&lowered.plans, &Options { capacity: usize::MAX });
    let early = early.map_err(|rejection| refusal(script, &lowered, rejection))?;
    for EarlyWrite { rank, send, write } in &early {
        let lane = &mut lowered.plans[rank.index()].lanes[write.lane as usize];
        let deps = &mut lane.steps[write.step as usize].deps;
        if !deps.contains(send) {
            deps.push(*send);
        }
    }
    let copied: FxHashSet<(u32, StepRef)> = early.iter().map(|write| (write.rank.0, write.send)).collect();
    let sendings = [Sending::Direct { copied: &copied }, Sending::Buffered];
    let others = sendings.into_iter().map(|sending| lower(script, grid, form, sending));
    let mut refused = refusal(script, &lowered, rejection);
    for lowered in std::iter::once(lowered).chain(others) {
        match proof(lowered) {
            Ok(proof) => return Ok(proof),
            Err(rejected) => refused = refusal(script, &rejected.0, rejected.1),
        }
    }
    Err(refused)
}

/// The same with lanes that are alike as one ([`merge()`]), where that does the same.
pub fn merged(proof: Proof) -> Proof {
    let plans = merge(&proof.lowered.plans);
    let merged = plans.and_then(|plans| self::proof(Lowered::of_plans(plans)).ok());
    merged.unwrap_or(proof)
}

/// The proof of plans with the least capacity that does, or the plans and what the verifier has against them.
fn proof(lowered: Lowered) -> Result<Proof, Box<(Lowered, Rejection)>> {
    let mut capacity = 1;
    loop {
        match check(&lowered, capacity) {
            Ok(report) => return Ok(Proof { lowered, report, capacity }),
            Err(rejection) if rejection.check == Check::Progress && capacity < CAPACITY => capacity += 1,
            Err(rejection) => return Err(Box::new((lowered, rejection))),
        }
    }
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

fn check(lowered: &Lowered, capacity: usize) -> Result<Report, Rejection> {
    if let Some((site, text)) = &lowered.stuck {
        let (rank, check) = (Rank(site.rank), Check::Progress);
        return Err(Rejection { check, rank, lane: None, step: None, text: text.clone() });
    }
    let verdict = verify::verify(&lowered.plans, &Options { capacity });
    match (&lowered.misplaced, verdict) {
        (Some(_), Err(rejection))
            if lowered.is_of_script(&rejection)
                && !matches!(rejection.check, Check::Completeness | Check::Provenance) =>
        {
            Err(rejection)
        }
        (Some((site, text)), _) => {
            let (rank, check) = (Rank(site.rank), Check::Provenance);
            Err(Rejection { check, rank, lane: None, step: None, text: text.clone() })
        }
        (None, verdict) => verdict,
    }
}

fn refusal(script: &Script, lowered: &Lowered, rejection: Rejection) -> Refusal {
    let at = rejection.lane.zip(rejection.step).map(|(lane, step)| StepRef { lane, step });
    let misplaced = lowered.misplaced.as_ref().filter(|(_, text)| *text == rejection.text);
    let told = lowered.stuck.as_ref().or(misplaced).map(|(site, _)| *site);
    let site = told.or_else(|| at.and_then(|at| lowered.site(script, rejection.rank, at)));
    let note = site.as_ref().filter(|_| told.is_none()).and_then(|site| lowered.note(site)).map(str::to_string);
    Refusal { site, note, rejection }
}

impl Refusal {
    /// What is wrong, without the step to blame.
    pub fn finding(&self) -> String {
        let Rejection { check, text, .. } = &self.rejection;
        format!("{} (check {}, {})", self.note.as_ref().unwrap_or(text), *check as u8, check.name())
    }

    /// Which of the verifier's checks failed.
    pub fn check(&self) -> Check {
        self.rejection.check
    }
}
