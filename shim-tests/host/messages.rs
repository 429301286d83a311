//! Sends and receives on communicators of `strataCommInitHost`: they wait for nothing but their partners, and keep their
//! order for each peer and direction.

use crate::world::region;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc, Barrier};
use std::time::{Duration, Instant};
use strata::communicator::{
    launch, CollectiveCall, Comm, CommOptions, Elements, InitParams, Launch, OnHost, Operation,
};
use strata::device::host::stream::HostStream;
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::{Error, Result};
use strata::plan::Collective;
use strata::topo::{Grid, Rank};

static NEVER: AtomicBool = AtomicBool::new(false);
/// So long that no transport takes it before its receive is there.
const LONG: usize = 4 << 20;

/// Runs `body` on every rank of `grid`, each in a thread with a communicator of the host of its own.
fn run(grid: Grid, timeout_ms: Option<u64>, body: impl Fn(&Arc<Comm>, &Barrier) + Send + Sync + 'static) {
    let (nranks, grid, body) = (grid.nranks(), Arc::new(grid), Arc::new(body));
    let (id, barrier) = (Comm::unique_id().expect("a unique id"), Arc::new(Barrier::new(nranks)));
    let (send, done) = mpsc::channel();
    let threads: Vec<_> = (0..nranks)
        .map(|rank| {
            let (grid, body, barrier, send) = (grid.clone(), body.clone(), barrier.clone(), send.clone());
            std::thread::spawn(move || {
                let host_id = Some(format!("node{}", grid.node(Rank::from_index(rank)).index()));
                let options = CommOptions { host_id, on_host: Some(OnHost { timeout_ms }), ..CommOptions::default() };
                let params = InitParams { nranks, rank, ids: vec![id], options, device: 0, gpu: None };
                let comm = Comm::init(params, &NEVER).expect("init");
                body(&comm, &barrier);
                send.send(rank).ok();
            })
        })
        .collect();
    drop(send);
    let ended = (0..nranks).map_while(|_| done.recv_timeout(Duration::from_secs(200)).ok()).count();
    assert!(ended == nranks, "{} ranks on {grid} did not end", nranks - ended);
    threads.into_iter().for_each(|thread| thread.join().expect("a rank's thread"));
}

fn two_ranks() -> [Grid; 2] {
    [Grid::flat(2), Grid::blocks(&[1, 1])]
}

fn send_to(comm: &Arc<Comm>, to: usize, data: &mut [u8], stream: &StreamRef) -> Result<()> {
    let elements = Elements { count: data.len(), dtype: DataType::U8 };
    let operation = Operation::Send { to: Rank::from_index(to), data: region(data), elements };
    launch(vec![Launch { comm: comm.clone(), operation, stream: stream.clone() }])
}

fn recv_from(comm: &Arc<Comm>, from: usize, data: &mut [u8], stream: &StreamRef) -> Result<()> {
    let elements = Elements { count: data.len(), dtype: DataType::U8 };
    let operation = Operation::Recv { from: Rank::from_index(from), data: region(data), elements };
    launch(vec![Launch { comm: comm.clone(), operation, stream: stream.clone() }])
}

fn sum(comm: &Arc<Comm>, number: i32, stream: &StreamRef) -> Result<i32> {
    let (mut send, mut recv) = (number.to_le_bytes(), [0; 4]);
    let call = CollectiveCall {
        collective: Collective::AllReduce,
        input: region(&mut send),
        output: region(&mut recv),
        count: 1,
        blocks: None,
        joined: None,
        tag: 0,
        dtype: DataType::I32,
        reduction: Some(Reduction::new(RedOp::Sum, DataType::I32, comm.nranks())),
        factor_at: None,
        residual: None,
        root: Rank(0),
        algorithm: None,
        decision: None,
    };
    launch(vec![Launch { comm: comm.clone(), operation: Operation::Collective(call), stream: stream.clone() }])?;
    synchronize(stream)?;
    Ok(i32::from_le_bytes(recv))
}

