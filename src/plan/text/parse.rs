//! Reads a plan's text. Strict: what [`super::print`] would not write is refused, with the line that is wrong.
#![forbid(unsafe_code)]

use crate::code::FloatCode;
use crate::plan::{
    Action, Buffer, Call, Channel, CodedScratch, Collective, Lane, LinkLevel, OperandOrder, Plan, Shape, Span, Spans,
    Step, StepRef,
};
use crate::topo::{Grid, NodeId, Rank};
use std::fmt;
use std::sync::Arc;

/// Why a text is no plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub text: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.text)
    }
}

impl std::error::Error for ParseError {}

/// What went wrong in some line.
type Fault = String;

/// The plan that a text describes.
pub fn parse(text: &str) -> Result<Plan, ParseError> {
    let mut lines = Lines { lines: text.split_terminator('\n').peekable(), line: 0 };
    read_plan(&mut lines).map_err(|text| ParseError { line: lines.line.max(1), text })
}

struct Lines<'a> {
    lines: std::iter::Peekable<std::str::SplitTerminator<'a, char>>,
    line: usize,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Option<&'a str> {
        self.line += 1;
        self.lines.next()
    }

    /// What follows `word` on the next line.
    fn field(&mut self, word: &str) -> Result<&'a str, Fault> {
        let line = self.next().ok_or_else(|| format!("the text ends where '{word}' is expected"))?;
        let rest = line.strip_prefix(word).ok_or_else(|| format!("'{word}' is expected"))?;
        match rest.strip_prefix(' ') {
            Some(rest) => Ok(rest),
            None if rest.is_empty() => Ok(rest),
            None => Err(format!("'{word}' is expected")),
        }
    }

    /// Takes the next line if it is exactly `word`.
    fn flag(&mut self, word: &str) -> bool {
        let found = self.lines.peek() == Some(&word);
        if found {
            self.next();
        }
        found
    }
}

fn read_plan(lines: &mut Lines) -> Result<Plan, Fault> {
    let algorithm = unescaped(lines.field("plan")?)?;
    let name = lines.field("collective")?;
    let collective = read_collective(name)?;
    let labels = words(lines.field("nodes")?)?.into_iter().map(number).collect::<Result<Vec<u32>, Fault>>()?;
    let grid = Grid::from_labels(&labels);
    if let Some(rank) = (0..labels.len()).find(|&rank| grid.node(Rank::from_index(rank)) != NodeId(labels[rank])) {
        return Err(format!("the node of rank {rank} is not numbered by first appearance"));
    }
    let root = Rank(number(lines.field("root")?)?);
    let (in_place, prologue) = (lines.flag("in_place"), lines.flag("prologue"));
    let mut plan = Plan {
        shape: Shape { root, in_place, prologue, ..Shape::new(collective, Arc::new(grid)) },
        rank: Rank(number(lines.field("rank")?)?),
        algorithm,
        chunks_per_block: number(lines.field("chunks_per_block")?)?,
        scratch_chunks: number(lines.field("scratch_chunks")?)?,
        coded: read_coded(lines)?,
        lanes: Vec::new(),
    };
    while let Some(line) = lines.next() {
        let nlanes = plan.lanes.len();
        match (line.strip_prefix("  "), plan.lanes.last_mut()) {
            (Some(line), Some(lane)) => {
                let prefix = format!("{}: ", lane.steps.len());
                let step = line.strip_prefix(&prefix).ok_or_else(|| format!("step '{prefix}' is expected"))?;
                lane.steps.push(read_step(step)?);
            }
            _ if line == format!("lane {nlanes}") => plan.lanes.push(Lane::default()),
            _ => return Err(format!("'lane {nlanes}' or a step is expected")),
        }
    }
    Ok(plan)
}

