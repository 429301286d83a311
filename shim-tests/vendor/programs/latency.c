/* What a call costs through the library that this program is linked with, and directly, in one run: the median over many
 * batches, in nanoseconds.
 *
 * latency PATH [GRID]: PATH is the vendor's library itself, as an absolute path. On a grid rank 0 measures. Where the
 * vendor cannot make a communicator (it finds no GPU), calls are made without one. */
#include "ranks.h"
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
static const char* vendor_path;

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

/* Both return the same, success where there is a communicator. */
static void right(ncclResult_t linked, ncclResult_t direct) {
  CHECK(linked == direct && (linked == ncclSuccess || !comm));
}

/* Batches of both ways in turn, so that both meet the same machine. */
#define MEASURE(name, through, directly)                                                                    \
  do {                                                                                                      \
    static double a[BATCHES], b[BATCHES];                                                                   \
    ncclResult_t linked_code = ncclSuccess, direct_code = ncclSuccess;                                      \
    for (int batch = 0; batch < BATCHES; batch++) {                                                         \
      double start = now_ns();                                                                              \
      for (int i = 0; i < CALLS; i++) linked_code = through;                                                \
      double middle = now_ns();                                                                             \
      for (int i = 0; i < CALLS; i++) direct_code = directly;                                               \
      a[batch] = (middle - start) / CALLS;                                                                  \
      b[batch] = (now_ns() - middle) / CALLS;                                                               \
    }                                                                                                       \
    right(linked_code, direct_code);                                                                        \
    double linked = median(a), direct = median(b);                                                          \
    printf("%s: linked %.1f ns, direct %.1f ns, added %.1f ns\n", name, linked, direct, linked - direct);   \
  } while (0)

static void measure(void) {
  int number;
  ncclResult_t state;
  void* vendor = dlopen(vendor_path, RTLD_NOW | RTLD_LOCAL);
  CHECK(vendor);
  *(void**)&count_directly = dlsym(vendor, "ncclCommCount");
  *(void**)&state_directly = dlsym(vendor, "ncclCommGetAsyncError");
  *(void**)&start_directly = dlsym(vendor, "ncclGroupStart");
  *(void**)&end_directly = dlsym(vendor, "ncclGroupEnd");
  *(void**)&sum_directly = dlsym(vendor, "ncclAllReduce");
  CHECK(count_directly && state_directly && start_directly && end_directly && sum_directly);
  if (!comm) printf("(no communicator can be made here: calls without one)\n");
  MEASURE("ncclCommCount", ncclCommCount(comm, &number), count_directly(comm, &number));
  MEASURE("ncclCommGetAsyncError", ncclCommGetAsyncError(comm, &state), state_directly(comm, &state));
  MEASURE("ncclGroupStart+End", (ncclGroupStart(), ncclGroupEnd()), (start_directly(), end_directly()));
  MEASURE("ncclAllReduce of nothing", ncclAllReduce(data, data, 0, ncclInt, ncclSum, comm, NULL),
          sum_directly(data, data, 0, ncclInt, ncclSum, comm, NULL));
  fflush(stdout);
}

static void rank_main(int rank, const struct grid* grid) {
  if (ncclCommInitRank(&comm, grid->nranks, shared_id(0, rank), rank) != ncclSuccess) comm = NULL;
  if (rank == 0) measure();
  meet(grid);
  if (comm) OK(ncclCommDestroy(comm));
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "latency PATH [GRID]\n");
    return 2;
  }
  vendor_path = argv[1];
  struct grid grid = parse_grid(argc > 2 ? argv[2] : "1x1");
  return run_ranks(&grid, rank_main, 120, NULL) != 0;
}
