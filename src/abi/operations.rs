//! Bodies of the entries for collectives, sends and receives, groups and reduction operations.
//!
//! Checks come in NCCL's order: the communicator, the root or peer, the type, the operation, the stream, then sizes and
//! buffers. A call of no elements ends there, successfully.
#![forbid(unsafe_code)]

use super::handles;
use super::options;
use super::streams;
use crate::algorithms;
use crate::code::FloatCode;
use crate::communicator::shadow::coded::{submit, CodedVendorCall};
use crate::communicator::shadow::vectored::place;
use crate::communicator::{
    group, launch_one, Again, CollectiveCall, Comm, Direction, Elements, Factor, Launch, Operation,
};
use crate::device::StreamRef;
use crate::dtype::{DataType, Operator, RedOp, Reduction};
use crate::error::{Error, Result, ShortResult};
use crate::health::CallSummary;
use crate::interface::layouts::{read_versioned, write_versioned, CollConfig, SimInfo};
use crate::interface::pointer::{Buffer, ConstBuffer, ConstPtr, Ptr, Text};
use crate::interface::types::{null, CommHandle, OpCode, Residence, StreamHandle, TypeCode};
use crate::memory::DeviceRegion;
use crate::plan::Collective;
use crate::script::{LoadedScript, Script};
use crate::topo::{Grid, Rank};
use crate::vendor;
use std::ffi::c_int;
use std::sync::Arc;

/// What all collectives have.
struct Call {
    collective: Collective,
    send: ConstBuffer,
    recv: Buffer,
    count: usize,
    dtype: TypeCode,
    op: Option<OpCode>,
    root: c_int,
    comm: CommHandle,
    stream: StreamHandle,
    config: ConstPtr<CollConfig>,
    /// The script that it shall go by.
    script: Option<&'static LoadedScript>,
    /// The code that it asks for.
    coded: Option<CodedCall>,
}

/// What a call says of its code.
#[derive(Clone, Copy)]
struct CodedCall {
    code: FloatCode,
    residual: Buffer,
}

/// A call of a script.
pub struct ScriptCall {
    /// The script.
    pub script: &'static LoadedScript,
    /// Its input.
    pub send: ConstBuffer,
    /// Its output.
    pub recv: Buffer,
    /// Elements of a block.
    pub count: usize,
    /// Their type.
    pub dtype: TypeCode,
    /// How it reduces, where it does.
    pub op: OpCode,
    /// The root, where there is one.
    pub root: c_int,
    /// Among whom.
    pub comm: CommHandle,
    /// In which order.
    pub stream: StreamHandle,
}

/// The collective that a script says, by that script.
pub fn by_script(call: ScriptCall) -> Result<()> {
    let ScriptCall { script, send, recv, count, dtype, op, root, comm, stream } = call;
    let Script { collective, .. } = script.script;
    let is_promised = script.script.contract.as_ref().is_none_or(|contract| contract.promises_reductions());
    // A sum serves as well where nothing that is promised is reduced, and no operation then touches what is only copied.
    let op = script.script.reduces().then_some(if is_promised { op } else { OpCode(RedOp::Sum as c_int) });
    let root = if collective.has_root() { root } else { 0 };
    let config = ConstPtr::null();
    Call { collective, send, recv, count, dtype, op, root, comm, stream, config, script: Some(script), coded: None }
        .submit()
}

impl Call {
    /// What this call has in common with equal ones, where equal ones can be prepared: on the null stream.
    fn key(&self) -> Option<Again> {
        let alone = streams::is_named_null(self.stream)
            && self.config.is_null()
            && self.script.is_none()
            && self.coded.is_none();
        alone.then(|| Again::new(self.collective, self.count, self.dtype.0, self.op.map(|op| op.0), self.root))?
    }

