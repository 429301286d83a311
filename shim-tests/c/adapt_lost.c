/* strataCommAdapt: sums of ranks that go on without a lost one are multiplied for it, of all floats, in place and not, over one node and two;
   what it refuses. Each rank is a process, and the last one is killed. */
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
#include <time.h>
#include <unistd.h>

#define MOST 5
#define COUNT 3000
#define CHECK(condition)                                                                                        \
  do {                                                                                                          \
    if (!(condition)) {                                                                                         \
      fprintf(stderr, "%d ranks on %d nodes, rank %d, line %d: %s (%s)\n", nranks, nnodes, me, __LINE__,        \
              #condition, ncclGetLastError(NULL));                                                              \
      _exit(1);                                                                                                 \
    }                                                                                                           \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)
#define SAYS(word) CHECK(strstr(ncclGetLastError(NULL), word) != NULL)

static int me = -1, nranks, nnodes;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

/* The number `value`, a small power of two, in each type: what a sum of equal ones is exact in. */
static void put(void* at, ncclDataType_t type, int i, int value) {
  double number = value;
  float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, 4);
  uint16_t bfloat = (uint16_t)(bits >> 16), half = 0;
  if (value) half = (uint16_t)((bits >> 23) - 127 + 15) << 10 | (uint16_t)(bits >> 13 & 0x3ff);
  switch (type) {
    case ncclFloat64: memcpy((char*)at + 8 * i, &number, 8); break;
    case ncclFloat32: memcpy((char*)at + 4 * i, &single, 4); break;
    case ncclBfloat16: memcpy((char*)at + 2 * i, &bfloat, 2); break;
    default: memcpy((char*)at + 2 * i, &half, 2);
  }
}

/* All ranks give 4, so with all of them the sum is 4 * nranks, and with fewer it is made so. */
static void sums(ncclComm_t comm, int contributors, int rescaled) {
  static const ncclDataType_t types[] = {ncclFloat64, ncclFloat32, ncclBfloat16, ncclFloat16};
  static const int sizes[] = {8, 4, 2, 2};
  static char in[8 * COUNT * MOST], out[8 * COUNT * MOST], expected[8 * COUNT];
  for (int t = 0; t < 4; t++) {
    int bytes = COUNT * sizes[t];
    for (int i = 0; i < COUNT * nranks; i++) put(in, types[t], i, 4);
    for (int i = 0; i < COUNT; i++) put(expected, types[t], i, 4 * (rescaled ? nranks : contributors));
    OK(ncclAllReduce(in, out, COUNT, types[t], ncclSum, comm, NULL));
    CHECK(memcmp(out, expected, bytes) == 0);
    OK(ncclReduceScatter(in, out, COUNT, types[t], ncclSum, comm, NULL));
    CHECK(memcmp(out, expected, bytes) == 0);
    OK(ncclReduceScatter(in, in + me * bytes, COUNT, types[t], ncclSum, comm, NULL));
    CHECK(memcmp(in + me * bytes, expected, bytes) == 0);
    for (int i = 0; i < COUNT; i++) put(in, types[t], i, 4);
    memset(out, 1, bytes);
    OK(ncclReduce(in, out, COUNT, types[t], ncclSum, 0, comm, NULL));
    if (me == 0) CHECK(memcmp(out, expected, bytes) == 0);
    else CHECK(out[0] == 1 && out[bytes - 1] == 1);
    OK(ncclAllReduce(in, in, COUNT, types[t], ncclSum, comm, NULL));
    CHECK(memcmp(in, expected, bytes) == 0);
    /* An average is one already, and a maximum is none. A half's average is of inputs that have been divided, and rounded. */
    for (int i = 0; i < COUNT; i++) put(in, types[t], i, 4), put(expected, types[t], i, 4);
    OK(ncclAllReduce(in, out, COUNT, types[t], ncclAvg, comm, NULL));
    if (types[t] != ncclFloat16) CHECK(memcmp(out, expected, bytes) == 0);
    OK(ncclAllReduce(in, out, COUNT, types[t], ncclMax, comm, NULL));
    CHECK(memcmp(out, expected, bytes) == 0);
  }
}

