/* Windows: what they hold back, what closes them, and what is refused in them. Ranks are threads.
   usage: windows bytes | time | revoked | streams | one-thread | refused | differ-time | differ-bytes | abort | shrunk */
#include "seeded.h"

enum { CALLS = 6, COUNT = 4, BYTES = COUNT * sizeof(int) };

typedef struct {
  ncclComm_t comm;
  int rank, in[CALLS][COUNT], out[CALLS][COUNT];
} Member;

static void join(Member *member, int rank) {
  *member = (Member){.rank = rank};
  for (int i = 0; i < CALLS; i++)
    for (int k = 0; k < COUNT; k++) member->in[i][k] = rank + 10 * i + k;
  OK(ncclCommInitRank(&member->comm, nranks, id, rank));
}

static ncclResult_t call(Member *member, int i, strataStream_t stream) {
  return ncclAllReduce(member->in[i], member->out[i], COUNT, ncclInt, ncclSum, member->comm, stream);
}

/* Whether calls up to this one have their results, and those after it have nothing. */
static int done(const Member *member, int calls) {
  for (int i = 0; i < CALLS; i++)
    for (int k = 0; k < COUNT; k++) {
      int sum = nranks * (nranks - 1) / 2 + nranks * (10 * i + k);
      if (((const volatile int *)member->out[i])[k] != (i < calls ? sum : 0)) return 0;
    }
  return 1;
}

/* Until the calls have their results without anybody's doing. */
static void await(const Member *member, int calls) {
  for (int ms = 0; !done(member, calls); ms++) {
    CHECK(ms < 20000);
    usleep(1000);
  }
}

/* The third call fills the window. On the null stream it returns when all that was held back has ended. */
static void *bytes(void *argument) {
  Member member;
  join(&member, (int)(intptr_t)argument);
  OK(strataWindowBegin(member.comm, 3 * BYTES, 0));
  for (int i = 0; i < 5; i++) {
    OK(call(&member, i, NULL));
    CHECK(done(&member, i < 2 ? 0 : 3));
  }
  OK(strataWindowEnd(member.comm));
  CHECK(done(&member, 5));
  /* Without a window calls are as they were. */
  OK(call(&member, 5, NULL));
  CHECK(done(&member, 6));
  OK(ncclCommDestroy(member.comm));
  return NULL;
}

/* Time closes the window, though rank 1 comes late; then bytes do. */
static void *by_time(void *argument) {
  Member member;
  join(&member, (int)(intptr_t)argument);
  OK(strataWindowBegin(member.comm, 3 * BYTES, 2000));
  OK(call(&member, 0, NULL));
  if (member.rank == 1) usleep(30000);
  await(&member, 1);
  OK(strataWindowEnd(member.comm));
  /* An hour does not pass here. */
  OK(strataWindowBegin(member.comm, 3 * BYTES, 3600000000u));
  for (int i = 1; i < 4; i++) OK(call(&member, i, NULL));
  await(&member, 4);
  OK(call(&member, 4, NULL));
  OK(strataWindowEnd(member.comm));
  CHECK(done(&member, 5));
  /* An empty one. */
  OK(strataWindowBegin(member.comm, 0, 100));
  OK(strataWindowEnd(member.comm));
  /* What its closings were told over ends with it once, however it ends. */
  OK(ncclCommFinalize(member.comm));
  OK(ncclCommDestroy(member.comm));
  return NULL;
}

static void *revoked(void *argument) {
  Member member;
  join(&member, (int)(intptr_t)argument);
  OK(strataWindowBegin(member.comm, 0, 100));
  OK(call(&member, 0, NULL));
  OK(strataWindowEnd(member.comm));
  CHECK(done(&member, 1));
  OK(ncclCommRevoke(member.comm, 0));
  OK(ncclCommDestroy(member.comm));
  return NULL;
}

