/* Every call on memory of a GPU: messages of all lengths, all collectives, scalars that a stream writes, memory from
 * ncclMemAlloc, odd places and counts; and what must be refused.
 *
 * gpu_calls CASE GRID */
#include "gpu.h"
#include <fcntl.h>

enum { SECONDS = 1000 };

static gpu_stream begin_rank(int rank) {
  gpu_use(getenv("ONE_DEVICE") ? 0 : rank % 8);
  return gpu_new_stream();
}

static ncclComm_t begin_comm(int rank, int n) {
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, n, shared_id(0, rank), rank));
  return comm;
}

static unsigned char byte_of(int call, int from, int to, size_t index) {
  return (unsigned char)(((uint32_t)number(call * 64 + to, from, index)) >> 7);
}

/* Device memory with bytes of a rank for another, put there by a stream. */
static char* bytes_for(int call, int from, int to, size_t bytes, gpu_stream stream) {
  char* device = gpu_memory(bytes + 1);
  unsigned char* host = malloc(bytes + 1);
  for (size_t i = 0; i < bytes; i++) host[i] = byte_of(call, from, to, i);
  if (bytes > 0) gpu_to(device, host, bytes, stream);
  free(host);
  return device;
}

static void check_bytes(const char* device, int call, int from, int to, size_t bytes, gpu_stream stream) {
  unsigned char* host = malloc(bytes + 1);
  if (bytes > 0) gpu_from(host, device, bytes, stream);
  gpu_wait(stream);
  for (size_t i = 0; i < bytes; i++)
    if (host[i] != byte_of(call, from, to, i)) {
      fprintf(stderr, "call %d from %d to %d: byte %zu of %zu is %d, not %d\n", call, from, to, i, bytes, host[i],
              byte_of(call, from, to, i));
      exit(3);
    }
  free(host);
}

static size_t length_of(int round, int from, int to) {
  static const size_t lengths[] = {1, 5000000, 3, 4097, 65536, 70001, 0, 1048576, 1048577};
  return lengths[(size_t)(round + from * 3 + to) % (sizeof(lengths) / sizeof(*lengths))];
}

/* Each round everybody sends to everybody, to itself too; then pairs without a group. */
static void messages(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  for (int round = 0; round < 5; round++) {
    char *in[MAX_RANKS], *out[MAX_RANKS];
    OK(ncclGroupStart());
    for (int peer = 0; peer < n; peer++) {
      size_t there = length_of(round, rank, peer), here = length_of(round, peer, rank);
      in[peer] = bytes_for(round, rank, peer, there, stream);
      out[peer] = gpu_memory(here + 1);
      OK(ncclSend(in[peer], there, ncclInt8, peer, comm, (cudaStream_t)stream));
      OK(ncclRecv(out[peer], here, ncclInt8, peer, comm, (cudaStream_t)stream));
    }
    OK(ncclGroupEnd());
    for (int peer = 0; peer < n; peer++) {
      check_bytes(out[peer], round, peer, rank, length_of(round, peer, rank), stream);
      gpu_free(in[peer]);
      gpu_free(out[peer]);
    }
  }
  for (size_t bytes = 1; bytes < 5000000; bytes = bytes * 7 + 1) {
    char *in = bytes_for(9, rank, rank ^ 1, bytes, stream), *out = gpu_memory(bytes);
    for (int turn = 0; turn < 2 && (rank ^ 1) < n; turn++) {
      if ((rank & 1) == turn)
        OK(ncclSend(in, bytes, ncclInt8, rank ^ 1, comm, (cudaStream_t)stream));
      else
        OK(ncclRecv(out, bytes, ncclInt8, rank ^ 1, comm, (cudaStream_t)stream));
    }
    if ((rank ^ 1) < n) check_bytes(out, 9, rank ^ 1, rank, bytes, stream);
  }
  OK(ncclCommDestroy(comm));
}

/* A message that is longer or shorter than what is received is an error on both sides or on the receiver's. */
static void unequal(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  char* memory = gpu_memory(2000000);
  meet(grid);
  CHECK(ncclSend(memory, 10, ncclInt8, rank, comm, (cudaStream_t)stream) != ncclSuccess);
  OK(ncclGroupStart());
  OK(ncclSend(memory, 10, ncclInt8, rank, comm, (cudaStream_t)stream));
  OK(ncclRecv(memory + 100, 11, ncclInt8, rank, comm, (cudaStream_t)stream));
  CHECK(ncclGroupEnd() != ncclSuccess);
  if (rank == 0) OK(ncclSend(memory, 1000000, ncclInt8, 1, comm, (cudaStream_t)stream));
  if (rank == 1) OK(ncclRecv(memory, 500000, ncclInt8, 0, comm, (cudaStream_t)stream));
  if (rank < 2) {
    ncclResult_t state = failure_of(comm, 15 * SECONDS);
    if (rank == 1) printf("rank 1: %d %s\n", state, ncclGetLastError(comm));
    CHECK(stream_rests(stream, 15 * SECONDS));
  }
  meet(grid);
  WITHIN(15 * SECONDS, ncclCommAbort(comm));
}