    /// Launches the call, or records it where a group is open.
    #[inline]
    fn submit(&self) -> Result<()> {
        let key = self.key();
        match key.and_then(|key| self.again(key)) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => group::noted(Err(*error)),
            None => group::noted(self.check(key)),
        }
    }

    /// The call as it was made before, if it was. Apart from `submit`, whose frame is on the stack of all other calls.
    #[inline(never)]
    fn again(&self, key: Again) -> Option<ShortResult<()>> {
        let buffers = |input: usize, output: usize| {
            let input = self.send.on_device(input, "sendbuff").ok()?;
            let output = self.recv.as_const().on_device(output, "recvbuff").ok()?;
            (!self.overwrites(input, output)).then_some((input, output))
        };
        handles::recent(self.comm, |comm, blocking| match group::is_open() {
            true => group::record_prepared((comm, blocking), key, buffers),
            false => comm.again(key, buffers),
        })
    }

    /// Checks all arguments; launches the call, or records it where a group is open. With a key it shall go faster next time.
    #[inline(never)]
    fn check(&self, key: Option<Again>) -> Result<()> {
        let handle = match (handles::find(self.comm), self.coded) {
            (Err(error), Some(coded)) => return self.of_vendor(error, coded),
            (handle, _) => handle?,
        };
        let comm = handle.usable()?;
        let (launch, learned) = self.recorded(comm.clone(), key, handle.blocking)?;
        if let Some(launch) = launch {
            launch_one(launch)?;
        }
        if let Some(learned) = learned {
            comm.learn(learned.0, learned.1);
        }
        if key.is_some() {
            handles::note(&handle, &comm);
        }
        Ok(())
    }

    /// Records the call where a group is open, and else gives it to be launched; with what is to be learned of it where it may go faster
    /// next time. Apart from `check`, whose frame is on the stack while it runs.
    #[inline(never)]
    fn recorded(
        &self,
        comm: Arc<Comm>,
        key: Option<Again>,
        blocking: bool,
    ) -> Result<(Option<Launch>, Option<Learned>)> {
        let Some((launch, learned)) = self.checked(comm, key)? else { return Ok((None, None)) };
        Ok((group::record(launch, blocking)?, learned))
    }

    /// The call as it is launched; none where nothing is moved.
    fn checked(&self, comm: Arc<Comm>, key: Option<Again>) -> Result<Option<(Launch, Option<Learned>)>> {
        let Checked { root, dtype, reduction, factor_at, stream } =
            checked(&comm, self.root, self.dtype, self.op, self.stream)?;
        let wish = options::collective(self.config)?;
        let algorithm = match (self.script, self.coded) {
            (Some(script), _) => Some(script.unique_name.clone()),
            (None, Some(coded)) => self.coded_algorithm(coded.code, comm.grid(), dtype)?,
            (None, None) => wish.map_or(Ok(None), |wish| self.settled(wish, &comm, (dtype, reduction)))?,
        };
        let rank = Rank::from_index(comm.rank());
        let (count, most, (sent, received)) = self.blocks(comm.nranks(), rank, root)?;
        let blocks = |blocks: usize| bytes(count, blocks, dtype);
        // The largest buffer of any rank, so that all ranks refuse a count alike.
        blocks(most)?;
        let input = self.send.on_device(blocks(sent)?, "sendbuff")?;
        let output = self.recv.as_const().on_device(blocks(received)?, "recvbuff")?;
        if self.count == 0 {
            comm.note_empty(CallSummary::new(self.collective, 0, dtype, reduction, root));
            return Ok(None);
        }
        comm.check_memory(input, "sendbuff")?;
        comm.check_memory(output, "recvbuff")?;
        let residual = self.residual(reduction, sent, [input, output])?;
        residual.map_or(Ok(()), |residual| comm.check_memory(residual, "residual"))?;
        let collective = self.collective;
        let (decision, blocks, joined) = (None, None, None);
        let mut call = CollectiveCall {
            collective,
            input,
            output,
            count,
            blocks,
            dtype,
            reduction,
            factor_at,
            residual,
            root,
            algorithm,
            tag: options::tag(self.config)?,
            joined,
            decision,
        };
        if comm.nranks() > 1 && self.overwrites(input, output) && !comm.does_in_place(&mut call)? {
            return Err(Error::InvalidArgument(self.overlap(input, output)));
        }
        let learned = key.filter(|key| comm.would_learn(*key)).map(|key| Box::new((key, call.clone())));
        Ok(Some((Launch { comm, operation: Operation::Collective(call), stream }, learned)))
    }
}

