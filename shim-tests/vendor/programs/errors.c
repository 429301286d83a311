/* Calls that are wrong in one way each: what they return and what the library says of them, one line for each, so that
 * two libraries can be compared. With an argument the texts of ncclGetLastError are left out. */
#include "way.h"

static int texts = 1;

static void show(const char* call, ncclResult_t code) {
  const char* last = texts && code != ncclSuccess ? ncclGetLastError(NULL) : "";
  printf("%s: %d, %s%s%s\n", call, (int)code, ncclGetErrorString(code), *last ? ": " : "", last);
}

#define SHOW(call) show(#call, call)

static int data[64];
static void* pointer;

static void arguments(ncclComm_t comm, int version) {
  int number = 0;
  ncclResult_t state;
  ncclUniqueId id;
  ncclComm_t fresh = NULL;
  SHOW(ncclGetVersion(NULL)); SHOW(ncclGetUniqueId(NULL));
  OK(ncclGetUniqueId(&id));
  SHOW(ncclCommInitRank(NULL, 1, id, 0)); SHOW(ncclCommInitRank(&fresh, 0, id, 0));
  SHOW(ncclCommInitRank(&fresh, 2, id, 2)); SHOW(ncclCommInitRank(&fresh, 2, id, -1));
  SHOW(ncclCommInitAll(NULL, 2, NULL)); SHOW(ncclCommInitAll(&fresh, 0, NULL));
  SHOW(ncclCommCount(NULL, &number)); SHOW(ncclCommCount(comm, NULL)); SHOW(ncclCommUserRank(NULL, &number));
  SHOW(ncclCommCuDevice(comm, NULL)); SHOW(ncclCommGetAsyncError(NULL, &state));
  SHOW(ncclCommGetAsyncError(comm, NULL)); SHOW(ncclCommSplit(NULL, 0, 0, &fresh, NULL));
  SHOW(ncclCommSplit(comm, 0, 0, NULL, NULL)); SHOW(ncclCommSplit(comm, -2, 0, &fresh, NULL));
  SHOW(ncclCommDestroy(NULL)); SHOW(ncclCommAbort(NULL)); SHOW(ncclCommFinalize(NULL));
  SHOW(ncclMemAlloc(NULL, 8)); SHOW(ncclMemFree(NULL)); SHOW(ncclMemFree(data));
  SHOW(ncclCommRegister(comm, data, 64, NULL)); SHOW(ncclCommDeregister(comm, data));
  if (version < 22703) return;
  SHOW(ncclCommShrink(comm, NULL, 1, &fresh, NULL, 0)); SHOW(ncclCommShrink(comm, &number, 1, &fresh, NULL, 0));
}

static void operations(ncclComm_t comm) {
  ncclRedOp_t op;
  SHOW(ncclAllReduce(data, data, 4, ncclInt, ncclSum, NULL, NULL));
  SHOW(ncclAllReduce(data, data, 4, (ncclDataType_t)99, ncclSum, comm, NULL));
  SHOW(ncclAllReduce(data, data, 4, (ncclDataType_t)-1, ncclSum, comm, NULL));
  SHOW(ncclAllReduce(data, data, 4, ncclInt, (ncclRedOp_t)77, comm, NULL));
  SHOW(ncclAllReduce(data, data, 4, ncclInt, (ncclRedOp_t)-3, comm, NULL));
  SHOW(ncclAllReduce(NULL, data, 4, ncclInt, ncclSum, comm, NULL));
  SHOW(ncclAllGather(data, NULL, 4, ncclInt, comm, NULL)); SHOW(ncclAllGather(data, data, 4, ncclInt, NULL, NULL));
  SHOW(ncclReduceScatter(data, data, 4, (ncclDataType_t)12, ncclSum, comm, NULL));
  SHOW(ncclReduce(data, data, 4, ncclInt, ncclSum, 7, comm, NULL));
  SHOW(ncclBroadcast(data, data, 4, ncclInt, -1, comm, NULL)); SHOW(ncclBcast(data, 4, ncclInt, 2, comm, NULL));
  SHOW(ncclSend(data, 4, ncclInt, 2, comm, NULL)); SHOW(ncclRecv(data, 4, ncclInt, -1, comm, NULL));
  SHOW(ncclRedOpCreatePreMulSum(NULL, data, ncclInt, ncclScalarHostImmediate, comm));
  SHOW(ncclRedOpCreatePreMulSum(&op, data, (ncclDataType_t)12, ncclScalarHostImmediate, comm));
  SHOW(ncclRedOpDestroy(ncclSum, comm)); SHOW(ncclRedOpDestroy((ncclRedOp_t)77, comm));
  SHOW(ncclAllReduce(NULL, NULL, 0, ncclInt, ncclSum, comm, NULL));
  SHOW(ncclAllReduce(NULL, NULL, 0, ncclInt, (ncclRedOp_t)77, comm, NULL));
}

