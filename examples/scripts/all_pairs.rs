//! All-pairs all-reduce as a trace.
#![forbid(unsafe_code)]

use strata::plan::Collective;
use strata::script::trace::{BadTrace, Trace};

/// All-reduce in two rounds: each rank gets its block of all others, reduces it, and sends the sum to all. The blocks are
/// reduced in parts, each in a thread block of its own.
pub fn all_reduce(ranks: u32, parts: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("all_pairs", Collective::AllReduce, ranks, ranks * parts)?.in_place(true);
    let pairs =
        || (0..ranks).flat_map(|rank| (0..ranks).filter(move |&peer| peer != rank).map(move |peer| (rank, peer)));
    // Where a rank keeps what a peer has sent it.
    let slot = |rank: u32, peer: u32| (if peer > rank { peer - 1 } else { peer }) * parts;
    for (rank, peer) in pairs() {
        let block = trace.chunk(rank, "input", peer * parts, parts)?.blocks(peer, rank);
        block.copy(peer, "scratch", slot(peer, rank))?;
    }
    for rank in 0..ranks {
        for at in 0..parts * (ranks - 1) {
            let theirs = trace.chunk(rank, "scratch", at, 1)?;
            let mine = trace.chunk(rank, "input", rank * parts + at % parts, 1)?;
            mine.blocks(at % parts, at % parts).reduce(&theirs)?;
        }
    }
    for (rank, peer) in pairs() {
        let sum = trace.chunk(rank, "input", rank * parts, parts)?.blocks(peer, rank);
        sum.copy(peer, "input", rank * parts)?;
    }
    Ok(trace)
}
