//! What a collective that has no name of its own promises: what each chunk of each rank's output holds in the end.
#![forbid(unsafe_code)]

use serde::Deserialize;
use std::ops::RangeInclusive;

/// The largest file of a contract, in bytes: reading one takes about 90 bytes of memory for each.
pub const MAX_CONTRACT_BYTES: usize = 4 << 20;
/// The most chunks of outputs, of all ranks, that a contract may have: it says of each what it holds.
pub const MAX_PROMISES: u64 = 1 << 22;
/// The most chunks that all rules of a contract speak of, those that several rules speak of as often.
pub const MAX_RULED: u64 = 1 << 24;

/// What a chunk of the output holds in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Promise {
    /// Whatever the algorithm leaves there, be it nothing.
    Anything,
    /// A chunk of a rank's input.
    Chunk {
        /// Whose.
        rank: u32,
        /// Which.
        chunk: u32,
    },
    /// The reduction of this chunk of all ranks' inputs.
    Reduction {
        /// Which.
        chunk: u32,
    },
}

/// The promises of a custom collective.
///
/// Each rank's input and output are cut into equal blocks: as few as there can be such that each block of an output is
/// promised as a whole, as a block of an input, a reduction of blocks, or anything. Chunks of a block are as unequal as those
/// of other collectives, and no promise speaks of where one ends.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Contract {
    /// By rank and chunk of the output.
    outputs: Vec<Vec<Promise>>,
    blocks: u32,
    combines: bool,
}

/// The file of a contract.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContractFile {
    #[serde(default)]
    output: Vec<Rule>,
}

/// Chunks that are promised alike.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rule {
    /// `3`, or `1-15`; all ranks where it is left out.
    ranks: Option<String>,
    /// The same of chunks.
    chunks: Option<String>,
    /// Of this rank.
    rank: Option<u32>,
    /// Of the rank that is so many further on.
    rank_shift: Option<i64>,
    /// This chunk.
    chunk: Option<u32>,
    /// The chunk that is so many further on.
    chunk_shift: Option<i64>,
    /// Ranks and chunks go on from the last to the first.
    #[serde(default)]
    wraps: bool,
    /// Of all ranks, reduced.
    #[serde(default)]
    reduced: bool,
}

impl Contract {
    /// The contract with these promises, by rank and chunk of the output: as many chunks for all ranks, at least one.
    pub fn new(outputs: Vec<Vec<Promise>>) -> Contract {
        let chunks = outputs.first().map_or(1, |outputs| outputs.len() as u32);
        // Promises that do not go on as the chunk before does begin a block, and what they speak of begins one.
        let per_block = outputs.iter().fold(chunks, |common, outputs| {
            let first = outputs.first().map_or(0, |promise| promise.chunk().unwrap_or(0));
            let begins = (1u32..).zip(outputs.windows(2)).filter(|(_, pair)| pair[0].after(1) != pair[1]);
            begins.fold(divisor(common, first), |common, (at, pair)| {
                divisor(divisor(common, at), pair[1].chunk().unwrap_or(0))
            })
        });
        let blocks = chunks / per_block.max(1);
        let combines = outputs.iter().flatten().any(|promise| matches!(promise, Promise::Reduction { .. }));
        Contract { outputs, blocks, combines }
    }

    /// The same of an algorithm that reduces, be it only what nothing is promised of.
    pub fn combining(self, combines: bool) -> Contract {
        Contract { combines: combines || self.promises_reductions(), ..self }
    }

    /// The promises, by rank and chunk of the output.
    pub fn outputs(&self) -> &[Vec<Promise>] {
        &self.outputs
    }

    /// What is promised of a chunk of a rank's output.
    pub fn promise(&self, rank: usize, chunk: usize) -> Promise {
        self.outputs.get(rank).and_then(|outputs| outputs.get(chunk)).copied().unwrap_or(Promise::Anything)
    }

    /// What is promised of a block of a rank's output, in blocks of the input in place of chunks.
    pub fn promise_of_block(&self, rank: usize, block: usize) -> Promise {
        let chunks = self.outputs.get(rank).map_or(1, Vec::len) as u32;
        let per_block = chunks / self.blocks;
        match self.promise(rank, block * per_block as usize) {
            Promise::Anything => Promise::Anything,
            Promise::Chunk { rank, chunk } => Promise::Chunk { rank, chunk: chunk / per_block },
            Promise::Reduction { chunk } => Promise::Reduction { chunk: chunk / per_block },
        }
    }

    /// Blocks of each buffer, all of one size.
    pub fn blocks(&self) -> usize {
        self.blocks as usize
    }

