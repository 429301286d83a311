/* Processes with limits: what they may not have is an error, and nothing ends them. */
#define _GNU_SOURCE
#include <nccl.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MEGABYTE ((size_t)1 << 20)
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      _exit(1);                                                                                      \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

/* Runs `body` in a process of its own, which must end by itself. */
static void in_a_child(const char* what, void (*body)(size_t), size_t argument) {
  int status;
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(60);
    body(argument);
    _exit(0);
  }
  CHECK(waitpid(child, &status, 0) == child);
  if (status != 0) {
    fprintf(stderr, "%s, %zu: %s %d\n", what, argument, WIFSIGNALED(status) ? "signal" : "exit code",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    exit(1);
  }
}

static int write_file(const char* folder, const char* name, const char* text) {
  char path[200];
  snprintf(path, sizeof(path), "%s/%s", folder, name);
  int fd = open(path, O_WRONLY);
  int written = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
  if (fd >= 0) close(fd);
  return written;
}

static char group[100];

/* What the control group does not allow is refused with the sizes; what it allows is there. */
static void in_the_group(size_t bytes) {
  void *small, *large = NULL;
  CHECK(write_file(group, "cgroup.procs", "0"));
  OK(ncclMemAlloc(&small, 8 * MEGABYTE));
  memset(small, 1, 8 * MEGABYTE);
  CHECK(ncclMemAlloc(&large, bytes) == ncclSystemError && large == NULL);
  CHECK(strstr(ncclGetLastError(NULL), "268435456") != NULL && strstr(ncclGetLastError(NULL), "67108864") != NULL);
  OK(ncclMemFree(small));
}

static void remove_group(void) { rmdir(group); }

static void control_group(void) {
  const char* tops[] = {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"};
  const char* limits[] = {"memory.limit_in_bytes", "memory.max"};
  for (int version = 0; version < 2; version++) {
    snprintf(group, sizeof(group), "%s/strata-limits-%d", tops[version], getpid());
    if (mkdir(group, 0700) != 0) continue;
    if (write_file(group, limits[version], "67108864")) {
      atexit(remove_group); /* Also when the child fails; children end without handlers. */
      in_a_child("control group", in_the_group, 256 * MEGABYTE);
      return;
    }
    rmdir(group);
  }
  puts("SKIPPED: no control group for memory can be made");
}

static void limit(int resource, size_t bytes) {
  struct rlimit limit = {bytes, bytes};
  CHECK(setrlimit(resource, &limit) == 0);
}

/* A file that may not grow: no SIGXFSZ. */
static void small_files(size_t bytes) {
  void* memory = NULL;
  ncclComm_t comms[2] = {NULL, NULL};
  int devices[2] = {0, 1};
  limit(RLIMIT_FSIZE, bytes);
  CHECK(ncclMemAlloc(&memory, 16 * MEGABYTE) == ncclSystemError && memory == NULL);
  CHECK(strstr(ncclGetLastError(NULL), "RLIMIT_FSIZE") != NULL);
  CHECK(ncclCommInitAll(comms, 2, devices) == ncclSystemError);
  CHECK(strstr(ncclGetLastError(NULL), "RLIMIT_FSIZE") != NULL);
}

static size_t mapped(void) {
  size_t pages = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  CHECK(file != NULL && fscanf(file, "%zu", &pages) == 1);
  fclose(file);
  return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* With so many more bytes of addresses everything works or is an error. */
static void few_addresses(size_t more) {
  ncclComm_t comms[2];
  int devices[2] = {0, 1}, *memory = NULL;
  limit(RLIMIT_AS, mapped() + more);
  if (ncclMemAlloc((void**)&memory, 4 * MEGABYTE) != ncclSuccess) memory = NULL;
  if (ncclCommInitAll(comms, 2, devices) != ncclSuccess) return;
  if (memory != NULL) {
    ncclGroupStart();
    for (int i = 0; i < 2; i++) ncclAllReduce(memory, memory + MEGABYTE / 2, 1000, ncclInt, ncclSum, comms[i], NULL);
    ncclGroupEnd();
  }
  ncclCommDestroy(comms[0]);
  ncclCommDestroy(comms[1]);
}

int main(int argc, char** argv) {
  size_t step = argc > 1 ? (size_t)atoi(argv[1]) << 10 : 8 * MEGABYTE;
  control_group();
  in_a_child("RLIMIT_FSIZE", small_files, MEGABYTE);
  for (size_t more = 0; more <= 400 * MEGABYTE; more += step) in_a_child("RLIMIT_AS", few_addresses, more);
  puts("ok");
  return 0;
}
