/* Equal calls again and again, as a training loop makes them, and what comes between: other sizes, roots and buffers, groups,
 * streams, messages, ranks that are late. All ranks draw the same calls from one seed; what each does alone, as being late, they
 * draw from another. Every result is compared with a formula.
 *
 * usage: repeated NRANKS SEED processes|threads */
#define _GNU_SOURCE
#include <nccl.h>
#include <pthread.h>
#include <strata.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      _exit(1);                                                                                      \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

enum { MOST = 200000, BATCHES = 60, COLLECTIVES = 9 };
/* Around what goes into a cache line, a page, an area; what is lent; several segments. */
static const size_t counts[] = {1, 2, 11, 12, 13, 100, 1023, 1024, 1025, 5000, 33000, 140001};

typedef struct {
  int rank, nranks;
  ncclComm_t comm, other;
  strataStream_t stream;
  int32_t *in, *out;
  uint64_t shared, own;
} Rank;

static uint64_t draw(uint64_t *seed) {
  *seed ^= *seed << 13, *seed ^= *seed >> 7, *seed ^= *seed << 17;
  return *seed;
}

static int32_t value(int rank, uint64_t call, size_t at) { return (int32_t)((rank + 1) * 1000003u + call * 7919u + at * 31u); }

static int32_t sum(int nranks, uint64_t call, size_t at) {
  uint32_t all = 0;
  for (int rank = 0; rank < nranks; rank++) all += (uint32_t)value(rank, call, at);
  return (int32_t)all;
}

static void be_late(Rank *me) {
  uint64_t how = draw(&me->own) % 64;
  struct timespec time = {0, how == 0 ? 20000000 : how < 4 ? 300000 : 0};
  if (time.tv_nsec) nanosleep(&time, NULL);
}

typedef struct {
  int kind, root, in_place, grouped, streamed, shift;
  size_t count;
} Call;

