/* strataCommAdapt, late=drop: the others do not wait for a late rank's data. Each rank is a process. In some calls one rank or two come
   much later; every element is what its contributors give: of the front of a vector without those who were late, and the bits are the
   same on all ranks. On the host, or on the GPU of SOFT_DEVICE, where the rank's stream is late. */
#define _GNU_SOURCE
#include "places.h"

#include <math.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#define RANKS 4
#define CALLS 40
#define LATE_US 250000
/* In one call ranks are later than any call takes on a busy machine, so that the others surely end before they come. */
#define LATEST_CALL 29
#define LATEST_US 3000000
#define MOST_BYTES (8 << 20)
#undef CHECK
#define CHECK(condition)                                                                                                  \
  do {                                                                                                                    \
    if (!(condition)) {                                                                                                   \
      fprintf(stderr, "%d nodes, rank %d, call %d, line %d: %s (%s)\n", nnodes, me, now, __LINE__, #condition,            \
              ncclGetLastError(NULL));                                                                                    \
      _exit(1);                                                                                                           \
    }                                                                                                                     \
  } while (0)
#define SAYS(word) CHECK(strstr(ncclGetLastError(NULL), word) != NULL)

static int me = -1, now, nnodes;
static strataStream_t stream;
static char *in, *out, *here;

/* What all processes see. */
static struct shared {
  volatile uint64_t digests[RANKS][CALLS];
  /* Elements that lack somebody, and when the call had ended. */
  volatile long lacking[RANKS][CALLS];
  volatile double ended[RANKS][CALLS], begun[RANKS][CALLS];
}* shared;

static double seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static float number(const void* from, ncclDataType_t type, size_t i) {
  float single;
  int whole;
  if (type == ncclFloat32) return memcpy(&single, (const char*)from + 4 * i, 4), single;
  if (type == ncclInt32) return memcpy(&whole, (const char*)from + 4 * i, 4), (float)whole;
  uint16_t half;
  memcpy(&half, (const char*)from + 2 * i, 2);
  uint32_t bits = type == ncclBfloat16 ? (uint32_t)half << 16 : half ? ((uint32_t)(half >> 10) + 112) << 23 | (uint32_t)(half & 0x3ff) << 13 : 0;
  memcpy(&single, &bits, 4);
  return single;
}

static void put_number(void* to, ncclDataType_t type, size_t i, int value) {
  float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, 4);
  uint16_t half = type == ncclBfloat16 ? (uint16_t)(bits >> 16) : (uint16_t)(((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ff));
  if (type == ncclFloat32) memcpy((char*)to + 4 * i, &single, 4);
  else if (type == ncclInt32) memcpy((char*)to + 4 * i, &value, 4);
  else memcpy((char*)to + 2 * i, &half, 2);
}

/* Who comes late to a call. */
static int is_late(int rank) { return now % 3 == 2 && (rank == now / 3 % RANKS || (now % 2 && rank == (now / 3 + 2) % RANKS)); }

/* Whether those have ended the call who are not late. */
static int others_have_ended(void) {
  for (int rank = 0; rank < RANKS; rank++)
    if (!is_late(rank) && shared->ended[rank][now] == 0) return 0;
  return 1;
}

/* A rank gives 12 times a power of two, so that each set of contributors shows, and its sums and averages are exact. */
static int gives(int rank) { return 12 << rank; }

static void call(ncclComm_t comm, int rescales) {
  static const ncclDataType_t types[] = {ncclFloat32, ncclBfloat16, ncclFloat16, ncclInt32};
  static const ncclRedOp_t ops[] = {ncclSum, ncclAvg, ncclMax};
  ncclDataType_t type = types[now % 4];
  ncclRedOp_t op = ops[now / 4 % 3];
  if (type == ncclInt32 && rescales) op = ncclMax;
  size_t size = type == ncclFloat32 || type == ncclInt32 ? 4 : 2, count = ((is_on_device ? 2 << 20 : MOST_BYTES) - 4096 * (size_t)now) / size;
  int in_place = now & 1, is_long = is_late(me);
  for (size_t i = 0; i < count; i++) put_number(here, type, i, gives(me));
  put(in_place ? out : in, here, count * size);
  int late_us = now == LATEST_CALL ? LATEST_US : LATE_US;
  if (is_long && is_on_device) place_delay(stream, late_us);
  for (int waited = 0; is_long && !is_on_device && waited < late_us && !(late_us == LATEST_US && others_have_ended()); waited += 50000)
    usleep(50000);
  shared->begun[me][now] = seconds();
  OK(ncclAllReduce(in_place ? out : in, out, count, type, op, comm, (cudaStream_t)stream));
  if (is_on_device) place_finish(stream);
  shared->ended[me][now] = seconds();
  take(here, out, count * size);

  uint64_t digest = 1469598103934665603ULL;
  long lacking = 0;
  int before = 0;
  for (size_t i = 0; i < count; i++) {
    float got = number(here, type, i);
    int is_right = 0, is_whole = 0;
    /* On a machine that is busy any rank may be late; mostly those who were for the element before. */
    for (int at = -1; at < 1 << RANKS && !is_right; at++) {
      int missing = at < 0 ? before : at;
      int sum = 0, most = 0, contributors = 0;
      for (int rank = 0; rank < RANKS; rank++) {
        if (~missing >> rank & 1) sum += gives(rank), most = gives(rank) > most ? gives(rank) : most, contributors++;
      }
      if (!contributors) continue;
      float want = op == ncclMax ? most : op == ncclAvg ? (float)sum / contributors : rescales ? (float)sum * RANKS / contributors : sum;
      if (type == ncclInt32) want = truncf(want);
      /* Halves are divided before they are added, so each rounds. */
      float slack = type == ncclInt32 || (op != ncclAvg && !rescales) ? 0 : fabsf(want) * (type == ncclFloat32 ? 1e-6f : type == ncclFloat16 ? 0.004f : 0.02f);
      is_right = fabsf(got - want) <= slack;
      is_whole = is_right && missing == 0;
      before = missing;
    }
    if (!is_right) fprintf(stderr, "element %zu of %zu is %g\n", i, count, got);
    CHECK(is_right);
    lacking += !is_whole;
  }
  for (size_t i = 0; i + 8 <= count * size; i += 8) {
    uint64_t word;
    memcpy(&word, here + i, 8);
    digest = (digest ^ word) * 1099511628211ULL;
  }
  shared->digests[me][now] = digest;
  shared->lacking[me][now] = lacking;
}

