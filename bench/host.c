/* Strata against the MPI this program is built with, on one machine, in one run: collectives, and messages to and fro.
 *
 * usage: bench-host PEER [--mode processes|threads|tcp] [--collectives NAME,..] [--sizes 8,64K,..] [--memory malloc,nccl]
 *                   [--seconds PER_CELL] [--asleep] [--warm] [--busy N]
 *
 * A cell is a collective, a kind of memory and a size. Every rank does the cell's operation with both libraries, turn by
 * turn, an iteration of each; short operations are repeated within an iteration. An iteration's time is that of its slowest
 * rank. What is sent is written anew before an iteration, and above 4 KB before every operation (not with --warm): data that
 * others still have in their caches would speak for whoever reads it in place. Before a cell is timed both results are compared with what the inputs say. Printed is a row of CSV for each cell:
 * quartiles of both times in microseconds, and of the ratios theirs / ours of neighbouring iterations. MPI's buffers are
 * always malloc's; `nccl` memory is ncclMemAlloc's.
 *
 * Bytes are those of the largest buffer that an operation has: what an all-gather receives, a reduce-scatter or an all-to-all
 * sends, the root of a gather or a scatter has. Where that does not divide into a float for each rank, it is made larger.
 * A ping-pong is between ranks 0 and 1, and its time half the time there and back.
 *
 * threads: Strata's ranks are threads of rank 0's process, each on the processors that MPI's rank of its number is bound
 * to; the other processes sleep meanwhile. tcp: each rank is a node of its own to Strata; what MPI uses, its launcher says.
 */
#define _GNU_SOURCE /* Which processors a thread may run on. */
#include "both.h"
#include "ranks.h"

static struct {
  const char *peer, *mode, *collectives, *sizes, *memory;
  double seconds;
  int asleep, warm, busy, threads;
} options = {"mpi", "processes", NULL, DEFAULT_SIZES, "malloc,nccl", 0.2, 0, 0, 0, 0};

static double timed(const Work *work, int ours, Rank *me) {
  if (ours && options.threads) return threads_timed(work);
  one_turn(work, me, ours, &shared->barrier, shared->seconds);
  return largest_of(shared->seconds, nranks);
}

/* How often an iteration does the operation: of short ones several, but no iteration is long because of that. */
static int repeats(size_t bytes, double slower) {
  int most = bytes <= 4096 ? 50 : bytes <= 65536 ? 20 : bytes <= 1048576 ? 4 : 1;
  double fit = 5e-3 / slower;
  return fit < 1 ? 1 : fit < most ? (int)fit : most;
}

static void cell(Work work, const char *memory, Rank *mine, Rank *theirs_rank) {
  enum { FEWEST = 5, FEWEST_LONG = 3, MOST = 201 };
  double ours[MOST], theirs[MOST], ratios[MOST];
  work.repeat = 1, work.checked = 1;
  double first = timed(&work, 1, mine) + timed(&work, 0, theirs_rank);
  int lasts = first > 0.5, fewest = lasts ? FEWEST_LONG : FEWEST, probes = lasts ? 1 : 3;
  work.checked = 0;
  for (int i = 0; i < probes; i++) ours[i] = timed(&work, 1, mine), theirs[i] = timed(&work, 0, theirs_rank);
  double our_guess = median(ours, probes), their_guess = median(theirs, probes);
  work.repeat = repeats(work.bytes, our_guess > their_guess ? our_guess : their_guess);
  if (work.repeat > 1) our_guess = timed(&work, 1, mine), their_guess = timed(&work, 0, theirs_rank);
  double fit = options.seconds / ((our_guess + their_guess) * work.repeat + 1e-6);
  int iterations = fit < fewest ? fewest : fit > MOST ? MOST : (int)fit;
  for (int i = 0; i < iterations; i++) {
    ours[i] = timed(&work, 1, mine);
    theirs[i] = timed(&work, 0, theirs_rank);
    ratios[i] = theirs[i] / ours[i];
  }
  if (rank != 0) return;
  double scale = work.which == PING_PONG ? 0.5e6 : 1e6;
  printf("%s,%s,%d,%d,%s,%s,%zu,%d,%d", options.peer, options.mode, nranks, options.busy, names[work.which], memory, work.bytes,
         iterations, work.repeat);
  print_quartiles(ours, iterations, scale);
  print_quartiles(theirs, iterations, scale);
  print_quartiles(ratios, iterations, 1);
  puts("");
  fflush(stdout);
}

