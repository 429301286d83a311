/* Calls that are seldom made: groups over several streams, groups with a wrong call, memory windows for the vendor's own
 * kernels; and calls that fail (the double fails those that a test wants to), whose failure must be told.
 *
 * corners GRID [failing] */
#include "ranks.h"

#define COUNT 300

static int n, rank;
static char streams[2]; /* Their addresses are the streams. */
static int mine[2][COUNT], all[2][COUNT * MAX_RANKS];

static void gather(int which, ncclComm_t comm, cudaStream_t stream) {
  for (int i = 0; i < COUNT; i++) mine[which][i] = 1000 * which + 100 * rank + i;
  memset(all[which], 0, sizeof(all[which]));
  OK(ncclAllGather(mine[which], all[which], COUNT, ncclInt, comm, stream));
}

static void gathered(int which) {
  for (int i = 0; i < COUNT * n; i++) CHECK(all[which][i] == 1000 * which + 100 * (i / COUNT) + i % COUNT);
}

static void two_streams(ncclComm_t comm) {
  OK(ncclGroupStart());
  for (int which = 0; which < 2; which++) gather(which, comm, (cudaStream_t)(void*)&streams[which]);
  OK(ncclGroupEnd());
  gathered(0);
  gathered(1);
}

static void a_wrong_call(ncclComm_t comm) {
  int in[4] = {1, 2, 3, 4}, out[4] = {7, 7, 7, 7};
  OK(ncclGroupStart());
  OK(ncclAllReduce(in, out, 4, ncclInt, ncclSum, comm, NULL));
  CHECK(ncclBroadcast(in, in, 1, ncclInt, n, comm, NULL) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  for (int i = 0; i < 4; i++) CHECK(in[i] == i + 1 && out[i] == 7);
  OK(ncclAllReduce(in, out, 4, ncclInt, ncclSum, comm, NULL));
  for (int i = 0; i < 4; i++) CHECK(out[i] == n * in[i]);
}

static void a_window(ncclComm_t comm) {
  ncclWindow_t window;
  OK(ncclCommWindowRegister(comm, all[0], sizeof(all[0]), &window, NCCL_WIN_COLL_SYMMETRIC));
  gather(0, comm, NULL);
  gathered(0);
  OK(ncclCommWindowDeregister(comm, window));
}

static ncclComm_t make(int number, int blocking) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm;
  config.blocking = blocking;
  config.commName = "world";
  ncclResult_t code = ncclCommInitRankConfig(&comm, n, shared_id(number, rank), rank, &config);
  CHECK(code == ncclSuccess || (!blocking && code == ncclInProgress));
  CHECK(settled(comm) == ncclSuccess);
  return comm;
}

static void failing(int blocking) {
  ncclComm_t comm = make(blocking, blocking);
  ncclResult_t code = ncclAllReduce(mine[0], all[0], COUNT, ncclInt, ncclSum, comm, NULL);
  if (code == ncclInProgress) code = settled(comm);
  if (rank == 0) printf("%s: %d\n", blocking ? "a call that waits" : "a call that does not", code);
  OK(ncclCommAbort(comm));
}

static void rank_main(int number, const struct grid* grid) {
  n = grid->nranks, rank = number;
  ncclComm_t comm = make(0, 1);
  two_streams(comm);
  a_wrong_call(comm);
  a_window(comm);
  OK(ncclCommDestroy(comm));
}

static void failing_main(int number, const struct grid* grid) {
  n = grid->nranks, rank = number;
  failing(0);
  failing(1);
}

int main(int argc, char** argv) {
  struct grid grid = parse_grid(argc > 1 ? argv[1] : "2x2");
  return run_ranks(&grid, argc > 2 ? failing_main : rank_main, 60, NULL) != 0;
}
