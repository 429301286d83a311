/* Random calls from a seed, on several communicators, in groups, by several threads; every result is compared with one
 * that is computed here, and a digest of all results is printed, so that runs over different libraries can be compared.
 *
 * differential GRID SEED STEPS THREADS */
#include "ranks.h"
#include "values.h"
#include <pthread.h>

enum func { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, BCAST, ALL_GATHER, SHIFT, ALL_TO_ALL, GATHER, SCATTER, FUNCS };
enum { WORLD, PARITY, HALVES, BACKWARDS, SHRUNK, COMMS };
#define GUARD 64
#define MOST 6

/* One call, as all ranks draw it. */
struct draw {
  enum func func;
  ncclDataType_t type;
  int comm, op, root, in_place, shift, nested, on_device, configured;
  size_t count;
  uint64_t seed;
};

/* The call on this rank: its memory, and what must be in it at the end. */
struct work {
  struct draw draw;
  ncclComm_t comm;
  int n, me;
  char *block, *send, *recv, *expected, *sent;
  size_t input, output; /* bytes */
  ncclRedOp_t made;
  char scalar[8];
};

struct lane {
  int number, rank, version;
  const struct grid* grid;
  uint64_t random; /* the same on all ranks */
  ncclComm_t comms[COMMS];
  int epoch;
  uint64_t digest, calls;
};

static uint64_t base_seed;
static int steps, threads;

static uint64_t draw(struct lane* lane, uint64_t below) {
  lane->random += 0x9e3779b97f4a7c15ull;
  return mix(lane->random) % below;
}

static struct draw draw_call(struct lane* lane) {
  static const size_t counts[] = {0, 1, 2, 3, 5, 8, 17, 64, 100, 257, 1000, 4096, 5001, 20000};
  struct draw call;
  int has_newer = lane->version >= 22803;
  call.func = (enum func)draw(lane, has_newer ? FUNCS : ALL_TO_ALL);
  call.comm = (int)draw(lane, COMMS);
  call.type = (ncclDataType_t)draw(lane, lane->version >= 22403 ? 12 : 10);
  call.op = (int)draw(lane, 6);
  call.count = counts[draw(lane, sizeof(counts) / sizeof(*counts))];
  call.in_place = (int)draw(lane, 2);
  call.root = (int)draw(lane, 1 << 20);
  call.shift = (int)draw(lane, 1 << 20);
  call.nested = (int)draw(lane, 4) == 0;
  call.on_device = (int)draw(lane, 2);
  call.configured = (int)draw(lane, 4) == 0 && lane->version >= 23102;
  call.seed = mix(lane->random);
  return call;
}

static int reduces(enum func func) { return func <= REDUCE_SCATTER; }

/* Bytes in and out of this rank. */
static void measure(struct work* work) {
  size_t one = work->draw.count * size_of(work->draw.type), all = one * (size_t)work->n;
  int is_root = work->me == work->draw.root;
  work->input = work->output = one;
  switch (work->draw.func) {
    case REDUCE: work->output = is_root ? one : 0; break;
    case REDUCE_SCATTER: work->input = all; break;
    case BROADCAST: case BCAST: work->input = is_root ? one : 0; break;
    case ALL_GATHER: work->output = all; break;
    case ALL_TO_ALL: work->input = work->output = all; break;
    case GATHER: work->output = is_root ? all : 0; break;
    case SCATTER: work->input = is_root ? all : 0; break;
    default: break;
  }
}

/* Where the input lies: before the output, or in place as each function has it. */
static void place(struct work* work) {
  size_t one = work->draw.count * size_of(work->draw.type), mine = one * (size_t)work->me;
  int is_root = work->me == work->draw.root;
  work->block = malloc(3 * GUARD + work->input + work->output);
  CHECK(work->block);
  memset(work->block, 0xa7, 3 * GUARD + work->input + work->output);
  work->send = work->block + GUARD;
  work->recv = work->send + work->input + GUARD;
  if (work->draw.func == BCAST) work->send = work->recv;
  if (!work->draw.in_place) return;
  switch (work->draw.func) {
    case ALL_REDUCE: case BROADCAST: case REDUCE:
      if (work->draw.func != REDUCE || is_root) work->send = work->recv;
      break;
    case REDUCE_SCATTER: work->recv = work->send + mine; break;
    case ALL_GATHER: work->send = work->recv + mine; break;
    case GATHER: if (is_root) work->send = work->recv + mine; break;
    case SCATTER: if (is_root) work->recv = work->send + mine; break;
    default: work->draw.in_place = 0;
  }
}

