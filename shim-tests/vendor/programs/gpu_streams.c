/* Collectives whose streams are held up, captured, many, or driven by several threads: the host is never blocked, and all
 * results are right.
 *
 * gpu_streams CASE GRID */
#include "gpu.h"

enum { SECONDS = 1000, STREAMS = 2, CALLS = 200 };

static ncclComm_t begin_comm(int id, int rank, int n) {
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, n, shared_id(id, rank), rank));
  return comm;
}

static void* let_go_later(void* hold) {
  usleep(20000);
  let_go(hold);
  return NULL;
}

/* Calls return while nobody else has called and while their streams are held up; the communicator is destroyed while a
 * stream of the last call is still held up. */
static void queue(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream streams[STREAMS];
  static struct sum sums[CALLS];
  gpu_use(rank % 8);
  for (int i = 0; i < STREAMS; i++) streams[i] = gpu_new_stream();
  ncclComm_t comm = begin_comm(0, rank, n);
  right_sum(0, comm, rank, n, 10, streams[0]);
  for (int i = 0; i < CALLS; i++) sums[i] = begin_sum(i, rank, n, 100 + (size_t)i, 0, streams[i % STREAMS]);
  for (int turn = 0; turn < n; turn++) {
    if (turn == rank) {
      struct hold* holds[STREAMS];
      /* The last rank's streams go on at once. */
      for (int i = 0; i < STREAMS && rank < n - 1; i++) holds[i] = hold_up(streams[i]);
      for (int i = 0; i < CALLS; i++) issue_sum(&sums[i], comm);
      for (int i = 0; i < STREAMS && rank < n - 1; i++) {
        CHECK(stream_state(streams[i]) == NOT_READY);
        let_go(holds[i]);
      }
      for (int i = 0; i < STREAMS && rank < n - 1; i++) CHECK(stream_state(streams[i]) == NOT_READY);
    }
    meet(grid);
  }
  for (int i = 0; i < CALLS; i++) end_sum(&sums[i]);
  struct sum last = begin_sum(CALLS, rank, n, 5000, 0, streams[0]);
  struct hold* hold = hold_up(streams[0]);
  pthread_t thread;
  issue_sum(&last, comm);
  CHECK(pthread_create(&thread, NULL, let_go_later, hold) == 0);
  OK(ncclCommDestroy(comm));
  CHECK(atomic_load(&hold->open));
  end_sum(&last);
  pthread_join(thread, NULL);
}

#ifdef HIP
typedef hipGraph_t graph;
typedef hipGraphExec_t executable;
#define BEGIN(stream, mode) hipStreamBeginCapture(stream, mode)
#define END(stream, graph) hipStreamEndCapture(stream, graph)
#define INSTANTIATE(executable, graph) hipGraphInstantiate(executable, graph, NULL, NULL, 0)
#define LAUNCH(executable, stream) hipGraphLaunch(executable, stream)
#else
typedef CUgraph graph;
typedef CUgraphExec executable;
#define BEGIN(stream, mode) cuStreamBeginCapture_v2(stream, mode)
#define END(stream, graph) cuStreamEndCapture(stream, graph)
#define INSTANTIATE(executable, graph) cuGraphInstantiateWithFlags(executable, graph, 0)
#define LAUNCH(executable, stream) cuGraphLaunch(executable, stream)
#endif

