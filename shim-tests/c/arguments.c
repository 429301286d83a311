/* Every function with null, garbage, destroyed and revoked arguments: no crash, and the code that NCCL gives. */
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <strata.h>
#include <string.h>

static int failures;

static void expect(int line, const char* call, int got, int wanted) {
  if (got == wanted) return;
  fprintf(stderr, "line %d: %s returned %d, not %d (%s)\n", line, call, got, wanted, ncclGetLastError(NULL));
  failures++;
}

#define EXPECT(wanted, call) expect(__LINE__, #call, (int)(call), (int)(wanted))
#define OK(call) EXPECT(ncclSuccess, call)
#define BAD(call) EXPECT(ncclInvalidArgument, call)
#define USAGE(call) EXPECT(ncclInvalidUsage, call)

static ncclUniqueId id;
static float data[64];
static void* pointer;
static int number;

static ncclUniqueId none;
static ncclResult_t noted;

static void note(void* argument, ncclResult_t status) { *(ncclResult_t*)argument = status; }

/* Calls that need a communicator, with one that is not usable. */
static void with_communicator(ncclComm_t bad, ncclResult_t wanted) {
#define X(call) EXPECT(wanted, call)
  uint64_t value;
  ncclResult_t result;
  ncclWindow_t window;
  ncclRedOp_t op;
  ncclComm_t fresh = NULL;
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  X(ncclCommCount(bad, &number)); X(ncclCommUserRank(bad, &number)); X(ncclCommCuDevice(bad, &number));
  X(ncclCommGetAsyncError(bad, &result));
  X(ncclCommRegister(bad, data, 8, &pointer)); X(ncclCommDeregister(bad, &pointer));
  X(ncclCommSuspend(bad, NCCL_SUSPEND_MEM)); X(ncclCommResume(bad));
  X(ncclCommMemStats(bad, ncclStatGpuMemTotal, &value)); X(ncclCommQueryProperties(bad, &properties));
  X(ncclCommSplit(bad, 0, 0, &fresh, NULL)); X(ncclCommShrink(bad, &number, 1, &fresh, NULL, 0));
  X(ncclCommGetUniqueId(bad, &id));
  X(ncclRedOpCreatePreMulSum(&op, data, ncclFloat, ncclScalarHostImmediate, bad)); X(ncclRedOpDestroy(5, bad));
  X(ncclAllReduce(data, data, 4, ncclFloat, ncclSum, bad, NULL));
  X(ncclReduce(data, data, 4, ncclFloat, ncclSum, 0, bad, NULL));
  X(ncclBcast(data, 4, ncclFloat, 0, bad, NULL)); X(ncclBroadcast(data, data, 4, ncclFloat, 0, bad, NULL));
  X(ncclReduceScatter(data, data, 4, ncclFloat, ncclSum, bad, NULL));
  X(ncclAllGather(data, data, 4, ncclFloat, bad, NULL)); X(ncclAlltoAll(data, data, 4, ncclFloat, bad, NULL));
  X(ncclGather(data, data, 4, ncclFloat, 0, bad, NULL)); X(ncclScatter(data, data, 4, ncclFloat, 0, bad, NULL));
  X(ncclAllReduceConfig(data, data, 4, ncclFloat, ncclSum, bad, NULL, NULL));
  X(ncclReduceConfig(data, data, 4, ncclFloat, ncclSum, 0, bad, NULL, NULL));
  X(ncclBroadcastConfig(data, data, 4, ncclFloat, 0, bad, NULL, NULL));
  X(ncclReduceScatterConfig(data, data, 4, ncclFloat, ncclSum, bad, NULL, NULL));
  X(ncclAllGatherConfig(data, data, 4, ncclFloat, bad, NULL, NULL));
  X(ncclAlltoAllConfig(data, data, 4, ncclFloat, bad, NULL, NULL));
  X(ncclGatherConfig(data, data, 4, ncclFloat, 0, bad, NULL, NULL));
  X(ncclScatterConfig(data, data, 4, ncclFloat, 0, bad, NULL, NULL));
  X(ncclSend(data, 4, ncclFloat, 0, bad, NULL)); X(ncclRecv(data, 4, ncclFloat, 0, bad, NULL));
  X(ncclPutSignal(data, 4, ncclFloat, 0, NULL, 0, 0, 0, 0, bad, NULL)); X(ncclSignal(0, 0, 0, 0, bad, NULL));
  ncclWaitSignalDesc_t signal = {1, 0, 0, 0};
  X(ncclWaitSignal(1, &signal, bad, NULL));
  X(ncclCommWindowRegister(bad, data, 8, &window, 0)); X(ncclCommWindowDeregister(bad, NULL));
  X(ncclWinGetUserPtr(bad, NULL, &pointer)); X(ncclDevCommCreate(bad, NULL, NULL)); X(ncclDevCommDestroy(bad, NULL));
  ncclTeam_t team = ncclTeamWorld(bad);
  if (team.nRanks != 0) failures++, fprintf(stderr, "a team of no communicator\n");
  X(ncclGinBarrierCreateRequirement(bad, team, 1, NULL, NULL));
  ncclTeamLsa(bad); ncclTeamRail(bad); ncclTeamCft(bad, NCCL_CFT_TEAM_FLAT); ncclTeamCftMultimem(bad);
  ncclTeamRankToWorld(bad, team, 0); ncclTeamRankToLsa(bad, team, 0);
#undef X
}

