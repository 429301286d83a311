/* What RCCL has beside NCCL, and what it does differently: all-to-all, gather and scatter are groups of messages, made
 * of its own public functions, with ncclGroupEnd as a tail call. */
#include "double.h"

#ifdef DOUBLE_RCCL
#pragma GCC visibility push(default)
typedef int mscclAlgoHandle_t;
ncclResult_t ncclAllToAll(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
ncclResult_t ncclAlltoAllv(const void*, const size_t*, const size_t*, void*, const size_t*, const size_t*,
                           ncclDataType_t, ncclComm_t, cudaStream_t);
ncclResult_t ncclAllToAllv(const void*, const size_t*, const size_t*, void*, const size_t*, const size_t*,
                           ncclDataType_t, ncclComm_t, cudaStream_t);
ncclResult_t ncclAllReduceWithBias(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t,
                                   const void*);
ncclResult_t mscclLoadAlgo(const char*, mscclAlgoHandle_t*, int);
ncclResult_t mscclRunAlgo(const void*, const size_t*, const size_t*, void*, const size_t*, const size_t*, size_t,
                          ncclDataType_t, int, int, ncclRedOp_t, mscclAlgoHandle_t, ncclComm_t, cudaStream_t);
ncclResult_t mscclUnloadAlgo(mscclAlgoHandle_t);
#pragma GCC visibility pop

/* Writes the call down; the group that it is made of remains open. Its end is the caller's tail call, which nobody but
 * the double can tell from a call of the program. */
static ncclResult_t begin(const char* name, struct op op) {
  struct call call;
  op.name = name;
  call_begin(&call, name);
  ncclResult_t result = op_check(&op);
  call_op(&call, &op);
  if (result == ncclSuccess) result = ncclGroupStart();
  else group_fail(result);
  return call_end(&call, result);
}

static void* at(const void* buffer, size_t elements, ncclDataType_t type) {
  return (char*)(uintptr_t)buffer + elements * type_size(type);
}

/* Messages of the open group; an error is kept by the group and returned by its end. */
static void messages(const void* send, size_t send_count, size_t send_at, void* recv, size_t recv_count, size_t recv_at,
                     ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  struct call unseen; /* What is called in here is the double's own. */
  call_begin(&unseen, "");
  unseen.recorded = 0;
  if (send_count) ncclSend(at(send, send_at, type), send_count, type, peer, comm, stream);
  if (recv_count) ncclRecv(at(recv, recv_at, type), recv_count, type, peer, comm, stream);
  call_end(&unseen, ncclSuccess);
}

#define BUFFERS .send = sendbuff, .recv = recvbuff, .count = count, .type = datatype, .comm = comm, .stream = stream

ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                          cudaStream_t stream) {
  TRY(begin("ncclAlltoAll", (struct op){.func = ALL_TO_ALL, BUFFERS}));
  for (int peer = 0; peer < comm->nranks; peer++)
    messages(sendbuff, count, (size_t)peer * count, recvbuff, count, (size_t)peer * count, datatype, peer, comm,
             stream);
  expect_own_group_end();
  return ncclGroupEnd();
}

ncclResult_t ncclAllToAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                          cudaStream_t stream) {
  return ncclAlltoAll(sendbuff, recvbuff, count, datatype, comm, stream);
}

ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  TRY(begin("ncclGather", (struct op){.func = GATHER, BUFFERS, .root = root}));
  for (int peer = 0; comm->rank == root && peer < comm->nranks; peer++)
    messages(NULL, 0, 0, recvbuff, count, (size_t)peer * count, datatype, peer, comm, stream);
  messages(sendbuff, count, 0, NULL, 0, 0, datatype, root, comm, stream);
  expect_own_group_end();
  return ncclGroupEnd();
}

ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  TRY(begin("ncclScatter", (struct op){.func = SCATTER, BUFFERS, .root = root}));
  for (int peer = 0; comm->rank == root && peer < comm->nranks; peer++)
    messages(sendbuff, count, (size_t)peer * count, NULL, 0, 0, datatype, peer, comm, stream);
  messages(NULL, 0, 0, recvbuff, count, 0, datatype, root, comm, stream);
  expect_own_group_end();
  return ncclGroupEnd();
}

ncclResult_t ncclAlltoAllv(const void* sendbuff, const size_t* sendcounts, const size_t* sdispls, void* recvbuff,
                           const size_t* recvcounts, const size_t* rdispls, ncclDataType_t datatype, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t count = 0;
  TRY(begin("ncclAlltoAllv", (struct op){.func = ALL_TO_ALL, BUFFERS}));
  for (int peer = 0; peer < comm->nranks; peer++)
    messages(sendbuff, sendcounts[peer], sdispls[peer], recvbuff, recvcounts[peer], rdispls[peer], datatype, peer, comm,
             stream);
  expect_own_group_end();
  return ncclGroupEnd();
}

ncclResult_t ncclAllToAllv(const void* sendbuff, const size_t* sendcounts, const size_t* sdispls, void* recvbuff,
                           const size_t* recvcounts, const size_t* rdispls, ncclDataType_t datatype, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclAlltoAllv(sendbuff, sendcounts, sdispls, recvbuff, recvcounts, rdispls, datatype, comm, stream);
}

ncclResult_t ncclAllReduceWithBias(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                                   ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const void* acc) {
  return submit_op("ncclAllReduceWithBias", (struct op){.func = ALL_REDUCE, BUFFERS, .op = op, .bias = acc});
}

ncclResult_t mscclLoadAlgo(const char* path, mscclAlgoHandle_t* handle, int rank) {
  struct call call;
  call_begin(&call, "mscclLoadAlgo");
  call_note(&call, " path=%s rank=%d", path ? path : "null", rank);
  if (handle) *handle = 17;
  return call_end(&call, handle ? ncclSuccess : ncclInvalidArgument);
}

ncclResult_t mscclRunAlgo(const void* sendbuff, const size_t* sendcounts, const size_t* sdispls, void* recvbuff,
                          const size_t* recvcounts, const size_t* rdispls, size_t count, ncclDataType_t datatype,
                          int root, int peer, ncclRedOp_t op, mscclAlgoHandle_t handle, ncclComm_t comm,
                          cudaStream_t stream) {
  struct call call;
  call_begin(&call, "mscclRunAlgo");
  call_comm(&call, comm);
  call_note(&call, " buffers=%d counts=%d displacements=%d count=%zu type=%s root=%d peer=%d op=%d handle=%d",
            sendbuff && recvbuff, sendcounts && recvcounts, sdispls && rdispls, count, type_name(datatype), root, peer,
            (int)op, handle);
  call_stream(&call, stream);
  return call_end(&call, comm_check(comm));
}

ncclResult_t mscclUnloadAlgo(mscclAlgoHandle_t handle) {
  struct call call;
  call_begin(&call, "mscclUnloadAlgo");
  call_note(&call, " handle=%d", handle);
  return call_end(&call, handle == 17 ? ncclSuccess : ncclInvalidArgument);
}
#endif
