/* Ranks that are late, and the others that do not wait for them (STRATA_LATE=relay). Each rank is a process; a seed says how many there
   are, on how many nodes, what they call, and who comes how much later. Every element of every result is compared with what it
   must be, and all ranks compare a digest of the bits of each result: it is the same on all, whoever was late. On a GPU (SOFT_DEVICE)
   a rank is late as its program is, or as its stream is while the program has made the call. */
#define _GNU_SOURCE
#include "places.h"

#include <math.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#define MOST_RANKS 8
#define MOST_CALLS 64
#define MOST_BYTES (5 << 20)
#undef CHECK
#define CHECK(condition)                                                                                      \
  do {                                                                                                        \
    if (!(condition)) {                                                                                       \
      fprintf(stderr, "seed %llu, rank %d of %d on %d nodes, call %d (%s), line %d: %s (%s)\n", seed, me, nranks, \
              nnodes, now, what, __LINE__, #condition, ncclGetLastError(NULL));                               \
      _exit(1);                                                                                               \
    }                                                                                                         \
  } while (0)

/* What all processes see. */
struct shared {
  uint64_t digests[MOST_RANKS][MOST_CALLS];
  volatile long late_calls[MOST_RANKS];
};

static unsigned long long seed = 1, state;
static int me = -1, now, nranks, nnodes, calls;
static char what[128];
static struct shared* shared;

static unsigned next(unsigned below) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return (unsigned)(state >> 33) % below;
}

/* The types, with the fields of the floats. */
static const struct type {
  ncclDataType_t type;
  const char* name;
  int bytes, exponent, fraction, is_signed;
} types[] = {
    {ncclInt8, "int8", 1, 0, 0, 1},       {ncclUint8, "uint8", 1, 0, 0, 0},         {ncclInt32, "int32", 4, 0, 0, 1},
    {ncclUint32, "uint32", 4, 0, 0, 0},   {ncclInt64, "int64", 8, 0, 0, 1},         {ncclUint64, "uint64", 8, 0, 0, 0},
    {ncclFloat16, "half", 2, 5, 10, 1},   {ncclFloat32, "float", 4, 8, 23, 1},      {ncclFloat64, "double", 8, 11, 52, 1},
    {ncclBfloat16, "bfloat16", 2, 8, 7, 1}, {ncclFloat8e4m3, "f8e4m3", 1, 4, 3, 1}, {ncclFloat8e5m2, "f8e5m2", 1, 5, 2, 1},
};

static void put_element(const struct type* type, void* to, double value) {
  uint64_t bits = (uint64_t)(int64_t)value;
  if (type->exponent && value == 0) bits = 0;
  else if (type->exponent) {
    int exponent;
    double fraction = 2 * frexp(fabs(value), &exponent) - 1;
    uint64_t biased = exponent - 1 + (1 << (type->exponent - 1)) - 1;
    bits = (value < 0 ? 1ULL << (8 * type->bytes - 1) : 0) | biased << type->fraction |
           (uint64_t)ldexp(fraction, type->fraction);
  }
  memcpy(to, &bits, type->bytes);
}

static double get_element(const struct type* type, const void* from) {
  uint64_t bits = 0;
  memcpy(&bits, from, type->bytes);
  int width = 8 * type->bytes;
  if (!type->exponent) {
    if (type->is_signed && width < 64 && bits >> (width - 1)) bits |= ~0ULL << width;
    return type->is_signed ? (double)(int64_t)bits : (double)bits;
  }
  int biased = bits >> type->fraction & ((1 << type->exponent) - 1), bias = (1 << (type->exponent - 1)) - 1;
  double fraction = ldexp((double)(bits & ((1ULL << type->fraction) - 1)), -type->fraction);
  double value = biased ? ldexp(1 + fraction, biased - bias) : ldexp(fraction, 1 - bias);
  return bits >> (width - 1) ? -value : value;
}

/* A rank's elements: small, so that sums and products are exact. */
static double element(int rank, size_t at, ncclRedOp_t op, const struct type* type) {
  unsigned mixed = (unsigned)(at * 2654435761u) + rank * 40503u + now * 97u;
  mixed ^= mixed >> 13;
  if (op == ncclProd) return 1 + mixed % 2;
  if (type->bytes == 1) return mixed % 2;
  if (type->type == ncclBfloat16) return mixed % 4;
  return mixed % 16;
}

