/* A program that initialises MPI itself, at the level of its argument, and uses it around NCCL's calls. */
#include <mpi.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 200000
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static int rank, size;

static void sums(ncclComm_t comm) {
  int* in = malloc(COUNT * sizeof *in);
  int* out = malloc(COUNT * sizeof *out);
  for (int count = 1; count <= COUNT; count *= 200) {
    for (int i = 0; i < count; i++) in[i] = i + rank;
    OK(ncclAllReduce(in, out, count, ncclInt, ncclSum, comm, NULL));
    for (int i = 0; i < count; i++) CHECK(out[i] == size * i + size * (size - 1) / 2);
  }
  free(in);
  free(out);
}

static void* one_communicator(void* id) {
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, size, *(ncclUniqueId*)id, rank));
  sums(comm);
  OK(ncclCommDestroy(comm));
  return NULL;
}

int main(int argc, char** argv) {
  int level = MPI_THREAD_SINGLE, provided, finalized;
  if (argc > 1 && !strcmp(argv[1], "funneled")) level = MPI_THREAD_FUNNELED;
  if (argc > 1 && !strcmp(argv[1], "serialized")) level = MPI_THREAD_SERIALIZED;
  if (argc > 1 && !strcmp(argv[1], "multiple")) level = MPI_THREAD_MULTIPLE;
  CHECK(MPI_Init_thread(&argc, &argv, level, &provided) == MPI_SUCCESS && provided >= level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int round = 0; round < 3; round++) {
    ncclUniqueId ids[2];
    if (rank == 0) {
      OK(ncclGetUniqueId(&ids[0]));
      OK(ncclGetUniqueId(&ids[1]));
    }
    MPI_Bcast(ids, sizeof ids, MPI_BYTE, 0, MPI_COMM_WORLD);
    one_communicator(&ids[0]);
    MPI_Barrier(MPI_COMM_WORLD);
    if (level < MPI_THREAD_MULTIPLE) continue;
    /* Two at once, begun in opposite orders. */
    pthread_t threads[2];
    if (rank == 0) {
      OK(ncclGetUniqueId(&ids[0]));
      OK(ncclGetUniqueId(&ids[1]));
    }
    MPI_Bcast(ids, sizeof ids, MPI_BYTE, 0, MPI_COMM_WORLD);
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, one_communicator, &ids[(i + rank) % 2]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  }
  CHECK(MPI_Finalized(&finalized) == MPI_SUCCESS && !finalized);
  MPI_Finalize();
  const char* name = provided == MPI_THREAD_SINGLE       ? "single"
                     : provided == MPI_THREAD_FUNNELED   ? "funneled"
                     : provided == MPI_THREAD_SERIALIZED ? "serialized"
                                                         : "multiple";
  if (rank == 0) printf("all sums are right at the level %s\n", name);
  return 0;
}
