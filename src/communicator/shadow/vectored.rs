//! Collectives of blocks of different sizes on communicators of the vendor's library.
//!
//! The vendor has none, so they are groups of what it has: a broadcast of each block for an all-gather, a reduction to each
//! block's rank for a reduce-scatter, sends and receives for the others. What has no elements is left out. The groups go on
//! the program's stream and join its open group. Where Strata's own transports carry what goes between nodes, the companion does
//! all-gathers and reduce-scatters as it does even ones.
#![forbid(unsafe_code)]

use super::{calls, find, group, Attached, Handle};
use crate::communicator::{CollectiveCall, Direction};
use crate::error::{Code, Error, Result, SUCCESS};
use crate::plan::blocks::{BlockTable, Extent};
use crate::plan::Collective;
use crate::topo::Rank;
use crate::vendor::calls::{VendorAddress, VendorStream};
use crate::vendor::Library;
use std::sync::Arc;

/// One of the vendor's calls that such a collective is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VendorStep {
    /// `ncclBroadcast`
    Broadcast {
        /// Whose block it is.
        root: usize,
        /// Where it is, on the root.
        send: VendorAddress,
        /// Where it goes.
        recv: VendorAddress,
        /// Its elements.
        count: usize,
    },
    /// `ncclReduce`
    Reduce {
        /// Whose block it is.
        root: usize,
        /// This rank's part.
        send: VendorAddress,
        /// Where the result goes, on the root; else 0.
        recv: VendorAddress,
        /// Its elements.
        count: usize,
    },
    /// `ncclSend` or `ncclRecv`
    Message {
        /// Which of them.
        direction: Direction,
        /// The other rank.
        peer: usize,
        /// Where the block is.
        at: VendorAddress,
        /// Its elements.
        count: usize,
    },
}

/// A program's call on a communicator of the vendor's.
pub struct VectoredCall {
    /// The communicator.
    pub handle: Handle,
    /// What is to be done; undecided, and without its reduction.
    pub call: CollectiveCall,
    /// The operation, as the program numbers it; 0 where nothing is reduced.
    pub op: i32,
    /// The stream that orders it.
    pub stream: VendorStream,
    /// This rank.
    pub rank: Rank,
    /// How many there are.
    pub nranks: usize,
}

/// This rank and the number of ranks of a communicator of the vendor's, which may be used now.
pub fn place(library: &Library, handle: Handle) -> Result<(Rank, usize)> {
    if find(handle).is_some_and(|attached| attached.in_progress()) {
        let early = "Attempt to use communicator before the previous operation returned ncclSuccess";
        return Err(Error::InvalidArgument(early.to_string()));
    }
    let (rank, nranks) = calls::place(library, handle).map_err(|code| returned("asked for its ranks", code))?;
    Ok((Rank::from_index(rank), nranks))
}

/// Has a call done: inside a group it is recorded, here or by the vendor.
pub fn submit(call: &VectoredCall, library: &'static Library) -> Result<()> {
    let own = find(call.handle).and_then(|attached| attached.own_vectored(call));
    if let Some(operation) = own {
        return match group::submit_own(operation) {
            SUCCESS => Ok(()),
            // It has been told.
            code => Err(Error::of_code(code, String::new())),
        };
    }
    find(call.handle).map_or(Ok(()), |attached| attached.has_all())?;
    let steps = steps(&call.call, call.rank, call.nranks);
    let issue = || steps.iter().try_for_each(|step| accepted(calls::vectored(call, step, library)));
    let outcome = match steps.len() {
        0 => Ok(()),
        1 => calls::vectored(call, &steps[0], library),
        _ => calls::in_group(library, issue),
    };
    outcome.map_err(|code| returned(call.call.collective.name(), code))
}

/// A call in a group of which the vendor says that it goes on has been accepted like any other.
fn accepted(outcome: std::result::Result<(), Code>) -> std::result::Result<(), Code> {
    match outcome {
        Err(super::IN_PROGRESS) => Ok(()),
        outcome => outcome,
    }
}