static double expected(size_t at, ncclRedOp_t op, const struct type* type, int scaled) {
  double result = element(0, at, op, type);
  for (int rank = 1; rank < nranks; rank++) {
    double value = element(rank, at, op, type) * (scaled ? rank + 1 : 1);
    if (op == ncclProd) result *= value;
    else if (op == ncclMax) result = fmax(result, value);
    else if (op == ncclMin) result = fmin(result, value);
    else result += value;
  }
  return result;
}

static void check(const struct type* type, ncclRedOp_t op, int scaled, const char* out, size_t count) {
  uint64_t digest = 1469598103934665603ULL;
  int is_average = !scaled && op == ncclAvg;
  int is_narrow = is_average && (type->type == ncclFloat16 || type->bytes == 1) && type->exponent;
  for (size_t i = 0; i < count; i++) {
    double got = get_element(type, out + i * type->bytes), want = expected(i, scaled ? ncclSum : op, type, scaled);
    if (is_average) want = type->exponent ? want / nranks : trunc(want / nranks);
    if (op == ncclProd && !type->exponent && type->bytes == 1) want = type->is_signed ? (int8_t)(int)want : (uint8_t)(int)want;
    /* Each input is multiplied by 1/n and rounded, and so is each sum. */
    double slack = is_narrow ? (want + 1) * nranks * ldexp(1, -type->fraction) : is_average && type->exponent ? want * ldexp(1, -type->fraction) : 0;
    if (fabs(got - want) > slack) {
      fprintf(stderr, "seed %llu, rank %d of %d, call %d (%s): element %zu of %zu is %g, not %g\n", seed, me, nranks, now, what, i,
              count, got, want);
      _exit(1);
    }
  }
  for (size_t i = 0; i + 8 <= count * type->bytes; i += 8) {
    uint64_t word;
    memcpy(&word, out + i, 8);
    digest = (digest ^ word) * 1099511628211ULL;
  }
  shared->digests[me][now] = digest;
}

static long late_calls(ncclComm_t comm) {
  char text[4096];
  /* On one node a vendor's library serves its communicators alone. */
  if (nnodes == 1 && getenv("LATE_IN_FRONT")) return 0;
  OK(strataCommState(comm, text, sizeof(text)));
  char* at = strstr(text, "\"late_calls\":");
  CHECK(at != NULL);
  return strtol(at + 13, NULL, 10);
}

/* What a rank's calls are made with: memory of the place's, and what is put there or comes from there. */
static struct place {
  char *in, *out, *of_small, *in_host, *out_host;
  strataStream_t stream;
} at;

/* This rank comes later: on a GPU its stream does, mostly. */
static void come_late(int us, strataStream_t on, int is_stream) {
  if (us > 0 && is_on_device && is_stream) place_delay(on, us);
  else if (us > 0) usleep(us);
}

