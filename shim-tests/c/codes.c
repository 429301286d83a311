/* Codes from a C program: what is refused, what the environment codes and what it leaves alone, and residuals.
 *
 * usage: codes entries|environment|vectored|one-residual RANKS NODES
 *
 * With "environment" STRATA_ALLREDUCE_CODE is set, with "vectored" those of the collectives whose blocks may differ in size.
 */
#include "seeded.h"
#include <math.h>

enum { COUNT = 100000 };

static ncclComm_t comm;
static int rank;
static const char *what;

static float value(int of, int i) { return (float)(((i * 7 + of * 13) % 101) - 50) * (i % 3 ? 0.37f : 11.3f); }

static double exact(int i) {
  double sum = 0;
  for (int of = 0; of < nranks; of++) sum += value(of, i);
  return sum;
}

/* The largest error as a share of what mx8 may leave out of sums of such numbers; 0 where there is none. */
static double error_of(const float *got, double scale) {
  double worst = 0;
  for (int i = 0; i < COUNT; i++) worst = fmax(worst, fabs(got[i] * scale - exact(i)) / (565.0 * nranks * 0.13));
  return worst;
}

static void entries(const float *send, float *recv, float *residual) {
  ncclResult_t sum = strataAllReduceCoded(send, recv, NULL, COUNT, ncclFloat, ncclSum, "mx8", comm, NULL);
  CHECK(sum == ncclSuccess && error_of(recv, 1) < 1 && error_of(recv, 1) > 0);
  double all = 0;
  for (int i = 0; i < 40; i++) {
    OK(strataAllReduceCoded(send, recv, residual, COUNT, ncclFloat, ncclAvg, "mx8", comm, NULL));
    all += recv[17] * nranks;
  }
  CHECK(fabs(all / 40 - exact(17)) < 8);
  int block = COUNT / nranks;
  memset(residual, 0, COUNT * sizeof *residual);
  OK(strataReduceScatterCoded(send, recv, residual, block, ncclFloat, ncclSum, "int8", comm, NULL));
  int kept = 0;
  for (int i = 0; i < block * nranks; i++) kept += residual[i] != 0;
  CHECK(kept > block);
  for (int i = 0; i < block; i++)
    CHECK(fabs(recv[i] - exact(rank * block + i)) < 565.0 * nranks / 127);

  CHECK(strataAllReduceCoded(send, recv, NULL, COUNT, ncclInt, ncclSum, "mx8", comm, NULL) == ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(comm), "int32") != NULL);
  CHECK(strataAllReduceCoded(send, recv, NULL, COUNT, ncclFloat, ncclSum, "mx9", comm, NULL) == ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(comm), "did you mean mx8") != NULL);
  CHECK(strataAllReduceCoded(send, recv, NULL, COUNT, ncclFloat, ncclSum, NULL, comm, NULL) == ncclInvalidArgument);
  CHECK(strataAllReduceCoded(send, recv, NULL, COUNT, ncclBfloat16, ncclSum, "bf16", comm, NULL) == ncclInvalidArgument);
  CHECK(strataAllReduceCoded(send, recv, residual, COUNT, ncclFloat, ncclMax, "mx8", comm, NULL) == ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(comm), "residual") != NULL);
  CHECK(strataAllReduceCoded(send, recv, recv, COUNT, ncclFloat, ncclSum, "mx8", comm, NULL) == ncclInvalidArgument);
  CHECK(strataAllReduceCoded(send, recv, (float *)send + 1, COUNT - 1, ncclFloat, ncclSum, "mx8", comm, NULL) ==
        ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(comm), "overlaps") != NULL);
  OK(strataAllReduceCoded(send, recv, NULL, 0, ncclFloat, ncclSum, "mx8", comm, NULL));
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.algSelection = "mx8", config.forceAlgSelection = 1;
  memset(recv, 0, COUNT * sizeof *recv);
  OK(ncclAllReduceConfig(send, recv, COUNT, ncclFloat, ncclSum, comm, NULL, &config));
  CHECK(error_of(recv, 1) < 1 && error_of(recv, 1) > 0);
}

static void environment(const float *send, float *recv) {
  OK(ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, comm, NULL));
  CHECK(error_of(recv, 1) < 1 && error_of(recv, 1) > 0);
  /* A group of two is coded as they would be one by one. */
  float *other = calloc(COUNT, sizeof *other);
  OK(ncclGroupStart());
  OK(ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, comm, NULL));
  OK(ncclAllReduce(send, other, COUNT, ncclFloat, ncclSum, comm, NULL));
  OK(ncclGroupEnd());
  CHECK(error_of(recv, 1) < 1 && error_of(recv, 1) > 0 && error_of(other, 1) < 1);
  free(other);
  int *numbers = malloc(COUNT * sizeof *numbers);
  for (int i = 0; i < COUNT; i++) numbers[i] = i * 31 + rank;
  OK(ncclAllReduce(numbers, numbers, COUNT, ncclInt, ncclSum, comm, NULL));
  for (int i = 0; i < COUNT; i++) CHECK(numbers[i] == i * 31 * nranks + nranks * (nranks - 1) / 2);
  free(numbers);
  float few[3] = {1.0f / 3, 2.0f / 7, (float)rank}, sums[3];
  OK(ncclAllReduce(few, sums, 3, ncclFloat, ncclSum, comm, NULL));
  CHECK(fabs(sums[0] - nranks / 3.0) < 1e-5);
}

