/* Two ranks of one node, each the first process of a PID namespace of its own, forked by a process that had used the
   library. With an argument /dev/shm is so small that the ranks cannot share memory there. */
#define _GNU_SOURCE
#include <nccl.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT (1 << 20)
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      _exit(1);                                                                                      \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static void rank_main(int rank, ncclUniqueId id) {
  ncclComm_t comm;
  int *mine = malloc(COUNT * sizeof(int)), *got = malloc(COUNT * sizeof(int)), *shared = NULL;
  alarm(60);
  CHECK(getpid() == 1 && mine != NULL && got != NULL);
  OK(ncclCommInitRank(&comm, 2, id, rank));
  OK(ncclMemAlloc((void**)&shared, COUNT * sizeof(int)));
  for (int i = 0; i < COUNT; i++) {
    mine[i] = shared[i] = rank * COUNT + i;
    got[i] = -1;
  }
  /* Ordinary memory, then shared memory, then a collective over each. */
  for (int round = 0; round < 2; round++) {
    int* from = round ? shared : mine;
    OK(ncclGroupStart());
    OK(ncclSend(from, COUNT, ncclInt, 1 - rank, comm, NULL));
    OK(ncclRecv(got, COUNT, ncclInt, 1 - rank, comm, NULL));
    OK(ncclGroupEnd());
    for (int i = 0; i < COUNT; i++) CHECK(got[i] == (1 - rank) * COUNT + i);
    OK(ncclAllReduce(from, got, COUNT, ncclInt, ncclSum, comm, NULL));
    for (int i = 0; i < COUNT; i++) CHECK(got[i] == COUNT + 2 * i);
    for (int count = 1; count <= COUNT / 4; count *= 16) {
      OK(ncclAllGather(from, got, count, ncclInt, comm, NULL));
      for (int i = 0; i < count; i++) CHECK(got[i] == i && got[count + i] == COUNT + i);
    }
  }
  OK(ncclMemFree(shared));
  OK(ncclCommDestroy(comm));
  _exit(0);
}

static void cannot(const char* what) {
  printf("SKIPPED: %s: %s\n", what, strerror(errno));
  exit(0);
}

/* Whether ranks share memory is seen in what they log. */
int main(int argc, char** argv) {
  ncclUniqueId id;
  ncclComm_t alone;
  int devices[1] = {0}, status;
  pid_t keepers[2];
  (void)argv;
  alarm(100);
  if (unshare(CLONE_NEWNS) != 0) cannot("no mount namespaces");
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) cannot("mounts stay shared");
  if (mount("tmpfs", "/dev/shm", "tmpfs", 0, argc > 1 ? "size=64k" : "size=64m") != 0) cannot("no tmpfs");
  OK(ncclCommInitAll(&alone, 1, devices));
  OK(ncclCommDestroy(alone));
  setenv("NCCL_HOSTID", "one-node", 1);
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < 2; rank++) {
    keepers[rank] = fork();
    CHECK(keepers[rank] >= 0);
    if (keepers[rank] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (unshare(CLONE_NEWPID) != 0) cannot("no PID namespaces");
      pid_t first = fork();
      CHECK(first >= 0);
      if (first == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        rank_main(rank, id);
      }
      CHECK(waitpid(first, &status, 0) == first);
      if (WIFSIGNALED(status)) fprintf(stderr, "rank %d was ended by signal %d\n", rank, WTERMSIG(status));
      _exit(status != 0);
    }
  }
  int failed = 0;
  for (int rank = 0; rank < 2; rank++) CHECK(waitpid(keepers[rank], &status, 0) == keepers[rank] && ((failed |= status), 1));
  if (failed) return 1;
  puts("ok");
  return 0;
}
