/* Calls from where a program may hardly call: a signal handler that interrupts a call, a callback of a stream. And two
   ranks that wait for each other, which is to be said. */
#define _GNU_SOURCE
#include "watched_allocator.h"
#include <nccl.h>
#include <strata.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
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

static ncclComm_t comm;
static volatile sig_atomic_t handled;

static void abort_it(int number) {
  (void)number;
  in_handler = 1;
  OK(ncclCommAbort(comm));
  in_handler = 0;
  handled = 1;
}

/* Rank 0 waits for rank 1 in a receive and is interrupted; rank 1, in a receive or not yet, hears of it. */
static void interrupted(int rank, ncclUniqueId id) {
  int value = 0;
  ncclResult_t state = ncclSuccess;
  OK(ncclCommInitRank(&comm, 2, id, rank));
  if (rank == 0) {
    struct sigaction action = {.sa_handler = abort_it, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    pid_t parent = getpid(), killer = fork(); /* The main thread is the one that waits. */
    CHECK(killer >= 0);
    if (killer == 0) {
      usleep(300000);
      kill(parent, SIGUSR1);
      _exit(0);
    }
    CHECK(ncclRecv(&value, 1, ncclInt, 1, comm, NULL) == ncclRemoteError);
    CHECK(!uses); /* The receive may have been in the allocator. */
    CHECK(handled && strstr(ncclGetLastError(NULL), "rank 0 aborted") != NULL);
    CHECK(ncclCommAbort(comm) == ncclInvalidArgument);
    /* Another communicator works. */
    ncclComm_t alone;
    int device = 0;
    OK(ncclCommInitAll(&alone, 1, &device));
    OK(ncclCommDestroy(alone));
    return;
  }
  CHECK(ncclRecv(&value, 1, ncclInt, 0, comm, NULL) != ncclSuccess);
  CHECK(strstr(ncclGetLastError(NULL), "rank 0") != NULL && strstr(ncclGetLastError(NULL), "abort") != NULL);
  OK(ncclCommGetAsyncError(comm, &state));
  OK(ncclCommAbort(comm));
}

static int values[2] = {20, 22};
static ncclResult_t in_callback;
static char text[300];

static void calls(void* to) {
  usleep(100000); /* Until the next operation is queued. */
  in_callback = ncclAllReduce(values, to, 1, ncclInt, ncclSum, comm, NULL);
  snprintf(text, sizeof(text), "%s", ncclGetLastError(NULL));
}

static void called_back(int rank, ncclUniqueId id) {
  int first[2] = {-1, -1}, later[2] = {-1, -1};
  strataStream_t stream;
  OK(ncclCommInitRank(&comm, 2, id, rank));
  OK(strataStreamCreate(&stream));
  OK(strataStreamAddCallback(stream, calls, first));
  OK(ncclAllReduce(values, later, 2, ncclInt, ncclSum, comm, (cudaStream_t)stream));
  OK(strataStreamSynchronize(stream));
  CHECK(in_callback == ncclInvalidUsage && strstr(text, "callback") != NULL && first[0] == -1);
  CHECK(later[0] == 40 && later[1] == 44);
  OK(strataStreamDestroy(stream));
  OK(ncclCommDestroy(comm));
}

/* Both send 4 MB and then receive: as NCCL may, they wait for each other, and end with their time. */
static void both_send(int rank, ncclUniqueId id) {
  int* data = calloc(COUNT, sizeof(int));
  OK(ncclCommInitRank(&comm, 2, id, rank));
  CHECK(ncclSend(data, COUNT, ncclInt, 1 - rank, comm, NULL) != ncclSuccess);
  OK(ncclCommAbort(comm));
}

static void play(void (*body)(int, ncclUniqueId), int one_node) {
  ncclUniqueId id;
  pid_t ranks[2];
  int status, failed = 0;
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < 2; rank++) {
    ranks[rank] = fork();
    CHECK(ranks[rank] >= 0);
    if (ranks[rank] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(30);
      setenv("NCCL_HOSTID", one_node || rank == 0 ? "node0" : "node1", 1);
      body(rank, id);
      _exit(0);
    }
  }
  for (int rank = 0; rank < 2; rank++) {
    CHECK(waitpid(ranks[rank], &status, 0) == ranks[rank]);
    if (status != 0) fprintf(stderr, "rank %d: %s %d\n", rank, WIFSIGNALED(status) ? "signal" : "exit code",
                             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    failed |= status;
  }
  if (failed) exit(1);
}

/* What the ranks log goes to a file; the warning that names both calls must be in it once for each rank. */
static void mutual_sends(int one_node) {
  char name[] = "/tmp/strata-log-XXXXXX", line[1000];
  int fd = mkstemp(name), warnings = 0;
  CHECK(fd >= 0 && dup2(fd, 2) == 2);
  setenv("NCCL_DEBUG", "WARN", 1);
  setenv("STRATA_TIMEOUT_MS", "5000", 1);
  if (fork() == 0) {
    play(both_send, one_node);
    _exit(0);
  }
  int status;
  CHECK(wait(&status) > 0 && status == 0);
  FILE* log = fopen(name, "r");
  CHECK(log != NULL && unlink(name) == 0);
  while (fgets(line, sizeof(line), log) != NULL) {
    const char* calls = "in a send of 4194304 bytes to rank";
    char* first = strstr(line, calls);
    if (first != NULL && strstr(first + 1, calls) != NULL) warnings++;
  }
  fclose(log);
  if (warnings != 2) printf("%d warnings\n", warnings), exit(1);
}

int main(int argc, char** argv) {
  const char* which = argc > 1 ? argv[1] : "all";
  int all = strcmp(which, "all") == 0;
  for (int one_node = 0; one_node < 2; one_node++) {
    if (all || strcmp(which, "abort") == 0) play(interrupted, one_node);
    if (all || strcmp(which, "callback") == 0) play(called_back, one_node);
    if (all || strcmp(which, "sends") == 0) mutual_sends(one_node);
  }
  puts("ok");
  return 0;
}