fn synchronize(stream: &StreamRef) -> Result<()> {
    match stream {
        StreamRef::Stream(stream) => stream.synchronize(),
        _ => Ok(()),
    }
}

fn streams(count: usize) -> Vec<StreamRef> {
    (0..count).map(|_| StreamRef::Stream(HostStream::new())).collect()
}

/// Ends the streams' threads.
fn close(streams: &[StreamRef]) {
    streams.iter().for_each(|stream| match stream {
        StreamRef::Stream(stream) => stream.close(),
        _ => unreachable!("only streams of this file"),
    });
}

/// Bytes that tell who sent them as which message.
fn content(from: usize, to: usize, number: usize, len: usize) -> Vec<u8> {
    let seed = 1 + from * 7919 + to * 104_729 + number * 1_299_709;
    (0..len).map(|at| (seed.wrapping_mul(at + 1) >> 7) as u8).collect()
}

#[test]
fn two_ranks_that_both_send_and_then_receive_on_two_streams_do_not_wait_for_each_other() {
    for grid in two_ranks() {
        run(grid, Some(60_000), |comm, barrier| {
            let (me, peer) = (comm.rank(), 1 - comm.rank());
            let both = streams(2);
            for round in 0..20 {
                let mut out = content(me, peer, round, LONG);
                let mut back = vec![0; LONG];
                send_to(comm, peer, &mut out, &both[0]).unwrap();
                barrier.wait();
                recv_from(comm, peer, &mut back, &both[1]).unwrap();
                both.iter().for_each(|stream| synchronize(stream).unwrap());
                assert!(back == content(peer, me, round, LONG), "round {round}");
            }
            close(&both);
            comm.destroy().unwrap();
        });
    }
}

#[test]
fn two_ranks_that_both_send_and_then_receive_on_one_stream_do_not_wait_for_each_other() {
    for grid in two_ranks() {
        run(grid, Some(60_000), |comm, barrier| {
            let (me, peer) = (comm.rank(), 1 - comm.rank());
            let stream = &streams(1)[0];
            for round in 0..20 {
                let mut out: Vec<Vec<u8>> = (0..3).map(|number| content(me, peer, 3 * round + number, LONG)).collect();
                let mut back = vec![vec![0; LONG]; 3];
                out.iter_mut().for_each(|data| send_to(comm, peer, data, stream).unwrap());
                if round % 2 == 0 {
                    // The receives come to a thread that sleeps.
                    barrier.wait();
                    std::thread::sleep(Duration::from_millis(5));
                }
                back.iter_mut().for_each(|data| recv_from(comm, peer, data, stream).unwrap());
                synchronize(stream).unwrap();
                for (number, data) in back.iter().enumerate() {
                    assert!(*data == content(peer, me, 3 * round + number, LONG), "round {round}, {number}");
                }
            }
            close(std::slice::from_ref(stream));
            comm.destroy().unwrap();
        });
    }
}

/// Groups of messages on one stream, of which the first has nobody yet who takes it.
#[test]
fn groups_on_one_stream_do_not_wait_for_each_other_either() {
    run(Grid::blocks(&[2, 1]), Some(60_000), |comm, _| {
        let (me, nranks) = (comm.rank(), comm.nranks());
        let stream = &streams(1)[0];
        for round in 0..20 {
            let others: Vec<usize> = (0..nranks).filter(|&rank| rank != me).collect();
            let mut out: Vec<Vec<u8>> = others.iter().map(|&to| content(me, to, round, LONG)).collect();
            let mut back = vec![vec![0; LONG]; others.len()];
            let elements = Elements { count: LONG, dtype: DataType::U8 };
            let sends = others.iter().zip(&mut out).map(|(&to, data)| {
                let operation = Operation::Send { to: Rank::from_index(to), data: region(data), elements };
                Launch { comm: comm.clone(), operation, stream: stream.clone() }
            });
            launch(sends.collect()).unwrap();
            let receives = others.iter().zip(&mut back).map(|(&from, data)| {
                let operation = Operation::Recv { from: Rank::from_index(from), data: region(data), elements };
                Launch { comm: comm.clone(), operation, stream: stream.clone() }
            });
            launch(receives.collect()).unwrap();
            synchronize(stream).unwrap();
            for (&from, data) in others.iter().zip(&back) {
                assert!(*data == content(from, me, round, LONG), "round {round}, from rank {from}");
            }
        }
        close(std::slice::from_ref(stream));
        comm.destroy().unwrap();
    });
}

