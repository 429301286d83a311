//! Plans for people: a list of steps, or a drawing of who sends to whom.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use strata::plan::{chunks_in, Action, Buffer, Order, Plan, Span, Step, StepRef};

fn spans(spans: &[Span]) -> String {
    let one = |span: &Span| {
        let buffer = match span.buffer {
            Buffer::Input => "in",
            Buffer::Output => "out",
            Buffer::Scratch => "scratch",
        };
        match span.len {
            1 => format!("{buffer}[{}]", span.start),
            len => format!("{buffer}[{}..{}]", span.start, span.start + len),
        }
    };
    spans.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn blocks(blocks: &[Vec<Span>]) -> String {
    blocks.iter().map(|block| spans(block)).collect::<Vec<_>>().join(" | ")
}

fn flags(start: bool, finish: bool) -> &'static str {
    match (start, finish) {
        (false, false) => "",
        (true, false) => "  (start)",
        (false, true) => "  (finish)",
        (true, true) => "  (start, finish)",
    }
}

/// One step in words.
fn action(action: &Action) -> String {
    match action {
        Action::Send { to, channel, src } => format!("send    {} -> rank {to} channel {channel}", spans(src)),
        Action::Recv { from, channel, dst } => format!("recv    {} <- rank {from} channel {channel}", spans(dst)),
        Action::RecvReduce { from, channel, local, dst, order, finish } => {
            let incoming = format!("rank {from} channel {channel}");
            let operands = match order {
                Order::LocalFirst => format!("{} (op) {incoming}", spans(local)),
                Order::IncomingFirst => format!("{incoming} (op) {}", spans(local)),
            };
            format!("combine {} <- {operands}{}", spans(dst), flags(false, *finish))
        }
        Action::Copy { src, dst, start, finish } => {
            format!("copy    {} <- {}{}", spans(dst), spans(src), flags(*start, *finish))
        }
        Action::Reduce { srcs, dst, finish } => {
            let operands = srcs.iter().map(|src| spans(src)).collect::<Vec<_>>().join(" (op) ");
            format!("reduce  {} <- {operands}{}", spans(dst), flags(false, *finish))
        }
        Action::Call(call) => {
            let group = call.group.iter().map(|rank| rank.to_string()).collect::<Vec<_>>().join(" ");
            let name = call.collective.name();
            format!("call    {name} among {group}: {} <- {}", blocks(&call.dst), blocks(&call.src))
        }
        Action::Nop => "wait".to_string(),
    }
}

/// The steps of one rank, lane by lane.
pub fn list(plan: &Plan) -> String {
    let mut text = format!(
        "rank {}: {} {} on {}, {} chunks per block, {} of scratch\n",
        plan.rank,
        plan.algorithm,
        plan.shape.collective.name(),
        plan.shape.grid,
        plan.chunks_per_block,
        plan.scratch_chunks
    );
    for (lane, steps) in plan.lanes.iter().enumerate() {
        for (index, step) in steps.steps.iter().enumerate() {
            text += &format!("  {:>6}  {}{}\n", format!("{lane}.{index}"), action(&step.action), deps(step));
        }
    }
    text
}

fn deps(step: &Step) -> String {
    if step.deps.is_empty() {
        return String::new();
    }
    let names: Vec<String> = step.deps.iter().map(|dep| format!("{}.{}", dep.lane, dep.step)).collect();
    format!("  after {}", names.join(", "))
}

/// Messages that are under way: from, to, channel; how many have been sent in earlier rounds and not been received.
type Arrived = HashMap<(usize, usize, u16), usize>;

/// One rank while its plan is played through.
struct Player<'a> {
    plan: &'a Plan,
    done: Vec<usize>,
}

