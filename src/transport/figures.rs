//! Speed of the transport between processes of this machine; run by hand, with `--release -- --ignored --nocapture`.

use super::worlds::{carry_out, processes, region, threads_with, Post, Processes, Setup};
use super::{Envelope, Router, Sink, Transport};
use crate::device::host::Combine;
use crate::dtype::{DataType, Operator};
use crate::exec::Started;
use crate::memory::{shared, Region};
use crate::plan::OperandOrder;
use crate::topo::{Grid, Rank};
use std::time::{Duration, Instant};

fn envelope(sequence: u64) -> Envelope {
    Envelope { channel: 0, sequence, signature: 1 }
}

/// Every rank sends `bytes` to every other one, `rounds` times, one round after the other; the time of a round, the
/// best of batches of 100.
fn all_to_all(router: &mut Router, me: usize, n: usize, bytes: usize, rounds: u64) -> Duration {
    let mut out = vec![1u8; bytes * n];
    let mut into = vec![0u8; bytes * n];
    let (out, into) = (region(&mut out), region(&mut into));
    let sinks: Vec<[Region; 1]> = (0..n).map(|other| [into.part(other * bytes, bytes)]).collect();
    let mut begin = Instant::now();
    let mut best = Duration::MAX;
    for round in 0..rounds {
        if round % 100 == 0 && round > 0 {
            best = best.min(begin.elapsed() / 100);
            begin = Instant::now();
        }
        let mut posts = Vec::with_capacity(2 * n);
        for other in (1..n).map(|step| (me + step) % n) {
            posts.push(Post::Recv(other, envelope(round), Sink::Store(&sinks[other])));
            posts.push(Post::Send(other, envelope(round), vec![out.part(other * bytes, bytes)]));
        }
        carry_out(router, &posts).unwrap();
    }
    best
}

fn memory(bytes: usize, shared: bool) -> Region {
    let start = match shared {
        true => shared::allocate(bytes).unwrap().as_ptr(),
        false => Box::leak(vec![1u8; bytes].into_boxed_slice()).as_mut_ptr(),
    };
    // SAFETY: the bytes must stay; because they are never freed.
    unsafe { Region::new(start, bytes) }
}

/// Neighbours exchange `bytes` around a ring; GB/s of all ranks together, in the best of some batches.
fn pulls(router: &mut Router, me: usize, n: usize, bytes: usize, shared: bool, reduce: bool) -> f64 {
    let (src, dst, local) = (memory(bytes, shared), memory(bytes, shared), memory(bytes, shared));
    src.write(&vec![1; bytes]);
    local.write(&vec![0; bytes]);
    let how = Combine { dtype: DataType::F32, operator: Operator::Sum, order: OperandOrder::LocalFirst, divisor: 1 };
    let batch = ((256usize << 20) / bytes / n).clamp(2, 400);
    let mut begin = Instant::now();
    let mut best = Duration::MAX;
    for round in 0..=batch * 8 {
        let (locals, dsts) = ([local], [dst]);
        let sink = match reduce {
            true => Sink::Reduce { local: &locals, dst: &dsts, combine: how },
            false => Sink::Store(&dsts),
        };
        let posts = [
            Post::Recv((me + n - 1) % n, envelope(round as u64), sink),
            Post::Send((me + 1) % n, envelope(round as u64), vec![src]),
        ];
        carry_out(router, &posts).unwrap();
        if round % batch == 0 {
            best = if round > batch { best.min(begin.elapsed()) } else { best };
            begin = Instant::now();
        }
    }
    (batch * bytes * n) as f64 / best.as_secs_f64() / 1e9
}

