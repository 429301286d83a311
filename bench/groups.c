/* Groups whose calls become one, against the same groups call by call, windows of the same calls, and one call of as many bytes, in
 * one run.
 *
 * usage: bench-groups LABEL [REPEATS]
 *
 * Two communicators of the same ranks: one makes fewer calls of a group's (STRATA_FUSE=all), one does not (off). Each call has buffers
 * of its own. Printed are medians of the slowest rank's time of one group, of a batch that is repeated turn by turn; how many times
 * longer the group takes call by call; and its time as one against one call of those bytes.
 */
#include "both.h"
#include "strata.h"
#include <string.h>

enum { MOST = 99, MOST_CALLS = 64, LARGEST = 65536, GAP = 64 };

typedef struct {
  const char *name;
  int calls; /* 0: one for each rank. */
  size_t bytes;
  int which, whole; /* The calls, and the one call of as many bytes. */
} Case;

static const Case cases[] = {
    {"64 all-reduces", 64, 256, ALL_REDUCE, ALL_REDUCE},     {"16 all-reduces", 16, 4096, ALL_REDUCE, ALL_REDUCE},
    {"64 all-gathers", 64, 256, ALL_GATHER, ALL_GATHER},     {"64 reduce-scatters", 64, 256, REDUCE_SCATTER, REDUCE_SCATTER},
    {"broadcasts of all", 0, 256, BROADCAST, ALL_GATHER},    {"broadcasts of all", 0, 65536, BROADCAST, ALL_GATHER},
    {"reduces to all", 0, 256, REDUCE, REDUCE_SCATTER},      {"reduces to all", 0, 65536, REDUCE, REDUCE_SCATTER},
};

static float *buffers[2]; /* To send from, and to receive in: room for every call, or for one of as many bytes. */

static float *place(int side, int call, size_t bytes) {
  return buffers[side] + call * (int)((bytes + GAP) / sizeof(float));
}

static int calls_of(const Case *c) { return c->calls ? c->calls : nranks; }

static void calls(const Case *c, ncclComm_t comm) {
  size_t count = c->bytes / sizeof(float);
  for (int i = 0; i < calls_of(c); i++) {
    float *send = place(0, i, c->bytes), *recv = place(1, i, c->bytes);
    if (c->which == BROADCAST) check(ncclBroadcast(send, recv, count, ncclFloat, i % nranks, comm, NULL), "ncclBroadcast");
    else if (c->which == REDUCE) check(ncclReduce(send, recv, count, ncclFloat, ncclSum, i % nranks, comm, NULL), "ncclReduce");
    else run_ours(c->which, rank, send, recv, c->bytes, comm);
  }
}

static void group(const Case *c, ncclComm_t comm) {
  check(ncclGroupStart(), "ncclGroupStart");
  calls(c, comm);
  check(ncclGroupEnd(), "ncclGroupEnd");
}

static void window(const Case *c, ncclComm_t comm) {
  check(strataWindowBegin(comm, 0, 0), "strataWindowBegin");
  calls(c, comm);
  check(strataWindowEnd(comm), "strataWindowEnd");
}

/* The same, whose end is told by rank 0. */
static void timed_window(const Case *c, ncclComm_t comm) {
  check(strataWindowBegin(comm, 0, 1000000), "strataWindowBegin");
  calls(c, comm);
  check(strataWindowEnd(comm), "strataWindowEnd");
}

static void one_call(const Case *c, ncclComm_t comm) {
  run_ours(c->whole, rank, buffers[0], buffers[1], c->bytes * (size_t)calls_of(c), comm);
}

static double batch(const Case *c, void (*run)(const Case *, ncclComm_t), ncclComm_t comm) {
  enum { BATCH = 10 };
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  for (int i = 0; i < BATCH; i++) run(c, comm);
  return slowest_rank((MPI_Wtime() - start) / BATCH);
}

/* Both ways must have the same results. */
static void same(const Case *c, ncclComm_t fused, ncclComm_t single, size_t bytes) {
  float *kept = malloc(bytes);
  memset(buffers[1], 0, bytes), group(c, single), memcpy(kept, buffers[1], bytes);
  memset(buffers[1], 0, bytes), group(c, fused);
  if (memcmp(kept, buffers[1], bytes)) fprintf(stderr, "rank %d: %s of %zu bytes differ\n", rank, c->name, c->bytes), MPI_Abort(MPI_COMM_WORLD, 1);
  free(kept);
}

int main(int argc, char **argv) {
  double fused_times[MOST], window_times[MOST], timed_times[MOST], single_times[MOST], whole_times[MOST];
  ncclComm_t fused = join(&argc, &argv);
  int repeats = argc > 2 ? atoi(argv[2]) : 11;
  if (argc < 2 || repeats < 1 || repeats > MOST) {
    if (rank == 0) fprintf(stderr, "usage: bench-groups LABEL [REPEATS, at most %d]\n", MOST);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  setenv("STRATA_FUSE", "off", 1);
  ncclComm_t single = communicator();
  int most = nranks > MOST_CALLS ? nranks : MOST_CALLS;
  size_t bytes = (size_t)most * (LARGEST + GAP);
  for (int side = 0; side < 2; side++)
    if (!(buffers[side] = calloc(1, bytes))) perror("buffers"), MPI_Abort(MPI_COMM_WORLD, 1);
  for (size_t i = 0; i < bytes / sizeof(float); i++) buffers[0][i] = (float)((i * 7 + (size_t)rank * 13) % 1024);
  if (rank == 0)
    printf("%-20s %-5s %6s %6s %8s %10s %10s %10s %10s %10s %8s %8s\n", "# group", "over", "ranks", "calls", "bytes", "fused(us)", "window(us)",
           "timed(us)", "single(us)", "one(us)", "faster", "of one");
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    const Case *c = &cases[k];
    same(c, fused, single, bytes);
    batch(c, group, fused), batch(c, window, fused), batch(c, timed_window, fused), batch(c, group, single), batch(c, one_call, fused);
    for (int i = 0; i < repeats; i++) {
      fused_times[i] = batch(c, group, fused);
      window_times[i] = batch(c, window, fused);
      timed_times[i] = batch(c, timed_window, fused);
      single_times[i] = batch(c, group, single);
      whole_times[i] = batch(c, one_call, fused);
    }
    double ours = median(fused_times, repeats), theirs = median(single_times, repeats), one = median(whole_times, repeats);
    if (rank == 0)
      printf("%-20s %-5s %6d %6d %8zu %10.1f %10.1f %10.1f %10.1f %10.1f %8.2f %8.2f\n", c->name, argv[1], nranks, calls_of(c), c->bytes,
             ours * 1e6, median(window_times, repeats) * 1e6, median(timed_times, repeats) * 1e6, theirs * 1e6, one * 1e6, theirs / ours, ours / one);
    fflush(stdout);
  }
  check(ncclCommDestroy(single), "ncclCommDestroy");
  leave(fused);
  return 0;
}