    /// The contract in a file's text, for so many ranks of so many chunks. Where several rules speak of a chunk the last holds;
    /// a chunk of which none does may hold anything.
    ///
    /// # Errors
    /// What is wrong with the text: no TOML, an unknown word, or a rank or chunk that does not exist.
    pub fn parse(text: &str, nranks: usize, chunks: u32) -> Result<Contract, String> {
        if text.len() > MAX_CONTRACT_BYTES {
            return Err(format!("it has more than {MAX_CONTRACT_BYTES} bytes"));
        }
        let file: ContractFile = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_string())?;
        Contract::of_rules(&file.output, nranks, chunks)
    }

    /// The contract of rules, for so many ranks of so many chunks.
    ///
    /// # Errors
    /// A rank or chunk that does not exist; more chunks than the limits allow.
    pub(crate) fn of_rules(rules: &[Rule], nranks: usize, chunks: u32) -> Result<Contract, String> {
        if nranks as u64 * u64::from(chunks) > MAX_PROMISES {
            return Err(format!("a contract is of {MAX_PROMISES} chunks of all ranks at most"));
        }
        let mut outputs = vec![vec![Promise::Anything; chunks as usize]; nranks];
        let mut ruled = 0;
        for (number, rule) in rules.iter().enumerate() {
            let wrong = |text: String| format!("rule {}: {text}", number + 1);
            let ranks = range(rule.ranks.as_deref(), nranks as u32, "rank").map_err(wrong)?;
            let of_rank = range(rule.chunks.as_deref(), chunks, "chunk").map_err(wrong)?;
            ruled += ranks.clone().count() as u64 * of_rank.clone().count() as u64;
            if ruled > MAX_RULED {
                return Err(wrong(format!("with those before it, it speaks of more than {MAX_RULED} chunks")));
            }
            for rank in ranks {
                for chunk in of_rank.clone() {
                    outputs[rank as usize][chunk as usize] =
                        rule.promise(rank, chunk, nranks as u32, chunks).map_err(wrong)?;
                }
            }
        }
        Ok(Contract::new(outputs))
    }

    /// The contract as a file: a rule for each run of chunks that are promised alike.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (rank, outputs) in self.outputs.iter().enumerate() {
            let goes_on = |one: &(u32, Promise), other: &(u32, Promise)| one.1.after(other.0 - one.0) == other.1;
            let numbered: Vec<(u32, Promise)> = (0..).zip(outputs.iter().copied()).collect();
            for run in numbered.chunk_by(goes_on) {
                let ((first, promise), last) = (run[0], run[0].0 + run.len() as u32 - 1);
                let what = match promise {
                    Promise::Anything => continue,
                    Promise::Chunk { rank, chunk } => {
                        format!("rank = {rank}\nchunk_shift = {}", i64::from(chunk) - i64::from(first))
                    }
                    Promise::Reduction { chunk } => {
                        format!("reduced = true\nchunk_shift = {}", i64::from(chunk) - i64::from(first))
                    }
                };
                text += &format!("[[output]]\nranks = \"{rank}\"\nchunks = \"{first}-{last}\"\n{what}\n");
            }
        }
        text
    }

    /// Whether data of several ranks is combined, for a promise or not.
    pub fn reduces(&self) -> bool {
        self.combines
    }

    /// Whether reductions are promised.
    pub fn promises_reductions(&self) -> bool {
        self.outputs.iter().flatten().any(|promise| matches!(promise, Promise::Reduction { .. }))
    }
}

impl Promise {
    /// Which chunk of an input it speaks of, if of one.
    fn chunk(self) -> Option<u32> {
        match self {
            Promise::Anything => None,
            Promise::Chunk { chunk, .. } | Promise::Reduction { chunk } => Some(chunk),
        }
    }

    /// The same of the chunk that is so many further on.
    fn after(self, offset: u32) -> Promise {
        match self {
            Promise::Anything => Promise::Anything,
            Promise::Chunk { rank, chunk } => Promise::Chunk { rank, chunk: chunk + offset },
            Promise::Reduction { chunk } => Promise::Reduction { chunk: chunk + offset },
        }
    }
}

impl Rule {
    fn promise(&self, rank: u32, chunk: u32, nranks: u32, chunks: u32) -> Result<Promise, String> {
        let of = |fixed: Option<u32>, shift: Option<i64>, at: u32, limit: u32, what: &str| {
            let wanted = match (fixed, shift) {
                (Some(_), Some(_)) => return Err(format!("both {what} and {what}_shift")),
                (Some(fixed), None) => i64::from(fixed),
                (None, shift) => i64::from(at).saturating_add(shift.unwrap_or(0)),
            };
            let limit = i64::from(limit);
            let found = if self.wraps { wanted.rem_euclid(limit) } else { wanted };
            match (0..limit).contains(&found) {
                true => Ok(found as u32),
                false => Err(format!("{what} {found} of {limit}, for chunk {chunk} of rank {rank}")),
            }
        };
        let chunk = of(self.chunk, self.chunk_shift, chunk, chunks, "chunk")?;
        if self.reduced {
            return match (self.rank, self.rank_shift) {
                (None, None) => Ok(Promise::Reduction { chunk }),
                _ => Err("a reduction is of all ranks, and of none".to_string()),
            };
        }
        Ok(Promise::Chunk { rank: of(self.rank, self.rank_shift, rank, nranks, "rank")?, chunk })
    }
}

