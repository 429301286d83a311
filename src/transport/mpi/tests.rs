//! The transport over a make-believe MPI: ranks are threads, and each has an MPI "process" of its own.

use super::calls::MpiCalls;
use super::fake::{Universe, TABLE};
use super::vtable::{thread_level, VERSION};
use super::worker::MpiWorker;
use crate::carrier::{Carrier, Inter};
use crate::error::Error;
use crate::exec::Started;
use crate::topo::{Grid, Rank};
use crate::transport::header::{FrameHeader, FrameKind};
use crate::transport::router::Router;
use crate::transport::tests::{envelope, everything};
use crate::transport::worlds::{carry_out, region, threads, threads_with, Post, Setup};
use crate::transport::{Exchange, Sink, Transport};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn setup(grid: Grid, universe: &Arc<Universe>) -> Setup {
    let universe = universe.clone();
    let sites: Vec<_> = (0..grid.nranks()).map(|rank| Arc::new(universe.site(rank))).collect();
    let site = move |rank: usize| sites[rank].clone();
    Setup { sites: Some(Arc::new(site)), ..Setup::new(grid) }
}

fn worker(setup: &Setup, rank: usize) -> Arc<MpiWorker> {
    let site = setup.sites.as_ref().unwrap()(rank);
    (site.worker)(&setup.config, &site.launch).unwrap()
}

/// Two ranks on a node each.
fn two_nodes(seed: u64) -> (Arc<Universe>, Setup) {
    let universe = Universe::new(2, None, seed);
    let setup = setup(Grid::blocks(&[1, 1]), &universe);
    (universe, setup)
}

/// From rank 0 to rank 1.
fn pass_one_message(me: usize, router: &mut Router) {
    let mut bytes = [me as u8; 8];
    let all = [region(&mut bytes)];
    let post = match me {
        0 => Post::Send(1, envelope(0, 0), all.to_vec()),
        _ => Post::Recv(0, envelope(0, 0), Sink::Store(&all)),
    };
    carry_out(router, &[post]).unwrap();
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn ranks_on_several_nodes_exchange_everything_over_mpi() {
    for (seed, nodes) in [(1, vec![1, 1]), (2, vec![2, 1, 2]), (3, vec![1, 1, 1])] {
        let grid = Grid::blocks(&nodes);
        let n = grid.nranks();
        let universe = Universe::new(n, None, seed);
        threads(&setup(grid, &universe), |me, router| everything(me, router, n));
        assert!(universe.calls() > 100, "MPI was not used");
        let end = Instant::now() + Duration::from_secs(10);
        while universe.made_and_freed() != (1, 1) {
            assert!(Instant::now() < end, "{:?}", universe.made_and_freed());
            std::thread::yield_now();
        }
        assert_eq!(universe.late(), 0, "messages to freed communicators");
    }
}

/// The receiver takes what has long arrived, and acknowledges it, when the sender has left.
#[test]
fn a_communicator_is_not_freed_while_an_acknowledgement_is_on_its_way() {
    for level in [thread_level::MULTIPLE, thread_level::SERIALIZED] {
        let universe = Universe::new(2, Some(level), 43);
        let setup = setup(Grid::blocks(&[1, 1]), &universe);
        threads_with(2, |me, exchange| {
            let mut router = setup.open(me, exchange);
            // A small message every so often is acknowledged, a large one always.
            let mut bytes = vec![me as u8; 20_000];
            let all = region(&mut bytes);
            let sizes: Vec<usize> = (0..40).map(|nth| if nth == 7 { 20_000 } else { 8 }).collect();
            let sinks: Vec<_> = sizes.iter().map(|&size| [all.part(0, size)]).collect();
            let post = |nth: usize| match me {
                0 => Post::Send(1, envelope(0, nth as u64), sinks[nth].to_vec()),
                _ => Post::Recv(0, envelope(0, nth as u64), Sink::Store(&sinks[nth])),
            };
            let posts: Vec<_> = (0..8).map(post).collect();
            carry_out(&mut router, &posts).unwrap();
            exchange.allgather(Vec::new()).unwrap();
            if me == 0 {
                let posts: Vec<_> = (8..24).map(post).collect();
                carry_out(&mut router, &posts).unwrap();
                drop(router);
                exchange.allgather(Vec::new()).unwrap();
                exchange.allgather(Vec::new()).unwrap();
            } else {
                exchange.allgather(Vec::new()).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(universe.made_and_freed().1, 0);
                let posts: Vec<_> = (8..24).map(post).collect();
                carry_out(&mut router, &posts).unwrap();
                drop(router);
                exchange.allgather(Vec::new()).unwrap();
            }
            // Where MPI is silent between operations, those of the next communicators let it end, each a little.
            let freed = || vec![u8::from(universe.made_and_freed().1 > 0)];
            for _ in 0..100 {
                let mut next = setup.open(me, exchange);
                pass_one_message(me, &mut next);
                drop(next);
                if exchange.allgather(freed()).unwrap().contains(&vec![1]) {
                    break;
                }
            }
        });
        let end = Instant::now() + Duration::from_secs(10);
        while universe.made_and_freed().1 == 0 {
            assert!(Instant::now() < end, "{:?}", universe.made_and_freed());
            std::thread::yield_now();
        }
        assert_eq!(universe.late(), 0, "messages to freed communicators");
    }
}

#[test]
fn a_program_that_serialises_its_calls_finds_mpi_silent_between_operations() {
    let universe = Universe::new(2, Some(thread_level::SERIALIZED), 5);
    let setup = setup(Grid::blocks(&[1, 1]), &universe);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        assert!(router.only_in_calls());
        let mut bytes = vec![me as u8; 700_000];
        let mut into = vec![9u8; 700_000];
        let (src, sinks) = (region(&mut bytes), region(&mut into));
        for (round, size) in [700_000, 8, 0, 8192, 8193, 30].into_iter().cycle().take(60).enumerate() {
            let sink = [sinks.part(0, size)];
            let posts = [
                Post::Send(1 - me, envelope(0, round as u64), vec![src.part(0, size)]),
                Post::Recv(1 - me, envelope(0, round as u64), Sink::Store(&sink)),
            ];
            carry_out(&mut router, &posts).unwrap();
            // Both ranks have ended their operation: from here on nobody calls MPI.
            exchange.allgather(Vec::new()).unwrap();
            let before = universe.calls();
            std::thread::sleep(Duration::from_millis(3));
            assert_eq!(universe.calls(), before, "MPI was called between operations");
            exchange.allgather(Vec::new()).unwrap();
        }
        assert!(into.iter().all(|&byte| byte == 1 - me as u8));
    });
}

