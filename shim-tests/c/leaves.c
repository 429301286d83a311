/* What a rank does after its last call, by name: `leaves ROW [COUNT [LATE_MS]]`, one process a rank.

   A call that returned success on a rank must succeed on all others, whatever that rank does next. Every rank checks its
   data and every return code, and exits with 0 only when all that must succeed did. COUNT is in floats (600). Ranks that
   need others come LATE_MS milliseconds late (0), so that those who need nobody have left by then.

   Ranks take their places from the variables of `strata launch`, torchrun, mpirun or mpiexec, and meet at MASTER_ADDR and
   MASTER_PORT. */
#include <dirent.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROUNDS 50
#define LIMIT_S 120
#define CHECK(condition)                                                                                           \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      fprintf(stderr, "rank %d, round %d, line %d: %s (%s)\n", rank, round_, __LINE__, #condition, ncclGetLastError(NULL)); \
      exit(1);                                                                                                     \
    }                                                                                                              \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static int rank, nranks, round_, late_ms;
static size_t count = 600;
static float *in, *out;

static int number(const char* const* names) {
  for (; *names; names++)
    if (getenv(*names)) return atoi(getenv(*names));
  fprintf(stderr, "no launcher's variables\n");
  exit(2);
}

static ncclComm_t meet(void) {
  const char* const ranks[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", NULL};
  const char* const sizes[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", NULL};
  const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
  char where[256];
  ncclUniqueId id;
  ncclComm_t comm;
  rank = number(ranks);
  nranks = number(sizes);
  if (host && port) {
    snprintf(where, sizeof(where), "%s:%s", host, port);
    setenv("NCCL_COMM_ID", where, 0);
  }
  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&comm, nranks, id, rank));
  return comm;
}

/* The element that rank `of` contributes at `i`: small integers, so that sums are exact in any order. */
static float item(int of, size_t i) { return (float)((of * 31 + round_ * 7 + (int)(i % 97)) % 128); }

static void fill(void) {
  for (size_t i = 0; i < count * nranks; i++) in[i] = item(rank, i), out[i] = -1;
}

/* Element `i` of rank `of`, or the sum over all ranks where `of` is negative, is at `out[i + shift]`. */
static void expect(int of, size_t from, size_t shift) {
  for (size_t i = from; i < from + count; i++) {
    float due = 0;
    for (int r = 0; r < nranks; r++) due += of < 0 || of == r ? item(r, i) : 0;
    CHECK(out[i - from + shift] == due);
  }
}

static void come_late(int needs_others) {
  if (needs_others && late_ms) usleep(late_ms * 1000);
}

static void broadcast(ncclComm_t comm, int root) {
  fill();
  come_late(rank != root);
  OK(ncclBroadcast(in, out, count, ncclFloat, root, comm, NULL));
  expect(root, 0, 0);
}

static void scatter(ncclComm_t comm, int root) {
  fill();
  come_late(rank != root);
  OK(ncclScatter(in, out, count, ncclFloat, root, comm, NULL));
  expect(root, count * rank, 0);
}

static void gather(ncclComm_t comm, int root) {
  fill();
  come_late(rank == root);
  OK(ncclGather(in, out, count, ncclFloat, root, comm, NULL));
  for (int r = 0; rank == root && r < nranks; r++) expect(r, 0, count * r);
}

static void reduce(ncclComm_t comm, int root) {
  fill();
  come_late(rank == root);
  OK(ncclReduce(in, out, count, ncclFloat, ncclSum, root, comm, NULL));
  if (rank == root) expect(-1, 0, 0);
}

static void allgather(ncclComm_t comm, int root) {
  fill();
  come_late(rank == root);
  OK(ncclAllGather(in, out, count, ncclFloat, comm, NULL));
  for (int r = 0; r < nranks; r++) expect(r, 0, count * r);
}

static void allreduce(ncclComm_t comm, int root) {
  fill();
  come_late(rank == root);
  OK(ncclAllReduce(in, out, count, ncclFloat, ncclSum, comm, NULL));
  expect(-1, 0, 0);
}

static void send(ncclComm_t comm, int root) {
  int last = nranks - 1;
  fill();
  come_late(rank == last);
  if (rank == root && rank != last) OK(ncclSend(in, count, ncclFloat, last, comm, NULL));
  if (rank == last && rank != root) {
    OK(ncclRecv(out, count, ncclFloat, root, comm, NULL));
    expect(root, 0, 0);
  }
}

static void nothing(ncclComm_t comm, int root) { (void)comm; (void)root; }

/* Each round makes a communicator, uses it once and destroys it; the root goes round. */
static void split_rounds(ncclComm_t comm, void (*call)(ncclComm_t, int)) {
  for (round_ = 0; round_ < ROUNDS; round_++) {
    ncclComm_t child;
    OK(ncclCommSplit(comm, 0, rank, &child, NULL));
    call(child, round_ % nranks);
    OK(ncclCommDestroy(child));
  }
}

/* Entries of a directory, or lines of a file, of this process. */
static int entries(const char* path, int lines) {
  int n = 0, c;
  if (lines) {
    FILE* file = fopen(path, "r");
    CHECK(file);
    while ((c = fgetc(file)) != EOF) n += c == '\n';
    fclose(file);
  } else {
    DIR* dir = opendir(path);
    CHECK(dir);
    while (readdir(dir)) n++;
    closedir(dir);
  }
  return n;
}

