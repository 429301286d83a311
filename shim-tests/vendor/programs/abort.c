/* Ends that are not as planned: no peer may wait for ever, and each learns of it.
 *
 * abort GRID CASE; cases: "thread" (another thread of rank 0 aborts while the others wait for a rank that does not
 * come), "vanish" (a rank ends within a collective of the others), "background" (a nonblocking communicator is aborted
 * with an operation under way), "late" (the same, and the rank that is waited for aborts when the others have), "init"
 * (a nonblocking one whose ranks never all come), "revoke". */
#include "ranks.h"
#include <pthread.h>

static const char* which;

static int is(const char* name) { return strcmp(which, name) == 0; }

static void* abort_soon(void* comm) {
  usleep(300000);
  OK(ncclCommAbort(comm));
  return NULL;
}

static void* revoke_soon(void* comm) {
  usleep(300000);
  OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
  return NULL;
}

static ncclResult_t sum(ncclComm_t comm, int nranks) {
  int in[1000], out[1000];
  for (int i = 0; i < 1000; i++) in[i] = i;
  ncclResult_t code = ncclAllReduce(in, out, 1000, ncclInt, ncclSum, comm, NULL);
  if (code == ncclInProgress) code = settled(comm);
  for (int i = 0; code == ncclSuccess && i < 1000; i++) CHECK(out[i] == nranks * i);
  return code;
}

static ncclComm_t make(int rank, int nranks, int blocking) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm;
  config.blocking = blocking;
  config.commName = "world";
  ncclResult_t code = ncclCommInitRankConfig(&comm, nranks, shared_id(0, rank), rank, &config);
  CHECK(code == ncclSuccess || (!blocking && code == ncclInProgress));
  return comm;
}

static void in_the_background(int rank, const struct grid* grid) {
  int n = grid->nranks, value = rank, out;
  ncclComm_t comm = make(rank, n, 0);
  CHECK(settled(comm) == ncclSuccess);
  OK(sum(comm, n));
  if (rank != n - 1) {
    ncclResult_t state, code = ncclAllReduce(&value, &out, 1, ncclInt, ncclSum, comm, NULL);
    CHECK(code == ncclInProgress);
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclInProgress);
  }
  meet(grid); /* Whoever aborts first is seen by the others. */
  if (is("late") && rank == n - 1) meet(grid);
  OK(ncclCommAbort(comm));
  if (is("late") && rank != n - 1) meet(grid);
}

static void never_all_there(int rank, int n) {
  if (rank == n - 1) return;
  ncclComm_t comm = make(rank, n, 0);
  ncclResult_t state;
  usleep(100000);
  OK(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclInProgress || state == ncclRemoteError); /* as soon as another rank has given up */
  OK(ncclCommAbort(comm));
}

static void revoked(int rank, const struct grid* grid) {
  int n = grid->nranks, number;
  ncclComm_t comm = make(rank, n, 1), fresh = NULL;
  pthread_t thread;
  OK(sum(comm, n));
  CHECK(pthread_create(&thread, NULL, revoke_soon, comm) == 0);
  if (rank != n - 1) CHECK(sum(comm, n) != ncclSuccess);
  pthread_join(thread, NULL);
  CHECK(sum(comm, n) == ncclInvalidUsage);
  OK(ncclCommSplit(comm, 0, rank, &fresh, NULL));
  OK(ncclCommCount(fresh, &number));
  CHECK(number == n);
  OK(sum(fresh, n));
  OK(ncclCommDestroy(fresh));
  OK(ncclCommDestroy(comm));
}

/* The last rank does not come to the second sum. */
static void waited_for_in_vain(int rank, const struct grid* grid) {
  int n = grid->nranks;
  pthread_t thread;
  ncclResult_t state;
  ncclComm_t comm = make(rank, n, 1);
  OK(sum(comm, n));
  if (rank == n - 1) {
    if (is("vanish")) {
      usleep(200000);
      _exit(7);
    }
    meet(grid); /* The others have given up. */
    OK(ncclCommAbort(comm));
    return;
  }
  int aborts = rank == 0 && is("thread");
  if (aborts) CHECK(pthread_create(&thread, NULL, abort_soon, comm) == 0);
  ncclResult_t code = sum(comm, n);
  if (aborts) {
    CHECK(code != ncclSuccess);
    pthread_join(thread, NULL);
  } else {
    CHECK(code == ncclRemoteError);
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclRemoteError);
    CHECK(sum(comm, n) == ncclRemoteError);
    OK(ncclCommAbort(comm));
  }
  if (is("thread")) meet(grid);
}

static void rank_main(int rank, const struct grid* grid) {
  if (is("background") || is("late")) in_the_background(rank, grid);
  else if (is("init")) never_all_there(rank, grid->nranks);
  else if (is("revoke")) revoked(rank, grid);
  else waited_for_in_vain(rank, grid);
}

int main(int argc, char** argv) {
  int expected[MAX_RANKS] = {0};
  if (argc != 3) {
    fprintf(stderr, "abort GRID CASE\n");
    return 2;
  }
  struct grid grid = parse_grid(argv[1]);
  which = argv[2];
  if (is("vanish")) expected[grid.nranks - 1] = 7;
  if (run_ranks(&grid, rank_main, 60, expected) != 0) return 1;
  printf("%s: every rank came to an end\n", which);
  return 0;
}
