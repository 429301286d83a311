//! What a program asks for where calls go on without lost ranks (`strataCommAdapt`).
#![forbid(unsafe_code)]

use super::kept::CommitWord;
use super::queued::run_words;
use super::Survivors;
use crate::communicator::late::here;
use crate::communicator::{CollectiveCall, Comm};
use crate::dtype::{Operator, Prologue, RedOp, Reduction};
use crate::error::{Error, Result};
use crate::plan::Collective;
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// What a program asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AdaptOptions {
    /// Sums are multiplied by the number of ranks over the number of contributors.
    pub rescale: bool,
}

impl FromStr for AdaptOptions {
    type Err = Error;

    /// `rescale=on`; with commas between several, of which the last one of a name holds. What is not named is off.
    fn from_str(text: &str) -> Result<AdaptOptions> {
        let mut options = AdaptOptions::default();
        for option in text.split(',').map(str::trim).filter(|option| !option.is_empty()) {
            let wrong = |why: &str| Error::InvalidArgument(format!("options {text}: {option}: {why}"));
            let (name, value) = option.split_once('=').ok_or_else(|| wrong("name=value is wanted"))?;
            let value = match value.trim() {
                "on" => true,
                "off" => false,
                _ => return Err(wrong("one of on and off is wanted")),
            };
            match name.trim() {
                "rescale" => options.rescale = value,
                other if strsim::damerau_levenshtein(other, "rescale") <= 2 => {
                    return Err(wrong("did you mean rescale?"));
                }
                _ => return Err(wrong("unknown; there is rescale")),
            }
        }
        Ok(options)
    }
}

/// The reduction of a call that adds without dividing, and so has less where somebody is missing.
fn sum(call: &CollectiveCall) -> Option<Reduction> {
    let divides =
        |reduction: &Reduction| reduction.divisor != 1 || matches!(reduction.prologue, Prologue::Reciprocal(_));
    call.reduction.filter(|reduction| reduction.operator == Operator::Sum && !divides(reduction))
}

impl Survivors {
    /// An error for a call that cannot be what the program has asked for; the same on all ranks.
    pub(super) fn can_rescale(&self, call: &CollectiveCall) -> Result<()> {
        let rescales = self.rescales.load(Ordering::Acquire);
        match sum(call).filter(|sum| rescales && sum.dtype.is_integer()) {
            None => Ok(()),
            Some(sum) => {
                let (name, dtype) = (call.collective.name(), sum.dtype.name());
                let text =
                    format!("{name}: a sum of {dtype} cannot be rescaled, which strataCommAdapt asks for (rescale=on)");
                Err(Error::InvalidUsage(text))
            }
        }
    }

    /// Makes of a sum of so many contributors, where that is asked for, what it would be on average with all ranks.
    pub(super) fn rescale(&self, comm: &Comm, call: &CollectiveCall, contributors: usize) -> Result<()> {
        let has_result = call.collective != Collective::Reduce || call.root == comm.rank;
        if !self.rescales.load(Ordering::Acquire) || contributors == comm.nranks() || !has_result {
            return Ok(());
        }
        let Some(Reduction { dtype, .. }) = sum(call) else { return Ok(()) };
        let ratio = (comm.nranks() as u64, contributors as u64);
        match &self.on_gpu {
            Some(on_gpu) => on_gpu.kept.multiply_by_ratio(dtype, ratio, call.output),
            None => {
                crate::device::host::multiply_by_ratio(dtype, ratio, here(call.output));
                Ok(())
            }
        }
    }
}

impl Comm {
    /// Asks for these options from the next call on; collective over the ranks that are left, which ask for the same.
    pub fn adapt(self: &Arc<Comm>, options: AdaptOptions) -> Result<()> {
        self.usable()?;
        let survivors = self.survivors.get().ok_or_else(|| {
            let text = "strataCommAdapt: ranks that are lost end this communicator (STRATA_LOST): nothing goes on that could adapt";
            Error::InvalidUsage(text.to_string())
        })?;
        let mine = u64::from(options.rescale);
        let ops = [RedOp::Min, RedOp::Max];
        let [least, most] = match survivors.is_on_gpu() {
            true => {
                let words = ops.map(|_| CommitWord::new(mine));
                let calls = [0, 1].map(|index| words[index].call(self.nranks(), ops[index]));
                run_words(self, survivors, &calls)?;
                words.map(|word| word.said())
            }
            false => [self.word_of_all(mine, ops[0])?, self.word_of_all(mine, ops[1])?],
        };
        if least != most {
            let text = format!(
                "strataCommAdapt: ranks ask for different options: this one for rescale={}",
                on(options.rescale)
            );
            return Err(Error::InvalidUsage(text));
        }
        survivors.rescales.store(options.rescale, Ordering::Release);
        Ok(())
    }
}

fn on(is_on: bool) -> &'static str {
    if is_on {
        "on"
    } else {
        "off"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_names_with_values_and_what_is_near_is_told() {
        let read = |text: &str| text.parse::<AdaptOptions>().map(|options| options.rescale);
        assert_eq!(
            ["", "rescale=on", " rescale = on,", "rescale=on,rescale=off"].map(|text| read(text).unwrap()),
            [false, true, true, false]
        );
        for (text, expected) in [
            ("rescale", "name=value is wanted"),
            ("rescale=1", "one of on and off is wanted"),
            ("rescal=on", "did you mean rescale?"),
            ("late=on", "unknown; there is rescale"),
        ] {
            let error = read(text).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument(_)) && error.text().contains(expected), "{text}: {error}");
        }
    }
}
