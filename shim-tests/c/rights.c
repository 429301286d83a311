/* Processes whose descriptors and rights are not what a library expects: standard descriptors closed, privileges given up
   while a communicator is in use, more rights than whoever started them. */
#define _GNU_SOURCE
#include <nccl.h>
#include <strata.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT (1 << 20)
#define NOBODY 65534
static int told; /* Where a rank says what is wrong, when it has no standard error. */
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      dprintf(told, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));             \
      _exit(1);                                                                                      \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static int ready[2][2]; /* A pipe to each rank. */

static void meet(int rank) {
  char byte = 0;
  CHECK(write(ready[1 - rank][1], &byte, 1) == 1 && read(ready[rank][0], &byte, 1) == 1);
}

static void exchange(ncclComm_t comm, int rank, int* from, int* to) {
  for (int i = 0; i < COUNT; i++) {
    from[i] = rank * COUNT + i;
    to[i] = -1;
  }
  OK(ncclGroupStart());
  OK(ncclSend(from, COUNT, ncclInt, 1 - rank, comm, NULL));
  OK(ncclRecv(to, COUNT, ncclInt, 1 - rank, comm, NULL));
  OK(ncclGroupEnd());
  for (int i = 0; i < COUNT; i++) CHECK(to[i] == (1 - rank) * COUNT + i);
  OK(ncclAllReduce(from, to, COUNT, ncclInt, ncclSum, comm, NULL));
  for (int i = 0; i < COUNT; i++) CHECK(to[i] == COUNT + 2 * i);
}

static int *a, *b;

static void buffers(void) {
  a = malloc(COUNT * sizeof(int));
  b = malloc(COUNT * sizeof(int));
  CHECK(a != NULL && b != NULL);
}

/* Nothing of ours takes the numbers, and no line of the log goes to what does. */
static void without_standard(int rank, ncclUniqueId id) {
  ncclComm_t comm, second;
  char name[] = "/tmp/strata-own-XXXXXX";
  struct stat file;
  buffers();
  setenv("NCCL_DEBUG", "INFO", 1);
  for (int fd = 0; fd < 3; fd++) close(fd);
  OK(ncclCommInitRank(&comm, 2, id, rank));
  exchange(comm, rank, a, b);
  for (int fd = 0; fd < 3; fd++) CHECK(fcntl(fd, F_GETFD) == -1 && errno == EBADF);
  /* Files of the program's own get the numbers. */
  CHECK(open("/dev/null", O_RDONLY) == 0 && open("/dev/null", O_WRONLY) == 1 && mkstemp(name) == 2);
  OK(ncclCommSplit(comm, 0, rank, &second, NULL));
  exchange(second, rank, a, b);
  CHECK(fstat(2, &file) == 0 && file.st_size == 0 && unlink(name) == 0);
  OK(ncclCommDestroy(second));
  OK(ncclCommDestroy(comm));
}

/* Both give up their rights with a message under way: the kernel does not let one read the other's memory any more. */
static void without_privileges(int rank, ncclUniqueId id) {
  ncclComm_t comm, second;
  strataStream_t stream;
  buffers();
  setenv("STRATA_BOARD", "0", 1);
  setenv("STRATA_STAGE", "0", 1);
  OK(ncclCommInitRank(&comm, 2, id, rank));
  exchange(comm, rank, a, b);
  OK(strataStreamCreate(&stream));
  for (int i = 0; i < COUNT; i++) a[i] = 3 * i;
  if (rank == 0) OK(ncclSend(a, COUNT, ncclInt, 1, comm, stream));
  meet(rank);
  CHECK(setgroups(0, NULL) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0 && prctl(PR_GET_DUMPABLE) == 0);
  meet(rank);
  if (rank == 1) OK(ncclRecv(b, COUNT, ncclInt, 0, comm, NULL));
  for (int i = 0; rank == 1 && i < COUNT; i++) CHECK(b[i] == 3 * i);
  OK(strataStreamSynchronize(stream));
  for (int round = 0; round < 2; round++) exchange(comm, rank, a, b);
  OK(ncclMemAlloc((void**)&a, COUNT * sizeof(int)));
  exchange(comm, rank, a, b);
  OK(ncclCommSplit(comm, 0, rank, &second, NULL));
  exchange(second, rank, a, b);
  OK(ncclCommDestroy(second));
  OK(ncclCommDestroy(comm));
}