/// What a stream has received it may send on, and what it has sent it may overwrite; and a function of the program comes
/// after what is before it.
#[test]
fn messages_of_one_stream_have_its_order_where_that_shows() {
    for grid in [Grid::flat(3), Grid::blocks(&[2, 1])] {
        run(grid, Some(60_000), |comm, barrier| {
            let (me, nranks) = (comm.rank(), comm.nranks());
            let (next, before) = ((me + 1) % nranks, (me + nranks - 1) % nranks);
            let stream = &streams(1)[0];
            for len in [100, LONG] {
                // Rank 0's bytes go round in each rank's one buffer, and come back.
                let mut data = if me == 0 { content(0, 0, len, len) } else { vec![0; len] };
                if me == 0 {
                    send_to(comm, next, &mut data, stream).unwrap();
                    recv_from(comm, before, &mut data, stream).unwrap();
                } else {
                    recv_from(comm, before, &mut data, stream).unwrap();
                    send_to(comm, next, &mut data, stream).unwrap();
                }
                synchronize(stream).unwrap();
                assert!(data == content(0, 0, len, len));
                // A send behind a receive tells that this has ended, whatever memory it is of.
                let (mut got, mut word) = ([0; 1], [1; 1]);
                if me == 0 {
                    recv_from(comm, next, &mut got, stream).unwrap();
                    std::thread::sleep(Duration::from_millis(20));
                    let query = |stream: &StreamRef| match stream {
                        StreamRef::Stream(stream) => stream.query(),
                        _ => unreachable!("only streams of this file"),
                    };
                    assert_eq!(query(stream), Err(Error::InProgress), "rank 1 has not got its word yet");
                    send_to(comm, next, &mut word, &StreamRef::Null).unwrap();
                } else if me == 1 {
                    recv_from(comm, before, &mut got, stream).unwrap();
                    send_to(comm, before, &mut word, stream).unwrap();
                }
                synchronize(stream).unwrap();
                // A function comes after the send before it, which nobody takes yet.
                let called = Arc::new(AtomicBool::new(false));
                let mut data = vec![7; LONG];
                if me == 0 {
                    send_to(comm, next, &mut data, stream).unwrap();
                    let call = called.clone();
                    let note = move || {
                        call.store(true, Ordering::SeqCst);
                        Ok(())
                    };
                    stream.enqueue(note).unwrap();
                    recv_from(comm, next, &mut got, stream).unwrap();
                    std::thread::sleep(Duration::from_millis(20));
                    assert!(!called.load(Ordering::SeqCst));
                }
                barrier.wait();
                if me == 1 {
                    recv_from(comm, before, &mut data, stream).unwrap();
                    send_to(comm, before, &mut word, stream).unwrap();
                }
                synchronize(stream).unwrap();
                assert!(me > 0 || called.load(Ordering::SeqCst));
            }
            close(std::slice::from_ref(stream));
            comm.destroy().unwrap();
        });
    }
}

