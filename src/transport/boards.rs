//! Calls of a whole node on the board, between threads and between processes.

use super::worlds::{call, region, threads, Setup};
use super::{Blocks, Envelope, NodeCall, Router, Transport};
use crate::device::host::Combine;
use crate::dtype::{DataType, Operator};
use crate::error::Error;
use crate::exec::Started;
use crate::memory::shared::Owned;
use crate::memory::Region;
use crate::plan::{Collective, OperandOrder};
use crate::topo::{Grid, Rank};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Barrier;
use std::time::Duration;

const SUM: Combine =
    Combine { dtype: DataType::U32, operator: Operator::Sum, order: OperandOrder::LocalFirst, divisor: 1 };
/// Elements of a part, below and above where shared memory is read in place; the largest fits on a board of 4 ranks.
const COUNTS: [usize; 6] = [1, 12, 33, 2047, 9000, 30_000];

fn envelope(sequence: u64) -> Envelope {
    Envelope { channel: 0, sequence, signature: 0xb0a7d }
}

fn value(rank: usize, seed: usize, at: usize) -> u32 {
    (rank as u32 + 1).wrapping_mul(0x0101_0407).wrapping_add((seed * 31 + at) as u32)
}

fn fill(memory: Region, rank: usize, seed: usize) {
    let bytes: Vec<u8> = (0..memory.len() / 4).flat_map(|at| value(rank, seed, at).to_ne_bytes()).collect();
    memory.write(&bytes);
}

fn element(memory: Region, at: usize) -> u32 {
    let mut bytes = [0; 4];
    memory.part(at * 4, 4).read(&mut bytes);
    u32::from_ne_bytes(bytes)
}

/// Blocks of `count` elements, each cut in two pieces at another place.
fn cut(memory: Region, nblocks: usize, count: usize, at: usize) -> Blocks {
    let mut blocks = Blocks::default();
    for index in 0..nblocks {
        let block = memory.part(index * count * 4, count * 4);
        let first = at.min(count) * 4;
        let parts = [block.part(0, first), block.part(first, block.len() - first)];
        blocks.push(parts.into_iter().filter(|part| !part.is_empty()));
    }
    blocks
}

/// One call of every kind and size; some ranks bring shared memory and others not, in place and not.
pub fn every_call(me: usize, router: &mut Router, n: usize) {
    assert!(router.has_board());
    let largest = COUNTS[COUNTS.len() - 1] * 4;
    let owned = || &*Box::leak(Box::new(Owned::new(n * largest).unwrap()));
    let (shared_in, shared_out) = (owned(), owned());
    let (mut plain_in, mut plain_out) = (vec![0u8; n * largest], vec![0u8; n * largest]);
    let plain = (region(&mut plain_in), region(&mut plain_out));
    let mut sequence = 0;
    for (round, &count) in COUNTS.iter().enumerate() {
        for collective in Collective::ALL {
            for variant in 0..6 {
                sequence += 1;
                let root = sequence % n;
                let in_place = variant % 2 == 1;
                // All ranks, some of them, or none.
                let is_shared = [true, (me + round).is_multiple_of(2), false][variant / 2];
                let (input, output) = if is_shared { (shared_in.region(), shared_out.region()) } else { plain };
                one_call(router, (me, n, root, collective), (input, output), count, in_place, sequence);
            }
        }
    }
}

