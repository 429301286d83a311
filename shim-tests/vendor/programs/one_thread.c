/* One thread drives all ranks of a process, in groups, as programs with one process for all GPUs do. Without groups that
 * would hang.
 *
 * one_thread RANKS */
#include "way.h"

#define MOST 8
#define COUNT 1000

static ncclComm_t comms[MOST];
static int n;
static float in[MOST][COUNT * MOST], out[MOST][COUNT * MOST];

static void fill(void) {
  for (int rank = 0; rank < n; rank++)
    for (int i = 0; i < COUNT * n; i++) in[rank][i] = (float)((rank + i) % 50);
  memset(out, 0, sizeof(out));
}

static float sum_at(int index) {
  float sum = 0;
  for (int rank = 0; rank < n; rank++) sum += (float)((rank + index) % 50);
  return sum;
}

static void collectives(void) {
  fill();
  OK(ncclGroupStart());
  for (int rank = 0; rank < n; rank++)
    OK(ncclAllReduce(in[rank], out[rank], COUNT, ncclFloat, ncclSum, comms[rank], NULL));
  OK(ncclGroupEnd());
  for (int rank = 0; rank < n; rank++)
    for (int i = 0; i < COUNT; i++) CHECK(out[rank][i] == sum_at(i));
  OK(ncclGroupStart());
  for (int rank = n - 1; rank >= 0; rank--) {
    OK(ncclGroupStart());
    OK(ncclReduceScatter(in[rank], out[rank], COUNT, ncclFloat, ncclSum, comms[rank], NULL));
    OK(ncclGroupEnd());
  }
  OK(ncclGroupEnd());
  for (int rank = 0; rank < n; rank++)
    for (int i = 0; i < COUNT; i++) CHECK(out[rank][i] == sum_at(rank * COUNT + i));
  fill();
  OK(ncclGroupStart());
  for (int rank = 0; rank < n; rank++)
    OK(ncclAllGather(in[rank], out[rank], COUNT, ncclFloat, comms[rank], NULL));
  OK(ncclGroupEnd());
  for (int rank = 0; rank < n; rank++)
    for (int i = 0; i < COUNT * n; i++) CHECK(out[rank][i] == (float)((i / COUNT + i % COUNT) % 50));
}

/* Two kinds of calls for each rank, and messages around the ring, all in one group. */
static void a_mixed_group(void) {
  static int tokens[MOST], got[MOST], all[MOST][MOST];
  fill();
  OK(ncclGroupStart());
  for (int rank = 0; rank < n; rank++) {
    tokens[rank] = 100 + rank;
    OK(ncclSend(&tokens[rank], 1, ncclInt, (rank + 1) % n, comms[rank], NULL));
    OK(ncclAllReduce(in[rank], out[rank], COUNT, ncclFloat, ncclMax, comms[rank], NULL));
    OK(ncclAllGather(&tokens[rank], all[rank], 1, ncclInt, comms[rank], NULL));
    OK(ncclRecv(&got[rank], 1, ncclInt, (rank + n - 1) % n, comms[rank], NULL));
  }
  OK(ncclGroupEnd());
  for (int rank = 0; rank < n; rank++) {
    CHECK(got[rank] == 100 + (rank + n - 1) % n);
    for (int i = 0; i < n; i++) CHECK(all[rank][i] == 100 + i);
  }
}

static void children(void) {
  ncclComm_t halves[MOST] = {NULL};
  int value[MOST], sum[MOST], size;
  OK(ncclGroupStart());
  for (int rank = 0; rank < n; rank++) OK(ncclCommSplit(comms[rank], rank % 2, -rank, &halves[rank], NULL));
  OK(ncclGroupEnd());
  OK(ncclGroupStart());
  for (int rank = 0; rank < n; rank++) {
    value[rank] = 1 << rank;
    OK(ncclAllReduce(&value[rank], &sum[rank], 1, ncclInt, ncclSum, halves[rank], NULL));
  }
  OK(ncclGroupEnd());
  for (int rank = 0; rank < n; rank++) {
    int wanted = 0;
    for (int other = rank % 2; other < n; other += 2) wanted += 1 << other;
    CHECK(sum[rank] == wanted);
    OK(ncclCommCount(halves[rank], &size));
    CHECK(size == (n + 1 - rank % 2) / 2);
    OK(ncclCommDestroy(halves[rank]));
  }
}

int main(int argc, char** argv) {
  int device, rank_of;
  n = argc > 1 ? atoi(argv[1]) : 4;
  CHECK(n >= 1 && n <= MOST);
  alarm(60);
  OK(ncclCommInitAll(comms, n, NULL));
  for (int rank = 0; rank < n; rank++) {
    OK(ncclCommUserRank(comms[rank], &rank_of));
    OK(ncclCommCuDevice(comms[rank], &device));
    CHECK(rank_of == rank && device == rank);
  }
  for (int round = 0; round < 3; round++) {
    collectives();
    a_mixed_group();
    children();
  }
  OK(ncclGroupStart());
  for (int rank = 0; rank < n; rank++) OK(ncclCommFinalize(comms[rank]));
  OK(ncclGroupEnd());
  for (int rank = 0; rank < n; rank++) OK(ncclCommDestroy(comms[rank]));
  /* Once more, with each rank made on its own within a group. */
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  for (int rank = 0; rank < n; rank++) OK(ncclCommInitRank(&comms[rank], n, id, rank));
  OK(ncclGroupEnd());
  collectives();
  for (int rank = 0; rank < n; rank++) OK(ncclCommAbort(comms[rank]));
  printf("one thread, %d ranks\n", n);
  return 0;
}
