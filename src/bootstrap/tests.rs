//! Threads as ranks: they meet, exchange, and are told why when they cannot.

use super::*;
use crate::bootstrap::connection::{Interrupt, Interruption};
use crate::bootstrap::protocol::{Frame, Join};
use crate::bootstrap::{Credentials, Process, Service};
use crate::error::Error;
use crate::error::Result;
use crate::topo::Rank;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static NEVER: AtomicBool = AtomicBool::new(false);
const LIMIT: Duration = Duration::from_secs(30);
/// For joins that are to fail: long enough for the ranks that do come, beside a thousand of another test.
const SHORT: Duration = Duration::from_secs(3);

fn on_threads<T: Send>(ranks: impl IntoIterator<Item = u32>, body: impl Fn(u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn ids(count: usize) -> Vec<UniqueId> {
    (0..count).map(|_| UniqueId::create().unwrap()).collect()
}

fn join(ids: &[UniqueId], nranks: usize, rank: u32, timeout: Duration) -> Result<Session<'static>> {
    Session::join(ids, nranks, Rank(rank), timeout, &NEVER)
}

fn part(rank: u32, round: u32) -> Vec<u8> {
    vec![rank as u8; ((rank * 37 + round * 11) % 300) as usize]
}

fn exchange(mut session: Session<'_>, nranks: u32, rank: u32) {
    for round in 0..3 {
        let all = session.allgather(part(rank, round)).unwrap();
        let expected: Vec<Vec<u8>> = (0..nranks).map(|other| part(other, round)).collect();
        assert_eq!(all, expected);
    }
    session.close();
}

fn meet(nids: usize, nranks: u32) {
    let ids = ids(nids);
    on_threads(0..nranks, |rank| exchange(join(&ids, nranks as usize, rank, LIMIT).unwrap(), nranks, rank));
}

#[test]
fn ranks_meet_and_exchange_in_rank_order() {
    for nranks in [1, 2, 3, 7, 64] {
        meet(1, nranks);
    }
}

#[test]
fn several_ids_share_the_ranks_and_merge() {
    for (nids, nranks) in [(2, 2), (2, 5), (3, 7), (4, 33)] {
        meet(nids, nranks);
    }
}

/// Answers only after a nap, as if the process had no processor.
struct Sleepy;

impl Interrupt for Sleepy {
    fn interrupted(&self) -> Option<Interruption> {
        std::thread::sleep(Duration::from_millis(500));
        None
    }
}

/// A range whose leader is slow has its last round when the others are through, in a process whose rank is among them.
#[test]
fn the_process_of_a_root_stays_until_all_ranges_have_their_last_round() {
    let ids = ids(2);
    let ends = on_threads(0..3, |rank| {
        let interrupt: &dyn Interrupt = if rank == 2 { &Sleepy } else { &NEVER };
        let mut session = Session::join(&ids, 3, Rank(rank), LIMIT, interrupt).unwrap();
        // Long enough for rank 2 to fall asleep.
        std::thread::sleep(Duration::from_millis(if rank == 2 { 0 } else { 300 }));
        session.allgather(part(rank, 0)).unwrap();
        let answered = Instant::now();
        session.close();
        (answered, Instant::now())
    });
    assert!(ends[0].0 < ends[2].0, "rank 2 was not late");
    assert!(ends[0].1 >= ends[2].0, "rank 0 left {:?} before rank 2 had its answer", ends[2].0 - ends[0].1);
}

#[test]
fn a_thousand_ranks_meet() {
    let ids = ids(1);
    let ids = &ids;
    let body = |rank| exchange(join(ids, 1000, rank, LIMIT).unwrap(), 1000, rank);
    std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new().stack_size(1 << 18);
        let threads: Vec<_> = (0..1000).map(|rank| thread().spawn_scoped(scope, move || body(rank)).unwrap()).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn large_parts_arrive_whole() {
    let ids = ids(1);
    on_threads(0..4, |rank| {
        let mut session = join(&ids, 4, rank, LIMIT).unwrap();
        let all = session.allgather(vec![rank as u8; 3_000_000]).unwrap();
        assert!((0..4).all(|other| all[other] == vec![other as u8; 3_000_000]));
        session.close();
    });
}

fn failures(ids: &[UniqueId], nranks: usize, ranks: &[u32], timeout: Duration) -> Vec<Error> {
    on_threads(ranks.iter().copied(), |rank| join(ids, nranks, rank, timeout).err().expect("no communicator comes up"))
}

#[test]
fn missing_ranks_are_named_on_every_rank_that_came() {
    for error in failures(&ids(1), 8, &[0, 1, 2, 4], SHORT) {
        assert_eq!(
            error,
            Error::Timeout(
                "ranks 3, 5-7 of 8 of the new communicator did not join within 3000 ms (STRATA_BOOTSTRAP_TIMEOUT_MS)"
                    .to_string()
            )
        );
    }
}

#[test]
fn a_rank_missing_from_one_range_is_named_in_all_ranges() {
    for error in failures(&ids(2), 6, &[0, 1, 2, 3, 5], SHORT) {
        assert!(error.text().starts_with("rank 4 of 6 of the new communicator did not join"), "{error}");
        assert!(matches!(error, Error::Timeout(_)));
    }
    for error in failures(&ids(2), 6, &[0, 1, 2, 4, 5], SHORT) {
        assert!(error.text().starts_with("rank 3 of 6 of the new communicator did not join"), "{error}");
    }
}

#[test]
fn a_root_stays_until_the_others_have_heard_its_verdict() {
    let ids = ids(1);
    let (room, heard) = (ids[0].credentials().unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let joined =
            Join { room, nranks: 3, rank: 1, first_name: 0, total: 3, retries: false, process: Process::this() };
        let mut stream = TcpStream::connect(Service::get().unwrap().addr().0).unwrap();
        stream.write_all(&Frame::Join(joined).encode()).unwrap();
        let heard = &heard;
        scope.spawn(move || {
            let mut verdict = Vec::new();
            stream.read_to_end(&mut verdict).unwrap();
            // A slow one: its process gets little time.
            std::thread::sleep(Duration::from_millis(200));
            heard.store(verdict.windows(12).any(|text| text == b"did not join"), Ordering::Release);
        });
        let error = join(&ids, 3, 0, Duration::from_millis(100)).err().unwrap();
        assert!(error.text().starts_with("rank 2 of 3 of the new communicator did not join"), "{error}");
        assert!(heard.load(Ordering::Acquire), "its process could end now, and the verdict with it");
    });
}

#[test]
fn a_rank_given_twice_fails_all_that_came() {
    let ids = ids(1);
    for error in failures(&ids, 4, &[0, 1, 2, 1], LIMIT) {
        assert!(matches!(&error, Error::InvalidUsage(text) if text.starts_with("rank 1 was given twice")), "{error}");
    }
    let late = join(&ids, 4, 3, LIMIT).err().unwrap();
    assert!(late.text().starts_with("rank 1 was given twice"), "who comes later hears it too: {late}");
}

#[test]
fn different_sizes_fail_all_that_came() {
    let ids = ids(1);
    let errors = on_threads(0..3, |rank| join(&ids, if rank == 2 { 5 } else { 4 }, rank, LIMIT).err().unwrap());
    for error in errors {
        assert!(matches!(&error, Error::InvalidUsage(text) if text.contains("disagree on the communicator's size")));
    }
}

#[test]
fn a_rank_that_gives_up_between_rounds_fails_the_others() {
    let ids = ids(1);
    let errors = on_threads(0..3, |rank| {
        let mut session = join(&ids, 3, rank, LIMIT).unwrap();
        if rank == 1 {
            return None;
        }
        session.allgather(vec![]).err()
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(&error, Error::Remote(text) if text.starts_with("rank 1 (")), "{error}");
    }
}

#[test]
fn cancelling_ends_the_wait_and_tells_the_others() {
    let ids = ids(1);
    let cancel = AtomicBool::new(false);
    let began = Instant::now();
    let errors = on_threads(0..3, |rank| match rank {
        2 => {
            cancel.store(true, Ordering::Release);
            None
        }
        0 => Session::join(&ids, 3, Rank(0), LIMIT, &cancel).err(),
        _ => join(&ids, 3, rank, LIMIT).err(),
    });
    assert!(matches!(errors[0], Some(Error::InvalidUsage(_))));
    assert!(matches!(&errors[1], Some(Error::Remote(text)) if text.starts_with("rank 0 (")), "{errors:?}");
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_id_serves_one_communicator() {
    let ids = ids(1);
    on_threads(0..2, |rank| exchange(join(&ids, 2, rank, LIMIT).unwrap(), 2, rank));
    let error = join(&ids, 2, 0, LIMIT).err().unwrap();
    assert!(error.text().contains("already made a communicator of 2 ranks"), "{error}");
}

#[test]
fn bad_arguments_are_told_at_once() {
    let ids = ids(2);
    for (given, nranks, rank) in [(&ids[..0], 2, 0), (&ids[..], 1, 0), (&ids[..1], 2, 2), (&ids[..1], 0, 0)] {
        assert!(matches!(join(given, nranks, rank, LIMIT), Err(Error::InvalidArgument(_))));
    }
    assert!(matches!(join(&[UniqueId([1; 128])], 2, 0, LIMIT), Err(Error::InvalidArgument(_))));
}

#[test]
fn a_fixed_address_serves_one_communicator_after_another() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ids = [UniqueId::from_address(&format!("127.0.0.1:{port}"), "").unwrap()];
    on_threads(0..4, |rank| {
        for _ in 0..5 {
            exchange(join(&ids, 4, rank, LIMIT).unwrap(), 4, rank);
        }
    });
    let deadline = Instant::now() + LIMIT;
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {
        assert!(Instant::now() < deadline, "the address is still taken");
        std::thread::yield_now();
    }
}

#[test]
fn without_the_key_of_a_fixed_address_one_cannot_join() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let id = |key: &str| [UniqueId::from_address(&format!("127.0.0.1:{port}"), key).unwrap()];
    let (ours, began) = (id("the job's"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (ours, began) = (&ours, &began);
        scope.spawn(move || exchange(join(ours, 2, 0, LIMIT).unwrap(), 2, 0));
        scope.spawn(move || {
            // Strangers come first, and try again and again.
            for key in ["", "another"] {
                let error = join(&id(key), 2, 1, SHORT).err().unwrap();
                assert!(error.text().contains("STRATA_COMM_KEY"), "{error}");
            }
            began.store(true, Ordering::Release);
            exchange(join(ours, 2, 1, LIMIT).unwrap(), 2, 1);
        });
    });
    assert!(began.load(Ordering::Acquire));
}

