//! A picture of plans for people: ranks across, rounds down.
#![forbid(unsafe_code)]

use super::{add, print_step};
use crate::plan::{Action, Buffer, Channel, Plan, Span};
use std::collections::HashMap;

/// Draws what all ranks do, round by round. A step stands in the round in which it can happen at the earliest if every
/// message takes one round: `>1 o2` sends chunk 2 of the output to rank 1, `<0 o2` receives it, `<0+ o2` receives and
/// reduces it, `i0=o2` copies. Steps that can never happen are listed at the end.
pub fn draw(plans: &[Plan]) -> String {
    let rounds = rounds(plans, Pace::Messages);
    let last = rounds.values().copied().max().map_or(0, |round| round + 1);
    let mut cells = vec![vec![Vec::new(); plans.len()]; last];
    let mut stuck = String::new();
    for (rank, plan) in plans.iter().enumerate() {
        for (number, lane) in plan.lanes.iter().enumerate() {
            for (at, step) in lane.steps.iter().enumerate() {
                match rounds.get(&(rank, number, at)) {
                    Some(&round) => cells[round][rank].push(cell(&step.action)),
                    None => {
                        add(&mut stuck, format_args!("never: rank {rank} step {number}.{at}: {}\n", print_step(step)))
                    }
                }
            }
        }
    }
    let mut text = String::new();
    if let Some(plan) = plans.first() {
        add(&mut text, format_args!("{} {}\n", plan.shape.collective.name(), plan.algorithm));
    }
    let mut rows = vec![(String::from("round"), (0..plans.len()).map(|rank| vec![format!("rank {rank}")]).collect())];
    rows.extend(cells.into_iter().enumerate().map(|(round, cells)| (round.to_string(), cells)));
    text.push_str(&table(&rows));
    text + &stuck
}

/// Rows of cells of lines, columns aligned.
fn table(rows: &[(String, Vec<Vec<String>>)]) -> String {
    let ncolumns = rows.iter().map(|row| row.1.len()).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.1.get(column));
        cells.flatten().map(|line| line.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..ncolumns).map(width).collect();
    let mut text = String::new();
    for (name, cells) in rows {
        let height = cells.iter().map(Vec::len).max().unwrap_or(0).max(1);
        for line in 0..height {
            let mut row = format!("{:>5}", if line == 0 { name.as_str() } else { "" });
            for (cell, &width) in cells.iter().zip(&widths) {
                add(&mut row, format_args!(" | {:width$}", cell.get(line).map_or("", String::as_str)));
            }
            add(&mut text, format_args!("{}\n", row.trim_end()));
        }
    }
    text
}

/// What takes a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// A message, and a call.
    Messages,
    /// Every step; a message comes in the round after the one in which it was sent.
    Steps,
}

/// The earliest round of each step, by rank, lane and position. Steps that wait for ever have none.
pub fn rounds(plans: &[Plan], pace: Pace) -> HashMap<(usize, usize, usize), usize> {
    let takes = |action: &Action| usize::from(pace == Pace::Steps || matches!(action, Action::Call(_)));
    let after = usize::from(pace == Pace::Steps);
    let mut rounds = HashMap::new();
    let mut sent: HashMap<(usize, usize, Channel), Vec<usize>> = HashMap::new();
    let mut taken: HashMap<(usize, usize, Channel), usize> = HashMap::new();
    let mut places: Vec<Vec<(usize, usize)>> = plans.iter().map(|plan| vec![(0, 0); plan.lanes.len()]).collect();
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (rank, plan) in plans.iter().enumerate() {
            for (number, lane) in plan.lanes.iter().enumerate() {
                while let Some(step) = lane.steps.get(places[rank][number].0) {
                    let (at, mut round) = places[rank][number];
                    let dep = |dep: &crate::plan::StepRef| rounds.get(&(rank, dep.lane as usize, dep.step as usize));
                    let Some(deps) = step.deps.iter().map(dep).collect::<Option<Vec<&usize>>>() else { break };
                    round = deps.into_iter().map(|dep| dep + after).fold(round, usize::max);
                    match &step.action {
                        Action::Send { to, channel, .. } => {
                            sent.entry((rank, to.index(), *channel)).or_default().push(round);
                        }
                        Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                            let key = (from.index(), rank, *channel);
                            let nth = taken.entry(key).or_insert(0);
                            let Some(&message) = sent.get(&key).and_then(|sent| sent.get(*nth)) else { break };
                            *nth += 1;
                            round = round.max(message + 1);
                        }
                        _ => {}
                    }
                    rounds.insert((rank, number, at), round);
                    // What follows a call on its lane is drawn below it: it may need the call's messages.
                    places[rank][number] = (at + 1, round + takes(&step.action));
                    moved = true;
                }
            }
        }
    }
    rounds
}

/// A step in a few letters: see [`draw()`].
pub fn cell(action: &Action) -> String {
    match action {
        Action::Send { to, src, .. } => format!(">{to} {}", brief(src)),
        Action::Recv { from, dst, .. } => format!("<{from} {}", brief(dst)),
        Action::RecvReduce { from, local, dst, .. } if local == dst => format!("<{from}+ {}", brief(dst)),
        Action::RecvReduce { from, local, dst, .. } => format!("<{from}+ {}={}", brief(local), brief(dst)),
        Action::Copy { src, dst, .. } => format!("{}={}", brief(src), brief(dst)),
        Action::Reduce { srcs, dst, .. } => {
            let srcs: Vec<String> = srcs.iter().map(|src| brief(src)).collect();
            format!("{}={}", srcs.join("+"), brief(dst))
        }
        Action::Call(call) => {
            let group: Vec<String> = call.group.iter().map(ToString::to_string).collect();
            format!("{}({})", call.collective.name(), group.join(","))
        }
        Action::Nop => "nop".into(),
    }
}

/// `o0-3,s1`
fn brief(spans: &[Span]) -> String {
    let one = |span: &Span| {
        let letter = match span.buffer {
            Buffer::Input => 'i',
            Buffer::Output => 'o',
            Buffer::Scratch => 's',
            Buffer::Coded => 'c',
        };
        let last = u64::from(span.start) + u64::from(span.len.max(1)) - 1;
        match span.len {
            0 | 1 => format!("{letter}{}", span.start),
            _ => format!("{letter}{}-{last}", span.start),
        }
    };
    spans.iter().map(one).collect::<Vec<_>>().join(",")
}
