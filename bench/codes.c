/* Collectives whose messages between nodes are coded, against the same ones as they are, on nodes whose NICs are the limit.
 *
 * usage: bench-codes LABEL [BYTES [REPEATS]]
 *
 * Of float32 that are spread as gradients are, turn by turn in one run. BYTES is the all-gather's output on each rank, the
 * reduce-scatter's input and the all-reduce's vector. Printed are medians of the slowest rank's time, their range, how many times
 * faster than as they are, the bytes that the busiest NIC sent in the median call, what share that is of those as they are, and the
 * largest error as a share of the largest element of the result.
 */
#include "both.h"
#include "counters.h"
#include <math.h>

static const char *codes[] = {NULL, "bf16", "mx8", "int8"};
enum { CODES = sizeof codes / sizeof *codes };

typedef struct {
  int which;
  const char *code;
  const float *send;
  float *recv;
  size_t bytes;
  ncclComm_t comm;
} CodedCall;

static void coded_call(const void *what) {
  const CodedCall *call = what;
  size_t count = call->bytes / sizeof(float), block = count / (size_t)nranks;
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.algSelection = call->code;
  if (call->which == ALL_REDUCE)
    check(ncclAllReduceConfig(call->send, call->recv, count, ncclFloat, ncclSum, call->comm, NULL, &config), "ncclAllReduceConfig");
  else if (call->which == REDUCE_SCATTER)
    check(ncclReduceScatterConfig(call->send, call->recv, block, ncclFloat, ncclSum, call->comm, NULL, &config),
          "ncclReduceScatterConfig");
  else check(ncclAllGatherConfig(call->send, call->recv, block, ncclFloat, call->comm, NULL, &config), "ncclAllGatherConfig");
}

/* Sums of four random numbers, times sizes that change from layer to layer. */
static void gradients(float *values, size_t count) {
  unsigned long long state = 88172645463325252ull + (unsigned long long)rank * 7919;
  for (size_t i = 0; i < count; i++) {
    double sum = 0;
    for (int k = 0; k < 4; k++) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      sum += (double)(state >> 11) / 9007199254740992.0 - 0.5;
    }
    values[i] = (float)(sum * exp2(-(double)(i / 65536 % 12)));
  }
}

static double largest_error(const float *exact, const float *got, size_t count) {
  double error = 0, largest = 0;
  for (size_t i = 0; i < count; i++) {
    error = fmax(error, fabs((double)exact[i] - got[i]));
    largest = fmax(largest, fabs(exact[i]));
  }
  double share = largest > 0 ? error / largest : error;
  MPI_Allreduce(MPI_IN_PLACE, &share, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return share;
}

static void bench(const char *label, int which, size_t bytes, int repeats, ncclComm_t comm) {
  float *send = malloc(bytes), *recv = calloc(bytes, 1), *exact = calloc(bytes, 1);
  size_t results = which == REDUCE_SCATTER ? bytes / sizeof(float) / (size_t)nranks : bytes / sizeof(float);
  Sample times[CODES][MOST_REPEATS];
  double errors[CODES] = {0};
  gradients(send, bytes / sizeof(float));
  for (int i = -1; i < repeats; i++)
    for (int code = 0; code < CODES; code++) {
      CodedCall call = {which, codes[code], send, code ? recv : exact, bytes, comm};
      Sample sample = counted(coded_call, &call);
      if (i < 0) errors[code] = code ? largest_error(exact, recv, results) : 0;
      else times[code][i] = sample;
    }
  for (int code = 0; code < CODES; code++) qsort(times[code], (size_t)repeats, sizeof **times, by_time);
  Sample plain = times[0][repeats / 2];
  for (int code = 0; code < CODES && rank == 0; code++) {
    Sample mine = times[code][repeats / 2];
    printf("%-14s %-5s %-5s %10zu %8.3f %7.3f..%-7.3f %7.2f %10.2f %7.3f %9.1e\n", names[which], label, codes[code] ? codes[code] : "none",
           bytes, mine.seconds, times[code][0].seconds, times[code][repeats - 1].seconds, plain.seconds / mine.seconds, mine.most / 1e6,
           mine.most / plain.most, errors[code]);
  }
  fflush(stdout);
  free(send), free(recv), free(exact);
}

int main(int argc, char **argv) {
  ncclComm_t comm = join(&argc, &argv);
  size_t bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : (size_t)64 << 20;
  int repeats = argc > 3 ? atoi(argv[3]) : 5;
  if (argc < 2 || repeats < 1 || repeats > MOST_REPEATS) {
    if (rank == 0) fprintf(stderr, "usage: bench-codes LABEL [BYTES [REPEATS, at most %d]]\n", MOST_REPEATS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  find_nics();
  bytes -= bytes % (sizeof(float) * (size_t)nranks);
  if (rank == 0)
    printf("# %d ranks on %d nodes, %d runs\n%-14s %-5s %-5s %10s %8s %16s %7s %10s %7s %9s\n", nranks, nnodes, repeats, "# collective",
           "over", "code", "bytes", "time(s)", "range", "faster", "NIC MB", "share", "error");
  const int all[] = {ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER};
  for (int i = 0; i < 3; i++) bench(argv[1], all[i], bytes, repeats, comm);
  leave(comm);
  return 0;
}