/* One all-reduce, by itself or in a group with another one, on a stream or on none. */
static void all_reduce(ncclComm_t comm, int late_us, int is_stream) {
  const struct type* type = &types[next(sizeof(types) / sizeof(types[0]))];
  ncclRedOp_t op = next(5), made = op;
  int in_place = next(2), on_stream = next(2), scaled = next(6) == 0 && type->bytes > 1, grouped = next(5) == 0;
  size_t beyond = is_on_device ? 1 << 20 : MOST_BYTES - (1 << 20); /* Kernels are interpreted. */
  size_t bytes = next(8) ? (1 << 20) + next(next(2) ? beyond : 4096) : next(1 << 16);
  size_t count = bytes / type->bytes;
  strataStream_t on = on_stream ? at.stream : NULL;
  float small[2] = {(float)me, 0};
  if (scaled) {
    char factor[8];
    put_element(type, factor, me + 1);
    /* Read when the call begins, or now. */
    int is_there = count % 2;
    put(at.of_small + 8, factor, 8);
    OK(ncclRedOpCreatePreMulSum(&made, is_there ? at.of_small + 8 : factor, type->type,
                                is_there ? ncclScalarDevice : ncclScalarHostImmediate, comm));
  }
  snprintf(what, sizeof(what), "%zu %s, operation %d%s%s%s%s", count, type->name, scaled ? 5 : op, in_place ? ", in place" : "",
           on_stream ? ", on a stream" : "", grouped ? ", in a group" : "", scaled ? ", scaled" : "");
  char* from = in_place ? at.out : at.in;
  for (size_t i = 0; i < count; i++) put_element(type, at.in_host + i * type->bytes, element(me, i, scaled ? ncclSum : op, type));
  put(from, at.in_host, count * type->bytes);
  put(at.of_small, small, 8);
  come_late(late_us, on, is_stream);
  if (grouped) OK(ncclGroupStart());
  OK(ncclAllReduce(from, at.out, count, type->type, made, comm, (cudaStream_t)on));
  if (grouped) {
    OK(ncclAllReduce(at.of_small, at.of_small + 4, 1, ncclFloat, ncclSum, comm, (cudaStream_t)on));
    OK(ncclGroupEnd());
  }
  if (on || is_on_device) place_finish(on);
  take(small, at.of_small, 8);
  if (grouped) CHECK(small[1] == nranks * (nranks - 1) / 2);
  if (!in_place) {
    take(at.out_host, at.in, count * type->bytes);
    CHECK(!memcmp(at.in_host, at.out_host, count * type->bytes));
  }
  take(at.out_host, at.out, count * type->bytes);
  check(type, op, scaled, at.out_host, count);
  if (scaled) OK(ncclRedOpDestroy(made, comm));
}

/* What is not relayed goes on as ever. */
static void other(ncclComm_t comm, int late_us, int is_stream) {
  int root = next(nranks), kind = next(3), behind = (me + nranks - 1) % nranks;
  size_t count = 1 + next(100000), first = kind == 1 ? root * count : 0;
  int whose = kind == 2 ? behind : root;
  strataStream_t on = is_on_device ? at.stream : NULL;
  snprintf(what, sizeof(what), "other call %d of %zu", kind, count);
  int *from = (int*)at.in_host, *to = (int*)at.out_host;
  for (size_t i = 0; i < count; i++) from[i] = (int)(me * 1000 + i % 1000);
  put(at.in, from, 4 * count);
  come_late(late_us, on, is_stream);
  if (kind == 0) {
    OK(ncclBroadcast(at.in, at.out, count, ncclInt32, root, comm, (cudaStream_t)on));
  } else if (kind == 1) {
    OK(ncclAllGather(at.in, at.out, count, ncclInt32, comm, (cudaStream_t)on));
  } else {
    OK(ncclGroupStart());
    OK(ncclSend(at.in, count, ncclInt32, (me + 1) % nranks, comm, (cudaStream_t)on));
    OK(ncclRecv(at.out, count, ncclInt32, behind, comm, (cudaStream_t)on));
    OK(ncclGroupEnd());
  }
  if (on) place_finish(on);
  take(to, at.out + 4 * first, 4 * count);
  for (size_t i = 0; i < count; i++) CHECK(to[i] == (int)(whose * 1000 + i % 1000));
}

/* The seed's calls. */
static void make_calls(ncclComm_t comm) {
  for (now = 0; now < calls; now++) {
    /* How long such calls take is known after the first ones. */
    int is_late = now > 1 && next(2), who = next(nranks), others = next(4), us = next(next(2) ? 60000 : 6000), kind = next(6);
    int is_among = 0;
    /* Some of the others, or each rank by a time of its own: they come when they have just been asked to relay. */
    for (int rank = 0; others < 2 && rank < nranks; rank++) {
      unsigned of_rank = next(1000);
      if (rank == me) is_among = others || of_rank % 3 == 0, us = others ? (int)(us * of_rank / 1000) : us + (int)of_rank * 10;
    }
    int late_us = is_late && (who == me || is_among) ? us : 0, is_stream = (now + me + seed) % 4 != 0;
    if (kind < 5) all_reduce(comm, late_us, is_stream);
    else other(comm, late_us, is_stream);
  }
  shared->late_calls[me] = late_calls(comm);
}

