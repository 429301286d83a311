/* What goes wrong around a communicator on a GPU: there must be a clear error, and nothing may hang.
 *
 * gpu_failures CASE GRID. Rank 1 is the one with the trouble. */
#include "gpu.h"
#include <dlfcn.h>
#include <strata.h>

enum { SECONDS = 1000, LONG = 3000000 };

/* Strata's own functions are there once it is loaded. */
#define STRATA(name) __typeof__(&name) p_##name
static STRATA(strataStreamWaitRange);
static STRATA(strataRangeQuery);
static STRATA(strataStreamCreate);
static STRATA(strataStreamSynchronize);
static STRATA(strataStreamDestroy);

__attribute__((constructor)) static void find_own(void) {
#define FIND(name) p_##name = (__typeof__(&name))dlsym(RTLD_DEFAULT, #name)
  FIND(strataStreamWaitRange);
  FIND(strataRangeQuery);
  FIND(strataStreamCreate);
  FIND(strataStreamSynchronize);
  FIND(strataStreamDestroy);
}

static gpu_stream begin_rank(int rank) {
  gpu_use(rank % 8);
  return gpu_new_stream();
}

static ncclComm_t begin_comm(int rank, int n) {
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, n, shared_id(0, rank), rank));
  return comm;
}

/* Long collectives, one after another. */
static void issue_long(ncclComm_t comm, gpu_stream stream, int calls, int* memory) {
  for (int i = 0; i < calls; i++)
    if (ncclAllReduce(memory, memory + LONG, LONG, ncclInt, ncclSum, comm, (cudaStream_t)stream) != ncclSuccess) return;
}

/* After a failure: later calls say so, the stream goes on, and the communicator can be ended. The vendor's communicator of
 * the node may have told of the failure a little earlier than Strata hears of it. */
static void end_failed(ncclComm_t comm, gpu_stream stream, int* memory) {
  int64_t end = now_ms() + (is_alone() ? 0 : 10 * SECONDS);
  while (ncclAllReduce(memory, memory, 8, ncclInt, ncclSum, comm, (cudaStream_t)stream) == ncclSuccess) CHECK(now_ms() < end);
  WITHIN(15 * SECONDS, ncclCommAbort(comm));
  CHECK(stream_rests(stream, 15 * SECONDS));
}

/* Rank 1 has too little memory when the communicator is made. */
static void no_memory(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = NULL;
  ncclUniqueId id = shared_id(0, rank);
  int64_t begun = now_ms();
  ncclResult_t result = ncclCommInitRank(&comm, n, id, rank);
  CHECK(now_ms() - begun < 20 * SECONDS);
  if (is_alone()) {
    CHECK(result != ncclSuccess);
    if (rank == 1) printf("rank 1: %d %s\n", result, ncclGetLastError(NULL));
    return;
  }
  OK(result);
  for (int call = 0; call < 3; call++) right_sum(call, comm, rank, n, 300, stream);
  OK(ncclCommDestroy(comm));
}

/* Rank 1's program takes all memory before the first call, which needs none any more. */
static void no_memory_later(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(4096 * sizeof(int));
  if (rank == 1)
    for (size_t bytes = 1 << 20; bytes > 0; bytes /= 2) {
#ifdef HIP
      void* address;
      while (hipMalloc(&address, bytes) == 0) {}
#else
      CUdeviceptr address;
      while (cuMemAlloc_v2(&address, bytes) == 0) {}
#endif
    }
  OK(ncclReduce(memory, memory + 2048, 2048, ncclInt, ncclSum, 0, comm, (cudaStream_t)stream));
  CHECK(stream_rests(stream, 30 * SECONDS));
  ncclResult_t state;
  OK(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclSuccess);
  OK(ncclCommDestroy(comm));
}

