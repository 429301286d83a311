/* What the comparisons share: both libraries' collectives, and a common sense of time. Not every one uses all of it. */
#include <mpi.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* The first COLLECTIVES of them are those that two levels divide among NICs; roots are rank 0. */
enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, COLLECTIVES, BROADCAST = COLLECTIVES, REDUCE, ALL_TO_ALL, GATHER, SCATTER, PING_PONG, OPERATIONS };
static const char *names[OPERATIONS] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce",
                                        "all_to_all", "gather",         "scatter",    "ping_pong"};
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

static inline double median(double *times, int n) {
  qsort(times, (size_t)n, sizeof *times, ascending);
  return times[n / 2];
}

/* A barrier in which ranks sleep instead of taking the processors from those that are still at work. */
static inline void wait_asleep(void) {
  MPI_Request request;
  int done = 0;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  while (!done) {
    usleep(500); /* Asking costs 16 ranks a processor's time, too. */
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
  }
}

/* There and back again between ranks 0 and 1. */
static void our_ping_pong(int me, const float *send, float *recv, size_t count, ncclComm_t comm) {
  if (me == 0) check(ncclSend(send, count, ncclFloat, 1, comm, NULL), "ncclSend");
  if (me <= 1) check(ncclRecv(recv, count, ncclFloat, 1 - me, comm, NULL), "ncclRecv");
  if (me == 1) check(ncclSend(send, count, ncclFloat, 0, comm, NULL), "ncclSend");
}

/* Rank `me` of comm; a broadcast's root has its data in `send` and is done in place, as MPI's is. */
static void run_ours(int which, int me, const float *send, float *recv, size_t bytes, ncclComm_t comm) {
  size_t count = bytes / sizeof(float), block = count / (size_t)nranks;
  float *both = me == 0 ? (float *)send : recv;
  switch (which) {
    case ALL_GATHER: check(ncclAllGather(send, recv, block, ncclFloat, comm, NULL), "ncclAllGather"); break;
    case REDUCE_SCATTER: check(ncclReduceScatter(send, recv, block, ncclFloat, ncclSum, comm, NULL), "ncclReduceScatter"); break;
    case ALL_REDUCE: check(ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comm, NULL), "ncclAllReduce"); break;
    case BROADCAST: check(ncclBroadcast(both, both, count, ncclFloat, 0, comm, NULL), "ncclBroadcast"); break;
    case REDUCE: check(ncclReduce(send, recv, count, ncclFloat, ncclSum, 0, comm, NULL), "ncclReduce"); break;
    case ALL_TO_ALL: check(ncclAlltoAll(send, recv, block, ncclFloat, comm, NULL), "ncclAlltoAll"); break;
    case GATHER: check(ncclGather(send, recv, block, ncclFloat, 0, comm, NULL), "ncclGather"); break;
    case SCATTER: check(ncclScatter(send, recv, block, ncclFloat, 0, comm, NULL), "ncclScatter"); break;
    case PING_PONG: our_ping_pong(me, send, recv, count, comm); break;
  }
}

static inline void their_ping_pong(const float *send, float *recv, int count) {
  if (rank == 0) MPI_Send(send, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
  if (rank <= 1) MPI_Recv(recv, count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  if (rank == 1) MPI_Send(send, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
}

static inline void run_theirs(int which, const float *send, float *recv, size_t bytes) {
  int count = (int)(bytes / sizeof(float)), block = count / nranks;
  MPI_Comm world = MPI_COMM_WORLD;
  switch (which) {
    case ALL_GATHER: MPI_Allgather(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, world); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(send, recv, block, MPI_FLOAT, MPI_SUM, world); break;
    case ALL_REDUCE: MPI_Allreduce(send, recv, count, MPI_FLOAT, MPI_SUM, world); break;
    case BROADCAST: MPI_Bcast(rank == 0 ? (float *)send : recv, count, MPI_FLOAT, 0, world); break;
    case REDUCE: MPI_Reduce(send, recv, count, MPI_FLOAT, MPI_SUM, 0, world); break;
    case ALL_TO_ALL: MPI_Alltoall(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, world); break;
    case GATHER: MPI_Gather(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, 0, world); break;
    case SCATTER: MPI_Scatter(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, 0, world); break;
    case PING_PONG: their_ping_pong(send, recv, count); break;
  }
}

/* Ranks that have finished sleep until all have: spinning, they would slow down the ranks that are still measured. */
static inline double slowest_rank(double mine) {
  double slowest;
  wait_asleep();
  MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest;
}

static inline void same_result(int which, const float *send, float *ours, float *theirs, size_t bytes, ncclComm_t comm) {
  size_t n = which == REDUCE_SCATTER ? bytes / 4 / (size_t)nranks : bytes / 4;
  run_ours(which, rank, send, ours, bytes, comm);
  run_theirs(which, send, theirs, bytes);
  for (size_t i = 0; i < n; i++)
    if (ours[i] != theirs[i]) {
      fprintf(stderr, "rank %d: %s of %zu bytes: element %zu is %g, MPI has %g\n", rank, names[which], bytes, i, ours[i], theirs[i]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* A communicator of all ranks. */
static ncclComm_t communicator(void) {
  ncclUniqueId id;
  ncclComm_t comm;
  if (rank == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  check(ncclCommInitRank(&comm, nranks, id, rank), "ncclCommInitRank");
  return comm;
}

/* A number of this rank from its launcher: Open MPI's mpirun, or hydra, which MPICH uses. */
static int told(const char *open_mpi, const char *hydra) {
  const char *text = getenv(open_mpi) ? getenv(open_mpi) : getenv(hydra);
  if (!text) fprintf(stderr, "neither %s nor %s is set: mpirun starts this\n", open_mpi, hydra), exit(1);
  return atoi(text);
}

static int strata_ends_mpi;

/* Joins the ranks of both libraries. With NCCL_COMM_ID set Strata comes first, and where MPI is to carry its bytes it starts
 * MPI, with the threads that it needs and a NIC for each rank. Otherwise, and over TCP, MPI is started as ever. */
static inline ncclComm_t join(int *argc, char ***argv) {
  ncclComm_t comm = NULL;
  if (getenv("NCCL_COMM_ID")) {
    ncclUniqueId id;
    rank = told("OMPI_COMM_WORLD_RANK", "PMI_RANK"), nranks = told("OMPI_COMM_WORLD_SIZE", "PMI_SIZE");
    if (ncclGetUniqueId(&id) != ncclSuccess || ncclCommInitRank(&comm, nranks, id, rank) != ncclSuccess) {
      fprintf(stderr, "rank %d: %s\n", rank, ncclGetLastError(NULL));
      exit(1);
    }
    unsetenv("NCCL_COMM_ID"); /* Further communicators have ids of their own. */
  }
  MPI_Initialized(&strata_ends_mpi);
  if (!strata_ends_mpi) MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &nranks);
  return comm ? comm : communicator();
}

/* Whoever started MPI ends it; Strata does so at exit. */
static inline void leave(ncclComm_t comm) {
  check(ncclCommDestroy(comm), "ncclCommDestroy");
  wait_asleep();
  if (rank == 0) puts("# done"), fflush(stdout);
  if (!strata_ends_mpi) MPI_Finalize();
}
