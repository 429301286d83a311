//! The transport under stress: deaths, strangers, cancellation, sleep, very long messages and very many pieces.

use super::worlds::{carry_out, processes, processes_with_losses, region, threads, Post, Processes, Setup};
use super::{Envelope, Exchange, Router, Sink, Transport};
use crate::error::{Error, Result};
use crate::exec::{Started, Token};
use crate::memory::{shared, Region};
use crate::topo::{Grid, Rank};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

fn envelope(sequence: u64) -> Envelope {
    Envelope { channel: 0, sequence, signature: 1 }
}

/// Plays a rank of a trial; false when the scenario is none.
pub fn play(scenario: &str, me: usize, exchange: &mut Processes) -> bool {
    let Some((what, how)) = scenario.split_once('/') else { return false };
    let setup = |n: usize| match how {
        "cma" => Setup::new(Grid::flat(n)),
        "ring" => Setup::new(Grid::flat(n)).with(|config| config.cma = false),
        "tcp" => Setup::new(Grid::flat(n)).with(|config| config.shm = false),
        "loopback" => Setup::over_loopback(&vec![1; n]),
        "nodes" => Setup::new(Grid::blocks(&vec![2; n / 2])),
        other => panic!("no way {other}"),
    };
    match what {
        "death" => death(&mut setup(3).open(me, exchange), me, exchange),
        "death_after_announcing" => death_after_announcing(&mut setup(2).open(me, exchange), me, exchange),
        "sleepers" => sleepers(&mut setup(8).open(me, exchange), me, exchange),
        "flood" => flood(&mut setup(2).open(me, exchange), me),
        "huge" => huge(&mut setup(2).open(me, exchange), me, exchange),
        "allocated" => allocated(&mut setup(2).open(me, exchange), me, exchange),
        "leaver" => leaver(setup(2).open(me, exchange), me, exchange),
        other => panic!("no trial {other}"),
    }
    true
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("the signal cannot be ignored")
}

fn names_rank(result: &Result<()>, rank: usize) {
    match result {
        Err(Error::Remote(text)) => assert!(text.contains(&format!("rank {rank}")), "{text}"),
        other => panic!("a dead peer must be a remote error: {other:?}"),
    }
}

/// Rank 2 dies; those that wait for it learn it, those that do not go on.
fn death(router: &mut Router, me: usize, exchange: &mut Processes) {
    let mut bytes = [0u8; 8];
    let all = [region(&mut bytes)];
    // All connections exist before the death.
    let mut posts = Vec::new();
    for other in (0..3).filter(|&other| other != me) {
        posts.push(Post::Send(other, envelope(0), vec![]));
        posts.push(Post::Recv(other, envelope(0), Sink::Store(&[])));
    }
    carry_out(router, &posts).unwrap();
    exchange.barrier();
    if me == 2 {
        die();
    }
    let other = 1 - me;
    let posts = [Post::Send(other, envelope(1), all.to_vec()), Post::Recv(other, envelope(1), Sink::Store(&all))];
    carry_out(router, &posts).unwrap();
    names_rank(&carry_out(router, &[Post::Recv(2, envelope(1), Sink::Store(&all))]), 2);
}

/// Rank 1 dies when its announcement is out and nobody has fetched the message.
fn death_after_announcing(router: &mut Router, me: usize, exchange: &mut Processes) {
    let mut bytes = vec![0u8; 3 << 20];
    let all = [region(&mut bytes)];
    let told = exchange.allgather(std::process::id().to_le_bytes().to_vec()).unwrap();
    if me == 1 {
        let limit = Instant::now() + Duration::from_secs(20);
        while router.send(0, Rank(0), envelope(0), &all).unwrap() != Started::Pending {
            router.poll(&mut Vec::new()).unwrap();
            assert!(Instant::now() < limit);
        }
        exchange.barrier();
        die();
    }
    let victim = i32::from_le_bytes(told[1].clone().try_into().unwrap());
    let victim = rustix::process::Pid::from_raw(victim).unwrap();
    let victim = rustix::process::pidfd_open(victim, rustix::process::PidfdFlags::empty()).unwrap();
    // Over TCP the other side cannot announce before we have answered its call.
    let mut done = Vec::new();
    let barrier = std::thread::scope(|scope| {
        let barrier = scope.spawn(|| exchange.barrier());
        while !barrier.is_finished() {
            router.poll(&mut done).unwrap();
        }
        barrier.join()
    });
    barrier.unwrap();
    use rustix::event::{poll, PollFd, PollFlags, Timespec};
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&victim, PollFlags::IN)], Some(&limit)), Ok(1));
    names_rank(&carry_out(router, &[Post::Recv(1, envelope(0), Sink::Store(&all))]), 1);
}

