//! Hierarchical all-reduce as a trace: the example of the MSCCLang paper, section 2.
#![forbid(unsafe_code)]

use strata::plan::Collective;
use strata::script::trace::{BadTrace, Trace};

/// A ring of ranks `first`, `first + step`, ..., and the chunks it works on: `first_chunk`, `first_chunk + stride`, ...
struct Ring {
    ranks: u32,
    first: u32,
    step: u32,
    first_chunk: u32,
    stride: u32,
    channel: Option<u16>,
}

impl Ring {
    fn reduce_scatter(&self, trace: &Trace) -> Result<(), BadTrace> {
        for turn in 0..self.ranks {
            let index = self.first_chunk + turn * self.stride;
            for hop in 0..self.ranks - 1 {
                let so_far = trace.chunk(self.rank(turn + hop + 1), "input", index, 1)?;
                let mine = trace.chunk(self.rank(turn + hop + 2), "input", index, 1)?;
                self.channel.map_or(mine.clone(), |channel| mine.channel(channel)).reduce(&so_far)?;
            }
        }
        Ok(())
    }

    fn all_gather(&self, trace: &Trace) -> Result<(), BadTrace> {
        for turn in 0..self.ranks {
            let index = self.first_chunk + turn * self.stride;
            for hop in 0..self.ranks - 1 {
                let sum = trace.chunk(self.rank(turn + hop), "input", index, 1)?;
                let sum = self.channel.map_or(sum.clone(), |channel| sum.channel(channel));
                sum.copy(self.rank(turn + hop + 1), "input", index)?;
            }
        }
        Ok(())
    }

    fn rank(&self, at: u32) -> u32 {
        at % self.ranks * self.step + self.first
    }
}

/// All-reduce in four phases: reduce-scatter within each node, then between nodes, and the gathers the other way round.
/// With `by_hand` the phases have channels of their own.
pub fn all_reduce(nodes: u32, local: u32, by_hand: bool) -> Result<Trace, BadTrace> {
    let trace = Trace::new("hierarchical", Collective::AllReduce, nodes * local, nodes * local)?.in_place(true);
    let inside = |node: u32, offset: u32, channel: u32| Ring {
        ranks: local,
        first: node * local,
        step: 1,
        first_chunk: offset,
        stride: nodes,
        channel: by_hand.then_some(channel as u16),
    };
    let across = |gpu: u32| Ring {
        ranks: nodes,
        first: gpu,
        step: local,
        first_chunk: gpu * nodes,
        stride: 1,
        channel: by_hand.then_some((gpu % 2 + nodes * 2) as u16),
    };
    let insides = || (0..nodes).flat_map(|node| (0..nodes).map(move |offset| (node, offset)));
    insides().try_for_each(|(node, offset)| inside(node, offset, offset).reduce_scatter(&trace))?;
    (0..local).try_for_each(|gpu| across(gpu).reduce_scatter(&trace))?;
    (0..local).try_for_each(|gpu| across(gpu).all_gather(&trace))?;
    insides().try_for_each(|(node, offset)| inside(node, offset, offset + nodes).all_gather(&trace))?;
    Ok(trace)
}
