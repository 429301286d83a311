/* All-reduces on links whose rates change while they run: a communicator that keeps to what it decided at the start, against ones
 * that adapt.
 *
 * usage: bench-adapt LABEL NICS MBIT [BYTES [CALLS]]
 *
 * MBIT is the rate of each of the NICS NICs of a node, in Mbit/s. $BENCH_RATE is a command that takes NODE.NIC and a rate; rank 0 runs it
 * at the beginning of each phase. In a phase two communicators, one of them with STRATA_MEASURE_EVERY=$BENCH_EVERY (5), make CALLS calls,
 * turn by turn; every element of each result is compared. Printed are, for each phase, medians of the slowest rank's times in the last two
 * thirds of the calls, without and with it, the range with it, how many times faster that is, what the links allow at most (the time of
 * even shares by that of shares that load all alike), and after how many calls it is within 1.2 of its median.
 */
#include "numbers.h"
#include <string.h>

enum { OFF, ON, WAYS, MOST_CALLS = 999, MOST_NICS = 16 };

/* What changes at the start of a phase: NICs of node 1 from `first` on, `count` of them (0: all), to this part of the rate. */
typedef struct {
  const char *name;
  int first, count;
  double part;
  double bound;
} Phase;

static const Phase phases[] = {
    {"steady", 0, 0, 1, 1},
    {"one NIC at a quarter", 1, 1, 0.25, 0},
    {"back", 1, 1, 1, 1},
    {"one node at half", 0, 0, 0.5, 1.5},
    {"back again", 0, 0, 1, 1},
};
enum { PHASES = sizeof phases / sizeof *phases };

static void set_rates(const Phase *phase, int nics, double mbit) {
  const char *command = getenv("BENCH_RATE") ? getenv("BENCH_RATE") : "false";
  int last = phase->count ? phase->first + phase->count : nics;
  for (int nic = phase->first; rank == 0 && nic < last; nic++) {
    char line[4096];
    snprintf(line, sizeof line, "%s 1.%d %.0fkbit", command, nic, 1e3 * mbit * phase->part);
    if (system(line) != 0) fprintf(stderr, "cannot set a rate: %s\n", line), MPI_Abort(MPI_COMM_WORLD, 1);
  }
  wait_asleep();
}

static double call_once(ncclComm_t comm, float *send, float *recv, size_t count, int call) {
  for (size_t i = 0; i < count; i++) send[i] = element(rank, i, call);
  memset(recv, 0xff, count * sizeof *recv);
  wait_asleep();
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  check(ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comm, NULL), "ncclAllReduce");
  double seconds = slowest_rank(MPI_Wtime() - start);
  look_at(recv, count, call);
  return seconds;
}

static void run_phase(const char *label, const Phase *phase, int nics, double mbit, size_t bytes, int calls, ncclComm_t comms[WAYS]) {
  static double times[WAYS][MOST_CALLS];
  static int call;
  float *send = malloc(bytes), *recv = malloc(bytes);
  int skipped = calls / 3, counted = calls - skipped;
  set_rates(phase, nics, mbit);
  for (int i = 0; i < calls; i++, call++)
    for (int way = 0; way < WAYS; way++) times[way][i] = call_once(comms[way], send, recv, bytes / sizeof *send, call);
  double bound = phase->bound;
  if (bound == 0) bound = ((nics - phase->count) + phase->count * phase->part) / nics / phase->part;
  double sorted[WAYS][MOST_CALLS], middle[WAYS];
  for (int way = 0; way < WAYS; way++) {
    memcpy(sorted[way], times[way] + skipped, (size_t)counted * sizeof **sorted);
    middle[way] = median(sorted[way], counted);
  }
  int until = 0;
  while (until < calls && times[ON][until] > 1.2 * middle[ON]) until++;
  if (rank == 0)
    printf("%-5s %-22s %8.3f %8.3f %8.3f..%-8.3f %7.2f %7.2f %7d\n", label, phase->name, middle[OFF], middle[ON], sorted[ON][0],
           sorted[ON][counted - 1], middle[OFF] / middle[ON], bound, until);
  fflush(stdout);
  free(send), free(recv);
}

int main(int argc, char **argv) {
  ncclComm_t comms[WAYS];
  const char *every = getenv("BENCH_EVERY");
  setenv("STRATA_MEASURE_EVERY", "0", 1);
  comms[OFF] = join(&argc, &argv);
  setenv("STRATA_MEASURE_EVERY", every ? every : "5", 1);
  comms[ON] = communicator();
  int nics = argc > 2 ? atoi(argv[2]) : 0, calls = argc > 5 ? atoi(argv[5]) : 30;
  double mbit = argc > 3 ? atof(argv[3]) : 0;
  size_t bytes = argc > 4 ? strtoull(argv[4], NULL, 10) : (size_t)32 << 20;
  if (nics < 1 || nics > MOST_NICS || mbit <= 0 || calls < 3 || calls > MOST_CALLS) {
    if (rank == 0) fprintf(stderr, "usage: bench-adapt LABEL NICS MBIT [BYTES [CALLS, 3 to %d]]\n", MOST_CALLS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  if (rank == 0)
    printf("# %d ranks, NICs of %.0f Mbit/s, all-reduce of %zu bytes, %d calls of each in a phase; every element compared\n"
           "%-5s %-22s %8s %8s %18s %7s %7s %7s\n",
           nranks, mbit, bytes, calls, "#over", "phase", "off(s)", "on(s)", "range", "faster", "bound", "calls");
  for (int phase = 0; phase < PHASES; phase++) run_phase(argv[1], &phases[phase], nics, mbit, bytes, calls, comms);
  check(ncclCommDestroy(comms[ON]), "ncclCommDestroy");
  leave(comms[OFF]);
  return 0;
}