static void without_a_communicator(void) {
  const char** keys;
  const char* text;
  ncclParamHandle_t parameter = NULL;
  BAD(ncclGetVersion(NULL)); BAD(ncclGetUniqueId(NULL));
  BAD(ncclCommInitRank(NULL, 1, id, 0)); BAD(ncclCommInitRankConfig(NULL, 1, id, 0, NULL));
  BAD(ncclCommInitRankScalable(NULL, 1, 0, 1, &id, NULL)); BAD(ncclCommInitAll(NULL, 1, NULL));
  BAD(ncclCommGrow(NULL, 2, &id, 0, NULL, NULL)); BAD(ncclMemAlloc(NULL, 8));
  OK(ncclMemFree(NULL)); OK(ncclSetEncryption(NULL));
  /* Ending what is not there is no error. */
  OK(ncclCommDestroy(NULL)); OK(ncclCommAbort(NULL)); OK(ncclCommFinalize(NULL)); OK(ncclCommRevoke(NULL, 0));
  OK(ncclCommRevoke(NULL, 1));
  BAD(ncclParamBind(NULL, "NCCL_DEBUG")); BAD(ncclParamBind(&parameter, NULL)); BAD(ncclParamBind(&parameter, "NO"));
  int8_t i8; int16_t i16; int32_t i32; int64_t i64; uint8_t u8; uint16_t u16; uint32_t u32; uint64_t u64;
  BAD(ncclParamGetI8(NULL, &i8)); BAD(ncclParamGetI16(NULL, &i16)); BAD(ncclParamGetI32(NULL, &i32));
  BAD(ncclParamGetI64(NULL, &i64)); BAD(ncclParamGetU8(NULL, &u8)); BAD(ncclParamGetU16(NULL, &u16));
  BAD(ncclParamGetU32(NULL, &u32)); BAD(ncclParamGetU64(NULL, &u64)); BAD(ncclParamGetStr(NULL, &text));
  BAD(ncclParamGet(NULL, data, 8, &number)); BAD(ncclParamGetParameter(NULL, &text, &number));
  BAD(ncclParamGetParameter("NCCL_DEBUG", NULL, &number)); BAD(ncclParamGetParameter("NCCL_DEBUG", &text, NULL));
  BAD(ncclParamGetAllParameterKeys(NULL, &number)); BAD(ncclParamGetAllParameterKeys(&keys, NULL));
  OK(ncclParamBind(&parameter, "STRATA_WINDOW"));
  BAD(ncclParamGetI8(parameter, NULL)); BAD(ncclParamGetStr(parameter, NULL)); BAD(ncclParamGet(parameter, NULL, 8, &number));
  BAD(ncclParamGet(parameter, data, 1, &number)); BAD(ncclParamGet(parameter, data, 8, NULL));
  OK(ncclParamGetI64(parameter, &i64)); EXPECT(4, i64); OK(ncclParamGetStr(parameter, &text)); EXPECT(0, strcmp(text, "4"));
  OK(ncclParamGetParameter("STRATA_SHM", &text, &number)); EXPECT(4, number); EXPECT(0, strcmp(text, "true"));
  OK(ncclParamGetAllParameterKeys(&keys, &number)); EXPECT(1, number > 20 && keys[number - 1] != NULL);
  ncclParamDumpAll();
  USAGE(ncclGroupEnd()); USAGE(ncclGroupSimulateEnd(NULL));
  OK(ncclGroupStart()); OK(ncclGroupSimulateEnd(NULL)); USAGE(ncclGroupEnd());
  BAD(ncclGetLsaDevicePointer(NULL, 0, 0, &pointer)); BAD(ncclGetPeerDevicePointer(NULL, 0, 0, &pointer));
  BAD(ncclGetLsaMultimemDevicePointer(NULL, 0, &pointer));
  ncclMultimemHandle_t multimem = {NULL};
  ncclTeam_t team = {1, 0, 1};
  uint32_t endpoint;
  size_t offset;
  BAD(ncclGetMultimemDevicePointer(NULL, 0, multimem, &pointer));
  BAD(ncclGetMultimemDeviceLeInfo(NULL, 0, &endpoint, &offset));
  BAD(ncclGetCftDeviceLeInfo(NULL, 0, 0, team, &endpoint, &offset));
  BAD(ncclGetPeerDeviceLeInfo(NULL, 0, 0, &endpoint, &offset));
  BAD(ncclLsaBarrierCreateRequirement(team, 1, NULL, NULL)); BAD(ncclLLA2ACreateRequirement(1, 1, NULL, NULL));
  BAD(ncclGinOutboxCreateRequirement(1, 1, NULL, NULL)); BAD(ncclGinInboxA2ACreateRequirement(team, 1, 1, NULL, NULL));
  EXPECT(20, ncclLLA2ACalcSlots(10, 9));
  BAD(strataStreamCreate(NULL)); BAD(strataStreamDestroy(NULL)); OK(strataStreamSynchronize(NULL));
  OK(strataStreamQuery(NULL)); BAD(strataStreamAddCallback(NULL, NULL, NULL));
  BAD(strataStreamAddCallbackStatus(NULL, NULL, NULL)); BAD(strataStreamAddCallbackStatus((void*)&number, note, NULL));
  noted = ncclInProgress;
  OK(strataStreamAddCallbackStatus(NULL, note, &noted)); EXPECT(ncclSuccess, noted);
  ncclComm_t fresh;
  BAD(strataGetUniqueId(NULL)); BAD(strataCommInitHost(NULL, 1, id, 0, -1)); BAD(strataCommInitHost(&fresh, 1, none, 0, -1));
  EXPECT(1, strstr(strataGetLastError(), "strataGetUniqueId") != NULL);
  /* Programs keep the pointers: each function has one place for each thread, whatever is called meanwhile. */
  const char *kept = ncclGetLastError(NULL), *own = strataGetLastError();
  for (int i = 0; i < 64; i++) {
    BAD(i % 2 ? strataGetUniqueId(NULL) : strataCommInitHost(NULL, 1, id, 0, -1));
    EXPECT(1, ncclGetLastError(NULL) == kept && strataGetLastError() == own && kept != own && strlen(kept) > 20);
  }
}

