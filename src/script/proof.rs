//! Whether a script does what it says, and which plans of it run.
#![forbid(unsafe_code)]

use super::coarsen::coarsened;
use super::merge::merge;
use super::passes::{Marked, SentChunks};
use super::{lower, Lowered, RankScript, Script, ScriptForm, Sending, StepSite};
use crate::plan::{Collective, Plan, StepRef};
use crate::topo::{Grid, Rank};
use crate::verify::{self, Check, EarlyWrite, Options, Rejection, Report};
use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
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
    /// Whether every message is sent from where its data lies, and no write waits for a send but as the script says.
    is_direct: bool,
    /// Whether a script written for two buffers reads its input where it lies in one.
    is_read_there: bool,
    /// The passes that were applied, a bit for each.
    passes: u8,
}

/// What a proof has decided: who has the script and this has the plans without a proof.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Recipe {
    is_direct: bool,
    is_read_there: bool,
    passes: u8,
    capacity: usize,
    /// Steps, messages, chunks and rounds.
    report: [usize; 4],
}

impl Proof {
    /// What it has decided.
    pub(super) fn recipe(&self) -> Recipe {
        let Proof { is_direct, is_read_there, passes, capacity, report, .. } = self;
        let report = [report.steps, report.messages, report.chunks, report.rounds];
        Recipe { is_direct: *is_direct, is_read_there: *is_read_there, passes: *passes, capacity: *capacity, report }
    }
}

/// The passes, in their order.
const PASSES: [fn(&Marked) -> Option<Marked>; 3] = [Marked::without_dead_steps, Marked::aggregated, Marked::merged];
/// The bit of the pass over all forms together, which comes last: fewer chunks ([`coarsened`]).
const COARSENED: u8 = 1 << 3;

/// The plans of all forms by what the proofs of the same script have decided elsewhere; none where that takes a proof.
pub(super) fn rebuilt_forms(
    script: &Script,
    grid: &Arc<Grid>,
    forms: &[ScriptForm],
    recipes: &[Recipe],
) -> Option<Vec<Proof>> {
    let each = forms.iter().zip(recipes).map(|(&form, recipe)| rebuilt(script, grid, form, recipe));
    let mut proofs: Vec<Proof> = each.collect::<Option<_>>()?;
    if proofs.len() != forms.len() {
        return None;
    }
    if proofs.iter().any(|proof| proof.passes & COARSENED != 0) {
        let fine: Vec<Vec<Plan>> = proofs.iter().map(|proof| proof.lowered.plans.clone()).collect();
        for (proof, plans) in proofs.iter_mut().zip(coarsened(&fine)?) {
            proof.lowered = Lowered::of_plans(plans);
        }
    }
    Some(proofs)
}

