/* Collectives whose blocks differ in size, on random counts and places that follow from seeds; each rank checks its results, and that
   nothing between blocks is touched. Ranks are threads, or processes on virtual nodes.
   usage: vectored threads|processes RANKS NODES FROM TO [ALGORITHM] | launched FROM TO | differ CASE | refusals */
#include "seeded.h"
#include <time.h>

enum { GAP = 0x5a, KINDS = 5 };
typedef enum { ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER } Kind;

static int from_seed, to_seed;

/* Element i of what rank `from` has for block `block`. */
static int value(uint64_t seed, int from, int block, size_t i) {
  return (int)((seed * 7 + (uint64_t)from * 5 + (uint64_t)block * 3 + i) % 13);
}

/* Mostly none; one with nine tenths; as Zipf has it; any. */
static void some_counts(Random *random, int n, size_t *counts) {
  size_t total = (size_t[]){1, 60, 3000, 300000}[below(random, 4)];
  int shape = (int)below(random, 4), big = (int)below(random, n), turn = (int)below(random, n);
  for (int i = 0; i < n; i++) {
    int rank = (i + turn) % n;
    size_t any = below(random, 1 + 2 * total / n);
    counts[rank] = shape == 0   ? (any % 4 ? 0 : any)
                   : shape == 1 ? (rank == big ? total * 9 / 10 : total / 10 / n)
                   : shape == 2 ? total / (i + 1)
                                : any;
  }
}

/* Places with gaps, in an order that begins anywhere; returns elements of the whole. */
static size_t some_places(Random *random, const size_t *counts, size_t *places) {
  size_t end = below(random, 3);
  int first = (int)below(random, nranks);
  for (int i = 0; i < nranks; i++) {
    int rank = (first + i) % nranks;
    places[rank] = end;
    end += counts[rank] + below(random, 4);
  }
  return end;
}

static size_t packed(const size_t *counts, size_t *places) {
  size_t end = 0;
  for (int i = 0; i < nranks; i++) places[i] = end, end += counts[i];
  return end;
}

/* One rank's call. */
typedef struct {
  Kind kind;
  int rank, root, type, in_place, with_config, named;
  const size_t *sent, *received; /* By rank; one for the own where there is one block. */
  size_t sent_at[MOST_RANKS], received_at[MOST_RANKS];
  int has_places[2];
  char *send, *recv;
  size_t recv_bytes;
} Call;

/* The same call with the algorithm that a program may name. */
static ncclResult_t make_named(const Call *call, ncclComm_t comm, strataStream_t stream) {
  ncclDataType_t type = types[call->type];
  const size_t *sdispls = call->has_places[0] ? call->sent_at : NULL;
  const size_t *rdispls = call->has_places[1] ? call->received_at : NULL;
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER, *given = call->named ? &config : NULL;
  int is_root = call->rank == call->root;
  config.algSelection = call->kind == ALL_TO_ALL ? "pairwise" : call->kind >= GATHER ? "direct" : "RING_SIMPLE";
  switch (call->kind) {
    case ALL_GATHER:
      return strataAllGatherVConfig(call->send, call->recv, call->received, rdispls, type, comm, stream, given);
    case REDUCE_SCATTER:
      return strataReduceScatterVConfig(call->send, call->recv, call->sent, sdispls, type, ncclSum, comm, stream, given);
    case ALL_TO_ALL:
      return strataAllToAllVConfig(call->send, call->sent, sdispls, call->recv, call->received, rdispls, type, comm, stream,
                                   given);
    case GATHER:
      return strataGatherVConfig(call->send, call->sent[0], call->recv, is_root ? call->received : NULL,
                                 is_root ? rdispls : NULL, type, call->root, comm, stream, given);
    default:
      return strataScatterVConfig(call->send, is_root ? call->sent : NULL, is_root ? sdispls : NULL, call->recv,
                                  call->received[0], type, call->root, comm, stream, given);
  }
}

