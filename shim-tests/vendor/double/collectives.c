/* The public functions that move data, and groups. */
#include "double.h"
#include <stdlib.h>
#include <string.h>

static ncclResult_t submit(struct op* op) {
  TRY(op_check(op));
  if (op->count == 0) return ncclSuccess;
  if (op->comm->nranks == 1 && op->func != SEND && op->func != RECV && !gpu_present()) return op_alone(op);
  if (group_depth() > 0) return group_add_op(op);
  group_start();
  group_fail(group_add_op(op));
  return group_end();
}

static ncclResult_t finish(struct call* call, struct op* op) {
  ncclResult_t result = submit(op);
  call_op(call, op);
  group_fail(result);
  return call_end(call, result);
}

ncclResult_t submit_op(const char* name, struct op op) {
  struct call call;
  op.name = name;
  call_begin(&call, name);
  return finish(&call, &op);
}

#define BUFFERS .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype, .comm = comm, .stream = stream

API(ncclResult_t, ncclAllReduce, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclAllReduce", (struct op){.func = ALL_REDUCE, BUFFERS, .op = op});
}

API(ncclResult_t, ncclReduce, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclReduce", (struct op){.func = REDUCE, BUFFERS, .op = op, .root = root});
}

API(ncclResult_t, ncclBroadcast, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclBroadcast", (struct op){.func = BROADCAST, BUFFERS, .root = root});
}

/* By the public name of ncclBroadcast, as the vendor's does. */
API(ncclResult_t, ncclBcast, void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
    cudaStream_t stream) {
  struct call call;
  struct op op = {.send = buff, .recv = buff, .count = count, .type = datatype, .comm = comm, .stream = stream,
                  .func = BROADCAST, .root = root};
  call_begin(&call, "ncclBcast");
  call_op(&call, &op);
  return call_end(&call, ncclBroadcast(buff, buff, count, datatype, root, comm, stream));
}

API(ncclResult_t, ncclReduceScatter, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclReduceScatter", (struct op){.func = REDUCE_SCATTER, BUFFERS, .op = op});
}

API(ncclResult_t, ncclAllGather, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclAllGather", (struct op){.func = ALL_GATHER, BUFFERS});
}

API(ncclResult_t, ncclSend, const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  return submit_op("ncclSend", (struct op){.func = SEND, .send = sendbuff, .count = count, .type = datatype, .root = peer,
                                     .comm = comm, .stream = stream});
}

API(ncclResult_t, ncclRecv, void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  return submit_op("ncclRecv", (struct op){.func = RECV, .recv = recvbuff, .count = count, .type = datatype, .root = peer,
                                     .comm = comm, .stream = stream});
}

#if DOUBLE_VERSION >= 22803 && !defined(DOUBLE_RCCL)
API(ncclResult_t, ncclAlltoAll, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclAlltoAll", (struct op){.func = ALL_TO_ALL, BUFFERS});
}

API(ncclResult_t, ncclGather, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclGather", (struct op){.func = GATHER, BUFFERS, .root = root});
}

API(ncclResult_t, ncclScatter, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream) {
  return submit_op("ncclScatter", (struct op){.func = SCATTER, BUFFERS, .root = root});
}
#endif

#if DOUBLE_VERSION >= 23102
static ncclResult_t run_with(const char* name, struct op op, const ncclCollConfig_t* config) {
  struct call call;
  op.name = name;
  call_begin(&call, name);
  if (!config) return finish(&call, &op);
  if (config->magic != NCCL_API_MAGIC) {
    complain("%s : ncclCollConfig_t argument not initialized", name);
    group_fail(ncclInvalidArgument);
    return call_end(&call, ncclInvalidArgument);
  }
  call_note(&call, " collconfig(size=%zu version=%u", config->size, config->version);
  if (config->algSelection) call_note(&call, " algSelection=%s", config->algSelection);
  if (config->maxCTAs != NCCL_CONFIG_UNDEF_INT) call_note(&call, " maxCTAs=%d", config->maxCTAs);
  call_note(&call, " tag=%llu)", (unsigned long long)config->userProfilerTag);
  op.tag = config->userProfilerTag;
  return finish(&call, &op);
}

API(ncclResult_t, ncclAllReduceConfig, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclAllReduceConfig", (struct op){.func = ALL_REDUCE, BUFFERS, .op = op}, config);
}

API(ncclResult_t, ncclReduceConfig, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclReduceConfig", (struct op){.func = REDUCE, BUFFERS, .op = op, .root = root}, config);
}

API(ncclResult_t, ncclBroadcastConfig, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclBroadcastConfig", (struct op){.func = BROADCAST, BUFFERS, .root = root}, config);
}

API(ncclResult_t, ncclReduceScatterConfig, const void* sendbuff, void* recvbuff, size_t count,
    ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclReduceScatterConfig", (struct op){.func = REDUCE_SCATTER, BUFFERS, .op = op}, config);
}

