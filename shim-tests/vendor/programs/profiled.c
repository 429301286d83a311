/* A few calls of each kind, which a test knows: what is heard of them, or is in a trace, is compared with what it expects.
 *
 * profiled GRID */
#include "ranks.h"

enum { COUNT = 100 };
static float in[COUNT * MAX_RANKS], out[COUNT * MAX_RANKS];

static void rank_main(int rank, const struct grid* grid) {
  int n = grid->nranks, version, next = (rank + 1) % n, last = (rank + n - 1) % n;
  ncclComm_t comm, half;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.commName = "world";
  OK(ncclGetVersion(&version));
  OK(ncclCommInitRankConfig(&comm, n, shared_id(0, rank), rank, &config));
  for (int i = 0; i < COUNT * n; i++) in[i] = (float)(rank + i % 7);
  OK(ncclAllReduce(in, out, COUNT, ncclFloat, ncclSum, comm, NULL));
  for (int i = 0; i < COUNT; i++) CHECK(out[i] == (float)(n * (n - 1) / 2 + n * (i % 7)));
  OK(ncclAllGather(out + COUNT * rank, out, COUNT, ncclFloat, comm, NULL));
  OK(ncclReduceScatter(in, out, 10, ncclInt32, ncclMax, comm, NULL));
  OK(ncclBroadcast(in, out, 30, ncclFloat16, n - 1, comm, NULL));
  OK(ncclReduce(in, out, 20, ncclFloat64, ncclSum, 1 % n, comm, NULL));
  OK(ncclGroupStart());
  OK(ncclSend(in, 5, ncclFloat, next, comm, NULL));
  OK(ncclRecv(out, 5, ncclFloat, last, comm, NULL));
  OK(ncclGroupEnd());
  ncclCollConfig_t tagged = NCCL_COLLCONFIG_INITIALIZER;
  tagged.userProfilerTag = 7;
  if (version >= 23102) OK(ncclAllReduceConfig(in, out, 8, ncclFloat, ncclSum, comm, NULL, &tagged));
  OK(ncclCommSplit(comm, rank % 2, rank, &half, NULL));
  OK(ncclAllReduce(in, out, 3, ncclFloat, ncclSum, half, NULL));
  OK(ncclCommDestroy(half));
  OK(ncclCommDestroy(comm));
}

int main(int argc, char** argv) {
  struct grid grid = parse_grid(argc > 1 ? argv[1] : "1x2");
  if (run_ranks(&grid, rank_main, 60, NULL) != 0) return 1;
  printf("all is heard\n");
  return 0;
}
