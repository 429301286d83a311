//! Trees on a node's links that share none of them: as many as there can be, and of small depth.
//!
//! How many trees of all ranks fit on links that each carries one of them is the number of spanning trees into which links can
//! be divided; Edmonds' partition of a matroid finds it (Roskind and Tarjan, 1985). A search for flatter ones follows, which is limited, and the
//! same on all ranks.
#![forbid(unsafe_code)]

use crate::topo::links::NodeLinks;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, Mutex};

/// More trees than this gain nothing: each is a chunk and a channel of its own.
const MOST_TREES: usize = 16;
/// Steps of the search for flat trees.
const SEARCH_STEPS: usize = 1_000_000;
/// Packings that are kept.
const KEPT: usize = 256;

/// A tree of all ranks of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkTree {
    /// For each rank the one above it; nobody for the root.
    pub parents: Vec<Option<usize>>,
}

impl LinkTree {
    /// How many links lie between the root and a rank.
    fn depth_of(&self, rank: usize) -> usize {
        std::iter::successors(self.parents[rank], |&above| self.parents[above]).count()
    }

    /// How many links lie between the root and the rank that is furthest from it.
    pub fn depth(&self) -> usize {
        (0..self.parents.len()).map(|rank| self.depth_of(rank)).max().unwrap_or(0)
    }
}

/// Trees, and the question they answer.
type Packings = FxHashMap<(NodeLinks, Option<usize>), Arc<Vec<LinkTree>>>;
static PACKINGS: LazyLock<Mutex<Packings>> = LazyLock::new(Mutex::default);

/// As many trees as fit on the links, each link carrying one; with this root, or roots of their own. None where not everybody is
/// linked.
pub fn trees(links: &NodeLinks, root: Option<usize>) -> Arc<Vec<LinkTree>> {
    let key = (links.clone(), root);
    if let Some(known) = crate::sync::locked(&PACKINGS).get(&key) {
        return known.clone();
    }
    let found = Arc::new(find(links, root));
    let mut packings = crate::sync::locked(&PACKINGS);
    if packings.len() >= KEPT {
        packings.clear();
    }
    packings.entry(key).or_insert(found).clone()
}

fn find(links: &NodeLinks, root: Option<usize>) -> Vec<LinkTree> {
    if links.nranks() < 2 || !links.is_connected() {
        return Vec::new();
    }
    let forests = most_forests(links);
    let deep: Vec<LinkTree> = forests.iter().map(|edges| rooted(edges, links.nranks(), root)).collect();
    let away = |from: usize| links.distances(from).into_iter().flatten().max().unwrap_or(0);
    let least = root.map_or_else(|| (0..links.nranks()).map(away).min().unwrap_or(0), away);
    let known = deep.iter().map(LinkTree::depth).max().unwrap_or(0);
    let mut search = Search::new(links, root, deep.len());
    (least..known).find_map(|depth| search.trees(depth)).unwrap_or(deep)
}

/// A tree of these edges with this root, or the one that makes it flattest.
fn rooted(edges: &[[usize; 2]], nranks: usize, root: Option<usize>) -> LinkTree {
    let from = |root: usize| {
        let mut parents = vec![None; nranks];
        let mut open = VecDeque::from([root]);
        while let Some(at) = open.pop_front() {
            for &[one, other] in edges {
                let next = if one == at { other } else { one };
                if (one == at || other == at) && next != root && parents[next].is_none() {
                    parents[next] = Some(at);
                    open.push_back(next);
                }
            }
        }
        LinkTree { parents }
    };
    match root {
        Some(root) => from(root),
        None => (0..nranks).map(from).min_by_key(LinkTree::depth).unwrap_or_else(|| from(0)),
    }
}

/// The links divided into as many spanning trees as there can be.
fn most_forests(links: &NodeLinks) -> Vec<Vec<[usize; 2]>> {
    let edges: Vec<[usize; 2]> = links.pairs().flat_map(|(pair, count)| std::iter::repeat_n(pair, count)).collect();
    let nranks = links.nranks();
    let mut count = (edges.len() / (nranks - 1)).min(MOST_TREES);
    loop {
        let mut partition = Partition { edges: &edges, nranks, forest_of: vec![None; edges.len()], count };
        for edge in 0..edges.len() {
            if partition.is_full() {
                break;
            }
            partition.add(edge);
        }
        let forests = partition.forests();
        if count <= 1 || forests.iter().all(|forest| forest.len() == nranks - 1) {
            return forests;
        }
        count -= 1;
    }
}

/// Edges divided into forests, as many as can be.
struct Partition<'a> {
    edges: &'a [[usize; 2]],
    nranks: usize,
    forest_of: Vec<Option<usize>>,
    count: usize,
}