static void rank_main(ncclUniqueId id, ncclUniqueId other) {
  ncclComm_t comm, mixed;
  char node[32];
  float number = 1;
  int32_t integer = 1;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(100);
  snprintf(node, sizeof(node), "node%d", me * nnodes / nranks);
  setenv("NCCL_HOSTID", node, 1);
  OK(ncclCommInitRank(&comm, nranks, id, me));
  CHECK(strataCommAdapt(comm, "rescal=on") == ncclInvalidArgument);
  SAYS("did you mean rescale?");
  CHECK(strataCommAdapt(comm, "rescale") == ncclInvalidArgument);
  CHECK(strataCommAdapt(NULL, "rescale=on") == ncclInvalidArgument);
  CHECK(strataCommAdapt(comm, me == 0 ? "rescale=on" : "") == ncclInvalidUsage);
  SAYS("different options");
  sums(comm, nranks, 0);
  OK(strataCommAdapt(comm, "rescale=on"));
  sums(comm, nranks, 1);
  CHECK(ncclAllReduce(&integer, &integer, 1, ncclInt32, ncclSum, comm, NULL) == ncclInvalidUsage);
  SAYS("int32");
  OK(ncclAllReduce(&integer, &integer, 1, ncclInt32, ncclMax, comm, NULL));

  /* Who does not ask calls something else, and hears of it at once. */
  OK(ncclCommInitRank(&mixed, nranks, other, me));
  double begun = seconds();
  ncclResult_t result = me == 0 ? strataCommAdapt(mixed, "rescale=on")
                                : ncclAllReduce(&number, &number, 1, ncclFloat, ncclSum, mixed, NULL);
  CHECK(result == ncclInvalidUsage || result == ncclRemoteError);
  CHECK(seconds() - begun < 10);
  OK(ncclCommAbort(mixed));

  if (me == nranks - 1) raise(SIGKILL);
  sums(comm, nranks - 1, 1);
  OK(strataCommAdapt(comm, NULL));
  sums(comm, nranks - 1, 0);
  OK(strataCommAdapt(comm, "rescale=off,rescale=on"));
  sums(comm, nranks - 1, 1);
  OK(ncclCommDestroy(comm));

  /* Where lost ranks end the communicator there is nothing to ask for. */
  setenv("STRATA_LOST", "fail", 1);
  if (me == 0) {
    OK(ncclCommInitAll(&mixed, 1, NULL));
    CHECK(strataCommAdapt(mixed, "rescale=on") == ncclInvalidUsage);
    SAYS("STRATA_LOST");
    OK(ncclCommDestroy(mixed));
  }
  _exit(0);
}

int main(void) {
  pid_t pids[MOST];
  int status, failed = 0;
  setenv("STRATA_LOST", "continue", 1);
  setenv("STRATA_INTER", "tcp", 1);
  for (nranks = 2; nranks <= MOST; nranks++) {
    ncclUniqueId id, other;
    nnodes = 1 + nranks % 2;
    OK(ncclGetUniqueId(&id));
    OK(ncclGetUniqueId(&other));
    for (int rank = 0; rank < nranks; rank++) {
      pids[rank] = fork();
      CHECK(pids[rank] >= 0);
      if (pids[rank] == 0) {
        me = rank;
        rank_main(id, other);
      }
    }
    for (int rank = 0; rank < nranks; rank++) {
      CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
      failed |= rank == nranks - 1 ? !WIFSIGNALED(status) : status != 0;
    }
    CHECK(!failed);
  }
  printf("sums of 2 to %d ranks are as if nobody had been lost\n", MOST);
  return 0;
}
