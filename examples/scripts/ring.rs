//! Ring algorithms as traces.
#![forbid(unsafe_code)]

use strata::plan::Collective;
use strata::script::trace::{BadTrace, Trace};

/// All-reduce around a ring: each chunk goes round once and becomes the sum, and once more as the sum. Chunks take
/// `channels` channels in turn.
pub fn all_reduce(ranks: u32, channels: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("ring", Collective::AllReduce, ranks, ranks)?.in_place(true);
    for step in 0..ranks - 1 {
        for index in 0..ranks {
            let (rank, next) = ((index + step) % ranks, (index + step + 1) % ranks);
            let so_far = trace.chunk(rank, "input", index, 1)?;
            trace.chunk(next, "input", index, 1)?.channel((index % channels) as u16).reduce(&so_far)?;
        }
    }
    for step in 0..ranks - 1 {
        for index in 0..ranks {
            let (rank, next) = ((index + ranks - 1 + step) % ranks, (index + step) % ranks);
            let sum = trace.chunk(rank, "input", index, 1)?.channel((index % channels) as u16);
            sum.copy(next, "input", index)?;
        }
    }
    Ok(trace)
}

/// All-gather around a ring: each rank's chunk is handed on until all have it.
pub fn all_gather(ranks: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("ring", Collective::AllGather, ranks, 1)?.in_place(true);
    for index in 0..ranks {
        let mut chunk = trace.chunk(index, "input", 0, 1)?;
        for step in 1..ranks {
            chunk = chunk.copy((index + step) % ranks, "output", index)?;
        }
    }
    Ok(trace)
}