/// A call that may go faster next time.
type Learned = Box<(Again, CollectiveCall)>;

impl Call {
    /// The algorithm that a call's options name. A provider that does not take the call is left out where it is not forced.
    fn settled(&self, wish: options::Wish, comm: &Comm, of: (DataType, Option<Reduction>)) -> Result<Option<String>> {
        let forced = wish.forced;
        let name = wish.settle(self.collective, comm.grid(), &comm.scripts(), |carrier| comm.has_carrier(carrier))?;
        let size = (self.collective, self.count.saturating_mul(of.0.size()));
        Ok(name.filter(|name| forced || comm.provides(name, size, of)))
    }

    /// Elements of a block, blocks of the largest buffer of any rank, and those of this one's buffers. A custom collective's
    /// count is of a whole buffer.
    fn blocks(&self, nranks: usize, rank: Rank, root: Rank) -> Result<(usize, usize, (usize, usize))> {
        let (collective, count) = (self.collective, self.count);
        let Some(contract) = self.script.and_then(|script| script.script.contract.as_ref()) else {
            let own = (collective.input_blocks(nranks, rank, root), collective.output_blocks(nranks, rank, root));
            return Ok((count, collective.blocks(nranks), own));
        };
        let blocks = contract.blocks();
        if count % blocks != 0 {
            let text = format!(
                "count {count} is no multiple of {blocks}: the contract of this program speaks of {blocks} equal blocks of a buffer"
            );
            return Err(Error::InvalidArgument(text));
        }
        Ok((count / blocks, blocks, (blocks, blocks)))
    }

    /// The algorithm for a code: none where nothing goes between nodes.
    fn coded_algorithm(&self, code: FloatCode, grid: &Arc<Grid>, dtype: DataType) -> Result<Option<String>> {
        code.check(dtype)?;
        Ok(algorithms::coded_choice(code, self.collective, grid).map(|choice| choice.exact()))
    }

    /// Where what coding leaves out is kept: a float32 for each element of the input of so many blocks.
    fn residual(
        &self,
        reduction: Option<Reduction>,
        blocks: usize,
        buffers: [DeviceRegion; 2],
    ) -> Result<Option<DeviceRegion>> {
        let Some(CodedCall { residual, .. }) = self.coded.filter(|coded| !coded.residual.is_null()) else {
            return Ok(None);
        };
        if reduction.is_some_and(|reduction| reduction.operator != Operator::Sum) {
            let text = "a residual is what is left out of a sum or an average, and op is neither";
            return Err(Error::InvalidArgument(text.to_string()));
        }
        let region = residual.as_const().on_device(bytes(self.count, blocks, DataType::F32)?, "residual")?;
        if buffers.iter().any(|buffer| region.overlaps(*buffer)) {
            return Err(Error::InvalidArgument("the residual overlaps sendbuff or recvbuff".to_string()));
        }
        Ok(Some(region))
    }

    /// A call with a code on what is no communicator of Strata's: of the vendor's library, if there is one, or what the `error` says.
    fn of_vendor(&self, error: Error, CodedCall { code, .. }: CodedCall) -> Result<()> {
        let is_vendor_s = !self.comm.is_null() && !handles::is_name(self.comm);
        let Some(library) = vendor::library().filter(|_| is_vendor_s) else { return Err(error) };
        let (rank, nranks) = place(library, self.comm.0)?;
        let (dtype, collective, op) = (self.dtype.get()?, self.collective, self.op.map_or(0, |op| op.0));
        let own = || Error::InvalidUsage(format!("operation {op} is the program's own, which Strata does not know"));
        let reduction = Reduction::new(RedOp::from_code(op).filter(|op| op.is_nccl()).ok_or_else(own)?, dtype, nranks);
        streams::check_of_vendor(self.stream)?;
        code.check(dtype)?;
        let (count, most, (sent, received)) = self.blocks(nranks, rank, Rank(0))?;
        let blocks = |blocks: usize| bytes(count, blocks, dtype);
        blocks(most)?;
        let input = self.send.on_device(blocks(sent)?, "sendbuff")?;
        let output = self.recv.as_const().on_device(blocks(received)?, "recvbuff")?;
        if count == 0 {
            return Ok(());
        }
        let residual = self.residual(Some(reduction), sent, [input, output])?;
        let plain = CollectiveCall::new(collective, [input, output], count, dtype);
        let call = CollectiveCall { reduction: Some(reduction), residual, ..plain };
        submit(&CodedVendorCall { handle: self.comm.0, call, code, op, stream: self.stream.0, nranks }, library)
    }

