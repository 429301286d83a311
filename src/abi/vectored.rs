//! Bodies of the entries for collectives whose blocks differ in size. Counts and displacements are in elements.
//!
//! Checks come in the order of the other collectives' ([`super::operations`]). A call of no elements is made all the same: another
//! rank's counts may be others, and only a message tells.
//!
//! What is no communicator of Strata's is the vendor's, which has no such functions: see [`crate::communicator::shadow::vectored`].
#![forbid(unsafe_code)]

use super::handles;
use super::operations::{checked, rank_of, Checked};
use super::options;
use crate::algorithms;
use crate::communicator::shadow::vectored::{place, submit, VectoredCall};
use crate::communicator::{group, launch_one, CollectiveCall, Comm, Launch, Operation};
use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::interface::layouts::CollConfig;
use crate::interface::pointer::{Buffer, ConstBuffer, ConstPtr};
use crate::interface::types::{CommHandle, OpCode, StreamHandle, TypeCode};
use crate::memory::DeviceRegion;
use crate::plan::blocks::{extents, overlapping, BlockTable, Extent};
use crate::plan::Collective;
use crate::selection::{takes_blocks_of_any_sizes, CarriedName};
use crate::topo::Rank;
use crate::vendor;
use std::ffi::c_int;
use std::sync::Arc;

/// What all of them have.
struct Vectored {
    collective: Collective,
    send: ConstBuffer,
    recv: Buffer,
    dtype: TypeCode,
    op: Option<OpCode>,
    root: c_int,
    comm: CommHandle,
    stream: StreamHandle,
    config: ConstPtr<CollConfig>,
}

/// Who asks for blocks.
struct Asking<'a> {
    rank: Rank,
    root: Rank,
    nranks: usize,
    dtype: DataType,
    collective: &'a str,
}

/// Counts and places of a buffer's blocks, as a program gives them.
#[derive(Clone, Copy)]
struct Sizes {
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    names: [&'static str; 2],
}

impl Sizes {
    /// The blocks, one for each rank.
    fn blocks(&self, asking: &Asking<'_>) -> Result<Vec<Extent>> {
        let [counts, places] = self.names;
        let given = (!self.places.is_null()).then(|| self.places.get_all(asking.nranks, places)).transpose()?;
        let counts_given = self.counts.get_all(asking.nranks, counts)?;
        extents(&counts_given, given.as_deref(), asking.dtype.size(), counts)
    }
}

impl Asking<'_> {
    fn is_root(&self) -> bool {
        self.rank == self.root
    }

    /// One block at the start of a buffer.
    fn single(&self, count: usize, name: &str) -> Result<Vec<Extent>> {
        extents(&[count], None, self.dtype.size(), name)
    }

    /// What a rank has for itself must be what it expects of itself.
    fn agree(&self, sent: Extent, received: Extent, names: [&str; 2]) -> Result<()> {
        if sent.count == received.count {
            return Ok(());
        }
        let ([one, other], rank) = (names, self.rank);
        Err(Error::InvalidArgument(format!(
            "{}: rank {rank} sends itself {} elements ({one}) and receives {} ({other})",
            self.collective, sent.count, received.count
        )))
    }
}

