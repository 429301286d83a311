/* Ranks in processes of their own: what a forked child may do, and what becomes of the others when one ends. */
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 3
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      _exit(1);                                                                                      \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

enum { DESTROYS, EXITS, DIES };

static void sum(ncclComm_t comm, int nranks) {
  int in = 1, out = 0;
  OK(ncclAllReduce(&in, &out, 1, ncclInt, ncclSum, comm, NULL));
  CHECK(out == nranks);
}

/* Every use of the parent's communicator is refused, a communicator of one's own works, and the end is an ordinary one. */
static void worker(ncclComm_t parents) {
  int value = 0, devices[2] = {0, 1};
  ncclResult_t state;
  ncclComm_t child = NULL, own[2];
  CHECK(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, parents, NULL) == ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(NULL), "forked") != NULL);
  CHECK(ncclCommGetAsyncError(parents, &state) == ncclInvalidUsage);
  CHECK(ncclCommSplit(parents, 0, 0, &child, NULL) == ncclInvalidUsage);
  CHECK(ncclCommDestroy(parents) == ncclInvalidUsage);
  CHECK(ncclCommAbort(parents) == ncclInvalidUsage);
  OK(ncclCommInitAll(own, 2, devices));
  OK(ncclCommDestroy(own[0]));
  exit(0); /* Without destroying own[1], and with the handlers that the parent registered. */
}

static void fork_a_worker(ncclComm_t comm) {
  int status;
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    alarm(60);
    worker(comm);
  }
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

/* One rank. The last one ends early, as `how` says, and closes its end of the pipe `over` by that; if it dies, not
   before the others have left their collective and with it their ends of `ready`. */
static void rank_main(int rank, ncclUniqueId id, int how, int over, const int* ready) {
  ncclComm_t comm;
  ncclResult_t state;
  int number = rank, got = -1;
  char byte;
  alarm(60);
  OK(ncclCommInitRank(&comm, RANKS, id, rank));
  sum(comm, RANKS);
  fork_a_worker(comm);
  sum(comm, RANKS);
  close(ready[1]);
  if (rank == RANKS - 1) {
    if (how == DESTROYS) OK(ncclCommDestroy(comm));
    if (how == DIES && read(ready[0], &byte, 1) == 0) _exit(0);
    exit(0);
  }
  CHECK(read(over, &byte, 1) == 0);
  if (how == DIES) {
    do OK(ncclCommGetAsyncError(comm, &state));
    while (state == ncclSuccess);
    CHECK(state == ncclRemoteError && ncclSend(&number, 1, ncclInt, 1 - rank, comm, NULL) == ncclRemoteError);
    CHECK(strstr(ncclGetLastError(NULL), "rank 2 ") != NULL);
    OK(ncclCommAbort(comm));
    exit(0);
  }
  for (int round = 0; round < 2; round++) { /* Time enough for bad news to come. */
    usleep(300000);
    OK(ncclGroupStart());
    OK(ncclSend(&number, 1, ncclInt, 1 - rank, comm, NULL));
    OK(ncclRecv(&got, 1, ncclInt, 1 - rank, comm, NULL));
    OK(ncclGroupEnd());
    CHECK(got == 1 - rank);
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
  }
  exit(0); /* Both of the others end without a word, too. */
}

static void play(int how, int one_node) {
  ncclUniqueId id;
  pid_t ranks[RANKS];
  int over[2], ready[2], status;
  OK(ncclGetUniqueId(&id));
  CHECK(pipe(over) == 0 && pipe(ready) == 0);
  for (int rank = 0; rank < RANKS; rank++) {
    ranks[rank] = fork();
    CHECK(ranks[rank] >= 0);
    if (ranks[rank] == 0) {
      char node[16];
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      snprintf(node, sizeof(node), "node%d", one_node ? 0 : rank);
      setenv("NCCL_HOSTID", node, 1);
      if (rank != RANKS - 1) close(over[1]);
      rank_main(rank, id, how, over[0], ready);
    }
  }
  close(over[0]);
  close(over[1]);
  close(ready[0]);
  close(ready[1]);
  for (int rank = 0; rank < RANKS; rank++) {
    CHECK(waitpid(ranks[rank], &status, 0) == ranks[rank]);
    if (status != 0) {
      fprintf(stderr, "how %d, one node %d: rank %d ended with status %#x\n", how, one_node, rank, status);
      exit(1);
    }
  }
}

int main(void) {
  alarm(110);
  for (int one_node = 0; one_node < 2; one_node++)
    for (int how = DESTROYS; how <= DIES; how++) play(how, one_node);
  return 0;
}
