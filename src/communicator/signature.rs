//! What names a call to other ranks and to people: the digest in which its ranks must agree, and the words of its errors.
#![forbid(unsafe_code)]

use super::CollectiveCall;
use crate::digest::Digest;
use crate::dtype::Prologue;
use crate::error::Error;

/// Says of which operation an error is. A message that does not match its receive may be one `beside` it, or of an operation before in which
/// each rank knew its own sizes only, the last of which has the number `own_sizes`; 0 is none.
pub(super) fn explain(error: Error, call: &CollectiveCall, (sequence, own_sizes): (u64, u64), beside: bool) -> Error {
    let sizes = if call.blocks.is_some() { "blocks of different sizes of " } else { "" };
    let (name, count, dtype) = (call.collective.name(), call.count, call.dtype.name());
    let count = if call.blocks.is_some() { String::new() } else { format!("{count} ") };
    let what = format!("operation {sequence}, {name} of {sizes}{count}{dtype}: ");
    match error {
        Error::InvalidUsage(text) if beside => {
            Error::InvalidUsage(format!("{}, or a send or receive beside it: {text}", what.trim_end_matches(": ")))
        }
        // An empty block has no message there, so one that somebody has elements for looks like another call's.
        Error::InvalidUsage(text) if call.has_own_sizes() => {
            Error::InvalidUsage(format!("{what}{text}, or one has elements for another one that expects none"))
        }
        Error::InvalidUsage(text) if (1..sequence).contains(&own_sizes) => Error::InvalidUsage(format!(
            "{what}{text}, or in operation {own_sizes} one had elements for another one that expected none: counts may differ"
        )),
        Error::InvalidUsage(text) => Error::InvalidUsage(what + &text),
        Error::Timeout(text) => Error::Timeout(match call.decision.as_ref().and_then(|decision| decision.provider()) {
            Some(provider) => format!("{what}provider {provider} has not completed it: {text}"),
            None => what + &text,
        }),
        Error::Remote(text) => Error::Remote(what + &text),
        other => other,
    }
}

/// A digest of what all ranks of one collective must agree on.
pub(super) fn signature(call: &CollectiveCall, algorithm: &str) -> u32 {
    let mut digest = Digest::new("collective").text(call.collective.name());
    digest = match (&call.blocks, call.known_sizes()) {
        (None, _) => digest.number(call.count as u64),
        (Some(_), None) => digest.text("own sizes"),
        (Some(_), Some(sizes)) => sizes.iter().fold(digest.text("sizes"), |digest, &count| digest.number(count as u64)),
    };
    if let Some(joined) = &call.joined {
        digest = joined.summary.0.iter().fold(digest.text("joined"), |digest, &word| digest.number(word));
    }
    digest = digest.text(call.dtype.name()).number(call.root.0).text(algorithm);
    if call.keeps_residual() {
        digest = digest.text("residual");
    }
    if let Some(reduction) = call.reduction {
        let prologue = match reduction.prologue {
            Prologue::None => "none",
            Prologue::Scalar(_) => "scalar",
            Prologue::Reciprocal(_) => "reciprocal",
        };
        digest = digest.number(reduction.operator as u8).number(reduction.divisor).text(prologue);
    }
    digest.value() as u32
}