fn returned(what: &str, code: Code) -> Error {
    Error::of_code(code, format!("{what} of blocks of different sizes: the vendor's library returns {code}"))
}

/// The vendor's calls that do a call, in an order that is the same on all ranks as far as they are collectives.
pub fn steps(call: &CollectiveCall, rank: Rank, nranks: usize) -> Vec<VendorStep> {
    let Some(blocks) = &call.blocks else { return Vec::new() };
    let (me, size) = (rank.index(), call.dtype.size());
    let input = |extent: Extent| call.input.address() as usize + extent.at * size;
    let output = |extent: Extent| call.output.address() as usize + extent.at * size;
    let filled = |extents: &[Extent], act: &dyn Fn(usize, Extent) -> VendorStep| -> Vec<VendorStep> {
        let each = extents.iter().copied().enumerate().filter(|(_, extent)| extent.count > 0);
        each.map(|(block, extent)| act(block, extent)).collect()
    };
    match call.collective {
        Collective::AllGather => filled(blocks.output(), &|root, extent| {
            let recv = output(extent);
            let send = if root == me { input(blocks.input()[0]) } else { recv };
            VendorStep::Broadcast { root, send, recv, count: extent.count }
        }),
        Collective::ReduceScatter => filled(blocks.input(), &|root, extent| {
            let recv = if root == me { output(blocks.output()[0]) } else { 0 };
            VendorStep::Reduce { root, send: input(extent), recv, count: extent.count }
        }),
        _ => messages(call, blocks, (me, nranks), [&input, &output]),
    }
}

/// Those of an all-to-all, a gather or a scatter: first to or from the next rank, so that not all have the same peer first.
fn messages(
    call: &CollectiveCall,
    blocks: &BlockTable,
    (me, nranks): (usize, usize),
    [input, output]: [&dyn Fn(Extent) -> VendorAddress; 2],
) -> Vec<VendorStep> {
    let root = call.root.index();
    // Which block is for or of a peer, if there is one; the own block of a call in place is where it shall be.
    let block = |extents: &[Extent], peer: usize, is_split: bool| match is_split {
        true => extents.get(peer).copied(),
        false => extents.first().copied().filter(|_| peer == root),
    };
    let (splits_input, splits_output) = match call.collective {
        Collective::Gather => (false, me == root),
        Collective::Scatter => (me == root, false),
        _ => (true, true),
    };
    let mut steps = Vec::new();
    for step in 0..nranks {
        for (direction, peer) in
            [(Direction::Send, (me + step) % nranks), (Direction::Recv, (me + nranks - step) % nranks)]
        {
            let extent = match direction {
                Direction::Send => block(blocks.input(), peer, splits_input),
                Direction::Recv => block(blocks.output(), peer, splits_output),
            };
            let is_there = peer == me && call.in_place(Rank::from_index(me));
            let Some(extent) = extent.filter(|extent| extent.count > 0 && !is_there) else { continue };
            let at = if direction == Direction::Send { input(extent) } else { output(extent) };
            steps.push(VendorStep::Message { direction, peer, at, count: extent.count });
        }
    }
    steps
}