#[test]
fn a_root_that_hangs_up_after_the_time_is_over_is_said_to_refuse() {
    let root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ids = [UniqueId::from_address(&root.local_addr().unwrap().to_string(), "").unwrap()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = root.accept().unwrap();
            // The wish to join, and that the time is over.
            let heard = [stream.read(&mut [0; 4096]).unwrap(), stream.read(&mut [0; 4096]).unwrap()];
            assert!(!heard.contains(&0), "{heard:?}");
        });
        let error = join(&ids, 2, 1, Duration::from_millis(100)).err().unwrap();
        assert!(error.text().contains("STRATA_COMM_KEY"), "{error}");
    });
}

#[test]
fn the_secret_of_a_fixed_address_opens_no_other_room() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let fixed = UniqueId::from_address(&format!("127.0.0.1:{port}"), "").unwrap();
    let cancel = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (fixed, cancel) = (&fixed, &cancel);
        scope.spawn(move || Session::join(&[*fixed], 2, Rank(0), LIMIT, cancel).err());
        let deadline = Instant::now() + LIMIT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline);
        }
        let room = Credentials { key: 77, ..fixed.credentials().unwrap() };
        let wish = Join {
            room,
            nranks: 1 << 20,
            rank: 0,
            first_name: 0,
            total: 1 << 20,
            retries: false,
            process: Process::this(),
        };
        assert_eq!(provoke(&Frame::Join(wish).encode()), Frame::Unknown.encode());
        cancel.store(true, Ordering::Release);
    });
}