static void rank_main(ncclUniqueId id) {
  char node[32];
  ncclComm_t comm;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(100);
  snprintf(node, sizeof(node), "node%d", me * nnodes / RANKS);
  setenv("NCCL_HOSTID", node, 1);
  open_place();
  in = place_for(MOST_BYTES), out = place_for(MOST_BYTES), here = malloc(MOST_BYTES);
  stream = is_on_device ? place_stream() : NULL;
  OK(ncclCommInitRank(&comm, RANKS, id, me));
  CHECK(strataCommAdapt(comm, "late=dropped") == ncclInvalidArgument);
  SAYS("one of drop and bring is wanted");
  CHECK(strataCommAdapt(comm, me == 1 ? "late=drop" : "") == ncclInvalidUsage);
  SAYS("different options");
  OK(strataCommAdapt(comm, "late=drop"));
  for (now = 0; now < CALLS; now++) {
    if (now == CALLS / 2) {
      OK(strataCommAdapt(comm, "late=drop,rescale=on"));
      size_t count = MOST_BYTES / 4;
      CHECK(ncclAllReduce(in, out, count, ncclInt32, ncclSum, comm, (cudaStream_t)stream) == ncclInvalidUsage);
      SAYS("int32 cannot be rescaled");
    }
    call(comm, now >= CALLS / 2);
  }
  OK(ncclCommDestroy(comm));
  _exit(0);
}

static void all(void) {
  ncclUniqueId id;
  pid_t pids[RANKS];
  int status, failed = 0, lacking = 0, sooner = 0, by_chance = 0;
  memset((void*)shared, 0, sizeof(*shared));
  is_on_device = getenv("SOFT_DEVICE") != NULL;
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < RANKS; rank++) {
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (pids[rank] == 0) {
      me = rank;
      rank_main(id);
    }
  }
  for (int rank = 0; rank < RANKS; rank++) {
    CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
    failed |= status != 0;
  }
  CHECK(!failed);
  for (now = 0; now < CALLS; now++) {
    double came = 0, went = 1e18;
    int nobody = 1;
    for (int rank = 0; rank < RANKS; rank++) {
      CHECK(shared->digests[rank][now] == shared->digests[0][now]);
      if (is_late(rank)) nobody = 0, came = fmax(came, shared->begun[rank][now] + (is_on_device ? (now == LATEST_CALL ? LATEST_US : LATE_US) * 1e-6 : 0));
      else went = fmin(went, shared->ended[rank][now]);
    }
    lacking += !nobody && shared->lacking[0][now] > 0;
    by_chance += nobody && shared->lacking[0][now] > 0;
    sooner += !nobody && went < came;
  }
  printf("%d nodes: %d calls of %d lack what late ranks have, %d ended before these came; %d others lack something\n", nnodes, lacking, CALLS,
         sooner, by_chance);
  fflush(stdout);
  CHECK(lacking > 0 && sooner > 0);
}

int main(void) {
  setenv("STRATA_LATE", "relay", 1);
  setenv("STRATA_INTER", "tcp", 1);
  shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  for (nnodes = 1; nnodes <= 2; nnodes++) all();

  /* Where late ranks are waited for there is nothing to drop. */
  ncclComm_t comm;
  setenv("STRATA_LATE", "wait", 1);
  OK(ncclCommInitAll(&comm, 1, NULL));
  CHECK(strataCommAdapt(comm, "late=drop") == ncclInvalidUsage);
  SAYS("STRATA_LATE");
  OK(ncclCommDestroy(comm));

  /* A rank alone is nobody's late one: as elsewhere, it may ask. */
  setenv("STRATA_LATE", "relay", 1);
  OK(ncclCommInitAll(&comm, 1, NULL));
  OK(strataCommAdapt(comm, "late=drop,rescale=on"));
  OK(strataCommAdapt(comm, NULL));
  OK(ncclCommDestroy(comm));
  return 0;
}
