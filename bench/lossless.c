/* Collectives whose messages between nodes are coded without loss, against the same ones as they are, on nodes whose NICs are the
 * limit.
 *
 * usage: bench-lossless LABEL [BYTES [REPEATS]]
 *
 * Two communicators, one with STRATA_LOSSLESS=off and one with $BENCH_LOSSLESS (zstd), turn by turn in one run; each result is
 * compared bit for bit. The first calls of each kind, in which the second one finds out whether coding pays, are not measured. BYTES is the
 * all-gather's output on each rank and the all-reduce's vector. Printed are medians of the slowest rank's time without and with it,
 * the range with it, how many times faster that is, the bytes that the busiest NIC sent in the median call, and how many times fewer
 * that is.
 */
#include "both.h"
#include "counters.h"
#include <math.h>
#include <stdint.h>

enum { PLAIN, CODED, WAYS, FIRST_CALLS = 17 };
enum { BF16, FLOAT32, NOISE, ZEROS, KINDS };
static const char *kinds[KINDS] = {"bf16", "float32", "noise", "zeros"};
static const ncclDataType_t types[KINDS] = {ncclBfloat16, ncclFloat, ncclUint32, ncclFloat};
static const size_t sizes[KINDS] = {2, 4, 4, 4};

typedef struct {
  int which, kind;
  const char *send;
  char *recv;
  size_t bytes;
  ncclComm_t comm;
} LosslessCall;

static void lossless_call(const void *what) {
  const LosslessCall *call = what;
  size_t count = call->bytes / sizes[call->kind];
  ncclDataType_t type = types[call->kind];
  if (call->which == ALL_REDUCE) check(ncclAllReduce(call->send, call->recv, count, type, ncclSum, call->comm, NULL), "ncclAllReduce");
  else check(ncclAllGather(call->send, call->recv, count / (size_t)nranks, type, call->comm, NULL), "ncclAllGather");
}

static uint64_t state;

static uint64_t next(void) { return state ^= state << 13, state ^= state >> 7, state ^= state << 17, state; }

static double unit(void) { return ((double)(next() >> 11) + 0.5) / 9007199254740992.0; }

/* Weights as models begin with: normal, of a size that changes from layer to layer. */
static void fill(int kind, char *bytes, size_t len) {
  state = 88172645463325252ull + (uint64_t)rank * 7919;
  for (size_t i = 0, n = len / sizes[kind]; i < n; i++) {
    double normal = kind == NOISE || kind == ZEROS ? 0 : sqrt(-2 * log(unit())) * cos(6.283185307179586 * unit());
    float value = (float)(normal / sqrt(512.0 * (double)(1 + i / 262144 % 6)));
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (kind == NOISE) bits = (uint32_t)next();
    if (kind == BF16) bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    memcpy(bytes + i * sizes[kind], &bits, sizes[kind]);
  }
}

static void bench(const char *label, int which, int kind, size_t bytes, int repeats, ncclComm_t comms[WAYS]) {
  char *send = malloc(bytes), *recv[WAYS] = {calloc(bytes, 1), calloc(bytes, 1)};
  Sample times[WAYS][MOST_REPEATS];
  fill(kind, send, bytes);
  for (int i = -FIRST_CALLS; i < repeats; i++)
    for (int way = 0; way < WAYS; way++) {
      if (way == PLAIN && i < -1) continue;
      LosslessCall call = {which, kind, send, recv[way], bytes, comms[way]};
      if (way == CODED) memset(recv[way], 0x5a, bytes);
      Sample sample = counted(lossless_call, &call);
      if (i >= 0) times[way][i] = sample;
      if (way == CODED && i >= -1 && memcmp(recv[PLAIN], recv[CODED], bytes) != 0) {
        fprintf(stderr, "rank %d: %s of %s: results differ\n", rank, names[which], kinds[kind]);
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
    }
  for (int way = 0; way < WAYS; way++) qsort(times[way], (size_t)repeats, sizeof **times, by_time);
  Sample plain = times[PLAIN][repeats / 2], coded = times[CODED][repeats / 2];
  if (rank == 0)
    printf("%-14s %-5s %-8s %10zu %8.3f %8.3f %7.3f..%-7.3f %7.2f %9.2f %9.2f %7.2f\n", names[which], label, kinds[kind], bytes, plain.seconds,
           coded.seconds, times[CODED][0].seconds, times[CODED][repeats - 1].seconds, plain.seconds / coded.seconds, plain.most / 1e6,
           coded.most / 1e6, plain.most / coded.most);
  fflush(stdout);
  free(send), free(recv[PLAIN]), free(recv[CODED]);
}

int main(int argc, char **argv) {
  ncclComm_t comms[WAYS];
  const char *setting = getenv("BENCH_LOSSLESS");
  setenv("STRATA_LOSSLESS", "off", 1);
  comms[PLAIN] = join(&argc, &argv);
  setenv("STRATA_LOSSLESS", setting ? setting : "zstd", 1);
  comms[CODED] = communicator();
  size_t bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : (size_t)64 << 20;
  int repeats = argc > 3 ? atoi(argv[3]) : 5;
  if (argc < 2 || repeats < 1 || repeats > MOST_REPEATS) {
    if (rank == 0) fprintf(stderr, "usage: bench-lossless LABEL [BYTES [REPEATS, at most %d]]\n", MOST_REPEATS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  find_nics();
  bytes -= bytes % (4 * (size_t)nranks);
  if (rank == 0)
    printf("# %d ranks on %d nodes, %d runs, STRATA_LOSSLESS=%s; every result has the bits of the one without it\n%-14s %-5s %-8s %10s %8s %8s %16s %7s %9s %9s %7s\n",
           nranks, nnodes, repeats, setting ? setting : "zstd", "# collective", "over", "data", "bytes", "off(s)", "on(s)", "range", "faster",
           "NIC MB", "on", "fewer");
  const int all[] = {ALL_REDUCE, ALL_GATHER};
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < 2; i++) bench(argv[1], all[i], kind, bytes, repeats, comms);
  check(ncclCommDestroy(comms[CODED]), "ncclCommDestroy");
  leave(comms[PLAIN]);
  return 0;
}