/* What is held back is on no stream; at the end it is on its own. */
static void *streams(void *argument) {
  Member member;
  strataStream_t one, other;
  join(&member, (int)(intptr_t)argument);
  OK(strataStreamCreate(&one));
  OK(strataStreamCreate(&other));
  for (unsigned us = 0; us <= 1000000; us += 1000000) {
    memset(member.out, 0, sizeof member.out);
    OK(strataWindowBegin(member.comm, 0, us));
    for (int i = 0; i < 3; i++) OK(call(&member, i, i % 2 ? one : other));
    OK(strataStreamSynchronize(one));
    OK(strataStreamSynchronize(other));
    CHECK(done(&member, 0));
    OK(strataWindowEnd(member.comm));
    OK(strataStreamSynchronize(one));
    OK(strataStreamSynchronize(other));
    CHECK(done(&member, 3));
  }
  OK(ncclCommDestroy(member.comm));
  OK(strataStreamDestroy(one));
  OK(strataStreamDestroy(other));
  return NULL;
}

/* One thread has all ranks: each step is a group. */
static void one_thread(void) {
  static Member members[3];
  for (unsigned us = 0; us <= 1000000; us += 1000000) {
    OK(ncclGroupStart());
    for (int rank = 0; rank < nranks; rank++) join(&members[rank], rank);
    OK(ncclGroupEnd());
    OK(ncclGroupStart());
    for (int rank = 0; rank < nranks; rank++) OK(strataWindowBegin(members[rank].comm, 2 * BYTES, us));
    OK(ncclGroupEnd());
    for (int i = 0; i < 3; i++) {
      OK(ncclGroupStart());
      for (int rank = 0; rank < nranks; rank++) OK(call(&members[rank], i, NULL));
      OK(ncclGroupEnd());
    }
    if (!us) CHECK(done(&members[0], 2) && done(&members[2], 2));
    OK(ncclGroupStart());
    for (int rank = 0; rank < nranks; rank++) OK(strataWindowEnd(members[rank].comm));
    OK(ncclGroupEnd());
    for (int rank = 0; rank < nranks; rank++) CHECK(done(&members[rank], 3));
    OK(ncclGroupStart());
    for (int rank = 0; rank < nranks; rank++) OK(ncclCommDestroy(members[rank].comm));
    OK(ncclGroupEnd());
    OK(ncclGetUniqueId(&id));
  }
}

static void refuses(ncclResult_t result, const char *why) {
  CHECK(result == ncclInvalidUsage);
  if (!strstr(strataGetLastError(), why)) fprintf(stderr, "%s\n", strataGetLastError()), exit(1);
}

static void *refused(void *argument) {
  Member member;
  join(&member, (int)(intptr_t)argument);
  refuses(strataWindowEnd(member.comm), "no window is open");
  for (unsigned us = 0; us <= 1000000; us += 1000000) {
    OK(strataWindowBegin(member.comm, 0, us));
    OK(call(&member, 0, NULL));
    refuses(strataWindowBegin(member.comm, 0, us), "a window is open");
    refuses(ncclSend(member.in, 1, ncclInt, (member.rank + 1) % nranks, member.comm, NULL), "strataWindowEnd comes first");
    refuses(ncclCommFinalize(member.comm), "strataWindowEnd comes first");
    refuses(ncclCommDestroy(member.comm), "strataWindowEnd comes first");
    refuses(ncclCommSuspend(member.comm, NCCL_SUSPEND_MEM), "strataWindowEnd comes first");
    /* A call that is refused is not in the window. */
    CHECK(ncclAllReduce(NULL, member.out[1], COUNT, ncclInt, ncclSum, member.comm, NULL) == ncclInvalidArgument);
    OK(strataWindowEnd(member.comm));
    CHECK(done(&member, 1));
  }
  CHECK(strataWindowBegin(NULL, 0, 0) == ncclInvalidArgument && strataWindowEnd(NULL) == ncclInvalidArgument);
  OK(ncclCommDestroy(member.comm));
  return NULL;
}

static int told;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t barrier;

/* Rank 1 makes fewer calls: all are told, and who made which. */
static void *differ(int rank, unsigned us, const char *why) {
  Member member;
  join(&member, rank);
  OK(strataWindowBegin(member.comm, 0, us));
  for (int i = 0; i < (rank == 1 ? 2 : 3); i++) OK(call(&member, i, NULL));
  ncclResult_t result = strataWindowEnd(member.comm);
  pthread_mutex_lock(&lock);
  if (result != ncclSuccess) {
    printf("rank %d: %s\n", rank, strataGetLastError());
    if (strstr(strataGetLastError(), why)) told++;
  }
  pthread_mutex_unlock(&lock);
  CHECK(result != ncclSuccess);
  OK(ncclCommAbort(member.comm));
  return NULL;
}

