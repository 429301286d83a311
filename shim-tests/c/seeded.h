/* For programs that make calls on random numbers which follow from seeds: numbers, elements of all kinds of types, and ranks as threads
   or as processes on virtual nodes. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 8 };
static int nranks, nnodes;
static ncclUniqueId id;

/* Numbers that follow from a seed. */
typedef struct {
  uint64_t state;
} Random;

static inline uint64_t next(Random *random) {
  uint64_t z = random->state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
static inline size_t below(Random *random, size_t limit) { return next(random) % limit; }

enum { TYPES = 6 };
static const ncclDataType_t types[TYPES] = {ncclInt8, ncclInt32, ncclUint64, ncclFloat, ncclDouble, strataInt16};
static const size_t sizes[TYPES] = {1, 4, 8, 4, 8, 2};

/* Writes a small number as an element of a type. */
static inline void put(int type, char *at, int value) {
  switch (type) {
    case 0: *at = (char)value; return;
    case 1: memcpy(at, &(int32_t){value}, 4); return;
    case 2: memcpy(at, &(uint64_t){(uint64_t)value}, 8); return;
    case 3: memcpy(at, &(float){(float)value}, 4); return;
    case 4: memcpy(at, &(double){value}, 8); return;
    default: memcpy(at, &(int16_t){(int16_t)value}, 2);
  }
}

static inline void in_threads(void *(*rank_main)(void *)) {
  pthread_t threads[MOST_RANKS];
  for (intptr_t rank = 0; rank < nranks; rank++) CHECK(!pthread_create(&threads[rank], NULL, rank_main, (void *)rank));
  for (int rank = 0; rank < nranks; rank++) CHECK(!pthread_join(threads[rank], NULL));
}

/* Each rank is a process; this one, which has made the id, waits for them. */
static inline void in_processes(void *(*rank_main)(void *)) {
  pid_t children[MOST_RANKS];
  for (int rank = 0; rank < nranks; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      char node[16];
      /* An alarm ends the parent alone. */
      CHECK(!prctl(PR_SET_PDEATHSIG, SIGKILL));
      snprintf(node, sizeof node, "node%d", rank * nnodes / nranks);
      setenv("NCCL_HOSTID", node, 1);
      rank_main((void *)(intptr_t)rank);
      _exit(0);
    }
  }
  for (int rank = 0; rank < nranks; rank++) {
    int status;
    CHECK(waitpid(children[rank], &status, 0) == children[rank] && status == 0);
  }
}

/* One rank of a job that a launcher has started. */
static inline void launched(void *(*rank_main)(void *)) {
  int rank;
  OK(strataGetWorldId(&id, &nranks, &rank));
  CHECK(nranks <= MOST_RANKS);
  rank_main((void *)(intptr_t)rank);
}
