/* Random collectives on device memory and streams of a GPU. Nothing waits on the host between the copies in, the
 * collectives and the copies out: their order is the streams'. Every result is checked at the end.
 *
 * rails GRID SEED CALLS [MOST [FILE]]: each rank is a process with a device; MOST is the largest number of bytes of a block.
 * With RAILS_FLOATS elements are float32 and so small integers that every code holds them and their sums as they are.
 * With FILE the process is one rank, started by an MPI launcher, and shares that file with the others. */
#include "ranks.h"
#include <fcntl.h>
#include "../../soft/driver.h"

enum { STREAMS = 2, WAVE = 4 };

/* One call with its memory. The input is what `value` gives, the result what `wanted` says. */
struct call {
  int kind; /* 0 all-gather, 1 reduce-scatter, 2 all-reduce, 3 broadcast by the vendor */
  int in_place, root;
  size_t count;
  void *device, *in, *out; /* on the device; `in` and `out` lie in `device` */
  int *host_in, *host_out;
  gpu_stream stream;
};

static uint64_t random_state;

static uint64_t next_random(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

static int floats;

static ncclDataType_t type(void) { return floats ? ncclFloat : ncclInt; }

/* As an element is stored. */
static int stored(int value) {
  float as_float = (float)value;
  if (floats) memcpy(&value, &as_float, sizeof value);
  return value;
}

static int number_of(int number, int rank, size_t index) {
  uint32_t mixed = (uint32_t)(number * 7919 + rank * 104729) + (uint32_t)index * 31u;
  return floats ? (int)(mixed * 2654435761u >> 16) % 3 - 1 : (int)mixed;
}

static int value(int number, int rank, size_t index) { return stored(number_of(number, rank, index)); }

static int sum_of(int number, int nranks, size_t index) {
  uint32_t sum = 0;
  for (int rank = 0; rank < nranks; rank++) sum += (uint32_t)number_of(number, rank, index);
  return stored((int)sum);
}

static size_t in_blocks(const struct call* call, int n) { return call->kind == 1 ? (size_t)n : 1; }
static size_t out_blocks(const struct call* call, int n) { return call->kind == 0 ? (size_t)n : 1; }

static void begin(struct call* call, int number, int rank, int n, size_t most, const gpu_stream* streams) {
  call->kind = (int)(next_random() % 4);
  call->in_place = (int)(next_random() % 2);
  call->root = (int)(next_random() % (uint64_t)n);
  call->count = 1 + next_random() % (most / sizeof(int));
  call->stream = streams[next_random() % STREAMS];
  size_t in = in_blocks(call, n) * call->count, out = out_blocks(call, n) * call->count;
  call->device = gpu_memory((in + out) * sizeof(int));
  call->host_in = gpu_pinned(in * sizeof(int));
  call->host_out = gpu_pinned(out * sizeof(int));
  int* start = call->device;
  call->in = start;
  call->out = start + in;
  if (call->in_place && call->kind == 0) call->in = start + (size_t)rank * call->count, call->out = start;
  if (call->in_place && call->kind == 1) call->out = start + (size_t)rank * call->count;
  if (call->in_place && call->kind > 1) call->out = start;
  for (size_t i = 0; i < in; i++) call->host_in[i] = value(number, rank, i);
  gpu_to(call->in, call->host_in, in * sizeof(int), call->stream);
}

static void issue(const struct call* call, ncclComm_t comm) {
  cudaStream_t stream = (cudaStream_t)call->stream;
  switch (call->kind) {
    case 0: OK(ncclAllGather(call->in, call->out, call->count, type(), comm, stream)); break;
    case 1: OK(ncclReduceScatter(call->in, call->out, call->count, type(), ncclSum, comm, stream)); break;
    case 2: OK(ncclAllReduce(call->in, call->out, call->count, type(), ncclSum, comm, stream)); break;
    default: OK(ncclBroadcast(call->in, call->out, call->count, type(), call->root, comm, stream));
  }
}

static int wanted(const struct call* call, int number, int rank, int n, size_t index) {
  switch (call->kind) {
    case 0: return value(number, (int)(index / call->count), index % call->count);
    case 1: return sum_of(number, n, (size_t)rank * call->count + index);
    case 2: return sum_of(number, n, index);
    default: return value(number, call->root, index);
  }
}

static void check(struct call* call, int number, int rank, int n) {
  size_t out = out_blocks(call, n) * call->count;
  gpu_wait(call->stream);
  for (size_t i = 0; i < out; i++) {
    int right = wanted(call, number, rank, n, i);
    if (call->host_out[i] == right) continue;
    fprintf(stderr, "rank %d call %d kind %d count %zu in place %d: element %zu is %d, not %d\n", rank, number, call->kind,
            call->count, call->in_place, i, call->host_out[i], right);
    exit(3);
  }
  gpu_free(call->device);
}

static int calls;
static size_t most = 40000;
static uint64_t seed;

static void rank_main(int rank, const struct grid* grid) {
  int n = grid->nranks;
  ncclComm_t comm;
  gpu_stream streams[STREAMS];
  gpu_use(rank % 8);
  for (int i = 0; i < STREAMS; i++) streams[i] = gpu_new_stream();
  ncclUniqueId id = shared_id(0, rank);
  OK(ncclCommInitRank(&comm, n, id, rank));
  random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (int first = 0; first < calls; first += WAVE) {
    struct call wave[WAVE];
    int grouped = (int)(next_random() % 3) == 0;
    for (int i = 0; i < WAVE; i++) begin(&wave[i], first + i, rank, n, most, streams);
    if (grouped) OK(ncclGroupStart());
    for (int i = 0; i < WAVE; i++) issue(&wave[i], comm);
    if (grouped) OK(ncclGroupEnd());
    for (int i = 0; i < WAVE; i++)
      gpu_from(wave[i].host_out, wave[i].out, out_blocks(&wave[i], n) * wave[i].count * sizeof(int), wave[i].stream);
    for (int i = 0; i < WAVE; i++) check(&wave[i], first + i, rank, n);
  }
  ncclResult_t state;
  OK(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclSuccess);
  OK(ncclCommDestroy(comm));
}

/* One rank of a job that an MPI launcher started; the ranks share a file. */
static int launched(const struct grid* grid, const char* path) {
  const char* ranks[] = {getenv("OMPI_COMM_WORLD_RANK"), getenv("PMI_RANK")};
  char node[32];
  int rank = atoi(ranks[0] ? ranks[0] : ranks[1]), file = open(path, O_RDWR | O_CREAT, 0600);
  CHECK(file >= 0 && ftruncate(file, sizeof(*shared)) == 0);
  map_shared(file);
  alarm(120);
  snprintf(node, sizeof(node), "node%d", grid->node[rank]);
  setenv("NCCL_HOSTID", node, 1);
  rank_main(rank, grid);
  if (rank == 0) printf("%d calls are right\n", calls);
  return 0;
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  struct grid grid = parse_grid(argv[1]);
  floats = getenv("RAILS_FLOATS") != NULL;
  seed = strtoull(argv[2], NULL, 10);
  calls = atoi(argv[3]);
  if (argc > 4) most = strtoull(argv[4], NULL, 10);
  if (argc > 5) return launched(&grid, argv[5]);
  int failed = run_ranks(&grid, rank_main, 120, NULL);
  if (failed == 0) printf("%d calls on %s are right\n", calls, argv[1]);
  return failed != 0;
}