#[test]
fn a_program_that_has_left_its_last_communicator_may_finalise_mpi() {
    let universe = Universe::new(2, Some(thread_level::MULTIPLE), 51);
    let setup = setup(Grid::blocks(&[1, 1]), &universe);
    threads_with(2, |me, exchange| {
        for _ in 0..5 {
            let (mut router, other) = (setup.open(me, exchange), setup.open(me, exchange));
            assert!(!router.only_in_calls());
            pass_one_message(me, &mut router);
            drop(other);
            drop(router);
            exchange.allgather(Vec::new()).unwrap();
            let (begin, before) = (Instant::now(), universe.calls());
            std::thread::sleep(Duration::from_millis(20));
            // Rarely, once in 50 ms, until both ranks are known to have left. A thread that goes on polling calls it 50 times.
            let allowed = 10 * (1 + begin.elapsed().as_millis() as u64 / 40);
            let called = universe.calls() - before;
            assert!(called <= allowed, "MPI was called {called} times where the program may be in MPI_Finalize");
            exchange.allgather(Vec::new()).unwrap();
        }
    });
}

#[test]
fn a_mismatch_is_a_usage_error_that_names_the_peer() {
    for sizes in [[8usize, 16], [100_000, 8], [100_000, 100_001]] {
        let universe = Universe::new(2, None, 7);
        threads(&setup(Grid::blocks(&[1, 1]), &universe), |me, mut router| {
            let mut bytes = vec![0; sizes[me]];
            let all = [region(&mut bytes)];
            if me == 0 {
                router.send(0, Rank(1), envelope(0, 0), &all).unwrap();
            } else {
                let failed = carry_out(&mut router, &[Post::Recv(0, envelope(0, 0), Sink::Store(&all))]);
                let Err(Error::InvalidUsage(text)) = failed else { panic!("{failed:?}") };
                assert!(text.contains("rank 0") && text.contains(&sizes[0].to_string()), "{text}");
            }
            router.cancel();
        });
    }
}