API(ncclResult_t, ncclAllGatherConfig, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclAllGatherConfig", (struct op){.func = ALL_GATHER, BUFFERS}, config);
}

API(ncclResult_t, ncclAlltoAllConfig, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclAlltoAllConfig", (struct op){.func = ALL_TO_ALL, BUFFERS}, config);
}

API(ncclResult_t, ncclGatherConfig, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclGatherConfig", (struct op){.func = GATHER, BUFFERS, .root = root}, config);
}

API(ncclResult_t, ncclScatterConfig, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return run_with("ncclScatterConfig", (struct op){.func = SCATTER, BUFFERS, .root = root}, config);
}
#endif

/* ---- operations of programs ---- */

static ncclResult_t create(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                           ncclComm_t comm) {
  TRY(comm_ready(comm));
  REFUSE(!op, ncclInvalidArgument, "RedOpCreatePreMulSum : op argument is NULL");
  REFUSE(!scalar, ncclInvalidArgument, "RedOpCreatePreMulSum : scalar argument is NULL");
  REFUSE((int)type < 0 || (int)type >= TYPES, ncclInvalidArgument, "RedOpCreatePreMulSum : invalid type %d", (int)type);
  REFUSE(residence != ncclScalarDevice && residence != ncclScalarHostImmediate, ncclInvalidArgument,
         "RedOpCreatePreMulSum : invalid residence %d", (int)residence);
  int index = 0;
  while (index < comm->redop_count && comm->redops[index].used) index++;
  if (index == comm->redop_count) {
    struct redop* more = realloc(comm->redops, (size_t)(index + 1) * sizeof(*more));
    if (!more) return ncclSystemError;
    comm->redops = more;
    comm->redop_count++;
  }
  struct redop* redop = &comm->redops[index];
  *redop = (struct redop){.used = 1, .type = type, .residence = residence, .pointer = scalar};
  if (residence == ncclScalarHostImmediate) memcpy(&redop->scalar, scalar, type_size(type));
  /* The communicator is in the number: no other accepts it. */
  *op = (ncclRedOp_t)((comm->number << 12) | (ncclNumOps + index));
  atomic_fetch_add(&live_redops, 1);
  return ncclSuccess;
}

API(ncclResult_t, ncclRedOpCreatePreMulSum, ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
    ncclScalarResidence_t residence, ncclComm_t comm) {
  struct call call;
  call_begin(&call, "ncclRedOpCreatePreMulSum");
  call_comm(&call, comm);
  call_note(&call, " type=%s residence=%d", type_name(datatype), (int)residence);
  ncclResult_t result = create(op, scalar, datatype, residence, comm);
  group_fail(result);
  return call_end(&call, result);
}

static ncclResult_t destroy(ncclRedOp_t op, ncclComm_t comm) {
  TRY(comm_check(comm));
  int index = ((int)op & 0xfff) - ncclNumOps, owner = (int)op >> 12;
  REFUSE(owner != comm->number || index < 0 || index >= comm->redop_count || !comm->redops[index].used,
         ncclInvalidArgument, "RedOpDestroy : operator unknown to this communicator");
  comm->redops[index].used = 0;
  atomic_fetch_sub(&live_redops, 1);
  return ncclSuccess;
}

API(ncclResult_t, ncclRedOpDestroy, ncclRedOp_t op, ncclComm_t comm) {
  struct call call;
  call_begin(&call, "ncclRedOpDestroy");
  call_comm(&call, comm);
  ncclResult_t result = destroy(op, comm);
  group_fail(result);
  return call_end(&call, result);
}

/* ---- groups ---- */

API(ncclResult_t, ncclGroupStart, void) {
  struct call call;
  call_begin(&call, "ncclGroupStart");
  return call_end(&call, group_start());
}

API(ncclResult_t, ncclGroupEnd, void) {
  struct call call;
  call_begin(&call, "ncclGroupEnd");
  return call_end(&call, group_end());
}

#if DOUBLE_VERSION >= 22203
static ncclResult_t simulate(ncclSimInfo_t* info) {
  REFUSE(group_depth() == 0, ncclInvalidUsage, "ncclGroupSimulateEnd: not in a group call.");
  int ops = group_simulate();
  if (!info) return ncclSuccess;
  REFUSE(info->magic != 0x74685283, ncclInvalidArgument, "ncclSimInfo_t argument not initialized");
  info->estimatedTime = (float)ops; /* a microsecond for each operation that was seen */
  return ncclSuccess;
}

API(ncclResult_t, ncclGroupSimulateEnd, ncclSimInfo_t* simInfo) {
  struct call call;
  call_begin(&call, "ncclGroupSimulateEnd");
  ncclResult_t result = simulate(simInfo);
  if (simInfo && result == ncclSuccess) call_note(&call, " estimated=%g", (double)simInfo->estimatedTime);
  return call_end(&call, result);
}
#endif
