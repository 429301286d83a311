/* The ranks of a comparison on one machine: memory that its processes share for their barrier and times, buffers, one turn of
 * either library, what must come out of it, and ranks that are threads of rank 0's process. After both.h. */
#include "turns.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

enum { WARM = 4096 };

typedef struct {
  int which, repeat, checked, asleep, warm;
  size_t bytes;
} Work;

typedef struct {
  int me;
  ncclComm_t comm;
  float *send, *recv;
} Rank;

/* Of all processes. */
typedef struct {
  Barrier barrier;
  double seconds[MOST_RANKS], threads_slowest;
  cpu_set_t processors[MOST_RANKS];
} Shared;
static Shared *shared;

static void share(void) {
  char name[64];
  int id = (int)getpid(), file = -1;
  MPI_Bcast(&id, 1, MPI_INT, 0, MPI_COMM_WORLD);
  snprintf(name, sizeof name, "/strata-bench-%d", id);
  if (rank == 0) shm_unlink(name);
  if (rank == 0 && ((file = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600)) < 0 || ftruncate(file, sizeof *shared) != 0))
    perror("the benchmark's shared memory"), MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank != 0 && (file = shm_open(name, O_RDWR, 0600)) < 0)
    perror("the benchmark's shared memory (are all ranks on one machine?)"), MPI_Abort(MPI_COMM_WORLD, 1);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (shared == MAP_FAILED) perror("mmap"), MPI_Abort(MPI_COMM_WORLD, 1);
  close(file);
  sched_getaffinity(0, sizeof(cpu_set_t), &shared->processors[rank]);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) shm_unlink(name);
}

/* Element i of what a rank sends: small whole numbers, whose sums floats hold exactly. */
static inline float element(int from, size_t i) { return (float)((i * 7 + (size_t)from * 13) % 1024); }

static void get_buffers(Rank *rank_of, size_t bytes, int nccl) {
  float **buffers[] = {&rank_of->send, &rank_of->recv};
  for (int i = 0; i < 2; i++) {
    if (nccl) check(ncclMemAlloc((void **)buffers[i], bytes), "ncclMemAlloc");
    else *buffers[i] = malloc(bytes);
    if (!*buffers[i]) perror("buffers"), exit(1);
  }
  for (size_t i = 0; i < bytes / sizeof(float); i++) rank_of->send[i] = element(rank_of->me, i);
  memset(rank_of->recv, 0, bytes);
}

static void give_back(Rank *rank_of, int nccl) {
  if (nccl) {
    check(ncclMemFree(rank_of->send), "ncclMemFree");
    check(ncclMemFree(rank_of->recv), "ncclMemFree");
  } else free(rank_of->send), free(rank_of->recv);
}

