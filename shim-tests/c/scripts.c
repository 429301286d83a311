/* RCCL's calls for programs in MSCCL's XML, on ranks that are threads: `scripts FOLDER`, FOLDER being shim-tests/scripts. Needs a
   library under RCCL's name. */
#include <pthread.h>
#include <rccl/rccl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                           \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));                         \
      _exit(1);                                                                                                    \
    }                                                                                                              \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

enum { RANKS = 16, MOST = 4099 };
static ncclUniqueId ids[2];
static const char *folder;
static char turned_path[4096];
static pthread_barrier_t met, half_met;

static mscclAlgoHandle_t load(const char *name, int rank) {
  char path[4096];
  mscclAlgoHandle_t handle;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  OK(mscclLoadAlgo(path, &handle, rank));
  return handle;
}

static int value(int rank, int at) { return rank * 1000 + at % 997; }

static void all_reduce(ncclComm_t comm, int rank, int nranks) {
  static const char *names[] = {"ar_rdh_8.xml", "ar_ring_8_4ch_ll128.xml", "ar_hier_2n4g.xml"};
  int *send = malloc(MOST * sizeof(int)), *recv = malloc(MOST * sizeof(int));
  for (unsigned which = 0; which < 3; which++) {
    mscclAlgoHandle_t program = load(names[which], rank);
    for (int count = 1; count <= MOST; count = count * 4 + 1)
      for (int in_place = 0; in_place < 2; in_place++) {
        for (int i = 0; i < count; i++) send[i] = value(rank, i);
        int *result = in_place ? send : recv;
        OK(mscclRunAlgo(send, NULL, NULL, result, NULL, NULL, (size_t)count, ncclInt, 0, 0, ncclSum, program, comm, NULL));
        for (int i = 0; i < count; i++) {
          int sum = 0;
          for (int r = 0; r < nranks; r++) sum += value(r, i);
          CHECK(result[i] == sum);
        }
        OK(mscclRunAlgo(send, NULL, NULL, recv, NULL, NULL, 0, ncclInt, 0, 0, ncclMax, program, comm, NULL));
      }
    OK(mscclUnloadAlgo(program));
    CHECK(mscclRunAlgo(send, NULL, NULL, recv, NULL, NULL, 1, ncclInt, 0, 0, ncclSum, program, comm, NULL) == ncclInvalidUsage);
    CHECK(mscclUnloadAlgo(program) == ncclInvalidUsage);
  }
  free(send), free(recv);
}

static void custom(ncclComm_t comm, int rank) {
  int send[1000], recv[1000];
  mscclAlgoHandle_t program = load("alltonext_fwd_2n.xml", rank);
  for (int i = 0; i < 1000; i++) send[i] = value(rank, i), recv[i] = -1;
  OK(mscclRunAlgo(send, NULL, NULL, recv, NULL, NULL, 1000, ncclInt, 0, 0, ncclSum, program, comm, NULL));
  for (int i = 0; i < 1000; i++) CHECK(recv[i] == (rank ? value(rank - 1, i) : -1));
  /* One buffer serves as well, but not two that overlap otherwise. */
  OK(mscclRunAlgo(send, NULL, NULL, send, NULL, NULL, 1000, ncclInt, 0, 0, ncclSum, program, comm, NULL));
  for (int i = 0; rank && i < 1000; i++) CHECK(send[i] == value(rank - 1, i));
  CHECK(mscclRunAlgo(send, NULL, NULL, send + 1, NULL, NULL, 10, ncclInt, 0, 0, ncclSum, program, comm, NULL) == ncclInvalidArgument);
  OK(mscclUnloadAlgo(program));
}

/* Rank i's block j becomes rank j's block i, in one buffer. */
static void all_to_all(ncclComm_t comm, int rank) {
  enum { BLOCK = 33, ALL = 8 * BLOCK };
  int data[ALL];
  mscclAlgoHandle_t program = load("a2a_allpairs_8.xml", rank);
  for (int i = 0; i < ALL; i++) data[i] = value(rank, i);
  OK(mscclRunAlgo(data, NULL, NULL, data, NULL, NULL, BLOCK, ncclInt, 0, 0, ncclSum, program, comm, NULL));
  for (int i = 0; i < ALL; i++) CHECK(data[i] == value(i / BLOCK, rank * BLOCK + i % BLOCK));
  OK(mscclUnloadAlgo(program));
  CHECK(ncclAlltoAll(data, data, BLOCK, ncclInt, comm, NULL) == ncclInvalidArgument);
}

