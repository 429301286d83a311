//! MPI's own collectives as a provider: each call is the non-blocking one of that name, on a communicator of MPI's that is for these
//! calls alone.
//!
//! MPI asks all ranks for the same order of collectives on a communicator. That is the order in which Strata's communicator runs its
//! calls, and no other communicator has any part in it. Counts are an `int`: longer blocks are not taken, nor blocks of different
//! sizes that are longer together.
#![forbid(unsafe_code)]

use super::vtable::{collective, element, operation, Collective as ForMpi};
use super::worker::{MpiLink, TransferEnd};
use super::MpiEnvironment;
use crate::dtype::{DataType, Operator};
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::plan::Collective;
use crate::topo::Rank;
use crate::transport::provider::{
    self, BlockList, CollectiveProvider, MostBytes, Opened, ProvidedKind, ProviderCall, ProviderKind, Refused,
    UnevenBlocks,
};
use crate::transport::shm::wakeup::Wakeups;
use crate::transport::{Exchange, Site};
use std::ffi::c_int;
use std::sync::Arc;

/// Elements of a block, at most; of all blocks of a buffer where they differ in size.
const MOST_ELEMENTS: u64 = i32::MAX as u64;

/// Counts and places of blocks, by rank; empty where MPI has none.
#[derive(Debug, Default)]
struct MpiBlocks {
    counts: Vec<c_int>,
    places: Vec<c_int>,
}

/// A collective on its way to the thread that calls MPI.
#[derive(Debug)]
pub struct MpiCollective {
    what: i32,
    element: i32,
    operation: i32,
    root: i32,
    in_place: bool,
    /// What is sent.
    pub send: Region,
    /// Where the result goes.
    pub recv: Region,
    count: u64,
    /// Where blocks differ in size. MPI reads the lists until the call has ended.
    sent: MpiBlocks,
    received: MpiBlocks,
}

/// MPI's type for elements that are reduced; none where it has none.
fn element(dtype: DataType) -> Option<i32> {
    Some(match dtype {
        DataType::I8 => element::INT8,
        DataType::U8 => element::UINT8,
        DataType::I16 => element::INT16,
        DataType::U16 => element::UINT16,
        DataType::I32 => element::INT32,
        DataType::U32 => element::UINT32,
        DataType::I64 => element::INT64,
        DataType::U64 => element::UINT64,
        DataType::F32 => element::FLOAT,
        DataType::F64 => element::DOUBLE,
        DataType::F16 | DataType::BF16 | DataType::F8E4M3 | DataType::F8E5M2 => return None,
    })
}

fn operation(operator: Operator) -> i32 {
    match operator {
        Operator::Sum => operation::SUM,
        Operator::Prod => operation::PROD,
        Operator::Max => operation::MAX,
        Operator::Min => operation::MIN,
        Operator::And => operation::BIT_AND,
        Operator::Or => operation::BIT_OR,
        Operator::Xor => operation::BIT_XOR,
    }
}

/// The type of elements of this size that only move. All ranks' elements are of one size, so that MPI's types agree.
fn moved_element(dtype: DataType) -> i32 {
    match dtype.size() {
        1 => element::UINT8,
        2 => element::UINT16,
        4 => element::UINT32,
        _ => element::UINT64,
    }
}

/// Its number for the plugin. Only scripts do custom ones.
fn number(collective: Collective, uneven: bool) -> Option<i32> {
    Some(match collective {
        Collective::AllGather if uneven => collective::ALL_GATHER_V,
        Collective::ReduceScatter if uneven => collective::REDUCE_SCATTER_V,
        Collective::AllToAll if uneven => collective::ALL_TO_ALL_V,
        Collective::Gather if uneven => collective::GATHER_V,
        Collective::Scatter if uneven => collective::SCATTER_V,
        Collective::AllReduce => collective::ALL_REDUCE,
        Collective::AllGather => collective::ALL_GATHER,
        Collective::ReduceScatter => collective::REDUCE_SCATTER,
        Collective::Broadcast => collective::BROADCAST,
        Collective::Reduce => collective::REDUCE,
        Collective::AllToAll => collective::ALL_TO_ALL,
        Collective::Gather => collective::GATHER,
        Collective::Scatter => collective::SCATTER,
        Collective::Custom => return None,
    })
}

/// Whether every MPI reduces elements as NCCL does, in which integers wrap around. The standard leaves overflow open, and Open MPI's vector
/// instructions saturate sums of 8 and 16 bits, of some elements of a vector and not of others.
fn is_defined(operator: Operator, dtype: DataType) -> bool {
    let is_narrow = matches!(dtype, DataType::I8 | DataType::U8 | DataType::I16 | DataType::U16);
    !(is_narrow && matches!(operator, Operator::Sum | Operator::Prod))
}

