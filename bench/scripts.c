/* Two ways to do a collective, in turns in the same processes: an algorithm's file against a built-in one, one file against
 * another, a program against the calls that it replaces.
 *
 * usage: bench-scripts SHARED SECONDS (LABEL COLLECTIVE SIZES ONE OTHER)..
 *
 * RANK, WORLD_SIZE and LOCAL_WORLD_SIZE tell who this is (strata launch, netns-cluster run --each rank). SHARED is a file in
 * which all ranks meet, so barriers use no network; rank 0 makes it, and it is not there before. Sizes are bytes of the larger
 * buffer. A way is an algorithm's name, as STRATA_<COLLECTIVE>_ALGO takes it, on a communicator of its own, or
 *
 *   FILE.xml            by mscclRunAlgo: for a collective of its own, named next (each rank has the input of the rank before)
 *   sendrecv            next by ncclSend and ncclRecv in a group
 *   calls[:ALGORITHM]   all-reduce as four calls: reduce-scatter in the node, reduce-scatter and all-gather between the ranks of a
 *                       rail, all-gather in the node; inside and between are those of them in the node and on the rail alone
 *
 * Before a cell is timed both results are compared with what the inputs say. An iteration does one way several times after a
 * barrier, then the other; its time is that of the slowest rank, for one operation. Printed is a row of CSV for each cell: quartiles of
 * both times in microseconds, and of the ratios other / one of neighbouring iterations. */
#define _GNU_SOURCE
#include "turns.h"
#include <fcntl.h>
#include <nccl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* Of a library under RCCL's name. */
ncclResult_t mscclLoadAlgo(const char *path, int *handle, int rank);
ncclResult_t mscclRunAlgo(const void *send, const size_t *send_counts, const size_t *send_places, void *recv,
                          const size_t *recv_counts, const size_t *recv_places, size_t count, ncclDataType_t type, int root,
                          int peer, ncclRedOp_t op, int handle, ncclComm_t comm, void *stream);
ncclResult_t mscclUnloadAlgo(int handle);

enum { FEWEST = 9, MOST = 201, MOST_REPEATS = 50 };
typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, NEXT, COLLECTIVES } Collective;
static const char *const names[COLLECTIVES] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "next"};
static const char *const settings[COLLECTIVES] = {"STRATA_ALLREDUCE_ALGO", "STRATA_ALLGATHER_ALGO",
                                                  "STRATA_REDUCESCATTER_ALGO", "STRATA_ALLTOALL_ALGO", NULL};

typedef enum { ALGORITHM, PROGRAM, SENDRECV, CALLS, INSIDE, BETWEEN } WayKind;
typedef struct {
  WayKind kind;
  int program; /* Of mscclLoadAlgo. */
  ncclComm_t comm, node, rail;
} Way;

/* Of all processes. */
static struct {
  Barrier barrier;
  ncclUniqueId id;
  double seconds[MOST_RANKS];
} *shared;
static int rank, nranks, local_ranks, asleep;
static float *sent, *received;

static void check(ncclResult_t result, const char *what) {
  if (result == ncclSuccess) return;
  fprintf(stderr, "rank %d: %s: %s (%s)\n", rank, what, ncclGetErrorString(result), ncclGetLastError(NULL));
  exit(1);
}

static void all_meet(void) { meet(&shared->barrier, nranks, asleep); }

/* Maps the file in which the ranks meet: rank 0's, which the others wait for. */
static void share(const char *path) {
  int file = -1;
  double start = now();
  if (rank == 0) {
    if ((file = open(path, O_CREAT | O_EXCL | O_RDWR, 0600)) < 0 || ftruncate(file, sizeof *shared) != 0) perror(path), exit(1);
  } else {
    struct stat about = {0};
    while ((file < 0 && (file = open(path, O_RDWR)) < 0) || fstat(file, &about) != 0 || about.st_size < (off_t)sizeof *shared)
      if (now() - start > TURN_LIMIT_S) perror(path), exit(1);
      else usleep(1000);
  }
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (shared == MAP_FAILED) perror("mmap"), exit(1);
  close(file);
  all_meet();
  if (rank == 0) unlink(path);
}

/* A communicator of all ranks, which takes `algorithm` for the collective, or for both halves of an all-reduce. */
static ncclComm_t communicator(const char *setting, const char *setting_too, const char *algorithm) {
  ncclComm_t comm;
  if (setting && algorithm) setenv(setting, algorithm, 1);
  if (setting_too && algorithm) setenv(setting_too, algorithm, 1);
  if (rank == 0) check(ncclGetUniqueId(&shared->id), "ncclGetUniqueId");
  all_meet();
  check(ncclCommInitRank(&comm, nranks, shared->id, rank), "ncclCommInitRank");
  all_meet();
  if (setting) unsetenv(setting);
  if (setting_too) unsetenv(setting_too);
  return comm;
}

