//! How a block is cut into chunks of different sizes: by how much each is to have of it.
#![forbid(unsafe_code)]

/// What each chunk of a block has of it, in parts of their sum.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ChunkWeights {
    /// The parts before each chunk, and all of them at the end.
    before: Vec<u32>,
}

impl ChunkWeights {
    /// Chunks of so many parts each; none where they have none together, or more than are counted.
    pub fn new(parts: &[u32]) -> Option<ChunkWeights> {
        let mut before = Vec::with_capacity(parts.len() + 1);
        let mut sum = 0u32;
        before.push(0);
        for &part in parts {
            sum = sum.checked_add(part)?;
            before.push(sum);
        }
        (sum > 0).then_some(ChunkWeights { before })
    }

    /// The chunks of a block.
    pub fn chunks(&self) -> usize {
        self.before.len() - 1
    }

    /// The parts of each chunk.
    pub fn parts(&self) -> impl Iterator<Item = u32> + '_ {
        self.before.windows(2).map(|pair| pair[1] - pair[0])
    }

    /// Where a chunk begins in `elems` elements of a block, at a multiple of `align` of them; the end for the number of chunks.
    pub fn start(&self, chunk: usize, elems: usize, align: usize) -> usize {
        let (before, all) = (self.before[chunk], self.before[self.chunks()]);
        if before == all {
            return elems;
        }
        let at = (elems as u128 * u128::from(before) / u128::from(all)) as usize;
        at - at % align
    }

    /// Elements that no chunk of so many elements of a block exceeds.
    pub fn longest(&self, elems: usize, align: usize) -> usize {
        let (most, all) = (self.parts().max().unwrap_or(0), self.before[self.chunks()]);
        let longest = (elems as u128 * u128::from(most)).div_ceil(u128::from(all)) as usize;
        (longest + align).next_multiple_of(align).min(elems.next_multiple_of(align))
    }

    /// How many times an equal share the largest chunk has, at least 1.
    pub fn largest_by_equal(&self) -> usize {
        let (most, all) = (u64::from(self.parts().max().unwrap_or(0)), u64::from(self.before[self.chunks()]));
        (most * self.chunks() as u64).div_ceil(all).max(1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_have_what_their_parts_say() {
        let weights = ChunkWeights::new(&[1, 0, 2, 1]).unwrap();
        let starts: Vec<usize> = (0..=4).map(|chunk| weights.start(chunk, 400, 1)).collect();
        assert_eq!(starts, [0, 100, 100, 300, 400]);
        assert_eq!(weights.largest_by_equal(), 2);
        assert_eq!(ChunkWeights::new(&[0, 0]), None);
        assert_eq!(ChunkWeights::new(&[u32::MAX, 1]), None);
    }

    proptest! {
        #[test]
        fn chunks_cover_a_block_and_none_exceeds_the_longest(
            parts in proptest::collection::vec(0u32..1000, 1..40), elems in 0usize..100_000, align in 1usize..64
        ) {
            if let Some(weights) = ChunkWeights::new(&parts) {
                let starts: Vec<usize> = (0..=parts.len()).map(|chunk| weights.start(chunk, elems, align)).collect();
                prop_assert_eq!((starts[0], starts[parts.len()]), (0, elems));
                for pair in starts.windows(2) {
                    prop_assert!(pair[0] <= pair[1] && pair[1] - pair[0] <= weights.longest(elems, align));
                    prop_assert!(pair[0] % align == 0 || pair[0] == elems);
                }
            }
        }
    }
}