/* A program of one's own whose halves change places on each rank, in a folder of its own. */
static void write_turned(char *path, size_t size) {
  char contract[4096], base[] = "/tmp/turned-XXXXXX";
  CHECK(mkdtemp(base));
  snprintf(path, size, "%s/turned.xml", base);
  snprintf(contract, sizeof contract, "%s/turned.toml", base);
  FILE *file = fopen(path, "w");
  CHECK(file);
  fprintf(file, "<algo name=\"turned\" nchunksperloop=\"2\" ngpus=\"8\" coll=\"custom\" inplace=\"1\">\n");
  for (int rank = 0; rank < 8; rank++) {
    const char *steps[] = {"i\" srcoff=\"0\" dstbuf=\"s\" dstoff=\"0", "i\" srcoff=\"1\" dstbuf=\"i\" dstoff=\"0",
                           "s\" srcoff=\"0\" dstbuf=\"i\" dstoff=\"1"};
    fprintf(file, "<gpu id=\"%d\" s_chunks=\"1\"><tb id=\"0\" send=\"-1\" recv=\"-1\" chan=\"0\">\n", rank);
    for (int step = 0; step < 3; step++)
      fprintf(file, "<step s=\"%d\" type=\"cpy\" srcbuf=\"%s\" cnt=\"1\" depid=\"-1\" deps=\"-1\"/>\n", step, steps[step]);
    fprintf(file, "</tb></gpu>\n");
  }
  CHECK(fprintf(file, "</algo>\n") > 0 && fclose(file) == 0);
  file = fopen(contract, "w");
  CHECK(file && fprintf(file, "[[output]]\nchunk_shift = 1\nwraps = true\n") > 0 && fclose(file) == 0);
}

static void turned(ncclComm_t comm, int rank) {
  int send[2002], recv[2002];
  mscclAlgoHandle_t program;
  OK(mscclLoadAlgo(turned_path, &program, rank));
  for (int count = 2; count <= 2002; count += 500)
    for (int in_place = 0; in_place < 2; in_place++) {
      for (int i = 0; i < count; i++) send[i] = value(rank, i);
      int *result = in_place ? send : recv;
      OK(mscclRunAlgo(send, NULL, NULL, result, NULL, NULL, (size_t)count, ncclInt, 0, 0, ncclSum, program, comm, NULL));
      for (int i = 0; i < count; i++) CHECK(result[i] == value(rank, (i + count / 2) % count));
    }
  CHECK(mscclRunAlgo(send, NULL, NULL, recv, NULL, NULL, 7, ncclInt, 0, 0, ncclSum, program, comm, NULL) == ncclInvalidArgument);
  OK(mscclUnloadAlgo(program));
}