/* The same with a part on a board that the other may not read any more where it lies: its owner copies it then. */
static void without_privileges_on_boards(int rank, ncclUniqueId id) {
  enum { PART = COUNT / 4 };
  ncclComm_t comm;
  strataStream_t stream;
  buffers();
  OK(ncclCommInitRank(&comm, 2, id, rank));
  for (int round = 0; round < 6; round++) {
    for (int i = 0; i < PART; i++) a[i] = 5 * i + rank + round;
    for (int i = 0; i < COUNT; i++) b[i] = -1;
    if (round == 1) {
      OK(strataStreamCreate(&stream));
      if (rank == 0) OK(ncclAllGather(a, b, PART, ncclInt, comm, stream));
      meet(rank);
      CHECK(setgroups(0, NULL) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0 && prctl(PR_GET_DUMPABLE) == 0);
      meet(rank);
      if (rank == 1) OK(ncclAllGather(a, b, PART, ncclInt, comm, NULL));
      OK(strataStreamSynchronize(stream));
    } else {
      OK(ncclAllGather(a, b, PART, ncclInt, comm, NULL));
    }
    for (int i = 0; i < 2 * PART; i++) CHECK(b[i] == 5 * (i % PART) + i / PART + round);
    OK(ncclAllReduce(a, b, PART, ncclInt, ncclSum, comm, NULL));
    for (int i = 0; i < PART; i++) CHECK(b[i] == 10 * i + 1 + 2 * round);
    OK(ncclReduceScatter(a, b, PART / 2, ncclInt, ncclSum, comm, NULL));
    for (int i = 0; i < PART / 2; i++) CHECK(b[i] == 10 * (i + rank * (PART / 2)) + 1 + 2 * round);
    OK(ncclBroadcast(a, b, PART, ncclInt, round % 2, comm, NULL));
    for (int i = 0; i < PART; i++) CHECK(b[i] == 5 * i + round % 2 + round);
    OK(ncclAlltoAll(a, b, PART / 2, ncclInt, comm, NULL));
    for (int i = 0; i < PART; i++) CHECK(b[i] == 5 * (i % (PART / 2) + rank * (PART / 2)) + i / (PART / 2) + round);
  }
  OK(ncclCommDestroy(comm));
}

static void play(const char* what, void (*body)(int, ncclUniqueId), int one_node) {
  ncclUniqueId id;
  pid_t ranks[2];
  int status, failed = 0;
  OK(ncclGetUniqueId(&id));
  CHECK(pipe(ready[0]) == 0 && pipe(ready[1]) == 0);
  for (int rank = 0; rank < 2; rank++) {
    ranks[rank] = fork();
    CHECK(ranks[rank] >= 0);
    if (ranks[rank] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(60);
      setenv("NCCL_HOSTID", one_node || rank == 0 ? "node0" : "node1", 1);
      body(rank, id);
      _exit(0);
    }
  }
  for (int rank = 0; rank < 2; rank++) {
    CHECK(waitpid(ranks[rank], &status, 0) == ranks[rank]);
    if (status != 0) fprintf(stderr, "%s, rank %d: %s %d\n", what, rank, WIFSIGNALED(status) ? "signal" : "exit code",
                             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    failed |= status;
  }
  if (failed) exit(1);
}

static int runs_as_nobody(const char* program, const char* log) {
  int status;
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    if (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0) _exit(2);
    setenv("NCCL_DEBUG", "INFO", 1);
    setenv("NCCL_DEBUG_FILE", log, 1);
    execl(program, program, "copy", (char*)NULL);
    _exit(3);
  }
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

/* A copy of this program that is run with the rights of its owner writes no file that its starter names. */
static void elevated_copy(void) {
  char folder[] = "/tmp/strata-rights-XXXXXX", program[100], log[100], command[500], self[300] = "";
  CHECK(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0 && mkdtemp(folder) != NULL);
  snprintf(program, sizeof(program), "%s/program", folder);
  snprintf(log, sizeof(log), "%s/log", folder);
  snprintf(command, sizeof(command), "cp '%s' '%s'", self, program);
  CHECK(system(command) == 0 && chmod(folder, 0777) == 0 && chmod(program, 0755) == 0);
  int plain = runs_as_nobody(program, log), wrote = access(log, F_OK) == 0;
  unlink(log);
  CHECK(chmod(program, 06755) == 0);
  int elevated = runs_as_nobody(program, log), wrote_elevated = access(log, F_OK) == 0;
  snprintf(command, sizeof(command), "rm -r '%s'", folder);
  CHECK(system(command) == 0);
  if (plain != 0 || WEXITSTATUS(elevated) == 9) {
    printf("SKIPPED: no set-user-ID program can be run here (%d, %d)\n", plain, elevated);
    return;
  }
  CHECK(elevated == 0 && wrote && !wrote_elevated);
}

int main(int argc, char** argv) {
  int version, root = geteuid() == 0;
  if (argc > 1 && strcmp(argv[1], "copy") == 0) {
    ncclComm_t comm;
    int device = 0, has = getauxval(AT_SECURE) != 0;
    if (geteuid() == 0 && !has) return 9;
    return ncclCommInitAll(&comm, 1, &device) != ncclSuccess || ncclCommDestroy(comm) != ncclSuccess;
  }
  told = fcntl(2, F_DUPFD_CLOEXEC, 100);
  OK(ncclGetVersion(&version));
  const char* which = argc > 1 ? argv[1] : "all";
  int all = strcmp(which, "all") == 0;
  for (int one_node = 0; one_node < 2 && (all || strcmp(which, "standard") == 0); one_node++) {
    play("closed standard descriptors", without_standard, one_node);
  }
  if (!root) return puts("SKIPPED: privileges: only root has some to give up"), 0;
  if (all || strcmp(which, "privileges") == 0) play("privileges", without_privileges, 1);
  if (all || strcmp(which, "boards") == 0) play("privileges, on boards", without_privileges_on_boards, 1);
  if (all || strcmp(which, "elevated") == 0) elevated_copy();
  puts("ok");
  return 0;
}
