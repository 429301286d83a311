/* The plugin's table of functions, called as the library calls it: `table.h`. One process.
   Built with -DOTHER and -rdynamic this program is an MPI of another make to the plugin. */
#include <dlfcn.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "table.h"

#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                        \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)

enum { MANY = 200 };

static const struct table* plugin;
static int ended_before_mpi;

#ifdef OTHER
int MPI_Get_library_version(char* text, int* length) {
  *length = sprintf(text, "Another MPI");
  return 0;
}
#endif

/* Tests these requests until `wanted` have ended; each is in `ended` at its place. */
static void finish(uint64_t* requests, size_t count, struct ended* ended, size_t wanted) {
  struct ended told[MANY];
  size_t all = 0;
  for (long tries = 0; all < wanted; tries++) {
    size_t some = SIZE_MAX;
    CHECK(tries < 100000000 && plugin->test_some(requests, count, told, &some) == 0 && some <= count);
    for (size_t i = 0; i < some; i++) {
      CHECK(told[i].index < count && requests[told[i].index] == UINT64_MAX);
      ended[told[i].index] = told[i];
    }
    all += some;
  }
}

static void messages(uint64_t comm) {
  static char from[MANY][64], into[MANY][64];
  uint64_t requests[MANY];
  struct ended ended[MANY];
  /* More requests than are tested without allocating, each under a tag and with a length of its own. */
  for (int i = 0; i < MANY / 2; i++) {
    memset(from[i], i + 1, sizeof from[i]);
    CHECK(plugin->irecv(comm, into[i], sizeof into[i], i % 2 ? 0 : -1, i, &requests[MANY / 2 + i]) == 0);
  }
  for (int i = 0; i < MANY / 2; i++) CHECK(plugin->isend(comm, from[i], i % 64, 0, i, &requests[i]) == 0);
  finish(requests, MANY, ended, MANY);
  for (int i = 0; i < MANY / 2; i++) {
    struct ended* one = &ended[MANY / 2 + i];
    CHECK(one->error == 0 && one->cancelled == 0 && one->source == 0 && one->bytes == (uint64_t)(i % 64));
    for (int at = 0; at < 64; at++) CHECK(into[i][at] == (at < i % 64 ? i + 1 : 0));
  }
  /* What is meant for the program is not ours, even under the same tag. */
  MPI_Request theirs;
  MPI_Isend(from[0], 8, MPI_BYTE, 0, 5, MPI_COMM_WORLD, &theirs);
  CHECK(plugin->irecv(comm, into[0], 64, -1, 5, &requests[0]) == 0);
  size_t some;
  for (int i = 0; i < 1000; i++) CHECK(plugin->test_some(requests, 1, ended, &some) == 0 && some == 0);
  CHECK(plugin->cancel(requests[0]) == 0);
  finish(requests, 1, ended, 1);
  CHECK(ended[0].cancelled == 1);
  MPI_Recv(into[0], 8, MPI_BYTE, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Wait(&theirs, MPI_STATUS_IGNORE);
}

/* Open MPI cuts what a process sends to itself without a word. */
static int tells_of_truncation(void) {
  static char bytes[64], into[64];
  MPI_Request send, receive;
  MPI_Irecv(into, 8, MPI_BYTE, 0, 1, MPI_COMM_WORLD, &receive);
  MPI_Isend(bytes, 64, MPI_BYTE, 0, 1, MPI_COMM_WORLD, &send);
  int told = MPI_Wait(&receive, MPI_STATUS_IGNORE) != MPI_SUCCESS;
  MPI_Wait(&send, MPI_STATUS_IGNORE);
  return told;
}

static void errors(uint64_t comm) {
  static char bytes[64], into[64];
  char text[100] = "";
  uint64_t request, requests[2];
  struct ended ended[2];
  CHECK(plugin->irecv(comm, into, 8, 0, 1, &requests[0]) == 0);
  CHECK(plugin->isend(comm, bytes, 64, 0, 1, &requests[1]) == 0);
  finish(requests, 2, ended, 2);
  CHECK(ended[1].error == 0 && (ended[0].error != 0) == tells_of_truncation());
  CHECK(plugin->error_text(ended[0].error ? ended[0].error : MPI_ERR_TRUNCATE, text, sizeof text) == 0);
  CHECK(strlen(text) > 5);
  CHECK(plugin->isend(comm, bytes, 8, 77, 1, &request) != 0);
  CHECK(plugin->irecv(comm, bytes, 8, 77, 1, &request) != 0);
  CHECK(plugin->isend(comm, bytes, (UINT64_C(1) << 32) + 8, 0, 1, &request) != 0);
  CHECK(plugin->irecv(comm, bytes, (UINT64_C(1) << 32) + 8, 0, 1, &request) != 0);
  CHECK(plugin->error_text(MPI_ERR_INTERN, text, 6) == 1 && strlen(text) == 5);
}

/* Of one rank each has what it gave; MPI's types and operations go by the table's numbers. */
static void collectives(uint64_t comm) {
  enum { ALL_REDUCE, REDUCE_SCATTER = 2, BROADCAST = 3, ALL_TO_ALL = 5, SCATTER = 7, BARRIER = 8, FLOAT = 8, TYPES = 10, OPS = 7 };
  static const size_t sizes[TYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 4, 8};
  uint64_t request;
  struct ended ended;
  for (int what = ALL_REDUCE; what <= SCATTER; what++)
    for (int element = 0; element < TYPES; element++)
      for (int operation = 0; operation < OPS; operation++) {
        if (operation > 3 && element >= FLOAT) continue;
        unsigned char from[64], into[72];
        memset(from, 17, sizeof from), memset(into, what == BROADCAST ? 17 : 0, 64), memset(into + 64, 5, 8);
        struct collective call = {what, element, operation, 0, 0, from, into, 64 / sizes[element], NULL, NULL, NULL, NULL};
        CHECK(plugin->collective(comm, &call, &request) == 0);
        finish(&request, 1, &ended, 1);
        CHECK(ended.error == 0 && !memcmp(from, into, 64) && into[64] == 5);
        /* In place the other buffer is not looked at. */
        if (what == BROADCAST || what == ALL_TO_ALL || what == REDUCE_SCATTER) continue;
        struct collective same = call;
        same.in_place = 1;
        if (what == SCATTER) same.recv = NULL;
        else same.send = NULL;
        CHECK(plugin->collective(comm, &same, &request) == 0);
        finish(&request, 1, &ended, 1);
        CHECK(ended.error == 0 && !memcmp(from, into, 64));
      }
  struct collective barrier = {.what = BARRIER, .element = 1};
  CHECK(plugin->collective(comm, &barrier, &request) == 0);
  finish(&request, 1, &ended, 1);
  unsigned char bytes[8];
  const uint64_t far = (UINT64_C(1) << 32) + 8;
  struct collective wrong[] = {{.what = 99, .element = 1, .send = bytes, .recv = bytes, .count = 8},
                               {.what = ALL_REDUCE, .element = TYPES, .send = bytes, .recv = bytes + 4, .count = 1},
                               {.what = ALL_REDUCE, .element = 1, .operation = OPS, .send = bytes, .recv = bytes + 4, .count = 1},
                               {.what = ALL_REDUCE, .element = 1, .send = bytes, .recv = bytes, .count = far}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) CHECK(plugin->collective(comm, &wrong[i], &request) != 0);
}

/* Blocks of different sizes: the one block of one rank lies apart, or there is nothing in it. */
static void uneven_collectives(uint64_t comm) {
  enum { ALL_GATHER_V = 9, REDUCE_SCATTER_V, ALL_TO_ALL_V, GATHER_V, SCATTER_V, TYPES = 10, AT = 3 };
  static const size_t sizes[TYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 4, 8};
  for (int what = ALL_GATHER_V; what <= SCATTER_V; what++)
    for (int element = 0; element < TYPES; element++)
      for (int count = 0; count < 6; count += 5)
        for (int in_place = 0; in_place < 2; in_place++) {
          unsigned char from[96], into[96], before[96];
          uint64_t request;
          struct ended ended;
          size_t size = sizes[element], length = count * size;
          int is_from_apart = what == ALL_TO_ALL_V || what == SCATTER_V;
          int is_into_apart = what != REDUCE_SCATTER_V && what != SCATTER_V;
          /* MPICH 4 takes no heed of the place in an all-gather of one rank. */
          int from_place = AT, into_place = what == ALL_GATHER_V ? 0 : AT - 1;
          size_t first = is_from_apart ? from_place * size : 0, there = is_into_apart ? into_place * size : 0;
          if (in_place && (what == REDUCE_SCATTER_V || what == ALL_TO_ALL_V)) continue;
          for (size_t i = 0; i < sizeof from; i++) from[i] = (unsigned char)(20 + i);
          memset(into, 5, sizeof into);
          if (in_place && what != SCATTER_V) memcpy(into + there, from, length);
          memcpy(before, into, sizeof into);
          struct collective call = {.what = what, .element = element, .in_place = in_place, .send = from, .recv = into};
          call.count = count;
          if (what != REDUCE_SCATTER_V && is_into_apart) call.recv_counts = &count, call.recv_places = &into_place;
          if (what == REDUCE_SCATTER_V) call.recv_counts = &count;
          if (is_from_apart) call.send_counts = &count, call.send_places = &from_place;
          if (what == SCATTER_V && in_place) call.recv = NULL;
          else if (in_place) call.send = NULL;
          CHECK(plugin->collective(comm, &call, &request) == 0);
          finish(&request, 1, &ended, 1);
          CHECK(ended.error == 0);
          if (!(what == SCATTER_V && in_place)) memcpy(before + there, from + first, length);
          CHECK(!memcmp(into, before, sizeof into));
        }
  uint64_t request;
  struct collective wrong = {.what = SCATTER_V + 1, .element = 1};
  CHECK(plugin->collective(comm, &wrong, &request) != 0);
}

static void fatal(MPI_Comm* comm, int* error, ...) {
  (void)comm;
  fprintf(stderr, "the program's error handler was called for %d\n", *error);
  exit(1);
}

static void hook(void) {
  struct world world;
  CHECK(plugin->look(&world) == 0 && world.state == 1);
  ended_before_mpi++;
}

int main(int argc, char** argv) {
  CHECK(argc == 2);
  alarm(60);
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library);
  const struct table* (*entry)(void) = (const struct table* (*)(void))dlsym(library, "strata_mpi_plugin");
  CHECK(entry);
  plugin = entry();
  CHECK(plugin->version == TABLE_VERSION && plugin->size == sizeof *plugin);
  char text[8192];
  int known = plugin->describe(text, sizeof text);
#ifdef OTHER
  CHECK(known != 0 && !strcmp(text, "Another MPI"));
#else
  struct world world;
  CHECK(known == 0 && strlen(text) > 5 && plugin->look(&world) == 0 && world.state == 0);
  CHECK(plugin->init() == 0 && plugin->look(&world) == 0);
  CHECK(world.state == 1 && world.thread_level == 3 && world.rank == 0 && world.size == 1);
  CHECK(plugin->at_finalize(hook) == 0);
  MPI_Errhandler theirs, found;
  MPI_Comm whole[2] = {MPI_COMM_WORLD, MPI_COMM_SELF};
  for (int i = 0; i < 2; i++) {
    MPI_Comm_get_errhandler(whole[i], &found);
    CHECK(found == MPI_ERRORS_RETURN);
  }
  /* The program's own ways with errors stay as they are. */
  MPI_Comm_create_errhandler(fatal, &theirs);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, theirs);
  uint64_t comm;
  int first = 0;
  int wrong = 77;
  CHECK(plugin->comm_create(&wrong, 1, 1, &comm) != 0);
  CHECK(plugin->comm_create(&first, 1, 1, &comm) == 0);
  messages(comm);
  collectives(comm);
  uneven_collectives(comm);
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &found);
  CHECK(found == theirs);
  /* What goes wrong in a test of requests counts as an error of the world. */
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  errors(comm);
  /* Far more than an MPI has numbers for: they must be given back. */
  for (int i = 0; i < 5000; i++) {
    uint64_t another;
    CHECK(plugin->comm_create(&first, 1, i, &another) == 0 && plugin->comm_free(another) == 0);
  }
  CHECK(plugin->comm_free(comm) == 0 && ended_before_mpi == 0);
  CHECK(plugin->barrier() == 0 && ended_before_mpi == 0);
  CHECK(plugin->finalize() == 0 && ended_before_mpi == 1);
  CHECK(plugin->look(&world) == 0 && world.state == 2);
#endif
  puts("the contract holds");
  return 0;
}