static int resident_kb(void) {
  long pages[2] = {0, 0};
  FILE* file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%ld %ld", &pages[0], &pages[1]) == 2);
  fclose(file);
  return (int)(pages[1] * (sysconf(_SC_PAGESIZE) / 1024));
}

static void measure(int* of) {
  of[0] = entries("/proc/self/fd", 0);
  of[1] = entries("/proc/self/task", 0);
  of[2] = entries("/proc/self/maps", 1);
  of[3] = resident_kb();
}

/* A thousand communicators, or LEAVES_ROUNDS, one after another: nothing grows after the first hundred. */
static void churn(ncclComm_t comm, int root) {
  int early[4], late[4], rounds = getenv("LEAVES_ROUNDS") ? atoi(getenv("LEAVES_ROUNDS")) : 1000;
  alarm(rounds < 900 ? 900 : rounds);
  for (round_ = 0; round_ < rounds; round_++) {
    ncclComm_t child;
    OK(ncclCommSplit(comm, 0, rank, &child, NULL));
    allreduce(child, root);
    OK(ncclCommDestroy(child));
    if (round_ == 100) measure(early);
  }
  measure(late);
  fprintf(stderr, "rank %d: descriptors %d, then %d; threads %d, then %d; mappings %d, then %d; memory %d KB, then %d\n",
          rank, early[0], late[0], early[1], late[1], early[2], late[2], early[3], late[3]);
  /* The last one may still be on its way out. */
  CHECK(late[0] <= early[0] + 8 && late[1] <= early[1] + 2 && late[2] <= early[2] + 24 && late[3] <= early[3] + 16384);
}

/* The root's process ends as soon as the split has returned there, with the service that brought the ranks together. */
static void split_and_end(ncclComm_t comm, int root) {
  ncclComm_t child;
  OK(ncclCommSplit(comm, 0, rank, &child, NULL));
  if (rank == root) _exit(0);
  OK(ncclCommAbort(child));
}

/* The ways to leave. */
enum { DESTROYS, FINALIZES, EXITS, ROOT_EXITS, ROOT_ABORTS, ONE_ABORTS };

static void leave(ncclComm_t comm, int how) {
  switch (how) {
    case FINALIZES: OK(ncclCommFinalize(comm)); /* fall through */
    case DESTROYS: OK(ncclCommDestroy(comm)); return;
    case EXITS: return;
    case ROOT_EXITS: if (rank == 0) _exit(0); break;
    case ROOT_ABORTS: if (rank == 0) { OK(ncclCommAbort(comm)); return; } break;
    case ONE_ABORTS: if (rank == nranks - 1) { OK(ncclCommAbort(comm)); return; } break;
  }
  /* A rank has gone without a word, and whether the others hear of it in their destroy is not what is tested. */
  ncclCommDestroy(comm);
}

static const struct {
  const char* name;
  void (*call)(ncclComm_t, int);
  int splits, how;
} ROWS[] = {
  {"nothing", nothing, 0, DESTROYS},
  {"broadcast", broadcast, 0, DESTROYS},
  {"send", send, 0, DESTROYS},
  {"split_scatter", scatter, 1, DESTROYS},
  {"split_broadcast", broadcast, 1, DESTROYS},
  {"split_gather", gather, 1, DESTROYS},
  {"split_reduce", reduce, 1, DESTROYS},
  {"finalize", broadcast, 0, FINALIZES},
  {"exit", broadcast, 0, EXITS},
  {"root_exits", broadcast, 0, ROOT_EXITS},
  {"init_root_exits", nothing, 0, ROOT_EXITS},
  {"split_root_exits", split_and_end, 0, ROOT_EXITS},
  {"root_aborts", broadcast, 0, ROOT_ABORTS},
  {"one_aborts", allreduce, 0, ONE_ABORTS},
  {"churn", churn, 0, DESTROYS},
  {"allgather", allgather, 1, DESTROYS},
  {"allreduce", allreduce, 1, DESTROYS},
};

int main(int argc, char** argv) {
  size_t row = 0, rows = sizeof(ROWS) / sizeof(ROWS[0]);
  alarm(LIMIT_S);
  while (row < rows && (argc < 2 || strcmp(ROWS[row].name, argv[1]))) row++;
  if (row == rows) {
    fprintf(stderr, "usage: leaves ROW [COUNT [LATE_MS]]; ROW is one of");
    for (row = 0; row < rows; row++) fprintf(stderr, " %s", ROWS[row].name);
    fprintf(stderr, "\n");
    return 2;
  }
  if (argc > 2) count = strtoul(argv[2], NULL, 10);
  if (argc > 3) late_ms = atoi(argv[3]);
  ncclComm_t comm = meet();
  in = malloc(sizeof(float) * count * nranks);
  out = malloc(sizeof(float) * count * nranks);
  if (ROWS[row].splits)
    split_rounds(comm, ROWS[row].call);
  else
    ROWS[row].call(comm, 0);
  leave(comm, ROWS[row].how);
  return 0;
}
