/* All-reduces on links whose rates change while they run: a communicator that keeps to what it decided at the start, against ones
 * that adapt.
 *
 * usage: bench-adapt LABEL NICS MBIT [BYTES [CALLS [WAYS]]]
 *
 * MBIT is the rate of each of the NICS NICs of a node, in Mbit/s. $BENCH_RATE is a command that takes NODE.NIC and a rate; rank 0 runs it
 * at the beginning of each phase. WAYS are first letters of how communicators adapt, by default ns: not at all (always the first), by
 * nics (STRATA_TCP_NICS=adapt), by shares (STRATA_MEASURE_EVERY=$BENCH_EVERY, 5), by both. In a phase each makes CALLS calls, turn by turn;
 * every element of each result is compared. Printed are, for each phase and way, the median of the slowest rank's times in the last
 * two thirds of the calls, its range, how many times faster that is than without, what the links allow at most (the time of even shares by
 * that of shares that load all alike), and after how many calls it is within 1.2 of its median.
 */
#include "both.h"
#include <string.h>

enum { OFF, MOST_WAYS = 4, MOST_CALLS = 999, MOST_NICS = 16 };

typedef struct {
  const char *name, *nics, *every;
} Way;

static const Way all_ways[MOST_WAYS] = {{"off", "own", "0"}, {"nics", "adapt", "0"}, {"shares", "own", "5"}, {"both", "adapt", "5"}};
static Way ways[MOST_WAYS];
static int nways;

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
  const char *command = getenv("BENCH_RATE");
  int last = phase->count ? phase->first + phase->count : nics;
  for (int nic = phase->first; rank == 0 && nic < last; nic++) {
    char line[4096];
    if (!command) fprintf(stderr, "BENCH_RATE is not set\n"), MPI_Abort(MPI_COMM_WORLD, 2);
    snprintf(line, sizeof line, "%s 1.%d %.0fkbit", command, nic, 1e3 * mbit * phase->part);
    if (system(line) != 0) fprintf(stderr, "cannot set a rate: %s\n", line), MPI_Abort(MPI_COMM_WORLD, 1);
  }
  wait_asleep();
}

/* Small whole numbers, whose sums floats hold exactly. */
static float element(int from, size_t i, int call) { return (float)((i * 7 + (size_t)from * 13 + (size_t)call) % 1024); }

static void look_at(const float *recv, size_t count, int call) {
  float sums[1024];
  for (size_t i = 0; i < 1024; i++) {
    sums[i] = 0;
    for (int from = 0; from < nranks; from++) sums[i] += element(from, i, call);
  }
  for (size_t i = 0; i < count; i++)
    if (recv[i] != sums[i % 1024]) {
      fprintf(stderr, "rank %d, call %d: element %zu is %g, not %g\n", rank, call, i, recv[i], sums[i % 1024]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
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

static void run_phase(const char *label, const Phase *phase, int nics, double mbit, size_t bytes, int calls, ncclComm_t comms[MOST_WAYS]) {
  static double times[MOST_WAYS][MOST_CALLS];
  static int call;
  float *send = malloc(bytes), *recv = malloc(bytes);
  int skipped = calls / 3, counted = calls - skipped;
  set_rates(phase, nics, mbit);
  for (int i = 0; i < calls; i++, call++)
    for (int way = 0; way < nways; way++) times[way][i] = call_once(comms[way], send, recv, bytes / sizeof *send, call);
  double bound = phase->bound, off = 0;
  if (bound == 0) bound = ((nics - phase->count) + phase->count * phase->part) / nics / phase->part;
  for (int way = 0; way < nways; way++) {
    double sorted[MOST_CALLS];
    int until = 0;
    memcpy(sorted, times[way] + skipped, (size_t)counted * sizeof *sorted);
    double middle = median(sorted, counted);
    if (way == OFF) off = middle;
    while (until < calls && times[way][until] > 1.2 * middle) until++;
    if (rank == 0)
      printf("%-5s %-22s %-7s %8.3f %8.3f..%-8.3f %7.2f %7.2f %7d\n", label, phase->name, ways[way].name, middle, sorted[0], sorted[counted - 1],
             off / middle, bound, until);
  }
  fflush(stdout);
  free(send), free(recv);
}

static void set(const Way *way) {
  setenv("STRATA_TCP_NICS", way->nics, 1);
  setenv("STRATA_MEASURE_EVERY", strcmp(way->every, "0") && getenv("BENCH_EVERY") ? getenv("BENCH_EVERY") : way->every, 1);
}

int main(int argc, char **argv) {
  ncclComm_t comms[MOST_WAYS];
  const char *wanted = argc > 6 ? argv[6] : "ns";
  for (int i = 0; i < MOST_WAYS; i++)
    if (i == OFF || strchr(wanted, *all_ways[i].name)) ways[nways++] = all_ways[i];
  set(&ways[OFF]);
  comms[OFF] = join(&argc, &argv);
  for (int way = 1; way < nways; way++) set(&ways[way]), comms[way] = communicator();
  int nics = argc > 2 ? atoi(argv[2]) : 0, calls = argc > 5 ? atoi(argv[5]) : 30;
  double mbit = argc > 3 ? atof(argv[3]) : 0;
  size_t bytes = argc > 4 ? strtoull(argv[4], NULL, 10) : (size_t)32 << 20;
  if (nics < 1 || nics > MOST_NICS || mbit <= 0 || calls < 3 || calls > MOST_CALLS) {
    if (rank == 0) fprintf(stderr, "usage: bench-adapt LABEL NICS MBIT [BYTES [CALLS, 3 to %d [WAYS]]]\n", MOST_CALLS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  if (rank == 0)
    printf("# %d ranks, NICs of %.0f Mbit/s, all-reduce of %zu bytes, %d calls of each in a phase; every element compared\n"
           "%-5s %-22s %-7s %8s %18s %7s %7s %7s\n",
           nranks, mbit, bytes, calls, "#over", "phase", "adapts", "time(s)", "range", "faster", "bound", "calls");
  for (int phase = 0; phase < PHASES; phase++) run_phase(argv[1], &phases[phase], nics, mbit, bytes, calls, comms);
  for (int way = 1; way < nways; way++) check(ncclCommDestroy(comms[way]), "ncclCommDestroy");
  leave(comms[OFF]);
  return 0;
}