static Way way(Collective which, const char *name) {
  static const struct {
    const char *name;
    WayKind kind;
  } composed[] = {{"calls", CALLS}, {"inside", INSIDE}, {"between", BETWEEN}};
  Way made = {.kind = ALGORITHM};
  size_t length = strlen(name);
  if (which == NEXT) {
    made.kind = strcmp(name, "sendrecv") ? PROGRAM : SENDRECV;
    if (made.kind == PROGRAM) check(mscclLoadAlgo(name, &made.program, rank), name);
    made.comm = communicator(NULL, NULL, NULL);
    return made;
  }
  for (unsigned i = 0; i < 3; i++) {
    size_t word = strlen(composed[i].name);
    if (strncmp(name, composed[i].name, word) || (length > word && name[word] != ':')) continue;
    made.kind = composed[i].kind;
    const char *algorithm = length > word ? name + word + 1 : "auto";
    made.comm = communicator(settings[REDUCE_SCATTER], settings[ALL_GATHER], algorithm);
    check(ncclCommSplit(made.comm, rank / local_ranks, rank, &made.node, NULL), "ncclCommSplit");
    check(ncclCommSplit(made.comm, rank % local_ranks, rank, &made.rail, NULL), "ncclCommSplit");
    return made;
  }
  made.comm = communicator(settings[which], NULL, name);
  return made;
}

static void done(Way *way) {
  if (way->node) check(ncclCommDestroy(way->node), "ncclCommDestroy");
  if (way->rail) check(ncclCommDestroy(way->rail), "ncclCommDestroy");
  check(ncclCommDestroy(way->comm), "ncclCommDestroy");
  if (way->kind == PROGRAM) check(mscclUnloadAlgo(way->program), "mscclUnloadAlgo");
}

/* What the ranks of a node have reduced lies where the all-reduce's result will. */
static void composed(const Way *way, size_t count) {
  size_t block = count / (size_t)local_ranks, part = block / (size_t)(nranks / local_ranks);
  float *mine = received + (size_t)(rank % local_ranks) * block, *share_of = mine + (size_t)(rank / local_ranks) * part;
  if (way->kind != BETWEEN)
    check(ncclReduceScatter(sent, mine, block, ncclFloat, ncclSum, way->node, NULL), "ncclReduceScatter");
  if (way->kind != INSIDE) {
    check(ncclReduceScatter(mine, share_of, part, ncclFloat, ncclSum, way->rail, NULL), "ncclReduceScatter");
    check(ncclAllGather(share_of, mine, part, ncclFloat, way->rail, NULL), "ncclAllGather");
  }
  if (way->kind != BETWEEN) check(ncclAllGather(mine, received, block, ncclFloat, way->node, NULL), "ncclAllGather");
}

static void to_next(size_t count, ncclComm_t comm) {
  check(ncclGroupStart(), "ncclGroupStart");
  if (rank > 0) check(ncclRecv(received, count, ncclFloat, rank - 1, comm, NULL), "ncclRecv");
  if (rank < nranks - 1) check(ncclSend(sent, count, ncclFloat, rank + 1, comm, NULL), "ncclSend");
  check(ncclGroupEnd(), "ncclGroupEnd");
}

static void operate(Collective which, const Way *way, size_t bytes) {
  size_t count = bytes / sizeof(float), block = count / (size_t)nranks;
  if (way->kind == PROGRAM)
    check(mscclRunAlgo(sent, NULL, NULL, received, NULL, NULL, count, ncclFloat, 0, 0, ncclSum, way->program, way->comm, NULL),
          "mscclRunAlgo");
  else if (way->kind == SENDRECV) to_next(count, way->comm);
  else if (way->kind != ALGORITHM) composed(way, count);
  else if (which == ALL_REDUCE) check(ncclAllReduce(sent, received, count, ncclFloat, ncclSum, way->comm, NULL), "ncclAllReduce");
  else if (which == ALL_GATHER) check(ncclAllGather(sent, received, block, ncclFloat, way->comm, NULL), "ncclAllGather");
  else if (which == REDUCE_SCATTER)
    check(ncclReduceScatter(sent, received, block, ncclFloat, ncclSum, way->comm, NULL), "ncclReduceScatter");
  else check(ncclAlltoAll(sent, received, block, ncclFloat, way->comm, NULL), "ncclAlltoAll");
}

/* Element i of what a rank sends: small whole numbers, whose sums floats hold exactly. */
static float element(int from, size_t i) { return (float)((i * 7 + (size_t)from * 13) % 1024); }

static float sum(size_t i) {
  float all = 0;
  for (int r = 0; r < nranks; r++) all += element(r, i);
  return all;
}

static float expected(Collective which, size_t i, size_t block) {
  switch (which) {
    case ALL_REDUCE: return sum(i);
    case REDUCE_SCATTER: return sum((size_t)rank * block + i);
    case ALL_GATHER: return element((int)(i / block), i % block);
    case ALL_TO_ALL: return element((int)(i / block), (size_t)rank * block + i % block);
    default: return element(rank - 1, i);
  }
}

