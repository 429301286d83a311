//! Reads MSCCL's XML: <https://github.com/Azure/msccl-tools> writes it, and several runtimes have read it.
//!
//! Attributes that nobody knows are ignored, those that tools leave out have defaults: served in place as `inplace` says and
//! out of place, for any size. Limits hold before memory is taken, whatever the file says.
#![forbid(unsafe_code)]

use super::{Place, RankScript, Script, ScriptBuffer, ScriptStep, ScriptStepKind, ThreadBlock};
use crate::plan::Collective;
use crate::verify::MAX_PLACES;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};
use std::fmt;

/// The largest file, in bytes.
pub const MAX_BYTES: usize = 64 << 20;
/// Elements within elements.
pub const MAX_DEPTH: usize = 4;
/// Attributes of one element.
pub const MAX_ATTRIBUTES: usize = 64;
/// Ranks.
pub const MAX_RANKS: usize = 1024;
/// Thread blocks of one rank.
pub const MAX_BLOCKS: usize = 1024;
/// Steps of all ranks.
pub const MAX_STEPS: usize = 1 << 19;
/// Chunks of one buffer.
pub const MAX_CHUNKS: u32 = 1 << 20;
/// Channels of one rank.
pub const MAX_CHANNELS: u16 = 1 << 12;

/// Why a file is no script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadScript {
    /// The line, counted from 1.
    pub line: u32,
    /// What is wrong there.
    pub text: String,
}

impl fmt::Display for BadScript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.text)
    }
}

impl std::error::Error for BadScript {}

/// What went wrong in some line.
type Fault = String;

/// The script that a file's text describes.
///
/// # Errors
/// The first line that is wrong: no XML, no number, an unknown word, a rank, thread block or step that does not exist or
/// stands twice, chunks outside of their buffer, or more than the limits allow.
pub fn read(text: &str) -> Result<Script, BadScript> {
    if text.len() > MAX_BYTES {
        return Err(BadScript { line: 1, text: format!("the file has more than {MAX_BYTES} bytes") });
    }
    let mut reader = Reader::from_str(text);
    reader.config_mut().check_end_names = true;
    let mut state = State::default();
    let mut lines = LineCounter { text: text.as_bytes(), at: 0, line: 1 };
    loop {
        let begin = reader.buffer_position() as usize;
        let event = reader.read_event();
        let line = lines.at(text_begins(text, begin));
        let fault = |text: Fault| BadScript { line, text };
        match event {
            Ok(Event::Start(element)) => {
                state.open(&element, line).map_err(fault)?;
            }
            Ok(Event::Empty(element)) => {
                state.open(&element, line).map_err(fault)?;
                state.close().map_err(fault)?;
            }
            Ok(Event::End(_)) => state.close().map_err(fault)?,
            Ok(Event::Eof) => break,
            Ok(Event::DocType(_)) => return Err(fault("a file with a DOCTYPE is refused".into())),
            Ok(_) => {}
            Err(error) => {
                let line = lines.at(reader.error_position() as usize);
                return Err(BadScript { line, text: format!("this is no XML: {error}") });
            }
        }
    }
    let line = lines.at(text.len());
    state.finish().map_err(|text| BadScript { line, text })
}

/// Where what begins at a place of the text goes on after white space, so that an element has the line of its first letter.
fn text_begins(text: &str, begin: usize) -> usize {
    let rest = text.as_bytes().get(begin..).unwrap_or_default();
    begin + rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// Counts lines up to places that never go back.
struct LineCounter<'a> {
    text: &'a [u8],
    at: usize,
    line: u32,
}

impl LineCounter<'_> {
    fn at(&mut self, place: usize) -> u32 {
        let place = place.min(self.text.len());
        if place > self.at {
            self.line += self.text[self.at..place].iter().filter(|&&byte| byte == b'\n').count() as u32;
            self.at = place;
        }
        self.line
    }
}

/// An element that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Algo,
    Gpu,
    ThreadBlock,
    Step,
    /// One nobody knows, with whatever is in it.
    Unknown,
}

/// A rank while its thread blocks are being read.
struct OpenRank {
    line: u32,
    script: RankScript,
    blocks: Vec<Option<ThreadBlock>>,
}

#[derive(Default)]
struct State {
    open: Vec<Open>,
    algo: Option<Script>,
    ranks: Vec<Option<OpenRank>>,
    rank: usize,
    block: usize,
    steps: usize,
}

/// The attributes of one element.
struct Attributes(Vec<(String, String)>);

