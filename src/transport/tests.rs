//! All of the transport, between threads and between processes.

use super::shm::open::Ways;
use super::worlds::{as_rank, carry_out, processes, region, threads, Post, Processes, Setup};
use super::{figures, trials};
use super::{Envelope, Router, Sink, Transport};
use crate::carrier::Carrier;
use crate::device::host::Combine;
use crate::dtype::{DataType, Operator};
use crate::error::Error;
use crate::plan::{Channel, OperandOrder};
use crate::topo::Grid;

pub(super) fn envelope(channel: Channel, sequence: u64) -> Envelope {
    Envelope { channel, sequence, signature: 0x5eed }
}

fn byte(from: usize, to: usize, seed: usize, at: usize) -> u8 {
    (from * 31 + to * 17 + seed * 7 + at + (at >> 8)) as u8
}

/// Sizes around every threshold.
const SIZES: [usize; 14] =
    [0, 1, 63, 64, 1000, 4095, 4096, 4097, 8192, 16_384, 16_385, 131_073, 1 << 20, (5 << 20) + 3];

/// Every rank sends to every other one message of each size, cut into uneven, misaligned pieces.
fn all_sizes(me: usize, router: &mut Router, n: usize) {
    for (round, &size) in SIZES.iter().enumerate() {
        let mut out: Vec<Vec<u8>> =
            (0..n).map(|to| (0..size + 1).map(|at| byte(me, to, round, at)).collect()).collect();
        let mut into = vec![vec![0u8; size + 3]; n];
        let cuts = |bytes: &mut [u8], first: usize| {
            let all = region(bytes);
            let first = first.min(all.len());
            [all.part(0, first), all.part(first, all.len() - first)]
                .into_iter()
                .filter(|part| !part.is_empty())
                .collect()
        };
        let sinks: Vec<Vec<_>> = into.iter_mut().map(|bytes| cuts(&mut bytes[2..size + 2], 100)).collect();
        let mut posts = Vec::new();
        for other in (0..n).filter(|&other| other != me) {
            posts.push(Post::Send(other, envelope(0, round as u64), cuts(&mut out[other][..size], 7)));
        }
        for other in (0..n).filter(|&other| other != me) {
            posts.push(Post::Recv(other, envelope(0, round as u64), Sink::Store(&sinks[other])));
        }
        carry_out(router, &posts).unwrap();
        for other in (0..n).filter(|&other| other != me) {
            let wrong = (0..size).find(|&at| into[other][at + 2] != byte(other, me, round, at));
            assert_eq!(wrong, None, "rank {me} from {other}, {size} bytes");
            assert_eq!(into[other][..2], [0, 0]);
            assert_eq!(into[other][size + 2], 0);
        }
    }
}

/// Float sums of every size, cut differently on the two sides.
fn reductions(me: usize, router: &mut Router, n: usize) {
    let how = Combine { dtype: DataType::F32, operator: Operator::Sum, order: OperandOrder::LocalFirst, divisor: 1 };
    for (round, count) in [1usize, 16, 300, 1024, 1025, 40_000, 300_001].into_iter().enumerate() {
        let (to, from) = ((me + 1) % n, (me + n - 1) % n);
        let fill = |rank: usize| (0..count).flat_map(move |at| ((rank + at) as f32).to_ne_bytes()).collect::<Vec<u8>>();
        let (mut src, mut local, mut dst) = (fill(me), fill(me), vec![0; count * 4]);
        let cut = count / 3 * 4;
        let (a, l, d) = (region(&mut src), region(&mut local), region(&mut dst));
        let parts = |all: crate::memory::Region, cut: usize| -> Vec<_> {
            [all.part(0, cut), all.part(cut, all.len() - cut)].into_iter().filter(|part| !part.is_empty()).collect()
        };
        let (locals, dsts) = (parts(l, cut), parts(d, cut));
        let sink = Sink::Reduce { local: &locals, dst: &dsts, combine: how };
        let posts = [
            Post::Recv(from, envelope(1, round as u64), sink),
            Post::Send(to, envelope(1, round as u64), parts(a, count / 2 * 4)),
        ];
        carry_out(router, &posts).unwrap();
        for at in 0..count {
            let got = f32::from_ne_bytes(dst[at * 4..at * 4 + 4].try_into().unwrap());
            assert_eq!(got, (me + from + 2 * at) as f32, "rank {me}, element {at} of {count}");
        }
    }
}

