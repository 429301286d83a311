//! What overlap, trees on links and fronts gain, by the executor under a virtual clock.

use std::sync::Arc;
use strata::algorithms::Choice;
use strata::carrier::Carrier;
use strata::dtype::DataType;
use strata::exec::Program;
use strata::plan::{Collective, Shape};
use strata::sim::price::{grid_of, price, Detail, How, Price, PricedPlan};
use strata::sim::{Cluster, Job, Sim, SimOptions, Uniform};
use strata::topo::{Grid, Rank};

const MB: usize = 1 << 20;

fn cost(
    machine: &Arc<Cluster>,
    nranks: usize,
    collective: Collective,
    bytes: usize,
    (name, segment, window): (&str, usize, usize),
) -> Price {
    let route = PricedPlan { choice: Choice::flat(name), segment_bytes: segment, window, carrier: Carrier::MPI };
    price(machine, &grid_of(machine, nranks), collective, bytes, &How::Strata(route), Detail::default()).unwrap()
}

fn dgx1() -> Arc<Cluster> {
    Arc::new(Cluster::find("dgx-1").unwrap())
}

/// An all-reduce, and the same in two phases: ms.
fn overlapped_and_apart(name: &str, bytes: usize) -> (f64, f64) {
    let way = (name, bytes.isqrt() * 128, 8);
    let ms = |collective| cost(&dgx1(), 8, collective, bytes, way).ns / 1e6;
    (ms(Collective::AllReduce), ms(Collective::Reduce) + ms(Collective::Broadcast))
}

/// Figure 5: 4 ranks and 4 chunks.
#[test]
fn overlap_takes_seven_steps_where_two_phases_take_ten() {
    // The tree of an all-reduce among 4 ranks has rank 3 above all.
    let grid = Arc::new(Grid::flat(4));
    let steps = |collective| {
        let shape = Shape { root: Rank(3), ..Shape::new(collective, grid.clone()) };
        let plan = |rank| strata::algorithms::build(&Choice::flat("one_tree"), &shape, Rank(rank)).unwrap();
        let programs: Vec<_> = (0..4).map(|rank| Arc::new(Program::new(plan(rank)).unwrap())).collect();
        let job = Job {
            count: 4 * 1024,
            blocks: None,
            dtype: DataType::F32,
            segment_bytes: 4096,
            inputs: None,
            weights: None,
        };
        let options = SimOptions { window: 8, capacity: 1, ..SimOptions::default() };
        // A message takes a step, and the next of its stream comes behind it.
        let clock = Uniform { alpha_ns: 1, beta_ps: 0 };
        Sim::with_durations(1, options, clock).run(&programs, &job).unwrap().last_ns()
    };
    assert_eq!(steps(Collective::AllReduce), 7);
    assert_eq!(steps(Collective::Reduce) + steps(Collective::Broadcast), 10);
}

/// Figure 12.
#[test]
fn overlap_nearly_doubles_the_rate_on_a_dgx_1() {
    for name in ["two_trees", "link_trees"] {
        for (bytes, least) in [(64 * MB, 1.7), (256 * MB, 1.8)] {
            let (overlapped, apart) = overlapped_and_apart(name, bytes);
            assert!(apart / overlapped >= least, "{name}, {bytes} bytes: {:.2}", apart / overlapped);
        }
    }
}

#[test]
fn trees_on_links_are_faster_than_trees_with_detours() {
    let (links, _) = overlapped_and_apart("link_trees", 256 * MB);
    let (two, apart) = overlapped_and_apart("two_trees", 256 * MB);
    assert!(two / links >= 1.45 && apart / links >= 2.7, "{two:.3} and {apart:.3} ms, on links {links:.3}");
    let gbps = 256.0 * MB as f64 / links / 1e6;
    assert!(gbps >= 62.0, "{gbps:.1} GB/s");
}