impl Attributes {
    fn of(element: &BytesStart<'_>) -> Result<Attributes, Fault> {
        let mut all = Vec::new();
        let mut attributes = element.attributes();
        // Duplicates are looked for here: they are few, and the library's search grows with their square.
        attributes.with_checks(false);
        for attribute in attributes {
            if all.len() == MAX_ATTRIBUTES {
                return Err(format!("an element has more than {MAX_ATTRIBUTES} attributes"));
            }
            let attribute = attribute.map_err(|error| format!("this is no XML: {error}"))?;
            let key = attribute.key.as_ref().to_string();
            if all.iter().any(|(known, _)| *known == key) {
                return Err(format!("attribute {key} stands twice"));
            }
            let value = attribute
                .normalized_value(XmlVersion::Implicit1_0)
                .map_err(|error| format!("attribute {key}: {error}"))?;
            all.push((key, value.into_owned()));
        }
        Ok(Attributes(all))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.trim())
    }

    /// A number, if it is there.
    fn number(&self, name: &str) -> Result<Option<i64>, Fault> {
        let Some(text) = self.get(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| format!("{name}=\"{}\" is no number", shortened(text)))
    }

    /// A number of `0..limit`.
    fn below(&self, name: &str, limit: u32) -> Result<u32, Fault> {
        let value = self.number(name)?.ok_or_else(|| format!("{name} is missing"))?;
        within(name, value, limit)
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, Fault> {
        match self.number(name)? {
            None => Ok(default),
            Some(0) => Ok(false),
            Some(1) => Ok(true),
            Some(value) => Err(format!("{name}=\"{value}\": 0 or 1")),
        }
    }

    /// A number of `0..limit`; none where -1 or nothing is said.
    fn optional(&self, name: &str, limit: u32) -> Result<Option<u32>, Fault> {
        match self.number(name)? {
            None | Some(-1) => Ok(None),
            Some(value) => within(name, value, limit).map(Some),
        }
    }
}

fn within(name: &str, value: i64, limit: u32) -> Result<u32, Fault> {
    u32::try_from(value)
        .ok()
        .filter(|&value| value < limit)
        .ok_or_else(|| format!("{name}=\"{value}\" is not in 0 to {}", i64::from(limit) - 1))
}

/// A word of the file in a message.
fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(40).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

impl State {
    fn open(&mut self, element: &BytesStart<'_>, line: u32) -> Result<(), Fault> {
        if self.open.len() == MAX_DEPTH {
            return Err(format!("elements lie in one another deeper than {MAX_DEPTH}"));
        }
        let name = element.name();
        let inside = self.open.last().copied();
        let open = match (name.as_ref(), inside) {
            ("algo", None) if self.algo.is_none() => Open::Algo,
            ("algo", None) => return Err("a second <algo>".into()),
            (_, None) => return Err("the root is not <algo>".into()),
            ("gpu", Some(Open::Algo)) => Open::Gpu,
            ("tb", Some(Open::Gpu)) => Open::ThreadBlock,
            ("step", Some(Open::ThreadBlock)) => Open::Step,
            (known @ ("algo" | "gpu" | "tb" | "step"), Some(inside)) if inside != Open::Unknown => {
                return Err(format!("<{}> stands in the wrong place", known));
            }
            _ => Open::Unknown,
        };
        if open != Open::Unknown {
            let attributes = Attributes::of(element)?;
            match open {
                Open::Algo => self.algo = Some(algo(&attributes)?),
                Open::Gpu => self.gpu(&attributes, line)?,
                Open::ThreadBlock => self.thread_block(&attributes)?,
                _ => self.step(&attributes, line)?,
            }
        }
        self.open.push(open);
        Ok(())
    }

    fn close(&mut self) -> Result<(), Fault> {
        self.open.pop().map(|_| ()).ok_or_else(|| "an element ends that has not begun".into())
    }

    fn script(&self) -> Result<&Script, Fault> {
        self.algo.as_ref().ok_or_else(|| "there is no <algo>".into())
    }

    fn gpu(&mut self, attributes: &Attributes, line: u32) -> Result<(), Fault> {
        let ngpus = self.script()?.ranks.len();
        if self.ranks.is_empty() {
            self.ranks.resize_with(ngpus, || None);
        }
        self.rank = attributes.below("id", ngpus as u32)? as usize;
        let scratch = attributes.optional("s_chunks", MAX_CHUNKS + 1)?.unwrap_or(0);
        for buffer in ["i_chunks", "o_chunks"] {
            attributes.optional(buffer, MAX_CHUNKS + 1)?;
        }
        let script = RankScript { scratch, blocks: Vec::new() };
        match self.ranks[self.rank].replace(OpenRank { line, script, blocks: Vec::new() }) {
            Some(first) => Err(format!("rank {} stands in line {} already", self.rank, first.line)),
            None => Ok(()),
        }
    }