impl Partition<'_> {
    fn forests(&self) -> Vec<Vec<[usize; 2]>> {
        let of = |forest: usize| {
            let mine = (0..self.edges.len()).filter(move |&edge| self.forest_of[edge] == Some(forest));
            mine.map(|edge| self.edges[edge]).collect()
        };
        (0..self.count).map(of).collect()
    }

    /// Whether each forest is a tree of all ranks.
    fn is_full(&self) -> bool {
        self.forest_of.iter().flatten().count() == self.count * (self.nranks - 1)
    }

    /// The edges of each forest at each rank.
    fn at_ranks(&self) -> Vec<Vec<Vec<usize>>> {
        let mut at = vec![vec![Vec::new(); self.nranks]; self.count];
        for (edge, forest) in self.forest_of.iter().enumerate() {
            if let Some(forest) = *forest {
                self.edges[edge].iter().for_each(|&rank| at[forest][rank].push(edge));
            }
        }
        at
    }

    /// Gives an edge to a forest, moving others on if it must be; nothing where no forest can be made longer by it.
    fn add(&mut self, edge: usize) {
        // For each edge that has been looked at the one in whose place another forest would take it.
        let mut before: Vec<Option<usize>> = vec![None; self.edges.len()];
        let at_ranks = self.at_ranks();
        let mut open = VecDeque::from([edge]);
        while let Some(at) = open.pop_front() {
            for forest in (0..self.count).filter(|&forest| self.forest_of[at] != Some(forest)) {
                let cycle = self.between(&at_ranks[forest], self.edges[at]);
                let Some(cycle) = cycle else { return self.shift(at, forest, &before) };
                for next in cycle {
                    if next != edge && before[next].is_none() {
                        before[next] = Some(at);
                        open.push_back(next);
                    }
                }
            }
        }
    }

    /// Takes the edge into a forest, and into its old one the edge in whose place it was, and so on.
    fn shift(&mut self, mut edge: usize, mut forest: usize, before: &[Option<usize>]) {
        loop {
            let old = self.forest_of[edge].replace(forest);
            let (Some(from), Some(old)) = (before[edge], old) else { return };
            (edge, forest) = (from, old);
        }
    }

    /// The edges of a forest, known by rank, between the two ends of an edge; None where they are not joined there.
    fn between(&self, at_ranks: &[Vec<usize>], [from, to]: [usize; 2]) -> Option<Vec<usize>> {
        let mut came: Vec<Option<usize>> = vec![None; self.nranks];
        let mut open = VecDeque::from([from]);
        let other = |edge: usize, at: usize| self.edges[edge][usize::from(self.edges[edge][0] == at)];
        while let Some(at) = open.pop_front() {
            for &edge in &at_ranks[at] {
                let next = other(edge, at);
                if next != from && came[next].is_none() {
                    came[next] = Some(edge);
                    open.push_back(next);
                }
            }
        }
        let mut path = Vec::new();
        let mut at = to;
        while at != from {
            let edge = came[at]?;
            path.push(edge);
            at = other(edge, at);
        }
        Some(path)
    }
}

/// A search for flat trees: they grow by one rank at a time, where there is the least choice, and by chance where there is some.
struct Search<'a> {
    links: &'a NodeLinks,
    root: Option<usize>,
    count: usize,
    chance: u64,
    steps: usize,
}

/// Trees that grow.
struct Growth {
    trees: Vec<LinkTree>,
    /// For each tree and rank how far it is from the root, once it is in.
    depths: Vec<Vec<Option<usize>>>,
    /// Links of each pair that carry no tree.
    free: Vec<Vec<usize>>,
}

impl<'a> Search<'a> {
    fn new(links: &'a NodeLinks, root: Option<usize>, count: usize) -> Search<'a> {
        Search { links, root, count, chance: 1, steps: SEARCH_STEPS }
    }

    fn below(&mut self, end: usize) -> usize {
        // Knuth's linear generator, whose upper bits are the better ones.
        self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.chance >> 33) as usize % end.max(1)
    }

    /// Trees of at most this depth, if some are found.
    fn trees(&mut self, depth: usize) -> Option<Vec<LinkTree>> {
        let share = self.steps / 4;
        let least = self.steps - share;
        while self.steps > least {
            if let Some(found) = self.grow(depth) {
                return Some(found);
            }
        }
        None
    }

