/* The public functions that do not communicate: versions, errors, facts, memory, and what works on GPUs only, which here
 * answers something from which a test can tell that arguments and results went through unchanged. */
#include "double.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define CALL(name)  \
  struct call call; \
  call_begin(&call, #name)

API(ncclResult_t, ncclGetVersion, int* version) {
  CALL(ncclGetVersion);
  if (version) *version = DOUBLE_VERSION;
  else complain("GetVersion : version argument is NULL");
  return call_end(&call, version ? ncclSuccess : ncclInvalidArgument);
}

API(const char*, ncclGetErrorString, ncclResult_t result) {
  static const char* texts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress",
      "timeout"};
  CALL(ncclGetErrorString);
  call_note(&call, " code=%d", (int)result);
  call_leave(&call);
  int known = DOUBLE_VERSION >= 23003 ? 9 : 8;
  return (int)result >= 0 && (int)result < known ? texts[result] : "unknown result code";
}

API(const char*, ncclGetLastError, ncclComm_t comm) {
  CALL(ncclGetLastError);
  call_comm(&call, comm);
  call_leave(&call);
  return last_complaint();
}

#if DOUBLE_VERSION >= 22403
API(void, ncclResetDebugInit, void) {
  CALL(ncclResetDebugInit);
  call_leave(&call);
}
#endif

#if DOUBLE_VERSION >= 23102
/* Exported without a twin, as NVIDIA's. */
EXPORT void ncclResetDebugInitInternal(void) {
  CALL(ncclResetDebugInitInternal);
  call_leave(&call);
}
#endif

#if DOUBLE_VERSION >= 23203
API(ncclResult_t, ncclSetEncryption, const ncclEncryptionConfig_t* config) {
  CALL(ncclSetEncryption);
  if (config) call_note(&call, " mode=%d", config->mode);
  return call_end(&call, ncclSuccess);
}
#endif

/* ---- facts about communicators ---- */

static ncclResult_t async_error(ncclComm_t comm, ncclResult_t* error) {
  TRY(comm_check(comm));
  REFUSE(!error, ncclInvalidArgument, "CommGetAsyncError : asyncError argument is NULL");
  *error = (ncclResult_t)atomic_load(&comm->state);
  return ncclSuccess;
}

API(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t* asyncError) {
  CALL(ncclCommGetAsyncError);
  call_comm(&call, comm);
  ncclResult_t result = async_error(comm, asyncError);
  if (result == ncclSuccess) call_note(&call, " state=%d", (int)*asyncError);
  return call_end(&call, result);
}

static ncclResult_t give(ncclComm_t comm, int* out, size_t field) {
  TRY(comm_check(comm));
  REFUSE(!out, ncclInvalidArgument, "argument is NULL");
  TRY(comm_ready(comm));
  memcpy(out, (const char*)comm + field, sizeof(int));
  return ncclSuccess;
}

#define FACT(name, field)                                                               \
  API(ncclResult_t, name, ncclComm_t comm, int* out) {                                  \
    CALL(name);                                                                         \
    call_comm(&call, comm);                                                             \
    return call_end(&call, give(comm, out, offsetof(struct ncclComm, field)));          \
  }
FACT(ncclCommCount, nranks)
FACT(ncclCommCuDevice, device)
FACT(ncclCommUserRank, rank)

#if DOUBLE_VERSION >= 22907
static ncclResult_t memory_statistic(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  TRY(comm_check(comm));
  REFUSE(!value, ncclInvalidArgument, "CommMemStats : value argument is NULL");
  REFUSE((int)stat < 0 || (int)stat > 3, ncclInvalidArgument, "CommMemStats : invalid statistic %d", (int)stat);
  uint64_t suspended = (uint64_t)atomic_load(&comm->suspended);
  uint64_t values[] = {1000, suspended, 234, 1234};
  *value = values[stat];
  return ncclSuccess;
}

API(ncclResult_t, ncclCommMemStats, ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  CALL(ncclCommMemStats);
  call_comm(&call, comm);
  call_note(&call, " stat=%d", (int)stat);
  return call_end(&call, memory_statistic(comm, stat, value));
}

static ncclResult_t suspend(ncclComm_t comm, int flags) {
  TRY(comm_ready(comm));
  REFUSE(flags != NCCL_SUSPEND_MEM, ncclInvalidArgument, "CommSuspend : invalid flags %d", flags);
  atomic_store(&comm->suspended, 1);
  return ncclSuccess;
}

API(ncclResult_t, ncclCommSuspend, ncclComm_t comm, int flags) {
  CALL(ncclCommSuspend);
  call_comm(&call, comm);
  call_note(&call, " flags=%d", flags);
  return call_end(&call, suspend(comm, flags));
}

static ncclResult_t resume(ncclComm_t comm) {
  TRY(comm_check(comm));
  REFUSE(!atomic_exchange(&comm->suspended, 0), ncclInvalidUsage, "CommResume : the communicator is not suspended");
  return ncclSuccess;
}

API(ncclResult_t, ncclCommResume, ncclComm_t comm) {
  CALL(ncclCommResume);
  call_comm(&call, comm);
  return call_end(&call, resume(comm));
}
#endif

/* ---- memory ---- */

struct block {
  struct block* next;
  void* memory;
  size_t bytes;
};
static struct block* blocks;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;