/// Many channels, several messages in flight on each, received in another order than they were sent.
fn many_channels(me: usize, router: &mut Router, n: usize) {
    let (to, from) = ((me + 1) % n, (me + n - 1) % n);
    let channels = [0u16, 1, 2, 3, 9, 100, 40_000, 65_535];
    let size = |channel: usize, sequence: usize| [10, 3000, 5000, 70_000][(channel + sequence) % 4];
    let mut out = Vec::new();
    let mut into = Vec::new();
    for channel in 0..channels.len() {
        for sequence in 0..7 {
            let size = size(channel, sequence);
            out.push((0..size).map(|at| byte(me, to, channel * 7 + sequence, at)).collect::<Vec<u8>>());
            into.push(vec![0u8; size]);
        }
    }
    let sinks: Vec<_> = into.iter_mut().map(|bytes| [region(bytes)]).collect();
    let mut posts = Vec::new();
    for sequence in 0..7 {
        for (channel, &number) in channels.iter().enumerate() {
            let src = vec![region(&mut out[channel * 7 + sequence])];
            posts.push(Post::Send(to, envelope(number, sequence as u64), src));
        }
    }
    for (channel, &number) in channels.iter().enumerate().rev() {
        for sequence in 0..7 {
            let sink = Sink::Store(&sinks[channel * 7 + sequence]);
            posts.push(Post::Recv(from, envelope(number, sequence as u64), sink));
        }
    }
    carry_out(router, &posts).unwrap();
    for (index, bytes) in into.iter().enumerate() {
        let wrong = (0..bytes.len()).find(|&at| bytes[at] != byte(from, me, index, at));
        assert_eq!(wrong, None, "rank {me}, message {index}");
    }
}

pub(super) fn everything(me: usize, mut router: Router, n: usize) {
    all_sizes(me, &mut router, n);
    reductions(me, &mut router, n);
    many_channels(me, &mut router, n);
}

#[test]
fn threads_of_one_node_exchange_everything() {
    let setup = Setup::new(Grid::flat(3));
    threads(&setup, |me, router| everything(me, router, 3));
}

#[test]
fn threads_without_proc_use_a_file_and_without_a_file_tcp() {
    for ways in [Ways { proc: false, file: true }, Ways { proc: false, file: false }] {
        let setup = Setup { ways, ..Setup::new(Grid::flat(3)) };
        threads(&setup, |me, router| everything(me, router, 3));
    }
}

#[test]
fn threads_on_several_nodes_use_both_ways() {
    let setup = Setup::new(Grid::blocks(&[2, 1, 2]));
    threads(&setup, |me, router| everything(me, router, 5));
}

#[test]
fn threads_exchange_everything_over_the_transport_of_the_example() {
    let setup = Setup::over_loopback(&[2, 1, 2]);
    threads(&setup, |me, router| {
        assert_eq!(router.carrier().map(Carrier::name), Some("loopback"));
        everything(me, router, 5);
    });
}

fn process_setup(scenario: &str) -> Setup {
    match scenario {
        "cma" | "board" => Setup::new(Grid::flat(3)),
        "ring" => Setup::new(Grid::flat(3)).with(|config| config.cma = false),
        "nodes" => Setup::new(Grid::round_robin(4, 2)),
        "tcp" => Setup::new(Grid::flat(3)).with(|config| config.shm = false),
        "loopback" => Setup::over_loopback(&[1, 2]),
        other => panic!("no scenario {other}"),
    }
}

fn play(scenario: &str, me: usize, exchange: &mut Processes) {
    if figures::play(scenario, me, exchange) || trials::play(scenario, me, exchange) {
        return;
    }
    let setup = process_setup(scenario);
    if scenario == "board" {
        super::boards::every_call(me, &mut setup.open(me, exchange), setup.grid.nranks());
        return exchange.barrier();
    }
    let router = setup.open(me, exchange);
    everything(me, router, setup.grid.nranks());
    exchange.barrier();
}

#[test]
fn a_process_plays_its_rank() {
    if let Some((scenario, me, mut exchange)) = as_rank() {
        play(&scenario, me, &mut exchange);
    }
}

#[test]
fn processes_exchange_everything() {
    processes("cma", 3);
}

#[test]
fn processes_call_on_the_board() {
    processes("board", 3);
}

#[test]
fn processes_that_may_not_read_each_other_exchange_everything() {
    processes("ring", 3);
}

#[test]
fn processes_on_several_nodes_exchange_everything() {
    processes("nodes", 4);
    processes("tcp", 3);
    processes("loopback", 3);
}

#[test]
fn a_mismatch_is_a_usage_error_that_names_the_peer() {
    let setups = [Setup::new(Grid::flat(2)), Setup::over_loopback(&[1, 1])];
    let sizes = [[8usize, 16], [100_000, 8], [100_000, 100_001]];
    for (sizes, setup) in sizes.iter().flat_map(|sizes| setups.iter().map(move |setup| (sizes, setup))) {
        threads(setup, |me, mut router| {
            let mut bytes = vec![0; sizes[me]];
            let all = [region(&mut bytes)];
            if me == 0 {
                router.send(0, crate::topo::Rank(1), envelope(0, 0), &all).unwrap();
                // The other side fails and never answers; the message stays ours until we cancel.
                let mut done = Vec::new();
                router.poll(&mut done).unwrap();
            } else {
                let failed = carry_out(&mut router, &[Post::Recv(0, envelope(0, 0), Sink::Store(&all))]);
                let Err(Error::InvalidUsage(text)) = failed else { panic!("{failed:?}") };
                assert!(text.contains("rank 0") && text.contains(&sizes[0].to_string()), "{text}");
            }
            router.cancel();
        });
    }
}
