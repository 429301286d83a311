//! Shapes of trees: in-order binary trees, and pairs of them in which hardly anybody has children in both.
//!
//! In an in-order tree of places `1..=p` everything left of a place is smaller and everything right of it larger, so a reduction
//! that takes the left subtree, the place and the right subtree in this order is one in the order of places. Odd places are leaves,
//! and the depth is `floor(log2 p)`. The second tree of a pair exchanges places `2i-1` and `2i`, and for odd `p` moves
//! all by one: for even `p` nobody has children in both, for odd `p` one rank is a leaf of both.
//! Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, section 2.
//!
//! ```text
//! first tree, p = 6          second
//!         4                       3              rank i is place i + 1 of the first
//!       /   \                   /   \
//!      2     6                 1     5
//!     / \   /                 / \   /
//!    1   3 5                 2   4 6
//! ```
#![forbid(unsafe_code)]

use crate::topo::Rank;

/// A rank's neighbours in one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeNode {
    /// Nobody for the root.
    pub parent: Option<Rank>,
    /// The root of what comes before it.
    pub left: Option<Rank>,
    /// The root of what comes behind it.
    pub right: Option<Rank>,
}

/// The place of the root of the in-order tree of `places`.
pub fn root_place(places: usize) -> usize {
    1 << places.ilog2()
}

/// How many edges lie between the root and the place that is furthest from it.
pub fn depth(places: usize) -> usize {
    places.ilog2() as usize
}

/// The places beside a place in the in-order tree: its parent, and the roots of what lies left and right of it.
fn beside(place: usize, places: usize) -> [Option<usize>; 3] {
    let reach = 1 << place.trailing_zeros();
    let parent = (place != root_place(places)).then(|| {
        // Upwards through places that are beyond the last.
        let mut reach = reach;
        let mut parent = place;
        loop {
            parent = if parent & (2 * reach) == 0 { parent + reach } else { parent - reach };
            if parent <= places {
                return parent;
            }
            reach *= 2;
        }
    });
    let left = (reach > 1).then(|| place - reach / 2);
    let right = (place < places && reach > 1).then(|| {
        let mut reach = reach / 2;
        while place + reach > places {
            reach /= 2;
        }
        place + reach
    });
    [parent, left, right]
}

/// Which of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Places in the order of ranks.
    First,
    /// With leaves where the first has none.
    Second,
}

/// The place of the `index`-th of so many in a tree of the pair.
fn place(which: Which, index: usize, places: usize) -> usize {
    match which {
        Which::First => index + 1,
        Which::Second if places.is_multiple_of(2) => (index ^ 1) + 1,
        Which::Second => (index + 1) % places + 1,
    }
}

/// The index of who is at a place.
fn index(which: Which, place: usize, places: usize) -> usize {
    match which {
        Which::First => place - 1,
        Which::Second if places.is_multiple_of(2) => (place - 1) ^ 1,
        Which::Second => (place + places - 2) % places,
    }
}

/// Who is beside a rank in a tree of all ranks, in their order.
pub fn of_all(which: Which, nranks: usize, rank: Rank) -> TreeNode {
    let at = |place: usize| Rank::from_index(index(which, place, nranks));
    let [parent, left, right] = beside(place(which, rank.index(), nranks), nranks).map(|place| place.map(at));
    TreeNode { parent, left, right }
}

/// The same in a tree with this root: turned in a circle.
pub fn of_all_from(nranks: usize, rank: Rank, root: Rank) -> TreeNode {
    // The rank that takes the place of the root's.
    let shift = (root.index() + nranks + 1 - root_place(nranks)) % nranks;
    let to = |rank: Rank| Rank::from_index((rank.index() + nranks - shift) % nranks);
    let from = |rank: Rank| Rank::from_index((rank.index() + shift) % nranks);
    let TreeNode { parent, left, right } = of_all(Which::First, nranks, to(rank));
    TreeNode { parent: parent.map(from), left: left.map(from), right: right.map(from) }
}

