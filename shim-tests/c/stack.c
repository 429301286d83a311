/* Communicators, collectives and groups on threads with the smallest stacks that the system gives, as servers and
 * runtimes of other languages use them. With arguments: the stack's size in bytes, and how much of it may be
 * used. Tells how much was. */
#include <limits.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <strata.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANKS 10 /* More sources than are read side by side, so that partial results are kept too. */
#define COUNT 300000
#define PAINT 0xa5
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static ncclUniqueId id;
static float* in[RANKS];
static float* out[RANKS];
static float* residual[RANKS];
static int ranks_done;

/* Nothing here may print: the C library's own output needs more stack than some of the tested sizes have. */
static void* one_rank(void* argument) {
  int rank = (int)(long)argument;
  ncclComm_t comm, half;
  int other;
  OK(ncclCommInitRank(&comm, RANKS, id, rank));
  for (size_t count = 1; count <= COUNT; count = count * 70 + 3) {
    for (size_t i = 0; i < count; i++) in[rank][i] = (float)(rank + 1);
    OK(ncclAllReduce(in[rank], out[rank], count, ncclFloat, ncclSum, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(out[rank][i] == RANKS * (RANKS + 1) / 2);
    OK(ncclAllReduce(in[rank], out[rank], count, ncclBfloat16, ncclAvg, comm, NULL));
    OK(ncclBroadcast(in[rank], out[rank], count, ncclFloat, 1, comm, NULL));
    OK(ncclReduce(in[rank], out[rank], count, ncclInt8, ncclProd, 0, comm, NULL));
  }
  size_t block = COUNT / RANKS;
  OK(ncclAllGather(in[rank], out[rank], block, ncclFloat, comm, NULL));
  OK(ncclReduceScatter(in[rank], out[rank], block, ncclHalf, ncclMax, comm, NULL));
  OK(ncclAlltoAll(in[rank], out[rank], block, ncclFloat, comm, NULL));
  OK(ncclGather(in[rank], out[rank], block, ncclFloat, 0, comm, NULL));
  OK(ncclScatter(in[rank], out[rank], block, ncclFloat, 0, comm, NULL));
  /* In codes, with what they leave out and without, at sizes whose last strips are short. */
  OK(strataAllReduceCoded(in[rank], out[rank], residual[rank], COUNT, ncclFloat, ncclSum, "mx8", comm, NULL));
  OK(strataReduceScatterCoded(in[rank], out[rank], NULL, block / 2, ncclDouble, ncclSum, "int8", comm, NULL));
  OK(strataAllReduceCoded(in[rank], out[rank], NULL, COUNT, ncclHalf, ncclMax, "int8", comm, NULL));
  OK(ncclGroupStart());
  OK(ncclSend(in[rank], COUNT, ncclFloat, (rank + 1) % RANKS, comm, NULL));
  OK(ncclRecv(out[rank], COUNT, ncclFloat, (rank + RANKS - 1) % RANKS, comm, NULL));
  OK(ncclGroupEnd());
  CHECK(ncclBroadcast(in[rank], out[rank], 1, ncclFloat, RANKS, comm, NULL) == ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(comm), "root") != NULL);
  OK(ncclCommSplit(comm, rank % 2, rank, &half, NULL));
  OK(ncclCommCount(half, &other));
  OK(ncclAllReduce(in[rank], out[rank], COUNT, ncclFloat, ncclSum, half, NULL));
  OK(ncclCommDestroy(half));
  OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
  __atomic_add_fetch(&ranks_done, 1, __ATOMIC_RELAXED);
  return NULL;
}

/* Runs all ranks; the most bytes of stack that one of them used. */
static size_t all_ranks(size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), most = 0;
  pthread_t threads[RANKS];
  unsigned char* stacks[RANKS];
  ranks_done = 0;
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < RANKS; rank++) {
    pthread_attr_t attributes;
    stacks[rank] = mmap(NULL, page + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stacks[rank] != MAP_FAILED);
    /* What goes beyond the stack ends the program instead of writing over something. */
    CHECK(mprotect(stacks[rank], page, PROT_NONE) == 0);
    memset(stacks[rank] + page, PAINT, bytes);
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstack(&attributes, stacks[rank] + page, bytes) == 0);
    CHECK(pthread_create(&threads[rank], &attributes, one_rank, (void*)(long)rank) == 0);
    CHECK(pthread_attr_destroy(&attributes) == 0);
  }
  for (int rank = 0; rank < RANKS; rank++) {
    CHECK(pthread_join(threads[rank], NULL) == 0);
    size_t untouched = 0;
    while (untouched < bytes && stacks[rank][page + untouched] == PAINT) untouched++;
    if (bytes - untouched > most) most = bytes - untouched;
    CHECK(munmap(stacks[rank], page + bytes) == 0);
  }
  CHECK(ranks_done == RANKS);
  return most;
}

int main(int argc, char** argv) {
  size_t bytes = argc > 1 ? (size_t)atol(argv[1]) : (size_t)PTHREAD_STACK_MIN;
  for (int rank = 0; rank < RANKS; rank++) {
    in[rank] = calloc(COUNT, sizeof(float));
    out[rank] = calloc(COUNT, sizeof(float));
    residual[rank] = calloc(COUNT, sizeof(float));
    CHECK(in[rank] != NULL && out[rank] != NULL && residual[rank] != NULL);
  }
  size_t most = argc > 2 ? (size_t)atol(argv[2]) : bytes;
  size_t used = all_ranks(bytes);
  printf("%zu bytes of stack used over shared memory\n", used);
  CHECK(used <= most);
  CHECK(setenv("STRATA_SHM", "0", 1) == 0);
  used = all_ranks(bytes);
  printf("%zu bytes of stack used over TCP\n", used);
  CHECK(used <= most);
  return 0;
}