#[test]
fn after_cancel_nobody_writes_the_receiver_s_memory_and_nothing_is_taken() {
    let universe = Universe::new(2, None, 9);
    threads(&setup(Grid::blocks(&[1, 1]), &universe), |me, mut router| {
        let mut bytes = vec![me as u8; 4 << 20];
        let all = [region(&mut bytes)];
        if me == 1 {
            router.recv(0, Rank(0), envelope(0, 0), Sink::Store(&all)).unwrap();
        } else {
            router.send(0, Rank(1), envelope(0, 0), &all).unwrap();
        }
        router.poll(&mut Vec::new()).unwrap();
        router.cancel();
        let seen = bytes.clone();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(bytes, seen);
        assert!(router.send(1, Rank(1 - me as u32), envelope(0, 1), &[]).is_err());
    });
}

#[test]
fn a_cancel_takes_back_receives_for_which_nothing_comes_and_leaves_mpi_to_others() {
    let (universe, setup) = two_nodes(25);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        let mut bytes = vec![me as u8; 8 << 20];
        let all = [region(&mut bytes)];
        if me == 1 {
            router.recv(0, Rank(0), envelope(0, 0), Sink::Store(&all)).unwrap();
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                router.poll(&mut Vec::new()).unwrap();
            }
        } else {
            // Without a poll no more than the first parts leave, and the receiver waits for the next ones.
            // Of the second message nothing is received.
            router.send(0, Rank(1), envelope(0, 0), &all).unwrap();
            router.send(1, Rank(1), envelope(1, 0), &all).unwrap();
        }
        exchange.allgather(Vec::new()).unwrap();
        router.cancel();
        worker(&setup, me).look().unwrap();
        exchange.allgather(Vec::new()).unwrap();
        // What is left behind is no reason to call MPI for ever.
        std::thread::sleep(Duration::from_millis(50));
        let before = universe.calls();
        std::thread::sleep(Duration::from_millis(20));
        assert!(universe.pending() > 0 && universe.calls() == before);
        exchange.allgather(Vec::new()).unwrap();
    });
}

/// MPI gives a communicator a number that a past one had.
#[test]
fn what_a_past_communicator_has_left_behind_is_no_message() {
    let (universe, setup) = two_nodes(27);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        let mut stale = FrameHeader { nonce: 1, ..FrameHeader::about(FrameKind::Ack, 9) }.encode();
        let stale = region(&mut stale);
        if me == 0 {
            universe.take_place(0);
            let calls = MpiCalls::new(&TABLE);
            for bytes in [stale, stale.part(0, 20), stale.part(0, 0)] {
                // SAFETY: the bytes must stay until they are sent; because they do to the end of the test.
                unsafe { calls.isend(universe.last_comm(), bytes, 1, 0) }.unwrap();
            }
        }
        pass_one_message(me, &mut router);
        exchange.allgather(Vec::new()).unwrap();
    });
}

#[test]
fn an_error_of_mpi_comes_back_with_its_text_and_the_ranks() {
    let universe = Universe::new(2, None, 11);
    threads(&setup(Grid::blocks(&[1, 1]), &universe), |me, mut router| {
        if me == 1 {
            return;
        }
        let mut bytes = vec![0; 1 << 20];
        universe.plant(0);
        let failed = carry_out(&mut router, &[Post::Send(1, envelope(0, 0), vec![region(&mut bytes)])]);
        let Err(Error::Remote(text)) = failed else { panic!("{failed:?}") };
        assert!(text.contains("planted error") && text.contains("ranks 0 and 1"), "{text}");
        router.cancel();
    });
}

#[test]
fn where_mpi_itself_fails_whoever_waits_is_told_and_mpi_is_not_finalised() {
    let (universe, setup) = two_nodes(29);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        let mut bytes = vec![0; 100];
        let all = [region(&mut bytes)];
        if me == 1 {
            let mut done = Vec::new();
            router.recv(0, Rank(0), envelope(0, 0), Sink::Store(&all)).unwrap();
            router.poll(&mut done).unwrap();
            universe.deafen(1);
            let end = Instant::now() + Duration::from_secs(10);
            let failed = loop {
                if let Err(error) = router.poll(&mut done) {
                    break error;
                }
                assert!(Instant::now() < end, "nobody was told");
            };
            assert!(failed.to_string().contains("planted error"), "{failed}");
            router.cancel();
        }
        drop(router);
        let left = worker(&setup, me).leave(Duration::from_secs(10));
        assert_eq!(left.is_ok(), me == 0, "{left:?}");
        exchange.allgather(Vec::new()).unwrap();
    });
    assert_eq!(universe.finalised(), [0]);
}

