/* RCCL's calls for programs in MSCCL's XML, used wrongly, on ranks that are threads: `script_attacks FOLDER WORK`, FOLDER being
   shim-tests/scripts and WORK a folder for files of its own. Each wrong call ends with a code and a text on every rank, and
   what comes after it is right. Needs a library under RCCL's name. */
#include <pthread.h>
#include <rccl/rccl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(condition)                                                                                           \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));                         \
      _exit(1);                                                                                                    \
    }                                                                                                              \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

enum { RANKS = 4, COUNT = 100003, ROUNDS = 20 };
static ncclUniqueId ids[5];
static const char *folder, *work;
static pthread_barrier_t met;
static mscclAlgoHandle_t shared;

static const char *path(char *room, const char *from, const char *name) {
  snprintf(room, 4096, "%s/%s", from, name);
  return room;
}

static mscclAlgoHandle_t load(const char *from, const char *name, int rank) {
  char room[4096];
  mscclAlgoHandle_t handle;
  OK(mscclLoadAlgo(path(room, from, name), &handle, rank));
  return handle;
}

static ncclResult_t sum(mscclAlgoHandle_t program, ncclComm_t comm, int rank, int count, int *out) {
  int *in = malloc((size_t)count * sizeof(int));
  for (int i = 0; i < count; i++) in[i] = rank + i;
  ncclResult_t code =
      mscclRunAlgo(in, NULL, NULL, out, NULL, NULL, (size_t)count, ncclInt, 0, 0, ncclSum, program, comm, NULL);
  free(in);
  return code;
}

static void right_sum(mscclAlgoHandle_t program, ncclComm_t comm, int rank, int count) {
  int *out = malloc((size_t)count * sizeof(int));
  OK(sum(program, comm, rank, count, out));
  for (int i = 0; i < count; i++) CHECK(out[i] == RANKS * i + RANKS * (RANKS - 1) / 2);
  free(out);
}

static void write_file(const char *name, const char *text, size_t bytes) {
  char room[4096];
  FILE *file = fopen(path(room, work, name), "w");
  CHECK(file && fwrite(text, 1, bytes, file) == bytes && fclose(file) == 0);
}

static char *read_file(const char *name) {
  char room[4096];
  FILE *file = fopen(path(room, folder, name), "r");
  CHECK(file);
  char *text = calloc(1, 1 << 20);
  CHECK(fread(text, 1, (1 << 20) - 1, file) > 0 && fclose(file) == 0);
  return text;
}

/* Replaces one number of ranks by another, of at most as many digits as there is room. */
static void with_ranks(const char *name, const char *text, const char *ranks) {
  const char *at = strstr(text, "ngpus=\"4\"");
  CHECK(at);
  char *changed = malloc(strlen(text) + 64);
  int head = (int)(at - text);
  sprintf(changed, "%.*sngpus=\"%s\"%s", head, text, ranks, at + strlen("ngpus=\"4\""));
  write_file(name, changed, strlen(changed));
  free(changed);
}

static void refused(const char *name, const char *why) {
  char room[4096];
  mscclAlgoHandle_t handle = 77;
  CHECK(mscclLoadAlgo(path(room, work, name), &handle, 0) == ncclInvalidUsage && handle == -1);
  if (!strstr(ncclGetLastError(NULL), why)) {
    fprintf(stderr, "%s: %s: %s is missing\n", name, ncclGetLastError(NULL), why);
    _exit(1);
  }
}

/* Files that are damaged: by one thread, since the text of the last error is the process's. */
static void damaged(void) {
  char room[4096], other[2048];
  mscclAlgoHandle_t handle;
  char *text = read_file("ar_ring_4_1ch.xml");
  write_file("cut.xml", text, strlen(text) / 2);
  refused("cut.xml", "line ");
  write_file("empty.xml", "", 0);
  refused("empty.xml", "it is empty");
  with_ranks("one.xml", text, "1");
  refused("one.xml", "line ");
  with_ranks("none.xml", text, "0");
  refused("none.xml", "ngpus");
  with_ranks("most.xml", text, "1024");
  refused("most.xml", "rank 4 is missing");
  with_ranks("beyond.xml", text, "1025");
  refused("beyond.xml", "ngpus");
  with_ranks("negative.xml", text, "-4");
  refused("negative.xml", "ngpus");
  refused("gone.xml", "No such file");
  CHECK(mkdir(path(room, work, "folder.xml"), 0700) == 0);
  refused("folder.xml", "it is no ordinary file");
  CHECK(mkfifo(path(room, work, "pipe.xml"), 0600) == 0);
  refused("pipe.xml", "it is no ordinary file");
  CHECK(symlink("loop.xml", path(room, work, "loop.xml")) == 0);
  refused("loop.xml", "symbolic links");
  write_file("secret.xml", text, strlen(text));
  CHECK(chmod(path(room, work, "secret.xml"), 0) == 0);
  if (geteuid() != 0) refused("secret.xml", "Permission denied");
  CHECK(chmod(path(room, work, "secret.xml"), 0600) == 0);
  memset(other, 'x', sizeof other - 1);
  other[sizeof other - 1] = 0;
  refused(other, "");
  CHECK(mscclLoadAlgo(path(room, work, "\xff\xfe.xml"), &handle, 0) == ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(NULL), "is not UTF-8"));
  CHECK(mscclLoadAlgo(path(room, work, "one.xml"), NULL, 0) == ncclInvalidArgument);
  free(text);
}

