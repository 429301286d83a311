//! The times of machines: what shares a resource takes turns, what does not runs beside it.

use crate::algorithms::Choice;
use crate::carrier::Carrier;
use crate::plan::Collective;
use crate::sim::price::{grid_of, price, Detail, How, Price, PricedPlan};
use crate::sim::skew::Skew;
use crate::sim::{Cluster, Resource};
use std::sync::Arc;

/// A machine of round numbers: a byte takes a ns on a NIC, a message 1 us.
pub(super) fn round(ranks: usize, nics: usize, more: &str) -> Arc<Cluster> {
    let number = |value: f64| format!("{{ value = {value}, source = \"round numbers for a test\" }}");
    let text = format!(
        "name = 'round'\ntext = 'a test'\n[node]\nranks = {}\nnics = {}\n[network]\nnic_gbps = {}\nlatency_us = {}\n\
         [inside]\nlatency_us = {}\nrank_gbps = {}\n[local]\nlaunch_us = {}\ncopy_gbps = {}\nreduce_gbps = {}\n{more}",
        number(ranks as f64),
        number(nics as f64),
        number(1.0),
        number(1.0),
        number(0.0),
        number(1e9),
        number(0.0),
        number(1e9),
        number(1e9),
    );
    Arc::new(Cluster::parse(&text, "round.toml").unwrap())
}

fn strata(machine: &Arc<Cluster>, nranks: usize, collective: Collective, bytes: usize, route: PricedPlan) -> Price {
    let detail = Detail { fold: false, timeline: true, skew: None };
    price(machine, &grid_of(machine, nranks), collective, bytes, &How::Strata(route), detail).unwrap()
}

pub(super) fn route(choice: &str, segment_bytes: usize, window: usize) -> PricedPlan {
    PricedPlan { choice: choice.parse::<Choice>().unwrap(), segment_bytes, window, carrier: Carrier::MPI }
}

#[test]
fn ranks_that_share_a_nic_take_twice_as_long_as_ranks_with_nics_of_their_own() {
    let time =
        |nics| strata(&round(2, nics, ""), 4, Collective::AllGather, 4 << 20, route("two_level", usize::MAX, 1)).ns;
    // Each rank sends its block of 2^20 bytes to its peer on the other node, and passes on what it got.
    let block = f64::from(1 << 20);
    assert!((time(2) - (block + 1000.0)).abs() < 100.0, "{}", time(2));
    assert!((time(1) - (2.0 * block + 1000.0)).abs() < 100.0, "{}", time(1));
}

/// A NIC a rank: the busiest one says how long blocks of different sizes take.
#[test]
fn skewed_blocks_take_as_long_as_the_busiest_nic() {
    let (machine, grid) = (round(1, 1, ""), grid_of(&round(1, 1, ""), 4));
    let mib = 1usize << 20;
    let time = |collective, bytes, skew| {
        let detail = Detail { fold: false, timeline: false, skew };
        let way = How::Strata(route("direct", usize::MAX, 1));
        price(&machine, &grid, collective, bytes, &way, detail).unwrap().ns - 1000.0
    };
    let near = |ns: f64, bytes: usize| assert!((ns / bytes as f64 - 1.0).abs() < 0.01, "{ns} ns, {bytes} bytes");
    near(time(Collective::AllToAll, mib, None), 3 * mib);
    // The hot rank gets nine tenths of what each of three others sends.
    near(time(Collective::AllToAll, mib, Some(Skew::One)), 3 * (4 * mib * 9 / 10));
    near(time(Collective::AllGather, 4 * mib, None), 3 * mib);
    // Two ranks have all, twice as much as else, for three others each.
    near(time(Collective::AllGather, 4 * mib, Some(Skew::Zeros)), 3 * 2 * mib);
    near(time(Collective::AllGather, 4 * mib, Some(Skew::One)), 3 * (4 * mib * 9 / 10));
    let law = price(
        &machine,
        &grid,
        Collective::AllGather,
        mib,
        &How::Vendor,
        Detail { skew: Some(Skew::Zipf), ..Detail::default() },
    );
    assert!(law.is_err_and(|error| error.text().contains("laws speak of blocks of one size")));
}

