/* Strata against the MPI this program is built with, on nodes whose NICs are the limit, in one run.
 *
 * usage: bench-nics LABEL RATE [BYTES [REPEATS]]     RATE: bytes a second that a NIC sends and, at once, receives
 *
 * Both libraries do the same collective turn by turn. Before and after each, one rank of every node reads what each of its
 * NICs has sent by the kernel's count (the interfaces eth*, or those that begin with $BENCH_NICS). BYTES is the all-gather's
 * output on each rank, the reduce-scatter's input and the all-reduce's vector. Printed are medians of the slowest rank's
 * time, their range, the time over the floor, and the fewest and most bytes a NIC sent in the median call.
 *
 * The floor is the time in which the bytes that must cross the NICs can. Of B bytes, n nodes, node i having the share s_i
 * of the ranks and k_i NICs, K in all:
 *   all-gather       node i must receive what the others have, B (1 - s_i), and send its own, B s_i
 *   reduce-scatter   the same with sending and receiving exchanged
 *   all-reduce       node i must send and receive B at least; and each element costs n - 1 messages until its n partial
 *                    sums are one, and n - 1 until all have it: together 2 (n - 1) B over K NICs
 * each over k_i times RATE, the slowest node counting. On equal nodes of k NICs this is (n - 1)/n B / k for the first two
 * and twice that for the third.
 */
#include "both.h"
#include "counters.h"

/* A call of one library or the other. */
typedef struct {
  int which, ours;
  const float *send;
  float *recv;
  size_t bytes;
  ncclComm_t comm;
} OneCall;

static void one_call(const void *what) {
  const OneCall *call = what;
  if (call->ours) run_ours(call->which, rank, call->send, call->recv, call->bytes, call->comm);
  else run_theirs(call->which, call->send, call->recv, call->bytes);
}

static Sample measured(int which, int ours, const float *send, float *recv, size_t bytes, ncclComm_t comm) {
  OneCall call = {which, ours, send, recv, bytes, comm};
  return counted(one_call, &call);
}

static double larger(double a, double b) { return a > b ? a : b; }

static double floor_seconds(int which, double bytes, double rate) {
  Nics mine = read_nics();
  double share = (double)local_ranks / nranks, slowest = 0, nics = mine.count;
  MPI_Allreduce(MPI_IN_PLACE, &nics, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  if (mine.count > 0 && nnodes > 1) slowest = (which == ALL_REDUCE ? 1 : larger(share, 1 - share)) / mine.count;
  MPI_Allreduce(MPI_IN_PLACE, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (which == ALL_REDUCE) slowest = larger(slowest, 2.0 * (nnodes - 1) / nics);
  return slowest * bytes / rate;
}

static void bench(const char *label, double rate, size_t bytes, int repeats, ncclComm_t comm) {
  float *send = malloc(bytes), *recv = calloc(bytes, 1), *theirs_recv = calloc(bytes, 1);
  Sample ours[MOST_REPEATS], theirs[MOST_REPEATS];
  for (size_t i = 0; i < bytes / sizeof(float); i++) send[i] = (float)((i * 7 + (size_t)rank * 13) % 1024);
  for (int which = 0; which < COLLECTIVES; which++) {
    double floor = floor_seconds(which, (double)bytes, rate);
    same_result(which, send, recv, theirs_recv, bytes, comm);
    for (int i = 0; i < repeats; i++) {
      ours[i] = measured(which, 1, send, recv, bytes, comm);
      theirs[i] = measured(which, 0, send, theirs_recv, bytes, comm);
    }
    qsort(ours, (size_t)repeats, sizeof *ours, by_time);
    qsort(theirs, (size_t)repeats, sizeof *theirs, by_time);
    Sample our = ours[repeats / 2], their = theirs[repeats / 2];
    if (rank == 0)
      printf("%-14s %-5s %8.3f %8.3f %6.3f..%-6.3f %7.2f %7.2f..%-7.2f %5.1f%% %8.3f %6.3f..%-6.3f %7.2f..%-7.2f %6.2f\n", names[which],
             label, floor, our.seconds, ours[0].seconds, ours[repeats - 1].seconds, our.seconds / floor, our.least / 1e6,
             our.most / 1e6, 100 * (our.most - our.least) / our.most, their.seconds, theirs[0].seconds,
             theirs[repeats - 1].seconds, their.least / 1e6, their.most / 1e6, their.seconds / our.seconds);
    fflush(stdout);
  }
  free(send), free(recv), free(theirs_recv);
}

int main(int argc, char **argv) {
  ncclComm_t comm = join(&argc, &argv);
  double rate = argc > 2 ? atof(argv[2]) : 0;
  size_t bytes = argc > 3 ? strtoull(argv[3], NULL, 10) : (size_t)64 << 20;
  int repeats = argc > 4 ? atoi(argv[4]) : 5;
  if (rate <= 0 || repeats < 1 || repeats > MOST_REPEATS) {
    if (rank == 0) fprintf(stderr, "usage: bench-nics LABEL RATE [BYTES [REPEATS, at most %d]]\n", MOST_REPEATS);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  int kind;
  find_nics();
  bytes -= bytes % (sizeof(float) * (size_t)nranks);
  if (rank == 0) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Get_library_version(version, &kind);
    printf("# %d ranks on %d nodes, %zu bytes, NICs of %.0f Mbit/s, %d runs; %.*s\n", nranks, nnodes, bytes, rate * 8e-6, repeats,
           (int)strcspn(version, "\n,"), version);
    printf("%-14s %-5s %8s %8s %14s %7s %16s %6s %8s %14s %16s %6s\n", "# collective", "over", "floor(s)", "ours(s)", "range",
           "x floor", "NIC MB sent", "uneven", "MPI(s)", "range", "NIC MB sent", "ratio");
  }
  bench(argv[1], rate, bytes, repeats, comm);
  leave(comm);
  return 0;
}
