/* The public functions for communication from inside kernels, for one-sided operations, and for parameters: stand-ins.
 * Each notes its arguments and gives back something that depends on them, so that a test sees whether all arrived. */
#include "double.h"
#include <stdlib.h>
#include <string.h>

#define CALL(name)  \
  struct call call; \
  call_begin(&call, #name)

#if DOUBLE_VERSION >= 22902
API(ncclResult_t, ncclPutSignal, const void* localbuff, size_t count, ncclDataType_t datatype, int peer,
    ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
    cudaStream_t stream) {
  CALL(ncclPutSignal);
  call_comm(&call, comm);
  call_note(&call, " buffer=%d count=%zu type=%s peer=%d window=%d offset=%zu signal=%d ctx=%d flags=%u",
            localbuff != NULL, count, type_name(datatype), peer, peerWin != NULL, peerWinOffset, sigIdx, ctx, flags);
  call_stream(&call, stream);
  return call_end(&call, comm_check(comm));
}

API(ncclResult_t, ncclSignal, int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
    cudaStream_t stream) {
  CALL(ncclSignal);
  call_comm(&call, comm);
  call_note(&call, " peer=%d signal=%d ctx=%d flags=%u", peer, sigIdx, ctx, flags);
  call_stream(&call, stream);
  return call_end(&call, comm_check(comm));
}

API(ncclResult_t, ncclWaitSignal, int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm, cudaStream_t stream) {
  CALL(ncclWaitSignal);
  call_comm(&call, comm);
  call_note(&call, " descriptions=%d", nDesc);
  for (int i = 0; signalDescs && i < nDesc && i < 4; i++) call_note(&call, " from=%d", signalDescs[i].peer);
  call_stream(&call, stream);
  return call_end(&call, comm_check(comm));
}

/* Any place of a window is `offset` bytes after its buffer. */
static ncclResult_t place(ncclWindow_t window, size_t offset, void** out) {
  REFUSE(!window || !out, ncclInvalidArgument, "window or outPtr argument is NULL");
  *out = (char*)((const struct entry*)(const void*)window)->buffer + offset;
  return ncclSuccess;
}

API(ncclResult_t, ncclGetLsaMultimemDevicePointer, ncclWindow_t window, size_t offset, void** outPtr) {
  CALL(ncclGetLsaMultimemDevicePointer);
  call_note(&call, " offset=%zu", offset);
  return call_end(&call, place(window, offset, outPtr));
}

API(ncclResult_t, ncclGetMultimemDevicePointer, ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem,
    void** outPtr) {
  CALL(ncclGetMultimemDevicePointer);
  call_note(&call, " offset=%zu multimem=%d", offset, multimem.mcBasePtr != NULL);
  return call_end(&call, place(window, offset, outPtr));
}

API(ncclResult_t, ncclGetLsaDevicePointer, ncclWindow_t window, size_t offset, int lsaRank, void** outPtr) {
  CALL(ncclGetLsaDevicePointer);
  call_note(&call, " offset=%zu peer=%d", offset, lsaRank);
  return call_end(&call, place(window, offset, outPtr));
}

API(ncclResult_t, ncclGetPeerDevicePointer, ncclWindow_t window, size_t offset, int peer, void** outPtr) {
  CALL(ncclGetPeerDevicePointer);
  call_note(&call, " offset=%zu peer=%d", offset, peer);
  return call_end(&call, place(window, offset, outPtr));
}

static ncclResult_t properties(ncclComm_t comm, ncclCommProperties_t* out) {
  TRY(comm_check(comm));
  REFUSE(!out || out->magic != NCCL_API_MAGIC, ncclInvalidArgument, "CommQueryProperties : invalid props argument");
  out->rank = comm->rank;
  out->nRanks = comm->nranks;
  out->cudaDev = comm->device;
  out->commHash = comm->id;
  return ncclSuccess;
}

API(ncclResult_t, ncclCommQueryProperties, ncclComm_t comm, ncclCommProperties_t* props) {
  CALL(ncclCommQueryProperties);
  call_comm(&call, comm);
  return call_end(&call, properties(comm, props));
}
#endif

#if DOUBLE_VERSION >= 23102
static ncclResult_t endpoint(ncclWindow_t window, size_t offset, unsigned int peer, unsigned int* id, size_t* place) {
  REFUSE(!window || !id || !place, ncclInvalidArgument, "window, leId or leOffset argument is NULL");
  *id = 70 + peer;
  *place = offset;
  return ncclSuccess;
}

API(ncclResult_t, ncclGetMultimemDeviceLeInfo, ncclWindow_t window, size_t offset, unsigned int* leId,
    size_t* leOffset) {
  CALL(ncclGetMultimemDeviceLeInfo);
  call_note(&call, " offset=%zu", offset);
  return call_end(&call, endpoint(window, offset, 0, leId, leOffset));
}

API(ncclResult_t, ncclGetCftDeviceLeInfo, ncclWindow_t window, size_t offset, int peerCft, ncclTeam_t cftTeam,
    unsigned int* leId, size_t* leOffset) {
  CALL(ncclGetCftDeviceLeInfo);
  call_note(&call, " offset=%zu peer=%d team=%d,%d,%d", offset, peerCft, cftTeam.nRanks, cftTeam.rank, cftTeam.stride);
  return call_end(&call, endpoint(window, offset, (unsigned)peerCft, leId, leOffset));
}

API(ncclResult_t, ncclGetPeerDeviceLeInfo, ncclWindow_t window, size_t offset, int peerWorld, unsigned int* leId,
    size_t* leOffset) {
  CALL(ncclGetPeerDeviceLeInfo);
  call_note(&call, " offset=%zu peer=%d", offset, peerWorld);
  return call_end(&call, endpoint(window, offset, (unsigned)peerWorld, leId, leOffset));
}
#endif

#if DOUBLE_VERSION >= 22803
API(ncclResult_t, ncclDevCommCreate, ncclComm_t comm, const ncclDevCommRequirements_t* reqs,
    ncclDevComm_t* outDevComm) {
  CALL(ncclDevCommCreate);
  call_comm(&call, comm);
  ncclResult_t result = comm_check(comm);
  if (result == ncclSuccess && (!reqs || !outDevComm)) result = ncclInvalidArgument;
  return call_end(&call, result);
}

API(ncclResult_t, ncclDevCommDestroy, ncclComm_t comm, const ncclDevComm_t* devComm) {
  CALL(ncclDevCommDestroy);
  call_comm(&call, comm);
  ncclResult_t result = comm_check(comm);
  return call_end(&call, result == ncclSuccess && !devComm ? ncclInvalidArgument : result);
}

static ncclTeam_t team(struct call* call, ncclComm_t comm, int all, int stride) {
  ncclTeam_t team = {0, 0, 0};
  call_comm(call, comm);
  if (comm_check(comm) == ncclSuccess)
    team = (ncclTeam_t){all ? comm->nranks : 1, all ? comm->rank : 0, stride};
  call_leave(call);
  return team;
}

API(ncclTeam_t, ncclTeamWorld, ncclComm_t comm) {
  CALL(ncclTeamWorld);
  return team(&call, comm, 1, 1);
}

API(ncclTeam_t, ncclTeamLsa, ncclComm_t comm) {
  CALL(ncclTeamLsa);
  return team(&call, comm, 0, 1);
}

API(ncclTeam_t, ncclTeamRail, ncclComm_t comm) {
  CALL(ncclTeamRail);
  return team(&call, comm, 1, 2);
}

static int in_world(struct call* call, ncclComm_t comm, ncclTeam_t team, int rank) {
  call_comm(call, comm);
  call_note(call, " team=%d,%d,%d of=%d", team.nRanks, team.rank, team.stride, rank);
  int world = comm_check(comm) == ncclSuccess ? comm->rank + (rank - team.rank) * team.stride : -1;
  call_leave(call);
  return world;
}

API(int, ncclTeamRankToWorld, ncclComm_t comm, ncclTeam_t team, int rank) {
  CALL(ncclTeamRankToWorld);
  return in_world(&call, comm, team, rank);
}

API(int, ncclTeamRankToLsa, ncclComm_t comm, ncclTeam_t team, int rank) {
  CALL(ncclTeamRankToLsa);
  return in_world(&call, comm, team, rank);
}

API(int, ncclLLA2ACalcSlots, int maxElts, int maxEltSize) {
  CALL(ncclLLA2ACalcSlots);
  call_note(&call, " elements=%d size=%d", maxElts, maxEltSize);
  call_leave(&call);
  return maxElts * maxEltSize;
}

API(ncclResult_t, ncclLLA2ACreateRequirement, int nBlocks, int nSlots, ncclLLA2AHandle_t* outHandle,
    ncclDevResourceRequirements_t* outReq) {
  CALL(ncclLLA2ACreateRequirement);
  call_note(&call, " blocks=%d slots=%d", nBlocks, nSlots);
  return call_end(&call, outHandle && outReq ? ncclSuccess : ncclInvalidArgument);
}

API(ncclResult_t, ncclLsaBarrierCreateRequirement, ncclTeam_t team, int nBarriers, ncclLsaBarrierHandle_t* outHandle,
    ncclDevResourceRequirements_t* outReq) {
  CALL(ncclLsaBarrierCreateRequirement);
  call_note(&call, " team=%d,%d,%d barriers=%d", team.nRanks, team.rank, team.stride, nBarriers);
  return call_end(&call, outHandle && outReq ? ncclSuccess : ncclInvalidArgument);
}
#endif

#if DOUBLE_VERSION >= 22807
API(ncclResult_t, ncclGinBarrierCreateRequirement, ncclComm_t comm, ncclTeam_t team, int nBarriers,
    ncclGinBarrierHandle_t* outHandle, ncclDevResourceRequirements_t* outReq) {
  CALL(ncclGinBarrierCreateRequirement);
  call_comm(&call, comm);
  call_note(&call, " team=%d,%d,%d barriers=%d", team.nRanks, team.rank, team.stride, nBarriers);
  ncclResult_t result = comm_check(comm);
  return call_end(&call, result == ncclSuccess && !(outHandle && outReq) ? ncclInvalidArgument : result);
}
#endif

#if DOUBLE_VERSION >= 23003
API(ncclResult_t, ncclGinInboxA2ACreateRequirement, ncclTeam_t peers, int nBlocks, int size_log2,
    ncclGinInboxA2AHandle_t* outHandle, ncclDevResourceRequirements_t* outReq) {
  CALL(ncclGinInboxA2ACreateRequirement);
  call_note(&call, " team=%d,%d,%d blocks=%d log2=%d", peers.nRanks, peers.rank, peers.stride, nBlocks, size_log2);
  return call_end(&call, outHandle && outReq ? ncclSuccess : ncclInvalidArgument);
}

API(ncclResult_t, ncclGinOutboxCreateRequirement, int nBlocks, int size_log2, ncclGinOutboxHandle_t* outHandle,
    ncclDevResourceRequirements_t* outReq) {
  CALL(ncclGinOutboxCreateRequirement);
  call_note(&call, " blocks=%d log2=%d", nBlocks, size_log2);
  return call_end(&call, outHandle && outReq ? ncclSuccess : ncclInvalidArgument);
}
#endif

#if DOUBLE_VERSION >= 23102
API(ncclTeam_t, ncclTeamCft, ncclComm_t comm, ncclCftTeamMode_t mode) {
  CALL(ncclTeamCft);
  call_note(&call, " mode=%d", (int)mode);
  return team(&call, comm, 0, (int)mode + 3);
}

API(ncclTeam_t, ncclTeamCftMultimem, ncclComm_t comm) {
  CALL(ncclTeamCftMultimem);
  return team(&call, comm, 0, 7);
}
#endif

/* ---- parameters: three of them, whatever the environment has ---- */

#if DOUBLE_VERSION >= 23004
static const char* keys[] = {"NCCL_DEBUG", "NCCL_ALGO", "DOUBLE_ANSWER"};
static const char* values[] = {"WARN", "ring", "42"};
enum { KEYS = 3 };

static const char* value_of(const char* key) {
  for (int i = 0; key && i < KEYS; i++)
    if (strcmp(keys[i], key) == 0) return values[i];
  return NULL;
}

API(ncclResult_t, ncclParamBind, ncclParamHandle_t* out, const char* key) {
  CALL(ncclParamBind);
  const char* value = value_of(key);
  call_note(&call, " key=%s", key ? key : "null");
  if (out && value) memcpy(out, &value, sizeof(value));
  return call_end(&call, out && value ? ncclSuccess : ncclInvalidArgument);
}

#define NUMBER(name, type)                                                  \
  API(ncclResult_t, name, ncclParamHandle_t h, type* out) {                 \
    CALL(name);                                                             \
    if (h && out) *out = (type)atoi((const char*)(const void*)h);           \
    return call_end(&call, h && out ? ncclSuccess : ncclInvalidArgument);   \
  }
NUMBER(ncclParamGetI8, int8_t)
NUMBER(ncclParamGetI16, int16_t)
NUMBER(ncclParamGetI32, int)
NUMBER(ncclParamGetI64, int64_t)
NUMBER(ncclParamGetU8, uint8_t)
NUMBER(ncclParamGetU16, uint16_t)
NUMBER(ncclParamGetU32, unsigned int)
NUMBER(ncclParamGetU64, uint64_t)

API(ncclResult_t, ncclParamGetStr, ncclParamHandle_t h, const char** out) {
  CALL(ncclParamGetStr);
  if (h && out) *out = (const char*)(const void*)h;
  return call_end(&call, h && out ? ncclSuccess : ncclInvalidArgument);
}

API(ncclResult_t, ncclParamGet, ncclParamHandle_t h, void* out, int maxLen, int* len) {
  CALL(ncclParamGet);
  int needed = h ? (int)strlen((const char*)(const void*)h) + 1 : 0;
  int fits = h && out && len && needed <= maxLen;
  if (fits) memcpy(out, h, (size_t)needed), *len = needed;
  return call_end(&call, fits ? ncclSuccess : ncclInvalidArgument);
}

API(ncclResult_t, ncclParamGetParameter, const char* key, const char** value, int* valueLen) {
  CALL(ncclParamGetParameter);
  const char* found = value_of(key);
  call_note(&call, " key=%s", key ? key : "null");
  int known = found && value && valueLen;
  if (known) *value = found, *valueLen = (int)strlen(found);
  return call_end(&call, known ? ncclSuccess : ncclInvalidArgument);
}

API(ncclResult_t, ncclParamGetAllParameterKeys, const char*** table, int* tableLen) {
  CALL(ncclParamGetAllParameterKeys);
  if (table && tableLen) *table = keys, *tableLen = KEYS;
  return call_end(&call, table && tableLen ? ncclSuccess : ncclInvalidArgument);
}

API(void, ncclParamDumpAll, void) {
  CALL(ncclParamDumpAll);
  call_leave(&call);
}
#endif
