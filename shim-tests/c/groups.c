/* Groups of collectives of random kinds, sizes, types, roots and places, which follow from seeds; each rank checks every result, and that
   nothing beside the results is touched.
   usage: groups threads|processes|carriers|windows|windows-threads RANKS NODES FROM TO | launched|windows-launched FROM TO |
          differ CASE | chain | rooted
   windows: the calls are made in windows, by themselves or in groups as each rank likes. */
#include "seeded.h"

typedef enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, KINDS } Kind;
enum { MOST_CALLS = 64, GAP = 0x5a };

static int from_seed, to_seed;
/* What calls say of carriers; without any they are the plain ones. */
static const char *names[] = {NULL, "@tcp", "@mpi", "auto@mpi"};
static int nnames = 1;
static int in_windows;

/* One rank's call. */
typedef struct {
  Kind kind;
  int root, type, in_place, op;
  const char *name;
  size_t count;
  char *send, *recv, *memory;
  size_t memory_bytes; /* Where the result lies and a gap behind it. */
} Call;

static int sent_blocks(const Call *call, int rank) {
  switch (call->kind) {
    case REDUCE_SCATTER: case ALL_TO_ALL: return nranks;
    case BROADCAST: return rank == call->root;
    case SCATTER: return rank == call->root ? nranks : 0;
    default: return 1;
  }
}

static int received_blocks(const Call *call, int rank) {
  switch (call->kind) {
    case ALL_GATHER: case ALL_TO_ALL: return nranks;
    case REDUCE: return rank == call->root;
    case GATHER: return rank == call->root ? nranks : 0;
    default: return 1;
  }
}

/* Element i of block `block` of what rank `from` sends in call number `number`. */
static int value(uint64_t seed, int number, int from, int block, size_t i) {
  return (int)((seed * 7 + (uint64_t)number * 11 + (uint64_t)from * 5 + (uint64_t)block * 3 + i) % 13);
}

static const ncclRedOp_t ops[] = {ncclSum, ncclMax, ncclMin};

static int folded(const Call *call, uint64_t seed, int number, int block, size_t i) {
  int result = value(seed, number, 0, block, i);
  for (int rank = 1; rank < nranks; rank++) {
    int other = value(seed, number, rank, block, i);
    result = call->op == 0 ? result + other : (other > result) == (call->op == 1) ? other : result;
  }
  return result;
}

static int wanted(const Call *call, uint64_t seed, int number, int rank, int block, size_t i) {
  switch (call->kind) {
    case ALL_REDUCE: case REDUCE: return folded(call, seed, number, 0, i);
    case REDUCE_SCATTER: return folded(call, seed, number, rank, i);
    case BROADCAST: return value(seed, number, call->root, 0, i);
    case SCATTER: return value(seed, number, call->root, rank, i);
    case ALL_TO_ALL: return value(seed, number, block, rank, i);
    default: return value(seed, number, block, 0, i);
  }
}

/* The call with the carrier that it names. */
static ncclResult_t make_named(const Call *call, ncclComm_t comm, strataStream_t stream) {
  ncclDataType_t type = types[call->type];
  ncclRedOp_t op = ops[call->op];
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.algSelection = call->name;
  switch (call->kind) {
    case ALL_REDUCE: return ncclAllReduceConfig(call->send, call->recv, call->count, type, op, comm, stream, &config);
    case BROADCAST: return ncclBroadcastConfig(call->send, call->recv, call->count, type, call->root, comm, stream, &config);
    case REDUCE: return ncclReduceConfig(call->send, call->recv, call->count, type, op, call->root, comm, stream, &config);
    case ALL_GATHER: return ncclAllGatherConfig(call->send, call->recv, call->count, type, comm, stream, &config);
    case REDUCE_SCATTER: return ncclReduceScatterConfig(call->send, call->recv, call->count, type, op, comm, stream, &config);
    case ALL_TO_ALL: return ncclAlltoAllConfig(call->send, call->recv, call->count, type, comm, stream, &config);
    case GATHER: return ncclGatherConfig(call->send, call->recv, call->count, type, call->root, comm, stream, &config);
    default: return ncclScatterConfig(call->send, call->recv, call->count, type, call->root, comm, stream, &config);
  }
}

