//! Calls whose messages between nodes are in a code: because a setting says so, or because they name an algorithm of one.
#![forbid(unsafe_code)]

use super::{Context, Request};
use crate::algorithms::{self, Choice};
use crate::config::Config;
use crate::error::{Error, Result};

/// The algorithm for the code that is set, with the reason: for calls of enough bytes.
pub(super) fn choice(request: &Request<'_>, context: &Context) -> Option<(Choice, String)> {
    let is_short = request.message_bytes(context) < context.config.code_min_bytes;
    let code = request.code.filter(|_| !is_short)?;
    let choice = algorithms::coded_choice(code, request.collective, &context.grid)?;
    Some((choice, format!("messages between nodes go in {}", code.name())))
}

/// An error for a choice in a code where data is on devices.
pub(super) fn check(choice: &Choice, on_devices: bool) -> Result<()> {
    match on_devices && algorithms::code_of(choice).is_some() {
        true => Err(Error::InvalidUsage(format!("algorithm {choice}: what is in device memory is not coded"))),
        false => Ok(()),
    }
}

/// The most scratch memory for calls by a choice. Coded chunks are short, and long segments keep their messages few.
pub fn most_scratch_bytes(choice: &Choice, config: &Config) -> usize {
    let is_roomy = algorithms::code_of(choice).is_some() && !config.is_given("STRATA_SCRATCH_BYTES");
    config.scratch_bytes.saturating_mul(if is_roomy { 4 } else { 1 })
}