/// Figure 14a.
#[test]
fn trees_win_over_the_ring_on_many_ranks() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/ccube/scale.toml");
    let machine = Arc::new(Cluster::find(file).unwrap());
    for (nranks, bytes, least) in [(256_usize, 16 << 10, 20.0), (256, MB, 9.0), (64, MB, 3.0)] {
        let depth = nranks.ilog2() as usize;
        let ring = cost(&machine, nranks, Collective::AllReduce, bytes, ("ring", usize::MAX, 1)).ns;
        let trees =
            cost(&machine, nranks, Collective::AllReduce, bytes, ("two_trees", (bytes / 10).max(8192), 2 * depth + 2))
                .ns;
        assert!(ring / trees >= least, "{nranks} ranks, {bytes} bytes: {:.2}", ring / trees);
    }
}

/// A node whose links are the edges of the tree of an all-reduce, and of one with rank 0 above all.
fn on_edges(nranks: usize) -> Arc<Cluster> {
    let shape = |root: u32| {
        let collective = if root == 0 { Collective::Reduce } else { Collective::AllReduce };
        Shape { root: Rank(0), ..Shape::new(collective, Arc::new(Grid::flat(nranks))) }
    };
    let mut edges: Vec<[u32; 2]> = Vec::new();
    for shape in [shape(0), shape(1)] {
        for rank in 0..nranks as u32 {
            let plan = strata::algorithms::build(&Choice::flat("one_tree"), &shape, Rank(rank)).unwrap();
            for step in plan.lanes.iter().flat_map(|lane| &lane.steps) {
                if let strata::plan::Action::Send { to, .. } = step.action {
                    edges.push([rank.min(to.0), rank.max(to.0)]);
                }
            }
        }
    }
    edges.sort_unstable();
    edges.dedup();
    let links: String =
        edges.iter().map(|[one, other]| format!("[[inside.links]]\nranks = [{one}, {other}]\n")).collect();
    let number = |value: &str| format!("{{ value = {value}, source = \"a link for each edge\" }}");
    let (one, none, much) = (number("1"), number("0"), number("1e6"));
    let text = format!(
        "name = \"edges\"\ntext = \"the edges of a tree\"\n[node]\nranks = {}\nnics = {one}\n\
         [network]\nnic_gbps = {one}\nlatency_us = {none}\neager_bytes = {much}\n\
         [inside]\nlatency_us = {none}\nrank_gbps = {much}\nlink_gbps = {one}\n{links}\
         [local]\nlaunch_us = {none}\ncopy_gbps = {much}\nreduce_gbps = {much}\n",
        number(&nranks.to_string())
    );
    Arc::new(Cluster::parse(&text, "edges").unwrap())
}

/// Figure 14b.
#[test]
fn the_first_piece_turns_around_when_it_has_gone_up_and_down() {
    for (nranks, pieces) in [(4_usize, 256_usize), (16, 64), (64, 256)] {
        let (machine, depth) = (on_edges(nranks), nranks.ilog2() as usize);
        let way = ("one_tree", 1 << 16, 2 * depth + 2);
        let cost = |collective| cost(&machine, nranks, collective, pieces << 16, way);
        let overlapped = cost(Collective::AllReduce).first_ns();
        let apart = cost(Collective::Reduce).ns + cost(Collective::Broadcast).first_ns();
        let by_steps = (2 * depth + pieces - 1) as f64 / (2 * depth) as f64;
        let found = apart / overlapped;
        assert!((found / by_steps - 1.0).abs() < 0.1, "{nranks} ranks: {found:.1}, by steps {by_steps:.1}");
    }
}

#[test]
fn bytes_are_final_in_the_order_of_their_places() {
    let cost = cost(&dgx1(), 8, Collective::AllReduce, 16 * MB, ("link_trees", MB, 8));
    assert_eq!(cost.front.len(), 16);
    assert!(cost.front.is_sorted() && cost.front.last() == Some(&(16 * MB, cost.ns)), "{:?}", cost.front);
    assert_eq!(cost.final_ns(3 * MB), cost.front[2].1);
    assert!(cost.first_ns() < 0.4 * cost.ns, "{} of {} ns", cost.first_ns(), cost.ns);
    let apart = self::cost(&dgx1(), 8, Collective::AllGather, 16 * MB, ("ring", MB, 4));
    assert_eq!((apart.front.len(), apart.first_ns()), (0, apart.ns), "no message of one block");
}