static void expect_reduction(struct work* work) {
  const struct draw* call = &work->draw;
  size_t size = size_of(call->type), first = call->func == REDUCE_SCATTER ? (size_t)work->me * call->count : 0;
  for (size_t i = 0; i < work->input / size; i++)
    put(work->send, i, call->type, element(call->seed, work->me, i, call->type, call->op));
  for (size_t i = 0; i < work->output / size; i++)
    put(work->expected, i, call->type, reduced(call->seed, work->n, first + i, call->type, call->op));
}

static void expect_movement(struct work* work) {
  const struct draw* call = &work->draw;
  size_t one = call->count * size_of(call->type), mine = one * (size_t)work->me;
  int from_all = call->func == ALL_GATHER || call->func == ALL_TO_ALL || call->func == GATHER;
  fill_bytes(work->send, work->input, call->seed, work->me, 0);
  if (from_all) {
    for (size_t at = 0; at < work->output; at += one)
      fill_bytes(work->expected + at, one, call->seed, (int)(at / one), call->func == ALL_TO_ALL ? mine : 0);
  } else {
    int from = call->func == SHIFT ? (work->me + work->n - call->shift) % work->n : call->root;
    fill_bytes(work->expected, work->output, call->seed, from, call->func == SCATTER ? mine : 0);
  }
}

/* Makes the call ready on this rank; false when it is not a member of the communicator. */
static int prepare(struct lane* lane, const struct draw* drawn, struct work* work) {
  memset(work, 0, sizeof(*work));
  work->draw = *drawn;
  work->comm = lane->comms[drawn->comm];
  if (!work->comm) return 0;
  OK(ncclCommCount(work->comm, &work->n));
  OK(ncclCommUserRank(work->comm, &work->me));
  struct draw* call = &work->draw;
  call->root %= work->n;
  call->shift %= work->n;
  call->op = exact_op(call->op, call->type, work->n);
  measure(work);
  place(work);
  work->expected = malloc(work->output + 1);
  work->sent = malloc(work->input + 1);
  CHECK(work->expected && work->sent);
  if (reduces(call->func)) expect_reduction(work);
  else expect_movement(work);
  memcpy(work->sent, work->send, work->input);
  if (reduces(call->func) && call->op == PRE_MUL_SUM) {
    put(work->scalar, 0, call->type, factor(work->me, call->type));
    ncclScalarResidence_t residence = call->on_device ? ncclScalarDevice : ncclScalarHostImmediate;
    OK(ncclRedOpCreatePreMulSum(&work->made, work->scalar, call->type, residence, work->comm));
  }
  return 1;
}

static void issue_messages(struct work* work) {
  const struct draw* call = &work->draw;
  OK(ncclGroupStart());
  OK(ncclSend(work->send, call->count, call->type, (work->me + call->shift) % work->n, work->comm, NULL));
  OK(ncclRecv(work->recv, call->count, call->type, (work->me + work->n - call->shift) % work->n, work->comm, NULL));
  OK(ncclGroupEnd());
}

static int issue_configured(struct work* work) {
  const struct draw* call = &work->draw;
  ncclRedOp_t op = call->op == PRE_MUL_SUM ? work->made : (ncclRedOp_t)call->op;
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.userProfilerTag = 7;
  switch (call->func) {
    case ALL_REDUCE:
      OK(ncclAllReduceConfig(work->send, work->recv, call->count, call->type, op, work->comm, NULL, &config));
      return 1;
    case ALL_GATHER:
      OK(ncclAllGatherConfig(work->send, work->recv, call->count, call->type, work->comm, NULL, NULL));
      return 1;
    case REDUCE_SCATTER:
      OK(ncclReduceScatterConfig(work->send, work->recv, call->count, call->type, op, work->comm, NULL, &config));
      return 1;
    default: return 0;
  }
}