/// Threads that use one stream put their messages on it in the order in which these are numbered.
#[test]
fn threads_may_share_a_stream_and_one_that_takes_no_job_leaves_the_order_as_it_was() {
    for grid in two_ranks() {
        run(grid, Some(60_000), |comm, _| {
            let (peer, all) = (1 - comm.rank(), streams(3));
            close(&all[2..]);
            std::thread::scope(|scope| {
                for thread in 0..4u8 {
                    let all = &all;
                    scope.spawn(move || {
                        let (mut out, mut back) = ([[thread; 1]; 100], [[u8::MAX; 1]; 100]);
                        for (round, (out, back)) in out.iter_mut().zip(&mut back).enumerate() {
                            send_to(comm, peer, out, &all[round % 2]).unwrap();
                            recv_from(comm, peer, back, &all[round % 2]).unwrap();
                            if round % 10 == 0 {
                                assert!(matches!(send_to(comm, peer, out, &all[2]), Err(Error::InvalidArgument(_))));
                            }
                        }
                        all[..2].iter().for_each(|stream| synchronize(stream).unwrap());
                        assert!(back.iter().all(|[from]| *from < 4));
                    });
                }
            });
            close(&all[..2]);
            comm.destroy().unwrap();
        });
    }
}

#[test]
fn two_threads_may_send_and_receive_on_the_null_stream_at_once() {
    for grid in two_ranks() {
        run(grid, Some(60_000), |comm, _| {
            let (me, peer) = (comm.rank(), 1 - comm.rank());
            for round in 0..20 {
                let mut out = content(me, peer, round, LONG);
                let mut back = vec![0; LONG];
                std::thread::scope(|scope| {
                    scope.spawn(|| send_to(comm, peer, &mut out, &StreamRef::Null).unwrap());
                    recv_from(comm, peer, &mut back, &StreamRef::Null).unwrap();
                });
                assert!(back == content(peer, me, round, LONG), "round {round}");
            }
            comm.destroy().unwrap();
        });
    }
}

#[test]
fn messages_and_collectives_do_not_wait_for_each_other() {
    for grid in two_ranks() {
        run(grid, Some(60_000), |comm, _| {
            let (me, peer) = (comm.rank(), 1 - comm.rank());
            let all = streams(3);
            let mut out = content(me, peer, 0, LONG);
            let mut back = vec![0; LONG];
            // Both send, then all sum, then both receive; and the other way round.
            send_to(comm, peer, &mut out, &all[0]).unwrap();
            for round in 0..100 {
                assert_eq!(sum(comm, round + me as i32, &StreamRef::Null), Ok(2 * round + 1));
            }
            recv_from(comm, peer, &mut back, &all[1]).unwrap();
            for round in 0..100 {
                assert_eq!(sum(comm, round + me as i32, &all[2]), Ok(2 * round + 1));
            }
            all.iter().for_each(|stream| synchronize(stream).unwrap());
            assert!(back == content(peer, me, 0, LONG));
            back.fill(0);
            recv_from(comm, peer, &mut back, &all[1]).unwrap();
            assert_eq!(sum(comm, 1, &StreamRef::Null), Ok(2));
            send_to(comm, peer, &mut out, &StreamRef::Null).unwrap();
            synchronize(&all[1]).unwrap();
            assert!(back == content(peer, me, 0, LONG));
            close(&all);
            comm.destroy().unwrap();
        });
    }
}

/// Sizes on both sides of everything that the transports tell apart, the same on all ranks.
fn size(from: usize, to: usize, number: usize) -> usize {
    let draw = 1 + (from * 31 + to * 17 + number * 2_654_435_761) % 1009;
    match draw % 10 {
        0 => 300_000 + draw,
        1 | 2 => 20_000 + draw,
        _ => draw,
    }
}