#[test]
fn after_a_cancel_mpi_is_not_finalised() {
    let (universe, setup) = two_nodes(31);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        exchange.allgather(Vec::new()).unwrap();
        router.cancel();
        drop(router);
        assert!(worker(&setup, me).leave(Duration::from_secs(10)).is_err());
    });
    assert!(universe.finalised().is_empty());
}

#[test]
fn an_end_of_mpi_that_never_comes_does_not_keep_the_process() {
    let (universe, setup) = two_nodes(35);
    universe.stick(0);
    threads_with(2, |me, exchange| {
        let router = setup.open(me, exchange);
        exchange.allgather(Vec::new()).unwrap();
        drop(router);
        let begin = Instant::now();
        let left = worker(&setup, me).leave(Duration::from_secs(1000));
        assert_eq!(left.is_ok(), me == 1, "{left:?}");
        assert!(begin.elapsed() < Duration::from_secs(20));
    });
}

/// As MPI's own handler of fatal errors does, it ends the process in the middle of a call.
#[test]
fn an_exit_handler_on_the_thread_that_calls_mpi_does_not_wait_for_it() {
    let (universe, setup) = two_nodes(37);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        let mut bytes = vec![0; 100_000];
        let all = [region(&mut bytes)];
        if me == 0 {
            let worker = worker(&setup, 0);
            let (told, tells) = std::sync::mpsc::channel();
            let left = worker.clone();
            universe.end_in_send(0, move || {
                let begin = Instant::now();
                let left = left.leave(Duration::from_secs(30));
                told.send((left, begin.elapsed())).unwrap();
            });
            router.send(0, Rank(1), envelope(0, 0), &all).unwrap();
            let (left, took) = tells.recv_timeout(Duration::from_secs(40)).expect("the handler returns");
            assert!(left.is_err() && took < Duration::from_secs(1), "{left:?} after {took:?}");
            // On another thread nobody waits for long either, however many communicators there are.
            let begin = Instant::now();
            assert!(worker.leave(Duration::from_secs(30)).is_err());
            assert!(begin.elapsed() < Duration::from_secs(10));
            std::mem::forget(router);
        }
        exchange.allgather(Vec::new()).unwrap();
    });
}

#[test]
fn an_end_of_the_process_does_not_wait_for_a_call_of_mpi_that_does_not_return() {
    let (universe, setup) = two_nodes(39);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        if me == 0 {
            universe.end_in_send(0, || {});
            let mut bytes = [0; 8];
            router.send(0, Rank(1), envelope(0, 0), &[region(&mut bytes)]).unwrap();
            let begin = Instant::now();
            assert!(worker(&setup, 0).leave(Duration::from_secs(30)).is_err());
            assert!(begin.elapsed() < Duration::from_secs(10));
            std::mem::forget(router);
        }
        exchange.allgather(Vec::new()).unwrap();
    });
}

#[test]
fn a_rank_that_has_left_holds_up_nobody_and_what_it_sent_arrives() {
    let (universe, setup) = two_nodes(41);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        if me == 0 {
            universe.silence(1, true);
            let mut bytes = [0; 8];
            for nth in 0..3 {
                router.send(nth, Rank(1), envelope(0, nth), &[region(&mut bytes)]).unwrap();
            }
            assert_eq!(router.undelivered(), [Rank(1)]);
            let begin = Instant::now();
            drop(router);
            assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
            // MPI can still be asked things, and other communicators made.
            worker(&setup, me).look().unwrap();
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(universe.made_and_freed().1, 0, "freed with messages under way");
            exchange.allgather(Vec::new()).unwrap();
            exchange.allgather(Vec::new()).unwrap();
            return;
        }
        exchange.allgather(Vec::new()).unwrap();
        universe.silence(1, false);
        let mut bytes = [1u8; 24];
        let all = region(&mut bytes);
        let sinks = [0, 1, 2].map(|nth| [all.part(8 * nth, 8)]);
        let posts: Vec<_> =
            (0..3).map(|nth| Post::Recv(0, envelope(0, nth as u64), Sink::Store(&sinks[nth]))).collect();
        carry_out(&mut router, &posts).unwrap();
        assert_eq!(bytes, [0; 24]);
        drop(router);
        exchange.allgather(Vec::new()).unwrap();
    });
    let end = Instant::now() + Duration::from_secs(10);
    while universe.made_and_freed() != (1, 1) {
        assert!(Instant::now() < end, "{:?}", universe.made_and_freed());
        std::thread::yield_now();
    }
}

