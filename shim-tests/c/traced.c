/* Makes calls of all kinds and notes each in a file, MADE.RANK: communicator, what, count, type, operation, root or peer, in place.
   A test compares these with the trace. Started by `strata launch`, or alone for threads.
   usage: traced calls MADE | grid MADE | fails MADE | differs MADE | many MADE CALLS | threads MADE | forks CHILD */
#include "check.h"
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ELEMENTS = 1 << 16 };
static __thread FILE *made;
static __thread int nranks, rank;
static __thread float in[ELEMENTS], out[ELEMENTS];

static void note(const char *comm, const char *call, size_t count, const char *dtype, const char *op, int peer, int in_place) {
  CHECK(fprintf(made, "%s %s %zu %s %s %d %d\n", comm, call, count, dtype, op, peer, in_place) > 0 && !fflush(made));
}

/* Every collective once. */
static void collectives(ncclComm_t comm, const char *name, cudaStream_t stream, size_t count) {
  int n;
  OK(ncclCommCount(comm, &n));
  OK(ncclAllReduce(in, out, count, ncclFloat, ncclSum, comm, stream));
  note(name, "all_reduce", count, "float", "sum", -1, 0);
  OK(ncclAllReduce(out, out, count, ncclInt32, ncclMax, comm, stream));
  note(name, "all_reduce", count, "int32", "max", -1, 1);
  OK(ncclAllReduce(in, out, count, ncclDouble, ncclAvg, comm, stream));
  note(name, "all_reduce", count, "double", "avg", -1, 0);
  OK(ncclAllGather(in, out, count, ncclInt8, comm, stream));
  note(name, "all_gather", count, "int8", "-", -1, 0);
  OK(ncclReduceScatter(in, out, count, ncclInt64, ncclProd, comm, stream));
  note(name, "reduce_scatter", count, "int64", "prod", -1, 0);
  OK(ncclBroadcast(in, out, count, ncclFloat16, n - 1, comm, stream));
  note(name, "broadcast", count, "half", "-", n - 1, 0);
  OK(ncclReduce(in, out, count, ncclUint8, ncclMin, 0, comm, stream));
  note(name, "reduce", count, "uint8", "min", 0, 0);
  OK(ncclAlltoAll(in, out, count, ncclFloat, comm, stream));
  note(name, "all_to_all", count, "float", "-", -1, 0);
  OK(ncclGather(in, out, count, ncclFloat, 0, comm, stream));
  note(name, "gather", count, "float", "-", 0, 0);
  OK(ncclScatter(in, out, count, ncclFloat, n - 1, comm, stream));
  note(name, "scatter", count, "float", "-", n - 1, 0);
}

static void message(ncclComm_t comm, const char *name, int sends, int peer, size_t count, cudaStream_t stream) {
  if (sends) OK(ncclSend(in, count, ncclFloat, peer, comm, stream));
  else OK(ncclRecv(out, count, ncclFloat, peer, comm, stream));
  note(name, sends ? "send" : "recv", count, "float", "-", peer, 0);
}

/* Messages by themselves, around the ring; and with all ranks in one group, itself included. */
static void messages(ncclComm_t comm, const char *name, cudaStream_t stream, size_t count) {
  int n, me;
  OK(ncclCommCount(comm, &n));
  OK(ncclCommUserRank(comm, &me));
  if (n > 1) {
    int even = me % 2 == 0, right = (me + 1) % n, left = (me + n - 1) % n;
    if (n % 2 == 0) {
      message(comm, name, even, even ? right : left, count, stream);
      message(comm, name, !even, even ? left : right, count, stream);
    }
  }
  OK(ncclGroupStart());
  for (int peer = 0; peer < n; peer++) message(comm, name, 1, peer, count, stream), message(comm, name, 0, peer, count, stream);
  OK(ncclGroupEnd());
}

static void uneven(ncclComm_t comm, const char *name) {
  size_t counts[16];
  int n;
  OK(ncclCommCount(comm, &n));
  for (int i = 0; i < n; i++) counts[i] = 3 + i;
  OK(strataAllGatherV(in, out, counts, NULL, ncclFloat, comm, NULL));
  note(name, "all_gather", 3 + n - 1, "float", "-", -1, 0);
}

