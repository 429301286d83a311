/* Several ranks in one process: groups, streams, communicators made from others, and nonblocking ones. */
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <strata.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RANKS 4
#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ncclGetLastError(NULL));           \
      exit(1);                                                                                       \
    }                                                                                                \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static ncclComm_t comms[RANKS];

/* Waits for a nonblocking communicator, for at most a minute. */
static ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t state;
  time_t end = time(NULL) + 60;
  do {
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(time(NULL) < end);
    usleep(100);
  } while (state == ncclInProgress);
  return state;
}

static void sum_of_ranks(ncclComm_t* all, int count, strataStream_t* streams, int in_group) {
  float in[RANKS], out[RANKS];
  if (in_group) OK(ncclGroupStart());
  for (int i = 0; i < count; i++) {
    in[i] = (float)(1 << i);
    OK(ncclAllReduce(&in[i], &out[i], 1, ncclFloat, ncclSum, all[i], streams ? streams[i] : NULL));
  }
  if (in_group) OK(ncclGroupEnd());
  for (int i = 0; i < count; i++) {
    if (streams) OK(strataStreamSynchronize(streams[i]));
  }
  for (int i = 0; i < count; i++) CHECK(out[i] == (float)((1 << count) - 1));
}

static void every_rank_has_its_place(void) {
  int devices[RANKS] = {6, 4, 2, 0}, number;
  OK(ncclCommInitAll(comms, RANKS, devices));
  for (int i = 0; i < RANKS; i++) {
    OK(ncclCommCount(comms[i], &number)); CHECK(number == RANKS);
    OK(ncclCommUserRank(comms[i], &number)); CHECK(number == i);
    OK(ncclCommCuDevice(comms[i], &number)); CHECK(number == devices[i]);
  }
}

static void operations_act_at_the_end_of_the_group(void) {
  int value[RANKS] = {0}, all[RANKS][RANKS];
  OK(ncclGroupStart());
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclAllGather(&value[i], all[i], 1, ncclInt, comms[i], NULL));
  OK(ncclGroupEnd());
  for (int i = 0; i < RANKS; i++) value[i] = 10 + i; /* Seen only if nothing has been sent before. */
  OK(ncclGroupEnd());
  for (int i = 0; i < RANKS; i++)
    for (int j = 0; j < RANKS; j++) CHECK(all[i][j] == 10 + j);
}

static void messages_of_a_group_pass_each_other(void) {
  int out[RANKS], in[RANKS];
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) {
    out[i] = 100 + i;
    OK(ncclSend(&out[i], 1, ncclInt, (i + 1) % RANKS, comms[i], NULL));
    OK(ncclRecv(&in[i], 1, ncclInt, (i + RANKS - 1) % RANKS, comms[i], NULL));
  }
  OK(ncclGroupEnd());
  for (int i = 0; i < RANKS; i++) CHECK(in[i] == 100 + (i + RANKS - 1) % RANKS);
}

static void an_error_in_a_group_drops_the_group(void) {
  float in[RANKS], out[RANKS] = {7, 7, 7, 7};
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclAllReduce(&in[i], &out[i], 1, ncclFloat, ncclSum, comms[i], NULL));
  CHECK(ncclAllReduce(in, out, 1, ncclFloat, (ncclRedOp_t)9, comms[0], NULL) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  for (int i = 0; i < RANKS; i++) CHECK(out[i] == 7);
}

static void a_simulated_group_is_not_launched(void) {
  float in[RANKS], out[RANKS] = {7, 7, 7, 7};
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclAllReduce(&in[i], &out[i], 1, ncclFloat, ncclSum, comms[i], NULL));
  OK(ncclGroupSimulateEnd(&info));
  CHECK(info.estimatedTime > 0 && out[0] == 7);
}

static void making_and_using_do_not_mix(void) {
  float in = 1, out;
  ncclComm_t child = NULL;
  OK(ncclGroupStart());
  OK(ncclAllReduce(&in, &out, 1, ncclFloat, ncclSum, comms[0], NULL));
  OK(ncclCommSplit(comms[0], 0, 0, &child, NULL));
  CHECK(ncclGroupEnd() == ncclInvalidUsage && child == NULL);
}