/// Plays a rank of a measurement; false when the scenario is none.
pub fn play(scenario: &str, me: usize, exchange: &mut Processes) -> bool {
    let Some((what, n)) = scenario.split_once('-') else { return false };
    let n: usize = n.parse().unwrap();
    let setup = Setup::new(Grid::flat(n)).with(|config| {
        for (name, value) in std::env::vars().filter(|(name, _)| name.starts_with("STRATA_")) {
            config.set(&name, &value);
        }
        config.shm &= what != "tcp";
    });
    match what {
        "latency" | "tcp" => {
            for bytes in [64, 1024, 4096, 8192, 16_384, 65_536] {
                let mut router = setup.open(me, exchange);
                let took = all_to_all(&mut router, me, n, bytes, 3000);
                exchange.barrier();
                if me == 0 {
                    println!("{scenario} {bytes:>6} B: {:.1} us a round", took.as_secs_f64() * 1e6);
                }
            }
        }
        "bandwidth" => {
            for (shared, reduce) in [(false, false), (false, true), (true, false), (true, true)] {
                for bytes in [64 << 10, 1 << 20, 8 << 20] {
                    let mut router = setup.open(me, exchange);
                    exchange.barrier();
                    let speed = pulls(&mut router, me, n, bytes, shared, reduce);
                    exchange.barrier();
                    if me == 0 {
                        println!("{scenario} shared={shared} reduce={reduce} {bytes:>8} B: {speed:.2} GB/s together");
                    }
                }
            }
        }
        _ => return false,
    }
    true
}

/// One thread plays both ranks, so that the figure is what a message costs and not how soon a thread runs.
fn short_path(bytes: usize, posted_first: bool) -> f64 {
    const BATCH: u32 = 10_000;
    let setup = Setup::new(Grid::flat(2));
    let routers = std::sync::Mutex::new(Vec::new());
    threads_with(2, |me, exchange| {
        let router = setup.open(me, exchange);
        routers.lock().unwrap().push((me, router));
    });
    let mut routers = routers.into_inner().unwrap();
    routers.sort_by_key(|(me, _)| *me);
    let mut routers: Vec<Router> = routers.into_iter().map(|(_, router)| router).collect();
    let (mut out, mut into, mut done) = (vec![1u8; bytes], vec![0u8; bytes], Vec::new());
    let (src, dst) = ([region(&mut out)], [region(&mut into)]);
    let mut best = f64::MAX;
    for batch in 0..100 {
        let begin = Instant::now();
        for at in 0..BATCH {
            let envelope = envelope(u64::from(batch * BATCH + at));
            let send = |routers: &mut Vec<Router>| routers[0].send(1, Rank(1), envelope, &src).unwrap();
            let recv = |routers: &mut Vec<Router>| routers[1].recv(2, Rank(0), envelope, Sink::Store(&dst)).unwrap();
            if posted_first {
                recv(&mut routers);
                assert_eq!(send(&mut routers), Started::Done);
                routers[1].poll(&mut done).unwrap();
            } else {
                assert_eq!(send(&mut routers), Started::Done);
                routers[1].poll(&mut done).unwrap();
                assert_eq!(recv(&mut routers), Started::Done);
            }
            routers[0].poll(&mut done).unwrap();
            done.clear();
        }
        best = best.min(begin.elapsed().as_secs_f64() / f64::from(BATCH));
    }
    best * 1e9
}

#[test]
#[ignore = "a measurement"]
fn figures_of_the_short_path() {
    for bytes in [8, 1024, 8192] {
        for posted_first in [true, false] {
            println!(
                "short path, posted first {posted_first}, {bytes:>5} B: {:.1} ns",
                short_path(bytes, posted_first)
            );
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn figures_of_latency() {
    processes("latency-2", 2);
    processes("latency-4", 4);
    processes("latency-8", 8);
}

#[test]
#[ignore = "a measurement"]
fn figures_of_bandwidth() {
    processes("bandwidth-2", 2);
    processes("bandwidth-8", 8);
}

#[test]
#[ignore = "a measurement"]
fn figures_of_tcp() {
    processes("tcp-2", 2);
    processes("tcp-4", 4);
}
