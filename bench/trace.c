/* What records of calls cost: all-reduces of 8 bytes, sends and receives of 8 bytes, with and without STRATA_TRACE in turns.
   Each turn is a process of its own for each rank, since records are switched on when a process makes its first communicator.
   usage: trace [TURNS [CALLS]]; prints nanoseconds a call, medians of the turns, and their difference */
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));  \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

enum { MOST_TURNS = 101, CASES = 4 };
static const struct {
  const char *name;
  int nranks, messages, grouped;
} cases[CASES] = {
    {"all-reduce, 1 rank, short path", 1, 0, 0},
    {"all-reduce, 1 rank, two in a group", 1, 0, 1},
    {"all-reduce, 2 ranks, short path", 2, 0, 0},
    {"send and receive, 2 ranks", 2, 1, 0},
};

static double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e9 + time.tv_nsec;
}

/* A rank's calls; the time of one, the best of five rounds. */
static double calls(int which, int rank, ncclUniqueId id, int number) {
  static float in[4], out[4];
  ncclComm_t comm;
  double best = 1e18;
  OK(ncclCommInitRank(&comm, cases[which].nranks, id, rank));
  for (int round = 0; round < 6; round++) {
    double start = now_ns();
    for (int i = 0; i < number; i++) {
      if (cases[which].messages) {
        if (rank == i % 2) OK(ncclSend(in, 2, ncclFloat, 1 - rank, comm, NULL));
        else OK(ncclRecv(out, 2, ncclFloat, 1 - rank, comm, NULL));
      } else if (cases[which].grouped) {
        OK(ncclGroupStart());
        OK(ncclAllReduce(in, out, 2, ncclFloat, ncclSum, comm, NULL));
        OK(ncclAllReduce(out, in, 2, ncclFloat, ncclSum, comm, NULL));
        OK(ncclGroupEnd());
        i++;
      } else OK(ncclAllReduce(in, out, 2, ncclFloat, ncclSum, comm, NULL));
    }
    double each = (now_ns() - start) / number;
    if (round > 0 && each < best) best = each;
  }
  OK(ncclCommDestroy(comm));
  return best;
}

/* One turn: rank 0's time. */
static double turn(int which, int recorded, int number) {
  int told[2], nranks = cases[which].nranks;
  double each = 0;
  CHECK(!pipe(told) && !fflush(stdout));
  /* A process that only waits has made the id, and is where ranks meet. */
  pid_t meeting = fork();
  if (meeting == 0) {
    ncclUniqueId id;
    if (recorded) setenv("STRATA_TRACE", "/tmp/strata-bench-trace-%p.json", 1);
    else unsetenv("STRATA_TRACE");
    setenv("STRATA_NCCL_LIB", "none", 1);
    OK(ncclGetUniqueId(&id));
    for (int rank = 0; rank < nranks; rank++) {
      if (fork() != 0) continue;
      double own = calls(which, rank, id, number);
      if (rank == 0) CHECK(write(told[1], &own, sizeof own) == sizeof own);
      char name[64];
      snprintf(name, sizeof name, "/tmp/strata-bench-trace-%d.json", (int)getpid());
      CHECK(access(name, F_OK) == (recorded ? 0 : -1));
      unlink(name);
      exit(0);
    }
    int status, failed = 0;
    while (wait(&status) > 0) failed |= status;
    _exit(failed != 0);
  }
  int status;
  CHECK(waitpid(meeting, &status, 0) == meeting && status == 0);
  CHECK(read(told[0], &each, sizeof each) == sizeof each);
  close(told[0]), close(told[1]);
  return each;
}

static int compare(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return (a > b) - (a < b);
}

int main(int argc, char **argv) {
  int turns = argc > 1 ? atoi(argv[1]) : 11, number = argc > 2 ? atoi(argv[2]) : 100000;
  CHECK(turns > 0 && turns <= MOST_TURNS && number > 1);
  printf("%-36s %10s %10s %10s   (ns a call; medians of %d turns)\n", "", "off", "on", "records", turns);
  for (int which = 0; which < CASES; which++) {
    double times[2][MOST_TURNS];
    for (int i = 0; i < turns; i++)
      for (int on = 0; on < 2; on++) times[on][i] = turn(which, on, number);
    for (int on = 0; on < 2; on++) qsort(times[on], turns, sizeof(double), compare);
    double off = times[0][turns / 2], on = times[1][turns / 2];
    printf("%-36s %10.1f %10.1f %10.1f\n", cases[which].name, off, on, on - off);
  }
  return 0;
}