/* What a rank puts in and expects: the blocks of input and output. */
static void one(Rank *me, const Call *call, uint64_t number) {
  int n = me->nranks, r = me->rank, root = call->root, kind = call->kind, is_root = r == root;
  size_t count = call->count;
  int32_t *in = me->in + call->shift, *out = me->out + call->shift;
  size_t inputs = kind == 2 || kind == 5 || kind == 7 ? (size_t)n : 1, outputs = kind == 1 || kind == 5 || kind == 6 ? (size_t)n : 1;
  int32_t *send = in, *recv = out;
  if (call->in_place) {
    if (kind == 0) send = recv;
    if (kind == 1) send = out + (size_t)r * count;
    if (kind == 2) recv = in + (size_t)r * count;
    if ((kind == 3 || kind == 4) && is_root) send = recv;
    if (kind == 6 && is_root) send = out + (size_t)r * count;
    if (kind == 7 && is_root) recv = in + (size_t)r * count;
  }
  for (size_t i = 0; i < inputs * count; i++) send[i] = value(r, number, i);
  if (send != recv && kind != 2 && kind != 7 && !(call->in_place && (kind == 1 || kind == 6)))
    for (size_t i = 0; i < outputs * count; i++) recv[i] = -1;
  strataStream_t stream = call->streamed ? me->stream : NULL;
  if (call->grouped) OK(ncclGroupStart());
  if (call->grouped == 2) OK(ncclGroupStart());
  if (kind == 0) OK(ncclAllReduce(send, recv, count, ncclInt, ncclSum, me->comm, stream));
  if (kind == 1) OK(ncclAllGather(send, recv, count, ncclInt, me->comm, stream));
  if (kind == 2) OK(ncclReduceScatter(send, recv, count, ncclInt, ncclSum, me->comm, stream));
  if (kind == 3) OK(ncclBroadcast(send, recv, count, ncclInt, root, me->comm, stream));
  if (kind == 4) OK(ncclReduce(send, recv, count, ncclInt, ncclSum, root, me->comm, stream));
  if (kind == 5) OK(ncclAlltoAll(send, recv, count, ncclInt, me->comm, stream));
  if (kind == 6) OK(ncclGather(send, recv, count, ncclInt, root, me->comm, stream));
  if (kind == 7) OK(ncclScatter(send, recv, count, ncclInt, root, me->comm, stream));
  /* A ring of messages: ranks of even number send first, each by itself. */
  if (kind == 8 && n > 1) {
    int to = (r + 1) % n, from = (r + n - 1) % n;
    int both = call->grouped || (n % 2 && r == n - 1);
    if (both) OK(ncclGroupStart());
    if (r % 2 == 0) OK(ncclSend(send, count, ncclInt, to, me->comm, stream));
    OK(ncclRecv(recv, count, ncclInt, from, me->comm, stream));
    if (r % 2) OK(ncclSend(send, count, ncclInt, to, me->comm, stream));
    if (both) OK(ncclGroupEnd());
  }
  if (call->grouped == 2) OK(ncclGroupEnd());
  if (call->grouped) OK(ncclGroupEnd());
  if (call->streamed) OK(strataStreamSynchronize(me->stream));
  for (size_t i = 0; i < outputs * count; i++) {
    size_t block = i / count, at = i % count;
    int32_t expected = 0;
    if (kind == 0) expected = sum(n, number, i);
    if (kind == 1) expected = value((int)block, number, at);
    if (kind == 2) expected = sum(n, number, (size_t)r * count + at);
    if (kind == 3) expected = value(root, number, at);
    if (kind == 4) expected = is_root ? sum(n, number, at) : recv[i];
    if (kind == 5) expected = value((int)block, number, (size_t)r * count + at);
    if (kind == 6) expected = is_root ? value((int)block, number, at) : recv[i];
    if (kind == 7) expected = value(root, number, (size_t)r * count + at);
    if (kind == 8) expected = n > 1 ? value((r + n - 1) % n, number, at) : recv[i];
    if (recv[i] != expected) {
      fprintf(stderr, "rank %d of %d, call %llu, kind %d of %zu at root %d, in place %d, grouped %d, on a stream %d: [%zu] is %d, not %d\n",
              r, n, (unsigned long long)number, kind, count, root, call->in_place, call->grouped, call->streamed, i, recv[i], expected);
      _exit(1);
    }
  }
}

static void play(Rank *me) {
  uint64_t number = 0;
  int32_t mine = 1, all = 0;
  for (int batch = 0; batch < BATCHES; batch++) {
    Call call = {0};
    call.kind = (int)(draw(&me->shared) % COLLECTIVES);
    call.root = (int)(draw(&me->shared) % (uint64_t)me->nranks);
    call.count = counts[draw(&me->shared) % (sizeof counts / sizeof *counts)];
    call.grouped = (int)(draw(&me->shared) % 4);
    if (call.grouped == 3) call.grouped = 0;
    call.streamed = draw(&me->shared) % 8 == 0;
    int times = 1 + (int)(draw(&me->shared) % 12);
    for (int i = 0; i < times; i++) {
      call.in_place = call.kind < 5 || call.kind == 6 || call.kind == 7 ? (int)(draw(&me->shared) % 2) : 0;
      call.shift = (int)(draw(&me->shared) % 5);
      be_late(me);
      one(me, &call, ++number);
    }
    /* Another communicator of the same ranks, and groups of several calls. */
    if (draw(&me->shared) % 3 == 0) {
      OK(ncclAllReduce(&mine, &all, 1, ncclInt, ncclSum, me->other, NULL));
      CHECK(all == me->nranks);
    }
    if (draw(&me->shared) % 3 == 0) {
      int32_t again = 0;
      OK(ncclGroupStart());
      OK(ncclAllReduce(&mine, &all, 1, ncclInt, ncclSum, me->comm, NULL));
      OK(ncclAllReduce(&mine, &again, 1, ncclInt, ncclMax, me->comm, NULL));
      OK(ncclGroupEnd());
      CHECK(all == me->nranks && again == 1);
    }
    if (batch == BATCHES / 2) {
      OK(ncclCommSuspend(me->other, 1));
      CHECK(ncclAllReduce(&mine, &all, 1, ncclInt, ncclSum, me->other, NULL) == ncclInvalidUsage);
      OK(ncclCommResume(me->other));
    }
  }
  CHECK(ncclAllReduce(NULL, &all, 1, ncclInt, ncclSum, me->comm, NULL) == ncclInvalidArgument);
  CHECK(ncclAllReduce(&mine, &all, 1, ncclInt, 77, me->comm, NULL) == ncclInvalidArgument);
}

