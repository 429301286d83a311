/* What programs on soft GPUs share that try what must fail or wait: streams that are held up until the program lets them
 * go, waits with a limit, and collectives whose results are checked. */
#ifndef GPU_H
#define GPU_H

#include "ranks.h"
#include "../../soft/driver.h"
#include <pthread.h>
#include <time.h>

#define NOT_READY 600

static int64_t now_ms(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* A stream that is held up: it has come to the hold, and may it go on? */
struct hold {
  _Atomic int reached, open;
};

static void pass_when_open(void* argument) {
  struct hold* hold = argument;
  atomic_store(&hold->reached, 1);
  while (!atomic_load(&hold->open)) usleep(100);
}

/* Holds a stream up. The hold is never freed: the stream may look at it late. */
__attribute__((unused)) static struct hold* hold_up(gpu_stream stream) {
  struct hold* hold = calloc(1, sizeof(*hold));
  GPU(DRIVER(cuLaunchHostFunc, hipLaunchHostFunc)(stream, pass_when_open, hold));
  return hold;
}

__attribute__((unused)) static void let_go(struct hold* hold) { atomic_store(&hold->open, 1); }

__attribute__((unused)) static int stream_state(gpu_stream stream) {
  return (int)DRIVER(cuStreamQuery, hipStreamQuery)(stream);
}

/* Whether a stream comes to rest in time, whatever its outcome. */
__attribute__((unused)) static int stream_rests(gpu_stream stream, int limit_ms) {
  int64_t end = now_ms() + limit_ms;
  while (stream_state(stream) == NOT_READY) {
    if (now_ms() > end) return 0;
    usleep(500);
  }
  return 1;
}

/* The first failure of a communicator, which must come in time. */
__attribute__((unused)) static ncclResult_t failure_of(ncclComm_t comm, int limit_ms) {
  int64_t end = now_ms() + limit_ms;
  ncclResult_t state = ncclSuccess;
  for (;;) {
    OK(ncclCommGetAsyncError(comm, &state));
    if (state != ncclSuccess && state != ncclInProgress) return state;
    CHECK(now_ms() < end && "no failure was told");
    usleep(500);
  }
}

#define WITHIN(limit_ms, call)              \
  do {                                      \
    int64_t begun = now_ms();               \
    call;                                   \
    CHECK(now_ms() - begun < (limit_ms));   \
  } while (0)

static int number(int call, int rank, size_t index) { return (int)((uint32_t)call * 7919u + (uint32_t)rank * 104729u + (uint32_t)index * 31u); }

static int sum_of_numbers(int call, int n, size_t index) {
  uint32_t sum = 0;
  for (int rank = 0; rank < n; rank++) sum += (uint32_t)number(call, rank, index);
  return (int)sum;
}

/* An all-reduce of a call's numbers: memory of the device, and of the host, where the result goes. */
struct sum {
  int call, n;
  size_t count;
  char* device;
  int *in, *out, *host_in, *host_out;
  gpu_stream stream;
};

/* Puts the numbers in, `shift` elements off the beginning of the memory. Host memory is ordinary: none may be pinned. */
__attribute__((unused)) static struct sum begin_sum(int call, int rank, int n, size_t count, size_t shift, gpu_stream stream) {
  struct sum sum = {.call = call, .n = n, .count = count, .stream = stream};
  size_t room = (count + shift + 1) * sizeof(int);
  sum.device = gpu_memory(2 * room);
  sum.in = (int*)(void*)sum.device + shift;
  sum.out = (int*)(void*)(sum.device + room) + shift;
  sum.host_in = malloc(room), sum.host_out = calloc(1, room);
  for (size_t i = 0; i < count; i++) sum.host_in[i] = number(call, rank, i);
  if (count > 0) gpu_to(sum.in, sum.host_in, count * sizeof(int), stream);
  return sum;
}

__attribute__((unused)) static void issue_sum(const struct sum* sum, ncclComm_t comm) {
  OK(ncclAllReduce(sum->in, sum->out, sum->count, ncclInt, ncclSum, comm, (cudaStream_t)sum->stream));
}

__attribute__((unused)) static void end_sum(struct sum* sum) {
  if (sum->count > 0) gpu_from(sum->host_out, sum->out, sum->count * sizeof(int), sum->stream);
  gpu_wait(sum->stream);
  for (size_t i = 0; i < sum->count; i++) {
    if (sum->host_out[i] == sum_of_numbers(sum->call, sum->n, i)) continue;
    fprintf(stderr, "call %d of %zu: element %zu is %d, not %d\n", sum->call, sum->count, i, sum->host_out[i],
            sum_of_numbers(sum->call, sum->n, i));
    exit(3);
  }
  gpu_free(sum->device);
  free(sum->host_in);
  free(sum->host_out);
}

/* A whole all-reduce with its check. */
__attribute__((unused)) static void right_sum(int call, ncclComm_t comm, int rank, int n, size_t count, gpu_stream stream) {
  struct sum sum = begin_sum(call, rank, n, count, 0, stream);
  issue_sum(&sum, comm);
  end_sum(&sum);
}

__attribute__((unused)) static int is_alone(void) {
  const char* library = getenv("STRATA_NCCL_LIB");
  return library && strcmp(library, "none") == 0;
}

/* The case that a program is asked for. */
struct scenario {
  const char* name;
  void (*rank_main)(int rank, const struct grid* grid);
  const int* expected;
};

__attribute__((unused)) static int run_scenario(const struct scenario* known, int argc, char** argv) {
  if (argc < 3) return 2;
  struct grid grid = parse_grid(argv[2]);
  for (; known->name; known++)
    if (strcmp(known->name, argv[1]) == 0) return run_ranks(&grid, known->rank_main, 60, known->expected) != 0;
  fprintf(stderr, "there is no case %s\n", argv[1]);
  return 2;
}

#endif