/// The most bytes of such calls. What only moves goes as bytes where blocks are of one size, and else as elements, of which more fit.
fn most_bytes(kind: ProvidedKind) -> u64 {
    let size = kind.dtype.size() as u64;
    match kind.operator {
        None if kind.uneven => MOST_ELEMENTS * size,
        None => MOST_ELEMENTS,
        Some(operator) if !is_defined(operator, kind.dtype) => 0,
        Some(_) => element(kind.dtype).map_or(0, |_| MOST_ELEMENTS * size),
    }
}

impl MpiBlocks {
    /// A list for MPI; none of what is too much for its counts.
    fn of(list: &BlockList) -> Option<MpiBlocks> {
        let ints = |numbers: &[u64]| numbers.iter().map(|&number| c_int::try_from(number).ok()).collect::<Option<_>>();
        Some(MpiBlocks { counts: ints(&list.counts)?, places: ints(&list.places)? })
    }

    /// Its addresses: null where there are none.
    fn for_mpi(&self) -> (*const c_int, *const c_int) {
        match self.counts.is_empty() {
            true => (std::ptr::null(), std::ptr::null()),
            false => (self.counts.as_ptr(), self.places.as_ptr()),
        }
    }
}

/// The one block of a rank beside the lists of others, and what MPI has as lists.
fn uneven(collective: Collective, blocks: &UnevenBlocks) -> Option<(u64, MpiBlocks, MpiBlocks)> {
    let UnevenBlocks { send, recv } = blocks;
    let one = |list: &BlockList| list.counts.first().copied().unwrap_or(0);
    let none = MpiBlocks::default;
    Some(match collective {
        Collective::AllGather | Collective::Gather => (one(send), none(), MpiBlocks::of(recv)?),
        // MPI has them one after another.
        Collective::ReduceScatter => (0, none(), MpiBlocks::of(send)?),
        Collective::Scatter => (one(recv), MpiBlocks::of(send)?, none()),
        _ => (0, MpiBlocks::of(send)?, MpiBlocks::of(recv)?),
    })
}

impl MpiCollective {
    /// A call of Strata's.
    fn of(call: &ProviderCall) -> Option<MpiCollective> {
        let ProviderCall { collective, root, send, recv, count, ref blocks, dtype, operator, in_place } = *call;
        let (element, operation, count) = match operator {
            Some(operator) => (element(dtype)?, operation(operator), count as u64),
            None if blocks.is_some() => (moved_element(dtype), 0, 0),
            None => (element::UINT8, 0, (count * dtype.size()) as u64),
        };
        let (what, root) = (number(collective, blocks.is_some())?, root.0 as i32);
        let (count, sent, received) = match blocks {
            None => (count, MpiBlocks::default(), MpiBlocks::default()),
            Some(blocks) => uneven(collective, blocks)?,
        };
        Some(MpiCollective { what, element, operation, root, in_place, send, recv, count, sent, received })
    }

    /// A barrier.
    pub fn barrier() -> MpiCollective {
        let (what, element) = (collective::BARRIER, element::UINT8);
        let (send, recv) = (Region::EMPTY, Region::EMPTY);
        let (sent, received) = (MpiBlocks::default(), MpiBlocks::default());
        MpiCollective { what, element, operation: 0, root: 0, in_place: false, send, recv, count: 0, sent, received }
    }

    /// What the plugin is given. Its lists are this one's.
    pub fn for_mpi(&self) -> ForMpi {
        let MpiCollective { what, element, operation, root, in_place, send, recv, count, ref sent, ref received } =
            *self;
        let ((send_counts, send_places), (recv_counts, recv_places)) = (sent.for_mpi(), received.for_mpi());
        ForMpi {
            what,
            element,
            operation,
            root,
            in_place: i32::from(in_place),
            send: send.as_ptr(),
            recv: recv.as_ptr(),
            count,
            send_counts,
            send_places,
            recv_counts,
            recv_places,
        }
    }