/* Memory that the device cannot use is refused by name, and nothing has happened then. */
static void host_memory(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int *device = gpu_memory(4096), *freed = gpu_memory(4096), *pinned = gpu_pinned(8192), *plain = malloc(4096);
  gpu_free(freed);
  for (int i = 0; i < 2; i++) {
    int* bad = i ? freed : plain;
    CHECK(ncclAllReduce(bad, device, 100, ncclInt, ncclSum, comm, (cudaStream_t)stream) == ncclInvalidArgument);
    CHECK(strstr(ncclGetLastError(comm), "sendbuff"));
    CHECK(ncclAllReduce(device, bad, 100, ncclInt, ncclSum, comm, (cudaStream_t)stream) == ncclInvalidArgument);
    CHECK(strstr(ncclGetLastError(comm), "recvbuff"));
    CHECK(ncclSend(bad, 100, ncclInt, (rank + 1) % n, comm, (cudaStream_t)stream) == ncclInvalidArgument);
    CHECK(ncclRecv(bad, 100, ncclInt, (rank + 1) % n, comm, (cudaStream_t)stream) == ncclInvalidArgument);
  }
  for (int i = 0; i < 1000; i++) pinned[i] = number(3, rank, (size_t)i);
  OK(ncclAllReduce(pinned, pinned + 1000, 1000, ncclInt, ncclSum, comm, (cudaStream_t)stream));
  gpu_wait(stream);
  for (int i = 0; i < 1000; i++) CHECK(pinned[1000 + i] == sum_of_numbers(3, n, (size_t)i));
  right_sum(4, comm, rank, n, 5000, stream);
  OK(ncclCommDestroy(comm));
}

static void reset_device(int device) {
#ifdef HIP
  (void)device;
  GPU(hipDeviceReset());
#else
  GPU(cuDevicePrimaryCtxReset_v2(device));
#endif
}

/* Rank 1 ends its context before its next call. */
static void reset_before(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(4096);
  right_sum(1, comm, rank, n, 1000, stream);
  /* All have their result before one fails. */
  meet(grid);
  if (rank == 1) {
    reset_device(rank % 8);
    int64_t begun = now_ms();
    ncclResult_t result = ncclAllReduce(memory, memory, 8, ncclInt, ncclSum, comm, (cudaStream_t)stream);
    if (result == ncclSuccess) result = failure_of(comm, 10 * SECONDS);
    CHECK(now_ms() - begun < 10 * SECONDS);
    printf("rank 1: %d %s\n", result, ncclGetLastError(comm));
    WITHIN(15 * SECONDS, ncclCommAbort(comm));
    return;
  }
  if (ncclAllReduce(memory, memory, 8, ncclInt, ncclSum, comm, (cudaStream_t)stream) == ncclSuccess)
    failure_of(comm, 20 * SECONDS);
  end_failed(comm, stream, memory);
}

/* Rank 1 ends its context while a collective runs that waits for rank 0: at once, or when the device has nothing to do. */
static void reset_after(int pause_us, int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(2 * LONG * sizeof(int));
  right_sum(1, comm, rank, n, 1000, stream);
  struct hold* hold = rank == 0 ? hold_up(stream) : NULL;
  issue_long(comm, stream, 2, memory);
  meet(grid);
  if (rank == 1) {
    usleep((useconds_t)pause_us);
    reset_device(rank % 8);
    if (is_alone()) printf("rank 1: %d\n", failure_of(comm, 10 * SECONDS));
    WITHIN(15 * SECONDS, ncclCommAbort(comm));
    return;
  }
  failure_of(comm, 20 * SECONDS);
  if (hold) let_go(hold);
  end_failed(comm, stream, memory);
}

static void reset_during(int rank, const struct grid* grid) { reset_after(0, rank, grid); }

static void reset_idle(int rank, const struct grid* grid) { reset_after(500000, rank, grid); }