/* Half of one's messages to oneself would never be received; nothing is done then, and nothing is broken. */
static void a_message_to_oneself_of_another_size_is_refused(void) {
  float out[4] = {1, 2, 3, 4}, in[8] = {0};
  OK(ncclGroupStart());
  OK(ncclSend(out, 4, ncclFloat, 0, comms[0], NULL));
  OK(ncclRecv(in, 8, ncclFloat, 0, comms[0], NULL));
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(NULL), "4 elements") && strstr(ncclGetLastError(NULL), "8 elements"));
  ncclResult_t state;
  OK(ncclCommGetAsyncError(comms[0], &state)); CHECK(state == ncclSuccess);
}

static void a_communicator_destroyed_in_a_group_ends_after_its_operations(void) {
  ncclComm_t twins[RANKS];
  float in[RANKS], out[RANKS];
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclCommSplit(comms[i], 0, i, &twins[i], NULL));
  OK(ncclGroupEnd());
  /* A group that is dropped destroys nothing. */
  OK(ncclGroupStart());
  OK(ncclCommDestroy(twins[0]));
  CHECK(ncclAllReduce(in, out, 1, ncclFloat, ncclSum, twins[0], NULL) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  sum_of_ranks(twins, RANKS, NULL, 1);
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) {
    in[i] = (float)i;
    OK(ncclAllReduce(&in[i], &out[i], 1, ncclFloat, ncclSum, twins[i], NULL));
    OK(ncclCommDestroy(twins[i]));
  }
  OK(ncclGroupEnd());
  for (int i = 0; i < RANKS; i++) CHECK(out[i] == 6);
  int count;
  CHECK(ncclCommCount(twins[0], &count) == ncclInvalidArgument);
}

/* Were it not for the place of the result, this many bytes would take years. */
static void what_lies_in_its_place_takes_no_time(void) {
  ncclComm_t alone;
  size_t huge = (size_t)1 << 60;
  char* buffer = (char*)4096;
  int device = 0;
  OK(ncclCommInitAll(&alone, 1, &device));
  OK(ncclAllReduce(buffer, buffer, huge, ncclUint8, ncclSum, alone, NULL));
  OK(ncclAllReduce(buffer, buffer, huge, ncclUint8, ncclAvg, alone, NULL));
  OK(ncclReduceScatter(buffer, buffer, huge, ncclUint8, ncclMax, alone, NULL));
  OK(ncclReduce(buffer, buffer, huge, ncclUint8, ncclSum, 0, alone, NULL));
  OK(ncclAllGather(buffer, buffer, huge, ncclUint8, alone, NULL));
  OK(ncclBroadcast(buffer, buffer, huge, ncclUint8, 0, alone, NULL));
  OK(ncclAlltoAll(buffer, buffer, huge, ncclUint8, alone, NULL));
  OK(ncclGather(buffer, buffer, huge, ncclUint8, 0, alone, NULL));
  OK(ncclScatter(buffer, buffer, huge, ncclUint8, 0, alone, NULL));
  OK(ncclCommDestroy(alone));
}

static void communicators_split(void) {
  ncclComm_t halves[RANKS];
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclCommSplit(comms[i], i % 2, -i, &halves[i], NULL));
  OK(ncclGroupEnd());
  int rank;
  OK(ncclCommUserRank(halves[0], &rank)); CHECK(rank == 1); /* The larger key comes later. */
  ncclComm_t even[2] = {halves[0], halves[2]};
  sum_of_ranks(even, 2, NULL, 1);
  ncclComm_t none[RANKS];
  memset(none, 1, sizeof(none));
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclCommSplit(comms[i], i == 3 ? NCCL_SPLIT_NOCOLOR : 5, i, &none[i], NULL));
  OK(ncclGroupEnd());
  CHECK(none[3] == NULL && none[0] != NULL);
  for (int i = 0; i < 3; i++) OK(ncclCommDestroy(none[i]));
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclCommFinalize(halves[i]));
  OK(ncclGroupEnd());
  CHECK(ncclCommFinalize(halves[0]) == ncclInvalidArgument);
  for (int i = 0; i < RANKS; i++) OK(ncclCommDestroy(halves[i]));
}

static void communicators_shrink(void) {
  ncclComm_t rest[RANKS];
  int excluded[1] = {1}, count;
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++)
    if (i != 1) OK(ncclCommShrink(comms[i], excluded, 1, &rest[i], NULL, NCCL_SHRINK_DEFAULT));
  OK(ncclGroupEnd());
  ncclComm_t left[3] = {rest[0], rest[2], rest[3]};
  OK(ncclCommCount(left[1], &count)); CHECK(count == 3);
  sum_of_ranks(left, 3, NULL, 1);
  for (int i = 0; i < 3; i++) OK(ncclCommDestroy(left[i]));
}

