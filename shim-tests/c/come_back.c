/* A rank is lost, the others go on without it, and a new process comes in its place (ncclCommShrink, ncclCommGrow): by seeds, with ranks
   that go on by themselves (STRATA_LOST=continue) and with ranks whose calls fail. Each rank is a process, and so is who comes later. */
#define _GNU_SOURCE
#include <nccl.h>
#include <strata.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 20000
#define CHECK(condition)                                                                                        \
  do {                                                                                                          \
    if (!(condition)) {                                                                                         \
      fprintf(stderr, "seed %llu, rank %d, line %d: %s (%s)\n", seed, me, __LINE__, #condition,                 \
              ncclGetLastError(NULL));                                                                          \
      _exit(1);                                                                                                 \
    }                                                                                                           \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static unsigned long long seed;
static int me = -1, nranks, nnodes, victim, goes_on, id_pipe[2];

/* All ranks of a communicator add a bit each, and broadcast from each. */
static void sums(ncclComm_t comm, int expected) {
  static uint64_t numbers[COUNT];
  int rank, count;
  OK(ncclCommUserRank(comm, &rank));
  OK(ncclCommCount(comm, &count));
  CHECK(count == expected);
  for (int i = 0; i < COUNT; i++) numbers[i] = (1ULL << rank) * (i % 1000 + 1);
  OK(ncclAllReduce(numbers, numbers, COUNT, ncclUint64, ncclSum, comm, NULL));
  for (int i = 0; i < COUNT; i++) CHECK(numbers[i] == ((1ULL << count) - 1) * (i % 1000 + 1));
  for (int root = 0; root < count; root++) {
    for (int i = 0; i < COUNT; i++) numbers[i] = rank == root ? i * (root + 1ULL) : 0;
    OK(ncclBroadcast(numbers, numbers, COUNT, ncclUint64, root, comm, NULL));
    for (int i = 0; i < COUNT; i++) CHECK(numbers[i] == i * (root + 1ULL));
  }
}

static void on_node(int place) {
  char node[32];
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(100);
  snprintf(node, sizeof(node), "node%d", place * nnodes / nranks);
  setenv("NCCL_HOSTID", node, 1);
}

static void rank_main(ncclUniqueId id) {
  ncclComm_t comm, smaller, whole;
  ncclResult_t result;
  uint64_t bit = 1ULL << me, sum = 0;
  int rank;
  on_node(me);
  OK(ncclCommInitRank(&comm, nranks, id, me));
  sums(comm, nranks);
  if (me == victim) raise(SIGKILL);
  result = ncclAllReduce(&bit, &sum, 1, ncclUint64, ncclSum, comm, NULL);
  if (goes_on) CHECK(result == ncclSuccess && sum == (((1ULL << nranks) - 1) & ~(1ULL << victim)));
  else CHECK(result == ncclRemoteError);
  do result = ncclCommShrink(comm, &victim, 1, &smaller, NULL, NCCL_SHRINK_ABORT);
  while (result == ncclTimeout);
  OK(result);
  sums(smaller, nranks - 1);
  OK(ncclCommUserRank(smaller, &rank));
  if (rank == 0) {
    OK(ncclCommGetUniqueId(smaller, &id));
    CHECK(write(id_pipe[1], &id, sizeof(id)) == (ssize_t)sizeof(id));
  }
  OK(ncclCommGrow(smaller, nranks, rank == 0 ? &id : NULL, -1, &whole, NULL));
  sums(whole, nranks);
  OK(ncclCommDestroy(whole));
  OK(ncclCommDestroy(smaller));
  OK(ncclCommAbort(comm));
  _exit(0);
}

static void newcomer_main(void) {
  ncclUniqueId id;
  ncclComm_t whole;
  me = nranks;
  on_node(victim);
  CHECK(read(id_pipe[0], &id, sizeof(id)) == (ssize_t)sizeof(id));
  OK(ncclCommGrow(NULL, nranks, &id, nranks - 1, &whole, NULL));
  sums(whole, nranks);
  OK(ncclCommDestroy(whole));
  _exit(0);
}

static void one(void) {
  ncclUniqueId id;
  pid_t pids[9];
  int status, failed = 0;
  nranks = 2 + (int)(seed % 5), nnodes = 1 + (int)(seed / 5 % 2), victim = (int)(seed * 7 % nranks), goes_on = (int)(seed / 2 % 2);
  setenv("STRATA_LOST", goes_on ? "continue" : "fail", 1);
  OK(ncclGetUniqueId(&id));
  CHECK(pipe(id_pipe) == 0);
  for (int rank = 0; rank <= nranks; rank++) {
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (pids[rank] == 0) {
      me = rank;
      if (rank == nranks) newcomer_main();
      rank_main(id);
    }
  }
  for (int rank = 0; rank <= nranks; rank++) {
    CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
    if (rank == victim && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) continue;
    if (status != 0) fprintf(stderr, "seed %llu: rank %d ended with %x\n", seed, rank, status);
    failed |= status != 0;
  }
  if (failed) exit(1);
  close(id_pipe[0]), close(id_pipe[1]);
}

int main(int argc, char** argv) {
  unsigned long long first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  setenv("STRATA_INTER", "tcp", 1);
  for (seed = first; seed < first + seeds; seed++) one();
  printf("%llu seeds from %llu: a new process came in the place of the lost rank\n", seeds, first);
  return 0;
}
