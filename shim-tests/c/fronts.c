/* Programs that go on with what is final of collectives under way: waits for ranges and overwrites them, with streams, callbacks
   and calls that fail. The ranks are communicators of this process, each call on a stream of its rank.
   usage: fronts follow ALGORITHM | refusals | failure */
#include "check.h"
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { MOST_RANKS = 5, LAYERS = 40, COUNT = 400000 };

static ncclComm_t comms[MOST_RANKS];
static strataStream_t streams[MOST_RANKS], later;
static float *in[MOST_RANKS], *out[MOST_RANKS];

static void begin(int nranks) {
  OK(ncclCommInitAll(comms, nranks, NULL));
  OK(strataStreamCreate(&later));
  for (int rank = 0; rank < nranks; rank++) {
    OK(strataStreamCreate(&streams[rank]));
    in[rank] = malloc(COUNT * sizeof(float));
    out[rank] = malloc(COUNT * sizeof(float));
  }
}

static void end(int nranks) {
  for (int rank = 0; rank < nranks; rank++) {
    OK(ncclCommDestroy(comms[rank]));
    OK(strataStreamDestroy(streams[rank]));
    free(in[rank]), free(out[rank]);
  }
  OK(strataStreamDestroy(later));
}

static float input(int rank, int round, size_t i) { return (float)((i * 7 + rank * 13 + round) % 101); }

static int wrong; /* Written by one stream's thread. */
typedef struct {
  float *at;
  size_t from, len;
  int nranks, round;
} Layer;

/* The layer is right, and overwritten. */
static void use(void *argument) {
  Layer *layer = argument;
  for (size_t i = layer->from; i < layer->from + layer->len; i++) {
    float sum = 0;
    for (int rank = 0; rank < layer->nranks; rank++) sum += input(rank, layer->round, i);
    if (layer->at[i] != sum && !wrong++) fprintf(stderr, "element %zu is %g and not %g\n", i, layer->at[i], sum);
    layer->at[i] = -1;
  }
}

/* All ranks' calls are under way; the layers are used in their order, here or on a stream, while more of them come. */
static int follow(int nranks, int round, int in_place, strataStream_t where) {
  static Layer layers[MOST_RANKS][LAYERS];
  int early = 0;
  for (int rank = 0; rank < nranks; rank++) {
    float *from = in_place ? out[rank] : in[rank];
    for (size_t i = 0; i < COUNT; i++) from[i] = input(rank, round, i);
  }
  for (int rank = 0; rank < nranks; rank++)
    OK(ncclAllReduce(in_place ? out[rank] : in[rank], out[rank], COUNT, ncclFloat, ncclSum, comms[rank], streams[rank]));
  for (int layer = 0; layer < LAYERS; layer++) {
    size_t from = (size_t)COUNT * layer / LAYERS, len = (size_t)COUNT * (layer + 1) / LAYERS - from;
    for (int rank = 0; rank < nranks; rank++) {
      Layer *mine = &layers[rank][layer];
      *mine = (Layer){out[rank], from, len, nranks, round};
      OK(strataStreamWaitRange(where, out[rank] + from, len * sizeof(float)));
      size_t known;
      OK(strataRangeQuery(out[rank], COUNT * sizeof(float), &known));
      CHECK(known <= COUNT * sizeof(float) && (where || known >= (from + len) * sizeof(float)));
      early += known < COUNT * sizeof(float);
      if (where) OK(strataStreamAddCallback(where, use, mine));
      else use(mine);
    }
  }
  if (where) OK(strataStreamSynchronize(where));
  for (int rank = 0; rank < nranks; rank++) {
    OK(strataStreamSynchronize(streams[rank]));
    size_t known;
    OK(strataRangeQuery(out[rank], COUNT * sizeof(float), &known));
    CHECK(known == COUNT * sizeof(float));
    for (size_t i = 0; i < COUNT; i++) CHECK(out[rank][i] == -1);
  }
  return early;
}

static void wait_here(void *argument) {
  *(ncclResult_t *)argument = strataStreamWaitRange(NULL, out[0], COUNT * sizeof(float));
}

static volatile int go;

static void hold(void *argument) {
  while (!go) usleep(100);
  wait_here(argument);
}

