/* Calls on several communicators of the same ranks, each with a stream of its own, that the ranks make in different orders: on each
 * communicator the same order on all ranks, between communicators each rank's own, and odd ranks begin at the other end. Nothing
 * waits on the host between the copies in, the collectives and the copies out. Every result is checked.
 *
 * opposite GRID FIRST END: a program of calls for each seed from FIRST up to END; each rank is a process with a device. */
#include "gpu.h"

enum { COMMS = 3, CALLS = 3, ALL = COMMS * CALLS, MOST = 40000, POISON = -1 };
enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, KINDS };

/* A communicator; the ranks of the second one are those of the others backwards. */
struct side {
  ncclComm_t comm;
  gpu_stream stream;
  int rank;
};

/* A call with its memory, which stays from seed to seed. */
struct call {
  enum kind kind;
  int number, root;
  size_t count;
  int *in, *out, *host_in, *host_out;
};

static int n;
static uint64_t first_seed, end_seed;

static uint64_t draw(uint64_t* state, uint64_t below) {
  *state += 0x9e3779b97f4a7c15ull;
  uint64_t mixed = (*state ^ *state >> 30) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
  return (mixed ^ mixed >> 31) % below;
}

static size_t in_of(const struct call* call) { return call->count * (call->kind == REDUCE_SCATTER ? (size_t)n : 1); }
static size_t out_of(const struct call* call) { return call->count * (call->kind == ALL_GATHER ? (size_t)n : 1); }

/* What all ranks know of a seed's calls. */
static void draw_calls(uint64_t seed, struct call* calls) {
  static const size_t counts[] = {1, 3, 1000, MOST};
  uint64_t state = seed << 20;
  for (int i = 0; i < ALL; i++) {
    calls[i].kind = (enum kind)draw(&state, KINDS);
    calls[i].root = (int)draw(&state, (uint64_t)n);
    calls[i].count = counts[draw(&state, 4)];
    calls[i].number = (int)(seed * ALL) + i;
  }
}

static int wanted(const struct call* call, int rank, size_t index) {
  switch (call->kind) {
    case ALL_GATHER: return number(call->number, (int)(index / call->count), index % call->count);
    case REDUCE_SCATTER: return sum_of_numbers(call->number, n, (size_t)rank * call->count + index);
    case ALL_REDUCE: return sum_of_numbers(call->number, n, index);
    default: return number(call->number, call->root, index);
  }
}

/* Puts the input in, makes the call, and has the result copied out, all on the stream. */
static void issue(const struct call* call, const struct side* side) {
  cudaStream_t stream = (cudaStream_t)side->stream;
  for (size_t i = 0; i < in_of(call); i++) call->host_in[i] = number(call->number, side->rank, i);
  for (size_t i = 0; i < out_of(call); i++) call->host_out[i] = POISON;
  gpu_to(call->in, call->host_in, in_of(call) * sizeof(int), side->stream);
  switch (call->kind) {
    case ALL_GATHER: OK(ncclAllGather(call->in, call->out, call->count, ncclInt, side->comm, stream)); break;
    case REDUCE_SCATTER: OK(ncclReduceScatter(call->in, call->out, call->count, ncclInt, ncclSum, side->comm, stream)); break;
    case ALL_REDUCE: OK(ncclAllReduce(call->in, call->out, call->count, ncclInt, ncclSum, side->comm, stream)); break;
    default: OK(ncclBroadcast(call->in, call->out, call->count, ncclInt, call->root, side->comm, stream));
  }
  gpu_from(call->host_out, call->out, out_of(call) * sizeof(int), side->stream);
}

static void check(const struct call* call, const struct side* side, uint64_t seed) {
  for (size_t i = 0; i < out_of(call); i++) {
    int right = wanted(call, side->rank, i);
    if (call->host_out[i] == right) continue;
    fprintf(stderr, "seed %llu rank %d call %d kind %d count %zu: element %zu is %d, not %d\n", (unsigned long long)seed,
            side->rank, call->number, (int)call->kind, call->count, i, call->host_out[i], right);
    exit(3);
  }
}

/* One seed. */
static void one_program(int rank, uint64_t seed, struct call* calls, const struct side* sides) {
  int next[COMMS] = {0}, first = rank % 2 ? COMMS - 1 : 0;
  uint64_t own = (seed << 20) + 1000 + (uint64_t)rank;
  draw_calls(seed, calls);
  softgpuSeed((unsigned)seed);
  for (int made = 0; made < ALL; made++) {
    int which = made == 0 ? first : (int)draw(&own, COMMS);
    while (next[which] == CALLS) which = (which + 1) % COMMS;
    issue(&calls[which * CALLS + next[which]++], &sides[which]);
  }
  /* Ranks wait the other way round, too. */
  for (int i = 0; i < COMMS; i++) {
    int which = rank % 2 ? i : COMMS - 1 - i;
    gpu_wait(sides[which].stream);
    for (int call = 0; call < CALLS; call++) check(&calls[which * CALLS + call], &sides[which], seed);
  }
}

static void rank_main(int rank, const struct grid* grid) {
  static struct call calls[ALL];
  struct side sides[COMMS];
  n = grid->nranks;
  gpu_use(rank % 8);
  for (int i = 0; i < COMMS; i++) {
    sides[i].rank = i == 1 ? n - 1 - rank : rank;
    sides[i].stream = gpu_new_stream();
    OK(ncclCommInitRank(&sides[i].comm, n, shared_id(i, rank), sides[i].rank));
  }
  size_t bytes = (size_t)n * MOST * sizeof(int);
  for (int i = 0; i < ALL; i++) {
    calls[i].in = gpu_memory(bytes), calls[i].out = gpu_memory(bytes);
    calls[i].host_in = gpu_pinned(bytes), calls[i].host_out = gpu_pinned(bytes);
  }
  for (uint64_t seed = first_seed; seed < end_seed; seed++) one_program(rank, seed, calls, sides);
  for (int i = 0; i < COMMS; i++) {
    int which = rank % 2 ? COMMS - 1 - i : i;
    ncclResult_t state;
    OK(ncclCommGetAsyncError(sides[which].comm, &state));
    CHECK(state == ncclSuccess);
  }
  for (int i = 0; i < COMMS; i++) OK(ncclCommDestroy(sides[i].comm));
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  struct grid grid = parse_grid(argv[1]);
  first_seed = strtoull(argv[2], NULL, 10), end_seed = strtoull(argv[3], NULL, 10);
  int failed = run_ranks(&grid, rank_main, 60 + (unsigned)(end_seed - first_seed), NULL);
  if (failed == 0) printf("%d calls on %s are right\n", (int)(end_seed - first_seed) * ALL, argv[1]);
  return failed != 0;
}
