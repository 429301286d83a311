/* Windows that time closes, beside calls and windows of another communicator on the same stream. When such a window closes is another
   moment on each rank; what runs on the stream is in one order all the same. Each rank is a process; data is on the host, or on the
   GPU of SOFT_DEVICE. */
#define _GNU_SOURCE
#include "places.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

enum { RANKS = 3, CALLS = 20, COUNT = 64, ROUNDS = 4 };

static int me;

/* Computing that takes another time on each rank. */
static void dawdle(void) {
  if (rand() % 3 == 0) usleep((useconds_t)(rand() % 300));
}

static void rounds(ncclComm_t one, ncclComm_t other, int both) {
  static float in[2][CALLS][COUNT], out[2][CALLS][COUNT];
  float *there = place_for(sizeof in);
  strataStream_t stream = place_stream();
  for (int round = 0; round < ROUNDS; round++) {
    for (int which = 0; which < 2; which++)
      for (int i = 0; i < CALLS; i++)
        for (int k = 0; k < COUNT; k++) in[which][i][k] = (float)(me + i + 7 * which + round);
    put(there, in, sizeof in);
    OK(strataWindowBegin(one, round % 2 ? 10 * sizeof in[0][0] : 0, 200));
    if (both) OK(strataWindowBegin(other, 0, 150));
    for (int i = 0; i < CALLS; i++) {
      float *first = there + i * COUNT, *second = there + (CALLS + i) * COUNT;
      OK(ncclAllReduce(first, first, COUNT, ncclFloat, ncclSum, one, stream));
      OK(ncclAllReduce(second, second, COUNT, ncclFloat, ncclSum, other, stream));
      dawdle();
    }
    OK(strataWindowEnd(one));
    if (both) OK(strataWindowEnd(other));
    /* What the stream is given from here on comes after all calls: this one reads a result of the first communicator's. */
    OK(ncclAllReduce(there, there, COUNT, ncclFloat, ncclSum, other, stream));
    if (is_on_device) {
      OK(ended(one, stream, ncclSuccess));
      OK(ended(other, stream, ncclSuccess));
    } else OK(strataStreamSynchronize(stream));
    take(out, there, sizeof out);
    for (int which = 0; which < 2; which++)
      for (int i = 0; i < CALLS; i++)
        for (int k = 0; k < COUNT; k++) {
          int again = which == 0 && i == 0 ? RANKS : 1;
          CHECK(out[which][i][k] == again * (RANKS * (RANKS - 1) / 2 + RANKS * (i + 7 * which + round)));
        }
  }
}

int main(void) {
  ncclUniqueId id;
  pid_t pids[RANKS];
  int failed = 0, status;
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < RANKS; rank++) {
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (pids[rank] > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(60);
    me = rank;
    srand((unsigned)rank * 7 + 1);
    ncclComm_t one, other;
    open_place();
    OK(ncclCommInitRank(&one, RANKS, id, rank));
    OK(ncclCommSplit(one, 0, rank, &other, NULL));
    rounds(one, other, 0);
    rounds(one, other, 1);
    OK(ncclCommDestroy(other));
    OK(ncclCommDestroy(one));
    exit(0);
  }
  for (int rank = 0; rank < RANKS; rank++) {
    CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
    failed |= status;
  }
  CHECK(!failed);
  printf("windows of two communicators on one stream\n");
  return 0;
}
