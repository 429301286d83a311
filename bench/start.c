/* How long a program that does nothing takes to start and end, with a library preloaded and without: runs of both in
 * turn, medians in microseconds.
 *
 * start LIBRARY [RUNS] */
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

enum { MOST = 10000 };

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e6 * (double)time.tv_sec + (double)time.tv_nsec / 1e3;
}

static double one_run(char** environment) {
  char* arguments[] = {"/bin/true", NULL};
  pid_t pid;
  int status = -1;
  double start = now_us();
  if (posix_spawn(&pid, arguments[0], NULL, NULL, arguments, environment) != 0 || waitpid(pid, &status, 0) != pid ||
      status != 0) {
    fprintf(stderr, "/bin/true does not run\n");
    exit(1);
  }
  return now_us() - start;
}

static int ascending(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* values, int count) {
  qsort(values, (size_t)count, sizeof(*values), ascending);
  return values[count / 2];
}

int main(int argc, char** argv) {
  static double plain[MOST], preloaded[MOST];
  char preload[4096];
  int runs = argc > 2 ? atoi(argv[2]) : 500;
  if (argc < 2 || runs < 1 || runs > MOST) {
    fprintf(stderr, "start LIBRARY [RUNS]\n");
    return 2;
  }
  snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", argv[1]);
  char* without[] = {NULL};
  char* with[] = {preload, NULL};
  for (int i = 0; i < runs; i++) {
    plain[i] = one_run(without);
    preloaded[i] = one_run(with);
  }
  double before = median(plain, runs), after = median(preloaded, runs);
  printf("start of /bin/true: %.0f us, preloaded %.0f us, added %.0f us (medians of %d runs)\n", before, after,
         after - before, runs);
  return 0;
}
