//! Calls whose messages between nodes are in a code: because a setting says so, or because they name an algorithm of one.
#![forbid(unsafe_code)]

use super::{Context, Decision, Executor, Request};
use crate::algorithms::{self, Choice};
use crate::code::FloatCode;
use crate::config::Config;

impl Decision {
    /// The code in which its messages go between nodes.
    pub fn code(&self) -> Option<FloatCode> {
        match &self.executor {
            Executor::Own(selection) => algorithms::code_of(&selection.choice),
            _ => None,
        }
    }
}

/// The algorithm for the code that is set, with the reason: for calls of enough bytes.
pub(super) fn choice(request: &Request<'_>, context: &Context) -> Option<(Choice, String)> {
    choice_of(request, request.message_bytes(context), context)
}

/// The same of such a call of so many bytes.
pub(super) fn choice_of(request: &Request<'_>, bytes: usize, context: &Context) -> Option<(Choice, String)> {
    let code = request.code.filter(|_| bytes >= context.config.code_min_bytes)?;
    let choice = algorithms::coded_choice(code, request.collective, &context.grid)?;
    Some((choice, format!("messages between nodes go in {}", code.name())))
}

/// The most scratch memory for calls by a choice. Coded chunks are short, and long segments keep their messages few.
pub fn most_scratch_bytes(choice: &Choice, config: &Config) -> usize {
    let is_roomy = algorithms::code_of(choice).is_some() && !config.is_given("STRATA_SCRATCH_BYTES");
    config.scratch_bytes.saturating_mul(if is_roomy { 4 } else { 1 })
}