    fn thread_block(&mut self, attributes: &Attributes) -> Result<(), Fault> {
        let ngpus = self.script()?.ranks.len() as u32;
        let me = self.rank as u32;
        let peer = |name: &str| match attributes.optional(name, ngpus)? {
            Some(peer) if peer == me => Err(format!("{name}=\"{peer}\" is the rank itself")),
            peer => Ok(peer),
        };
        let (to, from) = (peer("send")?, peer("recv")?);
        let channel = attributes.optional("chan", MAX_CHANNELS.into())?.unwrap_or(0) as u16;
        self.block = attributes.below("id", MAX_BLOCKS as u32)? as usize;
        let rank = self.ranks[self.rank].as_mut().ok_or("a <tb> outside of its <gpu>")?;
        if rank.blocks.len() <= self.block {
            rank.blocks.resize(self.block + 1, None);
        }
        for known in rank.blocks.iter().flatten() {
            for (one, other, word) in [(known.to, to, "send to"), (known.from, from, "receive from")] {
                if one.is_some() && one == other && known.channel == channel {
                    let peer = one.unwrap_or_default();
                    return Err(format!("two thread blocks of rank {me} {word} rank {peer} on channel {channel}"));
                }
            }
        }
        match rank.blocks[self.block].replace(ThreadBlock { to, from, channel, steps: Vec::new() }) {
            Some(_) => Err(format!("thread block {} of rank {me} stands twice", self.block)),
            None => Ok(()),
        }
    }

    fn step(&mut self, attributes: &Attributes, line: u32) -> Result<(), Fault> {
        if self.steps == MAX_STEPS {
            return Err(format!("there are more than {MAX_STEPS} steps"));
        }
        self.steps += 1;
        let script = self.algo.as_ref().ok_or("a <step> outside of <algo>")?;
        let rank = self.ranks[self.rank].as_mut().ok_or("a <step> outside of its <gpu>")?;
        let scratch = rank.script.scratch;
        let block = rank.blocks[self.block].as_mut().ok_or("a <step> outside of its <tb>")?;
        let step = read_step(attributes, script, self.rank, scratch, line)?;
        let number = block.steps.len();
        if attributes.number("s")?.is_some_and(|said| said != number as i64) {
            return Err(format!("s=\"{}\" stands where {number} is expected", attributes.get("s").unwrap_or_default()));
        }
        for (needs, peer, word) in
            [(step.kind.sends(), block.to, "send"), (step.kind.receives(), block.from, "receive")]
        {
            if needs && peer.is_none() {
                let kind = step.kind.name();
                return Err(format!("a step {kind} in a thread block that names no rank to {word}"));
            }
        }
        block.steps.push(step);
        Ok(())
    }

    /// The script, once the file has ended: everything is there, and dependencies name steps.
    fn finish(self) -> Result<Script, Fault> {
        if !self.open.is_empty() {
            return Err("the file ends within an element".into());
        }
        let mut script = self.algo.ok_or("there is no <algo>")?;
        let mut ranks = Vec::with_capacity(script.ranks.len());
        for (number, rank) in self.ranks.into_iter().enumerate() {
            let rank = rank.ok_or_else(|| format!("rank {number} is missing"))?;
            let blocks =
                rank.blocks.into_iter().enumerate().map(|(block, found)| {
                    found.ok_or_else(|| format!("thread block {block} of rank {number} is missing"))
                });
            ranks.push(RankScript { blocks: blocks.collect::<Result<_, _>>()?, ..rank.script });
        }
        if ranks.is_empty() {
            return Err("there are no ranks".into());
        }
        script.ranks = ranks;
        let places: usize = script.ranks.iter().map(|rank| script.places(rank)).sum();
        if places > MAX_PLACES {
            return Err(format!("the buffers of all ranks have {places} chunks, more than {MAX_PLACES}"));
        }
        check_dependencies(&script)?;
        Ok(script)
    }
}

fn check_dependencies(script: &Script) -> Result<(), Fault> {
    for (rank, of_rank) in script.ranks.iter().enumerate() {
        for (block, of_block) in of_rank.blocks.iter().enumerate() {
            for step in &of_block.steps {
                let Some((tb, at)) = step.dep else { continue };
                if of_rank.blocks.get(tb as usize).is_none_or(|of_block| of_block.steps.len() <= at as usize) {
                    let line = step.line;
                    return Err(format!(
                        "in line {line} rank {rank}, thread block {block} waits for step {at} of thread block {tb}, which does not exist"
                    ));
                }
            }
        }
    }
    Ok(())
}