static void *differ_bytes(void *argument) { return differ((int)(intptr_t)argument, 0, "a group's calls of"); }
static void *differ_time(void *argument) { return differ((int)(intptr_t)argument, 1000000, "calls in a window, rank 1 made 2"); }

/* A rank aborts with calls held back; the others wait for it in vain and hear why. */
static void *aborts(void *argument) {
  for (unsigned us = 0; us <= 1000; us += 1000) {
    Member member;
    join(&member, (int)(intptr_t)argument);
    OK(strataWindowBegin(member.comm, 0, us ? 3600000000u : 0));
    OK(call(&member, 0, NULL));
    if (member.rank != 1) {
      ncclResult_t result = strataWindowEnd(member.comm);
      CHECK(result == ncclRemoteError || result == ncclInvalidUsage);
    }
    OK(ncclCommAbort(member.comm));
    if (pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD) OK(ncclGetUniqueId(&id));
    pthread_barrier_wait(&barrier);
  }
  return NULL;
}

/* A rank leaves while another one is in a window that time may close, whose end waits for a third one's word; who has heard of it
   shrinks the communicator, and the one in the window hears of it too. */
static void *shrunk(void *argument) {
  Member member;
  join(&member, (int)(intptr_t)argument);
  for (int i = 0; i < 2; i++) {
    OK(strataWindowBegin(member.comm, 0, 1000));
    OK(call(&member, i, NULL));
    OK(strataWindowEnd(member.comm));
  }
  if (member.rank == 1) {
    OK(strataWindowBegin(member.comm, 0, 1000));
    OK(call(&member, 2, NULL));
  }
  pthread_barrier_wait(&barrier);
  if (member.rank == 2) {
    OK(ncclCommAbort(member.comm));
    return NULL;
  }
  CHECK(member.rank == 1 || call(&member, 2, NULL) == ncclRemoteError);
  ncclResult_t result = member.rank == 1 ? strataWindowEnd(member.comm) : strataWindowBegin(member.comm, 0, 1000);
  CHECK(result == ncclRemoteError || result == ncclInvalidUsage);
  ncclComm_t smaller;
  int gone = 2, in = member.rank + 1, out = 0;
  OK(ncclCommShrink(member.comm, &gone, 1, &smaller, NULL, NCCL_SHRINK_ABORT));
  OK(ncclAllReduce(&in, &out, 1, ncclInt, ncclSum, smaller, NULL));
  CHECK(out == 3);
  OK(ncclCommDestroy(smaller));
  OK(ncclCommAbort(member.comm));
  return NULL;
}

int main(int argc, char **argv) {
  alarm(100);
  CHECK(argc > 1);
  OK(ncclGetUniqueId(&id));
  nranks = 3, nnodes = 1;
  /* What a program's broadcasts are to go by says nothing of the words that close windows. */
  setenv("STRATA_BROADCAST_ALGO", "provider:none_such", 1);
  CHECK(!pthread_barrier_init(&barrier, NULL, (unsigned)nranks));
  const char *what = argv[1];
  if (!strcmp(what, "one-thread")) one_thread();
  else if (!strcmp(what, "bytes")) in_threads(bytes);
  else if (!strcmp(what, "time")) in_threads(by_time);
  else if (!strcmp(what, "revoked")) in_threads(revoked);
  else if (!strcmp(what, "streams")) in_threads(streams);
  else if (!strcmp(what, "refused")) in_threads(refused);
  else if (!strcmp(what, "differ-time")) in_threads(differ_time);
  else if (!strcmp(what, "differ-bytes")) in_threads(differ_bytes);
  else if (!strcmp(what, "abort")) in_threads(aborts);
  else if (!strcmp(what, "shrunk")) in_threads(shrunk);
  else return 2;
  CHECK(strncmp(what, "differ", 6) || told > 0);
  printf("windows: %s\n", what);
  return 0;
}