static ncclResult_t make(const Call *call, ncclComm_t comm, strataStream_t stream) {
  ncclDataType_t type = types[call->type];
  ncclRedOp_t op = ops[call->op];
  if (call->name) return make_named(call, comm, stream);
  switch (call->kind) {
    case ALL_REDUCE: return ncclAllReduce(call->send, call->recv, call->count, type, op, comm, stream);
    case BROADCAST: return ncclBroadcast(call->send, call->recv, call->count, type, call->root, comm, stream);
    case REDUCE: return ncclReduce(call->send, call->recv, call->count, type, op, call->root, comm, stream);
    case ALL_GATHER: return ncclAllGather(call->send, call->recv, call->count, type, comm, stream);
    case REDUCE_SCATTER: return ncclReduceScatter(call->send, call->recv, call->count, type, op, comm, stream);
    case ALL_TO_ALL: return ncclAlltoAll(call->send, call->recv, call->count, type, comm, stream);
    case GATHER: return ncclGather(call->send, call->recv, call->count, type, call->root, comm, stream);
    default: return ncclScatter(call->send, call->recv, call->count, type, call->root, comm, stream);
  }
}

/* Buffers of a call, filled: apart from all others', or one behind another in `pool`; in place as each rank likes. */
static void place(Call *call, uint64_t seed, int number, int rank, Random *mine, char **pool) {
  size_t size = sizes[call->type], block = call->count * size;
  int sent = sent_blocks(call, rank), received = received_blocks(call, rank);
  call->in_place = call->kind != ALL_TO_ALL && sent && received && below(mine, 2);
  int larger = sent > received ? sent : received;
  size_t gap = below(mine, 3) ? 0 : 1 + below(mine, 70);
  size_t room = (call->in_place ? larger : sent + received) * block + gap;
  char *at = *pool;
  *pool += room;
  call->memory = at, call->memory_bytes = room;
  memset(at, GAP, room);
  if (call->in_place) {
    call->send = sent >= received ? at : at + (call->kind == ALL_GATHER || call->kind == GATHER ? rank * block : 0);
    call->recv = sent <= received ? at : at + (size_t)rank * block;
  } else {
    call->recv = received ? at : (char *)16; /* Nobody reads it. */
    call->send = sent ? at + received * block : NULL;
  }
  for (int b = 0; b < sent; b++)
    for (size_t i = 0; i < call->count; i++)
      put(call->type, call->send + b * block + i * size, value(seed, number, rank, b, i));
}

static void check(const Call *call, uint64_t seed, int number, int rank) {
  size_t size = sizes[call->type], block = call->count * size;
  int sent = sent_blocks(call, rank), received = received_blocks(call, rank);
  char *expected = malloc(call->memory_bytes + 1);
  memset(expected, GAP, call->memory_bytes);
  /* What was sent is still there, but where the result went over it. */
  for (int b = 0; b < sent; b++)
    for (size_t i = 0; i < call->count; i++)
      put(call->type, expected + (call->send - call->memory) + b * block + i * size, value(seed, number, rank, b, i));
  for (int b = 0; b < received; b++)
    for (size_t i = 0; i < call->count; i++)
      put(call->type, expected + (call->recv - call->memory) + b * block + i * size,
          wanted(call, seed, number, rank, b, i));
  if (memcmp(expected, call->memory, call->memory_bytes)) {
    size_t at = 0;
    while (expected[at] == call->memory[at]) at++;
    fprintf(stderr, "seed %lu, call %d (kind %d, %zu elements of type %d, root %d), rank %d: byte %zu of %zu\n",
            (unsigned long)seed, number, call->kind, call->count, call->type, call->root, rank, at, call->memory_bytes);
    exit(1);
  }
  free(expected);
}

/* Makes the calls in a window, whose bounds follow from the seed; in groups, and with pauses, as each rank likes. */
static void window(ncclComm_t comm, strataStream_t stream, uint64_t seed, Call *calls, int ncalls, Random *mine) {
  Random random = {seed * 5 + 1};
  size_t bytes = below(&random, 2) ? 0 : below(&random, 200000);
  unsigned us = below(&random, 2) ? 0 : (unsigned)below(&random, 500);
  OK(strataWindowBegin(comm, bytes, us));
  for (int i = 0; i < ncalls;) {
    int together = below(mine, 2) ? 1 + (int)below(mine, 5) : 0;
    if (together) OK(ncclGroupStart());
    for (int end = i + (together ? together : 1); i < end && i < ncalls; i++) OK(make(&calls[i], comm, stream));
    if (together) OK(ncclGroupEnd());
    if (below(mine, 8) == 0) usleep((useconds_t)below(mine, 400));
  }
  OK(strataWindowEnd(comm));
}