/// More messages than a channel takes before they are received, from streams to streams that need not correspond.
#[test]
fn messages_of_one_direction_keep_their_order_whatever_streams_they_are_on() {
    const MESSAGES: usize = 600;
    for grid in [Grid::flat(3), Grid::blocks(&[2, 1])] {
        run(grid, Some(60_000), |comm, barrier| {
            let (me, nranks) = (comm.rank(), comm.nranks());
            let others: Vec<usize> = (0..nranks).filter(|&rank| rank != me).collect();
            let all = streams(5);
            let bytes = |from, to, number| content(from, to, number, size(from, to, number));
            let mut out: Vec<Vec<u8>> = Vec::new();
            for number in 0..MESSAGES {
                for &peer in &others {
                    let mut data = bytes(me, peer, number);
                    send_to(comm, peer, &mut data, &all[(number * 3 + peer) % 3]).unwrap();
                    out.push(data);
                }
            }
            if me == 0 {
                // The others' sends wait for a while.
                std::thread::sleep(Duration::from_millis(50));
            }
            barrier.wait();
            let mut back: Vec<(usize, usize, Vec<u8>)> = Vec::new();
            for number in 0..MESSAGES {
                for &peer in &others {
                    let mut data = vec![0; size(peer, me, number)];
                    recv_from(comm, peer, &mut data, &all[3 + number % 2]).unwrap();
                    back.push((peer, number, data));
                }
                if number % 100 == 50 {
                    assert_eq!(sum(comm, 1, &StreamRef::Null), Ok(nranks as i32));
                }
            }
            all.iter().for_each(|stream| synchronize(stream).unwrap());
            for (peer, number, data) in back {
                assert!(data == bytes(peer, me, number), "message {number} from rank {peer}");
            }
            close(&all);
            comm.destroy().unwrap();
        });
    }
}

/// A group of messages ends when all of them have; one with collectives as well does them first.
#[test]
fn groups_and_messages_to_oneself_and_to_others_go_on_together() {
    run(Grid::blocks(&[2, 2]), Some(60_000), |comm, _| {
        let (me, nranks) = (comm.rank(), comm.nranks());
        let stream = &streams(1)[0];
        let mut pending = vec![0; LONG];
        recv_from(comm, (me + 1) % nranks, &mut pending, stream).unwrap();
        let mut out: Vec<Vec<u8>> = (0..nranks).map(|to| content(me, to, 1, 5000 + to)).collect();
        let mut back: Vec<Vec<u8>> = vec![vec![0; 5000 + me]; nranks];
        let (mut ones, mut sums) = (1i32.to_le_bytes(), [0; 4]);
        let mut batch = Vec::new();
        let dtype = DataType::U8;
        for peer in 0..nranks {
            let rank = Rank::from_index(peer);
            let (sent, received) = (region(&mut out[peer]), region(&mut back[peer]));
            let count = |count| Elements { count, dtype };
            batch.push(Operation::Send { to: rank, data: sent, elements: count(5000 + peer) });
            batch.push(Operation::Recv { from: rank, data: received, elements: count(5000 + me) });
        }
        batch.push(Operation::Collective(CollectiveCall {
            collective: Collective::AllReduce,
            input: region(&mut ones),
            output: region(&mut sums),
            count: 1,
            blocks: None,
            joined: None,
            tag: 0,
            dtype: DataType::I32,
            reduction: Some(Reduction::new(RedOp::Sum, DataType::I32, nranks)),
            factor_at: None,
            residual: None,
            root: Rank(0),
            algorithm: None,
            decision: None,
        }));
        // What rank 0 receives from rank 1 is behind its pending receive, so rank 1 sends that first.
        let mut late = content(me, (me + nranks - 1) % nranks, 0, LONG);
        let sends = streams(1);
        send_to(comm, (me + nranks - 1) % nranks, &mut late, &sends[0]).unwrap();
        let launches =
            batch.into_iter().map(|operation| Launch { comm: comm.clone(), operation, stream: StreamRef::Null });
        launch(launches.collect()).unwrap();
        assert_eq!(i32::from_le_bytes(sums), nranks as i32);
        for (peer, data) in back.iter().enumerate() {
            assert!(*data == content(peer, me, 1, 5000 + me), "from rank {peer}");
        }
        synchronize(stream).unwrap();
        synchronize(&sends[0]).unwrap();
        assert!(pending == content((me + 1) % nranks, me, 0, LONG));
        close(&sends);
        close(std::slice::from_ref(stream));
        comm.destroy().unwrap();
    });
}