fn algo(attributes: &Attributes) -> Result<Script, Fault> {
    let said = attributes.get("coll").ok_or("coll is missing")?;
    let known = match said.eq_ignore_ascii_case(Collective::Custom.name()) {
        true => Some(Collective::Custom),
        false => Collective::from_name(said),
    };
    let collective = known.ok_or_else(|| format!("coll=\"{}\" is no collective", shortened(said)))?;
    let ngpus = attributes.below("ngpus", MAX_RANKS as u32 + 1)?;
    let chunks = attributes.below("nchunksperloop", MAX_CHUNKS + 1)?;
    if ngpus == 0 || chunks == 0 {
        return Err("ngpus and nchunksperloop are at least 1".into());
    }
    let per_buffer = collective.blocks(ngpus as usize) as u32;
    if chunks % per_buffer != 0 {
        return Err(format!("nchunksperloop=\"{chunks}\" is no multiple of the {per_buffer} blocks of a buffer"));
    }
    let in_place = attributes.flag("inplace", false)?;
    let serves_out_of_place = attributes.flag("outofplace", true)?;
    let size = |name: &str| match attributes.number(name)? {
        None => Ok(0),
        Some(value) => u64::try_from(value).map_err(|_| format!("{name}=\"{value}\" is negative")),
    };
    let (least, most) = (size("minBytes")?, size("maxBytes")?);
    if most > 0 && least > most {
        return Err(format!("minBytes=\"{least}\" is more than maxBytes=\"{most}\": no call has so many bytes"));
    }
    for count in ["nchannels", "nthreads"] {
        attributes.number(count)?;
    }
    Ok(Script {
        name: attributes.get("name").unwrap_or_default().to_string(),
        collective,
        chunks,
        protocol: attributes.get("proto").unwrap_or("Simple").to_string(),
        in_place,
        serves_out_of_place,
        bytes: least..=if most == 0 { u64::MAX } else { most },
        contract: None,
        ranks: vec![RankScript::default(); ngpus as usize],
    })
}

fn read_step(
    attributes: &Attributes,
    script: &Script,
    rank: usize,
    scratch: u32,
    line: u32,
) -> Result<ScriptStep, Fault> {
    let word = attributes.get("type").ok_or("type is missing")?;
    let kind = ScriptStepKind::ALL.into_iter().find(|kind| kind.name() == word);
    let kind = kind.ok_or_else(|| format!("type=\"{}\" is no step", shortened(word)))?;
    let nowhere = Place { buffer: ScriptBuffer::Scratch, chunk: 0 };
    let (mut src, mut dst, mut count) = (nowhere, nowhere, 0);
    if kind != ScriptStepKind::Nop {
        count = attributes.below("cnt", MAX_CHUNKS + 1)?;
        if count == 0 {
            return Err("cnt=\"0\"".into());
        }
        let place = |buffer: &str, offset: &str| -> Result<Place, Fault> {
            let letter = attributes.get(buffer).ok_or_else(|| format!("{buffer} is missing"))?;
            let found = [ScriptBuffer::Input, ScriptBuffer::Output, ScriptBuffer::Scratch];
            let found = found.into_iter().find(|known| letter.len() == 1 && letter.starts_with(known.letter()));
            let found = found.ok_or_else(|| format!("{buffer}=\"{}\" is none of i, o and s", shortened(letter)))?;
            let chunk = attributes.below(offset, MAX_CHUNKS)?;
            let chunks = match found {
                ScriptBuffer::Scratch => scratch,
                _ => script.chunks_of(found == ScriptBuffer::Input),
            };
            match chunk + count > chunks {
                true => Err(format!(
                    "chunks {chunk} to {} of {letter} of rank {rank}, which has {chunks}",
                    chunk + count - 1
                )),
                false => Ok(Place { buffer: found, chunk }),
            }
        };
        if kind.reads() {
            src = place("srcbuf", "srcoff")?;
        }
        if kind.writes() {
            dst = place("dstbuf", "dstoff")?;
        }
    }
    let dep = match (attributes.optional("depid", MAX_BLOCKS as u32)?, attributes.optional("deps", MAX_STEPS as u32)?) {
        (Some(block), Some(step)) => Some((block, step)),
        (None, _) => None,
        (Some(block), None) => return Err(format!("depid=\"{block}\" without deps")),
    };
    Ok(ScriptStep { kind, src, dst, count, dep, line })
}
