/* All-reduces of which every element is checked, while a NIC of some rank goes down: with STRATA_LOST=continue all ranks make the call
 * again over NICs that are up. With `adapt` they look for one that is up again before each call.
 *
 * usage: nic_down BYTES CALLS [adapt]     with RANK, WORLD_SIZE and NCCL_COMM_ID; prints `done` on each rank, and the longest call
 */
#include "check.h"
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
  int rank = atoi(getenv("RANK")), nranks = atoi(getenv("WORLD_SIZE")), calls = argc > 2 ? atoi(argv[2]) : 20;
  size_t count = (argc > 1 ? strtoull(argv[1], NULL, 10) : 1 << 20) / sizeof(int);
  int *data = malloc(count * sizeof(int));
  double longest = 0;
  ncclUniqueId id;
  ncclComm_t comm;
  alarm(100);
  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  for (int call = 0; call < calls; call++) {
    for (size_t i = 0; i < count; i++) data[i] = (int)i % 1000 + call * (rank + 1);
    double began = now();
    if (argc > 3) OK(strataCommAdapt(comm, NULL));
    OK(ncclAllReduce(data, data, count, ncclInt, ncclSum, comm, NULL));
    if (now() - began > longest) longest = now() - began;
    for (size_t i = 0; i < count; i++)
      if (data[i] != (int)i % 1000 * nranks + call * nranks * (nranks + 1) / 2) {
        fprintf(stderr, "rank %d: call %d: element %zu is %d\n", rank, call, i, data[i]);
        exit(1);
      }
  }
  OK(ncclCommDestroy(comm));
  printf("rank %d done, longest call %.3f s\n", rank, longest);
  free(data);
  return 0;
}