static ncclResult_t make(const Call *call, ncclComm_t comm, strataStream_t stream) {
  if (call->with_config) return make_named(call, comm, stream);
  ncclDataType_t type = types[call->type];
  const size_t *sdispls = call->has_places[0] ? call->sent_at : NULL;
  const size_t *rdispls = call->has_places[1] ? call->received_at : NULL;
  int is_root = call->rank == call->root;
  switch (call->kind) {
    case ALL_GATHER: return strataAllGatherV(call->send, call->recv, call->received, rdispls, type, comm, stream);
    case REDUCE_SCATTER:
      return strataReduceScatterV(call->send, call->recv, call->sent, sdispls, type, ncclSum, comm, stream);
    case ALL_TO_ALL:
      return strataAllToAllV(call->send, call->sent, sdispls, call->recv, call->received, rdispls, type, comm, stream);
    case GATHER:
      return strataGatherV(call->send, call->sent[0], call->recv, is_root ? call->received : NULL,
                           is_root ? rdispls : NULL, type, call->root, comm, stream);
    default:
      return strataScatterV(call->send, is_root ? call->sent : NULL, is_root ? sdispls : NULL, call->recv,
                            call->received[0], type, call->root, comm, stream);
  }
}

static void check(const Call *call, uint64_t seed, int nblocks) {
  size_t size = sizes[call->type];
  char *between = calloc(call->recv_bytes + 1, 1), wanted[8];
  for (int block = 0; block < nblocks; block++)
    for (size_t i = 0; i < call->received[block]; i++) {
      int sum = 0;
      if (call->kind == REDUCE_SCATTER)
        for (int rank = 0; rank < nranks; rank++) sum += value(seed, rank, call->rank, i);
      else if (call->kind == ALL_GATHER || call->kind == GATHER) sum = value(seed, block, 0, i);
      else sum = value(seed, call->kind == SCATTER ? call->root : block, call->rank, i);
      size_t at = (call->received_at[block] + i) * size;
      put(call->type, wanted, sum);
      CHECK(memcmp(call->recv + at, wanted, size) == 0);
      if (at < call->recv_bytes) memset(between + at, 1, size);
    }
  /* In place for a reduce-scatter the rest of the buffer is the caller's input. */
  for (size_t i = 0; i < call->recv_bytes; i++) CHECK(between[i] || call->recv[i] == GAP);
  free(between);
}