/// A rank that has given up and tries again may be heard before its old connection ends, with the room full or not.
#[test]
fn who_tries_again_after_a_time_out_takes_its_own_place() {
    for stale in [&[1][..], &[0, 1]] {
        let leader = Service::get().unwrap().addr();
        let room = Credentials::random().unwrap();
        Service::get().unwrap().open_room(room).unwrap();
        let old = stale.iter().map(|&rank| {
            let join = Join { room, nranks: 2, rank, first_name: 0, total: 2, retries: true, process: Process::this() };
            let mut stream = TcpStream::connect(leader.0).unwrap();
            stream.write_all(&Frame::Join(join).encode()).unwrap();
            stream
        });
        let old: Vec<TcpStream> = old.collect();
        // Else they would be heard together with those below, or after them: the test would show nothing.
        std::thread::sleep(Duration::from_millis(200));
        on_threads(0..2, |rank| {
            let derived = Derived { leader, leader_rank: Rank(0), room, retries: true };
            let meet = || {
                let mut session = Session::join_derived(derived, 2, Rank(rank), LIMIT, &NEVER)?;
                let all = session.allgather(part(rank, 0))?;
                session.close();
                Ok(all)
            };
            // Who met an old connection of the other's is told to try again, as by a time-out.
            let deadline = Instant::now() + LIMIT;
            let all = loop {
                match meet() {
                    Err(Error::Timeout(why)) => assert!(Instant::now() < deadline, "{why}"),
                    outcome => break outcome.unwrap(),
                }
            };
            assert_eq!(all, [part(0, 0), part(1, 0)]);
        });
        drop(old);
    }
}