/// The same in a tree of the pair whose root stands above a tree of the others, which are in a circle from the next one on.
pub fn below(which: Which, nranks: usize, rank: Rank, root: Rank) -> TreeNode {
    let others = nranks - 1;
    let who = |place: usize| Rank::from_index((root.index() + 1 + index(which, place, others)) % nranks);
    let first = who(root_place(others));
    if rank == root {
        return TreeNode { parent: None, left: None, right: Some(first) };
    }
    let at = place(which, (rank.index() + nranks - root.index() - 1) % nranks, others);
    let [parent, left, right] = beside(at, others).map(|place| place.map(who));
    TreeNode { parent: parent.or(Some(root)), left, right }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that it is one tree, whose ranks in order are these; its depth.
    fn check(root: Rank, node: &dyn Fn(Rank) -> TreeNode, order: &[Rank]) -> usize {
        fn walk(at: Rank, node: &dyn Fn(Rank) -> TreeNode, order: &mut Vec<Rank>) -> usize {
            let TreeNode { left, right, .. } = node(at);
            let below = |child: Option<Rank>, order: &mut Vec<Rank>| {
                child.map_or(0, |child| {
                    assert_eq!(node(child).parent, Some(at));
                    1 + walk(child, node, order)
                })
            };
            let before = below(left, order);
            order.push(at);
            before.max(below(right, order))
        }
        assert_eq!(node(root).parent, None);
        let mut found = Vec::new();
        let depth = walk(root, node, &mut found);
        assert_eq!(found, order);
        depth
    }

    fn inner(node: &dyn Fn(Rank) -> TreeNode, p: usize) -> Vec<bool> {
        (0..p).map(|rank| node(Rank::from_index(rank)).left.or(node(Rank::from_index(rank)).right).is_some()).collect()
    }

    #[test]
    fn both_trees_have_all_ranks_in_order_and_hardly_anybody_has_children_in_both() {
        for p in 1..=130 {
            let trees = [Which::First, Which::Second].map(|which| move |rank| of_all(which, p, rank));
            for (which, tree) in [Which::First, Which::Second].into_iter().zip(&trees) {
                let order: Vec<Rank> = (1..=p).map(|place| Rank::from_index(index(which, place, p))).collect();
                let root = Rank::from_index(index(which, root_place(p), p));
                assert_eq!(check(root, tree, &order), depth(p), "{p}");
            }
            if p > 1 {
                let both = inner(&trees[0], p).iter().zip(inner(&trees[1], p)).filter(|(a, b)| **a && *b).count();
                assert_eq!(both, 0, "{p} ranks");
            }
        }
    }

    #[test]
    fn any_rank_is_the_root_of_a_tree_and_of_a_pair() {
        for p in 2..=40 {
            for root in (0..p).map(Rank::from_index) {
                let circle = |from: usize, len: usize| (0..len).map(move |at| Rank::from_index((from + at) % p));
                let one = |rank| of_all_from(p, rank, root);
                let first = (root.index() + p + 1 - root_place(p)) % p;
                assert_eq!(check(root, &one, &circle(first, p).collect::<Vec<_>>()), depth(p));
                let pair = [Which::First, Which::Second].map(|which| move |rank| below(which, p, rank, root));
                for (which, tree) in [Which::First, Which::Second].into_iter().zip(&pair) {
                    let others: Vec<Rank> = circle(root.index() + 1, p - 1).collect();
                    let order: Vec<Rank> =
                        std::iter::once(root).chain((1..p).map(|place| others[index(which, place, p - 1)])).collect();
                    assert_eq!(check(root, tree, &order), depth(p - 1) + 1, "{p}, root {root}");
                }
                let both = inner(&pair[0], p).iter().zip(inner(&pair[1], p)).filter(|(a, b)| **a && *b).count();
                assert_eq!(both, 1, "the root");
            }
        }
    }
}