impl Attached {
    /// Such a call as an operation of the companion, if Strata's own transports are to carry it between nodes.
    fn own_vectored(self: &Arc<Attached>, call: &VectoredCall) -> Option<crate::communicator::Launch> {
        self.subcomms.get()?.own_vectored(self, call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DataType;
    use crate::memory::{Arena, DeviceRegion};
    use crate::plan::blocks::packed;

    const RANKS: usize = 3;

    /// A call with root 1 whose buffers lie in one piece of memory as this says.
    fn call(
        collective: Collective,
        blocks: BlockTable,
        place: impl Fn(DeviceRegion) -> [DeviceRegion; 2],
    ) -> CollectiveCall {
        let [input, output] = place(Arena::new(4096).leak().as_device());
        CollectiveCall {
            collective,
            input,
            output,
            count: blocks.longest(),
            blocks: Some(Arc::new(blocks)),
            dtype: DataType::I16,
            reduction: None,
            factor_at: None,
            residual: None,
            root: Rank(1),
            algorithm: None,
            joined: None,
            tag: 0,
            decision: None,
        }
    }

    fn apart(all: DeviceRegion) -> [DeviceRegion; 2] {
        [all.part(0, 2048), all.part(2048, 2048)]
    }

    /// Each step with its addresses as bytes from the start of the send buffer (s) or of the receive buffer (r).
    fn told(call: &CollectiveCall, rank: usize) -> Vec<String> {
        let (input, output) = (call.input.address() as usize, call.output.address() as usize);
        let at = |address: usize| match address {
            0 => "none".to_string(),
            _ if (output..output + call.output.len()).contains(&address) => format!("r{}", address - output),
            _ => format!("s{}", address - input),
        };
        let text = |step: &VendorStep| match *step {
            VendorStep::Broadcast { root, send, recv, count } => {
                format!("broadcast {count} of {root}: {} {}", at(send), at(recv))
            }
            VendorStep::Reduce { root, send, recv, count } => {
                format!("reduce {count} to {root}: {} {}", at(send), at(recv))
            }
            VendorStep::Message { direction, peer, at: place, count } => {
                format!("{direction:?} {count} {peer}: {}", at(place))
            }
        };
        steps(call, Rank::from_index(rank), RANKS).iter().map(text).collect()
    }

    #[test]
    fn an_all_gather_is_a_broadcast_of_each_block_that_has_elements() {
        let table = BlockTable::of_all(Collective::AllGather, Rank(2), packed(&[5, 0, 7]));
        let call = call(Collective::AllGather, table, apart);
        assert_eq!(told(&call, 2), ["broadcast 5 of 0: r0 r0", "broadcast 7 of 2: s0 r10"]);
    }

    #[test]
    fn a_reduce_scatter_is_a_reduction_to_each_rank_that_gets_elements() {
        let places = vec![Extent { count: 5, at: 9 }, Extent { count: 0, at: 0 }, Extent { count: 2, at: 1 }];
        let table = BlockTable::of_all(Collective::ReduceScatter, Rank(0), places);
        let call = call(Collective::ReduceScatter, table, apart);
        assert_eq!(told(&call, 0), ["reduce 5 to 0: s18 r0", "reduce 2 to 2: s2 none"]);
    }

    #[test]
    fn an_all_to_all_is_a_message_to_and_from_each_rank_that_has_elements() {
        let table = BlockTable::of_pairs(packed(&[1, 2, 0]), packed(&[4, 2, 3]));
        let call = call(Collective::AllToAll, table, apart);
        assert_eq!(told(&call, 1), ["Send 2 1: s2", "Recv 2 1: r8", "Recv 4 0: r0", "Send 1 0: s0", "Recv 3 2: r12"]);
    }

    #[test]
    fn the_root_of_a_gather_receives_from_all_and_its_own_block_stays_in_place() {
        let gathered = |place: fn(DeviceRegion) -> [DeviceRegion; 2]| {
            let table = BlockTable::of_pairs(packed(&[6]), packed(&[4, 6, 0]));
            told(&call(Collective::Gather, table, place), 1)
        };
        assert_eq!(gathered(apart), ["Send 6 1: s0", "Recv 6 1: r8", "Recv 4 0: r0"]);
        assert_eq!(gathered(|all| [all.part(8, 12), all.part(0, 20)]), ["Recv 4 0: r0"]);
        let other = call(Collective::Gather, BlockTable::of_pairs(packed(&[4]), Vec::new()), apart);
        assert_eq!(told(&other, 0), ["Send 4 1: s0"]);
    }

    #[test]
    fn the_root_of_a_scatter_sends_to_all_and_the_others_receive() {
        let root = call(Collective::Scatter, BlockTable::of_pairs(packed(&[4, 6, 0]), packed(&[6])), apart);
        assert_eq!(told(&root, 1), ["Send 6 1: s8", "Recv 6 1: r0", "Send 4 0: s0"]);
        let other = call(Collective::Scatter, BlockTable::of_pairs(Vec::new(), packed(&[0])), apart);
        assert_eq!(told(&other, 2), [""; 0]);
    }
}