/* An operation of one communicator on another. */
static void foreign_operation(ncclComm_t comm, ncclComm_t other) {
  ncclRedOp_t op;
  int scalar = 2;
  OK(ncclRedOpCreatePreMulSum(&op, &scalar, ncclInt, ncclScalarHostImmediate, comm));
  SHOW(ncclAllReduce(data, data, 4, ncclInt, op, other, NULL));
  SHOW(ncclAllReduce(data, data, 4, ncclFloat, op, comm, NULL));
  SHOW(ncclRedOpDestroy(op, other)); SHOW(ncclRedOpDestroy(op, comm)); SHOW(ncclRedOpDestroy(op, comm));
}

static void groups(ncclComm_t* comms, int version) {
  int in[2] = {1, 2}, out[2] = {0, 0};
  SHOW(ncclGroupEnd());
  /* An error inside drops everything. */
  SHOW(ncclGroupStart());
  SHOW(ncclAllReduce(&in[0], &out[0], 1, ncclInt, ncclSum, comms[0], NULL));
  SHOW(ncclAllReduce(&in[1], &out[1], 1, ncclInt, ncclSum, comms[1], NULL));
  SHOW(ncclBroadcast(&in[0], &out[0], 1, ncclInt, 9, comms[0], NULL));
  SHOW(ncclGroupEnd());
  printf("nothing was done: %d %d\n", out[0], out[1]);
  /* The next group is free of it. */
  SHOW(ncclGroupStart()); SHOW(ncclGroupStart());
  SHOW(ncclAllReduce(&in[0], &out[0], 1, ncclInt, ncclSum, comms[0], NULL));
  SHOW(ncclGroupEnd());
  SHOW(ncclAllReduce(&in[1], &out[1], 1, ncclInt, ncclSum, comms[1], NULL));
  printf("nothing is done yet: %d %d\n", out[0], out[1]);
  SHOW(ncclGroupEnd());
  printf("now it is: %d %d\n", out[0], out[1]);
  if (version < 22203) return;
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  SHOW(ncclGroupSimulateEnd(&info));
  SHOW(ncclGroupStart());
  for (int i = 0; i < 2; i++) SHOW(ncclAllReduce(&in[i], &out[i], 1, ncclInt, ncclSum, comms[i], NULL));
  out[0] = out[1] = 0;
  SHOW(ncclGroupSimulateEnd(&info));
  printf("only simulated: %d %d, an estimate: %d\n", out[0], out[1], info.estimatedTime > 0);
  SHOW(ncclGroupEnd());
}

int main(int argc, char** argv) {
  ncclComm_t comms[2];
  (void)argv;
  texts = argc < 2;
  alarm(60);
  int version = version_of_nccl();
  for (int code = -1; code < 10; code++) printf("%d: %s\n", code, ncclGetErrorString((ncclResult_t)code));
  OK(ncclCommInitAll(comms, 2, NULL));
  arguments(comms[0], version);
  operations(comms[0]);
  foreign_operation(comms[0], comms[1]);
  groups(comms, version);
  OK(ncclMemAlloc(&pointer, 4096));
  OK(ncclMemFree(pointer));
  SHOW(ncclCommFinalize(comms[0])); SHOW(ncclCommFinalize(comms[0]));
  SHOW(ncclAllReduce(data, data, 4, ncclInt, ncclSum, comms[0], NULL));
  SHOW(ncclCommDestroy(comms[0])); SHOW(ncclCommDestroy(comms[1]));
  return 0;
}
