/* What a call costs through the library that this program is linked with, and directly, in one run: the median over many
 * batches, in nanoseconds.
 *
 * latency PATH: the vendor's library itself, as an absolute path. */
#include "way.h"
#include <dlfcn.h>
#include <time.h>

enum { BATCHES = 301, CALLS = 2000 };

static ncclResult_t (*count_directly)(ncclComm_t, int*);
static ncclResult_t (*state_directly)(ncclComm_t, ncclResult_t*);
static ncclResult_t (*start_directly)(void);
static ncclResult_t (*end_directly)(void);
static ncclResult_t (*sum_directly)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
static ncclComm_t comm;
static int data[4];

static double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

static int ascending(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* values) {
  qsort(values, BATCHES, sizeof(*values), ascending);
  return values[BATCHES / 2];
}

/* Batches of both ways in turn, so that both meet the same machine. */
#define MEASURE(name, through, directly)                                                   \
  do {                                                                                     \
    static double a[BATCHES], b[BATCHES];                                                  \
    for (int batch = 0; batch < BATCHES; batch++) {                                        \
      double start = now_ns();                                                             \
      for (int i = 0; i < CALLS; i++) through;                                             \
      double middle = now_ns();                                                            \
      for (int i = 0; i < CALLS; i++) directly;                                            \
      a[batch] = (middle - start) / CALLS;                                                 \
      b[batch] = (now_ns() - middle) / CALLS;                                              \
    }                                                                                      \
    double linked = median(a), direct = median(b);                                         \
    printf("%s: linked %.1f ns, direct %.1f ns, added %.1f ns\n", name, linked, direct, linked - direct); \
  } while (0)

int main(int argc, char** argv) {
  int number;
  ncclResult_t state;
  ncclUniqueId id;
  if (argc != 2) {
    fprintf(stderr, "latency PATH\n");
    return 2;
  }
  alarm(120);
  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&comm, 1, id, 0));
  void* vendor = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(vendor);
  *(void**)&count_directly = dlsym(vendor, "ncclCommCount");
  *(void**)&state_directly = dlsym(vendor, "ncclCommGetAsyncError");
  *(void**)&start_directly = dlsym(vendor, "ncclGroupStart");
  *(void**)&end_directly = dlsym(vendor, "ncclGroupEnd");
  *(void**)&sum_directly = dlsym(vendor, "ncclAllReduce");
  CHECK(count_directly && state_directly && start_directly && end_directly && sum_directly);
  OK(count_directly(comm, &number)); /* The handle is the vendor's own. */
  MEASURE("ncclCommCount", OK(ncclCommCount(comm, &number)), OK(count_directly(comm, &number)));
  MEASURE("ncclCommGetAsyncError", OK(ncclCommGetAsyncError(comm, &state)), OK(state_directly(comm, &state)));
  MEASURE("ncclGroupStart+End", OK(ncclGroupStart()); OK(ncclGroupEnd()), OK(start_directly()); OK(end_directly()));
  MEASURE("ncclAllReduce of nothing", OK(ncclAllReduce(data, data, 0, ncclInt, ncclSum, comm, NULL)),
          OK(sum_directly(data, data, 0, ncclInt, ncclSum, comm, NULL)));
  OK(ncclCommDestroy(comm));
  return 0;
}