static void refusals(void) {
  size_t known;
  begin(2);
  CHECK(strataStreamWaitRange(NULL, NULL, 8) == ncclInvalidArgument);
  CHECK(strataStreamWaitRange(NULL, out[0], SIZE_MAX) == ncclInvalidArgument);
  CHECK(strataRangeQuery(NULL, 8, &known) == ncclInvalidArgument);
  CHECK(strataRangeQuery(out[0], SIZE_MAX, &known) == ncclInvalidArgument);
  CHECK(strataRangeQuery(out[0], 8, NULL) == ncclInvalidArgument);
  OK(ncclGroupStart());
  CHECK(strataStreamWaitRange(later, out[0], 8) == ncclInvalidUsage);
  OK(ncclGroupEnd());
  strataStream_t gone;
  OK(strataStreamCreate(&gone));
  OK(strataStreamDestroy(gone));
  CHECK(strataStreamWaitRange(gone, out[0], 8) == ncclInvalidArgument);
  /* Of no call. */
  OK(strataStreamWaitRange(NULL, out[0], 8));
  OK(strataRangeQuery(out[0], 0, &known));
  CHECK(known == 0);
  OK(strataRangeQuery(out[0], 8, &known));
  CHECK(known == 8);
  /* A callback waits for what is behind it: rank 0's stream holds the callback until its call is queued, too. */
  ncclResult_t result = ncclSuccess;
  OK(strataStreamAddCallback(streams[0], hold, &result));
  for (int rank = 0; rank < 2; rank++)
    OK(ncclAllReduce(in[rank], out[rank], COUNT, ncclFloat, ncclSum, comms[rank], streams[rank]));
  go = 1;
  OK(strataStreamSynchronize(streams[0]));
  CHECK(result == ncclInvalidUsage);
  /* What a rank still sends is not final: of a reduction in place on a rank that is not its root. */
  OK(ncclReduce(in[0], in[0], COUNT, ncclFloat, ncclSum, 1, comms[0], streams[0]));
  OK(strataRangeQuery(in[0], COUNT * sizeof(float), &known));
  CHECK(known == 0);
  OK(ncclReduce(in[1], out[1], COUNT, ncclFloat, ncclSum, 1, comms[1], streams[1]));
  OK(strataStreamWaitRange(NULL, in[0], COUNT * sizeof(float)));
  /* A receive is final as a whole. */
  OK(ncclRecv(out[0], COUNT, ncclFloat, 1, comms[0], streams[0]));
  OK(strataRangeQuery(out[0], 8, &known));
  CHECK(known == 0);
  OK(ncclSend(in[1], COUNT, ncclFloat, 0, comms[1], streams[1]));
  OK(strataStreamWaitRange(NULL, out[0], COUNT * sizeof(float)));
  CHECK(!memcmp(in[1], out[0], COUNT * sizeof(float)));
  /* On its own stream a wait comes after the call. */
  OK(strataStreamWaitRange(streams[1], out[1], 8));
  OK(strataStreamSynchronize(streams[1]));
  end(2);
}

/* Rank 1 never calls, and rank 0's call is aborted. */
static void failure(void) {
  size_t known;
  begin(2);
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclFloat, ncclSum, comms[0], streams[0]));
  OK(strataStreamWaitRange(later, out[0], 8));
  OK(strataRangeQuery(out[0], COUNT * sizeof(float), &known));
  CHECK(known == 0);
  usleep(20000);
  CHECK(strataStreamQuery(later) == ncclInProgress);
  OK(ncclCommAbort(comms[0]));
  CHECK(strataStreamSynchronize(later) != ncclSuccess);
  OK(ncclCommAbort(comms[1]));
  /* The communicators are gone, and their failures with them, once their streams have let go. */
  strataStreamSynchronize(streams[0]);
  for (int tries = 0; strataRangeQuery(out[0], 8, &known) != ncclSuccess; tries++) {
    CHECK(known == 0 && tries < 2000);
    usleep(1000);
  }
  CHECK(known == 8);
  OK(strataStreamWaitRange(NULL, out[0], 8));
  /* A rank leaves, and the failed call is told of as long as its communicator is there. */
  OK(ncclCommInitAll(comms, 2, NULL));
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclFloat, ncclSum, comms[0], streams[0]));
  OK(ncclCommAbort(comms[1]));
  CHECK(strataStreamWaitRange(NULL, out[0], 8) == ncclRemoteError);
  CHECK(strataStreamSynchronize(streams[0]) == ncclRemoteError);
  CHECK(strataStreamWaitRange(NULL, out[0], 8) == ncclRemoteError);
  known = 1;
  CHECK(strataRangeQuery(out[0], 8, &known) == ncclRemoteError && known == 0);
  OK(ncclCommAbort(comms[0]));
  OK(strataStreamWaitRange(NULL, out[0], 8));
  exit(0);
}

int main(int argc, char **argv) {
  alarm(240);
  const char *what = argc > 1 ? argv[1] : "";
  setenv("STRATA_SEGMENT_BYTES", "16384", 1);
  if (!strcmp(what, "follow")) {
    setenv("STRATA_ALLREDUCE_ALGO", argv[2], 1);
    int early = 0;
    for (int nranks = 2; nranks <= MOST_RANKS; nranks++) {
      begin(nranks);
      for (int round = 0; round < 8; round++) early += follow(nranks, round, round & 1, round & 2 ? later : NULL);
      end(nranks);
    }
    CHECK(!wrong);
    CHECK(early > 0);
    printf("%d waits ended before their call\n", early);
  } else if (!strcmp(what, "refusals")) {
    refusals();
  } else {
    failure();
  }
  return 0;
}