/* A communicator of the host of ranks 0 to 2, whose messages wait for nothing but their partners, on streams too. */
static void independent(ncclComm_t comm) {
  ncclUniqueId id;
  ncclComm_t host;
  strataStream_t stream;
  if (rank == 0) OK(strataGetUniqueId(&id));
  OK(ncclBroadcast(&id, &id, sizeof id, ncclInt8, 0, comm, NULL));
  note("world", "broadcast", sizeof id, "int8", "-", 0, rank == 0);
  if (rank == 3) return;
  OK(strataCommInitHost(&host, 3, id, rank, 0));
  OK(strataStreamCreate(&stream));
  for (int i = 0; i < 3; i++) {
    message(host, "host", 1, (rank + 1) % 3, 40000, stream);
    message(host, "host", 0, (rank + 2) % 3, 40000, stream);
    OK(ncclAllReduce(in, in, 9, ncclFloat, ncclSum, host, stream));
    note("host", "all_reduce", 9, "float", "sum", -1, 1);
  }
  OK(strataStreamSynchronize(stream));
  messages(host, "host", NULL, 6);
  OK(strataStreamDestroy(stream));
  OK(ncclCommDestroy(host));
}

static ncclComm_t world(void) {
  ncclComm_t comm;
  ncclUniqueId id;
  OK(strataGetWorldId(&id, &nranks, &rank));
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  return comm;
}

static void open_made(const char *path) {
  char name[4096];
  snprintf(name, sizeof name, "%s.%d", path, rank);
  CHECK((made = fopen(name, "w")));
}

