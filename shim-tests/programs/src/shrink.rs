//! Cuts a failing program down: leaves out operations, ranks, pauses, settings and bytes for as long as it still fails.

use crate::conduct::{Conduct, Verdict};
use crate::program::{Action, Kind, Program, World};

/// A smaller program that still fails, and how; `None` where the program passes. A candidate fails if any of `tries` runs
/// does.
pub fn shrink(program: &Program, conduct: &Conduct, tries: u32) -> Result<Option<(Program, String)>, String> {
    let runs = |candidate: &Program, tries: u32, class: Option<&str>| -> Result<Option<String>, String> {
        for _ in 0..tries {
            match conduct.run(candidate)? {
                Verdict::Failed { what, .. } if class.is_none_or(|class| class == self::class(&what)) => {
                    return Ok(Some(what));
                }
                _ => {}
            }
        }
        Ok(None)
    };
    let Some(mut what) = runs(program, 3 * tries, None)? else { return Ok(None) };
    let wanted = class(&what);
    let fails = |candidate: &Program| runs(candidate, tries, Some(&wanted));
    let mut best = program.clone();
    loop {
        let before = best.clone();
        let mut at = 0;
        let mut chunk = (best.ops.len() / 2).max(1);
        // Large pieces first, then single operations.
        loop {
            while at < best.ops.len() {
                if let Some(candidate) = without_ops(&best, at..(at + chunk).min(best.ops.len())) {
                    if let Some(found) = fails(&candidate)? {
                        (best, what) = (candidate, found);
                        progress(&best, &what);
                        continue;
                    }
                }
                at += chunk;
            }
            if chunk == 1 {
                break;
            }
            (at, chunk) = (0, chunk / 2);
        }
        for candidate in simpler(&best) {
            // The candidates are of an earlier program where one has been taken: those that no longer fit are left out.
            if let Some(found) = fails(&candidate)? {
                (best, what) = (candidate, found);
                progress(&best, &what);
                break;
            }
        }
        if format!("{before:?}") == format!("{best:?}") {
            return Ok(Some((best, what)));
        }
    }
}

/// The kind of a failure: a smaller program that fails otherwise is another story.
fn class(what: &str) -> String {
    let kinds = ["leak", "wrong data", "outside of the output", "died of signal", "hang", "does not name", "survivors"];
    let known = kinds.iter().find(|kind| what.contains(**kind)).map(|kind| kind.to_string());
    known.unwrap_or_else(|| what.split("code ").nth(1).unwrap_or("").chars().take_while(|c| *c != ':').collect())
}

fn progress(program: &Program, what: &str) {
    eprintln!("{} ranks, {} operations: {what}", program.nranks(), program.ops.len());
}

/// The program without some operations, and without all that needs what they made.
fn without_ops(program: &Program, range: std::ops::Range<usize>) -> Option<Program> {
    let mut smaller = program.clone();
    let mut missing: Vec<usize> = Vec::new();
    smaller.ops.clear();
    let mut fault_at = None;
    for (index, op) in program.ops.iter().enumerate() {
        let is_fault = program.fault.as_ref().is_some_and(|fault| fault.op == index);
        if range.contains(&index) || op.action.uses().iter().any(|comm| missing.contains(comm)) {
            missing.extend(op.action.makes());
            if is_fault {
                return None;
            }
            continue;
        }
        if is_fault {
            fault_at = Some(smaller.ops.len());
        }
        smaller.ops.push(op.clone());
    }
    if let Some(fault) = &mut smaller.fault {
        fault.op = fault_at?;
    }
    (!smaller.ops.is_empty()).then_some(smaller)
}

