/* How a program comes by NCCL: linked, or with BY_NAME opened by its file name, as Python and many others do. The source
 * is the same. NCCL_NAME in the environment is the name to open. Also checks, which print the last error, and streams. */
#ifndef WAY_H
#define WAY_H

#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FUNCTIONS(X)                                                                                          \
  X(ncclGetVersion) X(ncclGetErrorString) X(ncclGetLastError) X(ncclGetUniqueId) X(ncclCommInitRank)          \
  X(ncclCommInitRankConfig) X(ncclCommInitAll) X(ncclCommSplit) X(ncclCommFinalize) X(ncclCommDestroy)        \
  X(ncclCommAbort) X(ncclCommGetAsyncError) X(ncclCommCount) X(ncclCommUserRank) X(ncclCommCuDevice)          \
  X(ncclMemAlloc) X(ncclMemFree) X(ncclCommRegister) X(ncclCommDeregister) X(ncclRedOpCreatePreMulSum)        \
  X(ncclRedOpDestroy) X(ncclReduce) X(ncclBcast) X(ncclBroadcast) X(ncclAllReduce) X(ncclReduceScatter)       \
  X(ncclAllGather) X(ncclSend) X(ncclRecv) X(ncclGroupStart) X(ncclGroupEnd)

/* Those that older releases do not have: null then. */
#define NEWER(X)                                                                                              \
  X(ncclAlltoAll) X(ncclGather) X(ncclScatter) X(ncclCommShrink) X(ncclCommRevoke) X(ncclCommInitRankScalable) \
  X(ncclGroupSimulateEnd) X(ncclAllReduceConfig) X(ncclAllGatherConfig) X(ncclReduceScatterConfig)            \
  X(ncclCommGrow) X(ncclCommGetUniqueId) X(ncclCommSuspend) X(ncclCommResume)

#ifdef BY_NAME
#include <dlfcn.h>

#define MEMBER(name) __typeof__(&name) name##_;
static struct {
  FUNCTIONS(MEMBER) NEWER(MEMBER)
} by_name;

__attribute__((constructor)) static void open_by_name(void) {
  const char* name = getenv("NCCL_NAME") ? getenv("NCCL_NAME") : "libnccl.so.2";
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    _exit(1);
  }
#define LOAD(name) by_name.name##_ = (__typeof__(&name))dlsym(library, #name);
#define NEED(name)                                     \
  LOAD(name) if (!by_name.name##_) {                   \
    fprintf(stderr, "there is no %s\n", #name);        \
    _exit(1);                                          \
  }
  FUNCTIONS(NEED) NEWER(LOAD)
}
#define ncclGetVersion by_name.ncclGetVersion_
#define ncclGetErrorString by_name.ncclGetErrorString_
#define ncclGetLastError by_name.ncclGetLastError_
#define ncclGetUniqueId by_name.ncclGetUniqueId_
#define ncclCommInitRank by_name.ncclCommInitRank_
#define ncclCommInitRankConfig by_name.ncclCommInitRankConfig_
#define ncclCommInitAll by_name.ncclCommInitAll_
#define ncclCommSplit by_name.ncclCommSplit_
#define ncclCommFinalize by_name.ncclCommFinalize_
#define ncclCommDestroy by_name.ncclCommDestroy_
#define ncclCommAbort by_name.ncclCommAbort_
#define ncclCommGetAsyncError by_name.ncclCommGetAsyncError_
#define ncclCommCount by_name.ncclCommCount_
#define ncclCommUserRank by_name.ncclCommUserRank_
#define ncclCommCuDevice by_name.ncclCommCuDevice_
#define ncclMemAlloc by_name.ncclMemAlloc_
#define ncclMemFree by_name.ncclMemFree_
#define ncclCommRegister by_name.ncclCommRegister_
#define ncclCommDeregister by_name.ncclCommDeregister_
#define ncclRedOpCreatePreMulSum by_name.ncclRedOpCreatePreMulSum_
#define ncclRedOpDestroy by_name.ncclRedOpDestroy_
#define ncclReduce by_name.ncclReduce_
#define ncclBcast by_name.ncclBcast_
#define ncclBroadcast by_name.ncclBroadcast_
#define ncclAllReduce by_name.ncclAllReduce_
#define ncclReduceScatter by_name.ncclReduceScatter_
#define ncclAllGather by_name.ncclAllGather_
#define ncclSend by_name.ncclSend_
#define ncclRecv by_name.ncclRecv_
#define ncclGroupStart by_name.ncclGroupStart_
#define ncclGroupEnd by_name.ncclGroupEnd_
#define ncclAlltoAll by_name.ncclAlltoAll_
#define ncclGather by_name.ncclGather_
#define ncclScatter by_name.ncclScatter_
#define ncclCommShrink by_name.ncclCommShrink_
#define ncclCommRevoke by_name.ncclCommRevoke_
#define ncclCommInitRankScalable by_name.ncclCommInitRankScalable_
#define ncclGroupSimulateEnd by_name.ncclGroupSimulateEnd_
#define ncclAllReduceConfig by_name.ncclAllReduceConfig_
#define ncclAllGatherConfig by_name.ncclAllGatherConfig_
#define ncclReduceScatterConfig by_name.ncclReduceScatterConfig_
#define ncclCommGrow by_name.ncclCommGrow_
#define ncclCommGetUniqueId by_name.ncclCommGetUniqueId_
#define ncclCommSuspend by_name.ncclCommSuspend_
#define ncclCommResume by_name.ncclCommResume_
#else
#define WEAKLY(name) extern __typeof__(name) name __attribute__((weak));
NEWER(WEAKLY)
#endif

#define CHECK(condition)                                                                          \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, ncclGetLastError(NULL)); \
      _exit(1);                                                                                   \
    }                                                                                             \
  } while (0)
#define OK(call)                                                                                      \
  do {                                                                                                \
    ncclResult_t code = (call);                                                                       \
    if (code != ncclSuccess) {                                                                        \
      fprintf(stderr, "%s:%d: %s: %d (%s)\n", __FILE__, __LINE__, #call, code, ncclGetLastError(NULL)); \
      _exit(1);                                                                                       \
    }                                                                                                 \
  } while (0)

/* The release of the library that answers; what is newer than it is not called. */
__attribute__((unused)) static int version_of_nccl(void) {
  int version = 0;
  OK(ncclGetVersion(&version));
  return version;
}

#endif
