/* Collectives on a stream that a CUDA graph is being captured from, beside others on one that is not. The CUDA library is
 * a double, which this program tells which stream is captured.
 *
 * capture GRID */
#include "ranks.h"
#include <dlfcn.h>

static void (*set_capturing)(cudaStream_t stream, int capturing);
static void (*contexts)(int* current, int* left);
static char streams[2]; /* Their addresses are the streams. */

static void calls(ncclComm_t comm, int rank, int n, cudaStream_t stream, int in_group) {
  int in[64], all[64 * MAX_RANKS], sums[64], mine = 0;
  for (int i = 0; i < 64; i++) in[i] = rank + i;
  if (in_group) OK(ncclGroupStart());
  OK(ncclAllGather(in, all, 64, ncclInt, comm, stream));
  OK(ncclAllReduce(in, sums, 64, ncclInt, ncclSum, comm, stream));
  if (in_group) OK(ncclGroupEnd());
  for (int i = 0; i < 64 * n; i++) CHECK(all[i] == i / 64 + i % 64);
  for (int i = 0; i < 64; i++) CHECK(sums[i] == n * i + n * (n - 1) / 2);
  OK(ncclReduceScatter(all, &mine, 1, ncclInt, ncclSum, comm, stream));
  CHECK(mine == n * all[rank]);
}

static void rank_main(int rank, const struct grid* grid) {
  int n = grid->nranks, current, left;
  ncclComm_t comm;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  cudaStream_t captured = (cudaStream_t)(void*)&streams[0], plain = (cudaStream_t)(void*)&streams[1];
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  CHECK(cuda);
  *(void**)&set_capturing = dlsym(cuda, "doubleCudaSetCapturing");
  CHECK(set_capturing);
  config.commName = "world";
  OK(ncclCommInitRankConfig(&comm, n, shared_id(0, rank), rank, &config));
  calls(comm, rank, n, captured, 0);
  set_capturing(captured, 1);
  for (int in_group = 0; in_group < 2; in_group++) {
    calls(comm, rank, n, captured, in_group);
    calls(comm, rank, n, plain, in_group);
  }
  calls(comm, rank, n, NULL, 0); /* the legacy stream */
  set_capturing(captured, 0);
  calls(comm, rank, n, captured, 1);
  OK(ncclCommDestroy(comm));
  *(void**)&contexts = dlsym(cuda, "doubleCudaContexts");
  CHECK(contexts);
  contexts(&current, &left);
  if (rank == 0) printf("a device was %s current, contexts left: %d\n", current ? "made" : "never made", left);
}

int main(int argc, char** argv) {
  struct grid grid = parse_grid(argc > 1 ? argv[1] : "2x2");
  if (run_ranks(&grid, rank_main, 60, NULL) != 0) return 1;
  printf("captured and other streams agree\n");
  return 0;
}
