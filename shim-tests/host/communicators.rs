//! The life of communicators: split, shrink, grow, finalize, abort, revoke, several at once, streams, send and receive.

use crate::again::{again, passes};
use crate::world::{self, launch_all, region, run};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use strata::communicator::{launch, CollectiveCall, Comm, CommOptions, Elements, InitParams, Launch, Operation};
use strata::device::host::stream::HostStream;
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::error::Error;
use strata::plan::Collective;
use strata::topo::{Grid, Rank};

static NEVER: AtomicBool = AtomicBool::new(false);

/// Sums one number of each rank over `comm`.
fn sum(comm: &Arc<Comm>, number: i32) -> strata::error::Result<i32> {
    let mut send = number.to_le_bytes().to_vec();
    let mut recv = vec![0; 4];
    let call = sum_call(comm, &mut send, &mut recv);
    launch_all(vec![Launch { comm: comm.clone(), operation: Operation::Collective(call), stream: StreamRef::Null }])?;
    Ok(i32::from_le_bytes(recv[..].try_into().expect("four bytes")))
}

fn sum_call(comm: &Comm, send: &mut [u8], recv: &mut [u8]) -> CollectiveCall {
    CollectiveCall {
        collective: Collective::AllReduce,
        input: region(send),
        output: region(recv),
        count: send.len() / 4,
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
    }
}

#[test]
fn a_split_gives_each_color_its_own_ranks_in_key_order() {
    run(Grid::blocks(&[3, 3]), |member| {
        let rank = member.rank as i32;
        let color = if rank == 5 { -1 } else { rank % 2 };
        let child = member.comm.split(color, -rank, CommOptions::default(), &NEVER).expect("split");
        let Some(child) = child else {
            assert_eq!(rank, 5);
            return;
        };
        let (nranks, first) = if color == 0 { (3, 4) } else { (2, 3) };
        assert_eq!(child.nranks(), nranks);
        assert_eq!(child.rank() as i32, (first - rank) / 2, "ordered by descending parent rank");
        let expected = if color == 0 { 6 } else { 4 };
        assert_eq!(sum(&child, rank).expect("sum"), expected);
        child.destroy().expect("destroy");
    });
}

#[test]
fn a_shrunk_communicator_works_without_the_excluded_rank_and_the_parent_still_too() {
    run(Grid::blocks(&[2, 2]), |member| {
        if member.rank != 1 {
            let child = member.comm.shrink(&[1], false, CommOptions::default(), &NEVER).expect("shrink");
            assert_eq!(child.nranks(), 3);
            assert_eq!(sum(&child, member.rank as i32).expect("sum"), 5);
            child.destroy().expect("destroy");
        }
        assert_eq!(sum(&member.comm, 1).expect("sum"), 4);
    });
}

#[test]
fn new_ranks_join_by_growing() {
    let id = Arc::new(Mutex::new(None));
    run(Grid::flat(3), move |member| {
        // Rank 2 of the thread world plays the newcomer: it takes no part in the first communicator's growth.
        let two = if member.rank < 2 { 0 } else { -1 };
        let old = member.comm.split(two, member.rank as i32, CommOptions::default(), &NEVER).expect("split");
        if member.rank == 0 {
            let fresh = old.as_ref().expect("in it").grow_id().expect("id");
            assert!(old.as_ref().expect("in it").grow_id().is_err(), "one id at a time");
            *id.lock().unwrap() = Some(fresh);
        }
        member.barrier.wait();
        let given = (member.rank != 1).then(|| id.lock().unwrap().expect("set"));
        let rank = (member.rank == 2).then_some(2);
        let grown = Comm::grow(old.as_ref(), 3, given, rank, world::options(), &NEVER).expect("grow");
        assert_eq!((grown.rank(), grown.nranks()), (member.rank, 3));
        assert_eq!(sum(&grown, 1 << member.rank).expect("sum"), 7);
        grown.destroy().expect("destroy");
    });
}

#[test]
fn a_revoked_communicator_refuses_operations_but_can_be_shrunk() {
    run(Grid::flat(3), |member| {
        assert_eq!(sum(&member.comm, 1).expect("sum"), 3);
        member.barrier.wait();
        member.comm.revoke().expect("revoke");
        assert!(matches!(member.comm.usable(), Err(Error::InvalidUsage(_))));
        assert!(matches!(member.comm.finalize(), Err(Error::InvalidUsage(_))));
        let child = member.comm.shrink(&[], false, CommOptions::default(), &NEVER).expect("shrink");
        assert_eq!(sum(&child, 2).expect("sum"), 6);
        child.destroy().expect("destroy");
    });
}