/* All ranks name one file, which is another one for the last. */
static void different(ncclComm_t comm, int rank) {
  int out[64];
  mscclAlgoHandle_t program = load(folder, rank == RANKS - 1 ? "ar_1step_4.xml" : "ar_ring_4_1ch.xml", rank);
  ncclResult_t code = sum(program, comm, rank, 64, out);
  CHECK(code == ncclInvalidUsage || code == ncclRemoteError || code == ncclInternalError);
  OK(mscclUnloadAlgo(program));
}

/* The file is another one by the time the last rank reads it, under the same name. */
static void replaced(ncclComm_t comm, int rank) {
  int out[64];
  char *text = NULL;
  mscclAlgoHandle_t program = -1;
  if (rank == 0) {
    text = read_file("ar_ring_4_1ch.xml");
    write_file("same.xml", text, strlen(text));
    free(text);
  }
  pthread_barrier_wait(&met);
  if (rank != RANKS - 1) program = load(work, "same.xml", rank);
  pthread_barrier_wait(&met);
  if (rank == RANKS - 1) {
    text = read_file("ar_1step_4.xml");
    write_file("same.xml", text, strlen(text));
    free(text);
    program = load(work, "same.xml", rank);
  }
  pthread_barrier_wait(&met);
  CHECK(sum(program, comm, rank, 64, out) != ncclSuccess);
  OK(mscclUnloadAlgo(program));
}

/* The file goes, and then the handle, while calls of it run. */
static void unloaded(ncclComm_t comm, int rank) {
  char room[4096];
  if (rank == 0) {
    char *text = read_file("ar_ring_4_1ch.xml");
    write_file("goes.xml", text, strlen(text));
    free(text);
    shared = load(work, "goes.xml", rank);
    CHECK(unlink(path(room, work, "goes.xml")) == 0);
  }
  pthread_barrier_wait(&met);
  for (int round = 0; round < ROUNDS; round++) right_sum(shared, comm, rank, COUNT);
  mscclAlgoHandle_t own = load(folder, "ar_ring_4_1ch.xml", rank);
  for (int round = 0; round < ROUNDS; round++) {
    right_sum(own, comm, rank, COUNT);
    OK(mscclUnloadAlgo(own)); /* Others are still in the call. */
    own = load(folder, "ar_ring_4_1ch.xml", rank);
  }
  OK(mscclUnloadAlgo(own));
  pthread_barrier_wait(&met);
  if (rank == 0) OK(mscclUnloadAlgo(shared));
  pthread_barrier_wait(&met);
  int out[8];
  CHECK(sum(shared, comm, rank, 8, out) == ncclInvalidUsage);
}

/* One program on two communicators in turns, and on one that is no more. */
static void two(ncclComm_t first, int rank) {
  ncclComm_t second;
  int out[8];
  OK(ncclCommInitRank(&second, RANKS, ids[4], RANKS - 1 - rank));
  mscclAlgoHandle_t program = load(folder, "ar_ring_4_1ch.xml", rank);
  for (int round = 0; round < ROUNDS; round++) {
    right_sum(program, first, rank, 1003);
    right_sum(program, second, rank, 999);
  }
  OK(ncclCommDestroy(second));
  CHECK(sum(program, second, rank, 8, out) == ncclInvalidArgument);
  CHECK(sum(program, NULL, rank, 8, out) == ncclInvalidArgument);
  right_sum(program, first, rank, 1003);
  OK(mscclUnloadAlgo(program));
}

static void *rank_main(void *number) {
  int rank = (int)(intptr_t)number;
  void (*parts[4])(ncclComm_t, int) = {different, replaced, unloaded, two};
  for (int part = 0; part < 4; part++) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, RANKS, ids[part], rank));
    parts[part](comm, rank);
    /* One with calls that went wrong cannot end them all. */
    if (part < 2) OK(ncclCommAbort(comm));
    else OK(ncclCommDestroy(comm));
    pthread_barrier_wait(&met);
  }
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  folder = argv[1];
  work = argv[2];
  alarm(120);
  damaged();
  pthread_t threads[RANKS];
  for (int id = 0; id < 5; id++) OK(ncclGetUniqueId(&ids[id]));
  CHECK(pthread_barrier_init(&met, NULL, RANKS) == 0);
  for (int rank = 0; rank < RANKS; rank++) CHECK(pthread_create(&threads[rank], NULL, rank_main, (void *)(intptr_t)rank) == 0);
  for (int rank = 0; rank < RANKS; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
  puts("all attacks are told");
  return 0;
}