static void take_place(void) {
  open_place();
  at = (struct place){place_for(MOST_BYTES), place_for(MOST_BYTES), place_for(16), malloc(MOST_BYTES), malloc(MOST_BYTES), place_stream()};
}

static void rank_main(ncclUniqueId id) {
  char node[32];
  ncclComm_t comm;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(120);
  take_place();
  snprintf(node, sizeof(node), "node%d", me * nnodes / nranks);
  setenv("NCCL_HOSTID", node, 1);
  int of_host = seed % 3 == 0 && !is_on_device;
  OK(of_host ? strataCommInitHost(&comm, nranks, id, me, 60000) : ncclCommInitRank(&comm, nranks, id, me));
  make_calls(comm);
  OK(ncclCommDestroy(comm));
  _exit(0);
}

/* One rank of a job that a launcher has started: a communicator for each seed. */
static long launched(unsigned long long first, unsigned long long seeds) {
  ncclUniqueId id;
  ncclComm_t world, comm;
  long late = 0;
  alarm(170);
  OK(strataGetWorldId(&id, &nranks, &me));
  CHECK(nranks <= MOST_RANKS);
  take_place();
  OK(ncclCommInitRank(&world, nranks, id, me));
  for (seed = first; seed < first + seeds; seed++) {
    uint64_t mine[MOST_CALLS + 1] = {0}, all[MOST_RANKS][MOST_CALLS + 1];
    state = seed * 2654435761u + 12345;
    calls = 8 + next(24);
    OK(ncclCommSplit(world, 0, me, &comm, NULL));
    make_calls(comm);
    OK(ncclCommDestroy(comm));
    memcpy(mine, shared->digests[me], calls * sizeof(*mine));
    mine[calls] = (uint64_t)shared->late_calls[me];
    OK(ncclAllGather(mine, all, MOST_CALLS + 1, ncclUint64, world, NULL));
    for (int rank = 0; rank < nranks; rank++) CHECK(!memcmp(mine, all[rank], sizeof(mine)));
    late += shared->late_calls[me];
  }
  OK(ncclCommDestroy(world));
  return late;
}

static long one(void) {
  ncclUniqueId id;
  pid_t pids[MOST_RANKS];
  int status, failed = 0;
  state = seed * 2654435761u + 12345;
  nranks = 2 + next(MOST_RANKS - 1);
  nnodes = 1 + next(nranks < 4 ? nranks : 4);
  calls = 8 + next(24);
  memset(shared, 0, sizeof(*shared));
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < nranks; rank++) {
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (pids[rank] == 0) {
      me = rank;
      rank_main(id);
    }
  }
  for (int rank = 0; rank < nranks; rank++) {
    CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
    if (status) fprintf(stderr, "seed %llu: rank %d ended with %x\n", seed, rank, status);
    failed |= status != 0;
  }
  for (int rank = 1; !failed && rank < nranks; rank++) {
    CHECK(shared->late_calls[rank] == shared->late_calls[0]);
    for (int at = 0; at < calls; at++)
      if (shared->digests[rank][at] != shared->digests[0][at]) {
        fprintf(stderr, "seed %llu: call %d has other bits on rank %d than on rank 0\n", seed, at, rank);
        failed = 1;
      }
  }
  if (failed) exit(1);
  return shared->late_calls[0];
}

/* Arguments: [launched] the first seed, how many. */
int main(int argc, char** argv) {
  int is_launched = argc > 1 && !strcmp(argv[1], "launched");
  argc -= is_launched, argv += is_launched;
  unsigned long long first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  long late = 0;
  setenv("STRATA_LATE", "relay", 0);
  setenv("STRATA_INTER", is_launched ? "auto" : "tcp", 0);
  shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  if (is_launched) late = launched(first, seeds);
  else for (seed = first; seed < first + seeds; seed++) late += one();
  printf("%llu seeds from %llu: in %ld calls ranks were absent at first; all results are complete, and have the same bits on all "
         "ranks\n", seeds, first, late);
  CHECK(late > 0 || seeds < 2);
  return 0;
}
