/* strataCommAdapt: sums of ranks that go on without a lost one are multiplied for it, of all floats, in place and not, over one node and two;
   what it refuses. Each rank is a process, and the last one is killed. Data is on the host, or on the GPU of SOFT_DEVICE. */
#define _GNU_SOURCE
#include "places.h"

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#undef CHECK
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
#define SAYS(word) CHECK(strstr(ncclGetLastError(NULL), word) != NULL)

static int me = -1, nranks, nnodes;
static char in[8 * COUNT * MOST], out[8 * COUNT * MOST], expected[8 * COUNT];
/* The same where calls are made. */
static char *there_in, *there_out;
static strataStream_t stream;

/* A call that reads and writes `bytes` of the buffers. */
#define DONE(bytes, call)                              \
  do {                                                 \
    put(there_in, in, bytes), put(there_out, out, bytes); \
    OK(ended(comm, stream, call));                     \
    take(in, there_in, bytes), take(out, there_out, bytes); \
  } while (0)

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

/* The number `value`, a small power of two, in each type: what a sum of equal ones is exact in. */
static void put_number(void* at, ncclDataType_t type, int i, int value) {
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
  for (int t = 0; t < 4; t++) {
    int bytes = COUNT * sizes[t], all = bytes * nranks;
    ncclDataType_t type = types[t];
    for (int i = 0; i < COUNT * nranks; i++) put_number(in, type, i, 4);
    for (int i = 0; i < COUNT; i++) put_number(expected, type, i, 4 * (rescaled ? nranks : contributors));
    DONE(all, ncclAllReduce(there_in, there_out, COUNT, type, ncclSum, comm, stream));
    CHECK(memcmp(out, expected, bytes) == 0);
    DONE(all, ncclReduceScatter(there_in, there_out, COUNT, type, ncclSum, comm, stream));
    CHECK(memcmp(out, expected, bytes) == 0);
    DONE(all, ncclReduceScatter(there_in, there_in + me * bytes, COUNT, type, ncclSum, comm, stream));
    CHECK(memcmp(in + me * bytes, expected, bytes) == 0);
    for (int i = 0; i < COUNT; i++) put_number(in, type, i, 4);
    memset(out, 1, bytes);
    DONE(all, ncclReduce(there_in, there_out, COUNT, type, ncclSum, 0, comm, stream));
    if (me == 0) CHECK(memcmp(out, expected, bytes) == 0);
    else CHECK(out[0] == 1 && out[bytes - 1] == 1);
    DONE(all, ncclAllReduce(there_in, there_in, COUNT, type, ncclSum, comm, stream));
    CHECK(memcmp(in, expected, bytes) == 0);
    /* An average is one already, and a maximum is none. A half's average is of inputs that have been divided, and rounded. */
    for (int i = 0; i < COUNT; i++) put_number(in, type, i, 4), put_number(expected, type, i, 4);
    DONE(all, ncclAllReduce(there_in, there_out, COUNT, type, ncclAvg, comm, stream));
    if (type != ncclFloat16) CHECK(memcmp(out, expected, bytes) == 0);
    DONE(all, ncclAllReduce(there_in, there_out, COUNT, type, ncclMax, comm, stream));
    CHECK(memcmp(out, expected, bytes) == 0);
  }
}

static void rank_main(ncclUniqueId id, ncclUniqueId other) {
  ncclComm_t comm, mixed;
  char node[32];
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(100);
  snprintf(node, sizeof(node), "node%d", me * nnodes / nranks);
  setenv("NCCL_HOSTID", node, 1);
  open_place();
  there_in = place_for(sizeof in);
  there_out = place_for(sizeof out);
  if (is_on_device) stream = place_stream();
  OK(ncclCommInitRank(&comm, nranks, id, me));
  CHECK(strataCommAdapt(comm, "rescal=on") == ncclInvalidArgument);
  SAYS("did you mean rescale?");
  CHECK(strataCommAdapt(comm, "rescale") == ncclInvalidArgument);
  CHECK(strataCommAdapt(NULL, "rescale=on") == ncclInvalidArgument);
  CHECK(strataCommAdapt(comm, "late=drop") == ncclInvalidUsage);
  SAYS("with STRATA_LOST=continue");
  CHECK(strataCommAdapt(comm, me == 0 ? "rescale=on" : "") == ncclInvalidUsage);
  SAYS("different options");
  CHECK(strataCommAdapt(comm, me == 0 ? "late=drop" : "late=bring") == ncclInvalidUsage);
  SAYS("different options");
  sums(comm, nranks, 0);
  OK(strataCommAdapt(comm, "rescale=on"));
  sums(comm, nranks, 1);
  CHECK(ncclAllReduce(there_in, there_in, 1, ncclInt32, ncclSum, comm, stream) == ncclInvalidUsage);
  SAYS("int32");
  OK(ended(comm, stream, ncclAllReduce(there_in, there_in, 1, ncclInt32, ncclMax, comm, stream)));

  /* Who does not ask calls something else, and hears of it at once. */
  OK(ncclCommInitRank(&mixed, nranks, other, me));
  double begun = seconds();
  ncclResult_t result = me == 0 ? strataCommAdapt(mixed, "rescale=on")
                                : ended(mixed, stream, ncclAllReduce(there_in, there_in, 1, ncclFloat, ncclSum, mixed, stream));
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

  if (me == 0) {
    OK(ncclCommInitAll(&mixed, 1, NULL));
    OK(strataCommAdapt(mixed, "rescale=on"));
    OK(strataCommOnChange(mixed, NULL, NULL));
    OK(ncclCommDestroy(mixed));
  }

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
