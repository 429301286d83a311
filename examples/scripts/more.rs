//! More algorithms as traces: those of which msccl-tools has files to compare with.
#![forbid(unsafe_code)]

use strata::plan::Collective;
use strata::script::trace::{BadTrace, Trace};

/// All ordered pairs of ranks.
fn pairs(ranks: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..ranks).flat_map(move |rank| (0..ranks).filter(move |&peer| peer != rank).map(move |peer| (rank, peer)))
}

/// Where a rank keeps what a peer has sent it, counted in peers.
fn slot(rank: u32, peer: u32) -> u32 {
    peer - u32::from(peer > rank)
}

/// All-gather, each chunk from its rank to all.
pub fn all_gather_pairs(ranks: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("all_pairs", Collective::AllGather, ranks, 1)?.in_place(true);
    for (rank, peer) in pairs(ranks) {
        trace.chunk(rank, "input", 0, 1)?.blocks(peer, rank).copy(peer, "output", rank)?;
    }
    Ok(trace)
}

/// All-gather by recursive doubling.
pub fn all_gather_doubling(ranks: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("recursive_doubling", Collective::AllGather, ranks, 1)?.in_place(true);
    doubling(&trace, ranks)?;
    Ok(trace)
}

/// What each rank has of the output, it exchanges with ranks further and further away.
fn doubling(trace: &Trace, ranks: u32) -> Result<(), BadTrace> {
    for round in 0..ranks.ilog2() {
        let count = 1 << round;
        for rank in 0..ranks {
            let (peer, index) = (rank ^ count, rank / count * count);
            trace.chunk(rank, "output", index, count)?.blocks(peer, rank).copy(peer, "output", index)?;
        }
    }
    Ok(())
}

/// All-reduce by recursive halving, then doubling.
pub fn all_reduce_halving(ranks: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("halving_doubling", Collective::AllReduce, ranks, ranks)?.in_place(true);
    for round in (0..ranks.ilog2()).rev() {
        let count = 1 << round;
        for rank in 0..ranks {
            let (peer, index) = (rank ^ count, (rank ^ count) / count * count);
            let theirs = trace.chunk(rank, "input", index, count)?;
            trace.chunk(peer, "input", index, count)?.blocks(peer, rank).reduce(&theirs)?;
        }
    }
    doubling(&trace, ranks)?;
    Ok(trace)
}

/// All-gather on four ranks, of which pairs are near each other.
pub fn all_gather_near_pairs() -> Result<Trace, BadTrace> {
    let trace = Trace::new("near_pairs", Collective::AllGather, 4, 1)?.in_place(true);
    for parity in 0..2 {
        let near = |rank: u32| rank + 1 - 2 * parity;
        let ranks = || (0..4).filter(move |rank| rank % 2 == parity);
        for rank in ranks() {
            trace.chunk(rank, "input", 0, 1)?.copy(near(rank), "output", rank)?;
        }
        for rank in ranks() {
            trace.chunk(rank, "input", 0, 1)?.copy((rank + 2) % 4, "output", rank)?;
        }
        for rank in ranks() {
            let far = (rank + 2) % 4;
            trace.chunk(rank, "output", far, 1)?.copy(near(rank), "output", far)?;
        }
    }
    Ok(trace)
}

/// All-reduce in one round: each rank gets all vectors and reduces them itself.
pub fn all_reduce_one_round(ranks: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("one_round", Collective::AllReduce, ranks, ranks)?.in_place(true);
    for (rank, peer) in pairs(ranks) {
        let vector = trace.chunk(rank, "input", 0, ranks)?.blocks(peer, rank);
        vector.copy(peer, "scratch", slot(peer, rank) * ranks)?;
    }
    for rank in 0..ranks {
        for at in 0..(ranks - 1) * ranks {
            let theirs = trace.chunk(rank, "scratch", at, 1)?;
            trace.chunk(rank, "input", at % ranks, 1)?.blocks(at % ranks, 0).reduce(&theirs)?;
        }
    }
    Ok(trace)
}

/// All-pairs all-reduce whose reductions form a tree.
pub fn all_pairs_tree(ranks: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("all_pairs_tree", Collective::AllReduce, ranks, ranks)?.in_place(true);
    for (rank, peer) in pairs(ranks) {
        trace.chunk(rank, "input", peer, 1)?.blocks(peer, rank).copy(peer, "scratch", slot(peer, rank))?;
    }
    for rank in 0..ranks {
        for level in 1..=ranks.ilog2() {
            let half = ranks >> level;
            for at in 0..half {
                let mine = match at {
                    0 => trace.chunk(rank, "input", rank, 1)?,
                    at => trace.chunk(rank, "scratch", at - 1, 1)?,
                };
                mine.blocks(at, at).reduce(&trace.chunk(rank, "scratch", at + half - 1, 1)?)?;
            }
        }
    }
    for (rank, peer) in pairs(ranks) {
        trace.chunk(rank, "input", rank, 1)?.blocks(peer, rank).copy(peer, "input", rank)?;
    }
    Ok(trace)
}

