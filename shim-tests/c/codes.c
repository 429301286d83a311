/* Codes from a C program: what is refused, what the environment codes and what it leaves alone, and residuals.
 *
 * usage: codes entries|environment RANKS NODES
 *
 * With "environment" STRATA_ALLREDUCE_CODE is set.
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

static void *rank_main(void *which) {
  rank = (int)(intptr_t)which;
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  float *send = malloc(COUNT * sizeof *send), *recv = calloc(COUNT, sizeof *recv), *residual = calloc(COUNT, sizeof *residual);
  for (int i = 0; i < COUNT; i++) send[i] = value(rank, i);
  if (!strcmp(what, "environment")) environment(send, recv);
  else entries(send, recv, residual);
  OK(ncclCommDestroy(comm));
  free(send), free(recv), free(residual);
  return NULL;
}

int main(int argc, char **argv) {
  alarm(100);
  CHECK(argc > 3);
  what = argv[1], nranks = atoi(argv[2]), nnodes = atoi(argv[3]);
  CHECK(nranks <= MOST_RANKS && nnodes > 1);
  if (!strcmp(what, "environment")) setenv("STRATA_ALLREDUCE_CODE", "mx8", 1);
  OK(ncclGetUniqueId(&id));
  in_processes(rank_main);
  return 0;
}