/* The group of these calls on this rank. Whether it is on a stream is each rank's own choice. */
static void group(ncclComm_t comm, strataStream_t own, int rank, uint64_t seed, Call *calls, int ncalls, char *memory,
                  size_t total, Random *mine, int messages) {
  char *pool = memory;
  for (int i = 0; i < ncalls; i++) place(&calls[i], seed, i, rank, mine, &pool);
  CHECK(pool <= memory + total);
  int on_stream = (int)below(mine, 2);
  strataStream_t stream = on_stream ? own : NULL;
  int sent = rank, got = -1, before = (rank + nranks - 1) % nranks;
  if (in_windows) window(comm, stream, seed, calls, ncalls, mine), messages = 0;
  else OK(ncclGroupStart());
  for (int i = 0; !in_windows && i < ncalls; i++) {
    if (messages && i == ncalls / 2) {
      OK(ncclSend(&sent, 1, ncclInt, (rank + 1) % nranks, comm, stream));
      OK(ncclRecv(&got, 1, ncclInt, before, comm, stream));
    }
    OK(make(&calls[i], comm, stream));
  }
  if (!in_windows) OK(ncclGroupEnd());
  if (on_stream) {
    /* What is asked for of one call is final with that call's group. */
    int i = (int)below(mine, ncalls);
    if (received_blocks(&calls[i], rank) && calls[i].count) {
      OK(strataStreamWaitRange(NULL, calls[i].recv, sizes[calls[i].type]));
      char first[8];
      put(calls[i].type, first, wanted(&calls[i], seed, i, rank, 0, 0));
      CHECK(!memcmp(first, calls[i].recv, sizes[calls[i].type]));
    }
    OK(strataStreamSynchronize(own));
  }
  if (messages) CHECK(got == before);
  for (int i = 0; i < ncalls; i++) check(&calls[i], seed, i, rank);
}

/* Rank `rank`'s part of the group with this seed. */
static void one(ncclComm_t comm, strataStream_t own, int rank, uint64_t seed) {
  Random random = {seed}, mine = {seed * 31 + (uint64_t)rank};
  static const size_t most_counts[] = {1, 40, 3000, 60000};
  int ncalls = 2 + (int)below(&random, below(&random, 3) ? 12 : MOST_CALLS - 2), kinds = 1 + (int)below(&random, 3);
  Kind chosen[3] = {(Kind)below(&random, KINDS), (Kind)below(&random, KINDS), (Kind)below(&random, KINDS)};
  size_t most = most_counts[below(&random, 4)];
  int equal = (int)below(&random, 3) == 0, one_type = (int)below(&random, 2), roots = (int)below(&random, 3);
  Call calls[MOST_CALLS];
  size_t total = 0;
  for (int i = 0; i < ncalls; i++) {
    Call *call = &calls[i];
    *call = (Call){.kind = chosen[below(&random, kinds)], .op = (int)below(&random, 3) % (1 + (int)below(&random, 3))};
    call->type = one_type && i ? calls[0].type : (int)below(&random, TYPES);
    call->name = nnames > 1 ? names[below(&random, nnames)] : NULL;
    call->count = equal ? most : below(&random, most + 1);
    call->root = roots == 0 ? 0 : roots == 1 ? i % nranks : (int)below(&random, nranks);
    total += call->count * sizes[call->type] * 2 * nranks + 80;
  }
  char *memory = malloc(total);
  /* Equal groups go on by what their calls have left behind, and so does a call that was made by itself. */
  int times = 1 + (int)below(&random, 3), alone = (int)below(&random, 3), messages = (int)below(&random, 2);
  for (int i = 0; i < alone; i++) {
    char *pool = memory;
    place(&calls[0], seed, 0, rank, &mine, &pool);
    OK(make(&calls[0], comm, NULL));
    check(&calls[0], seed, 0, rank);
  }
  for (int i = 0; i < times; i++) group(comm, own, rank, seed, calls, ncalls, memory, total, &mine, messages);
  free(memory);
}