/* Calls on a captured stream: the vendor's, and right whenever the graph runs; refused where there is no vendor. */
static void capture(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_use(rank % 8);
  gpu_stream stream = gpu_new_stream(), other = gpu_new_stream();
  ncclComm_t comm = begin_comm(0, rank, n);
  right_sum(1, comm, rank, n, 1000, stream);
  struct sum first = begin_sum(2, rank, n, 1000, 0, stream), second = begin_sum(2, rank, n, 1000, 0, stream);
  gpu_wait(stream);
  graph captured;
  executable ready;
  GPU(BEGIN(stream, 0));
  if (is_alone()) {
    ncclResult_t result = ncclAllReduce(first.in, first.out, 1000, ncclInt, ncclSum, comm, (cudaStream_t)stream);
    CHECK(result == ncclInvalidUsage && strstr(ncclGetLastError(comm), "captured"));
    OK(ncclGroupStart());
    OK(ncclAllReduce(first.in, first.out, 1000, ncclInt, ncclSum, comm, (cudaStream_t)stream));
    OK(ncclAllReduce(second.in, second.out, 1000, ncclInt, ncclSum, comm, (cudaStream_t)other));
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    gpu_to(first.in, first.host_in, 4000, stream);
    gpu_from(first.host_out, first.in, 4000, stream);
  } else {
    gpu_to(first.in, first.host_in, 4000, stream);
    issue_sum(&first, comm);
    OK(ncclGroupStart());
    issue_sum(&second, comm);
    OK(ncclGroupEnd());
    gpu_from(first.host_out, first.out, 4000, stream);
  }
  GPU(END(stream, &captured));
  GPU(INSTANTIATE(&ready, captured));
  right_sum(3, comm, rank, n, 2000, other);
  meet(grid);
  for (int run = 0; run < 5; run++) {
    for (int i = 0; i < 1000; i++) first.host_in[i] = run + rank + i, first.host_out[i] = -1;
    GPU(LAUNCH(ready, stream));
    gpu_wait(stream);
    for (int i = 0; i < 1000; i++)
      CHECK(first.host_out[i] == (is_alone() ? first.host_in[i] : n * (run + i) + n * (n - 1) / 2));
    meet(grid);
  }
  if (!is_alone()) end_sum(&second);
  for (int call = 4; call < 7; call++) right_sum(call, comm, rank, n, 2000, call % 2 ? stream : other);
  OK(ncclCommDestroy(comm));
}

/* While a collective waits, the program captures something else, in the mode that forbids most. */
static void capture_beside(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_use(rank % 8);
  gpu_stream stream = gpu_new_stream(), other = gpu_new_stream();
  ncclComm_t comm = begin_comm(0, rank, n);
  for (int turn = 0; turn < 3; turn++) {
    struct sum sum = begin_sum(turn, rank, n, 300000, 0, stream);
    int *device = gpu_memory(4096), *host = gpu_pinned(4096);
    graph captured;
    issue_sum(&sum, comm);
    GPU(BEGIN(other, 0));
    for (int i = 0; i < 200; i++) {
      gpu_to(device, host, 4096, other);
      usleep(50);
    }
    GPU(END(other, &captured));
    end_sum(&sum);
  }
  OK(ncclCommDestroy(comm));
}

enum { COMMS = 3, ROUNDS = 12 };

/* Several communicators of the same ranks, their calls interleaved on several streams, alone and in groups. */
static void many(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream streams[STREAMS];
  ncclComm_t comms[COMMS];
  gpu_use(rank % 8);
  for (int i = 0; i < STREAMS; i++) streams[i] = gpu_new_stream();
  for (int i = 0; i < COMMS; i++) comms[i] = begin_comm(i, rank, n);
  for (int round = 0; round < ROUNDS; round++) {
    struct sum sums[2 * COMMS];
    for (int i = 0; i < 2 * COMMS; i++)
      sums[i] = begin_sum(round * 8 + i, rank, n, (size_t)(1 + round * 997 + i), 0, streams[(round + i / 2) % STREAMS]);
    if (round % 2) OK(ncclGroupStart());
    for (int i = 0; i < 2 * COMMS; i++) issue_sum(&sums[i], comms[(i + round) % COMMS]);
    if (round % 2) OK(ncclGroupEnd());
    for (int i = 0; i < 2 * COMMS; i++) end_sum(&sums[i]);
  }
  for (int i = 0; i < COMMS; i++) OK(ncclCommDestroy(comms[i]));
}

enum { DEVICES = 4 };

struct driver {
  int rank;
  ncclComm_t comm;
};

