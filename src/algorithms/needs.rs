//! What an algorithm needs beside the caller's buffers, so that it is known without writing plans.
//!
//! All ranks cut a message into the same segments, and the segments of the rank that needs most have to find room. So each
//! algorithm declares an upper bound for all ranks of a shape, whichever way each holds its buffers. The bound is in blocks,
//! whatever the chunks are: a plan with `k` chunks per block has at most `k` times as many scratch chunks.
#![forbid(unsafe_code)]

use super::{by_name, detour, inner, Choice};
use crate::plan::{Collective, LinkLevel, Shape};
use crate::topo::Grid;
use std::sync::Arc;

/// What the rank that needs most has, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// Scratch memory.
    pub scratch: usize,
    /// The caller's blocks that are sent to ranks of the same node: in scratch, too, where messages leave from shared memory.
    pub sent: usize,
}

/// What the inner algorithm of a level needs for a collective of so many ranks.
pub type InnerNeeds<'a> = dyn Fn(LinkLevel, Collective, usize) -> Needs + 'a;

impl Needs {
    /// So many blocks of scratch, and so many that are sent.
    pub const fn new(scratch: usize, sent: usize) -> Needs {
        Needs { scratch, sent }
    }

    /// The larger of each.
    pub fn max(self, other: Needs) -> Needs {
        Needs { scratch: self.scratch.max(other.scratch), sent: self.sent.max(other.sent) }
    }
}

/// The most that any rank of this shape needs.
pub fn needs(choice: &Choice, shape: &Shape) -> Needs {
    let inner_needs = |level, collective, nranks: usize| {
        let mut part = Grid::flat(nranks);
        if let (LinkLevel::Node, Some(links)) = (level, shape.grid.links()) {
            part = part.with_links(links);
        }
        let part = Shape::new(collective, Arc::new(part));
        (inner(choice, level, &part).needs)(&part, &|_, _, _| Needs::default())
    };
    let needs = by_name(&choice.name).map_or(Needs::default(), |algorithm| (algorithm.needs)(shape, &inner_needs));
    Needs { scratch: needs.scratch + detour::relayed_blocks(choice, shape), ..needs }
}

/// The most ranks that a node has.
pub fn largest_node(shape: &Shape) -> usize {
    shape.grid.nrails()
}

/// As many blocks as there are ranks where the input is to be changed before it is sent, else so many.
pub fn all_or(shape: &Shape, otherwise: usize) -> usize {
    if shape.prologue {
        shape.nranks()
    } else {
        otherwise
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::{build, build_around_node, choices, coded_choices, is_leveled, supports};
    use crate::plan::stage::stage;
    use crate::plan::Buffer;
    use crate::topo::links::tests::dgx1;
    use crate::topo::Rank;

    /// The most that plans have: in chunks, with the chunks of a block.
    fn of_plans(choice: &Choice, collective: Collective, grid: &Arc<Grid>, prologue: bool) -> (usize, usize, usize) {
        let (mut scratch, mut sent, mut k) = (0, 0, 1);
        for rank in (0..grid.nranks()).map(Rank::from_index) {
            for in_place in [false, true] {
                for root in [0, grid.nranks() - 1].map(Rank::from_index) {
                    let shape = Shape { in_place, prologue, root, ..Shape::new(collective, grid.clone()) };
                    if in_place && !supports(choice, &shape) {
                        assert_eq!(collective, Collective::AllToAll);
                        continue;
                    }
                    let plan = build(choice, &shape, rank).unwrap();
                    let to_node = |to: Rank| grid.node(to) == grid.node(rank);
                    let staged = stage(&plan, &|to, src| to_node(to) && src.iter().any(|span| !span.buffer.is_own()));
                    k = plan.chunks_per_block as usize;
                    scratch = scratch.max(plan.chunks(Buffer::Scratch) + plan.chunks(Buffer::Coded));
                    sent = sent.max((staged.scratch_chunks - plan.scratch_chunks) as usize);
                    if is_leveled(choice) {
                        let around = build_around_node(choice, &shape, rank).unwrap();
                        scratch = scratch.max(around.scratch_chunks as usize);
                    }
                }
            }
        }
        (scratch, sent, k)
    }

    #[test]
    fn no_plan_needs_more_than_its_algorithm_declares_and_few_need_much_less() {
        let uneven = [vec![3, 1, 2], vec![1, 5, 5, 2], vec![1, 8], vec![2, 7], vec![1, 1, 3]];
        let even = [(1, 1), (1, 2), (1, 5), (1, 8), (1, 13), (4, 1), (5, 1), (2, 2), (2, 4), (4, 4), (3, 5), (8, 2)];
        let mut grids: Vec<Vec<usize>> = even.iter().map(|&(nodes, size)| vec![size; nodes]).collect();
        grids.extend(uneven);
        let (mut declared, mut needed) = (0, 0);
        let links = Arc::new(dgx1());
        let linked = [1, 2].map(|nodes| Grid::blocks(&vec![8; nodes]).with_links(&links));
        let grids = grids.iter().map(|sizes| Grid::blocks(sizes)).chain(linked);
        for grid in grids.map(Arc::new) {
            for collective in Collective::ALL {
                for choice in choices(collective, &grid).into_iter().chain(coded_choices(collective, &grid)) {
                    for prologue in [false, true].into_iter().take(1 + usize::from(collective.reduces())) {
                        let shape = Shape { prologue, ..Shape::new(collective, grid.clone()) };
                        let Needs { scratch, sent } = needs(&choice, &shape);
                        let (most_scratch, most_sent, k) = of_plans(&choice, collective, &grid, prologue);
                        let what = format!("{choice}, {} on {grid}, prologue {prologue}", collective.name());
                        assert!(most_scratch <= scratch * k, "{what}: scratch {most_scratch}/{k}, declared {scratch}");
                        assert!(most_sent <= sent * k, "{what}: sent {most_sent}/{k}, declared {sent}");
                        declared += scratch + sent;
                        needed += (most_scratch + most_sent).div_ceil(k);
                    }
                }
            }
        }
        // A bound of all blocks for everything would pass the above.
        assert!(declared < 2 * needed, "{declared} blocks declared where {needed} are needed");
    }
}