static ncclResult_t allocate(void** out, size_t bytes) {
  REFUSE(!out, ncclInvalidArgument, "MemAlloc : ptr argument is NULL");
  *out = NULL;
  REFUSE(bytes == 0 || bytes > ((size_t)1 << 46), ncclInvalidArgument, "MemAlloc : %zu bytes", bytes);
  struct block* block = malloc(sizeof(*block));
  if (!block || (gpu_present() ? gpu_allocate(&block->memory, bytes)
                               : posix_memalign(&block->memory, NCCL_WIN_REQUIRED_ALIGNMENT, bytes)) != 0) {
    free(block);
    return ncclSystemError;
  }
  block->bytes = bytes;
  pthread_mutex_lock(&blocks_lock);
  block->next = blocks;
  blocks = block;
  pthread_mutex_unlock(&blocks_lock);
  atomic_fetch_add(&live_bytes, (long)bytes);
  *out = block->memory;
  return ncclSuccess;
}

API(ncclResult_t, ncclMemAlloc, void** ptr, size_t size) {
  CALL(ncclMemAlloc);
  call_note(&call, " bytes=%zu", size);
  return call_end(&call, allocate(ptr, size));
}

static ncclResult_t release(void* memory) {
  if (!memory) return ncclSuccess;
  pthread_mutex_lock(&blocks_lock);
  struct block** at = &blocks;
  while (*at && (*at)->memory != memory) at = &(*at)->next;
  struct block* block = *at;
  if (block) *at = block->next;
  pthread_mutex_unlock(&blocks_lock);
  REFUSE(!block, ncclInvalidArgument, "MemFree : the memory is not from ncclMemAlloc");
  atomic_fetch_sub(&live_bytes, (long)block->bytes);
  if (gpu_present()) gpu_free(block->memory);
  else free(block->memory);
  free(block);
  return ncclSuccess;
}

API(ncclResult_t, ncclMemFree, void* ptr) {
  CALL(ncclMemFree);
  return call_end(&call, release(ptr));
}

static ncclResult_t enter(ncclComm_t comm, void* buffer, size_t bytes, void** out, int is_window) {
  TRY(comm_ready(comm));
  REFUSE(!buffer || !out || bytes == 0, ncclInvalidArgument, "invalid buffer, size or handle");
  struct entry* entry = malloc(sizeof(*entry));
  if (!entry) return ncclSystemError;
  *entry = (struct entry){comm->entries, buffer, bytes, is_window};
  comm->entries = entry;
  atomic_fetch_add(is_window ? &live_windows : &live_registrations, 1);
  *out = entry;
  return ncclSuccess;
}

static struct entry** find_entry(ncclComm_t comm, const void* handle, int is_window) {
  struct entry** at = &comm->entries;
  while (*at && (*at != handle || (*at)->is_window != is_window)) at = &(*at)->next;
  return at;
}

static ncclResult_t leave(ncclComm_t comm, const void* handle, int is_window) {
  TRY(comm_check(comm));
  struct entry **at = find_entry(comm, handle, is_window), *entry = *at;
  REFUSE(!entry, is_window ? ncclInvalidArgument : ncclInvalidUsage, "there is no such registration or window");
  *at = entry->next;
  free(entry);
  atomic_fetch_sub(is_window ? &live_windows : &live_registrations, 1);
  return ncclSuccess;
}

API(ncclResult_t, ncclCommRegister, ncclComm_t comm, void* buff, size_t size, void** handle) {
  CALL(ncclCommRegister);
  call_comm(&call, comm);
  call_note(&call, " bytes=%zu", size);
  return call_end(&call, enter(comm, buff, size, handle, 0));
}

API(ncclResult_t, ncclCommDeregister, ncclComm_t comm, void* handle) {
  CALL(ncclCommDeregister);
  call_comm(&call, comm);
  return call_end(&call, leave(comm, handle, 0));
}

#if DOUBLE_VERSION >= 22703
API(ncclResult_t, ncclCommWindowRegister, ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags) {
  CALL(ncclCommWindowRegister);
  call_comm(&call, comm);
  call_note(&call, " bytes=%zu flags=%d", size, winFlags);
  return call_end(&call, enter(comm, buff, size, (void**)win, 1));
}

API(ncclResult_t, ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t win) {
  CALL(ncclCommWindowDeregister);
  call_comm(&call, comm);
  return call_end(&call, leave(comm, win, 1));
}
#endif

#if DOUBLE_VERSION >= 22902
static ncclResult_t user_pointer(ncclComm_t comm, ncclWindow_t window, void** out) {
  TRY(comm_check(comm));
  REFUSE(!out, ncclInvalidArgument, "WinGetUserPtr : outUserPtr argument is NULL");
  struct entry* entry = *find_entry(comm, window, 1);
  REFUSE(!entry, ncclInvalidArgument, "WinGetUserPtr : there is no such window");
  *out = entry->buffer;
  return ncclSuccess;
}

API(ncclResult_t, ncclWinGetUserPtr, ncclComm_t comm, ncclWindow_t win, void** outUserPtr) {
  CALL(ncclWinGetUserPtr);
  call_comm(&call, comm);
  return call_end(&call, user_pointer(comm, win, outUserPtr));
}
#endif