static void issue(struct work* work) {
  const struct draw* call = &work->draw;
  const void* in = work->send;
  void* out = work->recv;
  size_t count = call->count;
  ncclDataType_t type = call->type;
  ncclRedOp_t op = call->op == PRE_MUL_SUM ? work->made : (ncclRedOp_t)call->op;
  ncclComm_t comm = work->comm;
  if (call->nested) OK(ncclGroupStart());
  int done = call->configured && issue_configured(work);
  if (!done) switch (call->func) {
    case ALL_REDUCE: OK(ncclAllReduce(in, out, count, type, op, comm, NULL)); break;
    case REDUCE: OK(ncclReduce(in, out, count, type, op, call->root, comm, NULL)); break;
    case REDUCE_SCATTER: OK(ncclReduceScatter(in, out, count, type, op, comm, NULL)); break;
    case BROADCAST: OK(ncclBroadcast(in, out, count, type, call->root, comm, NULL)); break;
    case BCAST: OK(ncclBcast(out, count, type, call->root, comm, NULL)); break;
    case ALL_GATHER: OK(ncclAllGather(in, out, count, type, comm, NULL)); break;
    case ALL_TO_ALL: OK(ncclAlltoAll(in, out, count, type, comm, NULL)); break;
    case GATHER: OK(ncclGather(in, out, count, type, call->root, comm, NULL)); break;
    case SCATTER: OK(ncclScatter(in, out, count, type, call->root, comm, NULL)); break;
    default: issue_messages(work);
  }
  if (call->nested) OK(ncclGroupEnd());
  /* The scalar on the device is read when the operation runs; the operation itself may end now. */
  if (reduces(call->func) && call->op == PRE_MUL_SUM) OK(ncclRedOpDestroy(work->made, comm));
}

/* Whether the bytes around a piece of the block are as they were. */
static int guarded(const char* from, const char* piece, size_t bytes) {
  for (const char* at = piece - GUARD; at < piece + bytes + GUARD; at++)
    if ((at < piece || at >= piece + bytes) && at >= from && *at != (char)0xa7) return 0;
  return 1;
}

static void verify(struct lane* lane, struct work* work) {
  const struct draw* call = &work->draw;
  int together = work->send < work->recv + work->output && work->recv < work->send + work->input;
  int right = memcmp(work->recv, work->expected, work->output) == 0;
  int kept = together || memcmp(work->send, work->sent, work->input) == 0;
  int inside = together || guarded(work->block, work->recv, work->output);
  if (!right || !kept || !inside) {
    fprintf(stderr, "rank %d lane %d: function %d, communicator %d (%d of %d), %zu of type %d, operation %d, root %d, in "
            "place %d: %s\n", lane->rank, lane->number, call->func, call->comm, work->me, work->n, call->count,
            call->type, call->op, call->root, call->in_place,
            !right ? "the result is wrong" : !kept ? "the input was changed" : "memory around the output was changed");
    _exit(1);
  }
  lane->digest = digest_of(lane->digest, work->recv, work->output);
  lane->calls++;
  free(work->block);
  free(work->expected);
  free(work->sent);
}

static void check_place(ncclComm_t comm, int rank, int size) {
  int got;
  OK(ncclCommUserRank(comm, &got));
  CHECK(got == rank);
  OK(ncclCommCount(comm, &got));
  CHECK(got == size);
}

static void make_splits(struct lane* lane) {
  int rank = lane->rank, n = lane->grid->nranks, epoch = lane->epoch++;
  for (int kind = PARITY; kind <= HALVES; kind++)
    if (lane->comms[kind]) OK(ncclCommDestroy(lane->comms[kind]));
  lane->comms[PARITY] = lane->comms[HALVES] = NULL;
  OK(ncclCommSplit(lane->comms[WORLD], rank % 2, epoch % 2 ? -rank : rank, &lane->comms[PARITY], NULL));
  int left_out = epoch % 2 && rank == n - 1;
  int color = left_out ? NCCL_SPLIT_NOCOLOR : rank / ((n + 1) / 2);
  OK(ncclCommSplit(lane->comms[WORLD], color, 0, &lane->comms[HALVES], NULL));
  CHECK(left_out == (lane->comms[HALVES] == NULL));
  int size = (n + 1 - rank % 2) / 2, place = rank / 2;
  check_place(lane->comms[PARITY], epoch % 2 ? size - 1 - place : place, size);
  int half = (n + 1) / 2, others = n - half - epoch % 2;
  if (!left_out) check_place(lane->comms[HALVES], rank % half, color == 0 ? half : others);
}