fn wait_asleep(router: &mut Router, wanted: usize, done: &mut Vec<Token>) {
    const SLEEP: Duration = Duration::from_secs(10);
    loop {
        router.poll(done).unwrap();
        if done.len() >= wanted {
            return;
        }
        let begin = Instant::now();
        router.sleep(SLEEP).unwrap();
        assert!(begin.elapsed() < SLEEP / 2, "a wake-up was lost");
    }
}

/// Everybody falls asleep at once after each operation: small messages, large ones and full channels must all wake.
fn sleepers(router: &mut Router, me: usize, exchange: &mut Processes) {
    let n = 8;
    let mut out = vec![1u8; 40_000];
    let mut into = vec![0u8; 40_000];
    let (out, into) = (region(&mut out), region(&mut into));
    let limit = Instant::now() + Duration::from_secs(2);
    let mut round = 0;
    loop {
        let size = [8, 40_000, 300, 20_000][round as usize % 4];
        let step = 1 + round as usize % (n - 1);
        let (to, from) = ((me + step) % n, (me + n - step) % n);
        let mut done = Vec::new();
        let mut wanted = 0;
        let sinks = [into.part(0, size)];
        if router.recv(1, Rank::from_index(from), envelope(round), Sink::Store(&sinks)).unwrap() == Started::Pending {
            wanted += 1;
        }
        loop {
            match router.send(2, Rank::from_index(to), envelope(round), &[out.part(0, size)]).unwrap() {
                Started::Busy => wait_asleep_once(router, &mut done),
                Started::Pending => {
                    wanted += 1;
                    break;
                }
                Started::Done => break,
            }
        }
        wait_asleep(router, wanted, &mut done);
        round += 1;
        if round % 64 == 0 {
            let over = vec![u8::from(Instant::now() > limit && round >= 128)];
            if exchange.allgather(over).unwrap().concat().contains(&1) {
                break;
            }
        }
    }
}

fn wait_asleep_once(router: &mut Router, done: &mut Vec<Token>) {
    let begin = Instant::now();
    router.poll(done).unwrap();
    router.sleep(Duration::from_secs(10)).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(5), "a wake-up was lost");
}

/// One side sends as fast as it may, the other receives stream by stream: full rings and streams must wake when they
/// have room again.
fn flood(router: &mut Router, me: usize) {
    let (channels, messages) = (7u16, 150u64);
    let mut bytes = vec![me as u8; 12_000];
    let all = region(&mut bytes);
    let mut done = Vec::new();
    let mut pending = 0;
    for channel in 0..channels {
        for sequence in 0..messages {
            let (late, early) = (channel, (channel + sequence as u16) % channels);
            // Sent across the channels, received one channel after the other, except for the order within each.
            let envelope = Envelope { channel: if me == 0 { early } else { late }, sequence: 0, signature: 1 };
            loop {
                let started = match me {
                    0 => router.send(0, Rank(1), envelope, &[all]),
                    _ => router.recv(0, Rank(0), envelope, Sink::Store(&[all])),
                };
                match started.clone().unwrap() {
                    Started::Busy => wait_asleep_once(router, &mut done),
                    Started::Pending => pending += 1,
                    Started::Done => {}
                }
                if started != Ok(Started::Busy) {
                    break;
                }
            }
        }
    }
    wait_asleep(router, pending, &mut done);
}

/// A message of more than 4 GiB, made of the same 32 MiB over and over.
fn huge(router: &mut Router, me: usize, exchange: &mut Processes) {
    let part = 32 << 20;
    let mut bytes = vec![me as u8; part];
    bytes[part - 1] = 10 + me as u8;
    let all = region(&mut bytes);
    let mut pieces = vec![all; 128];
    pieces.push(all.part(0, 12_345));
    let post = match me {
        0 => Post::Send(1, envelope(0), pieces),
        _ => Post::Recv(0, envelope(0), Sink::Store(&pieces)),
    };
    carry_out(router, &[post]).unwrap();
    exchange.barrier();
    assert_eq!((bytes[0], bytes[part - 1]), (0, 10));
}

