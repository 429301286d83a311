//! What a run waits for, in words: for time-outs and watchdogs.
#![forbid(unsafe_code)]

use super::execution::{Execution, LanePosition, PlanRun, Wait};
use super::program::StepKind;
use crate::error::Error;
use crate::log::Level;
use crate::topo::Rank;
use std::fmt::Write;

/// Lanes that are described one by one; of more only the number is told.
const LANES_SHOWN: usize = 16;
/// Awaited ranks that an error names one by one; the log has them all.
const RANKS_SHOWN: usize = 8;

impl Execution {
    /// The ranks whose message, whose taking of a message, or whose part in a call is being awaited, in rank order.
    pub fn waiting_for(&self) -> Vec<Rank> {
        let Some(run) = &self.run else { return Vec::new() };
        let program = &run.program;
        let pending = self.state.pending.iter().enumerate().filter(|(_, pending)| **pending);
        let pending = pending.map(|(index, _)| index % program.steps.len());
        let full = self.state.places.iter().filter(|place| place.wait == Wait::Channel);
        let mut ranks = Vec::new();
        for step in pending.chain(full.map(|place| place.step as usize)) {
            let code = &program.steps[step];
            match code.kind {
                StepKind::Send { to, .. } => ranks.push(to),
                StepKind::Recv { from, .. } | StepKind::RecvReduce { from, .. } => ranks.push(from),
                StepKind::Call { .. } => ranks.extend(program.call(code.at).into_iter().flat_map(|call| &call.group)),
                _ => {}
            }
        }
        ranks.retain(|&rank| rank != program.plan().rank);
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Each lane's place: segment, step, and what it waits for.
    pub fn describe(&self) -> String {
        let Some(run) = &self.run else { return String::from("nothing has begun") };
        let plan = run.program.plan();
        let mut text = format!("{} ({}) on rank {}", plan.shape.collective.name(), plan.algorithm, plan.rank);
        for (lane, place) in self.state.places.iter().enumerate().take(LANES_SHOWN) {
            self.describe_lane(run, lane, place, &mut text);
        }
        let pending = self.state.pending.iter().filter(|&&pending| pending).count();
        let _ = write!(text, "; {pending} operations pending");
        if self.state.places.len() > LANES_SHOWN {
            let _ = write!(text, ", and {} more lanes", self.state.places.len() - LANES_SHOWN);
        }
        text
    }

    /// The error of a run that made no progress, short; where each lane stands goes into the log.
    pub(super) fn time_out(&self, limit_ns: u64) -> Error {
        let ranks: Vec<String> = self.waiting_for().iter().map(Rank::to_string).collect();
        let limit_ms = limit_ns as f64 / 1e6;
        let all = if ranks.is_empty() { String::from("none") } else { ranks.join(", ") };
        crate::log::write(Level::Warn, &format!("no progress, waiting for ranks: {all}; {}", self.describe()));
        let more = match ranks.len().saturating_sub(RANKS_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let first = if ranks.is_empty() { all } else { ranks[..ranks.len().min(RANKS_SHOWN)].join(", ") };
        Error::Timeout(format!("no progress for {limit_ms} ms, waiting for ranks: {first}{more}"))
    }

    fn describe_lane(&self, run: &PlanRun, lane: usize, place: &LanePosition, text: &mut String) {
        let (program, segments) = (&run.program, self.state.segments);
        let steps = program.lanes[lane].clone();
        if place.wait == Wait::End {
            let _ = write!(text, "; lane {} at its end", program.steps[steps.start as usize].at.lane);
            return;
        }
        let code = &program.steps[place.step.min(steps.end - 1) as usize];
        let _ = write!(
            text,
            "; lane {} in segment {} of {segments}, step {} of {} ({}), {}",
            code.at.lane,
            place.segment + 1,
            code.at.step + 1,
            steps.len(),
            code.kind,
            match place.wait {
                Wait::Nothing | Wait::End => "ready",
                Wait::Operation => "running",
                Wait::Channel => "channel full",
                Wait::Dependency => "waits for steps of other lanes",
                Wait::Segment => "waits for the end of an older segment",
            }
        );
    }
}
