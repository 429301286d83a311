/* All-reduces in which ranks are lost, or a NIC: how long the others take until they go on (STRATA_LOST=continue), and what the program
 * gets where that is off.
 *
 * usage: bench-lost FILE [BYTES [CALLS]]     with RANK, WORLD_SIZE and MASTER_ADDR, on one machine
 *
 * Every rank makes a process for each row, which makes CALLS calls; FILE is memory that all share. In the fourth call of a row what is lost is:
 * ranks are killed or stopped, by rank 0's first process, or $BENCH_LINK is run with NODE.NIC and `down`. A rank's part of a sum is a bit, so each element of
 * each result says who has contributed; all must be the same on all ranks that are left, and change once. Printed are seconds: a plain call's, from
 * the loss to the end of the call that it came in on the last rank (of a NIC, the longest call), and a call's afterwards, medians.
 */
#include <errno.h>
#include <fcntl.h>
#include <nccl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strata.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 24, MOST_CALLS = 99, LOST_IN = 3, LIMIT = 120, FIRST_PORT = 27190 };

typedef struct {
  const char *name, *lost, *lost_ms;
  int victims[2]; /* -1: nobody. */
  int signal;
  const char *nic;
} Row;

static const Row rows[] = {
    {"nobody, off", "fail", "10000", {-1, -1}, 0, NULL},
    {"nobody", "continue", "10000", {-1, -1}, 0, NULL},
    {"rank 5 killed, off", "fail", "10000", {5, -1}, SIGKILL, NULL},
    {"rank 5 killed", "continue", "10000", {5, -1}, SIGKILL, NULL},
    {"rank 0 killed", "continue", "10000", {0, -1}, SIGKILL, NULL},
    {"two killed at once", "continue", "10000", {6, 11}, SIGKILL, NULL},
    {"rank 9 stopped, 1 s", "continue", "1000", {9, -1}, SIGSTOP, NULL},
    {"a NIC down", "continue", "10000", {-1, -1}, 0, "1.2"},
};
enum { ROWS = sizeof rows / sizeof *rows };

/* What all processes see. */
static struct shared {
  _Atomic int arrived[4 * ROWS + 4];
  _Atomic int pids[MOST_RANKS], call[MOST_RANKS], failed;
  double ends[MOST_RANKS][MOST_CALLS], begins[MOST_RANKS][MOST_CALLS], refused[MOST_RANKS], hit;
  int32_t masks[MOST_RANKS][MOST_CALLS], results[MOST_RANKS];
} *shared;

static int rank, nranks, calls = 14, barriers;
static size_t bytes = (size_t)32 << 20;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void fail(const char *what) {
  fprintf(stderr, "rank %d: %s (%s)\n", rank, what, ncclGetLastError(NULL));
  atomic_store(&shared->failed, 1);
  _exit(1);
}

/* All ranks' first processes come together. */
static void meet(void) {
  _Atomic int *arrived = &shared->arrived[barriers++];
  double end = now() + LIMIT;
  atomic_fetch_add(arrived, 1);
  while (atomic_load(arrived) < nranks) {
    if (now() > end) fprintf(stderr, "rank %d: the others do not come\n", rank), exit(1);
    usleep(1000);
  }
}

/* One rank of a row. */
static void make_calls(const Row *row) {
  size_t count = bytes / sizeof(int32_t);
  int32_t *in = malloc(bytes), *out = malloc(bytes);
  ncclUniqueId id;
  ncclComm_t comm;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(LIMIT);
  if (!in || !out) fail("no memory");
  for (size_t i = 0; i < count; i++) in[i] = (1 << rank) * (int32_t)(i % 7 + 1);
  setenv("STRATA_LOST", row->lost, 1), setenv("STRATA_LOST_MS", row->lost_ms, 1);
  if (ncclGetUniqueId(&id) != ncclSuccess || ncclCommInitRank(&comm, nranks, id, rank) != ncclSuccess) fail("no communicator");
  for (int call = 0; call < calls; call++) {
    memset(out, 0, bytes);
    atomic_store(&shared->call[rank], call);
    shared->begins[rank][call] = now();
    ncclResult_t result = ncclAllReduce(in, out, count, ncclInt32, ncclSum, comm, NULL);
    shared->ends[rank][call] = now();
    if (result != ncclSuccess) {
      shared->refused[rank] = now(), shared->results[rank] = result;
      ncclCommAbort(comm);
      _exit(0);
    }
    for (size_t i = 0; i < count; i++)
      if (out[i] != out[0] * (int32_t)(i % 7 + 1)) fail("elements with different contributors");
    shared->masks[rank][call] = out[0];
  }
  if (ncclCommDestroy(comm) != ncclSuccess) fail("ncclCommDestroy");
  _exit(0);
}

