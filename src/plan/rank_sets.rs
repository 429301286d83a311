//! Sets of ranks, each known by a number: whose contributions a value holds.
#![forbid(unsafe_code)]

use rustc_hash::FxHashMap;

/// Sets of ranks: row `i` of `words` is set `i`. The same two sets have one union, however many chunks are reduced alike.
#[derive(Debug)]
pub(crate) struct RankSets {
    stride: usize,
    words: Vec<u64>,
    lens: Vec<u32>,
    unions: FxHashMap<(u32, u32), u32>,
}

impl RankSets {
    /// No sets of these ranks yet.
    pub fn new(nranks: usize) -> RankSets {
        RankSets { stride: nranks.div_ceil(64), words: Vec::new(), lens: Vec::new(), unions: FxHashMap::default() }
    }

    fn get(&self, set: u32) -> &[u64] {
        &self.words[set as usize * self.stride..][..self.stride]
    }

    /// The set of one rank.
    pub fn single(&mut self, rank: usize) -> u32 {
        let start = self.words.len();
        self.words.resize(start + self.stride, 0);
        self.words[start + rank / 64] = 1 << (rank % 64);
        self.lens.push(1);
        self.lens.len() as u32 - 1
    }

    /// The union of two sets, or nothing if they have a rank in common.
    pub fn union(&mut self, a: u32, b: u32) -> Option<u32> {
        if let Some(&known) = self.unions.get(&(a, b)) {
            return Some(known);
        }
        if self.get(a).iter().zip(self.get(b)).any(|(left, right)| left & right != 0) {
            return None;
        }
        let (left, right) = (a as usize * self.stride, b as usize * self.stride);
        for word in 0..self.stride {
            self.words.push(self.words[left + word] | self.words[right + word]);
        }
        self.lens.push(self.lens[a as usize] + self.lens[b as usize]);
        let set = self.lens.len() as u32 - 1;
        self.unions.insert((a, b), set);
        Some(set)
    }

    /// The first rank that is in both.
    pub fn common(&self, a: u32, b: u32) -> usize {
        let mut both = self.get(a).iter().zip(self.get(b)).map(|(left, right)| left & right).enumerate();
        both.find(|(_, word)| *word != 0).map_or(0, |(at, word)| at * 64 + word.trailing_zeros() as usize)
    }

    /// How many ranks are in a set.
    pub fn len(&self, set: u32) -> usize {
        self.lens[set as usize] as usize
    }

    /// The lowest rank of a set.
    pub fn lowest(&self, set: u32) -> usize {
        let bits = self.get(set).iter().enumerate().find(|(_, word)| **word != 0);
        bits.map_or(0, |(at, word)| at * 64 + word.trailing_zeros() as usize)
    }

    /// A set in words.
    pub fn describe(&self, set: u32) -> String {
        let bits = self.get(set);
        let has = |rank: &usize| bits[rank / 64] >> (rank % 64) & 1 == 1;
        let ranks: Vec<usize> = (0..bits.len() * 64).filter(has).take(9).collect();
        match ranks.as_slice() {
            [rank] => format!("rank {rank}"),
            _ if ranks.len() > 8 => format!("{} ranks", self.lens[set as usize]),
            _ => format!("ranks {}", ranks.iter().map(usize::to_string).collect::<Vec<_>>().join("+")),
        }
    }
}