/* Rank `rank`'s part of the call with this seed. */
static void one(ncclComm_t comm, strataStream_t own, int rank, uint64_t seed) {
  Random random = {seed};
  Kind kind = (Kind)below(&random, KINDS);
  int root = (int)below(&random, nranks), type = (int)below(&random, sizeof sizes / sizeof *sizes);
  int in_place = kind != ALL_TO_ALL && below(&random, 2), way = (int)below(&random, 3);
  size_t all[MOST_RANKS * MOST_RANKS], row[MOST_RANKS], column[MOST_RANKS], size = sizes[type];
  some_counts(&random, kind == ALL_TO_ALL ? nranks * nranks : nranks, all);
  for (int i = 0; i < nranks; i++) {
    row[i] = kind == ALL_TO_ALL ? all[rank * nranks + i] : all[i];
    column[i] = kind == ALL_TO_ALL ? all[i * nranks + rank] : all[i];
  }
  Random mine = {seed * 31 + (uint64_t)rank}; /* Places are each rank's own. */
  Call call = {.kind = kind, .rank = rank, .root = root, .type = type};
  call.with_config = (int)below(&random, 3) == 0, call.named = nranks > 1 && below(&random, 2);
  int many_sent = kind == REDUCE_SCATTER || kind == ALL_TO_ALL || (kind == SCATTER && rank == root);
  int many_received = kind == ALL_GATHER || kind == ALL_TO_ALL || (kind == GATHER && rank == root);
  int sends = kind != SCATTER || rank == root, receives = kind != GATHER || rank == root;
  call.sent = many_sent ? row : &all[rank];
  call.received = many_received ? column : &all[rank];
  call.has_places[0] = (int)below(&mine, 2), call.has_places[1] = (int)below(&mine, 2);
  size_t sent = all[rank], received = all[rank];
  if (many_sent) sent = call.has_places[0] ? some_places(&mine, row, call.sent_at) : packed(row, call.sent_at);
  if (many_received)
    received = call.has_places[1] ? some_places(&mine, column, call.received_at) : packed(column, call.received_at);
  char *input = malloc(sent * size + 1), *output = malloc(received * size + 1);
  if (in_place && many_received) free(input), input = output + call.received_at[rank] * size;
  else if (in_place && many_sent) free(output), output = input + call.sent_at[rank] * size;
  else in_place = 0;
  call.send = input, call.recv = output, call.in_place = in_place;
  call.recv_bytes = in_place && many_sent ? 0 : received * size;
  if (!(in_place && many_sent)) memset(output, GAP, call.recv_bytes);
  for (int block = 0; block < (many_sent ? nranks : 1) && sends; block++)
    for (size_t i = 0; i < call.sent[block]; i++)
      put(type, input + (call.sent_at[block] + i) * size, value(seed, rank, many_sent ? block : 0, i));
  strataStream_t stream = way == 1 ? own : NULL;
  int in[3] = {rank, 1, 2}, sum[3];
  if (way == 2) OK(ncclGroupStart());
  OK(make(&call, comm, stream));
  if (way == 2) {
    OK(ncclAllReduce(in, sum, 3, ncclInt, ncclSum, comm, stream));
    if (kind != REDUCE_SCATTER || !in_place) OK(make(&call, comm, stream));
    OK(ncclGroupEnd());
    CHECK(sum[1] == nranks && sum[0] == nranks * (nranks - 1) / 2);
  }
  if (way == 1) OK(strataStreamSynchronize(own));
  if (receives) check(&call, seed, many_received ? nranks : 1);
  if (in_place && many_received) free(output);
  else if (in_place) free(input);
  else free(input), free(output);
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

static int failed, differing;
static double longest;
static char told[1024];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec / 1e9;
}

enum { LONG = 1 << 20 };
static pthread_barrier_t all_have_returned;

/* Three ranks whose counts do not agree. */
static void *differ(void *argument) {
  int rank = (int)(intptr_t)argument;
  static const size_t none[3], some[3] = {0, 4, 0}, other[3] = {4, 0, 0}, more[3] = {0, 5, 0};
  static int out[3][16], in[3][LONG];
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  const size_t *odd[] = {none, other, more, none, more, none, none, more, none, none};
  const size_t *mine = rank == 0 ? odd[differing] : some;
  int *from = in[rank], *to = out[rank];
  double begun = now();
  ncclResult_t result = ncclSuccess;
  switch (differing) {
    case 0: case 1: case 2: result = strataAllGatherV(from, to, mine, NULL, ncclInt, comm, NULL); break;
    case 3: case 4: result = strataReduceScatterV(from, to, mine, NULL, ncclInt, ncclSum, comm, NULL); break;
    /* Rank 1 expects 4 elements of rank 0, which has none for it. */
    case 5: {
      const size_t expected[3] = {4, 0, 0};
      result = strataAllToAllV(from, none, NULL, to, rank == 1 ? expected : none, NULL, ncclInt, comm, NULL);
      break;
    }
    /* Rank 1 has many elements, and the root expects none. */
    case 8: result = strataGatherV(from, rank == 1 ? LONG : 0, to, mine, NULL, ncclInt, 0, comm, NULL); break;
    /* The next call is one of blocks of one size, which goes by messages. */
    case 9:
      result = strataGatherV(from, rank == 1 ? 4 : 0, to, mine, NULL, ncclInt, 0, comm, NULL);
      if (result == ncclSuccess) result = ncclReduce(from, to, 4, ncclInt, ncclSum, 0, comm, NULL);
      break;
    /* Rank 1 has 4 elements, and the root expects none, or 5. Of none it hears when it receives from that rank again. */
    default:
      result = strataGatherV(from, rank == 1 ? 4 : 0, to, mine, NULL, ncclInt, 0, comm, NULL);
      if (result == ncclSuccess) result = strataGatherV(from, rank == 1 ? 4 : 0, to, some, NULL, ncclInt, 0, comm, NULL);
  }
  pthread_mutex_lock(&lock);
  double seconds = now() - begun;
  if (seconds > longest) longest = seconds;
  const char *text = result == ncclSuccess ? "" : strataGetLastError();
  failed += result != ncclSuccess;
  if (strstr(text, "do not call the same operations") || strstr(text, "is not the same on all ranks"))
    snprintf(told, sizeof told, "%s", text);
  pthread_mutex_unlock(&lock);
  pthread_barrier_wait(&all_have_returned); /* Of a rank that has left nobody hears what it called. */
  ncclCommAbort(comm);
  return NULL;
}