static void with_nulls_beside_a_communicator(ncclComm_t comm) {
  ncclRedOp_t op;
  ncclComm_t fresh = comm;
  float scalar = 2;
  BAD(ncclCommCount(comm, NULL)); BAD(ncclCommUserRank(comm, NULL)); BAD(ncclCommCuDevice(comm, NULL));
  BAD(ncclCommGetAsyncError(comm, NULL)); BAD(ncclCommRegister(comm, NULL, 8, &pointer));
  BAD(ncclCommRegister(comm, data, 8, NULL)); BAD(ncclCommRegister(comm, data, 0, &pointer));
  USAGE(ncclCommDeregister(comm, NULL)); BAD(ncclCommMemStats(comm, ncclStatGpuMemTotal, NULL));
  BAD(ncclCommQueryProperties(comm, NULL)); BAD(ncclCommSplit(comm, 0, 0, NULL, NULL));
  BAD(ncclCommSplit(comm, -2, 0, &fresh, NULL));
  BAD(ncclCommShrink(comm, NULL, 1, &fresh, NULL, 0)); BAD(ncclCommShrink(comm, &number, 0, &fresh, NULL, 0));
  number = 0;
  BAD(ncclCommShrink(comm, &number, 1, &fresh, NULL, 0)); /* itself */
  number = 1;
  BAD(ncclCommShrink(comm, &number, 1, &fresh, NULL, 0)); BAD(ncclCommShrink(comm, &number, 1, NULL, NULL, 0));
  BAD(ncclCommGetUniqueId(comm, NULL)); BAD(ncclCommGrow(comm, 2, &id, -1, NULL, NULL));
  BAD(ncclCommGrow(comm, 1, &id, -1, &fresh, NULL)); BAD(ncclCommGrow(comm, 2, &id, 1, &fresh, NULL));
  BAD(ncclCommRevoke(comm, 1)); BAD(ncclCommSuspend(comm, 0));
  BAD(ncclRedOpCreatePreMulSum(NULL, &scalar, ncclFloat, ncclScalarHostImmediate, comm));
  BAD(ncclRedOpCreatePreMulSum(&op, NULL, ncclFloat, ncclScalarHostImmediate, comm));
  BAD(ncclRedOpCreatePreMulSum(&op, &scalar, (ncclDataType_t)12, ncclScalarHostImmediate, comm));
  BAD(ncclRedOpCreatePreMulSum(&op, &scalar, ncclFloat, (ncclScalarResidence_t)2, comm));
  BAD(ncclRedOpDestroy(ncclSum, comm)); BAD(ncclRedOpDestroy((ncclRedOp_t)77, comm));
  BAD(ncclAllReduce(NULL, data, 4, ncclFloat, ncclSum, comm, NULL));
  BAD(ncclAllReduce(data, NULL, 4, ncclFloat, ncclSum, comm, NULL));
  BAD(ncclBcast(NULL, 4, ncclFloat, 0, comm, NULL)); BAD(ncclAllGather(NULL, data, 4, ncclFloat, comm, NULL));
  BAD(ncclReduce(data, NULL, 4, ncclFloat, ncclSum, 0, comm, NULL)); /* this is the root */
  BAD(ncclScatter(NULL, data, 4, ncclFloat, 0, comm, NULL)); BAD(ncclGather(data, NULL, 4, ncclFloat, 0, comm, NULL));
  BAD(ncclSend(NULL, 4, ncclFloat, 0, comm, NULL)); BAD(ncclRecv(NULL, 4, ncclFloat, 0, comm, NULL));
  USAGE(ncclCommWindowRegister(comm, data, 4096, (ncclWindow_t*)&pointer, 0));
  BAD(ncclCommWindowRegister(comm, NULL, 4096, (ncclWindow_t*)&pointer, 0));
  USAGE(ncclSignal(0, 0, 0, 0, comm, NULL)); BAD(ncclWaitSignal(1, NULL, comm, NULL));
  BAD(ncclDevCommCreate(comm, NULL, NULL));
}

