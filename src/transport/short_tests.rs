//! Receives that take a short message without being posted, beside others that are posted, in orders made from seeds.

use super::tests::envelope;
use super::worlds::{carry_out, region, threads, Post, Setup, LIMIT};
use super::{Router, Sink, Transport};
use crate::exec::Started;
use crate::plan::Channel;
use crate::sim::Random;
use crate::topo::{Grid, Rank};
use std::cmp::Reverse;
use std::time::{Duration, Instant};

const SIZES: [usize; 9] = [0, 1, 8, 48, 64, 1000, 4096, 16_385, 200_000];
/// Sends of so few bytes wait for no receive.
const EAGER: usize = 1000;
const CHANNELS: u64 = 2;

struct Planned {
    from: usize,
    to: usize,
    channel: Channel,
    sequence: u64,
    bytes: Vec<u8>,
}

/// Messages in one order for all ranks, so that ranks that wait for each of theirs do not wait for one another.
fn plan(seed: u64, n: u64) -> Vec<Planned> {
    let mut random = Random::new(seed);
    let mut sequences = vec![0; (n * n * CHANNELS) as usize];
    let planned = (0..if cfg!(miri) { 20 } else { 300 }).map(|_| {
        let from = random.below(n);
        let to = (from + 1 + random.below(n - 1)) % n;
        let channel = random.below(CHANNELS);
        let next: &mut u64 = &mut sequences[((from * n + to) * CHANNELS + channel) as usize];
        *next += 1;
        let size = random.pick(&SIZES);
        let first = random.next_u64() as usize;
        let bytes = (0..size).map(|at| (first + at + (at >> 8)) as u8).collect();
        Planned { from: from as usize, to: to as usize, channel: channel as Channel, sequence: *next - 1, bytes }
    });
    planned.collect()
}

/// Takes a message without posting a receive if that can be, else posts one.
fn take(router: &mut Router, message: &Planned, into: &mut [u8]) {
    let envelope = envelope(message.channel, message.sequence);
    let (from, memory) = (Rank::from_index(message.from), region(into));
    let limit = Instant::now() + Duration::from_secs(30);
    loop {
        match router.recv_short(from, envelope, memory).unwrap() {
            Started::Done => return,
            Started::Busy => break,
            Started::Pending => router.poll(&mut Vec::new()).unwrap(),
        }
        assert!(Instant::now() < limit, "{} bytes of rank {} have not come", message.bytes.len(), message.from);
    }
    carry_out(router, &[Post::Recv(message.from, envelope, Sink::Store(&[memory]))]).unwrap();
}

/// Carries out this rank's part of a plan: alone, or several receives posted at once.
fn follow(me: usize, router: &mut Router, seed: u64, planned: &[Planned]) {
    let mut random = Random::new(seed ^ (me as u64 + 1) << 32);
    let mine: Vec<&Planned> = planned.iter().filter(|message| message.from == me || message.to == me).collect();
    let mut at = 0;
    while at < mine.len() {
        let together = if random.one_in(3) { (1 + random.below(6) as usize).min(mine.len() - at) } else { 1 };
        let mut bytes: Vec<Vec<u8>> = mine[at..at + together]
            .iter()
            .map(|message| if message.from == me { message.bytes.clone() } else { vec![0; message.bytes.len()] })
            .collect();
        let window = &mine[at..at + together];
        if window.iter().all(|message| message.to == me && message.bytes.len() <= EAGER)
            || together == 1 && mine[at].to == me
        {
            let mut order: Vec<usize> = (0..together).collect();
            order.sort_by_key(|&which| Reverse(window[which].channel)); // Not the order they come in.
            order.into_iter().for_each(|which| take(router, window[which], &mut bytes[which]));
        } else {
            let parts: Vec<_> = bytes.iter_mut().map(|bytes| [region(bytes)]).collect();
            let posts = window.iter().zip(&parts).map(|(message, parts)| {
                let envelope = envelope(message.channel, message.sequence);
                if message.from == me {
                    Post::Send(message.to, envelope, parts.to_vec())
                } else {
                    Post::Recv(message.from, envelope, Sink::Store(parts))
                }
            });
            carry_out(router, &posts.collect::<Vec<_>>()).unwrap();
        }
        for (bytes, message) in bytes.iter().zip(&mine[at..]) {
            assert!(*bytes == message.bytes, "seed {seed}, rank {me}: {} bytes of rank {}", bytes.len(), message.from);
        }
        at += together;
    }
}

#[test]
fn short_receives_and_posted_ones_take_their_own_messages() {
    for seed in 0..if cfg!(miri) { 1 } else { 12 } {
        for grid in [Grid::flat(2), Grid::flat(3), Grid::blocks(&[2, 1])] {
            let planned = plan(seed, grid.nranks() as u64);
            threads(&Setup::new(grid), |me, mut router| follow(me, &mut router, seed, &planned));
        }
    }
}

/// A receive that is posted comes first, also where its message arrives after the short receive has asked.
#[test]
fn a_short_receive_does_not_overtake_a_posted_one() {
    threads(&Setup::new(Grid::flat(2)), |me, mut router| {
        let (mut first, mut second, mut word) = ([0u8; 8], [0u8; 8], [0u8; 1]);
        if me == 1 {
            carry_out(&mut router, &[Post::Recv(0, envelope(1, 0), Sink::Store(&[region(&mut word)]))]).unwrap();
            for (sequence, byte) in [(0, 5u8), (1, 6)] {
                carry_out(&mut router, &[Post::Send(0, envelope(0, sequence), vec![region(&mut [byte; 8])])]).unwrap();
            }
            carry_out(&mut router, &[Post::Recv(0, envelope(1, 1), Sink::Store(&[region(&mut word)]))]).unwrap();
            return;
        }
        let peer = Rank::from_index(1);
        let parts = [region(&mut first)];
        assert_eq!(router.recv(7, peer, envelope(0, 0), Sink::Store(&parts)).unwrap(), Started::Pending);
        // The answer may come before the end of this message is known.
        let sent = router.send(8, peer, envelope(1, 0), &[region(&mut word)]).unwrap();
        let expected = match sent {
            Started::Busy => panic!("the first message finds no room"),
            Started::Pending => vec![7, 8],
            Started::Done => vec![7],
        };
        let limit = Instant::now() + Duration::from_millis(50);
        while Instant::now() < limit {
            assert_eq!(router.recv_short(peer, envelope(0, 1), region(&mut second)).unwrap(), Started::Busy);
        }
        let mut done = Vec::new();
        let limit = Instant::now() + LIMIT;
        while done.len() < expected.len() && Instant::now() < limit {
            router.poll(&mut done).unwrap();
        }
        done.sort_unstable();
        assert_eq!((done, first), (expected, [5; 8]));
        carry_out(&mut router, &[Post::Recv(1, envelope(0, 1), Sink::Store(&[region(&mut second)]))]).unwrap();
        assert_eq!(second, [6; 8]);
        carry_out(&mut router, &[Post::Send(1, envelope(1, 1), vec![region(&mut word)])]).unwrap();
    });
}
