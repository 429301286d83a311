/* Strata against the MPI this program is built with, on one node, in one run.
 *
 * Every rank does the same collective with both libraries, turn by turn, on the same buffers' sizes. Printed are medians
 * (over iterations, each the slowest rank's time), the ratio theirs / ours, and how close ours comes to the machine's
 * limit: the bytes that must be copied (all-gather) or reduced (reduce-scatter) or both (all-reduce), over the rates two
 * threads reach in this very run with memcpy and with c[i] = a[i] + b[i].
 */
#include <mpi.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, COLLECTIVES };
static const char *names[COLLECTIVES] = {"all_gather", "reduce_scatter", "all_reduce"};
static const size_t largest = (size_t)64 << 20;
static int rank, nranks;

static void check(ncclResult_t result, const char *what) {
  if (result == ncclSuccess) return;
  fprintf(stderr, "rank %d: %s: %s (%s)\n", rank, what, ncclGetErrorString(result), ncclGetLastError(NULL));
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *times, int n) {
  qsort(times, (size_t)n, sizeof *times, ascending);
  return times[n / 2];
}

/* A barrier in which ranks sleep instead of taking the processors from those that are still at work. */
static void wait_asleep(void) {
  MPI_Request request;
  int done = 0;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  while (!done) {
    usleep(100);
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
  }
}

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

static void run_ours(int which, const float *send, float *recv, size_t bytes, ncclComm_t comm) {
  size_t count = bytes / sizeof(float), block = count / (size_t)nranks;
  if (which == ALL_GATHER) check(ncclAllGather(send, recv, block, ncclFloat, comm, NULL), "ncclAllGather");
  if (which == REDUCE_SCATTER)
    check(ncclReduceScatter(send, recv, block, ncclFloat, ncclSum, comm, NULL), "ncclReduceScatter");
  if (which == ALL_REDUCE) check(ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comm, NULL), "ncclAllReduce");
}

static void run_theirs(int which, const float *send, float *recv, size_t bytes) {
  int count = (int)(bytes / sizeof(float)), block = count / nranks;
  if (which == ALL_GATHER) MPI_Allgather(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, MPI_COMM_WORLD);
  if (which == REDUCE_SCATTER) MPI_Reduce_scatter_block(send, recv, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (which == ALL_REDUCE) MPI_Allreduce(send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* Ranks that have finished sleep until all have: spinning, they would slow down the ranks that are still measured. */
static double slowest_rank(double mine) {
  double slowest;
  wait_asleep();
  MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest;
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

static void same_result(int which, const float *send, float *ours, float *theirs, size_t bytes, ncclComm_t comm) {
  size_t n = which == REDUCE_SCATTER ? bytes / 4 / (size_t)nranks : bytes / 4;
  run_ours(which, send, ours, bytes, comm);
  run_theirs(which, send, theirs, bytes);
  for (size_t i = 0; i < n; i++)
    if (ours[i] != theirs[i]) {
      fprintf(stderr, "rank %d: %s of %zu bytes: element %zu is %g, MPI has %g\n", rank, names[which], bytes, i, ours[i], theirs[i]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
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
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &nranks);
  ncclUniqueId id;
  ncclComm_t comm;
  if (rank == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  check(ncclCommInitRank(&comm, nranks, id, rank), "ncclCommInitRank");
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
  check(ncclCommDestroy(comm), "ncclCommDestroy");
  free(send), free(recv), free(theirs);
  MPI_Finalize();
  return 0;
}
