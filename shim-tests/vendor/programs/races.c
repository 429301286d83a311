/* Communicators that are ended while they, or others out of them, are being made in the background, at many moments.
 * What is made afterwards may get the same handles and must be right.
 *
 * races GRID ROUNDS */
#include "ranks.h"

static int rounds;

static void wait_us(unsigned us) {
  if (us) usleep(us);
}

/* The same on all ranks but for a little. */
static unsigned moment(int round, int rank) { return (unsigned)((round * 977) % 25000 + rank * 300 * (round % 3)); }

static void in_order(int rank, int n, ncclUniqueId id) {
  ncclComm_t comm;
  int mine[2] = {rank, 1}, sums[2], all[2 * MAX_RANKS];
  OK(ncclCommInitRank(&comm, n, id, rank));
  OK(ncclAllReduce(mine, sums, 2, ncclInt, ncclSum, comm, NULL));
  CHECK(sums[0] == n * (n - 1) / 2 && sums[1] == n);
  OK(ncclAllGather(mine, all, 2, ncclInt, comm, NULL));
  for (int i = 0; i < n; i++) CHECK(all[2 * i] == i && all[2 * i + 1] == 1);
  OK(ncclCommDestroy(comm));
}

static void round_of(int number, int rank, int n) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm, child = NULL;
  int first = number * 3 % IDS;
  config.blocking = 0;
  ncclUniqueId ids[3];
  for (int i = 0; i < 3; i++) ids[i] = shared_id((first + i) % IDS, rank);
  /* Ended while it is being made. */
  CHECK(ncclCommInitRankConfig(&comm, n, ids[0], rank, &config) == ncclInProgress);
  wait_us(moment(number, rank));
  OK(ncclCommAbort(comm));
  /* Ended while a child of it is being made. */
  CHECK(ncclCommInitRankConfig(&comm, n, ids[1], rank, &config) == ncclInProgress);
  CHECK(settled(comm) == ncclSuccess);
  CHECK(ncclCommSplit(comm, 0, rank, &child, NULL) == ncclInProgress);
  wait_us(moment(number, rank));
  OK(ncclCommAbort(comm));
  if (child) OK(ncclCommAbort(child));
  in_order(rank, n, ids[2]);
}

static void rank_main(int rank, const struct grid* grid) {
  for (int i = 0; i < rounds; i++) {
    round_of(i, rank, grid->nranks);
    meet(grid);
    for (int k = 0; rank == 0 && k < 3; k++) atomic_store(&shared->ready[(i * 3 + k) % IDS], 0);
    meet(grid);
  }
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "races GRID ROUNDS\n");
    return 2;
  }
  struct grid grid = parse_grid(argv[1]);
  rounds = atoi(argv[2]);
  if (run_ranks(&grid, rank_main, 120, NULL) != 0) return 1;
  printf("%d rounds\n", rounds);
  return 0;
}
