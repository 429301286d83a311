//! Messages beyond 2 GiB, and memory that does not grow with the message.
//!
//! One test at a time, since they need much memory; the one that measures that of its process has a process of its own.

use crate::again::{again, passes};
use crate::world::{launch_all, region, run, Member};
use std::sync::Mutex;
use strata::communicator::{CollectiveCall, Elements, Launch, Operation};
use strata::device::StreamRef;
use strata::dtype::{DataType, RedOp, Reduction};
use strata::plan::Collective;
use strata::topo::{Grid, Rank};

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

/// Set in the process whose memory is measured.
const MEASURED: &str = "TEST_LARGE_MEASURED";

/// A little more than 2 GiB, and no round number.
const BEYOND: usize = (1 << 31) + 12_345;

/// One value of `/proc/self/status`, in bytes.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the process's status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the value");
    let kib: usize = line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().expect("a number of KiB");
    kib << 10
}

fn call(member: &Member, collective: Collective, send: &mut [u8], recv: &mut [u8], count: usize) -> CollectiveCall {
    let nranks = member.grid.nranks();
    CollectiveCall {
        collective,
        input: region(send),
        output: region(recv),
        count,
        blocks: None,
        joined: None,
        tag: 0,
        dtype: DataType::U8,
        reduction: collective.reduces().then(|| Reduction::new(RedOp::Sum, DataType::U8, nranks)),
        factor_at: None,
        residual: None,
        root: Rank(0),
        algorithm: None,
        decision: None,
    }
}

fn pattern(rank: usize, index: usize) -> u8 {
    (index % 241 + 3 * rank) as u8
}

#[test]
fn a_collective_of_more_than_two_gibibytes_is_right() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    run(Grid::flat(2), |member| {
        let mut send: Vec<u8> = (0..BEYOND).map(|i| pattern(member.rank, i)).collect();
        let mut recv = vec![0u8; BEYOND];
        member.collective(call(member, Collective::AllReduce, &mut send, &mut recv, BEYOND)).expect("all_reduce");
        let right = |(i, &byte): (usize, &u8)| byte == pattern(0, i).wrapping_add(pattern(1, i));
        assert!(recv.iter().enumerate().all(right));
    });
}

#[test]
fn one_message_of_more_than_two_gibibytes_arrives_over_either_transport() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for grid in [Grid::flat(2), Grid::blocks(&[1, 1])] {
        run(grid, |member| {
            let mut data: Vec<u8> = match member.rank {
                0 => (0..BEYOND).map(|i| pattern(7, i)).collect(),
                _ => vec![0; BEYOND],
            };
            let elements = Elements { count: BEYOND, dtype: DataType::U8 };
            let operation = match member.rank {
                0 => Operation::Send { to: Rank(1), data: region(&mut data), elements },
                _ => Operation::Recv { from: Rank(0), data: region(&mut data), elements },
            };
            launch_all(vec![Launch { comm: member.comm.clone(), operation, stream: StreamRef::Null }])
                .expect("a message");
            assert!(data.iter().enumerate().all(|(i, &byte)| byte == pattern(7, i)));
        });
    }
}

#[test]
fn scratch_memory_does_not_grow_with_the_message() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if std::env::var_os(MEASURED).is_none() {
        let mut measured = again(module_path!(), "scratch_memory_does_not_grow_with_the_message");
        println!("{}", passes(measured.env(MEASURED, "1")));
        return;
    }
    for grid in [Grid::flat(4), Grid::blocks(&[2, 2])] {
        run(grid, |member| {
            let nranks = member.grid.nranks();
            for count in [1 << 20, 40 << 20] {
                let mut send = vec![1u8; nranks * count];
                let mut recv = vec![2u8; nranks * count];
                member.barrier.wait();
                let before = status("VmRSS");
                member.barrier.wait();
                if member.rank == 0 {
                    std::fs::write("/proc/self/clear_refs", "5").expect("the peak is reset");
                }
                member.barrier.wait();
                for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
                    member.collective(call(member, collective, &mut send, &mut recv, count)).expect("a collective");
                    let scratch = member.comm.scratch_bytes();
                    assert!(scratch <= 5 << 20, "{scratch} bytes of scratch for {count}");
                }
                member.barrier.wait();
                let grown = status("VmHWM").saturating_sub(before);
                println!("{} ranks, blocks of {count} bytes: {grown} bytes more at the peak", nranks);
                assert!(grown < nranks * (8 << 20), "{grown} bytes more at the peak for blocks of {count}");
                member.barrier.wait();
            }
        });
    }
}
