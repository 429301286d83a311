//! Scripts as the levels of two-level algorithms: proved, priced, and refused where they serve nothing.

use std::sync::Arc;
use strata::algorithms::{self, levels, Choice};
use strata::carrier::Carrier;
use strata::plan::{Action, Collective, Plan, Shape};
use strata::script::store::{self, Steps};
use strata::script::{convert, write};
use strata::selection::cost::Model;
use strata::sim::price::{price, Detail, How, PricedPlan};
use strata::sim::Cluster;
use strata::topo::{Grid, Rank};
use strata::verify::{self, Options};

/// A library algorithm as a file; its name.
fn as_file(collective: Collective, algorithm: &str, nranks: usize, steps: Steps) -> String {
    let shape = Shape::new(collective, Arc::new(Grid::flat(nranks)));
    let choice = algorithm.parse().unwrap();
    let plan = |rank| algorithms::build(&choice, &shape, Rank::from_index(rank)).unwrap();
    let text = write(&convert(&(0..nranks).map(plan).collect::<Vec<_>>()).unwrap());
    let stem = format!("{algorithm}_{}_{nranks}_{steps:?}", collective.name());
    store::load(&stem, &text, None, steps).unwrap().unique_name.clone()
}

/// A file of `shim-tests/scripts`; its name.
fn file(stem: &str) -> String {
    let path = format!("{}/shim-tests/scripts/{stem}.xml", env!("CARGO_MANIFEST_DIR"));
    store::load_file(path.as_ref(), None, Steps::AsWritten).unwrap().unique_name.clone()
}

fn plans(choice: &Choice, shape: &Shape) -> Result<Vec<Plan>, String> {
    let plan = |rank| algorithms::build(choice, shape, Rank::from_index(rank));
    (0..shape.nranks()).map(plan).collect::<Result<_, _>>().map_err(|error| error.text().to_string())
}

#[test]
fn files_on_either_level_do_what_the_algorithm_around_them_says() {
    use Collective::{AllGather, AllReduce, Broadcast, ReduceScatter};
    let ring = as_file(ReduceScatter, "ring", 4, Steps::Merged);
    let tree = as_file(Broadcast, "tree", 4, Steps::Merged);
    let cases = [
        (AllGather, file("ag_pcie_4"), "log".to_string(), Grid::blocks(&[4; 3])),
        (AllGather, "direct".to_string(), file("ag_rd_8"), Grid::blocks(&[2; 8])),
        (AllGather, file("ag_pcie_4"), "ring".to_string(), Grid::blocks(&[4, 2, 4])),
        (ReduceScatter, ring.clone(), "log".to_string(), Grid::round_robin(8, 2)),
        (AllReduce, ring.clone(), file("ar_allpairs_4_simple"), Grid::blocks(&[4; 4])),
        (AllReduce, file("ag_pcie_4"), file("ar_ring_8_4ch_ll128"), Grid::blocks(&[4; 8])),
        (Broadcast, tree, "tree".to_string(), Grid::blocks(&[4; 2])),
    ];
    for (collective, node, rail, grid) in cases {
        let choice = Choice::leveled("two_level", &node, &rail);
        assert_eq!(choice.exact().parse::<Choice>().unwrap(), choice);
        for in_place in [false, true] {
            let shape = Shape { in_place, ..Shape::new(collective, Arc::new(grid.clone())) };
            let plans = plans(&choice, &shape).unwrap_or_else(|error| panic!("{choice}: {error}"));
            verify::verify(&plans, &Options { capacity: 8, vectored: false })
                .unwrap_or_else(|rejection| panic!("{choice} of {} on {grid}: {rejection:?}", collective.name()));
        }
    }
}

#[test]
fn a_file_s_chunks_and_channels_are_all_used_on_a_level() {
    // 16 chunks on 8 channels between 8 nodes: messages of each channel carry something.
    let choice = Choice::leveled("two_level", "direct", &file("ar_ring_8_4ch_ll128"));
    let shape = Shape::new(Collective::AllReduce, Arc::new(Grid::blocks(&[2; 8])));
    let plans = plans(&choice, &shape).unwrap();
    assert_eq!(plans[0].chunks_per_block % 16, 0, "{}", plans[0].chunks_per_block);
    let mut channels = Vec::new();
    for step in plans[0].lanes.iter().flat_map(|lane| &lane.steps) {
        match &step.action {
            Action::Send { to, channel, src } if shape.grid.node(*to) != shape.grid.node(Rank(0)) => {
                assert!(src.iter().all(|span| span.len > 0));
                channels.push(*channel);
            }
            _ => {}
        }
    }
    channels.sort_unstable();
    channels.dedup();
    assert_eq!(channels.len(), 8);
}