impl Vectored {
    /// Checks all arguments; launches the call, or records it where a group is open. `table` gives the blocks.
    fn submit(&self, table: impl FnOnce(&Asking<'_>) -> Result<BlockTable>) -> Result<()> {
        group::noted(self.record(table))
    }

    fn record(&self, table: impl FnOnce(&Asking<'_>) -> Result<BlockTable>) -> Result<()> {
        let handle = match handles::find(self.comm) {
            Ok(handle) => handle,
            Err(error) => return self.of_vendor(error, table),
        };
        let comm = handle.usable()?;
        let Checked { root, dtype, reduction, factor_at, stream } =
            checked(&comm, self.root, self.dtype, self.op, self.stream)?;
        let place = (Rank::from_index(comm.rank()), root);
        let named = self.algorithm(&comm, root)?;
        let call = CollectiveCall { reduction, factor_at, ..self.call(place, comm.nranks(), dtype, table)? };
        // A provider that does not take the call is left out where it is not forced.
        let named = named.filter(|(name, forced)| *forced || comm.provides_call(name, &call));
        let call = CollectiveCall { algorithm: named.map(|(name, _)| name), ..call };
        comm.check_memory(call.input, "sendbuff")?;
        comm.check_memory(call.output, "recvbuff")?;
        check_overlap(&call, place.0)?;
        handles::note(&handle, &comm);
        let launch = Launch { comm, operation: Operation::Collective(call), stream };
        group::record(launch, handle.blocking)?.map_or(Ok(()), launch_one)
    }

    /// The algorithm that the call's options name, and whether it is forced. One that does no such call is refused if it is, else
    /// Strata chooses.
    fn algorithm(&self, comm: &Comm, root: Rank) -> Result<Option<(String, bool)>> {
        let Some(wish) = options::collective(self.config)? else { return Ok(None) };
        let forced = wish.forced;
        let carries = |carrier| comm.has_carrier(carrier);
        let Some(name) = wish.settle(self.collective, comm.grid(), &comm.scripts(), carries)? else { return Ok(None) };
        let does = |algorithm: &str| {
            let is_provider = algorithms::provider_in(algorithm).is_some();
            is_provider || takes_blocks_of_any_sizes(algorithm, (self.collective, root), comm.grid())
        };
        if CarriedName::parse(&name)?.algorithm().is_none_or(does) {
            return Ok(Some((name, forced)));
        }
        match forced {
            false => Ok(None),
            true => Err(Error::InvalidUsage(format!(
                "algSelection {name} does no {} of blocks of different sizes; forceAlgSelection = 0 leaves the choice to Strata",
                self.collective.name()
            ))),
        }
    }

    /// The call on what is no communicator of Strata's: of the vendor's library, if there is one, or what the `error` says.
    fn of_vendor(&self, error: Error, table: impl FnOnce(&Asking<'_>) -> Result<BlockTable>) -> Result<()> {
        let is_vendor_s = !self.comm.is_null() && !handles::is_name(self.comm);
        let Some(library) = vendor::library().filter(|_| is_vendor_s) else { return Err(error) };
        let (rank, nranks) = place(library, self.comm.0)?;
        let root = rank_of(nranks, self.root, "root")?;
        if let Some(wish) = options::collective(self.config)?.filter(|wish| wish.forced) {
            let text = format!(
                "algSelection {}: on another library's communicator this is a group of its functions",
                wish.name
            );
            return Err(Error::InvalidUsage(text));
        }
        let dtype = self.dtype.get()?;
        if !dtype.is_nccl() {
            let text = format!(
                "data type {} is for communicators in host memory, and this is another library's",
                dtype.name()
            );
            return Err(Error::InvalidArgument(text));
        }
        let call = self.call((rank, root), nranks, dtype, table)?;
        check_overlap(&call, rank)?;
        let (op, stream) = (self.op.map_or(0, |op| op.0), self.stream.0);
        submit(&VectoredCall { handle: self.comm.0, call, op, stream, rank, nranks }, library)
    }

    /// The call with its buffers; what it reduces is not there yet.
    fn call(
        &self,
        (rank, root): (Rank, Rank),
        nranks: usize,
        dtype: DataType,
        table: impl FnOnce(&Asking<'_>) -> Result<BlockTable>,
    ) -> Result<CollectiveCall> {
        let collective = self.collective;
        let blocks = table(&Asking { rank, root, nranks, dtype, collective: collective.name() })?;
        let (sent, received) = blocks.spans();
        Ok(CollectiveCall {
            collective,
            input: self.send.on_device(sent * dtype.size(), "sendbuff")?,
            output: self.recv.as_const().on_device(received * dtype.size(), "recvbuff")?,
            count: blocks.longest(),
            blocks: Some(Arc::new(blocks)),
            joined: None,
            tag: options::tag(self.config)?,
            dtype,
            reduction: None,
            factor_at: None,
            residual: None,
            root,
            algorithm: None,
            decision: None,
        })
    }
}

/// Refuses receive blocks that overlap each other, or a send block but for the own one in place.
fn check_overlap(call: &CollectiveCall, rank: Rank) -> Result<()> {
    let Some(blocks) = &call.blocks else { return Ok(()) };
    let name = call.collective.name();
    if let Some((one, other)) = overlapping(blocks.output()) {
        return Err(Error::InvalidArgument(format!("{name}: blocks {one} and {other} of recvbuff overlap")));
    }
    let size = call.dtype.size();
    let in_memory = |region: DeviceRegion, extents: &[Extent]| -> Vec<(usize, usize, usize)> {
        let filled = extents.iter().enumerate().filter(|(_, extent)| extent.count > 0);
        let address = region.address() as usize;
        filled.map(|(block, at)| (address + at.at * size, address + (at.at + at.count) * size, block)).collect()
    };
    let mut received = in_memory(call.output, blocks.output());
    received.sort_unstable();
    let in_place = call.in_place(rank);
    let is_own = |sent: usize, received: usize| {
        let at = |blocks: &[Extent], block: usize| blocks.len() == 1 || block == rank.index();
        in_place && at(blocks.input(), sent) && at(blocks.output(), received)
    };
    for (begin, end, sent) in in_memory(call.input, blocks.input()) {
        let first = received.partition_point(|block| block.1 <= begin);
        let mut over = received[first..].iter().take_while(|block| block.0 < end);
        if let Some((.., other)) = over.find(|block| !is_own(sent, block.2)) {
            let form = if call.collective == Collective::AllToAll { ", which has no in-place form" } else { "" };
            return Err(Error::InvalidArgument(format!(
                "{name}{form}: block {sent} of sendbuff and block {other} of recvbuff overlap"
            )));
        }
    }
    Ok(())
}

/// `strataAllGatherVConfig`
#[allow(clippy::too_many_arguments)]
pub fn all_gather_config(
    send: ConstBuffer,
    recv: Buffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    dtype: TypeCode,
    comm: CommHandle,
    stream: StreamHandle,
    config: ConstPtr<CollConfig>,
) -> Result<()> {
    let sizes = Sizes { counts, places, names: ["counts", "displs"] };
    let call =
        Vectored { collective: Collective::AllGather, send, recv, dtype, op: None, root: 0, comm, stream, config };
    call.submit(|asking| Ok(BlockTable::of_all(Collective::AllGather, asking.rank, sizes.blocks(asking)?)))
}

/// `strataAllGatherV`
#[allow(clippy::too_many_arguments)]
pub fn all_gather(
    send: ConstBuffer,
    recv: Buffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    dtype: TypeCode,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    all_gather_config(send, recv, counts, places, dtype, comm, stream, ConstPtr::null())
}

/// `strataReduceScatterVConfig`
#[allow(clippy::too_many_arguments)]
pub fn reduce_scatter_config(
    send: ConstBuffer,
    recv: Buffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    dtype: TypeCode,
    op: OpCode,
    comm: CommHandle,
    stream: StreamHandle,
    config: ConstPtr<CollConfig>,
) -> Result<()> {
    let collective = Collective::ReduceScatter;
    let sizes = Sizes { counts, places, names: ["counts", "displs"] };
    let call = Vectored { collective, send, recv, dtype, op: Some(op), root: 0, comm, stream, config };
    call.submit(|asking| Ok(BlockTable::of_all(collective, asking.rank, sizes.blocks(asking)?)))
}

/// `strataReduceScatterV`
#[allow(clippy::too_many_arguments)]
pub fn reduce_scatter(
    send: ConstBuffer,
    recv: Buffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    dtype: TypeCode,
    op: OpCode,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    reduce_scatter_config(send, recv, counts, places, dtype, op, comm, stream, ConstPtr::null())
}

/// `strataAllToAllVConfig`
#[allow(clippy::too_many_arguments)]
pub fn all_to_all_config(
    send: ConstBuffer,
    send_counts: ConstPtr<usize>,
    send_places: ConstPtr<usize>,
    recv: Buffer,
    recv_counts: ConstPtr<usize>,
    recv_places: ConstPtr<usize>,
    dtype: TypeCode,
    comm: CommHandle,
    stream: StreamHandle,
    config: ConstPtr<CollConfig>,
) -> Result<()> {
    let from = Sizes { counts: send_counts, places: send_places, names: ["sendcounts", "sdispls"] };
    let to = Sizes { counts: recv_counts, places: recv_places, names: ["recvcounts", "rdispls"] };
    let call =
        Vectored { collective: Collective::AllToAll, send, recv, dtype, op: None, root: 0, comm, stream, config };
    call.submit(|asking| {
        let (input, output) = (from.blocks(asking)?, to.blocks(asking)?);
        let me = asking.rank.index();
        asking.agree(input[me], output[me], ["sendcounts", "recvcounts"])?;
        Ok(BlockTable::of_pairs(input, output))
    })
}

/// `strataAllToAllV`
#[allow(clippy::too_many_arguments)]
pub fn all_to_all(
    send: ConstBuffer,
    send_counts: ConstPtr<usize>,
    send_places: ConstPtr<usize>,
    recv: Buffer,
    recv_counts: ConstPtr<usize>,
    recv_places: ConstPtr<usize>,
    dtype: TypeCode,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    all_to_all_config(
        send,
        send_counts,
        send_places,
        recv,
        recv_counts,
        recv_places,
        dtype,
        comm,
        stream,
        ConstPtr::null(),
    )
}

/// `strataGatherVConfig`
#[allow(clippy::too_many_arguments)]
pub fn gather_config(
    send: ConstBuffer,
    count: usize,
    recv: Buffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    dtype: TypeCode,
    root: c_int,
    comm: CommHandle,
    stream: StreamHandle,
    config: ConstPtr<CollConfig>,
) -> Result<()> {
    let sizes = Sizes { counts, places, names: ["recvcounts", "displs"] };
    let call = Vectored { collective: Collective::Gather, send, recv, dtype, op: None, root, comm, stream, config };
    call.submit(|asking| {
        let input = asking.single(count, "sendcount")?;
        if !asking.is_root() {
            return Ok(BlockTable::of_pairs(input, Vec::new()));
        }
        let output = sizes.blocks(asking)?;
        asking.agree(input[0], output[asking.rank.index()], ["sendcount", "recvcounts"])?;
        Ok(BlockTable::of_pairs(input, output))
    })
}

/// `strataGatherV`
#[allow(clippy::too_many_arguments)]
pub fn gather(
    send: ConstBuffer,
    count: usize,
    recv: Buffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    dtype: TypeCode,
    root: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    gather_config(send, count, recv, counts, places, dtype, root, comm, stream, ConstPtr::null())
}

/// `strataScatterVConfig`
#[allow(clippy::too_many_arguments)]
pub fn scatter_config(
    send: ConstBuffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    recv: Buffer,
    count: usize,
    dtype: TypeCode,
    root: c_int,
    comm: CommHandle,
    stream: StreamHandle,
    config: ConstPtr<CollConfig>,
) -> Result<()> {
    let sizes = Sizes { counts, places, names: ["sendcounts", "displs"] };
    let call = Vectored { collective: Collective::Scatter, send, recv, dtype, op: None, root, comm, stream, config };
    call.submit(|asking| {
        let output = asking.single(count, "recvcount")?;
        if !asking.is_root() {
            return Ok(BlockTable::of_pairs(Vec::new(), output));
        }
        let input = sizes.blocks(asking)?;
        asking.agree(input[asking.rank.index()], output[0], ["sendcounts", "recvcount"])?;
        Ok(BlockTable::of_pairs(input, output))
    })
}

/// `strataScatterV`
#[allow(clippy::too_many_arguments)]
pub fn scatter(
    send: ConstBuffer,
    counts: ConstPtr<usize>,
    places: ConstPtr<usize>,
    recv: Buffer,
    count: usize,
    dtype: TypeCode,
    root: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    scatter_config(send, counts, places, recv, count, dtype, root, comm, stream, ConstPtr::null())
}