#[test]
fn an_abort_ends_the_others_calls_with_an_error() {
    run(Grid::blocks(&[2, 1]), |member| {
        let twin = member.comm.split(0, 0, CommOptions::default(), &NEVER).expect("split").expect("in it");
        if member.rank == 2 {
            twin.abort();
            twin.abort();
        } else {
            let error = sum(&twin, 1).expect_err("rank 2 aborted");
            assert!(matches!(&error, Error::Remote(text) if text.contains("rank 2")), "{error:?}");
            assert_eq!(twin.failure(), Some(error));
            twin.abort();
        }
    });
}

#[test]
fn who_waits_for_a_message_of_a_rank_that_has_left_hears_of_it() {
    // The last rank leaves each pair of neighbours: one of them is on its node and one is not.
    run(Grid::blocks(&[2, 1]), |member| {
        for pair in [[0, 1], [0, 2]] {
            let color = if pair.contains(&member.rank) { 0 } else { -1 };
            let Some(twin) = member.comm.split(color, 0, CommOptions::default(), &NEVER).expect("split") else {
                continue;
            };
            if twin.rank() == 1 {
                twin.abort();
                continue;
            }
            for receives in [true, false] {
                let mut data = vec![0u8; 3_000_000];
                let elements = Elements { count: data.len(), dtype: DataType::U8 };
                let (peer, data) = (Rank(1), region(&mut data));
                let operation = match receives {
                    true => Operation::Recv { from: peer, data, elements },
                    false => Operation::Send { to: peer, data, elements },
                };
                let begun = Instant::now();
                let one = Launch { comm: twin.clone(), operation, stream: StreamRef::Null };
                let error = launch(vec![one]).expect_err("rank 1 has left");
                assert!(matches!(&error, Error::Remote(text) if text.contains("rank 1")), "{error:?}");
                // Far less than STRATA_TIMEOUT_MS.
                assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
            }
            twin.abort();
        }
    });
}

#[test]
fn who_makes_a_communicator_with_a_rank_that_has_left_hears_of_it() {
    run(Grid::blocks(&[2, 1]), |member| {
        let twin = member.comm.split(0, 0, CommOptions::default(), &NEVER).expect("split").expect("in it");
        if member.rank > 0 {
            return twin.destroy().expect("destroy");
        }
        for shrinks in [false, true] {
            let begun = Instant::now();
            let outcome = match shrinks {
                false => twin.split(0, 0, CommOptions::default(), &NEVER).map(drop),
                true => twin.shrink(&[2], false, CommOptions::default(), &NEVER).map(drop),
            };
            let error = outcome.expect_err("the others have left");
            assert!(matches!(&error, Error::Remote(text) if text.contains("has left the communicator")), "{error:?}");
            // Far less than STRATA_BOOTSTRAP_TIMEOUT_MS.
            assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        }
        twin.abort();
    });
}

/// Survivors of a failure do not notice it together: one may have tried in vain before another comes.
#[test]
fn a_shrink_that_has_timed_out_may_be_tried_again_with_ranks_that_come_late() {
    const LIMIT_MS: (&str, &str) = ("STRATA_BOOTSTRAP_TIMEOUT_MS", "3000");
    if std::env::var(LIMIT_MS.0).as_deref() != Ok(LIMIT_MS.1) {
        let this = "a_shrink_that_has_timed_out_may_be_tried_again_with_ranks_that_come_late";
        passes(again(module_path!(), this).env(LIMIT_MS.0, LIMIT_MS.1));
        return;
    }
    run(Grid::blocks(&[2, 1]), |member| {
        let shrink = || member.comm.shrink(&[1], false, CommOptions::default(), &NEVER);
        match member.rank {
            0 => assert!(matches!(shrink(), Err(Error::Timeout(_)))),
            1 => return std::thread::sleep(Duration::from_secs(6)),
            _ => std::thread::sleep(Duration::from_millis(4000)),
        }
        let child = shrink().expect("both are there");
        assert_eq!(sum(&child, 1).expect("sum"), 2);
        child.destroy().expect("destroy");
    });
}

