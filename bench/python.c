/* Calls of NCCL's interface in a loop of C, for bench/python.py, which opens this as a library: what the same calls take without
   Python, on the same communicator, in the same buffers. */
#include <nccl.h>
#include <stddef.h>
#include <time.h>

typedef ncclResult_t (*AllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
typedef ncclResult_t (*AllToAll)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Seconds of so many all-reduces in place; -1 where one fails. */
double bench_all_reduce(AllReduce call, float *buffer, size_t count, ncclComm_t comm, int number) {
  double start = now();
  for (int i = 0; i < number; i++)
    if (call(buffer, buffer, count, ncclFloat, ncclMax, comm, NULL) != ncclSuccess) return -1;
  return now() - start;
}

/* Seconds of so many all-to-alls, of blocks of `count`; -1 where one fails. */
double bench_all_to_all(AllToAll call, const float *send, float *recv, size_t count, ncclComm_t comm, int number) {
  double start = now();
  for (int i = 0; i < number; i++)
    if (call(send, recv, count, ncclFloat, comm, NULL) != ncclSuccess) return -1;
  return now() - start;
}
