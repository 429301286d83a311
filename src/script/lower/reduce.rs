//! Reductions of a script: in which order their operands come, and whether their results are final.
#![forbid(unsafe_code)]

use super::emit::Emitter;
use super::places::{joined, Held, Places, Value};
use super::Chunks;
use crate::plan::rank_sets::RankSets;
use crate::plan::{Action, Channel, OperandOrder, Span, StepRef};
use crate::script::Script;
use crate::topo::Rank;

/// What a file calls a chunk of an operand, by the number of the operand and the chunk's place in it.
type OperandNames<'a> = &'a dyn Fn(usize, usize) -> String;

/// What a file calls a chunk of these.
fn named(chunks: Chunks, at: usize) -> String {
    chunks.places().nth(at).map_or(String::new(), |place| place.to_string())
}

/// Emits the reductions of one thread block.
pub(super) struct Reducer<'a> {
    pub places: &'a mut Places,
    pub emitter: &'a mut Emitter,
    pub sets: &'a mut RankSets,
    pub block: u32,
    pub script: &'a Script,
}

impl Reducer<'_> {
    /// Receives a message and reduces it with `src`, to `dst` or to scratch. Gives the result and the step that ends it.
    pub fn receive(
        &mut self,
        (from, channel): (Rank, Channel),
        incoming: &[Value],
        (src, dst): (Chunks, Option<Chunks>),
        mut deps: Vec<StepRef>,
    ) -> (Vec<Held>, StepRef) {
        let local = self.places.read(src, self.emitter, &mut deps);
        let name = |which: usize, at: usize| match which {
            0 => named(src, at),
            _ => format!("chunk {at} of rank {from}'s message"),
        };
        let first = |mine: &Value, theirs: &Value| match self.lowest(*theirs) < self.lowest(*mine) {
            true => OperandOrder::IncomingFirst,
            false => OperandOrder::LocalFirst,
        };
        let orders: Vec<OperandOrder> =
            local.iter().zip(incoming).map(|(mine, theirs)| first(&mine.1, theirs)).collect();
        if orders.iter().any(|order| *order != orders[0]) {
            let arrived = self.places.fresh(incoming);
            let action = Action::Recv { from, channel, dst: joined(arrived.iter().copied()) };
            let recv = self.emitter.emit(self.block, action, deps);
            let operands = vec![local, arrived.into_iter().zip(incoming.iter().copied()).collect()];
            let (held, end) = self.reduce((&operands, &name), dst, Vec::new());
            return (held, end.unwrap_or(recv));
        }
        let both = local.iter().zip(incoming).enumerate();
        let combined = |(at, (mine, theirs)): (usize, (&Held, &Value))| {
            self.combined(mine.1, *theirs, &|| (name(0, at), name(1, at)))
        };
        let mut results: Vec<Value> = both.map(combined).collect();
        let spans = self.destination(dst, &results, &mut deps);
        let finish = results.iter().all(|value| self.is_final(*value));
        let action = Action::RecvReduce {
            from,
            channel,
            local: joined(local.iter().map(|held| held.0)),
            dst: joined(spans.iter().copied()),
            order: orders.first().copied().unwrap_or(OperandOrder::LocalFirst),
            finish,
        };
        let mut end = self.emitter.emit(self.block, action, deps);
        let finals: Vec<usize> = (0..results.len()).filter(|&at| self.is_final(results[at])).collect();
        finals.iter().for_each(|&at| results[at].finished = true);
        if !finish && !finals.is_empty() {
            let done = joined(finals.iter().map(|&at| spans[at]));
            let action = Action::Copy { src: done.clone(), dst: done, start: false, finish: true };
            end = self.emitter.emit(self.block, action, Vec::new());
        }
        self.settle(dst, &results);
        (spans.into_iter().zip(results).collect(), end)
    }

    /// Copies chunks, and gives the step that does. What one rank has alone is final as it is.
    pub fn copy(&mut self, src: Chunks, dst: Chunks, mut deps: Vec<StepRef>) -> StepRef {
        let held = self.places.read(src, self.emitter, &mut deps);
        let mut values: Vec<Value> = held.iter().map(|held| held.1).collect();
        let finish = values.iter().all(|value| self.is_final(*value));
        values.iter_mut().for_each(|value| value.finished |= finish);
        let (src, dst) = (joined(held.iter().map(|held| held.0)), joined(self.places.write(dst, &values, &mut deps)));
        let action = match src == dst && !finish {
            true => Action::Nop,
            false => Action::Copy { src, dst, start: false, finish },
        };
        self.emitter.emit(self.block, action, deps)
    }

    /// Reduces `dst` with all sources, and gives the step that ends it.
    pub fn fold(&mut self, dst: Chunks, srcs: &[Chunks], mut deps: Vec<StepRef>) -> StepRef {
        let operands: Vec<Vec<Held>> = std::iter::once(&dst)
            .chain(srcs)
            .map(|&chunks| self.places.read(chunks, self.emitter, &mut deps))
            .collect();
        let name = |which: usize, at: usize| named(if which == 0 { dst } else { srcs[which - 1] }, at);
        let (_, end) = self.reduce((&operands, &name), Some(dst), deps.clone());
        end.unwrap_or_else(|| self.emitter.emit(self.block, Action::Nop, deps))
    }

    /// Reduces operands chunk by chunk, those that hold the lowest ranks first; chunks with one order as one step. `name` is what
    /// the file calls a chunk of an operand.
    fn reduce(
        &mut self,
        (operands, name): (&[Vec<Held>], OperandNames<'_>),
        dst: Option<Chunks>,
        mut deps: Vec<StepRef>,
    ) -> (Vec<Held>, Option<StepRef>) {
        let mut results = Vec::new();
        let mut orders: Vec<(Vec<usize>, bool)> = Vec::new();
        for at in 0..operands[0].len() {
            let mut order: Vec<usize> = (0..operands.len()).collect();
            order.sort_by_key(|&which| self.lowest(operands[which][at].1));
            let mut value = operands[order[0]][at].1;
            for &which in &order[1..] {
                let names = || (name(order[0], at), name(which, at));
                value = self.combined(value, operands[which][at].1, &names);
            }
            value.finished = self.is_final(value);
            orders.push((order, value.finished));
            results.push(value);
        }
        let spans = self.destination(dst, &results, &mut deps);
        let (mut at, mut end) = (0, None);
        for run in orders.chunk_by(|one, next| one == next) {
            let range = at..at + run.len();
            at = range.end;
            let (order, finish) = &run[0];
            let list = |which: &usize| joined(operands[*which][range.clone()].iter().map(|held| held.0));
            let action = Action::Reduce {
                srcs: order.iter().map(list).collect(),
                dst: joined(spans[range.clone()].iter().copied()),
                finish: *finish,
            };
            end = Some(self.emitter.emit(self.block, action, deps.clone()));
        }
        (spans.into_iter().zip(results).collect(), end)
    }

    fn destination(&mut self, dst: Option<Chunks>, results: &[Value], deps: &mut Vec<StepRef>) -> Vec<Span> {
        match dst {
            Some(dst) => self.places.write(dst, results, deps),
            None => self.places.fresh(results),
        }
    }

    /// Says that the values written to `dst` are final where they are.
    fn settle(&mut self, dst: Option<Chunks>, results: &[Value]) {
        if let Some(dst) = dst {
            self.places.write(dst, results, &mut Vec::new());
        }
    }

    fn lowest(&self, value: Value) -> usize {
        if value.is_none() {
            return usize::MAX;
        }
        self.sets.lowest(value.set)
    }

    fn combined(&mut self, one: Value, other: Value, names: &dyn Fn() -> (String, String)) -> Value {
        if one.is_none() || other.is_none() {
            return if one.is_none() { other } else { one };
        }
        if one.chunk != other.chunk {
            let value = |value: Value| format!("chunk {} of {}", value.chunk, self.sets.describe(value.set));
            let (of_one, of_other) = names();
            self.emitter.note(|| format!("reduces {of_one} ({}) with {of_other} ({})", value(one), value(other)));
        }
        // Where a rank would contribute twice, the verifier refuses the plans.
        Value { set: self.sets.union(one.set, other.set).unwrap_or(one.set), ..one }
    }

    fn is_final(&self, value: Value) -> bool {
        self.script.reduces() && !value.is_none() && !value.finished && self.sets.len(value.set) == self.script.nranks()
    }
}
