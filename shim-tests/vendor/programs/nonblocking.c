/* Communicators made with blocking = 0: calls return at once, states are polled, and the handle of a child appears in the
 * caller's variable later. Rank 0 prints what each call returned, so that runs can be compared.
 *
 * nonblocking GRID; with DOUBLE_DELAY_MS of 50 or more, calls that come too early are early for certain. */
#include "ranks.h"

static int me, n;

#define SAY(...) (me == 0 ? (void)printf(__VA_ARGS__) : (void)0)

/* Success at once and success later are both right. */
static int accepted(ncclResult_t code) { return code == ncclSuccess || code == ncclInProgress; }

static void sums_up(ncclComm_t comm, int size, const char* what) {
  int in = 3, out = 0, many[600], all[600];
  for (int i = 0; i < 600; i++) many[i] = i;
  CHECK(accepted(ncclAllReduce(&in, &out, 1, ncclInt, ncclSum, comm, NULL)));
  CHECK(settled(comm) == ncclSuccess);
  CHECK(out == 3 * size);
  OK(ncclGroupStart());
  CHECK(accepted(ncclAllReduce(many, all, 600, ncclInt, ncclSum, comm, NULL)));
  CHECK(accepted(ncclBroadcast(&in, &out, 1, ncclInt, size - 1, comm, NULL)));
  CHECK(accepted(ncclGroupEnd()));
  CHECK(settled(comm) == ncclSuccess);
  CHECK(out == 3);
  for (int i = 0; i < 600; i++) CHECK(all[i] == size * i);
  SAY("%s: sums are right\n", what);
}

/* Waits until the parent has made the child. */
static ncclComm_t child_of(ncclComm_t parent, ncclComm_t* child, ncclResult_t code, const char* what) {
  int number = 0;
  SAY("%s: %d, handle %s\n", what, code, *child ? "there" : "not there");
  SAY("%s: the parent meanwhile: %d\n", what, ncclCommCount(parent, &number));
  CHECK(settled(parent) == ncclSuccess);
  SAY("%s: then the handle is %s\n", what, *child ? "there" : "not there");
  if (*child) CHECK(settled(*child) == ncclSuccess);
  return *child;
}

static void ends(ncclComm_t comm) {
  if (!comm) return;
  CHECK(accepted(ncclCommFinalize(comm)));
  CHECK(settled(comm) == ncclSuccess);
  OK(ncclCommDestroy(comm));
}

static void mixed(ncclComm_t comm) {
  ncclComm_t blocking;
  ncclUniqueId id;
  int value = 1;
  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&blocking, 1, id, 0));
  OK(ncclGroupStart());
  ncclResult_t one = ncclBroadcast(&value, &value, 1, ncclInt, 0, comm, NULL);
  ncclResult_t other = ncclSend(&value, 1, ncclInt, 0, blocking, NULL);
  ncclResult_t end = ncclGroupEnd();
  SAY("blocking and nonblocking in a group: %d, then %d\n", other, end);
  CHECK(accepted(one) && other == ncclInvalidArgument && end == ncclInvalidArgument);
  OK(ncclCommDestroy(blocking));
}

static void rank_main(int rank, const struct grid* grid) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm = NULL, child = (ncclComm_t)&config;
  int number = -1;
  me = rank, n = grid->nranks;
  config.blocking = 0;
  config.commName = "world";
  ncclUniqueId id = shared_id(0, rank);
  ncclResult_t code = ncclCommInitRankConfig(&comm, n, id, rank, &config);
  SAY("init: %d, handle %s\n", code, comm ? "there" : "not there");
  SAY("before it is ready: %d\n", ncclCommCount(comm, &number));
  CHECK(settled(comm) == ncclSuccess);
  OK(ncclCommCount(comm, &number));
  CHECK(number == n);
  sums_up(comm, n, "world");
  ncclConfig_t named = config;
  named.commName = "half";
  code = ncclCommSplit(comm, rank % 2, rank, &child, &named);
  child_of(comm, &child, code, "split");
  sums_up(child, (n + 1 - rank % 2) / 2, "split");
  ends(child);
  child = (ncclComm_t)&config;
  code = ncclCommSplit(comm, rank == 0 ? NCCL_SPLIT_NOCOLOR : 4, -rank, &child, NULL);
  child_of(comm, &child, code, "split without rank 0");
  CHECK((child == NULL) == (rank == 0));
  if (child) {
    OK(ncclCommUserRank(child, &number));
    CHECK(number == n - 1 - rank);
    sums_up(child, n - 1, "without rank 0");
    ends(child);
  }
  int last = n - 1;
  child = (ncclComm_t)&config;
  if (version_of_nccl() >= 22703 && rank != last) {
    code = ncclCommShrink(comm, &last, 1, &child, NULL, NCCL_SHRINK_DEFAULT);
    child_of(comm, &child, code, "shrink");
    sums_up(child, n - 1, "shrink");
    ends(child);
  }
  mixed(comm);
  CHECK(settled(comm) == ncclSuccess);
  sums_up(comm, n, "at last");
  ends(comm);
}

int main(int argc, char** argv) {
  struct grid grid = parse_grid(argc > 1 ? argv[1] : "2x2");
  return run_ranks(&grid, rank_main, 120, NULL) != 0;
}
