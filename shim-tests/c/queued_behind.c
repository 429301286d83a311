/* One rank dies and another one does not call: what the third has queued fails together, after one time-out (STRATA_LOST=continue). */
#define _GNU_SOURCE
#include "check.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define QUEUED 6
#define SECONDS 3

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

static void rank_main(ncclUniqueId id, int me) {
  static float numbers[QUEUED][100];
  ncclComm_t comm;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(100);
  OK(ncclCommInitRank(&comm, 3, id, me));
  OK(ncclAllReduce(numbers[0], numbers[0], 100, ncclFloat, ncclSum, comm, NULL));
  if (me == 2) raise(SIGKILL);
  if (me == 1) pause();
  double begun = seconds();
  OK(ncclGroupStart());
  for (int i = 0; i < QUEUED; i++)
    OK(ncclAllReduce(numbers[i], numbers[i], 100 - i, ncclFloat, i % 2 ? ncclMax : ncclSum, comm, NULL));
  CHECK(ncclGroupEnd() != ncclSuccess);
  double took = seconds() - begun;
  printf("%d calls of a group failed after %.1f s, where one waits for %d\n", QUEUED, took, SECONDS);
  CHECK(took < 3 * SECONDS);
  CHECK(ncclAllReduce(numbers[0], numbers[0], 100, ncclFloat, ncclSum, comm, NULL) != ncclSuccess);
  CHECK(seconds() - begun < 3 * SECONDS);
  OK(ncclCommAbort(comm));
  fflush(stdout);
  _exit(0);
}

int main(void) {
  char limit[16];
  ncclUniqueId id;
  pid_t pids[3];
  int status;
  snprintf(limit, sizeof(limit), "%d", SECONDS * 1000);
  setenv("STRATA_LOST", "continue", 1);
  setenv("STRATA_TIMEOUT_MS", limit, 1);
  setenv("STRATA_BOOTSTRAP_TIMEOUT_MS", limit, 1);
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < 3; rank++) {
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (pids[rank] == 0) rank_main(id, rank);
  }
  CHECK(waitpid(pids[0], &status, 0) == pids[0]);
  kill(pids[1], SIGKILL);
  waitpid(pids[1], NULL, 0), waitpid(pids[2], NULL, 0);
  return status == 0 ? 0 : 1;
}