static void *rank_main(void *argument) {
  int rank = (int)(intptr_t)argument;
  ncclComm_t comm;
  strataStream_t stream;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  OK(strataStreamCreate(&stream));
  for (int seed = from_seed; seed < to_seed; seed++) one(comm, stream, rank, (uint64_t)seed);
  OK(ncclCommDestroy(comm));
  OK(strataStreamDestroy(stream));
  return NULL;
}

/* Calls of one group that depend on each other run as they are recorded. */
static void *chain(void *argument) {
  int rank = (int)(intptr_t)argument;
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  uint64_t values[4] = {(uint64_t)rank + 1, 0, 0, 0}, again = 1, same[2] = {3, 0}, halves[3] = {1, 2, 3};
  OK(ncclGroupStart());
  for (int i = 0; i < 3; i++) OK(ncclAllReduce(&values[i], &values[i + 1], 1, ncclUint64, ncclSum, comm, NULL));
  for (int i = 0; i < 5; i++) OK(ncclAllReduce(&again, &again, 1, ncclUint64, ncclSum, comm, NULL));
  for (int i = 0; i < 5; i++) OK(ncclAllReduce(&same[0], &same[1], 1, ncclUint64, ncclSum, comm, NULL));
  OK(ncclAllReduce(halves, halves, 2, ncclUint64, ncclSum, comm, NULL));
  OK(ncclAllReduce(halves + 1, halves + 1, 2, ncclUint64, ncclSum, comm, NULL));
  OK(ncclGroupEnd());
  uint64_t n = (uint64_t)nranks, sum = n * (n + 1) / 2;
  CHECK(values[1] == sum && values[2] == sum * n && values[3] == sum * n * n && again == n * n * n * n * n);
  CHECK(same[1] == 3 * n && halves[0] == n && halves[1] == 2 * n * n && halves[2] == 3 * n);
  OK(ncclCommDestroy(comm));
  return NULL;
}

/* The same where the root alone sees that they do, and where blocks with gaps between them do not. */
static void *rooted(void *argument) {
  int rank = (int)(intptr_t)argument;
  ncclComm_t comm;
  uint64_t n = (uint64_t)nranks, sum = n * (n + 1) / 2, own[2] = {(uint64_t)rank + 1, 10 * ((uint64_t)rank + 1)};
  uint64_t result[2] = {0, 0}, gathered[2][MOST_RANKS] = {{0}}, part[2] = {0, 0}, gaps[2 * MOST_RANKS] = {0}, behind = 0;
  size_t counts[MOST_RANKS], places[MOST_RANKS];
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  OK(ncclGroupStart());
  for (int i = 0; i < 2; i++) {
    OK(ncclReduce(&own[i], &result[i], 1, ncclUint64, ncclSum, 0, comm, NULL));
    OK(ncclBroadcast(&result[i], &result[i], 1, ncclUint64, 0, comm, NULL));
  }
  OK(ncclGroupEnd());
  CHECK(result[0] == sum && result[1] == 10 * sum);
  OK(ncclGroupStart());
  for (int i = 0; i < 2; i++) {
    OK(ncclGather(&own[i], gathered[i], 1, ncclUint64, 0, comm, NULL));
    OK(ncclScatter(gathered[i], &part[i], 1, ncclUint64, 0, comm, NULL));
  }
  OK(ncclGroupEnd());
  CHECK(part[0] == own[0] && part[1] == own[1]);
  /* Only rank 0 has gaps, in which other results lie. */
  for (int i = 0; i < nranks; i++) counts[i] = 1, places[i] = rank == 0 ? 2 * (size_t)i : (size_t)i;
  uint64_t *between = rank == 0 ? &gaps[1] : &behind;
  OK(ncclGroupStart());
  OK(strataAllGatherV(own, gaps, counts, places, ncclUint64, comm, NULL));
  OK(ncclAllReduce(&own[1], between, 1, ncclUint64, ncclSum, comm, NULL));
  OK(ncclAllReduce(own, &result[0], 1, ncclUint64, ncclSum, comm, NULL));
  OK(ncclGroupEnd());
  CHECK(*between == 10 * sum && result[0] == sum && gaps[places[nranks - 1]] == n);
  for (int i = 0; i < nranks; i++) places[i] = 2 * (size_t)i;
  OK(ncclGroupStart());
  for (int i = 0; i < 2; i++) OK(strataGatherV(&own[i], 1, gaps + i, counts, places, ncclUint64, 0, comm, NULL));
  for (int i = 0; i < 2; i++) OK(ncclAllReduce(&own[i], &result[i], 1, ncclUint64, ncclSum, comm, NULL));
  OK(ncclGroupEnd());
  for (int i = 0; rank == 0 && i < nranks; i++) CHECK(gaps[2 * i] == (uint64_t)i + 1 && gaps[2 * i + 1] == 10 * ((uint64_t)i + 1));
  CHECK(result[0] == sum && result[1] == 10 * sum);
  OK(ncclCommDestroy(comm));
  return NULL;
}