static void communicators_grow(void) {
  ncclComm_t larger[RANKS + 1];
  ncclUniqueId id;
  int rank;
  OK(ncclCommGetUniqueId(comms[2], &id));
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclCommGrow(comms[i], RANKS + 1, i == 2 ? &id : NULL, -1, &larger[i], NULL));
  OK(ncclCommGrow(NULL, RANKS + 1, &id, RANKS, &larger[RANKS], NULL));
  OK(ncclGroupEnd());
  OK(ncclCommUserRank(larger[RANKS], &rank)); CHECK(rank == RANKS);
  for (int i = 0; i <= RANKS; i++) OK(ncclCommDestroy(larger[i]));
}

static void note(void* argument) { *(int*)argument += 1; }

static void streams_keep_order_and_do_not_hold_the_caller_up(void) {
  strataStream_t streams[RANKS];
  for (int i = 0; i < RANKS; i++) OK(strataStreamCreate(&streams[i]));
  /* One after another without a group: the calls must return before the others have been made. */
  sum_of_ranks(comms, RANKS, streams, 0);
  sum_of_ranks(comms, RANKS, streams, 1);
  float chain[RANKS];
  int called[RANKS] = {0};
  for (int i = 0; i < RANKS; i++) chain[i] = 1;
  for (int round = 0; round < 5; round++)
    for (int i = 0; i < RANKS; i++) OK(ncclAllReduce(&chain[i], &chain[i], 1, ncclFloat, ncclSum, comms[i], streams[i]));
  for (int i = 0; i < RANKS; i++) OK(strataStreamAddCallback(streams[i], note, &called[i]));
  for (int i = 0; i < RANKS; i++) OK(strataStreamSynchronize(streams[i]));
  for (int i = 0; i < RANKS; i++) CHECK(chain[i] == 1024 && called[i] == 1);
  for (int i = 0; i < RANKS; i++) OK(strataStreamDestroy(streams[i]));
}

static void an_operation_of_the_program_scales_once(void) {
  float scalar = 3, in[RANKS] = {1, 1, 1, 1}, out[RANKS];
  ncclRedOp_t ops[RANKS];
  for (int i = 0; i < RANKS; i++)
    OK(ncclRedOpCreatePreMulSum(&ops[i], &scalar, ncclFloat, ncclScalarHostImmediate, comms[i]));
  OK(ncclGroupStart());
  for (int i = 0; i < RANKS; i++) OK(ncclAllReduce(&in[i], &out[i], 1, ncclFloat, ops[i], comms[i], NULL));
  OK(ncclGroupEnd());
  for (int i = 0; i < RANKS; i++) {
    CHECK(out[i] == 12);
    OK(ncclRedOpDestroy(ops[i], comms[i]));
    CHECK(ncclRedOpDestroy(ops[i], comms[i]) == ncclInvalidArgument);
  }
}

