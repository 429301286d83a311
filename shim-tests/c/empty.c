/* A rank calls a collective of no elements, which is nothing to do, where another one calls one of some: who waits says both calls, after a second
   in the log and at the end in the error. Where all ranks have called it nothing is said. usage: empty LOG */
#include "seeded.h"

enum { COUNT = 4 };

static const char *log_name;
static pthread_barrier_t barrier;

/* How often the log has this. */
static int said(const char *text) {
  char line[2000];
  int lines = 0;
  FILE *log = fopen(log_name, "r");
  CHECK(log);
  while (fgets(line, sizeof line, log)) lines += strstr(line, text) != NULL;
  fclose(log);
  return lines;
}

static void *rank_main(void *which) {
  int rank = (int)(intptr_t)which;
  float in[COUNT] = {1}, out[COUNT];
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  OK(ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, comm, NULL));
  /* Rank 1 comes late: it has called the same, and is no mistake. */
  if (rank == 1) usleep(1500000);
  OK(ncclAllReduce(in, out, COUNT, ncclFloat, ncclSum, comm, NULL));
  CHECK(said("nothing to do") == 0);
  pthread_barrier_wait(&barrier);
  ncclResult_t result = ncclAllReduce(in, out, rank == 1 ? 0 : COUNT, ncclFloat, ncclSum, comm, NULL);
  CHECK(rank == 1 ? result == ncclSuccess : result != ncclSuccess);
  const char *both = "rank 1 called all_reduce of 0 float (sum), which is nothing to do, and nothing since; rank 0 is in operation 2, all_reduce of 4 float (sum)";
  if (rank == 0) {
    printf("%s\n", ncclGetLastError(comm));
    CHECK(strstr(ncclGetLastError(comm), both));
    CHECK(said(both) > 0);
  }
  pthread_barrier_wait(&barrier);
  OK(ncclCommAbort(comm));
  return NULL;
}

int main(int argc, char **argv) {
  alarm(60);
  CHECK(argc == 2);
  nranks = 2, nnodes = 1, log_name = argv[1];
  setenv("STRATA_TIMEOUT_MS", "3000", 1);
  setenv("NCCL_DEBUG", "WARN", 1);
  setenv("NCCL_DEBUG_FILE", log_name, 1);
  CHECK(!pthread_barrier_init(&barrier, NULL, (unsigned)nranks));
  OK(ncclGetUniqueId(&id));
  in_threads(rank_main);
  return 0;
}
