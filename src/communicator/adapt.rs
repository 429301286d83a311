//! What a program asks for where calls go on without lost or late ranks (`strataCommAdapt`).
#![forbid(unsafe_code)]

use super::batch::{drive, OperationBatch};
use super::lost::{run_words, CommitWord, Provide};
use super::{CollectiveCall, Comm};
use crate::config::{Late, Lost};
use crate::dtype::{Operator, Prologue, RedOp, Reduction};
use crate::error::{Error, Result};
use std::str::FromStr;
use std::sync::Arc;

/// In the word of a rank that wants another communicator: below the others, so that of equal ones the greatest has it where some rank's does.
const WANTS_RENEWAL: u64 = 1;

/// What a program asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AdaptOptions {
    /// Sums are multiplied by the number of ranks over the number of contributors.
    pub rescale: bool,
    /// What late ranks have not contributed to when the others are done is left out.
    pub drops_late: bool,
}

impl FromStr for AdaptOptions {
    type Err = Error;

    /// `rescale=on,late=drop`; of several of one name the last one holds. What is not named is off.
    fn from_str(text: &str) -> Result<AdaptOptions> {
        let mut options = AdaptOptions::default();
        for option in text.split(',').map(str::trim).filter(|option| !option.is_empty()) {
            let wrong = |why: &str| Error::InvalidArgument(format!("options {text}: {option}: {why}"));
            let (name, value) = option.split_once('=').ok_or_else(|| wrong("name=value is wanted"))?;
            let (place, values) = match name.trim() {
                "rescale" => (&mut options.rescale, ["off", "on"]),
                "late" => (&mut options.drops_late, ["bring", "drop"]),
                other => {
                    let near =
                        ["rescale", "late"].into_iter().find(|name| strsim::damerau_levenshtein(other, name) <= 2);
                    let why = near.map_or("unknown; there are rescale and late".to_string(), |near| {
                        format!("did you mean {near}?")
                    });
                    return Err(wrong(&why));
                }
            };
            let value = values.iter().position(|known| *known == value.trim());
            *place = value.ok_or_else(|| wrong(&format!("one of {} and {} is wanted", values[1], values[0])))? == 1;
        }
        Ok(options)
    }
}

impl AdaptOptions {
    /// As a word that ranks compare.
    fn word(self) -> u64 {
        u64::from(self.rescale) | u64::from(self.drops_late) << 1
    }

    fn text(self) -> String {
        let [rescale, late] = [(self.rescale, ["off", "on"]), (self.drops_late, ["bring", "drop"])]
            .map(|(is_set, names)| names[usize::from(is_set)]);
        format!("rescale={rescale},late={late}")
    }

    /// An error for a call that cannot be what the program has asked for; the same on all ranks.
    pub fn check(self, call: &CollectiveCall) -> Result<()> {
        match sum(call.reduction).filter(|sum| self.rescale && sum.dtype.is_integer()) {
            None => Ok(()),
            Some(sum) => {
                let (name, dtype) = (call.collective.name(), sum.dtype.name());
                let text =
                    format!("{name}: a sum of {dtype} cannot be rescaled, which strataCommAdapt asks for (rescale=on)");
                Err(Error::InvalidUsage(text))
            }
        }
    }
}

/// A reduction that adds without dividing, and so has less where somebody is missing.
pub fn sum(reduction: Option<Reduction>) -> Option<Reduction> {
    let divides =
        |reduction: &Reduction| reduction.divisor != 1 || matches!(reduction.prologue, Prologue::Reciprocal(_));
    reduction.filter(|reduction| reduction.operator == Operator::Sum && !divides(reduction))
}