static ncclUniqueId ids[2];
static int nranks;
static uint64_t seed;

/* More shapes of calls than are kept are learnt, in groups that are forgotten, while a call on a stream waits for a late rank. */
static void many_shapes(Rank *me) {
  enum { KNOWN = 32, MORE = 40, LATE_MS = 300 };
  int32_t *in = me->in, *out = me->out, *other = out + 400;
  for (size_t i = 0; i < 400; i++) in[i] = value(me->rank, 1, i);
  for (size_t shape = 0; shape < KNOWN; shape++) OK(ncclAllReduce(in, out, 100 + shape, ncclInt, ncclSum, me->comm, NULL));
  for (size_t shape = 0; shape < KNOWN; shape += 9) {
    memset(out, 0xff, 400 * sizeof *out);
    struct timespec late = {0, LATE_MS * 1000000}, begun, time;
    if (me->rank == me->nranks - 1) nanosleep(&late, NULL);
    OK(ncclAllReduce(in, out, 100 + shape, ncclInt, ncclSum, me->comm, me->stream));
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (size_t more = 0;; more++) {
      OK(ncclGroupStart());
      OK(ncclAllReduce(in, other, 200 + more % MORE, ncclInt, ncclSum, me->comm, NULL));
      OK(ncclGroupSimulateEnd(NULL));
      clock_gettime(CLOCK_MONOTONIC, &time);
      if ((time.tv_sec - begun.tv_sec) * 1000 + (time.tv_nsec - begun.tv_nsec) / 1000000 > LATE_MS * 5 / 6) break;
    }
    OK(strataStreamSynchronize(me->stream));
    for (size_t i = 0; i < 100 + shape; i++) CHECK(out[i] == sum(me->nranks, 1, i));
  }
}

/* Groups of one known call, of two communicators in turn, with more shapes than are kept; one is suspended between two of them. */
static void groups_of_one(Rank *me) {
  for (int round = 0; round < 40; round++) {
    ncclComm_t comm = round / 2 % 2 ? me->other : me->comm;
    size_t count = 1 + (size_t)(round / 4 % 10);
    for (size_t i = 0; i < count; i++) me->in[i] = value(me->rank, (uint64_t)round, i);
    OK(ncclAllReduce(me->in, me->out, count, ncclInt, ncclSum, comm, NULL));
    for (int again = 0; again < 3; again++) {
      int32_t *out = me->out + 16 * again;
      memset(out, 0xff, 16 * sizeof *out);
      OK(ncclGroupStart());
      OK(ncclAllReduce(me->in, out, count, ncclInt, ncclSum, comm, NULL));
      CHECK(out[0] == -1);
      OK(ncclGroupEnd());
      for (size_t i = 0; i < 16; i++) CHECK(out[i] == (i < count ? sum(me->nranks, (uint64_t)round, i) : -1));
      OK(ncclGroupStart());
      OK(ncclGroupEnd());
    }
    if (round % 4 != 3) continue;
    OK(ncclCommSuspend(comm, 1));
    OK(ncclGroupStart());
    CHECK(ncclAllReduce(me->in, me->out, count, ncclInt, ncclSum, comm, NULL) == ncclInvalidUsage);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    OK(ncclCommResume(comm));
  }
}

