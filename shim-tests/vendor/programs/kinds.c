/* Children that wait in their calls made out of parents that do not, and the other way round: what calls on a child
 * return follows its own kind, also in a group of calls of several sorts.
 *
 * kinds GRID */
#include "ranks.h"

static int rank, n;

/* What a call on such a communicator may return. */
static void right(ncclResult_t code, int blocking) {
  CHECK(code == ncclSuccess || (!blocking && code == ncclInProgress));
}

static void use(ncclComm_t comm, int blocking) {
  int mine[3] = {rank, rank + 1, rank + 2}, sums[3], all[3 * MAX_RANKS], last = rank;
  right(ncclAllReduce(mine, sums, 3, ncclInt, ncclSum, comm, NULL), blocking);
  CHECK(settled(comm) == ncclSuccess);
  for (int i = 0; i < 3; i++) CHECK(sums[i] == n * (n - 1) / 2 + n * i);
  sums[0] = 0;
  OK(ncclGroupStart());
  right(ncclAllGather(mine, all, 3, ncclInt, comm, NULL), blocking);
  right(ncclBroadcast(&last, &last, 1, ncclInt, n - 1, comm, NULL), blocking);
  right(ncclAllReduce(mine, sums, 3, ncclInt, ncclMax, comm, NULL), blocking);
  right(ncclGroupEnd(), blocking);
  CHECK(settled(comm) == ncclSuccess);
  for (int i = 0; i < 3 * n; i++) CHECK(all[i] == i / 3 + i % 3);
  CHECK(last == n - 1 && sums[0] == n - 1);
}

static void family(int number, int parent_blocking) {
  ncclComm_t parent, child;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = parent_blocking;
  right(ncclCommInitRankConfig(&parent, n, shared_id(number, rank), rank, &config), parent_blocking);
  CHECK(settled(parent) == ncclSuccess);
  use(parent, parent_blocking);
  for (int blocking = -1; blocking < 2; blocking++) {
    ncclConfig_t other = NCCL_CONFIG_INITIALIZER;
    if (blocking >= 0) other.blocking = blocking;
    /* Where nothing is said, calls wait; without options a child is as its parent. */
    int waits = blocking < 0 || blocking;
    for (int options = 0; options < 2; options++) {
      right(ncclCommSplit(parent, 0, rank, &child, options ? &other : NULL), parent_blocking);
      CHECK(settled(parent) == ncclSuccess);
      CHECK(settled(child) == ncclSuccess);
      use(child, options ? waits : parent_blocking);
      OK(ncclCommDestroy(child));
    }
  }
  OK(ncclCommDestroy(parent));
}

static void rank_main(int number, const struct grid* grid) {
  rank = number;
  n = grid->nranks;
  family(0, 1);
  family(1, 0);
}

int main(int argc, char** argv) {
  struct grid grid = parse_grid(argc > 1 ? argv[1] : "2x2");
  if (run_ranks(&grid, rank_main, 60, NULL) != 0) return 1;
  printf("parents and children of both kinds\n");
  return 0;
}