/* Programs by their places in MSCCL_XML_FILES, which main has set. */
static void by_number(ncclComm_t comm, int rank) {
  int send[1000], recv[1000];
  for (int i = 0; i < 1000; i++) send[i] = value(rank, i), recv[i] = -1;
  OK(ncclCustomCollective(send, recv, 1000, ncclInt, ncclSum, 1, comm, NULL));
  for (int i = 0; i < 1000; i++) CHECK(recv[i] == value(rank, (i + 500) % 1000));
  OK(ncclCustomCollective(send, recv, 1000, ncclInt, ncclMax, 3, comm, NULL));
  for (int i = 0; i < 1000; i++) CHECK(recv[i] == value(7, i));
  CHECK(ncclCustomCollective(send, recv, 999, ncclInt, ncclSum, 1, comm, NULL) == ncclInvalidArgument);
  CHECK(ncclCustomCollective(send, recv, 8, ncclInt, ncclSum, 0, comm, NULL) == ncclInvalidUsage);
  CHECK(ncclCustomCollective(send, recv, 8, ncclInt, ncclSum, 2, comm, NULL) == ncclInvalidUsage);
  CHECK(ncclCustomCollective(send, recv, 8, ncclInt, ncclSum, 4, comm, NULL) == ncclInvalidArgument);
  CHECK(ncclCustomCollective(send, recv, 8, ncclInt, ncclSum, -1, comm, NULL) == ncclInvalidArgument);
  /* In a group. A call that is refused there is the group's error. */
  for (int i = 0; i < 1000; i++) recv[i] = -1;
  OK(ncclGroupStart());
  OK(ncclCustomCollective(send, recv, 500, ncclInt, ncclSum, 1, comm, NULL));
  OK(ncclCustomCollective(send + 500, recv + 500, 500, ncclInt, ncclMin, 3, comm, NULL));
  OK(ncclGroupEnd());
  for (int i = 0; i < 500; i++) CHECK(recv[i] == value(rank, (i + 250) % 500) && recv[500 + i] == value(0, 500 + i));
  OK(ncclGroupStart());
  CHECK(ncclCustomCollective(send, recv, 8, ncclInt, ncclSum, 4, comm, NULL) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
}

static void refused(ncclComm_t comm, int rank) {
  char path[4096];
  size_t counts[RANKS] = {0};
  int data[64] = {0};
  mscclAlgoHandle_t handle;
  snprintf(path, sizeof path, "%s/ar_pcie_hier_4.xml", folder);
  CHECK(mscclLoadAlgo(path, &handle, rank) == ncclInvalidUsage && handle == -1);
  CHECK(strstr(ncclGetLastError(NULL), "line 108: rank 2, thread block 4, step 2"));
  CHECK(ncclCustomCollective(data, data, 1, ncclInt, ncclSum, 0, comm, NULL) == ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(NULL), "/alltonext_fwd_2n.xml is for custom on 16 ranks"));
  CHECK(ncclCustomCollective(data, data, 1, ncclInt, ncclSum, 2, comm, NULL) == ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(NULL), "/pipe_ring_8.xml is for all_reduce on 16 ranks"));
  snprintf(path, sizeof path, "%s/there_is_none.xml", folder);
  CHECK(mscclLoadAlgo(path, &handle, rank) == ncclInvalidUsage);
  CHECK(mscclLoadAlgo(NULL, &handle, rank) == ncclInvalidArgument);
  CHECK(mscclRunAlgo(data, NULL, NULL, data, NULL, NULL, 1, ncclInt, 0, 0, ncclSum, 12345, comm, NULL) == ncclInvalidUsage);
  CHECK(mscclRunAlgo(data, NULL, NULL, data, NULL, NULL, 1, ncclInt, 0, 0, ncclSum, -1, comm, NULL) == ncclInvalidUsage);
  mscclAlgoHandle_t program = load("ar_ring_4_1ch.xml", rank); /* for 4 ranks, and here are more */
  CHECK(mscclRunAlgo(data, NULL, NULL, data, NULL, NULL, 1, ncclInt, 0, 0, ncclSum, program, comm, NULL) == ncclInvalidUsage);
  CHECK(mscclRunAlgo(data, counts, NULL, data, NULL, NULL, 1, ncclInt, 0, 0, ncclSum, program, comm, NULL) == ncclInvalidUsage);
  OK(mscclUnloadAlgo(program));
}

static void *rank_main(void *number) {
  int rank = (int)(intptr_t)number;
  ncclComm_t half, whole;
  if (rank < 8) {
    OK(ncclCommInitRank(&half, 8, ids[0], rank));
    all_reduce(half, rank, 8);
    all_to_all(half, rank);
    turned(half, rank);
    by_number(half, rank);
    pthread_barrier_wait(&half_met); /* The text of the last error is the process's. */
    if (rank == 0) refused(half, rank);
    OK(ncclCommDestroy(half));
  }
  pthread_barrier_wait(&met);
  OK(ncclCommInitRank(&whole, RANKS, ids[1], rank));
  custom(whole, rank);
  OK(ncclCommDestroy(whole));
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  folder = argv[1];
  alarm(120);
  pthread_t threads[RANKS];
  write_turned(turned_path, sizeof turned_path);
  char files[4 * 4096 + 256];
  snprintf(files, sizeof files, "%s/alltonext_fwd_2n.xml:%s:%s/pipe_ring_8.xml:%s/ar_rdh_8.xml", folder, turned_path, folder, folder);
  CHECK(setenv("MSCCL_XML_FILES", files, 1) == 0); /* The first and the third are for 16 ranks. */
  OK(ncclGetUniqueId(&ids[0]));
  OK(ncclGetUniqueId(&ids[1]));
  CHECK(pthread_barrier_init(&met, NULL, RANKS) == 0 && pthread_barrier_init(&half_met, NULL, 8) == 0);
  for (int rank = 0; rank < RANKS; rank++) CHECK(pthread_create(&threads[rank], NULL, rank_main, (void *)(intptr_t)rank) == 0);
  for (int rank = 0; rank < RANKS; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
  return 0;
}
