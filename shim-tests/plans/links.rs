//! Plans on nodes whose ranks are not each linked with each: proved, on links only, and their mutants rejected.

use crate::plans::{kill_all, plans, prove};
use std::sync::Arc;
use strata::algorithms::{self, Choice};
use strata::plan::{Action, Collective, Plan, Shape};
use strata::sim::{Cluster, Random};
use strata::topo::links::NodeLinks;
use strata::topo::{Grid, Rank};
use strata::verify::Options;

fn on(links: NodeLinks, nodes: usize) -> Arc<Grid> {
    let nranks = links.nranks();
    Arc::new(Grid::blocks(&vec![nranks; nodes]).with_links(&Arc::new(links)))
}

fn dgx1() -> NodeLinks {
    NodeLinks::clone(Cluster::find("dgx-1").unwrap().links.as_ref().unwrap())
}

/// Links by chance that join all ranks: a tree, and some more.
fn random(chance: &mut Random, nranks: usize) -> NodeLinks {
    let mut pairs: Vec<([usize; 2], usize)> = Vec::new();
    for rank in 1..nranks {
        pairs.push(([chance.below(rank as u64) as usize, rank], 1 + chance.below(2) as usize));
    }
    for _ in 0..chance.below(nranks as u64) {
        let [one, other] = [(); 2].map(|()| chance.below(nranks as u64) as usize);
        let is_there = |&([a, b], _): &([usize; 2], usize)| (a, b) == (one, other) || (b, a) == (one, other);
        if one != other && !pairs.iter().any(is_there) {
            pairs.push(([one, other], 1));
        }
    }
    NodeLinks::new(nranks, &pairs).unwrap()
}

fn prove_all(grid: &Arc<Grid>, roots: &[usize]) -> usize {
    let options = [Options { capacity: 1, vectored: false }];
    let proved: usize = Collective::ALL.into_iter().map(|collective| prove(collective, grid, roots, &options)).sum();
    for collective in Collective::ALL {
        for choice in algorithms::choices(collective, grid) {
            if !algorithms::is_on_board(&choice) && !choice.to_string().contains("script:") {
                plans(&choice, &Shape::new(collective, grid.clone())).iter().for_each(check_links);
            }
        }
    }
    proved
}

/// Messages are between ranks that are linked.
fn check_links(plan: &Plan) {
    for step in plan.lanes.iter().flat_map(|lane| &lane.steps) {
        if let Action::Send { to, .. } = &step.action {
            assert!(plan.shape.grid.is_direct(plan.rank, *to), "{}: {} sends to {to}", plan.algorithm, plan.rank);
        }
    }
}

#[test]
fn every_algorithm_is_proved_on_the_links_of_a_dgx_1() {
    println!("{} plans proved", prove_all(&on(dgx1(), 1), &[0, 3, 5]));
}

#[test]
fn every_algorithm_is_proved_on_two_nodes_with_links() {
    println!("{} plans proved", prove_all(&on(dgx1(), 2), &[11]));
}

#[test]
fn every_algorithm_is_proved_on_links_by_chance() {
    let mut chance = Random::new(11);
    let mut proved = 0;
    for nranks in [2, 3, 4, 5, 6, 7, 9, 12, 16] {
        for _ in 0..2 {
            proved += prove_all(&on(random(&mut chance, nranks), 1), &[nranks / 2]);
        }
    }
    println!("{proved} plans proved");
}

#[test]
fn two_trees_take_the_ways_of_figure_10_on_a_dgx_1() {
    let shape = Shape::new(Collective::AllReduce, on(dgx1(), 1));
    let relays = |rank: u32| {
        let plan = algorithms::build(&Choice::flat("two_trees"), &shape, Rank(rank)).unwrap();
        let passes_on = |steps: &[strata::plan::Step]| match steps {
            [first, second] => match (&first.action, &second.action) {
                (Action::Recv { from, dst, .. }, Action::Send { to, src, .. })
                    if dst == src && dst[0].buffer == strata::plan::Buffer::Scratch =>
                {
                    Some((from.0, to.0))
                }
                _ => None,
            },
            _ => None,
        };
        let mut found: Vec<(u32, u32)> = plan.lanes.iter().filter_map(|lane| passes_on(&lane.steps)).collect();
        found.sort_unstable();
        found
    };
    assert_eq!(relays(0), [(2, 4), (4, 2)]);
    assert_eq!(relays(1), [(3, 5), (5, 3)]);
    assert!([2, 3, 4, 5, 6, 7].into_iter().all(|rank| relays(rank).is_empty()));
}

#[test]
fn mutants_of_plans_on_links_are_rejected_or_as_good() {
    let path = NodeLinks::new(4, &[([0, 1], 1), ([1, 2], 1), ([2, 3], 1)]).unwrap();
    let square = NodeLinks::new(4, &[([0, 1], 2), ([1, 2], 1), ([2, 3], 2), ([0, 3], 1)]).unwrap();
    let mut cases = Vec::new();
    for grid in [on(path, 1), on(square, 1)] {
        for collective in [Collective::AllReduce, Collective::Broadcast, Collective::Reduce] {
            for name in ["one_tree", "two_trees", "link_trees", "ring"] {
                cases.push((Choice::flat(name), Shape::new(collective, grid.clone())));
            }
        }
    }
    cases.retain(|(choice, shape)| algorithms::supports(choice, shape));
    println!("{}", kill_all(&cases));
}

#[test]
fn ranks_that_no_links_join_keep_their_messages() {
    let links = NodeLinks::new(4, &[([0, 1], 1), ([2, 3], 1)]).unwrap();
    let grid = on(links, 1);
    prove(Collective::AllReduce, &grid, &[0], &[Options { capacity: 1, vectored: false }]);
    assert!(!algorithms::supports(&Choice::flat("link_trees"), &Shape::new(Collective::AllReduce, grid)));
}
