/* Ranks that die, and the others that go on without them (STRATA_LOST=continue). Each rank is a process; a seed says how many
   there are, on how many nodes, what they call, and who is killed when. What ranks contribute says in each result who has
   contributed: a rank's part is a bit. Every rank that is left writes down who contributed to each call; the parent looks that all
   wrote the same, that nobody comes back, and that those who are left are in all. With SURVIVORS_PROVIDER calls are that provider's; with
   SOFT_DEVICE data is on that driver's GPU, and with SURVIVORS_IN_FRONT a vendor's library works inside the nodes until ranks are lost. */
#define _GNU_SOURCE
#include "places.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 8
#define MOST_CALLS 400
#define MOST_COUNT 200000
#define LEFT_OUT 3
#define HELD 6
#define MOST_BYTES (8 * 2 * MOST_COUNT)
#undef CHECK
#undef OK
#define CHECK(condition)                                                                                     \
  do {                                                                                                       \
    if (!(condition)) {                                                                                      \
      fprintf(stderr, "seed %llu, rank %d, call %d of kind %d, line %d: %s (%s)\n", seed, me, now, kind_now, \
              __LINE__, #condition, ncclGetLastError(NULL));                                                 \
      _exit(1);                                                                                              \
    }                                                                                                        \
  } while (0)
#define OK(call)                                                                                             \
  do {                                                                                                       \
    ncclResult_t result_of = (call);                                                                         \
    if (result_of == ncclRemoteError && strstr(ncclGetLastError(NULL), "without it") != NULL) _exit(LEFT_OUT); \
    CHECK(result_of == ncclSuccess);                                                                         \
  } while (0)

/* What all processes see: how far each rank is, and who contributed to each of its calls. */
struct shared {
  volatile int is_in[MOST_RANKS], call[MOST_RANKS], made[MOST_RANKS];
  volatile double longest[MOST_RANKS];
  uint64_t masks[MOST_RANKS][MOST_CALLS], windows[MOST_RANKS][MOST_CALLS];
};

static unsigned long long seed = 1, state;
static int is_in_front, me = -1, now, kind_now, nranks, nnodes, calls, only_kind = -1, stops, losses, held_calls, timed, adapted;
static struct shared* shared;

static unsigned next(unsigned below) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return (unsigned)(state >> 33) % below;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Buffers, and where they are for calls: on the host the same. */
static uint64_t *in_here, *out_here, *in_there, *out_there;

static void* there(const void* here) {
  size_t from_in = (size_t)((const char*)here - (const char*)in_here);
  return from_in < MOST_BYTES ? (char*)in_there + from_in : (char*)out_there + ((const char*)here - (const char*)out_here);
}

static void give(const void* here, size_t bytes) {
  if (is_on_device) put(there(here), here, bytes);
}

static void fetch(void* here, size_t bytes) {
  if (is_on_device) take(here, there(here), bytes);
}

/* What has come of what is on a stream. */
static ncclResult_t behind(ncclComm_t comm, strataStream_t stream) {
  return is_on_device ? ended(comm, stream, ncclSuccess) : strataStreamSynchronize(stream);
}

/* Who has contributed, by a sum of bits times a factor. */
static uint64_t contributors(const uint64_t* out, size_t count) {
  uint64_t mask = out[0];
  for (size_t i = 0; i < count; i++)
    if (out[i] != mask * (i % 1000 + 1)) {
      fprintf(stderr, "rank %d: element %zu of %zu has contributors %llx, the first %llx\n", me, i, count,
              (unsigned long long)(out[i] / (i % 1000 + 1)), (unsigned long long)mask);
      CHECK(out[i] == mask * (i % 1000 + 1));
    }
  CHECK(mask >> nranks == 0 && mask >> me & 1);
  return mask;
}

static void fill(uint64_t* in, size_t count, size_t first) {
  for (size_t i = 0; i < count; i++) in[i] = (1ULL << me) * ((first + i) % 1000 + 1);
}

/* Makes one call; who contributed, or 0 where that does not show, or 1ULL << 63 where it needs somebody who is lost. */
static uint64_t call(ncclComm_t comm, int kind, size_t count, strataStream_t stream, uint64_t* in, uint64_t* out) {
  cudaStream_t on = (cudaStream_t)stream;
  uint64_t mask = 0;
  ncclResult_t result;
  kind_now = kind;
  switch (kind) {
    case 0: /* All-reduce. */
      fill(in, count, 0), give(in, 8 * count);
      OK(ncclAllReduce(there(in), there(out), count, ncclInt64, ncclSum, comm, on));
      OK(behind(comm, stream));
      fetch(out, 8 * count), fetch(in, 8 * count);
      mask = contributors(out, count);
      for (size_t i = 0; i < count; i++) CHECK(in[i] == (1ULL << me) * (i % 1000 + 1));
      break;
    case 1: /* The same in place. */
      fill(out, count, 0), give(out, 8 * count);
      OK(ncclAllReduce(there(out), there(out), count, ncclInt64, ncclSum, comm, on));
      OK(behind(comm, stream));
      fetch(out, 8 * count);
      mask = contributors(out, count);
      break;
    case 2: { /* Reduce-scatter, in place or not. */
      int in_place = count % 2;
      count = count / nranks + 1;
      for (int rank = 0; rank < nranks; rank++) fill(in + rank * count, count, 0);
      give(in, 8 * nranks * count);
      uint64_t* own = in_place ? in + me * count : out;
      OK(ncclReduceScatter(there(in), there(own), count, ncclInt64, ncclSum, comm, on));
      OK(behind(comm, stream));
      fetch(own, 8 * count);
      mask = contributors(own, count);
      break;
    }
    case 3: { /* An average: of equal numbers the number, whoever contributes. */
      float* numbers = (float*)in;
      for (size_t i = 0; i < count; i++) numbers[i] = (float)(now + 1);
      give(numbers, 4 * count);
      OK(ncclAllReduce(there(numbers), there(numbers), count, ncclFloat, ncclAvg, comm, on));
      OK(behind(comm, stream));
      fetch(numbers, 4 * count);
      for (size_t i = 0; i < count; i++) CHECK(numbers[i] == (float)(now + 1));
      break;
    }
    case 4: { /* Broadcast; its root may be lost. */
      int root = now % nranks;
      fill(in, count, 0), give(in, 8 * count);
      if (me != root) memset(out, 0, 8 * count);
      result = ncclBroadcast(there(in), there(out), count, ncclInt64, root, comm, on);
      if (result == ncclSuccess) result = behind(comm, stream);
      fetch(out, 8 * count);
      if (result == ncclRemoteError && strstr(ncclGetLastError(NULL), "lost") != NULL) return 1ULL << 63;
      OK(result);
      for (size_t i = 0; i < count; i++) CHECK(out[i] == (1ULL << root) * (i % 1000 + 1));
      break;
    }
    case 6: /* All-reduces in a window, which time may close; each has contributors of its own. */
    case 7: { /* The same queued one behind the other, and waited for together. */
      int in_window = kind == 6;
      unsigned us = in_window && count % 3 && !is_on_device ? 300 : 0;
      uint64_t all = 0, of_one;
      count = count / HELD + 1;
      for (int held = 0; held < HELD; held++) fill(in + held * count, count, 0);
      give(in, 8 * HELD * count);
      if (in_window) OK(strataWindowBegin(comm, count % 2 ? 4096 : 0, us));
      for (int held = 0; held < HELD; held++) {
        OK(ncclAllReduce(there(in + held * count), there(out + held * count), count, ncclInt64, ncclSum, comm, on));
        if (us && held == 2) usleep(us);
      }
      if (in_window) OK(strataWindowEnd(comm));
      OK(behind(comm, stream));
      fetch(out, 8 * HELD * count);
      for (int held = 0; held < HELD; held++) {
        of_one = contributors(out + held * count, count);
        CHECK(held == 0 || (of_one & ~mask) == 0);
        mask = of_one;
        all |= mask << held * MOST_RANKS;
      }
      shared->windows[me][now] = all;
      held_calls += HELD - 1, timed |= us != 0;
      break;
    }
    default: { /* All-gather: as long as nobody is lost. */
      count = count / nranks + 1;
      fill(in, count, 0), give(in, 8 * count);
      result = ncclAllGather(there(in), there(out), count, ncclInt64, comm, on);
      if (result == ncclSuccess) result = behind(comm, stream);
      fetch(out, 8 * nranks * count);
      if (result == ncclRemoteError && strstr(ncclGetLastError(NULL), "lost") != NULL) return 1ULL << 63;
      OK(result);
      for (int rank = 0; rank < nranks; rank++)
        for (size_t i = 0; i < count; i++) CHECK(out[rank * count + i] == (1ULL << rank) * (i % 1000 + 1));
    }
  }
  return mask;
}

/* The program is told of each generation, and can ask for nothing but the state. */
static ncclComm_t watched;
static int changes;

static int number_in_state(const char* name) {
  char text[4096], key[64];
  OK(strataCommState(watched, text, sizeof(text)));
  snprintf(key, sizeof(key), "\"%s\":", name);
  char* at = strstr(text, key);
  CHECK(at != NULL);
  return atoi(at + strlen(key));
}

static void changed(void* argument) {
  float number = 1;
  ncclComm_t other;
  CHECK(argument == &changes);
  changes++;
  CHECK(number_in_state("generation") >= changes && number_in_state("ranks") == nranks);
  CHECK(number_in_state("first_call") > 0 && number_in_state("first_call") <= number_in_state("calls") + 1);
  CHECK(ncclAllReduce(&number, &number, 1, ncclFloat, ncclSum, watched, NULL) == ncclInvalidUsage);
  if (is_in_front) return; /* The others are the vendor's. */
  CHECK(ncclCommSplit(watched, 0, 0, &other, NULL) == ncclInvalidUsage);
  CHECK(ncclCommDestroy(watched) == ncclInvalidUsage);
}

static void rank_main(ncclUniqueId id) {
  char node[32];
  ncclComm_t comm;
  strataStream_t stream;
  int count_of = -1, rank_of = -1;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(120);
  snprintf(node, sizeof(node), "node%d", me * nnodes / nranks);
  setenv("NCCL_HOSTID", node, 1);
  open_place();
  in_here = in_there = malloc(MOST_BYTES), out_here = out_there = malloc(MOST_BYTES);
  if (is_on_device) in_there = place_for(MOST_BYTES), out_there = place_for(MOST_BYTES);
  OK(ncclCommInitRank(&comm, nranks, id, me));
  stream = place_stream();
  watched = comm;
  CHECK(number_in_state("generation") == 0 && strataCommOnChange(comm, changed, &changes) == ncclSuccess);
  shared->is_in[me] = 1;
  for (now = 0; now < calls; now++) {
    int kind = next(is_on_device ? 5 : 7), spread = next(5); /* The first four need nobody who may be lost. */
    size_t count = 1 + next(spread == 0 ? MOST_COUNT : spread < 3 ? 20000 : 100);
    int pause = next(10) == 0 ? (int)next(3000) : 0, slow = next(nranks);
    if (is_on_device && kind == 4) kind = 7;
    if (only_kind >= 0) kind = only_kind;
    if (pause && slow == me) usleep(pause);
    shared->call[me] = now;
    /* After a loss the vendor's library works inside the nodes again. */
    if (is_in_front && now % 9 == 5) {
      OK(strataCommAdapt(comm, NULL));
      adapted += 2;
    }
    double begun = seconds();
    shared->masks[me][now] = call(comm, kind, count, stream, in_here, out_here);
    double took = seconds() - begun;
    if (took > shared->longest[me]) shared->longest[me] = took;
    shared->made[me] = now + 1;
  }
  /* The first window with a time takes calls of its own. */
  int ended = number_in_state("calls"), made = calls + held_calls + adapted, renewed = ended - made;
  CHECK(timed ? renewed >= 2 : is_in_front ? renewed >= 0 && renewed <= adapted / 2 : renewed == 0);
  CHECK((changes > 0) == (number_in_state("generation") > 0));
  OK(ncclCommCount(comm, &count_of));
  OK(ncclCommUserRank(comm, &rank_of));
  CHECK(count_of == nranks && rank_of == me);
  ncclResult_t async = ncclInternalError;
  OK(ncclCommGetAsyncError(comm, &async));
  CHECK(async == ncclSuccess);
  if (is_in_front) {
    /* What is asked for is Strata's to do. */
    float* numbers = (float*)in_here;
    for (int i = 0; i < 1000; i++) numbers[i] = 4;
    give(numbers, 4000);
    OK(strataCommAdapt(comm, "rescale=on"));
    OK(strataCommProfile(comm));
    CHECK(strataCommAdapt(comm, "late=drop") == ncclInvalidUsage);
    OK(ncclAllReduce(there(numbers), there(numbers), 1000, ncclFloat, ncclSum, comm, (cudaStream_t)stream));
    OK(behind(comm, stream));
    fetch(numbers, 4000);
    for (int i = 0; i < 1000; i++) CHECK(numbers[i] == (float)(4 * nranks));
  }
  if (is_in_front && changes > 0) {
    /* What only the vendor's library does would wait for who is lost. */
    double product = 0;
    CHECK(ncclAllReduce(&product, &product, 1, ncclDouble, (ncclRedOp_t)(ncclNumOps + 1000), comm, (cudaStream_t)stream) ==
          ncclRemoteError);
  }
  if (is_on_device) {
    /* A call on a GPU that needs what is lost ends the communicator: nobody would know that its result is none. */
    OK(ncclAllGather(there(in_here), there(out_here), 8, ncclInt64, comm, (cudaStream_t)stream));
    CHECK(behind(comm, stream) == (changes > 0 ? ncclRemoteError : ncclSuccess));
    if (changes > 0) ncclCommAbort(comm), _exit(0);
  } else {
    OK(strataStreamDestroy(stream));
  }
  OK(ncclCommDestroy(comm));
  _exit(0);
}

/* One rank stops in a collective inside its node, whose other ranks' streams go on without the result; nobody is lost. */
static int breaks;
/* All end the communicator while its calls wait on their stream. */
static int leaves;

static void all_left_main(ncclUniqueId id) {
  char node[32], at[16];
  ncclComm_t comm;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(60);
  snprintf(node, sizeof(node), "node%d", me * nnodes / nranks);
  setenv("NCCL_HOSTID", node, 1);
  snprintf(at, sizeof(at), "%d", 1 + next(20));
  if (breaks && me == (int)(seed % nranks)) setenv("DOUBLE_STOP", "strata-inside", 1), setenv("DOUBLE_STOP_AT", at, 1);
  open_place();
  in_here = in_there = malloc(MOST_BYTES), out_here = out_there = malloc(MOST_BYTES);
  in_there = place_for(MOST_BYTES), out_there = place_for(MOST_BYTES);
  OK(ncclCommInitRank(&comm, nranks, id, me));
  strataStream_t stream = place_stream();
  const size_t count = 1149;
  if (leaves) {
    fill(in_here, count, 0), give(in_here, 8 * count);
    for (now = 0; now < 10; now++) OK(ncclAllReduce(in_there, out_there, count, ncclInt64, ncclSum, comm, (cudaStream_t)stream));
    OK(ncclCommDestroy(comm));
    CHECK(driver_wait(stream) == 0);
    fetch(out_here, 8 * count);
    CHECK(contributors(out_here, count) == (1ULL << nranks) - 1);
    _exit(0);
  }
  for (now = 0; now < calls; now++) {
    fill(in_here, count, 0), memset(out_here, 0, 8 * count), give(in_here, 8 * count), give(out_here, 8 * count);
    OK(ncclAllReduce(in_there, out_there, count, ncclInt64, ncclSum, comm, (cudaStream_t)stream));
    ncclResult_t result = behind(comm, stream);
    if (result != ncclSuccess) break;
    fetch(out_here, 8 * count);
    CHECK(contributors(out_here, count) == (1ULL << nranks) - 1);
    shared->made[me] = now + 1;
  }
  OK(ncclCommAbort(comm));
  _exit(0);
}

/* Where one stops all have come equally far, and not to the end. */
static void all_left(void) {
  ncclUniqueId id;
  pid_t pids[MOST_RANKS];
  int status;
  state = seed * 2654435761u + 12345, nranks = 4, nnodes = 2, calls = 40;
  memset(shared, 0, sizeof(*shared));
  OK(ncclGetUniqueId(&id));
  for (me = 0; me < nranks; me++)
    if ((pids[me] = fork()) == 0) all_left_main(id);
  for (me = 0; me < nranks; me++) {
    CHECK(waitpid(pids[me], &status, 0) == pids[me] && status == 0);
    CHECK(leaves || (shared->made[me] == shared->made[0] && shared->made[0] < calls));
  }
  me = -1;
}

/* The others wrote the same. */
static int compare(const int* is_left) {
  int first = 0;
  uint64_t before = ~0ULL, left = 0;
  while (!is_left[first]) first++;
  for (int rank = 0; rank < nranks; rank++) left |= (uint64_t)is_left[rank] << rank;
  for (int at = 0; at < calls; at++) {
    uint64_t mask = shared->masks[first][at];
    for (int rank = 0; rank < nranks; rank++) {
      if (!is_left[rank]) continue;
      if (shared->masks[rank][at] == mask && shared->windows[rank][at] == shared->windows[first][at]) continue;
      fprintf(stderr, "seed %llu: call %d has contributors %llx on rank %d, %llx on rank %d\n", seed, at,
              (unsigned long long)mask, first, (unsigned long long)shared->masks[rank][at], rank);
      return 1;
    }
    if (mask == 0 || mask >> 63) continue;
    if ((mask & left) != left || (mask & ~before) != 0) {
      fprintf(stderr, "seed %llu: call %d has contributors %llx, left are %llx, before were %llx\n", seed, at,
              (unsigned long long)mask, (unsigned long long)left, (unsigned long long)before);
      return 1;
    }
    before = mask;
  }
  return 0;
}

/* What is a provider's where SURVIVORS_PROVIDER names one, as provider:mesh. */
static const char* const by_provider[] = {"STRATA_ALLREDUCE_ALGO", "STRATA_ALLGATHER_ALGO", "STRATA_REDUCESCATTER_ALGO",
                                          "STRATA_BROADCAST_ALGO", "STRATA_REDUCE_ALGO", "STRATA_ALLTOALL_ALGO"};

static double one(void) {
  ncclUniqueId id;
  pid_t pids[MOST_RANKS];
  int is_left[MOST_RANKS], status, failed = 0;
  state = seed * 2654435761u + 12345;
  nranks = 2 + next(MOST_RANKS - 1);
  if (nranks > MOST_RANKS) nranks = MOST_RANKS;
  nnodes = 1 + next(nranks < 4 ? nranks : 4);
  if (is_in_front && nnodes == 1) return 0; /* The vendor's library makes all calls. */
  calls = 20 + next(60);
  memset(shared, 0, sizeof(*shared));
  /* New generations measure their links, and an algorithm that is named may not do what is left. */
  setenv("STRATA_MEASURE_US", seed % 3 == 0 ? "5000" : "0", 1);
  int is_power = (nranks & (nranks - 1)) == 0;
  setenv("STRATA_ALLREDUCE_ALGO", seed % 4 == 0 && is_power && nnodes > 1 ? "rd" : "auto", 1);
  setenv("STRATA_ALLGATHER_ALGO", nnodes > 1 && nnodes < nranks && seed % 5 == 0 ? "two_level" : "auto", 1);
  const char* provider = getenv("SURVIVORS_PROVIDER");
  for (int at = 0; provider && at < (int)(sizeof(by_provider) / sizeof(*by_provider)); at++) setenv(by_provider[at], provider, 1);
  OK(ncclGetUniqueId(&id));
  for (int rank = 0; rank < nranks; rank++) {
    is_left[rank] = 1;
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (pids[rank] == 0) {
      me = rank;
      rank_main(id);
    }
  }
  for (int rank = 0; rank < nranks; rank++)
    for (double begun = seconds(); !shared->is_in[rank] && seconds() < begun + 30;) usleep(100);
  /* One to all but one are killed, some at once, some one after the other. */
  int kills = 1 + next(next(2) ? 1 : nranks - 1);
  for (int done = 0; done < kills; done++) {
    int victim = next(nranks), at = next(calls), later = next(3);
    unsigned us = next(2000);
    if (!is_left[victim]) continue;
    if (done == 0 || later) {
      double begun = seconds();
      while (shared->call[victim] < at && shared->made[victim] < calls && seconds() < begun + 30) usleep(50);
      usleep(us);
    }
    if (shared->made[victim] < calls) kill(pids[victim], stops ? SIGSTOP : SIGKILL), is_left[victim] = 0;
  }
  double longest = 0;
  for (int rank = 0; stops && rank < nranks; rank++) {
    /* Who was stopped goes on when the others have come to their end, and is told that it is out. */
    for (double begun = seconds(); is_left[rank] && shared->made[rank] < calls && seconds() < begun + 20;) usleep(1000);
  }
  for (int rank = 0; stops && rank < nranks; rank++) kill(pids[rank], SIGCONT);
  for (int rank = 0; rank < nranks; rank++) {
    CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
    /* Whoever had come to its end before it was killed is left as well. */
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && !is_left[rank]) continue;
    if (WIFEXITED(status) && WEXITSTATUS(status) == LEFT_OUT && !is_left[rank]) continue;
    is_left[rank] = 1;
    if (status != 0) fprintf(stderr, "seed %llu: rank %d ended with %x in call %d of %d\n", seed, rank, status, shared->call[rank], calls);
    failed |= status != 0;
    if (shared->longest[rank] > longest) longest = shared->longest[rank];
  }
  if (failed || compare(is_left)) exit(1);
  for (int rank = 0; rank < nranks; rank++) losses += !is_left[rank];
  return longest;
}