fn one_call(
    router: &mut Router,
    (me, n, root, collective): (usize, usize, usize, Collective),
    (input, output): (Region, Region),
    count: usize,
    in_place: bool,
    sequence: usize,
) {
    let (rank, at) = (Rank::from_index(me), Rank::from_index(root));
    let nsrc = collective.input_blocks(n, rank, at);
    let ndst = collective.output_blocks(n, rank, at);
    let bytes = |blocks: usize| blocks * count * 4;
    let (src, dst) = match (in_place, collective) {
        (true, Collective::AllGather) => (output.part(bytes(me), bytes(1)), output.part(0, bytes(n))),
        (true, Collective::Gather) if me == root => (output.part(bytes(me), bytes(1)), output.part(0, bytes(n))),
        (true, Collective::ReduceScatter) => (input.part(0, bytes(n)), input.part(bytes(me), bytes(1))),
        (true, Collective::Scatter) if me == root => (input.part(0, bytes(n)), input.part(bytes(me), bytes(1))),
        (true, Collective::AllReduce) => (output.part(0, bytes(1)), output.part(0, bytes(1))),
        (true, Collective::Broadcast | Collective::Reduce) if me == root => {
            (output.part(0, bytes(1)), output.part(0, bytes(1)))
        }
        _ => (input.part(0, bytes(nsrc)), output.part(0, bytes(ndst))),
    };
    fill(src, me, sequence);
    let (src, places) = (cut(src, nsrc, count, me + 3), cut(dst, ndst, count, 7 * me + 1));
    let combine = collective.reduces().then_some(SUM);
    // Parts of short operations and of long ones go by other ways.
    let operation_bytes = [0, 1 << 20, 1 << 30][sequence % 3];
    let mine = NodeCall { collective, root, src: &src, dst: &places, combine, operation_bytes };
    call(router, envelope(sequence as u64), mine).unwrap();
    for index in 0..ndst * count {
        let (block, inside) = (index / count, index % count);
        let expected = match collective {
            Collective::Custom => unreachable!("no board does it"),
            Collective::AllGather | Collective::Gather => value(block, sequence, inside),
            Collective::AllToAll => value(block, sequence, me * count + inside),
            Collective::Broadcast => value(root, sequence, inside),
            Collective::Scatter => value(root, sequence, me * count + inside),
            Collective::ReduceScatter => sum(n, sequence, me * count + inside),
            Collective::AllReduce | Collective::Reduce => sum(n, sequence, inside),
        };
        let what = format!("rank {me}, {collective:?} of {count} at root {root}, in place: {in_place}, at {index}");
        assert_eq!(element(dst, index), expected, "{what}");
    }
}

/// A call at root 0 in a short operation.
fn short<'a>(collective: Collective, [src, dst]: [&'a Blocks; 2], combine: Option<Combine>) -> NodeCall<'a> {
    NodeCall { collective, root: 0, src, dst, combine, operation_bytes: 0 }
}

fn sum(n: usize, seed: usize, at: usize) -> u32 {
    (0..n).map(|rank| value(rank, seed, at)).fold(0, u32::wrapping_add)
}

#[test]
fn threads_call_on_the_board() {
    for n in [2, 4] {
        threads(&Setup::new(Grid::flat(n)), |me, mut router| every_call(me, &mut router, n));
    }
}

#[test]
fn ranks_that_share_no_memory_have_no_board() {
    threads(&Setup::new(Grid::flat(2)).with(|config| config.shm = false), |_, router| assert!(!router.has_board()));
}

#[test]
fn a_call_of_another_kind_is_a_usage_error_that_names_the_peer() {
    threads(&Setup::new(Grid::flat(2)), |me, mut router| {
        let mut bytes = [0u8; 64];
        let memory = region(&mut bytes);
        let (mut src, mut dst) = (Blocks::default(), Blocks::default());
        // Rank 1 brings less than rank 0 expects.
        let len = [16, 8][me];
        src.push([memory.part(0, len)].into_iter());
        (0..2).for_each(|block| dst.push([memory.part(16 + 16 * block, len)].into_iter()));
        let mine = short(Collective::AllGather, [&src, &dst], None);
        let failed = call(&mut router, envelope(1), mine);
        let Err(Error::InvalidUsage(text)) = failed else { panic!("{failed:?}") };
        let [theirs, ours] = [[8, 16][me], len];
        let sizes = format!("rank {} sent {theirs} bytes where {ours} were expected", 1 - me);
        assert!(text.contains(&sizes), "{text}");
    });
}