impl Player<'_> {
    /// Goes as far as the messages of earlier rounds allow; returns the messages sent: to, channel, chunks.
    fn advance(&mut self, arrived: &mut Arrived) -> Vec<(usize, u16, usize)> {
        let me = self.plan.rank.index();
        let mut sent = Vec::new();
        let mut moved = true;
        while moved {
            moved = false;
            for (lane, steps) in self.plan.lanes.iter().enumerate() {
                let Some(step) = steps.steps.get(self.done[lane]) else { continue };
                if !step.deps.iter().all(|&StepRef { lane, step }| self.done[lane as usize] > step as usize) {
                    continue;
                }
                match &step.action {
                    Action::Send { to, channel, src } => sent.push((to.index(), *channel, chunks_in(src))),
                    Action::Recv { from, channel, .. } | Action::RecvReduce { from, channel, .. } => {
                        match arrived.get_mut(&(from.index(), me, *channel)) {
                            Some(messages) if *messages > 0 => *messages -= 1,
                            _ => continue,
                        }
                    }
                    _ => {}
                }
                self.done[lane] += 1;
                moved = true;
            }
        }
        sent
    }

    fn finished(&self) -> bool {
        self.plan.lanes.iter().zip(&self.done).all(|(lane, &done)| done == lane.steps.len())
    }
}

/// Who sends how many chunks to whom, round by round, when every message takes one round. The plans are those of all
/// ranks, in order.
pub fn draw(plans: &[Plan]) -> String {
    let mut players: Vec<Player> = plans.iter().map(|plan| Player { plan, done: vec![0; plan.lanes.len()] }).collect();
    let mut arrived = Arrived::new();
    let mut rounds: Vec<Vec<String>> = Vec::new();
    loop {
        let sent: Vec<_> = players.iter_mut().map(|player| player.advance(&mut arrived)).collect();
        if sent.iter().all(Vec::is_empty) {
            break;
        }
        let cell = |messages: &Vec<(usize, u16, usize)>| {
            let parts: Vec<String> = messages.iter().map(|(to, _, chunks)| format!("{chunks}>{to}")).collect();
            if parts.is_empty() {
                ".".to_string()
            } else {
                parts.join(" ")
            }
        };
        rounds.push(sent.iter().map(cell).collect());
        for (from, messages) in sent.iter().enumerate() {
            messages.iter().for_each(|(to, channel, _)| *arrived.entry((from, *to, *channel)).or_default() += 1);
        }
    }
    let stuck: Vec<usize> = (0..players.len()).filter(|&rank| !players[rank].finished()).collect();
    table(&rounds, players.len()) + &if stuck.is_empty() { String::new() } else { format!("stuck: ranks {stuck:?}\n") }
}

fn table(rounds: &[Vec<String>], nranks: usize) -> String {
    let head: Vec<String> = (0..nranks).map(|rank| format!("rank {rank}")).collect();
    let width = |rank: usize| rounds.iter().map(|cells| cells[rank].len()).max().unwrap_or(0).max(head[rank].len());
    let widths: Vec<usize> = (0..nranks).map(width).collect();
    let row = |name: &str, cells: &[String]| {
        let cells: Vec<String> = cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        format!("{}\n", format!("{name:<9} {}", cells.join("  ")).trim_end())
    };
    let mut text = row("", &head);
    for (index, cells) in rounds.iter().enumerate() {
        text += &row(&format!("round {}", index + 1), cells);
    }
    text + "`2>3` is a message of 2 chunks to rank 3.\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use strata::algo::{build, Choice};
    use strata::plan::{Collective, Shape};
    use strata::topo::{Grid, Rank};

    fn ring() -> Vec<Plan> {
        let shape = Shape::new(Collective::AllGather, Arc::new(Grid::flat(3)));
        (0..3).map(|rank| build(&Choice::flat("ring"), &shape, Rank(rank)).unwrap()).collect()
    }

    #[test]
    fn a_ring_of_three_is_drawn_in_two_rounds() {
        let drawn = draw(&ring());
        assert_eq!(drawn.lines().filter(|line| line.starts_with("round")).count(), 2, "{drawn}");
        assert!(drawn.contains("round 1   1>1     1>2     1>0\n"), "{drawn}");
        assert!(!drawn.contains("stuck"));
    }

    #[test]
    fn a_plan_whose_message_never_comes_is_drawn_as_stuck() {
        let mut plans = ring();
        plans[0].lanes.iter_mut().for_each(|lane| {
            lane.steps.retain(|step| !matches!(step.action, Action::Send { .. }));
            lane.steps.iter_mut().for_each(|step| step.deps.clear());
        });
        assert!(draw(&plans).contains("stuck"));
    }

    #[test]
    fn every_step_is_listed_on_a_line_of_its_own() {
        let plan = &ring()[1];
        assert_eq!(list(plan).lines().count(), 1 + plan.nsteps());
    }
}