static void nonblocking_communicators_tell_when_they_are_ready(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclUniqueId id;
  ncclComm_t two[2] = {NULL, NULL}, children[2], mixed;
  OK(ncclGetUniqueId(&id));
  /* No group and one thread: each call returns although its peer has not called. */
  CHECK(ncclCommInitRankConfig(&two[0], 2, id, 0, &config) == ncclInProgress && two[0] != NULL);
  int count;
  ncclResult_t state;
  OK(ncclCommGetAsyncError(two[0], &state)); CHECK(state == ncclInProgress);
  CHECK(ncclCommCount(two[0], &count) == ncclInvalidArgument);
  CHECK(strstr(ncclGetLastError(NULL), "before the previous operation returned ncclSuccess") != NULL);
  CHECK(ncclCommDestroy(two[0]) == ncclInvalidArgument);
  CHECK(ncclCommInitRankConfig(&two[1], 2, id, 1, &config) == ncclInProgress);
  CHECK(settled(two[0]) == ncclSuccess && settled(two[1]) == ncclSuccess);
  sum_of_ranks(two, 2, NULL, 1);
  for (int i = 0; i < 2; i++) CHECK(ncclCommSplit(two[i], 0, i, &children[i], NULL) == ncclInProgress);
  CHECK(settled(two[0]) == ncclSuccess && settled(two[1]) == ncclSuccess);
  CHECK(children[0] != NULL && children[1] != NULL);
  sum_of_ranks(children, 2, NULL, 1);
  OK(ncclGroupStart());
  float in = 1, out;
  OK(ncclAllReduce(&in, &out, 1, ncclFloat, ncclSum, two[0], NULL));
  CHECK(ncclAllReduce(&in, &out, 1, ncclFloat, ncclSum, comms[0], NULL) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  for (int i = 0; i < 2; i++) CHECK(ncclCommFinalize(two[i]) == ncclInProgress);
  CHECK(settled(two[0]) == ncclSuccess && settled(two[1]) == ncclSuccess);
  for (int i = 0; i < 2; i++) OK(ncclCommDestroy(two[i]));
  for (int i = 0; i < 2; i++) OK(ncclCommDestroy(children[i]));
  /* One whose peer never comes can be given up at once. */
  OK(ncclGetUniqueId(&id));
  CHECK(ncclCommInitRankConfig(&mixed, 2, id, 0, &config) == ncclInProgress);
  OK(ncclCommAbort(mixed));
  CHECK(ncclCommCount(mixed, &count) == ncclInvalidArgument);
}

static float device_scalar;
static void set_device_scalar(void* argument) { device_scalar = *(float*)argument; }

static void a_factor_in_device_memory_is_read_when_the_operation_runs(void) {
  float factor = 3, in[RANKS] = {1, 1, 1, 1}, out[RANKS];
  ncclRedOp_t ops[RANKS];
  strataStream_t streams[RANKS];
  device_scalar = 100;
  for (int i = 0; i < RANKS; i++) {
    OK(strataStreamCreate(&streams[i]));
    OK(ncclRedOpCreatePreMulSum(&ops[i], &device_scalar, ncclFloat, ncclScalarDevice, comms[i]));
  }
  /* The factor of the call is what the stream wrote before it; each rank has its own. */
  for (int i = 0; i < RANKS; i++) {
    OK(strataStreamAddCallback(streams[i], set_device_scalar, &factor));
    OK(ncclAllReduce(&in[i], &out[i], 1, ncclFloat, ops[i], comms[i], streams[i]));
    OK(ncclRedOpDestroy(ops[i], comms[i]));
  }
  for (int i = 0; i < RANKS; i++) OK(strataStreamSynchronize(streams[i]));
  for (int i = 0; i < RANKS; i++) CHECK(out[i] == 12);
  for (int i = 0; i < RANKS; i++) OK(strataStreamDestroy(streams[i]));
}

static void a_failure_in_the_background_is_the_last_error(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclUniqueId id;
  ncclComm_t same[2];
  OK(ncclGetUniqueId(&id));
  CHECK(ncclGroupEnd() == ncclInvalidUsage); /* An older error. */
  for (int i = 0; i < 2; i++) CHECK(ncclCommInitRankConfig(&same[i], 3, id, 1, &config) == ncclInProgress);
  CHECK(settled(same[0]) == ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(NULL), "rank 1 was given twice") != NULL);
  CHECK(settled(same[1]) == ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(NULL), "rank 1 was given twice") != NULL);
  for (int i = 0; i < 2; i++) OK(ncclCommAbort(same[i]));
}

int main(void) {
  every_rank_has_its_place();
  operations_act_at_the_end_of_the_group();
  messages_of_a_group_pass_each_other();
  an_error_in_a_group_drops_the_group();
  a_simulated_group_is_not_launched();
  making_and_using_do_not_mix();
  a_message_to_oneself_of_another_size_is_refused();
  a_communicator_destroyed_in_a_group_ends_after_its_operations();
  what_lies_in_its_place_takes_no_time();
  sum_of_ranks(comms, RANKS, NULL, 1);
  communicators_split();
  communicators_shrink();
  communicators_grow();
  streams_keep_order_and_do_not_hold_the_caller_up();
  an_operation_of_the_program_scales_once();
  a_factor_in_device_memory_is_read_when_the_operation_runs();
  nonblocking_communicators_tell_when_they_are_ready();
  a_failure_in_the_background_is_the_last_error();
  sum_of_ranks(comms, RANKS, NULL, 1);
  for (int i = 0; i < RANKS; i++) OK(ncclCommDestroy(comms[i]));
  return 0;
}