#[test]
fn memory_of_a_rank_that_gave_up_gives_no_result() {
    let gave_up = Barrier::new(2);
    threads(&Setup::new(Grid::flat(2)), |me, mut router| {
        let memory = Box::leak(Box::new(Owned::new(1 << 18).unwrap()));
        let (input, output) = (memory.region().part(0, 64 << 10), memory.region().part(128 << 10, 128 << 10));
        let (src, dst) = (cut(input, 1, 16 << 10, 0), cut(output, 2, 16 << 10, 0));
        let mine = short(Collective::AllGather, [&src, &dst], None);
        if me == 0 {
            router.call(0, envelope(1), 0, mine).unwrap();
            router.cancel();
            // Its program may do with it what it likes now.
            fill(input, 9, 9);
            gave_up.wait();
            return;
        }
        gave_up.wait();
        let outcome = call(&mut router, envelope(1), mine);
        assert!(matches!(&outcome, Err(Error::Remote(text)) if text.contains("rank 0")), "{outcome:?}");
    });
}

#[test]
fn a_call_names_whom_it_waits_for() {
    threads(&Setup::new(Grid::flat(3)), |me, mut router| {
        if me > 0 {
            return;
        }
        let mut bytes = [0u8; 64];
        let memory = region(&mut bytes);
        let mut blocks = Blocks::default();
        blocks.push([memory.part(0, 8)].into_iter());
        let mine = short(Collective::AllReduce, [&blocks, &blocks], Some(SUM));
        router.call(0, envelope(1), 0, mine).unwrap();
        router.poll(&mut Vec::new()).unwrap();
        assert_eq!(router.missing(), [Rank(1), Rank(2)]);
        router.cancel();
    });
}

/// How often this thread has given up its processor to wait.
fn waits() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|count| count.trim().parse().ok()).expect("Linux counts them")
}

#[test]
fn a_rank_whose_board_is_full_sleeps_until_the_root_has_read() {
    let (slept, calls) = (Barrier::new(2), AtomicUsize::new(0));
    threads(&Setup::new(Grid::flat(2)), |me, mut router| {
        // Parts on pages, and in areas since there are too many pieces to list them.
        for (count, sequence) in [(32, 0), (32 << 10, 100)] {
            let (mut input, mut output) = (vec![0u8; count * 4], vec![0u8; 2 * count * 4]);
            let (input, output) = (region(&mut input), region(&mut output));
            let (mut src, dst) = (Blocks::default(), cut(output, if me == 0 { 2 } else { 0 }, count, 0));
            src.push((0..count / 32).map(|piece| input.part(piece * 128, 128)));
            let mine = || short(Collective::Gather, [&src, &dst], None);
            let mut made = 0;
            if me == 1 {
                loop {
                    made += 1;
                    fill(input, 1, made);
                    if router.call(0, envelope(sequence + made as u64), 0, mine()).unwrap() == Started::Pending {
                        break;
                    }
                }
                let before = waits();
                // More than once: a processor that is taken away for longer than the limit makes a sleep that does not wait.
                let slept_itself = (0..100).any(|_| {
                    router.sleep(Duration::from_millis(10)).unwrap();
                    waits() > before
                });
                calls.store(made, Ordering::Relaxed);
                slept.wait();
                assert!(made > 1, "nothing was full");
                assert!(slept_itself, "it looks for room all the time, after {made} calls of {count} elements");
                let mut done = Vec::new();
                while done.is_empty() {
                    router.poll(&mut done).unwrap();
                }
                continue;
            }
            slept.wait();
            for round in 1..=calls.load(Ordering::Relaxed) {
                call(&mut router, envelope(sequence + round as u64), mine()).unwrap();
                assert_eq!(element(output, 2 * count - 1), value(1, round, count - 1));
            }
        }
    });
}