impl Comm {
    /// Asks for these options from the next call on, and has what has come back since ranks or NICs were lost be used again: see
    /// [`lost::renew`](super::lost). Collective over the ranks that are left, which ask for the same.
    pub fn adapt(self: &Arc<Comm>, options: AdaptOptions, provide: Option<Provide<'_>>) -> Result<()> {
        self.usable()?;
        let survivors = self.survivors.get();
        // Ranks that are lost meanwhile leave another generation.
        let late = || self.generation().unwrap_or_else(|| self.clone()).late.get().cloned();
        // A rank alone waits for nobody and loses nobody: what is set holds of its own.
        let is_alone = self.nranks() == 1;
        let relays = late().is_some() || is_alone && self.config.late == Late::Relay;
        let outlasts = survivors.is_some() || is_alone && self.config.lost == Lost::Continue;
        if !outlasts && !relays {
            let text = "strataCommAdapt: ranks that are lost end this communicator (STRATA_LOST), and late ones are waited for \
                        (STRATA_LATE): nothing goes on that could adapt";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        let is_renewed = !is_alone && self.agree_on(options, provide.is_some())?;
        // After that: where ranks ask for different options, all are told of it.
        if options.drops_late && outlasts {
            let text = "strataCommAdapt: late=drop: with STRATA_LOST=continue a call ends when all ranks say that they have it, late ones too";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        if options.drops_late && self.options.companion.is_some() {
            let text = "strataCommAdapt: late=drop: in front of a vendor's library what late ranks have is brought";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        if options.drops_late && !relays {
            let text = "strataCommAdapt: late=drop: late ranks are waited for (STRATA_LATE)";
            return Err(Error::InvalidUsage(text.to_string()));
        }
        survivors.into_iter().for_each(|survivors| survivors.adapt(options));
        if is_renewed {
            self.renew(provide)?;
        }
        late().into_iter().for_each(|late| late.adapt(options));
        Ok(())
    }

    /// All ranks that are left ask for these options. Whether some rank [`wants_renewal`](Comm::wants_renewal): it says so once, before it hears
    /// the others, so all know the same.
    fn agree_on(self: &Arc<Comm>, options: AdaptOptions, has_provider: bool) -> Result<bool> {
        let survivors = self.survivors.get();
        let word = (options.word() << 1) | (WANTS_RENEWAL * u64::from(self.wants_renewal(has_provider)));
        let ops = [RedOp::Min, RedOp::Max];
        let [least, most] = match survivors {
            Some(survivors) if !survivors.is_on_gpu() => {
                [self.word_of_all(word, ops[0])?, self.word_of_all(word, ops[1])?]
            }
            _ => {
                let words = ops.map(|_| CommitWord::new(word));
                let calls = [0, 1].map(|index| self.around_vendor(words[index].call(self.nranks(), ops[index])));
                match survivors {
                    Some(survivors) => run_words(self, survivors, &calls)?,
                    None => self.run_own(calls)?,
                }
                words.map(|word| word.said())
            }
        };
        if least >> 1 != most >> 1 {
            let text = format!("strataCommAdapt: ranks ask for different options: this one for {}", options.text());
            return Err(Error::InvalidUsage(text));
        }
        Ok(most & WANTS_RENEWAL != 0)
    }

    /// Runs calls over words of the library's own, in the communicator's next turn, when all before has ended.
    fn run_own(self: &Arc<Comm>, calls: [CollectiveCall; 2]) -> Result<()> {
        self.quiesce()?;
        let mut batch = OperationBatch::new(self.clone());
        batch.is_own = true;
        batch.collectives = calls.into_iter().collect();
        batch.collectives.iter_mut().try_for_each(|call| self.decide(call))?;
        {
            let _accepting = self.gpu().map(|device| device.accepting());
            batch.take_turn();
        }
        drive(std::slice::from_mut(&mut batch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_names_with_values_and_what_is_near_is_told() {
        let read = |text: &str| text.parse::<AdaptOptions>().map(|options| (options.rescale, options.drops_late));
        let texts =
            ["", "rescale=on", " rescale = on,", "rescale=on,rescale=off", "late=drop,rescale=on", "late=bring"];
        assert_eq!(
            texts.map(|text| read(text).unwrap()),
            [(false, false), (true, false), (true, false), (false, false), (true, true), (false, false)]
        );
        for (text, expected) in [
            ("rescale", "name=value is wanted"),
            ("rescale=1", "one of on and off is wanted"),
            ("late=on", "one of drop and bring is wanted"),
            ("rescal=on", "did you mean rescale?"),
            ("layte=drop", "did you mean late?"),
            ("muted=on", "unknown; there are rescale and late"),
        ] {
            let error = read(text).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument(_)) && error.text().contains(expected), "{text}: {error}");
        }
        let words = [(false, false), (true, false), (false, true), (true, true)]
            .map(|(rescale, drops_late)| AdaptOptions { rescale, drops_late }.word());
        assert_eq!(words, [0, 1, 2, 3]);
    }
}
