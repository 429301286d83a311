/* Programs that initialise MPI late or finalise it early: `late` makes a communicator before MPI_Init, `early` calls
   MPI_Finalize while communicators are alive, `leak` never destroys them. The second argument is a file for the id. */
#include <mpi.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COUNT 100000
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static int rank, size;
static int in[COUNT], out[COUNT];

static ncclResult_t sum(ncclComm_t comm) {
  for (int i = 0; i < COUNT; i++) in[i] = i + rank;
  return ncclAllReduce(in, out, COUNT, ncclInt, ncclSum, comm, NULL);
}

static void right_sum(ncclComm_t comm) {
  OK(sum(comm));
  for (int i = 0; i < COUNT; i++) CHECK(out[i] == size * i + size * (size - 1) / 2);
}

/* A communicator of all ranks; its id goes through a file, as MPI may not be there. */
static ncclComm_t make(const char* file, const char* which) {
  char name[600], part[610];
  ncclUniqueId id;
  ncclComm_t comm;
  snprintf(name, sizeof name, "%s.%s", file, which);
  snprintf(part, sizeof part, "%s.part", name);
  if (rank == 0) {
    OK(ncclGetUniqueId(&id));
    FILE* stream = fopen(part, "w");
    CHECK(stream && fwrite(&id, sizeof id, 1, stream) == 1 && fclose(stream) == 0 && rename(part, name) == 0);
  } else {
    for (int tries = 0; access(name, R_OK) != 0; tries++) CHECK(tries < 60000 && usleep(1000) == 0);
    FILE* stream = fopen(name, "r");
    CHECK(stream && fread(&id, sizeof id, 1, stream) == 1);
    fclose(stream);
  }
  OK(ncclCommInitRank(&comm, size, id, rank));
  return comm;
}

int main(int argc, char** argv) {
  CHECK(argc == 3);
  rank = atoi(getenv("RANK"));
  size = atoi(getenv("WORLD_SIZE"));
  int provided;
  if (!strcmp(argv[1], "late")) {
    ncclComm_t comm = make(argv[2], "first");
    right_sum(comm);
    CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided) == MPI_SUCCESS);
    MPI_Barrier(MPI_COMM_WORLD);
    right_sum(comm);
    OK(ncclCommDestroy(comm));
    MPI_Finalize();
  } else {
    /* At this level MPI is silent between NCCL's calls, as MPICH wants it when MPI_Finalize is called. */
    CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) == MPI_SUCCESS);
    ncclComm_t comm = make(argv[2], "first"), idle = make(argv[2], "second");
    right_sum(comm);
    MPI_Finalize();
    if (!strcmp(argv[1], "early")) {
      CHECK(sum(comm) == ncclInvalidUsage);
      CHECK(strstr(ncclGetLastError(comm), "the program has finalised MPI"));
      OK(ncclCommDestroy(idle));
      OK(ncclCommDestroy(comm));
      comm = make(argv[2], "third");
      right_sum(comm);
      OK(ncclCommDestroy(comm));
    }
  }
  if (rank == 0) puts("all went well");
  return 0;
}