#[test]
fn a_sender_on_many_streams_stops_at_so_many_bytes() {
    let (_, setup) = two_nodes(33);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        let mut bytes = vec![0; 8 << 10];
        let all = [region(&mut bytes)];
        let messages = || (0..10u16).flat_map(|channel| (0..30u64).map(move |sequence| envelope(channel, sequence)));
        if me == 1 {
            exchange.allgather(Vec::new()).unwrap();
            let posts: Vec<_> = messages().map(|envelope| Post::Recv(0, envelope, Sink::Store(&all))).collect();
            carry_out(&mut router, &posts).unwrap();
            return;
        }
        let (mut sent, mut at_first) = (0, None);
        for envelope in messages() {
            while router.send(sent, Rank(1), envelope, &all).unwrap() == Started::Busy {
                if at_first.is_none() {
                    at_first = Some(sent);
                    exchange.allgather(Vec::new()).unwrap();
                }
                router.poll(&mut Vec::new()).unwrap();
            }
            sent += 1;
        }
        // 1 MiB, and what the receiver has taken without being asked.
        assert!(at_first.is_some_and(|sent| (128..170).contains(&sent)), "{at_first:?}");
    });
}

#[test]
fn a_sender_stops_when_nobody_receives_and_goes_on_when_somebody_does() {
    let universe = Universe::new(2, None, 13);
    threads(&setup(Grid::blocks(&[1, 1]), &universe), |me, mut router| {
        for (size, most) in [(8usize, 48), (20_000, 8)] {
            let mut bytes = vec![0; size];
            let all = [region(&mut bytes)];
            let channel = size as u16;
            if me == 0 {
                let (mut sent, mut pending, mut done) = (0, 0, Vec::new());
                let end = Instant::now() + Duration::from_secs(20);
                while sent < 200 {
                    match router.send(sent, Rank(1), envelope(channel, sent), &all).unwrap() {
                        Started::Busy => router.poll(&mut done).unwrap(),
                        started => {
                            pending += usize::from(started == Started::Pending);
                            sent += 1;
                        }
                    }
                    assert!(Instant::now() < end);
                }
                while done.len() < pending {
                    router.poll(&mut done).unwrap();
                    assert!(Instant::now() < end);
                }
            } else {
                // More than may wait is never on its way, however long the receiver takes.
                assert!(most < 200);
                let posts: Vec<_> =
                    (0..200).map(|sequence| Post::Recv(0, envelope(channel, sequence), Sink::Store(&all))).collect();
                carry_out(&mut router, &posts).unwrap();
            }
        }
    });
}

#[test]
fn two_communicators_made_at_once_in_opposite_orders_both_come_about() {
    let (_, setup) = two_nodes(15);
    // MPI runs already when the two are made.
    threads(&setup, |_, _| {});
    for _ in 0..20 {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let setup = &setup;
                scope.spawn(move || {
                    threads(setup, |me, mut router| {
                        pass_one_message(me, &mut router);
                    });
                });
            }
        });
    }
}

#[test]
fn a_rank_that_sleeps_is_woken_by_mpi() {
    let universe = Universe::new(2, None, 17);
    threads(&setup(Grid::blocks(&[1, 1]), &universe), |me, mut router| {
        let mut bytes = vec![me as u8; 20_000];
        let all = [region(&mut bytes)];
        for round in 0..50 {
            if (me as u64 + round).is_multiple_of(2) {
                carry_out(&mut router, &[Post::Send(1 - me, envelope(0, round), all.to_vec())]).unwrap();
                continue;
            }
            let mut done = Vec::new();
            let sink = Sink::Store(&all);
            if router.recv(0, Rank(1 - me as u32), envelope(0, round), sink).unwrap() == Started::Done {
                continue;
            }
            while done.is_empty() {
                let begin = Instant::now();
                router.sleep(Duration::from_secs(20)).unwrap();
                assert!(begin.elapsed() < Duration::from_secs(10), "a wake-up was lost");
                router.poll(&mut done).unwrap();
            }
        }
    });
}