#[test]
fn a_file_that_serves_no_call_of_its_level_is_refused_with_what_is_called() {
    let refused = |collective, node: &str, rail: &str, grid: Grid| {
        let choice = Choice::leveled("two_level", node, rail);
        levels::check(&choice, &Shape::new(collective, Arc::new(grid))).unwrap_err().text().to_string()
    };
    let all_reduce = file("ar_allpairs_4_simple");
    assert_eq!(
        refused(Collective::AllReduce, &all_reduce, "log", Grid::blocks(&[4; 2])),
        "algorithm two_level(script:ar_allpairs_4_simple,log): script:ar_allpairs_4_simple is for all_reduce on 4 ranks, \
         and two_level calls reduce_scatter on 4 ranks and all_gather on 4 ranks inside nodes"
    );
    let said = refused(Collective::AllGather, &file("ag_pcie_4"), "log", Grid::blocks(&[8; 2]));
    assert!(
        said.ends_with("is for all_gather on 4 ranks, and two_level calls all_gather on 8 ranks inside nodes"),
        "{said}"
    );
    let said = refused(Collective::AllReduce, "direct", &all_reduce, Grid::blocks(&[4; 2]));
    assert!(said.ends_with("and two_level calls all_reduce on 2 ranks between nodes"), "{said}");
    // It is refused wherever plans are made of it, too.
    let shape = Shape::new(Collective::AllReduce, Arc::new(Grid::blocks(&[4; 2])));
    let choice = Choice::leveled("two_level", &all_reduce, "log");
    assert!(plans(&choice, &shape).unwrap_err().contains("inside nodes"));
}

/// What the simulator and the cost model say of a choice, in us.
fn prices(
    machine: &Arc<Cluster>,
    grid: &Arc<Grid>,
    collective: Collective,
    bytes: usize,
    choice: &Choice,
) -> (f64, f64) {
    let route = PricedPlan { choice: choice.clone(), segment_bytes: usize::MAX, window: 1, carrier: Carrier::MPI };
    let model = Model::new(machine, grid).choice_ns(collective, bytes, &route).unwrap();
    let simulated = price(machine, grid, collective, bytes, &How::Strata(route), Detail::default()).unwrap().ns;
    (simulated / 1e3, model / 1e3)
}

#[test]
fn an_algorithm_costs_the_same_on_a_level_whether_it_is_built_in_or_a_file() {
    let machine = Arc::new(Cluster::find("netns").unwrap());
    let grid = Arc::new(Grid::blocks(&[4; 4]));
    for (collective, algorithm) in [(Collective::AllGather, "ring"), (Collective::ReduceScatter, "ring")] {
        let name = as_file(collective, algorithm, 4, Steps::AsWritten);
        for (own, script) in [
            (Choice::leveled("two_level", algorithm, "log"), Choice::leveled("two_level", &name, "log")),
            (Choice::leveled("two_level", "direct", algorithm), Choice::leveled("two_level", "direct", &name)),
        ] {
            for bytes in [64 << 10, 16 << 20] {
                let ns = |choice| prices(&machine, &grid, collective, bytes, choice).0;
                let (own, script) = (ns(&own), ns(&script));
                assert!((own / script - 1.0).abs() < 0.1, "{} {bytes}: {own} {script}", collective.name());
            }
        }
    }
}

#[test]
fn a_file_on_a_level_costs_what_its_messages_do() {
    let machine = Arc::new(Cluster::find("perlmutter").unwrap());
    let grid = Arc::new(Grid::blocks(&[4; 8]));
    let (pcie, rd, pairs) = (file("ag_pcie_4"), file("ag_rd_8"), file("ag_allpairs_8"));
    let cost = |node: &str, rail: &str, bytes| {
        prices(&machine, &grid, Collective::AllGather, bytes, &Choice::leveled("two_level", node, rail))
    };
    // Inside the node the file takes the place of the vendor's library: its messages are on the links.
    assert_ne!(cost(&pcie, "log", 1 << 20).0, cost("direct", "log", 1 << 20).0);
    let mut lines = String::new();
    for (node, rail) in [(pcie.as_str(), "log"), (&pcie, "ring"), ("direct", &rd), ("direct", &pairs), (&pcie, &rd)] {
        for bytes in [256 << 10, 16 << 20, 1 << 30] {
            let (simulated, model) = cost(node, rail, bytes);
            lines += &format!("{node} {rail} {bytes}: {simulated:.1} {model:.1} {:.2}\n", model / simulated);
            assert!((0.5..2.0).contains(&(model / simulated)), "{lines}");
        }
    }
    println!("{lines}");
}
