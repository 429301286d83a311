//! The grids that algorithms are proved for, and how a grid is written on the command line.
#![forbid(unsafe_code)]

use std::sync::Arc;
use strata::topo::Grid;

/// More ranks than can be proved in a sitting: the steps of all of them are held in memory.
pub const MOST_PROVED: usize = 4096;

/// Consecutive ranks on nodes as even as possible.
pub fn even(nranks: usize, nodes: usize) -> Grid {
    let sizes: Vec<usize> = (0..nodes).map(|node| nranks / nodes + usize::from(node < nranks % nodes)).collect();
    Grid::blocks(&sizes)
}

/// A grid from `2x4` (nodes x ranks), `3,1,4` (ranks of each node), `8` (one node) or `rr:8/3` (8 ranks dealt out to 3
/// nodes).
pub fn parse_grid(text: &str) -> Result<Grid, String> {
    let number = |part: &str| match part.trim().parse::<usize>() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("`{text}` is not a shape such as 2x4, 3,1,4 or rr:8/3")),
    };
    let room = |ranks: Option<usize>| match ranks {
        Some(ranks) if ranks <= MOST_PROVED => Ok(ranks),
        _ => Err(format!("`{text}` has more than {MOST_PROVED} ranks")),
    };
    if let Some((ranks, nodes)) = text.strip_prefix("rr:").and_then(|rest| rest.split_once('/')) {
        let (ranks, nodes) = (room(Some(number(ranks)?))?, number(nodes)?);
        return if nodes <= ranks { Ok(Grid::round_robin(ranks, nodes)) } else { Err("more nodes than ranks".into()) };
    }
    if let Some((nodes, ranks)) = text.split_once('x') {
        let (nodes, ranks) = (number(nodes)?, number(ranks)?);
        room(nodes.checked_mul(ranks))?;
        return Ok(Grid::blocks(&vec![ranks; nodes]));
    }
    let sizes = text.split(',').map(number).collect::<Result<Vec<_>, _>>()?;
    room(sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size)))?;
    Ok(Grid::blocks(&sizes))
}

/// Every number of ranks up to `max_ranks`: on one node, on two and three nodes in blocks and dealt out, one per node;
/// and some uneven ones.
pub fn standard(max_ranks: usize) -> Vec<Arc<Grid>> {
    let mut grids = Vec::new();
    let mut add = |grid: Grid| {
        if grid.nranks() <= max_ranks && !grids.contains(&grid) {
            grids.push(grid);
        }
    };
    for nranks in 1..=max_ranks {
        add(Grid::flat(nranks));
        for nodes in [2, 3, nranks / 2, nranks].into_iter().filter(|nodes| (1..=nranks).contains(nodes)) {
            add(even(nranks, nodes));
            add(Grid::round_robin(nranks, nodes));
        }
    }
    for sizes in [&[3, 1, 4][..], &[1, 5], &[4, 4, 1], &[2, 7, 3], &[1, 1, 8], &[6, 1, 1, 1]] {
        add(Grid::blocks(sizes));
    }
    grids.into_iter().map(Arc::new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_as_written() {
        assert_eq!(parse_grid("2x4"), Ok(Grid::blocks(&[4, 4])));
        assert_eq!(parse_grid("3,1,4"), Ok(Grid::blocks(&[3, 1, 4])));
        assert_eq!(parse_grid("rr:5/2"), Ok(Grid::round_robin(5, 2)));
        assert_eq!(parse_grid("8"), Ok(Grid::flat(8)));
        for text in
            ["", "0x4", "rr:2/3", "2x", "a", "65536x65536", "-1", "4000,97", "rr:5000/2", "18446744073709551615,2"]
        {
            assert!(parse_grid(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_number_of_ranks_is_among_the_standard_grids_once_per_shape() {
        let grids = standard(9);
        for nranks in 1..=9 {
            assert!(grids.iter().any(|grid| grid.nranks() == nranks && grid.nnodes() == 1));
            assert!(nranks == 1 || grids.iter().any(|grid| grid.nranks() == nranks && grid.nnodes() == 2));
        }
        for (index, grid) in grids.iter().enumerate() {
            assert!(!grids[..index].contains(grid));
        }
    }
}