/* The collectives that only move, from and to every root; rank `from`'s part for rank `to` is as for a message. */
static void moves(int rank, const struct grid* grid) {
  static const size_t lengths[] = {1, 17, 4096, 300001};
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  for (int call = 0; call < 4 * 4; call++) {
    size_t bytes = lengths[call / 4];
    int root = (call + 1) % n;
    char *in = gpu_memory((size_t)n * bytes), *out = gpu_memory((size_t)n * bytes);
    for (int to = 0; to < n; to++) {
      char* part = bytes_for(call, rank, to, bytes, stream);
#ifdef HIP
      GPU(hipMemcpyAsync(in + (size_t)to * bytes, part, bytes, hipMemcpyDefault, stream));
#else
      GPU(cuMemcpyAsync((CUdeviceptr)(uintptr_t)in + (size_t)to * bytes, (CUdeviceptr)(uintptr_t)part, bytes, stream));
#endif
    }
    cudaStream_t ordered = (cudaStream_t)stream;
    switch (call % 4) {
      case 0:
        OK(ncclBroadcast(in, out, bytes, ncclInt8, root, comm, ordered));
        check_bytes(out, call, root, 0, bytes, stream);
        break;
      case 1:
        OK(ncclGather(in, out, bytes, ncclInt8, root, comm, ordered));
        for (int from = 0; from < n && rank == root; from++)
          check_bytes(out + (size_t)from * bytes, call, from, 0, bytes, stream);
        break;
      case 2:
        OK(ncclScatter(in, out, bytes, ncclInt8, root, comm, ordered));
        check_bytes(out, call, root, rank, bytes, stream);
        break;
      default:
        OK(ncclAlltoAll(in, out, bytes, ncclInt8, comm, ordered));
        for (int from = 0; from < n; from++) check_bytes(out + (size_t)from * bytes, call, from, rank, bytes, stream);
    }
  }
  OK(ncclCommDestroy(comm));
}

/* Reductions to one rank; averages; products by a scalar that the stream has just written. */
static void reductions(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  enum { COUNT = 20000 };
  float *in = gpu_memory(COUNT * sizeof(float)), *out = gpu_memory(COUNT * sizeof(float)), *scalar = gpu_memory(4);
  float* host = malloc(COUNT * sizeof(float));
  for (int call = 0; call < 9; call++) {
    int root = call % n;
    ncclRedOp_t op = call % 3 == 0 ? ncclSum : call % 3 == 1 ? ncclAvg : ncclMax;
    for (int i = 0; i < COUNT; i++) host[i] = (float)((rank + i + call) % 16);
    gpu_to(in, host, COUNT * sizeof(float), stream);
    float factor = (float)(1 + rank + call);
    ncclRedOp_t made = op;
    if (call >= 6) {
      gpu_to(scalar, &factor, sizeof(factor), stream);
      OK(ncclRedOpCreatePreMulSum(&made, scalar, ncclFloat32, ncclScalarDevice, comm));
    }
    if (call % 2 == 0) OK(ncclReduce(in, out, COUNT, ncclFloat32, made, root, comm, (cudaStream_t)stream));
    else OK(ncclAllReduce(in, out, COUNT, ncclFloat32, made, comm, (cudaStream_t)stream));
    if (made != op) OK(ncclRedOpDestroy(made, comm));
    for (int i = 0; i < COUNT; i++) host[i] = -1;
    gpu_from(host, out, COUNT * sizeof(float), stream);
    gpu_wait(stream);
    for (int i = 0; i < COUNT && (call % 2 || rank == root); i++) {
      float wanted = 0;
      for (int from = 0; from < n; from++) {
        float value = (float)((from + i + call) % 16);
        if (call >= 6) wanted += value * (float)(1 + from + call);
        else if (op == ncclMax) wanted = value > wanted ? value : wanted;
        else wanted += value;
      }
      if (op == ncclAvg && call < 6) wanted /= (float)n;
      if (host[i] != wanted) {
        fprintf(stderr, "rank %d call %d: element %d is %g, not %g\n", rank, call, i, (double)host[i], (double)wanted);
        exit(3);
      }
    }
  }
  OK(ncclCommDestroy(comm));
}