/// The greatest common divisor.
fn divisor(mut one: u32, mut other: u32) -> u32 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

/// `3`, `1-15`, or all there are.
fn range(text: Option<&str>, limit: u32, what: &str) -> Result<RangeInclusive<u32>, String> {
    let Some(text) = text else { return Ok(0..=limit - 1) };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&number| number < limit);
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err(format!("{what}s \"{text}\" are not in 0 to {}", limit - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contract_says_what_each_chunk_holds() {
        let text = "[[output]]\nranks = \"1-3\"\nrank_shift = -1\n[[output]]\nranks = \"3\"\nchunks = \"1\"\nchunk = 0\nreduced = true";
        let contract = Contract::parse(text, 4, 2).unwrap();
        assert_eq!(contract.outputs[0], [Promise::Anything; 2]);
        assert_eq!(contract.outputs[2], [Promise::Chunk { rank: 1, chunk: 0 }, Promise::Chunk { rank: 1, chunk: 1 }]);
        assert_eq!(contract.outputs[3], [Promise::Chunk { rank: 2, chunk: 0 }, Promise::Reduction { chunk: 0 }]);
        let wraps = Contract::parse("[[output]]\nrank_shift = -1\nchunk_shift = 1\nwraps = true", 3, 2).unwrap();
        assert_eq!(wraps.outputs[0], [Promise::Chunk { rank: 2, chunk: 1 }, Promise::Chunk { rank: 2, chunk: 0 }]);
    }

    #[test]
    fn a_contract_is_no_larger_than_its_limits_whatever_its_rules_say() {
        let said = Contract::parse(&" ".repeat(MAX_CONTRACT_BYTES + 1), 1, 1).unwrap_err();
        assert!(said.contains("it has more than 4194304 bytes"), "{said}");
        let said = Contract::parse("", 1024, 1 << 20).unwrap_err();
        assert!(said.contains("of 4194304 chunks of all ranks at most"), "{said}");
        let rules = "[[output]]\nrank = 0\n".repeat(17);
        let said = Contract::parse(&rules, 1, 1 << 20).unwrap_err();
        assert!(said.contains("rule 17: with those before it, it speaks of more than 16777216 chunks"), "{said}");
        assert!(Contract::parse(&rules, 1, 1 << 19).is_ok());
    }

    #[test]
    fn a_buffer_has_as_few_equal_blocks_as_promises_allow() {
        let cases = [
            // Whole buffers go round: where chunks end is of no consequence.
            ("[[output]]\nranks = \"1-3\"\nrank_shift = -1", 1),
            ("[[output]]\nreduced = true", 1),
            ("", 1),
            ("[[output]]\nchunk_shift = 1\nwraps = true", 12),
            ("[[output]]\nchunk_shift = 4\nwraps = true", 3),
            // Positions stay, but a promise ends within the buffer.
            ("[[output]]\nchunks = \"0-5\"", 2),
            ("[[output]]\nchunks = \"0-8\"\nrank = 1", 4),
            ("[[output]]\nchunks = \"4-7\"\nranks = \"2\"\nrank = 1", 3),
            // The halves change places, but for one chunk.
            ("[[output]]\nchunk_shift = 6\nwraps = true\n[[output]]\nranks = \"3\"\nchunks = \"7\"\nchunk = 1\nrank = 0", 12),
            ("[[output]]\nchunks = \"6-11\"\nchunk_shift = -6\nreduced = true", 2),
        ];
        for (text, blocks) in cases {
            assert_eq!(Contract::parse(text, 4, 12).unwrap().blocks(), blocks, "{text}");
        }
    }

    #[test]
    fn what_does_not_exist_is_refused_with_its_rule() {
        let cases = [
            ("[[output]]\nrank = 4", "rule 1: rank 4 of 4, for chunk 0 of rank 0"),
            ("[[output]]\n[[output]]\nranks = \"0-4\"", "rule 2: ranks \"0-4\" are not in 0 to 3"),
            ("[[output]]\nranks = \"2-1\"", "rule 1: ranks \"2-1\""),
            ("[[output]]\nrank_shift = -1", "rule 1: rank -1 of 4"),
            ("[[output]]\nrank = 1\nrank_shift = 1", "rule 1: both rank and rank_shift"),
            ("[[output]]\nreduced = true\nrank = 1", "rule 1: a reduction is of all ranks"),
            ("[[output]]\nrnk = 1", "unknown field `rnk`"),
            ("output = 3", "invalid type"),
        ];
        for (text, wanted) in cases {
            let said = Contract::parse(text, 4, 2).unwrap_err();
            assert!(said.contains(wanted), "{text}\n{said}");
        }
    }
}
