/* What script:f means when the file f.xml changes between communicators: `named_scripts FOLDER [ALGORITHM]`, FOLDER being empty.
   Three processes; ranks 0 and 1 have a communicator, ranks 1 and 2 others, so that rank 1 knows files that rank 2 has never seen.
   With an algorithm's name all-reduces name it. */
#include <arpa/inet.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <strata.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 3
#define COUNT 1001
#define CHECK(condition)                                                                                  \
  do {                                                                                                    \
    if (!(condition)) {                                                                                   \
      fprintf(stderr, "rank %d, line %d: %s (%s)\n", me, __LINE__, #condition, ncclGetLastError(NULL));   \
      exit(1);                                                                                            \
    }                                                                                                     \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static int me;
static const char *folder, *named;
static ncclComm_t world;

static const char *step = "<step s=\"%d\" type=\"%s\" srcbuf=\"%c\" srcoff=\"0\" dstbuf=\"%c\" dstoff=\"0\" cnt=\"1\" depid=\"-1\" deps=\"-1\"/>\n";

/* An all-reduce of two ranks: both send and reduce what comes, or one is asked for its vector and sends the sum. */
static void write_program(const char *path, int by_one) {
  FILE *file = fopen(path, "w");
  CHECK(file);
  fprintf(file, "<algo name=\"f\" nchunksperloop=\"1\" ngpus=\"2\" coll=\"allreduce\" inplace=\"1\">\n");
  for (int rank = 0; rank < 2; rank++) {
    fprintf(file, "<gpu id=\"%d\" s_chunks=\"1\"><tb id=\"0\" send=\"%d\" recv=\"%d\" chan=\"0\">\n", rank, 1 - rank, 1 - rank);
    if (by_one && rank == 0) {
      fprintf(file, step, 0, "rrcs", 'i', 'i');
    } else {
      fprintf(file, step, 0, "s", 'i', 'i');
      fprintf(file, step, 1, "r", 'i', by_one ? 'i' : 's');
      if (!by_one) fprintf(file, step, 2, "re", 's', 'i');
    }
    fprintf(file, "</tb></gpu>\n");
  }
  CHECK(fprintf(file, "</algo>\n") > 0 && fclose(file) == 0);
}

enum change { BY_BOTH, BY_ONE, BAD, GONE };

static void barrier(void) {
  char mine = 0, all[RANKS];
  OK(ncclAllGather(&mine, all, 1, ncclChar, world, NULL));
}

/* Rank 0 changes the file; all are there before and after. */
static void change(enum change to) {
  char path[4096];
  snprintf(path, sizeof path, "%s/f.xml", folder);
  barrier();
  if (me == 0 && to == GONE) CHECK(remove(path) == 0);
  if (me == 0 && to == BAD) {
    FILE *file = fopen(path, "w");
    CHECK(file && fputs("<algo name=\"f\">", file) >= 0 && fclose(file) == 0);
  }
  if (me == 0 && to <= BY_ONE) write_program(path, to == BY_ONE);
  barrier();
}

/* A communicator of ranks FIRST and FIRST + 1, on those. */
static ncclComm_t pair(int first) {
  ncclComm_t made = NULL;
  int is_in = me == first || me == first + 1;
  OK(ncclCommSplit(world, is_in ? 0 : NCCL_SPLIT_NOCOLOR, me, &made, NULL));
  CHECK(!made == !is_in);
  return made;
}

static ncclResult_t all_reduce(ncclComm_t comm, int others) {
  float send[COUNT], recv[COUNT];
  for (int i = 0; i < COUNT; i++) send[i] = (float)(me * 100 + i), recv[i] = -1;
  ncclResult_t result = ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, comm, NULL);
  for (int i = 0; result == ncclSuccess && i < COUNT; i++) CHECK(recv[i] == (float)((me + others) * 100 + 2 * i));
  return result;
}

/* Ranks 1 and 2 make a communicator and call: rank 1 is the one that reads the file. */
static void new_pair(enum change now) {
  ncclComm_t made = pair(1);
  if (!made) return;
  ncclResult_t result = all_reduce(made, 3 - me);
  const char *text = ncclGetLastError(made);
  if (named && now >= BAD) {
    CHECK(result == ncclInvalidUsage);
    CHECK(strstr(text, now == BAD ? "script:f is " : "there is no such script"));
    CHECK(now != BAD || (strstr(text, "/f.xml, which is refused: ") && strstr(text, "line 1")));
  } else {
    CHECK(result == ncclSuccess);
  }
  OK(ncclCommDestroy(made));
}

/* The program by its place in MSCCL_XML_FILES: on two ranks it runs, on three it is told what it is for. */
static void by_number(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s/f.xml", folder), setenv("MSCCL_XML_FILES", path, 1);
  change(BY_BOTH);
  float send[COUNT] = {0}, recv[COUNT];
  ncclComm_t two = pair(1), all;
  if (two) {
    send[7] = (float)me;
    OK(ncclCustomCollective(send, recv, COUNT, ncclFloat, ncclSum, 0, two, NULL));
    CHECK(recv[7] == 3);
    OK(ncclCommDestroy(two));
  }
  OK(ncclCommSplit(world, 0, me, &all, NULL));
  CHECK(ncclCustomCollective(send, recv, COUNT, ncclFloat, ncclSum, 0, all, NULL) == ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(all), named ? "script:f is for all_reduce on 2 ranks" : "/f.xml is for all_reduce on 2 ranks"));
  CHECK(ncclCustomCollective(send, recv, COUNT, ncclFloat, ncclSum, 1, all, NULL) == ncclInvalidArgument);
  OK(ncclCommDestroy(all));
}

static void child(int rank, int port) {
  char number[16];
  me = rank;
  snprintf(number, sizeof number, "%d", rank), setenv("RANK", number, 1);
  snprintf(number, sizeof number, "%d", port), setenv("MASTER_PORT", number, 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1), setenv("WORLD_SIZE", "3", 1);
  setenv("STRATA_PROGRAM_DIR", folder, 1), setenv("STRATA_TIMEOUT_MS", "20000", 1);
  if (named) setenv("STRATA_ALLREDUCE_ALGO", named, 1);
  alarm(90);
  ncclUniqueId id;
  int nranks, found;
  OK(strataGetWorldId(&id, &nranks, &found));
  OK(ncclCommInitRank(&world, nranks, id, found));
  /* Rank 1 knows the first one when it reads the second, and rank 2 does not. */
  static const enum change next[] = {BY_ONE, BY_BOTH, BAD, BY_ONE, GONE};
  change(BY_BOTH);
  ncclComm_t old = pair(0);
  if (old) OK(all_reduce(old, 1 - me));
  for (unsigned i = 0; i < sizeof next / sizeof *next; i++) {
    change(next[i]);
    new_pair(next[i]);
    if (old) OK(all_reduce(old, 1 - me));
  }
  if (old) OK(ncclCommDestroy(old));
  by_number();
  OK(ncclCommDestroy(world));
  exit(0);
}

int main(int argc, char **argv) {
  CHECK(argc == 2 || argc == 3);
  folder = argv[1], named = argv[2];
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof address;
  int fd = socket(AF_INET, SOCK_STREAM, 0), status, failed = 0;
  CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, size) == 0);
  CHECK(getsockname(fd, (struct sockaddr *)&address, &size) == 0 && close(fd) == 0);
  for (int rank = 0; rank < RANKS; rank++)
    if (fork() == 0) child(rank, ntohs(address.sin_port));
  for (int rank = 0; rank < RANKS; rank++) failed |= wait(&status) < 0 || status != 0;
  return failed;
}