/* Counts of two ranks of one node that are wrong by as much up as down: in two steps their blocks leave in one message. */
static void *balanced(void *argument) {
  int rank = (int)(intptr_t)argument;
  ncclComm_t comm;
  size_t sent[4] = {10, 10, 10, rank == 0 ? 7 : rank == 1 ? 13 : 10}, received[4] = {10, 10, 10, 10};
  int in[43] = {0}, out[40];
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  if (rank == 3) sent[3] = 10;
  ncclResult_t result = strataAllToAllV(in, sent, NULL, out, received, NULL, ncclInt, comm, NULL);
  CHECK(result != ncclSuccess);
  CHECK(rank != 3 || strstr(strataGetLastError(), "rank 0 has 7 elements for rank 3, which expects 10 of it"));
  sleep(2); /* Of a rank that has left nobody hears why. */
  ncclCommAbort(comm);
  return NULL;
}

static int unrefused;

static void refused(ncclResult_t result, ncclResult_t wanted, const char *words) {
  if (result == wanted && strstr(strataGetLastError(), words)) return;
  fprintf(stderr, "%d where %d was expected, \"%s\" in: %s\n", result, wanted, words, strataGetLastError());
  unrefused++;
}

static void refusals(void) {
  ncclComm_t comms[2], comm;
  int in[16], out[16];
  size_t two[2] = {4, 4}, over[2] = {0, 3}, far[2] = {SIZE_MAX / 4, 0}, huge[2] = {SIZE_MAX, 4}, one[2] = {1, 1};
  OK(ncclCommInitAll(comms, 2, NULL));
  comm = comms[0];
  strataStream_t stream; /* A call that is not refused waits for the other rank there, and not here. */
  OK(strataStreamCreate(&stream));
  refused(strataAllGatherV(in, out, NULL, NULL, ncclInt, comm, stream), ncclInvalidArgument, "counts");
  refused(strataAllGatherV(in, out, huge, NULL, ncclInt, comm, stream), ncclInvalidArgument, "memory can hold");
  refused(strataAllGatherV(in, out, two, far, ncclInt, comm, stream), ncclInvalidArgument, "memory can hold");
  refused(strataAllGatherV(in, out, two, over, ncclInt, comm, stream), ncclInvalidArgument, "blocks 0 and 1 of recvbuff");
  refused(strataAllGatherV(NULL, out, two, NULL, ncclInt, comm, stream), ncclInvalidArgument, "sendbuff");
  refused(strataAllGatherV(out + 4, out, two, NULL, ncclInt, comm, stream), ncclInvalidArgument, "overlap");
  refused(strataReduceScatterV(in, in, two, over, ncclInt, ncclSum, comm, stream), ncclInvalidArgument, "overlap");
  refused(strataReduceScatterV(in, out, two, NULL, ncclFloat, strataBitXor, comm, stream), ncclInvalidArgument, "float");
  refused(strataAllToAllV(in, two, NULL, in, two, NULL, ncclInt, comm, stream), ncclInvalidArgument, "no in-place form");
  refused(strataAllToAllV(in, two, NULL, out, one, NULL, ncclInt, comm, stream), ncclInvalidArgument, "sends itself 4");
  refused(strataGatherV(in, 3, out, two, NULL, ncclInt, 0, comm, stream), ncclInvalidArgument, "sends itself 3");
  refused(strataGatherV(in, 3, out, two, NULL, ncclInt, 2, comm, stream), ncclInvalidArgument, "invalid root 2");
  refused(strataGatherV(in, 3, out, NULL, NULL, ncclInt, 0, comm, stream), ncclInvalidArgument, "recvcounts");
  refused(strataScatterV(in, NULL, NULL, out, 4, ncclInt, 0, comm, stream), ncclInvalidArgument, "sendcounts");
  refused(strataScatterV(in, two, NULL, out, 4, ncclInt, 0, NULL, stream), ncclInvalidArgument, "comm");
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.algSelection = "board";
  refused(strataAllGatherVConfig(in, out, two, NULL, ncclInt, comm, stream, &config), ncclInvalidUsage, "algSelection board");
  config.algSelection = "rign";
  refused(strataAllGatherVConfig(in, out, two, NULL, ncclInt, comm, stream, &config), ncclInvalidUsage, "rign stands for no");
  config.minCTAs = -5;
  refused(strataScatterVConfig(in, two, NULL, out, 4, ncclInt, 0, comm, stream, &config), ncclInvalidArgument, "minCTAs");
  if (unrefused > 0) exit(1);
  OK(strataStreamSynchronize(stream));
  OK(strataStreamDestroy(stream));
  for (int rank = 0; rank < 2; rank++) OK(ncclCommDestroy(comms[rank]));
}