/* The size of a block that rank `from` has for rank `to`: a few long ones, many short ones, some of nothing. */
static size_t size_of(int from, int to, int seed) {
  Random random = {(uint64_t)seed * 1000 + (uint64_t)from * 10 + (uint64_t)to};
  switch (below(&random, 4)) {
    case 0: return 0;
    case 1: return below(&random, 40);
    case 2: return below(&random, 3000);
    default: return 32768 + 32768 * below(&random, 3) + below(&random, 2);
  }
}

static int inexact; /* How many results were near and not exact. */

static int near(float got, double sum, double sizes) {
  inexact += fabs(got - sum) > 0.001 * sizes;
  return fabs(got - sum) <= 0.13 * sizes + 565e-4;
}

static void vectored(int seed) {
  size_t counts[MOST_RANKS], received[MOST_RANKS], sent = 0, incoming = 0, longest = 4 * 131072 * (size_t)nranks;
  float *send = malloc(longest * sizeof *send), *recv = calloc(longest, sizeof *recv);
  for (size_t i = 0; i < longest; i++) send[i] = value(rank, (int)(i % 100000));
  /* What rank i has for this one lies after what it has for those before. */
  for (int to = 0; to < nranks; to++) counts[to] = size_of(rank, to, seed), received[to] = size_of(to, rank, seed);
  OK(strataAllToAllV(send, counts, NULL, recv, received, NULL, ncclFloat, comm, NULL));
  for (int from = 0; from < nranks; incoming += received[from++]) {
    size_t first = 0;
    for (int to = 0; to < rank; to++) first += size_of(from, to, seed);
    for (size_t i = 0; i < received[from]; i++) {
      /* Nobody knows all sizes: as it is. */
      CHECK(recv[incoming + i] == value(from, (int)((first + i) % 100000)));
    }
  }
  for (int to = 0; to < nranks; to++) counts[to] = size_of(0, to, seed + 1);
  for (int to = 0; to < rank; to++) sent += counts[to];
  OK(strataAllGatherV(send, recv, counts, NULL, ncclFloat, comm, NULL));
  for (int from = 0, at = 0; from < nranks; at += (int)counts[from++])
    for (size_t i = 0; i < counts[from]; i++) CHECK(near(recv[(size_t)at + i], value(from, (int)i % 100000), fabs(value(from, (int)i % 100000))));
  OK(strataReduceScatterV(send, recv, counts, NULL, ncclFloat, ncclSum, comm, NULL));
  for (size_t i = 0; i < counts[rank]; i++) {
    double sum = 0, sizes = 0;
    for (int of = 0; of < nranks; of++) sum += value(of, (int)((sent + i) % 100000)), sizes += fabs(value(of, (int)((sent + i) % 100000)));
    CHECK(near(recv[i], sum, sizes));
  }
  free(send), free(recv);
}

/* Rank 1 alone gives a residual: its call is another one. */
static void one_residual(const float *send, float *recv, float *residual) {
  ncclResult_t result = strataAllReduceCoded(send, recv, rank == 1 ? residual : NULL, COUNT, ncclFloat, ncclSum, "mx8", comm, NULL);
  CHECK(result == ncclInvalidUsage || result == ncclRemoteError);
  CHECK(strstr(ncclGetLastError(comm), "rank 1 called all_reduce of") && strstr(ncclGetLastError(comm), "in mx8 with a residual"));
}

static void *rank_main(void *which) {
  rank = (int)(intptr_t)which;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  float *send = malloc(COUNT * sizeof *send), *recv = calloc(COUNT, sizeof *recv), *residual = calloc(COUNT, sizeof *residual);
  for (int i = 0; i < COUNT; i++) send[i] = value(rank, i);
  if (!strcmp(what, "environment")) environment(send, recv);
  else if (!strcmp(what, "vectored")) {
    for (int seed = 0; seed < 30; seed++) vectored(seed);
    CHECK(inexact > 1000); /* Else nothing was coded. */
  }
  else if (!strcmp(what, "one-residual")) one_residual(send, recv, residual);
  else entries(send, recv, residual);
  OK(strcmp(what, "one-residual") ? ncclCommDestroy(comm) : ncclCommAbort(comm));
  free(send), free(recv), free(residual);
  return NULL;
}

int main(int argc, char **argv) {
  alarm(100);
  CHECK(argc > 3);
  what = argv[1], nranks = atoi(argv[2]), nnodes = atoi(argv[3]);
  CHECK(nranks <= MOST_RANKS && nnodes > 1);
  if (!strcmp(what, "environment")) setenv("STRATA_ALLREDUCE_CODE", "mx8", 1);
  if (!strcmp(what, "vectored")) {
    setenv("STRATA_ALLTOALL_CODE", "mx8", 1), setenv("STRATA_ALLGATHER_CODE", "mx8", 1);
    setenv("STRATA_REDUCESCATTER_CODE", "mx8", 1), setenv("STRATA_CODE_MIN_BYTES", "0", 1);
  }
  OK(ncclGetUniqueId(&id));
  in_processes(rank_main);
  return 0;
}
