/* How turns are taken in a comparison: a barrier for ranks that are processes or threads of one machine, the clock, sizes and
 * quartiles. Ranks with processors of their own spin in it and are never descheduled; where they outnumber the processors
 * they sleep, and leave the processors to those that are still at work. Both sides of a comparison pay the same. */
#include <linux/futex.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 256, TURN_LIMIT_S = 120 };
#define DEFAULT_SIZES "8,128,1K,8K,64K,512K,4M,32M,256M"

/* All zero at first. Each number has a cache line. */
typedef struct {
  _Alignas(64) _Atomic uint32_t arrived;
  _Alignas(64) _Atomic uint32_t generation;
} Barrier;

static inline double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static inline void turn_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static inline void turn_late(void) {
  fprintf(stderr, "a rank has waited %d s for the others at a barrier of the benchmark\n", TURN_LIMIT_S);
  exit(1);
}

/* All n ranks say the same about being asleep. */
static inline void meet(Barrier *barrier, int n, int asleep) {
  uint32_t generation = atomic_load(&barrier->generation);
  if (atomic_fetch_add(&barrier->arrived, 1) + 1 == (uint32_t)n) {
    atomic_store(&barrier->arrived, 0);
    atomic_fetch_add(&barrier->generation, 1);
    if (asleep) syscall(SYS_futex, &barrier->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return;
  }
  double start = now();
  for (unsigned turns = 1; atomic_load_explicit(&barrier->generation, memory_order_acquire) == generation; turns++) {
    struct timespec second = {1, 0};
    if (asleep) syscall(SYS_futex, &barrier->generation, FUTEX_WAIT, generation, &second, NULL, 0);
    else turn_relax();
    if ((asleep || turns % (1u << 20) == 0) && now() - start > TURN_LIMIT_S) turn_late();
  }
}

/* The next of `8,64K,1M`, and 0 at the end. */
static inline size_t next_size(const char **at) {
  char *end;
  size_t bytes = strtoull(*at, &end, 10);
  if (*end == 'K') bytes <<= 10, end++;
  else if (*end == 'M') bytes <<= 20, end++;
  else if (*end == 'G') bytes <<= 30, end++;
  *at = *end ? end + 1 : end;
  return bytes;
}

static inline int smaller_first(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Sorts the values and writes their quartiles, each scaled, with a comma before it. */
static inline void print_quartiles(double *values, int n, double scale) {
  qsort(values, (size_t)n, sizeof *values, smaller_first);
  printf(",%.3f,%.3f,%.3f", scale * values[n / 4], scale * values[n / 2], scale * values[n * 3 / 4]);
}

static inline double largest_of(const double *values, int n) {
  double largest = values[0];
  for (int i = 1; i < n; i++)
    if (values[i] > largest) largest = values[i];
  return largest;
}
