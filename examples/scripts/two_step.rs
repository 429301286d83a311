//! Two-step all-to-all as a trace: section 7.4 of the MSCCLang paper.
#![forbid(unsafe_code)]

use strata::plan::Collective;
use strata::script::trace::{BadTrace, Trace};

/// All-to-all over nodes: what a node has for one rank of another is gathered on the rank with the same local number, and
/// sent there as one message.
pub fn all_to_all(nodes: u32, local: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("two_step", Collective::AllToAll, nodes * local, 1)?;
    for node in 0..nodes {
        for other in (1..nodes).map(|step| (node + step) % nodes) {
            for gpu in 0..local {
                for peer in 0..local {
                    let chunk = trace.chunk(node * local + gpu, "input", other * local + peer, 1)?;
                    chunk.copy(node * local + peer, format!("to node {other}"), gpu)?;
                }
            }
            for gpu in 0..local {
                let gathered = trace.chunk(node * local + gpu, format!("to node {other}"), 0, local)?;
                gathered.copy(other * local + gpu, "output", node * local)?;
            }
        }
        for (gpu, peer) in (0..local).flat_map(|gpu| (0..local).map(move |peer| (gpu, peer))) {
            let (from, to) = (node * local + gpu, node * local + peer);
            trace.chunk(from, "input", to, 1)?.copy(to, "output", from)?;
        }
    }
    Ok(trace)
}

/// All-to-all, each block from its rank to its rank.
pub fn all_pairs(ranks: u32) -> Result<Trace, BadTrace> {
    let trace = Trace::new("all_pairs", Collective::AllToAll, ranks, 1)?;
    for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
        trace.chunk(from, "input", to, 1)?.copy(to, "output", from)?;
    }
    Ok(trace)
}