/// All-reduce of two nodes: all pairs within each node, and an exchange between ranks with the same local number.
pub fn two_nodes(local: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("two_nodes", Collective::AllReduce, 2 * local, local * local)?.in_place(true);
    for (rank, peer) in pairs(local) {
        for node in [0, local] {
            let block = trace.chunk(node + rank, "input", peer * local, local)?.blocks(peer, rank);
            block.copy(node + peer, "scratch", slot(peer, rank) * local)?;
        }
    }
    for rank in 0..2 * local {
        let block = rank % local * local;
        for at in 0..local * (local - 1) {
            let mine = trace.chunk(rank, "input", block + at % local, 1)?.blocks(at % local, 0);
            mine.reduce(&trace.chunk(rank, "scratch", at, 1)?)?;
        }
    }
    for gpu in 0..local {
        let (one, other, channel) = (gpu, gpu + local, (gpu % 2) as u16);
        let block = |rank| trace.chunk(rank, "input", gpu * local, local);
        let there = block(one)?.channel(channel).blocks(local, local + 1).copy(other, "theirs", 0)?;
        let here = block(other)?.channel(channel).blocks(local + 2, local + 3).copy(one, "theirs", 0)?;
        block(one)?.blocks(local + 3, 0).reduce(&here)?;
        block(other)?.blocks(local + 1, 0).reduce(&there)?;
    }
    for (rank, peer) in pairs(local) {
        for node in [0, local] {
            let sum = trace.chunk(node + rank, "input", rank * local, local)?.blocks(peer, rank);
            sum.copy(node + peer, "input", rank * local)?;
        }
    }
    Ok(trace)
}

/// All-reduce on four ranks, of which pairs are near each other: a half of the vector each.
pub fn near_halves() -> Result<Trace, BadTrace> {
    let trace = Trace::new("near_halves", Collective::AllReduce, 4, 2)?.in_place(true);
    for half in 0..2 {
        let near = |rank: u32| rank + 1 - 2 * half;
        let ranks = || (0..4).filter(move |rank| rank % 2 == half);
        for rank in ranks() {
            let theirs = trace.chunk(near(rank), "input", half, 1)?;
            trace.chunk(rank, "input", half, 1)?.channel(0).blocks(0, 0).reduce(&theirs)?;
        }
        for rank in ranks() {
            let sum = trace.chunk(rank, "input", half, 1)?.channel(0).blocks(1, 1);
            sum.copy((rank + 2) % 4, "scratch", half)?;
        }
        for rank in ranks() {
            let theirs = trace.chunk(rank, "scratch", half, 1)?;
            trace.chunk(rank, "input", half, 1)?.blocks(1, 1).reduce(&theirs)?;
        }
        for rank in ranks() {
            let sum = trace.chunk(rank, "input", half, 1)?.channel(1).blocks(2, 2);
            sum.copy(near(rank), "input", half)?;
        }
    }
    Ok(trace)
}

/// All-to-all of two nodes in three steps: all of a node that goes to the other one is gathered on one rank, sent as one
/// message, and scattered.
pub fn three_step(local: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("three_step", Collective::AllToAll, 2 * local, 1)?;
    for rank in 0..2 * local {
        let (node, other) = (rank / local, 1 - rank / local);
        let theirs = trace.chunk(rank, "input", other * local, local)?.channel(0);
        theirs.copy(node * local, "gathered", rank % local * local)?;
        for peer in node * local..(node + 1) * local {
            trace.chunk(rank, "input", peer, 1)?.channel(0).copy(peer, "output", rank)?;
        }
    }
    for node in 0..2 {
        let (rank, other) = (node * local, (1 - node) * local);
        let all = trace.chunk(rank, "gathered", 0, local * local)?.channel((rank % 2) as u16);
        let all = all.copy(other, "to scatter", 0)?;
        for at in 0..local * local {
            let (from, to) = (node * local + at / local, other + at % local);
            all.part(at, 1)?.channel(1).copy(to, "output", from)?;
        }
    }
    Ok(trace)
}
