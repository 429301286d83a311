/* Boards: shared memory by which the ranks of a communicator meet, whichever processes they are in.
 *
 * A board begins as zeroes, so whoever comes first makes it and the last to come removes its name. Ranks write their own
 * words only; whoever changes a word rings the bell, and waiting ranks look again. No wait is endless: it ends with an
 * error when a rank that it needs has ended, has given up, or does not come in time. */
#include "double.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double limit(void) {
  const char* text = getenv("DOUBLE_TIMEOUT_S");
  double seconds = text ? atof(text) : 0;
  return seconds > 0 ? seconds : 60;
}

static void path_of(uint64_t id, char* path, size_t size) {
  snprintf(path, size, "/nccl-double-%016llx", (unsigned long long)id);
}

struct board* board_open(uint64_t id) {
  char path[64];
  path_of(id, path, sizeof(path));
  int file = shm_open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return NULL;
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(struct board)) == 0)
    memory = mmap(NULL, sizeof(struct board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  /* Where a process may be read by its ancestors only, siblings need leave. */
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

void board_close(struct board* board) { munmap(board, sizeof(struct board)); }

void board_forget(uint64_t id) {
  char path[64];
  path_of(id, path, sizeof(path));
  shm_unlink(path);
}

void board_ring(struct board* board) {
  atomic_fetch_add(&board->bell, 1);
  if (atomic_load(&board->waiters) > 0) syscall(SYS_futex, &board->bell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* Whether the process still runs; one that nobody has waited for yet does not. */
static int alive(int pid) {
  char path[32], text[256];
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t got = read(file, text, sizeof(text) - 1);
  close(file);
  if (got <= 0) return 0;
  text[got] = 0;
  const char* end = strrchr(text, ')');
  return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

/* The communicator has failed: so its peers learn. */
ncclResult_t broke(ncclComm_t comm, ncclResult_t result) {
  uint32_t whole = 0;
  atomic_compare_exchange_strong(&comm->board->broken, &whole, (uint32_t)comm->rank + 1);
  board_ring(comm->board);
  return result;
}

void wait_begin(ncclComm_t comm, struct waiting* waiting) {
  waiting->spins = 0;
  waiting->since = waiting->looked = now();
  wait_look(comm, waiting);
}

/* Call before looking at what is waited for: what changes after this ends the next sleep at once. */
void wait_look(ncclComm_t comm, struct waiting* waiting) { waiting->bell = atomic_load(&comm->board->bell); }

/* One step of waiting for `missing`; an error when there is nothing to wait for any more. */
ncclResult_t wait_step(ncclComm_t comm, struct waiting* waiting, int missing) {
  struct board* board = comm->board;
  struct seat* seat = &board->seats[missing];
  int aborted = atomic_load(&comm->aborted) || (comm->maker && atomic_load(&comm->maker->aborted));
  REFUSE(aborted, ncclInternalError, "rank %d was aborted while it waited for rank %d", comm->rank,
         missing);
  int failed = (int)atomic_load(&board->broken), left = (int)atomic_load(&seat->gone);
  /* It may have done its part before that: then the bell has rung since the caller looked, who looks again. */
  if ((failed || left) && atomic_load(&board->bell) != waiting->bell) return ncclSuccess;
  REFUSE(failed, ncclRemoteError, "rank %d has failed", failed - 1);
  if (waiting->spins++ < 50) {
    sched_yield();
    return ncclSuccess;
  }
  double time = now();
  if (time - waiting->since > limit()) {
    complain("rank %d waited too long for rank %d", comm->rank, missing);
    return broke(comm, ncclRemoteError);
  }
  int pid = atomic_load(&seat->pid), dead = 0;
  if (time - waiting->looked > 0.1) {
    waiting->looked = time;
    dead = pid != 0 && !alive(pid) && atomic_load(&board->bell) == waiting->bell;
  }
  if (left || dead) {
    complain("rank %d has gone", missing);
    return broke(comm, ncclRemoteError);
  }
  struct timespec nap = {0, 20000000};
  atomic_fetch_add(&board->waiters, 1);
  syscall(SYS_futex, &board->bell, FUTEX_WAIT, waiting->bell, &nap, NULL, 0);
  atomic_fetch_sub(&board->waiters, 1);
  return ncclSuccess;
}

/* Waits until every rank has come to this turn. */
static ncclResult_t all_at(ncclComm_t comm, int track, uint64_t turn) {
  struct waiting waiting;
  wait_begin(comm, &waiting);
  for (int rank = 0; rank < comm->nranks;) {
    wait_look(comm, &waiting);
    if (atomic_load(&comm->board->seats[rank].turn[track]) >= turn) {
      rank++;
      continue;
    }
    REFUSE(track == DATA && atomic_load(&comm->revoked), ncclInvalidUsage, "the communicator was revoked");
    TRY(wait_step(comm, &waiting, rank));
  }
  return ncclSuccess;
}

static ncclResult_t advance(ncclComm_t comm, int track) {
  uint64_t turn = ++comm->turn[track];
  atomic_store(&comm->board->seats[comm->rank].turn[track], turn);
  board_ring(comm->board);
  return all_at(comm, track, turn);
}

/* Tells the others; returns when they have told this rank. Until turn_finish nobody changes a post, nor the memory that
 * it names. */
ncclResult_t turn_post(ncclComm_t comm, int track, const struct post* post) {
  comm->board->seats[comm->rank].post[track] = *post;
  return advance(comm, track);
}

ncclResult_t turn_finish(ncclComm_t comm, int track) { return advance(comm, track); }

/* Joins the communicator's board, and returns when all ranks have. */
ncclResult_t board_take_seat(ncclComm_t comm) {
  comm->board = board_open(comm->id);
  REFUSE(!comm->board, ncclSystemError, "shared memory: %s", strerror(errno));
  struct seat* seat = &comm->board->seats[comm->rank];
  uint32_t none = 0, nobody = 0;
  int agreed = atomic_compare_exchange_strong(&comm->board->nranks, &none, (uint32_t)comm->nranks);
  REFUSE(!agreed && none != (uint32_t)comm->nranks, ncclInvalidArgument, "%d ranks here and %u elsewhere", comm->nranks,
         none);
  REFUSE(!atomic_compare_exchange_strong(&seat->claimed, &nobody, 1), ncclInvalidUsage, "rank %d is there already",
         comm->rank);
  atomic_store(&seat->pid, getpid());
  if (atomic_fetch_add(&comm->board->attached, 1) + 1 == (uint32_t)comm->nranks) board_forget(comm->id);
  struct post nothing;
  memset(&nothing, 0, sizeof(nothing));
  ncclResult_t result = turn_post(comm, CONTROL, &nothing);
  if (result == ncclSuccess) result = turn_finish(comm, CONTROL);
  if (result != ncclSuccess) board_forget(comm->id);
  return result;
}

/* Copies out of the memory of another rank, which waits meanwhile. */
ncclResult_t read_peer(ncclComm_t comm, int rank, uint64_t address, void* into, size_t bytes) {
  int pid = atomic_load(&comm->board->seats[rank].pid);
  char* to = into;
  if (pid == getpid()) {
    memcpy(to, (const void*)(uintptr_t)address, bytes);
    return ncclSuccess;
  }
  for (size_t done = 0; done < bytes;) {
    struct iovec here = {to + done, bytes - done};
    struct iovec there = {(void*)(uintptr_t)(address + done), bytes - done};
    ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (got <= 0) {
      complain("reading rank %d: %s", rank, strerror(errno));
      return broke(comm, errno == ESRCH ? ncclRemoteError : ncclSystemError);
    }
    done += (size_t)got;
  }
  return ncclSuccess;
}