/// Programs that are simpler in one respect each.
fn simpler(program: &Program) -> Vec<Program> {
    let mut found = Vec::new();
    if program.fault.is_none() {
        found.extend((0..program.nranks()).rev().filter_map(|rank| without_rank(program, rank)));
    }
    for index in 0..program.settings.len() {
        let mut candidate = program.clone();
        candidate.settings.remove(index);
        found.push(candidate);
    }
    for (index, op) in program.ops.iter().enumerate() {
        let mut edit = |change: &dyn Fn(&mut crate::program::Op)| {
            let mut candidate = program.clone();
            change(&mut candidate.ops[index]);
            found.push(candidate);
        };
        if !op.pauses.is_empty() {
            edit(&|op| op.pauses.clear());
        }
        for pause in 0..op.pauses.len().max(1) - 1 {
            edit(&|op| {
                op.pauses.remove(pause);
            });
        }
        if !op.forks.is_empty() {
            edit(&|op| op.forks.clear());
        }
        let Action::Calls { calls, .. } = &op.action else { continue };
        for call in 0..calls.len() {
            let change = |f: fn(&mut crate::program::Call)| {
                move |op: &mut crate::program::Op| {
                    if let Action::Calls { calls, nesting } = &mut op.action {
                        *nesting = 0;
                        f(&mut calls[call]);
                    }
                }
            };
            if calls.len() > 1 {
                edit(&|op| {
                    if let Action::Calls { calls, .. } = &mut op.action {
                        calls.remove(call);
                    }
                });
            }
            let now = &calls[call];
            if now.count > 8 || now.messages.iter().any(|message| message.2 > 8) {
                edit(&change(|call| {
                    call.count = (call.count / 8).max(1);
                    call.messages.iter_mut().for_each(|message| message.2 = (message.2 / 8).max(1));
                }));
            }
            if now.messages.len() > 1 {
                edit(&change(|call| call.messages.truncate(call.messages.len() / 2)));
                edit(&change(|call| drop(call.messages.drain(..call.messages.len() / 2))));
            }
            if (now.memory, now.misaligned) != (crate::program::Memory::Heap, 0) {
                edit(&change(|call| (call.memory, call.misaligned) = (crate::program::Memory::Heap, 0)));
            }
        }
    }
    found
}

/// The program without a rank: communicators lose their member, calls that cannot do without it go.
fn without_rank(program: &Program, gone: World) -> Option<Program> {
    let renumber = |rank: World| rank - usize::from(rank > gone);
    if program.nranks() == 1 {
        return None;
    }
    let mut smaller = program.clone();
    smaller.home.remove(gone);
    for index in (0..smaller.processes.len()).rev() {
        if !smaller.home.contains(&index) {
            smaller.processes.remove(index);
            smaller.home.iter_mut().for_each(|process| *process -= usize::from(*process > index));
        }
    }
    let places: Vec<Option<usize>> = program.comms.iter().map(|comm| comm.rank_of(gone)).collect();
    for (comm, place) in smaller.comms.iter_mut().zip(&places) {
        if let Some(place) = *place {
            comm.ranks.remove(place);
            comm.nonblocking.remove(place);
        }
        if comm.ranks.is_empty() {
            return None;
        }
        comm.ranks.iter_mut().for_each(|rank| *rank = renumber(*rank));
    }
    for op in &mut smaller.ops {
        op.pauses.retain(|(rank, _)| *rank != gone);
        op.pauses.iter_mut().for_each(|(rank, _)| *rank = renumber(*rank));
        op.forks.retain(|rank| *rank != gone);
        op.forks.iter_mut().for_each(|rank| *rank = renumber(*rank));
        match &mut op.action {
            Action::Split { parent, colors, keys, .. } => {
                if let Some(place) = places[*parent] {
                    colors.remove(place);
                    keys.remove(place);
                }
            }
            Action::Sync { ranks } | Action::Refused { ranks, .. } => {
                ranks.retain(|rank| *rank != gone);
                ranks.iter_mut().for_each(|rank| *rank = renumber(*rank));
            }
            Action::End { ranks, .. } => {
                ranks.retain(|(rank, _)| *rank != gone);
                ranks.iter_mut().for_each(|(rank, _)| *rank = renumber(*rank));
            }
            Action::Init { comm, ids, .. } => *ids = (*ids).min(smaller.comms[*comm].ranks.len()),
            Action::Calls { calls, .. } => {
                for call in calls.iter_mut() {
                    let Some(place) = places[call.comm] else { continue };
                    call.root = call.root.saturating_sub(usize::from(call.root > place));
                    call.root = call.root.min(smaller.comms[call.comm].ranks.len() - 1);
                    call.messages.retain(|&(from, to, _)| from != place && to != place);
                    for (from, to, _) in &mut call.messages {
                        *from -= usize::from(*from > place);
                        *to -= usize::from(*to > place);
                    }
                }
                calls.retain(|call| call.kind != Kind::Messages || !call.messages.is_empty());
            }
            _ => {}
        }
    }
    smaller.ops.retain(|op| !matches!(&op.action, Action::Calls { calls, .. } if calls.is_empty()));
    let fits = |op: &crate::program::Op| match &op.action {
        Action::Shrink { parent, child, .. } => smaller.comms[*child].ranks.len() < smaller.comms[*parent].ranks.len(),
        Action::Grow { parent, child } => smaller.comms[*child].ranks.len() > smaller.comms[*parent].ranks.len(),
        _ => true,
    };
    smaller.ops.iter().all(fits).then_some(smaller)
}
