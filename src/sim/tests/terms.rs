//! The optional terms of a machine: each changes what it speaks of, by the amount that it says, and can be left out.

use super::priced::{round, route};
use crate::plan::Collective;
use crate::script::store;
use crate::sim::price::{grid_of, price, Detail, How, Price};
use crate::sim::{Cluster, Resource};
use std::sync::Arc;

const BLOCK: f64 = (1 << 20) as f64;

/// A node of round numbers whose links take a byte in a ns and a message in 1 us.
fn node(ranks: usize, gap_us: f64, more: &str) -> Arc<Cluster> {
    let mut machine = Cluster::clone(&round(ranks, 1, more));
    machine.inside.rank_gbps.value = 1.0;
    machine.inside.latency_us.value = 1.0;
    machine.inside.gap_us.value = gap_us;
    Arc::new(machine)
}

fn on(machine: &Arc<Cluster>, ranks: usize, collective: Collective, bytes: usize, choice: &str) -> Price {
    let how = How::Strata(route(choice, usize::MAX, 1));
    price(
        machine,
        &grid_of(machine, ranks),
        collective,
        bytes,
        &how,
        Detail { fold: false, timeline: false, skew: None },
    )
    .unwrap()
}

fn without(machine: &Arc<Cluster>, term: &str) -> Arc<Cluster> {
    Arc::new(Cluster::clone(machine).without(term).unwrap())
}

fn number(name: &str, value: f64) -> String {
    format!("{name} = {{ value = {value}, source = 'round numbers for a test' }}\n")
}

/// An all-gather of two ranks in a protocol, each block in `parts` chunks over as many connections.
fn swap(parts: usize, protocol: &str) -> String {
    let mut text = format!(
        "<algo name='swap' proto='{protocol}' nchannels='{parts}' nchunksperloop='{}' ngpus='2' coll='allgather' inplace='0'>",
        2 * parts
    );
    for rank in 0..2 {
        text += &format!("<gpu id='{rank}' i_chunks='{parts}' o_chunks='{}' s_chunks='0'>", 2 * parts);
        for part in 0..parts {
            let (own, other) = (rank * parts + part, (1 - rank) * parts + part);
            let step = |index: usize, kind: &str, src: usize, dst: usize| {
                format!(
                    "<step s='{index}' type='{kind}' srcbuf='i' srcoff='{src}' dstbuf='o' dstoff='{dst}' cnt='1' \
                     depid='-1' deps='-1' hasdep='0'/>"
                )
            };
            text += &format!("<tb id='{part}' send='{0}' recv='{0}' chan='{part}'>", 1 - rank);
            text += &(step(0, "s", part, 0) + &step(1, "r", 0, other) + &step(2, "cpy", part, own));
            text += "</tb>";
        }
        text += "</gpu>";
    }
    let name = format!("swap-{parts}-{protocol}");
    store::load(&name, &(text + "</algo>"), None, store::Steps::AsWritten).unwrap().unique_name.clone()
}

fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 100.0, "{found} is not {wanted}");
}

#[test]
fn bytes_and_gaps_occupy_a_receivers_link_and_latency_does_not() {
    // Seven messages come to each rank at the same time.
    let time = |gap_us| on(&node(8, gap_us, ""), 8, Collective::AllGather, 8 << 20, "direct").ns;
    near(time(0.0), 7.0 * BLOCK + 1000.0);
    near(time(2.0), 7.0 * (BLOCK + 2000.0) + 1000.0);
    // Messages that wait for each other pay for latency each.
    let ring = on(&node(8, 0.0, ""), 8, Collective::AllGather, 8 << 20, "ring");
    near(ring.ns, 7.0 * (BLOCK + 1000.0));
}

#[test]
fn the_way_out_of_a_rank_is_shared_by_what_it_sends() {
    let machine = node(8, 0.0, &format!("[out]\n{}", number("rank_gbps", 0.5)));
    // The root sends seven blocks, and each receiver has a link of its own.
    let scatter = |machine: &Arc<Cluster>| on(machine, 8, Collective::Scatter, 1 << 20, "direct");
    let price = scatter(&machine);
    near(price.ns, 7.0 * 2.0 * BLOCK + 1000.0);
    assert_eq!(price.binding().unwrap().0, Resource::InsideOut);
    near(scatter(&without(&machine, "out")).ns, BLOCK + 1000.0);
}