/// What a rank waits for can be told from what it does not wait for.
#[test]
fn a_message_that_nobody_takes_times_out_and_one_of_a_rank_that_leaves_fails_and_destroy_waits_for_the_rest() {
    for grid in two_ranks() {
        run(grid.clone(), Some(500), |comm, barrier| {
            let peer = 1 - comm.rank();
            let all = streams(2);
            let (mut out, mut back) = (vec![1; LONG], vec![0; LONG]);
            if comm.rank() == 0 {
                let begun = Instant::now();
                send_to(comm, peer, &mut out, &all[0]).unwrap();
                recv_from(comm, peer, &mut back, &all[1]).unwrap();
                let outcomes = all.iter().map(|stream| synchronize(stream).unwrap_err());
                let texts: Vec<Error> = outcomes.collect();
                assert!(texts.iter().all(|error| error.text().contains("rank 1")), "{texts:?}");
                assert!(texts.iter().all(|error| error.code() == 8), "{texts:?}");
                assert!((500..15_000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
            }
            barrier.wait();
            close(&all);
            comm.abort();
        });
        run(grid.clone(), None, |comm, barrier| {
            let peer = 1 - comm.rank();
            let all = streams(2);
            let (mut out, mut back) = (vec![1; LONG], vec![0; LONG]);
            if comm.rank() == 0 {
                send_to(comm, peer, &mut out, &all[0]).unwrap();
                recv_from(comm, peer, &mut back, &all[1]).unwrap();
                barrier.wait();
                let begun = Instant::now();
                for stream in &all {
                    let error = synchronize(stream).unwrap_err();
                    assert!(matches!(&error, Error::Remote(text) if text.contains("rank 1")), "{error:?}");
                }
                assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
            } else {
                barrier.wait();
            }
            close(&all);
            comm.abort();
        });
        run(grid, None, |comm, _| {
            let peer = 1 - comm.rank();
            let all = streams(2);
            let (mut out, mut back) = (content(comm.rank(), peer, 3, LONG), vec![0; LONG]);
            send_to(comm, peer, &mut out, &all[0]).unwrap();
            recv_from(comm, peer, &mut back, &all[1]).unwrap();
            comm.destroy().unwrap();
            assert!(back == content(peer, comm.rank(), 3, LONG));
            close(&all);
        });
    }
}

/// Many threads wait for messages at once while others sum: whoever watches lets the others in.
#[test]
fn threads_that_wait_at_once_all_get_what_is_theirs() {
    const THREADS: usize = 6;
    for grid in two_ranks() {
        run(grid, Some(60_000), |comm, _| {
            let (me, peer) = (comm.rank(), 1 - comm.rank());
            let twins: Vec<Arc<Comm>> = vec![comm.split(0, 0, comm.options().clone(), &NEVER).unwrap().unwrap()];
            let twin = &twins[0];
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    scope.spawn(move || {
                        // One direction's threads have one order only together, so each says which message it is.
                        for round in 0..50 {
                            let mut data = [u8::MAX; 2];
                            let mut word = [thread as u8, round];
                            match (thread + me) % 2 {
                                0 => send_to(twin, peer, &mut word, &StreamRef::Null).unwrap(),
                                _ => recv_from(twin, peer, &mut data, &StreamRef::Null).unwrap(),
                            }
                            assert!((thread + me) % 2 == 0 || (data[0] < THREADS as u8 && data[1] < 50));
                        }
                    });
                }
                scope.spawn(move || {
                    for round in 0..200 {
                        assert_eq!(sum(twin, round + me as i32, &StreamRef::Null), Ok(2 * round + 1));
                    }
                });
            });
            twin.destroy().unwrap();
            comm.destroy().unwrap();
        });
    }
}
