/* Communicators of strataCommInitHost: their time limits, who may make them together, what is made of them, and what callbacks
 * of a stream are told. Ranks are threads. With an argument a GPU's driver is mapped, and its device current. */
#include "check.h"
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#define RANKS 3
#define COUNT 100000
static ncclUniqueId id, grow_id;
static pthread_barrier_t barrier;
static ncclComm_t comms[RANKS];
static int data[RANKS][COUNT];

static void on_all(void* (*body)(void*), int ranks) {
  pthread_t threads[RANKS];
  pthread_barrier_init(&barrier, NULL, (unsigned)ranks);
  for (intptr_t rank = 0; rank < ranks; rank++) CHECK(pthread_create(&threads[rank], NULL, body, (void*)rank) == 0);
  for (int rank = 0; rank < ranks; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
}

static double now_ms(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

static void sums_up(ncclComm_t comm, int rank, int ranks, strataStream_t stream) {
  for (int i = 0; i < COUNT; i++) data[rank][i] = i;
  OK(ncclAllReduce(data[rank], data[rank], COUNT, ncclInt, ncclSum, comm, stream));
  OK(strataStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) CHECK(data[rank][i] == i * ranks);
}

/* Sums of 16-bit integers wrap; averages truncate; bits are of every integer. */
static void types_beyond_nccl(ncclComm_t comm, int rank) {
  int16_t in[5] = {(int16_t)(20000 + rank), -7, 1, 0x7fff, (int16_t)(1 << rank)}, out[5], many[5 * RANKS];
  uint16_t bits[3] = {(uint16_t)(0xf0f0 | rank), 0xffff, (uint16_t)(1 << rank)}, results[3];
  uint64_t wide = 0xff00ff00ff00ff00u ^ (uint64_t)rank << 60;
  ncclRedOp_t twice;
  int16_t two = 2;
  OK(ncclAllReduce(in, out, 5, strataInt16, ncclSum, comm, NULL));
  CHECK(out[0] == (int16_t)60003 && out[1] == -21 && out[3] == (int16_t)(3 * 0x7fff) && out[4] == 7);
  OK(ncclAllReduce(in, out, 5, strataInt16, ncclAvg, comm, NULL)); CHECK(out[1] == -7 && out[2] == 1);
  OK(ncclAllReduce(in, out, 5, strataInt16, ncclMin, comm, NULL)); CHECK(out[0] == 20000 && out[1] == -7);
  OK(ncclAllGather(in, many, 5, strataInt16, comm, NULL)); CHECK(many[5] == 20001 && many[14] == 4);
  OK(ncclRedOpCreatePreMulSum(&twice, &two, strataInt16, ncclScalarHostImmediate, comm));
  OK(ncclAllReduce(in, out, 5, strataInt16, twice, comm, NULL)); CHECK(out[1] == -42);
  OK(ncclRedOpDestroy(twice, comm));
  OK(ncclAllReduce(bits, results, 3, strataUint16, strataBitAnd, comm, NULL));
  CHECK(results[0] == 0xf0f0 && results[1] == 0xffff && results[2] == 0);
  OK(ncclAllReduce(bits, results, 3, strataUint16, strataBitOr, comm, NULL)); CHECK(results[0] == 0xf0f3 && results[2] == 7);
  OK(ncclAllReduce(bits, results, 3, strataUint16, strataBitXor, comm, NULL)); CHECK(results[0] == 0xf0f3 && results[2] == 7);
  OK(ncclAllReduce(&wide, &wide, 1, ncclUint64, strataBitXor, comm, NULL)); CHECK(wide == (0xff00ff00ff00ff00u ^ (uint64_t)3 << 60));
  float real = 1;
  CHECK(ncclAllReduce(&real, &real, 1, ncclFloat, strataBitOr, comm, NULL) == ncclInvalidArgument);
  CHECK(strstr(strataGetLastError(), "operation bor is for the bits of integers"));
  CHECK(ncclRedOpDestroy(strataBitOr, comm) == ncclInvalidArgument);
  CHECK(ncclAllReduce(in, out, 5, (ncclDataType_t)12, ncclSum, comm, NULL) == ncclInvalidArgument);
  CHECK(ncclAllReduce(in, out, 5, (ncclDataType_t)(strataUint16 + 1), ncclSum, comm, NULL) == ncclInvalidArgument);
}

static void* make_and_use(void* place) {
  int rank = (int)(intptr_t)place, number = -1;
  ncclComm_t comm = NULL, child = NULL;
  strataStream_t stream;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  OK(strataCommInitHost(&comm, RANKS, id, rank, rank == 0 ? 20000 : -1));
  OK(ncclCommCuDevice(comm, &number)); CHECK(number == 0);
  OK(strataStreamCreate(&stream));
  sums_up(comm, rank, RANKS, NULL);
  sums_up(comm, rank, RANKS, stream);
  types_beyond_nccl(comm, rank);
  config.commName = "child";
  OK(ncclCommSplit(comm, 0, -rank, &child, &config));
  OK(ncclCommUserRank(child, &number)); CHECK(number == RANKS - 1 - rank);
  sums_up(child, rank, RANKS, stream);
  OK(ncclCommDestroy(child));
  OK(strataStreamDestroy(stream));
  comms[rank] = comm;
  return NULL;
}

/* The last of the ranks joins. */
static void* grow(void* place) {
  int rank = (int)(intptr_t)place;
  ncclComm_t pair = NULL, grown = NULL;
  if (rank < RANKS - 1) {
    OK(strataCommInitHost(&pair, RANKS - 1, id, rank, -1));
    if (rank == 0) OK(ncclCommGetUniqueId(pair, &grow_id));
  }
  pthread_barrier_wait(&barrier);
  if (pair)
    OK(ncclCommGrow(pair, RANKS, rank == 0 ? &grow_id : NULL, -1, &grown, NULL));
  else
    OK(strataCommInitHost(&grown, RANKS, grow_id, rank, -1));
  sums_up(grown, rank, RANKS, NULL);
  OK(ncclCommDestroy(grown));
  if (pair) OK(ncclCommDestroy(pair));
  return NULL;
}

static void* make_differently(void* place) {
  int rank = (int)(intptr_t)place;
  ncclComm_t comm = NULL;
  ncclResult_t code = rank == 1 ? ncclCommInitRank(&comm, RANKS, id, rank) : strataCommInitHost(&comm, RANKS, id, rank, -1);
  CHECK(code == ncclInvalidUsage && comm == NULL);
  CHECK(strstr(strataGetLastError(), "rank 0 makes a communicator by strataCommInitHost, rank 1 by another function"));
  return NULL;
}

/* Rank 0's limit counts for the operations of all. Only rank 0 calls: the others would have waited for ever. */
static void* wait_in_vain(void* place) {
  int rank = (int)(intptr_t)place;
  ncclComm_t comm = NULL, child = NULL;
  OK(strataCommInitHost(&comm, RANKS, id, rank, rank == 0 ? 400 : 0));
  OK(ncclCommSplit(comm, 0, rank, &child, NULL));
  pthread_barrier_wait(&barrier);
  if (rank == 0) {
    double start = now_ms();
    CHECK(ncclAllReduce(data[0], data[0], COUNT, ncclInt, ncclSum, child, NULL) == ncclTimeout);
    double waited = now_ms() - start;
    CHECK(waited >= 390 && waited < 20000 && strstr(strataGetLastError(), "ranks: 1, 2"));
  }
  pthread_barrier_wait(&barrier);
  ncclCommAbort(child);
  ncclCommAbort(comm);
  return NULL;
}

static struct {
  ncclResult_t status[8];
  char text[8][256];
  int count;
} told;

static void note(void* argument, ncclResult_t status) {
  CHECK(argument == &told && told.count < 8);
  told.status[told.count] = status;
  snprintf(told.text[told.count++], 256, "%s", ncclGetLastError(NULL));
}

static void spoil(void* argument) {
  int number;
  (void)argument;
  CHECK(ncclCommCount(NULL, &number) == ncclInvalidArgument);
}

/* What a rank calls alone times out; its callbacks are told once, with that error's text, whatever has failed since. */
static void callbacks_are_told(void) {
  ncclComm_t comm = comms[0];
  strataStream_t stream;
  OK(strataStreamCreate(&stream));
  OK(strataStreamAddCallbackStatus(stream, note, &told));
  OK(ncclAllReduce(data[0], data[0], COUNT, ncclInt, ncclSum, comm, stream));
  OK(strataStreamAddCallback(stream, spoil, NULL));
  ncclCommAbort(comms[1]);
  ncclCommAbort(comms[2]);
  OK(strataStreamAddCallbackStatus(stream, note, &told));
  OK(strataStreamAddCallbackStatus(stream, note, &told));
  CHECK(strataStreamSynchronize(stream) == ncclRemoteError && told.count == 3);
  CHECK(told.status[0] == ncclSuccess && told.status[1] == ncclRemoteError && told.status[2] == ncclSuccess);
  CHECK(strstr(told.text[1], "rank") && !strstr(told.text[1], "comm argument"));
  OK(strataStreamDestroy(stream));
  CHECK(strataStreamAddCallbackStatus(stream, note, &told) == ncclInvalidArgument && told.count == 3);
  ncclCommAbort(comm);
}

int main(int argc, char** argv) {
  ncclComm_t comm = NULL;
  setenv("NCCL_COMM_BLOCKING", "0", 1);
  if (argc > 1) {
    void* driver = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
    int (*initialise)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
    int (*retain)(void**, int) = driver ? (int (*)(void**, int))dlsym(driver, "cuDevicePrimaryCtxRetain") : NULL;
    int (*make_current)(void*) = driver ? (int (*)(void*))dlsym(driver, "cuCtxSetCurrent") : NULL;
    void* context;
    CHECK(initialise && retain && make_current);
    CHECK(initialise(0) == 0 && retain(&context, 0) == 0 && make_current(context) == 0);
  }
  OK(strataGetUniqueId(&id));
  on_all(make_and_use, RANKS);
  callbacks_are_told();
  OK(strataGetUniqueId(&id));
  on_all(grow, RANKS);
  unsetenv("NCCL_COMM_BLOCKING");
  OK(ncclGetUniqueId(&id));
  if (argc == 1) on_all(make_differently, RANKS);
  OK(strataGetUniqueId(&id));
  on_all(wait_in_vain, RANKS);
  /* Nobody else comes: its own making has the limit, too. */
  double start = now_ms();
  OK(strataGetUniqueId(&id));
  CHECK(strataCommInitHost(&comm, 2, id, 0, 300) == ncclTimeout && comm == NULL);
  CHECK(now_ms() - start >= 290 && now_ms() - start < 20000 && strstr(strataGetLastError(), "rank 1"));
  return 0;
}
