//! The functions of the C interface: one line for each, and nothing about a function anywhere else.
//!
//! A line gives the release that added the function, its prototype, and its body: `native` names the function that does
//! the work; `unsupported` says why the host device cannot, which is what callers are told with `ncclInvalidUsage`; `over`
//! names what looks at the call in front of the vendor's library.
//! Each list hands its lines to a macro. [`api`](crate::api) makes the exported entries, their `pnccl` twins, the header's
//! prototypes and comments and the list of symbols of them, and reads the bodies' names where it is called; `signatures`
//! makes what calls the functions of a library opened at run time ([`super::signatures`]), and does not look at bodies.

/// NCCL's functions. `{ path } more` calls the macro at `path` with `more`, whether the functions have `pnccl` twins, and the lines.
#[macro_export]
#[doc(hidden)]
macro_rules! nccl_functions {
    ({ $($then:tt)* } $($more:tt)*) => { $($then)*! { $($more)* yes
        "Version and errors" {
            /// The release whose interface the library has, as NCCL_VERSION_CODE.
            "2.0" fn ncclGetVersion(version: Ptr<c_int>) -> Status = native(info::get_version);
            /// The meaning of a result code.
            "1.0" fn ncclGetErrorString(result: Status) -> Text = native(info::error_string);
            /// The text of the process's last error. The thread's next call of this function writes its own in the same place.
            "2.13.4" fn ncclGetLastError(comm: CommHandle) -> Text = native(info::last_error);
            /// Has no effect: the log's settings are read once.
            "2.24.3" fn ncclResetDebugInit() -> () = native(info::reset_debug);
        }
        "Making and ending communicators" {
            /// Makes an id that all ranks of a new communicator share.
            "1.0" fn ncclGetUniqueId(uniqueId: Ptr<UniqueIdBytes>) -> Status = native(communicators::get_unique_id), over(shadow::get_unique_id);
            /// Makes a communicator, with options. All ranks call.
            "2.14.3" fn ncclCommInitRankConfig(
                comm: Ptr<CommHandle>, nranks: c_int, commId: UniqueIdBytes, rank: c_int, config: Ptr<NcclConfig>
            ) -> Status = native(communicators::init_rank_config), over(shadow::init_rank_config);
            /// Makes a communicator. All ranks call.
            "1.0" fn ncclCommInitRank(
                comm: Ptr<CommHandle>, nranks: c_int, commId: UniqueIdBytes, rank: c_int
            ) -> Status = native(communicators::init_rank), over(shadow::init_rank);
            /// Makes all ranks of a communicator in this process, one for each device.
            "1.0" fn ncclCommInitAll(
                comm: Ptr<CommHandle>, ndev: c_int, devlist: ConstPtr<c_int>
            ) -> Status = native(communicators::init_all);
            /// Makes a communicator from several ids, which share the work of bringing the ranks together.
            "2.23.4" fn ncclCommInitRankScalable(
                newcomm: Ptr<CommHandle>, nranks: c_int, myrank: c_int, nId: c_int, commIds: Ptr<UniqueIdBytes>,
                config: Ptr<NcclConfig>
            ) -> Status = native(communicators::init_rank_scalable), over(shadow::init_rank_scalable);
            /// Makes a communicator for each color out of the ranks that give it, ordered by key. With a non-blocking parent it
            /// returns ncclInProgress, and *newcomm is NULL until ncclCommGetAsyncError of the parent no longer gives
            /// ncclInProgress; ncclCommShrink and ncclCommGrow do the same.
            "2.18.1" fn ncclCommSplit(
                comm: CommHandle, color: c_int, key: c_int, newcomm: Ptr<CommHandle>, config: Ptr<NcclConfig>
            ) -> Status = native(communicators::split), over(shadow::split);
            /// Makes a communicator of all ranks but those listed, which do not call.
            "2.27.3" fn ncclCommShrink(
                comm: CommHandle, excludeRanksList: Ptr<c_int>, excludeRanksCount: c_int, newcomm: Ptr<CommHandle>,
                config: Ptr<NcclConfig>, shrinkFlags: c_int
            ) -> Status = native(communicators::shrink), over(shadow::shrink);
            /// Makes an id by which new ranks join a communicator in ncclCommGrow.
            "2.29.2" fn ncclCommGetUniqueId(
                comm: CommHandle, uniqueId: Ptr<UniqueIdBytes>
            ) -> Status = native(communicators::grow_id), over(shadow::grow_id);
            /// Makes a larger communicator: old ranks give theirs and rank -1, new ranks an id and their rank.
            "2.29.2" fn ncclCommGrow(
                comm: CommHandle, nRanks: c_int, uniqueId: ConstPtr<UniqueIdBytes>, rank: c_int,
                newcomm: Ptr<CommHandle>, config: Ptr<NcclConfig>
            ) -> Status = native(communicators::grow), over(shadow::grow);
            /// Waits until all operations have ended; none may follow.
            "2.14.3" fn ncclCommFinalize(comm: CommHandle) -> Status = native(communicators::finalize), over(shadow::finalize);
            /// Ends a communicator.
            "1.0" fn ncclCommDestroy(comm: CommHandle) -> Status = native(communicators::destroy), over(shadow::destroy);
            /// Ends a communicator and whatever runs on it. Other ranks inside an operation with this one get ncclRemoteError at
            /// once. If this rank was in none, their next operation that needs it gets ncclRemoteError, within about 2 s on one
            /// node and 1 s over TCP. They must abort or destroy theirs.
            "2.4.2" fn ncclCommAbort(comm: CommHandle) -> Status = native(communicators::abort), over(shadow::abort);
            /// Ends what runs on a communicator, which can then be split, shrunk, grown or destroyed.
            "2.28.7" fn ncclCommRevoke(comm: CommHandle, revokeFlags: c_int) -> Status = native(communicators::revoke), over(shadow::revoke);
            /// Tells how the communicator fares: ncclSuccess, ncclInProgress, or its first failure.
            "2.4.2" fn ncclCommGetAsyncError(
                comm: CommHandle, asyncError: Ptr<Status>
            ) -> Status = native(communicators::async_error), over(shadow::async_error);
        }
        "Facts about communicators" {
            /// The number of ranks.
            "1.0" fn ncclCommCount(comm: CommHandle, count: Ptr<c_int>) -> Status = native(info::count);
            /// The device of this rank.
            "1.0" fn ncclCommCuDevice(comm: CommHandle, device: Ptr<c_int>) -> Status = native(info::device);
            /// The number of this rank.
            "1.0" fn ncclCommUserRank(comm: CommHandle, rank: Ptr<c_int>) -> Status = native(info::user_rank);
            /// What the communicator can do.
            "2.29.2" fn ncclCommQueryProperties(
                comm: CommHandle, props: Ptr<CommProperties>
            ) -> Status = native(info::properties);
        }
        "Memory" {
            /// Allocates memory that the other ranks of the node can read directly.
            "2.19.1" fn ncclMemAlloc(ptr: Ptr<Buffer>, size: usize) -> Status = native(memory::allocate);
            /// Frees memory of ncclMemAlloc.
            "2.19.1" fn ncclMemFree(ptr: Buffer) -> Status = native(memory::free);
            /// Registers a buffer with a communicator.
            "2.19.1" fn ncclCommRegister(
                comm: CommHandle, buff: Buffer, size: usize, handle: Ptr<Buffer>
            ) -> Status = native(memory::register);
            /// Ends a registration.
            "2.19.1" fn ncclCommDeregister(comm: CommHandle, handle: Buffer) -> Status = native(memory::deregister);
            /// Gives scratch memory back; the communicator cannot be used until ncclCommResume.
            "2.29.7" fn ncclCommSuspend(comm: CommHandle, flags: c_int) -> Status = native(memory::suspend), over(shadow::suspend);
            /// Ends a suspension.
            "2.29.7" fn ncclCommResume(comm: CommHandle) -> Status = native(memory::resume), over(shadow::resume);
            /// Tells how much memory the communicator holds.
            "2.29.7" fn ncclCommMemStats(
                comm: CommHandle, stat: MemStat, value: Ptr<u64>
            ) -> Status = native(memory::statistics);
            /// Makes a window onto a buffer of every rank.
            "2.27.3" fn ncclCommWindowRegister(
                comm: CommHandle, buff: Buffer, size: usize, win: Ptr<Window>, winFlags: c_int
            ) -> Status = unsupported(WINDOWS), over(shadow::window_register);
            /// Ends a window.
            "2.27.3" fn ncclCommWindowDeregister(comm: CommHandle, win: Window) -> Status = unsupported(WINDOWS);
            /// The buffer under a window.
            "2.29.2" fn ncclWinGetUserPtr(
                comm: CommHandle, win: Window, outUserPtr: Ptr<Buffer>
            ) -> Status = unsupported(WINDOWS);
        }
        "Reduction operations" {
            /// Makes an operation that multiplies every input by a scalar and sums.
            "2.11.4" fn ncclRedOpCreatePreMulSum(
                op: Ptr<OpCode>, scalar: Buffer, datatype: TypeCode, residence: Residence, comm: CommHandle
            ) -> Status = native(operations::create_pre_mul_sum);
            /// Ends an operation.
            "2.11.4" fn ncclRedOpDestroy(op: OpCode, comm: CommHandle) -> Status = native(operations::destroy_op);
        }
        "Collectives" {
            /// The root gets the reduction of all vectors. In place: sendbuff = recvbuff. recvbuff may be NULL on ranks that are
            /// not the root.
            "1.0" fn ncclReduce(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, op: OpCode, root: c_int,
                comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::reduce);
            /// Every rank gets the root's vector, in place.
            "1.0" fn ncclBcast(
                buff: Buffer, count: usize, datatype: TypeCode, root: c_int, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::bcast), over(inside);
            /// Every rank gets the root's vector. In place: sendbuff = recvbuff. sendbuff may be NULL on ranks that are not the
            /// root.
            "2.0" fn ncclBroadcast(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, root: c_int,
                comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::broadcast);
            /// Every rank gets the reduction of all vectors. In place: sendbuff = recvbuff.
            "1.0" fn ncclAllReduce(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, op: OpCode,
                comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::all_reduce), over(shadow::all_reduce);
            /// Every rank gets its block of the reduction of all vectors. In place: recvbuff = sendbuff + rank * recvcount
            /// elements.
            "1.0" fn ncclReduceScatter(
                sendbuff: ConstBuffer, recvbuff: Buffer, recvcount: usize, datatype: TypeCode, op: OpCode,
                comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::reduce_scatter), over(shadow::reduce_scatter);
            /// Every rank gets the blocks of all ranks. In place: sendbuff = recvbuff + rank * sendcount elements.
            "1.0" fn ncclAllGather(
                sendbuff: ConstBuffer, recvbuff: Buffer, sendcount: usize, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(operations::all_gather), over(shadow::all_gather);
            /// Every rank gets its block of every rank's vector. There is no in-place form: with more than one rank, overlapping
            /// buffers return ncclInvalidArgument.
            "2.28.3" fn ncclAlltoAll(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(operations::all_to_all), over(inside);
            /// The root gets the blocks of all ranks. In place on the root: sendbuff = recvbuff + root * count elements. recvbuff
            /// may be NULL on ranks that are not the root.
            "2.28.3" fn ncclGather(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, root: c_int,
                comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::gather), over(inside);
            /// Every rank gets its block of the root's vector. In place on the root: recvbuff = sendbuff + root * count elements.
            /// sendbuff may be NULL on ranks that are not the root.
            "2.28.3" fn ncclScatter(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, root: c_int,
                comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::scatter), over(inside);
        }
        "Collectives with options for one call; without options they are the plain ones" {
            /// ncclAllReduce with options.
            "2.31.2" fn ncclAllReduceConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, op: OpCode,
                comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::all_reduce_config), over(shadow::all_reduce_config);
            /// ncclBroadcast with options.
            "2.31.2" fn ncclBroadcastConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, root: c_int,
                comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::broadcast_config);
            /// ncclReduce with options.
            "2.31.2" fn ncclReduceConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, op: OpCode, root: c_int,
                comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::reduce_config);
            /// ncclAllGather with options.
            "2.31.2" fn ncclAllGatherConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, sendcount: usize, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::all_gather_config), over(shadow::all_gather_config);
            /// ncclReduceScatter with options.
            "2.31.2" fn ncclReduceScatterConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, recvcount: usize, datatype: TypeCode, op: OpCode,
                comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::reduce_scatter_config), over(shadow::reduce_scatter_config);
            /// ncclAlltoAll with options.
            "2.31.2" fn ncclAlltoAllConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::all_to_all_config), over(inside);
            /// ncclGather with options.
            "2.31.2" fn ncclGatherConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, root: c_int,
                comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::gather_config), over(inside);
            /// ncclScatter with options.
            "2.31.2" fn ncclScatterConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, root: c_int,
                comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(operations::scatter_config), over(inside);
        }
        "Messages between two ranks" {
            /// Sends to a rank that calls ncclRecv.
            "2.7.3" fn ncclSend(
                sendbuff: ConstBuffer, count: usize, datatype: TypeCode, peer: c_int, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(operations::send);
            /// Receives from a rank that calls ncclSend.
            "2.7.3" fn ncclRecv(
                recvbuff: Buffer, count: usize, datatype: TypeCode, peer: c_int, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(operations::recv);
            /// Writes into another rank's window and raises a signal there.
            "2.29.2" fn ncclPutSignal(
                localbuff: ConstBuffer, count: usize, datatype: TypeCode, peer: c_int, peerWin: Window,
                peerWinOffset: usize, sigIdx: c_int, ctx: c_int, flags: u32, comm: CommHandle, stream: StreamHandle
            ) -> Status = unsupported(ONE_SIDED);
            /// Raises a signal at another rank.
            "2.29.2" fn ncclSignal(
                peer: c_int, sigIdx: c_int, ctx: c_int, flags: u32, comm: CommHandle, stream: StreamHandle
            ) -> Status = unsupported(ONE_SIDED);
            /// Waits for signals of other ranks.
            "2.29.2" fn ncclWaitSignal(
                nDesc: c_int, signalDescs: Ptr<WaitSignalDesc>, comm: CommHandle, stream: StreamHandle
            ) -> Status = unsupported(ONE_SIDED);
        }
        "Groups" {
            /// Begins a group: calls are recorded until its end. Blocking and non-blocking communicators may not share a group:
            /// the call that mixes them and the end of the group return ncclInvalidArgument, and nothing of the group is done.
            "2.0" fn ncclGroupStart() -> Status = native(operations::group_start), over(shadow::group_start);
            /// Ends a group: what was recorded is done, all at once.
            "2.0" fn ncclGroupEnd() -> Status = native(operations::group_end), over(shadow::group_end);
            /// Ends a group without doing anything; tells how long it would take.
            "2.22.3" fn ncclGroupSimulateEnd(
                simInfo: Ptr<SimInfo>
            ) -> Status = native(operations::group_simulate_end), over(shadow::group_simulate_end);
        }
        "Encryption of what goes over sockets" {
            /// Asks for encryption, which Strata does not have.
            "2.32.3" fn ncclSetEncryption(
                config: ConstPtr<EncryptionConfig>
            ) -> Status = native(info::set_encryption);
        }
        "Parameters: the STRATA_ and NCCL_ variables that the library reads" {
            /// A handle for the parameter with this key.
            "2.30.4" fn ncclParamBind(out: Ptr<ParamHandle>, key: Text) -> Status = native(params::bind);
            /// The value as a number.
            "2.30.4" fn ncclParamGetI8(h: ParamHandle, out: Ptr<i8>) -> Status = native(params::get_number);
            /// The value as a number.
            "2.30.4" fn ncclParamGetI16(h: ParamHandle, out: Ptr<i16>) -> Status = native(params::get_number);
            /// The value as a number.
            "2.30.4" fn ncclParamGetI32(h: ParamHandle, out: Ptr<i32>) -> Status = native(params::get_number);
            /// The value as a number.
            "2.30.4" fn ncclParamGetI64(h: ParamHandle, out: Ptr<i64>) -> Status = native(params::get_number);
            /// The value as a number.
            "2.30.4" fn ncclParamGetU8(h: ParamHandle, out: Ptr<u8>) -> Status = native(params::get_number);
            /// The value as a number.
            "2.30.4" fn ncclParamGetU16(h: ParamHandle, out: Ptr<u16>) -> Status = native(params::get_number);
            /// The value as a number.
            "2.30.4" fn ncclParamGetU32(h: ParamHandle, out: Ptr<u32>) -> Status = native(params::get_number);
            /// The value as a number.
            "2.30.4" fn ncclParamGetU64(h: ParamHandle, out: Ptr<u64>) -> Status = native(params::get_number);
            /// The value as text, valid until the thread's next call of this function.
            "2.30.4" fn ncclParamGetStr(h: ParamHandle, out: Ptr<Text>) -> Status = native(params::get_text);
            /// The value as bytes: its text and a zero byte.
            "2.30.4" fn ncclParamGet(
                h: ParamHandle, out: Buffer, maxLen: c_int, len: Ptr<c_int>
            ) -> Status = native(params::get_bytes);
            /// The value with this key as text, valid until the thread's next call of this function.
            "2.30.4" fn ncclParamGetParameter(
                key: Text, value: Ptr<Text>, valueLen: Ptr<c_int>
            ) -> Status = native(params::get_by_key);
            /// All keys, valid until the thread's next call of this function.
            "2.30.4" fn ncclParamGetAllParameterKeys(
                table: Ptr<Ptr<Text>>, tableLen: Ptr<c_int>
            ) -> Status = native(params::all_keys);
            /// Writes all parameters to the log.
            "2.30.4" fn ncclParamDumpAll() -> () = native(params::dump);
        }
        "Teams of ranks" {
            /// All ranks.
            "2.28.3" fn ncclTeamWorld(comm: CommHandle) -> Team = native(info::team_world);
            /// The ranks that reach each other's memory: on the host device each rank alone.
            "2.28.3" fn ncclTeamLsa(comm: CommHandle) -> Team = native(info::team_lsa);
            /// The ranks of equal place in their Lsa teams: on the host device all ranks.
            "2.28.3" fn ncclTeamRail(comm: CommHandle) -> Team = native(info::team_world);
            /// The ranks of a CFT team: on the host device each rank alone.
            "2.31.2" fn ncclTeamCft(comm: CommHandle, mode: CftTeamMode) -> Team = native(info::team_cft);
            /// The ranks of a CFT multicast team: on the host device each rank alone.
            "2.31.2" fn ncclTeamCftMultimem(comm: CommHandle) -> Team = native(info::team_lsa);
            /// A team's rank as a rank of the communicator.
            "2.28.3" fn ncclTeamRankToWorld(
                comm: CommHandle, team: Team, rank: c_int
            ) -> c_int = native(info::rank_to_world);
            /// A team's rank as a rank of the Lsa team.
            "2.28.3" fn ncclTeamRankToLsa(
                comm: CommHandle, team: Team, rank: c_int
            ) -> c_int = native(info::rank_to_lsa);
        }
        "Communication from inside kernels" {
            /// Makes what kernels need of a communicator.
            "2.28.3" fn ncclDevCommCreate(
                comm: CommHandle, reqs: ConstPtr<DevCommRequirements>, outDevComm: Ptr<DevComm>
            ) -> Status = unsupported(KERNELS);
            /// Ends it.
            "2.28.3" fn ncclDevCommDestroy(
                comm: CommHandle, devComm: ConstPtr<DevComm>
            ) -> Status = unsupported(KERNELS);
            /// The multicast address of a place in a window, for the Lsa team.
            "2.29.2" fn ncclGetLsaMultimemDevicePointer(
                window: Window, offset: usize, outPtr: Ptr<Buffer>
            ) -> Status = unsupported(WINDOWS);
            /// The multicast address of a place in a window.
            "2.29.2" fn ncclGetMultimemDevicePointer(
                window: Window, offset: usize, multimem: MultimemHandle, outPtr: Ptr<Buffer>
            ) -> Status = unsupported(WINDOWS);
            /// The address of a place in the window of a rank of the Lsa team.
            "2.29.2" fn ncclGetLsaDevicePointer(
                window: Window, offset: usize, lsaRank: c_int, outPtr: Ptr<Buffer>
            ) -> Status = unsupported(WINDOWS);
            /// The address of a place in the window of a rank.
            "2.29.2" fn ncclGetPeerDevicePointer(
                window: Window, offset: usize, peer: c_int, outPtr: Ptr<Buffer>
            ) -> Status = unsupported(WINDOWS);
            /// The multicast endpoint of a place in a window.
            "2.31.2" fn ncclGetMultimemDeviceLeInfo(
                window: Window, offset: usize, leId: Ptr<u32>, leOffset: Ptr<usize>
            ) -> Status = unsupported(WINDOWS);
            /// The endpoint of a place in the window of a rank of a CFT team.
            "2.31.2" fn ncclGetCftDeviceLeInfo(
                window: Window, offset: usize, peerCft: c_int, cftTeam: Team, leId: Ptr<u32>, leOffset: Ptr<usize>
            ) -> Status = unsupported(WINDOWS);
            /// The endpoint of a place in the window of a rank.
            "2.31.2" fn ncclGetPeerDeviceLeInfo(
                window: Window, offset: usize, peerWorld: c_int, leId: Ptr<u32>, leOffset: Ptr<usize>
            ) -> Status = unsupported(WINDOWS);
            /// What a barrier over an Lsa team needs.
            "2.28.3" fn ncclLsaBarrierCreateRequirement(
                team: Team, nBarriers: c_int, outHandle: Ptr<LsaBarrierHandle>, outReq: Ptr<DevResourceRequirements>
            ) -> Status = unsupported(KERNELS);
            /// What a barrier over the network needs.
            "2.28.7" fn ncclGinBarrierCreateRequirement(
                comm: CommHandle, team: Team, nBarriers: c_int, outHandle: Ptr<GinBarrierHandle>,
                outReq: Ptr<DevResourceRequirements>
            ) -> Status = unsupported(KERNELS);
            /// The slots that a low-latency all-to-all of so many elements takes.
            "2.28.3" fn ncclLLA2ACalcSlots(maxElts: c_int, maxEltSize: c_int) -> c_int = native(info::lla2a_slots);
            /// What a low-latency all-to-all needs.
            "2.28.3" fn ncclLLA2ACreateRequirement(
                nBlocks: c_int, nSlots: c_int, outHandle: Ptr<Lla2aHandle>, outReq: Ptr<DevResourceRequirements>
            ) -> Status = unsupported(KERNELS);
            /// What a network outbox needs.
            "2.30.3" fn ncclGinOutboxCreateRequirement(
                nBlocks: c_int, size_log2: c_int, outHandle: Ptr<GinOutboxHandle>,
                outReq: Ptr<DevResourceRequirements>
            ) -> Status = unsupported(KERNELS);
            /// What a network inbox needs.
            "2.30.3" fn ncclGinInboxA2ACreateRequirement(
                peers: Team, nBlocks: c_int, size_log2: c_int, outHandle: Ptr<GinInboxHandle>,
                outReq: Ptr<DevResourceRequirements>
            ) -> Status = unsupported(KERNELS);
        }
    } };
}