static void make_comms(struct lane* lane) {
  int rank = lane->rank, n = lane->grid->nranks, first = 2 * lane->number;
  ncclUniqueId id = shared_id(first, rank), other = shared_id(first + 1, rank);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  char name[16];
  snprintf(name, sizeof(name), "world%d", lane->number);
  config.commName = name;
  OK(ncclCommInitRankConfig(&lane->comms[WORLD], n, id, rank, &config));
  memset(name, 'x', sizeof(name)); /* NCCL has its own copy. */
  OK(ncclCommInitRank(&lane->comms[BACKWARDS], n, other, n - 1 - rank));
  make_splits(lane);
  int last = n - 1;
  if (lane->version >= 22703 && n > 2 && rank != last)
    OK(ncclCommShrink(lane->comms[WORLD], &last, 1, &lane->comms[SHRUNK], NULL, NCCL_SHRINK_DEFAULT));
}

/* One call, or a group of several. */
static void step(struct lane* lane) {
  struct draw draws[MOST];
  struct work works[MOST];
  int in_group = draw(lane, 3) == 0, count = in_group ? 1 + (int)draw(lane, MOST) : 1, mine = 0;
  for (int i = 0; i < count; i++) draws[i] = draw_call(lane);
  for (int i = 0; i < count; i++) mine += prepare(lane, &draws[i], &works[mine]);
  if (in_group) OK(ncclGroupStart());
  for (int i = 0; i < mine; i++) issue(&works[i]);
  if (in_group) OK(ncclGroupEnd());
  for (int i = 0; i < mine; i++) verify(lane, &works[i]);
}

static void* lane_main(void* argument) {
  struct lane* lane = argument;
  make_comms(lane);
  for (int i = 1; i <= steps; i++) {
    step(lane);
    if (i % 25 == 0) make_splits(lane);
  }
  ncclResult_t state;
  for (int kind = 0; kind < COMMS; kind++) {
    if (!lane->comms[kind]) continue;
    OK(ncclCommGetAsyncError(lane->comms[kind], &state));
    CHECK(state == ncclSuccess);
    if (kind == BACKWARDS) OK(ncclCommFinalize(lane->comms[kind]));
    OK(ncclCommDestroy(lane->comms[kind]));
  }
  return NULL;
}

static void rank_main(int rank, const struct grid* grid) {
  struct lane lanes[8] = {{0}};
  pthread_t handles[8];
  int version = version_of_nccl();
  for (int i = 0; i < threads; i++) {
    lanes[i] = (struct lane){.number = i, .rank = rank, .version = version, .grid = grid,
                             .random = base_seed * 1000 + (uint64_t)i, .digest = 0xcbf29ce484222325ull};
    CHECK(pthread_create(&handles[i], NULL, lane_main, &lanes[i]) == 0);
  }
  for (int i = 0; i < threads; i++) {
    pthread_join(handles[i], NULL);
    shared->digest[rank] = digest_of(shared->digest[rank], &lanes[i].digest, 8);
    shared->count[rank] += lanes[i].calls;
  }
}

int main(int argc, char** argv) {
  if (argc != 5) {
    fprintf(stderr, "differential GRID SEED STEPS THREADS\n");
    return 2;
  }
  struct grid grid = parse_grid(argv[1]);
  base_seed = (uint64_t)atoll(argv[2]);
  steps = atoi(argv[3]);
  threads = atoi(argv[4]);
  if (run_ranks(&grid, rank_main, 240, NULL) != 0) return 1;
  for (int rank = 0; rank < grid.nranks; rank++)
    printf("rank %d: %llu calls, digest %016llx\n", rank, (unsigned long long)shared->count[rank],
           (unsigned long long)shared->digest[rank]);
  return 0;
}
