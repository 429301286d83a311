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

/// The most scratch memory for calls by a choice. Coded chunks are short, and long segments keep their messages few. Devices
/// have the memory that they had when the communicator was made: a driver may allocate only when its streams have come to rest.
pub fn most_scratch_bytes(choice: &Choice, config: &Config, on_devices: bool) -> usize {
    let is_coded = algorithms::code_of(choice).is_some();
    let is_roomy = is_coded && !on_devices && !config.is_given("STRATA_SCRATCH_BYTES");
    config.scratch_bytes.saturating_mul(if is_roomy { 4 } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coded_calls_have_more_scratch_on_hosts_and_no_more_than_there_is_on_devices() {
        let (config, coded) = (Config::default(), Choice::flat("coded_mx8"));
        assert_eq!(most_scratch_bytes(&coded, &config, false), 4 * config.scratch_bytes);
        assert_eq!(most_scratch_bytes(&coded, &config, true), config.scratch_bytes);
        assert_eq!(most_scratch_bytes(&Choice::flat("direct"), &config, false), config.scratch_bytes);
    }
}