#[test]
fn a_cancelled_split_shrink_or_grow_ends_and_the_others_are_told() {
    run(Grid::blocks(&[2, 1]), |member| {
        let comm = &member.comm;
        let cancel = AtomicBool::new(member.rank == 1);
        for round in 0..3 {
            // Rank 0 does not come: only the cancelling ends it.
            let outcome = match (member.rank, round) {
                (0, _) => continue,
                (_, 0) => comm.split(0, 0, CommOptions::default(), &cancel).map(drop),
                (_, 1) => comm.shrink(&[], false, CommOptions::default(), &cancel).map(drop),
                _ => Comm::grow(Some(comm), 4, None, None, CommOptions::default(), &cancel).map(drop),
            };
            let error = outcome.expect_err("rank 1 has cancelled it");
            match member.rank {
                1 => assert!(matches!(&error, Error::InvalidUsage(text) if text.contains("aborted")), "{error:?}"),
                _ => assert!(matches!(&error, Error::Remote(text) if text.contains("rank 1 (")), "{error:?}"),
            }
        }
        member.barrier.wait();
        assert_eq!(sum(comm, 1).expect("the parent is as it was"), 3);
    });
}

#[test]
fn finalize_is_allowed_once_and_ends_use() {
    run(Grid::flat(2), |member| {
        let twin = member.comm.split(0, 0, CommOptions::default(), &NEVER).expect("split").expect("in it");
        assert_eq!(sum(&twin, 1).expect("sum"), 2);
        twin.finalize().expect("finalize");
        assert!(matches!(twin.finalize(), Err(Error::InvalidArgument(_))));
        assert!(twin.usable().is_err());
        twin.destroy().expect("destroy");
        assert!(matches!(twin.destroy(), Err(Error::InvalidArgument(_))));
    });
}

#[test]
fn operations_on_a_stream_run_in_order_and_without_blocking_the_caller() {
    if world::is_on_device() {
        return println!("SKIPPED: host streams are the host's; the program rails does this on a device");
    }
    run(Grid::blocks(&[2, 2]), |member| {
        let stream = HostStream::new();
        let mut buffers: Vec<Vec<u8>> = (0..9).map(|_| vec![0u8; 40_000]).collect();
        buffers[0].chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&1i32.to_le_bytes()));
        for i in 0..8 {
            let (before, after) = buffers.split_at_mut(i + 1);
            let call = sum_call(&member.comm, &mut before[i], &mut after[0]);
            let operation = Operation::Collective(call);
            launch(vec![Launch { comm: member.comm.clone(), operation, stream: StreamRef::Stream(stream.clone()) }])
                .expect("launch");
        }
        stream.synchronize().expect("synchronize");
        let last = &buffers[8];
        assert!(last.chunks_exact(4).all(|word| word == 4i32.pow(8).to_le_bytes()));
    });
}

#[test]
fn one_group_may_use_several_streams_and_communicators() {
    if world::is_on_device() {
        return println!("SKIPPED: host streams are the host's; the program rails does this on a device");
    }
    run(Grid::flat(3), |member| {
        let twin = member.comm.split(0, 0, CommOptions::default(), &NEVER).expect("split").expect("in it");
        let streams: Vec<Arc<HostStream>> = (0..2).map(|_| HostStream::new()).collect();
        let mut sends: Vec<Vec<u8>> = (0..4).map(|i| (i + 1i32).to_le_bytes().to_vec()).collect();
        let mut recvs = vec![vec![0u8; 4]; 4];
        let mut batch = Vec::new();
        for (i, (send, recv)) in sends.iter_mut().zip(&mut recvs).enumerate() {
            let comm = if i < 2 { &member.comm } else { &twin };
            let operation = Operation::Collective(sum_call(comm, send, recv));
            let stream = StreamRef::Stream(streams[i % 2].clone());
            batch.push(Launch { comm: comm.clone(), operation, stream });
        }
        launch(batch).expect("launch");
        streams.iter().for_each(|stream| stream.synchronize().expect("synchronize"));
        for (i, recv) in recvs.iter().enumerate() {
            assert_eq!(recv[..], (3 * (i as i32 + 1)).to_le_bytes());
        }
        twin.destroy().expect("destroy");
    });
}

/// Both communicators are used on the null stream, which the caller's thread serves, and on one more stream.
#[test]
fn a_group_of_two_communicators_on_the_null_stream_and_one_stream_completes() {
    if world::is_on_device() {
        return println!("SKIPPED: host streams are the host's; the program rails does this on a device");
    }
    run(Grid::flat(2), |member| {
        let twin = member.comm.split(0, 0, CommOptions::default(), &NEVER).expect("split").expect("in it");
        let stream = HostStream::new();
        let mut sends: Vec<Vec<u8>> = (0..4).map(|i| (i + 1i32).to_le_bytes().to_vec()).collect();
        let mut recvs = vec![vec![0u8; 4]; 4];
        let mut batch = Vec::new();
        for (i, (send, recv)) in sends.iter_mut().zip(&mut recvs).enumerate() {
            // One rank names its communicators in the other order.
            let comm = if (i < 2) == (member.rank == 0) { &member.comm } else { &twin };
            let operation = Operation::Collective(sum_call(comm, send, recv));
            let stream = if i % 2 == 0 { StreamRef::Null } else { StreamRef::Stream(stream.clone()) };
            batch.push(Launch { comm: comm.clone(), operation, stream });
        }
        launch(batch).expect("launch");
        stream.synchronize().expect("synchronize");
        let total: i32 = recvs.iter().map(|recv| i32::from_le_bytes(recv[..].try_into().expect("four bytes"))).sum();
        // Each number meets one of the other rank's, in whichever order.
        assert_eq!(total, 2 * (1 + 2 + 3 + 4));
        twin.destroy().expect("destroy");
    });
}