    /// Why buffers that overlap are refused.
    fn overlap(&self, input: DeviceRegion, output: DeviceRegion) -> String {
        let name = self.collective.name();
        match input.address() == output.address() {
            true => format!(
                "sendbuff is recvbuff: {name} has no in-place form but by a program in MSCCL's XML (STRATA_PROGRAM_DIR)"
            ),
            false => format!("sendbuff and recvbuff of {name} overlap and are not the same"),
        }
    }

    /// Whether results go over what may still have to be sent: all blocks of an all-to-all are read and written at once, and
    /// a custom collective has what buffers its program wants.
    fn overwrites(&self, input: DeviceRegion, output: DeviceRegion) -> bool {
        matches!(self.collective, Collective::AllToAll | Collective::Custom) && input.overlaps(output)
    }
}

/// What collectives have in common beside their buffers.
pub(super) struct Checked {
    pub(super) root: Rank,
    pub(super) dtype: DataType,
    pub(super) reduction: Option<Reduction>,
    /// Where the factor of a reduction lies that is read when the call begins.
    pub(super) factor_at: Option<DeviceRegion>,
    pub(super) stream: StreamRef,
}

/// Checks that, in the order in which NCCL does.
#[inline]
pub(super) fn checked(
    comm: &Arc<Comm>,
    root: c_int,
    dtype: TypeCode,
    op: Option<OpCode>,
    stream: StreamHandle,
) -> Result<Checked> {
    let root = rank_of(comm.nranks(), root, "root")?;
    let dtype = dtype.get()?;
    comm.check_type(dtype)?;
    let reduction = op.map(|op| comm.reduction(op.0, dtype)).transpose()?;
    let (reduction, factor_at) = reduction.map_or((None, None), |(reduction, place)| (Some(reduction), place));
    let stream = streams::of(comm, stream)?;
    Ok(Checked { root, dtype, reduction, factor_at, stream })
}

/// The rank of this number among `nranks`.
pub(super) fn rank_of(nranks: usize, number: c_int, what: &str) -> Result<Rank> {
    match usize::try_from(number) {
        Ok(index) if index < nranks => Ok(Rank::from_index(index)),
        _ => Err(Error::InvalidArgument(format!("invalid {what} {number} (nranks {nranks})"))),
    }
}

/// The bytes of a buffer, which must be possible in an address space.
fn bytes(count: usize, blocks: usize, dtype: DataType) -> Result<usize> {
    count
        .checked_mul(dtype.size())
        .and_then(|block| block.checked_mul(blocks))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| Error::InvalidArgument(format!("count {count} of {blocks} blocks is more than memory can hold")))
}