static void* drive(void* argument) {
  struct driver* driver = argument;
  gpu_use(driver->rank);
  gpu_stream streams[STREAMS];
  for (int i = 0; i < STREAMS; i++) streams[i] = gpu_new_stream();
  for (int call = 0; call < 20; call++) right_sum(call, driver->comm, driver->rank, DEVICES, (size_t)(1 + call * 501), streams[call % 2]);
  return NULL;
}

/* One process with several devices: a thread for each, and then one thread for all of them. */
static void threads(int rank, const struct grid* grid) {
  (void)rank, (void)grid;
  ncclComm_t comms[DEVICES];
  struct driver drivers[DEVICES];
  pthread_t started[DEVICES];
  gpu_stream streams[DEVICES];
  gpu_use(0);
  OK(ncclCommInitAll(comms, DEVICES, NULL));
  for (int i = 0; i < DEVICES; i++) {
    drivers[i] = (struct driver){i, comms[i]};
    CHECK(pthread_create(&started[i], NULL, drive, &drivers[i]) == 0);
  }
  for (int i = 0; i < DEVICES; i++) pthread_join(started[i], NULL);
  for (int i = 0; i < DEVICES; i++) gpu_use(i), streams[i] = gpu_new_stream();
  for (int grouped = 0; grouped < 2; grouped++) {
    struct sum sums[DEVICES];
    for (int i = 0; i < DEVICES; i++) gpu_use(i), sums[i] = begin_sum(50, i, DEVICES, 70000, 0, streams[i]);
    /* A group may be made whatever device is current; calls without one return before the others have called. */
    if (grouped) OK(ncclGroupStart());
    for (int i = 0; i < DEVICES; i++) issue_sum(&sums[i], comms[i]);
    if (grouped) OK(ncclGroupEnd());
    for (int i = 0; i < DEVICES; i++) gpu_use(i), end_sum(&sums[i]);
  }
  for (int i = 0; i < DEVICES; i++) OK(ncclCommDestroy(comms[i]));
}

struct call {
  const struct sum* sum;
  ncclComm_t comm;
};

static void* call_from_elsewhere(void* argument) {
  struct call* call = argument;
  issue_sum(call->sum, call->comm);
  return NULL;
}

/* The driver's own streams, and calls from a thread on which no device was made current. */
static void nulls(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_use(rank % 8);
  ncclComm_t comm = begin_comm(0, rank, n);
  gpu_stream streams[] = {NULL, gpu_new_stream(), DRIVER(CU_STREAM_LEGACY, NULL), DRIVER(CU_STREAM_PER_THREAD, NULL)};
  for (int call = 0; call < 12; call++) right_sum(call, comm, rank, n, (size_t)(call * 1000), streams[call % 4]);
  for (int i = 0; i < 4; i++) {
    struct sum sum = begin_sum(20 + i, rank, n, 3000, 0, streams[1]);
    struct call call = {&sum, comm};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, call_from_elsewhere, &call) == 0);
    pthread_join(thread, NULL);
    end_sum(&sum);
  }
  OK(ncclCommDestroy(comm));
}

#ifndef HIP
/* Contexts that the program makes itself: what is current stays so, and one that is destroyed takes only its own
 * communicator with it. */
static void contexts(int rank, const struct grid* grid) {
  int n = grid->nranks;
  CUcontext made[2], now;
  ncclComm_t comms[2];
  gpu_stream streams[2];
  GPU(cuInit(0));
  for (int i = 0; i < 2; i++) {
    GPU(cuCtxCreate_v2(&made[i], 0, 0));
    streams[i] = gpu_new_stream();
    comms[i] = begin_comm(i, rank, n);
    GPU(cuCtxGetCurrent(&now));
    CHECK(now == made[i]);
  }
  for (int i = 0; i < 2; i++) {
    GPU(cuCtxSetCurrent(made[i]));
    struct sum sum = begin_sum(i, rank, n, 5000, 0, streams[i]);
    GPU(cuCtxSetCurrent(made[1 - i]));
    issue_sum(&sum, comms[i]);
    GPU(cuCtxGetCurrent(&now));
    CHECK(now == made[1 - i]);
    GPU(cuCtxSetCurrent(made[i]));
    end_sum(&sum);
  }
  meet(grid);
  GPU(cuCtxDestroy_v2(made[1]));
  WITHIN(15 * SECONDS, ncclCommAbort(comms[1]));
  GPU(cuCtxSetCurrent(made[0]));
  for (int call = 2; call < 5; call++) right_sum(call, comms[0], rank, n, 5000, streams[0]);
  OK(ncclCommDestroy(comms[0]));
}
#endif