/* n received elements are those of `from` at `offset` in its send buffer, or, with from < 0, the sum over all ranks there. */
static void expect(const Work *work, const Rank *at, int ours, const float *recv, size_t n, int from, size_t offset) {
  float sums[1024];
  for (size_t i = 0; i < 1024; i++) {
    sums[i] = from < 0 ? 0 : element(from, i);
    for (int r = 0; from < 0 && r < nranks; r++) sums[i] += element(r, i);
  }
  for (size_t i = 0; i < n; i++)
    if (recv[i] != sums[(offset + i) % 1024]) {
      fprintf(stderr, "rank %d: %s of %zu bytes by %s: element %zu is %g, not %g\n", at->me, names[work->which], work->bytes,
              ours ? "Strata" : "MPI", (size_t)(recv - at->recv) + i, recv[i], sums[(offset + i) % 1024]);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static void check_result(const Work *work, const Rank *at, int ours) {
  size_t count = work->bytes / sizeof(float), block = count / (size_t)nranks, me = (size_t)at->me;
  int which = work->which;
  if (which == ALL_REDUCE || (which == REDUCE && me == 0)) expect(work, at, ours, at->recv, count, -1, 0);
  if (which == REDUCE_SCATTER) expect(work, at, ours, at->recv, block, -1, me * block);
  if (which == BROADCAST && me != 0) expect(work, at, ours, at->recv, count, 0, 0);
  if (which == SCATTER) expect(work, at, ours, at->recv, block, 0, me * block);
  if (which == PING_PONG && me <= 1) expect(work, at, ours, at->recv, count, 1 - at->me, 0);
  if (which == ALL_GATHER || which == ALL_TO_ALL || (which == GATHER && me == 0))
    for (int r = 0; r < nranks; r++)
      expect(work, at, ours, at->recv + (size_t)r * block, block, r, which == ALL_TO_ALL ? me * block : 0);
}

/* Writes what is sent anew, as a program does before each call: what others have of it in their caches is stale. */
static void renew(const Rank *at, size_t bytes) {
  volatile float *send = at->send;
  for (size_t i = 0; i < bytes / sizeof(float); i += 64 / sizeof(float)) send[i] = send[i];
}

/* This rank's part of an iteration, seconds per operation. Operations above WARM bytes are on renewed buffers and timed each
 * by itself, from a barrier on. Short ones, and all where ranks sleep at barriers, are timed together, renewed before the first. */
static void one_turn(const Work *work, const Rank *at, int ours, Barrier *barrier, double *seconds) {
  double start = 0, sum = 0;
  int apart = !work->asleep && !work->warm && work->bytes > WARM;
  if (work->checked) memset(at->recv, 0xff, work->bytes); /* Not numbers: nothing left from before is taken for a result. */
  for (int i = 0; i < work->repeat; i++) {
    if (i == 0 || apart) {
      if (!work->warm) renew(at, work->bytes);
      meet(barrier, nranks, work->asleep);
      start = now();
    }
    if (ours) run_ours(work->which, at->me, at->send, at->recv, work->bytes, at->comm);
    else run_theirs(work->which, at->send, at->recv, work->bytes);
    if (apart || i == work->repeat - 1) sum += now() - start;
  }
  seconds[at->me] = sum / work->repeat;
  meet(barrier, nranks, work->asleep);
  if (work->checked) check_result(work, at, ours);
}

/* Ranks that are threads, of which rank 0's main thread is the first: they sleep at `orders` until there is work. */
static struct {
  Barrier orders, barrier;
  double seconds[MOST_RANKS];
  Work work;
  int nccl, done;
  size_t largest;
  ncclUniqueId id;
  Rank ranks[MOST_RANKS];
  pthread_t threads[MOST_RANKS];
} team;

static void join_team(Rank *me) {
  pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), &shared->processors[me->me]);
  check(ncclCommInitRank(&me->comm, nranks, team.id, me->me), "ncclCommInitRank");
  get_buffers(me, team.largest, team.nccl);
}

static void leave_team(Rank *me) {
  check(ncclCommDestroy(me->comm), "ncclCommDestroy");
  give_back(me, team.nccl);
}

static void *member(void *argument) {
  Rank *me = argument;
  join_team(me);
  for (;;) {
    meet(&team.orders, nranks, 1);
    if (team.done) break;
    Work work = team.work; /* Rank 0 writes the next one while others still leave this turn. */
    one_turn(&work, me, 1, &team.barrier, team.seconds);
  }
  leave_team(me);
  return NULL;
}

static void threads_start(size_t largest, int nccl) {
  check(ncclGetUniqueId(&team.id), "ncclGetUniqueId");
  team.largest = largest, team.nccl = nccl, team.done = 0;
  for (int i = 0; i < nranks; i++) team.ranks[i] = (Rank){.me = i};
  for (int i = 1; i < nranks; i++)
    if (pthread_create(&team.threads[i], NULL, member, &team.ranks[i]) != 0) perror("pthread_create"), exit(1);
  join_team(&team.ranks[0]);
}

static void threads_end(void) {
  team.done = 1;
  meet(&team.orders, nranks, 1);
  leave_team(&team.ranks[0]);
  for (int i = 1; i < nranks; i++) pthread_join(team.threads[i], NULL);
}

/* As one iteration among processes, but the processes other than rank 0's sleep all the while. */
static double threads_timed(const Work *work) {
  meet(&shared->barrier, nranks, 1);
  if (rank == 0) {
    team.work = *work;
    meet(&team.orders, nranks, 1);
    one_turn(&team.work, &team.ranks[0], 1, &team.barrier, team.seconds);
    shared->threads_slowest = largest_of(team.seconds, nranks);
  }
  meet(&shared->barrier, nranks, 1);
  return shared->threads_slowest;
}