/* Rank 1 never calls. */
static void never_calls(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(4096);
  right_sum(1, comm, rank, n, 1000, stream);
  meet(grid);
  if (rank != 1) OK(ncclAllReduce(memory, memory, 8, ncclInt, ncclSum, comm, (cudaStream_t)stream));
  ncclResult_t state = failure_of(comm, 15 * SECONDS);
  if (rank == 0) printf("rank 0: %d %s\n", state, ncclGetLastError(comm));
  CHECK(stream_rests(stream, 10 * SECONDS));
  meet(grid);
  end_failed(comm, stream, memory);
}

/* A stream waits for the front of a call on another one: what it copies then is right while the call goes on. */
static void fronts(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank), other = gpu_new_stream();
  ncclComm_t comm = begin_comm(rank, n);
  int *in = gpu_memory(LONG * sizeof(int)), *out = gpu_memory(LONG * sizeof(int)), *pinned = gpu_pinned(LONG * sizeof(int));
  size_t known = 0;
  for (int call = 0; call < 3; call++) {
    for (int i = 0; i < LONG; i++) pinned[i] = number(call, rank, (size_t)i);
    gpu_to(in, pinned, LONG * sizeof(int), stream);
    gpu_wait(stream);
    memset(pinned, 0, LONG * sizeof(int));
    OK(ncclAllReduce(in, out, LONG, ncclInt, ncclSum, comm, (cudaStream_t)stream));
    OK(p_strataRangeQuery(out, LONG * sizeof(int), &known));
    for (int part = 0; part < 4; part++) {
      size_t from = (size_t)part * LONG / 4, bytes = LONG / 4 * sizeof(int);
      OK(p_strataStreamWaitRange((cudaStream_t)other, out + from, bytes));
      gpu_from(pinned + from, out + from, bytes, other);
    }
    gpu_wait(other);
    for (int i = 0; i < LONG; i++) CHECK(pinned[i] == sum_of_numbers(call, n, (size_t)i));
    /* What is final may be overwritten, and what is not followed any more is final. */
    gpu_to(out, pinned, 4096, other);
    gpu_wait(other);
    gpu_wait(stream);
    OK(p_strataRangeQuery(out, LONG * sizeof(int), &known));
    CHECK(known == LONG * sizeof(int));
    OK(p_strataStreamWaitRange((cudaStream_t)other, out, 4096));
    CHECK(stream_rests(other, SECONDS));
  }
  /* A stream of ours waits on the host. */
  strataStream_t ours;
  OK(p_strataStreamCreate(&ours));
  OK(ncclAllReduce(in, out, LONG, ncclInt, ncclSum, comm, (cudaStream_t)stream));
  OK(p_strataStreamWaitRange((cudaStream_t)ours, out, LONG * sizeof(int)));
  OK(p_strataStreamSynchronize(ours));
  OK(p_strataRangeQuery(out, LONG * sizeof(int), &known));
  CHECK(known == LONG * sizeof(int));
  OK(p_strataStreamDestroy(ours));
  gpu_wait(stream);
  /* One call does not come together: streams go on when it has failed, and who asks later is told so. */
  meet(grid);
  if (rank != 1) {
    OK(ncclAllReduce(in, out, LONG, ncclInt, ncclSum, comm, (cudaStream_t)stream));
    OK(p_strataStreamWaitRange((cudaStream_t)other, out, LONG * sizeof(int)));
    CHECK(stream_state(other) == NOT_READY);
  }
  CHECK(failure_of(comm, 15 * SECONDS) != ncclSuccess);
  CHECK(stream_rests(other, 10 * SECONDS));
  if (rank != 1) {
    ncclResult_t again = p_strataStreamWaitRange((cudaStream_t)other, out, 4096);
    CHECK(again != ncclSuccess && p_strataRangeQuery(out, 4096, &known) == again && known == 0);
  }
  meet(grid);
  OK(ncclCommAbort(comm));
}