#[test]
fn a_derived_room_needs_no_id() {
    let leader = Service::get().unwrap().addr();
    let room = Credentials::random().unwrap();
    on_threads(0..5, |rank| {
        let session = Session::join_derived(
            Derived { leader, leader_rank: Rank(0), room, retries: false },
            5,
            Rank(rank),
            LIMIT,
            &NEVER,
        )
        .unwrap();
        exchange(session, 5, rank);
    });
}

/// A connection to the service that has said this; returns what came back until it was closed.
fn provoke(bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(Service::get().unwrap().addr().0).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // The service may close before all is written.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    // A reset is as good as an end here.
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn strangers_are_refused_and_harm_nobody() {
    let ids = ids(1);
    let room = ids[0].credentials().unwrap();
    let wish = |room| {
        Frame::Join(Join {
            room,
            nranks: 9,
            rank: 0,
            first_name: 0,
            total: 9,
            retries: false,
            process: Process::this(),
        })
        .encode()
    };
    let silent: Vec<TcpStream> =
        (0..300).map(|_| TcpStream::connect(Service::get().unwrap().addr().0).unwrap()).collect();
    let mut half = TcpStream::connect(Service::get().unwrap().addr().0).unwrap();
    half.write_all(&wish(room)[..20]).unwrap();
    on_threads(0..4, |rank| {
        if rank == 3 {
            assert!(provoke(b"GET / HTTP/1.1\r\n\r\n").is_empty());
            assert!(provoke(&[0xff; 5000]).is_empty());
            let wrong = Credentials { secret: [0; 16], ..room };
            assert!(provoke(&wish(wrong)).is_empty(), "a wrong secret gets no answer");
            assert!(provoke(&Frame::Leave.encode()).is_empty());
            assert!(provoke(&Frame::Part(vec![0; 1 << 20]).encode()).is_empty());
        }
        exchange(join(&ids, 4, rank, LIMIT).unwrap(), 4, rank);
    });
    drop(silent);
}

#[test]
fn a_room_nobody_has_opened_is_not_known() {
    let room = Credentials::random().unwrap();
    let wish = Join { room, nranks: 2, rank: 0, first_name: 0, total: 2, retries: false, process: Process::this() };
    assert_eq!(provoke(&Frame::Join(wish).encode()), Frame::Unknown.encode());
}

#[test]
fn a_root_that_is_gone_is_an_error_within_seconds() {
    let mut id = ids(1)[0];
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    id.0[12..32].copy_from_slice(&crate::bootstrap::ServiceAddr(free).encode());
    let error = join(&[id], 2, 1, LIMIT).err().unwrap();
    assert!(matches!(&error, Error::Remote(text) if text.contains("cannot be joined")), "{error}");
}