/// The line about coded chunks, if the plan has some.
fn read_coded(lines: &mut Lines) -> Result<Option<CodedScratch>, Fault> {
    if !lines.lines.peek().is_some_and(|line| line.starts_with("coded_chunks ")) {
        return Ok(None);
    }
    let text = lines.field("coded_chunks")?;
    let (chunks, name) = text.split_once(' ').ok_or("coded chunks without a code")?;
    let code = FloatCode::from_name(name).ok_or_else(|| format!("there is no code '{name}'"))?;
    Ok(Some(CodedScratch { code, chunks: number(chunks)? }))
}

fn unescaped(quoted: &str) -> Result<String, Fault> {
    let bad = || Fault::from("the algorithm's name must stand in quotes");
    let inner = quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).ok_or_else(bad)?;
    let mut text = String::new();
    let mut rest = inner.chars();
    while let Some(letter) = rest.next() {
        match letter {
            '"' => return Err(bad()),
            _ if letter.is_control() => return Err(bad()),
            '\\' => match rest.next() {
                Some(plain @ ('"' | '\\')) => text.push(plain),
                Some('u') => {
                    let code = rest.as_str().strip_prefix('{').and_then(|rest| rest.split_once('}')).ok_or_else(bad)?;
                    let value = u32::from_str_radix(code.0, 16).ok().and_then(char::from_u32);
                    text.push(value.filter(|letter| letter.is_control()).ok_or_else(bad)?);
                    rest = code.1.chars();
                }
                _ => return Err(bad()),
            },
            _ => text.push(letter),
        }
    }
    Ok(text)
}

fn read_collective(name: &str) -> Result<Collective, Fault> {
    let exact = |collective: &Collective| collective.name() == name;
    Collective::ALL.into_iter().find(exact).ok_or_else(|| format!("'{name}' is no collective"))
}

/// A decimal number without sign or leading zeros.
fn number<T: std::str::FromStr>(text: &str) -> Result<T, Fault> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| digits).ok_or_else(|| format!("'{text}' is no number in range"))
}

