//! Plans as text: one step a line, complete, and stable, so that it can be stored, compared and read back.
//!
//! ```text
//! plan "ring"
//! collective reduce_scatter
//! nodes 0 0 1 1
//! root 0
//! prologue
//! rank 2
//! chunks_per_block 1
//! scratch_chunks 2
//! lane 0
//!   0: send to 3 ch 0 src input[1..2]
//!   1: recv_reduce from 1 ch 0 local input[0..1] dst scratch[0..1 like 4] incoming_first
//!   2: send to 3 ch 0 src scratch[0..1 like 4] after 1.4
//! ```
//!
//! `nodes` names the node of each rank. `input[4..6]` are two chunks; `like` follows if their size is not that of their
//! place. A plan with coded chunks says after `scratch_chunks` how many and of which code: `coded_chunks 6 mx8`. Lists of spans are joined by commas, an empty one is `-`; lists of lists stand in braces.
#![forbid(unsafe_code)]

mod draw;
mod parse;

pub use draw::{cell, draw, rounds, Pace};
pub use parse::{parse, ParseError};

use super::{Action, Buffer, Call, CodedScratch, LinkLevel, OperandOrder, Plan, Span, Step};
use std::fmt::Write;

impl Buffer {
    /// The name used in text.
    pub const fn name(self) -> &'static str {
        match self {
            Buffer::Input => "input",
            Buffer::Output => "output",
            Buffer::Scratch => "scratch",
            Buffer::Coded => "coded",
        }
    }
}

/// The text of one plan.
pub fn print(plan: &Plan) -> String {
    let shape = &plan.shape;
    let mut text = format!("plan \"{}\"\ncollective {}\nnodes", escaped(&plan.algorithm), shape.collective.name());
    for rank in 0..shape.nranks() {
        add(&mut text, format_args!(" {}", shape.grid.node(crate::topo::Rank::from_index(rank)).0));
    }
    add(&mut text, format_args!("\nroot {}\n", shape.root));
    for (set, word) in [(shape.in_place, "in_place\n"), (shape.prologue, "prologue\n")] {
        text.push_str(if set { word } else { "" });
    }
    add(&mut text, format_args!("rank {}\n", plan.rank));
    add(&mut text, format_args!("chunks_per_block {}\n", plan.chunks_per_block));
    add(&mut text, format_args!("scratch_chunks {}\n", plan.scratch_chunks));
    if let Some(CodedScratch { code, chunks }) = plan.coded {
        add(&mut text, format_args!("coded_chunks {chunks} {}\n", code.name()));
    }
    for (number, lane) in plan.lanes.iter().enumerate() {
        add(&mut text, format_args!("lane {number}\n"));
        for (at, step) in lane.steps.iter().enumerate() {
            add(&mut text, format_args!("  {at}: {}\n", print_step(step)));
        }
    }
    text
}

/// The text of one step, without its number.
pub fn print_step(step: &Step) -> String {
    let mut text = print_action(&step.action);
    for (at, dep) in step.deps.iter().enumerate() {
        let word = if at == 0 { " after" } else { "" };
        add(&mut text, format_args!("{word} {}.{}", dep.lane, dep.step));
    }
    text
}

fn print_action(action: &Action) -> String {
    let flag = |set: bool, word: &'static str| if set { word } else { "" };
    match action {
        Action::Send { to, channel, src } => format!("send to {to} ch {channel} src {}", list(src)),
        Action::Recv { from, channel, dst } => format!("recv from {from} ch {channel} dst {}", list(dst)),
        Action::RecvReduce { from, channel, local, dst, order, finish } => {
            let order = match order {
                OperandOrder::LocalFirst => "local_first",
                OperandOrder::IncomingFirst => "incoming_first",
            };
            let (local, dst, finish) = (list(local), list(dst), flag(*finish, " finish"));
            format!("recv_reduce from {from} ch {channel} local {local} dst {dst} {order}{finish}")
        }
        Action::Copy { src, dst, start, finish } => {
            let (start, finish) = (flag(*start, " start"), flag(*finish, " finish"));
            format!("copy src {} dst {}{start}{finish}", list(src), list(dst))
        }
        Action::Reduce { srcs, dst, finish } => {
            format!("reduce src{} dst {}{}", lists(srcs), list(dst), flag(*finish, " finish"))
        }
        Action::Call(call) => print_call(call),
        Action::Nop => "nop".into(),
    }
}

fn print_call(call: &Call) -> String {
    let level = match call.level {
        LinkLevel::Node => "node",
        LinkLevel::Rail => "rail",
        LinkLevel::All => "all",
    };
    let mut text = format!("call {} {level} group", call.collective.name());
    for member in &call.group {
        add(&mut text, format_args!(" {member}"));
    }
    let (root, src, dst) = (call.root, lists(&call.src), lists(&call.dst));
    add(&mut text, format_args!(" root {root} src{src} dst{dst}{}", if call.finish { " finish" } else { "" }));
    text
}

fn print_span(span: &Span) -> String {
    let end = u64::from(span.start) + u64::from(span.len);
    let range = format!("{}[{}..{end}", span.buffer.name(), span.start);
    if span.like == span.start {
        format!("{range}]")
    } else {
        format!("{range} like {}]", span.like)
    }
}

fn list(spans: &[Span]) -> String {
    match spans {
        [] => "-".into(),
        _ => spans.iter().map(print_span).collect::<Vec<_>>().join(","),
    }
}

fn lists(lists: &[Vec<Span>]) -> String {
    lists.iter().map(|spans| format!(" {{{}}}", list(spans))).collect()
}

/// Writing to a string cannot fail.
fn add(text: &mut String, what: std::fmt::Arguments<'_>) {
    let _ = text.write_fmt(what);
}

fn escaped(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        match letter {
            '"' | '\\' => text.extend(['\\', letter]),
            _ if letter.is_control() => add(&mut text, format_args!("\\u{{{:x}}}", letter as u32)),
            _ => text.push(letter),
        }
    }
    text
}

#[cfg(test)]
pub(crate) mod tests;