/// Messages between allocations of `shared`, at odd offsets, with freed and reused memory in between.
fn allocated(router: &mut Router, me: usize, exchange: &mut Processes) {
    for round in 0..20u64 {
        let len = 100_000 + 4096 * round as usize;
        let start = shared::allocate(len).unwrap();
        // SAFETY: the allocation must not be freed before every use has ended; because it is freed below, when all ranks are through.
        let all = unsafe { shared::region_of(start) }.unwrap().part(0, len);
        let half = len / 2;
        all.part(0, half).write(&vec![me as u8 * 50 + round as u8; half]);
        let sink = [all.part(half + 1, 30_001), all.part(half + 30_005, 11)];
        let src = vec![all.part(7, 30_000), all.part(1, 12)];
        let other = 1 - me;
        let posts = [Post::Send(other, envelope(round), src), Post::Recv(other, envelope(round), Sink::Store(&sink))];
        carry_out(router, &posts).unwrap();
        let mut got = vec![0; 30_001];
        sink[0].read(&mut got);
        assert!(got.iter().all(|&byte| byte == other as u8 * 50 + round as u8), "rank {me}, round {round}");
        shared::free(start.as_ptr()).unwrap();
    }
    exchange.barrier();
}

/// Rank 0 sends and leaves at once; nothing of what it sent may be lost.
fn leaver(mut router: Router, me: usize, exchange: &mut Processes) {
    let mut bytes = vec![7u8; 20 << 10];
    let all = [region(&mut bytes)];
    let posts: Vec<Post<'_>> = (0..40)
        .map(|sequence| match me {
            0 => Post::Send(1, envelope(sequence), all.to_vec()),
            _ => Post::Recv(0, envelope(sequence), Sink::Store(&all)),
        })
        .collect();
    carry_out(&mut router, &posts).unwrap();
    drop(router);
    exchange.barrier();
}

#[test]
fn a_dead_rank_is_named_to_those_who_wait_for_it() {
    for way in ["cma", "tcp", "loopback"] {
        processes_with_losses(&format!("death/{way}"), 3, &[2]);
    }
}

#[test]
fn a_rank_that_dies_before_its_message_is_fetched_is_named() {
    for way in ["cma", "ring", "tcp", "loopback"] {
        processes_with_losses(&format!("death_after_announcing/{way}"), 2, &[1]);
    }
}

#[test]
fn no_wake_up_is_lost_among_eight_sleepers() {
    for way in ["cma", "ring", "nodes", "tcp", "loopback"] {
        processes(&format!("sleepers/{way}"), 8);
    }
}

#[test]
fn a_flood_of_small_messages_stops_and_goes_on() {
    for way in ["cma", "tcp", "loopback"] {
        processes(&format!("flood/{way}"), 2);
    }
}

#[test]
fn a_message_may_be_longer_than_four_gibibytes() {
    for way in ["cma", "tcp"] {
        processes(&format!("huge/{way}"), 2);
    }
}

#[test]
fn shared_allocations_are_sent_by_every_way() {
    for way in ["cma", "ring", "tcp", "loopback"] {
        processes(&format!("allocated/{way}"), 2);
    }
}

#[test]
fn a_rank_that_leaves_takes_nothing_of_what_it_sent_with_it() {
    for way in ["cma", "tcp", "loopback"] {
        processes(&format!("leaver/{way}"), 2);
    }
}

/// Two ranks over shared memory, over TCP, and over the transport of the example.
fn pairs() -> [Setup; 3] {
    let flat = |shm| Setup::new(Grid::flat(2)).with(|config| config.shm = shm);
    [flat(true), flat(false), Setup::over_loopback(&[1, 1])]
}

