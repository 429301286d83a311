//! Writes a script as MSCCL's XML, with every attribute that one of its readers asks for.
#![forbid(unsafe_code)]

use super::{Place, Script, ScriptStep, ScriptStepKind, ThreadBlock};
use crate::plan::Collective;
use quick_xml::escape::escape;
use std::collections::BTreeSet;
use std::fmt::Write;

/// The text of a script.
pub fn write(script: &Script) -> String {
    let mut text = String::new();
    let blocks = || script.ranks.iter().flat_map(|rank| &rank.blocks);
    let channels = blocks().map(|block| u32::from(block.channel) + 1).max().unwrap_or(1);
    let flag = |set: bool| u8::from(set);
    let most = Some(*script.bytes.end()).filter(|&most| most != u64::MAX).unwrap_or(0);
    add(
        &mut text,
        format_args!(
            "<algo name=\"{}\" proto=\"{}\" nchannels=\"{channels}\" nchunksperloop=\"{}\" ngpus=\"{}\" coll=\"{}\" \
             inplace=\"{}\" outofplace=\"{}\" minBytes=\"{}\" maxBytes=\"{most}\">\n",
            escape(readable(&script.name)),
            escape(&script.protocol),
            script.chunks,
            script.nranks(),
            word(script.collective),
            flag(script.in_place),
            flag(script.serves_out_of_place),
            script.bytes.start(),
        ),
    );
    for (number, rank) in script.ranks.iter().enumerate() {
        let (input, output) = (script.chunks_of(true), script.chunks_of(false));
        add(
            &mut text,
            format_args!(
                "  <gpu id=\"{number}\" i_chunks=\"{input}\" o_chunks=\"{output}\" s_chunks=\"{}\">\n",
                rank.scratch
            ),
        );
        // Readers want to know of each step whether another waits for it.
        let waited_for: BTreeSet<(u32, u32)> =
            rank.blocks.iter().flat_map(|block| &block.steps).filter_map(|step| step.dep).collect();
        for (id, block) in (0u32..).zip(&rank.blocks) {
            write_block(&mut text, id, block, &|step| waited_for.contains(&(id, step)));
        }
        text.push_str("  </gpu>\n");
    }
    text.push_str("</algo>\n");
    text
}

/// A name as readers of XML give it back: with spaces for other white space, and none at its ends. Control characters are none.
fn readable(name: &str) -> String {
    let spaced: String = name.chars().map(|c| if c.is_control() || c.is_whitespace() { ' ' } else { c }).collect();
    spaced.trim().to_string()
}

fn write_block(text: &mut String, id: u32, block: &ThreadBlock, is_waited_for: &dyn Fn(u32) -> bool) {
    let peer = |peer: Option<u32>| peer.map_or(-1, i64::from);
    let (to, from, channel) = (peer(block.to), peer(block.from), block.channel);
    add(text, format_args!("    <tb id=\"{id}\" send=\"{to}\" recv=\"{from}\" chan=\"{channel}\">\n"));
    for (number, step) in (0u32..).zip(&block.steps) {
        let ScriptStep { kind, src, dst, count, dep, .. } = step;
        let (depid, deps) = dep.map_or((-1, -1), |(block, step)| (i64::from(block), i64::from(step)));
        // What a step does not use stands there all the same: some readers look at all of it.
        let (src, dst) = match kind {
            ScriptStepKind::Nop => (None, None),
            ScriptStepKind::Recv | ScriptStepKind::RecvCopySend => (Some(dst), Some(dst)),
            ScriptStepKind::Send | ScriptStepKind::RecvReduceSend => (Some(src), Some(src)),
            _ => (Some(src), Some(dst)),
        };
        let place = |place: Option<&Place>| match place {
            Some(place) => (place.buffer.letter(), i64::from(place.chunk)),
            None => ('i', -1),
        };
        let ((srcbuf, srcoff), (dstbuf, dstoff)) = (place(src), place(dst));
        let has_dep = u8::from(is_waited_for(number));
        add(
            text,
            format_args!(
                "      <step s=\"{number}\" type=\"{}\" srcbuf=\"{srcbuf}\" srcoff=\"{srcoff}\" dstbuf=\"{dstbuf}\" \
                 dstoff=\"{dstoff}\" cnt=\"{count}\" depid=\"{depid}\" deps=\"{deps}\" hasdep=\"{has_dep}\"/>\n",
                kind.name()
            ),
        );
    }
    text.push_str("    </tb>\n");
}

/// A collective in the files' spelling.
fn word(collective: Collective) -> String {
    collective.name().replace('_', "")
}

/// Writing to a string cannot fail.
fn add(text: &mut String, what: std::fmt::Arguments<'_>) {
    let _ = text.write_fmt(what);
}
