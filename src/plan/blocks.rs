//! Blocks of different sizes: what a vectored call says of each, seen from one rank.
//!
//! A plan is the same whatever the sizes; [`Layout`](super::layout::Layout) asks here how long each block is and where it lies.
//! Scratch holds chunks of any block: its spans name the block by their place in the *row of blocks*
//! ([`Shape::row_block`](super::Shape::row_block)).
#![forbid(unsafe_code)]

use super::Collective;
use crate::error::{Error, Result};
use crate::topo::Rank;

/// One block of the caller's buffers, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Extent {
    /// How many.
    pub count: usize,
    /// Where it begins, counted from the buffer's start.
    pub at: usize,
}

impl Extent {
    /// Where it ends.
    fn end(self) -> usize {
        self.at + self.count
    }
}

/// The blocks of one rank's buffers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlockTable {
    /// Of the send buffer.
    input: Vec<Extent>,
    /// Of the receive buffer.
    output: Vec<Extent>,
    /// How many elements each block of the row has, as far as this rank knows; those that are not there it does not know.
    row: Vec<usize>,
    /// How many elements the blocks of others have that this rank hands on, by their slots of scratch; none where blocks go straight.
    handed: Option<Vec<usize>>,
    /// Elements of the longest block.
    longest: usize,
}

/// Blocks one after another.
pub fn packed(counts: &[usize]) -> Vec<Extent> {
    let place = |at: &mut usize, &count: &usize| {
        let extent = Extent { count, at: *at };
        *at += count;
        Some(extent)
    };
    counts.iter().scan(0, place).collect()
}

/// Blocks of these sizes at these places; packed where none are given. `name` is the list's, for errors.
///
/// # Errors
/// A block that ends beyond what memory can hold.
pub fn extents(counts: &[usize], places: Option<&[usize]>, elem_bytes: usize, name: &str) -> Result<Vec<Extent>> {
    let most = isize::MAX as usize / elem_bytes.max(1);
    let mut extents = Vec::with_capacity(counts.len());
    let mut next = 0usize;
    for (block, &count) in counts.iter().enumerate() {
        let at = places.map_or(next, |places| places[block]);
        let end = at.checked_add(count).filter(|&end| end <= most);
        let too_far = || {
            let text = format!("{name}: block {block} of {count} elements at {at} ends beyond what memory can hold");
            Error::InvalidArgument(text)
        };
        next = end.ok_or_else(too_far)?;
        extents.push(Extent { count, at });
    }
    Ok(extents)
}

/// Two blocks that have elements in common, if there are such.
pub fn overlapping(extents: &[Extent]) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..extents.len()).filter(|&block| extents[block].count > 0).collect();
    order.sort_unstable_by_key(|&block| extents[block].at);
    // The neighbour that reaches farthest so far: a long block may go over several after it.
    let mut far: Option<usize> = None;
    for block in order {
        match far {
            Some(before) if extents[before].end() > extents[block].at => {
                return Some((before.min(block), before.max(block)));
            }
            _ => far = Some(block),
        }
    }
    None
}

impl BlockTable {
    /// The blocks of `rank` in an all-gather, whose receive buffer has `blocks`; or in a reduce-scatter, whose send buffer
    /// has them. All ranks have the same sizes.
    pub fn of_all(collective: Collective, rank: Rank, blocks: Vec<Extent>) -> BlockTable {
        let row: Vec<usize> = blocks.iter().map(|block| block.count).collect();
        let own = vec![Extent { count: row[rank.index()], at: 0 }];
        match collective {
            Collective::ReduceScatter => BlockTable::new(blocks, own, row),
            _ => BlockTable::new(own, blocks, row),
        }
    }

    /// The blocks that a rank sends and those that it receives, where it knows no others.
    pub fn of_pairs(input: Vec<Extent>, output: Vec<Extent>) -> BlockTable {
        BlockTable::new(input, output, Vec::new())
    }

    /// The blocks of one rank, and all sizes of the row that it knows.
    pub fn new(input: Vec<Extent>, output: Vec<Extent>, row: Vec<usize>) -> BlockTable {
        let user = input.iter().chain(&output).map(|block| block.count);
        let longest = user.chain(row.iter().copied()).max().unwrap_or(0);
        BlockTable { input, output, row, handed: None, longest }
    }