#[test]
fn thousands_of_pieces_make_one_message() {
    for setup in pairs() {
        threads(&setup, |me, mut router| {
            let (pieces, len) = (9000, 33);
            let mut bytes: Vec<u8> = (0..pieces * (len + 2)).map(|at| (at % 251) as u8 * (1 - me as u8)).collect();
            let all = region(&mut bytes);
            let list: Vec<Region> = (0..pieces).map(|piece| all.part(piece * (len + 2) + 1, len)).collect();
            let post = match me {
                0 => Post::Send(1, envelope(0), list),
                _ => Post::Recv(0, envelope(0), Sink::Store(&list)),
            };
            carry_out(&mut router, &[post]).unwrap();
            if me == 1 {
                for (at, &byte) in bytes.iter().enumerate() {
                    let inside = (1..=len).contains(&(at % (len + 2)));
                    assert_eq!(byte, if inside { (at % 251) as u8 } else { 0 }, "byte {at}");
                }
            }
        });
    }
}

#[test]
fn after_cancel_nobody_reads_the_sender_s_memory() {
    for (way, setup) in pairs().into_iter().enumerate() {
        let (told, hears) = mpsc::channel::<()>();
        let hears = std::sync::Mutex::new(hears);
        threads(&setup, |me, mut router| {
            let mut bytes = vec![0u8; 8 << 20];
            let all = [region(&mut bytes)];
            if me == 0 {
                let limit = Instant::now() + Duration::from_secs(20);
                while router.send(0, Rank(1), envelope(0), &all).unwrap() == Started::Busy {
                    router.poll(&mut Vec::new()).unwrap();
                    assert!(Instant::now() < limit);
                }
                router.cancel();
                drop(bytes);
                told.send(()).unwrap();
                assert!(router.send(1, Rank(1), envelope(1), &[]).is_err());
            } else {
                let posts = [Post::Recv(0, envelope(0), Sink::Store(&all))];
                if way == 0 {
                    hears.lock().unwrap().recv_timeout(Duration::from_secs(20)).unwrap();
                }
                names_rank(&carry_out(&mut router, &posts), 0);
            }
        });
    }
}

#[test]
fn a_waker_ends_a_long_sleep_from_another_thread() {
    for grid in [Grid::flat(2), Grid::blocks(&[1, 1])] {
        threads(&Setup::new(grid), |_, mut router| {
            let waker = router.waker();
            let begin = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| waker.wake());
                router.sleep(Duration::from_secs(30)).unwrap();
            });
            assert!(begin.elapsed() < Duration::from_secs(20));
        });
    }
}

/// Sees what is exchanged.
struct Spy<'a, E: Exchange> {
    exchange: &'a mut E,
    seen: Vec<Vec<u8>>,
}

impl<E: Exchange> Exchange for Spy<'_, E> {
    fn allgather(&mut self, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.seen = self.exchange.allgather(mine)?;
        Ok(self.seen.clone())
    }
}

#[test]
fn strangers_are_dropped_and_do_no_harm() {
    let setup = Setup::new(Grid::blocks(&[1, 1]));
    super::worlds::threads_with(2, |me, exchange| {
        let mut spy = Spy { exchange, seen: Vec::new() };
        let mut router = setup.open(me, &mut spy);
        let mut strangers = Vec::new();
        for card in &spy.seen {
            let (_, addresses): ([u8; 16], Vec<SocketAddr>) = super::card::decode(card).unwrap();
            let address = addresses[0];
            for bytes in [vec![], vec![0xff; 5], vec![0x55; 4096], b"GET / HTTP/1.1\r\n\r\n".to_vec(), {
                let mut greeting = b"strata\0\x01".to_vec();
                greeting.resize(48, 1);
                greeting
            }] {
                let mut stranger = TcpStream::connect(address).unwrap();
                let _ = stranger.write_all(&bytes);
                strangers.push(stranger);
            }
        }
        let mut bytes = vec![me as u8; 200_000];
        let mut into = vec![9u8; 200_000];
        let (src, sinks) = (region(&mut bytes), [region(&mut into)]);
        for round in 0..20 {
            let posts = [
                Post::Send(1 - me, envelope(round), vec![src]),
                Post::Recv(1 - me, envelope(round), Sink::Store(&sinks)),
            ];
            carry_out(&mut router, &posts).unwrap();
        }
        assert!(into.iter().all(|&byte| byte == 1 - me as u8));
    });
}