/* Odd places, no elements, one element, in any order on one stream; ever the same communicator. */
static void corners(int rank, const struct grid* grid) {
  static const size_t counts[] = {0, 1, 2, 3, 255, 4095, 65537, 500000};
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  OK(ncclAllReduce(NULL, NULL, 0, ncclInt, ncclSum, comm, (cudaStream_t)stream));
  for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
    for (size_t shift = 0; shift < 4; shift++) {
      struct sum sum = begin_sum((int)(i * 4 + shift), rank, n, counts[i], shift, stream);
      issue_sum(&sum, comm);
      end_sum(&sum);
      /* Bytes at any address. */
      size_t bytes = counts[i] > 70000 ? 70001 : counts[i];
      char *in = gpu_memory(bytes + 8), *out = gpu_memory((bytes + 8) * (size_t)n);
      unsigned char* host = malloc(bytes + 8);
      for (size_t k = 0; k < bytes; k++) host[k] = byte_of(7, rank, 0, k);
      if (bytes > 0) gpu_to(in + shift, host, bytes, stream);
      OK(ncclAllGather(in + shift, out + 3, bytes, ncclInt8, comm, (cudaStream_t)stream));
      for (int from = 0; from < n; from++) check_bytes(out + 3 + (size_t)from * bytes, 7, from, 0, bytes, stream);
      free(host);
    }
  OK(ncclCommDestroy(comm));
}

/* What ncclMemAlloc gives is memory of the device. */
static void allocated(int rank, const struct grid* grid) {
  int n = grid->nranks;
  gpu_stream stream = begin_rank(rank);
  ncclComm_t comm = begin_comm(rank, n);
  unsigned long long before[8], after[8];
  int *memory, *host = malloc(40000);
  softgpuCounts(before);
  OK(ncclMemAlloc((void**)&memory, 80000));
  for (int i = 0; i < 10000; i++) host[i] = number(1, rank, (size_t)i);
  gpu_to(memory, host, 40000, stream);
  OK(ncclAllReduce(memory, memory + 10000, 10000, ncclInt, ncclSum, comm, (cudaStream_t)stream));
  gpu_from(host, memory + 10000, 40000, stream);
  gpu_wait(stream);
  for (int i = 0; i < 10000; i++) CHECK(host[i] == sum_of_numbers(1, n, (size_t)i));
  OK(ncclMemFree(memory));
  softgpuCounts(after);
  CHECK(after[0] == before[0] && after[1] == before[1]);
  OK(ncclCommDestroy(comm));
}

static int open_files(void) {
  int count = 0;
  for (int file = 0; file < 1024; file++) count += fcntl(file, F_GETFD) >= 0;
  return count;
}

/* Whether no more files than so many are open, now or soon: a connection closes when both of its ends have hung up, and a
 * rank does not wait for the other one's service when it leaves. */
static int files_come_to(int most, int limit_ms) {
  int64_t end = now_ms() + limit_ms;
  int files;
  while ((files = open_files()) > most) {
    if (now_ms() > end) {
      fprintf(stderr, "%d files are open, and were %d\n", files, most);
      return 0;
    }
    usleep(500);
  }
  return 1;
}

/* A communicator is made, used and destroyed many times, and nothing grows. */
static void cycles(int rank, const struct grid* grid) {
  enum { SETTLED = 20 };
  const char* wanted = getenv("CYCLES");
  int n = grid->nranks, files = 0, cycles = wanted ? atoi(wanted) : 300;
  unsigned long long first[8], counts[8];
  gpu_stream stream = begin_rank(rank);
  for (int cycle = 0; cycle < cycles; cycle++) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, n, shared_id(cycle % IDS, rank), rank));
    right_sum(cycle, comm, rank, n, 1000, stream);
    meet(grid);
    if (rank == 0) atomic_store(&shared->ready[(cycle + 1) % IDS], 0);
    OK(ncclCommDestroy(comm));
    meet(grid);
    softgpuCounts(cycle == SETTLED ? first : counts);
    /* The least of several cycles: one may see a connection that is about to close. */
    int now = open_files();
    if (cycle == SETTLED || (cycle > SETTLED && cycle < 2 * SETTLED && now < files)) files = now;
  }
  for (int i = 0; i < 6; i++)
    if (counts[i] > first[i]) fprintf(stderr, "rank %d: count %d grew from %llu to %llu\n", rank, i, first[i], counts[i]);
  for (int i = 0; i < 6; i++) CHECK(counts[i] <= first[i]);
  CHECK(files_come_to(files, 20000));
  if (rank == 0) printf("%llu allocations, %llu pinned, %llu streams, %llu events\n", counts[0], counts[2], counts[3], counts[4]);
}

static const struct scenario scenarios[] = {
    {"messages", messages, NULL}, {"unequal", unequal, NULL},     {"moves", moves, NULL},   {"reductions", reductions, NULL},
    {"corners", corners, NULL},   {"allocated", allocated, NULL}, {"cycles", cycles, NULL}, {NULL, NULL, NULL},
};

int main(int argc, char** argv) { return run_scenario(scenarios, argc, argv); }
