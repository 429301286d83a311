/* A plugin whose MPI ends the process, as MPIs do of themselves: no network, a bad link, a peer that is gone. No message
   ever arrives.

   ENDS_RANK says on which rank, ENDS_IN in which call (look, init, meet, create, isend, irecv, test, collective, free,
   barrier, finalize), ENDS_HOW how: exit, abort, or thread, which is exit on another thread while the call never returns. With
   error the process goes on, and the call, which may be init, meet or create, fails. With ENDS_OTHERS=wait it never
   returns on other ranks, as calls in which ranks wait for each other do. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mpi/table.h"

#define STATUS 7

static int initialised;
static uint64_t last;

static int rank_of_this(void) { return atoi(getenv("RANK")); }

static void* leave(void* unused) {
  (void)unused;
  exit(STATUS);
}

static int come_to(const char* call) {
  const char *rank = getenv("ENDS_RANK"), *in = getenv("ENDS_IN"), *how = getenv("ENDS_HOW");
  const char* others = getenv("ENDS_OTHERS");
  pthread_t thread;
  if (!rank || !in || !how || strcmp(in, call)) return 0;
  if (atoi(rank) != rank_of_this()) {
    while (others && !strcmp(others, "wait")) pause();
    return 0;
  }
  fprintf(stderr, "rank %s ends in %s by %s\n", rank, call, how);
  if (!strcmp(how, "abort")) abort();
  if (!strcmp(how, "exit")) exit(STATUS);
  if (!strcmp(how, "error")) return 1;
  pthread_create(&thread, NULL, leave, NULL);
  for (;;) pause();
}

static int describe(char* text, size_t len) {
  snprintf(text, len, "an MPI that ends the process");
  return 0;
}

static int look(struct world* world) {
  come_to("look");
  memset(world, 0, sizeof(*world));
  world->state = initialised;
  world->thread_level = 3;
  world->rank = rank_of_this();
  world->size = atoi(getenv("WORLD_SIZE"));
  return 0;
}

static int init(void) {
  int error = come_to("init");
  initialised = !error;
  return error;
}

/* The first one is just after the start. */
static int barrier(void) {
  static int barriers;
  return come_to(barriers++ ? "barrier" : "meet");
}
static int finalize(void) { come_to("finalize"); return 0; }
static int at_finalize(void (*hook)(void)) { (void)hook; return 0; }

static int comm_create(const int* ranks, int count, int tag, uint64_t* comm) {
  (void)ranks; (void)count; (void)tag;
  *comm = ++last;
  return come_to("create");
}

static int comm_free(uint64_t comm) { (void)comm; come_to("free"); return 0; }

static int isend(uint64_t comm, const void* bytes, uint64_t len, int to, int tag, uint64_t* request) {
  (void)comm; (void)bytes; (void)len; (void)to; (void)tag;
  come_to("isend");
  *request = ++last;
  return 0;
}

static int irecv(uint64_t comm, void* bytes, uint64_t len, int from, int tag, uint64_t* request) {
  (void)comm; (void)bytes; (void)len; (void)from; (void)tag;
  come_to("irecv");
  *request = ++last;
  return 0;
}

static uint64_t cancelled[1024];
static size_t cancels;

/* Receives end when they are cancelled, sends never. */
static int test_some(uint64_t* requests, size_t count, struct ended* ended, size_t* how_many) {
  come_to("test");
  *how_many = 0;
  for (size_t i = 0; i < count; i++)
    for (size_t j = 0; j < cancels; j++)
      if (requests[i] == cancelled[j]) {
        memset(&ended[*how_many], 0, sizeof(*ended));
        ended[*how_many].index = (uint32_t)i;
        ended[*how_many].cancelled = 1;
        requests[i] = UINT64_MAX;
        (*how_many)++;
        cancelled[j] = 0;
        break;
      }
  return 0;
}

static int cancel(uint64_t request) {
  if (cancels < sizeof(cancelled) / sizeof(cancelled[0])) cancelled[cancels++] = request;
  return 0;
}

static int error_text(int error, char* text, size_t len) {
  snprintf(text, len, "error %d", error);
  return 1;
}

static int collective(uint64_t comm, const struct collective* call, uint64_t* request) {
  (void)comm; (void)call;
  come_to("collective");
  *request = ++last;
  return 0;
}

const void* strata_mpi_plugin(void) {
  static const struct table table = {TABLE_VERSION, sizeof table, describe, look, init, barrier, finalize, at_finalize,
    comm_create, comm_free, isend, irecv, test_some, cancel, collective, error_text};
  return &table;
}