static void check_result(Collective which, const Way *way, size_t bytes, const char *name) {
  size_t count = bytes / sizeof(float), block = count / (size_t)nranks;
  memset(received, 0xff, bytes); /* Not numbers. */
  all_meet();
  operate(which, way, bytes);
  size_t promised = which == REDUCE_SCATTER ? block : which == NEXT && rank == 0 ? 0 : count;
  if (way->kind == INSIDE || way->kind == BETWEEN) promised = 0;
  for (size_t i = 0; i < promised; i++)
    if (received[i] != expected(which, i, block)) {
      fprintf(stderr, "rank %d: %s of %zu bytes by %s: element %zu is %g, not %g\n", rank, names[which], bytes, name, i,
              received[i], expected(which, i, block));
      exit(1);
    }
  all_meet();
}

/* Seconds of one of `repeat` operations on the slowest rank. What is sent is written anew before the first. */
static double timed(Collective which, const Way *way, size_t bytes, int repeat) {
  volatile float *renewed = sent;
  for (size_t i = 0; i < bytes / sizeof(float); i += 64 / sizeof(float)) renewed[i] = renewed[i];
  all_meet();
  double start = now();
  for (int i = 0; i < repeat; i++) operate(which, way, bytes);
  shared->seconds[rank] = (now() - start) / repeat;
  all_meet();
  double slowest = largest_of(shared->seconds, nranks);
  all_meet();
  return slowest;
}

typedef struct {
  const char *label, *sizes, *names[2];
  Collective which;
} Case;

static void cell(const Case *of, const Way ways[2], size_t bytes, double seconds) {
  double times[2][MOST], ratios[MOST], guess = 0;
  for (int side = 0; side < 2; side++) check_result(of->which, &ways[side], bytes, of->names[side]);
  for (int side = 0; side < 2; side++) {
    double first = timed(of->which, &ways[side], bytes, 1), second = timed(of->which, &ways[side], bytes, 1);
    guess += first < second ? first : second;
  }
  int repeat = 10e-3 / guess < 1 ? 1 : 10e-3 / guess > MOST_REPEATS ? MOST_REPEATS : (int)(10e-3 / guess);
  double fit = seconds / (guess * repeat);
  int iterations = fit < FEWEST ? FEWEST : fit > MOST ? MOST : (int)fit;
  for (int i = 0; i < iterations; i++) {
    for (int side = 0; side < 2; side++) times[side][i] = timed(of->which, &ways[side], bytes, repeat);
    ratios[i] = times[1][i] / times[0][i];
  }
  if (rank != 0) return;
  printf("%s,%s,%s,%s,%d,%d,%zu,%d,%d", of->label, names[of->which], of->names[0], of->names[1], nranks / local_ranks, nranks, bytes,
         iterations, repeat);
  for (int side = 0; side < 2; side++) print_quartiles(times[side], iterations, 1e6);
  print_quartiles(ratios, iterations, 1);
  puts("");
  fflush(stdout);
}

static void run(const Case *of, double seconds) {
  Way ways[2];
  size_t bytes, largest = 0;
  for (const char *at = of->sizes; (bytes = next_size(&at));)
    if (bytes > largest) largest = bytes;
  sent = malloc(largest), received = malloc(largest);
  if (!sent || !received) perror("buffers"), exit(1);
  for (size_t i = 0; i < largest / sizeof(float); i++) sent[i] = element(rank, i);
  for (int side = 0; side < 2; side++) ways[side] = way(of->which, of->names[side]);
  for (const char *at = of->sizes; (bytes = next_size(&at));) cell(of, ways, bytes, seconds);
  for (int side = 0; side < 2; side++) done(&ways[side]);
  free(sent), free(received);
}

static int told(const char *name) {
  const char *text = getenv(name);
  if (!text) fprintf(stderr, "%s is not set: strata launch or netns-cluster run --each rank starts this\n", name), exit(2);
  return atoi(text);
}

int main(int argc, char **argv) {
  if (argc < 8 || (argc - 3) % 5) {
    fputs("usage: bench-scripts SHARED SECONDS (LABEL COLLECTIVE SIZES ONE OTHER)..\n", stderr);
    return 2;
  }
  rank = told("RANK"), nranks = told("WORLD_SIZE"), local_ranks = told("LOCAL_WORLD_SIZE");
  if (nranks > MOST_RANKS || nranks % local_ranks) fprintf(stderr, "%d ranks, %d a node\n", nranks, local_ranks), exit(2);
  asleep = nranks > sysconf(_SC_NPROCESSORS_ONLN);
  share(argv[1]);
  for (int i = 3; i < argc; i += 5) {
    Case of = {.label = argv[i], .sizes = argv[i + 2], .names = {argv[i + 3], argv[i + 4]}};
    while (of.which < COLLECTIVES && strcmp(names[of.which], argv[i + 1])) of.which++;
    if (of.which == COLLECTIVES) fprintf(stderr, "%s: no collective\n", argv[i + 1]), exit(2);
    run(&of, atof(argv[2]));
  }
  return 0;
}