    fn grow(&mut self, depth: usize) -> Option<Vec<LinkTree>> {
        let nranks = self.links.nranks();
        let mut growth = Growth {
            trees: vec![LinkTree { parents: vec![None; nranks] }; self.count],
            depths: vec![vec![None; nranks]; self.count],
            free: (0..nranks).map(|one| (0..nranks).map(|other| self.links.count(one, other)).collect()).collect(),
        };
        for depths in &mut growth.depths {
            let root = self.root.unwrap_or_else(|| self.below(nranks));
            depths[root] = Some(0);
        }
        for _ in 0..self.count * (nranks - 1) {
            let (tree, rank, parents) = self.tightest(&growth, depth)?;
            let parent = parents[self.below(parents.len())];
            growth.trees[tree].parents[rank] = Some(parent);
            growth.depths[tree][rank] = growth.depths[tree][parent].map(|depth| depth + 1);
            growth.free[rank][parent] -= 1;
            growth.free[parent][rank] -= 1;
        }
        Some(growth.trees)
    }

    /// The rank that has the fewest places in a tree that it is not in yet, and those places. None where a rank has none that can still
    /// come to have one.
    fn tightest(&mut self, growth: &Growth, depth: usize) -> Option<(usize, usize, Vec<usize>)> {
        let mut best: Option<(usize, usize, Vec<usize>)> = None;
        let first = self.below(self.links.nranks());
        for tree in 0..self.count {
            for rank in (0..self.links.nranks()).map(|at| (first + at) % self.links.nranks()) {
                if growth.depths[tree][rank].is_some() {
                    continue;
                }
                let linked = self.links.neighbours(rank);
                self.steps = self.steps.saturating_sub(linked.len() + 1);
                let can_be = |&&(at, _): &&(usize, usize)| {
                    growth.free[rank][at] > 0 && growth.depths[tree][at].is_some_and(|above| above < depth)
                };
                let places: Vec<usize> = linked.iter().filter(can_be).map(|&(at, _)| at).collect();
                if places.is_empty() {
                    continue;
                }
                if best.as_ref().is_none_or(|(_, _, known)| places.len() < known.len()) {
                    best = Some((tree, rank, places));
                }
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Random;
    use crate::topo::links::tests::dgx1;

    /// Checks that the trees are trees, and that no link carries two.
    fn check(links: &NodeLinks, trees: &[LinkTree]) {
        let mut used: FxHashMap<[usize; 2], usize> = FxHashMap::default();
        for tree in trees {
            assert_eq!(tree.parents.iter().filter(|parent| parent.is_none()).count(), 1);
            for (rank, parent) in tree.parents.iter().enumerate() {
                assert!(tree.depth_of(rank) < links.nranks(), "a circle");
                if let Some(parent) = *parent {
                    *used.entry([rank.min(parent), rank.max(parent)]).or_default() += 1;
                }
            }
        }
        for ([one, other], count) in used {
            assert!(count <= links.count(one, other), "{count} trees on the links of {one} and {other}");
        }
    }

    #[test]
    fn a_dgx_1_has_three_trees_of_depth_2_on_21_of_its_24_links() {
        let links = dgx1();
        let found = trees(&links, None);
        check(&links, &found);
        assert_eq!(found.len(), 3);
        assert!(found.iter().all(|tree| tree.depth() == 2), "{found:?}");
        for root in 0..8 {
            let found = trees(&links, Some(root));
            check(&links, &found);
            assert!(
                found.len() == 3 && found.iter().all(|tree| tree.parents[root].is_none() && tree.depth() <= 4),
                "{found:?}"
            );
        }
    }

    /// Nash-Williams' and Tutte's count, by all partitions of the ranks.
    fn most(links: &NodeLinks) -> usize {
        fn parts(links: &NodeLinks, at: usize, of: &mut Vec<usize>, count: usize, least: &mut usize) {
            if at == links.nranks() {
                let across = links.pairs().filter(|([one, other], _)| of[*one] != of[*other]).map(|(_, count)| count);
                if count > 1 {
                    *least = (*least).min(across.sum::<usize>() / (count - 1));
                }
                return;
            }
            for part in 0..=count {
                of.push(part);
                parts(links, at + 1, of, count.max(part + 1), least);
                of.pop();
            }
        }
        let mut least = usize::MAX;
        parts(links, 0, &mut Vec::new(), 0, &mut least);
        least
    }

    #[test]
    fn any_links_have_as_many_trees_as_there_can_be() {
        let mut chance = Random::new(7);
        for nranks in [2, 3, 4, 5, 6, 7, 7, 7] {
            for _ in 0..12 {
                let mut pairs: Vec<([usize; 2], usize)> = Vec::new();
                for one in 0..nranks {
                    for other in one + 1..nranks {
                        match chance.below(4) {
                            0 | 1 => {}
                            more => pairs.push(([one, other], more as usize)),
                        }
                    }
                }
                let links = NodeLinks::new(nranks, &pairs).unwrap();
                let found = trees(&links, None);
                check(&links, &found);
                assert_eq!(found.len(), most(&links), "{links:?}");
            }
        }
    }
}