#[test]
fn one_connection_does_not_fill_a_link_and_two_do() {
    let lanes =
        format!("[lanes]\n{}{}{}", number("inside_gbps", 0.5), number("network_gbps", 0.25), number("step_us", 3.0));
    let machine = node(2, 0.0, &lanes);
    let time = |machine: &Arc<Cluster>, parts| on(machine, 2, Collective::AllGather, 2 << 20, &swap(parts, "Simple"));
    let one = time(&machine, 1);
    near(one.ns, 2.0 * BLOCK + 3000.0 + 1000.0);
    assert_eq!(one.binding().unwrap().0, Resource::Connection);
    near(time(&machine, 2).ns, BLOCK + 3000.0 + 1000.0);
    let left_out = without(&machine, "lanes");
    near(time(&left_out, 1).ns, BLOCK + 1000.0);
    near(time(&left_out, 2).ns, BLOCK + 1000.0);
    // Between nodes a connection has a rate of its own, a quarter of the NIC's.
    let apart = round(1, 1, &lanes);
    near(time(&apart, 1).ns, 4.0 * BLOCK + 3000.0 + 1000.0);
    near(time(&apart, 2).ns, 2.0 * BLOCK + 3000.0 + 1000.0);
    near(time(&without(&apart, "lanes"), 1).ns, BLOCK + 1000.0);
}

#[test]
fn a_script_s_protocol_has_a_share_of_the_rate_and_a_latency_of_its_own() {
    let protocol = |name: &str, share, inside, network| {
        let numbers = [number("share", share), number("inside_us", inside), number("network_us", network)].concat();
        format!("[protocols.{name}]\n{numbers}")
    };
    let protocols =
        protocol("simple", 1.0, 5.0, 50.0) + &protocol("ll", 0.25, 0.5, 20.0) + &protocol("ll128", 0.5, 2.0, 30.0);
    let (inside, apart) = (node(2, 0.0, &protocols), round(1, 1, &protocols));
    let time = |machine: &Arc<Cluster>, choice: &str| on(machine, 2, Collective::AllGather, 2 << 20, choice).ns;
    for (name, share, inside_ns, network_ns) in
        [("Simple", 1.0, 5e3, 50e3), ("LL", 0.25, 500.0, 20e3), ("LL128", 0.5, 2e3, 30e3), ("Other", 1.0, 1e3, 1e3)]
    {
        let choice = swap(1, name);
        near(time(&inside, &choice), BLOCK / share + inside_ns);
        near(time(&apart, &choice), BLOCK / share + network_ns);
        near(time(&without(&inside, "protocols"), &choice), BLOCK + 1000.0);
    }
    near(time(&inside, "ring"), BLOCK + 1000.0);
}

#[test]
fn a_launch_costs_each_call_and_each_thread_block() {
    let launch = format!("[launch]\n{}{}", number("call_us", 7.0), number("lane_us", 2.0));
    let machine = node(2, 0.0, &launch);
    let time = |machine: &Arc<Cluster>, parts| on(machine, 2, Collective::AllGather, 2 << 20, &swap(parts, "LL")).ns;
    let left_out = without(&machine, "launch");
    for parts in [1, 4] {
        let more = time(&machine, parts) - time(&left_out, parts);
        near(more, 7000.0 + 2000.0 * parts as f64);
    }
}

#[test]
fn terms_out_of_range_are_refused_with_their_place() {
    for (section, wrong, said) in [
        ("out", number("rank_gbps", 0.0), "out.rank_gbps = 0"),
        ("launch", number("call_us", -1.0), "launch.call_us = -1"),
        ("lanes", number("inside_gbps", 1.0), "network_gbps"),
        ("protocols.ll", number("share", 2.0) + &number("inside_us", 1.0) + &number("network_us", 1.0), "simple"),
    ] {
        let text = include_str!("../../../machines/netns.toml");
        let error = Cluster::parse(&format!("{text}\n[{section}]\n{wrong}"), "mine.toml").unwrap_err();
        assert!(error.text().contains("mine.toml") && error.text().contains(said), "{section}: {error}");
    }
    let text = include_str!("../../../machines/ndv4.toml").replace("share = { value = 0.25", "share = { value = 2.5");
    let error = Cluster::parse(&text, "mine.toml").unwrap_err();
    assert!(error.text().contains("protocols.ll.share = 2.5"), "{error}");
}
