/* Communicators as objects: their checks, their options, their beginning and end. */
#include "double.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ncclResult_t comm_check(ncclComm_t comm) {
  REFUSE(!comm, ncclInvalidArgument, "comm argument is NULL");
  REFUSE(comm->start_magic != COMM_MAGIC || comm->end_magic != COMM_MAGIC, ncclInvalidArgument,
         "Error: corrupted comm object detected");
  return ncclSuccess;
}

/* Whether a variable names this communicator: its name, or how it begins. */
int is_named_by(const struct ncclComm* comm, const char* variable) {
  const char* name = getenv(variable);
  return name && strncmp(comm->name, name, strlen(name)) == 0;
}

/* Whether operations may be issued. */
ncclResult_t comm_ready(ncclComm_t comm) {
  TRY(comm_check(comm));
  REFUSE(atomic_load(&comm->revoked), ncclInvalidUsage, "the communicator was revoked");
  REFUSE(atomic_load(&comm->suspended), ncclInvalidUsage, "the communicator is suspended");
  REFUSE(atomic_load(&comm->finalized), ncclInvalidUsage, "the communicator was finalized");
  ncclResult_t state = (ncclResult_t)atomic_load(&comm->state);
  if (state == ncclSuccess) return ncclSuccess;
  complain("Attempt to use communicator before the previous operation returned ncclSuccess");
  return state == ncclInProgress ? ncclInvalidArgument : state;
}

static int has_field(const ncclConfig_t* config, size_t end, unsigned since) {
  return config && config->size >= end && config->version >= since;
}

#define HAS(config, field, since) \
  has_field(config, offsetof(ncclConfig_t, field) + sizeof((config)->field), since)