/* A short call that is known, in one group with the end of another communicator: both happen, also where the thread then ends. */
static void *end_in_group(void *argument) {
  Rank *me = argument;
  int32_t mine = 1, all = 0;
  for (int i = 0; i < 3; i++) OK(ncclAllReduce(&mine, &all, 1, ncclInt, ncclSum, me->comm, NULL));
  OK(ncclGroupStart());
  OK(ncclCommDestroy(me->other));
  OK(ncclAllReduce(&mine, &all, 1, ncclInt, ncclSum, me->comm, NULL));
  OK(ncclGroupEnd());
  CHECK(all == me->nranks);
  return NULL;
}

static void *rank_main(void *number) {
  Rank me = {.rank = (int)(intptr_t)number, .nranks = nranks, .shared = seed * 2 + 1};
  size_t ints = (size_t)nranks * MOST;
  int32_t all = 0, mine = 1;
  me.own = seed * 1000 + (uint64_t)me.rank + 1;
  OK(ncclCommInitRank(&me.comm, nranks, ids[0], me.rank));
  OK(ncclCommInitRank(&me.other, nranks, ids[1], me.rank));
  OK(strataStreamCreate(&me.stream));
  /* Every second rank has memory that others can map. */
  if ((me.rank + (int)seed) % 2) {
    OK(ncclMemAlloc((void **)&me.in, ints * sizeof(int32_t)));
    OK(ncclMemAlloc((void **)&me.out, ints * sizeof(int32_t)));
  } else {
    me.in = malloc(ints * sizeof(int32_t)), me.out = malloc(ints * sizeof(int32_t));
    CHECK(me.in && me.out);
  }
  play(&me);
  many_shapes(&me);
  groups_of_one(&me);
  /* An all-to-all has no in-place form, be it known or not. */
  for (int i = 0; i < 3 && nranks > 1; i++) {
    CHECK(ncclAlltoAll(me.in, me.in, 4, ncclInt, me.comm, NULL) == ncclInvalidArgument);
    CHECK(ncclAlltoAll(me.in, me.in + 1, 4, ncclInt, me.comm, NULL) == ncclInvalidArgument);
    OK(ncclAlltoAll(me.in, me.out, 4, ncclInt, me.comm, NULL));
  }
  pthread_t ending;
  CHECK(pthread_create(&ending, NULL, end_in_group, &me) == 0);
  CHECK(pthread_join(ending, NULL) == 0);
  CHECK(ncclCommCount(me.other, &all) == ncclInvalidArgument);
  CHECK(ncclAllReduce(&mine, &all, 1, ncclInt, ncclSum, me.other, NULL) == ncclInvalidArgument);
  OK(ncclAllReduce(&mine, &all, 1, ncclInt, ncclSum, me.comm, NULL));
  CHECK(all == nranks);
  OK(ncclCommDestroy(me.comm));
  OK(strataStreamDestroy(me.stream));
  return NULL;
}

int main(int argc, char **argv) {
  int failed = 0, status;
  CHECK(argc == 4);
  nranks = atoi(argv[1]), seed = (uint64_t)atoll(argv[2]);
  alarm(120);
  OK(ncclGetUniqueId(&ids[0]));
  OK(ncclGetUniqueId(&ids[1]));
  if (strcmp(argv[3], "threads") == 0) {
    pthread_t threads[16];
    for (int rank = 0; rank < nranks; rank++) CHECK(pthread_create(&threads[rank], NULL, rank_main, (void *)(intptr_t)rank) == 0);
    for (int rank = 0; rank < nranks; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
    return 0;
  }
  pid_t ranks[16];
  for (int rank = 0; rank < nranks; rank++) {
    ranks[rank] = fork();
    CHECK(ranks[rank] >= 0);
    if (ranks[rank] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(120);
      rank_main((void *)(intptr_t)rank);
      _exit(0);
    }
  }
  for (int rank = 0; rank < nranks; rank++) {
    CHECK(waitpid(ranks[rank], &status, 0) == ranks[rank]);
    if (status) fprintf(stderr, "rank %d: %s %d\n", rank, WIFSIGNALED(status) ? "signal" : "exit code", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    failed |= status;
  }
  return failed != 0;
}
