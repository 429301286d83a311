//! AllToNext as a trace: a collective without a name of its own, section 7.5 of the MSCCLang paper.
#![forbid(unsafe_code)]

use strata::plan::contract::Contract;
use strata::plan::Collective;
use strata::script::trace::{BadTrace, Trace};

/// Each rank's output becomes the input of the rank before. From node to node all ranks of both send a part, so that all
/// network interfaces are busy.
pub fn all_to_next(nodes: u32, local: u32) -> Result<Trace, BadTrace> {
    let ranks = nodes * local;
    let promise = format!("[[output]]\nranks = \"1-{}\"\nrank_shift = -1", ranks - 1);
    let contract = Contract::parse(&promise, ranks as usize, local).expect("the rule is right for two ranks and more");
    let trace = Trace::new("all_to_next", Collective::Custom, ranks, local)?.contract(contract);
    for rank in 0..ranks - 1 {
        let (node, gpu) = (rank / local, rank % local);
        if gpu != local - 1 {
            trace.chunk(rank, "input", 0, local)?.channel((gpu % 2) as u16).copy(rank + 1, "output", 0)?;
            continue;
        }
        for part in 0..local {
            let (channel, buffer) = ((part % 2) as u16, format!("from node {node}"));
            let mut chunk = trace.chunk(rank, "input", part, 1)?.channel(channel);
            if part != local - 1 {
                chunk = chunk.copy(node * local + part, buffer.as_str(), 0)?.channel(channel);
            }
            if part != 0 {
                chunk = chunk.copy((node + 1) * local + part, buffer.as_str(), 0)?.channel(channel);
            }
            chunk.copy(rank + 1, "output", part)?;
        }
    }
    Ok(trace)
}