/// The same of one form, with its chunks as they are.
fn rebuilt(script: &Script, grid: &Arc<Grid>, form: ScriptForm, recipe: &Recipe) -> Option<Proof> {
    let Recipe { is_direct: true, is_read_there, passes, capacity, report: [steps, messages, chunks, rounds] } =
        *recipe
    else {
        return None;
    };
    let none = FxHashSet::default();
    let sending = if is_read_there { Sending::InOneBuffer } else { Sending::Direct { copied: &none } };
    let mut lowered = lower(script, grid, form, sending);
    if lowered.stuck.is_some() {
        return None;
    }
    if passes > 0 {
        let mut marked = Marked::new(&lowered.plans);
        for (_, pass) in PASSES.iter().enumerate().filter(|(at, _)| passes >> at & 1 == 1) {
            marked = pass(&marked)?;
        }
        lowered = Lowered::of_plans(marked.plans());
    }
    let report = Report { ranks: script.nranks(), steps, messages, chunks, calls: 0, rounds };
    let is_same = lowered.plans.iter().map(crate::plan::Plan::nsteps).sum::<usize>() == steps;
    is_same.then_some(Proof { lowered, report, capacity, is_direct: true, is_read_there, passes })
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
/// waits for that, or, where it would wait for itself, the message is copied first. In place, a script for two buffers copies its
/// input first only where it would not do the same without.
///
/// # Errors
/// Where there are no such plans.
pub fn prove(script: &Script, grid: &Arc<Grid>, form: ScriptForm) -> Result<Proof, Refusal> {
    if form.in_place && !form.prologue && !script.in_place {
        if let Ok(proof) = proof(lower(script, grid, form, Sending::InOneBuffer)) {
            return Ok(Proof { is_direct: true, is_read_there: true, ..proof });
        }
    }
    let none = FxHashSet::default();
    let (mut lowered, rejection) = match proof(lower(script, grid, form, Sending::Direct { copied: &none })) {
        Ok(proof) => return Ok(Proof { is_direct: true, ..proof }),
        Err(rejected) => *rejected,
    };
    // A channel that is full would hold a send up, and writes with it that are to come after.
    let early = verify::early_writes(&lowered.plans, &Options { capacity: usize::MAX, vectored: false });
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

/// What the passes do to the proofs of a script's forms, in place and not: each pass is proved, and left out where it would not do
/// the same. Ranks of one call may have different forms, so the forms stay as they are where their messages would differ.
pub fn optimized(proofs: Vec<Proof>) -> Vec<Proof> {
    let (passed, messages): (Vec<Proof>, Vec<_>) = proofs.iter().map(passed).unzip();
    with_fewer_chunks(if messages.windows(2).all(|forms| forms[0] == forms[1]) { passed } else { proofs })
}

/// The proofs with chunks that always move together as one, where all of them still hold.
fn with_fewer_chunks(proofs: Vec<Proof>) -> Vec<Proof> {
    let fine: Vec<Vec<Plan>> = proofs.iter().map(|proof| proof.lowered.plans.clone()).collect();
    let Some(coarse) = coarsened(&fine) else { return proofs };
    let again = |(plans, old): (Vec<Plan>, &Proof)| {
        let proof = proof(Lowered::of_plans(plans)).ok()?;
        let passes = old.passes | COARSENED;
        Some(Proof { is_direct: old.is_direct, is_read_there: old.is_read_there, passes, ..proof })
    };
    let proved: Option<Vec<Proof>> = coarse.into_iter().zip(&proofs).map(again).collect();
    proved.unwrap_or(proofs)
}

/// The proof of one form after the passes, and what its messages carry.
fn passed(proof: &Proof) -> (Proof, Vec<SentChunks>) {
    let mut marked = Marked::new(&proof.lowered.plans);
    let mut best = proof.clone();
    for (at, pass) in PASSES.iter().enumerate() {
        let Some(next) = pass(&marked) else { continue };
        if let Ok(proof) = self::proof(Lowered::of_plans(next.plans())) {
            let passes = best.passes | 1 << at;
            let Proof { is_direct, is_read_there, .. } = best;
            (best, marked) = (Proof { is_direct, is_read_there, passes, ..proof }, next);
        }
    }
    (best, marked.messages())
}

/// The proof of plans with the least capacity that does, or the plans and what the verifier has against them.
fn proof(lowered: Lowered) -> Result<Proof, Box<(Lowered, Rejection)>> {
    let mut capacity = 1;
    loop {
        match check(&lowered, capacity) {
            Ok(report) => {
                return Ok(Proof { lowered, report, capacity, is_direct: false, is_read_there: false, passes: 0 })
            }
            Err(rejection) if rejection.check == Check::Progress && capacity < CAPACITY => capacity += 1,
            Err(rejection) => return Err(Box::new((lowered, rejection))),
        }
    }
}

/// Steps and chunks of all ranks that are gone through to find a root.
const MAX_ROOT_WORK: usize = 1 << 28;

/// Chunks of all ranks' buffers, and chunks that steps name.
fn work(script: &Script) -> usize {
    let of_rank = |rank: &RankScript| {
        let steps = rank.blocks.iter().flat_map(|block| &block.steps).map(|step| 1 + step.count as usize);
        script.places(rank) + steps.sum::<usize>()
    };
    script.ranks.iter().map(of_rank).sum()
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
    // With another root a leaf would have no part in the collective, so two leaves have none. Where there is none any may be it.
    let leaves: Vec<usize> = (0..script.nranks()).filter(leaf).take(1).collect();
    let candidates = if leaves.is_empty() { (0..script.nranks()).collect() } else { leaves };
    let mut first = None;
    for (tried, root) in candidates.iter().copied().map(Rank::from_index).enumerate() {
        if tried > 0 && tried * work(script) > MAX_ROOT_WORK {
            let text = format!(
                "the first {tried} of {} ranks are not its root, and it has too many chunks to try the others",
                candidates.len()
            );
            let rejection = Rejection { check: Check::Bounds, rank: root, lane: None, step: None, text };
            return Err(Refusal { site: None, note: None, rejection });
        }
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
    let verdict = verify::verify(&lowered.plans, &Options { capacity, vectored: false });
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
    let text = in_file(script, lowered, &rejection);
    // What a note says is that a chunk is not the right one, whatever that came to in the plans.
    let check = if note.is_some() { Check::Provenance } else { rejection.check };
    Refusal { site, note, rejection: Rejection { check, text, ..rejection } }
}

/// What the verifier says, with steps of the plans (`step 0.3`) as the file has them.
fn in_file(script: &Script, lowered: &Lowered, Rejection { rank, text, .. }: &Rejection) -> String {
    const STEP: &str = "step ";
    let (mut told, mut rest) = (String::new(), text.as_str());
    while let Some(at) = rest.find(STEP) {
        let (before, after) = rest.split_at(at + STEP.len());
        let end = after.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(after.len());
        let numbers = after[..end].split_once('.');
        let step =
            numbers.and_then(|(lane, step)| Some(StepRef { lane: lane.parse().ok()?, step: step.parse().ok()? }));
        match step.and_then(|step| lowered.site(script, *rank, step)) {
            Some(StepSite { block, step, line, .. }) => {
                told += before.trim_end_matches(STEP);
                told += &format!("line {line} (thread block {block}, step {step})");
            }
            None => told = told + before + &after[..end],
        }
        rest = &after[end..];
    }
    told + rest
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