static void with_numbers_that_mean_nothing(ncclComm_t comm) {
  ncclComm_t fresh = comm;
  BAD(ncclAllReduce(data, data, 4, (ncclDataType_t)12, ncclSum, comm, NULL));
  BAD(ncclAllReduce(data, data, 4, (ncclDataType_t)-1, ncclSum, comm, NULL));
  BAD(ncclAllReduce(data, data, 4, ncclFloat, (ncclRedOp_t)5, comm, NULL));
  BAD(ncclAllReduce(data, data, 4, ncclFloat, (ncclRedOp_t)-1, comm, NULL));
  BAD(ncclAllReduce(data, data, 4, ncclFloat, (ncclRedOp_t)0x7fffffff, comm, NULL));
  BAD(ncclBroadcast(data, data, 4, ncclFloat, 1, comm, NULL)); BAD(ncclBroadcast(data, data, 4, ncclFloat, -1, comm, NULL));
  BAD(ncclSend(data, 4, ncclFloat, 1, comm, NULL)); BAD(ncclRecv(data, 4, ncclFloat, -1, comm, NULL));
  /* More bytes than an address space has. */
  BAD(ncclAllReduce(data, data, (size_t)1 << 62, ncclFloat, ncclSum, comm, NULL));
  BAD(ncclAllGather(data, data, (size_t)-1, ncclInt8, comm, NULL)); BAD(ncclSend(data, (size_t)-1, ncclDouble, 0, comm, NULL));
  BAD(ncclMemAlloc(&pointer, (size_t)-1));
  /* No elements: the checks, then success. */
  OK(ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, comm, NULL)); OK(ncclSend(NULL, 0, ncclFloat, 0, comm, NULL));
  BAD(ncclAllReduce(NULL, NULL, 0, (ncclDataType_t)99, ncclSum, comm, NULL));
  BAD(ncclCommInitRank(&fresh, 0, id, 0)); BAD(ncclCommInitRank(&fresh, 1, id, 1)); BAD(ncclCommInitRank(&fresh, 1, id, -1));
  BAD(ncclCommInitRankScalable(&fresh, 1, 0, 0, &id, NULL)); BAD(ncclCommInitRankScalable(&fresh, 1, 0, 2, &id, NULL));
  BAD(ncclCommInitRankScalable(&fresh, 1, 0, 1, NULL, NULL));
  BAD(ncclCommInitAll(&fresh, 0, NULL));
  BAD(strataCommInitHost(&fresh, 0, id, 0, -1)); BAD(strataCommInitHost(&fresh, 1, id, 1, -1));
  BAD(strataCommInitHost(&fresh, 1, id, -1, -1)); BAD(strataCommInitHost(&fresh, -1, id, 0, -1));
  int twice[2] = {0, 0}, negative = -1;
  ncclComm_t two[2];
  USAGE(ncclCommInitAll(two, 2, twice)); BAD(ncclCommInitAll(&fresh, 1, &negative));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.magic = 0;
  BAD(ncclCommInitRankConfig(&fresh, 1, id, 0, &config)); BAD(ncclCommSplit(comm, 0, 0, &fresh, &config));
  ncclConfig_t blocking = NCCL_CONFIG_INITIALIZER;
  blocking.blocking = 2;
  BAD(ncclCommInitRankConfig(&fresh, 1, id, 0, &blocking));
  ncclCollConfig_t options = NCCL_COLLCONFIG_INITIALIZER;
  options.magic = 1;
  BAD(ncclAllReduceConfig(data, data, 4, ncclFloat, ncclSum, comm, NULL, &options));
  /* Streams: the three null ones, one of somebody else's, one that is gone. */
  float in[2] = {1, 2}, out[2];
  for (uintptr_t stream = 0; stream < 3; stream++) {
    OK(ncclAllReduce(in, out, 2, ncclFloat, ncclSum, comm, (cudaStream_t)stream)); EXPECT(0, memcmp(in, out, 8));
  }
  BAD(ncclAllReduce(in, out, 2, ncclFloat, ncclSum, comm, (cudaStream_t)&number));
  strataStream_t stream;
  OK(strataStreamCreate(&stream)); OK(ncclAllReduce(in, out, 2, ncclFloat, ncclSum, comm, stream));
  OK(strataStreamSynchronize(stream)); OK(strataStreamQuery(stream)); OK(strataStreamDestroy(stream));
  BAD(strataStreamDestroy(stream)); BAD(ncclAllReduce(in, out, 2, ncclFloat, ncclSum, comm, stream));
}

