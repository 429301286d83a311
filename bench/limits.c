/* What this machine can do at best, beside which bench/host.c's times are read.
 *
 * usage: bench-limits [--sizes 8,64K,.. | --line]
 *
 * Printed are rows of CSV, LIMIT,THREADS,BYTES,Q1,MEDIAN,Q3 in microseconds; with --line only the first, without the head:
 *   latency   one way of a cache line between two processors, on which two threads hand a flag to and fro
 *   handed    one thread copies what another has just written, on another processor
 *   copy      memcpy of BYTES in all by one thread and by two, in buffers of their own that stay as warm as they can
 *   reduce    the same for c[i] = a[i] + b[i]
 * Without a second processor only what one thread does is measured. */
#define _GNU_SOURCE
#include "turns.h"
#include <pthread.h>
#include <sched.h>
#include <string.h>

enum { ROUNDS = 21, FLAGS = 20000, MOST_THREADS = 2 };
typedef enum { LATENCY, HANDED, COPY, REDUCE } Limit;
static const char *limit_names[] = {"latency", "handed", "copy", "reduce"};

typedef struct {
  int me, threads, processor, repeat;
  Limit limit;
  size_t bytes; /* Of this thread. */
  float *a, *b, *c;
} Part;

static Barrier barrier;
static double seconds[MOST_THREADS][ROUNDS];
static float *handed_over;
static struct {
  _Alignas(64) _Atomic int at;
} flag;

/* The two threads wait for the flag in turn. */
static void hand_flag(int me) {
  for (int i = 0; i < FLAGS; i++) {
    while (atomic_load_explicit(&flag.at, memory_order_acquire) != 2 * i + me) turn_relax();
    atomic_store_explicit(&flag.at, i == FLAGS - 1 && me == 1 ? 0 : 2 * i + me + 1, memory_order_release);
  }
}

static void add(float *restrict c, const float *restrict a, const float *restrict b, size_t n) {
  for (size_t i = 0; i < n; i++) c[i] = a[i] + b[i];
}

static void work(const Part *part) {
  if (part->limit == LATENCY) hand_flag(part->me);
  if (part->limit == HANDED && part->me == 1) memcpy(part->c, handed_over, part->bytes);
  for (int i = 0; i < part->repeat && part->limit >= COPY; i++) {
    if (part->limit == COPY) memcpy(part->c, part->a, part->bytes);
    else add(part->c, part->a, part->b, part->bytes / sizeof(float));
    __asm__ volatile("" ::: "memory"); /* Every repetition is done. */
  }
}

static void *measure(void *argument) {
  Part *part = argument;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(part->processor, &one);
  pthread_setaffinity_np(pthread_self(), sizeof one, &one);
  float **buffers[] = {&part->a, &part->b, &part->c};
  for (int i = 0; i < 3; i++) {
    *buffers[i] = malloc(part->bytes + 64);
    if (!*buffers[i]) perror("buffers"), exit(1);
    memset(*buffers[i], 0, part->bytes + 64);
  }
  if (part->me == 0) handed_over = part->a;
  for (int round = -1; round < ROUNDS; round++) {
    if (part->limit == HANDED && part->me == 0) memset(part->a, round & 1, part->bytes);
    meet(&barrier, part->threads, 0);
    double start = now();
    work(part);
    if (round >= 0) seconds[part->me][round] = (now() - start) / part->repeat;
    meet(&barrier, part->threads, 0);
  }
  free(part->a), free(part->b), free(part->c);
  return NULL;
}

static void row(Limit limit, int threads, size_t bytes, const int *processors) {
  Part parts[MOST_THREADS];
  pthread_t second;
  double slowest[ROUNDS];
  int repeat = limit < COPY || bytes > 1 << 20 ? 1 : bytes > 1 << 16 ? 10 : 1000;
  for (int i = 0; i < threads; i++)
    parts[i] = (Part){.me = i, .threads = threads, .processor = processors[i], .repeat = repeat, .limit = limit,
                      .bytes = limit >= COPY ? bytes / (size_t)threads : bytes};
  if (threads > 1 && pthread_create(&second, NULL, measure, &parts[1]) != 0) perror("pthread_create"), exit(1);
  measure(&parts[0]);
  if (threads > 1) pthread_join(second, NULL);
  for (int round = 0; round < ROUNDS; round++) {
    double first = seconds[0][round], other = threads > 1 ? seconds[1][round] : 0;
    slowest[round] = limit == HANDED ? other : first > other ? first : other;
  }
  printf("%s,%d,%zu", limit_names[limit], threads, bytes);
  print_quartiles(slowest, ROUNDS, limit == LATENCY ? 0.5e6 / FLAGS : 1e6);
  puts("");
  fflush(stdout);
}

int main(int argc, char **argv) {
  const char *sizes = argc == 3 && !strcmp(argv[1], "--sizes") ? argv[2] : DEFAULT_SIZES;
  int only_line = argc == 2 && !strcmp(argv[1], "--line");
  cpu_set_t allowed;
  int processors[MOST_THREADS], found = 0;
  if (argc != 1 && argc != 3 && !only_line) fputs("usage: bench-limits [--sizes 8,64K,.. | --line]\n", stderr), exit(2);
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int i = 0; i < CPU_SETSIZE && found < MOST_THREADS; i++)
    if (CPU_ISSET(i, &allowed)) processors[found++] = i;
  if (!only_line) puts("limit,threads,bytes,q1_us,median_us,q3_us");
  if (found > 1) row(LATENCY, 2, 64, processors);
  if (only_line) return 0;
  size_t bytes;
  while ((bytes = next_size(&sizes))) {
    if (found > 1) row(HANDED, 2, bytes, processors);
    for (int threads = 1; threads <= found; threads++)
      for (Limit limit = COPY; limit <= REDUCE; limit++) row(limit, threads, bytes, processors);
  }
  return 0;
}
