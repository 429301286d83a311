//! Races, found by holding steps back.
//!
//! Everything runs as far as it gets while one step has begun and never ends. If two steps that touch the same element
//! can each happen while the other is held back, nothing orders them.
#![forbid(unsafe_code)]

use super::*;

/// How far a step can get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Idle,
    /// It may read.
    Issued,
    /// It may write: what it receives has been sent.
    Arrived,
    Ended,
}

/// Fails if two steps race, or two calls that must be ordered are not.
pub(super) fn find_races(plans: &[Plan], sizes: Sizes) -> Result<(), String> {
    let all: Vec<(At, &Action)> = steps(plans).map(|(at, step)| (at, &step.action)).collect();
    let held: HashMap<At, HashMap<At, Stage>> =
        all.iter().map(|&(at, _)| (at, Held::new(plans, sizes, at).run())).collect();
    // Whether `b` can reach a stage while `a` is held back.
    let can = |a: At, b: At, stage: Stage| held[&a].get(&b).is_some_and(|&reached| reached >= stage);
    for (i, &(a, first)) in all.iter().enumerate() {
        let on_a = touched(&plans[a.0], first, sizes);
        for &(b, second) in all[i + 1..].iter().take_while(|(b, _)| b.0 == a.0) {
            let on_b = touched(&plans[a.0], second, sizes);
            for (&place, &(a_writes, a_stage)) in &on_a {
                let Some(&(b_writes, b_stage)) = on_b.get(&place) else { continue };
                if (a_writes || b_writes) && can(a, b, b_stage) && can(b, a, a_stage) {
                    return Err(format!("{a:?} and {b:?} race on {place:?}"));
                }
            }
            if let (Action::Call(x), Action::Call(y)) = (first, second) {
                let common = x.group.iter().filter(|member| y.group.contains(member)).count();
                if common > 1 && can(a, b, Stage::Issued) && can(b, a, Stage::Issued) {
                    return Err(format!("{a:?} and {b:?} are calls in no order"));
                }
            }
        }
    }
    Ok(())
}

/// The elements a step touches: whether it writes them, and from which stage on.
fn touched(plan: &Plan, action: &Action, sizes: Sizes) -> HashMap<Place, (bool, Stage)> {
    let (reads, writes) = lists(action);
    let receives = matches!(action, Action::Recv { .. } | Action::RecvReduce { .. });
    let writes_from = if receives { Stage::Arrived } else { Stage::Issued };
    let mut touched = HashMap::new();
    for place in writes.into_iter().flat_map(|spans| elements(plan, spans, sizes)) {
        touched.insert(place, (true, writes_from));
    }
    for place in reads.into_iter().flat_map(|spans| elements(plan, spans, sizes)) {
        touched.entry(place).or_insert((false, Stage::Issued)).1 = Stage::Issued;
    }
    touched
}

/// A run in which one step never ends. Sends end at once, which says least about their messages.
struct Held<'a> {
    plans: &'a [Plan],
    sizes: Sizes,
    held: At,
    stages: HashMap<At, Stage>,
    sent: HashMap<(usize, usize, Channel), Vec<At>>,
    taken: HashMap<(usize, usize, Channel), Vec<At>>,
    /// By rank and group: the calls issued.
    calls: HashMap<(usize, &'a [Rank]), Vec<At>>,
}

impl<'a> Held<'a> {
    fn new(plans: &'a [Plan], sizes: Sizes, held: At) -> Held<'a> {
        let (stages, sent, taken, calls) = Default::default();
        Held { plans, sizes, held, stages, sent, taken, calls }
    }

    fn run(mut self) -> HashMap<At, Stage> {
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for (at, step) in steps(self.plans) {
                let before = self.stages.get(&at).copied().unwrap_or(Stage::Idle);
                if before == Stage::Ended || (before == Stage::Idle && !self.may_issue(at, &step.deps)) {
                    continue;
                }
                let empty = is_empty(&self.plans[at.0], &step.action, self.sizes);
                if before == Stage::Idle && !empty {
                    self.issue(at, &step.action);
                }
                let (arrived, ends) = if empty { (true, true) } else { self.progress(at, &step.action) };
                let now = match (arrived, ends && at != self.held) {
                    (true, true) => Stage::Ended,
                    (true, false) => Stage::Arrived,
                    _ => Stage::Issued,
                };
                moved |= now != before;
                self.stages.insert(at, now);
            }
        }
        self.stages
    }

    fn at_least(&self, at: &At, stage: Stage) -> bool {
        self.stages.get(at).is_some_and(|&reached| reached >= stage)
    }

    fn may_issue(&self, at: At, deps: &[StepRef]) -> bool {
        let lane_ready = at.2 == 0 || {
            let previous = (at.0, at.1, at.2 - 1);
            let sends = matches!(self.plans[at.0].lanes[at.1].steps[previous.2].action, Action::Send { .. });
            self.at_least(&previous, if sends { Stage::Issued } else { Stage::Ended })
        };
        lane_ready && deps.iter().all(|dep| self.at_least(&named(at.0, dep), Stage::Ended))
    }

    fn issue(&mut self, at: At, action: &'a Action) {
        match action {
            Action::Send { to, channel, .. } => {
                self.sent.entry((at.0, to.index(), *channel)).or_default().push(at);
            }
            Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                self.taken.entry((from.index(), at.0, *channel)).or_default().push(at);
            }
            Action::Call(call) => self.calls.entry((at.0, &call.group)).or_default().push(at),
            _ => {}
        }
    }

    /// Whether an issued step has what it works on, and whether it can end.
    fn progress(&self, at: At, action: &Action) -> (bool, bool) {
        match action {
            Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                let key = (from.index(), at.0, *channel);
                let nth = self.taken[&key].iter().position(|receive| *receive == at);
                let send = nth.and_then(|nth| self.sent.get(&key)?.get(nth));
                // A message has arrived in whole only when it has been read in whole.
                (send.is_some(), send.is_some_and(|send| self.at_least(send, Stage::Ended)))
            }
            Action::Call(call) => {
                let plan = &self.plans[at.0];
                let nth = self.calls[&(at.0, call.group.as_slice())].iter().position(|other| *other == at);
                let me = call.group.iter().position(|member| member.index() == at.0).unwrap_or(0);
                let joined = |member: usize| {
                    let calls = self.calls.get(&(call.group[member].index(), call.group.as_slice()));
                    calls.is_some_and(|calls| nth.is_some_and(|nth| nth < calls.len()))
                };
                let waits = |member: usize| member != me && flows(plan, call, (member, me), self.sizes);
                (true, (0..call.group.len()).all(|member| !waits(member) || joined(member)))
            }
            _ => (true, true),
        }
    }
}
