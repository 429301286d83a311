/* strataCommProfile: the ranks measure their links where they call it, and all-reduces go on with shares by that. */
#define _GNU_SOURCE
#include "seeded.h"
#include <strata.h>
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1 << 19 };

static void all_reduce(ncclComm_t comm, int rank, float *data) {
  for (int i = 0; i < COUNT; i++) data[i] = (float)(rank + i % 100);
  OK(ncclAllReduce(data, data, COUNT, ncclFloat, ncclSum, comm, NULL));
  for (int i = 0; i < COUNT; i++) CHECK(data[i] == (float)(nranks * (nranks - 1) / 2 + nranks * (i % 100)));
}

/* The rates of the links that the state tells. */
static int rates(ncclComm_t comm, double *found) {
  char text[8192];
  OK(strataCommState(comm, text, sizeof text));
  char *at = strstr(text, "\"mb_per_s\":[");
  int count = 0;
  for (at = at ? at + 12 : NULL; at && *at && *at != ']'; at++)
    if (count < MOST_RANKS) found[count++] = strtod(at, &at), at -= *at == ']';
  return count;
}

static void *rank_main(void *argument) {
  int rank = (int)(intptr_t)argument;
  ncclComm_t comm, host;
  ncclUniqueId other;
  double found[MOST_RANKS];
  float *data = malloc(COUNT * sizeof *data);
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  CHECK(rates(comm, found) == 0);
  all_reduce(comm, rank, data);
  for (int round = 0; round < 2; round++) {
    OK(strataCommProfile(comm));
    int count = rates(comm, found);
    CHECK(count == (nnodes > 1 ? nranks : 0));
    for (int i = 0; i < count; i++) CHECK(found[i] > 1);
    all_reduce(comm, rank, data);
  }
  CHECK(strataCommProfile(NULL) == ncclInvalidArgument);
  OK(strataGetUniqueId(&other));
  OK(strataCommInitHost(&host, 1, other, 0, 60000));
  CHECK(strataCommProfile(host) == ncclInvalidUsage);
  OK(ncclCommDestroy(host));
  OK(ncclCommDestroy(comm));
  CHECK(strataCommProfile(comm) == ncclInvalidArgument);
  free(data);
  return NULL;
}

int main(void) {
  for (nranks = 2; nranks <= 6; nranks += 2)
    for (nnodes = 1; nnodes <= nranks; nnodes += 1 + nnodes % 2) {
      OK(ncclGetUniqueId(&id));
      in_processes(rank_main);
    }
  puts("measured");
  return 0;
}