static ncclComm_t ready(ncclComm_t comm) {
  CHECK(settled(comm) == ncclSuccess);
  return comm;
}

/* Communicators made out of others, and some that do not wait. */
static void derived(int rank, const struct grid* grid) {
  int n = grid->nranks, member, size;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t world, half, parity = NULL, later = NULL, less;
  gpu_use(rank % 8);
  gpu_stream stream = gpu_new_stream();
  world = begin_comm(0, rank, n);
  OK(ncclCommSplit(world, rank / 2, rank, &half, NULL));
  config.blocking = 0;
  ncclResult_t result = ncclCommInitRankConfig(&later, n, shared_id(1, rank), rank, &config);
  CHECK(result == ncclSuccess || result == ncclInProgress);
  ready(later);
  right_sum(1, ready(later), rank, n, 70000, stream);
  result = ncclCommSplit(later, rank % 2, -rank, &parity, NULL);
  CHECK(result == ncclSuccess || result == ncclInProgress);
  ready(later);
  right_sum(2, half, rank % 2, 2, 70000, stream);
  OK(ncclCommCount(ready(parity), &size));
  OK(ncclCommUserRank(parity, &member));
  right_sum(3, parity, member, size, 3000, stream);
  int left = n - 1;
  if (rank != left) {
    OK(ncclCommShrink(world, &left, 1, &less, NULL, 0));
    right_sum(4, less, rank, n - 1, 70000, stream);
    OK(ncclCommDestroy(less));
  }
  OK(ncclCommDestroy(world));
  right_sum(5, half, rank % 2, 2, 1000, stream);
  OK(ncclCommFinalize(half));
  OK(ncclCommDestroy(half));
  for (int i = 0; i < 2; i++) {
    result = ncclCommFinalize(i ? later : parity);
    CHECK(result == ncclSuccess || result == ncclInProgress);
    ready(i ? later : parity);
    OK(ncclCommDestroy(i ? later : parity));
  }
}

/* Rank 1 uses no GPU: its memory is the host's. */
static void mixed(int rank, const struct grid* grid) {
  int n = grid->nranks;
  ncclComm_t comm;
  if (rank != 1) {
    gpu_use(rank % 8);
    gpu_stream stream = gpu_new_stream();
    comm = begin_comm(0, rank, n);
    for (int call = 0; call < 6; call++) right_sum(call, comm, rank, n, (size_t)(1 + call * 20000), stream);
  } else {
    comm = begin_comm(0, rank, n);
    for (int call = 0; call < 6; call++) {
      size_t count = (size_t)(1 + call * 20000);
      int *in = malloc(count * sizeof(int)), *out = malloc(count * sizeof(int));
      for (size_t i = 0; i < count; i++) in[i] = number(call, rank, i);
      OK(ncclAllReduce(in, out, count, ncclInt, ncclSum, comm, NULL));
      for (size_t i = 0; i < count; i++) CHECK(out[i] == sum_of_numbers(call, n, i));
    }
  }
  OK(ncclCommDestroy(comm));
}

static const struct scenario scenarios[] = {
#ifndef HIP
    {"contexts", contexts, NULL},
#endif
    {"nulls", nulls, NULL}, {"derived", derived, NULL}, {"mixed", mixed, NULL},
    {"queue", queue, NULL}, {"capture", capture, NULL}, {"capture_beside", capture_beside, NULL},
    {"many", many, NULL},   {"threads", threads, NULL}, {NULL, NULL, NULL},
};

int main(int argc, char** argv) { return run_scenario(scenarios, argc, argv); }