    /// MPI's name of it.
    pub fn name(&self) -> &'static str {
        match self.what {
            collective::ALL_REDUCE => "MPI_Iallreduce",
            collective::ALL_GATHER => "MPI_Iallgather",
            collective::REDUCE_SCATTER => "MPI_Ireduce_scatter_block",
            collective::BROADCAST => "MPI_Ibcast",
            collective::REDUCE => "MPI_Ireduce",
            collective::ALL_TO_ALL => "MPI_Ialltoall",
            collective::GATHER => "MPI_Igather",
            collective::SCATTER => "MPI_Iscatter",
            collective::ALL_GATHER_V => "MPI_Iallgatherv",
            collective::REDUCE_SCATTER_V => "MPI_Ireduce_scatter",
            collective::ALL_TO_ALL_V => "MPI_Ialltoallv",
            collective::GATHER_V => "MPI_Igatherv",
            collective::SCATTER_V => "MPI_Iscatterv",
            _ => "MPI_Ibarrier",
        }
    }
}

/// MPI's own collectives.
pub struct MpiCollectives;

impl ProviderKind for MpiCollectives {
    fn name(&self) -> String {
        provider::MPI.to_string()
    }

    fn open(
        &self,
        site: &Site<'_>,
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<std::result::Result<Opened, Refused>> {
        MpiEnvironment::of_this_process().open_collectives(site, wakeups, exchange)
    }
}

impl MpiEnvironment {
    /// Opens them for a rank. All ranks call it together.
    pub fn open_collectives(
        &self,
        site: &Site<'_>,
        wakeups: &Arc<Wakeups>,
        exchange: &mut dyn Exchange,
    ) -> Result<std::result::Result<Opened, Refused>> {
        let joined = match self.join(site, true, exchange)? {
            Ok(joined) => joined,
            Err(why) => return Ok(Err(Refused { name: provider::MPI.to_string(), why })),
        };
        let (link, _) = joined.link(wakeups, exchange)?;
        let (farewell, _) = joined.link(wakeups, exchange)?;
        let provider = MpiProvider { me: site.me, link, farewell, runs: None, events: Vec::new(), cancelled: false };
        let (name, most) = (provider::MPI.to_string(), MostBytes::of(most_bytes));
        Ok(Ok(Opened { name, provider: Box::new(provider), most }))
    }
}

/// MPI's collectives for one rank of one communicator.
#[derive(Debug)]
struct MpiProvider {
    me: Rank,
    link: MpiLink,
    /// Where ranks say that they leave.
    farewell: MpiLink,
    /// MPI's name of what is under way.
    runs: Option<&'static str>,
    events: Vec<TransferEnd>,
    cancelled: bool,
}

impl CollectiveProvider for MpiProvider {
    fn start(&mut self, call: &ProviderCall) -> Result<()> {
        let name = call.collective.name();
        if self.cancelled {
            return Err(Error::InvalidUsage(format!("{name} after the communicator has failed")));
        }
        let call = MpiCollective::of(call);
        let call = call.ok_or_else(|| Error::Internal(format!("MPI has no {name} of such elements")))?;
        self.runs = Some(call.name());
        self.link.collect(0, call);
        self.link.wait_for(true);
        Ok(())
    }

    fn test(&mut self) -> Result<bool> {
        let Some(name) = self.runs else { return Ok(true) };
        self.link.take(&mut self.events)?;
        let Some(end) = self.events.pop() else { return Ok(false) };
        self.runs = None;
        // Where the program may call MPI next, MPI is silent when this returns.
        self.link.wait_for(false);
        let failed = |error: Error| Error::Remote(format!("{name} at rank {}: {}", self.me, error.text()));
        end.outcome.map(|_| true).map_err(failed)
    }

    fn takes_in_place(&self, collective: Collective) -> bool {
        // Of a reduce-scatter MPI has the whole input in the place of the result then; of the other two it wants all ranks to be in place
        // or none, which each of ours knows of itself only.
        !matches!(collective, Collective::ReduceScatter | Collective::AllReduce | Collective::AllGather)
    }

    fn farthest_place(&self, collective: Collective) -> Option<u64> {
        // MPI has no places for a reduce-scatter.
        (collective != Collective::ReduceScatter).then_some(MOST_ELEMENTS)
    }

    fn wakes(&self) -> bool {
        true
    }

    fn has_thread(&self) -> bool {
        true
    }

    fn has_news(&self) -> bool {
        self.link.has_events()
    }

    fn cancel(&mut self) {
        if !std::mem::replace(&mut self.cancelled, true) {
            self.link.cancel();
        }
        self.runs = None;
    }
}

impl Drop for MpiProvider {
    fn drop(&mut self) {
        if self.runs.is_some() {
            // The memory of what is under way is the program's again.
            self.cancel();
        }
        if !self.cancelled {
            self.link.leave_together(&self.farewell);
        }
    }
}