int main(int argc, char** argv) {
  unsigned long long first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, seeds = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  if (argc > 3 && strcmp(argv[3], "stop") == 0) stops = 1;
  else if (argc > 3 && strcmp(argv[3], "break") == 0) breaks = 1;
  else if (argc > 3 && strcmp(argv[3], "leave") == 0) leaves = 1;
  else if (argc > 3) only_kind = atoi(argv[3]);
  if (stops) setenv("STRATA_LOST_MS", "1000", 1);
  is_in_front = getenv("SURVIVORS_IN_FRONT") != NULL;
  setenv("STRATA_LOST", "continue", 1);
  setenv("STRATA_INTER", "tcp", 1);
  shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  for (seed = first; (breaks || leaves) && seed < first + seeds; seed++) all_left();
  if (breaks || leaves) return puts(breaks ? "what stops inside a node has no result anywhere" : "all have left"), 0;
  double longest = 0;
  for (seed = first; seed < first + seeds; seed++) {
    double took = one();
    if (took > longest) longest = took;
  }
  printf("%llu seeds from %llu, %d ranks lost: all calls had the same contributors on all ranks that were left; the longest call "
         "took %.2f s\n", seeds, first, losses, longest);
  CHECK(losses > 0 || seeds < 4);
  return 0;
}