/// Messages have the code's bytes; coding takes the time that the machine's file gives it, and none where it gives nothing.
#[test]
fn codes_shorten_messages_and_take_their_own_time() {
    let mut machine = Cluster::clone(&round(1, 1, ""));
    let mut mib = |encode: f64, decode: f64| {
        (machine.local.encode_gbps.value, machine.local.decode_gbps.value) = (encode, decode);
        let route = route("coded_mx8", usize::MAX, 1);
        strata(&Arc::new(machine.clone()), 4, Collective::AllGather, 4 << 20, route).ns / f64::from(1 << 20)
    };
    // Of each block of 128 bytes 33 go to three others.
    let bytes = 3.0 * 33.0 / 128.0;
    assert!((mib(0.0, 0.0) - bytes).abs() < 0.01, "{}", mib(0.0, 0.0));
    // A rank codes its own block, and decodes it and those of three others.
    assert!((mib(0.5, 0.0) - bytes - 2.0).abs() < 0.01, "{}", mib(0.5, 0.0));
    assert!((mib(0.0, 1.0) - 4.0).abs() < 0.1, "{}", mib(0.0, 1.0));
}

#[test]
fn a_reduction_waits_for_its_bytes_and_takes_its_time_behind_them() {
    let mut machine = Cluster::clone(&round(1, 1, ""));
    machine.local.reduce_gbps.value = 0.5;
    let price = strata(&Arc::new(machine), 2, Collective::ReduceScatter, 2 << 20, route("log", usize::MAX, 1));
    let block = f64::from(1 << 20);
    assert!((price.ns - (block + 1000.0 + 2.0 * block)).abs() < 100.0, "{}", price.ns);
    assert_eq!(price.binding().unwrap().0, Resource::Engine);
}

const CALLS: &str = "[calls.all_gather]\nhop_us = { value = 0, source = 'nothing, for a test' }\n\
                     gbps = { value = 1, source = 'as fast as a NIC, for a test' }\n\
                     [calls.reduce_scatter]\nhop_us = { value = 0, source = 'nothing, for a test' }\n\
                     gbps = { value = 1, source = 'as fast as a NIC, for a test' }\n";

#[test]
fn segments_let_rails_and_calls_overlap_and_a_window_of_one_does_not() {
    let machine = round(2, 2, CALLS);
    let time = |cut: usize, window| {
        let route = route("two_level(direct,log)", (1 << 20) / cut, window);
        strata(&machine, 4, Collective::AllGather, 4 << 20, route)
    };
    // The rails take 2^20 ns a rank; the calls, with half of 4 times that, twice as long.
    let rails = f64::from(1 << 20);
    let (whole, alone, overlapped) = (time(1, 1), time(8, 1), time(8, 2));
    assert!((whole.ns - 3.0 * rails).abs() < 0.01 * rails, "{}", whole.ns);
    assert!((alone.ns - 3.0 * rails).abs() < 0.02 * rails, "{}", alone.ns);
    assert!((overlapped.ns - (2.0 + 1.0 / 8.0) * rails).abs() < 0.02 * rails, "{}", overlapped.ns);
    assert_eq!(overlapped.binding().unwrap().0, Resource::Library);
    let both = |price: &Price| {
        let of = |resource| price.timeline.iter().filter(move |busy| busy.resource == resource);
        let meets = |call: &crate::sim::Busy| {
            of(Resource::NicIn).any(|nic| nic.from_ns < call.until_ns && call.from_ns < nic.until_ns)
        };
        of(Resource::Library).any(meets)
    };
    assert!(both(&overlapped) && !both(&whole), "the timeline shows what overlaps");
}

#[test]
fn what_is_busy_is_never_busy_twice_at_once() {
    let machine = Arc::new(Cluster::find("frontier").unwrap());
    let grid = grid_of(&machine, 32);
    let detail = Detail { fold: false, timeline: true, skew: None };
    let how = How::Strata(route("two_level(direct,ring)", 1 << 16, 3));
    let price = price(&machine, &grid, Collective::AllReduce, 32 << 20, &how, detail).unwrap();
    let mut busy = price.timeline.clone();
    busy.sort_by_key(|busy| (busy.resource, busy.index, busy.from_ns));
    assert!(busy.len() > 1000);
    for pair in busy.windows(2).filter(|pair| (pair[0].resource, pair[0].index) == (pair[1].resource, pair[1].index)) {
        assert!(pair[0].until_ns <= pair[1].from_ns, "{pair:?}");
    }
    assert!(busy.iter().all(|busy| busy.until_ns as f64 <= price.ns));
}

#[test]
fn a_collective_without_a_law_is_an_error_with_the_machine_s_name() {
    let machine = round(2, 2, "");
    let outcome = price(&machine, &grid_of(&machine, 4), Collective::AllGather, 64, &How::Vendor, Detail::default());
    assert!(outcome.unwrap_err().text().contains("round"));
}