/// NCCL's function without a `pnccl` twin. `{ path } more` calls the macro at `path` with `more`, whether the functions have `pnccl` twins, and the lines.
#[macro_export]
#[doc(hidden)]
macro_rules! single_functions {
    ({ $($then:tt)* } $($more:tt)*) => { $($then)*! { $($more)* no
        "Version and errors" {
            /// Has no effect, like ncclResetDebugInit.
            "2.31.2" fn ncclResetDebugInitInternal() -> () = native(info::reset_debug);
        }
    } };
}

/// What MSCCL's fork of NCCL adds to it. `{ path } more` calls the macro at `path` with `more`, whether the functions have `pnccl` twins, and the lines.
#[macro_export]
#[doc(hidden)]
macro_rules! msccl_functions {
    ({ $($then:tt)* } $($more:tt)*) => { $($then)*! { $($more)* no
        "MSCCL: programs for collectives" {
            /// Runs the program that stands at a place, counted from 0, in rank 0's MSCCL_XML_FILES.
            "MSCCL" fn ncclCustomCollective(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, op: OpCode,
                mscclAlgorithmIndex: c_int, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(scripts::custom), over(inside);
        }
    } };
}

/// Functions that AMD's library has beside NVIDIA's. `{ path } more` calls the macro at `path` with `more`, whether the functions have `pnccl` twins, and the lines.
#[macro_export]
#[doc(hidden)]
macro_rules! rccl_functions {
    ({ $($then:tt)* } $($more:tt)*) => { $($then)*! { $($more)* rccl
        "RCCL: making communicators" {
            /// ncclCommInitRank for several ranks on a device, which tell each other by numbers of their own.
            "RCCL 2.12.10" fn ncclCommInitRankMulti(
                comm: Ptr<CommHandle>, nranks: c_int, commId: UniqueIdBytes, rank: c_int, virtualId: c_int
            ) -> Status = native(communicators::init_rank_multi), over(shadow::init_rank_multi);
        }
        "RCCL: collectives" {
            /// Every rank gets its block of every rank's vector; the blocks differ in size. On a communicator of Strata's it is
            /// strataAllToAllV.
            "RCCL" fn ncclAlltoAllv(
                sendbuff: ConstBuffer, sendcounts: ConstPtr<usize>, sdispls: ConstPtr<usize>, recvbuff: Buffer,
                recvcounts: ConstPtr<usize>, rdispls: ConstPtr<usize>, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(vectored::all_to_all), over(inside);
            /// ncclAlltoAllv under its older name.
            "RCCL" fn ncclAllToAllv(
                sendbuff: ConstBuffer, sendcounts: ConstPtr<usize>, sdispls: ConstPtr<usize>, recvbuff: Buffer,
                recvcounts: ConstPtr<usize>, rdispls: ConstPtr<usize>, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(vectored::all_to_all), over(inside);
            /// ncclAlltoAll under its older name.
            "RCCL" fn ncclAllToAll(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(operations::all_to_all), over(inside);
            /// Every rank gets the reduction of all vectors and of a bias.
            "RCCL 2.28.3" fn ncclAllReduceWithBias(
                sendbuff: ConstBuffer, recvbuff: Buffer, count: usize, datatype: TypeCode, op: OpCode,
                comm: CommHandle, stream: StreamHandle, acc: ConstBuffer
            ) -> Status = unsupported(BIAS), over(inside);
        }
        "RCCL: programs for collectives" {
            /// Loads a program in MSCCL's XML and proves it. Each rank loads the same file; what is wrong with it is
            /// ncclGetLastError's text.
            "RCCL" fn mscclLoadAlgo(
                mscclAlgoFilePath: Text, mscclAlgoHandle: Ptr<c_int>, rank: c_int
            ) -> Status = native(scripts::load), over(inside);
            /// Runs a program: the collective it says, on count elements of a block. Counts and displacements are null.
            "RCCL" fn mscclRunAlgo(
                sendBuff: ConstBuffer, sendCounts: ConstPtr<usize>, sDisPls: ConstPtr<usize>, recvBuff: Buffer,
                recvCounts: ConstPtr<usize>, rDisPls: ConstPtr<usize>, count: usize, dataType: TypeCode, root: c_int,
                peer: c_int, op: OpCode, mscclAlgoHandle: c_int, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(scripts::run), over(inside);
            /// Forgets a program.
            "RCCL" fn mscclUnloadAlgo(mscclAlgoHandle: c_int) -> Status = native(scripts::unload), over(inside);
        }
    } };
}

/// Strata's own functions. `{ path } more` calls the macro at `path` with `more`, whether the functions have `pnccl` twins, and the lines.
#[macro_export]
#[doc(hidden)]
macro_rules! own_functions {
    ({ $($then:tt)* } $($more:tt)*) => { $($then)*! { $($more)* no
        "Communicators of the host" {
            /// Makes an id for strataCommInitHost, without NCCL. That function takes an id of ncclGetUniqueId as well,
            /// unless NCCL_COMM_ID is set in a process in which NCCL serves.
            "strata" fn strataGetUniqueId(uniqueId: Ptr<UniqueIdBytes>) -> Status = native(communicators::get_unique_id);
            /// This process's rank among those that a launcher has started, their number, and an id for a communicator of
            /// them all, which process 0 makes. All processes call. The launcher's variables count: those of torchrun and
            /// strata launch, else of MPI's launchers, else of srun; with none of them the process is rank 0 of 1.
            "strata" fn strataGetWorldId(
                uniqueId: Ptr<UniqueIdBytes>, nranks: Ptr<c_int>, rank: Ptr<c_int>
            ) -> Status = native(communicators::get_world_id);
            /// Makes a communicator on the host, whatever vendor library or driver the process has mapped. All ranks call.
            /// What NCCL's functions make of it is on the host, too. timeout_ms limits its making and each operation: 0 sets no
            /// limit, and a negative one leaves the defaults. It always waits, NCCL_COMM_BLOCKING or not. Rank 0's limit counts.
            /// Sends and receives on it wait for no collective, no other peer and no message the other way; messages from one
            /// rank to another keep the order of the calls. On one stream a receive goes on beside sends and receives before it
            /// that do not use its memory, and a send beside sends; everything else waits for what is before it, as a send
            /// does for a receive. On the null stream a send may wait for its receive.
            "strata" fn strataCommInitHost(
                comm: Ptr<CommHandle>, nranks: c_int, id: UniqueIdBytes, rank: c_int, timeout_ms: c_int
            ) -> Status = native(communicators::init_host);
            /// The text of this thread's last call that failed in Strata, also where NCCL answers ncclGetLastError(NULL); on a
            /// thread without one that of the process's last error, and in a callback of strataStreamAddCallbackStatus that of
            /// its status. The thread's next call of this function writes its own in the same place.
            "strata" fn strataGetLastError() -> Text = native(info::own_last_error);
        }
        "Collectives of blocks of different sizes" {
            /// Every rank gets every rank's block. For each rank counts has its elements, and displs where they begin in recvbuff;
            /// they lie one after another where displs is null. All ranks have the same counts. In place where sendbuff is the
            /// rank's block of recvbuff. What lies between blocks is not touched. This function and those below work on NCCL's and
            /// RCCL's communicators as well.
            "strata" fn strataAllGatherV(
                sendbuff: ConstBuffer, recvbuff: Buffer, counts: ConstPtr<usize>, displs: ConstPtr<usize>, datatype: TypeCode,
                comm: CommHandle, stream: StreamHandle
            ) -> Status = native(vectored::all_gather);
            /// Rank i gets block i of the reduction of all vectors. For each rank counts has its elements, and displs where they
            /// begin in sendbuff. All ranks have the same counts. In place where recvbuff is the rank's block of sendbuff.
            "strata" fn strataReduceScatterV(
                sendbuff: ConstBuffer, recvbuff: Buffer, counts: ConstPtr<usize>, displs: ConstPtr<usize>, datatype: TypeCode,
                op: OpCode, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(vectored::reduce_scatter);
            /// Every rank gets its block of every rank's vector. What rank i has for rank j is what j expects of i.
            "strata" fn strataAllToAllV(
                sendbuff: ConstBuffer, sendcounts: ConstPtr<usize>, sdispls: ConstPtr<usize>, recvbuff: Buffer,
                recvcounts: ConstPtr<usize>, rdispls: ConstPtr<usize>, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle
            ) -> Status = native(vectored::all_to_all);
            /// The root gets every rank's block. recvcounts and displs are the root's alone. In place where the root's sendbuff is
            /// its block of recvbuff.
            "strata" fn strataGatherV(
                sendbuff: ConstBuffer, sendcount: usize, recvbuff: Buffer, recvcounts: ConstPtr<usize>,
                displs: ConstPtr<usize>, datatype: TypeCode, root: c_int, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(vectored::gather);
            /// Every rank gets its block of the root's vector. sendcounts and displs are the root's alone. In place where the root's
            /// recvbuff is its block of sendbuff.
            "strata" fn strataScatterV(
                sendbuff: ConstBuffer, sendcounts: ConstPtr<usize>, displs: ConstPtr<usize>, recvbuff: Buffer,
                recvcount: usize, datatype: TypeCode, root: c_int, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(vectored::scatter);
            /// ncclAllReduce whose messages between nodes are coded: code is "bf16", "mx8" or "int8" (docs/codes.md), datatype a float
            /// that it makes smaller. Where residual is not null it has count float32, zeros at first, which the program leaves
            /// alone between calls: what coding leaves out of a sum is added to the next one. All ranks give a residual or none.
            /// On a communicator of NCCL or RCCL on several nodes Strata's own transports have to carry what goes between them
            /// (STRATA_INTER); else it is ncclInvalidUsage.
            "strata" fn strataAllReduceCoded(
                sendbuff: ConstBuffer, recvbuff: Buffer, residual: Buffer, count: usize, datatype: TypeCode, op: OpCode,
                code: Text, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::all_reduce_coded);
            /// The same of ncclReduceScatter; the residual has as many elements as sendbuff.
            "strata" fn strataReduceScatterCoded(
                sendbuff: ConstBuffer, recvbuff: Buffer, residual: Buffer, recvcount: usize, datatype: TypeCode,
                op: OpCode, code: Text, comm: CommHandle, stream: StreamHandle
            ) -> Status = native(operations::reduce_scatter_coded);
            /// strataAllGatherV with options, as ncclAllGatherConfig has them. On a communicator of another library algSelection may not be
            /// forced. All ranks give the same options.
            "strata" fn strataAllGatherVConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, counts: ConstPtr<usize>, displs: ConstPtr<usize>,
                datatype: TypeCode, comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(vectored::all_gather_config);
            /// strataReduceScatterV with options.
            "strata" fn strataReduceScatterVConfig(
                sendbuff: ConstBuffer, recvbuff: Buffer, counts: ConstPtr<usize>, displs: ConstPtr<usize>,
                datatype: TypeCode, op: OpCode, comm: CommHandle, stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(vectored::reduce_scatter_config);
            /// strataAllToAllV with options.
            "strata" fn strataAllToAllVConfig(
                sendbuff: ConstBuffer, sendcounts: ConstPtr<usize>, sdispls: ConstPtr<usize>, recvbuff: Buffer,
                recvcounts: ConstPtr<usize>, rdispls: ConstPtr<usize>, datatype: TypeCode, comm: CommHandle,
                stream: StreamHandle, config: ConstPtr<CollConfig>
            ) -> Status = native(vectored::all_to_all_config);
            /// strataGatherV with options.
            "strata" fn strataGatherVConfig(
                sendbuff: ConstBuffer, sendcount: usize, recvbuff: Buffer, recvcounts: ConstPtr<usize>,
                displs: ConstPtr<usize>, datatype: TypeCode, root: c_int, comm: CommHandle, stream: StreamHandle,
                config: ConstPtr<CollConfig>
            ) -> Status = native(vectored::gather_config);
            /// strataScatterV with options.
            "strata" fn strataScatterVConfig(
                sendbuff: ConstBuffer, sendcounts: ConstPtr<usize>, displs: ConstPtr<usize>, recvbuff: Buffer,
                recvcount: usize, datatype: TypeCode, root: c_int, comm: CommHandle, stream: StreamHandle,
                config: ConstPtr<CollConfig>
            ) -> Status = native(vectored::scatter_config);
        }
        "Tuning" {
            /// Writes what a tuning table says of the machine that a communicator is on: an object in JSON, with a zero
            /// byte after it. ncclInvalidArgument if it takes more than so many bytes (1024 will do).
            "strata" fn strataCommDescribe(
                comm: CommHandle, text: Buffer, bytes: usize
            ) -> Status = native(info::describe), over(shadow::describe);
        }
        "Ranks that are lost" {
            /// Writes who takes part in the communicator's calls and how far they are: an object in JSON, with a zero byte after it. ranks
            /// and members are numbers of ranks as they were when it was made, generation counts how often ranks were lost, first_call
            /// is the number of the first collective of this generation, calls of the collectives that have ended (strataCommAdapt takes two, and one more where something has come back), lost has each rank that
            /// is lost and why, links what STRATA_MEASURE_EVERY or strataCommProfile knows, goes_on whether lost ranks end nothing,
            /// late_calls in how many calls somebody was late. Where STRATA_LOST=continue does not hold calls is null, and where
            /// STRATA_LATE=relay does not late_calls; links where neither of the two has been asked for and no rank is lost. links has epoch, how often shares
            /// have changed by what was found, and mb_per_s, what each rank's link delivers, null where that is not known or the rank is lost. In front of a
            /// vendor's library it tells of calls that Strata carries, ncclInvalidUsage where it carries none. ncclInvalidArgument if it takes more than so many bytes.
            "strata" fn strataCommState(
                comm: CommHandle, text: Buffer, bytes: usize
            ) -> Status = native(info::state), over(shadow::state);
            /// Has a function called when ranks have been lost and the others go on (STRATA_LOST=continue): on every rank that is left,
            /// once for each generation, on the thread of the call in which that was found, or of the next one where a rank was in none,
            /// and before it ends. It may call strataCommState; other calls on the communicator return ncclInvalidUsage there. Null: none any more.
            /// ncclInvalidUsage where lost ranks end the communicator.
            "strata" fn strataCommOnChange(
                comm: CommHandle, callback: Callback, argument: Buffer
            ) -> Status = native(communicators::on_change), over(shadow::on_change);
            /// Says how calls go on without lost ranks (STRATA_LOST=continue) and late ones (STRATA_LATE=relay): options are names with values, commas
            /// between them; what is not named is off, and null names nothing.
            /// "rescale=on" has floats' sums (ncclSum and operations of ncclRedOpCreatePreMulSum) multiplied by the number of ranks over the
            /// number of contributors, so that they are what all would have added on average; sums of integers are ncclInvalidUsage then.
            /// "late=drop" ends the all-reduces that late ranks relay without what these have not contributed: the others wait no longer, the late rank's
            /// call gives the same result, and averages are over the contributors of each element. "late=bring" has it brought, as ever.
            /// All ranks call it, with equal options and in the same place among their collectives; it holds from the next call on. With data on
            /// GPUs, and where lost ranks end the communicator, it returns when all that was called before has ended.
            /// With STRATA_LOST=continue it also has NICs that are up again be used and, in front of a vendor's library, has that work inside the nodes again.
            /// ncclInvalidUsage where ranks ask for different options, where lost ranks end the communicator and late ones are waited for, and for "late=drop"
            /// where late ones are waited for, or calls end when all ranks say that they have them (STRATA_LOST=continue), and in front of a vendor's library; ncclInvalidArgument for what is no option.
            "strata" fn strataCommAdapt(
                comm: CommHandle, options: Text
            ) -> Status = native(communicators::adapt), over(shadow::adapt);
        }
        "Links" {
            /// Measures the links between the communicator's nodes now, with a MiB or more for each of its NICs, and has all-reduces of a MiB or more share their work by
            /// that from then on, until they are measured again (by this, or after every STRATA_MEASURE_EVERY calls). All ranks call it, in the same place among their
            /// collectives; it returns when all have the figures, which strataCommState tells as links. Of ranks on one node it does nothing.
            /// ncclInvalidUsage on communicators of strataCommInitHost.
            "strata" fn strataCommProfile(
                comm: CommHandle
            ) -> Status = native(communicators::profile), over(shadow::profile);
        }
        "Streams" {
            /// Makes a stream.
            "strata" fn strataStreamCreate(stream: Ptr<StreamHandle>) -> Status = native(streams::create);
            /// Ends a stream. What is queued on it is still done, in the background.
            "strata" fn strataStreamDestroy(stream: StreamHandle) -> Status = native(streams::destroy);
            /// Waits until everything queued on the stream is done; returns the first error since the last call.
            "strata" fn strataStreamSynchronize(stream: StreamHandle) -> Status = native(streams::synchronize);
            /// ncclInProgress while something is queued on the stream, else ncclSuccess or the first error.
            "strata" fn strataStreamQuery(stream: StreamHandle) -> Status = native(streams::query);
            /// Queues a call of a function of the program, on the stream's thread.
            "strata" fn strataStreamAddCallback(
                stream: StreamHandle, callback: Callback, argument: Buffer
            ) -> Status = native(streams::add_callback);
            /// The same, and the function gets the first error of what was queued since the last such callback, or
            /// ncclSuccess. During the call ncclGetLastError (of a host communicator) gives the error's text.
            "strata" fn strataStreamAddCallbackStatus(
                stream: StreamHandle, callback: StatusCallback, argument: Buffer
            ) -> Status = native(streams::add_callback_status);
            /// Has what is queued on the stream from now on wait until so many bytes from data on are final: in the buffers of
            /// collectives, sends and receives that are queued on host streams and have not ended. They may be used and
            /// overwritten then, though a collective goes on behind them. With a null stream the caller waits. What belongs to
            /// no such operation is final. If one has failed the wait ends with its error.
            "strata" fn strataStreamWaitRange(
                stream: StreamHandle, data: ConstBuffer, bytes: usize
            ) -> Status = native(streams::wait_range);
            /// How many of so many bytes from data on are final; 0 where it returns an error.
            "strata" fn strataRangeQuery(
                data: ConstBuffer, bytes: usize, finalBytes: Ptr<usize>
            ) -> Status = native(streams::query_range);
        }
        "Windows" {
            /// From here to strataWindowEnd the program promises that no collective on this communicator needs the result of another
            /// one. They are held back and run as calls of one group, which become fewer calls: when those held back have this many
            /// bytes (0: no limit), when the first of them is us microseconds old on rank 0 (0: no limit), and at the end. Bytes
            /// of a call are those of its largest buffer on any rank; of blocks whose sizes no rank knows all, none. What is held back
            /// is on no stream yet: nothing but strataWindowEnd waits for it, also where stream is null, and its buffers must stay. All
            /// ranks call it with equal bounds; with a limit of time they come together in it, as in ncclCommSplit. ncclSend, ncclRecv
            /// and what ends the communicator, but for ncclCommAbort, return ncclInvalidUsage until the end. On communicators of
            /// another library nothing is held back.
            "strata" fn strataWindowBegin(comm: CommHandle, bytes: usize, us: u32) -> Status = native(windows::begin);
            /// Launches what is held back. When it returns the calls of the window are as they would be without one: queued on their
            /// streams, those on null streams ended. With a limit of time each runs behind what its stream had been given when it was
            /// made, and what the streams are given from here on comes after them. In a group it acts at the group's end.
            "strata" fn strataWindowEnd(comm: CommHandle) -> Status = native(windows::end);
        }
        "Events" {
            /// Makes an event: a mark in the order of a stream, for which other streams wait. Until it is recorded there is
            /// nothing to wait for. Events are for streams of strataStreamCreate; a GPU's streams have its driver's.
            "strata" fn strataEventCreate(event: Ptr<EventHandle>) -> Status = native(events::create);
            /// Marks what has been queued on the stream so far. Waits that were called before go by the mark before. Not in an
            /// open group, whose operations are queued when it ends.
            "strata" fn strataEventRecord(event: EventHandle, stream: StreamHandle) -> Status = native(events::record);
            /// Has what is queued on the stream from now on wait until everything before the mark is done. With a null stream the
            /// caller waits. If something before the mark has failed, the stream (the call) gets its error and goes on.
            "strata" fn strataEventStreamWait(stream: StreamHandle, event: EventHandle) -> Status = native(events::stream_wait);
            /// ncclInProgress while something before the mark is not done, else ncclSuccess or the first error of its stream then.
            "strata" fn strataEventQuery(event: EventHandle) -> Status = native(events::query);
            /// Waits until everything before the mark is done; returns the first error of its stream then.
            "strata" fn strataEventSynchronize(event: EventHandle) -> Status = native(events::synchronize);
            /// Ends an event. What waits for it already still does.
            "strata" fn strataEventDestroy(event: EventHandle) -> Status = native(events::destroy);
        }
    } };
}
