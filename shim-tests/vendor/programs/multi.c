/* Ranks made by RCCL's ncclCommInitRankMulti, whose virtual ids differ, sum up; wrong arguments are refused.
 *
 * multi GRID */
#include "ranks.h"

ncclResult_t ncclCommInitRankMulti(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, int virtualId);

static void rank_main(int rank, const struct grid* grid) {
  ncclComm_t comm = NULL;
  int in = rank, out = -1, all[MAX_RANKS];
  ncclUniqueId id = shared_id(0, rank);
  CHECK(ncclCommInitRankMulti(NULL, grid->nranks, id, rank, 0) == ncclInvalidArgument);
  CHECK(ncclCommInitRankMulti(&comm, grid->nranks, id, grid->nranks, 0) == ncclInvalidArgument);
  CHECK(ncclCommInitRankMulti(&comm, 0, id, 0, 0) == ncclInvalidArgument);
  OK(ncclCommInitRankMulti(&comm, grid->nranks, id, rank, 100 + rank));
  OK(ncclAllReduce(&in, &out, 1, ncclInt, ncclSum, comm, NULL));
  CHECK(out == grid->nranks * (grid->nranks - 1) / 2);
  OK(ncclAllGather(&in, all, 1, ncclInt, comm, NULL));
  for (int i = 0; i < grid->nranks; i++) CHECK(all[i] == i);
  OK(ncclCommDestroy(comm));
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  struct grid grid = parse_grid(argv[1]);
  return run_ranks(&grid, rank_main, 60, NULL) != 0;
}