#[test]
fn one_node_or_a_wish_for_tcp_leaves_mpi_alone() {
    let universe = Universe::new(2, None, 19);
    threads(&setup(Grid::flat(2), &universe), |_, _| {});
    let tcp = setup(Grid::blocks(&[1, 1]), &universe).with(|config| config.inter = Inter::Only(Carrier::TCP));
    threads(&tcp, |_, _| {});
    let low = Universe::new(2, Some(thread_level::FUNNELED), 19);
    threads(&setup(Grid::blocks(&[1, 1]), &low), |me, router| everything(me, router, 2));
    assert_eq!(universe.calls(), 0);
    assert!(low.calls() <= 2, "a look at its state each, and nothing more");
}

#[test]
fn with_a_carrier_that_does_not_exist_no_communicator_is_made() {
    let universe = Universe::new(2, None, 20);
    let setup = setup(Grid::blocks(&[1, 1]), &universe).with(|config| config.inter = "infiniband".parse().unwrap());
    threads_with(2, |me, exchange| {
        let Err(Error::InvalidUsage(why)) = setup.try_open(me, exchange) else { panic!("it was made") };
        assert!(why.contains("STRATA_INTER=infiniband"), "{why}");
    });
}

#[test]
fn a_table_of_another_version_is_refused_with_a_message() {
    let size = size_of::<super::vtable::Vtable>() as u32;
    assert_eq!(super::calls::MpiCalls::version(VERSION, size), Ok(()));
    for (version, size) in [(VERSION + 1, size), (0, size), (VERSION, size - 8)] {
        let why = super::calls::MpiCalls::version(version, size).unwrap_err();
        assert!(why.contains(&version.to_string()) && why.contains("scripts/build-mpi"), "{why}");
    }
}

#[test]
fn when_the_program_finalises_mpi_nothing_of_ours_is_pending_and_no_call_follows() {
    let universe = Universe::new(2, Some(thread_level::MULTIPLE), 21);
    let setup = setup(Grid::blocks(&[1, 1]), &universe);
    threads_with(2, |me, exchange| {
        let mut router = setup.open(me, exchange);
        let mut other = setup.open(me, exchange);
        let mut bytes = vec![me as u8; 100_000];
        let all = [region(&mut bytes)];
        let post = match me {
            0 => Post::Send(1, envelope(0, 0), all.to_vec()),
            _ => Post::Recv(0, envelope(0, 0), Sink::Store(&all)),
        };
        carry_out(&mut router, &[post]).unwrap();
        exchange.allgather(Vec::new()).unwrap();
        // Like a program's thread that is in MPI_Finalize.
        universe.take_place(me);
        worker(&setup, me).retire();
        exchange.allgather(Vec::new()).unwrap();
        assert_eq!(universe.pending(), 0, "receives are left behind");
        let before = universe.calls();
        for router in [&mut router, &mut other] {
            let failed = carry_out(router, &[Post::Send(1 - me, envelope(0, 1), all.to_vec())]);
            let Err(Error::InvalidUsage(text)) = failed else { panic!("{failed:?}") };
            assert!(text.contains("the program has finalised MPI"), "{text}");
        }
        router.cancel();
        other.cancel();
        drop((router, other));
        exchange.allgather(Vec::new()).unwrap();
        assert_eq!(universe.calls(), before, "MPI was called after its end");
    });
    let mut hooks = universe.hooks();
    hooks.sort_unstable();
    assert_eq!(hooks, [0, 1], "each process asks once to hear of the end, however many communicators it makes");
}

#[test]
fn a_program_with_an_mpi_that_it_has_not_initialised_keeps_it_unless_mpi_is_asked_for() {
    for (inter, used) in [("auto", false), ("mpi", true)] {
        let universe = Universe::new(2, None, 23);
        let sites = [0, 1].map(|rank| Arc::new(universe.site_with(rank, true)));
        let site = move |rank: usize| sites[rank].clone();
        let setup = Setup { sites: Some(Arc::new(site)), ..Setup::new(Grid::blocks(&[1, 1])) };
        threads(&setup.with(|config| config.inter = inter.parse().unwrap()), |me, router| everything(me, router, 2));
        assert_eq!(universe.calls() > 100, used, "{inter}");
    }
}
