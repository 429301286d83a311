/* A signal handler that aborts the communicator of the call that it interrupts, at every moment of the call: a rank calls in
   many ways, also with a fifth communicator (a thread remembers four), on streams and in groups, and is interrupted after a
   random time. The signal is the process's, and no thread of the library takes it. The program ends, the call either
   succeeds or says that it was aborted, and the handler takes and gives back no memory inside the call: it may have
   interrupted the allocator, which here is slow on purpose. */
#define _GNU_SOURCE
#include "watched_allocator.h"
#include <nccl.h>
#include <strata.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define COMMS 6
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "round %d of seed %llu, way %d, line %d: %s (%s)\n", round_now,                \
              (unsigned long long)seed, way, __LINE__, #condition, ncclGetLastError(NULL));          \
      _exit(1);                                                                                      \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static unsigned long long seed = 1, state;
static volatile int round_now, way;
static ncclComm_t comms[COMMS];
static volatile sig_atomic_t target, handled;

static unsigned next(unsigned below) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return (unsigned)(state >> 33) % below;
}

/* The library's thread is asked by a byte to end what is aborted: it may have done so before the handler goes on. */
ssize_t write(int to, const void* from, size_t bytes) {
  static ssize_t (*next_write)(int, const void*, size_t);
  if (next_write == NULL) next_write = (ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
  ssize_t written = next_write(to, from, bytes);
  if (in_handler) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  return written;
}

static void abort_it(int number) {
  (void)number;
  if (handled) return;
  handled = 1;
  in_handler = 1;
  uses = 0;
  ncclResult_t result = ncclCommAbort(comms[target]);
  in_handler = 0;
  if (uses && in_allocator) {
    static const char text[] = "the handler has interrupted the allocator and used it\n";
    (void)!write(2, text, sizeof(text) - 1);
    _exit(1);
  }
  if (result != ncclSuccess) {
    static const char text[] = "the abort was refused\n";
    (void)!write(2, text, sizeof(text) - 1);
    _exit(1);
  }
}

static void hung(int number) {
  char text[100];
  (void)number;
  int length = snprintf(text, sizeof(text), "round %d of seed %llu, way %d: it hangs\n", round_now, seed, way);
  (void)!write(2, text, length);
  _exit(1);
}

/* One call of a kind; what it returns. */
static ncclResult_t call(ncclComm_t comm, ncclComm_t other, strataStream_t stream) {
  static float in[64], out[64];
  ncclResult_t first, second;
  int value;
  switch (way) {
    case 0: return ncclAllReduce(in, out, 1, ncclFloat, ncclSum, comm, NULL);
    case 1: return ncclAllReduce(in, out, 64, ncclFloat, ncclSum, comm, (cudaStream_t)stream);
    case 2: return ncclBroadcast(in, out, 8, ncclFloat, 0, comm, (cudaStream_t)stream);
    case 3:
      if ((first = ncclGroupStart()) != ncclSuccess) return first;
      first = ncclAllReduce(in, out, 3, ncclFloat, ncclMax, comm, NULL);
      second = ncclGroupEnd();
      return first != ncclSuccess ? first : second;
    case 4:
      if ((first = ncclGroupStart()) != ncclSuccess) return first;
      first = ncclAllReduce(in, out, 3, ncclFloat, ncclMax, comm, (cudaStream_t)stream);
      if (first == ncclSuccess) first = ncclAllGather(in, out + 8, 3, ncclFloat, other, (cudaStream_t)stream);
      second = ncclGroupEnd();
      return first != ncclSuccess ? first : second;
    case 5: return ncclCommCount(comm, &value);
    default: return ncclReduceScatter(in, out, 5, ncclFloat, ncclSum, comm, NULL);
  }
}

int main(int argc, char** argv) {
  (void)!write(1, "", 0); /* Its address is known from here on. */
  int rounds = argc > 1 ? atoi(argv[1]) : 400, device = 0, inside = 0;
  if (argc > 2) seed = strtoull(argv[2], NULL, 10);
  state = seed * 2654435761u + 12345;
  struct sigaction on_time = {.sa_handler = abort_it, .sa_flags = SA_RESTART}, on_alarm = {.sa_handler = hung};
  CHECK(sigaction(SIGRTMIN, &on_time, NULL) == 0 && sigaction(SIGALRM, &on_alarm, NULL) == 0);
  struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN};
  timer_t timer;
  CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
  for (int i = 0; i < COMMS; i++) OK(ncclCommInitAll(&comms[i], 1, &device));
  strataStream_t stream;
  OK(strataStreamCreate(&stream));
  for (round_now = 0; round_now < rounds; round_now++) {
    alarm(6); /* Shorter than the 10 s that an abort gives what it waits for. */
    way = next(7);
    target = next(COMMS);
    handled = 0;
    struct itimerspec when = {.it_value = {.tv_nsec = 1000 + next(60000)}};
    CHECK(timer_settime(timer, 0, &when, NULL) == 0);
    slow = 1000;
    for (int calls = 0; !handled; calls++) {
      /* Other communicators come in between, so that the thread does not remember this one. */
      int at = next(3) == 0 ? (int)next(COMMS) : (int)target;
      ncclResult_t result = call(comms[at], comms[(at + 1) % COMMS], stream);
      if (handled) {
        CHECK(result != ncclRemoteError || !uses);
        CHECK(result == ncclSuccess || result == ncclRemoteError || result == ncclInvalidArgument);
        inside += result == ncclRemoteError;
      } else {
        CHECK(result == ncclSuccess);
      }
    }
    slow = 0;
    CHECK(ncclCommCount(comms[target], &device) == ncclInvalidArgument);
    device = 0;
    ncclResult_t ended = strataStreamSynchronize(stream); /* Of the first that failed on it. */
    CHECK(ended == ncclSuccess || ended == ncclRemoteError || ended == ncclInvalidArgument);
    OK(ncclCommInitAll(&comms[target], 1, &device));
  }
  alarm(0);
  printf("%d rounds, %d calls failed by their abort\n", rounds, inside);
  for (int i = 0; i < COMMS; i++) OK(ncclCommDestroy(comms[i]));
  OK(strataStreamDestroy(stream));
  return 0;
}