static int failed, told, differing;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Groups that are not the same on all ranks, and calls by different carriers. */
static void *differ(void *argument) {
  int rank = (int)(intptr_t)argument, odd = rank == 1;
  ncclComm_t comm;
  int in[12] = {0}, out[12];
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  const char *words = differing == 3 ? "the call by another carrier" : "a group's calls of";
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  ncclResult_t result = ncclSuccess;
  int grouped = differing != 3 && !(odd && differing == 2);
  if (grouped) OK(ncclGroupStart());
  for (int i = 0; i < nranks; i++) {
    /* The same elements together, in other parts; or with other roots; or each by itself. */
    size_t count = differing == 0 ? (size_t)(i == odd ? 1 : 2) : 2;
    config.algSelection = differing == 3 ? names[1 + odd] : NULL;
    ncclResult_t made = differing == 3 ? ncclAllReduceConfig(in + 4 * i, out + 4 * i, 2, ncclInt, ncclSum, comm, NULL, &config)
                      : differing == 1 ? ncclBroadcast(in + 4 * i, out + 4 * i, 2, ncclInt, (i + odd) % nranks, comm, NULL)
                                       : ncclAllReduce(in + 4 * i, out + 4 * i, count, ncclInt, ncclSum, comm, NULL);
    if (result == ncclSuccess) result = made;
  }
  if (grouped) result = ncclGroupEnd();
  pthread_mutex_lock(&lock);
  failed += result != ncclSuccess;
  if (result != ncclSuccess && strstr(strataGetLastError(), words)) told++, puts(strataGetLastError());
  pthread_mutex_unlock(&lock);
  ncclCommAbort(comm);
  return NULL;
}

int main(int argc, char **argv) {
  alarm(100);
  CHECK(argc > 1);
  if (!strstr(argv[1], "launched")) OK(ncclGetUniqueId(&id));
  nranks = 3, nnodes = 1;
  if (!strcmp(argv[1], "chain")) return in_threads(chain), 0;
  if (!strcmp(argv[1], "rooted")) return in_threads(rooted), 0;
  if (!strcmp(argv[1], "differ")) {
    differing = atoi(argv[2]);
    if (differing == 3) setenv("STRATA_CARRIERS", "tcp,mpi", 1), setenv("STRATA_TIMEOUT_MS", "2000", 1);
    in_threads(differ);
    CHECK(failed > 0 && told > 0);
    return 0;
  }
  in_windows = !strncmp(argv[1], "windows", 7);
  if (strstr(argv[1], "launched")) {
    CHECK(argc > 3);
    from_seed = atoi(argv[2]), to_seed = atoi(argv[3]);
    launched(rank_main);
    printf("a rank of %d: %d groups\n", nranks, to_seed - from_seed);
    return 0;
  }
  CHECK(argc > 5);
  nranks = atoi(argv[2]), nnodes = atoi(argv[3]), from_seed = atoi(argv[4]), to_seed = atoi(argv[5]);
  CHECK(nranks <= MOST_RANKS);
  if (!strcmp(argv[1], "carriers")) {
    nnames = sizeof names / sizeof *names;
    setenv("STRATA_CARRIERS", "tcp,mpi", 1);
  }
  if (strstr(argv[1], "threads")) in_threads(rank_main);
  else in_processes(rank_main);
  printf("%d ranks on %d nodes: %d groups\n", nranks, nnodes, to_seed - from_seed);
  return 0;
}
