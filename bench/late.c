/* All-reduces for which a rank comes late: a communicator whose ranks wait for it, against one on which it is relayed (STRATA_LATE).
 *
 * usage: bench-late LABEL [BYTES [CALLS]]
 *
 * In a row one rank comes late by a part of what a plain call takes, or each by a part of its own that changes from call to call. The two communicators make CALLS calls,
 * turn by turn; every element of each result is compared. Times are of a plain call, medians over the calls: from the moment at which the last rank
 * comes until the last one has its result, with waiting and with relaying, the range of the latter, and the whole call, from the first rank that comes.
 */
#include "numbers.h"
#include <string.h>
#include <unistd.h>

enum { WAITS, RELAYS, WAYS, MOST_CALLS = 999 };

typedef struct {
  const char *name;
  double late; /* Of a plain call; below 0: each rank by up to so much. */
} Row;

static const Row rows[] = {
    {"nobody late", 0}, {"one by 0.1", 0.1}, {"one by 0.5", 0.5}, {"one by 1", 1}, {"one by 1.5", 1.5}, {"one by 3", 3},
    {"each up to 0.5", -0.5}, {"each up to 2", -2},
};
enum { ROWS = sizeof rows / sizeof *rows };

static double from_all(double value, MPI_Op op) {
  double result;
  MPI_Allreduce(&value, &result, 1, MPI_DOUBLE, op, MPI_COMM_WORLD);
  return result;
}

/* By how much this rank is late in a call. */
static double lateness(const Row *row, int call) {
  if (row->late >= 0) return rank == call % nranks ? row->late : 0;
  unsigned mixed = (unsigned)(call * 40503 + rank * 2654435761u);
  mixed ^= mixed >> 15, mixed *= 2246822519u, mixed ^= mixed >> 13;
  return -row->late * (mixed % 1000) / 1000;
}

/* What a call took from the moment at which the last rank came, and from the first. */
static void call_once(ncclComm_t comm, float *send, float *recv, size_t count, int call, double late, double took[2]) {
  for (size_t i = 0; i < count; i++) send[i] = element(rank, i, call);
  memset(recv, 0xff, count * sizeof *recv);
  wait_asleep();
  MPI_Barrier(MPI_COMM_WORLD);
  if (late > 0) usleep((useconds_t)(1e6 * late));
  double start = MPI_Wtime(), last, first, end;
  check(ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comm, NULL), "ncclAllReduce");
  end = MPI_Wtime();
  last = from_all(start, MPI_MAX), first = from_all(start, MPI_MIN), end = from_all(end, MPI_MAX);
  took[0] = end - last, took[1] = end - first;
  look_at(recv, count, call);
}

int main(int argc, char **argv) {
  ncclComm_t comms[WAYS];
  static double after[WAYS][MOST_CALLS], whole[WAYS][MOST_CALLS], took[2];
  setenv("STRATA_LATE", "wait", 1);
  comms[WAITS] = join(&argc, &argv);
  setenv("STRATA_LATE", "relay", 1);
  comms[RELAYS] = communicator();
  size_t bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : (size_t)32 << 20, count = bytes / sizeof(float);
  int calls = argc > 3 ? atoi(argv[3]) : 9, call = 0;
  if (calls < 1 || calls > MOST_CALLS || count == 0) {
    if (rank == 0) fprintf(stderr, "usage: bench-late LABEL [BYTES [CALLS, 1 to %d]]\n", MOST_CALLS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  float *send = malloc(bytes), *recv = malloc(bytes);
  for (int warm = 0; warm < 2; warm++, call++)
    for (int way = 0; way < WAYS; way++) call_once(comms[way], send, recv, count, call, 0, took);
  for (int i = 0; i < calls; i++, call++) {
    call_once(comms[WAITS], send, recv, count, call, 0, took);
    after[WAITS][i] = took[1];
  }
  double plain = median(after[WAITS], calls);
  if (rank == 0)
    printf("# %d ranks, all-reduce of %zu bytes, %d calls of each in a row; a plain call takes %.3f s; every element compared\n"
           "%-5s %-16s %8s %8s %18s %10s %10s %8s\n",
           nranks, bytes, calls, plain, "#over", "late", "waits", "relays", "range", "whole,w", "whole,r", "ratio");
  for (int row = 0; row < ROWS; row++) {
    for (int i = 0; i < calls; i++, call++)
      for (int way = 0; way < WAYS; way++) {
        call_once(comms[way], send, recv, count, call, plain * lateness(&rows[row], call), took);
        after[way][i] = took[0] / plain, whole[way][i] = took[1] / plain;
      }
    double waits = median(after[WAITS], calls), relays = median(after[RELAYS], calls);
    double whole_waits = median(whole[WAITS], calls), whole_relays = median(whole[RELAYS], calls);
    if (rank == 0)
      printf("%-5s %-16s %8.3f %8.3f %8.3f..%-8.3f %10.3f %10.3f %8.3f\n", argv[1], rows[row].name, waits, relays, after[RELAYS][0],
             after[RELAYS][calls - 1], whole_waits, whole_relays, whole_relays / whole_waits);
    fflush(stdout);
  }
  free(send), free(recv);
  check(ncclCommDestroy(comms[RELAYS]), "ncclCommDestroy");
  leave(comms[WAITS]);
  return 0;
}