int main(void) {
  static const char* texts[] = {"no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "internal error - please report this issue to the NCCL developers",
    "invalid argument (run with NCCL_DEBUG=WARN for details)", "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "remote process exited or there was a network error", "NCCL operation in progress", "timeout",
    "unknown result code"};
  for (int code = 0; code < 10; code++) EXPECT(0, strcmp(ncclGetErrorString((ncclResult_t)code), texts[code]));
  EXPECT(0, strcmp(ncclGetErrorString((ncclResult_t)-1), texts[9]));
  OK(pncclGetVersion(&number)); EXPECT(23203, number);
  ncclComm_t comm = NULL;
  OK(ncclGetUniqueId(&id)); OK(ncclCommInitRank(&comm, 1, id, 0));
  without_a_communicator();
  with_communicator(NULL, ncclInvalidArgument);
  with_communicator((ncclComm_t)&number, ncclInvalidArgument);
  with_communicator((ncclComm_t)(uintptr_t)3, ncclInvalidArgument);
  EXPECT(1, strstr(ncclGetLastError(comm), "is not a communicator") != NULL);
  with_nulls_beside_a_communicator(comm);
  with_numbers_that_mean_nothing(comm);
  ncclResult_t state;
  OK(ncclCommGetAsyncError(comm, &state)); EXPECT(ncclSuccess, state);
  /* Suspended: refused, and back again. */
  OK(ncclCommSuspend(comm, NCCL_SUSPEND_MEM)); USAGE(ncclAllReduce(data, data, 4, ncclFloat, ncclSum, comm, NULL));
  uint64_t suspended = 7;
  OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &suspended)); EXPECT(1, suspended);
  OK(ncclCommResume(comm)); USAGE(ncclCommResume(comm)); OK(ncclAllReduce(data, data, 4, ncclFloat, ncclSum, comm, NULL));
  ncclTeam_t world = ncclTeamWorld(comm);
  EXPECT(1, world.nRanks == 1 && world.rank == 0 && world.stride == 1); EXPECT(0, ncclTeamRankToWorld(comm, world, 0));
  OK(ncclCommRevoke(comm, 0)); USAGE(ncclAllReduce(data, data, 4, ncclFloat, ncclSum, comm, NULL));
  OK(ncclCommGetAsyncError(comm, &state)); EXPECT(ncclSuccess, state);
  OK(ncclCommDestroy(comm));
  with_communicator(comm, ncclInvalidArgument);
  BAD(ncclCommDestroy(comm)); BAD(ncclCommAbort(comm)); BAD(ncclCommFinalize(comm)); BAD(ncclCommRevoke(comm, 0));
  ncclCommCount(comm, &number);
  EXPECT(1, strstr(ncclGetLastError(NULL), "has been destroyed") != NULL);
  return failures != 0;
}
