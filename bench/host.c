/* Strata against the MPI this program is built with, on one node, in one run.
 *
 * Every rank does the same collective with both libraries, turn by turn, on the same buffers' sizes. Printed are medians
 * (over iterations, each the slowest rank's time), the ratio theirs / ours, and how close ours comes to the machine's
 * limit: the bytes that must be copied (all-gather) or reduced (reduce-scatter) or both (all-reduce), over the rates two
 * threads reach in this very run with memcpy and with c[i] = a[i] + b[i].
 */
#include "both.h"
#include <string.h>

static const size_t largest = (size_t)64 << 20;

/* Bytes a second of result that ranks 0 and 1 together copy or add, each in buffers of its own. */
static double machine_rate(int add, const float *a, const float *b, float *c) {
  size_t n = largest / sizeof(float);
  double best = 0;
  for (int repeat = 0; repeat < 5; repeat++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    if (rank < 2 && add)
      for (size_t i = 0; i < n; i++) c[i] = a[i] + b[i];
    else if (rank < 2)
      memcpy(c, a, largest);
    double mine = MPI_Wtime() - start, slowest;
    wait_asleep();
    if (rank >= 2) mine = 0;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    double rate = 2.0 * (double)largest / slowest;
    if (rate > best) best = rate;
  }
  return best;
}

/* Seconds per operation: a timed iteration repeats small operations, as nccl-tests and the OSU benchmarks do. */
static double timed(int which, int ours, const float *send, float *recv, size_t bytes, ncclComm_t comm, int repeat) {
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  for (int i = 0; i < repeat; i++) {
    if (ours) run_ours(which, send, recv, bytes, comm);
    else run_theirs(which, send, recv, bytes);
  }
  return slowest_rank((MPI_Wtime() - start) / repeat);
}

static double limit(int which, size_t bytes, double copy, double add) {
  double all = (double)bytes * (nranks - 1);
  if (which == ALL_GATHER) return all / copy;
  if (which == REDUCE_SCATTER) return all / add;
  return all / add + all / copy;
}

static void bench(const char *memory, const float *send, float *recv, float *theirs_recv, double copy, double add, ncclComm_t comm) {
  enum { MOST = 101 };
  double ours[MOST], theirs[MOST];
  for (int which = 0; which < COLLECTIVES; which++)
    for (size_t bytes = 1024; bytes <= largest; bytes *= 4) {
      same_result(which, send, recv, theirs_recv, bytes, comm);
      int repeat = bytes <= 65536 ? 20 : bytes <= 1048576 ? 4 : 1;
      double guess = timed(which, 0, send, theirs_recv, bytes, comm, repeat) * repeat;
      int iterations = (int)(0.6 / (guess + 1e-5));
      iterations = iterations < 5 ? 5 : iterations > MOST ? MOST : iterations;
      MPI_Bcast(&iterations, 1, MPI_INT, 0, MPI_COMM_WORLD);
      for (int i = 0; i < iterations; i++) {
        ours[i] = timed(which, 1, send, recv, bytes, comm, repeat);
        theirs[i] = timed(which, 0, send, theirs_recv, bytes, comm, repeat);
      }
      double our = median(ours, iterations), their = median(theirs, iterations);
      if (rank == 0)
        printf("%-15s %5d %-6s %10zu %12.1f %12.1f %8.2f %9.0f%% %10.1f..%-10.1f\n", names[which], nranks, memory, bytes,
               our * 1e6, their * 1e6, their / our, 100 * limit(which, bytes, copy, add) / our,
               ours[iterations / 4] * 1e6, ours[iterations * 3 / 4] * 1e6);
      fflush(stdout);
    }
}

int main(int argc, char **argv) {
  ncclComm_t comm = join(&argc, &argv);
  float *send = malloc(largest), *recv = malloc(largest), *theirs = malloc(largest);
  float *shared_send, *shared_recv;
  check(ncclMemAlloc((void **)&shared_send, largest), "ncclMemAlloc");
  check(ncclMemAlloc((void **)&shared_recv, largest), "ncclMemAlloc");
  for (size_t i = 0; i < largest / sizeof(float); i++) {
    send[i] = shared_send[i] = (float)((i * 7 + (size_t)rank * 13) % 1024);
    recv[i] = theirs[i] = shared_recv[i] = 0;
  }
  double copy = machine_rate(0, send, recv, theirs), add = machine_rate(1, send, recv, theirs);
  if (rank == 0) {
    printf("# two threads: memcpy %.1f GB/s, float add %.1f GB/s\n", copy * 1e-9, add * 1e-9);
    printf("%-15s %5s %-6s %10s %12s %12s %8s %10s %22s\n", "# collective", "ranks", "memory", "bytes", "ours(us)",
           "theirs(us)", "ratio", "of limit", "ours, quartiles (us)");
  }
  bench("malloc", send, recv, theirs, copy, add, comm);
  bench("nccl", shared_send, shared_recv, theirs, copy, add, comm);
  check(ncclMemFree(shared_send), "ncclMemFree");
  check(ncclMemFree(shared_recv), "ncclMemFree");
  free(send), free(recv), free(theirs);
  leave(comm);
  return 0;
}
