/* Groups over several communicators of the same ranks. What is called on each follows from a seed; in what order a rank records the calls of
   different communicators, and on which of its streams, is the rank's own choice. Every element is checked.
   usage: several fail|continue RANKS NODES FROM TO      what becomes of calls when ranks are lost */
#include "seeded.h"

enum { COMMS = 3, MOST_CALLS = 5, ELEMENTS = 3000, STREAMS = 3 };
typedef enum { ALL_REDUCE, BROADCAST, RING, KINDS } Kind;

typedef struct {
  Kind kind;
  int root;
  size_t count;
} Call;

static int from_seed, to_seed;
static int32_t given[MOST_RANKS][COMMS][MOST_CALLS][ELEMENTS], got[MOST_RANKS][COMMS][MOST_CALLS][ELEMENTS];

static int32_t value(uint64_t seed, int which, int from, size_t i) { return (int32_t)((seed + (uint64_t)which * 31 + (uint64_t)from * 7 + i) % 101); }

static int32_t wanted(const Call *call, uint64_t seed, int which, int rank, size_t i) {
  int32_t sum = 0;
  switch (call->kind) {
    case BROADCAST: return value(seed, which, call->root, i);
    case RING: return value(seed, which, (rank + nranks - 1) % nranks, i);
    default:
      for (int from = 0; from < nranks; from++) sum += value(seed, which, from, i);
      return sum;
  }
}

static void make(const Call *call, const int32_t *send, int32_t *recv, int rank, ncclComm_t comm, strataStream_t stream) {
  switch (call->kind) {
    case ALL_REDUCE: OK(ncclAllReduce(send, recv, call->count, ncclInt32, ncclSum, comm, stream)); return;
    case BROADCAST: OK(ncclBroadcast(send, recv, call->count, ncclInt32, call->root, comm, stream)); return;
    default:
      OK(ncclSend(send, call->count, ncclInt32, (rank + 1) % nranks, comm, stream));
      OK(ncclRecv(recv, call->count, ncclInt32, (rank + nranks - 1) % nranks, comm, stream));
  }
}

static void group(ncclComm_t *comms, strataStream_t *streams, int rank, uint64_t seed) {
  Random all = {seed}, own = {seed * MOST_RANKS + (uint64_t)rank + (1ull << 40)};
  Call calls[COMMS][MOST_CALLS];
  int ncalls[COMMS], made[COMMS] = {0}, left = 0;
  for (int c = 0; c < COMMS; c++) {
    left += ncalls[c] = (int)below(&all, MOST_CALLS + 1);
    for (int n = 0; n < ncalls[c]; n++) {
      Call *call = &calls[c][n];
      *call = (Call){(Kind)below(&all, KINDS), (int)below(&all, (size_t)nranks), 1 + below(&all, ELEMENTS)};
      for (size_t i = 0; i < call->count; i++) given[rank][c][n][i] = value(seed, c * MOST_CALLS + n, rank, i);
      memset(got[rank][c][n], 0x5a, sizeof got[rank][c][n]);
    }
  }
  /* All on one stream, or each call on any. */
  size_t most = below(&own, 2) ? STREAMS : 1, first = below(&own, STREAMS);
  OK(ncclGroupStart());
  while (left > 0) {
    int c = (int)below(&own, COMMS);
    if (made[c] == ncalls[c]) continue;
    int n = made[c]++;
    make(&calls[c][n], given[rank][c][n], got[rank][c][n], rank, comms[c], streams[(first + below(&own, most)) % STREAMS]);
    left--;
  }
  OK(ncclGroupEnd());
  for (int s = 0; s < STREAMS; s++) OK(strataStreamSynchronize(streams[s]));
  for (int c = 0; c < COMMS; c++)
    for (int n = 0; n < ncalls[c]; n++)
      for (size_t i = 0; i < ELEMENTS; i++) {
        int32_t is = got[rank][c][n][i];
        int32_t should = i < calls[c][n].count ? wanted(&calls[c][n], seed, c * MOST_CALLS + n, rank, i) : 0x5a5a5a5a;
        if (is == should) continue;
        fprintf(stderr, "seed %d, rank %d, communicator %d, call %d, element %zu: %d for %d\n", (int)seed, rank, c, n, i, is, should);
        exit(1);
      }
}

static void *rank_main(void *argument) {
  int rank = (int)(intptr_t)argument;
  ncclComm_t comms[COMMS];
  strataStream_t streams[STREAMS] = {NULL};
  OK(ncclCommInitRank(&comms[0], nranks, id, rank));
  for (int c = 1; c < COMMS; c++) OK(ncclCommSplit(comms[0], 0, rank, &comms[c], NULL));
  for (int s = 1; s < STREAMS; s++) OK(strataStreamCreate(&streams[s]));
  for (int seed = from_seed; seed < to_seed; seed++) group(comms, streams, rank, (uint64_t)seed);
  for (int c = COMMS - 1; c >= 0; c--) OK(ncclCommDestroy(comms[c]));
  for (int s = 1; s < STREAMS; s++) OK(strataStreamDestroy(streams[s]));
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc > 5);
  alarm(100);
  setenv("STRATA_LOST", argv[1], 1);
  nranks = atoi(argv[2]), nnodes = atoi(argv[3]), from_seed = atoi(argv[4]), to_seed = atoi(argv[5]);
  CHECK(nranks <= MOST_RANKS);
  OK(ncclGetUniqueId(&id));
  in_processes(rank_main);
  printf("%d ranks on %d nodes: %d groups over %d communicators\n", nranks, nnodes, to_seed - from_seed, COMMS);
  return 0;
}