macro_rules! collectives {
    ($($(#[doc = $doc:literal])+ $plain:ident, $with_config:ident = $collective:ident(
        $($argument:ident: $type:ty),*) { $($field:ident: $value:expr),* }
    )*) => { $(
        $(#[doc = $doc])+
        #[allow(clippy::too_many_arguments)]
        pub fn $plain(
            send: ConstBuffer, recv: Buffer, count: usize, dtype: TypeCode, $($argument: $type,)*
            comm: CommHandle, stream: StreamHandle,
        ) -> Result<()> {
            let (collective, config) = (Collective::$collective, ConstPtr::null());
            let none = Call { collective, send, recv, count, dtype, op: None, root: 0, comm, stream, config, script: None, coded: None };
            Call { $($field: $value,)* ..none }.submit()
        }

        $(#[doc = $doc])+
        #[allow(clippy::too_many_arguments)]
        pub fn $with_config(
            send: ConstBuffer, recv: Buffer, count: usize, dtype: TypeCode, $($argument: $type,)*
            comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>,
        ) -> Result<()> {
            let collective = Collective::$collective;
            let none = Call { collective, send, recv, count, dtype, op: None, root: 0, comm, stream, config, script: None, coded: None };
            Call { $($field: $value,)* ..none }.submit()
        }
    )* };
}

collectives! {
    /// `ncclAllReduce`
    all_reduce, all_reduce_config = AllReduce(op: OpCode) { op: Some(op) }
    /// `ncclBroadcast`
    broadcast, broadcast_config = Broadcast(root: c_int) { root: root }
    /// `ncclReduce`
    reduce, reduce_config = Reduce(op: OpCode, root: c_int) { op: Some(op), root: root }
    /// `ncclAllGather`
    all_gather, all_gather_config = AllGather() {}
    /// `ncclReduceScatter`
    reduce_scatter, reduce_scatter_config = ReduceScatter(op: OpCode) { op: Some(op) }
    /// `ncclAlltoAll`
    all_to_all, all_to_all_config = AllToAll() {}
    /// `ncclGather`
    gather, gather_config = Gather(root: c_int) { root: root }
    /// `ncclScatter`
    scatter, scatter_config = Scatter(root: c_int) { root: root }
}

/// `strataAllReduceCoded`
#[allow(clippy::too_many_arguments)]
pub fn all_reduce_coded(
    send: ConstBuffer,
    recv: Buffer,
    residual: Buffer,
    count: usize,
    dtype: TypeCode,
    op: OpCode,
    code: Text,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    coded(Collective::AllReduce, (send, recv, residual), (count, dtype, op), code, (comm, stream))
}

/// `strataReduceScatterCoded`
#[allow(clippy::too_many_arguments)]
pub fn reduce_scatter_coded(
    send: ConstBuffer,
    recv: Buffer,
    residual: Buffer,
    count: usize,
    dtype: TypeCode,
    op: OpCode,
    code: Text,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    coded(Collective::ReduceScatter, (send, recv, residual), (count, dtype, op), code, (comm, stream))
}

fn coded(
    collective: Collective,
    (send, recv, residual): (ConstBuffer, Buffer, Buffer),
    (count, dtype, op): (usize, TypeCode, OpCode),
    code: Text,
    (comm, stream): (CommHandle, StreamHandle),
) -> Result<()> {
    let asked = code.get("code").and_then(|name: String| {
        let near = FloatCode::ALL.into_iter().min_by_key(|code| strsim::damerau_levenshtein(code.name(), &name));
        let meant = near.map_or("", FloatCode::name);
        let text = || format!("there is no code {name}; did you mean {meant}? There are bf16, mx8 and int8");
        FloatCode::from_name(&name).ok_or_else(|| Error::InvalidArgument(text()))
    });
    let code = match asked {
        Ok(code) => code,
        Err(error) => return group::noted(Err(error)),
    };
    let (op, root, config) = (Some(op), 0, ConstPtr::null());
    let coded = Some(CodedCall { code, residual });
    Call { collective, send, recv, count, dtype, op, root, comm, stream, config, script: None, coded }.submit()
}

/// `ncclBcast`
pub fn bcast(
    buffer: Buffer,
    count: usize,
    dtype: TypeCode,
    root: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    broadcast(buffer.as_const(), buffer, count, dtype, root, comm, stream)
}

/// `ncclSend`
pub fn send(
    buffer: ConstBuffer,
    count: usize,
    dtype: TypeCode,
    peer: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    message(Direction::Send, buffer, count, dtype, peer, comm, stream)
}

/// `ncclRecv`
pub fn recv(
    buffer: Buffer,
    count: usize,
    dtype: TypeCode,
    peer: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    message(Direction::Recv, buffer.as_const(), count, dtype, peer, comm, stream)
}

fn message(
    direction: Direction,
    buffer: ConstBuffer,
    count: usize,
    dtype: TypeCode,
    peer: c_int,
    comm: CommHandle,
    stream: StreamHandle,
) -> Result<()> {
    let name = match direction {
        Direction::Send => "sendbuff",
        Direction::Recv => "recvbuff",
    };
    // By itself, on the null stream of a communicator that this thread has used lately.
    let at_once = |comm: &Arc<Comm>, _| {
        let peer = rank_of(comm.nranks(), peer, "peer").ok()?;
        let dtype = dtype.get().ok().filter(|dtype| dtype.is_nccl())?;
        let data = buffer.on_device(bytes(count, 1, dtype).ok()?, name).ok()?;
        comm.message_alone(direction, peer, (data, Elements { count, dtype }))
    };
    if streams::is_named_null(stream) && !group::is_open() {
        match handles::recent(comm, at_once) {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => return Err(*error),
            None => {}
        }
    }
    let record = || {
        let handle = handles::find(comm)?;
        let comm = handle.usable()?;
        let peer = rank_of(comm.nranks(), peer, "peer")?;
        let dtype = dtype.get()?;
        comm.check_type(dtype)?;
        let stream = streams::of(&comm, stream)?;
        let data = buffer.on_device(bytes(count, 1, dtype)?, name)?;
        if count == 0 {
            return Ok(());
        }
        comm.check_memory(data, name)?;
        let elements = Elements { count, dtype };
        let operation = match direction {
            Direction::Send => Operation::Send { to: peer, data, elements },
            Direction::Recv => Operation::Recv { from: peer, data, elements },
        };
        handles::note(&handle, &comm);
        group::record(Launch { comm, operation, stream }, handle.blocking)?.map_or(Ok(()), launch_one)
    };
    group::noted(record())
}

/// `ncclGroupStart`
pub fn group_start() -> Result<()> {
    group::start();
    Ok(())
}

/// `ncclGroupEnd`
pub fn group_end() -> Result<()> {
    group::end()
}

/// `ncclGroupSimulateEnd`. The group is closed in any case, as NCCL does, and never launched.
pub fn group_simulate_end(info: Ptr<SimInfo>) -> Result<()> {
    add_estimate(info, false)
}

/// Closes the group as [`group_simulate_end`] does; where it had a part that `others` did, that part's time is there already.
pub fn add_estimate(info: Ptr<SimInfo>, others: bool) -> Result<()> {
    let estimate = group::simulate_end()?;
    if info.is_null() {
        return Ok(());
    }
    let mut read = read_versioned(info.as_const())?;
    if let Some(estimate) = estimate.filter(|&estimate| !others || estimate > 0.0) {
        read.estimated_time = estimate + if others { read.estimated_time } else { 0.0 };
        write_versioned(info, &read)?;
    }
    Ok(())
}

/// `ncclRedOpCreatePreMulSum`. A scalar in host memory is read at once; one in device memory, which is host memory on the
/// host device, when an operation runs that uses it.
pub fn create_pre_mul_sum(
    op: Ptr<OpCode>,
    scalar: Buffer,
    dtype: TypeCode,
    residence: Residence,
    comm: CommHandle,
) -> Result<()> {
    let comm = handles::find(comm)?.usable()?;
    if op.is_null() {
        return Err(null("op"));
    }
    let dtype = dtype.get()?;
    comm.check_type(dtype)?;
    if !(0..=1).contains(&residence.0) {
        return Err(Error::InvalidArgument(format!("invalid scalar residence {}", residence.0)));
    }
    let factor = match residence.0 {
        0 => {
            let place = scalar.as_const().on_device(dtype.size(), "scalar")?;
            comm.check_memory(place, "scalar")?;
            Factor::At(place)
        }
        _ => {
            let mut bytes = [0; 8];
            scalar.as_const().in_process(dtype.size(), "scalar")?.read(&mut bytes[..dtype.size()]);
            Factor::Value(bytes)
        }
    };
    op.set("op", OpCode(comm.create_op(dtype, factor)?))
}

/// `ncclRedOpDestroy`
pub fn destroy_op(op: OpCode, comm: CommHandle) -> Result<()> {
    if (0..5).contains(&op.0) {
        return Err(Error::InvalidArgument("operator is a NCCL builtin.".to_string()));
    }
    handles::find(comm)?.ready()?.destroy_op(op.0)
}