/* Does to the others what the row says, in the middle of a call. */
static void strike(const Row *row, double pause) {
  double end = now() + LIMIT;
  for (int other = 0; other < nranks; other++)
    while (atomic_load(&shared->call[other]) < LOST_IN && now() < end && !atomic_load(&shared->failed)) usleep(1000);
  usleep((useconds_t)(1e6 * pause));
  shared->hit = now();
  for (int i = 0; i < 2; i++)
    if (row->victims[i] >= 0) kill(atomic_load(&shared->pids[row->victims[i]]), row->signal);
  if (row->nic) {
    char line[4096];
    snprintf(line, sizeof line, "%s %s down", getenv("BENCH_LINK") ? getenv("BENCH_LINK") : "false", row->nic);
    if (system(line) != 0) fail(line);
  }
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static int is_victim(const Row *row, int who) { return row->victims[0] == who || row->victims[1] == who; }

/* The median of the calls from `first` to before `end`: from the first rank's beginning to the last one's end. */
static double usual(const Row *row, int first, int end) {
  double times[MOST_CALLS];
  int count = 0;
  for (int call = first; call < end; call++) {
    double begin = 1e300, last = 0;
    for (int who = 0; who < nranks; who++) {
      if (is_victim(row, who)) continue;
      if (shared->begins[who][call] < begin) begin = shared->begins[who][call];
      if (shared->ends[who][call] > last) last = shared->ends[who][call];
    }
    times[count++] = last - begin;
  }
  qsort(times, (size_t)count, sizeof *times, ascending);
  return count ? times[count / 2] : 0;
}

/* What a row has shown; the time of a plain call. */
static double tell(const Row *row) {
  int32_t all = (1 << nranks) - 1, left = all;
  double last = 0, plain = usual(row, 1, LOST_IN);
  int switches = 0, refused = 0, result = 0;
  for (int i = 0; i < 2; i++)
    if (row->victims[i] >= 0) left &= ~(1 << row->victims[i]);
  for (int who = 0; who < nranks; who++) {
    if (is_victim(row, who)) continue;
    if (shared->refused[who] > 0) {
      refused++, result = shared->results[who];
      if (shared->refused[who] > last) last = shared->refused[who];
      continue;
    }
    int changed = 0;
    for (int call = 0; call < calls; call++) {
      int32_t mask = shared->masks[who][call], before = call ? shared->masks[who][call - 1] : all;
      if (mask != all && mask != left) fail("contributors that nobody expects");
      for (int other = 0; other < nranks; other++)
        if (!is_victim(row, other) && !shared->refused[other] && shared->masks[other][call] != mask) fail("contributors that differ");
      changed += mask != before;
    }
    if (changed > switches) switches = changed;
    if (shared->ends[who][LOST_IN] > last) last = shared->ends[who][LOST_IN];
  }
  if (refused && refused < nranks - (row->victims[0] >= 0) - (row->victims[1] >= 0)) fail("an error on some ranks only");
  /* A NIC goes down when the command has run, in whatever call that is: the one that took longest. */
  double until = shared->hit > 0 ? last - shared->hit : 0;
  for (int call = LOST_IN; row->nic && call < calls; call++)
    if (usual(row, call, call + 1) > until) until = usual(row, call, call + 1);
  printf("%-22s %8.3f %10.3f ", row->name, plain, until);
  if (refused) printf("%10s  error %d on all\n", "", result);
  else printf("%10.3f  %d changes of contributors, the same on all\n", usual(row, LOST_IN + (calls - LOST_IN) / 2, calls), switches);
  fflush(stdout);
  return plain;
}

int main(int argc, char **argv) {
  const char *of_rank = getenv("RANK"), *of_all = getenv("WORLD_SIZE"), *master = getenv("MASTER_ADDR");
  rank = of_rank ? atoi(of_rank) : -1, nranks = of_all ? atoi(of_all) : 0;
  if (argc > 2) bytes = strtoull(argv[2], NULL, 10);
  if (argc > 3) calls = atoi(argv[3]);
  if (argc < 2 || rank < 0 || nranks < 12 || nranks > MOST_RANKS || !master || calls < LOST_IN + 4 || calls > MOST_CALLS || bytes < 4) {
    fprintf(stderr, "usage: bench-lost FILE [BYTES [CALLS]] with RANK, WORLD_SIZE (12 to %d) and MASTER_ADDR\n", MOST_RANKS);
    return 2;
  }
  int file = open(argv[1], O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof *shared) != 0) return perror(argv[1]), 1;
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (shared == MAP_FAILED) return perror("mmap"), 1;
  meet();
  if (rank == 0)
    printf("# %d ranks, all-reduce of %zu bytes; every element compared\n%-22s %8s %10s %10s\n", nranks, bytes, "#lost", "plain",
           "until done", "afterwards");
  double pause = 0.2;
  for (const Row *row = rows; row < rows + ROWS; row++) {
    char address[256];
    shared->refused[rank] = 0, atomic_store(&shared->call[rank], -1);
    if (rank == 0) shared->hit = 0;
    snprintf(address, sizeof address, "%s:%d", master, FIRST_PORT + (int)(row - rows));
    setenv("NCCL_COMM_ID", address, 1);
    meet();
    pid_t child = fork();
    if (child < 0) return perror("fork"), 1;
    if (child == 0) make_calls(row);
    atomic_store(&shared->pids[rank], child);
    meet();
    if (rank == 0 && (row->victims[0] >= 0 || row->nic)) strike(row, pause);
    /* Who is stopped would stay. */
    int status;
    double end = now() + LIMIT;
    while (waitpid(child, &status, WNOHANG) == 0) {
      int others_done = 1;
      for (int who = 0; who < nranks; who++)
        others_done &= is_victim(row, who) || atomic_load(&shared->call[who]) == calls - 1 || shared->refused[who] > 0;
      if (is_victim(row, rank) && row->signal == SIGSTOP && others_done) sleep(1), kill(child, SIGKILL);
      if (now() > end) kill(child, SIGKILL);
      usleep(2000);
    }
    if (!is_victim(row, rank) && status != 0) fprintf(stderr, "rank %d ended with %x\n", rank, status), atomic_store(&shared->failed, 1);
    meet();
    if (atomic_load(&shared->failed)) return 1;
    if (rank == 0) {
      double plain = tell(row);
      if (row == rows) pause = 0.4 * plain;
    }
    meet();
  }
  if (rank == 0) printf("# done\n");
  return 0;
}