#[test]
fn grouped_sends_and_receives_of_any_size_and_order_complete() {
    run(Grid::blocks(&[2, 3]), |member| {
        let n = member.grid.nranks();
        for bytes in [1usize, 100, 5000, 70_000, 3_000_000] {
            let pattern = |from: usize, to: usize| (from * 16 + to) as u8;
            let mut sends: Vec<Vec<u8>> = (0..n).map(|to| vec![pattern(member.rank, to); bytes]).collect();
            let mut recvs = vec![vec![0u8; bytes]; n];
            let elements = Elements { count: bytes, dtype: DataType::U8 };
            let mut batch = Vec::new();
            let mut add = |operation| {
                batch.push(Launch { comm: member.comm.clone(), operation, stream: StreamRef::Null });
            };
            for (from, recv) in recvs.iter_mut().enumerate() {
                add(Operation::Recv { from: Rank::from_index(from), data: region(recv), elements });
            }
            for (to, send) in sends.iter_mut().enumerate().rev() {
                add(Operation::Send { to: Rank::from_index(to), data: region(send), elements });
            }
            launch_all(batch).expect("launch");
            for (from, recv) in recvs.iter().enumerate() {
                assert!(recv.iter().all(|&byte| byte == pattern(from, member.rank)), "{bytes} bytes from {from}");
            }
        }
    });
}

#[test]
fn several_ids_bring_the_same_ranks_together() {
    let ids = vec![Comm::unique_id().expect("id"), Comm::unique_id().expect("id")];
    let threads: Vec<_> = (0..5)
        .map(|rank| {
            let ids = ids.clone();
            std::thread::spawn(move || {
                let options = world::options();
                let params = InitParams { nranks: 5, rank, ids, options, device: 0, gpu: world::gpu(rank) };
                let comm = Comm::init(params, &Arc::new(AtomicBool::new(false))).expect("init");
                assert_eq!(sum(&comm, 1).expect("sum"), 5);
                comm.destroy().expect("destroy");
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("a rank"));
}

#[test]
fn a_message_to_oneself_of_another_size_is_refused_before_anything_of_its_group_begins() {
    run(Grid::flat(2), |member| {
        let own = Rank::from_index(member.rank);
        let (mut send, mut recv) = (vec![7u8; 32], vec![0u8; 32]);
        let (mut number, mut total) = (vec![1, 0, 0, 0], vec![0u8; 4]);
        let one = |operation| Launch { comm: member.comm.clone(), operation, stream: StreamRef::Null };
        let elements = |count| Elements { count, dtype: DataType::I32 };
        let sends = |data, count| Operation::Send { to: own, data, elements: elements(count) };
        let recvs = |data, count| Operation::Recv { from: own, data, elements: elements(count) };
        let refused = |batch: Vec<Launch>, told: &str| {
            let error = launch_all(batch).expect_err("it can never be received");
            assert!(matches!(&error, Error::InvalidUsage(text) if text.contains(told)), "{error}");
        };
        let batch = vec![
            one(Operation::Collective(sum_call(&member.comm, &mut number, &mut total))),
            one(sends(region(&mut send[..16]), 4)),
            one(recvs(region(&mut recv), 8)),
        ];
        refused(batch, "sends itself 4 elements of int32 (16 bytes) and receives 8 elements of int32 (32 bytes)");
        refused(vec![one(sends(region(&mut send), 8))], "1 sends to itself and 0 receives: both belong in one group");
        assert_eq!((&recv[..], &total[..]), (&[0; 32][..], &[0; 4][..]), "nothing of the group is done");
        assert_eq!(sum(&member.comm, 1), Ok(2), "the communicator is as good as before");
        launch_all(vec![one(sends(region(&mut send), 8)), one(recvs(region(&mut recv), 8))]).expect("equal lengths");
        assert_eq!(recv, send);
    });
}