ncclResult_t config_check(const ncclConfig_t* config) {
  if (!config) return ncclSuccess;
  REFUSE(config->magic != NCCL_API_MAGIC, ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  if (!HAS(config, blocking, 21400) || config->blocking == NCCL_CONFIG_UNDEF_INT) return ncclSuccess;
  REFUSE(config->blocking != 0 && config->blocking != 1, ncclInvalidArgument,
         "Invalid config blocking attribute value %d", config->blocking);
  return ncclSuccess;
}

static int blocking_of(const ncclConfig_t* config, const struct ncclComm* parent) {
  const char* forced = getenv("NCCL_COMM_BLOCKING");
  if (forced && *forced) return atoi(forced) != 0;
  if (HAS(config, blocking, 21400) && config->blocking != NCCL_CONFIG_UNDEF_INT) return config->blocking;
  return !config && parent ? parent->blocking : 1;
}

/* Those with a name of their own are not counted: names stay the same beside communicators of another library's making. */
static _Atomic long unnamed;

struct ncclComm* comm_new(const ncclConfig_t* config, const struct ncclComm* parent) {
  struct ncclComm* comm = calloc(1, sizeof(*comm));
  if (!comm) return NULL;
  comm->start_magic = comm->end_magic = COMM_MAGIC;
  comm->number = (int)atomic_fetch_add(&made_comms, 1);
  comm->blocking = blocking_of(config, parent);
  comm->device = parent ? parent->device : gpu_device();
  atomic_store(&comm->state, ncclInProgress);
  if (DOUBLE_VERSION >= 22703 && HAS(config, commName, 22703) && config->commName)
    snprintf(comm->name, sizeof(comm->name), "%s", config->commName);
  else
    snprintf(comm->name, sizeof(comm->name), "comm%ld", atomic_fetch_add(&unnamed, 1));
  atomic_fetch_add(&live_comms, 1);
  return comm;
}

/* Returns when no operation and no job needs the communicator any more. */
static void wait_for_users(struct ncclComm* comm) {
  while ((atomic_load(&comm->users) > 0 && !gpu_is_gone(comm)) || atomic_load(&comm->running) > 0) usleep(100);
}

void comm_free(struct ncclComm* comm) {
  wait_for_users(comm);
  gpu_forget(comm);
  profile_end(comm);
  if (comm->board) {
    atomic_store(&comm->board->seats[comm->rank].gone, 1);
    board_ring(comm->board);
    board_close(comm->board);
  }
  for (int i = 0; i < comm->redop_count; i++)
    if (comm->redops[i].used) atomic_fetch_sub(&live_redops, 1);
  free(comm->redops);
  for (struct entry* entry = comm->entries; entry;) {
    struct entry* next = entry->next;
    atomic_fetch_sub(entry->is_window ? &live_windows : &live_registrations, 1);
    free(entry);
    entry = next;
  }
  comm->start_magic = comm->end_magic = 0;
  free(comm);
  atomic_fetch_sub(&live_comms, 1);
}

/* Notes which options are set, so that a test sees whether they arrive. */
static void note_config(struct call* call, const ncclConfig_t* config) {
  if (!call->recorded || !config || config->magic != NCCL_API_MAGIC) return;
  call_note(call, " config(size=%zu version=%u", config->size, config->version);
#define NUMBER(field, since)                                                       \
  if (HAS(config, field, since) && config->field != NCCL_CONFIG_UNDEF_INT) \
    call_note(call, " " #field "=%d", config->field)
  NUMBER(blocking, 21400); NUMBER(cgaClusterSize, 21701); NUMBER(minCTAs, 21701); NUMBER(maxCTAs, 21701);
  NUMBER(splitShare, 21801); NUMBER(trafficClass, 22602); NUMBER(collnetEnable, 22703); NUMBER(CTAPolicy, 22703);
  NUMBER(shrinkShare, 22703); NUMBER(nvlsCTAs, 22703); NUMBER(nvlsHostMode, 23203);
#undef NUMBER
  if (HAS(config, netName, 21701) && config->netName) call_note(call, " netName=%s", config->netName);
  if (HAS(config, commName, 22703) && config->commName) call_note(call, " commName=%s", config->commName);
  call_note(call, ")");
}

/* Makes the object and submits the job that fills it; without ranks nothing is made. */
static ncclResult_t start(struct call* call, struct job job, const ncclConfig_t* config, uint64_t id, int nranks,
                          int rank, int device) {
  note_config(call, config);
  job.comm = comm_new(config, job.parent);
  if (!job.comm) return ncclSystemError;
  job.comm->id = id;
  job.comm->nranks = nranks;
  job.comm->rank = rank;
  if (device >= 0) job.comm->device = device;
  job.background = job.parent ? !job.parent->blocking : !job.comm->blocking;
  *job.out = job.late ? NULL : job.comm;
  call_note(call, " new=%s", job.comm->name);
  return job_submit(&job);
}

static ncclResult_t init_rank(struct call* call, ncclComm_t* out, int nranks, const ncclUniqueId* id, int rank,
                              const ncclConfig_t* config, int device) {
  call_note(call, " nranks=%d rank=%d", nranks, rank);
  REFUSE(!out, ncclInvalidArgument, "CommInitRank : newcomm argument is NULL");
  REFUSE(nranks < 1 || rank < 0 || rank >= nranks, ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, nranks);
  REFUSE(nranks > MAX_RANKS, ncclInvalidUsage, "the double has at most %d ranks", MAX_RANKS);
  TRY(config_check(config));
  struct job job = {.kind = JOB_INIT, .out = out};
  return start(call, job, config, id_of(id), nranks, rank, device);
}

static ncclResult_t in_call(struct call* call, ncclResult_t result) {
  group_fail(result);
  return call_end(call, result);
}

API(ncclResult_t, ncclCommInitRank, ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  struct call call;
  call_begin(&call, "ncclCommInitRank");
  return in_call(&call, init_rank(&call, comm, nranks, &commId, rank, NULL, -1));
}

#ifdef DOUBLE_RCCL
/* RCCL 2.12.10 to 2.14 have it. */
__attribute__((visibility("default"))) ncclResult_t ncclCommInitRankMulti(ncclComm_t* comm, int nranks,
                                                                          ncclUniqueId commId, int rank, int virtualId) {
  struct call call;
  call_begin(&call, "ncclCommInitRankMulti");
  call_note(&call, " virtual=%d", virtualId);
  return in_call(&call, init_rank(&call, comm, nranks, &commId, rank, NULL, -1));
}
#endif

API(ncclResult_t, ncclCommInitRankConfig, ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
    ncclConfig_t* config) {
  struct call call;
  call_begin(&call, "ncclCommInitRankConfig");
  return in_call(&call, init_rank(&call, comm, nranks, &commId, rank, config, -1));
}

static ncclResult_t init_all(struct call* call, ncclComm_t* comms, int ndev, const int* devices) {
  ncclUniqueId id;
  call_note(call, " ndev=%d", ndev);
  REFUSE(!comms, ncclInvalidArgument, "CommInitAll : comms argument is NULL");
  REFUSE(ndev < 1 || ndev > MAX_RANKS, ncclInvalidArgument, "Invalid device count requested : %d", ndev);
  for (int i = 0; devices && i < ndev; i++) {
    REFUSE(devices[i] < 0, ncclInvalidArgument, "Invalid device %d", devices[i]);
    for (int k = 0; k < i; k++) REFUSE(devices[k] == devices[i], ncclInvalidUsage, "device %d twice", devices[i]);
  }
  TRY(ncclGetUniqueId(&id)); /* by its public name, as the vendor's does */
  group_start();
  for (int i = 0; i < ndev; i++) {
    struct call unseen = {.recorded = 0};
    group_fail(init_rank(&unseen, &comms[i], ndev, &id, i, NULL, devices ? devices[i] : i));
  }
  return group_end();
}

API(ncclResult_t, ncclCommInitAll, ncclComm_t* comm, int ndev, const int* devlist) {
  struct call call;
  call_begin(&call, "ncclCommInitAll");
  return in_call(&call, init_all(&call, comm, ndev, devlist));
}

#if DOUBLE_VERSION >= 22304
static ncclResult_t init_scalable(struct call* call, ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                  ncclUniqueId* ids, const ncclConfig_t* config) {
  call_note(call, " ids=%d", nId);
  REFUSE(nId < 1 || nId > nranks, ncclInvalidArgument, "Invalid number of ids : %d", nId);
  REFUSE(!ids, ncclInvalidArgument, "CommInitRankScalable : commIds argument is NULL");
  return init_rank(call, newcomm, nranks, &ids[0], myrank, config, -1);
}

API(ncclResult_t, ncclCommInitRankScalable, ncclComm_t* newcomm, int nranks, int myrank, int nId,
    ncclUniqueId* commIds, ncclConfig_t* config) {
  struct call call;
  call_begin(&call, "ncclCommInitRankScalable");
  return in_call(&call, init_scalable(&call, newcomm, nranks, myrank, nId, commIds, config));
}
#endif

/* A communicator may be made from one that was revoked, or whose state is an error when that is `forgiven`. */
static ncclResult_t parent_ready(ncclComm_t parent, int forgiven) {
  TRY(comm_check(parent));
  ncclResult_t state = (ncclResult_t)atomic_load(&parent->state);
  if (state == ncclSuccess || (forgiven && state != ncclInProgress)) return ncclSuccess;
  complain("Attempt to use communicator before the previous operation returned ncclSuccess");
  return state == ncclInProgress ? ncclInvalidArgument : state;
}

static ncclResult_t split(struct call* call, ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                          const ncclConfig_t* config) {
  call_comm(call, comm);
  call_note(call, " color=%d key=%d", color, key);
  TRY(parent_ready(comm, 0));
  REFUSE(!newcomm, ncclInvalidArgument, "CommSplit : newcomm argument is NULL");
  REFUSE(color < NCCL_SPLIT_NOCOLOR, ncclInvalidArgument, "Invalid color %d", color);
  TRY(config_check(config));
  struct job job = {.kind = JOB_SPLIT, .parent = comm, .out = newcomm, .late = 1, .post = {.color = color, .key = key}};
  TRY(make_id(&job.post.id));
  return start(call, job, config, 0, 0, 0, -1);
}

API(ncclResult_t, ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  struct call call;
  call_begin(&call, "ncclCommSplit");
  return in_call(&call, split(&call, comm, color, key, newcomm, config));
}

#if DOUBLE_VERSION >= 22703
static int ascending(const void* a, const void* b) { return *(const int*)a - *(const int*)b; }

static ncclResult_t shrink(struct call* call, ncclComm_t comm, int* excluded, int count, ncclComm_t* newcomm,
                           const ncclConfig_t* config, int flags) {
  call_comm(call, comm);
  call_note(call, " excluded=%d flags=%d", count, flags);
  TRY(parent_ready(comm, flags & NCCL_SHRINK_ABORT));
  REFUSE(!newcomm, ncclInvalidArgument, "CommShrink : newcomm argument is NULL");
  REFUSE(!excluded || count < 1 || count >= comm->nranks, ncclInvalidArgument, "Invalid list of %d ranks", count);
  TRY(config_check(config));
  uint64_t list = 1u << 20;
  int rank = comm->rank;
  qsort(excluded, (size_t)count, sizeof(int), ascending); /* in the caller's list, as NCCL does */
  for (int i = 0; i < count; i++) {
    REFUSE(excluded[i] < 0 || excluded[i] >= comm->nranks || excluded[i] == comm->rank ||
               (i > 0 && excluded[i] == excluded[i - 1]),
           ncclInvalidArgument, "Invalid rank %d in the list of excluded ranks", excluded[i]);
    list = list * 131 + (uint64_t)excluded[i];
    rank -= excluded[i] < comm->rank;
  }
  if (flags & NCCL_SHRINK_ABORT) {
    atomic_store(&comm->aborted, 1);
    board_ring(comm->board);
  }
  struct job job = {.kind = JOB_INIT, .parent = comm, .out = newcomm, .late = 1};
  uint64_t id;
  TRY(shrunk_id(comm, list, &id));
  return start(call, job, config, id, comm->nranks - count, rank, -1);
}

API(ncclResult_t, ncclCommShrink, ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm,
    ncclConfig_t* config, int shrinkFlags) {
  struct call call;
  call_begin(&call, "ncclCommShrink");
  return in_call(&call, shrink(&call, comm, excludeRanksList, excludeRanksCount, newcomm, config, shrinkFlags));
}
#endif

#if DOUBLE_VERSION >= 22902
static ncclResult_t grow(struct call* call, ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank,
                         ncclComm_t* newcomm, const ncclConfig_t* config) {
  call_comm(call, comm);
  if (!comm) {
    REFUSE(!id, ncclInvalidArgument, "CommGrow : uniqueId argument is NULL");
    return init_rank(call, newcomm, nranks, id, rank, config, -1);
  }
  call_note(call, " to=%d", nranks);
  TRY(parent_ready(comm, 0));
  REFUSE(!newcomm, ncclInvalidArgument, "CommGrow : newcomm argument is NULL");
  REFUSE(nranks <= comm->nranks || nranks > MAX_RANKS || rank != -1, ncclInvalidArgument, "Invalid growth to %d ranks, rank %d", nranks, rank);
  TRY(config_check(config));
  struct job job = {.kind = JOB_GROW, .parent = comm, .out = newcomm, .late = 1, .post = {.has_id = id != NULL}};
  if (id) job.post.id = *id;
  return start(call, job, config, 0, nranks, comm->rank, -1);
}

API(ncclResult_t, ncclCommGrow, ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
    ncclComm_t* newcomm, ncclConfig_t* config) {
  struct call call;
  call_begin(&call, "ncclCommGrow");
  return in_call(&call, grow(&call, comm, nRanks, uniqueId, rank, newcomm, config));
}
#endif

/* ---- the end ---- */

static ncclResult_t finalize(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  TRY(comm_check(comm));
  REFUSE(atomic_load(&comm->revoked), ncclInvalidUsage, "the communicator was revoked");
  TRY(parent_ready(comm, 0));
  REFUSE(group_uses(comm), ncclInvalidUsage, "the communicator has operations in an open group");
  REFUSE(atomic_exchange(&comm->finalized, 1), ncclInvalidArgument, "the communicator was finalized before");
  return ncclSuccess;
}

static ncclResult_t destroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  TRY(parent_ready(comm, 0));
  REFUSE(group_uses(comm), ncclInvalidUsage, "the communicator has operations in an open group");
  comm_free(comm);
  return ncclSuccess;
}

static ncclResult_t end_now(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  TRY(comm_check(comm));
  REFUSE(group_uses(comm), ncclInvalidUsage, "the communicator has operations in an open group");
  atomic_store(&comm->aborted, 1);
  if (atomic_load(&comm->users) > 0 && comm->board) broke(comm, ncclSuccess);
  comm_free(comm);
  return ncclSuccess;
}

#define ON_COMM(name, body)                 \
  API(ncclResult_t, name, ncclComm_t comm) { \
    struct call call;                       \
    call_begin(&call, #name);               \
    call_comm(&call, comm);                 \
    return in_call(&call, body(comm));      \
  }
ON_COMM(ncclCommFinalize, finalize)
ON_COMM(ncclCommDestroy, destroy)
ON_COMM(ncclCommAbort, end_now)

#if DOUBLE_VERSION >= 22807
static ncclResult_t stop(ncclComm_t comm, int flags) {
  if (!comm) return ncclSuccess;
  TRY(comm_check(comm));
  REFUSE(flags != NCCL_REVOKE_DEFAULT, ncclInvalidArgument, "Invalid flags %d", flags);
  REFUSE(atomic_exchange(&comm->revoked, 1), ncclInvalidUsage, "the communicator was revoked before");
  atomic_store(&comm->state, ncclSuccess);
  board_ring(comm->board);
  return ncclSuccess;
}

API(ncclResult_t, ncclCommRevoke, ncclComm_t comm, int revokeFlags) {
  struct call call;
  call_begin(&call, "ncclCommRevoke");
  call_comm(&call, comm);
  call_note(&call, " flags=%d", revokeFlags);
  return in_call(&call, stop(comm, revokeFlags));
}
#endif