static int named(const char *list, const char *name) {
  size_t length = strlen(name);
  for (const char *at = list; at && (at = strstr(at, name)); at += length)
    if ((at == list || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return 1;
  return !list;
}

/* Bytes that divide into whole floats, one at least for each block. */
static size_t whole(int which, size_t bytes) {
  size_t unit = sizeof(float);
  if (which == ALL_GATHER || which == REDUCE_SCATTER || which == ALL_TO_ALL || which == GATHER || which == SCATTER)
    unit *= (size_t)nranks;
  return (bytes + unit - 1) / unit * unit;
}

static void bench(const char *memory, ncclComm_t comm) {
  size_t largest = 0, bytes;
  for (const char *at = options.sizes; (bytes = next_size(&at));)
    if (bytes > largest) largest = bytes;
  largest = whole(ALL_GATHER, largest);
  int nccl = !strcmp(memory, "nccl");
  Rank theirs = {.me = rank}, apart = {.me = rank, .comm = comm};
  get_buffers(&theirs, largest, 0);
  if (nccl && !options.threads) get_buffers(&apart, largest, 1);
  else apart.send = theirs.send, apart.recv = theirs.recv;
  if (options.threads && rank == 0) threads_start(largest, nccl);
  for (int which = 0; which < OPERATIONS; which++) {
    if (!named(options.collectives, names[which]) || (which == PING_PONG && nranks < 2)) continue;
    size_t before = 0;
    for (const char *at = options.sizes; (bytes = next_size(&at));) {
      bytes = whole(which, bytes);
      if (bytes != before) cell((Work){.which = which, .bytes = bytes, .asleep = options.asleep, .warm = options.warm}, memory, &apart, &theirs);
      before = bytes;
    }
  }
  if (options.threads && rank == 0) threads_end();
  if (nccl && !options.threads) give_back(&apart, 1);
  give_back(&theirs, 0);
}

static void usage(void) {
  fputs("usage: bench-host PEER [--mode processes|threads|tcp] [--collectives NAME,..] [--sizes 8,64K,..]\n"
        "                  [--memory malloc,nccl] [--seconds PER_CELL] [--asleep] [--warm] [--busy N]\n", stderr);
  exit(2);
}

static void parse(int argc, char **argv) {
  if (argc < 2) usage();
  options.peer = argv[1];
  for (int i = 2; i < argc; i++) {
    const char *name = argv[i];
    int asleep = !strcmp(name, "--asleep"), warm = !strcmp(name, "--warm");
    options.asleep |= asleep, options.warm |= warm;
    if (asleep || warm) continue;
    if (++i == argc) usage();
    if (!strcmp(name, "--mode")) options.mode = argv[i];
    else if (!strcmp(name, "--collectives")) options.collectives = argv[i];
    else if (!strcmp(name, "--sizes")) options.sizes = argv[i];
    else if (!strcmp(name, "--memory")) options.memory = argv[i];
    else if (!strcmp(name, "--seconds")) options.seconds = atof(argv[i]);
    else if (!strcmp(name, "--busy")) options.busy = atoi(argv[i]);
    else usage();
  }
  options.threads = !strcmp(options.mode, "threads");
}

int main(int argc, char **argv) {
  parse(argc, argv);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &nranks);
  if (nranks > MOST_RANKS) fprintf(stderr, "at most %d ranks\n", MOST_RANKS), exit(2);
  if (nranks + options.busy > sysconf(_SC_NPROCESSORS_ONLN)) options.asleep = 1;
  if (!strcmp(options.mode, "tcp")) {
    char node[32];
    snprintf(node, sizeof node, "bench.%d", rank);
    setenv("NCCL_HOSTID", node, 1);
  }
  share();
  ncclComm_t comm = options.threads ? NULL : communicator();
  if (named(options.memory, "malloc")) bench("malloc", comm);
  if (named(options.memory, "nccl")) bench("nccl", comm);
  if (comm) check(ncclCommDestroy(comm), "ncclCommDestroy");
  MPI_Finalize();
  return 0;
}
