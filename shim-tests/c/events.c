/* Events of host streams: order between streams, errors, names that are none, and what is refused. */
#include "check.h"
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int pipe_of[2];
static int steps[8], taken;
static strataEvent_t awaited;
static ncclResult_t in_callback;

static void wait_for_byte(void* argument) {
  char byte;
  (void)argument;
  CHECK(read(pipe_of[0], &byte, 1) == 1);
}

static void step(void* argument) { steps[taken++] = (int)(size_t)argument; }

static void synchronize(void* argument) {
  wait_for_byte(argument);
  in_callback = strataEventSynchronize(awaited);
}

static void let_go(void) { CHECK(write(pipe_of[1], "x", 1) == 1); }

static void order(void) {
  strataStream_t first, second;
  strataEvent_t event;
  OK(strataStreamCreate(&first));
  OK(strataStreamCreate(&second));
  OK(strataEventCreate(&event));
  OK(strataEventQuery(event));
  OK(strataEventSynchronize(event));
  OK(strataStreamAddCallback(first, wait_for_byte, NULL));
  OK(strataStreamAddCallback(first, step, (void*)1));
  OK(strataEventRecord(event, first));
  OK(strataEventStreamWait(second, event));
  OK(strataStreamAddCallback(second, step, (void*)2));
  CHECK(strataEventQuery(event) == ncclInProgress && strataStreamQuery(second) == ncclInProgress);
  /* What waits already still does. */
  OK(strataEventDestroy(event));
  let_go();
  OK(strataStreamSynchronize(second));
  CHECK(taken == 2 && steps[0] == 1 && steps[1] == 2);
  OK(strataStreamDestroy(first));
  OK(strataStreamDestroy(second));
  CHECK(strataEventQuery(event) == ncclInvalidArgument && strstr(strataGetLastError(), "has been destroyed"));
}

/* The sum of two ranks of this process behind which both calls' events are. */
static void collectives(void) {
  enum { COUNT = 100000 };
  static int in[2][COUNT], out[2][COUNT];
  ncclComm_t comms[2];
  strataStream_t streams[2], after;
  strataEvent_t events[2];
  OK(ncclCommInitAll(comms, 2, NULL));
  OK(strataStreamCreate(&after));
  for (int rank = 0; rank < 2; rank++) {
    OK(strataStreamCreate(&streams[rank]));
    OK(strataEventCreate(&events[rank]));
    for (int i = 0; i < COUNT; i++) in[rank][i] = i + rank;
  }
  for (int rank = 0; rank < 2; rank++) {
    OK(ncclAllReduce(in[rank], out[rank], COUNT, ncclInt, ncclSum, comms[rank], streams[rank]));
    OK(strataEventRecord(events[rank], streams[rank]));
    OK(strataEventStreamWait(after, events[rank]));
  }
  OK(strataStreamSynchronize(after));
  for (int rank = 0; rank < 2; rank++) {
    OK(strataEventQuery(events[rank]));
    OK(strataEventStreamWait(NULL, events[rank]));
    for (int i = 0; i < COUNT; i++) CHECK(out[rank][i] == 2 * i + 1);
  }
  /* Rank 1 aborts: the call of rank 0 fails, and so does what waits for it. */
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclInt, ncclSum, comms[0], streams[0]));
  OK(strataEventRecord(events[0], streams[0]));
  OK(strataEventStreamWait(after, events[0]));
  OK(ncclCommAbort(comms[1]));
  ncclResult_t failed = strataEventSynchronize(events[0]);
  CHECK(failed != ncclSuccess && failed != ncclInProgress);
  CHECK(strataStreamSynchronize(after) == failed && strataEventQuery(events[0]) == failed);
  OK(ncclCommAbort(comms[0]));
  for (int rank = 0; rank < 2; rank++) {
    OK(strataStreamDestroy(streams[rank]));
    OK(strataEventDestroy(events[rank]));
  }
  OK(strataStreamDestroy(after));
}

static void refused(void) {
  strataStream_t stream;
  strataEvent_t event, none = (strataEvent_t)(size_t)0x1234;
  OK(strataStreamCreate(&stream));
  OK(strataEventCreate(&event));
  CHECK(strataEventCreate(NULL) == ncclInvalidArgument && strataEventRecord(NULL, stream) == ncclInvalidArgument);
  CHECK(strataEventQuery(NULL) == ncclInvalidArgument && strataEventSynchronize(NULL) == ncclInvalidArgument);
  CHECK(strataEventStreamWait(stream, NULL) == ncclInvalidArgument && strataEventDestroy(NULL) == ncclInvalidArgument);
  CHECK(strataEventRecord(none, stream) == ncclInvalidArgument && strstr(strataGetLastError(), "strataEventCreate"));
  CHECK(strataEventRecord(event, (strataStream_t)(size_t)0x1234) == ncclInvalidArgument);
  /* A stream is no event, nor an event a stream. */
  CHECK(strataEventQuery((strataEvent_t)stream) == ncclInvalidArgument);
  CHECK(strataStreamQuery((strataStream_t)event) == ncclInvalidArgument);
  OK(ncclGroupStart());
  CHECK(strataEventRecord(event, stream) == ncclInvalidUsage && strataEventStreamWait(stream, event) == ncclInvalidUsage);
  ncclGroupEnd();
  OK(strataEventRecord(event, NULL));
  OK(strataEventQuery(event));
  /* A callback that would wait for what is behind it. */
  awaited = event;
  OK(strataStreamAddCallback(stream, synchronize, NULL));
  OK(strataEventRecord(event, stream));
  let_go();
  OK(strataEventSynchronize(event));
  CHECK(in_callback == ncclInvalidUsage);
  /* A forked child has none of its parent's events. */
  pid_t child = fork();
  if (child == 0) _exit(strataEventQuery(event) == ncclInvalidArgument ? 0 : 1);
  int status;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(strataEventDestroy(event));
  CHECK(strataEventDestroy(event) == ncclInvalidArgument);
  OK(strataStreamDestroy(stream));
}

int main(void) {
  alarm(120);
  CHECK(pipe(pipe_of) == 0);
  order();
  collectives();
  refused();
  puts("events are in order");
  return 0;
}