/* Where a vendor's library has the calls nothing is said of memory of a device. */
static void unfollowed(int rank, const struct grid* grid) {
  (void)grid;
  gpu_stream stream = begin_rank(rank);
  int* memory = gpu_memory(4096);
  size_t known = 1;
  CHECK(p_strataStreamWaitRange((cudaStream_t)stream, memory, 4096) == ncclInvalidUsage);
  CHECK(p_strataRangeQuery(memory, 4096, &known) == ncclInvalidUsage && known == 0);
}

/* Rank 1 is killed in the middle of long collectives. */
static void killed(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(2 * LONG * sizeof(int));
  right_sum(1, comm, rank, n, 1000, stream);
  /* All have their result before one fails. */
  meet(grid);
  issue_long(comm, stream, 6, memory);
  if (rank == 1) {
    raise(SIGKILL);
  }
  failure_of(comm, 20 * SECONDS);
  end_failed(comm, stream, memory);
}

/* Rank 1 gives the communicator up in the middle of long collectives. */
static void aborted(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(2 * LONG * sizeof(int));
  right_sum(1, comm, rank, n, 1000, stream);
  struct hold* hold = rank == 0 ? hold_up(stream) : NULL;
  issue_long(comm, stream, 6, memory);
  meet(grid);
  if (rank == 1) {
    WITHIN(15 * SECONDS, ncclCommAbort(comm));
    CHECK(stream_rests(stream, 10 * SECONDS));
    return;
  }
  failure_of(comm, 20 * SECONDS);
  if (hold) let_go(hold);
  end_failed(comm, stream, memory);
}

/* Rank 1's process ends in good order, but in the middle of long collectives and without a word to NCCL. */
static void leaves(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(2 * LONG * sizeof(int));
  right_sum(1, comm, rank, n, 1000, stream);
  if (rank == 0) hold_up(stream);
  issue_long(comm, stream, 3, memory);
  meet(grid);
  if (rank == 1) exit(0);
  failure_of(comm, 20 * SECONDS);
  /* The stream is still held up, and so it stays. */
}

/* All processes end with a communicator that has nothing to do. */
static void forgets(int rank, const struct grid* grid) {
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, grid->nranks);
  right_sum(1, comm, rank, grid->nranks, 1000, stream);
  meet(grid);
}

/* A stream that is none of the driver's any more, alone and beside a good one. */
static void bad_stream(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank), ended = gpu_new_stream();
  ncclComm_t comm = begin_comm(rank, n);
  int* memory = gpu_memory(4096);
  GPU(DRIVER(cuStreamDestroy_v2, hipStreamDestroy)(ended));
  CHECK(ncclAllReduce(memory, memory, 8, ncclInt, ncclSum, comm, (cudaStream_t)ended) != ncclSuccess);
  OK(ncclGroupStart());
  OK(ncclAllReduce(memory, memory, 8, ncclInt, ncclSum, comm, (cudaStream_t)stream));
  OK(ncclAllReduce(memory, memory, 8, ncclInt, ncclSum, comm, (cudaStream_t)ended));
  CHECK(ncclGroupEnd() != ncclSuccess);
  CHECK(stream_rests(stream, 10 * SECONDS));
  right_sum(1, comm, rank, n, 1000, stream);
  OK(ncclCommDestroy(comm));
}

static const int rank_1_is_killed[MAX_RANKS] = {0, -SIGKILL};

static const struct scenario scenarios[] = {
    {"no_memory", no_memory, NULL},       {"no_memory_later", no_memory_later, NULL}, {"host_memory", host_memory, NULL},
    {"reset_before", reset_before, NULL}, {"reset_during", reset_during, NULL},       {"reset_idle", reset_idle, NULL},
    {"never_calls", never_calls, NULL},
    {"killed", killed, rank_1_is_killed}, {"aborted", aborted, NULL},                 {"leaves", leaves, NULL},
    {"bad_stream", bad_stream, NULL},     {"forgets", forgets, NULL},     {"fronts", fronts, NULL},
    {"unfollowed", unfollowed, NULL},     {NULL, NULL, NULL},
};

int main(int argc, char** argv) { return run_scenario(scenarios, argc, argv); }