static void calls(const char *path, int on_grid) {
  ncclComm_t comm = world(), half, alone;
  open_made(path);
  OK(ncclCommSplit(comm, rank % 2, 0, &half, NULL));
  OK(ncclCommSplit(comm, rank, 0, &alone, NULL));
  collectives(comm, "world", NULL, 64);
  collectives(half, "half", NULL, 32);
  collectives(alone, "alone", NULL, 16);
  collectives(comm, "world", NULL, 1000);
  /* Equal calls take the short path on a board, one in place where the other is not. */
  for (int i = 0; i < 6; i++) {
    OK(ncclAllReduce(in, i % 2 ? in : out, 8, ncclFloat, ncclSum, half, NULL));
    note("half", "all_reduce", 8, "float", "sum", -1, i % 2);
    OK(ncclAllReduce(in, out, 8, ncclFloat, ncclSum, alone, NULL));
    note("alone", "all_reduce", 8, "float", "sum", -1, 0);
    OK(ncclGroupStart());
    OK(ncclAllReduce(in, out, 8, ncclFloat, ncclSum, half, NULL));
    OK(ncclGroupEnd());
    note("half", "all_reduce", 8, "float", "sum", -1, 0);
  }
  messages(comm, "world", NULL, 10);
  messages(half, "half", NULL, 10000);
  uneven(comm, "world");
  if (!on_grid) independent(comm);
  /* One group on two communicators. */
  OK(ncclGroupStart());
  OK(ncclAllGather(in, out, 5, ncclFloat, comm, NULL));
  note("world", "all_gather", 5, "float", "-", -1, 0);
  OK(ncclAllReduce(in, in, 7, ncclFloat, ncclSum, half, NULL));
  note("half", "all_reduce", 7, "float", "sum", -1, 1);
  OK(ncclBroadcast(in, in, 5, ncclFloat, 0, comm, NULL));
  note("world", "broadcast", 5, "float", "-", 0, rank == 0);
  OK(ncclGroupEnd());
  strataStream_t stream;
  OK(strataStreamCreate(&stream));
  collectives(comm, "world", stream, 48);
  messages(half, "half", stream, 20);
  OK(strataStreamSynchronize(stream));
  /* What is not called: no elements, and what is refused. */
  OK(ncclAllReduce(in, out, 0, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclReduce(in, out, 1, ncclFloat, ncclSum, nranks, comm, NULL) == ncclInvalidArgument);
  /* A child writes no trace of its parent's. */
  pid_t child = fork();
  if (child == 0) exit(0);
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(ncclCommDestroy(half));
  OK(ncclCommDestroy(alone));
  collectives(comm, "world", NULL, 4);
  OK(strataStreamDestroy(stream));
  /* The world is left to the exit. */
}

/* Rank 1 ends; or calls something else, and all ranks have something to tell. */
static void fails(const char *path, int differs) {
  ncclComm_t comm = world();
  open_made(path);
  for (int i = 0; i < 3; i++) {
    OK(ncclAllReduce(in, out, 1000, ncclFloat, ncclSum, comm, NULL));
    note("world", "all_reduce", 1000, "float", "sum", -1, 0);
  }
  if (rank == 1 && differs) {
    CHECK(ncclAllReduce(in, out, 100, ncclFloat, ncclSum, comm, NULL) != ncclSuccess);
    note("world", "all_reduce", 100, "float", "sum", -1, 0);
  }
  if (rank == 1) _exit(0);
  ncclResult_t result = ncclAllGather(in, out, 100, ncclFloat, comm, NULL);
  note("world", "all_gather", 100, "float", "-", -1, 0);
  CHECK(result != ncclSuccess);
  /* As a program that is ended by its failure: nothing is written from here on. */
  _exit(0);
}

static void many(const char *path, int number) {
  ncclComm_t comm = world();
  open_made(path);
  for (int i = 0; i < number; i++) {
    OK(ncclAllReduce(in, out, 16, ncclFloat, ncclSum, comm, NULL));
    note("world", "all_reduce", 16, "float", "sum", -1, 0);
  }
  OK(ncclCommDestroy(comm));
}

/* A process with a trace, and a child of its with communicators of its own, whose number it notes. */
static void forks(const char *path) {
  ncclComm_t comm, own;
  OK(ncclCommInitAll(&comm, 1, NULL));
  for (int i = 0; i < 5; i++) OK(ncclAllReduce(in, out, 16, ncclFloat, ncclSum, comm, NULL));
  pid_t child = fork();
  if (child == 0) {
    OK(ncclCommInitAll(&own, 1, NULL));
    OK(ncclBroadcast(in, out, 3, ncclFloat, 0, own, NULL));
    OK(ncclCommDestroy(own));
    exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  OK(ncclCommDestroy(comm));
  FILE *file = fopen(path, "w");
  CHECK(file && fprintf(file, "%d", (int)child) > 0 && fclose(file) == 0);
}

static ncclUniqueId id;
static const char *path_of_threads;

static void *thread(void *number) {
  ncclComm_t comm;
  nranks = 3, rank = (int)(intptr_t)number;
  open_made(path_of_threads);
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  for (int i = 0; i < 20; i++) collectives(comm, "world", NULL, 10 + i);
  /* The short paths: equal calls on the board, in place and not, alone and in a group, and messages by themselves. */
  for (int i = 0; i < 12; i++) {
    OK(ncclAllReduce(in, i % 3 ? out : in, 8, ncclFloat, ncclSum, comm, NULL));
    note("world", "all_reduce", 8, "float", "sum", -1, i % 3 == 0);
    OK(ncclGroupStart());
    OK(ncclAllGather(rank == i % 3 ? out + 8 * rank : in, out, 8, ncclFloat, comm, NULL));
    OK(ncclGroupEnd());
    note("world", "all_gather", 8, "float", "-", -1, rank == i % 3);
    if (rank < 2) message(comm, "world", rank == i % 2, 1 - rank, i % 4 ? 8 : 20000, NULL);
  }
  OK(ncclCommDestroy(comm));
  return NULL;
}

int main(int argc, char **argv) {
  alarm(100);
  CHECK(argc > 2);
  if (!strcmp(argv[1], "calls") || !strcmp(argv[1], "grid")) calls(argv[2], argv[1][0] == 'g');
  else if (!strcmp(argv[1], "fails") || !strcmp(argv[1], "differs")) fails(argv[2], argv[1][0] == 'd');
  else if (!strcmp(argv[1], "forks")) forks(argv[2]);
  else if (!strcmp(argv[1], "many")) many(argv[2], atoi(argv[3]));
  else {
    pthread_t threads[3];
    path_of_threads = argv[2];
    OK(ncclGetUniqueId(&id));
    for (intptr_t i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, thread, (void *)i));
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], NULL));
  }
  return 0;
}
