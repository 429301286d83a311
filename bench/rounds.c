/* The logarithmic algorithms against the ring on short messages, in one run: what a number of rounds costs.
 *
 * usage: bench-rounds LABEL [REPEATS]
 *
 * Two communicators of the same ranks: one chooses for itself, one is told to use rings. Printed are medians of the slowest
 * rank's time of one operation, of a batch that is repeated turn by turn, and how many times longer the ring takes. How
 * many rounds there are, NCCL_DEBUG=INFO tells.
 */
#include "both.h"

static double batch(int which, size_t bytes, const float *send, float *recv, ncclComm_t comm) {
  enum { BATCH = 20 };
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  for (int i = 0; i < BATCH; i++) run_ours(which, rank, send, recv, bytes, comm);
  return slowest_rank((MPI_Wtime() - start) / BATCH);
}

int main(int argc, char **argv) {
  enum { MOST = 99, LARGEST = 16384 };
  double chosen_times[MOST], ring_times[MOST];
  float send[LARGEST / sizeof(float)] = {0}, recv[LARGEST / sizeof(float)];
  ncclComm_t chosen = join(&argc, &argv);
  int repeats = argc > 2 ? atoi(argv[2]) : 11;
  if (argc < 2 || repeats < 1 || repeats > MOST) {
    if (rank == 0) fprintf(stderr, "usage: bench-rounds LABEL [REPEATS, at most %d]\n", MOST);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  setenv("STRATA_ALLGATHER_ALGO", "ring", 1);
  setenv("STRATA_REDUCESCATTER_ALGO", "ring", 1);
  setenv("STRATA_ALLREDUCE_ALGO", "ring", 1);
  ncclComm_t ring = communicator();
  if (rank == 0) printf("%-14s %-5s %6s %8s %10s %10s %6s\n", "# collective", "over", "ranks", "bytes", "ours(us)", "ring(us)", "ratio");
  for (int which = 0; which < COLLECTIVES; which++)
    for (size_t bytes = 1024; bytes <= LARGEST; bytes *= 4) {
      batch(which, bytes, send, recv, chosen), batch(which, bytes, send, recv, ring);
      for (int i = 0; i < repeats; i++) {
        chosen_times[i] = batch(which, bytes, send, recv, chosen);
        ring_times[i] = batch(which, bytes, send, recv, ring);
      }
      double ours = median(chosen_times, repeats), theirs = median(ring_times, repeats);
      if (rank == 0)
        printf("%-14s %-5s %6d %8zu %10.1f %10.1f %6.2f\n", names[which], argv[1], nranks, bytes, ours * 1e6, theirs * 1e6, theirs / ours);
      fflush(stdout);
    }
  check(ncclCommDestroy(ring), "ncclCommDestroy");
  leave(chosen);
  return 0;
}
