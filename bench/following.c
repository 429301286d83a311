/* What it costs to follow a call's front: ranks of `strata launch` sum a buffer on a stream, in turns
 *
 *   whole     the program waits for the stream
 *   ranges    it waits for each of the ranges of the buffer in their order, then for the stream
 *
 * and the time in which a wait is over: on a communicator of one rank a callback on the stream notes the time, and a call of 8
 * bytes behind it lets the program go on, which waits for its range or for the stream. The call itself is in that time.
 *
 * strata launch -n 2 -- ./following [-b BYTES] [-r RANGES] [-n TURNS]      rows: what, median, quartiles */
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <strata.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                                                                 \
  do {                                                                                              \
    if ((call) != ncclSuccess) {                                                                    \
      fprintf(stderr, "%s: %s\n", #call, strataGetLastError());                                     \
      exit(1);                                                                                      \
    }                                                                                               \
  } while (0)

enum { MOST = 10000, RELEASES = 1000 };
enum { WHOLE, RANGES, WAYS };

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e6 * (double)time.tv_sec + (double)time.tv_nsec / 1e3;
}

static int ascending(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void tell(const char* what, double* values, int count) {
  qsort(values, (size_t)count, sizeof *values, ascending);
  printf("%-44s %12.3f %12.3f..%.3f\n", what, values[count / 2], values[count / 4], values[3 * count / 4]);
}

static void note(void* at) {
  usleep(500); /* Until the program waits. */
  *(double*)at = now_us();
}

static void releases(strataStream_t stream, int by_range) {
  static double times[RELEASES];
  static float data[2];
  ncclUniqueId id;
  ncclComm_t alone;
  CHECK(ncclGetUniqueId(&id));
  CHECK(strataCommInitHost(&alone, 1, id, 0, -1));
  for (int turn = 0; turn < RELEASES; turn++) {
    volatile double begun = 0;
    CHECK(strataStreamAddCallback(stream, note, (void*)&begun));
    CHECK(ncclAllReduce(data, data, 2, ncclFloat, ncclSum, alone, stream));
    if (by_range) CHECK(strataStreamWaitRange(NULL, data, sizeof data));
    else CHECK(strataStreamSynchronize(stream));
    times[turn] = now_us() - begun;
    CHECK(strataStreamSynchronize(stream));
  }
  tell(by_range ? "us until a wait for a range is over" : "us until a wait for the stream is over", times, RELEASES);
  CHECK(ncclCommDestroy(alone));
}

int main(int argc, char** argv) {
  static double times[WAYS][MOST], ratio[MOST];
  size_t bytes = 64 << 20;
  int ranges = 161, turns = 21, option, nranks, rank;
  while ((option = getopt(argc, argv, "b:r:n:")) != -1) {
    switch (option) {
    case 'b': bytes = strtoull(optarg, NULL, 10); break;
    case 'r': ranges = atoi(optarg); break;
    case 'n': turns = atoi(optarg); break;
    default: return 2;
    }
  }
  size_t count = bytes / sizeof(float);
  if (ranges < 1 || turns < 1 || turns > MOST || count < (size_t)ranges) return 2;
  ncclUniqueId id;
  ncclComm_t comm;
  strataStream_t stream;
  CHECK(strataGetWorldId(&id, &nranks, &rank));
  CHECK(strataCommInitHost(&comm, nranks, id, rank, -1));
  CHECK(strataStreamCreate(&stream));
  float* data = calloc(count, sizeof *data);
  float none = 0;
  for (int turn = -1; turn < turns; turn++) {
    for (int way = 0; way < WAYS; way++) {
      CHECK(ncclAllReduce(&none, &none, 1, ncclFloat, ncclSum, comm, NULL));
      double begin = now_us();
      CHECK(ncclAllReduce(data, data, count, ncclFloat, ncclSum, comm, stream));
      for (int at = 0; way == RANGES && at < ranges; at++) {
        size_t from = count * (size_t)at / (size_t)ranges, to = count * (size_t)(at + 1) / (size_t)ranges;
        CHECK(strataStreamWaitRange(NULL, data + from, (to - from) * sizeof *data));
      }
      CHECK(strataStreamSynchronize(stream));
      if (turn >= 0) times[way][turn] = now_us() - begin;
    }
  }
  CHECK(ncclAllReduce(times, times, sizeof times / sizeof(double), ncclDouble, ncclMax, comm, NULL));
  CHECK(ncclCommDestroy(comm));
  if (rank == 0) {
    for (int turn = 0; turn < turns; turn++) ratio[turn] = times[RANGES][turn] / times[WHOLE][turn];
    printf("# %d ranks, %zu bytes, %d ranges, %d turns: median and quartiles\n", nranks, count * sizeof *data, ranges, turns);
    tell("us, the program waits for the stream", times[WHOLE], turns);
    tell("us, it waits for each range", times[RANGES], turns);
    tell("the second over the first", ratio, turns);
    releases(stream, 1);
    releases(stream, 0);
  }
  CHECK(strataStreamDestroy(stream));
  free(data);
  return 0;
}
