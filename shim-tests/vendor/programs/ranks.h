/* Programs of several processes: a grid of nodes, a process for each rank, memory that they share for ids and results.
 *
 * RANK_ENV_<rank>="NAME=VALUE;..." in the environment is for that rank alone, which then begins anew as if a launcher had
 * started it so: what is preloaded may differ, too. */
#ifndef RANKS_H
#define RANKS_H

#include "way.h"
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define MAX_RANKS 16
#define IDS 256

static struct shared {
  _Atomic int ready[IDS];
  ncclUniqueId ids[IDS];
  _Atomic int arrived;
  uint64_t digest[MAX_RANKS];
  uint64_t count[MAX_RANKS];
} * shared;

/* Where the ranks live. "2x4": two nodes of four ranks; "3+1": nodes of three ranks and of one; a leading "rr" deals the
 * ranks to the nodes in turn. */
struct grid {
  int nranks, node[MAX_RANKS];
};

static struct grid parse_grid(const char* text) {
  struct grid grid = {0, {0}};
  int dealt = strncmp(text, "rr", 2) == 0, nodes, each;
  if (sscanf(text + 2 * dealt, "%dx%d", &nodes, &each) == 2) {
    grid.nranks = nodes * each;
    for (int rank = 0; rank < grid.nranks && rank < MAX_RANKS; rank++)
      grid.node[rank] = dealt ? rank % nodes : rank / each;
  } else {
    int node = 0;
    for (const char* at = text; *at && grid.nranks < MAX_RANKS; at += *at == '+') {
      char* end;
      for (long left = strtol(at, &end, 10); left > 0 && grid.nranks < MAX_RANKS; left--)
        grid.node[grid.nranks++] = node;
      if (end == at) break;
      at = end;
      node++;
    }
  }
  if (grid.nranks < 1 || grid.nranks > MAX_RANKS) {
    fprintf(stderr, "%s is no grid\n", text);
    exit(2);
  }
  return grid;
}

/* The id with this number; rank 0 makes it, the others wait for it. */
__attribute__((unused)) static ncclUniqueId shared_id(int number, int rank) {
  if (rank == 0) {
    OK(ncclGetUniqueId(&shared->ids[number]));
    atomic_store(&shared->ready[number], 1);
  }
  while (!atomic_load(&shared->ready[number])) usleep(200);
  return shared->ids[number];
}

static char** own_arguments;

__attribute__((constructor)) static void keep_arguments(int argc, char** argv) {
  (void)argc;
  own_arguments = argv;
}

static void map_shared(int file) {
  shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  CHECK(shared != MAP_FAILED);
}

/* Begins anew where the rank has an environment of its own. */
static void take_own_environment(int rank, int file) {
  char name[32], place[32];
  snprintf(name, sizeof(name), "RANK_ENV_%d", rank);
  char* own = getenv(name);
  if (!own) return;
  for (char* at = strtok(strdup(own), ";"); at; at = strtok(NULL, ";")) CHECK(putenv(at) == 0);
  snprintf(place, sizeof(place), "%d %d", rank, file);
  setenv("RANK_PLACE", place, 1);
  execv("/proc/self/exe", own_arguments);
  CHECK(!"execv");
}

/* Forks a process for each rank before anything of NCCL is called; returns how many failed. `expected`: the exit status
 * of each rank, all 0 without it, or the negative number of the signal that ends it. */
static int run_ranks(const struct grid* grid, void (*rank_main)(int rank, const struct grid* grid), unsigned limit,
                     const int* expected) {
  pid_t pids[MAX_RANKS];
  int failed = 0, own_rank, file;
  const char* place = getenv("RANK_PLACE");
  if (place && sscanf(place, "%d %d", &own_rank, &file) == 2) {
    map_shared(file);
    rank_main(own_rank, grid);
    exit(0);
  }
  file = memfd_create("ranks", 0);
  CHECK(file >= 0 && ftruncate(file, sizeof(*shared)) == 0);
  map_shared(file);
  for (int rank = 0; rank < grid->nranks; rank++) {
    fflush(NULL);
    pids[rank] = fork();
    CHECK(pids[rank] >= 0);
    if (pids[rank] == 0) {
      char node[32];
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(limit);
      snprintf(node, sizeof(node), "node%d", grid->node[rank]);
      setenv("NCCL_HOSTID", node, 1);
      take_own_environment(rank, file);
      rank_main(rank, grid);
      exit(0);
    }
  }
  for (int rank = 0; rank < grid->nranks; rank++) {
    int status = 0;
    CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
    int wanted = expected ? expected[rank] : 0;
    if ((WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status)) == wanted) continue;
    fprintf(stderr, "rank %d ended with status %#x\n", rank, status);
    failed++;
  }
  return failed;
}

/* All ranks of the program at once; each call is the next meeting. */
__attribute__((unused)) static void meet(const struct grid* grid) {
  static int meetings;
  int wanted = ++meetings * grid->nranks;
  atomic_fetch_add(&shared->arrived, 1);
  while (atomic_load(&shared->arrived) < wanted) usleep(200);
}

/* Waits for a nonblocking communicator; its state. */
__attribute__((unused)) static ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t state;
  do {
    OK(ncclCommGetAsyncError(comm, &state));
    usleep(200);
  } while (state == ncclInProgress);
  return state;
}

#endif