    /// The blocks of the send buffer.
    pub fn input(&self) -> &[Extent] {
        &self.input
    }

    /// The blocks of the receive buffer.
    pub fn output(&self) -> &[Extent] {
        &self.output
    }

    /// The sizes of the row of blocks.
    pub fn row(&self) -> &[usize] {
        &self.row
    }

    /// The same where this rank hands on blocks of others, of which it has been told the sizes, by their slots of scratch.
    pub fn handing(&self, counts: Vec<usize>) -> BlockTable {
        let longest = counts.iter().copied().fold(self.longest, usize::max);
        BlockTable { handed: Some(counts), longest, ..self.clone() }
    }

    /// Whether ranks hand on blocks whose sizes they have been told.
    pub fn hands_on(&self) -> bool {
        self.handed.is_some()
    }

    /// Elements of what a slot of scratch holds, where that is block `block` of the row.
    pub fn held_count(&self, slot: usize, block: usize) -> usize {
        match &self.handed {
            Some(counts) => counts.get(slot).copied().unwrap_or(0),
            None => self.row_count(block),
        }
    }

    /// Whether this rank knows the sizes of all blocks.
    pub fn knows_all(&self) -> bool {
        !self.row.is_empty()
    }

    /// Elements of the longest block that this rank knows.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// The elements of all blocks of the input, and of the output.
    pub fn elements(&self) -> [usize; 2] {
        [&self.input, &self.output].map(|blocks| blocks.iter().map(|block| block.count).sum())
    }

    /// Elements of the send and of the receive buffer, from their start to the end of the block that ends last.
    pub fn spans(&self) -> (usize, usize) {
        let end = |blocks: &[Extent]| blocks.iter().filter(|block| block.count > 0).map(|block| block.end()).max();
        (end(&self.input).unwrap_or(0), end(&self.output).unwrap_or(0))
    }

    /// Elements of a block of the row.
    pub fn row_count(&self, block: usize) -> usize {
        self.row.get(block).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_have_elements_in_common_are_found_and_empty_ones_have_none() {
        let at = |places: &[(usize, usize)]| -> Vec<Extent> {
            places.iter().map(|&(at, count)| Extent { count, at }).collect()
        };
        assert_eq!(overlapping(&packed(&[3, 0, 5, 1])), None);
        assert_eq!(overlapping(&at(&[(0, 4), (2, 0), (4, 1)])), None);
        assert_eq!(overlapping(&at(&[(5, 2), (0, 6)])), Some((0, 1)));
        assert_eq!(overlapping(&at(&[(0, 9), (20, 1), (8, 1)])), Some((0, 2)));
        assert_eq!(overlapping(&at(&[(0, 9), (1, 1), (8, 1)])), Some((0, 1)));
    }

    #[test]
    fn elements_are_those_of_blocks_and_not_what_lies_between() {
        let apart = extents(&[2, 0, 3], Some(&[0, 7, 10]), 4, "displs").unwrap();
        let table = BlockTable::of_pairs(apart, packed(&[1]));
        assert_eq!((table.elements(), table.spans()), ([5, 1], (13, 1)));
    }

    #[test]
    fn blocks_beyond_memory_are_refused_whichever_way_they_get_there() {
        let most = isize::MAX as usize / 4;
        for (counts, places) in [
            (vec![most, 1], None),
            (vec![usize::MAX], None),
            (vec![1], Some(vec![most])),
            (vec![2], Some(vec![usize::MAX])),
        ] {
            let refused = extents(&counts, places.as_deref(), 4, "counts").unwrap_err();
            assert!(refused.code() == 4 && refused.text().contains("beyond what memory can hold"), "{refused}");
        }
        assert_eq!(extents(&[most], None, 4, "counts").unwrap(), packed(&[most]));
        let gaps = extents(&[1, 0, 2], Some(&[7, 0, 3]), 4, "counts").unwrap();
        assert_eq!(BlockTable::of_all(Collective::AllGather, Rank(2), gaps).spans(), (2, 8));
    }
}