/// The words of a line: separated by single spaces, those in brackets not counted.
fn words(line: &str) -> Result<Vec<&str>, Fault> {
    let mut words = Vec::new();
    let (mut from, mut depth) = (0, 0);
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth -= 1,
            b' ' if depth == 0 => {
                words.push(&line[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    if !line.is_empty() {
        words.push(&line[from..]);
    }
    match words.contains(&"") || depth != 0 {
        true => Err("a stray space or bracket".into()),
        false => Ok(words),
    }
}

/// The words of a step, taken from the left.
struct Words<'a> {
    words: std::iter::Peekable<std::vec::IntoIter<&'a str>>,
}

impl<'a> Words<'a> {
    fn any(&mut self) -> Result<&'a str, Fault> {
        self.words.next().ok_or_else(|| "the line ends early".into())
    }

    fn word(&mut self, wanted: &str) -> Result<(), Fault> {
        match self.any()? {
            word if word == wanted => Ok(()),
            word => Err(format!("'{word}' stands where '{wanted}' is expected")),
        }
    }

    fn flag(&mut self, wanted: &str) -> bool {
        self.words.next_if_eq(&wanted).is_some()
    }

    fn number<T: std::str::FromStr>(&mut self, word: &str) -> Result<T, Fault> {
        self.word(word)?;
        number(self.any()?)
    }

    fn list(&mut self, word: &str) -> Result<Spans, Fault> {
        self.word(word)?;
        read_list(self.any()?)
    }

    fn lists(&mut self, word: &str) -> Result<Vec<Spans>, Fault> {
        self.word(word)?;
        let mut lists = Vec::new();
        while let Some(word) = self.words.next_if(|word| word.starts_with('{')) {
            let inner = word.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
            lists.push(read_list(inner.ok_or_else(|| format!("'{word}' is no list"))?)?);
        }
        Ok(lists)
    }
}

fn read_step(line: &str) -> Result<Step, Fault> {
    let mut words = Words { words: words(line)?.into_iter().peekable() };
    let action = read_action(&mut words)?;
    let mut deps = Vec::new();
    if words.flag("after") {
        deps.push(read_ref(words.any()?)?);
    }
    for word in words.words {
        if deps.is_empty() {
            return Err(format!("'{word}' is not expected"));
        }
        deps.push(read_ref(word)?);
    }
    Ok(Step { action, deps })
}

fn read_ref(word: &str) -> Result<StepRef, Fault> {
    let (lane, step) = word.split_once('.').ok_or_else(|| format!("'{word}' names no step"))?;
    Ok(StepRef { lane: number(lane)?, step: number(step)? })
}

fn read_action(words: &mut Words) -> Result<Action, Fault> {
    let peer = |words: &mut Words, word: &str| -> Result<(Rank, Channel), Fault> {
        Ok((Rank(words.number(word)?), words.number("ch")?))
    };
    Ok(match words.any()? {
        "send" => {
            let (to, channel) = peer(words, "to")?;
            Action::Send { to, channel, src: words.list("src")? }
        }
        "recv" => {
            let (from, channel) = peer(words, "from")?;
            Action::Recv { from, channel, dst: words.list("dst")? }
        }
        "recv_reduce" => {
            let (from, channel) = peer(words, "from")?;
            let (local, dst) = (words.list("local")?, words.list("dst")?);
            let order = match words.any()? {
                "local_first" => OperandOrder::LocalFirst,
                "incoming_first" => OperandOrder::IncomingFirst,
                word => return Err(format!("'{word}' is no order of operands")),
            };
            Action::RecvReduce { from, channel, local, dst, order, finish: words.flag("finish") }
        }
        "copy" => {
            let (src, dst) = (words.list("src")?, words.list("dst")?);
            let (start, finish) = (words.flag("start"), words.flag("finish"));
            Action::Copy { src, dst, start, finish }
        }
        "reduce" => {
            let (srcs, dst) = (words.lists("src")?, words.list("dst")?);
            Action::Reduce { srcs, dst, finish: words.flag("finish") }
        }
        "call" => Action::Call(read_call(words)?),
        "nop" => Action::Nop,
        word => return Err(format!("'{word}' is no step")),
    })
}

fn read_call(words: &mut Words) -> Result<Call, Fault> {
    let collective = read_collective(words.any()?)?;
    let level = match words.any()? {
        "node" => LinkLevel::Node,
        "rail" => LinkLevel::Rail,
        "all" => LinkLevel::All,
        word => return Err(format!("'{word}' is no level")),
    };
    words.word("group")?;
    let mut group = Vec::new();
    while words.words.peek().is_some_and(|word| *word != "root") {
        group.push(Rank(number(words.any()?)?));
    }
    let root = words.number("root")?;
    let (src, dst) = (words.lists("src")?, words.lists("dst")?);
    Ok(Call { collective, level, group, root, src, dst, finish: words.flag("finish") })
}

fn read_list(text: &str) -> Result<Spans, Fault> {
    match text {
        "-" => Ok(Vec::new()),
        _ => text.split(',').map(read_span).collect(),
    }
}

fn read_span(text: &str) -> Result<Span, Fault> {
    let bad = || format!("'{text}' is no span");
    let (name, inner) = text.strip_suffix(']').and_then(|rest| rest.split_once('[')).ok_or_else(bad)?;
    let buffers = [Buffer::Input, Buffer::Output, Buffer::Scratch, Buffer::Coded];
    let buffer = buffers.into_iter().find(|buffer| buffer.name() == name).ok_or_else(bad)?;
    let (range, like) = match inner.split_once(" like ") {
        Some((range, like)) => (range, Some(number::<u32>(like)?)),
        None => (inner, None),
    };
    let (start, end) = range.split_once("..").ok_or_else(bad)?;
    let (start, end): (u32, u64) = (number(start)?, number(end)?);
    let len = end.checked_sub(u64::from(start)).and_then(|len| u32::try_from(len).ok()).ok_or_else(bad)?;
    if like == Some(start) {
        return Err(format!("'{text}' says twice how large its chunks are"));
    }
    Ok(Span { buffer, start, len, like: like.unwrap_or(start) })
}