int main(int argc, char **argv) {
  alarm(100);
  CHECK(argc > 1);
  if (!strcmp(argv[1], "refusals")) return refusals(), 0;
  if (!strcmp(argv[1], "differ")) {
    nranks = 3, differing = atoi(argv[2]);
    if (differing == 9) setenv("STRATA_BOARD", "0", 1);
    if (argc > 3) setenv("STRATA_ALLTOALL_ALGO", argv[3], 1);
    pthread_barrier_init(&all_have_returned, NULL, 3);
    OK(ncclGetUniqueId(&id));
    in_threads(differ);
    CHECK(failed > 0);
    printf("case %d: %d failed within %.1f s: %s\n", differing, failed, longest, told);
    CHECK(longest < 5 && *told);
    CHECK(differing != 9 || strstr(told, "counts may differ"));
    return 0;
  }
  if (!strcmp(argv[1], "balanced")) {
    nranks = 4, nnodes = 2;
    setenv("STRATA_ALLTOALL_ALGO", "two_step", 1);
    OK(ncclGetUniqueId(&id));
    in_processes(balanced);
    printf("counts that are wrong by as much up as down are told\n");
    return 0;
  }
  if (!strcmp(argv[1], "launched")) {
    CHECK(argc > 3);
    from_seed = atoi(argv[2]), to_seed = atoi(argv[3]);
    if (argc > 4) setenv("STRATA_ALLTOALL_ALGO", argv[4], 1);
    launched(rank_main);
    printf("a rank of %d: %d calls\n", nranks, to_seed - from_seed);
    return 0;
  }
  CHECK(argc > 5);
  nranks = atoi(argv[2]), nnodes = atoi(argv[3]), from_seed = atoi(argv[4]), to_seed = atoi(argv[5]);
  CHECK(nranks <= MOST_RANKS);
  if (argc > 6 && !strcmp(argv[6], "two_step")) setenv("STRATA_ALLTOALL_ALGO", argv[6], 1);
  else if (argc > 6) setenv("STRATA_ALLGATHER_ALGO", argv[6], 1), setenv("STRATA_REDUCESCATTER_ALGO", argv[6], 1);
  if (argc > 7) setenv("STRATA_SEGMENT_BYTES", argv[7], 1);
  OK(ncclGetUniqueId(&id));
  if (!strcmp(argv[1], "threads")) in_threads(rank_main);
  else in_processes(rank_main);
  printf("%d ranks on %d nodes: %d calls\n", nranks, nnodes, to_seed - from_seed);
  return 0;
}
